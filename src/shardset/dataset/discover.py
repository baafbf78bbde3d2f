"""Find the shards that a source names: a folder, a shard, a pattern (``*``, ``{a..b}``, ``@64``), or a list of these.

The same rules hold everywhere: on disks, web servers and in buckets.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

import orjson

from shardset.errors import NotFoundError, StorageError, without_secrets
from shardset.formats.patterns import (
    expand_braces,
    expand_count,
    find_sets,
    glob_folder,
    has_braces,
    has_count,
    has_glob,
    matches_glob,
    named_format,
    parse_numbered,
)
from shardset.policy import Place, Report
from shardset.storage.anywhere import AnyStore
from shardset.storage.store import ObjectInfo, Store, is_remote, split_query, url_join, url_name, url_scheme
from shardset.storage.threads import run_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

logger = logging.getLogger(__name__)

LIST_SUFFIXES: Final = (".txt", ".list", ".lst", ".json")
"""Files that name shards: one on a line, or in JSON a list of them, or wids' ``{"shardlist": [{"url": ...}]}``."""
_COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
_PERHAPS: Final = (".gz", ".zlib")
_LONGEST_LIST: Final = 256 << 20
_DEEPEST: Final = 4
_AT_ONCE: Final = 32


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
        name: The source as text, as it was given, without what lets one in.
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
        source: A folder (searched at any depth, links followed), a shard, a glob, a brace pattern, a file that lists
            any of these, or a list of these.
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
    name = without_secrets(sources[0])
    if len(sources) > 1:
        name = f"{name} and {len(sources) - 1} more"
    search = _Search(store or AnyStore(), subfolder, report)
    infos = {info.url: info for info in search.resolve_all(sources)}
    if search.folders or any(has_glob(_path(item)) for item in sources):  # who names single shards wants no others
        _report_sets(infos.values(), report)
    first = _folder_path(_whole(sources[0]))
    is_folder = len(sources) == 1 and sources[0] in search.folders
    root = first if is_folder else _common_folder([_path(url) for url in infos])
    if subfolder and is_folder:
        root = _path(url_join(root, subfolder.strip("/")))
    shards = tuple(ShardSource(info, _shard_name(info.url, root)) for info in infos.values())
    return Found(name, root, shards, is_folder)


def _report_sets(infos: Iterable[ObjectInfo], report: Report) -> None:
    """Count sets of numbered TFRecord shards that are not whole, or not alone, and shards without a record."""
    records = [info for info in infos if named_format(url_name(info.url)) == "tfrecord"]
    for info in records:
        if info.size == 0:
            report.add("empty_shard", Place(info.url))
    sets = find_sets([_path(info.url) for info in records])
    for one in sets:
        if one.num_missing:
            names = ", ".join(map(url_name, one.missing(3)))
            message = f"{one.num_missing} of {one.total} shards are not there: {names}"
            report.add("incomplete_set", Place(f"{one.prefix}-*-of-{one.total:05d}{one.suffix}", message=message))
            logger.warning("%s", _legible(f"{one.prefix}-*-of-{one.total:05d}{one.suffix}: {message}"))
    totals: dict[str, list[int]] = {}
    for one in sets:
        totals.setdefault(one.prefix, []).append(one.total)
    for prefix, found in totals.items():
        if len(found) > 1:
            message = f"sets of {' and '.join(map(str, sorted(found)))} shards stand side by side"
            report.add("mixed_sets", Place(prefix, message=message))
            logger.warning("%s", _legible(f"{prefix}: {message}"))


def _legible(text: str) -> str:
    """Return text for a log, whose file may be one that takes no surrogate escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Search:
    """One search: where, below which folder, and what was met on the way."""

    def __init__(self, store: Store, subfolder: str | None, report: Report) -> None:
        self.store = store
        self.subfolder = subfolder.strip("/") if subfolder else None
        self.report = report
        self.folders: set[str] = set()  # the sources that are folders

    def resolve_all(self, items: Sequence[str], depth: int = 0) -> Iterable[ObjectInfo]:
        """Give the shards of many names in order; those that are elsewhere are asked about side by side."""
        answers: dict[int, list[ObjectInfo]] = {}

        def resolve(number: int) -> None:
            answers[number] = self.resolve(items[number], depth)

        if len(items) > 1 and any(map(is_remote, items)):
            run_all([partial(resolve, number) for number in range(len(items))], _AT_ONCE)
        else:
            for number in range(len(items)):
                resolve(number)
        return [info for number in range(len(items)) for info in answers[number]]

    def resolve(self, item: str, depth: int) -> list[ObjectInfo]:
        """Give the shards that one name stands for."""
        if has_braces(item) and not self._exists(item):
            return list(self.resolve_all(expand_braces(item), depth))
        if has_count(_path(item)) and not self._exists(item):
            return self._find_set(item)
        if has_glob(_path(item)) and not self._exists(item):
            if self.subfolder:
                raise ValueError(f"{without_secrets(item)}: a subfolder is one of a folder; write it into the glob")
            found = self._match(item)
        else:
            found = self._look_up(item, depth)
        if not found:
            left_out = "".join(
                f"; {count} left out ({code}: {', '.join(map(str, places))})" for code, count, places in self.report
            )
            hint = "shards are files that end in .tar or .tfrecord, or are numbered as in train-00000-of-00064"
            raise NotFoundError(f"no shards found{left_out}", url=item, hint=hint)
        return found

    def _look_up(self, item: str, depth: int) -> list[ObjectInfo]:
        """Give a shard, those that a file lists, or those below a folder."""
        place = _whole(item)
        if self.subfolder:
            place = url_join(place, self.subfolder)
        missing = None
        try:
            info = self.store.info(place)
        except NotFoundError as error:
            name = url_name(place)
            if url_scheme(place) in {"", "file"} or named_format(name) or name.lower().endswith(LIST_SUFFIXES):
                raise  # no folder: that is an error of another kind, or has another name
            missing = error
        except StorageError as error:
            if error.errno != errno.EISDIR:
                raise
        else:
            if url_name(place).lower().endswith(LIST_SUFFIXES):
                return self._read_list(info, depth)
            return [info]
        try:
            found = [info for info in self.store.list(place, self.report) if _is_shard(info, place, self.report)]
        except NotFoundError as error:
            raise missing or error from None
        self.folders.add(item)
        return _in_order(found)

    def _read_list(self, info: ObjectInfo, depth: int) -> list[ObjectInfo]:
        """Give the shards that a file lists; names in it are seen from its own folder."""
        if depth >= _DEEPEST:
            raise ValueError(f"{without_secrets(info.url)}: lists that name lists, {_DEEPEST} deep")
        if info.size > _LONGEST_LIST:
            raise StorageError(f"a list of shards of {info.size} bytes", url=info.url)
        content = self.store.open(info.url, info).read(0, info.size)
        names = _parse_list(content, is_json=url_name(info.url).lower().endswith(".json"), url=info.url)
        folder = _folder_of(info.url)
        if is_remote(folder):  # here, because braces become something else in a web address
            names = [spelled for name in names for spelled in expand_braces(name)]
        return list(self.resolve_all([_seen_from(folder, name) for name in names], depth + 1))

    def _exists(self, url: str) -> bool:
        if is_remote(url):
            return False  # nobody names objects so, and asking takes its time
        try:
            self.store.info(url)
        except NotFoundError:
            return False
        except (StorageError, ValueError):
            return True
        return True

    def _match(self, pattern: str) -> list[ObjectInfo]:
        """Give the files that a glob matches (``**`` crosses folders), sorted; the shards alone if there are any."""
        if not url_scheme(pattern):
            names = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)  # noqa: PTH207 - paths stay as written
            files = [_whole(name) for name in names if not Path(name).is_dir()]
            # ``data/*`` means the shards and not the indexes beside them; shards of other names can be spelled out.
            shards = [name for name in files if named_format(url_name(name))] or files
            return _in_order([self.store.info(name) for name in shards])
        path, query = split_query(pattern) if url_scheme(pattern) in {"http", "https"} else (pattern, "")
        folder = glob_folder(path)
        wanted = _decoded(path[len(folder) :].lstrip("/"), pattern)
        start = len(_path(folder))
        found = [
            info
            for info in self.store.list(folder + query, self.report)
            if matches_glob(_decoded(_path(info.url)[start:].lstrip("/"), pattern), wanted)
        ]
        return _in_order([info for info in found if named_format(url_name(info.url))] or found)

    def _find_set(self, item: str) -> list[ObjectInfo]:
        """Give the shards of one set, named by their count: ``train@64``, or ``train@*`` for a count that is not known.

        Raises:
            NotFoundError: Some of them are missing.
            ValueError: ``@*`` fits several sets.
        """
        if self.subfolder:
            raise ValueError(f"{without_secrets(item)}: a subfolder is one of a folder; write it into the name")
        # As it was given: `_path` would leave out a login too.
        path, query = split_query(item) if url_scheme(item) in {"http", "https"} else (item, "")
        names = expand_count(path)
        if len(names) == 1 and has_glob(names[0]):
            found = self._find_only(item, names[0] + query)
            if not found:
                raise NotFoundError("no shards found", url=item, hint="their names are like train-00000-of-00064")
            return found
        infos = self._find_all([name + query for name in names])
        missing = [name for name, info in zip(names, infos, strict=True) if info is None]
        if len(missing) == len(names):  # ``train@64`` may also mean train-00000-of-00064.tfrecord
            found = self._find_only(item, re.sub(r"-0+-of-(?=[0-9]+[^/]*$)", "-[0-9]*-of-", names[0]) + ".*" + query)
            if found:
                return found
        if missing:
            raise _incomplete(item, len(missing), len(names), missing[:8])
        return [info for info in infos if info is not None]

    def _find_only(self, item: str, pattern: str) -> list[ObjectInfo]:
        """Give the one set of shards that a glob finds, all of it, or nothing if there is none."""
        found = [info for info in self._match(pattern) if named_format(url_name(info.url)) is not None]
        sets = find_sets([_path(info.url) for info in found])
        if not sets:
            return []
        if len(sets) > 1:
            said = ", ".join(f"{url_name(one.prefix)}-...-of-{one.total:05d}{one.suffix}" for one in sets[:4])
            raise ValueError(f"{without_secrets(item)} stands for {len(sets)} sets of shards: {said}; name one of them")
        if sets[0].num_missing:
            raise _incomplete(item, sets[0].num_missing, sets[0].total, sets[0].missing())
        return found

    def _find_all(self, names: list[str]) -> list[ObjectInfo | None]:
        """Look up shards, side by side where they are elsewhere; None for each that is not there."""
        answers: list[ObjectInfo | None] = [None] * len(names)

        def look_up(number: int) -> None:
            with suppress(NotFoundError):
                answers[number] = self.store.info(_whole(names[number]))

        jobs = [partial(look_up, number) for number in range(len(names))]
        run_all(jobs, _AT_ONCE if is_remote(names[0]) else 1)
        return answers


def _incomplete(item: str, missing: int, total: int, names: list[str]) -> NotFoundError:
    listed = ", ".join(map(url_name, names)) + (", ..." if missing > len(names) else "")
    what = f"{missing} of {total} shards are missing: {listed}"
    return NotFoundError(what, url=item, hint="fetch them, or name those that are there with a glob")


def _in_order(found: list[ObjectInfo]) -> list[ObjectInfo]:
    """Order numbered TFRecord shards by their number, which may have more digits than others; leave the rest."""

    def key(info: ObjectInfo) -> tuple[bytes, int, int, bytes]:
        path = _path(info.url)
        numbered = parse_numbered(path) if named_format(url_name(path)) == "tfrecord" else None
        if numbered is None:
            return os.fsencode(path), 0, 0, b""
        return os.fsencode(numbered.prefix), numbered.total, numbered.number, os.fsencode(numbered.suffix)

    if any(named_format(url_name(info.url)) == "tfrecord" for info in found):
        return sorted(found, key=key)
    return found


def _parse_list(content: bytes, *, is_json: bool, url: str) -> list[str]:
    """Return the names in a list of shards: one on each line, or JSON."""
    if not is_json:
        lines = (line.strip() for line in content.decode("utf-8", "surrogateescape").splitlines())
        return [line for line in lines if line and not line.startswith("#")]
    try:
        value = orjson.loads(content)
    except ValueError:
        value = None
    if isinstance(value, dict):
        value = value.get("shardlist")
    if isinstance(value, list):
        entries = [entry.get("url") if isinstance(entry, dict) else entry for entry in value]
        names = [name for name in entries if isinstance(name, str) and name]
        if len(names) == len(value):
            return names
    raise StorageError(
        "this JSON lists no shards",
        url=url,
        hint='it is a list of names, or {"shardlist": [{"url": ...}]}; a sidecar index is found by its shard',
    )


def _seen_from(folder: str, name: str) -> str:
    """Return a name in a list as it is seen from the list's folder."""
    if url_scheme(name) or name.startswith("/") or (not url_scheme(folder) and Path(name).is_absolute()):
        return name
    return url_join(folder, name)


def _whole(item: str) -> str:
    """Return a path from the root on, without ``..``, so that shards lie below their root; a url as it is."""
    if url_scheme(item):
        return item
    path = Path(item).absolute()
    if ".." in path.parts:  # only then, since a link that a shard is named by must stay as named
        path = path.resolve() if path.name == ".." else path.parent.resolve() / path.name
    return str(path)


def _path(url: str) -> str:
    """Return a url without the query and the login of a web address."""
    return without_secrets(split_query(url)[0]) if url_scheme(url) in {"http", "https"} else url


def _folder_path(item: str) -> str:
    path = _path(item)
    return path.rstrip("/") if url_scheme(path) in {"http", "https"} else path


def _folder_of(url: str) -> str:
    """Return the folder that an object lies in."""
    if not url_scheme(url):
        return str(Path(url).parent)
    path, query = split_query(url) if url_scheme(url) in {"http", "https"} else (url, "")
    return path.rpartition("/")[0] + query


def _decoded(path: str, url: str) -> str:
    """Return a part of a url as the names that it stands for."""
    return os.fsdecode(unquote_to_bytes(path)) if url_scheme(url) in {"file", "http", "https"} else path


def _is_shard(info: ObjectInfo, folder: str, report: Report) -> bool:
    path = _path(info.url)[len(_path(folder)) :]
    if any(part.startswith(".") for part in path.split("/")):
        return False  # temporary files, catalogs, and what other tools hide
    name = url_name(info.url)
    is_shard = named_format(name) is not None
    if name.lower().endswith(_COMPRESSED):
        report.add("compressed_shard", Place(info.url))
    elif not is_shard and name.lower().endswith(_PERHAPS):
        report.add("unknown_name", Place(info.url, message="its name tells nothing; name it to have its content tell"))
    return is_shard


def _common_folder(urls: list[str]) -> str:
    scheme = url_scheme(urls[0])
    start = f"{scheme}://" if scheme and all(url_scheme(url) == scheme for url in urls) else ""
    folders = [url[len(start) :].rpartition("/")[0].split("/") for url in urls]
    pairs = zip(min(folders), max(folders), strict=False)
    parts = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return start + "/".join(parts) or ("/" if urls[0].startswith("/") else "")


def _shard_name(url: str, root: str) -> str:
    whole = _path(url)
    path = whole[len(root) :].lstrip("/") if root and whole.startswith(root) else whole
    folder, slash, name = path.rpartition("/")
    # What follows the last dot of a TFRecord file may be what tells it from others (a.tfrecord-00000-of-00002).
    stem, dot, _ = ("", "", "") if named_format(name) == "tfrecord" else name.rpartition(".")
    shard_name = _decoded(f"{folder}{slash}{stem if dot and stem else name}", url)
    if url_scheme(url) and ".." in shard_name.split("/"):
        # Indexes are written under this name in a folder of the user's choice, and must not leave it.
        raise ValueError(f"{without_secrets(url)}: a shard's address may not have '..' among its parts")
    return shard_name
