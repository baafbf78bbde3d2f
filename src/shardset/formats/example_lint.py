"""Where a `tf.train.Example` means one thing to protobuf and another to TensorFlow's own parser.

``tf.io.parse_single_example`` does not use protobuf: it has a parser of its own, which is stricter about some things,
looser about others, and reads a few in another way. Its ways were measured with TensorFlow 2.21.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from shardset.errors import DecodeError

from .example_wire import FIXED32, GROUP, LENGTH, VARINT, bytes_spans, float_list, int_list, iter_fields, readable

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .example_wire import Flat

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_ELEMENT_WIRE: Final = {_FLOAT_LIST: FIXED32, _INT64_LIST: VARINT}

LINT_CODES: Final = {
    "malformed": "the record cannot be parsed",
    "no_key": "an entry without a name: protobuf names it '', TensorFlow refuses the record",
    "key_not_utf8": "a name is not UTF-8: protobuf refuses the record, TensorFlow reads it",
    "duplicate_key": "a name stands there twice: the last counts, but TensorFlow passes over one without a kind",
    "repeated_key": "an entry has its name twice: protobuf takes the last, TensorFlow refuses the record",
    "no_value": "an entry without a value: protobuf gives a feature without a kind, TensorFlow refuses the record",
    "repeated_value": "an entry has its value in parts: protobuf joins them, TensorFlow refuses the record",
    "unknown_in_entry": "an entry has an unknown field: protobuf's C implementation drops the feature as a whole",
    "unknown_in_features": "among the features is an unknown field: protobuf skips it, TensorFlow refuses the record",
    "group": "the record has a group, which protobuf skips and TensorFlow refuses the record for",
    "no_kind": "a feature has no kind: protobuf keeps the name, TensorFlow takes the feature for missing",
    "unknown_in_feature": "a feature has an unknown field: protobuf skips it, TensorFlow refuses it as the first field",
    "several_kinds": "a feature has more than one kind: protobuf takes the last, TensorFlow the first or none",
    "repeated_list": "a feature has its list in parts: protobuf joins them, TensorFlow takes the first",
    "empty_list": "a feature has a kind and no values: TensorFlow refuses it where the shape is fixed",
    "mixed_packing": "a list is packed in parts: protobuf takes all values, TensorFlow the first packed part or none",
    "float_bytes": "a list of floats has bytes left over: protobuf refuses the record, TensorFlow drops the bytes",
}
"""What `lint_example` may find, with what becomes of it."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing in a record that programs disagree about.

    Attributes:
        code: One of `LINT_CODES`.
        field: Name of the feature, or None where it is about the record.
        message: What stands there and what becomes of it, one sentence.
        offset: The byte in the record where the entry or the list at fault begins.
    """

    code: str
    field: str | None
    message: str
    offset: int


def lint_example(raw: Buffer) -> list[LintFinding]:
    """Report what protobuf and TensorFlow's own parser do not agree about in an Example or SequenceExample.

    Args:
        raw: The record's payload.

    Returns:
        The findings in the order of the record; none for a record as TensorFlow itself writes them. Where the record
        is broken the last one has the code ``"malformed"``, and what stands behind is not looked at.
    """
    buf = readable(raw)
    lint = _Lint(buf)
    try:
        lint.record()
    except DecodeError as error:
        lint.findings.append(LintFinding("malformed", lint.name, error.message, lint.start))
    return lint.findings


class _Lint:
    """The findings in a record, and where in it the search is."""

    def __init__(self, buf: Flat) -> None:
        self._buf = buf
        self.findings: list[LintFinding] = []
        self.name: str | None = None
        self.start = 0

    def record(self) -> None:
        names: dict[int, set[str]] = {1: set(), 2: set()}
        for field, wire, start, stop in iter_fields(self._buf, 0, len(self._buf), 0):
            self.start = start
            if wire == GROUP:
                self._add("group")
            if field > 2 or wire != LENGTH:
                continue
            for number, inner, at, end in iter_fields(self._buf, start, stop, 1):
                if number == 1 and inner == LENGTH:
                    self._entry(at, end, names[field], is_list=field == 2)
                    self.name, self.start = None, end
                else:
                    self.start = at
                    self._add("unknown_in_features")

    def _add(self, code: str) -> None:
        self.findings.append(LintFinding(code, self.name, LINT_CODES[code], self.start))

    def _entry(self, start: int, stop: int, names: set[str], *, is_list: bool) -> None:
        self.start = start
        fields = list(iter_fields(self._buf, start, stop, 2))
        keys = [bytes(self._buf[at:end]) for number, wire, at, end in fields if number == 1 and wire == LENGTH]
        values = [(at, end) for number, wire, at, end in fields if number == 2 and wire == LENGTH]
        key = keys[-1] if keys else b""
        self.name = name = key.decode("utf-8", "surrogateescape")
        if not keys:
            self._add("no_key")
        if len(keys) > 1:
            self._add("repeated_key")
        if any(not _is_utf8(one) for one in keys):
            self._add("key_not_utf8")
        if name in names:
            self._add("duplicate_key")
        names.add(name)
        if len(keys) + len(values) < len(fields):
            self._add("unknown_in_entry")
        if not values:
            self._add("no_value")
        if len(values) > 1:
            self._add("repeated_value")
        if not is_list:
            self._feature(values, 3)
            return
        for first, last in values:
            for number, wire, at, end in iter_fields(self._buf, first, last, 3):
                if number == 1 and wire == LENGTH:
                    self._feature([(at, end)], 4)

    def _feature(self, parts: list[tuple[int, int]], depth: int) -> None:
        lists: list[tuple[int, int, int]] = []
        for start, stop in parts:
            self.start = start
            for number, wire, at, end in iter_fields(self._buf, start, stop, depth):
                if wire == LENGTH and number <= _INT64_LIST:
                    lists.append((number, at, end))
                else:
                    self._add("unknown_in_feature")
        if parts and not lists:
            self._add("no_kind")
        if len({number for number, _, _ in lists}) > 1:
            self._add("several_kinds")
        if any(one[0] == other[0] for one, other in pairwise(lists)):
            self._add("repeated_list")
        is_empty = bool(lists)
        for kind, at, end in lists:
            self.start = at
            is_empty = not self._list(kind, at, end, depth + 1) and is_empty
        if is_empty:
            self._add("empty_list")

    def _list(self, kind: int, start: int, stop: int, depth: int) -> bool:
        """Look at the body of a list, and tell whether it has values."""
        if kind == _BYTES_LIST:
            return bool(bytes_spans(self._buf, start, stop, depth))
        spans = [
            (wire, at, end)
            for number, wire, at, end in iter_fields(self._buf, start, stop, depth)
            if number == 1 and wire in {LENGTH, _ELEMENT_WIRE[kind]}
        ]
        packed = [end - at for wire, at, end in spans if wire == LENGTH]
        if packed and len(spans) > 1:
            self._add("mixed_packing")
        if kind == _FLOAT_LIST:
            if any(size % 4 for size in packed):
                self._add("float_bytes")
                return True
            return any(map(len, float_list(self._buf, start, stop, depth)))
        return any(map(len, int_list(self._buf, start, stop, depth)))


def _is_utf8(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
