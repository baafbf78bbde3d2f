"""The steps from urls to samples one by one, under the names of ``webdataset.tariterators``.

`shardset.WebDataset` goes from shards to samples in one step, and counts and checks more on the way; these are for
programs that put such steps together themselves.
"""

from __future__ import annotations

import functools
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from shardset.errors import ShardsetError, without_secrets
from shardset.formats import naming
from shardset.formats.stream_compression import inflate_shard
from shardset.formats.tar import Kind, scan_tar
from shardset.formats.tar_header import BLOCK
from shardset.index.table import duplicate_error
from shardset.pipeline.read_errors import as_read_error
from shardset.pipeline.reading import Reading, read_samples
from shardset.pipeline.run import Step
from shardset.pipeline.shard_bytes import StreamedBytes
from shardset.pipeline.stage import Stage
from shardset.policy import Place
from shardset.storage.streams import iter_pieces, open_stream

from .gopen import gopen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from shardset.pipeline.run import Handler

    Dict = dict[str, Any]

__all__ = [
    "base_plus_ext",
    "group_by_keys",
    "tar_file_expander",
    "tar_file_iterator",
    "tarfile_samples",
    "tarfile_to_samples",
    "url_opener",
    "valid_sample",
]


def base_plus_ext(path: str) -> tuple[str | None, str | None]:
    """Split the name of a member into key and suffix; (None, None) if it has no suffix."""
    split = naming.base_plus_ext(path.encode("utf-8", "surrogateescape"))
    if split is None:
        return None, None
    key, suffix = (part.decode("utf-8", "surrogateescape") for part in split)
    return key, suffix


def valid_sample(sample: Any) -> bool:
    """Tell whether a value is a sample: a dict that is not empty and not marked as bad."""
    return isinstance(sample, dict) and len(sample) > 0 and not sample.get("__bad__", False)


def _of_its_run(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Make the step of a generator function when it is called: then the run is known that it belongs to."""

    @functools.wraps(function)
    def call(*args: Any, step: Step | None = None, **kw: Any) -> Iterator[Any]:
        return function(*args, step=step or Step(name=function.__name__), **kw)

    return call


@_of_its_run
def url_opener(
    data: Iterable[Dict], handler: Handler | None = None, *, step: Step | None = None, **kw: Any
) -> Iterator[Dict]:
    """Open the ``url`` of each dict, and put the open file under ``stream``. `kw` goes to `gopen`."""
    step = step or Step(name="url_opener")
    for item in data:
        try:
            stream = gopen(item["url"], **kw)
        except (ShardsetError, OSError, ValueError) as error:
            if step.settle(error, "unreadable_shard", {"__url__": item["url"]}, handler):
                continue
            return
        yield {**item, "stream": stream}


def tar_file_iterator(
    fileobj: IO[bytes],
    skip_meta: str | None = r"__[^/]*__($|/)",
    handler: Handler | None = None,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    *,
    shard: str | None = None,
    step: Step | None = None,
) -> Iterator[Dict]:
    """Give the files of a tar that is read from an open file: dicts of ``fname`` and ``data``.

    Args:
        fileobj: Is read from where it stands to its end, and may be compressed.
        skip_meta: Leave out the ``__name__`` trees at the root; None to give them too.
        handler: Decides about damage.
        select_files: Tells by its name, after `rename_files`, whether a file is wanted.
        rename_files: Gives the name that a file is to have.
        shard: The tar's url, for errors.
        step: The step of a run.

    Raises:
        FormatError: The tar is damaged, if nobody says otherwise; all files before the damage have been given.
    """
    step = step or Step(name="tar_file_iterator")
    source = StreamedBytes(iter(inflate_shard(iter_pieces(open_stream(fileobj)))), lambda: None)
    offset, least = 0, 0
    while True:
        data, is_all = source.window(offset, least)
        view = memoryview(data)
        table = scan_tar(
            _reading(view),
            len(view),
            is_mapped=True,
            base=offset,
            goes_on=not is_all,
        )
        for row in np.flatnonzero(table.kind == Kind.FILE).tolist():
            name = table.names.text(row)
            if skip_meta is not None and naming.is_structural(table.names[row]):
                continue
            if rename_files is not None:
                name = rename_files(name)
            if select_files is not None and not select_files(name):
                continue
            start = int(table.offset[row]) - offset
            yield {"fname": name, "data": bytes(view[start : start + int(table.size[row])])}
        error = source.error or table.error(shard)
        if error is not None:
            place = Place(shard and without_secrets(shard), getattr(error, "offset", None), message=error.message)
            step.settle(as_read_error(error), getattr(error, "code", "unreadable_shard"), None, handler, place)
            return
        if not table.is_cut:
            return
        least = 2 * len(view) + BLOCK if table.end == offset else 0
        offset = table.end


def _reading(view: memoryview) -> Callable[[int, int], memoryview]:
    return lambda offset, length: view[offset : offset + length]


@_of_its_run
def tar_file_expander(
    data: Iterable[Dict],
    handler: Handler | None = None,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = None,
    *,
    step: Step | None = None,
) -> Iterator[Dict]:
    """Give the files of each opened tar: dicts of ``fname``, ``data`` and ``__url__``.

    Behind each tar comes `eof_value`, unless it is None. Nothing here needs it: `group_by_keys` goes by the url. Files
    come as they stand: where a tar ends in damage, the last sample may lack some, which only `WebDataset` can tell.
    """
    step = step or Step(name="tar_file_expander")
    for item in data:
        url, stream = item["url"], item["stream"]
        try:
            for file in tar_file_iterator(
                stream, handler=handler, select_files=select_files, rename_files=rename_files, shard=url, step=step
            ):
                yield {**file, "__url__": url}
        finally:
            stream.close()
        if eof_value is not None:
            yield eof_value


@_of_its_run
def group_by_keys(
    data: Iterable[Dict],
    keys: Callable[[str], tuple[str | None, str | None]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    handler: Handler | None = None,
    *,
    step: Step | None = None,
) -> Iterator[Dict]:
    """Group files of one key that follow each other into samples. An empty dict, or another url, ends a sample too.

    Args:
        data: Dicts of ``fname``, ``data`` and perhaps ``__url__``.
        keys: Splits a name into key and suffix.
        lcase: Make suffixes lower case.
        suffixes: Keep only these.
        handler: Decides about a suffix that a sample has twice; to go on keeps the first.
        step: The step of a run.

    Raises:
        DuplicateFieldError: As said.
    """
    step = step or Step(name="group_by_keys")
    sample: Dict = {}
    for file in data:
        if not file:
            if _has_fields(sample):
                yield sample
            sample = {}
            continue
        url = file.get("__url__")
        key, suffix = keys(file["fname"])
        if key is None or suffix is None:
            step.drop("no_suffix", {"__url__": url}, repr(file["fname"]))
            continue
        if lcase:
            suffix = suffix.lower()
        if not sample or sample["__key__"] != key or sample.get("__url__") != url:
            if _has_fields(sample):
                yield sample
            sample = {"__key__": key} if url is None else {"__key__": key, "__url__": url}
        if suffix in sample:
            error = duplicate_error(key, suffix, 0, 0, url)
            if not step.settle(error, "duplicate_suffix", sample, handler):
                return
        elif suffixes is None or suffix in suffixes:
            sample[suffix] = file["data"]
        else:
            step.drop("suffix_not_wanted", sample, suffix)
    if _has_fields(sample):
        yield sample


def _has_fields(sample: Dict) -> bool:
    return any(name not in {"__key__", "__url__"} for name in sample)


def tarfile_samples(
    src: Iterable[Dict],
    handler: Handler | None = None,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    *,
    step: Step | None = None,
) -> Iterator[Dict]:
    """Read the samples of shards, given as dicts with the key ``url``, as `shardset.WebDataset` does."""
    reading = Reading(handler=handler, select=select_files, rename=rename_files, empty_check=False)
    return read_samples(src, reading, step=step or Step(name="tarfile_samples"))


def tarfile_to_samples(
    handler: Handler | None = None,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Stage:
    """Return a stage that reads the samples of the shards that come."""
    return Stage(read_samples, Reading(handler=handler, select=select_files, rename=rename_files, empty_check=False))
