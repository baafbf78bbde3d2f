from __future__ import annotations

import pickle
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from servers.faulty import Fault, FaultServer
from servers.nginx import Nginx
from shardset.errors import (
    AccessError,
    ChangedError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    TransferError,
)
from shardset.storage import url_join
from shardset.storage.adapter import FsspecStore, _identity
from shardset.storage.retry import Retry
from shardset.storage.store import ABSENT, UNKNOWN
from storage.store_suite import PAYLOAD, ReadSuite, WriteSuite, run_in_child

pytestmark = pytest.mark.servers

QUICK = Retry(attempts=3, first_wait=0.01, longest_wait=0.02)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr("shardset.storage.adapter._used_by", None)


class AdapterSuite(ReadSuite):
    """The shared suite, with what holds for file systems that cannot pin a version."""

    def test_a_reader_keeps_to_the_version_that_it_opened(self, store, url):
        reader = store.open(url)
        view = reader.view(0, 100)
        store.write(url, bytes(len(PAYLOAD)))
        assert view == PAYLOAD[:100]
        for read in (reader.read, reader.view, lambda offset, length: reader.read_many([offset], [length])):
            with pytest.raises(ChangedError) as caught:
                read(0, 100)
            assert caught.value.url == url
        assert store.read(url, 0, 100) == bytes(100)

    def test_what_was_written_meanwhile_is_not_written_over(self, store, url):
        seen = store.info(url).identity
        store.write(url, b"by somebody else")
        for expect in (seen, ABSENT):
            with pytest.raises(ChangedError):
                store.write(url, b"mine", expect=expect)
        store.write(url, b"mine", expect=store.info(url).identity)
        assert store.read(url, 0, 4) == b"mine"

    def test_a_long_object_is_written(self, store, base):
        url = url_join(base, "long.bin")
        piece = PAYLOAD * 10
        store.write(url, (piece for _ in range(8)))
        reader = store.open(url)
        assert reader.size == 8 * len(piece)
        assert reader.view(len(piece) - 5, 10) == piece[-5:] + piece[:5]


class WriteAdapterSuite(AdapterSuite, WriteSuite):
    """The same, with writing."""

    test_a_reader_keeps_to_the_version_that_it_opened = AdapterSuite.test_a_reader_keeps_to_the_version_that_it_opened

    @pytest.mark.slow
    def test_eight_threads_read_the_same_objects(self, store, put):
        super().test_eight_threads_read_the_same_objects(store, put)

    def test_somebody_who_reads_during_writes_sees_old_or_new_and_nothing_else(self, store, base):
        url = url_join(base, "a.bin")
        versions = [bytes([letter]) * size for letter, size in ((65, 400_000), (66, 900_000))]
        store.write(url, versions[0])

        def write():
            for turn in range(30):
                store.write(url, versions[turn % 2])

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            reads = changes = 0
            while not writing.done() or reads < 10:
                try:
                    reader = store.open(url)
                    assert reader.read(0, reader.size) in versions
                    reads += 1
                except ChangedError:
                    changes += 1
            writing.result()
        assert changes <= 30


class TestMemory(WriteAdapterSuite):
    @pytest.fixture
    def store(self):
        return FsspecStore()

    @pytest.fixture
    def base(self):
        return f"fsspec+memory://{uuid.uuid4().hex}/folder"

    def test_a_spawned_child_reads(self, store, url):
        """Find nothing: a child has a memory of its own."""
        with pytest.raises(EOFError):
            super().test_a_spawned_child_reads(store, url)


class TestLocal(WriteAdapterSuite):
    @pytest.fixture
    def store(self):
        return FsspecStore()

    @pytest.fixture
    def base(self, tmp_path):
        (tmp_path / "folder").mkdir()
        return f"fsspec+file://{tmp_path}/folder"


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    root = tmp_path_factory.mktemp("nginx")
    root.chmod(0o755)
    with Nginx(root) as server:
        yield root, server.url


class TestHttp(ReadSuite):
    @pytest.fixture
    def store(self):
        return FsspecStore(retry=QUICK)

    @pytest.fixture
    def base(self, nginx):
        root, url = nginx
        folder = root / uuid.uuid4().hex
        folder.mkdir()
        return f"fsspec+{url}{folder.name}"

    @pytest.fixture
    def put(self, nginx, base):
        def put(name, data):
            path = nginx[0] / base.rpartition("/")[2] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return url_join(base, name)

        return put

    @pytest.mark.slow
    def test_eight_threads_read_the_same_objects(self, store, put):
        super().test_eight_threads_read_the_same_objects(store, put)

    def test_objects_are_listed_at_any_depth_in_the_byte_order_of_their_names(self, store, base, put):
        """Names that a web page has to encode are listed as it has them; `HttpStore` decodes them."""
        names = ["a/b.tar", "a-b.tar", "a0.tar", "A.tar", "z/y/x/w.tar", "z/y.tar", "z/y-.tar"]
        urls = {name: put(name, name.encode()) for name in names}
        found = list(store.list(base))
        assert [info.url for info in found] == [urls[name] for name in sorted(names)]
        for info in found:
            assert info == store.info(info.url)

    def test_odd_names_are_taken_as_they_are(self, store, base, put):
        urls = [put(name, name.encode()) for name in ("-", "a_b~c.tar")]
        assert {info.url for info in store.list(base)} == set(urls)
        assert store.read(urls[0], 0, 1) == b"-"


# What is particular to the adapter


def _read_in_child(pipe, store, url):
    try:
        pipe.send(store.read(url, 0, 5))
    except StorageError as error:
        pipe.send(str(error))


def _use_reader(pipe, reader):
    try:
        pipe.send(reader.read(0, 5))
    except StorageError as error:
        pipe.send(str(error))


def test_a_forked_child_is_told_to_be_spawned_and_does_not_hang(tmp_path):
    store, url = FsspecStore(), f"fsspec+file://{tmp_path}/a"
    store.write(url, b"12345")
    reader = store.open(url)
    for answer in (run_in_child("fork", _read_in_child, store, url), run_in_child("fork", _use_reader, reader)):
        assert "before this process was forked" in answer
        assert "multiprocessing_context='spawn'" in answer
    assert reader.read(0, 5) == b"12345"


def test_a_forked_child_may_be_the_first_to_use_it(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert run_in_child("fork", _read_in_child, FsspecStore(), f"fsspec+file://{tmp_path}/a") == b"12345"


def test_a_scheme_that_needs_another_package_or_is_unknown_says_so(monkeypatch):
    with pytest.raises(MissingExtraError, match=r"dropbox://.*fsspec says") as caught:
        FsspecStore().info("dropbox://a/b")
    assert "shardset[" not in str(caught.value)
    with pytest.raises(ValueError, match="nosuchscheme://a/b: no store for this"):
        FsspecStore().info("nosuchscheme://a/b")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[fsspec\]"):
        FsspecStore().info("hdfs://a/b")


def test_options_reach_the_file_system_and_stand_in_no_repr():
    with FaultServer({"/a": b"12345"}) as server:
        store = FsspecStore(options={"headers": {"X-Login": "secret"}, "skip_instance_cache": True})
        assert pickle.loads(pickle.dumps(store)).read(f"fsspec+{server.url}a", 1, 2) == b"23"
        assert {request.headers["x-login"] for request in server.requests()} == {"secret"}
    assert "secret" not in repr(store)


def test_faults_are_outlasted_or_end_in_an_error_with_url_and_attempts():
    with FaultServer({"/a": PAYLOAD}) as server:
        url = f"fsspec+{server.url}a"
        store = FsspecStore(retry=QUICK)
        reader = store.open(url)
        for fault in (Fault.status(503), Fault.reset(), Fault.truncate(after=100)):
            server.add(fault, method="GET", times=2)
            assert reader.read(5, 1000) == PAYLOAD[5:1005]
        server.add(Fault.status(503), method="GET")
        with pytest.raises(TransferError, match="503, 3 attempts") as caught:
            reader.read(5, 1000)
        assert (caught.value.url, caught.value.status, caught.value.attempts) == (url, 503, 3)
        for fault, kind in (
            (Fault.status(403), AccessError),
            (Fault.status(404), NotFoundError),
            (Fault.ignore_range(), StorageError),
            (Fault.body_length(-10), StorageError),
            (Fault.changed(bytes(len(PAYLOAD))), ChangedError),
        ):
            server.behave()
            server.add(fault)
            with pytest.raises(kind):
                store.open(url, reader.info).read(5, 1000)
        server.behave()
        server.add(Fault.status(403))
        with pytest.raises(AccessError):  # which fsspec calls "not found"
            store.info(url)


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path, monkeypatch):
    store = FsspecStore(retry=QUICK)
    (tmp_path / "a").write_bytes(b"before")
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.mv", _fail)
    with pytest.raises(TransferError, match="3 attempts"):
        store.write(f"fsspec+file://{tmp_path}/a", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"


def _fail(*_args, **_options):
    raise OSError("secret text")


def test_a_file_system_that_tells_nothing_of_versions_gives_none():
    assert _identity({"size": 5, "name": "a"}) == UNKNOWN
    assert _identity({"size": 5, "mtime": 7.5}) == "mtime:7.500000"
    assert _identity({"size": 5, "mtime": 7.5, "ETag": '"x"'}) == 'ETag:"x"'
