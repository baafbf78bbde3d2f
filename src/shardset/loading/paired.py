"""Pairs of samples, loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .cursor import TarDataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardset.dataset.pairs import PairedDataset

    from .entry import TarFileEntry


@dataclass(frozen=True, slots=True)
class LoadedSamplePair:
    """Two samples that share a key; None in place of one that is larger than the loader's limit, or was skipped."""

    key: str
    left: TarFileEntry | None
    right: TarFileEntry | None


class PairedTarDataLoader:
    """Loads the pairs of a `PairedDataset`.

    Args:
        dataset: The pairs.
        loader_kwargs: Passed to the `TarDataLoader` of each side.

    Attributes:
        dataset: As given.
        left_loader: Of the left side.
        right_loader: Of the right side.
    """

    def __init__(self, dataset: PairedDataset, **loader_kwargs: Any) -> None:
        self.dataset = dataset
        self.left_loader = self.make_loader(dataset.left, **loader_kwargs)
        self.right_loader = self.make_loader(dataset.right, **loader_kwargs)

    @staticmethod
    def make_loader(side: Any, **loader_kwargs: Any) -> TarDataLoader:
        """Make the loader of one side."""
        return TarDataLoader(side, **loader_kwargs)

    def __len__(self) -> int:
        return len(self.dataset)

    def load_pair(self, index: int) -> LoadedSamplePair:
        """Load one pair; negative numbers count from the end.

        Raises:
            IndexError: There is no such pair.
            ValueError: As `PairedDataset.num_pairs`.
            StorageError: Reading failed.
        """
        pair = self.dataset.get_pair(index)
        left, right = pair.left, pair.right
        return LoadedSamplePair(
            pair.key,
            self.left_loader.load_sample(left.shard_index, left.sample_index),
            self.right_loader.load_sample(right.shard_index, right.sample_index),
        )

    def iter_pairs(self, start: int = 0, end: int | None = None) -> Iterator[LoadedSamplePair]:
        """Give the pairs of a range, as a slice has it, in order.

        Raises:
            As `load_pair`.
        """
        return map(self.load_pair, range(*slice(start, end).indices(len(self))))
