"""Samples and files by their numbers, in webshart's numbering: loading, listing, buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardset.dataset.rewriting import coalesce_captions
from shardset.index.document import collector_paused
from shardset.index.sidecar_entries import write_entries

from .buckets import Shape, shard_buckets
from .fetch import Fetcher
from .path_filter import PathFilter

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from shardset.dataset.dataset import Dataset
    from shardset.formats.captions import CaptionValue

    from .buckets import ShardBuckets
    from .entry import TarFileEntry


class ByNumber:
    """The part of `TarDataLoader` that does without a cursor."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._dataset = fetcher.dataset

    @property
    def dataset(self) -> Dataset:
        """What is loaded."""
        return self._dataset

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return self._dataset.num_shards

    @property
    def load_file_data(self) -> bool:
        """Whether payloads are read."""
        return self._fetcher.load

    @property
    def max_file_size(self) -> int:
        """The largest file that is given, in bytes."""
        return self._fetcher.max_file_size

    def load_sample(self, shard_idx: int, sample_idx: int) -> TarFileEntry | None:
        """Load one sample: a file that is no sidecar, by its place among those of its shard in path order.

        Returns:
            The entry, or None if the payload is larger than `max_file_size`, or was skipped.

        Raises:
            IndexError: There is no such shard or sample.
            StorageError: Reading failed.
        """
        return self._fetcher.one(shard_idx, sample_idx)

    def load_samples(self, locations: Sequence[tuple[int, int]]) -> list[TarFileEntry | None]:
        """Load many samples at once, as `load_sample` does, in the order asked.

        Payloads of one shard are read together.

        Args:
            locations: (shard, sample) pairs.

        Raises:
            As `load_sample`.
        """
        return self._fetcher.many(locations)

    def load_caption(self, shard_idx: int, sample_idx: int) -> CaptionValue | None:
        """Load the first caption of a sample: of the index, or of a sidecar. The payload is not read.

        Raises:
            IndexError: There is no such shard or sample.
            DecodeError: A sidecar cannot be understood.
            StorageError: Reading failed.
        """
        entry = self._without_data().one(shard_idx, sample_idx)
        return None if entry is None else entry.caption

    def load_sample_json(self, shard_idx: int, sample_idx: int) -> bytes | None:
        """Load the JSON sidecar of a sample, if it has one. The payload is not read.

        Raises:
            IndexError: There is no such shard or sample.
            StorageError: Reading failed.
        """
        entry = self._without_data().one(shard_idx, sample_idx)
        return None if entry is None else entry.json_data

    def _without_data(self) -> Fetcher:
        found = self._fetcher
        return Fetcher(self._dataset, load=False, max_file_size=found.max_file_size, copy=True, policy=found.policy)

    def get_metadata(self, shard_idx: int) -> dict[str, dict[str, Any]]:
        """Return the entries of a shard's index by path, without files that are too large; of equal paths the last.

        Raises:
            IndexError: There is no such shard.
        """
        files = self._fetcher.files(shard_idx)
        entries, apart = write_entries(files.index, files.numbering)
        for entry in entries:
            if "aspect" in entry:
                entry["aspect"] = float(np.float32(entry["aspect"]))
        # What an index file sets apart, sparse files and names that are no UTF-8, is a file like any other here.
        rows = {files.names[row]: row for row in range(files.index.num_files)} if apart else {}
        told = {entry["path"] for entry in entries}
        entries += [
            {"path": name, "offset": files.offsets[row], "length": files.lengths[row]}
            for name, row in rows.items()
            if name not in told
        ]
        return {entry["path"]: entry for entry in entries if entry["length"] <= self.max_file_size}

    def list_samples_in_shard(self, shard_idx: int) -> list[dict[str, Any]]:
        """Return ``sample_idx, filename`` of the samples of a shard that are not too large.

        Raises:
            IndexError: There is no such shard.
        """
        files = self._fetcher.files(shard_idx)
        return [
            {"sample_idx": number, "filename": files.names[row]}
            for number, row in enumerate(files.sample_rows)
            if files.lengths[row] <= self.max_file_size
        ]

    def list_samples_in_shard_filtered(
        self,
        shard_idx: int,
        path_include: Sequence[str] | None = None,
        path_exclude: Sequence[str] | None = None,
        path_filter_mode: str = "auto",
    ) -> list[dict[str, Any]]:
        """List samples as `list_samples_in_shard` does, as far as a `PathFilter` lets them through.

        Raises:
            IndexError: There is no such shard.
            As `PathFilter`.
        """
        wanted = PathFilter(path_include, path_exclude, path_filter_mode)
        return [sample for sample in self.list_samples_in_shard(shard_idx) if wanted(sample["filename"])]

    def coalesce_caption_metadata(
        self, destination: str | os.PathLike[str] | None = None, shard_indices: Iterable[int] | None = None
    ) -> dict[str, Any]:
        """Write indexes that hold the captions of all sidecars.

        Args:
            destination: Folder for them; by default the metadata cache.
            shard_indices: Of these shards; by default of all.

        Returns:
            ``shards, captioned_samples, coalesced_samples, files``.

        Raises:
            ValueError: There is neither a destination nor a metadata cache.
        """
        chosen = None if shard_indices is None else list(shard_indices)
        return coalesce_captions(self._dataset, destination, chosen)

    def list_shard_aspect_buckets(
        self,
        shard_indices: Iterable[int],
        key: str = "aspect",
        target_pixel_area: int | None = None,
        target_resolution_multiple: int = 64,
        round_to: int | None = 2,
    ) -> list[ShardBuckets]:
        """List the files of some shards by shape; `shardset.loading.buckets` has the rules.

        Raises:
            IndexError: There is no such shard.
            ValueError: The key is unknown.
        """
        shape = Shape(key, target_pixel_area, target_resolution_multiple, round_to).check()
        with collector_paused():
            return [self._buckets(index, shape, is_sample=False) for index in shard_indices]

    def list_shard_sample_aspect_buckets(
        self,
        shard_indices: Iterable[int],
        key: str = "aspect",
        target_pixel_area: int | None = None,
        target_resolution_multiple: int = 64,
        round_to: int | None = 2,
    ) -> list[ShardBuckets]:
        """List the samples of some shards by shape, with ``sample_idx``, as `list_shard_aspect_buckets` does files."""
        shape = Shape(key, target_pixel_area, target_resolution_multiple, round_to).check()
        with collector_paused():
            return [self._buckets(index, shape, is_sample=True) for index in shard_indices]

    def list_shard_sample_aspect_buckets_filtered(  # noqa: PLR0917 - webshart's signature
        self,
        shard_indices: Iterable[int],
        key: str = "aspect",
        target_pixel_area: int | None = None,
        target_resolution_multiple: int = 64,
        round_to: int | None = 2,
        path_include: Sequence[str] | None = None,
        path_exclude: Sequence[str] | None = None,
        path_filter_mode: str = "auto",
    ) -> list[ShardBuckets]:
        """List samples by shape, as far as a `PathFilter` lets them through."""
        shape = Shape(key, target_pixel_area, target_resolution_multiple, round_to).check()
        wanted = PathFilter(path_include, path_exclude, path_filter_mode)
        with collector_paused():
            return [self._buckets(index, shape, is_sample=True, wanted=wanted) for index in shard_indices]

    def list_all_aspect_buckets(
        self,
        key: str | None = None,
        target_pixel_area: int | None = None,
        target_resolution_multiple: int = 64,
        round_to: int | None = 2,
    ) -> Iterator[ShardBuckets]:
        """Give what `list_shard_aspect_buckets` does of each shard in turn."""
        shape = Shape(key or "aspect", target_pixel_area, target_resolution_multiple, round_to).check()
        return (self._buckets(index, shape, is_sample=False) for index in range(self.num_shards))

    def _buckets(
        self,
        shard_index: int,
        shape: Shape,
        *,
        is_sample: bool,
        wanted: PathFilter | None = None,
    ) -> ShardBuckets:
        files = self._fetcher.files(shard_index)
        return shard_buckets(files, shard_index, shape, self.max_file_size, is_sample=is_sample, wanted=wanted)
