"""Going through all payloads in order, beside webshart's `TarDataLoader` and webdataset's `WebDataset`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import webdataset
import webshart
from corpus import small
from measure import Result, Side, check, compare, webshart_index

from shardset import Dataset, TarDataLoader, discover_dataset, index_dataset

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_DICT_SHARDS = 2  # webdataset takes seconds for each


def run(root: Path, *, quick: bool) -> list[Result]:
    corpus = small(quick=quick)
    source = corpus.make(root)
    index_dataset(source, sidecars=False)
    dataset = discover_dataset(source)
    results = _beside_webshart(dataset, webshart_index(source), 3 * corpus.num_samples)
    for name, folder, samples in (
        ("ustar", source, corpus.samples),
        ("PAX header before every member", small(quick=quick, pax=True).make(root), corpus.samples),
    ):
        index_dataset(folder, sidecars=False)
        results.append(_beside_webdataset(name, sorted(folder.glob("*.tar"))[:_DICT_SHARDS], samples))
    return results


def _beside_webshart(dataset: Dataset, peers: webshart.DiscoveredDataset, count: int) -> list[Result]:
    theirs = webshart.TarDataLoader(peers)
    peer = Side("for entry in TarDataLoader(dataset): entry.data", lambda: _drain(theirs), theirs.reset)
    results = []
    for what, copy, goal in (("views", False, 5.0), ("bytes", True, 3.0)):
        mine = TarDataLoader(dataset, copy=copy)
        check(_digest_entries(mine) == _digest_entries(theirs), "entries")
        results.append(
            compare(
                f"payloads in order as {what}",
                Side(f"for entry in TarDataLoader(dataset, {copy=}): entry.data", lambda m=mine: _drain(m), mine.reset),
                peer,
                delivers=f"every file with its sidecars, in path order, as entries; data of ours as {what}",
                unit="files",
                count=count,
                goal=goal,
            )
        )
    return results


def _beside_webdataset(name: str, shards: list[Path], samples: int) -> Result:
    urls = [str(shard) for shard in shards]
    mine = discover_dataset(urls)
    len(mine)  # indexed

    def peer() -> Iterable[dict[str, Any]]:
        return webdataset.WebDataset(urls, shardshuffle=False)

    check(_digest_dicts(mine.iter_dicts()) == _digest_dicts(peer()), "samples")
    return compare(
        f"samples in order as dicts of bytes, {name}",
        Side("for sample in dataset.iter_dicts(): ...", lambda: _count(mine.iter_dicts())),
        Side("for sample in WebDataset(urls, shardshuffle=False): ...", lambda: _count(peer())),
        delivers="__key__, jpg, json, cls as bytes; ours from an index, webdataset's without one, with __url__",
        unit="samples",
        count=samples * len(shards),
        goal=30.0,
    )


def _drain(entries: Iterable[Any]) -> int:
    return sum(len(entry.data) for entry in entries)


def _count(samples: Iterable[Any]) -> int:
    count = 0
    for _ in samples:
        count += 1
    return count


def _digest_entries(entries: Any) -> str:
    entries.reset()
    state = hashlib.sha256()
    for entry in entries:
        state.update(f"{entry.path} {entry.offset} {entry.size}\n".encode())
        state.update(entry.data)
    return state.hexdigest()


def _digest_dicts(samples: Iterable[dict[str, Any]]) -> str:
    state = hashlib.sha256()
    for sample in samples:
        state.update(sample["__key__"].encode())
        for field in ("jpg", "json", "cls"):
            state.update(sample[field])
    return state.hexdigest()
