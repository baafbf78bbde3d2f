"""How `HttpStore` behaves towards servers: what it tells whom, when it waits, and what it asks for again."""

from __future__ import annotations

import logging
import pickle
import random
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from servers.faulty import Fault, FaultProcess, FaultServer
from servers.nginx import serve_nginx
from shardset.errors import AccessError, NotFoundError, RangeIgnoredError, StorageError, TransferError
from shardset.policy import Report
from shardset.storage import HttpStore
from shardset.storage.planner import ReadLimits
from shardset.storage.retry import Retry
from storage.store_suite import PAYLOAD, _read_in_child, digest_of_ranges, expected_digest, run_in_child

pytestmark = pytest.mark.servers

DATA = random.Random(21).randbytes(1_000_000)
RETRY = Retry(attempts=8, first_wait=0.02, longest_wait=0.2, rate_limit=5)
SECRET = "s3cr3t0987654321"


@pytest.fixture
def server():
    with FaultServer({"/a.tar": DATA, "/dir/b.tar": b"b"}) as server:
        yield server


@pytest.fixture
def other():
    with FaultServer({"/a.tar": DATA}) as other:
        yield other


@pytest.fixture
def store():
    return HttpStore(retry=RETRY)


# Who is told what


def test_headers_go_to_their_own_origin_and_to_no_other(server, other):
    server.add(Fault.redirect(f"{other.url}a.tar"))
    headers = {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Cookie": f"session={SECRET}"}
    store = HttpStore(retry=RETRY, headers={server.url: headers})
    assert store.read(f"{server.url}a.tar", 10, 10) == DATA[10:20]
    assert all(request.headers["authorization"] == f"Bearer {SECRET}" for request in server.requests())
    assert all(request.headers["x-api-key"] == SECRET for request in server.requests())
    assert other.requests()
    assert SECRET not in repr(other.requests())


def test_headers_of_the_origin_that_a_redirect_leads_to_are_sent_there(server, other):
    server.add(Fault.redirect(f"{other.url}a.tar"))
    store = HttpStore(retry=RETRY, headers={server.url: {"X-Token": "one"}, other.url: {"X-Token": "two"}})
    assert store.read(f"{server.url}a.tar", 0, 5) == DATA[:5]
    assert {request.headers["x-token"] for request in server.requests()} == {"one"}
    assert {request.headers["x-token"] for request in other.requests()} == {"two"}


def test_a_login_in_the_url_is_sent_to_its_own_origin_only(server, other, store):
    url = f"{server.url.replace('://', f'://user:{SECRET}@')}a.tar"
    assert store.read(url, 0, 5) == DATA[:5]
    assert all(request.headers["authorization"].startswith("Basic ") for request in server.requests())
    server.forget()
    server.add(Fault.redirect(f"{other.url}a.tar"))
    store.close()
    assert store.read(url, 0, 5) == DATA[:5]
    assert all("authorization" in request.headers for request in server.requests())
    assert not any("authorization" in request.headers for request in other.requests())


def test_a_connection_used_with_a_login_is_used_without_one_afterwards(server, store):
    url = f"{server.url}a.tar"
    store.read(url.replace("://", f"://user:{SECRET}@"), 0, 5)
    server.forget()
    assert store.read(url, 0, 5) == DATA[:5]
    assert not any("authorization" in request.headers for request in server.requests())


def test_a_redirect_from_https_to_http_is_not_followed(other, monkeypatch):
    with FaultServer({"/a.tar": DATA}, tls=True) as secure:
        monkeypatch.setenv("SSL_CERT_FILE", str(secure.ca_file))
        store, url = HttpStore(retry=RETRY), f"{secure.url}a.tar"
        assert store.read(url, 5, 5) == DATA[5:10]
        store.close()
        secure.add(Fault.redirect(f"{other.url}a.tar?signature={SECRET}.9"))
        for ask in (store.info, store.open, lambda url: list(store.list(url))):
            with pytest.raises(AccessError, match="https to http") as caught:
                ask(url)
            assert SECRET not in str(caught.value)
        assert other.requests() == []


SAY_NO = {
    "503": Fault.status(503),
    "400": Fault.status(400, body=b"the server repeats the signature: " + SECRET.encode()),
    "403": Fault.status(403, body=b"bad signature " + SECRET.encode()),
    "404": Fault.status(404),
    "429": Fault.status(429, retry_after=3600),
    "cut": Fault.truncate(0),
    "reset": Fault.reset(),
    "garbage": Fault.garbage(SECRET.encode()),
    "ignored": Fault.ignore_range(),
    "other range": Fault.other_offset(),
    "changed": Fault.changed(DATA[::-1]),
    "loop": Fault.redirect_loop(),
    "off the web": Fault.redirect(f"ftp://user:{SECRET}@example.org/?signature={SECRET}.1"),
    "nowhere": Fault.redirect(f"http://user:{SECRET}@127.0.0.1:1/?X-Amz-Signature={SECRET}"),
    "bad port": Fault.redirect(f"http://user:{SECRET}@127.0.0.1:x/?sig={SECRET}"),
}


@pytest.mark.parametrize("name", SAY_NO)
@pytest.mark.parametrize("signed", ["the url", "where it leads"])
def test_no_secret_stands_in_a_message_or_log(server, caplog, name, signed):
    caplog.set_level(logging.DEBUG)
    store = HttpStore(retry=Retry(attempts=2, first_wait=0.01))
    url = f"{server.url}a.tar"
    if signed == "the url":
        url = f"{url.replace('://', f'://user:{SECRET}@')}?X-Amz-Signature={SECRET}&sig={SECRET}&token={SECRET}"
    else:
        server.add(Fault.redirect(f"/a.tar?x=1&X-Amz-Signature={SECRET}", status=307), path="/a.tar", first=2, last=2)
    known = store.info(url)
    server.add(SAY_NO[name], first=1 if signed == "the url" else 2)
    with pytest.raises(StorageError) as caught:
        store.open(url, known).read(5, 50)
    error = caught.value
    copy = pickle.loads(pickle.dumps(error))
    shown = (str(error), repr(error), str(error.url), str(copy), repr(copy), *traceback.format_exception_only(error))
    for text in (*shown, caplog.text):
        assert SECRET not in text


# When it waits


def test_a_retry_after_is_waited_for(server, store):
    url = f"{server.url}a.tar"
    store.open(url)
    server.forget()
    server.add(Fault.status(503, retry_after=1), times=1)
    assert store.read(url, 0, 5) == DATA[:5]
    first, second = server.requests()
    assert 0.99 <= second.time - first.time < 30


def test_a_retry_after_longer_than_allowed_is_an_error_at_once(server, store):
    url = f"{server.url}a.tar"
    server.add(Fault.status(503, retry_after=60))
    begin = time.monotonic()
    with pytest.raises(StorageError, match="asks to wait 60 s"):
        store.open(url)
    assert time.monotonic() - begin < 30
    assert len(server.requests()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [Fault.status(429, retry_after=1), Fault.rate_limit(0, 1, code=429)], ids=["Retry-After", "RateLimit"]
)
def test_when_one_thread_is_told_to_wait_all_wait_and_other_servers_are_not_concerned(server, other, store, fault):
    url, url_of_other = f"{server.url}a.tar", f"{other.url}a.tar"
    for each in (url, url_of_other):
        store.open(each)
    server.forget()
    server.add(Fault.latency(0.01))
    server.add(fault, first=40, last=40)
    stop = time.monotonic() + 2

    def read(url):
        while time.monotonic() < stop:
            assert store.read(url, 100, 100) == DATA[100:200]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, [url] * 6 + [url_of_other] * 2))
    refused = next(request.time for request in server.requests() if request.status == 429)
    gap = (refused + 0.25, refused + 0.95)  # those under way at that moment are still heard
    assert not [request for request in server.requests() if gap[0] < request.time < gap[1]]
    assert [request for request in server.requests() if request.time > gap[1]]
    assert len([request for request in other.requests() if gap[0] < request.time < gap[1]]) > 20


def test_requests_are_spread_when_few_are_left(server, store):
    url = f"{server.url}a.tar"
    store.open(url)
    server.forget()
    server.add(Fault.rate_limit(4, 1), times=1)
    for _ in range(4):
        store.read(url, 0, 5)
    times = [request.time for request in server.requests()]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(0.2 < gap < 2 for gap in gaps[1:])


def test_waits_between_attempts_grow_and_are_random(server):
    server.add(Fault.status(503))
    store = HttpStore(retry=Retry(attempts=6, first_wait=0.02, longest_wait=10))
    with pytest.raises(TransferError):
        store.info(f"{server.url}a.tar")
    times = [request.time for request in server.requests()]
    gaps = [after - before for before, after in pairwise(times)]
    assert len(gaps) == 5
    for number, gap in enumerate(gaps):
        assert gap < 0.02 * 2**number + 1
    assert gaps[4] > 0.02 * 16 / 4


# What it asks for again


def test_a_transfer_goes_on_at_the_byte_that_it_had_reached(server, store):
    url = f"{server.url}a.tar"
    store.open(url)
    server.forget()
    server.add(Fault.truncate(100_000), times=3)
    assert store.read(url, 50_000, 600_000) == DATA[50_000:650_000]
    starts = [request.headers["range"] for request in server.requests("GET")]
    assert starts == [f"bytes={start}-649999" for start in (50_000, 150_000, 250_000, 350_000)]
    assert sum(request.sent for request in server.requests("GET")) == 600_000


def test_a_long_transfer_over_a_bad_line_comes_to_its_end(server):
    url = f"{server.url}a.tar"
    store = HttpStore(retry=Retry(attempts=2, first_wait=0.001), limits=ReadLimits(most=2 << 20))
    server.add(Fault.truncate(70_000), method="GET")
    assert store.open(url).read(0, len(DATA)) == DATA
    assert len(server.requests("GET")) == 15


def test_a_redirect_is_asked_for_once_and_again_when_it_has_expired(server, other, store):
    server.add(Fault.redirect(f"{other.url}a.tar", uses=6), path="/a.tar")
    url = f"{server.url}a.tar"
    for number in range(20):
        assert store.read(url, number, 10) == DATA[number : number + 10]
    assert len(server.requests()) <= 5
    assert [request.status for request in other.requests()].count(403) <= 4


def test_a_redirect_that_may_not_be_kept_is_asked_for_each_time(server, other, store):
    server.add(Fault.redirect(f"{other.url}a.tar", cache="max-age=0"), path="/a.tar")
    url = f"{server.url}a.tar"
    for _ in range(5):
        store.read(url, 0, 10)
    assert len(server.requests()) == 6


def test_a_refusal_is_final_after_the_redirect_was_asked_for_anew(server, other, store):
    server.add(Fault.redirect(f"{other.url}a.tar"), path="/a.tar")
    url = f"{server.url}a.tar"
    store.open(url)
    other.add(Fault.status(403))
    server.forget()
    with pytest.raises(AccessError):
        store.read(url, 0, 5)
    assert len(server.requests()) == 1


def test_a_server_that_ignores_ranges_is_read_where_full_downloads_are_allowed(server):
    server.add(Fault.ignore_range())
    url = f"{server.url}a.tar"
    with pytest.raises(RangeIgnoredError, match="allow_full_downloads"):
        HttpStore(retry=RETRY).read(url, 500_000, 100)
    store = HttpStore(retry=RETRY, allow_full_downloads=True)
    assert store.read(url, 500_000, 100) == DATA[500_000:500_100]
    assert store.read_many(url, [999_990, 5], [10, 0]) == [DATA[-10:], b""]


def test_a_server_that_is_down_for_a_moment_is_waited_for(server):
    url = f"{server.url}a.tar"
    store = HttpStore(retry=Retry(attempts=50, first_wait=0.02, longest_wait=0.2))
    assert store.read(url, 0, 5) == DATA[:5]
    server.down(0.2)
    assert store.read(url, 5, 5) == DATA[5:10]


def test_a_server_that_stays_down_is_an_error_in_bounded_time(server):
    url = f"{server.url}a.tar"
    store = HttpStore(retry=Retry(attempts=4, first_wait=0.02))
    store.open(url)
    server.down()
    begin = time.monotonic()
    for ask in (store.info, lambda url: store.open(url).read(0, 5), lambda url: list(store.list(url))):
        with pytest.raises(TransferError, match="4 attempts") as caught:
            ask(url)
        assert (caught.value.status, caught.value.attempts) == (None, 4)
        assert caught.value.url.startswith(url)
    assert time.monotonic() - begin < 20


def test_a_listed_name_that_leads_nowhere_is_counted(server, store):
    server.put("/dir/gone.tar", b"x")
    server.add(Fault.status(404), path="/dir/gone.tar")
    report = Report()
    assert [info.url for info in store.list(f"{server.url}dir")] == [f"{server.url}dir/b.tar"]
    list(store.list(f"{server.url}dir", report))
    assert report.counts == {"dangling_link": 1}
    with pytest.raises(NotFoundError):
        list(store.list(f"{server.url}no"))


# Connections, threads and processes


def test_a_hundred_reads_use_one_connection_and_sixteen_threads_no_more_than_sixteen(server, store):
    url = f"{server.url}a.tar"
    for number in range(100):
        assert store.read(url, number, 100) == DATA[number : number + 100]
    assert len({request.connection for request in server.requests()}) == 1
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: store.read(url, number, 100), range(400)))
    assert len({request.connection for request in server.requests()}) <= 17


def test_a_connection_that_the_server_has_closed_meanwhile_is_made_anew_without_an_attempt_lost(server):
    store, url = HttpStore(retry=Retry(attempts=1)), f"{server.url}a.tar"
    server.add(Fault.hang_up())
    for number in range(20):
        assert store.read(url, number, 10) == DATA[number : number + 10]


def misbehave(server):
    """Make each kind of request fail now and then, each fault at its own pace."""
    server.add(Fault.status(503), every=7)
    server.add(Fault.truncate(5), every=11)
    server.add(Fault.reset(), every=13)
    server.add(Fault.reset(20), every=17)
    server.add(Fault.garbage(), every=19)
    server.add(Fault.hang_up(), every=5)
    server.add(Fault.latency(0.005), every=3)


def test_many_threads_read_right_bytes_from_a_server_that_fails_all_the_time(server):
    url = f"{server.url}a.tar"
    retry = Retry(attempts=12, first_wait=0.002, longest_wait=0.02)
    store = HttpStore(retry=retry, limits=ReadLimits(gap=100, most=50_000))
    misbehave(server)

    def read(seed):
        chooser = random.Random(seed)
        offsets = [chooser.randrange(900_000) for _ in range(20)]
        lengths = [chooser.choice((1, 100, 5_000, 100_000)) for _ in offsets]
        views = store.read_many(url, offsets, lengths)
        return all(
            view == DATA[offset : offset + length] for view, offset, length in zip(views, offsets, lengths, strict=True)
        )

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(read, range(48)))


def test_faults_are_survived_over_tls_too(monkeypatch):
    with FaultServer({"/a.tar": PAYLOAD}, tls=True) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(server.ca_file))
        misbehave(server)
        store = HttpStore(retry=Retry(attempts=12, first_wait=0.002, longest_wait=0.02))
        assert digest_of_ranges(store.open(f"{server.url}a.tar").read, 6) == expected_digest(6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_reads_from_a_server_that_fails_while_its_parent_goes_on_reading(method):
    with FaultProcess({"/a.tar": PAYLOAD}) as server:
        url = f"{server.url}a.tar"
        store = HttpStore(retry=Retry(attempts=12, first_wait=0.002, longest_wait=0.02))
        store.read_many(url, [0, 200_000], [10, 10])  # so that there are connections
        misbehave(server)
        stop = threading.Event()

        def go_on():
            rounds = 0
            while not stop.is_set() or not rounds:
                assert digest_of_ranges(store.open(url).read, 5) == expected_digest(5)
                rounds += 1
            return rounds

        with ThreadPoolExecutor(3) as pool:
            parents = [pool.submit(go_on) for _ in range(3)]
            for seed in (31, 32):
                assert run_in_child(method, _read_in_child, store, url, seed) == expected_digest(seed)
            stop.set()
            assert all(parent.result() for parent in parents)


def test_nginx_sends_the_bytes_asked_for_and_no_more(tmp_path):
    (tmp_path / "a.tar").write_bytes(DATA)
    with serve_nginx(tmp_path) as nginx:
        store = HttpStore(retry=RETRY, limits=ReadLimits(gap=1000))
        offsets = [*range(0, 900_000, 30_000)]
        store.read_many(f"{nginx.url}a.tar", offsets, [1000] * len(offsets))
        asked = [request for request in nginx.requests() if request.method == "GET"]
        assert len(asked) == len(offsets)
        assert sum(request.sent for request in asked) == 1000 * len(offsets)


def test_a_head_that_does_not_end_is_refused_at_once(server, store):
    server.add(Fault.headers({f"X-{number}": "y" * 1000 for number in range(270)}), path="/a.tar")
    with pytest.raises(TransferError, match=r"head has more than 256 KiB \(1 attempt\)"):
        store.info(f"{server.url}a.tar")
