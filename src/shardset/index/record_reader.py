"""The payloads of one TFRecord file in order, from any source of bytes: `iter_records`."""

from __future__ import annotations

import os
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO, Final, cast, get_args

from shardset.errors import FormatError
from shardset.formats.compression import Compression, detect, inflate
from shardset.formats.tfrecord import HEAD_SIZE, HEADER_SIZE
from shardset.formats.tfrecord_stream import iter_mapped, iter_stream
from shardset.storage.anywhere import open_store

from .forward import iter_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Buffer

    from shardset.policy import Report
    from shardset.storage.store import Store

_PIECE: Final = 1 << 20


def iter_records(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO,
    verify: bool = True,
    compression: str | None = None,
    *,
    tf_compat: bool = False,
    store: Store | None = None,
    report: Report | None = None,
) -> Iterator[bytes]:
    """Yield the payload of each record of a TFRecord file, plain or compressed.

    A local file is opened at once and read through a memory map, so it must not be cut short meanwhile; what is
    elsewhere is read ahead in large pieces once the first record is asked for. Nothing has to be closed.

    Args:
        source: A path or url, the bytes themselves, or a binary file, which is read from where it stands to its end and
            need not be seekable.
        verify: Compare each payload with its checksum. Lengths are always compared with theirs, since nothing behind a
            wrong one is a record.
        compression: ``"gzip"``, ``"zlib"`` or ``""`` for none, also in capitals; by default the first bytes tell.
        tf_compat: Take 1 to 11 bytes behind the last record for the end of the file, as TensorFlow does.
        store: Where a url lives; by default the place that its scheme names.
        report: Counts zero bytes behind compressed data; without one they are logged.

    Raises:
        FormatError: A record is damaged or cut short, the compressed data is, or the file is something else. All
            records before the fault have been given. `offset` is where the record begins, in a compressed file counted
            in inflated bytes; where the compressed data itself is damaged, it counts compressed bytes.
        StorageError: It cannot be opened or read.
        ValueError: `compression` is none of these.
    """
    forced = None if compression is None else compression.lower()
    if forced is not None and forced not in get_args(Compression):
        raise ValueError(f"compression={compression!r}: it is one of {', '.join(map(repr, get_args(Compression)))}")
    reading = _Reading(verify=verify, forced=cast("Compression | None", forced), tf_compat=tf_compat, report=report)
    if isinstance(source, str | os.PathLike):
        url = os.fspath(source)
        reader = (store or open_store(url)).open(url)
        whole = reader.map()
        if whole is not None:
            return reading.of_whole(whole, url)
        return reading.of_pieces(iter_pieces(reader), url, reader.size)
    if isinstance(source, bytes | bytearray | memoryview):
        return reading.of_whole(memoryview(source).cast("B"), None)
    name = getattr(source, "name", None)
    return reading.of_pieces(_file_pieces(source), name if isinstance(name, str) else None, None)


class _Reading:
    """What a caller of `iter_records` wants, for each kind of source."""

    def __init__(self, *, verify: bool, forced: Compression | None, tf_compat: bool, report: Report | None) -> None:
        self._verify = verify
        self._forced = forced
        self._tf_compat = tf_compat
        self._report = report

    def of_whole(self, whole: memoryview, shard: str | None) -> Iterator[bytes]:
        """Yield the records of a file that is in memory or mapped."""
        if not self._kind(bytes(whole[:HEAD_SIZE]), shard):
            return iter_mapped(whole, verify=self._verify, shard=shard, tf_compat=self._tf_compat)
        pieces = (whole[start : start + _PIECE] for start in range(0, len(whole), _PIECE))
        return self.of_pieces(pieces, shard, len(whole))

    def of_pieces(self, pieces: Iterator[Buffer], shard: str | None, size: int | None) -> Iterator[bytes]:
        """Yield the records of a file that is read piece by piece, beginning when the first is asked for."""
        return chain.from_iterable(self._once(pieces, shard, size))

    def _once(self, pieces: Iterator[Buffer], shard: str | None, size: int | None) -> Iterator[Iterator[bytes]]:
        first: list[Buffer] = []
        head = b""
        while len(head) < HEAD_SIZE and (piece := next(pieces, None)) is not None:
            first.append(piece)
            head += bytes(memoryview(piece).cast("B")[:HEAD_SIZE])
        kind = self._kind(head[:HEAD_SIZE], shard)
        chunks: Iterable[Buffer] = chain(first, pieces)
        if kind:
            chunks, size = inflate(chunks, kind, shard=shard, report=self._report), None
        yield iter_stream(
            chunks,
            verify=self._verify,
            shard=shard,
            tf_compat=self._tf_compat,
            size=size,
            is_inflated=bool(kind),
        )

    def _kind(self, head: bytes, shard: str | None) -> Compression:
        """Return how the file is compressed, as the caller says or its first bytes do; what is unknown is plain."""
        found = detect(head)
        if self._forced is None:
            return found.kind or ""
        if found.kind not in {None, self._forced} and len(head) >= HEADER_SIZE:
            raise FormatError(
                f"compression={self._forced!r} does not fit: this is {found.what}",
                shard=shard,
                offset=0,
                code="bad_compression",
                hint="leave compression out, and the first bytes tell it",
            )
        return self._forced


def _file_pieces(file: BinaryIO) -> Iterator[Buffer]:
    read = getattr(file, "read1", file.read)  # what a pipe has now, without waiting for a whole piece
    while True:
        piece = read(_PIECE)
        if piece is None:
            raise BlockingIOError("the file does not block and has no bytes yet; it cannot be read to its end")
        if isinstance(piece, str):
            raise TypeError("the file is open as text: open it as binary")
        if not piece:
            return
        yield piece
