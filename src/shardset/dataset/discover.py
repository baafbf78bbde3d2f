"""Find the shards that a source names: a folder, a file, a glob, a brace pattern, or a list of these."""

from __future__ import annotations

import errno
import glob
import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardset.errors import NotFoundError, StorageError
from shardset.formats.patterns import expand_braces, has_braces, has_glob
from shardset.policy import Place, Report
from shardset.storage.store import ObjectInfo, Store, open_store, url_join, url_name, url_scheme

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

SHARD_SUFFIXES: Final = (".tar",)
_COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One shard that was found.

    Attributes:
        info: Its url, size and identity.
        name: Its path below the source's folder, without the last suffix: unique within a dataset.
    """

    info: ObjectInfo
    name: str

    @property
    def url(self) -> str:
        """The shard's address."""
        return self.info.url


@dataclass(frozen=True, slots=True)
class Found:
    """What a source names.

    Attributes:
        name: The source as text, as it was given.
        root: The folder that holds all the shards; a path is made whole, so that a change of folder does no harm.
        shards: In the order given; those of a folder by the bytes of their path.
        is_folder: The shards are all that lie below `root`.
    """

    name: str
    root: str
    shards: tuple[ShardSource, ...]
    is_folder: bool = False


def find_shards(
    source: Source, *, subfolder: str | None = None, store: Store | None = None, report: Report | None = None
) -> Found:
    """Find the shards that `source` names.

    Args:
        source: A folder (searched at any depth, links followed), a shard, a glob, a brace pattern, or a list of these.
        subfolder: Look only below this folder of each folder named.
        store: Where the source lives; by default the place that its scheme names.
        report: Counts what looked like a shard and was left out.

    Raises:
        NotFoundError: A name leads nowhere; of a list or a brace pattern, any one of them.
        StorageError: Looking failed.
        ValueError: The list or a name in it is empty, the scheme is unknown, or a glob has a subfolder.
    """
    report = Report() if report is None else report
    sources = [os.fspath(source)] if isinstance(source, str | os.PathLike) else [os.fspath(item) for item in source]
    if not all(sources) or not sources:
        raise ValueError("the list of sources is empty" if not sources else "a source is empty")
    name = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
    infos: dict[str, ObjectInfo] = {}
    for item in sources:
        for info in _resolve(item, subfolder, store or open_store(item), report):
            infos.setdefault(info.url, info)
    first = _whole(sources[0])
    is_folder = len(sources) == 1 and first not in infos and all(url.startswith(first) for url in infos)
    root = first if is_folder else _common_folder(list(infos))
    if subfolder and is_folder:
        root = url_join(root, subfolder.strip("/"))
    shards = tuple(ShardSource(info, _shard_name(info.url, root)) for info in infos.values())
    return Found(name, root, shards, is_folder)


def _whole(item: str) -> str:
    """Return a path from the root on, without ``..``, so that shards lie below their root; a url as it is."""
    if url_scheme(item):
        return item
    path = Path(item).absolute()
    if ".." in path.parts:  # only then, since a link that a shard is named by must stay as named
        path = path.resolve() if path.name == ".." else path.parent.resolve() / path.name
    return str(path)


def _resolve(item: str, subfolder: str | None, store: Store, report: Report) -> Iterable[ObjectInfo]:
    if has_braces(item) and not _exists(item, store):
        return [info for name in expand_braces(item) for info in _resolve(name, subfolder, store, report)]
    if has_glob(item) and not _exists(item, store):
        if subfolder:
            raise ValueError(f"{item}: a subfolder is one of a folder; write it into the glob")
        found = _match(item, store)
    else:
        found = _look_up(_whole(item), subfolder, store, report)
    if not found:
        left_out = "".join(
            f"; {count} left out ({code}: {', '.join(map(str, places))})" for code, count, places in report
        )
        hint = f"shards are files that end in {', '.join(SHARD_SUFFIXES)}"
        raise NotFoundError(f"no shards found{left_out}", url=item, hint=hint)
    return found


def _look_up(item: str, subfolder: str | None, store: Store, report: Report) -> list[ObjectInfo]:
    """Give a shard, or those below a folder."""
    if subfolder:
        item = url_join(item, subfolder.strip("/"))
    try:
        return [store.info(item)]
    except NotFoundError:
        if url_scheme(item) in {"", "file"}:
            raise  # a folder is an error of another kind, so nothing stands there
    except StorageError as error:
        if error.errno != errno.EISDIR:
            raise
    return [info for info in store.list(item, report) if _is_shard(info, item, report)]


def _exists(url: str, store: Store) -> bool:
    try:
        store.info(url)
    except NotFoundError:
        return False
    except (StorageError, ValueError):
        return True
    return True


def _match(pattern: str, store: Store) -> list[ObjectInfo]:
    """Give the files that a glob matches (``**`` crosses folders), sorted; the shards alone if there are any."""
    if url_scheme(pattern):
        raise ValueError(f"{pattern}: globs are for paths; give the folder, or a brace pattern")
    names = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)  # noqa: PTH207 - paths stay as they are written
    files = [_whole(name) for name in names if not Path(name).is_dir()]
    # ``data/*`` is meant to find shards and not the indexes beside them; shards of any other name can be spelled out.
    return [store.info(name) for name in [name for name in files if _has_shard_suffix(name)] or files]


def _has_shard_suffix(name: str) -> bool:
    return name.lower().endswith(SHARD_SUFFIXES)


def _is_shard(info: ObjectInfo, folder: str, report: Report) -> bool:
    path = info.url[len(folder) :]
    if any(part.startswith(".") for part in path.split("/")):
        return False  # temporary files, catalogs, and what other tools hide
    name = url_name(info.url)
    if name.lower().endswith(_COMPRESSED):
        report.add("compressed_shard", Place(info.url))
    return _has_shard_suffix(name)


def _common_folder(urls: list[str]) -> str:
    scheme = url_scheme(urls[0])
    start = f"{scheme}://" if scheme and all(url_scheme(url) == scheme for url in urls) else ""
    folders = [url[len(start) :].rpartition("/")[0].split("/") for url in urls]
    pairs = zip(min(folders), max(folders), strict=False)
    parts = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return start + "/".join(parts) or ("/" if urls[0].startswith("/") else "")


def _shard_name(url: str, root: str) -> str:
    path = url[len(root) :].lstrip("/") if root and url.startswith(root) else url
    folder, slash, name = path.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return f"{folder}{slash}{stem if dot and stem else name}"
