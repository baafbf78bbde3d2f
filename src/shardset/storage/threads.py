"""Threads that wait for bytes: one pool a process, made when first needed, and anew in a forked child.

Nobody waits for a thread to become free: who asks for jobs does them too, and in the end waits only for those that a
thread has begun. A job may therefore ask for jobs itself: each waits only for jobs below its own, and the lowest ones
wait for nobody.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Result = TypeVar("Result")
Item = TypeVar("Item")
Given = ParamSpec("Given")

THREADS: Final = 64
"""At most so many jobs are under way in a process's pool. They wait nearly all of their time."""
_LOOK: Final = 0.2

# A process has one pool because threads are its resource; (process id, pool), replaced as a whole, so that a child
# never sees a lock that another thread of its parent held.
_pool: tuple[int, ThreadPoolExecutor] | None = None


class _Here(threading.local):
    """What this thread is at.

    Attributes:
        jobs: The jobs that it works on.
        is_pooled: It belongs to the pool.
    """

    jobs: Jobs | None = None
    is_pooled = False


_here = _Here()


def submit(task: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
    """Run a task in a thread of the pool. A task must not wait for another that was submitted so: see `run_all`.

    Raises:
        RuntimeError: There can be no more threads, or the interpreter is about to end.
    """
    global _pool  # noqa: PLW0603 - see above
    pool = _pool
    if pool is None or pool[0] != os.getpid():
        # Two threads may come here at once; the pool that is overwritten has done its work when its tasks are done.
        pool = _pool = os.getpid(), ThreadPoolExecutor(THREADS, "shardset-read", _mark_pooled)
    return pool[1].submit(task, *args, **kwargs)


def _mark_pooled() -> None:
    _here.is_pooled = True


class Job(Future[Result]):
    """One job, for a thread of the pool or for whoever needs it first."""

    def __init__(self, task: Callable[[], Result]) -> None:
        super().__init__()
        # Apart from the future and let go when it is taken, so that no queue and no error keeps what it writes into.
        self._task: list[Callable[[], Result]] = [task]

    def take(self) -> Callable[[], Result]:
        """Take what is to be done out of it, once."""
        return self._task.pop()

    def finish(self) -> Result:
        """Do it in this thread if none of the pool has begun it, otherwise wait for it.

        Raises:
            Whatever it raised.
        """
        try:
            return self.take()() if self.cancel() else self.result()
        finally:
            del self  # an error holds this frame, and this job the error


class Jobs:
    """The jobs of one call, which are given up together, and with the job that the call is made in."""

    __slots__ = ("_given_up", "_within")

    def __init__(self) -> None:
        self._given_up = False
        self._within = _here.jobs

    @property
    def given_up(self) -> bool:
        """Nobody waits for them any more."""
        return self._given_up or (self._within is not None and self._within.given_up)

    def give_up(self) -> None:
        """Tell those under way that nobody waits for them any more; they end when they look (see `pause`)."""
        self._given_up = True

    def submit(self, task: Callable[[], Result]) -> Job[Result]:
        """Leave a job to the pool, until somebody cancels or finishes it."""
        job = Job(task)
        with suppress(RuntimeError):  # no thread can be had; then it waits to be finished
            submit(self._carry_out, [job])
        return job

    def do(self, task: Callable[[], Result]) -> Result:
        """Do a task in this thread as one of these jobs."""
        outer = _here.jobs
        _here.jobs = self
        try:
            return task()
        finally:
            _here.jobs = outer

    def _carry_out(self, given: list[Job[Result]]) -> None:
        job = given.pop()  # an error holds this frame and those above it, and the job holds the error
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = self.do(job.take())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks for the result
            job.set_exception(error)
            del job
        else:
            job.set_result(result)


def run_all(jobs: Sequence[Callable[[], None]], at_once: int) -> None:
    """Run jobs, at most `at_once` side by side, in this thread and others, in order of their start.

    Raises:
        Whatever a job raised first, or what interrupts this thread. Jobs that have not begun are given up; those under
        way are told so (see `pause`) and waited for, so that nothing writes any more to where they write.
    """
    pending = deque(jobs)
    errors: list[Exception] = []
    call = Jobs()

    def work() -> None:
        while True:
            try:
                job = pending.popleft()
            except IndexError:
                return
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised again below, in the thread that asked
                pending.clear()
                call.give_up()
                errors.append(error)
                return

    others: list[Job[None]] = []
    try:
        for _ in range(min(at_once, len(jobs)) - 1):
            others.append(call.submit(work))  # noqa: PERF401 - what was submitted is known, wherever Ctrl-C strikes
        call.do(work)
        for other in others:
            if not other.cancel():
                other.result()
    except BaseException:  # Ctrl-C, most of all
        pending.clear()
        call.give_up()
        for other in others:
            if not other.cancel():
                other.exception()
        raise
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # they hold this frame


def map_ahead(
    task: Callable[[Item], Result], items: Iterable[Item], ahead: int, *, memory: int, size_of: Callable[[Item], int]
) -> Iterator[Result]:
    """Do a task with each item, and give the results in order, while the next ones are already under way.

    A forked child may go on with an iterator of its parent.

    Args:
        task: Waits for bytes, most of its time.
        items: What to do it with.
        ahead: At most so many are under way, or done and not yet taken.
        memory: Bytes that their results may have together before another is begun.
        size_of: Tells the bytes of an item's result.

    Raises:
        Whatever a task raised, where its result would have come. What has not begun then is given up.
    """
    call, process = Jobs(), os.getpid()
    waiting: deque[tuple[Item, int, Job[Result]]] = deque()
    source = iter(items)
    held = 0

    def begin_more() -> None:
        nonlocal held
        while len(waiting) < ahead and (held < memory or not waiting):
            for item in source:
                size = size_of(item)
                waiting.append((item, size, call.submit(partial(task, item))))
                held += size
                break
            else:
                return

    def take() -> Result:
        nonlocal process, held
        if os.getpid() != process:  # the threads that have these jobs are in the parent
            process = os.getpid()
            begun = [(item, size) for item, size, _ in waiting]
            waiting.clear()
            waiting.extend((item, size, call.submit(partial(task, item))) for item, size in begun)
        _, size, job = waiting.popleft()
        held -= size
        try:
            return job.finish()
        finally:
            del job  # an error holds this frame, and the job holds the error

    try:
        begin_more()
        while waiting:
            taken = [take()]
            begin_more()
            yield taken.pop()  # so that nothing here holds on to it meanwhile
    finally:
        call.give_up()
        if os.getpid() == process:  # in a child, the lock of a job of its parent may be held for ever
            for _, _, job in waiting:
                job.cancel()


def map_in_threads(task: Callable[[Item], Result], items: Iterable[Item], at_once: int = 8) -> Iterator[Result]:
    """Do long tasks, which may wait for the pool, in a few threads of their own, and give the results in order.

    Raises:
        Whatever a task raised, where its result would have come. What has not begun then is given up, and what is under
        way ends soon.
    """
    call = Jobs()
    threads = ThreadPoolExecutor(at_once, "shardset-task")
    try:
        yield from threads.map(lambda item: call.do(partial(task, item)), items)
    finally:
        call.give_up()
        threads.shutdown(cancel_futures=True)


def pause(seconds: float) -> None:
    """Sleep, but not in a job that has been given up.

    Raises:
        CancelledError: It has been.
    """
    end = time.monotonic() + seconds
    while True:
        look_up()
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _LOOK))


def is_one_of_many() -> bool:
    """Tell whether this thread is one of several that wait side by side."""
    return _here.is_pooled or _here.jobs is not None


def look_up() -> None:
    """Look whether the job that this thread is at is still wanted. Costs next to nothing.

    Raises:
        CancelledError: It has been given up.
    """
    jobs = _here.jobs
    if jobs is not None and jobs.given_up:
        raise CancelledError("nobody waits for this any more")
