"""Many small reads become few large ones: which ranges to read together, and reading them at once.

`plan_reads` is arithmetic alone. `read_ranges` and `read_ahead` carry a plan out over any source of bytes; who has a
better way than a thread for each read takes them from `prepare_reads`.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import finalize

import numpy as np

from .threads import Jobs, run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from .threads import Job

    Int64s = NDArray[np.int64]

    Fetch = Callable[[int, memoryview], None]
    """Fills a writable view with the bytes from an offset on, all of them, or raises. Called by many threads at once.

    Before long waits it looks whether it is still wanted, which `threads.pause` does by itself.
    """

_NO_BYTES: Final = memoryview(b"")
# Not shared with a forked child, who writes into its own.
_PRIVATE: Final[dict[str, int]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
_HUGE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)
_LEAST_KEPT: Final = 32 << 10
_LEAST_MAPPED: Final = 1 << 20
_MOST_KEPT: Final = 4 << 20
_KEPT: Final = 64 << 20
# Memory that nobody looks at now, by its size. No lock: each step on a list or dict is atomic.
_free: dict[int, list[NDArray[np.uint8]]] = {}


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How reads are merged, split and run side by side. The right values depend on what a request costs.

    Attributes:
        gap: Ranges at most this many bytes apart are read together, the bytes between them for nothing.
        most: A merged read grows to at most this many bytes, and a single longer range is read in parts of so many.
        at_once: How many reads of one call run side by side.
        memory: How many bytes `read_ahead` may hold that nobody has taken yet.

    Raises:
        ValueError: `gap` is negative, or another one is not positive.
    """

    gap: int = 128 << 10
    most: int = 4 << 20
    at_once: int = 32
    memory: int = 64 << 20

    def __post_init__(self) -> None:
        if self.gap < 0 or min(self.most, self.at_once, self.memory) < 1:
            raise ValueError(f"only a gap may be 0: {self}")


class ReadPlan(NamedTuple):
    """Reads that serve a list of ranges.

    Attributes:
        offsets: int64, where each read begins, ascending.
        lengths: int64, its bytes.
        read_of: int64, for each range in the order given, the read that serves it; -1 for an empty range.
        within: int64, for each range, where in that read it begins.
    """

    offsets: Int64s
    lengths: Int64s
    read_of: Int64s
    within: Int64s

    def hand_out(self, blocks: Sequence[Buffer], lengths: Int64s) -> list[memoryview]:
        """Cut what was read into one view a range, in the order that the ranges were given.

        Args:
            blocks: The bytes of each read.
            lengths: Those of the ranges.
        """
        views = [memoryview(block).toreadonly() for block in blocks]
        views.append(_NO_BYTES)  # read -1
        starts, ends = self.within.tolist(), (self.within + lengths).tolist()
        return [views[read][start:end] for read, start, end in zip(self.read_of.tolist(), starts, ends, strict=True)]


def plan_reads(offsets: Int64s, lengths: Int64s, *, gap: int, most: int) -> ReadPlan:
    """Merge ranges that lie near each other into fewer, larger reads.

    Going up through the ranges, a read takes in the next one if at most `gap` bytes lie between, and if it stays within
    `most` bytes or need not grow at all. So reads overlap only where ranges do that are longer than `most` together.

    Args:
        offsets: int64, not negative, in any order; ranges may overlap. No range may end above the largest int64.
        lengths: int64, not negative. Empty ranges are served by no read.
        gap: Ranges at most this many bytes apart are read together.
        most: A read grows to at most this many bytes; a single longer range stays whole.
    """
    read_of = np.full(len(offsets), -1, np.int64)
    within = np.zeros(len(offsets), np.int64)
    wanted = np.flatnonzero(lengths)
    if not len(wanted):
        return ReadPlan(np.zeros(0, np.int64), np.zeros(0, np.int64), read_of, within)
    order, starts, ends = _sort(wanted, offsets, lengths)
    # A range that reaches no farther than those before it lies within the last one that did: only those make reads.
    is_outer = np.ones(len(order), np.bool_)
    reached = np.maximum.accumulate(ends)
    np.greater(reached[1:], reached[:-1], out=is_outer[1:])
    all_outer = bool(is_outer.all())
    outer_starts, outer_ends = (starts, ends) if all_outer else (starts[is_outer], ends[is_outer])
    is_first = np.ones(len(outer_starts), np.bool_)
    np.greater(outer_starts[1:] - outer_ends[:-1], gap, out=is_first[1:])
    firsts = _cut_long(np.flatnonzero(is_first), outer_starts, outer_ends, most)
    after = np.append(firsts[1:], len(outer_starts))
    counts = after - firsts
    numbers = np.repeat(np.arange(len(firsts)), counts)
    if not all_outer:
        numbers = numbers[np.cumsum(is_outer) - 1]
    read_starts = outer_starts[firsts]
    read_of[order] = numbers
    within[order] = starts - read_starts[numbers]
    return ReadPlan(read_starts, outer_ends[after - 1] - read_starts, read_of, within)


def _sort(wanted: Int64s, offsets: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Sort ranges by start, the longest first among those that start together; return their numbers, starts, ends."""
    order = wanted[np.argsort(offsets[wanted])]
    starts = offsets[order]
    ends = starts + lengths[order]
    if ((starts[1:] == starts[:-1]) & (ends[1:] > ends[:-1])).any():
        order = wanted[np.lexsort((-lengths[wanted], offsets[wanted]))]
        starts = offsets[order]
        ends = starts + lengths[order]
    return order, starts, ends


def _cut_long(firsts: Int64s, starts: Int64s, ends: Int64s, most: int) -> Int64s:
    """Cut runs of near ranges that are longer than `most` in all; return where each run begins.

    Both `starts` and `ends` ascend. Python goes from cut to cut, never from range to range.
    """
    after = np.append(firsts[1:], len(starts))
    is_long = ends[after - 1] - starts[firsts] > most
    if not is_long.any():
        return firsts
    # For each range that a read may begin with, the first one that it cannot take in: at least one range on.
    beyond = np.searchsorted(ends - most, starts, side="right")
    beyonds = np.maximum(beyond, np.arange(1, len(starts) + 1)).tolist()
    cuts = []
    for at, end in zip(firsts[is_long].tolist(), after[is_long].tolist(), strict=True):
        cut = beyonds[at]
        while cut < end:
            cuts.append(cut)
            cut = beyonds[cut]
    return np.sort(np.concatenate([firsts, np.array(cuts, np.int64)]))


def int64_ranges(starts: list[int], ends: list[int]) -> tuple[Int64s, Int64s]:
    """Return the offsets and lengths of checked ranges as `plan_reads` takes them."""
    try:
        offsets = np.array(starts, np.int64)
        return offsets, np.array(ends, np.int64) - offsets
    except OverflowError:  # an empty range may lie anywhere, also where no int64 reaches
        lengths = np.array([end - start for start, end in zip(starts, ends, strict=True)], np.int64)
        return np.array([start if length else 0 for start, length in zip(starts, lengths, strict=True)]), lengths


def new_buffer(size: int) -> memoryview:
    """Return a writable view of memory, not cleared first: all of it must be written before it is handed out.

    It may be memory that another one had: giving pages back to the system and getting others for each read takes longer
    than the read. It comes free when the last view of it is gone.
    """
    if size < _LEAST_KEPT:
        return np.empty(size, np.uint8).data
    if size > _MOST_KEPT:
        return memoryview(_map(size))
    # Sizes that differ by less than a quarter serve each other.
    step = 1 << ((size - 1).bit_length() - 3)
    room = -(-size // step) * step
    try:
        memory = _free[room].pop()
    except (KeyError, IndexError):
        memory = np.frombuffer(_map(room), np.uint8) if room >= _LEAST_MAPPED else np.empty(room, np.uint8)
    lent = memory[:size]  # every view of it holds on to this very object
    finalize(lent, _keep, memory).atexit = False
    return lent.data


def _map(size: int) -> mmap.mmap:
    """Get memory from the system itself: what C's `malloc` gets it keeps, for each thread that asked for it."""
    memory = mmap.mmap(-1, size, **_PRIVATE)
    if hasattr(memory, "madvise") and _HUGE is not None:
        with suppress(OSError):  # a wish
            memory.madvise(_HUGE)
    return memory


def _keep(memory: NDArray[np.uint8]) -> None:
    # About: another thread may keep something meanwhile.
    if sum(room * len(kept) for room, kept in list(_free.items())) < _KEPT:
        _free.setdefault(len(memory), []).append(memory)


def fetch_in_threads(fetch: Fetch, ranges: Sequence[tuple[int, memoryview]], at_once: int) -> None:
    """Fetch many ranges, a thread for each that is under way: a `FetchAll` over a `Fetch`."""
    run_all([partial(fetch, offset, view) for offset, view in ranges], at_once)


class Reads(NamedTuple):
    """Reads that are planned, with buffers to read into.

    Attributes:
        parts: What is to be fetched: where each part begins, and the view that it fills.
        plan: What serves which range.
        buffers: The bytes of each read of the plan.
        lengths: int64, those of the ranges.
    """

    parts: list[tuple[int, memoryview]]
    plan: ReadPlan
    buffers: list[memoryview]
    lengths: Int64s

    def hand_out(self) -> list[memoryview]:
        """Return a read-only view a range, in the order asked, when all parts have been fetched."""
        return self.plan.hand_out(self.buffers, self.lengths)


def prepare_reads(offsets: Int64s, lengths: Int64s, limits: ReadLimits) -> Reads:
    """Plan how to read many ranges, and get the memory for it.

    Views of near ranges share a buffer. Overlapping ranges are read once, as far as `plan_reads` says.
    """
    plan = plan_reads(offsets, lengths, gap=limits.gap, most=limits.most)
    buffers = [new_buffer(size) for size in plan.lengths.tolist()]
    parts: list[tuple[int, memoryview]] = []
    for offset, buffer in zip(plan.offsets.tolist(), buffers, strict=True):
        if len(buffer) <= limits.most:
            parts.append((offset, buffer))
            continue
        # Parts of equal size, none above `most`.
        size = -(-len(buffer) // -(-len(buffer) // limits.most))
        parts += [(offset + at, buffer[at : at + size]) for at in range(0, len(buffer), size)]
    return Reads(parts, plan, buffers, lengths)


def read_ranges(fetch: Fetch, offsets: Int64s, lengths: Int64s, limits: ReadLimits) -> list[memoryview]:
    """Read many ranges, merged and side by side, a thread for each that is under way.

    Returns:
        Read-only views in the order asked, as `prepare_reads` says.

    Raises:
        Whatever `fetch` raised first; reads that have not begun are given up, those under way are waited for.
    """
    reads = prepare_reads(offsets, lengths, limits)
    run_all([partial(fetch, offset, view) for offset, view in reads.parts], limits.at_once)
    return reads.hand_out()


class _Piece(NamedTuple):
    job: Job[None]
    offset: int
    buffer: memoryview


def read_ahead(fetch: Fetch, offset: int, length: int, limits: ReadLimits) -> Iterator[memoryview]:
    """Read a long range in order, piece by piece, the next pieces already on their way; at most `limits.memory` bytes.

    The memory is that of pieces that are on their way or wait to be taken; one that was taken is the taker's. Who stops
    early closes the iterator: what has not begun is given up then, and what has ends by itself. A forked child may go
    on with an iterator of its parent.

    Raises:
        Whatever `fetch` raised, where its piece would have come.
    """
    size = min(limits.most, limits.memory)
    most_waiting = min(limits.at_once, limits.memory // size)
    end = offset + length
    jobs, process = Jobs(), os.getpid()
    waiting: deque[_Piece] = deque()

    def ask(at: int, buffer: memoryview) -> None:
        waiting.append(_Piece(jobs.submit(partial(fetch, at, buffer)), at, buffer))

    def ask_more() -> None:
        nonlocal offset
        while offset < end and len(waiting) < most_waiting:
            buffer = new_buffer(min(size, end - offset))
            ask(offset, buffer)
            offset += len(buffer)

    def take() -> memoryview:
        nonlocal process
        if os.getpid() != process:  # the threads that have these jobs are in the parent
            process = os.getpid()
            for _ in range(len(waiting)):
                ask(*waiting.popleft()[1:])
        job, _, buffer = waiting.popleft()
        try:
            job.finish()
        finally:
            del job  # an error holds this frame, and the job holds the error
        return buffer.toreadonly()

    try:
        ask_more()
        while waiting:
            taken = [take()]
            ask_more()
            yield taken.pop()  # so that nothing here holds on to it meanwhile
    finally:
        jobs.give_up()
        if os.getpid() == process:  # in a child, the lock of a job of its parent may be held for ever
            for piece in waiting:
                piece.job.cancel()
