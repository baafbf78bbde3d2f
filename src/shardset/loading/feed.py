"""What comes at which position of a loader: samples of one dataset, of buckets, packs, or a mixture.

A feed is a pure function of (dataset, seed, epoch, position). Ranks, workers and batch sizes are unknown to it: they
only share out its positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .order import draws, mix_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardset.dataset.select import Selection
    from shardset.policy import Report

    from .order import Order

    Int64s = NDArray[np.int64]

SPARE = 4
"""The part of a key that tells draws of spare samples from all other draws of a seed."""


class Picks(NamedTuple):
    """What comes at some positions.

    Attributes:
        samples: int64, numbers of samples in their dataset (``ds[i]``), position by position.
        sources: int32, for each sample which of the feed's `views` it is of; None where there is only one.
        ends: int64, a value a position: position `k` of those asked for has samples ``[ends[k - 1], ends[k])``; None
            where each position is one sample.
        buckets: int32, the bucket of each position; None where there are none.
        repeated: bool, whether a position pads a bucket with a sample that comes elsewhere too; None where none does.
    """

    samples: Int64s
    sources: NDArray[np.int32] | None = None
    ends: Int64s | None = None
    buckets: NDArray[np.int32] | None = None
    repeated: NDArray[np.bool_] | None = None


class Feed(Protocol):
    """What comes when. Positions count from 0 in each epoch.

    Attributes:
        views: What samples are taken from.
        lanes: Within a window, positions that are equal modulo a divisor of `lanes` read the same runs, so that ranks
            do best to take every so-manieth position; 1 where they do best to take neighbours.
        unit: Positions ``[k * unit, (k + 1) * unit)`` are of one bucket, so a global batch must divide it; 0 where any
            global batch will do.
    """

    @property
    def views(self) -> tuple[Selection, ...]:
        """What samples are taken from."""

    @property
    def lanes(self) -> int:
        """See above."""

    @property
    def unit(self) -> int:
        """See above."""

    def count(self, epoch: int, most: int | None = None) -> int:
        """Return how many positions an epoch has; not more than `most`, where that is enough to know."""

    def window_end(self, epoch: int, position: int) -> int:
        """Return the position behind those that are best read together with `position`."""

    def take(self, epoch: int, positions: range) -> Picks:
        """Return what comes at some positions of an epoch, all below its count."""

    def spare(self, epoch: int, position: int, attempt: int) -> tuple[int, int]:
        """Return (view, sample) that stands in for a position whose own sample cannot be given, at the n-th attempt."""

    def shape(self, bucket: int) -> tuple[int, int] | None:
        """Return height and width of the images of a bucket; None if they stay as they are."""

    def state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return what a state must hold beside seed, epoch and position, as short as it can be."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned.

        Raises:
            StateError: It does not fit; nothing was changed.
        """

    def account(self, epoch: int, report: Report) -> None:
        """Count what an epoch leaves out, pads or moves, and why."""


class SampleFeed:
    """The samples of one view, in one order."""

    unit = 0

    def __init__(self, view: Selection, order: Order, seed: int) -> None:
        self.views = (view,)
        self.order = order
        self.lanes = order.lanes
        self._seed = seed

    def count(self, epoch: int, most: int | None = None) -> int:  # noqa: ARG002 - as the protocol has it
        """As `Feed.count`."""
        return self.order.count

    def window_end(self, epoch: int, position: int) -> int:  # noqa: ARG002
        """As `Feed.window_end`."""
        return self.order.window_end(position)

    def take(self, epoch: int, positions: range) -> Picks:
        """As `Feed.take`."""
        return Picks(self.views[0].numbers_at(self.order.take(epoch, positions)))

    def spare(self, epoch: int, position: int, attempt: int) -> tuple[int, int]:
        """As `Feed.spare`."""
        place = spare_place(self._seed, epoch, position, attempt, self.order.count)
        return 0, int(self.views[0].numbers_at(np.array([place]))[0])

    def shape(self, bucket: int) -> None:  # noqa: ARG002
        """As `Feed.shape`."""
        return

    def state(self, epoch: int, position: int) -> dict[str, Any]:  # noqa: ARG002
        """As `Feed.state`."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As `Feed.load_state`."""

    def account(self, epoch: int, report: Report) -> None:
        """As `Feed.account`."""


def spare_place(seed: int, epoch: int, position: int, attempt: int, count: int) -> int:
    """Return a number in ``[0, count)`` that a position falls back on, another one at each attempt."""
    return int(draws(mix_key(seed, epoch, SPARE, position), attempt, 1)[0]) % count
