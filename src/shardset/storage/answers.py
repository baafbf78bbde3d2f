"""What the head of an HTTP answer says, and whether it answers what was asked. Pure functions."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from shardset.errors import AccessError, ChangedError, RangeIgnoredError, StorageError
from shardset.ranges import parse_content_range

from .store import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .store import ObjectInfo

_MAX_AGE: Final = re.compile(r"(?:^|[,\s])max-age\s*=\s*\"?([0-9]{1,9})")
_FOR_GOOD: Final = 86_400.0
_FOR_NOW: Final = 300.0
_EARLY: Final = 30.0
"""A signed address is used until so many seconds before it expires, since a read takes its time."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers of an answer.

    Attributes:
        status: The status, such as 206.
        headers: By name in lower case; what came several times is joined with commas.
    """

    status: int
    headers: Mapping[str, str]


def parse_head(lines: Sequence[bytes]) -> Head:
    """Parse the lines of a head; a line that is no header is passed over, as browsers do."""
    first = lines[0].split(None, 2)
    status = int(first[1]) if len(first) > 1 and first[1].isdigit() else 0
    headers: dict[str, str] = {}
    for key, text in map(_parse_line, lines[1:]):
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    headers.pop("", None)
    return Head(status, headers)


@lru_cache(256)  # most lines are the same in each answer of a server
def _parse_line(line: bytes) -> tuple[str, str]:
    """Return name and value of a header; two empty texts for a line that is none."""
    name, colon, value = line.partition(b":")
    return (name.strip().decode("latin-1").lower(), value.strip().decode("latin-1")) if colon else ("", "")


def identity_of(head: Head) -> str:
    """Return what tells one version from another: the etag, else the time of the last change, else ``"unknown"``.

    That an etag is weak is left out: the same version may have a weak one in one answer and a strong one in the next.
    """
    etag = head.headers.get("etag", "").strip().removeprefix("W/")
    if etag:
        return etag
    modified = head.headers.get("last-modified", "").strip()
    return f"modified {modified}" if modified else UNKNOWN


def plain_length(head: Head) -> int | None:
    """Return how many bytes the object has by an answer that gives it whole, or None if that does not tell."""
    length = head.headers.get("content-length", "")
    return int(length) if length.isdecimal() and not is_encoded(head) else None


def is_encoded(head: Head) -> bool:
    """Tell whether the body is compressed on its way, so that its bytes are not those of the object."""
    return head.headers.get("content-encoding", "").strip().lower() not in {"", "identity"}


def digest_of(head: Head) -> str | None:
    """Return the digest of the whole object that an answer states, as `ObjectInfo.digest`; None without one.

    Read are Repr-Digest and Digest (RFC 9530, RFC 3230), x-goog-hash, x-amz-checksum-sha256, and Content-MD5.
    """
    headers = head.headers
    found: dict[str, str] = {}
    for name in ("repr-digest", "digest", "x-goog-hash"):
        for part in headers.get(name, "").split(","):
            kind, _, value = part.strip().partition("=")
            found.setdefault(kind.strip().lower().replace("-", ""), value.strip(" :"))
    if "x-amz-checksum-sha256" in headers and headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        found.setdefault("sha256", headers["x-amz-checksum-sha256"])
    if head.status != 206:
        found.setdefault("md5", headers.get("content-md5", ""))
    for kind, length in (("sha256", 32), ("md5", 16)):
        try:
            raw = base64.b64decode(found.get(kind, ""), validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(raw) == length:
            return f"{kind}:{raw.hex()}"
    return None


def expiry_of_redirect(head: Head, target: str, now: float) -> float:
    """Return until when a redirect may be remembered, in seconds since 1970.

    A signed address says itself when it ends; else Cache-Control and Expires say it; else a permanent redirect holds
    for a day and any other for five minutes. Every answer is checked against the version that was opened, so a
    redirect that is remembered for too long costs a request and never gives wrong bytes.

    Args:
        head: The redirect.
        target: Where it leads.
        now: Seconds since 1970.
    """
    signed = _signed_until(target)
    if signed is not None:
        return signed - _EARLY
    age = _MAX_AGE.search(head.headers.get("cache-control", "").lower())
    if age is not None:
        return now + int(age[1])
    if "expires" in head.headers:
        try:
            return parsedate_to_datetime(head.headers["expires"]).timestamp()
        except (ValueError, TypeError, OverflowError):
            return now  # RFC 9111, 5.3: an invalid date has passed
    return now + (_FOR_GOOD if head.status in {301, 308} else _FOR_NOW)


def _signed_until(url: str) -> float | None:
    """Return when the signature of a url ends, by the parameters of S3, GCS, CloudFront and Azure."""
    query = {name.lower(): value for name, value in parse_qsl(urlsplit(url).query)}
    for vendor in ("amz", "goog"):
        begun, lasts = query.get(f"x-{vendor}-date", ""), query.get(f"x-{vendor}-expires", "")
        if begun and lasts.isdecimal():
            return _moment(begun, lasts)
    if query.get("expires", "").isdecimal():
        return float(query["expires"])
    return _moment(query["se"], "0") if "sig" in query and "se" in query else None


def _moment(text: str, lasts: str) -> float | None:
    """Return the seconds since 1970 of an ISO date, such as ``20261129T120000Z``, and so many seconds after it."""
    from datetime import datetime  # noqa: PLC0415 - few urls are signed

    try:
        begun = datetime.fromisoformat(text)
    except ValueError:
        return None
    return begun.replace(tzinfo=begun.tzinfo or UTC).timestamp() + int(lasts)


def check_redirect(url: str, source: str, target: str) -> None:
    """Refuse a redirect that leads away from the web, or from an encrypted connection to a plain one.

    Raises:
        AccessError: It does.
    """
    try:
        parts = urlsplit(target)
        scheme, origin, is_address = parts.scheme.lower(), urlsplit(source).scheme.lower(), parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise AccessError("the server redirects to what is no address", url=url)
    if scheme not in {"http", "https"}:
        raise AccessError(f"the server redirects to {scheme}://, which is not followed", url=url)
    if origin == "https" and scheme == "http":
        raise AccessError("the server redirects from https to http, which is not followed", url=url)


def check_version(info: ObjectInfo, head: Head, size: int | None) -> None:
    """Refuse an answer from another version of the object than the one that was opened.

    What an answer leaves out cannot be compared: without etag and date, the size alone decides.

    Raises:
        ChangedError: It is of another version.
    """
    identity = identity_of(head)
    kind_differs = identity.startswith("modified ") != info.identity.startswith("modified ")
    same = identity == info.identity or UNKNOWN in {identity, info.identity} or kind_differs
    if same and size in (None, info.size):
        return
    what = "another version" if not same else f"{size} bytes where there were {info.size}"
    raise ChangedError(
        f"the object changed while it was read: the server has {what}", url=info.url, hint="open the dataset again"
    )


def check_partial(info: ObjectInfo, offset: int, length: int, head: Head) -> int:
    """Check an answer of status 206 against what was asked.

    Returns:
        How many bytes it brings: `length`, or fewer where the server gives a range in pieces.

    Raises:
        RangeIgnoredError: It is not the range that was asked for, or does not say which it is.
        ChangedError: It is of another version of the object.
    """
    told = head.headers.get("content-range")
    try:
        found = None if told is None else parse_content_range(told)
    except ValueError:
        found = None
    if is_encoded(head):
        raise _ignored(info, "compressed it", head)
    if found is None:
        raise _ignored(
            info, f"says {told!r} for which" if told is not None else "does not say which bytes it gives", head
        )
    start, count, total = found
    check_version(info, head, total)
    if start != offset or not 0 < count <= length:
        raise _ignored(info, f"gives bytes {start} to {start + count} for {offset} to {offset + length}", head)
    sent = head.headers.get("content-length", "")
    if sent.isdecimal() and int(sent) != count:
        raise _ignored(info, f"gives {sent} bytes for a range of {count}", head)
    return count


def check_full(info: ObjectInfo, head: Head, *, wanted: bool) -> None:
    """Check an answer of status 200, which brings the whole object.

    Args:
        info: The object.
        head: The answer.
        wanted: The whole object was asked for, or may be downloaded for a part of it.

    Raises:
        RangeIgnoredError: It was not, or its bytes are not those of the object.
        ChangedError: It is of another version.
    """
    if is_encoded(head):
        raise _ignored(info, "compressed it", head)
    check_version(info, head, plain_length(head))
    if not wanted:
        raise _ignored(info, "gives the whole object", head)


def _ignored(info: ObjectInfo, what: str, head: Head) -> StorageError:
    return RangeIgnoredError(
        f"the server does not give the range that was asked for: it {what} (status {head.status})",
        url=info.url,
        hint="use a shard cache, which downloads whole shards, or HttpStore(allow_full_downloads=True)",
    )
