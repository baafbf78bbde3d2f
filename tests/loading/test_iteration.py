"""Passes over data that goes wrong in the midst, and passes that are left in the midst."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

import shardset
from servers.faulty import Fault, FaultServer
from shards import make_members, private_cache, replace_file, tar_bytes, write_dataset
from shardset.errors import ChangedError, NotFoundError, ShardsetError, TransferError
from shardset.loading.loader import Loader
from shardset.loading.order import Shuffle
from shardset.loading.read_ahead import ReadAhead
from shardset.policy import Policy
from shardset.storage import HttpStore, LocalStore
from shardset.storage.retry import Retry

__all__ = ["private_cache"]

SHARDS, SAMPLES = 6, 40
WINDOWS = Shuffle(window_bytes=100_000, run_bytes=20_000, lanes=2)
SKIP = Policy("skip", "skip")
QUICK = Retry(attempts=3, first_wait=0.01, longest_wait=0.05)
PATIENT = Retry(attempts=12, first_wait=0.01, longest_wait=0.05)


@pytest.fixture
def server():
    with FaultServer() as server:
        for number in range(SHARDS):
            members = make_members(SAMPLES, fields=("bin", "txt"), start=number * SAMPLES)
            padded = [(name, payload + b"." * 1500) for name, payload in members]
            server.put(f"/shard-{number}.tar", tar_bytes(padded))
        yield server


@pytest.fixture
def far(server):
    urls = [server.url + f"shard-{number}.tar" for number in range(SHARDS)]
    dataset = shardset.discover_dataset(urls, store=HttpStore(retry=QUICK))
    assert len(dataset) == SHARDS * SAMPLES
    server.forget()
    return dataset


def indices(batches):
    return [index for batch in batches for index in batch["__index__"].tolist()]


def shard_of(index):
    return index // SAMPLES


def test_what_a_server_does_wrong_for_a_moment_changes_nothing(server, far):
    far = shardset.discover_dataset([far.shard_url(n) for n in range(SHARDS)], store=HttpStore(retry=PATIENT))
    want = list(Loader(far, 8, shuffle=WINDOWS, seed=1))
    server.add(Fault.status(503), path="*.tar", every=3, times=8)
    server.add(Fault.reset(after=900), path="*.tar", every=4, times=8)
    server.add(Fault.truncate(after=700), path="*.tar", every=5, times=8)
    loader = Loader(far, 8, shuffle=WINDOWS, seed=1, policy=SKIP)
    got = list(loader)
    assert indices(got) == indices(want)
    assert [batch["bin"] for batch in got] == [batch["bin"] for batch in want]
    assert loader.report.counts == {}


@pytest.mark.parametrize("shuffle", [False, WINDOWS], ids=["no", "windows"])
def test_a_removed_shard_is_an_error_that_names_it_and_one_of_its_samples(server, far, shuffle):
    server.add(Fault.status(404), path="/shard-3.tar")
    with pytest.raises(NotFoundError, match=r"shard-3\.tar") as caught:
        list(Loader(far, 8, shuffle=shuffle))
    (note,) = caught.value.__notes__
    key = note.removeprefix("met at sample ").split("'")[1]
    assert 3 * SAMPLES <= int(key) < 4 * SAMPLES


@pytest.mark.parametrize("shuffle", [False, WINDOWS, "full"], ids=["no", "windows", "full"])
def test_samples_of_a_removed_shard_are_replaced_and_counted_and_the_shard_is_not_asked_for_again(server, far, shuffle):
    order = indices(Loader(far, 8, shuffle=shuffle))
    server.add(Fault.status(404), path="/shard-3.tar")
    server.forget()
    loader = Loader(far, 8, shuffle=shuffle, policy=SKIP)
    got = indices(loader)
    assert len(got) == len(order)
    assert all(shard_of(index) != 3 for index in got)
    assert [index for index in order if shard_of(index) != 3] == [
        mine for mine, index in zip(got, order, strict=True) if shard_of(index) != 3
    ]
    counts = loader.report.counts
    assert counts["substituted"] == SAMPLES
    assert counts["read_failed"] >= SAMPLES
    assert len(server.requests(path="/shard-3.tar")) <= 8  # one window may have met it with several requests
    again = indices(Loader(far, 8, shuffle=shuffle, policy=SKIP))
    assert again == got


def test_a_shard_that_never_answers_in_time_is_given_all_its_attempts_once(server, far):
    server.add(Fault.status(503), path="/shard-2.tar")
    started = time.monotonic()
    loader = Loader(far, 4, shuffle=WINDOWS, policy=SKIP, read_ahead=ReadAhead(bytes=50_000))
    got = indices(loader)
    assert len(got) == SHARDS * SAMPLES
    assert all(shard_of(index) != 2 for index in got)
    assert time.monotonic() - started < 60
    requests = server.requests(path="/shard-2.tar")
    ranges = {request.headers["range"] for request in requests}
    assert len(requests) <= QUICK.attempts * len(ranges)
    assert len(requests) <= 40  # of 40 samples in 60 batches, in windows and chunks of a few samples


def test_a_lost_shard_is_tried_again_after_a_while(server, far, monkeypatch):
    server.add(Fault.status(404), path="/shard-0.tar")
    running = iter(Loader(far, 8, shuffle="full", policy=SKIP))
    for _ in range(3):
        next(running)
    monkeypatch.setattr("shardset.loading.windows._REST", 0.0)
    server.behave()
    later = Loader(far, 8, shuffle="full", policy=SKIP)
    assert set(indices(later)) == set(range(SHARDS * SAMPLES))
    assert later.report.counts == {}


def test_a_shard_that_changes_in_the_midst_is_an_error(server, far):
    running = iter(Loader(far, 4, read_ahead=ReadAhead(bytes=20_000)))
    next(running)
    server.put("/shard-4.tar", tar_bytes(make_members(SAMPLES, start=1000)) + bytes(200_000))
    with pytest.raises(ChangedError, match=r"shard-4\.tar"):
        list(running)


def test_a_changed_shard_is_replaced_where_the_policy_says_so(server, far):
    server.put("/shard-4.tar", tar_bytes(make_members(SAMPLES, start=1000)) + bytes(200_000))
    loader = Loader(far, 8, shuffle=WINDOWS, policy=SKIP)
    got = indices(loader)
    assert len(got) == SHARDS * SAMPLES
    assert all(shard_of(index) != 4 for index in got)
    assert loader.report.counts["substituted"] == SAMPLES


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("how", ["removed", "replaced", "cut"])
def test_local_shards_that_go_wrong_before_they_are_opened(tmp_path, how, mmap):
    write_dataset(tmp_path, shards=4, samples=20)
    dataset = shardset.discover_dataset(tmp_path, store=LocalStore(mmap=mmap))
    order = indices(Loader(dataset, 5, shuffle=True))
    dataset = shardset.discover_dataset(tmp_path, store=LocalStore(mmap=mmap))
    assert len(dataset) == 80
    path = tmp_path / "shard-0002.tar"
    if how == "removed":
        path.unlink()
    elif how == "replaced":
        replace_file(path, tar_bytes(make_members(20, start=500)))
    else:
        os.truncate(path, 5000)
    with pytest.raises(ShardsetError, match=r"shard-0002\.tar"):
        list(Loader(dataset, 5, shuffle=True))
    loader = Loader(dataset, 5, shuffle=True, policy=SKIP)
    got = indices(loader)
    assert [index for index in order if index // 20 != 2] == [
        mine for mine, index in zip(got, order, strict=True) if index // 20 != 2
    ]
    assert loader.report.counts["substituted"] == 20
    assert not any(index // 20 == 2 for index in got)


def test_a_local_shard_that_is_cut_while_it_is_read_gives_what_is_left_of_it(tmp_path):
    write_dataset(tmp_path, shards=1, samples=60)
    dataset = shardset.discover_dataset(tmp_path, store=LocalStore(mmap=False))
    running = iter(Loader(dataset, 2, policy=SKIP, read_ahead=ReadAhead(bytes=20_000, batches=1)))
    first = [next(running)]
    os.truncate(tmp_path / "shard-0000.tar", 60 * 1024 * 3 // 2)
    got = first + list(running)
    assert len(got) == 30
    assert set(indices(got)) <= set(range(31))


def test_the_first_error_of_a_pass_is_the_one_of_the_first_sample_in_order(server, far):
    server.add(Fault.status(404), path="/shard-2.tar")
    server.add(Fault.status(404), path="/shard-5.tar")
    got = []
    with pytest.raises(NotFoundError, match=r"shard-2\.tar"):
        got.extend(Loader(far, 8))
    assert indices(got) == list(range(2 * SAMPLES))


def test_where_nothing_can_be_read_the_loader_says_so_and_does_not_hang(server, far):
    server.add(Fault.status(404), path="*.tar")
    with pytest.raises(shardset.ShardsetError, match="none of 64 spare samples"):
        list(Loader(far, 8, policy=SKIP))


def test_where_a_server_is_gone_for_good_the_loader_ends_with_an_error(server, far):
    running = iter(Loader(far, 4, shuffle=WINDOWS, read_ahead=ReadAhead(bytes=50_000)))
    next(running)
    server.down()
    with pytest.raises(TransferError):
        list(running)


def test_a_pass_whose_bytes_are_read_ahead_goes_on_in_a_forked_child(tmp_path):
    write_dataset(tmp_path, shards=5, samples=30, fields=("bin", "txt"))
    dataset = shardset.discover_dataset(tmp_path, store=LocalStore(mmap=False))
    loader = Loader(dataset, 5, shuffle=WINDOWS, decode=True, read_ahead=ReadAhead(bytes=20_000, threads=2))
    want = indices(loader)
    loader.set_epoch(0)
    running = iter(loader)
    got = indices(next(running) for _ in range(4))
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, json.dumps(indices(running)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert got + json.loads(os.read(ours, 10_000)) == want
    assert got + indices(running) == want
    os.close(ours)
    os.close(theirs)


# Passes that are left.


def at_work():
    """The threads of loaders, which end with their passes."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardset-load")}


def settles(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        gc.collect()  # an error's traceback may hold the frame that holds it
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("how", ["close", "forget", "end"])
def test_a_pass_that_is_left_leaves_no_thread_at_work_and_no_payload_in_memory(server, far, how):
    before = at_work()  # those of passes that errors of other tests hold
    loader = Loader(far, 4, shuffle=WINDOWS, decode=True, read_ahead=ReadAhead(bytes=100_000, threads=2))
    running = iter(loader.map(lambda sample: sample))
    next(running)
    next(running)
    assert at_work() - before
    frame = running.gi_frame
    chunks = weakref.ref(frame.f_locals["running"].gi_frame.f_locals["chunks"])
    del frame
    server.add(Fault.latency(0.3), path="*.tar")
    if how == "close":
        running.close()
    elif how == "end":
        list(running)
    del running
    gc.collect()
    assert settles(lambda: not at_work() - before)
    assert settles(lambda: chunks() is None)


def test_hundreds_of_passes_leave_neither_threads_nor_memory(tmp_path):
    write_dataset(tmp_path, shards=3, samples=30, fields=("bin", "txt"))
    dataset = shardset.discover_dataset(tmp_path, store=LocalStore(mmap=False))
    loader = Loader(dataset, 4, shuffle=True, decode=True)
    for _ in range(20):
        list(itertools.islice(loader, 3))
    threads, objects = threading.active_count(), _count_objects()
    for _ in range(100):
        list(itertools.islice(loader, 3))
    assert settles(lambda: threading.active_count() <= threads + 2)
    assert settles(lambda: _count_objects() < objects + 500)


def _count_objects():
    gc.collect()
    return len(gc.get_objects())


_PROGRAM = """
    import itertools, os, sys, threading, time
    import shardset
    from shardset.storage import HttpStore
    url, how = sys.argv[1:]
    dataset = shardset.discover_dataset([url + f"shard-{number}.tar" for number in range(6)], store=HttpStore())
    loader = shardset.Loader(dataset, 4, shuffle=True, decode=True)
    len(loader)
    if how == "break":
        for batch in loader:
            break
    elif how == "kept":
        running = iter(loader)
        next(running)
    elif how == "thread":
        thread = threading.Thread(target=lambda: list(loader))
        thread.start()
    elif how == "interrupt":
        import signal
        running = iter(loader)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                next(running)
                time.sleep(0.05)
        except KeyboardInterrupt:
            print("interrupted")
            del running
    print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["break", "kept", "thread", "interrupt"])
def test_a_program_that_leaves_a_pass_ends_at_once_and_quietly(server, how):
    if how == "interrupt":
        server.add(Fault.latency(0.4), path="*.tar", first=40)
    program = [sys.executable, "-W", "error", "-c", textwrap.dedent(_PROGRAM), server.url, how]
    started = time.monotonic()
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1] == "done"
    assert done.stderr == ""
    assert time.monotonic() - started < 40
