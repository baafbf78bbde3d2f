from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.writing.member_names import ContentSuffixes, escape_name, unescape_name

NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=12).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
    st.text("aA0./%_-é ", max_size=8),
)


@given(NAMES, st.booleans())
def test_a_name_comes_back_from_what_it_is_written_as(name, keeps_case):
    escaped = escape_name(name, keeps_case=keeps_case)
    assert unescape_name(escaped) == name
    assert escaped.isascii()
    assert set("./\0 ").isdisjoint(escaped)
    assert keeps_case or escaped == escaped.lower()


@given(st.lists(NAMES, unique=True, max_size=8))
def test_no_two_names_are_written_alike(names):
    assert len({escape_name(name) for name in names}) == len(names)
    assert len({escape_name(name, keeps_case=False).lower() for name in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("label", "label"),
        ("image/encoded", "image%2fencoded"),
        ("Age", "Age"),
        ("a.b", "a%2eb"),
        ("", "%"),
        ("%", "%25"),
        ("é", "%c3%a9"),
    ],
)
def test_names_are_written_so_that_members_have_one_key(name, escaped):
    assert escape_name(name) == escaped


@pytest.mark.parametrize(
    ("value", "suffix"),
    [
        (b"\xff\xd8\xff\xe0" + bytes(80), "jpg"),
        (b"\x89PNG\r\n\x1a\n" + bytes(80), "png"),
        (b"RIFF\0\0\0\0WAVEfmt ", "wav"),
        (b"II*\0" + bytes(80), "tif"),
        (b"a caption", "txt"),
        ("ünïcode\n".encode(), "txt"),
        (b'{"a": 1}', "json"),
        (b"[1, 2]", "json"),
        (b"[1, 2", "txt"),
        (b"", "txt"),
        (b"\0\1\2", "bin"),
        (b"caf\xe9", "bin"),
        (b"\x93NUMPY\x01\x00" + bytes(80), "bin"),
        (b"\x80\x04\x95" + bytes(80), "bin"),
    ],
)
def test_a_value_gets_the_suffix_that_fits_it(value, suffix):
    assert ContentSuffixes().suffix("a", value) == suffix
    assert ContentSuffixes().suffix("a", memoryview(value)) == suffix


def test_a_feature_has_one_suffix_as_far_as_its_values_allow():
    suffixes = ContentSuffixes()
    for value in (b"\0\1", b"ab"):
        suffixes.observe("pixels", value)
    for value in (b"{}", b"words"):
        suffixes.observe("caption", value)
    assert suffixes.suffix("pixels", b"ab") == "bin"
    assert suffixes.suffix("pixels", b"") == "bin"
    assert suffixes.suffix("caption", b"{}") == "txt"
    assert suffixes.suffix("caption", b"\xff\xfe") == "bin"  # or a decoder would stumble over it
    assert suffixes.suffix("pixels", b"\x89PNG\r\n\x1a\n") == "png"


@given(st.binary(max_size=300))
def test_no_value_gets_a_suffix_that_means_something_else(value):
    assert ContentSuffixes().suffix("a", value) not in {"npy", "none", "empty", "seq", "pb"}


def test_random_bytes_are_no_media():
    suffixes = ContentSuffixes()
    assert {suffixes.suffix("a", os.urandom(4)) for _ in range(50)} <= {"bin", "txt"}
