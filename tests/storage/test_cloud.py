from __future__ import annotations

import gc
import os
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from servers.azure import serve_azure
from servers.faulty import Fault, FaultServer
from servers.gcs import serve_gcs
from servers.s3 import serve_s3
from shardset.errors import (
    AccessError,
    ChangedError,
    MissingExtraError,
    NotFoundError,
    RangeIgnoredError,
    RateLimitedError,
    StorageError,
    TransferError,
)
from shardset.policy import Report
from shardset.storage import cloud, url_join
from shardset.storage.bucket import PART, CloudPlace
from shardset.storage.cloud import CloudStore, parse_cloud_url
from shardset.storage.planner import ReadLimits
from shardset.storage.retry import Retry
from shardset.storage.store import ABSENT
from storage.store_suite import PAYLOAD, ForkSuite, ReadSuite, WriteSuite, run_in_child

pytestmark = pytest.mark.servers

SECRET = "a-secret-of-the-tests"
QUICK = Retry(attempts=3, first_wait=0.01, longest_wait=0.02)
IMPATIENT = replace(QUICK, stall=1, connect=1)  # for servers that go quiet; a busy machine may take its time, too


@pytest.fixture(scope="session")
def s3():
    with serve_s3() as server:
        yield server


@pytest.fixture(scope="session")
def azure():
    with serve_azure() as server:
        yield server


@pytest.fixture(scope="session")
def gcs():
    with serve_gcs() as server:
        yield server


class CloudSuite(ReadSuite, WriteSuite, ForkSuite):
    """The shared suites, with what holds for what lives elsewhere."""

    def test_a_reader_keeps_to_the_version_that_it_opened(self, store, url):
        reader = store.open(url)
        view = reader.view(0, 100)
        store.write(url, b"short")
        assert store.read(url, 0, 5) == b"short"
        assert view == PAYLOAD[:100]
        for read in (reader.read, reader.view, lambda offset, length: reader.read_many([offset], [length])):
            with pytest.raises(ChangedError) as caught:
                read(0, 100)
            assert caught.value.url == url

    def test_somebody_who_reads_during_writes_sees_old_or_new_and_nothing_else(self, store, base):
        url = url_join(base, "a.bin")
        versions = [bytes([letter]) * size for letter, size in ((65, 400_000), (66, 900_000))]
        store.write(url, versions[0])

        def write():
            for turn in range(10):
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
        assert changes <= 10

    @pytest.mark.slow
    def test_eight_threads_read_the_same_objects(self, store, put):
        super().test_eight_threads_read_the_same_objects(store, put)

    def test_what_was_written_meanwhile_is_not_written_over(self, store, url):
        seen = store.info(url).identity
        store.write(url, b"by somebody else")
        with pytest.raises(ChangedError, match="changed"):
            store.write(url, b"mine", expect=seen)
        with pytest.raises(ChangedError, match="there already"):
            store.write(url, b"mine", expect=ABSENT)
        with pytest.raises(ChangedError, match="removed"):
            store.write(url + "x", b"mine", expect=seen)
        assert store.read(url, 0, 16) == b"by somebody else"
        store.write(url, b"mine", expect=store.info(url).identity)
        store.write(url + "x", iter([b"mi", b"ne"]), expect=ABSENT)
        assert store.read(url, 0, 4) == store.read(url + "x", 0, 4) == b"mine"

    def test_a_long_object_is_written_in_parts(self, store, base):
        url = url_join(base, "long.bin")
        piece = os.urandom(1 << 20)
        store.write(url, (piece for _ in range(40)))
        reader = store.open(url)
        assert reader.size == 40 << 20
        assert reader.view((39 << 20) - 5, 10) == piece[-5:] + piece[:5]
        assert reader.read(0, reader.size) == piece * 40

    def test_nothing_is_written_if_making_the_pieces_fails(self, store, base, url):
        def pieces():
            yield bytes(PART + 1)
            yield bytes(PART)
            raise KeyError("no more")

        for target in (url, url_join(base, "never.bin")):
            with pytest.raises(KeyError, match="no more"):
                store.write(target, pieces())
        assert [info.url for info in store.list(base)] == [url]
        assert store.read(url, 0, 300_000) == PAYLOAD

    @pytest.mark.slow
    def test_twelve_hundred_names_are_listed_over_several_pages(self, store, base):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: store.write(f"{base}/many/{number:04}", b"1"), range(1200)))
        assert [info.url for info in store.list(f"{base}/many")] == [f"{base}/many/{n:04}" for n in range(1200)]

    def test_a_bucket_that_is_not_there_is_not_found(self, store, base):
        missing = base.partition("://")[0] + "://no-such-bucket-here/a.tar"
        for ask in (store.info, store.open, lambda url: list(store.list(url))):
            with pytest.raises(NotFoundError):
                ask(missing)

    def test_a_bucket_is_listed_from_its_root(self, store, base, put):
        url = put("a.tar", b"1")
        bucket = base.rpartition("/")[0]
        for root in (bucket, bucket + "/"):
            assert url in [info.url for info in store.list(root)]
            with pytest.raises(StorageError):
                store.info(root)

    def test_keys_that_would_be_asked_for_as_others_are_refused(self, store, base):
        for key in ("a//b", "a/../b", "a/./b", "a\nb", "/a"):
            with pytest.raises(StorageError, match="cannot ask for"):
                store.info(f"{base}/{key}")


class TestS3(CloudSuite):
    @pytest.fixture
    def store(self, s3):
        return CloudStore(options=s3.options)

    @pytest.fixture
    def base(self, s3):
        return f"s3://{s3.make_bucket()}/folder"


class TestAzure(CloudSuite):
    @pytest.fixture
    def store(self, azure):
        return CloudStore(options=azure.options)

    @pytest.fixture
    def base(self, azure):
        return f"az://{azure.make_bucket()}/folder"


class TestGcs(CloudSuite):
    @pytest.fixture
    def store(self, gcs):
        return CloudStore(options=gcs.options)

    @pytest.fixture
    def base(self, gcs):
        return f"gs://{gcs.make_bucket()}/folder"


# What is particular to one service


def test_a_wrong_key_is_no_access_and_stands_in_no_message(s3, azure, gcs):
    wrong = "d3Jvbmc="
    stores = {
        f"s3://{s3.make_bucket()}/a": CloudStore(options={**s3.options, "access_key_id": wrong}, retry=QUICK),
        f"az://{azure.make_bucket()}/a": CloudStore(options={**azure.options, "account_key": wrong}, retry=QUICK),
        f"gs://{gcs.make_bucket()}/a": CloudStore(options={**gcs.options, "bearer_token": wrong}, retry=QUICK),
    }
    for url, store in stores.items():
        for ask in (lambda url, store=store: store.write(url, b"1"), lambda url, store=store: list(store.list(url))):
            with pytest.raises(AccessError) as caught:
                ask(url)
            error = caught.value
            assert error.url == url
            assert url.split("/")[2] in str(error)
            assert "40" in str(error)  # 401 or 403
            assert "SKIP_SIGNATURE" in error.hint
            for shown in (str(error), repr(error), repr(error.__cause__), repr(store), str(error.__dict__)):
                assert wrong not in shown
                assert "Signature=" not in shown
            assert error.__suppress_context__


def test_a_public_container_is_read_without_a_login(azure):
    base = f"az://{azure.make_bucket(public=True)}/folder"
    CloudStore(options=azure.options).write(f"{base}/a.tar", b"public")
    anybody = CloudStore(
        options={"endpoint": azure.endpoint, "account_name": "devstoreaccount1", "skip_signature": "true"}
    )
    assert anybody.read(f"{base}/a.tar", 0, 6) == b"public"
    assert [info.size for info in anybody.list(base)] == [6]
    with pytest.raises(AccessError):
        anybody.write(f"{base}/b.tar", b"")


def test_azure_is_reached_by_a_connection_string(azure, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure.connection_string)
    url = f"az://{azure.make_bucket()}/a"
    store = CloudStore()
    store.write(url, b"1")
    assert store.info(url).size == 1


def test_the_marks_that_consoles_make_for_folders_are_no_objects(s3):
    bucket = s3.make_bucket()
    store = CloudStore(options=s3.options)
    for name in ("d/a.tar", "d/b/c.tar", "d/empty.tar", "d-e.tar"):
        store.write(f"s3://{bucket}/{name}", b"" if "empty" in name else b"1")
    for name in ("d", "d/b"):  # an object whose name ends with a slash lies like this in s3rver
        for ending, content in (("object", b""), ("object.md5", b"d41d8cd98f00b204e9800998ecf8427e")):
            (s3.folder / bucket / name / f"._S3rver_{ending}").write_bytes(content)
        (s3.folder / bucket / name / "._S3rver_metadata.json").write_text("{}")
    report = Report()
    found = [info.url for info in store.list(f"s3://{bucket}", report)]
    assert found == [f"s3://{bucket}/{name}" for name in ("d-e.tar", "d/a.tar", "d/b/c.tar", "d/empty.tar")]
    assert report.counts == {"not_a_file": 2}
    assert [info.url for info in store.list(f"s3://{bucket}/d")] == found[1:]


def test_no_part_of_a_failed_upload_is_left(s3, gcs):
    def pieces():
        yield bytes(3 * PART)
        raise KeyError

    bucket = s3.make_bucket()
    for url, options in ((f"s3://{bucket}/a", s3.options), (f"gs://{gcs.make_bucket()}/a", gcs.options)):
        with pytest.raises(KeyError):
            CloudStore(options=options).write(url, pieces())
    assert not gcs.uploads
    assert not list((s3.folder / bucket / "._S3rver_uploads").glob("*"))


def _write_long(pipe, options, url, count):
    piece = os.urandom(1 << 20)
    before = _peak_memory()
    CloudStore(options=options).write(url, (bytearray(piece) for _ in range(count)))
    pipe.send(_peak_memory() - before)


def _peak_memory():
    """Return the most KiB that this process has had; unlike `getrusage`, not what its parent had."""
    return int(re.search(r"VmHWM:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.slow
def test_a_long_object_is_written_in_bounded_memory(s3):
    url = f"s3://{s3.make_bucket()}/long"
    grown = run_in_child("spawn", _write_long, s3.options, url, 512)
    assert CloudStore(options=s3.options).info(url).size == 512 << 20
    assert grown < 200 << 10  # KiB


def test_urls_are_taken_apart():
    for url, place in {
        "s3://b/k": CloudPlace("s3", "b", "k"),
        "S3A://b.c/k//l%20?x=1#y": CloudPlace("s3", "b.c", "k//l%20?x=1#y"),
        "gs://b": CloudPlace("gs", "b", ""),
        "gcs://b/": CloudPlace("gs", "b", ""),
        "az://c/k/l": CloudPlace("az", "c", "k/l"),
        "azure://c/k": CloudPlace("az", "c", "k"),
        "abfss://c@acc.dfs.core.windows.net/k/l": CloudPlace("az", "c", "k/l", "acc"),
        "az://acc.blob.core.windows.net/c/k/l": CloudPlace("az", "c", "k/l", "acc"),
    }.items():
        assert parse_cloud_url(url) == place
    for url in ("s3://", "s3:///k", "http://b/k", "k", "az://acc.blob.core.windows.net/", "s3://key:secret@b/k"):
        with pytest.raises(ValueError, match="bucket"):
            parse_cloud_url(url)


def test_settings_that_obstore_does_not_take_are_named_without_their_values():
    for options in ({"no_such_option": SECRET}, {"endpoint": f"nonsense {SECRET}"}, {"endpoint": "ftp://host"}):
        with pytest.raises(ValueError, match=r"option|endpoint") as caught:
            CloudStore(options=options).info("s3://b/k")
        assert SECRET not in str(caught.value) or "endpoint" in options
    with pytest.raises(AccessError, match="no storage account"):
        CloudStore().info("az://c/k")


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("shardset.storage.native._loaded", None)
    monkeypatch.setitem(__import__("sys").modules, "obstore._obstore", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[cloud\]"):
        CloudStore().info("s3://b/k")


def test_a_pickled_store_takes_its_options_along_and_no_connection(s3):
    url = f"s3://{s3.make_bucket()}/a"
    store = CloudStore(options=s3.options, retry=QUICK, limits=ReadLimits(gap=7))
    store.write(url, b"1")
    content = pickle.dumps(store)
    assert len(content) < 1000
    copy = pickle.loads(content)
    assert copy.read(url, 0, 1) == b"1"
    assert copy.open(url).limits.gap == 7
    assert "S3RVER" not in repr(copy)


def _read_after_forks(pipe, store, url, depth):
    content = store.read(url, 0, 5)
    pipe.send(run_in_child("fork", _read_after_forks, store, url, depth - 1) + content if depth else content)


def test_children_of_children_read(s3):
    url = f"s3://{s3.make_bucket()}/a"
    store = CloudStore(options=s3.options)
    store.write(url, b"child")
    assert run_in_child("fork", _read_after_forks, store, url, 2) == b"child" * 3
    assert store.read(url, 0, 5) == b"child"


def _drop_the_parents_clients(pipe, store, url, parents):
    store.close()
    content = store.read(url, 0, 5)
    del store
    gc.collect()
    kept = [client for _, clients in cloud._of_parents for client in clients.values()]
    pipe.send((content, parents in map(id, kept)))


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="there is no fork here")
def test_a_child_never_frees_what_obstore_holds_of_its_parent(s3):
    # It would do so under a lock that a thread of the parent may have held when it forked.
    url = f"s3://{s3.make_bucket()}/a"
    store = CloudStore(options=s3.options)
    store.write(url, b"child")
    client = next(iter(store._clients[1].values()))
    assert run_in_child("fork", _drop_the_parents_clients, store, url, id(client)) == (b"child", True)
    assert not cloud._of_parents


# Servers that fail


@pytest.fixture
def server():
    with FaultServer({"/bucket/a.tar": PAYLOAD}) as server:
        yield server


@pytest.fixture
def url():
    return "s3://bucket/a.tar"


@pytest.fixture
def store(server):
    return make_store(server)


def make_store(server, retry=QUICK):
    return CloudStore(
        options={"endpoint": server.url, "access_key_id": "key", "secret_access_key": SECRET, "region": "us-east-1"},
        retry=retry,
        limits=ReadLimits(most=1 << 20),
    )


PASSING = {
    "503": Fault.status(503),
    "429": Fault.status(429, retry_after=0),
    "408": Fault.status(408),
    "500": Fault.status(500),
    "SlowDown": Fault.status(400, body=b"<Error><Code>RequestTimeout</Code></Error>"),
    "reset": Fault.reset(),
    "reset in the body": Fault.reset(after=100_000),
    "cut": Fault.truncate(after=100_000),
    "short": Fault.body_length(-10),
    "quiet": Fault.quiet(),
    "quiet in the body": Fault.quiet(after=100_000),
    "garbage": Fault.garbage(),
}
FINAL = {
    "403": (Fault.status(403), AccessError),
    "401": (Fault.status(401), AccessError),
    "404": (Fault.status(404), NotFoundError),
    "501": (Fault.status(501), TransferError),
    "416": (Fault.status(416), ChangedError),
    "region": (Fault.status(301), TransferError),
    "ignored range": (Fault.ignore_range(), RangeIgnoredError),
    "other offset": (Fault.other_offset(), RangeIgnoredError),
    "no range": (Fault.content_range(None), StorageError),
    "other size": (Fault.content_range("bytes {first}-{last}/999999"), ChangedError),
    "other version": (Fault.changed(bytes(len(PAYLOAD))), ChangedError),
    "no etag": (Fault.no_etag(), ChangedError),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_is_outlasted(server, url, name):
    reader = make_store(server, IMPATIENT if name.startswith("quiet") else QUICK).open(url)
    server.forget()
    server.add(PASSING[name], method="GET", times=2)
    assert reader.read(0, 300_000) == PAYLOAD
    server.add(PASSING[name], method="GET", times=2)
    assert reader.read(5, 280_000) == PAYLOAD[5:280_005]
    assert len(server.requests("GET")) == 6


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_stays_is_an_error_with_url_status_and_attempts(server, url, name):
    reader = make_store(server, IMPATIENT if name.startswith("quiet") else QUICK).open(url)
    server.forget()
    server.add(PASSING[name], method="GET")
    kind = RateLimitedError if name == "429" else TransferError
    with pytest.raises(kind) as caught:
        reader.read(0, 100_005 if "body" in name or name == "cut" else 300)
    error = caught.value
    assert error.url == url
    asked = len(server.requests("GET"))
    if name not in ("reset in the body", "cut", "quiet in the body"):
        assert asked == 3
    assert f"{asked} attempts" in str(error)
    if kind is TransferError:
        assert error.attempts == asked
        assert error.status == (int(name) if name.isdigit() else 400 if name == "SlowDown" else error.status)
    assert SECRET not in str(error)


@pytest.mark.parametrize("name", FINAL)
def test_an_answer_that_says_no_is_not_asked_for_again(store, server, url, name):
    fault, kind = FINAL[name]
    reader = store.open(url)
    server.forget()
    server.add(fault, method="GET")
    for read in (reader.read, lambda offset, length: reader.read_many([offset], [length])):
        with pytest.raises(kind) as caught:
            read(10, 200_000)
        assert caught.value.url == url
    assert len(server.requests("GET")) == 2
    server.behave()
    assert store.read(url, 10, 20) == PAYLOAD[10:30]


def test_what_has_come_is_not_asked_for_again(store, server, url):
    reader = store.open(url)
    server.forget()
    server.add(Fault.truncate(after=290_000), method="GET", times=1)
    assert reader.read(0, 300_000) == PAYLOAD
    asked = [request.headers["range"] for request in server.requests("GET")]
    assert asked[0] == "bytes=0-299999"
    assert int(asked[1].removeprefix("bytes=").partition("-")[0]) >= 256 << 10


def test_each_read_names_the_version_that_was_opened(store, server, url):
    identity = store.open(url).identity
    store.read(url, 0, 10)
    assert [request.headers["if-match"] for request in server.requests("GET")] == [f'"{identity}"']


def test_a_look_up_outlasts_faults_and_ends(store, server, url):
    for fault, retry in ((Fault.status(503), QUICK), (Fault.reset(), QUICK), (Fault.quiet(), IMPATIENT)):
        server.add(fault, method="HEAD", times=2)
        assert make_store(server, retry).info(url).size == len(PAYLOAD)
    server.add(Fault.status(503), method="HEAD")
    with pytest.raises(TransferError, match=r"status 503, 3 attempts") as caught:
        store.info(url)
    assert caught.value.status == 503


def test_nobody_listening_is_an_error_in_bounded_time(store, server, url):
    server.down()
    with pytest.raises(TransferError, match="refuses connections") as caught:
        store.info(url)
    assert caught.value.attempts == 3


def test_a_write_outlasts_faults(store, server, url):
    for fault in (Fault.status(503), Fault.reset()):
        server.add(fault, method="PUT", times=2)
        store.write(url, b"new")
    server.behave()
    assert store.read(url, 0, 3) == b"new"
    server.add(Fault.status(503), method="PUT")
    with pytest.raises(TransferError, match="status 503"):
        store.write(url, b"newer")


def test_a_conditional_write_whose_answer_got_lost_is_known_for_its_own(store, server):
    url = "s3://bucket/new.tar"
    server.add(Fault.truncate(after=-1), method="PUT", times=1)  # done, and the answer does not come
    store.write(url, b"mine", expect=ABSENT)
    assert [request.method for request in server.requests()].count("PUT") == 2
    assert store.read(url, 0, 4) == b"mine"


def test_a_conditional_write_after_somebody_elses_is_refused_by_the_server(store, url, monkeypatch):
    seen = store.info(url).identity
    # As if the other one came between the look and the write.
    monkeypatch.setattr(
        "shardset.storage.cloud._mode", lambda *args: "create" if args[3] == ABSENT else {"e_tag": '"another"'}
    )
    for expect in (seen, ABSENT):
        with pytest.raises(ChangedError, match="not written"):
            store.write(url, b"mine", expect=expect)
    assert store.read(url, 0, 10) == PAYLOAD[:10]


def test_what_is_too_long_for_a_condition_is_refused(store, server, monkeypatch):
    monkeypatch.setattr("shardset.storage.cloud._MOST_CONDITIONAL", 1000)
    with pytest.raises(StorageError, match="under a condition"):
        store.write("s3://bucket/new", [bytes(999), bytes(2)], expect=ABSENT)
    assert not server.requests("PUT")


def test_a_listing_goes_on_behind_the_last_name_it_had(store, server, monkeypatch):
    monkeypatch.setattr("shardset.storage.bucket._PAGE", 2)

    def page(names, token):
        items = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{name}&quot;</ETag><Size>1</Size></Contents>"
            for name in names
        )
        more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        return f"<ListBucketResult>{items}{more}</ListBucketResult>".encode()

    server.add(Fault.status(200, body=page(["f/a", "f/b"], "t")), path="/bucket", first=1, last=1)
    server.add(Fault.reset(), path="/bucket", first=2, last=3)
    server.add(Fault.status(200, body=page(["f/c"], None)), path="/bucket", first=4)
    assert [info.url for info in store.list("s3://bucket/f")] == [f"s3://bucket/f/{name}" for name in "abc"]
    asked = [request.path for request in server.requests("GET", "/bucket")]
    assert "start-after=f%2Fb" in asked[-1]
    assert len(asked) == 4


def test_a_listing_in_no_order_or_with_names_that_cannot_be_asked_for_is_an_error(store, server):
    item = (
        "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        "<ETag>1</ETag><Size>1</Size></Contents>"
    )
    for names, expected in ((("f/b", "f/a"), "no order"), (("f//a",), "cannot list")):
        body = "<ListBucketResult>" + "".join(map(item.format, names)) + "</ListBucketResult>"
        server.behave()
        server.add(Fault.status(200, body=body.encode()), path="/bucket")
        with pytest.raises(StorageError, match=expected):
            list(store.list("s3://bucket/f"))


def test_a_known_object_is_read_without_asking_for_it(store, server, url):
    info = store.info(url)
    fresh = pickle.loads(pickle.dumps(store))
    server.forget()
    assert fresh.open(url, info).read(0, 5) == PAYLOAD[:5]
    assert [request.method for request in server.requests()] == ["GET"]


def test_sixteen_threads_share_a_client_that_is_made_once(store, url):
    barrier = threading.Barrier(16)

    def read(number):
        barrier.wait()
        return store.read(url, number, 1)

    with ThreadPoolExecutor(16) as pool:
        assert b"".join(pool.map(read, range(16))) == PAYLOAD[:16]
    assert len(store._clients[1]) == 1
