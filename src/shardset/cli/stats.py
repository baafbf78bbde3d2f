"""``shardset stats``: what a dataset holds, in numbers."""

from __future__ import annotations

from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from .address import has_records_alone, open_source
from .counts import (
    ASPECT_EDGES,
    count_captions,
    count_fields,
    count_geometry,
    count_others,
    count_shards,
)
from .program import Command, note
from .tables import Column, at_terminal, print_facts, print_table
from .text import clean, counted, dump_json, human_size, name_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardset.dataset.dataset import Dataset

    from .counts import Captions, FieldCount, Geometry, Spread

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_BAR: Final = 24


@click.command(
    "stats",
    cls=Command,
    examples=[
        ("shardset stats photos/", "a folder of shards"),
        ("shardset stats 'photos-{000..063}.tar'", "some of them"),
        ("shardset stats train@64.tfrecord", "a set of 64 TFRecord shards"),
        ("shardset stats photos/ --json | jq .num_samples", "one number"),
    ],
)
@click.argument("source")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
def command(source: str, *, as_json: bool) -> None:
    """Count samples, fields, sizes, captions and shapes.

    Captions and shapes are counted where an index holds them (shardset index --geometry). The bars beside a field count
    payloads by size, from the least to the greatest; each stands for sizes that are larger by the same factor.
    """
    dataset = open_source(source)
    if as_json:
        click.echo(dump_json(stats_document(dataset)))
    else:
        _print_stats(dataset)


def stats_document(dataset: Dataset) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    catalog = dataset.catalog
    size, per_shard = count_shards(catalog)
    other_files, other_size = count_others(catalog)
    return {
        **name_fields("source", dataset.name),
        "num_shards": catalog.num_shards,
        "num_damaged": _num_damaged(dataset),
        "num_samples": catalog.num_samples,
        "num_files": catalog.num_files,
        "size": size,
        "samples_per_shard": _spread_document(per_shard),
        "fields": [
            {
                "field": clean(field.name),
                "samples": field.samples,
                "missing": catalog.num_samples - field.samples,
                "size": field.size,
                **_spread_document(field.spread),
                "histogram": {"edges": field.histogram.edges, "counts": field.histogram.counts},
            }
            for field in count_fields(catalog)
        ],
        "other_files": {"count": other_files, "size": other_size},
        "captions": _captions_document(count_captions(catalog)) if catalog.manifest.captions else None,
        "geometry": _geometry_document(count_geometry(catalog)) if catalog.manifest.geometry else None,
        "findings": dict(sorted(Counter(fault.code for _, fault in catalog.faults()).items())),
    }


def _num_damaged(dataset: Dataset) -> int:
    return sum(group.num_damaged for group in dataset.catalog.manifest.groups)


def _spread_document(spread: Spread | None) -> dict[str, int | None]:
    least, middle, greatest = spread or (None, None, None)
    return {"min": least, "median": middle, "max": greatest}


def _captions_document(captions: Captions) -> dict[str, Any]:
    return {"samples": captions.samples, "length": _spread_document(captions.length)}


def _geometry_document(geometry: Geometry | None) -> dict[str, Any]:
    if geometry is None:
        nothing = _spread_document(None)
        return {"samples": 0, "turned": 0, "width": nothing, "height": nothing, "common": [], "aspects": None}
    return {
        "samples": geometry.samples,
        "turned": geometry.turned,
        "width": _spread_document(geometry.width),
        "height": _spread_document(geometry.height),
        "common": [{"width": w, "height": h, "samples": count} for w, h, count in geometry.common],
        "aspects": {"edges": ASPECT_EDGES, "counts": geometry.aspects},
    }


def _print_stats(dataset: Dataset) -> None:
    catalog = dataset.catalog
    size, per_shard = count_shards(catalog)
    other_files, other_size = count_others(catalog)
    manifest = catalog.manifest
    captions = count_captions(catalog) if manifest.captions else None
    geometry = count_geometry(catalog) if manifest.geometry else None
    print_facts(
        [
            ("source", dataset.name),
            ("shards", f"{catalog.num_shards:,}, {human_size(size)}"),
            ("damaged", f"{damaged:,}" if (damaged := _num_damaged(dataset)) else None),
            ("samples", f"{catalog.num_samples:,}"),
            ("per shard", _spread_text(per_shard)),
            ("files", None if has_records_alone(dataset) else f"{catalog.num_files:,}"),
            ("no sample", f"{counted(other_files, 'file')}, {human_size(other_size)}" if other_files else None),
            ("captions", captions and _captions_text(captions)),
            ("pictures", geometry and _pictures_text(geometry)),
            ("width", geometry and _spread_text(geometry.width)),
            ("height", geometry and _spread_text(geometry.height)),
            ("commonest", geometry and ", ".join(f"{w}x{h} ({count:,})" for w, h, count in geometry.common)),
        ]
    )
    _print_fields(count_fields(catalog), catalog.num_samples)
    if geometry is not None:
        _print_aspects(geometry)
    findings = Counter(fault.code for _, fault in catalog.faults())
    if findings:
        click.echo()
        print_table((Column("finding"), Column("count", is_right=True, show="{:,}".format)), sorted(findings.items()))
    if at_terminal() and any(catalog.group(number).record_layout >= 0 for number in range(catalog.num_groups)):
        click.echo()
        note(f"for the features of records: shardset show --schema {quote(dataset.name)}")
    if at_terminal() and not has_records_alone(dataset) and not (manifest.captions and manifest.geometry):
        click.echo()
        note(f"for captions and shapes: shardset index --geometry {quote(dataset.name)}")


def _spread_text(spread: Spread | None) -> str | None:
    if spread is None:
        return None
    least, middle, greatest = (f"{number:,}" for number in spread)
    return least if least == greatest else f"{least} to {greatest}, median {middle}"


def _captions_text(captions: Captions) -> str:
    lengths = f"; {_spread_text(captions.length)} characters" if captions.length else ""
    return f"{counted(captions.samples, 'sample')}{lengths}"


def _pictures_text(geometry: Geometry) -> str:
    turned = f"; {geometry.turned:,} stored turned" if geometry.turned else ""
    return f"{counted(geometry.samples, 'sample')}{turned}"


def _print_fields(fields: Sequence[FieldCount], num_samples: int) -> None:
    columns = (
        Column("field", is_flexible=True),
        Column("samples", is_right=True, show="{:,}".format),
        Column("missing", is_right=True, show="{:,}".format),
        *(Column(name, is_right=True, show=human_size) for name in ("total", "min", "median", "max")),
        Column("sizes"),
    )
    rows = [
        (
            field.name,
            field.samples,
            num_samples - field.samples,
            field.size,
            *field.spread,
            spark(field.histogram.counts),
        )
        for field in fields
    ]
    click.echo()
    print_table(columns, rows)


def spark(counts: Sequence[int]) -> str:
    """Draw counts as a row of blocks; whatever is not zero can be seen."""
    most = max(counts, default=0)
    return "".join(_BLOCKS[-(-count * 8 // most) if most else 0] for count in counts)


def bar(count: int, most: int) -> str:
    """Draw a count as a bar in eighths of a character; whatever is not zero can be seen."""
    eighths = -(-count * _BAR * 8 // most) if most else 0
    return (_EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _print_aspects(geometry: Geometry) -> None:
    edges = [f"{edge:g}" for edge in ASPECT_EDGES]
    labels = [f"below {edges[0]}", *map("{} to {}".format, edges, edges[1:]), f"{edges[-1]} and more"]
    most = max(geometry.aspects)
    rows = [(label, count, bar(count, most)) for label, count in zip(labels, geometry.aspects, strict=True)]
    click.echo()
    print_table(
        (Column("width / height"), Column("samples", is_right=True, show="{:,}".format), Column("")),
        rows,
    )
