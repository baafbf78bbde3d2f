"""How many of a picture's first bytes are needed to know its geometry: for payloads whose bytes are dear to read.

Each function here goes the same way through the headers as its namesake in `shardset.formats.geometry`, and stops where
the bytes at hand end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .geometry import (
    _APP1,
    _BARE,
    _ENDS,
    _FRAMES,
    _MARKER,
    _MAX_ENTRIES,
    _MAX_HOPS,
    _SEGMENTS,
    _STRAY_ALLOWED,
    _TIFF_LAYOUTS,
    _VP8X_EXIF,
    TURNED_BY_FORMAT,
    _gif_first_frame,
    _unpack_chunk,
    _unpack_icon_count,
    _unpack_riff_chunk,
    _unpack_segment,
    flatten,
    sniff_kind,
)
from .geometry_heif import heif_reach
from .geometry_jxl import jxl_reach

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from .geometry import Flat

_FIELDS: Final = 64
"""The fields that stand first in every kind, and those that follow any segment, fit into so many bytes."""


def geometry_reach(head: Buffer, size: int) -> int:
    """Tell how much of a payload `parse_geometry` needs to give what it would give for all of it.

    Args:
        head: The first bytes of the payload.
        size: Bytes of the whole payload.

    Returns:
        A number of first bytes: at most ``len(head)`` if these suffice. If it is more, it is a guess, which is made
        again when so many are there. Never above `size`.
    """
    flat = flatten(head)
    if len(flat) < min(size, _FIELDS):
        return min(size, _FIELDS)
    reach = _REACHES.get(flat[0]) if size >= _FIELDS else None
    return min(size, reach(flat, size)) if reach else 0


def _reach_zero(flat: Flat, size: int) -> int:
    del size
    kind = sniff_kind(flat)
    if kind == "jxl":
        return jxl_reach(flat)
    if kind == "ico":
        return 6 + 16 * int(_unpack_icon_count(flat)[0])
    return heif_reach(flat) if kind in TURNED_BY_FORMAT else 0


def _reach_jpeg(flat: Flat, size: int) -> int:
    del size
    position, stray_left = 2, _STRAY_ALLOWED
    for _ in range(_MAX_HOPS if flat[1] == 0xD8 and flat[2] == 0xFF else 0):
        if position + _FIELDS > len(flat):
            return position + 4 * _FIELDS
        marker, length = _unpack_segment(flat, position)
        if marker in _SEGMENTS or marker == _APP1:
            position += 2 + length if length > 2 else 4
        elif marker in _FRAMES or marker in _ENDS:
            break
        else:
            position += 2 if marker in _BARE else 0
            found = _MARKER.search(flat, position, position + stray_left)
            if found is None:
                return 2 * len(flat) if position + stray_left > len(flat) else 0
            stray_left -= found.start() - position
            position = found.start()
    return 0


def _reach_png(flat: Flat, size: int) -> int:
    del size
    position = 33
    for _ in range(_MAX_HOPS if flat[:8] == b"\x89PNG\r\n\x1a\n" else 0):
        if position + 8 > len(flat):
            return position + 4 * _FIELDS
        length, name = _unpack_chunk(flat, position)
        if name == b"IDAT":
            break
        if name == b"eXIf":
            return int(position + 8 + length + _FIELDS)
        position += 12 + length
    return 0


def _reach_webp(flat: Flat, size: int) -> int:
    if flat[8:16] != b"WEBPVP8X" or not flat[20] & _VP8X_EXIF:
        return 0
    riff_size, length = (int(_unpack_riff_chunk(flat, at)[1]) for at in (0, 12))
    position, end = 20 + length + length % 2, min(riff_size + 8, size)
    for _ in range(_MAX_HOPS):
        if position >= end:
            break
        if position + 8 > len(flat):
            return position + 4 * _FIELDS
        name, length = _unpack_riff_chunk(flat, position)
        if name == b"EXIF":
            return int(position + 8 + length + _FIELDS)
        position += 8 + length + length % 2
    return 0


def _reach_gif(flat: Flat, size: int) -> int:
    del size
    if flat[:3] != b"GIF":
        return 0
    first = _gif_first_frame(flat, 13 + (6 << (flat[10] & 7) if flat[10] & 0x80 else 0))
    return 2 * len(flat) if first == (0, 0) else 0


def _reach_tiff(flat: Flat, size: int) -> int:
    layout = _TIFF_LAYOUTS.get(bytes(flat[:4]))
    if layout is None:
        return 0
    offset: int = layout.offset.unpack_from(flat)[0]
    if offset >= size:
        return 0
    first = offset + layout.entries.size
    if first > len(flat):
        return first + 4 * _FIELDS
    count: int = layout.entries.unpack_from(flat, offset)[0]
    return first + min(count, _MAX_ENTRIES) * layout.entry.size


# By the first byte, as the parsers; the fields of a BMP all stand first.
_REACHES: Final[dict[int, Callable[[Flat, int], int]]] = {
    0: _reach_zero,
    0xFF: _reach_jpeg,
    0x89: _reach_png,
    ord("R"): _reach_webp,
    ord("G"): _reach_gif,
    ord("I"): _reach_tiff,
    ord("M"): _reach_tiff,
}
