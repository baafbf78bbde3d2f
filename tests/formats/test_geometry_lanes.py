"""The geometry of many pictures at once: the same as of each by itself, on ordinary, odd, cut and hostile ones."""

from __future__ import annotations

import random
import struct
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.test_geometry import (
    HOSTILE,
    PHOTOGRAPHS,
    SMALL,
    chunk,
    directory,
    encoded,
    exif_segment,
    frame,
    mutated,
    oriented,
    riff,
    segment,
    vp8x,
)
from formats.test_geometry_reach import PICTURES
from shardset.formats.geometry import parse_geometry
from shardset.formats.geometry_lanes import _AT_ONCE, _FEW, parse_geometries
from timing import least_seconds

MANY = _FEW + 1
"""So many of a kind are parsed together."""


def one_by_one(payloads):
    found = [parse_geometry(payload) for payload in payloads]
    return [(one.width, one.height, one.orientation) if one else (0, 0, 0) for one in found]


def together(payloads, gap=b""):
    """Parse payloads that stand one behind the other, with something between them."""
    lengths = np.array([len(payload) for payload in payloads], np.int64)
    offsets = len(gap) + np.cumsum(lengths + len(gap)) - lengths - len(gap)
    found = parse_geometries(gap + b"".join(payload + gap for payload in payloads), offsets, lengths)
    assert [column.dtype for column in found] == [np.int32, np.int32, np.uint8]
    return list(zip(*(column.tolist() for column in found), strict=True))


def assert_same(payloads, gap=b""):
    assert together(payloads, gap) == one_by_one(payloads)


KINDS = {
    **PICTURES,
    "plain jpeg": encoded("jpeg", size=(300, 200)),
    "grey jpeg": encoded("jpeg", "L"),
    "progressive jpeg": encoded("jpeg", progressive=True),
    "jpeg with a profile": encoded("jpeg", icc_profile=bytes(200_000)),
    "jpeg of another byte order": encoded("jpeg", orientation=7, endian=">"),
    "jpeg whose exif has no orientation": b"\xff\xd8"
    + exif_segment((271, 3, 1, 3))
    + oriented(3)
    + frame()
    + bytes(50),
    "jpeg with a long exif": b"\xff\xd8"
    + exif_segment(*[(tag, 3, 1, 3) for tag in range(256, 290)])
    + frame()
    + bytes(50),
    "jpeg with a long orientation": b"\xff\xd8" + exif_segment((274, 4, 1, 5)) + frame() + bytes(50),
    "jpeg with two orientations": b"\xff\xd8" + exif_segment((274, 3, 2, 5), (274, 3, 1, 5)) + frame() + bytes(50),
    "jpeg with a wrong orientation": b"\xff\xd8" + oriented(9) + frame() + bytes(50),
    "jpeg with xmp": b"\xff\xd8" + segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0") + oriented(6) + frame() + bytes(50),
    "jpeg with an exif that is cut": b"\xff\xd8"
    + segment(0xE1, b"Exif\0\0" + directory([(274, 3, 1, 6)])[:-5])
    + frame()
    + bytes(50),
    "jpeg with a wrong exif": b"\xff\xd8"
    + segment(0xE1, b"Exif\0\1" + directory([(274, 3, 1, 6)]))
    + frame()
    + bytes(50),
    "jpeg with a far exif": b"\xff\xd8" + segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff") + frame() + bytes(50),
    "jpeg of many segments": b"\xff\xd8" + segment(0xFE, b"x") * 100 + frame() + bytes(50),
    "jpeg without components": b"\xff\xd8"
    + segment(0xE0, bytes(40))
    + segment(0xC0, struct.pack(">BHHB", 8, 20, 30, 2) + b"\1\x11\0")
    + bytes(50),
    "jpeg without height": b"\xff\xd8" + segment(0xE0, bytes(40)) + frame(height=0) + bytes(50),
    "jpeg of a scan alone": b"\xff\xd8" + segment(0xE0, bytes(40)) + segment(0xDA, bytes(40)),
    "arithmetic jpeg": b"\xff\xd8" + segment(0xE0, bytes(40)) + frame(0xC9) + bytes(50),
    "plain png": encoded("png", size=(300, 200)),
    "png with a wrong checksum": encoded("png")[:30] + b"?" + encoded("png")[31:],
    "png with much text": encoded("png")[:33] + chunk(b"tEXt", b"t") * 60 + encoded("png")[33:],
    "png of a head alone": encoded("png")[:33] + chunk(b"tEXt", bytes(50)),
    "plain webp": encoded("webp", size=(300, 200)),
    "webp with a profile": encoded("webp", icc_profile=b"x" * 500),
    "webp of the largest size": riff(vp8x(0, 1 << 24, 1 << 24), (b"ALPH", bytes(60))),
    "webp without a size": riff((b"VP8 ", b"\0\0\0\x9d\1*\0\0\x14\0" + bytes(60))),
    "webp without a key frame": riff((b"VP8 ", b"\1\0\0\x9d\1*\x1e\0\x14\0" + bytes(60))),
    "wav": b"RIFF\0\0\0\0WAVEfmt " + bytes(60),
    "text": b"a caption, which may be as long as any of those that stand beside pictures, or longer",
    "short text": b"RGB",
    "nothing": b"",
}


@pytest.mark.parametrize("name", KINDS)
def test_many_of_a_kind_give_what_each_gives(name):
    assert_same([KINDS[name]] * MANY, b"\xff")


def test_many_of_all_kinds_give_what_each_gives():
    payloads = [payload for payload in KINDS.values() for _ in range(MANY)]
    random.Random(1).shuffle(payloads)
    assert_same(payloads)
    assert sum(width > 0 for width, _, _ in together(payloads)) > len(payloads) // 2


def test_more_than_go_together_and_fewer_than_that_give_what_each_gives():
    kinds = [encoded("jpeg", orientation=3), encoded("png"), encoded("webp"), b"text"]
    for count in (0, 1, 2, _FEW, _AT_ONCE - 1, _AT_ONCE + 1, 2 * _AT_ONCE + 3):
        assert_same([kinds[place % 4] for place in range(count)])


def test_photographs_give_what_each_gives():
    assert_same([path.read_bytes() for path in PHOTOGRAPHS] * MANY)


@pytest.mark.parametrize("endian", "<>")
def test_every_orientation_is_read(endian):
    payloads = [encoded("jpeg", orientation=1 + place % 8, endian=endian) for place in range(8 * MANY)]
    assert [turn for _, _, turn in together(payloads)] == [1 + place % 8 for place in range(8 * MANY)]


@pytest.mark.parametrize("name", ["plain jpeg", "jpeg", "plain png", "png", "webp", "plain webp"])
def test_pictures_cut_anywhere_give_what_each_gives(name):
    payload = KINDS[name]
    assert_same([payload[:length] for length in range(min(len(payload), 900))], b"\xff\xe1")


def test_mutated_pictures_give_what_each_gives(fuzz_count):
    source = random.Random(22)
    ordinary = [
        KINDS[name]
        for name in ("plain jpeg", "jpeg", "jpeg of another byte order", "plain png", "png", "plain webp", "webp")
    ]
    for _ in range(max(1, fuzz_count // 200)):
        payloads = [mutated(source.choice(ordinary)[:2000], source) for _ in range(200)]
        assert_same(payloads)


@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.binary(max_size=80)), min_size=MANY, max_size=60))
def test_any_bytes_behind_a_beginning_give_what_each_gives(parts):
    assert_same([KINDS[name][:24] + rest for name, rest in parts])


def test_what_lies_outside_is_cut_off_or_nothing():
    payload = encoded("jpeg", size=(300, 200))
    offsets = np.array([-1, 0, 0, len(payload), len(payload) + 5, 10**15] * MANY)
    lengths = np.array([9000, len(payload), 10**15, 10, 10, 10] * MANY)
    found = parse_geometries(payload, offsets, lengths)
    assert found.width.tolist() == [0, 300, 300, 0, 0, 0] * MANY
    assert found.height.tolist() == [0, 200, 200, 0, 0, 0] * MANY
    assert found.orientation.tolist() == [0, 1, 1, 0, 0, 0] * MANY
    for empty in (b"", b"\xff", b"\xff\xd8\xff\xe0"):
        assert not parse_geometries(empty, np.zeros(3, np.int64), np.array([0, 1, 100])).width.any()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_cost_little_more_than_alone(name):
    view = memoryview(HOSTILE[name]())
    alone = parse_geometry(view)
    took = least_seconds(lambda: parse_geometry(view), 0, clock=time.thread_time)
    found = parse_geometries(view, np.zeros(MANY, np.int64), np.full(MANY, len(view)))
    bound = 0.2 + 3 * MANY * took
    several = partial(parse_geometries, view, np.zeros(MANY, np.int64), np.full(MANY, len(view)))
    assert least_seconds(several, bound, clock=time.thread_time) < bound
    assert found.width.tolist() == [alone.width if alone else 0] * MANY


def test_the_kinds_here_are_those_that_are_tested_alone():
    assert SMALL.keys() <= KINDS.keys()
