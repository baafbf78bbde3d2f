"""The entries of a sidecar index, one for each file: out of the columns of an index, and back into columns.

Both ways go by column, since a shard has ten thousand entries; an entry that is out of the ordinary is looked at key by
key, which also finds the words for what is wrong with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import IndexFileError
from shardset.formats.naming import Names
from shardset.formats.tar_header import MAX_SIZE, SparseRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .numbering import PathNumbering
    from .table import ShardIndex

    Bools = NDArray[np.bool_]
    Int64s = NDArray[np.int64]
    Entry = dict[str, Any]

ENTRY_KEYS: Final = (
    "path",
    "offset",
    "length",
    "width",
    "height",
    "aspect",
    "orientation",
    "json_path",
    "json_offset",
    "json_length",
    "captions",
    "json_metadata",
)
"""Keys of an entry that have a meaning, in the order in which they are written. Others follow, sorted."""
COLUMN_KEYS: Final = frozenset({"path", "offset", "length", "width", "height", "captions"})
"""Keys that fill columns of an index."""
DERIVED_KEYS: Final = frozenset({"aspect", "json_path", "json_offset", "json_length"})
"""Keys whose values follow from the rest of an index. `ShardIndex.extra` has them where a file says otherwise."""

ALIASES: Final = {"size": "length", "filename": "path", "fname": "path", "caption": "captions"}
"""Other names that keys have in the files of some tools."""
_NULL_IS_ABSENT: Final = frozenset({*ENTRY_KEYS, "sha256"}) - {"orientation"}
_RESERVED: Final = COLUMN_KEYS | ALIASES.keys()
TEXTS: Final = frozenset({"path", "json_path"})
"""Keys whose values are paths."""
LIMITS: Final = {
    **dict.fromkeys(("offset", "length", "json_offset", "json_length"), MAX_SIZE),
    **dict.fromkeys(("width", "height"), 2**31 - 1),
}
"""Keys whose values count bytes or pixels, and the largest of each."""
_EXACT_FLOATS: Final = 2.0**53
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def text_or_hex(text: str) -> str | dict[str, str]:
    """Return text for our section: as it is, or ``{"hex": ...}`` of its bytes where these are not UTF-8.

    A lone surrogate anywhere in a file makes strict JSON readers refuse all of it.
    """
    return {"hex": text.encode("utf-8", "surrogateescape").hex()} if has_surrogates(text) else text


def has_surrogates(text: str) -> bool:
    """Tell whether text stands for bytes that are not UTF-8."""
    return _SURROGATE.search(text) is not None


# Writing.


def write_entries(index: ShardIndex, numbering: PathNumbering) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of an index in path order: those of ``files``, and those that stand apart.

    Raises:
        IndexFileError: A field in `ShardIndex.extra` has the name of a key that a column fills.
    """
    texts = index.names.to_text_list()
    is_plain = index.offset >= 0
    if index.names.has_high_bytes():
        is_plain &= np.array([not has_surrogates(text) for text in texts], np.bool_)
    entries = _entries(index, texts, is_plain, numbering)
    order = numbering.files
    if is_plain.all():
        return [entries[row] for row in order.tolist()], []
    apart = _apart(index, entries, order[~is_plain[order]])
    return [entries[row] for row in order[is_plain[order]].tolist()], apart


def _entries(index: ShardIndex, texts: list[str], is_plain: Bools, numbering: PathNumbering) -> list[Entry]:
    """Return the entry of each row."""
    offsets, lengths = index.offset.tolist(), index.length.tolist()
    entries: list[Entry] = [
        {"path": path, "offset": offset, "length": length}
        for path, offset, length in zip(texts, offsets, lengths, strict=True)
    ]
    _add_geometry(index, entries)
    is_paired = numbering.json_rows >= 0
    is_paired &= is_plain[numbering.json_rows]  # whoever reads the file could not find one that stands apart
    rows, json_rows = numbering.samples[is_paired].tolist(), numbering.json_rows[is_paired].tolist()
    for row, json_row in zip(rows, json_rows, strict=True):
        entry = entries[row]
        entry["json_path"] = texts[json_row]
        entry["json_offset"] = offsets[json_row]
        entry["json_length"] = lengths[json_row]
    for row, captions in index.captions.items():
        if captions is not None:
            entries[row]["captions"] = captions
    for row, fields in index.extra.items():
        if len(fields) == 1 and (metadata := fields.get("json_metadata")) is not None:
            entries[row]["json_metadata"] = metadata
        else:
            entries[row] = _with_fields(entries[row], fields)
    return entries


def _with_fields(entry: Entry, fields: dict[str, Any]) -> Entry:
    """Return an entry with further fields: those that have a place in it there, the others behind, sorted."""
    if reserved := _RESERVED & fields.keys():
        raise IndexFileError(
            f"an extra field of {entry['path']!r} has the reserved name {min(reserved)!r}", hint="give it another name"
        )
    entry = entry | {key: value for key, value in fields.items() if value is not None or key not in _NULL_IS_ABSENT}
    return {key: entry.pop(key) for key in ENTRY_KEYS if key in entry} | dict(sorted(entry.items()))


def _add_geometry(index: ShardIndex, entries: list[Entry]) -> None:
    geometry = index.geometry
    if geometry is None:
        return
    width, height, orientation = geometry.width, geometry.height, geometry.orientation
    has_both = (width > 0) & (height > 0)
    rows = np.flatnonzero(has_both)
    widths, heights, aspects = width[rows], height[rows], list(aspect_ratios(width[rows], height[rows]))
    for row, w, h, aspect in zip(rows.tolist(), widths.tolist(), heights.tolist(), aspects, strict=True):
        entry = entries[row]
        entry["width"] = w
        entry["height"] = h
        entry["aspect"] = aspect
    for row in np.flatnonzero((width > 0) ^ (height > 0)).tolist():
        entries[row] |= {"width": int(width[row])} if width[row] else {"height": int(height[row])}
    # Where orientations are told at all, upright goes without saying for what has a size.
    for row in np.flatnonzero(orientation != (has_both & orientation.any())).tolist():
        entries[row]["orientation"] = int(orientation[row])


def aspect_ratios(width: NDArray[np.integer], height: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return width by height as webshart has it, in single precision."""
    ratios: NDArray[np.float32] = np.divide(width, height, dtype=np.float32)
    return ratios


def _apart(index: ShardIndex, entries: list[Entry], rows: Int64s) -> list[Entry]:
    """Return the entries of files that other readers cannot be told of."""
    apart = []
    for row in rows.tolist():
        entry = entries[row].copy()
        item: Entry = {"path": text_or_hex(entry.pop("path"))}
        if row in index.sparse:
            del entry["offset"]
            item["row"] = row
            item["pieces"] = [list(piece) for piece in index.sparse[row]]
        apart.append(item | {"entry": entry})
    return apart


# Reading.


class MalformedError(ValueError):
    """Says what is wrong with an index file; whoever knows the file's name makes an `IndexFileError` of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Entries that have the same keys.

    Attributes:
        numbers: int64, which entries of the file these are, counted from 0.
        columns: The values of each key, one for each of `numbers`: int64 and float64 for numbers that have a meaning,
            else lists. Other names of a key were replaced by it.
    """

    numbers: Int64s
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Checked entries of an index file, in the order of the file; those that stand apart come last.

    Attributes:
        paths: The path of each; bytes that are not UTF-8 are surrogate escapes.
        names: The same as bytes.
        offset: int64, byte offset of the payload; -1 for a sparse file.
        length: int64, bytes of the payload.
        groups: All keys and values.
        sparse: For each sparse file, by number, where its pieces lie.
        sparse_row: For each sparse file, by number, its row in the index.
    """

    paths: list[str]
    names: Names
    offset: Int64s
    length: Int64s
    groups: list[Group]
    sparse: dict[int, tuple[SparseRow, ...]] = field(default_factory=dict)
    sparse_row: dict[int, int] = field(default_factory=dict)


def read_entries(files: dict[str, Any] | list[Any], apart: Sequence[Any] = ()) -> Entries:
    """Check the entries of an index file.

    Args:
        files: The file's ``files``, by path or as a list.
        apart: The entries of our section that stand apart.

    Raises:
        MalformedError: An entry lacks a key that it needs, or a value is of a wrong type or out of range.
    """
    keys = list(files) if isinstance(files, dict) else None
    listed = list(files.values()) if isinstance(files, dict) else files
    if not apart and (entries := _by_column(keys, listed)) is not None:
        return entries
    checked: list[Entry] = []
    for number, entry in enumerate(listed):
        key = None if keys is None else keys[number]
        label = _label(number, entry) if key is None else f"entry {show(key)}"
        fields = _check(label, entry)
        if key is not None and "path" not in fields:
            fields["path"] = _check_value(f"{label}: its path", "path", key)
        checked.append(_complete(label, fields))
    sparse, sparse_row = {}, {}
    for number, item in enumerate(apart, len(listed)):
        label = f"{_label(number - len(listed), item)} of those apart"
        if not isinstance(item, dict):
            raise MalformedError(f"{label} is {show(item)}, not an object")
        fields = _check(label, item.get("entry")) | {"path": read_text_or_hex(f"{label}: path", item.get("path"))}
        if "pieces" in item:
            fields["offset"] = 0
            sparse[number] = _check_pieces(label, item["pieces"], fields.get("length", 0))
            sparse_row[number] = check_whole(f"{label}: row", item.get("row"), len(listed) + len(apart) - 1)
        checked.append(_complete(label, fields))
    if len(set(sparse_row.values())) < len(sparse_row):
        raise MalformedError("two of the entries apart have one row")
    entries = _by_column(None, checked)
    assert entries is not None  # noqa: S101 - each value was checked
    entries.offset[list(sparse)] = -1
    return replace(entries, sparse=sparse, sparse_row=sparse_row)


def _label(number: int, entry: Any) -> str:
    path = entry.get("path") if isinstance(entry, dict) else None
    return f"entry {number}" if path is None else f"entry {number} ({show(path)})"


def show(value: Any) -> str:
    """Return a JSON value for a message: short, and without looking into it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _by_column(keys: list[str] | None, entries: list[Any]) -> Entries | None:
    """Check entries a column at a time; None if any is not as it should be, or needs a closer look."""
    if not {dict}.issuperset(map(type, entries)):
        return None
    paths = [""] * len(entries) if keys is None else keys.copy()
    offset, length = np.empty(len(entries), np.int64), np.empty(len(entries), np.int64)
    groups = []
    for numbers, given in _alike(entries):
        columns = _checked(given)
        if columns is None or "offset" not in columns or "length" not in columns:
            return None
        if "path" in columns:
            for number, path in zip(numbers.tolist(), columns["path"], strict=True):
                paths[number] = path
        elif keys is None:
            return None
        offset[numbers], length[numbers] = columns["offset"], columns["length"]
        groups.append(Group(numbers, columns))
    try:
        return Entries(paths, _to_names(paths), offset, length, groups)
    except UnicodeEncodeError:
        return None


def _to_names(texts: list[str]) -> Names:
    joined = "".join(texts)
    if joined.isascii():
        return Names.from_lengths(joined.encode(), np.fromiter(map(len, texts), np.int64, len(texts)))
    return Names.of(text.encode("utf-8", "surrogateescape") for text in texts)


def _alike(entries: list[Entry]) -> Iterator[tuple[Int64s, dict[str, list[Any]]]]:
    """Yield entries that have the same keys: their numbers, and their values by key."""
    sizes = np.fromiter(map(len, entries), np.int64, len(entries))
    order = np.argsort(sizes, kind="stable")
    for numbers in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1) if entries else ():
        same = [entries[number] for number in numbers.tolist()]
        try:  # Of one size and with all keys of the first: then with the same keys.
            yield numbers, {key: list(map(itemgetter(key), same)) for key in same[0]}
        except KeyError:
            shapes: dict[tuple[str, ...], list[int]] = {}
            for number in numbers.tolist():
                shapes.setdefault(tuple(entries[number]), []).append(number)
            for shape, members in shapes.items():
                yield np.array(members), {key: [entries[number][key] for number in members] for key in shape}


def _checked(given: dict[str, list[Any]]) -> dict[str, Any] | None:
    """Return columns under the names that we have for their keys; None if a value is not as it should be."""
    columns: dict[str, Any] = {}
    for name, values in given.items():
        key = ALIASES.get(name, name)
        kinds = set(map(type, values))
        if type(None) in kinds and key in _NULL_IS_ABSENT:
            if len(kinds) > 1:
                return None
            continue
        column = None if key in columns else _column(key, values, kinds)
        if column is None:
            return None
        columns[key] = column
    return columns


def _column(key: str, values: list[Any], kinds: set[type]) -> NDArray[Any] | list[Any] | None:
    """Return the values of a key, which are of some types, as a column; None if one is not as it should be."""
    if key in LIMITS:
        return _counts(values, LIMITS[key]) if kinds == {int} else None
    if key == "aspect":
        ratios = np.array(values if kinds == {float} else [np.inf], np.float64)
        return ratios if bool((np.abs(ratios) <= MAX_SIZE).all()) else None
    if key in TEXTS:
        return values if kinds == {str} else None
    if key == "captions" and not kinds <= {str, dict} and not all(map(_are_captions, values)):
        return None
    return values


def _counts(values: list[int], limit: int) -> Int64s | None:
    try:
        counts = np.array(values, np.int64)
    except OverflowError:
        return None
    return counts if counts.min() >= 0 and counts.max() <= limit else None


def _are_captions(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str | dict) for item in value)
    return isinstance(value, str | dict)


def _check(label: str, entry: Any) -> Entry:
    """Return an entry with the names of its keys as we have them and its values checked."""
    if not isinstance(entry, dict):
        raise MalformedError(f"{label} is {show(entry)}, not an object")
    checked: Entry = {}
    for given, value in entry.items():
        key: str = ALIASES[given] if given in ALIASES else given  # noqa: SIM401 - the checker of types is lost in get
        if value is None and key in _NULL_IS_ABSENT:
            continue
        good = _check_value(f"{label}: {given}", key, value)
        if key in checked and (key == "captions" or checked[key] != good):
            raise MalformedError(f"{label} has its {key} twice, under two names")
        checked[key] = good
    return checked


def _complete(label: str, fields: Entry) -> Entry:
    for key in ("path", "offset", "length"):
        if key not in fields:
            raise MalformedError(f"{label} has no {key}")
    return fields


def _check_value(what: str, key: str, value: Any) -> Any:
    """Return a value as it should be; `what` names it for the message."""
    if key in LIMITS:
        return check_whole(what, value, LIMITS[key])
    if key in TEXTS:
        text = _check_text(what, value)
        return read_text_or_hex(what, text) if key == "path" else text
    if key == "captions" and not _are_captions(value):
        raise MalformedError(f"{what} is {show(value)}; captions are texts, objects, or a list of them")
    if key == "aspect":
        if type(value) not in {int, float} or abs(value) > MAX_SIZE:
            raise MalformedError(f"{what} is {show(value)}")
        return float(value)
    return value


def check_whole(what: str, value: Any, limit: int) -> int:
    """Return a number that counts bytes or pixels; `what` names it for the message.

    Raises:
        MalformedError: It is not whole, is negative, or is above `limit`.
    """
    if type(value) is float and value.is_integer() and abs(value) <= _EXACT_FLOATS:
        value = int(value)
    if type(value) is not int or value < 0:
        raise MalformedError(f"{what} is {show(value)}")
    if value > limit:
        raise MalformedError(f"{what} is {show(value)}, above {limit}")
    return value


def _check_text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"{what} is {show(value)}, not a text")
    return value


def read_text_or_hex(what: str, value: Any) -> str:
    """Return text that `text_or_hex` wrote; `what` names it for the message.

    Raises:
        MalformedError: It is neither text nor bytes in hex, or text that stands for no bytes.
    """
    try:
        if isinstance(value, dict) and isinstance(value.get("hex"), str):
            return bytes.fromhex(value["hex"]).decode("utf-8", "surrogateescape")
        _check_text(what, value).encode("utf-8", "surrogateescape")
    except (UnicodeEncodeError, ValueError) as error:
        if isinstance(error, MalformedError):
            raise
        raise MalformedError(f"{what} is {show(value)}, which stands for no bytes") from error
    return str(value)


def _check_pieces(label: str, pieces: Any, size: int) -> tuple[SparseRow, ...]:
    if not isinstance(pieces, list):
        raise MalformedError(f"{label}: pieces is {show(pieces)}, not a list")
    rows, end = [], 0
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 3:
            raise MalformedError(f"{label}: a piece is no list of three numbers")
        row = SparseRow(*(check_whole(f"{label}: a number of a piece", number, MAX_SIZE) for number in piece))
        if row.logical < end or row.logical + row.length > size:
            raise MalformedError(f"{label}: the piece at {row.logical} overlaps or passes the end of the file")
        end = row.logical + row.length
        rows.append(row)
    return tuple(rows)
