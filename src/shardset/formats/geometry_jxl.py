"""The geometry of JPEG XL (ISO/IEC 18181-1, annexes A to E; 18181-2 for the container).

A codestream begins with the size and, a few bits on, with the orientation. That one counts: the standard has readers
leave alone what EXIF says.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from .boxes import BOX_HEAD, ENDLESS, parse_box

if TYPE_CHECKING:
    from .geometry import Flat

_MAX_BOXES: Final = 4096
_HEADER: Final = 16
"""Bytes of a codestream that always hold its signature, both sides and the orientation: 90 bits at most."""
_SIDE_BITS: Final = (9, 13, 18, 30)
_RATIOS: Final = ((0, 1), (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


class _Bits:
    """Bits from the lowest of the first byte on; those behind the end are missed."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "little"), 8 * len(data)

    def take(self, count: int) -> int:
        if count > self._left:
            raise IndexError
        taken = self._value & ((1 << count) - 1)
        self._value >>= count
        self._left -= count
        return taken

    def take_side(self, *, is_small: int) -> int:
        return 8 * (self.take(5) + 1) if is_small else self.take(_SIDE_BITS[self.take(2)]) + 1


def parse_jxl(flat: Flat) -> tuple[int, int, int] | None:
    """Return width, height (as stored) and orientation.

    Raises:
        struct.error: The bytes end before what is sought.
        IndexError: The same.
    """
    data, _ = _find_header(flat)
    if data[:2] != b"\xff\x0a":
        return None
    bits = _Bits(data[2:])
    is_small = bits.take(1)
    height = bits.take_side(is_small=is_small)
    over, under = _RATIOS[bits.take(3)]
    width = height * over // under if over else bits.take_side(is_small=is_small)
    is_default = bits.take(1)
    orientation = 1 if is_default or not bits.take(1) else bits.take(3) + 1
    return width, height, orientation


def jxl_reach(flat: Flat) -> int:
    """Return how many first bytes `parse_jxl` needs, as far as those at hand tell."""
    return _find_header(flat)[1]


def _find_header(flat: Flat) -> tuple[bytes, int]:
    """Return the first bytes of the codestream, and how many of the file were needed, more than are there if it ended.

    In a container the codestream is one box, ``jxlc``, or several ``jxlp``, which begin with a number.
    """
    if flat[0] == 0xFF:
        return bytes(flat[:_HEADER]), _HEADER
    data, position = b"", 0
    try:
        for _ in range(_MAX_BOXES):
            box = parse_box(flat, position, position, ENDLESS)
            if box is None:
                break
            if box.name in {b"jxlc", b"jxlp"}:
                begin = box.content + (4 if box.name == b"jxlp" else 0)
                end = min(box.end, begin + _HEADER - len(data))
                data += bytes(flat[begin:end])
                if end > len(flat) or len(data) == _HEADER or box.name == b"jxlc":
                    return data, end
            position = box.end
    except struct.error:
        return data, position + BOX_HEAD + 4 + _HEADER
    return data, 0
