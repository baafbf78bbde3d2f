"""A folder that others put shards into, as a source: each shard is claimed by a rename, read once, and then let go."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

from shardset.errors import NotFoundError
from shardset.formats.patterns import expand_braces
from shardset.loading.order import draws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("shardset.pipeline")

_CLAIMED: Final = re.compile(r"\._(\d+)_$")
_DONE: Final = "._done_"

Mode = Literal["unlink", "keep", "resample"]
Select = Literal["random", "oldest"]


class DirectoryShardList:
    """Shards of a folder, each given to one process, while others may still be putting more there.

    A shard is claimed by a rename to ``NAME._PID_``. When the next one is asked for it is let go, as `mode` says.

    Args:
        path: The folder.
        pattern: What shards are called: a glob, with braces.
        poll: Seconds to wait before another look where nothing is there; None to end then.
        timeout: Seconds without a new shard after which to end.
        mode: ``"resample"`` gives a shard its name back, ``"keep"`` renames it to ``NAME._done_``, ``"unlink"`` removes
            it.
        select: ``"random"`` or ``"oldest"``.
        fate: Called with the path of each shard that was read, in place of what `mode` says.

    Raises:
        ValueError: `mode` or `select` is none of these.
        NotFoundError: There is no such folder.
    """

    def __init__(  # noqa: PLR0917 - the order of webdataset's arguments
        self,
        path: str | os.PathLike[str],
        pattern: str = "*.{tar,tgz,tar.tgz}",
        poll: float | None = 1,
        timeout: float = 1e12,
        mode: Mode = "resample",
        select: Select = "random",
        fate: Callable[[str], object] | None = None,
    ) -> None:
        for name, value, known in (("mode", mode, get_args(Mode)), ("select", select, get_args(Select))):
            if value not in known:
                raise ValueError(f"{name}={value!r}: it is one of {', '.join(map(repr, known))}")
        self.path = Path(path)
        if not self.path.is_dir():
            raise NotFoundError("there is no such folder", url=str(path))
        self.pattern = pattern
        self.poll = poll
        self.timeout = timeout
        self.mode = mode
        self.select = select
        self.fate = fate
        self._patterns = expand_braces(pattern)
        self._drawn = 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        latest = time.monotonic()
        while True:
            self.cleanup_files_without_processes()
            claimed = self._claim()
            if claimed is None:
                if self.poll is None or time.monotonic() - latest > self.timeout:
                    return
                time.sleep(self.poll)
                continue
            yield {"url": str(claimed)}
            latest = time.monotonic()
            self.recycle(str(claimed))

    def _claim(self) -> Path | None:
        """Claim a shard; None if there is none."""
        while files := self._waiting():
            if self.select == "oldest":
                chosen = files[0]
            else:
                chosen = files[int(draws(os.getpid(), self._drawn, 1)[0]) % len(files)]
                self._drawn += 1
            claimed = chosen.with_name(f"{chosen.name}._{os.getpid()}_")
            try:
                chosen.rename(claimed)
            except FileNotFoundError:  # another process was quicker
                continue
            return claimed
        return None

    def _waiting(self) -> list[Path]:
        """Return the shards that nobody has claimed, the oldest first."""
        found = []
        for file in self.path.iterdir():
            if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in self._patterns):
                try:
                    found.append((file.stat().st_mtime_ns, file))
                except FileNotFoundError:  # claimed just now
                    continue
        return [file for _, file in sorted(found)]

    def recycle(self, activename: str) -> None:
        """Let a claimed shard go, as `fate` or `mode` says."""
        claimed = Path(activename)
        original = claimed.with_name(_CLAIMED.sub("", claimed.name))
        if self.fate is not None:
            self.fate(activename)
        elif self.mode == "unlink":
            claimed.unlink(missing_ok=True)
        elif self.mode == "keep":
            claimed.rename(original.with_name(original.name + _DONE))
        else:
            claimed.rename(original)

    def cleanup_files_without_processes(self) -> None:
        """Give shards their names back whose process is gone."""
        for file in self.path.iterdir():
            match = _CLAIMED.search(file.name)
            if match is not None and not _is_running(int(match[1])):
                logger.warning("process %s is gone: %s can be read again", match[1], file.name)
                file.rename(file.with_name(_CLAIMED.sub("", file.name)))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
