"""Streams: the same bytes in the same order from wherever they come, and an error where they do not all come."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from servers.faulty import Fault, FaultProcess, FaultServer
from shardset.errors import ChangedError, NotFoundError, StorageError, TransferError
from shardset.storage import HttpStore, LocalStore, MemoryStore, Retry
from shardset.storage.streams import StreamFile, is_stream, iter_pieces, open_stream

CONTENT = b"".join(number.to_bytes(4, "big") for number in range(2_500_000))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams") / "a.tar"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def server():
    with FaultServer() as server:
        server.put("/a.tar", CONTENT)
        yield server


def read_all(stream):
    return b"".join(map(bytes, iter_pieces(stream)))


def count_bytes(stream):
    return sum(map(len, iter(stream.read_some, b"")))


def handles():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_every_kind_of_place_gives_the_same_bytes(file, server):
    store = MemoryStore()
    store.write("memory://b/a.tar", CONTENT)
    sources = [
        (str(file), None),
        (file, None),
        (file.as_uri(), None),
        (f"file:{file}", None),
        (f"pipe:cat {file}", None),
        (f"pipe: cat {file}", None),
        ("memory://b/a.tar", store),
        (f"{server.url}a.tar", None),
        (f"{server.url}a.tar", HttpStore()),
        (str(file), LocalStore(mmap=False)),
        (io.BytesIO(CONTENT), None),
        (file.open("rb"), None),
        (file.open("rb", buffering=0), None),
    ]
    for source, store_of_it in sources:
        stream = open_stream(source, store=store_of_it)
        found = []
        while piece := stream.read_some():
            assert len(piece) <= 4 << 20
            found.append(bytes(piece))
        assert b"".join(found) == CONTENT, source
        assert stream.read_some() == b""
        stream.close()
        stream.close()
        with pytest.raises(ValueError, match="closed"):
            stream.read_some()
        if isinstance(source, io.IOBase):
            assert not source.closed  # it is the caller's
            source.close()


def test_nothing_is_opened_before_the_first_read(tmp_path):
    before, threads = handles(), {*threading.enumerate()}
    streams = [open_stream(source) for source in (f"{tmp_path}/none", "http://127.0.0.1:1/a", "pipe:sleep 9", "-")]
    assert handles() <= before  # those of other tests may end meanwhile
    assert {*threading.enumerate()} <= threads
    with pytest.raises(NotFoundError):
        streams[0].read_some()
    for stream in streams:
        stream.close()


def test_standard_input_is_read_and_left_open(file):
    program = (
        "import sys; from shardset.storage.streams import open_stream\n"
        "stream = open_stream('-'); total = 0\n"
        "while piece := stream.read_some(): total += len(piece)\n"
        "stream.close(); print(total, stream.url, sys.stdin.closed)"
    )
    with file.open("rb") as standard_input:
        run = subprocess.run([sys.executable, "-c", program], stdin=standard_input, capture_output=True, check=True)
    assert run.stdout.split() == [str(len(CONTENT)).encode(), b"-", b"False"]


def test_a_named_pipe_is_read_as_a_stream(tmp_path, file):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    assert is_stream(str(path))
    with subprocess.Popen(["sh", "-c", f"cat {file} > {path}"]):
        assert read_all(open_stream(path)) == CONTENT


def test_what_can_only_be_read_in_order_is_told(file):
    openers = {"mine": open}
    for url in ("-", "pipe:cat x", "mine:x", "mine://x/y", "MINE:x"):
        assert is_stream(url, openers)
    for url in (str(file), file.as_uri(), "http://host/a", "s3://bucket/a", "C:/a.tar", "/no/such/file", "other:x"):
        assert not is_stream(url, openers)


def test_openers_serve_schemes_of_ones_own_and_take_the_place_of_ours(file):
    opened = []

    def opener(url, mode, bufsize):
        opened.append((url, mode, bufsize))
        return io.BytesIO(url.encode())

    openers = {"mine": opener, "http": opener}
    for url in ("mine:some/where", "mine://some/where", "http://host/a"):
        stream = open_stream(url, openers=openers)
        assert len(opened) == 0 or opened[-1][0] != url
        assert read_all(stream) == url.encode()
        assert opened[-1] == (url, "rb", 8192)
    assert read_all(open_stream(str(file), openers=openers)) == CONTENT


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_what_an_opener_opened_is_closed(how):
    kept = io.BytesIO(b"some")
    stream = open_stream("mine:x", openers={"mine": lambda *_: kept})
    stream.read_some()
    if how == "close":
        stream.close()
    else:
        del stream
        gc.collect()
    assert kept.closed


def test_what_is_no_place_of_bytes_is_refused():
    for source in (7, None, b"a.tar", ["a.tar"]):
        with pytest.raises(TypeError):
            open_stream(source)
    with pytest.raises(TypeError, match="binary mode"):
        open_stream(io.StringIO("text")).read_some()
    with pytest.raises(ValueError, match="ahead"):
        open_stream("a.tar", ahead=0)


def test_a_file_that_does_not_wait_is_an_error_and_no_end():
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    with os.fdopen(ours, "rb", buffering=0) as file, pytest.raises(StorageError, match="non-blocking"):
        open_stream(file).read_some()
    os.close(theirs)


# Elsewhere


def test_several_ranges_of_a_remote_object_are_asked_for_at_once(server):
    server.put("/large", CONTENT * 4)
    with open_stream(f"{server.url}large", ahead=16 << 20) as stream:
        assert stream.read_some() == CONTENT[: 4 << 20]
        deadline = time.monotonic() + 30
        while len(server.requests("GET")) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    asked = server.requests("GET")
    assert 2 <= len(asked) <= 5
    assert all(request.headers.get("range") for request in asked)


def test_a_server_without_ranges_is_read_by_one_answer(server):
    server.add(Fault.ignore_range(), path="/a.tar")
    assert read_all(open_stream(f"{server.url}a.tar")) == CONTENT
    with open_stream(f"{server.url}a.tar") as stream:  # and what is abandoned ends
        assert stream.read_some()
    limit = time.monotonic() + 60
    while any(thread.name == "shardset-stream" for thread in threading.enumerate()) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not any(thread.name == "shardset-stream" for thread in threading.enumerate())


def test_what_goes_wrong_in_one_long_answer_is_an_error(server):
    server.put("/large", CONTENT * 8)
    server.add(Fault.ignore_range(), path="/large")
    store = HttpStore(retry=Retry(attempts=2, first_wait=0.01))
    with open_stream(f"{server.url}large", store=store) as stream:
        assert stream.read_some()
        server.down()
        for _ in range(2):
            with pytest.raises(TransferError):
                count_bytes(stream)


def test_a_transfer_that_breaks_off_goes_on_where_it_was(server):
    server.add(Fault.truncate(after=100_000), path="/a.tar", times=3)
    assert read_all(open_stream(f"{server.url}a.tar")) == CONTENT


def test_an_object_that_changes_meanwhile_is_an_error_and_stays_one(server):
    with open_stream(f"{server.url}a.tar", ahead=1 << 20) as stream:
        assert stream.read_some()
        server.put("/a.tar", CONTENT[::-1])
        with pytest.raises(ChangedError):
            count_bytes(stream)
        with pytest.raises(ChangedError):  # and not an end, when somebody asks again
            stream.read_some()


def test_a_file_that_is_cut_meanwhile_is_an_error(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(CONTENT)
    with open_stream(path) as stream:
        assert stream.read_some()
        os.truncate(path, 2_000_000)
        with pytest.raises(ChangedError):
            read_all(stream)


def test_secrets_of_a_url_are_not_shown(server):
    url = server.url.replace("://", "://joe:s3cr3t@") + "none.tar?token=s3cr3t"
    with pytest.raises(StorageError) as caught, open_stream(url) as stream:
        stream.read_some()
    assert "s3cr3t" not in str(caught.value) + repr(StreamFile(stream))


def child_reads(stream, first, results):
    results.put(first + b"".join(map(bytes, iter_pieces(stream))) == CONTENT)


def test_a_forked_child_goes_on_with_a_stream_of_its_parent():
    with FaultProcess({"/a.tar": CONTENT}) as server:
        check_forked_child(f"{server.url}a.tar")


def check_forked_child(url):
    for begun in (False, True):
        stream = open_stream(url, ahead=8 << 20)
        first = bytes(stream.read_some()) if begun else b""
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=partial(child_reads, stream, first, results))
        child.start()
        assert results.get(timeout=30)
        child.join()
        assert first + read_all(stream) == CONTENT


# As files


def test_a_stream_can_be_read_as_a_file(file):
    with io.BufferedReader(StreamFile(open_stream(f"pipe:cat {file}")), 4096) as opened:
        assert opened.readable()
        assert not opened.seekable()
        assert opened.read(3) == CONTENT[:3]
        assert opened.read(5_000_000) == CONTENT[3:5_000_003]
        assert opened.read() == CONTENT[5_000_003:]
        assert opened.read(1) == b""
    with pytest.raises(ValueError, match="closed"):
        opened.raw.readinto(bytearray(3))


def test_a_file_over_a_command_that_failed_raises_at_its_end(file):
    with StreamFile(open_stream(f"pipe:head -c 3000 {file}; exit 3")) as opened:
        assert opened.read(3000) == CONTENT[:3000]
        with pytest.raises(TransferError, match="status 3"):
            opened.read(1)


def test_pieces_end_with_their_stream(file):
    stream = open_stream(f"pipe:cat {file}; sleep 300")
    pieces = iter_pieces(stream)
    next(pieces)
    pieces.close()
    assert stream._command.process.returncode is not None
