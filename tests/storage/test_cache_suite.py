"""A cache in front of a store is a store like any other."""

from __future__ import annotations

import os

import pytest

from shardset.storage import LocalStore, MemoryStore
from shardset.storage.cache import CachedStore
from storage.counting import CountingStore
from storage.store_suite import ForkSuite, ReadSuite, WriteSuite

pytestmark = pytest.mark.servers

INNER = {"memory": MemoryStore, "local": LocalStore}


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(params=INNER)
def inner(request):
    return request.param


@pytest.fixture
def base(inner, tmp_path):
    if inner != "local":
        return "memory://bucket/folder"
    (tmp_path / "data").mkdir()
    return str(tmp_path / "data")


class _Slow:
    """What takes seconds in a cache, since each of thousands of reads opens a file."""

    test_eight_threads_read_the_same_objects = pytest.mark.slow(ReadSuite.test_eight_threads_read_the_same_objects)


class TestWholeObjects(_Slow, ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self, inner, tmp_path):
        return CachedStore(INNER[inner](), tmp_path / "cache", limit=64 << 20)


class TestBlocks(_Slow, ReadSuite, WriteSuite, ForkSuite):
    @pytest.fixture
    def store(self, inner, tmp_path):
        return CachedStore(INNER[inner](), tmp_path / "cache", limit=64 << 20, block=10_000)


class TestTooLarge(_Slow, ReadSuite, ForkSuite):
    @pytest.fixture
    def inner(self):
        return "memory"

    @pytest.fixture
    def store(self, tmp_path):
        return CachedStore(MemoryStore(), tmp_path / "cache", limit=50_000)


@pytest.mark.slow
class TestRoomForFewBlocks(_Slow, ReadSuite, ForkSuite):
    @pytest.fixture
    def inner(self):
        return "memory"

    @pytest.fixture
    def store(self, tmp_path):
        return CachedStore(CountingStore(MemoryStore()), tmp_path / "cache", limit=150_000, block=20_000)
