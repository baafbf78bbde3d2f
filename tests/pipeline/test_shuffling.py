from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import write_shard
from shardset.loading.ranks import Share
from shardset.pipeline.run import Run, Step
from shardset.pipeline.shuffling import shuffle
from shardset.pipeline.stage import Stage
from shardset.pipeline.web_dataset import WebDataset
from shardset.storage import CachedStore
from shardset.storage.memory import MemoryStore


def step(**values):
    return Step(Run(**values), 3, "shuffle")


@given(count=st.integers(0, 300), size=st.integers(0, 40), initial=st.integers(0, 60), seed=st.none() | st.integers())
def test_every_sample_leaves_once(count, size, initial, seed):
    found = list(shuffle(range(count), size, initial, seed=seed))
    assert sorted(found) == list(range(count))
    if size <= 1:
        assert found == list(range(count))


@given(count=st.integers(0, 200), size=st.integers(1, 30), initial=st.integers(1, 30))
def test_no_more_is_held_than_was_asked_for(count, size, initial):
    pulled = 0

    def source():
        nonlocal pulled
        for item in range(count):
            pulled += 1
            yield item

    for passed, _ in enumerate(shuffle(source(), size, initial), 1):
        assert pulled - passed < size


def test_the_first_sample_waits_for_initial_and_then_two_come_for_each():
    pulled = []

    def source():
        for item in range(100):
            pulled.append(item)
            yield item

    stream = shuffle(source(), 20, 10)
    next(stream)
    assert len(pulled) == 10
    next(stream)
    assert len(pulled) == 12
    list(itertools.islice(stream, 8))
    assert len(pulled) - 10 <= 20


def test_the_order_follows_from_seed_epoch_rank_worker_and_place_alone():
    def order(**values):
        return list(shuffle(range(50), 20, step=step(**values)))

    assert order() == order()
    others = [
        order(seed=1),
        order(epoch=(1,)),
        order(epoch=(0, 1)),
        order(share=Share(1, 2, 0, 1)),
        order(share=Share(0, 1, 1, 2)),
        list(shuffle(range(50), 20, step=Step(Run(), 4, "shuffle"))),
        list(shuffle(range(50), 20, seed=9)),
    ]
    assert len({tuple(other) for other in [*others, order()]}) == 8
    assert list(shuffle(range(50), 20, seed=9, step=step(seed=1))) == list(shuffle(range(50), 20, seed=9, step=step()))


def test_the_order_stays_what_it_is():
    assert list(shuffle(range(12), 6, 3, step=step())) == [2, 1, 6, 5, 9, 3, 7, 10, 8, 4, 11, 0]


def test_positions_are_mixed_as_far_as_the_buffer_reaches():
    displacement = []
    for seed in range(20):
        order = list(shuffle(range(400), 1000, 400, seed=seed))
        displacement += [abs(place - item) for place, item in enumerate(order)]
    assert 128 < sum(displacement) / len(displacement) < 139  # a third of 400, as of a perfect shuffle


def test_bytes_held_stay_below_the_bound():
    held, most = 0, 0

    def source():
        nonlocal held, most
        for number in range(300):
            payload = bytes(number % 7 * 100)
            held += len(payload)
            most = max(most, held)
            yield {"__key__": str(number), "x": payload}

    found = []
    for sample in shuffle(source(), 200, 50, max_bytes=5000):
        found.append(sample["__key__"])
        held -= len(sample["x"])
    assert sorted(found, key=int) == [str(number) for number in range(300)]
    assert most <= 5000 + 2 * 700 + 700
    assert found != sorted(found, key=int)
    assert len(list(shuffle([b"x" * 100] * 5, 10, max_bytes=1))) == 5
    with pytest.raises(ValueError, match="max_bytes"):
        shuffle([], 5, max_bytes=0)


def test_a_generator_of_the_callers_own_decides():
    first, second = (list(shuffle(range(30), 10, rng=random.Random(5))) for _ in range(2))
    assert first == second != list(shuffle(range(30), 10))


def test_it_works_as_a_stage_by_itself():
    assert sorted(Stage(shuffle, 5)(range(9))) == list(range(9))
    assert repr(Stage(shuffle, 5, initial=2)) == "shuffle(5, initial=2)"


def test_a_buffer_behind_the_reading_stage_holds_no_payloads_and_gives_the_same(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{number:03d}.bin", bytes(200_000)) for number in range(100)])
    store = MemoryStore()
    store.write("memory://d/a.tar", path.read_bytes())
    cached = CachedStore(store, tmp_path / "cache", limit=1 << 30)
    urls = {"file": (str(path), None), "pipe": (f"pipe:cat {path}", None), "memory": ("memory://d/a.tar", store)}
    orders = {}
    for name, (url, place) in {**urls, "cached": ("memory://d/a.tar", cached)}.items():
        found = list(WebDataset(url, store=place).shuffle(100, initial=100))
        assert all(sample["bin"] == bytes(200_000) for sample in found)
        orders[name] = [sample["__key__"] for sample in found]
    assert len({tuple(order) for order in orders.values()}) == 1
    tracemalloc.start()
    try:
        next(iter(WebDataset(str(path)).shuffle(100, initial=100)))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_buffer_of_nothing_behind_the_reading_stage_keeps_the_order(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{number}.x", b"y") for number in range(9)])
    dataset = WebDataset(str(path)).compose(Stage(shuffle, 0))
    assert [(sample["__key__"], sample["x"]) for sample in dataset] == [(str(number), b"y") for number in range(9)]
