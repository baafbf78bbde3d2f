"""Where the features of an Example stand in its bytes: names, kinds and the ranges of the values.

What every known writer makes is recognised here at once: an entry with its name and then its value, a feature with one
kind, a list packed in one piece. Of anything else these functions say None, and the caller reads it field by field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .example_wire import LENGTH, bytes_spans, iter_fields, malformed, read_size

if TYPE_CHECKING:
    from .example_wire import Flat

BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
"""Field numbers of a Feature's kinds."""
_BYTES_TAG, _FLOAT_TAG, _INT64_TAG = 0x0A, 0x12, 0x1A
_KIND_TAGS: Final = frozenset((_BYTES_TAG, _FLOAT_TAG, _INT64_TAG))
_FEATURES_TAG, _ENTRY_TAG, _KEY_TAG, _VALUE_TAG, _ITEMS_TAG = 0x0A, 0x0A, 0x0A, 0x12, 0x0A

ONE_STRING: Final = 4  # beside the kinds: a BytesList with one value
_NUMBERS: Final = frozenset((FLOAT_LIST, INT64_LIST))

_NAMES: Final[dict[bytes, str]] = {}
"""Names of features seen lately: the records of a shard share theirs, and a dict of records then shares the strings."""
_MAX_NAMES: Final = 4096
_LONGEST_NAME: Final = 128
EXPECTED: Final[dict[tuple[str, int], tuple[bytes, int, int, int, str]]] = {}
"""What stood last behind a feature (its name, "" at the beginning) with this first byte of an entry's length: all bytes
before the values, how many these are, bytes of the values, kind and name. The bytes say all the rest, so that a wrong
guess costs time only."""
_LONGEST_KEPT: Final = 64
"""Longer byte strings are not expected to have the same length again."""


def whole_features(buf: Flat) -> int:
    """Return where the Features of an Example begin that has one part of them and nothing else, 0 of any other."""
    stop = len(buf)
    if stop < 2 or buf[0] != _FEATURES_TAG:
        return 0
    size, at = (buf[1], 2) if buf[1] < 0x80 else read_size(buf, 1, stop)
    return at if at + size == stop else 0


def feature_name(raw: bytes) -> str:
    """Return a name that was not seen lately."""
    name = raw.decode("utf-8", "surrogateescape")
    if len(raw) <= _LONGEST_NAME:
        if len(_NAMES) >= _MAX_NAMES:
            _NAMES.clear()
        _NAMES[raw] = name
    return name


def remember(before: str, buf: Flat, position: int, layout: tuple[str, int, int, int]) -> None:
    """Keep what stands behind the feature `before`, where it may be expected to come again."""
    name, kind, at, end = layout
    if end - at < _LONGEST_KEPT or kind in _NUMBERS:
        if len(EXPECTED) >= _MAX_NAMES:
            EXPECTED.clear()
        EXPECTED[before, buf[position + 1]] = bytes(buf[position:at]), at - position, end - at, kind, name


def entry_layout(buf: Flat, position: int, stop: int) -> tuple[str, int, int, int] | None:
    """Return the name, kind and half-open range of an entry's values.

    Only of an entry as every known writer makes them: name, then value, of which `list_layout` knows what it is.
    """
    try:
        if buf[position] != _ENTRY_TAG:
            return None
        size, at = buf[position + 1], position + 2
        if size > 0x7F:
            size, at = read_size(buf, position + 1, stop)
        end, length, key = at + size, buf[at + 1], at + 2
        value = key + length
        if value >= end or end > stop or length > 0x7F or buf[at] != _KEY_TAG or buf[value] != _VALUE_TAG:
            return None
        size, at = buf[value + 1], value + 2
        if size > 0x7F:
            size, at = read_size(buf, value + 1, stop)
        if at + size != end:
            return None
        found = list_layout(buf, at, end)
    except IndexError:  # the record ends in the middle of an entry
        return None
    if found is None:
        return None
    raw = bytes(buf[key:value])  # not every view can be hashed
    return _NAMES.get(raw) or feature_name(raw), *found, end


def list_layout(buf: Flat, position: int, stop: int) -> tuple[int, int] | None:
    """Return the kind of a Feature and where its values begin, which end at `stop`.

    Only of a Feature with no kind, or with one kind and in it one packed list, or byte strings; what they are made of
    is left open.
    """
    if position == stop:
        return 0, position
    tag = buf[position]
    if tag not in _KIND_TAGS:
        return None
    size, at = buf[position + 1], position + 2
    if size > 0x7F:
        size, at = read_size(buf, position + 1, stop)
    if at + size != stop:
        return None
    if not size:
        return tag >> 3, at
    if buf[at] != _ITEMS_TAG:
        return None
    size, first = buf[at + 1], at + 2
    if size > 0x7F:
        size, first = read_size(buf, at + 1, stop)
    if tag == _BYTES_TAG:
        return (ONE_STRING, first) if first + size == stop else (BYTES_LIST, at)
    return (tag >> 3, first) if first + size == stop and (tag == _INT64_TAG or not size & 3) else None


def split_entry(buf: Flat, start: int, stop: int) -> tuple[str, list[tuple[int, int]], bool]:
    """Return the name of a map's entry, where its value's parts stand, and whether upb would keep it."""
    name = ""
    values = []
    is_kept = True
    for number, wire, at, end in iter_fields(buf, start, stop, 2):
        if wire != LENGTH or number > 2:
            is_kept = False
        elif number == 1:
            name = feature_name(bytes(buf[at:end]))
        else:
            values.append((at, end))
    return name, values, is_kept


def byte_strings(buf: Flat, items: Flat, position: int, stop: int, depth: int) -> list[bytes]:
    """Return the values in the body of a BytesList, cut out of `items`.

    Raises:
        DecodeError: The body breaks the format.
    """
    values: list[Any] = []
    while position < stop:
        at = position + 2
        if at > stop or buf[position] != _ITEMS_TAG:
            return values + [items[first:last] for first, last in bytes_spans(buf, position, stop, depth)]
        size = buf[position + 1]
        if size > 0x7F:
            size, at = read_size(buf, position + 1, stop)
        position = at + size
        if position > stop:
            raise malformed(f"a byte string reaches {position - stop} bytes beyond its list,", at)
        values.append(items[at:position])
    return values
