from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.loading.steps import Step, Steps, split_epochs

TAILS = ["drop", "wrap", "exact"]


def feed_of(*counts):
    """A feed whose epochs have so many positions, the last count for all further ones."""

    def count(epoch, most=None):
        found = counts[min(epoch, len(counts) - 1)]
        return found if most is None else min(found, most)

    return SimpleNamespace(count=count)


def all_steps(steps, feed, position=0):
    found = []
    while (step := steps.after(feed, 0, position)) is not None:
        found.append(step)
        position = step.stop
    return found


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 5), st.sampled_from(TAILS), st.sampled_from([1, 4, 6, 64]))
def test_every_position_goes_to_one_rank(count, batch_size, world_size, tail, lanes):
    feed = feed_of(count)
    ranks = [Steps(batch_size, rank, world_size, tail) for rank in range(world_size)]
    listed = [all_steps(steps, feed) for steps in ranks]
    assert all(each == listed[0] for each in listed)
    assert len(listed[0]) == ranks[0].left(feed, 0, 0)
    for step in listed[0]:
        shares = [steps.share(step, lanes) for steps in ranks]
        assert sorted(position for share in shares for position in share) == list(range(step.start, step.stop))
        if step.stop - step.start == ranks[0].size:
            assert {len(share) for share in shares} == {batch_size}
        else:
            assert tail == "exact"
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    end = listed[0][-1].stop if listed[0] else 0
    whole = count // ranks[0].size * ranks[0].size
    assert end == {"drop": whole, "exact": count, "wrap": -(-count // ranks[0].size) * ranks[0].size}[tail]


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 9), st.sampled_from(TAILS))
def test_the_steps_that_are_left_are_counted_from_any_position(count, position, size, tail):
    steps = Steps(size, tail=tail)
    assert len(all_steps(steps, feed_of(count), position)) == steps.left(feed_of(count), 0, position)


def test_with_lanes_ranks_take_every_so_manieth_position_and_else_neighbours():
    step = Step(8, 16)
    assert list(Steps(4, 1, 2).share(step, 64)) == [9, 11, 13, 15]
    assert list(Steps(4, 1, 2).share(step, 1)) == [12, 13, 14, 15]
    assert list(Steps(4, 0, 2).share(Step(9, 17), 64)) == [10, 12, 14, 16]
    assert list(Steps(3, 2, 3).share(Step(0, 9), 64)) == [6, 7, 8]  # no divisor in common


def test_positions_behind_an_epoch_are_those_of_the_next_ones():
    feed = feed_of(5, 3, 4)
    assert list(split_epochs(feed, 0, range(3, 11))) == [(0, range(3, 5)), (1, range(3)), (2, range(3))]
    assert list(split_epochs(feed, 0, range(4, 11, 2))) == [
        (0, range(4, 5, 2)),
        (1, range(1, 3, 2)),
        (2, range(0, 3, 2)),
    ]
    assert list(split_epochs(feed, 0, range(6, 8))) == [(1, range(1, 3))]
    assert list(split_epochs(feed, 0, range(2, 2))) == []


@pytest.mark.parametrize("tail", TAILS)
def test_an_epoch_without_positions_has_no_steps(tail):
    assert all_steps(Steps(2, tail=tail), feed_of(0)) == []
