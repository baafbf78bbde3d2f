"""What a catalog knows of samples beyond where their bytes lie, read from the mapped columns without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from .catalog import Group

    Int64s = NDArray[np.int64]

Geometry = tuple[int, int, int]


class SampleRow(NamedTuple):
    """Everything that a catalog knows of one sample.

    Attributes:
        key: The path of its members up to the first dot of the last component.
        shard_index: Number of its shard.
        fields: In archive order; one that occurs twice is listed twice.
        offsets: Byte offset of each field's payload in the shard; -1 for a sparse file.
        lengths: Bytes of each field's payload.
        geometry: Width and height in pixels as stored, and EXIF orientation (1 to 8); None where not known.
        caption: The caption; None where there is none.
    """

    key: str
    shard_index: int
    fields: tuple[str, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    geometry: Geometry | None
    caption: str | None


class Details:
    """Pixel sizes and captions of a group's samples, by row. Columns start with their buffers, as files have them."""

    def __init__(self, samples: pa.RecordBatch) -> None:
        width, height, orientation, caption = map(samples.column, ("width", "height", "orientation", "caption"))
        self._size_bits, self._caption_bits = _view(width.buffers()[0]), _view(caption.buffers()[0])
        sides = [_view(column.buffers()[1]).cast("i") for column in (width, height)]
        self._geometry = [*sides, _view(orientation.buffers()[1])]
        self._text_ends, self._texts = _view(caption.buffers()[1]).cast("i"), _view(caption.buffers()[2])

    def geometry(self, row: int) -> Geometry | None:
        """Return width, height and orientation of a sample, if they are known."""
        bits = self._size_bits
        if bits and not bits[row >> 3] >> (row & 7) & 1:
            return None
        width, height, orientation = self._geometry
        return width[row], height[row], orientation[row]

    def geometries(self, rows: Int64s) -> list[Geometry | None]:
        """Return what `geometry` does for many samples."""
        is_known = _are_set(self._size_bits, rows)
        if not any(is_known):
            return [None] * len(rows)
        columns = zip(*(np.asarray(column)[rows].tolist() for column in self._geometry), strict=True)
        return [geometry if known else None for geometry, known in zip(columns, is_known, strict=True)]

    def caption(self, row: int) -> str | None:
        """Return the caption of a sample, if there is one."""
        bits = self._caption_bits
        if bits and not bits[row >> 3] >> (row & 7) & 1:
            return None
        ends = self._text_ends
        return str(self._texts[ends[row] : ends[row + 1]], "utf-8", "replace")

    def captions(self, rows: Int64s) -> list[str | None]:
        """Return what `caption` does for many samples."""
        is_known = _are_set(self._caption_bits, rows)
        if not any(is_known):
            return [None] * len(rows)
        ends, texts = np.asarray(self._text_ends), self._texts
        spans = zip(ends[rows].tolist(), ends[rows + 1].tolist(), is_known, strict=True)
        return [str(texts[start:end], "utf-8", "replace") if known else None for start, end, known in spans]


def read_row(group: Group, row: int, first_shard: int) -> SampleRow:
    """Return what is known of a sample of a group whose first shard has the number `first_shard`."""
    first, last = group.first_at[row], group.first_at[row + 1]
    details = group.details
    return SampleRow(
        group.key(row),
        first_shard + group.shard_at[row],
        group.layouts[group.layout_at[row]].fields,
        tuple(group.offset_at[first:last]),
        tuple(group.length_at[first:last]),
        details.geometry(row),
        details.caption(row),
    )


def read_rows(group: Group, rows: Int64s, first_shard: int) -> list[SampleRow]:
    """Return what `read_row` does for many samples, in the order of `rows`."""
    first = group.first[rows]
    counts = group.first[rows + 1] - first
    if not len(rows) or counts.min() != counts.max():
        return [read_row(group, row, first_shard) for row in rows.tolist()]
    members = first[:, None] + np.arange(counts[0], dtype=first.dtype)
    columns: tuple[Iterable[Any], ...] = (
        group.keys_of(rows),
        (first_shard + group.shard[rows]).tolist(),
        [group.layouts[layout].fields for layout in group.layout[rows].tolist()],
        map(tuple, group.offset[members].tolist()),
        map(tuple, group.length[members].tolist()),
        group.details.geometries(rows),
        group.details.captions(rows),
    )
    return list(map(SampleRow._make, zip(*columns, strict=True)))


def _view(buffer: pa.Buffer | None) -> memoryview:
    return memoryview(b"" if buffer is None else buffer).cast("B")


def _are_set(bits: memoryview, rows: Int64s) -> list[int]:
    """Tell which values of a column are set; without bits, all are."""
    if not bits:
        return [1] * len(rows)
    flags: list[int] = (np.asarray(bits)[rows >> 3] >> (rows & 7) & 1).tolist()
    return flags


def join_tables(groups: list[Group]) -> dict[str, pa.Table]:
    """Return the tables of some groups by name: ``samples``, ``shards`` and ``others``, a chunk for each group."""
    return {
        name: pa.concat_tables(
            [pa.Table.from_batches([getattr(group, name)]) for group in groups], promote_options="permissive"
        )
        for name in ("samples", "shards", "others")
    }
