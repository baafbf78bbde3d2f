"""States of the loader: where it stands in which order of which dataset, in at most 512 bytes of JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import StateError

from .feeds import views_of
from .fingerprint import Fingerprint, check_fingerprint, fingerprint, parse_fingerprint
from .order import Resolved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .feeds import Made, Source

VERSION: Final = 1
_MOST: Final = (1 << 64) - 1
_OWN: Final = frozenset({"loader", "seed", "epoch", "position", "order", "data", "select", "every"})


@dataclass(frozen=True, slots=True)
class LoaderState:
    """A state, read and checked.

    Attributes:
        seed: What the order follows from.
        epoch: In which epoch it stands.
        position: How many positions of it have been given, on all ranks together.
        resolved: For each view, how it is shuffled.
        fingerprints: For each view, that of its dataset, or of as many shards of it as there were.
        feed: What the feed keeps in states.
        is_worker: It is of one of several workers of a DataLoader, and stands where that goes on.
    """

    seed: int
    epoch: int
    position: int
    resolved: tuple[Resolved, ...]
    fingerprints: tuple[Fingerprint, ...]
    feed: dict[str, Any] = field(default_factory=dict)
    is_worker: bool = False

    @property
    def samples(self) -> tuple[int, ...]:
        """For each view, how many samples its dataset had."""
        return tuple(each.samples for each in self.fingerprints)

    @property
    def shards(self) -> tuple[int, ...]:
        """For each view, how many shards its dataset had."""
        return tuple(each.shards for each in self.fingerprints)


def save_state(made: Made, seed: int, epoch: int, position: int, *, is_worker: bool) -> dict[str, Any]:
    """Return a state as plain JSON values. docs/formats.md describes it.

    Raises:
        As `Dataset.catalog`.
    """
    views = made.feed.views
    state: dict[str, Any] = {
        "loader": VERSION,
        "seed": seed,
        "epoch": epoch,
        "position": position,
        "order": [how.as_json() for how in made.resolved],
        "data": [fingerprint(view.dataset, shards).to_json() for view, shards in zip(views, made.shards, strict=True)],
    }
    digests = [view.digest for view in views]
    if any(digests):
        state["select"] = digests
    if is_worker:
        state["every"] = True
    return state | made.feed.state(epoch, position)


def load_state(state: Mapping[str, Any], source: Source, *, appended: bool) -> LoaderState:
    """Read a state, and check that it is of what is loaded.

    Raises:
        StateError: It is malformed, of another version, or of another dataset; says what differs.
    """
    if not hasattr(state, "get") or "loader" not in state:
        raise StateError("this is no state of a Loader", hint="give back what state_dict returned")
    if state["loader"] != VERSION:
        raise StateError(f"the state has version {state['loader']!r}", hint=f"this shardset reads {VERSION}")
    views = views_of(source)
    orders, data = _list(state, "order"), _list(state, "data")
    for name, values in (("orders", orders), ("fingerprints", data)):
        if len(values) != len(views):
            raise StateError(f"the state has {len(values)} {name}, for as many datasets; here are {len(views)}")
    try:
        resolved = tuple(Resolved.from_json(value) for value in orders)
    except (ValueError, TypeError) as error:
        raise StateError(f"the state's order is malformed: {orders!r}") from error
    prints = tuple(parse_fingerprint(value) for value in data)
    for view, stated in zip(views, prints, strict=True):
        check_fingerprint(stated, view.dataset, appended=appended)
    digests = state.get("select", [""] * len(views))
    if not isinstance(digests, list | tuple) or len(digests) != len(views):
        raise StateError(f"the state's select is {digests!r}")
    for view, stated, digest in zip(views, prints, digests, strict=True):
        here = view.digest
        if view.numbers is not None and stated.samples < len(view.dataset):
            here = view.among_first(stated.samples).digest
        if here != digest:
            what = "all samples" if not digest else "other samples"
            raise StateError(
                f"the state is of {what} of {view.dataset.name} than the {len(view)} that are selected here"
                if digest
                else f"the state is of {what} of {view.dataset.name}, and here {len(view)} are selected",
                hint="select the same samples: the same expression, over the same columns",
            )
    return LoaderState(
        _whole(state, "seed", least=None),
        _whole(state, "epoch", most=_MOST >> 32),
        _whole(state, "position", most=_MOST >> 2),
        resolved,
        prints,
        {name: value for name, value in state.items() if name not in _OWN},
        bool(state.get("every")),
    )


def _list(state: Mapping[str, Any], name: str) -> list[Any]:
    value = state.get(name)
    if not isinstance(value, list | tuple):
        raise StateError(f"the state's {name} is {value!r}")
    return list(value)


def _whole(state: Mapping[str, Any], name: str, least: int | None = 0, most: int = _MOST) -> int:
    value = state.get(name)
    if type(value) is not int or not (-_MOST if least is None else least) <= value <= most:
        raise StateError(f"the state's {name} is {value!r}")
    return value
