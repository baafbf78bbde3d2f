"""Payloads on their way: what a rank takes next, cut into chunks that are read at once, within a budget of bytes.

The order of a window is worked out in a thread that works ahead (a `Block`), and cut into chunks. A chunk has as many
steps as half of the budget holds, so that one can be given out while the next one is read. Only the very first ones
are small: the first batch does not wait for a whole window, nor do the next ones, as long as they are a
thirty-second part of it together, since what they need is read in small pieces.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardset.policy import Place
from shardset.storage.threads import Jobs

from .blocks import next_block

if TYPE_CHECKING:
    from threading import Lock

    from numpy.typing import NDArray

    from shardset.storage.threads import Job

    from .batches import Maker
    from .blocks import Block, Samples, Share
    from .metrics import Meter
    from .steps import Steps
    from .windows import Window

    Int64s = NDArray[np.int64]

logger = logging.getLogger(__name__)

_GROWTH: Final = 4
_SMALL: Final = 32
_FEW: Final = 2048
"""Chunks are small for this part of the first window, and for so many samples, of which each is a read."""
_LEAST: Final = 4 << 20
"""A chunk of so many bytes is no larger than one read may be, and cut no smaller."""
_SEQUENTIAL: Final = 32 << 20
"""Where samples are read in their order, a chunk of more bytes takes as many reads a byte, and comes later."""
_UNDER_WAY: Final = 128 << 20
"""So many bytes that nobody has come to yet keep the line busy until the next chunk."""
_AT_ONCE: Final = 8
_POSITIONS: Final = 1 << 20
_MAPPED_POSITIONS: Final = 1 << 16
"""Of mapped shards nothing is held, so that nothing is gained by more."""
_ENOUGH: Final = 7 / 8
"""Where less than this of a window can be read at once, it is worth saying; its rest takes few reads more."""
_RUNS: Final = 1 / 2
"""Windows in which fewer samples than this stand beside another one have no runs that could be cut."""


class _Steps(NamedTuple):
    """A block, and what a rank takes of it.

    Attributes:
        number: How many blocks came before it.
        block: The block.
        mine: The steps of it that are taken here.
        num_samples: How many samples these have.
        ends: int64, how many bytes are held for all of them up to each, it included.
        are_held: They are held in memory, of some samples at least.
        is_ascending: The samples come in the order of the dataset.
        is_last: No block follows.
    """

    number: int
    block: Block
    mine: range
    num_samples: int
    ends: Int64s
    are_held: bool
    is_ascending: bool
    is_last: bool


@dataclass(slots=True, eq=False)
class Chunk:
    """Steps whose payloads are read together.

    Attributes:
        block: Where they stand.
        steps: Their numbers in it.
        num_bytes: How many bytes are held for them, about.
        is_last: The epoch ends with them.
        job: Reads what each view of the feed needs.
        windows: What was read, as soon as somebody has come to it.
        given: How many of the steps have been given out.
        done: How many of them are done with.
    """

    block: Block
    steps: range
    num_bytes: int
    is_last: bool
    job: Job[list[Window]] | None = None
    windows: list[Window] = field(default_factory=list)
    given: int = 0
    done: int = 0


class Taken(NamedTuple):
    """What a rank takes at a step, the chunk that its payloads are in, and whether the epoch ends with it."""

    share: Share
    chunk: Chunk
    is_last: bool


class Chunks:
    """What a rank takes from a position to the end of the epoch, with its payloads, read ahead.

    Args:
        maker: What batches are made with.
        steps: How positions are shared.
        epoch: The epoch.
        position: Where the first step begins.
        skip: So many steps are left to others at first.
        stride: Then every so-manieth step is taken.
        budget: Bytes that may be held at any time.
        meter: Measures.
        lock: Held while the feed is used.
    """

    def __init__(
        self,
        maker: Maker,
        steps: Steps,
        epoch: int,
        position: int,
        *,
        skip: int,
        stride: int,
        budget: int,
        meter: Meter,
        lock: Lock,
    ) -> None:
        self._maker = maker
        self._steps = steps
        self._epoch = epoch
        self._position = position  # of the first step that is in no block yet
        self._skip = skip
        self._stride = stride
        self._budget = budget
        self._meter = meter
        self._lock = lock
        self._most = steps.size * (skip + 1)
        self._planned = 0
        self._has_shrunk = self._works_ahead = self._is_ended = False
        self._jobs = Jobs()
        self._block_job: Job[_Steps | None] | None = None
        self._current: _Steps | None = None
        self._at = 0
        self._coming: deque[Chunk] = deque()
        self._begun: deque[Chunk] = deque()

    def work_ahead(self) -> None:
        """Work ahead from now on: before the first batch is there, that would only take time from it."""
        self._works_ahead = True
        self.go_on(wait=False)

    def close(self, *, is_child: bool) -> None:
        """Give up what is under way; in a forked child, whose threads are in its parent, that is nothing."""
        self._jobs.give_up()
        jobs = [self._block_job, *(chunk.job for chunk in self._coming)]
        for job in jobs if not is_child else ():
            if job is not None:
                job.cancel()
        self._coming.clear()
        self._begun.clear()

    def take(self, *, is_needed: bool) -> Taken | None:
        """Return what comes next; None where the epoch ends, or if it is not here yet and not needed."""
        while not self._begun or self._begun[-1].given == len(self._begun[-1].steps):
            self.go_on(wait=is_needed)
            if not self._coming:
                return None
            job = self._coming[0].job
            assert job is not None  # noqa: S101 - it was given one when it was put there
            if not is_needed and not job.done():
                return None
            started = time.perf_counter()
            windows = job.finish()
            if is_needed:
                self._meter.storage += time.perf_counter() - started
            chunk = self._coming.popleft()
            chunk.windows, chunk.job = windows, None
            self._meter.bytes += sum(window.num_bytes for window in windows)
            self._meter.reads += sum(window.num_reads for window in windows)
            self._begun.append(chunk)
            self.go_on(wait=False)
        chunk = self._begun[-1]
        share = chunk.block.share(chunk.steps[chunk.given])
        chunk.given += 1
        return Taken(share, chunk, chunk.is_last and chunk.given == len(chunk.steps))

    def release(self, chunk: Chunk) -> None:
        """Take note that nobody needs the payloads of one step of a chunk any more."""
        chunk.done += 1
        if chunk.done == len(chunk.steps):
            chunk.windows = []
            self._begun.remove(chunk)

    def go_on(self, *, wait: bool) -> None:
        """Begin to read what there is room for; if that is nothing, and somebody waits for it, plan it now."""
        while len(self._coming) < _AT_ONCE:
            found = self._next_steps(wait=wait and not self._coming)
            if found is None:
                return
            coming = sum(chunk.num_bytes for chunk in self._coming)
            held = coming + sum(chunk.num_bytes for chunk in self._begun)
            count, size = self._cut(found, self._budget - held if held else self._budget, coming)
            if not count or (self._coming and (coming >= _UNDER_WAY or not size)):
                return
            self._at += count
            is_last = found.is_last and self._at == len(found.mine)
            chunk = Chunk(found.block, found.mine[self._at - count : self._at], size, is_last)
            chunk.job = self._jobs.submit(partial(self._read, chunk.block, chunk.steps, is_held=bool(size)))
            self._coming.append(chunk)

    def _next_steps(self, *, wait: bool) -> _Steps | None:
        """Return the block whose next step is the next one; None where the epoch ends, or if it is not planned yet."""
        while self._current is None or self._at >= len(self._current.mine):
            if self._block_job is None and not self._is_ended and (wait or self._works_ahead):
                self._block_job = self._jobs.submit(self._plan_block)
            if self._block_job is None or not (wait or self._block_job.done()):
                return None
            started = time.perf_counter()
            found = self._block_job.finish()
            if wait:
                self._meter.storage += time.perf_counter() - started
            self._block_job = None
            if found is None:
                self._is_ended = True
                return None
            self._current, self._at = found, 0
            if self._works_ahead:
                self._block_job = self._jobs.submit(self._plan_block)
        return self._current

    def _cut(self, found: _Steps, room: int, coming: int) -> tuple[int, int]:
        """Return how many steps of a block are best read at once, and how many bytes that is; 0 if they find no room.

        Where there is room for half of them, and little else is coming, that half is read now. To wait for more room
        would be to wait for the end of what is given out, and then for all of them.
        """
        ends, at = found.ends, self._at
        before, total = int(ends[at - 1]) if at else 0, int(ends[-1])
        limit = self._budget // 2
        if found.is_ascending:
            limit = min(limit, _SEQUENTIAL)
        count = max(1, int(np.searchsorted(ends, before + limit, side="right")) - at)
        if found.number == 1 and total > _LEAST:
            small = int(np.searchsorted(ends, min(total, limit) // _SMALL, side="right"))
            small = min(small, _FEW * len(found.mine) // found.num_samples) - at
            if small > 0:
                count = min(count, small, (_GROWTH - 1) * at + _GROWTH)
        size = int(ends[at + count - 1]) - before
        if size > room and room < self._budget:
            least = size // 2
            if coming > least:
                return 0, 0
            count = int(np.searchsorted(ends, before + room, side="right")) - at
            size = int(ends[at + count - 1]) - before if count > 0 else 0
            if size < least or count <= 0:
                return 0, 0
        if found.number == 1 and before + size <= min(total, limit) // _SMALL:
            return count, size
        if found.are_held and size < (total - before) * _ENOUGH and not found.is_ascending and not self._has_shrunk:
            self._say_shrunk(found, size)
        return count, size

    def _say_shrunk(self, found: _Steps, size: int) -> None:
        """Say, once, that the windows of the order are larger than what may be held, if that costs reads."""
        samples = np.sort(found.block.samples(found.mine).samples)
        if not len(samples) or (np.diff(samples) == 1).mean() < _RUNS:
            return
        self._has_shrunk = True
        what = (
            f"of a window of {int(found.ends[-1])} bytes only {size} can be read at once, since no more than "
            f"{self._budget} may be held, so its runs are read in pieces"
        )
        self._maker.report.add("window_shrunk", Place(message=what))
        logger.info("%s: give more with ReadAhead(bytes=...), or make the window of Shuffle smaller", what)

    # In threads that work ahead.

    def _plan_block(self) -> _Steps | None:
        """Work out what comes next; None where the epoch ends. One thread at a time."""
        while True:
            with self._lock:
                block = next_block(self._maker.feed, self._steps, self._epoch, self._position, self._most)
                if block is None:
                    return None
                self._position = block.stop
                mine = range(self._skip, len(block), self._stride)
                self._skip = (self._skip - len(block)) % self._stride
                following = block.stop + self._skip * self._steps.size
                is_last = self._steps.after(self._maker.feed, self._epoch, following) is None
            if mine:
                return self._sized(block, mine, is_last=is_last)

    def _sized(self, block: Block, mine: range, *, is_last: bool) -> _Steps:
        taken = block.samples(mine)
        sizes, are_held = np.zeros(len(taken.samples), np.int64), False
        for source, reader in enumerate(self._maker.readers):
            here = _of_source(taken, source)
            sizes[here], some = reader.ahead.sizes(taken.samples[here])
            are_held = are_held or some
        self._most = _POSITIONS if are_held else _MAPPED_POSITIONS
        of_step = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[np.cumsum(taken.counts)]
        number, self._planned = self._planned, self._planned + 1
        return _Steps(
            number, block, mine, len(sizes), of_step, are_held, bool((np.diff(taken.samples) >= 0).all()), is_last
        )

    def _read(self, block: Block, steps: range, *, is_held: bool) -> list[Window]:
        if not is_held:
            return [reader.ahead.nothing for reader in self._maker.readers]
        taken = block.samples(steps)
        return [
            reader.ahead.read(taken.samples[_of_source(taken, source)])
            for source, reader in enumerate(self._maker.readers)
        ]


def _of_source(taken: Samples, source: int) -> slice | NDArray[np.bool_]:
    return slice(None) if taken.sources is None else taken.sources == source
