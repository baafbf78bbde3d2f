"""The files of one shard in webshart's numbering: by path in byte order, sidecars apart."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import ChangedError, LimitError
from shardset.index.table import number_by_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardset.formats.captions import Captions
    from shardset.index.table import PathNumbering, ShardIndex
    from shardset.storage.store import Reader


LARGEST_SPARSE: Final = 1 << 30
"""The largest sparse file, with its holes, that is put together in memory, in bytes."""


class ShardFiles:
    """One shard's files as lists in path order, made when first asked for. Plain Python values, for single look-ups.

    Attributes:
        index: The shard's index.
        url: The shard's address.
    """

    def __init__(self, index: ShardIndex, url: str) -> None:
        self.index = index
        self.url = url

    @cached_property
    def numbering(self) -> PathNumbering:
        """Rows of the index in path order."""
        return number_by_path(self.index)

    @cached_property
    def names(self) -> list[str]:
        """Name of every row of the index."""
        return self.index.names.to_text_list()

    @cached_property
    def file_rows(self) -> list[int]:
        """Row of every file, in path order."""
        file_rows: list[int] = self.numbering.files.tolist()
        return file_rows

    @cached_property
    def sample_rows(self) -> list[int]:
        """Row of every sample's payload, in path order."""
        sample_rows: list[int] = self.numbering.samples.tolist()
        return sample_rows

    @cached_property
    def json_rows(self) -> list[int]:
        """Row of every sample's JSON sidecar, or -1."""
        json_rows: list[int] = self.numbering.json_rows.tolist()
        return json_rows

    @cached_property
    def text_rows(self) -> list[int]:
        """Row of every sample's text sidecar, or -1."""
        text_rows: list[int] = self.numbering.text_rows.tolist()
        return text_rows

    @cached_property
    def offsets(self) -> list[int]:
        """Payload offset of every row."""
        offsets: list[int] = self.index.offset.tolist()
        return offsets

    @cached_property
    def lengths(self) -> list[int]:
        """Payload length of every row."""
        lengths: list[int] = self.index.length.tolist()
        return lengths

    def geometry(self, row: int) -> tuple[int, int] | None:
        """Return width and height as stored, or None where they are not known."""
        columns = self.index.geometry
        if columns is None or not columns.width[row]:
            return None
        return int(columns.width[row]), int(columns.height[row])

    def captions(self, row: int) -> Captions:
        """Return the captions that the index holds for a payload."""
        return self.index.captions.get(row)

    def further(self, row: int) -> dict[str, Any]:
        """Return the further fields of a payload's entry in its sidecar index."""
        return self.index.extra.get(row, {})

    def read(self, reader: Reader, row: int) -> bytes:
        """Read a payload.

        Raises:
            LimitError: It is a sparse file of more than `LARGEST_SPARSE` bytes with its holes.
            StorageError: Reading failed.
        """
        offset = self.offsets[row]
        if offset < 0:
            return self._read_sparse(reader, row)
        return reader.read(offset, self.lengths[row])

    def view(self, reader: Reader, row: int) -> memoryview:
        """Give a payload as a view, as `read` does."""
        offset = self.offsets[row]
        if offset < 0:
            return memoryview(self._read_sparse(reader, row))
        return reader.view(offset, self.lengths[row])

    def read_many(self, reader: Reader, rows: list[int]) -> list[memoryview]:
        """Give many payloads as views, as `read` does, in the order asked."""
        offsets, lengths = self.offsets, self.lengths
        starts = [offsets[row] for row in rows]
        if self.index.sparse and min(starts, default=0) < 0:
            return [self.view(reader, row) for row in rows]
        whole = reader.map()
        if whole is not None:  # sliced here, where the numbers are plain ints already
            ends = [start + lengths[row] for row, start in zip(rows, starts, strict=True)]
            if min(starts, default=0) >= 0 and max(ends, default=0) <= len(whole):
                return [whole[start:end] for start, end in zip(starts, ends, strict=True)]
        return reader.read_many(starts, [lengths[row] for row in rows])

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest payload."""
        return int(self.index.length.max(initial=0))

    def _read_sparse(self, reader: Reader, row: int) -> bytes:
        return read_pieces(reader, self.index.sparse[row], self.lengths[row], self.names[row])


def read_pieces(reader: Reader, pieces: Iterable[tuple[int, int, int]], size: int, name: str) -> bytes:
    """Read a sparse file with its holes.

    Args:
        reader: Its shard.
        pieces: (offset in the file, offset in the shard, length) of each.
        size: Bytes of the file with its holes.
        name: Its name, for messages.

    Raises:
        LimitError: It has more than `LARGEST_SPARSE` bytes.
        StorageError: Reading failed.
    """
    if size > LARGEST_SPARSE:
        raise LimitError(
            f"sparse file {name!r} has {size} bytes with its holes",
            shard=reader.url,
            code="sparse_member",
            member=name,
            hint="read its pieces by their offsets",
        )
    whole = bytearray(size)
    for logical, offset, length in pieces:
        whole[logical : logical + length] = reader.read(offset, length)
    return bytes(whole)


class ShardReader:
    """Reads the files and samples of one shard, in webshart's numbering. Made by `Dataset.open_shard`."""

    def __init__(self, files: ShardFiles, reader: Reader) -> None:
        self._files = files
        self._reader = reader

    @property
    def num_files(self) -> int:
        """Files in the shard, sidecars included."""
        return len(self._files.file_rows)

    @property
    def num_samples(self) -> int:
        """Files in the shard that are no sidecars."""
        return len(self._files.sample_rows)

    def filenames(self) -> list[str]:
        """Return the name of every file, in path order."""
        names = self._files.names
        return [names[row] for row in self._files.file_rows]

    def sample_filenames(self) -> list[str]:
        """Return the name of every sample's payload, in path order."""
        names = self._files.names
        return [names[row] for row in self._files.sample_rows]

    def read_file(self, file_index: int) -> bytes:
        """Read the payload of a file.

        Raises:
            IndexError: There is no such file.
            StorageError: Reading failed.
        """
        return self._files.read(self._reader, self._pick(self._files.file_rows, file_index, "file"))

    def read_sample(self, sample_index: int) -> bytes:
        """Read the payload of a sample.

        Raises:
            IndexError: There is no such sample.
            StorageError: Reading failed.
        """
        return self._files.read(self._reader, self._pick(self._files.sample_rows, sample_index, "sample"))

    def read_sample_json(self, sample_index: int) -> bytes | None:
        """Read the JSON sidecar of a sample, or return None if it has none.

        Raises:
            IndexError: There is no such sample.
            StorageError: Reading failed.
        """
        row = self._pick(self._files.json_rows, sample_index, "sample")
        return None if row < 0 else self._files.read(self._reader, row)

    def __repr__(self) -> str:
        return f"ShardReader(num_files={self.num_files}, num_samples={self.num_samples})"

    def _pick(self, rows: list[int], number: int, what: str) -> int:
        if not 0 <= number < len(rows):
            raise IndexError(f"{what} index {number} out of range: {self._files.url} has {len(rows)}")
        return rows[number]


def check_reader(reader: Reader, size: int, identity: str) -> Reader:
    """Return a reader if it reads the version that was indexed.

    Raises:
        ChangedError: The shard changed since.
    """
    if reader.size == size and reader.identity == identity:
        return reader
    what = f"its size is {reader.size}, the index says {size}" if reader.size != size else "it was written again"
    raise ChangedError(
        f"the shard changed after it was indexed: {what}", url=reader.url, hint="discover the dataset again"
    )
