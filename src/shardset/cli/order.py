"""``shardset order``: what a loader reads when, and what a way to shuffle costs and gives."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import click
import numpy as np

from shardset.loading.order import LARGEST_WINDOW, LONGEST_RUN, RandomOrder, Shuffle, order_of, resolve
from shardset.loading.quality import Sorted, expect_quality, fit_batches, measure_cost, measure_quality
from shardset.loading.steps import Step, Steps

from .address import near_path, open_source
from .program import Command, MisuseError, Settings, note
from .reporting import misuse, progress_bar
from .tables import Column, print_facts, print_list, print_table
from .text import counted, dump_json, human_size, name_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset
    from shardset.loading.order import Order, Resolved
    from shardset.loading.quality import Cost, Quality

_COLUMNS: Final = (
    Column("position", is_right=True),
    Column("step", is_right=True),
    Column("rank", is_right=True),
    Column("#", is_right=True),
    Column("key", is_flexible=True, is_path=True),
    Column("shard", is_flexible=True, is_path=True, show=near_path),
)
_MEASURES: Final = (
    ("chi_square", "chi-square of the labels per degree of freedom", "{:.3f}"),
    ("shards", "shards in a batch", "{:.1f}"),
    ("neighbours", "neighbours from one shard", "{:.3%}"),
    ("correlation", "correlation of neighbours", "{:.4f}"),
    ("pairs", "pairs that meet again in the next epoch, times chance", "{:.2f}"),
)
_LISTED: Final = 20
_AT_ONCE: Final = 1 << 12
_TIMED: Final = 1 << 16
_ROUNDS: Final = 5
_FEW: Final = 4096
"""Of fewer samples the time goes into the calls, not into the order."""
_SAMPLES_OF_A_SHARD: Final = 1000
_GOOD: Final = 1.1
_MUCH_MEMORY: Final = 2 << 30
_SMALL_READ: Final = 128 << 10


def _size(text: str) -> int:
    from .convert import parse_size  # noqa: PLC0415 - brings what writes shards

    return parse_size(text)


@click.command(
    "order",
    cls=Command,
    examples=[
        ("shardset order photos/ --explain --world-size 8", "what the default shuffle costs and gives on eight GPUs"),
        ("shardset order photos/ --start 51200 --batch-size 256", "what comes from step 200 on"),
        ("shardset order photos/ --full --seed 7 --epoch 3 --count 0 --json | jq .sample_index", "a whole epoch"),
        (
            "shardset order --explain --samples 100000000 --mean-bytes 100kB --window 512MiB",
            "a dataset that is not there yet",
        ),
    ],
)
@click.argument("source", required=False)
@click.option("--shuffle", "kind", flag_value="windowed", help="In windows of runs, each read at once.  [default]")
@click.option("--full", "kind", flag_value="full", help="Each sample anywhere, and read by itself.")
@click.option("--sequential", "kind", flag_value="sequential", help="As the samples stand in the shards.")
@click.option("--window", type=_size, metavar="SIZE", help="Bytes that are shuffled together.  [default: 1GiB]")
@click.option("--run", type=_size, metavar="SIZE", help="Bytes that are read at once, about.  [default: 256KiB]")
@click.option(
    "--lanes",
    type=click.IntRange(min=1),
    metavar="N",
    help="A multiple of the numbers of ranks that share windows without reading the same runs.  [default: 192]",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="What decides the order.")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Which epoch.")
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Ranks.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Samples of a batch of one rank.",
)
@click.option("--explain", is_flag=True, help="Say what the order costs and gives, instead of listing it.")
@click.option("--start", type=click.IntRange(min=0), default=0, metavar="N", help="The first position to list.")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=0),
    default=_LISTED,
    show_default=True,
    metavar="N",
    help="Positions to list; 0 lists all.",
)
@click.option(
    "--samples", type=click.IntRange(min=1), metavar="N", help="With --explain and no SOURCE: how many there are."
)
@click.option("--mean-bytes", type=_size, metavar="SIZE", help="With --explain and no SOURCE: mean size of a sample.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object a line, with --explain one in all, as docs/json.md describes them.",
)
@click.pass_obj
def command(
    settings: Settings,
    *,
    source: str | None,
    kind: str | None,
    window: int | None,
    run: int | None,
    lanes: int | None,
    seed: int,
    epoch: int,
    world_size: int,
    batch_size: int,
    explain: bool,
    start: int,
    count: int,
    samples: int | None,
    mean_bytes: int | None,
    as_json: bool,
) -> None:
    """List what a loader reads when, and explain what a shuffle costs.

    A step takes the next batch-size x world-size positions. Positions at the end that fill no step have no rank: a
    loader leaves them out unless it is told otherwise. Explaining measures the order on samples of this number and size
    that are sorted by label, the worst case; in the table, chance is what a true shuffle has on average.
    """
    sizes: dict[str, int] = {
        name: size
        for name, size in (("window_bytes", window), ("run_bytes", run), ("lanes", lanes))
        if size is not None
    }
    if sizes and kind in {"full", "sequential"}:
        raise MisuseError(f"--window, --run and --lanes say nothing about --{kind}", "leave them out, or use --shuffle")
    dataset, total = None, 0
    if source is not None and samples is None and mean_bytes is None:
        dataset = open_source(source)
        samples, total = len(dataset), dataset.total_size
    elif source is None and samples is not None and mean_bytes is not None:
        total = samples * mean_bytes
    else:
        raise MisuseError("give a SOURCE, or both --samples and --mean-bytes", "shardset order photos/ --explain")
    with misuse("--lanes 192 fits 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96 and 192 ranks"):
        setting = _setting(kind, sizes)
        resolved = resolve(setting, samples, total)
    asked = _Asked(resolved, order_of(resolved, samples, seed), seed, epoch, Steps(batch_size, 0, world_size), total)
    if explain:
        _explain(asked, dataset, settings, as_json=as_json)
    elif dataset is None:
        raise MisuseError("without a SOURCE there is nothing to list", "add --explain")
    else:
        _list(asked, dataset, range(start, min(start + count, samples) if count else samples), as_json=as_json)


def _setting(kind: str | None, sizes: dict[str, int]) -> bool | Literal["full"] | Shuffle:
    if kind == "sequential":
        return False
    return "full" if kind == "full" else Shuffle(**sizes)


class _Asked(NamedTuple):
    """What the options say: a setting, its order, an epoch, the steps of rank 0, and the bytes of all samples."""

    resolved: Resolved
    order: Order
    seed: int
    epoch: int
    steps: Steps
    total: int

    @property
    def mean_bytes(self) -> float:
        return self.total / max(self.order.count, 1)


def _list(asked: _Asked, dataset: Dataset, positions: range, *, as_json: bool) -> None:
    count = asked.order.count
    if positions.start and positions.start >= count:
        raise MisuseError(f"there is no position {positions.start} of {counted(count, 'sample')}", "count from 0")
    rows = chain.from_iterable(
        _rows(asked, dataset, positions[at : at + _AT_ONCE]) for at in range(0, len(positions), _AT_ONCE)
    )
    if as_json:
        for position, step, rank, number, key, shard in rows:
            numbers = {"position": position, "step": step, "rank": rank, "sample_index": number}
            click.echo(dump_json({**numbers, **name_fields("key", key), **name_fields("shard", shard)}, is_line=True))
    else:
        print_list(_COLUMNS, rows)
    if positions.stop < count:
        note(f"... and {counted(count - positions.stop, 'position')} more (--count 0 lists all)")


def _rows(
    asked: _Asked, dataset: Dataset, positions: range
) -> Iterator[tuple[int, int | None, int | None, int, str, str]]:
    order, size = asked.order, asked.steps.size
    ranks = ranks_of_step(asked.steps, order.lanes)
    for position, number in zip(positions, order.take(asked.epoch, positions).tolist(), strict=True):
        step, place = divmod(position, size)
        is_whole = (step + 1) * size <= order.count
        sample = dataset[number]
        yield position, step if is_whole else None, ranks[place] if is_whole else None, number, sample.key, sample.shard


def ranks_of_step(steps: Steps, lanes: int) -> list[int]:
    """Return the rank that takes each position of a step."""
    ranks = np.empty(steps.size, np.int64)
    for rank in range(steps.world_size):
        ranks[list(Steps(steps.batch_size, rank, steps.world_size).share(Step(0, steps.size), lanes))] = rank
    found: list[int] = ranks.tolist()
    return found


class _Explained(NamedTuple):
    """What was measured; what cannot be measured of so few samples is None.

    `batches` are (positions, number); `quality` is that of this order, of a true shuffle, and what chance has.
    """

    cost: Cost
    nanoseconds: float | None
    batches: tuple[int, int]
    classes: int
    quality: tuple[Quality, Quality, Quality] | None


def _explain(asked: _Asked, dataset: Dataset | None, settings: Settings, *, as_json: bool) -> None:
    count = asked.order.count
    starts = np.arange(0, max(count, 1), _SAMPLES_OF_A_SHARD)
    if dataset is not None:
        first = [entry.first_sample for entry in _entries(dataset) if entry.num_samples]
        starts = np.array(first or [0], np.int64)
    with progress_bar(settings, "measuring", "steps") as tell:
        explained = _measure(asked, starts, tell)
    if as_json:
        click.echo(dump_json(_document(asked, explained, None if dataset is None else dataset.num_shards)))
    else:
        _print_explained(asked, explained, dataset)


def _entries(dataset: Dataset) -> Iterator[Any]:
    catalog = dataset.catalog
    return chain.from_iterable(catalog.entries(number) for number in range(catalog.num_groups))


def _measure(
    asked: _Asked, shard_starts: NDArray[np.int64], tell: Callable[[int, int], None] | None = None
) -> _Explained:
    order, steps, epoch = asked.order, asked.steps, asked.epoch
    done = iter(range(1, 6))

    def one_more() -> None:
        if tell is not None:
            tell(next(done), 4)

    cost = measure_cost(
        order,
        asked.mean_bytes,
        batch_size=steps.batch_size,
        world_size=steps.world_size,
        shard_starts=shard_starts,
        epoch=epoch,
    )
    one_more()
    nanoseconds = time_order(order, epoch) if order.count >= _FEW else None
    one_more()
    if order.count < 2:
        return _Explained(cost, nanoseconds, (0, 0), 0, None)
    data = Sorted.of(order.count, shard_starts)
    mine = measure_quality(order, data, batch=steps.size, epoch=epoch)
    one_more()
    true = measure_quality(RandomOrder(order.count, asked.seed), data, batch=steps.size, epoch=epoch)
    one_more()
    chance = expect_quality(data, batch=steps.size)
    batches = fit_batches(order.count, steps.size, 400)
    return _Explained(cost, nanoseconds, batches, data.classes, (mine, true, chance))


def time_order(order: Order, epoch: int) -> float:
    """Return the nanoseconds that working out an order takes for a sample, 65,536 positions at a time: the median."""
    positions = range(min(order.count, _TIMED))
    seconds = []
    for turn in range(_ROUNDS):
        start = time.perf_counter()
        order.take(epoch + 1 + turn, positions)  # other epochs, of which nothing is kept
        seconds.append(time.perf_counter() - start)
    return median(seconds) / len(positions) * 1e9


def _document(asked: _Asked, explained: _Explained, num_shards: int | None) -> dict[str, Any]:
    """Return what ``--explain --json`` prints."""
    resolved, cost, mean = asked.resolved, explained.cost, asked.mean_bytes
    is_windowed = resolved.kind == "windowed"
    return {
        "samples": asked.order.count,
        "size": asked.total,
        "mean_bytes": round(mean),
        "num_shards": num_shards,
        "kind": resolved.kind,
        "seed": asked.seed,
        "epoch": asked.epoch,
        "batch_size": asked.steps.batch_size,
        "world_size": asked.steps.world_size,
        "lanes": asked.order.lanes,
        "run": {"samples": resolved.run, "bytes": round(resolved.run * mean)} if is_windowed else None,
        "window": {
            "samples": cost.window_samples,
            "bytes": cost.window_bytes,
            "runs": cost.window_samples // resolved.run if is_windowed else None,
        },
        "rank": {
            "windows": cost.windows,
            "samples": cost.samples,
            "reads": cost.reads,
            "read_bytes": cost.read_bytes,
            "memory_bytes": cost.memory_bytes,
        },
        "order_ns": None if explained.nanoseconds is None else round(explained.nanoseconds, 1),
        "quality": _quality_document(explained),
        "advice": list(iter_advice(asked, explained)),
    }


def _quality_document(explained: _Explained) -> dict[str, Any] | None:
    if explained.quality is None:
        return None
    batch, batches = explained.batches
    measures = [asdict(quality) for quality in explained.quality]
    return {
        "batch": batch,
        "batches": batches,
        "classes": explained.classes,
        **{
            name: dict(zip(("order", "true_shuffle", "chance"), (one[name] for one in measures), strict=True))
            for name, _, _ in _MEASURES
        },
    }


def _print_explained(asked: _Asked, explained: _Explained, dataset: Dataset | None) -> None:
    resolved, cost, mean = asked.resolved, explained.cost, asked.mean_bytes
    is_windowed = resolved.kind == "windowed"
    steps = asked.steps
    words = {"windowed": "shuffled in windows of runs", "random": "each sample anywhere", "sequential": "as they stand"}
    together = "a window" if cost.windows == 1 else f"the {cost.windows:,} windows of a step"
    print_facts(
        [
            ("source", dataset and dataset.name),
            ("samples", f"{asked.order.count:,}, {human_size(round(mean))} each, {human_size(asked.total)} in all"),
            ("order", words[resolved.kind]),
            (
                "run",
                f"{counted(resolved.run, 'sample')}, {human_size(round(resolved.run * mean))}" * is_windowed or None,
            ),
            ("window", _window_text(asked, cost)),
            ("lanes", f"{asked.order.lanes}" if is_windowed else None),
            ("ranks", f"{steps.world_size}, of {counted(steps.batch_size, 'sample')} a batch"),
            (
                "reads",
                f"{counted(cost.reads, 'read')} a rank for {together}, {human_size(cost.read_bytes)} each on average",
            ),
            ("memory", f"{human_size(cost.memory_bytes)} a rank: what is consumed, and what is read meanwhile"),
            ("time", explained.nanoseconds and f"{explained.nanoseconds:.0f} ns a sample to work out the order"),
        ]
    )
    if explained.quality is not None:
        batch, batches = explained.batches
        click.echo()
        rows = [
            (label, *(_shown(getattr(one, name), form) for one in explained.quality)) for name, label, form in _MEASURES
        ]
        columns = [Column(name, is_right=True) for name in ("this order", "a true shuffle", "chance")]
        print_table((Column(f"sorted by label, {batches:,} x {batch:,} samples"), *columns), rows)
    click.echo()
    for line in iter_advice(asked, explained):
        click.echo(line)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _window_text(asked: _Asked, cost: Cost) -> str:
    text = f"{counted(cost.window_samples, 'sample')}, {human_size(cost.window_bytes)}"
    if asked.resolved.kind == "windowed":
        text += f", {counted(cost.window_samples // asked.resolved.run, 'run')}"
    return f"{text}: the whole dataset" if cost.window_samples >= asked.order.count else text


def iter_advice(asked: _Asked, explained: _Explained) -> Iterator[str]:
    """Yield what might be changed, and what that brings; if nothing, that nothing needs to be."""
    kind = asked.resolved.kind
    lines: list[str] = []
    if kind == "sequential":
        lines = ["Nothing is shuffled: sorted shards give sorted batches. For training, use --shuffle."]
    elif kind == "random" and explained.cost.read_bytes < _SMALL_READ:
        size = human_size(explained.cost.read_bytes)
        lines = [f"Each sample is read by itself, {size} at a time; --shuffle reads runs, which is faster."]
    elif kind == "windowed":
        lines = [*_advice_on_mixing(asked, explained), *_advice_on_reading(asked, explained.cost)]
    yield from lines or ["Nothing needs to be changed."]


def _advice_on_mixing(asked: _Asked, explained: _Explained) -> Iterator[str]:
    run, cost, mean = asked.resolved.run, explained.cost, asked.mean_bytes
    if run == 1:
        yield "Samples are as large as runs: each is read by itself, and the order is a true shuffle with any window."
        return
    is_whole = cost.window_samples >= asked.order.count
    if explained.quality is None or is_whole or explained.quality[0].chi_square <= _GOOD:
        return
    others = explained.batches[0] - asked.order.lanes
    window, shorter = needed_window(run, others), needed_run(cost.window_samples, others)
    ways = []
    if cost.window_samples < window <= LARGEST_WINDOW:
        ways.append(f"a --window of {human_size(round(min(window, asked.order.count) * mean))}")
    if shorter < run:
        ways.append(f"a --run of {human_size(round(shorter * mean))}")
    if ways:  # or it is chance
        chi_square = explained.quality[0].chi_square
        yield f"Sorted data gives uneven batches: {chi_square:.2f}. At most {_GOOD} takes {' or '.join(ways)}."


def _advice_on_reading(asked: _Asked, cost: Cost) -> Iterator[str]:
    run, lanes, world_size = asked.resolved.run, asked.order.lanes, asked.steps.world_size
    if cost.memory_bytes > _MUCH_MEMORY:
        yield f"A rank may hold {human_size(cost.memory_bytes)}: a smaller --window takes less memory, and mixes less."
    if run == 1 or cost.window_samples >= asked.order.count:  # there is no more to be had
        return
    if lanes % world_size:
        fitting = -(-lanes // world_size) * world_size
        yield (
            f"{world_size} ranks cannot share {counted(lanes, 'lane')} evenly, so that each run is read in parts by "
            f"several: use --lanes {fitting}."
        )
    elif run < LONGEST_RUN and cost.read_bytes < _SMALL_READ:
        yield f"A read brings {human_size(cost.read_bytes)}, which is little for a remote store: use a larger --run."


def needed_window(run: int, others: int) -> int:
    """Return the samples of a window for which chi-square should be 1.1, by the formula of `loading.quality`.

    Args:
        run: Samples of a run.
        others: By how many positions a batch is larger than there are lanes.
    """
    return round(max(others, 0) * (run - 1) / (_GOOD - 1))


def needed_run(window: int, others: int) -> int:
    """Return the samples of a run for which chi-square should be 1.1, as `needed_window` does for a window."""
    return 1 + int(window * (_GOOD - 1) / max(others, 1))
