"""webshart's module of the conversion into shards. `_require_hub` is looked up here when it is needed."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from shardset.writing import optimize as _optimize
from shardset.writing.optimize import DEFAULT_PAYLOAD_EXTENSIONS
from shardset.writing.optimize_state import SCHEMA_VERSION as STATE_SCHEMA_VERSION
from shardset.writing.optimize_state import STATE_NAME as STATE_FILENAME
from shardset.writing.optimize_state import OptimizeState as OptimizationState
from shardset.writing.optimize_target import require_hub as _require_hub

if TYPE_CHECKING:
    import os

__all__ = [
    "DEFAULT_PAYLOAD_EXTENSIONS",
    "STATE_FILENAME",
    "STATE_SCHEMA_VERSION",
    "OptimizationState",
    "optimize_dataset",
]


@wraps(_optimize.optimize_dataset)
def optimize_dataset(source: str | os.PathLike[str], **settings: Any) -> dict[str, Any]:
    """Convert as `shardset.optimize_dataset` does, with the classes that this module's `_require_hub` gives."""
    return _optimize.optimize_dataset(source, require=lambda: _require_hub(), **settings)  # noqa: PLW0108 - late
