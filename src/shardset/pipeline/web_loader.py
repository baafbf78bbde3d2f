"""torch's DataLoader as the first stage of a pipeline, so that what its workers give can go through more stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardset.errors import MissingExtraError
from shardset.policy import Report

from .pipeline import DataPipeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .epochs import Board
    from .run import Step


class WebLoader(DataPipeline):
    """A DataLoader with the methods of a pipeline; what it is given goes to ``torch.utils.data.DataLoader``.

    Stages behind it work in this process on what all workers give, so `with_epoch` counts that of all together, and
    ``.unbatched().shuffle(1000).batched(64)`` mixes samples of different workers. Before each pass the workers' dataset
    is told its epoch, so that all workers are in the same one, whether they are new or kept.

    A state goes on by going through the epoch again up to where it was taken. torchdata's StatefulDataLoader, on the
    dataset itself, goes on without that.

    Args:
        args: As for a DataLoader: the dataset first. `batch_size` is 1 by default, as there; None leaves samples, or
            batches that the dataset makes, as they are.
        kw: As for a DataLoader.

    Raises:
        MissingExtraError: torch is not installed.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        try:
            from torch.utils.data import DataLoader  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise MissingExtraError(
                "WebLoader is torch's DataLoader, and torch is not installed", extra="torch"
            ) from error
        super().__init__(LoaderStage(DataLoader(*args, **kw)))

    @property
    def loader(self) -> Any:
        """The DataLoader."""
        return self._first().loader

    @property
    def dataset(self) -> Any:
        """The dataset that the workers go through."""
        return self._first().loader.dataset

    def _first(self) -> LoaderStage:
        stage: LoaderStage = self.pipeline[0]
        return stage

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iteration is, with the epoch of the dataset; see `DataPipeline.state_dict`."""
        state = super().state_dict()
        epoch = self._first().epoch if state["begun"] else self._first().next_epoch
        if epoch is not None and 0 <= self.nsamples <= state.get("before", 0) + state.get("delivered", -1):
            epoch += 1  # the epoch is over, and its last pass will not be gone through again
        return {**state, "dataset_epoch": epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state` was saved; see `DataPipeline.load_state_dict`."""
        super().load_state_dict(state)
        epoch = state.get("dataset_epoch")
        if epoch is not None:
            self._first().set_epoch(epoch)


class LoaderStage:
    """A DataLoader as a first stage.

    Attributes:
        loader: The DataLoader.
    """

    name = "loader"

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._begun: int | None = None

    @property
    def _board(self) -> Board | None:
        """The memory in which the dataset counts its epochs, if it is one of ours."""
        return getattr(self.loader.dataset, "_board", None)

    @property
    def epoch(self) -> int | None:
        """The dataset's epoch of the latest pass, or of the first one to come; None where it does not tell."""
        if self._begun is not None or self._board is None:
            return self._begun
        return self._board.peek()

    @property
    def next_epoch(self) -> int | None:
        """The dataset's epoch of the next pass; None where it does not tell."""
        return None if self._board is None else self._board.peek()

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the dataset's next one."""
        self._begun = None
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)

    def start(self, source: object, step: Step) -> Iterator[Any]:  # noqa: ARG002 - the first stage
        """Begin a pass over the loader."""
        board = self._board
        if board is not None:
            self._begun = epoch = board.peek()
            if self.loader.num_workers:
                # Each worker counts for itself, and one that was stopped before it began would fall behind the others.
                self.loader.dataset.set_epoch(epoch)
                board.take(None)
        yield from self.loader

    def report(self) -> Report:
        """Return what the dataset's latest epoch left out, in all workers."""
        told = getattr(self.loader.dataset, "report", None)
        found = told() if callable(told) else told
        return found if isinstance(found, Report) else Report()

    def __repr__(self) -> str:
        return f"LoaderStage({self.loader!r})"
