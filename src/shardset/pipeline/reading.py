"""From shards to samples: one pass over the headers of each, payloads as bytes, a decision about all that is odd."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from shardset.errors import FormatError, NoSamplesError, ShardsetError, StateError, without_secrets
from shardset.index.sample_windows import iter_sample_windows
from shardset.policy import Place

from .emitting import ODD_ENDS, Emitter
from .read_errors import as_read_error
from .run import Step
from .shard_bytes import ShardPlace, open_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from shardset.index.sample_windows import SampleWindow

    from .emitting import Emitted, Sample
    from .run import Handler, Origin
    from .shard_bytes import ShardBytes

    Item = dict[str, Any]

logger = logging.getLogger("shardset.pipeline")


@dataclass(frozen=True, slots=True)
class Reading:
    """How samples are read from shards.

    Attributes:
        place: Where shards lie.
        handler: Decides about errors instead of the policy.
        rename: Gives the name that a member is to have.
        select: Tells by its name, after `rename`, whether a member is wanted.
        empty_check: Raise where all shards together have no sample.
        verbose: Log the url of each shard that is begun.
    """

    place: ShardPlace = field(default_factory=ShardPlace)
    handler: Handler | None = None
    rename: Callable[[str], str] | None = None
    select: Callable[[str], bool] | None = None
    empty_check: bool = True
    verbose: bool = False


def read_samples(source: Iterable[Any], reading: Reading, *, step: Step | None = None) -> Iterator[Sample]:
    """Read the samples of all shards that come, one shard after the other.

    A sample is a dict of ``__key__``, ``__url__``, for a local shard ``__local_path__``, and its fields: suffixes in
    lower case, with the payloads as bytes. What no sample is made of is counted in the run's report. A sample is whole,
    or it is not given: one that an error of its shard cut short is discarded.

    Args:
        source: Urls, or dicts with the key ``url``.
        reading: How.
        step: The step of a run.

    Raises:
        FormatError: A shard is damaged, a key comes back in it, something stands behind its end, or what else the
            policy says to raise. All samples before the fault have been given.
        DuplicateFieldError: A sample has one suffix twice.
        StorageError: A shard cannot be read, or the command of a pipe failed.
        NoSamplesError: There was not one sample.
    """
    step = step or Step(name="read_samples")
    run, state = step.run, step.restored or {}
    trail = _Trail()
    after = None if state.get("after") is None else tuple(state["after"])
    items: Iterator[tuple[int, Item]] = enumerate(map(_as_item, source))
    step.remember(lambda: trail.snapshot(run.last_read) if trail.count else state)
    if after is not None:
        held = step.held_later
        most = max(after[0], *(origin[0] for origin in held), 0)
        begun = dict(islice(items, most + 1))
        _check_list(begun, after[0], state, most)
        run.last_read = after
        yield from _read_again(begun, held, reading, step)
        for ordinal in range(after[0]):
            trail.add(begun[ordinal]["url"])
        items = chain([entry for entry in begun.items() if entry[0] >= after[0]], items)
    url = None
    for ordinal, item in items:
        url = item["url"]
        trail.add(url)
        resumed = state if after is not None and ordinal == after[0] else None
        if not (yield from _read_shard(item, ordinal, reading, step, trail, resumed=resumed)):
            return
    if run.last_read is None and reading.empty_check:
        raise NoSamplesError(
            "no samples: there was no shard" if url is None else "no samples in any shard",
            shard=url,
            hint="look at it with 'shardset check'; empty_check=False lets a pass be empty",
        )


class _Trail:
    """What a state says of the shards that were begun, so that it is only used where they are the same.

    Attributes:
        count: How many there were.
        size: The bytes of the latest one, where they are known.
        keys: The keys of the latest window of it.
        offsets: Where the samples of that window begin.
    """

    def __init__(self) -> None:
        self.count = 0
        self.size: int | None = None
        self.keys: list[str] = []
        self.offsets: NDArray[np.int64] = np.zeros(0, np.int64)
        self._digest = blake2b(digest_size=8)

    def add(self, url: str) -> None:
        """Add a shard that is begun."""
        self.count += 1
        self._digest.update(without_secrets(url).encode("utf-8", "surrogateescape") + b"\n")

    def digest(self) -> str:
        """Return a digest of the urls of all shards that were begun, in order."""
        return self._digest.copy().hexdigest()

    def snapshot(self, last_read: Origin | None) -> dict[str, Any]:
        """Return the state of the reading stage behind the sample `last_read`."""
        if last_read is None:
            return {"after": None}
        key = size = None
        if self.count == last_read[0] + 1:
            number = int(np.searchsorted(self.offsets, last_read[1]))
            key, size = self.keys[number] if number < len(self.keys) else None, self.size
        return {"after": list(last_read), "key": key, "size": size, "shards": [self.count, self.digest()]}


def _as_item(item: Any) -> Item:
    """Take what a source of shards gave: webdataset's dict, or the bare url."""
    return item if isinstance(item, dict) else {"url": os.fspath(item)}


def _check_list(begun: dict[int, Item], last: int, state: dict[str, Any], most: int) -> None:
    """Make sure that the shards up to where a state was saved are still the same.

    Raises:
        StateError: They are not.
    """
    count, digest = state.get("shards") or (last + 1, None)
    trail = _Trail()
    for ordinal in range(min(count, len(begun))):
        trail.add(begun[ordinal]["url"])
    if len(begun) <= most or (count <= most + 1 and trail.digest() != digest):
        raise StateError(
            f"the list of shards is not the one that the state was saved with: the first {count} were others",
            hint="give the same shards, in the same order, as when the state was saved",
        )


def _read_again(items: dict[int, Item], origins: list[Origin], reading: Reading, step: Step) -> Iterator[Sample]:
    """Read samples that later stages held when a state was saved, in the order in which they held them."""
    run = step.run
    found: dict[Origin | None, Sample] = {}
    for ordinal in sorted({origin[0] for origin in origins}):
        wanted = {origin[1] for origin in origins if origin[0] == ordinal}
        for sample in _read_shard(items[ordinal], ordinal, reading, Step(run, step.number), _Trail(), only=wanted):
            found[run.origin] = sample
            wanted.discard(-1 if run.origin is None else run.origin[1])
            if not wanted:
                break
    for origin in origins:
        if origin not in found:
            raise StateError(
                f"the sample at byte {origin[1]} of {without_secrets(items[origin[0]]['url'])} is no longer there",
                hint="the shard was changed since the state was saved",
            )
        run.origin = origin
        yield (dict, found[origin]) if step.defers else dict(found[origin])


def _read_shard(
    item: Item,
    ordinal: int,
    reading: Reading,
    step: Step,
    trail: _Trail,
    *,
    resumed: dict[str, Any] | None = None,
    only: set[int] | None = None,
) -> Emitted:
    """Read one shard.

    Args:
        item: Its url, and the part of it that is read.
        ordinal: Its place among the shards of this process.
        reading: How.
        step: The step of the run.
        trail: Takes note of where the reading is.
        resumed: Go on behind the sample that this state of the reading stage says.
        only: Give only the samples whose first headers stand at these offsets.
    """
    url = item["url"]
    if reading.verbose:
        logger.info("reading %s", without_secrets(url))
    start, stop = item.get("start", 0), item.get("stop")
    past = _Past(url, resumed)
    wanted = min(only) if only else start if past.after is None else past.after
    try:
        source, path = open_shard(url, reading.place, wanted, step.run.report)
    except ShardsetError as error:
        place = Place(without_secrets(url), message=error.message)
        return step.settle(error, _code(error), None, reading.handler, place)
    trail.size = source.size
    emitter = Emitter(url, path, ordinal, reading.handler, step)
    begin = wanted if only else max(start, source.base)
    try:
        past.check_size(source.size)
        for window in iter_sample_windows(source, begin, rename=reading.rename, select=reading.select):
            trail.keys, trail.offsets = window.keys, window.first_offset
            fault = source.error or _error_of(window, url)
            count = _count_sure(window, fault, source, emitter)
            if stop is not None:
                count = min(count, int(np.searchsorted(window.first_offset, stop)))
            first = past.skip(window, count, emitter)
            if not (yield from emitter.emit(window, first, count, only)) or not emitter.settle_odd(window, stop):
                return False
            if stop is not None and count < len(window.keys):
                return True
            if fault is not None:
                place = Place(without_secrets(url), getattr(fault, "offset", None), message=fault.message)
                return step.settle(as_read_error(fault), _code(fault), None, reading.handler, place)
        if not emitter.seen and only is None and not start:
            step.drop("shard_without_samples", {"__url__": url}, "no file in it belongs to a sample")
    finally:
        source.close()
    return True


def _count_sure(window: SampleWindow, fault: Exception | None, source: ShardBytes, emitter: Emitter) -> int:
    """Return how many samples of a window are whole: all, but for the one before a fault, which may lack something."""
    count = len(window.keys)
    if fault is None or not count or (source.error and _has_end(window)):
        return count
    emitter.count_cut(window, count - 1)
    return count - 1


class _Past:
    """What was read of a shard before the state was saved that a run goes on from.

    Attributes:
        after: Where the last sample of it begins; None where the shard is read anew, and when that was passed.
    """

    def __init__(self, url: str, resumed: dict[str, Any] | None) -> None:
        self._url = url
        self._resumed = resumed or {}
        self.after: int | None = None if resumed is None else int(resumed["after"][1])

    def check_size(self, size: int | None) -> None:
        """Make sure that the shard has the size that it had.

        Raises:
            StateError: It has another.
        """
        before = self._resumed.get("size")
        if before is not None and before != size:
            raise _changed(self._url, f"it had {before} bytes, and has {size}")

    def skip(self, window: SampleWindow, count: int, emitter: Emitter) -> int:
        """Return the first sample of a window that was not read before; the keys of those before it must not come back.

        Raises:
            StateError: The last one that was read is not where it was.
        """
        if self.after is None:
            return 0
        first = min(count, int(np.searchsorted(window.first_offset, self.after, side="right")))
        emitter.seen.update(zip(window.keys[:first], window.first_offset[:first].tolist(), strict=True))
        if first < count or window.is_last:
            key, offset = next(reversed(emitter.seen.items()), (None, -1))
            if offset != self.after or self._resumed.get("key") not in {None, key}:
                what = self._resumed.get("key")
                raise _changed(
                    self._url, f"behind sample {what!r} at byte {self.after} there was nothing but {key!r} at {offset}"
                )
            self.after = None
        return first


def _changed(url: str, what: str) -> StateError:
    return StateError(
        f"the shard {without_secrets(url)} is not as it was when the state was saved: {what}",
        hint="bring back the shard, or begin the epoch again",
    )


def _error_of(window: SampleWindow, url: str) -> FormatError | None:
    return next((fault.error(url) for fault in window.faults if fault.is_error), None)


def _has_end(window: SampleWindow) -> bool:
    """Tell whether the tar is whole: its end marker was there, whatever went wrong behind it."""
    return window.is_last and not any(fault.is_error or fault.code in ODD_ENDS for fault in window.faults)


def _code(error: ShardsetError) -> str:
    """Return the kind of fault, for the policy and the report."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else "unreadable_shard"
