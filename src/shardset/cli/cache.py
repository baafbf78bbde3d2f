"""``shardset cache``: the shards, or blocks of shards, that are kept on this machine's disk."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from shardset.storage.cache_upkeep import clear, default_folder, list_entries, verify

from .failures import ExitCode
from .program import Command, note
from .tables import Column, at_terminal, print_list, row_limit
from .text import clean, counted, dump_json, human_size

if TYPE_CHECKING:
    from shardset.storage.cache_files import FoundEntry

_DAY: Final = 86_400.0
_FOLDER: Final = click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/json.md describes it.")


def _age(used: float) -> str:
    """Return about how long ago something was used."""
    seconds = max(0.0, time.time() - used)
    for unit, length in (("d", _DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


_COLUMNS: Final = (
    Column("object", is_flexible=True, is_path=True),
    Column("bytes", is_right=True),
    Column("size", is_right=True, show=human_size),
    Column("used", is_right=True, show=_age),
    Column("state"),
)


class _Group(Command, click.Group):
    """A command made of commands."""


@click.group(
    "cache",
    cls=_Group,
    examples=[
        ("shardset cache ls", "what is cached, the last used first"),
        ("shardset cache clear --older-than 30", "remove what nobody has used for 30 days"),
        ("shardset cache verify", "compare all that is cached with its digests"),
    ],
)
def command() -> None:
    """Look at cached shards, clear them, or check them.

    FOLDER is where a cache was set up; by default it is shards/ in the folder that SHARDSET_CACHE names, or in
    shardset/ below the user's cache folder. All of this may be done while the cache is in use.
    """


@command.command(
    "ls",
    cls=Command,
    examples=[
        ("shardset cache ls", "a table, the last used first"),
        ("shardset cache ls /scratch/shards --json | jq -r .url", "the urls alone"),
    ],
)
@_FOLDER
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), metavar="N", help="Rows to list; 0 lists all. At a terminal 100."
)
@_JSON
def ls(folder: Path | None, *, limit: int | None, as_json: bool) -> None:
    """List what is cached.

    Bytes are the range of the object that an entry holds, half-open. Away from a terminal the columns are separated by
    tabs, sizes are in bytes, and times are seconds since 1970.
    """
    entries = [] if _is_new(folder) else list_entries(folder or default_folder())
    if as_json:
        for entry in entries[: limit or None]:
            click.echo(dump_json(entry_document(entry), is_line=True))
        return
    shown = row_limit(limit)
    print_list(_COLUMNS, map(_row, entries[:shown]))
    if shown is not None and shown < len(entries):
        note(f"... and {len(entries) - shown:,} more (--limit 0 lists all)")
    elif at_terminal():
        total = human_size(sum(entry.bytes for entry in entries))
        note(f"{_entries(len(entries))}, {total}, in {folder or default_folder()}")


@command.command(
    "clear",
    cls=Command,
    examples=[
        ("shardset cache clear", "remove all that nobody reads now"),
        ("shardset cache clear --older-than 7", "remove what was last used a week ago or earlier"),
    ],
)
@_FOLDER
@click.option(
    "--older-than", type=click.FloatRange(min=0), metavar="DAYS", help="Keep what was used within so many days."
)
@_JSON
def clear_(folder: Path | None, *, older_than: float | None, as_json: bool) -> None:
    """Remove what is cached, except what is being read or downloaded now."""
    if _is_new(folder):
        found: dict[str, Any] = {"removed": 0, "bytes": 0, "in_use": 0, "leftovers": 0}
    else:
        done = clear(folder or default_folder(), older_than=(older_than or 0.0) * _DAY)
        found = {"removed": done.removed, "bytes": done.bytes, "in_use": done.in_use, "leftovers": done.leftovers}
    if as_json:
        click.echo(dump_json(found))
        return
    click.echo(f"{_entries(found['removed'])} removed, {human_size(found['bytes'])}")
    if found["in_use"]:
        click.echo(f"in use, not removed: {_entries(found['in_use'])}")
    _say_leftovers(found["leftovers"])


@command.command(
    "verify",
    cls=Command,
    examples=[
        ("shardset cache verify", "read all entries; exit code 1 if one was damaged"),
        ("shardset cache verify /scratch/shards --json", "a report for programs"),
    ],
)
@_FOLDER
@_JSON
def verify_(folder: Path | None, *, as_json: bool) -> int:
    """Compare what is cached with its digests, and remove what is damaged.

    What is removed is downloaded again when it is needed.
    """
    if _is_new(folder):
        found: dict[str, Any] = {"checked": 0, "bytes": 0, "damaged": [], "leftovers": 0}
    else:
        done = verify(folder or default_folder())
        damaged = [entry_document(entry) for entry in done.damaged]
        found = {"checked": done.checked, "bytes": done.bytes, "damaged": damaged, "leftovers": done.leftovers}
    if as_json:
        click.echo(dump_json(found))
    else:
        print_list(_COLUMNS, map(_row, [] if _is_new(folder) else done.damaged))
        note(f"{_entries(found['checked'])} checked, {human_size(found['bytes'])}; {len(found['damaged']):,} damaged")
        _say_leftovers(found["leftovers"])
    return ExitCode.FINDINGS if found["damaged"] else ExitCode.FINE


def entry_document(entry: FoundEntry) -> dict[str, Any]:
    """Return what ``--json`` prints of an entry."""
    info = entry.info
    return {
        "url": clean(info.url) if info else None,
        "identity": clean(info.identity) if info else None,
        "size": info.size if info else None,
        "offset": info.offset if info else None,
        "length": info.length if info else None,
        "digest": f"blake2b:{info.digest}" if info else None,
        "created": _moment(info.created) if info else None,
        "used": _moment(entry.used),
        "in_use": entry.is_in_use,
        "bytes": entry.bytes,
        "file": f"{entry.name}.block",
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def _row(entry: FoundEntry) -> tuple[Any, ...]:
    state = "in use" if entry.is_in_use else None
    if entry.info is None:
        return f"{entry.name}.block", None, entry.bytes, entry.used, "damaged"
    info = entry.info
    held = "all" if info.length == info.size else f"{info.offset}-{info.offset + info.length}"
    return info.url, held, entry.bytes, entry.used, state


def _is_new(folder: Path | None) -> bool:
    """Tell whether nothing was ever cached in the default folder, which is no error."""
    return folder is None and not default_folder().exists()


def _entries(number: int) -> str:
    return counted(number, "entry").replace("entrys", "entries")


def _say_leftovers(number: int) -> None:
    if number:
        note(f"left by downloads that were killed, removed: {counted(number, 'file')}")
