"""Many requests side by side in one thread: libcurl's multi interface over the system's selector.

A thread for each request would wait for the interpreter at every piece that arrives, and so would whoever wants to work
meanwhile. Here one thread a process has them all. Its work is begun by `Loop.carry_out`, in whatever thread, and comes
to an end there.

A forked child has a copy of it without its thread, which may have been anywhere inside libcurl. Nothing of it is used
there, and nothing is taken down either, so that no byte goes over the parent's connections: the frames of a thread that
was not copied live on, and hold it.
"""

from __future__ import annotations

import heapq
import os
import selectors
import socket
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .exchange import ConnectionFault, Exchange, new_handle
from .threads import Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from .answers import Head
    from .exchange import Ask
    from .retry import HostBudget

    Result = TypeVar("Result")

    Talk = Generator[Ask | float, Head | None, Result]
    """What one transfer needs, step by step: requests to be carried out, whose heads or faults it is given back, and
    seconds to wait."""

_LOOK: Final = 0.2
_SOON: Final = 0.02
_MOST_CONNECTIONS: Final = 128
_END_WAIT: Final = 2.0


class Batch:
    """Transfers that somebody waits for together.

    Args:
        talks: The transfers.
        at_once: How many of them may be under way.
    """

    def __init__(self, talks: Iterable[Talk[object]], at_once: int) -> None:
        self.pending = deque(talks)
        self.room = at_once
        self.active: set[_Flow] = set()
        self.error: BaseException | None = None
        self.jobs = Jobs()
        self._done = threading.Event()

    def fail(self, error: BaseException) -> None:
        """Take note of the first error, and begin nothing more."""
        self.error = self.error or error
        self.pending.clear()
        self.jobs.give_up()

    def lose(self, error: BaseException) -> None:
        """Give up at once what is not done, for nobody is there to carry it out."""
        if self._done.is_set():
            return
        self.fail(error)
        self.active.clear()
        self.settle()

    def settle(self) -> bool:
        """Tell whether all is done, and let whoever waits go on if it is."""
        if self.pending or self.active:
            return False
        self._done.set()
        return True

    def wait(self) -> None:
        """Wait until all is done, in short steps: on Windows nothing else lets Ctrl-C through."""
        while not self._done.wait(1.0):
            pass


class _Flow:
    """One transfer that is under way."""

    __slots__ = ("ask", "batch", "budget", "exchange", "handle", "talk")

    def __init__(self, talk: Talk[object], batch: Batch) -> None:
        self.talk = talk
        self.batch = batch
        self.ask: Ask | None = None
        self.budget: HostBudget | None = None
        self.exchange: Exchange | None = None
        self.handle: Any = None


class Loop:
    """The thread that has all requests of a process. It is made when first needed, and ends with the interpreter.

    Args:
        budget: Gives the budget of requests of a url's host.
        settle: Is told the url of every request that was carried out, and its fault if it failed.
    """

    def __init__(
        self, budget: Callable[[str], HostBudget], settle: Callable[[str, ConnectionFault | None], None]
    ) -> None:
        import pycurl

        self._budget = budget
        self._settle = settle
        self._inbox: deque[Batch] = deque()
        self._ready: deque[Batch] = deque()  # more of these may begin
        self._batches: set[Batch] = set()
        self._flows: dict[Any, _Flow] = {}  # by handle, those that libcurl has
        self._blocked: deque[_Flow] = deque()  # these wait for a place with their host
        self._later: list[tuple[float, int, _Flow]] = []  # a heap of those that wait for a time
        self._numbers = count()
        self._idle: list[Any] = []
        self._timer: float | None = None
        self._next_look = 0.0
        self._ends = False
        self._woken = False
        self._curl = pycurl
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, _MOST_CONNECTIONS)
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        for end in (self._waker, self._wakes):
            end.settimeout(0)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shardset-http", daemon=True)
        self._thread.start()

    def carry_out(self, talks: Iterable[Talk[object]], at_once: int) -> None:
        """Carry out transfers, at most `at_once` of them side by side, and wait for them.

        Raises:
            Whatever one raised first, or what interrupts this thread. Those that have not begun are given up; those
            under way are ended and waited for, so that nothing writes any more to where they write.
        """
        batch = Batch(talks, at_once)
        self._inbox.append(batch)
        self._wake()
        if self._ends:  # perhaps too late to be seen
            self._thread.join(_END_WAIT)
            batch.lose(CancelledError("the interpreter ends"))
        try:
            batch.wait()
        except BaseException:  # Ctrl-C, most of all
            batch.jobs.give_up()
            self._wake()
            batch.wait()
            raise
        error, batch.error = batch.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it holds this frame

    def end(self) -> None:
        """End the thread, and close its connections."""
        if os.getpid() == self._process:  # a forked child has no such thread
            self._ends = True
            self._wake()
            self._thread.join(_END_WAIT)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(OSError):  # full, so it wakes anyway
                self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._ends:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - a fault of ours must reach those who wait
            self._ends = True
            self._lose(error)
        else:
            self._lose(CancelledError("the interpreter ends"))
        for handle in self._idle:
            handle.close()
        self._multi.close()
        self._selector.close()
        for end in (self._waker, self._wakes):
            end.close()

    @property
    def has_ended(self) -> bool:
        """Nothing can be carried out any more."""
        return self._ends

    def _turn(self) -> None:
        """Wait for something to happen, and do what follows."""
        for key, events in self._selector.select(self._patience()):
            if key.fileobj is self._wakes:
                with suppress(OSError):
                    while self._wakes.recv(4096):
                        pass
                self._woken = False  # before the inbox is looked through
                continue
            sent = (self._curl.CSELECT_IN if events & selectors.EVENT_READ else 0) | (
                self._curl.CSELECT_OUT if events & selectors.EVENT_WRITE else 0
            )
            self._multi.socket_action(key.fd, sent)
        now = time.monotonic()
        if self._timer is not None and self._timer <= now:
            self._timer = None
            self._multi.socket_action(self._curl.SOCKET_TIMEOUT, 0)
        self._take_finished()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            self._look()
        while self._later and self._later[0][0] <= now:
            self._go_on(heapq.heappop(self._later)[2])
        self._try_blocked()
        while self._inbox:
            self._ready.append(self._inbox.popleft())
        while self._ready:
            self._begin_more(self._ready.popleft())

    def _patience(self) -> float | None:
        """Return the seconds until something is to be done even if nothing happens."""
        if not self._batches:
            return None if self._timer is None else max(0.0, self._timer - time.monotonic())
        times = [self._next_look, *([self._timer] if self._timer is not None else [])]
        if self._later:
            times.append(self._later[0][0])
        wait = min(times) - time.monotonic()
        return max(0.0, min(wait, _SOON) if self._blocked else wait)

    def _look(self) -> None:
        """End what nobody waits for any more."""
        for batch in [batch for batch in self._batches if batch.jobs.given_up]:
            batch.pending.clear()
            for flow in list(batch.active):
                self._drop(flow)
                self._finish(flow, CancelledError("nobody waits for this any more"))

    def _begin_more(self, batch: Batch) -> None:
        self._batches.add(batch)
        while batch.pending and len(batch.active) < batch.room:
            flow = _Flow(batch.pending.popleft(), batch)
            batch.active.add(flow)
            self._go_on(flow)
        if batch.settle():
            self._batches.discard(batch)

    def _go_on(self, flow: _Flow, answer: Head | BaseException | None = None) -> None:
        """Give a transfer what it waits for, and begin its next step."""
        try:
            step = flow.talk.throw(answer) if isinstance(answer, BaseException) else flow.talk.send(answer)
        except StopIteration:
            self._finish(flow, None)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._finish(flow, error)
        else:
            if isinstance(step, float):
                heapq.heappush(self._later, (time.monotonic() + step, next(self._numbers), flow))
            else:
                flow.ask, flow.budget = step, self._budget(step.url)
                self._try(flow)

    def _try(self, flow: _Flow) -> None:
        """Send a transfer's request, or leave it waiting for a place."""
        ask, budget = flow.ask, flow.budget
        if ask is None or budget is None:
            return
        if not budget.try_begin():
            self._blocked.append(flow)
            return
        flow.exchange, flow.ask = Exchange(ask), None
        try:
            flow.handle = self._idle.pop() if self._idle else new_handle()
            self._flows[flow.handle] = flow
            flow.exchange.prepare(flow.handle, looks_up=False)
            self._multi.add_handle(flow.handle)
        except Exception as error:  # noqa: BLE001 - what cannot be asked is one transfer's own fault
            self._release(flow, is_added=False)
            self._go_on(flow, error)

    def _try_blocked(self) -> None:
        full: set[HostBudget | None] = set()
        for _ in range(len(self._blocked)):
            flow = self._blocked.popleft()
            if flow.budget in full:
                self._blocked.append(flow)
                continue
            self._try(flow)
            if flow.ask is not None:
                full.add(flow.budget)

    def _take_finished(self) -> None:
        left = 1
        while left:
            left, succeeded, failed = self._multi.info_read()
            for handle in succeeded:
                self._answer(self._flows[handle], None)
            for handle, number, text in failed:
                self._answer(self._flows[handle], (number, text))

    def _answer(self, flow: _Flow, failed: tuple[int, str] | None) -> None:
        """Hand a transfer what came of its request."""
        exchange = flow.exchange
        assert exchange is not None  # noqa: S101 - it has a handle
        url = exchange.ask.url
        answer: Head | BaseException
        try:
            answer = exchange.finish(flow.handle, failed)
            self._settle(url, None)
        except BaseException as error:  # noqa: BLE001 - the transfer is told
            answer = error
            if isinstance(error, ConnectionFault):
                self._settle(url, error)
        self._release(flow)
        self._go_on(flow, answer)

    def _release(self, flow: _Flow, *, is_added: bool = True) -> None:
        """Take a transfer's handle back, and its place with the host."""
        handle, flow.handle, flow.exchange = flow.handle, None, None
        if handle is not None:
            del self._flows[handle]
            if is_added:
                self._multi.remove_handle(handle)
            self._idle.append(handle)
        if flow.budget is not None:
            flow.budget.end()
            flow.budget = None

    def _drop(self, flow: _Flow) -> None:
        """Take a transfer from wherever it waits."""
        if flow.handle is not None:
            self._release(flow)
        elif flow.ask is not None:
            flow.ask = None
            self._blocked = deque(waiting for waiting in self._blocked if waiting is not flow)
        else:
            self._later = [waiting for waiting in self._later if waiting[2] is not flow]
            heapq.heapify(self._later)

    def _finish(self, flow: _Flow, error: BaseException | None) -> None:
        batch = flow.batch
        batch.active.discard(flow)
        flow.talk.close()
        if error is not None:
            batch.fail(error)
            self._next_look = 0.0  # the others of its batch end at once
        self._ready.append(batch)

    def _lose(self, error: BaseException) -> None:
        """Tell all who wait that nothing comes any more."""
        for flow in list(self._flows.values()):
            self._release(flow)
        for batch in [*self._batches, *self._inbox]:
            batch.lose(error)

    def _watch(self, what: int, descriptor: int, multi: Any, data: Any) -> None:
        """Have a socket watched as libcurl wants."""
        del multi, data
        if what == self._curl.POLL_REMOVE:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(descriptor)
            return
        events = (selectors.EVENT_READ if what & self._curl.POLL_IN else 0) | (
            selectors.EVENT_WRITE if what & self._curl.POLL_OUT else 0
        )
        try:
            self._selector.modify(descriptor, events)
        except KeyError:
            self._selector.register(descriptor, events)

    def _set_timer(self, milliseconds: int) -> None:
        self._timer = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000
