from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import DATA
from shards import (
    index_and_read,
    list_tree,
    make_members,
    private_cache,  # noqa: F401 - the fixture is autouse
    read_all,
    replace_file,
    send,
    tar_bytes,
    write_dataset,
    write_shard,
)
from shardset.dataset.catalogs import cache_root
from shardset.dataset.opening import discover_dataset, open_dataset
from shardset.errors import IndexFileError, StorageError, TruncatedError
from shardset.index import catalog_writer
from shardset.index.catalog_files import MANIFEST_NAME
from shardset.policy import Policy
from shardset.storage import LocalStore, MemoryStore
from shardset.tasks import index_dataset
from storage.counting import CountingStore

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def folder(tmp_path):
    """Four shards of three samples each."""
    write_dataset(tmp_path / "data", shards=4, samples=3)
    return tmp_path / "data"


@pytest.fixture
def notices(caplog):
    """A function that returns the warnings logged since it was called last."""

    def notices():
        found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        return found

    return notices


def opened(source, **options):
    """Make a dataset with its catalog, and say which files were read to their end for it."""
    store = CountingStore(LocalStore())
    dataset = discover_dataset(source, store=store, **options)
    len(dataset)
    # A few headers are looked at to see whether an index fits; a scan goes through to the end.
    ends = [(Path(url), offset + length) for url, offset, length in store.ranges]
    return dataset, sorted({path.name for path, end in ends if path.is_file() and end == path.stat().st_size})


def numbers(*parts):
    return [f"{number:08d}" for part in parts for number in part]


def keys(dataset):
    return [sample.key for sample in dataset]


# ---- made, found again, made anew


def test_a_catalog_is_made_in_the_cache_and_found_there(folder):
    before = list_tree(folder)
    dataset, read = opened(folder)
    assert read == [f"shard-{n:04d}.tar" for n in range(4)]
    assert dataset.catalog.folder.parent == cache_root() / "catalogs"
    again, read = opened(folder)
    assert read == []
    assert again.catalog.folder == dataset.catalog.folder
    assert read_all(again) == read_all(dataset)
    assert list_tree(folder) == before


def test_nothing_is_written_beside_the_data_by_anything_that_reads(folder):
    before = list_tree(folder)
    dataset = discover_dataset(folder)
    read_all(dataset)
    list(dataset.iter_dicts())
    dataset.read_samples([1, 2])
    dataset.to_arrow()
    dataset.open_shard(1).read_file(0)
    dataset.list_samples_in_shard(0)
    assert list_tree(folder) == before


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("SHARDSET_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "shardset"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "shardset"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_root() == Path.home() / "Library" / "Caches" / "shardset"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_root() == tmp_path / "local" / "shardset" / "cache"


@pytest.mark.parametrize("change", ["another size", "another time", "another file of the same size"])
def test_a_shard_that_changed_is_read_again_and_the_others_are_taken_over(folder, change):
    opened(folder)
    path = folder / "shard-0002.tar"
    old = path.stat()
    expected = numbers(range(12))
    if change == "another time":
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    elif change == "another size":
        write_shard(path, make_members(9, start=50))
        expected = numbers(range(6), range(50, 59), range(9, 12))
    else:
        other = write_shard(folder / "other", make_members(3, start=50))
        assert other.stat().st_size == old.st_size
        os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
        other.replace(path)
        expected = numbers(range(6), range(50, 53), range(9, 12))
    dataset, read = opened(folder)
    assert read == ["shard-0002.tar"]
    assert keys(dataset) == expected
    assert opened(folder)[1] == []
    assert [sample["txt"].split()[0].decode() for sample in dataset] == [f"{key}.txt" for key in expected]


def test_shards_that_come_and_go_leave_the_others_as_they_are(folder):
    first, _ = opened(folder)
    write_shard(folder / "a-new.tar", make_members(2, start=90))
    dataset, read = opened(folder)
    assert read == ["a-new.tar"]
    assert keys(dataset) == numbers(range(90, 92), range(12))
    (folder / "shard-0001.tar").unlink()
    (folder / "shard-0003.tar").rename(folder / "b.tar")
    dataset, read = opened(folder)
    assert read == ["b.tar"]
    assert keys(dataset) == numbers(range(90, 92), range(9, 12), range(3), range(6, 9))
    assert dataset.catalog.folder == first.catalog.folder


def test_a_part_of_a_folder_has_a_catalog_of_its_own(folder):
    whole, _ = opened(folder)
    part, _ = opened([folder / "shard-0001.tar", folder / "shard-0003.tar"])
    assert part.catalog.folder != whole.catalog.folder
    assert keys(part) == numbers(range(3, 6), range(9, 12))
    assert opened(folder)[1] == []
    assert opened([folder / "shard-0001.tar", folder / "shard-0003.tar"])[1] == []
    assert opened(f"{folder}/shard-000{{1,3}}.tar")[1] == []
    assert keys(opened([folder / "shard-0003.tar", folder / "shard-0001.tar"])[0]) == numbers(range(9, 12), range(3, 6))


def test_groups_of_a_catalog_are_taken_over_one_by_one(folder, monkeypatch):
    monkeypatch.setattr(catalog_writer, "GROUP_SHARDS", 1)
    dataset, _ = opened(folder)
    before = list_tree(dataset.catalog.folder)
    assert len([name for name in before if name.startswith("samples")]) == 4
    os.utime(folder / "shard-0002.tar", (1, 1))
    dataset, read = opened(folder)
    assert read == ["shard-0002.tar"]
    after = list_tree(dataset.catalog.folder)
    named = [group.samples for group in dataset.catalog.manifest.groups]
    assert len([name for name in named if before.get(name) == after[name]]) == 3
    assert keys(dataset) == numbers(range(12))


def test_a_store_in_memory_is_known_by_what_is_in_it():
    stores = [MemoryStore(), MemoryStore()]
    for number, store in enumerate(stores):
        store.write("memory://b/a.tar", tar_bytes(make_members(2, start=10 * number)))
    datasets = [discover_dataset("memory://b", store=store) for store in stores]
    assert [keys(dataset) for dataset in datasets] == [numbers(range(2)), numbers(range(10, 12))]
    assert datasets[1][1]["txt"].startswith(b"00000011.txt")


# ---- beside the data


def test_a_catalog_beside_the_data_is_preferred(folder, notices):
    index_dataset(folder)
    for source in (folder, f"{folder}/", f"{folder}/*.tar", f"{folder}/shard-{{0000..0003}}.tar"):
        dataset, read = opened(source)
        assert read == []
        assert dataset.catalog.folder == folder / ".shardset"
    assert notices() == []


def test_a_stale_catalog_beside_the_data_is_left_alone_with_one_notice(folder, notices):
    index_dataset(folder, sidecars=False)
    beside = list_tree(folder / ".shardset")
    replace_file(folder / "shard-0002.tar", tar_bytes(make_members(5, start=50)))
    dataset, read = opened(folder)
    assert read == ["shard-0002.tar"]
    assert keys(dataset) == numbers(range(6), range(50, 55), range(9, 12))
    assert len(notices()) == 1
    assert dataset.report.counts == {"stale_catalog": 1}
    assert dataset.report.places("stale_catalog")[0].shard == str(folder / ".shardset")
    assert list_tree(folder / ".shardset") == beside
    assert dataset.catalog.folder.parent == cache_root() / "catalogs"
    # Each dataset says once what it does not trust, and works from the cache.
    again, read = opened(folder)
    assert read == []
    assert keys(again) == keys(dataset)
    (notice,) = notices()
    assert "shardset index" in notice


def test_a_shard_more_or_less_makes_a_catalog_beside_a_folder_stale(folder, notices):
    index_dataset(folder, sidecars=False)
    write_shard(folder / "z.tar", make_members(1, start=99))
    dataset, read = opened(folder)
    assert (read, len(dataset)) == (["z.tar"], 13)
    assert len(notices()) == 1


def test_a_catalog_of_the_folder_serves_a_shard_of_it_without_a_notice(folder, notices):
    index_dataset(folder, sidecars=False)
    dataset, read = opened(folder / "shard-0001.tar")
    assert read == []
    assert keys(dataset) == numbers(range(3, 6))
    assert dataset.report.counts == {}
    assert notices() == []
    replace_file(folder / "shard-0001.tar", tar_bytes(make_members(1)))
    dataset, read = opened(folder / "shard-0001.tar")
    assert read == ["shard-0001.tar"]
    assert dataset.report.counts == {"stale_catalog": 1}
    assert len(notices()) == 1


def test_a_catalog_in_the_folder_of_the_indexes_is_used_and_known_to_be_of_another_place_when_the_data_moves(
    folder, tmp_path
):
    meta = tmp_path / "meta"
    index_dataset(folder, destination=meta)
    dataset, read = opened(folder, metadata=meta)
    assert read == []
    assert dataset.catalog.folder == meta / ".shardset"
    moved = folder.rename(tmp_path / "moved")
    dataset, read = opened(moved, metadata=meta)
    assert read == []
    assert dataset.catalog.folder.parent == cache_root() / "catalogs"
    assert dataset[4].shard == str(moved / "shard-0001.tar")
    assert read_all(dataset)[0][0] == numbers(range(1))[0]


def test_datasets_with_the_indexes_of_different_folders_are_kept_apart(folder, tmp_path):
    for name in ("one", "two"):
        index_dataset(folder, destination=tmp_path / name)
        (tmp_path / name / ".shardset" / MANIFEST_NAME).unlink()
        for path in (tmp_path / name).glob("*.json"):
            document = json.loads(path.read_text())
            for entry in document["files"].values():
                if entry["path"].endswith(".jpg"):
                    entry["captions"] = f"from {name}"
            path.write_text(json.dumps(document))
    datasets = {name: opened(folder, metadata=tmp_path / name)[0] for name in ("one", "two")}
    assert {name: dataset[0].caption for name, dataset in datasets.items()} == {"one": "from one", "two": "from two"}
    assert opened(folder)[0][0].caption is None
    index_dataset(folder, captions=False)
    assert opened(folder)[0].catalog.folder == folder / ".shardset"
    assert opened(folder, metadata=tmp_path / "two")[0][0].caption == "from two"


def test_a_catalog_beside_data_that_are_reached_by_a_link_is_found(folder, tmp_path):
    index_dataset(folder)
    (tmp_path / "link").symlink_to(folder)
    dataset, read = opened(tmp_path / "link")
    assert read == []
    assert dataset.catalog.folder == tmp_path / "link" / ".shardset"
    assert keys(dataset) == numbers(range(12))
    assert dataset.shard_url(0) == str(tmp_path / "link" / "shard-0000.tar")


def test_a_catalog_that_lacks_what_is_asked_for_is_not_enough(folder):
    index_dataset(folder, captions=False, sidecars=False)
    assert opened(folder)[1] == []
    result = index_dataset(folder, captions=True, sidecars=False)
    assert result.shards_reused == 0
    assert discover_dataset(folder)[0].caption == "00000000.json"
    assert index_dataset(folder, captions=False, sidecars=False).shards_reused == 4


# ---- broken catalogs


def catalog_files(dataset):
    folder = dataset.catalog.folder
    return {path.name.partition("-")[0].partition(".")[0]: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        *(
            (which, how)
            for which in ("catalog", "samples", "shards", "others")
            for how in ("missing", "cut", "garbage")
        ),
        ("catalog", "another version"),
    ],
)
@pytest.mark.parametrize("where", ["beside", "in the cache"])
def test_a_broken_catalog_is_never_trusted_and_mended_where_it_may_be(folder, notices, which, damage, where):
    write_shard(folder / "odd.tar", [("README", b"r"), ("a.txt", b"1")])
    if where == "beside":
        index_dataset(folder, sidecars=False)
    dataset, _ = opened(folder)
    expected = read_all(dataset)
    path = catalog_files(dataset)[which]
    raw = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "another version":
        path.write_bytes(raw.replace(b'"version": 1', b'"version": 7'))
    else:
        path.write_bytes({"cut": raw[: len(raw) // 2], "garbage": b"\xff\0garbage" * 99}[damage])
    dataset, read = opened(folder)
    assert read_all(dataset) == expected
    assert read == ["odd.tar", *(f"shard-{n:04d}.tar" for n in range(4))]
    is_missing = which == "catalog" and damage == "missing"
    assert len(notices()) == (0 if is_missing else 1)
    assert dataset.report.counts == ({} if is_missing else {"bad_catalog": 1})
    dataset.to_arrow()
    # Once more: what could be mended is, and a folder of data is not written to.
    dataset, read = opened(folder)
    assert read == []
    assert read_all(dataset) == expected
    if where == "beside":
        index_dataset(folder, sidecars=False)
        dataset, _ = opened(folder)
        assert dataset.catalog.folder == folder / ".shardset"
    assert read_all(dataset) == expected
    assert dataset.report.counts in ({}, {"bad_catalog": 1})


def test_a_file_that_vanishes_from_an_open_catalog_is_a_typed_error(folder):
    dataset = discover_dataset(folder)
    expected = read_all(dataset)
    lazy = open_dataset(dataset.catalog.folder, store=LocalStore())
    for path in dataset.catalog.folder.glob("*.arrow"):
        path.unlink()
    assert read_all(dataset) == expected  # it has its files open
    assert len(lazy) == 12
    with pytest.raises(IndexFileError, match="No such file"):
        lazy[0]


# ---- where writing fails


def test_a_cache_that_cannot_be_written_is_a_typed_error_with_a_hint(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="the catalog cannot be written") as caught:
        len(discover_dataset(folder))
    assert "SHARDSET_CACHE" in caught.value.hint
    assert str(tmp_path / "file") in caught.value.url


FULL_DISK = """
import resource, signal, sys
from shardset import StorageError, discover_dataset
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (0, 500, 5000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        len(discover_dataset(sys.argv[1]))
    except StorageError as error:
        print(error.url)
"""


@pytest.mark.slow
def test_a_full_disk_is_a_typed_error_and_leaves_the_old_catalog(folder):
    dataset, _ = opened(folder)
    before = list_tree(dataset.catalog.folder)
    write_shard(folder / "more.tar", make_members(400))
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "SHARDSET_CACHE": str(cache_root())}
    command = [sys.executable, "-c", FULL_DISK, str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [str(dataset.catalog.folder)] * 3
    assert list_tree(dataset.catalog.folder) == before
    assert len(opened(folder)[0]) == 412


# ---- several at once, and killed


@pytest.mark.slow
def test_processes_may_index_one_folder_at_once(folder):
    expected = read_all(discover_dataset(folder))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shards", "shardset.dataset.dataset"])
    for path in cache_root().glob("catalogs/*/*"):
        path.unlink()
    queue = context.Queue()
    arguments = (queue, index_and_read, str(folder), str(cache_root()))
    processes = [context.Process(target=send, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=120) for _ in processes] == [expected] * 3
    for process in processes:
        process.join(60)
    assert opened(folder)[1] == []


KILLED = """
import os, sys, time
from shardset import discover_dataset
from shardset.index import catalog_writer
catalog_writer.GROUP_SHARDS = 3  # and so there are many files to be killed between
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            len(discover_dataset(sys.argv[1]))
        finally:
            os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no kill -9")
def test_a_run_that_is_killed_leaves_the_old_catalog_or_the_new_one(tmp_path):
    folder, rng = tmp_path / "data", random.Random(11)
    write_dataset(folder, shards=30, samples=40)
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "SHARDSET_CACHE": str(cache_root())}
    command = [sys.executable, "-c", KILLED, str(folder)]
    killed = 0
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nurse:
        for attempt in range(15):
            if attempt:
                replace_file(folder / f"shard-{attempt:04d}.tar", tar_bytes(make_members(41, start=1000 * attempt)))
            nurse.stdin.write("go\n")
            nurse.stdin.flush()
            child = int(nurse.stdout.readline())
            time.sleep(rng.uniform(0, 0.12) if attempt else 0.02)  # the first has the most to do
            with contextlib.suppress(ProcessLookupError):  # it may have been quick
                os.kill(child, signal.SIGKILL)
            assert nurse.stdout.readline() == "ended\n"
            manifests = list(cache_root().glob("catalogs/*/catalog.json"))
            for path in manifests:  # whichever it is, it is whole
                for group in json.loads(path.read_text())["groups"]:
                    assert all((path.parent / name).exists() for name in (group["samples"], group["shards"]))
            killed += any(cache_root().glob("catalogs/*/.*.tmp")) or not manifests
            if attempt % 3 == 2:  # the next run repairs it, and knows the shards as they are
                dataset = discover_dataset(folder)
                assert len(dataset) == 30 * 40 + attempt
                assert dataset.report.counts == {}
                assert [s.key for s in dataset if s.shard_index == attempt] == numbers(
                    range(1000 * attempt, 1000 * attempt + 41)
                )
        nurse.stdin.close()
    assert killed


def test_damage_that_was_let_pass_is_not_taken_over_in_silence(folder):
    os.truncate(folder / "shard-0001.tar", 7 * 1024 + 515)
    skip = Policy(on_error="skip")
    assert len(discover_dataset(folder, policy=skip)) == 12
    write_shard(folder / "z.tar", make_members(1, start=99))  # so that the catalog is made anew, mostly of old parts
    with pytest.raises(TruncatedError) as caught:
        len(discover_dataset(folder))
    assert caught.value.shard == str(folder / "shard-0001.tar")
    dataset = discover_dataset(folder, policy=skip)
    assert len(dataset) == 13
    assert dataset.report.counts == {"truncated_payload": 1}


def test_damage_that_an_index_beside_the_shard_knows_of_raises_too(folder):
    os.truncate(folder / "shard-0001.tar", 7 * 1024 + 515)
    index_dataset(folder, policy=Policy(on_error="skip"))
    for path in (folder / ".shardset").iterdir():
        path.unlink()
    with pytest.raises(TruncatedError):
        len(discover_dataset(folder))
    with pytest.raises(TruncatedError):
        discover_dataset(folder).list_files_in_shard(1)
    assert len(discover_dataset(folder, policy=Policy(on_error="skip"))) == 12


# ---- indexes beside the shards


def test_headers_of_a_shard_with_a_good_index_are_not_read(folder):
    index_dataset(folder)
    expected = read_all(discover_dataset(folder))
    for path in (folder / ".shardset").iterdir():
        path.unlink()
    dataset, read = opened(folder)
    assert read == [f"shard-{n:04d}.json" for n in range(4)]
    assert read_all(dataset) == expected
    assert dataset.report.counts == {}
    assert dataset[0].caption == "00000000.json"


@pytest.mark.parametrize("damage", ["stale", "malformed", "no index", "empty", "folder"])
def test_an_index_that_is_not_good_is_passed_over_with_a_notice(folder, notices, damage):
    index_dataset(folder)
    for path in (folder / ".shardset").iterdir():
        path.unlink()
    path, shard = folder / "shard-0002.json", folder / "shard-0002.tar"
    count = 3
    if damage == "stale":
        count = 20
        write_shard(shard, make_members(count, start=50))
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"malformed": b'{"files": {', "no index": b'{"a": 1}', "empty": b""}[damage])
    dataset, read = opened(folder)
    assert "shard-0002.tar" in read
    assert "shard-0001.tar" not in read
    assert len(dataset) == 9 + count
    assert dataset.report.counts == {"bad_index": 1}
    assert dataset.report.places("bad_index")[0].shard == str(shard)
    (notice,) = notices()
    assert "shard-0002.json" in notice
    assert all(sample.read() for sample in dataset)


@pytest.mark.parametrize("form", ["json", "list.json", "cheesechaser.json"])
def test_an_index_of_another_tool_gives_what_the_headers_give(tmp_path, form):
    for name in ("bare", "indexed"):
        (tmp_path / name).mkdir()
        shutil.copy(DATA / "webshart" / "photos-00000.tar", tmp_path / name)
    shutil.copy(DATA / "webshart" / f"photos-00000.{form}", tmp_path / "indexed" / "photos-00000.json")
    bare, _ = opened(tmp_path / "bare")
    indexed, read = opened(tmp_path / "indexed")
    assert read == ["photos-00000.json"]
    assert read_all(indexed) == read_all(bare)
    assert [sample.names for sample in indexed] == [sample.names for sample in bare]
    assert indexed.list_samples_in_shard(0) == bare.list_samples_in_shard(0)


def test_an_index_is_looked_for_where_the_metadata_are(folder, tmp_path):
    index_dataset(folder, destination=tmp_path / "meta")
    for path in (tmp_path / "meta" / ".shardset").iterdir():
        path.unlink()
    dataset, read = opened(folder, metadata=tmp_path / "meta")
    assert read == [f"shard-{n:04d}.json" for n in range(4)]
    assert dataset[0].caption == "00000000.json"
    assert opened(folder, metadata=str(tmp_path / "meta"))[1] == []


def test_an_index_of_a_shard_that_was_written_again_at_the_same_size_is_passed_over(folder, notices):
    index_dataset(folder)
    for path in (folder / ".shardset").iterdir():
        path.unlink()
    shard = folder / "shard-0002.tar"
    size = shard.stat().st_size
    write_shard(shard, make_members(3, start=70))
    assert shard.stat().st_size == size
    dataset, read = opened(folder)
    assert "shard-0002.tar" in read
    assert keys(dataset) == numbers(range(6), range(70, 73), range(9, 12))
    assert dataset.report.counts == {"bad_index": 1}
    assert "stale" in notices()[0]


@pytest.mark.parametrize("count", [0, 2])
def test_an_index_of_a_shard_that_was_added_to_at_the_same_size_is_passed_over(tmp_path, count):
    shard = write_shard(tmp_path / "a.tar", make_members(count))
    size = shard.stat().st_size
    index_dataset(tmp_path)
    shutil.rmtree(tmp_path / ".shardset")
    write_shard(shard, make_members(count + 1))
    assert shard.stat().st_size == size  # the new sample stands where padding stood
    assert keys(discover_dataset(tmp_path)) == numbers(range(count + 1))
