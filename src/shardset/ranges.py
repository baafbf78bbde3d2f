"""Byte ranges: the value that every layer hands to the next, and how HTTP writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# 18 digits are an exabyte short of what int64 holds, and keep hostile headers from making huge numbers.
_CONTENT_RANGE: Final = re.compile(
    r"bytes (?:([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)|\*/([0-9]{1,18}))", re.IGNORECASE
)


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


def format_range(offset: int, length: int) -> str:
    """Return the Range header (RFC 9110, 14.2) that asks for `length` bytes from byte `offset` on.

    Raises:
        ValueError: `offset` is negative, or `length` is not positive: HTTP cannot ask for an empty range.
    """
    if offset < 0 or length < 1:
        raise ValueError(f"no range header asks for offset {offset}, length {length}")
    return f"bytes={offset}-{offset + length - 1}"


def parse_content_range(text: str) -> tuple[int, int, int | None]:
    """Return offset, length and the size of the whole object (None if not told) from a Content-Range header.

    ``bytes */1234`` (RFC 9110, 14.4), which comes with status 416 and says that the range lies outside, gives
    ``(0, 0, 1234)``; nothing else has length 0.

    Raises:
        ValueError: The header is of another form, ends before it begins, or reaches past the size that it tells.
    """
    found = _CONTENT_RANGE.fullmatch(text.strip(" \t"))
    if not found:
        raise ValueError(f"not a Content-Range of bytes: {text[:80]!r}")
    first, last, whole, outside = found.groups()
    if outside is not None:
        return 0, 0, int(outside)
    offset, length = int(first), int(last) - int(first) + 1
    total = None if whole == "*" else int(whole)
    if length < 1 or (total is not None and offset + length > total):
        raise ValueError(f"a Content-Range that cannot be: {text[:80]!r}")
    return offset, length, total
