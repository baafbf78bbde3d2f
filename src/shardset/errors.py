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
    │   ├─ MissingFieldError (KeyError, ValueError)    .field
    │   ├─ NoSamplesError (ValueError)
    │   ├─ DecodeError (ValueError)            .field
    │   ├─ EncodeError (ValueError)            .field
    │   └─ CollationError (ValueError, AssertionError)    .field .position
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

_COMMAND: Final = "pipe:"
_VALUE: Final = r"""(?:'[^']*'|"[^"]*"|[^\s&;|'"]+)"""
_NAMES: Final = "token|secret|signature|credential|passw(?:or)?d|api[-_]?key|access[-_]?key"
_IN_COMMAND: Final = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"""(://)[^\s/?#@'"]+@""",
        rf"""((?<!\S)--(?:proxy-)?user(?:=|\s+)|(?<!\S)--[\w-]{{0,60}}(?:{_NAMES})[\w-]{{0,60}}\s+){_VALUE}""",
        r"""((?<!\S)-u\s*['"]?)[^\s:'"]*:[^\s'"]*""",
        rf"""((?:[?&;]sig|[?&;]key|[\w-]{{0,60}}(?:{_NAMES})[\w-]{{0,60}})=){_VALUE}""",
        rf"""((?:authorization|cookie|[\w-]{{0,60}}(?:{_NAMES})[\w-]{{0,60}})\s*:\s*)[^'"]+""",
        r"""(bearer\s+)[^\s'"]+""",
        r"()\b(?:(?:hf_|gh[opsu]_|github_pat_|glpat-|AKIA|ASIA)\w{8,}|ya29\.[\w.-]+)",
    )
]
"""What looks like a secret in the command of a ``pipe:`` url, behind what may be shown."""
_SHOWN: Final = 1000
_LOOKED_AT: Final = 4 * _SHOWN
"""Characters of a command: those that messages quote, and those that are searched, since some commands are programs."""


@lru_cache(4096)  # remote stores ask before each request what they would have to say
def without_secrets(url: str) -> str:
    """Return a url as it may be shown and stored: no login, and no value of a parameter that looks like a credential.

    Of a ``pipe:`` url, whose command can say anything in any way, it takes out what usually stands for a secret.
    Everything that messages, reports, logs, states and files say of a url has come through here.
    """
    if url.startswith(_COMMAND):
        url = url[:_LOOKED_AT]
        for pattern in _IN_COMMAND:
            url = pattern.sub(lambda found: found[1] if found[1] == "://" else f"{found[1]}...", url)
        return url if len(url) <= _SHOWN else f"{url[:_SHOWN]}..."
    if "://" not in url:
        return url
    return _SECRET.sub(r"\1=...", _LOGIN.sub(r"\1", url, count=1))


def secrets_in(url: str) -> set[str]:
    """Return what `without_secrets` takes out of a url, as it stands there and as it is meant."""
    if url.startswith(_COMMAND):
        matches = (match for pattern in _IN_COMMAND for match in pattern.finditer(url[:_LOOKED_AT]))
        found = (match[0][len(match[1]) :].strip("@'\"") for match in matches)
        return {text for value in found for text in (value, unquote(value), *value.split(":")) if text}
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # handlers log this, and the place belongs to it

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


class MissingFieldError(SampleError, KeyError, ValueError):
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


class NoSamplesError(SampleError, ValueError):
    """There is no sample, or none for this process, where some were expected."""


class DecodeError(SampleError, ValueError):
    """A payload could not be turned into a value.

    Attributes:
        field: The field at fault.
        sample: The whole sample, undecoded, where the error left a stage of a pipeline; else None. It does not go to
            another process with the error.
    """

    sample: Any = None

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

    @property
    def url(self) -> str | None:
        """The shard, by webdataset's name for it."""
        return self.shard

    @property
    def k(self) -> str | None:
        """The field, by webdataset's name for it."""
        return self.field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {name: value for name, value in vars(self).items() if name != "sample"}


class EncodeError(SampleError, ValueError):
    """A sample cannot be written: a value has no encoding, or a name would not be read back as what it is."""

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


class CollationError(SampleError, ValueError, AssertionError):
    """Samples do not fit into one batch. It is also of the kinds that webdataset and numpy raise then.

    Attributes:
        field: The field, or the place in the tuple, or None.
        position: Number in the batch of the first sample that does not fit to the first, or None.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field: str | int | None = None,
        position: int | None = None,
        shard: str | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, shard=shard, key=key, hint=hint)
        self.field = field
        self.position = position


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
        status: The last HTTP status; of a command, what it ended with (of a signal, less than 0); or None.
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
