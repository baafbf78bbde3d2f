"""A dataset: shards and their indexes under one numbering of samples."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from shardset.errors import MissingFieldError, StateError
from shardset.index.build import settle_faults
from shardset.index.catalog import Catalog, ShardEntry, open_catalog
from shardset.index.records import SampleRecord, join_tables, read_record, read_records
from shardset.policy import Policy, Report
from shardset.storage.store import ObjectInfo, open_store, url_scheme

from .catalogs import IndexOptions, build_catalog, catalog_in_cache, find_catalog, load_index
from .discover import Found, ShardSource, find_shards
from .files import ShardFiles, ShardReader, check_reader
from .reading import BatchReader, by_group
from .sample import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from shardset.formats.faults import Fault
    from shardset.index.table import ShardIndex
    from shardset.storage.store import Reader, Store

    from .discover import Source

logger = logging.getLogger(__name__)

_FILES_KEPT: Final = 64
_READERS_KEPT: Final = 128
_CHUNK: Final = 256


def discover_dataset(
    source: Source,
    *,
    subfolder: str | None = None,
    metadata: str | os.PathLike[str] | None = None,
    store: Store | None = None,
    policy: Policy | None = None,
) -> Dataset:
    """Find the shards that `source` names, and make them a dataset. Reads no shard yet.

    Args:
        source: A folder (searched at any depth), a shard, a glob, a brace pattern, or a list of these.
        subfolder: Look only below this folder of `source`.
        metadata: Folder of the sidecar indexes, laid out like the shards; by default they stand beside their shards.
        store: Where the source lives; by default the place that its scheme names.
        policy: What to do about damaged shards; by default they raise.

    Raises:
        NotFoundError: A name leads nowhere, or no shard was found.
        StorageError: Looking failed.
    """
    report = Report()
    found = find_shards(source, subfolder=subfolder, store=store, report=report)
    folder = None if metadata is None else os.fspath(metadata)
    if folder is not None and not url_scheme(folder):
        folder = str(Path(folder).absolute())
    options = IndexOptions(metadata=folder)
    return Dataset(found, store or open_store(found.shards[0].url), options=options, policy=policy, report=report)


def open_dataset(
    catalog: str | os.PathLike[str], *, store: Store | None = None, policy: Policy | None = None
) -> Dataset:
    """Open a dataset by its catalog alone, without looking for its shards. They are looked at when they are read.

    Raises:
        FileNotFoundError: There is no catalog in that folder.
        IndexFileError: The catalog is malformed, or of another version.
    """
    opened = open_catalog(Path(catalog))
    if store is None:
        store = open_store(opened.shard(0).url if opened.num_shards else str(catalog))
    return Dataset(None, store, catalog=opened, policy=policy)


class Dataset:
    """Shards under one numbering of samples. Made by `discover_dataset` and `open_dataset`.

    ``len(ds)`` counts samples, ``ds[i]`` gives one, iteration gives all in order: shards in order, samples in archive
    order. The first of these that is asked for opens the dataset's catalog, or makes it in the user's cache folder. The
    methods that end in ``_in_shard``, `open_shard` and the like count as webshart does: files in path order, sidecars
    apart; they read the index of one shard alone.

    Threads may share a dataset. Handed to another process, it is the path of its catalog.

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
        # The samples of the group that was looked into last, which is most often the one looked into next.
        self._span: tuple[int, int, Any, int] = (0, 0, None, 0)
        self._readers: dict[int, Reader] = {}
        self._files: OrderedDict[int, ShardFiles] = OrderedDict()
        if catalog is not None:
            self._settle_damage(catalog)

    @property
    def name(self) -> str:
        """The source, as it was given; the catalog's folder if it was opened by that."""
        return self._found.name if self._found is not None else str(self.catalog.folder)

    @property
    def is_remote(self) -> bool:
        """Whether the shards are elsewhere than on this machine's disks or in its memory."""
        return url_scheme(self.shard_url(0)) not in {"", "file", "memory"}

    @property
    def catalog(self) -> Catalog:
        """The tables of all shards, made or refreshed if need be.

        Raises:
            FormatError: A shard is damaged, and the policy says to raise.
            StorageError: A shard cannot be read, or the catalog cannot be written.
        """
        if self._catalog is None:
            found = self._found
            assert found is not None  # noqa: S101 - one of the two was given
            catalog = find_catalog(found, self._options, self.report)
            if catalog is None:
                folder = catalog_in_cache(found, self._options)
                logger.info("indexing %d shards into %s", len(found.shards), folder)
                catalog = build_catalog(
                    found, self._store, folder, options=self._options, policy=self.policy, report=self.report
                )
            else:
                self._settle_damage(catalog)
            self._catalog = catalog
        return self._catalog

    def _settle_damage(self, catalog: Catalog) -> None:
        """Apply the policy to damage that a catalog, made under another one, indexed up to."""
        if not self.policy.codes and not any(group.num_damaged for group in catalog.manifest.groups):
            return
        for shard_index, fault in catalog.faults():
            if fault.is_error or fault.code in self.policy.codes:
                settle_faults((fault,), catalog.shard(shard_index).url, self.policy, self.report)

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return self.catalog.num_shards if self._found is None else len(self._found.shards)

    @property
    def total_files(self) -> int:
        """Files in all shards, those of no sample included."""
        return self.catalog.num_files

    @property
    def total_size(self) -> int:
        """Bytes of all shards."""
        if self._found is not None:
            return sum(shard.info.size for shard in self._found.shards)
        return sum(int(self.catalog.group(number).shard_sizes.sum()) for number in range(self.catalog.num_groups))

    def faults(self) -> Iterator[tuple[str, Fault]]:
        """Yield what is wrong or odd in the shards, with the url of each."""
        for shard_index, fault in self.catalog.faults():
            yield self.shard_url(shard_index), fault

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the catalog's tables: ``"samples"``, ``"shards"`` and ``"others"`` (files of no sample).

        They are views of the mapped files, a chunk for each group. The column ``shard`` counts within its group.
        """
        return join_tables([self.catalog.group(number) for number in range(self.catalog.num_groups)])

    def __len__(self) -> int:
        return self.catalog.num_samples

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, num_shards={self.num_shards})"

    def __reduce__(self) -> tuple[Any, ...]:
        folder = self.catalog.folder.absolute()
        tokens = tuple(group.samples for group in self.catalog.manifest.groups)
        return _reopen, (str(folder), tokens, self._store, self._options, self.policy)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if type(index) is int:
            start, stop, group, first_shard = self._span
            if start <= index < stop:
                row = index - start
                return Sample(self, group, row, first_shard + group.shard_at[row], index)
        catalog = self.catalog
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(catalog.num_samples))]
        count = catalog.sample_starts[-1]
        number = index if index >= 0 else index + count
        if not 0 <= number < count:
            raise IndexError(f"sample {index} of a dataset of {count}")
        group, row, first_shard = catalog.locate(number)
        self._span = (number - row, number - row + group.files.num_samples, group, first_shard)
        return Sample(self, group, row, first_shard + group.shard_at[row], number)

    def __iter__(self) -> Iterator[Sample]:
        catalog = self.catalog
        for number in range(catalog.num_groups):
            group, first_shard, start = (
                catalog.group(number),
                catalog.shard_starts[number],
                catalog.sample_starts[number],
            )
            for row, shard in enumerate(group.shard_at):
                yield Sample(self, group, row, first_shard + shard, start + row)

    def find(self, key: str, *, shard: str | None = None) -> Sample:
        """Return the first sample that has a key.

        Args:
            key: The key.
            shard: Name of the shard to look in; by default all.

        Raises:
            MissingFieldError: There is none (it is a KeyError too).
        """
        wanted = None if shard is None else self._shard_number(shard)
        for number in self.catalog.find(key):
            sample = self[number]
            if wanted is None or sample.shard_index == wanted:
                return sample
        where = "the dataset" if shard is None else f"shard {shard!r}"
        raise MissingFieldError(
            f"{where} has no sample with the key {key!r}", key=key, hint="list keys with: shardset ls"
        )

    def iter_dicts(
        self, fields: Sequence[str] | None = None, *, copy: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Read samples in order, each as a dict of field to payload, with its key under ``"__key__"``.

        A sample that cannot be given as asked raises, or is left out and counted, as the policy says.

        Args:
            fields: Read only these.
            copy: Give bytes, copied out of the map as they are taken; otherwise views, which hold on to the map. What
                `Sample.view` says of files that are cut short holds for both.
            start: The first sample.
            stop: The sample behind the last; by default all.

        Raises:
            MissingFieldError: A sample lacks a field, and the policy has no default for it.
            DuplicateFieldError: A field occurs twice in a sample.
            StorageError: Reading failed.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        batches = BatchReader(self, self.policy, self.report)
        while start < stop:
            group, row, first_shard = self.catalog.locate(start)
            last = min(row + stop - start, group.shard_span(group.shard_at[row])[1], row + _CHUNK)
            rows = np.arange(row, last)
            for sample in batches.read(group, rows, first_shard, start - row, fields, copy=copy):
                if sample is not None:
                    yield sample
            start += last - row

    def read_samples(
        self, indices: Sequence[int] | NDArray[np.integer], fields: Sequence[str] | None = None, *, copy: bool = False
    ) -> list[dict[str, Any] | None]:
        """Read many samples at once, from anywhere in the dataset, in the order asked.

        Args:
            indices: Numbers of samples.
            fields: Read only these.
            copy: Give bytes; otherwise views (see `Sample.view`).

        Returns:
            Dicts as `iter_dicts` gives them; None for a sample that the policy says to skip.

        Raises:
            IndexError: There is no such sample.
            As `iter_dicts`.
        """
        batches = BatchReader(self, self.policy, self.report)
        return by_group(
            self.catalog,
            indices,
            lambda group, rows, shard, sample: list(batches.read(group, rows, shard, sample, fields, copy=copy)),
        )

    def read_field(
        self, indices: Sequence[int] | NDArray[np.integer], field: str, *, copy: bool = False
    ) -> list[memoryview] | list[bytes]:
        """Read one field of many samples at once, from anywhere in the dataset, in the order asked.

        Args:
            indices: Numbers of samples.
            field: The field.
            copy: Give bytes; otherwise views (see `Sample.view`).

        Returns:
            The payloads; None for a sample that the policy says to skip.

        Raises:
            As `read_samples`.
        """
        batches = BatchReader(self, self.policy, self.report)
        return by_group(
            self.catalog,
            indices,
            lambda group, rows, shard, sample: batches.read_field(group, rows, shard, sample, field, copy=copy),
        )

    def record(self, index: int) -> SampleRecord:
        """Return what the catalog knows of a sample, without opening its shard.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        group, row, first_shard = self.catalog.locate(index)
        return read_record(group, row, first_shard)

    def records(self, indices: Sequence[int] | NDArray[np.integer]) -> list[SampleRecord]:
        """Return what the catalog knows of many samples, in the order asked, without opening their shards.

        Raises:
            IndexError: There is no such sample.
        """
        return by_group(
            self.catalog, indices, lambda group, rows, first_shard, _: read_records(group, rows, first_shard)
        )

    def reader(self, shard_index: int) -> Reader:
        """Return the reader of a shard.

        Raises:
            ChangedError: The shard is no longer the one that was indexed.
            StorageError: It cannot be opened.
        """
        reader = self._readers.get(shard_index)
        if reader is None:
            if self._found is not None:  # without need of a catalog
                self._check_shard(shard_index)
                known: ObjectInfo | ShardEntry = self._found.shards[shard_index].info
            else:
                known = self.shard_entry(shard_index)
            reader = check_reader(self._store.open(known.url), known.size, known.identity)
            if len(self._readers) >= _READERS_KEPT:
                self._readers.clear()
            self._readers[shard_index] = reader
        return reader

    def shard_entry(self, shard_index: int) -> ShardEntry:
        """Return what the catalog says of a shard."""
        return self.catalog.shard(shard_index)

    def shard_url(self, shard_index: int) -> str:
        """Return the url of a shard.

        Raises:
            IndexError: There is no such shard.
        """
        if self._found is None:
            self._check_shard(shard_index)
            return self.catalog.shard(shard_index).url
        return self._source(shard_index).url

    def _source(self, shard_index: int) -> ShardSource:
        self._check_shard(shard_index)
        if self._found is not None:
            return self._found.shards[shard_index]
        entry = self.catalog.shard(shard_index)
        return ShardSource(ObjectInfo(entry.url, entry.size, entry.identity), entry.name)

    def _check_shard(self, shard_index: int) -> None:
        if not 0 <= shard_index < self.num_shards:
            raise IndexError(f"shard index {shard_index} out of range: {self.name} has {self.num_shards} shards")

    def _shard_number(self, name: str) -> int:
        for shard_index in range(self.num_shards):
            known = self._found.shards[shard_index].name if self._found else self.catalog.shard(shard_index).name
            if known == name:
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

    def _load_index(self, source: ShardSource) -> ShardIndex:
        return load_index(source, self._store, options=self._options, policy=self.policy, report=self.report)

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
        return self.get_shard_info(self._shard_number(shard_name))

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


def _reopen(folder: str, tokens: tuple[str, ...], store: Store, options: IndexOptions, policy: Policy) -> Dataset:
    catalog = open_catalog(Path(folder))
    if tuple(group.samples for group in catalog.manifest.groups) != tokens:
        raise StateError(f"the catalog {folder} was written again after the dataset was sent", hint="send it again")
    return Dataset(None, store, options=options, catalog=catalog, policy=policy)
