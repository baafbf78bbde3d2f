"""Reads one object through the cache: which blocks a range lies in, and what is put together from them."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from shardset.errors import ChangedError, RangeIgnoredError

from .cache_download import get_blocks
from .cache_entry import EntryInfo, entry_name, shown_url
from .cache_files import DamagedEntryError
from .store import check_range, check_ranges

if TYPE_CHECKING:
    import threading
    from collections.abc import Hashable, Sequence

    from .cache import CachedStore
    from .cache_files import Block
    from .store import Numbers, ObjectInfo, Reader

_NO_BYTES: Final = memoryview(b"")
_GROUP: Final = 64
"""So many blocks are open at once for one call, with a map and a descriptor each."""
_REST: Final = 1.0
"""So many seconds an object that could not be cached is read from its place before that is tried again."""
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """One version of an object, cut into blocks of `step` bytes; the last may be shorter.

    Attributes:
        info: The version.
        step: Bytes of a block, at least 1. One as large as the object makes it one block.
    """

    info: ObjectInfo
    step: int

    @property
    def is_whole(self) -> bool:
        """Tell whether there is one block at most."""
        return self.step >= self.info.size

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return -(-self.info.size // self.step)

    @property
    def key(self) -> Hashable:
        """What tells one version of an object from all others."""
        return self.info.url, self.info.identity, self.info.size

    def length(self, number: int) -> int:
        """Return the bytes of a block."""
        return min(self.step, self.info.size - number * self.step)

    def name(self, number: int) -> str:
        """Return the name of a block's entry."""
        info = self.info
        return entry_name(info.url, info.identity, info.size, number * self.step, self.length(number))

    def entry(self, number: int) -> EntryInfo:
        """Return what a block's entry will say of itself."""
        info = self.info
        return EntryInfo(shown_url(info.url), info.identity, info.size, number * self.step, self.length(number))

    def stated(self, number: int) -> str | None:
        """Return the digest that the bytes of a block must have, if its place states one."""
        return self.info.digest if self.length(number) == self.info.size else None


def cut_object(info: ObjectInfo, step: int | None) -> Cut:
    """Cut an object into blocks, or leave it whole."""
    return Cut(info, max(1, info.size if step is None else min(step, info.size)))


class CachedReader:
    """One version of one object: a `Reader` that downloads what is read, and reads it from the cache.

    It holds nothing; its views hold the blocks that they lie in. What cannot be cached is read from its place.

    Args:
        store: The cache.
        cut: The object.
        source: Its reader, if it is open already.
    """

    __slots__ = ("_direct_until", "_name", "_source", "_store", "cut", "identity", "size", "url")

    def __init__(self, store: CachedStore, cut: Cut, source: Reader | None) -> None:
        self.url = cut.info.url
        self.size = cut.info.size
        self.identity = cut.info.identity
        self._store = store
        self._source = source
        self._direct_until = 0.0
        self.cut = cut
        self._name = cut.name(0) if cut.is_whole else None

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a reader cannot be pickled; pickle the store and open {shown_url(self.url)} again")

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from byte `offset` on, as `Reader.read` says."""
        return bytes(self.view(offset, length))

    def view(self, offset: int, length: int) -> memoryview:
        """Give `length` bytes from byte `offset` on, as `Reader.view` says; a view, if they lie in one block."""
        check_range(self.url, self.size, offset, length)
        if not length:
            return _NO_BYTES
        if self._name is None:
            return self.read_many([offset], [length])[0]
        whole = self._whole()
        if whole is None:
            return self.source().view(offset, length)
        self._store.here().count(bytes_served=length)
        return whole[offset : offset + length]

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """Give many ranges, as `Reader.read_many` says; views, as far as each lies in one block."""
        starts, ends = check_ranges(self.url, self.size, offsets, lengths)
        total = sum(ends) - sum(starts)
        if not total:
            return [_NO_BYTES] * len(starts)
        while True:
            if self._name is not None:
                whole = self._whole()
                if whole is None:
                    return self.source().read_many(offsets, lengths)
                self._store.here().count(bytes_served=total)
                return [whole[start:end] for start, end in zip(starts, ends, strict=True)]
            try:
                return self._assemble(starts, ends)
            except RangeIgnoredError as error:
                self._read_whole_after(error)

    def map(self) -> memoryview | None:
        """Give the whole object, downloaded if need be, as `Reader.map` says; None where it is cut into blocks."""
        if not self.size:
            return _NO_BYTES
        if self._name is None:
            return None
        whole = self._whole()
        return self.source().map() if whole is None else whole

    def source(self) -> Reader:
        """Return the reader of the object in its own place.

        Raises:
            ChangedError: What is there now is another version.
        """
        if self._source is None:
            found = self._store.store.open(self.url, self.cut.info)
            if (found.identity, found.size) != (self.identity, self.size):
                raise ChangedError(
                    "the object is no longer the version that was asked for",
                    url=self.url,
                    hint="look at it again: what is known of it is out of date",
                )
            self._source = found
        return self._source

    def fetch(self, stop: threading.Event) -> None:
        """Download all that the cache lacks of the object, block by block, until `stop` is set.

        Raises:
            CancelledError: It was set.
            StorageError: The download failed.
        """
        while True:
            cut = self.cut
            try:
                for first in range(0, cut.count, _GROUP):
                    numbers = range(first, min(first + _GROUP, cut.count))
                    if None in get_blocks(self._store.here(), cut, numbers, self.source, stop=stop).values():
                        return  # the rest would find no room either
            except RangeIgnoredError as error:
                self._read_whole_after(error)
            else:
                return

    def _read_whole_after(self, error: RangeIgnoredError) -> None:
        """Go on where a range was ignored: the place may give the whole object in one answer.

        Raises:
            RangeIgnoredError: It does not.
        """
        if self._name is not None or getattr(self.source(), "stream", None) is None:
            raise error
        self.cut = cut_object(self.cut.info, None)
        self._name = self.cut.name(0)

    def _whole(self) -> memoryview | None:
        """Return all bytes as a view of the one block, or None if they must be read from their place for now."""
        if time.monotonic() < self._direct_until:
            return None
        for _ in range(_TRIES):
            block = get_blocks(self._store.here(), self.cut, (0,), self.source)[0]
            if block is None:
                break
            view = self._view_of(block)
            if view is not None:
                return view
        self._direct_until = time.monotonic() + _REST
        return None

    def _view_of(self, block: Block) -> memoryview | None:
        try:
            return block.view()
        except DamagedEntryError as error:
            self._store.here().drop(block.name, self.url, str(error))
            return None

    def _assemble(self, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        """Answer from blocks: by views where a range lies in one of them, from a buffer of its own otherwise."""
        cut = self.cut
        step = cut.step
        pieces: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for number in range(start // step, -(-end // step) if end > start else 0):
                pieces[number].append((at, max(start, number * step), min(end, (number + 1) * step)))
        numbers = sorted(pieces)
        is_many = len(numbers) > _GROUP  # their views would hold too many descriptors
        answers = [_NO_BYTES] * len(starts)
        buffers: dict[int, memoryview] = {}

        def place(at: int, start: int, end: int, found: memoryview) -> None:
            if end - start == ends[at] - starts[at]:
                answers[at] = memoryview(bytes(found)) if is_many else found
                return
            if at not in buffers:
                buffers[at] = memoryview(bytearray(ends[at] - starts[at]))
                answers[at] = buffers[at].toreadonly()
            buffers[at][start - starts[at] : end - starts[at]] = found

        for first in range(0, len(numbers), _GROUP):
            group = numbers[first : first + _GROUP]
            blocks = get_blocks(self._store.here(), cut, group, self.source)
            direct = []
            for number in group:
                block = blocks.pop(number)
                view = None if block is None else self._view_of(block)
                if view is None:
                    direct += pieces[number]
                    continue
                for at, start, end in pieces[number]:
                    place(at, start, end, view[start - number * step : end - number * step])
                self._store.here().count(bytes_served=sum(end - start for _, start, end in pieces[number]))
            if direct:
                found = self.source().read_many([start for _, start, _ in direct], [e - s for _, s, e in direct])
                for piece, view in zip(direct, found, strict=True):
                    place(*piece, view)
        return answers
