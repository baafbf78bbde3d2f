"""Every other place: whatever fsspec knows, behind the protocols of this package.

For places that no store here is made for (``hdfs://``, ``sftp://``, ``dropbox://``, ...), and, written
``fsspec+NAME://``, for those that one is. Only for processes that were spawned: file systems of fsspec hold threads,
event loops and connections that do not survive a fork, and wait for ever in a forked child. There, an error says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardset.errors import AccessError, ChangedError, MissingExtraError, NotFoundError, StorageError, without_secrets

from . import threads
from .planner import ReadLimits
from .remote import OpenReaders, RemoteReader
from .retry import RETRY_STATUSES, Attempts, Retry
from .store import UNKNOWN, ObjectInfo, Store, check_expected, iter_buffers, url_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Buffer

    from shardset.policy import Report

    Result = TypeVar("Result")

PREFIX: Final = "fsspec+"
"""Before a scheme: leave the url to fsspec, whatever other store there is for it."""

_AT_ONCE: Final = 32
_AT_ONCE_BYTES: Final = 16 << 20
# What file systems call that which differs whenever the bytes do; where there is none, what else may tell.
_VERSIONS: Final = ("etag", "ETag", "md5", "md5Hash", "content_md5", "Content-MD5", "checksum", "crc32c", "generation")
_HINTS_OF_CHANGE: Final = ("ino", "mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")
# Where a whole object appears at once by itself. Elsewhere it is written under another name first.
_WHOLE: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hf", "memory"})
_FINAL: Final = (TypeError, ValueError, NotImplementedError, AttributeError, ImportError, LookupError)

# The process that first used fsspec here. A child of it must not.
_used_by: int | None = None


class FsspecStore(Store):
    """Whatever fsspec has a file system for. Slower than the stores of this package, and not for forked children.

    The identity of an object is what its file system says of it: an etag or checksum, or else its times. Reads carry no
    condition, so the file system is asked after each whether the object is still the one that was opened. What
    `Store.write` expects is looked at right before.

    Args:
        options: What the file system needs to know, as in ``fsspec.filesystem(NAME, **options)``. They go along when
            the store is pickled.
        retry: When to give up, on top of what the file system itself does.
        limits: How reads are merged and run side by side.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
        limits: ReadLimits | None = None,
    ) -> None:
        self._options = dict(options or {})
        self._retry = retry or Retry()
        self._limits = limits or ReadLimits()
        self._readers = OpenReaders(self._ask, self._reader)

    def __reduce__(self) -> tuple[Callable[[], FsspecStore], tuple[()]]:
        return partial(FsspecStore, options=self._options, retry=self._retry, limits=self._limits), ()

    def __repr__(self) -> str:
        return f"FsspecStore(options={sorted(self._options)})"

    def info(self, url: str) -> ObjectInfo:
        """Ask the file system, as `Store.info` says."""
        return self._readers.look(url)

    def open(self, url: str, known: ObjectInfo | None = None) -> RemoteReader:
        """Make a reader for the version that is known, or else that was seen last, as `Store.open` says."""
        return self._readers.open(url, known)

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Let the file system find everything below `url`, then give it in order, as `Store.list` says."""
        del report

        def find(system: Any, path: str) -> list[tuple[str, Mapping[str, Any]]]:
            system.invalidate_cache()
            folder = path.rstrip("/") + "/"
            found = system.find(folder, detail=True)  # with the slash, as web servers want it
            named = ((name.removeprefix(folder), about) for name, about in found.items() if name.startswith(folder))
            return [(name, about) for name, about in named if name and not name.endswith("/")]

        named = sorted(self._call(url, find), key=lambda pair: os.fsencode(pair[0]))
        if not named:
            raise NotFoundError("nothing lies below this folder", url=url)
        base = url.removesuffix("/") + "/"
        for at in range(0, len(named), _AT_ONCE):
            yield from self._complete({base + name: about for name, about in named[at : at + _AT_ONCE]})

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> None:
        """Write to a temporary file of this machine first if it is long, then hand it over, as `Store.write` says."""
        with tempfile.TemporaryDirectory(prefix="shardset-") as folder:
            file = Path(folder) / "object"
            with file.open("wb") as spool:
                for piece in iter_buffers(data):
                    spool.write(piece)
            if expect is not None:
                check_expected(self, url, expect)
            try:
                self._call(url, partial(_hand_over, file))
            finally:
                self._readers.forget(url)

    def close(self) -> None:
        """Forget versions. File systems are kept by fsspec."""
        self._readers.clear()

    def _reader(self, info: ObjectInfo) -> RemoteReader:
        return RemoteReader(info, partial(self._fetch, info), self._limits)

    def _ask(self, url: str) -> ObjectInfo:
        def look(system: Any, path: str) -> Mapping[str, Any]:
            system.invalidate_cache()
            return dict(system.info(path))

        about = self._call(url, look)
        if about.get("type") == "directory" or url.endswith("/"):
            error = StorageError("not an object but a folder", url=url)
            error.errno = errno.EISDIR
            raise error
        info = _info(url, about)
        if info is None:
            raise StorageError("the file system does not tell the size of the object", url=url)
        return info

    def _complete(self, found: Mapping[str, Mapping[str, Any]]) -> Iterator[ObjectInfo]:
        """Yield what a listing told; ask about each object of which it did not tell enough."""
        infos = {url: _info(url, about) if _tells(about) else None for url, about in found.items()}

        def ask(url: str) -> None:
            infos[url] = self._ask(url)

        threads.run_all([partial(ask, url) for url, info in infos.items() if info is None], _AT_ONCE)
        yield from (info for info in infos.values() if info is not None)

    def _fetch(self, info: ObjectInfo, offset: int, view: memoryview) -> None:
        end = offset + len(view)
        try:
            content = self._call(info.url, lambda system, path: system.cat_file(path, start=offset, end=end))
            now = self._ask(info.url)
        except NotFoundError:
            self._readers.forget(info.url)
            raise
        if now != info:
            self._readers.forget(info.url)
            raise ChangedError("the object changed while it was read", url=info.url, hint="open the dataset again")
        if len(content) != len(view):
            raise StorageError(f"{len(content)} bytes came where {len(view)} were asked for", url=info.url)
        view[:] = content

    def _call(self, url: str, call: Callable[[Any, str], Result]) -> Result:
        """Call into a url's file system until it answers.

        What other libraries say in their errors is not passed on: it may quote signed addresses.
        """
        attempts = Attempts(self._retry, without_secrets(url))
        while True:
            attempts.begin()
            system, path = self._system(url)
            try:
                return call(system, path)
            except Exception as error:  # noqa: BLE001 - of fsspec's many file systems, each has errors of its own
                self._settle(error, url, attempts)

    def _settle(self, error: Exception, url: str, attempts: Attempts) -> None:
        """Wait before the next attempt, or raise what an error means."""
        status = _status(error)
        if status in {401, 403} or isinstance(error, PermissionError):
            raise AccessError("no access", url=url, hint="look at the options that the file system is given") from None
        if isinstance(error, FileNotFoundError | NotADirectoryError) and status in {None, 404, 410}:
            raise NotFoundError("no such object", url=url) from None
        if isinstance(error, IsADirectoryError):
            raise StorageError("not an object but a folder", url=url) from None
        what = f"{type(error).__name__} from fsspec's file system for {url_scheme(url).removeprefix(PREFIX)}://"
        if isinstance(error, _FINAL) or (status is not None and status not in RETRY_STATUSES):
            raise attempts.error(what, status=status) from None
        threads.pause(attempts.fail(what, status=status))

    def _system(self, url: str) -> tuple[Any, str]:
        """Return fsspec's file system for a url, which fsspec keeps for each thread that needs its own, and the path.

        Raises:
            StorageError: This is a forked child of a process that has used one.
            MissingExtraError: fsspec, or what it needs for this scheme, is not installed.
            ValueError: fsspec knows no such scheme.
        """
        global _used_by  # noqa: PLW0603 - what a process holds, its children inherit
        if _used_by not in {None, os.getpid()}:
            raise StorageError(
                "fsspec was used before this process was forked, and would wait for ever in it",
                url=url,
                hint="start workers by spawn or forkserver: DataLoader(..., multiprocessing_context='spawn')",
            )
        try:
            core = import_module("fsspec.core")
        except ImportError:
            raise MissingExtraError(f"{url_scheme(url)}:// is left to fsspec", extra="fsspec") from None
        _used_by = os.getpid()
        try:
            system, path = core.url_to_fs(_plain(url), **self._options)
        except ImportError as error:
            raise MissingExtraError(
                f"fsspec needs another package for {url_scheme(url)}://", hint=f"fsspec says: {error}"
            ) from None
        except ValueError:
            raise ValueError(f"{without_secrets(url)}: no store for this, and fsspec knows none either") from None
        except OSError as error:  # a driver that cannot be loaded tells all places where it looked
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise StorageError(f"fsspec cannot reach this place: {said[0][:300]}", url=url) from error
        return system, str(path)


def _plain(url: str) -> str:
    return url[len(PREFIX) :] if url_scheme(url).startswith(PREFIX) else url


def _info(url: str, about: Mapping[str, Any]) -> ObjectInfo | None:
    size = about.get("size")
    return None if size is None else ObjectInfo(url, int(size), _identity(about))


def _tells(about: Mapping[str, Any]) -> bool:
    return any(about.get(name) is not None for name in (*_VERSIONS, *_HINTS_OF_CHANGE))


def _identity(about: Mapping[str, Any]) -> str:
    """Return what tells versions of an object apart, the same from a listing as from a look-up."""
    for name in _VERSIONS:
        if about.get(name):
            return f"{name}:{about[name]}"
    told = [f"{name}:{_plainly(about[name])}" for name in _HINTS_OF_CHANGE if about.get(name) is not None]
    return " ".join(told) or UNKNOWN


def _plainly(value: Any) -> str:
    # One file system may give a time as a date here and as seconds there.
    value = value.timestamp() if isinstance(value, datetime) else value
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status behind an error; some file systems say "not found" whatever it was."""
    behind: BaseException | None = error
    while behind is not None:
        for name in ("status", "status_code"):
            status = getattr(behind, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
        behind = behind.__cause__ or behind.__context__
    return None


def _hand_over(file: Path, system: Any, path: str) -> None:
    """Write a file's content to a path of a file system, so that it appears there as a whole."""
    protocols = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
    if protocols & _WHOLE:
        _send(file, system, path)
        return
    folder, slash, name = path.rpartition("/")
    temporary = f"{folder}{slash}.{name}-{secrets.token_hex(6)}.tmp"
    if folder:
        system.makedirs(folder, exist_ok=True)
    try:
        _send(file, system, temporary)
        system.mv(temporary, path)
    except BaseException:
        _remove(system, temporary)
        raise


def _send(file: Path, system: Any, path: str) -> None:
    if file.stat().st_size <= _AT_ONCE_BYTES:
        system.pipe_file(path, file.read_bytes())
    else:
        system.put_file(str(file), path)


def _remove(system: Any, path: str) -> None:
    with contextlib.suppress(Exception):  # it may never have been there, and the first error is the one to tell
        system.rm_file(path)
