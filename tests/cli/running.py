"""Runs the command line for tests: in this process, in one of its own, and at a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PHOTOS = ROOT / "tests" / "data" / "webshart" / "photos-00000.tar"

HOSTILE = [
    ("\x1b[31mred.txt", b"\x1b[2J"),
    ("\u202egnp.exe.jpg", b"\xff\xd8\xff"),
    ("bad\udcff.txt", b"x"),
    ("[bold]a[/bold].txt", b"markup"),
    ("tab\tnewline\n.txt", b"x"),
    ("README", b"of no sample"),
    ("caf\udce9", b"of no sample, and not UTF-8"),
    ("宽字符.txt", "标题".encode()),
    ("twice.jpg", b"first"),
    ("twice.jpg", b"second"),
    ("apart.txt", b"1"),
    ("between.txt", b"2"),
    ("apart.jpg", b"3"),
]


class Done(NamedTuple):
    """What a run of the program came to."""

    code: int
    out: bytes
    err: str

    @property
    def text(self):
        """What it printed to standard output."""
        return self.out.decode()

    @property
    def lines(self):
        """The lines that it printed, cut at tabs."""
        return [line.split("\t") for line in self.text.splitlines()]

    @property
    def document(self):
        """The one JSON object that it printed."""
        return json.loads(self.out)

    @property
    def documents(self):
        """The JSON objects that it printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


def program(*args):
    """Return the command line that runs the program in a process of its own."""
    return [sys.executable, "-m", "shardset", *map(str, args)]


def environment(**more):
    """Return the environment for such a process."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def run_process(*args, **more):
    """Run the program in a process of its own, with its output into pipes."""
    done = subprocess.run(program(*args), capture_output=True, timeout=120, check=False, env=environment(**more))
    return Done(done.returncode, done.stdout, done.stderr.decode())


def run_at_terminal(*args, columns=100, **more):
    """Run the program at a terminal, and return its exit code and everything that the terminal was sent."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    settings = {"COLUMNS": str(columns), "TERM": "xterm-256color", **more}
    with subprocess.Popen(
        program(*args), stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**settings)
    ) as run:
        os.close(theirs)
        shown = bytearray()
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says so when the other side is gone
                break
            if not piece:
                break
            shown += piece
        code = run.wait(60)
    os.close(ours)
    return code, shown.decode()
