"""Edits of the sidecar indexes of a whole dataset: a field renamed, captions gathered from the shards.

One shard is in memory at a time, or a few where an executor does the work. What comes out of it waits under a temporary
name until all indexes were found good and all results are on the disk; only then is the first file replaced.
"""

# ruff: noqa: SLF001 - these functions are methods of the dataset in all but place

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

import numpy as np

from shardset.errors import IndexFileError, MissingExtraError, NotFoundError, without_secrets
from shardset.index.captioning import coalesce_index
from shardset.index.edit import check_field_names, rename_in_index
from shardset.index.replacing import Replacements, read_version
from shardset.policy import Report
from shardset.storage.local import local_path
from shardset.storage.store import ABSENT, url_name, url_scheme

from .catalogs import catalog_in_cache
from .files import check_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor, Future

    from shardset.index.captioning import Coalesced
    from shardset.index.edit import Edited
    from shardset.policy import Policy
    from shardset.storage.store import ObjectInfo, Store

    from .dataset import Dataset
    from .discover import ShardSource
    from .files import ShardFiles

_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")

COALESCED_FOLDER: Final = "coalesced"
"""The folder within that of a metadata cache in which indexes with gathered captions are kept."""
_AT_ONCE: Final = 64
_LAYOUTS: Final = ("embedded", "json_sidecar", "txt_sidecar")


def rename_field(
    dataset: Dataset,
    old_name: str,
    new_name: str,
    *,
    overwrite: bool = False,
    destination: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
) -> int:
    """Rename a field of the entries of every sidecar index of a dataset, as `rename_in_index` does.

    The dataset reads its indexes anew afterwards; loaders that were made before may go on with what they know.

    Args:
        dataset: The dataset.
        old_name: The field.
        new_name: Its new name.
        overwrite: Replace a field that has the new name already.
        destination: Folder on this machine to write all indexes to, laid out like the shards; the dataset reads them
            there from then on. By default they are rewritten where they are.
        executor: Runs the work on each shard, such as a pool of processes; by default it is done here.

    Returns:
        How many entries had the field.

    Raises:
        ValueError: A name is blank or structural, a field has the new name already, or the indexes are elsewhere and
            there is no destination.
        IndexFileError: A shard has no index, or one that is malformed or would be. None was replaced.
        ChangedError: Somebody else changed an index meanwhile. None was replaced.
        StorageError: Reading or writing failed; none was replaced, or the message says how many were.
    """
    check_field_names(old_name, new_name)
    if old_name == new_name:
        return 0
    folder = _local_folder(destination)
    shards = [dataset.info(shard_index) for shard_index in range(dataset.num_shards)]
    tasks = [
        _Renaming(_Index.of(dataset, shard), shard.name, old_name, new_name, overwrite=overwrite) for shard in shards
    ]
    if folder is None and not all(_is_local(task.index.url) for task in tasks):
        raise ValueError(f"the indexes of {dataset.name} are not on this machine's disks: pass a destination")
    renamed = 0
    with Replacements() as files:
        for shard, task, (version, edited) in zip(shards, tasks, _map(executor, _rename_shard, tasks), strict=True):
            renamed += edited.count
            task.index.expect(version, files)
            if folder is not None:
                files.write(_path_in(folder, shard), edited.payload)
            elif edited.count:
                files.write(task.index.url, edited.payload)
        dataset._store.close()  # of what is replaced nothing is held open, here and afterwards
        files.commit()
    dataset.renew(folder)
    return renamed


def coalesce_captions(
    dataset: Dataset,
    destination: str | os.PathLike[str] | None = None,
    shard_indices: Iterable[int] | None = None,
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the captions that stand in the sidecars of shards into their indexes, as `coalesce_index` does.

    Args:
        dataset: The dataset.
        destination: Folder on this machine to write the indexes to, laid out like the shards; that of the shards
            themselves replaces them. By default they go to a folder in the dataset's metadata cache, all of them, and
            the dataset reads its indexes there from then on.
        shard_indices: Which shards; by default all.
        executor: As for `rename_field`.
        progress: Called with (shards done, shards in all).

    Returns:
        ``shards``, how many were looked at; ``captioned_samples``, how many samples, as webshart counts them, have
        captions in the indexes now; ``coalesced_samples``, how many of these had none before; ``files``, the paths of
        the indexes, in the order of the shards asked for.

    Raises:
        ValueError: There is neither a destination nor a metadata cache.
        IndexError: There is no such shard.
        IndexFileError: An index is malformed, or is not of its shard. None was replaced.
        StorageError: Reading or writing failed; none was replaced, or the message says how many were.
    """
    folder = _local_folder(destination)
    in_cache = folder is None
    if folder is None:
        folder = coalesced_folder(dataset)
    if folder is None:
        raise ValueError("enable_metadata_cache() first or provide destination")
    wanted = range(dataset.num_shards) if shard_indices is None else dict.fromkeys(shard_indices)
    shards = [dataset.info(shard_index) for shard_index in wanted]
    store = dataset._cache or dataset._store
    tasks = [_Gathering(_Index.of(dataset, shard), shard.info, store, dataset.policy) for shard in shards]
    paths = [_path_in(folder, shard) for shard in shards]
    captioned = added = 0
    with Replacements() as files:
        answers = _map(executor, _gather_shard, tasks)
        for done, (task, path, (version, result, report)) in enumerate(zip(tasks, paths, answers, strict=True), 1):
            captioned += result.captioned
            added += result.added
            dataset.report.merge(report)
            task.index.expect(version, files)
            files.write(path, result.payload)
            if progress is not None:
                progress(done, len(shards))
        if in_cache:
            _complete(dataset, folder, {shard.name for shard in shards}, files)
        dataset._store.close()  # of what is replaced nothing is held open, here and afterwards
        files.commit()
    dataset.renew(folder if in_cache else None)
    return {"shards": len(shards), "captioned_samples": captioned, "coalesced_samples": added, "files": paths}


def coalesced_folder(dataset: Dataset) -> str | None:
    """Return where `coalesce_captions` keeps indexes without a destination; None without a metadata cache."""
    cache, current = dataset._sidecars, dataset._options.metadata
    if cache is None:
        return None
    folder = Path(cache.folder).absolute() / COALESCED_FOLDER
    if current is not None and Path(current).parent == folder:
        return current
    return str(folder / _token(dataset))


def probe_caption_layout(dataset: Dataset, max_shards: int | None = None) -> dict[str, Any]:
    """Tell from the indexes of shards, in order, where captions are. Samples are counted as webshart does.

    A sample has a text sidecar, a JSON sidecar, both, or, if neither, perhaps captions in the index: those are called
    embedded. It is captioned if it has a text sidecar or captions in the index; whether a JSON sidecar holds a caption
    is not known without reading it.

    Args:
        dataset: The dataset.
        max_shards: How many shards to look at; by default all.

    Returns:
        ``layout``: ``"none"``, ``"embedded"``, ``"json_sidecar"``, ``"txt_sidecar"``, or ``"mixed"`` where more than
        one of these occurs; ``shards_scanned``, ``total_shards``, ``complete``; and how many: ``samples``,
        ``captioned_samples``, ``uncaptioned_samples``, ``embedded_samples``, ``json_sidecar_samples``,
        ``txt_sidecar_samples``.

    Raises:
        ValueError: `max_shards` is not positive.
        As `Dataset.files`.
    """
    if max_shards is not None and max_shards < 1:
        raise ValueError(f"max_shards={max_shards}: must be at least 1")
    scanned = dataset.num_shards if max_shards is None else min(max_shards, dataset.num_shards)
    counts = np.zeros(5, np.int64)
    for start in range(0, scanned, _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, scanned))
        dataset.load_files(numbers)
        for shard_index in numbers:
            counts += _count_layouts(dataset.files(shard_index))
    samples, captioned, *by_layout = counts.tolist()
    present = [name for name, count in zip(_LAYOUTS, by_layout, strict=True) if count]
    return {
        "layout": "mixed" if len(present) > 1 else present[0] if present else "none",
        "shards_scanned": scanned,
        "total_shards": dataset.num_shards,
        "complete": scanned == dataset.num_shards,
        "samples": samples,
        "captioned_samples": captioned,
        "uncaptioned_samples": samples - captioned,
        **{f"{name}_samples": count for name, count in zip(_LAYOUTS, by_layout, strict=True)},
    }


def _count_layouts(files: ShardFiles) -> list[int]:
    """Count the samples of a shard: all, those captioned, and those of each of `_LAYOUTS`."""
    index, numbering = files.index, files.numbering
    has_captions, has_json = np.zeros(index.num_files, np.bool_), np.zeros(index.num_files, np.bool_)
    has_captions[[row for row, value in index.captions.items() if value is not None]] = True
    has_json[[row for row, fields in index.extra.items() if fields.get("json_path") is not None]] = True
    captions = has_captions[numbering.samples]
    json = has_json[numbering.samples] | (numbering.json_rows >= 0)
    text = numbering.text_rows >= 0
    found = (captions | text, captions & ~text & ~json, json, text)
    return [len(captions), *(int(np.count_nonzero(which)) for which in found)]


def upload_caption_metadata(
    metadata_dir: str | os.PathLike[str],
    repo_id: str,
    *,
    path_in_repo: str = "",
    revision: str = "main",
    hf_token: str | None = None,
    commit_message: str = "Add coalesced webshart caption metadata",
) -> Any:
    """Upload the indexes in a folder, at any depth, to a dataset repository on the Hugging Face Hub, in one commit.

    Args:
        metadata_dir: The folder.
        repo_id: ``"owner/name"``.
        path_in_repo: Folder in the repository.
        revision: Its branch.
        hf_token: Token for the Hub; by default that of ``huggingface_hub``'s login.
        commit_message: First line of the commit.

    Returns:
        What `HfApi.upload_folder` gives.

    Raises:
        MissingExtraError: ``huggingface_hub`` is not installed.
    """
    try:
        hub = import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtraError("uploads to the Hub need huggingface_hub", extra="hub") from error
    return hub.HfApi(token=hf_token).upload_folder(
        folder_path=os.fspath(metadata_dir),
        repo_id=repo_id,
        repo_type="dataset",
        path_in_repo=path_in_repo,
        revision=revision,
        commit_message=commit_message,
        allow_patterns=["*.json", "**/*.json"],
    )


def _local_folder(destination: str | os.PathLike[str] | None) -> str | None:
    """Return a destination as a path from the root on.

    Raises:
        ValueError: It is on another machine.
    """
    if destination is None:
        return None
    folder = os.fspath(destination)
    if not _is_local(folder):
        raise ValueError(f"{without_secrets(folder)}: indexes are written to this machine's disks; upload them then")
    return str(Path(local_path(folder)).absolute())


def _is_local(url: str) -> bool:
    return url_scheme(url) in {"", "file"}


def _path_in(folder: str, shard: ShardSource) -> str:
    return str(Path(folder) / f"{shard.name}.json")


class _Index(NamedTuple):
    """Where the index file of a shard is, and how it is read there. Goes to other processes."""

    url: str
    store: Store

    @classmethod
    def of(cls, dataset: Dataset, shard: ShardSource) -> Self:
        return cls(dataset._options.sidecar_url(shard), dataset._sidecars or dataset._store)

    def read(self) -> tuple[bytes | None, str]:
        """Return the file's bytes, or None if there is none, and its version."""
        try:
            if _is_local(self.url):
                return read_version(self.url)
            reader = self.store.open(self.url)
            return reader.read(0, reader.size), reader.identity
        except NotFoundError:
            return None, ABSENT

    def expect(self, version: str, files: Replacements) -> None:
        """Let the file be replaced only if it is still of that version."""
        if _is_local(self.url) and version != ABSENT:
            files.expect(self.url, version)


@dataclass(frozen=True, slots=True)
class _Renaming:
    """The index of one shard in which a field is to be renamed."""

    index: _Index
    shard: str
    old_name: str
    new_name: str
    overwrite: bool


def _rename_shard(task: _Renaming) -> tuple[str, Edited]:
    """Rename a field in the index of one shard, and give it with the version that was read. Writes nothing."""
    url = task.index.url
    payload, version = task.index.read()
    if payload is None:
        what = f"shard {task.shard!r} has no sidecar index"
        raise IndexFileError(what, path=url, hint="make one with: shardset index")
    return version, rename_in_index(
        payload, task.old_name, task.new_name, overwrite=task.overwrite, shard=task.shard, path=url
    )


@dataclass(frozen=True, slots=True)
class _Gathering:
    """One shard whose captions are to go into its index."""

    index: _Index
    shard: ObjectInfo
    store: Store
    policy: Policy


def _gather_shard(task: _Gathering) -> tuple[str, Coalesced, Report]:
    """Gather the captions of one shard into its index, and give that with the version that was read. Writes nothing."""
    report, url = Report(), task.shard.url
    payload, version = task.index.read()
    reader = check_reader(task.store.open(url, task.shard), task.shard.size, task.shard.identity)
    result = coalesce_index(payload, reader, name=url_name(url), path=task.index.url, report=report, policy=task.policy)
    return version, result, report


def _map(executor: Executor | None, function: Callable[[_Task], _Answer], tasks: Iterable[_Task]) -> Iterator[_Answer]:
    """Give the answers to tasks in order, of which an executor works on a few at once, so that few are in memory."""
    if executor is None:
        yield from map(function, tasks)
        return
    ahead = 2 * (os.cpu_count() or 1)
    running: deque[Future[_Answer]] = deque()
    try:
        for task in tasks:
            running.append(executor.submit(function, task))
            if len(running) > ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def _complete(dataset: Dataset, folder: str, known: set[str], files: Replacements) -> None:
    """Put the indexes of the other shards into a folder too, so that a dataset can read all of them there."""
    for shard_index in range(dataset.num_shards):
        shard = dataset.info(shard_index)
        path = _path_in(folder, shard)
        if shard.name not in known and not Path(path).exists():
            payload, _ = _Index.of(dataset, shard).read()
            if payload is not None:
                files.write(path, payload)


def _token(dataset: Dataset) -> str:
    """Return what tells datasets apart that share a metadata cache."""
    found, options = dataset._found, dataset._options
    return Path(dataset.name).name if found is None else catalog_in_cache(found, options).name
