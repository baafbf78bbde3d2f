"""Errors of reading a tar as programs for webdataset expect them: of the kind that Python's ``tarfile`` raises too."""

from __future__ import annotations

import copy
import tarfile
from typing import Final

from shardset.errors import ChecksumError, CompressedShardError, FormatError, LimitError, TruncatedError


class TarReadError(FormatError, tarfile.ReadError):
    """The bytes of a shard break its format."""


class TarTruncatedError(TruncatedError, TarReadError):
    """The shard ends inside a header or a payload."""


class TarChecksumError(ChecksumError, TarReadError):
    """A header's checksum does not match its bytes."""


class TarCompressedError(CompressedShardError, TarReadError):
    """The shard is compressed in a way that cannot be read."""


class TarLimitError(LimitError, TarReadError):
    """A length in the shard exceeds what a reader may be made to allocate."""


_KINDS: Final[dict[type[Exception], type[TarReadError]]] = {
    FormatError: TarReadError,
    TruncatedError: TarTruncatedError,
    ChecksumError: TarChecksumError,
    CompressedShardError: TarCompressedError,
    LimitError: TarLimitError,
}


def as_read_error(error: Exception) -> Exception:
    """Return the same error as one that ``except tarfile.ReadError`` catches too, if it is one of a shard's format."""
    kind = _KINDS.get(type(error))
    if kind is None:
        return error
    other = copy.copy(error)
    other.__class__ = kind
    return other
