"""What ``shardset show`` prints of TFRecord shards: a record, a shard, and the schema of a dataset."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from .address import near_path
from .counts import spread_of
from .faults import faults_document, print_faults
from .features import feature_document, print_features, show_record
from .program import MisuseError
from .reporting import progress_bar
from .tables import Column, print_facts, print_table
from .text import clean, counted, human_size, name_fields, one_line, shorten

if TYPE_CHECKING:
    from shardset.dataset.dataset import Dataset
    from shardset.dataset.record_sample import RecordSample
    from shardset.formats.example_schema import FeatureSchema

    from .program import Settings

_FORMS: Final = {"example": "Example", "sequence_example": "SequenceExample", None: "no Example"}
_FEATURES_LOOKED_AT: Final = 100


def record_document(sample: RecordSample, dataset: Dataset) -> dict[str, Any]:
    """Return what ``--json`` prints of a record."""
    shown, place = show_record(sample), sample.record_range
    is_plain = not dataset.shard_entry(sample.shard_index).compression
    return {
        **name_fields("shard", sample.shard),
        "shard_index": sample.shard_index,
        "sample_index": sample.sample_index,
        "key": sample.key,
        "form": shown.form,
        "offset": place.offset,
        "length": place.length,
        "range": f"{place.offset}-{place.end - 1}" if is_plain and place.length else None,
        "features": list(map(feature_document, shown.features)),
        "content": shown.look and shown.look.kind,
        "text": None if shown.look is None or shown.look.text is None else clean(shown.look.text),
        "problem": shown.problem and clean(shown.problem),
    }


def print_record(sample: RecordSample, dataset: Dataset) -> None:
    """Print a record: where it stands, and its features."""
    shown, place = show_record(sample), sample.record_range
    is_plain = not dataset.shard_entry(sample.shard_index).compression
    look, before = shown.look, "" if is_plain else " before compression"
    form = "damaged" if shown.is_damaged else _FORMS[shown.form]
    print_facts(
        [
            ("record", sample.key),
            ("shard", near_path(sample.shard)),
            ("sample", f"{sample.sample_index} of {len(dataset)}"),
            ("payload", f"{form}, {counted(place.length, 'byte')} from byte {place.offset:,}{before}"),
            ("range", f"{place.offset}-{place.end - 1}" if is_plain and place.length else None),
            ("problem", shown.problem),
            ("content", look and (shorten(one_line(look.text), 200) if look.text else look.kind)),
        ]
    )
    if shown.features:
        click.echo()
        print_features(shown.features)


def record_shard_document(dataset: Dataset) -> dict[str, Any]:
    """Return what ``--json`` prints of a TFRecord shard."""
    entry = dataset.shard_entry(0)
    lengths = _lengths(dataset)
    least, middle, greatest = spread_of(lengths) or (None, None, None)
    first = show_record(_first(dataset)) if len(dataset) else None
    return {
        **name_fields("shard", entry.url),
        "size": entry.size,
        "num_samples": entry.num_samples,
        "num_files": entry.num_files,
        "compression": entry.compression,
        "content_size": entry.content_size,
        "lengths": {"total": int(lengths.sum()), "min": least, "median": middle, "max": greatest},
        "digest": entry.digest,
        "first_record": None
        if first is None
        else {"form": first.form, "features": list(map(feature_document, first.features))},
        "findings": faults_document(dataset),
    }


def print_record_shard(dataset: Dataset) -> None:
    """Print a TFRecord shard: what it holds, the features of its first record, and every finding."""
    entry, lengths = dataset.shard_entry(0), _lengths(dataset)
    spread = spread_of(lengths)
    kept = f"TFRecord, {entry.compression}" if entry.compression else "TFRecord"
    content = f"; {human_size(entry.content_size or 0)} before compression" if entry.compression else ""
    framing = 16 * len(lengths) / max(1, int(lengths.sum()) + 16 * len(lengths))
    print_facts(
        [
            ("shard", near_path(entry.url)),
            ("size", f"{entry.size:,} bytes{content}"),
            ("holds", counted(entry.num_samples, "record")),
            ("format", kept),
            ("payloads", spread and f"{spread.least:,} to {spread.greatest:,} bytes, median {spread.middle:,}"),
            ("framing", f"{framing:.1%} of the bytes" if len(lengths) else None),
            ("headers", entry.digest),
        ]
    )
    if len(dataset):
        shown = show_record(_first(dataset))
        click.echo(f"\nfirst record: {_FORMS[shown.form]}" + (f" ({one_line(shown.problem)})" if shown.problem else ""))
        print_features(shown.features)
    print_faults(dataset, f"no findings in the headers; payloads: shardset check {quote(near_path(entry.url))}")


def _first(dataset: Dataset) -> RecordSample:
    sample: Any = dataset[0]
    record: RecordSample = sample
    return record


def _lengths(dataset: Dataset) -> Any:
    groups = [dataset.catalog.group(number) for number in range(dataset.catalog.num_groups)]
    return np.concatenate([np.zeros(0, np.int64), *(group.length for group in groups)])


def read_schema(dataset: Dataset, settings: Settings) -> tuple[FeatureSchema, ...]:
    """Read the schema of all records.

    Raises:
        MisuseError: There are tar shards among the shards.
    """
    with progress_bar(settings, "reading", "records") as progress:
        try:
            return dataset.schema(progress=progress)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise MisuseError(str(error), "shardset stats counts the fields of tar shards") from error


def left_out(dataset: Dataset) -> int:
    """Return how many records could not be read into a schema."""
    counts = dataset.report.counts
    return counts.get("bad_payload_checksum", 0) + counts.get("bad_example", 0)


def schema_document(dataset: Dataset, schema: tuple[FeatureSchema, ...]) -> dict[str, Any]:
    """Return what ``--json`` prints of a schema."""
    return {
        **name_fields("source", dataset.name),
        "num_records": len(dataset) - left_out(dataset),
        "left_out": left_out(dataset),
        "features": [
            {
                "feature": clean(feature.name),
                "is_list": feature.is_list,
                "kinds": list(feature.kinds),
                "shape": None if feature.shape is None else list(feature.shape),
                "min_length": feature.min_length,
                "max_length": feature.max_length,
                "records": feature.records,
                "missing": feature.missing,
                "no_kind": feature.no_kind,
                "empty": feature.empty,
                "size": feature.size,
                "content": feature.content,
            }
            for feature in schema
        ],
    }


_SCHEMA_COLUMNS: Final = (
    Column("feature", is_flexible=True),
    Column("kind"),
    Column("shape"),
    Column("records", is_right=True, show="{:,}".format),
    Column("missing", is_right=True, show="{:,}".format),
    Column("no kind", is_right=True, show="{:,}".format),
    Column("empty", is_right=True, show="{:,}".format),
    Column("size", is_right=True, show=human_size),
    Column("content"),
)


def print_schema(dataset: Dataset, schema: tuple[FeatureSchema, ...]) -> None:
    """Print a schema as a table."""
    lost = left_out(dataset)
    print_facts(
        [
            ("source", dataset.name),
            ("records", f"{len(dataset) - lost:,}"),
            (
                "left out",
                f"{lost:,} damaged, or no Example; see: shardset check {quote(dataset.name)}" if lost else None,
            ),
        ]
    )
    click.echo()
    print_table(
        _SCHEMA_COLUMNS,
        [
            (
                feature.name,
                _kinds(feature),
                _shape(feature),
                feature.records,
                feature.missing,
                feature.no_kind,
                feature.empty,
                feature.size,
                feature.content,
            )
            for feature in schema
        ],
    )
    mixed = [feature.name for feature in schema if len(feature.kinds) > 1]
    if mixed:
        click.echo(f"\nof several kinds: {one_line(', '.join(mixed))}")


def _kinds(feature: FeatureSchema) -> str:
    kinds = " or ".join(feature.kinds) or "none"
    return f"list of {kinds}" if feature.is_list else kinds


def _shape(feature: FeatureSchema) -> str | None:
    if feature.shape is not None:
        return "x".join(map(str, feature.shape))
    if feature.min_length is None:
        return None
    return f"{feature.min_length} to {feature.max_length}"
