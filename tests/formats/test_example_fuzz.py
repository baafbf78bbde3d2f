"""Examples of any shape, whole and damaged, beside protobuf: the same values, or both refuse."""

from __future__ import annotations

import math
import random
from collections import Counter
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.example_messages import (
    all_as_protobuf,
    as_protobuf,
    decode,
    delimited,
    feature_of,
    features_of,
    varint,
)
from shardset.errors import DecodeError
from shardset.formats.example import (
    is_sequence_example,
    lint_example,
    parse_example,
    parse_sequence_example,
)
from shardset.formats.example_schema import SchemaBuilder

NUMBERS = [0, 1, 127, 128, 300, 16383, 16384, 2**31, 2**32 - 1, 2**56, 2**63 - 1, 2**63, 2**64 - 1]
NAMES = [b"a", b"b", b"image/encoded", b"", "é".encode(), b"\xff\xfe", b"k" * 127, b"k" * 128]


class Messages:
    """Makes messages by a random source: mostly as writers make them, now and then in each way that the wire allows."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.oddity = self.random.choice([0, 0.03, 0.15])

    def is_odd(self):
        return self.random.random() < self.oddity

    def padding(self):
        return self.random.choice([1, 2, 3, 4]) if self.is_odd() else 0

    def field(self, number, body):
        return varint(number << 3 | 2, self.padding()) + varint(len(body), self.padding()) + body

    def number(self, small):
        return varint(self.random.choice(NUMBERS[: 5 if small else None]), self.padding())

    def several(self, make, *counts):
        return b"".join(make() + self.unknown() for _ in range(self.random.choice(counts)))

    def unknown(self, depth=0):
        if not self.is_odd():
            return b""
        number, wire = self.random.choice([1, 2, 3, 4, 15, 16, 1000]), self.random.choice([0, 1, 2, 3, 5])
        if wire == 2:
            return delimited(max(number, 4), self.random.randbytes(self.random.randrange(5)))
        inside = b"" if depth > 4 else self.unknown(depth + 1)
        body = {0: self.number(small=False), 1: bytes(8), 3: inside + varint(number << 3 | 4), 5: bytes(4)}[wire]
        return varint(number << 3 | wire) + body

    def int64_list(self):
        if self.is_odd():
            return self.several(lambda: varint(8, self.padding()) + self.number(small=False), 1, 2, 40)
        small, count = self.random.random() < 0.5, self.random.choice([0, 1, 1, 3, 20, 100])
        return self.field(1, b"".join(self.number(small) for _ in range(count)))

    def float_list(self):
        if self.is_odd():
            return self.several(lambda: b"\x0d" + self.random.randbytes(4), 1, 2, 30)
        return self.field(1, self.random.randbytes(4 * self.random.choice([0, 1, 3, 50])))

    def bytes_list(self):
        return self.field(1, self.random.randbytes(self.random.choice([0, 1, 5, 130])))

    def kind(self):
        number, make = self.random.choice(list(enumerate((self.bytes_list, self.float_list, self.int64_list), 1)))
        return self.field(number, self.several(make, *([0, 1, 2, 5] if number == 1 or self.is_odd() else [0, 1, 1, 1])))

    def feature(self):
        return self.several(self.kind, *([0, 2, 3] if self.is_odd() else [1]))

    def feature_list(self):
        return self.several(lambda: self.field(1, self.feature()), 0, 1, 2, 5)

    def entry(self, make):
        name = self.field(1, self.random.choice(NAMES[: None if self.is_odd() else 3]))
        value = self.field(2, make())
        parts = [name, value]
        if self.is_odd():
            parts = self.random.choices([name, value, self.field(2, make()), self.unknown()], k=3)
        return self.field(1, b"".join(parts))

    def features(self, make):
        return self.several(lambda: self.entry(make), 0, 1, 2, 3, 6)

    def example(self):
        return self.several(lambda: self.field(1, self.features(self.feature)), *([0, 2] if self.is_odd() else [1]))

    def sequence_example(self):
        lists = self.several(
            lambda: self.field(2, self.features(self.feature_list)), *([0, 2] if self.is_odd() else [1])
        )
        return self.example() + lists

    def damaged(self, raw):
        """Return the bytes with something put in, taken out, changed or cut off."""
        damaged = bytearray(raw)
        for _ in range(self.random.choice([1, 1, 2, 4])):
            at, other = self.random.randrange(len(damaged) + 1), self.random.randrange(len(damaged) + 1)
            ways = [
                lambda at=at: (
                    damaged[at : at + 1] and damaged.__setitem__(at, damaged[at] ^ 1 << self.random.randrange(8))
                ),
                lambda at=at: damaged.__setitem__(slice(at, at + 1), self.random.randbytes(1)),
                lambda at=at: damaged.__delitem__(slice(at, at + self.random.choice([1, 2, 10]))),
                lambda at=at: damaged.__setitem__(slice(at, at), self.random.randbytes(self.random.choice([1, 2, 10]))),
                lambda at=at: damaged.__delitem__(slice(at, None)),
                lambda at=at, other=other: damaged.__setitem__(slice(at, at), damaged[other : other + 30]),
            ]
            self.random.choice(ways)()
        return bytes(damaged)


def read(raw, name, **settings):
    """Return what we make of a message in protobuf's terms, or the text of our error."""
    try:
        if name == "Example":
            return all_as_protobuf(parse_example(raw, **settings)), {}
        parsed = parse_sequence_example(raw, **settings)
    except DecodeError as error:
        return str(error)
    return all_as_protobuf(parsed.context), {
        name: [*map(as_protobuf, found)] for name, found in parsed.feature_lists.items()
    }


def read_by_protobuf(message, name):
    if name == "Example":
        return features_of(message.features.feature), {}
    lists = message.feature_lists.feature_list.items()
    return features_of(message.context.feature), {name: [*map(feature_of, found.feature)] for name, found in lists}


def check(raw, name):
    """Compare one message with protobuf, and tell how it came out."""
    ours, message = read(raw, name), decode(raw, name)
    held = memoryview(bytearray(b"?" + raw + b"!"))[1:-1]
    assert read(held, name) == read(held, name, views=True) == ours
    findings = lint_example(raw)
    if message is None:
        assert isinstance(ours, str), raw.hex()
        return "both refuse"
    assert not isinstance(ours, str), (ours, raw.hex())
    if message == "not UTF-8":
        assert any(finding.code == "key_not_utf8" for finding in findings) or not findings, raw.hex()
        return "not UTF-8"
    assert ours == read_by_protobuf(message, name), raw.hex()
    assert "malformed" not in {finding.code for finding in findings} or name == "Example", raw.hex()
    if name == "SequenceExample":
        assert is_sequence_example(raw) == message.HasField("feature_lists")
    return "equal"


@pytest.mark.parametrize("name", ["Example", "SequenceExample"])
def test_messages_whole_and_damaged_have_protobufs_values_or_are_refused_by_both(name, fuzz_count):
    outcomes = Counter()
    for number in range(fuzz_count):
        messages = Messages(number)
        raw = messages.example() if name == "Example" else messages.sequence_example()
        if number % 2:
            raw = messages.damaged(raw)
        outcomes[check(raw, name)] += 1
    assert outcomes["equal"] > fuzz_count // 3
    assert outcomes["both refuse"] > fuzz_count // 3
    assert outcomes["not UTF-8"] or fuzz_count < 1000


def test_schemas_count_what_protobuf_finds(fuzz_count):
    builder, expected, records = SchemaBuilder(), Counter(), 0
    for number in range(fuzz_count // 4):
        raw = Messages(number).example()
        message = decode(raw)
        if message is None or isinstance(message, str):
            continue
        builder.add(raw)
        records += 1
        for name, feature in features_of(message.features.feature).items():
            expected[name, "records"] += 1
            if feature is None:
                expected[name, "no kind"] += 1
                continue
            kind, values = feature
            count = len(values) // 4 if kind == "float_list" else len(values)
            expected[name, "empty"] += count == 0
            expected[name, "most"] = max(expected[name, "most"], count)
            expected[name, kind.removesuffix("_list")] = 1
    counted = Counter()
    for feature in builder.schema():
        counts = {
            "records": feature.records,
            "no kind": feature.no_kind,
            "empty": feature.empty,
            "most": feature.max_length,
        }
        counts |= dict.fromkeys(feature.kinds, 1)
        counted.update({(feature.name, what): count for what, count in counts.items() if count})
        assert feature.missing == records - feature.records
    assert counted == +expected


@given(st.binary(max_size=200))
def test_any_bytes_have_protobufs_values_or_are_refused_by_both(raw):
    check(raw, "Example")
    check(raw, "SequenceExample")


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=6))
def test_any_bytes_under_right_tags_have_protobufs_values_or_are_refused_by_both(bodies):
    for tags in ((1, 1), (1, 1, 2), (1, 1, 2, 3), (2, 1, 2, 1, 3)):
        raw = b"".join(bodies)
        for number in reversed(tags):
            raw = (delimited(1, b"a") if number == 2 else b"") + delimited(number, raw)
        check(raw, "Example")
        check(raw, "SequenceExample")


@pytest.mark.slow
def test_time_grows_with_the_length_of_hostile_records_and_no_faster():
    hostile = {
        "empty entries": lambda size: delimited(1, b"\x0a\0" * (size // 2)),
        "groups": lambda size: (b"\x23" * 90 + b"\x24" * 90) * (size // 180),
        "unpacked ints": lambda size: delimited(1, delimited(1, delimited(2, delimited(3, b"\x08\1" * (size // 2))))),
        "mixed ints": lambda size: delimited(
            1, delimited(1, delimited(2, delimited(3, b"\x0a\1\1\x08\1" * (size // 5))))
        ),
        "empty strings": lambda size: delimited(1, delimited(1, delimited(2, delimited(1, b"\x0a\0" * (size // 2))))),
        "features in turns": lambda size: delimited(1, delimited(1, delimited(2, b"\x12\0\x1a\0" * (size // 4)))),
        "names": lambda size: delimited(1, b"".join(delimited(1, delimited(1, b"%05d" % n)) for n in range(size // 9))),
    }

    def seconds(raw):
        start = thread_time()
        parse_example(raw)
        lint_example(raw)
        return thread_time() - start

    for name, make in hostile.items():
        short, long = make(10_000), make(40_000)
        sooner = later = math.inf
        for _ in range(5):  # the machine may be busy with something else
            sooner = min(sooner, seconds(short))
            later = min(later, seconds(long))
            if later < 12 * sooner:
                break
        assert later < 12 * sooner, name  # 16 times if it were squared
