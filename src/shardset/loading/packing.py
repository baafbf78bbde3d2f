"""Samples in packs whose lengths together fit a size: which samples are in which pack, and which pack comes when.

The samples of an order are cut into windows, and each is packed by itself: best fit decreasing (Johnson, Demers,
Ullman, Garey and Graham, SIAM J. Comput. 3, 1974), by which the longest sample left goes into the fullest pack that has
room for it. So what comes at a position is known from its window alone, and from how many packs come before that
window; a state says that, so that no earlier window is packed again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c

from shardset.errors import SampleError, StateError
from shardset.policy import Place

from .feed import SPARE, Picks
from .order import draws, mix_key, order_of, permutation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardset.dataset.select import Selection
    from shardset.dataset.views import Pack
    from shardset.policy import Report

    from .order import Resolved

    Int64s = NDArray[np.int64]

PACKS: Final = 8
"""The part of a key that tells orders of packs from all other draws of a seed."""
_EPOCHS_KEPT: Final = 2
_SAMPLES_READ: Final = 1 << 16
"""Windows of about so many samples are read together at most."""
_SAMPLES_KEPT: Final = 1 << 18
"""Packed windows of about so many samples are kept."""
_FRACTION: Final = 20
"""Lengths that are no integers are rounded up to so many binary digits."""
_SPARES: Final = 64
_NAMED: Final = 8


class _Window(NamedTuple):
    """The packs of one window, in the order in which they come.

    Attributes:
        places: int64, places in the view, pack by pack; within a pack in the order of the samples.
        ends: int64: pack `n` is ``places[ends[n - 1]:ends[n]]``.
    """

    places: Int64s
    ends: Int64s


class _Counts:
    """How many packs come before each window of one epoch, from some window on.

    Attributes:
        first: The window that it begins with.
        before: How many packs come before that one, before the next one, and so on, as far as it is known.
    """

    def __init__(self, first: int = 0, packs: int = 0) -> None:
        self.first = first
        self.before = array("q", [packs])

    @property
    def next(self) -> int:
        """The first window whose packs are not counted yet."""
        return self.first + len(self.before) - 1


class PackFeed:
    """Samples of a view in packs; a position is a pack. A `Feed`.

    Samples longer than a pack are in none, and `account` counts them. It keeps a number for each sample, one for each
    window of two epochs, and the packs of the last few windows. One thread at a time may use it.

    Attributes:
        views: The one view.
        lanes: 1.
        unit: 0.
        pack: The settings.
    """

    lanes = 1
    unit = 0

    def __init__(self, view: Selection, pack: Pack, shuffle: Resolved, seed: int) -> None:
        """Read the lengths of all samples, and no payload.

        Args:
            view: The samples.
            pack: How they are packed.
            shuffle: How they are shuffled. If they are not, the packs of a window come by their first samples.
            seed: The loader's.

        Raises:
            SampleError: A length is not above 0.
            ValueError: The column is not of numbers, or the size is too large for lengths with fractions.
            As `Selection.column`.
        """
        self.views = (view,)
        self.pack = pack
        self._order = order_of(shuffle, len(view), seed)
        self._seed = seed
        self._is_shuffled = shuffle.kind != "sequential"
        self._lengths, self._size = _whole(view, pack)
        self._num_windows = -(-len(self._lengths) // pack.window)
        self._digest: int | None = None
        self._stated: NDArray[Any] | None = None
        self._counts: dict[int, _Counts] = {}
        self._windows: dict[tuple[int, int], _Window] = {}

    def lengths(self, samples: Int64s) -> NDArray[Any]:
        """Return the lengths of some of the view's samples, as the column has them, by their numbers in the dataset."""
        if self._stated is None:
            self._stated = self.views[0].column(self.pack.length)
        numbers = self.views[0].numbers
        stated: NDArray[Any] = self._stated[samples if numbers is None else np.searchsorted(numbers, samples)]
        return stated

    def count(self, epoch: int, most: int | None = None) -> int:
        """As `Feed.count`. Without `most` every window of the epoch is packed, at about a microsecond a sample."""
        counts = self._counts_of(epoch)
        if most is None:
            self._count_on(epoch, counts)
        elif counts.before[-1] < most:
            self._count_on(epoch, counts, packs=most)
        return counts.before[-1] if most is None else min(counts.before[-1], most)

    def window_end(self, epoch: int, position: int) -> int:
        """As `Feed.window_end`: the end of the windows that lie in the order's window, or in a part of it."""
        window, counts = self._find(epoch, position)
        size = self.pack.window
        together = max(1, _SAMPLES_READ // size)
        end = max(window + 1, self._order.window_end(window * size) // size)
        end = min(end, (window // together + 1) * together, self._num_windows)
        self._count_on(epoch, counts, window=end)
        return counts.before[end - counts.first]

    def take(self, epoch: int, positions: range) -> Picks:
        """As `Feed.take`.

        Raises:
            IndexError: The epoch has no such position.
        """
        places, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while positions:
            window, counts = self._find(epoch, positions[0])
            if window == self._num_windows:
                raise IndexError(f"epoch {epoch} has {counts.before[-1]} packs, and none at {positions[0]}")
            packs, first = self._packed(epoch, window), counts.before[window - counts.first]
            inside = range(positions.start - first, min(positions.stop - first, len(packs.ends)), positions.step)
            if inside.step == 1:
                start = int(packs.ends[inside.start - 1]) if inside.start else 0
                stop = int(packs.ends[inside.stop - 1])
                places.append(packs.places[start:stop])
            else:
                starts = np.concatenate([[0], packs.ends])
                places += [packs.places[starts[at] : starts[at + 1]] for at in inside]
            sizes.append(np.diff(packs.ends, prepend=0)[inside.start : inside.stop : inside.step])
            positions = positions[len(inside) :]
        return Picks(self.views[0].numbers_at(np.concatenate(places)), ends=np.cumsum(np.concatenate(sizes)))

    def spare(self, epoch: int, position: int, attempt: int) -> tuple[int, int]:
        """As `Feed.spare`: a sample that may take the place of any one sample of the pack, or be a pack by itself.

        So it is no longer than the shortest of the pack and the room that is left in it together.
        """
        window, counts = self._find(epoch, position)
        packs, at = self._packed(epoch, window), position - counts.before[window - counts.first]
        lengths = self._lengths[packs.places[packs.ends[at - 1] if at else 0 : packs.ends[at]]]
        room = self._size - int(lengths.sum()) + int(lengths.min())
        drawn = draws(mix_key(self._seed, epoch, SPARE, position), attempt * _SPARES, _SPARES)
        places = (drawn % np.uint64(len(self._lengths))).astype(np.int64)
        places = places[self._lengths[places] <= room]
        if not len(places):
            fitting = np.flatnonzero(self._lengths <= room)
            places = fitting[[int(drawn[0] % np.uint64(len(fitting)))]]
        return 0, int(self.views[0].numbers_at(places[:1])[0])

    def shape(self, bucket: int) -> None:  # noqa: ARG002
        """As `Feed.shape`: None."""
        return

    def state(self, epoch: int, position: int) -> dict[str, Any]:
        """As `Feed.state`: the window of a position, how many packs come before it, and what packs depend on."""
        window, counts = self._find(epoch, position)
        return {"pack": [epoch, window, counts.before[window - counts.first]], "packed": self._settings()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As `Feed.load_state`. Windows before the state's one are packed only when their positions are asked for."""
        settings = state.get("packed")
        if settings != self._settings():
            raise StateError(
                f"the state is of packs with [size, window, checksum of lengths] {settings!r}, "
                f"these have {self._settings()!r}",
                hint="give Pack the size and window of the state, and the same column of lengths",
            )
        match state.get("pack"):
            case [int(epoch), int(window), int(packs)] if (
                epoch >= 0 and 0 <= window <= self._num_windows and 0 <= packs <= window * self.pack.window
            ):
                self._keep(epoch, _Counts(window, packs))
            case hint:
                raise StateError(f"the state's place among packs is {hint!r}, which these packs do not have")

    def account(self, epoch: int, report: Report) -> None:  # noqa: ARG002
        """As `Feed.account`. The code is ``too_long``: samples that are longer than a pack, and in none."""
        places = np.flatnonzero(self._lengths > self._size)
        if not len(places):
            return
        lengths = self.views[0].column(self.pack.length)
        for place in places[:_NAMED].tolist():
            sample = self.views[0][place]
            what = f"{self.pack.length!r} is {lengths[place]}, and a pack has {self.pack.size}"
            report.add("too_long", Place(sample.shard, key=sample.key, message=what))
        if len(places) > _NAMED:
            report.add("too_long", count=len(places) - _NAMED)

    def _settings(self) -> list[Any]:
        if self._digest is None:
            self._digest = crc32c(np.ascontiguousarray(self._lengths).data)
        return [self.pack.size, self.pack.window, self._digest]

    def _find(self, epoch: int, position: int) -> tuple[int, _Counts]:
        """Return the window that a position is in, or the number of windows, and counts that reach that far."""
        counts = self._counts_of(epoch)
        if position < counts.before[0]:  # before where a state began
            counts = _Counts()
            self._keep(epoch, counts)
        self._count_on(epoch, counts, packs=position + 1)
        return counts.first + bisect_right(counts.before, position) - 1, counts

    def _counts_of(self, epoch: int) -> _Counts:
        counts = self._counts.get(epoch)
        if counts is None:
            counts = _Counts()
            self._keep(epoch, counts)
        return counts

    def _keep(self, epoch: int, counts: _Counts) -> None:
        self._counts.pop(epoch, None)
        while len(self._counts) >= _EPOCHS_KEPT:
            del self._counts[next(iter(self._counts))]
        self._counts[epoch] = counts

    def _count_on(self, epoch: int, counts: _Counts, *, packs: int | None = None, window: int | None = None) -> None:
        """Count until so many packs are known of, or up to some window, or to the end."""
        before, end = counts.before, self._num_windows if window is None else window
        while counts.next < end and (packs is None or before[-1] < packs):
            before.append(before[-1] + len(self._packed(epoch, counts.next).ends))

    def _packed(self, epoch: int, window: int) -> _Window:
        """Return the packs of a window; of the last few they are kept."""
        name = epoch, window
        found = self._windows.get(name)
        if found is None:
            start = window * self.pack.window
            places = self._order.take(epoch, range(start, min(start + self.pack.window, len(self._lengths))))
            key = mix_key(self._seed, epoch, PACKS, window) if self._is_shuffled else None
            found = _pack(places, self._lengths[places], self._size, key)
            while len(self._windows) > max(2, _SAMPLES_KEPT // self.pack.window):
                del self._windows[next(iter(self._windows))]
            self._windows[name] = found
        return found


def _pack(places: Int64s, lengths: Int64s, size: int, key: int | None) -> _Window:
    """Pack samples, and put the packs into the order that a key decides, or that of their first samples."""
    if len(lengths) and int(lengths.max()) > size:
        fits = lengths <= size
        places, lengths = places[fits], lengths[fits]
    if not len(lengths):
        return _Window(places, np.zeros(0, np.int64))
    falling = np.argsort(-lengths, kind="stable")
    pack_of = np.empty(len(lengths), np.int64)
    pack_of[falling] = best_fit(lengths[falling].tolist(), size)
    count = int(pack_of.max()) + 1
    if key is None:
        firsts = np.full(count, len(lengths))
        np.minimum.at(firsts, pack_of, np.arange(len(lengths)))
        order = np.argsort(firsts)
    else:
        order = permutation(key, count)
    turn = np.empty(count, np.int64)
    turn[order] = np.arange(count)
    turns = turn[pack_of]
    return _Window(places[np.argsort(turns, kind="stable")], np.cumsum(np.bincount(turns, minlength=count)))


def best_fit(lengths: list[int], size: int) -> list[int]:
    """Put each of some lengths, none of which rises, into the pack that is left with the least room.

    Of packs that are left with the same room it takes the one that was begun first; if none has room, a new one.

    Args:
        lengths: Positive numbers in falling order, none above `size`.
        size: What a pack holds.

    Returns:
        The number of the pack of each, counted from 0 as they are begun.
    """
    if not lengths:
        return []
    shift = len(lengths).bit_length()
    number = (1 << shift) - 1
    smallest = lengths[-1] << shift
    # Room and number of a pack in one integer, so that a sorted list of them finds the right one by bisection.
    open_packs: list[int] = []
    packs, begun = [], 0
    for length in lengths:
        needed = length << shift
        at = bisect_left(open_packs, needed)
        if at < len(open_packs):
            room = open_packs.pop(at)
        else:
            room = size << shift | begun
            begun += 1
        packs.append(room & number)
        room -= needed
        if room >= smallest:  # else nothing that follows fits
            insort(open_packs, room)
    return packs


def _whole(view: Selection, pack: Pack) -> tuple[Int64s, int]:
    """Return lengths, and the size of a pack, as integers of one unit, so that sums of them are exact."""
    lengths = view.column(pack.length)
    if lengths.dtype.kind not in "iuf":
        raise ValueError(f"the column {pack.length!r} is of {lengths.dtype}, and lengths are numbers")
    bad = np.flatnonzero(~(lengths > 0))  # which NaN is too
    if len(bad):
        place = int(bad[0])
        sample = view[place]
        raise SampleError(
            f"{pack.length!r} is {lengths[place]} for sample {sample.key!r}, and not above 0 for {len(bad)} in all",
            shard=sample.shard,
            key=sample.key,
            hint=f"leave them out: select(pc.field({pack.length!r}) > 0)",
        )
    if lengths.dtype.kind != "f":
        return lengths.astype(np.int64, copy=False), pack.size
    if pack.size >= 1 << 62 - _FRACTION:
        raise ValueError(f"size {pack.size} is too large for lengths with fractions, such as those of {pack.length!r}")
    # Lengths above the size stay above it.
    scaled = np.ceil(np.minimum(lengths, pack.size + 1.0) * (1 << _FRACTION))
    return scaled.astype(np.int64), pack.size << _FRACTION
