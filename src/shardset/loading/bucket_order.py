"""Which file comes when, where files come by bucket: a pure function of indexes, shape, seed and epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import numpy as np

from .buckets import Grouping, Shape, group_by_shape, known_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset
    from shardset.dataset.files import ShardFiles
    from shardset.index.catalog import Group

    Int64s = NDArray[np.int64]
    Int32s = NDArray[np.int32]
    UInt64s = NDArray[np.uint64]

Strategy = Literal["sequential", "random_within_buckets", "fully_random"]
STRATEGIES: Final[tuple[str, ...]] = get_args(Strategy)


class FileOrder(NamedTuple):
    """Files by bucket: keys sorted, and within a bucket shard by shard in path order.

    Attributes:
        keys: The buckets.
        starts: int64, one more than keys: bucket `n` is files ``[starts[n], starts[n + 1])``.
        shard: int32, number of each file's shard.
        file: int32, its number in the shard, in path order.
        length: int64, bytes of its payload.
    """

    keys: list[str]
    starts: Int64s
    shard: Int32s
    file: Int32s
    length: Int64s


class SampleOrder(NamedTuple):
    """Samples of a dataset by bucket, in the dataset's order within each. Fields as of `FileOrder`.

    Attributes:
        keys: The buckets, sorted.
        starts: int64, one more than keys: bucket `n` is ``samples[starts[n]:starts[n + 1]]``.
        samples: int64, numbers of samples: ``ds[i]``. Those whose size is not known are in no bucket.
    """

    keys: list[str]
    starts: Int64s
    samples: Int64s


class Plan(NamedTuple):
    """The order of one pass.

    Attributes:
        keys: The buckets.
        places: int64, which file of the `FileOrder` comes at each position.
        bucket: int64, the bucket of each position, as a number among `keys`.
        ends: int64, ascending: positions that no batch reaches across; the last is the number of files.
    """

    keys: list[str]
    places: Int64s
    bucket: Int64s
    ends: Int64s


def order_files(shards: Iterable[int], files_of: Callable[[int], ShardFiles], shape: Shape, limit: int) -> FileOrder:
    """Sort the files of some shards into buckets.

    Args:
        shards: Their numbers.
        files_of: Gives the files of each.
        shape: Which shapes are one.
        limit: Larger payloads are left out, in bytes.

    Raises:
        As `files_of` and `Shape.check`.
    """
    columns: list[tuple[NDArray[np.generic], ...]] = [tuple(np.zeros(0, np.int64) for _ in range(6))]
    for shard in shards:
        files = files_of(shard)
        rows, geometry = files.numbering.files, files.index.geometry
        numbers = np.flatnonzero(known_rows(files, rows, limit))
        if geometry is None or not len(numbers):
            continue
        rows = rows[numbers]
        sides = geometry.width[rows], geometry.height[rows], files.aspects[rows]
        columns.append((np.full(len(rows), shard), numbers, files.index.length[rows], *sides))
    shard_column, number, length, width, height, aspect = map(np.concatenate, zip(*columns, strict=True))
    grouping = group_by_shape(width, height, aspect.astype(np.float32), shape)
    order = grouping.order
    return FileOrder(
        grouping.keys,
        grouping.starts,
        shard_column[order].astype(np.int32),
        number[order].astype(np.int32),
        length[order].astype(np.int64),
    )


def order_samples(dataset: Dataset, shape: Shape, *, upright: bool = False) -> SampleOrder:
    """Sort the samples of a dataset into buckets, from the columns of its catalog in one pass.

    Args:
        dataset: Its catalog is made, if there is none.
        shape: Which shapes are one.
        upright: Take the sizes that images are shown with, not those that are stored.

    Raises:
        As `Dataset.catalog` and `Shape.check`.
    """
    catalog = dataset.catalog
    groups = [catalog.group(number) for number in range(catalog.num_groups)]
    sizes = [_sizes(group, upright=upright) for group in groups]
    width, height = (np.concatenate(side) if side else np.zeros(0, np.int32) for side in zip(*sizes, strict=True))
    known = np.flatnonzero((width > 0) & (height > 0))
    if len(known) < len(width):
        width, height = width[known], height[known]
    aspect = np.divide(width, height, dtype=np.float32)
    grouping: Grouping = group_by_shape(width, height, aspect, shape)
    samples = grouping.order if len(known) == catalog.num_samples else known[grouping.order]
    return SampleOrder(grouping.keys, grouping.starts, samples)


def _sizes(group: Group, *, upright: bool) -> tuple[Int32s, Int32s]:
    """Return width and height of a group's samples; 0 where not known."""
    columns = []
    for name in ("width", "height", "orientation"):
        column = group.samples.column(name)
        columns.append((column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False))
    width, height, orientation = columns
    if upright and (orientation > 4).any():
        return np.where(orientation > 4, height, width), np.where(orientation > 4, width, height)
    return width, height


def plan_pass(
    order: FileOrder, strategy: Strategy, *, seed: int = 0, epoch: int = 0, batch_size: int | None = None
) -> Plan:
    """Say what comes when.

    Args:
        order: Files by bucket.
        strategy: ``sequential``: as they are. ``random_within_buckets``: shuffled, bucket after bucket.
            ``fully_random``: shuffled; with a batch size, batches of one bucket each come in shuffled order.
        seed: Another seed, another shuffle; so another epoch.
        epoch: Which pass it is.
        batch_size: Files in a batch.
    """
    count, counts = len(order.shard), np.diff(order.starts)
    bucket = np.repeat(np.arange(len(counts)), counts)
    if strategy == "sequential":
        return Plan(order.keys, np.arange(count), bucket, order.starts[1:])
    noise = hash_files(order.shard, order.file, seed, epoch)
    if strategy == "random_within_buckets":
        return Plan(order.keys, np.lexsort((noise, bucket)), bucket, order.starts[1:])
    if batch_size is None or not count:
        places = np.argsort(noise, kind="stable")
        return Plan(order.keys, places, bucket[places], np.arange(1, count + 1))
    # Files go into batches of their bucket in random order; a batch comes where its last file would.
    places = np.lexsort((noise, bucket))
    first = np.flatnonzero((np.arange(count) - order.starts[bucket]) % batch_size == 0)
    sizes = np.diff(np.append(first, count))
    last = noise[places[first + sizes - 1]]
    batches = np.argsort(last, kind="stable")
    chosen = np.repeat(first[batches] - np.cumsum(sizes[batches]) + sizes[batches], sizes[batches]) + np.arange(count)
    return Plan(order.keys, places[chosen], bucket[chosen], np.cumsum(sizes[batches]))


def hash_files(shard: Int32s, file: Int32s, seed: int, epoch: int) -> UInt64s:
    """Return a number for each file that looks random: splitmix64 of its place, the seed and the epoch."""
    start = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.array([epoch % 2**64], np.uint64))
    return _mix((shard.astype(np.uint64) << np.uint64(32) | file.astype(np.uint64)) + start)


def _mix(values: UInt64s) -> UInt64s:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
