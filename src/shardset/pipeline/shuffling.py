"""The shuffle buffer: samples leave in another order than they came, which the pipeline's numbers decide."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from shardset.loading.order import draws, mix_key

from .run import NOWHERE, Step, pack_origins, unpack_origins

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .run import Origin

    class Random(Protocol):
        """What is asked of a random generator of the caller's own, such as ``random.Random``."""

        def random(self) -> float:
            """Return a number in ``[0, 1)``."""


_DRAWN_AT_ONCE: Final = 1024
_END: Final = object()


def shuffle(  # noqa: PLR0917 - the order of webdataset's arguments
    source: Iterable[Any],
    bufsize: int = 1000,
    initial: int = 100,
    rng: Random | None = None,
    seed: int | None = None,
    handler: object = None,  # noqa: ARG001 - webdataset takes it too; nothing here can go wrong
    *,
    max_bytes: int | None = None,
    step: Step | None = None,
) -> Iterator[Any]:
    """Hold up to `bufsize` samples, and pass them on in random order.

    The first sample leaves when `initial` are there. From then on, while the buffer is not full, two samples come for
    each that leaves; which one leaves is drawn evenly from all that are there. In the end the rest leaves in random
    order. The order follows from the pipeline's seed, the epoch, the rank, the worker and the place of the stage.

    Args:
        source: Samples of any kind.
        bufsize: Samples held at most; below 1 the order is kept.
        initial: Samples to wait for at first; at most `bufsize` count. A value near `bufsize` mixes the first samples
            of an epoch better, and the first one comes later.
        rng: A generator to draw from instead. Then no state can be saved in mid-epoch.
        seed: A number that takes the place of the pipeline's seed for this stage.
        handler: Not needed.
        max_bytes: Hold at most so many bytes of payloads, but always one sample.
        step: The step of a run.

    Raises:
        ValueError: `max_bytes` is below 1.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"shuffle: max_bytes={max_bytes} is below 1")
    step = step or Step(name="shuffle")
    if bufsize < 1:
        return (make(what) for make, what in source) if step.defers else iter(source)
    run = step.run
    key = step.key if seed is None else mix_key(seed, *run.epoch, run.share.rank, run.share.worker, step.number)
    initial = max(1, min(initial, bufsize))
    return _Buffer(step, key, rng).run(source, bufsize, initial, max_bytes)


class _Buffer:
    """The samples that one pass holds, with the origin of each.

    Where the stage before defers (see `Step.defers`), what is held are samples that are yet to be made: they take no
    memory to speak of, and are made when they leave.
    """

    def __init__(self, step: Step, key: int, rng: Random | None) -> None:
        state = step.restored or {}
        self._run = step.run
        self._defers = step.defers
        self._key = key
        self._rng = rng
        self._drawn = int(state.get("drawn", 0))
        self._awaited: dict[str, Any] | None = state or None
        self._passing = len(step.held_later)
        self._samples: list[Any] = []
        self._origins: list[Origin] = []
        self._draws: Iterator[int] = iter(())
        step.remember(self._snapshot)

    def _snapshot(self) -> dict[str, Any]:
        if self._awaited is not None:  # not yet back where the last state was saved
            return self._awaited
        state = {"drawn": self._drawn, "held": pack_origins(self._origins)}
        return state if self._rng is None else {**state, "rng": "of the caller's own"}

    def run(self, source: Iterable[Any], most: int, initial: int, max_bytes: int | None) -> Iterator[Any]:
        items = iter(source)
        leaving = (
            self._shuffle(items, most, initial) if max_bytes is None else self._within(items, most, initial, max_bytes)
        )
        if not self._defers:
            yield from chain(islice(items, self._passing), leaving)
            return
        for make, what in chain(islice(items, self._passing), leaving):
            yield make(what)

    def _refill(self, items: Iterator[Any]) -> None:
        """Take back the samples that were held when the state was saved."""
        for sample in islice(items, len(unpack_origins((self._awaited or {}).get("held", "")))):
            self._samples.append(sample)
            self._origins.append(self._run.origin or NOWHERE)
        self._awaited = None

    def _shuffle(self, items: Iterator[Any], most: int, initial: int) -> Iterator[Any]:
        self._refill(items)
        run, samples, origins, take = self._run, self._samples, self._origins, self._take
        for sample in items:
            samples.append(sample)
            origins.append(run.origin or NOWHERE)
            if len(samples) < most and (another := next(items, _END)) is not _END:
                samples.append(another)
                origins.append(run.origin or NOWHERE)
            if len(samples) >= initial:
                yield take()
        while samples:
            yield take()

    def _within(self, items: Iterator[Any], most: int, initial: int, max_bytes: int) -> Iterator[Any]:
        """Shuffle as `_shuffle` does, with an eye on the bytes."""
        self._refill(items)
        samples, origins = self._samples, self._origins
        held = sum(map(_bytes_of, samples))
        while held > max_bytes and len(samples) > 1:  # a state may be of the moment between two that had to leave
            leaving = self._take()
            held -= _bytes_of(leaving)
            yield leaving
        for sample in items:
            samples.append(sample)
            origins.append(self._run.origin or NOWHERE)
            held += _bytes_of(sample)
            if len(samples) < most and held < max_bytes and (another := next(items, _END)) is not _END:
                samples.append(another)
                origins.append(self._run.origin or NOWHERE)
                held += _bytes_of(another)
            is_full = len(samples) >= initial
            while is_full or (held > max_bytes and len(samples) > 1):
                leaving = self._take()
                held -= _bytes_of(leaving)
                is_full = False
                yield leaving
        while samples:
            yield self._take()

    def _take(self) -> Any:
        """Draw a sample, and take it out."""
        samples, origins = self._samples, self._origins
        if self._rng is not None:
            place = int(self._rng.random() * len(samples))
        else:
            draw = next(self._draws, None)
            if draw is None:
                block = draws(self._key, self._drawn, _DRAWN_AT_ONCE)
                self._draws = iter((block >> np.uint64(32)).tolist())
                draw = next(self._draws)
            place = draw * len(samples) >> 32
            self._drawn += 1
        sample, self._run.origin = samples[place], origins[place]
        last, origin = samples.pop(), origins.pop()
        if place < len(samples):
            samples[place], origins[place] = last, origin
        return sample


def _bytes_of(sample: Any) -> int:
    """Return the bytes of a sample's payloads; decoded arrays and tensors tell theirs too."""
    values = sample.values() if isinstance(sample, dict) else sample if isinstance(sample, tuple | list) else (sample,)
    return sum(len(value) if isinstance(value, bytes | str) else int(getattr(value, "nbytes", 64)) for value in values)
