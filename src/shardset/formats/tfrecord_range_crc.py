"""The CRC-32C of any range of a file in the same short time, however long the range is.

A checksum is linear: that of a range follows from those of the two beginnings of the file that differ by it. The
checksums of the beginnings are taken once, one for each block of the file; a range then costs two pieces of a block and
a multiplication. It is what keeps hostile bytes, full of frames that overlap, from being summed up over and over.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

_FEW: Final = 1 << 36
_BLOCK: Final = 1 << 14
_LARGE_BLOCK: Final = 1 << 20
"""Of files above 64 GiB, so that the table of their beginnings stays small."""
_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's, its bits reversed."""


class RangeCrc:
    """Gives the checksums of ranges. The first one reads the whole file once.

    Args:
        read: Gives `length` bytes from byte `offset` on.
        size: Bytes of the file.
    """

    def __init__(self, read: Callable[[int, int], Buffer], size: int) -> None:
        self._read = read
        self._size = size
        self._block = _BLOCK if size < _FEW else _LARGE_BLOCK
        self._beginnings: list[int] = []

    def of(self, offset: int, length: int) -> int:
        """Return the plain (not masked) CRC-32C of ``[offset, offset + length)``, which lies in the file."""
        if not self._beginnings:
            self._sum_up()
        return self._until(offset + length) ^ append_zeros(self._until(offset), length)

    def _sum_up(self) -> None:
        crc, beginnings = 0, [0]
        for offset in range(0, self._size - self._block + 1, self._block):
            crc = crc32c(self._read(offset, self._block), crc)
            beginnings.append(crc)
        self._beginnings = beginnings

    def _until(self, end: int) -> int:
        number, rest = divmod(end, self._block)
        crc = self._beginnings[number]
        return crc32c(self._read(end - rest, rest), crc) if rest else crc


def append_zeros(crc: int, length: int) -> int:
    """Return what becomes of a checksum's share when `length` bytes follow those that it was taken of.

    For any two runs of bytes, ``crc(a + b) == append_zeros(crc(a), len(b)) ^ crc(b)``.
    """
    power = 0
    while length and crc:
        if length & 1:
            first, second, third, fourth = _tables(power)
            crc = first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24]
        length >>= 1
        power += 1
    return crc


@cache
def _tables(power: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return what ``2 ** power`` zero bytes make of each value of each byte of a checksum."""
    columns = _columns(power)
    tables = []
    for byte in range(4):
        table = np.zeros(256, np.uint32)
        for bit in range(8):
            table[1 << bit : 2 << bit] = table[: 1 << bit] ^ columns[8 * byte + bit]
        tables.append(table.tolist())
    return tables[0], tables[1], tables[2], tables[3]


@cache
def _columns(power: int) -> list[int]:
    """Return what becomes of each single bit."""
    if not power:
        columns = [1 << bit for bit in range(32)]
        for _ in range(8):
            columns = [column >> 1 ^ (_POLYNOMIAL if column & 1 else 0) for column in columns]
        return columns
    half = _columns(power - 1)
    return [_apply(half, column) for column in half]


def _apply(columns: list[int], value: int) -> int:
    result = 0
    for column in columns:
        if value & 1:
            result ^= column
        value >>= 1
    return result
