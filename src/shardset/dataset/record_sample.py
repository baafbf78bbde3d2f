"""A record of a TFRecord shard as a sample: its payload, checked, and the features in it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from shardset.errors import DecodeError, LimitError, MissingFieldError
from shardset.formats.example import is_sequence_example, parse_example, parse_sequence_example
from shardset.formats.tfrecord import FOOTER_SIZE, HEADER_SIZE, masked_crc32c, payload_fault
from shardset.ranges import ByteRange

from .sample import Sample

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from typing_extensions import Buffer

RECORD: Final = "__record__"
"""The field that is the payload of a record as a whole, whatever bytes these are. Only who names it gets it."""
LISTS: Final = "feature_lists/"
"""Stands before the name of a feature list that a SequenceExample's context has a feature of too."""


class RecordSample(Sample):
    """One record of a TFRecord shard. A mapping of feature to value, parsed when it is asked for.

    ``sample["label"]`` gives an array (float32 or int64) or a list of bytes, as `parse_example` does, always a list,
    however many values there are; None for a feature that has no kind. The feature lists of a SequenceExample are lists
    of these, a value a step. `record` is the payload, of whatever kind it is. Checksums are compared each time.
    """

    __slots__ = ()

    @property
    def record(self) -> bytes:
        """The payload.

        Raises:
            ChecksumError: It is damaged.
            StorageError: Reading failed.
        """
        place = self.record_range
        reader = self._source.reader(self.shard_index)
        frame = reader.read(place.offset, place.length + FOOTER_SIZE)
        payload, stored = frame[:-FOOTER_SIZE], int.from_bytes(frame[-FOOTER_SIZE:], "little")
        if masked_crc32c(payload) != stored:
            raise payload_fault(place.offset - HEADER_SIZE, stored, payload, int(self.key)).error(self.shard)
        return payload

    @property
    def record_range(self) -> ByteRange:
        """Where the payload stands in the shard; of a compressed one, before compression."""
        member = self._group.first_at[self._row]
        return ByteRange(self._group.offset_at[member], self._group.length_at[member])

    @property
    def fields(self) -> tuple[str, ...]:
        """The features of the record, in its order.

        Raises:
            ChecksumError: The record is damaged.
            DecodeError: It is no Example.
        """
        return tuple(self.read())

    @property
    def names(self) -> tuple[str, ...]:
        """What the record is called: its number."""
        return (self.key,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the values of each feature, in the order of `fields`."""
        return tuple(map(_value_size, self.read().values()))

    def byte_range(self, field: str) -> ByteRange:
        """Raise: a feature is a part of its record and stands nowhere by itself; see `record_range`."""
        raise LimitError(
            f"feature {field!r} is a part of record {self.key}",
            shard=self.shard,
            code="feature_range",
            member=self.key,
            hint="sample.record_range is where the record stands",
        )

    def read(self, *, views: bool = False) -> dict[str, Any]:
        """Read all features.

        Args:
            views: Give views in place of bytes.

        Raises:
            ChecksumError: The record is damaged.
            DecodeError: It is no Example.
        """
        return parse_record(self.record, None, shard=self.shard, key=self.key, views=views)

    def __getitem__(self, field: str) -> Any:
        """Read a feature.

        Raises:
            MissingFieldError: The record has no such feature (it is a KeyError too).
            ChecksumError: It is damaged.
            DecodeError: It is no Example.
            StorageError: Reading failed.
        """
        return self._value(field, views=False)

    def view(self, field: str) -> Any:
        """Read a feature, as ``sample[field]`` does, with views in place of bytes."""
        return self._value(field, views=True)

    def open(self, field: str) -> BinaryIO:
        """Open a feature of one bytes value as a seekable binary file.

        Raises:
            DecodeError: The feature is of another kind, or has not exactly one value.
            As ``sample[field]``.
        """
        value = self._value(field, views=True)
        if not isinstance(value, list) or len(value) != 1 or isinstance(value[0], list | np.ndarray):
            what = f"feature {field!r} is not one bytes value"
            raise DecodeError(what, field=field, shard=self.shard, key=self.key, hint="read it with sample[field]")
        return io.BytesIO(value[0])

    def _value(self, field: str, *, views: bool) -> Any:
        raw = self.record
        values = parse_record(raw, [field], shard=self.shard, key=self.key, views=views)
        if field not in values:
            there = parse_record(raw, None, shard=self.shard, key=self.key)
            hint = f"it has {', '.join(map(repr, there))}" if there else "it has none"
            hint = "sample.record is the record as a whole" if field == RECORD else hint
            what = f"record {self.key} has no feature {field!r}"
            raise MissingFieldError(what, field=field, shard=self.shard, key=self.key, hint=hint)
        return values[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __contains__(self, field: object) -> bool:
        return field in self.read()

    def __repr__(self) -> str:
        return f"RecordSample({self.key!r}, shard={self.shard!r})"


def _value_size(value: Any) -> int:
    if value is None:
        return 0
    return int(value.nbytes) if isinstance(value, np.ndarray) else sum(map(_element_size, value))


def _element_size(element: Any) -> int:
    return len(element) if isinstance(element, bytes | memoryview) else _value_size(element)


def parse_record(
    raw: Buffer, fields: Collection[str] | None, *, shard: str, key: str, views: bool = False
) -> dict[str, Any]:
    """Return the features of an Example or a SequenceExample, by name.

    Args:
        raw: The payload of a record.
        fields: Only these; None for all.
        shard: The record's shard, for messages.
        key: The record's number, for messages.
        views: Give views in place of bytes.

    Raises:
        DecodeError: It is neither.
    """
    try:
        if not is_sequence_example(raw):
            return parse_example(raw, fields, views=views)
        wanted = None if fields is None else [*fields, *(name.removeprefix(LISTS) for name in fields)]
        found = parse_sequence_example(raw, wanted, views=views)
    except DecodeError as error:
        error.shard, error.key = shard, key
        error.hint = f'any record is read whole: fields=["{RECORD}"], sample.record, or ds.read_records'
        raise
    values: dict[str, Any] = dict(found.context)
    for name, steps in found.feature_lists.items():
        values[LISTS + name if name in found.context else name] = steps
    return values if fields is None else {name: values[name] for name in fields if name in values}
