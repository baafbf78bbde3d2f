from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import StorageError
from shardset.storage import LocalStore, open_store, url_join, url_name
from shardset.storage.store import check_ranges, url_scheme

NAMES = st.text(st.characters(exclude_characters="/\\\0", exclude_categories=("Cs",)), min_size=1)


@pytest.mark.parametrize("url", ["shards", "/data/x.tar", "C:\\data\\x.tar", "d:/x.tar", "file:///data/x.tar", "a#b?c"])
def test_paths_and_file_urls_get_a_local_store(url):
    assert isinstance(open_store(url), LocalStore)


def test_memory_cannot_be_opened_by_url():
    with pytest.raises(ValueError, match="pass that store"):
        open_store("memory://bucket/a")


@pytest.mark.parametrize("url", ["gopher://host/a", "S5://bucket/a"])
def test_an_unknown_scheme_is_an_error_that_names_the_known_ones(url):
    with pytest.raises(ValueError, match="known are paths, file:// and memory://"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("a", ""),
        ("C:\\a", ""),
        ("c://a", ""),
        ("HTTPS://h/a", "https"),
        ("memory://b", "memory"),
        ("://a", ""),
        ("", ""),
    ],
)
def test_a_scheme_has_two_letters_at_least(url, scheme):
    assert url_scheme(url) == scheme


@pytest.mark.parametrize(
    ("base", "name", "url"),
    [
        ("data", "a b#?%.tar", "data/a b#?%.tar"),
        ("/", "a", "/a"),
        ("memory://b/f/", "g/h", "memory://b/f/g/h"),
        ("file:///data", "a b/%#?.tar", "file:///data/a%20b/%25%23%3F.tar"),
        ("https://host/f", "a.tar", "https://host/f/a.tar"),
    ],
)
def test_urls_are_joined(base, name, url):
    assert url_join(base, name) == url


@given(st.sampled_from(["data", "data/", "memory://b/f", "file:///data"]), NAMES.filter(lambda name: name != "."))
def test_the_name_that_was_joined_comes_back(base, name):
    assert url_name(url_join(base, name)) == name


@given(
    st.lists(st.tuples(st.integers(-3, 120), st.integers(-3, 120)) | st.tuples(st.integers(0, 90), st.integers(0, 9))),
    st.sampled_from([list, np.array, lambda numbers: np.array(numbers, np.int16)]),
)
def test_ranges_are_refused_exactly_when_one_is_negative_or_reaches_past_the_end(pairs, kind):
    offsets, lengths = [offset for offset, _ in pairs], [length for _, length in pairs]
    kind = kind if pairs else list
    bad = any(offset < 0 or length < 0 or (length and offset + length > 100) for offset, length in pairs)
    if bad:
        with pytest.raises((ValueError, StorageError)):
            check_ranges("x", 100, kind(offsets), kind(lengths))
    else:
        starts, ends = check_ranges("x", 100, kind(offsets), kind(lengths))
        assert starts == offsets
        assert ends == [offset + length for offset, length in pairs]
        assert all(type(number) is int for number in starts + ends)
