"""The geometry of AVIF and HEIC, against Pillow with libavif and libheif."""

from __future__ import annotations

import io
import random
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.picture_builder import box, clap, decode, encode, imir, irot, is_shown_as, marked, tiled, with_properties
from shardset.formats.geometry import TURNED_BY_FORMAT, Geometry, parse_geometry, sniff_kind
from shardset.formats.geometry_reach import geometry_reach
from timing import least_seconds

SIZE = 40, 24
KINDS = {"AVIF": "avif", "HEIF": "heic"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("encoder", KINDS)
def test_every_orientation_that_an_encoder_writes_is_shown_as_decoded(encoder, orientation):
    payload = encode(encoder, SIZE, orientation=orientation)
    geometry = parse_geometry(payload)
    assert geometry == Geometry(KINDS[encoder], *SIZE, orientation)
    assert is_shown_as(payload, geometry)


@pytest.mark.parametrize("layout", [{}, {"wide": True}, {"long": True}, {"wide": True, "long": True}], ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("quarters", range(4))
@pytest.mark.parametrize("encoder", KINDS)
def test_every_turn_and_mirror_in_either_order_is_shown_as_decoded(encoder, quarters, axis, layout):
    seen = set()
    turns = [irot(quarters)] if axis is None else [irot(quarters), imir(axis)]
    for properties in (turns, turns[::-1]):
        payload = with_properties(encode(encoder, SIZE), *properties, **layout)
        geometry = parse_geometry(payload)
        assert (geometry.width, geometry.height) == SIZE
        assert is_shown_as(payload, geometry)
        seen.add(geometry.orientation)
    # Where a quarter turn and a mirror stand matters to libheif, and not to libavif.
    assert len(seen) == (2 if encoder == "HEIF" and axis is not None and quarters % 2 else 1)


def test_what_pillow_makes_of_a_turned_picture_depends_on_the_kind():
    """Which is why `TURNED_BY_FORMAT` says what it says."""
    avif, heic = (decode(encode(encoder, SIZE, orientation=6)) for encoder in KINDS)
    assert (avif.size, avif.getexif().get(274)) == (SIZE, 6)
    assert (heic.size, heic.getexif().get(274)) == (SIZE[::-1], 1)
    assert {"avif", "heic"} <= TURNED_BY_FORMAT


@pytest.mark.parametrize("encoder", KINDS)
def test_an_orientation_in_exif_alone_turns_nothing(encoder):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0113] = 6  # an encoder would turn the picture by 0x0112 itself
    payload = encode(encoder, SIZE, exif=exif.tobytes())
    assert payload.count(b"\x01\x13") == 1
    payload = payload.replace(b"\x01\x13", b"\x01\x12")
    geometry = parse_geometry(payload)
    assert geometry == Geometry(KINDS[encoder], *SIZE)
    assert is_shown_as(payload, geometry)


@pytest.mark.parametrize("encoder", KINDS)
def test_sizes_are_those_that_were_encoded(encoder):
    source = random.Random(5)
    for _ in range(12):
        size = source.randrange(8, 300), source.randrange(8, 300)
        payload = encode(encoder, size)
        assert parse_geometry(payload) == Geometry(KINDS[encoder], *size)
        assert decode(payload).size == size


@pytest.mark.parametrize(
    "crop",
    [
        clap(20, 10),
        clap(21, 11),
        clap(20, 10, (-3, 1), (2, 1)),
        clap(20, 10, (7, 2), (-5, 2)),
        clap(41, 25),  # more than there is
        clap(39, 23, (10, 1), (-10, 1)),  # partly outside
        clap((41, 2), (31, 3), (1, 3), (-1, 7)),
        clap((40, 3), (25, 2)),
        clap(1, 1),
    ],
)
@pytest.mark.parametrize("before", [[], [irot(1)], [irot(2), imir(0)], [irot(3), imir(1)]])
def test_a_crop_is_taken_off_a_heic_as_libheif_does(crop, before):
    payload = with_properties(encode("HEIF", SIZE), *before, crop)
    geometry = parse_geometry(payload)
    assert geometry.display_size == decode(payload).size


@pytest.mark.parametrize(
    "crop", [clap(0, 10), clap(20, 0), clap((20, 0), 10), clap(20, 10, (0, 0)), clap(4, 4, (99, 1))]
)
def test_a_crop_that_leaves_nothing_leaves_no_geometry(crop):
    payload = with_properties(encode("HEIF", SIZE), crop)
    assert parse_geometry(payload) is None
    with pytest.raises((ValueError, OSError, RuntimeError)):
        decode(payload)


def test_a_crop_leaves_an_avif_as_it_is_as_in_pillow():
    payload = with_properties(encode("AVIF", SIZE), clap(20, 10))
    assert parse_geometry(payload) == Geometry("avif", *SIZE)
    assert decode(payload).size == SIZE


@pytest.mark.parametrize("turns", [(), (irot(3),), (irot(1), imir(1))], ids=len)
def test_a_picture_of_tiles_has_the_size_of_the_whole(turns):
    payload = tiled(3, 2, *turns, size=(180, 100))
    geometry = parse_geometry(payload)
    assert (geometry.kind, geometry.width, geometry.height) == ("heic", 180, 100)
    assert is_shown_as(payload, geometry)


def test_an_animation_has_the_size_of_its_first_picture():
    file = io.BytesIO()
    marked(SIZE).save(file, "AVIF", save_all=True, append_images=[marked(SIZE).rotate(180)])
    assert file.getvalue()[8:12] == b"avis"
    assert parse_geometry(file.getvalue()) == Geometry("avif", *SIZE)


@pytest.mark.parametrize("encoder", KINDS)
def test_a_payload_cut_anywhere_gives_the_same_or_none(encoder):
    payload = encode(encoder, SIZE, orientation=6)
    whole = parse_geometry(payload)
    found = [parse_geometry(payload[:length]) for length in range(len(payload))]
    assert set(found) == {None, whole}
    assert found.index(whole) <= payload.index(b"mdat")  # the pixels are not needed


@pytest.mark.parametrize("encoder", KINDS)
def test_the_bytes_asked_for_suffice_and_leave_the_pixels(encoder):
    from PIL import Image

    file = io.BytesIO()
    picture = Image.effect_noise((400, 300), 90).convert("RGB")
    decode(encode(encoder))  # registers the plug-ins
    picture.save(file, encoder)
    payload = file.getvalue()
    for first in (0, 16, 64, 100, 300):
        reach = first
        while (wanted := geometry_reach(payload[:reach], len(payload))) > reach:
            reach = wanted
        assert parse_geometry(payload[:reach]) == Geometry(KINDS[encoder], 400, 300)
        assert reach < payload.index(b"mdat") + 300 < len(payload) // 4


def meta(*parts):
    return box(b"ftyp", b"heic\0\0\0\0mif1") + box(b"meta", bytes(4), *parts)


PRIMARY = box(b"pitm", bytes(4), b"\0\1")
ISPE = box(b"ispe", struct.pack(">III", 0, 40, 24))


def ipma(*entries, version=0):
    content = bytes([version, 0, 0, 0]) + struct.pack(">I", len(entries))
    for item, *numbers in entries:
        content += struct.pack(">IB" if version else ">HB", item, len(numbers)) + bytes(numbers)
    return box(b"ipma", content)


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((1, 1)))], SIZE),
        ([box(b"iprp", box(b"ipco", ISPE), ipma((1, 0x81))), box(b"free"), PRIMARY], SIZE),
        ([PRIMARY, box(b"iprp", ipma((1, 1)), box(b"ipco", ISPE))], SIZE),
        ([PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((2, 1)), ipma((1, 1), version=1))], SIZE),
        ([PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((2, 1)))], None),
        ([PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((1,)))], None),
        ([PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((1, 0)))], None),
        ([PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((1, 2)))], None),
        ([PRIMARY, box(b"iprp", box(b"ipco", irot(1), ISPE), ipma((1, 1)))], None),
        ([PRIMARY, box(b"iprp", box(b"ipco", ISPE))], None),
        ([PRIMARY, box(b"iprp", ipma((1, 1)))], None),
        ([box(b"iprp", box(b"ipco", ISPE), ipma((1, 1)))], None),
        ([PRIMARY], None),
        ([PRIMARY, box(b"iprp", box(b"ipco", box(b"ispe", bytes(12))), ipma((1, 1)))], None),
        ([PRIMARY, box(b"iprp", box(b"ipco", box(b"ispe", b"\0\0\0\0\x80\0\0\0\0\0\0\1")), ipma((1, 1)))], None),
    ],
)
def test_the_size_is_that_which_belongs_to_the_primary_item(parts, size):
    wanted = Geometry("heic", *size) if size else None
    assert parse_geometry(meta(*parts)) == wanted
    assert parse_geometry(meta(*parts) + bytes(100)) == wanted


def test_boxes_outside_of_meta_do_not_count():
    inner = [PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((1, 1)))]
    head = box(b"ftyp", b"heic\0\0\0\0mif1")
    assert parse_geometry(head + b"".join(inner)) is None
    assert parse_geometry(head + box(b"free", *inner) + meta(*inner)[len(head) :]) == Geometry("heic", *SIZE)


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis"])
def test_the_kind_is_the_one_that_is_sniffed(brand):
    payload = meta(PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((1, 1))))
    payload = payload.replace(b"heic", brand, 1)
    assert parse_geometry(payload).kind == sniff_kind(payload[:64])


HOSTILE = {
    "boxes": lambda: meta(b"\0\0\0\x08free" * 2_000_000),
    "boxes before": lambda: box(b"ftyp", b"heic\0\0\0\0") + b"\0\0\0\x08free" * 2_000_000,
    "properties": lambda: meta(PRIMARY, box(b"iprp", box(b"ipco", b"\0\0\0\x08free" * 2_000_000), ipma((1, 127)))),
    "wide properties": lambda: meta(
        PRIMARY,
        box(
            b"iprp",
            box(b"ipco", b"\0\0\0\x08irot" * 2_000_000),
            box(b"ipma", b"\0\0\0\1\0\0\0\1\0\1\xff" + b"\x7f\xff" * 255),
        ),
    ),
    "items": lambda: meta(
        PRIMARY,
        box(b"iprp", box(b"ipco", ISPE), box(b"ipma", b"\0\0\0\0\xff\xff\xff\xff" + b"\0\2\0" * 4_000_000)),
    ),
    "tables of items": lambda: meta(PRIMARY, box(b"iprp", box(b"ipco", ISPE), ipma((2, 1)) * 500_000)),
    "crops": lambda: meta(
        PRIMARY,
        box(
            b"iprp",
            box(b"ipco", ISPE, box(b"clap", b"\xff" * 32)),
            ipma((1, 1, *[2] * 254)),
        ),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_boxes_cost_no_time(name):
    view = memoryview(HOSTILE[name]())

    def parse():
        parse_geometry(view)
        geometry_reach(view, len(view))

    assert least_seconds(parse, 0.5, clock=time.thread_time) < 0.5


BASES = [
    meta(PRIMARY, box(b"iprp", box(b"ipco", ISPE, irot(1), clap(9, 9)), ipma((1, 1, 2, 3)))),
    meta(),
    b"\0\0\0\x18ftypavif",
]


@given(st.sampled_from(BASES), st.integers(0, 200), st.binary(max_size=60))
def test_any_bytes_inside_are_understood_or_none(base, place, change):
    payload = base[:place] + change + base[place + len(change) :]
    geometry = parse_geometry(payload)
    if geometry is not None:
        assert min(geometry.width, geometry.height, geometry.orientation) >= 1
        assert geometry.orientation <= 8
    reach = 0
    for _ in range(100):
        wanted = geometry_reach(payload[:reach], len(payload))
        if wanted <= reach:
            break
        reach = wanted
    assert parse_geometry(payload[:reach]) == geometry
