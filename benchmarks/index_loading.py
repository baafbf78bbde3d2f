"""The indexes of a million files: from JSON, their memory, and from the catalog, beside webshart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus import million
from measure import Result, Side, check, compare, limit, quiet

import shardset

if TYPE_CHECKING:
    from collections.abc import Callable

_MEMORY_ROUNDS = 3


def run(root: Path, *, quick: bool) -> list[Result]:
    import webshart  # noqa: PLC0415 - measure_memory loads one of the two only

    corpus = million(quick=quick)
    folder = str(corpus.make(root))
    len(shardset.discover_dataset(folder))  # makes the catalog, in the user's cache folder

    def ours() -> int:
        return _count(shardset.discover_dataset(folder))

    def catalog() -> int:
        dataset = shardset.discover_dataset(folder)
        dataset.row(len(dataset) - 1)
        return dataset.total_files

    def theirs() -> int:
        with quiet():
            return _count(webshart.discover_dataset(folder))

    for call in (ours, catalog, theirs):
        check(call() == corpus.num_samples, "files")
    what = f"the indexes of {corpus.num_samples:,} files"
    call = "sum(ds.get_shard_file_count(i) for i in range(ds.num_shards))"
    peer = Side(f"discover_dataset(folder), {call}", theirs)
    results: list[Result] = [
        compare(
            f"{what} from JSON",
            Side(peer.name, ours),
            peer,
            delivers="names, offsets, lengths, pixel sizes of every file in memory, checked",
            unit="files",
            count=corpus.num_samples,
            goal=1.5,
        ),
        compare(
            f"{what} from the catalog",
            Side("discover_dataset(folder).total_files, and the last record", catalog),
            peer,
            delivers="the same in mapped columns, every shard's size and time looked at; beside webshart's JSON",
            unit="files",
            count=corpus.num_samples,
            goal=100,
        ),
    ]
    used = [[_measured(module, folder) for _ in range(_MEMORY_ROUNDS)] for module in ("shardset", "webshart")]
    shares = [mine / other for mine, other in zip(*used, strict=True)]
    results.append(
        limit(
            f"{what}, memory once loaded",
            shares,
            delivers="RssAnon; from JSON",
            unit="of webshart's",
            ours=call,
            below=1 / 3,
        )
    )
    return results


def _count(dataset: Any) -> int:
    return sum(dataset.get_shard_file_count(number) for number in range(dataset.num_shards))


def _measured(module: str, folder: str) -> float:
    command = [sys.executable, __file__, module, folder]
    printed = subprocess.run(command, check=True, capture_output=True).stdout
    return float(json.loads(printed.splitlines()[-1]))


def measure_memory(discover: Callable[[str], Any], folder: str) -> float:
    dataset = discover(folder)
    before = _anonymous_bytes()
    _count(dataset)
    return _anonymous_bytes() - before


def _anonymous_bytes() -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


if __name__ == "__main__":
    if sys.argv[1] == "shardset":
        print(measure_memory(shardset.discover_dataset, sys.argv[2]))
    else:
        import webshart

        print(measure_memory(webshart.discover_dataset, sys.argv[2]))
