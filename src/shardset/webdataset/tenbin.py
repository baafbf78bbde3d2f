"""webdataset's module of this name: lists of arrays as raw bytes with small headers, in buffers, streams and files.

The bytes are the same; see `shardset.formats.tenbin` for what is read here and not there. Arrays that are read are
writable copies, and infos that are required are compared, where webdataset refuses any.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from shardset.errors import FormatError, TruncatedError
from shardset.formats import tenbin as format_
from shardset.formats.tenbin import SHORT_TYPES, padded_length

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Arrays = list[NDArray[Any]]
    Infos = bool | Sequence[str]

long_to_short = dict(SHORT_TYPES)
short_to_long = {short: long for long, short in SHORT_TYPES.items()}
magic_str = format_.MAGIC.decode("ascii")
magic = int.from_bytes(format_.MAGIC, "little")
magic_bytes = format_.MAGIC

_PIECE: Final = 1 << 20
_WIDE: Final = frozenset({"float64", "int64", "uint64"})


def bytelen(a: Any) -> int:
    """Return the length of an array or of bytes, in bytes.

    Raises:
        ValueError: It is neither.
    """
    if hasattr(a, "nbytes"):
        return int(a.nbytes)
    if isinstance(a, (bytearray, bytes)):
        return len(a)
    raise ValueError(f"a {type(a).__name__} has no length in bytes")


def bytedata(a: Any) -> Any:
    """Return what holds the bytes of an array or of bytes.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(a, (bytearray, bytes, memoryview)):
        return a
    if hasattr(a, "data"):
        return a.data
    raise ValueError(f"a {type(a).__name__} holds no bytes")


def check_acceptable_input_type(data: Iterable[NDArray[Any]], allow64: bool) -> None:
    """Check that arrays are of types that the format holds, and, unless `allow64`, of at most 32 bits an element.

    Raises:
        ValueError: One is not.
    """
    for array in data:
        if array.dtype.name not in SHORT_TYPES:
            raise ValueError(f"tenbin holds no {array.dtype.name}")
        if not allow64 and array.dtype.name in _WIDE:
            raise ValueError(f"{array.dtype.name} takes 64 bits an element, which are to be allowed")


def str64(s: str) -> int:
    """Return up to 8 ASCII characters as an int64.

    Raises:
        ValueError: There are more, or others.
    """
    if len(s) > 8:
        raise ValueError(f"{s!r} has more than 8 characters")
    return int.from_bytes(s.encode("ascii").ljust(8, b"\0"), "little", signed=True)


def unstr64(i: int) -> str:
    """Return the characters that `str64` made an int64 of."""
    return int(i).to_bytes(8, "little", signed=True).decode("ascii").strip("\0")


def check_infos(data: Any, infos: list[str], required_infos: Infos | None = None) -> Any:
    """Return arrays, with their infos if `required_infos` is True; where it is a list, compare them first.

    Raises:
        ValueError: The infos are not those that are required.
    """
    if required_infos is False or required_infos is None:
        return data
    if required_infos is True:
        return data, infos
    if not isinstance(required_infos, (tuple, list)):
        raise ValueError("required_infos is neither a bool, nor a list or tuple of names")  # noqa: TRY004 - webdataset's
    if list(required_infos) != list(infos):
        raise ValueError(f"the infos are {infos}, and {list(required_infos)} are required")
    return data


def encode_header(a: NDArray[Any], info: str = "") -> bytes:
    """Return the header chunk's bytes for an array.

    Raises:
        ValueError: The format cannot hold it.
    """
    return format_.encode_array_header(a, info)


def decode_header(h: Buffer) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    """Return (shape, dtype, info) of a header chunk's bytes.

    Raises:
        FormatError: It is no header; a `ValueError`.
    """
    return format_.parse_array_header(h)


def encode_list(l: Sequence[NDArray[Any]], infos: Sequence[str] | None = None) -> list[Any]:  # noqa: E741 - its name
    """Return the bytes of the header and of the elements of each array.

    Raises:
        ValueError: The format cannot hold them, or there is not one info for each.
    """
    if infos is not None and len(infos) != len(l):
        raise ValueError(f"{len(infos)} infos for {len(l)} arrays")
    chunks: list[Any] = []
    for number, array in enumerate(l):
        chunks += (encode_header(array, "" if infos is None else infos[number]), format_.elements(array))
    return chunks


def decode_list(l: Sequence[Buffer], infos: Infos = False) -> Any:  # noqa: E741 - its name
    """Return the arrays of chunks as `encode_list` gives them; with their infos if `infos` is True.

    Raises:
        ValueError: The chunks are no arrays, or the infos are not those that are required.
    """
    if len(l) % 2:
        raise TruncatedError("the last of the chunks is a header without the elements of its array")
    headers = [format_.parse_array_header(chunk) for chunk in l[::2]]
    arrays = [format_.parse_array(header, chunk) for header, chunk in zip(headers, l[1::2], strict=True)]
    return check_infos(arrays, [header.name for header in headers], infos)


def roundup(n: int, k: int = 64) -> int:
    """Return `n` rounded up to a multiple of `k`."""
    return -(-n // k) * k


def encode_chunks(l: Iterable[Any]) -> bytearray:  # noqa: E741 - its name
    """Return chunks as one string of bytes, with heads and padding."""
    chunks = bytearray()
    for chunk in l:
        length = bytelen(chunk)
        chunks += format_.MAGIC + length.to_bytes(8, "little") + bytes(bytedata(chunk))
        chunks += bytes(padded_length(length) - length)
    return chunks


def decode_chunks(buf: Buffer) -> list[memoryview]:
    """Return the chunks of a string of bytes.

    Raises:
        FormatError: It is no row of chunks; a `ValueError`.
    """
    return [chunk for _, chunk in format_.iter_chunks(buf)]


def encode_buffer(l: list[NDArray[Any]], infos: Sequence[str] | None = None) -> bytes:  # noqa: E741 - its name
    """Return arrays as one string of bytes.

    Raises:
        ValueError: `l` is no list, or the format cannot hold it.
    """
    if not isinstance(l, list):
        raise ValueError("requires a list of arrays")  # noqa: TRY004 - webdataset's
    return format_.encode_tenbin(l, infos)


def decode_buffer(buf: Buffer, infos: Infos = False) -> Any:
    """Return the arrays of a string of bytes as a list; with their infos if `infos` is True.

    Raises:
        ValueError: It is no tenbin, or the infos are not those that are required.
    """
    found = list(format_.iter_tenbin(buf))
    return check_infos([array for _, array in found], [name for name, _ in found], infos)


def write_chunk(stream: IO[bytes], buf: Any) -> None:
    """Write a chunk with its head and padding."""
    stream.write(encode_chunks([buf]))


def read_chunk(stream: IO[bytes]) -> bytes | None:
    """Read a chunk; None at the end of the stream.

    Raises:
        FormatError: What comes is no chunk, or not all of it; a `ValueError`.
    """
    head = stream.read(8)
    if not head:
        return None
    if head != format_.MAGIC:
        raise FormatError("a chunk does not begin with ~TenBin~", code="bad_tenbin")
    length = int.from_bytes(_read(stream, 8), "little", signed=True)
    if length < 0:
        raise FormatError(f"a chunk of {length} bytes", code="bad_tenbin")
    payload = _read(stream, length)
    stream.read(padded_length(length) - length)
    return payload


def _read(stream: IO[bytes], length: int) -> bytes:
    """Read so many bytes, and take no more memory than there are bytes to be read."""
    pieces: list[bytes] = []
    left = length
    while left and (piece := stream.read(min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    if left:
        raise TruncatedError(f"{length} bytes are expected, and {length - left} are here")
    return b"".join(pieces)


def write(stream: IO[bytes], l: Sequence[NDArray[Any]], infos: Sequence[str] | None = None) -> None:  # noqa: E741
    """Write arrays to a stream.

    Raises:
        ValueError: The format cannot hold them.
    """
    for chunk in encode_list(l, infos):
        write_chunk(stream, chunk)


def read(stream: IO[bytes], n: int = sys.maxsize, infos: Infos = False) -> Any:
    """Read up to `n` arrays from a stream; with their infos if `infos` is True.

    Raises:
        ValueError: What comes is no tenbin, or the infos are not those that are required.
    """
    chunks: list[bytes] = []
    while len(chunks) < 2 * n and (header := read_chunk(stream)) is not None:
        payload = read_chunk(stream)
        if payload is None:
            raise TruncatedError("the stream ends after the header of an array")
        chunks += (header, payload)
    return decode_list(chunks, infos)


def save(fname: str, *args: NDArray[Any], infos: Sequence[str] | None = None, nocheck: bool = False) -> None:
    """Write arrays to a file, whose name ends in ``.ten`` unless `nocheck`.

    Raises:
        ValueError: It does not, or the format cannot hold the arrays.
    """
    _check_name(fname, nocheck=nocheck)
    with Path(fname).open("wb") as stream:
        write(stream, args, infos)


def load(fname: str, infos: Infos = False, nocheck: bool = False) -> Any:
    """Read the arrays of a file, whose name ends in ``.ten`` unless `nocheck`; with their infos if `infos` is True.

    Raises:
        ValueError: It does not, or the file is no tenbin.
    """
    _check_name(fname, nocheck=nocheck)
    with Path(fname).open("rb") as stream:
        return read(stream, infos=infos)


def _check_name(name: str | os.PathLike[str], *, nocheck: bool) -> None:
    if not nocheck and not str(name).endswith(".ten"):
        raise ValueError(f"{name}: the name of a tenbin file ends in .ten, unless nocheck=True")
