"""Where a conversion puts its shards: a folder, a dataset repository of the Hugging Face Hub, or both."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Final

from shardset.errors import MissingExtraError, StateError, StorageError
from shardset.files import lock_file, sync_folder
from shardset.storage.local import storage_error

from .optimize_state import STATE_NAME, OptimizeState, parse_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    HubClasses = tuple[Any, Any, Any, Any, Any]

_LOCK_NAME: Final = ".shardset-optimize.lock"


def require_hub() -> HubClasses:
    """Return what conversions use of ``huggingface_hub``, in webshart's order.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        hub = import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtraError("conversions to the Hub need huggingface_hub", extra="hub") from error
    names = ("HfApi", "CommitOperationAdd", "hf_hub_download", "hf_hub_url", "get_hf_file_metadata")
    api, operation, download, url, metadata = (getattr(hub, name) for name in names)
    return api, operation, download, url, metadata


class Folder:
    """The shards' folder on this machine. A file appears in it under its name once it is whole and flushed.

    Each has one hidden name of its own until then, so that a killed run leaves nothing that the next one, which writes
    the same files, would not replace.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs from writing into it, where its file system has locks.

        Raises:
            StorageError: Another run writes into it, or it cannot be made.
        """
        with _translated(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_file(self.path / _LOCK_NAME, wait=False)
        except OSError:
            yield
            return
        if lock is None:
            raise StorageError("another conversion writes into this folder", url=str(self.path), hint="wait for it")
        try:
            yield
        finally:
            lock.release(remove=True)

    def load_state(self) -> OptimizeState | None:
        """Return where the last run came to, or None if there was none.

        Raises:
            StateError: The state file is none, or shards are there without it.
            StorageError: It cannot be read.
        """
        path = self.path / STATE_NAME
        with _translated(path):
            if path.is_file():
                return parse_state(path.read_bytes(), path=str(path))
        if any((self.path / f"shard-00000.{suffix}").exists() for suffix in ("tar", "json")):
            raise StateError(
                f"optimized shards exist at the destination but the resume state is missing, in {self.path}",
                hint="restore the state or choose a different destination/output_prefix",
            )
        return None

    @contextmanager
    def writing(self, name: str) -> Iterator[tuple[Path, IO[bytes]]]:
        """Give the hidden name of a file and the file, open for writing; it is flushed in the end.

        If the block raises, the file is removed.

        Raises:
            StorageError: It cannot be written.
        """
        partial = self._partial(name)
        try:
            with _translated(self.path / name), partial.open("wb") as file:
                yield partial, file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def publish(self, *names: str) -> list[Path]:
        """Give files their names, in this order, and return their paths.

        Raises:
            StorageError: One cannot be renamed.
        """
        paths = []
        for name in names:
            paths.append(self.path / name)
            with _translated(paths[-1]):
                self._partial(name).replace(paths[-1])
        sync_folder(self.path)
        return paths

    def discard(self, *names: str) -> None:
        """Remove files that have not got their names."""
        for name in names:
            self._partial(name).unlink(missing_ok=True)

    def remove(self, *names: str) -> None:
        """Remove files."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def write_state(self, state: OptimizeState) -> Path:
        """Write the state file under its hidden name, and return that.

        Raises:
            StorageError: It cannot be written.
        """
        with self.writing(STATE_NAME) as (path, file):
            file.write(state.dump())
        return path

    def _partial(self, name: str) -> Path:
        return self.path / f".{name.removeprefix('.')}.partial"


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn errors of the system into ours."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, str(path)) from error


class HubRepository:
    """A dataset repository of the Hub. Every shard goes there in one commit with its index and the state.

    Args:
        repo_id: ``"owner/name"``; made if it is not there.
        prefix: Folder in it.
        revision: Its branch.
        token: Token for the Hub.
        private: Whether a repository that is made is private.
        require: Gives the classes of ``huggingface_hub``.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        prefix: str,
        revision: str,
        token: str | None,
        private: bool | None,
        require: Callable[[], HubClasses],
    ) -> None:
        hf_api, self._operation, self._download, _, _ = require()
        self._repo_id = repo_id
        self._prefix = prefix
        self._where = {"repo_type": "dataset", "revision": revision, "token": token}
        self._api = hf_api(token=token)
        self._api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True, token=token)

    def load_state(self) -> OptimizeState | None:
        """Return where the last run came to, or None if there was none.

        Raises:
            StateError: The state file is none, or shards are there without it.
        """
        path = self._path(STATE_NAME)
        if self._exists(path):
            return parse_state(Path(self._download(self._repo_id, path, **self._where)).read_bytes(), path=path)
        if self._exists(self._path("shard-00000.tar")) or self._exists(self._path("shard-00000.json")):
            raise StateError(
                f"optimized shards exist at the target but the resume state is missing, in {self._repo_id}",
                hint="restore the state or choose a different output_prefix",
            )
        return None

    def commit(self, number: int, files: dict[str, Path]) -> None:
        """Upload files, by the names that they get, as shard `number`."""
        self._api.create_commit(
            self._repo_id,
            operations=[self._operation(self._path(name), str(path)) for name, path in files.items()],
            commit_message=f"Add optimized webshart shard {number:05d}",
            **self._where,
        )

    def _path(self, name: str) -> str:
        return str(PurePosixPath(self._prefix, name))

    def _exists(self, path: str) -> bool:
        try:
            return bool(self._api.file_exists(self._repo_id, path, **self._where))
        except Exception as error:
            if getattr(getattr(error, "response", None), "status_code", None) == 404:
                return False
            raise
