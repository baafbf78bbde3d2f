"""`tf.train.Example` and `SequenceExample`, the payload of most TFRecords, without protobuf and without TensorFlow.

An Example holds features by name, each a list of byte strings, of floats or of whole numbers::

    parse_example(record)  ->  {"image/encoded": [b"..."], "label": array([3]), "box": array([0.1, 0.2], dtype=float32)}

Three things that others take for one are kept apart: a feature that is missing is absent, one that was named but given
no kind is None, and one with a kind and no values is an empty list or array. A list with one value stays a list.

What is read, refused and overwritten follows the protobuf package (upb): lists packed, unpacked, mixed and in several
pieces; the last of several features of one name, and of several kinds in one feature; messages that come in parts are
joined. A number is as it was written, so a -1 that a careless writer gave 32 bits is 4294967295; a feature's entry
with a field that nobody knows is dropped as a whole, as upb does. One difference: names that are not UTF-8, which
protobuf refuses and TensorFlow reads, are given with surrogate escapes (PEP 383). `lint_example` tells where a record
means one thing to protobuf and another to TensorFlow's own parser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .example_encode import encode_example, encode_sequence_example
from .example_layout import (
    BYTES_LIST,
    EXPECTED,
    FLOAT_LIST,
    INT64_LIST,
    ONE_STRING,
    byte_strings,
    entry_layout,
    list_layout,
    remember,
    split_entry,
    whole_features,
)
from .example_lint import LintFinding, lint_example
from .example_wire import (
    FLOAT32,
    INT64,
    LENGTH,
    float_list,
    int_list,
    iter_fields,
    malformed,
    readable,
    varints,
)
from .tensor_proto import decode_tensor

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from .example_wire import Flat

    Feature = NDArray[np.float32] | NDArray[np.int64] | list[bytes] | None
    Pieces = tuple[int, list[Any]]

__all__ = [
    "BYTES_LIST",
    "FLOAT_LIST",
    "INT64_LIST",
    "LintFinding",
    "SequenceExample",
    "decode_tensor",
    "encode_example",
    "encode_sequence_example",
    "is_sequence_example",
    "lint_example",
    "parse_example",
    "parse_sequence_example",
]


class SequenceExample(NamedTuple):
    """A `tf.train.SequenceExample`.

    Attributes:
        context: Features by name, as `parse_example` gives them.
        feature_lists: By name a list of features, one a step; of each what `parse_example` would give.
    """

    context: dict[str, Feature]
    feature_lists: dict[str, list[Feature]]


def parse_example(raw: Buffer, fields: Collection[str] | None = None, *, views: bool = False) -> dict[str, Feature]:
    """Parse a serialized `tf.train.Example`.

    Args:
        raw: The record's payload.
        fields: Names of the features to decode, where not all of them are wanted; the others are skipped, and what is
            broken inside them is not noticed. A name that the record lacks is absent from the result too.
        views: Give byte strings as memoryviews of `raw`, and let arrays be views of it too. Without it nothing keeps
            `raw` alive or open, unless it is `bytes`.

    Returns:
        The features by name, in the order in which the names first appear: a list of byte strings, an array of
        float32, an array of int64, or None for a feature without a kind. Floats are a view that cannot be written to,
        and need not be aligned; ``.copy()`` mends both. Integers are a new array.

    Raises:
        DecodeError: The bytes are no Example. The message names the byte.
    """
    buf, items = (raw, raw) if type(raw) is bytes and not views else _sides(raw, views=views)
    wanted = None if fields is None else _wanted(fields)
    features: dict[str, Feature] = {}
    start = whole_features(buf)
    if start:
        _parse_features(buf, items, start, len(buf), features, wanted)
        return features
    for number, wire, start, stop in iter_fields(buf, 0, len(buf), 0):
        if number == 1 and wire == LENGTH:
            _parse_features(buf, items, start, stop, features, wanted)
    return features


def parse_sequence_example(
    raw: Buffer, fields: Collection[str] | None = None, *, views: bool = False
) -> SequenceExample:
    """Parse a serialized `tf.train.SequenceExample`.

    An Example is a SequenceExample without lists, and the other way around a reader of Examples sees the context only:
    see `is_sequence_example`.

    Args:
        raw: The record's payload.
        fields: Names to decode, of features of the context and of lists alike; see `parse_example`.
        views: As for `parse_example`.

    Raises:
        DecodeError: The bytes are no SequenceExample. The message names the byte.
    """
    buf, items = _sides(raw, views=views)
    wanted = None if fields is None else _wanted(fields)
    parsed = SequenceExample({}, {})
    for number, wire, start, stop in iter_fields(buf, 0, len(buf), 0):
        if wire != LENGTH:
            continue
        if number == 1:
            _parse_features(buf, items, start, stop, parsed.context, wanted)
        elif number == 2:
            for inner, inner_wire, at, end in iter_fields(buf, start, stop, 1):
                if inner == 1 and inner_wire == LENGTH:
                    _parse_feature_list(buf, items, at, end, parsed.feature_lists, wanted)
    return parsed


def is_sequence_example(raw: Buffer) -> bool:
    """Tell whether a record has the field that a SequenceExample has and an Example lacks, even an empty one.

    Only the tags on top are looked at. A SequenceExample without lists cannot be told from an Example.

    Raises:
        DecodeError: The bytes are neither. The message names the byte.
    """
    buf = readable(raw)
    if whole_features(buf):
        return False
    return any(number == 2 and wire == LENGTH for number, wire, _, _ in iter_fields(buf, 0, len(buf), 0))


def _sides(raw: Buffer, *, views: bool) -> tuple[Flat, Flat]:
    """Return the record to look at, and the same to cut values out of."""
    if views:
        buf = readable(raw)
        return buf, memoryview(buf)
    buf = raw if type(raw) is bytes else bytes(raw)
    return buf, buf


def _wanted(fields: Collection[str]) -> frozenset[str]:
    if isinstance(fields, str):
        raise TypeError(f"fields must be a collection of names, not the one string {fields!r}")
    return frozenset(fields)


def _parse_features(  # noqa: PLR0912, PLR0917 - called for every record, and a call costs as much as a feature
    buf: Flat, items: Flat, position: int, stop: int, features: dict[str, Feature], wanted: frozenset[str] | None
) -> None:
    """Parse the body of a Features message into `features`."""
    name, last = "", stop - 1
    while position < last:
        # Most entries begin with the very bytes that the one behind `name` began with in an earlier record.
        expected = EXPECTED.get((name, buf[position + 1]))
        if expected is not None and buf[position : position + expected[1]] == expected[0]:
            _, length, size, kind, name = expected
            at = position + length
            end = at + size
        else:
            found = entry_layout(buf, position, stop)
            if found is None:
                position = _parse_entry(buf, items, position, stop, features, wanted)
                continue
            remember(name, buf, position, found)
            name, kind, at, end = found
        if end > stop:
            raise malformed(f"a feature reaches {end - stop} bytes beyond its message,", position)
        if wanted is None or name in wanted:
            if kind == ONE_STRING:
                features[name] = [items[at:end]]  # type: ignore[list-item] # views where they were asked for
            elif kind == FLOAT_LIST:
                features[name] = np.frombuffer(items, FLOAT32, end - at >> 2, at)
            elif kind == INT64_LIST:
                if end - at == 1 and buf[at] < 0x80:
                    features[name] = np.fromiter((buf[at],), INT64, 1)
                else:
                    features[name] = varints(bytes(buf[at:end]), at)
            else:
                features[name] = _value(buf, items, kind, at, end, 4)
        position = end
    if position < stop:  # one byte is left, which is too short for any entry
        _parse_entry(buf, items, position, stop, features, wanted)


def _value(  # noqa: PLR0917 - called for every feature
    buf: Flat, items: Flat, kind: int, start: int, stop: int, depth: int
) -> Feature:
    """Return the value of a Feature that `list_layout` knows."""
    if kind == INT64_LIST:
        return varints(bytes(buf[start:stop]), start)
    if kind == FLOAT_LIST:
        return np.frombuffer(items, FLOAT32, stop - start >> 2, start)
    if kind == ONE_STRING:
        return [items[start:stop]]  # type: ignore[list-item] # as above
    return byte_strings(buf, items, start, stop, depth) if kind else None


def _parse_entry(  # noqa: PLR0917 - as `_parse_features`
    buf: Flat, items: Flat, position: int, stop: int, features: dict[str, Feature], wanted: frozenset[str] | None
) -> int:
    """Parse one field of a Features message, whatever it is, and return the position behind it."""
    number, wire, start, end = next(iter_fields(buf, position, stop, 1))
    if number == 1 and wire == LENGTH:
        name, values, is_kept = split_entry(buf, start, end)
        if wanted is None or name in wanted:
            pieces: Pieces = 0, []
            for at, value_end in values:
                pieces = _add_feature(buf, items, at, value_end, 3, pieces)
            if is_kept:
                features[name] = _joined(*pieces)
    return end


def _parse_feature_list(  # noqa: PLR0917 - as `_parse_features`
    buf: Flat, items: Flat, start: int, stop: int, lists: dict[str, list[Feature]], wanted: frozenset[str] | None
) -> None:
    name, values, is_kept = split_entry(buf, start, stop)
    if wanted is None or name in wanted:
        steps = [
            _feature(buf, items, at, end, 4)
            for first, last in values
            for number, wire, at, end in iter_fields(buf, first, last, 3)
            if number == 1 and wire == LENGTH
        ]
        if is_kept:
            lists[name] = steps


def _feature(buf: Flat, items: Flat, position: int, stop: int, depth: int) -> Feature:
    try:
        found = list_layout(buf, position, stop)
    except IndexError:  # the record ends here
        found = None
    if found is not None:
        return _value(buf, items, *found, stop, depth + 1)
    return _joined(*_add_feature(buf, items, position, stop, depth, (0, [])))


def _add_feature(  # noqa: PLR0917 - as `_value`
    buf: Flat, items: Flat, position: int, stop: int, depth: int, before: Pieces
) -> Pieces:
    """Return the kind of a Feature and the pieces of its list, after what an earlier part of it gave."""
    kind, pieces = before
    for number, wire, at, end in iter_fields(buf, position, stop, depth):
        if wire != LENGTH or number > INT64_LIST:
            continue
        if number != kind:  # the last kind counts
            kind, pieces = number, []
        if kind == BYTES_LIST:
            pieces += byte_strings(buf, items, at, end, depth + 1)
        elif kind == FLOAT_LIST:
            pieces += float_list(items, at, end, depth + 1)
        else:
            pieces += int_list(buf, at, end, depth + 1)
    return kind, pieces


def _joined(kind: int, pieces: list[Any]) -> Feature:
    if kind == BYTES_LIST:
        return pieces
    if not kind:
        return None
    if len(pieces) == 1:
        array: NDArray[Any] = pieces[0]
        return array
    return np.concatenate([np.empty(0, INT64 if kind == INT64_LIST else FLOAT32), *pieces])
