"""Putting a batch together: fields, packs, what a batch says of its samples, and tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shardset.dataset.record_sample import RECORD
from shardset.decoding.batches import stack
from shardset.errors import MissingExtraError, SampleError, ShardsetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardset.dataset.dataset import Dataset
    from shardset.dataset.views import Pack

    from .batches import Maker, Making

    Int64s = NDArray[np.int64]

OWN = ("__key__", "__shard__", "__index__", "__seed__", "__source__")
"""What each sample says of itself, and functions of `map` may leave out."""


def columns_of(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return samples as one batch: the values of each name stacked, or listed.

    Raises:
        ValueError: Some samples have a name that others lack.
    """
    names = [name for name in samples[0] if name not in OWN] if samples else []
    for sample in samples:
        here = [name for name in sample if name not in OWN]
        if set(here) != set(names):
            what = ", ".join(map(repr, sorted(set(here) ^ set(names))))
            raise ValueError(f"sample {sample.get('__key__')!r} differs from others of its batch in {what}")
    return {name: stack([sample[name] for sample in samples]) for name in names}


def describe(maker: Maker, making: Making, epoch: int) -> dict[str, Any]:
    """Return what a batch says of its samples: keys, shards, offsets, numbers, sources, repeats."""
    kept = making.kept
    samples = np.array(making.numbers, np.int64)[kept]
    about: dict[str, Any] = {"__key__": making.keys}
    if making.sources is None:
        shards, offsets = _places(maker.readers[0].dataset, samples)
    else:
        sources = np.array(making.sources, np.int32)[kept]
        shards, offsets = [""] * len(kept), np.zeros(len(kept), np.int64)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            found, offsets[places] = _places(maker.readers[source].dataset, samples[places])
            for place, shard in zip(places.tolist(), found, strict=True):
                shards[place] = shard
    about |= {"__shard__": shards, "__offset__": offsets, "__index__": samples}
    if maker.names is not None and making.sources is not None:
        about["__source__"] = [maker.names[making.sources[place]] for place in kept]
    share = making.share
    padding = share.picks.repeated
    if padding is not None or (len(share.epochs) and share.epochs[-1] > epoch):
        repeated = share.epochs > epoch if padding is None else (share.epochs > epoch) | padding
        if repeated.any():
            about["__repeated__"] = repeated[kept] if share.picks.ends is None else repeated
    return about


def gather_columns(maker: Maker, making: Making) -> dict[str, Any]:
    """Return the columns of the catalog, or of joined tables, that a batch is to have."""
    samples = np.array(making.numbers, np.int64)[making.kept]
    if making.sources is None:
        found: dict[str, Any] = maker.columns[0].at(samples)
    else:
        sources = np.array(making.sources, np.int32)[making.kept]
        parts = [maker.columns[source].at(samples[[at]]) for at, source in enumerate(sources.tolist())]
        found = {name: np.concatenate([part[name] for part in parts]) for name in maker.columns[0].values}
    return {name: values.tolist() if values.dtype.kind == "O" else values for name, values in found.items()}


def _places(dataset: Dataset, samples: Int64s) -> tuple[list[str], Int64s]:
    """Return, for samples of a dataset, the urls of their shards, and where their first payloads begin."""
    catalog = dataset.catalog
    shards, offsets = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
    groups = np.searchsorted(catalog.sample_starts, samples, side="right") - 1
    for number in set(groups.tolist()):
        here = groups == number
        group, rows = catalog.group(number), samples[here] - catalog.sample_starts[number]
        shards[here] = group.shard[rows] + catalog.shard_starts[number]
        offsets[here] = group.offset[group.first[rows]]
    numbers = shards.tolist()
    urls = {number: dataset.shard_entry(number).url for number in set(numbers)}
    return [urls[number] for number in numbers], offsets


def packed(batch: dict[str, Any], ends: Int64s, pack: Pack, lengths: NDArray[Any]) -> dict[str, Any]:
    """Return a batch of packs in place of one of samples.

    Args:
        batch: Values by field, a value a sample.
        ends: int64, the sample behind the last of each pack.
        pack: How samples are packed.
        lengths: The length of each sample, as its column has it.

    Returns:
        For a field of arrays of one dimension that are as long as the column says: one array of shape (packs, size),
        the samples of a pack one behind the other, zeros behind the last; and under ``NAME__lengths`` a list with the
        lengths of the samples of each pack (int64). For any other field, a list with a list of values for each pack.

    Raises:
        SampleError: Most arrays of a field are as long as the column says, and one is not.
    """
    spans = list(pairwise([0, *ends.tolist()]))
    made: dict[str, Any] = {}
    for name, values in batch.items():
        if name.startswith("__") and name != RECORD:
            made[name] = [values[start:stop] for start, stop in spans]
            continue
        _check_lengths(name, values, batch, pack, lengths)
        joined = _joined(list(values), spans, pack.size, lengths)
        if joined is None:
            made[name] = [list(values[start:stop]) for start, stop in spans]
        else:
            made[name], made[f"{name}__lengths"] = joined
    return made


def _check_lengths(name: str, values: Any, batch: dict[str, Any], pack: Pack, lengths: NDArray[Any]) -> None:
    """Refuse an array that is not as long as its sample's length, where those of most samples are."""
    found = [len(value) if isinstance(value, np.ndarray) and value.ndim == 1 else -1 for value in values]
    is_right = np.array(found, np.int64) == lengths
    if 2 * int(is_right.sum()) > len(found) and not is_right.all():
        at = int(np.argmin(is_right))
        raise SampleError(
            f"sample {batch['__key__'][at]!r} has {found[at]} elements in {name!r}, and its {pack.length!r} is "
            f"{lengths[at]}",
            shard=batch["__shard__"][at],
            key=batch["__key__"][at],
            hint=f"packs are made by the column {pack.length!r}: mend it, or leave the sample out with select",
        )


def _joined(
    values: list[Any], spans: list[tuple[int, int]], size: int, stated: NDArray[Any]
) -> tuple[NDArray[Any], list[Int64s]] | None:
    """Return the arrays of each pack one behind the other, and their lengths; None if they are not what is packed."""
    if not all(isinstance(value, np.ndarray) and value.ndim == 1 for value in values):
        return None
    kinds = {value.dtype for value in values} or {np.dtype(np.int64)}
    if len(kinds) > 1 or any(len(value) != length for value, length in zip(values, stated.tolist(), strict=True)):
        return None
    lengths = [np.array([len(value) for value in values[start:stop]], np.int64) for start, stop in spans]
    joined = np.zeros((len(spans), size), kinds.pop())
    for row, (start, stop) in zip(joined, spans, strict=True):
        if start < stop:
            together = np.concatenate(values[start:stop])
            row[: len(together)] = together
    return joined, lengths


def as_tensors(batch: dict[str, Any], *, pin: bool) -> dict[str, Any]:
    """Return a batch with tensors in place of arrays, in lists, tuples and dicts too, over the same memory.

    Copied is what torch cannot share: arrays that may not be written to, of the other byte order, or that run
    backwards. Arrays of types that torch has not, such as texts, stay arrays.

    Args:
        batch: Values by field.
        pin: Give tensors in pinned memory; they are copies.

    Raises:
        MissingExtraError: torch is not installed.
        ShardsetError: Memory is to be pinned, and torch finds nothing to pin it for.
    """
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("tensors need torch", extra="torch") from error

    def convert(value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return _tensor(value, torch.from_numpy, pin=pin)
        if kind in {list, tuple} and value and isinstance(value[0], np.ndarray | list | tuple | dict):
            return kind(map(convert, value))
        if kind is dict:
            return {name: convert(each) for name, each in value.items()}
        return value

    return {name: convert(value) for name, value in batch.items()}


def _tensor(array: NDArray[Any], from_numpy: Callable[[NDArray[Any]], Any], *, pin: bool) -> Any:
    if not (array.flags.writeable and array.dtype.isnative and all(stride >= 0 for stride in array.strides)):
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    try:
        tensor = from_numpy(array)
    except TypeError:  # texts, times, records, wide floats
        return array
    if not pin:
        return tensor
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        raise ShardsetError(
            f"memory cannot be pinned: {error}",
            hint="pin where there is a GPU only: .torch(pin=torch.cuda.is_available())",
        ) from error
