"""The payloads of picked samples: read ahead for a window, handed out batch by batch, with what failed as values."""

from __future__ import annotations

import time
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

    from .fields import Fields

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


class Columns(NamedTuple):
    """Samples, field by field.

    Attributes:
        keys: Their keys.
        fields: For each field, by its name in the batch, the payload of each sample.
    """

    keys: list[str]
    fields: dict[str, list[bytes]]


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
        for code, places in _by_layout(group, rows):
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

    def read_columns(self, samples: Int64s, window: Window) -> Columns | None:
        """Read samples as bytes, field by field, in the order asked.

        Args:
            samples: Their numbers.
            window: What has been read ahead.

        Returns:
            None if it is not as simple as that: where fields differ or are missing, in records, and if something cannot
            be read. Then `read` tells each sample's fate.
        """
        reader = BatchReader(window, self._lenient, self._report, _ignore)
        parts: list[tuple[Int64s, list[str], dict[str, list[bytes]]]] = []
        for places, group, first_shard, rows in self._by_group(samples):
            code = int(group.layout[rows[0]]) if len(rows) else -1
            if code < 0 or code == group.record_layout or not (group.layout[rows] == code).all():
                return None
            chosen, names = self._column_names(group.layouts[code])
            if names is None:
                return None
            found = reader.read_columns(group, rows, first_shard, chosen)
            if found is None:
                return None
            copies = [list(map(memoryview.tobytes, column)) for column in found.values()]
            parts.append((places, group.keys_of(rows), dict(zip(names, copies, strict=True))))
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
            for code, places in _by_layout(group, rows):
                chosen = self._chosen(group.layouts[code])
                names = None if chosen is None else list(dict.fromkeys(chosen.values()))
                found = reader.read(group, rows[places], first_shard, first_sample, names, copy=copy)
                if self.fields.is_plain:
                    if len(places) == len(rows):
                        answers = list(found)
                    else:
                        for place, sample in zip(places.tolist(), found, strict=True):
                            answers[place] = sample
                else:
                    for place, sample in zip(places.tolist(), found, strict=True):
                        answers[place] = sample if sample is None else self._named(sample, chosen)
                left = {name: field for name, field in self._left(group.layouts[code]).items() if field is not None}
                for place in places.tolist() if left else ():
                    if isinstance(answers[place], dict):
                        number = first_sample + int(rows[place])
                        answers[place] |= {name: self.dataset[number].open(field) for name, field in left.items()}
            for place in [place for place, answer in enumerate(answers) if answer is None] if None in answers else ():
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


def _by_layout(group: Group, rows: Int64s) -> list[tuple[int, Int64s]]:
    """Return the layouts of samples of a group, and for each the places of those that have it."""
    codes = group.layout[rows]
    if len(codes) and (len(group.layouts) == 1 or bool((codes == codes[0]).all())):
        return [(int(codes[0]), np.arange(len(rows)))]
    return [(code, np.flatnonzero(codes == code)) for code in np.unique(codes).tolist()]


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


def _merged(parts: Sequence[tuple[Int64s, list[str], dict[str, list[bytes]]]], count: int) -> Columns | None:
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
