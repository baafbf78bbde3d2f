from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.loading.bucket_order import STRATEGIES, FileOrder, hash_files, plan_pass


def order_of(counts):
    """An order of buckets with so many files each, in shards of three."""
    total = sum(counts)
    keys = [f"{number:02d}" for number in range(len(counts))]
    numbers = np.arange(total)
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    return FileOrder(keys, starts, (numbers // 3).astype(np.int32), (numbers % 3).astype(np.int32), numbers)


COUNTS = st.lists(st.integers(1, 20), max_size=6)


@given(
    counts=COUNTS,
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 5),
    size=st.one_of(st.none(), st.integers(1, 7)),
)
def test_a_plan_has_every_file_once_and_its_bucket_and_ends_at_the_borders_of_buckets(
    counts, strategy, seed, epoch, size
):
    order = order_of(counts)
    plan = plan_pass(order, strategy, seed=seed, epoch=epoch, batch_size=size)
    total = sum(counts)
    assert sorted(plan.places.tolist()) == list(range(total))
    bucket_of = np.repeat(np.arange(len(counts)), counts)
    assert plan.bucket.tolist() == bucket_of[plan.places].tolist()
    ends = plan.ends.tolist()
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == total
    for start, end in zip([0, *ends], ends, strict=False):
        assert len(set(plan.bucket[start:end].tolist())) == 1
        if strategy == "fully_random":
            assert end - start <= (size or 1)
    if strategy == "fully_random" and size:
        full = sum(count // size for count in counts)
        assert sum(end - start == size for start, end in zip([0, *ends], ends, strict=False)) == full
    else:
        assert strategy == "fully_random" or len(ends) == len(counts)
    again = plan_pass(order, strategy, seed=seed, epoch=epoch, batch_size=size)
    assert again.places.tolist() == plan.places.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_another_seed_or_epoch_is_another_shuffle(strategy):
    order = order_of([40, 40])
    shuffles = {
        tuple(plan_pass(order, strategy, seed=seed, epoch=epoch).places.tolist())
        for seed in (0, 1, 2**64 - 1)
        for epoch in (0, 1, 2)
    }
    assert len(shuffles) == 9
    assert all(list(shuffle) != sorted(shuffle) for shuffle in shuffles)


def test_the_shuffle_of_a_file_does_not_depend_on_what_comes_with_it():
    """So a part of the shards has its files in the order that they have among all."""
    shard, file = np.repeat(np.arange(8, dtype=np.int32), 8), np.tile(np.arange(8, dtype=np.int32), 8)
    every = hash_files(shard, file, 3, 1)
    assert hash_files(shard[8:24], file[8:24], 3, 1).tolist() == every[8:24].tolist()


def test_hashes_are_those_of_splitmix64_and_stay_so():
    # Reference: the values of splitmix64 with a state that starts at 0, as published with it.
    def mix(value):
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    assert mix(0) == 0xE220A8397B1DCDAF
    for seed, epoch, shard, file in ((0, 0, 0, 0), (7, 2, 5, 9), (2**64 - 1, 2**63, 2**31 - 1, 2**31 - 1)):
        expected = mix(((shard << 32 | file) + mix((mix(seed) + epoch) % 2**64)) % 2**64)
        found = hash_files(np.array([shard], np.int32), np.array([file], np.int32), seed, epoch)
        assert found.tolist() == [expected]
