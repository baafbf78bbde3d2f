from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from shardset.files import open_atomic, write_atomic

posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and limits of POSIX")


def names(folder):
    """All names in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def running(code, *arguments):
    """Run Python code in a process of its own, which is ended with the block."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_new_file_holds_the_bytes_and_stands_alone(tmp_path):
    write_atomic(tmp_path / "index.json", b"new")
    assert (tmp_path / "index.json").read_bytes() == b"new"
    assert names(tmp_path) == ["index.json"]


@pytest.mark.parametrize("data", [b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), b""])
def test_any_buffer_can_be_written(tmp_path, data):
    write_atomic(str(tmp_path / "file"), data)
    assert (tmp_path / "file").read_bytes() == bytes(data)


def test_an_old_file_is_there_until_the_block_ends(tmp_path):
    path = tmp_path / "index.json"
    path.write_bytes(b"old")
    with open_atomic(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["index.json"]


@posix
def test_a_new_file_gets_the_rights_of_any_other_new_file(tmp_path):
    (tmp_path / "plain").touch()
    write_atomic(tmp_path / "atomic", b"")
    plain, atomic = ((tmp_path / name).stat().st_mode for name in ("plain", "atomic"))
    assert stat.S_IMODE(atomic) == stat.S_IMODE(plain)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_leaves_the_old_file_whole(tmp_path, error):
    path = tmp_path / "index.json"
    path.write_bytes(b"old")
    with pytest.raises(error), open_atomic(path) as file:  # noqa: PT012 - the write before the error matters
        file.write(b"half of the new")
        raise error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["index.json"]


def test_a_missing_folder_is_told_and_not_created(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "index.json", b"new")
    assert names(tmp_path) == []


def test_a_folder_in_the_place_of_the_file_stays_and_no_temporary_file_does(tmp_path):
    (tmp_path / "index.json").mkdir()
    with pytest.raises(OSError, match=r"index\.json"):
        write_atomic(tmp_path / "index.json", b"new")
    assert names(tmp_path) == ["index.json"]


@pytest.mark.parametrize("character", ["a", "\N{HIRAGANA LETTER A}", "\N{SLEEPING SYMBOL}"])
def test_a_name_as_long_as_the_system_allows_can_be_written(tmp_path, character):
    name = character * (255 // len(character.encode()))
    write_atomic(tmp_path / name, b"new")
    assert names(tmp_path) == [name]


@posix
def test_a_write_that_the_disk_refuses_half_way_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "index.json"
    path.write_bytes(b"old")
    code = """
import errno, resource, signal, sys
from shardset.files import write_atomic

# The limit makes write(2) itself fail after 64 KiB, as a full disk does, once the signal is ignored.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    write_atomic(sys.argv[1], bytes(1 << 20))
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    with running(code, path) as process:
        assert process.stdout.read() == "EFBIG\n"
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["index.json"]


@posix
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "index.json"
    path.write_bytes(b"old")
    code = """
import sys
from shardset.files import open_atomic

with open_atomic(sys.argv[1]) as file:
    file.write(bytes(1 << 20))
    file.flush()
    print("half", flush=True)
    sys.stdin.read()
"""
    with running(code, path) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    # Nobody was left to remove the temporary file: it is hidden, and in nobody's way.
    [left] = set(names(tmp_path)) - {"index.json"}
    assert left.startswith(".")
    assert left.endswith(".tmp")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.slow
@posix
def test_a_kill_at_any_moment_leaves_one_whole_version(tmp_path):
    path = tmp_path / "index.json"
    code = """
import sys
from shardset.files import write_atomic

version = 0
while True:
    version = version % 255 + 1
    write_atomic(sys.argv[1], bytes([version]) * 300_000)
    if version == 1:
        print("started", flush=True)
"""
    moments = random.Random(11)
    for _ in range(5):
        with running(code, path) as process:
            assert process.stdout.readline() == "started\n"
            time.sleep(moments.uniform(0, 0.05))
            process.kill()
            process.wait(30)
        data = path.read_bytes()
        assert len(data) == 300_000
        assert len(set(data)) == 1


def test_writers_at_the_same_time_leave_one_whole_version_and_readers_see_no_other(tmp_path):
    path = tmp_path / "index.json"
    write_atomic(path, b"\0" * 100_000)

    def write_often(version):
        for _ in range(20):
            write_atomic(path, bytes([version]) * 100_000)

    writers = [threading.Thread(target=write_often, args=(version,)) for version in (1, 2, 3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        data = path.read_bytes()
        assert len(data) == 100_000
        assert len(set(data)) == 1
    for writer in writers:
        writer.join()
    assert names(tmp_path) == ["index.json"]
