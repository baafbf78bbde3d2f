"""Captions of the sidecars in shards, written into the indexes: for each shard one task that may be done again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardset.dataset.catalogs import IndexOptions
from shardset.dataset.discover import ShardSource, find_shards
from shardset.dataset.files import check_reader
from shardset.errors import NotFoundError
from shardset.index.captioning import coalesce_index
from shardset.policy import Policy, Report
from shardset.storage.anywhere import store_for
from shardset.storage.cache import CachedStore
from shardset.storage.local import local_path
from shardset.storage.store import is_remote, url_name, url_scheme

from .extraction import check_range, index_places
from .pool import task_pool, workers_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from shardset.dataset.discover import Source
    from shardset.storage.store import Store


@dataclass(frozen=True, slots=True)
class CoalesceTask:
    """One shard whose captions are gathered.

    Attributes:
        shard: The shard.
        store: Where it, its index and the new index live.
        shards: Where the shard is read: `store`, or a cache before it.
        index: Url of its index, which may be missing.
        place: Url of the index to write.
        policy: What to do about damage.
    """

    shard: ShardSource
    store: Store
    shards: Store
    index: str
    place: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class CoalescedShard:
    """What a `CoalesceTask` comes to: samples with captions, how many of these had none before, and the report."""

    captioned: int
    added: int
    report: Report


@dataclass(frozen=True, slots=True)
class CoalesceResult:
    """What `coalesce_dataset` did.

    Attributes:
        num_shards: How many shards were looked at.
        captioned_samples: Samples, as webshart counts them, that have captions in the indexes now.
        coalesced_samples: How many of these had none before.
        files: The indexes, in the order of the shards.
        report: Faults, oddities, and sidecars that could not be read, by code.
    """

    num_shards: int
    captioned_samples: int
    coalesced_samples: int
    files: tuple[str, ...]
    report: Report = field(default_factory=Report)


def coalesce_shard(task: CoalesceTask) -> CoalescedShard:
    """Write the index of one shard with the captions of its sidecars, as `coalesce_index` makes it.

    Raises:
        As `coalesce_index`.
    """
    report = Report()
    shard = task.shard
    reader = check_reader(task.shards.open(shard.url, shard.info), shard.info.size, shard.info.identity)
    before = _read(task.store, task.index)
    name = url_name(shard.url)
    result = coalesce_index(before, reader, name=name, path=task.index, report=report, policy=task.policy)
    if result.payload != (before if task.place == task.index else _read(task.store, task.place)):
        task.store.write(task.place, result.payload)
    return CoalescedShard(result.captioned, result.added, report)


def coalesce_dataset(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    metadata: str | os.PathLike[str] | None = None,
    subfolder: str | None = None,
    shard_range: tuple[int, int] | None = None,
    cache: Callable[[Store], CachedStore] | None = None,
    max_workers: int | None = None,
    executor: Executor | None = None,
    policy: Policy | None = None,
    store: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CoalesceResult:
    """Write the captions of the sidecars in all shards of a source into their indexes, in another folder or in place.

    Each index is written whole or not at all, and the same bytes each time, so a run that was stopped is simply run
    again. A shard without an index gets one.

    Args:
        source: As for `discover_dataset`.
        destination: Folder for the indexes, laid out like the source.
        metadata: Folder of the indexes as they are, laid out like the source; by default they stand beside the shards.
        subfolder: Look only below this folder of `source`.
        shard_range: Take only these shards, ``(start, end)``, half-open.
        cache: Makes a cache on disk before the store of shards that are elsewhere.
        max_workers: The most processes to use; by default one for each processor. Little data is done in this one.
        executor: Runs the tasks in place of a pool made for this call.
        policy: What to do about damaged shards that have no index; by default they raise.
        store: Where the source lives; by default the place that its scheme names.
        progress: Called with (shards done, shards in all).

    Raises:
        ValueError: The range is none, or two shards would have one index.
        NotFoundError: No shard was found.
        IndexFileError: An index is malformed, or is not of its shard.
        StorageError: Reading or writing failed.
    """
    check_range(shard_range)
    report = Report()
    found = find_shards(source, subfolder=subfolder, store=store, report=report)
    shards = found.shards if shard_range is None else found.shards[shard_range[0] : shard_range[1]]
    target = _whole(os.fspath(destination))
    is_foreign = store is not None
    given = None if metadata is None else _whole(os.fspath(metadata))
    everywhere = store_for(store, found.root, target, given)
    near = everywhere if cache is None or not is_remote(found.root) else cache(everywhere)
    options = IndexOptions(metadata=given)
    places = index_places(shards, target)
    tasks = [
        CoalesceTask(shard, everywhere, near, options.sidecar_url(shard), place, policy or Policy())
        for shard, place in zip(shards, places, strict=True)
    ]
    captioned = added = 0
    with task_pool(executor, workers_for(shards, most=max_workers), needs_main=is_foreign) as run:
        for done, answer in enumerate(run(coalesce_shard, tasks), 1):
            report.merge(answer.report)
            captioned += answer.captioned
            added += answer.added
            if progress is not None:
                progress(done, len(tasks))
    files = tuple(local_path(place) if url_scheme(place) in {"", "file"} else place for place in places)
    return CoalesceResult(len(tasks), captioned, added, files, report)


def shard_cache(folder: str, limit_gb: float, parallel_downloads: int) -> Callable[[Store], CachedStore]:
    """Return what makes a cache of whole shards in `folder`, of at most `limit_gb` GiB, before a store."""
    limit = int(limit_gb * (1 << 30))
    return partial(CachedStore, folder=folder, limit=limit, parallel_downloads=parallel_downloads)


def _whole(folder: str) -> str:
    return folder if url_scheme(folder) else str(Path(folder).absolute())


def _read(store: Store, url: str) -> bytes | None:
    try:
        reader = store.open(url)
    except NotFoundError:
        return None
    return reader.read(0, reader.size)
