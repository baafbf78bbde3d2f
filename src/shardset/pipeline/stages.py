"""Stages that take samples one by one: pick them, pass them through a function, look at them.

Each is a generator function over a source of samples, with the arguments of webdataset's stage of that name. What it
leaves out it counts in the report of `step`; where its `handler` is None, the policy of the run decides about errors.
"""

from __future__ import annotations

import builtins
import itertools
import os
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO

import numpy as np

from shardset.errors import without_secrets
from shardset.files import lock_file
from shardset.loading.order import draws

from .passage import Passage
from .run import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .run import Handler

_DRAWN_AT_ONCE: Final = 1024


def select(
    source: Iterable[Any], predicate: Callable[[Any], Any], handler: Handler | None = None, *, step: Step | None = None
) -> Iterator[Any]:
    """Keep the samples for which `predicate` gives something true; count the others as ``select``."""
    step = step or Step(name="select")
    passage = Passage(step)
    items = iter(source)
    yield from itertools.islice(items, len(step.held_later))  # chosen before
    for sample in items:
        try:
            kept = predicate(sample)
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, "select_failed", sample, handler):
                continue
            break
        if kept:
            passage.passed = True
            yield sample
        else:
            passage.drop("select", sample)
    passage.finish()


def rsample(source: Iterable[Any], p: float = 0.5, *, step: Step | None = None) -> Iterator[Any]:
    """Keep each sample with the probability `p`, in ``[0, 1]``; count the others as ``rsample``.

    What is kept follows from seed, epoch, rank, worker and the number of the sample alone.

    Raises:
        ValueError: `p` is no probability.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"rsample: p={p!r} is not between 0 and 1")
    step = step or Step(name="rsample")
    passage = Passage(step)
    key, bound = step.key, np.uint64(min(int(p * 2.0**64), 2**64 - 1))
    kept: list[bool] = []
    for number, sample in _numbered(source, step):
        at = number % _DRAWN_AT_ONCE
        if number >= 0 and not (kept and at):
            kept = (draws(key, number - at, _DRAWN_AT_ONCE) < bound).tolist()
        if number < 0 or kept[at] or p == 1:
            passage.passed = True
            yield sample
        else:
            passage.drop("rsample", sample)
    passage.finish()


def slice(  # noqa: A001 - webdataset's name
    source: Iterable[Any], *args: int | None, step: Step | None = None
) -> Iterator[Any]:
    """Keep the samples that ``itertools.islice(source, *args)`` gives; count those passed over as ``slice``.

    Nothing is read beyond the last sample that is kept.

    Raises:
        ValueError: The arguments are none that `islice` takes.
    """
    itertools.islice((), *args)  # the same checks, the same errors
    step = step or Step(name="slice")
    cut = builtins.slice(*args)
    start, stop, stride = cut.start or 0, cut.stop, cut.step or 1
    end = None if stop is None else max(0, stop - (stop - 1 - start) % stride) if start < stop else 0
    passage = Passage(step)
    for number, sample in _numbered(source, step, end):
        if number < 0 or (number >= start and not (number - start) % stride):
            passage.passed = True
            yield sample
        else:
            passage.drop("slice", sample)
    passage.finish()


def _numbered(source: Iterable[Any], step: Step, end: int | None = None) -> Iterator[tuple[int, Any]]:
    """Give the samples of a pass below number `end` with their numbers, also where the run goes on from a state.

    Those that have been through the stage already have the number -1.
    """
    number = int((step.restored or {}).get("seen", 0))
    passing = len(step.held_later)

    def snapshot() -> dict[str, Any]:
        return {"seen": number}

    step.remember(snapshot)
    items = iter(source)
    for sample in itertools.islice(items, passing):
        yield -1, sample
    left = None if end is None else max(0, end - number)
    for sample in itertools.islice(items, left):
        number += 1
        yield number - 1, sample


def map(  # noqa: A001 - webdataset's name
    source: Iterable[Any], f: Callable[[Any], Any], handler: Handler | None = None, *, step: Step | None = None
) -> Iterator[Any]:
    """Pass each sample through `f`.

    A sample for which `f` gives None is left out and counted as ``map_none``. Where sample and result are dicts, the
    result has the sample's ``__key__``, whatever `f` put there.
    """
    passage = Passage(step or Step(name="map"))
    for sample in source:
        try:
            result = f(sample)
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, "map_failed", sample, handler):
                continue
            break
        if result is None:
            passage.drop("map_none", sample)
            continue
        if isinstance(result, dict) and isinstance(sample, dict) and "__key__" in sample:
            result["__key__"] = sample["__key__"]
        passage.passed = True
        yield result
    passage.finish()


def map_tuple(
    source: Iterable[Any],
    *f: Callable[[Any], Any] | None,
    handler: Handler | None = None,
    step: Step | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Pass the values of each tuple through a function each: the first through the first, and so on.

    None leaves a value as it is. Where there are fewer functions than values or more, the rest is left alone.

    Raises:
        TypeError: Something given is no function.
    """
    for function in f:
        if function is not None and not callable(function):
            raise TypeError(f"map_tuple: no function: {function!r}")
    passage = Passage(step or Step(name="map_tuple"))
    numbered = [(number, function) for number, function in enumerate(f) if function is not None]
    for sample in source:
        try:
            if not isinstance(sample, (tuple, list)):
                raise TypeError(f"map_tuple takes tuples, not a {type(sample).__name__}")  # noqa: TRY301 - as any error
            values = list(sample)
            count = len(values)
            for number, function in numbered:
                if number < count:
                    values[number] = function(values[number])
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, "map_failed", sample, handler):
                continue
            break
        passage.passed = True
        yield tuple(values)
    passage.finish()


def associate(
    source: Iterable[Any],
    associator: Mapping[str, Mapping[str, Any]] | Callable[[str], Mapping[str, Any]],
    handler: Handler | None = None,
    *,
    step: Step | None = None,
) -> Iterator[Any]:
    """Add to each sample, in place, the fields that belong to its key.

    Args:
        source: Samples, as dicts.
        associator: Fields by key, or a function that gives those of a key. A key that the mapping does not have is
            counted as ``no_association``, and its sample passed on as it is.
        handler: Decides about errors.
        step: The step of a run.
    """
    step = step or Step(name="associate")
    passage = Passage(step)
    given = None if callable(associator) else associator
    for sample in source:
        try:
            key = sample["__key__"]
            if given is None:
                sample.update(associator(key))  # type: ignore[operator]
            elif key in given:
                sample.update(given[key])
            else:
                step.drop("no_association", sample)
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, "associate_failed", sample, handler):
                continue
            break
        passage.passed = True
        yield sample
    passage.finish()


def info(  # noqa: PLR0917 - webdataset's arguments
    source: Iterable[Any],
    fmt: str | None = None,
    n: int = 3,
    every: int = -1,
    width: int = 50,
    stream: TextIO | None = None,
    name: str = "",
    *,
    step: Step | None = None,
) -> Iterator[Any]:
    """Pass all samples on, and print some.

    Args:
        source: Samples.
        fmt: A format string that takes the sample's fields by name; None prints a line for each field.
        n: How many samples to print at the start.
        every: Print every so many samples after that; never, if not above 0.
        width: At most so many characters of a value.
        stream: Where to print; None for standard error.
        name: Printed before each sample.
        step: The step of a run.
    """
    for number, sample in _numbered(source, step or Step(name="info")):
        if number >= 0 and (number < n or (every > 0 and not (number + 1) % every)):
            print(_described(sample, fmt, width, name), file=sys.stderr if stream is None else stream)
        yield sample


def _described(sample: Any, fmt: str | None, width: int, name: str) -> str:
    if not isinstance(sample, dict):
        return f"--- {name}\n{sample!r:.{width}}" if fmt is None else fmt.format(sample)
    shown = dict(sample)
    if isinstance(shown.get("__url__"), str):
        shown["__url__"] = without_secrets(shown["__url__"])
    if fmt is not None:
        return fmt.format(**shown)
    return "\n".join([f"--- {name}", *(f"{field} {repr(value)[:width]}" for field, value in shown.items())])


def log_keys(
    source: Iterable[Any], logfile: str | os.PathLike[str] | None = None, *, step: Step | None = None
) -> Iterator[Any]:
    """Pass all samples on, and append a line for each to a file, which many processes may share.

    A line has the number of the sample in this pass, the worker, the rank and the key, with tabs between.

    Args:
        source: Samples.
        logfile: The file; None or empty for no log.
        step: The step of a run.

    Raises:
        OSError: The file cannot be written.
    """
    step = step or Step(name="log_keys")
    share = step.run.share
    for number, sample in _numbered(source, step):
        if logfile and number >= 0:
            key = sample.get("__key__") if isinstance(sample, dict) else None
            line = f"{number}\t{share.worker}\t{share.rank}\t{key}\n".encode("utf-8", "surrogateescape")
            _append(logfile, line)
        yield sample


def _append(path: str | os.PathLike[str], line: bytes) -> None:
    lock = lock_file(path)
    if lock is None:  # never, as it waits
        return
    with lock:
        os.lseek(lock.handle, 0, os.SEEK_END)
        while line:
            line = line[os.write(lock.handle, line) :]
