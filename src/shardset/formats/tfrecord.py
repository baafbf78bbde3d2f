"""TFRecord framing: a length, its checksum, a payload, its checksum. The page `tfrecord` of the requirements has it.

``uint64 length | uint32 crc(length) | payload | uint32 crc(payload)``, all little-endian; the checksums are CRC-32C,
rotated and shifted by a constant ("masked"). A file is any number of records and nothing else; none is a file too.

Records are found by hopping from length to length without touching payloads. A length is followed before its checksum
is looked at, because it only moves a number; the checksums of thousands of lengths are then computed at once, and what
lies behind the first wrong one was never seen. Nothing is allocated by a length.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from .faults import Fault, recognise_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.errors import FormatError

    Int64s = NDArray[np.int64]
    UInt32s = NDArray[np.uint32]

HEADER_SIZE: Final = 12
FOOTER_SIZE: Final = 4
FRAME_SIZE: Final = HEADER_SIZE + FOOTER_SIZE
"""Bytes of a record beside its payload."""
MAX_LENGTH: Final = 2**63 - 1 - FRAME_SIZE
"""The longest payload that a file could hold at all: its end is a byte offset."""
HEAD_SIZE: Final = 512
"""Bytes of a file that tell what it is, if it is something else; a tar shows itself in its 257th."""
_MASK_DELTA: Final = 0xA282EAD8
try:
    from fastcrc.crc32 import iscsi as _crc32c  # half the time for 100 bytes, a third for 10 KB
except ImportError:
    from crc32c import crc32c as _crc32c
crc32c: Callable[[Buffer], int] = _crc32c
"""CRC-32C by the fastest library that is installed."""

_DELTA: Final = np.uint32(_MASK_DELTA)
_LOW: Final = np.uint32(15)
_HIGH: Final = np.uint32(17)
_LENGTH: Final = struct.Struct("<Q")
_CRC: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<QI")
_RUN: Final = 64
"""Records of one length from which on they are found together."""
_AT_ONCE: Final = 1 << 14
"""Headers that are checked together: their numbers stay in the processor's cache."""
_FIRST_WINDOW: Final = 256 << 10
_LEAST_WINDOW: Final = 4 << 10
_MOST_WINDOW: Final = 4 << 20
_NEAR: Final = 256 << 10
"""A header that lies no farther behind what was read last is read with what lies between."""


def masked_crc32c(data: Buffer) -> int:
    """Return the masked CRC-32C of some bytes, as TFRecord stores it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def frame_record(payload: Buffer) -> tuple[bytes, bytes]:
    """Return the header and the footer that stand around a payload in a file."""
    length = _LENGTH.pack(len(memoryview(payload).cast("B")))
    return length + _CRC.pack(masked_crc32c(length)), _CRC.pack(masked_crc32c(payload))


def is_header(head: bytes) -> bool:
    """Tell whether bytes begin with the header of a record: a length and the checksum of that length."""
    return len(head) >= HEADER_SIZE and masked_crc32c(head[:8]) == _CRC.unpack_from(head, 8)[0]


def mask_crcs(crcs: UInt32s) -> UInt32s:
    """Return CRC-32Cs as TFRecord stores them."""
    masked = crcs << _HIGH
    masked |= crcs >> _LOW
    masked += _DELTA
    return masked


def unmask_crcs(masked: UInt32s) -> UInt32s:
    """Return the CRC-32Cs that `mask_crcs` made these of."""
    rotated = masked - _DELTA
    crcs = rotated << _LOW
    crcs |= rotated >> _HIGH
    return crcs


def _length_tables() -> UInt32s:
    """Return what each value of each byte of a length adds to the CRC of eight zero bytes: a CRC is affine."""
    zero = crc32c(bytes(8))
    rows = [
        [crc32c(bytes(place) + bytes([value]) + bytes(7 - place)) ^ zero for value in range(256)] for place in range(8)
    ]
    return np.array(rows, np.uint32)


_TABLES: Final = _length_tables()
_ZERO_CRC: Final = np.uint32(crc32c(bytes(8)))
_SHORT: Final = 1 << 16


def header_crcs(lengths: NDArray[np.uint64]) -> UInt32s:
    """Return the masked CRC-32C of each length as it stands in a header: eight bytes, little-endian."""
    if not len(lengths) or (most := int(lengths.max())) < _SHORT:
        return short_crcs()[lengths.view(np.int64)]
    crcs = np.full(len(lengths), _ZERO_CRC)
    for place in range(8):  # bytes that are zero everywhere add nothing
        if not most >> 8 * place:
            break
        crcs ^= _TABLES[place][((lengths >> np.uint64(8 * place)) & np.uint64(255)).view(np.int64)]
    return mask_crcs(crcs)


@cache
def short_crcs() -> UInt32s:
    """Return the masked CRC-32C of each length below 65,536."""
    return mask_crcs(_ZERO_CRC ^ _TABLES[0] ^ _TABLES[1][:, None]).ravel()


def find_corrupt(payloads: Sequence[Buffer], stored: UInt32s) -> Int64s:
    """Return which payloads do not add up to their stored checksums, as ascending positions in `payloads`.

    Args:
        payloads: Any number of payloads.
        stored: The masked CRC of each, as `parse_footers` gives them.
    """
    actual = mask_crcs(np.fromiter(map(crc32c, payloads), np.uint32, len(payloads)))
    if actual.tobytes() == stored.tobytes():  # of a few dozen numbers, in a fraction of the time
        return np.empty(0, np.int64)
    return np.flatnonzero(actual != stored)


def parse_footers(whole: Buffer, offsets: Int64s, lengths: Int64s) -> UInt32s:
    """Return the stored checksum of each payload.

    Args:
        whole: The file.
        offsets: Byte offset of each payload in it.
        lengths: Bytes of each payload.

    Raises:
        IndexError: A footer lies outside of `whole`.
    """
    return crcs_at(whole, offsets + lengths)


def crcs_at(whole: Buffer, places: Int64s) -> UInt32s:
    """Return the checksum that stands at each byte offset of some bytes.

    Raises:
        IndexError: One lies outside.
    """
    return crcs_of(memoryview(whole).cast("B"))[places]


def crcs_of(view: memoryview) -> UInt32s:
    """Return a view of some bytes that has what four bytes from each place on are as a checksum."""
    if len(view) < FOOTER_SIZE:
        return np.empty(0, np.uint32)
    return np.ndarray((len(view) - 3,), "<u4", view, 0, (1,))


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """The records of one TFRecord file, a row each, in the order of the file.

    Attributes:
        offset: int64, byte offset of each payload.
        length: int64, bytes of each payload.
        end: Byte offset behind the last whole record.
        faults: Why reading ended there, if it is not the end of the file.
    """

    offset: Int64s
    length: Int64s
    end: int
    faults: tuple[Fault, ...] = ()

    def __len__(self) -> int:
        return len(self.offset)

    def error(self, shard: str | None = None) -> FormatError | None:
        """Return the exception for the fault that ended the reading, or None if the end was reached."""
        return next((fault.error(shard) for fault in self.faults if fault.is_error), None)


def scan_records(
    read: Callable[[int, int], Buffer], size: int, *, is_mapped: bool = False, start: int = 0
) -> RecordTable:
    """Find every record of a TFRecord file of `size` bytes by its headers, whose checksums are verified.

    Payloads are not looked at. Where records are small, the file is read in windows of up to 4 MiB; the payloads of
    large records are jumped over.

    Args:
        read: Gives the bytes ``[offset, offset + length)`` of the file; never asked for bytes behind `size`.
        size: Bytes of the file.
        is_mapped: `read` gives views of memory, so that asking for everything costs nothing.
        start: Byte offset to begin at: where a record begins, or the end of the file.

    Returns:
        The records up to the end, or up to the first broken header or the first record that the file does not hold
        to its end; the fault then says why. Errors of `read` pass.
    """
    windows = _Windows(read, size, is_mapped=is_mapped)
    offsets: list[Int64s] = []
    lengths: list[Int64s] = []
    position, count = start, 0
    fault: Fault | None = None
    while position < size and fault is None:
        base, view = windows.at(position)
        starts, sizes = _equal_records(view, position - base)
        found = len(starts)
        if not found:
            places, following = hop(view, position - base, _AT_ONCE)
            found = len(places)
            starts, sizes = check_headers(view, places, following)
        if len(starts) and int(starts[-1]) + int(sizes[-1]) + FRAME_SIZE > size - base:
            starts, sizes = starts[:-1], sizes[:-1]  # its end is missing
        if len(starts):
            offsets.append(starts + (base + HEADER_SIZE))
            lengths.append(sizes)
            position = base + int(starts[-1]) + int(sizes[-1]) + FRAME_SIZE
            count += len(starts)
        if len(starts) < max(1, found):
            head = bytes(view[position - base : position - base + HEAD_SIZE])
            fault = header_fault(head, position, size - position, None if start else count)
    return RecordTable(
        np.concatenate([np.empty(0, np.int64), *offsets]),
        np.concatenate([np.empty(0, np.int64), *lengths]),
        position,
        () if fault is None else (fault,),
    )


def _equal_records(view: memoryview, position: int) -> tuple[Int64s, Int64s]:
    """Return where records begin, and their lengths, if many of one length stand here; their headers are the same."""
    nothing = np.empty(0, np.int64)
    if len(view) - position < HEADER_SIZE:
        return nothing, nothing
    length, stored = _HEADER.unpack_from(view, position)
    frame = length + FRAME_SIZE
    count = min((len(view) - position) // frame, _AT_ONCE)
    if (
        count < _RUN
        or view[position : position + HEADER_SIZE] != view[position + frame : position + frame + HEADER_SIZE]
    ):
        return nothing, nothing
    lengths: NDArray[np.uint64] = np.ndarray((count,), "<u8", view, position, (frame,))
    crcs: UInt32s = np.ndarray((count,), "<u4", view, position + 8, (frame,))
    same = (lengths == length) & (crcs == stored)
    run = count if same.all() else int(same.argmin())
    if run < _RUN or masked_crc32c(_LENGTH.pack(length)) != stored:
        return nothing, nothing
    return np.arange(run) * frame + position, np.full(run, length)


def hop(view: memoryview, position: int, most: int) -> tuple[list[int], int]:
    """Follow lengths from the record that begins at `position` of `view`, without a look at their checksums.

    Returns:
        Where each of up to `most` records begins whose header lies in `view`, and where the one behind them would. That
        can be any number, far outside of `view`, and so can all places behind a header that is damaged.
    """
    starts: list[int] = []
    append, unpack = starts.append, _LENGTH.unpack_from
    headers = view[: max(0, len(view) - 4)]  # where eight bytes can be read here, the header is there as a whole
    try:
        for _ in repeat(None, most):
            append(position)
            position += unpack(headers, position)[0] + FRAME_SIZE
    except (struct.error, OverflowError):
        starts.pop()
    return starts, position


def check_headers(view: memoryview, starts: list[int], following: int) -> tuple[Int64s, Int64s]:
    """Return where records begin, and the lengths of their payloads, up to the first whose length is damaged.

    Args:
        view: The bytes that were hopped through.
        starts: Where headers were found.
        following: Where the last one leads to.
    """
    places = np.array(starts, np.int64)
    if not starts:
        return places, places
    sizes = np.empty(len(starts), np.uint64)
    sizes[:-1] = places[1:] - (places[:-1] + FRAME_SIZE)
    sizes[-1] = following - starts[-1] - FRAME_SIZE
    wrong = header_crcs(sizes) != crcs_at(view, places + 8)
    good = int(wrong.argmax()) if wrong.any() else len(starts)
    if good and sizes[good - 1] > MAX_LENGTH:
        good -= 1
    return places[:good], sizes[:good].astype(np.int64)


def header_fault(head: bytes, offset: int, left: int | None, number: int | None) -> Fault | None:
    """Say what is wrong with a header, or with the length that it states.

    Args:
        head: The bytes from the header on; more than its own help to tell what a foreign file is.
        offset: Where it begins in the file.
        left: Bytes of the file from there on; None where the end is not known.
        number: Of the record, from zero; None if it is not known.

    Returns:
        The fault, or None if the header is sound and its record fits into what is left.
    """
    name = _name(number)
    available = len(head) if left is None else left
    if available < HEADER_SIZE:
        what = f"{name} ends in its header: {available} of {HEADER_SIZE} bytes are there"
        return _foreign_fault(head, offset) or Fault("truncated_record_header", offset, message=what)
    (length,), (stored,) = _LENGTH.unpack_from(head), _CRC.unpack_from(head, 8)
    actual = masked_crc32c(head[:8])
    if stored != actual:
        return _foreign_fault(head, offset) or _length_fault(head, offset, name, stored, actual)
    if length > MAX_LENGTH:
        what = f"{name} states a length of {length} bytes, which no file can hold"
        return Fault("impossible_length", offset, message=what)
    if left is not None and length > left - FRAME_SIZE:
        return truncated_fault(offset, length, left, number)
    return None


def truncated_fault(offset: int, length: int, left: int, number: int | None) -> Fault:
    """Return the fault of a record whose header is sound and whose end is missing.

    Args:
        offset: Where it begins in the file.
        length: Bytes of its payload, as its header states them.
        left: Bytes of the file from `offset` on.
        number: Of the record, from zero; None if it is not known.
    """
    name = _name(number)
    payload = left - HEADER_SIZE
    if payload < length:
        there = f"{payload} of {length} bytes of its payload (data) are there"
    else:
        there = f"{payload - length} of {FOOTER_SIZE} bytes of its payload's checksum (data_crc) are there"
    return Fault("truncated_record", offset, message=f"{name} is cut short: {there}")


def payload_fault(offset: int, stored: int, payload: Buffer, number: int | None) -> Fault:
    """Return the fault of a record whose payload does not add up to its checksum.

    Args:
        offset: Where the record begins in the file.
        stored: The masked CRC in its footer.
        payload: The payload.
        number: Of the record, from zero; None if it is not known.
    """
    name = _name(number)
    actual = masked_crc32c(payload)
    what = (
        f"the {len(memoryview(payload).cast('B'))} bytes of payload (data) of {name} add up to {actual:08x}, not to "
        f"its checksum (data_crc) {stored:08x}"
    )
    return Fault("bad_payload_checksum", offset, message=what, expected=stored, actual=actual)


def _name(number: int | None) -> str:
    return "the record" if number is None else f"record {number}"


def _length_fault(head: bytes, offset: int, name: str, stored: int, actual: int) -> Fault:
    if not any(head[:HEADER_SIZE]):
        return Fault("zero_header", offset, message=f"zero bytes stand where {name} should begin")
    (length,) = _LENGTH.unpack_from(head)
    what = f"the length ({length}) of {name} adds up to {actual:08x}, not to its checksum (length_crc) {stored:08x}"
    if not offset:
        what += "; is this a TFRecord file at all?"
    return Fault("bad_length_checksum", offset, message=what, expected=stored, actual=actual)


def _foreign_fault(head: bytes, offset: int) -> Fault | None:
    found = None if offset else recognise_foreign(head)
    if found is None:
        return None
    if found.is_compressed:
        return Fault("compressed", 0, message=f"the shard is compressed ({found.what})")
    return Fault("not_tfrecord", 0, message=f"this is no TFRecord file: it begins with {found.what}")


class _Windows:
    """Gives the bytes around one header after the other, in as few and as short reads as the records allow."""

    def __init__(self, read: Callable[[int, int], Buffer], size: int, *, is_mapped: bool) -> None:
        self._read = read
        self._size = size
        self._base = 0
        self._view = memoryview(read(0, size)).cast("B") if is_mapped and size else memoryview(b"")
        self._length = _FIRST_WINDOW

    def at(self, position: int) -> tuple[int, memoryview]:
        """Return a window that holds the header at `position`, or what the file has of it, and where it begins."""
        end = self._base + len(self._view)
        if self._view and (position + HEADER_SIZE <= end or end == self._size):
            return self._base, self._view
        if self._view:  # small records: longer windows; large ones: shorter, down to the header with little behind it
            grows = position <= end + min(len(self._view), _NEAR)
            self._length = min(self._length * 2, _MOST_WINDOW) if grows else max(self._length // 2, _LEAST_WINDOW)
        left = self._size - position
        length = left if left <= 2 * self._length else self._length
        self._base = position
        self._view = memoryview(self._read(position, length)).cast("B")
        return self._base, self._view
