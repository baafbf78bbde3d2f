from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.ranges import ByteRange, format_range, parse_content_range

offsets = st.integers(0, 10**17)
lengths = st.integers(1, 10**17)


@pytest.mark.parametrize(("offset", "length"), [(-1, 0), (0, -1), (-(2**63), 512)])
def test_a_negative_range_is_refused(offset, length):
    with pytest.raises(ValueError, match="negative"):
        ByteRange(offset, length)


def test_the_end_is_the_first_byte_after_the_range():
    assert ByteRange(512, 100).end == 612
    assert ByteRange(2**62, 2**62).end == 2**63


def test_a_range_header_names_the_last_byte():
    assert format_range(0, 1) == "bytes=0-0"
    assert format_range(512, 100) == "bytes=512-611"
    assert format_range(2**62, 2**62) == f"bytes={2**62}-{2**63 - 1}"


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (5, 0), (-1, 5), (5, -1)])
def test_no_range_header_asks_for_nothing_or_for_less(offset, length):
    with pytest.raises(ValueError, match=f"offset {offset}, length {length}"):
        format_range(offset, length)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-0/1", (0, 1, 1)),
        ("bytes 512-611/4096", (512, 100, 4096)),
        ("bytes 512-611/612", (512, 100, 612)),
        ("bytes 512-611/*", (512, 100, None)),
        ("BYTES 5-5/6", (5, 1, 6)),
        (" bytes 007-008/010\t", (7, 2, 10)),
        ("bytes */4096", (0, 0, 4096)),
        ("bytes */0", (0, 0, 0)),
    ],
)
def test_a_content_range_tells_offset_length_and_size(text, expected):
    assert parse_content_range(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "bytes", "bytes ", "bytes */*", "bytes 0-9", "bytes 0-9/", "bytes -9/10", "bytes 0-/10", "bytes=0-9/10"),
        *("bytes 0 - 9/10", "bytes  0-9/10", "0-9/10", "items 0-9/10", "bytes 0-9/10, bytes 0-9/10", "bytes 0-9/10\n"),
        *(
            "bytes 0x0-9/10",
            "bytes +0-9/10",
            "bytes 0-9/-1",
            "bytes 1_0-19/20",
            "bytes \N{ARABIC-INDIC DIGIT ZERO}-9/10",
            "bytes 0-9.0/10",
        ),
        "bytes 0-9/1" + "0" * 18,
    ],
)
def test_other_forms_of_a_content_range_are_refused(text):
    with pytest.raises(ValueError, match="not a Content-Range"):
        parse_content_range(text)


@pytest.mark.parametrize("text", ["bytes 9-8/10", "bytes 0-10/10", "bytes 10-10/10", "bytes 5-5/0", "bytes 9-8/*"])
def test_a_content_range_that_cannot_be_is_refused(text):
    with pytest.raises(ValueError, match="cannot be"):
        parse_content_range(text)


@given(offsets, lengths, st.none() | st.integers(0, 10**17))
def test_what_is_asked_for_is_what_an_answer_to_it_tells(offset, length, more):
    asked = format_range(offset, length).removeprefix("bytes=")
    total = None if more is None else offset + length + more
    assert parse_content_range(f"bytes {asked}/{'*' if total is None else total}") == (offset, length, total)


@given(st.text("bytes 0123456789-/*", max_size=30))
def test_a_content_range_is_parsed_or_refused_and_nothing_else(text):
    try:
        offset, length, total = parse_content_range(text)
    except ValueError:
        return
    assert offset >= 0
    assert length > 0 or offset == 0
    assert total is None or offset + length <= total
