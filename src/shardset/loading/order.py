"""Orders as pure arithmetic: they depend on nothing but the numbers they are made from.

What stands here is frozen: saved states refer to it, and golden values in the tests hold it.

An `Order` says which sample comes at which position of an epoch. `SequentialOrder` leaves the samples as they are,
`RandomOrder` puts each anywhere, and `WindowedOrder` is what a loader shuffles by: it reads runs of neighbouring
samples, each at once, a window of many runs at a time, and shuffles within the window. All work out any stretch of
positions by itself, in constant memory, for up to 2^40 samples.

How `WindowedOrder` goes, for N samples and an epoch:

1. The samples are rotated by ``mix_key(seed, epoch, 1) % N``, so that runs begin elsewhere in each epoch, and cut into
   ``R = N // run`` runs; what is left over (less than a run) stands behind them.
2. The runs are permuted (`permuted`, with the key ``mix_key(seed, epoch, 2)``).
3. They are dealt out to the lanes: of the permuted runs, lane `l` gets numbers ``l, lanes + l, 2 * lanes + l, ...``.
   One run for each lane is a row. The rows are divided evenly into as few windows as hold at most `runs` runs each;
   to the last window comes the rest as well (the runs that fill no row, and what fills no run), of which each lane
   gets an equal part, whose samples are neighbours.
4. Windows of more than 32,768 samples are gone through in turns, so that about so many are worked out at a time: in
   each turn all runs give an equal part. For that, the samples of a run come in the order of a permutation of the
   window (key ``mix_key(seed, epoch, 3, window)``), rotated by the draw of the run (key ``mix_key(seed, epoch, 3)``).
   The rest comes in the last turn.
5. In each turn, each lane shuffles its samples: they are sorted by their draw (key ``mix_key(seed, epoch, 3, window,
   turn)``), of which as many of the low bits as number them are not looked at.
6. Position `p` takes the next sample of lane ``p % lanes``.

Runs of one sample are permuted already: there windows only say what is read together, and ``sample = permuted(p)``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast, get_args

import numpy as np

from .draws import MASK, draws, draws_at, mix_key, permutation, permuted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

__all__ = [
    "LARGEST_WINDOW",
    "LONGEST_RUN",
    "ORDER_VERSION",
    "Order",
    "RandomOrder",
    "Resolved",
    "SequentialOrder",
    "Shuffle",
    "WindowedOrder",
    "draws",
    "mix_key",
    "order_of",
    "permutation",
    "permuted",
    "resolve",
]

ORDER_VERSION: Final = 1
"""Goes up if an order ever changes; a state holds it."""

_ROTATION, _RUNS, _LANES, _RANDOM = 1, 2, 3, 9
"""Parts of keys, which tell the draws of an epoch for one purpose from those for others."""

_TURN: Final = 1 << 15
_TURNS_KEPT: Final = 16
_PLAIN_WINDOW: Final = 1 << 14
LONGEST_RUN: Final = 256
"""Samples of a run, at most."""
LARGEST_WINDOW: Final = 1 << 20
"""Samples of a window, at most."""
_LANE: Final = 8
"""Runs that a lane has at least, or else there are fewer lanes: of one run alone a lane is no mixture."""
_MOST_RUNS: Final = 1 << 24
_MOST_LANES: Final = 1 << 16

Kind = Literal["sequential", "windowed", "random"]


class Order(Protocol):
    """Which sample comes when: a bijection of positions to samples, both in ``[0, count)``, for each epoch."""

    @property
    def count(self) -> int:
        """How many samples, and so positions, there are."""

    @property
    def lanes(self) -> int:
        """Positions that are equal modulo a divisor of this read the same runs; 1 where neighbours do."""

    def window_end(self, position: int) -> int:
        """Return the position behind those that are best read together with `position`."""

    def take(self, epoch: int, positions: range) -> Int64s:
        """Return the samples that come at positions of an epoch: int64, one for each.

        Raises:
            IndexError: A position is not in ``[0, count)``.
        """


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """Samples as they stand in the dataset.

    Attributes:
        count: How many there are.
    """

    count: int

    @property
    def lanes(self) -> int:
        """As `Order.lanes`."""
        return 1

    def window_end(self, position: int) -> int:
        """As `Order.window_end`: windows have 16,384 positions."""
        return _plain_end(position, self.count)

    def take(self, epoch: int, positions: range) -> Int64s:  # noqa: ARG002 - as the protocol has it
        """As `Order.take`."""
        return _numbers(positions, self.count)


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """Each sample anywhere, so that each is read by itself.

    Attributes:
        count: How many there are.
        seed: What decides the order, with the epoch.
    """

    count: int
    seed: int

    @property
    def lanes(self) -> int:
        """As `Order.lanes`."""
        return 1

    def window_end(self, position: int) -> int:
        """As `Order.window_end`: windows have 16,384 positions."""
        return _plain_end(position, self.count)

    def take(self, epoch: int, positions: range) -> Int64s:
        """As `Order.take`."""
        return permuted(mix_key(self.seed, epoch, _RANDOM), self.count, _numbers(positions, self.count))


def _plain_end(position: int, count: int) -> int:
    return min(count, (position // _PLAIN_WINDOW + 1) * _PLAIN_WINDOW)


def _numbers(positions: range, count: int) -> Int64s:
    """Return positions as an array.

    Raises:
        IndexError: One is not in ``[0, count)``.
    """
    if positions:
        low, high = sorted((positions[0], positions[-1]))
        if low < 0 or high >= count:
            raise IndexError(f"position {low if low < 0 else high} of an order of {count}")
    return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class WindowedOrder:
    """Runs of neighbours in random order, shuffled within windows of many runs. The module says how.

    Each run is read by one lane, except for the fewer than `lanes` ones in the last window that several lanes share:
    each a part of its own. What was worked out last is kept, so that positions can be asked for bit by bit.

    Attributes:
        count: How many samples there are.
        seed: What decides the order, with the epoch.
        run: Samples of a run.
        runs: The most runs of a window, a multiple of `lanes`; the last one has less than `lanes` more.
        lanes: In how many lanes a window is laid. With few runs a lane each, the order is a poor shuffle: `order_of`
            chooses fewer lanes.
    """

    count: int
    seed: int
    run: int
    runs: int
    lanes: int

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: They are no sizes of windows.
        """
        if self.count < 0 or min(self.run, self.runs, self.lanes) < 1 or self.runs % self.lanes:
            raise ValueError(f"no order has windows of {self.runs} runs of {self.run} samples in {self.lanes} lanes")

    @property
    def rows(self) -> int:
        """How often each lane gets a whole run in an epoch."""
        return self.count // self.run // self.lanes

    @property
    def windows(self) -> int:
        """How many windows an epoch has."""
        return max(1, -(-self.rows // (self.runs // self.lanes)))

    @property
    def turns(self) -> int:
        """How many turns a window is gone through in."""
        return max(1, min(self.run, -(-min(self.runs * self.run, self.count) // _TURN)))

    def first_row(self, window: int) -> int:
        """Return the first row of a window; of that behind the last one, how many rows there are."""
        return self.rows * window // self.windows

    def window_at(self, position: int) -> int:
        """Return the window that holds a position."""
        rows = self.rows
        row = min(position // (self.lanes * self.run), rows - 1)
        return ((row + 1) * self.windows - 1) // rows if rows else 0

    def window_start(self, window: int) -> int:
        """Return the first position of a window; of that behind the last one, the count."""
        return self.first_row(window) * self.lanes * self.run if window < self.windows else self.count

    def window_end(self, position: int) -> int:
        """As `Order.window_end`."""
        return self.window_start(self.window_at(position) + 1)

    def take(self, epoch: int, positions: range) -> Int64s:
        """As `Order.take`. What is worked out is the lanes concerned in the turns concerned."""
        numbers = _numbers(positions, self.count)
        if self.run == 1:
            return _rotated(permuted(mix_key(self.seed, epoch, _RUNS), self.count, numbers), self, epoch)
        if positions.step < 0:
            return self.take(epoch, positions[::-1])[::-1]
        at = 0
        while at < len(positions):
            turn = _turn(self, epoch, *self._turn_at(positions[at]))
            several = positions[at : at + len(range(positions[at], turn.stop, positions.step))]
            numbers[at : at + len(several)] = turn.take(several)
            at += len(several)
        return numbers

    def _turn_at(self, position: int) -> tuple[int, int]:
        """Return the window and the turn that hold a position."""
        window = self.window_at(position)
        rows = self.first_row(window + 1) - self.first_row(window)
        if not rows:
            return window, self.turns - 1
        given = min((position - self.window_start(window)) // (rows * self.lanes), self.run - 1)
        return window, ((given + 1) * self.turns - 1) // self.run


def _rotated(numbers: Int64s, order: WindowedOrder, epoch: int) -> Int64s:
    """Rotate numbers in place: where runs begin to where they begin in this epoch."""
    numbers += mix_key(order.seed, epoch, _ROTATION) % max(order.count, 1)
    return _wrapped(numbers, order.count)


def _wrapped(numbers: Int64s, end: int) -> Int64s:
    """Take numbers below twice the end modulo the end, in place."""
    values = numbers.view(np.uint64)
    np.minimum(values, values - np.uint64(end), out=values)  # below zero wraps around to what is large
    return numbers


@lru_cache(_TURNS_KEPT)
def _turn(order: WindowedOrder, epoch: int, window: int, number: int) -> _Turn:
    return _Turn(order, epoch, window, number)


class _Turn:
    """A turn of a window, whose lanes are shuffled when they are asked for.

    Threads may shuffle one lane at the same time: both write the same.

    Attributes:
        start: Its first position.
        stop: The position behind its last one.
    """

    def __init__(self, order: WindowedOrder, epoch: int, window: int, number: int) -> None:
        self._order, self._epoch = order, epoch
        seed, run, turns = order.seed, order.run, order.turns
        first, stop = order.first_row(window), order.first_row(window + 1)
        rows = stop - first
        self._rows = np.arange(first, stop)
        start = order.window_start(window)
        given, give = number * run // turns, (number + 1) * run // turns
        self.start, body_end = (start + rows * order.lanes * each for each in (given, give))
        self.stop = body_end if number < turns - 1 else order.window_start(window + 1)
        self._rest = self.stop - body_end
        self._width = rows * (give - given) + -(-self._rest // order.lanes)
        self._within = np.arange(run)
        if turns > 1:
            self._within = permutation(mix_key(seed, epoch, _LANES, window), run)[given:give]
        self._key = mix_key(seed, epoch, _LANES, window, number)
        # What comes at a position stands in the place of the position, hence lanes are columns.
        self._table = np.empty((self._width, order.lanes), np.int64)
        self._is_filled = np.zeros(order.lanes, np.bool_)

    def take(self, positions: range) -> Int64s:
        """Return the samples at positions, all in the turn; the step is positive."""
        lanes = self._order.lanes
        period = lanes // gcd(lanes, positions.step)
        concerned = (np.arange(min(period, len(positions))) * (positions.step % lanes) + positions.start) % lanes
        missing = np.sort(concerned[~self._is_filled[concerned]])
        if len(missing):
            self._table[:, _as_slice(missing)] = self._shuffle(missing).T
            self._is_filled[missing] = True
        inside = slice(positions[0] - self.start, positions[-1] - self.start + 1, positions.step)
        found: Int64s = self._table.reshape(-1)[inside]
        return found

    def _shuffle(self, lanes: Int64s) -> Int64s:
        """Return the samples of lanes in their order, a row for each lane; a lane may have one that never comes."""
        width = self._width
        bits = (width - 1).bit_length()
        low = (1 << bits) - 1
        packed = draws_at(self._key, lanes[:, None] * width + np.arange(width))
        packed &= np.uint64(MASK ^ low)
        packed |= np.arange(width, dtype=np.uint64)
        if longer := self._rest % self._order.lanes:
            packed[lanes >= longer, -1] = (MASK ^ low) | (width - 1)  # behind all others
        packed.sort(axis=1)
        packed &= np.uint64(low)
        places = packed.view(np.int64)
        places += np.arange(len(lanes))[:, None] * width
        found: Int64s = self._in_line(lanes).reshape(-1)[places]
        return found

    def _in_line(self, lanes: Int64s) -> Int64s:
        """Return the samples of lanes as they are read, a row for each lane."""
        order, epoch = self._order, self._epoch
        slots = (self._rows * order.lanes + lanes[:, None]).reshape(-1)
        body = len(self._rows) * len(self._within)
        key, num_runs = mix_key(order.seed, epoch, _RUNS), order.count // order.run
        starts = permuted(key, num_runs, slots) * order.run
        within = self._within
        if order.turns > 1:
            rotations = draws_at(mix_key(order.seed, epoch, _LANES), slots) % np.uint64(order.run)
            within = _wrapped(rotations.view(np.int64)[:, None] + within, order.run)
        samples = (starts[:, None] + within).reshape(len(lanes), body)
        if self._rest:
            # Behind the runs that fill no row stands what fills no run.
            left = np.arange(order.rows * order.lanes, num_runs)
            starts = np.append(permuted(key, num_runs, left), num_runs) * order.run
            each, longer = divmod(self._rest, order.lanes)
            places = (lanes * each + np.minimum(lanes, longer))[:, None] + np.arange(self._width - body)
            runs, inside = np.divmod(np.minimum(places, self._rest - 1), order.run)
            samples = np.concatenate([samples, starts[runs] + inside], axis=1)
        return _rotated(samples, order, epoch)


def _as_slice(lanes: Int64s) -> slice | Int64s:
    """Return ascending numbers as a slice if they are equally far apart: numpy copies that in half the time."""
    steps = np.diff(lanes)
    if not len(steps) or (steps == steps[0]).all():
        return slice(int(lanes[0]), int(lanes[-1]) + 1, int(steps[0]) if len(steps) else 1)
    return lanes


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How a loader shuffles in windows: in bytes, as memory and reads are.

    Attributes:
        window_bytes: About how much is shuffled together, by all ranks: the greater, the better the shuffle. Of this a
            rank holds its part, and reads as much ahead.
        run_bytes: About how much is read at once; a run has 1 to 256 samples.
        lanes: A multiple of the numbers of ranks for which each run is to be read by one rank alone.
    """

    window_bytes: int = 1 << 30
    run_bytes: int = 256 << 10
    lanes: int = 192

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: One is not positive, or there are more than 65,536 lanes.
        """
        for name in ("window_bytes", "run_bytes", "lanes"):
            if (value := operator.index(getattr(self, name))) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.lanes > _MOST_LANES:
            raise ValueError(f"lanes is {self.lanes}; it can be at most {_MOST_LANES}")


@dataclass(frozen=True, slots=True)
class Resolved:
    """How a loader shuffles, in samples: what a state holds.

    Attributes:
        kind: Which order it is.
        run: Samples of a run; 1 if the order has no runs.
        runs: Runs of a window; 1 if the order has none.
        lanes: Lanes of a window; 1 if the order has none.
    """

    kind: Kind
    run: int = 1
    runs: int = 1
    lanes: int = 1

    def as_json(self) -> list[str | int]:
        """Return it as a short list for JSON."""
        return [self.kind, self.run, self.runs, self.lanes]

    @classmethod
    def from_json(cls, value: Any) -> Resolved:
        """Return what `as_json` made a list of.

        Raises:
            ValueError: It made no such list.
        """
        match value:
            case [str(kind), int(run), int(runs), int(lanes)] if (
                kind in get_args(Kind)
                and bool not in {type(run), type(runs), type(lanes)}
                and 1 <= run <= LARGEST_WINDOW
                and 1 <= lanes <= _MOST_LANES
                and lanes <= runs <= _MOST_RUNS
                and runs % lanes == 0
            ):
                return cls(cast("Kind", kind), run, runs, lanes)
        raise ValueError(f"{value!r} is no order")


def resolve(shuffle: bool | Literal["full"] | Shuffle, count: int, total_bytes: int) -> Resolved:
    """Return how to shuffle samples, by their mean size.

    Windows have at most 2^20 samples. Lanes are fewer where a
    window, or the dataset, has too few runs for them.

    Args:
        shuffle: Whether, or in which windows; ``"full"`` puts each sample anywhere.
        count: How many samples there are.
        total_bytes: The size of all of them together.

    Raises:
        TypeError: `shuffle` is none of these.
    """
    if shuffle is False:
        return Resolved("sequential")
    if shuffle == "full":
        return Resolved("random")
    setting = Shuffle() if shuffle is True else shuffle
    if not isinstance(setting, Shuffle):
        raise TypeError(f"shuffle is True, False, 'full' or a Shuffle, not {shuffle!r}")
    count, size = max(count, 1), max(total_bytes, 1)
    window = min(max(setting.window_bytes * count // size, 1), LARGEST_WINDOW)
    run = min(max(setting.run_bytes * count // size, 1), LONGEST_RUN, window)
    lanes = _fewer_lanes(_divisor(setting.lanes, window // run), run, count)
    return Resolved("windowed", run, window // run // lanes * lanes, lanes)


def order_of(resolved: Resolved, count: int, seed: int) -> Order:
    """Return the order of some samples, which may be fewer than those that it was resolved for, as those of a bucket.

    Raises:
        ValueError: The numbers are no sizes of windows.
    """
    if resolved.kind == "sequential":
        return SequentialOrder(count)
    if resolved.kind == "random":
        return RandomOrder(count, seed)
    lanes = _fewer_lanes(resolved.lanes, resolved.run, count)
    return WindowedOrder(count, seed, resolved.run, resolved.runs, lanes)


def _fewer_lanes(lanes: int, run: int, count: int) -> int:
    """Return the greatest divisor of lanes for which samples are enough."""
    # Runs of one sample are mixed as they are.
    return lanes if run == 1 else _divisor(lanes, count // run // _LANE)


def _divisor(number: int, most: int) -> int:
    """Return the greatest divisor of a number that is not above `most`; 1 if none is."""
    return next((at for at in range(min(number, most), 1, -1) if number % at == 0), 1)
