"""Mixing of samples: the names of ``webdataset.mix``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardset.pipeline.mixing import Progress, RandomMix, RoundRobin, check_probs, drawn, mix, turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["RandomMix", "RoundRobin", "random_samples", "round_robin_longest", "round_robin_shortest"]


def round_robin_shortest(*sources: Iterator[Any]) -> Iterator[Any]:
    """Yield a sample of each iterator in turn, until one has ended."""
    return mix(sources, Progress(len(sources)), turns, longest=False)


def round_robin_longest(*sources: Iterator[Any]) -> Iterator[Any]:
    """Yield a sample of each iterator in turn, until all have ended."""
    return mix(sources, Progress(len(sources)), turns, longest=True)


def random_samples(
    sources: Sequence[Iterator[Any]], probs: Sequence[float] | None = None, longest: bool = False, seed: int = 0
) -> Iterator[Any]:
    """Yield samples of iterators that are drawn with the probabilities given, until one has ended, or all.

    Raises:
        ValueError: `probs` does not fit.
    """
    weights = check_probs([1.0] * len(sources) if probs is None else probs, len(sources))
    return mix(sources, Progress(len(sources)), drawn(seed, weights), longest=longest)
