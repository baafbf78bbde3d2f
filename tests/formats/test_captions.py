"""Caption values out of sidecar members: each rule of webshart's, and the payloads that break them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import DecodeError
from shardset.formats.captions import (
    CAPTION_KEYS,
    InvalidJson,
    captions_from_json,
    captions_from_text,
    first_caption,
    parse_json_sidecars,
)

# What JSON can say and every parser reads back as it was.
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
STRINGS = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    SCALARS | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=8,
)
OBJECTS = st.dictionaries(STRINGS, VALUES, max_size=4)


def as_json(value):
    return json.dumps(value, ensure_ascii=False).encode()


# --- .txt ---


@pytest.mark.parametrize(
    ("text", "captions"),
    [
        ("a rocket on its launch pad under a clear sky\n", "a rocket on its launch pad under a clear sky"),
        ("  \n\ta cat \r\n", "a cat"),
        ("two\nlines\n", "two\nlines"),
        ("", None),
        (" \n\t\r\n", None),
        ("\ufeff", None),
        ("\ufeffa cat", "a cat"),
        ("\ufeff \n", None),
        ("\ufeff\n a cat", "a cat"),
        ('\ufeff{"a": 1}', {"a": 1}),
        ("a\ufeffcat", "a\ufeffcat"),
        ("\u3000una foto di un caffè\u2003", "una foto di un caffè"),
        ('{"description": "a café", "elements": [{"bbox": [1, 2, 30, 40]}]}', "the object"),
        (' {"caption": "stays an object", "n": [1, 2.5, true, null]}\n', "the object"),
        ("{}", {}),
        ('["one", "two"]', ["one", "two"]),
        ('["one", {"two": 2}]', ["one", {"two": 2}]),
        ("[]", []),
        ('[""]', [""]),
        ('["again", "again"]', ["again", "again"]),
        ('["a", 1]', '["a", 1]'),
        ('["a", null]', '["a", null]'),
        ('[["a"]]', '[["a"]]'),
        ("[1, 2]", "[1, 2]"),
        ("17", "17"),
        ("null", "null"),
        ("true", "true"),
        ('"quoted"', '"quoted"'),
        ("{broken", "{broken"),
        ("[verse] a cat", "[verse] a cat"),
        ('{"a": 1} and more', '{"a": 1} and more'),
        ("{'a': 1}", "{'a': 1}"),
        ('{"a": NaN}', '{"a": NaN}'),
        (r'{"a": "\ud800"}', r'{"a": "\ud800"}'),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_text_becomes_captions_by_the_rules_of_txt(text, captions):
    wanted = json.loads(text) if captions == "the object" else captions
    assert captions_from_text(text.encode()) == wanted


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_text_may_lie_in_any_buffer(buffer):
    assert captions_from_text(buffer(" caffè\n".encode())) == "caffè"
    assert captions_from_text(buffer(b'["a", {"b": 1}]')) == ["a", {"b": 1}]


@pytest.mark.parametrize(
    ("payload", "at"),
    [
        (b"\xff\xfea\0", 0),  # UTF-16
        (b"caf\xe9", 3),  # Latin-1
        (b"\xef\xbb\xbfcaf\xe9", 6),  # counted in the payload, not behind the mark
        (b"a \xed\xa0\x80", 2),  # a surrogate
        (b"a \xc0\x80", 2),  # overlong
        (b"cut \xe2\x82", 4),
    ],
)
def test_text_that_is_not_utf8_raises_and_names_the_byte(payload, at):
    with pytest.raises(ValueError, match=rf"not UTF-8.* at byte {at} of its payload") as caught:
        captions_from_text(payload)
    assert isinstance(caught.value, DecodeError)
    assert caught.value.__cause__.start == at
    assert caught.value.hint


@given(STRINGS)
def test_plain_text_comes_back_trimmed(text):
    wanted = text.removeprefix("\ufeff").strip()
    captions = captions_from_text(text.encode())
    if wanted.startswith(("{", "[")):
        assert captions == wanted or captions == json.loads(wanted)
    else:
        assert captions == (wanted or None)


@given(OBJECTS | st.lists(STRINGS | OBJECTS, max_size=4))
def test_an_object_or_a_list_of_captions_comes_back_from_text(value):
    assert captions_from_text(as_json(value)) == value
    assert captions_from_text(json.dumps(value, indent=2).encode() + b"\n") == value


@given(SCALARS | STRINGS | st.lists(SCALARS | st.lists(VALUES, max_size=2), min_size=1, max_size=3))
def test_any_other_json_in_text_stays_text(value):
    text = as_json(value)
    assert captions_from_text(text) == text.decode()


# --- .json ---


@pytest.mark.parametrize(
    ("value", "captions"),
    [
        ({"caption": "a cup of coffee", "license": "CC0"}, "a cup of coffee"),
        ({"license": "CC0", "caption": " white space is kept \n"}, " white space is kept \n"),
        ({"captions": ["one", "two"]}, ["one", "two"]),
        ({"captions": ["one"]}, "one"),
        ({"caption": "one", "captions": ["two", "one", "two"]}, ["one", "two"]),
        ({"captions": "one", "caption": "two"}, ["two", "one"]),
        ({"caption": {"a": 1}}, {"a": 1}),
        ({"caption": {}}, {}),
        ({"caption": ["one", {"a": 1}, "one", {"a": 1}]}, ["one", {"a": 1}]),
        ({"caption": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}, {"a": 1, "b": 2}),
        ({"caption": [{"a": 1}, {"a": True}, {"a": 1.0}]}, [{"a": 1}, {"a": True}, {"a": 1.0}]),
        ({"caption": ['{"a":1}', {"a": 1}]}, ['{"a":1}', {"a": 1}]),
        ({"caption": ""}, None),
        ({"caption": "", "text": "two"}, "two"),
        ({"caption": ["", "one", ""]}, "one"),
        ({"caption": None}, None),
        ({"caption": 5, "text": True, "prompt": 1.5}, None),
        ({"caption": [1, None, ["nested"], "one"]}, "one"),
        ({"caption": [["nested"]]}, None),
        ({"caption": []}, None),
        ({"Caption": "another key"}, {"Caption": "another key"}),
        ({"tags": ["a", "b"]}, {"tags": ["a", "b"]}),
        ({}, {}),
        ([], []),
        (["one", "one", ""], ["one", "one", ""]),
        (["one", {"a": 1}], ["one", {"a": 1}]),
        (["one", 1], None),
        ([["one"]], None),
        ("one", "one"),
        ("", ""),
        (17, None),
        (1.5, None),
        (True, None),
        (None, None),
    ],
)
def test_a_parsed_sidecar_becomes_captions_by_the_rules_of_json(value, captions):
    found = captions_from_json(value)
    assert found == captions
    assert as_json(found) == as_json(captions)  # 1, 1.0 and true are not the same


def test_keys_are_collected_in_their_own_order_whatever_the_order_of_the_object():
    assert CAPTION_KEYS == (
        "caption",
        "captions",
        "text",
        "txt",
        "description",
        "descriptions",
        "prompt",
        "alt_text",
    )
    value = {key: f"from {key}" for key in reversed(CAPTION_KEYS)}
    assert captions_from_json(value) == [f"from {key}" for key in CAPTION_KEYS]


@pytest.mark.parametrize("key", CAPTION_KEYS)
def test_each_key_alone_gives_its_caption(key):
    assert captions_from_json({"width": 3, key: "one", "height": 2}) == "one"
    assert captions_from_json({key: {"a": [1]}}) == {"a": [1]}
    assert captions_from_json({key: ["one", "two"]}) == ["one", "two"]


def test_objects_too_deep_to_compare_are_all_kept():
    deep = {"a": 1}
    for _ in range(600):
        deep = {"a": deep}
    assert len(captions_from_json({"caption": [deep, json.loads(json.dumps(deep))]})) == 2


@given(st.dictionaries(st.sampled_from(CAPTION_KEYS) | STRINGS, VALUES, max_size=6))
def test_captions_of_an_object_are_found_again_in_themselves(value):
    captions = captions_from_json(value)
    if isinstance(captions, list):
        assert len(captions) >= 2
        assert captions_from_json(captions) == captions == captions_from_json({"captions": captions})
        assert len({as_json(sort_keys(caption)) for caption in captions}) == len(captions)
    elif isinstance(captions, str):
        assert captions
        assert captions_from_json({"alt_text": captions}) == captions
    elif captions is None:
        assert not set(CAPTION_KEYS).isdisjoint(value)


def sort_keys(value):
    return json.loads(json.dumps(value, sort_keys=True))


@pytest.mark.parametrize(
    ("captions", "first"),
    [
        ("one", "one"),
        ({"a": 1}, {"a": 1}),
        (["one", {"a": 1}], "one"),
        ([{"a": 1}, "one"], {"a": 1}),
        ([""], ""),
        ([], None),
        (None, None),
    ],
)
def test_the_first_caption_is_the_one_or_the_head_of_the_list(captions, first):
    assert first_caption(captions) == first


# --- many sidecars ---


def test_many_sidecars_are_parsed_in_order():
    values = [{"caption": f"number {i}", "i": i} for i in range(3000)]
    assert parse_json_sidecars([as_json(value) for value in values]) == values
    assert parse_json_sidecars([]) == []


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_sidecars_may_lie_in_any_buffer(buffer):
    payloads = [buffer(data) for data in (b'{"a": 1}', b" [2]\n", b"\xef\xbb\xbf3", b'"four"')]
    assert parse_json_sidecars(payloads) == [{"a": 1}, [2], 3, "four"]


@pytest.mark.parametrize(
    "payloads",
    [
        [b"[1", b"2]", b"3,4"],  # joined with commas: [1,2],3,4, as many values as payloads
        [b"1,2", b"", b"3"],
        [b"]", b"["],
        [b'{"a": 1', b'"b": 2}', b"1, 2"],
        [b'"a', b'b"', b"1,2"],
        [b"1 2", b"3"],
        [b"1\n2", b"\n"],
    ],
)
def test_broken_sidecars_do_not_mend_each_other(payloads):
    for payload, value in zip(payloads, parse_json_sidecars(payloads), strict=True):
        try:
            assert value == json.loads(payload)
        except json.JSONDecodeError:
            assert isinstance(value, InvalidJson)


def test_a_broken_sidecar_is_marked_and_the_others_are_parsed():
    payloads = [b'{"a": 1}', b'{"a": 1,}', b"", b"\xff", b'{"a": NaN}', b'"\\ud800"', b"[" * 2000, b"null"]
    values = parse_json_sidecars(payloads)
    assert (values[0], values[-1]) == ({"a": 1}, None)
    for value in values[1:-1]:
        assert isinstance(value, InvalidJson)
        assert "line 1 column" in value.error
    assert len({value.error for value in values[1:-1]}) >= 4


@given(st.lists(VALUES.map(as_json) | st.binary(max_size=12), max_size=6))
def test_each_sidecar_gives_what_it_gives_alone(payloads):
    assert parse_json_sidecars(payloads) == [parse_json_sidecars([payload])[0] for payload in payloads]


@given(st.lists(VALUES, max_size=6))
def test_sidecars_come_back_as_they_were_written(values):
    assert parse_json_sidecars([as_json(value) for value in values]) == values
