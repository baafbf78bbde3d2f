"""Windows: the payloads of many samples, read ahead in offset order, whatever their shards lie on."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardset.errors import ShardsetError, StorageError
from shardset.formats.tfrecord import FOOTER_SIZE
from shardset.storage.held import LostReader, Wanted, read_held
from shardset.storage.local import LocalReader
from shardset.storage.planner import plan_reads
from shardset.storage.store import is_remote
from shardset.storage.threads import map_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset
    from shardset.index.catalog import Group, ShardEntry
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
_ADVISED_GAP: Final = 32 << 10
_MOST_ADVISED: Final = 2 << 20
_PROBES: Final = 16


class Window:
    """What was read ahead for some samples of a dataset.

    Attributes:
        num_bytes: Bytes that were read.
        num_reads: In how many reads.
    """

    def __init__(
        self, source: WindowReader, held: Mapping[int, Reader], num_bytes: int = 0, num_reads: int = 0
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


class Sizes(NamedTuple):
    """How much is read ahead of samples.

    Attributes:
        num_bytes: int64, about how many bytes for each sample; 0 where nothing is read ahead.
        are_held: Any of them are held in memory; others are in that of the system, and it may let go of them.
    """

    num_bytes: Int64s
    are_held: bool


class WindowReader:
    """Reads fields of samples of one dataset ahead.

    What lies elsewhere, in compressed shards, or in files that are not mapped, is read into memory. Of files that are
    mapped the system is told which parts will be needed, so that it reads those that are not in memory yet.

    A shard elsewhere that could not be read, however often it was tried, is taken for lost, and not tried again for
    half a minute: each attempt may take that long, and a batch has many samples of it.

    Args:
        dataset: The dataset.
        fields: Which fields.
        leave: Tells which fields are not read, since somebody opens them as files.
    """

    def __init__(self, dataset: Dataset, fields: Fields, leave: Callable[[str], bool]) -> None:
        self.dataset = dataset
        self._fields = fields
        self._leave = leave
        self._lost: dict[int, tuple[float, LostReader]] = {}
        self._kind: type[Reader] | None = None
        self._is_mapped = False

    @property
    def nothing(self) -> Window:
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

    def lose(self, shard_index: int, error: StorageError) -> None:
        """Take a shard for lost, if it is elsewhere."""
        url = self.dataset.shard_entry(shard_index).url
        known = self._lost.get(shard_index)
        if is_remote(url) and (known is None or known[1].error is not error):
            self._lost[shard_index] = time.monotonic() + _REST, LostReader(url, error)

    def holds(self, shard_index: int) -> bool:
        """Tell whether what is read ahead of a shard is held in memory."""
        if self.dataset.is_remote or self.dataset.shard_entry(shard_index).compression:
            return True
        self._look_at(shard_index)
        return self._kind is not None and not self._is_mapped

    def _advises(self, shard_index: int) -> bool:
        """Tell whether the system can be told what will be needed of a shard."""
        if self.holds(shard_index):
            return False
        return self._kind is LocalReader and LocalReader.can_advise()

    def _look_at(self, shard_index: int) -> None:
        """Look at a shard here that is not compressed: what one of them can, all can."""
        if self._kind is None:
            try:
                reader = self.dataset.reader(shard_index)
                self._is_mapped = reader.map() is not None
                self._kind = type(reader)
            except ShardsetError:
                return  # another one will do

    def sizes(self, samples: Int64s) -> Sizes:
        """Return how much is read ahead of each sample, without reading anything."""
        sizes = np.zeros(len(samples), np.int64)
        are_held = False
        for places, group, first_shard, rows in by_groups(self.dataset, samples):
            shards = group.shard[rows]
            listed = np.flatnonzero(np.bincount(shards)).tolist()
            held = [shard for shard in listed if self.holds(first_shard + shard)]
            are_held = are_held or bool(held)
            counted = (
                held if len(held) == len(listed) else [*held, *(s for s in listed if self._advises(first_shard + s))]
            )
            if len(counted) < len(listed):
                is_counted = np.isin(shards, counted)
                places, rows = places[is_counted], rows[is_counted]  # noqa: PLW2901 - the rest has 0
            for members, at in self._members(group, rows):
                bytes_of = group.length[members] + _overhead(group, members)
                sizes[places[at]] += bytes_of.sum(axis=1)
        return Sizes(sizes, are_held)

    def read(self, samples: Int64s) -> Window:
        """Read what samples need, in offset order.

        Nothing is raised that has to do with reading: who needs a sample meets it again.
        """
        if not self.dataset.is_remote and self._are_in_memory(samples[:: max(1, len(samples) // _PROBES)]):
            return self.nothing
        wanted, payload_bytes = self._wanted(samples)
        if self.dataset.cache is not None:
            # Mapping a shard that the cache is to hold whole means to download it.
            far = list(wanted)
            is_mapped = dict(zip(far, (map_in_threads if len(far) > 1 else map)(self._maps, far), strict=True))
            wanted = {shard: ranges for shard, ranges in wanted.items() if not is_mapped[shard]}
        held = {shard: ranges for shard, ranges in wanted.items() if self.holds(shard)}
        self._advise({shard: ranges for shard, ranges in wanted.items() if shard not in held})
        if not held:
            return self.nothing
        entry = self.dataset.shard_entry
        asked = [Wanted(entry(shard).url, partial(self.open, shard), *ranges) for shard, ranges in held.items()]
        total = sum(int(each.lengths.sum()) for each in asked)
        spare = max(payload_bytes // _MORE - (total - payload_bytes), total // _LEAST_MORE)
        found = read_held(asked, spare=spare)
        readers = {shard: reader for shard, reader in zip(held, found.readers, strict=True) if reader is not None}
        for shard, reader in readers.items():
            if isinstance(reader, LostReader):
                self.lose(shard, reader.error)
        return Window(self, readers, found.num_bytes, found.num_reads)

    def _wanted(self, samples: Int64s) -> tuple[dict[int, tuple[Int64s, Int64s]], int]:
        """Return offsets and lengths to read of each shard, and how many bytes of payloads that is."""
        wanted: dict[int, tuple[Int64s, Int64s]] = {}
        payload_bytes = 0
        for _, group, first_shard, rows in by_groups(self.dataset, samples):
            parts = list(self._members(group, rows))
            if not parts:
                continue
            members = np.concatenate([members.ravel() for members, _ in parts])
            shards = np.concatenate([np.repeat(group.shard[rows[at]], members.shape[1]) for members, at in parts])
            order = np.argsort(members)  # also by shard, and in each by offset
            members, shards = members[order], shards[order]
            is_whole = group.offset[members] >= 0  # a sparse file does not stand in one piece
            members, shards = members[is_whole], shards[is_whole]
            payload_bytes += int(group.length[members].sum())
            cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
            for start, stop in pairwise(cuts):
                if start < stop:
                    wanted[first_shard + int(shards[start])] = _ranges(group, members[start:stop])
        return wanted, payload_bytes

    def _members(self, group: Group, rows: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield wanted members of samples of one layout, a row a sample, with the places of the samples in `rows`."""
        for code, places in by_layouts(group, rows):
            first, layout = group.first[rows[places]].astype(np.int64), group.layouts[code]
            if layout.is_record:
                yield first[:, None], places
                continue
            names = dict.fromkeys(self._fields.of_layout(layout).values())
            found = [layout.positions.get(name, -1) for name in names if not self._leave(name)]
            wanted = sorted(position for position in found if position >= 0)
            if wanted:
                yield first[:, None] + np.array(wanted, np.int64), places

    def _maps(self, shard_index: int) -> bool:
        """Tell whether a shard is mapped; so is one that cannot be, since there is nothing to read ahead."""
        try:
            return self.open(shard_index).map() is not None
        except StorageError as error:
            self.lose(shard_index, error)
        except ShardsetError:
            pass
        return True

    def _are_in_memory(self, samples: Int64s) -> bool:
        """Tell whether the system has samples in memory, so that it need not be told of them."""
        for shard, (offsets, _) in self._wanted(samples)[0].items():
            if self.holds(shard):
                return False
            reader = self._file(shard)
            if reader is not None and not all(map(reader.is_in_memory, offsets.tolist())):
                return False
        return True

    def _advise(self, wanted: Mapping[int, tuple[Int64s, Int64s]]) -> None:
        """Tell the system what will be needed."""
        for shard, ranges in wanted.items():
            reader = self._file(shard)
            if reader is not None:
                plan = plan_reads(*ranges, gap=_ADVISED_GAP, most=_MOST_ADVISED)
                reader.advise(plan.offsets.tolist(), plan.lengths.tolist())

    def _file(self, shard_index: int) -> LocalReader | None:
        """Return the reader of a shard of which the system can be told what will be needed; else None."""
        try:
            reader = self.open(shard_index) if self._advises(shard_index) else None
        except ShardsetError:
            return None
        return reader if isinstance(reader, LocalReader) else None


def by_groups(dataset: Dataset, samples: Int64s) -> Iterator[tuple[Int64s, Group, int, Int64s]]:
    """Yield for each group the places of its samples, the group, the number of its first shard, and their rows."""
    catalog = dataset.catalog
    if catalog.num_groups == 1:
        yield np.arange(len(samples)), catalog.group(0), 0, samples
        return
    groups = np.searchsorted(catalog.sample_starts, samples, side="right") - 1
    for number in np.unique(groups).tolist():
        places = np.flatnonzero(groups == number)
        rows = samples[places] - catalog.sample_starts[number]
        yield places, catalog.group(number), catalog.shard_starts[number], rows


def by_layouts(group: Group, rows: Int64s) -> list[tuple[int, Int64s]]:
    """Return the layouts of samples of a group, and for each the places of those that have it."""
    codes = group.layout[rows]
    if len(codes) and (len(group.layouts) == 1 or bool((codes == codes[0]).all())):
        return [(int(codes[0]), np.arange(len(rows)))]
    return [(code, np.flatnonzero(codes == code)) for code in np.unique(codes).tolist()]


def _overhead(group: Group, members: Int64s) -> Int64s:
    """Return how many bytes stand before each member that are read with it: those of headers and padding."""
    before = np.maximum(members - 1, 0)
    gaps = group.offset[members] - group.offset[before] - group.length[before]
    return np.where((gaps >= 0) & (gaps <= _HEADERS) & (members > 0), gaps, _HEADER)


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
