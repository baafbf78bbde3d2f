"""What a misbehaving server does to an answer: small values that wrap the right answer in a fault.

A `Fault` is told what was asked and how to get the right answer, and gives back a wrong one. Faults can be combined:
those added first to a server see the work of those added later.
"""

from __future__ import annotations

import gzip
import random
import time
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(slots=True)
class Request:
    """A request as it came, and what became of it.

    Attributes:
        method: ``GET``, ``HEAD``, ``PUT``, ...
        path: Path and query, as the client sent them.
        headers: Names in lower case.
        body: What a PUT brought.
        connection: A number for the TCP connection, from 1.
        time: Seconds on the monotonic clock when it had come.
        status: The status answered; None if there was no answer.
        sent: Bytes of the body that were handed to the network.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    connection: int = 0
    time: float = 0.0
    status: int | None = None
    sent: int = 0


class Asked(NamedTuple):
    """What the right answer is made from, so that a fault can make it from something else.

    Attributes:
        request: The request.
        headers: Its headers.
        data: The object's bytes; None where there is none.
        matched: How many requests, this one included, the fault was meant for.
    """

    request: Request
    headers: Mapping[str, str]
    data: bytes | None
    matched: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and the manner in which it is sent.

    Attributes:
        status: The HTTP status.
        headers: Names as they are sent, in order. A name whose value is None is not sent.
        body: What a GET is sent; a HEAD is told its length only.
        wait: Seconds of silence before the first byte.
        raw: Sent in place of status line, headers and body.
        after: The body ends after so many bytes, whatever Content-Length says; -1 sends not even the headers.
        ending: What then happens to the connection: ``"keep"``, ``"close"``, ``"reset"`` or ``"quiet"`` (it stays
            open, and nothing more is sent or read).
        piece: How many bytes are sent at once, where `pause` is not 0.
        pause: Seconds between them.
        chunked: Use chunked transfer coding, without Content-Length.
        trailing: Bytes sent after the body, which nobody asked for.
    """

    status: int
    headers: dict[str, str | None] = field(default_factory=dict)
    body: bytes | memoryview = b""
    wait: float = 0.0
    raw: bytes | None = None
    after: int | None = None
    ending: str = "keep"
    piece: int = 1
    pause: float = 0.0
    chunked: bool = False
    trailing: bytes = b""

    def with_headers(self, headers: Mapping[str, str | None]) -> Answer:
        """Return the same answer with some headers set, or taken away where the value is None."""
        return replace(self, headers={**self.headers, **headers})


if TYPE_CHECKING:
    Proceed = Callable[[Asked], Answer]
    """Gives the right answer (or that of the next fault)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to misbehave. `act` is told what was asked and how to proceed, and gives the answer."""

    name: str
    act: Callable[[Asked, Proceed], Answer]

    # Answers that are late or say no

    @staticmethod
    def latency(seconds: float) -> Fault:
        """Answer rightly, but only after some seconds."""
        return Fault("latency", partial(_change, wait=seconds))

    @staticmethod
    def status(
        code: int,
        *,
        retry_after: float | str | None = None,
        headers: Mapping[str, str | None] | None = None,
        body: bytes = b"no\n",
    ) -> Fault:
        """Answer with a status alone.

        Args:
            code: The status.
            retry_after: For the header of that name: seconds, or ``"date:2"`` for the date in 2 seconds.
            headers: Others.
            body: The body.
        """
        return Fault(f"status {code}", partial(_status, code, retry_after, dict(headers or {}), body))

    @staticmethod
    def rate_limit(left: int, reset: int, *, code: int | None = None, style: str = "new") -> Fault:
        """Say in headers how many requests are left, and for how long: with the right answer, or with a status.

        Args:
            left: Requests left.
            reset: Seconds until the count begins anew.
            code: Answer with this status, such as 429.
            style: ``"new"`` for RateLimit, ``"old"`` for RateLimit-Remaining and RateLimit-Reset.
        """
        fields: dict[str, str | None] = {"RateLimit": f'"api";r={left};t={reset}'}
        if style == "old":
            fields = {"RateLimit-Limit": "100", "RateLimit-Remaining": f"{left}", "RateLimit-Reset": f"{reset}"}
        return Fault.status(code, headers=fields) if code else Fault.headers(fields)

    @staticmethod
    def headers(headers: Mapping[str, str | None]) -> Fault:
        """Answer rightly with some headers set, or left away where the value is None."""
        return Fault("headers", partial(_headers, dict(headers)))

    # Connections that break

    @staticmethod
    def truncate(after: int) -> Fault:
        """Close the connection after so many bytes of the body; Content-Length promises all of them."""
        return Fault("truncate", partial(_change, after=after, ending="close"))

    @staticmethod
    def reset(after: int | None = None) -> Fault:
        """Reset the connection (RST) after so many bytes of the body, or before the headers."""
        return Fault("reset", partial(_change, after=-1 if after is None else after, ending="reset"))

    @staticmethod
    def quiet(after: int | None = None) -> Fault:
        """Send nothing more after so many bytes of the body, or nothing at all, and leave the connection open."""
        return Fault("quiet", partial(_change, after=-1 if after is None else after, ending="quiet"))

    @staticmethod
    def hang_up() -> Fault:
        """Answer rightly, then close the connection that the client takes for kept alive."""
        return Fault("hang up", partial(_change, ending="close"))

    @staticmethod
    def drip(pause: float = 0.2, piece: int = 1) -> Fault:
        """Send the body rightly, `piece` bytes at a time with pauses of some seconds."""
        return Fault("drip", partial(_change, piece=piece, pause=pause))

    @staticmethod
    def garbage(raw: bytes = b"\x00\xff\x13 this is not HTTP \x80\r\n\r\n") -> Fault:
        """Answer with something that is no HTTP, and close."""
        return Fault("garbage", partial(_change, raw=raw, ending="close"))

    # Ranges that are wrong

    @staticmethod
    def ignore_range() -> Fault:
        """Answer 200 with the whole object, whatever range was asked for."""
        return Fault("ignore range", _ignore_range)

    @staticmethod
    def other_offset(by: int = 1) -> Fault:
        """Answer another range, of the same length if there is one, and say so in Content-Range."""
        return Fault("other offset", partial(_other_offset, by))

    @staticmethod
    def part(most: int) -> Fault:
        """Answer the first so many bytes of a range, and say so in Content-Range, as the standard allows."""
        return Fault("part", partial(_part, most))

    @staticmethod
    def content_range(text: str | None) -> Fault:
        """Send the right bytes with another Content-Range.

        Args:
            text: The header, with ``{first}``, ``{last}`` and ``{total}`` for the right numbers, and ``{next_first}``
                and ``{next_last}`` for those plus 1; None leaves it away.
        """
        return Fault("content range", partial(_content_range, text))

    @staticmethod
    def body_length(by: int) -> Fault:
        """Answer with a body shorter (negative) or longer than its Content-Range says; Content-Length is true."""
        return Fault("body length", partial(_body_length, by))

    @staticmethod
    def content_length(by: int) -> Fault:
        """Send the right body under a Content-Length that is too small (negative) or too large."""
        return Fault("content length", partial(_content_length, by))

    @staticmethod
    def multipart() -> Fault:
        """Answer a range with a multipart/byteranges body."""
        return Fault("multipart", _multipart)

    @staticmethod
    def trailing(data: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad") -> Fault:
        """Send bytes after the body that nobody asked for."""
        return Fault("trailing", partial(_change, trailing=data))

    @staticmethod
    def gzip() -> Fault:
        """Compress the body, and say so in Content-Encoding, whether or not the client takes that."""
        return Fault("gzip", _gzip)

    @staticmethod
    def chunked() -> Fault:
        """Answer rightly in chunked transfer coding, without Content-Length; a HEAD has neither."""
        return Fault("chunked", partial(_change, chunked=True))

    @staticmethod
    def endless() -> Fault:
        """Answer rightly without a length, as HTTP/1.0 did: the body ends with the connection."""
        return Fault("endless", _endless)

    # Objects that change, and objects that are elsewhere

    @staticmethod
    def changed(data: bytes) -> Fault:
        """Answer as if the object were another one, with its own etag."""
        return Fault("changed", partial(_changed, data))

    @staticmethod
    def no_etag(*, no_date: bool = False) -> Fault:
        """Answer rightly without ETag, and without Last-Modified if `no_date`."""
        return Fault.headers({"ETag": None, "Last-Modified": None} if no_date else {"ETag": None})

    @staticmethod
    def redirect(to: str, *, status: int = 302, uses: int | None = None, cache: str | None = None) -> Fault:
        """Send the client elsewhere.

        Args:
            to: A path of this server, or a whole url.
            status: 301, 302, 303, 307 or 308.
            uses: The address carries a signature that a `FaultServer` takes so many times; then it answers 403.
            cache: A Cache-Control header, such as ``"max-age=60"``.
        """
        return Fault("redirect", partial(_redirect, to, status, uses, cache))

    @staticmethod
    def redirect_loop() -> Fault:
        """Send the client to where it is already, under ever new queries."""
        return Fault("redirect loop", _redirect_loop)


def _change(asked: Asked, proceed: Proceed, **changes: object) -> Answer:
    return replace(proceed(asked), **changes)


def _headers(headers: dict[str, str | None], asked: Asked, proceed: Proceed) -> Answer:
    return proceed(asked).with_headers(headers)


def _status(
    code: int, retry_after: float | str | None, headers: dict[str, str | None], body: bytes, asked: Asked, _: Proceed
) -> Answer:
    if isinstance(retry_after, str):
        # A date has no fractions: the next whole second, so that the wait is never shorter than was asked for.
        retry_after = formatdate(int(time.time() + float(retry_after.removeprefix("date:"))) + 1, usegmt=True)
    if retry_after is not None:
        headers = {"Retry-After": f"{retry_after}", **headers}
    del asked
    return Answer(code, {"Content-Type": "text/plain", **headers}, body)


def _ignore_range(asked: Asked, proceed: Proceed) -> Answer:
    return proceed(asked._replace(headers={name: value for name, value in asked.headers.items() if name != "range"}))


def _other_offset(by: int, asked: Asked, proceed: Proceed) -> Answer:
    answer = proceed(asked)
    if answer.status != 206 or asked.data is None:
        return answer
    first, last, total = _numbers(answer)
    if 0 <= first + by <= last + by < total:
        first, last = first + by, last + by
    else:
        first += 1  # at the edge there is none of the same length
    headers = {"Content-Range": f"bytes {first}-{last}/{total}"}
    return replace(answer.with_headers(headers), body=memoryview(asked.data)[first : last + 1])


def _part(most: int, asked: Asked, proceed: Proceed) -> Answer:
    answer = proceed(asked)
    if answer.status != 206 or len(answer.body) <= most:
        return answer
    first, _, total = _numbers(answer)
    headers = {"Content-Range": f"bytes {first}-{first + most - 1}/{total}"}
    return replace(answer.with_headers(headers), body=answer.body[:most])


def _content_range(text: str | None, asked: Asked, proceed: Proceed) -> Answer:
    answer = proceed(asked)
    if answer.status != 206 or text is None:
        return answer.with_headers({"Content-Range": None})
    first, last, total = _numbers(answer)
    text = text.format(first=first, last=last, total=total, next_first=first + 1, next_last=last + 1)
    return answer.with_headers({"Content-Range": text})


def _body_length(by: int, asked: Asked, proceed: Proceed) -> Answer:
    answer = proceed(asked)
    if answer.status not in (200, 206):
        return answer
    body = bytes(answer.body) + b"\xee" * by if by > 0 else answer.body[:by]
    return replace(answer, body=body).with_headers({"Content-Length": f"{len(body)}"})


def _content_length(by: int, asked: Asked, proceed: Proceed) -> Answer:
    answer = proceed(asked)
    if answer.status not in (200, 206):
        return answer
    # A body shorter than said only shows when the connection ends.
    length = {"Content-Length": f"{max(0, len(answer.body) + by)}"}
    return replace(answer.with_headers(length), ending="close" if by > 0 else answer.ending)


def _multipart(asked: Asked, proceed: Proceed) -> Answer:
    answer = proceed(asked)
    if answer.status != 206:
        return answer
    part = (
        f"--b0undary\r\nContent-Type: application/octet-stream\r\nContent-Range: {answer.headers['Content-Range']}\r\n"
    )
    body = b"".join((part.encode(), b"\r\n", answer.body, b"\r\n--b0undary--\r\n"))
    headers = {"Content-Type": "multipart/byteranges; boundary=b0undary", "Content-Length": f"{len(body)}"}
    return replace(answer.with_headers({**headers, "Content-Range": None}), body=body)


def _gzip(asked: Asked, proceed: Proceed) -> Answer:
    answer = proceed(asked)
    if answer.status not in (200, 206):
        return answer
    body = gzip.compress(answer.body, 1)
    return replace(answer.with_headers({"Content-Encoding": "gzip", "Content-Length": f"{len(body)}"}), body=body)


def _endless(asked: Asked, proceed: Proceed) -> Answer:
    return replace(proceed(asked).with_headers({"Content-Length": None, "Connection": "close"}), ending="close")


def _changed(data: bytes, asked: Asked, proceed: Proceed) -> Answer:
    return proceed(asked._replace(data=data))


def _redirect(to: str, status: int, uses: int | None, cache: str | None, asked: Asked, _: Proceed) -> Answer:
    del asked
    if uses is not None:
        # The signature says how often it may be used, so that a server that never saw it made can count.
        to += f"{'&' if '?' in to else '?'}signature={random.getrandbits(64):016x}.{uses}"
    return Answer(status, {"Location": to, "Cache-Control": cache}, b"elsewhere\n")


def _redirect_loop(asked: Asked, _: Proceed) -> Answer:
    path = asked.request.path.partition("?")[0]
    return Answer(302, {"Location": f"{path}?turn={asked.matched}"}, b"round and round\n")


def _numbers(answer: Answer) -> tuple[int, int, int]:
    """Return first, last and total of a Content-Range that the server has made."""
    span, _, total = (answer.headers["Content-Range"] or "").removeprefix("bytes ").partition("/")
    first, _, last = span.partition("-")
    return int(first), int(last), int(total)
