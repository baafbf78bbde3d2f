"""Bytes of a payload that may be far away, read in chunks, and not without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from .boxes import BOX_HEAD, Box, parse_box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

_CHUNK: Final = 4096
_LONGEST: Final = 1 << 20
_MAX_BOXES: Final = 4096
_TAKES: Final = 1 << 14
"""How many times a parser looks at anything: ten or so for each track and fragment."""


class Found(NamedTuple):
    """What a parser found, in the order of `shardset.formats.media.Media`."""

    width: int | None
    height: int | None
    orientation: int
    pixel_aspect: float
    duration: float | None
    frame_rate: float | None


Turn = tuple[int, int, int, int]
"""The signs of a, b, c and d in x' = ax + cy, y' = bx + dy."""


@dataclass(slots=True)
class Track:
    """What an MP4 says of one track.

    Attributes:
        number: By which fragments name it.
        timescale: Units a second of its durations.
        turn: How its pictures are shown.
        is_video: Or else it is sound.
        width: As stored; None of sound.
        height: As stored.
        pixel_aspect: How much wider than high a pixel is shown.
        frames: How many were looked at.
        ticks: How long these last, in units of the timescale.
    """

    number: int
    timescale: int
    turn: Turn
    is_video: bool
    width: int | None = None
    height: int | None = None
    pixel_aspect: float = 1.0
    frames: int = 0
    ticks: int = 0


class ByteSource:
    """Gives bytes at an offset; those that stand near the ones before are there already.

    Attributes:
        size: Bytes of the whole payload.
    """

    def __init__(self, read: Callable[[int, int], Buffer], size: int, reads: int) -> None:
        """Remember how to read.

        Args:
            read: Called with an offset and a length, returns that many bytes, fewer at the end.
            size: Bytes of the whole payload.
            reads: How often it is called, at most.
        """
        self.size = size
        self._read, self._reads_left, self._takes_left = read, reads, _TAKES
        self._start, self._chunk = 0, memoryview(b"")

    def take(self, offset: int, length: int) -> memoryview:
        """Return the bytes at ``[offset, offset + length)``, fewer where the payload ends.

        Raises:
            IndexError: They begin behind the end, are more than a megabyte, or were asked for too often.
        """
        self._takes_left -= 1
        if not 0 <= offset < self.size or length > _LONGEST or self._takes_left < 0:
            raise IndexError
        length = min(length, self.size - offset)
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._chunk):
            if not self._reads_left:
                raise IndexError
            self._reads_left -= 1
            wanted = min(max(length, _CHUNK), self.size - offset)
            self._start, self._chunk = offset, memoryview(self._read(offset, wanted))
            begin = 0
        return self._chunk[begin : begin + length]


def walk_boxes(source: ByteSource, start: int, end: int) -> Iterator[Box]:
    """Walk over the boxes in ``[start, end)``, as `iter_boxes` does over bytes at hand.

    Raises:
        struct.error: The payload ends inside the head of a box.
        IndexError: As `ByteSource.take`.
    """
    for _ in range(_MAX_BOXES):
        box = parse_box(source.take(start, BOX_HEAD), 0, start, end) if start < end else None
        if box is None:
            return
        yield box
        start = box.end
