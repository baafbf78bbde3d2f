from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from shardset.errors import ChangedError, StorageError
from shardset.storage.planner import ReadLimits
from shardset.storage.remote import RemoteReader
from shardset.storage.store import ObjectInfo

OBJECT = random.Random(6).randbytes(500_000)
SIZE = len(OBJECT)
INFO = ObjectInfo("far://away/000.tar", SIZE, "etag-1")


@pytest.fixture
def reads():
    return []


@pytest.fixture
def reader(reads):
    def fetch(offset, view):
        reads.append((offset, len(view)))
        assert not view.readonly
        assert 0 < len(view) <= SIZE - offset
        view[:] = OBJECT[offset : offset + len(view)]

    return RemoteReader(INFO, fetch, ReadLimits(gap=100, most=50_000, at_once=4, memory=200_000))


def test_a_reader_is_what_its_object_is(reader):
    assert (reader.url, reader.size, reader.identity) == (INFO.url, INFO.size, INFO.identity)
    assert reader.map() is None
    assert reader.stream is None


def test_a_range_is_read_at_once_and_a_long_one_in_parts(reader, reads):
    assert reader.read(5, 50_000) == reader.view(5, 50_000) == OBJECT[5:50_005]
    assert reads == [(5, 50_000)] * 2
    reads.clear()
    assert reader.read(5, 50_001) == OBJECT[5:50_006]
    assert sorted(reads) == [(5, 25_001), (25_006, 25_000)]
    reads.clear()
    assert reader.view(0, SIZE) == OBJECT
    assert len(reads) == 10


def test_near_ranges_are_read_together_in_any_order(reader, reads):
    offsets, lengths = [400_000, 1000, 0, 2**70, 1150], [10, 50, 900, 0, 50]
    assert reader.read_many(offsets, lengths) == [
        OBJECT[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)
    ]
    assert sorted(reads) == [(0, 1200), (400_000, 10)]


def test_an_empty_range_reads_nothing_wherever_it_lies(reader, reads):
    for offset in (0, SIZE, SIZE + 1, 2**62, 2**70):
        assert reader.read(offset, 0) == reader.view(offset, 0) == b""
        assert reader.read_many([offset, 5], [0, 0]) == [b"", b""]
    assert reader.read_many([], []) == []
    assert reads == []


def test_a_range_that_cannot_be_reads_nothing(reader, reads):
    for offset, length in ((0, SIZE + 1), (SIZE, 1), (2**62, 2**62)):
        for ask in (reader.read, reader.view):
            with pytest.raises(StorageError, match=INFO.url):
                ask(offset, length)
        with pytest.raises(StorageError, match=INFO.url):
            reader.read_many(np.array([0, offset]), np.array([5, length]))
    for offset, length in ((-1, 5), (5, -1), (-1, 0)):
        for ask in (reader.read, reader.view, lambda *one: reader.read_many(*([number] for number in one))):
            with pytest.raises(ValueError, match="negative"):
                ask(offset, length)
    assert reads == []


def test_what_is_handed_out_is_read_only(reader):
    for view in (reader.view(5, 10), reader.view(5, 60_000), *reader.read_many([1, 2], [3, 4]), *reader.iter_pieces()):
        assert isinstance(view, memoryview)
        assert view.readonly
        assert (view.ndim, view.itemsize, view.format) == (1, 1, "B")


def test_an_object_is_read_piece_by_piece_from_any_byte_on(reader, reads):
    for offset in (0, 1, 123_456, SIZE - 1, SIZE, SIZE + 5):
        reads.clear()
        assert b"".join(reader.iter_pieces(offset)) == OBJECT[offset:]
        assert sum(length for _, length in reads) == max(0, SIZE - offset)
    with pytest.raises(ValueError, match="negative"):
        reader.iter_pieces(-1)


def test_an_error_of_the_place_is_that_of_every_way_to_read():
    error = ChangedError("another version", url=INFO.url)

    def fail(_offset, _view):
        raise error

    reader = RemoteReader(INFO, fail)
    for ask in (
        lambda: reader.read(0, 5),
        lambda: reader.view(0, SIZE),
        lambda: reader.read_many([0, 400_000], [5, 5]),
        lambda: list(reader.iter_pieces()),
    ):
        with pytest.raises(ChangedError) as caught:
            ask()
        assert caught.value is error


def test_an_object_larger_than_memory_allows_is_read_within_the_limits():
    size = 4 << 30
    most_at_once = 8 << 20

    def fetch(_offset, view):
        view[:8] = view[-8:] = b"12345678"

    limits = ReadLimits(most=1 << 20, memory=most_at_once, at_once=16)
    pieces = RemoteReader(ObjectInfo("far://away", size, "1"), fetch, limits).iter_pieces()
    tracemalloc.start()
    try:
        for _ in range(300):
            assert len(next(pieces)) == 1 << 20
        assert tracemalloc.get_traced_memory()[1] < most_at_once + (3 << 20)
    finally:
        tracemalloc.stop()
        pieces.close()
