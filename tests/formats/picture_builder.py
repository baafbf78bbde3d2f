"""Pictures that real encoders wrote, turned by rewriting a few of their fields."""

from __future__ import annotations

import functools
import io
import itertools
import struct

CORNER = 8
"""Pixels of the red square that `marked` puts into the upper left corner, a side."""


def marked(size):
    """A white picture with a red square in the corner that is stored first."""
    from PIL import Image

    image = Image.new("RGB", size, "white")
    image.paste("red", (0, 0, CORNER, CORNER))
    return image


@functools.cache
def encode(kind, size=(40, 24), **options):
    from PIL import Image

    learn_formats()
    if "orientation" in options:
        exif = Image.Exif()
        exif[274] = options.pop("orientation")
        options["exif"] = exif.tobytes()
    file = io.BytesIO()
    marked(size).save(file, kind, **options)
    return file.getvalue()


def learn_formats():
    """Teach Pillow what it knows by plug-ins only."""
    import pillow_heif
    import pillow_jxl  # noqa: F401

    pillow_heif.register_heif_opener()


def decode(payload):
    from PIL import Image

    learn_formats()
    image = Image.open(io.BytesIO(payload))
    image.load()
    return image


def is_shown_as(payload, geometry):
    """Tell whether a picture of `marked`, decoded and turned as EXIF asks, is as a geometry has it shown."""
    from PIL import ImageOps

    shown = ImageOps.exif_transpose(decode(payload))
    wanted = turn(marked((geometry.width, geometry.height)), geometry.orientation)
    return shown.size == geometry.display_size == wanted.size and find_mark(shown) == find_mark(wanted)


def find_mark(image):
    """Tell in which corner of a decoded picture the mark is: (is right, is low)."""
    from PIL import ImageStat

    width, height = image.size
    half = CORNER // 2
    boxes = {
        (right, low): (
            (width - half) * right,
            (height - half) * low,
            (width - half) * right + half,
            (height - half) * low + half,
        )
        for right in (False, True)
        for low in (False, True)
    }
    greens = {corner: ImageStat.Stat(image.convert("RGB").crop(box)).mean[1] for corner, box in boxes.items()}
    found = [corner for corner, green in greens.items() if green < 100]
    assert len(found) == 1, greens
    return found[0]


def turn(image, orientation):
    """Turn a picture as stored to how EXIF has it shown."""
    from PIL import Image

    how = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(orientation)
    return image if how is None else image.transpose(how)


# --- ISO boxes ---


def box(name, *content, wide=False):
    body = b"".join(content)
    if wide:
        return struct.pack(">I4sQ", 1, name, 16 + len(body)) + body
    return struct.pack(">I4s", 8 + len(body), name) + body


def split_boxes(data):
    """Return (name, content) of the boxes in `data`; those in `meta` come behind its version."""
    boxes = []
    while data:
        length, name = struct.unpack_from(">I4s", data)
        boxes.append((name, data[8:length]))
        data = data[length:]
    return boxes


def irot(quarters):
    return box(b"irot", bytes([quarters]))


def imir(axis):
    return box(b"imir", bytes([axis]))


def clap(width, height, right=(0, 1), down=(0, 1)):
    return box(b"clap", struct.pack(">IIIIiIiI", *_fraction(width), *_fraction(height), *right, *down))


def _fraction(value):
    return value if isinstance(value, tuple) else (value, 1)


def with_properties(payload, *added, drop=(), wide=False, long=False):
    """Give the primary item of an AVIF or HEIC more properties, and take those away that `drop` names.

    Args:
        payload: What an encoder wrote.
        added: Properties, whole boxes, which come last.
        drop: Names of properties that the item loses.
        wide: Use 64-bit lengths for the boxes around, and two bytes for the number of a property.
        long: Use four bytes for the numbers of items.
    """
    top = split_boxes(payload)
    meta = dict(split_boxes(dict(top)[b"meta"][4:]))
    primary = struct.unpack(">H", meta[b"pitm"][4:])[0]
    properties = split_boxes(dict(split_boxes(meta[b"iprp"]))[b"ipco"])
    items = _split_associations(dict(split_boxes(meta[b"iprp"]))[b"ipma"])
    numbers = [number for number in items[primary] if properties[(number & 0x7F) - 1][0] not in drop]
    items[primary] = numbers + [0x80 | (len(properties) + 1 + place) for place in range(len(added))]
    content = b"".join(box(*one) for one in properties) + b"".join(added)
    associations = _join_associations(items, wide=wide, long=long)
    meta[b"iprp"] = box(b"ipco", content, wide=wide) + box(b"ipma", associations)
    if long:
        meta[b"pitm"] = struct.pack(">II", 1 << 24, primary)
    before = len(payload) - len(dict(top)[b"mdat"])
    parts = {name: box(name, content, wide=wide and name == b"iprp") for name, content in meta.items()}
    length = sum(map(len, parts.values())) + (20 if wide else 12)
    after = sum(8 + len(content) for name, content in top if name == b"ftyp") + length + 8
    parts[b"iloc"] = box(b"iloc", _shift_locations(meta[b"iloc"], after - before))
    rebuilt = box(b"meta", dict(top)[b"meta"][:4], *parts.values(), wide=wide)
    return b"".join(rebuilt if name == b"meta" else box(name, content) for name, content in top)


def _split_associations(content):
    assert content[:4] == b"\0\0\0\0"
    (count,) = struct.unpack_from(">I", content, 4)
    items, at = {}, 8
    for _ in range(count):
        item, size = struct.unpack_from(">HB", content, at)
        items[item] = list(content[at + 3 : at + 3 + size])
        at += 3 + size
    assert at == len(content)
    return items


def _join_associations(items, *, wide, long):
    content = bytes([long, 0, 0, wide]) + struct.pack(">I", len(items))
    for item, numbers in items.items():
        content += struct.pack(">IB" if long else ">HB", item, len(numbers))
        for number in numbers:
            content += struct.pack(">H", (number & 0x80) << 8 | number & 0x7F) if wide else bytes([number])
    return content


def _shift_locations(content, by):
    """Move what `iloc` says of the file itself by some bytes."""
    data = bytearray(content)
    version, sizes, more = data[0], data[4], data[5]
    at = 6
    (count,) = struct.unpack_from(">H", data, at)
    at += 2
    for _ in range(count):
        at += 2
        in_file = version == 0 or data[at + 1] & 15 == 0
        at += (2 if version else 0) + 2
        base = more >> 4
        moved = int.from_bytes(data[at : at + base], "big") and in_file
        if moved:
            data[at : at + base] = (int.from_bytes(data[at : at + base], "big") + by).to_bytes(base, "big")
        at += base
        (extents,) = struct.unpack_from(">H", data, at)
        at += 2
        for _ in range(extents):
            at += more & 15 if version else 0
            place = slice(at, at + (sizes >> 4))
            if in_file and not moved:
                data[place] = (int.from_bytes(data[place], "big") + by).to_bytes(sizes >> 4, "big")
            at += (sizes >> 4) + (sizes & 15)
    assert at == len(data)
    return bytes(data)


def tiled(columns, rows, *turns, size=None):
    """A HEIC that a derived item puts together from tiles of 64 by 64 pixels, each the same and with a mark of its own.

    Args:
        columns: Tiles in a row.
        rows: Rows of tiles.
        turns: Further properties of the whole.
        size: Of the whole, if it is less than the tiles give.
    """
    width, height = size or (64 * columns, 64 * rows)
    source = dict(split_boxes(encode("HEIF", (64, 64))))
    hvcc = dict(split_boxes(dict(split_boxes(dict(split_boxes(source[b"meta"][4:]))[b"iprp"]))[b"ipco"]))[b"hvcC"]
    whole = columns * rows + 1
    shared = [box(b"hvcC", hvcc), box(b"ispe", struct.pack(">III", 0, 64, 64))]
    own = [box(b"ispe", struct.pack(">III", 0, width, height)), *turns]
    items = {tile: [0x81, 2] for tile in range(1, whole)} | {whole: [3 + place for place in range(len(own))]}
    infos = [
        box(b"infe", struct.pack(">IHH4sx", 2 << 24, item, 0, b"grid" if item == whole else b"hvc1")) for item in items
    ]
    references = box(b"dimg", struct.pack(f">HH{whole - 1}H", whole, whole - 1, *range(1, whole)))
    layout = struct.pack(">BBBBHH", 0, 0, rows - 1, columns - 1, width, height)

    def meta(pixels):
        locations = struct.pack(">IBBH", 1 << 24, 0x44, 0, whole)
        for item in items:
            start, length = (0, len(layout)) if item == whole else (pixels, len(source[b"mdat"]))
            locations += struct.pack(">HHHHII", item, item == whole, 0, 1, start, length)
        return box(
            b"meta",
            bytes(4),
            box(b"hdlr", struct.pack(">II4s13x", 0, 0, b"pict")),
            box(b"pitm", struct.pack(">IH", 0, whole)),
            box(b"iloc", locations),
            box(b"iinf", struct.pack(">IH", 0, whole), *infos),
            box(b"iref", bytes(4), references),
            box(b"iprp", box(b"ipco", *shared, *own), box(b"ipma", _join_associations(items, wide=False, long=False))),
            box(b"idat", layout),
        )

    head = box(b"ftyp", b"heic\0\0\0\0mif1heic")
    return head + meta(len(head) + len(meta(0)) + 8) + box(b"mdat", source[b"mdat"])


# --- JPEG XL ---


def turned_codestream(codestream, orientation):
    """Write an orientation into the header of a JPEG XL codestream that has none."""
    value = int.from_bytes(codestream, "little")
    at = 16

    def take(count):
        nonlocal at
        at += count
        return value >> (at - count) & ((1 << count) - 1)

    def skip_side(is_small):
        take(5 if is_small else (9, 13, 18, 30)[take(2)])

    is_small = take(1)
    skip_side(is_small)
    if take(3) == 0:
        skip_side(is_small)
    size_end = at
    is_default = take(1)
    # Eight bits an integer sample, 16-bit buffers, no extra channels, XYB, sRGB: what the default stands for.
    rest = [0, 0, 0, 1, 0, 0, 1, 1]
    if not is_default:
        assert not take(1), "it has an orientation already"
        rest = [take(1) for _ in range(8)]
        assert rest[:3] == [0, 0, 0], "8 bits a sample"
        assert rest[4:6] == [0, 0], "no extra channels"
        assert rest[7], "default colours"
        assert take(2) == 0, "no extensions"
    assert take(1), "default transform"
    header_end = -(-at // 8)
    bits = [value >> place & 1 for place in range(size_end)]
    bits += [0, 1]  # not all default; extra fields
    bits += [orientation - 1 >> place & 1 for place in range(3)]
    bits += [0, 0, 0]  # intrinsic size, preview, animation
    bits += [*rest, 1, 0, 0, 1]  # default tone mapping, no extensions, default transform
    header = sum(bit << place for place, bit in enumerate(bits)).to_bytes(-(-len(bits) // 8), "little")
    return header + codestream[header_end:]


JXL_SIGNATURE = box(b"JXL ", b"\r\n\x87\n") + box(b"ftyp", b"jxl \0\0\0\0jxl ")


def in_container(codestream, *cuts, before=(), wide=False):
    """Put a codestream into boxes: one, or several that end at `cuts`."""
    if not cuts:
        return JXL_SIGNATURE + b"".join(before) + box(b"jxlc", codestream, wide=wide)
    edges = [0, *cuts, len(codestream)]
    parts = [codestream[start:end] for start, end in itertools.pairwise(edges)]
    numbered = [
        struct.pack(">I", place | (1 << 31 if place == len(parts) - 1 else 0)) + part
        for place, part in enumerate(parts)
    ]
    return JXL_SIGNATURE + b"".join(before) + b"".join(box(b"jxlp", part, wide=wide) for part in numbered)
