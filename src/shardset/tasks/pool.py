"""Where tasks run: in this process, in a pool of processes made for the purpose, or where the caller says."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from shardset.processes import interrupts_held, new_pool, starting, stop_pool
from shardset.storage.store import url_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor, ProcessPoolExecutor
    from types import FrameType

    from shardset.dataset.discover import ShardSource

Task = TypeVar("Task")
Answer = TypeVar("Answer")

SMALL: Final = 64 << 20
"""Shards of fewer bytes in all are indexed faster in this process than a pool starts."""


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
        with new_pool(workers, __package__) as pool:
            try:
                yield partial(_map_over, pool, needs_main)
            except BaseException:
                with interrupts_held():
                    stop_pool(pool)
                raise


def _map_over(
    pool: ProcessPoolExecutor, needs_main: bool, function: Callable[[Task], Answer], tasks: list[Task]
) -> Iterable[Answer]:
    """Hand in all tasks, which starts the workers."""
    with starting(needs_main=needs_main):
        return pool.map(partial(_work, function), tasks)


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
