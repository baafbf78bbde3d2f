"""Byte ranges: the value that every layer hands to the next, and the merging of near ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """`length` bytes of a shard from byte `offset` on: the half-open interval ``[offset, offset + length)``.

    Raises:
        ValueError: `offset` or `length` is negative.
    """

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise ValueError(f"a byte range cannot be negative: offset {self.offset}, length {self.length}")

    @property
    def end(self) -> int:
        """The first byte after the range."""
        return self.offset + self.length


class MergedRange(NamedTuple):
    """One read that covers several ranges: where it lies, and which of the ranges (by position) it serves."""

    offset: int
    length: int
    members: tuple[int, ...]


def merge_ranges(ranges: Iterable[ByteRange], *, gap: int, limit: int) -> list[MergedRange]:
    """Merge ranges that lie near each other into fewer, larger reads, in offset order.

    Args:
        ranges: Any ranges of one shard, in any order; overlapping and empty ones are allowed.
        gap: Ranges at most this many bytes apart are read together.
        limit: A merged read grows to at most this many bytes; a single larger range stays whole.

    Returns:
        Reads in ascending offset; every input position occurs in exactly one `members`.
    """
    ordered = sorted(enumerate(ranges), key=lambda pair: (pair[1].offset, pair[1].length))
    merged: list[MergedRange] = []
    start = end = 0
    members: list[int] = []
    for position, wanted in ordered:
        if members and wanted.offset - end <= gap and max(end, wanted.end) - start <= limit:
            end = max(end, wanted.end)
            members.append(position)
            continue
        if members:
            merged.append(MergedRange(start, end - start, tuple(members)))
        start, end, members = wanted.offset, wanted.end, [position]
    if members:
        merged.append(MergedRange(start, end - start, tuple(members)))
    return merged
