"""Stages that make batches of samples, and samples of batches.

The arguments are those of webdataset's stages of the same names; a batch comes as soon as it is full.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import CollationError

from .passage import Passage
from .run import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .run import Handler

    Collate = Callable[[list[Any]], Any]

_PLAIN: Final = frozenset((int, float, bool))
_SCALARS: Final = (int, float, np.number, np.bool_)


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Make one batch of samples: a dict of their values by field, a tuple of their values, or their values.

    Numbers, also numpy's, become an array of shape ``(n,)``; arrays and tensors of one shape are stacked, as
    ``(n, *shape)``; everything else becomes a list of length n. Of ``__key__`` and other names that begin with ``__``,
    None stands for what a sample does not have.

    Args:
        samples: At least one; all dicts with the same fields, or all tuples or lists of one length, or other values.
        combine_tensors: Otherwise arrays and tensors become lists.
        combine_scalars: Otherwise numbers become lists.

    Raises:
        CollationError: The samples differ in their fields, or the arrays of a field in their shapes.
    """
    first = samples[0]
    if not isinstance(first, (dict, tuple, list)):
        return _combined(samples, samples, None, combine_tensors, combine_scalars)
    columns = _dict_columns(samples) if isinstance(first, dict) else _tuple_columns(samples)
    batch = {
        field: _combined(values, samples, field, combine_tensors, combine_scalars) for field, values in columns.items()
    }
    return batch if isinstance(first, dict) else tuple(batch.values())


def combine_values(b: Iterable[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Make an array, a tensor or a list of values, as `default_collation_fn` does with the values of a field.

    Raises:
        CollationError: Arrays differ in their shapes, or numbers stand among other things.
    """
    values = list(b)
    if not values:
        return values
    first = values[0]
    if isinstance(first, _SCALARS):
        return _array(values) if combine_scalars else values
    if not combine_tensors:
        return values
    if isinstance(first, np.ndarray):
        _check_shapes(values, np.ndarray)
        return np.stack(values)
    torch = sys.modules.get("torch")  # where it was never imported there are no tensors
    if torch is not None and isinstance(first, torch.Tensor):
        _check_shapes(values, torch.Tensor)
        return torch.stack(values)
    return values


def _combined(
    values: Iterable[Any], samples: Sequence[Any], field: Any, combine_tensors: bool, combine_scalars: bool
) -> Any:
    try:
        return combine_values(values, combine_tensors, combine_scalars)
    except CollationError as error:
        raise _misfit(error.message, samples, error.position, field, error.hint) from None


def _array(values: list[Any]) -> np.ndarray[Any, Any]:
    if not _PLAIN.issuperset(map(type, values)):
        for position, value in enumerate(values):
            if not isinstance(value, _SCALARS) and value is not None:
                kinds = f"{type(values[0]).__name__} and {type(value).__name__}"
                raise CollationError(f"values of different kinds, {kinds}", position=position)
    array = np.array(values)
    if array.dtype.kind == "f" and not any(isinstance(value, (float, np.floating)) for value in values):
        return np.array(values, dtype=object)  # integers that no type of numpy holds together: a float would round them
    return array


def _check_shapes(values: list[Any], kind: type) -> None:
    shape = values[0].shape
    for position, value in enumerate(values):
        is_alike = isinstance(value, kind)
        if not is_alike:
            kinds = f"{type(values[0]).__name__} and {type(value).__name__}"
            raise CollationError(f"values of different kinds, {kinds}", position=position)
        if value.shape != shape:
            shapes = f"{tuple(shape)} and {tuple(value.shape)}"
            hint = "make them equal before they are batched, or batch with collation_fn=None"
            raise CollationError(f"arrays of different shapes, {shapes}", position=position, hint=hint)


def _dict_columns(samples: Sequence[Any]) -> dict[Any, list[Any]]:
    first = samples[0]
    names = list(first)
    for position, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise _misfit(f"a dict and a {type(sample).__name__}", samples, position)
        if sample.keys() == first.keys():
            continue
        fields = [{name for name in one if not str(name).startswith("__")} for one in (first, sample)]
        if fields[0] != fields[1]:
            shown = " and ".join(", ".join(map(repr, sorted(some, key=str))) or "none" for some in fields)
            raise _misfit(f"samples of different fields, {shown}", samples, position)
        names += [name for name in sample if name not in names]
    return {name: [sample.get(name) for sample in samples] for name in names}


def _tuple_columns(samples: Sequence[Any]) -> dict[Any, tuple[Any, ...]]:
    length = len(samples[0])
    for position, sample in enumerate(samples):
        if not isinstance(sample, (tuple, list)):
            raise _misfit(f"a tuple and a {type(sample).__name__}", samples, position)
        if len(sample) != length:
            raise _misfit(f"tuples of different lengths, {length} and {len(sample)}", samples, position)
    return dict(enumerate(zip(*samples, strict=True)))


def _misfit(
    what: str, samples: Sequence[Any], position: int | None, field: Any = None, hint: str | None = None
) -> CollationError:
    sample = samples[position or 0]
    sample = sample if isinstance(sample, dict) else {}
    key, shard = sample.get("__key__"), sample.get("__url__")
    which = f"sample {position} of the batch" + ("" if key is None else f", {key!r},") + " does not fit to its first"
    about = "" if field is None else f"field {field!r}: " if isinstance(field, str) else f"value {field} of the tuple: "
    return CollationError(
        f"{about}{what}: {which}",
        field=field,
        position=position,
        shard=shard if isinstance(shard, str) else None,
        key=key if isinstance(key, str) else None,
        hint=hint,
    )


def batched(
    source: Iterable[Any],
    batchsize: int = 20,
    collation_fn: Collate | None = default_collation_fn,
    partial: bool = True,
    handler: Handler | None = None,
    *,
    step: Step | None = None,
) -> Iterator[Any]:
    """Make batches of `batchsize` samples each, in order.

    Args:
        source: Samples.
        batchsize: How many to a batch.
        collation_fn: Makes a batch of a list of samples; None leaves it a list. What it raises is an error of the code
            ``collation_failed``, which costs the samples of that batch.
        partial: Give the last batch also where it is smaller; otherwise its samples are counted as ``partial_batch``.
        handler: Decides about errors.
        step: The step of a run.

    Raises:
        ValueError: `batchsize` is below 1.
    """
    if batchsize < 1:
        raise ValueError(f"batched: batchsize={batchsize!r} is below 1")
    step = step or Step(name="batched")
    passage = Passage(step)
    for samples, is_rest in _groups(source, batchsize, step):
        if is_rest and not partial:
            passage.drop("partial_batch", samples[0], f"{len(samples)} samples at the end", len(samples))
            break
        try:
            batch = samples if collation_fn is None else collation_fn(samples)
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, "collation_failed", _culprit(error, samples), handler, len(samples)):
                continue
            break
        passage.passed = True
        yield batch
    passage.finish()


def listed(
    source: Iterable[Any], batchsize: int, partial: bool = True, *, step: Step | None = None
) -> Iterator[list[Any]]:
    """Make lists of `batchsize` samples each, in order.

    Args:
        source: Samples.
        batchsize: How many to a list.
        partial: Give the last list also where it is shorter; otherwise its samples are counted as ``partial_batch``.
        step: The step of a run.

    Raises:
        ValueError: `batchsize` is below 1.
    """
    return batched(source, batchsize, None, partial, step=step or Step(name="listed"))


def _groups(source: Iterable[Any], size: int, step: Step) -> Iterator[tuple[list[Any], bool]]:
    """Give lists of `size` samples, and whether it is the rest of fewer in the end."""
    run = step.run
    samples: list[Any] = []
    origins: list[Any] = []

    def snapshot() -> dict[str, Any]:
        return {"held": [list(origin or ()) for origin in origins]}

    step.remember(snapshot)
    for sample in source:
        samples.append(sample)
        origins.append(run.origin)
        if len(samples) == size:
            full, samples, origins = samples, [], []
            yield full, False
    if samples:
        full, samples, origins = samples, [], []
        yield full, True


def _culprit(error: Exception, samples: list[Any]) -> Any:
    position = error.position if isinstance(error, CollationError) else None
    return samples[position or 0]


def unbatched(
    source: Iterable[Any], handler: Handler | None = None, *, step: Step | None = None
) -> Iterator[dict[Any, Any] | tuple[Any, ...]]:
    """Make samples of batches: dicts of dicts whose values all have one length, tuples of tuples and lists of such.

    A batch that is neither, or whose values differ in length, is an error of the code ``not_a_batch``.
    """
    return _members(source, _samples_of, step or Step(name="unbatched"), handler)


def unlisted(source: Iterable[Any], handler: Handler | None = None, *, step: Step | None = None) -> Iterator[Any]:
    """Make samples of lists of samples. What is no list or tuple is an error of the code ``not_a_batch``."""
    return _members(source, _items_of, step or Step(name="unlisted"), handler)


def _members(
    source: Iterable[Any], split: Callable[[Any], Iterable[Any]], step: Step, handler: Handler | None
) -> Iterator[Any]:
    passage = Passage(step)
    for batch in source:
        try:
            samples = split(batch)
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, "not_a_batch", batch, handler):
                continue
            break
        for sample in samples:
            passage.passed = True
            yield sample
    passage.finish()


def _samples_of(batch: Any) -> Iterator[Any]:
    values = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"a batch is a tuple, a list or a dict, not a {type(batch).__name__}")
    if not values:
        raise ValueError("a batch with no values in it, so that nobody knows how many samples it has")
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1:
        names = batch if isinstance(batch, dict) else range(len(values))
        shown = ", ".join(f"{name!r}: {length}" for name, length in zip(names, lengths, strict=True))
        raise CollationError(f"the values of a batch have different lengths, {shown}")
    rows = zip(*values, strict=True)
    return (dict(zip(batch, row, strict=True)) for row in rows) if isinstance(batch, dict) else rows


def _items_of(batch: Any) -> Sequence[Any]:
    if not isinstance(batch, (list, tuple)):
        raise TypeError(f"unlisted takes lists, not a {type(batch).__name__}")
    return batch
