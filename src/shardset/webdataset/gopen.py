"""The names of ``webdataset.gopen``: open any url as a binary file.

Urls of web servers, object stores and the Hub go through this package's stores: no program is started for them, and no
token stands on a command line. What comes of a url is whole when it has been read to its end; otherwise reading raises.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from shardset.errors import without_secrets

from . import utils
from .command_file import Pipe, set_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Buffer

    from shardset.writing.shard_output import Output

__all__ = [
    "Pipe",
    "gopen",
    "gopen_ais",
    "gopen_curl",
    "gopen_error",
    "gopen_file",
    "gopen_gsutil",
    "gopen_hf",
    "gopen_htgs",
    "gopen_pipe",
    "gopen_schemes",
    "gopen_store",
    "reader",
    "rewrite_url",
    "set_options",
    "user_openers",
]

info: dict[str, Any] = {}
"""What is shown of this process beside each url, where ``GOPEN_VERBOSE`` is set."""

_PIPE: Final = "pipe:"
_LEAST_BUFFER: Final = 64 << 10
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # a single letter is a drive


class _OutputFile(io.RawIOBase):
    """An object of a store as a file: it is there when the file is closed, and not at all if the block raises."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        if self.closed:
            raise ValueError("the file is closed")
        self._output.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._output.publish()

    def abort(self) -> None:
        if not self.closed:
            super().close()
            self._output.discard()

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


def gopen_file(url: str, mode: str = "rb", bufsize: int = 8192) -> IO[bytes]:
    """Open a path or a ``file:`` url as `open` does. The buffer is Python's, or ``GOPEN_BUFFER`` bytes."""
    from shardset.storage.local import local_path  # noqa: PLC0415

    del bufsize
    path = url.removeprefix("file:") if url.startswith("file:") and not url.startswith("file://") else local_path(url)
    file: IO[bytes] = open(path, mode, buffering=int(os.environ.get("GOPEN_BUFFER", "-1")))  # noqa: PTH123, SIM115
    return file


def gopen_pipe(url: str, mode: str = "rb", bufsize: int = 8192) -> Pipe:
    """Open ``pipe:COMMAND``: the command goes to the shell, so the url must be one that can be trusted.

    Raises:
        ValueError: Commands are forbidden (``utils.enforce_security``), or the mode is unknown.
    """
    del bufsize
    if not url.startswith(_PIPE):
        raise ValueError(f"{url}: not a pipe: url")
    if utils.enforce_security:
        raise ValueError("gopen_pipe: unsafe_gopen is False, cannot open pipe URLs")
    return Pipe(url.removeprefix(_PIPE), mode=mode)


def gopen_store(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> IO[bytes]:
    """Open a url through the store of its scheme, for reading as it comes or for writing as a whole.

    Args:
        url: Any url that a store reads: ``https://``, ``s3://``, ``gs://``, ``az://``, ``hf://``, and all that fsspec
            knows.
        mode: ``"rb"`` or ``"wb"``. What is written is there when the file has been closed.
        bufsize: At least so many bytes are read at once.
        kw: ``store``, to be used in place of the scheme's.

    Raises:
        ValueError: Nothing can be written there.
    """
    if mode == "wb":
        from shardset.writing.shard_output import open_output  # noqa: PLC0415

        return _OutputFile(open_output(url, kw.get("store")))  # type: ignore[return-value]
    from shardset.storage.streams import StreamFile, open_stream  # noqa: PLC0415

    stream = open_stream(url, store=kw.get("store"))
    return io.BufferedReader(StreamFile(stream), max(bufsize, _LEAST_BUFFER))


def gopen_curl(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> IO[bytes]:
    """Open a url that curl knows: ``http(s)://`` through our store, ``sftp``, ``ftps`` and ``scp`` through curl itself.

    Raises:
        ValueError: There is a password in a url for curl, where everybody on this machine would see it.
    """
    parts = urlsplit(url)
    if parts.scheme in {"http", "https"}:
        return gopen_store(url, mode, bufsize, **kw)
    if parts.password is not None:
        raise ValueError(f"{without_secrets(url)}: a password in a url can be seen by all: put it into ~/.netrc")
    options = ["curl", "--netrc-optional", "--connect-timeout", "30", "-f", "-s", "-S", "-L"]
    words = [*options, *(["--retry", "8", url] if mode == "rb" else ["-T", "-", url])]
    return Pipe(words, mode=mode)  # type: ignore[return-value]


def gopen_gsutil(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> IO[bytes]:
    """Open a ``gs://`` url, through our store and without gsutil."""
    return gopen_store(url, mode, bufsize, **kw)


def gopen_htgs(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> IO[bytes]:
    """Open a ``htgs://`` url for reading: it means ``gs://``.

    Raises:
        ValueError: It is to be written.
    """
    if mode != "rb":
        raise ValueError(f"{url}: htgs:// is read only; write to gs://")
    return gopen_store(re.sub(r"(?i)^htgs://", "gs://", url), mode, bufsize, **kw)


def gopen_hf(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> IO[bytes]:
    """Open a ``hf://`` url for reading; the token stays in this process.

    Raises:
        ValueError: It is to be written.
    """
    if mode != "rb":
        raise ValueError(f"{url}: hf:// is read only here")
    return gopen_store(url, mode, bufsize, **kw)


def gopen_ais(url: str, mode: str = "rb", bufsize: int = 8192) -> Pipe:
    """Open a url by AIStore's program, ``ais``."""
    del bufsize
    return Pipe(["ais", "get", url, "-"] if mode[:1] == "r" else ["ais", "put", "-", url], mode=mode)


def gopen_error(url: str, *args: Any, **kw: Any) -> IO[bytes]:
    """Refuse a url.

    Raises:
        ValueError: Always.
    """
    del args, kw
    raise ValueError(f"{without_secrets(url)}: no gopen handler defined")


gopen_schemes: dict[str, Callable[..., Any]] = {
    "__default__": gopen_store,
    "pipe": gopen_pipe,
    "http": gopen_curl,
    "https": gopen_curl,
    "ais": gopen_ais,
    "sftp": gopen_curl,
    "ftps": gopen_curl,
    "scp": gopen_curl,
    "gs": gopen_gsutil,
    "htgs": gopen_htgs,
    "hf": gopen_hf,
    "s3": gopen_store,
    "az": gopen_store,
}
"""Functions by scheme, called as ``function(url, mode, bufsize, **kw)``. Programs add their own, or replace ours."""

_OURS: Final = dict(gopen_schemes)


def user_openers() -> dict[str, Callable[..., Any]]:
    """Return what a program has put into `gopen_schemes`, and those of ours that no store stands for.

    So a dataset reads all else through its stores: by scheme, as `shardset.storage.streams.open_stream` takes it.
    """
    found = {scheme: opener for scheme, opener in gopen_schemes.items() if _OURS.get(scheme) is not opener}
    ours = {scheme: gopen_schemes.get(scheme, gopen_error) for scheme in ("ais", "sftp", "ftps", "scp", "htgs")}
    return {**ours, **dict.fromkeys(_ais_schemes(), gopen_ais), **found}


def _ais_schemes() -> list[str]:
    return [scheme for scheme in re.split("[:;,]", os.environ.get("USE_AIS_FOR", "")) if scheme]


def rewrite_url(url: str) -> str:
    """Rewrite a url by the first rule of ``GOPEN_REWRITE`` that changes it: ``"old=new;..."``, old at its beginning.

    Raises:
        ValueError: There are rules, and security is enforced; or a rule has no ``=``.
    """
    rules = os.environ.get("GOPEN_REWRITE")
    if rules is None:
        return url
    if utils.enforce_security:
        raise ValueError("rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables")
    for rule in filter(None, rules.split(";")):
        old, equals, new = rule.partition("=")
        if not equals:
            raise ValueError(f"GOPEN_REWRITE: the rule {rule!r} is not old=new")
        rewritten = re.sub(f"^(?:{old})", new, url)
        if rewritten != url:
            _tell(f"{without_secrets(url)} -> {without_secrets(rewritten)}")
            return rewritten
    return url


def gopen(url: str | os.PathLike[str], mode: str = "rb", bufsize: int = 8192, **kw: Any) -> IO[bytes]:
    """Open a url as a binary file.

    Args:
        url: A path, ``file:``, ``pipe:COMMAND``, ``-`` for standard input or output, or any url of a scheme in
            `gopen_schemes`; others go to its ``__default__``.
        mode: ``"rb"`` or ``"wb"``.
        bufsize: Wished size of the buffer, bytes.
        kw: For the function of the scheme.

    Raises:
        ValueError: The mode is another, no function and no store knows the scheme, or security forbids it.
        OSError: It cannot be opened; or read on, or written, which the file's methods raise.
    """
    if mode not in {"rb", "wb"}:
        raise ValueError(f"{mode!r}: the modes are 'rb' and 'wb'")
    url = os.fspath(url)
    _tell(f"open {without_secrets(url)} {info}")
    if url == "-":
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    url = rewrite_url(url)
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else ""
    if scheme in {"", "file"} or (scheme not in gopen_schemes and "://" not in url and os.path.exists(url)):  # noqa: PTH110
        if utils.enforce_security:
            raise ValueError("gopen: unsafe_gopen is False, cannot open local files")
        return gopen_file(url, mode, bufsize)
    opener = gopen_schemes.get(scheme, gopen_schemes["__default__"])
    if scheme in _ais_schemes() and _OURS.get(scheme) is gopen_schemes.get(scheme):
        opener = gopen_ais
    opened: IO[bytes] = opener(url, mode, bufsize, **kw)
    return opened


reader = partial(gopen, mode="rb")
"""Open a url for reading."""


def _tell(what: str) -> None:
    if os.environ.get("GOPEN_VERBOSE", "0") not in {"", "0"}:
        sys.stderr.write(f"gopen: {what}\n")
