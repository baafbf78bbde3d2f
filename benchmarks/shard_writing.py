"""Writing shards beside webdataset's `ShardWriter`: samples of three payloads that are bytes already.

Ours writes the sidecar index of each shard too, and flushes every shard to the disk before it gets its name; theirs
does neither, so each size is measured beside the same files flushed as well.
"""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import webdataset
from measure import Result, Side, check, compare

from shardset.writing.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FIELDS: Final = ("jpg", "png", "cls")
_DIFFERENT: Final = 64
_SHARD: Final = 256 << 20


def run(root: Path, *, quick: bool) -> list[Result]:
    part = 10 if quick else 1
    return [
        result
        for length, count in ((10_000, 20_000 // part), (100_000, 4000 // part))
        for result in _beside(root, length, count)
    ]


def _beside(root: Path, length: int, count: int) -> Iterator[Result]:
    chance = random.Random(length)  # noqa: S311 - payloads of noise
    payloads = [chance.randbytes(length) for _ in range(_DIFFERENT)]
    places = {name: root / f"written-{name}" for name in ("ours", "theirs")}
    ours = Side(
        "ShardWriter(pattern, maxsize=...), write, close",
        lambda: _write(ShardWriter, places["ours"], payloads, count),
        lambda: _clear(places["ours"]),
    )

    def flushed() -> None:
        _write(webdataset.ShardWriter, places["theirs"], payloads, count)
        for path in places["theirs"].iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    try:
        for how, delivers, call in (
            (
                "as each does it",
                "ours whole shards on the disk with an index beside each; theirs shards alone, not flushed",
                lambda: _write(webdataset.ShardWriter, places["theirs"], payloads, count),
            ),
            (
                "both on the disk",
                "ours whole shards on the disk with an index beside each; theirs shards alone, flushed at the end",
                flushed,
            ),
        ):
            yield compare(
                f"samples of {len(FIELDS)} members of {length // 1000} KB, {how}",
                ours,
                Side(
                    "webdataset.ShardWriter(pattern, maxsize=...), write, close", call, lambda: _clear(places["theirs"])
                ),
                delivers=delivers,
                unit="samples",
                count=count,
                goal=3.0,
            )
        check(_members(places["ours"]) == _members(places["theirs"]) != [], "members of the shards")
    finally:
        for place in places.values():
            shutil.rmtree(place, ignore_errors=True)


def _write(writer: Callable[..., Any], folder: Path, payloads: list[bytes], count: int) -> None:
    with closing(writer(f"{folder}/shard-%05d.tar", maxsize=_SHARD, verbose=0)) as sink:
        for number in range(count):
            fields = {field: payloads[(number + at) % _DIFFERENT] for at, field in enumerate(FIELDS)}
            sink.write({"__key__": f"{number:09d}", **fields})


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _members(folder: Path) -> list[tuple[str, int]]:
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [(member.name, member.size) for member in tar]
    return found
