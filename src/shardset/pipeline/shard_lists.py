"""Lists of shards as the first stage of a `DataPipeline`, under webdataset's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardset.errors import NoSamplesError
from shardset.loading.order import mix_key

from .run import Step
from .sources import as_urls, draw_shards, list_shards, order_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .sources import Item, Urls

_MOST_URLS: Final = 1_000_000


class SimpleShardList:
    """The shards that some urls name, in order, or with a seed in another order in each epoch.

    Args:
        urls: As `shardset.WebDataset` takes them.
        seed: Decides about the order; True takes the pipeline's; None keeps the order given.

    Attributes:
        urls: The urls, braces expanded.
        seed: As given.
    """

    name = "list_shards"

    def __init__(self, urls: Urls, seed: int | bool | None = None) -> None:
        self.urls = as_urls(urls)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.urls)

    def start(self, source: object, step: Step) -> Iterator[Item]:  # noqa: ARG002 - a first stage has none
        """Give the shards of one epoch."""
        items = list_shards((), self.urls, step=step)
        if self.seed is None or self.seed is False:
            return items
        return order_shards(items, None if self.seed is True else self.seed, step=step)

    def __iter__(self) -> Iterator[Item]:
        return self.start((), Step())


class ResampledShards:
    """Shards drawn with replacement, without end or `nshards` times; see `shardset.pipeline.sources.draw_shards`.

    What is drawn follows from the seed, the epoch, the rank and the worker, with `deterministic` and without.

    Args:
        urls: As `shardset.WebDataset` takes them.
        nshards: How many to draw in an epoch; None for no end.
        seed: Decides, together with that of the pipeline.
        worker_seed: Gives a number that decides in place of rank and worker.
        deterministic: Taken, because webdataset takes it; orders always repeat.
        max_urls: Refuse longer lists.
        empty_check: Refuse an empty list.

    Raises:
        NoSamplesError: The list is empty.
        ValueError: It is too long.
    """

    name = "draw_shards"

    def __init__(  # noqa: PLR0917 - the order of webdataset's arguments
        self,
        urls: Urls,
        nshards: int | None = None,
        seed: int = 0,
        worker_seed: Callable[[], int] | None = None,
        deterministic: bool = False,
        max_urls: int = _MOST_URLS,
        empty_check: bool = True,
    ) -> None:
        try:
            self.urls = as_urls(urls)
        except ValueError as error:
            if empty_check:
                raise NoSamplesError(str(error)) from None
            self.urls = []
        if len(self.urls) > max_urls:
            raise ValueError(f"{len(self.urls)} urls are more than max_urls={max_urls}")
        self.nshards = nshards
        self.seed = seed
        self.worker_seed = worker_seed
        self.deterministic = deterministic
        self.epoch = -1

    def start(self, source: object, step: Step) -> Iterator[Item]:  # noqa: ARG002 - a first stage has none
        """Draw the shards of one epoch."""
        self.epoch = step.run.epoch[0]
        numbers = [step.run.seed, self.seed]
        if self.worker_seed is not None:
            numbers.append(self.worker_seed())
        items = list_shards((), self.urls, step=step) if self.urls else ()
        if not self.urls:
            return iter(())
        return draw_shards(items, self.nshards, mix_key(*numbers), own=self.worker_seed is None, step=step)

    def __iter__(self) -> Iterator[Item]:
        step = Step()
        step.run.epoch = (self.epoch + 1,)
        return self.start((), step)


def non_empty(source: Any) -> Iterator[Any]:
    """Pass everything on.

    Raises:
        NoSamplesError: There was nothing.
    """
    is_empty = True
    for item in source:
        is_empty = False
        yield item
    if is_empty:
        raise NoSamplesError("there is nothing where something was expected: the pipeline's source is empty")
