"""Make and look at the index JSON of `wids`: ``python -m shardset.webdataset.wids_index create shards-{0..9}.tar``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from shardset.dataset.opening import discover_dataset
from shardset.errors import ShardsetError
from shardset.files import write_atomic
from shardset.formats.patterns import expand_braces
from shardset.storage.local import storage_error
from shardset.storage.store import url_scheme

from .wids import ShardListDataset, md5_of
from .wids_specs import KIND, VERSION, urldir, urlmerge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def describe_shards(urls: Iterable[str], *, md5: bool = True) -> list[dict[str, Any]]:
    """Return an entry for each shard: ``url``, ``md5sum``, ``nsamples``, ``filesize`` in bytes, sorted by url.

    Args:
        urls: Paths and urls, also with braces (``shards-{000..063}.tar``).
        md5: Work the digests out, for which all bytes are read.

    Raises:
        FormatError: A shard is damaged.
        StorageError: A shard cannot be read.
    """
    entries = []
    for url in sorted(name for pattern in urls for name in expand_braces(pattern)):
        dataset = discover_dataset([url])
        entry = {"url": url, "md5sum": md5_of(dataset.reader(0))} if md5 else {"url": url}
        entries.append({**entry, "nsamples": len(dataset), "filesize": dataset.info(0).info.size})
    return entries


def create_index(
    urls: Iterable[str],
    output: str | os.PathLike[str] = "shardindex.json",
    *,
    name: str | None = None,
    base: str | None = None,
    info: str | None = None,
    md5: bool = True,
) -> dict[str, Any]:
    """Write the index JSON of some shards, which `ShardListDataset` opens.

    Without `base`, urls are seen from the index's folder. Paths that would lead elsewhere from there are written so
    that they lead to the shards.

    Args:
        urls: Paths and urls, also with braces.
        output: The file to write.
        name: The dataset's name.
        base: What to put before urls; they are written as they are given then.
        info: A description.
        md5: As in `describe_shards`.

    Returns:
        What was written.

    Raises:
        ValueError: There is no shard.
        FormatError: A shard is damaged.
        StorageError: A shard cannot be read, or the index cannot be written.
    """
    entries = describe_shards(urls, md5=md5)
    if not entries:
        raise ValueError("there are no shards to make an index of")
    if base is None:
        for entry in entries:
            entry["url"] = _seen_from(urldir(os.fspath(output)), entry["url"])
    given = {"name": name, "base": base, "info": info}
    document: dict[str, Any] = {"__kind__": KIND, "wids_version": VERSION, "shardlist": entries}
    document.update((key, value) for key, value in given.items() if value is not None)
    try:
        write_atomic(output, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise storage_error(error, os.fspath(output)) from error
    return document


def _seen_from(folder: str, path: str) -> str:
    if url_scheme(path) or Path(path).is_absolute():
        return path
    if Path(urlmerge(folder, path)).absolute() == Path(path).absolute():
        return path
    return os.path.relpath(path, folder or ".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``create``, ``check`` or ``info``, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardset.webdataset.wids_index", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="write the index of some shards")
    create.add_argument("files", nargs="+", help="paths, urls, or brace patterns; - to read them from standard input")
    create.add_argument("-o", "--output", default="shardindex.json", help="the file to write")
    create.add_argument("-n", "--name", help="the dataset's name")
    create.add_argument("-b", "--base", help="what to put before each url")
    create.add_argument("-i", "--info", help="a file with a description")
    check = commands.add_parser("check", help="compare shards with their index: samples, bytes, md5sum")
    check.add_argument("index")
    info = commands.add_parser("info", help="say what an index holds")
    info.add_argument("index")
    given = parser.parse_args(arguments)
    try:
        if given.command == "create":
            files = given.files if given.files != ["-"] else [line.strip() for line in sys.stdin if line.strip()]
            text = None if given.info is None else Path(given.info).read_text("utf-8")
            create_index(files, given.output, name=given.name, base=given.base, info=text)
            given.index = given.output
        dataset = ShardListDataset(given.index, transformations=None)
        if given.command == "check":
            dataset.verify()
    except (ShardsetError, ValueError, OSError) as error:
        sys.stderr.write(f"widsindex: {error}\n")
        return 1
    size = sum(shard.get("filesize") or 0 for shard in dataset.shards)
    counts = f"{dataset.total_length} samples in {len(dataset.shards)} shards of {size} bytes"
    sys.stdout.write(f"{given.index}: {dataset.dataset_name}, {counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
