"""Reading the payloads of many samples at once, into dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import (
    DecodeError,
    FormatError,
    LimitError,
    MissingFieldError,
    SampleError,
    StorageError,
    without_secrets,
)
from shardset.formats.tfrecord import HEADER_SIZE, find_corrupt, payload_fault
from shardset.policy import Place, Policy, Report, settle
from shardset.storage.remote import read_many_of
from shardset.storage.store import is_remote

from .record_frames import read_frames
from .record_parts import RecordParts, no_feature
from .record_sample import RECORD, RecordSample, parse_record
from .sample import Sample, SampleSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.errors import ShardsetError
    from shardset.index.catalog import Catalog, Group, Layout
    from shardset.storage.store import Reader

    Int64s = NDArray[np.int64]


class Chunk(NamedTuple):
    """Samples that are read at once.

    Attributes:
        rows: Their numbers in their group.
        length: Bytes of their payloads, and of about what lies between.
    """

    rows: Int64s
    length: int


_SHARDS_AT_ONCE: Final = 16
_CHUNK: Final = 256
_CHUNK_BYTES: Final = 8 << 20
# Where a read costs a round trip: as much as one request brings, however many samples that is.
_REMOTE_CHUNK: Final = 4096
_REMOTE_CHUNK_BYTES: Final = 4 << 20
_BETWEEN: Final = 1 << 10
"""Bytes between two payloads, about: padding, and a header."""


def split_chunks(group: Group, start: int, stop: int, *, is_remote: bool) -> Iterator[Chunk]:
    """Divide samples ``[start, stop)`` of a group into runs that are read at once: of one shard, some MiB at most.

    A run has at least one sample, however large that is.
    """
    most, most_bytes = (_REMOTE_CHUNK, _REMOTE_CHUNK_BYTES) if is_remote else (_CHUNK, _CHUNK_BYTES)
    while start < stop:
        shard_stop = min(stop, group.shard_span(group.shard_at[start])[1])
        first = group.first_at[start]
        sizes = np.cumsum(group.length[first : group.first_at[shard_stop]] + _BETWEEN, dtype=np.int64)
        ends = np.concatenate([[0], sizes])[group.first[start : shard_stop + 1] - first]
        at = 0
        while at < len(ends) - 1:
            last = int(np.searchsorted(ends, ends[at] + most_bytes, side="right")) - 1
            last = max(at + 1, min(last, at + most))
            yield Chunk(np.arange(start + at, start + last), int(ends[last] - ends[at]))
            at = last
        start = shard_stop


def by_group(
    catalog: Catalog,
    indices: Sequence[int] | NDArray[np.integer],
    read: Callable[[Group, Int64s, int, int], list[Any]],
) -> list[Any]:
    """Call `read` once for each group that samples lie in, and put the answers into the order asked.

    Args:
        catalog: The dataset's tables.
        indices: Numbers of samples.
        read: Takes a group, numbers of samples within it, and the numbers in the dataset of its first shard and sample;
            gives an answer for each.

    Raises:
        IndexError: There is no such sample.
    """
    numbers = np.asarray(indices, np.int64)
    if not len(numbers):
        return []
    if numbers.min() < 0 or numbers.max() >= catalog.num_samples:
        raise IndexError(f"samples {numbers.min()} to {numbers.max()} of a dataset of {catalog.num_samples}")
    if catalog.num_groups == 1:
        return read(catalog.group(0), numbers, 0, 0)
    starts, shard_starts = catalog.sample_starts, catalog.shard_starts
    groups = np.searchsorted(starts, numbers, side="right") - 1
    answers: list[Any] = [None] * len(numbers)
    for number in np.unique(groups).tolist():
        places = np.flatnonzero(groups == number)
        rows = numbers[places] - starts[number]
        found = read(catalog.group(number), rows, shard_starts[number], starts[number])
        for place, answer in zip(places.tolist(), found, strict=True):
            answers[place] = answer
    return answers


class BatchReader:
    """Reads samples of one dataset as dicts, with the dataset's policy.

    Args:
        source: The shards.
        policy: What to do about samples that cannot be given.
        report: Where it is counted.
        decide: Called in place of `settle` with each error, as it is: it raises, or returns to have the sample left
            out.
    """

    def __init__(
        self, source: SampleSource, policy: Policy, report: Report, decide: Callable[..., None] = settle
    ) -> None:
        self._source = source
        self._policy = policy
        self._if_missing = Policy(policy.on_missing, codes=policy.codes)
        self._report = report
        self._decide = decide
        # Shards elsewhere that could not be read, however often it was tried; their other samples need not try again.
        self._lost: dict[int, StorageError] = {}

    def read(
        self,
        group: Group,
        rows: Int64s,
        first_shard: int,
        first_sample: int,
        fields: Sequence[str] | None,
        *,
        copy: bool,
        optional: Sequence[str] = (),
        views_of_records: bool = False,
    ) -> Iterator[dict[str, Any] | None]:
        """Read samples of one group, in the order asked.

        Copies are made as samples are taken, so that the memory of one that was let go serves the next.

        Args:
            group: The group.
            rows: Numbers of samples within it.
            first_shard: Number in the dataset of the group's first shard.
            first_sample: Number in the dataset of its first sample.
            fields: Read only these; None for all.
            copy: Give bytes, otherwise views.
            optional: More fields of records, which need not have them; see `RecordParts.of`.
            views_of_records: Give records that are wanted as a whole as views, though their features are copied.

        Yields:
            A dict for each sample, with its key under ``"__key__"``; None for one that the policy says to skip.
        """
        layout = self._common_layout(group, rows)
        parts, views = RecordParts.of(fields, optional), views_of_records or not copy
        if layout is not None and layout.is_record:
            return self._read_records(group, rows, first_shard, parts, copy=copy, views=views)
        found = self.read_columns(group, rows, first_shard, fields)
        if found is not None:
            columns: list[Iterable[Any]] = list(found.values())
            if copy:
                columns = [map(memoryview.tobytes, column) for column in columns]
            return _make_dicts(list(found), group.keys_of(rows), columns)
        # Fields that differ from sample to sample, lack or occur twice, sparse files, and what cannot be read at once:
        # one by one, but what costs a round trip each is fetched together beforehand.
        fetched = self._fetch(group, rows, first_shard, fields)
        samples = (
            sample_kind(group, row)(self._source, group, row, first_shard + group.shard_at[row], first_sample + row)
            for row in rows.tolist()
        )
        return (self._read_one(sample, fields, parts, fetched, copy=copy, views=views) for sample in samples)

    def read_columns(
        self, group: Group, rows: Int64s, first_shard: int, fields: Sequence[str] | None
    ) -> dict[str, list[memoryview]] | None:
        """Read samples of one group that have the same fields, field by field.

        Args:
            group: The group.
            rows: Numbers of samples within it.
            first_shard: Number in the dataset of the group's first shard.
            fields: Read only these; None for all.

        Returns:
            For each field its payloads as views, in the order asked. None for records, for samples whose fields differ,
            lack or occur twice, for sparse files, and if one cannot be read while the policy says to leave it out.
        """
        layout = self._common_layout(group, rows)
        if layout is None or layout.is_record:
            return None
        wanted = layout.positions if fields is None else {field: layout.positions.get(field, -1) for field in fields}
        places = list(wanted.values())
        payloads = self._payloads(group, rows, first_shard, places) if min(places, default=0) >= 0 else None
        if payloads is None:
            return None
        return {field: payloads[place :: len(places)] for place, field in enumerate(wanted)}

    def read_field(
        self, group: Group, rows: Int64s, first_shard: int, first_sample: int, field: str, *, copy: bool
    ) -> list[Any]:
        """Read one field of samples of one group, as `read` does, but give the payloads alone."""
        layout = self._common_layout(group, rows)
        if layout is not None and layout.is_record and field == RECORD:
            return list(self.read_payloads(group, rows, first_shard, copy=copy, verify=True))
        position = -1 if layout is None else layout.positions.get(field, -1)  # of a record there are none
        payloads = self._payloads(group, rows, first_shard, [position]) if position >= 0 else None
        if payloads is not None:
            return list(map(bytes, payloads)) if copy else payloads
        samples = self.read(group, rows, first_shard, first_sample, [field], copy=copy)
        return [sample and sample[field] for sample in samples]

    def read_payloads(self, group: Group, rows: Int64s, first_shard: int, *, copy: bool, verify: bool) -> Iterator[Any]:
        """Read the payloads of records of one group, in the order asked.

        Args:
            group: The group.
            rows: Numbers of records within it.
            first_shard: Number in the dataset of the group's first shard.
            copy: Give bytes, otherwise views.
            verify: Compare checksums.

        Returns:
            A payload for each; None for one that the policy says to skip.

        Raises:
            ValueError: One of them is no record of a TFRecord shard.
        """
        if bool((group.layout[rows] != group.record_layout).any()):
            raise ValueError("these samples are of a tar shard: they have fields and are no records")
        shards = group.shard[rows]
        answers: list[memoryview | None] = [None] * len(rows)
        if len(rows) and shards.min() == shards.max():
            answers = self._read_shard(group, int(shards[0]), first_shard, rows, verify=verify)
        else:
            for shard in np.unique(shards).tolist():
                places = np.flatnonzero(shards == shard)
                found = self._read_shard(group, shard, first_shard, rows[places], verify=verify)
                for place, payload in zip(places.tolist(), found, strict=True):
                    answers[place] = payload
        return (None if each is None else each.tobytes() for each in answers) if copy else iter(answers)

    def _read_shard(
        self, group: Group, shard: int, first_shard: int, rows: Int64s, *, verify: bool
    ) -> list[memoryview | None]:
        """Read records of one shard; None for those that the policy says to skip."""
        members = group.first[rows]
        offsets, lengths = group.offset[members], group.length[members]
        try:
            reader = self._source.reader(first_shard + shard)
            frames = read_frames(reader, offsets, lengths)
        except StorageError as error:
            url, start = reader_url(self._source, first_shard + shard), group.shard_span(shard)[0]
            for row in rows.tolist():
                self._skip(error, _code(error), url, str(row - start))
            return [None] * len(rows)
        payloads: list[memoryview | None] = list(frames.payloads)
        for at in find_corrupt(*frames).tolist() if verify else ():
            record = int(rows[at]) - group.shard_span(shard)[0]
            fault = payload_fault(int(offsets[at]) - HEADER_SIZE, int(frames.stored[at]), frames.payloads[at], record)
            self._skip(fault.error(reader.url), fault.code, reader.url, str(record))
            payloads[at] = None
        return payloads

    def _skip(self, error: ShardsetError, code: str, shard: str, key: str) -> None:
        offset = error.offset if isinstance(error, FormatError) else None
        self._decide(error, code, Place(shard, offset, key, error.message), self._policy, self._report)

    def _read_records(
        self, group: Group, rows: Int64s, first_shard: int, parts: RecordParts, *, copy: bool, views: bool
    ) -> Iterator[dict[str, Any] | None]:
        # Read now, perhaps in a thread that reads ahead, and parsed as samples are taken.
        payloads = self.read_payloads(group, rows, first_shard, copy=False, verify=True)
        return (
            payload
            if payload is None
            else self._parse_record(payload, key, first_shard + group.shard_at[row], parts, copy=copy, views=views)
            for row, key, payload in zip(rows.tolist(), group.keys_of(rows), payloads, strict=True)
        )

    def _parse_record(
        self, payload: Buffer, key: str, shard_index: int, parts: RecordParts, *, copy: bool, views: bool
    ) -> dict[str, Any] | None:
        if parts.is_payload:
            return {"__key__": key, RECORD: memoryview(payload) if views else bytes(payload)}
        shard = reader_url(self._source, shard_index)
        values: dict[str, Any] = {"__key__": key}
        try:
            # What is copied is copied as a whole, so that arrays are views of it and not of the map.
            raw = bytes(payload) if copy else payload
            if parts.whole:
                values |= parts.read(raw, memoryview(payload) if views else raw, shard=shard, key=key, views=not copy)
            else:
                values |= parse_record(raw, parts.features, shard=shard, key=key, views=not copy)
            values["__key__"] = key  # also where a feature is called so, which sample["__key__"] gives
        except DecodeError as error:
            self._skip(error, "bad_example", shard, key)
            return None
        for field in parts.required:
            if field in values:
                continue
            if field not in self._policy.defaults:
                missing = no_feature(field, shard=shard, key=key)
                place = Place(shard, key=key, message=missing.message)
                self._decide(missing, "missing_field", place, self._if_missing, self._report)
                return None
            values[field] = self._policy.defaults[field]
            self._report.add("missing_field", Place(shard, key=key, message=f"no {field!r}"))
        return values

    def _fetch(
        self, group: Group, rows: Int64s, first_shard: int, fields: Sequence[str] | None
    ) -> dict[int, memoryview]:
        """Fetch the members that samples need, by number in the group; none where single reads cost nothing.

        What cannot be read is left out, so that it is met again where its sample is given, and judged there.
        """
        try:
            if not len(rows) or self._source.reader(first_shard + group.shard_at[int(rows[0])]).map() is not None:
                return {}
        except StorageError:
            return {}
        members: list[int] = []
        for row in rows.tolist():
            first, positions = group.first_at[row], group.layouts[group.layout_at[row]].positions
            wanted = positions.values() if fields is None else [positions.get(field, -1) for field in fields]
            members += [first + position for position in wanted if position >= 0]
        chosen = np.array(members, np.int64)
        chosen = chosen[group.offset[chosen] >= 0]
        shards = np.searchsorted(group.first, chosen, side="right") - 1
        try:
            views = self._read_members(
                group, group.shard[shards], first_shard, group.offset[chosen], group.length[chosen]
            )
        except StorageError:
            return {}
        return dict(zip(chosen.tolist(), views, strict=True))

    def _common_layout(self, group: Group, rows: Int64s) -> Layout | None:
        """Return the layout that all the samples have, or None if they differ."""
        if len(group.layouts) == 1:
            return group.layouts[0]
        codes = group.layout[rows]
        return group.layouts[int(codes[0])] if bool((codes == codes[0]).all()) else None

    def _payloads(self, group: Group, rows: Int64s, first_shard: int, places: list[int]) -> list[Any] | None:
        """Read the members at `places` of each sample, sample by sample.

        Returns:
            The payloads; None if one is a sparse file, or cannot be read while the policy says to leave its sample out.
        """
        members = group.first[rows]
        shards = group.shard[rows]
        if len(places) == 1:
            members = members + places[0]
        else:
            members = (members[:, None] + np.array(places, np.int32)).ravel()
            shards = np.repeat(shards, len(places))
        offsets, lengths = group.offset[members], group.length[members]
        if not len(members):
            return []
        if offsets.min() < 0:
            return None
        try:
            return self._read_members(group, shards, first_shard, offsets, lengths)
        except StorageError:
            if self._policy.action("read_failed") == "raise":
                raise
            return None

    def _read_members(
        self, group: Group, shards: NDArray[np.int32], first_shard: int, offsets: Int64s, lengths: Int64s
    ) -> list[Any]:
        of_member = shards.tolist()
        readers = {shard: self._source.reader(first_shard + shard) for shard in set(of_member)}
        if len(readers) == 1:
            return self._read_many(readers[of_member[0]], first_shard + of_member[0], offsets, lengths)
        maps = {shard: reader.map() for shard, reader in readers.items()}
        ends = offsets + lengths
        if None not in maps.values() and bool((ends <= group.shard_sizes[shards]).all()):
            views: Any = maps
            spans = zip(of_member, offsets.tolist(), ends.tolist(), strict=True)
            return [views[shard][start:end] for shard, start, end in spans]
        places = {shard: np.flatnonzero(shards == shard) for shard in readers}
        asked = [(reader, offsets[places[shard]], lengths[places[shard]]) for shard, reader in readers.items()]
        try:
            found = read_many_of(asked, _SHARDS_AT_ONCE)
        except StorageError as error:
            self._lost.update(
                (first_shard + shard, error)
                for shard, reader in readers.items()
                if without_secrets(reader.url) == error.url and is_remote(reader.url)
            )
            raise
        answers: list[Any] = [None] * len(offsets)
        for shard, views in zip(readers, found, strict=True):
            for place, view in zip(places[shard].tolist(), views, strict=True):
                answers[place] = view
        return answers

    def _read_many(self, reader: Reader, shard_index: int, offsets: Int64s, lengths: Int64s) -> list[memoryview]:
        try:
            return reader.read_many(offsets, lengths)
        except StorageError as error:
            if is_remote(reader.url):
                self._lost[shard_index] = error
            raise

    def _read_one(
        self,
        sample: Sample,
        fields: Sequence[str] | None,
        parts: RecordParts,
        fetched: dict[int, memoryview],
        *,
        copy: bool,
        views: bool,
    ) -> dict[str, Any] | None:
        lost = self._lost.get(sample.shard_index)
        if lost is not None:
            self._settle(lost, _code(lost), sample, self._policy.on_error)
            return None
        if isinstance(sample, RecordSample):
            try:
                payload = sample.record
            except (FormatError, StorageError) as error:
                code = error.code if isinstance(error, FormatError) else _code(error)
                self._skip(error, code, sample.shard, sample.key)
                return None
            return self._parse_record(payload, sample.key, sample.shard_index, parts, copy=copy, views=views)
        values: dict[str, Any] = {"__key__": sample.key}
        defaults = self._policy.defaults
        try:
            for field in sample.fields if fields is None else fields:
                if field not in sample and field in defaults:
                    values[field] = defaults[field]
                    self._report.add("missing_field", Place(sample.shard, key=sample.key, message=f"no {field!r}"))
                    continue
                view = fetched.get(sample.member(field))
                if view is not None:
                    values[field] = view.tobytes() if copy else view
                else:
                    values[field] = sample[field] if copy else sample.view(field)
        except MissingFieldError as error:
            self._settle(error, "missing_field", sample, self._policy.on_missing)
            return None
        except (SampleError, StorageError, LimitError) as error:
            self._settle(error, _code(error), sample, self._policy.on_error)
            return None
        return values

    def _settle(self, error: SampleError | StorageError | LimitError, code: str, sample: Sample, action: Any) -> None:
        place = Place(sample.shard, key=sample.key, message=error.message)
        self._decide(error, code, place, Policy(action, codes=self._policy.codes), self._report)


def sample_kind(group: Group, row: int) -> type[Sample]:
    """Return what a sample of a group is: a record, or members of a tar."""
    return RecordSample if group.layout_at[row] == group.record_layout else Sample


def reader_url(source: SampleSource, shard_index: int) -> str:
    """Return the url of a shard, for messages."""
    return source.shard_entry(shard_index).url


def _make_dicts(fields: list[str], keys: list[str], columns: list[Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """Make a dict of each sample. A literal takes a third of the time of ``dict(zip())``, so few fields have theirs."""
    if len(fields) == 1:
        (a,) = fields
        return ({"__key__": key, a: x} for key, x in zip(keys, *columns, strict=True))
    if len(fields) == 2:
        a, b = fields
        return ({"__key__": key, a: x, b: y} for key, x, y in zip(keys, *columns, strict=True))
    if len(fields) == 3:
        a, b, c = fields
        return ({"__key__": key, a: x, b: y, c: z} for key, x, y, z in zip(keys, *columns, strict=True))
    names = ["__key__", *fields]
    return (dict(zip(names, row, strict=False)) for row in zip(keys, *columns, strict=True))


def _code(error: SampleError | StorageError | LimitError) -> str:
    if isinstance(error, LimitError):
        return error.code
    return "read_failed" if isinstance(error, StorageError) else "duplicate_suffix"
