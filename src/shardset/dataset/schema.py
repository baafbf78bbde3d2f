"""The schema of TFRecord shards: every feature of every record, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardset.errors import DecodeError
from shardset.formats.example_schema import SchemaBuilder
from shardset.policy import Place, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardset.formats.example_schema import FeatureSchema

    from .samples import Samples

_TOLD_EACH: Final = 1000


def read_schema(
    dataset: Samples, *, start: int, stop: int | None, progress: Callable[[int, int], None] | None
) -> tuple[FeatureSchema, ...]:
    """Return what `Dataset.schema` does."""
    start, stop, _ = slice(start, stop).indices(len(dataset))
    total = max(0, stop - start)
    builder = SchemaBuilder()
    for number, raw in dataset.iter_numbered_records(start, stop, copy=False, verify=True):
        try:
            builder.add(raw)
        except DecodeError as error:
            sample = dataset[number]
            error.shard, error.key = sample.shard, sample.key
            place = Place(sample.shard, key=sample.key, message=error.message)
            settle(error, "bad_example", place, dataset.policy, dataset.report)
        if progress is not None and (number - start) % _TOLD_EACH == 0:
            progress(number - start, total)
    if progress is not None:
        progress(total, total)
    return builder.schema()
