"""``webdataset.gopen.Pipe``: a shell command as a binary file, with its status checked."""

from __future__ import annotations

import contextlib
import io
import shlex
from typing import TYPE_CHECKING, Any, Final, Self

from shardset.errors import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from typing_extensions import Buffer

    from shardset.storage.pipes import PipeReader, PipeWriter

_PIPE: Final = "pipe:"
_BUFFER: Final = 64 << 10
_MOMENT: Final = 0.2


class Pipe(io.BufferedIOBase):
    """A shell command as a binary file: its output to be read, or its input to be written.

    Reading raises at the end if the command has failed. So does `close`, if it has failed by then or does so within a
    moment; a command that still runs is killed, and nobody waits for it. `close` of one that was written to waits until
    it has ended, and raises if it has failed.

    Args:
        args: The command: a text for the shell, or its words.
        mode: ``"rb"`` or ``"wb"``.
        timeout: Seconds that `close` waits for a command that was written to.
        ignore_errors: No status is an error.
        ignore_status: Statuses that are no error, besides 0 and, where the command is read, 141 (it was not read on).
        kw: Taken for the sake of ``shell`` and ``bufsize``, which make no difference.

    Raises:
        ValueError: The mode is another.
        TypeError: `kw` has something else.
    """

    def __init__(
        self,
        args: str | Iterable[str],
        *,
        mode: str = "rb",
        timeout: float = 7200.0,
        ignore_errors: bool = False,
        ignore_status: Iterable[int] = (),
        **kw: Any,
    ) -> None:
        from shardset.storage.pipes import open_pipe_writer  # noqa: PLC0415 - not needed before something is opened

        super().__init__()
        unknown = kw.keys() - {"shell", "bufsize"}
        if unknown:
            raise TypeError(f"a Pipe has no argument {min(unknown)!r}")
        self.args = args
        self.timeout = timeout
        self.ignore_errors = ignore_errors
        self.ignore_status = list(ignore_status)
        self._url = _PIPE + (args if isinstance(args, str) else shlex.join(args))
        self._source: PipeReader | None = None
        self._sink: PipeWriter | None = None
        self._file: io.BufferedReader | None = None
        if mode[:1] == "r":
            self._open_reader()
        elif mode[:1] == "w":
            self._sink = open_pipe_writer(self._url)
        else:
            raise ValueError(f"{mode!r}: the modes are 'rb' and 'wb'")

    def _open_reader(self) -> None:
        from shardset.storage.pipes import PipeReader  # noqa: PLC0415
        from shardset.storage.streams import StreamFile  # noqa: PLC0415

        self._source = PipeReader(self._url, accepts=self._accepts)
        self._file = io.BufferedReader(StreamFile(self._source), _BUFFER)

    def _accepts(self, status: int) -> bool:
        return self.ignore_errors or status in self.ignore_status

    def __repr__(self) -> str:
        return f"Pipe({without_secrets(self._url)!r})"

    @property
    def status(self) -> int | None:
        """The status that the command has ended with; None before that is known."""
        opened = self._source or self._sink
        return None if opened is None else opened.status

    def readable(self) -> bool:
        """Tell whether the command's output is read."""
        return self._file is not None

    def writable(self) -> bool:
        """Tell whether the command's input is written."""
        return self._sink is not None

    def read(self, size: int | None = -1, /) -> bytes:
        """Read `size` bytes, fewer only at the end, or all that comes.

        Raises:
            TransferError: The command has failed.
        """
        return self._reading().read(size)

    def read1(self, size: int = -1, /) -> bytes:
        """Read some bytes, at most `size`, as they come.

        Raises:
            TransferError: The command has failed.
        """
        return self._reading().read1(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read up to the next end of a line.

        Raises:
            TransferError: The command has failed.
        """
        return self._reading().readline(-1 if size is None else size)

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a buffer, less of it only at the end.

        Raises:
            TransferError: The command has failed.
        """
        return self._reading().readinto(buffer)

    def write(self, data: Buffer, /) -> int:
        """Hand all bytes to the command.

        Raises:
            TransferError: It has ended before it took them.
        """
        if self._sink is None:
            raise io.UnsupportedOperation("not open for writing")
        return self._sink.write(data)

    def flush(self) -> None:
        """Hand what was gathered to the command."""
        if self._sink is not None and not self.closed:
            self._sink.flush()

    def close(self) -> None:
        """Let go of the command, as the class says.

        Raises:
            TransferError: It has failed.
        """
        if self.closed:
            return
        failure = None
        try:
            if self._source is not None:
                failure = self._source.failure(_MOMENT)
                self._source.close()
            if self._sink is not None:
                self._sink.close(within=self.timeout, accepts=self._accepts)
        finally:
            super().close()
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """Kill the command, if it still runs."""
        if self._source is not None:
            self._source.close()
        if self._sink is not None:
            self._sink.abort()
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it was never made, or the interpreter ends
            self.abort()

    def _reading(self) -> io.BufferedReader:
        if self._file is None:
            raise io.UnsupportedOperation("not open for reading")
        return self._file


def set_options(
    obj: Any,
    timeout: float | None = None,
    ignore_errors: bool | None = None,
    ignore_status: Iterable[int] | None = None,
    handler: Any = None,
) -> bool:
    """Change options of a `Pipe`; return False, and do nothing, with any other file.

    Raises:
        ValueError: A handler is given: a pipe has none.
    """
    if handler is not None:
        raise ValueError("a pipe has no handler: give it to the dataset")
    if not isinstance(obj, Pipe):
        return False
    if timeout is not None:
        obj.timeout = timeout
    if ignore_errors is not None:
        obj.ignore_errors = ignore_errors
    if ignore_status is not None:
        obj.ignore_status = list(ignore_status)
    return True
