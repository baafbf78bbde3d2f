"""The cache in one process: its folder, what is kept open, what is counted and told."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from .cache_background import Background
from .cache_entry import shown_url
from .cache_files import DamagedEntryError, NotCachedError
from .cache_folder import CacheFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .cache_files import Block
    from .cache_reader import Cut

logger = logging.getLogger(__name__)

EventKind = Literal[
    "download_started", "download_finished", "download_failed", "waited", "evicted", "read_through", "damaged"
]

_KEPT: Final = 4
"""So many blocks, those opened last, stay open in a process, unless there is need of their room."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Something that the cache did.

    Attributes:
        kind: What. ``"waited"`` is for another's download; ``"read_through"`` means that something could not be cached.
        url: The object, without logins and signatures.
        bytes: How many bytes it was about.
        seconds: How long it took, where that means something.
        message: Why, where that means something.
    """

    kind: EventKind
    url: str
    bytes: int = 0
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What is in the cache's folder, and what this store has done in this process (a forked child begins at 0).

    Attributes:
        entries: Shards, or blocks of them, in the folder.
        bytes_used: Bytes that all files of the folder have, downloads under way included.
        limit: The most bytes that they may have.
        hits: How often an entry was wanted that was there.
        misses: How often one had to be downloaded, and was.
        waits: How often another's download was waited for.
        bytes_downloaded: Bytes of the entries downloaded.
        bytes_served: Bytes that were read from entries.
        evictions: Entries removed to make room.
        bytes_evicted: Bytes that they had.
        read_throughs: How often something could not be cached and was read from its place.
        too_big: How many of these were larger than the limit.
        failures: Downloads that failed.
        damaged: Entries found cut or written over, and dropped.
        in_flight: Entries being downloaded now by this process.
        queued: Background downloads that have not begun.
    """

    entries: int
    bytes_used: int
    limit: int
    hits: int
    misses: int
    waits: int
    bytes_downloaded: int
    bytes_served: int
    evictions: int
    bytes_evicted: int
    read_throughs: int
    too_big: int
    failures: int
    damaged: int
    in_flight: int
    queued: int


class CacheProcess:
    """What a `CachedStore` has in one process. A forked child gets a new one: no thread of its parent came along.

    Attributes:
        pid: The process.
        folder: The folder.
        background: The downloads that `prepare` has begun.
        kept: Blocks that stay open though nobody reads them, by name, the last opened at the end.
    """

    def __init__(
        self, folder: Path, limit: int, parallel_downloads: int, on_event: Callable[[CacheEvent], object] | None
    ) -> None:
        self.pid = os.getpid()
        self.folder = CacheFolder(folder, limit)
        self.background = Background(parallel_downloads)
        self.kept: OrderedDict[str, Block] = OrderedDict()  # without a lock: each step on it is atomic
        self._on_event = on_event
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, **numbers: int) -> None:
        """Add to the numbers of `CacheStats`, by name."""
        with self._lock:
            for name, number in numbers.items():
                self._counts[name] += number

    def stats(self) -> CacheStats:
        """Return what is in the folder now, and what was counted so far."""
        entries, used = self.folder.usage()
        with self._lock:
            counts = self._counts.copy()
        counts.update(entries=entries, bytes_used=used, limit=self.folder.limit, queued=self.background.waiting())
        return CacheStats(**{name: counts[name] for name in CacheStats.__dataclass_fields__})

    def tell(self, kind: EventKind, url: str, length: int = 0, seconds: float = 0.0, message: str = "") -> None:
        """Tell whoever listens what happened."""
        if self._on_event is None:
            return
        try:
            self._on_event(CacheEvent(kind, shown_url(url), length, seconds, message))
        except Exception:
            # Whoever only watches must not break a download that others wait for.
            logger.exception("on_event failed")

    def find(self, cut: Cut, number: int) -> Block | None:
        """Open a block, if it is there and whole.

        Raises:
            NotCachedError: It cannot be opened.
        """
        name = cut.name(number)
        block = self.kept.get(name)
        if block is not None:
            self.folder.touch(block)
            return block
        try:
            block = self.folder.open(name)
        except DamagedEntryError as error:
            self.drop(name, cut.info.url, str(error))
            return None
        if block is not None:
            self.kept[name] = block
            while len(self.kept) > _KEPT:
                try:
                    self.kept.popitem(last=False)
                except KeyError:
                    break  # other threads have emptied it meanwhile
        return block

    def drop(self, name: str, url: str, message: str) -> None:
        """Remove an entry that turned out to be damaged."""
        self.kept.pop(name, None)
        self.count(damaged=1)
        logger.warning("an entry of the cache is damaged and dropped (%s): %s", message, shown_url(url))
        self.tell("damaged", url, message=message)
        try:
            self.folder.drop(name)
        except NotCachedError as error:
            logger.warning("it cannot be removed: %s", error.detail)
