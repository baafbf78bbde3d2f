from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from cli.running import environment
from sessions import interrupt_session, start_session, tells_of_interrupt, wait_until_gone
from shardset.files import open_atomic
from shardset.tasks import pool

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal masks")
PROC = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")

PROGRAM = """
import multiprocessing, sys, time
from shardset import processes
from shardset.tasks import pool

if __name__ == "__main__":
    method = sys.argv[1]
    if method != "ours":
        processes._context = lambda preload: multiprocessing.get_context(method)
    print("running", flush=True)
    with pool.task_pool(None, 2, needs_main=method == "fork") as run:
        for _ in run(time.sleep, [0.03] * 60):
            print("did one", flush=True)
"""


def test_how_many_workers_pay():
    assert pool.num_workers(None, 1, pool.SMALL) == 0
    assert pool.num_workers(None, 9, pool.SMALL - 1) == 0
    assert pool.num_workers(None, 9, pool.SMALL) == min(9, os.cpu_count())
    assert pool.num_workers(None, 9, pool.SMALL, most=1) == 1
    assert pool.num_workers(5, 3, 0) == 3
    for wrong in ({"workers": -1}, {"workers": None, "most": -1}):
        with pytest.raises(ValueError, match="-1: it is 0"):
            pool.num_workers(tasks=1, size=1, **wrong)


def test_without_workers_tasks_run_here_and_in_order():
    with pool.task_pool(None, 0) as run:
        assert list(run(lambda task: (task, os.getpid()), [2, 1])) == [(2, os.getpid()), (1, os.getpid())]


def deafness_of_worker(_):
    # Ignored in any case; blocked from its birth on where the fork server was not there before, for another pool.
    is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return is_blocked or signal.getsignal(signal.SIGINT) is signal.SIG_IGN, os.getpid()


@POSIX
def test_workers_never_see_an_interrupt_and_this_thread_does_again():
    with pool.task_pool(None, 1) as run:
        ((is_deaf, process),) = run(deafness_of_worker, [0])
        assert is_deaf
        assert process != os.getpid()
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def write_half(path):
    with open_atomic(path) as file:
        file.write(b"half")
        file.flush()
        time.sleep(60)


def interrupt_at_work(folder):
    with pool.task_pool(None, 1) as run:
        run(write_half, [folder / "index.json"] * 9)
        while not any(folder.iterdir()):
            time.sleep(0.005)
        raise KeyboardInterrupt


@POSIX
def test_a_worker_that_is_stopped_takes_along_what_it_has_half_written(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupt_at_work(tmp_path)
    assert list(tmp_path.iterdir()) == []


@POSIX
@PROC
@pytest.mark.slow
@pytest.mark.parametrize("method", ["ours", "spawn", "fork"])
def test_an_interrupt_at_any_moment_is_told_once_and_leaves_no_process(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    stopped = 0
    for moment in range(8):
        with start_session([sys.executable, script, method], env=environment()) as run:
            assert run.stdout.readline() == "running\n"
            time.sleep(0.08 * moment)
            interrupt_session(run)
            out, err = run.communicate(timeout=60)
        wait_until_gone(run.pid)
        # What comes as the interpreter ends, after the last task, ends it without a word.
        assert not err or tells_of_interrupt(err), err
        assert run.returncode in {-signal.SIGINT, 0, 130}
        assert run.returncode or out.count("did one") == 60
        stopped += bool(err)
    assert stopped >= 4
