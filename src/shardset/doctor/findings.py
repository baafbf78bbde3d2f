"""What `check` reports: findings, each of a kind that has a code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        word: Its name, as other parts of this package call it.
        severity: An ``"error"`` is damage, or stops a strict reader; a ``"warning"`` is read by some programs and not
            by others, or is to be looked at; a ``"note"`` is neither.
        meaning: What was found.
        hint: What to do about it.
    """

    word: str
    severity: Severity
    meaning: str
    hint: str


_FIX: Final = "shardset fix copies the good records to a new file"
_AGAIN: Final = "download or write the shard again if you can; shardset fix saves what is there"

KINDS: Final[dict[str, Kind]] = {
    "R001": Kind("not_tfrecord", "error", "the file is no TFRecord file", "check where the file came from"),
    "R002": Kind(
        "empty_shard",
        "warning",
        "the file has no bytes: a TFRecord file of no records",
        "an interrupted download or a writer that died leaves such files",
    ),
    "R003": Kind("incomplete_set", "error", "numbered shards are missing", "fetch the missing shards"),
    "R004": Kind(
        "mixed_sets",
        "warning",
        "numbered shards of two totals stand side by side",
        "an older set may have been left behind; name the one you mean, as in train@64",
    ),
    "R005": Kind("unreadable", "error", "the shard could not be read to its end", "run it again"),
    "R006": Kind(
        "not_checked", "note", "the shard is of a kind that is not checked yet", "tar shards cannot be checked"
    ),
    "R101": Kind("truncated_record_header", "error", "the file ends inside the header of a record", _AGAIN),
    "R102": Kind("truncated_record", "error", "the file ends inside a record", _AGAIN),
    "R103": Kind("bad_length_checksum", "error", "the header of a record does not add up to its checksum", _FIX),
    "R104": Kind(
        "bad_payload_checksum",
        "error",
        "a payload does not add up to its checksum, and the next record follows: one record is lost",
        _FIX,
    ),
    "R105": Kind(
        "broken_frame",
        "error",
        "a payload does not add up to its checksum, and no record follows where one should",
        _FIX,
    ),
    "R106": Kind(
        "impossible_length",
        "error",
        "a header with the right checksum states more bytes than the file has, and records follow, or no file could",
        "no sound writer makes such a record; " + _FIX,
    ),
    "R107": Kind(
        "trailing_nuls",
        "error",
        "NUL bytes stand behind the last record",
        "no record is lost: space that was reserved and never written; shardset fix leaves it out",
    ),
    "R108": Kind("trailing_garbage", "error", "bytes that are no record stand behind the last one", _FIX),
    "R109": Kind(
        "zero_hole",
        "error",
        "a hole of NUL bytes stands where records should",
        "a crash, a full disk or a download in parts leaves holes; " + _AGAIN,
    ),
    "R110": Kind(
        "mended_header",
        "error",
        "the header of a record was wrong; its payload proves what it should be",
        "nothing is lost: shardset fix writes the right header",
    ),
    "R111": Kind(
        "mended_checksum",
        "error",
        "one bit of a payload's checksum was wrong; the payload is most likely good",
        "shardset fix writes the right checksum; look at the record",
    ),
    "R112": Kind(
        "resynced",
        "warning",
        "records follow a place where the next header had to be looked for",
        "records inside a payload look the same: look at the first of them if payloads may hold TFRecord data",
    ),
    "R113": Kind("unfinished", "note", "the last record is not all there yet", "the file is still being written"),
    "R201": Kind("bad_compression", "error", "the compressed data is damaged", _AGAIN),
    "R202": Kind("truncated_compression", "error", "the compressed data ends before its end mark", _AGAIN),
    "R203": Kind(
        "bad_compression_checksum",
        "error",
        "the decompressed bytes do not add up to their checksum",
        "the checksums of the records say which are good; " + _FIX,
    ),
    "R204": Kind("compression_garbage", "error", "bytes behind the compressed data are none", _FIX),
    "R205": Kind(
        "compression_padding", "warning", "NUL bytes stand behind the compressed data: TensorFlow fails there", _FIX
    ),
    "R206": Kind(
        "joined_streams",
        "warning",
        "several zlib streams stand in one file: TensorFlow reads the first alone, without a word",
        _FIX,
    ),
    "R301": Kind(
        "example",
        "warning",
        "a record is read in one way by protobuf and in another, or not at all, by TensorFlow's parser",
        "write the record again with a sound encoder",
    ),
}
"""All kinds, by their code. R0: the shard as a whole; R1: records; R2: compression; R3: what records hold."""

CODES: Final[dict[str, str]] = {kind.word: code for code, kind in KINDS.items()}
"""The code of each kind, by its word."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    Attributes:
        code: A key of `KINDS`.
        severity: As in `Kind`.
        shard: Url or path of the shard.
        offset: Byte in the shard, or None if it is about the whole. In a compressed shard the offsets of R1 and R3 are
            those of the decompressed bytes; the offsets of R2 are always those of the file.
        message: What is the matter there, one sentence.
        hint: What to do about it.
        lost_bytes: Bytes from `offset` on that belong to no good record.
        lost_records: How many records are lost there, as far as that can be told: exact where the frames are in order,
            else by the size of the others.
    """

    code: str
    severity: Severity
    shard: str
    offset: int | None
    message: str
    hint: str
    lost_bytes: int = 0
    lost_records: int = 0

    @property
    def word(self) -> str:
        """Its kind in words."""
        return KINDS[self.code].word


def make_finding(
    word: str, shard: str, offset: int | None, message: str, *, lost_bytes: int = 0, lost_records: int = 0
) -> Finding:
    """Make a finding of the kind that has this word, with the severity and the hint of its kind."""
    code = CODES[word]
    kind = KINDS[code]
    return Finding(code, kind.severity, shard, offset, message, kind.hint, lost_bytes, lost_records)
