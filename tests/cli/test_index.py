from __future__ import annotations

import json

import pytest

from cli.running import PHOTOS, run_at_terminal, run_process
from shards import list_tree, read_samples, write_dataset
from shardset.dataset.opening import discover_dataset


def test_a_sidecar_index_and_a_catalog_are_written_beside_the_shards(run, tmp_path):
    shards = write_dataset(tmp_path)
    done = run("index", tmp_path)
    assert done.code == 0
    assert "3 shards indexed: 12 samples in 36 files" in done.text
    assert f"next: shardset ls {tmp_path}" in done.text
    for shard in shards:
        files = json.loads(shard.with_suffix(".json").read_bytes())["files"]
        expected = {part.name: part for sample in read_samples(shard) for part in sample.parts}
        assert {name: (entry["offset"], entry["length"]) for name, entry in files.items()} == {
            name: (part.offset, len(part.payload)) for name, part in expected.items()
        }
    assert (tmp_path / ".shardset" / "catalog.json").exists()


def test_geometry_and_captions_are_read_as_asked(run, photos):
    run("index", photos)
    dataset = discover_dataset(photos)
    assert (dataset[1].size, dataset[1].caption) == (None, "a rocket on its launch pad under a clear sky")
    run("index", photos, "--geometry", "--no-captions", "--force")
    dataset = discover_dataset(photos)
    assert (dataset[1].size, dataset[1].caption) == ((640, 427), None)


def test_a_destination_leaves_the_source_as_it_is(run, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    write_dataset(source)
    before = list_tree(source)
    assert run("index", source, "--destination", target).code == 0
    assert list_tree(source) == before
    assert sorted(path.name for path in target.glob("*.json")) == [f"shard-{n:04d}.json" for n in range(3)]
    assert (target / ".shardset" / "catalog.json").exists()


def test_without_sidecars_the_catalog_alone_is_written(run, tmp_path):
    write_dataset(tmp_path)
    done = run("index", tmp_path, "--no-sidecars", "--json")
    assert done.document["sidecars_written"] == 0
    assert not list(tmp_path.glob("*.json"))
    assert (tmp_path / ".shardset" / "catalog.json").exists()


def test_what_did_not_change_is_taken_over_unless_forced(run, tmp_path):
    write_dataset(tmp_path)
    first = run("index", tmp_path, "--json").document
    assert (first["sidecars_written"], first["shards_reused"]) == (3, 0)
    again = run("index", tmp_path, "--json").document
    assert (again["sidecars_written"], again["shards_reused"]) == (0, 3)
    forced = run("index", tmp_path, "--json", "--force").document
    assert (forced["sidecars_written"], forced["shards_reused"]) == (3, 0)


def test_several_sources_become_one_catalog(run, tmp_path):
    write_dataset(tmp_path / "a")
    write_dataset(tmp_path / "b", shards=1)
    done = run("index", tmp_path / "a", tmp_path / "b", "--json").document
    assert (done["num_shards"], done["num_samples"]) == (4, 16)


def test_damage_stops_it_with_exit_code_3_and_the_byte(run, tmp_path):
    shards = write_dataset(tmp_path)
    shards[1].write_bytes(shards[1].read_bytes()[: 7 * 1024 + 100])
    done = run("index", tmp_path)
    assert (done.code, done.out) == (3, b"")
    assert f"{shards[1]} at byte {7 * 1024}" in done.err
    assert "hint: the shard was cut short" in done.err
    assert not (tmp_path / ".shardset" / "catalog.json").exists()


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_damage_is_passed_over_on_request_and_counted(run, tmp_path, action):
    shards = write_dataset(tmp_path)
    shards[1].write_bytes(shards[1].read_bytes()[: 7 * 1024 + 100])
    done = run("index", tmp_path, "--on-error", action, "--json")
    assert done.code == 0
    assert done.document["num_samples"] == 11
    [finding] = done.document["findings"]
    assert (finding["code"], finding["count"]) == ("truncated_header", 1)
    assert finding["places"][0]["shard"] == str(shards[1])
    assert finding["places"][0]["offset"] == 7 * 1024
    assert ("warning: skipped" in done.err) == (action == "warn")


def test_findings_are_summed_up_with_their_first_places(run, hostile):
    done = run("index", hostile)
    assert done.code == 0
    assert "repeated_key: 1 finding" in done.text
    assert "apart.jpg" in done.text
    assert "\x1b" not in done.text


def test_a_file_that_is_no_index_is_not_written_over_unless_forced(run, photos):
    other = photos / PHOTOS.with_suffix(".json").name
    other.write_text('{"mine": true}')
    done = run("index", photos, "--json")
    assert done.document["sidecars_written"] == 0
    assert [finding["code"] for finding in done.document["findings"]] == ["not_an_index"]
    assert other.read_text() == '{"mine": true}'
    assert "--force" in done.document["findings"][0]["places"][0]["message"]
    assert run("index", photos, "--force").code == 0
    assert "files" in json.loads(other.read_bytes())


@pytest.mark.slow
def test_worker_processes_give_the_same_catalog(tmp_path):
    write_dataset(tmp_path)
    alone = run_process("index", tmp_path, "--workers", 0, "--json", "--force")
    trees = [path.read_bytes() for path in sorted(tmp_path.rglob("*.json"))]
    together = run_process("index", tmp_path, "--workers", 2, "--json", "--force")
    assert alone.document == together.document
    assert trees == [path.read_bytes() for path in sorted(tmp_path.rglob("*.json"))]


@pytest.mark.slow
def test_damage_in_a_worker_process_is_told_like_any_other(tmp_path):
    shards = write_dataset(tmp_path)
    shards[1].write_bytes(shards[1].read_bytes()[: 7 * 1024 + 100])
    done = run_process("index", tmp_path, "--workers", 2)
    assert done.code == 3
    assert done.err.startswith("shardset: ")
    assert len(done.err.splitlines()) == 2
    assert f"{shards[1]} at byte {7 * 1024}" in done.err


@pytest.mark.slow
def test_progress_is_shown_at_a_terminal_and_not_with_quiet(tmp_path):
    write_dataset(tmp_path)
    _, shown = run_at_terminal("index", tmp_path)
    assert "indexing" in shown
    _, shown = run_at_terminal("index", tmp_path, "--force", "--quiet")
    assert "indexing" not in shown
    assert "3 shards indexed" in shown


def test_a_folder_that_cannot_be_written_is_an_error_with_the_place(run, tmp_path):
    write_dataset(tmp_path / "data")
    (tmp_path / "file").write_text("in the way")
    done = run("index", tmp_path / "data", "--destination", tmp_path / "file" / "below")
    assert done.code in {3, 4}
    assert "file/below" in done.err
    assert "Traceback" not in done.err
