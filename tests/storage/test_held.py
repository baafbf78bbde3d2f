from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.faulty import Fault, FaultServer
from shardset.errors import NotFoundError
from shardset.storage import HttpStore, LocalStore
from shardset.storage.held import HeldReader, LostReader, Wanted, read_held, widest_gap
from shardset.storage.retry import Retry
from storage.counting import CountingStore

CONTENT = random.Random(1).randbytes(300_000)


def wanted(url, store, ranges):
    offsets, lengths = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    return Wanted(str(url), lambda: store.open(str(url)), offsets, lengths)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize(
    "make", [lambda: LocalStore(mmap=False), lambda: CountingStore(LocalStore())], ids=["local", "counting"]
)
def test_what_was_read_ahead_is_given_as_it_stands_there(path, make):
    ranges = [(200_000, 500), (10, 90), (100, 0), (10, 20), (5_000, 70_000)]
    held = read_held([wanted(path, make(), ranges)], spare=0)
    (reader,) = held.readers
    assert isinstance(reader, HeldReader)
    assert (reader.size, reader.map()) == (len(CONTENT), None)
    assert [bytes(view) for view in reader.read_many(*zip(*ranges, strict=True))] == [
        CONTENT[offset : offset + length] for offset, length in ranges
    ]
    assert held.num_bytes == 500 + 90 + 70_000
    assert held.num_reads == 3


def test_what_was_not_read_ahead_is_read_when_it_is_asked_for(path):
    store = CountingStore(LocalStore())
    (reader,) = read_held([wanted(path, store, [(1000, 500)])], spare=0).readers
    store.reset()
    assert bytes(reader.view(1100, 400)) == CONTENT[1100:1500]
    assert reader.read(1000, 1) == CONTENT[1000:1001]
    assert store.calls == {}
    assert reader.read(999, 2) == CONTENT[999:1001]
    assert bytes(reader.view(1499, 2)) == CONTENT[1499:1501]
    views = reader.read_many(np.array([1200, 0, 1499]), np.array([10, 5, 100]))
    assert [bytes(view) for view in views] == [CONTENT[1200:1210], CONTENT[:5], CONTENT[1499:1599]]
    assert [length for _, _, length in store.ranges] == [2, 2, 5, 100]
    with pytest.raises(ValueError, match="negative"):
        reader.read(1100, -1)


@given(
    st.lists(st.tuples(st.integers(0, 299_000), st.integers(0, 900)), min_size=1, max_size=30),
    st.integers(0, 5000),
    st.integers(0, 2**32),
)
def test_guesses_never_change_an_answer(tmp_path_factory, ranges, spare, seed):
    path = tmp_path_factory.getbasetemp() / "held"
    if not path.exists():
        path.write_bytes(CONTENT)
    (reader,) = read_held([wanted(path, LocalStore(mmap=False), ranges)], spare=spare).readers
    chance = random.Random(seed)
    asked = [*ranges, *((chance.randrange(299_000), chance.randrange(1000)) for _ in range(5))]
    chance.shuffle(asked)
    assert [bytes(view) for view in reader.read_many(*zip(*asked, strict=True))] == [
        CONTENT[offset : offset + length] for offset, length in asked
    ]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 3000)), min_size=1), st.integers(0, 200_000))
def test_at_most_the_spare_bytes_are_read_for_nothing(ranges, spare):
    class Nowhere:
        def __call__(self):
            raise AssertionError

    offsets, lengths = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    gap = widest_gap([Wanted("a", Nowhere(), offsets, lengths)] * 2, spare)
    covered = np.zeros(2 * 10**6, np.bool_)
    for offset, length in ranges:
        covered[offset : offset + length] = True
    edges = np.flatnonzero(np.diff(covered.astype(np.int8)))
    first = int(np.flatnonzero(covered)[0])
    gaps = [int(b - a) for a, b in itertools.pairwise(edges) if a >= first and not covered[a + 1]]
    within = [each for each in gaps if each <= gap]
    assert 2 * sum(within) <= spare
    wider = sorted(each for each in gaps if gap < each <= 128 << 10)
    if wider:  # the next wider ones would have been too many
        assert 2 * (sum(within) + sum(each for each in wider if each == wider[0])) > spare


def test_near_ranges_are_read_together_as_far_as_spare_bytes_go(path):
    store = CountingStore(LocalStore())
    ranges = [(0, 100), (150, 100), (1000, 100), (5000, 100)]
    for spare, reads in ((0, 4), (49, 4), (50, 3), (799, 3), (800, 2), (10_000, 1)):
        store.reset()
        held = read_held([wanted(path, store, ranges)], spare=spare)
        assert held.num_reads == reads == len(store.ranges)
        assert held.num_bytes == store.bytes_read <= 400 + spare


def test_many_files_are_read_without_being_open_all_at_once(tmp_path):
    opened = []

    class Store(LocalStore):
        def _open(self, url):
            reader = super()._open(url)
            opened.append(reader)
            assert sum(each._handle >= 0 for each in opened) <= 100
            while len(opened) > 20:
                opened.pop(0)
            return reader

    store = Store(mmap=False, max_open=4)
    asked = []
    for number in range(300):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
        asked.append(wanted(tmp_path / str(number), store, [(0, len(str(number)))]))
    held = read_held(asked, spare=0)
    store.close()
    opened.clear()
    for number, reader in enumerate(held.readers):
        (tmp_path / str(number)).unlink()
        assert reader.read(0, 1) == str(number)[:1].encode()


def test_a_file_that_cannot_be_read_is_none_and_the_others_are_read(tmp_path, path):
    store = LocalStore(mmap=False)
    missing = wanted(tmp_path / "missing", store, [(0, 10)])
    short = wanted(path, store, [(len(CONTENT) - 5, 10)])
    good = wanted(path, store, [(0, 10)])
    held = read_held([missing, good, short], spare=0)
    assert held.readers[0] is held.readers[2] is None
    assert held.readers[1].read(0, 10) == CONTENT[:10]
    assert (held.num_bytes, held.num_reads) == (10, 1)
    assert read_held([], spare=0).readers == []


def test_an_object_elsewhere_that_cannot_be_read_is_lost_and_asked_for_once():
    with FaultServer({f"/{number}": CONTENT for number in range(8)}) as server:
        store = HttpStore(retry=Retry(attempts=3, first_wait=0.01, longest_wait=0.02))
        urls = [f"{server.url}{number}" for number in range(8)]
        readers = [store.open(url) for url in urls]
        server.add(Fault.status(404), path="/3")
        server.add(Fault.status(503), path="/5")
        server.forget()
        asked = [
            Wanted(url, lambda reader=reader: reader, np.array([0, 200_000]), np.array([100, 100]))
            for url, reader in zip(urls, readers, strict=True)
        ]
        held = read_held(asked, spare=0)
        assert [type(reader) for reader in held.readers] == [
            LostReader if number in {3, 5} else HeldReader for number in range(8)
        ]
        for number in (0, 1, 2, 4, 6, 7):
            assert held.readers[number].read(200_000, 100) == CONTENT[200_000:200_100]
        assert len(server.requests(path="/3")) <= 4
        assert len(server.requests(path="/5")) <= 3 * 4
        server.forget()
        lost = held.readers[3]
        for call in (lambda: lost.read(0, 1), lambda: lost.view(0, 1), lambda: lost.read_many([0], [1]), lost.map):
            with pytest.raises(NotFoundError, match="/3") as caught:
                call()
            assert len(caught.traceback) <= 4  # it does not grow
        again = read_held([Wanted(urls[3], lambda: lost, np.array([0]), np.array([5])), asked[0]], spare=0)
        assert again.readers[0] is lost
        assert isinstance(again.readers[1], HeldReader)
        assert server.requests(path="/3") == []
        assert len(server.requests(path="/0")) == 2
