"""What the container of a video says of it: size, duration, frame rate. Nothing is decoded, and little is read.

`parse_media` takes a whole payload, `read_media` a way to read some bytes of one. Of an MP4 whose header stands behind
its pictures, some kilobytes at both ends are read; of a fragmented one without an index, the head of each fragment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .geometry import flatten, sniff_kind
from .media_matroska import parse_matroska
from .media_mp4 import parse_mp4
from .media_source import ByteSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

_READS: Final = 256
_READS_IN_MEMORY: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Media:
    """What a container says of the video, or the sound, in it.

    Attributes:
        kind: ``"mp4"``, ``"mov"``, ``"m4a"``, ``"webm"`` or ``"mkv"``.
        width: Pixels in a stored row of the first video track, or None where there is none.
        height: Stored rows.
        orientation: How players turn the pictures, as an EXIF orientation, 1 to 8; 1 for turns that are none of these.
        pixel_aspect: How much wider than high a stored pixel is shown.
        duration: Seconds, or None where the container does not say.
        frame_rate: Frames a second, on average, or None where the container does not say.
    """

    kind: str
    width: int | None
    height: int | None
    orientation: int
    pixel_aspect: float
    duration: float | None
    frame_rate: float | None

    @property
    def display_size(self) -> tuple[int, int] | None:
        """``(width, height)`` as players show it: pixels made square by changing the width, then turned."""
        if self.width is None or self.height is None:
            return None
        width = max(1, round(self.width * self.pixel_aspect))
        return (self.height, width) if self.orientation >= 5 else (width, self.height)


def parse_media(payload: Buffer) -> Media | None:
    """Parse the header of an MP4, MOV, WebM or Matroska file, whose kind is found by content.

    Args:
        payload: The whole payload. Of a view of a memory map only the header is touched.

    Returns:
        What the header says, or None for bytes of no such kind, for headers that are cut off or broken, and for files
        without any track of pictures or sound. No bytes make it raise.
    """
    flat = flatten(payload)
    return _parse(ByteSource(lambda offset, length: flat[offset : offset + length], len(flat), _READS_IN_MEMORY))


def read_media(read: Callable[[int, int], Buffer], size: int) -> Media | None:
    """Do what `parse_media` does for a payload that is elsewhere, and read some kilobytes of it.

    Args:
        read: Called with an offset into the payload and a length, returns that many bytes, fewer at the end.
        size: Bytes of the whole payload.

    Returns:
        As `parse_media`. The duration of a fragmented MP4 that has no index, and more fragments than are looked at, is
        None.

    Raises:
        Whatever `read` raises.
    """
    return _parse(ByteSource(read, size, _READS))


def _parse(source: ByteSource) -> Media | None:
    try:
        kind = sniff_kind(source.take(0, 64))
        if kind in {"webm", "mkv"}:
            found = parse_matroska(source)
        elif kind in {"mp4", "m4a", "mov", None}:  # an old MOV has no signature
            found = parse_mp4(source)
        else:
            return None
    except (struct.error, IndexError):
        return None
    return Media(kind or "mov", *found) if found else None
