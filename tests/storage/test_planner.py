from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardset.storage import planner, threads
from shardset.storage.planner import ReadLimits, int64_ranges, plan_reads, read_ahead, read_ranges

OBJECT = random.Random(5).randbytes(1_000_000)
# Small numbers, so that ranges touch, overlap, contain each other, repeat and are empty often.
some_ranges = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 200)), max_size=30)
gaps = st.integers(0, 100)
mosts = st.integers(1, 400)


def fetch(offset, view):
    view[:] = OBJECT[offset : offset + len(view)]


def _plan(ranges, gap=0, most=1 << 40):
    offsets = np.array([offset for offset, _ in ranges], np.int64)
    lengths = np.array([length for _, length in ranges], np.int64)
    return plan_reads(offsets, lengths, gap=gap, most=most)


def _reads(plan):
    return list(zip(plan.offsets.tolist(), plan.lengths.tolist(), strict=True))


def reference_plan(ranges, gap, most):
    """Plan slowly, one range after the other; return reads as [offset, length], and for each range its read."""
    reads, read_of = [], {}
    for number, (offset, length) in sorted(enumerate(ranges), key=lambda pair: (pair[1][0], -pair[1][1])):
        if not length:
            read_of[number] = -1
            continue
        if reads:
            start, size = reads[-1]
            lies_within = offset + length <= start + size
            is_near = offset - (start + size) <= gap
            if lies_within or (is_near and offset + length - start <= most):
                reads[-1][1] = max(size, offset + length - start)
                read_of[number] = len(reads) - 1
                continue
        reads.append([offset, length])
        read_of[number] = len(reads) - 1
    return [tuple(read) for read in reads], [read_of[number] for number in range(len(ranges))]


# What is read together


def test_no_ranges_make_no_reads():
    for ranges in ([], [(5, 0)], [(5, 0), (2**62, 0), (0, 0)]):
        plan = _plan(ranges)
        assert _reads(plan) == []
        assert plan.read_of.tolist() == [-1] * len(ranges)


def test_near_ranges_are_read_together_and_far_ones_apart():
    ranges = [(2000, 10), (0, 10), (14, 6)]
    assert _reads(_plan(ranges, gap=4)) == [(0, 20), (2000, 10)]
    assert _reads(_plan(ranges, gap=3)) == [(0, 10), (14, 6), (2000, 10)]


def test_a_read_grows_up_to_the_limit_and_not_beyond():
    ranges = [(at, 10) for at in range(0, 100, 10)]
    assert _reads(_plan(ranges, most=30)) == [(0, 30), (30, 30), (60, 30), (90, 10)]
    assert _reads(_plan(ranges, most=29)) == [(at, 20) for at in range(0, 100, 20)]
    assert _reads(_plan(ranges, most=1)) == [(at, 10) for at in range(0, 100, 10)]
    assert _reads(_plan([(0, 10), (10, 11)], most=21)) == [(0, 21)]
    assert _reads(_plan([(0, 10), (10, 11)], most=20)) == [(0, 10), (10, 11)]


def test_a_range_above_the_limit_stays_whole_and_takes_in_what_lies_within_it():
    assert _reads(_plan([(0, 10), (10, 500), (510, 10)], most=100)) == [(0, 10), (10, 500), (510, 10)]
    plan = _plan([(400, 50), (0, 500), (0, 5), (0, 500), (499, 1), (490, 20)], most=100)
    assert _reads(plan) == [(0, 500), (490, 20)]
    assert plan.read_of.tolist() == [0, 0, 0, 0, 1, 1]
    assert plan.within.tolist() == [400, 0, 0, 0, 9, 0]


def test_a_long_range_does_not_hide_a_gap_behind_the_short_ones_that_it_contains():
    assert _reads(_plan([(0, 100), (10, 5), (110, 5), (300, 1)], gap=10)) == [(0, 115), (300, 1)]


def test_offsets_near_the_largest_integer_are_planned():
    end = 2**63 - 1
    ranges = [(end - 10, 10), (end - 30, 10), (0, 5), (end - 30, 30)]
    assert _reads(_plan(ranges, gap=100, most=1000)) == [(0, 5), (end - 30, 30)]
    assert _reads(_plan(ranges[:3], gap=5, most=1000)) == [(0, 5), (end - 30, 10), (end - 10, 10)]
    assert _reads(_plan([(0, end), (5, end - 5)], gap=0, most=1 << 60)) == [(0, end)]


@example([(0, 10), (0, 100), (0, 10)], 0, 50)
@example([(0, 200), (10, 5), (20, 5), (150, 100)], 0, 100)
@given(some_ranges, gaps, mosts)
def test_a_plan_is_what_going_through_the_ranges_one_by_one_gives(ranges, gap, most):
    plan = _plan(ranges, gap, most)
    reads, read_of = reference_plan(ranges, gap, most)
    assert _reads(plan) == reads
    ours = plan.read_of.tolist()
    # Where two reads overlap, a range may lie within both.
    for (offset, length), read, expected in zip(ranges, ours, read_of, strict=True):
        assert read == expected or reads[read][0] <= offset <= offset + length <= sum(reads[read])


@given(some_ranges, gaps, mosts)
def test_every_range_lies_in_its_read_and_every_read_serves_one(ranges, gap, most):
    plan = _plan(ranges, gap, most)
    for (offset, length), read, within in zip(ranges, plan.read_of.tolist(), plan.within.tolist(), strict=True):
        assert (read >= 0) == (length > 0)
        if length:
            assert plan.offsets[read] + within == offset
            assert 0 <= within <= within + length <= plan.lengths[read]
    assert {*plan.read_of.tolist()} - {-1} == {*range(len(plan.offsets))}


@given(some_ranges, gaps, mosts)
def test_reads_ascend_keep_to_the_limit_and_overlap_only_where_ranges_do(ranges, gap, most):
    plan = _plan(ranges, gap, most)
    reads = _reads(plan)
    longest = max((length for _, length in ranges), default=0)
    assert all(length <= max(most, longest) for _, length in reads)
    assert all(length in {size for _, size in ranges} for _, length in reads if length > most)
    for (offset, length), (following, more) in itertools.pairwise(reads):
        assert offset < following
        assert offset + length < following + more
        if following < offset + length:  # a range begins in one read and ends in the next
            assert any(at == following and at + size > offset + length for at, size in ranges)


@given(some_ranges, gaps, mosts)
def test_no_read_begins_ends_or_jumps_in_vain(ranges, gap, most):
    plan = _plan(ranges, gap, most)
    for read, (offset, length) in enumerate(_reads(plan)):
        served = [ranges[number] for number in np.flatnonzero(plan.read_of == read)]
        assert offset == min(at for at, _ in served)
        assert offset + length == max(at + size for at, size in served)
        reached = offset
        for at, size in sorted(served):
            assert at - reached <= gap
            reached = max(reached, at + size)


@given(some_ranges, gaps, mosts, st.randoms())
def test_the_order_of_the_ranges_changes_no_read(ranges, gap, most, chooser):
    shuffled = ranges[:]
    chooser.shuffle(shuffled)
    assert _reads(_plan(shuffled, gap, most)) == _reads(_plan(ranges, gap, most))


def test_ten_thousand_ranges_are_planned_as_one_by_one():
    chooser = random.Random(3)
    for spread, longest in ((10**6, 10**4), (10**9, 10**6), (10**4, 100)):
        ranges = [(chooser.randrange(spread), chooser.randrange(longest)) for _ in range(10_000)]
        assert _reads(_plan(ranges, 1000, 100_000)) == reference_plan(ranges, 1000, 100_000)[0]


def test_limits_that_cannot_be_are_refused():
    for wrong in ({"gap": -1}, {"most": 0}, {"at_once": 0}, {"memory": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ReadLimits(**wrong)
    assert ReadLimits(gap=0, most=1, at_once=1, memory=1).gap == 0


def test_ranges_are_made_arrays_and_an_empty_one_may_lie_where_no_array_reaches():
    for starts, ends in (([5, 7], [6, 7]), ([5, 2**70], [6, 2**70]), ([], [])):
        offsets, lengths = int64_ranges(starts, ends)
        assert (offsets.dtype, lengths.dtype) == (np.int64, np.int64)
        assert lengths.tolist() == [end - start for start, end in zip(starts, ends, strict=True)]
        assert offsets[:1].tolist() == starts[:1]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


# Reading many


def read(ranges, fetch=fetch, **limits):
    offsets = np.array([offset for offset, _ in ranges], np.int64)
    lengths = np.array([length for _, length in ranges], np.int64)
    return read_ranges(fetch, offsets, lengths, ReadLimits(**limits))


class Watch:
    """Fetches, and keeps account of it."""

    def __init__(self, latency=0.0, together=1):
        self.latency = latency
        self.barrier = threading.Barrier(together)
        self.reads = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()

    def __call__(self, offset, view):
        with self.lock:
            self.reads.append((offset, len(view)))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        self.barrier.wait(20)
        if self.latency:
            time.sleep(self.latency)
        fetch(offset, view)
        with self.lock:
            self.under_way -= 1


@given(some_ranges, gaps, mosts, st.integers(1, 5))
def test_what_is_read_is_right_and_in_the_order_asked(ranges, gap, most, at_once):
    answers = read(ranges, gap=gap, most=most, at_once=at_once)
    assert answers == [OBJECT[offset : offset + length] for offset, length in ranges]


def test_views_are_read_only_and_of_bytes_and_near_ones_share_a_buffer():
    first, second, empty, far = read([(10, 5), (20, 5), (7, 0), (900_000, 10)])
    for view in (first, second, empty, far):
        assert view.readonly
        assert (view.ndim, view.itemsize, view.format, view.contiguous) == (1, 1, "B", True)
    assert first.obj is second.obj
    assert far.obj is not first.obj


def test_a_long_range_is_read_in_equal_parts_side_by_side():
    watch = Watch(together=4)
    assert read([(5, 100_001)], watch, most=30_000, at_once=4) == [OBJECT[5:100_006]]
    assert sorted(watch.reads) == [(5, 25_001), (25_006, 25_001), (50_007, 25_001), (75_008, 24_998)]
    assert watch.most_under_way == 4


def test_no_more_reads_are_under_way_than_allowed():
    for at_once in (1, 3):
        watch = Watch(0.002)
        read([(number * 1000, 10) for number in range(20)], watch, gap=0, at_once=at_once)
        assert watch.most_under_way <= at_once
        assert len(watch.reads) == 20


def test_sixty_four_reads_with_twenty_milliseconds_of_latency_take_little_more_than_four_turns():
    ranges = [(number * 10_000, 100) for number in range(64)]
    read(ranges, Watch(0.001), gap=0)  # starts the threads
    took = []
    while len(took) < 50 and min(took, default=1) > 0.08 * 1.15:  # the machine may be busy with something else
        watch = Watch(0.02)
        start = time.perf_counter()
        answers = read(ranges, watch, gap=0, at_once=16)
        took.append(time.perf_counter() - start)
        assert len(watch.reads) == 64
        assert answers[63] == OBJECT[630_000:630_100]
    assert min(took) <= 0.08 * 1.15


def test_the_first_error_is_raised_and_what_has_not_begun_is_given_up():
    begun = []
    barrier = threading.Barrier(4)

    def fail(offset, view):
        begun.append(offset)
        if len(begun) <= 4:
            barrier.wait(10)
        if offset == 2000:
            raise OSError("this one")
        time.sleep(0.5)  # so that the error comes before these end
        view[:] = bytes(len(view))

    with pytest.raises(OSError, match="this one"):
        read([(number * 1000, 10) for number in range(100)], fail, gap=0, at_once=4)
    assert len(begun) <= 7


def test_buffers_of_a_failed_call_are_not_kept_by_its_error():
    kept = []

    def fail(offset, view):
        kept.append(weakref.ref(view.obj))
        if offset:
            raise OSError("no")
        fetch(offset, view)

    gc.disable()  # so that a cycle would show
    try:
        with pytest.raises(OSError, match="no"):
            read([(0, 10), (1000, 10)], fail, gap=0, at_once=2)
        wait_until(lambda: all(ref() is None for ref in kept))  # the other thread lets go of its job a moment later
        assert len(kept) == 2
        assert all(ref() is None for ref in kept)
    finally:
        gc.enable()


def test_sixty_four_callers_at_once_get_what_each_asked_for():
    watch = Watch()

    def ask(seed):
        chooser = random.Random(seed)
        ranges = [(chooser.randrange(990_000), chooser.randrange(1, 5000)) for _ in range(200)]
        return read(ranges, watch, gap=0, most=10_000) == [OBJECT[at : at + size] for at, size in ranges]

    with ThreadPoolExecutor(64) as callers:
        assert all(callers.map(ask, range(64)))
    assert watch.under_way == 0
    assert watch.most_under_way <= 64 + threads.THREADS


def test_readers_in_threads_of_the_pool_read_many_themselves():
    """As a prefetching thread does; more of them than the pool has threads, so that none is left over."""

    def ask(number):
        return read([(number * 1000 + at, 1) for at in range(0, 900, 90)], Watch(0.001), gap=0) == [
            OBJECT[number * 1000 + at : number * 1000 + at + 1] for at in range(0, 900, 90)
        ]

    futures = [threads.submit(ask, number) for number in range(2 * threads.THREADS)]
    assert all(future.result(60) for future in futures)


# Reading ahead


def ahead(length, fetch=fetch, offset=0, **limits):
    return read_ahead(fetch, offset, length, ReadLimits(**limits))


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 100), st.integers(1, 300), st.integers(1, 5))
def test_pieces_joined_are_the_range(offset, length, most, memory, at_once):
    pieces = list(ahead(length, offset=offset, most=most, memory=memory, at_once=at_once))
    assert b"".join(pieces) == OBJECT[offset : offset + length]
    assert all(piece.readonly and 0 < len(piece) <= min(most, memory) for piece in pieces)


def test_nothing_is_read_before_the_first_piece_is_asked_for():
    watch = Watch()
    pieces = ahead(100, watch, most=10)
    assert watch.reads == []
    next(pieces)
    assert watch.reads


def test_the_next_pieces_are_on_their_way_while_one_is_used():
    watch = Watch()
    for number, piece in enumerate(ahead(100_000, watch, most=10_000, at_once=4)):
        assert piece == OBJECT[number * 10_000 : (number + 1) * 10_000]
        expected = min(10, number + 1 + 4)
        wait_until(lambda expected=expected: len(watch.reads) >= expected)
        assert len(watch.reads) == expected
    assert sorted(watch.reads) == [(at, 10_000) for at in range(0, 100_000, 10_000)]


@pytest.mark.parametrize("piece", [1000, 4000, 5000, 20_000])
def test_pieces_on_their_way_never_take_more_than_the_memory_allowed(monkeypatch, piece):
    live = []
    new_buffer = planner.new_buffer

    def watched(size):
        buffer = new_buffer(size)
        live.append((size, weakref.ref(buffer.obj)))
        return buffer

    def held():
        return sum(size for size, ref in live if ref() is not None)

    monkeypatch.setattr(planner, "new_buffer", watched)
    most = 0
    for taken in ahead(200_000, most=piece, memory=10_000, at_once=50):
        most = max(most, held() - len(taken))
        del taken  # what was taken and let go is gone
        assert held() <= 10_000
    assert most <= 10_000
    assert most > 10_000 - min(piece, 10_000)
    assert sum(size for size, _ in live) == 200_000


def test_an_error_comes_where_its_piece_would_have_come():
    def fail(offset, view):
        if offset >= 3000:
            raise OSError(f"at {offset}")
        fetch(offset, view)

    pieces = ahead(10_000, fail, most=1000)
    assert [next(pieces) for _ in range(3)] == [OBJECT[at : at + 1000] for at in (0, 1000, 2000)]
    with pytest.raises(OSError, match="at 3000"):
        next(pieces)
    assert list(pieces) == []


def test_buffers_of_a_failed_iterator_are_not_kept_by_its_error():
    kept = []
    begun = threading.Event()

    def fail(offset, view):
        kept.append(weakref.ref(view.obj))
        if offset:
            begun.set()
            raise OSError("no")
        assert begun.wait(20)  # so that the second piece fails in another thread
        fetch(offset, view)

    gc.disable()  # so that a cycle would show
    try:
        pieces = ahead(2000, fail, most=1000)
        next(pieces)
        with pytest.raises(OSError, match="no"):
            next(pieces)
        wait_until(lambda: all(ref() is None for ref in kept))
        assert len(kept) == 2
        assert all(ref() is None for ref in kept)
    finally:
        gc.enable()


def test_an_iterator_closed_early_gives_up_what_waits_and_what_is_under_way():
    begun, ended = [], []

    def slow(offset, view):
        begun.append(offset)
        if offset:
            try:
                threads.pause(60)
            except CancelledError:
                ended.append(offset)
                raise
        fetch(offset, view)

    pieces = ahead(1_000_000, slow, most=1000, at_once=8)
    next(pieces)
    wait_until(lambda: len(begun) >= 8)
    pieces.close()
    wait_until(lambda: len(ended) >= len(begun) - 1)
    assert sorted(ended) == sorted(begun)[1:]
    assert len(begun) <= 9


def test_pieces_are_read_by_the_taker_when_all_threads_are_busy():
    free = threading.Event()
    busy = [threads.submit(free.wait, 60) for _ in range(threads.THREADS)]
    try:
        watch = Watch()
        assert b"".join(ahead(50_000, watch, most=1000)) == OBJECT[:50_000]
        assert read([(0, 5), (1000, 5), (2000, 5)], watch, gap=0) == [OBJECT[at : at + 5] for at in (0, 1000, 2000)]
        assert watch.most_under_way == 1
    finally:
        free.set()
    assert all(future.result(10) for future in busy)


# Forks


def _go_on(pipe, pieces):
    pipe.send(b"".join(pieces))


def _read_anew(pipe, ranges):
    pipe.send([bytes(view) for view in read(ranges, Watch(0.001), gap=0)])


def _in_fork(target, *args):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(sender, *args))
    child.start()
    sender.close()
    assert receiver.poll(20), "the child hangs"
    answer = receiver.recv()
    child.join(20)
    assert child.exitcode == 0
    return answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_forked_while_reads_are_under_way_reads_with_threads_of_its_own():
    ranges = [(number * 1000, 10) for number in range(50)]
    expected = [OBJECT[at : at + size] for at, size in ranges]
    stop = threading.Event()

    def keep_reading():
        while not stop.is_set():
            assert read(ranges, Watch(0.001), gap=0) == expected
        return True

    with ThreadPoolExecutor(4) as callers:
        busy = [callers.submit(keep_reading) for _ in range(4)]
        try:
            for _ in range(5):
                assert _in_fork(_read_anew, ranges) == expected
        finally:
            stop.set()
        assert all(future.result(20) for future in busy)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_parent_and_forked_child_both_go_on_with_an_iterator():
    pieces = ahead(100_000, Watch(0.01), most=1000)
    assert next(pieces) == OBJECT[:1000]
    assert _in_fork(_go_on, pieces) == OBJECT[1000:100_000]
    assert b"".join(pieces) == OBJECT[1000:100_000]
