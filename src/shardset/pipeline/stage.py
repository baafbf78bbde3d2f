"""A stage of a pipeline: a generator function with its arguments, waiting for the samples to work on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardset.errors import without_secrets

from .run import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Stage:
    """A step of a pipeline: ``function(source, *args, step=step, **kwargs)`` gives an iterator.

    Called with an iterable it works by itself, outside of any pipeline. It pickles where its function and arguments do.
    """

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.function.__name__

    def start(self, source: Iterable[Any], step: Step) -> Iterator[Any]:
        """Begin a pass over `source`."""
        return self.function(source, *self.args, step=step, **self.kwargs)

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Go through `source` outside of any pipeline."""
        return self.start(source, Step(name=self.name))

    def __repr__(self) -> str:
        given = [*map(_shown, self.args), *(f"{name}={_shown(value)}" for name, value in self.kwargs.items())]
        return f"{self.name}({', '.join(given)})"


def _shown(value: object) -> str:
    """Return a value as it may be shown: urls may hold what lets one in."""
    if isinstance(value, str):
        return repr(without_secrets(value))
    if isinstance(value, list | tuple) and len(value) > 1:
        return f"[{_shown(value[0])}, ... {len(value)} in all]"
    return f"[{_shown(value[0])}]" if isinstance(value, list | tuple) and value else repr(value)
