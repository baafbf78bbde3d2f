"""What protobuf and TensorFlow's own parser disagree about. TensorFlow's side was measured with version 2.21."""

from __future__ import annotations

import struct

import pytest

from formats.example_messages import (
    bytes_list,
    delimited,
    entry,
    example,
    feature,
    float_list,
    int64_list,
    key,
    number_field,
    packed,
    value,
)
from shardset.formats.example import encode_example, encode_sequence_example, lint_example
from shardset.formats.example_lint import LINT_CODES

ONE = int64_list(packed(1))
GROUP = b"\x23\x24"

ROWS = {
    "no name": (example(entry(value(ONE))), ["no_key"]),
    "a name in another encoding": (feature(ONE, name=b"\xe9"), ["key_not_utf8"]),
    "two names alike": (feature(ONE) + feature(ONE), ["duplicate_key"]),
    "two names alike, the last without a kind": (feature(ONE) + feature(), ["duplicate_key", "no_kind"]),
    "two names in an entry": (example(entry(key(b"b"), key(b"a"), value(ONE))), ["repeated_key"]),
    "no value": (example(entry(key(b"a"))), ["no_value"]),
    "a value in two parts": (example(entry(key(b"a"), value(ONE), value())), ["repeated_value"]),
    "an unknown field in an entry": (example(entry(key(b"a"), value(ONE), number_field(3, 5))), ["unknown_in_entry"]),
    "an unknown field among the features": (
        example(entry(key(b"a"), value(ONE)), number_field(2, 5)),
        ["unknown_in_features"],
    ),
    "a group beside the features": (GROUP + feature(ONE), ["group"]),
    "no kind": (feature(), ["no_kind"]),
    "an unknown field in a feature": (feature(number_field(9, 1), ONE), ["unknown_in_feature"]),
    "two kinds": (feature(float_list(packed(1.0)), ONE), ["several_kinds"]),
    "two lists": (feature(ONE, ONE), ["repeated_list"]),
    "no values": (feature(int64_list()), ["empty_list"]),
    "no floats": (feature(float_list(packed())), ["empty_list"]),
    "no strings": (feature(bytes_list()), ["empty_list"]),
    "packed and unpacked ints": (feature(int64_list(packed(1), number_field(1, 2))), ["mixed_packing"]),
    "ints packed in two pieces": (feature(int64_list(packed(1), packed(2))), ["mixed_packing"]),
    "unpacked and packed floats": (feature(float_list(b"\x0d\0\0\0\0", packed(1.0))), ["mixed_packing"]),
    "five bytes of floats": (feature(float_list(delimited(1, b"12345"))), ["float_bytes"]),
    "a cut record": (feature(ONE)[:-1], ["malformed"]),
    "a fault behind another": (
        feature() + feature(int64_list(delimited(1, b"\x80")), name=b"b"),
        ["no_kind", "malformed"],
    ),
}


@pytest.mark.parametrize(("raw", "codes"), ROWS.values(), ids=ROWS)
def test_each_disagreement_has_its_code(raw, codes):
    findings = lint_example(raw)
    assert [finding.code for finding in findings] == codes
    assert all(0 <= finding.offset <= len(raw) for finding in findings)
    assert all(finding.message for finding in findings)


def test_every_code_is_found_by_a_test():
    assert {code for _, codes in ROWS.values() for code in codes} == set(LINT_CODES)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        encode_example({"a": [1, -5], "b": b"x", "c": [0.5, 1.5], "d": [b"", b"y"]}),
        encode_sequence_example({"a": 1}, {"s": [b"x", 1.5], "t": []}),
        example(entry(value(ONE), key(b"a"))),
        feature(int64_list(number_field(1, 1), number_field(1, 2))),
        feature(int64_list(packed(1), number_field(2, 1))),
        feature(ONE) + number_field(7, 1),
    ],
)
def test_what_both_read_alike_is_no_finding(raw):
    assert lint_example(raw) == []


def test_a_finding_names_the_feature_and_where_it_begins():
    raw = feature(ONE) + example(entry(key(b"box"), value(float_list(delimited(1, struct.pack("<f", 1) + b"\0")))))
    (finding,) = lint_example(raw)
    assert (finding.field, finding.message) == ("box", LINT_CODES["float_bytes"])
    assert raw[finding.offset :] == delimited(1, struct.pack("<f", 1) + b"\0")
    (finding,) = lint_example(feature()[:-1])
    assert finding.field is None
    assert "at byte" in finding.message


def test_the_steps_of_a_feature_list_are_looked_at():
    raw = encode_sequence_example({"s": None}, {"s": [1, None, []]})
    assert [(finding.code, finding.field) for finding in lint_example(raw)] == [
        ("no_kind", "s"),
        ("no_kind", "s"),
        ("empty_list", "s"),
    ]
