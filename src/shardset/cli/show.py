"""``shardset show``: one sample with its fields and their places, or one shard with what was found in it."""

from __future__ import annotations

from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import numpy as np
import pyarrow as pa

from shardset.errors import without_secrets
from shardset.formats.geometry import parse_geometry, sniff_kind
from shardset.formats.media import Media, read_media
from shardset.formats.tar import Kind
from shardset.index.build import scan_reader

from .address import find_sample, is_one_shard, near_path, open_source, split_address
from .counts import count_fields
from .program import Command, MisuseError, note
from .tables import LIMIT, Column, at_terminal, print_facts, print_table, row_limit
from .text import clean, counted, dump_json, human_size, name_fields, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardset.dataset.dataset import Dataset
    from shardset.dataset.sample import Sample
    from shardset.formats.geometry import Geometry
    from shardset.storage.store import Reader

_HEAD: Final = 64 << 10
_LONGEST_TEXT: Final = 1_000
_VIDEOS: Final = frozenset({"mp4", "mov", "m4a", "webm", "mkv"})
_PICTURES: Final = frozenset({"jpeg", "png", "webp", "gif", "bmp", "tiff", "avif", "heic", "heif", "jxl", "ico"})


@click.command(
    "show",
    cls=Command,
    examples=[
        ("shardset show photos.tar#0007", "the sample with the key 0007"),
        ("shardset show photos/#7", "the eighth sample of a folder of shards"),
        ("shardset show photos.tar", "the shard: counts, format, and every finding"),
        ("shardset show photos.tar#0007 --json | jq '.fields[].range'", "where its payloads stand"),
    ],
)
@click.argument("address", metavar="SOURCE[#KEY]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
def command(address: str, *, as_json: bool) -> None:
    """Show one sample, or one shard, with offsets and findings.

    KEY is the key of a sample or, if no sample has it, a sample's number. The range of a payload is one that curl -r
    takes: its first and its last byte in the shard.
    """
    source, fragment = split_address(address)
    dataset = open_source(source)
    if fragment:
        sample = find_sample(dataset, fragment)
        shown = [show_field(sample, place, dataset) for place in range(len(sample.fields))]
        if as_json:
            click.echo(dump_json(sample_document(sample, shown, dataset)))
        else:
            _print_sample(sample, shown, dataset)
        return
    if not is_one_shard(dataset, source):
        raise MisuseError(
            f"{without_secrets(source)} is {counted(dataset.num_shards, 'shard')}; show takes one shard or one sample",
            f"shardset ls {quote(without_secrets(source))}",
        )
    if as_json:
        click.echo(dump_json(shard_document(dataset)))
    else:
        _print_shard(dataset)


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


def look_at(reader: Reader, offset: int, length: int) -> tuple[str, Geometry | Media | None, str | None]:
    """Tell of a payload its kind, what its header says if it is a picture or video, and how it begins if it is text."""
    if not length:
        return "empty", None, None
    head = reader.view(offset, min(length, _HEAD))
    kind = sniff_kind(head)
    if kind in _PICTURES:
        whole = head if reader.map() is None else reader.view(offset, length)
        return kind, parse_geometry(whole), None
    if kind in _VIDEOS:
        found = read_media(lambda at, count: reader.view(offset + at, max(0, min(count, length - at))), length)
        return kind, found, None
    text = _decode(bytes(head), is_whole=length <= _HEAD) if kind in {None, "json", "html", "svg"} else None
    return kind or ("data" if text is None else "text"), None, text


def _decode(head: bytes, *, is_whole: bool) -> str | None:
    """Return how a text begins, or None for what is no text."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if is_whole or error.start < len(head) - 3:  # otherwise the cut fell inside a character
            return None
        text = head[: error.start].decode()
    return None if "\0" in text else text[:_LONGEST_TEXT]


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
                **_geometry_document(shown.geometry),
                "text": None if shown.text is None else clean(shown.text),
            }
            for shown in fields
        ],
        "same_key": _same_key(sample, dataset),
    }


def _geometry_document(geometry: Geometry | Media | None) -> dict[str, Any]:
    width, height = (geometry and geometry.display_size) or (None, None)
    media = geometry if isinstance(geometry, Media) else None
    return {
        "width": width,
        "height": height,
        "orientation": geometry.orientation if geometry is not None and width is not None else None,
        "duration": media and media.duration,
        "frame_rate": media and media.frame_rate,
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
        size = shown.geometry.display_size
        said = [] if size is None else [f"{size[0]}x{size[1]}"]
        if shown.geometry.orientation != 1:
            said.append(f"orientation {shown.geometry.orientation}")
        if isinstance(shown.geometry, Media):
            said += [] if shown.geometry.duration is None else [f"{shown.geometry.duration:.4g} s"]
            said += [] if shown.geometry.frame_rate is None else [f"{shown.geometry.frame_rate:.4g} frames/s"]
        return ", ".join(said)
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
        "findings": [
            {
                "code": fault.code,
                "is_error": fault.is_error,
                "offset": fault.offset,
                "member": None if fault.member is None else clean(fault.member),
                "message": clean(fault.message),
            }
            for _, fault in dataset.faults()
        ],
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
    faults = [fault for _, fault in dataset.faults()]
    click.echo(f"\n{counted(len(faults), 'finding') if faults else 'no findings'}")
    for fault in faults:
        member = "" if fault.member is None else f", {fault.member}"
        click.echo(one_line(f"{fault.code} at byte {fault.offset}{member}"))
        if fault.message:
            click.echo(f"    {one_line(fault.message)}")
