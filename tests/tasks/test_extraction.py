from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import DATA
from killing import TESTS, kill_at_every_step
from sessions import interrupt_session, start_session, tells_of_interrupt, wait_until_gone
from shards import (
    list_tree,
    make_members,
    private_cache,  # noqa: F401 - the fixture is autouse
    replace_file,
    tar_bytes,
    write_dataset,
    write_shard,
)
from shardset.errors import AccessError, IndexFileError, NotFoundError, TruncatedError
from shardset.policy import Policy
from shardset.storage import MemoryStore
from shardset.tasks import extract_indexes, extraction

LINUX = sys.platform == "linux"  # tells at once that a process is dead
PHOTOS = DATA / "webshart"


@pytest.fixture
def folder(tmp_path):
    """Three shards and, one further down, another of the same name as the first."""
    write_dataset(tmp_path / "data", shards=3, samples=3)
    write_shard(tmp_path / "data" / "sub" / "shard-0000.tar", make_members(2, start=100))
    return tmp_path / "data"


def tree(folder):
    """Return all files but the temporary ones that a killed run leaves."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def temporaries(folder):
    """Return the temporary files that killed runs have left."""
    return [path for path in folder.rglob("*") if path.suffix == ".tmp"]


def files_of(path):
    return json.loads(path.read_text())["files"]


# ---- what is written, and where


def test_every_shard_gets_an_index_where_the_shard_lies_and_nothing_else_is_written(folder, tmp_path):
    before = list_tree(folder)
    result = extract_indexes(folder, tmp_path / "out")
    assert list_tree(folder) == before
    names = {f"shard-{number:04d}.json" for number in range(3)}
    assert set(tree(tmp_path / "out")) == {*names, "sub/shard-0000.json"}
    assert (result.num_shards, result.indexes_written, result.shards_skipped) == (4, 4, 0)
    assert "00000100.jpg" in files_of(tmp_path / "out" / "sub" / "shard-0000.json")
    assert "00000000.jpg" in files_of(tmp_path / "out" / "shard-0000.json")


def test_by_default_indexes_go_beside_their_shards(folder):
    extract_indexes(folder)
    assert (folder / "sub" / "shard-0000.json").exists()
    assert not (folder / ".shardset").exists()


def test_a_single_tar_is_a_source(folder, tmp_path):
    extract_indexes(folder / "shard-0001.tar", tmp_path / "out")
    assert set(tree(tmp_path / "out")) == {"shard-0001.json"}


def test_a_destination_may_be_a_bare_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    extract_indexes(".", "out")
    assert len(tree(folder / "out")) == 4


def test_two_runs_write_the_same_bytes(folder, tmp_path):
    for name in ("one", "two"):
        extract_indexes(folder, tmp_path / name, geometry=True)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    with ThreadPoolExecutor(3) as executor:
        extract_indexes(folder, tmp_path / "three", geometry=True, executor=executor)
    assert tree(tmp_path / "three") == tree(tmp_path / "one")


def test_a_range_is_half_open_over_the_shards_in_order(folder, tmp_path):
    for number, (start, end) in enumerate([(0, 2), (2, 9), (1, 1), (7, 9)]):
        extract_indexes(folder, tmp_path / str(number), shard_range=(start, end))
    found = [sorted(tree(tmp_path / str(number))) for number in range(4)]
    assert found == [["shard-0000.json", "shard-0001.json"], ["shard-0002.json", "sub/shard-0000.json"], [], []]


@pytest.mark.parametrize("wrong", [(-1, 2), (2, 1)])
def test_what_is_no_range_is_refused(folder, tmp_path, wrong):
    with pytest.raises(ValueError, match="start must be >= 0 and end must be >= start"):
        extract_indexes(folder, tmp_path / "out", shard_range=wrong)


def test_two_shards_that_would_have_one_index_are_refused(folder, tmp_path):
    shutil.copy(folder / "shard-0000.tar", folder / "shard-0000.TAR")
    with pytest.raises(ValueError, match=r"shard-0000\.TAR and shard-0000\.tar would have one index"):
        extract_indexes(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_web_server_is_no_place_for_indexes(folder):
    with pytest.raises(AccessError, match="read only"):
        extract_indexes(folder, "https://example.org/indexes")


def test_indexes_of_shards_in_memory_go_there(folder):
    store = MemoryStore()
    store.write("memory://a/s.tar", (folder / "shard-0000.tar").read_bytes())
    assert extract_indexes("memory://a", store=store).indexes_written == 1
    assert b"00000000.jpg" in store.read("memory://a/s.json", 0, store.info("memory://a/s.json").size)


def test_progress_ends_with_all(folder, tmp_path):
    seen = []
    extract_indexes(folder, tmp_path / "out", progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("source", ["nowhere", "empty"])
def test_a_source_without_shards_is_an_error(tmp_path, source):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        extract_indexes(tmp_path / source, tmp_path / "out")


# ---- damage


@pytest.mark.parametrize("length", [0, 100, 515, 1200])
def test_a_truncated_tar_never_succeeds_by_itself(folder, tmp_path, length):
    path = folder / "shard-0001.tar"
    replace_file(path, path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"shard-0001\.tar"):
        extract_indexes(folder, tmp_path / "out", checkpoints=tmp_path / "done")
    result = extract_indexes(folder, tmp_path / "out", checkpoints=tmp_path / "done", policy=Policy(on_error="skip"))
    (finding,) = [
        finding
        for finding in result.report
        if finding[0] in {"empty_file", "truncated_header", "not_tar", "truncated_payload"}
    ]
    assert finding[1] == 1
    assert "shard-0001.tar" in str(finding[2][0])
    # Nothing says that it is done, so that the next run meets it again.
    assert not (tmp_path / "done" / "shard-0001.json").exists()
    with pytest.raises(ValueError, match=r"shard-0001\.tar"):
        extract_indexes(folder, tmp_path / "out", checkpoints=tmp_path / "done")


def test_a_shard_cut_in_its_last_member_has_an_index_up_to_there_if_asked(tmp_path):
    payload = tar_bytes(make_members(3))
    (tmp_path / "cut.tar").write_bytes(payload[:4615])
    with pytest.raises(TruncatedError):
        extract_indexes(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    extract_indexes(tmp_path, tmp_path / "out", policy=Policy(on_error="skip"))
    document = json.loads((tmp_path / "out" / "cut.json").read_text())
    assert all(entry["offset"] + entry["length"] <= 4615 for entry in document["files"].values())


def test_a_json_file_that_is_no_index_is_neither_written_over_nor_passed_by(folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard-0001.json").write_text('{"mine": 1}')
    with pytest.raises(IndexFileError, match="no index stands in its place"):
        extract_indexes(folder, tmp_path / "out")
    result = extract_indexes(folder, tmp_path / "out", policy=Policy(on_error="skip"))
    assert result.report.counts["not_an_index"] == 1
    assert (tmp_path / "out" / "shard-0001.json").read_text() == '{"mine": 1}'


# ---- again


def test_a_second_run_keeps_what_people_wrote_into_the_indexes(folder, tmp_path):
    extract_indexes(folder, tmp_path / "out")
    path = tmp_path / "out" / "shard-0000.json"
    document = json.loads(path.read_text())
    document["files"]["00000000.jpg"]["captions"] = "edited"
    path.write_text(json.dumps(document))
    before = tree(tmp_path / "out")
    result = extract_indexes(folder, tmp_path / "out")
    assert (result.indexes_written, result.report.counts) == (0, {"sidecar_kept": 4})
    assert tree(tmp_path / "out") == before
    assert extract_indexes(folder, tmp_path / "out", force=True).indexes_written == 4
    assert files_of(path)["00000000.jpg"]["captions"] == "00000000.json"


@pytest.mark.parametrize("form", ["photos-00000.json", "photos-00000.list.json", "photos-00000.cheesechaser.json"])
def test_an_index_of_another_tool_gets_the_pixel_sizes_that_it_lacks_and_loses_nothing(tmp_path, form):
    shutil.copy(PHOTOS / "photos-00000.tar", tmp_path / "photos-00000.tar")
    document = json.loads((PHOTOS / form).read_text())
    entries = document["files"].values() if isinstance(document["files"], dict) else document["files"]
    for entry in entries:
        for key in ("width", "height", "aspect"):
            entry.pop(key, None)
        entry["mine"] = 1
    document |= {"includes_image_geometry": False, "curator": "Ada"}
    place = tmp_path / "photos-00000.json"
    place.write_text(json.dumps(document))
    before = place.read_bytes()
    assert extract_indexes(tmp_path).indexes_written == 0
    assert place.read_bytes() == before
    assert extract_indexes(tmp_path, geometry=True).indexes_written == 1
    after = json.loads(place.read_text())
    entries = after["files"].values() if isinstance(after["files"], dict) else after["files"]
    assert (after["curator"], {entry["mine"] for entry in entries}) == ("Ada", {1})
    assert sum("width" in entry for entry in entries) >= 10
    assert extract_indexes(tmp_path).indexes_written == 0  # asked for less, it loses none of it
    assert extract_indexes(tmp_path, geometry=True).indexes_written == 0


def test_a_stale_index_is_written_anew(folder, tmp_path):
    extract_indexes(folder, tmp_path / "out")
    replace_file(folder / "shard-0001.tar", tar_bytes(make_members(3, start=50)))
    assert extract_indexes(folder, tmp_path / "out").indexes_written == 1
    assert "00000050.jpg" in files_of(tmp_path / "out" / "shard-0001.json")


# ---- checkpoints


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """Extract with checkpoints; gives the result and the names of the shards that were opened."""
    opened = []
    write_index = extraction.write_index

    def counted(task):
        opened.append(task.shard.name)
        return write_index(task)

    monkeypatch.setattr(extraction, "write_index", counted)

    def call(**options):
        opened.clear()
        result = extract_indexes(folder, tmp_path / "out", checkpoints=tmp_path / "done", **options)
        return result, [*opened]

    return call


ALL = ["shard-0000", "shard-0001", "shard-0002", "sub/shard-0000"]


def test_shards_that_are_done_are_not_opened_again(run, tmp_path):
    assert run()[1] == ALL
    before = tree(tmp_path / "out")
    result, opened = run()
    assert (result.shards_skipped, result.indexes_written, opened) == (4, 0, [])
    assert tree(tmp_path / "out") == before
    assert set(tree(tmp_path / "done")) == {f"{name}.json" for name in ALL}


def test_a_checkpoint_has_the_keys_of_webshart_and_no_path_of_this_machine(run, tmp_path):
    run()
    checkpoint = json.loads((tmp_path / "done" / "shard-0001.json").read_text())
    size = (tmp_path / "data" / "shard-0001.tar").stat().st_size
    assert {key: value for key, value in checkpoint.items() if key != "shardset"} == {
        "shard_name": "shard-0001",
        "status": "complete",
        "offset": size,
        "files_processed": 9,
    }
    assert str(tmp_path) not in json.dumps(checkpoint)


def test_a_checkpoint_whose_index_is_gone_or_edited_or_whose_shard_changed_is_not_trusted(run, folder, tmp_path):
    run()
    (tmp_path / "out" / "shard-0000.json").unlink()
    replace_file(folder / "shard-0001.tar", tar_bytes(make_members(3, start=50)))
    replace_file(tmp_path / "out" / "shard-0002.json", b"{}")
    result, opened = run(policy=Policy(on_error="skip"))
    assert (opened, result.indexes_written) == (ALL[:3], 2)
    assert "00000050.jpg" in files_of(tmp_path / "out" / "shard-0001.json")


def test_more_than_before_is_done_though_there_are_checkpoints(run, tmp_path):
    run()
    assert run(geometry=True)[1] == ALL
    assert run(geometry=True)[1] == []
    assert run()[1] == []
    assert run(force=True)[1] == ALL
    assert json.loads((tmp_path / "out" / "shard-0000.json").read_text())["includes_image_geometry"] is False


@pytest.mark.parametrize("status", ["complete", "inprogress", {"failed": "x"}])
def test_a_checkpoint_of_webshart_leaves_out_no_entry(run, folder, tmp_path, status):
    content = {"shard_name": "shard-0001", "status": status, "offset": 1536, "files_processed": 0}
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "shard-0001.json").write_text(json.dumps(content))
    assert run()[1] == ALL
    assert len(files_of(tmp_path / "out" / "shard-0001.json")) == 9
    assert folder


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"shardset": 1}', b'{"shardset": {"version": 1}}'])
def test_a_checkpoint_that_makes_no_sense_is_not_trusted(run, tmp_path, content):
    run()
    (tmp_path / "done" / "shard-0001.json").write_bytes(content)
    assert run()[1] == ["shard-0001"]
    assert run()[1] == []


def test_shares_of_several_machines_make_up_the_whole(run, folder, tmp_path):
    extract_indexes(folder, tmp_path / "whole")
    for start in range(4):
        run(shard_range=(start, start + 1))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert run()[1] == []


# ---- killed


def extract(folder, source):
    """Do the work that is killed."""
    extract_indexes(source, folder / "out", geometry=True, checkpoints=folder / "done")


def indexes(folder):
    return {name: payload for name, payload in tree(folder).items() if name.startswith("out/")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, and killed by signals")
def test_a_run_killed_at_any_step_or_byte_is_finished_by_the_next(folder, tmp_path):
    extract(tmp_path / "expected", str(folder))
    (tmp_path / "killed").mkdir()
    sizes = [0, 1, 50, 200, 600, 1500]
    work = "tasks.test_extraction:extract"
    killed = kill_at_every_step(work, {"source": str(folder)}, tmp_path / "killed", sizes=sizes)
    assert killed > 30
    expected = indexes(tmp_path / "expected")
    assert [path for path in (tmp_path / "killed").iterdir() if indexes(path) != expected] == []
    for path in (tmp_path / "killed").iterdir():
        result = extract_indexes(folder, path / "out", geometry=True, checkpoints=path / "done")
        assert result.shards_skipped == 4
        assert not LINUX or not temporaries(path)  # the run behind the killed one has removed them


PROGRAM = """
import sys
sys.path.insert(0, {source!r})
from shardset.tasks import extract_indexes, pool
pool.SMALL = 0
print("running", flush=True)
extract_indexes(sys.argv[1], sys.argv[2], geometry=True, max_workers=2, checkpoints=sys.argv[3])
print("done", flush=True)
"""


def start(tmp_path, folder):
    """Start a program that extracts with two processes, and that nobody may import without running it again."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(source=str(TESTS.parent / "src")))
    arguments = [folder, tmp_path / "out", tmp_path / "done"]
    return start_session([sys.executable, script, *arguments])


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once_though_it_has_worker_processes(folder, tmp_path):
    with start(tmp_path, folder) as run:
        out, err = run.communicate(timeout=60)
    assert (out, err, run.returncode) == ("running\ndone\n", "", 0)
    extract_indexes(folder, tmp_path / "expected", geometry=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_takes_its_workers_along_and_is_finished_by_the_next(tmp_path, how):
    folder = tmp_path / "data"
    write_dataset(folder, shards=60, samples=40)
    extract_indexes(folder, tmp_path / "expected", geometry=True)
    stopped = 0
    for number in range(6):
        with start(tmp_path, folder) as run:
            assert run.stdout.readline() == "running\n"
            if how == signal.SIGINT:
                time.sleep(0.1 * number)
                interrupt_session(run)
            else:
                time.sleep(0.25 + 0.1 * number)
                run.kill()
            out, err = run.communicate(timeout=60)
        stopped += run.returncode != 0
        if how == signal.SIGINT and run.returncode:
            # What comes as the interpreter ends, after all is done, ends it without a word.
            assert tells_of_interrupt(err) or (out.endswith("done\n") and not err), err
        wait_until_gone(run.pid)
        if how == signal.SIGINT:
            shutil.rmtree(tmp_path / "done", ignore_errors=True)
    assert stopped
    extract_indexes(folder, tmp_path / "out", geometry=True, checkpoints=tmp_path / "done")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")
    assert not LINUX or not temporaries(tmp_path)
