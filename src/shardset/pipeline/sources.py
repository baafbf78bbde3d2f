"""Where a pipeline's shards come from, in which order, and which of them each process reads.

The stages here pass on dicts with the key ``url``. A shard that several processes share comes with ``start`` and
``stop`` too: byte offsets, half-open, between which the first headers of its samples stand.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from shardset.dataset.catalogs import load_sidecar
from shardset.dataset.discover import ShardSource, find_shards
from shardset.errors import NoSamplesError
from shardset.formats.patterns import expand_braces, has_braces, has_glob
from shardset.formats.tar_header import padded
from shardset.index.build import fits_headers
from shardset.index.sidecar import sidecar_path
from shardset.loading.order import draws, mix_key, permutation
from shardset.loading.ranks import find_share
from shardset.storage.anywhere import AnyStore
from shardset.storage.store import split_query, url_name, url_scheme

from .run import Step
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardset.loading.ranks import Share
    from shardset.policy import Report
    from shardset.storage.store import Store

    from .run import Run

    Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
    Item = dict[str, Any]
    Splitter = Callable[[Iterable[Item]], Iterable[Item]]

_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
_NESTED: Final = 10
_SHORT_FILE: Final = re.compile(r"\Afile:(?!//)", re.IGNORECASE)  # a path, as some programs write it
_DRAWN_AT_ONCE: Final = 256
_ORDER: Final = int.from_bytes(b"shards", "big")
"""Goes into the key of the order of shards, which is the same on all ranks and apart from the keys of the stages."""
_LISTS: Final = (".json", ".txt", ".list")


def expand_urls(urls: str | os.PathLike[str]) -> list[str]:
    """Return the urls that one text stands for, as webdataset has it.

    ``::`` stands between several texts; ``${NAME}`` for the variable ``WDS_NAME``; braces for all that they expand to
    (``{000..063}``, ``{a,b}``).

    Raises:
        ValueError: A variable is not set, or variables name each other without end.
    """
    found = []
    for part in os.fspath(urls).split("::"):
        text = put_variables(part)
        found += expand_braces(text) if has_braces(text) else [text]
    return found


def put_variables(text: str) -> str:
    """Replace each ``${NAME}`` by the variable ``WDS_NAME``, also in what has been put in.

    Raises:
        ValueError: As `expand_urls`.
    """
    result = text
    for _ in range(_NESTED):
        if not _VARIABLE.search(result):
            return result
        result = _VARIABLE.sub(_variable, result)
    raise ValueError(f"the variables in {text!r} name each other more than {_NESTED} deep")


def _variable(match: re.Match[str]) -> str:
    name = f"WDS_{match[1]}"
    if name not in os.environ:
        raise ValueError(f"the url names {match[0]}, and the variable {name} is not set")
    return os.environ[name]


def as_urls(urls: Urls) -> list[str]:
    """Return the urls that a caller gave: one text or path, which `expand_urls` expands, or several, as they are.

    Raises:
        ValueError: There are none, or one is empty.
        TypeError: One is neither text nor path.
    """
    if isinstance(urls, str):
        found = expand_urls(urls)
    elif isinstance(urls, os.PathLike):
        found = [os.fspath(urls)]
    else:
        found = [os.fspath(url) for url in urls]
    if not found or not all(found):
        raise ValueError("no shards: the list of urls is empty, or a url in it is")
    return [_SHORT_FILE.sub("", url) for url in found]


def urls_of(stage: object) -> Sequence[str]:
    """Return the urls that a first stage was made with, if it is one of ours."""
    if isinstance(stage, Stage) and stage.function is list_shards:
        return cast("Sequence[str]", stage.args[0])
    return cast("Sequence[str]", getattr(stage, "urls", ()))


def find_urls(urls: Sequence[str], store: Store | None = None) -> list[str]:
    """Replace what stands for several shards, a folder, a glob or a file that lists them, by their urls in order.

    Raises:
        NotFoundError: A folder is empty, or a glob matches nothing.
        StorageError: Looking failed.
    """
    found = []
    for url in urls:
        if _stands_for_several(url):
            found += [shard.url for shard in find_shards(url, store=store).shards]
        else:
            found.append(url)
    return found


def _stands_for_several(url: str) -> bool:
    if url == "-" or url.startswith("pipe:"):
        return False
    path = split_query(url)[0] if url_scheme(url) in {"http", "https"} else url
    if path.endswith(("/", *_LISTS)):
        return True
    if url_scheme(url) in {"", "file"} and Path(path).is_dir():
        return True
    return has_glob(path) and not (not url_scheme(url) and Path(path).exists())


def list_shards(
    source: object,  # noqa: ARG001 - the first stage has none
    urls: Sequence[str],
    store: Store | None = None,
    *,
    step: Step | None = None,  # noqa: ARG001 - the same in every run
) -> Iterator[Item]:
    """Pass on the shards in their order, after looking up what stands for several."""
    for url in find_urls(urls, store):
        yield {"url": url}


def order_shards(source: Iterable[Item], seed: int | None = None, *, step: Step | None = None) -> Iterator[Item]:
    """Bring all shards into an order that follows from seed and epoch alone, so that all ranks have the same."""
    run = (step or Step(name="order_shards")).run
    items = list(source)
    key = mix_key(run.seed if seed is None else seed, *run.epoch, _ORDER)
    for number in permutation(key, len(items)).tolist():
        yield items[number]


def draw_shards(
    source: Iterable[Item],
    nshards: int | None = None,
    seed: int | None = None,
    *,
    own: bool = True,
    step: Step | None = None,
) -> Iterator[Item]:
    """Draw shards with replacement, without end or `nshards` times.

    Each rank and worker draws for itself, from the pipeline's seed or `seed`, and differently in each epoch; all alike
    if not `own`. About 37 of 100 shards are not met in as many draws as there are shards.

    Raises:
        NoSamplesError: There is no shard; or three times as many were drawn as there are, and no sample came through.
    """
    step = step or Step(name="draw_shards")
    run = step.run
    items = list(source)
    if not items:
        raise NoSamplesError("there are no shards to draw from")
    share = (run.share.rank, run.share.worker) if own else ()
    key = mix_key(run.seed if seed is None else seed, *run.epoch, *share, _ORDER)
    drawn = 0
    while nshards is None or drawn < nshards:
        count = _DRAWN_AT_ONCE if nshards is None else min(_DRAWN_AT_ONCE, nshards - drawn)
        for number in draws(key, drawn, count).tolist():
            yield items[number * len(items) >> 64]
            if drawn > 3 * len(items) + 16 and not run.delivered and not run.restored:
                _check_passage(run, drawn, len(items))
            drawn += 1


def _check_passage(run: Run, drawn: int, count: int) -> None:
    """Make sure that an endless stream gives something: that there are samples, and no stage stops them all.

    Raises:
        NoSamplesError: It gives nothing.
    """
    blocked = next((passage for passage in run.passages if passage.is_blocked), None)
    if run.last_read is not None and blocked is None:
        return
    what = (
        "there was no sample in them" if blocked is None else f"the stage {blocked.step.name!r} let none of them pass"
    )
    raise NoSamplesError(f"{drawn} shards were drawn of {count}: {what}", hint=f"counted: {run.report.summary()}")


def split_by_node(source: Iterable[Any], group: object = None, *, step: Step | None = None) -> Iterator[Any]:
    """Pass on every `world_size`-th item, from number `rank` on."""
    share = step.run.share if step is not None and group is None else find_share(group)
    return islice(iter(source), share.rank, None, share.world_size)


def split_by_worker(source: Iterable[Any], *, step: Step | None = None) -> Iterator[Any]:
    """Pass on every `num_workers`-th item, from number `worker` on."""
    share = find_share() if step is None else step.run.share
    return islice(iter(source), share.worker, None, share.num_workers)


def single_node_only(source: Iterable[Any], group: object = None, *, step: Step | None = None) -> Iterator[Any]:
    """Pass everything on where there is one rank.

    Raises:
        ValueError: There are several.
    """
    share = step.run.share if step is not None and group is None else find_share(group)
    if share.world_size > 1:
        raise ValueError(
            f"this is rank {share.rank} of {share.world_size}, and the dataset has no nodesplitter: "
            "give nodesplitter=split_by_node, or another one"
        )
    return iter(source)


def share_shards(
    source: Iterable[Item], store: Store | None = None, *, may_be_empty: bool = False, step: Step | None = None
) -> Iterator[Item]:
    """Pass on this process's share: shard `i` goes to rank `i` modulo the ranks, and among its workers in turn.

    Where there are fewer shards than processes, and each shard has a sidecar index, shards are cut into runs of
    samples, as nearly equal as can be, and these are shared in the same way.

    Args:
        source: All shards, in the same order in all processes.
        store: Where shards and their indexes lie.
        may_be_empty: It is no error if nothing falls to this process.
        step: The step of a run.

    Raises:
        NoSamplesError: There are fewer shards than processes, and a shard without an index among them.
    """
    step = step or Step(name="share_shards")
    share = step.run.share
    items = list(source)
    if items and len(items) < share.processes:
        parts = _cut(items, share, store, step.run.report)
        if parts is not None:
            items = parts
        elif not may_be_empty:
            raise NoSamplesError(
                f"{len(items)} shards cannot be shared by {share.processes} processes "
                f"({share.world_size} ranks with {share.num_workers} workers each)",
                hint="index them ('shardset index'): then they can be shared by samples, if the indexes fit and tell "
                "of no faults; or write more shards, or use fewer workers; empty_check=False lets workers be idle",
            )
    return islice(iter(items), share.rank + share.worker * share.world_size, None, share.processes)


def _cut(items: list[Item], share: Share, store: Store | None, report: Report) -> list[Item] | None:
    """Cut shards into runs of samples, at least one for each process; None if an index is missing."""
    pieces = -(-share.processes // len(items))
    store = store or AnyStore()
    found: list[Item] = []
    for item in items:
        starts = None if url_scheme(item["url"]) == "pipe" else _sample_starts(item["url"], store, report)
        if starts is None:
            return None
        count = len(starts)
        bounds = [count * number // pieces for number in range(pieces + 1)]
        edges: list[int | None] = [starts[bound] if 0 < bound < count else 0 for bound in bounds[:-1]]
        found += [
            {**item, "start": start, "stop": stop}
            for start, stop in zip(edges, [*edges[1:], None], strict=True)
            if start != stop
        ]
    return found


def _sample_starts(url: str, store: Store, report: Report) -> list[int] | None:
    """Return for each sample of a shard where its headers begin at the earliest, by its sidecar index; None without."""
    if url == "-" or url.startswith("pipe:"):
        return None
    info = store.info(url)
    sidecar = load_sidecar(ShardSource(info, url_name(url)), store, url=sidecar_path(url), report=report)
    if sidecar is None or sidecar.index.records is not None or sidecar.index.sparse or sidecar.index.faults:
        return None
    if not fits_headers(sidecar.index, store.open(url, info)):
        return None
    index = sidecar.index
    # Headers of a sample begin behind the file before its first one, whichever sample or none that belongs to.
    order = index.archive_order()
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    before = place[index.sample_rows[:-1]] - 1
    ends = (index.offset + index.length)[order]
    return [padded(int(ends[row])) if row >= 0 else 0 for row in before.tolist()]
