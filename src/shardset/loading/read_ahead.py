"""How far ahead a loader works: threads that decode, batches on their way, bytes that are read early."""

from __future__ import annotations

import operator
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MOST: Final = 2 << 30
_SHARE: Final = 8
_UNKNOWN_MEMORY: Final = 8 << 30


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How far ahead of the trainer a loader works.

    Attributes:
        threads: How many threads decode; None for one for each processor that this process may use.
        bytes: Payload bytes that are held in memory, of the window that is being given out and of the next one
            together. None for an eighth of this machine's memory, at most 2 GiB. Shards that are mapped need none.
        batches: How many batches are decoded ahead of the one that is asked for.

    Raises:
        ValueError: A number is not positive.
    """

    threads: int | None = None
    bytes: int | None = None
    batches: int = 2

    def __post_init__(self) -> None:
        for name in ("threads", "bytes", "batches"):
            value = getattr(self, name)
            if value is not None and operator.index(value) < 1:
                raise ValueError(f"{name}={value!r}: it is at least 1")

    @property
    def num_threads(self) -> int:
        """How many threads that is here."""
        if self.threads is not None:
            return self.threads
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @property
    def num_bytes(self) -> int:
        """How many bytes that is here."""
        return min(_MOST, memory_size() // _SHARE) if self.bytes is None else self.bytes


def memory_size() -> int:
    """Return how many bytes of memory this process may have: those of the machine, or of its control group."""
    sizes = []
    with suppress(AttributeError, ValueError, OSError):  # not on Windows
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # absent, or "max"
            sizes.append(int(Path(limit).read_text()))
    return min((size for size in sizes if size > 0), default=_UNKNOWN_MEMORY)
