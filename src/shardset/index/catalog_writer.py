"""Writing a catalog: the tables of many shards as Arrow files, a set of files for each group of shards.

One shard becomes one Arrow batch (`shard_batch`, made in worker processes); the batches of a group become one file.
docs/formats.md describes the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from shardset.errors import IndexFileError
from shardset.files import open_atomic, write_atomic
from shardset.formats.captions import first_caption
from shardset.formats.faults import ERRORS

from .catalog_files import (
    CATALOG_FORMAT,
    CATALOG_VERSION,
    MANIFEST_NAME,
    OTHERS_SCHEMA,
    RECORD_LAYOUT,
    SAMPLES_SCHEMA,
    SHARDS_SCHEMA,
    GroupFiles,
    Manifest,
    map_batch,
    read_manifest,
)
from .table import is_ascending

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardset.formats.captions import Captions
    from shardset.formats.naming import Names

    from .catalog import Catalog
    from .table import ShardIndex

    Int64s = NDArray[np.int64]

GROUP_SAMPLES: Final = 1_000_000
"""A group of shards is closed when it holds this many samples or `GROUP_SHARDS` shards."""
GROUP_SHARDS: Final = 65_536
GROUP_BYTES: Final = 1 << 30
"""Nor does a group with long captions become larger: Arrow's columns of text end at 2 GiB."""
_LONGEST_CAPTION: Final = 65_536


@dataclass(frozen=True, slots=True)
class ShardRow:
    """What a catalog knows of one shard. `samples` and `others` are its tables, as Arrow batches.

    `identity` is what its store said of its version; `digest` is that of its headers; `sidecar` is as in `ShardEntry`.
    The last three are set for a TFRecord shard, as `RecordForm` has them.
    """

    url: str
    name: str
    size: int
    identity: str
    digest: str
    num_samples: int
    num_files: int
    keys_sorted: bool
    first_key: bytes
    last_key: bytes
    faults: tuple[dict[str, Any], ...]
    sparse: str | None
    samples: pa.RecordBatch
    others: pa.RecordBatch | None
    sidecar: str | None = None
    compression: str | None = None
    content_size: int | None = None
    access_points: bytes | None = None


def shard_row(index: ShardIndex, *, url: str, name: str, identity: str, sidecar: str | None = None) -> ShardRow:
    """Turn the index of a shard into its part of a catalog."""
    keys, form = index.keys(), index.records
    is_sorted = is_ascending(keys)
    if form is not None:
        listed = _number_ends(len(keys))
    else:
        listed = keys.to_list() if not is_sorted else [keys[0], keys[len(keys) - 1]]
    sparse = {row: [list(piece) for piece in pieces] for row, pieces in index.sparse.items()}
    return ShardRow(
        url=url,
        name=name,
        size=index.size,
        identity=identity,
        digest=index.digest(),
        num_samples=index.num_samples,
        num_files=index.num_files,
        keys_sorted=is_sorted or all(a <= b for a, b in pairwise(listed)),
        first_key=min(listed, default=b""),
        last_key=max(listed, default=b""),
        faults=tuple(
            {"code": fault.code, "offset": fault.offset, "member": fault.member, "message": fault.message}
            for fault in index.faults
        ),
        sparse=orjson.dumps(sparse, option=orjson.OPT_NON_STR_KEYS).decode() if sparse else None,
        samples=_samples_batch(index, keys),
        others=_others_batch(index),
        sidecar=sidecar,
        compression=None if form is None else form.compression,
        content_size=None if form is None else form.size,
        access_points=None if form is None else form.points,
    )


def _number_ends(count: int) -> list[bytes]:
    """Return among the numbers below `count`, as text, those that may be the first or the last in byte order."""
    tens = [10**digits for digits in range(1, len(str(count)))]
    return [
        b"%d" % number for number in sorted({0, *(ten - 1 for ten in tens), *tens, count - 1}) if 0 <= number < count
    ]


def _samples_batch(index: ShardIndex, keys: Names) -> pa.RecordBatch:
    parts = int(index.sample_rows[-1])
    members = pa.StructArray.from_arrays(
        [pa.array(index.offset[:parts]), pa.array(index.length[:parts])], names=["offset", "length"]
    )
    codes, layouts = _layouts(index)
    columns: dict[str, pa.Array] = {
        "shard": pa.nulls(index.num_samples, pa.int32()),
        "key": text_array(keys),
        "fields": pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), _plain_text(layouts)),
        "members": pa.ListArray.from_arrays(pa.array(index.sample_rows, pa.int32()), members),
        **_geometry_columns(index),
        "caption": _caption_column(index),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _others_batch(index: ShardIndex) -> pa.RecordBatch | None:
    parts = int(index.sample_rows[-1])
    if parts == index.num_files:
        return None
    rows = np.arange(parts, index.num_files)
    arrays = [
        pa.nulls(len(rows), pa.int32()),
        text_array(index.names.take(rows)),
        pa.array(index.offset[rows]),
        pa.array(index.length[rows]),
    ]
    return pa.RecordBatch.from_arrays(arrays, names=OTHERS_SCHEMA.names)


def text_array(names: Names) -> pa.Array:
    """Return a column of names as an Arrow string array; as binary where a name is not UTF-8."""
    kind = pa.string() if _is_utf8(names.data.tobytes()) else pa.binary()
    offsets = (names.offsets - names.offsets[0]).astype(np.int32)
    data = np.ascontiguousarray(names.data[names.offsets[0] :])
    return pa.Array.from_buffers(kind, len(names), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _plain_text(strings: list[bytes]) -> pa.Array:
    return pa.array(strings, pa.binary()).cast(pa.string() if all(map(_is_utf8, strings)) else pa.binary())


def _is_utf8(raw: bytes) -> bool:
    if raw.isascii():
        return True
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _layouts(index: ShardIndex) -> tuple[NDArray[np.int64], list[bytes]]:
    """Number the distinct sequences of suffixes that samples have; a sequence is its suffixes joined by slashes.

    The suffixes keep their upper-case letters, so that key, dot and suffix are the member's name again.
    """
    first = index.sample_rows[:-1]
    if index.records is not None:
        return np.zeros(len(first), np.int64), [RECORD_LAYOUT]
    counts = np.diff(index.sample_rows)
    ids, spellings = _spelled_suffixes(index)
    widest = int(counts.max()) if len(counts) else 0
    base = len(spellings) + 1
    if base**widest < 2**62:
        code = np.zeros(len(counts), np.int64)
        for place in range(widest):
            inside = counts > place
            code *= base
            code[inside] += ids[first[inside] + place] + 1
        _, samples, codes = np.unique(code, return_index=True, return_inverse=True)
        rows = [range(int(first[s]), int(first[s] + counts[s])) for s in samples.tolist()]
        return codes, [b"/".join(spellings[ids[row]] for row in members) for members in rows]
    found: dict[bytes, int] = {}
    listed = [spellings[i] for i in ids.tolist()]
    codes = np.empty(len(counts), np.int64)
    for sample, (start, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        codes[sample] = found.setdefault(b"/".join(listed[start : start + count]), len(found))
    return codes, list(found)


def _spelled_suffixes(index: ShardIndex) -> tuple[NDArray[np.integer], list[bytes]]:
    """Number the suffixes of all parts as they are spelled in the names."""
    parts = int(index.sample_rows[-1])
    starts = index.names.offsets[:parts] + index.key_lengths[:parts] + 1
    lengths = index.names.offsets[1 : parts + 1] - starts
    spelled = index.names.cut(starts, lengths)
    is_lower = not bool(((spelled.data >= ord("A")) & (spelled.data <= ord("Z"))).any())
    if is_lower and not spelled.has_high_bytes():
        return index.suffix_ids[:parts], [suffix.encode() for suffix in index.suffixes]
    found: dict[bytes, int] = {}
    ids = [found.setdefault(suffix, len(found)) for suffix in spelled.to_list()]
    return np.array(ids, np.int64), list(found)


def _first_with(values: NDArray[np.bool_], sample_rows: Int64s) -> tuple[Int64s, NDArray[np.bool_]]:
    """Return for each sample its first row that is set, and whether there is one."""
    rows = np.append(np.flatnonzero(values[: sample_rows[-1]]), sample_rows[-1])
    found = rows[np.searchsorted(rows, sample_rows[:-1])]
    return np.minimum(found, max(len(values) - 1, 0)), found < sample_rows[1:]


def _geometry_columns(index: ShardIndex) -> dict[str, pa.Array]:
    kinds = {"width": pa.int32(), "height": pa.int32(), "orientation": pa.uint8()}
    if index.geometry is None:
        return {name: pa.nulls(index.num_samples, kind) for name, kind in kinds.items()}
    rows, is_known = _first_with(index.geometry.width > 0, index.sample_rows)
    values: tuple[NDArray[np.integer], ...] = (index.geometry.width, index.geometry.height, index.geometry.orientation)
    return {
        name: pa.array(column[rows] if index.num_samples else column[:0], kind, mask=~is_known)
        for (name, kind), column in zip(kinds.items(), values, strict=True)
    }


def _caption_column(index: ShardIndex) -> pa.Array:
    if not index.captions:
        return pa.nulls(index.num_samples, pa.string())
    rows = np.zeros(index.num_files, np.bool_)
    rows[np.fromiter(index.captions, np.int64, len(index.captions))] = True
    first, is_known = _first_with(rows, index.sample_rows)
    listed = list(map(index.captions.get, np.where(is_known, first, -1).tolist()))
    if {*map(type, listed)} - {str, NoneType} or max(map(len, filter(None, listed)), default=0) > _LONGEST_CAPTION:
        texts: Sequence[Any] = [caption_text(value) for value in listed]
    else:
        texts = listed
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # a lone surrogate is legal in JSON and not in UTF-8
        return pa.array([text and text.encode("utf-8", "replace").decode() for text in texts], pa.string())


def caption_text(captions: Captions) -> str | None:
    """Return the first caption as text; an object as JSON. Longer text than 64 Ki characters is cut."""
    value = first_caption(captions)
    if value is None:
        return None
    if isinstance(value, str):
        return value[:_LONGEST_CAPTION]
    try:
        return orjson.dumps(value).decode()[:_LONGEST_CAPTION]
    except TypeError:  # orjson reads more levels than it writes, and a sidecar index may have lone surrogates
        with contextlib.suppress(RecursionError):
            return json.dumps(value, separators=(",", ":"))[:_LONGEST_CAPTION]
        return None


def row_from_catalog(catalog: Catalog, shard_index: int) -> ShardRow:
    """Take a shard's part out of a catalog, to be put into another one."""
    number = bisect_right(catalog.shard_starts, shard_index) - 1
    group, shard = catalog.group(number), shard_index - catalog.shard_starts[number]
    start, stop = group.shard_span(shard)
    entry = catalog.entries(number)[shard]
    record = group.shards.slice(shard, 1).drop_columns(["url", "name", "first_key", "last_key"]).to_pylist()[0]
    keys = [group.shards.column(name)[shard].cast(pa.binary()).as_py() for name in ("first_key", "last_key")]
    samples = group.samples.slice(start, stop - start).drop_columns(["by_aspect"])
    others = group.others.filter(pc.equal(group.others.column("shard"), shard))
    return ShardRow(
        url=entry.url,
        name=entry.name,
        size=entry.size,
        identity=entry.identity,
        digest=entry.digest,
        num_samples=entry.num_samples,
        num_files=entry.num_files,
        keys_sorted=record["keys_sorted"],
        first_key=keys[0],
        last_key=keys[1],
        faults=tuple(record["faults"]),
        sparse=record["sparse"],
        samples=samples,
        others=others if others.num_rows else None,
        sidecar=entry.sidecar,
        compression=entry.compression,
        content_size=entry.content_size,
        access_points=record.get("access_points"),
    )


def split_groups(rows: Iterable[ShardRow]) -> Iterator[list[ShardRow]]:
    """Divide shards, in order, into groups; the same shards always fall into the same groups."""
    group: list[ShardRow] = []
    samples = size = 0
    for row in rows:
        row_size = row.samples.nbytes
        is_full = samples + row.num_samples > GROUP_SAMPLES or size + row_size > GROUP_BYTES
        if group and (is_full or len(group) == GROUP_SHARDS):
            yield group
            group, samples, size = [], 0, 0
        group.append(row)
        samples += row.num_samples
        size += row_size
    if group:
        yield group


def write_group(folder: Path, rows: list[ShardRow], *, options: str) -> GroupFiles:
    """Write the files of one group of shards, unless they are there already.

    Args:
        folder: The catalog's folder.
        rows: The shards, in order.
        options: What else decides the content, such as whether captions were read.
    """
    identity = "\n".join(
        f"{row.url}\t{row.size}\t{row.identity}\t{row.digest}\t{_known_digest(row.samples)}" for row in rows
    )
    token = hashlib.sha256(f"{CATALOG_VERSION}\n{options}\n{identity}".encode("utf-8", "surrogateescape")).hexdigest()[
        :16
    ]
    others = [(number, row.others) for number, row in enumerate(rows) if row.others is not None]
    files = GroupFiles(
        samples=f"samples-{token}.arrow",
        shards=f"shards-{token}.arrow",
        others=f"others-{token}.arrow" if others else None,
        num_shards=len(rows),
        num_samples=sum(row.num_samples for row in rows),
        num_files=sum(row.num_files for row in rows),
        num_damaged=sum(any(fault["code"] in ERRORS for fault in row.faults) for row in rows),
    )
    if not _is_there(folder / files.samples, SAMPLES_SCHEMA, files.num_samples):
        table = _join([(number, row.samples) for number, row in enumerate(rows)])
        table = table.append_column("by_aspect", _aspect_order(table))
        _write_table(folder / files.samples, table)
    num_others = sum(batch.num_rows for _, batch in others)
    if files.others is not None and not _is_there(folder / files.others, OTHERS_SCHEMA, num_others):
        _write_table(folder / files.others, _join(others))
    _write_table(folder / files.shards, _shards_table(rows))
    return files


def _known_digest(samples: pa.RecordBatch) -> str:
    """Return a digest of what can change while the headers of a shard stay as they are: pixel sizes and captions."""
    state = hashlib.sha256()
    for name in ("width", "height", "orientation", "caption"):
        column = samples.column(name)
        if column.null_count == len(column):
            continue
        values = column
        if name == "caption":  # a slice of a column has the texts of all of it in its buffer
            offsets = np.frombuffer(column.buffers()[1], np.int32, column.offset + len(column) + 1)[column.offset :]
            state.update(memoryview(column.buffers()[2] or b"")[offsets[0] : offsets[-1]])
            values = pc.binary_length(column)
        state.update(name.encode())
        state.update(pc.fill_null(values, 0 if values is column else -1).to_numpy(zero_copy_only=False).tobytes())
    return state.hexdigest()


def _is_there(path: Path, schema: pa.Schema, num_rows: int) -> bool:
    """Tell whether a file of a catalog is there and whole: one that was cut must be written again."""
    try:
        map_batch(path, schema, num_rows)
    except IndexFileError:
        return False
    return True


def _join(batches: list[tuple[int, pa.RecordBatch]]) -> pa.Table:
    """Join the batches of a group's shards, with the shard's number within the group in the column ``shard``."""
    numbered = []
    texts = {"key", "name", "fields"}
    is_binary = any(
        pa.types.is_binary(field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
        for _, batch in batches
        for field in batch.schema
        if field.name in texts
    )
    for number, batch in batches:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns["shard"] = pa.array(np.full(batch.num_rows, number, np.int32))
        if is_binary:
            columns |= {name: _as_binary(columns[name]) for name in texts & set(columns)}
        numbered.append(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))
    return pa.Table.from_batches(numbered).unify_dictionaries().combine_chunks()


def _as_binary(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        return pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(pa.binary()))
    return array.cast(pa.binary())


def _aspect_order(table: pa.Table) -> pa.Array:
    """Order samples by the aspect ratio that they are shown with; nulls if no size is known."""
    width, height = (table.column(name).to_numpy(zero_copy_only=False) for name in ("width", "height"))
    if not table.num_rows or table.column("width").null_count == table.num_rows:
        return pa.nulls(table.num_rows, pa.int32())
    is_turned = table.column("orientation").to_numpy(zero_copy_only=False) > 4
    with np.errstate(invalid="ignore", divide="ignore"):
        aspect = np.where(is_turned, height / width, width / height)
    return pa.array(np.argsort(aspect, kind="stable").astype(np.int32))  # what is not known is NaN, and last


def _shards_table(rows: list[ShardRow]) -> pa.Table:
    counts = np.array([0, *(row.num_samples for row in rows)], np.int64)
    columns: dict[str, Any] = {field.name: [getattr(row, field.name, None) for row in rows] for field in SHARDS_SCHEMA}
    columns["first_sample"] = np.cumsum(counts)[:-1]
    # What names a fault is for people to read, so bytes that are no text may be spelled out.
    columns["faults"] = [
        [{name: _printable(value) for name, value in fault.items()} for fault in row.faults] for row in rows
    ]
    arrays = []
    for field in SHARDS_SCHEMA:
        if field.name in {"url", "name", "first_key", "last_key"}:
            arrays.append(_plain_text([_raw(value) for value in columns[field.name]]))
        else:
            arrays.append(pa.array(columns[field.name], field.type))
    return pa.table(arrays, names=SHARDS_SCHEMA.names)


def _raw(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def _printable(value: str | int | None) -> str | int | None:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _write_table(path: Path, table: pa.Table) -> None:
    with open_atomic(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish a catalog: from now on readers see its groups. Files that neither it nor the one before names go."""
    content = {
        "format": CATALOG_FORMAT,
        "version": CATALOG_VERSION,
        "base": manifest.base,
        "captions": manifest.captions,
        "geometry": manifest.geometry,
        "groups": [asdict(group) for group in manifest.groups],
    }
    # Who opened the catalog before may not have mapped all of it yet, so its files stay for one more turn.
    earlier: tuple[GroupFiles, ...] = ()
    with contextlib.suppress(FileNotFoundError, IndexFileError):
        earlier = read_manifest(folder).groups
    write_atomic(folder / MANIFEST_NAME, orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    kept = {name for group in (*manifest.groups, *earlier) for name in (group.samples, group.shards, group.others)}
    yesterday = time.time() - 86_400
    with contextlib.suppress(OSError):  # Windows does not remove what somebody has mapped; the next run tries again
        for path in folder.glob("*.arrow"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        for path in folder.glob(".*.tmp"):  # of a run that was killed, unless it is of one that goes on now
            if path.stat().st_mtime < yesterday:
                path.unlink(missing_ok=True)
