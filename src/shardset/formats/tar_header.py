"""One tar header, read with care: numbers, checksums, PAX records, sparse maps.

Everything here takes a 512-byte block or an extension's body and gives values; nothing seeks. Layout and rules:
POSIX.1-2017 *pax interchange format*, and the GNU tar manual for the GNU forms. Where readers in the wild disagree,
the comment at the line says which way is taken.

A broken field raises ValueError with the reason; `shardset.formats.tar` adds the shard, the offset and the code.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Read = Callable[[int, int], bytes]

BLOCK: Final = 512
ZERO_BLOCK: Final = bytes(BLOCK)
MAX_SIZE: Final = 2**63 - 1
MAX_EXTENSION: Final = 16 << 20
"""The most bytes of PAX and GNU long-name extensions that are read before one member."""
MAX_PAX_RECORDS: Final = 100_000
"""The most PAX records that are taken before one member."""
MAX_SPARSE_ROWS: Final = 1_000_000
"""The most rows that the map of a sparse file may have."""

_OCTAL: Final = frozenset(b"01234567")
_CHECKSUM_AS_SPACES: Final = 8 * 0x20
_HIGH_BYTES: Final = bytes(range(0x80, 0x100))
_UNSAFE: Final = re.compile(rb"[/\\]|[A-Za-z]:[/\\]|(?:.*[/\\])?\.\.(?:[/\\]|\Z)", re.DOTALL)


class Header(NamedTuple):
    """The fields of one header block that place a member. `name` is the name field alone, with the ustar prefix."""

    name: bytes
    typeflag: bytes
    size: int
    is_gnu: bool


class SparseRow(NamedTuple):
    """`length` bytes that stand at `logical` in the file and at `offset` in the shard."""

    logical: int
    offset: int
    length: int


def padded(size: int) -> int:
    """Return `size` rounded up to whole blocks."""
    return (size + BLOCK - 1) & -BLOCK


def parse_number(field: bytes) -> int:
    """Parse a numeric header field: octal text, or base-256 when the first bit is set.

    Octal digits may follow spaces and end at a space, a NUL or the end of the field; an empty field is 0. Base-256 is
    two's complement, big-endian.

    Raises:
        ValueError: There is something else than octal digits, or the number is negative or above 2**63 - 1.
    """
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40:
            raise ValueError(f"the number is negative ({value - (1 << (8 * len(field) - 1))})")
        if value > MAX_SIZE:
            raise ValueError(f"the number {value} does not fit into 63 bits")
        return value
    # Text after the first NUL is ignored; and a space ends the number too, as GNU tar reads it.
    words = field.split(b"\0", 1)[0].split(b" ")
    digits = next((word for word in words if word), b"")
    if not _OCTAL.issuperset(digits):
        raise ValueError(f"{field!r} is not an octal number")
    return int(digits, 8) if digits else 0


def checksums(block: bytes) -> tuple[int, int]:
    """Return the sum of the block's bytes with the checksum field as spaces: unsigned, and with signed bytes.

    POSIX asks for the unsigned sum; old Sun tars wrote the signed one, so both are valid.
    """
    rest = block[:148] + block[156:]
    unsigned = sum(rest) + _CHECKSUM_AS_SPACES
    high = len(rest) - len(rest.translate(None, _HIGH_BYTES))
    return unsigned, unsigned - 256 * high


def stored_checksum(block: bytes) -> int | None:
    """Return the checksum that the block states, or None if the field holds no number."""
    try:
        return parse_number(block[148:156])
    except ValueError:
        return None


def has_valid_checksum(block: bytes) -> bool:
    """Tell whether the stored checksum is one of the two valid sums."""
    return stored_checksum(block) in checksums(block)


def parse_header(block: bytes) -> Header:
    """Take the fields of a header block whose checksum was found valid.

    Raises:
        ValueError: The size field is no number, is negative or too large.
    """
    name = block[:100].split(b"\0", 1)[0]
    magic = block[257:263]
    # In GNU headers bytes 345.. hold times and sparse maps, so a prefix exists only behind the POSIX magic.
    if magic == b"ustar\0" and block[345]:
        name = block[345:500].split(b"\0", 1)[0] + b"/" + name
    return Header(name, block[156:157], parse_number(block[124:136]), magic == b"ustar ")


def name_oddities(name: bytes) -> list[str]:
    """Return the codes of what is odd about a member's name: empty, not UTF-8, or unsafe to extract under."""
    codes = []
    if not name:
        codes.append("empty_name")
    if not name.isascii():
        try:
            name.decode()
        except UnicodeDecodeError:
            codes.append("name_not_utf8")
    if _UNSAFE.match(name):
        codes.append("unsafe_name")
    return codes


def iter_pax_records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    r"""Yield the (key, value) records of a PAX extension's body in order, repeated keys included.

    A record is ``LEN key=value\n`` where LEN counts the bytes of the whole record; values may hold newlines.

    Raises:
        ValueError: A length is no number, is zero, passes the end of the body, or does not end at a newline.
    """
    position = 0
    while position < len(body):
        if not body[position]:
            # Some writers pad the body with NULs inside its stated size. Anything behind them is not a record.
            if body[position:].strip(b"\0"):
                raise ValueError(f"bytes follow the records at {position}")
            return
        space = body.find(b" ", position, position + 20)
        digits = body[position:space] if space > 0 else b""
        if not digits.isdigit():
            raise ValueError(f"the record at {position} has no length")
        end = position + int(digits)
        if end <= space or end > len(body):
            raise ValueError(f"the record at {position} has a length of {int(digits)}, outside its body")
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not equals or body[end - 1] != 0x0A:
            raise ValueError(f"the record at {position} is not of the form 'length key=value'")
        yield key, value
        position = end


def parse_pax_number(value: bytes) -> int:
    """Parse a decimal PAX value.

    Raises:
        ValueError: It is not made of digits alone, or does not fit into 63 bits.
    """
    if not value.isdigit() or len(value) > 30 or int(value) > MAX_SIZE:
        raise ValueError(f"{value[:40]!r} is not a size")
    return int(value)


def gnu_sparse_map(block: bytes, offset: int, read: Read) -> tuple[list[SparseRow], int, int]:
    """Read the map of an old GNU sparse member (type ``S``).

    Args:
        block: The header block.
        offset: Shard offset of the block behind the header, where extension blocks may stand.
        read: Gives `length` bytes at a shard offset, fewer at the end of the shard.

    Returns:
        The rows, the size of the file with its holes, and the shard offset of the first stored byte.

    Raises:
        ValueError: A number is broken, or the map is not ascending.
        OverflowError: The map has more than `MAX_SPARSE_ROWS` rows.
        EOFError: The shard ends inside the extension blocks.
    """
    numbers = array("q", _gnu_map_fields(block[386:482]))
    extended = block[482]
    while extended:
        extension = bytes(read(offset, BLOCK))
        if len(extension) < BLOCK:
            raise EOFError
        numbers.extend(_gnu_map_fields(extension[:504]))
        extended = extension[504]
        offset += BLOCK
        _check_rows(len(numbers) // 2)
    real_size = parse_number(block[483:495])
    return place_rows(zip(numbers[::2], numbers[1::2], strict=True), offset, real_size), real_size, offset


def _check_rows(count: int) -> None:
    if count > MAX_SPARSE_ROWS:
        raise OverflowError(f"the sparse map has {count} rows or more, above {MAX_SPARSE_ROWS}")


def _gnu_map_fields(raw: bytes) -> list[int]:
    """Return logical offset and length of each pair in turn; the first pair that is not set ends them."""
    used = next((at for at in range(0, len(raw), 24) if not raw[at]), len(raw))
    return [parse_number(raw[at : at + 12]) for at in range(0, used, 12)]


def pax_sparse_pairs(records: list[tuple[bytes, bytes]]) -> list[tuple[int, int]] | None:
    """Return the (logical offset, length) pairs of a PAX sparse 0.0 or 0.1 map, or None if the records hold none.

    Version 0.0 repeats its keys, so the order of the records is the map; a dict would lose it.

    Raises:
        ValueError: A number is broken, lengths and offsets do not pair up, or the map is missing.
        OverflowError: The map has more than `MAX_SPARSE_ROWS` rows.
    """
    flat: list[int] | None = None
    blocks: int | None = None
    for key, value in records:
        if key == b"GNU.sparse.numblocks":
            blocks = parse_pax_number(value)
        elif key == b"GNU.sparse.map":
            _check_rows((value.count(b",") + 2) // 2)
            flat = [parse_pax_number(number) for number in value.split(b",")] if value else []
        elif key in {b"GNU.sparse.offset", b"GNU.sparse.numbytes"}:
            flat = flat or []
            if (len(flat) % 2 == 0) != (key == b"GNU.sparse.offset"):
                raise ValueError("the sparse map's offsets and lengths do not alternate")
            flat.append(parse_pax_number(value))
    if flat is None:
        if blocks:
            raise ValueError(f"the sparse map of {blocks} rows is missing")
        return None if blocks is None else []  # a file that is one hole has no other trace of its map
    if len(flat) % 2:
        raise ValueError("the sparse map has an offset without a length")
    return list(zip(flat[::2], flat[1::2], strict=True))


def pax_sparse_1_0(offset: int, stored: int, real_size: int, read: Read) -> tuple[list[SparseRow], int]:
    """Read the map of a PAX sparse 1.0 member, which stands as decimal lines before its data, padded to a block.

    Args:
        offset: Shard offset of the map.
        stored: Bytes of map, padding and data together.
        real_size: Size of the file with its holes.
        read: Gives `length` bytes at a shard offset, fewer at the end of the shard.

    Returns:
        The rows, and the shard offset of the first stored byte of data.

    Raises:
        ValueError: A line is no number, or the map passes the member's end or is not ascending.
        OverflowError: The map has more than `MAX_SPARSE_ROWS` rows.
    """
    blocks: list[bytes] = []
    newlines, wanted = 0, 1
    while newlines < wanted:
        at = len(blocks) * BLOCK
        block = bytes(read(offset + at, BLOCK)) if at < padded(stored) else b""
        if len(block) < BLOCK:
            raise ValueError("the sparse map passes the end of its member")
        if not blocks:
            count = parse_pax_number(block.partition(b"\n")[0])
            _check_rows(count)
            wanted = 1 + 2 * count
        blocks.append(block)
        newlines += block.count(b"\n")
    numbers = [parse_pax_number(line) for line in b"".join(blocks).split(b"\n")[1:wanted]]
    data_offset = offset + len(blocks) * BLOCK
    return place_rows(zip(numbers[::2], numbers[1::2], strict=True), data_offset, real_size), data_offset


def place_rows(pairs: Iterable[tuple[int, int]], offset: int, real_size: int) -> list[SparseRow]:
    """Give each (logical offset, length) pair its place in the shard: one behind the other from `offset` on.

    Empty pairs are left out; but a file that is one hole gets a row of length 0 at its end, so that it has a place too.

    Raises:
        ValueError: The pairs are not ascending, overlap, or pass `real_size`.
    """
    rows, end = [], 0
    for logical, length in pairs:
        if logical < end or logical + length > real_size:
            raise ValueError(f"the sparse map's row at {logical} overlaps or passes the end of the file")
        end = logical + length
        if length:
            rows.append(SparseRow(logical, offset, length))
            offset += length
    return rows or [SparseRow(real_size, offset, 0)]
