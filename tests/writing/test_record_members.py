from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import SampleError
from shardset.formats.example import encode_example, encode_sequence_example
from shardset.writing.member_names import ContentSuffixes
from shardset.writing.record_members import SequenceExample, build_record, feature_members, parse_record

FLOATS = st.lists(st.floats(width=32), max_size=5).map(lambda values: np.array(values, np.float32))
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda values: np.array(values, np.int64))
BYTES = st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([b"text", b"{}", b"\xff\xd8\xff"])), max_size=4)
FEATURES = st.one_of(st.none(), FLOATS, INTS, BYTES)
NAMES = st.one_of(
    st.text("abAB./%", max_size=4), st.binary(max_size=4).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
)
CONTEXTS = st.dictionaries(NAMES, FEATURES, max_size=5)
LISTS = st.dictionaries(
    NAMES,
    st.one_of(
        st.lists(FEATURES, max_size=4),
        st.lists(st.binary(max_size=8).map(lambda value: [value]), max_size=4),
        st.integers(1, 3).flatmap(
            lambda width: st.lists(
                st.lists(st.integers(-9, 9), min_size=width, max_size=width).map(lambda row: np.array(row, np.int64)),
                max_size=4,
            )
        ),
    ),
    max_size=3,
)


def joined(members):
    return [(member.suffix, memoryview(b"".join(member.pieces))) for member in members]


def there_and_back(raw):
    parsed = parse_record(raw)
    assert parsed is not None
    return build_record(None, joined(feature_members(parsed, ContentSuffixes())))


def suffixes_of(features, lists=None):
    return [member.suffix for member in feature_members(SequenceExample(features, lists or {}), ContentSuffixes())]


@given(CONTEXTS.filter(bool))
def test_an_example_comes_back_from_its_members(features):
    raw = encode_example(features)
    assert there_and_back(raw) == raw


@given(CONTEXTS, LISTS.filter(bool))
def test_a_sequence_example_comes_back_from_its_members(context, lists):
    raw = encode_sequence_example(context, lists)
    assert there_and_back(raw) == raw


@given(CONTEXTS, LISTS)
def test_no_two_members_have_names_that_webdataset_takes_for_one(context, lists):
    lowered = [suffix.lower() for suffix in suffixes_of(context, lists)]
    assert len(set(lowered)) == len(lowered)


def test_suffixes_say_what_a_feature_is():
    features = {
        "image/encoded": [b"\xff\xd8\xff"],
        "label": np.array([3]),
        "box": np.zeros(0, np.float32),
        "names": [b"a", b"b"],
        "none": None,
        "nothing": [],
    }
    assert suffixes_of(features) == [
        "box.npy",
        "image%2fencoded.jpg",
        "label.npy",
        "names.0.txt",
        "names.1.txt",
        "none.none",
        "nothing.empty",
    ]
    lists = {
        "frames": [[b"\xff\xd8\xff"], [b"\xff\xd8\xff"]],
        "boxes": [np.zeros(4, np.float32)] * 3,
        "ragged": [np.zeros(1, np.float32), np.zeros(2, np.float32)],
        "none": [],
    }
    assert suffixes_of({}, lists) == [
        "boxes.seq.npy",
        "frames.seq.0.jpg",
        "frames.seq.1.jpg",
        "none.seq.empty",
        "ragged.seq.pb",
    ]


def test_numbers_are_files_that_numpy_loads(tmp_path):
    parsed = SequenceExample({"a": np.array([1, -2])}, {"b": [np.array([0.5, np.nan], np.float32)] * 2})
    for (suffix, pieces), expected in zip(
        feature_members(parsed, ContentSuffixes()), (np.array([1, -2]), np.array([[0.5, np.nan]] * 2)), strict=True
    ):
        (tmp_path / suffix).write_bytes(b"".join(pieces))
        np.testing.assert_array_equal(np.load(tmp_path / suffix), expected)


def test_names_that_differ_by_case_alone_are_told_apart_in_lower_case():
    assert suffixes_of({"A": None, "a": None, "B": None}) == ["%41.none", "%42.none", "a.none"]
    assert suffixes_of({"A": None, "B": None}) == ["A.none", "B.none"]


LABEL = encode_example({"label": 1})


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no feature at all"),
        (b"\x0a\x00", "an empty map"),
        (b"\x12\x00", "a SequenceExample without lists"),
        (b"not an Example", "no message"),
        (LABEL + b"\x18\x01", "an unknown field behind the features"),
        (b"\x0a\x0d\x0a\x0b" + b"\x0a\x05label\x18\x07" + b"\x12\x00", "an unknown field in an entry"),
        (b"\x0a\x0d\x0a\x0b" + b"\x0a\x01a" + b"\x12\x06" + b"\x1a\x02\x08\x01" + b"\x20\x01", "one in a feature"),
        (b"\x0a\x0d\x0a\x0b" + b"\x0a\x01a" + b"\x12\x06" + b"\x1a\x04\x08\x01" + b"\x10\x01", "one in a list"),
        (LABEL + LABEL, "a name that stands there twice"),
    ],
)
def test_a_record_that_its_features_do_not_say_all_of_is_kept_whole(raw, why):
    assert parse_record(raw) is None, why
    assert build_record(None, [("bin", memoryview(raw))]) == raw


def test_entries_in_another_order_and_lists_that_are_not_packed_say_nothing_more():
    first, second = encode_example({"a": 1})[2:], encode_example({"b": 2})[2:]
    swapped = b"\x0a" + bytes([len(first) + len(second)]) + second + first
    assert there_and_back(swapped) == encode_example({"a": 1, "b": 2})
    unpacked = b"\x0a\x0d\x0a\x0b" + b"\x0a\x01a" + b"\x12\x06" + b"\x1a\x04\x08\x01\x08\x02"
    assert there_and_back(unpacked) == encode_example({"a": [1, 2]})


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"txt": b"", "a.npy": b""}, "'txt', which stands for no feature"),
        ({"a.npy": b"x"}, "'a' of a sample is no .npy file"),
        ({"a.npy": b"\x93NUMPY\x01\x00\x05\x00abcd\n"}, "no .npy file of float32 or int64"),
        ({"a.none": b"x"}, "has 1 bytes where none belong"),
        ({"a.empty": b"x"}, "has 1 bytes where none belong"),
        ({"a.0.txt": b"", "a.2.txt": b""}, "lacks one of the values 0 to 2"),
        ({"a.0.txt": b"", "a.0.jpg": b""}, "do not go together"),
        ({"a.txt": b"", "a.jpg": b""}, "do not go together"),
        ({"a.seq.npy": b"x"}, "is no .npy file"),
        ({"a.seq.pb": b"x"}, "is no SequenceExample"),
        ({"a.seq.pb": encode_sequence_example({}, {"b": []})}, "of other lists"),
        ({"a.seq.txt": b"x"}, "do not go together"),
        ({"__key__.txt": b"other"}, "has a key in its name and another"),
    ],
)
def test_members_that_stand_for_nothing_are_refused(members, message):
    with pytest.raises(SampleError, match=message):
        build_record("key", [(suffix, memoryview(payload)) for suffix, payload in members.items()])


@given(st.dictionaries(st.text("anpyseq.0", max_size=10), st.binary(max_size=90), min_size=1, max_size=4))
def test_whatever_a_tar_holds_becomes_a_record_or_an_error(members):
    try:
        record = build_record("key", [(suffix, memoryview(payload)) for suffix, payload in members.items()])
    except SampleError:
        return
    assert parse_record(record).context["__key__"] == [b"key"]


def test_a_file_that_lies_about_its_size_is_refused():
    raw = encode_example({"a": np.arange(3)})
    ((suffix, payload),) = joined(feature_members(parse_record(raw), ContentSuffixes()))
    for changed in (bytes(payload)[:-1], bytes(payload).replace(b"(3,)", b"(9,)")):
        with pytest.raises(SampleError, match="bytes behind its header"):
            build_record(None, [(suffix, memoryview(changed))])
