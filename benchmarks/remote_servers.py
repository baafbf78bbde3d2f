"""Real servers beside the benchmarks, those of the tests, and shards of other shapes for them to serve."""

from __future__ import annotations

import math
import random
import sys
import tarfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # as pytest does, for the servers

from servers.nginx import Nginx
from shardset.storage.http import HttpStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LATENCY: Final = 0.02
_BLOCK: Final = 512
_LOOKS: Final = 9


class Servers(NamedTuple):
    """Two servers of one folder.

    Attributes:
        near: Answers at once.
        far: Holds every request back by `LATENCY`.
    """

    near: Nginx
    far: Nginx


@contextmanager
def serve(root: Path) -> Iterator[Servers]:
    """Serve a folder twice while the block runs."""
    with ExitStack() as stack:
        yield Servers(stack.enter_context(Nginx(root)), stack.enter_context(Nginx(root, latency=LATENCY)))


class Traffic(NamedTuple):
    """What a server was asked for.

    Attributes:
        requests: How many requests.
        sent: Bytes of their bodies.
    """

    requests: int
    sent: int


def traffic(server: Nginx, call: Callable[[], Any]) -> Traffic:
    """Count what a call asks of a server."""
    server.forget()
    call()
    requests = server.requests()
    return Traffic(len(requests), sum(request.sent for request in requests))


def round_trip(url: str) -> float:
    """Return the seconds of one small read over a connection that is open: the median of some."""
    reader = HttpStore().open(url)
    seconds = []
    for _ in range(_LOOKS + 1):
        start = time.perf_counter()
        reader.read(0, 1)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def ideal(requests: int, connections: int, latency: float) -> float:
    """Return the seconds that so many requests take if only their round trips cost anything."""
    return math.ceil(requests / connections) * latency


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of noise, with names and headers as `tarfile` writes them.

    Attributes:
        name: What its file is called, without suffix.
        samples: How many samples.
        members: Mean bytes of each member of a sample, by suffix; a payload has half to one and a half of it.
        pax: Whether a PAX header stands before every member.
    """

    name: str
    samples: int
    members: Mapping[str, int]
    pax: bool = False

    def make(self, root: Path) -> Path:
        """Return its path below `root`, making it if it is not there, and read it once."""
        path = root / f"{self.name}-{self.samples}.tar"
        if not path.exists():
            print(f"making {path}", flush=True)
            root.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            self._write(part)
            part.rename(path)
        with path.open("rb") as file:  # the page cache is warm from here on
            while file.read(1 << 24):
                pass
        return path

    def _write(self, path: Path) -> None:
        chance = random.Random(self.name)  # noqa: S311 - noise, not a secret
        noise = chance.randbytes(3 * max(self.members.values()))
        kind = tarfile.PAX_FORMAT if self.pax else tarfile.USTAR_FORMAT
        with path.open("wb") as file:
            for number in range(self.samples):
                for suffix, mean in self.members.items():
                    member = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    member.size = chance.randrange(mean // 2, max(mean * 3 // 2, 2))
                    member.mtime = 1_700_000_000.25 if self.pax else 1_700_000_000
                    start = chance.randrange(len(noise) - member.size)
                    file.write(member.tobuf(kind) + noise[start : start + member.size] + bytes(-member.size % _BLOCK))
            file.write(bytes(2 * _BLOCK))
