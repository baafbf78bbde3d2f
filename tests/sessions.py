"""Programs in sessions of their own, interrupted as a terminal does it, and whatever they leave running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path


def start_session(command, **settings):
    """Start a program in a session of its own, with its output into pipes."""
    return subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **settings,
    )


def interrupt_session(run):
    """Send Ctrl-C to all processes of a session, unless they have ended."""
    try:
        os.killpg(run.pid, signal.SIGINT)
    except ProcessLookupError:
        assert run.poll() is not None


def tells_of_interrupt(err):
    """Tell whether a program that ended by an interrupt said so once and nothing else: one process, in one traceback.

    What it was just handling when the interrupt came is told before, as Python does.
    """
    handled = err.count("During handling of the above exception, another exception occurred")
    told = re.findall(r"^KeyboardInterrupt$", err, re.MULTILINE)
    return len(told) == 1 == err.count("Traceback") - handled and err.endswith("KeyboardInterrupt\n")


def members_of(session):
    """Return the processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(sid) == session and state != "Z":
            found.append(path)
    return found


def wait_until_gone(session):
    """Wait until no process of a session is left."""
    deadline = time.monotonic() + 60
    while members_of(session):
        assert time.monotonic() < deadline, "worker processes outlive their parent"
        time.sleep(0.02)
