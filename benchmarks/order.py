"""Working out orders: nanoseconds a sample, 65,536 positions a call.

Once with one call after another from the start of an epoch, as a loader asks, and once with each call somewhere else,
of which nothing is known yet. There is no peer: what other loaders shuffle by holds every sample or depends on ranks.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Final

from measure import Result, limit

from shardset.loading.order import RandomOrder, SequentialOrder, Shuffle, order_of, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardset.loading.order import Order

AT_ONCE: Final = 1 << 16
COUNT: Final = 10_000_000
LIMIT: Final = 100.0
MEANS: Final = (1_000, 10_000, 100_000, 131_072, 1_000_000)
"""Mean sizes at which runs have 256, 26, 2, 2 and 1 samples, and windows 1,048,576 down to 1,024."""


def run(root: Path, *, quick: bool) -> list[Result]:  # noqa: ARG001 - needs no data
    calls = 16 if quick else 64
    orders: list[tuple[str, Order]] = [
        (f"shuffled in windows, samples of {mean:,} bytes", order_of(resolve(Shuffle(), COUNT, COUNT * mean), COUNT, 1))
        for mean in MEANS
    ]
    orders += [(f"fully random, {count:,} samples", RandomOrder(count, 1)) for count in (COUNT, 2**20 + 1, 2**40)]
    orders.append((f"sequential, {COUNT:,} samples", SequentialOrder(COUNT)))
    return [_measure(name, order, how, calls) for name, order in orders for how in ("in a row", "anywhere")]


def _measure(name: str, order: Order, how: str, calls: int) -> Result:
    return limit(
        f"{name}, calls {how}",
        list(_nanoseconds(order, how == "in a row", calls)),
        delivers=f"the samples at {AT_ONCE:,} positions, int64; each value one call",
        unit="ns a sample",
        ours=f"{type(order).__name__}(...).take(epoch, range(start, start + {AT_ONCE}))",
        below=LIMIT,
    )


def _nanoseconds(order: Order, is_in_a_row: bool, calls: int) -> Iterator[float]:
    """Yield the time of each call; those in a row go on with what the ones before have worked out."""
    places = order.count // AT_ONCE
    gc.collect()
    order.take(calls, range(AT_ONCE))
    for call in range(calls):
        epoch, place = (0, call % places) if is_in_a_row else (call, call * 7919 % places)
        start = time.perf_counter()
        order.take(epoch, range(place * AT_ONCE, (place + 1) * AT_ONCE))
        yield (time.perf_counter() - start) / AT_ONCE * 1e9
