"""Encoding Examples: protobuf's bytes, nothing lost on the way there and back, and what does not fit refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from formats.example_messages import Example, SequenceExample, all_as_protobuf, as_protobuf, varint
from shardset.formats.example import (
    encode_example,
    encode_sequence_example,
    is_sequence_example,
    parse_example,
    parse_sequence_example,
)
from shardset.formats.example_encode import packed_size

LISTS = {"bytes": "bytes_list", "float": "float_list", "int64": "int64_list", None: None}
NAMES = st.text(st.characters(codec="utf-8"), max_size=6)
VALUES = st.one_of(
    st.none(),
    st.lists(st.binary(max_size=300), max_size=4),
    arrays.arrays("<i8", st.integers(0, 40), elements=st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300)),
    arrays.arrays("<f4", st.integers(0, 40), elements=st.floats(width=32)),
)


def fill(message, kind, values):
    """Set protobuf's Feature, even to an empty list."""
    message.SetInParent()
    if kind is not None:
        found = getattr(message, LISTS[kind])
        found.SetInParent()
        found.value.extend(values)


def by_protobuf(features):
    """Return protobuf's bytes of {name: (kind, values)}."""
    message = Example()
    for name, (kind, values) in features.items():
        fill(message.features.feature[name], kind, values)
    return message.SerializeToString(deterministic=True)


def as_kind(value):
    """Return one of our values as (kind, values)."""
    if value is None:
        return None, []
    if isinstance(value, list):
        return "bytes", value
    return "float" if value.dtype == np.float32 else "int64", value.tolist()


class Named:
    """What numpy makes an array of without being one, as a tensor."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.array(self.value, dtype)


GIVEN = {
    "bytes": (b"abc", "bytes", [b"abc"]),
    "no bytes": (b"", "bytes", [b""]),
    "a bytearray": (bytearray(b"abc"), "bytes", [b"abc"]),
    "a view": (memoryview(b"xabcx")[1:4], "bytes", [b"abc"]),
    "a view of floats": (memoryview(np.ones(1, "<f4")), "bytes", [b"\0\0\x80\x3f"]),
    "a string": ("é", "bytes", ["é".encode()]),
    "a long value": (b"x" * 70_000, "bytes", [b"x" * 70_000]),
    "strings and bytes": (["é", b"b", bytearray(b"c"), memoryview(b"d")], "bytes", ["é".encode(), b"b", b"c", b"d"]),
    "a tuple": ((b"a", b"b"), "bytes", [b"a", b"b"]),
    "an int": (5, "int64", [5]),
    "a negative int": (-1, "int64", [-1]),
    "the least and the greatest int": ([-(2**63), 2**63 - 1], "int64", [-(2**63), 2**63 - 1]),
    "a bool": (True, "int64", [1]),
    "small ints": ([0, 1, 127], "int64", [0, 1, 127]),
    "middle ints": ([128, 255], "int64", [128, 255]),
    "larger ints": ([1, 300, 70_000], "int64", [1, 300, 70_000]),
    "many ints": (list(range(0, 60_000, 7)), "int64", list(range(0, 60_000, 7))),
    "ints and bools": ([1, True, False], "int64", [1, 1, 0]),
    "a float": (0.1, "float", [0.1]),
    "floats": ([0.1, -0.0, float("inf"), float("-inf")], "float", [0.1, -0.0, float("inf"), float("-inf")]),
    "not a number": (float("nan"), "float", [float("nan")]),
    "floats and ints": ([1, 2.5, True], "float", [1, 2.5, 1]),
    "None": (None, None, []),
    "an empty list": ([], "bytes", []),
    "an empty tuple": ((), "bytes", []),
    "empty floats": (np.zeros(0, np.float32), "float", []),
    "empty ints": (np.zeros(0, np.int64), "int64", []),
    "empty objects": (np.zeros(0, object), "bytes", []),
    "float16": (np.array([0.5, 65504], np.float16), "float", [0.5, 65504]),
    "float64": (np.array([0.1, np.inf]), "float", [0.1, float("inf")]),
    "floats of the other byte order": (np.array([1.5], ">f4"), "float", [1.5]),
    "ints of the other byte order": (np.array([1, 300], ">i4"), "int64", [1, 300]),
    "uint8": (np.array([0, 255], np.uint8), "int64", [0, 255]),
    "int8": (np.array([-128, 127], np.int8), "int64", [-128, 127]),
    "uint64": (np.array([0, 2**63 - 1], np.uint64), "int64", [0, 2**63 - 1]),
    "bools": (np.array([True, False]), "int64", [1, 0]),
    "byte strings": (np.array([b"a", b"bc"]), "bytes", [b"a", b"bc"]),
    "strings": (np.array(["é", "bc"]), "bytes", ["é".encode(), b"bc"]),
    "objects": (np.array([b"a\0", "b"], object), "bytes", [b"a\0", b"b"]),
    "objects that are ints": (np.array([1, 2**62], object), "int64", [1, 2**62]),
    "an array without dimensions": (np.array(7), "int64", [7]),
    "numpy's scalars": ([np.int64(7), np.uint8(3)], "int64", [7, 3]),
    "numpy's float": (np.float32(0.1), "float", [np.float32(0.1)]),
    "numpy's int among floats": ([np.int64(1), 0.5], "float", [1, 0.5]),
    "a matrix": (np.arange(6).reshape(2, 3), "int64", [0, 1, 2, 3, 4, 5]),
    "a matrix in the other order": (np.asfortranarray(np.arange(6.0).reshape(2, 3)), "float", [0, 1, 2, 3, 4, 5]),
    "every other number": (np.arange(10)[::2], "int64", [0, 2, 4, 6, 8]),
    "lists in a list": ([[1, 2], [3, 300]], "int64", [1, 2, 3, 300]),
    "lists of bytes in a list": ([[b"a"], [b"b"]], "bytes", [b"a", b"b"]),
    "large ints in lists": ([[-1, 2**63 - 1]], "int64", [-1, 2**63 - 1]),
    "arrays in a list": ([np.ones(2, np.float32), np.zeros(2)], "float", [1, 1, 0, 0]),
    "a tensor": (Named([1.5, 2]), "float", [1.5, 2]),
}


@pytest.mark.parametrize(("value", "kind", "values"), GIVEN.values(), ids=GIVEN)
def test_a_value_is_written_as_protobuf_writes_it(value, kind, values):
    assert encode_example({"name": value}) == by_protobuf({"name": (kind, values)})


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_features_are_written_as_protobuf_writes_them_and_come_back(features):
    raw = encode_example(features)
    assert raw == by_protobuf({name: as_kind(value) for name, value in features.items()})
    parsed = parse_example(raw)
    assert all_as_protobuf(parsed) == all_as_protobuf(features)
    assert list(parsed) == sorted(features, key=lambda name: name.encode() + b"\xff")
    assert encode_example(parsed) == raw
    assert encode_example(parse_example(raw, views=True)) == raw


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), st.integers(0, 63))
def test_ints_of_every_size_are_written_alike_from_lists_and_arrays(numbers, shift):
    numbers = [number >> shift for number in numbers]
    expected = by_protobuf({"a": ("int64", numbers)})
    array = np.array(numbers, np.int64)
    assert encode_example({"a": array}) == expected
    if numbers:
        assert encode_example({"a": numbers}) == expected
    assert packed_size(array) == sum(len(varint(number)) for number in numbers)
    assert parse_example(expected)["a"].tolist() == numbers


def test_a_list_longer_than_what_is_spread_at_once_is_whole():
    numbers = np.arange(-20_000, 20_000) * 12_345
    raw = encode_example({"a": numbers})
    assert raw == by_protobuf({"a": ("int64", numbers.tolist())})
    np.testing.assert_array_equal(parse_example(raw)["a"], numbers)


def test_every_bit_of_a_float_stays():
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x00000001, 0x80000000, 0x7F7FFFFF], "<u4")
    parsed = parse_example(encode_example({"a": bits.view("<f4")}))["a"]
    assert parsed.view("<u4").tolist() == bits.tolist()


def test_names_that_are_not_utf8_come_back_and_sort_by_their_bytes():
    raw = encode_example({"\udcff": 1, "\U0001f600": 2, "\uffee": 3})
    assert list(parse_example(raw)) == ["\uffee", "\U0001f600", "\udcff"]
    assert encode_example(parse_example(raw)) == raw


def test_a_name_stands_behind_those_that_begin_with_it_as_in_protobuf():
    features = dict.fromkeys(("", "image", "image/encoded", "imagine", "a", "é"))
    raw = encode_example(features)
    assert raw == by_protobuf(dict.fromkeys(features, (None, [])))
    assert list(parse_example(raw)) == ["a", "image/encoded", "image", "imagine", "é", ""]


def test_no_features_are_no_bytes():
    assert encode_example({}) == b"" == Example().SerializeToString()
    assert parse_example(b"") == {}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (2**63, ValueError, "does not fit 64-bit integers"),
        (-(2**63) - 1, ValueError, "does not fit"),
        ([1] * 100 + [2**63], ValueError, "does not fit"),
        (np.array([2**63], np.uint64), ValueError, "does not fit"),
        (np.array([2**63], ">u8"), ValueError, "does not fit"),
        ([np.int64(-1), np.uint64(2**63)], ValueError, "does not fit"),
        ([[1, 2**64]], ValueError, "does not fit"),
        (1e39, ValueError, "does not fit 64-bit integers or 32-bit floats"),
        ([0.5, -1e39], ValueError, "does not fit"),
        (np.array([0.5] * 40 + [1e39]), ValueError, "too large for a 32-bit float"),
        (np.float64(3.5e38), ValueError, "too large"),
        ([[1, 2], [3]], ValueError, "different lengths"),
        ("\ud800", ValueError, "surrogates not allowed"),
        ([1, b"a"], TypeError, "either numbers, or bytes"),
        ([b"a", 1], TypeError, "holds a value of type int"),
        (["a", None], TypeError, "holds a value of type NoneType"),
        ([None], TypeError, "type NoneType is no feature"),
        ({"a": 1}, TypeError, "type dict is no feature"),
        ({1, 2}, TypeError, "type set is no feature"),
        (1j, TypeError, "type complex is no feature"),
        (np.array([1j]), TypeError, "array of complex128"),
        (np.array(["2020-01-01"], "M8[D]"), TypeError, "datetime64"),
        (np.array([b"a", 1], object), TypeError, "holds a value of type int"),
    ],
)
def test_what_an_example_cannot_hold_is_refused_by_name(value, error, words):
    with pytest.raises(error, match=f"feature 'label': .*{words}"):
        encode_example({"image": b"x", "label": value})
    with pytest.raises(error, match=f"feature 'label': .*{words}"):
        encode_sequence_example({}, {"label": [1, value]})


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="not b'label'"):
        encode_example({b"label": 1})


# --- SequenceExample ---


def sequence_by_protobuf(context, lists):
    message = SequenceExample()
    for name, (kind, values) in context.items():
        fill(message.context.feature[name], kind, values)
    message.feature_lists.SetInParent()
    for name, steps in lists.items():
        message.feature_lists.feature_list[name].SetInParent()
        for kind, values in steps:
            fill(message.feature_lists.feature_list[name].feature.add(), kind, values)
    return message.SerializeToString(deterministic=True)


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.dictionaries(NAMES, st.lists(VALUES, max_size=4), max_size=3))
def test_a_sequence_example_is_written_as_protobuf_writes_it_and_comes_back(context, lists):
    raw = encode_sequence_example(context, lists)
    assert raw == sequence_by_protobuf(
        {name: as_kind(value) for name, value in context.items()},
        {name: [*map(as_kind, steps)] for name, steps in lists.items()},
    )
    assert is_sequence_example(raw)
    parsed = parse_sequence_example(raw)
    assert all_as_protobuf(parsed.context) == all_as_protobuf(context)
    assert {name: [*map(as_protobuf, steps)] for name, steps in parsed.feature_lists.items()} == {
        name: [*map(as_protobuf, steps)] for name, steps in lists.items()
    }
    assert encode_sequence_example(*parsed) == raw


def test_the_rows_of_an_array_are_steps():
    raw = encode_sequence_example({}, {"a": np.arange(4).reshape(2, 2), "b": (step for step in (1.5, 2.5)), "c": []})
    lists = parse_sequence_example(raw).feature_lists
    assert [step.tolist() for step in lists["a"]] == [[0, 1], [2, 3]]
    assert [step.tolist() for step in lists["b"]] == [[1.5], [2.5]]
    assert lists["c"] == []
    with pytest.raises(TypeError, match="'a': a feature list is a list of steps"):
        encode_sequence_example({}, {"a": b"abc"})


def test_a_name_that_utf8_does_not_have_is_named():
    with pytest.raises(ValueError, match="ud800"):
        encode_example({"\ud800": [1]})
