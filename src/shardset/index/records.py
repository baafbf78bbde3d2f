"""The index of a TFRecord shard: from its framing, and whether it still fits the shard.

A record is a sample. Its key is its number in the shard, its fields are the features that its payload holds, which are
read when they are asked for. TFRecord has no gaps between records, so that their lengths say where all of them are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from shardset.errors import FormatError, IndexFileError
from shardset.formats.compression import detect, inflate
from shardset.formats.faults import Fault
from shardset.formats.naming import Names
from shardset.formats.patterns import named_format
from shardset.formats.tfrecord import FOOTER_SIZE, FRAME_SIZE, HEADER_SIZE, RecordTable, header_crcs, scan_records
from shardset.formats.tfrecord_salvage import Mended, Records, salvage
from shardset.storage.gzipped import GzipSource
from shardset.storage.store import url_name

from .forward import iter_pieces, read_forward
from .table import RecordForm, ShardIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.formats.patterns import ShardFormat
    from shardset.policy import Policy, Report
    from shardset.storage.store import Reader

    Int64s = NDArray[np.int64]

_HEAD: Final = 4 << 10
_PROBES: Final = 8


def shard_format(reader: Reader) -> ShardFormat:
    """Tell of what format a shard is: by its name, or else by how it begins."""
    named = named_format(url_name(reader.url))
    if named is not None:
        return named
    head = reader.read(0, min(reader.size, _HEAD))
    detected = detect(head)
    if detected.kind in {"gzip", "zlib"}:
        try:
            inside = next(iter(inflate([head], detected.kind, shard=reader.url)), b"")
        except FormatError:
            return "tar"
        return "tfrecord" if detect(bytes(inside[:HEADER_SIZE])).kind == "" else "tar"
    return "tfrecord" if head and detected.kind == "" else "tar"


def build_record_index(reader: Reader, policy: Policy, report: Report) -> ShardIndex:
    """Index a TFRecord shard: plain, or compressed with gzip. Faults are part of the result.

    Args:
        reader: The shard.
        policy: If it does not raise at damage, the records behind the damage are looked for, in a plain shard.
        report: Counts what was passed over.

    Raises:
        MissingExtraError: It is compressed, and the extra ``gzip`` is not installed.
        StorageError: Reading failed.
    """
    detected = detect(reader.read(0, min(reader.size, _HEAD)))
    if detected.kind == "gzip":
        return _build_gzipped(reader, report)
    if detected.kind == "zlib":
        what = "the shard is compressed (zlib)"
        return index_from_records(_failed(Fault("compressed", 0, message=what)), reader.size, RecordForm("", 0))
    if detected.kind is None and reader.size:
        what = f"this is no TFRecord file: it seems to be {detected.what}"
        return index_from_records(_failed(Fault("not_tfrecord", 0, message=what)), reader.size, RecordForm("", 0))
    table = scan_plain(reader)
    if table.faults and policy.action(table.faults[0].code) != "raise":
        table = _look_behind(reader, table)
    return index_from_records(table, reader.size, RecordForm("", reader.size))


def _look_behind(reader: Reader, table: RecordTable) -> RecordTable:
    """Find the records behind the damage that ended a scan. Their payloads are not read; that is done when they are."""
    start, whole = table.end, reader.map()

    def read(offset: int, length: int) -> Buffer:
        return reader.read(start + offset, length) if whole is None else whole[start + offset : start + offset + length]

    offsets, lengths = [table.offset], [table.length]
    for event in salvage(read, reader.size - start, is_mapped=whole is not None, verify=False):
        if isinstance(event, Records):
            offsets.append(event.offsets + start)
            lengths.append(event.lengths)
        elif isinstance(event, Mended):
            offsets.append(np.array([event.offset + start], np.int64))
            lengths.append(np.array([event.length], np.int64))
    found = sum(map(len, offsets)) - len(table.offset)
    faults = table.faults
    if found:
        faults = (*faults, Fault("records_behind_damage", start, message=f"{found} records were found behind it"))
    return replace(table, offset=np.concatenate(offsets), length=np.concatenate(lengths), faults=faults)


def _failed(fault: Fault) -> RecordTable:
    none = np.zeros(0, np.int64)
    return RecordTable(none, none, 0, (fault,))


def scan_plain(reader: Reader, start: int = 0) -> RecordTable:
    """Find the records of a plain TFRecord shard from byte `start` on, where one must begin."""
    whole = reader.map()
    if whole is None:
        return scan_records(reader.read, reader.size, start=start)
    return scan_records(
        lambda offset, length: whole[offset : offset + length], reader.size, is_mapped=True, start=start
    )


def _build_gzipped(reader: Reader, report: Report) -> ShardIndex:
    # Once through, with all checksums, because whoever makes the points does not notice where a file was cut.
    size, damage = 0, None
    try:
        for piece in inflate(iter_pieces(reader), "gzip", shard=reader.url, report=report):
            size += len(memoryview(piece))
    except FormatError as error:
        damage = Fault(error.code, error.offset or 0, message=error.message)
    if damage is not None:  # that the last record is cut is no fault of its own
        table = replace(scan_records(read_forward(reader, size).read, size), faults=(damage,))
        return index_from_records(table, reader.size, RecordForm("gzip", size))
    source = GzipSource(reader, size)
    table = scan_records(source.reader.read, size)
    return index_from_records(table, reader.size, RecordForm("gzip", size, source.points()))


def open_records(reader: Reader, form: RecordForm) -> Reader:
    """Return a reader of a shard's records, before compression.

    Raises:
        MissingExtraError: The shard is compressed, and the extra ``gzip`` is not installed.
        IndexFileError: The access points are malformed.
    """
    if not form.compression or not form.size:
        return reader
    if not form.points:  # it is damaged
        return read_forward(reader, form.size)
    return GzipSource(reader, form.size, form.points).reader


def index_from_records(table: RecordTable, size: int, form: RecordForm) -> ShardIndex:
    """Turn records into the index of a shard of `size` bytes."""
    count = len(table.offset)
    names = record_names(count)
    return ShardIndex(
        size,
        names,
        table.offset,
        table.length,
        names.lengths,
        np.zeros(count, np.int32),
        ("",),
        np.arange(count + 1),
        faults=table.faults,
        records=form,
    )


def record_names(count: int) -> Names:
    """Return the numbers from 0 below `count`, in decimal digits."""
    column = pa.array(np.arange(count)).cast(pa.string())
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32, count + 1) if count else np.zeros(1, np.int32)
    return Names(np.frombuffer(data or b"", np.uint8)[: ends[-1]], ends.astype(np.int64))


def fits_records(index: ShardIndex, reader: Reader) -> bool:
    """Look at a few headers of a TFRecord shard, whether they are where an index says.

    The shard must be of the indexed size, end behind the last record, and have the headers of records spread over it.
    An index that knows of damage fits nothing: a shard that was mended, or whose download went on, looks the same.

    Raises:
        StorageError: Reading failed.
    """
    form = index.records
    assert form is not None  # noqa: S101 - the caller has looked
    if reader.size != index.size or any(fault.is_error for fault in index.faults):
        return False
    if form.compression:
        if detect(reader.read(0, min(reader.size, _HEAD))).kind != form.compression:
            return False
        rows = np.array([0, index.num_files - 1] if index.num_files else [], np.int64)  # each costs milliseconds
        try:
            return not len(rows) or has_headers(open_records(reader, form), index.offset[rows], index.length[rows])
        except (FormatError, IndexFileError):
            return False
    end = int(index.offset[-1] + index.length[-1]) + FOOTER_SIZE if index.num_files else 0
    return end == reader.size and _has_some_headers(index, reader)


def _has_some_headers(index: ShardIndex, reader: Reader) -> bool:
    rows = np.arange(index.num_files)
    if len(rows) > _PROBES:
        rows = np.linspace(0, len(rows) - 1, _PROBES).astype(np.int64)
    return has_headers(reader, index.offset[rows], index.length[rows])


def has_headers(reader: Reader, offsets: Int64s, lengths: Int64s) -> bool:
    """Tell whether the headers of some records stand before their payloads.

    Raises:
        StorageError: Reading failed.
    """
    headers = b"".join(reader.read_many(offsets - HEADER_SIZE, np.full(len(offsets), HEADER_SIZE)))
    table = np.frombuffer(headers, np.dtype([("length", "<u8"), ("crc", "<u4")]))
    stated = lengths.astype(np.uint64)
    return bool((table["length"] == stated).all() and (table["crc"] == header_crcs(stated)).all())


def extend_index(index: ShardIndex, reader: Reader) -> ShardIndex | None:
    """Return the index of a plain TFRecord shard that has grown since it was indexed, or None if it is another one.

    Records that are there already are not read again, but for the headers of a few.

    Raises:
        StorageError: Reading failed.
    """
    form = index.records
    if form is None or form.compression or index.faults or not index.num_files or reader.size <= index.size:
        return None
    if not _has_some_headers(index, reader):
        return None
    end = int(index.offset[-1] + index.length[-1]) + FOOTER_SIZE
    more = scan_plain(reader, end)
    table = replace(
        more,
        offset=np.concatenate([index.offset, more.offset]),
        length=np.concatenate([index.length, more.length]),
    )
    return index_from_records(table, reader.size, RecordForm("", reader.size))


def lengths_to_offsets(lengths: Int64s, gaps: list[tuple[int, int]]) -> Int64s:
    """Return the payload offsets of records from their lengths.

    Args:
        lengths: Bytes of each payload.
        gaps: (row, bytes): that many bytes before that record belong to none.
    """
    before = np.full(len(lengths), FRAME_SIZE, np.int64)
    before[1:] += lengths[:-1]
    before[:1] = HEADER_SIZE
    for row, size in gaps:
        before[row] += size
    return np.cumsum(before)


def find_gaps(index: ShardIndex) -> list[tuple[int, int]]:
    """Return the bytes before records that belong to none, as `lengths_to_offsets` takes them."""
    if not index.num_files:
        return []
    between = np.diff(index.offset, prepend=0) - FRAME_SIZE
    between[0] += FOOTER_SIZE
    between[1:] -= index.length[:-1]
    rows = np.flatnonzero(between)
    return list(zip(rows.tolist(), between[rows].tolist(), strict=True))
