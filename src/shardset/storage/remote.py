"""Readers of objects that live elsewhere: every answer is fetched, near ranges together, long ones in parts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from shardset.errors import StorageError

from .planner import ReadLimits, int64_ranges, new_buffer, prepare_reads, read_ahead, read_ranges
from .store import ObjectInfo, check_range, check_ranges
from .threads import run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .planner import Fetch, Reads
    from .store import Numbers, Reader

    FetchAll = Callable[[Sequence["Fetching"], int], None]
    """Fills many views, at most so many at once, or raises what failed first. Nothing writes into them any more when it
    has returned or raised."""

_READERS_KEPT: Final = 4096


class Fetching(NamedTuple):
    """A range that is to be fetched.

    Attributes:
        info: The object, in the version that it must have.
        offset: First byte.
        view: What is filled, all of it.
    """

    info: ObjectInfo
    offset: int
    view: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class RemoteReader:
    """One version of a remote object: a `Reader` over a `Fetch`.

    Attributes:
        info: The object; `size` and `identity` are what every answer is checked against, by `fetch`.
        fetch: Fills a view with bytes of exactly this version, or raises.
        limits: How reads are merged and run side by side.
        stream: Where the place can send the whole object in one answer: gives its bytes to a function piece by piece,
            in order. None otherwise.
        fetch_all: Where the place can fetch many ranges, of many objects, in a better way than by a thread for each.
            None otherwise.
    """

    info: ObjectInfo
    fetch: Fetch
    limits: ReadLimits = field(default_factory=ReadLimits)
    stream: Callable[[Callable[[memoryview], object]], None] | None = None
    fetch_all: FetchAll | None = None

    @property
    def url(self) -> str:
        """The object's address."""
        return self.info.url

    @property
    def size(self) -> int:
        """The object's length in bytes."""
        return self.info.size

    @property
    def identity(self) -> str:
        """As in `ObjectInfo`."""
        return self.info.identity

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from byte `offset` on, as `Reader.read` says."""
        return bytes(self.view(offset, length))

    def view(self, offset: int, length: int) -> memoryview:
        """Read `length` bytes from byte `offset` on into a buffer of their own, as `Reader.view` says."""
        check_range(self.url, self.size, offset, length)
        if 0 < length <= self.limits.most:
            buffer = new_buffer(length)
            self.fetch(offset, buffer)
            return buffer.toreadonly()
        return self.read_many([offset], [length])[0]

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """Read many ranges, near ones together and all side by side, as `Reader.read_many` says."""
        if self.fetch_all is None:
            checked = int64_ranges(*check_ranges(self.url, self.size, offsets, lengths))
            return read_ranges(self.fetch, *checked, self.limits)
        reads = self.prepare(offsets, lengths)
        self.fetch_all([Fetching(self.info, *part) for part in reads.parts], self.limits.at_once)
        return reads.hand_out()

    def map(self) -> None:
        """Return None: what is elsewhere cannot be mapped."""
        return

    def iter_pieces(self, offset: int = 0) -> Iterator[memoryview]:
        """Read from byte `offset` to the end, piece by piece in order, reading ahead within the limits.

        Raises:
            As `read`.
        """
        length = max(0, self.size - offset)
        check_range(self.url, self.size, offset, length)
        return read_ahead(self.fetch, offset, length, self.limits)

    def prepare(self, offsets: Numbers, lengths: Numbers) -> Reads:
        """Plan how to read many ranges.

        Raises:
            FormatError: As `read_many`, for ranges that are not there.
        """
        return prepare_reads(*int64_ranges(*check_ranges(self.url, self.size, offsets, lengths)), self.limits)


def read_many_of(asked: Sequence[tuple[Reader, Numbers, Numbers]], at_once: int) -> list[list[memoryview]]:
    """Read many ranges of several objects, all side by side.

    Args:
        asked: A reader, offsets and lengths each.
        at_once: How many readers that are not of one place are asked at the same time.

    Returns:
        What `Reader.read_many` gives for each.

    Raises:
        As `Reader.read_many`, for the first that fails; its error says which it is.
    """
    answers: list[list[memoryview]] = [[] for _ in asked]
    together: dict[FetchAll, list[tuple[int, RemoteReader, Reads]]] = {}
    jobs: list[Callable[[], None]] = []

    def read(number: int) -> None:
        reader, offsets, lengths = asked[number]
        answers[number] = reader.read_many(offsets, lengths)

    for number, (reader, offsets, lengths) in enumerate(asked):
        if isinstance(reader, RemoteReader) and reader.fetch_all is not None:
            together.setdefault(reader.fetch_all, []).append((number, reader, reader.prepare(offsets, lengths)))
        elif getattr(reader, "is_held", False):
            read(number)  # not worth a thread: it is in memory
        else:
            jobs.append(partial(read, number))
    for fetch_all, found in together.items():
        parts = [Fetching(reader.info, *part) for _, reader, reads in found for part in reads.parts]
        fetch_all(parts, max(reader.limits.at_once for _, reader, _ in found))
        for number, _, reads in found:
            answers[number] = reads.hand_out()
    run_all(jobs, at_once)
    return answers


class OpenReaders:
    """The readers that a store gave lately, by url: which version each object had when it was last looked at.

    Needs no lock: each step on a dict is atomic, and two threads that do the same thing do it twice.

    Args:
        ask: Asks the place about an object, as `Store.info` does.
        make: Makes a reader of one version.
    """

    def __init__(self, ask: Callable[[str], ObjectInfo], make: Callable[[ObjectInfo], RemoteReader]) -> None:
        self._ask = ask
        self._make = make
        self._readers: OrderedDict[str, RemoteReader] = OrderedDict()

    def look(self, url: str) -> ObjectInfo:
        """Ask about an object, and let `open` give the version that is there now."""
        try:
            info = self._ask(url)
        except StorageError:
            self.forget(url)
            raise
        reader = self._readers.get(url)
        if reader is None or reader.info != info:
            self._keep(info)
        return info

    def open(self, url: str, known: ObjectInfo | None) -> RemoteReader:
        """Give a reader of the version that is known, or else of the one that was seen last."""
        reader = self._readers.get(url)
        if known is not None and (reader is None or reader.info != known):
            return self._keep(known)
        if reader is None:
            info = self.look(url)
            reader = self._readers.get(url) or self._keep(info)  # another thread may just have dropped it
        return reader

    def forget(self, url: str) -> None:
        """Forget the version of one object: it is no longer that."""
        self._readers.pop(url, None)

    def clear(self) -> None:
        """Forget all versions."""
        self._readers.clear()

    def _keep(self, info: ObjectInfo) -> RemoteReader:
        reader = self._readers[info.url] = self._make(info)
        while len(self._readers) > _READERS_KEPT:
            try:
                self._readers.popitem(last=False)
            except KeyError:
                break  # other threads have emptied it meanwhile
        return reader
