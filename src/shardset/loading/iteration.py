"""One pass over the rest of an epoch: payloads read ahead, batches decoded ahead, given in order."""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from .batches import Making
from .chunks import Chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from threading import Lock

    from .batches import Maker
    from .chunks import Taken
    from .metrics import Meter
    from .read_ahead import ReadAhead
    from .steps import Step, Steps


class _Batch(NamedTuple):
    making: Making
    taken: Taken
    futures: list[Future[None]]


class Pass:
    """Gives the batches of one rank from a position to the end of its epoch.

    Args:
        maker: Makes batches.
        steps: How positions are shared.
        epoch: The epoch.
        position: Where the first step begins.
        skip: So many steps are left to others at first.
        stride: Then every so-manieth step is taken.
        ahead: How far to work ahead.
        meter: Measures.
        lock: Held while the feed is used.
        workers: Threads that carry tasks out at once; as many as `ahead` says if 0.
    """

    def __init__(
        self,
        maker: Maker,
        steps: Steps,
        epoch: int,
        position: int,
        *,
        skip: int,
        stride: int,
        ahead: ReadAhead,
        meter: Meter,
        lock: Lock,
        workers: int = 0,
    ) -> None:
        self._maker = maker
        self._most = ahead.batches
        self._meter = meter
        self._threads = workers or ahead.num_threads
        self._chunks = Chunks(
            maker, steps, epoch, position, skip=skip, stride=stride, budget=ahead.num_bytes, meter=meter, lock=lock
        )

    def __iter__(self) -> Iterator[tuple[Step, Making, bool]]:
        """Yield each step with its batch, whose tasks are done, and whether the epoch ends with it.

        What was yielded is done with when the next one is asked for.
        """
        process, chunks = os.getpid(), self._chunks
        pool = ThreadPoolExecutor(self._threads, "shardset-load")
        batches: deque[_Batch] = deque()
        try:
            while True:
                while len(batches) <= self._most:
                    taken = chunks.take(is_needed=not batches)
                    if taken is None:
                        break
                    making = Making(self._maker, taken.share, taken.chunk.windows)
                    batches.append(_Batch(making, taken, _submit(pool, making.tasks())))
                    del making, taken
                if not batches:
                    return
                batch = batches.popleft()
                started = time.perf_counter()
                wait(batch.futures)
                self._meter.decode += time.perf_counter() - started
                for future in batch.futures:
                    future.result()
                chunk = batch.taken.chunk
                chunks.work_ahead()
                yield batch.taken.share.step, batch.making, batch.taken.is_last
                del batch
                chunks.release(chunk)
        finally:
            is_child = os.getpid() != process
            chunks.close(is_child=is_child)
            if not is_child:
                pool.shutdown(wait=False, cancel_futures=True)


def _submit(pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], None]]) -> list[Future[None]]:
    """Have tasks carried out by a pool; by this thread, if the interpreter is about to end and gives no other."""
    futures = []
    for task in tasks:
        try:
            futures.append(pool.submit(task))
        except RuntimeError:
            task()
    return futures
