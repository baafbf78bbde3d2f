"""Which positions a rank takes at which step: arithmetic on (position, batch size, world size), the same on all ranks.

A global step takes the next ``batch_size * world_size`` positions of the epoch, whoever takes which of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .feed import Feed

Tail = Literal["drop", "wrap", "exact"]
TAILS: Final[tuple[str, ...]] = get_args(Tail)


class Step(NamedTuple):
    """One global step.

    Attributes:
        start: Its first position in the epoch.
        stop: The position behind its last one; with ``tail="wrap"`` it may lie behind the end of the epoch, where the
            epochs after it begin.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Steps:
    """How the positions of epochs are cut into steps, and steps into the shares of ranks.

    Attributes:
        batch_size: Positions that a rank takes at a step.
        rank: Which rank takes them.
        world_size: How many ranks there are.
        tail: What becomes of the positions at the end of an epoch that fill no step: ``"drop"`` leaves them out,
            ``"wrap"`` fills the step from the start of the next epoch, ``"exact"`` gives a shorter one, in which some
            ranks may have a position less than others, or none.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "drop"

    @property
    def size(self) -> int:
        """Positions of a global step."""
        return self.batch_size * self.world_size

    def after(self, feed: Feed, epoch: int, position: int) -> Step | None:
        """Return the step that begins at a position of an epoch; None where the epoch ends."""
        stop = position + self.size
        count = feed.count(epoch, stop)
        if count >= stop:
            return Step(position, stop)
        if self.tail == "drop" or count <= position:
            return None
        return Step(position, count if self.tail == "exact" else stop)

    def left(self, feed: Feed, epoch: int, position: int) -> int:
        """Return how many steps there are from a position to the end of its epoch."""
        positions = max(0, feed.count(epoch) - position)
        return positions // self.size if self.tail == "drop" else -(-positions // self.size)

    def share(self, step: Step, lanes: int) -> range:
        """Return the positions of a step that this rank takes; they may lie behind the end of the epoch (`wrap`).

        Args:
            step: The step.
            lanes: As `Feed.lanes`: where ranks and lanes have a divisor in common, a rank takes every so-manieth
                position, so that its positions read runs that few others read; else it takes neighbours.
        """
        size = step.stop - step.start
        if size == self.size and gcd(lanes, self.world_size) > 1:
            first = step.start + (self.rank - step.start) % self.world_size
            return range(first, step.stop, self.world_size)
        start, stop = (step.start + rank * size // self.world_size for rank in (self.rank, self.rank + 1))
        return range(start, stop)


def split_epochs(feed: Feed, epoch: int, positions: range) -> Iterator[tuple[int, range]]:
    """Cut positions that reach behind the end of an epoch: yield (epoch, positions in it) for each that they lie in."""
    while len(positions):
        count = feed.count(epoch, positions[-1] + 1)
        inside = positions[: len(range(positions.start, min(count, positions.stop), positions.step))]
        if inside:
            yield epoch, inside
        rest = positions[len(inside) :]
        positions = range(rest.start - count, rest.stop - count, rest.step)
        epoch += 1
