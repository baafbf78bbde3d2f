"""Finds the headers of TFRecord frames anywhere in bytes, without knowing where a frame begins.

Almost every place can be told at a glance not to be one: the upper half of a length is zero wherever the file is
shorter than 4 GiB. Places that this leaves are looked at with numpy, thousands at once. An empty record, for which
every byte of a zero-filled region would be a place, is looked for by its checksum instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from crc32c import crc32c

from .tfrecord import FRAME_SIZE, HEADER_SIZE, header_crcs, masked_crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from typing_extensions import Buffer

_FIRST_PIECE: Final = 1 << 14
_LONGEST_PIECE: Final = 1 << 18
"""The next header is near, or else far: pieces grow, up to what the processor's cache holds."""
_PIECES_KEPT: Final = 32
_EMPTY_LENGTH: Final = bytes(8)
_EMPTY_CRC: Final = masked_crc32c(_EMPTY_LENGTH).to_bytes(4, "little")
_BITS_ADDED: Final = np.uint8(0xA282EAD8 & 255)
_SHORT: Final = 1 << 32
_LONGEST: Final = (1 << 40) - 1
"""A length has up to five bytes: no frame of a TiB is found again by looking for its header."""


class _Looked(NamedTuple):
    """The headers that begin in ``[start, end)``, and the lengths that they state."""

    start: int
    end: int
    offsets: list[int]
    lengths: list[int]


class HeaderSearch:
    """Looks for headers whose checksum is right and whose frame ends in the file. What was looked at last is kept.

    Args:
        read: Gives `length` bytes from byte `offset` on.
        size: Bytes of the file.
    """

    def __init__(self, read: Callable[[int, int], Buffer], size: int) -> None:
        self._read = read
        self._size = size
        self._room = Room()
        self._kept: deque[_Looked] = deque(maxlen=_PIECES_KEPT)

    def after(self, position: int, until: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the offset of each header in ``[position, until)``, and the length that it states."""
        last = self._size - FRAME_SIZE if until is None else min(until - 1, self._size - FRAME_SIZE)
        piece = _FIRST_PIECE
        while position <= last:
            looked = next((one for one in self._kept if one.start <= position < one.end), None)
            if looked is None:
                looked = self._look(position, piece)
            for at in range(bisect_left(looked.offsets, position), len(looked.offsets)):
                if looked.offsets[at] > last:
                    return
                yield looked.offsets[at], looked.lengths[at]
            position = looked.end
            piece = min(2 * piece, _LONGEST_PIECE)

    def _look(self, start: int, length: int) -> _Looked:
        """Look through some bytes, but not through any that were looked through."""
        end = min([start + length, *(one.start for one in self._kept if one.start > start)])
        block = memoryview(self._read(start, min(end - start + HEADER_SIZE - 1, self._size - start)))
        offsets, lengths = find_headers(block, self._size - start - FRAME_SIZE, self._room)
        looked = _Looked(start, end, (offsets + start).tolist(), lengths.tolist())
        self._kept.append(looked)
        return looked


class Room:
    """Memory that is used again and again: taking it anew would cost more than all that is done with it."""

    def __init__(self) -> None:
        self._rows = np.empty((5, 0), np.bool_)

    def rows(self, length: int) -> tuple[NDArray[np.bool_], ...]:
        """Return five arrays of a length, with anything in them."""
        if self._rows.shape[1] < length:
            self._rows = np.empty((5, length), np.bool_)
        return tuple(self._rows[:, :length])


def find_headers(block: memoryview, most: int, room: Room) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offsets of all headers in some bytes that have the right checksum, ascending, and their lengths.

    Args:
        block: The bytes.
        most: Greatest sum of a header's offset and its length.
        room: Memory to work in; of one thread.
    """
    data = np.frombuffer(block, np.uint8)
    places = len(data) - HEADER_SIZE + 1
    if places < 1 or most < 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at = _plausible(data, places, most, room)
    # Views of every number, aligned or not.
    lengths = np.ndarray((places,), "<u8", data.data, 0, (1,))[at]
    sums = np.ndarray((places,), "<u4", data.data, 8, (1,))[at]
    is_near = (lengths <= _LONGEST) & (lengths + at.astype(np.uint64) <= most)
    is_header = is_near & (header_crcs(lengths) == sums)
    return at[is_header], lengths[is_header].astype(np.int64)


def _plausible(data: NDArray[np.uint8], places: int, most: int, room: Room) -> NDArray[np.int64]:
    """Return the places whose eight bytes can be a length, with a checksum that agrees in eight bits."""
    is_short = most < _SHORT
    zero, two, four, eight, mask = room.rows(len(data))
    np.equal(data, 0, out=zero)
    np.logical_and(zero[:-1], zero[1:], out=two[:-1])
    np.logical_and(two[:-3], two[2:-1], out=four[:-3])
    eight, mask = eight[:places], mask[:places]
    np.logical_and(four[:places], four[4 : places + 4], out=eight)
    if is_short:
        np.less_equal(data[3 : places + 3], most >> 24, out=mask)
        np.logical_and(mask, four[4 : places + 4], out=mask)
    else:
        np.logical_and(two[5 : places + 5], zero[7 : places + 7], out=mask)
    np.greater(mask, eight, out=mask)
    if _EMPTY_CRC[0] in (content := data.data.tobytes()):
        np.logical_and(eight, data[8 : places + 8] == _EMPTY_CRC[0], out=eight)
        np.logical_or(mask, eight, out=mask)
    tables = _bit_tables()[: 4 if is_short else 5]
    if np.count_nonzero(mask) > places // 8:
        # Translating all bytes costs less than gathering many.
        found = np.zeros(places, np.uint8)
        for byte, table in enumerate(tables):
            found ^= np.frombuffer(content.translate(table), np.uint8)[byte : places + byte]
        return np.flatnonzero(mask & (found + _BITS_ADDED == data[8 : places + 8]))
    at = np.flatnonzero(mask)
    found = np.zeros(len(at), np.uint8)
    for byte, table in enumerate(tables):
        found ^= np.frombuffer(table, np.uint8).take(data.take(at + byte))
    agrees: NDArray[np.bool_] = found + _BITS_ADDED == data.take(at + 8)
    return at[agrees]


@cache
def _bit_tables() -> list[bytes]:
    """Return, of what each value of each byte of a length adds to its checksum, the bits that stand first in a file.

    The first table holds those of the checksum of eight zero bytes too. All that is missing is the number added last.
    """
    nothing = crc32c(_EMPTY_LENGTH)
    tables = [
        [(crc32c((value << 8 * byte).to_bytes(8, "little")) ^ nothing) >> 15 & 255 for value in range(256)]
        for byte in range(_LONGEST.bit_length() // 8)
    ]
    tables[0] = [bits ^ (nothing >> 15 & 255) for bits in tables[0]]
    return list(map(bytes, tables))
