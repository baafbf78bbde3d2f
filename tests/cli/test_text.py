from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.cli.text import clean, counted, dump_json, human_size, name_fields, one_line, printable, shorten

any_text = st.text(st.characters(codec=None, exclude_categories=()))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 宽字符, 🐈", "plain, ünïcode, 宽字符, 🐈"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\x7f\x9b", "a\\x0ab\\x09c\\x7f\\x9b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("caf\udce9", "caf\\xe9"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("wide\u3000space", "wide\u3000space"),
        ("family: 👨\u200d👩", "family: 👨\u200d👩"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_spelled_out(text, shown):
    assert printable(text) == shown


@given(any_text)
def test_printable_text_holds_no_control_and_no_surrogate_and_stays_as_it_is(text):
    shown = printable(text)
    shown.encode()
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (48_758, "48.8 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (491_520, "492 kB"),
        (1_250_000_000, "1.25 GB"),
        (2**63, "9.22 EB"),
        (10**21, "1000 EB"),
    ],
)
def test_sizes_have_about_three_digits_and_a_decimal_unit(size, shown):
    assert human_size(size) == shown


def test_numbers_have_their_nouns():
    assert [counted(number, "shard") for number in (0, 1, 1024)] == ["0 shards", "1 shard", "1,024 shards"]


def test_a_long_text_is_cut_with_an_ellipsis_and_white_space_becomes_one_space():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abc ef", 5) == "abc…"
    assert one_line(" a \n\n b\x1b ") == "a b\\x1b"


@given(any_text)
def test_json_holds_any_text_and_no_character_that_a_terminal_would_obey(text):
    line = dump_json(name_fields("key", text), is_line=True)
    assert line.decode().isprintable()
    document = json.loads(line)
    assert document["key"] == clean(text)
    assert ("key_hex" in document) == (clean(text) != text)


def test_a_name_that_is_not_utf8_can_be_got_back_from_json():
    document = json.loads(dump_json(name_fields("key", "caf\udce9")))
    assert document == {"key": "caf\ufffd", "key_hex": b"caf\xe9".hex()}
