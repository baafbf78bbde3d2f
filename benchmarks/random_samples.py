"""Samples in random order, one at a time and 64 at a time, beside webshart's `load_sample` when it is warm."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import webshart
from corpus import Corpus, small
from measure import Result, Side, check, compare, webshart_index

from shardset import Dataset, TarDataLoader, discover_dataset, index_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_COUNT: Final = 16_384
_BATCH: Final = 64

Pairs = list[tuple[int, int]]


def run(root: Path, *, quick: bool) -> list[Result]:
    corpus = small(quick=quick)
    source = corpus.make(root)
    index_dataset(source, sidecars=False)
    ds = discover_dataset(source)
    theirs = webshart.TarDataLoader(webshart_index(source))
    chance = random.Random(0)  # noqa: S311 - an order, not a secret
    numbers = [chance.randrange(corpus.num_samples) for _ in range(_COUNT)]
    # In webshart's numbering whatever is no sidecar counts: for each of our samples the cls, and then the jpg.
    pairs = [(number // corpus.samples, number % corpus.samples * 2 + 1) for number in numbers]
    viewing, copying = TarDataLoader(ds, copy=False), TarDataLoader(ds)
    _warm_up(theirs, corpus)
    batches = [np.array(numbers[at : at + _BATCH]) for at in range(0, _COUNT, _BATCH)]
    pair_batches = [pairs[at : at + _BATCH] for at in range(0, _COUNT, _BATCH)]

    def one_by_one(loader: Any) -> Callable[[], int]:
        return lambda: _sum(loader.load_sample(shard, sample).data for shard, sample in pairs)

    def batch_views() -> int:
        return sum(_sum(ds.read_field(batch, "jpg")) for batch in batches)

    def batch_dicts() -> int:
        return sum(_sum(sample["jpg"] for sample in ds.read_samples(batch, ["jpg"])) for batch in batches)

    def batch_entries() -> int:
        return sum(_sum(entry.data for entry in viewing.load_samples(batch)) for batch in pair_batches)

    theirs_call = "loader.load_sample(shard, sample).data"
    peer = Side(theirs_call, one_by_one(theirs))
    cases = (
        ("one at a time as bytes", 'ds[i]["jpg"]', lambda: _sum(ds[i]["jpg"] for i in numbers), 2.5),
        ("one at a time as views", 'ds[i].view("jpg")', lambda: _sum(ds[i].view("jpg") for i in numbers), 4.0),
        ("one at a time as entries with bytes", theirs_call, one_by_one(copying), 2.5),
        ("one at a time as entries with views", theirs_call, one_by_one(viewing), 4.0),
        ("64 at a time as views", 'ds.read_field(batch, "jpg")', batch_views, 12.0),
        ("64 at a time as dicts with views", 'ds.read_samples(batch, ["jpg"])', batch_dicts, None),
        ("64 at a time as entries with views", "loader.load_samples(batch)", batch_entries, None),
    )
    _check_same(ds, viewing, theirs, numbers[:500], pairs[:500])
    expected = peer.call()
    results = []
    for what, call, function, goal in cases:
        check(function() == expected, what)
        results.append(
            compare(
                f"random samples, {what}",
                Side(call, function),
                peer,
                delivers="the jpg of each sample; webshart's are bytes, always, and it reads the json sidecar too",
                unit="samples",
                count=_COUNT,
                goal=goal,
            )
        )
    return results


def _sum(payloads: Iterable[bytes | memoryview]) -> int:
    return sum(map(len, payloads))


def _warm_up(loader: webshart.TarDataLoader, corpus: Corpus) -> None:
    """Load every sample once: webshart's first loads are many times slower than those that follow."""
    for shard in range(corpus.shards):
        for sample in range(1, 2 * corpus.samples, 2):
            loader.load_sample(shard, sample)


def _check_same(
    ds: Dataset, mine: TarDataLoader, theirs: webshart.TarDataLoader, numbers: list[int], pairs: Pairs
) -> None:
    peers = [theirs.load_sample(shard, sample) for shard, sample in pairs]
    for entries in (mine.load_samples(pairs), [mine.load_sample(*pair) for pair in pairs]):
        for ours, peer in zip(entries, peers, strict=True):
            check((ours.path, ours.offset, ours.size) == (peer.path, peer.offset, peer.size), f"entry {peer.path}")
            check(_digest(ours.data) == _digest(peer.data), f"payload of {peer.path}")
            check(ours.json_data == peer.json_data, f"sidecar of {peer.path}")
    for number, fields, peer in zip(numbers, ds.read_samples(numbers, ["jpg"]), peers, strict=True):
        sample = ds[number]
        check(sample.names[0] == peer.path and sample.byte_range("jpg").offset == peer.offset, f"sample {number}")
        check(sample["jpg"] == sample.view("jpg") == fields["jpg"] == peer.data, f"payload of sample {number}")


def _digest(payload: bytes | memoryview) -> bytes:
    return hashlib.sha256(payload).digest()
