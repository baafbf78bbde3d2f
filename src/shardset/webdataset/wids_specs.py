"""The index JSON of `wids`: which shards a dataset has, where they are, and how many samples each holds.

It is ``{"wids_version": 1, "shardlist": [{"url", "nsamples", ...}], "base": ..., "name": ..., "datasets": [...]}``.
Each of ``datasets`` has a shardlist of its own, or the url of another such file under ``source_url``.
"""

from __future__ import annotations

import os
import posixpath
from typing import IO, TYPE_CHECKING, Any, Final

import orjson

from shardset.errors import IndexFileError
from shardset.storage.anywhere import AnyStore
from shardset.storage.store import split_query, url_scheme

if TYPE_CHECKING:
    from collections.abc import Mapping

KIND: Final = "wids-shard-index-v1"
VERSION: Final = 1
MAKE_INDEX: Final = "make one with: python -m shardset.webdataset.wids_index create"
_LONGEST: Final = 1 << 30
_WEB: Final = frozenset({"http", "https"})


def urldir(url: str) -> str:
    """Return the folder that a file lies in. The query of a web address, which may be what lets one in, stays."""
    if not url_scheme(url):
        return os.path.dirname(url)  # noqa: PTH120 - Path would make "" a dot
    place, path, query = _split(url)
    return place + posixpath.dirname(path) + query


def urlmerge(base: str | None, url: str) -> str:
    """Return a shard's url as it is seen from the folder `base`.

    A whole url, and below a path an absolute path, stay as they are; an absolute path below a url keeps its host.
    """
    if not base or url_scheme(url):
        return url
    if not url_scheme(base):
        return os.path.normpath(os.path.join(base, url))  # noqa: PTH118 - an index names paths, not Paths
    place, folder, query = _split(base)
    path, own_query = split_query(url) if url_scheme(base) in _WEB else (url, "")
    return place + posixpath.normpath(posixpath.join(folder or "/", path)) + (own_query or query)


def _split(url: str) -> tuple[str, str, str]:
    """Return scheme and host, path, and query of a url."""
    scheme, _, rest = url.partition("://")
    rest, query = split_query(rest) if url_scheme(url) in _WEB else (rest, "")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host}", slash + path, query


def load_remote_dsdesc_raw(source: str | os.PathLike[str] | IO[Any]) -> dict[str, Any]:
    """Read an index JSON, from a path, a url or an open file, and resolve nothing in it.

    Raises:
        IndexFileError: It is no JSON object.
        StorageError: It cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        url = os.fspath(source)
        reader = AnyStore().open(url)
        if reader.size > _LONGEST:
            raise IndexFileError(f"an index of {reader.size} bytes, where {_LONGEST} are allowed", path=url)
        payload: bytes | str = reader.read(0, reader.size)
    else:
        url, payload = getattr(source, "name", None) or "the file given", source.read()
    try:
        document = orjson.loads(payload)
    except ValueError as error:
        raise IndexFileError(f"the index is no JSON: {error}", path=str(url)) from error
    if not isinstance(document, dict):
        raise IndexFileError(
            "the index is no JSON object",
            path=str(url),
            hint=MAKE_INDEX,
        )
    return document


def load_dsdesc_and_resolve(
    source: str | os.PathLike[str] | IO[Any], *, options: Mapping[str, Any] | None = None, base: str | None = None
) -> dict[str, Any]:
    """Read an index JSON with all that it refers to.

    Args:
        source: A path, a url or an open file.
        options: Replace what the file says, key by key.
        base: The folder that urls are seen from; by default the file's ``base``, else the folder that it lies in.

    Returns:
        What the file says, with all shards in one ``shardlist``, their urls whole. Those of ``datasets`` come behind
        and have the name of theirs under ``dataset``.

    Raises:
        IndexFileError: The file is of another version or malformed, or there is no shard.
        StorageError: A file cannot be read.
    """
    is_named = isinstance(source, str | os.PathLike)
    url = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    described = {**load_remote_dsdesc_raw(source), **(options or {})}
    label = url or "the index"
    if described.get("wids_version") != VERSION:
        what = f"wids_version is {described.get('wids_version')!r}, and {VERSION} is what can be read"
        raise IndexFileError(what, path=label)
    folder = urldir(url) if is_named and url is not None else None
    base = base if base is not None else _own_base(described, folder, label)
    shards = _shards(described.get("shardlist", []), base, label)
    _set_all(shards, weight=described.get("weight"), name=described.get("name"))
    components = described.get("datasets", [])
    if not isinstance(components, list) or not all(isinstance(component, dict) for component in components):
        raise IndexFileError("datasets is no list of objects", path=label)
    for component in components:
        shards += _component(component, base, label)
    if not shards:
        raise IndexFileError("the index names no shards", path=label)
    return {**described, "shardlist": shards}


def _component(component: dict[str, Any], base: str | None, label: str) -> list[dict[str, Any]]:
    """Return the shards of one of several datasets."""
    source_url = component.get("source_url")
    described = component
    if source_url is not None:
        if not isinstance(source_url, str):
            raise IndexFileError(f"source_url is {source_url!r}", path=label)
        label = urlmerge(base, source_url)
        described = load_remote_dsdesc_raw(label)
        base = urldir(label)
        if "source_url" in described or described.get("datasets"):
            raise IndexFileError("a dataset of several that refers to others again", path=label)
    if "shardlist" not in described:
        raise IndexFileError("a dataset without a shardlist", path=label)
    shards = _shards(described["shardlist"], _own_base(described, base, label), label)
    # The weight of the reference counts, whatever the file says that it leads to.
    _set_all(shards, weight=component.get("weight"), source_url=source_url, dataset=described.get("name"))
    return shards


def _own_base(described: dict[str, Any], folder: str | None, label: str) -> str | None:
    base = described.get("base")
    if base is None:
        return folder
    if not isinstance(base, str):
        raise IndexFileError(f"base is {base!r}", path=label)
    return urlmerge(folder, base)


def _shards(entries: Any, base: str | None, label: str) -> list[dict[str, Any]]:
    if not isinstance(entries, list):
        raise IndexFileError("shardlist is no list", path=label)
    return [check_shard(entry, base, number, label) for number, entry in enumerate(entries)]


def check_shard(entry: Any, base: str | None, number: int, label: str) -> dict[str, Any]:
    """Return a copy of an entry of a shardlist, checked, with its url whole.

    Raises:
        IndexFileError: It has no url, or no number of samples.
    """
    url = entry.get("url") if isinstance(entry, dict) else None
    if not isinstance(url, str) or not url:
        raise IndexFileError(f"shard {number} of the list has no url: {entry!r:.200}", path=label)
    for name, is_needed in (("nsamples", True), ("filesize", False)):
        value = entry.get(name)
        if (value is None and is_needed) or (value is not None and (type(value) is not int or value < 0)):
            raise IndexFileError(
                f"shard {number} of the list, {url}: {name} is {value!r}",
                path=label,
                hint=MAKE_INDEX,
            )
    return {**entry, "url": urlmerge(base, url)}


def _set_all(shards: list[dict[str, Any]], **values: Any) -> None:
    for shard in shards:
        for name, value in values.items():
            if value is not None:
                shard.setdefault(name, value)
