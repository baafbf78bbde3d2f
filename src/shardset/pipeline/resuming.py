"""Which pipelines can go on from a state by themselves: those whose every stage knows what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

_READS: Final = frozenset({"read_samples"})
_SHARDS: Final = frozenset(
    {
        "list_shards",
        "order_shards",
        "draw_shards",
        "share_shards",
        "split_by_node",
        "split_by_worker",
        "single_node_only",
    }
)
"""Stages before the reading one: gone through again from the beginning, which reads nothing."""
_SAMPLES: Final = frozenset(
    {
        "shuffle",
        "select",
        "rsample",
        "slice",
        "map",
        "map_dict",
        "map_tuple",
        "to_tuple",
        "rename",
        "rename_keys",
        "extract_keys",
        "decode",
        "xdecode",
        "batched",
        "listed",
        "log_keys",
        "associate",
        "info",
    }
)
"""Stages that give at most one sample for each, or that tell the origins of the samples that they hold."""


def can_go_on(stages: Iterable[Any]) -> bool:
    """Tell whether a state of these stages says all that is needed to go on, or the epoch must be replayed."""
    found = list(stages)
    names = [stage.name if _is_ours(stage) else None for stage in found]
    if "read_samples" not in names:
        return False
    at = names.index("read_samples")
    has_source = all(name in _SHARDS for name in names[:at])
    rest = names[at + 1 :]
    # Behind a batch an origin stands for several samples, so nothing may be held there.
    holders = {"shuffle", "batched", "listed", "decode"}
    first_batch = next((place for place, name in enumerate(rest) if name in {"batched", "listed"}), len(rest))
    return has_source and all(name in _SAMPLES for name in rest) and not holders & set(rest[first_batch + 1 :])


def _is_ours(stage: Any) -> bool:
    if isinstance(stage, Stage):
        return stage.function.__module__.startswith("shardset.pipeline.")
    return hasattr(stage, "start") and type(stage).__module__.startswith("shardset.pipeline.")
