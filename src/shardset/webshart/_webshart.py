"""The names that webshart has in its compiled module."""

from __future__ import annotations

from shardset.dataset.dataset import DiscoveredDataset
from shardset.dataset.files import ShardReader
from shardset.loading.bucket_loader import BucketDataLoader
from shardset.loading.buckets import scale_dimensions
from shardset.loading.cursor import TarDataLoader
from shardset.loading.entry import TarFileEntry

from .batches import BatchOperations
from .discovery import DatasetDiscovery
from .extraction import MetadataExtractor

__all__ = [
    "BatchOperations",
    "BucketDataLoader",
    "DatasetDiscovery",
    "DiscoveredDataset",
    "MetadataExtractor",
    "ShardReader",
    "TarDataLoader",
    "TarFileEntry",
    "__version__",
    "scale_dimensions",
]

__version__ = "0.6.0"
