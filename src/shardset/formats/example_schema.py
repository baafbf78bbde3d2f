"""What the Examples of a shard hold: every feature with its kinds, its lengths, and how often it is missing.

Records are counted, not decoded: the wire tells a list's kind and length. What is written in an unusual way is decoded,
so that the counts are of what `parse_example` gives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from .example import is_sequence_example, parse_example, parse_sequence_example
from .example_encode import packed_size
from .example_layout import (
    BYTES_LIST,
    EXPECTED,
    FLOAT_LIST,
    INT64_LIST,
    ONE_STRING,
    byte_strings,
    entry_layout,
    remember,
    whole_features,
)
from .example_wire import readable
from .geometry import sniff_kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from .example import Feature
    from .example_wire import Flat

    Count = tuple[int, int, int]

KIND_NAMES: Final = {BYTES_LIST: "bytes", FLOAT_LIST: "float", INT64_LIST: "int64"}
_NO_KIND: Final = (0, 0, 0)
_GOES_ON: Final = bytes(range(0x80, 0x100))
_MOST_FOUND: Final = 1 << 14
"""So many features are kept before they are counted."""
_FEW_BYTES: Final = 100
_SAMPLES: Final = 8
"""So many values of a feature are looked at, in the records that have it first."""
_CONTROLS: Final = bytes(sorted({*range(0x20), 0x7F} - set(b"\t\n\r")))


@dataclass(frozen=True, slots=True)
class FeatureSchema:
    """What all records say of one feature.

    Attributes:
        name: The feature's name.
        is_list: Whether it is one of a SequenceExample's feature lists. Then `min_length`, `max_length`, `no_kind` and
            `empty` are of its steps.
        kinds: ``"bytes"``, ``"float"``, ``"int64"``: those that it has, in this order; more than one is a conflict, and
            none means that no record gives it a kind.
        min_length: The fewest values, with a kind; None if there are no kinds.
        max_length: The most.
        min_steps: Of a list the fewest steps, else None.
        max_steps: Of a list the most.
        records: How many records have it, in whatever state.
        missing: How many do not.
        no_kind: In how many it has no kind.
        empty: In how many it has a kind and no values.
        size: Bytes of all its values, numbers packed; without tags and lengths.
        content: What its byte strings are, such as ``"jpeg"`` or ``"text"``, by the first bytes of the first of them;
            None where that is not known or they differ.
    """

    name: str
    is_list: bool
    kinds: tuple[str, ...]
    min_length: int | None
    max_length: int | None
    min_steps: int | None
    max_steps: int | None
    records: int
    missing: int
    no_kind: int
    empty: int
    size: int
    content: str | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """``(n,)`` where it has n values each time, else None."""
        return (self.max_length,) if self.max_length is not None and self.min_length == self.max_length else None


@dataclass(slots=True)
class _Totals:
    """What is known of one feature so far."""

    kinds: set[int] = field(default_factory=set)
    lengths: tuple[int, int] | None = None
    steps: tuple[int, int] | None = None
    records: int = 0
    no_kind: int = 0
    empty: int = 0
    size: int = 0

    def add(self, count: Count, times: int) -> None:
        kind, length, size = count
        if not kind:
            self.no_kind += times
            return
        self.kinds.add(kind)
        self.lengths = _span(self.lengths, (length, length))
        self.size += size * times
        if not length:
            self.empty += times

    def merge(self, other: _Totals) -> None:
        self.kinds |= other.kinds
        self.lengths = _span(self.lengths, other.lengths)
        self.steps = _span(self.steps, other.steps)
        self.records += other.records
        self.no_kind += other.no_kind
        self.empty += other.empty
        self.size += other.size


class SchemaBuilder:
    """Adds up records, Examples and SequenceExamples in any mixture, to a schema.

    It can be pickled, and those of several shards be merged.

    Attributes:
        num_records: How many records were added.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self._found: list[tuple[str, Count]] = []
        self._features: dict[str, _Totals] = {}
        self._lists: dict[str, _Totals] = {}
        self._contents: dict[tuple[bool, str], list[str | None]] = {}

    def add(self, raw: Buffer) -> None:
        """Add a record.

        Raises:
            DecodeError: It is neither an Example nor a SequenceExample. The record does not count.
        """
        buf = readable(raw)
        start = whole_features(buf)
        found: dict[str, Count] = {}
        if start and self._scan(buf, start, found):
            self._found += found.items()
        else:
            self._add_parsed(buf)
        self.num_records += 1
        if len(self._found) > _MOST_FOUND:
            self._add_up()

    def update(self, records: Iterable[Buffer]) -> None:
        """Add records.

        Raises:
            DecodeError: As `add` does; those before it are counted.
        """
        for raw in records:
            self.add(raw)

    def merge(self, other: SchemaBuilder) -> None:
        """Add what another builder has counted, which stays as it is."""
        self.num_records += other.num_records
        self._found += other._found
        self._add_up()
        for mine, theirs in ((self._features, other._features), (self._lists, other._lists)):
            for name, totals in theirs.items():
                mine.setdefault(name, _Totals()).merge(totals)
        for key, contents in other._contents.items():
            kept = self._contents.setdefault(key, [])
            kept += contents[: _SAMPLES - len(kept)]

    def schema(self) -> tuple[FeatureSchema, ...]:
        """Return the schema of what was added so far: features by name, then feature lists by name."""
        self._add_up()
        return tuple(
            self._feature_schema(name, totals[name], is_list=totals is self._lists)
            for totals in (self._features, self._lists)
            for name in sorted(totals)
        )

    def _scan(self, buf: Flat, position: int, found: dict[str, Count]) -> bool:
        """Find the kinds and lengths of the features; False of a record that has to be parsed."""
        stop, name, contents = len(buf), "", self._contents
        while position < stop:
            expected = EXPECTED.get((name, buf[position + 1])) if position + 1 < stop else None
            if expected is not None and buf[position : position + expected[1]] == expected[0]:
                _, length, size, kind, name = expected
                at = position + length
                position = at + size
                if position > stop:
                    return False
            else:
                layout = entry_layout(buf, position, stop)
                if layout is None:
                    return False
                remember(name, buf, position, layout)
                name, kind, at, position = layout
                size = position - at
            if kind == INT64_LIST:
                if size and buf[position - 1] >= 0x80:
                    return False
                found[name] = (INT64_LIST, size if size < 2 else _count_varints(buf, at, size), size)
            elif kind == ONE_STRING:
                found[name] = (BYTES_LIST, 1, size)
                if len(contents.get((False, name), ())) < _SAMPLES:
                    self._look(name, buf[at : at + 64], is_list=False)
            elif kind == FLOAT_LIST:
                found[name] = (FLOAT_LIST, size >> 2, size)
            else:
                found[name] = self._count(name, byte_strings(buf, buf, at, position, 4) if kind else None)
        return True

    def _add_parsed(self, buf: Flat) -> None:
        parsed = parse_sequence_example(buf) if is_sequence_example(buf) else None
        context = parse_example(buf) if parsed is None else parsed.context
        self._found += [(name, self._count(name, value)) for name, value in context.items()]
        for name, steps in parsed.feature_lists.items() if parsed else ():
            totals = self._lists.setdefault(name, _Totals())
            totals.records += 1
            totals.steps = _span(totals.steps, (len(steps), len(steps)))
            for step in steps:
                totals.add(self._count(name, step, is_list=True), 1)

    def _count(self, name: str, value: Feature, *, is_list: bool = False) -> Count:
        if value is None:
            return _NO_KIND
        if isinstance(value, list):
            if value and len(self._contents.get((is_list, name), ())) < _SAMPLES:
                self._look(name, value[0][:64], is_list=is_list)
            return BYTES_LIST, len(value), sum(map(len, value))
        if value.dtype == np.float32:
            return FLOAT_LIST, len(value), value.nbytes
        return INT64_LIST, len(value), packed_size(value)  # type: ignore[arg-type] # the other kind of array

    def _look(self, name: str, head: Flat, *, is_list: bool) -> None:
        if head:
            self._contents.setdefault((is_list, name), []).append(sniff_kind(head) or _text(bytes(head)))

    def _add_up(self) -> None:
        for (name, count), times in Counter(self._found).items():
            totals = self._features.setdefault(name, _Totals())
            totals.records += times
            totals.add(count, times)
        self._found.clear()

    def _feature_schema(self, name: str, totals: _Totals, *, is_list: bool) -> FeatureSchema:
        contents = set(self._contents.get((is_list, name), ()))
        return FeatureSchema(
            name=name,
            is_list=is_list,
            kinds=tuple(KIND_NAMES[kind] for kind in sorted(totals.kinds)),
            min_length=totals.lengths[0] if totals.lengths else None,
            max_length=totals.lengths[1] if totals.lengths else None,
            min_steps=totals.steps[0] if totals.steps else None,
            max_steps=totals.steps[1] if totals.steps else None,
            records=totals.records,
            missing=self.num_records - totals.records,
            no_kind=totals.no_kind,
            empty=totals.empty,
            size=totals.size,
            content=contents.pop() if len(contents) == 1 else None,
        )


def _count_varints(buf: Flat, start: int, size: int) -> int:
    """Return how many numbers stand in so many bytes: each has one byte that says that it ends."""
    if size < _FEW_BYTES:
        return len(bytes(buf[start : start + size]).translate(None, _GOES_ON))
    return int(np.count_nonzero(np.frombuffer(buf, np.int8, size, start) >= 0))


def _span(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the least and the greatest of two pairs, of which either may be absent."""
    if one is None or other is None:
        return other if one is None else one
    return min(one[0], other[0]), max(one[1], other[1])


def _text(head: bytes) -> str | None:
    """Return "text" for UTF-8 without control characters, which may be cut off in the middle of a character."""
    for cut in range(4):
        try:
            head[: len(head) - cut].decode()
        except UnicodeDecodeError:
            continue
        return None if len(head.translate(None, _CONTROLS)) < len(head) or cut == len(head) else "text"
    return None
