"""The names of ``webdataset.filters``: functions that make stages, and with ``_`` in front what the stages do.

``select(f)`` makes a stage for a pipeline; ``_select(source, f)`` goes through a source with it.
"""

from __future__ import annotations

import functools
import importlib
import pickle
from typing import TYPE_CHECKING, Any

from shardset.loading.ranks import find_share
from shardset.pipeline.batching import batched as _batched
from shardset.pipeline.batching import combine_values, default_collation_fn
from shardset.pipeline.batching import listed as _listed
from shardset.pipeline.batching import unbatched as _unbatched
from shardset.pipeline.batching import unlisted as _unlisted
from shardset.pipeline.caching import Cached, LMDBCached
from shardset.pipeline.decode import XDECODERS as default_decoders  # noqa: N811 - webdataset's name
from shardset.pipeline.decode import decode as _decode  # noqa: F401 - webdataset's name
from shardset.pipeline.decode import decode_stage as decode
from shardset.pipeline.decode import find_decoder
from shardset.pipeline.decode import xdecode as _xdecode
from shardset.pipeline.fields import extract_keys as _extract_keys
from shardset.pipeline.fields import getfirst
from shardset.pipeline.fields import map_dict as _map_dict
from shardset.pipeline.fields import rename as _rename
from shardset.pipeline.fields import rename_keys as _rename_keys
from shardset.pipeline.fields import to_tuple as _to_tuple
from shardset.pipeline.handlers import reraise_exception
from shardset.pipeline.run import Run, Step
from shardset.pipeline.shuffling import shuffle as _shuffle
from shardset.pipeline.stage import Stage
from shardset.pipeline.stages import associate as _associate
from shardset.pipeline.stages import info as _info
from shardset.pipeline.stages import log_keys as _log_keys
from shardset.pipeline.stages import map as _map
from shardset.pipeline.stages import map_tuple as _map_tuple
from shardset.pipeline.stages import rsample as _rsample
from shardset.pipeline.stages import select as _select
from shardset.pipeline.stages import slice as _slice

from . import utils
from .utils import identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "Cached",
    "FilterFunction",
    "LMDBCached",
    "RestCurried",
    "associate",
    "batched",
    "combine_values",
    "compose",
    "compose2",
    "decode",
    "decode_bin",
    "decode_pickle",
    "decode_text",
    "default_collation_fn",
    "default_decoders",
    "detshuffle",
    "dict2tuple",
    "extract_keys",
    "find_decoder",
    "getfirst",
    "identity",
    "info",
    "listed",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "parse_field_spec",
    "pick",
    "pipeline",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "reraise_exception",
    "rsample",
    "select",
    "shuffle",
    "slice",
    "to_tuple",
    "transform_with",
    "tuple2dict",
    "unbatched",
    "unlisted",
    "xdecode",
]

_OURS = "shardset.pipeline."


class FilterFunction:
    """A function of the caller's own as a stage: it is called with the source and the arguments given here.

    Args:
        f: The function.
        args: Arguments behind the source.
        kw: Arguments by name.
    """

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.f = f
        self.args = args
        self.kw = kw

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.f, "__name__", type(self.f).__name__)

    def __call__(self, data: Iterable[Any]) -> Any:
        """Begin a pass over `data`."""
        return self.f(data, *self.args, **self.kw)

    def __repr__(self) -> str:
        given = [repr(value) for value in self.args] + [f"{name}={value!r}" for name, value in self.kw.items()]
        return f"{self.name}({', '.join(given)})"

    def __reduce__(self) -> tuple[Any, ...]:
        module, name = getattr(self.f, "__module__", None), getattr(self.f, "__qualname__", None)
        if module and name and isinstance(_find(module, name), RestCurried):  # decorated: its name is the maker's now
            return _made_again, (module, name, self.args, self.kw)
        return _of_function, (self.f, self.args, self.kw)


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _made_again(module: str, name: str, args: tuple[Any, ...], kw: dict[str, Any]) -> Any:
    return _find(module, name)(*args, **kw)


def _of_function(f: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any]) -> FilterFunction:
    return FilterFunction(f, *args, **kw)


class RestCurried:
    """Makes stages of a function: called with all its arguments but the source, it returns a stage.

    Args:
        f: A function of a source and other arguments that returns an iterator.

    Attributes:
        makes_stages: Always true: it is no stage itself.
    """

    makes_stages = True

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f
        functools.update_wrapper(self, f)

    def __call__(self, *args: Any, **kw: Any) -> Stage | FilterFunction:
        """Return a stage."""
        is_ours = (getattr(self.f, "__module__", None) or "").startswith(_OURS)
        return Stage(self.f, *args, **kw) if is_ours else FilterFunction(self.f, *args, **kw)


def pipelinefilter(f: Callable[..., Any]) -> RestCurried:
    """Make a function of a source and other arguments into one that takes the others and returns a stage."""
    return RestCurried(f)


associate = RestCurried(_associate)
batched = RestCurried(_batched)
extract_keys = RestCurried(_extract_keys)
info = RestCurried(_info)
listed = RestCurried(_listed)
log_keys = RestCurried(_log_keys)
map = RestCurried(_map)  # noqa: A001 - webdataset's name
map_tuple = RestCurried(_map_tuple)
rename_keys = RestCurried(_rename_keys)
rsample = RestCurried(_rsample)
select = RestCurried(_select)
shuffle = RestCurried(_shuffle)
slice = RestCurried(_slice)  # noqa: A001 - webdataset's name
to_tuple = RestCurried(_to_tuple)
unbatched = RestCurried(_unbatched)
unlisted = RestCurried(_unlisted)
xdecode = RestCurried(_xdecode)


def map_dict(handler: Any = None, **functions: Callable[[Any], Any]) -> Stage:
    """Return the stage that passes fields through functions; see `shardset.pipeline.fields.map_dict`."""
    return Stage(_map_dict, functions, handler=handler)


def rename(handler: Any = None, keep: bool = True, **names: str | Sequence[str]) -> Stage:
    """Return the stage that renames fields; see `shardset.pipeline.fields.rename`."""
    return Stage(_rename, names, handler=handler, keep=keep)


class detshuffle:  # noqa: N801 - webdataset's name
    """A stage that shuffles through a buffer, by a seed of its own and the number of the epoch.

    Args:
        bufsize: Samples held at most.
        initial: Samples to wait for at first.
        seed: Decides about the order, with the pipeline's epoch and the process's place among the others.
        epoch: Other numbers give other orders.

    Attributes:
        epoch: The number given, and one more for each pass that was begun in this process.
    """

    name = "detshuffle"

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1) -> None:
        self.bufsize = bufsize
        self.initial = initial
        self.seed = seed
        self.epoch = epoch
        self._first = epoch + 1

    def start(self, source: Iterable[Any], step: Step) -> Iterator[Any]:
        """Begin a pass."""
        self.epoch += 1
        return _shuffle(source, self.bufsize, self.initial, seed=self.seed + self._first, step=step)

    def run(self, src: Iterable[Any]) -> Iterator[Any]:
        """Begin a pass outside of any pipeline: the number of the epoch is then that of the pass."""
        run = Run(epoch=(self.epoch + 1 - self._first,), share=find_share())
        return self.start(src, Step(run, name=self.name))

    __call__ = run

    def __repr__(self) -> str:
        return f"detshuffle({self.bufsize}, {self.initial}, seed={self.seed})"


def compose2(f: Callable[[Any], Any], g: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that applies `f`, then `g`."""
    return functools.partial(_apply, (f, g))


def compose(*args: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that applies all functions in turn."""
    return functools.partial(_apply, args)


def _apply(functions: Iterable[Callable[[Any], Any]], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def pipeline(source: Any, *args: Callable[[Any], Any]) -> Any:
    """Return a source with stages behind it."""
    return _apply(args, source)


def parse_field_spec(fields: str | Iterable[str]) -> list[list[str]]:
    """Return the alternatives for each of several fields: ``"png;jpg cls"`` is ``[["png", "jpg"], ["cls"]]``."""
    return [field.split(";") for field in (fields.split() if isinstance(fields, str) else fields)]


def transform_with(sample: Any, transformers: Sequence[Callable[[Any], Any] | None] | None) -> Any:
    """Return the values of a tuple, each passed through its function; None, and no function, leave a value alone.

    Raises:
        ValueError: There are more functions than values.
    """
    if not transformers:
        return sample
    values = list(sample)
    if len(transformers) > len(values):
        raise ValueError(f"{len(transformers)} functions for {len(values)} values")
    for number, function in enumerate(transformers):
        if function is not None:
            values[number] = function(values[number])
    return values


def tuple2dict(l: Any) -> dict[Any, Any]:  # noqa: E741 - webdataset's name
    """Return the values of a tuple by their place; a dict as it is."""
    return l if isinstance(l, dict) else dict(enumerate(l))


def dict2tuple(d: dict[int, Any]) -> tuple[Any, ...]:
    """Return the values of a dict from place 0 on as a tuple."""
    return tuple(d[place] for place in range(len(d)))


def pick(buf: list[Any], rng: Any) -> Any:
    """Take a random element out of a list, and put the last one where it was.

    Args:
        buf: The list.
        rng: A generator such as ``random.Random``.
    """
    place = rng.randint(0, len(buf) - 1)
    picked, buf[place] = buf[place], buf[-1]
    buf.pop()
    return picked


def decode_bin(stream: Any) -> bytes:
    """Return what is in a stream."""
    data: bytes = stream.read()
    return data


def decode_text(stream: Any) -> str:
    """Return the text of a stream, which is UTF-8."""
    text: str = stream.read().decode("utf-8")
    return text


def decode_pickle(stream: Any) -> Any:
    """Return what was pickled into a stream. It runs any code that the stream names: for trusted data only.

    Raises:
        ValueError: `shardset.webdataset.utils.enforce_security` is set.
    """
    if utils.enforce_security:
        raise ValueError("Unpickling is not allowed: enforce_security is set")
    return pickle.load(stream)  # noqa: S301 - its name says so
