"""The geometry of many pictures at once, for shards whose bytes are mapped.

Each payload is a lane. All lanes go from segment to segment together, with numpy, as long as they meet what ordinary
JPEG, PNG and WebP files are made of; `shardset.formats.geometry` reads the others, one by one, and says for these what
is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from .geometry import PARSED_FIRST_BYTES, flatten, parse_geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Int64s = NDArray[np.int64]
    Words = NDArray[np.uint64]
    Numbers = NDArray[np.integer] | int

_AT_ONCE: Final = 2048
"""Lanes that go together: what they hold stays in the processor's cache."""
_SHORTEST: Final = 64
"""Payloads below so many bytes are read one by one; so no field of a header lies behind their end."""
_MAX_HOPS: Final = 48
_FEW: Final = 12
"""So few lanes are faster one by one."""
_TAGS: Final = 16
"""Entries of an EXIF directory that are looked through."""


class Columns(NamedTuple):
    """Pixel sizes as stored, and orientations, by row; zeros where there is no picture."""

    width: NDArray[np.int32]
    height: NDArray[np.int32]
    orientation: NDArray[np.uint8]


def parse_geometries(whole: Buffer, offsets: Int64s, lengths: Int64s) -> Columns:
    """Parse the headers of many pictures, as `parse_geometry` does of one.

    Args:
        whole: What they lie in, as a mapped shard; only their headers are touched.
        offsets: Where each payload begins, in bytes.
        lengths: Bytes of each payload. What lies behind the end of `whole` is taken for cut off, and what lies before
            its beginning, as the offset -1 says, for nothing.

    Returns:
        What `parse_geometry` gives for each, zeros where it gives None.
    """
    view = flatten(whole)
    count = len(offsets)
    columns = Columns(np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.uint8))
    ends = np.minimum(offsets + lengths, len(view))
    for at in range(0, count, _AT_ONCE):
        some = slice(at, at + _AT_ONCE)
        part = Columns(columns.width[some], columns.height[some], columns.orientation[some])
        _Lanes(view, offsets[some], ends[some], part).parse()
    return columns


class _Lanes:
    """Some payloads, and the columns to fill in for them."""

    def __init__(self, view: memoryview, starts: Int64s, ends: Int64s, columns: Columns) -> None:
        self._view, self._starts, self._ends, self._columns = view, starts, ends, columns
        self._bytes = np.frombuffer(view, np.uint8)
        # Eight bytes from any place on, as a number.
        self._words: Words = np.ndarray((max(0, len(view) - 7),), "<u8", view if len(view) >= 8 else b"\0" * 8, 0, (1,))

    def parse(self) -> None:
        sizes = np.where(self._starts >= 0, self._ends - self._starts, 0)
        lanes = np.flatnonzero(sizes > 0)
        lanes = lanes[_IS_PARSED[self._bytes[self._starts[lanes]]]]
        is_short = sizes[lanes] < _SHORTEST
        left, lanes = [lanes[is_short]], lanes[~is_short]
        first = self._words[self._starts[lanes]]
        is_jpeg = first & np.uint64(0xFFFFFF) == np.uint64(0xFFD8FF)
        is_png = first == _PNG
        is_webp = first & np.uint64(0xFFFFFFFF) == _RIFF
        left.append(lanes[~(is_jpeg | is_png | is_webp)])
        for chosen, parse in ((is_jpeg, self._parse_jpeg), (is_png, self._parse_png), (is_webp, self._parse_webp)):
            some = lanes[chosen]
            left.append(parse(some) if len(some) >= _FEW else some)
        for lane in np.concatenate(left).tolist():
            found = parse_geometry(self._view[self._starts[lane] : self._ends[lane]])
            if found is not None:
                self._fill(lane, found.width, found.height, found.orientation)

    def _fill(self, lanes: Int64s | int, width: Numbers, height: Numbers, orientation: Numbers) -> None:
        self._columns.width[lanes] = width
        self._columns.height[lanes] = height
        self._columns.orientation[lanes] = orientation

    def _parse_jpeg(self, lanes: Int64s) -> Int64s:
        """Fill in ordinary JPEG files, and return the lanes of the others."""
        others: list[Int64s] = []
        place = self._starts[lanes] + 2
        exif = np.zeros(len(lanes), np.int64)  # where the first EXIF segment begins, if there was one
        for _ in range(_MAX_HOPS):
            last = self._ends[lanes] - 16
            word = self._words[np.minimum(place, last)]
            step = _MARKERS[(word >> np.uint64(8) & np.uint64(0xFF)).astype(np.uint8)]
            length = (word >> np.uint64(16) & np.uint64(0xFFFF)).astype(np.uint16).byteswap().astype(np.int64)
            is_odd = (place > last) | (word & np.uint64(0xFF) != np.uint64(0xFF)) | (step == _ODD) | (length <= 2)
            is_frame = ~is_odd & (step == _FRAME)
            is_app1 = (step == _APP1) & (word >> np.uint64(32) == _EXIF) & (exif == 0)
            exif[is_app1] = place[is_app1]
            if is_odd.any():
                others.append(lanes[is_odd])
            if is_frame.any():
                others.append(self._fill_frames(lanes[is_frame], place[is_frame], length[is_frame], exif[is_frame]))
            goes_on = ~(is_odd | is_frame)
            lanes, place, exif = lanes[goes_on], (place + 2 + length)[goes_on], exif[goes_on]
            if len(lanes) < _FEW:
                break
        return np.concatenate([*others, lanes])

    def _fill_frames(self, lanes: Int64s, place: Int64s, length: Int64s, exif: Int64s) -> Int64s:
        """Take sizes from frame headers; return the lanes whose header, or whose EXIF, is not ordinary."""
        word = self._words[place + 5]  # height, width, components
        height, width = (_swap(word >> np.uint64(shift)) for shift in (0, 16))
        parts = (word >> np.uint64(32) & np.uint64(0xFF)).astype(np.int64)
        is_good = (height > 0) & (width > 0) & (length == 8 + 3 * parts)
        orientation = np.ones(len(lanes), np.uint8)
        turned = np.flatnonzero(is_good & (exif > 0))
        if len(turned):
            orientation[turned] = self._read_exif(exif[turned], self._ends[lanes[turned]])
            is_good &= orientation > 0
        self._fill(lanes[is_good], width[is_good], height[is_good], orientation[is_good])
        bad: Int64s = lanes[~is_good]
        return bad

    def _read_exif(self, place: Int64s, payload_end: Int64s) -> NDArray[np.uint8]:
        """Return the orientations of EXIF segments, 0 where one is not ordinary."""
        start = place + 10
        end = np.minimum(place + 2 + _swap(self._words[place + 2]), payload_end)
        word = self._words[place + 8]  # two zeros, byte order, 42, four bytes of an offset
        order = word & np.uint64(0xFFFFFFFFFFFF)
        is_big = order == _BIG
        offset = self._words[start] >> np.uint64(32)
        offset = np.where(is_big, offset.astype(np.uint32).byteswap(), offset).astype(np.int64)
        is_good = (is_big | (order == _LITTLE)) & (offset >= 8) & (start + offset + 2 + 12 <= end)
        first = start + np.where(is_good, offset, 0)
        word = self._words[np.minimum(first, payload_end - 8)]
        count = np.where(is_big, _swap(word), (word & np.uint64(0xFFFF)).astype(np.int64))
        places = first[:, np.newaxis] + 2 + 12 * np.arange(_TAGS)
        is_there = (np.arange(_TAGS) < count[:, np.newaxis]) & (places + 12 <= end[:, np.newaxis])
        entries = self._words[np.where(is_there, places, place[:, np.newaxis])]
        tags = np.where(is_big[:, np.newaxis], _ENTRY_BIG, _ENTRY_LITTLE)
        is_it = is_there & (entries & np.uint64(0xFFFF) == tags & np.uint64(0xFFFF))
        at = is_it.argmax(axis=1)
        lane = np.arange(len(place))
        has_it = is_it[lane, at]
        # Where it is missing, it is so for good only if all entries were looked at.
        is_plain = np.where(has_it, entries[lane, at] == tags[:, 0], (count <= _TAGS) & (first + 2 + 12 * count <= end))
        value = self._words[np.where(has_it, places[lane, at], place) + 8] & np.uint64(0xFFFF)
        value = np.where(is_big, _swap(value), value.astype(np.int64))
        value = np.where(has_it & (value >= 1) & (value <= 8), value, 1)
        return np.where(is_good & is_plain, value, 0).astype(np.uint8)

    def _parse_png(self, lanes: Int64s) -> Int64s:
        """Fill in PNG files without EXIF before the pixels, and return the lanes of the others."""
        start = self._starts[lanes]
        sides = [self._words[start + 16] >> np.uint64(shift) for shift in (0, 32)]
        width, height = (side.astype(np.uint32).byteswap().astype(np.int64) for side in sides)
        checksum = (self._words[start + 29] & np.uint64(0xFFFFFFFF)).astype(np.uint32).byteswap()
        is_good = (self._words[start + 8] == _IHDR) & (width > 0) & (height > 0)
        is_good &= (width < 1 << 31) & (height < 1 << 31) & (self._checksums(start + 12) == checksum)
        others = [lanes[~is_good]]
        lanes, place, width, height = lanes[is_good], start[is_good] + 33, width[is_good], height[is_good]
        for _ in range(_MAX_HOPS):
            last = self._ends[lanes] - 8
            word = self._words[np.minimum(place, last)]
            name = word >> np.uint64(32)
            length = (word & np.uint64(0xFFFFFFFF)).astype(np.uint32).byteswap().astype(np.int64)
            is_odd = (place <= last) & (name == _CHUNK_EXIF)
            is_done = (place > last) | (name == _IDAT)
            if is_odd.any():
                others.append(lanes[is_odd])
            self._fill(lanes[is_done], width[is_done], height[is_done], 1)
            goes_on = ~(is_odd | is_done)
            lanes, place = lanes[goes_on], (place + 12 + length)[goes_on]
            width, height = width[goes_on], height[goes_on]
            if len(lanes) < _FEW:
                break
        return np.concatenate([*others, lanes])

    def _checksums(self, place: Int64s) -> NDArray[np.uint32]:
        """Return the CRC-32 of 17 bytes from each place on."""
        checksum = np.full(len(place), 0xFFFFFFFF, np.uint32)
        words = [self._words[place + at] for at in (0, 8, 16)]
        for at in range(17):
            byte = (words[at // 8] >> np.uint64(8 * (at % 8))).astype(np.uint8)
            checksum = _CRC_TABLE[checksum.astype(np.uint8) ^ byte] ^ (checksum >> np.uint32(8))
        return checksum ^ np.uint32(0xFFFFFFFF)

    def _parse_webp(self, lanes: Int64s) -> Int64s:
        """Fill in WebP files without EXIF, and return the lanes of the others, and of what else is in a RIFF."""
        start = self._starts[lanes]
        names, sizes, fields = (self._words[start + at] for at in (8, 16, 24))
        is_webp = names & np.uint64(0xFFFFFFFF) == _WEBP
        name, after = names >> np.uint64(32), sizes >> np.uint64(32)
        length = sizes & np.uint64(0xFFFFFFFF)
        # Lossy: after the tag a start code, then width and height in 14 bits each.
        lossy = is_webp & (name == _VP8) & (after >> np.uint64(24) == np.uint64(0x9D)) & (after & np.uint64(1) == 0)
        lossy &= fields & np.uint64(0xFFFF) == np.uint64(0x2A01)
        across, down = (fields >> np.uint64(shift) & np.uint64(0x3FFF) for shift in (16, 32))
        lossy &= (across > 0) & (down > 0)
        bits = self._words[start + 21]
        lossless = is_webp & (name == _VP8L) & (after & np.uint64(0xFF) == np.uint64(0x2F))
        extended = is_webp & (name == _VP8X) & (length >= 10) & (after & np.uint64(0x08) == 0)
        for kind, width, height in (
            (lossy, across, down),
            (lossless, (bits & np.uint64(0x3FFF)) + 1, (bits >> np.uint64(14) & np.uint64(0x3FFF)) + 1),
            (extended, (fields & np.uint64(0xFFFFFF)) + 1, (fields >> np.uint64(24) & np.uint64(0xFFFFFF)) + 1),
        ):
            self._fill(lanes[kind], width[kind], height[kind], 1)
        others: Int64s = lanes[~(lossy | lossless | extended)]
        return others


def _swap(word: Words) -> Int64s:
    """Return the lowest two bytes as a big-endian number."""
    low: NDArray[np.uint16] = word.astype(np.uint16)
    return low.byteswap().astype(np.int64)


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text, "little"))


def _crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> np.uint32(1) ^ np.uint32(0xEDB88320), table >> np.uint32(1))
    return table


_CRC_TABLE: Final = _crc_table()
_IS_PARSED: Final = np.isin(np.arange(256), list(PARSED_FIRST_BYTES))

# What a marker means: another segment, EXIF or XMP, the frame header, or something for `parse_geometry`.
_SEGMENT, _APP1, _FRAME, _ODD = range(4)
_MARKERS: Final = np.full(256, _SEGMENT, np.uint8)
_MARKERS[0xE1] = _APP1
_MARKERS[[0xC0, 0xC1, 0xC2]] = _FRAME
_MARKERS[[0x00, 0x01, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xDB), 0xDE, 0xFF]] = _ODD

_PNG, _IHDR, _IDAT, _CHUNK_EXIF = map(_word, (b"\x89PNG\r\n\x1a\n", b"\0\0\0\rIHDR", b"IDAT", b"eXIf"))
_RIFF, _WEBP, _VP8, _VP8L, _VP8X = map(_word, (b"RIFF", b"WEBP", b"VP8 ", b"VP8L", b"VP8X"))
_EXIF, _LITTLE, _BIG = map(_word, (b"Exif", b"\0\0II*\0", b"\0\0MM\0*"))
# Tag 274, one SHORT.
_ENTRY_LITTLE, _ENTRY_BIG = map(_word, (b"\x12\1\3\0\1\0\0\0", b"\1\x12\0\3\0\0\0\1"))
