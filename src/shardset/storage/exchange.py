"""One HTTP request and its answer on one libcurl handle."""

from __future__ import annotations

import os
import string
from concurrent.futures import CancelledError
from functools import cache, lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from .answers import parse_head
from .threads import look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .answers import Head
    from .retry import Retry

    Sink = Callable[[bytes], bool | None]
    """Takes a piece of a body; True to say that this was enough."""

_BUFFER: Final = 512 << 10
# Slower than this for as long as a stall may last is a stall.
_LEAST_SPEED: Final = 1 << 10
_LONGEST_HEAD: Final = 256 << 10
# What stays as it is in a url; spaces and letters beyond ASCII, which people type, are encoded.
_PLAIN: Final = string.digits + string.ascii_letters + string.punctuation


class ConnectionFault(Exception):  # noqa: N818 - never leaves the package: the caller makes an error of it, or tries again
    """A connection that failed.

    Attributes:
        may_recover: It may be worth another try.
        is_stranger: No connection was made, and nobody has answered at that address in this process so far.
    """

    def __init__(self, message: str, *, may_recover: bool, is_stranger: bool = False) -> None:
        super().__init__(message)
        self.may_recover = may_recover
        self.is_stranger = is_stranger


class Ask(NamedTuple):
    """A request to be carried out. Nothing is judged but the connection.

    Attributes:
        method: ``"GET"`` or ``"HEAD"``.
        url: Where to; its user and password, if any, are sent along.
        headers: Request headers; an empty value is sent as such.
        retry: How long a connection may take to be made and may be quiet.
        accept: Is given the head of the answer before any of the body, and returns what takes the body, piece by piece;
            None if it is not wanted.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    retry: Retry
    accept: Callable[[Head], Sink | None]


@cache
def _agent() -> str:
    return f"shardset/{metadata.version('shardset')}"


@lru_cache(1024)
def _quoted(url: str) -> str:
    return quote(url, safe=_PLAIN)


def new_handle() -> Any:
    """Make a handle with what never changes. It follows no redirect: only the caller knows what may go where."""
    import certifi
    import pycurl

    handle = pycurl.Curl()
    handle.setopt(pycurl.NOSIGNAL, 1)
    handle.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)  # one request at a time: 2 and 3 only cost
    handle.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    handle.setopt(pycurl.MAXCONNECTS, 1)
    handle.setopt(pycurl.TCP_KEEPALIVE, 1)
    handle.setopt(pycurl.BUFFERSIZE, _BUFFER)
    handle.setopt(pycurl.USERAGENT, _agent())
    handle.setopt(pycurl.NETRC, pycurl.NETRC_OPTIONAL)
    handle.setopt(pycurl.LOW_SPEED_LIMIT, _LEAST_SPEED)
    trusted = os.environ.get("SSL_CERT_FILE") or os.environ.get("CURL_CA_BUNDLE") or certifi.where()
    handle.setopt(pycurl.CAINFO, trusted)
    return handle


class Exchange:
    """One request and its answer on one handle.

    Whoever has the handle work calls `prepare`, and `finish` when it is done.

    Attributes:
        ask: The request, until it is finished.
        is_cut: What is left of the body was not wanted, and would come before the next answer of this connection.
    """

    __slots__ = ("_error", "_head", "_length", "_lines", "_sink", "ask", "is_cut")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.is_cut = False
        self._lines: list[bytes] = []
        self._length = 0
        self._head: Head | None = None
        self._sink: Sink | None = None
        self._error: BaseException | None = None

    def prepare(self, handle: Any, *, looks_up: bool) -> None:
        """Tell a handle what to ask.

        Args:
            handle: The handle.
            looks_up: Let Ctrl-C through while this thread is inside libcurl, and end what nobody waits for any more.
        """
        import pycurl

        method, url, headers, retry, _ = self.ask
        handle.setopt(pycurl.URL, _quoted(url))
        handle.setopt(pycurl.NOBODY, method == "HEAD")
        if method != "HEAD":
            handle.setopt(pycurl.HTTPGET, 1)
        handle.setopt(pycurl.HTTPHEADER, [f"{name}: {value}" for name, value in headers.items()])
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(retry.connect * 1000)))
        handle.setopt(pycurl.LOW_SPEED_TIME, max(1, round(retry.stall)))
        handle.setopt(pycurl.HEADERFUNCTION, self._take_line)
        handle.setopt(pycurl.WRITEFUNCTION, self._take_body)
        handle.setopt(pycurl.NOPROGRESS, not looks_up)
        if looks_up:
            handle.setopt(pycurl.XFERINFOFUNCTION, self._look_up)

    def finish(self, handle: Any, failed: tuple[int, str] | None) -> Head:
        """Return the head of the answer, when the whole body has been taken, or as much as is wanted.

        Args:
            handle: What `prepare` was given.
            failed: What libcurl said if it failed: its number and text.

        Raises:
            ConnectionFault: The connection failed, or ended early. What had been given to the sink is right so far.
            Exception: Whatever `accept` or the sink raised; the rest of the answer is dropped.
        """
        sink, self._sink = self._sink, None  # an idle handle holds on to this, and must not to what was written into
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if failed is not None and not self.is_cut:
                raise _fault(*failed, handle)
            head = self._head
            if head is None:
                raise ConnectionFault("the server answered with no HTTP", may_recover=True)
            if sink is None and not self.is_cut:
                self.ask.accept(head)  # there was no body
            return head
        finally:
            del self.ask, error

    def _take_line(self, line: bytes) -> int | None:
        self._length += len(line)
        if self._length > _LONGEST_HEAD:
            self._error = ConnectionFault(
                f"the answer's head has more than {_LONGEST_HEAD >> 10} KiB", may_recover=False
            )
            return -1
        if self._sink is not None:
            return None  # trailers
        if self._head is not None and line.startswith(b"HTTP/"):
            self._lines.clear()  # what came before was a 1xx
            self._head = None
        self._lines.append(line)
        if line in (b"\r\n", b"\n"):
            self._head = parse_head(self._lines)
        return None

    def _take_body(self, piece: bytes) -> int | None:
        try:
            sink = self._sink
            if sink is None:
                if self._head is None:  # libcurl before 7.66 takes whatever comes for HTTP/0.9
                    raise ConnectionFault("the server answered with no HTTP", may_recover=True)  # noqa: TRY301
                sink = self._sink = self.ask.accept(self._head)
            if sink is None or sink(piece):
                self.is_cut = True
                return -1
        except BaseException as error:  # noqa: BLE001 - raised again when libcurl has returned
            self._error = error
            return -1
        return None

    def _look_up(self, *_: float) -> int:
        try:
            look_up()
        except CancelledError as error:
            self._error = error
            return 1
        return 0


def _fault(code: int, message: str, handle: Any) -> ConnectionFault:
    """Make a fault of an error of libcurl."""
    import pycurl

    final = {
        pycurl.E_URL_MALFORMAT,
        pycurl.E_PEER_FAILED_VERIFICATION,
        pycurl.E_SSL_CACERT_BADFILE,
        pycurl.E_SSL_CERTPROBLEM,
        pycurl.E_SSL_CIPHER,
        pycurl.E_OUT_OF_MEMORY,
        pycurl.E_BAD_FUNCTION_ARGUMENT,
    }
    if code == pycurl.E_OPERATION_TIMEDOUT and handle.getinfo(pycurl.CONNECT_TIME) > 0:
        message = "the connection went quiet"
    text = message or f"libcurl error {code}"
    return ConnectionFault(text, may_recover=code not in final, is_stranger=handle.getinfo(pycurl.CONNECT_TIME) == 0)
