"""Records of a TFRecord shard of a million, in random order: raw and parsed, beside a map and a list of offsets.

No peer checks what it reads at random, and most have no random access at all; so the figures stand against limits, and
beside the least that any reader in Python does: a slice of a memory map at an offset that is known.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
from typing import TYPE_CHECKING, Final

import numpy as np
from measure import ROUNDS, Result, Side, check, compare, limit, once

from shardset import TFRecordWriter, discover_dataset, encode_example

if TYPE_CHECKING:
    from pathlib import Path

    from shardset import Dataset

_BATCH: Final = 64
_BATCHES: Final = 2000
_SEED: Final = 20_260_102


def run(root: Path, *, quick: bool) -> list[Result]:
    count = 100_000 if quick else 1_000_000
    path = root / f"record-access-{count}.tfrecord"
    if not path.exists():
        rng = random.Random(_SEED)  # noqa: S311 - payloads of noise
        with TFRecordWriter(path) as writer:
            for number in range(count):
                writer.write(encode_example({"label": [number], "feature": [rng.randbytes(rng.randint(20, 120))]}))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDSET_CACHE"] = folder
        dataset = discover_dataset(path)
        check(len(dataset) == count, "the number of records")
        return _measure(dataset, path, count)


def _measure(dataset: Dataset, path: Path, count: int) -> list[Result]:
    batches = np.random.default_rng(_SEED).integers(0, count, (_BATCHES, _BATCH))
    asked = batches.size
    places = dataset.rows(np.arange(count))
    starts, ends = [row.offsets[0] for row in places], [row.offsets[0] + row.lengths[0] for row in places]
    del places
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        listed = batches.tolist()

        def slices() -> int:
            return sum(len([mapped[starts[i] : ends[i]] for i in batch]) for batch in listed)

        def read(**how: bool) -> int:
            return sum(len(dataset.read_records(batch, **how)) for batch in batches)

        check(dataset.read_records(batches[0]) == [mapped[starts[i] : ends[i]] for i in listed[0]], "payloads")
        verified = Side("ds.read_records(batch)", read)
        seconds = [once(verified) for _ in range(ROUNDS + 1)][1:]
        what = f"random records of a shard of {count:,}, {_BATCH} at a time"
        return [
            limit(
                what,
                [each / asked * 1e6 for each in seconds],
                delivers="payloads of some 90 B as bytes, checksums compared; warm page cache",
                unit="us a record",
                ours=verified.name,
                below=1e6 / 300_000,
            ),
            compare(
                f"{what}, beside slices of a map",
                Side("ds.read_records(batch, copy=False, verify=False)", lambda: read(copy=False, verify=False)),
                Side("[mapped[start:end] ...], offsets in lists", slices),
                delivers="ours views of a dataset of any number of shards; theirs bytes of one; nothing compared",
                unit="records",
                count=asked,
            ),
            compare(
                f"{what}, parsed",
                Side("ds.read_samples(batch, ['label'])", lambda: _parse(dataset, batches)),
                Side("ds.read_records(batch)", read),
                delivers="ours a dict of one feature each, theirs payloads alone; checksums compared on both sides",
                unit="records",
                count=asked,
            ),
        ]


def _parse(dataset: Dataset, batches: np.ndarray) -> int:
    return sum(len(dataset.read_samples(batch, ["label"])) for batch in batches)
