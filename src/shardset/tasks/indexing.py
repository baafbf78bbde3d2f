"""Sidecar indexes and a catalog: for each shard one task that may be done again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from shardset.dataset.catalogs import (
    CATALOG_FOLDER,
    TEXT_INDEX_SUFFIXES,
    IndexOptions,
    catalog_beside,
    catalog_in_cache,
    known_rows,
    settle_row,
    sidecar_identity,
    write_catalog,
)
from shardset.dataset.discover import find_shards
from shardset.dataset.files import check_reader
from shardset.errors import AccessError, IndexFileError, NotFoundError, StorageError
from shardset.index.build import build_index
from shardset.index.catalog_writer import ShardRow, shard_row
from shardset.index.document import collector_paused
from shardset.index.record_sidecar import dump_text_index, parse_text_index
from shardset.index.sidecar import dump_sidecar, parse_sidecar
from shardset.policy import Place, Policy, Report
from shardset.storage.anywhere import store_for
from shardset.storage.local import local_path
from shardset.storage.store import split_query, url_name, url_scheme

from .pool import task_pool, workers_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from shardset.dataset.discover import ShardSource, Source
    from shardset.index.catalog import Catalog
    from shardset.index.sidecar import Sidecar
    from shardset.index.table import ShardIndex
    from shardset.storage.store import Store


@dataclass(frozen=True, slots=True)
class IndexTask:
    """One shard to index, and where its sidecar index goes.

    Attributes:
        shard: The shard.
        store: Where it and its sidecar live.
        place: Url of its sidecar index.
        writes_sidecar: Write that.
        options: What to read beyond headers.
        policy: What to do about damage.
        force: Write over a sidecar index that is already there and good, or over a file that is none.
        completes: Put pixel sizes into a good index of another tool too, if it lacks them.
        text_index: Url of the text index that it gets too, if it is a plain TFRecord shard; None for none.
    """

    shard: ShardSource
    store: Store
    place: str
    writes_sidecar: bool
    options: IndexOptions
    policy: Policy
    force: bool
    completes: bool = False
    text_index: str | None = None


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """What an `IndexTask` comes to."""

    row: ShardRow
    report: Report
    sidecar_written: bool


def index_shard(task: IndexTask) -> IndexedShard:
    """Index one shard from its headers, and write its sidecar index.

    A good sidecar index that is already there is kept, since people edit captions in them, and its captions go before
    what the shard says. A JSON file that is no index is kept too.

    Raises:
        ChangedError: The shard is no longer the one that was found.
        FormatError: It is damaged, and the policy says to raise.
        StorageError: Reading or writing failed.
    """
    with collector_paused():
        shard, done = task.shard, write_index(task)
        identity, sidecar = shard.info.identity, done.sidecar
        row = shard_row(done.index, url=shard.url, name=shard.name, identity=identity, sidecar=sidecar)
        return IndexedShard(row, done.report, done.written)


@dataclass(frozen=True, slots=True)
class WrittenIndex:
    """The index of a shard, and what was done about its sidecar index, whose identity `sidecar` is."""

    index: ShardIndex
    report: Report
    written: bool
    sidecar: str | None


def write_index(task: IndexTask) -> WrittenIndex:
    """Index one shard, and write its sidecar index, as `index_shard` does."""
    report = Report()
    shard, options = task.shard, task.options
    reader = check_reader(task.store.open(shard.url), shard.info.size, shard.info.identity)
    place = task.place if task.writes_sidecar else None
    sidecar = sidecar_identity(task.place)  # looked at before it is read: if it changes now, that shows
    index = build_index(
        reader,
        captions=options.captions,
        documents=place is not None,
        geometry=options.geometry,
        policy=task.policy,
        report=report,
    )
    kept = None if place is None or task.force else _good_sidecar(task, place, index)
    # What is no tar at all gets no index, which would make it look like an empty one.
    is_tar = index.num_files > 0 or not any(fault.is_error for fault in index.faults)
    written = False
    if place is not None and kept is not None:
        index = _with_annotations_of(index, kept.index)
        # One of ours that lacks what is read now is completed; nothing in it is lost.
        may_complete = index.records is None and (kept.digest is not None or task.completes)
        if may_complete and options.geometry and kept.index.geometry is None:
            task.store.write(place, dump_sidecar(index, name=url_name(shard.url), like=kept))
            written = True
        else:
            report.add("sidecar_kept", Place(place))
    elif place is not None and is_tar and (task.force or _may_write(task, place, report)):
        task.store.write(place, dump_sidecar(index, name=url_name(shard.url)))
        written = True
    if written:
        sidecar = sidecar_identity(task.place)
    if task.text_index is not None:
        _write_text_index(task, task.text_index, index, report)
    return WrittenIndex(index, report, written, sidecar)


def _write_text_index(task: IndexTask, place: str, index: ShardIndex, report: Report) -> None:
    """Write the text index of DALI beside a plain TFRecord shard; of what cannot have one, count it."""
    form = index.records
    if form is None or form.compression or any(fault.is_error for fault in index.faults):
        _count_no_text_index(task, report)
    else:
        task.store.write(place, dump_text_index(index))


def _count_no_text_index(task: IndexTask, report: Report) -> None:
    message = "only a plain TFRecord shard without damage has a text index"
    report.add("no_text_index", Place(task.shard.url, message=message))


def _good_sidecar(task: IndexTask, place: str, index: ShardIndex) -> Sidecar | None:
    """Return the sidecar index that is already there, if it fits the shard as it was just found to be."""
    try:
        reader = task.store.open(place)
        payload = reader.read(0, reader.size)
        sidecar = parse_sidecar(payload, path=place, shard_size=task.shard.info.size)
    except (NotFoundError, IndexFileError):
        return None
    # Tars are padded, so another one is often of the same size.
    if sidecar.digest is not None and sidecar.digest != index.digest():
        return None
    said, found = (
        zip(each.names, each.offset.tolist(), each.length.tolist(), strict=True) for each in (sidecar.index, index)
    )
    return sidecar if set(found).issuperset(said) else None


def _with_annotations_of(index: ShardIndex, other: ShardIndex) -> ShardIndex:
    """Put what another index of the same shard says of its files before what `index` says, file by file."""
    rows = {name: row for row, name in enumerate(index.names)}
    moved = {row: rows[name] for row, name in enumerate(other.names) if name in rows}
    captions = {moved[row]: value for row, value in other.captions.items() if row in moved}
    extra = {row: dict(fields) for row, fields in index.extra.items()}
    for row, fields in other.extra.items():
        if row in moved:
            extra.setdefault(moved[row], {}).update(fields)
    return replace(index, captions={**index.captions, **captions}, extra=extra)


def _may_write(task: IndexTask, place: str, report: Report) -> bool:
    """Tell whether the sidecar's place is free, or holds an index that does not fit the shard any more."""
    try:
        reader = task.store.open(place)
    except NotFoundError:
        return True
    if _is_index(reader.read(0, reader.size)):
        return True
    message = "a JSON file that is no index stands there; --force writes over it"
    report.add("not_an_index", Place(place, message=message))
    return False


def _is_index(payload: bytes) -> bool:
    """Tell whether a file was meant as a sidecar index, good or not."""
    try:
        content = orjson.loads(payload)
    except ValueError:
        return False
    return isinstance(content, dict) and isinstance(content.get("files", content.get("lengths")), dict | list)


@dataclass(frozen=True, slots=True)
class IndexResult:
    """What `index_dataset` did.

    Attributes:
        catalog: The catalog, opened.
        folder: Where it lies.
        sidecars_written: How many sidecar indexes were written.
        shards_reused: How many shards a catalog knew already, unchanged.
        report: Faults and oddities by code.
    """

    catalog: Catalog
    folder: Path
    sidecars_written: int = 0
    shards_reused: int = 0
    report: Report = field(default_factory=Report)


def index_dataset(
    source: Source,
    *,
    destination: str | os.PathLike[str] | None = None,
    captions: bool = True,
    geometry: bool = False,
    sidecars: bool = True,
    text_index: bool = False,
    force: bool = False,
    workers: int | None = None,
    executor: Executor | None = None,
    policy: Policy | None = None,
    store: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IndexResult:
    """Index every shard of a source: a sidecar index for each, and a catalog of all.

    Args:
        source: As for `discover_dataset`.
        destination: Folder for the sidecar indexes and the catalog, laid out like the source; by default they go
            beside the shards.
        captions: Read ``.json`` and ``.txt`` members too.
        geometry: Read the pixel size of images too.
        sidecars: Write sidecar indexes; otherwise the catalog alone.
        text_index: Write the text index of each TFRecord shard too, which DALI and vahidk's tfrecord read: a file of
            the shard's name and ``.idx`` beside its sidecar index.
        force: Do everything again, and write over whatever stands where a sidecar index goes.
        workers: Processes; by default one for each processor, and none for little data.
        executor: Runs the tasks in place of a pool made for this call.
        policy: What to do about damaged shards; by default they raise.
        store: Where the source lives; by default the place that its scheme names.
        progress: Called with (shards done, shards in all).

    Raises:
        NotFoundError: No shard was found.
        FormatError: A shard is damaged, and the policy says to raise.
        StorageError: Reading or writing failed.
    """
    report = Report()
    policy = policy or Policy()
    found = find_shards(source, store=store, report=report)
    options = IndexOptions(captions=captions, geometry=geometry)
    target = None if destination is None else os.fspath(destination)
    is_foreign = store is not None
    store = store_for(store, found.root, target)
    places = IndexOptions(metadata=target)  # where sidecar indexes go is where they are looked for then
    if sidecars and target is None and url_scheme(found.root) in {"http", "https"}:
        what = "web servers are read only: the indexes cannot go beside the shards"
        raise AccessError(what, url=found.root, hint="name a folder for them (--destination), or leave them out")
    tasks = [
        IndexTask(
            shard,
            store,
            places.sidecar_url(shard),
            sidecars,
            options,
            policy,
            force,
            text_index=_text_index_url(places.sidecar_url(shard)) if text_index else None,
        )
        for shard in found.shards
    ]
    beside = catalog_beside(found)
    if target is not None and url_scheme(target) in {"", "file"}:
        folder = Path(local_path(target)) / CATALOG_FOLDER
    else:
        # Beside the shards stands the catalog of the whole folder, and not one of a few shards of it.
        folder = beside if beside is not None and found.is_folder else catalog_in_cache(found, options)
    known = known_rows(() if force else (folder,), options, report, places.sidecar_url)
    rows: dict[int, ShardRow] = {}
    for number, task in enumerate(tasks):
        row = known(task.shard)
        if row is None or (task.writes_sidecar and not _exists(store, task.place)):
            continue
        if task.text_index is not None and row.compression == "" and not _has_text_index(task, task.text_index, row):
            continue
        if task.text_index is not None and row.compression != "":
            _count_no_text_index(task, report)
        settle_row(row, policy, report)
        rows[number] = row
    pending = [number for number in range(len(tasks)) if number not in rows]
    reused, written = len(rows), 0
    if reused and progress is not None:
        progress(reused, len(tasks))
    workers = workers_for([tasks[number].shard for number in pending], workers)
    with task_pool(executor, workers, needs_main=is_foreign) as run:
        for done, (number, answer) in enumerate(
            zip(pending, run(index_shard, [tasks[number] for number in pending]), strict=True)
        ):
            rows[number] = answer.row
            report.merge(answer.report)
            written += answer.sidecar_written
            if progress is not None:
                progress(reused + done + 1, len(tasks))
    root = found.root if folder == beside else None
    catalog = write_catalog(folder, (rows[number] for number in range(len(tasks))), options=options, root=root)
    return IndexResult(catalog, folder, written, reused, report)


def _has_text_index(task: IndexTask, place: str, row: ShardRow) -> bool:
    """Tell whether the text index of a shard is there, and is that of its records as they are now."""
    try:
        reader = task.store.open(place)
        return parse_text_index(reader.read(0, reader.size), row.size, path=place).digest() == row.digest
    except (IndexFileError, StorageError):
        return False


def _text_index_url(sidecar: str) -> str:
    """Return where the text index of a shard goes: beside its sidecar index."""
    path, query = split_query(sidecar) if url_scheme(sidecar) in {"http", "https"} else (sidecar, "")
    return path.removesuffix(".json") + TEXT_INDEX_SUFFIXES[0] + query


def _exists(store: Store, url: str) -> bool:
    try:
        store.info(url)
    except StorageError:
        return False
    return True
