from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import pickle
import tempfile
import threading
import time
from pathlib import Path

import pytest

from shardset.errors import ChangedError, NotFoundError, RangeIgnoredError, TransferError
from shardset.storage import MemoryStore, ObjectInfo
from shardset.storage import cache_folder as folder_module
from shardset.storage import cache_reader as reader_module
from shardset.storage.cache import CachedStore
from shardset.storage.cache_upkeep import list_entries, verify
from storage.caching import PIECE, MadeStore, bytes_on_disk, files_of

A, B, C, D = (f"made://host/{name}/000.tar" for name in "abcd")
SIZE = 100_000
ROOM = SIZE + 1000  # an entry with what it says of itself


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def made(tmp_path):
    return MadeStore(tmp_path / "log", size=SIZE)


@pytest.fixture
def events():
    return []


@pytest.fixture
def cached(made, tmp_path, events):
    """Make a cache over `made`; a block of None caches whole objects."""

    def make(block=None, *, limit=100 * ROOM, **settings):
        return CachedStore(made, tmp_path / "cache", limit=limit, block=block, on_event=events.append, **settings)

    return make


def wait_until(is_so, seconds=60):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def _no_rest(monkeypatch):
    """Try again at once to cache what could not be cached."""
    monkeypatch.setattr(reader_module, "_REST", 0.0)
    monkeypatch.setattr(folder_module, "_REST", 0.0)


def kinds(events):
    return [event.kind for event in events]


# what is downloaded, and when


def test_a_whole_object_is_downloaded_once_at_its_first_read(cached, made):
    store = cached()
    reader = store.open(A)
    assert made.fetches() == []
    assert reader.read(10, 20) == made.bytes_of(A)[10:30]
    assert made.bytes_fetched() == SIZE
    assert reader.read(0, SIZE) == store.open(A).map() == made.bytes_of(A)
    assert made.bytes_fetched() == SIZE


def test_a_second_store_finds_what_the_first_one_cached(cached, made):
    cached().read(A, 0, 1)
    second = cached()
    assert second.read(A, 5, 10) == made.bytes_of(A)[5:15]
    assert made.bytes_fetched() == SIZE
    assert (second.stats().hits, second.stats().misses) == (1, 0)


def test_views_of_a_cached_object_are_views_of_its_map(cached, made):
    reader = cached().open(A)
    for view in (reader.view(3, 5), reader.map(), *reader.read_many([7, 90_000], [9, 10_000])):
        assert isinstance(view.obj, mmap.mmap)
        assert view.readonly
    assert reader.read_many([7, 3], [2, 0]) == [made.bytes_of(A)[7:9], b""]


def test_blocks_are_downloaded_as_they_are_read(cached, made):
    store = cached(block=10_000)
    reader = store.open(A)
    assert reader.map() is None
    assert reader.read(25_000, 100) == made.bytes_of(A)[25_000:25_100]
    assert made.fetches() == [(20_000, 10_000)]
    assert reader.read(29_990, 20) == made.bytes_of(A)[29_990:30_010]
    assert made.bytes_fetched() == 20_000
    assert reader.read(95_000, 5_000) == made.bytes_of(A)[95_000:]
    assert not store.is_cached(A)
    assert store.progress(A) == 30_000
    assert reader.read(0, SIZE) == made.bytes_of(A)
    assert made.bytes_fetched() == SIZE
    assert store.is_cached(A)


def test_a_view_within_a_block_is_of_its_map_and_across_blocks_a_copy(cached, made):
    reader = cached(block=10_000).open(A)
    inside, across = reader.read_many([20_000, 9_999], [10_000, 2])
    assert isinstance(inside.obj, mmap.mmap)
    assert across == made.bytes_of(A)[9_999:10_001]
    assert not isinstance(across.obj, mmap.mmap)


def test_missing_blocks_of_one_call_are_fetched_together(cached, made):
    made_pieces = cached(block=1_000)
    made_pieces.open(A).read(3_000, 8_000)
    assert made.fetches() == [(3_000, 8_000)]


def test_a_read_of_very_many_blocks_gives_copies_and_holds_none(cached, made):
    reader = cached(block=500).open(A)
    views = reader.read_many(list(range(0, SIZE, 500)), [500] * 200)
    assert b"".join(views) == made.bytes_of(A)
    assert not any(isinstance(view.obj, mmap.mmap) for view in views)


def test_nothing_is_asked_of_the_place_where_a_known_version_is_cached(cached, made):
    known = made.info(A)
    cached().read(A, 0, 1)
    made.fault = "offline"
    store = cached()
    assert store.open(A, known).read(0, SIZE) == made.bytes_of(A)
    assert store.is_cached(A, known)
    with pytest.raises(TransferError, match="no network"):
        store.open(A)
    with pytest.raises(TransferError, match="no network"):
        store.open(B, ObjectInfo(B, SIZE, "v1")).read(0, 1)


def test_a_known_version_that_is_neither_cached_nor_there_any_more_is_told(tmp_path):
    inner = MemoryStore()
    inner.write("memory://b/a", b"old")
    known = inner.info("memory://b/a")
    inner.write("memory://b/a", b"new")
    store = CachedStore(inner, tmp_path, limit=10_000)
    with pytest.raises(ChangedError):
        store.open("memory://b/a", known).read(0, 3)
    assert store.read("memory://b/a", 0, 3) == b"new"


def test_objects_of_one_name_do_not_meet(cached, made):
    store = cached()
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert store.read(B, 0, SIZE) == made.bytes_of(B)
    assert store.stats().entries == 2


def test_a_new_version_is_downloaded_and_the_old_one_stays_what_it_is(cached, made):
    store = cached()
    old, known = store.read(A, 0, SIZE), made.info(A)
    made.version = 2
    assert store.read(A, 0, SIZE) == made.bytes_of(A) != old
    assert store.open(A, known).read(0, SIZE) == old
    assert made.bytes_fetched() == 2 * SIZE


def test_an_object_without_a_version_is_not_cached(cached, made):
    store = cached()
    for made.identity in ("", "unknown"):
        assert store.read(A, 0, SIZE) == made.bytes_of(A)
    stats = store.stats()
    assert (stats.entries, stats.read_throughs, stats.too_big) == (0, 2, 0)


def test_a_url_that_is_signed_anew_names_the_same_object(cached, tmp_path, events):
    inner = cached().store
    store = cached()
    urls = [f"https://me:pw{n}@bucket.example/a.tar?version=3&X-Amz-Signature=s3cr3t{n}&X-Amz-Date={n}" for n in (1, 2)]
    for url in urls:
        store.open(url).read(0, 1)
    assert inner.bytes_fetched() == SIZE
    [entry] = list_entries(tmp_path / "cache")
    assert entry.info.url.startswith("https://bucket.example/a.tar?version=3&")
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / "cache").iterdir())
    for secret in ("s3cr3t", "pw1"):
        assert secret not in str(events)
        assert secret.encode() not in on_disk
    store.open(urls[0].replace("version=3", "version=4")).read(0, 1)
    assert store.stats().entries == 2


# room


def test_the_entry_whose_last_use_is_longest_ago_goes_first(cached, monkeypatch):
    monkeypatch.setattr(folder_module, "_TOUCH_EVERY", 0.0)
    store = cached(limit=3 * ROOM)
    for url in (A, B, C):
        store.read(url, 0, 1)
    store.read(A, 0, 1)
    store.read(D, 0, 1)
    assert [store.is_cached(url) for url in (A, B, C, D)] == [True, False, True, True]


def test_an_entry_that_was_used_since_the_last_removal_stays(cached, monkeypatch):
    monkeypatch.setattr(folder_module, "_TOUCH_EVERY", 0.0)
    store = cached(limit=3 * ROOM)
    for url in (A, B, C, D):
        store.read(url, 0, 1)
    store.close()
    store.read(B, 0, 1)
    store.read(A, 0, 1)
    assert [store.is_cached(url) for url in (A, B, C, D)] == [True, True, False, True]


def test_no_more_is_removed_than_must_be(cached, events):
    store = cached(limit=3 * ROOM)
    for url in (A, B, C, D):
        store.read(url, 0, 1)
    stats = store.stats()
    assert (stats.entries, stats.evictions) == (3, 1)
    [gone] = [event for event in events if event.kind == "evicted"]
    assert (gone.url, gone.bytes) == (A, stats.bytes_evicted)


@pytest.mark.usefixtures("_no_rest")
@pytest.mark.parametrize("block", [None, 10_000])
def test_what_is_in_use_is_never_removed(cached, made, block):
    store = cached(block, limit=ROOM + 1000)
    view = store.open(A).view(0, 5_000)
    [held] = [entry for entry in list_entries(store.folder) if entry.is_in_use and entry.info.offset == 0]
    for url in (B, C, D):
        assert store.read(url, 0, SIZE) == made.bytes_of(url)
    assert view == made.bytes_of(A)[:5_000]
    assert held.name in [entry.name for entry in list_entries(store.folder)]
    assert store.stats().bytes_used <= store.limit
    del view
    store.close()
    for url in (B, C, D):
        store.read(url, 0, SIZE)
    assert held.name not in [entry.name for entry in list_entries(store.folder)]


def test_what_finds_no_room_is_read_from_its_place_and_counted_and_cached_later(cached, made, events, monkeypatch):
    store = cached(limit=ROOM)
    view = store.open(A).view(0, 1)
    reader = store.open(B)
    assert reader.read(5, 10) == made.bytes_of(B)[5:15]
    assert reader.read_many([5], [10]) == [made.bytes_of(B)[5:15]]
    assert reader.map() is None
    assert made.fetches(B) == [(5, 10), (5, 10)]
    assert store.stats().read_throughs == 1
    assert events[-1].kind == "read_through"
    assert events[-1].message.startswith("no_room")
    assert bytes(view) == made.bytes_of(A)[:1]
    del view
    store.close()
    monkeypatch.setattr(reader_module, "_REST", 0.0)
    reader = store.open(B)
    wait_until(lambda: reader.read(0, SIZE) == made.bytes_of(B) and store.is_cached(B))


def test_what_is_larger_than_the_limit_removes_nothing(cached, made, events):
    store = cached(limit=ROOM)
    store.read(A, 0, 1)
    made.size = 2 * SIZE
    assert store.read(B, 0, 2 * SIZE) == made.bytes_of(B)
    made.size = SIZE
    assert store.is_cached(A)
    assert store.stats().too_big == 1
    assert "evicted" not in kinds(events)


def test_views_outlive_their_entry(cached, made):
    store = cached()
    reader = store.open(A)
    view = reader.view(0, SIZE)
    store.here().folder.drop(files_of(store.folder, ".block")[0].stem)
    del reader
    store.close()
    assert view == made.bytes_of(A)


def test_the_bytes_that_are_told_are_those_on_disk(cached):
    store = cached(block=7_000, limit=3 * ROOM)
    for url in (A, B, C, D):
        store.read(url, 0, SIZE)
        stats = store.stats()
        assert stats.bytes_used == bytes_on_disk(store.folder) <= stats.limit
        assert stats.entries == len(files_of(store.folder, ".block"))
    assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []


def test_foreign_files_in_the_folder_are_let_alone(cached, made):
    store = cached(limit=ROOM)
    store.folder.mkdir()
    (store.folder / "notes.txt").write_text("mine")
    for url in (A, B):
        assert store.read(url, 0, SIZE) == made.bytes_of(url)
    assert (store.folder / "notes.txt").read_text() == "mine"
    assert verify(store.folder).checked == 1


# faults


@pytest.mark.parametrize("block", [None, 10_000])
@pytest.mark.parametrize("call", ["posix_fallocate", "write", "fsync"])
def test_a_full_disk_is_no_error_but_counted_and_leaves_nothing(cached, made, monkeypatch, block, call):
    store = cached(block)
    store.read(B, 0, 1)  # so that there is a cache
    before = bytes_on_disk(store.folder)
    real = getattr(os, call)

    def full(handle, *arguments):
        # The count in the state file still fits.
        if call == "write" and len(arguments[0]) < 1000:
            return real(handle, *arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert store.stats().read_throughs >= 1
    assert bytes_on_disk(store.folder) == before
    assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []
    monkeypatch.setattr(os, call, real)
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert store.is_cached(A)


def test_a_folder_that_cannot_be_made_is_no_error_but_counted(cached, made):
    store = cached()
    store.folder.write_text("in the way")
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert store.stats().read_throughs == 1


@pytest.mark.parametrize("block", [None, 10_000])
def test_an_entry_that_was_cut_is_noticed_before_it_is_served(cached, made, events, block, caplog):
    store = cached(block)
    store.read(A, 0, SIZE)
    store.close()
    for path in files_of(store.folder, ".block"):
        os.truncate(path, path.stat().st_size // 2)
    with caplog.at_level(logging.WARNING):
        assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert "damaged and dropped" in caplog.text
    assert made.bytes_fetched() == 2 * SIZE
    assert store.stats().damaged == kinds(events).count("damaged") == (1 if block is None else 10)
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert made.bytes_fetched() == 2 * SIZE
    assert store.stats().bytes_used == bytes_on_disk(store.folder)


def test_an_entry_that_is_cut_while_it_is_open_is_noticed(cached, made):
    store = cached()
    reader = store.open(A)
    reader.read(0, 1)
    [path] = files_of(store.folder, ".block")
    os.truncate(path, 10)
    assert reader.read(0, SIZE) == made.bytes_of(A)
    assert store.stats().damaged == 1


def test_an_entry_that_was_replaced_by_other_bytes_is_noticed(cached, made):
    store = cached()
    store.read(A, 0, 1)
    store.close()
    [path] = files_of(store.folder, ".block")
    for garbage in (b"", b"x", bytes(SIZE + 500), b"shardset", b"[]\x02\0\0\0shardset", b"{}\xff\xff\xff\xffshardset"):
        path.write_bytes(garbage)
        assert store.read(A, 0, SIZE) == made.bytes_of(A)
        store.close()
    assert store.stats().damaged == 6


def test_a_flipped_byte_is_found_by_verify_and_downloaded_again(cached, made):
    store = cached()
    for url in (A, B):
        store.read(url, 0, 1)
    store.close()
    assert verify(store.folder).damaged == ()
    [name] = [entry.name for entry in list_entries(store.folder) if entry.info.url == A]
    with (store.folder / f"{name}.block").open("r+b") as file:
        file.seek(50_000)
        byte = file.read(1)[0]
        file.seek(50_000)
        file.write(bytes([byte ^ 4]))
    done = verify(store.folder)
    assert [entry.info.url for entry in done.damaged] == [A]
    assert done.checked == 2
    assert not store.is_cached(A)
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert verify(store.folder).damaged == ()


@pytest.mark.parametrize("kind", ["md5", "sha256"])
@pytest.mark.parametrize("block", [None, 10 * SIZE])
def test_bytes_that_are_not_those_that_their_place_states_are_not_kept(cached, made, kind, block):
    made.digest, made.fault = kind, "wrong"
    store = cached(block)
    with pytest.raises(TransferError, match=f"{kind}:{hashlib.new(kind, made.bytes_of(A)).hexdigest()}"):
        store.read(A, 0, 1)
    assert store.stats().failures == 1
    assert store.stats().entries == 0
    assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []
    made.fault = ""
    assert store.read(A, 0, SIZE) == made.bytes_of(A)


@pytest.mark.parametrize("block", [None, 50_000])
def test_a_download_that_breaks_is_an_error_and_leaves_nothing(cached, made, events, block):
    made.fault = "broken"
    store = cached(block)
    with pytest.raises(TransferError, match="the connection broke"):
        store.read(A, 0, 50_000)
    assert store.stats().failures == 1
    assert store.stats().in_flight == 0
    assert events[-1].kind == "download_failed"
    assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []
    made.fault = ""
    assert store.read(A, 0, SIZE) == made.bytes_of(A)


def test_an_interrupted_download_leaves_nothing(cached, made, monkeypatch):
    store = cached()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(MadeStore, "_fetch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.read(A, 0, 1)
    monkeypatch.undo()
    assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []
    assert store.read(A, 0, SIZE) == made.bytes_of(A)


@pytest.mark.parametrize("block", [None, 10_000])
def test_a_place_that_ignores_ranges_is_downloaded_whole(cached, made, block):
    made.fault = "no_ranges"
    store = cached(block)
    assert store.read(A, 20_000, 30_000) == made.bytes_of(A)[20_000:50_000]
    assert store.open(A).view(0, SIZE) == made.bytes_of(A)
    assert made.bytes_fetched() == SIZE
    stats = store.stats()
    assert (stats.entries, stats.failures) == (1, 0)
    store.close()
    store.prepare(B)
    wait_until(lambda: store.is_cached(B))


@pytest.mark.parametrize("block", [None, 10_000])
def test_a_place_that_ignores_ranges_and_gives_no_whole_is_an_error(cached, made, block):
    made.fault = "no_ranges_no_stream"
    store = cached(block)
    with pytest.raises(RangeIgnoredError):
        store.read(A, 20_000, 30_000)
    assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []


@pytest.fixture
def open_folder():
    """A folder that everybody may look into, unlike those that pytest makes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.name != "posix", reason="needs the rights of POSIX")
def test_a_folder_that_may_only_be_read_is_read(open_folder):
    made = MadeStore(open_folder / "log", size=SIZE)
    store = CachedStore(made, open_folder / "cache", limit=100 * ROOM)
    store.read(A, 0, 1)
    store.close()
    store.folder.chmod(0o555)
    made.log.chmod(0o666)
    child = os.fork()
    if not child:
        code = 1
        try:
            if not os.getuid():
                os.setuid(65534)  # root may write anywhere
            is_read = store.read(A, 0, SIZE) == made.bytes_of(A) and store.read(B, 5, 10) == made.bytes_of(B)[5:15]
            stats = store.stats()
            code = 0 if is_read and (stats.hits, stats.read_throughs, stats.entries) == (1, 1, 1) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made.fetches(B) == [(5, 10)]
    store.folder.chmod(0o755)


# in the background


def test_prepare_downloads_in_the_background(cached, made, events):
    made.delay = 0.05
    store = cached()
    assert store.prepare(A)
    assert not store.prepare(A)
    assert store.is_downloading(A)
    assert not store.is_downloading(B)
    assert store.progress(B) is None
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert made.bytes_fetched() == SIZE
    assert store.is_cached(A)
    wait_until(lambda: not store.is_downloading(A))
    assert not store.prepare(A)
    assert store.progress(A) == SIZE
    assert kinds(events)[:2] == ["download_started", "download_finished"]


def test_prepare_of_an_object_in_blocks_downloads_what_is_missing(cached, made):
    store = cached(block=10_000)
    store.read(A, 50_000, 10)
    store.prepare(A)
    wait_until(lambda: store.is_cached(A))
    assert made.bytes_fetched() == SIZE


def test_so_many_objects_are_downloaded_at_once_as_is_allowed(cached, made):
    made.delay = 0.03
    store = cached(parallel_downloads=2)
    for url in (A, B, C, D):
        store.prepare(url)
    most = 0
    while not all(store.is_cached(url) for url in (A, B, C, D)):
        most = max(most, len(files_of(store.folder, ".part")))
        assert store.stats().in_flight <= 2
    assert most == 2


def test_a_read_does_not_wait_behind_other_downloads(cached, made):
    made.delay = 0.05
    store = cached(parallel_downloads=1)
    for url in (A, B, C, D):
        store.prepare(url)
    assert store.read(D, 0, 1) == made.bytes_of(D)[:1]
    assert not store.is_cached(C)


def test_reading_a_block_does_not_end_the_download_of_the_others(cached, made):
    made.delay = 0.01
    store = cached(block=10_000, parallel_downloads=1)
    for url in (A, B):
        store.prepare(url)
    assert store.read(B, 50_000, 1) == made.bytes_of(B)[50_000:50_001]
    wait_until(lambda: store.is_cached(B))
    assert made.bytes_fetched() == 2 * SIZE


def test_a_failure_in_the_background_is_raised_once_by_the_read_that_needs_it(cached, made):
    made.fault = "broken"
    store = cached()
    store.prepare(A)
    wait_until(lambda: store.stats().failures == 1 and not store.is_downloading(A))
    made.fault = ""
    assert store.read(B, 0, SIZE) == made.bytes_of(B)
    with pytest.raises(TransferError, match="the connection broke"):
        store.read(A, 0, 1)
    assert store.read(A, 0, SIZE) == made.bytes_of(A)


def test_a_failure_that_has_come_right_is_forgotten(cached, made):
    made.fault = "broken"
    store = cached()
    store.prepare(A)
    wait_until(lambda: store.stats().failures == 1 and not store.is_downloading(A))
    made.fault = ""
    assert store.prepare(A)
    wait_until(lambda: store.is_cached(A))
    assert store.read(A, 0, SIZE) == made.bytes_of(A)


def test_prepare_of_what_is_not_there_is_an_error_at_once(cached):
    with pytest.raises(NotFoundError):
        cached().prepare("made://host/missing")


def test_closing_gives_up_what_is_downloaded_in_the_background(cached, made):
    made.delay = 0.05
    store = cached(parallel_downloads=1)
    for url in (A, B):
        store.prepare(url)
    wait_until(lambda: made.fetches(A))
    store.close()
    wait_until(lambda: not files_of(store.folder, ".part") and not files_of(store.folder, ".lock"))
    assert not store.is_cached(A)
    assert not store.is_cached(B)
    assert store.stats().failures == 0
    made.delay = 0.0
    assert store.read(B, 0, SIZE) == made.bytes_of(B)
    assert store.prepare(A)
    wait_until(lambda: store.is_cached(A))


def test_threads_that_want_the_same_object_download_it_once(cached, made):
    made.delay = 0.005
    store = cached()
    threads = [threading.Thread(target=store.read, args=(A, 0, 1)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.bytes_fetched() == SIZE
    stats = store.stats()
    assert stats.misses == 1
    assert stats.waits + stats.hits == 5


def test_a_store_starts_no_thread_and_makes_no_folder_before_it_must(cached):
    before = {*threading.enumerate()}
    store = cached()
    store.open(A)
    store.stats()
    assert not store.is_cached(A)
    assert {*threading.enumerate()} <= before
    assert not store.folder.exists()


# the store itself


def test_a_pickled_store_has_everything_but_the_listener(cached, made):
    store = cached(block=10_000, limit=5 * ROOM, parallel_downloads=7)
    store.read(A, 0, 1)
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.folder, copy.limit, copy.block, copy.parallel_downloads) == (store.folder, 5 * ROOM, 10_000, 7)
    assert copy.on_event is None
    assert copy.read(A, 0, 1) == made.bytes_of(A)[:1]
    assert copy.stats().hits == 1
    with pytest.raises(TypeError, match="pickle the store"):
        pickle.dumps(store.open(A))


def test_a_listener_that_fails_breaks_nothing(made, tmp_path, caplog):
    def fail(_):
        raise ZeroDivisionError

    store = CachedStore(made, tmp_path / "cache", limit=2 * ROOM, on_event=fail)
    assert store.read(A, 0, SIZE) == made.bytes_of(A)
    assert "on_event failed" in caplog.text


def test_a_listener_may_ask_the_store(made, tmp_path):
    seen = []
    store = CachedStore(made, tmp_path / "cache", limit=ROOM, on_event=lambda _: seen.append(store.stats().in_flight))
    for url in (A, B):
        store.read(url, 0, 1)
    assert set(seen) == {0, 1}


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"block": 0}, {"parallel_downloads": 0}])
def test_numbers_must_be_positive(cached, wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        cached(**{"block": None, **wrong})


def test_events_and_stats_tell_what_was_done(cached, events):
    store = cached()
    for _ in range(3):
        store.open(A).read(5, 10)
    assert kinds(events) == ["download_started", "download_finished"]
    assert events[1].bytes == SIZE
    assert events[1].seconds > 0
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.bytes_downloaded, stats.bytes_served) == (2, 1, SIZE, 30)
    assert stats.limit == store.limit


def test_downloads_come_in_pieces_that_are_read_ahead(cached, made):
    cached().read(A, 0, 1)
    assert sorted(made.fetches()) == [(at, min(PIECE, SIZE - at)) for at in range(0, SIZE, PIECE)]
