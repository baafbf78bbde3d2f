"""Finds where the next frame of a damaged TFRecord file begins, and works out lengths whose bytes are damaged."""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from crc32c import crc32c

from .tfrecord import FOOTER_SIZE, FRAME_SIZE, HEADER_SIZE, masked_crc32c
from .tfrecord_range_crc import RangeCrc
from .tfrecord_search import HeaderSearch

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

Mend = Literal["length_crc", "length", "data_crc"]

WINDOW: Final = 8 << 20
_LENGTH: Final = struct.Struct("<Q")
_CRC: Final = struct.Struct("<I")
_LOOKAHEAD: Final = 1 << 20
_SCARCE: Final = 64 << 20
_CHEAP: Final = 1 << 14
_PIECE: Final = 1 << 18
_SHIFT: Final = 0xA282EAD8


class Window:
    """The bytes of a file: all of them if they are mapped, else those that were read last."""

    def __init__(self, read: Callable[[int, int], Buffer], size: int, *, is_mapped: bool) -> None:
        self.read = read
        self.size = size
        self.is_mapped = is_mapped
        self._start = 0
        self._bytes = memoryview(read(0, size)).cast("B") if is_mapped and size else memoryview(b"")

    def get(self, offset: int, length: int) -> memoryview:
        """Give a range, and if it is not at hand read what follows too."""
        start = offset - self._start
        if start < 0 or start + length > len(self._bytes):
            self._load(offset, length)
            start = 0
        return self._bytes[start : start + length]

    def rest(self, offset: int) -> memoryview:
        """Give what is at hand from a byte on, but not very much."""
        start = offset - self._start
        return self._bytes[start : start + WINDOW] if start >= 0 else memoryview(b"")

    def fill(self, offset: int) -> bool:
        """Read from a byte on, as much as is held at once; False if all that is at hand already."""
        start, length = offset - self._start, min(WINDOW, self.size - offset)
        if start >= 0 and start + length <= len(self._bytes):
            return False
        self._load(offset, length)
        return True

    def _load(self, offset: int, length: int) -> None:
        most = min(max(length, WINDOW), self.size - offset)
        self._bytes, self._start = memoryview(self.read(offset, most)).cast("B"), offset

    def peek(self, offset: int, length: int) -> memoryview:
        """Give a short range that may lie far away."""
        start = offset - self._start
        if start < 0 or start + length > len(self._bytes):
            return memoryview(self.read(offset, length)).cast("B")
        return self._bytes[start : start + length]

    def crc(self, offset: int, length: int, crc: int = 0) -> int:
        """Return the CRC-32C of a range, going on from `crc`, without holding it all."""
        if self.is_mapped or length <= WINDOW:
            return crc32c(self.peek(offset, length), crc)
        for at in range(offset, offset + length, WINDOW):
            crc = crc32c(self.read(at, min(WINDOW, offset + length - at)), crc)
        return crc


class FrameFinder:
    """Answers questions about the frames of one file, in time that grows with the file and not faster.

    Args:
        window: The file.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.size = window.size
        self.search = HeaderSearch(window.get, window.size)
        self._ranges = RangeCrc(window.read, window.size)
        # What may be spent on sums that prove nothing, and on looking beyond what was found.
        self._sums_left = 4 * window.size + _SCARCE
        self._bytes_ahead_left = window.size + _SCARCE
        self._headers_ahead_left = window.size // 256 + (1 << 16)

    def length_at(self, position: int) -> int | None:
        """Return the length that a header with the right checksum states, or None if none stands there."""
        if position + HEADER_SIZE > self.size:
            return None
        header = self.window.peek(position, HEADER_SIZE)
        if masked_crc32c(header[: _LENGTH.size]) != _CRC.unpack_from(header, _LENGTH.size)[0]:
            return None
        length: int = _LENGTH.unpack_from(header)[0]
        return length

    def number_at(self, position: int) -> int:
        """Return the checksum that stands somewhere."""
        number: int = _CRC.unpack(self.window.peek(position, FOOTER_SIZE))[0]
        return number

    def payload_crc(self, offset: int, length: int) -> int:
        """Return the masked checksum of a range. Long ones become scarce, and are then worked out another way."""
        if length > _CHEAP:
            if length > self._sums_left:
                return mask_crc(self._ranges.of(offset, length))
            self._sums_left -= length
        return mask_crc(self.window.crc(offset, length))

    def is_payload(self, offset: int, length: int) -> bool:
        """Tell whether the checksum of a payload is right; it and the checksum lie in the file."""
        before = self._sums_left
        is_right = self.number_at(offset + length) == self.payload_crc(offset, length)
        if is_right:
            self._sums_left = before
        return is_right

    def count_nuls(self, position: int) -> int:
        """Return how many NUL bytes follow each other from a byte on."""
        at = position
        while at < self.size:
            piece = np.frombuffer(self.window.get(at, min(_PIECE, self.size - at)), np.uint8)
            if piece.any():
                return at - position + int(np.argmax(piece != 0))
            at += len(piece)
        return self.size - position

    def count_nuls_before(self, position: int, first: int) -> int:
        """Return how many NUL bytes stand before a byte, down to byte `first` at most."""
        at = position
        while at > first:
            low = max(at - _PIECE, first)
            piece = np.frombuffer(self.window.peek(low, at - low), np.uint8)
            if piece.any():
                return position - at + int(np.argmax(piece[::-1] != 0))
            at = low
        return position - first

    def mend_header(self, position: int) -> tuple[int, Mend, bool] | None:
        """Work out the length of a frame from a header whose checksum is wrong.

        Returns:
            The length, the part of the header that was wrong, and whether the payload proves it; if it does not, the
            error is one bit and a header or the file's end stands where the length leads. None if nothing fits.
        """
        if position + FRAME_SIZE > self.size:
            return None
        header = bytes(self.window.peek(position, HEADER_SIZE))
        length, stored = _LENGTH.unpack_from(header)[0], _CRC.unpack_from(header, _LENGTH.size)[0]
        candidates: list[tuple[int, Mend]] = [(length, "length_crc")]
        bit = _bits_by_difference().get(_unmask(stored) ^ crc32c(header[: _LENGTH.size]))
        if bit is not None:
            candidates.append((length ^ 1 << bit, "length"))
        most = self.size - position - FRAME_SIZE
        candidates = [(length, what) for length, what in candidates if length <= most]
        for length, what in candidates:
            if self.is_payload(position + HEADER_SIZE, length):
                return length, what, True
        for length, what in candidates:
            end = position + length + FRAME_SIZE
            is_one_bit = what == "length" or (stored ^ masked_crc32c(header[: _LENGTH.size])).bit_count() == 1
            if is_one_bit and (end == self.size or self.length_at(end) is not None):
                return length, what, False
        return None

    def resync(self, start: int, boundary: int | None = None) -> tuple[int, bool]:
        """Find the next header from byte `start` on that counts.

        Args:
            start: Where to begin.
            boundary: Where a frame is known to begin whose length is not.

        Returns:
            Where to go on, the file's size if there is none; and whether the frame at `boundary` is proved to end
            there.
        """
        proof = None if boundary is None else _Proof(self, boundary)
        chosen: int | None = None
        for offset, length in self.search.after(start):
            if proof is not None and proof.is_end(offset):
                return offset, True
            chosen = self._choose(offset, length)
            if chosen is not None:
                break
        if proof is None:
            return self.size if chosen is None else chosen, False
        if chosen is None:
            return self.size, proof.is_end(self.size)
        # What was found may stand inside the frame at the boundary, whose end is then a little farther on.
        until = min(chosen + _LOOKAHEAD, self.size)
        if self._headers_ahead_left > 0 and self._bytes_ahead_left > 0:
            self._bytes_ahead_left -= until - chosen
            for offset, _ in self.search.after(chosen + 1, until):
                self._headers_ahead_left -= 1
                if proof.is_end(offset):
                    return offset, True
                if self._headers_ahead_left <= 0:
                    break
        return chosen, False

    def _choose(self, offset: int, length: int) -> int | None:
        """Return where to go on if a header that was found counts, or None if it does not.

        It counts if its payload is right, or a header or the file's end follows. Where its payload is right and nothing
        follows, a frame that begins in it and leads beyond it is preferred, if that one has both.
        """
        end = offset + length + FRAME_SIZE
        has_next = end == self.size or self.length_at(end) is not None
        if has_next:
            return offset
        if not self.is_payload(offset + HEADER_SIZE, length):
            return None
        for inner, inner_length in self.search.after(offset + 1, end):
            beyond = inner + inner_length + FRAME_SIZE
            has_next = beyond > end and (beyond == self.size or self.length_at(beyond) is not None)
            if has_next and self.is_payload(inner + HEADER_SIZE, inner_length):
                return inner
        return offset


class _Proof:
    """Tells of places, in ascending order, whether the frame that begins at a boundary can end there."""

    def __init__(self, parent: FrameFinder, boundary: int) -> None:
        self._parent = parent
        self._first = boundary + FRAME_SIZE
        self._summed = boundary + HEADER_SIZE
        self._crc = 0

    def is_end(self, end: int) -> bool:
        """Tell whether the bytes up to `end` are a payload and its checksum."""
        if end < self._first:
            return False
        window, footer = self._parent.window, end - FOOTER_SIZE
        self._crc = window.crc(self._summed, footer - self._summed, self._crc)
        self._summed = footer
        return mask_crc(self._crc) == self._parent.number_at(footer)


def mask_crc(crc: int) -> int:
    """Return a checksum as TFRecord stores it."""
    return (crc >> 15 | crc << 17) + _SHIFT & 0xFFFFFFFF


def frame_header(length: int) -> bytes:
    """Return the header of a record whose payload has so many bytes."""
    stored = _LENGTH.pack(length)
    return stored + _CRC.pack(masked_crc32c(stored))


def _unmask(stored: int) -> int:
    crc = stored - _SHIFT & 0xFFFFFFFF
    return (crc >> 17 | crc << 15) & 0xFFFFFFFF


@cache
def _bits_by_difference() -> dict[int, int]:
    """Return, for each bit of a length, by what it changes the length's checksum."""
    nothing = crc32c(bytes(8))
    return {crc32c(_LENGTH.pack(1 << bit)) ^ nothing: bit for bit in range(64)}
