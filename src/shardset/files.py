"""Files that several processes share: written whole or not at all, locked, and kept while somebody reads them.

Locks are those of `flock`, or of `msvcrt` on Windows. They end with the process that holds them, however it ends.
What a process leaves that is killed while it writes, the next one removes that writes into the same folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import sys
import time
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_BINARY: Final = getattr(os, "O_BINARY", 0)
_PAUSE: Final = 0.005
# Windows forbids others to read what is locked, so a byte is locked that no file has; its `locking` knows 31 bits.
_FAR: Final = 0x7FFF_0000

_TEMPORARY: Final = re.compile(r"\.([0-9]+)-([0-9a-f]*)-[0-9a-f]{12}\.tmp", re.ASCII)
_DAY: Final = 86_400

# Handles of exclusive locks. A forked child closes its copies, or the locks would outlive their owner.
_exclusive: set[int] = set()
_leaves_parent = False


def cache_root() -> Path:
    """Return the folder for what is kept between runs: ``$SHARDSET_CACHE``, else below the user's cache folder."""
    chosen = os.environ.get("SHARDSET_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "shardset" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "shardset"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardset"


@contextlib.contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing that appears under its name only when the block ends without an error.

    The bytes go to a temporary name in the same folder, are flushed to the disk, and are then renamed. If the block
    raises, or the disk is full, the temporary file is removed and whatever was at `path` stays as it was.

    Raises:
        OSError: The folder does not exist, is not writable, or the disk is full.
    """
    path = Path(path)
    temporary = _temporary_beside(path)
    try:  # from before there is a file: a signal may raise at any moment
        with os.fdopen(_open_new(temporary), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def make_temporary(path: Path) -> tuple[Path, int]:
    """Make the file that is to be renamed to `path`: hidden, in the same folder, open for writing.

    The first time that this process does so in a folder, what dead processes left there is removed.

    Raises:
        OSError: The folder does not exist, or is not writable.
    """
    temporary = _temporary_beside(path)
    return temporary, _open_new(temporary)


def _temporary_beside(path: Path) -> Path:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # the rename would put a file in place of a device
            raise OSError(errno.EINVAL, "not a regular file, which alone can be replaced", str(path))
    _remove_abandoned_once(os.path.abspath(path.parent))  # noqa: PTH100 - ten times as fast
    return path.parent / f".{os.getpid()}-{_machine()}-{secrets.token_hex(6)}.tmp"


def _open_new(path: Path) -> int:
    # With the mode of a plain open() and not by tempfile, whose files stay private after the rename.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    with contextlib.suppress(OSError):  # a file system without locks
        hold_file(handle)
    return handle


def remove_abandoned(folder: str | os.PathLike[str]) -> int:
    """Remove the files of `make_temporary` whose processes were killed before they could rename or remove them.

    A process of this machine is looked for by its number, which is part of the name. One of another machine or
    container, or of before the last start, cannot be, and where that cannot be told (only Linux tells), none can: what
    they left goes when it was not written to for a day. What a child of a dead process still has open stays.

    Returns:
        How many were removed. A folder that is not there, or not ours to write to, has none.
    """
    removed = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if not (name.startswith(".") and name.endswith(".tmp")):
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, not ours to remove, or on a file system without locks
                removed += _is_abandoned(entry) and remove_unheld(entry.path)
    if removed:
        logger.info("removed %d files that killed processes did not finish, in %s", removed, os.fspath(folder))
    return removed


@lru_cache(4096)
def _remove_abandoned_once(folder: str) -> None:
    remove_abandoned(folder)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    match = _TEMPORARY.fullmatch(entry.name)
    if match is None or not entry.is_file(follow_symlinks=False):
        return False
    process, machine = match.groups()
    if machine and machine == _machine():
        return not _is_running(int(process))
    return entry.stat(follow_symlinks=False).st_mtime < time.time() - _DAY


def _machine() -> str:
    """Return a name for where process numbers mean what they mean here; empty if that cannot be told."""
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        numbering = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - as fast as can be
    except OSError:
        return ""
    return hashlib.blake2b(b"%b %d" % (start, numbering), digest_size=6).hexdigest()


def _is_running(process: int) -> bool:
    """Tell whether a process of this machine, which is Linux, can still do anything."""
    try:
        os.kill(process, 0)  # asks only, even for those that /proc does not show to everybody
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return state not in {b"Z", b"X"}  # one that has ended, and whose parent has not asked how


def write_atomic(path: str | os.PathLike[str], data: Buffer) -> None:
    """Write `data` to `path` as `open_atomic` does."""
    with open_atomic(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Flush the renames in a folder themselves, where the system can open folders (Windows cannot)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class FileLock:
    """The lock on a file, held by this process alone, and not by its children. Made by `lock_file`; thread-safe.

    Attributes:
        path: The file.
        handle: Its descriptor, for reading and writing, valid until the lock is released.
    """

    __slots__ = ("_owner", "handle", "path")

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.handle = handle
        self._owner = os.getpid()

    def release(self, *, remove: bool = False) -> None:
        """Let others have it; a second time does nothing. With `remove` the file goes first, if it can."""
        handle, self.handle = self.handle, -1
        if handle < 0 or self._owner != os.getpid():
            return
        if remove and os.name != "nt":
            self.path.unlink(missing_ok=True)
        _unlock(handle)
        if remove and os.name == "nt":
            with contextlib.suppress(OSError):  # others have opened it meanwhile
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_file(path: str | os.PathLike[str], *, wait: bool = True) -> FileLock | None:
    """Lock the file that stands at `path`, made empty if there is none, against all who lock it in this way.

    Other threads of this process are locked out like other processes.

    Args:
        path: The file. Its folder must exist.
        wait: Wait until it is free; otherwise return None if it is not.

    Raises:
        OSError: The file cannot be made, or its file system has no locks.
    """
    path = Path(path)
    _leave_locks_to_parent()
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        _exclusive.add(handle)
        try:
            is_ours = _take(handle, shared=False, wait=wait)
        except BaseException:
            _unlock(handle)
            raise
        if is_ours and stands_at(handle, path):
            return FileLock(path, handle)
        _unlock(handle)  # whoever had it may have removed it: then the lock is on a file that nobody finds any more
        if not is_ours and not wait:
            return None


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Tell whether somebody, also in this process, holds the lock of `lock_file` on `path`."""
    try:
        handle = os.open(path, os.O_RDONLY | _BINARY)
    except FileNotFoundError:
        return False
    try:
        return not _take(handle, shared=True, wait=False)
    finally:
        os.close(handle)


def hold_file(handle: int) -> bool:
    """Keep an open file from being removed by `remove_unheld`; False if that is just removing it.

    The hold lasts until `handle` and all duplicates of it are closed: a memory map has one, and a forked child.

    Raises:
        OSError: Its file system has no locks.
    """
    if not _has_flock():
        return True  # Windows removes no file that is open
    return _take(handle, shared=True, wait=False)


def is_held(path: str | os.PathLike[str]) -> bool:
    """Tell whether `hold_file` keeps the file, or `lock_file` locks it.

    Raises:
        FileNotFoundError: There is no such file.
    """
    handle = os.open(path, os.O_RDONLY | _BINARY)
    try:
        return not _take(handle, shared=False, wait=False)
    finally:
        os.close(handle)


def remove_unheld(path: str | os.PathLike[str]) -> bool:
    """Remove a file unless somebody holds it; False if so.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It may not be removed.
    """
    if not _has_flock():
        try:
            Path(path).unlink()
        except PermissionError:
            return False
        return True
    handle = os.open(path, os.O_RDONLY | _BINARY)
    try:
        if not _take(handle, shared=False, wait=False):
            return False
        Path(path).unlink()
    finally:
        os.close(handle)
    return True


def stands_at(handle: int, path: str | os.PathLike[str]) -> bool:
    """Tell whether the open file is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))  # noqa: PTH116 - half the time of Path.stat
    except FileNotFoundError:
        return False


def _take(handle: int, *, shared: bool, wait: bool) -> bool:
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError:
        return _take_by_msvcrt(handle, wait=wait)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _take_by_msvcrt(handle: int, *, wait: bool) -> bool:
    msvcrt = import_module("msvcrt")
    while True:
        try:
            os.lseek(handle, _FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            if not wait:
                return False
            time.sleep(_PAUSE)
        else:
            return True


def _unlock(handle: int) -> None:
    _exclusive.discard(handle)
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError:
        pass
    else:
        with contextlib.suppress(OSError):
            # Closing would not do if another thread has just forked, whose child has not closed its copy yet.
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _has_flock() -> bool:
    try:
        import fcntl  # noqa: F401, PLC0415 - Windows has none
    except ImportError:
        return False
    return True


def _leave_locks_to_parent() -> None:
    global _leaves_parent  # noqa: PLW0603 - once a process; a child inherits it together with what it registered
    if not _leaves_parent:
        _leaves_parent = True
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for handle in _exclusive:
        os.close(handle)
    _exclusive.clear()
