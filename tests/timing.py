"""Bounds on time that a busy machine does not break, and a product that is too slow does."""

from __future__ import annotations

import math
import time


def least_seconds(act, within, *, clock=time.perf_counter, times=5):
    """Return the least seconds that a call took, of as many calls as it takes until one stays within a bound.

    A machine that is busy with something else makes some calls slow; what is slow by itself makes all of them so.

    Args:
        act: Called without arguments; what it returns is dropped.
        within: Seconds; once a call took less, no more are made.
        clock: What measures it. Work of this thread alone is best measured by its processor time, `time.thread_time`.
        times: The most calls.
    """
    least = math.inf
    for _ in range(times):
        start = clock()
        act()
        least = min(least, clock() - start)
        if least < within:
            break
    return least
