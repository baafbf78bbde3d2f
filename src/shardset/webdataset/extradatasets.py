"""Small sources for tests and trials, under the names of ``webdataset.extradatasets``."""

from __future__ import annotations

from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from .utils import repeatedly

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MockDataset", "repeatedly", "with_epoch", "with_length"]


class MockDataset:
    """One sample, `length` times."""

    def __init__(self, sample: Any, length: int) -> None:
        self.sample = sample
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.sample, self.length)


class with_length:  # noqa: N801 - webdataset's name
    """An iterable with a length that somebody states."""

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        self.dataset = dataset
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return self.length


class with_epoch:  # noqa: N801 - webdataset's name
    """An iterable cut into epochs of one length: each goes on where the one before ended, and begins again after it."""

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        self.dataset = dataset
        self.length = length
        self._source: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._source is None:
            self._source = repeatedly(self.dataset)
        return islice(self._source, self.length)
