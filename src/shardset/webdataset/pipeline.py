"""`DataPipeline`, where webdataset has it."""

from __future__ import annotations

from shardset.pipeline.pipeline import DataPipeline

__all__ = ["DataPipeline"]
