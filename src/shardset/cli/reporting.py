"""What commands that work through many shards show: how far they are, and what they met on the way."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from .program import MisuseError, Settings
from .text import clean, counted, name_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardset.policy import Report

_PLACES_SHOWN: Final = 3


@contextmanager
def progress_bar(settings: Settings, doing: str, unit: str = "shards") -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that shows how much is done of how much, where somebody looks; of 0 means that nobody knows."""
    if settings.quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def finding_lines(report: Report) -> Iterator[str]:
    """Yield a report as lines: each kind with its count, and below it the first places."""
    for code, count, places in report:
        yield f"{code}: {counted(count, 'finding')}"
        for place in places[:_PLACES_SHOWN]:
            yield f"  {place}"
        if places and count > _PLACES_SHOWN:
            yield f"  ... and {count - min(len(places), _PLACES_SHOWN):,} more"


def findings_document(report: Report) -> list[dict[str, Any]]:
    """Return a report for JSON."""
    return [
        {
            "code": code,
            "count": count,
            "places": [
                {
                    **(name_fields("shard", place.shard) if place.shard is not None else {"shard": None}),
                    "offset": place.offset,
                    "member": None if place.key is None else clean(place.key),
                    "message": clean(place.message),
                }
                for place in places
            ],
        }
        for code, count, places in report
    ]


@contextmanager
def misuse(hint: str) -> Iterator[None]:
    """Turn an error about an argument into one of usage, with a hint at what to write instead."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise MisuseError(str(error), hint) from error


def _parse_range(text: str) -> tuple[int, int]:
    from shardset.webshart.commands import parse_range  # noqa: PLC0415 - loaded by the commands that have this option

    try:
        return parse_range(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


RANGE_OPTION: Final = click.option(
    "--range", "shard_range", type=_parse_range, metavar="START,END", help="Take only these shards, half-open."
)
TOKEN_OPTION: Final = click.option(
    "--hf-token", metavar="TOKEN", help="Token for the Hugging Face Hub; by default that in HF_TOKEN."
)
ON_ERROR_OPTION: Final = click.option(
    "--on-error",
    type=click.Choice(["raise", "warn", "skip"]),
    default="raise",
    help="At a damaged shard: stop, or index it up to the damage with or without a warning.  [default: raise]",
)
