"""One shard, one idempotent task: run here or over processes. A killed run is simply run again."""

from __future__ import annotations

from .coalescing import CoalesceResult, coalesce_dataset
from .extraction import ExtractResult, extract_indexes
from .indexing import IndexResult, IndexTask, index_dataset, index_shard

__all__ = [
    "CoalesceResult",
    "ExtractResult",
    "IndexResult",
    "IndexTask",
    "coalesce_dataset",
    "extract_indexes",
    "index_dataset",
    "index_shard",
]
