"""Timing beside a peer: both sides in one run, in turns, with the median and the range of what came out."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Side:
    """One way to do a thing.

    Attributes:
        name: What is measured, with the call that a user would write.
        call: The timed part.
        prepare: Done before each call, not timed.
    """

    name: str
    call: Callable[[], Any]
    prepare: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of both sides, round by round.

    Attributes:
        what: What was done.
        delivers: What came out of it on both sides.
        unit: What `count` counts.
        count: How many were done in one round.
        ours: Our call.
        peer: The peer's call.
        ours_seconds: One value a round.
        peer_seconds: One value a round.
        goal: The ratio to be reached; None where none is set.
    """

    what: str
    delivers: str
    unit: str
    count: int
    ours: str
    peer: str
    ours_seconds: tuple[float, ...]
    peer_seconds: tuple[float, ...]
    goal: float | None

    @property
    def ratio(self) -> float:
        """How many times faster ours is: the median of all rounds."""
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """How many times faster ours is in each round, whose two runs follow each other."""
        return [peer / ours for ours, peer in zip(self.ours_seconds, self.peer_seconds, strict=True)]

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached."""
        return self.goal is None or self.ratio >= self.goal

    def as_json(self) -> dict[str, Any]:
        """Return everything, with the ratio and its range."""
        derived = {"ratio": self.ratio, "ratio_min": min(self.ratios), "ratio_max": max(self.ratios)}
        return {"kind": "comparison", **asdict(self), **derived, "met": self.is_met}


@dataclass(frozen=True, slots=True)
class Limit:
    """A quantity that has to stay below a limit. `values` are those of all rounds."""

    what: str
    delivers: str
    unit: str
    ours: str
    values: tuple[float, ...]
    limit: float

    @property
    def median(self) -> float:
        """The value in the middle."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool:
        """Whether the median is below the limit."""
        return self.median < self.limit

    def as_json(self) -> dict[str, Any]:
        """Return everything, with the median."""
        return {"kind": "limit", **asdict(self), "median": self.median, "met": self.is_met}


Result = Comparison | Limit


def compare(
    what: str, ours: Side, peer: Side, *, delivers: str, unit: str, count: int, goal: float | None = None
) -> Comparison:
    """Time both sides in turns: one round to warm up, then `ROUNDS` that count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for side, values in zip((ours, peer), seconds, strict=True):
            values.append(once(side))
    kept = [tuple(values[1:]) for values in seconds]
    result = Comparison(what, delivers, unit, count, ours.name, peer.name, *kept, goal)
    print(line(result), flush=True)
    return result


def limit(what: str, values: list[float], *, delivers: str, unit: str, ours: str, below: float) -> Limit:
    """Keep what was measured of ours alone, against a limit."""
    result = Limit(what, delivers, unit, ours, tuple(values), below)
    print(line(result), flush=True)
    return result


def once(side: Side) -> float:
    """Return the seconds that one call takes. The collector is on, and starts from the same state."""
    if side.prepare is not None:
        side.prepare()
    gc.collect()
    start = time.perf_counter()
    side.call()
    return time.perf_counter() - start


def line(result: Result) -> str:
    """Return a result as one line of text."""
    mark = "" if result.is_met else "   << missed"
    if isinstance(result, Limit):
        low, high = min(result.values), max(result.values)
        return (
            f"  {result.what}: {result.median:.3g} {result.unit} ({low:.3g}-{high:.3g}), goal < {result.limit:g}{mark}"
        )
    fast, slow = (result.count / statistics.median(values) for values in (result.ours_seconds, result.peer_seconds))
    goal = "" if result.goal is None else f", goal {result.goal:g}x"
    return (
        f"  {result.what}: {result.ratio:.1f}x ({min(result.ratios):.1f}-{max(result.ratios):.1f}){goal}; "
        f"{fast:,.0f} beside {slow:,.0f} {result.unit}/s{mark}"
    )


def _version(name: str) -> str:
    """Return the version of a package; nothing where it is not installed: some topics have their own environment."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def conditions() -> dict[str, str]:
    """Return what the figures depend on."""
    names = (
        *("shardset", "numpy", "pyarrow", "orjson", "pycurl", "obstore"),
        *("webshart", "webdataset", "fsspec", "aiohttp", "s3fs"),
    )
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: found for name in names if (found := _version(name))},
        "rounds": f"{ROUNDS} after one to warm up, both sides in turns",
        "page cache": "warm",
        "garbage collector": "on, after a full collection before every call",
    }


def _processor() -> str:
    with Path("/proc/cpuinfo").open() as file:
        return next((row.partition(":")[2].strip() for row in file if row.startswith("model name")), "unknown")


@contextmanager
def quiet() -> Iterator[None]:
    """Send what compiled code prints to nowhere."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def webshart_index(folder: Path) -> Any:
    """Return webshart's view of a folder of shards, with an index that it made itself beside the folder."""
    import webshart  # noqa: PLC0415 - only two topics need it

    metadata = folder.with_name(f"{folder.name}-webshart")
    with quiet():
        if not metadata.exists():
            webshart.MetadataExtractor().extract_metadata(str(folder), f"{metadata}/")
        return webshart.discover_dataset(str(folder), metadata=str(metadata))


def check(is_same: bool, what: str) -> None:
    """Stop if the two sides do not deliver the same.

    Raises:
        SystemExit: They do not.
    """
    if not is_same:
        raise SystemExit(f"the two sides differ: {what}")
