"""Each fault happens as it is described: seen by raw sockets, by the standard library's client, and by curl."""

import gzip
import http.client
import random
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime

import pytest

from servers.faulty import Fault, FaultProcess, FaultServer, etag_of
from timing import least_seconds

pytestmark = pytest.mark.servers

DATA = random.Random(5).randbytes(10_000)
PATH = "/a.tar"


@pytest.fixture
def server():
    with FaultServer({PATH: DATA, "/dir/b c.tar": b"bc", "/dir/sub/d.tar": b"d"}) as server:
        yield server


def raw(server, path=PATH, method="GET", headers=(), wait=5.0):
    """Send one request on a connection of its own; return all that comes, and how it ended: closed, reset or quiet."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(wait)
        connection.sendall("\r\n".join((*lines, "", "")).encode())
        received = b""
        try:
            while piece := connection.recv(1 << 16):
                received += piece
        except ConnectionResetError:
            return received, "reset"
        except TimeoutError:
            return received, "quiet"
        return received, "closed"


def ask(server, path=PATH, method="GET", body=None, **headers):
    """Send a request as a good client does; return status, headers and body."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        client.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        client.close()


def split(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode(), body


# Right answers


def test_a_get_gives_the_object_with_etag_date_and_length(server):
    status, headers, body = ask(server)
    assert (status, body) == (200, DATA)
    assert headers["ETag"] == etag_of(DATA)
    assert headers["Content-Length"] == "10000"
    assert headers["Accept-Ranges"] == "bytes"
    assert parsedate_to_datetime(headers["Last-Modified"])


def test_a_head_gives_the_same_headers_and_no_body(server):
    head, body = split(raw(server, method="HEAD", headers=["Connection: close"])[0])
    assert "Content-Length: 10000" in head
    assert body == b""


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("0-0", 0, 0), ("5-9", 5, 9), ("9990-", 9990, 9999), ("-10", 9990, 9999), ("9999-20000", 9999, 9999)],
)
def test_one_range_is_answered_with_206(server, asked, first, last):
    status, headers, body = ask(server, Range=f"bytes={asked}")
    assert (status, body) == (206, DATA[first : last + 1])
    assert headers["Content-Range"] == f"bytes {first}-{last}/10000"


@pytest.mark.parametrize("asked", ["10000-", "10000-10001", "7-5", "-0"])
def test_a_range_that_the_object_does_not_have_is_answered_with_416(server, asked):
    status, headers, _ = ask(server, Range=f"bytes={asked}")
    assert (status, headers["Content-Range"]) == (416, "bytes */10000")


def test_conditions_are_heard(server):
    etag = etag_of(DATA)
    assert ask(server, If_Match=etag)[0] == 200
    assert ask(server, If_Match='"other"')[0] == 412
    assert ask(server, If_None_Match=etag)[0] == 304
    assert ask(server, Range="bytes=0-4", If_Range=etag)[0] == 206
    assert ask(server, Range="bytes=0-4", If_Range='"other"')[::2] == (200, DATA)


def test_objects_are_written_and_removed_under_conditions(server):
    assert ask(server, "/new", "PUT", b"one", If_None_Match="*")[0] == 201
    assert ask(server, "/new", "PUT", b"two", If_None_Match="*")[0] == 412
    assert ask(server, "/new", "PUT", b"two", If_Match=etag_of(b"one"))[0] == 204
    assert ask(server, "/new", "PUT", b"three", If_Match=etag_of(b"one"))[0] == 412
    assert ask(server, "/none", "PUT", b"x", If_Match="*")[0] == 412
    assert ask(server, "/new")[2] == b"two"
    assert ask(server, "/new", "DELETE")[0] == 204
    assert ask(server, "/new")[0] == 404


def test_folders_have_pages_and_names_are_percent_encoded(server):
    assert b'href="b%20c.tar"' in ask(server, "/dir/")[2]
    assert b'href="sub/"' in ask(server, "/dir/")[2]
    assert ask(server, "/dir/b%20c.tar")[2] == b"bc"
    assert ask(server, "/none/")[0] == 404
    assert server.put("/x/ü 1.tar", b"") == server.url + "x/%C3%BC%201.tar"


def test_a_connection_is_kept_alive_and_answers_at_once(server):
    client = http.client.HTTPConnection("127.0.0.1", server.port)

    def ask_often():
        for number in range(200):
            client.request("GET", PATH, headers={"Range": f"bytes={number}-{number + 99}"})
            assert client.getresponse().read() == DATA[number : number + 100]

    assert least_seconds(ask_often, 6) < 6  # 8 with Nagle
    client.close()
    assert {request.connection for request in server.requests()} == {1}


def test_requests_are_logged_with_what_was_sent(server):
    ask(server, f"{PATH}?x=1", Range="bytes=0-9")
    ask(server, "/none", "HEAD")
    first, second = server.requests()
    assert (first.method, first.path, first.status, first.sent) == ("GET", "/a.tar?x=1", 206, 10)
    assert first.headers["range"] == "bytes=0-9"
    assert (second.method, second.path, second.status, second.sent) == ("HEAD", "/none", 404, 0)
    assert second.time >= first.time
    assert second.connection != first.connection
    assert server.requests("GET", "/a.*") == [first]
    server.forget()
    assert server.requests() == []


# Which requests a fault is meant for


def statuses(server, count, **kwargs):
    return [ask(server, **kwargs)[0] for _ in range(count)]


def test_a_fault_is_for_paths_methods_and_numbers_of_requests(server):
    server.add(Fault.status(503), path="/a.*", method="GET", first=2, last=3)
    assert statuses(server, 5) == [200, 503, 503, 200, 200]
    assert statuses(server, 2, path="/dir/b%20c.tar") == [200, 200]
    server.add(Fault.status(405), method="HEAD")
    assert statuses(server, 2, method="HEAD") == [405, 405]
    server.behave()
    assert statuses(server, 2, method="HEAD") == [200, 200]


def test_a_fault_is_for_some_times_or_for_each_so_manieth(server):
    server.add(Fault.status(500), times=2)
    assert statuses(server, 4) == [500, 500, 200, 200]
    server.add(Fault.status(502), every=3)
    assert statuses(server, 7) == [502, 200, 200, 502, 200, 200, 502]


def test_faults_are_combined(server):
    server.add(Fault.latency(0.1))
    server.add(Fault.truncate(after=7))
    begin = time.monotonic()
    answer, end = raw(server)
    assert time.monotonic() - begin > 0.1
    assert (split(answer)[1], end) == (DATA[:7], "closed")


# Late answers, and answers that say no


def test_latency_comes_before_the_first_byte(server):
    server.add(Fault.latency(0.15))
    begin = time.monotonic()
    assert ask(server)[2] == DATA
    assert 0.15 <= time.monotonic() - begin < 30


def test_a_status_has_retry_after_in_seconds_or_as_a_date(server):
    server.add(Fault.status(429, retry_after=3), times=1)
    server.add(Fault.status(503, retry_after="date:5", body=b"later"), times=2)
    status, headers, _ = ask(server)
    assert (status, headers["Retry-After"]) == (429, "3")
    before = time.time()
    status, headers, body = ask(server)
    assert (status, body) == (503, b"later")
    assert before + 4.9 < parsedate_to_datetime(headers["Retry-After"]).timestamp() < time.time() + 7
    assert ask(server)[0] == 200


def test_rate_limits_are_told_in_both_styles(server):
    server.add(Fault.rate_limit(3, 7), times=1)
    status, headers, body = ask(server)
    assert (status, headers["RateLimit"], body) == (200, '"api";r=3;t=7', DATA)
    server.add(Fault.rate_limit(0, 2, code=429, style="old"))
    status, headers, _ = ask(server)
    assert (status, headers["RateLimit-Remaining"], headers["RateLimit-Reset"]) == (429, "0", "2")


# Connections that break


def test_a_truncated_body_ends_too_early(server):
    server.add(Fault.truncate(after=1000), times=2)
    for headers, length in ((), 10_000), (["Range: bytes=0-1999"], 2000):
        answer, end = raw(server, headers=headers)
        head, body = split(answer)
        assert f"Content-Length: {length}" in head
        assert (body, end) == (DATA[:1000], "closed")
    curl = subprocess.run(["curl", "-sS", server.url + "a.tar", "-o", "-"], capture_output=True, check=False)
    assert curl.stdout == DATA
    server.add(Fault.truncate(after=1000))
    curl = subprocess.run(["curl", "-sS", server.url + "a.tar", "-o", "-"], capture_output=True, check=False)
    assert (curl.stdout, curl.returncode) == (DATA[:1000], 18)  # partial file


def test_a_connection_is_reset_after_some_bytes_or_before_the_headers(server):
    server.add(Fault.reset(after=1000), times=1)
    answer, end = raw(server)
    assert (split(answer)[1], end) == (DATA[:1000], "reset")
    server.add(Fault.reset())
    assert raw(server) == (b"", "reset")
    curl = subprocess.run(["curl", "-sS", server.url + "a.tar"], capture_output=True, check=False)
    assert b"reset" in curl.stderr
    assert server.requests()[-1].status is None


def test_a_connection_goes_quiet_after_some_bytes_or_before_the_headers(server):
    server.add(Fault.quiet(after=1000), times=1)
    answer, end = raw(server, wait=0.6)
    assert (split(answer)[1], end) == (DATA[:1000], "quiet")
    server.add(Fault.quiet())
    assert raw(server, wait=0.3) == (b"", "quiet")


def test_a_server_stops_while_connections_are_quiet(server):
    server.add(Fault.quiet())
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while not server.requests():
            time.sleep(0.01)
        begin = time.monotonic()
        server.stop()
        assert time.monotonic() - begin < 30
        assert connection.recv(10) == b""


def test_a_server_hangs_up_after_a_whole_answer(server):
    server.add(Fault.hang_up())
    answer, end = raw(server)
    head, body = split(answer)
    assert "close" not in head.lower()
    assert (body, end) == (DATA, "closed")


def test_a_body_drips(server):
    server.put("/small", b"abcde")
    server.add(Fault.drip(pause=0.05))
    begin = time.monotonic()
    assert ask(server, "/small")[2] == b"abcde"
    assert time.monotonic() - begin >= 0.2


def test_garbage_is_no_http(server):
    server.add(Fault.garbage(b"\0\1\2 hello\r\n\r\n"))
    assert raw(server) == (b"\0\1\2 hello\r\n\r\n", "closed")


def test_a_server_that_is_down_refuses_connections_and_comes_back_on_its_port(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /none HTTP/1.1\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 404"
        server.down(0.3)
        while connection.recv(1000):  # it is closed, too
            pass
    with pytest.raises(ConnectionRefusedError):
        ask(server)
    end = time.monotonic() + 5
    while True:
        try:
            assert ask(server)[2] == DATA
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)
    server.down()
    with pytest.raises(ConnectionRefusedError):
        ask(server)
    server.up()
    assert ask(server)[2] == DATA


# Ranges that are wrong


def test_an_ignored_range_brings_the_whole_object(server):
    server.add(Fault.ignore_range())
    status, headers, body = ask(server, Range="bytes=5-9")
    assert (status, body) == (200, DATA)
    assert "Content-Range" not in headers


def test_another_range_is_given_and_said_to_be(server):
    server.add(Fault.other_offset(by=3))
    status, headers, body = ask(server, Range="bytes=5-9")
    assert (status, headers["Content-Range"], body) == (206, "bytes 8-12/10000", DATA[8:13])
    assert ask(server, Range="bytes=9995-9999")[2] == DATA[9996:]


def test_a_part_of_a_range_is_given_and_said_to_be(server):
    server.add(Fault.part(most=3))
    status, headers, body = ask(server, Range="bytes=5-9")
    assert (status, headers["Content-Range"], headers["Content-Length"], body) == (
        *(206, "bytes 5-7/10000", "3", DATA[5:8]),
    )
    assert ask(server, Range="bytes=5-6")[2] == DATA[5:7]


def test_a_body_without_a_length_ends_with_the_connection(server):
    server.add(Fault.endless())
    answer, end = raw(server)
    head, body = split(answer)
    assert "Content-Length" not in head
    assert (body, end) == (DATA, "closed")


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("bytes {next_first}-{next_last}/{total}", "bytes 6-10/10000"),
        ("bytes {first}-{last}/77", "bytes 5-9/77"),
        ("bytes {first}-{last}/*", "bytes 5-9/*"),
        ("octets what/ever", "octets what/ever"),
        (None, None),
    ],
)
def test_the_content_range_is_wrong_over_the_right_bytes(server, text, sent):
    server.add(Fault.content_range(text))
    status, headers, body = ask(server, Range="bytes=5-9")
    assert (status, headers["Content-Range"], body) == (206, sent, DATA[5:10])


def test_a_body_is_shorter_or_longer_than_its_content_range_says(server):
    for by, expected in ((-2, DATA[5:8]), (2, DATA[5:10] + b"\xee\xee")):
        server.behave()
        server.add(Fault.body_length(by))
        _, headers, body = ask(server, Range="bytes=5-9")
        assert (headers["Content-Range"], headers["Content-Length"]) == ("bytes 5-9/10000", str(len(expected)))
        assert body == expected


def test_a_content_length_is_too_small_or_too_large(server):
    server.add(Fault.content_length(-2))
    answer, end = raw(server, headers=["Range: bytes=5-9"], wait=0.2)
    assert "Content-Length: 3\r\n" in answer.decode("latin-1")
    assert (split(answer)[1], end) == (DATA[5:10], "quiet")  # kept alive, with two bytes too many
    server.behave()
    server.add(Fault.content_length(2))
    answer, end = raw(server, headers=["Range: bytes=5-9"])
    assert "Content-Length: 7\r\n" in answer.decode("latin-1")
    assert (split(answer)[1], end) == (DATA[5:10], "closed")


def test_bytes_that_nobody_asked_for_follow_the_body(server):
    server.add(Fault.trailing(b"more"))
    assert split(raw(server, wait=0.2)[0])[1] == DATA + b"more"


def test_a_range_is_given_as_multipart(server):
    server.add(Fault.multipart())
    status, headers, body = ask(server, Range="bytes=5-9")
    assert (status, headers["Content-Range"]) == (206, None)
    assert headers["Content-Type"].startswith("multipart/byteranges")
    assert b"Content-Range: bytes 5-9/10000\r\n\r\n" + DATA[5:10] + b"\r\n--" in body


def test_a_range_is_compressed(server):
    server.add(Fault.gzip())
    status, headers, body = ask(server, Range="bytes=0-99")
    assert (status, headers["Content-Encoding"]) == (206, "gzip")
    assert gzip.decompress(body) == DATA[:100]


def test_a_chunked_answer_has_no_length(server):
    server.add(Fault.chunked())
    head, body = split(raw(server, headers=["Connection: close"])[0])
    assert "Transfer-Encoding: chunked" in head
    assert "Content-Length" not in head
    assert body == b"2710\r\n" + DATA + b"\r\n0\r\n\r\n"
    assert ask(server)[2] == DATA
    assert "Content-Length" not in ask(server, method="HEAD")[1]
    assert server.requests()[-2].sent == len(DATA)


# Objects that change, and objects that are elsewhere


def test_an_object_changes_with_its_etag(server):
    server.add(Fault.changed(b"new bytes"), first=2)
    assert ask(server)[2] == DATA
    status, headers, body = ask(server)
    assert (status, headers["ETag"], body) == (200, etag_of(b"new bytes"), b"new bytes")
    assert ask(server, If_Match=etag_of(DATA))[0] == 412


def test_an_object_has_no_etag_or_nothing_at_all_to_know_it_by(server):
    server.add(Fault.no_etag())
    headers = ask(server)[1]
    assert (headers["ETag"], headers["Last-Modified"] is None) == (None, False)
    server.add(Fault.no_etag(no_date=True))
    headers = ask(server)[1]
    assert (headers["ETag"], headers["Last-Modified"]) == (None, None)


def test_a_redirect_leads_to_another_server_and_may_be_kept(server):
    with FaultServer({"/there": b"there"}) as other:
        server.add(Fault.redirect(other.url + "there", status=307, cache="max-age=60"))
        status, headers, _ = ask(server)
        assert (status, headers["Location"], headers["Cache-Control"]) == (307, other.url + "there", "max-age=60")
        curl = subprocess.run(["curl", "-sSL", server.url + "a.tar"], capture_output=True, check=True)
        assert curl.stdout == b"there"


def test_a_signed_redirect_expires_after_some_uses_until_it_is_resolved_anew(server):
    server.add(Fault.redirect("/dir/b%20c.tar", uses=2), path=PATH)
    first = ask(server)[1]["Location"]
    assert [ask(server, first)[0] for _ in range(3)] == [200, 200, 403]
    second = ask(server)[1]["Location"]
    assert second != first
    assert ask(server, second)[::2] == (200, b"bc")


def test_a_redirect_loop_never_ends(server):
    server.add(Fault.redirect_loop())
    curl = subprocess.run(["curl", "-sSL", server.url + "a.tar"], capture_output=True, check=False)
    assert curl.returncode == 47  # too many redirects
    assert len({request.path for request in server.requests()}) > 20


def test_https_is_served_with_a_certificate_of_its_own_authority():
    with FaultServer({PATH: DATA}, tls=True) as server:
        server.add(Fault.reset(after=1000), first=2)
        curl = ["curl", "-sS", "--cacert", str(server.ca_file), server.url + "a.tar"]
        assert subprocess.run(curl, capture_output=True, check=True).stdout == DATA
        assert subprocess.run(curl, capture_output=True, check=False).returncode == 56  # failure in receiving
        client = http.client.HTTPSConnection("127.0.0.1", server.port, context=ssl.create_default_context())
        with pytest.raises(ssl.SSLCertVerificationError):
            client.connect()


def test_a_server_in_a_process_of_its_own_takes_the_same_orders():
    with FaultProcess({PATH: DATA}) as server:
        assert ask(server)[2] == DATA
        server.add(Fault.status(503), times=1)
        server.put("/b", b"b")
        assert [ask(server, "/b")[0], ask(server, "/b")[0]] == [503, 200]
        assert [request.path for request in server.requests()] == [PATH, "/b", "/b"]
    with pytest.raises(ConnectionRefusedError):
        ask(server)


def test_many_threads_are_served_at_once(server):
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda n: ask(server, Range=f"bytes={n}-{n + 9}")[2], range(300)))
    assert answers == [DATA[n : n + 10] for n in range(300)]
    assert len(server.requests()) == 300
