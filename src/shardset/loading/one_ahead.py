"""One thing done ahead: what will most likely be asked for next, done by a thread of the pool meanwhile."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from shardset.storage.threads import Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from shardset.storage.threads import Job

Result = TypeVar("Result")


class _UntilExit(Jobs):
    """Jobs that are given up when the interpreter ends, too, which would otherwise wait for a far server."""

    __slots__ = ()

    @property
    def given_up(self) -> bool:
        # Nothing public tells it before the pool's threads are waited for.
        return super().given_up or bool(getattr(threading, "_SHUTTING_DOWN", False))


class _Begun(NamedTuple, Generic[Result]):
    place: Hashable
    job: Job[Result]
    jobs: Jobs
    process: int

    @property
    def is_here(self) -> bool:
        """Tell whether its thread is in this process: in a forked child, a lock of it may be held for ever."""
        return self.process == os.getpid()


class OneAhead(Generic[Result]):
    """At most one result for a place that nobody has asked for yet; whoever asks for another place drops it.

    A thread of the pool works on it, and only says so to whoever asks for it: nothing else may be seen of what it does.
    A copy of it, one in another process most of all, has nothing ahead. The task must not refer to whoever holds
    this, since what is dropped, this included, is given up.
    """

    def __init__(self) -> None:
        self._begun: _Begun[Result] | None = None

    def begin(self, place: Hashable, task: Callable[[], Result]) -> None:
        """Begin what comes at a place, in place of all else, unless that was begun before."""
        begun = self._begun
        if begun is not None and begun.place == place and begun.is_here:
            return
        self.drop()
        jobs = _UntilExit()
        self._begun = _Begun(place, jobs.submit(task), jobs, os.getpid())

    def take(self, place: Hashable, task: Callable[[], Result]) -> Result:
        """Return what was begun for a place; if that is nothing, do it now.

        Raises:
            Whatever doing it raised. The next call does it again.
        """
        begun = self._begun
        if begun is None or begun.place != place or not begun.is_here:
            self.drop()
            return task()
        try:
            return begun.job.finish()
        except CancelledError:  # it was given up
            return task()
        finally:
            self.drop()  # Ctrl-C, too, leaves nobody who waits for it
            del begun  # an error holds this frame, and the job holds the error

    def peek(self, place: Hashable) -> Result | None:
        """Return what was done for a place, and keep it; None if that is nothing yet, or failed."""
        begun = self._begun
        if begun is None or begun.place != place or not begun.is_here or not begun.job.done():
            return None
        if begun.job.cancelled() or begun.job.exception() is not None:
            return None
        return begun.job.result()

    def drop(self) -> None:
        """Give up what was begun."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.is_here:
            begun.jobs.give_up()
            begun.job.cancel()

    def __del__(self) -> None:
        self.drop()

    def __reduce__(self) -> tuple[type[OneAhead[Result]], tuple[()]]:
        return OneAhead, ()
