from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.formats import tfrecord_search
from shardset.formats.tfrecord_search import HeaderSearch, Room, find_headers
from tfrecords import make_payloads, masked_crc, payload_offsets, record_bytes

LENGTHS = [
    0,
    1,
    255,
    256,
    65_535,
    1 << 16,
    (1 << 24) - 1,
    1 << 24,
    (1 << 32) - 1,
    1 << 32,
    1 << 33,
    (1 << 40) - 1,
    1 << 40,
]


def header(length):
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc(packed))


def by_hand(data, most):
    """Return what `find_headers` should, one place after the other."""
    found = []
    for at in range(len(data) - 11):
        length, stored = struct.unpack_from("<QI", data, at)
        if stored == masked_crc(data[at : at + 8]) and length + at <= most and length < 1 << 40:
            found.append((at, length))
    return found


def searched(data, most):
    offsets, lengths = find_headers(memoryview(data), most, Room())
    return list(zip(offsets.tolist(), lengths.tolist(), strict=True))


@pytest.mark.parametrize("most", [0, 300, 1 << 20, (1 << 32) - 1, 1 << 32, 1 << 50])
@pytest.mark.parametrize("between", [b"", b"\0", bytes(9), b"\x29\x03", b"\xff" * 5])
def test_every_header_is_found_that_does_not_lead_too_far(most, between):
    data = between.join(map(header, LENGTHS)) + between
    assert searched(data, most) == by_hand(data, most)


@given(st.lists(st.one_of(st.binary(max_size=9), st.sampled_from([header(0), header(7), bytes(20)]))), st.booleans())
def test_any_bytes_give_what_looking_at_each_place_gives(parts, is_large):
    data = b"".join(parts)
    most = 1 << 33 if is_large else 40
    assert searched(data, most) == by_hand(data, most)


def test_bytes_dense_with_possible_lengths_are_searched_like_any_others():
    numbers = np.arange(1000, dtype="<i8").tobytes()
    data = numbers[:4000] + header(3) + numbers[4000:] + header(0)
    assert searched(data, 1 << 20) == [(4000, 3), (len(data) - 12, 0)]
    assert searched(data, 1 << 33) == [(4000, 3), (len(data) - 12, 0)]


def test_too_few_bytes_hold_none():
    for size in range(12):
        assert searched(header(0)[:size], 100) == []
    assert searched(header(0), -1) == []


@pytest.mark.parametrize("block", [16, 50, 1000])
def test_a_file_is_searched_across_the_edges_of_blocks(monkeypatch, block):
    monkeypatch.setattr(tfrecord_search, "_FIRST_PIECE", block)
    monkeypatch.setattr(tfrecord_search, "_LONGEST_PIECE", 3 * block)
    payloads = make_payloads(50, seed=block)
    data = record_bytes(payloads)
    expected = [(at - 12, len(p)) for at, p in zip(payload_offsets(payloads), payloads, strict=True)]
    search = HeaderSearch(lambda offset, length: data[offset : offset + length], len(data))
    assert list(search.after(0)) == expected
    rng = random.Random(block)
    for _ in range(50):
        start = rng.randrange(len(data))
        until = rng.randrange(start, len(data))
        assert list(search.after(start)) == [one for one in expected if one[0] >= start]
        assert list(search.after(start, until)) == [one for one in expected if start <= one[0] < until]


def test_a_frame_that_would_end_behind_the_file_is_passed_over():
    data = record_bytes([b"abc"])
    for size in range(len(data)):
        search = HeaderSearch(lambda offset, length: data[offset : offset + length], size)
        assert list(search.after(0)) == []
