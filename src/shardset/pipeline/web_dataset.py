"""`WebDataset`: tar shards, from wherever they lie, as a pipeline of samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardset.storage.anywhere import AnyStore
from shardset.storage.file_cache import FileCache

from .pipeline import DataPipeline
from .reading import Reading, read_samples
from .shard_bytes import ShardPlace
from .sources import (
    as_urls,
    draw_shards,
    list_shards,
    order_shards,
    share_shards,
    single_node_only,
    split_by_node,
    split_by_worker,
)
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardset.policy import Policy
    from shardset.storage.store import Store
    from shardset.storage.streams import Openers

    from .run import Handler

_OURS: Final = {split_by_node, split_by_worker, single_node_only}


class WebDataset(DataPipeline):
    """Samples out of tar shards, as the WebDataset convention groups them: members of one key that stand together.

    Every sample is a dict of ``__key__``, ``__url__``, ``__local_path__`` (of local shards) and its fields: suffix in
    lower case, with the payload as bytes. Ranks and workers share the shards without overlap. The order follows from
    seed and epoch; each iteration is another epoch. What is left out is counted: see `report`.

    Args:
        urls: A path or url, with braces, ``::`` and ``${NAME}`` as `expand_urls` has it; a folder, a glob or a file
            that lists shards; ``pipe:COMMAND``; ``-`` for standard input; a list of these; or a stage that gives dicts
            with the key ``url``.
        handler: Decides about errors of reading, as webdataset's handlers do; None leaves them to `policy`.
        mode: ``"resampled"`` is the same as ``resampled=True``.
        resampled: Draw shards with replacement, without end.
        repeat: Begin again at the end, for ever.
        shardshuffle: Whether shards come in a new order in each epoch: all of them are permuted, the same way on all
            ranks, and then shared out. A number means yes unless it is 0.
        cache_size: Bytes that the cache may hold; below 0 without limit, 0 for no cache.
        cache_dir: Folder of a cache of whole shards, for those that are elsewhere.
        url_to_name: Gives the name in the cache of a url.
        detshuffle: The same as ``shardshuffle=True``, for all orders here follow from the seed.
        nodesplitter: A function that takes the shards of all ranks and gives those of this one; None for all of them.
            By default each is read by one rank; drawn ones by all.
        workersplitter: The same for the workers of a rank.
        select_files: Tells by its name, after `rename_files`, whether a member is wanted.
        rename_files: Gives the name that a member is to have.
        empty_check: Raise where there is no sample, or where there are fewer shards than processes and no indexes.
        verbose: Log the url of each shard that is begun (logger ``shardset.pipeline``, level INFO).
        seed: Decides about all orders; by default that of the variable ``WDS_SEED``, or 0.
        policy: What happens on faults. The default raises where samples would be lost.
        store: Where urls lie; by default the place that each scheme names.
        openers: By scheme, functions that open a url as a binary file, for schemes that no store has.

    Raises:
        ValueError: There is no url, or an argument has a value that means nothing.
        TypeError: `urls` is nothing of all this.
    """

    def __init__(  # noqa: PLR0917 - the order of webdataset's arguments
        self,
        urls: Any,
        handler: Handler | None = None,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: int = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Callable[[str], str] | None = None,
        detshuffle: bool = False,
        nodesplitter: Callable[[Iterable[Any]], Iterable[Any]] | None = split_by_node,
        workersplitter: Callable[[Iterable[Any]], Iterable[Any]] | None = split_by_worker,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
        *,
        policy: Policy | None = None,
        store: Store | None = None,
        openers: Openers | None = None,
    ) -> None:
        super().__init__(seed=seed, policy=policy)
        for name, value in (("handler", handler), ("select_files", select_files), ("rename_files", rename_files)):
            if value is not None and not callable(value):
                raise TypeError(f"{name}={value!r} cannot be called")
        openers = self._usual_openers() if openers is None else openers
        if mode not in {None, "resampled"}:
            raise ValueError(f"mode={mode!r}: the only mode is 'resampled'; a folder is read as it is, without one")
        if isinstance(urls, dict) or (isinstance(urls, str) and urls.endswith((".yaml", ".yml"))):
            raise ValueError(
                "specifications of several datasets (a dict or a YAML file) are obsolete in webdataset too: "
                "make a WebDataset of each, and mix them with RandomMix"
            )
        if url_to_name is not None and (cache_dir is None or cache_size == 0):
            raise ValueError("url_to_name names files of the cache, and there is none: give cache_dir too")
        cache = None
        if cache_dir is not None and cache_size != 0:
            cache = FileCache(
                Path(cache_dir).expanduser(),
                cache_size if cache_size > 0 else None,
                url_to_name,
                store=AnyStore() if store is None else store,
                openers=openers,
            )
        place = ShardPlace(AnyStore() if store is None else store, openers or {}, cache)
        is_drawn = resampled or mode == "resampled"
        self.append(_shards_of(urls, store))
        if is_drawn:
            self.append(Stage(draw_shards))
        else:
            if shardshuffle or detshuffle:
                self.append(Stage(order_shards))
            for stage in _splitters(nodesplitter, workersplitter, store, empty_check=empty_check):
                self.append(stage)
        reading = Reading(place, handler, rename_files, select_files, empty_check, verbose)
        self.append(Stage(read_samples, reading))
        if repeat:
            self.repeat()

    def _usual_openers(self) -> Openers:
        return {}


def _shards_of(urls: Any, store: Store | None) -> Any:
    if isinstance(urls, str | os.PathLike | list | tuple):
        return Stage(list_shards, as_urls(urls), store)
    if hasattr(urls, "start") or hasattr(urls, "run") or callable(urls):
        return urls
    if hasattr(urls, "__iter__"):
        found = list(urls)
        return Stage(list_shards, as_urls([item["url"] if isinstance(item, dict) else item for item in found]), store)
    raise TypeError(f"urls are text, paths, or a list of these, not {urls!r}")


def _splitters(by_node: Any, by_worker: Any, store: Store | None, *, empty_check: bool) -> list[Any]:
    """Return the stages that give this process its share; one, which knows the numbers, where both are ours."""
    if by_node is split_by_node and by_worker is split_by_worker:
        return [Stage(share_shards, store, may_be_empty=not empty_check)]
    return [Stage(split) if split in _OURS else split for split in (by_node, by_worker) if split]
