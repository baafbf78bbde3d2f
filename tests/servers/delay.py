"""A TCP proxy that makes every request wait, as a far server would, and lets bytes through at full speed.

What a client sends after the server has answered is a new request: it is held back for the given time. Nothing else is.
So each request on a kept-alive connection costs one latency, a TLS handshake costs its round trips, and a download of
any length costs one wait. Making the TCP connection itself costs nothing, which is kinder than a network.

The proxy is a process of its own, so that its threads and the client's do not share an interpreter. It ends when the
process that started it does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Final, Self

_PIECE: Final = 1 << 20


class DelayProxy:
    """A running proxy. Use it as a context manager, or call `stop`.

    Attributes:
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(self, port: int, seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(port), repr(float(seconds))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.strip():
            self.stop()
            raise RuntimeError("the delay proxy did not start")
        self.port = int(line)

    def stop(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def delay_proxy(port: int, seconds: float) -> DelayProxy:
    """Start a proxy to a port of this machine that holds every request back for some seconds."""
    return DelayProxy(port, seconds)


class _Connection:
    """One client's connection and the one made for it to the server, with a thread for each direction."""

    def __init__(self, client: socket.socket, port: int, seconds: float) -> None:
        self.client = client
        self.server = socket.create_connection(("127.0.0.1", port))
        for side in (self.client, self.server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.seconds = seconds
        self.answered = True  # nothing was asked yet, so what comes first is a request
        for work in (self._carry_requests, self._carry_answers):
            threading.Thread(target=work, daemon=True).start()

    def _carry_requests(self) -> None:
        buffer = memoryview(bytearray(_PIECE))
        with contextlib.suppress(OSError):
            while count := self.client.recv_into(buffer):
                if self.answered:
                    self.answered = False
                    time.sleep(self.seconds)
                self.server.sendall(buffer[:count])
        # The client will send no more, and may still wait for its answer.
        _shut(self.server, socket.SHUT_WR)

    def _carry_answers(self) -> None:
        with contextlib.suppress(OSError):
            if hasattr(os, "splice"):
                self._splice_answers()
            else:
                self._copy_answers()
        for side in (self.client, self.server):
            _shut(side, socket.SHUT_RDWR)
            side.close()

    def _copy_answers(self) -> None:
        buffer = memoryview(bytearray(_PIECE))
        while count := self.server.recv_into(buffer):
            self.answered = True
            self.client.sendall(buffer[:count])

    def _splice_answers(self) -> None:
        """Hand the bytes on inside the kernel: several GB/s, and this process never sees them."""
        import fcntl  # absent where there is no splice

        out, into = os.pipe()
        try:
            with contextlib.suppress(OSError):  # an ordinary user may have no more room for pipes
                fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIECE)
            while count := os.splice(self.server.fileno(), into, _PIECE):
                self.answered = True
                while count:
                    count -= os.splice(out, self.client.fileno(), count)
        finally:
            os.close(out)
            os.close(into)


def _shut(side: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(how)


def _accept(listener: socket.socket, port: int, seconds: float) -> None:
    while True:
        client, _ = listener.accept()
        try:
            _Connection(client, port, seconds)
        except OSError:  # nobody listens there now
            client.close()


def _main() -> None:
    port, seconds = int(sys.argv[1]), float(sys.argv[2])
    sys.setswitchinterval(0.0005)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    threading.Thread(target=_accept, args=(listener, port, seconds), daemon=True).start()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()  # ends when the parent closes its side, or ends


if __name__ == "__main__":
    _main()
