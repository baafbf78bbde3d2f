"""One pass over a pipeline in one process: whose share it is, what was dropped, and what a state must remember."""

from __future__ import annotations

import difflib
import logging
import sys
import threading
from array import array
from base64 import b64decode, b64encode
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import ShardsetError, StateError, without_secrets
from shardset.formats.faults import ERRORS, WARNINGS
from shardset.loading.order import mix_key
from shardset.loading.ranks import Share
from shardset.policy import Place, Policy, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardset.policy import Action

    from .passage import Passage

    Handler = Callable[[Exception], bool]
    """Decides about an error as webdataset's handlers do: true to go on without the thing at fault, false to end the
    stage here, or raise."""
    Origin = tuple[int, int]
    """The place of a shard in what this process reads, and the byte offset in it of the sample's first header."""

logger = logging.getLogger("shardset.pipeline")

USUAL: Final[Mapping[str, Action]] = {
    "no_end_marker": "warn",
    "short_end_marker": "warn",
    "short_padding": "warn",
    "hidden_member": "skip",
    "link": "skip",
    "directory": "skip",
    "special_file": "skip",
    "no_suffix": "skip",
    "structural_member": "skip",
}
"""What happens where neither a handler nor the policy says: to everything else, what `Policy.on_error` says."""

_COUNTED: Final = """
    compression_memory not_valid
    shard_without_samples repeated_key sample_cut_short unreadable_shard sparse_member stopped_by_handler cut_off
    missing_field none_field ambiguous_field overwritten_field bad_field suffix_not_wanted
    select select_failed map_none map_failed rsample slice no_association associate_failed
    to_tuple_failed rename_failed rename_keys_failed extract_keys_failed
    partial_batch collation_failed not_a_batch
"""
CODES: Final = frozenset({*ERRORS, *WARNINGS, *USUAL, *_COUNTED.split()})
"""Every code that a pipeline counts under, and that a policy may say something of."""

MEANT: Final = frozenset(
    {
        "select",
        "rsample",
        "slice",
        "map_none",
        "partial_batch",
        *(code for code, action in USUAL.items() if action == "skip"),
    }
)
"""Codes of what is left out because somebody asked for it, or because it is no data: no reason for a warning."""


NOWHERE: Final = (-1, -1)
"""The origin of what comes from no shard."""


def pack_origins(origins: Iterable[Origin]) -> str:
    """Return origins as text: quick to make, compare and send, which loaders do at each step."""
    numbers = array("q", chain.from_iterable(origins))
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers).decode("ascii")


def unpack_origins(held: str | Iterable[Sequence[int]]) -> list[Origin]:
    """Return origins from what a stage's state says under ``held``: what `pack_origins` made, or pairs.

    Raises:
        StateError: It is neither.
    """
    try:
        if isinstance(held, str):
            numbers = array("q", b64decode(held, validate=True))
            if sys.byteorder == "big":
                numbers.byteswap()
            return list(zip(numbers[::2], numbers[1::2], strict=True))
        return [(int(ordinal), int(offset)) for ordinal, offset in held]
    except (TypeError, ValueError) as error:
        raise StateError(f"the state is damaged: {error}") from error


def checked_policy(policy: Policy | None) -> Policy:
    """Return the policy of a pipeline, by default the usual one.

    Raises:
        TypeError: It is no policy.
        ValueError: It says something of a code that no stage counts under.
    """
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise TypeError(f"policy={policy!r} is no Policy: give Policy(on_error='skip'), for example")
    for code in policy.codes:
        if code not in CODES:
            near = difflib.get_close_matches(code, CODES, 1)
            raise ValueError(f"no stage counts under the code {code!r}" + (f"; {near[0]!r} is one" if near else ""))
    return policy


@dataclass
class Run:
    """One pass over a pipeline.

    Attributes:
        seed: The pipeline's seed.
        epoch: Number of the epoch, and of the pass in it where an epoch goes over the data several times.
        share: Which process this is.
        policy: What happens on faults.
        report: Counts what was dropped.
        origin: Where the sample that is on its way through the stages came from. A stage that holds samples back
            remembers the origin of each, and sets it again when it passes the sample on.
        last_read: Where the last sample came from that was read in the run's own order.
        delivered: How many samples the pipeline has given.
        passages: What stages that may drop samples know of what passed them.
        snapshots: By place of the stage, what gives its part of a state.
        restored: By place of the stage, its part of the state that the run goes on from.
    """

    seed: int = 0
    epoch: tuple[int, ...] = (0,)
    share: Share = field(default_factory=Share)
    policy: Policy = field(default_factory=Policy)
    report: Report = field(default_factory=Report)
    origin: Origin | None = None
    last_read: Origin | None = None
    delivered: int = 0
    passages: list[Passage] = field(default_factory=list)
    snapshots: dict[int, Callable[[], Any]] = field(default_factory=dict)
    restored: dict[int, Any] = field(default_factory=dict)


_starting = threading.local()


@contextmanager
def starting(run: Run) -> Iterator[None]:
    """Let steps that are made meanwhile in this thread, by functions of the caller's own, be of a run."""
    before, _starting.run = getattr(_starting, "run", None), run
    try:
        yield
    finally:
        _starting.run = before


class Step:
    """What a stage is told, and what it may do, in one run.

    Args:
        run: The run; None for the one that is being started in this thread, or a new one by itself.
        number: The place of the stage in its pipeline.
        name: Its name, for messages.
        defers: The reading stage gives samples to be made, as pairs of a function and its argument, to the stage behind
            it, which makes a sample when it passes it on.
    """

    __slots__ = ("defers", "name", "number", "run")

    def __init__(self, run: Run | None = None, number: int = 0, name: str = "stage", *, defers: bool = False) -> None:
        self.run = run or getattr(_starting, "run", None) or Run()
        self.number = number
        self.name = name
        self.defers = defers

    @property
    def key(self) -> int:
        """64 bits for this stage's draws: of the seed, the epoch, the rank, the worker and the place of the stage."""
        run = self.run
        return mix_key(run.seed, *run.epoch, run.share.rank, run.share.worker, self.number)

    def drop(self, code: str, sample: object = None, message: str = "", count: int = 1) -> None:
        """Count something that is left out, with the place of the sample."""
        self.run.report.add(code, self.place(sample, message), count)

    def settle(
        self,
        error: Exception,
        code: str,
        sample: object = None,
        handler: Handler | None = None,
        place: Place | None = None,
    ) -> bool:
        """Ask what to do about an error: the handler if there is one, else the policy.

        Args:
            error: The error. If it ends up raised, and says nothing of the place, a note says stage and sample.
            code: The kind of fault, for the policy and the report.
            sample: The sample, or None.
            handler: The stage's handler; None leaves it to the policy.
            place: Where it is; by default where the sample came from.

        Returns:
            True to go on without the thing at fault, False to end the stage. Both are counted.

        Raises:
            Exception: `error`, if that is the answer.
        """
        place = place or self.place(sample, _said_by(error))
        if sample is not None and not hasattr(error, "shard"):
            error.add_note(f"in the stage {self.name!r}, at the sample {self.place(sample)}")
        if handler is not None:
            goes_on = bool(handler(error))
            self.run.report.add(code, place)
            if not goes_on:
                self.run.report.add("stopped_by_handler", place)
            return goes_on
        policy = self.run.policy
        action = policy.action(code, policy.on_missing if code == "missing_field" else USUAL.get(code))
        if action == "raise":
            raise error
        self.run.report.add(code, place)
        if action == "warn":
            logger.warning("%s: %s", code, place)
        return True

    def place(self, sample: object = None, message: str = "") -> Place:
        """Return where a sample came from."""
        if not isinstance(sample, dict):
            return Place(message=message)
        shard, key = sample.get("__url__"), sample.get("__key__")
        return Place(
            without_secrets(shard) if isinstance(shard, str) else None,
            key=key if isinstance(key, str) else None,
            message=message,
        )

    def remember(self, snapshot: Callable[[], Any]) -> None:
        """Put what `snapshot` returns (JSON) into states that are saved from here on."""
        self.run.snapshots[self.number] = snapshot

    @property
    def restored(self) -> Any:
        """What this stage's snapshot was in the state that this run goes on from; None at a beginning."""
        return self.run.restored.get(self.number)

    @property
    def held_later(self) -> list[Origin]:
        """Where the samples came from that later stages held when the state was saved that this run goes on from.

        They come again first, those of the last stage in front. They have been through this stage before, so it passes
        them on as it would any, but neither holds them nor counts them.
        """
        restored = self.run.restored
        return [
            (ordinal, offset)
            for number in sorted(restored, reverse=True)
            if number > self.number and isinstance(restored[number], dict)
            for ordinal, offset in unpack_origins(restored[number].get("held", ()))
        ]


class Arrivals:
    """Tells samples apart when a run goes on from a state: those that later stages held come first, then its own.

    Args:
        step: The step of the stage.
    """

    def __init__(self, step: Step) -> None:
        self._passing = len(step.held_later)
        self.awaited = deque(unpack_origins((step.restored or {}).get("held", ())))
        """Where those of its own came from that have not arrived yet: they belong into its next state too."""

    def take(self) -> bool:
        """Take note that a sample has arrived, and tell whether it is for this stage to hold."""
        if self._passing:  # a later stage has it in its state until it arrives there
            self._passing -= 1
            return False
        if self.awaited:
            self.awaited.popleft()
        return True


def _said_by(error: Exception) -> str:
    """Return what an error says, without the place, which stands beside it."""
    if isinstance(error, ShardsetError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
