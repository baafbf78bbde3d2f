"""The payloads of picked samples: read ahead for a window, handed out batch by batch, with what failed as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardset.dataset.reading import BatchReader, by_group
from shardset.errors import MissingFieldError, ShardsetError, StorageError, without_secrets
from shardset.policy import Place, Policy

from .windows import WindowReader, by_groups, by_layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset
    from shardset.index.catalog import Group, Layout
    from shardset.policy import Report

    from .fields import Fields
    from .windows import Window

    Int64s = NDArray[np.int64]


class Failure(NamedTuple):
    """Why a sample cannot be given.

    Attributes:
        code: The kind of fault, as policies and reports name it.
        error: What would be raised.
        place: Where it was met.
    """

    code: str
    error: Exception
    place: Place


class Columns(NamedTuple):
    """Samples, field by field.

    Attributes:
        keys: Their keys.
        fields: For each field, by its name in the batch, the payload of each sample.
    """

    keys: list[str]
    fields: dict[str, list[Any]]


class _Alike(NamedTuple):
    """Samples of one layout in a group: their rows, and where the group's shards and samples begin in the dataset."""

    group: Group
    layout: Layout
    rows: Int64s
    first_shard: int
    first_sample: int


class PayloadReader:
    """Reads fields of samples of one dataset.

    Args:
        dataset: The dataset.
        fields: Which fields.
        leave: Tells which fields are not read, since somebody opens them as files.
        policy: Its `defaults` stand in for missing fields; everything else becomes a `Failure`.
        report: Counts the defaults that were given.

    Attributes:
        ahead: Reads them ahead.
    """

    def __init__(
        self, dataset: Dataset, fields: Fields, *, leave: Callable[[str], bool], policy: Policy, report: Report
    ) -> None:
        self.dataset = dataset
        self.fields = fields
        self._records = fields.of_records()
        self._leave = leave
        self._lenient = Policy("skip", "skip", defaults=policy.defaults)
        self._report = report
        self.ahead = WindowReader(dataset, fields, leave)

    def read_ahead(self, samples: Int64s) -> Window:
        """As `WindowReader.read`."""
        return self.ahead.read(samples)

    def read_columns(self, samples: Int64s, window: Window, *, copy: bool) -> Columns | None:
        """Read samples field by field, in the order asked.

        Args:
            samples: Their numbers.
            window: What has been read ahead.
            copy: Give bytes; otherwise views of the map, or of what was read.

        Returns:
            None if it is not as simple as that: where fields differ or are missing, in records that are to be parsed,
            and if something cannot be read. Then `read` tells each sample's fate.
        """
        reader = BatchReader(window, self._lenient, self._report, _ignore)
        parts: list[tuple[Int64s, list[str], dict[str, list[Any]]]] = []
        for places, group, first_shard, rows in by_groups(self.dataset, samples):
            code = int(group.layout[rows[0]]) if len(rows) else -1
            if code < 0 or not (group.layout[rows] == code).all():
                return None
            if code == group.record_layout:
                called = list(self._records.names or ())
                if not self._records.is_payload or len(called) > 1:
                    return None
                payloads = list(reader.read_payloads(group, rows, first_shard, copy=copy, verify=True))
                if None in payloads:
                    return None
                parts.append((places, group.keys_of(rows), {called[0]: payloads}))
                continue
            chosen, names = self._column_names(group.layouts[code])
            if names is None:
                return None
            found = reader.read_columns(group, rows, first_shard, chosen)
            if found is None:
                return None
            columns = [list(map(memoryview.tobytes, column)) if copy else column for column in found.values()]
            parts.append((places, group.keys_of(rows), dict(zip(names, columns, strict=True))))
        if len(parts) == 1:
            return Columns(*parts[0][1:])
        return _merged(parts, len(samples))

    def _column_names(self, layout: Layout) -> tuple[list[str] | None, list[str] | None]:
        """Return the fields to read of samples of a layout, and what they are called; no names if it is not so simple.

        Of the fields, None stands for all.
        """
        if self.fields.names is None and not any(map(self._leave, layout.fields)):
            return None, list(layout.positions)
        chosen = self.fields.of_layout(layout)
        if len(set(chosen.values())) < len(chosen) or any(map(self._leave, chosen.values())):
            return None, None
        return list(chosen.values()), list(chosen)

    def read(self, samples: Int64s, window: Window, *, copy: bool) -> list[dict[str, Any] | Failure]:
        """Read samples, in the order asked.

        Args:
            samples: Their numbers.
            window: What has been read ahead.
            copy: Give bytes; otherwise views of the map, or of what was read, of members of tars and of whole records.

        Returns:
            For each its fields by name, and its key under ``"__key__"``; or why it cannot be given.
        """
        failures: dict[tuple[str, str], Failure] = {}

        def decide(error: ShardsetError, code: str, place: Place, _policy: Policy, _report: Report) -> None:
            failures[without_secrets(place.shard or ""), place.key or ""] = Failure(code, error, place)

        reader = BatchReader(window, self._lenient, self._report, decide)

        def read(group: Group, rows: Int64s, first_shard: int, first_sample: int) -> list[dict[str, Any] | Failure]:
            answers: list[Any] = [None] * len(rows)
            for code, places in by_layouts(group, rows):
                some = _Alike(group, group.layouts[code], rows[places], first_shard, first_sample)
                found = (self._read_records if some.layout.is_record else self._read_members)(reader, some, copy=copy)
                if len(places) == len(rows):
                    answers = list(found)
                else:
                    for place, sample in zip(places.tolist(), found, strict=True):
                        answers[place] = sample
            for place in [place for place, answer in enumerate(answers) if answer is None] if None in answers else ():
                row, shard = int(rows[place]), int(group.shard[rows[place]])
                url, key = self.dataset.shard_entry(first_shard + shard).url, group.key(row)
                names_of = (key, str(row - group.shard_span(shard)[0]))  # a record is called by its number
                shown = without_secrets(url)
                met = next((failures[shown, name] for name in names_of if (shown, name) in failures), None)
                answers[place] = met or _unknown(url, key)
                if met is not None and isinstance(met.error, StorageError):
                    self.ahead.lose(first_shard + shard, met.error)
            return answers

        return by_group(self.dataset.catalog, samples, read)

    def _read_members(self, reader: BatchReader, some: _Alike, *, copy: bool) -> Iterator[dict[str, Any] | None]:
        """Read samples of members of tars; None for those that cannot be given."""
        group, layout, rows, first_shard, first_sample = some
        chosen = {name: field for name, field in self.fields.of_layout(layout).items() if not self._leave(field)}
        names = list(dict.fromkeys(chosen.values()))
        found = reader.read(group, rows, first_shard, first_sample, names, copy=copy)
        if not self.fields.is_plain:
            found = (sample and _renamed(sample, chosen) for sample in found)
        left = {name: field for name, field in self._left(layout).items() if field is not None}
        return self._opened(found, left, rows + first_sample) if left else found

    def _opened(
        self, found: Iterator[dict[str, Any] | None], left: dict[str, str], numbers: Int64s
    ) -> Iterator[dict[str, Any] | None]:
        """Open the fields of samples that are not read."""
        for number, sample in zip(numbers.tolist(), found, strict=True):
            if sample is not None:
                sample |= {name: self.dataset[number].open(field) for name, field in left.items()}
            yield sample

    def _read_records(
        self, reader: BatchReader, some: _Alike, *, copy: bool
    ) -> Iterator[dict[str, Any] | Failure | None]:
        """Read records; None for those that cannot be given."""
        group, _, rows, first_shard, first_sample = some
        asked = self._records
        # Features stand in the batch as they are, where nobody decodes them, and are copied in any case.
        found = reader.read(
            group,
            rows,
            first_shard,
            first_sample,
            asked.required,
            copy=True,
            optional=asked.optional,
            views_of_records=not copy,
        )
        if self.fields.is_plain:
            return found
        numbers = (rows + first_sample).tolist()
        return (sample and self._named(sample, number) for number, sample in zip(numbers, found, strict=True))

    def _left(self, layout: Layout) -> dict[str, str | None]:
        """Return the fields of samples of a layout that are opened and not read, by name; None for absent ones."""
        if layout.is_record:
            return {}
        chosen = self.fields.of_layout(layout)
        return {
            name: field if layout.positions.get(field, -1) >= 0 else None
            for name, field in chosen.items()
            if self._leave(field)
        }

    def _named(self, record: dict[str, Any], number: int) -> dict[str, Any] | Failure:
        """Return a record under the names of the batch; a `Failure` if it has none of the fields for one of them."""
        key = record["__key__"]
        named: dict[str, Any] = {"__key__": key}
        for name, choices in (self._records.names or {}).items():
            field = next((choice for choice in choices if choice in record), None)
            if field is not None:
                named[name] = record[field]
                continue
            shard = self.dataset[number].shard
            if name not in self._lenient.defaults:
                what = f"record {key} has none of {', '.join(map(repr, choices))}"
                error = MissingFieldError(what, field=name, shard=shard, key=key)
                return Failure("missing_field", error, Place(shard, key=key, message=what))
            self._report.add("missing_field", Place(shard, key=key, message=f"no {name!r}"))
            named[name] = self._lenient.defaults[name]
        return named


def _renamed(sample: dict[str, Any], chosen: dict[str, str]) -> dict[str, Any]:
    named: dict[str, Any] = {"__key__": sample["__key__"]}
    return named | {name: sample[field] for name, field in chosen.items()}


def _unknown(shard: str, key: str) -> Failure:
    error = ShardsetError(f"sample {key!r} of {without_secrets(shard)} could not be read")
    return Failure("read_failed", error, Place(shard, key=key, message=error.message))


def _merged(parts: Sequence[tuple[Int64s, list[str], dict[str, list[Any]]]], count: int) -> Columns | None:
    """Put columns of several groups into the order asked, if they have the same names."""
    if not parts or any(list(fields) != list(parts[0][2]) for _, _, fields in parts):
        return None
    places = [place for part in parts for place in part[0].tolist()]
    order = sorted(range(count), key=places.__getitem__)

    def in_order(values: list[Any]) -> list[Any]:
        return [values[at] for at in order]

    keys = in_order([key for part in parts for key in part[1]])
    return Columns(keys, {name: in_order([each for part in parts for each in part[2][name]]) for name in parts[0][2]})


def _ignore(*_: Any) -> None:
    """Leave an error to `read`, which meets it again."""
