from __future__ import annotations

import os
import pickle

import pytest

from loading.watched import WatchedStore, given_in_a_fork, until
from shards import private_cache, read_members, write_dataset, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.loading.cursor import TarDataLoader
from shardset.policy import Policy


@pytest.fixture
def folder(tmp_path):
    """Three shards of four samples, and an empty one between them."""
    write_dataset(tmp_path, samples=4)
    write_shard(tmp_path / "shard-0001a.tar", [])
    return tmp_path


@pytest.fixture
def files(folder):
    """Every file in the order that it must come in: (shard, name, payload)."""
    return [
        (shard, name, payload)
        for shard, path in enumerate(sorted(folder.glob("*.tar")))
        for name, payload in sorted(read_members(path).items())
    ]


@pytest.fixture
def make(folder):
    """Make loaders of shards that are not mapped, five files at a time, each with its store."""

    def make(**settings):
        store = WatchedStore()
        loader = TarDataLoader(discover_dataset(folder, store=store), buffer_size=5, **settings)
        loader.dataset.load_files(range(4))
        store.reads.clear()
        return loader, store

    return make


def seen(entries):
    return [(entry.path, bytes(entry.data)) for entry in entries]


def is_idle(loader):
    return loader._ahead._begun is None or loader._ahead._begun.job.done()


def test_the_next_files_are_read_while_the_caller_works_those_of_the_next_shard_too(make, files):
    loader, store = make()
    found = []
    for entry in loader:
        found.append(entry)
        until(lambda: is_idle(loader))
        # What comes behind the empty shard may be waited for.
        assert {read.shard for read in store.reads if not read.is_ahead} <= {"shard-0000.tar", "shard-0002.tar"}
    assert seen(found) == [(name, payload) for _, name, payload in files]
    assert len([read for read in store.reads if not read.is_ahead]) <= 2
    assert sum(read.count for read in store.reads) == len(files)


@pytest.mark.parametrize("settings", [{}, {"copy": False}, {"load_file_data": False}])
def test_mapped_shards_and_files_without_payloads_need_no_thread(folder, make, settings):
    loader, store = make(**settings)
    if settings.get("load_file_data", True):
        loader = TarDataLoader(folder, **settings)
    for _ in loader:
        assert loader._ahead._begun is None
    assert store.reads == []


@pytest.mark.parametrize("size", [1, 3, 5, 7, 100])
def test_ranges_of_shards_that_are_not_mapped_are_those_of_mapped_ones(make, files, size):
    loader, _ = make(batch_size=4)
    wanted = [(name, payload) for _, name, payload in files]
    for start in range(0, len(files), size):
        assert seen(loader.iter_range(start, start + size)) == wanted[start : start + size]
    ranges = [(start, start + size) for start in range(0, len(files), 2 * size)]
    loader.set_ranges(ranges)
    assert seen(entry for batch in loader.iter_batches() for entry in batch) == [
        each for start, stop in ranges for each in wanted[start:stop]
    ]


@pytest.mark.parametrize("value", [None, b"instead"])
def test_what_cannot_be_read_counts_when_it_is_given_and_once(make, files, value):
    loader, store = make(policy=Policy("skip", defaults={} if value is None else {"data": value}))
    store.broken = {"shard-0001.tar"}
    report = loader.dataset.report
    found = [next(loader) for _ in range(12)]  # those of the first shard
    for _ in range(3):  # what is ahead is dropped, and read again
        until(lambda: is_idle(loader))
        assert report.counts == {}
        loader.load_state_dict(loader.state_dict())
        loader.skip(11)
        next(loader)
    found.append(next(loader))
    if value is not None:
        assert report.counts == {"read_failed": 1}
        loader.load_state_dict(loader.state_dict())
    found += loader
    assert report.counts == {"read_failed": 12}
    assert [entry.path for entry in found if entry.data != value] == [name for shard, name, _ in files if shard != 1]
    assert [entry.path for entry in found if entry.data == value] == [
        name for shard, name, _ in files if shard == 1 and value is not None
    ]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_goes_on_and_waits_for_no_thread_of_its_parent(make, files):
    loader, store = make()
    store.gate.clear()
    found = [next(loader).path]
    until(lambda: store.under_way)
    names = [name for _, name, _ in files]
    assert found + given_in_a_fork(loader, store) == names
    store.gate.set()
    assert found + [entry.path for entry in loader] == names


@pytest.mark.parametrize("copy", [True, False])
def test_a_loader_that_has_something_ahead_goes_to_another_process(make, files, copy):
    loader, store = make(copy=copy)
    store.gate.clear()
    found = seen([next(loader)])
    again = pickle.loads(pickle.dumps(loader))
    wanted = [(name, payload) for _, name, payload in files]
    assert found + seen(again) == wanted
    store.gate.set()
    assert found + seen(loader) == wanted
