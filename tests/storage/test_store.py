from __future__ import annotations

import array
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import ChangedError, StorageError
from shardset.storage import AnyStore, CloudStore, FsspecStore, HttpStore, LocalStore, MemoryStore
from shardset.storage.anywhere import open_store
from shardset.storage.store import (
    ABSENT,
    check_expected,
    check_range,
    check_ranges,
    is_remote,
    iter_buffers,
    split_query,
    url_join,
    url_name,
    url_scheme,
)

NAMES = st.text(st.characters(exclude_characters="/\\\0", exclude_categories=("Cs",)), min_size=1)


@pytest.mark.parametrize("url", ["shards", "/data/x.tar", "C:\\data\\x.tar", "d:/x.tar", "file:///data/x.tar", "a#b?c"])
def test_paths_and_file_urls_get_a_local_store(url):
    assert isinstance(open_store(url), LocalStore)


def test_memory_cannot_be_opened_by_url():
    with pytest.raises(ValueError, match="pass that store"):
        open_store("memory://bucket/a")


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        *(("http://h/a", HttpStore), ("HTTPS://h/a", HttpStore), ("s3://b/a", CloudStore), ("gs://b/a", CloudStore)),
        *(("az://c/a", CloudStore), ("abfs://c/a", CloudStore)),
        *(("gopher://host/a", FsspecStore), ("S5://bucket/a", FsspecStore), ("fsspec+ftp://h/a", FsspecStore)),
    ],
)
def test_each_scheme_has_its_store_and_those_that_nobody_knows_are_left_to_fsspec(url, kind):
    assert type(open_store(url)) is kind


def test_a_scheme_that_nobody_knows_is_an_error_that_names_it():
    with pytest.raises((StorageError, ValueError), match="gopher"):
        open_store("gopher://host/a").info("gopher://host/a")


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
        ("https://host/f/", "a b/ü#?%.tar", "https://host/f/a%20b/%C3%BC%23%3F%25.tar"),
        ("https://host/f?sig=1/2", "a", "https://host/f/a?sig=1/2"),
        ("https://host/f/?sig=1#x", "a", "https://host/f/a?sig=1#x"),
        ("https://host", "a", "https://host/a"),
        ("http://host/f", os.fsdecode(b"caf\xe9"), "http://host/f/caf%E9"),
        ("s3://b/f", "a b#?%.tar", "s3://b/f/a b#?%.tar"),
        ("s3://b", "a", "s3://b/a"),
    ],
)
def test_urls_are_joined(base, name, url):
    assert url_join(base, name) == url


@given(
    st.sampled_from(["data", "data/", "memory://b/f", "file:///data", "https://h/f", "https://h/f/?a=/b", "s3://b"]),
    NAMES.filter(lambda name: name != "."),
)
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


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://h/a.tar", ("https://h/a.tar", "")),
        ("https://h/a?x=1#y", ("https://h/a", "?x=1#y")),
        ("https://h/a#y?x", ("https://h/a", "#y?x")),
        ("", ("", "")),
    ],
)
def test_an_address_is_split_before_its_query(url, parts):
    assert split_query(url) == parts


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/f/a%20b.tar?x=/y", "a b.tar"),
        ("https://h/f/", ""),
        ("s3://b/f/a%20b?.tar", "a%20b?.tar"),
        ("file:///d/a%20b", "a b"),
        ("d/a%20b", "a%20b"),
    ],
)
def test_the_name_of_a_url_is_what_was_meant(url, name):
    assert url_name(url) == name


def test_remote_is_what_is_neither_a_disk_nor_memory():
    assert not any(map(is_remote, ["a", "/a", "C:\\a", "file:///a", "memory://b/a", "c://a"]))
    assert all(map(is_remote, ["http://h/a", "HTTPS://h/a", "s3://b/a", "gs://b/a", "hf://a", "fsspec+x://a"]))


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 10), (9, 1), (99, 0), (10, 0)])
def test_a_range_that_lies_in_the_object_or_is_empty_is_allowed(offset, length):
    check_range("x", 10, offset, length)


@pytest.mark.parametrize(
    ("offset", "length", "error"),
    [(-1, 0, ValueError), (0, -1, ValueError), (0, 11, StorageError), (11, 1, StorageError)],
)
def test_a_range_that_does_not_is_refused(offset, length, error):
    with pytest.raises(error):
        check_range("x", 10, offset, length)


@pytest.mark.parametrize(
    "data",
    [
        *(b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), [b"ab", b"cd"], iter([b"a", b"", bytearray(b"bcd")])),
        *(array.array("H", [25185, 25699]), [array.array("H", [25185]), b"cd"], np.frombuffer(b"abcd", np.uint8)),
    ],
)
def test_what_is_written_is_taken_at_once_or_in_pieces_as_bytes(data):
    pieces = list(iter_buffers(data))
    assert b"".join(pieces) == b"abcd"
    assert all(piece.format == "B" and piece.ndim == 1 for piece in pieces)


@pytest.mark.parametrize("data", ["text", ["text"], 3, [3], None])
def test_what_is_no_bytes_is_not_written(data):
    with pytest.raises(TypeError):
        list(iter_buffers(data))


def test_an_object_must_be_as_it_is_expected():
    store = MemoryStore()
    check_expected(store, "memory://b/a", ABSENT)
    store.write("memory://b/a", b"1")
    identity = store.info("memory://b/a").identity
    check_expected(store, "memory://b/a", identity)
    for url, expect, what in (
        ("memory://b/a", ABSENT, "there already"),
        ("memory://b/a", f"{identity}x", "was changed"),
        ("memory://b/none", identity, "was removed"),
    ):
        with pytest.raises(ChangedError, match=what):
            check_expected(store, url, expect)


# ---- every place at once


def test_each_url_goes_to_the_store_of_its_scheme_which_is_made_once(tmp_path):
    memory = MemoryStore()
    store = AnyStore({"memory": memory})
    store.write("memory://b/a", b"memory")
    store.write(str(tmp_path / "a"), b"disk")
    assert store.open("memory://b/a").read(0, 6) == b"memory"
    assert store.open((tmp_path / "a").as_uri()).read(0, 4) == b"disk"
    assert [info.size for info in store.list(str(tmp_path))] == [4]
    assert store.info("memory://b/a").size == 6
    assert store.store_of("memory://x") is memory
    assert store.store_of("/x") is store.store_of("file:///y")
    assert store.store_of("http://h/a") is store.store_of("https://g/b")
    assert store.store_of("s3://h/a") is not store.store_of("gs://g/b")
    store.close()
    assert store.open(str(tmp_path / "a")).read(0, 1) == b"d"


def test_a_store_that_was_given_serves_all_spellings_of_its_scheme():
    http, disk = HttpStore(), LocalStore(mmap=False)
    store = AnyStore({"https": http, "file": disk})
    assert store.store_of("http://h/a") is store.store_of("https://h/a") is http
    assert store.store_of("a") is disk


def test_every_place_at_once_goes_to_other_processes(tmp_path):
    (tmp_path / "a").write_bytes(b"disk")
    store = AnyStore({"": LocalStore(mmap=False)})
    store.store_of("https://h/a")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.open(str(tmp_path / "a")).map() is None
    assert repr(copy) == repr(store) == "AnyStore(['', 'http'])"


def test_memory_without_its_store_is_no_place():
    with pytest.raises(ValueError, match="pass that store"):
        AnyStore().info("memory://b/a")
