"""Many requests in one thread: how they run side by side, end together, and stay out of each other's way."""

from __future__ import annotations

import _thread
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise

import pytest

from servers.faulty import Fault, FaultServer
from servers.nginx import serve_nginx
from shardset.errors import NotFoundError, StorageError, TransferError
from shardset.storage import HttpStore, MemoryStore, transport
from shardset.storage.exchange import Ask
from shardset.storage.loop import Loop
from shardset.storage.planner import ReadLimits
from shardset.storage.remote import Fetching, read_many_of
from shardset.storage.retry import HostBudget, Retry
from shardset.storage.threads import Jobs
from timing import least_seconds

pytestmark = pytest.mark.servers

DATA = random.Random(23).randbytes(1_000_000)
RETRY = Retry(attempts=8, first_wait=0.02, longest_wait=0.2, stall=100, rate_limit=5)
OFFSETS = list(range(0, 1_000_000, 20_000))


@pytest.fixture
def server():
    with FaultServer({"/a.tar": DATA}) as server:
        yield server


def open_reader(server, **limits):
    return HttpStore(retry=RETRY, limits=ReadLimits(gap=0, **limits)).open(f"{server.url}a.tar")


def right(views):
    return [bytes(view) for view in views] == [DATA[offset : offset + 100] for offset in OFFSETS]


def lengths():
    return [100] * len(OFFSETS)


@pytest.fixture
def loop():
    budgets = {}
    loop = Loop(lambda url: budgets.setdefault(url, HostBudget(4)), lambda _url, _fault: None)
    yield loop
    loop.end()


# What it does


def test_many_ranges_come_over_as_many_connections_as_may_be_under_way(server):
    reader = open_reader(server, at_once=8)
    server.add(Fault.latency(0.02), every=1)
    server.forget()
    assert right(reader.read_many(OFFSETS, lengths()))
    connections = {request.connection for request in server.requests()}
    assert len(server.requests()) == len(OFFSETS)
    assert 2 <= len(connections) <= 9
    assert right(reader.read_many(OFFSETS, lengths()))
    assert len({request.connection for request in server.requests()}) <= 9  # they are kept


def test_all_requests_of_a_process_are_made_in_one_thread_however_many_ask(server):
    reader = open_reader(server)
    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(lambda _: right(reader.read_many(OFFSETS, lengths())), range(24)))
    assert [thread.name for thread in threading.enumerate()].count("shardset-http") == 1


def test_waits_and_new_attempts_of_one_transfer_hold_up_no_other(server):
    reader = open_reader(server)

    def ask():
        server.forget()
        server.add(Fault.status(503), times=1)
        assert right(reader.read_many(OFFSETS, lengths()))

    assert least_seconds(ask, 2) < 2
    assert len(server.requests()) == len(OFFSETS) + 1  # one came twice


def test_a_server_that_asks_one_transfer_to_wait_is_left_alone_by_all(server):
    reader = open_reader(server, at_once=2)
    server.add(Fault.status(429, retry_after=1), first=7, times=1)
    assert right(reader.read_many(OFFSETS, lengths()))
    times = sorted(request.time for request in server.requests())
    assert max(later - earlier for earlier, later in pairwise(times)) >= 0.9


def test_ranges_of_several_objects_are_read_in_one_go(server):
    store = HttpStore(retry=RETRY, limits=ReadLimits(gap=0))
    memory = MemoryStore()
    memory.write("memory://b.tar", DATA)
    other = HttpStore(retry=RETRY)
    urls = [f"{server.url}{number}.tar" for number in range(6)]
    contents = [DATA[1000 * number :] for number in range(6)]
    for number, content in enumerate(contents):
        server.put(f"/{number}.tar", content)
    readers = [*map(store.open, urls), other.open(urls[2]), memory.open("memory://b.tar")]
    contents += [contents[2], DATA]
    server.add(Fault.latency(0.2))

    def ask():
        found = read_many_of([(reader, [5, 900_000, 400_000], [10, 20, 0]) for reader in readers], 4)
        for views, content in zip(found, contents, strict=True):
            assert [bytes(view) for view in views] == [content[5:15], content[900_000:900_020], b""]

    assert least_seconds(ask, 1) < 1  # one after the other takes 2.8 s


def test_an_error_of_one_of_several_objects_says_which(server):
    store = HttpStore(retry=RETRY)
    urls = [f"{server.url}{number}.tar" for number in range(3)]
    for number in range(3):
        server.put(f"/{number}.tar", DATA)
    readers = [store.open(url) for url in urls]
    server.add(Fault.status(404), path="/1.tar")
    with pytest.raises(NotFoundError) as caught:
        read_many_of([(reader, [0], [10]) for reader in readers], 4)
    assert caught.value.url == urls[1]


# How it ends


def test_the_first_error_ends_the_whole_call_at_once(server):
    reader = open_reader(server)
    server.add(Fault.quiet(), every=2)
    server.add(Fault.status(404), first=6, times=1)
    start = time.monotonic()
    with pytest.raises(StorageError):
        reader.read_many(OFFSETS, lengths())
    assert time.monotonic() - start < 30
    server.behave()
    assert right(reader.read_many(OFFSETS, lengths()))


def test_nothing_is_written_any_more_when_a_call_has_raised(server):
    reader = open_reader(server)
    server.add(Fault.latency(0.3), every=2)
    server.add(Fault.status(400), first=4, times=1)
    view = memoryview(bytearray(100 * len(OFFSETS)))
    with pytest.raises(TransferError):
        reader.fetch_all(
            [Fetching(reader.info, offset, view[100 * at : 100 * at + 100]) for at, offset in enumerate(OFFSETS)], 64
        )
    before = bytes(view)
    time.sleep(0.6)
    assert bytes(view) == before


def test_ctrl_c_ends_a_call_that_waits_and_the_next_one_is_served(server):
    reader = open_reader(server)
    server.add(Fault.quiet(), every=1)

    def read():
        threading.Timer(0.3, _thread.interrupt_main).start()  # here, where the interrupt is waited for
        reader.read_many(OFFSETS, lengths())

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        read()
    assert time.monotonic() - start < 30
    server.behave()
    assert right(reader.read_many(OFFSETS, lengths()))


def test_a_job_that_is_given_up_ends_soon_though_its_requests_are_under_way(server):
    reader = open_reader(server)
    server.add(Fault.quiet(), every=1)
    jobs = Jobs()
    job = jobs.submit(lambda: reader.read_many(OFFSETS, lengths()))
    time.sleep(0.2)
    jobs.give_up()
    start = time.monotonic()
    with pytest.raises(CancelledError):
        job.result(60)
    assert time.monotonic() - start < 30


def test_a_transfer_that_fails_by_a_fault_of_ours_raises_it_and_the_others_go_on(loop):
    def broken():
        yield 0.0
        raise ZeroDivisionError

    def whole():
        yield 0.0

    with pytest.raises(ZeroDivisionError):
        loop.carry_out([whole(), broken()], 2)
    loop.carry_out([whole() for _ in range(5000)], 3)  # and however many end at once, they do so one after the other
    assert not loop.has_ended


def test_a_request_that_cannot_be_made_is_the_fault_of_its_own_transfer_alone(server, loop):
    budget = HostBudget(1)
    loop._budget = lambda _url: budget
    url, heads = f"{server.url}a.tar", []

    def odd():
        yield Ask("GET", url, {"X-Odd": "\u20ac"}, RETRY, lambda _head: None)

    def whole():
        yield 0.1
        heads.append((yield Ask("GET", url, {"Range": "bytes=0-9"}, RETRY, lambda _head: lambda _piece: None)))

    def others():
        loop.carry_out([whole()], 1)

    beside = threading.Thread(target=others)
    beside.start()
    with pytest.raises(UnicodeEncodeError):
        loop.carry_out([odd()], 1)
    beside.join()
    assert [head.status for head in heads] == [206]
    assert not loop.has_ended
    assert budget.try_begin()  # and no place with the host is lost


def test_a_thread_that_breaks_down_tells_all_who_wait(server, loop, monkeypatch):
    budget = HostBudget(1)
    loop._budget = lambda _url: budget
    server.add(Fault.quiet())

    def slow():
        yield Ask("GET", f"{server.url}a.tar", {}, RETRY, lambda _head: None)

    breaks = threading.Timer(0.2, monkeypatch.setattr, [loop, "_look", lambda: 1 / 0])
    breaks.start()
    with pytest.raises(ZeroDivisionError):
        loop.carry_out([slow(), slow()], 2)
    assert loop.has_ended
    assert budget.try_begin()  # no place with the host is lost
    with pytest.raises(CancelledError):
        loop.carry_out([slow()], 1)


def test_after_a_breakdown_the_process_begins_anew(server):
    reader = open_reader(server)
    reader.read_many(OFFSETS, lengths())
    transport._current.loop().end()
    assert right(reader.read_many(OFFSETS, lengths()))


def test_a_host_has_no_more_requests_than_its_budget_allows(server, loop):
    server.add(Fault.latency(0.05), every=1)
    server.forget()

    def ask():
        yield Ask("GET", f"{server.url}a.tar", {"Range": "bytes=0-9"}, RETRY, lambda _head: lambda _piece: None)

    loop.carry_out([ask() for _ in range(12)], 12)
    assert len({request.connection for request in server.requests()}) == 4


# Processes

_FORKING = """
import os, sys
from shardset.storage import HttpStore
from shardset.storage.planner import ReadLimits
reader = HttpStore(limits=ReadLimits(gap=0, at_once=4)).open(sys.argv[1])
def read():
    assert [len(view) for view in reader.read_many([0, 1000, 2000, 3000], [10] * 4)] == [10] * 4
read()
if os.fork() == 0:
    if sys.argv[2] == "reads":
        read()
    sys.exit()  # the interpreter is taken down in order, with everything that it holds
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
read()
"""


@pytest.mark.parametrize("child", ["reads", "ends"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_a_forked_child_leaves_the_connections_of_its_parent_alone(tmp_path, monkeypatch, tls, child):
    (tmp_path / "a.tar").write_bytes(DATA)
    with serve_nginx(tmp_path, tls=tls) as nginx:
        if tls:
            monkeypatch.setenv("SSL_CERT_FILE", str(nginx.ca_file))
        subprocess.run([sys.executable, "-c", _FORKING, f"{nginx.url}a.tar", child], check=True, timeout=60)
        # One asks about the object; the parent's four are those that it has again after the child's end.
        assert len({request.connection for request in nginx.requests()}) <= 5 + 4 * (child == "reads")
        assert len(nginx.requests()) == 9 + 4 * (child == "reads")


_ENDING = """
import sys, threading, time
from shardset.storage import HttpStore
reader = HttpStore().open(sys.argv[1])
offsets = list(range(0, 900_000, 200_000))
reader.read_many(offsets, [10] * len(offsets))
def read():
    time.sleep(0.3)
    reader.read_many(offsets, [10] * len(offsets))
    print("read")
threading.Thread(target=read).start()
"""


def test_a_thread_that_outlives_the_main_one_reads_to_its_end(server):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _ENDING, f"{server.url}a.tar"], check=True, timeout=60, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("read\n", "")
    assert time.monotonic() - start < 50
