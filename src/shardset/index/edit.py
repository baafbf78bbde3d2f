"""Edits of sidecar indexes: a field gets another name, entries get captions. From the bytes of a file to new bytes.

An edit touches what it is about and nothing else: unknown keys, the order of keys, both forms of ``files`` and our own
section stay. Offsets and paths cannot be edited, so an index is afterwards trusted as it was before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import IndexFileError

from .document import collector_paused, dump_document, load_document
from .plain_entries import is_plain_column
from .sidecar import check_document, plain_entries
from .sidecar_entries import ALIASES, MalformedError, read_text_or_hex, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardset.formats.captions import Captions

    from .plain_entries import PlainGroup

    Entry = dict[str, Any]

STRUCTURAL: Final = frozenset(
    {"path", "filename", "fname", "offset", "length", "size", "json_path", "json_offset", "json_length"}
)
"""Keys of an entry that say what and where a file is. They cannot be renamed, nor can another key take their name."""
_CAPTIONS: Final = "captions"
_CAPTION_NAMES: Final = (_CAPTIONS, "caption")
"""The key that captions are stored under, and its other name."""
PATH_NAMES: Final = ("path", "filename", "fname")
"""The key of an entry's path, and its other names."""
_HINT: Final = "mend the file, or index the shard again"


@dataclass(frozen=True, slots=True)
class Edited:
    """An index file after an edit.

    Attributes:
        payload: Its bytes; the same object as before where nothing was edited.
        count: How many entries were edited.
    """

    payload: bytes
    count: int


def check_field_names(old_name: str, new_name: str) -> None:
    """Refuse names that `rename_in_index` cannot be given.

    Raises:
        ValueError: A name is blank, or that of a structural field.
    """
    for name in (old_name, new_name):
        if not name.strip():
            raise ValueError("Field names must not be empty")
        if name in STRUCTURAL:
            raise ValueError(f"Cannot rename structural index field {name!r}, which says what or where a file is")


def rename_in_index(
    payload: bytes, old_name: str, new_name: str, *, overwrite: bool = False, shard: str, path: str
) -> Edited:
    """Give a field of the entries of an index file another name. Entries without it stay as they are.

    The field goes to the end of its entry, as in webshart. ``captions`` stands for what is stored as ``caption`` too,
    since these are two names of one field; ``caption`` means the key of that name alone.

    Args:
        payload: The file's bytes.
        old_name: The field.
        new_name: Its new name.
        overwrite: Drop a field that has the new name already.
        shard: The shard's name, for messages.
        path: The file's path or url, for messages.

    Raises:
        ValueError: A name is blank or structural, or an entry has a field of the new name already.
        IndexFileError: The file is malformed, or would be, since a value does not fit the new name.
    """
    check_field_names(old_name, new_name)
    renamed = 0
    with collector_paused():
        try:
            document = load_document(payload, exact=True)
            groups = plain_entries(document)
            if groups is not None and _can_rename(groups, old_name, new_name):
                renamed = _rename_plain(groups, old_name, new_name)
            else:
                renamed = _rename(document, old_name, new_name, overwrite=overwrite, shard=shard)
                check_document(document)
        except MalformedError as error:
            if renamed:
                check_index(payload, path=path)
                what = f"{old_name!r} cannot become {new_name!r}: {error}"
                raise IndexFileError(what, path=path, hint="choose another name") from error
            raise IndexFileError(str(error), path=path, hint=_HINT) from error
        return Edited(dump_like(document, payload), renamed) if renamed else Edited(payload, 0)


def check_index(payload: bytes, *, path: str) -> None:
    """Check an index file, all but its digest.

    Raises:
        IndexFileError: It is malformed; the message names the entry and the key.
    """
    try:
        check_document(load_document(payload))
    except MalformedError as error:
        raise IndexFileError(str(error), path=path, hint=_HINT) from error


def dump_like(document: dict[str, Any], payload: bytes) -> bytes:
    """Return the bytes of an edited index file: indented if `payload`, what it was before, is so.

    Raises:
        As `dump_document`.
    """
    return dump_document(document, indent=payload[:64].lstrip(b"\xef\xbb\xbf{ \t").startswith((b"\n", b"\r\n")))


def _can_rename(groups: list[PlainGroup], old_name: str, new_name: str) -> bool:
    """Tell whether a field of plain entries can be renamed with no more ado."""
    key = ALIASES.get(new_name, new_name)
    return old_name != new_name and not any(
        not group.columns.keys().isdisjoint((new_name, key) if key != old_name else (new_name,))
        or not is_plain_column(key, group.columns[old_name])
        for group in groups
        if old_name in group.columns
    )


def _rename_plain(groups: list[PlainGroup], old_name: str, new_name: str) -> int:
    count = 0
    for group in groups:
        if old_name in group.columns:
            for entry in group.entries:
                entry[new_name] = entry.pop(old_name)
            count += len(group.entries)
    return count


def _rename(document: dict[str, Any], old_name: str, new_name: str, *, overwrite: bool, shard: str) -> int:
    """Rename a field of all entries that have it, and tell how many these are.

    Raises:
        ValueError: An entry has a field of the new name already.
        MalformedError: An entry has its captions under both names.
    """
    also_old = _other_name(old_name) if old_name == _CAPTIONS else None
    also_new = _other_name(new_name)
    count = 0
    for given, entry in iter_entries(document) if old_name != new_name else ():
        stored = old_name
        if also_old is not None and also_old in entry:
            stored = _stored_name(given, entry)
        if stored not in entry or stored == new_name:
            continue
        if new_name in entry or (also_new is not None and also_new in entry and also_new != stored):
            _make_room(given, entry, new_name, overwrite=overwrite, shard=shard, stored=stored)
        entry[new_name] = entry.pop(stored)
        count += 1
    return count


def _other_name(name: str) -> str | None:
    return {"captions": "caption", "caption": "captions"}.get(name)


def _stored_name(given: Any, entry: Entry) -> str:
    """Return the key that an entry has its captions under."""
    known = [name for name in _CAPTION_NAMES if entry.get(name) is not None]
    if len(known) > 1:
        raise MalformedError(f"entry {show(path_of(given, entry))} has its captions twice, under two names")
    return known[0] if known else next(name for name in _CAPTION_NAMES if name in entry)


def _make_room(given: Any, entry: Entry, new_name: str, *, overwrite: bool, shard: str, stored: str) -> None:
    """Drop what has the name that a field is to get, if that is allowed.

    Raises:
        ValueError: It is not.
    """
    for name in (new_name, _other_name(new_name)):
        if name is None or name == stored or name not in entry:
            continue
        is_nothing = name != new_name and entry[name] is None
        if not overwrite and not is_nothing:
            under = "" if name == new_name else f" under the name {name!r}"
            raise ValueError(
                f"Field {new_name!r} already exists{under} in shard {shard!r}, entry {show(path_of(given, entry))}; "
                "use overwrite=True to replace it"
            )
        del entry[name]


def add_captions(document: dict[str, Any], captions: Mapping[str, Captions]) -> int:
    """Write captions into the entries of an index that have none, in place.

    Args:
        document: The JSON object of an index file that was found good.
        captions: Captions by path; bytes of it that are not UTF-8 are surrogate escapes.

    Returns:
        How many entries were given captions.
    """
    count = 0
    for given, entry in iter_entries(document):
        if entry.get("captions") is not None or entry.get("caption") is not None:
            continue
        value = captions.get(path_of(given, entry))
        if value is not None:
            entry.pop("caption", None)
            entry["captions"] = value
            count += 1
    return count


def iter_entries(document: Mapping[str, Any]) -> Iterator[tuple[Any, Entry]]:
    """Yield each entry that is an object, with what stands for it outside: its key, its number, or its path.

    Those that stand apart, in our section, come last.
    """
    files, section = document.get("files"), document.get("shardset")
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(files, dict | list):
        pairs = files.items() if isinstance(files, dict) else enumerate(files)
    for given, entry in pairs:
        if type(entry) is dict:
            yield given, entry
    apart = section.get("apart") if isinstance(section, dict) else None
    for item in apart if isinstance(apart, list) else ():
        if isinstance(item, dict) and isinstance(item.get("entry"), dict):
            yield item.get("path"), item["entry"]


def path_of(given: Any, entry: Entry) -> str:
    """Return the path of an entry: what it says itself, under any name of the key, or else what stands for it.

    An entry of a list that says nothing is called by its number.
    """
    path = entry.get("path")
    if type(path) is str:
        return path
    for value in (*map(entry.get, PATH_NAMES), given):
        if isinstance(value, str | dict):
            try:
                return read_text_or_hex("path", value)
            except MalformedError:
                return show(value)
    return f"number {given}"
