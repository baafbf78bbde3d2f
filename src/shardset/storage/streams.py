"""Bytes that come in order and cannot be addressed: the output of commands, standard input, open files, any url.

A `Stream` gives a shard piece by piece from its first byte to its last. Making one starts, opens and asks for nothing;
the first read does. Its end is an empty piece, which comes only when everything is sure to have come: a command has
ended well, an object had all its bytes, in one version.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias
from weakref import finalize

from shardset.errors import RangeIgnoredError, StorageError, without_secrets

from .anywhere import AnyStore
from .command import PREFIX
from .local import local_path
from .pipes import PipeReader
from .planner import new_buffer, read_ahead
from .remote import RemoteReader
from .store import url_scheme
from .threads import Jobs

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from typing_extensions import Buffer

    from .store import Reader, Store

Opener: TypeAlias = Callable[..., IO[bytes]]
"""Opens a url, called as ``opener(url, "rb", 8192)``, and returns a binary file, which the stream closes."""
Openers: TypeAlias = Mapping[str, Opener]
"""Openers by the scheme that each is for, in lower case."""

PIECE: Final = 1 << 20
AHEAD: Final = 64 << 20
STDIN: Final = "-"

_BUFFER: Final = 8192
_QUEUED: Final = 8
_WAIT: Final = 0.1
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # a single letter is a drive
_SHORT_FILE: Final = re.compile(r"file:(?!//)", re.IGNORECASE)


class Stream(Protocol):
    """A shard that comes in order. It is read by one thread at a time, and closed by any."""

    @property
    def url(self) -> str:
        """Its address, as it was given; ``-`` for standard input, ``<file>`` for a file that has no name."""

    def read_some(self) -> bytes | memoryview:
        """Give the next piece, of at most a few MiB; an empty one at the end, and only if everything has come.

        Raises:
            StorageError: It cannot be opened, or read on, or what has come is not sure to be whole.
            ValueError: It is closed.
        """

    def close(self) -> None:
        """End what still runs for it and let go of it at once. A second time does nothing."""

    def __enter__(self) -> Self:
        """Return the stream."""

    def __exit__(self, *_: object) -> None:
        """Close it."""


def open_stream(
    source: str | os.PathLike[str] | IO[bytes],
    *,
    store: Store | None = None,
    openers: Openers | None = None,
    ahead: int = AHEAD,
) -> Stream:
    """Return a stream of all bytes of a shard. Nothing is opened before they are asked for.

    Args:
        source: ``pipe:COMMAND``, which goes to the shell; ``-`` for standard input; a path, also of a named pipe; any
            url that a store reads; or an open binary file, which is read from where it stands and stays open.
        store: Reads urls; None for the place that each scheme names.
        openers: Functions for schemes of one's own, or in place of ours: ``{"scheme": function}``.
        ahead: Bytes of a remote object that may be on their way, or wait, before they are asked for.

    Raises:
        TypeError: The source is none of these.
        ValueError: `ahead` is not positive.
    """
    if ahead < 1:
        raise ValueError(f"ahead={ahead}: must be at least 1")
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "read"):
            raise TypeError(f"a stream is opened from a url, a path or a binary file, not from {type(source).__name__}")
        return _FileStream(_name_of(source), partial(_same, source), is_owned=False)
    url = os.fspath(source)
    if not isinstance(url, str):
        raise TypeError("a path is text here, not bytes")
    if url == STDIN:
        return _FileStream(url, _stdin, is_owned=False)
    opener = _opener_of(url, openers)
    if opener is not None:
        return _FileStream(url, partial(opener, url, "rb", _BUFFER), is_owned=True)
    if url.startswith(PREFIX):
        return PipeReader(url)
    return _StoredStream(url, store, ahead)


def is_stream(url: str, openers: Openers | None = None) -> bool:
    """Tell whether a url can only be read in order: a command, standard input, a named pipe, what an opener opens."""
    if url == STDIN or url.startswith(PREFIX) or _opener_of(url, openers) is not None:
        return True
    return url_scheme(url) in {"", "file"} and _is_special(local_path(url))


def iter_pieces(stream: Stream) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a stream to its end, and close it, also when nobody wants more of them.

    Raises:
        As `Stream.read_some`.
    """
    with stream:
        while piece := stream.read_some():
            yield piece


class StreamFile(io.RawIOBase):
    """A stream as a binary file, for what reads files. Closing it closes the stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.name = stream.url
        self._left = memoryview(b"")

    def __repr__(self) -> str:
        return f"StreamFile({without_secrets(self.name)!r})"

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Read some bytes into a buffer, as `io.RawIOBase` says; 0 only at a sound end.

        Raises:
            As `Stream.read_some`.
        """
        if self.closed:
            raise ValueError("the file is closed")
        if not self._left:
            self._left = memoryview(self.stream.read_some()).cast("B")
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        """Close the stream."""
        if not self.closed:
            self._left = memoryview(b"")
            self.stream.close()
            super().close()


class _FileStream:
    """A file, open or to be opened."""

    def __init__(self, url: str, open_file: Callable[[], IO[bytes]], *, is_owned: bool) -> None:
        self.url = url
        self._open_file = open_file
        self._is_owned = is_owned
        self._read: Callable[[int], Any] | None = None
        self._close: Callable[[], object] | None = None
        self._is_closed = False

    def read_some(self) -> bytes | memoryview:
        if self._is_closed:
            raise ValueError("the stream is closed")
        if self._read is None:
            self._open()
        if self._read is None:
            raise ValueError("the stream is closed")
        piece = self._read(PIECE)
        if piece is None:
            raise StorageError("the file does not wait for its bytes: it is in non-blocking mode", url=self.url)
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise TypeError(f"{self.url} gives {type(piece).__name__}: open it in binary mode")
        return bytes(piece) if isinstance(piece, bytearray) else piece

    def _open(self) -> None:
        file = self._open_file()
        # As soon as there is something, where the file can tell.
        self._read = getattr(file, "read1", None) or file.read
        if self._is_owned:
            self._close = finalize(self, file.close)

    def close(self) -> None:
        self._is_closed = True
        close, self._read, self._close = self._close, None, None
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _StoredStream:
    """An object of a store, read in order; what comes next is on its way meanwhile where that takes time."""

    def __init__(self, url: str, store: Store | None, ahead: int) -> None:
        self.url = url
        self._store = store
        self._ahead = ahead
        self._pieces: Generator[bytes | memoryview] | None = None
        self._failure: Exception | None = None
        self._is_closed = False

    def read_some(self) -> bytes | memoryview:
        if self._is_closed:
            raise ValueError("the stream is closed")
        if self._failure is not None:  # a generator that has failed looks like one that has come to its end
            raise self._failure
        if self._pieces is None:
            self._pieces = _iter_object(_SHORT_FILE.sub("", self.url), self._store, self._ahead)
        try:
            return next(self._pieces, b"")
        except Exception as error:
            self._failure = error
            raise

    def close(self) -> None:
        self._is_closed = True
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            with contextlib.suppress(ValueError):  # another thread is just reading: it finds out
                pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _iter_object(url: str, store: Store | None, ahead: int) -> Generator[bytes | memoryview]:
    if url_scheme(url) in {"", "file"} and _is_special(local_path(url)):
        yield from _iter_special(url)
        return
    reader = (store or AnyStore()).open(url)
    if isinstance(reader, RemoteReader):
        yield from _iter_remote(reader, ahead)
    else:
        yield from _iter_reader(reader)


def _iter_reader(reader: Reader) -> Iterator[bytes | memoryview]:
    for offset in range(0, reader.size, PIECE):
        yield reader.read(offset, min(PIECE, reader.size - offset))


def _iter_remote(reader: RemoteReader, ahead: int) -> Iterator[memoryview]:
    begun = False
    try:
        for piece in read_ahead(reader.fetch, 0, reader.size, replace(reader.limits, memory=ahead)):
            begun = True
            yield piece
    except RangeIgnoredError:
        if begun or reader.stream is None:
            raise
        # The server knows no ranges, but it can send the whole object.
        yield from _Pushed(reader.stream)


def _opener_of(url: str, openers: Openers | None) -> Opener | None:
    scheme = _SCHEME.match(url) if openers else None
    return openers.get(scheme[1].lower()) if openers and scheme else None


def _is_special(path: str) -> bool:
    """Tell whether a path is a named pipe or a device, as ``<(command)`` of a shell is, and not a file."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False  # the store says what is wrong
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _iter_special(url: str) -> Iterator[bytes]:
    with Path(local_path(url)).open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            yield piece


class _Pushed:
    """Pieces that a function pushes, in a thread of its own, which waits while enough has been pushed."""

    def __init__(self, push: Callable[[Callable[[memoryview], object]], None]) -> None:
        self._push = push
        self._pieces: queue.Queue[memoryview | BaseException | None] = queue.Queue(_QUEUED)
        self._jobs = Jobs()
        self._gathered, self._filled = new_buffer(PIECE), 0

    def __iter__(self) -> Iterator[memoryview]:
        process = os.getpid()
        threading.Thread(target=self._run, name="shardset-stream", daemon=True).start()
        try:
            while True:
                if os.getpid() != process:
                    raise StorageError("this stream was begun by another process", hint="open it after the fork")
                found = self._pieces.get()
                if found is None:
                    return
                if isinstance(found, BaseException):
                    raise found
                if found:
                    yield found
                del found
        finally:
            self._jobs.give_up()

    def _run(self) -> None:
        try:
            self._jobs.do(partial(self._push, self._take))
            self._put(self._gathered[: self._filled].toreadonly())
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the bytes are taken
            with contextlib.suppress(CancelledError):
                self._put(error)

    def _take(self, piece: memoryview) -> None:
        while piece:
            count = min(len(piece), PIECE - self._filled)
            self._gathered[self._filled : self._filled + count] = piece[:count]
            self._filled, piece = self._filled + count, piece[count:]
            if self._filled == PIECE:
                self._put(self._gathered.toreadonly())
                self._gathered, self._filled = new_buffer(PIECE), 0

    def _put(self, what: memoryview | BaseException | None) -> None:
        while not self._jobs.given_up:
            with contextlib.suppress(queue.Full):
                self._pieces.put(what, timeout=_WAIT)
                return
        raise CancelledError


def _stdin() -> IO[bytes]:
    stdin: Any = sys.stdin
    if stdin is None:
        raise StorageError("this process has no standard input", url=STDIN)
    file: IO[bytes] = getattr(stdin, "buffer", stdin)
    return file


def _same(file: IO[bytes]) -> IO[bytes]:
    return file


def _name_of(file: object) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else "<file>"
