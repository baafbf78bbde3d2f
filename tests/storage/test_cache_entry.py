from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.storage.cache_entry import EntryInfo, entry_name, pack_footer, read_footer, url_without_signature

INFO = EntryInfo("https://h/a.tar", '"etag"', 1000, 200, 300)


@pytest.fixture
def opened(tmp_path):
    handles = []

    def write(content):
        handles.append(os.open(tmp_path / "entry", os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        os.write(handles[-1], content)
        return handles[-1], len(content)

    yield write
    for handle in handles:
        os.close(handle)


def test_an_entry_says_what_it_is(opened):
    assert read_footer(*opened(bytes(300) + pack_footer(INFO))) == INFO


def test_names_that_are_not_utf_8_come_back(opened):
    info = EntryInfo("/data/caf\udce9.tar", "1-2", 300, 0, 300)
    assert read_footer(*opened(bytes(300) + pack_footer(info))) == info
    assert len(entry_name(info.url, info.identity, 300, 0, 300)) == 64


def test_the_length_of_the_description_is_known_before_the_digest():
    later = EntryInfo("https://h/a.tar", '"etag"', 1000, 200, 300, digest="f" * 32, created=1_900_000_000)
    assert len(pack_footer(later)) == len(pack_footer(INFO))


def test_an_entry_cut_anywhere_or_too_long_is_none(opened):
    whole = bytes(300) + pack_footer(INFO)
    for end in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            read_footer(*opened(whole[:end]))
    for wrong in (whole + b"\0", b"\0" + whole):
        with pytest.raises(ValueError, match=r"."):
            read_footer(*opened(wrong))


@given(st.binary(max_size=60), st.integers(0, 2**32 - 1))
def test_garbage_is_no_entry(text, length):
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(text + length.to_bytes(4, "little") + b"shardset")
        file.flush()
        with pytest.raises(ValueError, match=r"."):
            read_footer(file.fileno(), len(text) + 12)


@pytest.mark.parametrize("part", range(5))
def test_every_part_of_what_an_entry_is_changes_its_name(part):
    parts = ["https://h/a.tar", "etag", 1000, 0, 500]
    name = entry_name(*parts)
    parts[part] = "https://h/b.tar" if part == 0 else "other" if part == 1 else parts[part] + 1
    assert entry_name(*parts) != name


def test_parts_do_not_run_into_each_other():
    assert entry_name("https://h/a", "b", 1, 2, 3) != entry_name("https://h/ab", "", 1, 2, 3)
    assert entry_name("https://h/a", "1", 12, 3, 4) != entry_name("https://h/a", "11", 2, 3, 4)


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("https://h/a.tar", "https://h/a.tar"),
        ("https://me:pw@h/a.tar", "https://h/a.tar"),
        ("https://h/a?versionId=7&X-Amz-Signature=1&X-Amz-Date=2&x-amz-expires=3", "https://h/a?versionId=7"),
        ("https://h/a?X-Goog-Signature=1&X-Goog-Date=2&generation=4", "https://h/a?generation=4"),
        ("https://h/a?Expires=1&Signature=2&Key-Pair-Id=3&page=4", "https://h/a?page=4"),
        ("https://h/a?sv=1&se=2&sr=b&sp=r&sig=3&snapshot=4", "https://h/a?snapshot=4"),
        # Without a signature they may say which object it is.
        ("https://h/a?se=2&expires=1&key=3", "https://h/a?se=2&expires=1&key=3"),
        ("memory://b/a@b?Signature=1", "memory://b/a@b?Signature=1"),
        ("file:///data/a?Signature=1", "file:///data/a?Signature=1"),
        ("/data/a?Signature=1", "/data/a?Signature=1"),
    ],
)
def test_a_signature_and_a_login_are_no_part_of_what_an_object_is(url, bare):
    assert url_without_signature(url) == bare


def test_a_relative_path_means_what_it_means_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert url_without_signature("a.tar") == str(tmp_path / "a.tar")
