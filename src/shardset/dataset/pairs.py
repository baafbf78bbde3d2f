"""Two datasets joined by the paths of their samples."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from .opening import discover_dataset

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from .discover import Source

_EXAMPLES: Final = 3


class Side(Protocol):
    """What a dataset needs to be one side of pairs: names, or dicts of ``sample_idx, filename``, shard by shard."""

    @property
    def num_shards(self) -> int:
        """How many shards there are."""

    def list_samples_in_shard(self, shard_index: int, /) -> Sequence[Any]:
        """Return the samples of a shard."""


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """Where a sample is, in webshart's numbering."""

    shard_index: int
    sample_index: int
    filename: str


@dataclass(frozen=True, slots=True)
class SamplePair:
    """Two samples that share a key."""

    key: str
    left: SampleLocation
    right: SampleLocation


class _Samples(NamedTuple):
    """The samples of one side, in order; and the place of each key among them."""

    names: list[str]
    shards: list[int]
    numbers: list[int]
    places: dict[str, int]

    def location(self, place: int) -> SampleLocation:
        return SampleLocation(self.shards[place], self.numbers[place], self.names[place])


class _Join(NamedTuple):
    """Keys that both sides have, in the order of the left one; and those that only one has."""

    left: _Samples
    right: _Samples
    keys: list[str]
    left_only: list[str]
    right_only: list[str]


class PairedDataset:
    """Pairs of samples of two datasets, in the order of the left one. The datasets are looked through when asked.

    Args:
        left: A dataset; or anything that has `num_shards` and `list_samples_in_shard`.
        right: The other one.
        strict: Each sample has to have its counterpart; otherwise only pairs are given.
        pair_key: Makes a key of a sample's path; by default the path without its last suffix.

    Attributes:
        left: As given.
        right: As given.
        strict: As given.
        pair_key: As given.
    """

    def __init__(
        self, left: Side, right: Side, *, strict: bool = True, pair_key: Callable[[str], str] | None = None
    ) -> None:
        self.left = left
        self.right = right
        self.strict = strict
        self.pair_key = pair_key
        self._join: _Join | None = None

    @property
    def num_pairs(self) -> int:
        """How many pairs there are.

        Raises:
            ValueError: Two samples of one side have one key; or, if strict, one has no counterpart.
        """
        return len(self._matched().keys)

    def __len__(self) -> int:
        return self.num_pairs

    def get_pair(self, index: int) -> SamplePair:
        """Return one pair; negative numbers count from the end.

        Raises:
            IndexError: There is no such pair.
            As `num_pairs`.
        """
        join = self._matched()
        number = operator.index(index)
        if not -len(join.keys) <= number < len(join.keys):
            raise IndexError(f"pair index {number} out of range: there are {len(join.keys)} pairs")
        return self._pair(join, join.keys[number])

    def list_pairs(self, start: int = 0, end: int | None = None) -> list[SamplePair]:
        """Return the pairs of a range, as a slice has it.

        Raises:
            As `num_pairs`.
        """
        join = self._matched()
        return [self._pair(join, key) for key in join.keys[start:end]]

    @property
    def unmatched_left(self) -> list[str]:
        """Keys that only the left side has, in its order. Never raises for being strict.

        Raises:
            ValueError: Two samples of one side have one key.
        """
        return list(self._joined().left_only)

    @property
    def unmatched_right(self) -> list[str]:
        """Keys that only the right side has, in its order; as `unmatched_left`."""
        return list(self._joined().right_only)

    @staticmethod
    def _pair(join: _Join, key: str) -> SamplePair:
        left, right = join.left, join.right
        return SamplePair(key, left.location(left.places[key]), right.location(right.places[key]))

    def _joined(self) -> _Join:
        if self._join is None:
            left, right = _samples("left", self.left, self.pair_key), _samples("right", self.right, self.pair_key)
            self._join = _Join(
                left,
                right,
                [key for key in left.places if key in right.places],
                [key for key in left.places if key not in right.places],
                [key for key in right.places if key not in left.places],
            )
        return self._join

    def _matched(self) -> _Join:
        join = self._joined()
        if self.strict and (join.left_only or join.right_only):
            raise ValueError(
                f"the two sides do not match: {_count('left_only', join.left_only)}, "
                f"{_count('right_only', join.right_only)} - pass strict=False to use the pairs that there are"
            )
        return join

    def __repr__(self) -> str:
        return f"PairedDataset({self.left!r}, {self.right!r}, strict={self.strict})"


def _count(name: str, keys: list[str]) -> str:
    examples = ", ".join(map(repr, keys[:_EXAMPLES])) + (", ..." if len(keys) > _EXAMPLES else "")
    return f"{name}={len(keys)} [{examples}]"


def _samples(name: str, side: Side, pair_key: Callable[[str], str] | None) -> _Samples:
    names: list[str] = []
    shards: list[int] = []
    numbers: list[int] = []
    for shard in range(side.num_shards):
        listed = side.list_samples_in_shard(shard)
        if len(listed) and isinstance(listed[0], Mapping):
            names += [sample["filename"] for sample in listed]
            numbers += [sample["sample_idx"] for sample in listed]
        else:
            names += listed
            numbers += range(len(listed))
        shards += [shard] * len(listed)
    keys = list(map(pair_key or key_of_path, names))
    places = dict(zip(keys, range(len(keys)), strict=True))
    if len(places) < len(keys):
        second, key = next((at, key) for at, key in reversed(list(enumerate(keys))) if places[key] != at)
        first = places[key]
        raise ValueError(
            f"duplicate pair key on {name}: {key!r}, of {names[second]!r} in shard {shards[second]} "
            f"and {names[first]!r} in shard {shards[first]}"
        )
    return _Samples(names, shards, numbers, places)


def key_of_path(path: str) -> str:
    """Return a path without the last suffix of its last part: ``d.v1/a.seg.png`` gives ``d.v1/a.seg``."""
    folder, slash, name = path.rpartition("/")
    stem, _, suffix = name.rpartition(".")
    return folder + slash + stem if stem and suffix else path


def discover_paired_dataset(
    left_source: Source,
    right_source: Source | None = None,
    *,
    left_subfolder: str | None = None,
    right_subfolder: str | None = None,
    left_metadata: str | os.PathLike[str] | None = None,
    right_metadata: str | os.PathLike[str] | None = None,
    hf_token: str | None = None,
    strict: bool = True,
    pair_key: Callable[[str], str] | None = None,
) -> PairedDataset:
    """Find two datasets and join them by the paths of their samples.

    Args:
        left_source: As for `discover_dataset`.
        right_source: By default the same, where the subfolders tell the sides apart.
        left_subfolder: Look only below this folder of the left source.
        right_subfolder: And of the right one.
        left_metadata: Folder of the sidecar indexes of the left side.
        right_metadata: And of the right one.
        hf_token: Token for the Hub.
        strict: Each sample has to have its counterpart.
        pair_key: Makes a key of a sample's path; by default the path without its last suffix.

    Raises:
        As `discover_dataset`.
    """
    sides = (left_source, left_subfolder, left_metadata), (right_source or left_source, right_subfolder, right_metadata)
    return PairedDataset(*open_sides(discover_dataset, sides, hf_token), strict=strict, pair_key=pair_key)


def open_sides(discover: Callable[..., Any], sides: Sequence[tuple[Any, ...]], hf_token: str | None) -> list[Any]:
    """Call `discover` for each (source, subfolder, metadata)."""
    return [
        discover(source, hf_token=hf_token, subfolder=subfolder, metadata=metadata)
        for source, subfolder, metadata in sides
    ]
