from __future__ import annotations

import gc
import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
import time

import pytest

from loading.watched import WatchedStore, given_in_a_fork, until
from servers.faults import Fault
from servers.faulty import FaultServer
from shards import private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.errors import AccessError, TransferError
from shardset.loading.bucket_loader import BucketDataLoader
from shardset.loading.bucket_order import STRATEGIES
from shardset.loading.cursor import TarDataLoader
from shardset.policy import Policy
from shardset.storage import HttpStore, Retry

SIZES = ((64, 64), (128, 64), (64, 128))
QUICK = Retry(attempts=2, first_wait=0.01, longest_wait=0.05, stall=2)


def write(folder, *, shards=3, files=12, size=10):
    """Write shards of images of three shapes, and indexes that say so."""
    for shard in range(shards):
        names = [f"{shard}{number:03d}.jpg" for number in range(files)]
        path = write_shard(folder / f"s-{shard}.tar", [(name, name.encode() * size) for name in names])
        found = TarDataLoader(path).get_metadata(0)
        for number, name in enumerate(names):
            width, height = SIZES[number % 3]
            found[name] |= {"width": width, "height": height}
        path.with_suffix(".json").write_text(json.dumps({"filesize": path.stat().st_size, "files": found}))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


@pytest.fixture
def store():
    return WatchedStore()


@pytest.fixture
def make(folder, store, monkeypatch):
    """Make loaders whose windows are single shards, so that no read needs two threads, and whose chunks are small."""
    monkeypatch.setattr("shardset.loading.bucket_loader._AT_ONCE", 3)

    def make(**settings):
        dataset = discover_dataset(folder, store=store, policy=settings.pop("policy", None))
        return BucketDataLoader(dataset, shard_batch_size=1, **settings)

    return make


def seen(entries):
    return [(entry.path, bytes(entry.data)) for entry in entries]


def all_batches(loader):
    return [seen(batch) for batch in loader.iter_batches()]


def is_idle(loader):
    """Nothing is ahead, or what is ahead is done."""
    return all(ahead._begun is None or ahead._begun.job.done() for ahead in (loader._read_ahead, loader._planned_ahead))


def test_the_next_batch_is_read_while_the_caller_works_on_one(make, store, folder):
    wanted = all_batches(BucketDataLoader(folder, shard_batch_size=1, batch_size=2))
    loader = make(batch_size=2)
    loader.get_current_bucket()
    store.reads.clear()
    store.gate.clear()
    assert seen(loader.next_batch()) == wanted[0]
    until(lambda: store.under_way)
    time.sleep(0.1)
    assert store.reads == [("s-0.tar", 2, False), ("s-0.tar", 2, True)]  # one batch ahead, and no more
    store.gate.set()
    got = [wanted[0]]
    until(lambda: is_idle(loader))
    while (batch := loader.next_batch()) is not None:
        got.append(seen(batch))
        until(lambda: is_idle(loader))
    assert got == wanted
    first = [read for read in store.reads if not read.is_ahead]
    assert len(first) == 1  # whoever works on a batch waits for none but the first
    assert sum(read.count for read in store.reads) == 36


def test_the_next_chunk_of_files_is_read_while_the_caller_works_on_one(tmp_path, store):
    folder = write(tmp_path, shards=1, size=1 << 16)  # of 512 KiB: two are a chunk
    loader = BucketDataLoader(discover_dataset(folder, store=store), chunk_size_mb=1)
    loader.get_current_bucket()
    store.reads.clear()
    store.gate.clear()
    got = [next(loader)]
    until(lambda: store.under_way)
    got.append(next(loader))
    time.sleep(0.1)
    assert store.reads == [("s-0.tar", 2, False), ("s-0.tar", 2, True)]
    store.gate.set()
    got += loader
    assert seen(got) == seen(BucketDataLoader(folder))
    assert [read[:2] for read in store.reads] == 6 * [("s-0.tar", 2)]  # each once


def attempt(call, *arguments):
    """What a call gives, or says."""
    try:
        found = call(*arguments)
    except ValueError as error:
        return str(error)
    return seen(found) if isinstance(found, list) else found


STEPS = {
    "file": lambda loader, _: seen([each for each in [next(loader, None)] if each is not None]),
    "batch": lambda loader, _: attempt(loader.next_batch),
    "reset": lambda loader, _: loader.reset(),
    "epoch": lambda loader, number: setattr(loader, "epoch", number),
    "size": lambda loader, number: attempt(setattr, loader, "batch_size", number + 1),
    "bucket": lambda loader, number: attempt(loader.skip_to_bucket, ("0.50", "1.00", "2.00", "9")[number]),
    "wait": lambda loader, _: until(lambda: is_idle(loader)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_called_in_whatever_order_gives_what_mapped_shards_give(folder, store, strategy, seed, monkeypatch):
    monkeypatch.setattr("shardset.loading.bucket_loader._AT_ONCE", 3)
    settings = {"shard_batch_size": 2, "batch_size": 3, "sampling_strategy": strategy, "drop_last": seed % 2 == 1}
    near = BucketDataLoader(folder, **settings)
    far = BucketDataLoader(discover_dataset(folder, store=store), **settings)
    draw = random.Random(seed)
    states = [near.state_dict()]
    for _ in range(200):
        step = draw.choice(["file"] * 5 + ["batch"] * 5 + [*STEPS, "state"])
        number = draw.randrange(4)
        if step == "state":
            state = draw.choice(states)
            near.load_state_dict(state)
            far.load_state_dict(state)
        else:
            assert STEPS[step](near, number) == STEPS[step](far, number), step
        assert far.state_dict() == near.state_dict()
        assert far.get_bucket_stats() == near.get_bucket_stats()
        assert far.get_current_bucket() == near.get_current_bucket()
        states.append(near.state_dict())
    assert store.ahead


def test_the_next_shards_are_sorted_into_buckets_ahead_and_seen_only_when_they_are_come_to(make, store):
    loader = make(batch_size=4)
    for _ in range(2):
        loader.next_batch()
        until(lambda: is_idle(loader))
    assert loader.get_bucket_stats()["shards_processed"] == 1
    assert loader.state_dict()["window"] == 0
    loader.next_batch()
    until(lambda: [read.shard for read in store.ahead if read.count == 4] == ["s-0.tar", "s-0.tar", "s-1.tar"])
    assert loader.get_bucket_stats()["shards_processed"] == 2
    assert loader.next_batch()[0].path.startswith("1")


def test_an_index_that_cannot_be_read_ahead_raises_when_its_shards_are_come_to(make, store, folder):
    loader = make(batch_size=12)
    store.broken = {"s-1.json", "s-1.tar"}
    wanted = all_batches(BucketDataLoader(folder, shard_batch_size=1, batch_size=12))
    got = [seen(loader.next_batch()) for _ in range(3)]
    until(lambda: is_idle(loader))
    for _ in range(2):
        with pytest.raises(TransferError):
            loader.next_batch()
    store.broken.clear()
    assert got + all_batches(loader) == wanted


@pytest.mark.parametrize("how", ["batches", "files"])
def test_a_read_ahead_that_failed_raises_when_its_position_is_asked_for_and_is_tried_again(
    folder, store, how, monkeypatch
):
    monkeypatch.setattr("shardset.loading.bucket_loader._AT_ONCE", 4)
    wanted = seen(BucketDataLoader(folder))
    loader = BucketDataLoader(discover_dataset(folder, store=store), batch_size=4)
    loader.dataset.load_files(range(3))

    def ask():
        return seen(loader.next_batch() if how == "batches" else [next(loader) for _ in range(4)])

    store.broken = {"s-1.tar"}  # the second four of each bucket
    got = ask()
    until(lambda: is_idle(loader))
    for _ in range(3):
        with pytest.raises(TransferError):
            ask()
        assert loader.state_dict()["position"] == 4
    store.broken.clear()
    while len(got) < len(wanted):
        got += ask()
    assert got == wanted


@pytest.mark.parametrize("policy", [Policy("skip"), Policy("warn"), Policy("skip", defaults={"data": b"instead"})])
@pytest.mark.parametrize("size", [4, None])
def test_what_cannot_be_read_counts_when_it_is_given_and_once(make, store, policy, size, caplog):
    loader = make(policy=policy, batch_size=size, chunk_size_mb=1)
    report = loader.dataset.report
    list(loader)  # the indexes are here
    loader.reset()
    store.broken = {"s-1.tar"}

    def give(count):
        got = []
        while len(got) < count and (more := loader.next_batch() if size else [next(loader, None)]) and more[0]:
            got += more
        return got

    assert len(give(12)) == 12
    for _ in range(3):  # what is ahead is dropped, and read again
        until(lambda: is_idle(loader))
        assert report.counts == {}
        loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    if size is None:  # one of the chunk, in which all have failed
        assert bool(next(loader).data == b"instead") is bool(policy.defaults)
        assert report.counts == {"read_failed": 1 if policy.defaults else 12}
        if policy.defaults:
            loader.batch_size = 3
            loader.next_batch()
            assert report.counts == {"read_failed": 4}
            loader.batch_size = None
    rest = give(100)
    assert report.counts == {"read_failed": 12}
    assert len([entry for entry in rest if entry.data == b"instead"]) == (
        0 if not policy.defaults else 12 - 4 * (not size)
    )
    assert caplog.text.count("the line was cut") == 12 * (policy.on_error == "warn")


@pytest.mark.parametrize("settings", [{"load_file_data": False}, {"copy": False}, {}])
def test_mapped_shards_and_files_without_payloads_need_no_thread(folder, store, settings):
    is_mapped = settings.get("load_file_data", True)
    dataset = discover_dataset(folder) if is_mapped else discover_dataset(folder, store=store)
    loader = BucketDataLoader(dataset, shard_batch_size=1, batch_size=2, **settings)
    loader.get_current_bucket()
    store.reads.clear()
    next(loader)
    while loader.next_batch() is not None:
        assert loader._read_ahead._begun is loader._planned_ahead._begun is None
    assert store.reads == [] or is_mapped


def test_two_loaders_of_one_dataset_read_ahead_each_for_itself(folder, store):
    dataset = discover_dataset(folder, store=store)
    settings = {"shard_batch_size": 1, "batch_size": 2}
    first = BucketDataLoader(dataset, **settings)
    second = BucketDataLoader(dataset, **settings, sampling_strategy="random_within_buckets")
    pairs = list(zip(first.iter_batches(), second.iter_batches(), strict=True))
    wanted = all_batches(BucketDataLoader(folder, **settings))
    assert [seen(one) for one, _ in pairs] == wanted
    wanted = all_batches(BucketDataLoader(folder, **settings, sampling_strategy="random_within_buckets"))
    assert [seen(other) for _, other in pairs] == wanted


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("how", ["batches", "files"])
def test_a_forked_child_goes_on_and_waits_for_no_thread_of_its_parent(make, store, folder, how):
    wanted = seen(BucketDataLoader(folder, shard_batch_size=1))
    loader = make(batch_size=2, chunk_size_mb=1)
    got = seen(loader.next_batch() if how == "batches" else [next(loader) for _ in range(3)])
    until(lambda: is_idle(loader))
    store.gate.clear()
    got += seen(loader.next_batch() if how == "batches" else [next(loader)])
    until(lambda: store.under_way)
    names = [name for name, _ in wanted]
    assert [name for name, _ in got] + given_in_a_fork(loader, store) == names
    store.gate.set()
    assert got + seen(loader) == wanted


@pytest.mark.parametrize("copy", [True, False])
def test_a_loader_that_has_something_ahead_goes_to_another_process(make, store, folder, copy):
    wanted = seen(BucketDataLoader(folder, shard_batch_size=1))
    loader = make(batch_size=2, copy=copy)
    got = seen([next(loader)]) + seen(loader.next_batch())
    until(lambda: is_idle(loader))
    store.gate.clear()
    got += seen(loader.next_batch())
    until(lambda: store.under_way)
    again = pickle.loads(pickle.dumps(loader))
    assert got + seen(again) == wanted
    store.gate.set()
    assert got + seen(loader) == wanted


@pytest.fixture
def server(tmp_path):
    folder = write(tmp_path / "d")
    with FaultServer() as server:
        for path in folder.iterdir():
            server.put(f"/d/{path.name}", path.read_bytes())
        yield server


def far(server, **settings):
    dataset = discover_dataset(f"{server.url}d/s-{{0..2}}.tar", store=HttpStore(retry=QUICK))
    return BucketDataLoader(dataset, **settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_elsewhere_give_what_those_here_give(server, tmp_path, strategy):
    settings = {"sampling_strategy": strategy, "batch_size": 4, "shard_batch_size": 1}
    wanted = all_batches(BucketDataLoader(tmp_path / "d", **settings))
    loader = far(server, **settings)
    assert all_batches(loader) == wanted
    loader.epoch = 0
    got = []
    server.add(Fault.status(403), path="/d/s-1.tar", times=2)
    failures = 0
    while len(got) < len(wanted):
        try:
            got.append(seen(loader.next_batch()))
        except AccessError:
            failures += 1
    assert got == wanted
    assert failures == 2


@pytest.mark.slow
def test_a_loader_that_is_let_go_of_leaves_nothing_at_work(server):
    loader = far(server, batch_size=4)
    loader.get_current_bucket()
    first = next(loader)
    server.add(Fault.latency(6), path="*.tar")
    loader.next_batch()
    job = loader._read_ahead._begun.job
    assert first.path
    assert not job.done()
    started = time.monotonic()
    del loader
    gc.collect()
    until(job.done)
    assert time.monotonic() - started < 4


_PROGRAM = """
    import sys
    from shardset import BucketDataLoader
    loader = BucketDataLoader(sys.argv[1], batch_size=4)
    loader.next_batch()
    print("given", flush=True)
    sys.stdin.readline()
    loader.next_batch()
    print("done", flush=True)
"""


@pytest.mark.slow
def test_a_program_that_ends_waits_for_nothing_that_it_reads_ahead(server):
    program = [sys.executable, "-W", "error", "-c", textwrap.dedent(_PROGRAM), f"{server.url}d/s-{{0..2}}.tar"]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout.readline() == "given\n"
        server.forget()
        time.sleep(0.3)  # the second batch is here
        server.add(Fault.latency(25), path="*.tar")
        started = time.monotonic()
        out, err = running.communicate("\n", timeout=60)
    assert (out, err, running.returncode) == ("done\n", "", 0)
    assert time.monotonic() - started < 15
    assert server.requests("GET", "*.tar")
