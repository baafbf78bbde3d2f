"""HTTP requests over libcurl: one pool of keep-alive connections a process, for all threads.

`send` carries out one request and judges nothing but the connection: redirects, retries and the meaning of an answer
are the caller's. A connection serves one request at a time and is reused for the next one to the same origin.

In a forked child nothing of the parent's pool is used: the child's copies of its sockets are put out of the way, so
that neither side can disturb what the other sends.
"""

from __future__ import annotations

import os
import string
from collections import OrderedDict
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import cache, lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from .answers import parse_head
from .retry import HostBudget
from .threads import look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .answers import Head
    from .retry import Retry

    Sink = Callable[[bytes], bool | None]
    """Takes a piece of a body; True to say that this was enough."""

_MOST_IDLE: Final = 128
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


def send(
    method: str,
    url: str,
    headers: Mapping[str, str],
    retry: Retry,
    accept: Callable[[Head], Sink | None],
) -> Head:
    """Carry out one request.

    Args:
        method: ``"GET"`` or ``"HEAD"``.
        url: Where to; its user and password, if any, are sent along.
        headers: Request headers; an empty value is sent as such.
        retry: How long a connection may take to be made and may be quiet.
        accept: Is given the head of the answer before any of the body, and returns what takes the body, piece by piece;
            None if it is not wanted.

    Returns:
        The head, when the whole body has been taken, or as much as is wanted.

    Raises:
        ConnectionFault: The connection failed, or ended early. What had been given to the sink is right so far.
        Exception: Whatever `accept` or the sink raised; the rest of the answer is dropped.
    """
    origin = origin_of(url)
    pool = _process().connections
    handle = pool.take(origin)
    exchange = _Exchange(handle, accept)
    try:
        head = exchange.run(method, url, headers, retry)
    except ConnectionFault as fault:
        handle.close()
        fault.is_stranger = fault.is_stranger and origin not in _process().reached
        raise
    except BaseException:
        handle.close()
        raise
    _process().reached.add(origin)
    if exchange.is_cut:
        handle.close()  # the rest of the body would come before the next answer
    else:
        pool.give(origin, handle)
    return head


def budget(url: str) -> HostBudget:
    """Return the budget of requests that all threads of this process share for a url's host."""
    budgets, origin = _process().budgets, origin_of(url)
    return budgets.get(origin) or budgets.setdefault(origin, HostBudget())


@lru_cache(4096)
def origin_of(url: str) -> str:
    """Return scheme, host and port of a url, in one spelling: ``"https://example.org:443"``.

    Raises:
        ValueError: The port is no number.
    """
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    port = parts.port or (443 if scheme == "https" else 80)
    return f"{scheme}://{(parts.hostname or '').lower()}:{port}"


class _Connections:
    """Idle handles by origin, the one used last first. Needs no lock: each step on a list or dict is atomic."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, list[Any]] = OrderedDict()  # the origin used last at the end

    def take(self, origin: str) -> Any:
        """Return an idle handle that has talked to this origin, or a new one."""
        try:
            return self._idle[origin].pop()
        except (KeyError, IndexError):
            return _new_handle()

    def give(self, origin: str, handle: Any) -> None:
        """Take a handle back."""
        idle = self._idle.setdefault(origin, [])
        idle.append(handle)
        with suppress(KeyError, IndexError, RuntimeError):  # another thread has just done the same
            self._idle.move_to_end(origin)
            while sum(map(len, self._idle.values())) > _MOST_IDLE:
                oldest = next(iter(self._idle))
                self._idle[oldest].pop(0).close()
                if not self._idle[oldest]:
                    del self._idle[oldest]

    def abandon(self) -> None:
        """Let go of the handles in a forked child, without a byte on the sockets, which are the parent's.

        Closing a handle says goodbye on a TLS connection; here it says so to nobody.
        """
        import pycurl

        with open(os.devnull, "wb") as nobody:  # noqa: PTH123 - a descriptor is wanted
            for handle in [handle for idle in self._idle.values() for handle in idle]:
                socket = handle.getinfo(pycurl.LASTSOCKET)
                if socket >= 0:
                    os.dup2(nobody.fileno(), socket, inheritable=False)
        self._idle.clear()


class _Process:
    """What belongs to one process."""

    def __init__(self) -> None:
        self.connections = _Connections()
        self.budgets: dict[str, HostBudget] = {}
        self.reached: set[str] = set()  # origins that have answered


# Connections and budgets are a process's own by their nature; replaced as a whole in a forked child.
_current: _Process | None = None


def _process() -> _Process:
    global _current  # noqa: PLW0603 - see above
    process = _current
    if process is None:
        process = _current = _Process()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_leave_parent)
    return process


def _leave_parent() -> None:
    global _current
    inherited, _current = _current, _Process()
    if inherited is not None:
        inherited.connections.abandon()


@cache
def _agent() -> str:
    return f"shardset/{metadata.version('shardset')}"


def _new_handle() -> Any:
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


class _Exchange:
    """One request and its answer on one handle."""

    def __init__(self, handle: Any, accept: Callable[[Head], Sink | None]) -> None:
        self._handle = handle
        self._accept = accept
        self._lines: list[bytes] = []
        self._length = 0
        self._head: Head | None = None
        self._sink: Sink | None = None
        self._error: BaseException | None = None
        self.is_cut = False

    def run(self, method: str, url: str, headers: Mapping[str, str], retry: Retry) -> Head:
        import pycurl

        handle = self._handle
        handle.setopt(pycurl.URL, quote(url, safe=_PLAIN))
        handle.setopt(pycurl.NOBODY, method == "HEAD")
        if method != "HEAD":
            handle.setopt(pycurl.HTTPGET, 1)
        handle.setopt(pycurl.HTTPHEADER, [f"{name}: {value}" for name, value in headers.items()])
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(retry.connect * 1000)))
        handle.setopt(pycurl.LOW_SPEED_TIME, max(1, round(retry.stall)))
        handle.setopt(pycurl.HEADERFUNCTION, self._take_line)
        handle.setopt(pycurl.WRITEFUNCTION, self._take_body)
        # Called all the time: it lets Ctrl-C through while libcurl waits, and ends what nobody waits for any more.
        handle.setopt(pycurl.NOPROGRESS, 0)
        handle.setopt(pycurl.XFERINFOFUNCTION, self._look_up)
        try:
            handle.perform()
        except pycurl.error as error:
            if self._error is None and not self.is_cut:
                raise _fault(error.args[0], error.args[1], handle) from None
        if self._error is not None:
            raise self._error
        head = self._head
        if head is None:
            raise ConnectionFault("the server answered with no HTTP", may_recover=True)
        if self._sink is None and not self.is_cut:
            self._accept(head)  # there was no body
        return head

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
        if self._head is None:  # libcurl before 7.66 takes whatever comes for HTTP/0.9
            self._error = ConnectionFault("the server answered with no HTTP", may_recover=True)
            return -1
        try:
            sink = self._sink
            if sink is None:
                sink = self._sink = self._accept(self._head)
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
