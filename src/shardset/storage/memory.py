"""Objects in this process's memory, for tests and for what is made and read in one go."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from shardset.errors import NotFoundError

from .store import ObjectInfo, Store, check_expected, iter_buffers, slice_view, slice_views, url_scheme

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .store import Numbers


class MemoryReader:
    """One object in memory: a `Reader`. Writing to the url anew does not change it."""

    __slots__ = ("_whole", "identity", "size", "url")

    def __init__(self, url: str, content: bytes, identity: str) -> None:
        self.url = url
        self.size = len(content)
        self.identity = identity
        self._whole = memoryview(content)

    def read(self, offset: int, length: int) -> bytes:
        """Copy `length` bytes from byte `offset` on, as `Reader.read` says."""
        return bytes(self.view(offset, length))

    def view(self, offset: int, length: int) -> memoryview:
        """Give `length` bytes from byte `offset` on, as `Reader.view` says."""
        return slice_view(self.url, self._whole, offset, length)

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """Give many ranges, as `Reader.read_many` says."""
        return slice_views(self.url, self._whole, offsets, lengths)

    def map(self) -> memoryview:
        """Give the whole object, as `Reader.map` says."""
        return self._whole


class MemoryStore(Store):
    """A place of its own: two stores share nothing, and a pickled one takes a copy of its objects along.

    Urls are ``memory://bucket/name``, with any number of slashes in the name; folders are not things of their own.
    The identity of an object is a digest of its bytes.
    """

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, str]] = {}

    def info(self, url: str) -> ObjectInfo:
        """Look up the object, as `Store.info` says."""
        content, identity = self._find(url)
        return ObjectInfo(url, len(content), identity)

    def open(self, url: str, known: ObjectInfo | None = None) -> MemoryReader:
        """Open the object as it is now, as `Store.open` says."""
        del known
        return MemoryReader(url, *self._find(url))

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Find the objects below a folder, as `Store.list` says; nothing is ever passed over."""
        del report
        prefix = url.rstrip("/") + "/"
        # A copy first: another thread may write meanwhile.
        found = [(name, stored) for name, stored in self._objects.copy().items() if name.startswith(prefix)]
        if not found:
            raise NotFoundError("nothing lies below this folder in memory", url=url)
        for name, (content, identity) in sorted(found, key=lambda pair: os.fsencode(pair[0])):
            yield ObjectInfo(name, len(content), identity)

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> None:
        """Keep a copy of `data`, as `Store.write` says.

        Raises:
            ValueError: The url does not begin with ``memory://``.
        """
        if url_scheme(url) != "memory":
            raise ValueError(f"{url}: a MemoryStore keeps memory:// urls only")
        content = b"".join(iter_buffers(data))
        if expect is not None:
            check_expected(self, url, expect)
        self._objects[url] = content, hashlib.blake2b(content, digest_size=16).hexdigest()

    def close(self) -> None:
        """Do nothing: the objects are the store."""

    def _find(self, url: str) -> tuple[bytes, str]:
        try:
            return self._objects[url]
        except KeyError:
            raise NotFoundError("no such object in memory", url=url) from None
