"""Samples in units of one bucket each: which bucket comes when, and which of its samples.

Buckets are planned from the sizes in the catalog alone, as images are shown, and numbered by aspect (width by height),
then by area. Each bucket has its members in an order of its own, made of the seed and the bucket's size. That order is
cut into units; the units of all buckets come in an order that seed and epoch decide, those of one bucket one after the
other. Without a shuffle buckets come by number, and samples as in the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c

from shardset.errors import StateError
from shardset.policy import Place

from .bucket_store import dataset_buckets
from .buckets import Shape
from .feed import Picks, spare_place
from .order import mix_key, order_of, permutation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardset.dataset.select import Selection
    from shardset.dataset.views import Buckets
    from shardset.policy import Report

    from .order import Order, Resolved

    Int64s = NDArray[np.int64]

UNITS: Final = 5
"""The part of a key that tells orders of units, and orders in a bucket, from all other draws of a seed."""
_FEW_RUNS: Final = 128
"""A window of a bucket has so many runs at least, if one of the whole order has: with fewer it is a poor shuffle."""
_FEW_SAMPLES: Final = 4096
"""It has about so many samples at least: smaller ones take longer to work out."""
_AHEAD: Final = 1024
"""So many places of a bucket more are worked out than are asked for, where no window says how many."""
_EPOCHS_KEPT: Final = 2
_OWN_SPARES: Final = 16
"""After so many attempts at another sample of a bucket, one of any bucket will do."""
_LARGEST_UNIT: Final = 1 << 31
_NAMED: Final = 8
"""So many buckets are named in a report, for each reason."""


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """What one bucket gives in an epoch.

    Attributes:
        height: Pixels that its images are brought to.
        width: Pixels.
        samples: How many samples are of this shape.
        units: How many units the epoch has of it.
        leftovers: Samples that fill no unit here: left out of the epoch (``"drop"``, and the last bucket of
            ``"merge"``), topped up with repeated ones (``"pad"``), or moved on to the next bucket (``"merge"``, with
            those that had come from the one before).
    """

    height: int
    width: int
    samples: int
    units: int
    leftovers: int


class _Members(NamedTuple):
    """Samples by bucket.

    Attributes:
        sizes: Height and width of each bucket, by aspect and area.
        firsts: int64: members of bucket `n` are ``samples[firsts[n]:firsts[n] + counts[n]]``, ascending.
        counts: int64, none of them 0.
        samples: int64, numbers of samples in their dataset.
    """

    sizes: list[tuple[int, int]]
    firsts: Int64s
    counts: Int64s
    samples: Int64s


class _Ahead(NamedTuple):
    """A stretch of a bucket's own order.

    Attributes:
        epoch: The epoch.
        start: Its first place.
        values: int64, what comes from there on.
    """

    epoch: int
    start: int
    values: Int64s

    @property
    def stop(self) -> int:
        return self.start + len(self.values)


class BucketFeed:
    """Samples of a view, in units of one bucket. A `Feed`.

    What is worked out for an epoch takes 8 bytes a unit, and the members 8 bytes a sample.

    Attributes:
        views: The one view.
        lanes: 1.
        unit: Samples in a unit.
        buckets: The settings.
    """

    lanes = 1

    def __init__(
        self,
        view: Selection,
        buckets: Buckets,
        shuffle: Resolved,
        seed: int,
        unit: int,
    ) -> None:
        """Sort the view's samples into buckets, which reads no payload.

        Args:
            view: The samples.
            buckets: How they are grouped; what it says of the unit wins.
            shuffle: How they are shuffled, resolved for all of them; each bucket has its part of a window.
            seed: The loader's.
            unit: Samples in a unit, where `buckets` leaves it open: the global batch.

        Raises:
            ValueError: The unit is not a positive number below 2^31.
            As `Dataset.catalog`.
        """
        self.views = (view,)
        self.buckets = buckets
        self._shuffle = shuffle
        self._seed = seed
        self._members = _sort(view, buckets)
        self._own: dict[int, Order] = {}
        self._ahead: dict[int, _Ahead] = {}
        total = int(self._members.counts.sum())
        # Which sample is in which bucket: sizes may have changed where nothing else has.
        sizes = np.array(self._members.sizes, np.int64)
        self._digest = crc32c(np.ascontiguousarray(self._members.samples).data, crc32c(sizes.tobytes()))
        self._window = order_of(shuffle, total, seed).window_end(0) if total else 1
        unit = buckets.unit or unit
        if not 0 < unit < _LARGEST_UNIT:
            raise ValueError(f"a unit has {unit} samples, which is not between 1 and {_LARGEST_UNIT - 1}")
        self._cut(unit)

    def _cut(self, unit: int) -> None:
        """Cut the orders of all buckets into units of some number of samples."""
        counts = self._members.counts
        ends = _running(counts)  # what comes before a bucket, were all of them in a row
        if self.buckets.leftovers == "drop":
            before = _running(counts // unit)
        elif self.buckets.leftovers == "pad":
            before = _running(-(-counts // unit))
        else:
            # To use what is left of a bucket first in the next one is to cut all buckets in a row; a unit that two or
            # more of them share is of the last.
            before = ends // unit
        self.unit = unit
        self._ends = ends
        self._units_before = before
        self._plans: dict[int, Int64s] = {}

    @property
    def num_units(self) -> int:
        """How many units an epoch has."""
        return int(self._units_before[-1])

    def count(self, epoch: int, most: int | None = None) -> int:  # noqa: ARG002 - as the protocol has it
        """As `Feed.count`."""
        return self.num_units * self.unit

    def window_end(self, epoch: int, position: int) -> int:
        """As `Feed.window_end`: about as many samples as a window of the order has, in whole units."""
        step = max(1, self._window // self.unit) * self.unit
        return min((position // step + 1) * step, self.count(epoch))

    def take(self, epoch: int, positions: range) -> Picks:
        """As `Feed.take`.

        Raises:
            IndexError: The epoch has no such position.
        """
        if not positions:
            none = np.zeros(0, np.int64)
            return Picks(none, buckets=none.astype(np.int32))
        if not 0 <= positions[0] <= positions[-1] < self.count(epoch):
            raise IndexError(f"positions {positions[0]} to {positions[-1]} of an epoch of {self.count(epoch)}")
        if positions.step != 1:
            every = self.take(epoch, range(positions[0], positions[-1] + 1))
            return Picks._make(None if column is None else column[:: positions.step] for column in every)
        unit = self.unit
        first, last = positions.start // unit, (positions.stop - 1) // unit
        units = self._units(epoch, first, last + 1)
        buckets = np.searchsorted(self._units_before, units, "right") - 1
        inside = slice(positions.start - first * unit, positions.stop - first * unit)
        if first == last:
            samples = self._samples(epoch, int(buckets[0]), int(units[0]) * unit, inside.start, inside.stop)
        else:
            samples = self._rows(epoch, units, buckets).reshape(-1)[inside]
        repeated = self._repeated(units, buckets)
        return Picks(
            samples,
            buckets=np.repeat(buckets.astype(np.int32), unit)[inside],
            repeated=None if repeated is None else repeated.reshape(-1)[inside],
        )

    def spare(self, epoch: int, position: int, attempt: int) -> tuple[int, int]:
        """As `Feed.spare`: a sample of the position's bucket."""
        number = position // self.unit
        unit = int(self._units(epoch, number, number + 1)[0])
        bucket = int(np.searchsorted(self._units_before, unit, "right")) - 1
        if attempt >= _OWN_SPARES:  # a small bucket may have nothing else; images of others are brought to its size
            samples = self._members.samples
        else:
            first = int(self._members.firsts[bucket])
            samples = self._members.samples[first : first + int(self._members.counts[bucket])]
        return 0, int(samples[spare_place(self._seed, epoch, position, attempt, len(samples))])

    def shape(self, bucket: int) -> tuple[int, int]:
        """As `Feed.shape`: the scaled size, or the exact one where nothing is scaled."""
        return self._members.sizes[bucket]

    def state(self, epoch: int, position: int) -> dict[str, Any]:  # noqa: ARG002
        """As `Feed.state`: the unit, and the settings that the order depends on."""
        return {"unit": self.unit, "buckets": self._settings()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As `Feed.load_state`. The unit of the state is taken over, unless the settings name another one."""
        unit, settings = state.get("unit"), state.get("buckets")
        if not isinstance(unit, int) or isinstance(unit, bool) or not 0 < unit < _LARGEST_UNIT:
            raise StateError(f"the state's unit of a bucket is {unit!r}, which is no number of samples")
        if settings != self._settings():
            raise StateError(
                f"the state is of buckets with [area, multiple, leftovers, checksum of sizes] {settings!r}, "
                f"these have {self._settings()!r}",
                hint="give Buckets the values of the state; where the checksum differs, images have other sizes than "
                "then",
            )
        if self.buckets.unit not in (None, unit):
            raise StateError(
                f"the state has units of {unit} samples of a bucket, these buckets have units of {self.buckets.unit}",
                hint=f"Buckets(unit={unit}), or no unit, goes on where the state was saved",
            )
        if unit != self.unit:
            self._cut(unit)

    def account(self, epoch: int, report: Report) -> None:  # noqa: ARG002
        """As `Feed.account`.

        The codes are ``no_geometry`` (samples of unknown size, which are in no bucket), ``bucket_leftover_dropped``,
        ``bucket_padded`` (positions with a sample for another time) and ``bucket_merged`` (samples that are moved to
        another bucket).
        """
        counts, ends, unit = self._members.counts, self._ends, self.unit
        unknown = len(self.views[0]) - int(ends[-1])
        if unknown:
            report.add("no_geometry", Place(message="width and height are not known"), unknown)
        if self.buckets.leftovers == "drop":
            self._report(report, "bucket_leftover_dropped", counts % unit)
        elif self.buckets.leftovers == "pad":
            self._report(report, "bucket_padded", -counts % unit)
        else:
            behind = ends[1:] - np.maximum(ends[:-1], ends[1:] // unit * unit)  # own samples in a unit not yet full
            is_lost = ends[1:] // unit == self.num_units
            self._report(report, "bucket_leftover_dropped", np.where(is_lost, behind, 0))
            self._report(report, "bucket_merged", np.where(is_lost, 0, behind))

    def table(self) -> list[BucketSummary]:
        """Return what each bucket gives in an epoch, by number."""
        filled = self._ends[1:] if self.buckets.leftovers == "merge" else self._members.counts
        columns = self._members.counts, np.diff(self._units_before), filled % self.unit
        return [
            BucketSummary(*size, *values)
            for size, *values in zip(self._members.sizes, *(column.tolist() for column in columns), strict=True)
        ]

    def _report(self, report: Report, code: str, counts: Int64s) -> None:
        """Count something of each bucket, the first few of them by name."""
        some = np.flatnonzero(counts)
        for bucket in some[:_NAMED].tolist():
            height, width = self._members.sizes[bucket]
            place = Place(message=f"bucket {width}x{height} (width x height): {counts[bucket]}")
            report.add(code, place, int(counts[bucket]))
        rest = int(counts[some[_NAMED:]].sum())
        if rest:
            report.add(code, count=rest)

    def _settings(self) -> list[Any]:
        buckets = self.buckets
        area = None if buckets.area is None else buckets.multiple
        return [buckets.area, area, buckets.leftovers, self._digest]

    def _units(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the numbers of the units that come at places ``[start, stop)``. Bucket after bucket numbers them."""
        if self._shuffle.kind == "sequential":
            return np.arange(start, stop)
        plan = self._plans.get(epoch)
        if plan is None:
            plan = _shuffled_units(mix_key(self._seed, epoch, UNITS), np.diff(self._units_before))
            # A new dict, so that a thread that looks into the old one is not disturbed.
            kept = [number for number in self._plans if number != epoch][1 - _EPOCHS_KEPT :]
            self._plans = {number: self._plans[number] for number in kept} | {epoch: plan}
        return plan[start:stop]

    def _rows(self, epoch: int, units: Int64s, buckets: Int64s) -> Int64s:
        """Return the samples of units: int64, a row a unit."""
        # Units that follow each other in one bucket are asked for together.
        ranks = np.argsort(units, kind="stable")
        ranked, bucket_of = units[ranks], buckets[ranks]
        borders = np.flatnonzero((np.diff(ranked) != 1) | (np.diff(bucket_of) != 0)) + 1
        edges = [0, *borders.tolist(), len(units)]
        rows = np.empty((len(units), self.unit), np.int64)
        for start, stop in pairwise(edges):
            size = (stop - start) * self.unit
            samples = self._samples(epoch, int(bucket_of[start]), int(ranked[start]) * self.unit, 0, size)
            rows[ranks[start:stop]] = samples.reshape(-1, self.unit)
        return rows

    def _samples(self, epoch: int, bucket: int, base: int, start: int, stop: int) -> Int64s:
        """Return samples ``[start, stop)`` of the units of a bucket that begin with sample `base` of all units."""
        parts = [
            self._members.samples[self._members.firsts[source] + self._places(epoch, source, places)]
            for source, places in self._pieces(bucket, base + start, base + stop)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _pieces(self, bucket: int, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """Say of which buckets, and which places of their orders, samples ``[start, stop)`` of all units are."""
        if self.buckets.leftovers == "merge":
            source = int(np.searchsorted(self._ends, start, "right")) - 1
            while start < stop:
                first, end = int(self._ends[source]), min(stop, int(self._ends[source + 1]))
                yield source, range(start - first, end - first)
                start, source = end, source + 1
            return
        first, count = int(self._units_before[bucket]) * self.unit, int(self._members.counts[bucket])
        start, stop = start - first, stop - first
        while start < stop:  # behind the last member (`pad`) the first comes again
            place = start % count
            end = min(place + stop - start, count)
            yield bucket, range(place, end)
            start += end - place

    def _repeated(self, units: Int64s, buckets: Int64s) -> NDArray[np.bool_] | None:
        """Tell which samples of units pad them: a row a unit; None if none does."""
        if self.buckets.leftovers != "pad":
            return None
        padding = -self._members.counts[buckets] % self.unit
        last = np.flatnonzero((units == self._units_before[buckets + 1] - 1) & (padding > 0))
        if not len(last):
            return None
        repeated = np.zeros((len(units), self.unit), np.bool_)
        for row, many in zip(last.tolist(), padding[last].tolist(), strict=True):
            repeated[row, self.unit - many :] = True
        return repeated

    def _places(self, epoch: int, bucket: int, turns: range) -> Int64s:
        """Return which members of a bucket come at some turns of its own order."""
        order = self._order(bucket)
        if self._shuffle.kind == "sequential":
            return order.take(epoch, turns)
        kept = self._ahead.get(bucket)
        if kept is None or kept.epoch != epoch or not kept.start <= turns.start <= kept.stop:
            kept = _Ahead(epoch, turns.start, np.zeros(0, np.int64))
        if turns.stop > kept.stop:
            # Units of all buckets take turns, so that few of each are asked for at once.
            stop = order.window_end(turns.stop - 1) if self._shuffle.run > 1 else min(turns.stop + _AHEAD, order.count)
            values = kept.values[turns.start - kept.start :], order.take(epoch, range(kept.stop, stop))
            kept = _Ahead(epoch, turns.start, np.concatenate(values))
            self._ahead[bucket] = kept
        return kept.values[turns.start - kept.start : turns.stop - kept.start]

    def _order(self, bucket: int) -> Order:
        order = self._own.get(bucket)
        if order is None:
            count = int(self._members.counts[bucket])
            # A window of positions has of each bucket what is its share, so that it reads whole windows of each.
            shuffle = self._shuffle
            if shuffle.kind == "windowed":
                runs = shuffle.runs * count // int(self._ends[-1])
                few = max(_FEW_RUNS, _FEW_SAMPLES // shuffle.run)
                shuffle = replace(shuffle, runs=max(runs, min(shuffle.runs, few)), lanes=1)
            seed = mix_key(self._seed, UNITS, *self._members.sizes[bucket])
            order = self._own[bucket] = order_of(shuffle, count, seed)
        return order


def _sort(view: Selection, buckets: Buckets) -> _Members:
    """Sort the samples of a view into buckets."""
    shape = Shape("geometry-tuple") if buckets.area is None else Shape("geometry-tuple", buckets.area, buckets.multiple)
    sorted_samples = dataset_buckets(view.dataset, shape, upright=True)
    samples, starts = sorted_samples.samples, sorted_samples.starts
    if view.numbers is not None:
        is_wanted = np.zeros(view.dataset.catalog.num_samples, np.bool_)
        is_wanted[view.numbers] = True
        chosen = is_wanted[samples]
        samples, starts = samples[chosen], _running(chosen)[starts]
    sizes = [(int(high), int(wide)) for wide, high in (key[1:-1].split(", ") for key in sorted_samples.keys)]
    counts = np.diff(starts)
    kept = [bucket for bucket, count in enumerate(counts.tolist()) if count]
    kept.sort(key=lambda bucket: _by_shape(*sizes[bucket]))
    return _Members([sizes[bucket] for bucket in kept], starts[:-1][kept], counts[kept], samples)


def _by_shape(height: int, width: int) -> tuple[float, int]:
    return width / height, width * height


def _shuffled_units(key: int, counts: Int64s) -> Int64s:
    """Return units in an order in which any bucket may come at any place, and the units of one bucket ascend."""
    bucket = np.repeat(np.arange(len(counts), dtype=np.uint16 if len(counts) <= 1 << 16 else np.int64), counts)
    places = np.argsort(bucket[permutation(key, len(bucket))], kind="stable")
    plan = np.empty(len(bucket), np.int64)
    plan[places] = np.arange(len(bucket))
    return plan


def _running(counts: NDArray[Any]) -> Int64s:
    """Return sums of the first none, one, two ... of some counts."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
