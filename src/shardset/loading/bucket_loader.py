"""A loader that gives files bucket by bucket, in batches of one shape."""

from __future__ import annotations

import logging
import operator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import StateError
from shardset.policy import Place

from .bucket_order import STRATEGIES, FileOrder, Plan, Strategy, order_files, plan_pass
from .bucket_store import dataset_file_order
from .buckets import Shape
from .fetch import NO_ENTRIES, Fetcher, as_dataset, checked_batch_size
from .one_ahead import OneAhead
from .state import check_dataset, place_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from shardset.dataset.dataset import Dataset
    from shardset.policy import Policy

    from .entry import TarFileEntry
    from .fetch import Entries

    Planned = tuple[FileOrder, Plan]

logger = logging.getLogger(__name__)

STATE_VERSION: Final = 1
_AT_ONCE: Final = 64
_MEBI: Final = 1 << 20
_PLANNED_AHEAD: Final = 1 << 19
"""Where a part of the shards has more files, the indexes of two of them may not stay in memory."""
_STRATEGY_NAMES: Final = dict(zip(STRATEGIES, ("Sequential", "RandomWithinBuckets", "FullyRandom"), strict=True))


class BucketDataLoader:
    """Gives the files that have a size in pixels, bucket by bucket; a batch never holds two shapes.

    Files are those of every shard that are images by their index, sidecars never. `shardset.loading.buckets` has the
    rules of buckets; they come sorted by key, and within one shard by shard in path order. With ``lazy_load``, some
    shards at a time are sorted into buckets, and all their files are given before the next shards are looked at;
    otherwise all shards at once. Shuffled orders follow from `seed` and `epoch` alone.

    Where shards are not mapped into memory, what comes next, a batch or a chunk of files, is read while the caller
    works on what came before. What cannot be read raises or counts when it is asked for.

    Args:
        dataset_or_path: A dataset, or a source for `discover_dataset`.
        key: ``aspect``, ``geometry-tuple`` or ``geometry-list``.
        target_pixel_area: Pixels that sizes are scaled to before they are compared.
        target_resolution_multiple: What scaled sides are multiples of.
        round_to: Decimals of an aspect; None for all.
        sampling_strategy: ``sequential``, ``random_within_buckets`` or ``fully_random``, which is never lazy.
        load_file_data: Read payloads; otherwise entries have empty `data`.
        max_file_size: Larger files are left out, in bytes.
        hf_token: Token for the Hub, for a source.
        chunk_size_mb: How many MiB are read at once.
        lazy_load: Sort some shards at a time into buckets.
        shard_batch_size: How many shards that is.
        batch_size: Files in a batch.
        seed: For shuffled orders.
        epoch: Which pass comes first.
        drop_last: Leave out what is left of a bucket when it is smaller than a batch. Files by themselves all come.
        copy: Give bytes; otherwise views.
        policy: What to do if a file cannot be read; by default the dataset's.

    Raises:
        As `discover_dataset`, for a source.
        ValueError: Key or strategy is unknown, or a number is out of range.
    """

    def __init__(  # noqa: PLR0917 - webshart's signature
        self,
        dataset_or_path: Dataset | str | os.PathLike[str],
        key: str = "aspect",
        target_pixel_area: int | None = None,
        target_resolution_multiple: int = 64,
        round_to: int | None = 2,
        sampling_strategy: Strategy = "sequential",
        load_file_data: bool = True,
        max_file_size: int = 50_000_000,
        hf_token: str | None = None,
        chunk_size_mb: int = 10,
        lazy_load: bool = True,
        shard_batch_size: int = 10,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        copy: bool = True,
        policy: Policy | None = None,
    ) -> None:
        self._shape = Shape(key, target_pixel_area, target_resolution_multiple, round_to).check()
        if sampling_strategy not in STRATEGIES:
            raise ValueError(
                f"sampling_strategy must be {', '.join(map(repr, STRATEGIES[:-1]))}, or {STRATEGIES[-1]!r}, "
                f"not {sampling_strategy!r}"
            )
        if shard_batch_size < 1:
            raise ValueError(f"shard_batch_size is {shard_batch_size}, not positive")
        self._batch_size = checked_batch_size(batch_size)
        dataset = as_dataset(dataset_or_path, hf_token=hf_token, policy=policy)
        self._fetcher = Fetcher(
            dataset, load=load_file_data, max_file_size=max_file_size, copy=copy, policy=policy or dataset.policy
        )
        self._strategy: Strategy = sampling_strategy
        self._chunk_bytes = max(1, chunk_size_mb) * _MEBI
        self._is_lazy = lazy_load
        self._shards_at_once = shard_batch_size
        self._seed = operator.index(seed)
        self._epoch = operator.index(epoch)
        self._drop_last = drop_last
        self._counts: dict[str, int] = {}
        self._windows_seen = 0
        self._window = -1
        self._planned: Planned | None = None
        self._position = 0
        self._has_begun = False
        self._chunk = NO_ENTRIES
        self._chunk_start = 0
        self._read_ahead: OneAhead[Entries] = OneAhead()
        self._planned_ahead: OneAhead[Planned] = OneAhead()

    @property
    def dataset(self) -> Dataset:
        """What is loaded."""
        return self._fetcher.dataset

    @property
    def seed(self) -> int:
        """What shuffled orders follow from, with `epoch`."""
        return self._seed

    @property
    def epoch(self) -> int:
        """Which pass this is. Setting it moves to the start of that pass."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = operator.index(value)
        self._start(0)

    @property
    def drop_last(self) -> bool:
        """Whether batches leave out what is left of a bucket."""
        return self._drop_last

    @property
    def batch_size(self) -> int | None:
        """Files in a batch; None if none was set."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        value = checked_batch_size(value)
        if self._strategy == "fully_random" and value != self._batch_size:
            if self._position:
                raise ValueError("a random order is made of batches; set batch_size before the pass begins")
            self._start(0)
        self._batch_size = value

    # Where it stands.

    @property
    def _num_windows(self) -> int:
        if not self._is_lazy or self._strategy == "fully_random":
            return 1
        return -(-self.dataset.num_shards // self._shards_at_once)

    def _start(self, window: int) -> None:
        self._read_ahead.drop()
        self._planned_ahead.drop()
        self._enter(window)

    def _enter(self, window: int) -> None:
        self._window, self._planned, self._position = window, None, 0
        self._chunk = NO_ENTRIES

    def _current(self) -> Planned | None:
        """Return order and plan that the position is in, moving on to the next shards if need be; None at the end."""
        while True:
            if self._planned is None:
                window = max(self._window, 0)
                if window >= self._num_windows:
                    return None
                self._planned = self._make_plan(window, self._seed, self._epoch, self._batch_size)
                self._window = window
            if self._position < len(self._planned[1].places):
                return self._planned
            if self._window + 1 >= self._num_windows:
                return None
            self._enter(self._window + 1)

    def _make_plan(self, window: int, seed: int, epoch: int, batch_size: int | None) -> Planned:
        task = self._planning(window, seed, epoch, batch_size)
        order, plan = self._planned_ahead.take((window, seed, epoch), task)
        if window >= self._windows_seen:
            for key, count in zip(order.keys, np.diff(order.starts).tolist(), strict=True):
                self._counts[key] = self._counts.get(key, 0) + count
            self._windows_seen = window + 1
        if not len(order.shard):
            what = "no file here has a known width and height, so nothing comes: index them with geometry"
            self.dataset.report.add("no_geometry", Place(self.dataset.name, message=what))
            logger.warning("%s", what)
        return order, plan

    def _planning(self, window: int, seed: int, epoch: int, batch_size: int | None) -> Callable[[], Planned]:
        """Return what makes the plan of a window, in any thread."""
        if self._num_windows == 1:
            order = partial(dataset_file_order, self._fetcher, self._shape)
        else:
            order = partial(_order_shards, self._fetcher, self._shards_of(window), self._shape)
        return partial(_plan, order, self._strategy, seed, epoch, batch_size)

    def _shards_of(self, window: int) -> range:
        start = window * self._shards_at_once
        return range(start, min(start + self._shards_at_once, self.dataset.num_shards))

    # Files and batches.

    def __iter__(self) -> Iterator[TarFileEntry]:
        return self

    def __next__(self) -> TarFileEntry:
        while True:
            files, unread, _ = self._chunk
            at = self._position - self._chunk_start
            if not 0 <= at < len(files):
                planned = self._current()
                if planned is None:
                    raise StopIteration
                span = self._span(planned, self._position, None)
                self._chunk, self._chunk_start = self._read(planned, span, None), span.start
                continue
            entry, files[at] = files[at], None
            if at in unread:
                entry = self._fetcher.settled(unread.pop(at))
            self._position += 1
            self._has_begun = True
            if entry is not None:  # one that the policy left out
                return entry

    def next_batch(self) -> list[TarFileEntry] | None:
        """Return the next files of one bucket, `batch_size` of them or else one; None at the end.

        Raises:
            StorageError: Reading failed; the position stays where it was.
        """
        size = self._batch_size or 1
        while (planned := self._current()) is not None:
            span = self._span(planned, self._position, size)
            entries = self._fetcher.settle_all(self._read(planned, span, size)) if span else []
            batch = [entry for entry in entries if entry is not None]
            self._position = span.stop
            self._has_begun = True
            if batch:
                return batch
        return None

    def iter_batches(self) -> Iterator[list[TarFileEntry]]:
        """Give batches, each of one bucket; the last of a bucket may be smaller.

        Raises:
            ValueError: No `batch_size` is set.
        """
        if self._batch_size is None:
            raise ValueError("batch_size must be set to iterate batches")
        return iter(self.next_batch, None)

    def _span(self, planned: Planned, start: int, size: int | None) -> range:
        """Return what is read at once from a position on: a batch of `size`, or a chunk; empty if no more come."""
        order, plan = planned
        count = len(plan.places)
        if size is None:
            ends = np.cumsum(order.length[plan.places[start : start + _AT_ONCE]])
            most = max(1, int(np.searchsorted(ends, self._chunk_bytes, side="right")))
            return range(start, min(start + most, count))
        while start < count:
            end = int(plan.ends[np.searchsorted(plan.ends, start, side="right")])
            if end - start >= size or not self._drop_last:
                return range(start, min(start + size, end))
            start = end
        return range(count, count)

    def _read(self, planned: Planned, span: range, size: int | None) -> Entries:
        """Read what stands at some positions, and begin to read what comes behind them."""
        found = self._read_ahead.take((self._window, span), self._reading(planned, span))
        if self._fetcher.load and (not found.are_mapped or self.dataset.is_remote):
            self._work_ahead(planned, span.stop, size)
        return found

    def _work_ahead(self, planned: Planned, start: int, size: int | None) -> None:
        window, span = self._window, self._span(planned, start, size)
        if window + 1 < self._num_windows and len(planned[1].places) <= _PLANNED_AHEAD:
            following = (window + 1, self._seed, self._epoch)
            self._planned_ahead.begin(following, self._planning(*following, self._batch_size))
            if not span and (then := self._planned_ahead.peek(following)) is not None:
                window, planned, span = window + 1, then, self._span(then, 0, size)
        if span:
            self._read_ahead.begin((window, span), self._reading(planned, span))

    def _reading(self, planned: Planned, span: range) -> Callable[[], Entries]:
        """Return what reads the files at some positions, in any thread."""
        order, plan = planned
        places = plan.places[span.start : span.stop]
        files = list(zip(order.shard[places].tolist(), order.file[places].tolist(), strict=True))
        return partial(self._fetcher.read, files, as_samples=False)

    def reset(self) -> None:
        """Move to the start. If files were given before, that begins the next epoch, with another shuffle."""
        if self._has_begun and self._strategy != "sequential":
            self._epoch += 1
        self._has_begun = False
        self._start(0)

    # Buckets.

    def get_current_bucket(self) -> str | None:
        """Return the key of the bucket that the next file is of; None at the end."""
        planned = self._current()
        if planned is None:
            return None
        plan = planned[1]
        return plan.keys[int(plan.bucket[self._position])]

    def skip_to_bucket(self, bucket_key: str) -> None:
        """Move to the first file of a bucket; with ``lazy_load``, in the shards at hand or else in later ones.

        Raises:
            ValueError: There is no such bucket; the position stays where it was.
        """
        before = (self._window, self._position)
        self._start(max(self._window, 0))
        while (planned := self._current()) is not None:
            plan = planned[1]
            if bucket_key in plan.keys:
                self._position = int(np.argmax(plan.bucket == plan.keys.index(bucket_key)))
                return
            self._position = len(plan.places)
        self._start(before[0])
        self._position = before[1]
        raise ValueError(f"Bucket {bucket_key!r} not found: there are {', '.join(list(self._counts)[:8])}")

    def get_bucket_stats(self) -> dict[str, Any]:
        """Return what is known of the buckets; with ``lazy_load``, those of the shards that were looked at so far."""
        self._current()
        counts, num_shards = self._counts, self.dataset.num_shards
        seen = num_shards if self._num_windows == 1 else min(self._windows_seen * self._shards_at_once, num_shards)
        return {
            "num_buckets": len(counts),
            "sampling_strategy": _STRATEGY_NAMES[self._strategy],
            "lazy_load": self._is_lazy,
            "shards_processed": seen,
            "total_shards": num_shards,
            "batch_size": self._batch_size,
            "total_files_loaded": sum(counts.values()),
            "min_files_per_bucket": min(counts.values(), default=0),
            "max_files_per_bucket": max(counts.values(), default=0),
            "avg_files_per_bucket": sum(counts.values()) / len(counts) if counts else 0.0,
            "bucket_details": dict(sorted(counts.items())),
        }

    # States.

    def _settings(self) -> dict[str, Any]:
        """Return what decides the order and cannot be taken over from a state."""
        return {
            "key": self._shape.key,
            "target_pixel_area": self._shape.area,
            "target_resolution_multiple": self._shape.multiple,
            "round_to": self._shape.round_to,
            "sampling_strategy": self._strategy,
            "max_file_size": self._fetcher.max_file_size,
            "windows": self._num_windows,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands, as plain values that JSON can hold; no credentials are among them."""
        self._current()
        return {
            "bucket_state_version": STATE_VERSION,
            **place_of(self.dataset),
            **self._settings(),
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            "seed": self._seed,
            "epoch": self._epoch,
            "window": max(self._window, 0),
            "position": self._position,
            "has_begun": self._has_begun,
            "files": 0 if self._planned is None else len(self._planned[1].places),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move to where `state_dict` said; seed, epoch and batches are taken over.

        Raises:
            StateError: It is none of this loader's: of another version, another dataset, other buckets. Nothing was
                changed then.
        """
        version = state_dict.get("bucket_state_version")
        if version != STATE_VERSION:
            raise StateError(f"Unsupported state dict version: {version}", hint=f"this shardset reads {STATE_VERSION}")
        check_dataset(state_dict, self.dataset)
        for name, value in self._settings().items():
            if state_dict.get(name) != value:
                raise StateError(f"the state has {name} {state_dict.get(name)!r}, the loader {value!r}")
        seed, epoch, window, position, count = (
            _number(state_dict, name) for name in ("seed", "epoch", "window", "position", "files")
        )
        try:
            batch_size = checked_batch_size(state_dict.get("batch_size"))
        except (TypeError, ValueError) as error:
            raise StateError(f"the state's {error}") from error
        if not 0 <= window < self._num_windows:
            raise StateError(f"the state stands in part {window} of the shards, there are {self._num_windows}")
        planned = self._make_plan(window, seed, epoch, batch_size)
        found = len(planned[1].places)
        if found != count or not 0 <= position <= count:
            raise StateError(f"the state stands at {position} of {count} files, here are {found}")
        self._start(window)
        self._planned, self._position = planned, position
        self._seed, self._epoch, self._batch_size = seed, epoch, batch_size
        self._drop_last, self._has_begun = bool(state_dict.get("drop_last")), bool(state_dict.get("has_begun"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunk": NO_ENTRIES}  # may hold views

    def __repr__(self) -> str:
        return (
            f"BucketDataLoader({self.dataset!r}, strategy={self._strategy!r}, epoch={self._epoch}, "
            f"position={self._position})"
        )


def _order_shards(fetcher: Fetcher, shards: range, shape: Shape) -> FileOrder:
    fetcher.dataset.load_files(shards)
    return order_files(shards, fetcher.files, shape, fetcher.max_file_size)


def _plan(order: Callable[[], FileOrder], strategy: Strategy, seed: int, epoch: int, batch_size: int | None) -> Planned:
    found = order()
    return found, plan_pass(found, strategy, seed=seed, epoch=epoch, batch_size=batch_size)


def _number(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int:
        raise StateError(f"the state's {name} is {value!r}")
    return value
