"""The streaming pipeline beside webdataset: raw samples, and the shuffle buffer. Neither has an index."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import webdataset
from corpus import large, small
from measure import ROUNDS, Result, Side, check, compare, limit, once

import shardset

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SHARDS = 2  # webdataset takes seconds for each


def run(root: Path, *, quick: bool) -> list[Result]:
    results: list[Result] = []
    for what, corpus, goal in (
        ("10 KB members, ustar", small(quick=quick), 30.0),
        ("10 KB members, a PAX header before each", small(quick=quick, pax=True), 30.0),
        ("100 KB members", large(quick=quick), 4.0),
    ):
        urls = [str(path) for path in sorted(corpus.make(root).glob("*.tar"))[:_SHARDS]]
        results.append(_raw(what, urls, corpus.samples * len(urls), goal))
    urls = [str(path) for path in sorted(small(quick=quick).make(root).glob("*.tar"))[:_SHARDS]]
    results += [_shuffled(urls, small(quick=quick).samples * len(urls)), _cost_of_shuffling(urls)]
    return results


def ours(urls: list[str]) -> shardset.WebDataset:
    return shardset.WebDataset(urls)


def theirs(urls: list[str]) -> webdataset.WebDataset:
    return webdataset.WebDataset(urls, shardshuffle=False)


def _raw(what: str, urls: list[str], count: int, goal: float) -> Result:
    check(_digest(ours(urls)) == _digest(theirs(urls)), "samples")
    return compare(
        f"raw samples in order, {what}",
        Side("for sample in WebDataset(urls): ...", lambda: _count(ours(urls))),
        Side("for sample in WebDataset(urls, shardshuffle=False): ...", lambda: _count(theirs(urls))),
        delivers="dicts with __key__, __url__, __local_path__, jpg, json, cls as bytes",
        unit="samples",
        count=count,
        goal=goal,
    )


def _shuffled(urls: list[str], count: int) -> Result:
    return compare(
        "raw samples through shuffle(1000), 10 KB members, ustar",
        Side("WebDataset(urls).shuffle(1000)", lambda: _count(ours(urls).shuffle(1000))),
        Side("WebDataset(urls, shardshuffle=False).shuffle(1000)", lambda: _count(theirs(urls).shuffle(1000))),
        delivers="the same dicts in random order",
        unit="samples",
        count=count,
    )


def _cost_of_shuffling(urls: list[str]) -> Result:
    plain, mixed = (
        Side("", lambda make=make: _count(make())) for make in (lambda: ours(urls), lambda: ours(urls).shuffle(1000))
    )
    once(plain)
    return limit(
        "what shuffle(1000) adds to a pass over raw samples of 10 KB members",
        [once(mixed) / once(plain) - 1 for _ in range(ROUNDS)],
        delivers="the pass with the buffer beside the pass without it",
        unit="of the time",
        ours="WebDataset(urls).shuffle(1000)",
        below=0.25,
    )


def _count(samples: Iterable[Any]) -> int:
    count = 0
    for _ in samples:
        count += 1
    return count


def _digest(samples: Iterable[dict[str, Any]]) -> str:
    state = hashlib.sha256()
    for sample in samples:
        for field in sorted(sample):
            value = sample[field]
            state.update(field.encode())
            state.update(value if isinstance(value, bytes) else value.encode())
    return state.hexdigest()
