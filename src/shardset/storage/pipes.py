"""Commands of the shell as places that bytes come from and go to: ``pipe:COMMAND``.

What a command gives counts as whole only when the command has ended well, and one that nobody reads to its end is
killed at once. `command.py` says how commands run.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from typing import TYPE_CHECKING, Final, NoReturn, Self
from weakref import finalize

from shardset.errors import StorageError, TransferError, without_secrets

from .command import BLOCKING_PIECE, CAN_WAIT, ENOUGH, PIECE, PREFIX, READABLE, WRITABLE, Command
from .planner import new_buffer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Buffer

_GATHERED: Final = 256 << 10
_MOMENT: Final = 0.01


class PipeReader:
    """What a command writes to its standard output: a `Stream`.

    The command is started by the first read. It belongs to the process that started it: a forked child can read a
    stream that its parent has not begun, and none that it has.

    Args:
        url: ``pipe:COMMAND``; the command goes to the shell.
        accepts: Tells whether a status is no failure, besides 0 and that of a part that was stopped because another
            part wanted no more of it (141).

    Attributes:
        url: As it was given.
        status: The status that the command has ended with, of a signal less than 0; None before that is known.
    """

    def __init__(self, url: str, *, accepts: Callable[[int], bool] | None = None) -> None:
        self.url = url
        self.status: int | None = None
        self._accepts = accepts or _accepts_none
        self._command: Command | None = None
        self._finalizer: finalize[[], PipeReader] | None = None
        self._has_ended = self._is_closed = False
        self._failure: TransferError | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"PipeReader({without_secrets(self.url)!r})"

    def read_some(self) -> bytes | memoryview:
        """Give what comes next, up to 1 MiB, as soon as there is something; nothing at the end.

        Raises:
            TransferError: At the end: the command has failed. What it gave before may be a part only.
            StorageError: It cannot be started, or was started by another process.
            ValueError: The stream is closed.
        """
        return self._read(None)

    def has_more(self) -> bool:
        """Tell whether the next piece, or the end, can be had without waiting for more than a moment."""
        command = self._command
        return command is None or not CAN_WAIT or command.has_something(_MOMENT)

    def close(self) -> None:
        """Kill the command if it has not been read to its end, and let go of it. Does not wait for it, nor raise."""
        self._is_closed = True
        command = self._command
        if command is None or not command.is_ours:
            return
        command.kill()  # so that a thread that reads sees the end
        with self._lock:
            self._let_go(command)

    def failure(self, within: float = 0.0) -> TransferError | None:
        """Return what the command has failed with, if it has already, or does so soon.

        For those who have all that they want without having seen the end: what is left is read and thrown away.

        Args:
            within: Seconds to wait for its end.
        """
        limit = time.monotonic() + within
        while (command := self._command) is not None and command.is_ours and not (self._is_closed or self._has_ended):
            if not command.has_something(limit - time.monotonic()):
                break
            with contextlib.suppress(TransferError):
                self._read(limit)
        return self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Command:
        if self._command is None:
            self._command = command = Command(self.url, is_read=True)
            self._finalizer = finalize(self, command.abandon)
        return self._command

    def _read(self, limit: float | None) -> bytes | memoryview:
        """Read some bytes. With a limit, do not wait longer for the end of a command that has nothing more to give."""
        command = self._command
        if command is not None and not command.is_ours:
            raise StorageError(
                "this command was started by another process", url=self.url, hint="open the stream after the fork"
            )
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise ValueError("the stream is closed")
            if self._has_ended:
                return b""
            command = self._running()
            piece = _read_waiting(command) if CAN_WAIT else os.read(command.pipe, BLOCKING_PIECE)
            if not len(piece):
                self._end(command, limit)
            return piece

    def _end(self, command: Command, limit: float | None) -> None:
        status = self.status = command.wait(limit)
        if status is None:
            return
        self._has_ended = True
        if not (status == 0 or status in ENOUGH or self._accepts(status) or self._is_closed):
            self._failure = command.failure(status, "the command failed, so what it gave may not be whole")
        self._let_go(command)
        if self._failure is not None:
            raise self._failure

    def _let_go(self, command: Command) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
            command.abandon()


def _accepts_none(_: int) -> bool:
    return False


def _read_waiting(command: Command) -> memoryview:
    """Read what is there, or wait for something."""
    buffer = new_buffer(PIECE)
    filled = 0
    while filled < len(buffer):
        try:
            count = os.readv(command.pipe, [buffer[filled:]])
        except BlockingIOError:
            if filled:
                break
            command.wait_for(READABLE)
            continue
        if not count:
            break
        filled += count
    return buffer[:filled].toreadonly()


class PipeWriter(io.RawIOBase):
    """The standard input of a command, as a file: all that is written counts only when `close` has returned.

    The command is started by the first write, or by `close`. If the block of a ``with`` raises, or nobody closes the
    file, it is killed, so that it does not take a part for the whole.

    Args:
        url: ``pipe:COMMAND``; the command goes to the shell.

    Attributes:
        url: As it was given.
        status: The status that the command has ended with, of a signal less than 0; None before that is known.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.status: int | None = None
        self._command: Command | None = None
        self._finalizer: finalize[[], PipeWriter] | None = None
        self._gathered = bytearray()

    def __repr__(self) -> str:
        return f"PipeWriter({without_secrets(self.url)!r})"

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Buffer, /) -> int:
        """Hand bytes to the command, all of them; small ones are gathered first.

        Raises:
            TransferError: The command has ended before it took them.
            StorageError: It cannot be started, or was started by another process.
            ValueError: The file is closed.
        """
        if self.closed:
            raise ValueError("the file is closed")
        view = memoryview(data).cast("B")
        if len(view) < _GATHERED:
            self._gathered += view
        else:
            self._send_gathered()
            self._send(view)
        if len(self._gathered) >= _GATHERED:
            self._send_gathered()
        return len(view)

    def flush(self) -> None:
        """Hand what was gathered to the command.

        Raises:
            As `write`.
        """
        if not self.closed:
            self._send_gathered()

    def close(self, *, within: float | None = None, accepts: Callable[[int], bool] | None = None) -> None:
        """Hand the rest to the command, tell it that this is all, and wait until it has ended well.

        Args:
            within: Seconds to wait for its end; None to wait as long as it takes.
            accepts: Tells whether a status is no failure, besides 0.

        Raises:
            TransferError: It has failed, or not ended in time: what it was to write is not there, or not whole.
        """
        if self.closed:
            return
        limit = None if within is None else time.monotonic() + within
        try:
            self._send_gathered()
            command = self._running()
            command.close_pipe()
            status = self.status = command.wait(limit)
            if status is None:
                what = f"the command did not end within {within} s and was killed"
                raise TransferError(f"{what}{command.last_words()}", url=self.url)
            if status and not (accepts or _accepts_none)(status):
                raise command.failure(status, "the command failed, so what it was given is not written")
        finally:
            self.abort()

    def abort(self) -> None:
        """Kill the command, if it still runs, and close the file."""
        command, finalizer = self._command, self._finalizer
        self._gathered.clear()
        if command is not None and finalizer is not None:
            finalizer.detach()
            command.abandon()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter anything may be gone
            self.abort()

    def _running(self) -> Command:
        if self._command is None:
            self._command = command = Command(self.url, is_read=False)
            self._finalizer = finalize(self, command.abandon)
        elif not self._command.is_ours:
            raise StorageError("this command was started by another process", url=self.url)
        return self._command

    def _send_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._send(memoryview(gathered))

    def _send(self, view: memoryview) -> None:
        command = self._running()
        while len(view):
            try:
                view = view[os.write(command.pipe, view[:PIECE]) :]
            except BlockingIOError:
                command.wait_for(WRITABLE)
            except BrokenPipeError:
                self._fail(command)

    def _fail(self, command: Command) -> NoReturn:
        command.close_pipe()
        status = self.status = command.wait()
        failure = command.failure(status or 0, "the command ended before it took all that it was given")
        self.abort()
        raise failure from None


def open_pipe_writer(command: str) -> PipeWriter:
    """Return a file whose bytes go to the standard input of a shell command, which starts with the first of them.

    Args:
        command: The command, also as ``pipe:COMMAND``.
    """
    return PipeWriter(command if command.startswith(PREFIX) else PREFIX + command)
