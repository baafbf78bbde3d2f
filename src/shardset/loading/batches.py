"""One batch of a rank: read, decoded in threads or processes, faults settled.

A `Maker` has what all batches of a pass have in common. `Making` is one batch on its way: `tasks` may be carried out by
any threads, `finish` is for the thread that wants the batch.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from shardset.decoding.batches import stack
from shardset.decoding.registry import field_error
from shardset.errors import DecodeError, MissingExtraError, MissingFieldError, NoSamplesError, SampleError
from shardset.policy import Place

from .payloads import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardset.dataset.select import Selection
    from shardset.decoding.batches import BatchDecoder, FieldBatch
    from shardset.policy import Policy, Report

    from .blocks import Share
    from .feed import Feed
    from .payloads import Columns, PayloadReader
    from .windows import Window

    Int64s = NDArray[np.int64]
    Sample = dict[str, Any]
    Map = Callable[[Sample], Sample]

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 8
"""Samples that one task decodes: fewer cost more in handing over, more leave threads without work at a batch's end."""
_ATTEMPTS: Final = 64


class Work(NamedTuple):
    """What is sent to another process.

    Attributes:
        samples: Payloads by field, and what else is said of each sample.
        kinds: For each name of a field, the field that it is decoded like.
        shape: Height and width that a bucket asks for.
        defaults: What stands for a field that is missing, or cannot be decoded.
    """

    samples: list[Sample]
    kinds: dict[str, str]
    shape: tuple[int, int] | None
    defaults: dict[str, Any]


Outcome: TypeAlias = tuple["Sample | DecodeError", list["DecodeError"]]
"""What became of a sample, or why it could not be decoded; and which faults a default was given for."""


class ViewColumns(NamedTuple):
    """Columns of a view that go into batches, a value for each of its samples."""

    view: Selection
    values: dict[str, NDArray[Any]]

    def at(self, samples: Int64s) -> dict[str, NDArray[Any]]:
        """Return the values of some samples, which are numbered in the dataset, by column."""
        numbers = self.view.numbers
        places = samples if numbers is None else np.searchsorted(numbers, samples)
        return {name: values[places] for name, values in self.values.items()}


@dataclass(frozen=True, slots=True)
class Maker:
    """What the batches of a pass have in common.

    Attributes:
        feed: What comes when.
        readers: For each view of the feed, what reads its samples.
        names: For each view, what batches call it; None where there is one.
        decoder: Turns payloads into values.
        decodes: Whether it does anything; otherwise all fields stay as they are.
        copies: Fields are given to it, or left, as bytes; otherwise as views.
        maps: Called with each sample, a dict, in this order; each gives another.
        as_samples: Samples are wanted one by one, by `maps` or by who puts the batch together.
        elsewhere: Decodes and maps samples in another process; None for this one.
        policy: What to do about samples that cannot be given.
        report: Where that is counted.
        seed: Of the order, and of augmentations.
        substitutes: A sample that is skipped is replaced; otherwise it is left out.
        columns: For each view, the columns that batches have beside the fields.
        names_of_fields: What every batch has: the fields that were named; if none were, those that any sample of a tar
            has.
        lack: A sample that lacks a field of others is a fault; otherwise it has None there.
    """

    feed: Feed
    readers: Sequence[PayloadReader]
    names: tuple[str, ...] | None
    decoder: BatchDecoder
    decodes: bool
    copies: bool
    maps: tuple[Map, ...]
    as_samples: bool
    elsewhere: Callable[[Work], list[Outcome]] | None
    policy: Policy
    report: Report
    seed: int
    substitutes: bool
    columns: tuple[ViewColumns, ...]
    names_of_fields: tuple[str, ...]
    lack: bool

    def kind_of(self, name: str) -> str:
        """Return the field that a name in the batch is decoded like."""
        options = self.decoder.options
        return name if options is not None and name in options.fields else self.readers[0].fields.kind_of(name)

    def shard_url(self, source: int, sample: int) -> str:
        """Return the url of the shard that a sample of a view is of."""
        dataset = self.readers[source].dataset
        group, row, first_shard = dataset.catalog.locate(sample)
        return dataset.shard_entry(first_shard + int(group.shard_at[row])).url

    def settle(self, failure: Failure) -> None:
        """Raise a failure, or count it and go on, as the policy says.

        Raises:
            Exception: The failure's own error.
        """
        otherwise = self.policy.on_missing if failure.code == "missing_field" else self.policy.on_error
        action = self.policy.action(failure.code, otherwise)
        if action == "raise":
            if not isinstance(failure.error, SampleError):  # which says so itself
                failure.error.add_note(f"met at sample {failure.place.key!r}")
            raise failure.error
        self.report.add(failure.code, failure.place)
        if action == "warn":
            logger.warning("skipped: %s", failure.error)


class Making:
    """A batch on its way.

    Attributes:
        share: What is to come.
        numbers: For each sample its number in its dataset; of a substitute, where one stands in.
        sources: For each sample its view; None where there is one view.
        rows: For each sample its key and payloads by field; None where one was left out.
        fields: For each field, what it is decoded into.
        samples: Each sample as a dict; empty where samples are not wanted one by one.
        kept: Places of the samples that were not left out, after `finish`.
        ends: int64, in packs: the sample behind the last of each pack, among those that were not left out.
    """

    def __init__(self, maker: Maker, share: Share, windows: Sequence[Window]) -> None:
        """Read what the batch needs, and look at headers."""
        self._maker = maker
        self.share = share
        self._windows = windows
        picks = share.picks
        self.numbers: list[int] = picks.samples.tolist()
        self.sources: list[int] | None = None if picks.sources is None else picks.sources.tolist()
        self._seeds: list[int] = []
        if maker.decodes or maker.as_samples:
            seeds = share.seeds(maker.seed)
            self._seeds = (seeds if picks.ends is None else np.repeat(seeds, np.diff(picks.ends, prepend=0))).tolist()
        self._failures: dict[int, Failure] = {}
        self.fields: dict[str, FieldBatch] = {}
        self.samples: list[Any] = []
        self.kept: list[int] = []
        self.ends: Int64s | None = None
        self.rows: list[Sample | None] = []
        self._kinds: dict[str, str] = {}
        self._ready = self._read_plain(windows)
        if self._ready is None:
            self._read_rows(windows)

    def _read_plain(self, windows: Sequence[Window]) -> Columns | None:
        """Read what is left as it is, field by field; None if something is to be done about a sample."""
        maker = self._maker
        if maker.decodes or maker.as_samples or self.sources is not None or maker.columns[0].values:
            return None
        found = maker.readers[0].read_columns(self.share.picks.samples, windows[0], copy=maker.copies)
        return found if found is not None and len(found.fields) == len(maker.names_of_fields) else None

    def _read_rows(self, windows: Sequence[Window]) -> None:
        """Read sample by sample, and look at headers."""
        rows = self._read(self.share, windows)
        for place in [place for place, row in enumerate(rows) if isinstance(row, Failure)]:
            self._failures[place], rows[place] = rows[place], None
        self.rows = rows
        maker, buckets = self._maker, self.share.picks.buckets
        self._shape = maker.feed.shape(int(buckets[0])) if buckets is not None and len(buckets) else None
        self._begin()
        if maker.as_samples:
            self.samples = [None] * len(rows)

    @property
    def keys(self) -> list[str]:
        """The keys of the samples that were not left out, after `finish`."""
        if self._ready is not None:
            return self._ready.keys
        return [row["__key__"] for row in self.rows if row is not None]

    def _begin(self) -> None:
        """Begin the fields of those samples that have been read."""
        names: dict[str, None] = dict.fromkeys(self._maker.names_of_fields)
        seen: Any = None
        for row in self.rows:
            if row is not None and row.keys() != seen:
                seen = row.keys()
                names |= dict.fromkeys(seen)
        names.pop("__key__", None)
        for name in self._maker.columns[0].values:
            if name in names:
                raise ValueError(f"samples have a field {name!r}, which is a column too: name the field otherwise")
        for name in names:
            self._kinds[name] = kind = self._maker.kind_of(name)
            payloads = [row and row.get(name) for row in self.rows]
            self.fields[name] = self._maker.decoder.begin(kind, payloads, shape=self._shape)

    def _url(self, place: int) -> str:
        return self._maker.shard_url(self._source(place), self.numbers[place])

    def _source(self, place: int) -> int:
        return 0 if self.sources is None else self.sources[place]

    def _read(self, share: Share, windows: Sequence[Window]) -> list[Any]:
        maker, picks = self._maker, share.picks
        copy = maker.copies or maker.elsewhere is not None  # views do not pickle
        if picks.sources is None:
            rows: list[Any] = maker.readers[0].read(picks.samples, windows[0], copy=copy)
            return rows
        rows = [None] * len(picks.samples)
        for source in np.unique(picks.sources).tolist():
            places = np.flatnonzero(picks.sources == source)
            found = maker.readers[source].read(picks.samples[places], windows[source], copy=copy)
            for place, row in zip(places.tolist(), found, strict=True):
                rows[place] = row
        return rows

    # In any threads.

    def tasks(self) -> list[Callable[[], None]]:
        """Return what is to be done before `finish`, in any order and by any threads."""
        if self._ready is not None:
            return []
        if not self._maker.as_samples and not self._maker.decodes:
            self._make_some(0, len(self.rows))  # not worth a thread
            return []
        starts = range(0, len(self.rows), _AT_ONCE)
        return [partial(self._make_some, start, min(start + _AT_ONCE, len(self.rows))) for start in starts]

    def _make_some(self, start: int, stop: int) -> None:
        places = [place for place in range(start, stop) if place not in self._failures]
        if self._maker.elsewhere is not None:
            self._make_elsewhere(places)
            return
        for place in places:
            failure = self._make(place)
            if failure is not None:
                self._failures[place] = failure

    def _make(self, place: int) -> Failure | None:
        """Decode a sample, and give it to the functions of `map`; return why that cannot be."""
        row, seed, maker = self.rows[place], self._seeds[place] if self._seeds else 0, self._maker
        assert row is not None  # noqa: S101 - it was read
        for name, batch in self.fields.items():
            if name not in row:
                if name not in maker.policy.defaults:
                    if maker.lack:
                        return self._lack(place, row, name)
                    batch.put(place, None)
                    continue
                self._give_default(place, name)
                maker.report.add("missing_field", Place(self._url(place), key=row["__key__"]))
                continue
            if name in maker.policy.defaults and row[name] is maker.policy.defaults[name]:
                self._give_default(place, name)
                continue
            try:
                batch.decode(place, row[name], seed)
            except MissingExtraError:
                raise
            except Exception as error:  # noqa: BLE001 - decoders raise anything; the policy decides
                failure = self._failed(place, row, name, error)
                if name not in maker.policy.defaults:
                    return failure
                self._give_default(place, name)
                maker.report.add(failure.code, failure.place)
        if self.samples:
            self.samples[place] = apply_maps(maker.maps, self.sample(place))
        return None

    def _give_default(self, place: int, name: str) -> None:
        """Put the policy's default for a field into a place: bytes are a payload, anything else is a value."""
        seed = self._seeds[place] if self._seeds else 0
        give_default(self.fields[name], place, self._maker.policy.defaults[name], seed)

    def _make_elsewhere(self, places: list[int]) -> None:
        """Do what `_make` does in another process."""
        assert self._maker.elsewhere is not None  # noqa: S101 - by who calls
        sent: list[Sample] = []
        asked: list[int] = []
        for place in places:
            row = self.rows[place]
            assert row is not None  # noqa: S101 - it was read
            lacking = [name for name in self.fields if name not in row]
            faults = [name for name in lacking if name not in self._maker.policy.defaults] if self._maker.lack else []
            if faults:
                self._failures[place] = self._lack(place, row, faults[0])
                continue
            for name in lacking:
                if name in self._maker.policy.defaults:
                    self._maker.report.add("missing_field", Place(self._url(place), key=row["__key__"]))
            # What the reader has put there for a missing field is for the other process to put.
            defaults = self._maker.policy.defaults
            given = {name: value for name, value in row.items() if name not in defaults or value is not defaults[name]}
            sent.append({**given, **self._about(place)})
            asked.append(place)
        work = Work(sent, self._kinds, self._shape, dict(self._maker.policy.defaults))
        for place, (answer, faults_met) in zip(asked, self._maker.elsewhere(work), strict=True):
            row = self.rows[place] or {}
            for fault in faults_met:
                failure = self._failed(place, row, fault.field, fault)
                self._maker.report.add(failure.code, failure.place)
            if isinstance(answer, DecodeError):
                self._failures[place] = self._failed(place, row, answer.field, answer)
            else:
                self.samples[place] = answer

    def _lack(self, place: int, row: Sample, name: str) -> Failure:
        key, shard = row["__key__"], self._url(place)
        what = f"sample {key!r} has no field {name!r}"
        hint = "name the fields that all samples have, or give a default: Policy(defaults={...})"
        error = MissingFieldError(what, field=name, shard=shard, key=key, hint=hint)
        return Failure("missing_field", error, Place(shard, key=key, message=what))

    def _failed(self, place: int, row: Sample, name: str | None, error: Exception) -> Failure:
        key, shard = row["__key__"], self._url(place)
        placed = field_error(error, name or "?", shard=shard, key=key)
        placed.__cause__ = error
        return Failure("decode_failed", placed, Place(shard, key=key, message=placed.message))

    def _about(self, place: int) -> Sample:
        """Return what is said of a sample beside its fields."""
        row = self.rows[place] or {}
        about = {
            "__key__": row["__key__"],
            "__shard__": self._url(place),
            "__index__": self.numbers[place],
            "__seed__": self._seeds[place],
        }
        for name, values in self._maker.columns[self._source(place)].at(np.array([self.numbers[place]])).items():
            about[name] = values[0].item() if isinstance(values[0], np.generic) else values[0]
        if self._maker.names is not None:
            about["__source__"] = self._maker.names[self._source(place)]
        return about

    def sample(self, place: int) -> Sample:
        """Return a decoded sample as the functions of `map` and `collate` get it."""
        return {**{name: batch.value(place) for name, batch in self.fields.items()}, **self._about(place)}

    # In the thread that wants the batch, when all tasks are done.

    def finish(self) -> dict[str, Any]:
        """Settle what failed, and return the values of each field; none where samples are wanted one by one.

        Raises:
            Exception: A sample cannot be given, and the policy says to raise.
            NoSamplesError: None of many spare samples could be given either.
        """
        for place in sorted(self._failures):
            self._replace(place, self._failures[place])
        if self._ready is not None:
            self.kept = list(range(len(self.numbers)))
        else:
            self.kept = [place for place, row in enumerate(self.rows) if row is not None]
        ends = self.share.picks.ends
        self.ends = None if ends is None else np.searchsorted(np.array(self.kept, np.int64), ends)
        if self.samples:
            self.samples = [self.samples[place] for place in self.kept]
            return {}
        if self._ready is not None:
            return dict(self._ready.fields)
        if len(self.kept) == len(self.rows):
            return {name: batch.finish() for name, batch in self.fields.items()}
        return {name: stack([batch.value(place) for place in self.kept]) for name, batch in self.fields.items()}

    def _replace(self, place: int, failure: Failure) -> None:
        """Put another sample in the place of one that failed, or leave it out, as the policy says."""
        maker, share = self._maker, self.share
        defaults = maker.policy.defaults
        if self.rows[place] is None and self.fields and all(name in defaults for name in self.fields):
            self._mark(place, failure)
            return
        maker.settle(failure)
        self.rows[place] = None
        if not maker.substitutes or share.picks.ends is not None:
            return
        for attempt in range(_ATTEMPTS):
            source, number = maker.feed.spare(int(share.epochs[place]), int(share.positions[place]), attempt)
            self.numbers[place] = number
            if self.sources is not None:
                self.sources[place] = source
            row = maker.readers[source].read(np.array([number], np.int64), self._windows[source], copy=True)[0]
            if not isinstance(row, Failure):
                self.rows[place] = row
                if not self.fields:  # none of the batch could be read
                    self._begin()
                again = self._again(place)
                if again is None:
                    maker.report.add("substituted", failure.place)
                    return
                row = again
            maker.settle(row)
        raise NoSamplesError(
            f"none of {_ATTEMPTS} spare samples could be given either",
            shard=failure.place.shard,
            key=failure.place.key,
            hint="most of the data cannot be read or decoded: loader.report says why",
        ) from failure.error

    def _again(self, place: int) -> Failure | None:
        if self._maker.elsewhere is None:
            return self._make(place)
        self._failures.pop(place, None)
        self._make_elsewhere([place])
        return self._failures.get(place)

    def _mark(self, place: int, failure: Failure) -> None:
        """Give the defaults for a sample that could not be read at all."""
        maker = self._maker
        dataset = maker.readers[self._source(place)].dataset
        group, row, _ = dataset.catalog.locate(self.numbers[place])
        self.rows[place] = {"__key__": group.key(row)}
        for name in self.fields:
            self._give_default(place, name)
        maker.report.add(failure.code, failure.place)
        if self.samples:
            self.samples[place] = apply_maps(maker.maps, self.sample(place))


def give_default(batch: FieldBatch, place: int, value: Any, seed: int) -> None:
    """Put a policy's default for a field into a place: bytes are a payload, anything else is a value."""
    if isinstance(value, bytes):
        try:
            batch.decode(place, value, seed)
        except MissingExtraError:
            raise
        except Exception:  # noqa: BLE001 - then the bytes themselves are the value
            batch.put(place, value)
    else:
        batch.put(place, deepcopy(value))  # functions of `map` may write into it


def apply_maps(maps: Sequence[Map], sample: Sample) -> Sample:
    """Return what functions make of a sample, one after the other.

    Raises:
        TypeError: One gives no dict.
        Exception: Whatever one raises, with a note on which sample it was.
    """
    for function in maps:
        name = getattr(function, "__qualname__", None) or repr(function)
        try:
            made: Any = function(sample)
        except Exception as error:
            error.add_note(f"in {name}, called with sample {sample.get('__key__')!r} of {sample.get('__shard__')}")
            raise
        if not isinstance(made, dict):
            what = f"{name} returned {type(made).__name__} for sample {sample.get('__key__')!r}"
            raise TypeError(f"{what}: a function of map gives a dict")
        sample = made
    return sample
