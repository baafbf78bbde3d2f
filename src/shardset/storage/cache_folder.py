"""A folder of entries that many processes share, never larger than its limit.

An entry is published as ``NAME.block``. While it is downloaded it is ``NAME.part``, as large as it will be, and its
downloader holds the lock on ``NAME.lock``. Whoever adds, publishes or removes a file holds, shortly, the lock on
``state``, which says how many bytes there are. Whoever reads an entry holds its file; it is not removed then.

Why the limit holds: bytes are counted before their file is made and after it is gone, so that the count is never too
low, whoever is killed and when. It may become too high; it is counted anew when it says that the folder is full, and by
each process before it adds its first entry (a machine that lost power may have lost the last count).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from shardset.files import hold_file, is_held, lock_file, remove_unheld, stands_at

from .cache_entry import pack_footer, read_footer
from .cache_files import (
    BINARY,
    BLOCK,
    LOCK,
    PART,
    PROGRESS_BYTES,
    STATE_BYTES,
    Account,
    Block,
    NotCachedError,
    Part,
    allocate,
    iter_files,
    locked,
    remove_leftover,
    unusable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardset.files import FileLock

    from .cache_entry import EntryInfo

_TOUCH_EVERY: Final = 1.0
# So much longer than looking for room took is it taken for granted that there still is none.
_REST: Final = 10.0


class Removed(NamedTuple):
    """An entry that had to go.

    Attributes:
        url: What it was a part of, as shown; None if it did not tell.
        bytes: What it took.
    """

    url: str | None
    bytes: int


class CacheFolder:
    """The folder, as one process uses it.

    Args:
        folder: Its path; made when something is first kept.
        limit: The most bytes that its files may have together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._prefix = os.path.join(folder, "")  # noqa: PTH118 - see open
        self._is_counted = False
        # Blocks by their last use, as (time, name), the oldest first, as they were when the folder was last counted.
        self._oldest: deque[tuple[int, str]] = deque()
        self._full_until = 0.0

    def open(self, name: str) -> Block | None:
        """Open an entry and take note of its use; None if it is not there.

        Raises:
            DamagedEntryError: It is there, and not whole.
            NotCachedError: It cannot be opened or mapped.
        """
        path = f"{self._prefix}{name}{BLOCK}"  # a Path costs more than all the rest of this
        try:
            while True:
                try:
                    handle = os.open(path, os.O_RDONLY | BINARY)
                except (FileNotFoundError, NotADirectoryError):
                    return None
                try:
                    if hold_file(handle) and stands_at(handle, path):
                        block = Block(name, handle)
                        self.touch(block)
                        return block
                finally:
                    os.close(handle)
                time.sleep(0.001)  # somebody is just removing it, or looking whether it is in use
        except OSError as error:
            raise unusable(error) from error

    def touch(self, block: Block) -> None:
        """Take note that an entry is used, in the time of its file; at most once a second."""
        now = time.time()
        if not -_TOUCH_EVERY < now - block.used < _TOUCH_EVERY:
            block.used = now
            with contextlib.suppress(OSError):  # a folder that may only be read has no order of use
                os.utime(self.path_of(block.name, BLOCK), (now, now))

    def has(self, name: str) -> bool:
        """Tell whether an entry is published."""
        return self.path_of(name, BLOCK).exists()

    def lock_path(self, name: str) -> Path:
        """Return the file whose lock the downloader of an entry holds."""
        return self.path_of(name, LOCK)

    def claim(self, name: str) -> FileLock | None:
        """Take it on to download an entry; None if somebody else does.

        Raises:
            NotCachedError: The folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return lock_file(self.path_of(name, LOCK), wait=False)
        except OSError as error:
            raise unusable(error) from error

    def progress(self, name: str, length: int) -> int | None:
        """Return how many bytes of an entry have arrived: all, some, or None where nobody downloads it."""
        if self.has(name):
            return length
        try:
            with self.path_of(name, PART).open("rb") as file:
                file.seek(-PROGRESS_BYTES, os.SEEK_END)
                return min(int.from_bytes(file.read(PROGRESS_BYTES), "little"), length)
        except OSError:
            return length if self.has(name) else None

    def begin(
        self,
        claim: FileLock,
        name: str,
        info: EntryInfo,
        *,
        stated: str | None,
        let_go: Callable[[], object],
        removed: list[Removed],
    ) -> Part:
        """Make room for an entry that was claimed, and begin to write it.

        Args:
            claim: What `claim` gave; it is released with the part.
            name: The entry.
            info: What it will hold.
            stated: The digest that its bytes must have, as in `ObjectInfo`; None if that is not known.
            let_go: Called before entries are removed, to let go of what this process holds without need.
            removed: Is added what was removed.

        Raises:
            NotCachedError: There is no room, or the folder cannot be written.
        """
        need = len(pack_footer(info)) + info.length
        if need > self.limit - STATE_BYTES:
            raise NotCachedError("too_big", f"{need} bytes and a limit of {self.limit}")
        path = self.path_of(name, PART)
        try:
            with self.account() as account:
                account.remove(path)  # of a downloader who was killed
                if account.used + need > self.limit:
                    let_go()
                    self._make_room(account, need, removed)
                account.add(need)
                try:
                    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
                except BaseException:
                    account.add(-need)
                    raise
                part = Part(self, claim, info, name=name, handle=handle, total=need, stated=stated)
                try:
                    os.ftruncate(handle, need)
                except BaseException:
                    os.close(handle)
                    account.remove(path)
                    raise
        except OSError as error:
            raise unusable(error) from error
        try:
            allocate(handle, need)
        except BaseException as error:
            part.discard()
            if isinstance(error, OSError):
                raise unusable(error) from error
            raise
        return part

    def drop(self, name: str) -> None:
        """Remove an entry that is damaged, also while it is read.

        Raises:
            NotCachedError: It cannot be removed.
        """
        try:
            with self.account() as account:
                self.path_of(name, BLOCK).unlink(missing_ok=True)
                account.forget()  # who knows how long it was before
        except OSError as error:
            raise unusable(error) from error

    def usage(self) -> tuple[int, int]:
        """Return how many entries there are, and how many bytes all files have."""
        sizes = [(kind, status.st_size) for _, kind, status in iter_files(self.folder)]
        used = sum(size for _, size in sizes) + (STATE_BYTES if sizes else 0)
        return sum(kind == BLOCK for kind, _ in sizes), used

    def path_of(self, name: str, kind: str) -> Path:
        """Return where a file of an entry is: its block, its part or its lock."""
        return self.folder / f"{name}{kind}"

    @contextlib.contextmanager
    def account(self) -> Iterator[Account]:
        """Hold the lock on `state`, and give the count, which is right."""
        with locked(self.folder) as lock:
            account = Account(lock.handle)
            if not self._is_counted or account.used < 0:
                self._count(account)
                self._is_counted = True
            yield account

    def _count(self, account: Account) -> None:
        """Count all bytes, remove what killed downloaders left behind, and note which blocks were used when."""
        used = STATE_BYTES
        blocks = []
        for name, kind, status in iter_files(self.folder):
            path = self.path_of(name, kind)
            if kind == BLOCK:
                blocks.append((status.st_mtime_ns, name))
                used += status.st_size
            elif not remove_leftover(path):
                used += status.st_size
        self._oldest = deque(sorted(blocks))
        account.set(used)

    def _make_room(self, account: Account, need: int, removed: list[Removed]) -> None:
        """Remove entries, those first whose last use is longest ago, until `need` bytes more are within the limit."""
        began = time.monotonic()
        if began < self._full_until:
            raise NotCachedError("no_room", "everything in the cache is in use")
        counts = 0
        while account.used + need > self.limit:
            chosen = self._choose(account.used + need - self.limit)
            if chosen is None:
                if counts == 2:  # twice, since entries may have been used, and let go, meanwhile
                    ended = time.monotonic()
                    self._full_until = ended + _REST * (ended - began)
                    raise NotCachedError("no_room", "everything in the cache is in use")
                counts += 1
                self._count(account)
                continue
            for path in chosen:
                with contextlib.suppress(FileNotFoundError):
                    gone = Removed(_url_of(path), path.stat().st_size)
                    if remove_unheld(path):
                        account.add(-gone.bytes)
                        removed.append(gone)

    def _choose(self, excess: int) -> list[Path] | None:
        """Choose entries that nobody holds, of `excess` bytes together; None if those known of do not come to that."""
        chosen = []
        while excess > 0:
            if not self._oldest:
                return None
            used_at, name = self._oldest.popleft()
            path = self.path_of(name, BLOCK)
            try:
                status = path.stat()
                # One that was used since is younger than all that are left.
                if status.st_mtime_ns == used_at and not is_held(path):
                    chosen.append(path)
                    excess -= status.st_size
            except FileNotFoundError:
                continue  # whoever removed it has counted it
        return chosen


def _url_of(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return read_footer(file.fileno(), os.fstat(file.fileno()).st_size).url
    except (OSError, ValueError):
        return None
