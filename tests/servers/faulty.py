"""A web server that serves objects from memory rightly, except where a test has told it not to.

A test reads: ``server.add(Fault.truncate(after=1000), path="/a.tar", times=2)``. Requests that no fault is meant for
are answered as the standard says: HEAD, GET, PUT and DELETE, one range, If-Match, If-None-Match, If-Range, ETag,
Last-Modified, and a plain page of links for a path that ends with a slash.

`FaultServer` runs in threads of this process, `FaultProcess` is the same in a process of its own, for tests that fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import http.client
import os
import pickle
import re
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from email.utils import formatdate
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

from servers.delay import delay_proxy
from servers.faults import Answer, Asked, Fault, Request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader

__all__ = ["Fault", "FaultProcess", "FaultServer", "Request", "delay_proxy", "etag_of"]

_RANGE: Final = re.compile(r"bytes=([0-9]*)-([0-9]*)")
_RESET: Final = struct.pack("ii", 1, 0)
_DATE: Final = formatdate(1_700_000_000, usegmt=True)
_PIECE: Final = 1 << 20


def etag_of(data: bytes) -> str:
    """Return the ETag that the servers give an object."""
    return f'"{hashlib.sha256(data).hexdigest()[:20]}"'


@dataclass(slots=True)
class _Rule:
    """A fault and the requests that it is meant for; counted as they come."""

    fault: Fault
    path: str
    method: str | None
    first: int
    last: float
    every: int
    times: float
    seen: int = 0
    done: int = 0

    def takes(self, request: Request) -> bool:
        if self.method not in (None, request.method) or not fnmatchcase(request.path.partition("?")[0], self.path):
            return False
        self.seen += 1
        if not self.first <= self.seen <= self.last or (self.seen - self.first) % self.every or self.done >= self.times:
            return False
        self.done += 1
        return True


class FaultServer:
    """The server, listening on a free port of 127.0.0.1. Use it as a context manager, or call `stop`.

    Args:
        objects: What it serves: bytes by path, such as ``"/data/a.tar"``, not percent-encoded.
        tls: Serve https, with a certificate for 127.0.0.1 and localhost of a CA made for this server.

    Attributes:
        port: Its port.
        url: Its address; ends with a slash.
        ca_file: The CA's certificate, a PEM file; None without TLS.
    """

    def __init__(self, objects: dict[str, bytes] | None = None, *, tls: bool = False) -> None:
        self._objects = dict(objects or {})
        self._etags: dict[int, tuple[bytes, str]] = {}
        self._rules: list[_Rule] = []
        self._requests: list[Request] = []
        self._uses: Counter[str] = Counter()
        self._connections: dict[int, socket.socket] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="faulty-") if tls else None
        self.ca_file, self._tls = _make_tls(Path(self._temporary.name)) if self._temporary else (None, None)
        self.port = 0
        self._listener = self._listen()
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}/"
        self._start(self._accept, self._listener)

    # What a test does

    def put(self, path: str, data: bytes) -> str:
        """Serve other bytes from now on, and return their address."""
        self._objects[path] = data
        return self.url + quote(path[1:])

    def add(
        self,
        fault: Fault,
        *,
        path: str = "*",
        method: str | None = None,
        first: int = 1,
        last: float = float("inf"),
        every: int = 1,
        times: float = float("inf"),
    ) -> None:
        """Misbehave from now on.

        Args:
            fault: How.
            path: To requests for this path, without its query; ``*`` stands for anything.
            method: To requests of this method only.
            first: From the so-manieth of these requests on, counted from 1.
            last: Up to the so-manieth.
            every: To each so-manieth of these: 2 for every second one.
            times: So often at most.
        """
        with self._lock:
            self._rules.append(_Rule(fault, path, method, first, last, every, times))

    def behave(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._rules.clear()

    def requests(self, method: str | None = None, path: str = "*") -> list[Request]:
        """Return the requests that have come since the start or since `forget`, in order, answered or not."""
        with self._lock:
            return [
                request
                for request in self._requests
                if method in (None, request.method) and fnmatchcase(request.path.partition("?")[0], path)
            ]

    def forget(self) -> None:
        """Let `requests` begin anew."""
        with self._lock:
            self._requests.clear()

    def down(self, seconds: float | None = None) -> None:
        """Refuse and close all connections; listen again after some seconds, or when `up` is called.

        The port stays bound: were it free, some other connection of this machine would soon be given it.
        """
        _close(self._listener)
        self._listener = _bind(self.port)
        self._close_connections()
        if seconds is not None:
            self._start(self._up_later, seconds)

    def up(self) -> None:
        """Listen again on the same port."""
        self._listener.listen(512)
        self._start(self._accept, self._listener)

    def stop(self) -> None:
        """Close everything and wait for the threads."""
        self._stopping.set()
        _close(self._listener)
        self._close_connections()
        for thread in self._threads:
            thread.join(10)
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Connections

    def _listen(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", self.port), backlog=512)

    def _start(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True, name="fault-server")
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()

    def _up_later(self, seconds: float) -> None:
        if not self._stopping.wait(seconds):
            self.up()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._start(self._serve, connection)

    def _close_connections(self) -> None:
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            # A shutdown reaches the client also while a forked child holds a copy of the socket.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection, one after the other."""
        number = next(self._numbers)
        with self._lock:
            self._connections[number] = connection
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
                with self._lock:
                    self._connections[number] = connection
            with connection.makefile("rb") as reader:
                while not self._stopping.is_set():
                    request = _read_request(reader, connection)
                    if request is None:
                        break
                    request.connection = number
                    if not self._respond(connection, request):
                        break
        except (OSError, http.client.HTTPException):
            pass  # the client went away
        finally:
            with self._lock:
                del self._connections[number]
            _close(connection)

    def _respond(self, connection: socket.socket, request: Request) -> bool:
        """Answer one request; say whether the connection lives on."""
        with self._lock:
            self._requests.append(request)
            rules = [(rule.fault, rule.done) for rule in self._rules if rule.takes(request)]
        path = unquote(request.path.partition("?")[0])
        proceed = self._answer
        for fault, done in reversed(rules):
            proceed = partial(_act, fault, done, proceed)
        answer = proceed(Asked(request, request.headers, self._objects.get(path)))
        if answer.wait and self._stopping.wait(answer.wait):
            return False
        request.status = answer.status if answer.after != -1 and answer.raw is None else None
        for piece, body in _wire(request, answer):
            request.sent += body  # before, so that whoever has got the bytes finds them counted
            try:
                connection.sendall(piece)
            except OSError:
                request.sent -= body
                raise
            if body and answer.pause and self._stopping.wait(answer.pause):
                return False
        if answer.ending == "quiet":
            self._keep_quiet(connection)
        if answer.ending == "reset":
            time.sleep(0.02)  # what was sent before must have arrived, for a reset overtakes it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            os.close(connection.detach())
        return answer.ending == "keep" and "close" not in request.headers.get("connection", "").lower()

    def _keep_quiet(self, connection: socket.socket) -> None:
        """Wait until the client closes the connection or the server stops."""
        connection.settimeout(0.1)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                if not connection.recv(_PIECE):
                    return

    # The right answers

    def _answer(self, asked: Asked) -> Answer:
        request, data = asked.request, asked.data
        parts = urlsplit(request.path)
        path = unquote(parts.path)
        if not self._may_use(parts.query):
            return Answer(403, {"Content-Type": "application/xml"}, b"<Error><Code>ExpiredToken</Code></Error>")
        if request.method in ("PUT", "DELETE"):
            return self._write(asked, path)
        if request.method not in ("GET", "HEAD"):
            return Answer(405, {"Allow": "GET, HEAD, PUT, DELETE"}, b"no\n")
        if data is None:
            if path.endswith("/") and any(name.startswith(path) for name in self._objects):
                return Answer(200, {"Content-Type": "text/html; charset=utf-8"}, self._page(path))
            return Answer(404, {"Content-Type": "text/plain"}, b"not here\n")
        return _serve_object(data, self._etag(data), asked)

    def _may_use(self, query: str) -> bool:
        for signature in parse_qs(query).get("signature", []):
            with self._lock:
                self._uses[signature] += 1
                if self._uses[signature] > int(signature.rpartition(".")[2]):
                    return False
        return True

    def _write(self, asked: Asked, path: str) -> Answer:
        with self._lock:
            data = self._objects.get(path)
            etag = etag_of(data) if data is not None else None
            wanted, unwanted = asked.headers.get("if-match"), asked.headers.get("if-none-match")
            is_refused = unwanted is not None and etag is not None and unwanted in (etag, "*")
            if is_refused or (wanted is not None and (etag is None or wanted not in (etag, "*"))):
                return Answer(412, {"Content-Type": "text/plain"}, b"it is not as you say\n")
            if asked.request.method == "DELETE":
                return Answer(204 if self._objects.pop(path, None) is not None else 404)
            self._objects[path] = asked.request.body
            return Answer(201 if data is None else 204, {"ETag": etag_of(asked.request.body)})

    def _page(self, path: str) -> bytes:
        """Make a page of links to what lies right below a path."""
        below = {name[len(path) :] for name in self._objects if name.startswith(path)}
        names = sorted({name.partition("/")[0] + "/" * ("/" in name) for name in below if name})
        links = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a>\n' for name in names)
        return f"<html><body><h1>Index of {html.escape(path)}</h1>\n{links}</body></html>\n".encode()

    def _etag(self, data: bytes) -> str:
        """Return `etag_of` an object, worked out once; the object is kept, so that its id stays its own."""
        if id(data) not in self._etags:
            self._etags[id(data)] = data, etag_of(data)
        return self._etags[id(data)][1]


def _act(fault: Fault, done: int, proceed: Any, asked: Asked) -> Answer:
    return fault.act(asked._replace(matched=done), proceed)


def _read_request(reader: BufferedReader, connection: socket.socket) -> Request | None:
    line = reader.readline(1 << 16).decode("latin-1").split()
    if len(line) != 3:
        return None
    headers = {name.lower(): value for name, value in http.client.parse_headers(reader).items()}
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = reader.read(int(headers.get("content-length", "0")))
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int(reader.readline().partition(b";")[0], 16):
            body += reader.read(size)
            reader.readline()
        reader.readline()
    return Request(line[0], line[1], headers, body, time=time.monotonic())


def _serve_object(data: bytes, etag: str, asked: Asked) -> Answer:
    headers: dict[str, str | None] = {
        "Content-Type": "application/octet-stream",
        "ETag": etag,
        "Last-Modified": _DATE,
        "Accept-Ranges": "bytes",
    }
    given = asked.headers
    if given.get("if-match", etag) not in (etag, "*"):
        return Answer(412, headers, b"it is not as you say\n")
    if given.get("if-none-match") in (etag, "*"):
        return Answer(304, headers)
    match = _RANGE.fullmatch(given.get("range", ""))
    is_wanted = asked.request.method == "GET" and given.get("if-range", etag) in (etag, _DATE)
    if match is None or not is_wanted or not (match[1] or match[2]):
        return Answer(200, headers, data)
    first, last = _span(match[1], match[2], len(data))
    if first >= len(data) or last < first:
        return Answer(416, {**headers, "Content-Range": f"bytes */{len(data)}"}, b"no such bytes\n")
    headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
    return Answer(206, headers, memoryview(data)[first : last + 1])


def _span(first: str, last: str, size: int) -> tuple[int, int]:
    if not first:
        return max(0, size - int(last)), size - 1 if int(last) else -1
    return int(first), min(int(last), size - 1) if last else size - 1


def _wire(request: Request, answer: Answer) -> Iterator[tuple[bytes | memoryview, int]]:
    """Yield what is sent, piece by piece, each with how many bytes of the body are in it."""
    if answer.after == -1:
        return
    if answer.raw is not None:
        yield answer.raw, 0
        return
    has_body = request.method != "HEAD" and answer.status not in (204, 304)
    headers: dict[str, str | None] = {"Server": "faulty", "Date": formatdate(usegmt=True)}
    headers["Content-Length"] = f"{len(answer.body)}"
    headers |= answer.headers
    if answer.status == 304 or answer.chunked:
        headers["Content-Length"] = None
    if answer.chunked and has_body:
        headers["Transfer-Encoding"] = "chunked"
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    reason = http.client.responses.get(answer.status, "Odd")
    head = "\r\n".join((f"HTTP/1.1 {answer.status} {reason}", *lines, "", "")).encode("latin-1")
    body = memoryview(answer.body)[: answer.after] if has_body else memoryview(b"")
    if len(body) <= _PIECE and not answer.pause and not answer.chunked:
        yield b"".join((head, body, answer.trailing)), len(body)
        return
    yield head, 0
    size = answer.piece if answer.pause else _PIECE
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        yield (b"%x\r\n%b\r\n" % (len(piece), piece) if answer.chunked else piece), len(piece)
    if answer.chunked and has_body and answer.after is None:
        yield b"0\r\n\r\n" + answer.trailing, 0
    elif answer.trailing:
        yield answer.trailing, 0


def _close(side: socket.socket) -> None:
    # Also wakes threads that wait on it, which closing alone does not.
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
    side.close()


def _bind(port: int) -> socket.socket:
    """Return a socket that holds a port and refuses connections until it listens."""
    side = socket.socket()
    side.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end = time.monotonic() + 5
    while True:
        try:
            side.bind(("127.0.0.1", port))
        except OSError:  # the thread that waited on the one before has not let go of it yet
            if time.monotonic() > end:
                raise
            time.sleep(0.001)
        else:
            return side


def _make_tls(folder: Path) -> tuple[Path, ssl.SSLContext]:
    import trustme  # only the tests with TLS need it

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return folder / "ca.pem", context


class FaultProcess:
    """A `FaultServer` in a process of its own, with the same methods. It ends when this process does."""

    def __init__(self, objects: dict[str, bytes] | None = None, *, tls: bool = False) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from servers.faulty import serve_orders; serve_orders()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        self.port, self.url, self.ca_file = self._order("start", objects, tls=tls)

    def __getattr__(self, name: str) -> Any:
        if name not in ("put", "add", "behave", "requests", "forget", "down", "up"):
            raise AttributeError(name)
        return partial(self._order, name)

    def stop(self) -> None:
        """End the process and wait for it."""
        self._process.communicate(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _order(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            pickle.dump((name, args, kwargs), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)


def serve_orders() -> None:
    """Run a `FaultServer` as standard input says, until that ends."""
    server: FaultServer | None = None
    with contextlib.suppress(EOFError):
        while True:
            name, args, kwargs = pickle.load(sys.stdin.buffer)
            if name == "start":
                server = FaultServer(*args, **kwargs)
                answer: Any = (server.port, server.url, server.ca_file)
            else:
                answer = getattr(server, name)(*args, **kwargs)
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()
    if server:
        server.stop()
