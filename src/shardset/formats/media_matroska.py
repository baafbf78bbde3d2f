"""Matroska and WebM (RFC 9559; EBML, RFC 8794): Info and the first video track.

An element is an identifier, a length and content. Lengths may be unknown (live recordings); then the element goes on
until one that cannot stand inside it. Info and Tracks stand before the pictures, or a SeekHead says where.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from .geometry_heif import ORIENTATIONS
from .media_source import Found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .media_source import ByteSource

_EBML, _SEGMENT, _SEEK_HEAD, _INFO, _TRACKS, _CLUSTER = (
    0x1A45DFA3,
    0x18538067,
    0x114D9B74,
    0x1549A966,
    0x1654AE6B,
    0x1F43B675,
)
_SEEK, _SEEK_ID, _SEEK_POSITION = 0x4DBB, 0x53AB, 0x53AC
_TIMESTAMP_SCALE, _DURATION = 0x2AD7B1, 0x4489
_TRACK_ENTRY, _TRACK_TYPE, _DEFAULT_DURATION, _VIDEO = 0xAE, 0x83, 0x23E383, 0xE0
_PIXEL_WIDTH, _PIXEL_HEIGHT, _DISPLAY_WIDTH, _DISPLAY_HEIGHT, _DISPLAY_UNIT = 0xB0, 0xBA, 0x54B0, 0x54BA, 0x54B2
_PROJECTION, _PROJECTION_TYPE, _YAW, _PITCH, _ROLL = 0x7670, 0x7671, 0x7673, 0x7674, 0x7675

_MAX_ELEMENTS: Final = 4096
_LONGEST: Final = 1 << 20
_ELEMENT_HEAD: Final = 12
_IS_VIDEO, _IS_SOUND = 1, 2
_PIXELS, _RATIO = 0, 3  # of DisplayUnit, those that are not a length on paper


class _Element(NamedTuple):
    identifier: int
    content: int
    end: int | None
    """None for one of unknown length."""


def parse_matroska(source: ByteSource) -> Found | None:
    """Return what Info and Tracks say.

    Raises:
        struct.error: The bytes end before what is sought.
        IndexError: The same, or too much would have to be read.
    """
    segment = next((element for element in _walk(source, 0, source.size) if element.identifier != _EBML), None)
    if segment is None or segment.identifier != _SEGMENT:
        return None
    parts = _find_parts(source, segment)
    if _TRACKS not in parts:
        return None
    duration = _parse_info(_content(source, parts[_INFO])) if _INFO in parts else None
    return _parse_tracks(_content(source, parts[_TRACKS]), duration)


def _find_parts(source: ByteSource, segment: _Element) -> dict[int, _Element]:
    """Find Info and Tracks, those that stand before the pictures and those that a SeekHead knows."""
    parts: dict[int, _Element] = {}
    places: dict[int, int] = {}
    end = segment.end or source.size
    for element in _walk(source, segment.content, end):
        if element.identifier in {_INFO, _TRACKS}:
            parts.setdefault(element.identifier, element)
        elif element.identifier == _SEEK_HEAD:
            places |= _parse_seek_head(_content(source, element))
        if element.identifier == _CLUSTER or len(parts) == 2:
            break
    for identifier in {_INFO, _TRACKS} & places.keys() - parts.keys():
        found = next(_walk(source, segment.content + places[identifier], end), None)
        if found and found.identifier == identifier:
            parts[identifier] = found
    return parts


def _walk(source: ByteSource, start: int, end: int) -> Iterator[_Element]:
    for _ in range(_MAX_ELEMENTS):
        if start >= end:
            return
        element = _parse_element(source.take(start, _ELEMENT_HEAD), 0, start)
        if element is None or (element.end or 0) > end:
            return
        yield element
        if element.end is None:
            return
        start = element.end


def _parse_element(flat: memoryview, at: int, position: int) -> _Element | None:
    """Parse the head of an element at `at` in `flat` and at `position` in the file; None for what is none."""
    first = flat[at]
    size = 9 - first.bit_length()
    if size > 4:
        return None
    identifier = int.from_bytes(flat[at : at + size], "big")
    first = flat[at + size]
    width = 9 - first.bit_length()
    if width > 8:
        return None
    field = flat[at + size : at + size + width]
    if len(field) < width:
        raise IndexError
    length = int.from_bytes(field, "big") & ((1 << 7 * width) - 1)
    content = position + size + width
    return _Element(identifier, content, None if length == (1 << 7 * width) - 1 else content + length)


def _content(source: ByteSource, element: _Element) -> memoryview:
    """Return the content of a short element, whole.

    Raises:
        IndexError: It is long or cut off, or has no length.
    """
    if element.end is None or element.end - element.content > _LONGEST or element.end > source.size:
        raise IndexError
    return source.take(element.content, element.end - element.content) if element.end > element.content else _NOTHING


_NOTHING: Final = memoryview(b"")


def _iter_children(flat: memoryview) -> Iterator[tuple[int, memoryview]]:
    position = 0
    for _ in range(_MAX_ELEMENTS):
        if position >= len(flat):
            return
        element = _parse_element(flat, position, position)
        if element is None or element.end is None or element.end > len(flat):
            return
        yield element.identifier, flat[element.content : element.end]
        position = element.end


def _read_float(content: memoryview) -> float:
    """Return a finite number, 0 for what is none."""
    number = struct.unpack(">f" if len(content) == 4 else ">d", content)[0] if len(content) in {4, 8} else 0.0
    return float(number) if math.isfinite(number) else 0.0


def _read_integer(content: memoryview) -> int:
    return int.from_bytes(content[:8], "big")


def _parse_seek_head(content: memoryview) -> dict[int, int]:
    """Return where in the segment elements stand, by identifier."""
    places: dict[int, int] = {}
    for identifier, seek in _iter_children(content):
        if identifier == _SEEK:
            fields = dict(_iter_children(seek))
            if {_SEEK_ID, _SEEK_POSITION} <= fields.keys():
                places.setdefault(_read_integer(fields[_SEEK_ID]), _read_integer(fields[_SEEK_POSITION]))
    return places


def _parse_info(content: memoryview) -> float | None:
    fields = dict(_iter_children(content))
    scale = _read_integer(fields[_TIMESTAMP_SCALE]) if _TIMESTAMP_SCALE in fields else 1_000_000
    duration = _read_float(fields.get(_DURATION, _NOTHING)) * scale / 1e9
    return duration if duration > 0 else None


def _parse_tracks(content: memoryview, duration: float | None) -> Found | None:
    has_sound = False
    for identifier, entry in _iter_children(content):
        fields = dict(_iter_children(entry)) if identifier == _TRACK_ENTRY else {}
        kind = _read_integer(fields.get(_TRACK_TYPE, _NOTHING))
        has_sound |= kind == _IS_SOUND
        if kind != _IS_VIDEO:
            continue
        video = dict(_iter_children(fields.get(_VIDEO, _NOTHING)))
        width, height = (_read_integer(video.get(side, _NOTHING)) for side in (_PIXEL_WIDTH, _PIXEL_HEIGHT))
        if not width or not height:
            continue
        each = _read_integer(fields.get(_DEFAULT_DURATION, _NOTHING))
        orientation = _parse_projection(video.get(_PROJECTION, _NOTHING))
        aspect = _pixel_aspect(video, width, height)
        return Found(width, height, orientation, aspect, duration, 1e9 / each if each else None)
    return Found(None, None, 1, 1.0, duration, None) if has_sound else None


def _pixel_aspect(video: dict[int, memoryview], width: int, height: int) -> float:
    if _read_integer(video.get(_DISPLAY_UNIT, _NOTHING)) not in {_PIXELS, _RATIO}:
        return 1.0
    across, down = (_read_integer(video.get(side, _NOTHING)) for side in (_DISPLAY_WIDTH, _DISPLAY_HEIGHT))
    return (across or width) * height / ((down or height) * width)


def _parse_projection(content: memoryview) -> int:
    """Return the orientation of a flat picture that is turned about the line of sight, and perhaps seen from behind."""
    fields = dict(_iter_children(content))
    if _read_integer(fields.get(_PROJECTION_TYPE, _NOTHING)):
        return 1
    yaw, pitch, roll = (_read_float(fields.get(angle, _NOTHING)) for angle in (_YAW, _PITCH, _ROLL))
    quarters = roll / 90
    if pitch or abs(yaw) not in {0, 180} or quarters != int(quarters):
        return 1
    return ORIENTATIONS[yaw != 0][int(quarters) % 4]
