"""A store that counts what is asked of another one, to show what is not read."""

from __future__ import annotations

from collections import Counter

from shardset.storage import Store


class CountingStore(Store):
    """Passes everything on to `store` and keeps account.

    It gives no maps, because nobody can count what is read from one: everything must be asked for by range.

    Attributes:
        calls: How often each method was called, by name; a reader's ``read``, ``view`` and ``read_many`` included.
        ranges: Every range asked for, as (url, offset, length), in order; those of `read_many` one by one.
    """

    def __init__(self, store):
        self.store = store
        self.calls = Counter()
        self.ranges = []

    @property
    def bytes_read(self):
        """How many bytes were asked for, all ranges together."""
        return sum(length for _, _, length in self.ranges)

    def reset(self):
        """Begin to count anew."""
        self.calls.clear()
        self.ranges.clear()

    def info(self, url):
        self.calls["info"] += 1
        return self.store.info(url)

    def open(self, url, known=None):
        self.calls["open"] += 1
        return _CountingReader(self, self.store.open(url, known))

    def list(self, url, report=None):
        self.calls["list"] += 1
        return self.store.list(url, report)

    def write(self, url, data, *, expect=None):
        self.calls["write"] += 1
        self.store.write(url, data, expect=expect)

    def close(self):
        self.calls["close"] += 1
        self.store.close()


class _CountingReader:
    def __init__(self, account, reader):
        self.account = account
        self.reader = reader
        self.url = reader.url
        self.size = reader.size
        self.identity = reader.identity

    def read(self, offset, length):
        self._count("read", [offset], [length])
        return self.reader.read(offset, length)

    def view(self, offset, length):
        self._count("view", [offset], [length])
        return self.reader.view(offset, length)

    def read_many(self, offsets, lengths):
        self._count("read_many", offsets, lengths)
        return self.reader.read_many(offsets, lengths)

    def map(self):
        return None

    def _count(self, call, offsets, lengths):
        self.account.calls[call] += 1
        self.account.ranges += [(self.url, int(o), int(n)) for o, n in zip(offsets, lengths, strict=False)]
