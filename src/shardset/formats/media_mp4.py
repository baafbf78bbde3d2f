"""MP4 and MOV (ISO/IEC 14496-12; the QuickTime File Format): the movie header and the first video track in it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from .boxes import Box, iter_boxes
from .media_fragments import measure_fragments
from .media_source import Found, Track, walk_boxes

if TYPE_CHECKING:
    from .media_source import ByteSource, Turn

_MAX_BOXES: Final = 4096
# What a file may begin with. Those of QuickTime before 2001 have no "ftyp".
_FIRST: Final = frozenset((b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp"))
_CONTAINERS: Final = frozenset((b"mdia", b"minf", b"stbl"))
_MAX_TIMES: Final = 1 << 16
"""Runs of equal frames that are looked at: an average of so many is one."""

_unpack_u32: Final = Struct(">I").unpack_from
_unpack_u64: Final = Struct(">Q").unpack_from
_unpack_pair: Final = Struct(">II").unpack_from
_unpack_matrix: Final = Struct(">ii4xii").unpack_from  # a, b, (u), c, d: x' = ax + cy, y' = bx + dy
_unpack_coded: Final = Struct(">HH").unpack_from

# By the signs of a, b, c and d.
_ORIENTATIONS: Final = {
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}
_UNTURNED: Final = (1, 0, 0, 1)


@dataclass(slots=True)
class _Movie:
    """What the movie header says.

    Attributes:
        timescale: Units a second of its durations.
        duration: Seconds.
        turn: Of all tracks.
        track: The first of video, or else the first of sound.
        is_fragmented: Frames stand in fragments behind the header too.
        is_complete: The duration is that of the fragments too.
        each: How long a frame of a fragment lasts, by the number of its track.
    """

    timescale: int = 0
    duration: float | None = None
    turn: Turn = _UNTURNED
    track: Track | None = None
    is_fragmented: bool = False
    is_complete: bool = False
    each: dict[int, int] = field(default_factory=dict)


def parse_mp4(source: ByteSource) -> Found | None:
    """Return what the movie header says.

    Raises:
        struct.error: The bytes end before what is sought.
        IndexError: The same, or too much would have to be read.
    """
    movie = None
    for place, box in enumerate(walk_boxes(source, 0, source.size)):
        if place == 0 and box.name not in _FIRST:
            return None
        if box.name == b"moov":
            movie = box
            break
    if movie is None:
        return None
    header = _parse_movie(source, movie)
    track = header.track
    if track is None:
        return None
    if header.is_fragmented and not header.is_complete:
        header.duration = measure_fragments(source, movie.end, track, header.each.get(track.number, 0))
    return Found(
        track.width,
        track.height,
        _ORIENTATIONS.get(_compose(track.turn, header.turn), 1),
        track.pixel_aspect,
        header.duration,
        track.frames * track.timescale / track.ticks if track.is_video and track.ticks else None,
    )


def _parse_movie(source: ByteSource, movie: Box) -> _Movie:
    header = _Movie()
    for box in walk_boxes(source, movie.content, movie.end):
        if box.name == b"mvhd":
            header.timescale, ticks, rest = _parse_times(source, box)
            header.duration = ticks / header.timescale if header.timescale and ticks else None
            header.turn = _parse_turn(rest, 16)
        elif box.name == b"trak" and not (header.track and header.track.is_video):
            track = _parse_track(source, box)
            if track and (header.track is None or track.is_video):
                header.track = track
        elif box.name == b"mvex":
            header.is_fragmented = True
            _parse_extension(source, box, header)
    return header


def _parse_extension(source: ByteSource, box: Box, header: _Movie) -> None:
    """Read what ``mvex`` says of the fragments: how long they are together, and each frame unless it says otherwise."""
    for part in walk_boxes(source, box.content, box.end):
        content = source.take(part.content, 24) if part.name in {b"mehd", b"trex"} else b""
        if part.name == b"mehd":
            (ticks,) = (_unpack_u64 if content[0] else _unpack_u32)(content, 4)
            if header.timescale and ticks:
                header.duration, header.is_complete = ticks / header.timescale, True
        elif part.name == b"trex":
            (number,), (each,) = _unpack_u32(content, 4), _unpack_u32(content, 12)
            header.each[number] = each


def _parse_times(source: ByteSource, box: Box) -> tuple[int, int, memoryview]:
    """Return timescale and duration of ``mvhd`` or ``mdhd``, 0 for one that is not told, and what follows them."""
    content = source.take(box.content, 100)
    if content[0]:
        (timescale,), (ticks,) = _unpack_u32(content, 20), _unpack_u64(content, 24)
        return timescale, ticks if ticks < (1 << 64) - 1 else 0, content[32:]
    (timescale,), (ticks,) = _unpack_u32(content, 12), _unpack_u32(content, 16)
    return timescale, ticks if ticks < (1 << 32) - 1 else 0, content[20:]


def _parse_turn(content: memoryview, at: int) -> Turn:
    a, b, c, d = ((number > 0) - (number < 0) for number in _unpack_matrix(content, at))
    return a, b, c, d


def _compose(first: Turn, then: Turn) -> Turn:
    a, b, c, d = first
    p, q, r, s = then
    return a * p + b * r, a * q + b * s, c * p + d * r, c * q + d * s


def _parse_track(source: ByteSource, box: Box) -> Track | None:
    parts = _collect(source, box)
    if not {b"tkhd", b"mdhd", b"hdlr"} <= parts.keys():
        return None
    handler = bytes(source.take(parts[b"hdlr"].content + 8, 4))
    if handler not in {b"vide", b"soun"}:
        return None
    head = source.take(parts[b"tkhd"].content, 96)
    late = 12 if head[0] else 0  # version 1 has three fields of eight bytes
    (number,) = _unpack_u32(head, 20 if late else 12)
    timescale, _, _ = _parse_times(source, parts[b"mdhd"])
    track = Track(number, timescale, _parse_turn(head, 40 + late), handler == b"vide")
    if not track.is_video:
        return track
    shown = [side / 65536 for side in _unpack_pair(head, 76 + late)]
    if b"stsd" in parts:
        _parse_description(source, parts[b"stsd"], track, shown)
    if not track.width or not track.height:
        return None
    if b"stts" in parts:
        track.frames, track.ticks = _sum_times(source, parts[b"stts"])
    return track


def _collect(source: ByteSource, track: Box) -> dict[bytes, Box]:
    """Find the boxes of a track by name, up to the table of times; what is larger comes behind it."""
    found: dict[bytes, Box] = {}
    starts = [(track.content, track.end)]
    for _ in range(_MAX_BOXES):
        if not starts or b"stts" in found:
            break
        start, end = starts.pop()
        box = next(walk_boxes(source, start, end), None)
        if box is None:
            continue
        found.setdefault(box.name, box)
        starts.append((box.end, end))
        if box.name in _CONTAINERS:
            starts.append((box.content, box.end))
    return found


def _parse_description(source: ByteSource, box: Box, track: Track, shown: list[float]) -> None:
    """Fill in the size of the first kind of frame (``stsd``)."""
    start = box.content + 8
    entry = next(walk_boxes(source, start, box.end), None)
    if entry is None:
        return
    content = source.take(entry.content, min(entry.end - entry.content, 2048))
    track.width, track.height = _unpack_coded(content, 24)
    if not track.width or not track.height:
        track.width, track.height = (int(side) for side in shown)
        return
    if min(shown) >= 1:
        track.pixel_aspect = (shown[0] * track.height) / (shown[1] * track.width)
    try:
        for part in iter_boxes(content, 78, len(content), 64):
            if part.name == b"pasp":
                across, down = _unpack_pair(content, part.content)
                track.pixel_aspect = across / down if across and down else track.pixel_aspect
    except struct.error:  # four zeros may end the list, or our limit cut it
        pass


def _sum_times(source: ByteSource, box: Box) -> tuple[int, int]:
    """Return how many frames ``stts`` lists, and how long they last."""
    (count,) = _unpack_u32(source.take(box.content + 4, 4))
    count = min(count, _MAX_TIMES, (box.end - box.content - 8) // 8)
    if count <= 0:
        return 0, 0
    table = np.frombuffer(source.take(box.content + 8, 8 * count), ">u4")
    frames, ticks = table[: len(table) // 2 * 2].reshape(-1, 2).astype(np.float64).T
    return int(frames.sum()), int(frames @ ticks)
