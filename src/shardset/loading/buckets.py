"""Aspect buckets: which samples have one rounded shape. The formulas and the keys are webshart's, over whole columns.

A key is a text: ``aspect`` is width by height with fixed decimals (``"1.33"``), or the shortest text of the single
precision number if `round_to` is None; ``geometry-tuple`` is ``"(w, h)"`` and ``geometry-list`` ``"[w, h]"``. Keys are
sorted as texts. With a target area, width and height are scaled first (`scale_dimensions`). Sizes are those that are
stored: no orientation is applied. Files whose width or height is not known are in no bucket.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardset.dataset.files import ShardFiles

    Int64s = NDArray[np.int64]
    ShardBuckets = dict[str, Any]

KEYS: Final = ("aspect", "geometry-tuple", "geometry-list")
_LARGEST: Final = 2**32 - 1
_DENSE: Final = 4
"""Codes are numbered through a table while that has at most this many places a row, and else by sorting."""
_SMALL: Final = 1 << 16
_AT_ONCE: Final = 1 << 14
_EXACT: Final = 1 << 24
"""Whole numbers up to this are exact in single precision."""


class Shape(NamedTuple):
    """What makes two files have one shape.

    Attributes:
        key: One of `KEYS`.
        area: Pixels that sizes are scaled to first; None to take them as they are.
        multiple: What scaled sides are multiples of.
        round_to: Decimals of an aspect; None for all.
    """

    key: str = "aspect"
    area: int | None = None
    multiple: int = 64
    round_to: int | None = 2

    def check(self) -> Shape:
        """Return it as it is.

        Raises:
            ValueError: The key is unknown, or a number is negative.
        """
        if self.key not in KEYS:
            raise ValueError(f"key must be {', '.join(map(repr, KEYS[:-1]))}, or {KEYS[-1]!r}, not {self.key!r}")
        for name, value in zip(self._fields[1:], self[1:], strict=True):
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, which is negative")
        return self


class Grouping(NamedTuple):
    """Rows by bucket.

    Attributes:
        keys: The buckets, sorted.
        starts: int64, one more than keys: bucket `n` is ``order[starts[n]:starts[n + 1]]``.
        order: int64, places of the rows that were given, in their order within each bucket.
        width: int64, scaled widths in the order in which the rows were given.
        height: int64, scaled heights.
    """

    keys: list[str]
    starts: Int64s
    order: Int64s
    width: Int64s
    height: Int64s


def scale_dimensions(
    width: int, height: int, target_pixel_area: int, target_resolution_multiple: int = 64
) -> tuple[int, int]:
    """Scale a size to an area, with its shape kept, and each side rounded to a multiple of some number of pixels.

    The area is met only about: rounding changes it, and a side has one multiple at least, so that thin images come out
    larger. (webshart's formula, with its mixture of double and single precision.)

    Args:
        width: Pixels.
        height: Pixels.
        target_pixel_area: Pixels of the result, about.
        target_resolution_multiple: What its sides are multiples of.
    """
    wide, high = scale_columns(
        np.array([width], np.int64), np.array([height], np.int64), target_pixel_area, target_resolution_multiple
    )
    return int(wide[0]), int(high[0])


def scale_columns(width: NDArray[Any], height: NDArray[Any], area: int, multiple: int) -> tuple[Int64s, Int64s]:
    """Scale many sizes, as `scale_dimensions` does one."""
    wide, high = np.empty(len(width), np.int64), np.empty(len(width), np.int64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for start in range(0, len(width), _AT_ONCE):  # what is worked out on the way stays in the processor's cache
            chunk = slice(start, start + _AT_ONCE)
            sides = width[chunk].astype(np.float64), height[chunk].astype(np.float64)
            factor = np.sqrt(area / (sides[0] * sides[1]))
            wide[chunk], high[chunk] = (_snap(_rounded(side * factor), multiple) for side in sides)
    return wide, high


def _snap(side: NDArray[np.float64], multiple: int) -> Int64s:
    """Round sides to a number of steps, in single precision, and to one at least."""
    step = np.float32(multiple)
    steps = _rounded(_whole(side).astype(np.float32) / step)
    return np.maximum(_whole(steps.astype(np.float32) * step), multiple).astype(np.int64)


def _rounded(values: NDArray[Any]) -> NDArray[Any]:
    """Round to whole numbers, halves away from zero; nothing here is negative."""
    down = np.floor(values)
    rounded: NDArray[Any] = down + (values - down >= 0.5)
    return rounded


def _whole(values: NDArray[Any]) -> NDArray[np.float64]:
    """Make 32-bit numbers of floats as Rust does: what is no number becomes 0, what is too large the largest."""
    whole: NDArray[np.float64] = np.minimum(values, np.float64(_LARGEST), dtype=np.float64)
    if np.isnan(whole.sum()):
        whole = np.nan_to_num(whole, nan=0.0)
    return whole


def group_by_shape(width: NDArray[Any], height: NDArray[Any], aspect: NDArray[np.float32], shape: Shape) -> Grouping:
    """Sort rows, all of known size, into buckets.

    Args:
        width: Pixels.
        height: Pixels.
        aspect: Width by height as the index states it.
        shape: Which shapes are one.

    Raises:
        As `Shape.check`.
    """
    shape.check()
    wide, high = width.astype(np.int64), height.astype(np.int64)
    if shape.area is not None:
        wide, high = scale_columns(width, height, shape.area, shape.multiple)
        if shape.key == "aspect":
            with np.errstate(divide="ignore", invalid="ignore"):
                aspect = (wide.astype(np.float32) / high.astype(np.float32)).astype(np.float32)
    if not len(wide):
        return Grouping([], np.zeros(1, np.int64), np.zeros(0, np.int64), wide, high)
    if shape.key == "aspect":
        texts, codes = _aspect_keys(aspect, shape.round_to)
    else:
        texts, codes = _size_keys(wide, high, shape.key, 1 if shape.area is None else shape.multiple)
    ranked = sorted(range(len(texts)), key=texts.__getitem__)
    rank = np.empty(len(texts), np.uint16 if len(texts) <= 1 << 16 else np.int64)
    rank[ranked] = np.arange(len(texts))
    ranks = rank[codes]
    counts = np.bincount(ranks, minlength=len(texts))
    starts = np.concatenate([[0], np.cumsum(counts)])
    # Of 16-bit numbers numpy sorts by digits, ten times as fast as otherwise.
    return Grouping([texts[at] for at in ranked], starts, np.argsort(ranks, kind="stable"), wide, high)


def _size_keys(width: Int64s, height: Int64s, key: str, step: int) -> tuple[list[str], Int64s]:
    """Number sizes, whose sides are multiples of a step where they are small enough."""
    if step > 1 and max(int(width.max()), int(height.max())) < _EXACT:
        columns, rows = width // step, height // step  # few numbers, so that a table does
    else:
        columns, rows = width, height
    values, codes = _numbered(width * (1 << 32) + height, columns * (int(rows.max()) + 1) + rows)
    brackets = "()" if key == "geometry-tuple" else "[]"
    return [f"{brackets[0]}{value >> 32}, {value & _LARGEST}{brackets[1]}" for value in values.tolist()], codes


def _aspect_keys(aspect: NDArray[np.float32], decimals: int | None) -> tuple[list[str], Int64s]:
    exact = aspect.astype(np.float64)
    if decimals is not None and decimals <= 9 and exact.min() >= 0 and exact.max() * 10**decimals < 2**52:
        scaled = exact * 10**decimals
        units = np.rint(scaled).astype(np.int64)
        # Near a tie the product may lie on the wrong side; there the digits of the number itself decide.
        close = np.abs(scaled - np.floor(scaled) - 0.5) <= 1e-9 + scaled * 1e-15
        for at in np.flatnonzero(close).tolist():
            units[at] = int(f"{exact[at]:.{decimals}f}".replace(".", ""))
        values, codes = _numbered(units, units)
        return [_decimal(value, decimals) for value in values.tolist()], codes
    distinct, codes = np.unique(aspect, return_inverse=True)
    if decimals is not None:
        texts = [f"{value:.{decimals}f}" for value in distinct.astype(np.float64).tolist()]
    else:
        texts = list(map(_shortest, distinct))
    return _merged(texts, codes)


@lru_cache(1 << 16)  # shard after shard has the same few
def _decimal(units: int, decimals: int) -> str:
    """Return a number of hundredths, or of whatever the decimals say, as text."""
    scale = 10**decimals
    return f"{units // scale}.{units % scale:0{decimals}d}" if decimals else str(units)


def _shortest(value: np.float32) -> str:
    """Return the shortest text that means a number. Of two as close as each other it is the larger, as in Rust."""
    text = np.format_float_positional(value, unique=True, trim="-")
    digits = len(text.partition(".")[2])
    units = float(value) * 10**digits
    if np.isfinite(units) and units - np.floor(units) == 0.5 and digits:
        larger = f"{(int(units) + 1) / 10**digits:.{digits}f}"
        return larger if np.float32(larger) == value else text
    return text


def _merged(texts: list[str], codes: Int64s) -> tuple[list[str], Int64s]:
    """Give equal texts one number."""
    places: dict[str, int] = {}
    numbers = np.array([places.setdefault(text, len(places)) for text in texts], np.int64)
    return list(places), numbers[codes]


def _numbered(values: Int64s, codes: Int64s) -> tuple[Int64s, Int64s]:
    """Return distinct values and the number of each value among them; `codes` differ where values do."""
    low, high = int(codes.min()), int(codes.max())
    if high - low > _DENSE * len(codes):
        distinct, numbers = np.unique(values, return_inverse=True)
        return distinct, numbers
    codes = codes - low
    table = np.zeros(high - low + 1, np.int64)
    is_there = np.bincount(codes, minlength=len(table)) > 0
    table[is_there] = np.arange(int(is_there.sum()))
    distinct = np.empty(int(is_there.sum()), np.int64)
    numbers = table[codes]
    distinct[numbers] = values
    return distinct, numbers


def known_rows(files: ShardFiles, rows: Int64s, limit: int) -> NDArray[np.bool_]:
    """Tell which rows of an index have a size, and a payload of at most `limit` bytes."""
    geometry = files.index.geometry
    if geometry is None:
        return np.zeros(len(rows), np.bool_)
    known: NDArray[np.bool_] = (
        (geometry.width[rows] > 0) & (geometry.height[rows] > 0) & (files.index.length[rows] <= limit)
    )
    return known


def shard_buckets(
    files: ShardFiles,
    shard_index: int,
    shape: Shape,
    limit: int,
    *,
    is_sample: bool,
    wanted: Callable[[str], bool] | None = None,
) -> ShardBuckets:
    """Return the buckets of one shard as webshart does.

    Args:
        files: The shard's files.
        shard_index: Its number.
        shape: Which shapes are one.
        limit: Larger payloads are left out, in bytes.
        is_sample: Of samples, with ``sample_idx``; otherwise of all files.
        wanted: Tells which paths are taken.

    Returns:
        ``shard_idx``, ``shard_name`` (the shard's url) and ``buckets``: for each key its entries in path order, each
        ``filename, offset, size, sample_idx, width, height, aspect``, and ``original_size`` where the target changed
        the size. Sizes are the stored ones.

    Raises:
        As `Shape.check`.
    """
    shape.check()
    numbering, index = files.numbering, files.index
    rows = numbering.samples if is_sample else numbering.files
    numbers = np.flatnonzero(known_rows(files, rows, limit))
    if wanted:
        names = files.names
        numbers = numbers[[wanted(names[row]) for row in rows[numbers].tolist()]] if len(numbers) else numbers
    rows = rows[numbers]
    buckets: dict[str, list[dict[str, Any]]] = {}
    if len(rows) and index.geometry is not None:
        width, height, aspect = index.geometry.width[rows], index.geometry.height[rows], files.aspects[rows]
        grouping = group_by_shape(width, height, aspect, shape)
        order = grouping.order
        rows = rows[order]
        columns = [
            np.array(files.names, object)[rows].tolist(),
            index.offset[rows].tolist(),
            _as_objects(index.length[rows]),
            _as_objects(numbers[order]),
            _as_objects(width[order]),
            _as_objects(height[order]),
            aspect[order].astype(np.float64).tolist(),
        ]
        changed = ((grouping.width != width) | (grouping.height != height))[order]
        entries = _entries(columns, changed, is_sample=is_sample)
        ends = grouping.starts.tolist()
        buckets = {key: entries[ends[at] : ends[at + 1]] for at, key in enumerate(grouping.keys)}
    return {"shard_idx": shard_index, "shard_name": files.url, "buckets": buckets}


def _as_objects(values: NDArray[np.integer]) -> list[int]:
    """Return numbers as a list that has one object for each number that occurs, which takes less memory and time."""
    listed: list[int] = _numbers()[values].tolist() if int(values.max()) < _SMALL else values.tolist()
    return listed


@cache
def _numbers() -> NDArray[np.object_]:
    return np.arange(_SMALL).astype(object)


def _entries(columns: Sequence[list[Any]], changed: NDArray[np.bool_], *, is_sample: bool) -> list[dict[str, Any]]:
    rows = zip(*columns, strict=True)
    # Literals, since a million dicts are made of them.
    if is_sample and changed.all():
        return [
            {
                "filename": f,
                "offset": o,
                "size": s,
                "sample_idx": i,
                "width": w,
                "height": h,
                "aspect": a,
                "original_size": [w, h],
            }
            for f, o, s, i, w, h, a in rows
        ]
    if is_sample:
        entries = [
            {"filename": f, "offset": o, "size": s, "sample_idx": i, "width": w, "height": h, "aspect": a}
            for f, o, s, i, w, h, a in rows
        ]
    else:
        entries = [
            {"filename": f, "offset": o, "size": s, "width": w, "height": h, "aspect": a}
            for f, o, s, _, w, h, a in rows
        ]
    for at in np.flatnonzero(changed).tolist():
        entry = entries[at]
        entry["original_size"] = [entry["width"], entry["height"]]
    return entries
