"""The names of ``webdataset.utils``."""

from __future__ import annotations

import fnmatch
import functools
import glob
import hashlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from shardset.errors import NoSamplesError
from shardset.formats.patterns import expand_braces
from shardset.loading.ranks import find_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = [
    "ObsoleteException",
    "PipelineStage",
    "compute_sample_weights",
    "deprecated",
    "enforce_security",
    "fnmatch_with_braces",
    "glob_with_braces",
    "guess_batchsize",
    "identity",
    "is_iterable",
    "lookup_sym",
    "make_seed",
    "obsolete",
    "pytorch_worker_info",
    "pytorch_worker_seed",
    "repeatedly",
    "repeatedly0",
]

enforce_security: bool = os.environ.get("WDS_SECURE", "0") not in {"", "0"}
"""Whether pickles, shell commands and local files through `gopen` are refused, also where a program asks for them."""


class PipelineStage:
    """A stage of the caller's own: a class with a method ``run(source)`` that returns an iterator."""

    def invoke(self, *args: Any, **kw: Any) -> Any:
        """Do nothing but say that it is for classes made from this one.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError


def identity(x: Any) -> Any:
    """Return the argument."""
    return x


def glob_with_braces(pattern: str) -> list[str]:
    """Return the paths that a pattern with ``*``, ``?`` and braces stands for, those of each brace together."""
    return [path for part in expand_braces(pattern) for path in glob.glob(part)]  # noqa: PTH207 - text, as it is given


def fnmatch_with_braces(filename: str, pattern: str) -> bool:
    """Tell whether a name fits one of the patterns that braces stand for."""
    return any(fnmatch.fnmatch(filename, part) for part in expand_braces(pattern))


def make_seed(*args: Any) -> int:
    """Return a number in ``[0, 2**31)`` that depends on the arguments, and is the same in each process."""
    text = "\0".join(map(repr, args)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) & 0x7FFFFFFF


def is_iterable(obj: Any) -> bool:
    """Tell whether an object can be gone through and is neither text nor bytes."""
    return isinstance(obj, Iterable) and not isinstance(obj, (str, bytes))


def lookup_sym(sym: str, modules: Iterable[str]) -> Any:
    """Return what has a name in the first of several modules that has it, or None.

    Args:
        sym: The name.
        modules: Names of modules; with a dot in front, of this package.
    """
    for name in modules:
        found = getattr(importlib.import_module(name, package="shardset.webdataset"), sym, None)
        if found is not None:
            return found
    return None


def guess_batchsize(batch: Sequence[Any]) -> int:
    """Return how many samples a batch has, by its first value."""
    return len(batch[0])


def repeatedly0(loader: Iterable[Any], nepochs: int = sys.maxsize, nbatches: int = sys.maxsize) -> Iterator[Any]:
    """Give the first `nbatches` items of a loader, `nepochs` times."""
    for _ in range(nepochs):
        yield from islice(loader, nbatches)


def repeatedly(
    source: Iterable[Any],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[[Any], int] = guess_batchsize,
) -> Iterator[Any]:
    """Go through a source again and again, until one of the limits is reached.

    Args:
        source: What can be gone through more than once.
        nepochs: How often, at most.
        nbatches: How many items, at most.
        nsamples: Stop after the item with which so many samples have come.
        batchsize: Tells how many samples an item has.

    Raises:
        NoSamplesError: A pass gives nothing, as an iterator does the second time: it would go on so for ever.
    """
    epoch = batches = samples = 0
    while nepochs is None or epoch < nepochs:
        before = batches
        for item in source:
            yield item
            batches += 1
            if nsamples is not None:
                samples += batchsize(item)
            if (nbatches is not None and batches >= nbatches) or (nsamples is not None and samples >= nsamples):
                return
        if batches == before:
            raise NoSamplesError(
                f"pass {epoch} over the source gave nothing",
                hint="give a source that can be gone through more than once, not an iterator" if epoch else None,
            )
        epoch += 1


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Return ``rank, world_size, worker, num_workers``, as `shardset.loading.ranks.find_share` finds them.

    Raises:
        ValueError: A variable such as ``RANK`` is no number, or a rank is not below its count.
    """
    rank, world_size, worker, num_workers = find_share(group)
    return rank, world_size, worker, num_workers


def pytorch_worker_seed(group: Any = None) -> int:
    """Return a number that tells the workers of all ranks apart: ``1000 * rank + worker``."""
    rank, _, worker, _ = pytorch_worker_info(group)
    return 1000 * rank + worker


@overload
def deprecated(arg: Function) -> Function: ...
@overload
def deprecated(arg: str | None = None) -> Callable[[Function], Function]: ...
def deprecated(arg: Any = None) -> Any:
    """Make a function warn when it is called: ``@deprecated`` or ``@deprecated("why")``."""
    if not callable(arg):
        return functools.partial(_with_warning, reason=arg)
    return _with_warning(arg)


def _with_warning(function: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    text = f"{function.__name__} is deprecated" + (f": {reason}" if reason else "")

    @functools.wraps(function)
    def warning(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warning


class ObsoleteException(Exception):  # noqa: N818 - webdataset's name
    """What was called is no longer there."""


def obsolete(func: Any = None, *, reason: str | None = None) -> Any:
    """Make a function raise when it is called, unless the variable ``ALLOW_OBSOLETE`` is 1.

    The function then raises ObsoleteException.
    """
    if func is None:
        return functools.partial(obsolete, reason=reason)

    @functools.wraps(func)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("ALLOW_OBSOLETE", "0") in {"", "0"}:
            why = f": {reason}" if reason else ""
            raise ObsoleteException(f"{func.__name__} is obsolete{why}; the variable ALLOW_OBSOLETE=1 permits it")
        return func(*args, **kwargs)

    return refusing


def compute_sample_weights(n_w_pairs: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Return for pairs of a size and a weight how often to draw from each, the largest being 1."""
    products: NDArray[np.float64] = np.array([size * weight for size, weight in n_w_pairs], np.float64)
    products /= products.max()
    return products
