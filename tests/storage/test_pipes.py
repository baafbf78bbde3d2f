"""Commands: what they give counts only when they have ended well, and none outlives who reads it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardset.errors import StorageError, TransferError, secrets_in, without_secrets
from shardset.storage.command import _commands
from shardset.storage.pipes import PipeReader, PipeWriter, open_pipe_writer

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(CONTENT)
    return path


def read_all(stream):
    pieces = []
    read_into(stream, pieces)
    assert all(len(piece) <= 1 << 20 for piece in pieces)
    return b"".join(pieces)


def read_into(stream, pieces):
    while piece := stream.read_some():
        pieces.append(bytes(piece))


def handles():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def is_running(process):
    """Tell whether a process still does anything."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(condition, seconds=30):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    return condition()


# Reading


def test_the_output_of_a_command_comes_in_order_and_ends(file):
    stream = PipeReader(f"pipe:cat {file}")
    assert read_all(stream) == CONTENT
    assert stream.read_some() == b""
    stream.close()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.read_some()


def test_nothing_is_started_before_the_first_read(tmp_path):
    stream = PipeReader(f"pipe:touch {tmp_path}/started")
    assert not (tmp_path / "started").exists()
    stream.close()
    assert not (tmp_path / "started").exists()
    assert read_all(PipeReader(f"pipe:touch {tmp_path}/started")) == b""
    assert (tmp_path / "started").exists()


def test_what_is_there_is_given_before_the_rest_has_come():
    with PipeReader("pipe:echo first; sleep 300; echo second") as stream:
        began = time.monotonic()
        assert stream.read_some() == b"first\n"
        assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("command", "status"),
    [("head -c 3000 {}; exit 3", 3), ("cat {}; exit 1", 1), ("cat {}; kill -9 $$", -9), ("cat {} /nope", 1)],
)
def test_output_followed_by_a_failure_is_never_taken_for_whole(file, command, status):
    """Number 6 of the library's known troubles: `pipe:head -c 3000 f; exit 3` gave samples and no error."""
    stream = PipeReader("pipe:" + command.format(file))
    pieces = []
    with pytest.raises(TransferError) as caught:
        read_into(stream, pieces)
    found = b"".join(pieces)
    assert CONTENT.startswith(found)
    assert found
    assert caught.value.status == status
    assert command.format(file) in str(caught.value)
    with pytest.raises(TransferError):  # and not an end, when somebody asks again
        stream.read_some()
    stream.close()


def test_a_part_that_was_stopped_because_nobody_wanted_more_is_no_failure(file):
    assert read_all(PipeReader(f"pipe:cat {file} {file} | head -c 10")) == CONTENT[:10]
    assert read_all(PipeReader("pipe:echo x; exit 141")) == b"x\n"
    assert read_all(PipeReader("pipe:echo x; exit 23", accepts=lambda status: status == 23)) == b"x\n"


def test_a_command_that_does_not_exist_is_an_error():
    with pytest.raises(TransferError, match="not found") as caught:
        read_all(PipeReader("pipe:no_such_command_here"))
    assert caught.value.status == 127
    assert isinstance(caught.value, OSError)


def test_the_last_lines_of_what_it_complains_are_in_the_error_and_bounded(capfd):
    lines = "for i in $(seq 5000); do echo complaint $i >&2; done"
    with pytest.raises(TransferError) as caught:
        read_all(PipeReader(f"pipe:{lines}; exit 2"))
    assert "complaint 4993 /" in str(caught.value)
    assert "complaint 5000" in str(caught.value)
    assert "complaint 4992 " not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert capfd.readouterr().err.count("complaint") == 5000  # all of it is passed on


def test_a_command_that_complains_a_lot_is_not_held_up(file, capfd):
    assert (
        read_all(PipeReader(f"pipe:head -c 3000000 /dev/zero >&2; cat {file}; head -c 300000 /dev/zero >&2")) == CONTENT
    )
    assert len(capfd.readouterr().err) == 3_300_000


def test_what_a_command_leaves_running_does_not_hold_up_its_end():
    began = time.monotonic()
    stream = PipeReader("pipe:echo x; sleep 300 >/dev/null & echo $!")
    first, process = read_all(stream).split()
    assert first == b"x"
    assert time.monotonic() - began < 60
    os.kill(int(process), signal.SIGKILL)


def test_secrets_of_a_command_are_not_shown():
    secret = "--header 'Authorization: Bearer tok3n' https://joe:tok3n@host"
    command = f"pipe:printf 'no access for tok%sn' 3 >&2; : {secret}; exit 1"
    with pytest.raises(TransferError) as caught:
        read_all(PipeReader(command))
    assert "tok3n" not in str(caught.value) + repr(caught.value) + repr(PipeReader(command)) + str(caught.value.url)
    assert "no access for ..." in str(caught.value)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("cat /data/a.tar", "cat /data/a.tar"),
        ("python -u gen.py --seed 3 | gzip", "python -u gen.py --seed 3 | gzip"),
        ("curl -u joe:s3cr3t https://h/a", "curl -u ... https://h/a"),
        ("curl 'https://joe:s3cr3t@h/a?sig=s3cr3t&b=2' | zcat", "curl 'https://h/a?sig=...&b=2' | zcat"),
        ("curl 'https://h/a?X-Amz-Signature=s3cr3t'", "curl 'https://h/a?X-Amz-Signature=...'"),
        ("curl -H 'Authorization: Bearer s3cr3t' h | x", "curl -H 'Authorization: ...' h | x"),
        ('curl -H "X-Api-Key: s3cr3t" h', 'curl -H "X-Api-Key: ..." h'),
        ("AWS_SECRET_ACCESS_KEY=s3cr3t aws s3 cp s3://b/k -", "AWS_SECRET_ACCESS_KEY=... aws s3 cp s3://b/k -"),
        ("wget --password 's3 cr3t' --user=s3cr3t h", "wget --password ... --user=... h"),
        ("get hf_s3cr3ts3cr3t", "get ..."),
        ("x" * 5000, "x" * 995 + "..."),
    ],
)
def test_what_messages_show_of_a_command(command, shown):
    assert without_secrets(f"pipe:{command}") == f"pipe:{shown}"
    assert without_secrets(f"pipe:{shown}") == f"pipe:{shown}"
    assert ("s3cr3t" in "".join(secrets_in(f"pipe:{command}"))) == ("s3cr3t" in command)


def test_a_command_whose_status_would_never_be_known_is_not_started():
    program = (
        "import signal; from shardset.storage.pipes import PipeReader\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "PipeReader('pipe:echo x; exit 3').read_some()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "while SIGCHLD is ignored" in run.stderr


# Abandoning


@pytest.mark.parametrize("how", ["close", "with", "garbage"])
def test_a_command_that_is_abandoned_is_killed_at_once_with_all_that_it_started(file, how):
    """Number 7 of the library's known troubles: `pipe:cat f; sleep 30` blocked who stopped reading it."""
    gc.collect()  # what earlier tests left behind
    before = handles()
    began = time.monotonic()
    stream = PipeReader(f"pipe:cat {file}; (sleep 300; echo x) | cat & sleep 300")
    assert len(stream.read_some())
    command = stream._command
    shell = command.process.pid
    assert os.getpgid(shell) == shell
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    assert time.monotonic() - began < 60
    assert command.process.returncode == -signal.SIGKILL
    assert wait_until(lambda: not group_runs(shell))
    assert wait_until(lambda: handles() <= before)  # what others had open may be gone


def group_runs(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    found = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True, check=False).stdout
    return any(line.strip()[:1] not in "ZX" for line in found.splitlines() if line.strip())


def test_many_streams_that_are_read_leave_no_handles_and_no_children(file):
    before = handles()
    for _ in range(30):
        assert read_all(PipeReader(f"pipe:head -c 100 {file}")) == CONTENT[:100]
    assert wait_until(lambda: handles() <= before)
    assert not list(_commands)


def test_a_thread_that_reads_sees_the_end_when_another_closes():
    stream = PipeReader("pipe:echo x; sleep 300")
    assert stream.read_some() == b"x\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.read_some)
        time.sleep(0.1)
        stream.close()
        assert not waiting.result(10)


def test_a_command_ends_with_the_program_that_forgot_it(tmp_path):
    program = (
        "from shardset.storage.pipes import PipeReader, open_pipe_writer\n"
        "stream = PipeReader('pipe:echo $$; sleep 300')\n"
        "print(bytes(stream.read_some()).decode().strip(), flush=True)\n"
        f"writer = open_pipe_writer('cat > {tmp_path}/part; echo whole > {tmp_path}/whole')\n"
        "writer.write(b'some'); writer.flush()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert wait_until(lambda: not is_running(int(run.stdout)))
    time.sleep(0.1)
    assert not (tmp_path / "whole").exists()


def begin_and_forget(path):
    stream = PipeReader("pipe:echo $$; sleep 300")
    path.write_bytes(stream.read_some())
    forgotten.append(stream)


forgotten = []


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_command_ends_with_the_worker_process_that_forgot_it(tmp_path, method):
    if method != "fork":
        program = (
            "import multiprocessing, pathlib, sys\n"
            "from shardset.storage.pipes import PipeReader\n"
            "kept = []\n"
            "def work(path):\n"
            "    kept.append(PipeReader('pipe:echo $$; sleep 300'))\n"
            "    pathlib.Path(path).write_bytes(kept[0].read_some())\n"
            "if __name__ == '__main__':\n"
            "    child = multiprocessing.get_context('forkserver').Process(target=work, args=(sys.argv[1],))\n"
            "    child.start(); child.join()\n"
        )
        (tmp_path / "program.py").write_text(program)
        subprocess.run([sys.executable, tmp_path / "program.py", tmp_path / "started"], check=True, timeout=60)
    else:
        child = multiprocessing.get_context("fork").Process(target=begin_and_forget, args=(tmp_path / "started",))
        child.start()
        child.join(20)
    assert wait_until(lambda: not is_running(int((tmp_path / "started").read_bytes())))


# Forks


def in_child(work):
    """Run something in a forked child, and return what it raised, as text, or ``"sound"``."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run():
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            theirs.send(f"{type(error).__name__}: {error}")
        else:
            theirs.send("sound")

    child = context.Process(target=run)
    child.start()
    answer = ours.recv() if ours.poll(20) else "nothing"
    child.join(20)
    return answer


def test_a_forked_child_reads_what_its_parent_has_not_begun(file):
    stream = PipeReader(f"pipe:cat {file}")
    assert in_child(lambda: check(read_all(stream) == CONTENT)) == "sound"
    assert read_all(stream) == CONTENT


def check(condition):
    assert condition


def test_a_forked_child_neither_reads_on_nor_ends_what_its_parent_has_begun(file):
    with PipeReader(f"pipe:cat {file}; sleep 0.5; echo end") as stream:
        first = bytes(stream.read_some())
        assert "started by another process" in in_child(stream.read_some)
        assert in_child(stream.close) == "sound"
        assert first + read_all(stream) == CONTENT + b"end\n"


def test_a_forked_child_does_not_keep_a_command_from_seeing_its_end(tmp_path):
    with open_pipe_writer(f"cat > {tmp_path}/out") as writer:
        writer.write(b"some")
        writer.flush()
        child = os.fork()
        if not child:
            time.sleep(120)
            os._exit(0)
        began = time.monotonic()
    assert time.monotonic() - began < 60
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "out").read_bytes() == b"some"


# Writing


def test_what_is_written_goes_to_the_command(tmp_path):
    with open_pipe_writer(f"cat > {tmp_path}/out") as writer:
        assert writer.writable()
        for size in (1, 0, 1000, 300_000, 3_000_000):
            assert writer.write(memoryview(CONTENT * 3)[:size]) == size
        writer.flush()
    sizes = (1, 0, 1000, 300_000, 3_000_000)
    assert (tmp_path / "out").read_bytes() == b"".join((CONTENT * 3)[:size] for size in sizes)
    assert writer.closed
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"x")


def test_a_command_that_is_given_nothing_runs_all_the_same(tmp_path):
    open_pipe_writer(f"pipe:cat > {tmp_path}/out").close()
    assert (tmp_path / "out").read_bytes() == b""


def test_a_command_that_fails_to_write_is_an_error_when_the_file_is_closed():
    writer = open_pipe_writer("cat > /dev/null; echo 'disk full' >&2; exit 4")
    writer.write(b"some")
    with pytest.raises(TransferError, match="disk full") as caught:
        writer.close()
    assert caught.value.status == 4
    assert writer.closed


def test_a_command_that_ends_before_all_is_written_is_an_error():
    writer = open_pipe_writer("head -c 10 > /dev/null; echo enough >&2")
    with pytest.raises(TransferError, match="before it took all"):
        writer.writelines([bytes(1 << 20)] * 100)
    assert writer.closed


def test_a_command_that_complains_while_it_is_written_to_is_not_held_up(tmp_path, capfd):
    with open_pipe_writer(f"head -c 3000000 /dev/zero >&2; cat > {tmp_path}/out") as writer:
        writer.write(bytes(3_000_000))
    assert (tmp_path / "out").stat().st_size == 3_000_000
    assert len(capfd.readouterr().err) == 3_000_000


@pytest.mark.parametrize("how", ["raise", "garbage"])
def test_a_command_whose_writer_fails_is_killed_and_does_not_take_a_part_for_the_whole(tmp_path, how):
    def write():
        with open_pipe_writer(f"cat > /dev/null; touch {tmp_path}/whole") as writer:
            writer.write(b"some")
            writer.flush()
            raise KeyError("mine")

    if how == "raise":
        with pytest.raises(KeyError, match="mine"):
            write()
    else:
        writer = PipeWriter(f"pipe:cat > /dev/null; touch {tmp_path}/whole")
        writer.write(b"some")
        writer.flush()
        del writer
        gc.collect()
    time.sleep(0.2)
    assert not (tmp_path / "whole").exists()


def test_an_interrupt_ends_the_wait_for_a_command():
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    stream = PipeReader("pipe:sleep 300")

    def read():
        timer.start()  # here, where the interrupt is waited for
        stream.read_some()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), stream:
        read()
    timer.join()
    assert time.monotonic() - began < 60
    assert stream._command.process.returncode == -signal.SIGKILL


def test_a_command_that_cannot_be_started_is_a_storage_error():
    with pytest.raises(StorageError, match="cannot be started"):
        PipeReader("pipe:" + "x" * 4_000_000).read_some()
    assert not list(_commands)
