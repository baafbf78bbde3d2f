"""A catalog of a million samples: opening it, its memory, and what it knows of samples in random order.

No peer has such a thing, so the figures stand against limits. Each round runs in a fresh process, which is this file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from measure import ROUNDS, Result, check, limit

from shardset import open_dataset
from shardset.dataset.catalogs import IndexOptions, write_catalog
from shardset.formats.naming import Names
from shardset.index.catalog_writer import ShardRow, shard_row
from shardset.index.table import GeometryColumns, index_from_files

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARDS: Final = 200
_SAMPLES: Final = 5000
_SUFFIXES: Final = ("jpg", "json", "cls")
_LOOKUPS: Final = 50_000
_BATCH: Final = 64


def run(root: Path, *, quick: bool) -> list[Result]:
    shards = 20 if quick else _SHARDS
    folder = root / f"catalog-{shards}x{_SAMPLES}"
    if not folder.exists():
        print(f"making {folder}", flush=True)
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        write_catalog(part, _rows(shards), options=IndexOptions(captions=True, geometry=True), root=None)
        part.rename(folder)
    _check_records(folder)
    command = [sys.executable, __file__, str(folder)]
    rounds = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(ROUNDS + 1)]
    what = f"a catalog of {shards * _SAMPLES:,} samples"
    everything = "key, shard's url, fields, offsets, lengths, width, height, orientation, caption; pages mapped before"
    opening, looking = "open_dataset(folder).row(i)", "ds.row(i), ds.shard_url(...)"
    cases = (
        ("open_ms", "opened, and the first record read", opening, "one group of shards mapped", 10.0),
        ("open_MB", "anonymous memory of that", opening, "RssAnon, without imports", 10.0),
        ("used_MB", f"anonymous memory after {_LOOKUPS:,} random records", looking, "RssAnon, without imports", 10.0),
        ("one_us", "a random record", looking, everything, 10.0),
        ("many_us", f"a random record, {_BATCH} at a time", "ds.rows(batch), ds.shard_url(...)", everything, 5.0),
    )
    results: list[Result] = []
    for figure, name, ours, delivers, below in cases:
        values, unit = [found[figure] for found in rounds[1:]], figure.partition("_")[2]
        results.append(limit(f"{what}: {name}", values, delivers=delivers, unit=unit, ours=ours, below=below))
    return results


def _rows(shards: int) -> Iterator[ShardRow]:
    chance = np.random.default_rng(0)
    for shard in range(shards):
        keys = range(shard * _SAMPLES, (shard + 1) * _SAMPLES)
        names = Names.of(f"{key:09d}.{suffix}".encode() for key in keys for suffix in _SUFFIXES)
        length = np.empty((_SAMPLES, 3), np.int64)
        length[:] = 0, 130, 3
        length[:, 0] = chance.integers(5_000, 15_000, _SAMPLES)
        length = length.ravel()
        ends = np.cumsum(512 + (length + 511) // 512 * 512)
        offset = ends - (length + 511) // 512 * 512
        geometry = GeometryColumns(*(np.zeros(len(length), kind) for kind in (np.int32, np.int32, np.uint8)))
        geometry.width[::3], geometry.height[::3] = chance.integers(64, 2048, (2, _SAMPLES))
        geometry.orientation[::3] = 1
        captions = {3 * n: f"a photograph of thing number {key}, on a table" for n, key in enumerate(keys)}
        index = index_from_files(names, offset, length, int(ends[-1]) + 1024)
        index = replace(index, geometry=geometry, captions=captions)
        yield shard_row(index, url=f"/data/shard-{shard:05d}.tar", name=f"shard-{shard:05d}", identity="1-1")


def _check_records(folder: Path) -> None:
    """Compare some records with what Arrow reads from the same row, slowly."""
    dataset = open_dataset(folder)
    table = dataset.to_arrow()["samples"]
    chosen = np.random.default_rng(1).integers(0, len(dataset), 100)
    for number, record in zip(chosen.tolist(), dataset.rows(chosen), strict=True):
        row = table.slice(number, 1).to_pylist()[0]
        check(record == dataset.row(number), f"record {number}")
        check((record.key, record.shard_index, record.caption) == (row["key"], row["shard"], row["caption"]), "texts")
        check(record.fields == tuple(row["fields"].split("/")), "fields")
        check(record.offsets == tuple(member["offset"] for member in row["members"]), "offsets")
        check(record.lengths == tuple(member["length"] for member in row["members"]), "lengths")
        check(record.geometry == (row["width"], row["height"], row["orientation"]), "geometry")


def measure_once(folder: str) -> dict[str, float]:
    before = _anonymous_megabytes()
    start = time.perf_counter()
    dataset = open_dataset(folder)
    dataset.row(len(dataset) // 2)
    opened = time.perf_counter() - start
    open_memory = _anonymous_megabytes() - before
    for seed in (2, 3):  # the first time maps the pages that the second time finds mapped
        chosen = np.random.default_rng(seed).integers(0, len(dataset), (_LOOKUPS // _BATCH, _BATCH))
        numbers = chosen.ravel().tolist()
        start = time.perf_counter()
        for number in numbers:
            dataset.shard_url(dataset.row(number).shard_index)
        one = time.perf_counter() - start
        start = time.perf_counter()
        for batch in chosen:
            for record in dataset.rows(batch):
                dataset.shard_url(record.shard_index)
        many = time.perf_counter() - start
    used = _anonymous_megabytes() - before
    return {
        "open_ms": opened * 1e3,
        "open_MB": open_memory,
        "used_MB": used,
        "one_us": one / len(numbers) * 1e6,
        "many_us": many / len(numbers) * 1e6,
    }


def _anonymous_megabytes() -> float:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


if __name__ == "__main__":
    print(json.dumps(measure_once(sys.argv[1])))
