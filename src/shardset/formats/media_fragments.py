"""Fragments of MP4 (ISO/IEC 14496-12, 8.8 and 8.16.3): how long they are, where the movie header does not say."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from .boxes import BOX_HEAD, Box, parse_box
from .media_source import walk_boxes

if TYPE_CHECKING:
    from .media_source import ByteSource, Track

_MAX_BOXES: Final = 1 << 14
_LONGEST_INDEX: Final = 1 << 20
_unpack_u32: Final = Struct(">I").unpack_from
_unpack_u64: Final = Struct(">Q").unpack_from
_unpack_pair: Final = Struct(">II").unpack_from

_DURATION_EACH, _OTHERS_EACH = 0x100, 0xE00
"""Which fields each frame of a run has; there are three others."""


@dataclass(slots=True)
class _Fragments:
    """What is known of the fragments of a track.

    Attributes:
        track: The track.
        each: How long a frame lasts, unless a fragment says otherwise.
        begin: Where the first begins.
        end: Where the last one so far ends.
    """

    track: Track
    each: int
    begin: int | None = None
    end: int = 0


def measure_fragments(source: ByteSource, start: int, track: Track, each: int) -> float | None:
    """Return seconds from the first to the last fragment of a track, and count the frames of those that are looked at.

    An index ahead of fragments (``sidx``) or at the end of the file (``mfra``) spares most of them.
    """
    so_far, position = _Fragments(track, each, 0 if track.ticks else None, track.ticks), start
    try:
        is_first = True
        for _ in range(_MAX_BOXES):
            if position >= source.size:
                break
            box = parse_box(source.take(position, BOX_HEAD), 0, position, source.size)
            if box is None:
                return None
            position = box.end
            if box.name == b"moof":
                _measure_fragment(source, box, so_far)
                if is_first:
                    position = max(position, _find_last(source, so_far))
                is_first = False
            elif box.name == b"sidx":
                indexed = _sum_index(source, box, so_far)
                if indexed is not None:
                    if is_first:  # for the length of a frame, which an index does not tell
                        _measure_fragment(source, Box(b"moof", indexed[0] + 8, indexed[1]), so_far)
                    is_first, position = False, max(position, indexed[1])
        else:
            return None
    except (struct.error, IndexError):
        return None
    ticks = so_far.end - (so_far.begin or 0)
    return ticks / track.timescale if ticks > 0 and track.timescale else None


def _measure_fragment(source: ByteSource, moof: Box, so_far: _Fragments) -> None:
    for traf in walk_boxes(source, moof.content, moof.end):
        if traf.name == b"traf":
            _measure_run(source, traf, so_far)
        elif traf.name == b"mdat":  # behind a fragment whose end was not known
            break


def _measure_run(source: ByteSource, traf: Box, so_far: _Fragments) -> None:
    at, each = so_far.end, so_far.each
    for box in walk_boxes(source, traf.content, traf.end):
        content = source.take(box.content, min(40, box.end - box.content))
        flags = int.from_bytes(content[1:4], "big")
        if box.name == b"tfhd":
            if _unpack_u32(content, 4)[0] != so_far.track.number:
                return
            if flags & 0x08:
                (each,) = _unpack_u32(content, 8 + (8 if flags & 0x01 else 0) + (4 if flags & 0x02 else 0))
        elif box.name == b"tfdt":
            (at,) = (_unpack_u64 if content[0] else _unpack_u32)(content, 4)
        elif box.name == b"trun":
            (frames,) = _unpack_u32(content, 4)
            ticks = frames * each if not flags & _DURATION_EACH else _sum_durations(source, box, flags, frames)
            so_far.track.frames += frames
            so_far.track.ticks += ticks
            so_far.begin = at if so_far.begin is None else so_far.begin
            at += ticks
    so_far.end = max(so_far.end, at)


def _sum_durations(source: ByteSource, box: Box, flags: int, frames: int) -> int:
    fields = 1 + (flags & _OTHERS_EACH).bit_count()
    start = box.content + 8 + 4 * (flags & 0x05).bit_count()
    length = 4 * fields * frames
    if length > box.end - start:
        raise IndexError
    table = np.frombuffer(source.take(start, length), ">u4") if length else np.zeros(0)
    if 4 * len(table) < length:
        raise IndexError
    return int(table[::fields].sum(dtype=np.uint64))


def _sum_index(source: ByteSource, box: Box, so_far: _Fragments) -> tuple[int, int] | None:
    """Take over the end that ``sidx`` tells, and return where the fragments that it lists begin and end in the file."""
    content = source.take(box.content, min(box.end - box.content, _LONGEST_INDEX))
    number, timescale = _unpack_pair(content, 4)
    (begin, gap), at = (struct.unpack_from(">QQ", content, 12), 28) if content[0] else (_unpack_pair(content, 12), 20)
    (count,) = struct.unpack_from(">2xH", content, at)
    if number != so_far.track.number or not timescale or len(content) < at + 4 + 12 * count or not count:
        return None
    table = np.frombuffer(content, ">u4", 3 * count, at + 4).reshape(-1, 3).astype(np.int64)
    if (table[:, 0] >> 31).any():  # indexes of indexes, which are met on the way
        return None
    # Some writers count presentation times here, and then a part may seem to take less than no time.
    end = begin + int(table[:, 1].astype(np.int32).sum(dtype=np.int64))
    if so_far.begin is None:
        so_far.begin = begin * so_far.track.timescale // timescale
    so_far.end = max(so_far.end, end * so_far.track.timescale // timescale)
    start = box.end + gap
    return start, start + int(table[:, 0].sum())


def _find_last(source: ByteSource, so_far: _Fragments) -> int:
    """Return where the last fragment that ``mfra`` lists for a track begins, 0 if none does."""
    try:
        tail = source.take(source.size - 16, 16)
        if bytes(tail[4:8]) != b"mfro":
            return 0
        (length,) = _unpack_u32(tail, 12)
        for box in walk_boxes(source, source.size - length + 8, source.size):
            content = source.take(box.content, 16)
            if box.name == b"tfra" and _unpack_u32(content, 4)[0] == so_far.track.number:
                sizes, count = _unpack_pair(content, 8)
                wide = 16 if content[0] else 8
                entry = wide + sum((sizes >> shift & 3) + 1 for shift in (0, 2, 4))
                if not 0 < count <= (box.end - box.content - 16) // entry:
                    return 0
                last = source.take(box.content + 16 + (count - 1) * entry, wide)
                time, place = (int(number) for number in struct.unpack(">QQ" if content[0] else ">II", last))
                if bytes(source.take(place, 8)[4:]) != b"moof":
                    return 0
                so_far.end = max(so_far.end, time)  # for fragments that do not say where they begin
                return place
    except (struct.error, IndexError):
        pass
    return 0
