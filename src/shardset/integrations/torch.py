"""Datasets for torch's DataLoader: a `Loader` as an iterable one, samples by number as a map-style one."""

from __future__ import annotations

import multiprocessing
import operator
import os
import signal
import threading
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from shardset.dataset.dataset import Dataset
from shardset.dataset.select import Selection
from shardset.decoding.batches import BatchDecoder
from shardset.decoding.options import Decode
from shardset.errors import MissingExtraError, StateError
from shardset.loading.batches import Making
from shardset.loading.blocks import Share
from shardset.loading.feed import Picks, SampleFeed
from shardset.loading.feeds import views_of
from shardset.loading.fields import parse_fields
from shardset.loading.options import Options
from shardset.loading.order import SequentialOrder
from shardset.loading.read_ahead import ReadAhead
from shardset.loading.steps import Step
from shardset.pipeline.epochs import Board
from shardset.policy import Report

from .passes import MAX_WORKERS, Passes

try:
    import torch  # type: ignore[import-not-found, unused-ignore]
    from torch.utils import data as torch_data  # type: ignore[import-not-found, unused-ignore]
except ImportError as error:
    raise MissingExtraError("shardset.integrations.torch needs torch", extra="torch") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardset.loading.batches import Maker
    from shardset.loading.loader import Loader
    from shardset.policy import Policy

    Int64s = NDArray[np.int64]

__all__ = ["IterableDataset", "MapDataset"]

_GRACE: Final = 3.0
_watching: set[int] = set()
"""This process, once it ends with the one that started it."""


def _end_with_parent() -> None:
    """Have this worker end when the trainer does, however that ends.

    A worker of torch asks now and then whether its parent lives. With forkserver that is the server, which lives for as
    long as the worker does: both would stay forever behind a trainer that was killed.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and os.getpid() not in _watching:
        _watching.add(os.getpid())
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _watch(sentinel: Any) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGINT)  # torch takes that for its end, and puts away what it has
    time.sleep(_GRACE)
    os._exit(1)


class IterableDataset(torch_data.IterableDataset):  # type: ignore[misc, unused-ignore]
    """A `Loader` for torch's DataLoader, and for torchdata's StatefulDataLoader.

    ``DataLoader(IterableDataset(loader), batch_size=None, num_workers=2)`` gives the batches that the loader gives, in
    its order, whatever the number of workers: worker `k` of `K` makes the steps `k`, `k + K`, ... Ranks are found as by
    `Loader`, and reach workers however they are started.

    Each pass over it, or over a DataLoader of it, is of another epoch: the one after that of the pass before, whether
    that was finished or not. After `load_state_dict` the next pass goes on where the state stood.

    Args:
        loader: The loader. A state or an epoch that it was given counts; from now on they are given to this object.

    Attributes:
        loader: The loader.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader = loader
        goes_on = loader._goes_on  # noqa: SLF001 - of one package
        self._passes = Passes(loader.epoch, _pack(loader.state_dict()) if goes_on else None)
        self._board = Board(loader.epoch)
        self._seen: tuple[int, int] | None = None
        self._own: int | None = None  # in a worker: the epoch of the state that it was given to go on from
        self._pass = loader.epoch  # in a worker: the epoch of its pass
        self._left = self._place()

    # Passes.

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        if info is None:
            return self._alone()
        _end_with_parent()
        self._check_worker()
        # Now, and not when the first batch is asked for: all workers of a pass are in it before the next one begins.
        self._check_place()
        own, self._own = self._own, None
        base_seed = (info.seed - info.id) * MAX_WORKERS + info.num_workers  # alike, two loaders may still differ there
        self._pass, state = self._passes.join(info.id, base_seed, own)
        if own is None:
            self._move(self._pass, state)
        self._board.set_own(info.id, self._pass)
        self._board.take(info.id)
        self.loader.report = Report()
        return iter(()) if self.loader.epoch > self._pass else self._in_worker(info.id)

    def _alone(self) -> Iterator[Any]:
        self._check_place()
        epoch, state = self._passes.begin()
        self._board.set_next(epoch + 1)
        self._board.take(None)  # what workers told is of an earlier pass
        self._seen = None
        self._move(epoch, state)
        yield from self._batches()

    def _in_worker(self, worker: int) -> Iterator[Any]:
        told = 0
        for batch in self._batches():
            if len(self.loader.report) != told:
                told = len(self.loader.report)
                self._board.leave(worker, self.loader.report)
            yield batch
        self._board.leave(worker, self.loader.report)

    def _batches(self) -> Iterator[Any]:
        for batch in self.loader:
            self._left = self._place()
            yield batch
        self._left = self._place()

    def _move(self, epoch: int, state: bytes | None) -> None:
        """Have the loader go on from a state, or from the start of an epoch."""
        if state is not None:
            self.loader.load_state_dict(**orjson.loads(state))
        elif (self.loader.epoch, self.loader.position) != (epoch, 0):
            self.loader.set_epoch(epoch + 1)  # where it stands in that epoch already, it would stay
            self.loader.set_epoch(epoch)
        self._left = self._place()

    def _place(self) -> tuple[int, int, bool]:
        return self.loader.epoch, self.loader.position, self.loader._goes_on  # noqa: SLF001

    def _check_place(self) -> None:
        """Refuse to go on with a loader that was moved by others: workers and later passes would not know."""
        if self._place() != self._left:
            raise StateError(
                "the loader in this dataset was iterated, or given a state or an epoch, behind its back",
                hint="call load_state_dict and set_epoch of the IterableDataset, and iterate that",
            )

    def _check_worker(self) -> None:
        """Refuse what no worker of a DataLoader can do, before it fails in ways that are hard to read."""
        options = self.loader._options  # noqa: SLF001
        if options.processes:
            what = "a worker of a DataLoader cannot start the processes that map(..., processes=...) asks for"
            raise ValueError(f"{what}: leave them out, or the workers")
        if options.views:
            raise ValueError("views of memory cannot be handed over by a worker of a DataLoader: leave out views()")

    @property
    def epoch(self) -> int:
        """The epoch of the pass that comes next."""
        return self._passes.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` that of the next pass, in workers that run already too.

        Raises:
            StateError: A state is loaded that the next pass goes on from, and it is of another epoch.
            ValueError: `epoch` is negative.
        """
        if self._passes.has_state:
            if epoch == self.epoch:
                return
            raise StateError(
                f"a state of epoch {self.epoch} was loaded, and set_epoch({epoch}) would drop it",
                hint="begin to count with the attribute epoch of the IterableDataset, which is that of the state",
            )
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: epochs count from 0")
        self._go_to(epoch, None)

    def _go_to(self, epoch: int, state: bytes | None) -> None:
        self._passes.move(operator.index(epoch), state)
        self._board.set_next(epoch)
        self._seen = None
        if state is None:
            self._move(epoch, None)
        self._left = self._place()

    def __len__(self) -> int:
        """Return how many steps the epoch has that comes next, from its start, the same on all ranks."""
        return self.loader.num_steps(self.epoch)

    @property
    def report(self) -> Report:
        """What was skipped or replaced on this rank: in this process, and in the latest pass of each worker."""
        report = Report()
        for part in (self.loader.report, *self._board.reports()):
            report.merge(part)
        return report

    # States.

    def seen(self, batch: Mapping[str, Any]) -> None:
        """Note that the trainer has had a batch: `state_dict` gives the state right after it.

        For whoever saves states by calling ``state_dict()``, while workers, or accelerate, fetch batches ahead.
        """
        self._seen = int(batch["__epoch__"]), int(batch["__position__"])

    def state_dict(self, batch: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return where the trainer stands, as `Loader.state_dict` does.

        Args:
            batch: The batch that the trainer has had last; by default the one that `seen` was told of; else, without
                workers, the last one given.

        Raises:
            StateError: Workers fetch batches ahead, and it is unknown which one the trainer has had.
        """
        if torch_data.get_worker_info() is not None:  # as StatefulDataLoader asks each worker, after each batch
            state = self.loader.state_dict()
            return state | {"over": True} if self.loader.epoch > self._pass else state
        if batch is None and self._seen is not None:
            batch = {"__epoch__": self._seen[0], "__position__": self._seen[1]}
        if batch is None and self._board.has_workers():
            raise StateError(
                "workers fetch batches ahead of the trainer, and which one it has had last is unknown",
                hint="give it, state_dict(batch); or tell of each, seen(batch); or use torchdata's StatefulDataLoader",
            )
        return self.loader.state_dict(batch)

    def load_state_dict(self, state: Mapping[str, Any], *, appended: bool = False) -> None:
        """Have the next pass go on where a state stood; see `Loader.load_state_dict`.

        Args:
            state: What `state_dict` gave, here or of a `Loader`; on any rank, with any number of ranks and workers.
            appended: Allow shards that were appended to the dataset since.

        Raises:
            StateError: It is of another dataset, or malformed; says what differs. Nothing was changed.
        """
        if torch_data.get_worker_info() is None:
            if "every" in state or "over" in state:
                raise StateError("this is the state of one worker of a StatefulDataLoader", hint="load it into that")
            self.loader.load_state_dict(state, appended=appended)
            self._go_to(self.loader.epoch, _pack(state, appended=appended))
            return
        is_over = "over" in state
        self.loader.load_state_dict({name: value for name, value in state.items() if name != "over"})
        self._own = self.loader.epoch - is_over
        self._left = self._place()

    def __repr__(self) -> str:
        return f"IterableDataset({self.loader!r})"


def _pack(state: Mapping[str, Any], *, appended: bool = False) -> bytes:
    return orjson.dumps({"state": dict(state), "appended": appended})


class _Asked(Share):
    """Samples that a sampler asked for, with seeds of augmentations from torch, whose workers are each seeded anew."""

    def seeds(self, seed: int) -> Int64s:  # noqa: ARG002 - as a share of a loader
        drawn: Int64s = torch.randint(0, (1 << 63) - 1, (len(self.positions),), dtype=torch.int64).numpy()
        return drawn


class MapDataset(torch_data.Dataset):  # type: ignore[misc, unused-ignore]
    """Samples by number, for torch's samplers: ``dataset[i]`` is a dict of fields.

    A DataLoader asks for all samples of a batch at once, and they are read together. Whoever has no sampler of their
    own is better off with a `Loader`, which knows what comes next, reads it ahead and resumes exactly.

    Beside its fields a sample has ``__key__``, ``__shard__`` (the url) and ``__index__`` (its number in its dataset).

    Args:
        view: A dataset, or some of its samples (``ds.select(...)``).
        fields: As for `Loader`.
        decode: As for `Loader`. What is left to chance, such as where an image is cut, follows from torch's generator.
        transform: A function of a sample, which gives what stands in its place. It finds a random number for
            augmentations under ``__seed__``.
        policy: As for `Loader`: a sample that is skipped is replaced by another, the same one each time.

    Attributes:
        view: The samples.

    Raises:
        TypeError: `view` is neither a dataset nor some of its samples.
    """

    def __init__(
        self,
        view: Dataset | Selection,
        fields: str | Sequence[str] | Mapping[str, str] | None = None,
        decode: bool | Decode | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.view = view
        how = Decode() if decode is True else decode or None
        self._options = Options(
            batch_size=1,
            shuffle=False,
            rank=0,
            world_size=1,
            tail="wrap",
            fields=parse_fields(fields),
            decode=how,
            policy=policy,
            read_ahead=ReadAhead(),
            collate=list,
        )
        self._transform = transform
        self._board = Board()
        self._forget()
        if not isinstance(view, Dataset | Selection):
            raise TypeError(f"samples have numbers in a Dataset or a Selection, and not in {view!r}")

    def _forget(self) -> None:
        """Begin anew in a process: its report is its own."""
        self._process = os.getpid()
        self._report = Report()
        self._told = 0
        self._maker: Maker | None = None

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: There is no such sample.
            Exception: It cannot be read or decoded, and the policy says to raise.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, in the order asked; a DataLoader calls this for a batch.

        Raises:
            As for one sample.
        """
        places = np.array([operator.index(index) for index in indices], np.int64)
        count = len(self)
        if len(places) and not -count <= int(places.min()) <= int(places.max()) < count:
            raise IndexError(f"samples {places.min()} to {places.max()} of {count}")
        places[places < 0] += count
        maker = self._made()
        reader = maker.readers[0]
        numbers = maker.feed.views[0].numbers_at(places)
        asked = _Asked(Step(0, len(places)), Picks(numbers), np.zeros(len(places), np.int64), places)
        making = Making(maker, asked, [reader.read_ahead(numbers)])
        for task in making.tasks():
            task()
        making.finish()
        info = torch_data.get_worker_info()
        if info is not None:
            _end_with_parent()
            if len(self._report) != self._told:
                self._told = len(self._report)
                self._board.leave(info.id, self._report)
        return [self._finished(sample) for sample in making.samples]

    def _finished(self, sample: dict[str, Any]) -> Any:
        if self._transform is None:
            del sample["__seed__"]
            return sample
        try:
            return self._transform(sample)
        except Exception as error:
            error.add_note(f"called with sample {sample['__key__']!r} of {sample['__shard__']}")
            raise

    def _made(self) -> Maker:
        if self._process != os.getpid():
            self._forget()
        if self._maker is None:
            view = views_of(self.view)[0]
            feed, decoder = SampleFeed(view, SequentialOrder(len(view)), 0), BatchDecoder(self._options.decode)
            self._maker = self._options.maker(self.view, feed, decoder, None, report=self._report, seed=0)
        return self._maker

    @property
    def report(self) -> Report:
        """What was skipped, replaced or given with defaults: in this process, and in the latest workers."""
        report = Report()
        for part in (self._report, *self._board.reports()):
            report.merge(part)
        return report

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in {"_maker", "_report"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        return f"MapDataset({self.view!r})"
