"""`TFRecordWriter`: records into one TFRecord file or a set of them, whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from os import getpid
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from shardset.errors import StorageError, without_secrets
from shardset.formats.tfrecord import FRAME_SIZE
from shardset.storage.anywhere import store_for
from shardset.storage.store import is_remote, url_scheme

from .shard_files import PendingFile, ShardNames
from .tfrecord_frames import FrameStream, named_compression, parse_compression

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from shardset.storage.store import Store

    from .tfrecord_append import GrowingFile

_BATCH: Final = 4096
_BATCH_BYTES: Final = 1 << 20
_SET_BYTES: Final = 16 << 20
"""What is gathered for a set whose shards are all open, so that each is written in pieces of some size."""
_HELD: Final = 64
_NOBODY: Final = -1


class TFRecordWriter:
    """Writes TFRecord files, which appear under their names when the writer is closed.

    ``out.tfrecord`` is one file. ``out@64.tfrecord`` is a set of 64, ``out-00000-of-00064.tfrecord`` and so on, to
    which records are dealt in turn: record number `i` is number ``i // 64`` of shard ``i % 64``. With `max_records` or
    `max_bytes` the records stand in blocks, one shard after the other, as many shards as that takes; their names, which
    say how many, are given in the end.

    Everything is written under hidden names, flushed to the disk, and renamed by `close`, which the end of a
    ``with`` block calls. If the block raises, or a disk is full, nothing is left behind and what stood under the names
    before stands there still. Files of a set are renamed one by one: a process that is killed while it does leaves
    whole files, whose names say that some of the set are missing. Addresses elsewhere (``s3://``, ``gs://``, ``az://``)
    are written to this machine's folder for temporary files first, and sent by `close`.

    With `append`, records go behind those of one file on this machine, in place, after a check of that file: every
    header is followed to the end, and the last payload compared with its checksum; a gzip file is read whole, and what
    is added is a gzip member of its own. What `flush` has written can be read at once. If the ``with`` block raises,
    the file is cut back to what it was. A process that is killed leaves the old records and behind them some new ones,
    the last of which may be cut: that is found by every reader here, and by the next `append`, which refuses. A file
    that is begun with `append` grows under its own name in the same way.

    A writer belongs to one thread at a time, and to the process that made it.

    Args:
        path: A path, a url, or a pattern with the number of shards.
        max_records: The most records in a shard.
        max_bytes: The most bytes of a shard, framing included, before compression. One larger record has a shard of
            its own.
        compression: ``"GZIP"`` or ``"ZLIB"``, in any case, as TensorFlow reads it, or ``""``; by default what the
            suffix says (``.gz``, ``.zlib``), or none. With `append` it is that of the file.
        append: Write behind the records that are there.
        store: Takes what goes elsewhere; by default the place that the scheme names.

    Attributes:
        urls: The files, once they are there.

    Raises:
        ValueError: Arguments that contradict each other, or a compression that TensorFlow does not read.
        FormatError: With `append`: the file is damaged or cut, or is no TFRecord file.
        StorageError: The file cannot be made, or shards of a set of another size have these names.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_records: int | None = None,
        max_bytes: int | None = None,
        compression: str | None = None,
        append: bool = False,
        store: Store | None = None,
    ) -> None:
        self._owner = _NOBODY
        url = os.fspath(path)
        for name, number in (("max_records", max_records), ("max_bytes", max_bytes)):
            if number is not None and number <= 0:
                raise ValueError(f"{name}={number}: it must be positive")
        self._compression = parse_compression(named_compression(url) if compression is None else compression)
        self._is_rolled = max_records is not None or max_bytes is not None
        self._names = ShardNames(url, is_set=self._is_rolled)
        self._check_arguments(url, append=append)
        self._most_records = max_records if max_records is not None else 1 << 62
        self._most_bytes = max_bytes if max_bytes is not None else 1 << 62
        self._store = store_for(store, url)
        self._files: list[PendingFile | GrowingFile] = []
        self._streams: list[FrameStream] = []
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._limit = _BATCH_BYTES
        self._first = 0  # number of the first pending record in its shard, or in the set of all if they are dealt
        self._dealt = 1 if self._is_rolled else self._names.total or 1
        self._failure: BaseException | None = None
        self.urls: tuple[str, ...] = ()
        if append:
            self._open_grown(url, compression)
        else:
            self._names.refuse_others()
            self._open_pending()
        self._owner = getpid()

    def _check_arguments(self, url: str, *, append: bool) -> None:
        if append and (self._is_rolled or not self._names.is_one):
            raise ValueError("append=True writes behind one file; a set of shards is written anew")
        if append and (is_remote(url) or url_scheme(url) == "memory"):
            raise ValueError(f"{without_secrets(url)}: append=True needs a file of this machine")
        if self._is_rolled and self._names.total is not None:
            raise ValueError(
                f"{url} says how many shards there are; max_records and max_bytes make as many as it takes"
            )
        if not self._is_rolled and self._names.total is None:
            raise ValueError(f"{url} leaves open how many shards there are: give max_records or max_bytes")
        if url_scheme(url) in {"http", "https"}:
            raise ValueError(f"{without_secrets(url)}: web servers are read only; write to a folder or a bucket")

    def _open_pending(self) -> None:
        urls = [self._names.first_url] if self._is_rolled else self._names.urls(self._dealt)
        if len(urls) > 1:
            self._limit = _SET_BYTES
        try:
            for url in urls:
                self._open_next(url, holds=len(urls) <= _HELD)
        except BaseException:
            self._discard_files()
            raise

    def _open_next(self, url: str, *, holds: bool = True) -> None:
        file = PendingFile(url, self._store, holds=holds)
        self._files.append(file)
        self._streams.append(FrameStream(file, self._compression))

    def _open_grown(self, url: str, compression: str | None) -> None:
        from .tfrecord_append import GrowingFile  # noqa: PLC0415 - reading is not needed to write anew

        file = GrowingFile(url, None if compression is None else self._compression)
        self._compression = file.compression
        self._files.append(file)
        self._streams.append(FrameStream(file, self._compression, may_be_nothing=file.has_content))
        self._first = file.num_records

    @property
    def num_records(self) -> int:
        """How many records were written."""
        return sum(stream.records for stream in self._streams) + len(self._pending)

    def write(self, payload: Buffer | Mapping[str, Any]) -> tuple[int, int]:
        """Write one record.

        Records are gathered, so an error of the disk may come with a later one, with `flush` or with `close`.

        Args:
            payload: Its bytes, or the features of an Example, as `encode_example` takes them.

        Returns:
            The number of the shard, and of the record in it; both count from 0. With `append` the records that were
            there count too.

        Raises:
            ValueError: The writer is closed, or the features cannot be encoded.
            TypeError: It is neither.
            StorageError: The disk is full, or writing failed; nothing is left of what was written.
        """
        if self._owner != getpid():
            self._refuse()
        if type(payload) is not bytes:
            payload = _encode(payload)
        pending = self._pending
        length = len(payload)
        if self._is_rolled:
            self._make_room(length + FRAME_SIZE)
            pending = self._pending
        number = self._first + len(pending)
        pending.append(payload)
        self._pending_bytes += length
        if self._pending_bytes >= self._limit or len(pending) >= _BATCH * self._dealt:
            self._write_pending()
        if self._dealt == 1:
            return len(self._streams) - 1, number
        return number % self._dealt, number // self._dealt

    def flush(self) -> None:
        """Write everything that was gathered. With `append`, others can read it then, also after a loss of power.

        Raises:
            ValueError: The writer is closed.
            StorageError: The disk is full, or writing failed.
        """
        if self._owner != getpid():
            self._refuse()
        self._write_pending()
        try:
            for stream, file in zip(self._streams, self._files, strict=True):
                stream.flush()
                file.flush()
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """Write the rest, and give the files their names. A second time does nothing.

        Raises:
            StorageError: The disk is full, or writing failed.
        """
        if self._owner == _NOBODY and self._failure is None:
            return
        if self._owner != getpid():
            self._refuse()
        self._write_pending()
        try:
            for stream in self._streams:
                stream.finish()
            urls = self._names.urls(len(self._files))
            for file in self._files:
                file.sync()
            for file, url in zip(self._files, urls, strict=True):
                file.publish(url)
        except BaseException as error:
            self._fail(error)
            raise
        self._owner = _NOBODY
        self.urls = tuple(urls)

    def discard(self) -> None:
        """Write nothing after all: everything is then as it was before the writer was made, and this one is closed."""
        if self._owner == getpid():
            self._owner = _NOBODY
            self._pending.clear()
            self._discard_files()

    def _make_room(self, length: int) -> None:
        """Begin the next shard if the last one has no room for so many bytes of a record."""
        stream, count = self._streams[-1], len(self._pending)
        size = stream.size + self._pending_bytes + count * FRAME_SIZE
        if stream.records + count == self._most_records or (size and size + length > self._most_bytes):
            self._write_pending()
            try:
                stream.finish()
                self._files[-1].sync()
                self._open_next(self._names.first_url)
            except BaseException as error:
                self._fail(error)
                raise
            self._first = 0

    def _write_pending(self) -> None:
        pending = self._pending
        if not pending:
            return
        try:
            if self._dealt == 1:
                self._streams[-1].write(pending)
            else:
                for shard, stream in enumerate(self._streams):
                    if part := pending[(shard - self._first) % self._dealt :: self._dealt]:
                        stream.write(part)
        except BaseException as error:
            self._fail(error)
            raise
        self._first += len(pending)
        self._pending = []
        self._pending_bytes = 0

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.discard()

    def _discard_files(self) -> None:
        files, self._files = self._files, []
        with ExitStack() as stack:  # all of them, whichever cannot be removed
            for file in files:
                stack.callback(file.discard)

    def _refuse(self) -> NoReturn:
        if self._failure is not None:
            where = without_secrets(self._names.first_url)
            raise StorageError("not written: the writer failed before", url=where) from self._failure
        if self._owner == _NOBODY:
            raise ValueError(f"{without_secrets(self._names.first_url)}: the writer is closed")
        raise ValueError(
            f"{without_secrets(self._names.first_url)}: this writer belongs to the process that made it; "
            "make one in each process, with a name of its own"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a writer cannot be pickled: make one in each process, with a name of its own")

    def __del__(self) -> None:
        if getattr(self, "_owner", _NOBODY) == getpid():
            warnings.warn(
                f"{self!r} was not closed, so nothing was written", ResourceWarning, stacklevel=1, source=self
            )
            self.discard()

    def __repr__(self) -> str:
        return f"TFRecordWriter({without_secrets(self._names.first_url)!r})"


def _encode(payload: Buffer | Mapping[str, Any]) -> bytes:
    """Return bytes that nobody can change any more."""
    if isinstance(payload, Mapping):
        from shardset.formats.example_encode import encode_example  # noqa: PLC0415 - not needed for bytes

        return encode_example(payload)
    if isinstance(payload, str):
        raise TypeError("text is written as bytes: encode it first")
    return bytes(memoryview(payload))
