"""Many ranges of one object in a bucket, beside obstore's own `get_ranges` and s3fs' `cat_ranges`.

The server is s3rver, which runs on node on this machine and answers a thousand requests a second at best: what a client
costs shows only as far as it adds to that.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import remote_servers  # noqa: F401 - lets the tests' servers be imported
from measure import Result, Side, check, compare

from servers.s3 import S3Server, serve_s3
from shardset.storage.cloud import CloudStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_COUNT: Final = 64
_LENGTH: Final = 64 << 10
_STRIDE: Final = 2 << 20
"""Farther apart than anybody merges ranges by default: obstore does so up to 1 MiB."""
_KEY: Final = "object.bin"
_AGAIN: Final = 8


def run(root: Path, *, quick: bool) -> list[Result]:
    del root, quick
    with serve_s3() as server:
        return _run(server)


def _run(server: S3Server) -> list[Result]:
    import obstore
    from obstore.store import S3Store
    from s3fs import S3FileSystem  # noqa: PLC0415 - starts a thread

    bucket = server.make_bucket()
    url = f"s3://{bucket}/{_KEY}"
    content = random.Random(0).randbytes(_COUNT * _STRIDE)  # noqa: S311 - noise, not a secret
    store = CloudStore(options=server.options)
    store.write(url, content)
    reader = store.open(url)
    starts = [at * _STRIDE + at for at in range(_COUNT)]
    ends = [start + _LENGTH for start in starts]
    lengths = [_LENGTH] * _COUNT
    theirs: Any = S3Store(bucket, config=server.options, client_options={"allow_http": True})
    system = S3FileSystem(
        key="S3RVER",
        secret="S3RVER",  # noqa: S106 - s3rver's own
        endpoint_url=server.endpoint,
        skip_instance_cache=True,
    )
    paths = [f"{bucket}/{_KEY}"] * _COUNT
    ours = Side("reader.read_many(offsets, lengths)", lambda: _again(lambda: reader.read_many(starts, lengths)))
    delivers = f"{_COUNT} ranges of {_LENGTH >> 10} KiB, {_STRIDE >> 20} MiB apart, one request each"
    peers = (
        (
            "obstore",
            Side(
                "obstore.get_ranges(store, key, starts=, lengths=, coalesce=0)",
                lambda: _again(lambda: obstore.get_ranges(theirs, _KEY, starts=starts, lengths=lengths, coalesce=0)),
            ),
            "views beside obstore's buffers",
            0.95,
        ),
        (
            "s3fs",
            Side(
                "S3FileSystem().cat_ranges(paths, starts, ends)",
                lambda: _again(lambda: system.cat_ranges(paths, starts, ends)),
            ),
            "views beside bytes",
            2.0,
        ),
    )
    expected = [content[start:end] for start, end in zip(starts, ends, strict=True)]
    results: list[Result] = []
    for name, peer, kinds, goal in peers:
        for side in (ours, peer):
            check(list(map(bytes, side.call())) == expected, side.name)
        results.append(
            compare(
                f"ranges of an object in a bucket, beside {name}",
                ours,
                peer,
                delivers=f"{delivers}; {kinds}",
                unit="ranges",
                count=_AGAIN * _COUNT,
                goal=goal,
            )
        )
    return results


def _again(call: Callable[[], Any]) -> Any:
    """Call several times, since one call takes too short a time to be told from the next."""
    for _ in range(_AGAIN - 1):
        call()
    return call()
