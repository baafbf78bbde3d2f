"""States of the cursor: webshart's version 4, and what it loses under keys of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardset.dataset.dataset import Dataset

STATE_VERSION: Final = 4
_SETTINGS: Final = {"load_file_data": bool, "max_file_size": int, "buffer_size": int, "chunk_size_mb": int}


@dataclass(frozen=True, slots=True)
class CursorState:
    """Where a cursor stands, and how its loader reads.

    Attributes:
        shard: The shard; as many as there are at the end.
        file: The next file in it.
        settings: What was said of ``load_file_data, max_file_size, buffer_size, chunk_size_mb, batch_size``.
        ranges: What the cursor goes through, as global file numbers; None for everything.
        range_index: In which of them it stands.
    """

    shard: int
    file: int
    settings: dict[str, Any]
    ranges: list[tuple[int, int]] | None
    range_index: int


def place_of(dataset: Dataset) -> dict[str, Any]:
    """Return the part of a state that says which dataset it is of, without credentials."""
    origin = dataset.origin
    return {
        "source": origin.source,
        "subfolder": origin.subfolder,
        "metadata_source": dataset.metadata_source,
        "num_shards": dataset.num_shards,
        "shard_names": dataset.names_digest,
        "is_remote": dataset.is_remote,
        "hf_token": None,  # webshart's key; a token is never kept
    }


def check_dataset(state: Mapping[str, Any], dataset: Dataset) -> None:
    """Check that a state may be of a dataset, wherever that lies now.

    Raises:
        StateError: It has another number of shards, or shards of other names.
    """
    known = state.get("num_shards", dataset.num_shards)
    if known != dataset.num_shards:
        raise StateError(
            f"the state is of a dataset with {known} shards, {dataset.name} has {dataset.num_shards}",
            hint="load it into the dataset that it was saved of",
        )
    if state.get("shard_names", dataset.names_digest) != dataset.names_digest:
        raise StateError(
            f"the shards of {dataset.name} have other names than those of the state, or stand in another order",
            hint="load it into the dataset that it was saved of",
        )


def parse_state(state: Mapping[str, Any], dataset: Dataset) -> CursorState:
    """Read a state of version 4, ours or webshart's. What it does not say is left as it is, but the place is the start.

    Raises:
        StateError: It has another version, does not fit the dataset, or has a value of the wrong kind.
    """
    version = state.get("version", STATE_VERSION)
    if version != STATE_VERSION:
        raise StateError(f"Unsupported state dict version: {version}", hint=f"this shardset reads {STATE_VERSION}")
    check_dataset(state, dataset)
    shard = _whole(state, "current_shard", dataset.num_shards)
    file = _whole(state, "current_file_index")
    if file and (count := dataset.get_shard_file_count(shard) if shard < dataset.num_shards else 0) < file:
        raise StateError(f"the state stands at file {file} of shard {shard}, which has {count}")
    settings: dict[str, Any] = {}
    for name, kind in _SETTINGS.items():
        if name in state:
            if type(state[name]) is not kind:
                raise StateError(f"the state's {name} is {state[name]!r}")
            settings[name] = state[name]
    if "batch_size" in state:
        size = state["batch_size"]
        if size is not None and (type(size) is not int or size < 1):
            raise StateError(f"the state's batch_size is {size!r}")
        settings["batch_size"] = size
    return CursorState(shard, file, settings, _ranges(state.get("ranges")), _whole(state, "range_index"))


def _whole(state: Mapping[str, Any], name: str, most: int | None = None) -> int:
    value = state.get(name, 0)
    if type(value) is not int or value < 0:
        raise StateError(f"the state's {name} is {value!r}")
    if most is not None and value > most:
        raise StateError(f"the state's {name} is {value}, there are {most}")
    return value


def _ranges(value: Any) -> list[tuple[int, int]] | None:
    if value is None:
        return None
    try:
        return check_ranges(value)
    except (TypeError, ValueError) as error:
        raise StateError(f"the state's ranges are {value!r}") from error


def check_ranges(ranges: Any) -> list[tuple[int, int]]:
    """Return ranges of numbers of files as they should be.

    Raises:
        TypeError: They are no pairs of whole numbers.
        ValueError: One begins below zero, or does not begin before its end.
    """
    checked = []
    for start, end in ranges:
        start, end = range(start, end).start, range(start, end).stop  # noqa: PLW2901 - whole numbers of any type
        if not 0 <= start < end:
            raise ValueError(f"Invalid range: start {start} must be less than end {end}, and not negative")
        checked.append((start, end))
    return checked
