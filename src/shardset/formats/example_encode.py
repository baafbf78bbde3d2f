"""Writing `tf.train.Example` and `SequenceExample`: the bytes that protobuf's deterministic serializer gives."""

from __future__ import annotations

from functools import lru_cache
from struct import Struct, pack
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Body = tuple[bytes, list[bytes]]
    Sized = tuple[int, list[bytes]]

_FLOAT32: Final = np.dtype("<f4")
_INT64: Final = np.dtype("<i8")
_BYTES_TAG, _FLOAT_TAG, _INT64_TAG = b"\x0a", b"\x12", b"\x1a"
_ITEM: Final = b"\x0a"
_LAST: Final = b"\xff"
"""Greater than any byte of UTF-8: sorts "ab" before "a", as upb does."""
_FLOAT: Final = Struct("<f")
_WHOLE: Final = frozenset((int, bool))
_REAL: Final = frozenset((int, bool, float))
_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))
_FEW: Final = 24
"""So many numbers are faster written one by one."""
_AT_ONCE: Final = 1 << 14
"""Numbers that are spread into their bytes together."""
_MAX_INT64: Final = (1 << 63) - 1


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Serialize a `tf.train.Example`.

    Args:
        features: By name, one of

            - an array, or whatever numpy makes one of: of floats (written as 32-bit floats), of bools or whole numbers
              (as 64-bit ones), of byte strings, strings or objects that are either. More than one dimension is
              written in C order; the shape is not kept, as an Example has no place for it;
            - bytes, a bytearray, a memoryview or a string (as UTF-8): one value;
            - a bool, an int or a float: one value;
            - a list or tuple of such values. Ints among floats are written as floats;
            - None: a feature with no kind.

            A list without values says nothing about its kind and is written as byte strings, which is what
            `parse_example` gives an empty list for; ``np.zeros(0, np.float32)`` is an empty list of floats.

    Returns:
        The message that the protobuf package's ``SerializeToString(deterministic=True)`` gives: the names sorted by
        their UTF-8 bytes, with one oddity of upb's, that a name stands behind those that begin with it. b"" where there
        are no features. What `parse_example` gave comes out as it was.

    Raises:
        ValueError: A number does not fit 64-bit integers or 32-bit floats (infinities and NaN do), or a list has parts
            of different lengths. The message names the feature.
        TypeError: A value is of none of these types, or a list mixes numbers with strings.
    """
    body = _map(features, _feature)
    return _field(_ITEM, body) if body else b""


def encode_sequence_example(context: Mapping[str, Any], feature_lists: Mapping[str, Iterable[Any]]) -> bytes:
    """Serialize a `tf.train.SequenceExample`.

    Args:
        context: Features as for `encode_example`.
        feature_lists: By name the steps, each a feature as for `encode_example`. The rows of an array are its steps.

    Returns:
        The message with its names sorted. The field of the lists is there even if it is empty, so that
        `is_sequence_example` holds; the context only if it has features.

    Raises:
        ValueError: As `encode_example` does.
        TypeError: As `encode_example` does.
    """
    body = _map(context, _feature)
    return (_field(_ITEM, body) if body else b"") + _field(b"\x12", _map(feature_lists, _steps))


def _size(size: int) -> bytes:
    if size < 0x80:
        return _ONE_BYTE[size]
    parts = bytearray()
    while size > 0x7F:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    parts.append(size)
    return bytes(parts)


def _field(tag: bytes, chunks: list[bytes]) -> bytes:
    return b"".join((tag, _size(sum(map(len, chunks))), *chunks))


@lru_cache(4096)  # the records of a shard share their names
def _name(name: str) -> tuple[bytes, bytes]:
    """Return what a name sorts by, and an entry's bytes from the name's tag to the value's."""
    if not isinstance(name, str):
        raise TypeError(f"a feature's name is a string, not {name!r}")
    try:
        key = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"the name {name!r} of a feature is no text that UTF-8 has: {error.reason}") from error
    return key + _LAST, b"".join((_ITEM, _size(len(key)), key, b"\x12"))


def _map(values: Mapping[str, Any], encode: Callable[[Any], Sized]) -> list[bytes]:
    """Return the entries of a map in pieces, the names sorted."""
    chunks: list[bytes] = []
    for (_, start), name in sorted([(_name(name), name) for name in values]):
        try:
            size, value = encode(values[name])
        except OverflowError as error:
            raise ValueError(f"feature {name!r}: a number does not fit 64-bit integers or 32-bit floats") from error
        except (ValueError, TypeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"feature {name!r}: {error}") from error
        head = start + _size(size)
        chunks.append(_ITEM + _size(len(head) + size) + head)
        chunks += value
    return chunks


def _steps(steps: Iterable[Any]) -> Sized:
    if isinstance(steps, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"a feature list is a list of steps, not one value of type {type(steps).__name__}")
    chunks: list[bytes] = []
    for step in steps:
        size, feature = _feature(step)
        chunks.append(_ITEM + _size(size))
        chunks += feature
    return sum(map(len, chunks)), chunks


def _feature(value: Any) -> Sized:
    """Return the size of a Feature, and it in pieces: large values are copied once, when all is joined."""
    if value is None:
        return 0, []
    tag, chunks = _body(value)
    size = len(chunks[0]) if len(chunks) == 1 else sum(map(len, chunks))
    if tag == _BYTES_TAG:
        head = tag + _size(size)
    elif size:
        start = _ITEM + _size(size)
        head = tag + _size(len(start) + size) + start
    else:  # an empty packed list is left out
        head, chunks = tag + b"\0", []
    return len(head) + size, [head, *chunks]


def _body(value: Any) -> Body:
    """Return the tag of a value's kind, and its list: packed numbers, or byte strings with their tags and lengths."""
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, (list, tuple)):
        return _sequence(value)
    if isinstance(value, (bytes, str, bytearray, memoryview)):
        return _BYTES_TAG, _byte_strings((value,))
    if isinstance(value, int):
        return _INT64_TAG, [_whole_numbers((value,))]
    if type(value) is float:
        return _FLOAT_TAG, [_FLOAT.pack(value)]
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        return _array(np.asarray(value))
    raise TypeError(f"a value of type {type(value).__name__} is no feature; give an array, bytes, numbers or a list")


def _sequence(values: list[Any] | tuple[Any, ...]) -> Body:
    if not values:
        return _BYTES_TAG, []
    kinds = set(map(type, values))
    if kinds <= _WHOLE:
        return _INT64_TAG, [_whole_numbers(values)]
    if kinds <= _REAL:
        return _FLOAT_TAG, [pack(f"<{len(values)}f", *values)]
    if isinstance(values[0], (bytes, str, bytearray, memoryview)):
        return _BYTES_TAG, _byte_strings(values)
    # Not np.asarray of the whole: out of 1 and 2**63 it makes floats, and out of 1 and "a" strings.
    if len({np.shape(value) for value in values}) > 1:
        raise ValueError("the parts of a list have different lengths")
    bodies = [_body(value) for value in values]
    tags = {tag for tag, _ in bodies}
    if tags == {_INT64_TAG, _FLOAT_TAG}:
        return _FLOAT_TAG, [_floats(np.array(values, np.float64))]
    if len(tags) > 1:
        raise TypeError("a list holds either numbers, or bytes and strings")
    return tags.pop(), [chunk for _, chunks in bodies for chunk in chunks]


def _array(array: NDArray[Any]) -> Body:
    kind = array.dtype.kind
    if kind == "f":
        return _FLOAT_TAG, [_floats(array)]
    if kind in "biu":
        return _INT64_TAG, [_integers(array)]
    if kind in "SU":
        return _BYTES_TAG, _byte_strings(array.ravel().tolist())
    if kind == "O":
        return _sequence(array.ravel().tolist())
    raise TypeError(f"an array of {array.dtype} is no feature; give floats, whole numbers, bools or byte strings")


def _byte_strings(values: Iterable[Any]) -> list[bytes]:
    chunks: list[bytes] = []
    for value in values:
        if isinstance(value, str):
            item = value.encode()
        elif isinstance(value, (bytes, bytearray, memoryview)):
            item = bytes(value)
        else:
            raise TypeError(f"a list of bytes and strings holds a value of type {type(value).__name__}")
        chunks += (_ITEM + _size(len(item)), item)
    return chunks


def _floats(array: NDArray[Any]) -> bytes:
    if array.dtype.itemsize <= 4:
        return array.astype(_FLOAT32, copy=False).tobytes()
    try:
        with np.errstate(over="raise"):
            return array.astype(_FLOAT32).tobytes()
    except FloatingPointError as error:
        raise ValueError("a number is too large for a 32-bit float") from error


def _whole_numbers(values: Sequence[int]) -> bytes:
    try:
        data = bytes(values)
    except ValueError:  # one is beyond 0 to 255
        pass
    else:
        if data.isascii():
            return data
    if len(values) > _FEW:
        return _integers(np.fromiter(values, _INT64, len(values)))
    parts = bytearray()
    for value in values:
        if not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
            raise OverflowError
        value &= 0xFFFFFFFFFFFFFFFF  # noqa: PLW2901 - negative numbers are written as 64 bits
        while value > 0x7F:
            parts.append(value & 0x7F | 0x80)
            value >>= 7  # noqa: PLW2901
        parts.append(value)
    return bytes(parts)


def _integers(array: NDArray[Any]) -> bytes:
    if array.size <= _FEW:
        return _whole_numbers(array.ravel().tolist())
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > _MAX_INT64:
        raise OverflowError
    numbers = array.astype(_INT64).ravel().view(np.uint64)
    if not len(numbers) or (largest := int(numbers.max())) < 0x80:
        return numbers.astype(np.uint8).tobytes()
    width = -(-largest.bit_length() // 7)
    parts = [numbers[at : at + _AT_ONCE] for at in range(0, len(numbers), _AT_ONCE)]
    return b"".join([_spread(part, width) for part in parts])


def _spread(numbers: NDArray[np.uint64], width: int) -> bytes:
    """Return varints. Each number is laid out in `width` bytes, of which those that it needs are kept."""
    table = np.empty((len(numbers), width), np.uint8)
    kept = np.ones((len(numbers), width), np.bool_)
    for place in range(width):
        table[:, place] = numbers & np.uint64(0x7F)
        numbers = numbers >> np.uint64(7)
        if place + 1 < width:
            goes_on = numbers != 0
            table[:, place] |= goes_on.view(np.uint8) << np.uint8(7)
            kept[:, place + 1] = goes_on
    return table[kept].tobytes()


def packed_size(numbers: NDArray[np.int64]) -> int:
    """Return how many bytes whole numbers take in a packed list."""
    return len(_integers(numbers))
