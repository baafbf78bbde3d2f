"""What a loader was asked to do, and what follows from it alone: how batches are made and put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shardset.dataset.columns import known_fields
from shardset.dataset.views import Bucketed, Packed

from .batches import Maker, ViewColumns
from .collation import as_tensors, columns_of, describe, gather_columns, packed
from .metrics import ProgressLine
from .packing import PackFeed
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


_MOST_FIELDS: Final = 256


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
    views: bool = False
    columns: tuple[str, ...] = ()
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

    def shown(self, source: Source, seed: int) -> str:
        """Return what was asked for as the arguments of a call, without what is usual."""
        said = [f"{source!r}", f"batch_size={self.batch_size}"]
        said += [f"shuffle={self.shuffle!r}", f"seed={seed}"] if self.shuffle else []
        if self.world_size is not None:
            said.append(f"rank={self.rank}, world_size={self.world_size}")
        return ", ".join(said)

    def progress_line(self) -> ProgressLine | None:
        """Return what shows how far an epoch is, if that was asked for."""
        return None if self.progress is False else ProgressLine(None if self.progress is True else self.progress)

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
        policy = self._policy_for(feed)
        opened = {
            field
            for name, choices in (self.fields.names or {}).items()
            for field in choices
            if not decoder.reads(name) or not decoder.reads(field)
        }
        readers = [
            PayloadReader(
                view.dataset,
                self.fields,
                leave=lambda field: field in opened or not decoder.reads(field),
                policy=policy,
                report=report,
            )
            for view in feed.views
        ]
        return Maker(
            feed,
            readers,
            getattr(source, "names", None),
            decoder,
            self.decode is not None,
            self.decode is None and not self.views,
            self.maps,
            bool(self.maps) or self.collate is not None,
            workers,
            policy,
            report,
            seed,
            self.tail != "exact",
            tuple(ViewColumns(view, {name: view.column(name) for name in self.columns}) for view in feed.views),
            self._names(feed),
            self.fields.names is not None,
        )

    def _policy_for(self, feed: Feed) -> Policy:
        """Return the policy, whose defaults go by names in the batch and by fields alike."""
        policy = self.policy or feed.views[0].dataset.policy
        defaults = dict(policy.defaults)
        for name, choices in (self.fields.names or {}).items():
            given = next((each for each in (name, *choices) if each in policy.defaults), None)
            if given is not None:
                defaults |= dict.fromkeys((name, *choices), policy.defaults[given])
        return replace(policy, defaults=defaults)

    def _names(self, feed: Feed) -> tuple[str, ...]:
        """Return the names that every batch has.

        Raises:
            ValueError: No field was named, and there are too many to give them all.
        """
        if self.fields.names is not None:
            return tuple(self.fields.names)
        known = sorted(set().union(*(known_fields(view.dataset.catalog) for view in feed.views)))
        if len(known) > _MOST_FIELDS:
            raise ValueError(
                f"samples have {len(known)} different fields ({known[0]!r}, {known[1]!r}, ...): name those that "
                "batches are to have"
            )
        return tuple(known)

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
            columns = gather_columns(maker, making) if self.columns else {}
            batch = {**columns, **values, **describe(maker, making, epoch)}
            if making.ends is not None:
                assert isinstance(source, Packed)  # noqa: S101 - nothing else has packs
                assert isinstance(maker.feed, PackFeed)  # noqa: S101 - of these
                batch = packed(batch, making.ends, source.pack, maker.feed.lengths(batch["__index__"]))
            batch |= stamp
        return as_tensors(batch, pin=self.pin) if self.tensors else batch
