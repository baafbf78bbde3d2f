"""Arrays and trees of plain values out of payloads: npy, npz, tenbin, msgpack, CBOR. None of it can run code."""

from __future__ import annotations

import ast
import io
import math
import re
import zipfile
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import DecodeError, MissingExtraError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_INFLATED: Final = 1 << 30
"""Bytes that one compressed payload may unpack to: those of a gzip, or of all arrays of an npz together."""

_NPY_MAGIC: Final = b"\x93NUMPY"
_MAX_HEAD: Final = 10_000  # as numpy has it: longer source might exhaust the parser
_LONG: Final = re.compile(r"(\d)L\b")
_PICKLED_HINT: Final = "store numbers or strings of one type; elements that are Python objects take unpickling"


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]


def decode_npy(payload: bytes) -> NDArray[Any]:
    """Return the array of an npy payload: a copy, writable.

    What the header promises is compared with what is there before anything is allocated. Bytes after the array are
    left alone, as numpy does.

    Raises:
        DecodeError: The payload is no npy, ends too early, or its elements are Python objects.
    """
    if len(payload) < 10 or payload[:6] != _NPY_MAGIC:
        raise DecodeError("not an npy file")
    width = 2 if payload[6] == 1 else 4
    start = 8 + width + int.from_bytes(payload[8 : 8 + width], "little")
    if start > len(payload):
        raise DecodeError("the payload ends inside the header of its array")
    try:
        layout = _parse_layout(bytes(payload[:start]))
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise DecodeError(f"the header of the array is malformed: {error}") from error
    return _build(layout, payload, start)


@lru_cache(1024)  # the arrays of one field mostly have one shape, and a header is Python source
def _parse_layout(head: bytes) -> _Layout:
    version = head[6], head[7]
    if version not in {(1, 0), (2, 0), (3, 0)}:
        raise ValueError(f"version {version[0]}.{version[1]} of the format is unknown")
    if len(head) > _MAX_HEAD:
        raise ValueError(f"it has {len(head)} bytes")
    text = head[10 if version[0] == 1 else 12 :].decode("utf-8" if version[0] == 3 else "latin-1")
    try:
        fields = ast.literal_eval(text)
    except SyntaxError:
        fields = ast.literal_eval(_LONG.sub(r"\1", text))  # numpy wrote numbers so under Python 2
    shape, is_fortran = fields.pop("shape"), fields.pop("fortran_order")
    dtype = np.lib.format.descr_to_dtype(fields.pop("descr"))
    if fields or type(is_fortran) is not bool or not all(type(side) is int for side in shape):
        raise ValueError("it is not as numpy writes it")
    return _Layout(tuple(shape), is_fortran, dtype)


def _build(layout: _Layout, payload: bytes, start: int) -> NDArray[Any]:
    shape, is_fortran, dtype = layout
    if dtype.hasobject:
        raise DecodeError("the elements of the array are Python objects, which are never unpickled", hint=_PICKLED_HINT)
    if any(side < 0 for side in shape):
        raise DecodeError(f"the shape {shape} of the array has a negative side")
    count = math.prod(shape)
    needed, left = count * dtype.itemsize, len(payload) - start
    if needed > left:
        raise DecodeError(f"an array of shape {shape} and type {dtype} takes {needed} bytes, and {left} are here")
    try:
        flat = np.frombuffer(payload, dtype, count, start).copy() if needed else np.empty(count, dtype)
        return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)
    except ValueError as error:  # sides that numpy has no room for, beside a zero
        raise DecodeError(f"an array of shape {shape}: {error}") from error


def decode_npz(payload: bytes) -> dict[str, NDArray[Any] | bytes]:
    """Return the arrays of an npz payload by name; what is no npy in it as bytes, as numpy does.

    Raises:
        DecodeError: The payload is no zip, holds a name twice, unpacks to more than `MAX_INFLATED` bytes, or an array
            in it is refused by `decode_npy`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            return _read_npz(archive)
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, OSError, OverflowError) as error:
        raise DecodeError(f"not a readable npz file: {error}") from error


def _read_npz(archive: zipfile.ZipFile) -> dict[str, NDArray[Any] | bytes]:
    arrays: dict[str, NDArray[Any] | bytes] = {}
    left = MAX_INFLATED
    for info in archive.infolist():
        left -= info.file_size  # zipfile gives no more than this, whatever the compressed bytes hold
        if left < 0:
            raise DecodeError(f"the npz unpacks to more than {MAX_INFLATED} bytes")
        name = info.filename.removesuffix(".npy")
        if name in arrays:
            raise DecodeError(f"the npz holds two arrays called {name!r}")
        value = archive.read(info)
        arrays[name] = decode_npy(value) if value.startswith(_NPY_MAGIC) else value
    return arrays


def decode_msgpack(payload: bytes) -> Any:
    """Return the value of a msgpack payload; text as str, binary as bytes.

    Raises:
        MissingExtraError: msgpack is not installed.
        ValueError: The payload is not one msgpack value.
    """
    try:
        import msgpack  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("msgpack fields are read by msgpack", extra="arrays") from error
    return msgpack.unpackb(payload)


def decode_cbor(payload: bytes) -> Any:
    """Return the value of a CBOR payload.

    Raises:
        DecodeError: The payload is not a CBOR value.
        MissingExtraError: cbor2 is not installed.
    """
    try:
        import cbor2  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("CBOR fields are read by cbor2", extra="arrays") from error
    try:
        return cbor2.loads(payload)
    except cbor2.CBORDecodeError as error:
        raise DecodeError(f"not CBOR: {error}") from error
