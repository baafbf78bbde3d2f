"""The real server and the proxy that makes servers slow do what they say."""

import http.client
import random
import subprocess
import time

import pytest

from servers.delay import delay_proxy
from servers.faulty import FaultServer
from servers.nginx import serve_nginx
from timing import least_seconds

pytestmark = pytest.mark.servers

DATA = random.Random(6).randbytes(10_000)
PATH = "/a.tar"


@pytest.fixture
def server():
    with FaultServer({PATH: DATA}) as server:
        yield server


def ask(server, path=PATH, method="GET", body=None):
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        client.request(method, path, body)
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def test_a_proxy_delays_each_request_on_a_kept_connection_and_nothing_else(server):
    server.put("/big", bytes(64 << 20))
    with delay_proxy(server.port, 0.05) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port)
        times = []
        for path in (*[PATH] * 10, *["/big"] * 3):
            begin = time.monotonic()
            client.request("GET", path)
            body = client.getresponse().read()
            times.append(time.monotonic() - begin)
            assert len(body) == (10_000 if path == PATH else 64 << 20)
        client.close()
    assert min(times) >= 0.05
    assert min(times[:10]) < 0.1  # one latency, not two; a busy machine may take longer for some
    assert min(times[10:]) < 3  # a wait for each megabyte would be more
    assert {request.connection for request in server.requests()} == {1}


def test_a_proxy_lets_an_upload_through_after_one_delay(server):
    with delay_proxy(server.port, 0.05) as proxy:

        def put():
            assert ask(proxy, "/up", "PUT", bytes(32 << 20))[0] == 201

        assert least_seconds(put, 1.6) < 1.6  # as above
    assert ask(server, "/up")[1] == bytes(32 << 20)


@pytest.mark.parametrize("tls", [False, True])
def test_nginx_serves_a_folder_and_counts_requests(tmp_path, tls):
    (tmp_path / "a b.tar").write_bytes(DATA)
    with serve_nginx(tmp_path, tls=tls) as nginx:
        trust = ["--cacert", str(nginx.ca_file)] if tls else []

        def curl(*arguments):
            return subprocess.run(["curl", "-sS", *trust, *arguments], capture_output=True, check=True).stdout

        assert curl("-r", "5-9", nginx.url + "a%20b.tar", nginx.url + "a%20b.tar") == 2 * DATA[5:10]
        assert b'href="a%20b.tar"' in curl(nginx.url)
        assert b'"name":"a b.tar", "type":"file"' in curl(nginx.url + "json/")
        assert curl("-L", nginx.url + "redirect/a%20b.tar") == DATA
        assert b"gzip" in curl("-I", "-X", "GET", "-H", "Accept-Encoding: gzip", nginx.url + "gzip/a%20b.tar")
        curl("-T", str(tmp_path / "a b.tar"), nginx.url + "dav/new/c.tar")
        assert (tmp_path / "new/c.tar").read_bytes() == DATA
        first, second, *others = nginx.requests()
        assert (first.method, first.uri, first.status, first.range, first.sent) == (
            *("GET", "/a%20b.tar", 206, "bytes=5-9", 5),
        )
        assert first.connection == second.connection != others[0].connection
        assert len(others) == 6
        nginx.forget()
        assert nginx.requests() == []


def test_nginx_is_slow_if_asked(tmp_path):
    (tmp_path / "a.tar").write_bytes(DATA)
    with serve_nginx(tmp_path, latency=0.05) as nginx:
        begin = time.monotonic()
        assert ask(nginx)[1] == DATA
        assert time.monotonic() - begin >= 0.05
