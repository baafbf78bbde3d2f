"""Any store behind a bounded cache on disk, which all processes of a machine share.

Entries are known by the whole url, the identity and the size of an object, and never by its name alone. Each is
downloaded once, however many ask for it at the same time; the others wait, and take over from one that dies. What
cannot be cached, because it is larger than the limit, because all that is cached is in use, or because the disk is
full, is read from its place, and counted.

The folder must be on a disk of this machine: its locks (`flock`) do not reach other machines.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardset.files import is_locked

from .cache_process import CacheEvent, CacheProcess, CacheStats
from .cache_reader import CachedReader, cut_object
from .remote import RemoteReader
from .store import ObjectInfo, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .cache_reader import Cut
    from .store import Reader

__all__ = ["CacheEvent", "CacheStats", "CachedStore"]


class CachedStore(Store):
    """A store whose objects are downloaded once and then read from disk.

    Looking up, listing and writing go to the other store. Opening asks it for the version that is there now, unless
    the caller knows a version: then what is cached is read without any network.

    A whole shard is downloaded at its first read; its reader then gives views of a memory map. With `block`, only the
    blocks are downloaded that are read, and only ranges within one block are views.

    Pickled, it takes everything along but `on_event`, which belongs to the process that it was made in.

    Args:
        store: Where the objects are.
        folder: The cache's folder, on a disk of this machine. Any number of stores and processes may share it.
        limit: The most bytes that all files of the folder have together, at any time. Entries whose last use is
            longest ago go first, and none that is in use.
        block: Bytes of a block; None to cache whole objects.
        parallel_downloads: How many objects `prepare` downloads at once.
        on_event: Called with a `CacheEvent`, from any thread.

    Raises:
        ValueError: A number is not positive.
    """

    def __init__(
        self,
        store: Store,
        folder: str | os.PathLike[str],
        *,
        limit: int,
        block: int | None = None,
        parallel_downloads: int = 4,
        on_event: Callable[[CacheEvent], object] | None = None,
    ) -> None:
        for name, number in (("limit", limit), ("block", block), ("parallel_downloads", parallel_downloads)):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number}: must be at least 1")
        self.store = store
        self.folder = Path(folder)
        self.limit = limit
        self.block = block
        self.parallel_downloads = parallel_downloads
        self.on_event = on_event
        self._process: CacheProcess | None = None

    def __reduce__(self) -> tuple[Callable[[], CachedStore], tuple[()]]:
        made = partial(
            CachedStore,
            self.store,
            self.folder,
            limit=self.limit,
            block=self.block,
            parallel_downloads=self.parallel_downloads,
        )
        return made, ()

    def __repr__(self) -> str:
        return f"CachedStore({self.store!r}, {str(self.folder)!r}, limit={self.limit}, block={self.block})"

    def info(self, url: str) -> ObjectInfo:
        """Look up the object in its place, as `Store.info` says."""
        return self.store.info(url)

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Find the objects in their place, as `Store.list` says."""
        return self.store.list(url, report)

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> None:
        """Write to the object's place, as `Store.write` says. What is cached of the version before stays what it is."""
        self.store.write(url, data, expect=expect)

    def open(self, url: str, known: ObjectInfo | None = None) -> CachedReader:
        """Make a reader of the version that is known, or else of the one that is there now, as `Store.open` says.

        Nothing is downloaded before something is read. A known version that is cached is read without asking anybody.
        """
        source = None
        if known is None:
            source = self.store.open(url)
            known = source.info if isinstance(source, RemoteReader) else ObjectInfo(url, source.size, source.identity)
        return self._reader(known, source)

    def close(self) -> None:
        """Give up background downloads, and let go of all that is open but not in use."""
        process = self._process
        if process is not None and process.pid == os.getpid():
            process.background.give_up()
            process.kept.clear()
        self.store.close()

    def prepare(self, url: str, known: ObjectInfo | None = None) -> bool:
        """Download an object in the background, at most `parallel_downloads` at once.

        If that fails, the next read that needs the object raises the error.

        Args:
            url: The object.
            known: What is known of it; otherwise it is looked up first.

        Returns:
            False if it is cached already, or on its way by this store.

        Raises:
            StorageError: It cannot be looked up.
        """
        reader = self._reader(known or self.store.info(url), None)
        if self._is_cached(reader.cut):
            return False
        return self.here().background.start(reader.cut.key, reader.fetch)

    def is_cached(self, url: str, known: ObjectInfo | None = None) -> bool:
        """Tell whether all of an object is in the cache, by `known` or else as it is now.

        Raises:
            StorageError: It is not known and cannot be looked up.
        """
        return self._is_cached(self._reader(known or self.store.info(url), None).cut)

    def is_downloading(self, url: str, known: ObjectInfo | None = None) -> bool:
        """Tell whether somebody, in any process, downloads some of an object now, or this store is about to.

        Raises:
            StorageError: It is not known and cannot be looked up.
        """
        here, cut = self.here(), self._reader(known or self.store.info(url), None).cut
        if here.background.is_under_way(cut.key):
            return True
        return any(is_locked(here.folder.lock_path(cut.name(number))) for number in range(cut.count))

    def progress(self, url: str, known: ObjectInfo | None = None) -> int | None:
        """Return how many bytes of an object have arrived, by any process; None if none of it is here or on its way.

        Of a download under way, the last MiB may not be counted yet.

        Raises:
            StorageError: It is not known and cannot be looked up.
        """
        here, cut = self.here(), self._reader(known or self.store.info(url), None).cut
        found = [here.folder.progress(cut.name(number), cut.length(number)) for number in range(cut.count)]
        arrived = [count for count in found if count is not None]
        return sum(arrived) if arrived or not cut.count else None

    def stats(self) -> CacheStats:
        """Return what is in the folder now, and what was done so far."""
        return self.here().stats()

    def here(self) -> CacheProcess:
        """Return what this store has in this process."""
        process = self._process
        if process is None or process.pid != os.getpid():
            process = CacheProcess(self.folder, self.limit, self.parallel_downloads, self.on_event)
            self._process = process
        return process

    def _reader(self, info: ObjectInfo, source: Reader | None) -> CachedReader:
        cut = cut_object(info, self.block)
        if not cut.is_whole:
            whole = cut_object(info, None)
            if self.here().folder.has(whole.name(0)):
                cut = whole  # cached by a store without blocks, or because its place gives no ranges
        return CachedReader(self, cut, source)

    def _is_cached(self, cut: Cut) -> bool:
        folder = self.here().folder
        return all(folder.has(cut.name(number)) for number in range(cut.count))
