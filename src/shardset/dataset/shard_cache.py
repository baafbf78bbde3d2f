"""A dataset's cache of whole shards on this machine's disk, by the numbers of the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardset.storage.cache import CachedStore
    from shardset.storage.cache_process import CacheStats
    from shardset.storage.store import ObjectInfo


class ShardCache:
    """A dataset's cache of shards, by their numbers. `Dataset.cache` gives it.

    Shards are downloaded when they are first read, or beforehand by `prepare`; one process of a machine downloads a
    shard, and all others wait for it.
    """

    def __init__(self, store: CachedStore, shard: Callable[[int], ObjectInfo]) -> None:
        self._store = store
        self._shard = shard

    def stats(self) -> CacheStats:
        """Return what is in the folder, and what was done in this process: hits, misses, waits, bytes, evictions."""
        return self._store.stats()

    def prepare(self, shard_indices: Iterable[int]) -> list[int]:
        """Download shards in the background. A download that fails raises where the shard is read.

        Returns:
            Those that were neither there nor on their way.

        Raises:
            IndexError: There is no such shard.
        """
        shards = [(index, self._shard(index)) for index in shard_indices]
        return [index for index, shard in shards if self._store.prepare(shard.url, shard)]

    def is_cached(self, shard_index: int) -> bool:
        """Tell whether all of a shard is there."""
        shard = self._shard(shard_index)
        return self._store.is_cached(shard.url, shard)

    def is_downloading(self, shard_index: int) -> bool:
        """Tell whether any process downloads a shard now, or this one is about to."""
        shard = self._shard(shard_index)
        return self._store.is_downloading(shard.url, shard)

    def progress(self, shard_index: int) -> int | None:
        """Return how many bytes of a shard are there; None if it is neither there nor on its way."""
        shard = self._shard(shard_index)
        return self._store.progress(shard.url, shard)

    def __repr__(self) -> str:
        return f"ShardCache({str(self._store.folder)!r}, limit={self._store.limit})"
