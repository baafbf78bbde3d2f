"""Calls of a function for one sample after the other, made ahead in threads, with the results in order."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from .run import Arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .run import Origin, Step

AHEAD: Final = 4
"""How many samples are held for each thread: waiting, in work, or done and not yet passed on."""
_PATIENCE: Final = 1.0  # seconds to wait for a thread that is in the middle of a call
_END: Final = object()
_PENDING: Final = object()


def attempt(function: Callable[[Any], Any], sample: Any) -> Any:
    """Return what a function gives for a sample, or the exception that it raises."""
    try:
        return function(sample)
    except BaseException as error:  # noqa: BLE001 - raised, or settled, when the sample's turn comes
        return error


def calls_ahead(
    items: Iterator[Any], function: Callable[[Any], Any], threads: int, step: Step, arrivals: Arrivals | None = None
) -> Iterator[tuple[Any, Origin | None, Any]]:
    """Call a function for samples ahead of time, and give what came of it in the order of the source.

    No thread exists before the first sample is asked for, and none is left when this iterator ends, is closed, or is
    forgotten, but those that are in the middle of a call, which end after it. An error of the source is raised when
    the samples before it are through. The samples that are held stand in the states that `step` saves.

    Args:
        items: Samples. They are pulled by the thread that asks for results, up to `AHEAD` for each thread.
        function: Called with a sample, in any thread.
        threads: How many threads; at least 1.
        step: The step of a run.
        arrivals: What has arrived before, of those that come again when a run goes on from a state.

    Yields:
        (sample, its origin, what `attempt` returns for it).
    """
    window: deque[_Task] = deque()

    arrivals = arrivals or Arrivals(step)

    def snapshot() -> dict[str, Any]:
        here = [task.origin or () for task in window if task.is_held]
        return {"held": [list(origin) for origin in (*here, *arrivals.awaited)]}

    step.remember(snapshot)
    crew: _Crew | None = None
    failure: Exception | None = None
    is_open = True
    try:
        while True:
            if crew is not None and crew.process != os.getpid():
                crew = _begin_again(window, function, threads)
            while is_open and len(window) < threads * AHEAD:
                try:
                    sample = next(items, _END)
                except Exception as error:  # noqa: BLE001 - raised below
                    failure, sample = error, _END
                is_open = sample is not _END
                if is_open:
                    window.append(_Task(sample, step.run.origin, is_held=arrivals.take()))
                    crew = crew or _Crew(function, threads)
                    crew.submit(window[-1])
            if crew is None or not window:
                break
            window[0].done.acquire()
            task = window.popleft()
            yield task.sample, task.origin, task.outcome
    finally:
        if crew is not None:
            crew.close()
    if failure is not None:
        raise failure


class _Task:
    """A sample on its way through the threads. `done` is locked until `outcome` is there."""

    __slots__ = ("done", "is_held", "origin", "outcome", "sample")

    def __init__(self, sample: Any, origin: Origin | None, *, is_held: bool) -> None:
        self.is_held = is_held
        self.sample = sample
        self.origin = origin
        self.outcome: Any = _PENDING
        self.lock()

    def lock(self) -> None:
        """Lock the task if it waits for a thread."""
        self.done = threading.Lock()
        if self.outcome is _PENDING:
            self.done.acquire()


class _Crew:
    """Threads of one pass. They end with `close`, when nobody refers to this object any more, and at exit.

    Attributes:
        process: The process that they live in: a child that is forked from it has none of them.
        close: Ends the threads, after the field that each is at.
    """

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.process = os.getpid()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threads = [
            # Daemons, because an iterator that is still there at exit must not keep the process alive.
            threading.Thread(target=_work, args=(self._tasks, function), name=f"shardset-decode-{number}", daemon=True)
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _stop, self._tasks, threads, self.process)
        for thread in threads:
            thread.start()

    def submit(self, task: _Task) -> None:
        """Have a thread see to a task."""
        self._tasks.put(task)


def _work(tasks: queue.SimpleQueue[_Task | None], function: Callable[[Any], Any]) -> None:
    while (task := tasks.get()) is not None:
        task.outcome = attempt(function, task.sample)
        task.done.release()
        del task  # or it would be kept until the next one comes


def _stop(tasks: queue.SimpleQueue[_Task | None], threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process:
        return
    with suppress(queue.Empty):
        while True:
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)


def _begin_again(window: Iterable[_Task], function: Callable[[Any], Any], threads: int) -> _Crew:
    """Return threads for what is not done yet, in a process that was forked in the middle of a pass."""
    crew = _Crew(function, threads)
    for task in window:
        task.lock()
        if task.outcome is _PENDING:
            crew.submit(task)
    return crew
