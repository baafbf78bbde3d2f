from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.loading.blocks import next_block, part_of
from shardset.loading.feed import Picks
from shardset.loading.order import draws, mix_key
from shardset.loading.steps import Steps


class Numbers:
    """A feed that gives epoch * 1000 + position, and may have packs of one to three samples."""

    unit = 0

    def __init__(self, count, lanes=1, window=10, *, packs=False):
        self.size, self.lanes, self.window, self.packs = count, lanes, window, packs

    def count(self, _epoch, most=None):
        return self.size if most is None else min(self.size, most)

    def window_end(self, _epoch, position):
        return min(self.size, (position // self.window + 1) * self.window)

    def take(self, epoch, positions):
        numbers = epoch * 1000 + np.arange(positions.start, positions.stop, positions.step)
        buckets = (numbers % 7).astype(np.int32)
        if not self.packs:
            return Picks(numbers, numbers.astype(np.int32) % 3, None, buckets)
        counts = numbers % 3 + 1
        return Picks(np.repeat(numbers, counts), None, np.cumsum(counts), buckets)


def blocks_of(feed, steps, epoch=0, position=0, most=1 << 20):
    found = []
    while (block := next_block(feed, steps, epoch, position, most)) is not None:
        assert (block.start, block.epoch) == (position, epoch)
        found.append(block)
        position = block.stop
    return found


@given(
    st.integers(0, 50),
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 20])),
    st.sampled_from(["drop", "wrap", "exact"]),
    st.tuples(st.sampled_from([1, 4]), st.booleans()),
    st.integers(1, 40),
)
def test_blocks_give_each_rank_what_comes_at_its_positions(count, sizes, tail, kind, most):
    (batch_size, world_size), (lanes, packs) = sizes, kind
    feed = Numbers(count, lanes, packs=packs)
    for rank in (0, world_size - 1):
        steps = Steps(batch_size, rank, world_size, tail)
        position = 0
        for block in blocks_of(feed, steps, most=most):
            for share in map(block.share, range(len(block))):
                assert share.step == steps.after(feed, 0, position)
                position = share.step.stop
                want = [divmod(place, count) for place in steps.share(share.step, lanes)]
                assert list(zip(share.epochs.tolist(), share.positions.tolist(), strict=True)) == want
                numbers = [epoch * 1000 + place for epoch, place in want]
                repeated = [number for number in numbers for _ in range(number % 3 + 1 if packs else 1)]
                assert share.picks.samples.tolist() == repeated
                assert share.picks.buckets.tolist() == [number % 7 for number in numbers]
                if packs:
                    assert share.picks.ends.tolist() == np.cumsum([number % 3 + 1 for number in numbers]).tolist()
                else:
                    assert share.picks.sources.tolist() == [number % 3 for number in numbers]
        assert steps.after(feed, 0, position) is None


def test_a_block_ends_where_a_window_does_but_has_a_step_at_least():
    assert [block.stop for block in blocks_of(Numbers(25), Steps(2))] == [10, 20, 24]
    assert [block.stop for block in blocks_of(Numbers(40), Steps(15))] == [15, 30]


def test_parts_of_picks():
    picks = Picks(np.arange(6), None, np.array([1, 3, 3, 6]), np.arange(4, dtype=np.int32), np.array([True] * 4))
    part = part_of(picks, 1, 4)
    assert (part.samples.tolist(), part.ends.tolist(), part.buckets.tolist()) == ([1, 2, 3, 4, 5], [2, 2, 5], [1, 2, 3])
    assert part_of(picks, 2, 3).samples.tolist() == []
    assert part_of(picks, 0, 0).ends.tolist() == []


def test_seeds_are_draws_by_epoch_and_position():
    share = next_block(Numbers(7), Steps(10, tail="wrap"), 2, 0, 100).share(0)
    want = [
        int(draws(mix_key(5, epoch, 7), place, 1)[0]) >> 1
        for epoch, place in [(2, p) for p in range(7)] + [(3, 0), (3, 1), (3, 2)]
    ]
    assert share.seeds(5).tolist() == want


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_epoch_of_a_block_is_that_of_its_samples(epoch):
    (block,) = blocks_of(Numbers(4), Steps(2), epoch=epoch)
    assert block.share(1).picks.samples.tolist() == [epoch * 1000 + 2, epoch * 1000 + 3]
