"""A dataset: shards and their indexes under one numbering of samples."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardset.errors import StateError, without_secrets
from shardset.index.catalog import open_catalog
from shardset.storage.anywhere import store_for
from shardset.storage.local import storage_error

from .discover import Found
from .rewriting import coalesced_folder, probe_caption_layout, rename_field
from .samples import Samples
from .select import Selection

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import pyarrow.compute as pc

    from shardset.index.catalog import Catalog
    from shardset.policy import Policy, Report
    from shardset.storage.cache import CachedStore
    from shardset.storage.store import Store

    from .catalogs import IndexOptions
    from .shards import Origin
    from .views import Bucketed, Buckets, Pack, Packed


class Dataset(Samples):
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

    def select(
        self, where: pc.Expression | None = None, *, columns: Any = None, on: str | Sequence[str] = "key"
    ) -> Selection:
        """Return the samples that an expression over the catalog's columns is true of, as `Selection.select` does.

        Args:
            where: An expression, as ``pc.field("width") >= 512`` (``import pyarrow.compute as pc``); None for all.
            columns: A table with more columns, or the path of a Parquet or Arrow file, or a list of these.
            on: What the table is joined by: ``"key"``, ``["shard", "key"]`` or ``"sample_index"``.

        Raises:
            As `Selection.select`.
        """
        return Selection(self).select(where, columns=columns, on=on)

    def bucketed(self, buckets: Buckets) -> Bucketed:
        """Have all samples given in batches of one image size, as `Selection.bucketed` does."""
        return Selection(self).bucketed(buckets)

    def packed(self, pack: Pack) -> Packed:
        """Have all samples given in packs of limited length, as `Selection.packed` does."""
        return Selection(self).packed(pack)

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
