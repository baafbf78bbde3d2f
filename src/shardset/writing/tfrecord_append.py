"""A TFRecord file that records are written behind: checked before, grown in place, cut back if that fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from shardset.errors import FormatError, StorageError
from shardset.files import lock_file
from shardset.formats.compression import detect
from shardset.formats.tfrecord import FOOTER_SIZE, HEAD_SIZE, HEADER_SIZE, masked_crc32c, payload_fault
from shardset.index.record_reader import iter_records
from shardset.index.records import scan_plain
from shardset.policy import Report
from shardset.storage.local import LocalReader, local_path

from .shard_files import make_folder, translated, write_all

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .tfrecord_frames import Compression

_NAMES: Final[dict[str, Compression]] = {"": "", "gzip": "GZIP", "zlib": "ZLIB"}


class GrowingFile:
    """A file that is open for writing behind its old end, and locked against all others who do that here.

    Args:
        url: The file on this machine. If there is none, it is made.
        compression: What it must be compressed with; None for what it is.

    Attributes:
        compression: What it is compressed with.
        num_records: Records that were there.
        has_content: Bytes were there.

    Raises:
        ValueError: It is compressed otherwise, or with zlib, of which TensorFlow reads the first stream alone.
        FormatError: It is damaged or cut, or no TFRecord file.
        StorageError: It cannot be opened, or somebody else writes behind it.
    """

    def __init__(self, url: str, compression: Compression | None) -> None:
        self._url = url
        path = Path(local_path(url))
        is_new = not path.exists()
        with translated(url):
            make_folder(path.parent)
            lock = lock_file(path, wait=False)
        if lock is None:
            error = StorageError("somebody else writes behind this file", url=url, hint="wait until that is done")
            error.errno = errno.EBUSY
            raise error
        self._lock = lock
        self._is_new = is_new
        # What goes before anything is written: TensorFlow would see nothing behind a gzip member without records.
        self._replaced: bytes | None = None
        self._is_replaced = False
        try:
            self._size = os.fstat(lock.handle).st_size
            self.has_content = self._size > 0
            self.compression, self.num_records = _check(url, compression)
            if self.compression == "GZIP" and self.has_content and not self.num_records:
                self._replaced = LocalReader(url).read(0, self._size)
            with translated(url):
                os.lseek(lock.handle, 0 if self._replaced is not None else self._size, os.SEEK_SET)
        except BaseException:
            lock.release(remove=is_new)
            raise

    def write(self, data: Buffer) -> int:
        """Write behind what was written before, and return how many bytes."""
        with translated(self._url):
            if self._replaced is not None and not self._is_replaced:
                os.ftruncate(self._lock.handle, 0)
                self._is_replaced = True
            return write_all(self._lock.handle, data)

    def flush(self) -> None:
        """Bring everything to the disk."""
        with translated(self._url):
            os.fsync(self._lock.handle)

    sync = flush

    def publish(self, url: str | None = None) -> None:
        """Let the file go as it is now."""
        del url
        self._lock.release()

    def discard(self) -> None:
        """Cut the file back to what it was, or remove it if it was not there."""
        if self._lock.handle < 0:
            return
        try:
            with translated(self._url):
                if self._replaced is not None and self._is_replaced:
                    os.lseek(self._lock.handle, 0, os.SEEK_SET)
                    write_all(self._lock.handle, self._replaced)
                os.ftruncate(self._lock.handle, self._size)
                os.fsync(self._lock.handle)
        finally:
            self._lock.release(remove=self._is_new)


def _check(url: str, compression: Compression | None) -> tuple[Compression, int]:
    """Return what a file is compressed with, and how many records it has."""
    reader = LocalReader(url)
    if not reader.size:
        return compression or "", 0
    detected = detect(reader.read(0, min(reader.size, HEAD_SIZE)))
    found = _NAMES.get(detected.kind) if detected.kind is not None else None
    if found is not None and compression is not None and found != compression:
        is_now, asked = found or "not compressed", compression or "none"
        raise ValueError(f"{url} is {is_now}, and compression={asked!r} was asked for: leave it out")
    if found == "ZLIB":
        raise ValueError(f"{url} is ZLIB, of which TensorFlow reads the first stream alone: nothing can be appended")
    if found == "GZIP":
        report = Report()
        count = sum(1 for _ in iter_records(url, report=report))
        for _, _, places in report:  # zero bytes: TensorFlow reads nothing behind them
            what = f"nothing was appended: {places[0].message}"
            raise FormatError(what, shard=url, offset=places[0].offset, code="data_after_end", hint="cut them off")
        return found, count
    return "", _check_plain(url, reader)


def _check_plain(url: str, reader: LocalReader) -> int:
    """Follow all headers of a plain file, look at its last payload, and return how many records there are."""
    table = scan_plain(reader)
    fault = next((fault for fault in table.faults if fault.is_error), None)
    if fault is None:
        start, length = int(table.offset[-1]), int(table.length[-1])
        payload = reader.view(start, length)
        stored = int.from_bytes(reader.read(start + length, FOOTER_SIZE), "little")
        if masked_crc32c(payload) != stored:
            fault = payload_fault(start - HEADER_SIZE, stored, payload, len(table) - 1)
    if fault is not None:
        error = fault.error(url)
        if len(table):
            good = _whole_records(len(table) - (fault.code == "bad_payload_checksum"))
            fix = f"shardset fix {quote(local_path(url))} -o GOOD"
            error.hint = f"nothing was appended; {good} before it, which are written to another file by: {fix}"
        raise error
    return len(table)


def _whole_records(number: int) -> str:
    """Return how many whole records stand somewhere, as a phrase."""
    return "1 whole record stands" if number == 1 else f"{number} whole records stand"
