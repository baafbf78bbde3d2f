"""From a window of a shard to its samples: dicts with payloads as bytes, and a decision about all that is odd."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.dataset.files import LARGEST_SPARSE
from shardset.errors import FormatError, LimitError, without_secrets
from shardset.index.table import duplicate_error, reserved_error
from shardset.policy import Place

from .read_errors import as_read_error
from .run import USUAL, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from shardset.index.sample_windows import SampleWindow

    from .run import Handler

    Sample = Any  # a dict; or, where the step defers, what makes it
    Emitted = Generator[Sample, None, bool]
    """Gives samples, and returns whether the stage goes on."""

_OWN_FIELDS: Final = frozenset({"__key__", "__url__", "__local_path__"})
ODD_ENDS: Final = frozenset({"data_after_end", "no_end_marker", "short_end_marker", "short_padding"})
"""Faults that a reader gets past, and that may mean that samples are lost."""
_SAID: Final = {
    "no_end_marker": "there is no end marker: the shard may have been cut on the border of a member",
    "short_end_marker": "the end marker is cut short",
}


def _same(sample: Sample) -> Sample:
    return sample


def _maker(
    own: dict[str, str], keys: list[str], fields: list[str], columns: list[list[int]], data: Any
) -> Callable[[int], Sample]:
    """Return what makes sample `i` of a window whose samples all have the same fields.

    Args:
        own: Fields that are not read.
        keys: The samples' keys.
        fields: Their fields.
        columns: Of each field in turn, where the payloads begin and where they end in `data`.
        data: What gives bytes when it is sliced.
    """
    # The numbers of fields that are common, written out, as in `Emitter.emit`.
    if len(fields) == 1:
        (one,), (a, b) = fields, columns
        return lambda i: {"__key__": keys[i], **own, one: data[a[i] : b[i]]}
    if len(fields) == 2:
        (one, two), (a, b, c, d) = fields, columns
        return lambda i: {"__key__": keys[i], **own, one: data[a[i] : b[i]], two: data[c[i] : d[i]]}
    if len(fields) == 3:
        (one, two, three), (a, b, c, d, e, f) = fields, columns
        return lambda i: {
            "__key__": keys[i],
            **own,
            one: data[a[i] : b[i]],
            two: data[c[i] : d[i]],
            three: data[e[i] : f[i]],
        }

    def make(i: int) -> Sample:
        sample: Sample = {"__key__": keys[i], **own}
        for name, start, end in zip(fields, columns[::2], columns[1::2], strict=True):
            sample[name] = data[start[i] : end[i]]
        return sample

    return make


class Emitter:
    """Makes the samples of one shard, window by window.

    Attributes:
        seen: The keys that there were, each with the byte offset of its sample.
    """

    def __init__(self, url: str, path: str | None, ordinal: int, handler: Handler | None, step: Step) -> None:
        self._url = url
        self._shown = without_secrets(url)
        self._own = {"__url__": url} if path is None else {"__url__": url, "__local_path__": path}
        self._ordinal = ordinal
        self._handler = handler
        self._step = step
        self.seen: dict[str, int] = {}

    def emit(self, window: SampleWindow, first: int, count: int, only: set[int] | None) -> Emitted:
        """Give samples ``[first, count)`` of a window, or those of them that begin at the offsets `only`."""
        keys = window.keys[first:count]
        offsets = window.first_offset[first:count].tolist()
        seen = self.seen
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
        data, columns = _columns(window, first, len(keys), width)
        places = zip(repeat(self._ordinal), offsets)
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
        run, ordinal = self._step.run, self._ordinal
        data, columns = _columns(window, first, len(keys), len(fields))
        make = _maker(self._own, keys, fields, columns, data)
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
                earlier = self.seen.setdefault(key, offset)
                if earlier != offset and not self._settle_return(window, number, earlier):
                    return False
            sample: Sample = {"__key__": key, **self._own}
            firsts: dict[str, int] = {}
            for row in range(rows[number], rows[number + 1]):
                field = window.suffixes[ids[row]]
                first = firsts.setdefault(field, row)
                if field in sample or first != row:
                    if only is None and not self._settle_duplicate(window, number, first, row):
                        return False
                elif row in window.sparse:
                    payload = self._put_together(window, number, row)
                    if payload is False:
                        return False
                    if payload is not None:
                        sample[field] = payload
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

    def _settle_duplicate(self, window: SampleWindow, number: int, first: int, row: int) -> bool:
        """Ask about a second member of one suffix, which is left out if the sample may be given without it."""
        key, field, offset = window.keys[number], window.suffixes[window.suffix_ids[row]], int(window.offset[row])
        if field in _OWN_FIELDS:
            error = reserved_error(key, field, offset, self._url)
        else:
            error = duplicate_error(key, field, int(window.offset[first]), offset, self._url)
        place = Place(self._shown, offset, key, error.message)
        return self._step.settle(error, "duplicate_suffix", None, self._handler, place)

    def _put_together(self, window: SampleWindow, number: int, row: int) -> bytes | bool | None:
        """Return a sparse file with its holes; None to leave it out, and False to end the stage."""
        size = int(window.length[row])
        if size > LARGEST_SPARSE:
            name, key = window.names.text(int(window.name_rows[row])), window.keys[number]
            error = LimitError(
                f"sparse file {name!r} of sample {key!r} has {size} bytes with its holes",
                shard=self._url,
                offset=int(window.first_offset[number]),
                code="sparse_member",
                member=name,
                hint="select_files can leave it out",
            )
            place = Place(self._shown, error.offset, key, error.message)
            goes_on = self._step.settle(as_read_error(error), error.code, None, self._handler, place)
            return None if goes_on else False
        whole = bytearray(size)
        data = memoryview(window.data)
        for piece in window.sparse[row]:
            start = piece.offset - window.base
            whole[piece.logical : piece.logical + piece.length] = data[start : start + piece.length]
        return bytes(whole)

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
            if fault.code in ODD_ENDS or fault.code in step.run.policy.codes:
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


def _columns(window: SampleWindow, first: int, count: int, width: int) -> tuple[Any, list[list[int]]]:
    """Return what gives bytes when it is sliced, and of each field in turn, where payloads begin in it and end."""
    data, base = _sliceable(window)
    members = slice(int(window.rows[first]), int(window.rows[first]) + count * width)
    starts = window.offset[members] - base
    ends = starts + window.length[members]
    return data, [column[place::width].tolist() for place in range(width) for column in (starts, ends)]


def _sliceable(window: SampleWindow) -> tuple[Any, int]:
    """Return what gives bytes when it is sliced, and the byte of the shard that it begins with."""
    data = window.data
    # A slice of the map itself is bytes at once; one of a view of it would have to be made bytes.
    return (data.obj, 0) if isinstance(data, memoryview) else (data, window.base)
