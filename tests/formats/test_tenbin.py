"""The tenbin format: bytes as webdataset writes them, what it cannot hold, and damage of all kinds."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardset.errors import FormatError, TruncatedError
from shardset.formats.tenbin import SHORT_TYPES, decode_tenbin, encode_tenbin, iter_tenbin, padded_length

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=8)
ARRAYS = st.sampled_from(sorted(SHORT_TYPES)).flatmap(
    lambda name: arrays.arrays(np.dtype(name), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)

# What webdataset 1.0.2 makes of [[1, 2], [3, 4]] as int16 called "grid", followed by 1.5 as float32 without a name.
FROM_WEBDATASET = b"".join(
    [
        *(
            b"~TenBin~",
            struct.pack("<q", 40),
            b"i2\0\0\0\0\0\0",
            b"grid\0\0\0\0",
            struct.pack("<qqq", 2, 2, 2),
            bytes(24),
        ),
        *(b"~TenBin~", struct.pack("<q", 8), struct.pack("<4h", 1, 2, 3, 4), bytes(56)),
        *(b"~TenBin~", struct.pack("<q", 32), b"f4\0\0\0\0\0\0", bytes(8), struct.pack("<qq", 1, 1), bytes(32)),
        *(b"~TenBin~", struct.pack("<q", 4), struct.pack("<f", 1.5), bytes(60)),
    ]
)


def two_arrays():
    return [np.array([[1, 2], [3, 4]], np.int16), np.array([1.5], np.float32)]


def one_chunk(payload, length=None):
    return b"~TenBin~" + struct.pack("<q", len(payload) if length is None else length) + payload


def header(kind=b"i2", shape=(2,), rank=None, name=b""):
    sides = struct.pack(f"<{len(shape)}q", *shape)
    return kind.ljust(8, b"\0") + name.ljust(8, b"\0") + struct.pack("<q", len(shape) if rank is None else rank) + sides


def padded(chunk):
    return chunk + bytes(padded_length(len(chunk) - 16) + 16 - len(chunk))


def test_the_bytes_are_those_of_webdataset():
    assert encode_tenbin(two_arrays(), ["grid", ""]) == FROM_WEBDATASET


def test_what_webdataset_wrote_is_read():
    found = list(iter_tenbin(FROM_WEBDATASET))
    assert [name for name, _ in found] == ["grid", ""]
    for (_, array), expected in zip(found, two_arrays(), strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


@given(st.lists(st.tuples(ARRAYS, NAMES), max_size=4))
def test_arrays_come_back_as_they_were(items):
    payload = encode_tenbin([array for array, _ in items], [name for _, name in items])
    assert len(payload) % 16 == 0
    found = list(iter_tenbin(payload))
    assert [name for name, _ in found] == [name for _, name in items]
    for (_, array), (expected, _) in zip(found, items, strict=True):
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert array.tobytes() == expected.tobytes()
        assert array.flags.writeable


def test_uint32_is_a_type_of_the_format():
    (array,) = decode_tenbin(encode_tenbin([np.array([2**32 - 1], np.uint32)]))
    assert array.dtype == np.uint32
    assert array.tolist() == [2**32 - 1]


def test_big_endian_and_transposed_arrays_are_written_by_value():
    given_ = np.arange(6, dtype=">i4").reshape(2, 3).T
    (array,) = decode_tenbin(encode_tenbin([given_]))
    np.testing.assert_array_equal(array, given_)
    assert array.dtype == np.int32


@pytest.mark.parametrize(
    ("array", "name", "message"),
    [
        (np.array(["a"]), "", "no str32"),
        (np.array([True]), "", "no bool"),
        (np.array([object()]), "", "no object"),
        (np.zeros((1,) * 10, np.uint8), "", "10"),
        (np.zeros(1), "too long a name", "longer than 8"),
        (np.zeros(1), "café", "not ASCII"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(array, name, message):
    with pytest.raises(ValueError, match=message):
        encode_tenbin([array], [name])


def test_names_and_arrays_must_be_as_many():
    with pytest.raises(ValueError, match="1 names for 2 arrays"):
        encode_tenbin(two_arrays(), ["grid"])


def test_the_padding_of_the_last_chunk_may_be_missing():
    assert len(decode_tenbin(FROM_WEBDATASET[:-60])) == 2


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        (b"~TenBin~", TruncatedError, "inside the head"),
        (FROM_WEBDATASET[:80], TruncatedError, "after the header"),
        (FROM_WEBDATASET[:100], TruncatedError, "of which 4 are here"),
        (b"TenBin~~" + FROM_WEBDATASET[8:], FormatError, "does not begin"),
        (one_chunk(b"", -1), FormatError, "-1 bytes"),
        (one_chunk(b"", 1 << 62), TruncatedError, "of which 0 are here"),
        (one_chunk(b"i2"), FormatError, "a header of 2 bytes"),
        (one_chunk(header(kind=b"O8")), FormatError, "unknown type 'O8'"),
        (one_chunk(header(kind=b"\xff" * 8)), FormatError, "unknown type"),
        (one_chunk(header(rank=3)), FormatError, "for 3 dimensions"),
        (one_chunk(header(rank=-1)), FormatError, "for -1 dimensions"),
        (one_chunk(header(shape=(1,) * 10)), FormatError, "for 10 dimensions"),
        (one_chunk(header(shape=(-2,))), FormatError, "negative side"),
        (one_chunk(header(name=b"\xe9")), FormatError, "not ASCII"),
        (padded(one_chunk(header(shape=(3,)))) + one_chunk(b"1234"), FormatError, "takes 6 bytes, and its chunk has 4"),
        (padded(one_chunk(header(shape=(1,)))) + one_chunk(b"1234"), FormatError, "takes 2 bytes, and its chunk has 4"),
        (padded(one_chunk(header(shape=(1 << 62, 1 << 62)))) + one_chunk(b""), FormatError, "its chunk has 0"),
        (padded(one_chunk(header(shape=(0, 1 << 62, 1 << 62)))) + one_chunk(b""), FormatError, "shape"),
    ],
)
def test_damage_is_named(payload, kind, message):
    with pytest.raises(kind, match=message) as caught:
        decode_tenbin(payload)
    assert isinstance(caught.value, ValueError)
    assert caught.value.offset is not None


def test_mutated_payloads_give_arrays_or_an_error_of_the_format(fuzz_count):
    chance = random.Random(7)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(fuzz_count):
        payload = bytearray(FROM_WEBDATASET)
        for _ in range(chance.randint(1, 3)):
            match chance.randrange(3):
                case 0:
                    payload[chance.randrange(len(payload))] = chance.randrange(256)
                case 1:
                    del payload[chance.randrange(len(payload)) + 1 :]
                case _:
                    at = chance.randrange(0, len(payload), 8)
                    payload[at : at + 8] = struct.pack("<q", chance.choice([-1, 0, 1, 9, 1 << 40, (1 << 63) - 1]))
        try:
            found = decode_tenbin(bytes(payload))
        except FormatError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert sum(array.nbytes for array in found) <= len(payload)
    assert min(outcomes.values()) > fuzz_count // 20
