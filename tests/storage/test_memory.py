from __future__ import annotations

import pickle

import pytest

from shardset.storage import MemoryStore
from storage.counting import CountingStore
from storage.store_suite import ForkSuite, ReadSuite, WriteSuite


@pytest.fixture
def base():
    return "memory://bucket/folder"


class TestMemoryStore(ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self):
        return MemoryStore()


class TestCountingStore(ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self):
        return CountingStore(MemoryStore())


def test_two_stores_share_nothing():
    one, other = MemoryStore(), MemoryStore()
    one.write("memory://b/a", b"1")
    with pytest.raises(FileNotFoundError):
        other.info("memory://b/a")


def test_a_pickled_store_takes_a_copy_along():
    store = MemoryStore()
    store.write("memory://b/a", b"1")
    copy = pickle.loads(pickle.dumps(store))
    copy.write("memory://b/a", b"2")
    assert store.read("memory://b/a", 0, 1) == b"1"
    assert copy.read("memory://b/a", 0, 1) == b"2"


def test_equal_bytes_have_equal_identities():
    store = MemoryStore()
    store.write("memory://b/a", b"same")
    store.write("memory://b/b", b"same")
    assert store.info("memory://b/a").identity == store.info("memory://b/b").identity


def test_only_memory_urls_are_kept():
    with pytest.raises(ValueError, match="memory:// urls only"):
        MemoryStore().write("/tmp/a", b"")


def test_the_counting_store_counts_every_range_and_gives_no_map():
    store = CountingStore(MemoryStore())
    store.write("memory://b/a", bytes(1000))
    reader = store.open("memory://b/a")
    assert reader.map() is None
    reader.read(0, 10)
    reader.view(10, 20)
    store.read_many("memory://b/a", [5, 100], [30, 40])
    assert store.bytes_read == 100
    assert store.ranges == [("memory://b/a", *pair) for pair in ((0, 10), (10, 20), (5, 30), (100, 40))]
    assert store.calls == {"write": 1, "open": 2, "read": 1, "view": 1, "read_many": 1}
    store.reset()
    assert store.bytes_read == 0
    assert not store.calls
