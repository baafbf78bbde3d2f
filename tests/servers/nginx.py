"""A real nginx on a free port of this machine, with a log that tests count requests and bytes in."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from urllib.request import urlopen

from servers.delay import DelayProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

# Debian puts it where an ordinary user's PATH does not lead.
PROGRAM: Final = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/sbin") or "nginx"

_CONFIG: Final = """
daemon off;
worker_processes 1;
{user}
worker_rlimit_nofile 8192;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    types {{ application/x-tar tar; application/json json; text/plain txt; image/jpeg jpg jpeg; }}
    default_type application/octet-stream;
    log_format lines escape=json '{{"method":"$request_method","uri":"$request_uri","status":"$status",'
        '"range":"$http_range","sent":"$body_bytes_sent","connection":"$connection","seconds":"$request_time"}}';
    access_log {folder}/access.log lines;
    sendfile on; tcp_nopush off; tcp_nodelay on; keepalive_requests 100000000; keepalive_timeout 300s;
    client_max_body_size 0; gzip off; server_tokens off; absolute_redirect off;
    server {{
        listen 127.0.0.1:{port}{ssl};
        {certificate}
        root {root}; autoindex on; charset utf-8;
        location = /-/log {{ return 204; }}
        location /json/ {{ alias {root}/; autoindex_format json; }}
        location /dav/ {{ alias {root}/; dav_methods PUT DELETE; create_full_put_path on; dav_access user:rw all:r; }}
        location /redirect/ {{ rewrite ^/redirect/(.*)$ /$1 redirect; }}
        location /gzip/ {{ alias {root}/; gzip on; gzip_types *; gzip_min_length 1; }}
    }}
}}
"""
# Ends nginx when its standard input does: when `stop` closes it, and also when the tests are killed.
_GUARD: Final = '"$@" & read -r _; kill -TERM $!; wait $!'


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A line of the access log.

    Attributes:
        method: ``GET``, ``HEAD``, ...
        uri: Path and query, as the client sent them.
        status: The status answered; 499 where the client went away first.
        range: The Range header, or ``""``.
        sent: Bytes of the body that were sent.
        connection: A number for the TCP connection.
        seconds: How long nginx worked on it.
    """

    method: str
    uri: str
    status: int
    range: str
    sent: int
    connection: int
    seconds: float


class Nginx:
    """A running nginx that serves the folder `root`. Use it as a context manager, or call `stop`.

    The tree stands under several paths: ``/`` (listings in HTML), ``json/`` (listings in JSON), ``dav/`` (also PUT and
    DELETE), ``redirect/`` (302 to the same path under ``/``) and ``gzip/`` (compressed if the client takes that).
    These names in `root` itself are hidden by them.

    Args:
        root: The folder.
        latency: Seconds by which every request is held back, by a `DelayProxy`.
        tls: Serve https, with a certificate for 127.0.0.1 and localhost of a CA made for this server.

    Attributes:
        url: The address of `root`; ends with a slash.
        port: Where clients connect: the proxy's port if there is a latency.
        ca_file: The CA's certificate, a PEM file; None without TLS.

    Raises:
        RuntimeError: nginx did not start; the text has its error log.
    """

    def __init__(self, root: Path, *, latency: float = 0, tls: bool = False) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="nginx-")
        self._folder = Path(self._temporary.name)
        self._start_of_log = self._markers = 0
        self._proxy: DelayProxy | None = None
        self.ca_file = self._make_certificates() if tls else None
        certificate = f"ssl_certificate {self._folder}/server.pem; ssl_certificate_key {self._folder}/server.pem;"
        # The port is bound here and handed over, in the way in which nginx hands its ports to a newer nginx: nobody
        # else can take it meanwhile, and connections that are made before nginx is up wait for it.
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            config = _CONFIG.format(
                folder=_quoted(self._folder),
                root=_quoted(Path(root).resolve()),
                port=port,
                ssl=" ssl" if tls else "",
                certificate=certificate if tls else "",
                user=_user(),
            )
            (self._folder / "nginx.conf").write_text(config)
            nginx = [PROGRAM, "-p", self._folder, "-c", self._folder / "nginx.conf", "-e", self._folder / "error.log"]
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, "nginx", *nginx],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "NGINX": f"{listener.fileno()};"},
            )
        scheme = "https" if tls else "http"
        self._own_url = f"{scheme}://127.0.0.1:{port}/"
        try:
            self.requests()
            if latency:
                self._proxy = DelayProxy(port, latency)
        except BaseException:
            self.stop()
            raise
        self.port = self._proxy.port if self._proxy else port
        self.url = f"{scheme}://127.0.0.1:{self.port}/"

    def requests(self) -> list[LoggedRequest]:
        """Return the requests answered since the start, or since `forget`, in the order in which they ended.

        Every answer that a client has received to its end is among them: nginx logs in the same step in which it sends
        the last byte, so that all of them stand before a request that is made now.
        """
        self._markers += 1
        end = f"/-/log?{self._markers}"
        context = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None
        try:
            with urlopen(self._own_url + end[1:], timeout=10, context=context):
                pass
        except OSError as error:
            raise RuntimeError(f"nginx does not answer: {error}\n{self._complaints()}") from error
        stop = time.monotonic() + 10
        while True:
            lines = list(self._lines())
            if any(line.uri == end for line in lines):
                return [line for line in lines if not line.uri.startswith("/-/log")]
            if time.monotonic() > stop:
                raise RuntimeError(f"nginx writes no log\n{self._complaints()}")
            time.sleep(0.005)

    def forget(self) -> None:
        """Let `requests` begin anew."""
        self.requests()
        self._start_of_log = (self._folder / "access.log").stat().st_size

    def stop(self) -> None:
        """End nginx and the proxy, and remove their files."""
        if self._proxy:
            self._proxy.stop()
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stderr.close()
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _lines(self) -> Iterator[LoggedRequest]:
        with (self._folder / "access.log").open("rb") as file:
            file.seek(self._start_of_log)
            for line in file:
                if line.endswith(b"\n"):
                    found = json.loads(line)
                    numbers = {name: int(found[name]) for name in ("status", "sent", "connection")}
                    yield LoggedRequest(**{**found, **numbers, "seconds": float(found["seconds"])})

    def _complaints(self) -> str:
        log = self._folder / "error.log"
        return log.read_text() if log.exists() else ""

    def _make_certificates(self) -> Path:
        import trustme  # only the tests with TLS need it

        authority = trustme.CA()
        authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
            str(self._folder / "server.pem")
        )
        authority.cert_pem.write_to_path(str(self._folder / "ca.pem"))
        return self._folder / "ca.pem"


def serve_nginx(root: Path, *, latency: float = 0, tls: bool = False) -> Nginx:
    """Start an nginx that serves the folder `root`."""
    return Nginx(root, latency=latency, tls=tls)


def _user() -> str:
    """Return the line that lets a worker started by root stay root, so that it sees what the tests see."""
    if os.name != "posix" or os.geteuid() != 0:
        return ""
    import grp
    import pwd

    return f"user {pwd.getpwuid(0).pw_name} {grp.getgrgid(0).gr_name};"


def _quoted(path: Path) -> str:
    """Return a path as it may stand in the configuration, where ``$`` means a variable and cannot be escaped."""
    text = str(path)
    if "$" in text or '"' in text or "\\" in text or "\n" in text:
        raise ValueError(f"nginx cannot be told to use the path {text!r}")
    return text if text.isascii() and " " not in text else text.replace(" ", r"\ ")
