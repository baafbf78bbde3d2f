"""A command of the shell that runs, the ends of its pipes that are ours, and how it ends.

A command runs in a session of its own, so that it can be killed with all that it started, and gets the environment, the
working folder and (where it is read) the standard input of this process. What it writes to its standard error is passed
on, and its last lines stand in the error if it fails. A forked child closes its copies of the ends at once: or the
command would not see when its parent has closed them.

Windows has no way to wait for two pipes at once: there, standard error goes where this process's goes, and no error
quotes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import Final
from weakref import WeakSet

from shardset.errors import StorageError, TransferError, secrets_in

PREFIX: Final = "pipe:"

PIECE: Final = 1 << 20
BLOCKING_PIECE: Final = 64 << 10
_TAIL: Final = 4096
_LINES: Final = 8
_LOOK: Final = 50  # ms
_KILLED_WITHIN: Final = 2.0
_SIGPIPE: Final = 13
# A part of the command that was stopped because another part wanted no more of what it gave: as the shell tells it, and
# as a shell that became the command does.
ENOUGH: Final = frozenset({128 + _SIGPIPE, -_SIGPIPE})
CAN_WAIT: Final = hasattr(select, "poll")
READABLE: Final = getattr(select, "POLLIN", 0)
WRITABLE: Final = getattr(select, "POLLOUT", 0)


class Command:
    """A command that runs, with the ends of its pipes that are ours."""

    __slots__ = ("__weakref__", "owner", "pipe", "process", "stderr", "tail", "theirs", "url")

    def __init__(self, url: str, *, is_read: bool) -> None:
        if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            what = "whether a command ends well cannot be known while SIGCHLD is ignored"
            raise StorageError(what, url=url, hint="signal.signal(signal.SIGCHLD, signal.SIG_DFL)")
        self.url = url
        self.owner = os.getpid()
        self.tail = b""
        self.pipe = self.stderr = -1
        _watch_process()
        _commands.add(self)  # first: a fork at any moment must not leave a child with an end
        self.theirs: list[int] = []
        try:
            ours, other = os.pipe()
            self.pipe, end = (ours, other) if is_read else (other, ours)
            self.theirs.append(end)
            if CAN_WAIT:
                self.stderr, end = os.pipe()
                self.theirs.append(end)
                os.set_blocking(self.pipe, False)
                os.set_blocking(self.stderr, False)
                _widen(self.pipe)
            self.process = subprocess.Popen(  # noqa: S602 - a shell is what such a url asks for
                url.removeprefix(PREFIX),
                shell=True,
                stdin=None if is_read else self.theirs[0],
                stdout=self.theirs[0] if is_read else None,
                stderr=self.theirs[1] if CAN_WAIT else None,
                start_new_session=True,
            )
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StorageError(f"the command cannot be started: {error.strerror}", url=url) from error
            raise
        finally:
            self.close_theirs()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that started it."""
        return self.owner == os.getpid()

    def wait_for(self, wanted: int) -> None:
        """Wait until the pipe gives or takes something, or its other end is closed, and pass on what it complains."""
        poll = select.poll()
        poll.register(self.pipe, wanted)
        if self.stderr >= 0:
            poll.register(self.stderr, READABLE)
        for handle, _ in poll.poll():
            if handle == self.stderr:
                self.listen()

    def has_something(self, within: float) -> bool:
        """Tell whether the pipe has something to be read, or has come to its end, before so many seconds are over."""
        if not CAN_WAIT or within < 0:
            return False
        poll = select.poll()
        poll.register(self.pipe, READABLE)
        return bool(poll.poll(within * 1000))

    def listen(self) -> None:
        """Take what it has written to its standard error, without waiting."""
        while self.stderr >= 0:
            try:
                said = os.read(self.stderr, BLOCKING_PIECE)
            except BlockingIOError:
                return
            if not said:
                os.close(self.stderr)
                self.stderr = -1
                return
            self.tail = (self.tail + said)[-_TAIL:]
            with contextlib.suppress(Exception):  # wherever it goes may be closed, or full
                sys.stderr.write(said.decode(errors="replace"))
                sys.stderr.flush()

    def wait(self, limit: float | None = None) -> int | None:
        """Wait until it ends; return its status, or None if it has not by `limit`, a time of `time.monotonic`."""
        while self.process.poll() is None:
            if limit is not None and time.monotonic() > limit:
                return None
            if self.stderr >= 0:
                poll = select.poll()
                poll.register(self.stderr, READABLE)
                poll.poll(_LOOK)  # something that it left behind may hold it open for ever
                self.listen()
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_LOOK / 1000)
        self.listen()
        return self.process.returncode

    def failure(self, status: int, what: str) -> TransferError:
        """Return the error that says with what status it ended, and its last words."""
        said = f"status {status}" if status >= 0 else f"signal {-status}"
        return TransferError(f"{what} ({said}){self.last_words()}", status=status, url=self.url)

    def last_words(self) -> str:
        """Return the last lines of its standard error, as a phrase to put after a message."""
        text = self.tail.decode(errors="replace").replace("\r", "\n")
        for secret in sorted(secrets_in(self.url), key=len, reverse=True):
            text = text.replace(secret, "...")
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_LINES:]
        return f", and said: {' / '.join(lines)}" if lines else ""

    def kill(self) -> None:
        """End it and all that it started, unless it has ended and been asked for its status."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def abandon(self) -> None:
        """End it at once, and let go of all that it holds here."""
        if not self.is_ours:
            return  # its ends were closed at the fork, and it is its parent's to end
        self.kill()
        self.listen()
        self.close()
        # It is dead as soon as the system has a moment, unless it hangs in a device.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILLED_WITHIN)

    def close_pipe(self) -> None:
        """Close our end of the pipe."""
        pipe, self.pipe = self.pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def close_theirs(self) -> None:
        """Close the ends that the command has."""
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        """Close all ends that are ours."""
        self.close_pipe()
        stderr, self.stderr = self.stderr, -1
        if stderr >= 0:
            os.close(stderr)
        _commands.discard(self)

    def disown(self) -> None:
        """In a forked child: close what was inherited, or the command would not see when its parent has done so."""
        for close in (self.close_theirs, self.close_pipe, self.close):
            with contextlib.suppress(OSError):
                close()
        if getattr(self, "process", None) is not None:
            self.process.returncode = 0  # subprocess would warn that it still runs, and wait for it


# Those that run, of this process.
_commands: WeakSet[Command] = WeakSet()
# The process that is watched; a child of its own accord inherits what `os` knows, and not what multiprocessing does.
_watched = 0


def _watch_process() -> None:
    global _watched  # noqa: PLW0603 - see above
    if not _watched and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_disown_all)
    if _watched == os.getpid():
        return
    _watched = os.getpid()
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:  # whose workers end without what finalizers do at exit
        multiprocessing.Finalize(None, _abandon_all, exitpriority=0)


def _abandon_all() -> None:
    for command in list(_commands):
        command.abandon()


def _disown_all() -> None:
    for command in list(_commands):
        command.disown()
    _commands.clear()


def _widen(pipe: int) -> None:
    """Let the pipe hold as much as is read at once, where the system can: it saves most of the switches."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl  # noqa: PLC0415 - Windows has none

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIECE)
