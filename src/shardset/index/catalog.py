"""Reading a catalog: a folder with a manifest, and memory-mapped Arrow files for groups of shards.

Opening reads the manifest alone; a group's files are mapped when something in it is asked for. Samples are numbered
through all groups. Look-ups of one sample go through memoryviews of the columns and batches through numpy views,
because a pyarrow scalar costs more than everything else in a look-up. docs/formats.md describes the files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from shardset.formats.faults import Fault

from .catalog_files import (
    OTHERS_SCHEMA,
    RECORD_LAYOUT,
    SAMPLES_SCHEMA,
    SHARDS_SCHEMA,
    check_values,
    map_batch,
    read_manifest,
)
from .rows import Details
from .table import RESERVED_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .catalog_files import GroupFiles, Manifest

    Int64s = NDArray[np.int64]


class ShardEntry(NamedTuple):
    """One shard as a catalog knows it. `url` is whole; `first_sample` counts from the dataset's first sample.

    `sidecar` is the identity of the shard's sidecar index when it was read into the catalog: ``""`` if there was none,
    None if nobody looked. `compression` (``""`` or ``"gzip"``) and `content_size` (bytes before compression) are those
    of a TFRecord shard; None for a tar.
    """

    url: str
    name: str
    size: int
    identity: str
    digest: str
    first_sample: int
    num_samples: int
    num_files: int
    sidecar: str | None = None
    compression: str | None = None
    content_size: int | None = None

    @property
    def has_records(self) -> bool:
        """Whether it is a TFRecord shard."""
        return self.compression is not None


class Layout(NamedTuple):
    """The fields that some samples have in common.

    Attributes:
        spelled: Suffixes in archive order, as the member names spell them.
        fields: The same in lower case.
        positions: For each field its place among the sample's members; -1 if it occurs twice or is reserved.
        is_record: The samples are records of a TFRecord shard: of one payload, which their fields are read from.
    """

    spelled: tuple[str, ...]
    fields: tuple[str, ...]
    positions: dict[str, int]
    is_record: bool = False


class Group:
    """The mapped tables of one group of shards.

    Columns of samples, a value a sample: `shard` (number within the group), `layout` (into `layouts`), `first` (first
    member; one value more than samples). Columns of members: `offset` and `length` in bytes; an offset of -1 is a
    sparse file. Each is a numpy view of the mapped file; those with `_at` are memoryviews of the same, for single
    look-ups.
    """

    def __init__(self, folder: Path, files: GroupFiles) -> None:
        self._folder = folder
        self.files = files
        self._batch = batch = map_batch(folder / files.samples, SAMPLES_SCHEMA, files.num_samples)
        self._is_validated = False
        self._validated: set[str] = set()
        members, codes, keys = (batch.column(name) for name in ("members", "fields", "key"))
        self.shard: NDArray[np.int32] = _values(batch.column("shard"), np.int32)
        self.first: NDArray[np.int32] = _offsets(members)
        self.offset: Int64s = _values(members.values.field("offset"), np.int64)
        self.length: Int64s = _values(members.values.field("length"), np.int64)
        self.layout: NDArray[np.int32] = _values(codes.indices, np.int32)
        check_values(codes.dictionary, folder / files.samples)
        self.layouts = [_layout(value) for value in codes.dictionary.cast(pa.binary()).to_pylist()]
        self.positions = [layout.positions for layout in self.layouts]
        # That of records, of which there is one at most; -1 if there is none.
        self.record_layout = next((code for code, layout in enumerate(self.layouts) if layout.is_record), -1)
        self._key_offsets: NDArray[np.int32] = _offsets(keys)
        data = keys.buffers()[2]
        self._key_data = memoryview(data) if data is not None else memoryview(b"")
        self.shard_at, self.layout_at, self.first_at = self.shard.data, self.layout.data, self.first.data
        self.offset_at, self.length_at = self.offset.data, self.length.data
        self._key_offset_at = self._key_offsets.data
        self._shards: pa.RecordBatch | None = None
        self._others: pa.RecordBatch | None = None
        self._sizes: Int64s | None = None
        self._details: Details | None = None

    @property
    def samples(self) -> pa.RecordBatch:
        """The table of the group's samples. The first call looks at all of it.

        Raises:
            IndexFileError: The file is garbled.
        """
        if not self._is_validated:
            check_values(self._batch, self._folder / self.files.samples)
            self._is_validated = True
        return self._batch

    def column(self, name: str) -> pa.Array:
        """Return one column of the table of the group's samples. The first call looks at all of it, and of no other.

        Raises:
            IndexFileError: It is garbled.
        """
        column = self._batch.column(name)
        if not self._is_validated and name not in self._validated:
            check_values(column, self._folder / self.files.samples)
            self._validated.add(name)
        return column

    @property
    def shards(self) -> pa.RecordBatch:
        """The table of the group's shards."""
        if self._shards is None:
            path = self._folder / self.files.shards
            self._shards = map_batch(path, SHARDS_SCHEMA, self.files.num_shards)
            check_values(self._shards, path)
        return self._shards

    @property
    def others(self) -> pa.RecordBatch:
        """The table of the group's files that belong to no sample."""
        if self._others is None:
            name = self.files.others
            if name is None:
                self._others = pa.RecordBatch.from_pylist([], schema=OTHERS_SCHEMA)
            else:
                self._others = map_batch(self._folder / name, OTHERS_SCHEMA)
                check_values(self._others, self._folder / name)
        return self._others

    @property
    def shard_sizes(self) -> Int64s:
        """Bytes of each shard of the group."""
        if self._sizes is None:
            self._sizes = _values(self.shards.column("size"), np.int64)
        return self._sizes

    def shard_span(self, shard: int) -> tuple[int, int]:
        """Return the samples of a shard of this group, as a half-open range of the group's samples."""
        start = int(_values(self.shards.column("first_sample"), np.int64)[shard])
        return start, start + int(_values(self.shards.column("num_samples"), np.int64)[shard])

    def access_points(self, shard: int) -> bytes:
        """Return the access points of a compressed shard of this group."""
        points: bytes = self.shards.column("access_points")[shard].as_py()
        return points

    def sparse_pieces(self, member: int) -> list[tuple[int, int, int]]:
        """Return (offset in the file, offset in the shard, length) of each piece of a member that is a sparse file."""
        sample = int(np.searchsorted(self.first, member, side="right")) - 1
        shard = int(self.shard[sample])
        row = member - int(self.first[self.shard_span(shard)[0]])
        pieces = orjson.loads(self.shards.column("sparse")[shard].as_py())[str(row)]
        return [(logical, offset, length) for logical, offset, length in pieces]

    def key(self, sample: int) -> str:
        """Return the key of a sample of this group."""
        at = self._key_offset_at
        return str(self._key_data[at[sample] : at[sample + 1]], "utf-8", "surrogateescape")

    @property
    def details(self) -> Details:
        """Pixel sizes and captions of the group's samples."""
        if self._details is None:
            self._details = Details(self._batch)
        return self._details

    def find(self, key: bytes) -> Iterator[int]:
        """Yield the samples of this group that have a key, in order."""
        shards = self.shards
        low, high = (shards.column(name).cast(pa.binary()) for name in ("first_key", "last_key"))
        may_hold = pc.and_(pc.less_equal(low, key), pc.greater_equal(high, key)).to_numpy(zero_copy_only=False)
        is_sorted = shards.column("keys_sorted")
        for shard in np.flatnonzero(may_hold).tolist():
            start, stop = self.shard_span(shard)
            if is_sorted[shard].as_py():
                at = bisect_left(range(stop), key, start, key=self._raw_key)
                while at < stop and self._raw_key(at) == key:
                    yield at
                    at += 1
            else:
                column = self.samples.column("key").slice(start, stop - start).cast(pa.binary())
                yield from (np.flatnonzero(pc.equal(column, key).to_numpy(zero_copy_only=False)) + start).tolist()

    def _raw_key(self, sample: int) -> bytes:
        at = self._key_offset_at
        return bytes(self._key_data[at[sample] : at[sample + 1]])

    def keys_of(self, samples: Int64s) -> list[str]:
        """Return the keys of some samples of this group, in the order of `samples`."""
        if len(samples) and samples[-1] - samples[0] == len(samples) - 1 and bool((np.diff(samples) == 1).all()):
            return self.keys(int(samples[0]), int(samples[-1]) + 1)
        data = self._key_data
        starts, ends = self._key_offsets[samples].tolist(), self._key_offsets[samples + 1].tolist()
        return [str(data[a:b], "utf-8", "surrogateescape") for a, b in zip(starts, ends, strict=True)]

    def keys(self, start: int, stop: int) -> list[str]:
        """Return the keys of the samples ``[start, stop)`` of this group."""
        at = self._key_offsets[start : stop + 1]
        raw, ends = bytes(self._key_data[at[0] : at[-1]]), (at - at[0]).tolist()
        if raw.isascii():
            text = raw.decode("ascii")
            return [text[a:b] for a, b in pairwise(ends)]
        return [raw[a:b].decode("utf-8", "surrogateescape") for a, b in pairwise(ends)]


class Catalog:
    """The tables of a whole dataset. Made by `open_catalog`; threads may share it, and so may forked processes."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._groups: list[Group | None] = [None] * len(manifest.groups)
        self._entries: dict[int, list[ShardEntry]] = {}
        self.sample_starts = list(accumulate((group.num_samples for group in manifest.groups), initial=0))
        self.shard_starts = list(accumulate((group.num_shards for group in manifest.groups), initial=0))

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return self.sample_starts[-1]

    @property
    def num_shards(self) -> int:
        """Shards in all groups."""
        return self.shard_starts[-1]

    @property
    def num_files(self) -> int:
        """Files in all shards, those of no sample included."""
        return sum(group.num_files for group in self.manifest.groups)

    @property
    def num_groups(self) -> int:
        """Groups of shards."""
        return len(self._groups)

    def check_files(self) -> None:
        """Map every file, to see that all are there and whole.

        Raises:
            IndexFileError: One is missing or malformed.
        """
        for number in range(self.num_groups):
            group = self.group(number)
            _ = group.shards, group.others

    def group(self, number: int) -> Group:
        """Return a group, mapping its file if that was not done yet.

        Raises:
            IndexFileError: Its file is missing or malformed.
        """
        group = self._groups[number]
        if group is None:
            group = self._groups[number] = Group(self.folder, self.manifest.groups[number])
        return group

    def locate(self, sample: int) -> tuple[Group, int, int]:
        """Return the group that holds a sample, the sample's row in it, and the number of the group's first shard."""
        number = bisect_right(self.sample_starts, sample) - 1
        group = self._groups[number] or self.group(number)
        return group, sample - self.sample_starts[number], self.shard_starts[number]

    def entries(self, number: int) -> list[ShardEntry]:
        """Return the shards of a group."""
        entries = self._entries.get(number)
        if entries is None:
            entries = self._entries[number] = self._read_entries(number)
        return entries

    def shard(self, shard_index: int) -> ShardEntry:
        """Return one shard by its number in the dataset."""
        number = bisect_right(self.shard_starts, shard_index) - 1
        return self.entries(number)[shard_index - self.shard_starts[number]]

    def faults(self) -> Iterator[tuple[int, Fault]]:
        """Yield what is wrong or odd, with the number of its shard in the dataset."""
        for number, first in enumerate(self.shard_starts[:-1]):
            column = self.group(number).shards.column("faults")
            counts = np.diff(_offsets(column))
            for shard in np.flatnonzero(counts).tolist():
                for fault in column[shard].as_py():
                    yield first + shard, Fault(**fault)

    def find(self, key: str) -> Iterator[int]:
        """Yield the numbers of all samples that have a key, in order."""
        try:
            raw = key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return  # no bytes of a name are read as such a text
        for number, start in enumerate(self.sample_starts[:-1]):
            group = self.group(number)
            yield from (start + sample for sample in group.find(raw))

    def _read_entries(self, number: int) -> list[ShardEntry]:
        table, base = self.group(number).shards, self.manifest.base
        root = None if base is None else (self.folder / base).resolve()
        first = self.sample_starts[number]
        columns: list[Sequence[Any]] = [_texts(table.column(name)) for name in ("url", "name")]
        there = set(table.schema.names)  # catalogs of earlier releases lack some
        columns += [
            table.column(name).to_pylist() if name in there else [None] * table.num_rows
            for name in ShardEntry._fields[2:]
        ]
        entries = []
        for url, name, size, identity, digest, first_sample, *further in zip(*columns, strict=True):
            whole = url if root is None else str(root / url)
            entries.append(ShardEntry(whole, name, size, identity, digest, first + first_sample, *further))
        return entries


def open_catalog(folder: str | Path) -> Catalog:
    """Open the catalog in `folder`. Reads the manifest, and nothing else yet.

    Raises:
        FileNotFoundError: There is no catalog.
        IndexFileError: It is malformed or of another version.
    """
    folder = Path(folder).absolute()  # its files are mapped later, perhaps from another working folder
    return Catalog(folder, read_manifest(folder))


def _values(array: pa.Array, kind: Any) -> NDArray[Any]:
    """Return a numpy view of an array of fixed width."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(0, kind)
    return np.frombuffer(buffer, kind, array.offset + len(array))[array.offset :]


def _offsets(array: pa.Array) -> NDArray[np.int32]:
    """Return a numpy view of the offsets of an array of texts or lists: one more than values."""
    buffer = array.buffers()[1]
    if buffer is None or not buffer.size:
        return np.zeros(1, np.int32)
    return np.frombuffer(buffer, np.int32, array.offset + len(array) + 1)[array.offset :]


def _layout(joined: bytes) -> Layout:
    if joined == RECORD_LAYOUT:
        return Layout(("record",), ("record",), {}, is_record=True)
    spelled = tuple(joined.decode("utf-8", "surrogateescape").split("/"))
    lowered = tuple(suffix.lower() for suffix in spelled)
    positions: dict[str, int] = {}
    for place, name in enumerate(lowered):
        positions[name] = -1 if name in positions or name in RESERVED_SUFFIXES else place
    return Layout(spelled, lowered, positions)


def _texts(column: pa.Array) -> Sequence[str]:
    return [raw.decode("utf-8", "surrogateescape") for raw in column.cast(pa.binary()).to_pylist()]
