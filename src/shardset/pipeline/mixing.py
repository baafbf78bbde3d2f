"""Several datasets as one: samples of each in turn, or as drawn."""

from __future__ import annotations

import logging
import math
import sys
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import StateError
from shardset.loading.order import draws, mix_key
from shardset.loading.ranks import find_share, torch_worker
from shardset.policy import Place, Report

from .epochs import Board
from .pipeline import DataPipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Choices = Callable[["Progress"], Iterator[int]]
    """Gives the numbers of the sources to take from, from where a pass is on, until one of them ends."""

logger = logging.getLogger("shardset.pipeline")

VERSION: Final = 1
_END: Final = object()
_DRAWN_AT_ONCE: Final = 1024
_MIX: Final = int.from_bytes(b"mix", "big")
"""Goes into the key of the draws, to keep them apart from those of the stages."""


class Mix:
    """What `RandomMix` and `RoundRobin` have in common.

    It can be iterated, stand first in a `DataPipeline`, and be given to a DataLoader. Each pass is another epoch of it
    and of its datasets. By default a pass ends with the first source that does; what the others still had is counted in
    `report` under ``cut_off``: at least one sample each, and all of them where the dataset tells its length.

    Args:
        datasets: What samples are taken from: iterables that can be gone through more than once.
        longest: Go on until all sources have ended.

    Raises:
        ValueError: There is no dataset.
    """

    def __init__(self, datasets: Iterable[Iterable[Any]], *, longest: bool) -> None:
        self.datasets = list(datasets)
        self.longest = longest
        if not self.datasets:
            raise ValueError("there is no dataset to mix")
        self._board = Board()
        self._report = Report()
        self._progress: Progress | None = None
        self._loaded: Progress | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # As in DataPipeline: torch's DataLoader asks whether this is one of its iterable datasets.
        iterable = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
        if iterable is not None:
            iterable.register(Mix)
        return type(self)

    def _choices(self, epoch: int) -> Choices:
        """Return what chooses the sources of one epoch."""
        raise NotImplementedError

    def next_epoch(self) -> int:
        """Return the number of the next epoch."""
        return self._board.peek(torch_worker())

    def current_epoch(self) -> int:
        """Return the number of the epoch that was begun last, or of the next one if none was."""
        return self.next_epoch() if self._progress is None else self._progress.epoch

    def set_own_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one of this process alone, of the mix and of the datasets in it."""
        self._board.set_own(torch_worker(), epoch)
        for dataset in self.datasets:
            if hasattr(dataset, "set_own_epoch"):
                dataset.set_own_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one, of the mix and of the datasets in it."""
        self._board.set_next(epoch)
        for dataset in self.datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # As in DataPipeline: what was loaded is taken at once, the number of a new epoch with its first sample.
        return self._run(None if self._loaded is None else self._begin())

    def _begin(self) -> Progress:
        worker = torch_worker()
        progress, self._loaded = self._loaded, None
        if progress is not None:
            self._board.set_own(worker, progress.epoch)
        epoch = self._board.take(worker)
        self._progress = progress = progress or Progress(len(self.datasets), epoch)
        self._report = Report()
        return progress

    def _run(self, progress: Progress | None) -> Iterator[Any]:
        progress = progress or self._begin()
        worker, report = torch_worker(), self._report
        opened = [
            dataset.in_lane(number) if isinstance(dataset, DataPipeline) else iter(dataset)
            for number, dataset in enumerate(self.datasets)
        ]
        try:
            yield from mix(opened, progress, self._choices(progress.epoch), longest=self.longest)
            self._count_rest(opened, progress, report)
            progress.alive = []  # a state that is taken now is one of a pass that is over
        finally:
            for source in opened:
                if hasattr(source, "close"):
                    source.close()
            if worker is not None:
                self._board.leave(worker, report)

    def _count_rest(self, opened: Sequence[Iterator[Any]], progress: Progress, report: Report) -> None:
        """Count what is left in the sources that did not end, as far as it can be told."""
        for number in progress.alive:
            if next(opened[number], _END) is _END:
                continue
            taken = progress.taken[number]
            rest = max(1, _length(self.datasets[number]) - taken)
            message = f"source {number}, counted from 0, had more than the {taken} samples taken when another ended"
            report.add("cut_off", Place(message=message), rest)
            logger.warning("%s; longest=True takes them", message)

    def report(self) -> Report:
        """Return what the last pass left out, in this process, its workers, and the datasets of the mix."""
        whole = Report()
        whole.merge(self._report)
        for left in self._board.reports():
            whole.merge(left)
        for dataset in self.datasets:
            told = getattr(dataset, "report", None)
            told = told() if callable(told) else told
            if isinstance(told, Report):
                whole.merge(told)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Return what the pass under way needs to go on elsewhere: JSON.

        Raises:
            StateError: A dataset of the mix has no state.
        """
        is_over = self._progress is not None and not self._progress.alive
        if is_over and torch_worker() is None and all(isinstance(one, DataPipeline) for one in self.datasets):
            # The next pass begins anew: what the sources have left of this one is given up.
            sources = [one.next_state() for one in self.datasets if isinstance(one, DataPipeline)]
            fresh = Progress(len(self.datasets), self._board.peek())
            return {"version": VERSION, **fresh.to_json(), "sources": sources}
        progress = self._loaded or self._progress or Progress(len(self.datasets), self._board.peek(torch_worker()))
        return {
            "version": VERSION,
            **progress.to_json(),
            "sources": [_stateful(dataset, number).state_dict() for number, dataset in enumerate(self.datasets)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where the state was taken.

        Raises:
            StateError: The state is of another mix, or a dataset refuses its part.
        """
        sources, count = state.get("sources"), len(self.datasets)
        if state.get("version") != VERSION or not isinstance(sources, list) or len(sources) != count:
            what = f"the state is none of a mix of {count} datasets"
            raise StateError(what, hint="load it into the mix that it was taken from")
        loaded = Progress.from_json(state, count)
        for number, (dataset, one) in enumerate(zip(self.datasets, sources, strict=True)):
            _stateful(dataset, number).load_state_dict(one)
        self._loaded, self._progress = loaded, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.datasets!r}, longest={self.longest})"


class RandomMix(Mix):
    """Takes each sample from a dataset that is drawn, with the probabilities given.

    What is drawn follows from the seed, the epoch, the rank and the worker, so that it is the same each time.

    Args:
        datasets: As in `Mix`.
        probs: How often to take from each, in proportion; by default equally often.
        longest: As in `Mix`. What has ended is not drawn any more.
        seed: Decides the draws.

    Raises:
        ValueError: There is no dataset, or `probs` does not fit.
    """

    def __init__(
        self,
        datasets: Iterable[Iterable[Any]],
        probs: Iterable[float] | None = None,
        longest: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(datasets, longest=longest)
        self.probs = None if probs is None else check_probs(probs, len(self.datasets))
        self.seed = seed

    def _choices(self, epoch: int) -> Choices:
        share = find_share()
        key = mix_key(self.seed, epoch, share.rank, share.worker, _MIX)
        return drawn(key, self.probs or [1.0] * len(self.datasets))


class RoundRobin(Mix):
    """Takes a sample from each dataset in turn.

    Args:
        datasets: As in `Mix`.
        longest: As in `Mix`. What has ended is passed over.

    Raises:
        ValueError: There is no dataset.
    """

    def __init__(self, datasets: Iterable[Iterable[Any]], longest: bool = False) -> None:
        super().__init__(datasets, longest=longest)

    def _choices(self, epoch: int) -> Choices:  # noqa: ARG002 - turns are the same in each
        return turns


class Progress:
    """How far one pass over some sources is.

    Attributes:
        epoch: Its epoch.
        chosen: How many choices were made.
        last: The source that was chosen last; -1 at the beginning.
        alive: The numbers of the sources that have not ended.
        taken: How many samples each source has given.
    """

    __slots__ = ("alive", "chosen", "epoch", "last", "taken")

    def __init__(self, count: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self.chosen = 0
        self.last = -1
        self.alive = list(range(count))
        self.taken = [0] * count

    def to_json(self) -> dict[str, Any]:
        """Return all of it, in lists that stay as they are."""
        return {
            "epoch": self.epoch,
            "chosen": self.chosen,
            "last": self.last,
            "alive": list(self.alive),
            "taken": list(self.taken),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], count: int) -> Progress:
        """Return what `to_json` was called on.

        Raises:
            StateError: It is of another number of sources.
        """
        progress = cls(count, int(state["epoch"]))
        progress.chosen, progress.last = int(state["chosen"]), int(state["last"])
        progress.alive, progress.taken = [int(number) for number in state["alive"]], list(map(int, state["taken"]))
        if len(progress.taken) != count or not set(progress.alive) <= set(range(count)):
            raise StateError(f"the state is of a mix of {len(progress.taken)} datasets, and this one has {count}")
        return progress


def mix(opened: Sequence[Iterator[Any]], progress: Progress, choices: Choices, *, longest: bool) -> Iterator[Any]:
    """Yield samples of the sources that `choices` chooses, until the first has ended, or with `longest` all."""
    taken = progress.taken
    while progress.alive:
        for number in choices(progress):
            sample = next(opened[number], _END)
            progress.chosen += 1
            progress.last = number
            if sample is _END:
                progress.alive = [other for other in progress.alive if other != number]
                break
            taken[number] += 1
            yield sample
        else:  # those that are left are never chosen
            return
        if not longest:
            return


def turns(progress: Progress) -> Iterator[int]:
    """Choose the sources that are left in turn, beginning behind the one that was chosen last."""
    alive = progress.alive
    behind = sum(number <= progress.last for number in alive)
    return cycle(alive[behind:] + alive[:behind])


def drawn(key: int, probs: Sequence[float]) -> Choices:
    """Return choices that are drawn: number `i` follows from the key, `i`, and which sources are left."""

    def choose(progress: Progress) -> Iterator[int]:
        alive, start = progress.alive, progress.chosen
        weights = np.array([probs[number] for number in alive])
        if not weights.any():
            return
        bounds = weights.cumsum() / weights.sum()
        while True:
            fractions = (draws(key, start, _DRAWN_AT_ONCE) >> np.uint64(11)) * 2.0**-53
            # The last bound may be a rounding below one.
            places = np.searchsorted(bounds[:-1], fractions, side="right").tolist()
            yield from map(alive.__getitem__, places)
            start += _DRAWN_AT_ONCE

    return choose


def check_probs(probs: Iterable[float], count: int) -> list[float]:
    """Return probabilities as a list.

    Raises:
        ValueError: There is not one for each of `count` sources, one is negative or no number, or all are zero.
    """
    listed = [float(prob) for prob in probs]
    if len(listed) != count:
        raise ValueError(f"{len(listed)} probabilities for {count} datasets")
    if not all(math.isfinite(prob) and prob >= 0 for prob in listed) or not any(listed):
        raise ValueError(f"probabilities are not negative, and not all zero: {listed}")
    return listed


def _stateful(dataset: Any, number: int) -> Any:
    if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
        what = f"dataset {number} of the mix, a {type(dataset).__name__}, has no state to save or load"
        raise StateError(what, hint="mix datasets of WebDataset or DataPipeline")
    return dataset


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        return 0
