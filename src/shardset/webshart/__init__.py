"""webshart's names: a program that says ``import shardset.webshart as webshart`` goes on as it is.

What calls another name of this namespace looks it up here, when it is called: whoever puts something else in its place
sees that used. Numbers, keys and shapes of results are those of webshart 0.6.0.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardset.dataset.dataset import DiscoveredDataset
from shardset.dataset.pairs import PairedDataset, SampleLocation, SamplePair, open_sides
from shardset.dataset.rewriting import upload_caption_metadata
from shardset.formats.captions import CaptionValue as Caption
from shardset.index.captioning import apply_captions_to_metadata, write_captions_to_metadata
from shardset.loading.bucket_loader import BucketDataLoader
from shardset.loading.cursor import TarDataLoader
from shardset.loading.paired import LoadedSamplePair
from shardset.loading.paired import PairedTarDataLoader as _PairedTarDataLoader

from .batches import BatchOperations, discover_datasets_batch, read_files_batch
from .batches import BatchProcessor as BatchProcessor
from .cache_wait import CacheWaitContext, iter_with_cache_wait, next_with_cache_wait
from .commands import extract_metadata as extract_metadata
from .commands import main as main
from .commands import optimize_captions as optimize_captions
from .commands import run_optimize_dataset as run_optimize_dataset
from .discovery import DatasetDiscovery, is_hub_id
from .extraction import MetadataExtractor
from .optimize import DEFAULT_PAYLOAD_EXTENSIONS as DEFAULT_PAYLOAD_EXTENSIONS
from .optimize import optimize_dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardset.dataset.dataset import Dataset

__all__ = [
    "BatchOperations",
    "BucketDataLoader",
    "CacheWaitContext",
    "DatasetDiscovery",
    "DiscoveredDataset",
    "LoadedSamplePair",
    "MetadataExtractor",
    "PairedDataset",
    "PairedTarDataLoader",
    "SampleLocation",
    "SamplePair",
    "TarDataLoader",
    "__version__",
    "apply_captions_to_metadata",
    "discover_dataset",
    "discover_datasets_batch",
    "discover_paired_dataset",
    "iter_with_cache_wait",
    "next_with_cache_wait",
    "optimize_dataset",
    "read_files_batch",
    "upload_caption_metadata",
    "write_captions_to_metadata",
]

__version__ = "0.6.0"
"""The version of webshart whose names these are."""

CaptionValue = Caption | list[Caption]
OptionalCaptionValue = CaptionValue | None


def discover_dataset(
    source: str | os.PathLike[str],
    hf_token: str | None = None,
    subfolder: str | None = None,
    metadata: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Find a dataset: a folder, or anything else that `shardset.discover_dataset` takes, or else a Hub dataset id.

    Args:
        source: Where the shards are, or ``"owner/name"``.
        hf_token: Token for the Hub; by default that in the environment's ``HF_TOKEN``.
        subfolder: Look only below this folder of `source`.
        metadata: Folder, url or Hub dataset id of the sidecar indexes.

    Raises:
        NotFoundError: There is nothing of that name, or no shard in it.
        StorageError: Looking failed.
    """
    token = hf_token or os.environ.get("HF_TOKEN")
    discovery = DatasetDiscovery(hf_token=token, metadata_source=metadata)
    where = os.fspath(source)
    if is_hub_id(where):
        return discovery.discover_huggingface(where, subfolder=subfolder)
    return discovery.discover_local(where, subfolder=subfolder) if subfolder else discovery.discover_local(where)


def discover_paired_dataset(
    left_source: str | os.PathLike[str],
    right_source: str | os.PathLike[str] | None = None,
    *,
    left_subfolder: str | None = None,
    right_subfolder: str | None = None,
    left_metadata: str | os.PathLike[str] | None = None,
    right_metadata: str | os.PathLike[str] | None = None,
    hf_token: str | None = None,
    strict: bool = True,
    pair_key: Callable[[str], str] | None = None,
) -> PairedDataset:
    """Find two datasets and join them, as `shardset.discover_paired_dataset` does."""
    sides = (left_source, left_subfolder, left_metadata), (right_source or left_source, right_subfolder, right_metadata)
    left, right = open_sides(discover_dataset, sides, hf_token)
    return PairedDataset(left, right, strict=strict, pair_key=pair_key)


class PairedTarDataLoader(_PairedTarDataLoader):
    """`shardset.PairedTarDataLoader`, which makes its loaders of this namespace's `TarDataLoader`."""

    @staticmethod
    def make_loader(side: Any, **loader_kwargs: Any) -> TarDataLoader:
        """Make the loader of one side."""
        return TarDataLoader(side, **loader_kwargs)
