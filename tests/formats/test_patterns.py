from __future__ import annotations

import fnmatch
import glob
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.formats.patterns import (
    expand_braces,
    expand_count,
    glob_folder,
    has_braces,
    has_glob,
    matches_glob,
    parse_numbered,
)
from timing import least_seconds

# Braces


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{000..003}.tar", ["a-000.tar", "a-001.tar", "a-002.tar", "a-003.tar"]),
        ("{0..9..3}", ["0", "3", "6", "9"]),
        ("{9..0..3}", ["9", "6", "3", "0"]),
        ("{03..00..2}", ["03", "01"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{8..011..3}", ["008", "011"]),
        ("{5..5}", ["5"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{-05..05..5}", ["-05", "000", "005"]),
        ("{1..10..-4}", ["1", "5", "9"]),
        ("{1..3..0}", ["1", "2", "3"]),
        ("{a..e}", ["a", "b", "c", "d", "e"]),
        ("{e..a..2}", ["e", "c", "a"]),
        ("{X..c}", ["X", "Y", "Z", "a", "b", "c"]),
        ("{a,b}", ["a", "b"]),
        ("x{,.gz}", ["x", "x.gz"]),
        ("{a,,b}", ["a", "", "b"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
        ("{x,y{1..2},{z}}", ["x", "y1", "y2", "{z}"]),
        ("{train/{00..01},val/0}.tar", ["train/00.tar", "train/01.tar", "val/0.tar"]),
        ("{01..2,5}", ["01..2", "5"]),
        ("{same,same}", ["same", "same"]),
        (r"D:\shards\{0..1}.tar", [r"D:\shards\0.tar", r"D:\shards\1.tar"]),
        ("{a{b,c}}", ["{ab}", "{ac}"]),
        ("{a,{b,c}", ["{a,b", "{a,c"]),
        ("{a,b}c}", ["ac}", "bc}"]),
        ("}{1..2}{", ["}1{", "}2{"]),
    ],
)
def test_braces_are_expanded_as_the_shell_does(pattern, names):
    assert expand_braces(pattern) == names
    assert has_braces(pattern)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a.tar", "{}", "{a}", "a{1..}.tar", "{..3}", "{1...3}", "{1..a}", "{aa..cc}", "{é..ö}", "{1..2..x}"),
        *(
            "{",
            "}",
            "{{",
            "}}",
            "{a,b",
            "a,b}",
            "{a,b{c}",
            "{\u0661..\u0663}",
            "{1.0..2}",
            "{+1..2}",
            "{{}}",
            "{1..2 }",
        ),
    ],
)
def test_other_braces_stay_as_they_are(text):
    assert expand_braces(text) == [text]
    assert not has_braces(text)


@pytest.mark.parametrize(
    "pattern",
    ["{0..10000000}", "{0..99999}{0..999}", "{a..j}" * 8, "{a,b}" * 5000, "{-999999999999999999..999999999999999999}"],
)
def test_too_many_names_are_refused_before_any_is_made(pattern):
    assert has_braces(pattern)

    def refuse():
        with pytest.raises(ValueError, match="more than 10000000 names") as caught:
            expand_braces(pattern)
        assert len(str(caught.value)) < 200

    assert least_seconds(refuse, 1, clock=time.thread_time) < 1


def test_steps_are_counted_and_not_the_numbers_between():
    assert expand_braces("{0..100000000000..50000000000}") == ["0", "50000000000", "100000000000"]


@pytest.mark.parametrize("piece", ["{", "}", "{}", "{a", "a}", ",", "{x,", "{0..", "..}"])
def test_long_nonsense_is_taken_in_linear_time(piece):
    text = piece * 100_000
    assert expand_braces(text) == [text]
    assert least_seconds(lambda: expand_braces(text), 5, clock=time.thread_time) < 5


@pytest.mark.slow
def test_deep_nesting_works_to_a_limit_and_is_then_refused():
    def nested(depth):
        return "{a," * depth + "b" + "}" * depth

    assert expand_braces(nested(60)) == ["a"] * 60 + ["b"]
    assert expand_braces("{" * 100_000 + "}" * 100_000) == ["{" * 100_000 + "}" * 100_000]
    for ask in (expand_braces, has_braces):
        with pytest.raises(ValueError, match="64 deep"):
            ask(nested(100_000))


def naive(text):
    """Expand braces by rewriting the text at its first pair that means something, until there is none."""
    for start, letter in enumerate(text):
        if letter != "{":
            continue
        depth, commas, end = 0, [], None
        for position in range(start + 1, len(text)):
            if text[position] == "{" and closes(text, position):
                depth += 1
            elif text[position] == "}":
                if depth == 0:
                    end = position
                    break
                depth -= 1
            elif text[position] == "," and depth == 0:
                commas.append(position)
        if end is None or not closes(text, start):
            continue
        inside = text[start + 1 : end]
        choices = numbers(inside)
        if choices is None and commas:
            cuts = [start, *commas, end]
            choices = [name for a, b in pairwise(cuts) for name in naive(text[a + 1 : b])]
        if choices is not None:
            return [text[:start] + choice + rest for choice in choices for rest in naive(text[end + 1 :])]
    return [text]


def closes(text, start):
    """Tell whether the brace opened at `start` has a partner: whether closing ones ever outnumber opening ones."""
    level = 0
    for letter in text[start:]:
        level += (letter == "{") - (letter == "}")
        if level == 0:
            return True
    return False


def numbers(inside):
    try:
        first, last, *step = (int(part) for part in inside.split(".."))
        (step,) = step or [1]
    except ValueError:
        return None
    values, step = [first], abs(step) or 1
    direction = 1 if last >= first else -1
    while (last - values[-1]) * direction >= step:
        values.append(values[-1] + step * direction)
    ends = inside.split("..")[:2]
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-")[0] == "0" for end in ends)
    return [str(value).zfill(max(map(len, ends)) if padded else 0) for value in values]


PIECES = st.sampled_from(
    ["{", "}", "{", "}", ",", ",", "..", "0", "1", "03", "-2", "x", "{1..3}", "{p,q}", "{02..0..2}"]
)


@given(st.lists(PIECES, max_size=14).map("".join))
def test_any_braces_are_expanded_as_a_naive_expansion_does(text):
    names = naive(text)
    assert expand_braces(text) == names
    assert has_braces(text) == (names != [text])


@given(st.integers(-200, 200), st.integers(-200, 200), st.integers(-7, 7), st.integers(1, 5))
def test_any_range_counts_both_ends_and_is_as_wide_as_its_longer_end(first, last, step, width):
    pattern = f"{{{first:0{width}d}..{last:0{width}d}..{step}}}"
    assert expand_braces(pattern) == naive(pattern)


# Globs


@pytest.mark.parametrize("text", ["*.tar", "a?.tar", "a[01].tar", "a[!0].tar", "s/**/x", "[]]", "a[0-9]"])
def test_globs_are_seen(text):
    assert has_glob(text)


@pytest.mark.parametrize("text", ["a.tar", "", "a[.tar", "a].tar", "a[]", "a[b/c]d", "{a,b}", "train@64"])
def test_texts_without_glob_characters_are_no_globs(text):
    assert not has_glob(text)


# Numbered names


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("train-00000-of-00064.tfrecord", ("train", 0, 64, ".tfrecord")),
        ("train-00000-of-01024", ("train", 0, 1024, "")),
        ("data_tfrecord-00003-of-00012.gz", ("data_tfrecord", 3, 12, ".gz")),
        ("x.tfrecord-00063-of-00064", ("x.tfrecord", 63, 64, "")),
        ("s3://b/a-00000-of-00002/x-00001-of-00004.tar.gz", ("s3://b/a-00000-of-00002/x", 1, 4, ".tar.gz")),
        ("a-0-of-2-1-of-4.tar", ("a-0-of-2", 1, 4, ".tar")),
        ("-00000-of-00001", ("", 0, 1, "")),
        ("x-123456-of-234567.tar", ("x", 123456, 234567, ".tar")),
        ("x-00000-of-00002-5f3a.parquet", ("x", 0, 2, "-5f3a.parquet")),
        ("a\nb-1-of-2", ("a\nb", 1, 2, "")),
    ],
)
def test_numbered_names_are_taken_apart(name, parts):
    assert parse_numbered(name) == parts


@pytest.mark.parametrize(
    "name",
    [
        *("", "train.tfrecord", "train-00000.tfrecord", "train-00000-of-.tar", "train-of-00064", "00000-of-00064"),
        *(
            "a-00000-of-00002/x.tar",
            "a-\u0661-of-\u0662",
            "a-0-of-" + "9" * 19,
            "a-" + "9" * 5000 + "-of-2",
            "a-0-OF-2",
        ),
    ],
)
def test_other_names_are_not_numbered(name):
    assert parse_numbered(name) is None


# Counts


def test_a_count_stands_for_all_its_names():
    assert expand_count("train@3") == ["train-00000-of-00003", "train-00001-of-00003", "train-00002-of-00003"]
    assert expand_count("s3://b/train@2.tfrecord.gz")[1] == "s3://b/train-00001-of-00002.tfrecord.gz"
    assert len(expand_count("train@64")) == 64


def test_the_digits_grow_past_five_with_the_count():
    names = expand_count("x@100000")
    assert (names[0], names[-1]) == ("x-000000-of-100000", "x-099999-of-100000")
    assert expand_count("x@99999")[0] == "x-00000-of-99999"


def test_any_count_is_a_glob_that_finds_the_numbered_names():
    (pattern,) = expand_count("d/train@*.tfrecord")
    assert has_glob(pattern)
    for name in expand_count("d/train@2.tfrecord") + expand_count("d/train@100000.tfrecord")[:1]:
        assert fnmatch.fnmatchcase(name, pattern)
    for name in ("d/train.tfrecord", "d/val-00000-of-00002.tfrecord", "d/train-00000-of-00002.tar"):
        assert not fnmatch.fnmatchcase(name, pattern)
    assert has_glob(*expand_count("train@*"))


@pytest.mark.parametrize(
    "text",
    [
        *("train", "", "@64", "a/@64", "train@", "train@x", "train@64x", "logo@2x.png", "user@64/x.tar", "a@64.b/c"),
        *("a@1@b", "train@-1", "train@\u0663", "train@" + "9" * 19),
    ],
)
def test_texts_without_a_count_stand_for_themselves(text):
    assert expand_count(text) == [text]


@pytest.mark.parametrize("text", ["train@0", "train@10000001", "train@" + "9" * 18])
def test_impossible_counts_are_refused(text):
    with pytest.raises(ValueError, match="from 1 to 10000000"):
        expand_count(text)


@given(
    st.text(min_size=1).filter(lambda text: not text.endswith("/")),
    st.integers(1, 30),
    st.from_regex(r"(\.[a-z0-9-]+)*", fullmatch=True),
)
def test_every_name_of_a_count_is_taken_apart_into_what_made_it(prefix, count, suffix):
    for number, name in enumerate(expand_count(f"{prefix}@{count}{suffix}")):
        assert parse_numbered(name) == (prefix, number, count, suffix)


# Globs where no shell expands them


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("s3://b/a/*/x.tar", "s3://b/a"),
        ("s3://b/a/x*.tar", "s3://b/a"),
        ("s3://b/**/x.tar", "s3://b"),
        ("https://h/a/[ab]/x.tar", "https://h/a"),
        ("a/b.tar", "a"),
        ("*.tar", ""),
        ("/*/x.tar", ""),
        ("https://h/a[/x?.tar", "https://h/a["),
    ],
)
def test_the_folder_of_a_glob_is_what_stands_before_its_first_part_with_a_pattern(pattern, folder):
    assert glob_folder(pattern) == folder


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [
        ("a.tar", "*.tar", True),
        ("a/b.tar", "*.tar", False),
        ("a/b.tar", "*/*.tar", True),
        ("a/b.tar", "**/*.tar", True),
        ("b.tar", "**/*.tar", True),
        ("a/b/c/d.tar", "a/**/d.tar", True),
        ("a/d.tar", "a/**/d.tar", True),
        ("a/b/c", "a/**", True),
        ("a", "a/**", False),
        ("a/b", "**", True),
        ("ab/c.tar", "a**/c.tar", True),
        ("a/b/c.tar", "a**/c.tar", False),
        (".a/b.tar", "**/b.tar", False),
        (".a/b.tar", ".*/b.tar", True),
        ("a/.b.tar", "a/*", False),
        ("a/.b/c.tar", "**/c.tar", False),
        ("a/.b", "**", False),
        ("A.tar", "a.tar", False),
        ("a\n.tar", "?\n.tar", True),
        ("[.tar", "[[].tar", True),
        ("b.tar", "[!a].tar", True),
        ("a.tar", "[!a].tar", False),
        ("", "", True),
        ("a", "", False),
    ],
)
def test_a_glob_matches_whole_paths_as_in_the_shell(path, pattern, matches):
    assert matches_glob(path, pattern) is matches


@given(
    st.lists(st.text("ab.[", min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.sampled_from(["*", "?", "a", "a*", "[ab]", "[!a]*", "*b", "**", "?b", ".*"]), min_size=1, max_size=4),
)
def test_globs_match_as_those_of_python_on_a_disk(tmp_path_factory, parts, patterns):
    if any(part in {".", ".."} for part in parts) or patterns[-1] == "**":
        return  # the folder itself is no name; and a last ** is files and folders for Python
    root = tmp_path_factory.mktemp("glob")
    path = root.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    names = glob.glob(f"{root}/{'/'.join(patterns)}", recursive=True)  # noqa: PTH207 - Path's has other rules for dots
    found = {Path(name).relative_to(root).as_posix() for name in names}
    assert ("/".join(parts) in found) == matches_glob("/".join(parts), "/".join(patterns))


def test_many_stars_do_not_take_for_ever():
    def match():
        assert not matches_glob("/".join("a" * 22), "/".join(["**", "a"] * 7) + "/b")
        assert not matches_glob("a" * 100, "*a" * 20 + "b")

    assert least_seconds(match, 0.2, clock=time.thread_time) < 0.2
