from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial

import pytest

from shardset.storage import threads
from shardset.storage.threads import THREADS, Jobs, look_up, map_ahead, map_in_threads, pause, run_all, submit


@pytest.fixture
def full_pool():
    """All threads of the pool are busy."""
    free = threading.Event()
    started = threading.Semaphore(0)

    def wait():
        started.release()
        free.wait(60)

    busy = [submit(wait) for _ in range(THREADS)]
    for _ in busy:
        assert started.acquire(timeout=20)
    yield
    free.set()
    for future in busy:
        future.result(20)


# Running jobs


@pytest.mark.parametrize("at_once", [1, 2, 16, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_job_is_run_once(count, at_once):
    done = []
    run_all([partial(done.append, number) for number in range(count)], at_once)
    assert sorted(done) == list(range(count))


def test_jobs_begin_in_their_order():
    done = []
    run_all([partial(done.append, number) for number in range(100)], 1)
    assert done == list(range(100))


def test_no_more_jobs_are_under_way_than_allowed_and_this_thread_does_its_share():
    under_way, most, names = [], [], set()

    def job():
        under_way.append(1)
        most.append(len(under_way))
        names.add(threading.current_thread().name)
        time.sleep(0.002)
        under_way.pop()

    run_all([job] * 60, 5)
    assert max(most) <= 5
    assert threading.current_thread().name in names
    assert len(names) <= 6  # a thread of the pool may do two turns


def test_as_many_jobs_as_allowed_are_under_way_at_once():
    all_of_them = threading.Barrier(8)
    run_all([lambda: all_of_them.wait(20)] * 16, 8)


@pytest.mark.usefixtures("full_pool")
def test_all_jobs_are_done_by_this_thread_when_no_other_is_free():
    names = []
    run_all([lambda: names.append(threading.current_thread().name)] * 50, 16)
    assert names == [threading.current_thread().name] * 50


def test_all_jobs_are_done_by_this_thread_when_no_more_threads_can_be_had(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    done = []
    monkeypatch.setattr(threads, "submit", refuse)
    run_all([partial(done.append, number) for number in range(20)], 8)
    assert done == list(range(20))


def test_jobs_that_run_jobs_that_run_jobs_come_to_their_end():
    done = []

    def job(depth):
        if depth:
            run_all([partial(job, depth - 1)] * 6, 6)
        else:
            pause(0.001)
            done.append(1)

    run_all([partial(job, 3)] * 6, 6)
    assert len(done) == 6**4


def test_a_hundred_tasks_of_the_pool_that_run_jobs_come_to_their_end():
    def task():
        done = []
        run_all([lambda: done.append(pause(0.001))] * 20, 16)
        return len(done)

    futures = [submit(task) for _ in range(100)]
    assert [future.result(60) for future in futures] == [20] * 100


# Errors


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_first_error_is_raised_and_jobs_that_have_not_begun_are_given_up(at_once):
    begun = []

    def job(number):
        begun.append(number)
        if number == 5:
            raise ValueError("five")
        time.sleep(0.005 if number < 5 else 0.3)  # so that the error comes before these end

    with pytest.raises(ValueError, match="five"):
        run_all([partial(job, number) for number in range(1000)], at_once)
    assert len(begun) <= 6 + at_once


def test_an_error_waits_for_the_jobs_that_are_under_way():
    barrier = threading.Barrier(3)
    ended = []

    def fail():
        barrier.wait(10)
        raise OSError("first")

    def other():
        barrier.wait(10)
        time.sleep(0.05)
        ended.append(1)
        raise OSError("later")

    for jobs in ([fail, other, other], [other, fail, other]):
        ended.clear()
        with pytest.raises(OSError, match="first"):
            run_all(jobs, 3)
        assert len(ended) == 2


def test_an_error_wakes_the_jobs_that_only_wait():
    barrier = threading.Barrier(3)

    def fail():
        barrier.wait(10)
        raise OSError("no")

    def other():
        barrier.wait(10)
        pause(60)

    start = time.perf_counter()
    with pytest.raises(OSError, match="no"):
        run_all([other, fail, other], 3)
    assert time.perf_counter() - start < 20


def test_an_error_wakes_the_jobs_of_jobs():
    woken = []

    def leaf():
        try:
            pause(60)
        except CancelledError:
            woken.append(1)
            raise

    def fail():
        time.sleep(0.05)
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        run_all([fail, lambda: run_all([leaf] * 3, 3)], 2)
    assert len(woken) == 3


def test_after_an_error_the_next_jobs_are_wanted_again():
    with pytest.raises(ZeroDivisionError):
        run_all([lambda: 1 / 0] * 4, 4)
    look_up()
    run_all([look_up] * 20, 8)


@pytest.mark.skipif(os.name == "nt", reason="no signal can be sent to a thread here")
@pytest.mark.parametrize("where", ["in a job", "while waiting for others"])
def test_ctrl_c_gives_up_all_jobs_and_comes_through(where):
    ended, begun = [], []
    here = threading.current_thread()
    all_begun = threading.Barrier(4)

    def job():
        begun.append(1)
        all_begun.wait(10)
        mine = threading.current_thread() is here
        if mine and where == "in a job":
            raise KeyboardInterrupt
        if mine:
            threading.Timer(0.05, signal.pthread_kill, (here.ident, signal.SIGINT)).start()
            return
        try:
            pause(60)
        finally:
            ended.append(1)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_all([job] * 4, 4)
    assert time.perf_counter() - start < 20
    assert len(ended) == 3
    assert len(begun) == 4


def test_an_interrupt_comes_before_an_error():
    both = threading.Barrier(2)
    here = threading.current_thread()

    def job():
        both.wait(10)
        if threading.current_thread() is here:
            time.sleep(0.05)
            raise KeyboardInterrupt
        raise OSError("before")

    with pytest.raises(KeyboardInterrupt):
        run_all([job, job], 2)


def test_an_exit_in_another_thread_comes_through():
    both = threading.Barrier(2)
    here = threading.current_thread()

    def job():
        both.wait(10)
        if threading.current_thread() is not here:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_all([job, job], 2)


# Single jobs


@pytest.mark.usefixtures("full_pool")
def test_a_job_that_no_thread_has_begun_is_done_by_who_needs_it():
    name = threading.current_thread().name
    jobs = Jobs()
    assert jobs.submit(lambda: threading.current_thread().name).finish() == name
    with pytest.raises(ZeroDivisionError):
        jobs.submit(lambda: 1 / 0).finish()


def test_a_job_that_the_pool_has_begun_is_waited_for():
    begun = threading.Event()

    def job():
        begun.set()
        time.sleep(0.05)
        return threading.current_thread().name

    waiting = Jobs().submit(job)
    assert begun.wait(10)
    assert waiting.finish().startswith("shardset-read")


def test_jobs_that_were_given_up_look_up_and_end():
    jobs = Jobs()
    begun = threading.Event()

    def job():
        begun.set()
        while True:
            look_up()
            time.sleep(0.001)

    waiting = jobs.submit(job)
    assert begun.wait(10)
    jobs.give_up()
    with pytest.raises(CancelledError):
        waiting.finish()


def test_a_pause_lasts_as_long_as_it_should():
    for seconds in (0.0, 0.05, 0.3):
        start = time.perf_counter()
        pause(seconds)
        assert seconds <= time.perf_counter() - start < seconds + 30


# Processes


def _run_some(pipe):
    names = set()
    both = threading.Barrier(2)

    def job():
        both.wait(10)
        names.add(threading.current_thread().name)

    run_all([job, job], 2)
    pipe.send((os.getpid(), len(names), submit(os.getpid).result(10)))


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
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_forked_while_the_pool_is_at_work_have_threads_of_their_own():
    stop = threading.Event()

    def keep_busy():
        while not stop.is_set():
            run_all([lambda: time.sleep(0.0005)] * 20, 8)
        return True

    with ThreadPoolExecutor(3) as callers:
        busy = [callers.submit(keep_busy) for _ in range(3)]
        try:
            for _ in range(8):
                child, names, pool_of = _in_fork(_run_some)
                assert child == pool_of != os.getpid()
                assert names == 2
        finally:
            stop.set()
        assert all(future.result(20) for future in busy)


def test_no_thread_is_started_before_there_is_work_and_none_holds_up_the_end():
    program = """
import threading, time
from shardset.storage import threads
assert threading.active_count() == 1
done = []
threads.run_all([lambda: done.append(time.sleep(0.01))] * 4, 4)
assert len(done) == 4 and threading.active_count() > 1
import atexit
atexit.register(lambda: (threads.run_all([lambda: done.append(1)] * 4, 4), print(len(done))))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60, text=True)
    assert done.stdout == "8\n"  # at the end of the interpreter, too, though there can be no more threads then
    assert not done.stderr


def ahead(task, items, count=4, memory=10**9, size_of=lambda _: 1):
    return map_ahead(task, items, count, memory=memory, size_of=size_of)


def test_results_come_in_order_while_the_next_are_under_way():
    begun = []

    def task(item):
        begun.append(item)
        time.sleep(0.01 * (3 - item % 3))
        return item * item

    results = ahead(task, range(20))
    assert next(results) == 0
    assert wait_until(lambda: len(begun) >= 4)
    assert list(results) == [item * item for item in range(1, 20)]
    assert sorted(begun) == list(range(20))


def test_no_more_is_begun_than_there_is_memory_for_but_always_one():
    begun = []
    results = ahead(begun.append, [50, 40, 30, 200, 10], count=10, memory=100, size_of=lambda item: item)
    next(results)
    assert wait_until(lambda: 40 in begun and 30 in begun)
    assert len(begun) <= 4
    assert [*results] == [None] * 4
    assert sorted(begun) == [10, 30, 40, 50, 200]


@pytest.mark.parametrize("mapped", [ahead, map_in_threads])
def test_an_error_comes_where_its_result_would_have_come(mapped):
    def task(item):
        if item == 3:
            raise ValueError(item)
        return item

    results = mapped(task, range(1000))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


@pytest.mark.parametrize("mapped", [ahead, map_in_threads])
def test_what_nobody_takes_any_more_is_given_up(mapped):
    begun = []

    def task(item):
        begun.append(item)
        pause(0 if item == 0 else 60)

    results = mapped(task, range(1000))
    next(results)
    assert wait_until(lambda: len(begun) > 2)
    before = time.monotonic()
    results.close()
    assert time.monotonic() - before < 40
    assert len(begun) <= 12


def test_long_tasks_may_wait_for_the_pool_themselves():
    def task(item):
        found = []
        run_all([partial(found.append, number) for number in range(50)], 16)
        return item, sorted(found)

    assert list(map_in_threads(task, range(30))) == [(item, list(range(50))) for item in range(30)]


def wait_until(condition):
    end = time.monotonic() + 60
    while time.monotonic() < end and not condition():
        time.sleep(0.005)
    return condition()
