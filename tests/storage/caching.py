"""A store for tests of the cache: objects made from their urls, read piece by piece, with an account on disk."""

from __future__ import annotations

import hashlib
import os
import random
import time
from functools import lru_cache, partial
from pathlib import Path

from shardset.errors import NotFoundError, RangeIgnoredError, TransferError
from shardset.files import lock_file
from shardset.storage import ObjectInfo, Store
from shardset.storage.cache_files import STATE, STATE_BYTES, iter_files
from shardset.storage.planner import ReadLimits
from shardset.storage.remote import RemoteReader

PIECE = 1 << 14


@lru_cache(64)
def content(url, size, version=1):
    """Return the bytes of an object."""
    return random.Random(f"{url} {version}").randbytes(size)


class MadeStore(Store):
    """Any url names an object of `size` bytes. It is picklable, and all processes see the same objects.

    Args:
        log: File to which every fetch adds a line: what, url, offset, length, pid.
        size: Bytes of each object.
        delay: Seconds that each piece takes.
        fault: ``"offline"``, ``"no_ranges"``, ``"no_ranges_no_stream"``, ``"broken"`` (after two pieces), ``"wrong"``
            (other bytes than those whose digest is stated).
    """

    def __init__(self, log, *, size=100_000, delay=0.0, version=1, fault="", digest=None, identity=None):
        self.log = Path(log)
        self.size = size
        self.delay = delay
        self.version = version
        self.fault = fault
        self.digest = digest
        self.identity = identity

    def bytes_of(self, url):
        return content(url, self.size, self.version)

    def info(self, url):
        self._note("info", url, 0, 0)
        if self.fault == "offline":
            raise TransferError("no network", url=url)
        if url.endswith("missing"):
            raise NotFoundError("no such object", url=url)
        digest = None
        if self.digest:
            digest = f"{self.digest}:{hashlib.new(self.digest, self.bytes_of(url)).hexdigest()}"
        identity = f"v{self.version}" if self.identity is None else self.identity
        return ObjectInfo(url, self.size, identity, digest)

    def open(self, url, known=None):
        info = known or self.info(url)
        stream = None if self.fault == "no_ranges_no_stream" else partial(self._stream, url)
        return RemoteReader(info, partial(self._fetch, url), ReadLimits(gap=0, most=PIECE, at_once=2), stream)

    def list(self, url, report=None):
        raise NotImplementedError

    def write(self, url, data, *, expect=None):
        raise NotImplementedError

    def close(self):
        pass

    def fetches(self, url=None):
        """Return (offset, length) of all that was fetched, in order; of one url or of all."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [line.split() for line in lines]
        return [(int(at), int(count)) for what, of, at, count, _ in found if what == "fetch" and url in (None, of)]

    def bytes_fetched(self, url=None):
        return sum(length for _, length in self.fetches(url))

    def _note(self, what, url, offset, length):
        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, f"{what} {url} {offset} {length} {os.getpid()}\n".encode())
        os.close(handle)

    def _fetch(self, url, offset, view):
        if self.fault == "offline":
            raise TransferError("no network", url=url)
        if self.fault.startswith("no_ranges"):
            raise RangeIgnoredError("gives the whole object", url=url)
        if self.fault == "broken" and offset >= 2 * PIECE:
            raise TransferError("the connection broke", url=url)
        if self.delay:
            time.sleep(self.delay)
        view[:] = self.bytes_of(url)[offset : offset + len(view)]
        if self.fault == "wrong" and offset == 0:
            view[0] ^= 1
        self._note("fetch", url, offset, len(view))

    def _stream(self, url, take):
        whole = self.bytes_of(url)
        for offset in range(0, len(whole), PIECE):
            if self.delay:
                time.sleep(self.delay)
            take(memoryview(whole)[offset : offset + PIECE])
        self._note("fetch", url, 0, len(whole))


def bytes_on_disk(folder):
    """Return the bytes of all files of a cache, as anybody can see them who keeps others from changing it meanwhile."""
    folder = Path(folder)
    if not (folder / STATE).exists():
        return 0
    with lock_file(folder / STATE):
        return STATE_BYTES + sum(status.st_size for _, _, status in iter_files(folder))


def files_of(folder, suffix):
    """Return the files of a cache of one kind."""
    return sorted(Path(folder).glob(f"*{suffix}"))


# What other processes run; those that are spawned find it here, by name.


def read_all(store, urls, seed=None):
    """Read objects of a `MadeStore` whole; raise if a byte is wrong."""
    urls = list(urls)
    if seed is not None:
        random.Random(seed).shuffle(urls)
    for url in urls:
        reader = store.open(url)
        assert reader.read(0, reader.size) == content(url, reader.size)


def read_and_send(pipe, store, urls):
    """Read objects, and send what the store has counted."""
    read_all(store, urls)
    pipe.send(store.stats())


def watch(folder, pipe, stop):
    """Look at the bytes of a cache until told to stop; send how often, and the most."""
    pipe.send("ready")
    looks = most = 0
    while not stop.is_set():
        most = max(most, bytes_on_disk(folder))
        looks += 1
        time.sleep(0.0005)
    pipe.send((looks, most))
