"""Shards kept as files: whole or not there, each url its own, and never more than the limit."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from servers.faulty import Fault, FaultServer
from shardset.errors import FormatError, NotFoundError, StorageError, TransferError
from shardset.storage import HttpStore, Retry
from shardset.storage.file_cache import CachedFile, FileCache, cache_name

CONTENT = random.Random(1).randbytes(300_000)


@pytest.fixture
def server():
    with FaultServer() as server:
        for name in "abcdef":
            server.put(f"/{name}/x.tar", name.encode() * 100_000)
        server.put("/whole.tar", CONTENT)
        yield server


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def kept_files(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith("."))


def total(folder):
    size = 0
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            size += path.stat().st_size if path.is_file() else 0
    return size


def content_of(file):
    return Path(file.path).read_bytes()


def test_a_shard_is_downloaded_once_and_then_read_from_its_file(tmp_path, server):
    cache = FileCache(tmp_path / "new" / "cache")
    url = f"{server.url}whole.tar"
    with cache.fetch(url) as file:
        assert content_of(file) == CONTENT
        assert file.size == len(CONTENT)
        assert file.path == str(cache.path_of(url))
    count = len(server.requests())
    server.put("/whole.tar", b"something else")
    for again in (cache, pickle.loads(pickle.dumps(cache)), FileCache(tmp_path / "new" / "cache")):
        assert content_of(again.fetch(url)) == CONTENT
    assert len(server.requests()) == count
    assert kept_files(tmp_path) == [cache_name(url)]
    assert names_in(tmp_path / "new" / "cache") == [f".{cache_name(url)}.from", cache_name(url)]


def test_shards_of_one_name_in_different_folders_are_different_files(tmp_path, server):
    """Number 20 of the library's known troubles: the last part of the url was all that a file was known by."""
    (tmp_path / "p").mkdir()
    (tmp_path / "q").mkdir()
    (tmp_path / "p" / "x.tar").write_bytes(b"p")
    (tmp_path / "q" / "x.tar").write_bytes(b"q")
    cache = FileCache(tmp_path / "cache")
    for letter in "ab":
        assert content_of(cache.fetch(f"{server.url}{letter}/x.tar")) == letter.encode() * 100_000
    for letter in "pq":
        assert content_of(cache.fetch(f"pipe:cat {tmp_path}/{letter}/x.tar")) == letter.encode()
    assert len(kept_files(tmp_path / "cache")) == 4
    assert all(name.startswith("x-") and name.endswith(".tar") for name in kept_files(tmp_path / "cache"))


def test_names_can_be_read_and_differ_with_anything_in_the_url():
    urls = ["https://host/a/train-000.tar", "https://host/b/train-000.tar", "https://host/a/train-000.tar?x=1"]
    urls += ["pipe:cat a/train-000.tar", "pipe:cat b/train-000.tar", "s3://bucket/a/train-000.tar.gz"]
    names = [cache_name(url) for url in urls]
    assert len(set(names)) == len(names)
    assert names[0].startswith("train-000-")
    assert names[0].endswith(".tar")
    assert names[5].endswith(".tar.gz")
    odd = [
        "https://host/",
        "pipe:x | y > /dev/stdout",
        "https://host/..",
        "https://host/.hidden",
        "a:" + "n" * 500 + "/",
    ]
    for url in odd + urls:
        assert "/" not in cache_name(url)
        assert not cache_name(url).startswith(".")
        assert 0 < len(cache_name(url)) < 120


def test_names_of_ones_own_are_taken_and_never_shared_by_two_urls(tmp_path, server):
    cache = FileCache(tmp_path, url_to_name=lambda url: url.rsplit("/", 2)[1] + "/x.tar")
    assert content_of(cache.fetch(f"{server.url}a/x.tar")) == b"a" * 100_000
    assert (tmp_path / "a" / "x.tar").exists()
    cache = FileCache(tmp_path / "other", url_to_name=lambda url: url.rsplit("/", 1)[1])
    cache.fetch(f"{server.url}a/x.tar")
    with pytest.raises(ValueError, match="two urls have one name"):
        cache.fetch(f"{server.url}b/x.tar")
    with pytest.raises(ValueError, match="two urls have one name"):  # also another process's
        FileCache(tmp_path / "other", url_to_name=lambda _: "x.tar").fetch(f"{server.url}c/x.tar")


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", ".hidden", "a/.hidden", "a\\b"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no name for a file"):
        FileCache(tmp_path / "cache", url_to_name=lambda _: name).fetch("http://127.0.0.1:1/a.tar")
    assert not (tmp_path / "cache").exists()


def test_local_files_stay_where_they_are(tmp_path):
    (tmp_path / "a.tar").write_bytes(CONTENT)
    cache = FileCache(tmp_path / "cache")
    for url in (str(tmp_path / "a.tar"), (tmp_path / "a.tar").as_uri()):
        with cache.fetch(url) as file:
            assert (file.path, file.size) == (str(tmp_path / "a.tar"), len(CONTENT))
    assert not (tmp_path / "cache").exists()
    with pytest.raises(NotFoundError):
        cache.fetch(str(tmp_path / "none.tar"))
    with pytest.raises(ValueError, match="comes once"):
        cache.fetch("-")


def test_what_an_opener_opens_is_kept(tmp_path):
    opened = []

    def opener(url, mode, bufsize):
        opened.append((url, mode, bufsize))
        return io.BytesIO(url.encode())

    cache = FileCache(tmp_path, openers={"mine": opener})
    for _ in range(2):
        assert content_of(cache.fetch("mine://a/b.tar")) == b"mine://a/b.tar"
    assert len(opened) == 1


def test_output_of_a_command_that_fails_is_not_kept(tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    cache = FileCache(tmp_path / "cache", limit=10_000_000)
    with pytest.raises(TransferError, match="status 3"):
        cache.fetch(f"pipe:head -c 3000 {tmp_path}/f; exit 3")
    assert names_in(tmp_path / "cache") == [".lock"]


def test_a_download_that_breaks_off_is_not_kept(tmp_path, server):
    server.add(Fault.truncate(after=1000))
    cache = FileCache(tmp_path, store=HttpStore(retry=Retry(attempts=1)))
    server.add(Fault.hang_up(), path="/whole.tar", first=2)
    with pytest.raises(StorageError):
        cache.fetch(f"{server.url}whole.tar")
    assert names_in(tmp_path) == []
    server.behave()
    assert content_of(cache.fetch(f"{server.url}whole.tar")) == CONTENT


def test_what_is_not_valid_is_not_kept(tmp_path, server):
    seen = []

    def validate(path):
        seen.append(Path(path).read_bytes())
        return False

    cache = FileCache(tmp_path, limit=1_000_000, validate=validate)
    with pytest.raises(FormatError, match="it begins with b'aaa"):
        cache.fetch(f"{server.url}a/x.tar")
    assert seen == [b"a" * 100_000]
    assert kept_files(tmp_path) == []


def test_a_file_that_was_cut_after_it_was_kept_is_downloaded_again(tmp_path, server, caplog):
    cache = FileCache(tmp_path)
    url = f"{server.url}whole.tar"
    path = cache.path_of(url)
    cache.fetch(url).close()
    os.truncate(path, 1000)
    assert content_of(cache.fetch(url)) == CONTENT
    assert "downloaded again" in caplog.text


def test_a_killed_download_leaves_nothing_that_is_taken_for_a_shard(tmp_path, server):
    """Number 21 of the library's known troubles."""
    server.add(Fault.drip(0.01, 1000), path="/whole.tar", method="GET")
    url = f"{server.url}whole.tar"
    program = f"from shardset.storage.file_cache import FileCache\nFileCache({str(tmp_path)!r}).fetch({url!r})"
    child = subprocess.Popen([sys.executable, "-c", program])
    limit = time.monotonic() + 20
    while not any(name.endswith(".tmp") for name in names_in(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert any(name.endswith(".tmp") for name in names_in(tmp_path))
    assert kept_files(tmp_path) == []
    server.behave()
    program += "\nprint('sound')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert not any(name.endswith((".tmp", ".lock")) for name in names_in(tmp_path))
    assert (tmp_path / cache_name(url)).read_bytes() == CONTENT


# The limit


def test_files_used_longest_ago_go_when_there_is_no_room(tmp_path, server):
    cache = FileCache(tmp_path, limit=350_000)
    for letter in "abc":
        cache.fetch(f"{server.url}{letter}/x.tar").close()
        time.sleep(0.01)
    cache.fetch(f"{server.url}a/x.tar").close()  # used again
    cache.fetch(f"{server.url}d/x.tar").close()
    assert kept_files(tmp_path) == sorted(cache_name(f"{server.url}{letter}/x.tar") for letter in "acd")
    assert total(tmp_path) <= 350_000
    assert len(list(tmp_path.glob(".*.from"))) == 3


def test_files_that_are_held_stay_and_what_has_no_room_is_not_kept(tmp_path, server, caplog):
    cache = FileCache(tmp_path, limit=350_000)
    held = [cache.fetch(f"{server.url}{letter}/x.tar") for letter in "abc"]
    assert cache.fetch(f"{server.url}d/x.tar") is None
    assert "not cached" in caplog.text
    assert [content_of(file)[:1] for file in held] == [b"a", b"b", b"c"]
    held.pop(1)
    gc.collect()
    assert content_of(cache.fetch(f"{server.url}d/x.tar"))[:1] == b"d"
    assert kept_files(tmp_path) == sorted(cache_name(f"{server.url}{letter}/x.tar") for letter in "acd")


def test_a_shard_larger_than_the_limit_is_not_kept(tmp_path, server):
    cache = FileCache(tmp_path, limit=150_000)
    cache.fetch(f"{server.url}a/x.tar").close()
    assert cache.fetch(f"{server.url}whole.tar") is None
    assert cache.fetch("pipe:head -c 5000000 /dev/zero") is None
    assert total(tmp_path) <= 150_000
    with pytest.raises(ValueError, match="limit=0"):
        FileCache(tmp_path, limit=0)


def test_files_that_others_put_into_the_folder_are_counted_and_never_removed(tmp_path, server):
    (tmp_path / "precious.txt").write_bytes(bytes(200_000))
    cache = FileCache(tmp_path, limit=350_000)
    for letter in "abc":
        cache.fetch(f"{server.url}{letter}/x.tar").close()
        assert total(tmp_path) <= 350_000
    assert cache.fetch(f"{server.url}whole.tar") is None
    assert (tmp_path / "precious.txt").stat().st_size == 200_000


def test_the_limit_holds_while_many_download_at_once(tmp_path, server):
    limit = 320_000
    cache = FileCache(tmp_path, limit=limit)
    urls = [f"{server.url}{letter}/x.tar" for letter in "abcdef"]
    urls += [f"pipe:head -c {size} /dev/zero" for size in (10_000, 90_000, 200_000)]
    most = []

    def use(number):
        for url in random.Random(number).sample(urls, len(urls)):
            file = cache.fetch(url)
            most.append(total(tmp_path))
            if file is not None and url.startswith("http"):
                assert content_of(file) == url.rsplit("/", 2)[1].encode() * 100_000
            del file

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(8)))
    assert max(most) <= limit


def test_those_who_want_one_shard_at_once_download_it_once(tmp_path, server):
    server.add(Fault.latency(0.2), path="/whole.tar", method="GET")
    url = f"{server.url}whole.tar"
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(lambda _: FileCache(tmp_path).fetch(url), range(8)))
    assert {content_of(file) for file in files} == {CONTENT}
    assert len(server.requests("GET")) == 1


def test_an_unlimited_cache_keeps_no_count(tmp_path):
    file = FileCache(tmp_path).fetch("pipe:echo some")
    assert isinstance(file, CachedFile)
    assert ".lock" not in names_in(tmp_path)
