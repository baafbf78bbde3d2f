"""Shards as a conversion fills them: samples of a tar, or records."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Final, Protocol, cast

from shardset.formats.tfrecord import FRAME_SIZE

from .member_writer import MemberWriter
from .tar_headers import END_SIZE, member_size
from .tfrecord_frames import FrameStream

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .convert_samples import TarSample
    from .shard_files import PendingFile
    from .tfrecord_frames import Compression

_GATHERED: Final = 1 << 20
_BATCH: Final = 4096


class ShardSink(Protocol):
    """One shard that samples are written into."""

    file: PendingFile
    count: int
    size: int

    def cost(self, item: Any) -> int:
        """Return the bytes that a sample takes, before compression."""

    def add(self, item: Any) -> None:
        """Write a sample."""

    def finish(self) -> None:
        """Write the end of the shard."""


class TarSink:
    """A tar.

    Args:
        file: Takes its bytes.
        marker: Name and payload of a member that stands before all others, or None.

    Attributes:
        file: As given.
        count: Samples in it.
        size: Bytes that its members take, and its end; extension headers apart.
    """

    def __init__(self, file: PendingFile, marker: tuple[str, bytes] | None) -> None:
        self.file = file
        self.count = 0
        self.size = END_SIZE
        self._gathered = _Gathered(file)
        self._tar = MemberWriter(cast("IO[bytes]", self._gathered))
        if marker is not None:
            name, payload = marker
            self._tar.add(name, len(payload), [payload])
            self.size += member_size(len(payload))

    def cost(self, item: TarSample) -> int:
        """Return the bytes that a sample takes."""
        return sum(member_size(sum(map(_length, member.pieces))) for member in item.members)

    def add(self, item: TarSample) -> None:
        """Write a sample."""
        for suffix, pieces in item.members:
            size = sum(map(_length, pieces))
            self._tar.add(f"{item.key}.{suffix}", size, pieces)
            self.size += member_size(size)
        self.count += 1

    def finish(self) -> None:
        """Write the end of the tar."""
        self._tar.close()
        self._gathered.flush()


class RecordSink:
    """A TFRecord file.

    Args:
        file: Takes its bytes.
        compression: As TensorFlow calls it.

    Attributes:
        file: As given.
        count: Records in it.
        size: Their bytes, before compression.
    """

    def __init__(self, file: PendingFile, compression: Compression) -> None:
        self.file = file
        self.count = 0
        self.size = 0
        self._stream = FrameStream(file, compression)
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def cost(self, item: bytes) -> int:
        """Return the bytes that a record takes."""
        return len(item) + FRAME_SIZE

    def add(self, item: bytes) -> None:
        """Write a record."""
        self._batch.append(item)
        self._batch_bytes += len(item)
        self.count += 1
        self.size += len(item) + FRAME_SIZE
        if self._batch_bytes >= _GATHERED or len(self._batch) == _BATCH:
            self._write()

    def finish(self) -> None:
        """Write the rest, and the end of the compressed stream."""
        self._write()
        self._stream.finish()

    def _write(self) -> None:
        if self._batch:
            self._stream.write(self._batch)
        self._batch, self._batch_bytes = [], 0


class _Gathered:
    """Gathers what a tar is written in, headers and paddings, into pieces worth a call of the system."""

    def __init__(self, file: PendingFile) -> None:
        self._file = file
        self._gathered = bytearray()

    def write(self, data: Buffer) -> int:
        size = memoryview(data).nbytes
        if size >= _GATHERED:
            self.flush()
            self._file.write(data)
        else:
            self._gathered += data
            if len(self._gathered) >= _GATHERED:
                self.flush()
        return size

    def flush(self) -> None:
        if self._gathered:
            self._file.write(self._gathered)
            self._gathered = bytearray()


def _length(piece: Buffer) -> int:
    return memoryview(piece).nbytes
