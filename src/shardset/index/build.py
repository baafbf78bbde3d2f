"""From the bytes of a shard to its index, through any store's reader."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.formats.captions import (
    InvalidJson,
    captions_from_documents,
    captions_from_json,
    captions_from_text,
    parse_json_sidecars,
)
from shardset.formats.geometry_lanes import parse_geometries
from shardset.formats.geometry_reach import geometry_reach
from shardset.formats.tar import TarTable, scan_tar
from shardset.formats.tar_header import BLOCK, ZERO_BLOCK, has_valid_checksum, padded, parse_header
from shardset.policy import Place, Policy, Report, settle
from shardset.storage.remote import RemoteReader

from .numbering import number_by_path
from .records import build_record_index, fits_records, shard_format
from .remote_scan import scan_remote
from .table import GeometryColumns, ShardIndex, index_from_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.formats.captions import Captions
    from shardset.formats.faults import Fault
    from shardset.storage.store import Reader

    from .numbering import PathNumbering

MAX_SIDECAR: Final = 10_000_000
"""Caption and metadata members above this many bytes are not read into an index (webshart's limit)."""
_DEEPEST: Final = 500
"""Values nested deeper are not kept: not every writer of JSON could write them into an index, nor every reader read."""
_CANNOT_BE_DEEP: Final = 2 * _DEEPEST
"""JSON text of no more bytes is not nested deeper, since each level takes two."""
_FIRST_HEAD: Final = 1 << 10
_LONGEST_HEAD: Final = 256 << 10
"""Pictures whose size or orientation stands farther on are left without it, where reading costs something."""
_PROBES: Final = 8
_AT_ONCE: Final = 512
_PICTURES_AT_ONCE: Final = 2048
_BYTES_AT_ONCE: Final = 32 << 20
"""Sidecars and first bytes of pictures that are read, and stand in memory, at once."""
_GAP: Final = 8 << 10
"""Bytes between two of them that are read along, at most, rather than asked for both apart."""


def scan_reader(reader: Reader, *, ignore_zeros: bool = False) -> TarTable:
    """Find every member of the tar that `reader` reads. Faults are part of the result."""
    if isinstance(reader, RemoteReader):
        return scan_remote(reader, ignore_zeros=ignore_zeros)
    whole = reader.map()
    if whole is None:
        return scan_tar(reader.read, reader.size, ignore_zeros=ignore_zeros)
    return scan_tar(
        lambda offset, length: whole[offset : offset + length], reader.size, is_mapped=True, ignore_zeros=ignore_zeros
    )


def build_index(
    reader: Reader,
    *,
    captions: bool = False,
    documents: bool = True,
    geometry: bool = False,
    policy: Policy | None = None,
    report: Report | None = None,
) -> ShardIndex:
    """Build the index of a shard from its headers: of a tar, or of a TFRecord file, by its name or else its content.

    Args:
        reader: The shard.
        captions: Read the ``.json`` and ``.txt`` members beside payloads, and keep what they say of them.
        documents: With `captions`, keep the whole value of each ``.json`` member too, as ``json_metadata``.
        geometry: Read the first bytes of each payload, and keep the pixel size of those that are images.
        policy: What to do when the shard is damaged: raise (the default), or index it up to the damage.
        report: Counts faults, oddities and sidecars that could not be read.

    Raises:
        FormatError: The shard is damaged, and the policy says to raise.
        StorageError: Reading failed.
    """
    policy = policy or Policy()
    report = Report() if report is None else report
    if shard_format(reader) == "tfrecord":
        index = build_record_index(reader, policy, report)
        settle_faults(index.faults, reader.url, policy, report)
        return index
    index = index_from_table(scan_reader(reader), reader.size)
    settle_faults(index.faults, reader.url, policy, report)
    if isinstance(reader, RemoteReader):  # for few bytes among many, which are not to be read along
        reader = replace(reader, limits=replace(reader.limits, gap=min(_GAP, reader.limits.gap)))
    if captions:
        index = with_captions(index, reader, report, documents=documents)
    if geometry:
        index = replace(index, geometry=_read_geometry(index, reader))
    return index


def fits_headers(index: ShardIndex, reader: Reader) -> bool:
    """Look at a few headers of a shard, whether they are where an index from elsewhere says.

    Tars are padded, so a shard that was written again is often of the same size as before. The headers of files spread
    over the shard must be valid and state the indexed size, and the indexed name where a header alone can hold it; and
    behind the last file there must be an end, or a file that was added there would be missed.

    Raises:
        StorageError: Reading failed.
    """
    if index.records is not None:
        return fits_records(index, reader)
    rows = np.flatnonzero(index.offset >= BLOCK)
    if not len(rows):
        return False  # nothing to look at, and as little to read
    end = padded(int((index.offset + index.length).max()))
    if len(rows) > _PROBES:
        rows = rows[np.linspace(0, len(rows) - 1, _PROBES).astype(np.int64)]
    has_end = end + BLOCK <= reader.size
    places = np.append(index.offset[rows] - BLOCK, [end] if has_end else []).astype(np.int64)
    blocks = reader.read_many(places, np.full(len(places), BLOCK))
    if has_end and blocks.pop() != ZERO_BLOCK:
        return False
    return all(
        _is_header_of(bytes(block), index.names[row], int(index.length[row]))
        for row, block in zip(rows.tolist(), blocks, strict=True)
    )


def _is_header_of(block: bytes, name: bytes, length: int) -> bool:
    if not has_valid_checksum(block):
        return False
    try:
        header = parse_header(block)
    except ValueError:
        return False
    # A name that is cut or not ASCII may come from an extension header; a size of 8 GiB or more too.
    is_whole = len(header.name) < 100 and header.name.isascii()
    has_name = header.name == name or not is_whole or not name.isascii()
    return has_name and (header.size == length or length >= 8 << 30)


def settle_faults(faults: tuple[Fault, ...], shard: str | None, policy: Policy, report: Report) -> None:
    """Apply the policy to the faults of a shard: errors as it says, oddities counted unless their code says more.

    Raises:
        FormatError: The policy says to raise.
    """
    for fault in faults:
        place = Place(shard, fault.offset, fault.member, fault.message)
        if fault.is_error or fault.code in policy.codes:
            settle(fault.error(shard), fault.code, place, policy, report)
        else:
            report.add(fault.code, place)


def with_captions(index: ShardIndex, reader: Reader, report: Report, *, documents: bool) -> ShardIndex:
    """Return an index with what the ``.json`` and ``.txt`` members say, as `build_index` reads it.

    Args:
        index: The shard's index.
        reader: The shard; only payloads of such members beside others are read.
        report: Counts members that are too large, or not what their suffix says.
        documents: Keep the whole value of each ``.json`` member too.

    Raises:
        StorageError: Reading failed.
    """
    numbering = number_by_path(index)
    texts = read_texts(index, reader, numbering.text_rows, report)
    # Several payloads may share a sidecar, so its captions are worked out once, and they share its value.
    said: dict[int, Captions] = {}
    kept: dict[int, dict[str, Any]] = {}
    for json_some, values in _document_batches(index, reader, numbering.json_rows, report):
        said.update(zip(json_some, captions_from_documents(values), strict=True))
        if documents:
            kept.update(
                (row, {"json_metadata": value})
                for row, value in zip(json_some, values, strict=True)
                if value is not None
            )
    rows, json_rows = numbering.samples.tolist(), numbering.json_rows.tolist()
    extra: dict[int, dict[str, Any]] = {}
    if kept:
        extra = {row: value for row, value in zip(rows, map(kept.get, json_rows), strict=True) if value is not None}
    captions: dict[int, Captions] = {
        row: value for row, value in zip(rows, map(said.get, json_rows), strict=True) if value is not None
    }
    if texts:
        for row, text_row in zip(rows, numbering.text_rows.tolist(), strict=True):
            if row not in captions and texts.get(text_row) is not None:
                captions[row] = texts[text_row]
    _caption_by_key(index, reader, numbering, captions, report)
    return replace(index, captions=captions, extra=extra)


def _caption_by_key(
    index: ShardIndex, reader: Reader, numbering: PathNumbering, captions: dict[int, Captions], report: Report
) -> None:
    """Give samples whose sidecar is paired by key alone (``u.seg.png`` with ``u.txt``) their caption too."""
    parts = int(index.sample_rows[-1])
    sidecar_ids = [index.suffixes.index(suffix) for suffix in ("json", "txt") if suffix in index.suffixes]
    is_lone = np.zeros(index.num_files, np.bool_)
    for sidecar_id in sidecar_ids:
        is_lone[:parts] |= index.suffix_ids[:parts] == sidecar_id
    for paired in (numbering.json_rows, numbering.text_rows):
        is_lone[paired[paired >= 0]] = False
    rows = np.flatnonzero(is_lone)
    samples = np.searchsorted(index.sample_rows, rows, side="right") - 1
    is_beside = np.diff(index.sample_rows)[samples] > 1
    rows, samples = rows[is_beside], samples[is_beside]
    if not len(rows):
        return
    is_text = np.array([index.suffixes[i] == "txt" for i in index.suffix_ids[rows].tolist()], np.bool_)
    documents = dict(iter_documents(index, reader, rows[~is_text], report))
    texts = read_texts(index, reader, rows[is_text], report)
    for row, sample in zip(rows.tolist(), samples.tolist(), strict=True):
        members = range(int(index.sample_rows[sample]), int(index.sample_rows[sample + 1]))
        target = next((member for member in members if index.suffix_ids[member] not in sidecar_ids), None)
        if target is None or target in captions:
            continue
        found = captions_from_json(documents[row]) if row in documents else texts.get(row)
        if found is not None:
            captions[target] = found


def _small_rows(index: ShardIndex, rows: NDArray[np.int64], reader: Reader, report: Report) -> NDArray[np.int64]:
    """Return the distinct rows that are set and not too large; count those that are too large."""
    is_wanted = np.zeros(index.num_files, np.bool_)
    is_wanted[rows[rows >= 0]] = True
    rows = np.flatnonzero(is_wanted)
    rows = rows[index.offset[rows] >= 0]
    for row in rows[index.length[rows] > MAX_SIDECAR].tolist():
        place = Place(reader.url, int(index.offset[row]), index.names.text(row), f"{int(index.length[row])} bytes")
        report.add("sidecar_too_big", place)
    return rows[index.length[rows] <= MAX_SIDECAR]


def iter_documents(
    index: ShardIndex, reader: Reader, json_rows: NDArray[np.int64], report: Report
) -> Iterator[tuple[int, Any]]:
    """Yield row and value of each JSON member that is good; only some are parsed ahead, so that few stand in memory.

    Args:
        index: The shard's index.
        reader: The shard.
        json_rows: Rows of the index, in any order and several times; -1 for none.
        report: Counts members that are too large, or no JSON.

    Raises:
        StorageError: Reading failed.
    """
    for rows, values in _document_batches(index, reader, json_rows, report):
        yield from zip(rows, values, strict=True)


def _document_batches(
    index: ShardIndex, reader: Reader, json_rows: NDArray[np.int64], report: Report
) -> Iterator[tuple[list[int], list[Any]]]:
    """Yield what `iter_documents` does in batches: rows, and the value of each."""
    rows = _small_rows(index, json_rows, reader, report)
    for some in _iter_batches(rows, index.length[rows]):
        payloads = reader.read_many(index.offset[some], index.length[some])
        numbers, values = some.tolist(), parse_json_sidecars(payloads)
        if InvalidJson not in {*map(type, values)} and int(index.length[some].max()) <= _CANNOT_BE_DEEP:
            yield numbers, values  # the common case, kept fast
            continue
        good: tuple[list[int], list[Any]] = ([], [])
        for row, payload, value in zip(numbers, payloads, values, strict=True):
            error = value.error if isinstance(value, InvalidJson) else _too_deep(payload, value)
            if error is None:
                good[0].append(row)
                good[1].append(value)
            else:
                place = Place(reader.url, int(index.offset[row]), index.names.text(row), error)
                report.add("bad_json_sidecar", place)
        yield good


def read_texts(index: ShardIndex, reader: Reader, text_rows: NDArray[np.int64], report: Report) -> dict[int, Captions]:
    """Return by row what the text members in `text_rows` say, but for those that are not good, as `iter_documents`."""
    rows = _small_rows(index, text_rows, reader, report)
    texts = {}
    for some in _iter_batches(rows, index.length[rows]):
        payloads = reader.read_many(index.offset[some], index.length[some])
        for row, payload in zip(some.tolist(), payloads, strict=True):
            try:
                found = captions_from_text(payload)
                error = _too_deep(payload, found)
            except ValueError as cause:
                error = str(cause)
            if error is None:
                texts[row] = found
            else:
                report.add("bad_text_sidecar", Place(reader.url, int(index.offset[row]), index.names.text(row), error))
    return texts


def _iter_batches(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], *, at_once: int = _AT_ONCE
) -> Iterator[NDArray[np.int64]]:
    """Yield runs of rows that are read at once: at least one, and no more than `at_once` or `_BYTES_AT_ONCE`."""
    ends = np.cumsum(lengths)
    at = 0
    while at < len(rows):
        read = int(ends[at - 1]) if at else 0
        most = int(np.searchsorted(ends, read + _BYTES_AT_ONCE, side="right"))
        following = max(at + 1, min(at + at_once, most))
        yield rows[at:following]
        at = following


def _too_deep(payload: memoryview, value: Any) -> str | None:
    """Say that JSON is nested too deep to be kept, if it is."""
    if len(payload) <= _CANNOT_BE_DEEP or isinstance(value, str):
        return None
    raw = bytes(payload)
    level = [value] if raw.count(b"{") + raw.count(b"[") > _DEEPEST else []
    for _ in range(_DEEPEST):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return f"nested more than {_DEEPEST} deep" if level else None


def _read_geometry(index: ShardIndex, reader: Reader) -> GeometryColumns:
    columns = GeometryColumns(
        np.zeros(index.num_files, np.int32), np.zeros(index.num_files, np.int32), np.zeros(index.num_files, np.uint8)
    )
    rows = np.flatnonzero((index.offset >= 0) & (index.length > 0))
    is_mapped = reader.map() is not None  # then it costs nothing to view a payload whole
    most, at_once = (0, _PICTURES_AT_ONCE) if is_mapped else (_LONGEST_HEAD // 4, _AT_ONCE)
    for batch in _iter_batches(rows, np.minimum(index.length[rows], most), at_once=at_once):
        offsets, lengths = index.offset[batch], index.length[batch]
        whole: Buffer | None = reader.map()
        if whole is None:
            heads = _read_heads(reader, offsets, lengths)
            lengths = np.array([len(head) for head in heads], np.int64)
            whole, offsets = b"".join(heads), np.cumsum(lengths) - lengths
        found = parse_geometries(whole, offsets, lengths)
        columns.width[batch], columns.height[batch], columns.orientation[batch] = found
    return columns


def _read_heads(reader: Reader, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[memoryview]:
    """Read as many first bytes of each payload as its geometry needs: few, and then what is missing."""
    there = np.minimum(lengths, _FIRST_HEAD)
    heads = reader.read_many(offsets, there)
    left = np.arange(len(heads))
    while len(left):
        sizes = lengths[left].tolist()
        reach = np.array([geometry_reach(heads[at], size) for at, size in zip(left.tolist(), sizes, strict=True)])
        is_short = (reach > there[left]) & (reach <= _LONGEST_HEAD)
        left, reach = left[is_short], reach[is_short]
        # At least twice as many each time, so that no payload can ask for a little more again and again.
        reach = np.maximum(reach, np.minimum(2 * there[left], lengths[left]))
        rests = reader.read_many(offsets[left] + there[left], reach - there[left])
        for at, rest in zip(left.tolist(), rests, strict=True):
            heads[at] = memoryview(b"".join((heads[at], rest)))
        there[left] = reach
    return heads
