"""`fix`: copies what is good of damaged shards to new files. Nothing is ever changed in place."""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import orjson
from crc32c import crc32c

from shardset.dataset.discover import find_shards
from shardset.errors import FormatError, StorageError, without_secrets
from shardset.files import open_atomic, write_atomic
from shardset.formats.tfrecord import FOOTER_SIZE, HEADER_SIZE
from shardset.formats.tfrecord_resync import frame_header, mask_crc
from shardset.formats.tfrecord_salvage import Mended, Records
from shardset.storage.anywhere import store_for
from shardset.storage.local import local_path
from shardset.storage.store import is_remote, url_name

from .checking import checkable, shift_progress
from .findings import CODES, Finding, make_finding
from .tfrecord_checks import ShardCheck, check_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

    from shardset.dataset.discover import Source
    from shardset.formats.tfrecord_salvage import Event
    from shardset.storage.store import Reader, Store

    from .record_stream import RecordStream

_PIECE: Final = 4 << 20
_MADE_BY: Final = "shardset fix"
_VERSION: Final = 1
_GZIP_SUFFIXES: Final = (".gz", ".gzip")


@dataclass(frozen=True, slots=True)
class ShardFix:
    """What was saved of one shard.

    Attributes:
        check: What was found in it.
        destination: The new file.
        records: Records in it.
        size: Its bytes.
        bad_file: The file with the bytes that were left out, beside the new one; None if nothing was. What stood where
            in the shard is in the file of this name with ``.json`` behind.
        bad_bytes: How many bytes were left out.
    """

    check: ShardCheck
    destination: str
    records: int
    size: int
    bad_file: str | None = None
    bad_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FixReport:
    """What was saved of the shards that a source names.

    Attributes:
        source: The source, without what lets one in.
        shards: Of each shard of which anything could be saved, in order, what was.
        findings: Of several shards, those that could not be read, or are no TFRecord files.
    """

    source: str
    shards: tuple[ShardFix, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def lost_records(self) -> int:
        """How many records are lost, as far as that can be told."""
        return sum(shard.check.lost_records for shard in self.shards)


def fix(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    store: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FixReport:
    """Copy the good records of TFRecord shards to new files.

    Records that were whole are copied with their frames, byte for byte. Of those that could be mended, the header or
    the checksum is written anew. What is left out goes to a file beside the new one, ``<name>.bad``, with its places in
    ``<name>.bad.json``; the two are written first. Each file appears when it is complete, or not at all.

    Args:
        source: A shard, or several, anywhere; as `find_shards` takes it.
        destination: The new file; for several shards the folder for them. Compressed with gzip if its name ends in
            ``.gz``, whatever the source is.
        force: Write over what stands there.
        store: Where the source lives; by default the place that its scheme names.
        progress: Called with how many bytes have been read, and how many there are.

    Raises:
        ValueError: The destination is the source, or stands there already; or the source has no shards but tars.
        FormatError: The shard is no TFRecord file. Of several, the one is a finding.
        StorageError: Reading failed; as `FormatError`.
        OSError: Writing failed.
    """
    found = find_shards(source, store=store)
    shards = checkable(found)
    if is_remote(os.fspath(destination)):
        raise ValueError(f"{without_secrets(os.fspath(destination))}: good records are written to a local file")
    target = Path(local_path(os.fspath(destination)))
    is_one = len(shards) == 1 and not found.is_folder and not target.is_dir()
    targets = [target] if is_one else [target / Path(shard.name).parent / url_name(shard.url) for shard in shards]
    for shard, path in zip(shards, targets, strict=True):
        _refuse(shard.url, path, force=force)
    opened = store_for(store, found.root)
    done, total = 0, sum(shard.info.size for shard in shards)
    results, findings = [], []
    for shard, path in zip(shards, targets, strict=True):
        if not is_one:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            reader = opened.open(shard.url, shard.info)
            results.append(fix_records(reader, path, progress=shift_progress(progress, done, total)))
        except (FormatError, StorageError) as error:
            if len(shards) == 1:
                raise
            word = "not_tfrecord" if isinstance(error, FormatError) else "unreadable"
            findings.append(make_finding(word, shard.url, None, error.message))
        done += shard.info.size
    return FixReport(found.name, tuple(results), tuple(findings))


def fix_records(reader: Reader, destination: Path, *, progress: Callable[[int], None] | None = None) -> ShardFix:
    """Copy the good records of one TFRecord shard to a new file, as `fix` does, over whatever stands there.

    Raises:
        FormatError: The shard is no TFRecord file.
        StorageError: Reading failed.
        OSError: Writing failed.
    """
    bad_file, index_file = _side_files(destination)
    with ExitStack() as stack:
        writing = _Writing(stack, destination, bad_file)
        found = check_records(reader, progress=progress, sink=writing.take)
        if not found.is_tfrecord:
            finding = found.findings[-1]
            raise FormatError(
                finding.message, shard=reader.url, offset=0, code="not_tfrecord", hint=finding.hint or None
            )
        writing.finish()
        if writing.ranges:
            write_atomic(index_file, _index(reader, destination, found, writing.ranges))
    # The side files, which were opened last, stand in their places by now, and then the new file.
    if not writing.ranges:
        _remove_old(bad_file, index_file)
    return ShardFix(
        found,
        str(destination),
        found.records,
        destination.stat().st_size,
        str(bad_file) if writing.ranges else None,
        writing.bad_bytes,
    )


class _Writing:
    """Takes what comes out of a shard: records go to the new file, all else to the side file."""

    def __init__(self, stack: ExitStack, destination: Path, bad_file: Path) -> None:
        self.stack = stack
        self.bad_file = bad_file
        self.ranges: list[dict[str, Any]] = []
        self.bad_bytes = 0
        self._good = stack.enter_context(open_atomic(destination))
        self._bad: IO[bytes] | None = None
        is_gzip = destination.name.lower().endswith(_GZIP_SUFFIXES)
        self._deflater = zlib.compressobj(6, zlib.DEFLATED, 31) if is_gzip else None  # without a name and a time

    def take(self, event: Event, stream: RecordStream) -> None:
        if isinstance(event, Records):
            for piece in _pieces(stream, event.offset, event.end - event.offset):
                self._write(piece)
        elif isinstance(event, Mended):
            self._write_mended(event, stream)
        else:
            self._set_aside(stream, event.offset, event.length, event.code, event.message)

    def finish(self) -> None:
        """Write what is still to be written."""
        if self._deflater is not None:
            self._good.write(self._deflater.flush())
        if self._bad is not None:
            self._bad.truncate()

    def _write(self, data: Buffer) -> None:
        self._good.write(data if self._deflater is None else self._deflater.compress(data))

    def _write_mended(self, event: Mended, stream: RecordStream) -> None:
        start, end = event.offset - HEADER_SIZE, event.offset + event.length
        self._write(frame_header(event.length))
        crc = 0
        for piece in _pieces(stream, event.offset, event.length):
            crc = crc32c(piece, crc)
            self._write(piece)
        self._write(mask_crc(crc).to_bytes(FOOTER_SIZE, "little"))
        if event.mended == "data_crc":
            self._set_aside(stream, end, FOOTER_SIZE, "mended_checksum", "as it was; the record was mended")
        else:
            self._set_aside(stream, start, HEADER_SIZE, "mended_header", "as it was; the record was mended")

    def _set_aside(self, stream: RecordStream, offset: int, length: int, word: str, message: str) -> None:
        if self._bad is None:
            self._bad = self.stack.enter_context(open_atomic(self.bad_file))
        kept = {"offset": offset, "length": length, "kept_at": self._bad.tell(), "code": CODES[word], "kind": word}
        self.ranges.append({**kept, "message": message})
        if word not in {"mended_header", "mended_checksum"}:
            self.bad_bytes += length
        for piece in _pieces(stream, offset, length):
            if any(memoryview(piece)[:1]) or any(piece):
                self._bad.write(piece)
            else:
                self._bad.seek(len(piece), os.SEEK_CUR)  # a hole in the shard becomes one here


def _pieces(stream: RecordStream, offset: int, length: int) -> Iterator[memoryview]:
    for at in range(offset, offset + length, _PIECE):
        yield memoryview(stream.read(at, min(_PIECE, offset + length - at)))


def _refuse(source: str, destination: Path, *, force: bool) -> None:
    """Raise if a file must not be written."""
    bad_file, index_file = _side_files(destination)
    if not is_remote(source):
        path = Path(local_path(source))
        for written in (destination, bad_file, index_file):
            if written.exists() and path.exists() and written.samefile(path):
                raise ValueError(f"{written} is the damaged shard itself, which is never changed; name another file")
    if destination.is_dir():
        raise ValueError(f"{destination} is a folder")
    if force:
        return
    if os.path.lexists(destination):
        raise ValueError(f"{destination} exists already")
    if os.path.lexists(bad_file) and not _is_ours(index_file):  # what a run that was killed has left may go
        raise ValueError(f"{bad_file} exists already, and {_MADE_BY} did not make it")


def _side_files(destination: Path) -> tuple[Path, Path]:
    return destination.with_name(f"{destination.name}.bad"), destination.with_name(f"{destination.name}.bad.json")


def _index(reader: Reader, destination: Path, found: ShardCheck, ranges: list[dict[str, Any]]) -> bytes:
    """Return the places of what was left out, as JSON."""
    document = {
        "made_by": _MADE_BY,
        "version": _VERSION,
        "source": _text(without_secrets(reader.url)),
        "source_size": reader.size,
        "compression": found.compression,
        "destination": _text(str(destination)),
        "ranges": ranges,
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def _text(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_ours(index_file: Path) -> bool:
    try:
        document = orjson.loads(index_file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("made_by") == _MADE_BY


def _remove_old(bad_file: Path, index_file: Path) -> None:
    """Remove the side files of an earlier run, which say what is not so any more."""
    if _is_ours(index_file):
        bad_file.unlink(missing_ok=True)
        index_file.unlink()
