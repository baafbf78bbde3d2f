"""Serialized tensors, made byte by byte as TensorFlow makes them."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from formats.example_messages import delimited, number_field, varint
from shardset.errors import DecodeError, LimitError
from shardset.formats.example import decode_tensor

NAMES = (
    "float32 float64 int32 uint8 int16 int8 - complex64 int64 bool",
    "- - - - - -",
    "uint16 complex128 float16 - - uint32 uint64",
)
NUMBERS = {name: number for number, name in enumerate(" ".join(NAMES).split(), 1) if name != "-"}
"""TensorFlow's number of each type that numpy has too."""
QUANTIZED = {11: "int8", 12: "uint8", 13: "int32", 15: "int16", 16: "uint16"}
BFLOAT16, STRING = 14, 7
FIELDS = {1: 5, 2: 6, 7: 8, 8: 9, 9: 10, 10: 11, 14: 13, 18: 12, 19: 13, 22: 16, 23: 17}  # others: 7


def shape(*sizes):
    return delimited(2, b"".join(delimited(2, number_field(1, size)) for size in sizes))


def tensor(number, sizes, *fields):
    return number_field(1, number) + shape(*sizes) + b"".join(fields)


def content(data):
    return delimited(4, data)


def by_values(array, number):
    """Return an array's values in the field that its type has for them, as (packed) bytes."""
    flat = array.ravel()
    if flat.dtype.kind in "fc" and flat.dtype != np.float16:
        return delimited(FIELDS[number], flat.tobytes())
    bits = flat.view(np.uint16) if flat.dtype == np.float16 else flat
    return delimited(FIELDS.get(number, 7), b"".join(varint(int(value)) for value in bits))


ARRAYS = st.sampled_from(sorted(NUMBERS)).flatmap(
    lambda name: arrays.arrays(
        np.dtype(name).newbyteorder("<"), arrays.array_shapes(min_dims=0, min_side=0, max_side=4)
    )
)


@given(ARRAYS)
def test_an_array_comes_back_from_its_content_and_from_its_values(array):
    number = NUMBERS[array.dtype.name]
    for raw in (
        tensor(number, array.shape, content(array.tobytes())),
        tensor(number, array.shape, by_values(array, number)),
    ):
        decoded = decode_tensor(raw)
        assert decoded.dtype == array.dtype
        assert decoded.tobytes() == array.tobytes()
        assert decoded.shape == array.shape
        assert decode_tensor(memoryview(bytearray(raw))).tobytes() == array.tobytes()


@pytest.mark.parametrize(("number", "name"), QUANTIZED.items())
def test_quantized_numbers_are_plain_integers(number, name):
    array = np.array([1, 2, 100], name)
    assert decode_tensor(tensor(number, [3], content(array.tobytes()))).dtype == array.dtype
    assert decode_tensor(tensor(number, [3], by_values(array, number))).tolist() == [1, 2, 100]


def test_bfloat16_becomes_float32_exactly():
    expected = np.array([1.0, -2.5, np.inf, 0.0078125], np.float32)
    halves = (expected.view(np.uint32) >> 16).astype("<u2")
    for field in (content(halves.tobytes()), by_values(halves, BFLOAT16)):
        decoded = decode_tensor(tensor(BFLOAT16, [4], field))
        assert decoded.dtype == np.float32
        assert decoded.tolist() == expected.tolist()


def test_strings_are_objects_of_bytes_from_values_and_from_content():
    strings = [b"a", b"", b"x" * 300, b"\xff\0"]
    values = b"".join(delimited(8, string) for string in strings)
    joined = content(b"".join(varint(len(string)) for string in strings) + b"".join(strings))
    for field in (values, joined):
        decoded = decode_tensor(tensor(STRING, [2, 2], field))
        assert decoded.dtype == object
        assert decoded.tolist() == [strings[:2], strings[2:]]


def test_unpacked_values_count_too():
    floats = b"".join(b"\x2d" + struct.pack("<f", value) for value in (1, 2))
    assert decode_tensor(tensor(1, [3], floats, delimited(5, struct.pack("<f", 3)))).tolist() == [1, 2, 3]
    assert decode_tensor(tensor(3, [2], number_field(7, -1), number_field(7, 5))).tolist() == [-1, 5]


def test_negative_values_of_short_integers_are_kept():
    assert decode_tensor(tensor(6, [2], delimited(7, varint(-1) + varint(-128)))).tolist() == [-1, -128]
    assert decode_tensor(tensor(10, [2], delimited(11, varint(256) + varint(0)))).tolist() == [True, False]


def test_a_scalar_needs_no_shape():
    decoded = decode_tensor(number_field(1, 3) + number_field(7, 5))
    assert (decoded.shape, decoded.item()) == ((), 5)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (tensor(1, [5], delimited(5, struct.pack("<3f", 1, 2, 3))), [1, 2, 3, 3, 3]),
        (tensor(3, [2, 2], number_field(7, 9)), [[9, 9], [9, 9]]),
        (tensor(STRING, [2], delimited(8, b"q")), [b"q", b"q"]),
        (tensor(1, [3]), [0, 0, 0]),
        (tensor(STRING, [2]), [b"", b""]),
        (tensor(1, [0]), []),
    ],
)
def test_the_last_value_stands_for_those_that_are_left_out(raw, expected):
    assert decode_tensor(raw).tolist() == expected


def test_one_value_for_a_terabyte_of_elements_takes_no_memory():
    tracemalloc.start()
    try:
        decoded = decode_tensor(tensor(1, [1 << 19, 1 << 19], delimited(5, struct.pack("<f", 7))))
        assert decoded.shape == (1 << 19, 1 << 19)
        assert decoded[-1, -1] == 7
        with pytest.raises(LimitError, match="more than 256 MiB"):
            decode_tensor(tensor(1, [1 << 30], delimited(5, struct.pack("<2f", 7, 8))))
        with pytest.raises(DecodeError, match="has a content of 4 bytes"):
            decode_tensor(tensor(1, [1 << 40], content(bytes(4))))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("raw", "error", "words"),
    [
        (b"", DecodeError, "type number 0"),
        (tensor(20, []), DecodeError, "type number 20"),
        (tensor(101, []), DecodeError, "type number 101"),
        (tensor(1, [2], content(bytes(9))), DecodeError, "2 elements of 4 bytes has a content of 9 bytes"),
        (tensor(1, [2], content(bytes(4))), DecodeError, "content of 4 bytes"),
        (tensor(1, [1], delimited(5, bytes(8))), DecodeError, "1 elements has 2 values"),
        (tensor(1, [0], delimited(5, bytes(4))), DecodeError, "0 elements has 1 values"),
        (tensor(1, [1], delimited(5, bytes(5))), DecodeError, "5 bytes at byte"),
        (tensor(8, [1], delimited(9, bytes(4))), DecodeError, "imaginary part"),
        (tensor(3, [1], delimited(7, b"\x80")), DecodeError, "cut off"),
        (tensor(1, [-1]), DecodeError, "not known, or negative"),
        (number_field(1, 1) + delimited(2, number_field(3, 1)), DecodeError, "shape is not known"),
        (tensor(1, [1 << 40, 1 << 40]), LimitError, "beyond what an array can have"),
        (tensor(1, [0, 1 << 62]), LimitError, "beyond what an array can have"),
        (tensor(1, [1] * 65), LimitError, "beyond what an array can have"),
        (tensor(STRING, [2], content(b"\1")), DecodeError, "2 strings has a content of 1 bytes"),
        (tensor(STRING, [2], content(b"\1\1ab.")), DecodeError, "strings have 2 bytes, and 3 are there"),
        (tensor(STRING, [2], content(b"\1\x80")), DecodeError, "cut off"),
        (b"version https://git-lfs", DecodeError, "at byte"),
    ],
)
def test_what_is_no_tensor_is_refused(raw, error, words):
    with pytest.raises(error, match=words):
        decode_tensor(raw)


def test_damaged_tensors_give_an_array_or_an_error(fuzz_count):
    whole = [tensor(number, [2, 3], content(np.ones(6, name).tobytes())) for name, number in NUMBERS.items()]
    whole += [tensor(number, [2, 3], by_values(np.ones(6, name), number)) for name, number in NUMBERS.items()]
    whole += [tensor(STRING, [2], delimited(8, b"abc"), delimited(8, b"d")), tensor(STRING, [2], content(b"\1\2abc"))]
    refused = 0
    for number in range(fuzz_count):
        chooser = random.Random(number)
        raw = bytearray(chooser.choice(whole))
        for _ in range(chooser.choice((1, 2, 4))):
            at = chooser.randrange(len(raw))
            if chooser.random() < 0.7:
                raw[at] = chooser.randrange(256)
            else:
                raw[at : at + chooser.choice((0, 1, 3))] = chooser.randbytes(chooser.choice((0, 1, 3)))
        try:
            assert isinstance(decode_tensor(raw), np.ndarray)
        except (DecodeError, LimitError):
            refused += 1
    assert fuzz_count // 10 < refused < fuzz_count
