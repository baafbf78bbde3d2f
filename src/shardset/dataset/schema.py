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
    for done, raw in enumerate(dataset.iter_records(start=start, stop=stop, copy=False)):
        try:
            builder.add(raw)
        except DecodeError as error:
            settle(error, "bad_example", Place(message=error.message), dataset.policy, dataset.report)
        if progress is not None and done % _TOLD_EACH == 0:
            progress(done, total)
    if progress is not None:
        progress(total, total)
    return builder.schema()
