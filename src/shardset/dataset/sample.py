"""One sample: where it is, and its payloads as bytes, views or files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from shardset.errors import LimitError, MissingFieldError
from shardset.index.table import duplicate_error, reserved_error
from shardset.ranges import ByteRange

from .files import read_pieces
from .payload_file import open_payload

if TYPE_CHECKING:
    from shardset.index.catalog import Group, Layout, ShardEntry
    from shardset.storage.store import Reader


class SampleSource(Protocol):
    """What a sample needs of its dataset: the shards, and readers of them."""

    def reader(self, shard_index: int) -> Reader:
        """Return the reader of a shard."""

    def shard_entry(self, shard_index: int) -> ShardEntry:
        """Return what the catalog says of a shard."""


class Sample(Mapping[str, bytes]):
    """Members that share a key and stand together in a shard: a mapping of field to payload, read when asked for.

    Fields are suffixes in lower case, in archive order. ``sample["jpg"]`` gives bytes.

    Attributes:
        sample_index: Number of the sample in its dataset.
        shard_index: Number of its shard in the dataset.
    """

    __slots__ = ("_group", "_row", "_source", "sample_index", "shard_index")

    def __init__(self, source: SampleSource, group: Group, row: int, shard_index: int, sample_index: int) -> None:
        self._source = source
        self._group = group
        self._row = row
        self.shard_index = shard_index
        self.sample_index = sample_index

    @property
    def key(self) -> str:
        """The path of its members up to the first dot of the last component."""
        return self._group.key(self._row)

    @property
    def shard(self) -> str:
        """The url of its shard."""
        return self._source.shard_entry(self.shard_index).url

    @property
    def fields(self) -> tuple[str, ...]:
        """Its fields in archive order; one that occurs twice is listed twice."""
        layout: Layout = self._group.layouts[self._group.layout_at[self._row]]
        return layout.fields

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of its members, in archive order."""
        spelled = self._group.layouts[self._group.layout_at[self._row]].spelled
        return tuple(f"{self.key}.{suffix}" for suffix in spelled)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each payload, in the order of `fields`."""
        first, last = self._group.first_at[self._row], self._group.first_at[self._row + 1]
        return tuple(self._group.length_at[first:last])

    @property
    def caption(self) -> str | None:
        """The caption that the catalog holds for it, or None."""
        return self._group.details.caption(self._row)

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height in pixels as it is shown, if the catalog holds them, or None."""
        known = self._group.details.geometry(self._row)
        if known is None:
            return None
        width, height, orientation = known
        return (height, width) if orientation > 4 else (width, height)

    def byte_range(self, field: str) -> ByteRange:
        """Return where the payload stands in the shard.

        Raises:
            MissingFieldError: The sample has no such field.
            DuplicateFieldError: It has it twice.
            LimitError: The member is a sparse file, which does not stand in one piece.
        """
        member = self.member(field)
        offset = self._group.offset_at[member]
        if offset < 0:
            raise LimitError(
                f"field {field!r} of sample {self.key!r} is a sparse file, which does not stand in one piece",
                shard=self.shard,
                code="sparse_member",
                member=self.key,
                hint="read it with sample[field]",
            )
        return ByteRange(offset, self._group.length_at[member])

    def __getitem__(self, field: str) -> bytes:
        """Read a payload.

        Raises:
            MissingFieldError: The sample has no such field (it is a KeyError too).
            DuplicateFieldError: The sample has it twice.
            StorageError: Reading failed.
        """
        group = self._group
        position = group.positions[group.layout_at[self._row]].get(field, -2)
        if position >= 0:
            member = group.first_at[self._row] + position
            offset = group.offset_at[member]
            if offset >= 0:
                return self._source.reader(self.shard_index).read(offset, group.length_at[member])
        return self._read_sparse(self.member(field))

    def view(self, field: str) -> memoryview:
        """Give a payload without a copy, where its store can.

        The view holds on to the memory map of its shard. A shard that is cut short by someone else while it is mapped
        ends the process at the next touch; use bytes where that can happen.

        Raises:
            As ``sample[field]``.
        """
        member = self.member(field)
        offset = self._group.offset_at[member]
        if offset < 0:
            return memoryview(self._read_sparse(member))
        return self._source.reader(self.shard_index).view(offset, self._group.length_at[member])

    def open(self, field: str) -> BinaryIO:
        """Open a payload as a seekable binary file that reads from the shard what is asked of it.

        Where the shard is elsewhere, what is read in order is fetched in ever larger pieces, so that a video decoder
        that looks at the end of the file first, and then goes through some of it, fetches little else.

        Raises:
            As ``sample[field]``.
        """
        member = self.member(field)
        offset = self._group.offset_at[member]
        if offset < 0:
            return io.BytesIO(self._read_sparse(member))
        return open_payload(self._source.reader(self.shard_index), offset, self._group.length_at[member])

    def read(self) -> dict[str, bytes]:
        """Read all payloads.

        Raises:
            DuplicateFieldError: A field occurs twice.
            StorageError: Reading failed.
        """
        return {field: self[field] for field in self.fields}

    def __iter__(self) -> Iterator[str]:
        return iter(self._group.layouts[self._group.layout_at[self._row]].positions)

    def __len__(self) -> int:
        return len(self._group.layouts[self._group.layout_at[self._row]].positions)

    def __contains__(self, field: object) -> bool:
        return field in self._group.layouts[self._group.layout_at[self._row]].positions

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return self._source is other._source and self.sample_index == other.sample_index

    def __hash__(self) -> int:
        return hash((id(self._source), self.sample_index))

    def __reduce__(self) -> tuple[object, ...]:
        return _get_sample, (self._source, self.sample_index)

    def __repr__(self) -> str:
        return f"Sample({self.key!r}, fields={list(self.fields)}, shard={self.shard!r})"

    def member(self, field: str) -> int:
        """Return the row of a field's member among the members of its group.

        Raises:
            MissingFieldError: The sample has no such field.
            DuplicateFieldError: It has it twice.
        """
        group = self._group
        layout = group.layouts[group.layout_at[self._row]]
        position = layout.positions.get(field)
        first = group.first_at[self._row]
        if position is None:
            raise MissingFieldError(
                f"sample {self.key!r} has no field {field!r}",
                field=field,
                shard=self.shard,
                key=self.key,
                hint=f"it has {', '.join(map(repr, layout.fields))}",
            )
        if position < 0:
            places = [place for place, name in enumerate(layout.fields) if name == field]
            offsets = [int(group.offset_at[first + place]) for place in places]
            if len(offsets) == 1:
                raise reserved_error(self.key, field, offsets[0], self.shard)
            raise duplicate_error(self.key, field, offsets[0], offsets[1], self.shard)
        return int(first + position)

    def _read_sparse(self, member: int) -> bytes:
        reader = self._source.reader(self.shard_index)
        return read_pieces(reader, self._group.sparse_pieces(member), self._group.length_at[member], self.key)


def _get_sample(source: object, sample_index: int) -> Sample:
    return cast("Sample", source[sample_index])  # type: ignore[index]
