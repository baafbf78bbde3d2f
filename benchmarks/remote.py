"""Shards on a web server: scattered samples, samples in order, indexing, opening again, the shard cache, memory.

The server is a real nginx with one worker on this machine, near, or held back by 20 ms a request. Client and server
share its processors. Requests and bytes are counted in the server's log.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

import webdataset
from corpus import Corpus
from measure import ROUNDS, Result, Side, check, compare, limit, once
from remote_servers import LATENCY, Servers, Shard, ideal, round_trip, serve, traffic

from shardset import Dataset, discover_dataset
from shardset.storage.http import HttpStore
from shardset.storage.planner import ReadLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from servers.nginx import Nginx

_SCATTERED: Final = 64
_FAR: Final = f"each request held back by {LATENCY * 1000:g} ms"
_MEBI: Final = 1 << 20
_TIMES: Final = 3


def run(root: Path, *, quick: bool) -> list[Result]:
    one = Corpus("large", 1, 1000 if quick else 10_000, 100_000).make(root)
    many = Corpus("large", 16, 60 if quick else 600, 100_000).make(root)
    ordered = Corpus("large", 2 if quick else 4, 1000, 100_000).make(root)
    with _catalogs_in(root / "remote-cache"), serve(root) as servers:
        results = []
        for name, folder in (("one shard of 1 GB", one), ("16 shards", many)):
            results += _scattered(name, servers.far, root, folder)
        results += _in_order(servers, root, ordered)
        results += _indexing(servers, root, quick=quick)
        results += _opening(servers, root, ordered)
        results += _cached(servers, root, ordered)
        results += _memory(servers, root, quick=quick)
    return results


def _scattered(name: str, server: Nginx, root: Path, folder: Path) -> list[Result]:
    """64 samples from anywhere, and as 32 pairs of neighbours."""
    urls = _urls(server, root, folder)
    ds = discover_dataset(urls)
    chance = random.Random(1)  # noqa: S311 - an order, not a secret
    # No two so near that they are read together: what is merged is measured by itself, with the pairs.
    places = sorted(chance.sample(range(len(ds) // 8), _SCATTERED))
    alone = [8 * place for place in places]
    chance.shuffle(alone)
    pairs = [number for place in alone[: _SCATTERED // 2] for number in (place, place + 1)]
    local = discover_dataset(folder)
    results: list[Result] = []
    for what, numbers, most in (("scattered", alone, _SCATTERED), ("in pairs", pairs, _SCATTERED // 2)):
        read, expected = partial(ds.read_field, numbers, "jpg"), local.read_field(numbers, "jpg", copy=True)
        check(list(map(bytes, read())) == expected, f"{name}, {what}")
        call, delivers = 'ds.read_field(numbers, "jpg")', f"views of 64 jpg of 100 KB; {_FAR}"
        counts = [float(traffic(server, read).requests) for _ in range(ROUNDS)]
        results.append(
            limit(
                f"64 samples {what}, {name}: requests",
                counts,
                delivers=delivers,
                unit="requests",
                ours=call,
                below=most + 1,
            )
        )
        for at_once in (64, 32):  # the default, and half of it
            some = discover_dataset(urls, store=HttpStore(limits=ReadLimits(at_once=at_once)))
            shares = []
            for _ in range(ROUNDS + 1):
                trip = round_trip(urls[0])
                seconds = once(Side(call, partial(some.read_field, numbers, "jpg")))
                shares.append(seconds / ideal(int(max(counts)), at_once, trip))
            results.append(
                limit(
                    f"64 samples {what}, {name}: time, {at_once} connections",
                    shares[1:],
                    delivers=f"{delivers}; the unit is requests over {at_once} connections, rounded up, "
                    "times the measured round trip of one small read",
                    unit="of the ideal",
                    ours=call,
                    below=1.3,
                )
            )
        results.append(
            compare(
                f"64 samples {what}, {name}",
                Side(call, read),
                _fsspec_side(ds, numbers, expected),
                delivers=f"{delivers}; fsspec's are bytes, and it is told the ranges",
                unit="samples",
                count=_SCATTERED,
                goal=4.0,
            )
        )
    return results


def _fsspec_side(ds: Dataset, numbers: list[int], expected: list[bytes]) -> Side:
    """Return the same ranges by fsspec, whose connections stay open from call to call."""
    from fsspec.implementations.http import HTTPFileSystem

    system = HTTPFileSystem(skip_instance_cache=True)
    urls, starts, ends = [], [], []
    for number in numbers:
        place = ds[number].byte_range("jpg")
        urls.append(ds[number].shard)
        starts.append(place.offset)
        ends.append(place.end)
    check(system.cat_ranges(urls, starts, ends) == expected, "fsspec")
    return Side("HTTPFileSystem().cat_ranges(urls, starts, ends)", lambda: system.cat_ranges(urls, starts, ends))


def _in_order(servers: Servers, root: Path, folder: Path) -> list[Result]:
    """All samples of some shards, beside curl, which throws the bytes away, and webdataset over curl."""
    size = sum(path.stat().st_size for path in folder.glob("*.tar"))
    results: list[Result] = []
    for where, server in (("near server", servers.near), ("far server", servers.far)):
        urls = _urls(server, root, folder)
        ds = discover_dataset(urls)
        count = len(ds)
        curl = Side("curl -s -o /dev/null URL...", lambda urls=urls: _curl(urls, Path(os.devnull)))
        piped = [f"pipe:curl -s -L {url}" for url in urls]
        if server is servers.far:
            check(_digest(ds.iter_dicts()) == _digest(webdataset.WebDataset(piped, shardshuffle=False)), "samples")
        for what, copy in (("bytes", True), ("views", False)):
            results.append(
                compare(
                    f"samples in order as {what}, {where}",
                    Side(
                        f"for sample in ds.iter_dicts({copy=}): ...",
                        lambda c=copy, ds=ds: _count(ds.iter_dicts(copy=c)),
                    ),
                    curl,
                    delivers=f"{count} dicts of jpg (100 KB), json, cls as {what}; curl: nothing",
                    unit="MB",
                    count=size // 1_000_000,
                    goal=0.9,
                )
            )
        if server is servers.far:
            results.append(
                compare(
                    f"samples in order as bytes, {where}, beside webdataset",
                    Side("for sample in ds.iter_dicts(): ...", lambda ds=ds: _count(ds.iter_dicts())),
                    Side(
                        'for sample in WebDataset("pipe:curl -s -L URL"...): ...',
                        lambda piped=piped: _count(webdataset.WebDataset(piped, shardshuffle=False)),
                    ),
                    delivers=f"{count} dicts of jpg (100 KB), json, cls as bytes; ours from an index",
                    unit="samples",
                    count=count,
                    goal=2.0,
                )
            )
    return results


def _indexing(servers: Servers, root: Path, *, quick: bool) -> list[Result]:
    """Finding the members of a shard, beside reading all of it as a stream."""
    scale = 4 if quick else 1
    trio = {"jpg": 100_000, "json": 120, "cls": 3}
    both, none = (("near server", servers.near), ("far server", servers.far)), ()
    # Which shard, the most per cent of it that may be read, and from which servers it is timed.
    shards = (
        (Shard("jpg-ustar", 1500 // scale, {"jpg": 100_000}), "jpg of 100 KB, ustar", 3.0, both),
        (Shard("jpg-pax", 1500 // scale, {"jpg": 100_000}, pax=True), "jpg of 100 KB, PAX", 3.0, none),
        (Shard("trio-ustar", 1500 // scale, trio), "jpg of 100 KB, json, cls, ustar", 3.0, none),
        (Shard("trio-pax", 1500 // scale, trio, pax=True), "jpg of 100 KB, json, cls, PAX", 3.0, both),
        (Shard("small-ustar", 40_000 // scale, {"txt": 1000}), "txt of 1 KB, ustar", 105.0, both),
    )
    results: list[Result] = []
    for shard, name, most, timed in shards:
        path = shard.make(root / "remote-shards")
        call, delivers = "len(discover_dataset(url))", f"an index of one shard of {path.stat().st_size / 1e6:.0f} MB"
        counts = [traffic(servers.near, partial(_index, _url(servers.near, root, path), root)) for _ in range(_TIMES)]
        shares = [100 * count.sent / path.stat().st_size for count in counts]
        requests = sorted(count.requests for count in counts)[_TIMES // 2]
        check(_index(_url(servers.near, root, path), root) == shard.samples, name)
        results.append(
            limit(
                f"indexing a shard, {name}: bytes read",
                shares,
                delivers=f"{delivers}; {requests} requests",
                unit="% of the shard",
                ours=call,
                below=most,
            )
        )
        for where, server in timed:
            url = _url(server, root, path)
            results.append(
                compare(
                    f"indexing a shard, {name}, {where}",
                    Side(call, partial(_index, url, root)),
                    Side("tarfile.open(fileobj=urlopen(url), mode='r|')", partial(_stream_names, url)),
                    delivers=f"{delivers}; tarfile: names alone",
                    unit="members",
                    count=shard.samples * len(shard.members),
                )
            )
    return results


def _opening(servers: Servers, root: Path, folder: Path) -> list[Result]:
    """Opening a dataset whose catalog is in the cache: it is looked up, and nothing of it is read."""
    source = f"{servers.far.url}{folder.relative_to(root).as_posix()}/"
    shards = len(list(folder.glob("*.tar")))

    def again() -> int:
        return len(discover_dataset(source))

    def anew() -> int:
        return _index(source, root)

    check(anew() == again(), "opening again")
    call, delivers = (
        "len(discover_dataset(url))",
        f"a dataset of {shards} shards, found by the server's listing; {_FAR}",
    )
    counts = [float(traffic(servers.far, again).requests) for _ in range(ROUNDS)]
    return [
        limit(
            "opening again: requests",
            counts,
            delivers=f"{delivers}; one for the folder and one for each shard",
            unit="requests",
            ours=call,
            below=shards + 2,
        ),
        compare(
            "opening again",
            Side(call, again),
            Side(f"{call}, for the first time", anew),
            delivers=delivers,
            unit="shards",
            count=shards,
        ),
    ]


def _cached(servers: Servers, root: Path, folder: Path) -> list[Result]:
    """The epoch that fills the shard cache, and the one that reads from it."""
    size = sum(path.stat().st_size for path in folder.glob("*.tar")) // 1_000_000
    urls = _urls(servers.near, root, folder)
    place, elsewhere = root / "shard-cache", root / "curl-files"
    remote, local = discover_dataset(urls), discover_dataset(folder)
    expected = _digest(local.iter_dicts())

    def fill() -> int:
        ds = discover_dataset(urls)
        ds.enable_shard_cache(place)
        return _count(ds.iter_dicts())

    def forget() -> None:
        shutil.rmtree(place, ignore_errors=True)
        os.sync()  # what the call before left to be written is not this one's to wait for

    def clear_files() -> None:
        shutil.rmtree(elsewhere, ignore_errors=True)
        elsewhere.mkdir()
        os.sync()

    first = Side("ds.enable_shard_cache(folder); for sample in ds.iter_dicts(): ...", fill, forget)
    plain = Side("for sample in ds.iter_dicts(): ...", lambda: _count(remote.iter_dicts()))
    files = Side("curl -s -o FILE URL...", lambda: _curl(urls, elsewhere), clear_files)
    delivers = "dicts of jpg (100 KB), json, cls as bytes; near server"
    results: list[Result] = [
        compare("first epoch through the shard cache", first, plain, delivers=delivers, unit="MB", count=size),
        compare(
            "first epoch through the shard cache, beside curl",
            first,
            files,
            delivers=f"{delivers}; curl: files",
            unit="MB",
            count=size,
        ),
    ]
    cached = discover_dataset(urls)
    cached.enable_shard_cache(place)
    check(_digest(cached.iter_dicts()) == expected, "shard cache")
    for what, copy in (("bytes", True), ("views", False)):
        results.append(
            compare(
                f"second epoch through the shard cache, as {what}",
                Side(f"for sample in ds.iter_dicts({copy=}): ...", lambda c=copy: _count(cached.iter_dicts(copy=c))),
                Side("the same over the local shards", lambda c=copy: _count(local.iter_dicts(copy=c))),
                delivers=f"dicts of jpg (100 KB), json, cls as {what}",
                unit="samples",
                count=len(local),
                goal=0.9,
            )
        )
    shutil.rmtree(place)
    shutil.rmtree(elsewhere)
    return results


def _memory(servers: Servers, root: Path, *, quick: bool) -> list[Result]:
    """The most memory of a process that goes through a remote shard of 2 GB, which is mostly a hole."""
    path = root / "remote-shards" / "hole.tar"
    length = 20 * _MEBI - 512
    samples = (200 if quick else 2000) * _MEBI // (20 * _MEBI)
    with path.open("wb") as file:
        for number in range(samples):
            member = tarfile.TarInfo(f"{number:09d}.bin")
            member.size = length
            file.write(member.tobuf(tarfile.USTAR_FORMAT))
            file.seek(length, os.SEEK_CUR)
        file.write(bytes(1024))
    url = _url(servers.near, root, path)
    results: list[Result] = []
    for what, copy in (("bytes", True), ("views", False)):
        values = []
        for _ in range(_TIMES):
            done = subprocess.run(
                [sys.executable, "-c", _ITERATE, url, str(int(copy))], check=True, capture_output=True, text=True
            )
            count, total, kilobytes = json.loads(done.stdout)
            check((count, total) == (samples, samples * length), "samples of the sparse shard")
            values.append(kilobytes / 1024)
        results.append(
            limit(
                f"peak memory of a process going through a shard of {path.stat().st_size / 1e9:.1f} GB, as {what}",
                values,
                delivers=f"samples of 20 MB as {what}, one after the other",
                unit="MiB",
                ours=f"for sample in ds.iter_dicts({copy=}): ...",
                below=512,
            )
        )
    path.unlink()
    return results


_ITERATE: Final = """
import json, sys
from pathlib import Path
from shardset import discover_dataset
count = total = 0
for sample in discover_dataset(sys.argv[1]).iter_dicts(copy=sys.argv[2] == "1"):
    count, total = count + 1, total + len(sample["bin"])
# Not what getrusage tells, in which the memory of the process that started this one is counted too.
kilobytes = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(json.dumps([count, total, kilobytes]))
"""


@contextmanager
def _catalogs_in(folder: Path) -> Iterator[None]:
    """Let catalogs go to a folder that is empty at first."""
    shutil.rmtree(folder, ignore_errors=True)
    before = os.environ.get("SHARDSET_CACHE")
    os.environ["SHARDSET_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SHARDSET_CACHE"]
        else:
            os.environ["SHARDSET_CACHE"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _url(server: Nginx, root: Path, path: Path) -> str:
    return server.url + path.relative_to(root).as_posix()


def _urls(server: Nginx, root: Path, folder: Path) -> list[str]:
    return [_url(server, root, path) for path in sorted(folder.glob("*.tar"))]


def _index(source: str, root: Path) -> int:
    """Index a source as for the first time."""
    shutil.rmtree(root / "remote-cache", ignore_errors=True)
    return len(discover_dataset(source))


def _stream_names(url: str) -> int:
    with urlopen(url) as answer, tarfile.open(fileobj=answer, mode="r|") as shard:  # noqa: S310 - our own server
        return sum(1 for _ in shard)


def _curl(urls: list[str], target: Path) -> None:
    """Download urls one after the other over one connection."""
    command = ["curl", "-s", "-f"]
    for at, url in enumerate(urls):
        command += ["-o", str(target / f"{at}.tar" if target.is_dir() else target), url]
    subprocess.run(command, check=True)


def _count(samples: Iterable[Any]) -> int:
    count = 0
    for _ in samples:
        count += 1
    return count


def _digest(samples: Iterable[dict[str, Any]]) -> str:
    state = hashlib.sha256()
    for sample in samples:
        state.update(sample["__key__"].encode())
        for field in ("jpg", "json", "cls"):
            state.update(sample[field])
    return state.hexdigest()
