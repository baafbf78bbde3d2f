"""Keys, draws and permutations that depend on nothing but the numbers they are made from.

What these functions return is frozen: saved states refer to it, and golden values in the tests hold it.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB

_SORTED: Final = 1 << 12
"""Permutations of at most this many numbers are made by sorting: so few a network mixes poorly."""
_ROUNDS: Final = 6
_DIGITS_TRIED: Final = 64
_AT_ONCE: Final = 1 << 14
"""Numbers that are worked on together, so that what is worked out on the way stays in the nearest cache."""


def mix_key(*numbers: int) -> int:
    """Return 64 well mixed bits that depend on all the numbers, and on their order.

    Each is taken modulo 2^64 and goes through the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    key = 0
    for number in numbers:
        key = (key + _STEP + operator.index(number)) & MASK
        key = ((key ^ (key >> 30)) * _FIRST) & MASK
        key = ((key ^ (key >> 27)) * _SECOND) & MASK
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


def draws_at(key: int, numbers: Int64s) -> NDArray[np.uint64]:
    """Return the draws that have some numbers; the numbers are written over."""
    state = numbers.view(np.uint64)
    state += np.uint64(1)
    state *= np.uint64(_STEP)
    state += np.uint64(key)
    shifted = state >> np.uint64(30)
    state ^= shifted
    state *= np.uint64(_FIRST)
    state ^= np.right_shift(state, np.uint64(27), out=shifted)
    state *= np.uint64(_SECOND)
    state ^= np.right_shift(state, np.uint64(31), out=shifted)
    return state


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """Return the numbers ``[0, count)`` in an order that the key decides: int64, of shape ``(count,)``.

    They are sorted by their draw, and where two draws are equal the lower number comes first.
    """
    return np.argsort(draws(key, 0, count), kind="stable")


def permuted(key: int, count: int, numbers: Int64s) -> Int64s:
    """Return where a permutation of ``[0, count)``, which the key decides, takes numbers: int64, one for each.

    Up to 4,096 numbers are permuted as `permutation` does. More go through a generalised Feistel network (Black and
    Rogaway, CT-RSA 2002): a number is a pair of digits, and six rounds add to the upper and the lower digit in turns,
    modulo their ends (`_digit_ends`), what is drawn for the other one. The few pairs that are not below `count` go
    through it again. (Of four rounds, twice as many neighbours would stay neighbours as chance has it.)
    """
    if count <= _SORTED:
        found: Int64s = _small_permutation(key, count)[numbers]
        return found
    ends = _digit_ends(count)
    keys = draws(key, 0, _ROUNDS)
    result = np.empty(len(numbers), np.int64)
    for start in range(0, len(numbers), _AT_ONCE):
        result[start : start + _AT_ONCE] = _network(keys, ends, numbers[start : start + _AT_ONCE])
    above = np.flatnonzero(result >= count)
    while len(above):
        again = _network(keys, ends, result[above])
        result[above] = again
        above = above[again >= count]
    return result


@lru_cache(16)
def _small_permutation(key: int, count: int) -> Int64s:
    return permutation(key, count)


@lru_cache(64)
def _digit_ends(count: int) -> tuple[int, int]:
    """Return what the lower and the upper digit stay below: about equal, and for few pairs too many."""
    root = isqrt(count - 1) + 1
    low = min(range(root, root + _DIGITS_TRIED), key=lambda low: -count % low)
    return low, -(-count // low)


def _network(keys: NDArray[np.uint64], ends: tuple[int, int], numbers: Int64s) -> Int64s:
    """Send numbers below the product of the ends through the network once."""
    low = np.uint64(ends[0])
    values = numbers.astype(np.uint64)
    target = values // low
    source = values - target * low
    drawn = np.empty_like(source)
    for number, key in enumerate(keys):
        end = np.uint64(ends[1 - number % 2])
        np.add(source, key, out=drawn)
        drawn *= np.uint64(_FIRST)
        np.right_shift(drawn, np.uint64(32), out=values)
        drawn ^= values
        drawn *= np.uint64(_SECOND)
        drawn >>= np.uint64(32)
        drawn *= end
        drawn >>= np.uint64(32)
        target += drawn
        np.subtract(target, end, out=drawn)
        np.minimum(target, drawn, out=target)  # below zero wraps around to what is large
        source, target = target, source
    target *= low
    target += source
    return target.view(np.int64)
