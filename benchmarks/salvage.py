"""What `check` needs for files of many kinds of damage: the goal is 300 MB a second, whatever is in them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import numpy as np
from measure import ROUNDS, Result, Side, check, limit, once

from shardset.doctor import check as check_shards
from shardset.formats.tfrecord import frame_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SEED: Final = 20_260_102
_MOST: Final = 300_000_000


def run(root: Path, *, quick: bool) -> list[Result]:
    size = 30_000_000 if quick else 200_000_000
    results: list[Result] = []
    for name, (make, expected) in KINDS.items():
        path = root / f"salvage-{name.replace(' ', '-').replace(',', '')}-{size}.tfrecord"
        if not path.exists():
            part = path.with_suffix(".unfinished")
            part.write_bytes(make(random.Random(_SEED), size))  # noqa: S311 - noise, not a secret
            part.rename(path)
        report = check_shards(path)
        [shard] = report.shards
        check(shard.counts.keys() >= expected, f"{name}: {shard.counts}")
        side = Side("shardset.doctor.check(path)", lambda path=path: check_shards(path))
        seconds = [once(side) for _ in range(ROUNDS + 1)][1:]
        size_now = path.stat().st_size
        results.append(
            limit(
                f"salvage: {name}",
                [value * _MOST / size_now for value in seconds],
                delivers=f"{shard.records:,} good records found; of {size_now:,} bytes {shard.lost_bytes:,} hold none",
                unit="seconds for 300 MB",
                ours=side.name,
                below=1.0,
            )
        )
    return results


def _records(rng: random.Random, size: int, length: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        payload = rng.randbytes(rng.randint(length // 2, length + length // 2))
        head, foot = frame_record(payload)
        data += head + payload + foot
    return data


def _whole(rng: random.Random, size: int) -> bytearray:
    return _records(rng, size, 10_000)


def _noise(rng: random.Random, size: int) -> bytearray:
    """One record, and then nothing that is one."""
    return _records(rng, 1, 10_000) + rng.randbytes(size)


def _hole(rng: random.Random, size: int) -> bytearray:
    data = _records(rng, size, 10_000)
    data[size // 10 : size // 10 * 9] = bytes(size // 10 * 8)
    return data


def _flips(rng: random.Random, size: int) -> bytearray:
    data = _records(rng, size, 10_000)
    for _ in range(size // 50_000):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _overwritten(rng: random.Random, size: int) -> bytearray:
    data = _records(rng, size, 10_000)
    for _ in range(size // 200_000):
        at = rng.randrange(len(data) - 5000)
        data[at : at + 5000] = rng.randbytes(5000)
    return data


def _numbers(rng: random.Random, size: int) -> bytearray:
    """Arrays of small integers: each of their places could be the length of a record."""
    data = bytearray()
    while len(data) < size:
        payload = np.array([rng.randrange(1000) for _ in range(1250)], "<i8").tobytes()
        head, foot = frame_record(payload)
        data += (head + payload + foot) * 20
    for at in range(len(data) - 200_000, 0, -200_000):
        del data[at : at + 3]
    return data


KINDS: Final[dict[str, tuple[Callable[[random.Random, int], bytearray], set[str]]]] = {
    "whole, records of 10 KB": (_whole, set()),
    "noise behind one record": (_noise, {"R108"}),
    "a hole of zeros, four fifths of the file": (_hole, {"R109", "R112"}),
    "a flipped bit every 50 KB": (_flips, {"R104"}),
    "5000 bytes written over every 200 KB": (_overwritten, {"R104", "R105", "R112"}),
    "integers, 3 bytes missing every 200 KB": (_numbers, {"R105", "R112"}),
}
