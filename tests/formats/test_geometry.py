"""The geometry of pictures, against Pillow and simplejpeg, on odd, cut, mutated and hostile bytes."""

from __future__ import annotations

import dataclasses
import functools
import io
import mmap
import random
import struct
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.picture_builder import encode, in_container, turned_codestream
from shardset.formats.geometry import Geometry, parse_geometry, sniff_kind
from timing import least_seconds

PHOTOGRAPHS = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples" / "data").iterdir()
    if path.suffix in {".jpg", ".png", ".webp"}
)
WIDTH, HEIGHT = 30, 20


@functools.cache
def encoded(kind, mode="RGB", size=(WIDTH, HEIGHT), orientation=None, endian="<", **options):
    from PIL import Image

    image = Image.frombytes("L", size, random.Random(0).randbytes(size[0] * size[1])).convert(mode)
    if orientation is not None and kind == "tiff":
        options["tiffinfo"] = {274: orientation}
    elif orientation is not None:
        exif = Image.Exif()
        exif.endian = endian
        exif[271], exif[274], exif[305] = "maker", orientation, "software"
        options["exif"] = exif.tobytes()
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def displayed_size(payload):
    """What Pillow shows: decoded, and turned as EXIF says."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(payload)) as image:
        image.load()
        return ImageOps.exif_transpose(image).size


def segment(marker, content=b""):
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def frame(marker=0xC0, width=WIDTH, height=HEIGHT):
    return segment(marker, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")


def directory(entries, order="<"):
    """A TIFF with one directory of (tag, type, count, value) whose values fit."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    body = struct.pack(order + "IH", 8, len(entries))
    for tag, type_, count, value in entries:
        body += struct.pack(order + "HHI", tag, type_, count) + (
            struct.pack(order + "H2x", value) if type_ == 3 else struct.pack(order + "I", value)
        )
    return head + body + b"\0\0\0\0"


def exif_segment(*entries, order="<", tail=b""):
    return segment(0xE1, b"Exif\0\0" + directory(entries, order) + tail)


def oriented(value):
    return exif_segment((274, 3, 1, value))


def chunk(name, content=b""):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def riff(*chunks):
    body = b"WEBP" + b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2) for name, content in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def vp8x(flags, width=WIDTH, height=HEIGHT):
    return b"VP8X", bytes([flags, 0, 0, 0]) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")


SMALL = {
    "jpeg": lambda: encoded("jpeg", orientation=6),
    "png": lambda: encoded("png", orientation=6),
    "webp": lambda: encoded("webp", orientation=6),
    "lossless webp": lambda: encoded("webp", lossless=True),
    "gif": lambda: encoded("gif", "L"),
    "bmp": lambda: encoded("bmp"),
    "tiff": lambda: encoded("tiff", orientation=6),
    "avif": lambda: encode("AVIF", orientation=6),
    "heic": lambda: encode("HEIF", orientation=6),
    "jxl": lambda: turned_codestream(encode("JXL"), 6),
    "jxl in boxes": lambda: in_container(turned_codestream(encode("JXL"), 6), 3, 9),
    "ico": lambda: encode("ICO", (48, 32), sizes=((16, 16), (48, 32))),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jpeg", {}),
        ("jpeg", {"endian": ">"}),
        ("png", {}),
        ("png", {"endian": ">"}),
        ("webp", {}),
        ("webp", {"endian": ">", "lossless": True}),
        ("tiff", {}),
        ("tiff", {"mode": "I;16B"}),  # Pillow writes this mode, and this alone, in the other byte order
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_every_orientation_is_shown_as_pillow_shows_it(kind, options, orientation):
    payload = encoded(kind, orientation=orientation, **options)
    assert (b"MM\0*" in payload) == bool({">", "I;16B"} & set(map(str, options.values())))
    geometry = parse_geometry(payload)
    assert geometry == Geometry(kind, WIDTH, HEIGHT, orientation)
    assert geometry.display_size == displayed_size(payload)


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.stem)
def test_photographs_have_the_size_that_pillow_finds(path):
    payload = path.read_bytes()
    geometry = parse_geometry(payload)
    assert geometry.kind == {".jpg": "jpeg"}.get(path.suffix, path.suffix[1:])
    assert geometry.display_size == displayed_size(payload)
    assert geometry.orientation == (6 if "rocket" in path.name else 1)


def test_the_ten_photographs_are_there():
    assert len(PHOTOGRAPHS) == 10


def test_the_turned_photograph_keeps_its_stored_size():
    rocket = next(path for path in PHOTOGRAPHS if "rocket" in path.name)
    assert parse_geometry(rocket.read_bytes()) == Geometry("jpeg", 427, 640, 6)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("jpeg", "L", {}),
        ("jpeg", "CMYK", {}),
        ("jpeg", "RGB", {"progressive": True}),
        ("jpeg", "RGB", {"subsampling": 2, "comment": b"\xff\xc0" * 50}),
        ("jpeg", "RGB", {"icc_profile": b"\xff\xc0\x00\x11\x08\x00\x01\x00\x01\x03" * 20000}),  # four segments
        ("png", "1", {}),
        ("png", "P", {}),
        ("png", "RGBA", {}),
        ("png", "I;16", {}),
        ("png", "RGB", {"dpi": (72, 72), "icc_profile": b"eXIf" * 5000}),
        ("webp", "RGBA", {}),
        ("webp", "RGBA", {"lossless": True}),
        ("webp", "RGB", {"icc_profile": b"EXIF" * 500 + b"!"}),
        ("gif", "L", {}),
        ("gif", "P", {"comment": b"," * 600}),
        ("bmp", "1", {}),
        ("bmp", "P", {}),
        ("bmp", "RGB", {}),
        ("bmp", "RGBA", {}),
        ("tiff", "1", {}),
        ("tiff", "RGB", {"compression": "tiff_lzw"}),
        ("tiff", "F", {}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (30, 20), (257, 3), (5, 1000)])
def test_modes_and_options_do_not_hide_the_size(kind, mode, options, size):
    payload = encoded(kind, mode, size, **options)
    assert parse_geometry(payload) == Geometry(kind, *size) == Geometry(kind, *displayed_size(payload))


@pytest.mark.parametrize("kind", SMALL)
def test_a_payload_cut_anywhere_gives_the_same_size_or_none(kind):
    payload = SMALL[kind]()
    whole = parse_geometry(payload)
    found = [parse_geometry(payload[:length]) for length in range(len(payload))]
    assert found[0] is None
    for geometry in found:
        assert geometry is None or geometry in {whole, dataclasses.replace(whole, orientation=1)}
    for length in range(65):
        assert sniff_kind(payload[:length]) in {None, whole.kind}


def mutated(payload, source):
    data = bytearray(payload)
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        place = source.randrange(min(len(data), source.choice((40, 400, len(data)))))
        match source.randrange(4):
            case 0:
                data[place] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
            case 1:
                data[place : place + 4] = source.randbytes(4)
            case 2:
                del data[place : place + source.randrange(1, 9)]
            case 3:
                data[place:place] = data[place : place + source.randrange(1, 400)]
        data = data or bytearray(b"\0")
    return bytes(data)


def test_mutated_pictures_never_raise_and_never_take_long(fuzz_count):
    source = random.Random(20)
    payloads = [make() for make in SMALL.values()]
    started, understood = time.thread_time(), 0
    for turn in range(fuzz_count):
        payload = mutated(payloads[turn % len(payloads)], source)
        geometry = parse_geometry(payload)
        if geometry is not None:
            understood += 1
            assert geometry.width > 0
            assert geometry.height > 0
            assert 1 <= geometry.orientation <= 8
            assert geometry.kind == sniff_kind(payload[:64])
    assert 0 < understood < fuzz_count
    assert time.thread_time() - started < 1 + fuzz_count / 100


SIGNATURES = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"RIFF\0\1\0\0WEBPVP8X\x0a\0\0\0\x08", b"GIF89a"]
SIGNATURES += [b"BM", b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08", b"II+\0\x08\0\0\0", b"MM\0+"]


@given(st.sampled_from(SIGNATURES), st.binary(max_size=200))
def test_any_bytes_behind_a_signature_are_understood_or_none(signature, rest):
    payload = signature + rest
    geometry = parse_geometry(payload)
    if geometry is not None:
        assert min(geometry.width, geometry.height, geometry.orientation) >= 1
        assert geometry.kind == sniff_kind(payload[:64])


HOSTILE = {
    "empty segments": lambda: b"\xff\xd8" + b"\xff\xe0\0\2" * 4_000_000,
    "EXIF segments": lambda: b"\xff\xd8" + oriented(6) * 400_000,
    "bare markers": lambda: b"\xff\xd8" + b"\xff\xd0" * 8_000_000,
    "fill bytes": lambda: b"\xff\xd8" + b"\xff" * 16_000_000,
    "stray bytes": lambda: b"\xff\xd8\xff\xe0\0\2" + b"\0" * 16_000_000,
    "stuffed bytes": lambda: b"\xff\xd8" + b"\xff\0" * 8_000_000,
    "empty chunks": lambda: encoded("png")[:33] + chunk(b"tEXt") * 1_300_000,
    "empty RIFF chunks": lambda: riff(vp8x(8), *[(b"ALPH", b"")] * 1_000_000),
    "sub-blocks": lambda: b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1a" * 8_000_000,
    "extensions": lambda: b"GIF89a\1\0\1\0\0\0\0" + b"!\xfe\0" * 5_000_000,
    "entries": lambda: b"II*\0\x08\0\0\0\xff\xff" + b"\x12\1" * 8_000_000,
    "BigTIFF entries": lambda: b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0" + b"\xff" * 8 + b"\x12\1" * 8_000_000,
    "zeros behind an EXIF length": lambda: (
        b"\xff\xd8\xff\xe1\xff\xffExif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\1" * 8_000_000
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_cost_neither_time_nor_memory(name):
    view = memoryview(HOSTILE[name]())
    tracemalloc.start()
    try:
        parse = functools.partial(parse_geometry, view)
        assert least_seconds(parse, 0.5, clock=time.thread_time) < 0.5
        assert least_seconds(functools.partial(sniff_kind, view), 0.5, clock=time.thread_time) < 0.5
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", SMALL)
def test_a_view_of_a_large_map_is_not_copied(kind, tmp_path):
    payload = SMALL[kind]()
    path = tmp_path / "shard"
    with path.open("wb") as file:
        file.write(b"\xff" * 5 + payload)
        file.truncate(64_000_000)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as whole,
        whole[5:] as view,
    ):
        tracemalloc.start()
        try:
            assert parse_geometry(view) == parse_geometry(payload)
            assert tracemalloc.get_traced_memory()[1] < 50_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("kind", SMALL)
def test_every_kind_of_buffer_gives_the_same(kind):
    payload = SMALL[kind]()
    wanted = parse_geometry(payload)
    even = payload + b"\0" * (len(payload) % 2)
    spread = np.repeat(np.frombuffer(payload, np.uint8), 2)
    buffers = [
        bytearray(payload),
        memoryview(payload),
        memoryview(payload).cast("b"),
        memoryview(payload).cast("c"),
        memoryview(bytearray(b"x" + payload))[1:],
        memoryview(spread)[::2],
        memoryview(payload[::-1])[::-1],
        np.frombuffer(even, np.uint8).reshape(2, -1),
        np.frombuffer(even, "<u2"),
        np.frombuffer(even, [("a", "u1"), ("b", "u1")]),
    ]
    for buffer in buffers:
        assert parse_geometry(buffer) == wanted
        assert sniff_kind(buffer) == wanted.kind


@pytest.mark.parametrize("payload", [b"", bytearray(), memoryview(b""), np.zeros((0, 3), np.uint8)])
def test_nothing_has_no_geometry(payload):
    assert parse_geometry(payload) is None
    assert sniff_kind(payload) is None


def test_a_geometry_is_a_value():
    geometry = Geometry("png", 3, 2)
    assert geometry.orientation == 1
    assert geometry == Geometry("png", 3, 2, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.width = 4


@pytest.mark.parametrize(
    "payload",
    [
        b"a cat on a mat",
        b'{"caption": "a cat"}',
        b"II is a Roman numeral, and so are",
        b"MMM, a thousand words, a thousand words",
        b"BM is how many a sentence could start, and it is no picture",
        b"GIFT",
        b"GIF88a" + b"\1" * 20,
        b"RIFF\0\0\0\0WAVEfmt " + bytes(40),
        b"\x89HDF\r\n\x1a\n" + bytes(40),
        b"\xff\xfb\x90\x44" + bytes(40),
    ],
)
def test_what_is_no_picture_has_no_geometry(payload):
    assert parse_geometry(payload) is None


# --- JPEG ---


FRAME_MARKERS = [marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC)]


@pytest.mark.parametrize("marker", FRAME_MARKERS)
def test_every_start_of_frame_gives_the_size(marker):
    assert parse_geometry(b"\xff\xd8" + frame(marker)) == Geometry("jpeg", WIDTH, HEIGHT)


def test_a_hierarchical_file_has_the_size_of_its_whole_picture():
    assert parse_geometry(b"\xff\xd8" + frame(0xDE) + frame(0xC0, 15, 10)) == Geometry("jpeg", WIDTH, HEIGHT)


@pytest.mark.parametrize("marker", [0xC4, 0xC8, 0xCC, 0xDB, 0xDD, 0xE0, 0xE1, 0xED, 0xEE, 0xEF, 0xF7, 0xFE])
def test_other_segments_that_look_like_a_frame_are_passed(marker):
    payload = b"\xff\xd8" + frame(marker, 1, 1) + frame(0xC2)
    assert parse_geometry(payload) == Geometry("jpeg", WIDTH, HEIGHT)


@pytest.mark.parametrize("marker", [0xD8, 0xD9, 0xDA])
def test_a_scan_or_an_end_before_any_frame_leaves_no_geometry(marker):
    assert parse_geometry(b"\xff\xd8" + segment(marker, b"\1\2\3") + frame()) is None


@pytest.mark.parametrize(
    "broken",
    [
        frame(height=0),  # told after the scan, which decoders do not support
        frame(width=0),
        segment(0xC0, b"\x08\0\x14\0\x1e\x03\1\x11\0"),  # three components announced, one there
    ],
)
def test_a_header_that_decoders_refuse_leaves_no_geometry(broken):
    assert parse_geometry(b"\xff\xd8" + broken + frame()) is None


@pytest.mark.parametrize(
    "between",
    [
        b"\xff",
        b"\xff" * 1000,
        b"\xff\xd0\xff\xd7",
        b"\xff\x01",
        b"stray bytes",
        b"\0\xff\0\xff\xff\0",
        segment(0xDD, b"\0\4"),
        segment(0xFE, b"\xff\xd9\xff\xc0"),
        b"\xff\xe0\0\0",
        b"\xff\xe1\0\1",
    ],
)
def test_what_libjpeg_passes_between_segments_is_passed(between):
    import simplejpeg

    payload = encoded("jpeg")
    at = 2
    while payload[at : at + 2] != b"\xff\xc0":  # put it before each segment up to the frame
        odd = payload[:at] + between + payload[at:]
        if at > 2 or between[0] == 0xFF:  # libjpeg starts anyhow; others want a marker behind the first one
            height, width, *_ = simplejpeg.decode_jpeg_header(odd, strict=False)
            assert parse_geometry(odd) == Geometry("jpeg", width, height)
        at += 2 + int.from_bytes(payload[at + 2 : at + 4], "big")
    assert at > 2


def test_a_file_of_mostly_stray_bytes_is_given_up():
    stray = segment(0xE0) + b"\0" * 1000
    assert parse_geometry(b"\xff\xd8" + stray * 65 + frame()) == Geometry("jpeg", WIDTH, HEIGHT)
    assert parse_geometry(b"\xff\xd8" + stray * 66 + frame()) is None


def test_a_restart_interval_and_restart_markers_do_not_matter():
    payload = encoded("jpeg", size=(64, 64))
    scan = payload.index(b"\xff\xda")
    payload = payload[:scan] + segment(0xDD, b"\0\1") + payload[scan:-2] + b"\xff\xd0" + payload[-2:]
    assert parse_geometry(payload) == Geometry("jpeg", 64, 64)


def test_the_frame_of_a_thumbnail_is_not_taken():
    from PIL import Image

    thumbnail = encoded("jpeg", size=(16, 12))
    payload = encoded("jpeg")
    payload = payload[:2] + exif_segment((274, 3, 1, 8), tail=thumbnail) + payload[2:]
    assert parse_geometry(payload) == Geometry("jpeg", WIDTH, HEIGHT, 8)
    assert Image.open(io.BytesIO(payload)).size == (WIDTH, HEIGHT)


def test_a_frame_behind_megabytes_of_profile_is_found():
    profile = segment(0xE2, b"ICC_PROFILE\0" + bytes(65000)) * 255
    payload = b"\xff\xd8" + profile + oriented(3) + frame()
    assert parse_geometry(memoryview(payload)) == Geometry("jpeg", WIDTH, HEIGHT, 3)


def test_the_first_exif_segment_counts_and_xmp_is_passed():
    xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<tiff:Orientation>3</tiff:Orientation>")
    assert parse_geometry(b"\xff\xd8" + xmp + frame()).orientation == 1
    assert parse_geometry(b"\xff\xd8" + xmp + oriented(6) + oriented(3) + frame()).orientation == 6
    assert parse_geometry(b"\xff\xd8" + exif_segment((271, 3, 1, 3)) + oriented(3) + frame()).orientation == 1


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("entries", "orientation"),
    [
        ([(274, 3, 1, 5)], 5),
        ([(274, 4, 1, 5)], 5),
        ([(274, 3, 1, 0)], 1),
        ([(274, 3, 1, 9)], 1),
        ([(274, 3, 1, 65535)], 1),
        ([(274, 4, 1, 0x00060000)], 1),
        ([(274, 3, 2, 5)], 1),
        ([(274, 3, 0, 5)], 1),
        ([(274, 2, 1, 5)], 1),
        ([(305, 3, 1, 7), (274, 3, 1, 5)], 5),  # out of order
        ([(271, 4, 1, 0x01120112), (272, 4, 0x01120112, 274), (274, 3, 1, 5)], 5),  # the tag as a value before it
        ([(271, 4, 1, 0x01120112), (272, 3, 1, 3)], 1),
        ([(tag, 3, 1, 3) for tag in range(274)] + [(274, 3, 1, 5)], 5),  # as many as can stand before it
        ([], 1),
    ],
)
def test_orientation_is_read_as_one_integer_from_one_to_eight(entries, orientation, order):
    payload = b"\xff\xd8" + exif_segment(*entries, order=order) + frame()
    assert parse_geometry(payload) == Geometry("jpeg", WIDTH, HEIGHT, orientation)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"II",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0",
        b"II*\0\x08\0\0\0\xff\xff",
        b"MM*\0" + directory([(274, 3, 1, 6)], ">")[4:],
        b"IM*\0" + directory([(274, 3, 1, 6)])[4:],
        b"II+\0" + directory([(274, 3, 1, 6)])[4:],
        directory([(274, 3, 1, 6)])[:-5],
    ],
)
def test_a_broken_exif_block_leaves_the_size_as_it_is(block):
    payload = b"\xff\xd8" + segment(0xE1, b"Exif\0\0" + block) + frame()
    assert parse_geometry(payload) == Geometry("jpeg", WIDTH, HEIGHT)


def test_an_exif_directory_is_not_read_beyond_its_segment():
    block = directory([(274, 3, 1, 6)])
    payload = b"\xff\xd8" + segment(0xE1, b"Exif\0\0" + block[:12]) + segment(0xFE, block[12:]) + frame()
    assert parse_geometry(payload) == Geometry("jpeg", WIDTH, HEIGHT)


# --- PNG ---


def test_an_exif_chunk_counts_before_the_pixels_only():
    whole = encoded("png")
    exif = chunk(b"eXIf", directory([(274, 3, 1, 6)]))
    pixels = whole.index(b"IDAT") - 4
    assert parse_geometry(whole[:pixels] + exif + whole[pixels:]) == Geometry("png", WIDTH, HEIGHT, 6)
    assert parse_geometry(whole[:-12] + exif + whole[-12:]) == Geometry("png", WIDTH, HEIGHT)


def test_an_exif_chunk_with_the_prefix_of_jpeg_is_read():
    exif = chunk(b"eXIf", b"Exif\0\0" + directory([(274, 3, 1, 7)]))
    assert parse_geometry(encoded("png")[:33] + exif).orientation == 7


@pytest.mark.parametrize(
    ("place", "content"),
    [
        (0, b"\x8a"),
        (7, b"\r"),
        (8, b"\0\0\0\x0e"),
        (12, b"CgBI"),
        (16, b"\0\0\0\0"),
        (16, b"\x80\0\0\0"),
        (20, b"\0\0\0\0"),
        (20, b"\xff\xff\xff\xff"),
    ],
)
def test_a_png_with_a_broken_header_has_no_geometry(place, content):
    payload = bytearray(encoded("png"))
    payload[place : place + len(content)] = content
    payload[29:33] = struct.pack(">I", zlib.crc32(payload[12:29]))
    assert parse_geometry(payload) is None


def test_a_png_whose_header_fails_its_checksum_has_no_geometry():
    payload = bytearray(encoded("png"))
    payload[19] ^= 4
    assert parse_geometry(payload) is None


# --- WebP ---


def test_webp_reads_the_exif_chunk_only_where_its_flag_is_set():
    exif = (b"EXIF", directory([(274, 3, 1, 6)]))
    assert parse_geometry(riff(vp8x(0x08), exif)) == Geometry("webp", WIDTH, HEIGHT, 6)
    assert parse_geometry(riff(vp8x(0x36), exif)) == Geometry("webp", WIDTH, HEIGHT)


def test_webp_chunks_of_odd_length_are_padded():
    exif = (b"EXIF", b"Exif\0\0" + directory([(274, 3, 1, 6)], ">"))
    payload = riff(vp8x(0x08), (b"ICCP", b"123"), (b"VP8L", b"12345"), exif)
    assert parse_geometry(payload) == Geometry("webp", WIDTH, HEIGHT, 6)


def test_bytes_behind_the_end_of_a_webp_are_not_its_own():
    tail = b"EXIF\x1a\0\0\0" + directory([(274, 3, 1, 6)])
    assert parse_geometry(riff(vp8x(0x08), (b"VP8L", b"1234")) + tail) == Geometry("webp", WIDTH, HEIGHT)


def test_webp_of_the_largest_size_is_understood():
    assert parse_geometry(riff(vp8x(0, 1 << 24, 1 << 24))) == Geometry("webp", 1 << 24, 1 << 24)
    assert parse_geometry(riff((b"VP8L", b"\x2f\xff\xff\xff\x0f"))) == Geometry("webp", 16384, 16384)
    assert parse_geometry(riff((b"VP8 ", b"\0\0\0\x9d\1*\xff\xff\xff\x7f"))) == Geometry("webp", 16383, 16383)


def test_an_animated_webp_has_the_size_of_its_canvas():
    from PIL import Image

    file = io.BytesIO()
    frames = [Image.new("RGB", (WIDTH, HEIGHT), color) for color in ("red", "green", "blue")]
    exif = Image.Exif()
    exif[274] = 5
    frames[0].save(file, "webp", save_all=True, append_images=frames[1:], exif=exif.tobytes())
    assert b"ANMF" in file.getvalue()
    assert parse_geometry(file.getvalue()) == Geometry("webp", WIDTH, HEIGHT, 5)


@pytest.mark.parametrize(
    "first",
    [
        (b"VP8 ", b"\1\0\0\x9d\1*\x1e\0\x14\0"),  # no key frame
        (b"VP8 ", b"\0\0\0\x9d\1+\x1e\0\x14\0"),
        (b"VP8 ", b"\0\0\0\x9d\1*\0\0\x14\0"),
        (b"VP8 ", b"\0\0\0\x9d\1*\x1e\0\0\0"),
        (b"VP8L", b"\x2e\xff\xff\xff\x0f"),
        (b"VP8X", b"\0\0\0\0\1\0\0\1\0"),
        (b"ALPH", bytes(20)),
    ],
)
def test_a_webp_with_a_broken_first_chunk_has_no_geometry(first):
    assert parse_geometry(riff(first)) is None


# --- GIF ---


def gif(screen, frame_box, before=b"", flags=0):
    table = bytes(6 << (flags & 7)) if flags & 0x80 else b""
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, flags, 0, 0) + table
    return head + before + b"," + struct.pack("<HHHHB", *frame_box, 0) + b"\2\2\x44\1\0;"


@pytest.mark.parametrize(
    ("screen", "box", "size"),
    [
        ((30, 20), (0, 0, 30, 20), (30, 20)),
        ((30, 20), (5, 5, 2, 2), (30, 20)),
        ((10, 20), (0, 0, 30, 10), (30, 20)),
        ((30, 20), (10, 19, 2, 4), (30, 23)),
        ((0, 0), (0, 0, 30, 20), (30, 20)),
    ],
)
@pytest.mark.parametrize("flags", [0, 0x80, 0x87])
def test_a_first_frame_that_sticks_out_enlarges_a_gif_as_in_pillow(screen, box, size, flags):
    from PIL import Image

    extensions = b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0\0\0" + b"!\xfe\3,,,\2,,\0" + b"!\xf9\4\0\0\0\0\0"
    payload = gif(screen, box, extensions, flags)
    assert parse_geometry(payload) == Geometry("gif", *size)
    assert Image.open(io.BytesIO(payload)).size == size


def test_a_gif_without_frame_or_screen_has_no_geometry():
    assert parse_geometry(b"GIF89a" + bytes(7) + b";") is None
    assert parse_geometry(gif((0, 0), (0, 0, 0, 0))) is None
    assert parse_geometry(b"GIF87a\x1e\0\x14\0\0\0\0;") == Geometry("gif", 30, 20)


# --- BMP ---


def bmp(header_size, width=WIDTH, height=HEIGHT, bits=24):
    fields = "<IHHHH" if header_size == 12 else "<IiiHH"
    header = struct.pack(fields, header_size, width, height, 1, bits).ljust(header_size, b"\0")
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + header_size) + header + bytes(90 * 20 + 40)


@pytest.mark.parametrize("header_size", [12, 16, 40, 52, 56, 64, 108, 124])
def test_every_bmp_header_gives_the_size(header_size):
    assert parse_geometry(bmp(header_size)) == Geometry("bmp", WIDTH, HEIGHT)


@pytest.mark.parametrize("header_size", [40, 108, 124])
def test_a_bmp_from_top_to_bottom_has_a_positive_height_as_in_pillow(header_size):
    payload = bmp(header_size, height=-HEIGHT)
    assert parse_geometry(payload) == Geometry("bmp", WIDTH, HEIGHT)
    assert displayed_size(payload) == (WIDTH, HEIGHT)


def test_a_bmp_with_a_core_header_is_as_large_as_in_pillow():
    assert displayed_size(bmp(12)) == parse_geometry(bmp(12)).display_size


@pytest.mark.parametrize(
    "payload", [bmp(40, width=0), bmp(40, width=-3), bmp(40, height=0), bmp(40, bits=7), bmp(41), bmp(12, width=0)]
)
def test_a_bmp_that_makes_no_sense_has_no_geometry(payload):
    assert parse_geometry(payload) is None


# --- TIFF ---


def tiff(order, *, big, size=(WIDTH, HEIGHT), size_type=3, orientation=1, pixels_first=False):
    """A grey TIFF of one strip in either byte order and size, the directory before or behind the pixels."""
    width, height = size
    head_size, count, entry, value = (16, "Q", "HHQ", 8) if big else (8, "H", "HHI", 4)
    short, long = 3, 4
    pixels = bytes(width * height)
    tags = [
        (256, size_type, width),
        (257, size_type, height),
        (258, short, 8),
        (259, short, 1),
        (262, short, 1),
        (273, long, 0),
        (274, short, orientation),
        (277, short, 1),
        (278, long, height),
        (279, long, len(pixels)),
    ]
    directory_size = struct.calcsize(order + count) + len(tags) * (struct.calcsize(order + entry) + value) + value
    at = head_size + len(pixels) if pixels_first else head_size
    strip = head_size if pixels_first else head_size + directory_size
    body = struct.pack(order + count, len(tags))
    for tag, type_, number in tags:
        body += struct.pack(order + entry, tag, type_, 1)
        code = {1: "B", 3: "H", 4: "I", 16: "Q"}[type_]
        body += struct.pack(order + code, strip if tag == 273 else number).ljust(value, b"\0")
    body += bytes(value)
    mark = b"II" if order == "<" else b"MM"
    head = mark + (struct.pack(order + "HHHQ", 43, 8, 0, at) if big else struct.pack(order + "HI", 42, at))
    return head + (pixels + body if pixels_first else body + pixels)


@pytest.mark.parametrize("pixels_first", [False, True])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("orientation", [1, 6])
def test_every_layout_of_tiff_is_read_as_pillow_reads_it(order, big, pixels_first, orientation):
    payload = tiff(order, big=big, pixels_first=pixels_first, orientation=orientation)
    geometry = parse_geometry(payload)
    assert geometry == Geometry("tiff", WIDTH, HEIGHT, orientation)
    assert sniff_kind(payload[:16]) == "tiff"
    if not (big and order == ">"):  # Pillow looks for BigTIFF's number in the wrong byte there
        assert geometry.display_size == displayed_size(payload)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("big", "size_type"), [(False, 1), (False, 4), (True, 4), (True, 16)])
def test_a_tiff_may_write_its_size_in_any_unsigned_integer(order, big, size_type):
    assert parse_geometry(tiff(order, big=big, size_type=size_type)) == Geometry("tiff", WIDTH, HEIGHT)


@pytest.mark.parametrize("size", [((1 << 31), 5), (5, (1 << 32) - 1), (1 << 31, 1 << 31)])
def test_a_side_that_columns_cannot_hold_is_taken_for_nonsense(size):
    width, height = size
    assert parse_geometry(directory([(256, 4, 1, width), (257, 4, 1, height)])) is None
    largest = directory([(256, 4, 1, (1 << 31) - 1), (257, 4, 1, 5)])
    assert parse_geometry(largest) == Geometry("tiff", (1 << 31) - 1, 5)


def test_a_tiff_without_a_size_has_no_geometry():
    assert parse_geometry(directory([(257, 3, 1, 20), (274, 3, 1, 6)])) is None
    assert parse_geometry(directory([(256, 3, 1, 30), (257, 3, 1, 0)])) is None
    assert parse_geometry(b"II+\0\x08\0\0\0" + b"\xff" * 8) is None


# --- kinds ---


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("jpeg", b"\xff\xd8\xff\xdb"),
        ("jxl", b"\xff\x0a\x80"),
        ("jxl", b"\0\0\0\x0cJXL \r\n\x87\n"),
        ("jp2", b"\0\0\0\x0cjP  \r\n\x87\n"),
        ("ico", b"\0\0\1\0\2\0\x10\x10\0\0\1\0\x20\0"),
        ("avif", b"\0\0\0\x20ftypavif\0\0\0\0avifmif1"),
        ("avif", b"\0\0\0\x20ftypmif1\0\0\0\0mif1miafavif"),
        ("heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"),
        ("heic", b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"),
        ("heif", b"\0\0\0\x18ftypmif1\0\0\0\0mif1miaf"),
        ("mp4", b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41"),
        ("mp4", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom"),
        ("m4a", b"\0\0\0\x20ftypM4A \0\0\0\0M4A mp42"),
        ("mov", b"\0\0\0\x14ftypqt  \0\0\2\0qt  "),
        ("webm", b"\x1aE\xdf\xa3\x9fB\x86\x81\1B\xf7\x81\1B\xf2\x81\4B\xf3\x81\x08B\x82\x84webmB\x87\x81\4"),
        ("mkv", b"\x1aE\xdf\xa3\xa3B\x86\x81\1B\xf7\x81\1B\xf2\x81\4B\xf3\x81\x08B\x82\x88matroska"),
        ("avi", b"RIFF\0\0\1\0AVI LIST"),
        ("wav", b"RIFF\0\0\1\0WAVEfmt "),
        ("flac", b"fLaC\0\0\0\x22"),
        ("ogg", b"OggS\0\2"),
        ("mp3", b"ID3\4\0\0"),
        ("mp3", b"\xff\xfb\x90\x44"),
        ("mp3", b"\xff\xf3\x48\xc4"),
        (None, b"\xff\xfb\xf0\x44"),  # bit rate 15
        (None, b"\xff\xfb\x9c\x44"),  # sampling rate 3
        ("aac", b"\xff\xf1\x50\x80"),
        ("gzip", b"\x1f\x8b\x08\0"),
        ("zip", b"PK\3\4\x14\0"),
        ("xz", b"\xfd7zXZ\0"),
        ("bz2", b"BZh91AY&SY"),
        ("zstd", b"\x28\xb5\x2f\xfd\4"),
        ("pdf", b"%PDF-1.7\n"),
        ("pickle", b"\x80\4\x95\x10\0\0\0"),
        ("safetensors", b"\x40\0\0\0\0\0\0\0" + b'{"__metadata__":{}}'),
        ("html", b"\n<!DOCTYPE html><html>"),
        ("svg", b'<svg xmlns="http://www.w3.org/2000/svg">'),
        ("json", b'{"caption": "a cat"}'),
        ("json", b'\xef\xbb\xbf [ {"a": 1} ]'),
        (None, b"{in braces} a cat"),
        (None, b"[verse] a cat"),
        (None, b"a cat on a mat"),
        (None, b"\0" * 64),
    ],
)
def test_kinds_are_told_by_their_signatures(kind, head):
    assert sniff_kind(head) == kind
    assert sniff_kind(memoryview(head + bytes(100))) == kind


def test_arrays_are_told_by_their_signature():
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    assert sniff_kind(file.getvalue()) == "npy"
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    assert sniff_kind(file.getvalue()) == "zip"
