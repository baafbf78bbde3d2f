"""What a loader was asked to do, and what follows from it alone: how batches are made and put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardset.dataset.views import Bucketed, Packed

from .batches import Maker
from .collation import as_tensors, columns_of, describe, packed
from .payloads import PayloadReader
from .ranks import find_share
from .steps import Steps
from .workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from shardset.decoding.batches import BatchDecoder
    from shardset.decoding.options import Decode
    from shardset.policy import Policy, Report

    from .batches import Making, Map
    from .feed import Feed
    from .feeds import Shuffling, Source
    from .fields import Fields
    from .read_ahead import ReadAhead
    from .steps import Tail


@dataclass(frozen=True, slots=True)
class Options:
    """What a loader was asked to do; `Loader` says what each is."""

    batch_size: int
    shuffle: Shuffling
    rank: int | None
    world_size: int | None
    tail: Tail
    fields: Fields
    decode: Decode | None
    policy: Policy | None
    read_ahead: ReadAhead
    maps: tuple[Map, ...] = ()
    processes: int = 0
    collate: Callable[[list[dict[str, Any]]], Any] | None = None
    tensors: bool = False
    pin: bool = False
    progress: TextIO | bool = False

    def steps(self) -> Steps:
        """Return how positions are shared; ranks that were not given are looked for."""
        rank, world_size = self.rank, self.world_size
        if rank is None or world_size is None:
            share = find_share()
            rank, world_size = share.rank, share.world_size
        return Steps(self.batch_size, rank, world_size, self.tail)

    def decode_of(self, source: Source) -> Decode | None:
        """Return how fields are decoded: images of buckets as these say.

        Raises:
            ValueError: Images are not to be turned, and buckets are made of the sizes in which they are shown.
        """
        if self.decode is None or not isinstance(source, Bucketed):
            return self.decode
        if not self.decode.orient:
            raise ValueError("buckets are made of the sizes in which images are shown: orient=False does not fit them")
        return replace(self.decode, crop=source.buckets.crop)

    def workers(self, source: Source) -> Workers | None:
        """Start the processes that samples are mapped in, if there are to be any."""
        return Workers(self.processes, self.decode_of(source), self.maps) if self.processes else None

    def maker(
        self, source: Source, feed: Feed, decoder: BatchDecoder, workers: Workers | None, *, report: Report, seed: int
    ) -> Maker:
        """Return what makes the batches of a pass."""
        policy = self.policy or feed.views[0].dataset.policy
        readers = [
            PayloadReader(
                view.dataset, self.fields, leave=lambda field: not decoder.reads(field), policy=policy, report=report
            )
            for view in feed.views
        ]
        return Maker(
            feed,
            readers,
            getattr(source, "names", None),
            decoder,
            self.decode is not None,
            self.maps,
            bool(self.maps) or self.collate is not None,
            workers,
            policy,
            report,
            seed,
            self.tail != "exact",
        )

    def complete(self, source: Source, maker: Maker, making: Making, epoch: int) -> Any:
        """Put a batch together, when its tasks are done.

        Raises:
            As `Making.finish`.
        """
        stamp = {"__epoch__": epoch, "__position__": making.share.step.stop}
        values = making.finish()
        if self.collate is not None:
            batch = self.collate(making.samples)
            if not isinstance(batch, dict):
                return batch
            batch = {**stamp, **batch}
        else:
            values = columns_of(making.samples) if maker.as_samples else values
            batch = {**values, **describe(maker, making)}
            if making.ends is not None:
                assert isinstance(source, Packed)  # noqa: S101 - nothing else has packs
                batch = packed(batch, making.ends, source.pack.size)
            batch |= stamp
        return as_tensors(batch, pin=self.pin) if self.tensors else batch
