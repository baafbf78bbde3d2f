"""``shardset show``: one sample with its fields and their places, or one shard with what was found in it."""

from __future__ import annotations

from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import numpy as np
import pyarrow as pa

from shardset.dataset.record_sample import RecordSample
from shardset.errors import without_secrets
from shardset.formats.tar import Kind
from shardset.index.build import scan_reader

from .address import find_sample, is_one_shard, near_path, open_source, split_address
from .counts import count_fields
from .faults import faults_document, print_faults
from .payloads import geometry_document, geometry_text, look_at
from .program import Command, MisuseError, note
from .records import (
    print_record,
    print_record_shard,
    print_schema,
    read_schema,
    record_document,
    record_shard_document,
    schema_document,
)
from .tables import LIMIT, Column, at_terminal, print_facts, print_table, row_limit
from .text import clean, counted, dump_json, human_size, name_fields, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardset.dataset.dataset import Dataset
    from shardset.dataset.sample import Sample
    from shardset.formats.geometry import Geometry
    from shardset.formats.media import Media
    from shardset.storage.store import Reader

    from .program import Settings


@click.command(
    "show",
    cls=Command,
    examples=[
        ("shardset show photos.tar#0007", "the sample with the key 0007"),
        ("shardset show photos.tar", "the shard: counts, format, and every finding"),
        ("shardset show train.tfrecord#40000", "a record of a TFRecord shard, with its features"),
        ("shardset show train.tfrecord --schema", "every feature of its records, with kinds, lengths and gaps"),
    ],
)
@click.argument("address", metavar="SOURCE[#KEY]")
@click.option("--schema", is_flag=True, help="Read all records of TFRecord shards, and list their features.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(settings: Settings, address: str, *, schema: bool, as_json: bool) -> None:
    """Show one sample, or one shard, with offsets and findings.

    KEY is the key of a sample or, if no sample has it, a sample's number; of a TFRecord shard, the number of a record.
    The range of a payload is one that curl -r takes: its first and its last byte in the shard.

    In a schema, missing counts the records without a feature, no kind those that name it and give it no list, and empty
    those whose list has no values.
    """
    source, fragment = split_address(address)
    dataset = open_source(source)
    if schema:
        if fragment:
            raise MisuseError("a schema is one of whole shards", f"shardset show --schema {quote(source)}")
        found = read_schema(dataset, settings)
        shown = Shown(lambda: schema_document(dataset, found), lambda: print_schema(dataset, found))
    elif fragment:
        shown = _show_sample(find_sample(dataset, fragment), dataset)
    elif is_one_shard(dataset, source):
        shown = _show_shard(dataset)
    else:
        raise MisuseError(
            f"{without_secrets(source)} is {counted(dataset.num_shards, 'shard')}; show takes one shard or one sample",
            f"shardset ls {quote(without_secrets(source))}, or of TFRecord shards: show --schema",
        )
    if as_json:
        click.echo(dump_json(shown.document()))
    else:
        shown.print()


class Shown(NamedTuple):
    """Something to show: what makes its JSON, and what prints it for people."""

    document: Callable[[], dict[str, Any]]
    print: Callable[[], None]


def _show_sample(sample: Sample, dataset: Dataset) -> Shown:
    if isinstance(sample, RecordSample):
        return Shown(lambda: record_document(sample, dataset), lambda: print_record(sample, dataset))
    fields = [show_field(sample, place, dataset) for place in range(len(sample.fields))]
    return Shown(lambda: sample_document(sample, fields, dataset), lambda: _print_sample(sample, fields, dataset))


def _show_shard(dataset: Dataset) -> Shown:
    if dataset.shard_entry(0).has_records:
        return Shown(lambda: record_shard_document(dataset), lambda: print_record_shard(dataset))
    return Shown(lambda: shard_document(dataset), lambda: _print_shard(dataset))


class ShownField(NamedTuple):
    """One member of a sample. `offset` and `range` are None for a sparse file."""

    field: str
    name: str
    offset: int | None
    length: int
    kind: str
    geometry: Geometry | Media | None
    text: str | None

    @property
    def range(self) -> str | None:
        """The first and the last byte, as HTTP counts them."""
        if self.offset is None or not self.length:
            return None
        return f"{self.offset}-{self.offset + self.length - 1}"


def show_field(sample: Sample, place: int, dataset: Dataset) -> ShownField:
    """Look at one member of a sample, by its place in the sample."""
    group, row, _ = dataset.catalog.locate(sample.sample_index)
    member = group.first_at[row] + place
    offset, length = group.offset_at[member], group.length_at[member]
    field, name = sample.fields[place], sample.names[place]
    if offset < 0:
        return ShownField(field, name, None, length, "sparse file", None, None)
    kind, geometry, text = look_at(dataset.reader(sample.shard_index), offset, length)
    return ShownField(field, name, offset, length, kind, geometry, text)


def sample_document(sample: Sample, fields: list[ShownField], dataset: Dataset) -> dict[str, Any]:
    """Return what ``--json`` prints of a sample."""
    return {
        **name_fields("shard", sample.shard),
        "shard_index": sample.shard_index,
        "sample_index": sample.sample_index,
        **name_fields("key", sample.key),
        "caption": sample.caption,
        "fields": [
            {
                "field": clean(shown.field),
                **name_fields("name", shown.name),
                "offset": shown.offset,
                "length": shown.length,
                "range": shown.range,
                "kind": shown.kind,
                **geometry_document(shown.geometry),
                "text": None if shown.text is None else clean(shown.text),
            }
            for shown in fields
        ],
        "same_key": _same_key(sample, dataset),
    }


def _same_key(sample: Sample, dataset: Dataset) -> list[int]:
    return [number for number in dataset.catalog.find(sample.key) if number != sample.sample_index]


_FIELD_COLUMNS: Final = (
    Column("field"),
    Column("kind"),
    Column("offset", is_right=True),
    Column("length", is_right=True),
    Column("range", is_right=True),
    Column("content", is_flexible=True),
)


def _print_sample(sample: Sample, fields: list[ShownField], dataset: Dataset) -> None:
    print_facts(
        [
            ("key", sample.key),
            ("shard", near_path(sample.shard)),
            ("sample", f"{sample.sample_index} of {len(dataset)}"),
            ("caption", sample.caption),
            ("same key", ", ".join(f"sample {number}" for number in _same_key(sample, dataset)) or None),
        ]
    )
    click.echo()
    rows = [(shown.field, shown.kind, shown.offset, shown.length, shown.range, _content(shown)) for shown in fields]
    print_table(_FIELD_COLUMNS, rows)


def _content(shown: ShownField) -> str | None:
    if shown.geometry is not None:
        return geometry_text(shown.geometry)
    return shown.text and shorten(one_line(shown.text), 200)


class Format(NamedTuple):
    """How a shard is written."""

    dialect: str
    members: dict[str, int]
    extended_members: int
    end: int


def read_format(reader: Reader) -> Format:
    """Read from a shard's headers how it is written."""
    table = scan_reader(reader)
    dialects = Counter(
        {b"ustar\0": "ustar", b"ustar ": "gnu"}.get(bytes(view), "v7")
        for view in reader.read_many(table.header_offset + 257, np.full(len(table), 6))
    )
    extended = int((table.first_offset < table.header_offset).sum())
    if extended and "ustar" in dialects:
        dialects["pax"] = dialects.pop("ustar")
    members = {kind.name.lower(): int((table.kind == kind).sum()) for kind in Kind}
    named = " and ".join(name for name, _ in dialects.most_common())
    return Format(named or "empty", {name: count for name, count in members.items() if count}, extended, table.end)


def shard_document(dataset: Dataset) -> dict[str, Any]:
    """Return what ``--json`` prints of a shard."""
    entry, layout = dataset.shard_entry(0), read_format(dataset.reader(0))
    return {
        **name_fields("shard", entry.url),
        "size": entry.size,
        "num_samples": entry.num_samples,
        "num_files": entry.num_files,
        "dialect": layout.dialect,
        "members": layout.members,
        "extended_members": layout.extended_members,
        "end": layout.end,
        "digest": entry.digest,
        "fields": [{"field": clean(field), "samples": count, "size": size} for field, count, size in _fields(dataset)],
        "other_files": [
            {**name_fields("name", name), "offset": offset if offset >= 0 else None, "length": length}
            for name, offset, length in _other_files(dataset)
        ],
        "findings": faults_document(dataset),
    }


def _fields(dataset: Dataset) -> list[tuple[str, int, int]]:
    """Return for each field of a shard how many samples have it, and how many bytes it has in all."""
    return [(field.name, field.samples, field.size) for field in count_fields(dataset.catalog)]


def _other_files(dataset: Dataset) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and length of each file of a shard that belongs to no sample."""
    others = dataset.catalog.group(0).others
    names = [raw.decode("utf-8", "surrogateescape") for raw in others.column("name").cast(pa.binary()).to_pylist()]
    yield from zip(names, others.column("offset").to_pylist(), others.column("length").to_pylist(), strict=True)


_COUNT_COLUMNS: Final = (
    Column("field", is_flexible=True),
    Column("samples", is_right=True, show="{:,}".format),
    Column("size", is_right=True, show=human_size),
)
_OTHER_COLUMNS: Final = (
    Column("name", is_flexible=True, is_path=True),
    Column("offset", is_right=True),
    Column("length", is_right=True),
)


def _print_shard(dataset: Dataset) -> None:
    entry, layout = dataset.shard_entry(0), read_format(dataset.reader(0))
    extended = layout.extended_members
    kinds = [counted(count, kind) for kind, count in layout.members.items()]
    print_facts(
        [
            ("shard", near_path(entry.url)),
            ("size", f"{entry.size:,} bytes"),
            ("holds", f"{counted(entry.num_samples, 'sample')} in {counted(entry.num_files, 'file')}"),
            (
                "format",
                f"tar, {layout.dialect}"
                + (f"; {counted(extended, 'member')} with extended headers" if extended else ""),
            ),
            ("members", ", ".join(kinds) or "none"),
            ("end", f"at byte {layout.end:,}"),
            ("digest", entry.digest),
        ]
    )
    click.echo()
    print_table(_COUNT_COLUMNS, _fields(dataset))
    others = list(_other_files(dataset))
    if others:
        click.echo(f"\n{counted(len(others), 'file')} of no sample")
        print_table(_OTHER_COLUMNS, others[: row_limit(None)])
        if at_terminal() and len(others) > LIMIT:
            note(f"... and {len(others) - LIMIT:,} more (--json lists all)")
    print_faults(dataset)
