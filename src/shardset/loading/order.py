"""Orders as pure arithmetic: keys, permutations and draws that depend on nothing but the numbers they are made from.

What these functions return is frozen: saved states refer to it, and golden values in the tests hold it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def mix_key(*numbers: int) -> int:
    """Return 64 well mixed bits that depend on all the numbers, and on their order.

    Each is taken modulo 2^64 and goes through the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    key = 0
    for number in numbers:
        key = (key + _STEP + operator.index(number)) & _MASK
        key = ((key ^ (key >> 30)) * _FIRST) & _MASK
        key = ((key ^ (key >> 27)) * _SECOND) & _MASK
        key ^= key >> 31
    return key


def draws(key: int, start: int, count: int) -> NDArray[np.uint64]:
    """Return numbers ``[start, start + count)`` of the random sequence of a key: uint64, all 2^64 values alike.

    Number `i` is the SplitMix64 generator's output `i` for the seed `key`, so any stretch can be had by itself.
    """
    state = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    state *= np.uint64(_STEP)
    state += np.uint64(key)
    state ^= state >> np.uint64(30)
    state *= np.uint64(_FIRST)
    state ^= state >> np.uint64(27)
    state *= np.uint64(_SECOND)
    state ^= state >> np.uint64(31)
    return state


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """Return the numbers ``[0, count)`` in an order that the key decides: int64, of shape ``(count,)``.

    They are sorted by their draw, and where two draws are equal the lower number comes first.
    """
    return np.argsort(draws(key, 0, count), kind="stable")
