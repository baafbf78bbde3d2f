"""The fast way through ordinary tar headers: a thousand at a time with numpy.

Two ways lead to the headers. Where members are small, every block of a stretch is tested for the magic at once, and the
sizes of the blocks found must then chain up: each header stands where the one before it ends, so a header inside a
payload (a tar in a tar) is passed over. Where members are large, the scan hops from header to header and touches
nothing else. Either way the headers are then parsed together, and a header that is not perfectly ordinary is left to
the walker of `shardset.formats.tar`. Ordinary is: a file with POSIX or GNU magic, a right checksum in its usual form,
an octal size, a name without prefix; or a PAX header that holds a time stamp alone.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .faults import Fault
from .naming import Names
from .tar_header import BLOCK, name_oddities, padded

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    ReadRange = Callable[[int, int], Buffer]
    Window = Callable[[int], Buffer | None]
    Int64s = NDArray[np.int64]
    Bools = NDArray[np.bool_]
    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint64]

_CHUNK: Final = 2048
"""Headers parsed together: a megabyte, which stays in the processor's cache."""
_HOP_STRIDE: Final = 24 << 10
"""Mean bytes from header to header above which hopping beats testing every block (measured: 20 to 35 KB)."""
_FEW: Final = 64
"""Headers parsed together at first, and where odd headers keep breaking the chain."""
_FIRST_STEPS: Final = 8
_REMEMBERED_STEPS: Final = 128
_MOST_STEPS: Final = 256
"""Members left to the walker at a stretch where odd headers keep breaking the chain."""
_FIRST_WINDOW: Final = 64 << 10
_MAX_WINDOW: Final = 4 << 20

_USTA: Final = int.from_bytes(b"usta", "little")
_POSIX: Final = int.from_bytes(b"ustar\x0000", "little")
_GNU: Final = int.from_bytes(b"ustar  \0", "little")
_MTIME: Final = int.from_bytes(b" mtime=\0", "little")
_SEVEN_BYTES: Final = np.uint64((1 << 56) - 1)
_EVEN_BYTES: Final = np.uint64(0x00FF00FF00FF00FF)
_LOW_BITS: Final = np.uint64(0x0101010101010101)
_HIGH_BITS: Final = np.uint64(0x8080808080808080)
_NOT_SPACE: Final = np.uint64(0xDF)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some members as columns, in archive order; the columns are those of `shardset.formats.tar.TarTable`."""

    names: Names
    kind: Bytes
    first_offset: Int64s
    header_offset: Int64s
    offset: Int64s
    size: Int64s
    faults: tuple[Fault, ...] = ()

    @classmethod
    def empty(cls) -> Chunk:
        """Return a chunk of no members."""
        none = np.zeros(0, np.int64)
        return cls(Names.of([]), np.zeros(0, np.uint8), none, none, none, none)

    def columns(self) -> tuple[Bytes, Int64s, Int64s, Int64s, Int64s]:
        """Return the columns of fixed width."""
        return self.kind, self.first_offset, self.header_offset, self.offset, self.size


@dataclass(frozen=True, slots=True, eq=False)
class _Parsed:
    """A chunk's headers, a row each: their offsets, which are ordinary files or PAX headers, and what they say."""

    headers: Bytes
    places: Int64s
    is_file: Bools
    is_pax: Bools
    size: Int64s
    name_lengths: Int64s


@dataclass(slots=True)
class Pace:
    """How a tar's members were found so far, for whoever scans it in parts.

    Attributes:
        stride: Mean bytes from header to header.
        at_once: Headers that were parsed together.
    """

    stride: float = math.inf
    at_once: int = _FEW


class HeaderScanner:
    """Goes through a shard in chunks of ordinary headers, and adapts to the size of its members.

    With `is_mapped`, `read` gives views, and the whole shard is one window. Otherwise `window` says where there is one
    and gives it; without it windows are read: large ones where members are small, and where members are large the
    scanner stands back for the walker, which reads headers alone.
    """

    def __init__(
        self, read: ReadRange, size: int, *, is_mapped: bool, window: Window | None = None, pace: Pace | None = None
    ) -> None:
        self._read = read
        self._offered = window
        self._size = size
        self._is_mapped = is_mapped
        self._refused = -1
        pace = pace or Pace()
        self._stride = pace.stride
        self._limit = pace.at_once
        self._steps = 0 if math.isinf(self._stride) else _REMEMBERED_STEPS // 2
        self._start = -self._steps * self._stride if self._steps else 0.0
        self._pause = 0
        self._waiting = 0
        self._headers: Bytes = np.empty((0, BLOCK), np.uint8)
        self._base = 0
        self._view = memoryview(read(0, size // BLOCK * BLOCK) if is_mapped and size >= BLOCK else b"")
        self._blocks: Bytes = np.frombuffer(self._view, np.uint8).reshape(-1, BLOCK)

    def read(self, offset: int, length: int) -> Buffer:
        """Give bytes of the shard: from the window at hand, and where members are small from the next one."""
        if self._reads_windows() and offset % BLOCK == 0 and offset + max(length, BLOCK) <= self._size:
            self._window(offset)
        start = offset - self._base
        if start >= 0 and start + length <= len(self._view):
            return self._view[start : start + length]
        return self._read(offset, length)

    def pace(self) -> Pace:
        """Return how members were found, to begin the next part with."""
        return Pace(self._stride, self._limit)

    def wants(self, position: int) -> bool:
        """Tell whether the header at `position` should be tried here, and not by the walker."""
        if position == self._refused or position % BLOCK or position + BLOCK > self._size or self._waiting:
            return False
        return self._is_mapped or self._reads_windows() or self._is_offered(position)

    def _reads_windows(self) -> bool:
        if self._is_mapped or self._offered is not None:
            return False
        return self._steps >= _FIRST_STEPS and self._stride <= _HOP_STRIDE

    def _is_offered(self, position: int) -> bool:
        """Tell whether a window holds the header at `position`, after asking for one if need be."""
        if self._offered is None:
            return False
        if not self._holds(position):
            window = self._offered(position)
            if window is None:
                return False
            self._set_window(position, window)
        return self._holds(position)

    def note_step(self, position: int) -> None:
        """Take note that the walker went on to `position`."""
        self._note(position, 1)
        self._waiting = max(0, self._waiting - 1)

    def _note(self, position: int, taken: int) -> None:
        """Learn how large members are: a mean in which what was long ago counts for less and less."""
        self._steps += taken
        self._stride = (position - self._start) / self._steps
        if self._steps >= _REMEMBERED_STEPS:
            self._steps = _REMEMBERED_STEPS // 2
            self._start = position - self._steps * self._stride

    def scan(self, position: int, chunks: list[Chunk], step: Callable[[int], int]) -> int:
        """Take ordinary headers from `position` on into `chunks`; give single odd ones between them to `step`.

        Returns:
            Where to go on; `position` itself if its header is not ordinary; -1 if `step` met the end.
        """
        base, blocks = self._window(position)
        first = (position - base) // BLOCK
        rows = self._hop(position) if self._is_mapped and self._stride > _HOP_STRIDE else self._search(blocks, first)
        if not len(rows):
            self._refused = position
            return position
        rows, headers, sizes = self._gather(blocks, rows)
        following = self._take(self._parse(rows, headers, sizes, blocks, base), chunks, step)
        if following == position:
            self._refused = position
        elif following > 0:
            taken = int(np.searchsorted(rows, (following - base) // BLOCK))
            self._note(following, taken)
            is_at_end = following >= base + len(blocks) * BLOCK
            self._limit = min(_CHUNK, max(self._limit if is_at_end else _FEW, 4 * taken))
            # A chunk costs about as much as a dozen steps, so short chains are taken step by step, for ever longer.
            self._pause = 0 if is_at_end or taken >= _FEW // 4 else min(2 * self._pause + _FIRST_STEPS, _MOST_STEPS)
            self._waiting = self._pause
        return following

    def _window(self, position: int) -> tuple[int, Bytes]:
        if not self._holds(position):
            wanted = int(max(_FIRST_WINDOW, min(_MAX_WINDOW, self._stride * _CHUNK)))
            self._set_window(position, self._read(position, min(wanted, self._size - position) // BLOCK * BLOCK))
        return self._base, self._blocks

    def _holds(self, position: int) -> bool:
        return self._base <= position <= self._base + len(self._view) - BLOCK

    def _set_window(self, position: int, window: Buffer) -> None:
        self._base = position
        self._view = memoryview(window)
        self._blocks = np.frombuffer(self._view, np.uint8).reshape(-1, BLOCK)

    def _hop(self, position: int) -> Int64s:
        """Go from header to header by their sizes alone; nothing is checked yet but the magic."""
        view, end = self._view, len(self._view)
        fields = struct.Struct("12s121x5s").unpack_from  # the size, and the magic behind it
        known: dict[bytes, int] = {}
        found: list[int] = []
        while len(found) < self._limit and position + BLOCK <= end:
            field, magic = fields(view, position + 124)
            if magic != b"ustar":
                break
            size = known.get(field)
            if size is None:
                digits = field[:11]
                if not digits.isdigit() or b"8" in digits or b"9" in digits:
                    break
                size = known[field] = padded(int(digits, 8))
            found.append(position)
            position += BLOCK + size
        return np.array(found, np.int64) // BLOCK

    def _search(self, blocks: Bytes, first: int) -> Int64s:
        """Find what may be headers from block `first` on, by the magic of every block in a stretch."""
        if int.from_bytes(blocks[first, 257:261], "little") != _USTA:
            return np.zeros(0, np.int64)
        stretch = int(min(max(self._limit, self._stride * self._limit / BLOCK), 1 << 16))
        last = min(len(blocks), first + stretch)
        magic: NDArray[np.uint32] = np.ndarray(
            (last - first,), "<u4", blocks, offset=first * BLOCK + 257, strides=(BLOCK,)
        )
        return np.flatnonzero(magic == _USTA)[: self._limit] + first

    def _gather(self, blocks: Bytes, rows: Int64s) -> tuple[Int64s, Bytes, tuple[Int64s, Bools]]:
        """Take the headers together that chain up, from the first of some blocks on.

        Returns:
            Their blocks, the headers, and what `_sizes` says of them. The headers lie in memory that the next call uses
            again, because fresh memory costs more than copying them.
        """
        if len(self._headers) < len(rows):
            self._headers = np.empty((len(rows), BLOCK), np.uint8)
        headers = blocks.take(rows, axis=0, out=self._headers[: len(rows)], mode="clip")  # "raise" copies twice
        size, is_octal = _sizes(headers)
        following = (size + (BLOCK - 1)) // BLOCK
        following[~is_octal] = 0
        following += rows
        following += 1
        if np.array_equal(following[:-1], rows[1:]):
            return rows, headers, (size, is_octal)
        places, ends = rows.tolist(), following.tolist()
        chain = [0]
        while True:
            at = bisect_left(places, ends[chain[-1]], chain[-1] + 1)
            if at == len(places) or places[at] != ends[chain[-1]]:
                return rows[chain], headers[chain], (size[chain], is_octal[chain])
            chain.append(at)

    def _take(self, parsed: _Parsed, chunks: list[Chunk], step: Callable[[int], int]) -> int:
        is_file, is_pax = parsed.is_file, parsed.is_pax
        places = parsed.places
        count = len(places)
        while count and is_pax[count - 1]:  # the member of a PAX header at the end is not in this chunk
            count -= 1
        odd = ~(is_file | is_pax)
        odd[1:] |= is_pax[1:] & is_pax[:-1]
        kept = np.zeros(len(places), np.bool_)
        done = 0
        following = int(places[count - 1] + BLOCK + padded(int(parsed.size[count - 1]))) if count else int(places[0])
        try:
            for row in np.flatnonzero(odd[:count]).tolist():
                if row < done:
                    continue
                start = row - 1 if row > done and is_pax[row - 1] else row
                kept[done:start] = is_file[done:start]
                done = start
                following = step(int(places[start]))
                done = int(np.searchsorted(places[:count], following)) if following >= 0 else count
                is_pax[start:done] = False  # taken by the walker, and perhaps only bytes of a payload
                if done == count or places[done] != following:
                    return following
            kept[done:count] = is_file[done:count]
            if count:
                following = int(places[count - 1] + BLOCK + padded(int(parsed.size[count - 1])))
            return following
        finally:
            if kept.any():
                chunks.append(_emit(parsed, np.flatnonzero(kept)))

    def _parse(self, rows: Int64s, headers: Bytes, sizes: tuple[Int64s, Bools], blocks: Bytes, base: int) -> _Parsed:
        size, is_octal = sizes
        used = np.flatnonzero(np.bitwise_or.reduce(headers.view("<u8"), axis=0))
        is_right = _checksums_match(headers, used)
        is_right &= is_octal
        magic = _words(headers, 257)
        is_right &= (magic == _GNU) | ((magic == _POSIX) & (headers[:, 345] == 0))
        places = base + rows * BLOCK
        is_right &= places + BLOCK + ((size + (BLOCK - 1)) & -BLOCK) <= self._size
        typeflag = headers[:, 156]
        is_pax = is_right & (typeflag == ord("x"))
        if is_pax.any():
            is_pax[is_pax] = _holds_mtime_alone(rows[is_pax] + 1, size[is_pax], blocks)
        name_lengths = _name_lengths(headers, used)
        last = headers[np.arange(len(rows)), np.maximum(name_lengths - 1, 0)]
        is_file = is_right & ((typeflag == ord("0")) | (typeflag == 0) | (typeflag == ord("7")))
        is_file &= (name_lengths > 0) & (last != ord("/"))
        return _Parsed(headers, places, is_file, is_pax, size, name_lengths)


def _words(fields: Bytes, at: int) -> Words:
    """Return the eight bytes at column `at` of every row as one little-endian integer."""
    return np.ndarray((len(fields),), "<u8", fields, offset=at, strides=fields.strides[:1]).copy()


def _octal_words(words: Words, digits: int) -> tuple[Words, Bools]:
    """Parse words of `digits` (at most 8) octal digits, first digit in the lowest byte; tell which rows are that."""
    value = words << np.uint64(64 - 8 * digits)  # zeros in front, and away with what follows
    form = value & np.uint64(0xF8F8F8F8F8F8F8F8)
    is_octal = form == np.uint64((0x3030303030303030 << (64 - 8 * digits)) & 0xFFFFFFFFFFFFFFFF)
    # Each digit but the last of a pair is worth eight of the next one, each pair sixty-four of the next, and so on.
    value &= np.uint64(0x0707070707070707)
    value *= np.uint64(0x0801)
    value >>= np.uint64(8)
    value &= np.uint64(0x00FF00FF00FF00FF)
    value *= np.uint64(0x00400001)
    value >>= np.uint64(16)
    value &= np.uint64(0x0000FFFF0000FFFF)
    value *= np.uint64(0x100000000001)
    value >>= np.uint64(32)
    return value, is_octal


def _sizes(headers: Bytes) -> tuple[Int64s, Bools]:
    """Parse size fields of eleven octal digits and a NUL or space; tell which rows have that form."""
    sizes, is_octal = _octal_words(_words(headers, 127), 8)
    is_octal &= (headers[:, 135] & np.uint8(0xDF)) == 0
    first = _words(headers, 124) & np.uint64(0xFFFFFF)
    is_small = first == np.uint64(0x303030)
    if not is_small.all():
        high, is_high_octal = _octal_words(first, 3)
        is_octal &= is_high_octal
        high <<= np.uint64(24)
        sizes |= high
    return sizes.view(np.int64), is_octal


def _checksums_match(headers: Bytes, used: Int64s) -> Bools:
    """Tell for each header whether its bytes add up to its stored checksum (six or seven octal digits).

    `used` are the eight-byte words of a header that are not zero in all of them.
    """
    # Bytes are added in four 16-bit lanes: 64 words of 510 fit.
    lanes = _pairs(headers.view("<u8").T[used]).sum(axis=0, dtype=np.uint64)
    field = _words(headers, 148)
    lanes -= _pairs(field.copy())
    lanes = (lanes & np.uint64(0x0000FFFF0000FFFF)) + ((lanes >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    total = (lanes & np.uint64(0xFFFFFFFF)) + (lanes >> np.uint64(32)) + np.uint64(8 * 0x20)
    six, is_six = _octal_words(field, 6)
    is_six &= (field & np.uint64(0xDFDF000000000000)) == 0
    if is_six.all():
        is_six &= six == total
        return is_six
    seven, is_seven = _octal_words(field, 7)
    is_seven &= ((field >> np.uint64(56)) & _NOT_SPACE) == 0
    matches: Bools = (is_six & (six == total)) | (is_seven & (seven == total))
    return matches


def _pairs(words: Words) -> Words:
    """Add the bytes of each word in pairs, into four lanes of 16 bits; in place."""
    odd = words >> np.uint64(8)
    odd &= _EVEN_BYTES
    words &= _EVEN_BYTES
    words += odd
    return words


def _name_lengths(headers: Bytes, used: Int64s) -> Int64s:
    """Return the length of each name field up to its first NUL, at most 100; `used` as for the checksums."""
    # Names end where their words become zero in all headers, or in word 12, which the mode field shares.
    width = min(int(np.searchsorted(used, 12)), 12)
    width = min(int(used[width - 1]) + 1 if width else 0, 12)
    words = headers.view("<u8")[:, : width + 1].copy()
    zeros = words - _LOW_BITS
    np.bitwise_not(words, out=words)
    zeros &= words
    zeros &= _HIGH_BITS
    # The lowest mark stands at bit 8k + 7 where byte k is the first zero; without a mark all 64 bits count.
    np.bitwise_not(zeros, out=words)
    words += np.uint64(1)  # now minus the zeros
    zeros &= words
    zeros -= np.uint64(1)
    counts = np.bitwise_count(zeros)
    counts >>= 3
    lengths = counts[:, 0].astype(np.int64)
    for at in range(1, width + 1):
        longer = np.flatnonzero(lengths == 8 * at)
        if not len(longer):
            break
        lengths[longer] += counts[longer, at]
    return np.minimum(lengths, 100, out=lengths)


def _holds_mtime_alone(rows: Int64s, size: Int64s, blocks: Bytes) -> Bools:
    """Tell for PAX bodies at block `rows` whether they are one record that sets ``mtime``, which places no member."""
    is_right = (rows < len(blocks)) & (size <= BLOCK) & (size > 10)
    rows = np.where(is_right, rows, 0)
    numbers: NDArray[np.uint16] = np.ndarray((len(blocks),), "<u2", blocks, strides=(BLOCK,))[rows]
    keys: Words = np.ndarray((len(blocks),), "<u8", blocks, offset=2, strides=(BLOCK,))[rows]
    tens, ones = (numbers & 0xFF).astype(np.int64) - ord("0"), (numbers >> 8).astype(np.int64) - ord("0")
    is_right &= (tens >= 0) & (tens <= 9) & (ones >= 0) & (ones <= 9)
    is_right &= tens * 10 + ones == size
    keys &= _SEVEN_BYTES
    is_right &= keys == _MTIME
    is_right &= blocks[rows, np.clip(size, 1, BLOCK) - 1] == ord("\n")
    return is_right


def _emit(parsed: _Parsed, rows: Int64s) -> Chunk:
    is_all = len(rows) == len(parsed.places)
    lengths = parsed.name_lengths if is_all else parsed.name_lengths[rows]
    width = int(lengths.max())
    fields = parsed.headers[:, :width] if is_all else parsed.headers[rows, :width]
    data = fields.tobytes()
    if width != int(lengths.min()):
        total = int(lengths.sum())
        data = data.translate(None, b"\0")
        if len(data) != total:  # there are bytes behind the first NUL of a name
            data = fields[np.arange(width) < lengths[:, None]].tobytes()
    names = Names.from_lengths(data, lengths)
    places = parsed.places
    header_offset = places[rows]
    first_offset = header_offset
    if parsed.is_pax.any():
        has_pax = (rows > 0) & parsed.is_pax[rows - 1]
        first_offset = np.where(has_pax, places[rows - 1], header_offset)
    faults = _name_faults(data, names, header_offset)
    kind = np.zeros(len(rows), np.uint8)
    return Chunk(names, kind, first_offset, header_offset, header_offset + BLOCK, parsed.size[rows], faults)


def _name_faults(raw: bytes, names: Names, header_offset: Int64s) -> tuple[Fault, ...]:
    """Look closer at names that might be odd: with a high byte, a backslash, two dots, a drive, a slash in front."""
    is_rooted = bool((names.data[names.offsets[:-1]] == ord("/")).any())
    if raw.isascii() and not is_rooted and not any(mark in raw for mark in (b"\\", b"..", b":")):
        return ()
    return tuple(
        Fault(code, int(header_offset[row]), names.text(row))
        for row, name in enumerate(names)
        for code in name_oddities(name)
    )
