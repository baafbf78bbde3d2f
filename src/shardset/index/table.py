"""The index of one shard as columns, and the two ways in which its files are numbered as samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import DuplicateFieldError
from shardset.formats.faults import Fault
from shardset.formats.naming import Names, eight_bytes, split_names
from shardset.formats.tar import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardset.formats.captions import Captions
    from shardset.formats.tar import TarTable
    from shardset.formats.tar_header import SparseRow

    Int64s = NDArray[np.int64]
    Int32s = NDArray[np.int32]

_DIGEST_DOMAIN: Final = b"shardset tar index 1\n"
_RECORDS_DOMAIN: Final = b"shardset tfrecord index 1\n"
RESERVED_SUFFIXES: Final = frozenset({"__key__", "__url__"})
"""Suffixes that webdataset refuses as duplicates, because its samples have fields of these names without a member."""
SIDECAR_SUFFIXES: Final = (".json", ".txt")


@dataclass(frozen=True, slots=True, eq=False)
class GeometryColumns:
    """Width and height in pixels as stored, and EXIF orientation (1 to 8), a row each; 0 where not known."""

    width: Int32s
    height: Int32s
    orientation: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RecordForm:
    """How the records of a TFRecord shard are kept.

    Attributes:
        compression: ``""`` or ``"gzip"``. Offsets of a compressed shard count the bytes before compression.
        size: Bytes of all records with their framing, before compression.
        points: Where reading can begin in a compressed shard (see `shardset.storage.gzipped`); empty in a plain or a
            damaged one.
    """

    compression: str
    size: int
    points: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """The files of one shard, a row each. Rows ``[0, sample_rows[-1])`` are parts of samples, in archive order.

    The files that belong to no sample come behind them, in archive order too. Directories, links and devices have no
    payload and no row.

    Of a TFRecord shard each record is a row, and a sample; its name and key are its number in decimal digits.

    Attributes:
        size: Bytes of the shard.
        names: Full member names, raw bytes.
        offset: int64, byte offset of the payload; -1 for a sparse file.
        length: int64, bytes of the payload.
        key_lengths: int64, the first bytes of the name that are the sample's key; -1 for files of no sample.
        suffix_ids: int32, into `suffixes`; -1 for files of no sample.
        suffixes: Distinct suffixes, lower-cased.
        sample_rows: int64, one more than there are samples: sample `i` is rows
            ``[sample_rows[i], sample_rows[i + 1])``.
        sparse: For each sparse row, where its pieces lie.
        faults: What was wrong or odd in the shard, in archive order.
        geometry: Pixel sizes by row, or None where nobody looked.
        captions: Caption values by row of the payload that they describe.
        extra: Further fields of a row's entry in the sidecar index, such as ``json_metadata``.
        is_verified: The rows were read from the shard's own headers, or their digest was found right.
        records: How the records are kept, of a TFRecord shard; None of a tar.
    """

    size: int
    names: Names
    offset: Int64s
    length: Int64s
    key_lengths: Int64s
    suffix_ids: Int32s
    suffixes: tuple[str, ...]
    sample_rows: Int64s
    sparse: Mapping[int, tuple[SparseRow, ...]] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    geometry: GeometryColumns | None = None
    captions: Mapping[int, Captions] = field(default_factory=dict)
    extra: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    is_verified: bool = True
    records: RecordForm | None = None

    @property
    def num_samples(self) -> int:
        """Samples in the shard, as webdataset groups them."""
        return len(self.sample_rows) - 1

    @property
    def num_files(self) -> int:
        """Files in the shard, those of no sample included."""
        return len(self.names)

    def keys(self) -> Names:
        """Return the key of every sample."""
        first = self.sample_rows[:-1]
        return self.names.cut(self.names.offsets[:-1][first], self.key_lengths[first])

    def archive_order(self) -> Int64s:
        """Return the rows in the order in which the files stand in the shard."""
        place = self.offset
        if self.sparse:
            place = place.copy()
            for row, pieces in self.sparse.items():
                place[row] = pieces[0].offset if pieces else 0
        if bool((np.diff(place) >= 0).all()):
            return np.arange(len(place))
        return np.argsort(place, kind="stable")

    def digest(self) -> str:
        """Return the digest of the shard's headers: ``sha256:`` and 64 hex digits.

        It covers the shard's size and, for every file in archive order, name, payload offset and payload length: all
        that an index says of where bytes are, and nothing else; of a TFRecord shard, offsets and lengths alone.
        docs/formats.md has it byte for byte.
        """
        if self.records is not None:
            state = hashlib.sha256(_RECORDS_DOMAIN)
            for number in (self.size, self.records.size, len(self.names)):
                state.update(number.to_bytes(8, "little"))
            for column in (self.offset, self.length):
                state.update(np.ascontiguousarray(column, "<i8").data)
            return f"sha256:{state.hexdigest()}"
        order = self.archive_order()
        is_ordered = bool((np.diff(order) > 0).all())
        names = self.names if is_ordered else self.names.take(order)
        state = hashlib.sha256(_DIGEST_DOMAIN)
        for number in (self.size, len(names)):
            state.update(number.to_bytes(8, "little"))
        for column in (self.offset[order], self.length[order], names.lengths):
            state.update(np.ascontiguousarray(column, "<i8").data)
        state.update(np.ascontiguousarray(names.data[names.offsets[0] : names.offsets[-1]]).data)
        return f"sha256:{state.hexdigest()}"

    def duplicate(self, sample: int) -> DuplicateFieldError | None:
        """Return the error for a sample that has two members of one suffix, or one of a reserved suffix; or None."""
        rows = range(int(self.sample_rows[sample]), int(self.sample_rows[sample + 1]))
        seen: dict[int, int] = {}
        for row in rows:
            suffix = int(self.suffix_ids[row])
            is_reserved = self.suffixes[suffix] in RESERVED_SUFFIXES
            if suffix in seen or is_reserved:
                key = self.names[row][: int(self.key_lengths[row])].decode("utf-8", "surrogateescape")
                offset = int(self.offset[row])
                if is_reserved:
                    return reserved_error(key, self.suffixes[suffix], offset)
                return duplicate_error(key, self.suffixes[suffix], int(self.offset[seen[suffix]]), offset)
            seen[suffix] = row
        return None


def duplicate_error(key: str, suffix: str, first: int, second: int, shard: str | None = None) -> DuplicateFieldError:
    """Return the error for two members of sample `key` that have one suffix, with payloads at the two offsets."""
    return DuplicateFieldError(
        f"sample {key!r} has two members with the suffix {suffix!r}, with payloads at bytes {first} and {second}",
        field=suffix,
        offsets=(first, second),
        shard=shard,
        key=key,
        hint="write the shard again with distinct names; both payloads can be read by their offsets",
    )


def reserved_error(key: str, suffix: str, offset: int, shard: str | None = None) -> DuplicateFieldError:
    """Return the error for a member of sample `key` with a reserved suffix and its payload at the offset."""
    return DuplicateFieldError(
        f"sample {key!r} has a member with the suffix {suffix!r}, which every sample has of its own, "
        f"with its payload at byte {offset}",
        field=suffix,
        offsets=(offset,),
        shard=shard,
        key=key,
        hint="write the shard again with another name; the payload can be read by its offset",
    )


def index_from_table(table: TarTable, size: int) -> ShardIndex:
    """Turn the members of a tar into the index of a shard of `size` bytes.

    Samples are grouped as webdataset groups them: neighbours with one key, where links, folders, structural members and
    names without a suffix between them do not count.
    """
    is_file = table.kind == Kind.FILE
    if is_file.all():
        return index_from_files(table.names, table.offset, table.size, size, sparse=table.sparse, faults=table.faults)
    rows = np.flatnonzero(is_file)
    moved = {int(np.searchsorted(rows, row)): pieces for row, pieces in table.sparse.items()}
    return index_from_files(
        table.names.take(rows), table.offset[rows], table.size[rows], size, sparse=moved, faults=table.faults
    )


def index_from_files(
    names: Names,
    offset: Int64s,
    length: Int64s,
    size: int,
    *,
    sparse: Mapping[int, tuple[SparseRow, ...]] | None = None,
    faults: tuple[Fault, ...] = (),
) -> ShardIndex:
    """Group files, given in archive order, into the index of a shard of `size` bytes."""
    split = split_names(names)
    key_lengths, suffix_ids = split.key_lengths, split.suffix_ids
    parts = np.flatnonzero(key_lengths >= 0)
    sparse = dict(sparse or {})
    if len(parts) < len(names):
        order = np.concatenate([parts, np.flatnonzero(key_lengths < 0)])
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        names, offset, length = names.take(order), offset[order], length[order]
        key_lengths, suffix_ids = key_lengths[order], suffix_ids[order]
        sparse = {int(place[row]): pieces for row, pieces in sparse.items()}
    starts = sample_starts(names, key_lengths[: len(parts)])
    index = ShardIndex(
        size,
        names,
        offset,
        length,
        key_lengths,
        suffix_ids,
        split.suffixes,
        np.append(starts, len(parts)),
        sparse,
        faults,
    )
    found = (*_repeated_keys(index), *_duplicate_suffixes(index))
    if not found:
        return index
    # An error ended the reading, so it stays the last.
    ordered = sorted((*faults, *found), key=lambda fault: (fault.is_error, fault.offset))
    return ShardIndex(
        size,
        names,
        offset,
        length,
        key_lengths,
        suffix_ids,
        split.suffixes,
        index.sample_rows,
        sparse,
        tuple(ordered),
    )


def sample_starts(names: Names, key_lengths: Int64s) -> Int64s:
    """Return the rows at which a new key begins, among rows in archive order that all have one."""
    count = len(key_lengths)
    if not count:
        return np.zeros(0, np.int64)
    is_start = np.ones(count, np.bool_)
    candidates = np.flatnonzero(key_lengths[1:] == key_lengths[:-1]) + 1
    is_start[candidates] = ~_same_prefix(names, candidates - 1, candidates, key_lengths[candidates])
    return np.flatnonzero(is_start)


def _same_prefix(names: Names, first: Int64s, second: Int64s, lengths: Int64s) -> NDArray[np.bool_]:
    """Tell for pairs of rows whether the first `lengths` bytes of their names are the same."""
    same = np.ones(len(lengths), np.bool_)
    words = eight_bytes(names.data)
    left, right = names.offsets[first], names.offsets[second]
    # By eight bytes, the last eight first: numbered keys differ there. What lies behind a short key is shifted out.
    last = np.maximum(lengths - 8, 0)
    beyond = (8 * np.clip(8 - lengths, 0, 7)).astype(np.uint64)
    pending, at = np.flatnonzero(lengths > 0), last
    for start in count(0, 8):
        differs = (words[left[pending] + at] ^ words[right[pending] + at]) << beyond[pending] != 0
        same[pending[differs]] = False
        pending = pending[~differs & (lengths[pending] > start + 8)]
        if not len(pending):
            return same
        at = np.minimum(start, last[pending])
    return same


def _repeated_keys(index: ShardIndex) -> list[Fault]:
    """Find keys that come back after another sample: a part of a sample that stands apart from the rest."""
    keys = index.keys()
    if len(keys) < 2 or is_ascending(keys):
        return []
    first: dict[bytes, int] = {}
    faults = []
    for sample, key in enumerate(keys.to_list()):
        earlier = first.setdefault(key, sample)
        if earlier != sample:
            row, before = int(index.sample_rows[sample]), int(index.sample_rows[earlier])
            message = f"the key came before at byte {int(index.offset[before])}; its members do not stand together"
            faults.append(Fault("repeated_key", int(index.offset[row]), index.names.text(row), message))
    return faults


def is_ascending(keys: Names) -> bool:
    """Tell whether keys of one length ascend strictly, as numbered keys do, without making objects of them."""
    if not len(keys):
        return False
    lengths = keys.lengths
    width = int(lengths[0])
    if width == 0 or not bool((lengths == width).all()):
        return False
    table = keys.data.reshape(-1, width)
    words = np.zeros((len(table), (width + 7) // 8 * 8), np.uint8)
    words[:, :width] = table
    columns = words.view(">u8").T
    is_less, is_equal = np.zeros(len(table) - 1, np.bool_), np.ones(len(table) - 1, np.bool_)
    for column in columns:
        is_less |= is_equal & (column[:-1] < column[1:])
        is_equal &= column[:-1] == column[1:]
    return bool(is_less.all())


def _duplicate_suffixes(index: ShardIndex) -> list[Fault]:
    """Find samples in which a suffix occurs twice, or is one that webdataset takes for its own."""
    rows = int(index.sample_rows[-1])
    if not rows:
        return []
    counts = np.diff(index.sample_rows)
    widest = int(counts.max())
    sample = np.repeat(np.arange(index.num_samples), counts)
    is_twice = np.zeros(rows, np.bool_)
    for apart in range(1, min(widest, 8)):
        same = (sample[apart:] == sample[:-apart]) & (index.suffix_ids[apart:rows] == index.suffix_ids[: rows - apart])
        is_twice[apart:] |= same
    if widest > 8:
        code = sample * len(index.suffixes) + index.suffix_ids[:rows]
        order = np.argsort(code, kind="stable")
        is_twice[order[1:][code[order[1:]] == code[order[:-1]]]] = True
    faults: list[Fault] = []
    reserved = [number for number, suffix in enumerate(index.suffixes) if suffix in RESERVED_SUFFIXES]
    for row in np.flatnonzero(np.isin(index.suffix_ids[:rows], reserved)).tolist() if reserved else ():
        is_twice[row] = False
        offset, name = int(index.offset[row]), index.names.text(row)
        message = (
            f"suffix {index.suffixes[int(index.suffix_ids[row])]!r} is reserved, with its payload at byte {offset}"
        )
        faults.append(Fault("duplicate_suffix", offset, name, message))
    if not is_twice.any():
        return faults
    field = sample * len(index.suffixes) + index.suffix_ids[:rows]
    fields, first_rows = np.unique(field, return_index=True)
    for row in np.flatnonzero(is_twice).tolist():
        first = int(first_rows[np.searchsorted(fields, field[row])])
        message = (
            f"suffix {index.suffixes[int(index.suffix_ids[row])]!r} occurs twice in the sample, "
            f"with payloads at bytes {int(index.offset[first])} and {int(index.offset[row])}"
        )
        faults.append(Fault("duplicate_suffix", int(index.offset[row]), index.names.text(row), message))
    return faults
