"""Records as members of a tar, and back: what `member_names` says of names, carried out on Examples.

Nothing is lost on the way: names, kinds, the three states of a feature (missing, without a kind, empty), values to the
bit. A record that an Example with sorted names would not say all of (an unknown field, or no Example at all) goes into
one member as it is.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import DecodeError, SampleError
from shardset.formats.example import (
    SequenceExample,
    encode_example,
    encode_sequence_example,
    is_sequence_example,
    parse_example,
    parse_sequence_example,
)
from shardset.formats.example_wire import FIXED32, LENGTH, VARINT, iter_fields, readable

from .member_names import EMPTY, MESSAGE, NONE, NUMBERS, SEQUENCE, ContentSuffixes, escape_name, unescape_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.formats.example import Feature
    from shardset.formats.example_wire import Flat

KEY: Final = "__key__"
"""The feature that holds a sample's key."""
_MAGIC: Final = b"\x93NUMPY"
_KINDS: Final[dict[str, np.dtype[Any]]] = {"<f4": np.dtype("<f4"), "<i8": np.dtype("<i8")}
_HEADER: Final = re.compile(
    rb"\{'descr': '(<f4|<i8)', 'fortran_order': False, 'shape': \(([0-9]{1,18}),(?: ([0-9]{1,18}))?\), \} *\n"
)
_ELEMENTS: Final = {1: LENGTH, 2: FIXED32, 3: VARINT}
"""Wire types of the values of each kind where they are not packed."""
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")


class Member(NamedTuple):
    """A part of a sample.

    Attributes:
        suffix: What follows the key and a dot in its name.
        pieces: Its payload.
    """

    suffix: str
    pieces: tuple[Buffer, ...]


def parse_record(raw: Buffer) -> SequenceExample | None:
    """Return the features and feature lists of a record, as views of it, or None unless they are all that it says."""
    try:
        if is_sequence_example(raw):
            parsed = parse_sequence_example(raw, views=True)
            if not parsed.feature_lists:
                return None
            again = encode_sequence_example(*parsed)
        else:
            parsed = SequenceExample(parse_example(raw, views=True), {})
            if not parsed.context:
                return None
            again = encode_example(parsed.context)
    except DecodeError:
        return None
    return parsed if again == raw or _is_whole(raw, again) else None


def _is_whole(raw: Buffer, again: bytes) -> bool:
    """Tell whether a record that is not written as we write it says nothing that its features do not say."""
    size = memoryview(raw).nbytes
    if len(again) == size:  # most often the same entries in another order
        counts = [np.bincount(np.frombuffer(memoryview(data), np.uint8), minlength=256) for data in (raw, again)]
        if bool((counts[0] == counts[1]).all()):
            return True
    return _all_known(readable(raw))


def _all_known(buf: Flat) -> bool:
    """Tell whether every field of a record is one of an Example or SequenceExample, and no value replaces another."""
    names: set[tuple[int, bytes]] = set()
    for number, wire, start, stop in iter_fields(buf, 0, len(buf), 0):
        if wire != LENGTH or number > 2:
            return False
        for inner, inner_wire, at, end in iter_fields(buf, start, stop, 1):
            entry = list(iter_fields(buf, at, end, 2)) if (inner, inner_wire) == (1, LENGTH) else []
            if sorted(field[:2] for field in entry) not in ([(1, LENGTH)], [(1, LENGTH), (2, LENGTH)]):
                return False
            name = number, next(bytes(buf[first:last]) for field, _, first, last in entry if field == 1)
            if name in names:
                return False
            names.add(name)
            for field, _, first, last in entry:
                if field == 2 and not _is_known_value(buf, first, last, is_list=number == 2):
                    return False
    return True


def _is_known_value(buf: Flat, start: int, stop: int, *, is_list: bool) -> bool:
    fields = iter_fields(buf, start, stop, 3)
    if is_list:
        return all(
            (number, wire) == (1, LENGTH) and _is_known_value(buf, at, end, is_list=False)
            for number, wire, at, end in fields
        )
    kinds = set()
    for kind, wire, at, end in fields:
        kinds.add(kind)
        if wire != LENGTH or kind not in _ELEMENTS:
            return False
        if any(
            (number, inner) not in {(1, LENGTH), (1, _ELEMENTS[kind])}
            for number, inner, _, _ in iter_fields(buf, at, end, 4)
        ):
            return False
    return len(kinds) < 2


def feature_members(parsed: SequenceExample, suffixes: ContentSuffixes) -> list[Member]:
    """Return the members that hold features and feature lists.

    They are sorted by name. Records name their features in any order, and samples that do not differ in the order of
    their members are read faster.
    """
    names = [*parsed.context, *parsed.feature_lists]
    keeps_case = len({name.lower() for name in names}) == len(set(names))
    members: list[Member] = []
    for name in sorted(parsed.context):
        base = escape_name(name, keeps_case=keeps_case)
        members += _members(base, name, parsed.context[name], suffixes)
    for name in sorted(parsed.feature_lists):
        base = f"{escape_name(name, keeps_case=keeps_case)}.{SEQUENCE}"
        members += _step_members(base, name, parsed.feature_lists[name], suffixes)
    return members


def _members(base: str, name: str, feature: Feature, suffixes: ContentSuffixes) -> Iterator[Member]:
    if feature is None:
        yield Member(f"{base}.{NONE}", ())
    elif isinstance(feature, list):
        if not feature:
            yield Member(f"{base}.{EMPTY}", ())
        elif len(feature) == 1:
            yield Member(f"{base}.{suffixes.suffix(name, feature[0])}", (feature[0],))
        else:
            for number, value in enumerate(feature):
                yield Member(f"{base}.{number}.{suffixes.suffix(name, value)}", (value,))
    else:
        yield Member(f"{base}.{NUMBERS}", _npy(feature))


def _step_members(base: str, name: str, steps: list[Feature], suffixes: ContentSuffixes) -> Iterator[Member]:
    if not steps:
        yield Member(f"{base}.{EMPTY}", ())
        return
    if all(isinstance(step, np.ndarray) for step in steps):
        arrays: list[Any] = steps
        if len({(array.dtype.str, len(array)) for array in arrays}) == 1:
            yield Member(f"{base}.{NUMBERS}", _npy(np.stack(arrays)))
            return
    if all(isinstance(step, list) and len(step) == 1 for step in steps):
        for number, step in enumerate(steps):
            value = step[0]  # type: ignore[index]
            yield Member(f"{base}.{number}.{suffixes.suffix(name, value)}", (value,))
        return
    yield Member(f"{base}.{MESSAGE}", (encode_sequence_example({}, {name: steps}),))


def observe(parsed: SequenceExample, suffixes: ContentSuffixes) -> None:
    """Show the byte strings of a record to what is to name them."""
    lists = [*parsed.context.items(), *((name, step) for name, steps in parsed.feature_lists.items() for step in steps)]
    for name, feature in lists:
        if isinstance(feature, list):
            for value in feature:
                suffixes.observe(name, value)


def _npy(array: NDArray[Any]) -> tuple[Buffer, ...]:
    return _npy_header(array.dtype.str, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@lru_cache(1024)
def _npy_header(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return what stands before an array in a ``.npy`` file of version 1.0: 64 bytes, or a multiple."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(_MAGIC) + 4 + len(text) + 1) % 64) + b"\n"
    return _MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text


def _parse_npy(payload: memoryview) -> NDArray[Any]:
    """Return the array of a ``.npy`` file of the kind that stands for a feature.

    Raises:
        ValueError: It is none, or not whole.
    """
    if bytes(payload[:6]) != _MAGIC or len(payload) < 10:
        raise ValueError("is no .npy file")
    end = 10 + int.from_bytes(payload[8:10], "little")
    kind, shape = _parse_header(bytes(payload[10:end]), bytes(payload[6:8]))
    count = 1
    for side in shape:
        count *= side
    if (len(payload) - end) != count * kind.itemsize:
        raise ValueError(f"has {len(payload) - end} bytes behind its header, and not {count * kind.itemsize}")
    return np.frombuffer(payload, kind, count, end).reshape(shape)


@lru_cache(1024)
def _parse_header(text: bytes, version: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    match = _HEADER.fullmatch(text)
    if match is None or version != b"\x01\x00":
        raise ValueError("is no .npy file of float32 or int64 values, in rows, in little-endian order")
    shape: tuple[int, ...] = (int(match[2]),) if match[3] is None else (int(match[2]), int(match[3]))
    return _KINDS[match[1].decode()], shape


def build_record(key: str | None, members: Sequence[tuple[str, memoryview]]) -> bytes:
    """Return the record that a sample of a tar with features stands for.

    Args:
        key: What the feature `KEY` is to hold; None for none.
        members: Suffixes as they are spelled, and payloads.

    Raises:
        SampleError: A suffix stands for nothing, or a payload is not what its suffix says.
    """
    if key is None and len(members) == 1 and "." not in members[0][0]:
        return bytes(members[0][1])
    context: dict[str, Feature] = {}
    lists: dict[str, list[Feature]] = {}
    for (name, is_sequence), parts in _grouped(members).items():
        try:
            if is_sequence:
                lists[name] = _steps(name, parts)
            else:
                context[name] = _feature(parts)
        except ValueError as error:
            raise SampleError(f"the feature {name!r} of a sample {error}", hint="write the sample again") from error
    if key is not None:
        if KEY in context:
            raise SampleError(f"a sample has a key in its name and another in a member for {KEY}")
        context[KEY] = [key.encode("utf-8", "surrogateescape")]
    return encode_sequence_example(context, lists) if lists else encode_example(context)


def _grouped(members: Iterable[tuple[str, memoryview]]) -> Mapping[tuple[str, bool], list[tuple[str, memoryview]]]:
    """Return the members of each feature and of each list: what follows the name, and the payload."""
    grouped: dict[tuple[str, bool], list[tuple[str, memoryview]]] = {}
    for suffix, payload in members:
        escaped, dot, rest = suffix.partition(".")
        first, _, more = rest.partition(".")
        is_sequence = first == SEQUENCE and bool(more)
        if not dot or not rest:
            what = f"a sample has a member with the suffix {suffix!r}, which stands for no feature"
            raise SampleError(what, hint="__shardset__/features.json says that all of them do: take it out of the tar")
        grouped.setdefault((unescape_name(escaped), is_sequence), []).append((more if is_sequence else rest, payload))
    return grouped


def _feature(parts: list[tuple[str, memoryview]]) -> Feature:
    if len(parts) == 1 and "." not in parts[0][0]:
        kind, payload = parts[0]
        if kind in {NONE, EMPTY}:
            _check_empty(payload)
            return None if kind == NONE else []
        if kind == NUMBERS:
            return _row(payload)
        return [payload]  # type: ignore[list-item]
    return _numbered(parts)


def _steps(name: str, parts: list[tuple[str, memoryview]]) -> list[Feature]:
    if len(parts) == 1 and "." not in parts[0][0]:
        kind, payload = parts[0]
        if kind == EMPTY:
            _check_empty(payload)
            return []
        if kind == NUMBERS:
            table = _parse_npy(payload)
            if table.ndim != 2:
                raise ValueError("is no table")
            return list(table)
        if kind == MESSAGE:
            try:
                found = parse_sequence_example(payload, views=True).feature_lists
            except DecodeError as error:
                raise ValueError(f"is no SequenceExample: {error.message}") from error
            if list(found) != [name]:
                raise ValueError("is a SequenceExample of other lists than its name says")
            return found[name]
    return [[value] for value in _numbered(parts)]


def _numbered(parts: list[tuple[str, memoryview]]) -> list[Any]:
    """Return byte strings in the order of their numbers, which must run from 0."""
    values: dict[int, memoryview] = {}
    for rest, payload in parts:
        number, dot, _ = rest.partition(".")
        if not dot or not _INDEX.fullmatch(number) or int(number) in values:
            raise ValueError(f"has members that do not go together, such as {rest!r}")
        values[int(number)] = payload
    if sorted(values) != list(range(len(values))):
        raise ValueError(f"lacks one of the values 0 to {max(values)}")
    return [values[number] for number in range(len(values))]


def _row(payload: memoryview) -> Feature:
    row = _parse_npy(payload)
    if row.ndim != 1:
        raise ValueError("is a table and no row")
    return row


def _check_empty(payload: memoryview) -> None:
    if len(payload):
        raise ValueError(f"has {len(payload)} bytes where none belong")
