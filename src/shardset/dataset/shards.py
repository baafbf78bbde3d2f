"""The shards of a dataset, each by itself: its reader, its files in webshart's numbering, and caches before them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.cached import cached_property
from shardset.errors import FormatError, IndexFileError, NotFoundError, StorageError
from shardset.files import cache_root
from shardset.formats.patterns import named_format
from shardset.index.records import open_records
from shardset.index.sidecar import parse_sidecar
from shardset.index.table import RecordForm
from shardset.policy import Policy, Report
from shardset.storage.cache import CachedStore
from shardset.storage.cache_upkeep import clear, default_folder
from shardset.storage.local import files_kept
from shardset.storage.store import ObjectInfo, is_remote, url_name
from shardset.storage.threads import map_in_threads

from .catalogs import IndexOptions, catalog_in_cache, load_index
from .discover import ShardSource
from .files import ShardFiles, ShardReader, check_reader
from .kept_files import KeptFiles
from .shard_cache import ShardCache
from .summary import detailed_stats, known_stats, known_totals, summary_text

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from shardset.index.catalog import Catalog
    from shardset.index.table import ShardIndex
    from shardset.storage.cache_process import CacheEvent
    from shardset.storage.store import Reader, Store

    from .discover import Found

_SHARDS_AT_ONCE: Final = 64
_BLOCK: Final = 512
_INDEX_CACHE_LIMIT: Final = 10 << 30


class Origin(NamedTuple):
    """How a dataset was asked for, as a state may keep it: no credentials.

    Attributes:
        source: What was searched.
        subfolder: Below which folder of it.
    """

    source: str | list[str]
    subfolder: str | None = None


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
        origin: Origin | None = None,
        hf_token: str | None = None,
    ) -> None:
        self._found = found
        self._store = store
        self._options = options or IndexOptions()
        self.policy = policy or Policy()
        self.report = Report() if report is None else report
        self._catalog = catalog
        self._origin = origin
        self._hf_token = hf_token
        self._cache: CachedStore | None = None
        self._sidecars: CachedStore | None = None
        self._readers: OrderedDict[int, Reader] = OrderedDict()  # as in `LocalStore`
        self._files = KeptFiles()
        self._file_starts = [0]

    def _known_catalog(self) -> Catalog:
        """Return the catalog that stands for the search for shards, where none was made."""
        assert self._catalog is not None  # noqa: S101 - one of the two was given
        return self._catalog

    @property
    def name(self) -> str:
        """The source, as it was given; the catalog's folder if it was opened by that."""
        return self._found.name if self._found is not None else str(self._known_catalog().folder)

    @property
    def origin(self) -> Origin:
        """How it was asked for."""
        return self._origin or Origin(self.name)

    @property
    def total_size(self) -> int:
        """Bytes of all shards; of what is too small for a tar and has an index, those that the index states."""
        if self._found is None:
            catalog = self._known_catalog()
            return sum(int(catalog.group(number).shard_sizes.sum()) for number in range(catalog.num_groups))
        sizes = [shard.info.size for shard in self._found.shards]
        return sum(size if size >= _BLOCK else self.files(number).index.size for number, size in enumerate(sizes))

    @property
    def metadata_source(self) -> str | None:
        """Folder of the sidecar indexes; None where they stand beside their shards."""
        return self._options.metadata

    @cached_property
    def names_digest(self) -> str:
        """What tells the names and the order of the shards from any other: 16 hex digits."""
        names = "\n".join(self._source(number).name for number in range(self.num_shards))
        return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def get_hf_token(self) -> str | None:
        """Return the token for the Hub that the dataset was made with."""
        return self._hf_token

    @property
    def is_remote(self) -> bool:
        """Whether the shards are elsewhere than on this machine's disks or in its memory."""
        return is_remote(self.shard_url(0))

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return self._known_catalog().num_shards if self._found is None else len(self._found.shards)

    def reader(self, shard_index: int) -> Reader:
        """Return the reader of a shard; of a compressed TFRecord shard, of its bytes before compression.

        Raises:
            ChangedError: The shard is no longer the one that was indexed.
            StorageError: It cannot be opened.
        """
        reader = self._readers.get(shard_index)
        if reader is not None:
            try:  # noqa: SIM105  contextlib.suppress costs more than all the rest
                self._readers.move_to_end(shard_index)
            except KeyError:
                pass  # another thread has just pushed it out
        else:
            known = self._source(shard_index).info
            store = self._cache or self._store
            reader = check_reader(store.open(known.url, known), known.size, known.identity)
            if named_format(url_name(known.url)) != "tar":
                form = self._record_form(shard_index)
                reader = reader if form is None else open_records(reader, form)
            self._readers[shard_index] = reader
            if len(self._readers) > files_kept():
                with suppress(KeyError):
                    self._readers.popitem(last=False)
        return reader

    def _record_form(self, shard_index: int) -> RecordForm | None:
        """Return how the records of a shard are kept; None if it is a tar."""
        catalog = self._catalog
        if catalog is None or shard_index in self._files:
            return self.files(shard_index).index.records
        entry = catalog.shard(shard_index)
        if entry.compression is None or entry.content_size is None:
            return None
        number = bisect_right(catalog.shard_starts, shard_index) - 1
        points = catalog.group(number).access_points(shard_index - catalog.shard_starts[number])
        return RecordForm(entry.compression, entry.content_size, points)

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

        Where there is an index and the shard is no tar at all, as after a checkout without its large files, the index
        is given, so that names, sizes and counts can be had; reading raises.

        Raises:
            IndexError: There is no such shard.
            FormatError: The shard is damaged, and the policy says to raise.
        """
        files = self._files.listed.get(shard_index)
        if files is None:
            files = self._files.get(shard_index)
        if files is None:
            source = self._source(shard_index)
            files = self._load_files(source)
            self._files.put(shard_index, files)
        return files

    def _load_files(self, source: ShardSource) -> ShardFiles:
        error: FormatError | None = None
        index = None
        try:
            index = self._load_index(source)
        except FormatError as caught:
            error = caught
        if index is not None and index.num_files:
            return ShardFiles(index, source.url)
        stated = None if error is not None and error.offset else self._stated_index(source)
        if stated is not None and stated.num_files:
            what = f"the index is of a shard of {stated.size} bytes, this one has {source.info.size} and is no tar"
            hint = "download the shard: a checkout without its large files has pointers instead"
            unfit = IndexFileError(what, path=source.url, hint=hint)
            unfit.__cause__ = error
            return ShardFiles(stated, source.url, unfit)
        if index is None:
            assert error is not None  # noqa: S101 - one of the two was given
            raise error
        return ShardFiles(index, source.url)

    def _stated_index(self, source: ShardSource) -> ShardIndex | None:
        """Return what a sidecar index says, whatever its shard is; None if there is no good one."""
        url = self._options.sidecar_url(source)
        try:
            reader = (self._sidecars or self._store).open(url)
            return parse_sidecar(reader.read(0, reader.size), path=url).index
        except (IndexFileError, StorageError):
            return None

    def load_files(self, shard_indices: Iterable[int]) -> None:
        """Load the indexes of some shards that are not in memory yet; those of shards elsewhere side by side.

        Raises:
            As `files`.
        """
        missing = [index for index in dict.fromkeys(shard_indices) if index not in self._files]
        for _ in (map_in_threads if self.is_remote and len(missing) > 1 else map)(self.files, missing):
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
        files = self.files(shard_index)
        return [files.names[row] for row in files.file_rows]

    def list_samples_in_shard(self, shard_index: int) -> list[str]:
        """Return the name of every file in a shard that is no sidecar, in path order."""
        files = self.files(shard_index)
        return [files.names[row] for row in files.sample_rows]

    def get_shard_file_count(self, shard_index: int) -> int:
        """Return how many files a shard has, sidecars included."""
        return self.files(shard_index).index.num_files

    def get_shard_sample_count(self, shard_index: int) -> int:
        """Return how many files a shard has that are no sidecars."""
        return len(self.files(shard_index).numbering.samples)

    def get_shard_info(self, index: int) -> dict[str, Any]:
        """Return ``name, tar_path, json_path, num_files, num_samples, size`` of a shard."""
        files, source = self.files(index), self._source(index)
        return {
            "name": source.name,
            "tar_path": source.url,
            "json_path": self._options.sidecar_url(source),
            "num_files": files.index.num_files,
            "num_samples": len(files.numbering.samples),
            "size": files.index.size,
        }

    def get_shard_by_name(self, shard_name: str) -> dict[str, Any]:
        """Return what `get_shard_info` does for the shard of a name: its path without suffix below the source.

        Raises:
            ValueError: There is no such shard.
        """
        return self.get_shard_info(self.shard_number(shard_name))

    def sidecar_info(self, shard_index: int) -> ObjectInfo | None:
        """Return size and identity of the sidecar index of a shard, without reading it; None if there is none.

        Raises:
            IndexError: There is no such shard.
            StorageError: It cannot be told.
        """
        try:
            return (self._sidecars or self._store).info(self._options.sidecar_url(self._source(shard_index)))
        except NotFoundError:
            return None

    def cache_folder(self) -> Path:
        """Return the folder in the user's cache that what is worked out of this dataset goes to."""
        if self._found is not None:
            return catalog_in_cache(self._found, self._options)
        folder = str(self._known_catalog().folder).encode("utf-8", "surrogateescape")
        return cache_root() / "catalogs" / hashlib.sha256(folder).hexdigest()[:24]

    def find_file_location(self, file_index: int) -> tuple[int, int]:
        """Return (shard, file in the shard) of a file that is counted through all shards.

        Raises:
            IndexError: There is no such file.
        """
        starts = self._file_starts
        while starts[-1] <= file_index and len(starts) <= self.num_shards:
            self.file_start(len(starts))
        if not 0 <= file_index < starts[-1]:
            raise IndexError(f"file index {file_index} out of range: {self.name} has {starts[-1]} files")
        shard_index = bisect_right(starts, file_index) - 1
        return shard_index, file_index - starts[shard_index]

    def file_start(self, shard_index: int) -> int:
        """Return how many files all shards before one have together. The index may be one above that of the last shard.

        Raises:
            As `files`.
        """
        starts = self._file_starts
        while len(starts) <= shard_index:
            number, catalog = len(starts) - 1, self._catalog
            if catalog is not None:  # it knows the counts, if it is open
                count = catalog.shard(number).num_files
            else:
                if number not in self._files:
                    self.load_files(range(number, min(shard_index, number + _SHARDS_AT_ONCE)))
                count = self.get_shard_file_count(number)
            starts.append(starts[-1] + count)
        return starts[shard_index]

    def quick_stats(self) -> tuple[int | None, int | None]:
        """Return bytes and files of all shards as far as they are known without reading anything.

        Of local shards that is (None, None), as in webshart: sizes are in `total_size`, at no cost either.
        """
        return known_totals(self)

    def get_stats(self) -> dict[str, Any]:
        """Return ``total_shards, from_cache, shard_details``, and totals as far as they are known; reads nothing.

        A detail has ``index, name, metadata_loaded``, and ``num_files, size`` if the shard's index is in memory.
        """
        return known_stats(self)

    def get_detailed_stats(self) -> dict[str, Any]:
        """Return totals, averages, extremes and ``shard_details``; reads every index. GB and MB are 2**30 and 2**20.

        Raises:
            As `files`.
        """
        return detailed_stats(self)

    def print_summary(self, detailed: bool | None = None) -> None:
        """Print what `get_stats` knows or, if `detailed`, a line for each shard too."""
        print(summary_text(self, detailed=bool(detailed)))  # noqa: T201 - it is what the method is for

    def loaded_files(self, shard_index: int) -> ShardFiles | None:
        """Return the files of a shard if its index is in memory."""
        return self._files.peek(shard_index)

    def info(self, shard_index: int) -> ShardSource:
        """Return what the search for shards found of one: url, name, size.

        Raises:
            IndexError: There is no such shard.
        """
        return self._source(shard_index)

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
