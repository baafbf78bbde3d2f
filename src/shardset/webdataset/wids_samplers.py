"""Samplers of `wids`: orders of sample numbers that stay within a shard, or a chunk, for a while.

Each order is a pure function of (seed, epoch), the same on every machine, and each pass is another epoch. None of them
needs torch; a DataLoader takes any iterable that has a length.
"""

from __future__ import annotations

from itertools import accumulate, chain, islice, pairwise, repeat
from typing import TYPE_CHECKING, Final, Protocol

from shardset.loading.order import mix_key, permutation
from shardset.loading.ranks import find_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_OF_RANGES: Final = 0
_WITHIN_RANGE: Final = 1


class Sized(Protocol):
    """What a sampler asks of a dataset."""

    def __len__(self) -> int:
        """Return the number of samples."""


class Sharded(Sized, Protocol):
    """What `ShardListSampler` asks of a dataset."""

    @property
    def lengths(self) -> Sequence[int]:
        """Samples of each shard."""


class RangeSampler:
    """Goes through ranges of sample numbers, one after the other: the ranges in an order, and the numbers in each.

    What the samplers of `wids` have in common. The order is that of (seed, epoch, range), so that two ranges of one
    length are not shuffled alike.

    Attributes:
        epoch: The epoch of the next pass. Each pass, also one that is given up, makes it one more.
    """

    def __init__(self, ranges: Sequence[range], *, seed: int, shuffle: bool, shufflefirst: bool) -> None:
        self.ranges = list(ranges)
        self.seed = seed
        self.shuffle = shuffle
        self.shufflefirst = shufflefirst
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next pass."""
        self.epoch = epoch

    def in_order(self, epoch: int) -> Iterator[int]:
        """Yield all numbers once, in the order of an epoch."""
        numbers: Sequence[int] = range(len(self.ranges))
        # As wids does it: the first epoch takes the shards as they come, while they are being downloaded.
        if self.shuffle and (self.shufflefirst or epoch > 0):
            numbers = permutation(mix_key(self.seed, epoch, _OF_RANGES), len(self.ranges)).tolist()
        for number in numbers:
            one = self.ranges[number]
            if self.shuffle:
                key = mix_key(self.seed, epoch, _WITHIN_RANGE, number)
                yield from (permutation(key, len(one)) + one.start).tolist()
            else:
                yield from one

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.in_order(epoch)

    def __len__(self) -> int:
        return sum(map(len, self.ranges))


class ShardListSampler(RangeSampler):
    """Goes through the shards of a dataset in an order, and through the samples of each in an order.

    Args:
        dataset: A `ShardListDataset`, or what else has its `lengths`.
        lengths: Samples of each shard; by default those of the dataset.
        seed: Decides the orders, together with the epoch.
        shufflefirst: Shuffle the shards in epoch 0 too.
    """

    def __init__(
        self,
        dataset: Sharded | None,
        *,
        lengths: Sequence[int] | None = None,
        seed: int = 0,
        shufflefirst: bool = False,
    ) -> None:
        if lengths is None:
            if dataset is None:
                raise ValueError("a dataset or the lengths of its shards are needed")
            lengths = dataset.lengths
        bounds = accumulate(map(int, lengths), initial=0)
        ranges = [range(start, stop) for start, stop in pairwise(bounds)]
        super().__init__(ranges, seed=seed, shuffle=True, shufflefirst=shufflefirst)


ShardedSampler = ShardListSampler


class ChunkedSampler(RangeSampler):
    """Goes through chunks of neighbouring samples in an order, and through the samples of each chunk in an order.

    Args:
        dataset: What the samples are numbers of.
        dslength_per_replica: Numbers in a pass. If there are fewer samples, the pass begins anew with the first of
            its order; if there are more, it ends early. By default as many as there are samples.
        num_samples: So many samples, from 0 on, or a pair (start, stop), half open; by default all.
        chunksize: Samples of a chunk; the last one may have fewer.
        seed: Decides the orders, together with the epoch.
        shuffle: Shuffle chunks and samples; otherwise the order is that of the dataset.
        shufflefirst: Shuffle the chunks in epoch 0 too.

    Attributes:
        num_repeated: Samples that come a second time in each pass, to fill it up.
        num_dropped: Samples that each pass leaves out, to end where others end.

    Raises:
        ValueError: There is no sample, a number is not positive, or the samples are not all in the dataset.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        dslength_per_replica: int = -1,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = True,
        shufflefirst: bool = False,
    ) -> None:
        count = len(dataset)
        if num_samples is None:
            num_samples = count
        start, stop = (0, num_samples) if isinstance(num_samples, int) else num_samples
        if not 0 <= start < stop <= count:
            raise ValueError(f"samples {start} to {stop} of a dataset of {count}: there is nothing to go through there")
        if chunksize < 1:
            raise ValueError(f"chunksize={chunksize}: must be at least 1")
        ranges = [range(first, min(first + chunksize, stop)) for first in range(start, stop, chunksize)]
        super().__init__(ranges, seed=seed, shuffle=shuffle, shufflefirst=shufflefirst)
        size = stop - start
        self.dslength_per_replica = dslength_per_replica if dslength_per_replica > 0 else size
        self.num_repeated = max(0, self.dslength_per_replica - size)
        self.num_dropped = max(0, size - self.dslength_per_replica)

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        again = chain.from_iterable(map(self.in_order, repeat(epoch)))
        return islice(again, self.dslength_per_replica)

    def __len__(self) -> int:
        return self.dslength_per_replica


def DistributedChunkedSampler(  # noqa: N802 - the name that wids gave to this function
    dataset: Sized,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    shuffle: bool = True,
    shufflefirst: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    chunksize: int = 1_000_000,
) -> ChunkedSampler:
    """Return the sampler of one rank: a run of neighbouring samples, so that a rank reads few shards.

    The runs of all ranks together are all samples, each once. Their lengths differ by one at most, and the passes over
    them not at all: a rank that has one sample less repeats one, or with `drop_last` a rank that has one more leaves
    one out. Which one depends on the epoch where the order is shuffled.

    Args:
        dataset: What the samples are numbers of.
        num_replicas: How many ranks there are; by default as `shardset.loading.ranks` finds out.
        num_samples: Share only so many samples, from 0 on; by default all.
        rank: Which one this is, ``[0, num_replicas)``.
        shuffle: As in `ChunkedSampler`.
        shufflefirst: As in `ChunkedSampler`.
        seed: As in `ChunkedSampler`; the same on all ranks.
        drop_last: Leave samples out rather than repeat some.
        chunksize: Samples of a chunk.

    Raises:
        ValueError: There is no sample for a rank to go through, or `rank` is none of them.
    """
    if num_replicas is None or rank is None:
        share = find_share()
        num_replicas = share.world_size if num_replicas is None else num_replicas
        rank = share.rank if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank} is not below num_replicas={num_replicas}")
    count = len(dataset) if num_samples is None else num_samples
    if not 0 < count <= len(dataset):
        raise ValueError(f"{count} samples to share, of a dataset of {len(dataset)}")
    if drop_last and count < num_replicas:
        raise ValueError(f"{count} samples for {num_replicas} ranks: with drop_last=True none is left for any of them")
    start, stop = rank * count // num_replicas, (rank + 1) * count // num_replicas
    is_lent = start == stop  # there are more ranks than samples
    if is_lent:
        start, stop = rank % count, rank % count + 1
    sampler = ChunkedSampler(
        dataset,
        dslength_per_replica=count // num_replicas if drop_last else -(-count // num_replicas),
        num_samples=(start, stop),
        chunksize=chunksize,
        seed=seed,
        shuffle=shuffle,
        shufflefirst=shufflefirst,
    )
    if is_lent:
        sampler.num_repeated = len(sampler)
    return sampler
