"""Pipelines as people and states see them: a line for each stage, without what differs from process to process."""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import without_secrets

from .sources import list_shards, urls_of
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST: Final = 40
_QUIET: Final = frozenset({"handler", "rng", "step"})


def describe(stage: Any) -> str:
    """Return a stage in a few words: ``shuffle(1000, 100)``."""
    urls = urls_of(stage)
    if urls:
        name = "shards" if isinstance(stage, Stage) and stage.function is list_shards else type(stage).__name__
        more = f" and {len(urls) - 1} more" if len(urls) > 1 else ""
        return f"{name}({without_secrets(urls[0])!r}{more})"
    if isinstance(stage, Stage):
        usual = _usual(stage.function)
        given = [text for value in stage.args if value is not None and (text := _text(value))]
        named = [
            (name, _text(value)) for name, value in stage.kwargs.items() if value is not None and name not in _QUIET
        ]
        given += [f"{name}={text}" for name, text in named if text and text != usual.get(name)]
        return f"{stage.name}({', '.join(given)})"
    own = getattr(stage, "__qualname__", None)
    return own if isinstance(own, str) else type(stage).__name__


def describe_all(stages: Iterable[Any]) -> list[str]:
    """Return all stages so, the shards with a digest of their urls, to tell two pipelines apart."""
    found = []
    for stage in stages:
        text, urls = describe(stage), urls_of(stage)
        if urls:
            shown = "\n".join(map(without_secrets, urls)).encode("utf-8", "surrogateescape")
            text = f"{len(urls)} shards {hashlib.sha256(shown).hexdigest()[:16]}"
        found.append(text)
    return found


@lru_cache
def _usual(function: Any) -> dict[str, str]:
    """Return the defaults of a stage's arguments as text."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: _text(parameter.default) for parameter in parameters}


def _text(value: Any) -> str:
    """Return a plain value as text, a function by its name; nothing for what could not be told apart by its text."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]!r}..."
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(one) or '...'}" for name, one in value.items())
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else ""
