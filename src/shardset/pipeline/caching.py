"""Stages that keep what passes them, and from then on give it again without asking their source.

Only a whole pass is kept: not one that was given up, or that a handler ended.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import threading
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from shardset.errors import FormatError, MissingExtraError, StorageError
from shardset.files import lock_file

from .run import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardset.loading.ranks import Share

    class Pickler(Protocol):
        """What turns samples into bytes and back, as the module `pickle` does."""

        def dumps(self, obj: Any, /) -> bytes:
            """Return the bytes of a sample."""

        def loads(self, data: bytes, /) -> Any:
            """Return the sample of bytes."""


_OURS: Final = b"shardset/"
_MARK: Final = _OURS + b"1/mark/"
_SAMPLE: Final = _OURS + b"1/sample/"
_SHARE: Final = struct.Struct(">II")  # how many processes, which of them
_NUMBER: Final = struct.Struct(">Q")  # of the sample, so that keys are in the order of the samples
_FOREIGN_MARK: Final = b"_"  # what webdataset writes at the end of a pass

_databases: dict[tuple[int, str], list[Any]] = {}
"""Databases that are open, by process and path, with how often: LMDB must not open one twice."""
_databases_lock = threading.Lock()


class Cached:
    """A stage that keeps its samples in memory during its first whole pass, and gives them again in later ones.

    What is given is a shallow copy each time, so that stages behind it may put fields into dicts. The samples come in
    the order of the pass that was kept. Each process keeps what it reads itself; one that has another share of the
    data than the one which kept them (a worker that was made from it) reads anew.

    Attributes:
        cached: The samples, or None as long as no pass was whole.
    """

    name = "mcached"

    def __init__(self) -> None:
        self.cached: list[Any] | None = None
        self._share: Share | None = None

    def start(self, source: Iterable[Any], step: Step) -> Iterator[Any]:
        """Begin a pass."""
        if self.cached is not None and self._share == step.run.share:
            yield from map(_copy, self.cached)
            return
        kept = []
        ends = _Ends(step)
        for sample in source:
            kept.append(_copy(sample))
            yield sample
        if not ends.early:
            self.cached, self._share = kept, step.run.share

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Begin a pass outside of any pipeline."""
        return self.start(source, Step(name=self.name))

    __call__ = run

    def __getstate__(self) -> dict[str, Any]:
        return {"cached": None, "_share": None}  # another process reads its own

    def __repr__(self) -> str:
        return "mcached()"


class LMDBCached:
    """A stage that keeps its samples in an LMDB database during its first whole pass, and gives them again later.

    Several processes of one machine may use one database. While it is not complete each writes what it reads; it is
    complete when all of them have been through the same epoch. From then on any number of processes share it: each
    gives those samples whose number in the database, modulo the number of processes, is its own. A complete database
    that webdataset wrote is given in the same way.

    Samples are stored by `pickle`, which runs code on reading: use only databases that you have written yourself.

    Args:
        fname: Folder of the database, made if it is not there.
        map_size: How large it may grow, in bytes; it takes up only what is written.
        pickler: What turns samples into bytes and back.
        chunksize: How many samples are written at a time.

    Raises:
        ValueError: `chunksize` is below 1.
    """

    name = "lmdb_cached"

    def __init__(
        self, fname: str | os.PathLike[str], map_size: float = 1e12, pickler: Pickler = pickle, chunksize: int = 500
    ) -> None:
        if chunksize < 1:
            raise ValueError(f"lmdb_cached: chunksize={chunksize!r} is below 1")
        self.fname = fname
        self.map_size = int(map_size)
        self.pickler = pickler
        self.chunksize = chunksize

    def is_complete(self) -> bool:
        """Tell whether the database has all samples of an epoch.

        Raises:
            MissingExtraError: lmdb is not installed.
        """
        with self._open() as database, database.begin() as transaction:
            return _expected(transaction) is not None

    def start(self, source: Iterable[Any], step: Step) -> Iterator[Any]:
        """Begin a pass.

        Raises:
            FormatError: The database does not have as many samples as it says.
            MissingExtraError: lmdb is not installed.
            StorageError: The database has no room for the samples.
        """
        number, count = _place(step.run.share)
        with self._open() as database:
            # One process alone writes a share; another that has the same one meanwhile only passes its samples on.
            name = f"writing-{number}-of-{count}.lock"
            lock = lock_file(Path(self.fname, name), wait=False)
            try:
                # In one transaction, so that all processes of an epoch come to one answer: whoever begins the next
                # epoch before the others are through takes its part away, and the database is complete for none.
                with database.begin(write=True) as transaction:
                    is_kept = _expected(transaction) is not None
                    if lock is not None and not is_kept:
                        _forget(transaction, number, count)
                if is_kept:
                    yield from self._stored(database, number, count)
                elif lock is not None:
                    yield from self._keep(source, step, database)
                else:
                    yield from source
            finally:
                if lock is not None:
                    lock.release(remove=True)

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Begin a pass outside of any pipeline."""
        return self.start(source, Step(name=self.name))

    __call__ = run

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.pickler, ModuleType):
            return {**self.__dict__, "pickler": self.pickler.__name__}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.pickler, str):  # a module does not pickle itself
            self.pickler = importlib.import_module(self.pickler)

    def _keep(self, source: Iterable[Any], step: Step, database: Any) -> Iterator[Any]:
        number, processes = _place(step.run.share)
        own = _SHARE.pack(processes, number)
        ends = _Ends(step)
        chunk: list[tuple[bytes, bytes]] = []
        count = 0
        for sample in source:
            # Made bytes at once, because stages behind this one may change the sample.
            chunk.append((_SAMPLE + own + _NUMBER.pack(count), self.pickler.dumps(sample)))
            count += 1
            if len(chunk) >= self.chunksize:
                self._write(database, chunk)
                chunk = []
            yield sample
        if not ends.early:
            mark = {"epoch": step.run.epoch, "seed": step.run.seed, "samples": count}
            self._write(database, [*chunk, (_MARK + own, orjson.dumps(mark))])

    def _write(self, database: Any, entries: list[tuple[bytes, bytes]]) -> None:
        import lmdb

        try:
            with database.begin(write=True) as transaction:
                for key, value in entries:
                    transaction.put(key, value)
        except lmdb.MapFullError:
            what = f"the cache may not grow beyond {self.map_size:,} bytes"
            raise StorageError(what, url=os.fspath(self.fname), hint="give a larger map_size") from None

    def _stored(self, database: Any, number: int, count: int) -> Iterator[Any]:
        with database.begin() as transaction:
            expected = _expected(transaction)
            is_foreign = transaction.get(_FOREIGN_MARK) is not None
            found = 0
            for value in _values(transaction, b"" if is_foreign else _SAMPLE):
                if found % count == number:
                    yield self.pickler.loads(value())
                found += 1
        if not is_foreign and found != expected:
            raise FormatError(
                f"the cache holds {found} samples and says that it has {expected}",
                shard=os.fspath(self.fname),
                code="incomplete_cache",
                hint="remove its folder, and the next pass makes it again",
            )

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            import lmdb
        except ImportError:
            raise MissingExtraError("lmdb_cached needs lmdb", extra="lmdb") from None
        path = os.path.realpath(self.fname)
        Path(path).mkdir(parents=True, exist_ok=True)
        key = (os.getpid(), path)
        with _databases_lock:
            entry = _databases.get(key)
            if entry is None:
                entry = _databases[key] = [lmdb.open(path, map_size=self.map_size), 0]
            entry[1] += 1
        try:
            yield entry[0]
        finally:
            if key[0] == os.getpid():  # or a generator that a fork has copied
                with _databases_lock:
                    entry[1] -= 1
                    if not entry[1]:
                        del _databases[key]
                        entry[0].close()

    def __repr__(self) -> str:
        return f"lmdb_cached({os.fspath(self.fname)!r})"


class _Ends:
    """Whether a handler ended the pass, in this stage's sources."""

    def __init__(self, step: Step) -> None:
        self._report = step.run.report
        self._before = self._count()

    def _count(self) -> int:
        return self._report.counts.get("stopped_by_handler", 0)

    @property
    def early(self) -> bool:
        """Whether it did, asked when the source has come to its end."""
        return self._count() != self._before


def _place(share: Share) -> tuple[int, int]:
    """Return the number of this process among all that share the data, and how many these are."""
    return share.rank * share.num_workers + share.worker, share.world_size * share.num_workers


def _copy(sample: Any) -> Any:
    return type(sample)(sample) if type(sample) in {dict, list} else sample


def _expected(transaction: Any) -> int | None:
    """Return how many samples a complete database has, -1 where webdataset wrote it; None if it is not complete."""
    if transaction.get(_FOREIGN_MARK) is not None:
        return -1
    marks: dict[tuple[Any, ...], list[int]] = {}
    cursor = transaction.cursor()
    if cursor.set_range(_MARK):
        for key, value in cursor:
            if not key.startswith(_MARK):
                break
            count, _ = _SHARE.unpack(key[len(_MARK) :])
            mark = orjson.loads(value)
            marks.setdefault((count, mark["seed"], *mark["epoch"]), []).append(mark["samples"])
    return next((sum(samples) for of, samples in marks.items() if len(samples) == of[0]), None)


def _forget(transaction: Any, number: int, count: int) -> None:
    """Delete what this process wrote before, and what an earlier number of processes did."""
    for prefix in (_MARK, _SAMPLE):
        own = prefix + _SHARE.pack(count, number)
        same = prefix + _SHARE.pack(count, 0)[:4]
        cursor = transaction.cursor()
        goes_on = cursor.set_range(prefix)
        while goes_on and cursor.key().startswith(prefix):
            key = cursor.key()
            is_others = key.startswith(same) and not key.startswith(own)
            goes_on = cursor.next() if is_others else cursor.delete() and bool(cursor.key())


def _values(transaction: Any, prefix: bytes) -> Iterator[Any]:
    """Give functions that read the values under a prefix, in the order of the keys."""
    cursor = transaction.cursor()
    if not cursor.set_range(prefix):
        return
    for key in cursor.iternext(keys=True, values=False):
        if not key.startswith(prefix):
            break
        if prefix or (key != _FOREIGN_MARK and not key.startswith(_OURS)):
            yield cursor.value
