from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from shardset.errors import TransferError
from shardset.files import lock_file
from shardset.storage.cache import CachedStore
from shardset.storage.cache_entry import EntryInfo, entry_name, pack_footer
from shardset.storage.cache_files import STATE_BYTES, NotCachedError
from shardset.storage.cache_folder import CacheFolder
from storage.caching import MadeStore, bytes_on_disk, files_of

SIZE = 1000
ENTRY = len(pack_footer(EntryInfo("made://host/0", "v1", SIZE, 0, SIZE))) + SIZE


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def make(tmp_path):
    return lambda entries=10: CacheFolder(tmp_path / "cache", STATE_BYTES + entries * ENTRY)


def begin(folder, number, **more):
    """Claim an entry and begin to write it."""
    info = EntryInfo(f"made://host/{number}", "v1", SIZE, 0, SIZE)
    name = entry_name(info.url, info.identity, SIZE, 0, SIZE)
    claim = folder.claim(name)
    settings = {"stated": None, "let_go": lambda: None, "removed": [], **more}
    try:
        return folder.begin(claim, name, info, **settings)
    except NotCachedError:
        claim.release(remove=True)
        raise


def publish(folder, number):
    """Publish an entry, and return its name."""
    part = begin(folder, number)
    part.write(memoryview(bytes([number]) * SIZE))
    part.publish()
    part.close()
    part.discard()  # does nothing any more
    return part.name


def counted(folder):
    """Return what the state file says."""
    return int((folder.folder / "state").read_text())


def test_the_file_of_an_entry_has_its_full_size_from_the_first_moment(make):
    folder = make()
    part = begin(folder, 1)
    [file] = files_of(folder.folder, ".part")
    assert file.stat().st_size == ENTRY
    assert bytes_on_disk(folder.folder) == counted(folder) == STATE_BYTES + ENTRY
    part.write(memoryview(bytes(SIZE)))
    part.publish()
    part.close()
    assert bytes_on_disk(folder.folder) == counted(folder) == STATE_BYTES + ENTRY
    assert files_of(folder.folder, ".lock") == []


def test_what_is_discarded_leaves_nothing_and_can_be_begun_again(make):
    folder = make()
    part = begin(folder, 1)
    part.write(memoryview(bytes(5)))
    part.discard()
    part.discard()
    assert bytes_on_disk(folder.folder) == counted(folder) == STATE_BYTES
    assert files_of(folder.folder, ".lock") == []
    name = publish(folder, 1)
    assert folder.open(name).view() == b"\1" * SIZE


def test_only_one_may_claim_an_entry(make):
    one, other = make(), make()
    claim = one.claim("a" * 64)
    assert one.claim("a" * 64) is None
    assert other.claim("a" * 64) is None
    claim.release(remove=True)
    other.claim("a" * 64).release(remove=True)


def test_too_few_and_too_many_bytes_are_not_published(make):
    folder = make()
    part = begin(folder, 1)
    part.write(memoryview(bytes(SIZE - 1)))
    with pytest.raises(TransferError, match=f"{SIZE - 1} bytes came of {SIZE}"):
        part.publish()
    with pytest.raises(TransferError, match="more bytes came"):
        part.write(memoryview(bytes(2)))
    part.restart()
    part.write(memoryview(b"\7" * SIZE))
    part.publish()
    assert folder.open(part.name).view() == b"\7" * SIZE
    part.close()


def test_nothing_is_removed_in_vain(make):
    """What is in use leaves too little room, whatever else goes."""
    folder = make(3)
    held = folder.open(publish(folder, 1))
    for number in (2, 3):
        publish(folder, number)
    folder.limit -= ENTRY  # as if another had a smaller limit
    removed = []
    info = EntryInfo("made://host/9", "v1", 2 * SIZE, 0, 2 * SIZE)
    claim = folder.claim("9" * 64)
    with pytest.raises(NotCachedError, match="no_room"):
        folder.begin(claim, "9" * 64, info, stated=None, let_go=lambda: None, removed=removed)
    claim.release(remove=True)
    assert removed == []
    assert folder.usage()[0] == 3
    assert held.view() == b"\1" * SIZE


def test_an_entry_that_is_published_cannot_go_before_its_downloader_has_opened_it(make):
    folder = make(1)
    part = begin(folder, 1)
    part.write(memoryview(bytes(SIZE)))
    part.publish()
    with pytest.raises(NotCachedError, match="no_room"):
        begin(make(1), 2)
    part.close()
    begin(make(1), 2).discard()


def test_what_a_killed_downloader_left_is_removed_by_the_next_process(make):
    folder = make()
    folder.folder.mkdir()
    for suffix in (".part", ".lock"):
        (folder.folder / ("a" * 64 + suffix)).write_bytes(bytes(3 * ENTRY) if suffix == ".part" else b"")
    publish(folder, 1)
    assert files_of(folder.folder, ".part") == files_of(folder.folder, ".lock") == []
    assert counted(folder) == bytes_on_disk(folder.folder)


def test_what_a_killed_downloader_left_is_removed_when_its_entry_is_wanted(make):
    folder = make()
    publish(folder, 1)
    name = entry_name("made://host/2", "v1", SIZE, 0, SIZE)
    (folder.folder / f"{name}.part").write_bytes(bytes(ENTRY))
    publish(folder, 2)
    assert folder.open(name).view() == b"\2" * SIZE
    assert files_of(folder.folder, ".part") == []


def test_a_living_download_is_let_alone(make):
    folder, other = make(), make()
    part = begin(folder, 1)
    publish(other, 2)
    assert len(files_of(folder.folder, ".part")) == 1
    part.write(memoryview(bytes(SIZE)))
    part.publish()
    part.close()
    assert counted(folder) == bytes_on_disk(folder.folder) == STATE_BYTES + 2 * ENTRY


@pytest.mark.parametrize("state", [b"", b"?" * STATE_BYTES, b"nonsense", b"-0000000000000000001\n", bytes(100)])
def test_a_count_that_cannot_be_read_is_made_anew(make, state):
    folder = make(2)
    for number in (1, 2):
        publish(folder, number)
    (folder.folder / "state").write_bytes(state)
    publish(folder, 3)
    assert folder.usage()[0] == 2


def test_a_count_that_is_too_high_is_made_anew_when_the_folder_seems_full(make):
    folder = make(3)
    names = [publish(folder, number) for number in (1, 2)]
    (folder.folder / "state").write_bytes(b"%020d\n" % (100 * ENTRY))  # as after a kill at the wrong moment
    publish(folder, 3)
    assert all(map(folder.has, names))
    assert counted(folder) == bytes_on_disk(folder.folder)


def test_a_count_that_is_too_low_does_not_outlive_the_process(make):
    folder = make(2)
    for number in (1, 2):
        publish(folder, number)
    (folder.folder / "state").write_bytes(b"%020d\n" % STATE_BYTES)  # as after a power cut
    publish(make(2), 3)
    assert bytes_on_disk(folder.folder) <= folder.limit


def test_progress_is_told_while_bytes_come(make, tmp_path):
    del make
    size = 5 << 20
    folder = CacheFolder(tmp_path / "cache", 10 << 20)
    info = EntryInfo("made://host/1", "v1", size, 0, size)
    assert folder.progress("a" * 64, size) is None
    part = folder.begin(folder.claim("a" * 64), "a" * 64, info, stated=None, let_go=lambda: None, removed=[])
    assert folder.progress("a" * 64, size) == 0
    part.write(memoryview(bytes(2 << 20)))
    assert folder.progress("a" * 64, size) == 2 << 20
    part.write(memoryview(bytes(3 << 20)))
    part.publish()
    part.close()
    assert folder.progress("a" * 64, size) == size


def test_all_of_it_works_with_the_locks_of_windows(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def locking(handle, *_):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError from None

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.delattr(os, "pread")
    monkeypatch.delattr(os, "posix_fallocate")
    made = MadeStore(tmp_path / "log", size=SIZE)
    for block in (None, 300):
        store = CachedStore(made, tmp_path / f"cache-{block}", limit=3 * ENTRY, block=block)
        for _ in range(2):
            for number in range(6):
                url = f"made://host/{number}"
                view = store.open(url).view(100, 500)
                assert view == made.bytes_of(url)[100:600]
        assert bytes_on_disk(store.folder) <= store.limit
        assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []
        assert store.stats().evictions > 0


def test_whoever_waits_for_the_state_gets_it(make):
    folder = make()
    publish(folder, 1)
    with lock_file(folder.folder / "state"):
        assert folder.usage() == (1, STATE_BYTES + ENTRY)  # looking needs no lock
