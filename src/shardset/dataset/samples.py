"""The samples of a dataset under one numbering, read one by one, many at once, and in order."""

from __future__ import annotations

import logging
import math
import operator
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, overload

from shardset.errors import FormatError, MissingFieldError
from shardset.index.build import settle_faults
from shardset.index.rows import SampleRow, join_tables, read_row, read_rows
from shardset.storage.threads import map_ahead

from .catalogs import build_catalog, catalog_in_cache, find_catalog
from .reading import BatchReader, by_group, sample_kind, split_chunks
from .record_sample import RecordSample
from .sample import Sample
from .schema import read_schema
from .shards import Shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from shardset.formats.example_schema import FeatureSchema
    from shardset.formats.faults import Fault
    from shardset.index.catalog import Catalog, Group, ShardEntry

    from .reading import Chunk

logger = logging.getLogger(__name__)

_CHUNKS_AHEAD: Final = 16
_MEMORY_AHEAD: Final = 64 << 20


class Samples(Shards):
    """Shards with their catalog, and with it the samples. `Dataset` adds what changes indexes.

    Attributes:
        policy: What happens on faults.
        report: What was skipped, left out or not trusted, with places.
    """

    # The samples of the group that was looked into last, which is most often the one looked into next.
    _span: tuple[int, int, Any, int] = (0, 0, None, 0)

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

    def __len__(self) -> int:
        return self.catalog.num_samples

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if type(index) is int:
            start, stop, group, first_shard = self._span
            if start <= index < stop:
                row = index - start
                kind = Sample if group.layout_at[row] != group.record_layout else RecordSample
                return kind(self, group, row, first_shard + group.shard_at[row], index)
        catalog = self.catalog
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(catalog.num_samples))]
        count = catalog.sample_starts[-1]
        number = index if index >= 0 else index + count
        if not 0 <= number < count:
            raise IndexError(f"sample {index} of a dataset of {count}")
        group, row, first_shard = catalog.locate(number)
        self._span = (number - row, number - row + group.files.num_samples, group, first_shard)
        return sample_kind(group, row)(self, group, row, first_shard + group.shard_at[row], number)

    def __iter__(self) -> Iterator[Sample]:
        catalog = self.catalog
        for number in range(catalog.num_groups):
            group, first_shard, start = (
                catalog.group(number),
                catalog.shard_starts[number],
                catalog.sample_starts[number],
            )
            for row, shard in enumerate(group.shard_at):
                yield sample_kind(group, row)(self, group, row, first_shard + shard, start + row)

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
            fields: Read only these. ``"__record__"`` is the payload of a record of a TFRecord shard, of whatever kind.
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

        for samples in self._read_ahead(read, start, stop):
            for sample in samples:
                if sample is not None:
                    yield sample

    def _read_ahead(
        self, read: Callable[[tuple[Group, Chunk, int, int]], Iterator[Any]], start: int, stop: int
    ) -> Iterator[Iterator[Any]]:
        """Read samples chunk by chunk in order, ahead of who takes them where that waits for a network."""
        chunks = self._chunks(start, stop)
        # What lies whole in the cache is mapped, and threads would only pass it on.
        if self.is_remote and (self._cache is None or self._cache.block is not None):
            yield from map_ahead(
                read, chunks, _CHUNKS_AHEAD, memory=_MEMORY_AHEAD, size_of=lambda chunk: chunk[1].length
            )
        else:
            yield from map(read, chunks)

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
            fields: Read only these, as for `iter_dicts`.
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
            field: The field; ``"__record__"`` as for `iter_dicts`.
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

    def read_records(
        self, indices: Sequence[int] | NDArray[np.integer], *, copy: bool = True, verify: bool = True
    ) -> list[Any]:
        """Read the payloads of many records of TFRecord shards, from anywhere in the dataset, in the order asked.

        Args:
            indices: Numbers of samples.
            copy: Give bytes; otherwise views (see `Sample.view`).
            verify: Compare checksums.

        Returns:
            The payloads; None for one that the policy says to skip.

        Raises:
            IndexError: There is no such sample.
            ValueError: One of them is no record.
            ChecksumError: One is damaged.
            StorageError: Reading failed.
        """
        batches = BatchReader(self, self.policy, self.report)
        return by_group(
            self.catalog,
            indices,
            lambda group, rows, shard, _: list(batches.read_payloads(group, rows, shard, copy=copy, verify=verify)),
        )

    def iter_records(
        self, *, start: int = 0, stop: int | None = None, copy: bool = True, verify: bool = True
    ) -> Iterator[Any]:
        """Read the payloads of records of TFRecord shards in order, as `read_records` does.

        One that the policy says to skip is left out, and counted.

        Args:
            start: The first sample.
            stop: The sample behind the last; by default all.
            copy: Give bytes; otherwise views.
            verify: Compare checksums.

        Raises:
            As `read_records`.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        return (payload for _, payload in self.iter_numbered_records(start, stop, copy=copy, verify=verify))

    def iter_numbered_records(self, start: int, stop: int, *, copy: bool, verify: bool) -> Iterator[tuple[int, Any]]:
        """Read records as `iter_records` does, each with the number of its sample."""
        batches = BatchReader(self, self.policy, self.report)

        def read(chunk: tuple[Group, Chunk, int, int]) -> Iterator[tuple[int, Any]]:
            group, (rows, _), first_shard, first_sample = chunk
            payloads = batches.read_payloads(group, rows, first_shard, copy=copy, verify=verify)
            return zip((rows + first_sample).tolist(), payloads, strict=True)

        for records in self._read_ahead(read, start, stop):
            for number, payload in records:
                if payload is not None:
                    yield number, payload

    def schema(
        self, *, start: int = 0, stop: int | None = None, progress: Callable[[int, int], None] | None = None
    ) -> tuple[FeatureSchema, ...]:
        """Read records of TFRecord shards, and tell of every feature its kinds, lengths, and how often it is missing.

        Args:
            start: The first sample.
            stop: The sample behind the last; by default all.
            progress: Called with (records read, records in all) now and then.

        Raises:
            ValueError: There are samples of a tar among them.
            DecodeError: A record is no Example, and the policy says to raise.
            As `iter_records`.
        """
        return read_schema(self, start=start, stop=stop, progress=progress)

    def split(self, parts: SupportsIndex | Sequence[float]) -> list[range]:
        """Divide the samples into runs of neighbours, the same ones each time: each sample is in exactly one.

        Part `i` of `n` is ``range(i * len(ds) // n, (i + 1) * len(ds) // n)``, so that workers need not talk.

        Args:
            parts: How many of about the same size; or their shares (``[0.9, 0.1]``), in order.

        Returns:
            The numbers of samples of each part, to be used as ``ds[part[0]]`` or ``ds.iter_dicts(start=part.start,
            stop=part.stop)``.

        Raises:
            ValueError: There is no part, or a share is negative, or all are zero.
        """
        count = len(self)
        if isinstance(parts, SupportsIndex):
            parts = operator.index(parts)
            if parts < 1:
                raise ValueError(f"{parts} parts: there is at least one")
            ends = [(part + 1) * count // parts for part in range(parts)]
        else:
            total = sum(parts)
            if not len(parts) or min(parts) < 0 or not 0 < total < math.inf:
                raise ValueError(f"shares are not negative, and not all zero: {parts!r}")
            ends = [min(count, round(sum(parts[: part + 1]) / total * count)) for part in range(len(parts))]
        return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def shard_entry(self, shard_index: int) -> ShardEntry:
        """Return what the catalog says of a shard."""
        return self.catalog.shard(shard_index)

    def row(self, index: int) -> SampleRow:
        """Return what the catalog knows of a sample, without opening its shard.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        group, row, first_shard = self.catalog.locate(index)
        return read_row(group, row, first_shard)

    def rows(self, indices: Sequence[int] | NDArray[np.integer]) -> list[SampleRow]:
        """Return what the catalog knows of many samples, in the order asked, without opening their shards.

        Raises:
            IndexError: There is no such sample.
        """
        return by_group(self.catalog, indices, lambda group, rows, first_shard, _: read_rows(group, rows, first_shard))
