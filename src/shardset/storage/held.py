"""Bytes that were read ahead: a reader that has some ranges of its object in memory, and asks for the rest."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn, cast

import numpy as np

from shardset.errors import ShardsetError, StorageError, without_secrets

from .local import LocalReader
from .planner import plan_reads
from .remote import RemoteReader, read_many_of
from .store import is_remote
from .threads import run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .planner import ReadPlan
    from .store import Numbers, Reader

    Int64s = NDArray[np.int64]

_READERS_AT_ONCE = 64
_FILES_AT_ONCE = 16
_LARGEST_GAP = 128 << 10
_MOST = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class HeldReader:
    """A `Reader` of an object some of whose bytes are here.

    What is not here is read when it is asked for, so that holding the wrong ranges costs time and changes no answer.
    Until then the object is not open: there may be more of them than a process may have files.

    Attributes:
        url: The object's address.
        size: Its length in bytes.
        identity: As in `ObjectInfo`.
        open: Gives a reader of the object.
        starts: Where each block that is here begins, ascending.
        blocks: Their bytes; they do not overlap.
    """

    url: str
    size: int
    identity: str
    open: Callable[[], Reader]
    starts: list[int]
    blocks: list[memoryview]
    is_held: ClassVar[bool] = True

    def read(self, offset: int, length: int) -> bytes:
        """As `Reader.read`."""
        found = self._find(offset, length)
        return self.open().read(offset, length) if found is None else bytes(found)

    def view(self, offset: int, length: int) -> memoryview:
        """As `Reader.view`."""
        found = self._find(offset, length)
        return self.open().view(offset, length) if found is None else found

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """As `Reader.read_many`."""
        asked = list(zip(_plain(offsets), _plain(lengths), strict=True))
        found = [self._find(offset, length) for offset, length in asked]
        if None in found:
            missing = [place for place, view in enumerate(found) if view is None]
            rest = self.open().read_many([asked[place][0] for place in missing], [asked[place][1] for place in missing])
            for place, view in zip(missing, rest, strict=True):
                found[place] = view
        return cast("list[memoryview]", found)

    def map(self) -> None:
        """Return None: only some of it is here."""
        return

    def _find(self, offset: int, length: int) -> memoryview | None:
        place = bisect_right(self.starts, offset) - 1
        if place < 0 or length < 0:
            return None
        block = self.blocks[place]
        start = offset - self.starts[place]
        return block[start : start + length] if start + length <= len(block) else None


@dataclass(frozen=True, slots=True, eq=False)
class LostReader:
    """A `Reader` of an object that could not be read, however often it was tried: it says so again, at no cost.

    Attributes:
        url: The object's address.
        error: Why it cannot be read.
        size: Its length in bytes, which nobody knows.
        identity: As in `ObjectInfo`: nor this.
    """

    url: str
    error: StorageError
    size: int = 0
    identity: str = ""

    def read(self, offset: int, length: int) -> bytes:
        """Raise the error."""
        del offset, length
        self._fail()

    def view(self, offset: int, length: int) -> memoryview:
        """Raise the error."""
        del offset, length
        self._fail()

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """Raise the error."""
        del offsets, lengths
        self._fail()

    def map(self) -> memoryview | None:
        """Raise the error."""
        self._fail()

    def _fail(self) -> NoReturn:
        raise self.error.with_traceback(None)  # which would grow each time


class Wanted(NamedTuple):
    """Ranges of one object that are to be read ahead.

    Attributes:
        url: The object's address.
        open: Gives a reader of it; called by any thread.
        offsets: int64, not negative, in any order.
        lengths: int64, not negative.
    """

    url: str
    open: Callable[[], Reader]
    offsets: Int64s
    lengths: Int64s


class Held(NamedTuple):
    """What reading ahead brought.

    Attributes:
        readers: A reader for each object, in the order asked: a `LostReader` for one elsewhere that could not be read,
            where each attempt may take minutes; None for another one that could not.
        num_bytes: Bytes that were read.
        num_reads: In how many reads, before stores cut long ones into parts.
    """

    readers: list[HeldReader | LostReader | None]
    num_bytes: int
    num_reads: int


def read_held(wanted: Sequence[Wanted], *, spare: int) -> Held:
    """Read ranges of several objects ahead, side by side, in offset order and near ones together.

    Nothing is raised that has to do with reading: what cannot be read is met, and judged, by whoever needs it.

    Args:
        wanted: What is to be read.
        spare: So many bytes between ranges may be read for nothing, all together, so that there are fewer reads.
    """
    gap = widest_gap(wanted, spare)
    plans = [plan_reads(each.offsets, each.lengths, gap=gap, most=_MOST) for each in wanted]
    answers = _Answers(wanted, plans)
    far = [number for number, each in enumerate(wanted) if is_remote(each.url)]
    if far:
        answers.read_far(far)
    near = [partial(answers.read, number) for number in set(range(len(wanted))) - set(far)]
    run_all(near, _FILES_AT_ONCE)
    readers = answers.readers
    there = [number for number, reader in enumerate(readers) if isinstance(reader, HeldReader)]
    num_bytes = sum(int(plans[number].lengths.sum()) for number in there)
    return Held(readers, num_bytes, sum(len(plans[number].lengths) for number in there))


def widest_gap(wanted: Sequence[Wanted], spare: int) -> int:
    """Return the gap up to which ranges can be read together, with at most `spare` bytes between them altogether."""
    found: list[Int64s] = []
    for each in wanted:
        order = np.argsort(each.offsets)
        starts = each.offsets[order]
        gaps = starts[1:] - np.maximum.accumulate(starts + each.lengths[order])[:-1]
        found.append(gaps[(gaps > 0) & (gaps <= _LARGEST_GAP)])
    gaps = np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)
    count = int(np.searchsorted(np.cumsum(gaps), spare, side="right"))
    if count == len(gaps):
        return _LARGEST_GAP
    # Of gaps that are equally wide, all or none.
    count = int(np.searchsorted(gaps, gaps[count], side="left"))
    return int(gaps[count - 1]) if count else 0


class _Answers:
    """The objects that are read ahead, and what has become of each."""

    def __init__(self, wanted: Sequence[Wanted], plans: Sequence[ReadPlan]) -> None:
        self._wanted = wanted
        self._plans = plans
        self.readers: list[HeldReader | LostReader | None] = [None] * len(wanted)

    def read_far(self, numbers: Sequence[int]) -> None:
        """Read several objects that are elsewhere, all at once; if one of them cannot be read, each by itself."""
        opened: dict[int, Reader] = {}
        for number in numbers:
            with suppress(ShardsetError):  # met again below
                reader = self._wanted[number].open()
                if isinstance(reader, LostReader):
                    self.readers[number] = reader
                else:
                    opened[number] = reader
        failed: StorageError | None = None
        try:
            found = read_many_of([self._asked(number, opened[number]) for number in opened], _READERS_AT_ONCE)
        except ShardsetError as error:
            failed = error if isinstance(error, StorageError) else None
        else:
            for (number, reader), blocks in zip(opened.items(), found, strict=True):
                self._hold(number, reader, blocks)
        again: list[Callable[[], None]] = []
        for number in numbers:
            if failed is not None and failed.url == without_secrets(self._wanted[number].url):
                self._lose(number, failed)  # it has had all its attempts
            elif self.readers[number] is None:
                again.append(partial(self.read, number))
        run_all(again, _READERS_AT_ONCE)

    def read(self, number: int) -> None:
        """Read one object."""
        try:
            reader = self._wanted[number].open()
            if isinstance(reader, LocalReader):  # which would read what is near together once more
                _, offsets, lengths = self._asked(number, reader)
                blocks = [memoryview(reader.read(*each)) for each in zip(offsets, lengths, strict=True)]
            else:
                blocks = read_many_of([self._asked(number, reader)], 1)[0]
        except StorageError as error:
            if is_remote(self._wanted[number].url):
                self._lose(number, error)
        except ShardsetError:
            return
        else:
            self._hold(number, reader, blocks)

    def _asked(self, number: int, reader: Reader) -> tuple[Reader, list[int], list[int]]:
        plan = self._plans[number]
        if isinstance(reader, RemoteReader):
            reader = replace(reader, limits=replace(reader.limits, gap=0))  # near ranges have been merged already
        return reader, plan.offsets.tolist(), plan.lengths.tolist()

    def _hold(self, number: int, reader: Reader, blocks: list[memoryview]) -> None:
        starts = self._plans[number].offsets.tolist()
        opened = self._wanted[number].open
        self.readers[number] = HeldReader(reader.url, reader.size, reader.identity, opened, starts, blocks)

    def _lose(self, number: int, error: StorageError) -> None:
        self.readers[number] = LostReader(self._wanted[number].url, error)


def _plain(numbers: Numbers) -> list[int]:
    return numbers.tolist() if isinstance(numbers, np.ndarray) else list(numbers)
