"""Every exception that shardset raises on purpose.

All of them derive from `ShardsetError`, and each also derives from the builtin that people already catch for its
kind of trouble, so that code which never heard of shardset still handles it::

    ShardsetError                          .hint
    ├─ FormatError (ValueError)            .shard .offset .code .member
    │   ├─ TruncatedError
    │   ├─ ChecksumError                   .expected .actual
    │   ├─ CompressedShardError
    │   └─ LimitError
    ├─ SampleError                         .shard .key
    │   ├─ DuplicateFieldError (ValueError)    .field .offsets
    │   ├─ MissingFieldError (KeyError)        .field
    │   └─ DecodeError (ValueError)            .field
    ├─ IndexFileError (ValueError)         .path
    ├─ StorageError (OSError)              .url
    │   ├─ NotFoundError (FileNotFoundError)
    │   ├─ AccessError (PermissionError)
    │   ├─ RangeIgnoredError
    │   ├─ ChangedError
    │   ├─ RateLimitedError
    │   └─ TransferError                   .status .attempts
    ├─ StateError (ValueError)
    └─ MissingExtraError (ImportError)     .extra

The text of an error says what happened, in which shard and at which byte, and then, after a dash, what to do next.
Errors survive pickling, so a worker process can raise them in its parent.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

_LOGIN: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/?#@]*@")
_SECRET: Final = re.compile(
    r"([?&;](?:[^=&;#]*(?:token|secret|signature|credential|password|passwd|api[-_]?key|access[-_]?key|policy|auth)[^=&;#]*"
    r"|sig|key|jwt|pwd|x-amz-[^=&;#]*|x-goog-[^=&;#]*))=[^&;#]*",
    re.IGNORECASE,
)


@lru_cache(4096)  # remote stores ask before each request what they would have to say
def without_secrets(url: str) -> str:
    """Return a url as it may be shown and stored: no login, and no value of a parameter that looks like a credential.

    Everything that messages, reports, logs, states and files say of a url has come through here.
    """
    if "://" not in url:
        return url
    return _SECRET.sub(r"\1=...", _LOGIN.sub(r"\1", url, count=1))


def secrets_in(url: str) -> set[str]:
    """Return what `without_secrets` takes out of a url, as it stands there and as it is meant."""
    login = _LOGIN.match(url)
    parts = [] if login is None else login[0].partition("://")[2].rstrip("@").split(":")
    values = [match[0].partition("=")[2] for match in _SECRET.finditer(url)] + parts
    return {text for value in values for text in (value, unquote(value)) if text}


class ShardsetError(Exception):
    """Root of all errors of this package.

    Attributes:
        hint: What to do next, one sentence, or None.
    """

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def place(self) -> str:
        """Return where it happened, as a phrase to put after the message; empty if unknown."""
        return ""

    def __str__(self) -> str:
        text = self.message + self.place()
        return f"{text} - {self.hint}" if self.hint else text


class FormatError(ShardsetError, ValueError):
    """The bytes of a shard break its format.

    Attributes:
        shard: The shard's url or path, or None where only bytes were given.
        offset: Byte offset in the shard of the header or record at fault.
        code: Short stable word for the kind of fault, such as ``"bad_checksum"``.
        member: Name of the member at fault, where it is known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        shard: str | None = None,
        offset: int | None = None,
        code: str = "bad_format",
        member: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.shard = shard
        self.offset = offset
        self.code = code
        self.member = member

    def place(self) -> str:
        """Return ``", in SHARD at byte N"`` with the parts that are known."""
        text = f", in {without_secrets(self.shard)}" if self.shard else ""
        return text if self.offset is None else f"{text} at byte {self.offset}"


class TruncatedError(FormatError):
    """The shard ends inside a header, a payload or a record."""


class ChecksumError(FormatError):
    """A stored checksum does not match the bytes that it covers."""

    def __init__(
        self,
        message: str = "",
        *,
        expected: int | str | None = None,
        actual: int | str | None = None,
        shard: str | None = None,
        offset: int | None = None,
        code: str = "bad_checksum",
        member: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, shard=shard, offset=offset, code=code, member=member, hint=hint)
        self.expected = expected
        self.actual = actual


class CompressedShardError(FormatError):
    """The shard as a whole is compressed, so no byte in it can be addressed."""


class LimitError(FormatError):
    """A length in the shard exceeds what a reader may be made to allocate."""


class SampleError(ShardsetError):
    """A sample cannot be given as it was asked for.

    Attributes:
        shard: The shard's url or path.
        key: The sample's key.
    """

    def __init__(
        self, message: str = "", *, shard: str | None = None, key: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.shard = shard
        self.key = key

    def place(self) -> str:
        """Return ``", in SHARD"`` where it is known."""
        return f", in {without_secrets(self.shard)}" if self.shard else ""


class DuplicateFieldError(SampleError, ValueError):
    """Two members of one sample have the same suffix.

    Attributes:
        field: The suffix.
        offsets: Header or payload offsets of the members, in archive order.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        offsets: tuple[int, ...] = (),
        shard: str | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, shard=shard, key=key, hint=hint)
        self.field = field
        self.offsets = offsets


class MissingFieldError(SampleError, KeyError):
    """A sample lacks the field that was asked for."""

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        shard: str | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, shard=shard, key=key, hint=hint)
        self.field = field


class DecodeError(SampleError, ValueError):
    """A payload could not be turned into a value."""

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        shard: str | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, shard=shard, key=key, hint=hint)
        self.field = field


class IndexFileError(ShardsetError, ValueError):
    """A sidecar index or a catalog is missing, malformed, or does not fit its shard.

    Attributes:
        path: The file at fault.
    """

    def __init__(self, message: str = "", *, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path

    def place(self) -> str:
        """Return ``", in PATH"`` where it is known."""
        return f", in {without_secrets(self.path)}" if self.path else ""


class StorageError(ShardsetError, OSError):
    """Bytes could not be read from, or written to, where they live.

    Attributes:
        url: The address at fault.
    """

    def __init__(self, message: str = "", *, url: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.url = None if url is None else without_secrets(url)

    def place(self) -> str:
        """Return ``", at URL"`` where it is known."""
        return f", at {self.url}" if self.url else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError keeps errno where its own pickling does not find it.
        return _restore, (type(self), self.args, {**self.__dict__, "errno": self.errno})


def _restore(kind: type[StorageError], args: tuple[Any, ...], attributes: dict[str, Any]) -> StorageError:
    error = kind(*args)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


class NotFoundError(StorageError, FileNotFoundError):
    """Nothing lives at the url."""


class AccessError(StorageError, PermissionError):
    """The url exists and may not be read or written."""


class RangeIgnoredError(StorageError):
    """A server answered a range request with something other than that range."""


class ChangedError(StorageError):
    """The object is no longer the one that was opened or indexed."""


class RateLimitedError(StorageError):
    """A server asked for fewer requests, for longer than the retry budget allows."""


class TransferError(StorageError):
    """A transfer failed for good.

    Attributes:
        status: The last HTTP status, or None.
        attempts: How often it was tried.
    """

    def __init__(
        self,
        message: str = "",
        *,
        status: int | None = None,
        attempts: int = 1,
        url: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, url=url, hint=hint)
        self.status = status
        self.attempts = attempts


class StateError(ShardsetError, ValueError):
    """A saved state does not fit the dataset that it is loaded into."""


class MissingExtraError(ShardsetError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        extra: The extra that brings it.
    """

    def __init__(self, message: str = "", *, extra: str | None = None, hint: str | None = None) -> None:
        if hint is None and extra is not None:
            hint = f"pip install 'shardset[{extra}]'"
        super().__init__(message, hint=hint)
        self.extra = extra
