"""Shards while they are written: files under hidden names that get their own names once they are whole."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardset.errors import StorageError
from shardset.files import make_temporary, sync_folder
from shardset.formats.patterns import expand_count, parse_numbered
from shardset.storage.local import local_path, storage_error
from shardset.storage.store import is_remote, url_scheme

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from shardset.storage.store import Store

_COUNTED: Final = re.compile(r"(.*[^/])@([0-9]{1,18}|\*)((?:\.[^/@]*)?)", re.DOTALL)
_SUFFIXED: Final = re.compile(r"(.*[^/])(\.[A-Za-z]\w*(?:\.(?:gz|zlib|zz))?)", re.DOTALL)
_PIECE: Final = 4 << 20
_BEHIND: Final = 16 << 20
"""Bytes that may wait for the disk, before it is told to begin with them."""


class PendingFile:
    """A file in the making. It has a hidden name beside its place, or in the system's folder if that is elsewhere.

    Args:
        url: Where it is to stand: a path, or a url that `store` can write to.
        store: Takes what is to stand elsewhere.
        holds: Keep the file open between writes. Many files at once are more than a process may hold.

    Attributes:
        url: As given.
        size: Bytes written.

    Raises:
        StorageError: It cannot be made.
    """

    def __init__(self, url: str, store: Store, *, holds: bool = True) -> None:
        self.url = url
        self.size = 0
        self._begun = 0
        self._store = store
        self._holds = holds
        # A bare handle: what a file object gathers would be written a second time by a forked child that ends.
        self._handle = -1
        with translated(url):
            if is_remote(url) or url_scheme(url) == "memory":
                self._handle, name = tempfile.mkstemp(prefix="shardset-", suffix=".tmp")
                self._temporary = Path(name)
            else:
                path = Path(local_path(url))
                make_folder(path.parent)
                self._temporary, self._handle = make_temporary(path)
        if not holds:
            self._let_go()

    def write(self, data: Buffer) -> int:
        """Write behind what was written before, and return how many bytes."""
        with translated(self.url):
            self._reopen()
            size = write_all(self._handle, data)
        self.size += size
        if self.size - self._begun >= _BEHIND:
            self._begin_writeback()
        if not self._holds:
            self._let_go()
        return size

    def flush(self) -> None:
        """Do nothing: what was written is with the system."""

    def sync(self) -> None:
        """Bring everything to the disk, and let go of the file until more is written."""
        with translated(self.url):
            self._reopen()
            os.fsync(self._handle)
        self._let_go()

    def publish(self, url: str | None = None) -> None:
        """Give the file its name, or another one in the same folder, in place of whatever has it.

        Raises:
            StorageError: It cannot be flushed, renamed or sent.
        """
        url = self.url if url is None else url
        self.sync()
        if is_remote(url) or url_scheme(url) == "memory":
            self._store.write(url, self._pieces())
            self._temporary.unlink(missing_ok=True)
            return
        with translated(url):
            path = Path(local_path(url))
            self._temporary.replace(path)
            sync_folder(path.parent)

    def discard(self) -> None:
        """Remove the file, if it has no name of its own yet."""
        self._let_go()
        self._temporary.unlink(missing_ok=True)

    def _reopen(self) -> None:
        if self._handle < 0:
            self._handle = os.open(self._temporary, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))

    def _begin_writeback(self) -> None:
        """Let the disk begin with what was written, so that little is left to wait for in the end."""
        if hasattr(os, "posix_fadvise"):
            # Linux begins to write out what it is told is not needed, and forgets only what is on the disk already.
            os.posix_fadvise(self._handle, self._begun, self.size - self._begun, os.POSIX_FADV_DONTNEED)
        self._begun = self.size

    def _let_go(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _pieces(self) -> Iterator[bytes]:
        with translated(self.url), self._temporary.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece


def make_folder(folder: Path) -> None:
    """Make a folder and those that it lies in, where they are missing.

    Raises:
        OSError: It cannot be made, or a file stands there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def write_all(handle: int, data: Buffer) -> int:
    """Write all of some bytes to an open file, and return how many that are."""
    rest = memoryview(data).cast("B")
    size = len(rest)
    while len(rest):
        rest = rest[os.write(handle, rest) :]
    return size


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn errors of the system into ours, which say where they happened."""
    try:
        yield
    except OSError as error:
        ours = storage_error(error, url)
        if ours is error:
            raise
        if error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}:
            ours.hint = "free some space and write it again: nothing of it was kept"
        raise ours from error


class ShardNames:
    """The names of shards that are written together: ``out-00000-of-00064.tfrecord``.

    Args:
        url: ``out@64.tfrecord`` for a set of 64; ``out@*.tfrecord``, or ``out.tfrecord`` if `is_set`, for a set whose
            size is known in the end; anything else is one file of that name.
        is_set: Make a set of what has no count.

    Attributes:
        total: How many shards; None while nobody knows, 1 for one file.
        is_one: It is one file, without numbers in its name.

    Raises:
        ValueError: A count is zero, or above ten million.
    """

    def __init__(self, url: str, *, is_set: bool = False) -> None:
        self._url = url
        match = _COUNTED.fullmatch(url)
        self.is_one = match is None and not is_set
        self.total: int | None = 1 if self.is_one else None
        if match is not None:
            self._prefix, digits, self._suffix = match.groups()
            if digits != "*":
                self.total = len(expand_count(url))
        else:
            match = _SUFFIXED.fullmatch(url)
            self._prefix, self._suffix = (url, "") if match is None else (match[1], match[2])

    @property
    def first_url(self) -> str:
        """A name in the folder of all of them, to make hidden files beside."""
        return self._url

    def urls(self, total: int) -> list[str]:
        """Return all names of a set of `total` shards."""
        return [self._url] if self.is_one else expand_count(f"{self._prefix}@{total}{self._suffix}")

    def others(self, total: int | None) -> list[Path]:
        """Return the files on this machine that belong to a set of this name and of another size than `total`."""
        if self.is_one or is_remote(self._url):
            return []
        prefix = Path(local_path(self._prefix))
        try:
            files = sorted(prefix.parent.iterdir())
        except OSError:
            return []
        found = []
        for file in files:
            name = parse_numbered(file.name)
            if name is not None and (name.prefix, name.suffix) == (prefix.name, self._suffix) and name.total != total:
                found.append(file)
        return found

    def refuse_others(self) -> None:
        """Refuse to write beside a set of this name and of another size, with which this one would be mixed up.

        Raises:
            StorageError: There is one.
        """
        for file in self.others(self.total):
            error = StorageError(
                f"not written: shards of another set with this name are there, such as {file.name}",
                url=self._url,
                hint="remove them, or choose another name",
            )
            error.errno = errno.EEXIST
            raise error
