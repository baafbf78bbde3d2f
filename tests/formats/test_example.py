"""Examples and SequenceExamples beside protobuf: each way to write one that the wire format has, and real files."""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import numpy as np
import pytest

from formats.example_messages import (
    IMPLEMENTATION,
    Example,
    SequenceExample,
    all_as_protobuf,
    as_protobuf,
    bytes_list,
    decode,
    delimited,
    entry,
    example,
    feature,
    feature_of,
    features_of,
    float_list,
    int64_list,
    key,
    number_field,
    packed,
    value,
    varint,
)
from shardset.errors import DecodeError
from shardset.formats.example import is_sequence_example, parse_example, parse_sequence_example
from tfrecords import FOREIGN

GROUP = b"\x23\x24"  # of field 4, empty
ONE = struct.pack("<f", 1)


def test_the_oracle_is_the_implementation_that_we_follow():
    assert IMPLEMENTATION == "upb"


# --- accepted: (how it is written, bytes, the value of "a") ---

ACCEPTED = {
    "packed floats": (feature(float_list(packed(1.5, 2.5))), [1.5, 2.5]),
    "unpacked floats": (feature(float_list(b"\x0d" + ONE, b"\x0d" + ONE)), [1.0, 1.0]),
    "packed, then unpacked floats": (feature(float_list(packed(2.0), b"\x0d" + ONE)), [2.0, 1.0]),
    "unpacked, then packed floats": (feature(float_list(b"\x0d" + ONE, packed(2.0, 3.0))), [1.0, 2.0, 3.0]),
    "floats packed in two pieces": (feature(float_list(packed(1.0), packed(2.0))), [1.0, 2.0]),
    "packed ints": (feature(int64_list(packed(1, 300, 3))), [1, 300, 3]),
    "unpacked ints": (feature(int64_list(number_field(1, 1), number_field(1, 300))), [1, 300]),
    "many unpacked ints": (
        feature(int64_list(*(number_field(1, n * n) for n in range(100)))),
        [*map(pow, range(100), [2] * 100)],
    ),
    "many unpacked ints and an unknown field": (
        feature(int64_list(*(number_field(1, n) for n in range(100)), number_field(2, 5))),
        list(range(100)),
    ),
    "packed, then unpacked ints": (feature(int64_list(packed(1, 2), number_field(1, 3))), [1, 2, 3]),
    "unpacked, then packed ints": (feature(int64_list(number_field(1, 3), packed(1, 2))), [3, 1, 2]),
    "negative ints": (feature(int64_list(packed(-1, -(2**63), 2**63 - 1))), [-1, -(2**63), 2**63 - 1]),
    "many negative ints": (feature(int64_list(packed(*range(-50, 50)))), list(range(-50, 50))),
    "many ints of all sizes": (feature(int64_list(packed(*(1 << n for n in range(63))))), [1 << n for n in range(63)]),
    "an int with a byte too many": (feature(int64_list(delimited(1, b"\x81\0"))), [1]),
    "an int in 10 bytes that needs 1": (feature(int64_list(delimited(1, varint(1, padding=9)))), [1]),
    "an int with bits beyond the 64th": (feature(int64_list(delimited(1, b"\xff" * 9 + b"\x7f"))), [-1]),
    "many ints with bits beyond the 64th": (
        feature(int64_list(delimited(1, (b"\xff" * 9 + b"\x7f\1") * 9))),
        [-1, 1] * 9,
    ),
    "a -1 written with 32 bits": (feature(int64_list(delimited(1, b"\xff\xff\xff\xff\x0f"))), [4294967295]),
    "byte strings, one of them empty": (feature(bytes_list(b"one", b"", b"x" * 300)), [b"one", b"", b"x" * 300]),
    "a byte string alone": (feature(bytes_list(b"one")), [b"one"]),
    "no kind": (feature(), None),
    "no value": (example(entry(key(b"a"))), None),
    "empty floats": (feature(float_list()), np.zeros(0, np.float32)),
    "empty ints": (feature(int64_list()), np.zeros(0, np.int64)),
    "empty byte strings": (feature(bytes_list()), []),
    "an empty packed list": (feature(int64_list(packed())), np.zeros(0, np.int64)),
    "two names alike": (
        example(entry(key(b"a"), value(int64_list(packed(1)))), entry(key(b"a"), value(int64_list(packed(2))))),
        [2],
    ),
    "two names alike, the last without a kind": (
        example(entry(key(b"a"), value(int64_list(packed(1)))), entry(key(b"a"), value())),
        None,
    ),
    "two messages of features": (
        feature(int64_list(packed(1))) + feature(float_list(packed(1.0)), name=b"b"),
        [1],
    ),
    "a name in both messages of features": (feature(int64_list(packed(1))) + feature(int64_list(packed(2))), [2]),
    "value before name": (example(entry(value(int64_list(packed(1))), key(b"a"))), [1]),
    "two names in an entry": (example(entry(key(b"b"), key(b"a"), value(int64_list(packed(1))))), [1]),
    "two lists in a feature": (feature(int64_list(packed(1)), int64_list(packed(2))), [1, 2]),
    "two lists of byte strings in a feature": (feature(bytes_list(b"x"), bytes_list(b"y")), [b"x", b"y"]),
    "floats, then ints": (feature(float_list(packed(1.0)), int64_list(packed(2))), [2]),
    "ints, then floats": (feature(int64_list(packed(2)), float_list(packed(1.0))), [1.0]),
    "ints, floats, ints": (feature(int64_list(packed(1)), float_list(), int64_list(packed(2))), [2]),
    "ints, then empty byte strings": (feature(int64_list(packed(1)), bytes_list()), []),
    "a value in two parts": (
        example(entry(key(b"a"), value(int64_list(packed(1))), value(int64_list(packed(2))))),
        [1, 2],
    ),
    "a value in two parts, the first of no kind": (
        example(entry(key(b"a"), value(), value(int64_list(packed(2))))),
        [2],
    ),
    "an unknown number beside the features": (feature(int64_list(packed(1))) + number_field(7, 1 << 40), [1]),
    "an unknown group beside the features": (GROUP + feature(int64_list(packed(1))), [1]),
    "groups in groups": (b"\x23" * 99 + number_field(9, 1) + b"\x24" * 99 + feature(int64_list(packed(1))), [1]),
    "an unknown field among the features": (example(GROUP, entry(key(b"a"), value(int64_list(packed(1))))), [1]),
    "an unknown field in a feature": (feature(number_field(9, 5), int64_list(packed(1)), b"\x51" + bytes(8)), [1]),
    "an unknown field in a list": (feature(int64_list(packed(1), delimited(9, b"xyz"), packed(2))), [1, 2]),
    "a list's field with another wire type": (feature(int64_list(b"\x0d" + ONE, packed(1))), [1]),
    "a feature's field with another wire type": (feature(number_field(3, 5)), None),
    "tags and lengths with 4 bytes too many": (
        delimited(1, delimited(1, delimited(1, b"a", 3) + delimited(2, int64_list(packed(1)), 3), 4), 4),
        [1],
    ),
    "a long name": (feature(int64_list(packed(1)), name=b"n" * 200), None),
    "features longer than 2 MiB": (feature(bytes_list(b"x" * (1 << 21))), [b"x" * (1 << 21)]),
}


@pytest.mark.parametrize(("raw", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_protobuf_accepts_has_the_values_that_it_gives(raw, expected):
    parsed = parse_example(raw)
    assert all_as_protobuf(parsed) == features_of(decode(raw).features.feature)
    if "a" in parsed:
        np.testing.assert_array_equal(parsed["a"], expected, strict=isinstance(expected, np.ndarray))
        assert (parsed["a"] is None) == (expected is None)


@pytest.mark.parametrize("raw", [raw for raw, _ in ACCEPTED.values()], ids=ACCEPTED)
def test_a_view_gives_what_bytes_give(raw):
    held = bytearray(b"??" + raw + b"!!")
    view = memoryview(held)[2:-2]
    expected = all_as_protobuf(parse_example(raw))
    assert all_as_protobuf(parse_example(view)) == expected
    as_views = parse_example(view, views=True)
    assert all_as_protobuf(as_views) == expected
    assert all(type(item) is memoryview for value in as_views.values() if isinstance(value, list) for item in value)
    assert all_as_protobuf(parse_example(raw, views=True)) == expected


# --- refused ---

REFUSED = {
    "a number of 11 bytes": feature(int64_list(delimited(1, varint(1, padding=10)))),
    "a number of 11 bytes among many": feature(int64_list(delimited(1, b"\1" * 90 + varint(1, padding=10)))),
    "a number cut off": feature(int64_list(delimited(1, b"\1\x80"))),
    "a number cut off after many": feature(int64_list(delimited(1, b"\x81\1" * 90 + b"\x80"))),
    "a number cut off between two packed pieces": feature(int64_list(delimited(1, b"\x80"), delimited(1, b"\1"))),
    "five bytes of packed floats": feature(float_list(delimited(1, ONE + b"\0"))),
    "a broken list of a kind that does not count": feature(float_list(delimited(1, b"x")), int64_list(packed(1))),
    "a broken feature whose name comes again": feature(int64_list(delimited(1, b"\x80"))) + feature(),
    "a length beyond the end": b"\x0a\x05\x0a\x01a",
    "a length beyond its message": example(b"\x0a\x7f", key(b"a")),
    "a length of 2 GiB": b"\x0a\xff\xff\xff\xff\x07",
    "a length of 2 EiB": b"\x0a" + b"\xff" * 8 + b"\x01",
    "a length of 6 bytes": feature(b"\x1a" + varint(3, padding=5) + packed(1)),
    "a tag of 6 bytes": varint(0x0A, padding=5) + b"\0",
    "a tag beyond 32 bits": b"\x8a\x80\x80\x80\x10\0",
    "a tag cut off": b"\x8a",
    "a length cut off": b"\x0a",
    "a length cut off in its second byte": b"\x0a\x80",
    "field number 0": b"\0\0",
    "wire type 6": b"\x0e\0",
    "wire type 7": b"\x0f\0",
    "a group that ends and never began": b"\x0c",
    "a group that never ends": b"\x23",
    "a group that ends as another": b"\x23\x2c",
    "a group that ends outside its message": delimited(1, b"\x23") + b"\x24",
    "101 groups in each other": b"\x23" * 101 + b"\x24" * 101,
    "97 groups in each other inside a list": feature(int64_list(b"\x23" * 97 + b"\x24" * 97)),
    "a fixed number cut off": b"\x21\0\0\0\0",
    "text": b"version https://git-lfs.github.com/spec/v1\n",
    "NULs": bytes(16),
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
def test_what_protobuf_refuses_is_an_error_that_names_the_byte(raw):
    assert decode(raw) is None
    with pytest.raises(DecodeError, match=r" at byte \d+ of the record") as caught:
        parse_example(raw)
    assert caught.value.hint


def test_an_error_names_the_very_byte():
    raw = feature(int64_list(packed(1)), name=b"first") + feature(int64_list(delimited(1, b"\1\x80")))
    with pytest.raises(DecodeError, match=f"cut off at byte {len(raw)} of the record"):
        parse_example(raw)
    raw = feature(float_list(delimited(1, b"12345")))
    with pytest.raises(
        DecodeError, match=f"has 5 bytes, which 4 does not divide, at byte {len(raw) - 5} of the record"
    ):
        parse_example(raw)


def test_every_cut_of_a_record_is_refused():
    raw = feature(int64_list(packed(1, 300)), bytes_list(b"x" * 200))
    for cut in range(1, len(raw)):
        assert decode(raw[:cut]) is None
        with pytest.raises(DecodeError):
            parse_example(raw[:cut])


def test_an_entry_with_an_unknown_field_is_dropped_as_a_whole_as_upb_does():
    for parts in ([key(b"a"), number_field(3, 5), value()], [key(b"a"), value(), GROUP], [number_field(1, 5), value()]):
        raw = example(entry(*parts), entry(key(b"b"), value()))
        assert list(parse_example(raw)) == ["b"] == list(decode(raw).features.feature)
    raw = example(entry(key(b"a"), number_field(3, 5), value(int64_list(delimited(1, b"\x80")))))
    assert decode(raw) is None
    with pytest.raises(DecodeError):
        parse_example(raw)


def test_a_name_that_is_not_utf8_is_kept_with_surrogate_escapes():
    raw = feature(int64_list(packed(1)), name=b"caf\xe9")
    assert decode(raw) == "not UTF-8"
    assert list(parse_example(raw)) == ["caf\udce9"]
    assert next(iter(parse_example(raw))).encode("utf-8", "surrogateescape") == b"caf\xe9"


def test_a_hundred_thousand_groups_in_each_other_are_refused_without_recursion():
    with pytest.raises(DecodeError, match="nested deeper than 100"):
        parse_example(b"\x23" * 100_000)


def test_a_length_is_not_believed_before_it_is_compared_with_what_is_left():
    raws = [b"\x0a\xff\xff\xff\xff\x07", feature(b"\x1a\xff\xff\xff\x7f"), feature(float_list(b"\x0a\xfc\xff\xff\x7f"))]
    tracemalloc.start()
    try:
        for raw in raws:
            with pytest.raises(DecodeError):
                parse_example(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- what is given ---


def test_missing_no_kind_and_empty_are_three_different_things():
    raw = example(
        entry(key(b"no kind"), value()),
        entry(key(b"floats"), value(float_list())),
        entry(key(b"ints"), value(int64_list())),
        entry(key(b"strings"), value(bytes_list())),
    )
    parsed = parse_example(raw)
    assert "missing" not in parsed
    assert parsed["no kind"] is None
    assert (parsed["floats"].dtype, parsed["floats"].shape) == (np.float32, (0,))
    assert (parsed["ints"].dtype, parsed["ints"].shape) == (np.int64, (0,))
    assert parsed["strings"] == []


def test_a_list_with_one_value_stays_a_list():
    parsed = parse_example(feature(int64_list(packed(5))) + feature(bytes_list(b"x"), name=b"b"))
    assert parsed["a"].shape == (1,)
    assert parsed["b"] == [b"x"]


def test_packed_floats_are_a_view_of_the_record_that_cannot_be_written_to():
    raw = feature(float_list(packed(1.0, 2.0)))
    floats = parse_example(raw)["a"]
    assert np.shares_memory(floats, np.frombuffer(raw, np.uint8))
    assert not floats.flags.writeable
    held = bytearray(raw)
    floats = parse_example(held, views=True)["a"]
    assert np.shares_memory(floats, np.frombuffer(held, np.uint8))
    assert not floats.flags.writeable


def test_views_of_byte_strings_are_cut_from_the_record_and_others_leave_it_free():
    held = bytearray(feature(bytes_list(b"image")))
    kept = parse_example(held)
    view = parse_example(held, views=True)["a"][0]
    at = bytes(held).index(b"image")
    held[at] = ord("I")
    assert (bytes(view), kept["a"]) == (b"Image", [b"image"])
    view.release()
    held.append(0)  # raises as long as something holds on to it


def test_whole_numbers_are_an_array_of_their_own():
    ints = parse_example(feature(int64_list(packed(1, 2, 3))))["a"]
    ints += 1
    assert ints.tolist() == [2, 3, 4]


def test_names_come_in_the_order_in_which_they_first_appear():
    raw = example(*(entry(key(name), value()) for name in (b"z", b"a", b"m", b"z")))
    assert list(parse_example(raw)) == ["z", "a", "m"]


def test_only_the_features_that_are_asked_for_are_decoded():
    broken = int64_list(delimited(1, b"\x80"))
    raw = example(
        entry(key(b"a"), value(int64_list(packed(1)))),
        entry(key(b"b"), value(broken)),
        entry(value(int64_list(packed(3))), key(b"c")),
        entry(value(broken), key(b"d")),
    )
    assert {name: found.tolist() for name, found in parse_example(raw, ["c", "a", "none"]).items()} == {
        "a": [1],
        "c": [3],
    }
    assert parse_example(raw, []) == {}
    assert parse_example(raw, frozenset("a")).keys() == {"a"}
    for name in "bd":
        with pytest.raises(DecodeError):
            parse_example(raw, {name})
    with pytest.raises(TypeError, match="the one string 'label'"):
        parse_example(raw, "label")


def test_records_that_differ_only_where_an_earlier_one_made_expect_otherwise_are_read_right():
    # What stood behind a name before is expected to come again: here it does not, in every field of the entry.
    first = example(entry(key(b"a"), value()), entry(key(b"b"), value(int64_list(packed(1, 2)))))
    others = [
        example(entry(key(b"a"), value()), entry(key(b"b"), value(int64_list(packed(1))))),
        example(entry(key(b"a"), value()), entry(key(b"b"), value(bytes_list(b"12")))),
        example(entry(key(b"a"), value()), entry(key(b"c"), value(int64_list(packed(1, 2))))),
        example(entry(key(b"a"), value())),
        example(entry(key(b"a"), value()), entry(key(b"b"), value(int64_list(packed(1, 300))))),
        example(entry(key(b"b"), value(int64_list(packed(1, 2)))), entry(key(b"a"), value())),
    ]
    for other in others:
        for raw in (first, other, first):
            assert all_as_protobuf(parse_example(raw)) == features_of(decode(raw).features.feature)
    parse_example(first)
    short = example(entry(key(b"a"), value()), entry(key(b"b"), value(int64_list(packed(1, 2))))[:-1])
    with pytest.raises(DecodeError):
        parse_example(short)
    with pytest.raises(DecodeError):
        parse_example(short + b"\x02")  # the byte that it lacks stands behind its message


def test_ever_new_names_do_not_fill_the_memory():
    tracemalloc.start()
    try:
        for number in range(9000):
            parse_example(feature(int64_list(packed(1)), name=b"name-%d" % number))
        assert tracemalloc.get_traced_memory()[0] < 8 << 20
    finally:
        tracemalloc.stop()


# --- SequenceExample ---


def sequence(*lists, context=()):
    return example(*context) + delimited(2, b"".join(lists))


def steps(name, *features):
    return entry(key(name), value(*(delimited(1, one) for one in features)))


def lists_of(message):
    return {
        name: [feature_of(one) for one in steps.feature] for name, steps in message.feature_lists.feature_list.items()
    }


SEQUENCES = {
    "steps of all kinds": sequence(
        steps(b"s", int64_list(packed(1, 2)), b"", float_list(packed(1.0)), bytes_list(b"x", b""), bytes_list()),
        steps(b"none"),
        context=[entry(key(b"i"), value()), entry(key(b"f"), value(float_list(packed(2.0))))],
    ),
    "a list twice": sequence(steps(b"s", int64_list(packed(1))), steps(b"s", int64_list(packed(2)))),
    "a list in two parts": sequence(
        entry(key(b"s"), value(delimited(1, b"")), value(delimited(1, int64_list(packed(1)))))
    ),
    "two messages of lists": sequence(steps(b"s", b"")) + sequence(steps(b"t", b"")),
    "an unknown field in a list's entry": sequence(entry(key(b"s"), value(delimited(1, b"")), number_field(9, 1))),
    "unknown fields": sequence(GROUP, entry(key(b"s"), value(number_field(1, 1), delimited(1, b""))))
    + number_field(3, 1),
    "steps written in parts": sequence(steps(b"s", int64_list(packed(1)) + int64_list(number_field(1, 2)))),
    "no lists": sequence(),
    "only a context": feature(int64_list(packed(1))),
    "nothing": b"",
}


@pytest.mark.parametrize("raw", SEQUENCES.values(), ids=SEQUENCES)
def test_a_sequence_example_is_what_protobuf_says(raw):
    message = decode(raw, "SequenceExample")
    parsed = parse_sequence_example(raw)
    assert all_as_protobuf(parsed.context) == features_of(message.context.feature)
    assert {name: list(map(as_protobuf, values)) for name, values in parsed.feature_lists.items()} == lists_of(message)
    assert is_sequence_example(raw) == message.HasField("feature_lists")
    assert all_as_protobuf(parse_example(raw)) == features_of(decode(raw).features.feature)


def test_fields_choose_among_context_and_lists():
    raw = sequence(
        steps(b"s", int64_list(packed(1))),
        steps(b"t", int64_list(delimited(1, b"\x80"))),
        context=[entry(key(b"i"), value()), entry(key(b"j"), value())],
    )
    parsed = parse_sequence_example(raw, ["s", "j"])
    assert (list(parsed.context), list(parsed.feature_lists)) == (["j"], ["s"])
    with pytest.raises(DecodeError):
        parse_sequence_example(raw)


def test_what_is_no_message_is_neither():
    for raw in (b"\x0f", b"\x0a\x05", b"\x12\x01"):
        with pytest.raises(DecodeError):
            is_sequence_example(raw)


# --- real files ---


def payloads(path):
    whole = path.read_bytes()
    whole = gzip.decompress(whole) if path.suffix == ".gz" else whole
    position = 0
    while position < len(whole):
        (length,) = struct.unpack_from("<Q", whole, position)
        yield whole[position + 12 : position + 12 + length]
        position += 16 + length


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mnist_20.tfrecord", 20),
        ("next_page.tfrecord.gz", 100),
        ("penguin-00000-of-00001.gz", 100),
        ("unlabelled_data_tfrecord-00008-of-00012.gz", 205),
    ],
)
def test_examples_of_other_projects_are_what_protobuf_says(name, count):
    records = list(payloads(FOREIGN / name))
    assert len(records) == count
    for raw in records:
        assert all_as_protobuf(parse_example(raw)) == features_of(Example.FromString(raw).features.feature)
        assert not is_sequence_example(raw)


def test_sequence_examples_of_other_projects_are_what_protobuf_says():
    records = list(payloads(FOREIGN / "sequence_eval.gz"))
    assert len(records) == 4500
    for raw in records[::10]:
        parsed, message = parse_sequence_example(raw), SequenceExample.FromString(raw)
        assert all_as_protobuf(parsed.context) == features_of(message.context.feature)
        assert {name: list(map(as_protobuf, found)) for name, found in parsed.feature_lists.items()} == lists_of(
            message
        )
        assert is_sequence_example(raw)
    kinds = [parse_sequence_example(raw).context for raw in records]
    assert sum(context["i"] is None for context in kinds) == 450  # the features without a kind that crash other readers
