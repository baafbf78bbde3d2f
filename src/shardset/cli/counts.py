"""Counting a catalog: by column, so that a million samples take a moment."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardset.index.catalog import Catalog, Group

    Numbers = NDArray[np.integer]

_BINS: Final = 12
ASPECT_EDGES: Final = (0.5, 0.67, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0)
"""Edges between classes of width / height; the outer classes are open. 0.95 up to 1.05 is square."""
_SIZES_KEPT: Final = 5


class Spread(NamedTuple):
    """The least, the middle and the greatest of some numbers. Of an even count the lower middle."""

    least: int
    middle: int
    greatest: int


class Histogram(NamedTuple):
    """How many numbers lie in each bin; bin `i` is ``[edges[i], edges[i + 1])``, the last one closed."""

    edges: list[int]
    counts: list[int]


class FieldCount(NamedTuple):
    """One field in all samples: how many have it, and the bytes of its payloads."""

    name: str
    samples: int
    size: int
    spread: Spread
    histogram: Histogram


def spread_of(numbers: Numbers) -> Spread | None:
    """Return the spread of some numbers, or None if there are none."""
    if not len(numbers):
        return None
    middle = (len(numbers) - 1) // 2
    return Spread(int(numbers.min()), int(np.partition(numbers, middle)[middle]), int(numbers.max()))


def histogram_of(numbers: Numbers) -> Histogram:
    """Count whole numbers into at most twelve bins from the least to the greatest, each wider by the same factor.

    Sizes of payloads spread over decades, so that bins of one width would put nearly all into the first.
    """
    least, greatest = int(numbers.min()), int(numbers.max())
    inner = np.geomspace(max(least, 1), max(greatest, 1), _BINS + 1)[1:-1]
    edges = np.unique([least, *np.ceil(inner).astype(np.int64).tolist(), greatest])
    if len(edges) == 1:
        return Histogram([least, greatest], [len(numbers)])
    return Histogram(edges.tolist(), count_between(numbers, edges[1:-1].tolist()))


def count_between(numbers: NDArray[Any], edges: Sequence[float]) -> list[int]:
    """Count numbers in the classes that some ascending edges divide; a number that is an edge lies above it."""
    below = [0, *(int(np.count_nonzero(numbers < edge)) for edge in edges), len(numbers)]
    return [after - before for before, after in pairwise(below)]


def count_fields(catalog: Catalog) -> list[FieldCount]:
    """Count every field, in the order in which layouts of samples name them."""
    samples: dict[str, int] = {}
    lengths: dict[str, list[Numbers]] = {}
    for number in range(catalog.num_groups):
        group = catalog.group(number)
        for layout, count in zip(
            group.layouts, np.bincount(group.layout, minlength=len(group.layouts)).tolist(), strict=True
        ):
            for field in dict.fromkeys(layout.fields) if count else ():
                samples[field] = samples.get(field, 0) + count
        for field, found in _lengths_by_field(group):
            lengths.setdefault(field, []).append(found)
    counted = []
    for field, pieces in lengths.items():
        whole = np.concatenate(pieces)
        spread = spread_of(whole)
        assert spread is not None  # noqa: S101 - a field that no member has is in no layout that is used
        counted.append(FieldCount(field, samples[field], int(whole.sum()), spread, histogram_of(whole)))
    return counted


def _lengths_by_field(group: Group) -> list[tuple[str, Numbers]]:
    """Return the payload lengths of each field of a group."""
    if not len(group.length):
        return []
    used = np.flatnonzero(np.bincount(group.layout)).tolist()
    if len(used) == 1 and -1 not in group.layouts[used[0]].positions.values():  # the common case needs no sorting
        fields = group.layouts[used[0]].fields
        return list(zip(fields, group.length.reshape(-1, len(fields)).T, strict=True))
    numbers: dict[str, int] = {}
    of_layout = [[numbers.setdefault(field, len(numbers)) for field in layout.fields] for layout in group.layouts]
    flat = np.array([number for fields in of_layout for number in fields], np.int32)
    starts = np.cumsum([0, *map(len, of_layout)])[:-1]
    # Member j of sample i has the field at starts[layout of i] + (j - first member of i).
    per_sample = np.diff(group.first)
    shift = starts[group.layout] - group.first[:-1]
    field_of = flat[np.repeat(shift, per_sample) + np.arange(group.first[0], group.first[-1])]
    kind = np.uint16 if len(numbers) < 1 << 16 else np.int32
    order = np.argsort(field_of.astype(kind), kind="stable")
    ends = np.cumsum(np.bincount(field_of, minlength=len(numbers))).tolist()
    ordered = group.length[group.first[0] : group.first[-1]][order]
    begins = [0, *ends[:-1]]
    return [(name, ordered[begins[at] : ends[at]]) for name, at in numbers.items() if ends[at] > begins[at]]


class Geometry(NamedTuple):
    """The pixel sizes of the samples of a dataset, as shown."""

    samples: int
    turned: int
    width: Spread
    height: Spread
    common: list[tuple[int, int, int]]
    aspects: list[int]


def count_geometry(catalog: Catalog) -> Geometry | None:
    """Count pixel sizes; None if the catalog holds none.

    Returns:
        The spread of widths and heights, the commonest sizes with the number of their samples, and the number of
        samples in each of the classes that `ASPECT_EDGES` divide.
    """
    columns = [_pixels(catalog.group(number)) for number in range(catalog.num_groups)]
    width, height, turned = (np.concatenate([group[at] for group in columns]) for at in range(3))
    widths, heights = spread_of(width), spread_of(height)
    if widths is None or heights is None:
        return None
    found = pc.value_counts(pa.array(width.astype(np.int64) << 32 | height))
    sizes, counts = found.field("values").to_numpy(), found.field("counts").to_numpy()
    commonest = np.argpartition(counts, -min(_SIZES_KEPT, len(counts)))[-_SIZES_KEPT:]
    ordered = sorted(zip(counts[commonest].tolist(), sizes[commonest].tolist(), strict=True), reverse=True)
    common = [(both >> 32, both & 0xFFFFFFFF, count) for count, both in ordered]
    aspects = count_between(width / height, ASPECT_EDGES)
    return Geometry(len(width), int(turned.sum()), widths, heights, common, aspects)


def _pixels(group: Group) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
    """Return width and height as shown of the samples that have them, and whether each is stored turned."""
    width, height, orientation = (
        pc.fill_null(group.samples.column(name), 0).to_numpy() for name in ("width", "height", "orientation")
    )
    is_known = (width > 0) & (height > 0)
    width, height, turned = width[is_known], height[is_known], orientation[is_known] > 4
    return np.where(turned, height, width), np.where(turned, width, height), turned


class Captions(NamedTuple):
    """How many samples have a caption, and the lengths of these in characters."""

    samples: int
    length: Spread | None


def count_captions(catalog: Catalog) -> Captions:
    """Count the captions that a catalog holds."""
    columns = [
        pc.utf8_length(catalog.group(number).samples.column("caption")).drop_null().to_numpy()
        for number in range(catalog.num_groups)
    ]
    lengths = np.concatenate([np.zeros(0, np.int32), *columns])
    return Captions(len(lengths), spread_of(lengths))


def count_shards(catalog: Catalog) -> tuple[int, Spread | None]:
    """Return the bytes of all shards, and the spread of their numbers of samples."""
    groups = [catalog.group(number) for number in range(catalog.num_groups)]
    samples = [group.shards.column("num_samples").to_numpy() for group in groups]
    return sum(int(group.shard_sizes.sum()) for group in groups), spread_of(np.concatenate(samples))


def count_others(catalog: Catalog) -> tuple[int, int]:
    """Return how many files belong to no sample, and their bytes."""
    lengths = [catalog.group(number).others.column("length").to_numpy() for number in range(catalog.num_groups)]
    return sum(map(len, lengths)), sum(int(group.sum()) for group in lengths)
