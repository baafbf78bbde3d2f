"""Sidecar indexes alone, for the shards of a range: what machines that share the work run, and run again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from shardset.dataset.catalogs import IndexOptions
from shardset.dataset.discover import ShardSource, find_shards
from shardset.errors import AccessError, IndexFileError, StorageError
from shardset.files import write_atomic
from shardset.index.document import collector_paused
from shardset.policy import Policy, Report, settle
from shardset.storage.anywhere import store_for
from shardset.storage.local import local_path, storage_error
from shardset.storage.store import UNKNOWN, ObjectInfo, url_name, url_scheme

from .indexing import IndexTask, write_index
from .pool import task_pool, workers_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from shardset.dataset.discover import Source
    from shardset.storage.store import Store

_VERSION: Final = 1
_NO_INDEX: Final = "not_an_index"


@dataclass(frozen=True, slots=True)
class ExtractTask:
    """One shard to index, and the checkpoint that says that it is done.

    Attributes:
        index: What to do.
        checkpoint: Path of the checkpoint; None for none.
    """

    index: IndexTask
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class ExtractedShard:
    """What an `ExtractTask` comes to: `written` tells whether its index was, `skipped` whether a checkpoint knew it."""

    report: Report
    written: bool
    skipped: bool


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """What `extract_indexes` did.

    Attributes:
        num_shards: How many shards were asked for.
        indexes_written: How many indexes were written; the others were there, and good.
        shards_skipped: How many shards were not even looked at, because of a checkpoint.
        report: Faults and oddities by code.
    """

    num_shards: int = 0
    indexes_written: int = 0
    shards_skipped: int = 0
    report: Report = field(default_factory=Report)


def extract_indexes(
    source: Source,
    destination: str | os.PathLike[str] | None = None,
    *,
    subfolder: str | None = None,
    geometry: bool = False,
    shard_range: tuple[int, int] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    force: bool = False,
    max_workers: int | None = None,
    executor: Executor | None = None,
    policy: Policy | None = None,
    store: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExtractResult:
    """Write the sidecar index of each shard, with captions, and no catalog.

    An index that is there and fits its shard is kept, since people edit captions in them; without pixel sizes that are
    asked for it gets them, and loses nothing. Every index is written whole or not at all, so a run that was stopped is
    simply run again.

    Args:
        source: As for `discover_dataset`.
        destination: Folder for the indexes, laid out like the source; by default each goes beside its shard.
        subfolder: Look only below this folder of `source`.
        geometry: Read the pixel size of images too.
        shard_range: Take only these shards, ``(start, end)``, half-open, of all in the order of their names.
        checkpoints: Folder for a small file for each shard that is done. The next run does not open that shard, while
            neither it nor its index has changed since, and the index holds what is asked for. Damaged shards get none.
        force: Write every index anew.
        max_workers: The most processes to use; by default one for each processor. Little data is done in this one.
        executor: Runs the tasks in place of a pool made for this call.
        policy: What to do about damaged shards; by default they raise.
        store: Where the source lives; by default the place that its scheme names.
        progress: Called with (shards done, shards in all).

    Raises:
        ValueError: The range is none, or two shards would have one index.
        NotFoundError: No shard was found.
        FormatError: A shard is damaged, and the policy says to raise.
        IndexFileError: A file that is no index stands in the place of one, and the policy says to raise.
        StorageError: Reading or writing failed.
    """
    check_range(shard_range)
    report = Report()
    found = find_shards(source, subfolder=subfolder, store=store, report=report)
    shards = found.shards if shard_range is None else found.shards[shard_range[0] : shard_range[1]]
    options = IndexOptions(captions=True, geometry=geometry)
    target = None if destination is None else os.fspath(destination)
    if url_scheme(found.root if target is None else target) in {"http", "https"}:
        what = "web servers are read only: the indexes cannot go there"
        raise AccessError(what, url=target or found.root, hint="name a folder for them")
    is_foreign = store is not None
    store = store_for(store, found.root, target)
    places = index_places(shards, target)
    policy = policy or Policy()
    tasks = [
        ExtractTask(
            IndexTask(shard, store, place, True, options, policy, force, completes=True),  # noqa: FBT003 - see IndexTask
            None if checkpoints is None else str(_checkpoint_path(checkpoints, shard)),
        )
        for shard, place in zip(shards, places, strict=True)
    ]
    written = skipped = 0
    with task_pool(executor, workers_for(shards, most=max_workers), needs_main=is_foreign) as run:
        for done, answer in enumerate(run(extract_shard, tasks), 1):
            report.merge(answer.report)
            written += answer.written
            skipped += answer.skipped
            if progress is not None:
                progress(done, len(tasks))
    return ExtractResult(len(tasks), written, skipped, report)


def extract_shard(task: ExtractTask) -> ExtractedShard:
    """Write the sidecar index of one shard, and then its checkpoint, unless a checkpoint says that it is done.

    Raises:
        IndexFileError: A file that is no index stands in its place, and the policy says to raise.
        As `index_shard`.
    """
    index = task.index
    if task.checkpoint is not None and not index.force and _is_done(task.checkpoint, index):
        return ExtractedShard(Report(), written=False, skipped=True)
    with collector_paused():
        done = write_index(index)
    if _NO_INDEX in done.report.counts:
        place = done.report.places(_NO_INDEX)[0]
        error = IndexFileError(
            "a JSON file that is no index stands in its place", path=index.place, hint="move it away"
        )
        settle(error, _NO_INDEX, place, index.policy, Report())
    is_damaged = any(fault.is_error for fault in done.index.faults)
    if task.checkpoint is not None and not is_damaged:
        _save_checkpoint(task.checkpoint, index, done.index.num_files)
    return ExtractedShard(done.report, done.written, skipped=False)


def check_range(shard_range: tuple[int, int] | None) -> None:
    """Refuse what is no range of shards.

    Raises:
        ValueError: It begins below 0, or ends before it begins.
    """
    if shard_range is not None and not 0 <= shard_range[0] <= shard_range[1]:
        raise ValueError(f"shard_range={shard_range}: start must be >= 0 and end must be >= start")


def index_places(shards: Sequence[ShardSource], destination: str | None) -> list[str]:
    """Return where the sidecar index of each shard goes.

    Raises:
        ValueError: Two shards would have one.
    """
    taken: dict[str, str] = {}
    options = IndexOptions(metadata=destination)
    for shard in shards:
        place = options.sidecar_url(shard)
        if place in taken:
            raise ValueError(f"{url_name(taken[place])} and {url_name(shard.url)} would have one index: {place}")
        taken[place] = shard.url
    return list(taken)


def _checkpoint_path(folder: str | os.PathLike[str], shard: ShardSource) -> Path:
    return Path(local_path(os.fspath(folder))) / f"{shard.name}.json"


def _is_done(path: str, task: IndexTask) -> bool:
    """Tell whether a checkpoint says that the shard, as it is now, has an index that is as it was left."""
    try:
        ours = orjson.loads(Path(path).read_bytes())["shardset"]
        return bool(
            ours["version"] == _VERSION
            and ours["captions"] >= task.options.captions
            and ours["geometry"] >= task.options.geometry
            and ours["shard"] == _version_of(task.shard.info)
            and ours["index"] == _version_of(task.store.info(task.place))
            and UNKNOWN not in {task.shard.info.identity, ours["index"]["identity"]}
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False  # none, or webshart's, which does not say of what


def _save_checkpoint(path: str, task: IndexTask, num_files: int) -> None:
    """Write a checkpoint: webshart's keys, and in a section of our own what it holds for."""
    shard = task.shard
    try:
        index = _version_of(task.store.info(task.place))
    except StorageError:
        return  # a file that is no index stands there, or none had to be written
    document = {
        "shard_name": shard.name.rpartition("/")[2],
        "status": "complete",
        "offset": shard.info.size,
        "files_processed": num_files,
        "shardset": {
            "version": _VERSION,
            "captions": task.options.captions,
            "geometry": task.options.geometry,
            "shard": _version_of(shard.info),
            "index": index,
        },
    }
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, orjson.dumps(document))
    except OSError as error:
        raise storage_error(error, path) from error


def _version_of(info: ObjectInfo) -> dict[str, Any]:
    return {"size": info.size, "identity": info.identity}
