"""ISO boxes: their lengths in all forms, and where a walk over them ends."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.picture_builder import box
from shardset.formats.boxes import ENDLESS, Box, iter_boxes, parse_box


def test_a_box_is_a_length_a_name_and_content():
    data = b"skipped!" + box(b"free", b"abc") + box(b"mdat", b"1234", wide=True)
    assert list(iter_boxes(data, 8, len(data), 9)) == [Box(b"free", 16, 19), Box(b"mdat", 35, 39)]


def test_a_box_without_length_goes_to_the_end():
    data = struct.pack(">I4s", 0, b"mdat") + b"12345"
    assert parse_box(data, 0, 0, len(data)) == Box(b"mdat", 8, 13)
    assert parse_box(data, 0, 0, ENDLESS) == Box(b"mdat", 8, ENDLESS)


def test_a_box_may_lie_elsewhere_in_the_file_than_in_the_buffer():
    assert parse_box(b"xx" + box(b"moov", b"abc"), 2, 1000, 2000) == Box(b"moov", 1008, 1011)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">I4s", 7, b"free"),
        struct.pack(">I4s", 2, b"free"),
        struct.pack(">I4sQ", 1, b"free", 15),
        struct.pack(">I4sQ", 1, b"free", 0),
        struct.pack(">I4sQ", 1, b"free", (1 << 64) - 1),
        struct.pack(">I4s", 101, b"free"),
    ],
)
def test_a_length_that_makes_no_sense_ends_the_walk(head):
    data = box(b"skip") + head.ljust(100, b"\0")
    assert [one.name for one in iter_boxes(data, 0, len(data), 9)] == [b"skip"]


@pytest.mark.parametrize("length", [1, 7, 8, 12, 15])
def test_a_head_that_is_cut_off_is_told(length):
    data = box(b"skip") + box(b"mdat", b"1234", wide=True)[:length]
    with pytest.raises(struct.error):
        list(iter_boxes(data, 0, ENDLESS, 9))


def test_no_more_boxes_are_walked_over_than_asked_for():
    assert len(list(iter_boxes(box(b"free") * 100, 0, 800, 30))) == 30


@given(st.binary(max_size=100), st.integers(0, 200))
def test_a_walk_over_any_bytes_moves_forward_and_stays_inside(data, end):
    last = 0
    try:
        for one in iter_boxes(data, 0, end, 50):
            assert last + 8 <= one.content <= one.end <= end
            last = one.end
    except struct.error:
        assert last + 16 > len(data)
