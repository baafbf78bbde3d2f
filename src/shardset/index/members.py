"""The members of one tar as plain objects: the index of the webdataset-tar page, for any source of bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, BinaryIO, cast

from shardset.cached import cached_property
from shardset.errors import LimitError
from shardset.formats.tar import Kind, TarTable, scan_tar
from shardset.policy import Policy, Report
from shardset.ranges import ByteRange
from shardset.storage.anywhere import open_store

from .build import scan_reader, settle_faults
from .table import RESERVED_SUFFIXES, ShardIndex, index_from_table

if TYPE_CHECKING:
    from shardset.formats.faults import Fault
    from shardset.storage.store import Store


@dataclass(frozen=True, slots=True)
class TarMember:
    """One member of a tar.

    Attributes:
        name: Its full name; bytes that are no UTF-8 are surrogate escapes.
        kind: ``"file"``, ``"dir"``, ``"symlink"``, ``"hardlink"``, ``"char"``, ``"block"``, ``"fifo"`` or ``"other"``.
        header_offset: Byte offset of its own header.
        offset: Byte offset of its payload; None for a sparse file, whose payload does not stand in one piece.
        size: Bytes of its payload; for a sparse file with its holes.
        sparse: For a sparse file its pieces: (offset in the file, offset in the tar, length); otherwise None.
    """

    name: str
    kind: str
    header_offset: int
    offset: int | None
    size: int
    sparse: tuple[tuple[int, int, int], ...] | None = None

    def byte_range(self) -> ByteRange:
        """Return where the payload stands in the tar.

        Raises:
            LimitError: The member is a sparse file.
        """
        if self.offset is None:
            raise LimitError(
                f"member {self.name!r} is a sparse file, which does not stand in one piece",
                offset=self.header_offset,
                code="sparse_member",
                member=self.name,
                hint="its pieces stand in .sparse",
            )
        return ByteRange(self.offset, self.size)


@dataclass(frozen=True, slots=True)
class TarPart:
    """A member as a part of its sample: `name` as in the tar, `suffix` in lower case."""

    member: TarMember
    suffix: str

    @property
    def name(self) -> str:
        """The member's full name."""
        return self.member.name

    def byte_range(self) -> ByteRange:
        """Return where the payload stands in the tar, as `TarMember.byte_range` does."""
        return self.member.byte_range()


@dataclass(frozen=True, slots=True)
class TarSample:
    """Neighbouring members of one key."""

    key: str
    parts: tuple[TarPart, ...]


class TarMemberIndex:
    """All members of one tar. Made by `build_tar_member_index`.

    Attributes:
        report: What was odd, and what the policy let pass.
    """

    def __init__(self, table: TarTable, index: ShardIndex, source: str | None, report: Report) -> None:
        self._table = table
        self._index = index
        self._source = source
        self.report = report

    @cached_property
    def members(self) -> tuple[TarMember, ...]:
        """Every member in archive order, links and folders too; of equal names all are there."""
        table = self._table
        columns = zip(
            table.names.to_text_list(),
            table.kind.tolist(),
            table.header_offset.tolist(),
            table.offset.tolist(),
            table.size.tolist(),
            strict=True,
        )
        sparse = {row: tuple(map(tuple, pieces)) for row, pieces in table.sparse.items()}
        return tuple(
            TarMember(
                name,
                _KIND_NAMES[kind],
                header_offset,
                offset if offset >= 0 else None,
                size,
                cast("None", sparse.get(row)),
            )
            for row, (name, kind, header_offset, offset, size) in enumerate(columns)
        )

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What is wrong or odd, in archive order."""
        return self._index.faults

    def samples(self) -> list[TarSample]:
        """Group the members into samples, as webdataset does.

        Raises:
            DuplicateFieldError: A sample has two members of one suffix, or one of a reserved suffix (``__key__``,
                ``__url__``); the error names the offsets.
        """
        index = self._index
        files = [member for member in self.members if member.kind == "file"]
        order = index.archive_order().tolist()
        of_row = dict(zip(order, files, strict=True))
        samples = []
        reserved = {number for number, suffix in enumerate(index.suffixes) if suffix in RESERVED_SUFFIXES}
        rows, keys, suffix_ids = index.sample_rows.tolist(), index.keys(), index.suffix_ids.tolist()
        for sample, (first, last) in enumerate(pairwise(rows)):
            ids = suffix_ids[first:last]
            if len(set(ids)) < len(ids) or not reserved.isdisjoint(ids):
                error = index.duplicate(sample)
                assert error is not None  # noqa: S101 - it was seen just now
                error.shard = self._source
                raise error
            parts = tuple(TarPart(of_row[row], index.suffixes[suffix_ids[row]]) for row in range(first, last))
            samples.append(TarSample(keys.text(sample), parts))
        return samples

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        return f"TarMemberIndex({len(self)} members, {self._index.num_samples} samples)"


_KIND_NAMES = [kind.name.lower() for kind in Kind]


def build_tar_member_index(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO,
    *,
    policy: Policy | None = None,
    ignore_zeros: bool = False,
    store: Store | None = None,
) -> TarMemberIndex:
    """Index the members of a tar without reading payloads.

    Args:
        source: A path or url, the bytes themselves, or a seekable binary file, which is read from its beginning.
        policy: What to do when the tar is damaged: raise (the default), or go on with the members before the damage.
        ignore_zeros: Go on behind zero blocks, as concatenated tars need.
        store: Where a url lives; by default the place that its scheme names.

    Raises:
        FormatError: The tar is damaged or none at all, and the policy says to raise.
        StorageError: It cannot be read.
        TypeError: `source` is a file that cannot be sought in.
    """
    table, size, name = _scan(source, store, ignore_zeros=ignore_zeros)
    index = index_from_table(table, size)
    policy, report = policy or Policy(), Report()
    settle_faults(index.faults, name, policy, report)
    return TarMemberIndex(table, index, name, report)


def _scan(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO,
    store: Store | None,
    *,
    ignore_zeros: bool,
) -> tuple[TarTable, int, str | None]:
    if isinstance(source, str | os.PathLike):
        url = os.fspath(source)
        reader = (store or open_store(url)).open(url)
        return scan_reader(reader, ignore_zeros=ignore_zeros), reader.size, url
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source).cast("B")
        table = scan_tar(
            lambda offset, length: view[offset : offset + length], len(view), is_mapped=True, ignore_zeros=ignore_zeros
        )
        return table, len(view), None
    if not source.seekable():
        raise TypeError("the file cannot be sought in; read it whole and give its bytes")
    size = source.seek(0, os.SEEK_END)

    def read(offset: int, length: int) -> bytes:
        source.seek(offset)
        return source.read(length)

    return scan_tar(read, size, ignore_zeros=ignore_zeros), size, getattr(source, "name", None)
