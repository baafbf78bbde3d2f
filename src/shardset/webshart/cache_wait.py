"""Waiting for shards that are on their way into the cache, with progress; webshart's module of this name.

The loaders are `TarDataLoader`s, or anything with its calls about the cache.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

_PAUSE: Final = 0.05
"""Seconds between two looks at a download."""


def next_with_cache_wait(loader: Any) -> Any:
    """Return the next file, after the download of its shard if need be.

    Raises:
        StopIteration: There is none.
        StorageError: Reading or downloading failed.
    """
    ShardCacheMonitor(loader).wait_for_next_shard()
    return next(loader)


def iter_with_cache_wait(loader: Any, start_idx: int, end_idx: int) -> Iterator[Any]:
    """Give the next ``end_idx - start_idx + 1`` files from where the loader stands, or fewer at the end.

    The two numbers only count, as in webshart; `TarDataLoader.iter_range` goes to a place.
    """
    for _ in range(start_idx, end_idx + 1):
        try:
            entry = next_with_cache_wait(loader)
        except StopIteration:
            return
        yield entry


class ShardCacheMonitor:
    """Watches downloads into the cache."""

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader

    async def wait_for_shard_async(self, filename: str, update_interval: float = 0.1) -> AsyncIterator[dict[str, Any]]:
        """Download a shard, and give ``downloaded, total, done`` now and then; bytes.

        It ends when the shard is there, or when nobody downloads it any more.

        Args:
            filename: The shard's file name or its path below the source.
            update_interval: Seconds between two looks.
        """
        begun = self.dataloader.prepare_shard_by_name(filename)
        while True:
            status = self.dataloader.get_shard_cache_status(filename)
            size = status.get("cur_filesize", 0)
            is_here = status["is_cached"]
            yield {"downloaded": size, "total": size if is_here else status.get("total_size", 0), "done": is_here}
            if is_here or not (begun or self.dataloader.is_shard_locked(filename)):
                return
            await asyncio.sleep(update_interval)
            begun = begun and self.dataloader.is_shard_locked(filename)

    def wait_for_next_shard(self, callback: Callable[[int, int], object] | None = None) -> None:
        """Wait until the next file can be read without a download.

        Args:
            callback: Called with the bytes that came since the last call, and all bytes that are there.
        """
        if self.dataloader.will_block():
            for _ in watch_next_shard(self.dataloader, callback):
                time.sleep(_PAUSE)


def watch_next_shard(loader: Any, callback: Callable[[int, int], object] | None = None) -> Iterator[None]:
    """Begin the download of the shard that comes next, and give way until it is there."""
    shard = loader.get_next_shard_info()
    if not shard:
        return
    loader.prepare_next_shard()
    last = 0
    while loader.will_block():
        here = loader.get_shard_cache_status(shard["name"]).get("cur_filesize", 0)
        if callback is not None and here > last:
            callback(here - last, here)
            last = here
        yield


class CacheWaitContext:
    """Iterates over a loader, waits for downloads where they are needed, and shows progress with tqdm if it is there.

    In the main thread, Ctrl-C closes the progress bars before it interrupts.

    Args:
        dataloader: The loader.
        lookahead: How many shards are downloaded behind the one that is waited for.
        progress_bar: Show progress.

    Attributes:
        dataloader: As given.
        lookahead: As given.
        progress_bar: As given.
        pbar: The bar of files, while there is one.
        cache_pbar: The bar of the download that is waited for, while there is one.
    """

    def __init__(self, dataloader: Any, lookahead: int = 1, progress_bar: bool = True) -> None:
        self.dataloader = dataloader
        self.lookahead = lookahead
        self.progress_bar = progress_bar
        self.pbar: Any = None
        self.cache_pbar: Any = None
        self._interrupted = False
        self._handler: Any = None
        self._is_installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, self._handler)
            self._is_installed = False
        self._close_bars()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self._close_bars()
        if callable(self._handler):
            self._handler(number, frame)
        else:
            raise KeyboardInterrupt

    def _close_bars(self) -> None:
        for bar in (self.cache_pbar, self.pbar):
            if bar is not None:
                bar.close()
        self.cache_pbar = None

    def iterate(self) -> Iterator[Any]:
        """Give the loader's files; once, as its cursor goes.

        Raises:
            StorageError: Reading or downloading failed.
        """
        make_bar = _progress() if self.progress_bar else None
        if make_bar is not None:
            self.pbar = make_bar(desc="Processing files")
        files = iter(self.dataloader)
        while not self._interrupted:
            if self.dataloader.will_block():
                self._wait(make_bar)
            try:
                entry = next(files)
            except StopIteration:
                return
            if self.pbar is not None:
                self.pbar.update(1)
            yield entry

    def _wait(self, make_bar: Any) -> None:
        shard = self.dataloader.get_next_shard_info()
        if not shard:
            return
        if make_bar is not None:
            status = self.dataloader.get_shard_cache_status(shard["name"]) or {}
            total = status.get("total_size") or shard.get("size")
            self.cache_pbar = make_bar(desc=f"Caching {shard['name']}", unit="B", unit_scale=True, total=total)
        for _ in watch_next_shard(self.dataloader, self._show):
            if self._interrupted:
                return
            time.sleep(_PAUSE)
        if self.cache_pbar is not None:
            self.cache_pbar.close()
            self.cache_pbar = None
        for _ in range(self.lookahead):
            self.dataloader.prepare_next_shard()

    def _show(self, came: int, _: int) -> None:
        if self.cache_pbar is not None:
            self.cache_pbar.update(came)


def _progress() -> Any:
    """Return what makes a progress bar, or None if tqdm is not installed."""
    try:
        return import_module("tqdm").tqdm
    except ImportError:
        logger.info("progress is shown with tqdm, which is not installed")
        return None
