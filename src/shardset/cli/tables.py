"""Lists of things: a table at a terminal, and tab-separated lines with exact numbers anywhere else."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import islice
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

import click

from .text import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

LIMIT: Final = 100
"""Rows that a terminal is given unless more are asked for."""
_MOST_IN_A_TABLE: Final = 2_000
_NARROWEST: Final = 12
_GAP: Final = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its title.
        is_right: Align to the right, as numbers are.
        is_flexible: Cut its texts where the terminal is too narrow.
        is_path: Cut them at the beginning, since what tells paths and keys apart stands at their end.
        show: Turns a value into the text of a cell; lines for programs have the value itself.
    """

    name: str
    is_right: bool = False
    is_flexible: bool = False
    is_path: bool = False
    show: Callable[[Any], str] = str


def at_terminal() -> bool:
    """Tell whether results are printed for eyes."""
    return sys.stdout.isatty()


def bold(text: str) -> str:
    """Return text that stands out at a terminal, unless ``NO_COLOR`` is set."""
    return text if os.environ.get("NO_COLOR") else click.style(text, bold=True)


def row_limit(limit: int | None) -> int | None:
    """Return how many rows to print; None for all. Not given means a screenful at a terminal; 0 means all."""
    if limit is None:
        return LIMIT if at_terminal() else None
    return limit or None


def print_list(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
    """Print a list, a value or None for each column: as a table at a terminal, else as tab-separated lines.

    A list that is too long for a table that could be read is printed as plain lines at a terminal too.
    """
    rows = iter(rows)
    first = list(islice(rows, _MOST_IN_A_TABLE + 1)) if at_terminal() else []
    if first and len(first) <= _MOST_IN_A_TABLE:
        print_table(columns, first)
        return
    for several in (first, rows):
        for row in several:
            click.echo("\t".join("" if value is None else printable(str(value)) for value in row))


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table with titles; nothing if it has no rows. Away from a terminal nothing is cut."""
    if not rows:
        return
    width = get_terminal_size().columns if at_terminal() else None
    titles, *lines = layout_table(columns, rows, width)
    click.echo(bold(titles))
    for line in lines:
        click.echo(line)


def layout_table(columns: Sequence[Column], rows: Sequence[Sequence[Any]], width: int | None) -> Iterator[str]:
    """Yield the lines of a table, its titles first, in at most `width` columns of the terminal where that can be."""
    from rich.cells import cell_len, set_cell_size

    cells = [[column.name for column in columns]]
    cells += [
        ["" if value is None else printable(column.show(value)) for column, value in zip(columns, row, strict=True)]
        for row in rows
    ]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width if width else 0
    for at in sorted(range(len(columns)), key=lambda at: -widths[at]):
        if excess > 0 and columns[at].is_flexible:
            kept = max(widths[at] - excess, min(_NARROWEST, widths[at]))
            excess -= widths[at] - kept
            widths[at] = kept
    for row in cells:
        fitted = []
        for text, column, room in zip(row, columns, widths, strict=True):
            if cell_len(text) > room:
                cut = set_cell_size(text[::-1] if column.is_path else text, room - 1)
                fitted.append(f"…{cut[::-1]}" if column.is_path else f"{cut}…")
            else:
                space = " " * (room - cell_len(text))
                fitted.append(space + text if column.is_right else text + space)
        yield _GAP.join(fitted).rstrip()


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print what is known (not None) below each other, each behind its label."""
    known = [(label, one_line(str(value))) for label, value in facts if value is not None]
    indent = max(len(label) for label, _ in known) + len(_GAP)
    room = get_terminal_size().columns - indent if at_terminal() else 0
    for label, text in known:
        lines = wrap(text, room, break_long_words=False, break_on_hyphens=False) if room > _NARROWEST else [text]
        click.echo(bold(label.ljust(indent)) + f"\n{' ' * indent}".join(lines))
