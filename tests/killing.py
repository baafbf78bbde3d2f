"""Runs work over and over in forked children, each killed one step later than the one before, until one gets through.

A step is a file opened for writing, renamed, flushed or removed, or a folder made, somewhere below the work's folder;
or the moment at which a file reaches a size. Called as a program, so that nobody forks a process with threads.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from itertools import count
from pathlib import Path

TESTS = Path(__file__).parent


def kill_at_every_step(work, arguments, folders, *, sizes=()):
    """Run ``work(folder, **arguments)`` killed at each of its steps, and then to its end, each time in another folder.

    Args:
        work: ``"module:function"``, importable from tests/.
        arguments: For it; JSON values.
        folders: Where the folders are made, numbered.
        sizes: Also kill it when it writes behind these bytes of any file.

    Returns:
        How many runs were killed.
    """
    program = [sys.executable, __file__, work, json.dumps(arguments), str(folders), json.dumps(list(sizes))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _die_at(step, folder):
    """Kill this process when it takes the given step."""
    steps = count(1)

    def pass_step():
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, args):
        is_step = event in {"os.rename", "os.remove", "os.mkdir"} or (event == "open" and args[2] & os.O_ACCMODE)
        if is_step and str(args[0]).startswith(folder):
            pass_step()

    fsync = os.fsync

    def counted_fsync(handle):
        pass_step()
        fsync(handle)
        pass_step()

    os.fsync = counted_fsync
    sys.addaudithook(hook)


def _die_beyond(size):
    """Kill this process when it writes behind so many bytes of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _in_child(function):
    """Run a function in a forked child, and return its wait status."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:  # noqa: BLE001 - a forked child never goes on as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _main(work, arguments, folders, sizes):
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]
    module, _, name = work.partition(":")
    function = getattr(importlib.import_module(module), name)
    killed = 0

    def attempt(folder, prepare):
        def run():
            prepare()
            function(folder, **arguments)

        status = _in_child(run)
        if os.WIFSIGNALED(status):
            assert _in_child(lambda: function(folder, **arguments)) == 0
        return status

    for size in sizes:
        folder = Path(folders, f"size-{size}")
        status = attempt(folder, lambda size=size: _die_beyond(size))
        assert status == 0 or os.WTERMSIG(status) == signal.SIGXFSZ
        killed += status != 0
    for step in count(1):
        folder = Path(folders, f"step-{step}")
        status = attempt(folder, lambda step=step, folder=folder: _die_at(step, str(folder)))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, f"step {step}: {status}"
        killed += 1
    print(killed)  # noqa: T201 - to the test


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
