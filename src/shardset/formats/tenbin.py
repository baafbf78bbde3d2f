"""The tenbin format: a list of arrays as raw bytes with small headers, as webdataset writes it to ``.ten`` fields.

A file is a row of chunks. A chunk is the 8 bytes ``~TenBin~``, the length of its bytes as int64, and the bytes,
filled up with zeros to a multiple of 64. Each array takes two chunks: a header of int64 words (the type, as up to 8
ASCII characters; a name, likewise; the number of dimensions; the dimensions), and the elements in C order.
webdataset writes words and elements in the order of the machine, which is little-endian wherever it runs; here they
are little-endian everywhere.

The two differ where webdataset garbles or refuses what the format can hold: uint32, which a slip in its table leaves
out; arrays without dimensions and without elements, which it writes and cannot read; big-endian arrays, whose bytes it
writes under the name of the little-endian type; a header without its data, which it drops.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import FormatError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

MAGIC: Final = b"~TenBin~"
"""What each chunk begins with."""
ALIGNMENT: Final = 64
"""The bytes of a chunk are filled up to a multiple of this."""
SHORT_TYPES: Final[dict[str, str]] = {
    **{f"float{8 * size}": f"f{size}" for size in (2, 4, 8)},
    **{f"int{8 * size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": f"u{size}" for size in (1, 2, 4, 8)},
}
"""numpy's names of the types that the format holds, and its own."""

_TYPES: Final = frozenset(SHORT_TYPES.values())
_HEAD: Final = struct.Struct("<8sq")
_MAX_DIMENSIONS: Final = 9


class ArrayHeader(NamedTuple):
    """What stands before the elements of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str


def padded_length(length: int) -> int:
    """Return `length` rounded up to a whole number of blocks of 64 bytes."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def encode_tenbin(arrays: Sequence[NDArray[Any]], names: Sequence[str] | None = None) -> bytes:
    """Return arrays as tenbin, byte for byte as webdataset 1.0.2 does.

    Args:
        arrays: Of the types in `SHORT_TYPES`, of at most 9 dimensions.
        names: One name of at most 8 ASCII characters for each; None gives all an empty one.

    Raises:
        ValueError: The format cannot hold an array or a name, or there is not one name for each array.
    """
    if names is not None and len(names) != len(arrays):
        raise ValueError(f"{len(names)} names for {len(arrays)} arrays")
    parts: list[Buffer] = []
    for number, array in enumerate(arrays):
        header = encode_array_header(array, "" if names is None else names[number])
        for payload in (header, elements(array)):
            length = memoryview(payload).nbytes
            parts += (_HEAD.pack(MAGIC, length), payload, bytes(padded_length(length) - length))
    return b"".join(parts)


def encode_array_header(array: NDArray[Any], name: str = "") -> bytes:
    """Return the header chunk's bytes for an array.

    Raises:
        ValueError: The format has no such type, the array has 10 dimensions or more, or the name does not fit.
    """
    short = SHORT_TYPES.get(array.dtype.name)
    if short is None:
        raise ValueError(f"tenbin holds {', '.join(SHORT_TYPES)}, and no {array.dtype.name}")
    if array.ndim > _MAX_DIMENSIONS:
        raise ValueError(f"tenbin holds arrays of at most {_MAX_DIMENSIONS} dimensions, and this one has {array.ndim}")
    if len(name) > 8 or not name.isascii():
        raise ValueError(f"the name {name!r} is longer than 8 characters or not ASCII")
    return struct.pack(f"<8s8sq{array.ndim}q", short.encode(), name.encode(), array.ndim, *array.shape)


def elements(array: NDArray[Any]) -> memoryview | bytes:
    """Return the elements of an array, little-endian and in C order."""
    flat = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C").reshape(-1)
    return flat.data.cast("B") if flat.size else b""  # a view without elements cannot be cast


def decode_tenbin(payload: Buffer) -> list[NDArray[Any]]:
    """Return the arrays of a tenbin payload: copies, writable, in the machine's byte order.

    Raises:
        FormatError: The payload is no tenbin, `TruncatedError` where it ends too early. ``offset`` is that of the
            chunk in the payload.
    """
    return [array for _, array in iter_tenbin(payload)]


def iter_tenbin(payload: Buffer) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (name, array) for each array of a tenbin payload, as `decode_tenbin` does."""
    header: ArrayHeader | None = None
    for offset, chunk in iter_chunks(payload):
        if header is None:
            header = parse_array_header(chunk, offset)
        else:
            yield header.name, parse_array(header, chunk, offset)
            header = None
    if header is not None:
        raise TruncatedError("a tenbin ends after the header of an array", offset=memoryview(payload).nbytes)


def iter_chunks(payload: Buffer) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset of its 16 bytes of head, bytes) of each chunk. The zeros after the last one may be missing.

    Raises:
        FormatError: A chunk does not begin as one, or its length is negative; `TruncatedError` where it is larger than
            what is left.
    """
    view = memoryview(payload).cast("B")
    offset = 0
    while offset < len(view):
        if len(view) - offset < _HEAD.size:
            raise TruncatedError("a tenbin ends inside the head of a chunk", offset=offset)
        magic, length = _HEAD.unpack_from(view, offset)
        if magic != MAGIC:
            raise FormatError("a chunk does not begin with ~TenBin~", offset=offset, code="bad_tenbin")
        if length < 0:
            raise FormatError(f"a chunk of {length} bytes", offset=offset, code="bad_tenbin")
        start = offset + _HEAD.size
        if length > len(view) - start:
            raise TruncatedError(f"a chunk of {length} bytes, of which {len(view) - start} are here", offset=offset)
        yield offset, view[start : start + length]
        offset = start + padded_length(length)


def parse_array_header(chunk: Buffer, offset: int = 0) -> ArrayHeader:
    """Return what a header chunk says.

    Args:
        chunk: Its bytes.
        offset: Where the chunk begins, for errors.

    Raises:
        FormatError: It is no header of an array.
    """
    view = memoryview(chunk).cast("B")
    if len(view) < 24 or len(view) % 8:
        raise FormatError(f"a header of {len(view)} bytes", offset=offset, code="bad_tenbin")
    kind, name, rank = struct.unpack_from("<8s8sq", view)
    short = kind.rstrip(b"\0").decode("latin-1")
    if short not in _TYPES:
        raise FormatError(f"unknown type {short!r} of elements", offset=offset, code="bad_tenbin")
    if not 0 <= rank <= _MAX_DIMENSIONS or len(view) != 24 + 8 * rank:
        message = f"a header of {len(view)} bytes for {rank} dimensions"
        raise FormatError(message, offset=offset, code="bad_tenbin")
    shape = struct.unpack_from(f"<{rank}q", view, 24)
    if any(side < 0 for side in shape):
        raise FormatError(f"the shape {shape} has a negative side", offset=offset, code="bad_tenbin")
    if not name.isascii():
        raise FormatError(f"the name {name!r} is not ASCII", offset=offset, code="bad_tenbin")
    return ArrayHeader(shape, np.dtype(f"<{short}"), name.rstrip(b"\0").decode("ascii"))


def parse_array(header: ArrayHeader, chunk: Buffer, offset: int = 0) -> NDArray[Any]:
    """Return the array whose elements a chunk holds.

    Raises:
        FormatError: The chunk is not of the size that the header says.
    """
    view = memoryview(chunk).cast("B")
    needed = math.prod(header.shape) * header.dtype.itemsize
    if needed != len(view):
        message = f"an array of shape {header.shape} takes {needed} bytes, and its chunk has {len(view)}"
        raise FormatError(message, offset=offset, code="bad_tenbin")
    native = header.dtype.newbyteorder("=")
    try:
        if not needed:
            return np.empty(header.shape, native)
        return np.frombuffer(view, header.dtype).reshape(header.shape).astype(native)
    except ValueError as error:  # sides beside a zero whose product numpy cannot hold
        raise FormatError(f"an array of shape {header.shape}: {error}", offset=offset, code="bad_tenbin") from error
