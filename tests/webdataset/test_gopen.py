"""`gopen` and its module: real files over urls and commands, and errors where webdataset's readers saw an end."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from servers.faulty import FaultServer
from shardset.errors import NotFoundError, TransferError
from shardset.storage import MemoryStore
from shardset.webdataset import gopen as package_gopen
from shardset.webdataset import utils
from shardset.webdataset.gopen import (
    Pipe,
    gopen,
    gopen_curl,
    gopen_error,
    gopen_hf,
    gopen_htgs,
    gopen_schemes,
    gopen_store,
    reader,
    rewrite_url,
    set_options,
    user_openers,
)

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def secure(monkeypatch):
    monkeypatch.setattr(utils, "enforce_security", True)


@pytest.fixture
def server():
    with FaultServer({"/a.tar": CONTENT}) as server:
        yield server


def write_and_fail(opened):
    with opened as stream:
        stream.write(b"some")
        raise KeyError


def test_the_package_has_the_function_under_the_name_of_the_module():
    assert package_gopen is gopen


def test_files_and_commands_are_written_and_read_as_files(tmp_path):
    for to, back in ((f"{tmp_path}/1", f"{tmp_path}/1"), (f"pipe:cat > {tmp_path}/2", f"pipe:cat {tmp_path}/2")):
        with gopen(to, "wb") as stream:
            assert stream.writable()
            stream.write(b"abc")
        with gopen(back, "rb") as stream:
            assert stream.readable()
            assert stream.read() == b"abc"
            assert stream.read() == b""


def test_every_kind_of_url_gives_a_whole_binary_file(file, server):
    for url in (str(file), file, f"file:{file}", file.as_uri(), f"pipe:cat {file}", f"{server.url}a.tar"):
        with gopen(url) as stream:
            assert isinstance(stream, io.IOBase)
            assert stream.read(3) == CONTENT[:3]
            assert stream.read(200_000) == CONTENT[3:200_003]
            assert stream.readline() == CONTENT[200_003 : CONTENT.index(b"\n", 200_003) + 1]
            stream.read()
        assert stream.closed
        with reader(url) as stream:
            assert stream.read() == CONTENT


def test_a_tar_can_be_read_from_it(tmp_path, server):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(__file__, "test.py")
    server.put("/x.tar", (tmp_path / "x.tar").read_bytes())
    for url in (f"pipe:cat {tmp_path}/x.tar", f"{server.url}x.tar"):
        with gopen(url) as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            assert tar.next().name == "test.py"


def test_standard_input_and_output_are_files():
    program = "from shardset.webdataset import gopen\nwith gopen('-', 'wb') as out: out.write(gopen('-').read()[::-1])"
    run = subprocess.run([sys.executable, "-c", program], input=b"some", capture_output=True, check=True)
    assert run.stdout == b"emos"


def test_other_modes_and_unknown_schemes_are_refused(file):
    for mode in ("r", "w", "ab", "rb+"):
        with pytest.raises(ValueError, match="modes are"):
            gopen(str(file), mode)
    with pytest.raises(ValueError, match="no store"), gopen("nosuch://host/a.tar") as stream:
        stream.read()
    with pytest.raises(ValueError, match="no gopen handler"):
        gopen_error("nosuch://joe:s3cr3t@host/a.tar")
    with pytest.raises(FileNotFoundError):
        gopen("/no/such/file.tar")
    with pytest.raises(ValueError, match="read only"):
        gopen("http://127.0.0.1:1/a.tar", "wb")
    for opener in (gopen_hf, gopen_htgs):
        with pytest.raises(ValueError, match="read only"):
            opener("hf://a/b", "wb")


def test_nothing_that_is_not_there_is_an_empty_file(server):
    with pytest.raises(NotFoundError), gopen(f"{server.url}none.tar") as stream:
        stream.read(1)


# Commands


@pytest.mark.parametrize("command", ["head -c 3000 {}; exit 3", "cat {}; exit 3", "exit 3"])
def test_a_command_that_fails_raises_where_its_output_ends(file, command):
    stream = gopen("pipe:" + command.format(file))
    with pytest.raises(TransferError, match="status 3"):
        stream.read()
    with pytest.raises(OSError, match="status 3"):
        stream.read(1)
    with pytest.raises(TransferError):
        stream.close()
    assert stream.closed
    assert stream.status == 3


def test_a_command_that_has_failed_raises_when_it_is_closed_before_its_end(file):
    stream = gopen(f"pipe:cat {file}; exit 3")
    assert stream.read(10) == CONTENT[:10]
    with pytest.raises(TransferError, match="status 3"):
        stream.close()


@pytest.mark.parametrize("how", ["close", "with", "garbage"])
def test_a_command_that_still_runs_is_killed_and_nobody_waits(file, how):
    stream = gopen(f"pipe:cat {file}; sleep 300")
    assert stream.read(10) == CONTENT[:10]
    process = stream._source._command.process
    began = time.monotonic()
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    assert time.monotonic() - began < 60
    assert process.returncode == -signal.SIGKILL


def test_statuses_can_be_ignored(file):
    with Pipe(f"cat {file}; exit 3", mode="rb", ignore_status=[3], shell=True, bufsize=8192) as stream:
        assert stream.read() == CONTENT
    stream = gopen(f"pipe:cat {file}; exit 3")
    assert set_options(stream, ignore_errors=True, timeout=5, ignore_status=[1])
    assert (stream.ignore_errors, stream.timeout, stream.ignore_status) == (True, 5, [1])
    assert stream.read() == CONTENT
    stream.close()
    with Pipe(["sh", "-c", "cat > /dev/null; exit 3"], mode="wb", ignore_status=[3]) as stream:
        stream.write(b"x")
    with file.open("rb") as plain:
        assert not set_options(plain, timeout=1)
    with pytest.raises(ValueError, match="handler"):
        set_options(stream, handler=print)
    with pytest.raises(TypeError, match="env"):
        Pipe("true", mode="rb", env={})
    with pytest.raises(ValueError, match="modes are"):
        Pipe("true", mode="x")


def test_words_of_a_command_are_not_split_again(tmp_path):
    (tmp_path / "a b; c").write_bytes(b"some")
    with Pipe(["cat", str(tmp_path / "a b; c")]) as stream:
        assert stream.read1(100) == b"some"
        assert not stream.writable()
        with pytest.raises(io.UnsupportedOperation):
            stream.write(b"x")


def test_a_command_that_fails_to_write_raises_when_it_is_closed():
    stream = gopen("pipe:cat > /dev/null; exit 4", "wb")
    stream.write(b"some")
    stream.flush()
    with pytest.raises(TransferError, match="status 4"):
        stream.close()
    stream = Pipe("sleep 300", mode="wb", timeout=0.1)
    began = time.monotonic()
    with pytest.raises(TransferError, match="did not end within"):
        stream.close()
    assert time.monotonic() - began < 60
    with pytest.raises(io.UnsupportedOperation):
        Pipe("cat > /dev/null", mode="wb").read()


def test_a_block_that_raises_kills_the_command_it_writes_to(tmp_path):
    with pytest.raises(KeyError):
        write_and_fail(gopen(f"pipe:cat > /dev/null; touch {tmp_path}/whole", "wb"))
    time.sleep(0.1)
    assert not list(tmp_path.iterdir())


# Stores


def test_objects_are_written_as_a_whole_or_not_at_all():
    store = MemoryStore()
    with gopen_store("memory://b/a.tar", "wb", store=store) as stream:
        assert stream.write(b"some") == 4
        with pytest.raises(FileNotFoundError):
            store.info("memory://b/a.tar")
    assert store.read("memory://b/a.tar", 0, 4) == b"some"
    with pytest.raises(KeyError):
        write_and_fail(gopen_store("memory://b/b.tar", "wb", store=store))
    stream = gopen_store("memory://b/c.tar", "wb", store=store)
    stream.write(b"some")
    del stream
    gc.collect()
    assert [info.url for info in store.list("memory://b")] == ["memory://b/a.tar"]
    with gopen_store("memory://b/a.tar", store=store) as stream:
        assert stream.read() == b"some"


def test_no_password_comes_onto_a_command_line():
    with pytest.raises(ValueError, match="netrc") as caught:
        gopen("sftp://joe:s3cr3t@host/a.tar")
    assert "s3cr3t" not in str(caught.value)
    stream = gopen_curl("sftp://joe@127.0.0.1:1/a.tar")
    with pytest.raises(TransferError):
        stream.read()


# Schemes, rewriting, settings


def test_schemes_of_ones_own_are_opened_by_ones_own_functions(monkeypatch):
    def opener(url, mode, bufsize, **kw):
        return io.BytesIO(f"{url} {mode} {bufsize} {kw}".encode())

    assert "mine" not in user_openers()
    monkeypatch.setitem(gopen_schemes, "mine", opener)
    monkeypatch.setitem(gopen_schemes, "http", opener)
    assert gopen("mine:x", "rb", 5, a=1).read() == b"mine:x rb 5 {'a': 1}"
    assert gopen("MINE://x").read() == b"MINE://x rb 8192 {}"
    assert gopen("http://host/x").read() == b"http://host/x rb 8192 {}"
    assert {scheme for scheme, function in user_openers().items() if function is opener} == {"mine", "http"}
    assert {"s3", "https", "gs", "hf", "pipe"}.isdisjoint(user_openers())
    monkeypatch.setitem(gopen_schemes, "__default__", opener)
    assert gopen("other://x").read() == b"other://x rb 8192 {}"


def test_urls_are_rewritten_by_the_first_rule_that_fits(monkeypatch, file, capfd):
    assert rewrite_url("s3://bucket/a.tar") == "s3://bucket/a.tar"
    monkeypatch.setenv("GOPEN_REWRITE", f"gs://none=x;s3://bucket/={file.parent}/;s3://=http://127.0.0.1:1/")
    monkeypatch.setenv("GOPEN_VERBOSE", "1")
    assert rewrite_url("s3://bucket/a.tar") == str(file)
    assert rewrite_url("s3://other/s3://bucket/x") == "http://127.0.0.1:1/other/s3://bucket/x"
    with gopen("s3://bucket/a.tar") as stream:
        assert stream.read() == CONTENT
    assert "gopen: open s3://bucket/a.tar" in capfd.readouterr().err
    monkeypatch.setenv("GOPEN_REWRITE", "nonsense")
    with pytest.raises(ValueError, match="not old=new"):
        rewrite_url("x")


def test_aistore_takes_the_schemes_that_it_is_told(monkeypatch, tmp_path):
    program = tmp_path / "ais"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gopen("ais://bucket/a.tar").read() == b"get ais://bucket/a.tar -\n"
    monkeypatch.setenv("USE_AIS_FOR", "gs:s3")
    assert gopen("s3://bucket/a.tar").read() == b"get s3://bucket/a.tar -\n"
    assert user_openers()["gs"] is gopen_schemes["ais"]


def test_the_buffer_of_local_files_can_be_set(monkeypatch, file):
    monkeypatch.setenv("GOPEN_BUFFER", "0")
    with gopen(str(file)) as stream:
        assert isinstance(stream, io.RawIOBase)


@pytest.mark.usefixtures("secure")
def test_where_security_is_enforced_neither_files_nor_commands_are_opened(monkeypatch, file):
    for url in (str(file), f"file:{file}", file.as_uri()):
        with pytest.raises(ValueError, match="gopen: unsafe_gopen is False, cannot open local files"):
            gopen(url)
    with pytest.raises(ValueError, match="gopen_pipe: unsafe_gopen is False, cannot open pipe URLs"):
        gopen(f"pipe:cat {file}")
    monkeypatch.setenv("GOPEN_REWRITE", "a=b")
    with pytest.raises(ValueError, match="rewrite_url: unsafe_gopen is False"):
        gopen("http://127.0.0.1:1/a.tar")
    monkeypatch.delenv("GOPEN_REWRITE")
    gopen("http://127.0.0.1:1/a.tar").close()
