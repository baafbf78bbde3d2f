"""Faults of a shard as data: what a reader met, where, and which exception it stands for.

A parser never loses a fault: it goes into its result as a `Fault`. Strict callers raise it with `Fault.error`; tolerant
ones count it. The codes and their meaning are listed in docs/formats.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shardset.errors import ChecksumError, CompressedShardError, FormatError, LimitError, TruncatedError

RECORD_ERRORS: Final[dict[str, tuple[type[FormatError], str]]] = {
    "not_tfrecord": (FormatError, "check where the file came from"),
    "truncated_record_header": (TruncatedError, "the file was cut short, or is still being written"),
    "truncated_record": (TruncatedError, "the file was cut short, or is still being written"),
    "bad_length_checksum": (ChecksumError, "the file is damaged here; what lies behind can be salvaged"),
    "zero_header": (FormatError, "a crash or a full disk leaves such files; what lies behind can be salvaged"),
    "impossible_length": (LimitError, "no writer makes such a record; do not trust the file"),
    "bad_compression": (FormatError, "the compressed data is damaged here; what stands before it was read"),
    "truncated_compression": (TruncatedError, "the file was cut short; download or write it again"),
    "bad_compression_checksum": (ChecksumError, "the compressed data is damaged somewhere before; verify its records"),
    "trailing_garbage": (FormatError, "everything before it was read; the file may be two that were joined"),
}
"""Those of `ERRORS` that only TFRecord files have, compressed ones among them."""

ERRORS: Final[dict[str, tuple[type[FormatError], str]]] = {
    "bad_checksum": (ChecksumError, "the shard is damaged here, or a part of a split archive"),
    "bad_number": (FormatError, "the header is damaged, or no tar header"),
    "bad_pax": (FormatError, "the shard is damaged here; write it again from its source"),
    "bad_sparse": (FormatError, "the shard is damaged here; write it again from its source"),
    "dangling_extension": (FormatError, "the member that the extension belongs to is missing; write the shard again"),
    "truncated_header": (TruncatedError, "the shard was cut short; download or write it again"),
    "truncated_payload": (
        TruncatedError,
        "the shard was cut short, or is a part of a split archive; download or write it again",
    ),
    "extension_too_big": (LimitError, "no writer makes such a record; do not trust the shard"),
    "not_tar": (FormatError, "check where the file came from"),
    "compressed": (CompressedShardError, "decompress it: a compressed shard has no random access"),
    "empty_file": (FormatError, "an interrupted download leaves such files; fetch the shard again"),
    **RECORD_ERRORS,
}
"""Faults that end the reading of a shard: their exception and what to do next."""

RECORD_WARNINGS: Final = frozenset({"bad_payload_checksum", "compression_padding", "records_behind_damage"})
"""Those of `WARNINGS` that only TFRecord files have."""

WARNINGS: Final = frozenset(
    {
        "data_after_end",
        "no_end_marker",
        "short_end_marker",
        "short_padding",
        "name_conflict",
        "repeated_extension",
        "global_override_ignored",
        "name_not_utf8",
        "unsafe_name",
        "empty_name",
        "unknown_type",
        "repeated_key",
        "duplicate_suffix",
        *RECORD_WARNINGS,
    }
)
"""Oddities that a reader gets past. `duplicate_suffix` is an error once its sample is read, `bad_payload_checksum` once
its record is."""

_EXCEPTIONS: Final[dict[str, tuple[type[FormatError], str]]] = {
    **ERRORS,
    "bad_payload_checksum": (ChecksumError, "this record is damaged; those behind it can be read"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong, or odd, at one place of a shard.

    Attributes:
        code: A key of `ERRORS` or a member of `WARNINGS`.
        offset: Byte offset in the shard.
        member: Name of the member that it concerns, or None. Bytes that are no UTF-8 are surrogate escapes.
        message: One sentence with the values at fault.
        expected: The checksum that the header states, if that is the fault; not kept in index files.
        actual: The checksum that its bytes add up to.
    """

    code: str
    offset: int
    member: str | None = None
    message: str = ""
    expected: int | None = field(default=None, compare=False)
    actual: int | None = field(default=None, compare=False)

    @property
    def is_error(self) -> bool:
        """Whether reading ends here, so that members behind it are not listed."""
        return self.code in ERRORS

    def error(self, shard: str | None = None) -> FormatError:
        """Return the exception that a strict reader raises for this fault."""
        kind, hint = _EXCEPTIONS.get(self.code, (FormatError, None))
        message = self.message or self.code
        if self.member is not None:
            message = f"{message} (member {self.member!r})"
        error = kind(message, shard=shard, offset=self.offset, code=self.code, member=self.member, hint=hint)
        if isinstance(error, ChecksumError):
            error.expected, error.actual = self.expected, self.actual
        return error


_COMPRESSED: Final = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\0\0sNaPpY": "snappy",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
_FOREIGN: Final = (
    (re.compile(rb"\s*(?:<!doctype|<html|<head|<\?xml)", re.IGNORECASE), "an HTML or XML page"),
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer, not the file that it points to"),
    (re.compile(rb"PAR1"), "a Parquet file"),
    (re.compile(rb"ARROW1"), "an Arrow file"),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
    (re.compile(rb"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"), "a Riegeli or ArrayRecord file"),
    (re.compile(rb"\s*[{\[](?!\0)"), "JSON text"),  # not the length of a record, 91 or 123
)
_TAR: Final = (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive")
_TEXT: Final = (re.compile(rb"[\t\n\r\x20-\x7e]{12}"), "text")
_LFS_SIZE: Final = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)


class Foreign(NamedTuple):
    """What a file is, by its first bytes.

    Attributes:
        what: A phrase that names it, or the name of its compression.
        is_compressed: Another file is packed in it.
    """

    what: str
    is_compressed: bool = False


def recognise_foreign(head: bytes) -> Foreign | None:
    """Tell what kind of file begins so, of those that are often taken for a TFRecord file; None if it is none of them.

    Args:
        head: Its first bytes: 512 of them, or all that it has.
    """
    compression = _compression(head)
    if compression is not None:
        return Foreign(compression, is_compressed=True)
    what = next((what for pattern, what in (*_FOREIGN, _TAR, _TEXT) if pattern.match(head)), None)
    if what is None:
        return None
    pointed = _LFS_SIZE.search(head) if "LFS" in what else None
    return Foreign(what if pointed is None else f"{what}, which has {int(pointed[1])} bytes")


def _compression(head: bytes) -> str | None:
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)


def foreign_fault(block: bytes) -> Fault:
    """Say what a file seems to be that does not begin as a tar does, from its first bytes."""
    compression = _compression(block)
    if compression is not None:
        return Fault("compressed", 0, message=f"the shard is compressed ({compression})")
    what = next((what for pattern, what in _FOREIGN if pattern.match(block)), "no header that tar knows")
    return Fault("not_tar", 0, message=f"this is no tar archive: it begins with {what}")
