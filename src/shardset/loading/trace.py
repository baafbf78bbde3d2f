"""Which samples past steps took, found out without reading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .steps import Step, split_epochs

if TYPE_CHECKING:
    from .feed import Feed
    from .steps import Steps


@dataclass(frozen=True, slots=True)
class Traced:
    """One sample that came at a step.

    Attributes:
        epoch: The epoch; behind the step's own where ``tail="wrap"`` went on into the next one.
        position: Its position in that.
        rank: The rank that took it, if there were as many as now.
        key: Its key.
        shard: The url of its shard.
        offset: Where its first payload begins in the shard, in bytes; -1 for a sparse file.
        index: Its number in its dataset: ``ds[index]``.
        source: In a mixture, the name of its dataset; else None.
    """

    epoch: int
    position: int
    rank: int
    key: str
    shard: str
    offset: int
    index: int
    source: str | None = None


def trace_positions(
    feed: Feed,
    steps: Steps,
    epoch: int,
    *,
    step: int | None,
    positions: tuple[int, int] | None,
    names: tuple[str, ...] | None,
) -> list[Traced]:
    """Return what `Loader.trace` does.

    Raises:
        ValueError: Neither a step nor positions are given, or both.
        IndexError: The epoch has no such step or positions.
    """
    if (step is None) == (positions is None):
        raise ValueError("give a step, or positions")
    if step is not None:
        found = steps.after(feed, epoch, step * steps.size) if step >= 0 else None
        if found is None:
            raise IndexError(f"epoch {epoch} has {steps.left(feed, epoch, 0)} steps, and no step {step}")
    else:
        assert positions is not None  # noqa: S101 - one of the two was given
        found = Step(*positions)
        if not 0 <= found.start < found.stop <= feed.count(epoch, found.stop):
            raise IndexError(f"epoch {epoch} has {feed.count(epoch)} positions; {positions} are not among them")
    ranks = _ranks(steps, found, feed.lanes)
    traced: list[Traced] = []
    done = 0
    for number, part in split_epochs(feed, epoch, range(found.start, found.stop)):
        picks = feed.take(number, part)
        counts = np.ones(len(part), np.int64) if picks.ends is None else np.diff(picks.ends, prepend=0)
        places = np.repeat(np.arange(len(part)), counts)
        for at, place in enumerate(places.tolist()):
            source = 0 if picks.sources is None else int(picks.sources[at])
            sample = int(picks.samples[at])
            row = feed.views[source].dataset.row(sample)
            shard = feed.views[source].dataset.shard_entry(row.shard_index).url
            offset = row.offsets[0] if row.offsets else -1
            name = None if names is None else names[source]
            rank = ranks[done + place]
            traced.append(Traced(number, part[place], rank, row.key, shard, offset, sample, name))
        done += len(part)
    return traced


def _ranks(steps: Steps, step: Step, lanes: int) -> list[int]:
    """Return which rank takes each position of a step."""
    ranks = [0] * (step.stop - step.start)
    for rank in range(steps.world_size):
        for position in type(steps)(steps.batch_size, rank, steps.world_size, steps.tail).share(step, lanes):
            ranks[position - step.start] = rank
    return ranks
