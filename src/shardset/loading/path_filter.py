"""Filters of paths, as webshart's filtered listings have them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Test = Callable[[str], object]

MODES: Final = ("auto", "contains", "glob", "regex", "exact")


class PathFilter:
    """Tells which paths a filter lets through: those that any include matches, and no exclude.

    A pattern is tried on the whole path and on its last part, and takes letters as they are. Empty patterns do not
    count, and without any, everything gets through.

    Args:
        include: Patterns; None for all paths.
        exclude: Patterns.
        mode: ``contains`` (a part of the path), ``exact``, ``glob`` (``*`` is anything, slashes too; ``?`` one
            character; nothing else is special), ``regex`` (searched, in Python's syntax), or ``auto``: ``re:`` and a
            regex, else a glob if there is ``*`` or ``?`` in it, else a part of the path.

    Raises:
        TypeError: Patterns are not a sequence of texts.
        ValueError: The mode is unknown, or a regex is malformed.
    """

    def __init__(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None, mode: str = "auto"
    ) -> None:
        self._include = _tests("path_include", include, mode)
        self._exclude = _tests("path_exclude", exclude, mode)

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    def __call__(self, path: str) -> bool:
        """Tell whether a path gets through."""
        texts = {path, path.rpartition("/")[2]}
        if self._include and not any(test(text) for test in self._include for text in texts):
            return False
        return not any(test(text) for test in self._exclude for text in texts)


def _tests(name: str, patterns: Sequence[str] | None, mode: str) -> list[Test]:
    if patterns is None:
        return []
    if isinstance(patterns, str | bytes) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{name} is {patterns!r}, not a sequence of texts")
    return [_test(pattern, mode) for pattern in patterns if pattern]


def _test(pattern: str, mode: str) -> Test:
    if mode not in MODES:
        raise ValueError(f"path_filter_mode is {mode!r}, not one of {', '.join(map(repr, MODES))}")
    if mode == "auto":
        if pattern.startswith("re:"):
            return _regex(pattern.removeprefix("re:"))
        mode = "glob" if "*" in pattern or "?" in pattern else "contains"
    if mode == "exact":
        return pattern.__eq__
    if mode == "contains":
        return lambda text: pattern in text
    if mode == "regex":
        return _regex(pattern)
    parts = {"*": ".*", "?": "."}
    whole = "".join(parts.get(character) or re.escape(character) for character in pattern)
    return re.compile(whole, re.DOTALL).fullmatch


def _regex(pattern: str) -> Test:
    try:
        return re.compile(pattern).search
    except re.error as error:
        raise ValueError(f"the path filter {pattern!r} is no regex: {error}") from error
