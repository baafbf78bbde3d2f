"""The walker through a tar: one member at a time, with every rule.

The rules are those of POSIX.1-2017 *pax* and the GNU tar manual.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import numpy as np

from .faults import ERRORS, Fault, foreign_fault
from .tar_header import (
    BLOCK,
    MAX_EXTENSION,
    MAX_PAX_RECORDS,
    ZERO_BLOCK,
    Header,
    SparseRow,
    checksums,
    gnu_sparse_map,
    has_valid_checksum,
    iter_pax_records,
    name_oddities,
    padded,
    parse_header,
    parse_pax_number,
    pax_sparse_1_0,
    pax_sparse_pairs,
    place_rows,
    stored_checksum,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    ReadRange = Callable[[int, int], Buffer]


class Kind(IntEnum):
    """What a member is. Only files have a payload that can be read."""

    FILE = 0
    DIR = 1
    SYMLINK = 2
    HARDLINK = 3
    CHAR = 4
    BLOCK = 5
    FIFO = 6
    OTHER = 7


class FaultError(Exception):
    """Carries the fault that ends a scan up to `scan_tar`."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class CutError(Exception):
    """The bytes at hand end before the member does."""


class Member(NamedTuple):
    """A row of a `TarTable`, with the pieces of a sparse file."""

    name: bytes
    kind: Kind
    first_offset: int
    header_offset: int
    offset: int
    size: int
    sparse: tuple[SparseRow, ...] | None


@dataclass(slots=True)
class _Extensions:
    """What the extension headers before a member said of it."""

    first_offset: int
    length: int = 0
    pax_offset: int = 0
    pax: list[tuple[bytes, bytes]] | None = None
    long_name: bytes | None = None
    long_link: bytes | None = None

    def values(self) -> dict[bytes, bytes]:
        """The PAX values in force: the last of a repeated key; an empty one withdraws the key."""
        values: dict[bytes, bytes] = {}
        for key, value in self.pax or ():
            if value:
                values[key] = value
            else:
                values.pop(key, None)
        return values


_NO_PAYLOAD: Final = {
    b"2": Kind.SYMLINK,
    b"3": Kind.CHAR,
    b"4": Kind.BLOCK,
    b"5": Kind.DIR,
    b"6": Kind.FIFO,
    b"V": Kind.OTHER,
}
_SKIPPED: Final = {
    b"D": Kind.DIR,
    b"M": Kind.OTHER,
    b"N": Kind.OTHER,
    b"A": Kind.OTHER,
    b"E": Kind.OTHER,
    b"I": Kind.OTHER,
}
_TAIL_WINDOW: Final = 1 << 20


class Walker:
    """Reads one member at a time, with every rule. Keeps the members and faults that it met."""

    def __init__(self, read: ReadRange, size: int, *, ignore_zeros: bool, is_start: bool, goes_on: bool) -> None:
        self._read_range = read
        self._size = size
        self._ignore_zeros = ignore_zeros
        self._is_start = is_start
        self._goes_on = goes_on
        self.is_cut = False
        self.began = 0
        self.members: list[Member] = []
        self.faults: list[Fault] = []
        self.end = 0

    def _read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer at the end of the shard."""
        if self._goes_on and offset + length > self._size:
            raise CutError
        length = min(length, self._size - offset)
        return bytes(self._read_range(offset, length)) if length > 0 else b""

    def warn(self, code: str, offset: int, name: bytes | None = None, message: str = "") -> None:
        """Take note of an oddity."""
        self.faults.append(Fault(code, offset, None if name is None else _text(name), message))

    def step(self, position: int) -> int:
        """Read the member whose headers begin at `position`, or the end marker.

        Returns:
            The offset behind the member, or -1 at the end.

        Raises:
            FaultError: The bytes cannot be a member.
        """
        extensions = _Extensions(position)
        self.began = position
        while True:
            block = self._read(position, BLOCK)
            if len(block) < BLOCK or block == ZERO_BLOCK:
                if extensions.first_offset != position:
                    _fail("dangling_extension", extensions.first_offset, "no member follows the extension header")
                return self._finish(position, block)
            if not has_valid_checksum(block):
                self._reject(position, block)
            try:
                header = parse_header(block)
            except ValueError as error:
                _fail("bad_number", position, f"the size field is broken: {error}", block[:100].split(b"\0")[0])
            if header.typeflag in b"xXgLK":
                position = self._take_extension(position, header, extensions)
            else:
                return self._take_member(position, block, header, extensions)

    def _reject(self, position: int, block: bytes) -> NoReturn:
        if self._is_start and position == 0 and block[257:262] != b"ustar":
            raise FaultError(foreign_fault(block))
        stored, actual = stored_checksum(block), checksums(block)[0]
        message = f"the header's checksum is {stored}, its bytes add up to {actual}"
        raise FaultError(Fault("bad_checksum", position, None, message, stored, actual))

    def _finish(self, position: int, block: bytes) -> int:
        """Handle what stands where no header does: the end of the bytes, or a zero block."""
        self.end = position
        if not block:
            if self._is_start and not position:
                _fail("empty_file", 0, "the file has no bytes")
            self.warn("no_end_marker", position)
            return -1
        if len(block) < BLOCK:
            if block.strip(b"\0"):
                if self._is_start and position == 0 and block[257:262] != b"ustar":
                    raise FaultError(foreign_fault(block))
                _fail("truncated_header", position, f"{len(block)} bytes are left where a header takes {BLOCK}")
            self.warn("short_end_marker", position)
            return -1
        second = self._read(position + BLOCK, BLOCK)
        if len(second) < BLOCK and not second.strip(b"\0"):
            self.warn("short_end_marker", position)
            return -1
        resume = self._next_data(position + BLOCK)
        if resume < 0:
            return -1
        if self._ignore_zeros:
            return resume
        self.warn("data_after_end", resume, message=f"{self._size - resume} bytes behind the end marker are not read")
        return -1

    def _next_data(self, position: int) -> int:
        """Return the offset of the first block that is not zero, or -1."""
        length = 8 * BLOCK
        while position < self._size:
            is_set = np.frombuffer(self._read(position, min(length, self._size - position)), np.uint8) != 0
            first = int(is_set.argmax())
            if is_set[first]:
                return position + first // BLOCK * BLOCK
            position += len(is_set)
            length = min(2 * length, _TAIL_WINDOW)  # small at first, because there may be many lone zero blocks
        return -1

    def _take_extension(self, position: int, header: Header, extensions: _Extensions) -> int:
        """Take an extension header's body into `extensions`, and return the offset behind it."""
        extensions.length += header.size
        if extensions.length > MAX_EXTENSION:
            message = f"the extensions before one member say {extensions.length} bytes, above {MAX_EXTENSION}"
            _fail("extension_too_big", position, message)
        body = self._read(position + BLOCK, header.size)
        if len(body) < header.size:
            _fail("truncated_payload", position, f"the extension's {header.size} bytes end after {len(body)}")
        following = min(position + BLOCK + padded(header.size), self._size)  # the padding may be missing
        if header.typeflag in b"LK":
            text = body.split(b"\0", 1)[0]
            earlier = extensions.long_name if header.typeflag == b"L" else extensions.long_link
            if header.typeflag == b"L":
                extensions.long_name = text
            else:
                extensions.long_link = text
            if earlier is not None:
                self.warn("repeated_extension", position, message="two long names before one member; the last counts")
            return following
        records = _parse_records(body, position, MAX_PAX_RECORDS - len(extensions.pax or ()))
        if header.typeflag == b"g":
            # tarfile and GNU tar obey these, and then every member has one name; bsdtar ignores them, as we do.
            ignored = {
                key for key, _ in records if key in {b"path", b"linkpath", b"size"} or key.startswith(b"GNU.sparse")
            }
            if ignored:
                listed = ", ".join(sorted(map(_text, ignored)))
                self.warn("global_override_ignored", position, message=f"a global header sets {listed} for all members")
            if extensions.first_offset == position:
                extensions.first_offset = following
        else:
            if extensions.pax is not None:
                self.warn("repeated_extension", position, message="two PAX headers before one member; the last counts")
            extensions.pax = extensions.pax or []
            extensions.pax += records
            extensions.pax_offset = position
        return following

    def _take_member(self, position: int, block: bytes, header: Header, extensions: _Extensions) -> int:
        values = extensions.values()
        name = self._name(position, header, extensions, values)
        stored = header.size
        if b"size" in values:
            stored = self._pax_number(values[b"size"], extensions.pax_offset, name)
        kind, has_data = self._kind(position, name, header.typeflag, stored)
        if not has_data:
            stored = 0
        offset = data = position + BLOCK
        size, sparse = stored, None
        if kind is Kind.FILE:
            try:
                size, data, sparse = self._sparse(block, offset, stored, extensions.pax or [], values)
            except EOFError:
                _fail("truncated_header", position, "the shard ends inside the sparse map", name)
            except OverflowError as error:
                _fail("extension_too_big", position, str(error), name)
            except ValueError as error:
                _fail("bad_sparse", position, f"the sparse map is broken: {error}", name)
        if header.typeflag == b"S":  # the map's extra blocks are not counted in the stored size
            offset = data
        end = offset + stored
        if self._goes_on and padded(end) > self._size:
            raise CutError
        if end > self._size:
            there = max(0, self._size - offset)
            _fail("truncated_payload", position, f"the payload of {stored} bytes ends after {there}", name)
        self._note_name(position, name)
        if end + (-stored % BLOCK) > self._size:
            self.warn("short_padding", end, name, "the padding behind the last payload is missing")
            following = self._size
        else:
            following = end + (-stored % BLOCK)
        self.members.append(
            Member(name, kind, extensions.first_offset, position, -1 if sparse is not None else data, size, sparse)
        )
        return following

    def _name(self, position: int, header: Header, extensions: _Extensions, values: dict[bytes, bytes]) -> bytes:
        # GNU.sparse.name is the true name; the path beside it is a made-up one for readers that know no sparse files.
        path = values.get(b"GNU.sparse.name") or values.get(b"path")
        if path is not None:
            if extensions.long_name is not None:
                self.warn("name_conflict", position, path, "a PAX path and a GNU long name; the PAX path counts")
            return path.split(b"\0", 1)[0]
        return header.name if extensions.long_name is None else extensions.long_name

    def _pax_number(self, value: bytes, offset: int, name: bytes) -> int:
        try:
            return parse_pax_number(value)
        except ValueError as error:
            _fail("bad_pax", offset, f"the PAX header is broken: {error}", name)

    def _kind(self, position: int, name: bytes, typeflag: bytes, stored: int) -> tuple[Kind, bool]:
        """Return what the member is, and whether a payload follows its header."""
        if typeflag in b"0\x007S":
            if not name.endswith(b"/") or typeflag == b"S":
                return Kind.FILE, True
            return Kind.DIR, self._payload_follows(position, stored)
        if typeflag in _NO_PAYLOAD:
            return _NO_PAYLOAD[typeflag], False
        if typeflag == b"1":
            return Kind.HARDLINK, self._payload_follows(position, stored)
        if typeflag not in _SKIPPED:
            self.warn("unknown_type", position, name, f"type {_text(typeflag)!r} is none that tar defines")
        return _SKIPPED.get(typeflag, Kind.OTHER), True

    def _payload_follows(self, position: int, stored: int) -> bool:
        """Look whether a payload or the next header follows a header that may state a size without having a payload.

        Old tars give a hard link the size of its target and no data; pax gives it the data too. libarchive looks at
        the next block in the same way.
        """
        if not stored:
            return False
        block = self._read(position + BLOCK, BLOCK)
        return len(block) == BLOCK and block != ZERO_BLOCK and not has_valid_checksum(block)

    def _sparse(
        self, block: bytes, offset: int, stored: int, pax: list[tuple[bytes, bytes]], values: dict[bytes, bytes]
    ) -> tuple[int, int, tuple[SparseRow, ...] | None]:
        """Return a file's size, the offset of its first stored byte, and its map if it is sparse."""
        if block[156:157] == b"S":
            rows, size, data = gnu_sparse_map(block, offset, self._read)
            offset = data  # the map is not counted in the stored size
        elif values.get(b"GNU.sparse.major") == b"1":
            size = parse_pax_number(values.get(b"GNU.sparse.realsize", b""))
            rows, data = pax_sparse_1_0(offset, stored, size, self._read)
        elif (pairs := pax_sparse_pairs(pax)) is not None:
            size = parse_pax_number(values.get(b"GNU.sparse.size") or values.get(b"GNU.sparse.realsize", b""))
            rows, data = place_rows(pairs, offset, size), offset
        else:
            return stored, offset, None
        if rows[-1].offset + rows[-1].length > offset + stored:
            raise ValueError("its rows pass the end of the stored bytes")
        return size, data, tuple(rows)

    def _note_name(self, position: int, name: bytes) -> None:
        for code in name_oddities(name):
            self.warn(code, position, name)


def _parse_records(body: bytes, position: int, limit: int) -> list[tuple[bytes, bytes]]:
    try:
        records = list(islice(iter_pax_records(body), limit + 1))
    except ValueError as error:
        _fail("bad_pax", position, f"the PAX header is broken: {error}")
    if len(records) > limit:
        _fail("extension_too_big", position, f"more than {MAX_PAX_RECORDS} PAX records before one member")
    return records


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _fail(code: str, offset: int, message: str, name: bytes | None = None) -> NoReturn:
    assert code in ERRORS  # noqa: S101 - a slip of ours, not of the data
    raise FaultError(Fault(code, offset, None if name is None else _text(name), message))
