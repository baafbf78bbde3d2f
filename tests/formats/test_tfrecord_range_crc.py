from __future__ import annotations

import random

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from shardset.formats import tfrecord_range_crc
from shardset.formats.tfrecord_range_crc import RangeCrc, append_zeros


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_checksums_of_two_runs_make_that_of_both(first, second):
    assert append_zeros(crc32c(first), len(second)) ^ crc32c(second) == crc32c(first + second)


def test_a_terabyte_of_zeros_can_be_appended():
    by_halves = append_zeros(append_zeros(0x12345678, 1 << 40), 1)
    assert by_halves == append_zeros(0x12345678, (1 << 40) + 1)
    assert append_zeros(0, 1 << 60) == 0


def test_every_range_has_the_checksum_of_its_bytes(monkeypatch):
    rng = random.Random(3)
    for block in (16, 100, 1 << 14):
        monkeypatch.setattr(tfrecord_range_crc, "_BLOCK", block)
        for size in (0, 1, block - 1, block, 3 * block + 5):
            data = rng.randbytes(size)
            ranges = RangeCrc(lambda offset, length, data=data: data[offset : offset + length], size)
            for _ in range(20):
                start = rng.randint(0, size)
                end = rng.randint(start, size)
                assert ranges.of(start, end - start) == crc32c(data[start:end])


def test_the_file_is_read_through_once_whatever_is_asked():
    data = random.Random(4).randbytes(1 << 20)
    read = []

    def reading(offset, length):
        read.append(length)
        return data[offset : offset + length]

    ranges = RangeCrc(reading, len(data))
    ranges.of(0, len(data))
    read.clear()
    for start in range(1, 1000, 100):
        ranges.of(start, len(data) - start - 1)
    assert max(read) < 1 << 14
    assert len(read) <= 20
