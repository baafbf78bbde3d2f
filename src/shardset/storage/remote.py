"""A reader of one object that lives elsewhere: every answer is fetched, near ranges together, long ones in parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .planner import ReadLimits, int64_ranges, new_buffer, read_ahead, read_ranges
from .store import ObjectInfo, check_range, check_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .planner import Fetch
    from .store import Numbers


@dataclass(frozen=True, slots=True, eq=False)
class RemoteReader:
    """One version of a remote object: a `Reader` over a `Fetch`.

    Attributes:
        info: The object; `size` and `identity` are what every answer is checked against, by `fetch`.
        fetch: Fills a view with bytes of exactly this version, or raises.
        limits: How reads are merged and run side by side.
        stream: Where the place can send the whole object in one answer: gives its bytes to a function piece by piece,
            in order. None otherwise.
    """

    info: ObjectInfo
    fetch: Fetch
    limits: ReadLimits = field(default_factory=ReadLimits)
    stream: Callable[[Callable[[memoryview], object]], None] | None = None

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
        return read_ranges(self.fetch, *int64_ranges([offset], [offset + length]), self.limits)[0]

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """Read many ranges, near ones together and all side by side, as `Reader.read_many` says."""
        starts, ends = check_ranges(self.url, self.size, offsets, lengths)
        return read_ranges(self.fetch, *int64_ranges(starts, ends), self.limits)

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
