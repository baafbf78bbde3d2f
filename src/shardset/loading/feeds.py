"""The feed of whatever a loader is given: a dataset, some of its samples, buckets, packs, a mixture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardset.dataset.dataset import Dataset
from shardset.dataset.select import Selection
from shardset.dataset.views import Bucketed, Packed
from shardset.errors import StateError

from .bucketing import BucketFeed
from .feed import Feed, SampleFeed
from .mixing import MixFeed, Mixture, source_seed
from .order import Resolved, Shuffle, order_of, resolve
from .packing import PackFeed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .loader_state import LoaderState

Source: TypeAlias = Dataset | Selection | Bucketed | Packed | Mixture
"""What a loader loads."""
Shuffling: TypeAlias = bool | Literal["full"] | Shuffle
"""How it shuffles."""


@dataclass(frozen=True, slots=True)
class Made:
    """A feed, and what it was made with.

    Attributes:
        feed: What comes when.
        resolved: For each view, how it is shuffled, in samples.
        shards: For each view, how many shards of its dataset it is of; fewer than there are where some were appended.
    """

    feed: Feed
    resolved: tuple[Resolved, ...]
    shards: tuple[int, ...]


def views_of(source: Source) -> tuple[Selection, ...]:
    """Return the samples that a source is made of.

    Raises:
        TypeError: It is none that a loader can load.
    """
    match source:
        case Selection():
            return (source,)
        case Dataset():
            return (Selection(source),)
        case Bucketed() | Packed():
            return (source.view,)
        case Mixture():
            return source.views
    raise TypeError(
        f"a loader loads a Dataset, ds.select(...), ds.bucketed(...), ds.packed(...) or mix(...), not {source!r}"
    )


def make_feed(
    source: Source, shuffle: Shuffling, seed: int, step: int, state: LoaderState | None, *, unit: int | None = None
) -> Made:
    """Make the feed of a source.

    Args:
        source: What is loaded.
        shuffle: How, unless the state says it.
        seed: What the order follows from.
        step: Positions of a global step.
        state: The state that the loader goes on from, in the epoch that it is of: it decides sizes of windows, and how
            many shards there are.
        unit: Samples of a bucket in a row, where buckets leave that open; by default a step.

    Raises:
        StateError: The state does not fit.
        ValueError: A global batch does not divide the unit of buckets.
        As `Dataset.catalog`.
    """
    views = views_of(source)
    if state is not None:
        views = tuple(_first(view, samples) for view, samples in zip(views, state.samples, strict=True))
        resolved = state.resolved
    else:
        resolved = tuple(_resolve(view, shuffle) for view in views)
    shards = state.shards if state is not None else tuple(view.dataset.num_shards for view in views)
    if state is not None and isinstance(source, Mixture) and views != source.views:
        raise StateError(
            "shards were appended to a dataset of a mixture, whose sources go on from epoch to epoch",
            hint="begin a new run, or load the datasets without the shards that were appended",
        )
    feed = _make(source, views, resolved, seed, unit or step)
    if state is not None:
        feed.load_state(state.feed)
    if feed.unit and feed.unit % step:
        raise ValueError(
            f"a step takes {step} samples, which is no divisor of the {feed.unit} that come of one bucket in a row - "
            "set Buckets(unit=...) to a multiple of every batch_size * world_size that is to be used"
        )
    return Made(feed, resolved, shards)


def _make(source: Source, views: Sequence[Selection], resolved: Sequence[Resolved], seed: int, unit: int) -> Feed:
    if isinstance(source, Mixture):
        feeds = []
        for name, view, how in zip(source.names, views, resolved, strict=True):
            own = source_seed(seed, name)
            feeds.append(SampleFeed(view, order_of(how, len(view), own), own))
        return MixFeed(replace(source, views=tuple(views)), feeds, seed)
    view, how = views[0], resolved[0]
    if isinstance(source, Bucketed):
        return BucketFeed(view, source.buckets, how, seed, unit)
    if isinstance(source, Packed):
        return PackFeed(view, source.pack, how, seed)
    return SampleFeed(view, order_of(how, len(view), seed), seed)


def _resolve(view: Selection, shuffle: Shuffling) -> Resolved:
    # What a sample has in bytes matters to windows alone.
    is_windowed = shuffle is True or isinstance(shuffle, Shuffle)
    return resolve(shuffle, len(view), view.total_bytes if is_windowed else 0)


def _first(view: Selection, samples: int) -> Selection:
    """Return the samples of a view among the first so many of its dataset."""
    if samples >= len(view.dataset):
        return view
    return view.among_first(samples)
