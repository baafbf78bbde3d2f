"""Writing files that others may read: either the old bytes or the new ones are there, never half of them."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer


@contextlib.contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing that appears under its name only when the block ends without an error.

    The bytes go to a temporary name in the same folder, are flushed to the disk, and are then renamed. If the block
    raises, or the disk is full, the temporary file is removed and whatever was at `path` stays as it was.

    Raises:
        OSError: The folder does not exist, is not writable, or the disk is full.
    """
    path = Path(path)
    temporary = path.parent / f".{os.getpid()}-{secrets.token_hex(6)}.tmp"
    # Opened with the mode of a plain open() and not by tempfile, whose files stay private after the rename.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_atomic(path: str | os.PathLike[str], data: Buffer) -> None:
    """Write `data` to `path` as `open_atomic` does."""
    with open_atomic(path) as file:
        file.write(data)


def _sync_folder(folder: Path) -> None:
    """Flush the rename itself, where the system can open folders (Windows cannot)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
