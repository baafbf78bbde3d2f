"""Checks one TFRecord shard: every checksum in it, and what can be saved where they are wrong."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from shardset.errors import FormatError
from shardset.formats.example_lint import LINT_CODES, lint_example
from shardset.formats.tfrecord import FRAME_SIZE, HEADER_SIZE
from shardset.formats.tfrecord_salvage import Bad, Mended, Records, salvage

from .findings import CODES, Finding, make_finding
from .record_stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Buffer

    from shardset.formats.tfrecord_salvage import Event
    from shardset.storage.store import Reader

    from .record_stream import RecordStream

    Sink = Callable[[Event, RecordStream], None]

MOST_FINDINGS: Final = 1_000
"""Findings of a kind that are kept for each shard; more are counted."""
_LENGTHS_KEPT: Final = 1_000_000
_ONE_RECORD: Final = frozenset({"bad_payload_checksum", "truncated_record_header", "truncated_record"})
_SHORT: Final = frozenset({"truncated_record_header", "truncated_record"})
_NOTHING: Final = frozenset({"trailing_garbage", "trailing_nuls", "zero_hole"})


@dataclass(frozen=True, slots=True)
class ShardCheck:
    """What was found in one shard.

    Attributes:
        shard: Its url or path.
        size: Its bytes.
        compression: ``"gzip"``, ``"zlib"``, or None for a plain one.
        good: Records that are as they were written.
        mended: Records that had a wrong header or checksum, and are whole otherwise.
        resynced: How many of both stand behind a place where the next header had to be looked for.
        lost_records: Records that are lost: exact where the frames are in order, else an estimate by the size of the
            others.
        lost_bytes: Bytes that belong to no record that is good or mended. Of a compressed shard, decompressed ones.
        findings: In the order of the shard, at most `MOST_FINDINGS` of a kind.
        counts: How often each finding was made, by its code.
        is_tfrecord: It is a TFRecord file at all.
    """

    shard: str
    size: int
    compression: str | None = None
    good: int = 0
    mended: int = 0
    resynced: int = 0
    lost_records: int = 0
    lost_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    is_tfrecord: bool = True

    @property
    def records(self) -> int:
        """Records that can be had: good and mended ones."""
        return self.good + self.mended

    @property
    def has_errors(self) -> bool:
        """Whether anything is damaged."""
        return any(finding.severity == "error" for finding in self.findings)


def check_records(
    reader: Reader,
    *,
    tail: bool = False,
    examples: bool = False,
    progress: Callable[[int], None] | None = None,
    sink: Sink | None = None,
) -> ShardCheck:
    """Check every record of a TFRecord shard.

    Args:
        reader: The shard.
        tail: It is still being written: a last record that is not all there is no damage.
        examples: Look into the records too, which are Examples or SequenceExamples, for what programs read in different
            ways. Takes many times longer.
        progress: Called with how many bytes of the shard are done.
        sink: Called with each run of records, and each run of bytes that hold none, in the order of the shard.

    Raises:
        StorageError: Reading failed.
        OSError: There was no room for what was decompressed.
    """
    if not reader.size:
        finding = make_finding("empty_shard", reader.url, None, "the file has no bytes")
        return ShardCheck(reader.url, 0, findings=(finding,), counts={finding.code: 1})
    try:
        with open_stream(reader, progress) as stream:
            survey = _Survey(reader.url, reader.size, stream, is_growing=tail)
            events = salvage(stream.read, stream.size, is_mapped=stream.is_mapped, is_growing=tail)
            lints = _Lints(stream) if examples else None
            for event in events:
                survey.add(event)
                if lints is not None:
                    lints.add(event)
                if sink is not None:
                    sink(event, stream)
                if progress is not None and stream.compression is None:
                    progress(event.end if isinstance(event, Records) else event.offset + event.length)
            if lints is not None:
                for offset, message in lints.messages():
                    survey.find("example", offset, message)
            return survey.result()
    except FormatError as error:
        finding = replace(make_finding("not_tfrecord", reader.url, 0, error.message), hint=error.hint or "")
        return ShardCheck(reader.url, reader.size, findings=(finding,), counts={finding.code: 1}, is_tfrecord=False)


class _Survey:
    """Counts what comes out of a shard, and keeps findings."""

    def __init__(self, shard: str, size: int, stream: RecordStream, *, is_growing: bool) -> None:
        self.shard = shard
        self.size = size
        self.stream = stream
        self.is_growing = is_growing
        self.good = self.mended = self.resynced = self.lost_bytes = 0
        self.first: Event | None = None
        self.first_resynced: int | None = None
        self.lengths = array("q")
        self.lost: list[tuple[str, int]] = []
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        for fault in stream.faults:
            is_short = is_growing and fault.code == "truncated_compression"
            self.find("unfinished" if is_short else fault.code, fault.offset, fault.message)

    def add(self, event: Event) -> None:
        """Take note of what comes next."""
        if self.first is None:
            self.first = event
        if isinstance(event, Bad):
            self._add_bad(event)
            return
        offset = event.offset if isinstance(event, Records) else event.offset - HEADER_SIZE
        number = len(event.lengths) if isinstance(event, Records) else 1
        if isinstance(event, Records):
            self.good += number
            if len(self.lengths) < _LENGTHS_KEPT:
                self.lengths.frombytes(event.lengths.tobytes())
        else:
            self.mended += 1
            self._add_mended(event, offset)
        if event.resynced:
            self.resynced += number
            if self.first_resynced is None:
                self.first_resynced = offset

    def _add_mended(self, event: Mended, offset: int) -> None:
        if event.mended == "data_crc":
            message = f"one bit was wrong in the checksum of a payload of {event.length} bytes"
            self.find("mended_checksum", offset, message)
        else:
            what = "length" if event.mended == "length" else "checksum of the length"
            message = f"the {what} in a header was wrong; its record has a payload of {event.length} bytes"
            self.find("mended_header", offset, message)

    def _add_bad(self, event: Bad) -> None:
        is_short = self.is_growing and event.code in _SHORT
        sums = "" if event.expected is None else f" ({event.expected:08x} is stated, {event.actual:08x} computed)"
        if is_short:
            self.find("unfinished", event.offset, event.message)
            return
        self.lost_bytes += event.length
        self.lost.append((event.code, event.length))
        self.find(event.code, event.offset, event.message + sums, event.length)

    def find(self, word: str, offset: int, message: str, lost_bytes: int = 0) -> None:
        """Keep a finding, or count it if there are many of its kind."""
        code = CODES[word]
        self.counts[code] += 1
        if self.counts[code] <= MOST_FINDINGS:
            self.findings.append(make_finding(word, self.shard, offset, message, lost_bytes=lost_bytes))

    def result(self) -> ShardCheck:
        """Return what was found, now that the sizes of the records are known."""
        is_tfrecord = True
        if self.first_resynced is not None:
            message = f"{self.resynced:,} records from here on were found again behind damage"
            self.find("resynced", self.first_resynced, message)
        elif isinstance(self.first, Bad) and self.first.length == self.stream.size and self.first.code in _NOTHING:
            what = "it has NUL bytes alone" if self.first.code == "trailing_nuls" else "no record was found in it"
            self.findings, self.counts, self.lost, is_tfrecord = [], Counter(), [], False
            self.find("not_tfrecord", 0, f"this is no TFRecord file: {what}")
        size = FRAME_SIZE + (int(statistics.median(self.lengths)) if self.lengths else 0)
        found = [
            replace(finding, lost_records=_records_in(finding.word, finding.lost_bytes, size))
            for finding in self.findings
        ]
        return ShardCheck(
            shard=self.shard,
            size=self.size,
            compression=self.stream.compression,
            good=self.good,
            mended=self.mended,
            resynced=self.resynced,
            lost_records=sum(_records_in(word, length, size) for word, length in self.lost),
            lost_bytes=self.lost_bytes,
            findings=tuple(found),
            counts=dict(sorted(self.counts.items())),
            is_tfrecord=is_tfrecord,
        )


class _Lints:
    """Looks into records, and counts what it finds by feature."""

    def __init__(self, stream: RecordStream) -> None:
        self.stream = stream
        self.first: dict[tuple[str, str | None], int] = {}
        self.counts: Counter[tuple[str, str | None]] = Counter()

    def add(self, event: Event) -> None:
        """Look into what comes next."""
        if isinstance(event, Bad):
            return
        if isinstance(event, Mended):
            self._look(self.stream.read(event.offset, event.length), event.offset)
            return
        run = memoryview(self.stream.read(event.offset, event.end - event.offset))
        for offset, length in zip(event.offsets.tolist(), event.lengths.tolist(), strict=True):
            self._look(run[offset - event.offset :][:length], offset)

    def _look(self, payload: Buffer, offset: int) -> None:
        for kind in {(finding.code, finding.field) for finding in lint_example(payload)}:
            self.first.setdefault(kind, offset - HEADER_SIZE)
            self.counts[kind] += 1

    def messages(self) -> Iterator[tuple[int, str]]:
        """Yield what was found, each with the record that had it first."""
        for kind, count in self.counts.most_common():
            code, name = kind
            where = "" if name is None else f"feature {name!r}: "
            many = "one record" if count == 1 else f"{count:,} records, of which this is the first"
            yield self.first[kind], f"{where}{LINT_CODES[code]} ({code}; {many})"


def _records_in(word: str, lost_bytes: int, size: int) -> int:
    """Return how many records of `size` bytes, frames included, are lost with so many bytes."""
    if not lost_bytes or word == "trailing_nuls":
        return 0
    if word in _ONE_RECORD:
        return 1
    return max(round(lost_bytes / size), 0 if word == "trailing_garbage" else 1)
