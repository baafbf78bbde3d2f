"""Comparing many small payloads with their checksums by one checksum of all.

A call for each payload costs more than the checksum of 100 bytes does. CRCs are linear: that of payloads which
stand one behind the other follows from those of each: ``crc(a + b) = crc(a) * x^(8 * len(b)) + crc(b)``, in polynomials
over GF(2) modulo Castagnoli's. One payload that differs always shows; several could only hide each other by a chance of
one in 2^32, which is the chance that a CRC misses one.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    UInt32s = NDArray[np.uint32]

LONGEST: Final = 1 << 18
"""Payloads may have so many bytes together."""
_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's, its bits reversed: the highest bit is the coefficient of x^0."""
_ONE: Final = 1 << 31
_SHIFTS: Final = np.arange(32, dtype=np.int32)[:, None]


def crc_of_all(crcs: UInt32s, lengths: Int64s) -> int:
    """Return the CRC-32C of payloads that stand one behind the other, from the CRC-32C and the length of each.

    Args:
        crcs: Of each payload; plain, not masked.
        lengths: Bytes of each payload, `LONGEST` in all at most.
    """
    behind = lengths[::-1].cumsum()[::-1] - lengths
    powers = _powers()[behind]
    # Row k is the sum of the powers at all those CRCs that have the coefficient of x^k.
    masks = crcs.view(np.int32) << _SHIFTS
    masks >>= 31
    masks &= powers.view(np.int32)
    total = 0
    for row in np.bitwise_xor.reduce(masks, axis=1).view(np.uint32)[::-1].tolist():
        total = _times_x(total) ^ row
    return total


def _times_x(value: int) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)


@cache
def _powers() -> UInt32s:
    """Return x^(8 n) for each number of bytes n up to `LONGEST`."""
    powers = np.empty(LONGEST + 1, np.uint32)
    powers[0] = factor = _ONE
    for _ in range(8):
        factor = _times_x(factor)
    known = 1  # of them; `factor` is x^(8 known)
    while known <= LONGEST:
        count = min(known, LONGEST + 1 - known)
        powers[known : known + count] = _times(powers[:count], factor)
        factor = int(_times(np.array([factor], np.uint32), factor)[0])
        known += count
    return powers


def _times(values: UInt32s, factor: int) -> UInt32s:
    """Multiply polynomials by one."""
    product = np.zeros_like(values)
    for place in range(31, -1, -1):  # from x^0 on
        product ^= (values >> np.uint32(place) & np.uint32(1)) * np.uint32(factor)
        factor = _times_x(factor)
    return product
