"""`convert`: the shards of a dataset in the other format, tar as TFRecord and TFRecord as tar, with nothing lost.

A sample of a tar becomes one Example (`sample_records` says how), and comes back as the members that it was made of.
A record becomes the members that `member_names` describes, in tars that say so in ``__shardset__/features.json``, and
comes back with its names, kinds and values. What the other format has no place for is counted in the report: files of
a tar that belong to no sample. Owners, modes and times of members, folders and links are not samples and are left out.

Each shard is made under a hidden name, flushed, and renamed once it is whole, so that whatever ends a conversion, no
half shard has a name. The same shards give the same bytes, with the same versions of this package and of zlib.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardset.dataset.discover import find_shards
from shardset.errors import without_secrets
from shardset.formats.patterns import named_format
from shardset.index.build import build_index
from shardset.index.records import scan_plain, shard_format
from shardset.policy import Policy, Report
from shardset.storage.anywhere import AnyStore

from .convert_plan import make_plan
from .convert_samples import MARKER, RecordsToTar, TarToRecords, iter_shard_records, show_records
from .convert_sinks import RecordSink, TarSink
from .shard_files import PendingFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardset.dataset.discover import Found
    from shardset.formats.patterns import ShardFormat
    from shardset.storage.store import Store

    from .convert_plan import Plan, Target
    from .convert_sinks import ShardSink

    Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What `convert` did.

    Attributes:
        source: What was converted, as it was given, without what lets one in.
        to: The format that was written.
        num_shards_read: Shards of the source.
        urls: The shards that were written, in order.
        num_samples: Samples that were written.
        size: Bytes that were written.
        report: What was left out, kept in another way, or damaged; by code, with places. ``file_of_no_sample``: a file
            of a tar that no record has a place for. ``whole_record``: a record that is no Example, or more than one,
            kept as it is. ``unusable_key``: a record whose ``__key__`` cannot name members; it was given a number.
            ``not_converted``: a sample that the policy said to leave out. Faults of damaged shards have codes of their
            own.
    """

    source: str
    to: Target
    num_shards_read: int
    urls: tuple[str, ...]
    num_samples: int
    size: int
    report: Report = field(compare=False)


def convert(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    to: Target | None = None,
    shards: int | None = None,
    max_bytes: int | None = None,
    max_records: int | None = None,
    compression: str | None = None,
    force: bool = False,
    policy: Policy | None = None,
    store: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write the samples of some shards into shards of another format, in the same order.

    Every shard becomes one of the same name and another suffix, in the folder `destination`. With `shards`, `max_bytes`
    or `max_records` the samples are divided anew, in blocks one after the other, into shards that are numbered:
    ``shard-00000-of-00008.tar`` in a folder, or ``out-00000-of-00008.tar`` for the destination ``out.tar``. All samples
    go into one shard if the destination is a file name like ``out.tar``, and into eight if it is ``out@8.tar``.

    TFRecord may also be written as TFRecord, divided or compressed otherwise; records are then copied as they are.

    Args:
        source: Shards of one format, as `discover_dataset` finds them.
        destination: A folder, a file name with a suffix, or such a name with a count; on this machine or in a bucket.
        to: ``"tar"`` or ``"tfrecord"``; by default what the destination's suffix says, or what the source is not.
        shards: Divide the samples evenly into so many shards.
        max_bytes: The most bytes of a shard, before compression, extension headers for long names apart. One larger
            sample has a shard of its own.
        max_records: The most samples in a shard.
        compression: Of TFRecord: ``"GZIP"`` or ``"ZLIB"``, in any case; by default what the destination's suffix says,
            ``.gz`` or ``.zlib``, or none.
        force: Write over shards that are there.
        policy: What to do about damaged shards, of which the good records, or the samples of a tar before the damage,
            can be converted, and about samples that cannot be converted; by default they raise.
        store: Where source and destination live; by default the place that their scheme names.
        progress: Called with (shards read, shards of the source).

    Returns:
        What was written, and what was met.

    Raises:
        ValueError: Arguments that contradict each other, shards of both formats, or tars as tars.
        FormatError: A shard is damaged, and the policy says to raise.
        SampleError: A sample cannot be converted, and the policy says to raise.
        StorageError: Reading or writing failed, or shards are there already.
    """
    report = Report()
    policy = policy or Policy()
    store = store or AnyStore()
    found = find_shards(source, store=store, report=report)
    origin = _format_of(found, store)
    target: Target = to or named_format(os.fspath(destination)) or ("tfrecord" if origin == "tar" else "tar")
    if origin == target == "tar":
        raise ValueError("the shards are tars already: only TFRecord can be divided anew")
    plan = make_plan(
        found,
        os.fspath(destination),
        target,
        shards=shards,
        max_bytes=max_bytes,
        max_records=max_records,
        compression=compression,
    )
    if not force:
        plan.check_free(store)
    run = _Run(found, store, plan, policy, report)
    try:
        run.write(origin, target, progress)
        urls = run.publish()
    except BaseException:
        run.discard()
        raise
    if plan.names is not None and force:
        for path in plan.names.others(len(urls)):
            path.unlink(missing_ok=True)
    return ConvertReport(found.name, target, len(found.shards), tuple(urls), run.num_samples, run.size, report)


def _format_of(found: Found, store: Store) -> ShardFormat:
    """Return the format that all shards of a source have."""
    formats: dict[ShardFormat, str] = {}
    for shard in found.shards:
        formats.setdefault(shard_format(store.open(shard.url, shard.info)), shard.url)
    if len(formats) > 1:
        named = " and ".join(f"{without_secrets(url)} is {kind}" for kind, url in formats.items())
        raise ValueError(f"the shards are of both formats: {named}; convert those of one at a time")
    return next(iter(formats))


class _Run:
    """One conversion: what is read, which shard is being filled, and those that wait for their names."""

    def __init__(self, found: Found, store: Store, plan: Plan, policy: Policy, report: Report) -> None:
        self._found = found
        self._store = store
        self._plan = plan
        self._policy = policy
        self._report = report
        self._make: Callable[[PendingFile], ShardSink] = lambda file: RecordSink(file, plan.compression)
        self._sink: ShardSink | None = None
        self._waiting: list[PendingFile] = []
        self._published: list[str] = []
        # Where samples are divided evenly: the number of the sample behind the last of each shard.
        self._ends: list[int] = []
        self.num_samples = 0
        self.size = 0

    def write(self, origin: ShardFormat, target: Target, progress: Callable[[int, int], None] | None) -> None:
        """Read all shards, and write what they become."""
        total = self._plan.total
        if total is not None and total > 1:
            count = sum(self._count(shard.url, origin) for shard in self._found.shards)
            self._ends = [(number + 1) * count // total for number in range(total)]
        turn: RecordsToTar | None = None
        if target == "tar":
            turn = RecordsToTar(show_records(self._found.shards[0].url, self._store), self._report)
            payload = turn.marker()
            marker = None if payload is None else (MARKER, payload)
            self._make = lambda file: TarSink(file, marker)
        if self._plan.urls is None:
            self._open()
        for number, shard in enumerate(self._found.shards):
            if self._plan.urls is not None:
                self._open(self._plan.urls[number])
            for item in self._items(shard.url, origin, turn):
                self._add(item)
            if self._plan.urls is not None:
                self._finish()
                self._waiting[0].publish()
                self._waiting.clear()
                self._published.append(self._plan.urls[number])
            if progress is not None:
                progress(number + 1, len(self._found.shards))
        if self._plan.urls is None:
            self._finish()
            while len(self._waiting) < len(self._ends):  # more shards than samples
                self._open()
                self._finish()

    def _items(self, url: str, origin: ShardFormat, turn: RecordsToTar | None) -> Iterator[Any]:
        """Yield what a shard's samples become."""
        if origin == "tar":
            yield from TarToRecords(self._store.open(url), self._policy, self._report).iter_records()
            return
        records = iter_shard_records(url, self._store, self._policy, self._report)
        if turn is None:
            yield from records
        else:
            for number, raw in enumerate(records):
                yield turn.convert(raw, url, number)

    def _count(self, url: str, origin: ShardFormat) -> int:
        """Return how many samples a shard has, of a damaged one before the damage."""
        reader = self._store.open(url)
        if origin == "tar":
            return build_index(reader, policy=Policy(on_error="skip"), report=Report()).num_samples
        table = scan_plain(reader)
        if len(table) or not reader.size:
            return len(table)
        return sum(1 for _ in iter_shard_records(url, self._store, Policy(on_error="skip"), Report()))

    def _add(self, item: Any) -> None:
        while not self._has_room(item):
            self._finish()
            self._open()
        self._current.add(item)
        self.num_samples += 1

    def _has_room(self, item: Any) -> bool:
        if self._ends:
            shard = len(self._waiting)
            return shard == len(self._ends) - 1 or self.num_samples < self._ends[shard]
        sink, plan = self._current, self._plan
        if not sink.count:
            return True
        fits = plan.max_bytes is None or sink.size + sink.cost(item) <= plan.max_bytes
        return fits and sink.count != plan.max_records

    @property
    def _current(self) -> ShardSink:
        assert self._sink is not None  # noqa: S101 - opened before
        return self._sink

    def _open(self, url: str | None = None) -> None:
        """Begin a shard: of a name, or one that is given its name in the end."""
        if url is None:
            assert self._plan.names is not None  # noqa: S101 - one of the two is there
            url = self._plan.names.first_url
        file = PendingFile(url, self._store)
        try:
            self._sink = self._make(file)
        except BaseException:
            file.discard()
            raise

    def _finish(self) -> None:
        """Bring the shard that is being filled to the disk."""
        sink = self._current
        sink.finish()
        sink.file.sync()
        self.size += sink.file.size
        self._waiting.append(sink.file)
        self._sink = None

    def publish(self) -> list[str]:
        """Give the shards that wait their names, and return the names of all."""
        if self._plan.names is not None:
            for file, url in zip(self._waiting, self._plan.names.urls(len(self._waiting)), strict=True):
                file.publish(url)
                self._published.append(url)
            self._waiting.clear()
        return self._published

    def discard(self) -> None:
        """Remove what has no name yet."""
        with ExitStack() as stack:  # all of them, whichever cannot be removed
            for file in self._waiting:
                stack.callback(file.discard)
            if self._sink is not None:
                stack.callback(self._sink.file.discard)
