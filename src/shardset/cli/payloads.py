"""What a payload is, told from its first bytes: kind, size of a picture, length of a video, how a text begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.formats.geometry import parse_geometry, sniff_kind
from shardset.formats.media import Media, read_media

if TYPE_CHECKING:
    from shardset.formats.geometry import Geometry
    from shardset.storage.store import Reader

_HEAD: Final = 64 << 10
_LONGEST_TEXT: Final = 1_000
_VIDEOS: Final = frozenset({"mp4", "mov", "m4a", "webm", "mkv"})
_PICTURES: Final = frozenset({"jpeg", "png", "webp", "gif", "bmp", "tiff", "avif", "heic", "heif", "jxl", "ico"})


class Look(NamedTuple):
    """What a payload is. `geometry` is set for a picture or a video, `text` for what is text."""

    kind: str
    geometry: Geometry | Media | None
    text: str | None


def look_at(reader: Reader, offset: int, length: int) -> Look:
    """Tell of a payload its kind, what its header says if it is a picture or video, and how it begins if it is text."""
    if not length:
        return Look("empty", None, None)
    head = reader.view(offset, min(length, _HEAD))
    kind = sniff_kind(head)
    if kind in _PICTURES:
        whole = head if reader.map() is None else reader.view(offset, length)
        return Look(kind, parse_geometry(whole), None)
    if kind in _VIDEOS:
        found = read_media(lambda at, count: reader.view(offset + at, max(0, min(count, length - at))), length)
        return Look(kind, found, None)
    text = _decode(bytes(head), is_whole=length <= _HEAD) if kind in {None, "json", "html", "svg"} else None
    return Look(kind or ("data" if text is None else "text"), None, text)


def _decode(head: bytes, *, is_whole: bool) -> str | None:
    """Return how a text begins, or None for what is no text."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if is_whole or error.start < len(head) - 3:  # otherwise the cut fell inside a character
            return None
        text = head[: error.start].decode()
    return None if "\0" in text else text[:_LONGEST_TEXT]


def geometry_document(geometry: Geometry | Media | None) -> dict[str, Any]:
    """Return what ``--json`` prints of the size of a picture or a video."""
    width, height = (geometry and geometry.display_size) or (None, None)
    media = geometry if isinstance(geometry, Media) else None
    return {
        "width": width,
        "height": height,
        "orientation": geometry.orientation if geometry is not None and width is not None else None,
        "duration": media and media.duration,
        "frame_rate": media and media.frame_rate,
    }


def geometry_text(geometry: Geometry | Media) -> str:
    """Return the size of a picture or a video for people."""
    size = geometry.display_size
    said = [] if size is None else [f"{size[0]}x{size[1]}"]
    if geometry.orientation != 1:
        said.append(f"orientation {geometry.orientation}")
    if isinstance(geometry, Media):
        said += [] if geometry.duration is None else [f"{geometry.duration:.4g} s"]
        said += [] if geometry.frame_rate is None else [f"{geometry.frame_rate:.4g} frames/s"]
    return ", ".join(said)
