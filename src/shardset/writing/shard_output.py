"""Where the bytes of a shard go that is written as one stream: a file, an object of a store, a command, an open file.

What stands under a name appears whole or not at all. A command or an open file cannot take back what it was given; a
shard that is given up lacks its end marker there, which readers notice.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from shardset.errors import without_secrets
from shardset.storage.anywhere import store_for
from shardset.storage.command import PREFIX
from shardset.storage.local import local_path
from shardset.storage.pipes import open_pipe_writer
from shardset.storage.store import split_query, url_scheme

from .shard_files import PendingFile, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from shardset.storage.store import Store

_NAMED: Final = re.compile(r"(?:\.|\.t)(gz|bz2?|xz|zst)$", re.IGNORECASE)
_KINDS: Final = {
    **dict.fromkeys(("gz", "gzip"), "gzip"),
    **dict.fromkeys(("bz", "bz2", "bzip2"), "bzip2"),
    "xz": "xz",
    **dict.fromkeys(("zst", "zstd"), "zstd"),
}


class Output(Protocol):
    """Takes the bytes of a shard, and then publishes them or gives them up."""

    def write(self, data: Buffer) -> object:
        """Take some more, all of them."""

    def publish(self) -> None:
        """Let others see what was written: it is whole."""

    def discard(self) -> None:
        """Give up what was written, as far as it can be taken back."""


def open_output(target: str | os.PathLike[str] | IO[bytes], store: Store | None = None) -> Output:
    """Open what a shard is written into.

    Args:
        target: A path, a url of any store that can be written to, ``pipe:COMMAND`` for a shell command that reads it,
            ``-`` for standard output, or a binary file that is open for writing and stays so.
        store: Where a url lives; by default the place that its scheme names.

    Raises:
        ValueError: Nothing can be written there.
        StorageError: It cannot be made.
    """
    if not isinstance(target, str | os.PathLike):
        if not hasattr(target, "write"):
            raise TypeError(f"a shard is written to a path, a url or a binary file, not to a {type(target).__name__}")
        return _Stream(target)
    url = os.fspath(target)
    if url.startswith(PREFIX):
        return _Command(url)
    if url == "-":
        return _Stream(sys.stdout.buffer)
    if url_scheme(url) in {"http", "https"}:
        raise ValueError(f"{without_secrets(url)}: web servers are read only; write to a folder or a bucket")
    url = local_name(url)
    if url_scheme(url) in {"", "file"} and _is_special(local_path(url)):
        with translated(url):
            return _Stream(Path(local_path(url)).open("wb", buffering=0), is_owned=True)
    return PendingFile(url, store_for(store, url))


def _is_special(path: str) -> bool:
    """Tell whether a device or a named pipe stands there, which cannot be replaced."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def local_name(url: str) -> str:
    """Return ``file:NAME`` without its scheme, as webdataset writes paths; any other url as it is."""
    return url.removeprefix("file:") if url.startswith("file:") and not url.startswith("file://") else url


def parse_compression(compress: bool | str | None, target: object) -> str:
    """Return how a shard is compressed: ``"gzip"``, ``"bzip2"``, ``"xz"``, ``"zstd"``, or ``""`` for not at all.

    Args:
        compress: True for gzip, False for none, a name or suffix, or None to go by the suffix of `target`.
        target: What is written to.

    Raises:
        ValueError: There is no such compression.
    """
    if isinstance(compress, bool):
        return "gzip" if compress else ""
    if compress is None:
        if not isinstance(target, str | os.PathLike):
            return ""
        match = _NAMED.search(split_query(os.fspath(target))[0])
        return "" if match is None else _KINDS[match[1].lower()]
    kind = _KINDS.get(compress.lower().removeprefix("."), "" if compress == "" else None)
    if kind is None:
        raise ValueError(f"compress={compress!r}: give 'gz', 'bz2', 'xz' or 'zst', or False for none")
    return kind


def compressed(output: Output, kind: str) -> Output:
    """Put a compression before an output; `kind` is what `parse_compression` gives."""
    return _Compressed(output, kind) if kind else output


class _Stream:
    """An open binary file, which stays open unless it is owned."""

    def __init__(self, file: IO[bytes], *, is_owned: bool = False) -> None:
        self._file = file
        self._is_owned = is_owned

    def write(self, data: Buffer) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):  # a file without a buffer may take a part
            taken: Any = self._file.write(rest if len(rest) < memoryview(data).nbytes else data)
            rest = rest[taken:] if isinstance(taken, int) else rest[len(rest) :]

    def publish(self) -> None:
        flush = getattr(self._file, "flush", None)
        if flush is not None:
            flush()
        self.discard()

    def discard(self) -> None:
        if self._is_owned:
            self._file.close()


class _Command:
    """A shell command that reads the shard. One that fails is an error, also after it has read everything."""

    def __init__(self, url: str) -> None:
        self._input = open_pipe_writer(url)

    def write(self, data: Buffer) -> None:
        self._input.write(data)

    def publish(self) -> None:
        self._input.close()

    def discard(self) -> None:
        # Its input does not end before, which would look like a whole shard to it.
        self._input.abort()


class _Compressed:
    """Compresses what is written, the same bytes for the same shard: no name and no time goes into it."""

    def __init__(self, output: Output, kind: str) -> None:
        self._output = output
        self._compress, self._finish = _codec(kind)

    def write(self, data: Buffer) -> None:
        self._pass_on(self._compress(data))

    def publish(self) -> None:
        self._pass_on(self._finish())
        self._output.publish()

    def discard(self) -> None:
        self._output.discard()

    def _pass_on(self, data: bytes) -> None:
        if data:
            self._output.write(data)


def _codec(kind: str) -> tuple[Callable[[Buffer], bytes], Callable[[], bytes]]:
    """Return the two functions of a compressor: one for some bytes, one for the end."""
    if kind == "gzip":
        import zlib  # noqa: PLC0415 - seldom needed, as those that follow

        gzip = zlib.compressobj(wbits=31)
        return gzip.compress, gzip.flush
    if kind == "bzip2":
        import bz2  # noqa: PLC0415

        bzip2 = bz2.BZ2Compressor()
        return bzip2.compress, bzip2.flush
    if kind == "xz":
        import lzma  # noqa: PLC0415

        xz = lzma.LZMACompressor()
        return xz.compress, xz.flush
    return _zstd_codec()


class _Parts:
    """What pyarrow compressed, until it is taken."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Buffer) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _zstd_codec() -> tuple[Callable[[Buffer], bytes], Callable[[], bytes]]:
    import pyarrow as pa  # noqa: PLC0415 - slow to import

    parts = _Parts()
    stream = pa.CompressedOutputStream(pa.PythonFile(parts, mode="w"), "zstd")

    def compress(data: Buffer) -> bytes:
        stream.write(data)
        return parts.take()

    def finish() -> bytes:
        stream.close()
        return parts.take()

    return compress, finish
