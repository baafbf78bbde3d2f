"""Downloads in the background of a process: at most so many at once, each known by what it is for."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from concurrent.futures import CancelledError, Future, wait
from typing import TYPE_CHECKING, Final

from .threads import look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    Task = Callable[[threading.Event], object]
    """Does the work. When the event is set, it should stop and raise `CancelledError`."""

_LAST_SECONDS: Final = 5.0
_LOOK: Final = 0.2


class Background:
    """Runs tasks in threads of its own, which end when there is nothing to do.

    The threads do not keep the process alive. At its end they have a few seconds to put away what they have begun.

    Args:
        at_once: How many tasks may run side by side.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Hashable, Future[None], Task]] = deque()
        # By what they are for: tasks that wait or run, and those that failed.
        self._known: dict[Hashable, Future[None]] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._threads, self._stop)

    def start(self, key: Hashable, task: Task) -> bool:
        """Queue a task, unless one for the same `key` waits or runs; a failure of an earlier one is forgotten."""
        with self._lock:
            known = self._known.get(key)
            if known is not None and not known.done():
                return False
            future: Future[None] = Future()
            self._known[key] = future
            self._waiting.append((key, future, task))
            self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) < self._at_once:
                thread = threading.Thread(target=self._work, args=(self._stop,), name="shardset-cache", daemon=True)
                self._threads.append(thread)
                thread.start()
        return True

    def is_under_way(self, key: Hashable) -> bool:
        """Tell whether a task waits or runs."""
        known = self._known.get(key)
        return known is not None and not known.done()

    def waiting(self) -> int:
        """Return how many tasks wait for others to end."""
        return len(self._waiting)

    def take_over(self, key: Hashable, *, is_all: bool) -> None:
        """Raise the failure of a task that has ended, before the caller does the same, or a part of it.

        Args:
            key: What it is for.
            is_all: The caller does all of it; then a task that has not begun never will.

        Raises:
            Whatever the task raised; once.
        """
        known = self._known.get(key)
        if known is None:
            return
        if is_all and not known.cancel():
            while not known.done():  # or its failure would be raised a second time, by a later read
                look_up()
                wait([known], _LOOK)
        if known.done():
            self.forget(key)
            if not known.cancelled():
                known.result()

    def forget(self, key: Hashable) -> None:
        """Forget a failure: what it was about has come right."""
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.done():
                del self._known[key]

    def give_up(self) -> None:
        """Let no task begin that waits, and tell those that run to stop."""
        with self._lock:
            for key, future, _ in self._waiting:
                future.cancel()
                self._known.pop(key, None)
            self._waiting.clear()
            self._stop.set()
            self._stop = threading.Event()
            self._threads = []
            weakref.finalize(self, _end, self._threads, self._stop)

    def _work(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with self._lock:
                if not self._waiting:
                    # Under the lock, so that nobody counts on a thread that is just ending.
                    if threading.current_thread() in self._threads:
                        self._threads.remove(threading.current_thread())
                    return
                key, future, task = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                task(stop)
            except CancelledError:
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - kept for the read that needs what was not downloaded
                future.set_exception(error)
                continue
            else:
                future.set_result(None)
            self.forget(key)


def _end(threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    stop.set()
    until = time.monotonic() + _LAST_SECONDS
    for thread in list(threads):
        thread.join(max(0.0, until - time.monotonic()))
