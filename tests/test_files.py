from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardset import files
from shardset.files import (
    cache_root,
    hold_file,
    is_held,
    is_locked,
    lock_file,
    open_atomic,
    remove_abandoned,
    remove_unheld,
    stands_at,
    write_atomic,
)

LINUX = sys.platform == "linux"
linux = pytest.mark.skipif(not LINUX, reason="only Linux tells containers, and starts of the system, apart")
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
    if LINUX:
        assert names(tmp_path) == ["index.json"]
    else:  # a day later
        os.utime(tmp_path / left, (0, 0))
        assert remove_abandoned(tmp_path) == 1


HALF = """
import os, sys
from shardset.files import open_atomic

with open_atomic(sys.argv[1]) as file:
    file.write(b"half ")
    file.flush()
    print("half", flush=True)
    sys.stdin.readline()
    file.write(b"and whole")
print("done", flush=True)
sys.stdin.read()
"""


def test_what_a_living_process_has_half_written_is_left_alone(tmp_path):
    path = tmp_path / "index.json"
    with running(HALF, path) as process:
        assert process.stdout.readline() == "half\n"
        [half] = names(tmp_path)
        os.utime(tmp_path / half, (0, 0))
        write_atomic(tmp_path / "other", b"")
        assert remove_abandoned(tmp_path) == 0
        assert names(tmp_path) == [half, "other"]
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
    assert path.read_bytes() == b"half and whole"
    assert names(tmp_path) == ["index.json", "other"]


@linux
def test_what_a_child_of_a_dead_process_still_writes_is_left_alone(tmp_path):
    code = """
import os, sys
from shardset.files import make_temporary
from pathlib import Path

temporary, handle = make_temporary(Path(sys.argv[1]))
print(os.getpid(), flush=True)
if os.fork():
    os._exit(0)
sys.stdin.readline()
os.write(handle, b"by the child")
temporary.rename(sys.argv[1])
print("done", flush=True)
"""
    path = tmp_path / "index.json"
    with running(code, path) as process:
        number = int(process.stdout.readline())
        assert process.wait(30) == 0
        [left] = names(tmp_path)
        assert left.startswith(f".{number}-")
        assert remove_abandoned(tmp_path) == 0
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
    assert path.read_bytes() == b"by the child"


@pytest.mark.parametrize("machine", ["0123456789ab", ""])
def test_what_another_machine_has_half_written_is_left_alone_for_a_day(tmp_path, machine):
    half = tmp_path / f".{2**22 + 1}-{machine}-{'a' * 12}.tmp"
    half.write_bytes(b"half")
    os.utime(half, (0, time.time() - 86_000))
    assert remove_abandoned(tmp_path) == 0
    os.utime(half, (0, time.time() - 87_000))
    with half.open("rb") as file:
        if os.name == "posix":
            assert hold_file(file.fileno())
        assert remove_abandoned(tmp_path) == 0
    assert remove_abandoned(tmp_path) == 1
    assert names(tmp_path) == []


@linux
def test_a_process_that_nobody_has_asked_how_it_ended_is_dead(tmp_path):
    with running("") as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / f".{process.pid}-{files._machine()}-{'a' * 12}.tmp").touch()
        assert remove_abandoned(tmp_path) == 1
        assert process.wait() == 0


@linux
def test_a_dead_process_of_this_machine_is_known_by_its_number(tmp_path, caplog):
    with running("import sys; sys.stdin.read()") as process:
        paths = [
            tmp_path / f".{number}-{files._machine()}-{'a' * 12}.tmp"
            for number in (process.pid, os.getpid(), os.getppid(), 1, 10**30)
        ]
        for path in paths:
            path.touch()
        assert remove_abandoned(tmp_path) == 0
    process.wait(30)
    with caplog.at_level("INFO"):
        assert remove_abandoned(str(tmp_path)) == 1
    assert f"removed 1 files that killed processes did not finish, in {tmp_path}" in caplog.text
    assert names(tmp_path) == sorted(path.name for path in paths[1:])


def test_nothing_else_is_taken_for_abandoned(tmp_path):
    machine = files._machine()
    good = f".{2**22 + 1}-0123456789ab-{'a' * 12}.tmp"
    for name in (
        "a.tmp",
        ".a.tmp",
        ".1-2.tmp",
        good[1:],
        f"{good}.tmp",
        f".x{good[1:]}",
        good.upper(),
        f".-{machine}-.tmp",
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / good).mkdir()
    (tmp_path / good.replace("a" * 12, "b" * 12)).symlink_to(tmp_path / "a.tmp")
    before = names(tmp_path)
    assert remove_abandoned(tmp_path) == 0
    assert names(tmp_path) == before
    assert remove_abandoned(tmp_path / "a.tmp") == 0
    assert remove_abandoned(tmp_path / "missing") == 0


def test_a_folder_is_looked_through_once_a_process(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(files, "remove_abandoned", looked.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for path in ("a", tmp_path / "b", "sub/a", "a"):
        write_atomic(path, b"")
    assert looked == [str(tmp_path), str(tmp_path / "sub")]


@posix
def test_where_files_cannot_be_locked_they_are_written_all_the_same_and_stay(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    write_atomic(tmp_path / "file", b"new")
    half = tmp_path / f".{2**22 + 1}-0123456789ab-{'a' * 12}.tmp"
    half.touch()
    os.utime(half, (0, 0))
    assert remove_abandoned(tmp_path) == 0
    assert names(tmp_path) == [half.name, "file"]


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
    if LINUX:
        remove_abandoned(tmp_path)
        assert names(tmp_path) == ["index.json"]


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


# locks


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("SHARDSET_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "shardset"


@pytest.fixture(params=["flock", "msvcrt"])
def locking(request, monkeypatch):
    """Locks as they are here, and as they are on Windows, with its one function made of ours."""
    if request.param == "msvcrt":
        fcntl = pytest.importorskip("fcntl")

        def locking(handle, mode, count):
            assert (mode, count) == (2, 1)
            assert 1 << 30 < os.lseek(handle, 0, os.SEEK_CUR) < 1 << 31
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PermissionError from None

        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    return request.param


@pytest.mark.usefixtures("locking")
def test_a_locked_file_cannot_be_locked_again_until_it_is_released(tmp_path):
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert names(tmp_path) == []
    lock = lock_file(path)
    assert lock_file(path, wait=False) is None
    assert is_locked(path)
    lock.release()
    lock.release()
    assert not is_locked(path)
    with lock_file(path, wait=False) as again:
        assert os.fstat(again.handle).st_size == 0
        assert is_locked(path)
    assert not is_locked(path)
    assert names(tmp_path) == ["lock"]


@pytest.mark.usefixtures("locking")
def test_threads_take_turns(tmp_path):
    inside = []

    def work():
        for _ in range(50):
            with lock_file(tmp_path / "lock"):
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("locking")
def test_a_lock_may_be_removed_with_its_file_and_those_who_wait_get_a_new_one(tmp_path):
    path = tmp_path / "lock"
    for _ in range(100):
        first = lock_file(path)
        waiting = threading.Thread(target=lambda: lock_file(path).release(remove=True))
        waiting.start()
        first.release(remove=True)
        waiting.join()
    assert names(tmp_path) == []


@posix
@pytest.mark.slow
def test_many_processes_that_remove_the_lock_each_time_never_hold_it_together(tmp_path):
    code = """
import os, sys, time
from shardset.files import lock_file

lock, inside = sys.argv[1:]
for _ in range(100):
    held = lock_file(lock)
    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
    time.sleep(0.001)
    os.unlink(inside)
    held.release(remove=True)
print("done", flush=True)
sys.stdin.read()
"""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(running(code, tmp_path / "lock", tmp_path / "inside")) for _ in range(4)]
        for process in processes:
            assert process.stdout.readline() == "done\n"
    assert names(tmp_path) == []


@posix
def test_a_lock_ends_with_its_process_even_where_a_forked_child_lives_on(tmp_path):
    code = """
import os, sys, time
from shardset.files import lock_file

lock = lock_file(sys.argv[1])
child = os.fork()
if not child:
    lock.release(remove=True)  # is not the child's to give
    time.sleep(30)
    os._exit(0)
time.sleep(0.2)
print(child, flush=True)
sys.stdin.read()
"""
    with running(code, tmp_path / "lock") as process:
        child = int(process.stdout.readline())
        assert is_locked(tmp_path / "lock")
        process.kill()
        process.wait(30)
        try:
            assert not is_locked(tmp_path / "lock")
        finally:
            os.kill(child, signal.SIGKILL)


@posix
def test_a_held_file_is_not_removed_as_long_as_a_map_of_it_lives(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    handle = os.open(path, os.O_RDONLY)
    assert not is_held(path)
    assert hold_file(handle)
    view = memoryview(mmap.mmap(handle, 5, access=mmap.ACCESS_READ))[1:]
    os.close(handle)
    assert is_held(path)
    assert not remove_unheld(path)
    other = os.open(path, os.O_RDONLY)
    assert hold_file(other)  # any number may hold it
    os.close(other)
    assert view == b"ytes"
    del view
    assert not is_held(path)
    assert remove_unheld(path)
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        remove_unheld(path)


@posix
def test_a_file_that_is_just_being_removed_cannot_be_held(tmp_path):
    path = tmp_path / "file"
    with lock_file(path):
        handle = os.open(path, os.O_RDONLY)
        assert not hold_file(handle)
        os.close(handle)


def test_where_open_files_cannot_be_removed_that_is_the_hold(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with path.open("rb") as file:
        assert hold_file(file.fileno())

    def refuse(_):
        raise PermissionError("the file is used by another process")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not remove_unheld(path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert remove_unheld(path)


def test_an_open_file_is_told_from_another_of_its_name(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1")
    with path.open("rb") as file:
        assert stands_at(file.fileno(), path)
        write_atomic(path, b"2")
        assert not stands_at(file.fileno(), path)
        path.unlink()
        assert not stands_at(file.fileno(), path)


@posix
def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"), open_atomic(pipe) as file:
        file.write(b"x")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
