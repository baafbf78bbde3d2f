"""The fault matrix: whatever a server does wrong, each operation gives the right bytes or the right error, in time.

`TABLE` says how each operation ends, `FAULTS` what is done to it. A fault begins after the object was opened where an
operation reads, and before anything was asked where it looks up or lists.
"""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from servers.faulty import Fault, FaultServer, etag_of
from shardset.errors import (
    AccessError,
    ChangedError,
    NotFoundError,
    RangeIgnoredError,
    RateLimitedError,
    StorageError,
    TransferError,
)
from shardset.storage import HttpStore
from shardset.storage.planner import ReadLimits
from shardset.storage.retry import Retry

pytestmark = pytest.mark.servers

DATA = random.Random(11).randbytes(5_200_000)
OTHER = random.Random(12).randbytes(len(DATA))
TREE = {"/shards/a.tar": DATA, "/shards/b c.tar": b"bc", "/shards/deep/d.tar": b"d", "/elsewhere/a.tar": DATA}
LISTED = [("a.tar", len(DATA)), ("b%20c.tar", 2), ("deep/d.tar", 1)]
FAR = range(0, len(DATA) - 2000, 25_000)[:200]  # so far apart that none are read together
LENGTHS = [500 + offset % 997 for offset in FAR]

LIMITS = ReadLimits(gap=1 << 10, most=1 << 20, at_once=8, memory=4 << 20)
RETRY = Retry(attempts=8, first_wait=0.005, longest_wait=0.03, stall=1, connect=1, rate_limit=5)
PATIENT = Retry(attempts=8, first_wait=0.005, longest_wait=0.03, rate_limit=5)  # a busy machine may take its time
FEW_RETRIES = Retry(attempts=2, first_wait=0.005, longest_wait=0.03, stall=1, connect=1, rate_limit=5)

# The outcomes: "right" bytes; an error of exactly this type ("error": of any of them); "safe", right bytes or an error,
# as it happens; or "-", where the fault has nothing to do with the operation. Wrong bytes are no outcome.
ERRORS = {
    "transfer": TransferError,
    "limited": RateLimitedError,
    "ignored": RangeIgnoredError,
    "changed": ChangedError,
    "access": AccessError,
    "missing": NotFoundError,
    "error": StorageError,
}

TABLE = """
fault                                         | info, open | 500 bytes | more bytes | stream   | list     | status
----------------------------------------------+------------+-----------+------------+----------+----------+-------
every answer is late                          | right      | right     | right      | right    | right    |
408, twice                                    | right      | right     | right      | right    | right    |
425, twice                                    | right      | right     | right      | right    | right    |
429, twice                                    | right      | right     | right      | right    | right    |
500, twice                                    | right      | right     | right      | right    | right    |
502, twice                                    | right      | right     | right      | right    | right    |
503, twice                                    | right      | right     | right      | right    | right    |
504, twice                                    | right      | right     | right      | right    | right    |
503 to each sixth request                     | right      | right     | right      | right    | right    |
429 with Retry-After, once                    | right      | right     | right      | right    | right    |
503 with Retry-After as a date, once          | right      | right     | right      | right    | right    |
503 with a Retry-After of the past, twice     | right      | right     | right      | right    | right    |
503 with a nonsensical Retry-After, twice     | right      | right     | right      | right    | right    |
a rate limit with plenty left                 | right      | right     | right      | right    | right    |
408, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 408
425, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 425
500, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 500
502, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 502
503, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 503
504, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 504
400, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 400
418, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 418
501, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 501
505, always                                   | transfer   | transfer  | transfer   | transfer | transfer | 505
429, always                                   | limited    | limited   | limited    | limited  | limited  | 429
429 with a long Retry-After                   | limited    | limited   | limited    | limited  | limited  | 429
503 with a long Retry-After                   | limited    | limited   | limited    | limited  | limited  | 503
429 with a RateLimit that lasts long          | limited    | limited   | limited    | limited  | limited  | 429
401                                           | access     | access    | access     | access   | access   | 401
403 with a long page                          | access     | access    | access     | access   | access   | 403
404                                           | missing    | missing   | missing    | missing  | missing  | 404
410                                           | missing    | missing   | missing    | missing  | missing  | 410
204                                           | transfer   | transfer  | transfer   | transfer | transfer | 204
304 to what had no condition                  | transfer   | transfer  | transfer   | transfer | transfer | 304
302 that leads nowhere                        | transfer   | transfer  | transfer   | transfer | transfer | 302
416 to a range that is there                  | right      | changed   | changed    | changed  | right    |
416 that tells the same size                  | right      | ignored   | ignored    | ignored  | right    | 416
200 with a page to log in                     | right      | changed   | changed    | changed  | right    |
cut short, twice                              | right      | right     | right      | right    | right    |
cut short, each third time                    | right      | right     | right      | right    | right    |
cut short after 100 kB, always                | right      | right     | right      | right    | right    |
cut short before the first byte, always       | right      | transfer  | transfer   | transfer | transfer |
reset before the head, twice                  | right      | right     | right      | right    | right    |
reset after some bytes, twice                 | right      | right     | right      | right    | right    |
reset after 100 kB, always                    | right      | right     | right      | right    | right    |
reset before the head, always                 | transfer   | transfer  | transfer   | transfer | transfer |
closed after each answer, without a word      | right      | right     | right      | right    | right    |
quiet before the head, once                   | right      | right     | right      | right    | right    |
quiet after some bytes, once                  | right      | right     | right      | right    | right    |
quiet before the head, always                 | transfer   | transfer  | transfer   | transfer | transfer |
quiet after the head, always                  | right      | transfer  | transfer   | transfer | transfer |
a body that comes slowly                      | right      | right     | right      | right    | right    |
a body that comes byte by byte                | right      | transfer  | transfer   | transfer | transfer |
no HTTP, once                                 | right      | right     | right      | right    | right    |
no HTTP, always                               | transfer   | transfer  | transfer   | transfer | transfer |
a status line and no more                     | transfer   | transfer  | transfer   | transfer | transfer |
a head of half a megabyte                     | transfer   | transfer  | transfer   | transfer | transfer |
a range is ignored                            | right      | ignored   | ignored    | right    | right    | 200
a range is ignored, each third time           | right      | ignored   | ignored    | right    | right    | 200
another range                                 | right      | ignored   | ignored    | ignored  | right    | 206
a part of the range, as it says               | right      | right     | right      | right    | right    |
Content-Range tells another range             | right      | ignored   | ignored    | ignored  | right    | 206
Content-Range tells a longer range            | right      | ignored   | ignored    | ignored  | right    | 206
Content-Range tells another size              | right      | changed   | changed    | changed  | right    |
Content-Range tells no size                   | right      | right     | right      | right    | right    |
Content-Range is nonsense                     | right      | ignored   | ignored    | ignored  | right    | 206
Content-Range is missing                      | right      | ignored   | ignored    | ignored  | right    | 206
a body too short, and Content-Length with it  | right      | ignored   | ignored    | ignored  | right    | 206
a body too long, and Content-Length with it   | right      | ignored   | ignored    | ignored  | right    | 206
a body too short, chunked                     | right      | transfer  | transfer   | transfer | right    | 206
a body too long, chunked                      | right      | ignored   | ignored    | ignored  | right    |
Content-Length too small                      | right      | ignored   | ignored    | ignored  | right    | 206
Content-Length too large                      | right      | ignored   | ignored    | ignored  | right    | 206
multipart                                     | right      | ignored   | ignored    | ignored  | right    | 206
another answer behind the body                | right      | right     | safe       | right    | right    |
a HEAD with a body                            | right      | right     | right      | right    | right    |
chunked                                       | right      | right     | right      | right    | right    |
a body that ends with the connection          | right      | right     | right      | right    | right    |
a body without a length, cut short, twice     | -          | right     | right      | right    | -        |
compressed                                    | right      | ignored   | ignored    | ignored  | right    | 206
a folder page that is compressed              | -          | -         | -          | -        | error    |
a folder page that is no page                 | -          | -         | -          | -        | error    |
another version of the same size              | -          | changed   | changed    | changed  | -        |
another version of another size               | -          | changed   | changed    | changed  | -        |
another version without an etag               | -          | changed   | changed    | changed  | -        |
another version that is empty                 | -          | changed   | changed    | changed  | -        |
another version after some answers            | -          | right     | changed    | right    | -        |
no etag                                       | right      | right     | right      | right    | right    |
neither etag nor date                         | right      | right     | right      | right    | right    |
a weak etag                                   | right      | right     | right      | right    | right    |
redirected by 301                             | right      | right     | right      | right    | right    |
redirected by 302                             | right      | right     | right      | right    | right    |
redirected by 303                             | right      | right     | right      | right    | right    |
redirected by 307                             | right      | right     | right      | right    | right    |
redirected by 308                             | right      | right     | right      | right    | right    |
redirected to what ends after 20 uses         | right      | right     | right      | right    | right    |
redirected to what ends after one use         | right      | right     | right      | right    | right    |
redirected to nothing                         | missing    | missing   | missing    | missing  | -        | 404
redirected for ever                           | transfer   | transfer  | transfer   | transfer | transfer | 302
redirected off the web                        | access     | access    | access     | access   | access   |
HEAD refused by 405                           | right      | right     | right      | right    | right    |
HEAD refused by 403                           | right      | right     | right      | right    | right    |
HEAD refused by 501                           | right      | right     | right      | right    | right    |
HEAD tells no length                          | right      | right     | right      | right    | right    |
"""

ANY: dict = {}
TAR = {"path": "/shards/a.tar"}
GET = {"method": "GET"}
TAR_GET = {**TAR, **GET}
HEAD = {"method": "HEAD"}
ONCE, TWICE = {"times": 1}, {"times": 2}
ELSEWHERE = "/elsewhere/a.tar"


def says(text):
    return Fault.content_range(text)


FAULTS = {
    "every answer is late": (Fault.latency(0.02), ANY),
    **{f"{status}, twice": (Fault.status(status), TWICE) for status in (408, 425, 429, 500, 502, 503, 504)},
    "503 to each sixth request": (Fault.status(503), {"every": 6}),
    "429 with Retry-After, once": (Fault.status(429, retry_after=1), ONCE),
    "503 with Retry-After as a date, once": (Fault.status(503, retry_after="date:0.5"), ONCE),
    "503 with a Retry-After of the past, twice": (Fault.status(503, retry_after="date:-100"), TWICE),
    "503 with a nonsensical Retry-After, twice": (Fault.status(503, headers={"Retry-After": "soon"}), TWICE),
    "a rate limit with plenty left": (Fault.rate_limit(500, 60), ANY),
    **{f"{status}, always": (Fault.status(status), ANY) for status in (408, 425, 429, 500, 502, 503, 504)},
    **{f"{status}, always": (Fault.status(status), ANY) for status in (400, 418, 501, 505)},
    "429 with a long Retry-After": (Fault.status(429, retry_after=3600), ANY),
    "503 with a long Retry-After": (Fault.status(503, retry_after="date:3600"), ANY),
    "429 with a RateLimit that lasts long": (Fault.rate_limit(0, 900, code=429), ANY),
    "401": (Fault.status(401, headers={"WWW-Authenticate": 'Basic realm="x"'}), ANY),
    "403 with a long page": (Fault.status(403, body=b"<p>no</p>\n" * 50_000), ANY),
    "404": (Fault.status(404), ANY),
    "410": (Fault.status(410), ANY),
    "204": (Fault.status(204, body=b""), ANY),
    "304 to what had no condition": (Fault.status(304, body=b""), ANY),
    "302 that leads nowhere": (Fault.status(302), ANY),
    "416 to a range that is there": (Fault.status(416), TAR_GET),
    "416 that tells the same size": (
        Fault.status(416, headers={"Content-Range": f"bytes */{len(DATA)}"}),
        TAR_GET,
    ),
    "200 with a page to log in": (Fault.status(200, body=b"<html>Log in</html>"), TAR_GET),
    "cut short, twice": (Fault.truncate(400), TWICE),
    "cut short, each third time": (Fault.truncate(100), {"every": 3}),
    "cut short after 100 kB, always": (Fault.truncate(100_000), ANY),
    "cut short before the first byte, always": (Fault.truncate(0), GET),
    "reset before the head, twice": (Fault.reset(), TWICE),
    "reset after some bytes, twice": (Fault.reset(100), {**GET, **TWICE}),
    "reset after 100 kB, always": (Fault.reset(100_000), TAR_GET),
    "reset before the head, always": (Fault.reset(), ANY),
    "closed after each answer, without a word": (Fault.hang_up(), ANY),
    "quiet before the head, once": (Fault.quiet(), ONCE),
    "quiet after some bytes, once": (Fault.quiet(100), {**GET, **ONCE}),
    "quiet before the head, always": (Fault.quiet(), ANY),
    "quiet after the head, always": (Fault.quiet(0), GET),
    "a body that comes slowly": (Fault.drip(pause=0.002, piece=20_000), ANY),
    "a body that comes byte by byte": (Fault.drip(pause=0.2), GET),
    "no HTTP, once": (Fault.garbage(), ONCE),
    "no HTTP, always": (Fault.garbage(), ANY),
    "a status line and no more": (Fault.garbage(b"HTTP/1.1 206 Partial Content\r\n"), ANY),
    "a head of half a megabyte": (Fault.headers({f"X-{number}": "x" * 5000 for number in range(100)}), ANY),
    "a range is ignored": (Fault.ignore_range(), ANY),
    "a range is ignored, each third time": (Fault.ignore_range(), {"every": 3}),
    "another range": (Fault.other_offset(), TAR_GET),
    "a part of the range, as it says": (Fault.part(300_000), TAR_GET),
    "Content-Range tells another range": (says("bytes {next_first}-{next_last}/{total}"), TAR_GET),
    "Content-Range tells a longer range": (says("bytes {first}-{next_last}/{total}"), TAR_GET),
    "Content-Range tells another size": (says("bytes {first}-{last}/9999999"), TAR_GET),
    "Content-Range tells no size": (says("bytes {first}-{last}/*"), TAR_GET),
    "Content-Range is nonsense": (says("octets some/many"), TAR_GET),
    "Content-Range is missing": (says(None), TAR_GET),
    "a body too short, and Content-Length with it": (Fault.body_length(-2), TAR_GET),
    "a body too long, and Content-Length with it": (Fault.body_length(2), TAR_GET),
    "a body too short, chunked": (Fault.body_length(-2), TAR_GET),
    "a body too long, chunked": (Fault.body_length(2), TAR_GET),
    "Content-Length too small": (Fault.content_length(-2), TAR_GET),
    "Content-Length too large": (Fault.content_length(2), TAR_GET),
    "multipart": (Fault.multipart(), TAR_GET),
    "another answer behind the body": (Fault.trailing(), ANY),
    "a HEAD with a body": (Fault.trailing(b"HTTP/1.1 404 Not Found\r\n\r\n"), HEAD),
    "chunked": (Fault.chunked(), ANY),
    "a body that ends with the connection": (Fault.endless(), ANY),
    "a body without a length, cut short, twice": (Fault.truncate(100), {**TAR_GET, **TWICE}),
    "compressed": (Fault.gzip(), TAR),
    "a folder page that is compressed": (Fault.gzip(), {"path": "*/"}),
    "a folder page that is no page": (Fault.headers({"Content-Type": "application/x-tar"}), {"path": "*/"}),
    "another version of the same size": (Fault.changed(OTHER), TAR),
    "another version of another size": (Fault.changed(OTHER[:-1000]), TAR),
    "another version without an etag": (Fault.changed(OTHER[:-1000]), TAR),
    "another version that is empty": (Fault.changed(b""), TAR),
    "another version after some answers": (Fault.changed(OTHER), {**TAR, "first": 3}),
    "no etag": (Fault.no_etag(), ANY),
    "neither etag nor date": (Fault.no_etag(no_date=True), ANY),
    "a weak etag": (Fault.headers({"ETag": f"W/{etag_of(DATA)}"}), TAR),
    **{
        f"redirected by {status}": (Fault.redirect(ELSEWHERE, status=status), TAR)
        for status in (301, 302, 303, 307, 308)
    },
    "redirected to what ends after 20 uses": (Fault.redirect(ELSEWHERE, uses=20), TAR),
    "redirected to what ends after one use": (Fault.redirect(ELSEWHERE, uses=1, cache="max-age=0"), TAR),
    "redirected to nothing": (Fault.redirect("/nowhere.tar"), TAR),
    "redirected for ever": (Fault.redirect_loop(), ANY),
    "redirected off the web": (Fault.redirect("file:///etc/passwd"), ANY),
    **{f"HEAD refused by {status}": (Fault.status(status), HEAD) for status in (405, 403, 501)},
    "HEAD tells no length": (Fault.headers({"Content-Length": None}), HEAD),
}
# What happens beside it, to the same requests.
ALSO = {
    "a body without a length, cut short, twice": Fault.headers({"Content-Length": None}),
    "a body too short, chunked": Fault.chunked(),
    "a body too long, chunked": Fault.chunked(),
    "another version without an etag": Fault.no_etag(no_date=True),
}


def read_scattered(store, url):
    return [bytes(view) for view in store.open(url).read_many(FAR, LENGTHS)]


def iterate(store, url):
    got = bytearray()
    try:
        for piece in store.open(url).iter_pieces():
            got += piece
    finally:
        assert DATA.startswith(got)  # right up to where it fails
    return bytes(got)


def stream(store, url):
    got = bytearray()
    try:
        store.open(url).stream(got.extend)
    finally:
        assert DATA.startswith(got)
    return bytes(got)


def list_folder(store, url):
    folder = url.rpartition("/")[0]
    return [(info.url.removeprefix(f"{folder}/"), info.size) for info in store.list(folder)]


# Operation: its column in the table, what it does, and what is right.
OPERATIONS = {
    "info": ("info, open", lambda store, url: store.info(url).size, len(DATA)),
    "open": ("info, open", lambda store, url: store.open(url).size, len(DATA)),
    "500 bytes": ("500 bytes", lambda store, url: store.open(url).read(1000, 500), DATA[1000:1500]),
    "5 MB": ("more bytes", lambda store, url: store.open(url).read(100_000, 5_000_000), DATA[100_000:5_100_000]),
    "200 ranges": (
        "more bytes",
        read_scattered,
        [DATA[offset : offset + length] for offset, length in zip(FAR, LENGTHS, strict=True)],
    ),
    "piece by piece": ("more bytes", iterate, DATA),
    "stream": ("stream", stream, DATA),
    "list": ("list", list_folder, LISTED),
}


def parse_table():
    """Return the table as {fault: {column: outcome}}."""
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines())
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


ROWS = parse_table()


def is_slow(name):
    """Tell whether there is something to wait for: a stall, or what Retry-After says."""
    return name.startswith("quiet") or name.endswith("byte by byte") or "Retry-After, once" in name or "a date" in name


CELLS = [
    pytest.param(name, operation, id=f"{name} - {operation}", marks=[pytest.mark.slow] if is_slow(name) else [])
    for name, row in ROWS.items()
    for operation, (column, *_) in OPERATIONS.items()
    if row[column] != "-"
]


def test_the_table_tells_of_every_fault():
    assert [*ROWS] == sorted(FAULTS, key=[*ROWS].index)


@pytest.mark.parametrize(("name", "operation"), CELLS)
def test_a_fault_ends_in_right_bytes_or_in_the_right_error(name, operation):
    column, act, right = OPERATIONS[operation]
    outcome, status = ROWS[name][column], ROWS[name]["status"]
    with FaultServer(TREE) as server:
        stalls_always = is_slow(name) and "once" not in name
        store = HttpStore(retry=FEW_RETRIES if stalls_always else RETRY if is_slow(name) else PATIENT, limits=LIMITS)
        url = f"{server.url}shards/a.tar"
        if column not in ("info, open", "list"):
            store.open(url)
        fault, where = FAULTS[name]
        if name in ALSO:
            server.add(ALSO[name], **where)
        server.add(fault, **where)
        begin = time.monotonic()
        if outcome == "right":
            assert act(store, url) == right
        elif outcome == "safe":
            with contextlib.suppress(StorageError):
                assert act(store, url) == right
        else:
            with pytest.raises(ERRORS[outcome]) as caught:
                act(store, url)
            check_error(caught.value, ERRORS[outcome], url, int(status) if status else None)
        assert time.monotonic() - begin < 25


def check_error(error, kind, url, status):
    """See that an error is of its very type and says where, what the server answered, and after how many attempts."""
    text = str(error)
    assert kind is StorageError or type(error) is kind
    assert url.startswith(error.url.rstrip("/"))
    assert error.url in text
    assert str(status or "") in text
    if kind in (TransferError, RateLimitedError):
        assert "attempt" in text
    if kind is TransferError:
        assert error.status == status
        assert 1 <= error.attempts < 100
        assert f"{error.attempts} attempt" in text
