"""HTTP requests over libcurl: keep-alive connections that belong to the process, for all threads.

What is carried out is a `Talk`: a generator that gives requests and waits, and is given the heads of the answers. It
says what redirects, failures and answers mean; here nothing is judged but the connection. The same transfer runs in the
thread that asks, or beside many others in the one thread of `loop`. A connection serves one request at a time and is
reused for the next one to the same origin.

In a forked child nothing of the parent's pool is used: the child's copies of its sockets are put out of the way, so
that neither side can disturb what the other sends.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from .exchange import ConnectionFault, Exchange, new_handle
from .loop import Loop
from .retry import HostBudget
from .threads import is_one_of_many, pause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .answers import Head
    from .exchange import Ask
    from .loop import Talk

Result = TypeVar("Result")

_MOST_IDLE: Final = 128


def carry_out(talk: Talk[Result]) -> Result:
    """Carry out one transfer, and wait for it.

    In this thread, unless that is one of many that wait side by side: those leave their requests to one that has them
    all (see `loop`).

    Raises:
        Whatever the transfer raised.
    """
    loop = _process().loop() if is_one_of_many() else None
    if loop is None:
        return _carry_out_here(talk)
    found: list[Result] = []
    loop.carry_out([_keep(talk, found)], 1)
    return found.pop()


def carry_out_all(talks: Sequence[Talk[object]], at_once: int) -> None:
    """Carry out transfers, at most `at_once` of them side by side, and wait for them.

    Raises:
        Whatever one raised first, or what interrupts this thread. Those that have not begun are given up; those under
        way are ended and waited for, so that nothing writes any more to where they write.
    """
    loop = _process().loop() if len(talks) > 1 or is_one_of_many() else None
    if loop is not None:
        loop.carry_out(talks, at_once)
        return
    for talk in talks:
        _carry_out_here(talk)


def _keep(talk: Talk[Result], found: list[Result]) -> Talk[None]:
    found.append((yield from talk))


def _carry_out_here(talk: Talk[Result]) -> Result:
    answer: Head | Exception | None = None
    while True:
        try:
            step = talk.throw(answer) if isinstance(answer, Exception) else talk.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result
        answer = None
        if isinstance(step, float):
            pause(step)
            continue
        with budget(step.url).slot():
            try:
                answer = _send(step)
            except Exception as error:  # noqa: BLE001 - the transfer is told
                answer = error


def _send(ask: Ask) -> Head:
    """Carry out one request in this thread.

    Raises:
        As `Exchange.finish`.
    """
    import pycurl

    origin = origin_of(ask.url)
    pool = _process().connections
    handle = pool.take(origin)
    exchange = Exchange(ask)
    failed = None
    try:
        exchange.prepare(handle, looks_up=True)
        try:
            handle.perform()
        except pycurl.error as error:
            failed = error.args[0], error.args[1]
        head = exchange.finish(handle, failed)
    except BaseException as error:
        if isinstance(error, ConnectionFault):
            _process().take_note(ask.url, error)
        handle.close()
        raise
    _process().take_note(ask.url, None)
    if exchange.is_cut:
        handle.close()  # the rest of the body would come before the next answer
    else:
        pool.give(origin, handle)
    return head


def budget(url: str) -> HostBudget:
    """Return the budget of requests that all threads of this process share for a url's host."""
    return _process().budget(url)


@lru_cache(4096)
def origin_of(url: str) -> str:
    """Return scheme, host and port of a url, in one spelling: ``"https://example.org:443"``.

    Raises:
        ValueError: The port is no number.
    """
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    port = parts.port or (443 if scheme == "https" else 80)
    return f"{scheme}://{(parts.hostname or '').lower()}:{port}"


class _Connections:
    """Idle handles by origin, the one used last first. Needs no lock: each step on a list or dict is atomic."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, list[Any]] = OrderedDict()  # the origin used last at the end

    def take(self, origin: str) -> Any:
        """Return an idle handle that has talked to this origin, or a new one."""
        try:
            return self._idle[origin].pop()
        except (KeyError, IndexError):
            return new_handle()

    def give(self, origin: str, handle: Any) -> None:
        """Take a handle back."""
        idle = self._idle.setdefault(origin, [])
        idle.append(handle)
        with suppress(KeyError, IndexError, RuntimeError):  # another thread has just done the same
            self._idle.move_to_end(origin)
            while sum(map(len, self._idle.values())) > _MOST_IDLE:
                oldest = next(iter(self._idle))
                self._idle[oldest].pop(0).close()
                if not self._idle[oldest]:
                    del self._idle[oldest]

    def abandon(self) -> None:
        """Let go of the handles in a forked child, without a byte on the sockets, which are the parent's.

        Closing a handle says goodbye on a TLS connection; here it says so to nobody.
        """
        import pycurl

        with open(os.devnull, "wb") as nobody:  # noqa: PTH123 - a descriptor is wanted
            for handle in [handle for idle in self._idle.values() for handle in idle]:
                socket = handle.getinfo(pycurl.LASTSOCKET)
                if socket >= 0:
                    os.dup2(nobody.fileno(), socket, inheritable=False)
        self._idle.clear()


class _Process:
    """What belongs to one process."""

    def __init__(self) -> None:
        self.connections = _Connections()
        self.budgets: dict[str, HostBudget] = {}
        self.reached: set[str] = set()  # origins that have answered
        self._lock = threading.Lock()
        self._loop: Loop | None = None

    def budget(self, url: str) -> HostBudget:
        origin = origin_of(url)
        return self.budgets.get(origin) or self.budgets.setdefault(origin, HostBudget())

    def take_note(self, url: str, fault: ConnectionFault | None) -> None:
        """Take note that a host has answered, or complete the fault of one that has not."""
        origin = origin_of(url)
        if fault is None:
            self.reached.add(origin)
        else:
            fault.is_stranger = fault.is_stranger and origin not in self.reached

    def loop(self) -> Loop | None:
        """Return the thread that has many requests at once; None where none can be had: as the interpreter ends."""
        with self._lock:
            if self._loop is None or self._loop.has_ended:
                try:
                    self._loop = Loop(self.budget, self.take_note)
                except RuntimeError:
                    return None
                atexit.register(self._loop.end)
            return self._loop


# Connections and budgets are a process's own by their nature; replaced as a whole in a forked child.
_current: _Process | None = None


def _process() -> _Process:
    global _current  # noqa: PLW0603 - see above
    process = _current
    if process is None:
        process = _current = _Process()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_leave_parent)
    return process


def _leave_parent() -> None:
    global _current
    inherited, _current = _current, _Process()
    if inherited is not None:
        inherited.connections.abandon()  # of its loop, see there
