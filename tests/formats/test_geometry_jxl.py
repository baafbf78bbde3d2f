"""The geometry of JPEG XL, against libjxl."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.picture_builder import box, decode, encode, find_mark, in_container, marked, turn, turned_codestream
from shardset.formats.geometry import TURNED_BY_FORMAT, Geometry, parse_geometry, sniff_kind
from shardset.formats.geometry_reach import geometry_reach


@pytest.mark.parametrize("is_lossless", [False, True])
@pytest.mark.parametrize("size", [(40, 24), (41, 23), (64, 48)], ids=str)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_shown_as_decoded(orientation, size, is_lossless):
    codestream = turned_codestream(encode("JXL", size, lossless=is_lossless), orientation)
    wanted = turn(marked(size), orientation)
    for payload in (codestream, in_container(codestream), in_container(codestream, 3, 9)):
        geometry = parse_geometry(payload)
        assert geometry == Geometry("jxl", *size, orientation)
        shown = decode(payload)
        assert shown.size == geometry.display_size == wanted.size
        assert find_mark(shown) == find_mark(wanted)
        assert shown.getexif().get(274) is None  # libjxl has turned it, and nothing is left to do
    assert "jxl" in TURNED_BY_FORMAT


def test_an_orientation_in_exif_alone_turns_nothing():
    payload = encode("JXL", (40, 24), orientation=6)
    assert b"Exif" in payload
    assert parse_geometry(payload) == Geometry("jxl", 40, 24)
    assert decode(payload).size == (40, 24)  # though the plug-in leaves EXIF there, as if it were still to be obeyed


SIDES = [
    *[(side, side) for side in (8, 9, 256, 264, 511, 513)],
    *[(height * over // under, height) for height in (8, 100, 333) for over, under in ((6, 5), (4, 3), (3, 2))],
    *[(height * over // under, height) for height in (16, 101, 256) for over, under in ((16, 9), (5, 4), (2, 1))],
    (8, 8192),
    (8193, 9),
    (20_000, 8),
    (256, 8),
    (8, 256),
]


@pytest.mark.parametrize("size", SIDES, ids=str)
def test_every_way_to_write_a_size_is_understood(size):
    payload = encode("JXL", size, lossless=True, effort=1)
    assert parse_geometry(payload) == Geometry("jxl", *size)
    assert decode(payload).size == size


def test_sizes_are_those_that_were_encoded():
    source = random.Random(6)
    for _ in range(20):
        size = source.randrange(8, 700), source.randrange(8, 700)
        assert parse_geometry(encode("JXL", size, lossless=True, effort=1)) == Geometry("jxl", *size)


def written(*fields):
    """Pack (value, bits) behind the signature."""
    value, at = 0, 0
    for field, bits in fields:
        value |= field << at
        at += bits
    return b"\xff\x0a" + value.to_bytes(-(-at // 8), "little")


def test_the_largest_size_is_understood():
    fields = (0, 1), (3, 2), ((1 << 30) - 1, 30), (0, 3), (3, 2), ((1 << 30) - 1, 30), (0, 1), (1, 1), (6, 3)
    assert parse_geometry(written(*fields)) == Geometry("jxl", 1 << 30, 1 << 30, 7)
    assert parse_geometry(written(*fields[:3], (6, 3), (1, 1))) == Geometry("jxl", (1 << 30) * 5 // 4, 1 << 30)
    assert parse_geometry(written(*fields[:3], (7, 3), (1, 1))) is None  # above what 31 bits hold


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\x0a",
        in_container(b"\xff\x0b" + bytes(20)),
        in_container(b""),
        in_container(b"\xff\x0a\x00"),
        box(b"JXL ", b"\r\n\x87\n") + box(b"mdat", b"\xff\x0a" + bytes(20)),
        box(b"JXL ", b"\r\n\x87\n") + box(b"jxlp", b"\0\0"),
        box(b"JXL ", b"\r\n\x87\n"),
    ],
)
def test_a_codestream_that_is_missing_or_broken_has_no_geometry(payload):
    assert parse_geometry(payload) is None


def test_boxes_before_the_codestream_are_passed():
    codestream = turned_codestream(encode("JXL", (40, 24)), 8)
    before = [box(b"Exif", bytes(3000)), box(b"jxll", b"\5"), box(b"xml ", b"\xff\x0a" * 50)]
    for wide in (False, True):
        payload = in_container(codestream, before=before, wide=wide)
        assert parse_geometry(payload) == Geometry("jxl", 40, 24, 8)
        head = payload[:1024]
        assert parse_geometry(head) is None
        assert len(head) < geometry_reach(head, len(payload)) < 3300


@pytest.mark.parametrize("cuts", [None, (), (2,), (1, 2, 3, 4, 5)])
def test_a_payload_cut_anywhere_gives_the_same_or_none(cuts):
    payload = turned_codestream(encode("JXL", (41, 23)), 5)
    payload = payload if cuts is None else in_container(payload, *cuts)
    whole = parse_geometry(payload)
    found = [parse_geometry(payload[:length]) for length in range(len(payload))]
    assert set(found) == {None, whole}
    for first in range(80):
        reach = first
        while (wanted := geometry_reach(payload[:reach], len(payload))) > reach:
            reach = wanted
        assert parse_geometry(payload[:reach]) == whole


@given(
    st.sampled_from([b"\xff\x0a", in_container(b"")[:-8], in_container(b"\xff\x0a1", 1)[:-20]]), st.binary(max_size=60)
)
def test_any_bytes_behind_a_signature_are_understood_or_none(signature, rest):
    payload = signature + rest
    geometry = parse_geometry(payload)
    if geometry is not None:
        assert geometry.kind == sniff_kind(payload[:64]) == "jxl"
        assert min(geometry.width, geometry.height, geometry.orientation) >= 1
        assert geometry.orientation <= 8
