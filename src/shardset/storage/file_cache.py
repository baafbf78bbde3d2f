"""Whole shards as plain files in a folder, each downloaded once: from any url, and from commands.

The blocks of `CachedStore` are for readers that know what version of an object they want. This is for shards that are
read from front to back, whatever gives their bytes, and for files that other programs read too. A file appears under
its name when all of it is there: all bytes that its place promised, or the command has ended well. Beside it lies a
small hidden note of where it came from, so that two urls never get each other's bytes, whatever names they are given.

A file that is there is taken as it is, without asking its place whether it has changed since: a run goes on when its
place cannot be reached. Who wants it anew removes it. The folder must be on a disk of this machine: its locks (`flock`)
do not reach other machines.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import orjson

from shardset.errors import FormatError, StorageError, TransferError, without_secrets
from shardset.files import hold_file, lock_file, make_temporary, remove_unheld, stands_at, sync_folder, write_atomic

from .anywhere import AnyStore
from .local import local_path, storage_error
from .store import url_name, url_scheme
from .streams import is_stream, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .store import Store
    from .streams import Openers

logger = logging.getLogger(__name__)

_STEP: Final = 8 << 20
_TAIL: Final = 80
_DIGITS: Final = 20
_LOCK: Final = ".lock"
_NOTE: Final = ".from"
_ODD: Final = re.compile(r"[^A-Za-z0-9._+=,@-]+")
_BINARY: Final = getattr(os, "O_BINARY", 0)
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def cache_name(url: str) -> str:
    """Return the name that a url's file gets: the last part of the url, to be read, and a digest of all of it.

    ``https://host/train/a-000.tar`` becomes ``a-000-0123456789abcdef.tar``. Signed urls that differ in their signature
    have different names.
    """
    last = _ODD.sub("_", url_name(url).strip().rpartition(" ")[2])[-_TAIL:].lstrip(".")
    stem, dot, suffix = last.partition(".")
    return f"{stem or 'shard'}-{_digest(url)[:16]}{dot}{suffix}"


def _digest(url: str) -> str:
    return hashlib.blake2b(os.fsencode(url), digest_size=16).hexdigest()


class CachedFile:
    """A file that stays in its cache until this is closed, or gone.

    Attributes:
        path: Where it is.
        size: Its bytes.
    """

    __slots__ = ("_handle", "path", "size")

    def __init__(self, path: str, size: int, handle: int = -1) -> None:
        self.path = path
        self.size = size
        self._handle = handle

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # the module may be gone before
        handle, self._handle = self._handle, -1
        if handle >= 0:
            close(handle)

    def close(self) -> None:
        """Let the cache remove it when it needs room. Who has it open reads on."""
        self.__del__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Note(NamedTuple):
    digest: str
    size: int
    url: str


class _NoRoomError(Exception):
    """There is no room for a file."""


@dataclass(frozen=True, slots=True)
class FileCache:
    """A folder of shards, made when something is first kept. Any number of processes may share it; it pickles.

    Attributes:
        folder: Its path.
        limit: The most bytes that all files in it have together, at any time; None for no limit. Files whose last use
            is longest ago go first; never one that is held, nor one that the cache has not put there.
        url_to_name: Gives the name of a url's file, relative to the folder, with ``/`` between its parts. By default
            `cache_name`.
        validate: Is given the path of a file that has come; if it returns false, the file is not kept.
        store: Reads urls; by default the place that each scheme names.
        openers: As `open_stream` takes them.

    Raises:
        ValueError: The limit is not positive.
    """

    folder: Path
    limit: int | None = None
    url_to_name: Callable[[str], str] | None = None
    validate: Callable[[str], bool] | None = None
    store: Store = field(default_factory=AnyStore)
    openers: Openers | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}: must be at least 1, or None for no limit")

    def fetch(self, url: str) -> CachedFile | None:
        """Return the file with a url's bytes, after downloading it if it is not there; local files are where they are.

        Several who want the same file at once, in any process, wait for one to download it.

        Args:
            url: Any that `open_stream` takes, but not standard input.

        Returns:
            The file, or None if it cannot be kept: it is larger than the limit, all that could make room is held, or
            the disk is full. That is logged; the shard can then be read as a stream.

        Raises:
            StorageError: It cannot be read, not all of it came, or the folder cannot be written.
            FormatError: `validate` refuses it.
            ValueError: It is standard input, or its name is the name of another url's file, or leads out of the folder.
        """
        if url == "-":
            raise ValueError("standard input cannot be kept: it comes once")
        if url_scheme(url) in {"", "file"} and not is_stream(url, self.openers):
            return CachedFile(local_path(url), self.store.info(url).size)
        path = self.path_of(url)
        found = self._find(path, url)
        if found is not None:
            return found
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_file(_beside(path, _LOCK))
        except OSError as error:
            raise storage_error(error, str(path)) from error
        if lock is None:
            raise StorageError("the cache's lock was lost", url=str(path))
        try:
            return self._find(path, url) or self._download(url, path)
        except _NoRoomError as error:
            logger.warning("not cached (%s): %s", error, without_secrets(url))
            return None
        finally:
            lock.release(remove=True)

    def path_of(self, url: str) -> Path:
        """Return where a url's file is, or would be.

        Raises:
            ValueError: Its name is empty, hidden, or leads out of the folder.
        """
        name = (self.url_to_name or cache_name)(url)
        parts = PurePosixPath(name).parts
        if not parts or any(part.startswith((".", "/")) or "\\" in part or "\0" in part for part in parts):
            shown = without_secrets(url)
            raise ValueError(f"{name!r} is no name for a file of the cache ({shown}): it must be a plain relative path")
        return self.folder.joinpath(*parts)

    def _find(self, path: Path, url: str) -> CachedFile | None:
        """Open a file that is there, and take note of its use."""
        while True:
            try:
                handle = os.open(path, os.O_RDONLY | _BINARY)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise storage_error(error, str(path)) from error
            kept = CachedFile(str(path), os.fstat(handle).st_size, handle)
            with contextlib.suppress(OSError):  # a file system without locks
                if not (hold_file(handle) and stands_at(handle, path)):
                    kept.close()
                    time.sleep(0.001)  # somebody is just removing it
                    continue
            note = _read_note(path)
            if note is not None and note.digest != _digest(url):
                raise ValueError(
                    f"two urls have one name in the cache, {path.name!r}: {without_secrets(url)} and {note.url}; "
                    "leave url_to_name out, or let it return different names"
                )
            if note is not None and note.size != kept.size:
                what = "not as it was put into the cache, and downloaded again: %s has %d bytes and had %d"
                logger.warning(what, path, kept.size, note.size)
                kept.close()
                path.unlink(missing_ok=True)
                return None
            with contextlib.suppress(OSError):  # a folder that may only be read has no order of use
                os.utime(path)
            return kept

    def _download(self, url: str, path: Path) -> CachedFile:
        expected = None if is_stream(url, self.openers) else self.store.open(url).size
        room = _Room(self.folder, self.limit)
        room.check(expected or 0)
        temporary: Path | None = None
        try:
            temporary, handle = make_temporary(path)
            kept = CachedFile(str(path), 0, handle)
            kept.size = self._write(url, handle, room, expected)
            with room.locked():  # what is left of its room is for the note
                os.ftruncate(handle, kept.size)
                self._check(url, temporary)
                write_atomic(note_path(path), _note_of(url, kept.size))
                if os.name == "nt":
                    kept.close()  # nothing that is open is renamed there
                temporary.replace(path)
                temporary = None
            sync_folder(path.parent)
        except StorageError:
            raise
        except OSError as error:
            if error.errno in _FULL:
                raise _NoRoomError(error.strerror or "the disk is full") from error
            raise storage_error(error, str(path)) from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        return kept

    def _check(self, url: str, path: Path) -> None:
        if self.validate is None or self.validate(str(path)):
            return
        with path.open("rb") as file:
            hint = f"it begins with {file.read(60)!r}"
        what = "what came is not what it should be, and is not kept"
        raise FormatError(what, shard=url, code="not_valid", hint=hint)

    def _write(self, url: str, handle: int, room: _Room, expected: int | None) -> int:
        """Write all bytes of a url to a file; return how many they are."""
        written = 0
        note = len(_note_of(url, 0)) + _DIGITS
        if expected is not None:
            room.reserve(handle, 0, expected + note)
        with open_stream(url, store=self.store, openers=self.openers) as stream:
            while piece := stream.read_some():
                end = written + len(piece)
                if expected is None:
                    room.reserve(handle, written, end + note)
                view = memoryview(piece)
                while view:
                    view = view[os.write(handle, view) :]
                written = end
        if expected is not None and written != expected:
            raise TransferError(f"{written} bytes came of {expected}", url=url)
        os.fsync(handle)
        return written


class _Room:
    """Room in the folder for one file, which is as long at any time as what it has been promised."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self._folder = folder
        self._limit = limit
        self._promised = 0

    def check(self, size: int) -> None:
        """Refuse a file that is larger than the limit."""
        if self._limit is not None and size > self._limit:
            raise _NoRoomError(f"it has {size} bytes, of at most {self._limit}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let nobody else take room meanwhile."""
        lock = None if self._limit is None else lock_file(self._folder / _LOCK)
        with lock or contextlib.nullcontext():
            yield

    def reserve(self, handle: int, written: int, end: int) -> None:
        """Make the file as long as it will be, a little longer if that is not known, after removing others for it."""
        if self._limit is None or end <= self._promised:
            return
        self.check(end)
        with self.locked():
            spare = max(0, min(end + (_STEP if written else 0), self._limit) - end)
            files = list(_iter_files(self._folder))
            used = sum(status.st_size for _, status in files) - self._promised
            left = self._remove_others(files, used + end + spare - self._limit)
            if left > spare:
                raise _NoRoomError("everything that could make room is in use, or was put there by others")
            self._promised = end + spare - max(left, 0)
            os.ftruncate(handle, self._promised)

    def _remove_others(self, files: list[tuple[Path, os.stat_result]], excess: int) -> int:
        """Remove files, those first whose last use is longest ago, for so many bytes; return how many are missing."""
        for path, status in sorted(files, key=lambda found: found[1].st_mtime_ns):
            if excess <= 0:
                break
            note = note_path(path)
            if path.name.startswith(".") or not note.exists():
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours to remove
                if remove_unheld(path):
                    excess -= status.st_size + note.stat().st_size
                    note.unlink(missing_ok=True)
        return excess


def _iter_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(OSError):
                yield path, path.stat(follow_symlinks=False)


def note_path(path: Path) -> Path:
    """Return where the note lies of where a file came from."""
    return _beside(path, _NOTE)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}{kind}")


def _note_of(url: str, size: int) -> bytes:
    return orjson.dumps({"digest": _digest(url), "size": size, "url": without_secrets(url)})


def _read_note(path: Path) -> _Note | None:
    """Return where a file came from; None if that is not known, because others have put it there."""
    try:
        note = orjson.loads(note_path(path).read_bytes())
        return _Note(str(note["digest"]), int(note["size"]), str(note["url"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
