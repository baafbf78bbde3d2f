"""The geometry of pictures in ISO boxes: AVIF, HEIC and other HEIF (ISO/IEC 23008-12; AV1 Image File Format 1.1).

The picture is the primary item (``pitm``). Its properties (``ipma`` says which of those in ``ipco`` are its own) give
the size, ``ispe``, which for a picture made of tiles is that of the whole, and how a reader turns it: ``irot``, a
rotation, and ``imir``, a mirroring. Here these two become what EXIF calls an orientation. EXIF itself does not count:
HEIF says that it only informs, and a reader that obeyed both would turn the picture twice.

A crop, ``clap``, is taken off the stored size of HEIC: encoders code more than the picture, to a multiple of some
pixels, and decoders hand out what is left. In AVIF it is not: libavif, and with it Pillow, hands out the whole.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING, Final

from .boxes import ENDLESS, Box, iter_boxes, parse_box

if TYPE_CHECKING:
    from .geometry import Flat

_MAX_BOXES: Final = 4096
# Items stand in the order of their numbers, and the tiles of a picture may come before it.
_MAX_ITEMS: Final = 1 << 17
_MAX_PROPERTIES: Final = 1 << 15  # more cannot be told apart

_unpack_u16: Final = Struct(">H").unpack_from
_unpack_u32: Final = Struct(">I").unpack_from
_unpack_ispe: Final = Struct(">4xII").unpack_from  # version and flags, width, height
# Width and height, then how far the middle lies right of and below that of the picture; each over its denominator.
_unpack_clap: Final = Struct(">IIIIiIiI").unpack_from

ORIENTATIONS: Final = ((1, 8, 3, 6), (2, 5, 4, 7))
"""By whether left and right are exchanged first, and by how many quarters the picture is then turned anti-clockwise."""


def parse_heif(flat: Flat, *, is_avif: bool) -> tuple[int, int, int] | None:
    """Return width, height (as stored, cropped unless `is_avif`) and orientation of the primary item.

    Raises:
        struct.error: The bytes end before what is sought.
        IndexError: The same.
    """
    primary, properties, _ = _find_parts(flat)
    if primary is None or properties is None:
        return None
    item = _read_number(flat, primary.content + 4, is_long=flat[primary.content] > 0)
    parts = list(iter_boxes(flat, properties.content, properties.end, _MAX_BOXES))
    container = next((part for part in parts if part.name == b"ipco"), None)
    numbers = next(filter(None, (_find_associated(flat, part, item) for part in parts if part.name == b"ipma")), [])
    if container is None or not numbers:
        return None
    boxes = dict(enumerate(iter_boxes(flat, container.content, container.end, max(numbers)), 1))
    own = [boxes[number] for number in numbers if number in boxes]
    if is_avif:
        own = [box for box in own if box.name != b"clap"]
        own.sort(key=lambda box: box.name == b"imir")  # libavif mirrors last, in whatever order they stand
    return _apply(flat, own)


def heif_reach(flat: Flat) -> int:
    """Return how many first bytes `parse_heif` needs, as far as those at hand tell."""
    primary, properties, missing = _find_parts(flat)
    if missing:
        return missing + 256
    return max(primary.end, properties.end) if primary and properties else 0


def _find_parts(flat: Flat) -> tuple[Box | None, Box | None, int]:
    """Find ``pitm`` and ``iprp`` in the first ``meta``, and where the bytes ended before both were found, or 0."""
    primary = properties = None
    position, end, is_inside = 0, ENDLESS, False
    try:
        for _ in range(_MAX_BOXES):
            box = parse_box(flat, position, position, end) if position < end else None
            if box is None or (primary and properties):
                break
            if box.name == b"meta" and not is_inside:
                position, end, is_inside = box.content + 4, box.end, True
                continue
            if box.name == b"pitm" and is_inside:
                primary = box
            elif box.name == b"iprp" and is_inside:
                properties = box
            position = box.end
    except struct.error:
        return primary, properties, position
    return primary, properties, 0


def _read_number(flat: Flat, position: int, *, is_long: bool) -> int:
    (number,) = (_unpack_u32 if is_long else _unpack_u16)(flat, position)
    return int(number)


def _find_associated(flat: Flat, box: Box, item: int) -> list[int]:
    """Return the numbers of the properties that an ``ipma`` box gives an item, from 1; 0 stands for none."""
    is_long, is_wide = flat[box.content] > 0, flat[box.content + 3] & 1
    (count,) = _unpack_u32(flat, box.content + 4)
    position, width = box.content + 8, 2 if is_wide else 1
    for _ in range(min(count, _MAX_ITEMS)):
        number = _read_number(flat, position, is_long=is_long)
        position += 4 if is_long else 2
        size = flat[position] * width
        position += 1
        if position + size > min(box.end, len(flat)):
            raise IndexError
        if number == item:
            # The highest bit says that a reader must understand the property.
            if is_wide:
                return [value & 0x7FFF for value in struct.unpack(f">{size // 2}H", flat[position : position + size])]
            return [value & 0x7F for value in flat[position : position + size]]
        position += size
    return []


def _apply(flat: Flat, properties: list[Box]) -> tuple[int, int, int] | None:
    """Apply properties one after the other; the size is turned back in the end."""
    size: tuple[int, int] | None = None
    for box in properties:
        if box.name == b"ispe":
            size = _unpack_ispe(flat, box.content)
            break
    mirrored, quarters = 0, 0
    for box in properties:
        if size is None:
            return None
        if box.name == b"irot":
            turn = flat[box.content] & 3
            quarters = (quarters + turn) % 4
            size = size[::-1] if turn % 2 else size
        elif box.name == b"imir":
            # 0 exchanges top and bottom: left and right, then half a turn.
            quarters = (2 * (1 - (flat[box.content] & 1)) - quarters) % 4
            mirrored ^= 1
        elif box.name == b"clap":
            size = _crop(size, *_unpack_clap(flat, box.content))
    if size is None or not min(size):
        return None
    return *(size[::-1] if quarters % 2 else size), ORIENTATIONS[mirrored][quarters]


def _crop(size: tuple[int, int], *fields: int) -> tuple[int, int] | None:
    width, height, right, down = zip(fields[::2], fields[1::2], strict=True)
    columns, rows = _crop_side(size[0], *width, *right), _crop_side(size[1], *height, *down)
    return (columns, rows) if columns > 0 and rows > 0 else None


def _crop_side(side: int, length: int, length_over: int, shift: int, shift_over: int) -> int:
    """Return how many pixels of a side are left, in the roundings of libheif; 0 for what makes no sense."""
    if not length_over or not shift_over:
        return 0
    # shift + (side - 1) / 2 - (length - 1) / 2, rounded towards zero
    over = 2 * length_over * shift_over
    first = 2 * shift * length_over + ((side - 1) * length_over - length + length_over) * shift_over
    first = first // over if first >= 0 else -(-first // over)
    last = first + (2 * length + length_over) // (2 * length_over) - 1
    return min(last, side - 1) - max(first, 0) + 1
