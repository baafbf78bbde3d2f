"""The schema of records: kinds, lengths, and the three ways in which a value may not be there."""

from __future__ import annotations

import gzip
import pickle

import numpy as np
import pytest

from formats.example_messages import entry, example, feature, int64_list, key, number_field, packed, value
from shardset.errors import DecodeError
from shardset.formats.example import encode_example, encode_sequence_example
from shardset.formats.example_schema import FeatureSchema, SchemaBuilder
from tfrecords import FOREIGN

JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF\0" + bytes(50)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(50)


def schema_of(*records):
    builder = SchemaBuilder()
    builder.update(records)
    return {(feature.name, feature.is_list): feature for feature in builder.schema()}


def one(*records):
    (feature,) = schema_of(*records).values()
    return feature


def counts(name, kinds, lengths, *, steps=(None, None), records, missing=0, no_kind=0, empty=0, size=0, content=None):
    is_list = steps[0] is not None
    return FeatureSchema(name, is_list, kinds, *lengths, *steps, records, missing, no_kind, empty, size, content)


def test_every_fact_of_a_feature_is_counted():
    features = schema_of(
        encode_example({"image": JPEG, "box": np.ones(4, np.float32), "label": 300}),
        encode_example({"image": JPEG + b"x", "label": []}),
        encode_example({"image": None, "label": [1, 2, 3]}),
    )
    size = 2 * len(JPEG) + 1
    assert features["image", False] == counts(
        "image", ("bytes",), (1, 1), records=3, no_kind=1, size=size, content="jpeg"
    )
    assert features["box", False] == counts("box", ("float",), (4, 4), records=1, missing=2, size=16)
    assert features["label", False] == counts("label", ("bytes", "int64"), (0, 3), records=3, empty=1, size=5)
    assert [features[name, False].shape for name in ("image", "box", "label")] == [(1,), (4,), None]


def test_the_steps_of_a_list_are_counted():
    features = schema_of(
        encode_sequence_example({"id": b"one"}, {"words": [b"a", [b"b", b"c"], None, []]}),
        encode_sequence_example({}, {"words": []}),
        encode_example({"id": b"two"}),
    )
    words = counts(
        "words", ("bytes",), (0, 2), steps=(0, 4), records=2, missing=1, no_kind=1, empty=1, size=3, content="text"
    )
    assert features["words", True] == words
    assert features["id", False] == counts("id", ("bytes",), (1, 1), records=2, missing=1, size=6, content="text")


def test_a_feature_that_never_has_a_kind_has_no_lengths():
    assert one(encode_example({"a": None})) == counts("a", (), (None, None), records=1, no_kind=1)


@pytest.mark.parametrize(
    ("raw", "length"),
    [
        (feature(int64_list(number_field(1, 5), number_field(1, 6))), 2),
        (feature(int64_list(packed(1), packed(2, 3))), 3),
        (feature(int64_list(packed(1))) + feature(int64_list(packed(1, 2, 3, 4))), 4),
        (example(entry(value(int64_list(packed(300, 2))), key(b"a"))), 2),
        (feature(int64_list(packed(*[-1] * 30))), 30),
        (feature(int64_list(packed())), 0),
    ],
)
def test_lists_in_unusual_forms_have_the_length_that_they_parse_to(raw, length):
    found = one(raw)
    assert (found.kinds, found.min_length, found.max_length, found.records) == (("int64",), length, length, 1)


@pytest.mark.parametrize(
    ("values", "content"),
    [
        ([JPEG, JPEG], "jpeg"),
        ([PNG], "png"),
        ([JPEG, PNG], None),
        (["tabby", "Käfer\n"], "text"),
        (["ä" * 63, "a" + "ä" * 40], "text"),  # cut off in the middle of a letter
        ([b"\0\1"], None),
        ([b"\xff"], None),
        ([b""], None),
        ([b"", JPEG], "jpeg"),
        ([[JPEG, PNG]], "jpeg"),  # the first value of each
        ([[]], None),
        ([1], None),
    ],
)
def test_what_byte_strings_are_is_told_by_their_first_bytes(values, content):
    assert one(*(encode_example({"a": value}) for value in values)).content == content


def test_builders_of_several_shards_merge_to_one():
    rng = np.random.default_rng(3)
    records = [encode_example({"a": rng.integers(0, 300, n % 5), "b" if n % 3 else "c": JPEG[:n]}) for n in range(300)]
    records += [encode_sequence_example({"a": 1.5}, {"s": [b"x"] * (n % 4)}) for n in range(50)]
    whole = SchemaBuilder()
    whole.update(records)
    merged = SchemaBuilder()
    for at in range(0, len(records), 70):
        part = SchemaBuilder()
        part.update(records[at : at + 70])
        before = part.schema()
        merged.merge(pickle.loads(pickle.dumps(part)))
        merged.merge(SchemaBuilder())
        assert part.schema() == before
    assert merged.schema() == whole.schema()
    assert merged.num_records == whole.num_records == 350


def test_more_features_than_are_kept_at_once_are_all_counted():
    builder = SchemaBuilder()
    for number in range(20_000):
        builder.add(encode_example({"a": number % 128, "b": b""}))
    assert [(found.records, found.size) for found in builder.schema()] == [(20_000, 20_000), (20_000, 0)]
    assert builder.schema() == builder.schema()


def test_a_record_that_is_no_example_is_refused_and_does_not_count():
    builder = SchemaBuilder()
    builder.add(encode_example({"a": 1}))
    kept = builder.schema()
    for raw in (
        b"text",
        b"\x0a\x05",
        encode_example({"a": [300, 300]})[:-1] + b"\x80",
        encode_example({"a": b"xy"})[:-1],
    ):
        with pytest.raises(DecodeError):
            builder.add(raw)
    assert builder.schema() == kept
    assert builder.num_records == 1


def test_views_and_bytes_are_counted_alike():
    raw = encode_example({"a": [1, 300], "b": JPEG, "c": [b"x", b"y"]})
    assert schema_of(raw) == schema_of(memoryview(bytearray(raw)))


def test_the_schema_of_a_real_shard():
    whole = gzip.decompress((FOREIGN / "sequence_eval.gz").read_bytes())
    builder, position = SchemaBuilder(), 0
    while position < len(whole):
        length = int.from_bytes(whole[position : position + 8], "little")
        builder.add(whole[position + 12 : position + 12 + length])
        position += 16 + length
    assert [(found.name, found.is_list, found.kinds, found.no_kind, found.shape) for found in builder.schema()] == [
        ("f", False, ("float",), 450, (1,)),
        ("i", False, ("int64",), 450, (1,)),
        ("s", True, ("bytes",), 0, (1,)),
    ]
