"""Tars of members given one by one: the same members give the same bytes, whoever writes them, where and when."""

from __future__ import annotations

import tarfile
from typing import IO, TYPE_CHECKING, Final

from shardset.formats.tar_header import padded

from .tar_headers import END_SIZE, RECORD, HeaderMaker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

_HEADERS: Final = HeaderMaker(format=tarfile.PAX_FORMAT)


class MemberWriter:
    """Writes regular files of mode 644, without owner and without time, one behind the other.

    The format is POSIX *pax*; an extension header stands only before names above 100 bytes or beyond ASCII, and before
    sizes of 8 GiB and more. The bytes are those of Python's ``tarfile`` with the same settings.

    Args:
        file: Takes the bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = 0

    def add(self, name: str, size: int, pieces: Iterable[Buffer]) -> None:
        """Write one member.

        Args:
            name: Its whole name; surrogate escapes stand for bytes that are no UTF-8.
            size: Bytes of its payload.
            pieces: The payload.

        Raises:
            ValueError: The pieces are not `size` bytes. What was written is then no tar.
            OSError: Writing failed.
        """
        header = _HEADERS.make(name, size)
        self._file.write(header)
        written = 0
        for piece in pieces:
            written += memoryview(piece).nbytes
            self._file.write(piece)
        if written != size:
            raise ValueError(f"{name!r} has {written} bytes of payload and not {size}")
        self._file.write(bytes(padded(size) - size))
        self._size += len(header) + padded(size)

    def close(self) -> None:
        """Write the end marker, and fill up the last record of 10240 bytes, as tar always does. The file stays open."""
        self._file.write(bytes(END_SIZE))
        self._size += END_SIZE
        self._file.write(bytes(-self._size % RECORD))
        self._size += -self._size % RECORD
