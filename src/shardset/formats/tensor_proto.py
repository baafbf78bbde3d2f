"""Serialized `TensorProto`: what ``tf.io.serialize_tensor`` writes, and what TFDS and others put into a BytesList."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import DecodeError, LimitError

from .example_wire import FIXED32, FIXED64, LENGTH, VARINT, iter_fields, malformed, read_size, read_varint, varints

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_DTYPE, _SHAPE, _CONTENT = 1, 2, 4  # field numbers
_DIM, _UNKNOWN_RANK = 2, 3  # of the shape
_MOST_DIMENSIONS: Final = 64  # numpy's own limit
_MOST_REPEATED: Final = 1 << 28
"""Bytes that a tensor may take whose last value is repeated: its own bytes say nothing of that size."""


class _Kind(NamedTuple):
    """How a tensor of one type is stored.

    Attributes:
        name: TensorFlow's name of the type.
        stored: What an element of the content is; None for byte strings.
        field: Number of the field that holds the values where there is no content.
        wire: Wire type of a value in that field.
    """

    name: str
    stored: np.dtype[Any] | None
    field: int
    wire: int


_INT_FIELD, _HALF_FIELD = 7, 13


def _ints(name: str, stored: str, field: int = _INT_FIELD) -> _Kind:
    return _Kind(name, np.dtype(stored), field, VARINT)


_KINDS: Final = {
    1: _Kind("float32", np.dtype("<f4"), 5, FIXED32),
    2: _Kind("float64", np.dtype("<f8"), 6, FIXED64),
    3: _ints("int32", "<i4"),
    4: _ints("uint8", "u1"),
    5: _ints("int16", "<i2"),
    6: _ints("int8", "i1"),
    7: _Kind("string", None, 8, LENGTH),
    8: _Kind("complex64", np.dtype("<c8"), 9, FIXED32),
    9: _ints("int64", "<i8", 10),
    10: _ints("bool", "u1", 11),
    11: _ints("qint8", "i1"),
    12: _ints("quint8", "u1"),
    13: _ints("qint32", "<i4"),
    14: _ints("bfloat16", "<u2", _HALF_FIELD),
    15: _ints("qint16", "<i2"),
    16: _ints("quint16", "<u2"),
    17: _ints("uint16", "<u2"),
    18: _Kind("complex128", np.dtype("<c16"), 12, FIXED64),
    19: _ints("half", "<u2", _HALF_FIELD),
    22: _ints("uint32", "<u4", 16),
    23: _ints("uint64", "<u8", 17),
}
_FIELDS: Final = {kind.field: kind.wire for kind in _KINDS.values()}
_FIXED: Final[dict[int, np.dtype[Any]]] = {
    5: np.dtype("<f4"),
    6: np.dtype("<f8"),
    9: np.dtype("<f4"),
    12: np.dtype("<f8"),
}


def decode_tensor(raw: Buffer) -> NDArray[Any]:
    """Decode a serialized `TensorProto`.

    Args:
        raw: The message, as ``tf.io.serialize_tensor`` gives it.

    Returns:
        An array with the tensor's shape: of numpy's type of the same name; of float32 for bfloat16, which numpy lacks
        and float32 holds exactly; of plain integers for quantized ones; of ``bytes`` objects for strings. It may be
        read-only: a view of the content, or of one value that stands for all (a tensor with fewer values than elements
        repeats the last; one without any is zeros, as in TensorFlow).

    Raises:
        DecodeError: The bytes are no TensorProto, its values do not fit its shape, its shape is not known, or its type
            is not among the above (float8, int4, resources, variants).
        LimitError: The shape is beyond what numpy can hold, or repeating the last of several values would take more
            than 256 MiB.
    """
    buf = raw if type(raw) is bytes else bytes(raw)
    dtype, content = 0, b""
    dims: list[int] = []
    values: dict[int, list[Any]] = {}
    for number, wire, at, end in iter_fields(buf, 0, len(buf), 0):
        if number == _DTYPE and wire == VARINT:
            dtype = read_varint(buf, at, end)[0]
        elif number == _SHAPE and wire == LENGTH:
            dims += _dimensions(buf, at, end)
        elif number == _CONTENT and wire == LENGTH:
            content = buf[at:end]
        elif number in _FIELDS and wire in {LENGTH, _FIELDS[number]}:
            values.setdefault(number, []).append(_values(buf, at, end, number))
    kind = _KINDS.get(dtype)
    if kind is None:
        raise DecodeError(f"a tensor of TensorFlow's type number {dtype} cannot be decoded")
    count = _count(dims, kind)
    if kind.stored is None:
        flat = _strings(values.get(kind.field, []), content, count)
    else:
        flat = _numbers(values.get(kind.field, []), content, count, kind)
    return _repeated(flat, count, kind).reshape(dims)


def _dimensions(buf: bytes, start: int, stop: int) -> list[int]:
    dims = []
    for number, wire, at, end in iter_fields(buf, start, stop, 1):
        if number == _UNKNOWN_RANK and wire == VARINT and read_varint(buf, at, end)[0]:
            raise DecodeError("a tensor's shape is not known, so its values cannot be placed")
        if number == _DIM and wire == LENGTH:
            size = 0
            for inner, inner_wire, first, last in iter_fields(buf, at, end, 2):
                if inner == 1 and inner_wire == VARINT:
                    size = read_varint(buf, first, last)[0]
            if size >= 1 << 63:
                raise DecodeError("a tensor's shape has a dimension that is not known, or negative")
            dims.append(size)
    return dims


def _count(dims: list[int], kind: _Kind) -> int:
    """Return the number of elements, which numpy can address."""
    size = 8 if kind.stored is None else max(kind.stored.itemsize, 4)
    if len(dims) > _MOST_DIMENSIONS or prod(filter(None, dims)) * size >= 1 << 62:
        raise LimitError("a tensor's shape is beyond what an array can have", code="tensor_shape")
    return prod(dims)


def _values(buf: bytes, start: int, stop: int, number: int) -> Any:
    """Return some values of a field: a byte string, or an array as they are stored."""
    wire = _FIELDS[number]
    if wire == LENGTH:
        return buf[start:stop]
    if wire == VARINT:
        return varints(buf[start:stop], start)
    dtype = _FIXED[number]
    if (stop - start) % dtype.itemsize:
        raise malformed(f"a list of {dtype.name} has {stop - start} bytes", start)
    return np.frombuffer(buf, dtype, (stop - start) // dtype.itemsize, start)


def _strings(values: list[bytes], content: bytes, count: int) -> NDArray[np.object_]:
    if content:  # all lengths, then all strings
        if count > len(content):
            raise DecodeError(f"a tensor of {count} strings has a content of {len(content)} bytes")
        lengths, at = [], 0
        for _ in range(count):
            length, at = read_size(content, at, len(content))
            lengths.append(length)
        if sum(lengths) != len(content) - at:
            raise DecodeError(f"a tensor's strings have {sum(lengths)} bytes, and {len(content) - at} are there")
        values = []
        for length in lengths:
            values.append(content[at : at + length])
            at += length
    flat = np.empty(len(values), object)
    flat[:] = values
    return flat


def _numbers(values: list[NDArray[Any]], content: bytes, count: int, kind: _Kind) -> NDArray[Any]:
    stored = kind.stored
    assert stored is not None  # noqa: S101 - those are strings
    if content:
        if len(content) != count * stored.itemsize:
            raise DecodeError(
                f"a tensor of {count} elements of {stored.itemsize} bytes has a content of {len(content)} bytes"
            )
        flat = np.frombuffer(content, stored)
    elif not values:
        flat = np.empty(0, stored)
    else:
        flat = values[0] if len(values) == 1 else np.concatenate(values)
        if stored.kind == "c":
            if len(flat) % 2:
                raise DecodeError("a complex number lacks its imaginary part")
            flat = flat.view(stored)
        elif kind.wire == VARINT and kind.name != "bool":
            flat = flat.astype(stored)  # drops the bits beyond, as protobuf does
    if kind.name == "bool":
        flat = flat != 0
    if kind.name == "half":
        flat = flat.view("<f2")
    if kind.name == "bfloat16":  # the upper half of a float32
        flat = (flat.astype("<u4") << np.uint32(16)).view("<f4")
    return flat


def _repeated(flat: NDArray[Any], count: int, kind: _Kind) -> NDArray[Any]:
    """Return so many elements: the values, and the last of them for those that there are none for."""
    if len(flat) == count:
        return flat
    if len(flat) > count:
        raise DecodeError(f"a tensor of {count} elements has {len(flat)} values")
    if len(flat) == 0:
        flat = np.zeros(1, flat.dtype) if flat.dtype.kind != "O" else np.array([b""], object)
    if len(flat) == 1:
        return np.broadcast_to(flat, count)
    if count * flat.itemsize > _MOST_REPEATED:
        raise LimitError(
            f"a tensor of {kind.name} with {len(flat)} values for {count} elements would take more than "
            f"{_MOST_REPEATED >> 20} MiB",
            code="tensor_size",
        )
    whole = np.empty(count, flat.dtype)
    whole[: len(flat)] = flat
    whole[len(flat) :] = flat[-1]
    return whole
