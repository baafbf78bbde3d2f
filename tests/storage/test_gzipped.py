from __future__ import annotations

import gzip
import multiprocessing
import os
import random
import struct
import sys
import threading
import zlib

import pytest

from shardset.errors import FormatError, IndexFileError, MissingExtraError
from shardset.index.forward import read_forward
from shardset.storage import MemoryStore
from shardset.storage.gzipped import SPACING, GzipSource

CONTENT = random.Random(7).randbytes(SPACING) + b"the same again, " * (SPACING // 8) + random.Random(8).randbytes(5000)


def reader_of(data):
    store = MemoryStore()
    store.write("memory://shards/a.gz", data)
    return store.open("memory://shards/a.gz")


@pytest.fixture(scope="module")
def packed():
    half = len(CONTENT) // 2
    return gzip.compress(CONTENT[:half], 1) + gzip.compress(CONTENT[half:], 1)


@pytest.fixture(scope="module")
def points(packed):
    return GzipSource(reader_of(packed), len(CONTENT)).points()


def ranges(count, seed=0):
    rng = random.Random(seed)
    offsets = [rng.randrange(len(CONTENT) - 3000) for _ in range(count)]
    return offsets, [rng.randrange(3000) for _ in range(count)]


def test_ranges_are_those_of_the_content(packed, points):
    reader = GzipSource(reader_of(packed), len(CONTENT), points).reader
    offsets, lengths = ranges(40)
    assert [bytes(view) for view in reader.read_many(offsets, lengths)] == [
        CONTENT[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)
    ]
    assert reader.read(0, len(CONTENT)) == CONTENT
    assert reader.size == len(CONTENT)
    assert reader.map() is None


def test_a_point_saves_reading_what_lies_before_it(packed, points):
    asked = []
    source = reader_of(packed)

    class Counted:
        url, size, identity = source.url, source.size, source.identity

        def read(self, offset, length):
            asked.append(length)
            return source.read(offset, length)

    GzipSource(Counted(), len(CONTENT), points).reader.read(len(CONTENT) - 10, 10)
    assert sum(asked) < len(packed) / 2


def test_threads_share_a_reader(packed, points):
    reader = GzipSource(reader_of(packed), len(CONTENT), points).reader
    wrong = []

    def work(seed):
        for offset, length in zip(*ranges(15, seed), strict=True):
            if reader.read(offset, length) != CONTENT[offset : offset + length]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_reads_on(packed, points):
    reader = GzipSource(reader_of(packed), len(CONTENT), points).reader
    reader.read(100, 50)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=lambda: answers.put(reader.read(5000, 50)))
    child.start()
    assert answers.get(timeout=30) == CONTENT[5000:5050]
    assert reader.read(7000, 50) == CONTENT[7000:7050]
    child.join()


def test_damage_raises(points):
    text = " ".join(map(str, range(200_000))).encode()
    packed = gzip.compress(text)
    with pytest.raises(FormatError, match="damaged") as caught:
        GzipSource(reader_of(packed[:50_000] + b"\xff" * 50 + packed[50_050:]), len(text)).points()
    assert caught.value.shard == "memory://shards/a.gz"
    with pytest.raises(FormatError, match="damaged"):
        GzipSource(reader_of(b"nothing of the kind" * 100), 100).reader.read(0, 5)
    for wrong in (b"", b"x", points[:50]):
        with pytest.raises((IndexFileError, FormatError)):
            GzipSource(reader_of(b"junk" * 50), len(CONTENT), wrong or b"?").reader.read(0, 5)


def test_an_extra_is_named_where_the_package_is_missing(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "indexed_gzip", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[gzip\]"):
        GzipSource(reader_of(packed), len(CONTENT))


def changed(points, place, value):
    raw = bytearray(zlib.decompress(points))
    struct.pack_into("<Q", raw, place, value)
    return zlib.compress(bytes(raw))


def test_access_points_that_lead_round_are_refused(packed, points):
    assert GzipSource(reader_of(packed), len(CONTENT), points).reader.read(0, 5) == CONTENT[:5]
    head, point = 35, 18
    assert struct.unpack_from("<Q", zlib.decompress(points), 15) == (len(CONTENT),)
    hostile = [changed(points, head + point * number + 8, 0) for number in (1, 2)]
    hostile += [changed(points, head + point + 8, 1 << 60), changed(points, 7, 5), changed(points, 15, 5)]
    hostile += [
        zlib.compress(bytes(1 << 28)),
        zlib.compress(zlib.decompress(points)[:-1]),
        zlib.compress(b"GZIDX"),
        b"?",
    ]
    for wrong in hostile:
        with pytest.raises(IndexFileError, match="access points"):
            GzipSource(reader_of(packed), len(CONTENT), wrong)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("kind", ["points", "damaged"])
def test_a_child_forked_while_a_thread_reads_does_not_wait_for_it(packed, points, kind):
    reader = (
        GzipSource(reader_of(packed), len(CONTENT), points).reader
        if kind == "points"
        else read_forward(reader_of(packed), len(CONTENT))
    )
    source = reader.fetch.__self__
    lock = source._opened.lock if kind == "points" else source._lock
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with lock:  # as a thread of the parent would hold it
        child = context.Process(target=lambda: answers.put(reader.read(5000, 50)))
        child.start()
        try:
            assert answers.get(timeout=30) == CONTENT[5000:5050]
        finally:
            child.kill()
            child.join()
