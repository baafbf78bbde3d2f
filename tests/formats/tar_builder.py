"""Builds odd tar archives block by block, together with what a right reader must find in them.

It knows nothing of the reader under test: what is expected comes from how the bytes were laid out, by the rules of
POSIX.1-2017 *pax* and the GNU tar manual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BLOCK = 512
END = bytes(2 * BLOCK)
POSIX = b"ustar\x0000"
GNU = b"ustar  \0"
V7 = bytes(8)


class Row(NamedTuple):
    """What a reader must say of one member. `offset` is None and `pieces` is set for a sparse file."""

    name: bytes
    kind: str
    first_offset: int
    header_offset: int
    offset: int | None
    size: int
    pieces: tuple[tuple[int, int, int], ...] | None = None


@dataclass(frozen=True)
class Member:
    """The blocks of one member, with places counted from the first of them.

    Attributes:
        raw: All blocks: extension headers, header, payload, padding.
        row: What must be found if `raw` stood at the start of an archive.
        payload: The bytes of the file, its holes filled with zeros.
        warnings: Codes of the oddities that must be reported.
    """

    raw: bytes
    row: Row
    payload: bytes = b""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Archive:
    """An archive and what must be found in it."""

    data: bytes
    rows: list[Row]
    payloads: list[bytes]
    warnings: list[str]


def archive(*pieces: Member | bytes, end: bytes = END) -> Archive:
    """Put members, and raw bytes between them, one behind the other."""
    data, rows, payloads, warnings = bytearray(), [], [], []
    for piece in pieces:
        if isinstance(piece, Member):
            rows.append(_moved(piece.row, len(data)))
            payloads.append(piece.payload)
            warnings += piece.warnings
            data += piece.raw
        else:
            data += piece
    return Archive(bytes(data) + end, rows, payloads, warnings)


def _moved(row: Row, by: int) -> Row:
    pieces = row.pieces and tuple((logical, offset + by, length) for logical, offset, length in row.pieces)
    return row._replace(
        first_offset=row.first_offset + by,
        header_offset=row.header_offset + by,
        offset=None if row.offset is None else row.offset + by,
        pieces=pieces,
    )


def pad(payload: bytes) -> bytes:
    """Fill up to whole blocks."""
    return payload + bytes(-len(payload) % BLOCK)


def octal(value: int, width: int = 12) -> bytes:
    """Write a number as most tars do."""
    return b"%0*o\0" % (width - 1, value)


def base256(value: int, width: int = 12) -> bytes:
    """Write a number as GNU tar does where octal digits do not suffice: two's complement, first bit set."""
    return (value & ((1 << 8 * width) - 1) | 1 << 8 * width - 1).to_bytes(width, "big")


def header(
    name: bytes,
    size: int = 0,
    typeflag: bytes = b"0",
    *,
    magic: bytes = POSIX,
    prefix: bytes = b"",
    link: bytes = b"",
    size_field: bytes | None = None,
    checksum: bytes = b"%06o\0 ",
    is_signed: bool = False,
    patches: tuple[tuple[int, bytes], ...] = (),
) -> bytes:
    """Make one header block.

    Args:
        size_field: Bytes to write for the size, instead of the usual form.
        checksum: How the sum is written, as a format.
        is_signed: Sum up signed bytes, as old Sun tars did.
        patches: Further (offset, bytes) to write before the sum is taken.
    """
    block = bytearray(BLOCK)
    fields = [(0, name), (100, b"0000644\0"), (108, b"0001750\0"), (116, b"0001750\0"), (136, b"14524770400\0")]
    fields += [(124, octal(size) if size_field is None else size_field), (156, typeflag), (157, link), (257, magic)]
    for offset, field in [*fields, (345, prefix), *patches]:
        block[offset : offset + len(field)] = field
    assert len(block) == BLOCK
    block[148:156] = b" " * 8
    total = sum(block) - (256 * sum(byte > 0x7F for byte in block) if is_signed else 0)
    block[148:156] = (checksum % total if b"%" in checksum else checksum).ljust(8, b"\0")
    return bytes(block)


def member(
    name: bytes,
    payload: bytes = b"",
    typeflag: bytes = b"0",
    *,
    kind: str = "file",
    lead: bytes = b"",
    true_name: bytes | None = None,
    has_data: bool = True,
    warnings: tuple[str, ...] = (),
    **fields,
) -> Member:
    """Make a member; `fields` go to `header`.

    Args:
        lead: Extension headers that stand before it.
        true_name: The name that must be found, where the header's name field has another one.
        has_data: Whether the payload is there; otherwise only its size is stated.
    """
    size = fields.pop("size", len(payload))
    raw = lead + header(name, size, typeflag, **fields) + (pad(payload) if has_data else b"")
    row = Row(
        name if true_name is None else true_name,
        kind,
        0,
        len(lead),
        len(lead) + BLOCK,
        len(payload) if has_data else 0,
    )
    return Member(raw, row, payload if has_data else b"", warnings)


def record(key: bytes, value: bytes) -> bytes:
    """Make one PAX record, whose length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def pax(*records: tuple[bytes, bytes] | bytes, typeflag: bytes = b"x", name: bytes = b"PaxHeaders/x") -> bytes:
    """Make a PAX extension of (key, value) records, or of raw bytes."""
    body = b"".join(one if isinstance(one, bytes) else record(*one) for one in records)
    return header(name, len(body), typeflag) + pad(body)


def gnu_long(text: bytes, typeflag: bytes = b"L") -> bytes:
    """Make a GNU long name (L) or long link (K) extension; a NUL behind the text is the caller's."""
    return header(b"././@LongLink", len(text), typeflag, magic=GNU) + pad(text)


class Segments(NamedTuple):
    """A sparse file: stored pieces as (logical offset, bytes), and its size with the holes."""

    pieces: tuple[tuple[int, bytes], ...]
    size: int

    @property
    def stored(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def payload(self) -> bytes:
        if self.size > 1 << 24:
            return b""  # nobody should fill it
        whole = bytearray(self.size)
        for logical, piece in self.pieces:
            whole[logical : logical + len(piece)] = piece
        return bytes(whole)

    def placed(self, offset: int) -> tuple[tuple[int, int, int], ...]:
        """Where the stored pieces lie if the first begins at `offset`; a file that is one hole has an empty one."""
        rows = []
        for logical, piece in self.pieces:
            if piece:
                rows.append((logical, offset, len(piece)))
                offset += len(piece)
        return tuple(rows) or ((self.size, offset, 0),)


def _sparse(name: bytes, segments: Segments, lead: bytes, block: bytes, before: bytes) -> Member:
    data = len(lead) + BLOCK + len(before)
    row = Row(name, "file", 0, len(lead), None, segments.size, segments.placed(data))
    return Member(lead + block + before + pad(segments.stored), row, segments.payload)


def sparse_old(name: bytes, segments: Segments, *, lead: bytes = b"", true_name: bytes | None = None) -> Member:
    """Make an old GNU sparse member (type S), with as many extension blocks as its map needs."""
    pairs = [octal(logical) + octal(len(piece)) for logical, piece in segments.pieces]
    first, rest = pairs[:4], pairs[4:]
    blocks = []
    while rest:
        now, rest = rest[:21], rest[21:]
        blocks.append(b"".join(now).ljust(504, b"\0") + bytes([bool(rest)]) + bytes(7))
    patches = ((386, b"".join(first)), (482, bytes([bool(blocks)])), (483, octal(segments.size)))
    block = header(name, len(segments.stored), b"S", magic=GNU, patches=patches)
    return _sparse(name if true_name is None else true_name, segments, lead, block, b"".join(blocks))


def sparse_pax_00(name: bytes, segments: Segments) -> Member:
    """Make a PAX sparse 0.0 member: the map as repeated records."""
    pairs = [
        pair
        for logical, piece in segments.pieces
        for pair in ((b"GNU.sparse.offset", b"%d" % logical), (b"GNU.sparse.numbytes", b"%d" % len(piece)))
    ]
    lead = pax(
        (b"GNU.sparse.size", b"%d" % segments.size), (b"GNU.sparse.numblocks", b"%d" % len(segments.pieces)), *pairs
    )
    return _sparse(name, segments, lead, header(name, len(segments.stored)), b"")


def sparse_pax_01(name: bytes, segments: Segments) -> Member:
    """Make a PAX sparse 0.1 member: the map as one record, the true name as another."""
    flat = b",".join(b"%d,%d" % (logical, len(piece)) for logical, piece in segments.pieces)
    lead = pax(
        (b"GNU.sparse.size", b"%d" % segments.size),
        (b"GNU.sparse.numblocks", b"%d" % len(segments.pieces)),
        (b"GNU.sparse.map", flat),
        (b"GNU.sparse.name", name),
    )
    return _sparse(name, segments, lead, header(b"./GNUSparseFile.7/x", len(segments.stored)), b"")


def sparse_pax_10(name: bytes, segments: Segments, *more: tuple[bytes, bytes]) -> Member:
    """Make a PAX sparse 1.0 member: the map as decimal lines before the data. `more` are further PAX records."""
    lines = [len(segments.pieces), *(n for logical, piece in segments.pieces for n in (logical, len(piece)))]
    before = pad(b"".join(b"%d\n" % line for line in lines))
    lead = pax(
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", name),
        (b"GNU.sparse.realsize", b"%d" % segments.size),
        *more,
    )
    block = header(b"./GNUSparseFile.7/x", len(before) + len(segments.stored))
    return _sparse(name, segments, lead, block, before)
