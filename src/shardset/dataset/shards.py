"""The shards of a dataset, each by itself: its reader, its files in webshart's numbering, and caches before them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from shardset.policy import Policy, Report
from shardset.storage.cache import CachedStore
from shardset.storage.cache_upkeep import clear, default_folder
from shardset.storage.store import ObjectInfo, is_remote
from shardset.storage.threads import map_in_threads

from .catalogs import IndexOptions, load_index
from .discover import ShardSource
from .files import ShardFiles, ShardReader, check_reader

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from shardset.index.catalog import Catalog
    from shardset.index.table import ShardIndex
    from shardset.storage.cache_process import CacheEvent, CacheStats
    from shardset.storage.store import Reader, Store

    from .discover import Found

_FILES_KEPT: Final = 64
_READERS_KEPT: Final = 128
_INDEX_CACHE_LIMIT: Final = 10 << 30


class Shards:
    """Shards and the index of each. `Dataset` adds the catalog of them all, and with it the samples.

    The methods that end in ``_in_shard``, `open_shard` and the like count as webshart does: files in path order,
    sidecars apart; they read the index of one shard alone.

    Attributes:
        policy: What happens on faults.
        report: What was skipped, left out or not trusted, with places.
    """

    def __init__(
        self,
        found: Found | None,
        store: Store,
        *,
        options: IndexOptions | None = None,
        policy: Policy | None = None,
        report: Report | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        self._found = found
        self._store = store
        self._options = options or IndexOptions()
        self.policy = policy or Policy()
        self.report = Report() if report is None else report
        self._catalog = catalog
        self._cache: CachedStore | None = None
        self._sidecars: CachedStore | None = None
        self._readers: dict[int, Reader] = {}
        self._files: OrderedDict[int, ShardFiles] = OrderedDict()

    def _known_catalog(self) -> Catalog:
        """Return the catalog that stands for the search for shards, where none was made."""
        assert self._catalog is not None  # noqa: S101 - one of the two was given
        return self._catalog

    @property
    def name(self) -> str:
        """The source, as it was given; the catalog's folder if it was opened by that."""
        return self._found.name if self._found is not None else str(self._known_catalog().folder)

    @property
    def is_remote(self) -> bool:
        """Whether the shards are elsewhere than on this machine's disks or in its memory."""
        return is_remote(self.shard_url(0))

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return self._known_catalog().num_shards if self._found is None else len(self._found.shards)

    def reader(self, shard_index: int) -> Reader:
        """Return the reader of a shard.

        Raises:
            ChangedError: The shard is no longer the one that was indexed.
            StorageError: It cannot be opened.
        """
        reader = self._readers.get(shard_index)
        if reader is None:
            known = self._source(shard_index).info
            store = self._cache or self._store
            reader = check_reader(store.open(known.url, known), known.size, known.identity)
            if len(self._readers) >= _READERS_KEPT:
                self._readers.clear()
            self._readers[shard_index] = reader
        return reader

    def shard_url(self, shard_index: int) -> str:
        """Return the url of a shard.

        Raises:
            IndexError: There is no such shard.
        """
        return self._source(shard_index).url

    def _source(self, shard_index: int) -> ShardSource:
        self._check_shard(shard_index)
        if self._found is not None:
            return self._found.shards[shard_index]
        entry = self._known_catalog().shard(shard_index)
        return ShardSource(ObjectInfo(entry.url, entry.size, entry.identity), entry.name)

    def _check_shard(self, shard_index: int) -> None:
        if not 0 <= shard_index < self.num_shards:
            raise IndexError(f"shard index {shard_index} out of range: {self.name} has {self.num_shards} shards")

    def shard_number(self, name: str) -> int:
        """Return the number of the shard of a name: its path without suffix below the source.

        Raises:
            ValueError: There is no such shard.
        """
        for shard_index in range(self.num_shards):
            if self._source(shard_index).name == name:
                return shard_index
        raise ValueError(f"shard {name!r} not found in {self.name}")

    def files(self, shard_index: int) -> ShardFiles:
        """Return the files of a shard, from its sidecar index if there is a good one, else from its headers.

        Raises:
            IndexError: There is no such shard.
            FormatError: The shard is damaged, and the policy says to raise.
        """
        files = self._files.get(shard_index)
        if files is None:
            source = self._source(shard_index)
            files = ShardFiles(self._load_index(source), source.url)
            self._files[shard_index] = files
            while len(self._files) > _FILES_KEPT:
                self._files.popitem(last=False)
        return files

    def load_files(self, shard_indices: Iterable[int]) -> None:
        """Load the indexes of some shards that are not in memory yet; those of shards elsewhere side by side.

        Raises:
            As `files`.
        """
        missing = [index for index in dict.fromkeys(shard_indices) if index not in self._files]
        for _ in (map_in_threads if self.is_remote and len(missing) > 1 else map)(self.files, missing[:_FILES_KEPT]):
            pass

    def _load_index(self, source: ShardSource) -> ShardIndex:
        # A shard that is here already is not asked about anew; one that is not is not downloaded for its headers.
        is_here = self._cache is not None and self._cache.is_cached(source.url, source.info)
        return load_index(
            source,
            self._cache if self._cache is not None and is_here else self._store,
            options=self._options,
            policy=self.policy,
            report=self.report,
            sidecars=self._sidecars or self._store,
            is_here=is_here,
        )

    def open_shard(self, shard_index: int) -> ShardReader:
        """Open a shard for reading its files and samples in webshart's numbering.

        Raises:
            As `files`, and StorageError.
        """
        return ShardReader(self.files(shard_index), self.reader(shard_index))

    def list_files_in_shard(self, shard_index: int) -> list[str]:
        """Return the name of every file in a shard, in path order, sidecars included."""
        return ShardReader.filenames(self.open_shard(shard_index))

    def list_samples_in_shard(self, shard_index: int) -> list[str]:
        """Return the name of every file in a shard that is no sidecar, in path order."""
        return ShardReader.sample_filenames(self.open_shard(shard_index))

    def get_shard_file_count(self, shard_index: int) -> int:
        """Return how many files a shard has, sidecars included."""
        return self.files(shard_index).index.num_files

    def get_shard_sample_count(self, shard_index: int) -> int:
        """Return how many files a shard has that are no sidecars."""
        return len(self.files(shard_index).sample_rows)

    def get_shard_info(self, shard_index: int) -> dict[str, Any]:
        """Return ``name, tar_path, json_path, num_files, num_samples, size`` of a shard."""
        files, source = self.files(shard_index), self._source(shard_index)
        return {
            "name": source.name,
            "tar_path": source.url,
            "json_path": self._options.sidecar_url(source),
            "num_files": files.index.num_files,
            "num_samples": len(files.sample_rows),
            "size": files.index.size,
        }

    def get_shard_by_name(self, shard_name: str) -> dict[str, Any]:
        """Return what `get_shard_info` does for the shard of a name: its path without suffix below the source.

        Raises:
            ValueError: There is no such shard.
        """
        return self.get_shard_info(self.shard_number(shard_name))

    def find_file_location(self, global_file_index: int) -> tuple[int, int]:
        """Return (shard, file in the shard) of a file that is counted through all shards.

        Raises:
            IndexError: There is no such file.
        """
        left = global_file_index
        for shard_index in range(self.num_shards):
            catalog = self._catalog  # which knows the counts, if it is open
            count = self.get_shard_file_count(shard_index) if catalog is None else catalog.shard(shard_index).num_files
            if 0 <= left < count:
                return shard_index, left
            left -= count
        raise IndexError(f"file index {global_file_index} out of range")

    def enable_shard_cache(
        self,
        location: str | os.PathLike[str] | None = None,
        cache_limit_gb: float = 25.0,
        parallel_downloads: int = 4,
        *,
        block_mb: float | None = None,
        on_event: Callable[[CacheEvent], object] | None = None,
    ) -> None:
        """Keep shards on this machine's disk when they are read: a shard is downloaded once, by one process.

        Args:
            location: The cache's folder, which other datasets and processes may share; by default one in the user's
                cache folder.
            cache_limit_gb: GiB that all its files may have together, at any time. Shards used least lately go first.
            parallel_downloads: How many shards are downloaded at once in the background.
            block_mb: Keep only the blocks of so many MiB that are read; by default whole shards.
            on_event: Called with a `CacheEvent` for each download, wait and removal, from any thread.

        Raises:
            ValueError: A size is not positive.
        """
        self._cache = CachedStore(
            self._store,
            default_folder() if location is None else location,
            limit=int(cache_limit_gb * (1 << 30)),
            block=None if block_mb is None else int(block_mb * (1 << 20)),
            parallel_downloads=parallel_downloads,
            on_event=on_event,
        )
        self._readers.clear()

    @property
    def cache(self) -> ShardCache | None:
        """The cache that `enable_shard_cache` made, or None."""
        return None if self._cache is None else ShardCache(self._cache, lambda index: self._source(index).info)

    def enable_metadata_cache(self, location: str | os.PathLike[str], init_shard_count: int = 4) -> None:
        """Keep the sidecar indexes of shards on this machine's disk, each for as long as its etag stays what it is.

        Args:
            location: The folder.
            init_shard_count: So many shards' indexes are read at once, from the first on.

        Raises:
            As `files`.
        """
        self._sidecars = CachedStore(self._store, location, limit=_INDEX_CACHE_LIMIT)
        self._files.clear()
        self.load_files(range(min(init_shard_count, self.num_shards)))

    def clear_metadata_cache(self) -> None:
        """Remove all indexes from the metadata cache, which stays enabled, and forget those in memory."""
        self._files.clear()
        if self._sidecars is not None:
            self._sidecars.close()
            if self._sidecars.folder.exists():
                clear(self._sidecars.folder)

    def get_cache_stats(self) -> dict[str, Any]:
        """Return ``cached_shards, cache_size_bytes, cache_size_mb, cache_enabled, cache_location`` of sidecar indexes.

        They are those of `enable_metadata_cache`; of the shard cache, ``dataset.cache.stats()`` tells.
        """
        if self._sidecars is None:
            return {"cached_shards": 0, "cache_size_bytes": 0, "cache_size_mb": 0.0, "cache_enabled": False}
        stats = self._sidecars.stats()
        return {
            "cached_shards": stats.entries,
            "cache_size_bytes": stats.bytes_used,
            "cache_size_mb": stats.bytes_used / (1 << 20),
            "cache_enabled": True,
            "cache_location": str(self._sidecars.folder),
        }


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
