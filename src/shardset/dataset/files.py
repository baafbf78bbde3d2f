"""The files of one shard in webshart's numbering: by path in byte order, sidecars apart."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.cached import cached_property
from shardset.errors import ChangedError, LimitError
from shardset.index.numbering import PathNumbering, number_by_path

from .record_frames import check_frames, read_frames

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from shardset.errors import ShardsetError
    from shardset.formats.captions import Captions
    from shardset.index.table import ShardIndex
    from shardset.storage.store import Reader


LARGEST_SPARSE: Final = 1 << 30
"""The largest sparse file, with its holes, that is put together in memory, in bytes."""


class JsonPlace(NamedTuple):
    """Where the JSON sidecar of a file stands; what an index does not tell is None."""

    path: str
    offset: int | None
    length: int | None


class ShardFiles:
    """One shard's files as lists in path order, made when first asked for. Plain Python values, for single look-ups.

    Attributes:
        index: The shard's index.
        url: The shard's address.
        unfit: What is raised instead of reading, where the index is not one of the shard's bytes; None where it is.
        json_limit: Bytes of the largest sidecar that counts; None for any.
    """

    def __init__(self, index: ShardIndex, url: str, unfit: ShardsetError | None = None) -> None:
        self.index = index
        self.url = url
        self.unfit = unfit
        self._has_records = index.records is not None
        self.json_limit: int | None = None
        self._limited: ShardFiles | None = None

    def within(self, limit: int) -> ShardFiles:
        """Return the same files where sidecars of more than `limit` bytes count as missing."""
        if self.largest <= limit:
            return self
        if self._limited is None or self._limited.json_limit != limit:
            self._limited = limited = copy.copy(self)
            limited.forget_lists()
            limited.json_limit = limit
            lengths, numbering = np.append(self.index.length, 0), self.numbering
            limited.numbering = PathNumbering(
                numbering.files,
                numbering.samples,
                *(np.where(lengths[rows] > limit, -1, rows) for rows in (numbering.json_rows, numbering.text_rows)),
            )
        return self._limited

    def forget_lists(self) -> None:
        """Free everything but the columns of the index; it is made again when it is asked for."""
        for name in _LISTS:
            self.__dict__.pop(name, None)
        self._limited = None

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

    @cached_property
    def file_numbers(self) -> list[int]:
        """Number of every row's file, in path order."""
        return _places_of(self.numbering.files, self.index.num_files)

    @cached_property
    def sample_numbers(self) -> list[int]:
        """Number of every row's sample, in path order; -1 for sidecars."""
        return _places_of(self.numbering.samples, self.index.num_files)

    def width(self, row: int) -> int | None:
        """Return the width in pixels as stored, or None where it is not known."""
        columns = self.index.geometry
        return (None if columns is None else int(columns.width[row])) or None

    def height(self, row: int) -> int | None:
        """Return the height in pixels as stored, or None where it is not known."""
        columns = self.index.geometry
        return (None if columns is None else int(columns.height[row])) or None

    def geometry(self, row: int) -> tuple[int, int] | None:
        """Return width and height as stored, or None where they are not both known."""
        width, height = self.width(row), self.height(row)
        return None if width is None or height is None else (width, height)

    @cached_property
    def aspects(self) -> NDArray[np.float32]:
        """Width by height of every row as webshart has it: what the index says, else the quotient; 0 if not known."""
        columns, found = self.index.geometry, np.zeros(self.index.num_files, np.float32)
        if columns is not None:
            known = columns.height > 0
            found[known] = np.divide(columns.width[known], columns.height[known], dtype=np.float32)
        for row, fields in self.index.extra.items():
            if "aspect" in fields:
                found[row] = fields["aspect"]
        return found

    def aspect(self, row: int) -> float | None:
        """Return width by height as webshart has it: what the index says, in single precision, else the quotient."""
        stated = self.further(row).get("aspect")
        if stated is not None:
            return float(np.float32(stated))
        size = self.geometry(row)
        return None if size is None else float(np.float32(size[0]) / np.float32(size[1]))

    def json_place(self, row: int) -> JsonPlace | None:
        """Return where the JSON sidecar of a payload stands: what the index says, else what pairing by name finds."""
        sample = self.sample_numbers[row]
        found = self.json_rows[sample] if sample >= 0 else -1
        stated = self.further(row)
        path = stated.get("json_path", self.names[found] if found >= 0 else None)
        if path is None:
            return None
        offset = stated.get("json_offset", self.offsets[found] if found >= 0 else None)
        return JsonPlace(path, offset, stated.get("json_length", self.lengths[found] if found >= 0 else None))

    def read_json(self, reader: Reader, row: int) -> bytes | None:
        """Read the JSON sidecar of a payload; None if it has none, or the index does not say where it is.

        Raises:
            StorageError: Reading failed.
        """
        place = self.json_place(row)
        if place is None or place.offset is None or place.length is None:
            return None
        if self.json_limit is not None and place.length > self.json_limit:
            return None
        sample = self.sample_numbers[row]
        if place.offset < 0 and sample >= 0:
            return self.read(reader, self.json_rows[sample])
        if self.unfit is not None:
            raise self.unfit
        return reader.read(place.offset, place.length)

    def captions(self, row: int) -> Captions:
        """Return the captions that the index holds for a payload."""
        return self.index.captions.get(row)

    def further(self, row: int) -> dict[str, Any]:
        """Return the further fields of a payload's entry in its sidecar index."""
        return self.index.extra.get(row, {})

    def read(self, reader: Reader, row: int) -> bytes:
        """Read a payload.

        Raises:
            ChecksumError: It is a record, and damaged.
            LimitError: It is a sparse file of more than `LARGEST_SPARSE` bytes with its holes.
            StorageError: Reading failed.
        """
        if self.unfit is not None:
            raise self.unfit
        if self._has_records:
            return bytes(self.read_many(reader, [row])[0])
        offset = self.offsets[row]
        if offset < 0:
            return self._read_sparse(reader, row)
        return reader.read(offset, self.lengths[row])

    def view(self, reader: Reader, row: int) -> memoryview:
        """Give a payload as a view, as `read` does."""
        if self.unfit is not None:
            raise self.unfit
        if self._has_records:
            return self.read_many(reader, [row])[0]
        offset = self.offsets[row]
        if offset < 0:
            return memoryview(self._read_sparse(reader, row))
        return reader.view(offset, self.lengths[row])

    def read_many(self, reader: Reader, rows: list[int]) -> list[memoryview]:
        """Give many payloads as views, as `read` does, in the order asked."""
        if self.unfit is not None:
            raise self.unfit
        if self._has_records:
            return self._read_records(reader, np.array(rows, np.int64))
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

    def _read_records(self, reader: Reader, rows: NDArray[np.int64]) -> list[memoryview]:
        """Give the payloads of records of a TFRecord shard, their checksums compared."""
        offsets = self.index.offset[rows]
        return check_frames(read_frames(reader, offsets, self.index.length[rows]), self.url, offsets, rows)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest payload."""
        return int(self.index.length.max(initial=0))

    def _read_sparse(self, reader: Reader, row: int) -> bytes:
        return read_pieces(reader, self.index.sparse[row], self.lengths[row], self.names[row])


_LISTS: Final = tuple(name for name, value in vars(ShardFiles).items() if isinstance(value, cached_property))


def _places_of(rows: NDArray[np.int64], count: int) -> list[int]:
    """Return for each of `count` rows its place among `rows`, or -1."""
    places = np.full(count, -1)
    places[rows] = np.arange(len(rows))
    listed: list[int] = places.tolist()
    return listed


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
        return self._files.read_json(self._reader, self._pick(self._files.sample_rows, sample_index, "sample"))

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
