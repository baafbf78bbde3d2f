"""What happens on a fault (`Policy`), and what did happen (`Report`). Every layer uses these two and no others."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from .errors import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .errors import ShardsetError

logger = logging.getLogger(__name__)

Action = Literal["raise", "warn", "skip"]
_PLACES_KEPT: Final = 8


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about faults. The default raises on everything that would lose or garble data.

    Attributes:
        on_error: For damaged bytes and unreadable samples. ``"raise"`` stops; ``"warn"`` and ``"skip"`` go on without
            the thing at fault, count it in the `Report`, and log a warning or not.
        on_missing: The same for a field that was asked for and is not there; a value in `defaults` comes first.
        defaults: Values to give for missing fields, by field name.
        codes: Actions for single kinds of fault, by their code (``{"repeated_key": "raise"}``); they win over the
            general ones.

    Raises:
        ValueError: An action is none of ``"raise"``, ``"warn"``, ``"skip"``.
    """

    on_error: Action = "raise"
    on_missing: Action = "raise"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    codes: Mapping[str, Action] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {"on_error": self.on_error, "on_missing": self.on_missing, **self.codes}
        for name, action in named.items():
            if action not in get_args(Action):
                raise ValueError(f"{name}={action!r}: an action is one of {', '.join(get_args(Action))}")

    def action(self, code: str, otherwise: Action | None = None) -> Action:
        """Return the action for a kind of fault: its own in `codes`, else `otherwise`, else `on_error`."""
        return self.codes.get(code, otherwise or self.on_error)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault was met. What is not known is None."""

    shard: str | None = None
    offset: int | None = None
    key: str | None = None
    message: str = ""

    def __str__(self) -> str:
        parts = [without_secrets(self.shard or "")]
        if self.key is not None:
            parts.append(f"#{self.key}")
        if self.offset is not None:
            parts.append(f" at byte {self.offset}")
        where = "".join(parts)
        return f"{where}: {self.message}" if self.message and where else where or self.message


class Report:
    """Counts what was skipped, guessed or retried, by code, with the first few places of each.

    Safe to share between threads; pickles, so that a worker process can hand its own to `merge`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._places: dict[str, list[Place]] = {}

    def add(self, code: str, place: Place | None = None, count: int = 1) -> None:
        """Count `count` faults of the kind `code`, and remember `place` if few are known yet."""
        with self._lock:
            self._counts[code] += count
            places = self._places.setdefault(code, [])
            if place is not None and len(places) < _PLACES_KEPT:
                places.append(place)

    def merge(self, other: Report) -> None:
        """Add the counts and places of another report to this one."""
        for code, count in other.counts.items():
            self.add(code, count=count)
            with self._lock:
                kept = self._places[code]
                kept.extend(other.places(code)[: _PLACES_KEPT - len(kept)])

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind, by code, sorted."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def places(self, code: str) -> list[Place]:
        """Return the first few places where faults of this kind were met."""
        with self._lock:
            return list(self._places.get(code, ()))

    def __iter__(self) -> Iterator[tuple[str, int, list[Place]]]:
        for code, count in self.counts.items():
            yield code, count, self.places(code)

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        lines = []
        for code, count, places in self:
            lines.append(f"{code}: {count}")
            lines.extend(f"    {place}" for place in places)
            if places and count > len(places):
                lines.append(f"    ... {count} in all")
        return "\n".join(lines) or "nothing skipped"

    def summary(self) -> str:
        """Return the counts in one line."""
        return ", ".join(f"{code}: {count}" for code, count in self.counts.items()) or "nothing skipped"

    def __repr__(self) -> str:
        return f"<Report: {self.summary()}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": Counter(self.counts), "places": {code: self.places(code) for code in self.counts}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._counts = state["counts"]
        self._places = state["places"]


def settle(error: ShardsetError, code: str, place: Place, policy: Policy, report: Report) -> None:
    """Apply the policy to an error: raise it, or count it (and log it for ``"warn"``) and return.

    Raises:
        ShardsetError: `error` itself, when the policy says so.
    """
    action = policy.action(code)
    if action == "raise":
        raise error
    report.add(code, place)
    if action == "warn":
        logger.warning("skipped: %s", error)
