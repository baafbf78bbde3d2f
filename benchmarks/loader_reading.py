"""How the exact loader reads: bytes and requests for what it gives, the first batch, and what it waits for later.

The shards are on a real nginx of this machine that holds every request back by 20 ms, and in files that the page cache
has been told to drop.
"""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from corpus import Corpus
from measure import ROUNDS, Result, Side, check, compare, limit
from remote_servers import LATENCY, serve, traffic

from shardset import Dataset, Loader, Shuffle, discover_dataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from servers.nginx import Nginx

_BATCH: Final = 64
_FAR: Final = f"each request held back by {LATENCY * 1000:g} ms"
_SMALL: Final = Shuffle(window_bytes=32 << 20, run_bytes=256 << 10, lanes=8)
_SHUFFLES: Final[dict[str, Any]] = {
    "the default shuffle": True,
    "windows of 32 MiB": _SMALL,
    "no shuffle": False,
}
_STEP: Final = 0.03


def run(root: Path, *, quick: bool) -> list[Result]:
    corpora = {
        "10 KB": Corpus("small", 8, 500 if quick else 2000, 10_000).make(root),
        "100 KB": Corpus("large", 8, 100 if quick else 400, 100_000).make(root),
    }
    results: list[Result] = []
    with serve(root) as servers:
        for size, folder in corpora.items():
            urls = [f"{servers.far.url}{folder.name}/{path.name}" for path in sorted(folder.glob("*.tar"))]
            ds = discover_dataset(urls)
            check(len(ds) == len(discover_dataset(folder)), "samples")
            results += _traffic(servers.far, ds, size)
            results += _times(ds, size)
    results.append(_cold(corpora["100 KB"]))
    return results


def _traffic(server: Nginx, ds: Dataset, size: str) -> Iterator[Result]:
    """Bytes and requests, counted by the server: of one rank, and of eight together."""
    given = _payload_bytes(ds)
    for name, shuffle in _SHUFFLES.items():
        for world_size in (1, 8):
            shares, requests = [], []
            for _ in range(ROUNDS):
                counted = [
                    traffic(server, partial(_count, _rank(ds, shuffle, rank, world_size))) for rank in range(world_size)
                ]
                shares.append(sum(each.sent for each in counted) / given)
                requests.append(float(sum(each.requests for each in counted)))
            ranks = "one rank" if world_size == 1 else f"{world_size} ranks together"
            call = f"Loader(ds, 8, shuffle=..., world_size={world_size}, tail='exact')"
            yield limit(
                f"bytes read for each byte of payload, {size}, {name}, {ranks}",
                shares,
                delivers=f"{len(ds)} samples of jpg, json and cls, whose headers and padding are read with them",
                unit="bytes",
                ours=call,
                below=1.1 if size == "100 KB" else 1.3,
            )
            yield limit(
                f"requests, {size}, {name}, {ranks}",
                requests,
                delivers=f"{len(ds)} samples",
                unit="requests",
                ours=call,
                below=len(ds),
            )


def _rank(ds: Dataset, shuffle: Any, rank: int, world_size: int) -> Loader:
    return Loader(ds, 8, shuffle=shuffle, rank=rank, world_size=world_size, tail="exact")


def _times(ds: Dataset, size: str) -> Iterator[Result]:
    first: list[float] = []
    waits: list[float] = []
    for _ in range(ROUNDS + 1):
        loader = Loader(ds, _BATCH, shuffle=True)
        running = iter(loader)
        started = time.perf_counter()
        next(running)
        first.append(time.perf_counter() - started)
        waits.append(_waits(loader, running))
    yield limit(
        f"the first batch, {size}, far server",
        first[1:],
        delivers=f"{_BATCH} samples from anywhere, shuffled in windows of 1 GiB; {_FAR}",
        unit="s",
        ours=f"next(iter(Loader(ds, {_BATCH}, shuffle=True)))",
        below=0.25,
    )
    yield limit(
        f"share of the time that is waited for storage, {size}, far server",
        waits[1:],
        delivers=f"batches of {_BATCH}, one every {_STEP * 1000:g} ms, from the sixteenth on",
        unit="of the time",
        ours=f"Loader(ds, {_BATCH}, shuffle=True)",
        below=0.05,
    )
    order = [number for batch in Loader(ds, _BATCH, shuffle=_SMALL) for number in batch["__index__"].tolist()]
    yield compare(
        f"shuffled batches, {size}, far server",
        Side(f"for batch in Loader(ds, {_BATCH}, shuffle=Shuffle(window_bytes=32 << 20, ...)): ...",
             lambda: _count(Loader(ds, _BATCH, shuffle=_SMALL))),
        Side("for numbers in batches of the same order: ds.read_samples(numbers)", partial(_read, ds, order)),
        delivers=f"batches of {_BATCH} samples of jpg, json and cls as bytes; {_FAR}",
        unit="samples",
        count=len(order),
        goal=4.0 if size == "10 KB" else 1.0,
    )  # fmt: skip


def _waits(loader: Loader, running: Iterator[Any]) -> float:
    """Take batches at a steady pace, and return the share of the time in which the bytes of one were not there."""
    begun, before = 0.0, 0.0
    for number, _ in enumerate(running, start=1):
        if number == 16:
            begun, before = time.perf_counter(), loader.metrics.waited_for_storage
        time.sleep(_STEP)
    return (loader.metrics.waited_for_storage - before) / (time.perf_counter() - begun)


def _cold(folder: Path) -> Result:
    """The first batch out of files that are not in memory, each time in a new dataset."""
    seconds = []
    for _ in range(ROUNDS + 1):
        ds = discover_dataset(folder)
        len(ds)
        _drop(folder)
        running = iter(Loader(ds, _BATCH, shuffle=True))
        started = time.perf_counter()
        next(running)
        seconds.append(time.perf_counter() - started)
        running.close()
        del ds, running
        gc.collect()
    return limit(
        "the first batch, 100 KB, files that are not in memory",
        seconds[1:],
        delivers=f"{_BATCH} samples from anywhere, shuffled in windows of 1 GiB",
        unit="s",
        ours=f"next(iter(Loader(ds, {_BATCH}, shuffle=True)))",
        below=0.5,
    )


def _drop(folder: Path) -> None:
    """Have the page cache drop the files, none of which is mapped."""
    for path in folder.glob("*.tar"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _payload_bytes(ds: Dataset) -> int:
    catalog = ds.catalog
    return sum(int(catalog.group(number).length.sum()) for number in range(catalog.num_groups))


def _read(ds: Dataset, order: list[int]) -> None:
    for start in range(0, len(order), _BATCH):
        ds.read_samples(order[start : start + _BATCH])


def _count(batches: Iterable[Any]) -> int:
    return sum(1 for _ in batches)
