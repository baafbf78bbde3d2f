"""The sidecar index: a JSON file beside its shard that says where every file in it lies.

The layout is webshart's, so that its readers, and those of cheesechaser's form of it, can use our files; what they do
not know stands in a section of our own, ``shardset``. docs/formats.md has the file key by key, and what is promised.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import ne
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import IndexFileError
from shardset.formats.faults import Fault
from shardset.formats.naming import split_names
from shardset.formats.tar_header import MAX_SIZE

from .document import dump_document, load_document, to_json
from .numbering import number_by_path
from .plain_entries import group_plain
from .record_sidecar import dump_records, read_records
from .sidecar_entries import (
    COLUMN_KEYS,
    DERIVED_KEYS,
    Entries,
    MalformedError,
    aspect_ratios,
    check_whole,
    has_surrogates,
    read_entries,
    read_text_or_hex,
    show,
    text_or_hex,
    write_entries,
)
from .table import GeometryColumns, index_from_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.formats.captions import Captions

    from .plain_entries import PlainGroup
    from .sidecar_entries import Group
    from .table import ShardIndex

    Int64s = NDArray[np.int64]

VERSION: Final = 1
_OWN_KEYS: Final = frozenset({"path", "filesize", "includes_image_geometry", "files", "shardset"})
_FOUND_AGAIN: Final = frozenset({"repeated_key", "duplicate_suffix"})
_HINT: Final = "index the shard again"


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar:
    """What a sidecar index holds.

    Attributes:
        index: The shard's index.
        filesize: Bytes of the shard as the file states them, or None. Where neither it nor the caller knows them,
            ``index.size`` is the end of the last payload.
        digest: The digest of the shard's headers in the file, which was found right; None where the file has none.
        top: Top-level keys that are not ours, with their values.
        is_list: ``files`` is a list and not an object.
    """

    index: ShardIndex
    filesize: int | None = None
    digest: str | None = None
    top: dict[str, Any] = field(default_factory=dict)
    is_list: bool = False


def sidecar_path(shard: str) -> str:
    """Return the path or url of the sidecar index of a shard.

    A last extension ``.tar`` becomes ``.json``, as webshart has it (``v1.0.tar``: ``v1.0.json``). To any other name
    ``.json`` is added, since what follows its last dot may be what tells shards apart (``a.tfrecord-00000-of-00002``).
    The query of a url stays.
    """
    end = len(shard)
    if "://" in shard:
        end = min(at for at in (shard.find("?"), shard.find("#"), end) if at >= 0)
    path, query = shard[:end], shard[end:]
    if path[-4:].lower() == ".tar" and path[-5:-4] not in {"", "/", "\\"}:
        path = path[:-4]
    return f"{path}.json{query}"


def dump_sidecar(index: ShardIndex, *, name: str, like: Sidecar | None = None) -> bytes:
    """Return the sidecar index of a shard: compact JSON with a line end, the same bytes for the same index.

    Files stand sorted by path in byte order. What other readers cannot be told of, sparse files and names that are not
    UTF-8, stands apart in our section; a path that occurs twice makes ``files`` a list, since an object would lose one.

    Args:
        index: The shard's index.
        name: The shard's file name, without folders.
        like: A sidecar index that was read: its foreign top-level keys and its form of ``files`` are kept.

    Raises:
        IndexFileError: A caption or an extra field cannot be written as JSON, or an extra field has a reserved name.
    """
    faults = [
        {
            "code": fault.code,
            "offset": fault.offset,
            "member": None if fault.member is None else text_or_hex(fault.member),
            "message": text_or_hex(fault.message),
        }
        for fault in index.faults
    ]
    if index.records is not None:
        return dump_records(index, name=name, version=VERSION, faults=faults)
    entries, apart = write_entries(index, number_by_path(index))
    by_path = {entry["path"]: entry for entry in entries}
    document: dict[str, Any] = {} if has_surrogates(name) else {"path": name}
    document |= {"filesize": index.size, "includes_image_geometry": index.geometry is not None}
    document |= like.top if like else {}
    document["files"] = entries if len(by_path) < len(entries) or (like and like.is_list) else by_path
    document["shardset"] = {
        "version": VERSION,
        "digest": index.digest(),
        "includes_orientation": index.geometry is not None and bool(index.geometry.orientation.any()),
        "faults": faults,
        "apart": apart,
    }
    try:
        return dump_document(document)
    except (TypeError, ValueError, RecursionError) as error:
        for entry in (*entries, *apart):
            try:
                to_json(entry)
            except (TypeError, ValueError, RecursionError) as cause:
                raise IndexFileError(
                    f"what is known of {entry['path']!r} cannot be written as JSON: {cause}"
                ) from cause
        raise IndexFileError(f"the index cannot be written as JSON: {error}") from error


def parse_sidecar(payload: Buffer, *, path: str, shard_size: int | None = None) -> Sidecar:
    """Read a sidecar index: ours, webshart's in both forms, or cheesechaser's.

    A byte order mark is allowed, ``filesize`` may be missing, and keys may have the other names that webshart knows
    (``size``, ``filename``, ``fname``, ``caption``). Nulls are as good as nothing, and whole numbers may be written as
    floats. What other tools keep in an entry stays in ``index.extra``.

    Args:
        payload: The file's bytes.
        path: The file's path or url, for messages.
        shard_size: Bytes of the shard, where they are known.

    Raises:
        IndexFileError: The file is not JSON, an entry is malformed or lies outside the shard, the shard has another
            size than the file says, or the digest in it does not fit its entries.
    """
    try:
        return read_document(load_document(payload), shard_size)
    except MalformedError as error:
        raise IndexFileError(str(error), path=path, hint=_HINT) from error


def read_document(document: dict[str, Any], shard_size: int | None = None) -> Sidecar:
    """Turn the JSON object of an index file into an index, as `parse_sidecar` does. The object stays as it is.

    Raises:
        MalformedError: As `parse_sidecar` raises IndexFileError.
    """
    if document.get("format") == "tfrecord":
        return _read_records(document, shard_size)
    files, filesize, has_geometry, own = _check_top(document, shard_size)
    entries = read_entries(files, own.apart)
    size = shard_size if filesize is None else filesize
    end = _last_end(entries, MAX_SIZE if size is None else size)
    index, rows = _place(entries, end if size is None else size, own.faults)
    index = _attach(index, rows, entries, has_geometry=has_geometry, has_orientation=own.has_orientation)
    _check_digest(index, own.digest)
    top = {key: value for key, value in document.items() if key not in _OWN_KEYS}
    index = replace(index, is_verified=own.digest is not None)
    return Sidecar(index, filesize, own.digest, top, isinstance(files, list))


def _read_records(document: dict[str, Any], shard_size: int | None) -> Sidecar:
    filesize = _filesize(document.get("filesize"), shard_size, is_empty=not document.get("lengths"))
    if filesize is None:
        raise MalformedError("the index has no filesize")
    own = _own_section(document.get("shardset"))
    index = read_records(document, filesize, own.faults)
    _check_digest(index, own.digest)
    return Sidecar(replace(index, is_verified=own.digest is not None), filesize, own.digest)


def _check_digest(index: ShardIndex, digest: str | None) -> None:
    if digest is not None and digest != (actual := index.digest()):
        raise MalformedError(f"the index was changed: its digest is {show(digest)}, its entries give {actual}")


def check_document(document: dict[str, Any]) -> None:
    """Check all in the JSON object of an index file but the digest.

    Raises:
        MalformedError: As `read_document`.
    """
    if plain_entries(document) is None:
        files, filesize, _, own = _check_top(document, None)
        _last_end(read_entries(files, own.apart), MAX_SIZE if filesize is None else filesize)


def plain_entries(document: dict[str, Any]) -> list[PlainGroup] | None:
    """Return all entries of an index file, checked, if they are ordinary; None if they need a closer look.

    Raises:
        MalformedError: Something else in the file is not as it should be.
    """
    files, filesize, _, own = _check_top(document, None)
    return None if own.apart else group_plain(files, MAX_SIZE if filesize is None else filesize)


def _check_top(
    document: dict[str, Any], shard_size: int | None
) -> tuple[dict[str, Any] | list[Any], int | None, bool, _Section]:
    """Return ``files`` unchecked, and checked ``filesize``, ``includes_image_geometry`` and our section."""
    files = document.get("files")
    if files is None and document.get("format") == "tfrecord":
        raise MalformedError("this is the index of a TFRecord shard, whose fields stand in its records")
    if not isinstance(files, dict | list):
        raise MalformedError("the index has no files" if files is None else f"files is {show(files)}, not an object")
    filesize = _filesize(document.get("filesize"), shard_size, is_empty=not files)
    has_geometry = document.get("includes_image_geometry") or False
    if not isinstance(has_geometry, bool):
        raise MalformedError(f"includes_image_geometry is {show(has_geometry)}")
    return files, filesize, has_geometry, _own_section(document.get("shardset"))


def _filesize(value: Any, shard_size: int | None, *, is_empty: bool) -> int | None:
    """Return the shard's size as the index states it; None where it does not."""
    size = 0 if value is None else check_whole("filesize", value, MAX_SIZE)
    # webshart writes 0 for a list whose size it was never told.
    if value is None or (size == 0 and not is_empty):
        return None
    if shard_size not in {None, size}:
        raise MalformedError(f"the index is stale: it was made for a shard of {size} bytes, this one has {shard_size}")
    return size


class _Section(NamedTuple):
    """Our section of an index file: empty where another tool wrote the file."""

    digest: str | None = None
    has_orientation: bool = False
    faults: tuple[Fault, ...] = ()
    apart: Sequence[Any] = ()


def _own_section(section: Any) -> _Section:
    if section is None:
        return _Section()
    if not isinstance(section, dict):
        raise MalformedError(f"shardset is {show(section)}, not an object")
    version, digest = section.get("version"), section.get("digest")
    if type(version) is not int or version < 1:
        raise MalformedError(f"shardset: version is {show(version)}")
    if version > VERSION:
        raise MalformedError(f"the index is of version {show(version)}, and this shardset reads up to {VERSION}")
    if not isinstance(digest, str) or not digest:
        raise MalformedError(f"shardset: digest is {show(digest)}")
    has_orientation = section.get("includes_orientation", False)
    if not isinstance(has_orientation, bool):
        raise MalformedError(f"shardset: includes_orientation is {show(has_orientation)}")
    faults, apart = section.get("faults", []), section.get("apart", [])
    for key, value in (("faults", faults), ("apart", apart)):
        if not isinstance(value, list):
            raise MalformedError(f"shardset: {key} is {show(value)}, not a list")
    found = tuple(_fault(f"fault {number}", fault) for number, fault in enumerate(faults))
    return _Section(digest, has_orientation, found, apart)


def _fault(label: str, value: Any) -> Fault:
    if not isinstance(value, dict):
        raise MalformedError(f"{label} is {show(value)}, not an object")
    code, offset, member = value.get("code"), value.get("offset"), value.get("member")
    if not isinstance(code, str):
        raise MalformedError(f"{label}: code is {show(code)}")
    if type(offset) is not int or not -1 <= offset <= MAX_SIZE:
        raise MalformedError(f"{label}: offset is {show(offset)}")
    return Fault(
        code,
        offset,
        None if member is None else read_text_or_hex(f"{label}: member", member),
        read_text_or_hex(f"{label}: message", value.get("message", "")),
    )


def _last_end(entries: Entries, size: int) -> int:
    """Return the end of the last payload, having checked that all lie within `size` bytes."""
    ends = np.where(entries.offset < 0, 0, entries.offset + entries.length)
    places = [(number, piece.offset, piece.length) for number, rows in entries.sparse.items() for piece in rows]
    # A sum that passes 63 bits is negative.
    outside = np.flatnonzero((ends > size) | (ends < 0))[:1].tolist()
    places += [(number, int(entries.offset[number]), int(entries.length[number])) for number in outside]
    for number, offset, length in places:
        if offset + length > size:
            raise MalformedError(
                f"entry {show(entries.paths[number])}: its bytes {offset} to {offset + length} "
                f"pass the end of the shard, which has {size}"
            )
    return max([int(ends.max(initial=0)), *(offset + length for _, offset, length in places)])


def _place(entries: Entries, size: int, faults: tuple[Fault, ...]) -> tuple[ShardIndex, Int64s]:
    """Bring the files into the order in which they stand in the shard, and make its index.

    Returns:
        The index, and for each entry of the file its row.
    """
    count = len(entries.paths)
    order = np.argsort(entries.offset, kind="stable")
    if entries.sparse:
        # A sparse file has its row; the others fill what is left, those of no sample last.
        is_part = split_names(entries.names).key_lengths >= 0
        whole = np.lexsort((entries.offset, ~is_part))
        claimed = np.fromiter(entries.sparse_row.values(), np.int64)
        order[claimed] = np.fromiter(entries.sparse_row, np.int64)
        order[np.setdiff1d(np.arange(count), claimed)] = whole[entries.offset[whole] >= 0]
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    names = entries.names.take(order)
    index = index_from_files(
        names,
        entries.offset[order],
        entries.length[order],
        size,
        sparse={int(place[number]): pieces for number, pieces in entries.sparse.items()},
        faults=tuple(fault for fault in faults if fault.code not in _FOUND_AGAIN),
    )
    num_parts = int(index.sample_rows[-1])
    if num_parts == count:
        return index, place
    # The index has the files of no sample behind the others.
    is_part = split_names(names).key_lengths >= 0
    rows = np.where(is_part, np.cumsum(is_part) - 1, num_parts + np.cumsum(~is_part) - 1)
    return index, rows[place]


def _attach(
    index: ShardIndex, rows: Int64s, entries: Entries, *, has_geometry: bool, has_orientation: bool
) -> ShardIndex:
    """Give an index what the entries know beyond names, offsets and lengths.

    Args:
        index: Made of the entries.
        rows: For each entry its row.
        entries: Of the file.
        has_geometry: The file says that somebody looked for images.
        has_orientation: The file tells orientations, so that an image is upright where it says nothing.
    """
    groups = [(group, rows[group.numbers]) for group in entries.groups]
    has_geometry = has_geometry or any(not group.columns.keys().isdisjoint(("width", "height")) for group, _ in groups)
    geometry = None
    if has_geometry:
        zeros = np.zeros(index.num_files, np.int32)
        geometry = GeometryColumns(zeros, zeros.copy(), zeros.astype(np.uint8))
    captions: dict[int, Captions] = {}
    extra: dict[int, dict[str, Any]] = {}
    for group, places in groups:
        if "captions" in group.columns:
            captions.update(zip(places.tolist(), group.columns["captions"], strict=True))
        further = [key for key in group.columns if key not in COLUMN_KEYS | DERIVED_KEYS]
        if geometry is not None and _fill_geometry(geometry, places, group, has_orientation=has_orientation):
            further.remove("orientation")
        if further:
            extra.update(zip(places.tolist(), _as_dicts(further, group.columns), strict=True))
    for row, key, value in _told_otherwise(index, rows, entries):
        extra.setdefault(row, {})[key] = value
    return replace(index, geometry=geometry, captions=captions, extra=extra)


def _as_dicts(keys: list[str], columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a dict for each row of some columns."""
    if len(keys) == 1:  # mostly json_metadata, kept fast
        return [{keys[0]: value} for value in columns[keys[0]]]
    return [dict(zip(keys, values, strict=True)) for values in zip(*(columns[key] for key in keys), strict=True)]


def _fill_geometry(geometry: GeometryColumns, rows: Int64s, group: Group, *, has_orientation: bool) -> bool:
    """Fill in the geometry of a group of entries, and tell whether the key ``orientation`` was one of EXIF."""
    for key, column in (("width", geometry.width), ("height", geometry.height)):
        if key in group.columns:
            column[rows] = group.columns[key]
    if has_orientation:
        geometry.orientation[rows] = (geometry.width[rows] > 0) & (geometry.height[rows] > 0)
    told = group.columns.get("orientation")
    if told is None or not all(type(value) is int and 0 <= value <= 8 for value in told):
        return False
    geometry.orientation[rows] = told
    return True


def _told_otherwise(index: ShardIndex, rows: Int64s, entries: Entries) -> Iterator[tuple[int, str, Any]]:
    """Yield (row, key, value) where an entry says something else than what follows from the rest of the index."""
    beside: Int64s | None = None
    for group in entries.groups:
        columns = group.columns
        for key in sorted(DERIVED_KEYS & columns.keys()):
            values = columns[key]
            if key == "aspect":
                differs = _is_other_aspect(columns)
            else:
                beside = _json_beside(index, rows) if beside is None else beside
                numbers = beside[group.numbers]
                if key == "json_path":
                    paths = [entries.paths[number] for number in numbers.tolist()]
                    differs = np.fromiter(map(ne, values, paths), np.bool_, len(values))
                else:
                    column = entries.offset if key == "json_offset" else entries.length
                    differs = values != column[numbers]
                differs |= numbers < 0
            for at in np.flatnonzero(differs).tolist():
                value = values[at]
                yield int(rows[group.numbers[at]]), key, value if key == "json_path" else value.item()


def _is_other_aspect(columns: dict[str, Any]) -> NDArray[np.bool_]:
    """Tell for each entry whether its aspect is not that of its width and height."""
    stated = columns["aspect"]
    if "width" not in columns or "height" not in columns:
        return np.ones(len(stated), np.bool_)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = aspect_ratios(columns["width"], columns["height"])
        differs: NDArray[np.bool_] = stated.astype(np.float32) != ratios
    return differs


def _json_beside(index: ShardIndex, rows: Int64s) -> Int64s:
    """Return for each entry the number of the entry of the JSON sidecar that webshart's rule gives it, or -1."""
    numbering = number_by_path(index)
    number_of = np.empty_like(rows)
    number_of[rows] = np.arange(len(rows))
    is_paired = numbering.json_rows >= 0
    beside = np.full(len(rows), -1)
    beside[number_of[numbering.samples[is_paired]]] = number_of[numbering.json_rows[is_paired]]
    return beside
