from __future__ import annotations

import sys
from types import ModuleType

import pytest

from writing.conversions import read_shards, write_legacy, write_loose


@pytest.fixture
def loose(tmp_path):
    return write_loose(tmp_path / "loose")


def optimize(run, source, *more):
    return run("optimize-dataset", "--source", source, *more)


def test_loose_files_are_packed(run, loose, tmp_path):
    done = optimize(run, loose, "--destination", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert "5 of 5 samples packed into 1 shard" in done.text
    assert "samples with captions: 4" in done.text
    assert "all is packed" in done.text
    assert len(read_shards(tmp_path / "out" / "webshart")) == 5


def test_a_run_with_a_limit_says_how_to_go_on(run, loose, tmp_path):
    more = ["--destination", tmp_path / "out", "--max-shard-size-gb", "0.000003", "--max-shards", "2"]
    first = optimize(run, loose, *more)
    assert "2 of 5 samples packed into 2 shards" in first.text
    assert "run it again to go on" in first.text
    second = optimize(run, loose, *more, "--json").document
    assert (second["shards_created"], second["resumed"], second["next_shard_index"]) == (2, True, 4)


@pytest.mark.parametrize("option", ["--subfolder", "--source-subfolder"])
def test_every_option_is_taken_as_said(run, loose, tmp_path, option):
    more = [option, "a", "--output-prefix", "x", "--payload-extensions", "jpg, .png", "--no-image-geometry"]
    found = optimize(run, loose, "--destination", tmp_path / "out", *more, "--json").document
    assert (found["source"], found["output_prefix"]) == ({"kind": "local", "subfolder": "a"}, "x")
    assert found["payload_extensions"] == [".jpg", ".png"]
    rows = read_shards(tmp_path / "out" / "x")
    assert [name for name, _, _ in rows] == ["1.jpg", "2.png"]


def test_archives_are_packed_and_findings_are_shown(run, tmp_path):
    source = write_legacy(tmp_path / "in", {"a.tar": [("x_y.jpg", b"1"), ("x_y.jpg", b"2")]})
    done = optimize(run, source, "--destination", tmp_path / "out")
    assert "2 samples packed into 1 shard" in done.text
    assert "duplicate_member: 1 finding" in done.text
    assert "shard-00000.tar#a/x_y.jpg" in done.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "destination or push_to_hub is required"),
        (["--destination", "out", "--max-shard-size-gb", "0"], "must be greater than zero"),
        (["--destination", "out", "--payload-extensions", "xyz"], "matched: .xyz"),
        (["--destination", "out", "--output-prefix", ".."], "invalid repository path prefix"),
        (["--destination", "out", "--max-shards", "0"], "--max-shards"),
    ],
)
def test_wrong_usage_is_told_in_a_line_with_a_hint(run, loose, monkeypatch, options, message):
    monkeypatch.chdir(loose.parent)
    done = optimize(run, loose, *options)
    assert (done.code, done.out) == (2, b"")
    assert message in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err
    assert not (loose.parent / "out").exists()


def test_a_changed_source_and_a_missing_one_are_told_in_a_line(run, loose, tmp_path):
    optimize(run, loose, "--destination", tmp_path / "out")
    write_loose(loose, {"new.jpg": b"new"})
    done = optimize(run, loose, "--destination", tmp_path / "out")
    assert done.code == 3
    assert "changed fields: manifest_sha256, total_samples" in done.err
    assert optimize(run, tmp_path / "nowhere", "--destination", tmp_path / "out").code == 3


def test_a_sidecar_that_cannot_be_read_stops_or_is_counted(run, loose, tmp_path):
    write_loose(loose, {"a/2.json": b"{"})
    done = optimize(run, loose, "--destination", tmp_path / "out")
    assert done.code == 3
    assert "a/2.json" in done.err
    done = optimize(run, loose, "--destination", tmp_path / "out", "--on-error", "skip")
    assert done.code == 0
    assert "bad_json_sidecar: 1 finding" in done.text


def test_the_token_goes_to_the_hub_and_is_printed_nowhere(run, loose, monkeypatch):
    seen = []

    class HfApi:
        def __init__(self, token=None):
            seen.append(token)

        def create_repo(self, repo_id, **options):
            seen.append((repo_id, options["private"]))
            raise PermissionError(13, "refused")

    hub = ModuleType("huggingface_hub")
    hub.HfApi = HfApi
    hub.CommitOperationAdd = hub.hf_hub_download = hub.hf_hub_url = hub.get_hf_file_metadata = None
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    done = optimize(run, loose, "--push-to-hub", "me/data", "--private", "--hf-token", "hf_secret", "--debug")
    assert seen == ["hf_secret", ("me/data", True)]
    assert done.code == 3
    assert "hf_secret" not in done.text + done.err
