"""Uploads of conversions, with a stand-in for huggingface_hub that keeps repositories in memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shardset.errors import MissingExtraError, StateError
from shardset.writing.optimize import optimize_dataset
from writing.conversions import LIMIT, tree, write_loose

STATE = ".webshart-optimize-state.json"


class NotThereError(Exception):
    response = SimpleNamespace(status_code=404)


class Hub:
    """The Hub: files by path, for each commit its message and paths, and every call."""

    def __init__(self, folder):
        self.folder = folder
        self.files = {}
        self.commits = []
        self.calls = []
        self.broken = 0

    def module(self):
        """Return what is imported as huggingface_hub."""
        hub = self

        class HfApi:
            def __init__(self, token=None):
                hub.calls.append(("HfApi", token))

            def create_repo(self, repo_id, **options):
                hub.calls.append(("create_repo", repo_id, options))

            def file_exists(self, repo_id, path, **options):
                hub.calls.append(("file_exists", repo_id, path, options))
                if not hub.commits:
                    raise NotThereError
                return path in hub.files

            def create_commit(self, repo_id, *, operations, **options):
                hub.calls.append(("create_commit", repo_id, options))
                if len(hub.commits) + 1 == hub.broken:
                    raise ConnectionError("the line was cut")
                hub.files |= {operation.path_in_repo: operation.payload for operation in operations}
                hub.commits.append((options["commit_message"], [operation.path_in_repo for operation in operations]))

        class CommitOperationAdd:
            def __init__(self, path_in_repo, path_or_fileobj):
                self.path_in_repo, self.payload = path_in_repo, Path(path_or_fileobj).read_bytes()

        def hf_hub_download(repo_id, path, **options):
            hub.calls.append(("hf_hub_download", repo_id, path, options))
            place = hub.folder / "downloaded"
            place.write_bytes(hub.files[path])
            return str(place)

        module = ModuleType("huggingface_hub")
        module.HfApi, module.CommitOperationAdd, module.hf_hub_download = HfApi, CommitOperationAdd, hf_hub_download
        module.hf_hub_url = module.get_hf_file_metadata = None
        return module


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub.module())
    return hub


@pytest.fixture
def loose(tmp_path):
    return write_loose(tmp_path / "loose")


def push(source, **options):
    return optimize_dataset(source, push_to_hub="me/data", max_shard_size_bytes=LIMIT, **options)


def test_each_shard_goes_up_in_one_commit_with_its_index_and_the_state(hub, loose, tmp_path):
    result = push(loose, output_prefix="packed", hf_token="hf_secret", target_revision="next", private=True)
    expected = [
        (
            f"Add optimized webshart shard {number:05d}",
            [f"packed/shard-{number:05d}.tar", f"packed/shard-{number:05d}.json", f"packed/{STATE}"],
        )
        for number in range(5)
    ]
    assert hub.commits == expected
    where = {"repo_type": "dataset", "revision": "next", "token": "hf_secret"}
    assert hub.calls[:5] == [
        ("HfApi", "hf_secret"),
        ("create_repo", "me/data", {"repo_type": "dataset", "private": True, "exist_ok": True, "token": "hf_secret"}),
        ("file_exists", "me/data", f"packed/{STATE}", where),
        ("file_exists", "me/data", "packed/shard-00000.tar", where),
        ("file_exists", "me/data", "packed/shard-00000.json", where),
    ]
    assert hub.calls[5] == (
        "create_commit",
        "me/data",
        {"commit_message": "Add optimized webshart shard 00000", **where},
    )
    optimize_dataset(loose, destination=tmp_path / "local", output_prefix="packed", max_shard_size_bytes=LIMIT)
    assert hub.files == tree(tmp_path / "local")
    assert (result["status"], result["shards_created"], result["resumed"]) == ("complete", 5, False)


def test_the_token_is_in_no_file_and_no_result(hub, loose, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = push(loose)
    assert ("HfApi", "hf_secret") in hub.calls
    assert "hf_secret" not in json.dumps(result)
    assert not [path for path, payload in hub.files.items() if b"hf_secret" in payload]


def test_one_shard_at_a_time_is_on_the_disk_without_a_destination(hub, loose, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    seen = []
    push(loose, progress=lambda *_: seen.append(sorted(Path(path).name for path in tree(tmp_path / "temporary"))))
    assert max(map(len, seen)) == 1
    assert len(hub.commits) == 5
    assert tree(tmp_path / "temporary") == {}


def test_an_upload_that_breaks_off_is_gone_on_with(hub, loose):
    push(loose, output_prefix="whole")
    expected = {path.removeprefix("whole/"): payload for path, payload in hub.files.items() if STATE not in path}
    hub.commits.clear()
    hub.files.clear()
    hub.broken = 3
    with pytest.raises(ConnectionError):
        push(loose)
    assert len(hub.commits) == 2
    hub.broken = 0
    hub.calls.clear()
    result = push(loose)
    assert (result["resumed"], result["shards_created"]) == (True, 3)
    assert ("hf_hub_download", "me/data", f"webshart/{STATE}") in [call[:3] for call in hub.calls]
    found = {path.removeprefix("webshart/"): payload for path, payload in hub.files.items() if STATE not in path}
    assert found == expected
    assert push(loose)["shards_created"] == 0


def test_with_a_destination_too_the_state_of_the_hub_counts_and_no_shard_is_missing_here(hub, loose, tmp_path):
    hub.broken = 3
    with pytest.raises(ConnectionError):
        push(loose, destination=tmp_path / "here")
    assert (tmp_path / "here" / "webshart" / "shard-00002.tar").exists()  # before it is there, nobody says so
    hub.broken = 0
    push(loose, destination=tmp_path / "here")
    assert tree(tmp_path / "here") == hub.files


def test_shards_without_a_state_are_not_written_over(hub, loose):
    push(loose)
    del hub.files[f"webshart/{STATE}"]
    before = dict(hub.files)
    with pytest.raises(StateError, match="resume state is missing, in me/data"):
        push(loose)
    assert hub.files == before


def test_an_error_of_the_hub_other_than_missing_is_raised(hub, loose, monkeypatch):
    monkeypatch.setattr(NotThereError, "response", SimpleNamespace(status_code=500))
    with pytest.raises(NotThereError):
        push(loose)
    assert hub.commits == []


def test_without_huggingface_hub_the_extra_is_named(loose, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[hub\]"):
        push(loose)
