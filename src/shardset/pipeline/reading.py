"""From shards to samples: one pass over the headers of each, payloads as bytes, a decision about all that is odd."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.dataset.files import LARGEST_SPARSE
from shardset.errors import FormatError, LimitError, NoSamplesError, ShardsetError, StateError, without_secrets
from shardset.index.sample_windows import iter_sample_windows
from shardset.index.table import duplicate_error, reserved_error
from shardset.policy import Place

from .read_errors import as_read_error
from .run import USUAL, Step
from .shard_bytes import ShardPlace, open_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from shardset.index.sample_windows import SampleWindow

    from .run import Handler, Origin

    Sample = Any  # a dict; or, where the step defers, what makes it
    Item = dict[str, Any]
    Emitted = Generator[Sample, None, bool]
    """Gives samples, and returns whether the stage goes on."""

logger = logging.getLogger("shardset.pipeline")

_OWN_FIELDS: Final = frozenset({"__key__", "__url__", "__local_path__"})
_ODD_ENDS: Final = frozenset({"data_after_end", "no_end_marker", "short_end_marker", "short_padding"})
"""Faults that a reader gets past, and that may mean that samples are lost."""
_SAID: Final = {
    "no_end_marker": "there is no end marker: the shard may have been cut on the border of a member",
    "short_end_marker": "the end marker is cut short",
}


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
    step.remember(lambda: {"after": None if run.last_read is None else list(run.last_read)})
    after = None if state.get("after") is None else tuple(state["after"])
    items: Iterator[tuple[int, Item]] = enumerate(map(_as_item, source))
    if after is not None:
        held = step.held_later
        most = max(after[0], *(origin[0] for origin in held), 0)
        begun = dict(islice(items, most + 1))
        run.last_read = after
        yield from _read_again(begun, held, reading, step)
        items = chain([entry for entry in begun.items() if entry[0] >= after[0]], items)
    url = None
    for ordinal, item in items:
        url = item["url"]
        start = after if after is not None and ordinal == after[0] else None
        if not (yield from _read_shard(item, ordinal, reading, step, after=start)):
            return
    if run.last_read is None and reading.empty_check:
        raise NoSamplesError(
            "no samples: there was no shard" if url is None else "no samples in any shard",
            shard=url,
            hint="look at it with 'shardset check'; empty_check=False lets a pass be empty",
        )


def _as_item(item: Any) -> Item:
    """Take what a source of shards gave: webdataset's dict, or the bare url."""
    return item if isinstance(item, dict) else {"url": os.fspath(item)}


def _read_again(items: dict[int, Item], origins: list[Origin], reading: Reading, step: Step) -> Iterator[Sample]:
    """Read samples that later stages held when a state was saved, in the order in which they held them."""
    run = step.run
    found: dict[Origin | None, Sample] = {}
    for ordinal in sorted({origin[0] for origin in origins}):
        wanted = {origin[1] for origin in origins if origin[0] == ordinal}
        first = (ordinal, min(wanted))
        for sample in _read_shard(items[ordinal], ordinal, reading, Step(run, step.number), after=first, only=wanted):
            found[run.origin] = sample
            wanted.discard(first[1] if run.origin is None else run.origin[1])
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
    *,
    after: Origin | None = None,
    only: set[int] | None = None,
) -> Emitted:
    """Read one shard.

    Args:
        item: Its url, and the part of it that is read.
        ordinal: Its place among the shards of this process.
        reading: How.
        step: The step of the run.
        after: Begin behind the sample of this origin; with `only`, at it.
        only: Give only the samples whose first headers stand at these offsets.
    """
    url = item["url"]
    if reading.verbose:
        logger.info("reading %s", without_secrets(url))
    start, stop = item.get("start", 0), item.get("stop")
    begin = start if after is None else after[1]
    try:
        source, path = open_shard(url, reading.place, begin, step.run.report)
    except ShardsetError as error:
        place = Place(without_secrets(url), message=error.message)
        return step.settle(error, _code(error), None, reading.handler, place)
    emitter = _Emitter(url, path, ordinal, reading, step)
    skips = after is not None and only is None
    try:
        for window in iter_sample_windows(source, begin, rename=reading.rename, select=reading.select):
            count = len(window.keys)
            fault = source.error or _error_of(window, url)
            if fault is not None and count and not (source.error and _has_end(window)):
                count -= 1  # what was to follow may be missing
                emitter.count_cut(window, count)
            if stop is not None:
                count = min(count, int(np.searchsorted(window.first_offset, stop)))
            first = int(skips and count > 0)
            skips = skips and not count
            if not (yield from emitter.emit(window, first, count, only)):
                return False
            if not emitter.settle_odd(window, stop):
                return False
            if stop is not None and count < len(window.keys):
                return True
            if fault is not None:
                place = Place(without_secrets(url), getattr(fault, "offset", None), message=fault.message)
                return step.settle(as_read_error(fault), _code(fault), None, reading.handler, place)
    finally:
        source.close()
    return True


def _error_of(window: SampleWindow, url: str) -> FormatError | None:
    return next((fault.error(url) for fault in window.faults if fault.is_error), None)


def _has_end(window: SampleWindow) -> bool:
    """Tell whether the tar is whole: its end marker was there, whatever went wrong behind it."""
    return window.is_last and not any(fault.is_error or fault.code in _ODD_ENDS for fault in window.faults)


def _code(error: ShardsetError) -> str:
    """Return the kind of fault, for the policy and the report."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else "unreadable_shard"


def _same(sample: Sample) -> Sample:
    return sample


@dataclass(frozen=True, slots=True)
class _Alike:
    """Samples of a window that all have the same fields, yet to be made."""

    own: dict[str, str]
    keys: list[str]
    fields: list[str]
    starts: list[int]
    ends: list[int]
    data: Any

    def make(self, number: int) -> Sample:
        """Make sample `number`."""
        fields, data = self.fields, self.data
        first = number * len(fields)
        last = first + len(fields)
        sample: Sample = {"__key__": self.keys[number], **self.own}
        for name, start, end in zip(fields, self.starts[first:last], self.ends[first:last], strict=True):
            sample[name] = data[start:end]
        return sample


class _Emitter:
    """Makes the samples of one shard, window by window."""

    def __init__(self, url: str, path: str | None, ordinal: int, reading: Reading, step: Step) -> None:
        self._url = url
        self._shown = without_secrets(url)
        self._own = {"__url__": url} if path is None else {"__url__": url, "__local_path__": path}
        self._ordinal = ordinal
        self._handler = reading.handler
        self._step = step
        self._seen: dict[str, int] = {}

    def emit(self, window: SampleWindow, first: int, count: int, only: set[int] | None) -> Emitted:
        """Give samples ``[first, count)`` of a window, or those of them that begin at the offsets `only`."""
        keys = window.keys[first:count]
        offsets = window.first_offset[first:count].tolist()
        seen = self._seen
        new = dict(zip(keys, offsets, strict=True))
        comes_back = len(new) < len(keys) or not seen.keys().isdisjoint(new)
        fields = None if comes_back or only is not None or window.sparse else _common_fields(window, first, count)
        if fields is None:
            return (yield from self._emit_each(window, range(first, count), only))
        seen.update(new)
        if self._step.defers and isinstance(window.data, memoryview):
            yield from self._defer_alike(window, keys, offsets, fields, first)
        else:
            samples = self._emit_alike(window, keys, offsets, fields, first)
            yield from zip(repeat(_same), samples) if self._step.defers else samples
        return True

    def _emit_alike(
        self, window: SampleWindow, keys: list[str], offsets: list[int], fields: list[str], first: int
    ) -> Iterator[Sample]:
        """Give samples that all have the same fields; most shards are so, and this loop is what reading them costs."""
        run, own, width = self._step.run, self._own, len(fields)
        data, base = _sliceable(window)
        members = slice(int(window.rows[first]), int(window.rows[first]) + len(keys) * width)
        starts = window.offset[members] - base
        ends = starts + window.length[members]
        places = zip(repeat(self._ordinal), offsets)
        columns = [column[place::width].tolist() for place in range(width) for column in (starts, ends)]
        # The numbers of fields that are common, written out: a loop over fields takes twice as long.
        if width == 1:
            (one,) = fields
            for place, key, a, b in zip(places, keys, *columns, strict=True):
                run.origin = run.last_read = place
                yield {"__key__": key, **own, one: data[a:b]}
        elif width == 2:
            one, two = fields
            for place, key, a, b, c, d in zip(places, keys, *columns, strict=True):
                run.origin = run.last_read = place
                yield {"__key__": key, **own, one: data[a:b], two: data[c:d]}
        elif width == 3:
            one, two, three = fields
            for place, key, a, b, c, d, e, f in zip(places, keys, *columns, strict=True):
                run.origin = run.last_read = place
                yield {"__key__": key, **own, one: data[a:b], two: data[c:d], three: data[e:f]}
        else:
            cuts = [map(slice, columns[place], columns[place + 1]) for place in range(0, 2 * width, 2)]
            for place, key, pieces in zip(places, keys, zip(*cuts, strict=True), strict=True):
                run.origin = run.last_read = place
                yield {"__key__": key, **own, **dict(zip(fields, map(data.__getitem__, pieces), strict=True))}

    def _defer_alike(
        self, window: SampleWindow, keys: list[str], offsets: list[int], fields: list[str], first: int
    ) -> Iterator[Any]:
        """Give what makes the samples of `_emit_alike`, for whoever holds them: bytes of a map need no holding."""
        run, ordinal, width = self._step.run, self._ordinal, len(fields)
        members = slice(int(window.rows[first]), int(window.rows[first]) + len(keys) * width)
        data, base = _sliceable(window)
        starts = window.offset[members] - base
        ends = starts + window.length[members]
        make = _Alike(self._own, keys, fields, starts.tolist(), ends.tolist(), data).make
        for number, offset in enumerate(offsets):
            run.origin = run.last_read = ordinal, offset
            yield make, number

    def _emit_each(self, window: SampleWindow, numbers: range, only: set[int] | None) -> Emitted:
        """Give samples one by one, with a look at each."""
        run = self._step.run
        data, base = _sliceable(window)
        rows, offsets = window.rows.tolist(), window.first_offset.tolist()
        starts, lengths, ids = window.offset.tolist(), window.length.tolist(), window.suffix_ids.tolist()
        for number in numbers:
            key, offset = window.keys[number], offsets[number]
            if only is not None and offset not in only:
                continue
            if only is None:
                earlier = self._seen.setdefault(key, offset)
                if earlier != offset and not self._settle_return(window, number, earlier):
                    return False
            sample: Sample = {"__key__": key, **self._own}
            for row in range(rows[number], rows[number + 1]):
                field = window.suffixes[ids[row]]
                if field in sample:
                    if only is None and not self._settle_duplicate(window, number, row):
                        return False
                elif row in window.sparse:
                    sample[field] = _sparse(window, row, self._url)
                else:
                    sample[field] = data[starts[row] - base : starts[row] - base + lengths[row]]
            run.origin = place = (self._ordinal, offset)
            if only is None:
                run.last_read = place
            yield (_same, sample) if self._step.defers else sample
        return True

    def _settle_return(self, window: SampleWindow, number: int, earlier: int) -> bool:
        """Ask about a key that comes back. What stands here is given as a sample of its own if that may be."""
        key, offset = window.keys[number], int(window.first_offset[number])
        row = int(window.rows[number])
        name = window.names.text(int(window.name_rows[row]))
        error = FormatError(
            f"the key {key!r} comes back with member {name!r}; it was at byte {earlier} before: the members of one "
            "sample do not stand together",
            shard=self._url,
            offset=offset,
            code="repeated_key",
            member=name,
            hint="sort the members by their full path and write the shard again; "
            "Policy(codes={'repeated_key': 'skip'}) gives each part as a sample of its own",
        )
        return self._step.settle(error, error.code, None, self._handler, Place(self._shown, offset, key, error.message))

    def _settle_duplicate(self, window: SampleWindow, number: int, row: int) -> bool:
        """Ask about a second member of one suffix, which is left out if the sample may be given without it."""
        key, field, offset = window.keys[number], window.suffixes[window.suffix_ids[row]], int(window.offset[row])
        if field in _OWN_FIELDS:
            error = reserved_error(key, field, offset, self._url)
        else:
            rows = range(int(window.rows[number]), row)
            first = next(before for before in rows if window.suffix_ids[before] == window.suffix_ids[row])
            error = duplicate_error(key, field, int(window.offset[first]), offset, self._url)
        place = Place(self._shown, offset, key, error.message)
        return self._step.settle(error, "duplicate_suffix", None, self._handler, place)

    def settle_odd(self, window: SampleWindow, stop: int | None) -> bool:
        """Ask about what is odd in a window, and count what belongs to no sample; false ends the stage."""
        step = self._step
        for code, offset, name in window.skipped:
            if stop is None or offset < stop:
                place = Place(self._shown, offset, message=f"{name!r} is part of no sample")
                action = step.run.policy.action(code, USUAL[code])
                if action == "skip":
                    step.run.report.add(code, place)
                else:
                    error = FormatError(place.message, shard=self._url, offset=offset, code=code, member=name)
                    if not step.settle(error, code, None, self._handler if action == "raise" else None, place):
                        return False
        for met in window.faults:
            fault = replace(met, message=met.message or _SAID.get(met.code, ""))
            if fault.is_error or (stop is not None and fault.offset >= stop):
                continue
            place = Place(self._shown, fault.offset, message=fault.message)
            if fault.code in _ODD_ENDS or fault.code in step.run.policy.codes:
                handler = (
                    self._handler if step.run.policy.action(fault.code, USUAL.get(fault.code)) == "raise" else None
                )
                if not step.settle(fault.error(self._url), fault.code, None, handler, place):
                    return False
            else:
                step.run.report.add(fault.code, place)
        return True

    def count_cut(self, window: SampleWindow, number: int) -> None:
        """Count a sample that is not given, because the shard ends in an error right behind it."""
        place = Place(
            self._shown, int(window.first_offset[number]), window.keys[number], "the error behind it cut it short"
        )
        self._step.run.report.add("sample_cut_short", place)


def _common_fields(window: SampleWindow, first: int, count: int) -> list[str] | None:
    """Return the fields of samples ``[first, count)``, if all have the same, each once, and none of ours; else None."""
    samples = count - first
    if samples <= 0:
        return []
    rows = window.rows[first : count + 1]
    width = int(rows[1] - rows[0])
    if int(rows[-1] - rows[0]) != width * samples or not bool((np.diff(rows) == width).all()):
        return None
    ids = window.suffix_ids[rows[0] : rows[-1]].reshape(samples, width)
    if not bool((ids == ids[0]).all()):
        return None
    fields = [window.suffixes[number] for number in ids[0].tolist()]
    return fields if len(set(fields)) == width and _OWN_FIELDS.isdisjoint(fields) else None


def _sliceable(window: SampleWindow) -> tuple[Any, int]:
    """Return what gives bytes when it is sliced, and the byte of the shard that it begins with."""
    data = window.data
    # A slice of the map itself is bytes at once; one of a view of it would have to be made bytes.
    return (data.obj, 0) if isinstance(data, memoryview) else (data, window.base)


def _sparse(window: SampleWindow, row: int, shard: str) -> bytes:
    """Put a sparse file together."""
    size = int(window.length[row])
    if size > LARGEST_SPARSE:
        name = window.names.text(int(window.name_rows[row]))
        raise LimitError(
            f"sparse file {name!r} has {size} bytes with its holes",
            shard=shard,
            code="sparse_member",
            member=name,
            hint="select_files can leave it out",
        )
    whole = bytearray(size)
    data = memoryview(window.data)
    for piece in window.sparse[row]:
        start = piece.offset - window.base
        whole[piece.logical : piece.logical + piece.length] = data[start : start + piece.length]
    return bytes(whole)
