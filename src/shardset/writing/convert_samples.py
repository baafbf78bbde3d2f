"""Samples on their way from one format to the other: read from shards, and turned into what the other one holds."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import orjson

from shardset.dataset.files import read_pieces
from shardset.dataset.record_frames import read_frames
from shardset.errors import FormatError, SampleError
from shardset.formats.tfrecord import HEADER_SIZE, find_corrupt, payload_fault
from shardset.index.build import build_index
from shardset.index.record_reader import iter_records
from shardset.index.records import open_records
from shardset.policy import Place, Report, settle

from .member_names import ContentSuffixes
from .record_members import KEY, Member, build_record, feature_members, observe, parse_record
from .sample_records import NUMBERED, RECORD_SUFFIX, sample_members, sample_record, usable_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardset.formats.example import SequenceExample
    from shardset.index.table import ShardIndex
    from shardset.policy import Policy
    from shardset.storage.store import Reader, Store

MARKER: Final = "__shardset__/features.json"
"""The member of a tar that says that its samples are records, and what their keys are."""
_VERSION: Final = 1
_SHOWN: Final = 64
_SHOWN_BYTES: Final = 16 << 20
_CHUNK: Final = 512
_CHUNK_BYTES: Final = 8 << 20
_LONGEST_MARKER: Final = 1 << 20


class TarSample(NamedTuple):
    """A sample of a tar.

    Attributes:
        key: Its key; bytes that are no UTF-8 are surrogate escapes.
        members: Its parts, in archive order.
    """

    key: str
    members: list[Member]


def iter_shard_records(url: str, store: Store, policy: Policy, report: Report) -> Iterator[bytes]:
    """Yield the records of a TFRecord shard, each compared with its checksum.

    Raises:
        FormatError: The shard is damaged, and the policy says to raise; otherwise the records that are damaged are left
            out and counted, and those behind them are yielded as far as they can be found.
        StorageError: Reading failed.
    """
    if policy.on_error == "raise":
        yield from iter_records(url, store=store, report=report)
        return
    reader = store.open(url)
    index = build_index(reader, policy=policy, report=report)
    assert index.records is not None  # noqa: S101 - `convert` asked of what format it is by the same rule
    content, ends = open_records(reader, index.records), np.cumsum(index.length)
    first = 0
    while first < index.num_files:
        before = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, before + _CHUNK_BYTES, side="right"))
        stop = min(max(stop, first + 1), first + _CHUNK)
        offsets = index.offset[first:stop]
        frames = read_frames(content, offsets, index.length[first:stop])
        wrong = set(find_corrupt(*frames).tolist())
        for at, payload in enumerate(frames.payloads):
            if at in wrong:
                start = int(offsets[at]) - HEADER_SIZE
                fault = payload_fault(start, int(frames.stored[at]), payload, first + at)
                place = Place(url, start, str(first + at), fault.message)
                settle(fault.error(url), fault.code, place, policy, report)
            else:
                yield bytes(payload)
        first = stop


class RecordsToTar:
    """Turns records into samples of tars. What it decides, it decides by the first records, for all tars alike.

    Records that were samples of a tar once (see `sample_records`) become those again, in tars like any others. All
    other records become members named by `member_names`, in tars that begin with `MARKER`. Their keys are what the
    feature ``__key__`` says, if most of the first records have a usable one, else their numbers in the whole source.
    A key that cannot name members, or is that of the sample before, is replaced by a number behind a ``%``.
    """

    def __init__(self, shown: Sequence[bytes], report: Report) -> None:
        self._report = report
        self._suffixes = ContentSuffixes()
        self._number = 0
        self._last_key: str | None = None
        parsed = [parse_record(raw) for raw in shown]
        known = [record for record in parsed if record is not None]
        self._is_plain = bool(parsed) and all(
            record is not None and not record.feature_lists and sample_members(record.context) for record in parsed
        )
        self._has_keys = 2 * sum(usable_key(record.context) is not None for record in known) > len(parsed)
        for record in known:
            observe(record, self._suffixes)

    def marker(self) -> bytes | None:
        """Return the payload of `MARKER`, or None for tars that do without."""
        if self._is_plain:
            return None
        keys = KEY if self._has_keys else "numbers"
        about = "members are features of tf.train.Example; `shardset convert` makes TFRecord of them again"
        return orjson.dumps({"version": _VERSION, "keys": keys, "about": about}, option=orjson.OPT_INDENT_2) + b"\n"

    def convert(self, raw: bytes, url: str, record: int) -> TarSample:
        """Return the sample for a record, the `record`-th of the shard `url`."""
        parsed = parse_record(raw)
        number = f"{self._number:08d}"
        self._number += 1
        sample = self._plain(parsed) if self._is_plain else self._features(parsed, raw, number, url, record)
        if sample is None or (sample.key == self._last_key and self._is_plain):
            message = "the record was no sample of a tar, as the first ones were; it is kept whole"
            self._report.add("whole_record", Place(url, key=str(record), message=message))
            sample = TarSample(NUMBERED + number, [Member(RECORD_SUFFIX, (raw,))])
        self._last_key = sample.key
        return sample

    def _plain(self, parsed: SequenceExample | None) -> TarSample | None:
        found = None if parsed is None or parsed.feature_lists else sample_members(parsed.context)
        return None if found is None else TarSample(*found)

    def _features(self, parsed: SequenceExample | None, raw: bytes, number: str, url: str, record: int) -> TarSample:
        if not self._has_keys:
            key, is_stated = number, False
        else:
            is_keyed = parsed is not None and (len(parsed.context) > 1 or bool(parsed.feature_lists))
            stated = usable_key(parsed.context) if parsed is not None and is_keyed else None
            is_stated = stated is not None and stated != self._last_key
            key = stated if is_stated and stated is not None else NUMBERED + number
        if parsed is None:
            message = "the record is no Example, or holds what an Example has no place for; it is kept whole"
            self._report.add("whole_record", Place(url, key=str(record), message=message))
            return TarSample(key, [Member(self._suffixes.suffix("", raw), (raw,))])
        if is_stated:
            parsed.context.pop(KEY)
        elif self._has_keys:
            message = f"its {KEY} is missing or alone, cannot name members, or is that of the record before"
            self._report.add("unusable_key", Place(url, key=str(record), message=message))
        return TarSample(key, feature_members(parsed, self._suffixes))


def show_records(url: str, store: Store) -> list[bytes]:
    """Return the first records of a shard, some MiB at most; of a damaged one those before the damage."""
    shown: list[bytes] = []
    size = 0
    try:
        for raw in islice(iter_records(url, store=store, report=Report()), _SHOWN):
            shown.append(raw)
            size += len(raw)
            if size > _SHOWN_BYTES:
                break
    except FormatError:
        pass  # it is met again when the shard is converted
    return shown


class TarToRecords:
    """Turns the samples of one tar into records: back into those that they were, where its `MARKER` says so.

    Args:
        reader: The tar.
        policy: What to do about damage, and about samples that cannot be converted.
        report: Counts these, and files that belong to no sample.

    Raises:
        FormatError: The tar is damaged, and the policy says to raise; or its `MARKER` cannot be read.
        StorageError: Reading failed.
    """

    def __init__(self, reader: Reader, policy: Policy, report: Report) -> None:
        self._reader = reader
        self._policy = policy
        self._report = report
        self._index = build_index(reader, policy=policy, report=report)
        self._keys: str | None = None
        first = int(self._index.sample_rows[-1])
        for row in range(first, self._index.num_files):
            name, offset = self._index.names.text(row), int(self._index.offset[row])
            if name == MARKER and self._keys is None:
                self._keys = self._parse_marker(row)
            else:
                message = "it belongs to no sample, so it has no place among records"
                report.add("file_of_no_sample", Place(reader.url, offset, name, message))

    @property
    def num_samples(self) -> int:
        """Samples in the tar."""
        return self._index.num_samples

    def iter_records(self) -> Iterator[bytes]:
        """Yield the record of each sample.

        Raises:
            SampleError: A sample cannot be converted, and the policy says to raise.
            StorageError: Reading failed.
        """
        for key, members in _iter_samples(self._reader, self._index):
            try:
                yield self._convert(key, members)
            except SampleError as error:
                error.shard, error.key = self._reader.url, key
                place = Place(self._reader.url, key=key, message=error.message)
                settle(error, "not_converted", place, self._policy, self._report)

    def _convert(self, key: str, members: list[tuple[str, memoryview]]) -> bytes:
        if self._keys is None:
            return sample_record(key, members)
        is_stated = self._keys == KEY and not key.startswith(NUMBERED)
        return build_record(key if is_stated else None, members)

    def _parse_marker(self, row: int) -> str:
        offset, length = int(self._index.offset[row]), int(self._index.length[row])
        if offset < 0 or length > _LONGEST_MARKER:
            raise self._bad_marker(offset, f"is sparse, or has {length} bytes", "write the tar again")
        try:
            said = orjson.loads(self._reader.read(offset, length))
            version, keys = said["version"], said["keys"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._bad_marker(offset, f"cannot be read: {error}", "write the tar again") from error
        if version != _VERSION or keys not in {KEY, "numbers"}:
            raise self._bad_marker(offset, f"is of version {version!r}, with keys {keys!r}", "use a newer shardset")
        return str(keys)

    def _bad_marker(self, offset: int, what: str, hint: str) -> FormatError:
        url = self._reader.url
        return FormatError(f"{MARKER} {what}", shard=url, offset=offset, code="bad_marker", member=MARKER, hint=hint)


def _iter_samples(reader: Reader, index: ShardIndex) -> Iterator[tuple[str, list[tuple[str, memoryview]]]]:
    """Yield key, suffixes as they are spelled, and payloads of each sample, some MiB at a time."""
    ends = np.cumsum(index.length)
    sample, count = 0, index.num_samples
    rows = index.sample_rows
    while sample < count:
        first = int(rows[sample])
        before = int(ends[first - 1]) if first else 0
        last_row = int(np.searchsorted(ends, before + _CHUNK_BYTES, side="right"))
        stop = int(np.searchsorted(rows, last_row, side="right")) - 1
        stop = min(max(stop, sample + 1), sample + _CHUNK, count)
        chosen = np.arange(first, int(rows[stop]))
        names = index.names.take(chosen).to_list()
        keys = index.key_lengths[chosen].tolist()
        payloads = _read(reader, index, chosen, names)
        at = 0
        for row_count in np.diff(rows[sample : stop + 1]).tolist():
            parts = [
                (names[place][keys[place] + 1 :].decode("utf-8", "surrogateescape"), payloads[place])
                for place in range(at, at + row_count)
            ]
            yield names[at][: keys[at]].decode("utf-8", "surrogateescape"), parts
            at += row_count
        sample = stop


def _read(reader: Reader, index: ShardIndex, rows: NDArray[np.int64], names: list[bytes]) -> list[memoryview]:
    offsets, lengths = index.offset[rows], index.length[rows]
    is_sparse = offsets < 0
    if not is_sparse.any():
        return reader.read_many(offsets, lengths)
    found = iter(reader.read_many(offsets[~is_sparse], lengths[~is_sparse]))
    return [
        next(found)
        if offset >= 0
        else memoryview(_read_sparse(reader, index, row, names[place].decode("utf-8", "surrogateescape")))
        for place, (row, offset) in enumerate(zip(rows.tolist(), offsets.tolist(), strict=True))
    ]


def _read_sparse(reader: Reader, index: ShardIndex, row: int, name: str) -> bytes:
    return read_pieces(reader, index.sparse[row], int(index.length[row]), name)
