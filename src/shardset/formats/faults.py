"""Faults of a shard as data: what a reader met, where, and which exception it stands for.

A parser never loses a fault: it goes into its result as a `Fault`. Strict callers raise it with `Fault.error`; tolerant
ones count it. The codes and their meaning are listed in docs/formats.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from shardset.errors import ChecksumError, CompressedShardError, FormatError, LimitError, TruncatedError

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
}
"""Faults that end the reading of a shard: their exception and what to do next."""

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
    }
)
"""Oddities that a reader gets past. `duplicate_suffix` is an error once its sample is read."""


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
        kind, hint = ERRORS.get(self.code, (FormatError, None))
        message = self.message or self.code
        if self.member is not None:
            message = f"{message} (member {self.member!r})"
        error = kind(message, shard=shard, offset=self.offset, code=self.code, member=self.member, hint=hint)
        if isinstance(error, ChecksumError):
            error.expected, error.actual = self.expected, self.actual
        return error


_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
_FOREIGN: Final = (
    (re.compile(rb"\s*(?:<!doctype|<html|<head|<\?xml)", re.IGNORECASE), "an HTML or XML page"),
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer, not the file that it points to"),
    (re.compile(rb"PAR1"), "a Parquet file"),
    (re.compile(rb"ARROW1"), "an Arrow file"),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
    (re.compile(rb"\s*[{\[]"), "JSON text"),
)


def foreign_fault(block: bytes) -> Fault:
    """Say what a file seems to be that does not begin as a tar does, from its first bytes."""
    for magic, name in _COMPRESSED.items():
        if block.startswith(magic):
            return Fault("compressed", 0, message=f"the shard is compressed ({name})")
    what = next((what for pattern, what in _FOREIGN if pattern.match(block)), "no header that tar knows")
    return Fault("not_tar", 0, message=f"this is no tar archive: it begins with {what}")
