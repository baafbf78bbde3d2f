"""Pipelines: stages one behind the other, gone through epoch by epoch, from wherever a state says."""

from __future__ import annotations

import copy
import logging
import operator
import os
import sys
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Any, Final, Self

from shardset.errors import NoSamplesError, StateError
from shardset.loading.ranks import find_share, torch_worker
from shardset.policy import Policy, Report

from .decode import decode_stage
from .describing import describe, describe_all
from .epochs import Board
from .fluent import Fluent
from .live import Live
from .reading import read_samples
from .run import Run, Step, checked_policy, starting
from .shuffling import shuffle
from .sources import list_shards
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

logger = logging.getLogger("shardset.pipeline")

_VERSION: Final = 1
_ENDLESS: Final = sys.maxsize
_KINDS: Final[dict[str, type]] = {
    "pipeline": list,
    "seed": int,
    "share": list,
    "epoch": int,
    "pass": int,
    "before": int,
    "delivered": int,
    "stages": dict,
}
"""What a state of a begun epoch holds."""


class DataPipeline(Fluent):
    """Stages one behind the other: the first gives samples, each of the others works on what the one before it gives.

    A stage is made by the functions of this package (``shardset.webdataset.shuffle(100)``), or any callable that takes
    an iterator and returns one; the first one may also be any iterable, or a callable without arguments. Nothing is
    opened before iteration. Each iteration is an epoch of its own.

    Args:
        stages: The stages; those that are None are left out, and lists of stages are taken apart.
        seed: Decides about all orders; by default that of the variable ``WDS_SEED``, or 0.
        policy: What happens on faults.

    Attributes:
        pipeline: The stages.
        policy: As given.
        seed: As given.

    Raises:
        ValueError: The variable ``WDS_SEED`` is no number.
    """

    def __init__(self, *stages: Any, seed: int | None = None, policy: Policy | None = None) -> None:
        self.pipeline: list[Any] = []
        self.policy = checked_policy(policy)
        self.seed = _seed_of_environment() if seed is None else operator.index(seed)
        self.repetitions = 1
        self.nsamples = -1
        self._length: int | None = None
        self._board = Board()
        self._loaded: dict[str, Any] | None = None
        self._live: Live | None = None
        for stage in stages:
            self._add(stage)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # torch's DataLoader asks whether this is one of its iterable datasets. It becomes one when first asked after
        # torch was loaded, by whoever did: a base class would load torch for everybody.
        data = sys.modules.get("torch.utils.data")
        iterable = getattr(data, "IterableDataset", None)
        if iterable is not None:
            iterable.register(DataPipeline)
        return type(self)

    def _add(self, stage: Any) -> None:
        if isinstance(stage, list):
            for part in stage:
                self._add(part)
        elif stage is not None:
            self.pipeline.append(stage)

    def append(self, stage: Any) -> None:
        """Add a stage behind the others, in place."""
        self.pipeline.append(stage)

    def compose(self, *stages: Any) -> Self:
        """Return a copy with more stages behind those of this one."""
        other = copy.copy(self)
        other.pipeline = list(self.pipeline)
        other._board = Board(self._board.peek())  # noqa: SLF001 - of this class
        other._live = other._loaded = None  # noqa: SLF001
        for stage in stages:
            other._add(stage)  # noqa: SLF001
        return other

    def stage(self, i: int) -> Any:
        """Return stage number `i`."""
        return self.pipeline[i]

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Make each epoch `nsamples` long, counted in what the last stage gives, in place.

        The data is gone through as often as that takes, in a new order each time, and each epoch begins anew. In a
        DataLoader it holds for each worker. Below 0, epochs are as long as the data again.
        """
        self.nsamples = max(nsamples, nbatches)
        self.repetitions = _ENDLESS if self.nsamples >= 0 else 1
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Go through the data `nepochs` times in each epoch, without end if below 1, in place.

        Args:
            nepochs: How often.
            nbatches: End the epoch after so many items altogether, if above 0.
        """
        self.repetitions = nepochs if nepochs > 0 else _ENDLESS
        self.nsamples = nbatches if nbatches > 0 else -1
        return self

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Make ``len()`` answer `n`, in place. It changes nothing else, which is logged unless `silent`."""
        if not silent:
            logger.info("with_length(%s) tells what len() answers; it does not change how many samples come", n)
        self._length = n
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length is not known: with_length(n) states it")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # The number of an epoch is taken with its first sample: loaders make iterators that they never ask for one.
        return self._run(None if self._loaded is None else self._begin())

    def in_lane(self, lane: int) -> Iterator[Any]:
        """Iterate with draws of another lane: two datasets of one seed, or one twice, beside each other in a mix."""
        return self._run(self._begin(lane))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(describe, self.pipeline))})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the stages that can be closed, and let go of them all."""
        for stage in self.pipeline:
            if hasattr(stage, "close"):
                stage.close()
        self.pipeline = []

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next epoch, in workers that run already too, where they share memory.

        Raises:
            ValueError: It is below 0, or above 2^63.
        """
        epoch = operator.index(epoch)
        if not 0 <= epoch < 1 << 63:
            raise ValueError(f"set_epoch: {epoch} is no number of an epoch")
        self._board.set_next(epoch)
        for stage in self.pipeline:
            if hasattr(stage, "set_epoch"):
                stage.set_epoch(epoch)

    def report(self) -> Report:
        """Return what was dropped in the latest epoch, and why, by all stages: in this process and in its workers."""
        report = Report()
        left = self._board.reports()  # none if this process has begun a later epoch itself
        for one in left or ([] if self._live is None else [self._live.report]):
            report.merge(one)
        for stage in self.pipeline:
            inner = getattr(stage, "report", None)
            if callable(inner) and isinstance(found := inner(), Report):
                report.merge(found)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iteration is, as JSON: what `load_state_dict` needs to go on behind the last sample.

        Where a stage does not know how to go on, such as a function of the caller's own that works on the whole stream,
        the epoch is gone through again up to there.

        Raises:
            StateError: A stage draws from a random generator of the caller's own.
        """
        live = self._live
        if live is None and self._loaded is not None:
            return self._loaded
        if live is None and torch_worker() is None and self._board.has_workers():
            raise StateError(
                "the workers of a DataLoader have gone through this dataset, and hold its state",
                hint="use shardset.WebLoader, or torchdata's StatefulDataLoader, and save the state of the loader",
            )
        if live is None or (live.is_finished and torch_worker() is None):
            return self.next_state()
        inner = _inner(self.pipeline)
        state: dict[str, Any] = {
            "version": _VERSION,
            "begun": True,
            "pipeline": live.described,
            "seed": self.seed,
            "share": list(live.run.share),
            "epoch": live.epoch,
            "pass": live.number,
            "before": live.before,
            "delivered": live.run.delivered,
            "stages": {},
            "inner_epoch": None if inner is None else inner.current_epoch(),
        }
        for stage in self.pipeline:
            if isinstance(stage, Stage) and stage.kwargs.get("rng") is not None:
                raise StateError(
                    f"the stage {describe(stage)} draws from a generator of the caller's own",
                    hint="give it a seed instead",
                )
            if _name(stage) in {"mcached", "lmdb_cached"}:
                raise StateError(
                    f"the stage {_name(stage)} gives samples that it has kept, which another process does not have",
                    hint="leave it out where runs are to be resumed",
                )
        if live.can_go_on and live.is_between:
            parts = {str(number): part() for number, part in sorted(live.run.snapshots.items())}
            state["stages"] = parts
        return state

    def next_state(self) -> dict[str, Any]:
        """Return the state of the beginning of the next epoch."""
        inner = _inner(self.pipeline)
        epoch = None if inner is None else inner.next_epoch()
        return {"version": _VERSION, "begun": False, "epoch": self.next_epoch(), "inner_epoch": epoch}

    def next_epoch(self) -> int:
        """Return the number of the next epoch."""
        return self._board.peek(torch_worker())

    def current_epoch(self) -> int:
        """Return the number of the epoch that was begun last, or of the next one if none was."""
        return self.next_epoch() if self._live is None else self._live.epoch

    def set_own_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one of this process alone, as a state says that was saved in it."""
        self._board.set_own(torch_worker(), epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state` was saved; behind a whole epoch, with the next one.

        Raises:
            StateError: It is no state, or one of another pipeline; says what differs.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            found = state.get("version") if isinstance(state, dict) else None
            raise StateError(f"this is no state of a pipeline that this version knows (version {found!r})")
        wanted = _KINDS if state.get("begun") else {"epoch": int}
        for name, kind in wanted.items():
            if not isinstance(state.get(name), kind):
                raise StateError(f"the state is damaged: {name} is {state.get(name)!r}")
        mine = describe_all(self.pipeline)
        if state.get("begun") and state["pipeline"] != mine:
            then, now = next(pair for pair in zip_longest(state["pipeline"], mine) if pair[0] != pair[1])
            raise StateError(
                f"the state is of another pipeline: where that had {then or 'no stage'}, this one has {now or 'none'}",
                hint="make the pipeline as it was when the state was saved",
            )
        if state.get("begun") and state["seed"] != self.seed:
            raise StateError(f"the state is of a pipeline with seed {state['seed']}, and this one has {self.seed}")
        inner = _inner(self.pipeline)
        if inner is not None and state.get("inner_epoch") is not None:
            inner.set_own_epoch(state["inner_epoch"])
        self._loaded = self._live = None
        if state["begun"]:
            self._loaded = dict(state)
        else:
            self.set_own_epoch(state["epoch"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}

    def _begin(self, lane: int | None = None) -> Live:
        """Take the number of the epoch, and the state that was loaded."""
        share, worker = find_share(), torch_worker()
        state, self._loaded = self._loaded, None
        if state is None:
            self._live = Live(self, self._board.take(worker), share, worker, lane=lane)
            return self._live
        if list(share) != state["share"]:
            rank, world_size, number, workers = state["share"]
            raise StateError(
                f"the state was saved by worker {number} of {workers} in rank {rank} of {world_size}, "
                f"and this is worker {share.worker} of {share.num_workers} in rank {share.rank} of {share.world_size}",
                hint="go on with as many processes, each with the state that it saved",
            )
        self._board.set_own(worker, state["epoch"])
        self._live = Live(self, self._board.take(worker), share, worker, state=state, lane=lane)
        return self._live

    def _run(self, live: Live | None) -> Iterator[Any]:
        live = live or self._begin()
        capped = self.nsamples >= 0
        try:
            for number in count(live.number) if self.repetitions == _ENDLESS else range(live.number, self.repetitions):
                run = live.start(number)
                if capped and live.before + run.delivered >= self.nsamples:
                    break
                for sample in self._chain(run, live):
                    run.delivered += 1
                    live.is_between = True
                    yield sample
                    live.is_between = False
                    if capped and live.before + run.delivered >= self.nsamples:
                        break
                if not run.delivered and self.repetitions > 1:
                    raise NoSamplesError(
                        f"not one sample came through the pipeline in pass {number} of epoch {live.epoch}",
                        hint=f"a stage drops them all: {live.report.summary()}",
                    )
                if capped and live.before + run.delivered >= self.nsamples:
                    break
            live.finish()
        finally:
            live.leave(self._board)

    def _chain(self, run: Run, live: Live) -> Iterator[Any]:
        source: Any = None
        for number, stage in enumerate(self.pipeline):
            defers = any(_hold_what_is_read(self.pipeline[at : at + 2]) for at in (number - 1, number) if at >= 0)
            with starting(run):
                source = _start(stage, source, Step(run, number, _name(stage), defers=defers), is_first=not number)
        if source is None:
            return iter(())
        live.chain = source
        skip = live.replayed
        if skip:  # what could not be saved is gone through again
            run.delivered = 0
            source = iter(source)
            for _ in range(skip):
                next(source, None)
            run.delivered = skip
        return iter(source)


def _inner(stages: list[Any]) -> Any:
    """Return the dataset that stands as the first stage, if it counts epochs of its own, or None."""
    inner = stages[0] if stages else None
    return inner if hasattr(inner, "set_own_epoch") else None


def _name(stage: Any) -> str:
    name = getattr(stage, "name", None) or getattr(stage, "__name__", None)
    return name if isinstance(name, str) else type(stage).__name__


def _hold_what_is_read(stages: list[Any]) -> bool:
    """Tell whether these are the reading stage and a buffer right behind it, which can hold samples yet to be made."""
    if not all(isinstance(stage, Stage) for stage in stages):
        return False
    functions = [stage.function for stage in stages]
    return functions == [read_samples, shuffle] and stages[1].kwargs.get("max_bytes") is None


def _start(stage: Any, source: Any, step: Step, *, is_first: bool) -> Any:
    """Begin a pass over one stage, of whatever kind it is.

    Raises:
        TypeError: It is nothing that can be a stage there.
    """
    if isinstance(stage, str | bytes):
        raise TypeError(f"{stage!r} is no stage: give SimpleShardList({stage!r})")
    if is_first and isinstance(stage, Stage) and stage.function is not list_shards:
        raise TypeError(f"{describe(stage)} works on what another stage gives: put SimpleShardList(urls) in front")
    if callable(getattr(stage, "start", None)):
        return stage.start(() if is_first else source, step)
    if callable(getattr(stage, "run", None)):
        return stage.run() if is_first else stage.run(source)
    if is_first and hasattr(stage, "__iter__"):
        return iter(stage)
    if getattr(stage, "makes_stages", False) or stage is decode_stage:
        name = _name(stage).removesuffix("_stage")
        raise TypeError(f"{name} makes a stage, and is none itself: write {name}(...)")
    if callable(stage):
        given = stage() if is_first else stage(source)
        if isinstance(given, Stage):
            raise TypeError(f"{_name(stage)} makes a stage, and is none itself: write {_name(stage)}()")
        return given
    raise TypeError(f"stage {step.number} of the pipeline can be neither called nor gone through: {stage!r}")


def _seed_of_environment() -> int:
    text = os.environ.get("WDS_SEED", "0")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"WDS_SEED={text!r} is no whole number") from None


__all__ = ["DataPipeline", "Stage"]
