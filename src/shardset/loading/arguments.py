"""Looking at what a loader was given, at once where that is possible, and else before its first batch."""

from __future__ import annotations

import operator
import os
import pickle
import sys
from typing import TYPE_CHECKING, Any, Final

from shardset.dataset.columns import known_fields, suggest
from shardset.dataset.views import Bucketed
from shardset.decoding.options import Decode
from shardset.errors import NoSamplesError
from shardset.policy import Policy

from .feeds import views_of
from .fields import parse_fields
from .options import Options
from .order import resolve
from .read_ahead import ReadAhead
from .steps import TAILS, Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from .feed import Feed
    from .feeds import Source

MEANT: Final = {
    "shuffle": "Loader(shuffle=True)",
    "decode": "Loader(decode=True)",
    "batched": "Loader(batch_size=...)",
    "batch": "Loader(batch_size=...)",
    "to_tuple": "Loader(fields=[...])",
    "rename": 'Loader(fields={"image": "jpg"})',
    "with_epoch": "loader.num_steps(epoch), or mix(..., epoch_size=...)",
    "with_length": "len(loader)",
    "unbatched": "Loader(batch_size=1)",
    "map_dict": "loader.map(function)",
    "map_tuple": "loader.map(function)",
    "num_workers": "ReadAhead(threads=...), or loader.map(function, processes=...)",
    "sampler": "the order of the loader itself",
    "drop_last": "Loader(tail=...)",
    "collate_fn": "loader.collate(function)",
    "pin_memory": "loader.torch(pin=True)",
}
"""What webdataset's and torch's words are called here."""


def check_arguments(source: Source, **given: Any) -> Options:
    """Return what a loader was asked to do.

    Args:
        source: What is to be loaded.
        **given: The arguments of `Loader`, by name.

    Raises:
        ValueError: A number is out of range, a word unknown, or two of them do not fit each other.
        TypeError: Something is given in place of something else.
    """
    if isinstance(source, str | os.PathLike):
        raise TypeError(f"a loader loads datasets: did you mean discover_dataset({os.fspath(source)!r})?")
    views_of(source)
    batch_size = _number("batch_size", given["batch_size"])
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, not positive")
    tail, rank, world_size = given["tail"], given["rank"], given["world_size"]
    if tail not in TAILS:
        raise ValueError(f"tail={tail!r}: it is one of {', '.join(map(repr, TAILS))}")
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size are given together, or neither")
    if rank is not None and not 0 <= _number("rank", rank) < _number("world_size", world_size):
        raise ValueError(f"rank {rank} of a world of {world_size}")
    resolve(given["shuffle"], 1, 1)
    decode, policy, read_ahead = given["decode"], given["policy"], given["read_ahead"]
    if decode not in {None, True, False} if isinstance(decode, bool | None) else not isinstance(decode, Decode):
        meant = f"Decode(fields={decode!r})" if isinstance(decode, dict) else "a Decode"
        raise TypeError(f"decode={decode!r}: it is None, True, or {meant}")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f'policy={policy!r}: it is a Policy, such as Policy(on_error="skip", on_missing="skip")')
    if read_ahead is not None and not isinstance(read_ahead, ReadAhead):
        raise TypeError(f"read_ahead={read_ahead!r}: it is a ReadAhead, such as ReadAhead(threads=4)")
    options = Options(
        batch_size,
        given["shuffle"],
        rank,
        world_size,
        tail,
        parse_fields(given["fields"]),
        Decode() if decode is True else decode or None,
        policy,
        read_ahead or ReadAhead(),
    )
    if isinstance(source, Bucketed):
        _check_bucketed(source, options)
    return options


def _check_bucketed(source: Bucketed, options: Options) -> None:
    options.decode_of(source)
    if options.decode is not None and options.decode.size is not None:
        raise ValueError("images of buckets have the size of their bucket: leave out Decode(size=...)")
    if options.tail == "exact" and source.buckets.leftovers != "pad":
        raise ValueError(
            'tail="exact" gives every sample, and samples that fill no unit of their bucket are left out: use '
            'Buckets(leftovers="pad"), which repeats some, and says which'
        )


def _number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: it is a whole number") from None


def check_seed(seed: Any) -> int:
    """Return a seed.

    Raises:
        TypeError: It is no whole number.
    """
    return _number("seed", seed)


def check_function(function: Callable[..., Any], processes: int) -> None:
    """Refuse a function of `map` that cannot be called, or not in the processes that it is to be called in.

    Raises:
        TypeError: It is none, or does not pickle.
        ValueError: The number of processes is negative.
    """
    if not callable(function):
        raise TypeError(f"{function!r} is no function")
    if processes < 0:
        raise ValueError(f"processes={processes}: it is 0 or more")
    if not processes:
        return
    hint = "define it in a module, or leave processes at 0, which calls it in threads"
    try:
        pickle.dumps(function)
    except Exception as error:
        raise TypeError(f"{function!r} cannot go to another process ({error}): {hint}") from error
    if getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise TypeError(f"{function!r} is defined in this session, where other processes do not find it: {hint}")


def check_names(options: Options, feed: Feed) -> None:
    """Refuse names of fields that no sample has, which are mistyped most likely.

    What records have, the records alone know: where there are some, nothing can be said.

    Raises:
        ValueError: No sample has such a field, and there is no default for it.
    """
    known: set[str] = set()
    for view in feed.views:
        catalog = view.dataset.catalog
        known |= known_fields(catalog)
        if any(catalog.group(number).record_layout >= 0 for number in range(catalog.num_groups)):
            return
    named = options.fields.names or {}
    defaults = (options.policy or feed.views[0].dataset.policy).defaults
    for name, choices in named.items():
        if not known & set(choices) and name not in defaults and not defaults.keys() & set(choices):
            wanted = " or ".join(map(repr, choices))
            raise ValueError(f"no sample has a field {wanted}{suggest(choices[0], known)}: there are {_listed(known)}")
    known |= set(named)
    for name in options.decode.fields if options.decode else ():
        if name not in known:
            raise ValueError(f"Decode names a field {name!r}, which no sample has{suggest(name, known)}")


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(map(repr, shown[:10])) + (f", and {len(shown) - 10} more" if len(shown) > 10 else "")


def no_step(source: Source, feed: Feed, steps: Steps, epoch: int) -> NoSamplesError:
    """Return the error to raise where an epoch has not a single step."""
    count, samples = feed.count(epoch), sum(map(len, feed.views))
    if not samples:
        return NoSamplesError("there are no samples: the selection, or the dataset, is empty")
    if count:
        ranks = f", {steps.batch_size} of each of {steps.world_size} ranks" if steps.world_size > 1 else ""
        return NoSamplesError(
            f"an epoch has no step: it has {count} positions, and a step takes {steps.size}{ranks}",
            hint='use a smaller batch, or tail="wrap" or "exact"',
        )
    if isinstance(source, Bucketed):
        return NoSamplesError(
            f"no bucket has a unit of {feed.unit} of the {samples} samples",
            hint="use a smaller Buckets(unit=...), or other leftovers; sizes are known of images in tar shards "
            "that were indexed with geometry (loader.buckets, loader.report)",
        )
    return NoSamplesError(f"none of the {samples} samples comes in an epoch", hint="loader.report says why")
