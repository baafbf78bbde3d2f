"""A payload as a seekable file, for decoders that want one."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardset.storage.store import Reader

_FIRST: Final = 64 << 10
"""What is fetched after a jump: enough for the boxes and tables that jumps lead to."""
_MOST: Final = 8 << 20
_KEPT: Final = 8
"""Windows that stay: a decoder goes to and fro between sound, picture and the table of both."""


def open_payload(reader: Reader, offset: int, length: int) -> BinaryIO:
    """Open bytes ``[offset, offset + length)`` of a shard as a read-only, seekable, buffered file."""
    return io.BufferedReader(PayloadFile(reader, offset, length))


class PayloadFile(io.RawIOBase):
    """A payload as a raw, read-only, seekable file.

    What cannot be mapped is fetched in windows: a small one after a jump, each following one twice as large.
    """

    def __init__(self, reader: Reader, offset: int, length: int) -> None:
        super().__init__()
        self._reader = reader
        self._offset = offset
        self._length = length
        self._position = 0
        self._windows: OrderedDict[int, memoryview] = OrderedDict()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, as files do; beyond the end is allowed and reads nothing there."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}.get(whence)
        if base is None:
            raise ValueError(f"whence={whence}: it is 0, 1 or 2")
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        """Read into a buffer, and return how many bytes; 0 at the end."""
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._length - self._position))
        if not count:
            return 0
        if self._reader.map() is not None:
            target[:count] = self._reader.read(self._offset + self._position, count)
        else:
            start, window = self._window(count)
            piece = window[self._position - start : self._position - start + count]
            count = len(piece)
            target[:count] = piece
        self._position += count
        return count

    def _window(self, count: int) -> tuple[int, memoryview]:
        """Return the window that holds the byte at the position, and where it begins; fetch it if need be."""
        position, size = self._position, _FIRST
        for start, window in reversed(self._windows.items()):
            if start <= position < start + len(window):
                self._windows.move_to_end(start)
                return start, window
            if position == start + len(window):
                size = min(2 * len(window), _MOST)
        size = min(max(size, count), self._length - position)
        self._windows[position] = window = self._reader.view(self._offset + position, size)
        if len(self._windows) > _KEPT:
            self._windows.popitem(last=False)
        return position, window
