"""Processes that work for this one: how they start, how they end with it, and how they are stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import connection, resource_tracker
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

_GRACE: Final = 0.5


def new_pool(
    workers: int, preload: str, begin: Callable[..., None] | None = None, args: tuple[Any, ...] = ()
) -> ProcessPoolExecutor:
    """Return a pool of processes, none of which has started: that is done by the first task, in `starting`.

    Args:
        workers: How many.
        preload: A module that workers need, loaded once for all of them where the system allows it.
        begin: Called in each worker first.
        args: What it is called with.
    """
    return ProcessPoolExecutor(workers, _context(preload), _begin, (begin, args))


@contextmanager
def starting(*, needs_main: bool = True) -> Iterator[None]:
    """Hold interrupts while workers start in this block.

    Args:
        needs_main: What workers get may hold what the main module defines. Otherwise they do without that module,
            which may be a script that would begin its work once more if it was imported again.
    """
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # here, because it lets interrupts through when it has started
    without: AbstractContextManager[None] = nullcontext() if needs_main else _without_main()
    with interrupts_held(), without:
        yield


def stop_pool(pool: ProcessPoolExecutor) -> None:
    """Stop a pool after Ctrl-C, most of all: what takes longer is not waited for, since it can be done again."""
    processes = [*(pool._processes or {}).values()]  # noqa: SLF001 - what ends them is public from Python 3.14 on
    manager: Any = pool._executor_manager_thread  # noqa: SLF001
    pool.shutdown(wait=False, cancel_futures=True)
    if manager is not None and manager is not threading.current_thread():
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


def _context(preload: str) -> BaseContext:
    # A server process that has the modules loaded forks clean workers: neither this process's threads and locks nor a
    # fresh start for each worker.
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
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
def interrupts_held() -> Iterator[None]:
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


def _begin(begin: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    """Prepare a worker process: it ends when its parent does, and leaves Ctrl-C to that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Between tasks there is nothing to be put away, and an exception would be told as one of the pool's own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    if begin is not None:
        begin(*args)


def _end_with(sentinel: Any) -> None:
    connection.wait([sentinel])
    os._exit(1)
