from __future__ import annotations

import random

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from shardset.formats.crc_batch import LONGEST, crc_of_all


def of_all(payloads):
    crcs = np.array([crc32c(payload) for payload in payloads], np.uint32)
    return crc_of_all(crcs, np.array([len(payload) for payload in payloads], np.int64))


@given(st.lists(st.binary(max_size=50), max_size=40))
def test_the_checksum_of_all_follows_from_that_of_each(payloads):
    assert of_all(payloads) == crc32c(b"".join(payloads))


@pytest.mark.parametrize("lengths", [[LONGEST], [LONGEST - 1, 1], [0, LONGEST, 0], [1] * 5000, [100] * 2000])
def test_payloads_may_have_any_lengths_up_to_the_longest(lengths):
    rng = random.Random(1)
    payloads = [rng.randbytes(length) for length in lengths]
    assert of_all(payloads) == crc32c(b"".join(payloads))


def test_any_flipped_bit_shows():
    rng = random.Random(2)
    payloads = [rng.randbytes(rng.randrange(30)) for _ in range(100)]
    crcs = np.array([crc32c(payload) for payload in payloads], np.uint32)
    lengths = np.array([len(payload) for payload in payloads], np.int64)
    whole = b"".join(payloads)
    expected = crc_of_all(crcs, lengths)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        assert crc32c(damaged) != expected
    for number in range(100):
        for bit in range(32):
            wrong = crcs.copy()
            wrong[number] ^= np.uint32(1 << bit)
            assert crc_of_all(wrong, lengths) != expected
