"""What a payload is, and how large its picture is, read from its headers alone and never from its name.

`sniff_kind` names the kind of many media by their first bytes; `parse_geometry` gives the size and the EXIF
orientation of JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, HEIC, JPEG XL and icons. Sizes are as stored, so that they agree
with a decoder that turns nothing; `Geometry.display_size` is what a viewer shows. Orientation is taken from EXIF where
the format has a place for it: APP1 before the frame in JPEG, ``eXIf`` before the pixels in PNG, ``EXIF`` in WebP, tag
274 in TIFF. Copies of it in XMP or in text chunks do not count. AVIF, HEIC and JPEG XL say in fields of their own how
they are to be turned, and then EXIF does not count.

Everything here may be handed hostile bytes: each loop has a fixed bound, no declared length is trusted for more than
a hop inside the payload, and at most a few kilobytes are ever copied. Payloads that are views of a memory map are
touched only where their headers lie.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from .geometry_heif import parse_heif
from .geometry_jxl import parse_jxl

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    Flat = bytes | bytearray | memoryview

# Segments, chunks or blocks that one payload is followed through. Real headers have at most a few hundred (an ICC
# profile fills 255 JPEG segments at most); beyond, the payload is taken for hostile and what is known so far is given.
_MAX_HOPS: Final = 4096


TURNED_BY_FORMAT: Final = frozenset({"avif", "heic", "heif", "jxl"})
"""Kinds whose format obliges decoders to turn the picture, where EXIF only asks for it. libheif and libjxl do, and then
nothing is left to turn; libavif leaves it to its caller, and Pillow passes it on as an EXIF orientation. Of these kinds
webshart 0.6.0 gives the size after quarter turns."""
_LONGEST_SIDE: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """The kind and size of a picture.

    Attributes:
        kind: ``"jpeg"``, ``"png"``, ``"webp"``, ``"gif"``, ``"bmp"``, ``"tiff"``, ``"avif"``, ``"heic"``, ``"heif"``,
            ``"jxl"`` or ``"ico"``, as `sniff_kind` says.
        width: Pixels in a stored row, at least 1.
        height: Stored rows, at least 1.
        orientation: EXIF orientation, 1 to 8; 1 where none is given or it is none of these. Whether it is left to who
            decodes or done by the decoder: see `TURNED_BY_FORMAT`.
        components: Colour components of a JPEG; 0 for other kinds.
        head_bytes: Of a JPEG, how many of its first bytes all this follows from: whatever begins with the same ones has
            the same geometry. 0 for other kinds.
    """

    kind: str
    width: int
    height: int
    orientation: int = 1
    components: int = field(default=0, compare=False)
    head_bytes: int = field(default=0, compare=False)

    @property
    def display_size(self) -> tuple[int, int]:
        """``(width, height)`` after the orientation is applied: swapped for 5 to 8, which turn by 90 degrees."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def parse_geometry(payload: Buffer) -> Geometry | None:
    """Parse the headers of a picture, whose kind is found by content.

    Args:
        payload: The whole payload, or as many of its first bytes as are at hand. With fewer, an orientation that
            stands late (WebP) is missed, and a size that is cut off gives None (TIFF often keeps it at the end). A
            view that is not contiguous is copied first.

    Returns:
        The geometry, or None for bytes of no known kind and for headers that are cut off or that a decoder refuses.
        No bytes make it raise.
    """
    flat = payload if type(payload) is bytes else flatten(payload)
    try:
        parser = _PARSERS.get(flat[0])
        found = parser(flat) if parser else None
    except (struct.error, IndexError):  # the payload ends inside the fields that hold the size
        return None
    return found if found and found.width <= _LONGEST_SIDE and found.height <= _LONGEST_SIDE else None


def sniff_kind(head: Buffer) -> str | None:
    """Name the kind of a payload for display, by the signature in its first bytes.

    Args:
        head: The first 16 to 64 bytes of the payload (or all of it); more are not looked at, and with fewer some kinds
            are not told apart.

    Returns:
        A short lower-case name, mostly the usual suffix (``"jpeg"``, ``"tiff"``, ``"mp4"``, ``"wav"``, ``"npy"``,
        ``"zip"``, ...), or None if no signature fits, as for plain text. It says what a payload claims to be;
        nothing behind the signature is checked.
    """
    found = _SIGNATURE.match(flatten(head)[:64])
    return found.lastgroup if found else None


# The third byte of a frame: bit rate (not 0 and not 15) above sampling rate (not 3), padding and a private bit.
_MP3_RATES: Final = b"".join(b"\\x%x0-\\x%xb" % (bit_rate, bit_rate) for bit_rate in range(1, 15))
# The first that fits wins. No pattern holds a group of its own: the group that matched is the kind.
_SIGNATURE: Final = re.compile(
    b"|".join(
        b"(?P<%b>%b)" % (kind.encode(), pattern)
        for kind, pattern in {
            "jpeg": rb"\xff\xd8\xff",
            "png": rb"\x89PNG\r\n\x1a\n",
            "webp": rb"RIFF.{4}WEBP",
            "gif": rb"GIF8[79]a",
            "bmp": rb"BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0",
            "tiff": rb"II[*+]\0|MM\0[*+]",
            "jxl": rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n",
            "jp2": rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51",
            "ico": rb"\0\0\x01\0[^\0]\0.{3}\0[\0\x01]\0",
            "psd": rb"8BPS\0[\x01\x02]",
            "exr": rb"v/1\x01",
            # Boxes: what a major brand leaves open, the compatible ones tell.
            "avif": rb".{4}ftyp(?:avi[fs]|m[is]f1.{4}(?:.{4})*?avi[fs])",
            "heic": rb".{4}ftyp(?:he[iv][cmsx]|m[is]f1.{4}(?:.{4})*?he[iv][cmsx])",
            "heif": rb".{4}ftypm[is]f1",
            "mov": rb".{4}ftypqt  ",
            "m4a": rb".{4}ftypM4[AB] ",
            "mp4": rb".{4}ftyp[ -~]{4}",
            "webm": rb"\x1aE\xdf\xa3.{0,48}?B\x82.webm",
            "mkv": rb"\x1aE\xdf\xa3.{0,48}?B\x82.matroska",
            "avi": rb"RIFF.{4}AVI ",
            "mpg": rb"\0\0\x01[\xb3\xba]",
            "wav": rb"(?:RIFF|RF64|BW64).{4}WAVE",
            "flac": rb"fLaC",
            "ogg": rb"OggS",
            "mp3": rb"ID3[\x02-\x04]|\xff[\xe2\xe3\xf2\xf3\xfa\xfb][%b]" % _MP3_RATES,
            "aac": rb"\xff[\xf0\xf1\xf8\xf9]",
            "npy": rb"\x93NUMPY",
            "hdf5": rb"\x89HDF\r\n\x1a\n",
            "parquet": rb"PAR1",
            "arrow": rb"ARROW1",
            "safetensors": rb".{5}\0\0\0\{",
            "pickle": rb"\x80[\x04\x05]\x95|\x80[\x02\x03][(c}\]]",
            "pdf": rb"%PDF-",
            "zip": rb"PK(?:\x03\x04|\x05\x06)",
            "gzip": rb"\x1f\x8b\x08",
            "bz2": rb"BZh[1-9]1AY&SY",
            "xz": rb"\xfd7zXZ\0",
            "zstd": rb"\x28\xb5\x2f\xfd",
            "lz4": rb"\x04\x22\x4d\x18",
            "html": rb"\s*<(?i:!doctype html|html[\s>])",
            "svg": rb"\s*<svg[\s>]",
            "json": rb"(?:\xef\xbb\xbf)?\s*(?:\{\s*[\"}]|\[\s*[\[{\"\]])",
        }.items()
    ),
    re.DOTALL,
)


def flatten(payload: Buffer) -> memoryview:
    """View a buffer as plain bytes; one that is not contiguous is copied first."""
    view = memoryview(payload)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    # cast() takes no gaps, no shape with a zero in it, and plain items only.
    plain = view.c_contiguous and view.nbytes and len(view.format) == 1
    return view.cast("B") if plain else memoryview(view.tobytes())


# --- JPEG (ITU T.81, annex B) ---------------------------------------------------------------------------------------

_unpack_segment: Final = Struct(">HH").unpack_from  # marker, length with its own two bytes
_unpack_frame: Final = Struct(">HHB").unpack_from  # height, width, components
_SOI, _APP1 = 0xFFD8, 0xFFE1
# Every start of frame; of 0xC0 to 0xCF three mean something else (DHT, JPG, DAC). DHP is added, which in hierarchical
# files stands before the frames, looks like one and holds the size of the whole picture.
_FRAMES: Final = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC} | {0xFFDE}
_BARE: Final = frozenset((0xFF01, *range(0xFFD0, 0xFFD8)))  # TEM and RSTn: no length follows
_ENDS: Final = frozenset((_SOI, 0xFFD9, 0xFFDA))  # a second SOI, EOI, SOS: no headers follow
_SEGMENTS: Final = frozenset(range(0xFF02, 0xFFFF)) - _FRAMES - _BARE - _ENDS - {_APP1}
_MARKER: Final = re.compile(rb"\xff[\x01-\xfe]")
_STRAY_ALLOWED: Final = 65536


def _parse_jpeg(flat: Flat) -> Geometry | None:
    if flat[1] != 0xD8 or flat[2] != 0xFF:
        return _parse_jxl(flat)
    position, orientation, stray_left = 2, 0, _STRAY_ALLOWED
    for _ in range(_MAX_HOPS):
        marker, length = _unpack_segment(flat, position)
        if marker in _SEGMENTS:
            # As libjpeg does, a length that does not include even itself is taken for one that does.
            position += 2 + length if length > 2 else 4
        elif marker in _FRAMES:
            height, width, components = _unpack_frame(flat, position + 5)
            # A height of 0 means that it is told after the first scan (DNL); decoders refuse it too.
            if not width or not height or length != 8 + 3 * components:
                return None
            return Geometry("jpeg", width, height, orientation or 1, components, position + 10)
        elif marker == _APP1:
            # The first EXIF segment counts. One behind the frame header would break the standard, and is not sought.
            if not orientation and flat[position + 4 : position + 10] == b"Exif\0\0":
                orientation = _exif_orientation(flat, position + 10, position + 2 + length)
            position += 2 + length if length > 2 else 4
        elif marker in _ENDS:
            return None
        else:
            # As libjpeg does: on to the next marker over fill bytes, and over whatever else lies between.
            position += 2 if marker in _BARE else 0
            found = _MARKER.search(flat, position, position + stray_left)
            if found is None:
                return None
            stray_left -= found.start() - position
            position = found.start()
    return None


# --- PNG (W3C PNG, third edition) -----------------------------------------------------------------------------------

# The signature, then the chunk IHDR: length, type, width, height, five bytes more, CRC-32.
_unpack_png_head: Final = Struct(">8sI4sII5sI").unpack_from
_unpack_chunk: Final = Struct(">I4s").unpack_from


def _parse_png(flat: Flat) -> Geometry | None:
    signature, length, name, width, height, _, checksum = _unpack_png_head(flat)
    if signature != b"\x89PNG\r\n\x1a\n" or name != b"IHDR" or length != 13:
        return None
    if not 0 < width < 1 << 31 or not 0 < height < 1 << 31 or zlib.crc32(flat[12:29]) != checksum:
        return None
    return Geometry("png", width, height, _png_orientation(flat))


def _png_orientation(flat: Flat) -> int:
    """Return the orientation of an ``eXIf`` chunk before the pixels: later ones the third edition forbids."""
    position = 33
    try:
        for _ in range(_MAX_HOPS):
            length, name = _unpack_chunk(flat, position)
            if name == b"IDAT":
                break
            if name == b"eXIf":
                return _exif_orientation(flat, position + 8, position + 8 + length)
            position += 12 + length
    except struct.error:
        pass
    return 1


# --- WebP (RFC 9649) ------------------------------------------------------------------------------------------------

# "RIFF", size of what follows, "WEBP", and of the first chunk its type and length.
_unpack_riff_head: Final = Struct("<4sI4s4sI").unpack_from
_unpack_riff_chunk: Final = Struct("<4sI").unpack_from
# Frame tag, start code, width and height with two bits of scaling above each.
_unpack_vp8: Final = Struct("<B2x3sHH").unpack_from
# Signature; (width - 1) and (height - 1) in 14 bits each.
_unpack_vp8l: Final = Struct("<BI").unpack_from
_VP8X_EXIF: Final = 0x08


def _parse_webp(flat: Flat) -> Geometry | None:
    riff, size, form, name, length = _unpack_riff_head(flat)
    if riff != b"RIFF" or form != b"WEBP":
        return None
    if name == b"VP8 ":
        tag, start_code, width, height = _unpack_vp8(flat, 20)
        width, height = width & 0x3FFF, height & 0x3FFF
        if start_code != b"\x9d\x01*" or tag & 1:  # bit 0: no key frame, so there is nothing to decode
            return None
        return Geometry("webp", width, height) if width and height else None
    if name == b"VP8L":
        signature, bits = _unpack_vp8l(flat, 20)
        return Geometry("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1) if signature == 0x2F else None
    if name != b"VP8X" or length < 10 or len(flat) < 30:
        return None
    width = int.from_bytes(flat[24:27], "little") + 1
    height = int.from_bytes(flat[27:30], "little") + 1
    # Without the flag, libwebp leaves the chunk unread too.
    orientation = _webp_orientation(flat, 20 + length + length % 2, size + 8) if flat[20] & _VP8X_EXIF else 1
    return Geometry("webp", width, height, orientation)


def _webp_orientation(flat: Flat, position: int, end: int) -> int:
    end = min(end, len(flat))
    try:
        for _ in range(_MAX_HOPS):
            name, length = _unpack_riff_chunk(flat, position)
            if name == b"EXIF":
                return _exif_orientation(flat, position + 8, min(position + 8 + length, end))
            position += 8 + length + length % 2
            if position >= end:
                break
    except struct.error:
        pass
    return 1


# --- GIF (87a, 89a) -------------------------------------------------------------------------------------------------

_unpack_gif_head: Final = Struct("<6sHHB").unpack_from  # signature, width and height of the screen, flags
_unpack_gif_frame: Final = Struct("<HHHH").unpack_from  # left, top, width, height


def _parse_gif(flat: Flat) -> Geometry | None:
    signature, width, height, flags = _unpack_gif_head(flat)
    if signature not in {b"GIF89a", b"GIF87a"}:
        return None
    # A first frame that sticks out of the screen enlarges it, as in Pillow.
    right, bottom = _gif_first_frame(flat, 13 + (6 << (flags & 7) if flags & 0x80 else 0))
    width, height = max(width, right), max(height, bottom)
    return Geometry("gif", width, height) if width and height else None


def _gif_first_frame(flat: Flat, position: int) -> tuple[int, int]:
    """Return the right and bottom edge of the first frame, zeros if none is found."""
    in_extension = False
    try:
        for _ in range(_MAX_HOPS):
            byte = flat[position]
            if in_extension:  # the length of a sub-block; an empty one ends the extension
                in_extension = byte != 0
                position += 1 + byte
            elif byte == 0x21:
                in_extension = True
                position += 2
            elif byte == 0x2C:
                left, top, width, height = _unpack_gif_frame(flat, position + 1)
                return left + width, top + height
            elif byte == 0x3B:  # the trailer
                break
            else:  # no block, as a zero too many behind the last one: passed, as Pillow does
                position += 1
    except (struct.error, IndexError):
        pass
    return 0, 0


# --- BMP ------------------------------------------------------------------------------------------------------------

_BMP_CORE: Final = Struct("<IHHHH")  # size of this header, width, height, planes, bits a pixel
_BMP_INFO: Final = Struct("<IiiHH")
# OS/2 1 and 2 (short and long), and Windows: info, with masks, with alpha, version 4, version 5.
_BMP_HEADERS: Final = {12: _BMP_CORE, **dict.fromkeys((16, 64, 40, 52, 56, 108, 124), _BMP_INFO)}
_BMP_BITS: Final = frozenset((0, 1, 2, 4, 8, 16, 24, 32))  # 0: a JPEG or PNG inside


def _parse_bmp(flat: Flat) -> Geometry | None:
    header = _BMP_HEADERS.get(int.from_bytes(flat[14:18], "little"))
    if header is None or flat[1] != 0x4D:
        return None
    _, width, height, _, bits = header.unpack_from(flat, 14)
    # A negative height means rows from top to bottom. Two letters are a weak signature, so the rest must make sense.
    return Geometry("bmp", width, abs(height)) if width > 0 and height and bits in _BMP_BITS else None


# --- TIFF 6.0 and BigTIFF, and EXIF, which is a TIFF without pixels -------------------------------------------------

_TAG_WIDTH, _TAG_HEIGHT, _TAG_ORIENTATION = 256, 257, 274
# Tags are unique and ascend, so in an orderly directory at most 274 entries stand before the last one sought.
_MAX_ENTRIES: Final = 512
_INTEGER_SIZES: Final = {1: 1, 3: 2, 4: 4, 16: 8}  # BYTE, SHORT, LONG, LONG8


class _TiffLayout(NamedTuple):
    """How a TIFF writes its directory: byte order, and in BigTIFF wider fields."""

    order: Literal["little", "big"]
    offset: Struct
    entries: Struct  # how many
    entry: Struct  # tag, type, count, value


_TIFF_LAYOUTS: Final = {
    b"II*\0": _TiffLayout("little", Struct("<4xI"), Struct("<H"), Struct("<HHI4s")),
    b"MM\0*": _TiffLayout("big", Struct(">4xI"), Struct(">H"), Struct(">HHI4s")),
    b"II+\0": _TiffLayout("little", Struct("<8xQ"), Struct("<Q"), Struct("<HHQ8s")),
    b"MM\0+": _TiffLayout("big", Struct(">8xQ"), Struct(">Q"), Struct(">HHQ8s")),
}


def _parse_tiff(flat: Flat) -> Geometry | None:
    width, height, orientation = _read_tags(flat, 0, len(flat), (_TAG_WIDTH, _TAG_HEIGHT, _TAG_ORIENTATION))
    if not width or not height:
        return None
    return Geometry("tiff", width, height, orientation if 1 <= orientation <= 8 else 1)


def _exif_orientation(flat: Flat, start: int, end: int) -> int:
    """Return the orientation that the EXIF block at ``[start, end)`` gives, 1 if it gives none; never raises."""
    try:
        if flat[start] == 0x45:  # "Exif\0\0", which PNG and WebP do without and many of their writers do not
            start += 6
        (orientation,) = _read_tags(flat, start, min(end, len(flat)), (_TAG_ORIENTATION,))
    except (struct.error, IndexError):
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def _read_tags(flat: Flat, start: int, end: int, tags: tuple[int, ...]) -> list[int]:
    """Return single integers from the first directory of the TIFF at ``[start, end)``, 0 where a tag has none.

    Raises:
        struct.error: The TIFF ends before its directory.
    """
    layout = _TIFF_LAYOUTS.get(bytes(flat[start : start + 4]))
    if layout is None:
        return [0] * len(tags)
    (offset,) = layout.offset.unpack_from(flat, start)
    if offset > end - start:  # before it is used as an index: 64 bits may not fit one
        return [0] * len(tags)
    (count,) = layout.entries.unpack_from(flat, start + offset)
    first = start + offset + layout.entries.size
    directory = bytes(flat[first : min(end, first + min(count, _MAX_ENTRIES) * layout.entry.size)])
    return [_read_tag(directory, layout, tag) for tag in tags]


def _read_tag(directory: bytes, layout: _TiffLayout, tag: int) -> int:
    needle, size = tag.to_bytes(2, layout.order), layout.entry.size
    position = directory.find(needle)
    while position > 0 and position % size:  # inside an entry
        position = directory.find(needle, position + 1)
    if position < 0 or position + size > len(directory):
        return 0
    _, type_, values, value = layout.entry.unpack_from(directory, position)
    width = _INTEGER_SIZES.get(type_, 0) if values == 1 else 0
    return int.from_bytes(value[:width], layout.order)


# --- kinds that begin with a zero ------------------------------------------------------------------------------------

_unpack_icon_count: Final = Struct("<4xH").unpack_from


def _parse_zero(flat: Flat) -> Geometry | None:
    kind = sniff_kind(flat)
    if kind == "jxl":
        return _parse_jxl(flat)
    if kind == "ico":
        return _parse_ico(flat)
    found = parse_heif(flat, is_avif=kind == "avif") if kind in TURNED_BY_FORMAT else None
    return Geometry(kind, *found) if kind and found else None


def _parse_jxl(flat: Flat) -> Geometry | None:
    found = parse_jxl(flat)
    return Geometry("jxl", *found) if found else None


def _parse_ico(flat: Flat) -> Geometry | None:
    """Give the size of the largest icon, which is also the one that Pillow opens and webshart gives."""
    (count,) = _unpack_icon_count(flat)
    entries = bytes(flat[6 : 6 + 16 * count])
    if len(entries) < 16 * count:
        return None
    sides = zip(entries[::16], entries[1::16], strict=True)  # 0 stands for 256
    width, height = max(((w or 256, h or 256) for w, h in reversed(list(sides))), key=lambda side: side[0] * side[1])
    return Geometry("ico", width, height)


# By the first byte; each checks the rest of its signature.
_PARSERS: Final[dict[int, Callable[[Flat], Geometry | None]]] = {
    0: _parse_zero,
    0xFF: _parse_jpeg,
    0x89: _parse_png,
    ord("R"): _parse_webp,
    ord("G"): _parse_gif,
    ord("B"): _parse_bmp,
    ord("I"): _parse_tiff,
    ord("M"): _parse_tiff,
}
PARSED_FIRST_BYTES: Final = frozenset(_PARSERS)
"""What payloads may begin with that `parse_geometry` understands."""
