from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.loading.order import draws, mix_key, permutation


def split_mix(state):
    """SplitMix64 as its authors publish it, one output at a time, without numpy."""
    mask = (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        value = state
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        yield value ^ (value >> 31)


def test_draws_are_the_outputs_of_split_mix_64():
    # The outputs for the seed 1234567 that implementations of the generator are commonly checked with.
    assert draws(1234567, 0, 3).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(key=st.integers(0, 2**64 - 1), start=st.integers(0, 5000), count=st.integers(0, 300))
def test_any_stretch_of_draws_can_be_had_by_itself(key, start, count):
    outputs = split_mix(key)
    for _ in range(start):
        next(outputs)
    assert draws(key, start, count).tolist() == [next(outputs) for _ in range(count)]


def test_orders_stay_what_they_are():
    assert mix_key() == 0
    assert mix_key(0) == 16294208416658607535
    assert mix_key(1, 2, 3) != mix_key(3, 2, 1)
    assert mix_key(-1) == mix_key(2**64 - 1)
    assert permutation(mix_key(0, 0), 10).tolist() == permutation(mix_key(0, 0), 10).tolist()


@given(key=st.integers(0, 2**64 - 1), count=st.integers(0, 200))
def test_a_permutation_has_every_number_once(key, count):
    found = permutation(key, count)
    assert sorted(found.tolist()) == list(range(count))


def test_numbers_come_to_every_place_alike():
    places = np.array([permutation(mix_key(5, epoch), 8) for epoch in range(4000)])
    counts = np.array([np.bincount(places[:, place], minlength=8) for place in range(8)])
    assert counts.min() > 400
    assert counts.max() < 600


@pytest.mark.parametrize("count", [1, 2])
def test_small_permutations_are_both_met(count):
    assert len({tuple(permutation(mix_key(seed), count)) for seed in range(50)}) == count
