"""The protobuf wire format, as far as `tf.train.Example` and `TensorProto` need it: fields, varints, packed lists.

A message is a row of fields: a tag (field number and wire type, as a varint), then a varint, 4 or 8 bytes, or a length
and so many bytes. What is accepted and what is refused follows upb, the parser inside the protobuf package, as it is in
release 7.34: tags and lengths of at most 5 bytes (6.33 and before take longer lengths), varints of at most 10 whose
bits beyond the 64th are dropped, unknown fields skipped, groups and messages nested to a depth of 100.

Every length is compared with what is left before it is used, and no step recurses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shardset.errors import DecodeError

from .geometry import flatten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Flat = bytes | memoryview

VARINT, FIXED64, LENGTH, GROUP, _END_GROUP, FIXED32 = range(6)
"""Wire types. Of a field with the type `LENGTH` the body counts, without its length."""

INT64: Final = np.dtype("<i8")
FLOAT32: Final = np.dtype("<f4")

_UINT8: Final = np.dtype("u1")
_MAX_DEPTH: Final = 100
_FEW_BYTES: Final = 64
"""Up to so many bytes of varints are read one by one: numpy's calls would cost more."""
_FLOAT_FIELDS: Final = np.dtype([("tag", "u1"), ("value", "<f4")])
_FIRST_BYTES: Final = np.array([(1 << 8 * min(length, 8)) - 1 for length in range(11)], np.uint64)
_GAPS: Final = tuple(
    (np.uint64(lower), np.uint64(upper), np.uint64(gap))
    for lower, upper, gap in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)
_FIXED32_OF_1: Final = 1 << 3 | FIXED32


def readable(raw: Buffer) -> Flat:
    """Return bytes as they are, and anything else as a read-only view of plain bytes."""
    return raw if type(raw) is bytes else flatten(raw).toreadonly()


def malformed(what: str, position: int) -> DecodeError:
    """Make the error for a message that cannot be read on.

    Args:
        what: What is wrong.
        position: The byte in the record at which it is.
    """
    return DecodeError(
        f"{what} at byte {position} of the record",
        hint="the record is damaged, or it is no tf.train.Example; read the records themselves with iter_records",
    )


def read_size(buf: Flat, position: int, stop: int) -> tuple[int, int]:
    """Read the length of a field.

    Args:
        buf: The record.
        position: Where the length begins.
        stop: End of the message that it belongs to.

    Returns:
        The length in bytes, and the position behind it. The field ends at or before `stop`.

    Raises:
        DecodeError: The length is cut off or has more than 5 bytes, or the field would end behind `stop`.
    """
    if stop - position < 3:
        size, at = _long_size(buf, position, stop)
    elif (size := buf[position]) < 0x80:
        at = position + 1
    elif (byte := buf[position + 1]) < 0x80:
        size, at = size + (byte << 7) - 0x80, position + 2
    elif (last := buf[position + 2]) < 0x80:
        size, at = size + (byte << 7) + (last << 14) - 0x4080, position + 3
    else:
        size, at = _long_size(buf, position, stop)
    if size > stop - at:
        raise malformed(f"a field of {size} bytes stands where {stop - at} are left,", position)
    return size, at


def iter_fields(buf: Flat, position: int, stop: int, depth: int) -> Iterator[tuple[int, int, int, int]]:
    """Go through the fields of one message.

    Args:
        buf: The record.
        position: Where the message begins.
        stop: Where it ends.
        depth: How many messages it lies in.

    Yields:
        Field number, wire type, and the half-open range of the value: of a `LENGTH` field its body, of a `GROUP`
        whatever stands up to its last tag.

    Raises:
        DecodeError: The message breaks the format here.
    """
    while position < stop:
        tag, at = _read_tag(buf, position, stop)
        if tag < 8:
            raise malformed("a field has the number 0", position)
        end = _skip_group(buf, at, stop, tag, depth) if tag & 7 == GROUP else -1
        if end < 0:
            at, end = _value(buf, at, stop, tag)
        yield tag >> 3, tag & 7, at, end
        position = end


def read_varint(buf: Flat, position: int, stop: int) -> tuple[int, int]:
    """Read a varint as an unsigned number of 64 bits, and the position behind it.

    Raises:
        DecodeError: It is cut off, or has more than 10 bytes.
    """
    value = 0
    for index in range(10):
        if position + index >= stop:
            raise malformed("a number is cut off", position)
        byte = buf[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + index + 1
    raise malformed("a number has more than 10 bytes", position)


def varints(data: bytes, position: int) -> NDArray[np.int64]:
    """Return the signed 64-bit numbers that stand in bytes, one behind the other.

    Args:
        data: The bytes.
        position: Where they stand in the record, for messages.

    Returns:
        A new array.

    Raises:
        DecodeError: The last number is cut off, or one has more than 10 bytes.
    """
    if data.isascii():  # one byte each
        if len(data) < 12:
            return np.fromiter(data, INT64, len(data))
        return np.frombuffer(data, _UINT8).astype(INT64)
    if data[-1] >= 0x80:
        raise malformed("a number is cut off", position + len(data))
    if len(data) == 2:
        return np.fromiter((data[0] - 0x80 + (data[1] << 7),), INT64, 1)
    return _few_varints(data, position) if len(data) <= _FEW_BYTES else _many_varints(data, position)


def int_list(buf: Flat, start: int, stop: int, depth: int) -> list[NDArray[np.int64]]:
    """Return the numbers in the body of an ``Int64List``, packed, unpacked and mixed, as arrays in order.

    Raises:
        DecodeError: The body breaks the format.
    """
    unpacked = _unpacked_ints(buf, start, stop)
    if unpacked is not None:
        return [unpacked]
    pieces = []
    for number, wire, at, end in iter_fields(buf, start, stop, depth):
        if number == 1 and wire in {LENGTH, VARINT}:
            pieces.append(varints(bytes(buf[at:end]), at))
    return pieces


def float_list(buf: Flat, start: int, stop: int, depth: int) -> list[NDArray[np.float32]]:
    """Return the numbers in the body of a ``FloatList``, packed, unpacked and mixed, as arrays in order.

    Returns:
        Packed ones as views of the record.

    Raises:
        DecodeError: The body breaks the format, or bytes are left over behind the last float of a packed list.
    """
    size = stop - start
    if size and size % 5 == 0:
        fields = np.frombuffer(buf, _FLOAT_FIELDS, size // 5, start)
        if (fields["tag"] == _FIXED32_OF_1).all():  # so the first is one, and behind it begins the next
            return [fields["value"].copy()]
    pieces = []
    for number, wire, at, end in iter_fields(buf, start, stop, depth):
        if number == 1 and wire in {LENGTH, FIXED32}:
            if (end - at) % 4:
                raise malformed(f"a list of floats has {end - at} bytes, which 4 does not divide,", at)
            pieces.append(np.frombuffer(buf, FLOAT32, (end - at) // 4, at))
    return pieces


def bytes_spans(buf: Flat, start: int, stop: int, depth: int) -> list[tuple[int, int]]:
    """Return where the values in the body of a ``BytesList`` stand, in order, as half-open ranges.

    Raises:
        DecodeError: The body breaks the format.
    """
    fields = iter_fields(buf, start, stop, depth)
    return [(at, end) for number, wire, at, end in fields if number == 1 and wire == LENGTH]


def _long_size(buf: Flat, position: int, stop: int) -> tuple[int, int]:
    size = 0
    for index, byte in enumerate(buf[position : min(position + 5, stop)]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return size, position + index + 1
    raise malformed("a length is cut off, or has more than 5 bytes,", position)


def _read_tag(buf: Flat, position: int, stop: int) -> tuple[int, int]:
    tag = buf[position]
    if tag < 0x80:
        return tag, position + 1
    tag = 0
    for index in range(5):
        if position + index >= stop:
            raise malformed("a tag is cut off", position)
        byte = buf[position + index]
        tag |= (byte & 0x7F) << 7 * index
        if byte < 0x80 and tag < 1 << 32:
            return tag, position + index + 1
        if byte < 0x80:
            break
    raise malformed("a tag has more than 32 bits or 5 bytes", position)


def _value(buf: Flat, position: int, stop: int, tag: int) -> tuple[int, int]:
    """Return the half-open range of a value that is no group."""
    wire = tag & 7
    if wire == LENGTH:
        size, at = read_size(buf, position, stop)
        return at, at + size
    if wire == VARINT:
        return position, read_varint(buf, position, stop)[1]
    if wire not in {FIXED32, FIXED64}:
        what = "a group ends that never began" if wire == _END_GROUP else f"a field has the unknown wire type {wire}"
        raise malformed(what, position - 1)
    end = position + (4 if wire == FIXED32 else 8)
    if end > stop:
        raise malformed("a number is cut off", position)
    return position, end


def _skip_group(buf: Flat, position: int, stop: int, tag: int, depth: int) -> int:
    """Return the position behind a group and its last tag. What stands in it may have the number 0, as in upb."""
    closing = [tag + _END_GROUP - GROUP]
    while closing:
        if len(closing) + depth > _MAX_DEPTH:
            raise malformed(f"messages and groups are nested deeper than {_MAX_DEPTH}", position)
        if position >= stop:
            raise malformed("a group is cut off", position)
        tag, position = _read_tag(buf, position, stop)
        if tag & 7 == GROUP:
            closing.append(tag + _END_GROUP - GROUP)
        elif tag == closing[-1]:
            closing.pop()
        else:
            position = _value(buf, position, stop, tag)[1]
    return position


def _few_varints(data: bytes, position: int) -> NDArray[np.int64]:
    values = []
    value = shift = 0
    for byte in data:
        if byte >= 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            continue
        if shift > 63:
            raise malformed("a number has more than 10 bytes", position)
        value |= byte << shift
        if shift >= 56:  # may have reached the sign, or gone beyond it
            value = (value + (1 << 63) & 0xFFFFFFFFFFFFFFFF) - (1 << 63)
        values.append(value)
        value = shift = 0
    return np.fromiter(values, INT64, len(values))


def _many_varints(data: bytes, position: int) -> NDArray[np.int64]:
    column = np.frombuffer(data, _UINT8)
    ends = np.flatnonzero(column < 0x80)
    values = column[ends].astype(np.uint32)
    # From the last byte of each backwards. Before the first one comes, in numpy's counting, the last byte of all.
    goes_on = np.ones(len(ends), np.bool_)
    for place in (1, 2, 3):
        byte = column[ends - place]
        goes_on &= byte >= 0x80
        if not goes_on.any():
            return values.astype(INT64)
        np.copyto(values, values << np.uint32(7) | byte & np.uint8(0x7F), where=goes_on)
    return _long_varints(data, ends, position)


def _long_varints(data: bytes, ends: NDArray[np.intp], position: int) -> NDArray[np.int64]:
    """Return numbers of any length, whose last bytes are at `ends`: eight bytes of each at once, then the rest."""
    column = np.frombuffer(data + bytes(9), _UINT8)
    starts = np.zeros_like(ends)
    np.add(ends[:-1], 1, out=starts[1:])
    lengths = ends - starts + 1
    longest = lengths.max()
    if longest > 10:
        raise malformed("a number has more than 10 bytes", position)
    words: NDArray[np.uint64] = np.ndarray((len(data),), "<u8", column, 0, (1,))
    values = words[starts] & _FIRST_BYTES[lengths]
    for lower, upper, gap in _GAPS:  # push 7 bits together to 14, those to 28, and those to 56
        values = values & lower | (values & upper) >> gap
    if longest > 8:
        long = np.flatnonzero(lengths > 8)
        last = starts[long] + 8
        rest = (column[last] & np.uint8(0x7F)).astype(np.uint64)
        rest |= np.where(lengths[long] > 9, column[last + 1], np.uint8(0)).astype(np.uint64) << np.uint64(7)
        values[long] |= rest << np.uint64(56)
    signed: NDArray[np.int64] = values.view(INT64)
    return signed


def _unpacked_ints(buf: Flat, start: int, stop: int) -> NDArray[np.int64] | None:
    """Return the numbers of a list in which each one has a tag of its own, None of any other list."""
    if stop - start < _FEW_BYTES or buf[start] != 1 << 3:
        return None
    data = bytes(buf[start:stop])
    column = np.frombuffer(data, _UINT8)
    ends = np.flatnonzero(column < 0x80)
    # Tags and values in turns: where every other varint is the one byte of the tag, the others are values.
    tags = ends[::2]
    if len(ends) % 2 or data[-1] >= 0x80 or (column[tags] != 1 << 3).any() or (tags[1:] != ends[1:-1:2] + 1).any():
        return None
    values: NDArray[np.int64] = varints(data, start)[1::2].copy()
    return values
