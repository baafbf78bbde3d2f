from __future__ import annotations

import json

import pytest

from cli.running import run_at_terminal
from shards import replace_file, write_dataset


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def extract(run, folder, *more):
    return run("extract-metadata", "--source", folder, "--destination", folder.parent / "out", *more)


def test_an_index_is_written_for_each_shard(run, folder, tmp_path):
    done = extract(run, folder)
    assert (done.code, done.err) == (0, "")
    assert "3 shards indexed into" in done.text
    assert "indexes written: 3" in done.text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"shard-{n:04d}.json" for n in range(3)]


def test_geometry_range_workers_and_checkpoints_are_taken_as_said(run, folder, tmp_path):
    more = ["--range", "1,3", "--checkpoint-dir", tmp_path / "done", "--max-workers", "2", "--include-image-geometry"]
    first = extract(run, folder, *more, "--json").document
    assert first == {"num_shards": 2, "indexes_written": 2, "shards_skipped": 0, "findings": []}
    assert json.loads((tmp_path / "out" / "shard-0001.json").read_text())["includes_image_geometry"] is True
    again = extract(run, folder, *more)
    assert "indexes written: 0; 2 shards done before" in again.text


@pytest.mark.parametrize("wrong", ["1", "a,b", "3,1", "-1,2", "1,2,3"])
def test_a_range_that_is_none_is_wrong_usage(run, folder, wrong):
    done = extract(run, folder, "--range", wrong)
    assert done.code == 2
    assert "--range" in done.err
    assert "hint: shardset extract-metadata --help" in done.err


def test_damage_stops_or_is_counted(run, folder):
    path = folder / "shard-0001.tar"
    replace_file(path, path.read_bytes()[:515])
    done = extract(run, folder)
    assert (done.code, done.out) == (3, b"")
    assert "shard-0001.tar at byte" in done.err
    assert "Traceback" not in done.err
    counted = extract(run, folder, "--on-error", "skip")
    assert counted.code == 0
    assert "truncated_payload: 1 finding" in counted.text
    findings = extract(run, folder, "--on-error", "skip", "--json").document["findings"]
    assert [finding["count"] for finding in findings if finding["code"] == "truncated_payload"] == [1]


def test_a_source_that_is_not_there_and_missing_options_are_told_in_a_line(run, tmp_path):
    done = run("extract-metadata", "--source", tmp_path / "nowhere", "--destination", tmp_path / "out")
    assert (done.code, done.err.count("\n")) == (3, 2)
    done = run("extract-metadata", "--source", tmp_path)
    assert done.code == 2
    assert "--destination" in done.err


def test_the_token_is_printed_nowhere(run, folder, tmp_path):
    for source in (folder, tmp_path / "nowhere"):
        done = extract(run, source, "--hf-token", "hf_secret", "-v", "--debug")
        assert "hf_secret" not in done.text + done.err


@pytest.mark.slow
def test_progress_is_shown_at_a_terminal(folder):
    code, shown = run_at_terminal("extract-metadata", "--source", folder, "--destination", folder.parent / "out")
    assert code == 0
    assert "indexes written: 3" in shown
