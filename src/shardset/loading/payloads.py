"""The payloads of picked samples: read ahead for a window, handed out batch by batch, with what failed as values."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.dataset.reading import BatchReader, by_group
from shardset.errors import MissingFieldError, ShardsetError, StorageError, without_secrets
from shardset.formats.tfrecord import FOOTER_SIZE
from shardset.policy import Place, Policy
from shardset.storage.held import LostReader, Wanted, read_held
from shardset.storage.store import is_remote
from shardset.storage.threads import map_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset
    from shardset.index.catalog import Group, Layout, ShardEntry
    from shardset.policy import Report
    from shardset.storage.store import Reader

    Int64s = NDArray[np.int64]

_MORE: Final = 11
"""To spare requests, an eleventh more than payloads may be read, headers included,"""
_LEAST_MORE: Final = 64
"""and a sixty-fourth more in any case, since there are members that are smaller than their headers."""
_HEADER: Final = 512
_HEADERS: Final = 4 << 10
"""What stands between two neighbouring members of a tar is at most so long, and read with them: headers, padding."""
_REST: Final = 30.0


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


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields of samples are wanted, and what they are called in batches.

    Attributes:
        names: For each name in a batch the fields that it may be, the first that is there being taken; None for all
            fields, under their own names.
    """

    names: Mapping[str, tuple[str, ...]] | None

    @property
    def is_plain(self) -> bool:
        """Whether each field has one name, its own."""
        return self.names is None or all(choices == (name,) for name, choices in self.names.items())

    def kind_of(self, name: str) -> str:
        """Return the field that a name in the batch is decoded like: the first of its alternatives."""
        return name if self.names is None else self.names.get(name, (name,))[0]

    def of_layout(self, layout: Layout) -> dict[str, str]:
        """Return, for samples of a layout, the field behind each name."""
        if self.names is None:
            return {name: name for name in layout.fields}
        return {
            name: next((choice for choice in choices if choice in layout.positions), choices[0])
            for name, choices in self.names.items()
        }


def parse_fields(fields: Sequence[str] | Mapping[str, str] | str | None) -> Fields:
    """Read what a user says of fields.

    Args:
        fields: Names of fields; or for each name in the batch the field; alternatives separated by ``;``, under the
            name of the first. None for all.

    Raises:
        ValueError: A name is empty, or occurs twice, or begins with two underscores, or there is none.
        TypeError: A name is no text.
    """
    if fields is None:
        return Fields(None)
    names: dict[str, tuple[str, ...]] = {}
    listed = [fields] if isinstance(fields, str) else fields
    pairs = [(name, fields[name]) for name in fields] if isinstance(fields, dict) else [(None, each) for each in listed]
    for given, spec in pairs:
        if not isinstance(spec, str):
            raise TypeError(f"a field is named by a text, not {spec!r}")
        choices = tuple(choice.strip() for choice in spec.split(";"))
        name = choices[0] if given is None else given
        if not all(choices) or not name:
            raise ValueError(f"an empty name of a field: {spec!r}")
        if name.startswith("__"):
            raise ValueError(f"{name!r}: names that begin with two underscores are for what batches say of themselves")
        if name in names:
            raise ValueError(f"field {name!r} is named twice")
        names[name] = choices
    if not names:
        raise ValueError("no field is named; None stands for all of them")
    return Fields(names)


class Window:
    """What was read ahead for some samples of a dataset.

    Attributes:
        num_bytes: Bytes that were read.
        num_reads: In how many reads.
    """

    def __init__(
        self, source: PayloadReader, held: Mapping[int, Reader], num_bytes: int = 0, num_reads: int = 0
    ) -> None:
        self._source = source
        self._held = held
        self.num_bytes = num_bytes
        self.num_reads = num_reads

    def reader(self, shard_index: int) -> Reader:
        """Return the reader of a shard, with what is here of it."""
        return self._held.get(shard_index) or self._source.open(shard_index)

    def shard_entry(self, shard_index: int) -> ShardEntry:
        """Return what the catalog says of a shard."""
        return self._source.dataset.shard_entry(shard_index)


class PayloadReader:
    """Reads fields of samples of one dataset.

    A shard elsewhere that could not be read, however often it was tried, is taken for lost, and not tried again for
    half a minute: each attempt may take that long, and a batch has many samples of it.

    Args:
        dataset: The dataset.
        fields: Which fields.
        leave: Tells which fields are not read, since somebody opens them as files.
        policy: Its `defaults` stand in for missing fields; everything else becomes a `Failure`.
        report: Counts the defaults that were given.
    """

    def __init__(
        self, dataset: Dataset, fields: Fields, *, leave: Callable[[str], bool], policy: Policy, report: Report
    ) -> None:
        self.dataset = dataset
        self.fields = fields
        self._leave = leave
        self._lenient = Policy("skip", "skip", defaults=policy.defaults)
        self._report = report
        self._lost: dict[int, tuple[float, LostReader]] = {}
        self._maps_plain: bool | None = None

    # What is read ahead.

    @property
    def window(self) -> Window:
        """A window of which nothing was read ahead."""
        return Window(self, {})

    def open(self, shard_index: int) -> Reader:
        """Return the reader of a shard; of a lost one, what says so again.

        Raises:
            As `Dataset.reader`.
        """
        lost = self._lost.get(shard_index)
        if lost is not None:
            if time.monotonic() < lost[0]:
                return lost[1]
            self._lost.pop(shard_index, None)
        return self.dataset.reader(shard_index)

    def _lose(self, shard_index: int, error: StorageError) -> None:
        """Take a shard elsewhere for lost."""
        known = self._lost.get(shard_index)
        if known is None or known[1].error is not error:
            lost = LostReader(self.dataset.shard_entry(shard_index).url, error)
            self._lost[shard_index] = time.monotonic() + _REST, lost

    def holds(self, shard_index: int) -> bool:
        """Tell whether what is read ahead of a shard is held in memory; otherwise it is mapped."""
        if self.dataset.is_remote or self.dataset.shard_entry(shard_index).compression:
            return True
        if self._maps_plain is None:  # whether files can be mapped is decided for all of a store alike
            try:
                self._maps_plain = self.dataset.reader(shard_index).map() is not None
            except ShardsetError:
                return False
        return not self._maps_plain

    def sizes(self, samples: Int64s) -> Int64s:
        """Return how many bytes are held of each sample when it is read ahead, about; 0 where it is mapped."""
        sizes = np.zeros(len(samples), np.int64)
        for places, group, first_shard, rows in self._by_group(samples):
            shards = group.shard[rows]
            held = {shard for shard in np.unique(shards).tolist() if self.holds(first_shard + shard)}
            is_held = np.isin(shards, list(held))
            of_held = places[is_held]
            for members, at in self._members(group, rows[is_held]):
                bytes_of = group.length[members] + self._overhead(group, members)
                sizes[of_held[at]] += bytes_of.sum(axis=1)
        return sizes

    def _overhead(self, group: Group, members: Int64s) -> Int64s:
        """Return how many bytes stand before each member that are read with it: those of headers and padding."""
        before = np.maximum(members - 1, 0)
        gaps = group.offset[members] - group.offset[before] - group.length[before]
        return np.where((gaps >= 0) & (gaps <= _HEADERS) & (members > 0), gaps, _HEADER)

    def _by_group(self, samples: Int64s) -> Iterator[tuple[Int64s, Group, int, Int64s]]:
        """Yield for each group the places of its samples, the group, the number of its first shard, and their rows."""
        catalog = self.dataset.catalog
        if catalog.num_groups == 1:
            yield np.arange(len(samples)), catalog.group(0), 0, samples
            return
        groups = np.searchsorted(catalog.sample_starts, samples, side="right") - 1
        for number in np.unique(groups).tolist():
            places = np.flatnonzero(groups == number)
            rows = samples[places] - catalog.sample_starts[number]
            yield places, catalog.group(number), catalog.shard_starts[number], rows

    def _members(self, group: Group, rows: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield wanted members of samples of one layout, a row a sample, with the places of the samples in `rows`."""
        codes = group.layout[rows]
        for code in range(len(group.layouts)) if len(group.layouts) == 1 else np.unique(codes).tolist():
            places = np.arange(len(rows)) if len(group.layouts) == 1 else np.flatnonzero(codes == code)
            first, layout = group.first[rows[places]].astype(np.int64), group.layouts[code]
            if layout.is_record:
                yield first[:, None], places
                continue
            names = dict.fromkeys(self.fields.of_layout(layout).values())
            found = [layout.positions.get(name, -1) for name in names if not self._leave(name)]
            wanted = sorted(position for position in found if position >= 0)
            if wanted:
                yield first[:, None] + np.array(wanted, np.int64), places

    def read_ahead(self, samples: Int64s) -> Window:
        """Read what samples need, in offset order; of shards that are mapped, nothing is read.

        Raises nothing that has to do with reading: `read` meets it again.
        """
        wanted, payload_bytes = self._wanted(samples)
        if not wanted:
            return self.window
        if self.dataset.cache is not None:
            # Mapping a shard that the cache is to hold whole means to download it.
            is_mapped = (map_in_threads if len(wanted) > 1 else map)(self._is_mapped, list(wanted))
            wanted = {
                shard: ranges for (shard, ranges), mapped in zip(wanted.items(), is_mapped, strict=True) if not mapped
            }
        entry = self.dataset.shard_entry
        asked = {
            shard: Wanted(entry(shard).url, partial(self.open, shard), *ranges) for shard, ranges in wanted.items()
        }
        total = sum(int(each.lengths.sum()) for each in asked.values())
        spare = max(payload_bytes // _MORE - (total - payload_bytes), total // _LEAST_MORE)
        held = read_held(list(asked.values()), spare=spare)
        readers = {shard: reader for shard, reader in zip(asked, held.readers, strict=True) if reader is not None}
        for shard, reader in readers.items():
            if isinstance(reader, LostReader):
                self._lose(shard, reader.error)
        return Window(self, readers, held.num_bytes, held.num_reads)

    def _wanted(self, samples: Int64s) -> tuple[dict[int, tuple[Int64s, Int64s]], int]:
        """Return offsets and lengths to read of each shard of which something is held, and the bytes of payloads."""
        wanted: dict[int, tuple[Int64s, Int64s]] = {}
        payload_bytes = 0
        for _, group, first_shard, rows in self._by_group(samples):
            parts = list(self._members(group, rows))
            if not parts:
                continue
            members = np.concatenate([members.ravel() for members, _ in parts])
            shards = np.concatenate([np.repeat(group.shard[rows[at]], members.shape[1]) for members, at in parts])
            order = np.argsort(members)  # also by shard, and in each by offset
            members, shards = members[order], shards[order]
            is_whole = group.offset[members] >= 0  # a sparse file does not stand in one piece
            members, shards = members[is_whole], shards[is_whole]
            cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
            for start, stop in pairwise(cuts):
                if start < stop and self.holds(first_shard + int(shards[start])):
                    wanted[first_shard + int(shards[start])] = _ranges(group, members[start:stop])
                    payload_bytes += int(group.length[members[start:stop]].sum())
        return wanted, payload_bytes

    def _is_mapped(self, shard_index: int) -> bool:
        """Tell whether a shard is mapped; so is one that cannot be, since there is nothing to read ahead."""
        try:
            return self.open(shard_index).map() is not None
        except StorageError as error:
            if is_remote(self.dataset.shard_entry(shard_index).url):
                self._lose(shard_index, error)
        except ShardsetError:
            pass
        return True

    # What is handed out.

    def read(self, samples: Int64s, window: Window, *, copy: bool) -> list[dict[str, Any] | Failure]:
        """Read samples, in the order asked.

        Args:
            samples: Their numbers.
            window: What has been read ahead.
            copy: Give bytes; otherwise views of the map, or of what was read.

        Returns:
            For each its fields by name, and its key under ``"__key__"``; or why it cannot be given.
        """
        failures: dict[tuple[str, str], Failure] = {}

        def decide(error: ShardsetError, code: str, place: Place, _policy: Policy, _report: Report) -> None:
            failures[without_secrets(place.shard or ""), place.key or ""] = Failure(code, error, place)

        reader = BatchReader(window, self._lenient, self._report, decide)

        def read(group: Group, rows: Int64s, first_shard: int, first_sample: int) -> list[dict[str, Any] | Failure]:
            answers: list[Any] = [None] * len(rows)
            codes = group.layout[rows]
            for code in np.unique(codes).tolist():
                places = np.flatnonzero(codes == code)
                chosen = self._chosen(group.layouts[code])
                names = None if chosen is None else list(dict.fromkeys(chosen.values()))
                found = reader.read(group, rows[places], first_shard, first_sample, names, copy=copy)
                for place, sample in zip(places.tolist(), found, strict=True):
                    answers[place] = sample if sample is None else self._named(sample, chosen)
                left = {name: field for name, field in self._left(group.layouts[code]).items() if field is not None}
                for place in places.tolist() if left else ():
                    if isinstance(answers[place], dict):
                        number = first_sample + int(rows[place])
                        answers[place] |= {name: self.dataset[number].open(field) for name, field in left.items()}
            for place in [place for place, answer in enumerate(answers) if answer is None]:
                row, shard = int(rows[place]), int(group.shard[rows[place]])
                url, key = self.dataset.shard_entry(first_shard + shard).url, group.key(row)
                names_of = (key, str(row - group.shard_span(shard)[0]))  # a record is called by its number
                shown = without_secrets(url)
                met = next((failures[shown, name] for name in names_of if (shown, name) in failures), None)
                answers[place] = met or _unknown(url, key)
                if met is not None and isinstance(met.error, StorageError) and is_remote(url):
                    self._lose(first_shard + shard, met.error)
            return answers

        return by_group(self.dataset.catalog, samples, read)

    def _chosen(self, layout: Layout) -> dict[str, str] | None:
        """Return the fields to read of samples of a layout, by their names in the batch; None for all."""
        if layout.is_record:
            # Which of several features a record has, the record alone knows.
            names = self.fields.names if self.fields.is_plain else None
            return None if names is None else {name: name for name in names}
        return {name: field for name, field in self.fields.of_layout(layout).items() if not self._leave(field)}

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

    def _named(self, sample: dict[str, Any], chosen: dict[str, str] | None) -> dict[str, Any] | Failure:
        """Return a sample under the names of the batch; a `Failure` if a record lacks a field."""
        names = self.fields.names
        if names is None or self.fields.is_plain:
            return sample
        named: dict[str, Any] = {"__key__": sample["__key__"]}
        if chosen is not None:
            return named | {name: sample[field] for name, field in chosen.items()}
        for name, choices in names.items():
            field = next((choice for choice in choices if choice in sample), None)
            if field is None and name not in self._lenient.defaults:
                what = f"record {sample['__key__']} has none of {', '.join(map(repr, choices))}"
                error = MissingFieldError(what, field=name, key=sample["__key__"])
                return Failure("missing_field", error, Place(key=sample["__key__"], message=what))
            if field is None:
                self._report.add("missing_field", Place(key=sample["__key__"], message=f"no {name!r}"))
            named[name] = self._lenient.defaults[name] if field is None else sample[field]
        return named


def _unknown(shard: str, key: str) -> Failure:
    error = ShardsetError(f"sample {key!r} of {without_secrets(shard)} could not be read")
    return Failure("read_failed", error, Place(shard, key=key, message=error.message))


def _ranges(group: Group, members: Int64s) -> tuple[Int64s, Int64s]:
    """Return offsets and lengths of members of one shard, ascending; where they are neighbours, up to the next one."""
    offsets, lengths = group.offset[members], group.length[members]
    if group.record_layout >= 0 and _is_record(group, members):
        lengths = lengths + FOOTER_SIZE
    gaps = offsets[1:] - offsets[:-1] - lengths[:-1]
    is_near = (members[1:] - members[:-1] == 1) & (gaps >= 0) & (gaps <= _HEADERS)
    lengths[:-1] += np.where(is_near, gaps, 0)
    return offsets, lengths


def _is_record(group: Group, members: Int64s) -> bool:
    """Tell whether the members of one shard are records."""
    sample = int(np.searchsorted(group.first, members[0], side="right")) - 1
    return bool(group.layout[sample] == group.record_layout)
