"""The exact loader: one order for any number of ranks, resumed to the sample."""

from __future__ import annotations

import operator
import os
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.decoding.batches import BatchDecoder
from shardset.errors import StateError
from shardset.policy import Report

from .arguments import MEANT, check_arguments, check_function, check_names, check_seed, no_step
from .bucketing import BucketFeed
from .feeds import make_feed
from .iteration import Pass
from .loader_state import LoaderState, load_state, save_state
from .metrics import Meter, Metrics
from .mixing import MixFeed, Mixture
from .ranks import find_share
from .trace import Traced, trace_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TextIO

    from shardset.decoding.options import Decode
    from shardset.policy import Policy

    from .batches import Maker, Map
    from .bucketing import BucketSummary
    from .feed import Feed
    from .feeds import Made, Shuffling, Source
    from .read_ahead import ReadAhead
    from .steps import Steps, Tail
    from .workers import Workers


_OWN: Final = frozenset({"_made", "_meter", "_lock", "_pool", "report"})
"""What a copy of a loader has its own of."""


class _Place(NamedTuple):
    """Where a loader stands: how many positions of an epoch have been given."""

    epoch: int
    position: int


class Loader:
    """Gives a dataset in batches, in an order that is the same for any number of ranks, and goes on where it stood.

    Position `n` of an epoch is a function of (dataset, settings of the shuffle, seed, epoch, n). A step takes the next
    ``batch_size * world_size`` positions, each rank its share. So the first `n` samples that are given are the same
    whatever ranks and batch sizes share them, and step `k` is the same set of samples whenever that product is. A state
    holds how many positions were given, and nothing about ranks: it is loaded on any number of ranks, with any batch
    size.

    Iteration goes through the rest of an epoch: after `load_state_dict` from where the state stood, otherwise from the
    start. When an epoch has ended, the next iteration is of the next one.

    A batch is a dict. Each field is an array with a row a sample, or a list; and the batch says of its samples
    ``__key__``, ``__shard__`` (the url), ``__offset__`` (where the sample's first payload begins in it, in bytes) and
    ``__index__`` (the number of the sample in its dataset), and of itself ``__epoch__`` and ``__position__`` (how many
    positions of the epoch have been given with it). ``__repeated__`` is there where a sample comes twice in an epoch
    (``tail="wrap"``, padded buckets), ``__source__`` in mixtures.

    Nothing is opened before the first batch, or the length, is asked for. A loader pickles.

    Args:
        dataset: A `Dataset`, some of its samples (``ds.select(...)``), ``ds.bucketed(...)``, ``ds.packed(...)``, or a
            mixture (`mix`).
        batch_size: Samples in a batch of one rank; packs, where there are packs.
        shuffle: False for the order of the dataset; True, or a `Shuffle` with sizes, to shuffle in windows that are
            read in long runs; ``"full"`` to shuffle all samples, each read by itself.
        seed: Another seed, another order.
        rank: Which rank this is; by default from torch.distributed, or the variables RANK and WORLD_SIZE, else 0.
        world_size: How many ranks there are.
        tail: What becomes of the end of an epoch that fills no step: ``"drop"``; ``"wrap"`` fills it from the start of
            the next epoch's order; ``"exact"`` gives a shorter step, in which some ranks may have one sample less, or
            none. All ranks have the same number of steps.
        fields: The fields to read; alternatives with semicolons (``"jpg;png"``, called by the first); a dict to give
            names (``{"image": "jpg;png"}``). None for all. ``"__record__"`` is a TFRecord's payload as a whole.
        decode: None for bytes as they are; True for arrays, texts, numbers and JSON by the names of the fields; a
            `Decode` to say more.
        policy: What to do about samples that cannot be read or decoded; by default the dataset's. A skipped sample is
            replaced by another one that seed, epoch and position decide (with ``tail="exact"``, and in packs, it is
            left out), and counted in `report`. A default for a field stands in for one that is missing or cannot be
            decoded.
        read_ahead: How far to work ahead.

    Attributes:
        report: What was skipped, replaced or left out on this rank, with places.

    Raises:
        ValueError: A number is out of range, or a word unknown.
    """

    def __init__(
        self,
        dataset: Source,
        batch_size: int,
        *,
        shuffle: Shuffling = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "drop",
        fields: str | Sequence[str] | Mapping[str, str] | None = None,
        decode: bool | Decode | None = None,
        policy: Policy | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._options = check_arguments(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            rank=rank,
            world_size=world_size,
            tail=tail,
            fields=fields,
            decode=decode,
            policy=policy,
            read_ahead=read_ahead,
        )
        self._source = dataset
        self._seed = check_seed(seed)
        self._place = _Place(0, 0)
        self._state: LoaderState | None = None
        self._goes_on = False
        self._is_worker_state = False
        self._made: tuple[LoaderState | None, Made] | None = None
        self._meter = Meter()
        self._weights: dict[str, Any] | None = None
        self._decoder: BatchDecoder | None = None
        self._unit: int | None = None  # that of buckets, from a state
        self._is_changed = False
        self._run = 0  # which iteration is the present one
        self._pool: tuple[int, Workers] | None = None
        self._lock = Lock()  # feeds are for one thread at a time, and one reads ahead
        self.report = Report()

    # What is to be done with samples.

    def _with(self, **changes: Any) -> Loader:
        made = object.__new__(type(self))
        made.__setstate__(self.__getstate__())
        made._options = replace(self._options, **changes)
        return made

    def map(self, function: Map, *, processes: int = 0) -> Loader:
        """Return a loader that calls a function with each sample, and makes batches of what it gives.

        Args:
            function: Takes a dict of decoded fields, with ``__key__``, ``__shard__``, ``__index__`` and ``__seed__`` (a
                number that depends on seed, epoch and position alone, for random augmentations); gives a dict.
            processes: In how many processes samples are decoded and mapped, for functions that keep Python busy; 0 for
                the threads of this one. The function must pickle then. The processes stay for as long as the loader.

        What the function raises is raised, whatever the policy says of data.

        Raises:
            TypeError: It is no function, or cannot go to another process.
            ValueError: `processes` is negative.
        """
        check_function(function, processes)
        most = max(processes, self._options.processes)
        return self._with(maps=(*self._options.maps, function), processes=most)

    def collate(self, function: Callable[[list[dict[str, Any]]], Any]) -> Loader:
        """Return a loader that has a function make each batch of a list of samples, as those of `map` are."""
        check_function(function, 0)
        return self._with(collate=function)

    def columns(self, *names: str) -> Loader:
        """Return a loader whose batches have columns of the catalog, or of joined tables, beside the fields.

        So ``width`` and ``height`` are the sizes in which images are shown, before any resizing; ``score`` a column of
        a table that ``ds.select(columns=...)`` joined. docs/selecting.md has those of the catalog. Functions of `map`
        get them too. A value that is not known is an error, as `Selection.column` says.
        """
        return self._with(columns=(*self._options.columns, *names))

    def views(self) -> Loader:
        """Return a loader that leaves payloads that are not decoded as views (`memoryview`), which copies none of them.

        What `Sample.view` says of views holds: one holds on to the memory map of its shard, or to what was read ahead
        with it, and a shard that is cut short while it is mapped ends the process.
        """
        return self._with(views=True)

    def torch(self, *, pin: bool = False) -> Loader:
        """Return a loader whose arrays are tensors over the same memory; in pinned memory, copied there, if asked."""
        return self._with(tensors=True, pin=pin)

    def progress(self, stream: TextIO | None = None) -> Loader:
        """Return a loader that shows on standard error, or a stream, how far the epoch is and what it waits for."""
        return self._with(progress=stream or True)

    # What there is.

    @property
    def dataset(self) -> Source:
        """What is loaded."""
        return self._source

    @property
    def seed(self) -> int:
        """What the order follows from, with `epoch`."""
        return self._seed

    @property
    def epoch(self) -> int:
        """Which epoch this is: that of the batch given last, or of the next one if that was the last of its epoch."""
        return self._place.epoch

    @property
    def position(self) -> int:
        """How many positions of the epoch have been given, on all ranks together."""
        return self._place.position

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self._options.batch_size

    @property
    def metrics(self) -> Metrics:
        """What was done, and waited for, on this rank."""
        return self._meter.metrics(self.report.counts)

    @property
    def buckets(self) -> list[BucketSummary]:
        """What each bucket gives in an epoch; empty where there are no buckets."""
        with self._lock:
            feed = self._made_for(self.epoch).feed
        return feed.table() if isinstance(feed, BucketFeed) else []

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._options.steps().rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._options.steps().world_size

    def _made_for(self, epoch: int) -> Made:
        """Return what comes when in an epoch: as the state says in the epoch it is of, as was asked in all others."""
        state = self._state if self._state is not None and self._state.epoch == epoch else None
        # The datasets of a mixture go on from epoch to epoch, and so does what a state says of them.
        if self._made is not None and (self._made[0] is state or isinstance(self._source, Mixture)):
            return self._made[1]
        step = self._options.steps().size
        made = make_feed(self._source, self._options.shuffle, self._seed, step, state, unit=self._unit)
        if state is None and self._weights is not None:
            made.feed.load_state(self._weights)
        self._made = state, made
        return made

    def __len__(self) -> int:
        """Return how many steps an epoch has, from its start, the same on all ranks."""
        return self.num_steps(self.epoch)

    def num_steps(self, epoch: int) -> int:
        """Return how many steps some epoch has; those of mixtures and packs are not all of one length."""
        with self._lock:
            return self._options.steps().left(self._made_for(epoch).feed, epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch. Where the loader stands in that epoch already, it stays where it is."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: epochs count from 0")
        if epoch != self.epoch:
            self._move(_Place(operator.index(epoch), 0))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the shares of the datasets of a mixture, from the next step on; on all ranks at the same step.

        States keep all such changes.

        Raises:
            TypeError: It is no mixture that is loaded.
            ValueError: The weights are not those of the mixture's datasets, or none is above 0.
        """
        if not isinstance(self._source, Mixture):
            raise TypeError(f"weights are for mixtures, which mix(...) makes, and this is {self._source!r}")
        epoch, position = self._place
        with self._lock:
            feed = self._made_for(epoch).feed
            assert isinstance(feed, MixFeed)  # noqa: S101 - of a mixture
            feed.set_weights(epoch, position, weights)
            self._weights = feed.state(epoch, position)
        self._is_changed = True  # what was read ahead was read for the old ones

    def _move(self, place: _Place) -> None:
        self._run += 1
        self._place = place
        self._goes_on = self._is_worker_state = False
        if self._state is not None and self._state.epoch != place.epoch:
            self._state = None

    # Iteration.

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on:
            self._place = self._place._replace(position=0)
        self._run += 1
        return self._batches(self._run)

    def _check_run(self, run: int) -> None:
        if run != self._run:
            raise RuntimeError(
                "this iteration is over: another one of the loader was begun, or load_state_dict or set_epoch called"
            )

    def _begin(self, epoch: int, position: int) -> tuple[Steps, Feed]:
        """Return what a pass goes through, and look whether there is anything to go through."""
        with self._lock:
            steps, feed = self._options.steps(), self._made_for(epoch).feed
            check_names(self._options, feed)
            feed.account(epoch, self.report)
            if not position and steps.after(feed, epoch, 0) is None:
                raise no_step(self._source, feed, steps, epoch)
        return steps, feed

    def _batches(self, run: int) -> Iterator[Any]:
        self._check_run(run)
        epoch, position = self._place
        steps, feed = self._begin(epoch, position)
        share = find_share()
        stride = share.num_workers
        skip = 0 if self._is_worker_state else share.worker
        self._goes_on = False
        line = self._options.progress_line()
        total = steps.left(feed, epoch, 0) if line is not None else None
        process, running = os.getpid(), None
        try:
            maker = self._maker(feed)
            running = self._pass(maker, steps, _Place(epoch, position), skip, stride)
            while True:
                self._meter.ask()
                if os.getpid() != process:  # forked: the threads are in the parent
                    process, self._lock = os.getpid(), Lock()
                    maker = self._maker(feed)
                    running = self._pass(maker, steps, self._place, 0, stride)
                elif self._is_changed:
                    running.close()
                    running = self._pass(maker, steps, self._place, 0, stride)
                self._is_changed = False
                found = next(running, None)
                if found is None:  # not a single step
                    self._move(_Place(epoch + 1, 0))
                    break
                self._check_run(run)
                step, making, is_last = found
                batch = self._options.complete(self._source, maker, making, epoch)
                self._place = _Place(epoch + 1, 0) if is_last else _Place(epoch, step.stop + (stride - 1) * steps.size)
                self._is_worker_state = stride > 1 and not is_last
                self._meter.give(len(making.kept))
                if line is not None:
                    line.show(epoch, -(-step.stop // steps.size), total, self.metrics)
                del found, making
                yield batch
                del batch
                if is_last:  # moved on already: who counts the steps does not ask once more
                    break
            if line is not None:
                line.show(epoch, total or 0, total, self.metrics, last=True)
        except BaseException as error:
            # Ctrl-C, most of all; who only leaves the loop early begins another one with the same processes.
            if self._pool is not None and os.getpid() == process and not isinstance(error, GeneratorExit):
                self._pool[1].close()
            raise
        finally:
            if running is not None and os.getpid() == process:
                running.close()

    def _pass(self, maker: Maker, steps: Steps, place: _Place, skip: int, stride: int) -> Any:
        return iter(
            Pass(
                maker,
                steps,
                *place,
                skip=skip,
                stride=stride,
                ahead=self._options.read_ahead,
                meter=self._meter,
                lock=self._lock,
                workers=self._options.processes,
            )
        )

    def _workers(self) -> Workers | None:
        """Return the processes that samples are mapped in, which are those of the pass before if they still work."""
        pool, process = self._pool, os.getpid()
        if pool is None or pool[0] != process or pool[1].is_broken:
            workers = self._options.workers(self._source)
            self._pool = None if workers is None else (process, workers)
            return workers
        return pool[1]

    def _maker(self, feed: Feed) -> Maker:
        # It keeps the memory of batches.
        decoder = self._decoder = self._decoder or BatchDecoder(self._options.decode_of(self._source))
        return self._options.maker(self._source, feed, decoder, self._workers(), report=self.report, seed=self._seed)

    # States.

    def state_dict(self, batch: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return where the loader stands, as JSON of a few hundred bytes: no ranks, paths or credentials.

        Args:
            batch: A batch of this loader: the state is the one right after it was given. By default that of the last
                batch given, which is not the last one that the trainer has seen where something else, such as workers
                of a DataLoader or accelerate, fetches batches ahead of it.

        Raises:
            As `Dataset.catalog`.
        """
        epoch, position = self._place
        worker = self._is_worker_state
        with self._lock:
            if batch is not None:
                epoch, position, worker = int(batch["__epoch__"]), int(batch["__position__"]), False
                if epoch < 0 or position < 0:
                    raise ValueError(f"a batch of epoch {epoch} and position {position} is none of a Loader")
                if (
                    self._options.steps().after(self._made_for(epoch).feed, epoch, position) is None
                ):  # it was the last one
                    epoch, position = epoch + 1, 0
            return save_state(self._made_for(epoch), self._seed, epoch, position, is_worker=worker)

    def load_state_dict(self, state: Mapping[str, Any], *, appended: bool = False) -> None:
        """Go on where a state stood: the next iteration gives what came next then. Seed and epoch are the state's.

        What was asked of the shuffle holds again from the next epoch on; until then it is as in the state.

        Args:
            state: What `state_dict` gave, on any rank, with any batch size and number of ranks.
            appended: Allow shards that were appended to the dataset since: they come from the next epoch on.

        Raises:
            StateError: It is of another dataset, or malformed; says what differs. Nothing was changed.
        """
        loaded = load_state(state, self._source, appended=appended)
        made = make_feed(self._source, self._options.shuffle, loaded.seed, self._options.steps().size, loaded)
        with self._lock:
            count = made.feed.count(loaded.epoch, loaded.position)
        if loaded.position > count and not loaded.is_worker:
            raise StateError(f"the state stands at position {loaded.position} of an epoch of {count}")
        self._run += 1
        self._seed, self._state, self._made = loaded.seed, loaded, (loaded, made)
        self._unit = made.feed.unit or None
        self._weights = loaded.feed if isinstance(self._source, Mixture) else None
        self._place = _Place(loaded.epoch, loaded.position)
        self._goes_on, self._is_worker_state = True, loaded.is_worker

    def trace(
        self, step: int | None = None, *, epoch: int | None = None, positions: tuple[int, int] | None = None
    ) -> list[Traced]:
        """Return which samples a step takes, on all ranks, without reading them: for the hunt after a loss spike.

        Args:
            step: Number of a step in its epoch, from 0, if all steps of that were as large as this loader's.
            epoch: Which epoch; by default the present one.
            positions: In place of a step: the half-open range of positions, such as the ``__position__`` of two batches
                in a row.

        Raises:
            IndexError: The epoch has no such step or positions.
            ValueError: Neither a step nor positions are given, or both.
        """
        epoch = self.epoch if epoch is None else operator.index(epoch)
        with self._lock:
            feed, steps = self._made_for(epoch).feed, self._options.steps()
            names = getattr(self._source, "names", None)
            return trace_positions(feed, steps, epoch, step=step, positions=positions, names=names)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _made=None, _pool=None, _meter=Meter(), _lock=Lock(), report=Report())

    def __getattr__(self, name: str) -> Any:
        meant = f": here it is {MEANT[name]}" if name in MEANT else ""
        raise AttributeError(f"a Loader has no {name!r}{meant}")

    def __repr__(self) -> str:
        said = self._options.shown(self._source, self._seed)
        return f"<Loader({said}) at epoch {self.epoch}, position {self.position}>"
