"""How many first bytes of a picture are said to be needed: enough for the same geometry as of all of it, and few."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.test_geometry import (
    PHOTOGRAPHS,
    SMALL,
    chunk,
    encoded,
    exif_segment,
    frame,
    oriented,
    riff,
    segment,
    vp8x,
)
from shardset.formats.geometry import Geometry, parse_geometry
from shardset.formats.geometry_reach import geometry_reach


def read_ahead(payload, first=1024):
    """Read as much as is asked for, again and again; return what was read."""
    reach = min(first, len(payload))
    for _ in range(10_000):
        head = payload[:reach]
        wanted = geometry_reach(head, len(payload))
        assert wanted <= len(payload)
        if wanted <= reach:
            return head
        reach = wanted
    raise AssertionError("it never ends")


def assert_enough(payload):
    for first in (0, 1, 16, 63, 64, 65, 100, 200, 1024):
        assert parse_geometry(read_ahead(payload, first)) == parse_geometry(payload), first


PICTURES = {
    **{kind: make() for kind, make in SMALL.items()},
    "jpeg with profiles": b"\xff\xd8" + segment(0xE2, b"ICC" * 9000) * 3 + oriented(6) + frame(),
    "jpeg with a thumbnail": b"\xff\xd8" + exif_segment((274, 3, 1, 8), tail=bytes(20_000)) + frame(),
    "jpeg with stray bytes": b"\xff\xd8\xff\xe0\0\2" + b"x" * 3000 + frame(),
    "jpeg of stray bytes": b"\xff\xd8\xff\xe0\0\2" + b"x" * 100_000 + frame(),
    "jpeg without frame": b"\xff\xd8" + segment(0xE0, b"JFIF") * 300,
    "jpeg whose first exif is empty": b"\xff\xd8" + segment(0xE1, b"Exif\0\0") + oriented(5) + frame(),
    "png with text": SMALL["png"]()[:33] + chunk(b"tEXt", b"t" * 5000) + SMALL["png"]()[33:],
    "webp with exif at the end": riff(
        vp8x(8), (b"VP8 ", b"x" * 20_001), (b"EXIF", b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0")
    ),
    "webp that promises exif": riff(vp8x(8), (b"VP8 ", b"x" * 2000)),
    "gif with comments": encoded("gif", "L")[:781]
    + b"\x21\xfe"
    + b"\xffx" * 0
    + (b"\xff" + b"c" * 255) * 20
    + b"\0"
    + encoded("gif", "L")[781:],
    "tiff": encoded("tiff", size=(200, 100)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_asked_for_suffices(name):
    assert_enough(PICTURES[name])


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.stem)
def test_photographs_need_few_bytes(path):
    payload = path.read_bytes()
    assert_enough(payload)
    assert len(read_ahead(payload)) < 0.3 * len(payload) or b"EXIF" in payload[-20_000:]


def test_a_picture_without_extras_needs_the_first_kilobyte_alone():
    for kind in ("jpeg", "png", "webp", "bmp"):
        assert len(read_ahead(encoded(kind, size=(300, 200)))) == 1024


@pytest.mark.parametrize(
    "payload",
    [b"", b"x", b"{}" * 900, b"GPS data" * 500, b"RIFF" + b"WAVE" * 500, b"II, III, IV" * 300, b"\xff" * 3000],
)
def test_what_is_no_picture_needs_no_more(payload):
    assert len(read_ahead(payload)) <= 1024
    assert parse_geometry(payload) is None


def test_a_directory_far_on_is_asked_for_where_it_is():
    payload = (
        b"II*\0"
        + (50_000).to_bytes(4, "little")
        + bytes(49_992)
        + b"\2\0"
        + (b"\0\1\3\0\1\0\0\0\x05\0\0\0" + b"\1\1\3\0\1\0\0\0\x04\0\0\0" + bytes(4))
        + bytes(9000)
    )
    assert parse_geometry(read_ahead(payload)) == Geometry("tiff", 5, 4)
    assert len(read_ahead(payload)) < 51_000


@given(st.sampled_from(sorted(PICTURES)), st.data())
def test_a_picture_cut_anywhere_gives_the_same_from_what_is_asked_for(name, data):
    payload = PICTURES[name]
    assert_enough(payload[: data.draw(st.integers(0, len(payload)))])


def test_mutated_pictures_give_the_same_from_what_is_asked_for(fuzz_count):
    pictures = list(PICTURES.values())
    for number in range(fuzz_count):
        rng = random.Random(number)
        payload = bytearray(rng.choice(pictures))
        for _ in range(rng.choice((1, 1, 2, 5))):
            payload[rng.randrange(min(len(payload), rng.choice((64, 1000, 10**6))))] = rng.randrange(256)
        first = rng.choice((1, 64, 300, 1024))
        payload = bytes(payload)
        assert parse_geometry(read_ahead(payload, first)) == parse_geometry(payload), f"mutation {number}"
