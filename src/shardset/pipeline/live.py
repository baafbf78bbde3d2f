"""An epoch of a pipeline while it is gone through: its passes, and what a state needs to know of it."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from shardset.loading.order import mix_key
from shardset.policy import Report

from .describing import describe_all
from .resuming import can_go_on
from .run import MEANT, Run

if TYPE_CHECKING:
    from shardset.loading.ranks import Share

    from .epochs import Board
    from .pipeline import DataPipeline

logger = logging.getLogger("shardset.pipeline")


class Live:
    """An epoch that is gone through now.

    Attributes:
        epoch: Its number.
        number: Number of the pass in it.
        before: Items given in the passes before.
        run: The pass.
        report: What was dropped, in all passes.
        can_go_on: A state needs no replay.
        described: The stages, as states name them.
        replayed: Items of the pass to go through again first.
        is_finished: It was gone through to its end.
        is_between: No sample is on its way: nothing failed or was broken off in the middle of one.
    """

    def __init__(
        self,
        pipeline: DataPipeline,
        epoch: int,
        share: Share,
        worker: int | None,
        *,
        state: dict[str, Any] | None = None,
        lane: int | None = None,
    ) -> None:
        self._seed = pipeline.seed if lane is None else mix_key(pipeline.seed, lane)
        self.is_finished = False
        self.is_between = True
        state = state or {}
        self.epoch = epoch
        self.number = int(state.get("pass", 0))
        self.before = int(state.get("before", 0))
        self.report = Report()
        self.can_go_on = can_go_on(pipeline.pipeline)
        self.described = describe_all(pipeline.pipeline)
        self.replayed = 0
        self.chain: Any = None
        self._policy = pipeline.policy  # and not the pipeline, which holds this: it goes when nobody wants it any more
        self._share = share
        self._worker = worker
        self._state = state or None
        self.run = self._make_run()

    def start(self, number: int) -> Run:
        """Begin pass `number`."""
        if number != self.number:
            self.before += self.run.delivered
            self.number = number
            self.replayed = 0
            self.run = self._make_run()
        return self.run

    def _make_run(self) -> Run:
        state, self._state = self._state, None
        run = Run(self._seed, (self.epoch, self.number), self._share, self._policy, self.report)
        if state is not None:
            run.delivered = int(state["delivered"])
            if state["stages"]:
                run.restored = {int(number): part for number, part in state["stages"].items()}
                run.snapshots = {number: partial(_same, part) for number, part in run.restored.items()}
            else:
                self.replayed = run.delivered
        return run

    def finish(self) -> None:
        """Warn about what was dropped in the epoch, if nobody asked for it."""
        self.is_finished = True
        lost = [(code, number, places) for code, number, places in self.report if code not in MEANT]
        if lost:
            listed = "; ".join(
                f"{code}: {number}" + (f" (first: {places[0]})" if places else "") for code, number, places in lost
            )
            logger.warning("epoch %s is not complete or not clean: %s - .report() tells more", self.epoch, listed)

    def leave(self, board: Board) -> None:
        """Close what the pass holds open, and leave the report of a worker for its parent."""
        close = getattr(self.chain, "close", None)
        self.chain = None
        if close is not None:
            close()
        if self._worker is not None:
            board.leave(self._worker, self.report)


def _same(part: Any) -> Any:
    return part
