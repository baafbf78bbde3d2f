"""Random access in what is compressed with gzip: a reader of the bytes as they were before.

Deflate can only be read from the front, or from a point at which the last 32 KiB before it are known. Such access
points are found once, in a pass over the whole object, and kept; from then on any range costs what lies between it and
the point before it. The package `indexed_gzip` does that part.
"""

from __future__ import annotations

import io
import os
import threading
import zlib
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import FormatError, IndexFileError, MissingExtraError, StorageError

from .planner import ReadLimits
from .remote import RemoteReader
from .store import ObjectInfo

if TYPE_CHECKING:
    from .store import Reader

SPACING: Final = 2 << 20
"""Bytes between two access points, before compression. A point takes some 20 KiB, a random read half of this."""
_PIECE: Final = 256 << 10
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
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._file = self._open()

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
            self._file.export_index(fileobj=found)
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
                file.import_index(fileobj=io.BytesIO(zlib.decompress(self._points)))
            except _gzip_errors() as error:
                what = f"the access points of a compressed shard cannot be read ({error})"
                raise IndexFileError(what, path=self._compressed.url, hint="index the shard again") from error
        return file

    def _fill(self, offset: int, view: memoryview) -> None:
        with self._lock:
            if self._pid != os.getpid():  # the parent's place in the file is not this process's
                self._file, self._pid = self._open(), os.getpid()
            try:
                self._file.seek(offset)
                done = 0
                while done < len(view):
                    count = self._file.readinto(view[done:])
                    if not count:
                        what = f"the shard ends at byte {offset + done} of its content"
                        raise StorageError(what, url=self._compressed.url)
                    done += count
            except _gzip_errors() as error:
                raise _damaged(self._compressed, error) from error


def read_forward(reader: Reader, size: int) -> RemoteReader:
    """Return a reader of the first `size` bytes of a damaged object, as they were before it was compressed.

    Access points reach no farther than the last one before the damage; what stands behind that can be had by
    decompressing all before it. So ranges in ascending order cost little, and others begin at the front again.

    Args:
        reader: The compressed object.
        size: Bytes before compression that can be read.
    """
    return RemoteReader(ObjectInfo(reader.url, size, reader.identity), _Forward(reader).fill, _LIMITS)


class _Forward:
    """Decompresses from the front on, member by member, and stays where it is."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._taken = self._at = 0
        self._rest = b""
        self._member = zlib.decompressobj(31)

    def _next(self, most: int) -> bytes:
        """Give the next bytes, `most` at most; none at the end."""
        while True:
            if self._member.eof:
                self._rest, self._member = self._member.unused_data, zlib.decompressobj(31)
            if not self._rest:
                count = min(_PIECE, self._reader.size - self._taken)
                self._rest = self._reader.read(self._taken, count)
                self._taken += count
                if not count:
                    return b""
            given = self._member.decompress(self._rest, most)
            self._rest = self._member.unconsumed_tail
            if given:
                self._at += len(given)
                return given

    def fill(self, offset: int, view: memoryview) -> None:
        with self._lock:
            if offset < self._at:
                self._restart()
            try:
                while self._at < offset and self._next(min(_PIECE, offset - self._at)):
                    pass
                done = 0
                while done < len(view):
                    given = self._next(len(view) - done)
                    if not given:
                        what = f"the shard ends at byte {self._at} of its content"
                        raise StorageError(what, url=self._reader.url)
                    view[done : done + len(given)] = given
                    done += len(given)
            except zlib.error as error:
                self._restart()
                raise _damaged(self._reader, error) from error


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
