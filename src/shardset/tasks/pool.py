"""Where tasks run: in this process, in a pool of processes made for the purpose, or where the caller says."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import connection, resource_tracker
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardset.storage.store import url_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

    from shardset.dataset.discover import ShardSource

Task = TypeVar("Task")
Answer = TypeVar("Answer")

SMALL: Final = 64 << 20
"""Shards of fewer bytes in all are indexed faster in this process than a pool starts."""
_GRACE: Final = 0.5


def num_workers(workers: int | None, tasks: int, size: int, *, most: int | None = None) -> int:
    """Return how many processes to use; 0 means this one.

    Args:
        workers: As many as the caller wants; None for as many as pay.
        tasks: How many tasks there are.
        size: Bytes of their shards.
        most: No more than these, if it is for this function to say how many pay.

    Raises:
        ValueError: A number is negative.
    """
    for name, number in (("workers", workers), ("max_workers", most)):
        if number is not None and number < 0:
            raise ValueError(f"{name}={number}: it is 0 (this process) or more")
    if workers is not None:
        return min(workers, tasks)
    pays = 0 if tasks < 2 or size < SMALL else min(os.cpu_count() or 1, tasks)
    return pays if most is None else min(pays, most)


def workers_for(shards: Sequence[ShardSource], workers: int | None = None, *, most: int | None = None) -> int:
    """Return how many processes to use for a task a shard, as `num_workers` does; 0 for shards in memory."""
    if any(url_scheme(shard.url) == "memory" for shard in shards):
        return 0  # another process would write into a copy of the store
    return num_workers(workers, len(shards), sum(shard.info.size for shard in shards), most=most)


@contextmanager
def task_pool(
    executor: Executor | None, workers: int, *, needs_main: bool = True
) -> Iterator[Callable[[Callable[[Task], Answer], list[Task]], Iterable[Answer]]]:
    """Give a function that maps tasks in order: over the executor, a pool of processes, or in this process.

    Args:
        executor: Where the caller wants the tasks to run.
        workers: Processes of a pool made for this; 0 for none.
        needs_main: Tasks may hold what the main module defines. Otherwise workers do without that module, which may be
            a script that would begin its work once more if it was imported again.
    """
    if executor is not None:
        yield executor.map
    elif not workers:
        yield map
    else:
        with ProcessPoolExecutor(workers, _context(), _begin_worker) as pool:
            try:
                yield partial(_map_over, pool, needs_main)
            except BaseException:
                with _interrupts_held():
                    _stop(pool)
                raise


def _map_over(
    pool: ProcessPoolExecutor, needs_main: bool, function: Callable[[Task], Answer], tasks: list[Task]
) -> Iterable[Answer]:
    """Hand in all tasks, which starts the workers."""
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # here, because it lets interrupts through when it has started
    with _interrupts_held(), nullcontext() if needs_main else _without_main():
        return pool.map(partial(_work, function), tasks)


def _stop(pool: ProcessPoolExecutor) -> None:
    """Stop a pool after Ctrl-C, most of all: what takes longer is not waited for, since it can be done again."""
    processes = [*(pool._processes or {}).values()]  # noqa: SLF001 - what ends them is public from Python 3.14 on
    manager: Any = pool._executor_manager_thread  # noqa: SLF001
    pool.shutdown(wait=False, cancel_futures=True)
    if manager is not None:
        # In Python 3.11 that thread stumbles, aloud, over cancelled tasks that it has not yet dropped.
        manager.join(_GRACE)
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    for process in running.values():
        process.terminate()
    deadline = time.monotonic() + _GRACE
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in connection.wait(running, left):
            del running[sentinel]
    for process in running.values():
        process.kill()


def _context() -> BaseContext:
    # A server process that has the modules loaded forks clean workers: neither this process's threads and locks nor a
    # fresh start for each worker.
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__package__])
    return context


@contextmanager
def _without_main() -> Iterator[None]:
    """Let there seem to be no main module to be imported by the workers that start in this block."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C from this thread until the block ends, and for good from the processes that start in it.

    What is interrupted in its first moments prints a traceback, whoever waits for its end: a process, before it can
    ignore the signal, and one that gets but half of what it is to do.
    """
    came: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT)
    # The signal may reach another thread. Its handler runs in the main thread, which alone may set one.
    swaps = callable(handler) and threading.current_thread() is threading.main_thread()
    if swaps:
        signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if sys.platform != "win32" else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if swaps:
            signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(*came[0])


def _begin_worker() -> None:
    """Prepare a worker process: it ends when its parent does, and leaves Ctrl-C to that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Between tasks there is nothing to be put away, and an exception would be told as one of the pool's own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _work(function: Callable[[Task], Answer], task: Task) -> Answer:
    """Carry out a task in a worker. One that is stopped removes what it has half written, and its process ends."""
    try:
        signal.signal(signal.SIGTERM, _leave)
        try:
            return function(task)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except SystemExit:
        pass
    # Not before the exception is gone, and with it all that it kept from being closed. A pool would go on with the next
    # task.
    os._exit(1)


def _end_with(sentinel: Any) -> None:
    connection.wait([sentinel])
    os._exit(1)
