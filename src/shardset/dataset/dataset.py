"""A dataset: shards and their indexes under one numbering of samples."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

from shardset.errors import FormatError, MissingFieldError, StateError, without_secrets
from shardset.index.build import settle_faults
from shardset.index.catalog import Catalog, ShardEntry, open_catalog
from shardset.index.records import SampleRecord, join_tables, read_record, read_records
from shardset.storage.anywhere import store_for
from shardset.storage.local import storage_error
from shardset.storage.threads import map_ahead

from .catalogs import IndexOptions, build_catalog, catalog_in_cache, find_catalog
from .discover import Found
from .reading import BatchReader, by_group, split_chunks
from .rewriting import coalesced_folder, probe_caption_layout, rename_field
from .sample import Sample
from .shards import Shards

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from shardset.formats.faults import Fault
    from shardset.index.catalog import Group
    from shardset.policy import Policy, Report
    from shardset.storage.cache import CachedStore
    from shardset.storage.store import Store

    from .reading import Chunk
    from .shards import Origin

logger = logging.getLogger(__name__)

_CHUNKS_AHEAD: Final = 16
_MEMORY_AHEAD: Final = 64 << 20


class Dataset(Shards):
    """Shards under one numbering of samples. Made by `discover_dataset` and `open_dataset`.

    ``len(ds)`` counts samples, ``ds[i]`` gives one, iteration gives all in order: shards in order, samples in archive
    order. The first of these that is asked for opens the dataset's catalog, or makes it in the user's cache folder.
    What is about single shards comes from `Shards`, and counts as webshart does.

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
        origin: Origin | None = None,
        hf_token: str | None = None,
    ) -> None:
        super().__init__(
            found,
            store,
            options=options,
            policy=policy,
            report=report,
            catalog=catalog,
            origin=origin,
            hf_token=hf_token,
        )
        self._metadata_given = self._options.metadata
        # The samples of the group that was looked into last, which is most often the one looked into next.
        self._span: tuple[int, int, Any, int] = (0, 0, None, 0)
        if catalog is not None:
            self._settle_damage(catalog)

    def renew(self, metadata: str | None = None) -> None:
        """Read indexes anew when they are needed next: somebody has changed them.

        Args:
            metadata: Folder that they are in from now on; by default where they were.
        """
        if metadata is not None:
            self._options = replace(self._options, metadata=metadata)
            self._store = store_for(self._store, self.shard_url(0), metadata)
            if self._sidecars is not None:
                self._sidecars.store = self._store
        self._store.close()
        self._files.clear()
        self._span = (0, 0, None, 0)
        if self._found is not None:
            self._catalog = None

    def enable_metadata_cache(self, location: str | os.PathLike[str], init_shard_count: int = 4) -> None:
        """Keep the sidecar indexes of shards on this machine's disk, each for as long as its etag stays what it is.

        Indexes that `TarDataLoader.coalesce_caption_metadata` made there are read in place of the others.

        Args:
            location: The folder.
            init_shard_count: So many shards' indexes are read at once, from the first on.

        Raises:
            As `files`.
        """
        super().enable_metadata_cache(location, 0)
        folder = coalesced_folder(self)
        if folder is not None and Path(folder).is_dir():
            self.renew(folder)
        self.load_files(range(min(init_shard_count, self.num_shards)))

    def clear_metadata_cache(self) -> None:
        """Remove all indexes from the metadata cache, which stays enabled, and forget those in memory.

        Those that `TarDataLoader.coalesce_caption_metadata` made there go too.

        Raises:
            StorageError: Something cannot be removed.
        """
        super().clear_metadata_cache()
        folder = coalesced_folder(self)
        if folder is not None:
            try:
                if Path(folder).exists():
                    shutil.rmtree(folder)
            except OSError as error:
                raise storage_error(error, folder) from error
            if self._options.metadata == folder:
                self._options = replace(self._options, metadata=self._metadata_given)
        self.renew()

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
                    found,
                    folder,
                    self._load_index,
                    options=self._options,
                    policy=self.policy,
                    report=self.report,
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
    def total_files(self) -> int:
        """Files in all shards, those of no sample included."""
        try:
            return self.catalog.num_files
        except FormatError:  # perhaps of what is no tar and has an index
            return self.file_start(self.num_shards)

    def faults(self) -> Iterator[tuple[str, Fault]]:
        """Yield what is wrong or odd in the shards, with the url of each."""
        for shard_index, fault in self.catalog.faults():
            yield self.shard_url(shard_index), fault

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the catalog's tables: ``"samples"``, ``"shards"`` and ``"others"`` (files of no sample).

        They are views of the mapped files, a chunk for each group. The column ``shard`` counts within its group.
        """
        return join_tables([self.catalog.group(number) for number in range(self.catalog.num_groups)])

    def subset(self, shard_indices: Sequence[int]) -> Dataset:
        """Return a dataset of some of the shards, in the order given.

        Raises:
            IndexError: There is no such shard.
        """
        shards = tuple(self.info(number) for number in shard_indices)
        root = self.name if self._found is None else self._found.root
        found = Found(self.name, root, shards)
        return Dataset(
            found,
            self._store,
            options=self._options,
            policy=self.policy,
            report=self.report,
            origin=self._origin,
            hf_token=self._hf_token,
        )

    def field_rename(
        self,
        old_name: str,
        new_name: str,
        *,
        overwrite: bool = False,
        destination: str | os.PathLike[str] | None = None,
    ) -> int:
        """Rename a field of the entries of every sidecar index.

        Args:
            old_name: What it is called.
            new_name: What it shall be called.
            overwrite: Replace a field that has the new name already.
            destination: Folder to write the indexes to, from which they are read from then on; by default they are
                rewritten where they are.

        Returns:
            How many entries had the field.

        Raises:
            ValueError: A name is empty or one of the index's own, an entry has a field of the new name, or the indexes
                are elsewhere and there is no destination.
            IndexFileError: An index is malformed; none was changed.
        """
        return rename_field(self, old_name, new_name, overwrite=overwrite, destination=destination)

    def probe_caption_layout(self, max_shards: int | None = None) -> dict[str, Any]:
        """Tell from the indexes of the first shards how captions are kept.

        Args:
            max_shards: How many shards to look at; by default all.

        Returns:
            ``layout``, one of ``none, embedded, json_sidecar, txt_sidecar, mixed``, and the counts that it rests on.

        Raises:
            ValueError: `max_shards` is not positive.
        """
        return probe_caption_layout(self, max_shards)

    def __len__(self) -> int:
        return self.catalog.num_samples

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, num_shards={self.num_shards})"

    def __reduce__(self) -> tuple[Any, ...]:
        folder = self.catalog.folder.absolute()
        tokens = tuple(group.samples for group in self.catalog.manifest.groups)
        # A catalog keeps no signatures of urls; the process that gets the dataset needs them.
        found = self._found
        if found is not None and all(without_secrets(shard.url) == shard.url for shard in found.shards):
            found = None
        sent = _Sent(
            str(folder),
            tokens,
            found,
            self._store,
            self._options,
            self.policy,
            self._cache,
            self._sidecars,
            self.origin,
        )
        return _reopen, (sent,)

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
        wanted = None if shard is None else self.shard_number(shard)
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

        def read(chunk: tuple[Group, Chunk, int, int]) -> Iterator[dict[str, Any] | None]:
            group, (rows, _), first_shard, first_sample = chunk
            return batches.read(group, rows, first_shard, first_sample, fields, copy=copy)

        chunks = self._chunks(start, stop)
        # What lies whole in the cache is mapped, and threads would only pass it on.
        waits = self.is_remote and (self._cache is None or self._cache.block is not None)
        for samples in (
            map_ahead(read, chunks, _CHUNKS_AHEAD, memory=_MEMORY_AHEAD, size_of=lambda chunk: chunk[1].length)
            if waits
            else map(read, chunks)
        ):
            for sample in samples:
                if sample is not None:
                    yield sample

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[Group, Chunk, int, int]]:
        """Yield chunks of one group and shard, with the number of its first shard and of its first sample."""
        while start < stop:
            group, row, first_shard = self.catalog.locate(start)
            last = min(group.files.num_samples, row + stop - start)
            for chunk in split_chunks(group, row, last, is_remote=self.is_remote):
                yield group, chunk, first_shard, start - row
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

    def shard_entry(self, shard_index: int) -> ShardEntry:
        """Return what the catalog says of a shard."""
        return self.catalog.shard(shard_index)

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


class _Sent(NamedTuple):
    """What goes to another process in place of a dataset."""

    folder: str
    tokens: tuple[str, ...]
    found: Found | None
    store: Store
    options: IndexOptions
    policy: Policy
    cache: CachedStore | None
    sidecars: CachedStore | None
    origin: Origin


def _reopen(sent: _Sent) -> Dataset:
    catalog = open_catalog(Path(sent.folder))
    if tuple(group.samples for group in catalog.manifest.groups) != sent.tokens:
        what = f"the catalog {sent.folder} was written again after the dataset was sent"
        raise StateError(what, hint="send it again")
    dataset = Dataset(
        sent.found, sent.store, options=sent.options, catalog=catalog, policy=sent.policy, origin=sent.origin
    )
    dataset._cache, dataset._sidecars = sent.cache, sent.sidecars  # noqa: SLF001 - as they were
    return dataset


DiscoveredDataset = Dataset
"""webshart's name for it."""
