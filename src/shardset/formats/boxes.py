"""ISO boxes (ISO/IEC 14496-12, 4.2): the frame that AVIF, HEIC, JPEG XL, MP4 and MOV share.

A box is a length in four bytes, a name in four, and content. A length of 1 says that the real one follows in eight
bytes, a length of 0 that the box goes to the end of the file.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

BOX_HEAD: Final = 16
"""As many bytes hold the head of any box."""

ENDLESS: Final = 1 << 62
"""The end of a file of unknown size: beyond any other, and still an index."""

_unpack_head: Final = Struct(">I4s").unpack_from
_unpack_length: Final = Struct(">8xQ").unpack_from


class Box(NamedTuple):
    """Where a box lies, in bytes from the start of what is walked.

    Attributes:
        name: Its four letters.
        content: Where its content begins.
        end: Where it ends, which may be beyond the bytes at hand.
    """

    name: bytes
    content: int
    end: int


def parse_box(flat: Buffer, at: int, position: int, end: int) -> Box | None:
    """Parse the head of a box.

    Args:
        flat: Bytes that hold it.
        at: Where in `flat` it begins.
        position: Where in the file it begins.
        end: Where in the file the box around it ends.

    Returns:
        The box, or None for a length that does not hold even the head or is more than `end` leaves.

    Raises:
        struct.error: The bytes end inside the head.
    """
    length, name = _unpack_head(flat, at)
    head = 8
    if length == 1:
        (length,), head = _unpack_length(flat, at), 16
    elif length == 0:
        length = end - position
    if not head <= length <= end - position:
        return None
    return Box(name, position + head, position + length)


def iter_boxes(flat: Buffer, start: int, end: int, hops: int) -> Iterator[Box]:
    """Walk over boxes that stand one behind the other.

    The walk ends without an error behind `hops` boxes, and before a box whose length makes no sense.

    Args:
        flat: The file, or its first bytes.
        start: Where the first begins.
        end: Where the box around them ends, which may be beyond the bytes at hand.
        hops: How many are looked at, at most.

    Raises:
        struct.error: The bytes at hand end inside the head of a box.
    """
    for _ in range(hops):
        box = parse_box(flat, start, start, end) if start < end else None
        if box is None:
            return
        yield box
        start = box.end
