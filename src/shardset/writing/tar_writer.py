"""Tars as we write them: the same members give the same bytes, whoever writes them, where and when."""

from __future__ import annotations

import tarfile
from typing import IO, TYPE_CHECKING, Final

from shardset.formats.tar_header import BLOCK, padded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

END_SIZE: Final = 2 * BLOCK
"""Bytes of the end marker."""
_RECORD: Final = 20 * BLOCK
_LONGEST_NAME: Final = 100
_LARGEST: Final = 8**11 - 1


class TarWriter:
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
        header = _header(name, size)
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
        self._file.write(bytes(-self._size % _RECORD))
        self._size += -self._size % _RECORD


def _header(name: str, size: int) -> bytes:
    """Return what stands before a payload; where it is ordinary, made of pieces of one that tarfile made."""
    if len(name) > _LONGEST_NAME or size > _LARGEST or not name.isascii() or "\0" in name:
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    raw, digits = name.encode("ascii"), b"%011o" % size
    checksum = b"%06o\0" % (_SUM + sum(raw) + sum(digits))
    return b"".join((raw.ljust(_LONGEST_NAME, b"\0"), _OWNER, digits, _TIME, checksum, _REST))


def _ordinary() -> tuple[bytes, bytes, bytes, int]:
    """Return what is the same in all ordinary headers: before and behind the size, behind the checksum; and its sum."""
    block = tarfile.TarInfo("").tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    owner, time, rest = block[_LONGEST_NAME:124], block[135:148], block[155:]
    return owner, time, rest, sum(owner) + sum(time) + sum(rest) + 7 * 0x20  # the checksum's digits count as spaces


_OWNER, _TIME, _REST, _SUM = _ordinary()


def member_size(size: int) -> int:
    """Return the bytes that a member takes in a tar, extension headers apart: a header, and the padded payload."""
    return BLOCK + padded(size)
