"""Index files that are edited together: read, written under temporary names, and put in place at the very end."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from shardset.errors import ChangedError, StorageError
from shardset.files import make_temporary, sync_folder
from shardset.storage.local import LocalStore, local_path, storage_error

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

    from typing_extensions import Buffer


_FLUSHES: Final = 4


class Replacements:
    """Files of this machine that take their places together, once all of them are written and flushed.

    Nothing is seen of them before `commit`: an error, a full disk or a kill until then leaves every file as it was.
    From then on only renames are left to do, each of which puts a whole file in the place of another.

    Used as a context; what is not committed when it ends is removed. A link is replaced by a file, and what it leads
    to stays as it is. The permissions of a file that is replaced are kept.
    """

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}
        self._pending: dict[Path, Path] = {}
        self._flushes: list[Future[None]] = []
        self._threads: ThreadPoolExecutor | None = None

    def read(self, url: str) -> bytes:
        """Read a file. If it is written again, `commit` will refuse to do so if somebody else did meanwhile.

        Raises:
            StorageError: It cannot be read.
        """
        payload, version = read_version(url)
        self.expect(url, version)
        return payload

    def expect(self, url: str, version: str) -> None:
        """Say which version of a file was read, as `read_version` gave it, to what is written in its place."""
        self._versions[str(Path(local_path(url)))] = version

    def write(self, url: str, payload: Buffer) -> None:
        """Write what is to be the content of a file, under a temporary name; missing folders are made.

        Raises:
            ValueError: It was written before.
            StorageError: It cannot be written.
        """
        path = Path(local_path(url))
        if path in self._pending:
            raise ValueError(f"{path} is written twice")
        try:
            mode = _mode_of(path)
            if mode is None:
                path.parent.mkdir(parents=True, exist_ok=True)
            temporary, handle = make_temporary(path)
            self._pending[path] = temporary
            with os.fdopen(handle, "wb") as file:
                if mode is not None:
                    temporary.chmod(mode)
                file.write(payload)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_FLUSHES)
            self._flushes.append(self._threads.submit(_flush, temporary))
        except OSError as error:
            raise storage_error(error, url) from error

    def commit(self) -> None:
        """Put all that was written in its place.

        Raises:
            ChangedError: A file was changed after it was read. None is replaced.
            StorageError: Flushing failed, and none is replaced; or replacing did, and the message says how many were.
        """
        count = len(self._pending)
        try:
            for flush in self._flushes:
                flush.result()
            self._flushes.clear()
            for path in self._pending:
                self._check_unchanged(path)
            folders = {path.parent for path in self._pending}
            for path, temporary in [*self._pending.items()]:
                temporary.replace(path)
                del self._pending[path]
            for folder in folders:
                sync_folder(folder)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raised = storage_error(error, str(next(iter(self._pending), "")))
            if len(self._pending) < count:
                raised.message += f"; {count - len(self._pending)} of {count} files are replaced"
            raise raised from error

    def _check_unchanged(self, path: Path) -> None:
        known = self._versions.get(str(path))
        if known is not None and LocalStore().info(str(path)).identity != known:
            raise ChangedError("not written: it was changed meanwhile", url=str(path), hint="do it again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        for temporary in self._pending.values():
            temporary.unlink(missing_ok=True)
        self._pending.clear()


def read_version(url: str) -> tuple[bytes, str]:
    """Read a file of this machine, and tell which version it is. It is not kept open.

    Raises:
        StorageError: It cannot be read.
    """
    reader = LocalStore(mmap=False).open(url)
    return reader.read(0, reader.size), reader.identity


def _mode_of(path: Path) -> int | None:
    """Return the permissions of a file, or None if there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes only what it may write
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
