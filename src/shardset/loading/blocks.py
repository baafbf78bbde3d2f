"""Positions of a rank in blocks whose order is worked out at once, and parts of blocks that are read at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .draws import draws_at, mix_key
from .feed import Picks
from .steps import Step, split_epochs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .feed import Feed
    from .steps import Steps

    Int64s = NDArray[np.int64]

AUGMENTATION: Final = 7
"""The part of a key that tells seeds of augmentations from all other draws of a seed."""
_FEW_RANKS: Final = 16
_STEPS: Final = 4096


class Share(NamedTuple):
    """What a rank takes at one step.

    Attributes:
        step: The step.
        picks: What comes at the rank's positions.
        epochs: int64, the epoch of each position; not the step's own behind the end of that.
        positions: int64, each position in its epoch.
    """

    step: Step
    picks: Picks
    epochs: Int64s
    positions: Int64s

    def seeds(self, seed: int) -> Int64s:
        """Return 63 random bits for each position, for augmentations: the same whoever takes the position."""
        seeds = np.empty(len(self.positions), np.int64)
        for epoch in np.unique(self.epochs).tolist():
            here = self.epochs == epoch
            drawn = draws_at(mix_key(seed, epoch, AUGMENTATION), self.positions[here])
            seeds[here] = (drawn >> np.uint64(1)).astype(np.int64)
        return seeds


class Samples(NamedTuple):
    """The samples of some steps in a row.

    Attributes:
        samples: int64, their numbers.
        sources: int32, the view of each; None where there is one.
        counts: int64, how many each step has.
    """

    samples: Int64s
    sources: NDArray[np.int32] | None
    counts: Int64s


@dataclass(frozen=True, slots=True)
class Block:
    """Whole steps in a row, and what a rank takes at each. What belongs to a single step is made when asked for.

    Attributes:
        epoch: Their epoch.
        start: The first position of the first.
        stop: The position behind the last.
        size: Positions of a step; the step is shorter where there is only one.
        picks: What comes at some positions, of which those that the rank takes at a step stand together; None where
            `shares` has been made.
        positions: The positions that `picks` are of.
        every: From the place in `picks` of a step's first position of the rank to that of the next step's.
        first: The place of the first one.
        width: How many positions the rank takes at a step.
        shares: What the rank takes at each step, if that is not in `picks`.
    """

    epoch: int
    start: int
    stop: int
    size: int
    picks: Picks | None = None
    positions: range = range(0)
    every: int = 0
    first: int = 0
    width: int = 0
    shares: tuple[Share, ...] = ()

    def __len__(self) -> int:
        """Return how many steps there are."""
        return -(-(self.stop - self.start) // self.size) if self.picks is not None else len(self.shares)

    def share(self, number: int) -> Share:
        """Return what the rank takes at one of the steps, which count from 0."""
        if self.picks is None:
            return self.shares[number]
        start = self.first + number * self.every
        positions = self.positions[start : start + self.width]
        step = Step(self.start + number * self.size, self.start + (number + 1) * self.size)
        return Share(step, part_of(self.picks, start, start + self.width), *_numbers(self.epoch, positions))

    def samples(self, steps: range) -> Samples:
        """Return the samples of some of the steps, in their order."""
        picks = self.picks
        if picks is None or picks.ends is not None:
            parts = [self.share(number).picks for number in steps]
            counts = np.array([len(part.samples) for part in parts], np.int64)
            sources = [part.sources for part in parts if part.sources is not None]
            return Samples(
                np.concatenate([np.zeros(0, np.int64), *(part.samples for part in parts)]),
                np.concatenate(sources) if sources else None,
                counts,
            )

        def chosen(column: NDArray[Any]) -> NDArray[Any]:
            rows = column[: len(self) * self.every].reshape(len(self), self.every)
            return rows[steps.start : steps.stop : steps.step, self.first : self.first + self.width].reshape(-1)

        sources_of = None if picks.sources is None else chosen(picks.sources)
        return Samples(chosen(picks.samples), sources_of, np.full(len(steps), self.width, np.int64))


def next_block(feed: Feed, steps: Steps, epoch: int, position: int, most: int) -> Block | None:
    """Return the steps that are best worked out together from a position on; None where the epoch ends.

    Args:
        feed: What comes when.
        steps: How positions are shared.
        epoch: The epoch.
        position: Where the first step begins.
        most: About so many positions of all ranks, and one step at least.
    """
    first = steps.after(feed, epoch, position)
    if first is None:
        return None
    size = steps.size
    if first.stop - first.start < size or first.stop > feed.count(epoch, first.stop):
        return Block(epoch, first.start, first.stop, size, shares=(_share(feed, steps, epoch, first),))  # the tail
    end = min(feed.window_end(epoch, position), position + most)
    wanted = max(1, (end - position) // size)
    wanted = min(wanted, (feed.count(epoch, position + wanted * size) - position) // size)
    stop = position + wanted * size
    mine = steps.share(first, feed.lanes)
    if steps.world_size == 1 or mine.step > 1:
        whole = range(mine.start, stop, mine.step)
        width = steps.batch_size
        return Block(epoch, position, stop, size, feed.take(epoch, whole), whole, every=width, width=width)
    if steps.world_size > _FEW_RANKS:
        wanted = min(wanted, _STEPS)
        listed = [Step(start, start + size) for start in range(position, position + wanted * size, size)]
        shares = tuple(_share(feed, steps, epoch, step) for step in listed)
        return Block(epoch, position, position + wanted * size, size, shares=shares)
    whole = range(position, stop)
    at = mine.start - position
    return Block(
        epoch, position, stop, size, feed.take(epoch, whole), whole, every=size, first=at, width=steps.batch_size
    )


def _numbers(epoch: int, positions: range) -> tuple[Int64s, Int64s]:
    return np.full(len(positions), epoch), np.arange(positions.start, positions.stop, positions.step)


def _share(feed: Feed, steps: Steps, epoch: int, step: Step) -> Share:
    """Return what the rank takes at a step, wherever its positions lie."""
    parts = [
        (feed.take(number, positions), *_numbers(number, positions))
        for number, positions in split_epochs(feed, epoch, steps.share(step, feed.lanes))
    ]
    if not parts:
        none = np.zeros(0, np.int64)
        return Share(step, feed.take(epoch, range(0)), none, none)
    if len(parts) == 1:
        return Share(step, *parts[0])
    picks = [part[0] for part in parts]
    return Share(step, _joined(picks), *(np.concatenate(column) for column in list(zip(*parts, strict=True))[1:]))


def part_of(picks: Picks, start: int, stop: int) -> Picks:
    """Return what comes at the positions ``[start, stop)`` of those that picks are of."""
    first, last, ends = start, stop, None
    if picks.ends is not None:
        first = int(picks.ends[start - 1]) if start else 0
        ends = picks.ends[start:stop] - first
        last = first + (int(ends[-1]) if len(ends) else 0)
    return Picks(
        picks.samples[first:last],
        None if picks.sources is None else picks.sources[first:last],
        ends,
        None if picks.buckets is None else picks.buckets[start:stop],
        None if picks.repeated is None else picks.repeated[start:stop],
    )


def _joined(parts: list[Picks]) -> Picks:
    """Return picks one behind the other."""
    columns: list[Any] = []
    for name in Picks._fields:
        values = [getattr(part, name) for part in parts]
        if name == "ends" and values[0] is not None:
            firsts = np.cumsum([0, *(len(part.samples) for part in parts[:-1])])
            values = [value + first for value, first in zip(values, firsts.tolist(), strict=True)]
        if name == "repeated" and any(value is not None for value in values):
            values = [
                np.zeros(len(part.samples), np.bool_) if value is None else value
                for value, part in zip(values, parts, strict=True)
            ]
        columns.append(None if values[0] is None else np.concatenate(values))
    return Picks(*columns)
