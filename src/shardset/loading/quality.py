"""What an order is worth and what it costs: how well it mixes sorted samples, and what is read and held for it.

The worst case for a shuffle is a dataset that is sorted by label. `measure_quality` takes the first batches of an order
of such samples; `expect_quality` says what chance would have of them. The figure that tells most is chi-square per
degree of freedom: in a batch, the squared difference between how often a class comes and how often it should, over the
latter, summed over the classes, over their number less one. It is 1 for a true shuffle, and more where batches are less
alike than chance has them. Of a `WindowedOrder` of more than a few windows it is about
``1 + (batch - lanes) * (run - 1) / samples of a window``.

Measured for 1,000,000 samples in shards of 1,000, each shard of one class, over 400 batches of 256, at mean sizes from
1 kB to 1 MB: at most 1.05 with the default window of 1 GiB, at most 1.1 with `GOOD_WINDOW`, 1.2 with half of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .steps import Step, Steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .order import Order

    Int64s = NDArray[np.int64]

GOOD_WINDOW: Final = 512 << 20
"""Bytes of a window (`Shuffle.window_bytes`) at which chi-square per degree of freedom is at most 1.1."""
_MOST_MEASURED: Final = 1 << 22
"""Samples that are looked at, and samples of which all are found again in the next epoch."""
_SAMPLES_OF_A_CLASS: Final = 10
"""At least; of classes of one sample each, all batches would be alike."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How well batches are mixed.

    Attributes:
        chi_square: Of the classes in a batch, per degree of freedom; the mean over the batches.
        shards: From how many shards a batch is; the mean.
        neighbours: Share of the positions whose sample is from the same shard as that of the position before.
        correlation: Between the numbers of samples at neighbouring positions, from -1 to 1.
        pairs: How often two samples of a batch are in one batch in the next epoch too, as a multiple of what chance
            has; None for more than 2^22 samples, which would take long.
    """

    chi_square: float
    shards: float
    neighbours: float
    correlation: float
    pairs: float | None


@dataclass(frozen=True, slots=True)
class Sorted:
    """A dataset that is sorted by label.

    Attributes:
        count: Samples in it, at least 2.
        shard_starts: int64, ascending: the first sample of each shard, of which the first is 0.
        classes: Labels; each has as many samples as the others.
    """

    count: int
    shard_starts: Int64s
    classes: int

    @classmethod
    def of(cls, count: int, shard_starts: Int64s | None = None, classes: int = 1000) -> Sorted:
        """Return a dataset with at most so many classes, fewer where these had less than ten samples each.

        Args:
            count: Samples in it.
            shard_starts: As the attribute; None for shards of 1,000 samples.
            classes: Labels.

        Raises:
            ValueError: There are fewer than two samples, of which no order can be told from another.
        """
        if count < 2:
            raise ValueError(f"the order of {count} samples has no quality")
        starts = np.arange(0, count, 1000) if shard_starts is None else shard_starts
        return cls(count, starts, max(2, min(classes, count // _SAMPLES_OF_A_CLASS)))

    def shards_of(self, samples: Int64s) -> Int64s:
        """Return the shard of each sample."""
        return np.searchsorted(self.shard_starts, samples, "right")


def fit_batches(count: int, batch: int, batches: int) -> tuple[int, int]:
    """Return (positions of a batch, batches) that can be measured: of whole batches, and of at most 2^22 samples."""
    batch = min(batch, count)
    return batch, max(1, min(batches, count // batch, _MOST_MEASURED // batch))


def measure_quality(order: Order, data: Sorted, *, batch: int = 256, batches: int = 400, epoch: int = 0) -> Quality:
    """Measure how well the first batches of an epoch are mixed.

    Args:
        order: An order of as many samples as the dataset has.
        data: The dataset.
        batch: Positions of a batch; fewer if there are not as many.
        batches: How many; fewer if there are not as many, or more samples than 2^22 in them.
        epoch: The epoch.
    """
    batch, batches = fit_batches(data.count, batch, batches)
    samples = order.take(epoch, range(batch * batches))
    shards = data.shards_of(samples)
    by_batch = np.arange(batches)[:, None]
    labels = (samples * data.classes // data.count).reshape(batches, batch)
    codes = (labels + by_batch * data.classes).reshape(-1)
    found = np.bincount(codes, minlength=batches * data.classes)
    due = batch / data.classes
    chi_square = float(np.square(found - due).sum()) / due / batches / (data.classes - 1)
    ranked = np.sort(shards.reshape(batches, batch), axis=1)
    changes = int(np.count_nonzero(np.diff(ranked, axis=1)))
    centred = samples - samples.mean()
    spread = float(centred @ centred)
    return Quality(
        chi_square=chi_square,
        shards=1 + changes / batches,
        neighbours=float(np.mean(shards[1:] == shards[:-1])) if len(shards) > 1 else 0.0,
        correlation=float(centred[1:] @ centred[:-1]) / spread if spread else 0.0,
        pairs=_measure_pairs(order, samples.reshape(batches, batch), epoch + 1),
    )


def _measure_pairs(order: Order, samples: Int64s, epoch: int) -> float | None:
    batches, batch = samples.shape
    if order.count > _MOST_MEASURED or batch < 2:
        return None
    batch_at = np.empty(order.count, np.int64)
    batch_at[order.take(epoch, range(order.count))] = np.arange(order.count) // batch
    ranked = np.sort(batch_at[samples], axis=1).reshape(-1)
    ranked += np.repeat(np.arange(batches), batch) * (order.count // batch + 1)
    together = np.diff(np.flatnonzero(np.diff(ranked, prepend=-1, append=-1)))
    found = int((together * (together - 1)).sum())
    whole, left = divmod(order.count, batch)
    pairs = whole * batch * (batch - 1) + left * (left - 1)
    return float(found * order.count * (order.count - 1) / (batches * batch * (batch - 1) * pairs))


def expect_quality(data: Sorted, *, batch: int = 256) -> Quality:
    """Return what a true shuffle has on average, where batches are drawn without putting samples back."""
    count, batch = data.count, min(batch, data.count)
    sizes, shards = np.unique(np.diff(data.shard_starts, append=count), return_counts=True)
    found = [_chance_to_meet(size, batch, count) for size in sizes.tolist()]
    same = float((shards * sizes.astype(np.float64) * (sizes - 1)).sum())
    return Quality(
        chi_square=(count - batch) / (count - 1),
        shards=float(shards @ np.array(found)),
        neighbours=same / count / (count - 1),
        correlation=-1 / (count - 1),
        pairs=1.0,
    )


def _chance_to_meet(size: int, batch: int, count: int) -> float:
    """Return the probability that a batch has a sample of a shard, which depends on both in the same way."""
    if size + batch > count:
        return 1.0
    few, many = sorted((size, batch))
    return 1 - float(np.exp(np.log1p(-many / (count - np.arange(few, dtype=np.float64))).sum()))


@dataclass(frozen=True, slots=True)
class Cost:
    """What is read and held for the first window of an epoch, or for as many as a global step takes.

    Attributes:
        window_samples: Samples of a window, of all ranks together.
        window_bytes: Bytes of these, by their mean size.
        windows: How many windows a global step takes.
        samples: Samples of these windows that one rank reads and holds.
        reads: In how many pieces of shards these stand, each of which takes one read.
        read_bytes: Mean size of a read.
        memory_bytes: What a rank holds at most: its part of what is consumed and of what is read meanwhile.
    """

    window_samples: int
    window_bytes: int
    windows: int
    samples: int
    reads: int
    read_bytes: int
    memory_bytes: int


def measure_cost(
    order: Order,
    mean_bytes: float,
    *,
    batch_size: int = 256,
    world_size: int = 1,
    shard_starts: Int64s | None = None,
    epoch: int = 0,
) -> Cost:
    """Find out what the first of some ranks reads and holds, by working out a window.

    Args:
        order: The order.
        mean_bytes: Mean size of a sample.
        batch_size: Positions that a rank takes at a step.
        world_size: How many ranks there are.
        shard_starts: int64, ascending: the first sample of each shard; None if nothing is known of shards.
        epoch: The epoch.
    """
    steps = Steps(batch_size, 0, world_size)
    window = end = order.window_end(0) if order.count else 0
    windows = 1
    while end < min(steps.size, order.count):
        end = order.window_end(end)
        windows += 1
    share = np.array(steps.share(Step(0, steps.size), order.lanes))
    positions = (np.arange(0, end, steps.size)[:, None] + share).reshape(-1)
    samples = np.sort(order.take(epoch, range(end))[positions[positions < end]])
    is_apart = np.diff(samples) != 1
    if shard_starts is not None:
        shards = np.searchsorted(shard_starts, samples, "right")
        is_apart |= shards[1:] != shards[:-1]
    reads = int(np.count_nonzero(is_apart)) + (len(samples) > 0)
    held = len(samples) * mean_bytes
    return Cost(
        window_samples=window,
        window_bytes=round(window * mean_bytes),
        windows=windows,
        samples=len(samples),
        reads=reads,
        read_bytes=round(held / reads) if reads else 0,
        memory_bytes=round(held * (2 if end < order.count else 1)),
    )
