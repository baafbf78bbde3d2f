from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from shards import write_dataset
from shardset.tasks import extract_indexes


@pytest.fixture
def folder(tmp_path):
    """Shards with text sidecars alone, and indexes that know nothing of them."""
    write_dataset(tmp_path / "data" / "part", fields=("jpg", "txt"))
    extract_indexes(tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.json"):
        document = json.loads(path.read_text())
        for entry in document["files"].values():
            entry.pop("captions", None)
        path.write_text(json.dumps(document))
    return tmp_path / "data"


def optimize(run, folder, *more):
    return run("optimize-captions", "--source", folder, "--destination", folder.parent / "out", *more)


def test_captions_go_into_the_indexes(run, folder, tmp_path):
    done = optimize(run, folder)
    assert (done.code, done.err) == (0, "")
    assert "12 captions from 3 shards written into" in done.text
    files = json.loads((tmp_path / "out" / "part" / "shard-0000.json").read_text())["files"]
    assert files["00000000.jpg"]["captions"].startswith("00000000.txt")


@pytest.mark.parametrize("option", ["--subfolder", "--source-subfolder"])
def test_a_subfolder_and_a_range_are_taken_as_said(run, folder, tmp_path, option):
    found = optimize(run, folder, option, "part", "--range", "0,2", "--metadata", folder / "part", "--json").document
    assert found == {
        "num_shards": 2,
        "captioned_samples": 8,
        "coalesced_samples": 8,
        "files": [str(tmp_path / "out" / f"shard-000{number}.json") for number in range(2)],
        "commit": None,
        "findings": [],
    }


def test_the_options_of_a_cache_are_there_though_local_shards_need_none(run, folder, tmp_path):
    more = ["--shard-cache-dir", tmp_path / "cache", "--shard-cache-gb", "2.5", "--parallel-downloads", "2"]
    assert optimize(run, folder, *more).code == 0
    assert not (tmp_path / "cache").exists()


def test_indexes_are_uploaded_if_asked(run, folder, tmp_path, monkeypatch):
    calls = []

    class HfApi:
        def __init__(self, token=None):
            calls.append(token)

        def upload_folder(self, **options):
            calls.append(options)
            return "https://example.org/commit/1"

    hub = ModuleType("huggingface_hub")
    hub.HfApi = HfApi
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    more = ["--push-to-hub", "me/data", "--path-in-repo", "meta", "--revision", "next", "--hf-token", "hf_secret"]
    done = optimize(run, folder, *more)
    assert done.code == 0
    assert "uploaded: https://example.org/commit/1" in done.text
    assert "hf_secret" not in done.text + done.err
    token, options = calls
    assert token == "hf_secret"
    wanted = {"folder_path": str(tmp_path / "out"), "repo_id": "me/data", "path_in_repo": "meta", "revision": "next"}
    assert options.items() >= wanted.items()


def test_without_huggingface_hub_the_extra_is_named(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = optimize(run, folder, "--push-to-hub", "me/data")
    assert done.code == 3
    assert "pip install 'shardset[hub]'" in done.err


def test_a_malformed_index_is_named(run, folder):
    (folder / "part" / "shard-0001.json").write_text('{"files": {"a.jpg": 3}}')
    done = optimize(run, folder)
    assert (done.code, done.err.count("Traceback")) == (3, 0)
    assert "shard-0001.json" in done.err
