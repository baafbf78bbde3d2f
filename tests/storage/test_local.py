from __future__ import annotations

import contextlib
import errno
import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shardset.errors import AccessError, ChangedError, NotFoundError, StorageError
from shardset.policy import Report
from shardset.storage import LocalStore, local, url_join
from storage.store_suite import LENGTH, ODD_NAMES, PAYLOAD, ForkSuite, ReadSuite, WriteSuite, run_in_child

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has none of this")


@pytest.fixture
def base(tmp_path):
    return str(tmp_path)


@pytest.fixture
def store():
    return LocalStore()


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "000.tar"
    path.write_bytes(PAYLOAD)
    return path


class TestMappedStore(ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self):
        return LocalStore()


class TestStoreWithoutMaps(ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self):
        return LocalStore(mmap=False)


class TestStoreThatKeepsOneFileOpen(ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self):
        return LocalStore(max_open=1)


class TestFileUrls(ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self):
        return LocalStore()

    @pytest.fixture
    def base(self, tmp_path):
        return (tmp_path / "a b%").as_uri()


class TestStoreWithoutPread(ReadSuite, WriteSuite):
    """Systems without `os.pread` have no fork either."""

    @pytest.fixture(params=[True, False])
    def store(self, request, monkeypatch):
        monkeypatch.delattr(os, "pread")
        return LocalStore(mmap=request.param)


# What a file url and a path say


def test_a_path_is_taken_letter_by_letter_and_a_file_url_is_decoded(tmp_path, store):
    for name in ODD_NAMES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
        size = len(name.encode())
        assert store.read(str(path), 0, size) == store.read(path.as_uri(), 0, size) == name.encode()


def test_a_file_url_may_name_this_machine_and_no_other(shard, store):
    url = shard.as_uri()
    assert store.read(url.replace("file:///", "FILE://localhost/"), 0, 9) == PAYLOAD[:9]
    for bad in (url.replace("file:///", "file://elsewhere/"), "file://relative.tar"):
        with pytest.raises(ValueError, match="file:///path"):
            store.info(bad)


def test_a_relative_path_starts_at_the_current_folder(shard, store, monkeypatch):
    monkeypatch.chdir(shard.parent)
    assert store.read(shard.name, 0, 9) == PAYLOAD[:9]
    assert [info.url for info in store.list(".")] == [f"./{shard.name}"]
    store.write("new.bin", b"new")
    assert (shard.parent / "new.bin").read_bytes() == b"new"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse names that are no text")
def test_names_that_are_no_text_are_listed_in_byte_order_and_read(tmp_path, store):
    for name in (b"\xff.tar", "ﬀ.tar".encode(), b"a.tar"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(name)
    for base in (str(tmp_path), tmp_path.as_uri()):
        found = list(store.list(base))
        assert [store.read(info.url, 0, info.size) for info in found] == [b"a.tar", "ﬀ.tar".encode(), b"\xff.tar"]


# Files that change


def test_a_replaced_file_is_read_as_it_was_until_info_looks(shard, store):
    old = store.info(str(shard))
    assert store.read(str(shard), 0, 9) == PAYLOAD[:9]
    LocalStore().write(str(shard), bytes(LENGTH))
    assert store.read(str(shard), 0, 9) == PAYLOAD[:9]
    assert store.open(str(shard)).identity == old.identity
    new = store.info(str(shard))
    assert new.identity != old.identity
    assert store.open(str(shard)).identity == new.identity
    assert store.read(str(shard), 0, 9) == bytes(9)


def test_a_file_opened_by_another_thread_during_its_replacement_is_not_kept(shard, store, monkeypatch):
    open_atomic = local.open_atomic

    @contextlib.contextmanager
    def watched(path):
        with open_atomic(path) as file:
            yield file
            assert store.read(str(shard), 0, 9) == PAYLOAD[:9]  # what another thread may do at this moment

    monkeypatch.setattr(local, "open_atomic", watched)
    store.write(str(shard), b"new")
    assert store.read(str(shard), 0, store.open(str(shard)).size) == b"new"


def test_a_removed_file_is_read_until_info_looks(shard, store):
    reader = store.open(str(shard))
    shard.unlink()
    assert store.read(str(shard), 0, 9) == PAYLOAD[:9]
    with pytest.raises(NotFoundError):
        store.info(str(shard))
    with pytest.raises(NotFoundError):
        store.read(str(shard), 0, 9)
    assert reader.read(0, 9) == PAYLOAD[:9]


def test_a_file_that_grows_keeps_its_size_for_readers_that_have_it_open(shard, store):
    reader = store.open(str(shard))
    with shard.open("ab") as file:
        file.write(b"more")
    assert reader.map() == PAYLOAD
    with pytest.raises(StorageError, match=f"which has {LENGTH}"):
        reader.read(LENGTH, 4)
    assert store.info(str(shard)).size == LENGTH + 4
    assert store.read(str(shard), LENGTH, 4) == b"more"


@pytest.mark.parametrize("ask", ["map", "view", "read_many", "read"])
@pytest.mark.parametrize("already_mapped", [True, False])
@posix
def test_a_file_cut_while_open_is_a_changed_error_that_names_both_sizes(shard, store, ask, already_mapped):
    reader = store.open(str(shard))
    if already_mapped:
        reader.map()
    os.truncate(shard, 5000)
    asks = {
        "map": reader.map,
        "view": lambda: reader.view(0, 10),
        "read_many": lambda: reader.read_many([0], [10]),
        "read": lambda: reader.read(4990, 20),
    }
    with pytest.raises(ChangedError, match=f"from {LENGTH} to 5000 bytes.*build its index again"):
        asks[ask]()


@posix
def test_a_file_cut_while_open_is_noticed_without_a_map(shard):
    reader = LocalStore(mmap=False).open(str(shard))
    os.truncate(shard, 5000)
    assert reader.read_many([0], [5000]) == [PAYLOAD[:5000]]
    for ask in (lambda: reader.read_many([0, 4000], [10, 2000]), lambda: reader.view(5000, 1)):
        with pytest.raises(ChangedError, match=f"from {LENGTH} to 5000"):
            ask()


@pytest.mark.parametrize("guarded", [True, False])
@posix
def test_the_guard_stands_between_a_cut_file_and_a_dead_process(shard, guarded):
    program = f"""
import os, sys
from shardset.errors import ChangedError
from shardset.storage import LocalStore
reader = LocalStore().open(sys.argv[1])
view = reader.view({LENGTH - 10}, 10)
os.truncate(sys.argv[1], 0)
if {guarded}:
    try:
        bytes(reader.view({LENGTH - 10}, 10))
    except ChangedError:
        sys.exit(7)
bytes(view)
"""
    done = subprocess.run([sys.executable, "-c", program, shard], env=_environment(), check=False, capture_output=True)
    assert done.returncode == (7 if guarded else -signal.SIGBUS), done.stderr


# Many files


def _make_files(folder, count):
    paths = [folder / f"{number:03d}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(f"{number:03d}".encode() * 2000)
    return [str(path) for path in paths]


@pytest.mark.parametrize("mmap", [True, False])
def test_readers_and_views_outlive_their_place_in_the_store(tmp_path, mmap):
    store = LocalStore(mmap=mmap, max_open=3)
    urls = _make_files(tmp_path, 20)
    readers = [store.open(url) for url in urls]
    views = [reader.view(3000, 3) for reader in readers]
    wholes = [reader.map() for reader in readers]
    assert len(store._readers) == 3
    for number, (reader, view, whole) in enumerate(zip(readers, views, wholes, strict=True)):
        name = f"{number:03d}".encode()
        assert view == reader.read(0, 3) == reader.view(9, 3) == name
        assert whole is None if not mmap else whole == name * 2000


def test_the_files_used_last_stay_open(tmp_path):
    store = LocalStore(max_open=2)
    first, second, third = _make_files(tmp_path, 3)
    kept = store.open(first)
    dropped = store.open(second)
    store.read(first, 0, 1)
    store.open(third)
    assert store.open(first) is kept
    assert store.open(second) is not dropped


@pytest.mark.parametrize("max_open", [8, 100_000])
@posix
def test_more_files_are_read_than_a_process_may_hold_open(tmp_path, max_open):
    _make_files(tmp_path, 300)
    program = f"""
import resource, sys
from shardset.storage import LocalStore
store = LocalStore(max_open={max_open})
infos = list(store.list(sys.argv[1]))
assert len(infos) == 300
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for number, info in enumerate(infos):
    assert store.read(info.url, 0, 3) == store.open(info.url).view(3, 3) == b"%03d" % number
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], env=_environment(), check=True)


@posix
def test_too_many_open_files_say_so_where_nothing_can_be_given_up(tmp_path):
    program = """
import resource, sys
from shardset.errors import StorageError
from shardset.storage import LocalStore
infos = list(LocalStore().list(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
readers = []
try:
    for info in infos:
        readers.append(LocalStore().open(info.url))
except StorageError as error:
    sys.exit(str(error))
"""
    _make_files(tmp_path, 100)
    command = [sys.executable, "-c", program, tmp_path]
    done = subprocess.run(command, env=_environment(), check=False, capture_output=True, text=True)
    assert "too many open files" in done.stderr
    assert "ulimit -n" in done.stderr


def test_at_least_one_file_is_kept_open():
    with pytest.raises(ValueError, match="max_open=0"):
        LocalStore(max_open=0)


# What the system does


def test_short_reads_are_completed(shard, store, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, length, offset: pread(handle, min(length, 999), offset))
    assert store.read(str(shard), 5, 100_000) == PAYLOAD[5:100_005]


def test_long_reads_are_made_in_pieces(shard, store, monkeypatch):
    lengths = _watch_pread(monkeypatch)
    monkeypatch.setattr(local, "_MOST_AT_ONCE", 70_000)
    assert store.read(str(shard), 0, LENGTH) == PAYLOAD
    assert sum(lengths) == LENGTH
    assert max(lengths) == 70_000


def test_near_ranges_are_read_together_without_a_map(shard, monkeypatch):
    lengths = _watch_pread(monkeypatch)
    offsets = [number * 1000 for number in range(100)]
    answers = LocalStore(mmap=False).read_many(str(shard), [*offsets, 200_000, 10**9], [500] * 100 + [7, 0])
    assert answers == [PAYLOAD[offset : offset + 500] for offset in offsets] + [PAYLOAD[200_000:200_007], b""]
    assert sorted(lengths) == [7, 99_500]


def test_merged_reads_without_a_map_keep_to_a_limit_and_a_long_range_stays_whole(shard, monkeypatch):
    lengths = _watch_pread(monkeypatch)
    monkeypatch.setattr(local, "_LIMIT", 10_000)
    offsets = [*range(0, 50_000, 1000), 100_000, 150_000]
    sizes = [500] * 50 + [90_000, 10]
    answers = LocalStore(mmap=False).read_many(str(shard), offsets[::-1], sizes[::-1])
    assert answers[::-1] == [PAYLOAD[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    assert sorted(lengths) == [9500] * 5 + [90_000]


@pytest.mark.parametrize("mmap", [True, False])
def test_an_empty_range_may_lie_where_no_offset_reaches(shard, mmap):
    reader = LocalStore(mmap=mmap).open(str(shard))
    assert reader.read_many([2**70, 5], [0, 3]) == [b"", PAYLOAD[5:8]]


def test_an_empty_range_reads_nothing(shard, monkeypatch):
    lengths = _watch_pread(monkeypatch)
    reader = LocalStore(mmap=False).open(str(shard))
    assert [reader.read(5, 0), reader.view(5, 0), *reader.read_many([5, 6], [0, 0])] == [b""] * 4
    assert lengths == []


def test_a_file_that_cannot_be_mapped_is_read(shard, store, monkeypatch):
    def refuse(*_args, **_settings):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(local.mmap, "mmap", refuse)
    reader = store.open(str(shard))
    assert reader.map() is None
    assert reader.view(7, 9) == PAYLOAD[7:16]
    assert reader.read_many([7], [9]) == [PAYLOAD[7:16]]


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StorageError), (errno.ESTALE, ChangedError)])
def test_errors_of_the_system_keep_their_number(shard, store, monkeypatch, number, kind):
    def fail(*_args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pread", fail)
    for length in (10, 2**31):
        monkeypatch.setattr(local, "_MOST_AT_ONCE", length - 1 if length > 10 else length)
        with pytest.raises(StorageError, match=os.strerror(number).lower()) as caught:
            store.open(str(shard)).read(0, min(length, LENGTH))
        assert type(caught.value) is kind
        assert (caught.value.errno, caught.value.url) == (number, str(shard))


def test_a_missing_file_keeps_its_number(base, store):
    with pytest.raises(NotFoundError) as caught:
        store.open(url_join(base, "no"))
    assert caught.value.errno == errno.ENOENT


def test_a_folder_says_that_it_is_one(base, store):
    for ask in (store.info, store.open):
        with pytest.raises(StorageError, match="folder") as caught:
            ask(base)
        assert caught.value.errno == errno.EISDIR


@posix
def test_pipes_and_devices_are_refused_at_once(tmp_path, store):
    os.mkfifo(tmp_path / "pipe")
    for url in (str(tmp_path / "pipe"), "/dev/zero"):
        for ask in (store.info, store.open):
            with pytest.raises(StorageError, match="pipe"):
                ask(url)


def test_writing_onto_a_folder_is_an_error_and_leaves_nothing_behind(tmp_path, store):
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError):
        store.write(str(tmp_path / "folder"), b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@posix
def test_a_write_that_does_not_fit_leaves_the_old_file_and_nothing_else(shard):
    program = """
import errno, resource, sys
from shardset.errors import StorageError
from shardset.storage import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    LocalStore().write(sys.argv[1], bytes(200_000))
except StorageError as error:
    sys.exit(7 if error.errno == errno.EFBIG else 1)
"""
    done = subprocess.run([sys.executable, "-c", program, shard], env=_environment(), check=False, capture_output=True)
    assert done.returncode == 7, done.stderr
    assert shard.read_bytes() == PAYLOAD
    assert list(shard.parent.iterdir()) == [shard]


def test_writing_below_a_file_is_an_error(shard, store):
    with pytest.raises(StorageError):
        store.write(url_join(str(shard), "a.bin"), b"x")
    assert shard.read_bytes() == PAYLOAD


def test_an_open_file_is_not_pickled(shard, store):
    with pytest.raises(TypeError, match="pickle the store"):
        pickle.dumps(store.open(str(shard)))


def test_a_pickled_store_has_its_settings_and_no_files(shard):
    store = LocalStore(mmap=False, max_open=7)
    store.open(str(shard))
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.mmap, copy.max_open) == (False, 7)
    assert not copy._readers


# What may not be read


@pytest.fixture
def open_folder():
    """A folder that every user of this machine may look into, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def _attempt(pipe, become_nobody, action):
    if become_nobody:
        os.setuid(65534)
    try:
        action()
    except StorageError as error:
        pipe.send((type(error), error.url, error.errno))
    else:
        pipe.send("allowed")


def attempt_without_rights(action):
    """Run an action in a child that is not root, whom no mode of a file stops."""
    return run_in_child("fork", _attempt, os.geteuid() == 0, action)


@posix
def test_a_file_that_may_not_be_read_is_an_access_error(open_folder, store):
    path = open_folder / "secret.tar"
    path.write_bytes(b"secret")
    assert attempt_without_rights(lambda: store.read(str(path), 0, 6)) == "allowed"
    store.close()
    path.chmod(0)
    refused = (AccessError, str(path), errno.EACCES)
    assert attempt_without_rights(lambda: store.read(str(path), 0, 6)) == refused
    assert attempt_without_rights(lambda: store.open(str(path))) == refused


@posix
def test_a_folder_that_may_not_be_listed_is_an_access_error(open_folder, store):
    hidden = open_folder / "hidden"
    hidden.mkdir(mode=0)
    refused = (AccessError, str(hidden), errno.EACCES)
    assert attempt_without_rights(lambda: list(store.list(str(open_folder)))) == refused
    inside = hidden / "a.tar"
    assert attempt_without_rights(lambda: store.info(str(inside))) == (AccessError, str(inside), errno.EACCES)


@posix
def test_a_folder_that_may_not_be_written_is_an_access_error(open_folder, store):
    path = open_folder / "a.bin"
    open_folder.chmod(0o555)
    assert attempt_without_rights(lambda: store.write(str(path), b"x")) == (AccessError, str(path), errno.EACCES)
    assert list(open_folder.iterdir()) == []


# Links


@posix
def test_links_to_files_and_folders_are_followed(tmp_path, store):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.tar").write_bytes(b"a")
    data = tmp_path / "data"
    data.mkdir()
    (data / "folder").symlink_to("../real")
    (data / "again").symlink_to(tmp_path / "real", target_is_directory=True)
    (data / "file.tar").symlink_to("../real/a.tar")
    found = list(store.list(str(data)))
    assert [info.url for info in found] == [f"{data}/{name}" for name in ("again/a.tar", "file.tar", "folder/a.tar")]
    assert len({info.identity for info in found}) == 1
    link = tmp_path / "link"
    link.symlink_to("data")
    assert [info.url for info in store.list(str(link))] == [info.url.replace("/data/", "/link/") for info in found]


@posix
def test_loops_of_links_are_cut_and_what_is_passed_over_is_counted(tmp_path, store):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x.tar").write_bytes(b"x")
    (tmp_path / "a/b/up").symlink_to("..")
    (tmp_path / "a/b/top").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "gone.tar").symlink_to("nowhere.tar")
    os.mkfifo(tmp_path / "pipe")
    report = Report()
    assert [info.url for info in store.list(str(tmp_path), report)] == [str(tmp_path / "a/b/x.tar")]
    assert report.counts == {"dangling_link": 2, "link_loop": 2, "not_a_file": 1}
    assert report.places("not_a_file")[0].shard == str(tmp_path / "pipe")


@posix
def test_what_a_listing_passes_over_is_logged_where_nobody_counts(tmp_path, store, caplog):
    (tmp_path / "gone.tar").symlink_to("nowhere.tar")
    assert list(store.list(str(tmp_path))) == []
    assert "dangling_link" in caplog.text
    assert "gone.tar" in caplog.text


def test_a_tree_deeper_than_python_recurses_is_listed(tmp_path, store):
    folder = tmp_path.joinpath(*["d"] * 300)
    folder.mkdir(parents=True)
    (folder / "a.tar").write_bytes(b"a")
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack(0)) + 100)
        found = list(store.list(str(tmp_path)))
    finally:
        sys.setrecursionlimit(limit)
    assert [info.url for info in found] == [str(folder / "a.tar")]


def _watch_pread(monkeypatch):
    lengths = []
    pread = os.pread

    def watched(handle, length, offset):
        lengths.append(length)
        return pread(handle, length, offset)

    monkeypatch.setattr(os, "pread", watched)
    return lengths


def _environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@posix
def test_the_more_files_a_process_may_open_the_more_stay_open(monkeypatch):
    import resource

    for limit, kept in ((256, 128), (1024, 128), (20_000, 2500), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert local.files_kept() == LocalStore().max_open == kept
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert local.files_kept() == 128
    assert LocalStore(max_open=5).max_open == 5


@pytest.mark.skipif(not local.LocalReader.can_advise(), reason="only Linux can be asked")
def test_what_is_not_in_memory_is_told_and_comes_there_when_it_is_asked_for(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(8 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    reader = local.LocalReader(str(path))
    assert reader.is_in_memory(0)
    os.posix_fadvise(reader._handle, 0, 0, os.POSIX_FADV_DONTNEED)
    if not reader.is_in_memory(4 << 20):  # a file system in memory drops nothing
        reader.advise([4 << 20], [1 << 20])
        end = time.monotonic() + 60
        while not reader.is_in_memory(4 << 20) and time.monotonic() < end:
            time.sleep(0.01)
    assert reader.is_in_memory(4 << 20)
    reader.advise([10 << 30, -1], [5, 5])  # a wish, whatever it is
    assert reader.read(4 << 20, 10) == bytes(10)
