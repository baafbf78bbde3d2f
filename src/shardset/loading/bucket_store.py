"""Bucket orders kept on disk, so that the next start need not work them out again.

They lie in the user's cache folder, with the catalog that is made there, one Arrow file for each kind and shape; its
metadata says what it was made of. An order of anything else is made anew and takes its place. docs/formats.md has the
file.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
import pyarrow as pa

from shardset.errors import IndexFileError
from shardset.files import open_atomic
from shardset.index.catalog_files import map_batch
from shardset.storage.store import UNKNOWN
from shardset.storage.threads import map_in_threads

from .bucket_order import FileOrder, SampleOrder, order_files, order_samples

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset

    from .buckets import Shape
    from .fetch import Fetcher

logger = logging.getLogger(__name__)

VERSION: Final = 1
_FILES: Final = pa.schema([("shard", pa.int32()), ("file", pa.int32()), ("length", pa.int64())])
_SAMPLES: Final = pa.schema([("sample", pa.int64())])


def dataset_buckets(dataset: Dataset, shape: Shape, *, upright: bool = False) -> SampleOrder:
    """Sort all samples of a dataset into buckets; from the user's cache folder, if that was done before.

    Args:
        dataset: Its catalog is made, if there is none.
        shape: Which shapes are one.
        upright: Take the sizes that images are shown with, not those that are stored.

    Raises:
        As `Dataset.catalog` and `Shape.check`.
    """
    shape.check()
    made_of = "\n".join(group.samples for group in dataset.catalog.manifest.groups)
    place = _Place(dataset.cache_folder(), _digest("samples", *map(str, shape), str(upright)), _digest(made_of))
    kept = place.load(_SAMPLES)
    if kept is not None:
        (samples,), keys, starts = kept
        return SampleOrder(keys, starts, samples)
    order = order_samples(dataset, shape, upright=upright)
    place.save(_SAMPLES, [order.samples], order.keys, order.starts)
    return order


def dataset_file_order(fetcher: Fetcher, shape: Shape) -> FileOrder:
    """Sort all files of a dataset into buckets, in webshart's numbering; from the cache folder, if that was done.

    Raises:
        As `Dataset.files` and `Shape.check`.
    """
    shape.check()
    dataset = fetcher.dataset
    numbers = range(dataset.num_shards)
    versions = _versions(dataset)
    place = None
    if versions is not None:
        name = _digest("files", *map(str, shape), str(fetcher.max_file_size))
        place = _Place(dataset.cache_folder(), name, _digest(*versions))
        kept = place.load(_FILES)
        if kept is not None:
            (shard, file, length), keys, starts = kept
            return FileOrder(keys, starts, shard, file, length)
    dataset.load_files(numbers)
    order = order_files(numbers, fetcher.files, shape, fetcher.max_file_size)
    if place is not None:
        place.save(_FILES, [order.shard, order.file, order.length], order.keys, order.starts)
    return order


def _versions(dataset: Dataset) -> list[str] | None:
    """Say which version each shard and each sidecar index is of; None if that cannot be told of one."""
    told = []
    numbers = range(dataset.num_shards)
    sidecars = (map_in_threads if dataset.is_remote else map)(dataset.sidecar_info, numbers)
    for number, sidecar in zip(numbers, sidecars, strict=True):
        shard = dataset.info(number).info
        if UNKNOWN in {shard.identity, sidecar and sidecar.identity}:
            return None
        told.append(f"{shard.url}\t{shard.size}\t{shard.identity}\t{sidecar and (sidecar.size, sidecar.identity)}")
    return told


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an order is kept: `made_of` is what the one that fits was made of."""

    folder: Path
    name: str
    made_of: str

    @property
    def path(self) -> Path:
        return self.folder / f"buckets-{self.name}.arrow"

    def load(self, schema: pa.Schema) -> tuple[list[NDArray[Any]], list[str], NDArray[np.int64]] | None:
        """Return columns, keys and starts of the order that lies there, if it is the right one."""
        if not self.path.exists():
            return None
        try:
            batch = map_batch(self.path, schema)
            told = orjson.loads((batch.schema.metadata or {}).get(b"shardset", b"{}"))
            if told.get("version") != VERSION or told.get("made_of") != self.made_of:
                return None
            keys, starts = told["keys"], np.array(told["starts"], np.int64)
            columns = [batch.column(name).to_numpy() for name in schema.names]
        except (IndexFileError, ValueError, TypeError, KeyError) as error:
            logger.warning("an order of buckets is not used: %s", error)
            return None
        is_whole = len(starts) == len(keys) + 1 and starts[0] == 0 and starts[-1] == batch.num_rows
        return (columns, keys, starts) if is_whole and bool((np.diff(starts) > 0).all()) else None

    def save(
        self, schema: pa.Schema, columns: Iterable[NDArray[Any]], keys: list[str], starts: NDArray[np.int64]
    ) -> None:
        """Write an order. A cache that cannot be written costs the next start its time, and nothing else."""
        told = {"version": VERSION, "made_of": self.made_of, "keys": keys, "starts": starts.tolist()}
        arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema.with_metadata({"shardset": orjson.dumps(told)}))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_atomic(self.path) as file, pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
        except OSError as error:
            logger.warning("an order of buckets is not kept in %s: %s", self.folder, error)
