"""What people do with a cache's folder: look at it, clear it, check it. It may be in use meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardset.errors import NotFoundError
from shardset.files import cache_root, hold_file, remove_unheld

from .cache_entry import DIGEST_SIZE, EntryInfo, read_footer
from .cache_files import BINARY, BLOCK, FoundEntry, forget_count, iter_entries, iter_files, locked, remove_leftover

if TYPE_CHECKING:
    from collections.abc import Iterator

_WINDOW: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `clear` did.

    Attributes:
        removed: Entries removed.
        bytes: Bytes that their files had.
        in_use: Entries that stayed because somebody reads them.
        leftovers: Files of downloads that were killed, removed.
    """

    removed: int
    bytes: int
    in_use: int
    leftovers: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify` found.

    Attributes:
        checked: Entries looked at.
        bytes: Bytes that their files have.
        damaged: Those that are not what they were when they were published; they are removed.
        leftovers: Files of downloads that were killed, removed.
    """

    checked: int
    bytes: int
    damaged: tuple[FoundEntry, ...]
    leftovers: int


def default_folder() -> Path:
    """Return where shards are cached unless another folder is named."""
    return cache_root() / "shards"


def list_entries(folder: str | os.PathLike[str]) -> list[FoundEntry]:
    """Return all entries, the last used first.

    Raises:
        NotFoundError: There is no such folder.
    """
    return sorted(iter_entries(_existing(folder)), key=lambda entry: (-entry.used, entry.name))


def clear(folder: str | os.PathLike[str], *, older_than: float = 0.0) -> Cleared:
    """Remove entries that nobody reads now, and what killed downloads left. No other file is touched.

    Args:
        folder: The cache's folder.
        older_than: Only entries whose last use is at least so many seconds ago.

    Raises:
        NotFoundError: There is no such folder.
        OSError: It cannot be written.
    """
    path = _existing(folder)
    before = time.time() - older_than
    removed = size = in_use = 0
    with _changing(path):
        leftovers = _remove_leftovers(path)
        for name, kind, status in iter_files(path):
            if kind == BLOCK and (older_than <= 0 or status.st_mtime <= before):
                with contextlib.suppress(FileNotFoundError):
                    if remove_unheld(path / f"{name}{BLOCK}"):
                        removed += 1
                        size += status.st_size
                    else:
                        in_use += 1
    return Cleared(removed, size, in_use, leftovers)


def verify(folder: str | os.PathLike[str]) -> Verified:
    """Read all entries, compare them with their digests, and remove those that differ, and what killed downloads left.

    A damaged entry goes even while somebody reads it, so that nobody else does; its reader keeps what it has.

    Raises:
        NotFoundError: There is no such folder.
        OSError: It cannot be read or written.
    """
    path = _existing(folder)
    checked = size = 0
    damaged = []
    for entry in iter_entries(path):
        with contextlib.suppress(FileNotFoundError):
            file = path / f"{entry.name}{BLOCK}"
            is_good = _is_good(file)
            checked += 1
            size += entry.bytes
            if not is_good:
                damaged.append(entry)
                with _changing(path):
                    file.unlink(missing_ok=True)
    with _changing(path):
        leftovers = _remove_leftovers(path)
    return Verified(checked, size, tuple(damaged), leftovers)


def _existing(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise NotFoundError("no such folder", url=str(path), hint="a cache's folder is made when something is kept")
    return path


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[None]:
    with locked(folder) as lock:
        forget_count(lock)
        yield


def _remove_leftovers(folder: Path) -> int:
    return sum(kind != BLOCK and remove_leftover(folder / f"{name}{kind}") for name, kind, _ in iter_files(folder))


def _is_good(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY | BINARY)
    with os.fdopen(handle, "rb") as file:
        hold_file(handle)  # what is being removed just now is read to its end all the same
        try:
            info: EntryInfo = read_footer(handle, os.fstat(handle).st_size)
        except ValueError:
            return False
        file.seek(0)
        digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
        left = info.length
        while left:
            piece = file.read(min(_WINDOW, left))
            if not piece:
                return False
            digest.update(piece)
            left -= len(piece)
        return digest.hexdigest() == info.digest
