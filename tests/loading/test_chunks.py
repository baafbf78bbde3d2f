"""What a loader reads: how many bytes for each that it gives, in how many reads, and how many it holds meanwhile."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import weakref

import numpy as np
import pytest

import shardset
from shards import private_cache, write_shard
from shardset.formats.example import encode_example
from shardset.loading.loader import Loader
from shardset.loading.order import Shuffle
from shardset.loading.read_ahead import ReadAhead
from shardset.storage import LocalStore, Store
from storage.counting import CountingStore
from tfrecords import record_bytes

__all__ = ["private_cache"]

WINDOWS = Shuffle(window_bytes=2 << 20, run_bytes=128 << 10, lanes=8)
KINDS = {  # bytes of a payload, samples of a shard
    "tar of 1 KB": (1_000, 1_500),
    "tar of 10 KB": (10_000, 240),
    "tar of 100 KB": (100_000, 30),
    "records of 10 KB": (10_000, 240),
}
SHARDS = 4


def payloads(size, count, seed):
    chance = random.Random(seed)
    noise = chance.randbytes(2 * size)
    return [noise[: chance.randint(size // 2, size * 3 // 2)] for _ in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Shards of each kind, made once."""
    made = {}
    for name, (size, count) in KINDS.items():
        folder = tmp_path_factory.mktemp("chunks")
        for shard in range(SHARDS):
            content = payloads(size, count, shard)
            if name.startswith("tar"):
                write_shard(
                    folder / f"{shard}.tar", [(f"{shard}{at:05d}.bin", each) for at, each in enumerate(content)]
                )
            else:
                examples = [encode_example({"bin": [each]}) for each in content]
                (folder / f"{shard}.tfrecord").write_bytes(record_bytes(examples))
        made[name] = folder
    return made


def opened(folder, store=None):
    store = store or CountingStore(LocalStore())
    dataset = shardset.discover_dataset(folder, store=store)
    len(dataset)
    if isinstance(store, CountingStore):
        store.reset()
    return dataset, store


def given_bytes(batches, dataset):
    """The bytes that the given samples have: (of payloads, of shards with headers and padding)."""
    catalog = dataset.catalog
    payload_bytes, samples = 0, 0
    for batch in batches:
        samples += len(batch["__index__"])
        for index in batch["__index__"].tolist():
            group, row, _ = catalog.locate(index)
            payload_bytes += int(group.length[group.first[row] : group.first[row + 1]].sum())
    return payload_bytes, dataset.total_size * samples / len(dataset)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shuffle", [True, False, WINDOWS], ids=["default", "no", "windows"])
@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_at_most_a_tenth_more_is_read_than_is_given(folders, name, shuffle, world_size):
    dataset, store = opened(folders[name])
    size, _ = KINDS[name]
    read, given, padded = 0, 0, 0.0
    for rank in range(world_size):
        store.reset()
        batches = list(Loader(dataset, 8, shuffle=shuffle, rank=rank, world_size=world_size))
        read += store.bytes_read
        payload_bytes, of_shards = given_bytes(batches, dataset)
        given, padded = given + payload_bytes, padded + of_shards
    # Members of 1 KB have as much again in headers and padding, which nothing can leave out but a read for each.
    assert read <= 1.1 * (given if size > 1_000 else padded)


@pytest.mark.parametrize("name", KINDS)
def test_runs_are_read_at_once(folders, name):
    dataset, store = opened(folders[name])
    loader = Loader(dataset, 8, shuffle=WINDOWS)
    list(loader)
    size, count = KINDS[name]
    of_run = min(256, max(1, (128 << 10) // size))
    runs = SHARDS * count / of_run
    assert len(store.ranges) <= 3 * runs + 200
    assert loader.metrics.reads == len(store.ranges)
    assert loader.metrics.bytes == store.bytes_read


@pytest.mark.parametrize("name", KINDS)
def test_in_a_budget_that_is_too_small_for_a_window_there_are_more_reads_of_no_more_bytes(folders, name, caplog):
    caplog.set_level(logging.INFO, "shardset")
    dataset, store = opened(folders[name])
    loader = Loader(dataset, 8, shuffle=WINDOWS, read_ahead=ReadAhead(bytes=1 << 20))
    batches = list(loader)
    assert batches[0].keys() == Loader(dataset, 8).__iter__().__next__().keys()
    payload_bytes, of_shards = given_bytes(batches, dataset)
    assert store.bytes_read <= 1.1 * (payload_bytes if KINDS[name][0] > 1_000 else of_shards)
    assert len(store.ranges) <= len(dataset) + SHARDS
    if name != "tar of 100 KB":  # whose runs have one sample each
        assert loader.report.counts == {"window_shrunk": 1}
        (place,) = loader.report.places("window_shrunk")
        assert "no more than 1048576 may be held" in str(place)
        assert "give more with ReadAhead(bytes=...)" in caplog.text


def test_a_budget_changes_no_stream(folders):
    streams = []
    for size in (1 << 10, 300 << 10, 1 << 20, 1 << 30):
        dataset, _ = opened(folders["tar of 10 KB"])
        batches = list(Loader(dataset, 8, shuffle=WINDOWS, read_ahead=ReadAhead(bytes=size)))
        streams.append([(batch["__key__"], batch["bin"]) for batch in batches])
    assert all(stream == streams[0] for stream in streams)


def test_of_several_fields_the_wanted_one_alone_is_read(tmp_path):
    chance = random.Random(3)
    for shard in range(3):
        members = []
        for number in range(200):
            members += [(f"{shard}{number:04d}.{name}", chance.randbytes(n)) for name, n in (("a", 9000), ("b", 20000))]
        write_shard(tmp_path / f"{shard}.tar", members)
    for fields, size in (("a", 9000), ("b", 20000)):
        dataset, store = opened(tmp_path)
        batches = list(Loader(dataset, 10, shuffle=WINDOWS, fields=fields))
        assert sum(len(batch[fields]) for batch in batches) == 600
        assert store.bytes_read <= 1.1 * 600 * size


# Memory.


def comes_true(condition):
    """Wait until something is so, for a while: another thread lets go of what it has given a moment later."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


class TrackingStore(Store):
    """A store without maps that knows how many of the bytes that it gave are still held by somebody."""

    def __init__(self):
        self.store = LocalStore()
        self.lock = threading.Lock()
        self.held = self.most = 0

    def info(self, url):
        return self.store.info(url)

    def list(self, url, report=None):
        return self.store.list(url, report)

    def open(self, url, known=None):
        return _TrackingReader(self, self.store.open(url, known))

    def count(self, size):
        with self.lock:
            self.held += size
            self.most = max(self.most, self.held)

    def close(self):
        self.store.close()


class _TrackingReader:
    def __init__(self, account, reader):
        self.account, self.reader = account, reader
        self.url, self.size, self.identity = reader.url, reader.size, reader.identity

    def read(self, offset, length):
        return self.reader.read(offset, length)

    def view(self, offset, length):
        return self.read_many([offset], [length])[0]

    def read_many(self, offsets, lengths):
        return [self._tracked(int(offset), int(length)) for offset, length in zip(offsets, lengths, strict=True)]

    def map(self):
        return None

    def _tracked(self, offset, length):
        content = np.frombuffer(self.reader.read(offset, length), np.uint8).copy()
        self.account.count(length)
        weakref.finalize(content, self.account.count, -length)
        return memoryview(content).toreadonly()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("budget", [1 << 20, 3 << 20, 5 << 20])
@pytest.mark.parametrize("shuffle", [True, False, WINDOWS], ids=["default", "no", "windows"])
def test_no_more_bytes_are_held_than_allowed(folders, name, budget, shuffle):
    store = TrackingStore()
    dataset, _ = opened(folders[name], store)
    store.most = 0
    for decode in (None, {"bin": len}):
        loader = Loader(
            dataset,
            2,
            shuffle=shuffle,
            decode=decode and shardset.Decode(fields=decode),
            read_ahead=ReadAhead(bytes=budget, threads=2),
        )
        for batch in loader:
            del batch
    assert comes_true(lambda: store.held == 0)
    assert budget / 8 < store.most <= budget * 1.1  # a tenth more may be read than is wanted


def test_samples_larger_than_the_budget_come_one_by_one(tmp_path):
    chance = random.Random(1)
    wanted = {f"{number}": chance.randbytes(700_000) for number in range(6)}
    write_shard(tmp_path / "a.tar", [(f"{key}.bin", payload) for key, payload in wanted.items()])
    store = TrackingStore()
    dataset, _ = opened(tmp_path, store)
    store.most = 0
    got = {}
    for batch in Loader(dataset, 1, shuffle=True, read_ahead=ReadAhead(bytes=1000)):
        got[batch["__key__"][0]] = batch["bin"][0]
        del batch
    assert got == wanted
    assert store.most <= 701_000


def test_a_batch_that_is_kept_keeps_nothing_of_its_window(folders):
    store = TrackingStore()
    dataset, _ = opened(folders["tar of 10 KB"], store)
    kept = list(Loader(dataset, 8, shuffle=WINDOWS, read_ahead=ReadAhead(bytes=1 << 20)))
    assert comes_true(lambda: store.held == 0)
    assert len(kept) == 120


@pytest.mark.slow
def test_many_tiny_samples_take_little_memory_and_no_long_stop(tmp_path):
    import tracemalloc

    record = encode_example({"y": [1]})
    (tmp_path / "a.tfrecord").write_bytes(record_bytes([record]) * 300_000)
    dataset, _ = opened(tmp_path, LocalStore(mmap=False))
    tracemalloc.start()
    longest = 0.0
    running = iter(Loader(dataset, 1, shuffle=True))
    try:
        for _ in range(300):
            started = time.process_time()  # of all threads
            next(running)
            longest = max(longest, time.process_time() - started)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        running.close()
        tracemalloc.stop()
    assert peak < 100 << 20  # 4.8 MB of records; making every step at once took 600 MB for a million of them
    assert longest < 5


# When it comes.


class GatedStore(CountingStore):
    """A counting store whose reads of many bytes wait while a gate is closed."""

    def __init__(self, store):
        super().__init__(store)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.note = lambda: None

    def open(self, url, known=None):
        reader = super().open(url, known)
        read_many = reader.read_many

        def gated(offsets, lengths):
            if int(sum(lengths)) > 200_000 and not self.gate.is_set():
                if not self.waiting.is_set():
                    self.note()
                self.waiting.set()
                self.gate.wait(60)
            return read_many(offsets, lengths)

        reader.read_many = gated
        return reader


def test_the_first_batches_come_before_the_first_window_is_here(folders):
    store = GatedStore(LocalStore())
    dataset, _ = opened(folders["tar of 10 KB"], store)
    store.gate.clear()
    running = iter(Loader(dataset, 4, shuffle=True))
    first = [next(running) for _ in range(3)]  # the gate is still closed
    assert store.waiting.wait(30)
    store.gate.set()
    assert len(list(running)) == len(dataset) // 4 - len(first)


def test_batches_that_are_ready_are_given_while_the_next_window_is_on_its_way(folders):
    store = GatedStore(LocalStore())
    dataset, _ = opened(folders["tar of 10 KB"], store)
    want = [batch["__key__"] for batch in Loader(dataset, 8, shuffle=WINDOWS)]
    running = iter(Loader(dataset, 8, shuffle=WINDOWS, read_ahead=ReadAhead(bytes=4 << 20, batches=3)))
    got = [next(running)["__key__"] for _ in range(10)]
    given = []

    def open_later():
        store.waiting.wait(30)
        comes_true(lambda: given and len(got) > given[0] + 3)
        given.append(len(got))
        store.gate.set()

    store.note = lambda: given.append(len(got))
    store.waiting.clear()
    store.gate.clear()
    opener = threading.Thread(target=open_later)
    opener.start()
    for batch in running:
        got.append(batch["__key__"])
        threading.Event().wait(0.01)  # to leave others their turn
    opener.join()
    assert got == want
    assert given[-1] > given[0] + 3


def test_what_is_waited_for_is_measured(folders):
    class SlowStore(CountingStore):
        def open(self, url, known=None):
            reader = super().open(url, known)
            read_many = reader.read_many

            def slow(offsets, lengths):
                threading.Event().wait(0.05)
                return read_many(offsets, lengths)

            reader.read_many = slow
            return reader

    dataset, _ = opened(folders["tar of 10 KB"], SlowStore(LocalStore()))
    hasty = Loader(dataset, 8, shuffle=WINDOWS)
    list(hasty)
    assert hasty.metrics.waited_for_storage > 0.1
    for _ in range(5):  # the machine may be busy with something else
        patient = Loader(dataset, 8, shuffle=WINDOWS)
        begun = 0.0
        for number, _ in enumerate(patient):
            threading.Event().wait(0.3 if number < 3 else 0.01)
            begun = patient.metrics.waited_for_storage if number == 3 else begun
        later = patient.metrics.waited_for_storage - begun
        assert patient.metrics.waited_for_consumer > 1.0
        if later < 0.05:
            break
    assert later < 0.05


@pytest.mark.parametrize("shuffle", [False, True, "full", WINDOWS], ids=["no", "yes", "full", "windows"])
@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("tail", ["drop", "wrap", "exact"])
def test_the_last_step_is_known_as_such(folders, shuffle, mmap, tail):
    from shardset.loading.iteration import Pass

    dataset, _ = opened(folders["tar of 100 KB"], LocalStore(mmap=mmap))
    seen = []
    keep = Pass.__iter__

    def spied(self):
        for found in keep(self):
            seen.append(found[2])
            yield found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "__iter__", spied)
        count = sum(1 for _ in Loader(dataset, 7, shuffle=shuffle, tail=tail, rank=1, world_size=2))
    assert count == len(Loader(dataset, 7, tail=tail, rank=1, world_size=2))
    assert seen == [False] * (count - 1) + [True]


def test_what_is_not_in_memory_is_asked_for_ahead_and_what_is_there_is_not(folders, monkeypatch):
    from shardset.storage.local import LocalReader

    if not LocalReader.can_advise():
        pytest.fail("Linux can be told what will be read")
    advised = []
    monkeypatch.setattr(
        LocalReader, "advise", lambda self, offsets, lengths: advised.append((self.url, offsets, lengths))
    )
    dataset, _ = opened(folders["tar of 10 KB"], LocalStore())
    list(Loader(dataset, 8, shuffle=WINDOWS))
    assert advised == []
    monkeypatch.setattr(LocalReader, "is_in_memory", lambda *_: False)
    batches = list(Loader(dataset, 8, shuffle=WINDOWS))
    asked = {}
    for url, offsets, lengths in advised:
        asked.setdefault(url, []).extend(zip(offsets, lengths, strict=True))
    for batch in itertools.islice(batches, 0, None, 9):
        for url, offset in zip(batch["__shard__"], batch["__offset__"].tolist(), strict=True):
            assert any(start <= offset < start + length for start, length in asked[url])
    total = sum(length for ranges in asked.values() for _, length in ranges)
    assert total <= 1.3 * dataset.total_size
