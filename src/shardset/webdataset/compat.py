"""Pipelines with the stages as methods, under the names of ``webdataset.compat``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardset.pipeline.fluent import Fluent as FluidInterface
from shardset.pipeline.pipeline import DataPipeline
from shardset.pipeline.shard_lists import non_empty as check_empty
from shardset.pipeline.web_dataset import WebDataset as _WebDataset
from shardset.pipeline.web_loader import WebLoader

from . import utils
from .gopen import gopen_pipe, user_openers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardset.storage.streams import Openers

__all__ = ["FluidInterface", "FluidWrapper", "WebDataset", "WebLoader", "check_empty"]


class WebDataset(_WebDataset):
    """`shardset.WebDataset`, which opens urls of schemes in `gopen_schemes` with the functions that stand there."""

    def _usual_openers(self) -> Openers:
        forbidden: dict[str, Any] = {"pipe": gopen_pipe} if utils.enforce_security else {}  # which it then refuses
        return {**user_openers(), **forbidden}


class FluidWrapper(DataPipeline):
    """Any iterable as a pipeline, so that it has the stages as methods."""

    def __init__(self, initial: Iterable[Any]) -> None:
        super().__init__(initial)
