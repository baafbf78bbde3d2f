"""Several datasets as one, in exact proportions: `shares` says which source comes where, this module which sample.

Each source goes through epochs of its own, whatever those of the mixture are: its samples come in its own order, which
neither the other sources nor changes of weights touch.
"""

from __future__ import annotations

import hashlib
import math
import operator
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.dataset.select import Selection
from shardset.errors import StateError

from .feed import Picks
from .order import mix_key
from .shares import LONGEST, MOST_OFF, Stretch, largest_remainders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset
    from shardset.policy import Report

    from .feed import SampleFeed

    Int64s = NDArray[np.int64]

PERIOD: Final = 10_000
"""Positions after which weights are met exactly: to four decimals."""
_DENOMINATOR: Final = 10_000
_NAMES: Final = 10
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_WORD: Final = 5
"""Digits in base 36 of a digest."""
_QUOTA_DIGITS: Final = 3
_FAR: Final = 64
"""Samples of a source that are at most this far apart are taken with those between them."""
_MOST_PERIODS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Mixture:
    """Datasets that a loader mixes. Made by `mix`.

    Attributes:
        names: What the sources are called, sorted, so that the order in which they were given is of no effect.
        views: Their samples, in the order of the names.
        quotas: How many positions of each period are of each source.
        epoch_size: How many positions an epoch of the mixture has.
    """

    names: tuple[str, ...]
    views: tuple[Selection, ...]
    quotas: tuple[int, ...]
    epoch_size: int

    @property
    def dataset(self) -> Dataset:
        """The dataset of the first source."""
        return self.views[0].dataset

    @property
    def period(self) -> int:
        """Positions after which each source has had exactly its share."""
        return sum(self.quotas)

    @property
    def shares(self) -> dict[str, float]:
        """By name, the part of the samples that each source has."""
        return {name: quota / self.period for name, quota in zip(self.names, self.quotas, strict=True)}


def mix(
    datasets: Mapping[str, Dataset | Selection],
    *,
    weights: Mapping[str, float] | None = None,
    repeats: Mapping[str, float] | None = None,
    epoch_size: int | None = None,
) -> Mixture:
    """Mix several datasets into one, in exact proportions.

    Without weights and repeats, each sample comes once in an epoch. A source whose weight is 0 never comes, until
    weights are changed.

    Args:
        datasets: The sources, by names of your choice. A name decides the source's order, beside the seed.
        weights: For each source its share of the samples; they need not add up to 1. Shares are met to the
            ten-thousandth, by largest remainders, and exactly so after each 10,000 positions.
        repeats: For each source how often it is gone through in an epoch, to four decimals; met exactly at the end of
            each epoch (where all of them times the sizes are whole numbers, and `epoch_size` is not given), up to
            2^31 positions, and beyond to one in 2^31.
        epoch_size: How many positions an epoch has; by default the sum of sizes, each times its repeats. Sources go on
            in the next epoch where they were, so that no sample is passed over.

    Raises:
        ValueError: A source is empty, or a name is not known or missing; a weight is negative, no number, or so small
            that it would never come; all are 0; both weights and repeats are given; or there is no source.
        TypeError: A source is neither a dataset nor a selection.
        As `Dataset.catalog`.
    """
    if not datasets:
        raise ValueError("there is no dataset to mix")
    if weights is not None and repeats is not None:
        raise ValueError("give either weights (shares of samples) or repeats (of datasets), not both")
    names = tuple(sorted(datasets))
    views = tuple(_view(name, datasets[name]) for name in names)
    sizes = [len(view) for view in views]
    for name, size in zip(names, sizes, strict=True):
        if not size:
            raise ValueError(f"the source {name!r} has no samples - leave it out")
    wanted = sum(sizes)
    if weights is not None:
        quotas = _quotas(names, weights)
    else:
        times = [Fraction(1)] * len(names) if repeats is None else _exact("repeats", names, repeats)
        times = [_rounded(name, time) for name, time in zip(names, times, strict=True)]
        parts = [time * size for time, size in zip(times, sizes, strict=True)]
        wanted = max(1, round(sum(parts)))
        scale = math.lcm(*(part.denominator for part in parts))
        quotas = largest_remainders(parts, min(int(sum(parts) * scale), LONGEST))
        _check_present("repeats", names, parts, quotas)
    if epoch_size is not None:
        wanted = operator.index(epoch_size)
        if wanted < 1:
            raise ValueError(f"epoch_size is {wanted}; an epoch has at least 1 position")
    return Mixture(names, views, quotas, wanted)


def _view(name: str, source: Dataset | Selection) -> Selection:
    if isinstance(source, Selection):
        return source
    if not hasattr(source, "select"):
        raise TypeError(f"the source {name!r} is neither a dataset nor a selection, but {type(source).__name__}")
    return source.select()


def _exact(what: str, names: Sequence[str], values: Mapping[str, float]) -> list[Fraction]:
    """Return a value for each name, as the exact number that it is.

    Raises:
        ValueError: A name is not known or missing, a value is negative or no number, or all are 0.
    """
    known = ", ".join(map(repr, names))
    if unknown := [name for name in values if name not in names]:
        raise ValueError(f"{what} name {', '.join(map(repr, unknown))}, which is no source - there are {known}")
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{what} lack {', '.join(map(repr, missing))} - give a number for each of {known}")
    for name in names:
        if not (math.isfinite(values[name]) and values[name] >= 0):
            raise ValueError(f"{what} give {values[name]} for {name!r}; they are numbers of at least 0")
    if not any(values.values()):
        raise ValueError(f"{what} are 0 for all of {known}")
    return [Fraction(float(values[name])) for name in names]


def _rounded(name: str, time: Fraction) -> Fraction:
    rounded = time.limit_denominator(_DENOMINATOR)
    if time and not rounded:
        raise ValueError(
            f"repeats give {float(time):.3g} for {name!r}, which is less than once in {_DENOMINATOR} epochs - "
            "give it more, or 0"
        )
    return rounded


def _quotas(names: Sequence[str], weights: Mapping[str, float]) -> tuple[int, ...]:
    exact = _exact("weights", names, weights)
    quotas = largest_remainders(exact, PERIOD)
    _check_present("weights", names, exact, quotas)
    return quotas


def _check_present(what: str, names: Sequence[str], weights: Sequence[Fraction], quotas: Sequence[int]) -> None:
    """Check that a source that is wanted comes at all.

    Raises:
        ValueError: It would never come.
    """
    for name, weight, quota in zip(names, weights, quotas, strict=True):
        if weight and not quota:
            raise ValueError(
                f"{what} give {name!r} a share of {float(weight / sum(weights)):.3g}, which is less than one in "
                f"{sum(quotas)} positions, so that it would never come - give it more, or 0"
            )


def source_seed(seed: int, name: str) -> int:
    """Return the seed of a source's own order, which depends on no other source."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return mix_key(seed, _NAMES, int.from_bytes(digest, "big"))


class SourceCount(NamedTuple):
    """How far a source is.

    Attributes:
        delivered: How many of its samples came, in all epochs of the mixture.
        epoch: How often it was gone through.
        position: How many of its samples came in its present epoch.
    """

    delivered: int
    epoch: int
    position: int


class MixFeed:
    """The samples of a mixture: a feed over one feed for each source, whose lanes and windows are its own.

    Position `n` of epoch `e` is number ``e * mixture.epoch_size + n`` over all epochs.

    Args:
        mixture: What is mixed.
        feeds: For each source, in the order of the mixture's names, what comes when in its epochs; the seed of its
            order should be its `source_seed`.
        seed: Decides how sources are spread.

    Raises:
        ValueError: The feeds are not those of the sources.
    """

    lanes = 1
    unit = 0

    def __init__(self, mixture: Mixture, feeds: Sequence[SampleFeed], seed: int) -> None:
        self.mixture = mixture
        self.views = mixture.views
        self._feeds = tuple(feeds)
        self._sizes = tuple(feed.count(0) for feed in feeds)
        if self._sizes != tuple(map(len, mixture.views)):
            raise ValueError(f"feeds of {self._sizes} samples are not those of {', '.join(map(repr, mixture.names))}")
        self._seed = seed
        nothing = (0,) * len(mixture.names)
        # Replaced as a whole when weights change: threads that read ahead may be in the midst of it.
        self._stretches: tuple[Stretch, ...] = (Stretch.plan(seed, 0, mixture.quotas, nothing),)

    def count(self, epoch: int, most: int | None = None) -> int:  # noqa: ARG002 - as the protocol has it
        """As `Feed.count`."""
        return self.mixture.epoch_size

    def window_end(self, epoch: int, position: int) -> int:
        """As `Feed.window_end`: where the window of the source with the largest quota ends, or its weights do."""
        start, first = self._number(epoch, position), self._number(epoch, 0)
        stretch, change = self._stretch_at(start)
        stop = first + self.mixture.epoch_size
        stop = stop if change is None else min(stop, change)
        quota, period = max(stretch.quotas), sum(stretch.quotas)
        source = stretch.quotas.index(quota)
        number = stretch.counts(start)[source]
        own_epoch, at = divmod(number, self._sizes[source])
        left = self._feeds[source].window_end(own_epoch, at) - at
        # After about so many positions these have come; where exactly, the counts tell.
        near = min(stop, max(start + 1, start + (left - 2 * MOST_OFF) * period // quota))
        far = min(stop, start + (left + 2 * MOST_OFF) * period // quota + 1)
        candidates = range(near, far)
        end = bisect_left(candidates, number + left, key=lambda candidate: stretch.counts(candidate)[source])
        return near + end - first

    def take(self, epoch: int, positions: range) -> Picks:
        """As `Feed.take`."""
        if positions.step < 0:
            samples, sources, *_ = self.take(epoch, positions[::-1])
            return Picks(samples[::-1], sources[::-1] if sources is not None else None)
        samples = np.empty(len(positions), np.int64)
        sources = np.empty(len(positions), np.int32)
        for start, stretch, several in self._by_stretch(epoch, positions):
            for source, (places, numbers) in stretch.share_out(several).items():
                samples[start + places] = self._take_source(source, numbers)
                sources[start + places] = source
        return Picks(samples, sources)

    def spare(self, epoch: int, position: int, attempt: int) -> tuple[int, int]:
        """As `Feed.spare`: another sample of the same source."""
        source, number = self._source_at(epoch, position)
        epoch, at = divmod(number, self._sizes[source])
        return source, self._feeds[source].spare(epoch, at, attempt)[1]

    def shape(self, bucket: int) -> None:  # noqa: ARG002
        """As `Feed.shape`."""
        return

    def account(self, epoch: int, report: Report) -> None:
        """As `Feed.account`: there is nothing to count."""

    def counts(self, epoch: int, position: int) -> dict[str, SourceCount]:
        """Return by name how far each source is when so many positions of an epoch came, and all epochs before it."""
        number = self._number(epoch, position)
        counts = self._stretch_at(number)[0].counts(number)
        return {
            name: SourceCount(count, *divmod(count, size))
            for name, count, size in zip(self.mixture.names, counts, self._sizes, strict=True)
        }

    def weights(self, epoch: int, position: int) -> dict[str, float]:
        """Return by name the shares that hold at a position."""
        quotas = self._stretch_at(self._number(epoch, position))[0].quotas
        return {name: quota / sum(quotas) for name, quota in zip(self.mixture.names, quotas, strict=True)}

    def set_weights(self, epoch: int, position: int, weights: Mapping[str, float]) -> None:
        """Change the shares of the sources from a position on; what comes before it stays what it is.

        Weights that were set for the same position are replaced. The change is kept in the state.

        Args:
            epoch: The epoch.
            position: The position in it.
            weights: For each source its share of the samples, as for `mix`.

        Raises:
            ValueError: As `mix`; or weights were set for a later position.
        """
        number = self._number(epoch, position)
        stretches = self._stretches
        if number < stretches[-1].start:
            where = divmod(stretches[-1].start, self.mixture.epoch_size)
            raise ValueError(
                f"weights cannot change at position {position} of epoch {epoch}, as they did at position {where[1]} "
                f"of epoch {where[0]}, which is later"
            )
        quotas = _quotas(self.mixture.names, weights)
        if len(stretches) > 1 and number == stretches[-1].start:
            stretches = stretches[:-1]
        self._stretches = self._with_change(stretches, number, quotas)

    def state(self, epoch: int, position: int) -> dict[str, Any]:  # noqa: ARG002
        """As `Feed.state`: digests of what is mixed, and a text of about 25 characters for each change of weights.

        With up to 5 sources and 2^40 positions a change takes at most 32 bytes of JSON.
        """
        changes = [f"{_base36(stretch.start)}.{_joined(stretch.quotas)}" for stretch in self._stretches[1:]]
        return {"mix": [".".join(self._marks()), *changes]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As `Feed.load_state`.

        Raises:
            StateError: It is of other sources, sizes, weights or epochs, or damaged; nothing was changed.
        """
        match state.get("mix"):
            case [str(marks), *changes] if all(isinstance(change, str) for change in changes):
                self._check_marks(marks.split("."))
            case other:
                raise StateError(f"the state is of no mixture: it has {other!r}")
        stretches = self._stretches[:1]
        for change in changes:
            number, quotas = self._parse_change(change)
            if number < stretches[-1].start or (len(stretches) > 1 and number == stretches[-1].start):
                raise StateError(f"the state's change of weights {change!r} does not come after the one before it")
            stretches = self._with_change(stretches, number, quotas)
        self._stretches = stretches

    def _marks(self) -> list[str]:
        """Return what tells this mixture from others, in the words of `_MARKED`."""
        mixture = self.mixture
        digests = (_digest(part) for part in (mixture.names, self._sizes, mixture.quotas))
        return [*digests, _base36(mixture.epoch_size)]

    def _check_marks(self, marks: list[str]) -> None:
        mixture = self.mixture
        names = ", ".join(map(repr, mixture.names))
        sizes = ", ".join(f"{name!r}: {size}" for name, size in zip(mixture.names, self._sizes, strict=True))
        here = self._marks()
        if len(marks) != len(here):
            raise StateError(f"the state's mixture is {'.'.join(marks)!r}, which is none")
        said = (
            f"sources of other names than {names}",
            f"sources of other sizes than {sizes}",
            f"a mixture with other weights or repeats than {mixture.shares}",
            f"a mixture whose epochs do not have {mixture.epoch_size} positions",
        )
        for mark, own, what in zip(marks, here, said, strict=True):
            if mark != own:
                raise StateError(f"the state is of {what}", hint="mix what was mixed when it was saved")

    def _parse_change(self, change: str) -> tuple[int, tuple[int, ...]]:
        start, _, text = change.partition(".")
        count = len(self._sizes)
        is_text = len(text) == count * _QUOTA_DIGITS and start and set(start + text) <= set(_DIGITS)
        quotas = tuple(int(text[at : at + _QUOTA_DIGITS], 36) for at in range(0, len(text), _QUOTA_DIGITS) if is_text)
        if not is_text or sum(quotas) != PERIOD:
            raise StateError(f"the state has {change!r}, which is no change of the weights of {count} sources")
        return int(start, 36), quotas

    def _with_change(self, stretches: tuple[Stretch, ...], number: int, quotas: tuple[int, ...]) -> tuple[Stretch, ...]:
        before = tuple(stretches[-1].counts(number))
        return (*stretches, Stretch.plan(self._seed, number, quotas, before))

    def _number(self, epoch: int, position: int) -> int:
        return epoch * self.mixture.epoch_size + position

    def _stretch_at(self, number: int) -> tuple[Stretch, int | None]:
        """Return the stretch that holds a position, and the position behind it; None if no end is known."""
        stretches = self._stretches
        at = bisect_right(stretches, number, key=lambda stretch: stretch.start)
        return stretches[at - 1], stretches[at].start if at < len(stretches) else None

    def _by_stretch(self, epoch: int, positions: range) -> Iterator[tuple[int, Stretch, range]]:
        """Yield (place of the first, stretch, positions over all epochs), with not too many periods at once."""
        first = self._number(epoch, 0)
        left = range(positions.start + first, positions.stop + first, positions.step)
        while left:
            stretch, stop = self._stretch_at(left[0])
            at_once = left[0] + _MOST_PERIODS * sum(stretch.quotas)
            inside = left[: len(range(left[0], at_once if stop is None else min(stop, at_once), left.step))]
            yield len(positions) - len(left), stretch, inside
            left = left[len(inside) :]

    def _source_at(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the source of a position, and the number of its sample over all its epochs."""
        number = self._number(epoch, position)
        stretch, _ = self._stretch_at(number)
        [(source, (_, numbers))] = stretch.share_out(range(number, number + 1)).items()
        return source, int(numbers[0])

    def _take_source(self, source: int, numbers: Int64s) -> Int64s:
        """Return samples of a source by their numbers over all its epochs, which ascend."""
        size, feed = self._sizes[source], self._feeds[source]
        samples = np.empty(len(numbers), np.int64)
        at = 0
        while at < len(numbers):
            number = int(numbers[at])
            epoch, first = divmod(number, size)
            end = len(numbers)
            if numbers[-1] >= number - first + size:
                end = int(np.searchsorted(numbers, number - first + size))
            last = int(numbers[end - 1])
            if last - number >= end - at:  # there are gaps
                wide = np.flatnonzero(np.diff(numbers[at:end]) > _FAR)
                if len(wide):
                    end = at + int(wide[0]) + 1
                    last = int(numbers[end - 1])
            taken = feed.take(epoch, range(first, first + last - number + 1)).samples
            samples[at:end] = taken if len(taken) == end - at else taken[numbers[at:end] - number]
            at = end
        return samples


def _digest(values: Sequence[str | int]) -> str:
    """Return a few characters that differ if values do."""
    digest = hashlib.blake2b("\0".join(map(str, values)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return _base36(int.from_bytes(digest, "big") % 36**_WORD).zfill(_WORD)


def _base36(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits


def _joined(quotas: Sequence[int]) -> str:
    return "".join(_base36(quota).zfill(_QUOTA_DIGITS) for quota in quotas)
