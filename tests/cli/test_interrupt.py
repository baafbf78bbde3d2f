from __future__ import annotations

import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from cli.running import environment, program
from sessions import interrupt_session, members_of, start_session, wait_until_gone
from shards import write_dataset

BEFORE = """
import signal, sys

def hook(event, args):
    if event == "import" and args[0] == "click":
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(hook)
from shardset.cli import main
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows raises no interrupts by signals")
def test_an_interrupt_before_the_program_is_loaded_is_one_line():
    command = [sys.executable, "-c", BEFORE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "shardset: interrupted\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("command", ["index", "extract-metadata"])
def test_an_interrupt_while_workers_start_or_work_is_one_line_and_leaves_no_process(tmp_path, command):
    write_dataset(tmp_path / "data", shards=150, samples=40)
    for shard in (tmp_path / "data").iterdir():
        with shard.open("r+b") as file:
            file.truncate(1 << 20)  # zero bytes behind the end, so that it is worth workers
    runs = count()

    def interrupt(processes):
        """Interrupt the command when it has so many processes, or is at work; tell whether it was still there."""
        folder = tmp_path / f"run-{next(runs)}"
        out = folder / "out"
        arguments = {
            "index": [tmp_path / "data", "--destination", out, "--workers", "2"],
            "extract-metadata": ["--source", tmp_path / "data", "--destination", out, "--max-workers", "2"],
        }[command]
        cache = environment(SHARDSET_CACHE=str(folder / "cache"))
        with start_session(program(command, *arguments), env=cache) as run:
            while not any(out.glob("*.json")) if processes is None else len(members_of(run.pid)) < processes:
                if run.poll() is not None:
                    break
                time.sleep(0.001)
            interrupt_session(run)
            printed, err = run.communicate(timeout=60)
        wait_until_gone(run.pid)
        if run.returncode == 0:
            return False
        assert (printed, err) == ("", "shardset: interrupted\n")
        # A shell says 130 of either: the interpreter ends by the signal where it came while code was made of text.
        assert run.returncode in {130, -signal.SIGINT}
        return True

    for processes in (2, 3, 4, 5, None):  # this one, the tracker of locks, what forks the workers, and these; at work
        assert any(interrupt(processes) for _ in range(5))  # on a busy machine the command may be through before
