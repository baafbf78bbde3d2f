"""The files of a cache's folder: those that are read, those that are written, and the count of their bytes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import TransferError
from shardset.files import hold_file, is_held, lock_file

from .cache_entry import DIGEST_SIZE, EntryInfo, pack_footer, read_footer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardset.files import FileLock

    from .cache_folder import CacheFolder

BLOCK: Final = ".block"
PART: Final = ".part"
LOCK: Final = ".lock"
STATE: Final = "state"
STATE_BYTES: Final = 21
BINARY: Final = getattr(os, "O_BINARY", 0)
PROGRESS_BYTES: Final = 8
"""The last bytes of a part say how many have arrived, as a little-endian number."""
_OURS: Final = re.compile(r"([0-9a-f]{64})(\.block|\.part|\.lock)")
_PROGRESS_EVERY: Final = 1 << 20


class NotCachedError(Exception):
    """Something cannot be kept in the cache, and is read from its place instead. Never leaves the package.

    Attributes:
        reason: ``"too_big"``, ``"no_room"`` (all else is in use), ``"disk"`` (the folder cannot be used) or
            ``"no_identity"``.
        detail: More about it, for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class DamagedEntryError(Exception):
    """An entry was cut or written over. Never leaves the package."""


class Block:
    """An entry open for reading, which holds its file as long as this or any view of it lives.

    Attributes:
        name: The entry.
        used: When it was last used, by its file, in seconds since 1970.
        info: What it holds.
    """

    __slots__ = ("_map", "_size", "_view", "info", "name", "used")

    def __init__(self, name: str, handle: int) -> None:
        self.name = name
        status = os.fstat(handle)
        self.used = status.st_mtime
        self._size = status.st_size
        try:
            self.info = read_footer(handle, self._size)
            # The map keeps a duplicate of the handle, and with it the hold.
            self._map = mmap.mmap(handle, self.info.length, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise DamagedEntryError(str(error)) from error
        self._view = memoryview(self._map)

    def view(self) -> memoryview:
        """Return the block's bytes.

        Raises:
            DamagedEntryError: The file was cut since it was opened. Touching what is gone would end the process.
        """
        if self._map.size() < self._size:
            raise DamagedEntryError(f"cut from {self._size} to {self._map.size()} bytes")
        return self._view


class Part:
    """An entry that is being downloaded: its bytes come in order, then it is published or discarded."""

    def __init__(
        self,
        owner: CacheFolder,
        claim: FileLock,
        info: EntryInfo,
        *,
        name: str,
        handle: int,
        total: int,
        stated: str | None,
    ) -> None:
        self.name = name
        self.info = info
        self._owner = owner
        self._claim = claim
        self._handle = handle
        self._total = total
        self._stated = stated
        self.restart()

    def restart(self) -> None:
        """Forget what was written: the first byte comes next."""
        self.done = 0
        self._noted = 0
        self._digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
        kind, _, self._stated_digest = (self._stated or "").partition(":")
        self._check: Any = hashlib.new(kind, usedforsecurity=False) if kind in {"md5", "sha256"} else None

    def write(self, piece: memoryview) -> None:
        """Take the next bytes.

        Raises:
            TransferError: They are more than the entry has.
            NotCachedError: The disk does not take them.
        """
        if self.done + len(piece) > self.info.length:
            raise TransferError("more bytes came than the object has", url=self.info.url)
        self._digest.update(piece)
        if self._check is not None:
            self._check.update(piece)
        try:
            _write_at(self._handle, self.done, piece)
            self.done += len(piece)
            if self.done - self._noted >= _PROGRESS_EVERY:
                self._noted = self.done
                note = self.done.to_bytes(PROGRESS_BYTES, "little")
                _write_at(self._handle, self._total - PROGRESS_BYTES, memoryview(note))
        except OSError as error:
            raise unusable(error) from error

    def publish(self) -> None:
        """Check the bytes, flush them to the disk, and let everybody see them.

        The entry is held until `close`, so that whoever downloaded it can open it before it goes again.

        Raises:
            TransferError: They are too few, or not those that their place states.
            NotCachedError: The disk does not take them.
        """
        if self.done != self.info.length:
            raise TransferError(f"{self.done} bytes came of {self.info.length}", url=self.info.url)
        if self._check is not None and self._check.hexdigest() != self._stated_digest:
            raise TransferError(
                f"the bytes that came have not the digest that their place states ({self._stated}), "
                f"but {self._check.hexdigest()}",
                url=self.info.url,
                hint="the object or the connection to it is damaged; nothing was kept",
            )
        info = replace(self.info, digest=self._digest.hexdigest(), created=int(time.time()))
        path = self._owner.path_of(self.name, PART)
        try:
            _write_at(self._handle, self.info.length, memoryview(pack_footer(info)))
            os.fsync(self._handle)
            hold_file(self._handle)
            if os.name == "nt":  # which renames no file that is open
                self._close_handle()
            now = time.time_ns()  # finer than the clock that the system stamps files with
            os.utime(path, ns=(now, now))
            with locked(self._owner.folder):  # or whoever counts the files might miss it
                path.replace(self._owner.path_of(self.name, BLOCK))
        except OSError as error:
            raise unusable(error) from error
        self._claim.release(remove=True)

    def close(self) -> None:
        """Let go of the entry after it was published."""
        self._close_handle()

    def discard(self) -> None:
        """Remove what has been written, unless it was published, and let others try."""
        self._close_handle()
        if self._claim.handle < 0:
            return
        with contextlib.suppress(OSError), self._owner.account() as account:
            account.remove(self._owner.path_of(self.name, PART))
        with contextlib.suppress(OSError):
            self._claim.release(remove=True)

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class Account:
    """The count in the state file, whose lock is held."""

    __slots__ = ("_handle", "used")

    def __init__(self, handle: int) -> None:
        self._handle = handle
        os.lseek(handle, 0, os.SEEK_SET)
        text = os.read(handle, STATE_BYTES)
        self.used = int(text) if len(text) == STATE_BYTES and text.strip().isdigit() else -1

    def set(self, used: int) -> None:
        """Say that there are `used` bytes."""
        self.used = used
        _write_at(self._handle, 0, memoryview(b"%020d\n" % used))

    def add(self, count: int) -> None:
        """Say that there are `count` bytes more."""
        self.set(max(0, self.used + count))

    def forget(self) -> None:
        """Let whoever comes next count anew."""
        _write_at(self._handle, 0, memoryview(b"?" * STATE_BYTES))

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there, and count it no more."""
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self.add(-size)


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """A published entry, as a look at the folder finds it.

    Attributes:
        name: Its file's name without the suffix.
        bytes: What its file takes.
        used: When it was last used, in seconds since 1970.
        is_in_use: Somebody reads it now.
        info: What it says of itself; None if it is damaged.
    """

    name: str
    bytes: int
    used: float
    is_in_use: bool
    info: EntryInfo | None


def iter_entries(folder: Path) -> Iterator[FoundEntry]:
    """Yield all published entries, in no order."""
    for name, kind, status in iter_files(folder):
        if kind != BLOCK:
            continue
        path, info = folder / f"{name}{BLOCK}", None
        with contextlib.suppress(FileNotFoundError):
            is_in_use = is_held(path)
            with contextlib.suppress(ValueError), path.open("rb") as file:
                info = read_footer(file.fileno(), status.st_size)
            yield FoundEntry(name, status.st_size, status.st_mtime, is_in_use, info)


def iter_files(folder: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield name, kind (`BLOCK`, `PART`, `LOCK`) and status of the files that are the cache's, and of no others."""
    try:
        found = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with found:
        for entry in found:
            match = _OURS.fullmatch(entry.name)
            if match:
                with contextlib.suppress(FileNotFoundError):
                    yield match[1], match[2], entry.stat(follow_symlinks=False)


def remove_leftover(path: Path) -> bool:
    """Remove a part or a lock, and what belongs to it, unless its downloader lives; tell whether it is gone."""
    lock = lock_file(path.with_suffix(LOCK), wait=False)
    if lock is None:
        return False
    try:
        path.with_suffix(PART).unlink(missing_ok=True)
    finally:
        lock.release(remove=True)
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[FileLock]:
    """Hold the lock without which no file of the folder is added, published or removed. Shortly."""
    lock = lock_file(folder / STATE)
    assert lock is not None  # noqa: S101 - it was waited for
    with lock:
        yield lock


def forget_count(lock: FileLock) -> None:
    """Let whoever adds an entry next count all bytes anew. For who has removed files under the lock."""
    Account(lock.handle).forget()


def allocate(handle: int, size: int) -> None:
    """Take the disk's blocks now, so that a full disk is known before the bytes come."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:  # some file systems cannot
            raise


def _write_at(handle: int, offset: int, piece: memoryview) -> None:
    os.lseek(handle, offset, os.SEEK_SET)
    while piece:
        piece = piece[os.write(handle, piece) :]


def unusable(error: OSError) -> NotCachedError:
    """Return what it means that the folder, or its disk, refuses."""
    return NotCachedError("disk", (error.strerror or str(error)).lower())
