"""webdataset's cache: its names and results, without its collisions, cut files and leftovers."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import time
from pathlib import Path

import pytest

from servers.faulty import Fault, FaultServer
from shardset.errors import FormatError, NotFoundError, ShardsetError
from shardset.webdataset import cache as module
from shardset.webdataset import utils
from shardset.webdataset.cache import (
    FileCache,
    LRUCleanup,
    StreamingOpen,
    check_tar_format,
    download,
    get_filetype,
    islocal,
    pipe_cleaner,
    url_to_cache_name,
)
from shardset.webdataset.gopen import gopen_schemes


def make_tar(payload, mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        member = tarfile.TarInfo("a.txt")
        member.size = len(payload)
        tar.addfile(member, io.BytesIO(payload))
    return file.getvalue()


TARS = {f"/{folder}/x.tar": make_tar(folder.encode() * 1000) for folder in "abc"}


@pytest.fixture
def server():
    with FaultServer(dict(TARS)) as server:
        yield server


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def kept_files(folder):
    return [name for name in names_in(folder) if not name.startswith(".")]


def test_shards_are_downloaded_once_and_given_as_open_files(tmp_path, server):
    urls = [f"{server.url}{folder}/x.tar" for folder in "abc"]
    cache = FileCache(tmp_path / "cache")
    for _ in range(2):
        found = list(cache({"url": url} for url in urls))
        assert [item["url"] for item in found] == urls
        for item, tar in zip(found, TARS.values(), strict=True):
            with item["stream"] as stream:
                assert stream.read() == tar
            assert Path(item["local_path"]).parent == tmp_path / "cache"
            assert Path(item["local_path"]).read_bytes() == tar
    assert len(server.requests("GET")) == 3
    assert len(kept_files(tmp_path / "cache")) == 3
    assert pickle.loads(pickle.dumps(cache)).get_file(urls[0]) == found[0]["local_path"]


def test_webdatasets_names_can_be_had_and_are_not_shared(tmp_path, server):
    """Number 20 of the library's known troubles: url_to_name was ignored, and names collided."""
    cache = FileCache(tmp_path, url_to_name=url_to_cache_name)
    assert cache.get_file(f"{server.url}a/x.tar") == str(tmp_path / "x.tar")
    with pytest.raises(ValueError, match="two urls have one name"):
        cache.get_file(f"{server.url}b/x.tar")
    cache = FileCache(tmp_path, url_to_name=lambda url: url_to_cache_name(url, ndir=1))
    assert cache.get_file(f"{server.url}b/x.tar") == str(tmp_path / "b" / "x.tar")


def test_local_files_are_given_where_they_are(tmp_path):
    path = tmp_path / "q?x#y.tar"
    path.write_bytes(TARS["/a/x.tar"])
    cache = FileCache(tmp_path / "cache")
    [item] = cache([str(path)])
    with item["stream"] as stream:
        assert stream.read() == TARS["/a/x.tar"]
    assert item["local_path"] == str(path)
    assert cache.get_file(path.as_uri()) == str(path)
    assert not (tmp_path / "cache").exists()


def test_what_is_no_tar_is_an_error_and_not_kept(tmp_path, server):
    server.put("/page.tar", b"<html>go away</html>")
    with pytest.raises(FormatError, match="<html>"):
        FileCache(tmp_path).get_file(f"{server.url}page.tar")
    assert kept_files(tmp_path) == []
    assert FileCache(tmp_path, validator=None).get_file(f"{server.url}page.tar")


def test_a_handler_decides_about_shards_that_cannot_be_had(tmp_path, server):
    urls = [f"{server.url}a/x.tar", f"{server.url}none.tar", "pipe:cat /dev/null; exit 3", f"{server.url}b/x.tar"]
    seen = []

    def go_on(error):
        seen.append(error)
        return True

    for opener in (FileCache(tmp_path, handler=go_on), FileCache(tmp_path, handler=lambda _: False)):
        found = []
        for item in opener(urls):
            found.append(item["url"])
            item["stream"].close()
        assert found == ([urls[0], urls[3]] if opener.handler is go_on else urls[:1])
    assert len(seen) == 2
    with pytest.raises(NotFoundError):
        list(FileCache(tmp_path)(urls[1:]))


def test_the_limit_holds_and_what_has_no_room_comes_as_a_stream(tmp_path, server):
    size = len(TARS["/a/x.tar"])
    cache = FileCache(tmp_path, cache_size=2 * size)
    for folder in "abc":
        assert Path(cache.get_file(f"{server.url}{folder}/x.tar")).read_bytes() == TARS[f"/{folder}/x.tar"]
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * size
    small = FileCache(tmp_path / "small", cache_size=100)
    [item] = small([f"{server.url}a/x.tar"])
    with item["stream"] as stream:
        assert stream.read() == TARS["/a/x.tar"]
    assert "local_path" not in item
    with pytest.raises(ShardsetError, match="no room"):
        small.get_file(f"{server.url}a/x.tar")


def test_a_cache_that_is_not_told_takes_the_environments_folder_and_limit(monkeypatch, tmp_path, server, capfd):
    monkeypatch.setattr(module, "default_cache_dir", str(tmp_path / "there"))
    monkeypatch.setattr(module, "default_cache_size", 12345.0)
    monkeypatch.setattr(module, "verbose_cache", 1)
    cache = FileCache()
    assert (cache.cache_dir, cache.cache_size) == (str(tmp_path / "there"), 12345)
    cache.get_file(f"{server.url}a/x.tar")
    assert f"downloading {server.url}a/x.tar" in capfd.readouterr().err
    assert FileCache(cache_size=7).cache_size == 7


def test_urls_are_opened_as_streams(tmp_path, server):
    path = tmp_path / "a.tar"
    path.write_bytes(b"local")
    urls = [str(path), path.as_uri(), f"{server.url}a/x.tar", f"pipe:cat {path}"]
    found = list(StreamingOpen(verbose=True)(urls[:2] + [{"url": url} for url in urls[2:]]))
    assert [item["url"] for item in found] == urls
    assert [item.get("local_path") for item in found] == [str(path), str(path), None, None]
    assert [item["stream"].read() for item in found] == [b"local", b"local", TARS["/a/x.tar"], b"local"]
    for item in found:
        item["stream"].close()
    with pytest.raises(FileNotFoundError):
        list(StreamingOpen()([str(tmp_path / "none")]))
    assert list(StreamingOpen(handler=lambda _: True)([str(tmp_path / "none")])) == []


def test_functions_of_a_programs_own_serve_the_cache_too(monkeypatch, tmp_path):
    monkeypatch.setitem(gopen_schemes, "mine", lambda *_: io.BytesIO(TARS["/a/x.tar"]))
    assert Path(FileCache(tmp_path).get_file("mine://x/a.tar")).read_bytes() == TARS["/a/x.tar"]


def test_a_download_is_whole_or_not_there(tmp_path, server):
    download(f"{server.url}a/x.tar", tmp_path / "a.tar")
    assert (tmp_path / "a.tar").read_bytes() == TARS["/a/x.tar"]
    with pytest.raises(OSError, match="status 3"):
        download(f"pipe:head -c 3000 {tmp_path}/a.tar; exit 3", tmp_path / "b.tar")
    server.add(Fault.status(404))
    with pytest.raises(NotFoundError):
        download(f"{server.url}a/x.tar", tmp_path / "c.tar", verbose=True)
    assert names_in(tmp_path) == ["a.tar"]


def test_where_security_is_enforced_no_command_is_run(monkeypatch, tmp_path):
    monkeypatch.setattr(utils, "enforce_security", True)
    with pytest.raises(ValueError, match="cannot open pipe"):
        FileCache(tmp_path).get_file("pipe:touch x")
    with pytest.raises(ValueError, match="cannot open pipe"):
        download("pipe:touch x", tmp_path / "x")


def test_what_begins_as_a_tar_or_is_compressed_is_taken_for_one(tmp_path):
    path = tmp_path / "x"
    for content, is_tar in (
        (make_tar(b"x"), True),
        (make_tar(b"x", "w:gz"), True),
        (make_tar(b"x", "w:xz"), True),
        (make_tar(b"x", "w:bz2"), True),
        (bytes(10240), True),
        (b"", False),
        (b"<html>" + bytes(1000), False),
        (make_tar(b"x")[:300], False),
    ):
        path.write_bytes(content)
        assert check_tar_format(str(path)) == is_tar
    assert get_filetype(str(path)).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://host/a/b/x-000.tar", "x-000.tar"),
        ("https://host/a/b/x.tar?sig=1", "x.tar"),
        ("/a/b/x.tar", "x.tar"),
        ("s3://bucket/a/x.tar", "x.tar"),
        ("pipe:cat a/x.tar", "pipe%3Acat%20a%2Fx.tar"),
        ("hf://a/b.tar", "hf%3A%2F%2Fa%2Fb.tar"),
        ("pipe:" + "x" * 300, "x" * 128),
    ],
)
def test_webdatasets_names_of_cached_files(url, name):
    assert url_to_cache_name(url) == name


def test_what_else_webdataset_offers():
    assert url_to_cache_name("http://host/a/b/x.tar", ndir=1) == "b/x.tar"
    assert pipe_cleaner("pipe:curl -s https://host/a.tar | cat") == "https://host/a.tar"
    assert pipe_cleaner("pipe:cat a.tar") == "cat a.tar"
    assert pipe_cleaner("https://host/a.tar") == "https://host/a.tar"
    assert [islocal(url) for url in ("a.tar", "file:///a.tar", "C:/a.tar")] == [True] * 3
    assert not any(islocal(url) for url in ("http://host/a", "pipe:cat x", "s3://b/a"))


def test_a_cleanup_removes_the_oldest_files_until_the_rest_fits(tmp_path):
    for number in range(20):
        path = tmp_path / f"{number:06}"
        path.write_bytes(bytes(4096))
        os.utime(path, (number, number))
    cleanup = LRUCleanup(tmp_path, cache_size=10 * 4096, keyfn=os.path.getmtime, interval=None)
    cleanup.cleanup()
    assert kept_files(tmp_path) == [f"{number:06}" for number in range(10, 20)]
    cleanup.cache_size = 4096
    cleanup.interval = 1000
    cleanup.last_run = time.time()
    cleanup.cleanup()
    assert len(kept_files(tmp_path)) == 10
    cleanup.set_cache_dir(tmp_path / "none")
    cleanup.interval = None
    cleanup.cleanup()
    cleanup.set_cache_dir(tmp_path)
    with (tmp_path / "000019").open("rb") as held:
        from shardset.files import hold_file

        assert hold_file(held.fileno())
        cleanup.cache_size = 0
        cleanup.cleanup()
        assert kept_files(tmp_path) == ["000019"]
