"""Aspect buckets of a million samples, beside webshart's: as columns, as its own dicts, and kept from before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from corpus import million
from measure import ROUNDS, Result, Side, check, compare, limit, quiet

import shardset
from shardset.loading.bucket_order import order_samples
from shardset.loading.bucket_store import dataset_buckets
from shardset.loading.buckets import Shape

if TYPE_CHECKING:
    from pathlib import Path

_CASES: tuple[tuple[str, dict[str, Any], Shape], ...] = (
    ("by aspect", {"key": "aspect"}, Shape("aspect")),
    (
        "by scaled size",
        {"key": "geometry-tuple", "target_pixel_area": 1024**2},
        Shape("geometry-tuple", 1024**2),
    ),
)


def run(root: Path, *, quick: bool) -> list[Result]:
    import webshart  # noqa: PLC0415 - as the other topics

    corpus = million(quick=quick)
    folder = str(corpus.make(root))
    dataset = shardset.discover_dataset(folder)
    check(len(dataset) == corpus.num_samples, "samples")  # which makes the catalog, in the user's cache folder
    mine = shardset.TarDataLoader(dataset)
    with quiet():
        theirs = webshart.TarDataLoader(webshart.discover_dataset(folder))
    shards = list(range(corpus.shards))
    results: list[Result] = []
    for name, settings, shape in _CASES:
        asked = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        call = f"loader.list_shard_sample_aspect_buckets(shards, {asked})"
        peer = Side(call, lambda settings=settings: theirs.list_shard_sample_aspect_buckets(shards, **settings))
        ours = Side(call, lambda settings=settings: mine.list_shard_sample_aspect_buckets(shards, **settings))
        columns = Side(f"order_samples(dataset, {shape})", lambda shape=shape: order_samples(dataset, shape))
        expected = peer.call()
        check(ours.call() == expected, name)
        _check_columns(columns.call(), expected, corpus.samples)
        del expected
        what = f"buckets of {corpus.num_samples:,} samples {name}"
        for side, delivers, goal in (
            (columns, "keys, and the numbers of the samples of each, in order; beside webshart's dicts", 20.0),
            (ours, "webshart's own dicts, an entry a sample; both with the indexes in memory", 5.0),
        ):
            result = compare(what, side, peer, delivers=delivers, unit="samples", count=corpus.num_samples, goal=goal)
            results.append(result)
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        dataset_buckets(shardset.discover_dataset(folder), _CASES[0][2])
        seconds.append((time.perf_counter() - start) * 1e3)
    results.append(
        limit(
            f"buckets of {corpus.num_samples:,} samples, in a new process",
            seconds[1:],
            delivers="dataset found, catalog checked, order mapped",
            unit="ms",
            ours="dataset_buckets(discover_dataset(folder), Shape('aspect'))",
            below=100.0,
        )
    )
    return results


def _check_columns(order: Any, expected: list[dict[str, Any]], samples: int) -> None:
    """Compare the columns with the dicts: of one shard after the other, in each bucket."""
    found: dict[str, list[int]] = {}
    for shard in expected:
        for key, entries in shard["buckets"].items():
            numbers = [shard["shard_idx"] * samples + entry["sample_idx"] for entry in entries]
            found.setdefault(key, []).extend(numbers)
    check(order.keys == sorted(found), "keys")
    pairs = zip(order.keys, np.split(order.samples, order.starts[1:-1]), strict=True)
    check(all(numbers.tolist() == found[key] for key, numbers in pairs), "samples")
