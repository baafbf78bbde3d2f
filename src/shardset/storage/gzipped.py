"""Random access in what is compressed with gzip: a reader of the bytes as they were before.

Deflate can only be read from the front, or from a point at which the last 32 KiB before it are known. Such access
points are found once, in a pass over the whole object, and kept; from then on any range costs what lies between it and
the point before it. The package `indexed_gzip` does that part.
"""

from __future__ import annotations

import io
import os
import struct
import threading
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.errors import FormatError, IndexFileError, MissingExtraError, StorageError

from .planner import ReadLimits
from .remote import RemoteReader
from .store import ObjectInfo

if TYPE_CHECKING:
    from .store import Reader

SPACING: Final = 2 << 20
"""Bytes between two access points, before compression. A point takes some 20 KiB, a random read half of this."""
# The index that indexed_gzip exports (version 1): magic with version and flags, compressed size, size, spacing, window,
# number of points; for each point both offsets, bits of the byte before, whether it has a window; then the windows.
_POINTS_HEAD: Final = struct.Struct("<7sQQIII")
_POINT: Final = struct.Struct("<QQBB")
_WINDOW: Final = 32 << 10
# A read passes over what lies between two ranges anyway, so they are read together; more than one at once is no use.
_LIMITS: Final = ReadLimits(gap=SPACING // 2, most=8 << 20, at_once=1)


class GzipSource:
    """What `reader` reads, as it was before it was compressed. Ranges are decompressed one at a time.

    Args:
        reader: The compressed object. Its checksums are not looked at here: who made the points has done so.
        size: Its size before compression, or that of what can be read of it.
        points: Its access points; None to find them.

    Raises:
        MissingExtraError: The extra ``gzip`` is not installed.
        IndexFileError: The points are malformed.
    """

    def __init__(self, reader: Reader, size: int, points: bytes | None = None) -> None:
        self._compressed = reader
        self._points = points
        self._size = size
        self._opened = _Opened(os.getpid(), threading.Lock(), self._open())

    @property
    def reader(self) -> RemoteReader:
        """A reader of the bytes before compression.

        It raises FormatError where the object is damaged, and StorageError where it cannot be read.
        """
        info = ObjectInfo(self._compressed.url, self._size, self._compressed.identity)
        return RemoteReader(info, self._fill, _LIMITS)

    def points(self) -> bytes:
        """Return the access points, having read the object to its end if need be.

        Raises:
            FormatError: It is damaged.
            StorageError: Reading failed.
        """
        if self._points is None and self._size:
            self._fill(self._size - 1, memoryview(bytearray(1)))
            found = io.BytesIO()
            self._opened.file.export_index(fileobj=found)
            self._points = zlib.compress(found.getvalue())
        return self._points or b""

    def _open(self) -> Any:
        try:
            from indexed_gzip import IndexedGzipFile
        except ImportError as error:
            what = "random access in a shard that is compressed with gzip needs indexed_gzip"
            raise MissingExtraError(what, extra="gzip") from error
        source = _File(self._compressed)
        file = IndexedGzipFile(fileobj=source, spacing=SPACING, readbuf_size=1 << 20, skip_crc_check=True)
        if self._points:
            try:
                points = _unpack_points(self._points, self._size, self._compressed.size)
                file.import_index(fileobj=io.BytesIO(points))
            except _gzip_errors() as error:
                what = f"the access points of a compressed shard cannot be used ({error})"
                raise IndexFileError(what, path=self._compressed.url, hint="index the shard again") from error
        return file

    def _fill(self, offset: int, view: memoryview) -> None:
        opened = self._opened
        if opened.pid != os.getpid():
            # A child's own: the parent's place in the file is another, and a thread of it may have held the lock.
            opened = self._opened = _Opened(os.getpid(), threading.Lock(), self._open())
        with opened.lock:
            try:
                opened.file.seek(offset)
                done = 0
                while done < len(view):
                    count = opened.file.readinto(view[done:])
                    if not count:
                        what = f"the shard ends at byte {offset + done} of its content"
                        raise StorageError(what, url=self._compressed.url)
                    done += count
            except _gzip_errors() as error:
                raise _damaged(self._compressed, error) from error


class _Opened(NamedTuple):
    """What one process reads a compressed object with."""

    pid: int
    lock: threading.Lock
    file: Any


def _unpack_points(packed: bytes, size: int, compressed_size: int) -> bytes:
    """Return access points as `indexed_gzip` imports them, if they are such that it can follow them.

    It takes what it is given: points that do not ascend would send it round for ever.

    Raises:
        ValueError: They are not those of an object of these sizes.
        zlib.error: They cannot be unpacked.
    """
    most = size // (SPACING // 2) + 16  # it puts them a little closer or farther than it was told
    unpacked = zlib.decompressobj().decompress(packed, _POINTS_HEAD.size + most * (_POINT.size + _WINDOW) + 1)
    if len(unpacked) < _POINTS_HEAD.size:
        raise ValueError("they are cut short")
    magic, stated_compressed, stated, _, window, count = _POINTS_HEAD.unpack_from(unpacked)
    if magic[:5] != b"GZIDX" or window != _WINDOW or count > most:
        raise ValueError("they are of another kind")
    if (stated_compressed, stated) != (compressed_size, size):
        raise ValueError(f"they are of {stated_compressed} and {stated} bytes, not {compressed_size} and {size}")
    end = _POINTS_HEAD.size + count * _POINT.size
    if len(unpacked) < end:
        raise ValueError("they are cut short")
    points = list(_POINT.iter_unpack(unpacked[_POINTS_HEAD.size : end]))
    if len(unpacked) != end + _WINDOW * sum(bool(has_window) for *_, has_window in points):
        raise ValueError("their windows are missing, or too many")
    for before, after in pairwise([(-1, -1), *(point[:2] for point in points), (compressed_size + 1, size + 1)]):
        if not (before[0] < after[0] and before[1] < after[1]):
            raise ValueError("they do not ascend")
    return unpacked


def _damaged(reader: Reader, error: Exception) -> FormatError:
    what = f"the compressed shard is damaged ({' '.join(str(error).split()) or type(error).__name__})"
    hint = "see what is left with: shardset check, and save it with: shardset fix"
    return FormatError(what, shard=reader.url, code="bad_compression", hint=hint)


def _gzip_errors() -> tuple[type[Exception], ...]:
    from indexed_gzip import NotCoveredError, ZranError

    return ZranError, NotCoveredError, EOFError, ValueError, zlib.error


class _File(io.RawIOBase):
    """A reader as the kind of file that indexed_gzip takes."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._reader.size - self._at)
        content = self._reader.read(self._at, left if size < 0 else min(size, left))
        self._at += len(content)
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._reader.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
