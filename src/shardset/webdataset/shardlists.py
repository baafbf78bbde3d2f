"""Sources of shards, under the names of ``webdataset.shardlists``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from shardset.pipeline.shard_lists import ResampledShards, SimpleShardList, non_empty
from shardset.pipeline.sources import (
    draw_shards,
    expand_urls,
    put_variables,
    single_node_only,
    split_by_node,
    split_by_worker,
)
from shardset.pipeline.stage import Stage

from .directory_shards import DirectoryShardList

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DirectoryShardList",
    "MultiShardSample",
    "ResampledShardList",
    "ResampledShards",
    "SimpleShardList",
    "envsubst",
    "expand",
    "expand_source",
    "expand_urls",
    "non_empty",
    "resampled",
    "shardspec",
    "single_node_only",
    "split_by_node",
    "split_by_worker",
]

ResampledShardList = ResampledShards
envsubst = put_variables


def shardspec(spec: str) -> SimpleShardList:
    """Return the shards that one text names.

    Raises:
        ValueError: It is a specification of several datasets (YAML).
    """
    if spec.endswith((".yaml", ".yml")):
        MultiShardSample(spec)
    return SimpleShardList(spec)


def resampled(*args: Any, **kwargs: Any) -> Stage:
    """Return a stage that takes all shards of its source, and then draws from them without end."""
    return Stage(draw_shards, *args, **kwargs)


def expand_source(source: str | Iterable[Any], max_urls: int = 1_000_000) -> list[Any]:
    """Return the urls of a text, or of any source of urls, of which there may be `max_urls`.

    Raises:
        ValueError: There are more.
    """
    urls = expand_urls(source) if isinstance(source, str) else list(source)
    if len(urls) > max_urls:
        raise ValueError(f"{len(urls)} urls are more than max_urls={max_urls}")
    return urls


def expand(text: str) -> str:
    """Return a path with ``~`` and the environment's variables put in."""
    return os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111 - a path may be any text here


def MultiShardSample(*_: Any, **__: Any) -> NoReturn:  # noqa: N802 - the name of a class of webdataset
    """Refuse specifications of several datasets, which webdataset calls obsolete itself.

    Raises:
        ValueError: Always; says what to do.
    """
    raise ValueError("MultiShardSample is obsolete: make a WebDataset of each source, and mix them with RandomMix")
