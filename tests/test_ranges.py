from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.ranges import ByteRange, MergedRange, merge_ranges

SHARD = random.Random(7).randbytes(700)
# Small numbers, so that ranges touch, overlap, contain each other and are empty often.
byte_ranges = st.lists(st.builds(ByteRange, st.integers(0, 500), st.integers(0, 200)), max_size=30)
gaps = st.integers(0, 100)
limits = st.integers(0, 400)


@pytest.mark.parametrize(("offset", "length"), [(-1, 0), (0, -1), (-(2**63), 512)])
def test_a_negative_range_is_refused(offset, length):
    with pytest.raises(ValueError, match="negative"):
        ByteRange(offset, length)


def test_the_end_is_the_first_byte_after_the_range():
    assert ByteRange(512, 100).end == 612
    assert ByteRange(2**62, 2**62).end == 2**63


def test_no_ranges_make_no_reads():
    assert merge_ranges([], gap=10, limit=100) == []


def test_near_ranges_are_read_at_once_and_far_ones_apart():
    ranges = [ByteRange(2000, 10), ByteRange(0, 10), ByteRange(14, 6)]
    assert merge_ranges(ranges, gap=4, limit=1000) == [MergedRange(0, 20, (1, 2)), MergedRange(2000, 10, (0,))]
    assert merge_ranges(ranges, gap=3, limit=1000) == [
        MergedRange(0, 10, (1,)),
        MergedRange(14, 6, (2,)),
        MergedRange(2000, 10, (0,)),
    ]


def test_a_range_above_the_limit_stays_whole_and_alone():
    ranges = [ByteRange(0, 10), ByteRange(10, 500), ByteRange(510, 10)]
    assert merge_ranges(ranges, gap=0, limit=100) == [
        MergedRange(0, 10, (0,)),
        MergedRange(10, 500, (1,)),
        MergedRange(510, 10, (2,)),
    ]


@given(byte_ranges, gaps, limits)
def test_every_range_is_served_by_exactly_one_read(ranges, gap, limit):
    reads = merge_ranges(ranges, gap=gap, limit=limit)
    assert sorted(position for read in reads for position in read.members) == list(range(len(ranges)))


@given(byte_ranges, gaps, limits)
def test_a_slice_of_the_read_is_what_the_range_alone_would_give(ranges, gap, limit):
    for read in merge_ranges(ranges, gap=gap, limit=limit):
        window = SHARD[read.offset : read.offset + read.length]
        for position in read.members:
            wanted = ranges[position]
            start = wanted.offset - read.offset
            assert window[start : start + wanted.length] == SHARD[wanted.offset : wanted.end]
            assert 0 <= start <= start + wanted.length <= read.length


@given(byte_ranges, gaps, limits)
def test_a_read_starts_and_ends_with_bytes_that_were_asked_for(ranges, gap, limit):
    for read in merge_ranges(ranges, gap=gap, limit=limit):
        served = [ranges[position] for position in read.members]
        assert read.offset == min(wanted.offset for wanted in served)
        assert read.offset + read.length == max(wanted.end for wanted in served)


@given(byte_ranges, gaps, limits)
def test_reads_come_in_offset_order_and_merged_ones_keep_to_the_limit(ranges, gap, limit):
    reads = merge_ranges(ranges, gap=gap, limit=limit)
    assert [read.offset for read in reads] == sorted(read.offset for read in reads)
    assert all(read.length <= limit for read in reads if len(read.members) > 1)


@given(byte_ranges, gaps, limits)
def test_the_bytes_read_in_vain_are_at_most_one_gap_a_merge(ranges, gap, limit):
    for read in merge_ranges(ranges, gap=gap, limit=limit):
        wanted = {byte for position in read.members for byte in range(ranges[position].offset, ranges[position].end)}
        assert read.length - len(wanted) <= gap * (len(read.members) - 1)


@given(byte_ranges, gaps, limits)
def test_two_reads_in_a_row_stay_apart_only_for_the_gap_or_the_limit(ranges, gap, limit):
    reads = merge_ranges(ranges, gap=gap, limit=limit)
    for left, right in itertools.pairwise(reads):
        first = ranges[right.members[0]]
        end = left.offset + left.length
        assert first.offset - end > gap or max(end, first.end) - left.offset > limit


@given(byte_ranges, gaps)
def test_the_order_of_the_ranges_changes_no_read(ranges, gap):
    there = merge_ranges(ranges, gap=gap, limit=300)
    back = merge_ranges(ranges[::-1], gap=gap, limit=300)
    assert [read[:2] for read in there] == [read[:2] for read in back]
