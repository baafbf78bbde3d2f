"""Whether anything passes a stage: what is left out is counted, and a stage that lets nothing through says so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .run import Handler, Step

logger = logging.getLogger("shardset.pipeline")

_LONG: Final = 10_000
_EXAMPLES: Final = 3
_PLACES: Final = 8


class Passage:
    """Counts what one stage leaves out in one pass, and warns where nothing gets through.

    The stage sets `passed` for each sample that it passes on, calls `drop` or `settle` for each that it does not, and
    `finish` when its source is exhausted. A warning comes from `finish` if no sample passed, and before that whenever
    10,000 samples in a row did not pass, then 100,000 and so on, so that an endless stream does not spin unseen.

    Attributes:
        passed: Whether a sample passed since the last one that did not.
    """

    __slots__ = ("_add", "_ever", "_limit", "_placed", "_row", "_seen", "passed", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        self.passed = False
        self._add = step.run.report.add
        self._ever = False
        step.run.passages.append(self)
        self._row = 0
        self._limit = _LONG
        self._placed = 0
        self._seen: list[Any] = []

    @property
    def is_blocked(self) -> bool:
        """Whether samples came, and none of them passed."""
        return bool(self._row) and not (self._ever or self.passed)

    def drop(self, code: str, sample: Any, message: str = "", count: int = 1) -> None:
        """Count a sample, or `count` of them, as left out; the first few with their places, which cost more."""
        if self._placed < _PLACES and (message or isinstance(sample, dict)):
            self._placed += 1
            self.step.drop(code, sample, message, count)
        else:
            self._add(code, None, count)
        self._block(code, sample, count)

    def settle(self, error: Exception, code: str, sample: Any, handler: Handler | None, count: int = 1) -> bool:
        """Do as `Step.settle`, for an error that costs a sample, or `count` of them."""
        goes_on = self.step.settle(error, code, sample, handler)
        if count > 1:
            self._add(code, None, count - 1)
        self._block(code, sample, count)
        return goes_on

    def _block(self, code: str, sample: Any, count: int) -> None:
        if self.passed:
            self._ever, self.passed, self._row = True, False, 0
            self._seen.clear()
        if len(self._seen) < _EXAMPLES:
            self._seen.append((code, tuple(sample) if isinstance(sample, dict) else _kind(sample)))
        self._row += count
        if self._row >= self._limit:
            self._warn(f"the last {self._row:,}" if self._ever else f"{self._row:,}")
            self._limit *= 10

    def finish(self) -> None:
        """Warn if there were samples and none passed."""
        if self._row and not (self._ever or self.passed):
            self._warn(f"{self._row:,}")

    def _warn(self, count: str) -> None:
        codes = ", ".join(dict.fromkeys(code for code, _ in self._seen))
        seen = "; ".join(dict.fromkeys(shown if isinstance(shown, str) else _fields(shown) for _, shown in self._seen))
        text = "the stage %r passed on none of %s samples (%s); it saw %s"
        logger.warning(text, self.step.name, count, codes, seen)


def _fields(names: tuple[Any, ...]) -> str:
    shown = [str(name) for name in names if not str(name).startswith("__")]
    return f"the fields {', '.join(shown)}" if shown else "no fields"


def _kind(sample: Any) -> str:
    if isinstance(sample, (tuple, list)):
        return f"a {type(sample).__name__} of {len(sample)}"
    return f"a value of the type {type(sample).__name__}"
