"""``shardset ls``: the shards of a dataset, or the samples of one shard."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import numpy as np

from shardset.errors import DecodeError, FormatError

from .address import is_one_shard, near_path, open_source
from .program import Command, note
from .tables import Column, at_terminal, print_list, row_limit
from .text import clean, counted, dump_json, human_size, name_fields, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardset.dataset.dataset import Dataset
    from shardset.index.catalog import Group, ShardEntry

_SHARD_COLUMNS: Final = (
    Column("shard", is_flexible=True, is_path=True, show=near_path),
    Column("size", is_right=True, show=human_size),
    Column("samples", is_right=True, show="{:,}".format),
    Column("files", is_right=True, show="{:,}".format),
    Column("fields", is_flexible=True),
    Column("findings", is_flexible=True),
)
_SAMPLE_COLUMNS: Final = (
    Column("#", is_right=True),
    Column("key", is_flexible=True, is_path=True),
    Column("fields", is_flexible=True),
    Column("size", is_right=True, show=human_size),
    Column("pixels", is_right=True),
    Column("caption", is_flexible=True),
)
_LONGEST_CAPTION: Final = 200
_AT_ONCE: Final = 1024
_KNOWN: Final = ("width", "height", "orientation", "caption")


@click.command(
    "ls",
    cls=Command,
    examples=[
        ("shardset ls photos/", "the shards of a folder, at any depth"),
        ("shardset ls photos/photos-00000.tar", "the samples of a shard"),
        ("shardset ls 'train@64.tfrecord' --limit 0", "all of a set of 64 TFRecord shards"),
        ("shardset ls photos.tar --json | jq -r .key", "the keys alone"),
    ],
)
@click.argument("source")
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), metavar="N", help="Rows to list; 0 lists all. At a terminal 100."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, as docs/json.md describes them.")
def command(source: str, *, limit: int | None, as_json: bool) -> None:
    """List the shards of a dataset, or the samples of a shard.

    Pixels are width x height as shown; these and captions are listed where an index holds them (shardset index
    --geometry). Away from a terminal the columns are separated by tabs, and sizes are in bytes.
    """
    dataset = open_source(source)
    is_shard = is_one_shard(dataset, source)
    limit = (limit or None) if as_json else row_limit(limit)
    total = len(dataset) if is_shard else dataset.num_shards
    if is_shard:
        samples = islice(iter_samples(dataset), limit)
        if as_json:
            _print_lines(map(sample_document, samples))
        else:
            print_list(_SAMPLE_COLUMNS, map(_sample_row, samples))
    else:
        shards = islice(iter_shards(dataset), limit)
        if as_json:
            _print_lines(map(shard_document, shards))
        else:
            print_list(_SHARD_COLUMNS, map(_shard_row, shards))
    if limit is not None and limit < total:
        note(f"... and {counted(total - limit, 'sample' if is_shard else 'shard')} more (--limit 0 lists all)")
    elif at_terminal() and not as_json:
        parts = [] if is_shard else [counted(dataset.num_shards, "shard")]
        note(", ".join([*parts, counted(len(dataset), "sample"), human_size(dataset.total_size)]))


def _print_lines(documents: Iterable[dict[str, Any]]) -> None:
    for document in documents:
        click.echo(dump_json(document, is_line=True))


class ListedShard(NamedTuple):
    """A shard with the fields of its samples, and how often each kind of finding was made in it."""

    shard_index: int
    entry: ShardEntry
    fields: list[str]
    findings: Counter[str]


def iter_shards(dataset: Dataset) -> Iterator[ListedShard]:
    """Yield every shard."""
    catalog = dataset.catalog
    findings: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for shard_index, fault in catalog.faults():
        findings[shard_index][fault.code] += 1
    for number, first in enumerate(catalog.shard_starts[:-1]):
        group = catalog.group(number)
        for shard, entry in enumerate(catalog.entries(number)):
            start, stop = group.shard_span(shard)
            layouts = (group.layouts[code] for code in np.unique(group.layout[start:stop]).tolist())
            fields = list(dict.fromkeys(field for layout in layouts for field in layout.fields))
            if entry.has_records and stop > start and not dataset.is_remote:  # the first record stands for all
                fields = list(_feature_names(dataset, catalog.sample_starts[number] + start) or fields)
            yield ListedShard(first + shard, entry, fields, findings[first + shard])


def shard_document(shard: ListedShard) -> dict[str, Any]:
    """Return what ``--json`` prints of a shard."""
    entry = shard.entry
    return {
        "shard_index": shard.shard_index,
        **name_fields("name", entry.name),
        **name_fields("shard", entry.url),
        "size": entry.size,
        "num_samples": entry.num_samples,
        "num_files": entry.num_files,
        "fields": list(map(clean, shard.fields)),
        "findings": dict(sorted(shard.findings.items())),
    }


def _shard_row(shard: ListedShard) -> tuple[Any, ...]:
    entry = shard.entry
    findings = ", ".join(code if count == 1 else f"{code} x{count}" for code, count in sorted(shard.findings.items()))
    fields = " ".join(shard.fields)
    return entry.url, entry.size, entry.num_samples, entry.num_files, fields, findings or None


class ListedSample(NamedTuple):
    """A sample with its members, each as field, name, offset (-1 for a sparse file) and length.

    Of a record there is one member, of the field ``record``; `features` has the names of its features, and is None for
    a sample of a tar, or for what is no Example.
    """

    sample_index: int
    key: str
    members: list[tuple[str, str, int, int]]
    pixels: tuple[int, int] | None
    caption: str | None
    features: tuple[str, ...] | None = None


def iter_samples(dataset: Dataset) -> Iterator[ListedSample]:
    """Yield every sample."""
    catalog = dataset.catalog
    for number, before in enumerate(catalog.sample_starts[:-1]):
        group = catalog.group(number)
        for start in range(0, group.files.num_samples, _AT_ONCE):
            for row, sample in enumerate(_read_chunk(group, start), before + start):
                is_record = group.record_layout >= 0 and group.layout_at[row - before] == group.record_layout
                yield ListedSample(row, *sample, _feature_names(dataset, row) if is_record else None)


def _feature_names(dataset: Dataset, sample_index: int) -> tuple[str, ...] | None:
    try:
        return dataset[sample_index].fields
    except (DecodeError, FormatError):
        return None


def _read_chunk(
    group: Group, start: int
) -> Iterator[tuple[str, list[tuple[str, str, int, int]], tuple[int, int] | None, str | None]]:
    """Read some samples of a group by its columns, since one by one they would take a minute a million."""
    stop = min(start + _AT_ONCE, group.files.num_samples)
    first = group.first[start : stop + 1]
    base, end = int(first[0]), int(first[-1])
    offsets, lengths, at = group.offset[base:end].tolist(), group.length[base:end].tolist(), (first - base).tolist()
    columns = (group.samples.column(label).slice(start, stop - start).to_pylist() for label in _KNOWN)
    for row, (key, code, width, height, orientation, caption) in enumerate(
        zip(group.keys(start, stop), group.layout[start:stop].tolist(), *columns, strict=True)
    ):
        layout = group.layouts[code]
        names = (key if layout.is_record else f"{key}.{suffix}" for suffix in layout.spelled)
        places = slice(at[row], at[row + 1])
        members = list(zip(layout.fields, names, offsets[places], lengths[places], strict=True))
        pixels = None if width is None else (height, width) if orientation > 4 else (width, height)
        yield key, members, pixels, caption


def sample_document(sample: ListedSample) -> dict[str, Any]:
    """Return what ``--json`` prints of a sample."""
    width, height = sample.pixels or (None, None)
    return {
        "sample_index": sample.sample_index,
        **name_fields("key", sample.key),
        "fields": [
            {
                "field": clean(field),
                **name_fields("name", name),
                "offset": offset if offset >= 0 else None,
                "length": length,
            }
            for field, name, offset, length in sample.members
        ],
        "features": None if sample.features is None else list(map(clean, sample.features)),
        "width": width,
        "height": height,
        "caption": sample.caption,
    }


def _sample_row(sample: ListedSample) -> tuple[Any, ...]:
    fields = " ".join(sample.features or (field for field, _, _, _ in sample.members))
    size = sum(length for _, _, _, length in sample.members)
    pixels = sample.pixels and f"{sample.pixels[0]}x{sample.pixels[1]}"
    caption = sample.caption and shorten(one_line(sample.caption), _LONGEST_CAPTION)
    return sample.sample_index, sample.key, fields, size, pixels, caption
