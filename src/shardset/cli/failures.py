"""What an error means to whoever runs the program: an exit code, one line, and one hint."""

from __future__ import annotations

import errno
from concurrent.futures import BrokenExecutor
from enum import IntEnum
from typing import Final, NamedTuple

from shardset.errors import AccessError, NotFoundError, ShardsetError, StorageError


class ExitCode(IntEnum):
    """The exit codes of all commands. docs/cli.md lists them for users."""

    FINE = 0
    FINDINGS = 1
    USAGE = 2
    UNREADABLE = 3
    FAILED = 4
    BUG = 70
    INTERRUPTED = 130


class Failure(NamedTuple):
    """An error as it is shown: `what` happened, and a `hint` at what to do."""

    code: ExitCode
    what: str
    hint: str | None


_REFUSED: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def describe(error: Exception) -> Failure:
    """Turn an error into what the user is told.

    What was missing, refused, or no shard is `UNREADABLE`; what began and broke off, as a transfer or a full disk, is
    `FAILED`. Anything that is neither an error of this package nor one of the system is a bug of ours.
    """
    if isinstance(error, ShardsetError):
        return Failure(_code(error), error.message + error.place(), error.hint or _storage_hint(error))
    if isinstance(error, OSError):
        code = ExitCode.UNREADABLE if isinstance(error, _REFUSED) else ExitCode.FAILED
        where = f": {error.filename}" if error.filename else ""
        return Failure(code, f"{(error.strerror or str(error)).lower()}{where}", _system_hint(error))
    if isinstance(error, MemoryError):
        return Failure(ExitCode.FAILED, "the memory is used up", "name fewer shards at once")
    if isinstance(error, BrokenExecutor):
        hint = "it may have run out of memory; use fewer --workers (0 is this process alone)"
        return Failure(ExitCode.FAILED, "a worker process died", hint)
    what = f"a bug: {type(error).__name__}: {error}"
    return Failure(ExitCode.BUG, what, "please report it with what --debug prints")


def _code(error: ShardsetError) -> ExitCode:
    if isinstance(error, StorageError) and not isinstance(error, NotFoundError | AccessError):
        return ExitCode.UNREADABLE if error.errno in {errno.EISDIR, errno.EINVAL} else ExitCode.FAILED
    return ExitCode.UNREADABLE


def _storage_hint(error: ShardsetError) -> str | None:
    if isinstance(error, NotFoundError):
        return "check the path: a source is a folder, a shard, a glob, or a pattern in braces"
    if isinstance(error, AccessError):
        return "check the permissions"
    return "run it again" if isinstance(error, StorageError) else None


def _system_hint(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "free some space and run it again"
    return "check the path and its permissions" if isinstance(error, _REFUSED) else "run it again"
