"""The files of a catalog: their columns, the manifest, and how one is mapped. docs/formats.md describes them."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa

from shardset.errors import IndexFileError

if TYPE_CHECKING:
    from pathlib import Path

CATALOG_FORMAT: Final = "shardset catalog"
CATALOG_VERSION: Final = 1
MANIFEST_NAME: Final = "catalog.json"
_AGAIN: Final = "build it again with: shardset index"

_RANGE: Final = pa.struct([("offset", pa.int64()), ("length", pa.int64())])
SAMPLES_SCHEMA: Final = pa.schema(
    [
        ("shard", pa.int32()),
        ("key", pa.string()),
        ("fields", pa.dictionary(pa.int32(), pa.string())),
        ("members", pa.list_(_RANGE)),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("orientation", pa.uint8()),
        ("caption", pa.string()),
        ("by_aspect", pa.int32()),
    ]
)
_FAULT: Final = pa.struct(
    [("code", pa.string()), ("offset", pa.int64()), ("member", pa.string()), ("message", pa.string())]
)
SHARDS_SCHEMA: Final = pa.schema(
    [
        ("url", pa.string()),
        ("name", pa.string()),
        ("size", pa.int64()),
        ("identity", pa.string()),
        ("digest", pa.string()),
        ("first_sample", pa.int64()),
        ("num_samples", pa.int64()),
        ("num_files", pa.int64()),
        ("keys_sorted", pa.bool_()),
        ("first_key", pa.string()),
        ("last_key", pa.string()),
        ("faults", pa.list_(_FAULT)),
        ("sparse", pa.string()),
        ("sidecar", pa.string()),
        ("compression", pa.string()),
        ("content_size", pa.int64()),
        ("access_points", pa.binary()),
    ]
)
RECORD_LAYOUT: Final = b"\0record"
"""What stands in the column ``fields`` of a sample that is a record: its features are known to the record alone."""
_LATER: Final = frozenset({"sidecar", "compression", "content_size", "access_points"})
"""Columns that catalogs of earlier releases lack."""
OTHERS_SCHEMA: Final = pa.schema(
    [("shard", pa.int32()), ("name", pa.string()), ("offset", pa.int64()), ("length", pa.int64())]
)


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """The files of one group of shards, and how much they hold. Damaged shards are indexed up to their damage."""

    samples: str
    shards: str
    others: str | None
    num_shards: int
    num_samples: int
    num_files: int
    num_damaged: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a catalog is made of.

    Attributes:
        groups: In the order in which their shards and samples are numbered.
        base: The folder that shard urls are relative to, itself relative to the catalog's folder; None if the urls
            are whole.
        captions: Whether captions were read from the shards.
        geometry: Whether pixel sizes were read from the shards.
    """

    groups: tuple[GroupFiles, ...]
    base: str | None
    captions: bool
    geometry: bool


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the catalog in `folder`.

    Raises:
        FileNotFoundError: There is none.
        IndexFileError: It is malformed, or of another version.
    """
    path = folder / MANIFEST_NAME
    raw = path.read_bytes()
    try:
        content: dict[str, Any] = orjson.loads(raw)
        version = content["version"] if content["format"] == CATALOG_FORMAT else None
        names = [field.name for field in fields(GroupFiles)]
        groups = tuple(GroupFiles(*(group[name] for name in names)) for group in content["groups"])
        counts = [count for group in groups for count in astuple(group)[3:]]
        texts = [text for group in groups for text in (group.samples, group.shards, group.others or "")]
        manifest = Manifest(groups, content["base"], bool(content["captions"]), bool(content["geometry"]))
    except (ValueError, KeyError, TypeError) as error:
        what = f"the catalog's manifest is malformed ({type(error).__name__}: {error})"
        raise IndexFileError(what, path=str(path), hint=_AGAIN) from error
    if version != CATALOG_VERSION:
        what = f"the catalog has version {version!r}, this shardset reads {CATALOG_VERSION}"
        raise IndexFileError(what, path=str(path), hint=_AGAIN)
    texts.append(manifest.base or "")
    if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts) or set(map(type, texts)) != {str}:
        raise IndexFileError("the catalog's manifest has broken counts or names", path=str(path), hint=_AGAIN)
    return manifest


def map_batch(path: Path, schema: pa.Schema, num_rows: int | None = None) -> pa.RecordBatch:
    """Map an Arrow file and return its one batch, without copying a byte of it.

    Args:
        path: The file.
        schema: Columns that it must have; a column of text may be binary instead.
        num_rows: How many rows it must have.

    Raises:
        IndexFileError: It is missing, malformed, or of another shape.
    """
    try:
        with pa.memory_map(os.fsencode(path)) as source:  # as bytes, since a folder's name need not be UTF-8
            reader = pa.ipc.open_file(source)
            count = reader.num_record_batches
            batch = reader.get_batch(0) if count else pa.RecordBatch.from_pylist([], schema=reader.schema)
            batch.validate()
            kinds = dict(zip(batch.schema.names, batch.schema.types, strict=True))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise IndexFileError(f"the catalog's file cannot be read ({error})", path=str(path), hint=_AGAIN) from error
    what = None
    if count > 1:
        what = f"has {count} batches instead of one"
    elif num_rows not in (None, batch.num_rows):
        what = f"has {batch.num_rows} rows, the manifest says {num_rows}"
    else:
        for field in schema:
            if field.name not in kinds and field.name in _LATER:
                continue
            if kinds.get(field.name) not in {field.type, _as_binary(field.type)}:
                what = f"has no column {field.name!r} of type {field.type}"
    if what is not None:
        raise IndexFileError(f"the catalog's file {what}", path=str(path), hint=_AGAIN)
    return batch


def check_values(table: pa.RecordBatch | pa.Array, path: Path) -> None:
    """Look at every value, because Arrow's own functions look at none, and read anywhere if an offset is wrong."""
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        raise IndexFileError(f"the catalog's file is garbled ({error})", path=str(path), hint=_AGAIN) from error


def _as_binary(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column has instead if a text in it is not UTF-8."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_binary(kind.value_type))
    return pa.binary() if pa.types.is_string(kind) else kind
