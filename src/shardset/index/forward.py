"""Reading what can be had of a compressed shard that is damaged: from the front on, up to the damage."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

from shardset.errors import FormatError, StorageError
from shardset.formats.compression import inflate
from shardset.policy import Report
from shardset.storage.planner import ReadLimits
from shardset.storage.remote import RemoteReader
from shardset.storage.store import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from shardset.storage.store import Reader

_PIECE: Final = 1 << 20
_LIMITS: Final = ReadLimits(gap=1 << 20, most=8 << 20, at_once=1)


def iter_pieces(reader: Reader) -> Iterator[Buffer]:
    """Read an object through, piece by piece."""
    if isinstance(reader, RemoteReader):
        yield from reader.iter_pieces()
        return
    for offset in range(0, reader.size, _PIECE):
        yield reader.view(offset, min(_PIECE, reader.size - offset))


def read_forward(reader: Reader, size: int) -> RemoteReader:
    """Return a reader of the first `size` bytes of a damaged gzip file, as they were before it was compressed.

    Access points reach no farther than the last one before the damage; what stands behind that can be had by
    decompressing all before it. So ranges in ascending order cost little, and others begin at the front again.

    Args:
        reader: The compressed shard.
        size: Bytes before compression that `inflate` gives before it raises.
    """
    return RemoteReader(ObjectInfo(reader.url, size, reader.identity), _Forward(reader).fill, _LIMITS)


class _Forward:
    """Decompresses from the front on, and stays where it is."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._renew()

    def _renew(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._at = 0
        self._rest = memoryview(b"")
        self._pieces = inflate(iter_pieces(self._reader), "gzip", shard=self._reader.url, report=Report())

    def _take(self, most: int) -> memoryview:
        """Give the next bytes, `most` at most; none at the end or at the damage."""
        if not self._rest:
            try:
                self._rest = memoryview(next(self._pieces, b""))
            except FormatError:  # what it is was told when the shard was indexed
                return self._rest
        taken, self._rest = self._rest[:most], self._rest[most:]
        self._at += len(taken)
        return taken

    def fill(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes from an offset on."""
        if self._pid != os.getpid():  # a thread of the parent may have held the lock when this process was forked
            self._renew()
        with self._lock:
            if offset < self._at:
                self._restart()
            while self._at < offset and self._take(offset - self._at):
                pass
            done = 0
            while done < len(view):
                taken = self._take(len(view) - done)
                if not taken:
                    raise StorageError(f"the shard ends at byte {self._at} of its content", url=self._reader.url)
                view[done : done + len(taken)] = taken
                done += len(taken)
