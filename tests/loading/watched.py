"""A store of files that are not mapped, which tells who reads what of shards, and can hold up whoever reads ahead."""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from typing import NamedTuple

from shardset.errors import TransferError
from shardset.storage import LocalStore, Store
from shardset.storage.store import url_name


class Read(NamedTuple):
    """One call of a reader: which shard, how many payloads, and whether another thread than the caller's did it."""

    shard: str
    count: int
    is_ahead: bool


class WatchedStore(Store):
    """Reads files by range.

    Attributes:
        reads: The reads of payloads that have begun.
        under_way: How many of them have not ended.
        gate: Reads in other threads than the one that made the store wait for it.
        broken: File names of what cannot be read.
    """

    def __init__(self):
        self.store = LocalStore(mmap=False)
        self.caller = threading.get_ident()
        self.gate = threading.Event()
        self.gate.set()
        self.reads = []
        self.under_way = 0
        self.broken = set()

    def __reduce__(self):
        return WatchedStore, ()

    def info(self, url):
        return self.store.info(url)

    def open(self, url, known=None):
        return _WatchedReader(self, self.store.open(url, known))

    def list(self, url, report=None):
        return self.store.list(url, report)

    def write(self, url, data, *, expect=None):
        self.store.write(url, data, expect=expect)

    def close(self):
        self.store.close()

    @property
    def ahead(self):
        """The reads of other threads."""
        return [read for read in self.reads if read.is_ahead]

    def do(self, url, count, read):
        """Read, or fail, when it is time."""
        name = url_name(url)
        if name in self.broken:
            raise TransferError("the line was cut", url=url)
        if not count or not name.endswith(".tar"):
            return read()
        is_ahead = threading.get_ident() != self.caller
        self.reads.append(Read(name, count, is_ahead))
        self.under_way += 1
        try:
            if is_ahead:
                assert self.gate.wait(20)
            return read()
        finally:
            self.under_way -= 1


class _WatchedReader:
    def __init__(self, account, reader):
        self.account = account
        self.reader = reader
        self.url = reader.url
        self.size = reader.size
        self.identity = reader.identity

    def read(self, offset, length):
        return self.account.do(self.url, 1, partial(self.reader.read, offset, length))

    def view(self, offset, length):
        return self.account.do(self.url, 1, partial(self.reader.view, offset, length))

    def read_many(self, offsets, lengths):
        read = partial(self.reader.read_many, offsets, lengths)
        # Headers that an index is compared with are no payloads.
        return self.account.do(self.url, 0 if set(map(int, lengths)) == {512} else len(offsets), read)

    def map(self):
        return None


def until(condition):
    """Wait for what other threads bring about."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def given_in_a_fork(loader, store):
    """Return the paths that a loader gives in a forked child, to which a store gives all; none if it waits too long."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        threading.Timer(20, os._exit, [1]).start()
        store.gate = threading.Event()
        store.gate.set()
        os.write(theirs, json.dumps([entry.path for entry in loader]).encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with os.fdopen(ours, "rb") as pipe:
        return json.loads(pipe.read() or b"[]")
