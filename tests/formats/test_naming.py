from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.formats.naming import Names, base_plus_ext, is_structural, split_names

STRINGS = st.lists(st.binary(max_size=20), max_size=30)
NAMES = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.lists(
            st.sampled_from([b"a", b"B", b".", b"/", b"__", b"_", b"jpg", b"\xc3\x89", b"\xff", b"\n"]), max_size=9
        ).map(b"".join),
    ),
    max_size=40,
)


def key_and_suffix(name):
    """Split a name as the convention describes it, component by component."""
    *folders, last = name.split(b"/")
    stem, dot, suffix = last.partition(b".")
    if not dot:
        return None
    if stem:
        return b"/".join([*folders, stem]), suffix
    # A dot in front: only a folder without a dot can be the key.
    if folders and b"." not in folders[-1]:
        return b"/".join([*folders, b""]), suffix
    return None


def lies_in_a_structural_tree(name):
    first, slash, _ = name.partition(b"/")
    if not slash:
        first = first.removesuffix(b"\n")  # the reference's pattern ends before a last newline too
    return len(first) >= 4 and first.startswith(b"__") and first.endswith(b"__")


def split_one_by_one(names):
    """Return (key, lower-cased suffix) or None for each name."""
    found = []
    for name in names:
        split = None if lies_in_a_structural_tree(name) else key_and_suffix(name)
        found.append(split and (split[0], split[1].decode("utf-8", "surrogateescape").lower()))
    return found


def split_at_once(names):
    column = Names.of(names)
    split = split_names(column)
    assert (split.key_lengths >= 0).tolist() == (split.suffix_ids >= 0).tolist()
    assert len(set(split.suffixes)) == len(split.suffixes)
    assert sorted(set(split.suffix_ids.tolist()) - {-1}) == list(range(len(split.suffixes)))
    return [
        None if length < 0 else (name[:length], split.suffixes[number])
        for name, length, number in zip(names, split.key_lengths.tolist(), split.suffix_ids.tolist(), strict=True)
    ]


# One name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"a.jpg", (b"a", b"jpg")),
        (b"a.b.jpg", (b"a", b"b.jpg")),
        (b"A.JPG", (b"A", b"JPG")),
        (b"scene/clip.rgb.jpg", (b"scene/clip", b"rgb.jpg")),
        (b"d.1/a.jpg", (b"d.1/a", b"jpg")),
        (b"a/b.c/d.e.f", (b"a/b.c/d", b"e.f")),
        (b"./a.jpg", (b"./a", b"jpg")),
        (b"../a.jpg", (b"../a", b"jpg")),
        (b"/abs/a.jpg", (b"/abs/a", b"jpg")),
        (b"a\\b.c\\d.jpg", (b"a\\b", b"c\\d.jpg")),
        (b"foo.", (b"foo", b"")),
        (b"a..b", (b"a", b".b")),
        (b"README", None),
        (b"d.1/a", None),
        (b"a.jpg/", None),
        (b"", None),
        (b".", None),
        (b"/", None),
        (b".jpg", None),
        (b"._a.jpg", None),
        (b"d/.hidden.txt", (b"d/", b"hidden.txt")),
        (b"d/._b.jpg", (b"d/", b"_b.jpg")),
        (b"d/.", (b"d/", b"")),
        (b"d/..", (b"d/", b".")),
        (b"a.b/._c.jpg", None),
        (b"a.b/c/.d", (b"a.b/c/", b"d")),
        (b"c/a.b/.d", None),
        (b"/.d", (b"/", b"d")),
        (b"a.b//.d", (b"a.b//", b"d")),
        (b"Track 2.0 (Clean).mp3", (b"Track 2", b"0 (Clean).mp3")),
        (b"sp ace .txt", (b"sp ace ", b"txt")),
        (b"a\nb.txt", (b"a\nb", b"txt")),
        (b"caf\xe9.txt", (b"caf\xe9", b"txt")),
    ],
)
def test_a_name_is_split_at_the_first_dot_of_its_last_component(name, expected):
    assert base_plus_ext(name) == expected
    assert key_and_suffix(name) == expected


@pytest.mark.parametrize(
    "name", [b"__meta__/a.json", b"__index__", b"____", b"____/x", b"__a__b__/c.txt", b"__a\n__/b", b"__a__\n"]
)
def test_a_name_in_a_tree_of_double_underscores_at_the_root_is_structural(name):
    assert is_structural(name)
    assert lies_in_a_structural_tree(name)


@pytest.mark.parametrize(
    "name",
    [
        b"__solo__.json",
        b"d/__x__/a.txt",
        b"x/__y__",
        b"__a/b__",
        b"__",
        b"___",
        b"_a_/b",
        b"__a__b",
        b"a__/b",
        b"./__meta__/a",
        b"",
    ],
)
def test_double_underscores_elsewhere_are_ordinary(name):
    assert not is_structural(name)
    assert not lies_in_a_structural_tree(name)


# All names of a shard at once


@pytest.mark.slow
def test_a_hundred_thousand_names_are_split_as_one_by_one():
    rng = random.Random(7)
    names = [bytes(rng.choices(b"a./_B", k=rng.randrange(13))) for _ in range(100_000)]
    assert split_at_once(names) == split_one_by_one(names)
    assert [base_plus_ext(name) for name in names[:20_000]] == [key_and_suffix(name) for name in names[:20_000]]
    assert [is_structural(name) for name in names] == [lies_in_a_structural_tree(name) for name in names]


@given(NAMES)
def test_names_of_any_bytes_are_split_as_one_by_one(names):
    assert split_at_once(names) == split_one_by_one(names)


@given(NAMES, st.binary(max_size=9), st.binary(max_size=9))
def test_bytes_beside_the_column_do_not_matter(names, before, behind):
    column = Names.of(names)
    data = np.frombuffer(before + column.data.tobytes() + behind, np.uint8)
    shifted = split_names(Names(data, column.offsets + len(before)))
    split = split_names(column)
    assert shifted.suffixes == split.suffixes
    assert shifted.key_lengths.tolist() == split.key_lengths.tolist()
    assert shifted.suffix_ids.tolist() == split.suffix_ids.tolist()


def test_no_names_have_no_suffixes():
    split = split_names(Names.of([]))
    assert (len(split.key_lengths), len(split.suffix_ids), split.suffixes) == (0, 0, ())


@pytest.mark.parametrize("length", range(12))
def test_a_suffix_of_any_length_is_numbered_by_its_letters(length):
    names = [b"a." + b"x" * length, b"b." + b"X" * length, b"c." + b"y" * length, b"d." + b"x" * (length + 1)]
    assert split_at_once(names) == split_one_by_one(names)
    assert len(split_names(Names.of(names)).suffixes) == (3 if length else 2)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 66, 67, 300])
def test_many_distinct_suffixes_are_all_told_apart(count):
    names = [b"%d.s%d" % (row, row * 7 % count) for row in range(3 * count)]
    names += [b"%d.S%d" % (row, row) for row in range(count)] + [
        b"%d.long suffix %d" % (row, row) for row in range(count)
    ]
    assert split_at_once(names) == split_one_by_one(names)
    assert len(split_names(Names.of(names)).suffixes) == 2 * count


@pytest.mark.parametrize("suffix", ["É", "ÄÖ", "Σ", "İ", "\u212a", "ẞ", "ǅ", "Ж.Ж", "名", "jpgÉ", "\udce9"])
def test_suffixes_beyond_ascii_are_lower_cased_as_python_lower_cases_them(suffix):
    raw = suffix.encode("utf-8", "surrogateescape")
    names = [b"a." + raw, b"b.jpg", b"c." + suffix.lower().encode("utf-8", "surrogateescape")]
    split = split_names(Names.of(names))
    assert split.suffixes[split.suffix_ids[0]] == suffix.lower()
    assert split_at_once(names) == split_one_by_one(names)


def test_a_suffix_that_ends_in_a_nul_is_not_the_one_without():
    # Short suffixes are compared as integers, where a NUL behind could vanish.
    names = [b"a.x", b"b.x\0", b"c.x\0\0", b"d.", b"e.\0"]
    assert split_at_once(names) == split_one_by_one(names)
    assert len(split_names(Names.of(names)).suffixes) == 5


def test_the_kelvin_sign_is_lower_cased_to_a_plain_k():
    split = split_names(Names.of(["a.\u212a".encode(), b"b.k"]))
    assert split.suffixes == ("k",)
    assert split.suffix_ids.tolist() == [0, 0]


# The column of names


@given(STRINGS)
def test_a_column_gives_back_its_strings(strings):
    column = Names.of(strings)
    assert column.to_list() == list(column) == strings
    assert [column[row] for row in range(len(column))] == strings
    assert column.lengths.tolist() == [len(one) for one in strings]
    texts = [one.decode("utf-8", "surrogateescape") for one in strings]
    assert column.to_text_list() == [column.text(row) for row in range(len(column))] == texts
    assert column.has_high_bytes() == any(not one.isascii() for one in strings)


@given(st.lists(STRINGS, max_size=5))
def test_columns_are_joined_in_order(parts):
    joined = Names.concatenate([Names.of(part) for part in parts])
    assert joined.to_list() == [one for part in parts for one in part]


@given(STRINGS.filter(bool), st.data())
def test_rows_are_taken_in_any_order_and_as_often_as_asked(strings, data):
    rows = data.draw(st.lists(st.integers(0, len(strings) - 1), max_size=40))
    taken = Names.of(strings).take(np.array(rows, np.int64))
    assert taken.to_list() == [strings[row] for row in rows]
    assert taken.take(np.arange(len(rows))[::-1]).to_list() == [strings[row] for row in reversed(rows)]


@given(st.binary(max_size=50), st.data())
def test_pieces_are_cut_from_the_bytes_of_a_column(raw, data):
    starts = data.draw(st.lists(st.integers(0, len(raw)), max_size=10))
    lengths = [data.draw(st.integers(0, len(raw) - start)) for start in starts]
    cut = Names.of([raw]).cut(np.array(starts, np.int64), np.array(lengths, np.int64))
    assert cut.to_list() == [raw[start : start + length] for start, length in zip(starts, lengths, strict=True)]
