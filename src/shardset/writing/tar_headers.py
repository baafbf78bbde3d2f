"""Headers of tar members as we write them: most are made of pieces of one, the odd ones by Python's ``tarfile``."""

from __future__ import annotations

import copy
import tarfile
from typing import Final, Literal, TypeAlias

from shardset.formats.tar_header import BLOCK, padded

Format: TypeAlias = Literal[0, 1, 2]

END_SIZE: Final = 2 * BLOCK
"""Bytes of the end marker."""
RECORD: Final = 20 * BLOCK
"""What tar fills up a file to."""
_LONGEST_NAME: Final = 100
_LARGEST: Final = 8**11 - 1
"""The largest number of eleven octal digits."""
_FORMATS: Final[dict[str, Format]] = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
    "ustar_format": tarfile.USTAR_FORMAT,
    "gnu_format": tarfile.GNU_FORMAT,
    "pax_format": tarfile.PAX_FORMAT,
}


class HeaderMaker:
    """Makes the headers of regular files that have everything but name and size in common.

    Args:
        user: Name of the owner, at most 31 ASCII characters.
        group: Name of the group, likewise.
        mode: Permissions, such as ``0o444``.
        mtime: Time of the last change, in seconds since 1970; a fraction needs PAX.
        format: A format of `tarfile`, or its name (``"GNU_FORMAT"``, ``"gnu"``). None: *ustar*, and where that cannot
            hold a name, a size or the time, a PAX extension header before it.

    Raises:
        ValueError: One of them cannot be written, or not in this format.
    """

    def __init__(
        self,
        *,
        user: str = "",
        group: str = "",
        mode: int = 0o644,
        mtime: float = 0,
        format: int | str | None = None,  # noqa: A002 - the name that tarfile and webdataset have for it
    ) -> None:
        for what, text in (("user", user), ("group", group)):
            if not text.isascii() or len(text) > 31 or "\0" in text:
                raise ValueError(f"{what}={text!r}: a tar header holds at most 31 ASCII characters")
        if not 0 <= mode <= 0o7777:
            raise ValueError(f"mode={mode}: permissions are 0 to 0o7777")
        self._format = _parse_format(format)
        self._member = tarfile.TarInfo()
        self._member.uname, self._member.gname, self._member.mode = user, group, mode
        self._member.mtime = _parse_time(mtime, self._format)
        self._is_plain = type(self._member.mtime) is int and 0 <= self._member.mtime <= _LARGEST
        if self._is_plain:
            # What is the same in all ordinary headers: before and behind the size, behind the checksum; and its sum.
            block = self._member.tobuf(tarfile.USTAR_FORMAT if self._format is None else self._format)
            self._owner, self._time, self._rest = block[_LONGEST_NAME:124], block[135:148], block[155:]
            # The checksum's own digits count as spaces.
            self._sum = sum(self._owner) + sum(self._time) + sum(self._rest) + 7 * 0x20

    def make(self, name: str, size: int) -> bytes:
        """Return what stands before a payload: one header, or an extension header and its body and then a header.

        Args:
            name: The member's whole name; surrogate escapes stand for bytes that are no UTF-8.
            size: Bytes of its payload.

        Raises:
            ValueError: The format cannot hold them.
        """
        is_plain = self._is_plain and len(name) <= _LONGEST_NAME and 0 <= size <= _LARGEST
        if not is_plain or not name.isascii() or "\0" in name:
            return self._make_odd(name, size)
        raw, digits = name.encode("ascii"), b"%011o" % size
        checksum = b"%06o\0" % (self._sum + sum(raw) + sum(digits))
        return b"".join((raw.ljust(_LONGEST_NAME, b"\0"), self._owner, digits, self._time, checksum, self._rest))

    def _make_odd(self, name: str, size: int) -> bytes:
        member = copy.copy(self._member)  # makers are shared by threads
        member.name, member.size = name, size
        kind = self._format
        if kind in {None, tarfile.USTAR_FORMAT}:
            # tarfile would cut a fraction off, and write bytes beyond ASCII, which *ustar* gives no meaning to.
            fits = name.isascii() and type(member.mtime) is int
            try:
                if fits:
                    return member.tobuf(tarfile.USTAR_FORMAT)
            except ValueError:
                pass  # too long a name, too large a number
            if kind is not None:
                raise ValueError("USTAR_FORMAT cannot hold its name (100 bytes of ASCII, 255 with a slash) or its size")
            kind = tarfile.PAX_FORMAT
        return member.tobuf(kind, "utf-8", "surrogateescape")


def member_size(size: int) -> int:
    """Return the bytes that a member takes in a tar, extension headers apart: a header, and the padded payload."""
    return BLOCK + padded(size)


def shard_size(size: int) -> int:
    """Return the bytes of a tar whose members take `size` bytes: with its end marker, and its last record filled up."""
    return -(-(size + END_SIZE) // RECORD) * RECORD


def _parse_format(value: int | str | None) -> Format | None:
    if value is None:
        return None
    for name, kind in _FORMATS.items():
        if (value.lower() == name) if isinstance(value, str) else (value == kind):
            return kind
    raise ValueError(f"format={value!r}: give tarfile.USTAR_FORMAT, GNU_FORMAT or PAX_FORMAT, or None")


def _parse_time(mtime: float, kind: Format | None) -> float:
    """Return the time as tarfile takes it: whole where it is a whole number, so that it needs no extension."""
    try:
        whole = int(mtime)
    except (ValueError, OverflowError):  # not a number, infinite
        raise ValueError(f"mtime={mtime}: it must be seconds since 1970") from None
    is_whole = whole == mtime
    if kind in {tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT} and not is_whole:
        raise ValueError(f"mtime={mtime}: only PAX_FORMAT holds fractions of a second; give a whole number")
    if kind == tarfile.USTAR_FORMAT and not 0 <= whole <= _LARGEST:
        raise ValueError(f"mtime={mtime}: USTAR_FORMAT holds 0 to {_LARGEST}")
    return whole if is_whole else float(mtime)
