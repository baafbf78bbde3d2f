"""``shardset extract-metadata``: webshart's command, an index for each shard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import click

from shardset.policy import Policy
from shardset.webshart.extraction import MetadataExtractor

from .program import Command, Settings
from .reporting import (
    ON_ERROR_OPTION,
    RANGE_OPTION,
    TOKEN_OPTION,
    finding_lines,
    findings_document,
    misuse,
    progress_bar,
)
from .text import counted, dump_json, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardset.tasks import ExtractResult


@click.command(
    "extract-metadata",
    cls=Command,
    examples=[
        (
            "shardset extract-metadata --source shards/ --destination indexes/ --include-image-geometry",
            "an index for each shard, with the pixel sizes of its images, in another folder",
        ),
        ("shardset extract-metadata --source shards/ --destination shards/", "the indexes go beside their shards"),
        (
            "shardset extract-metadata --source shards/ --destination indexes/ --range 0,1000 --checkpoint-dir done/",
            "the first thousand shards, on one of several machines; the next run passes over those that are done",
        ),
    ],
)
@click.option("--source", required=True, help="Folder with shards at any depth, a shard, or a glob.")
@click.option(
    "--destination", required=True, help="Folder for the indexes, laid out like the source; it may be the source."
)
@click.option(
    "--checkpoint-dir",
    type=click.Path(file_okay=False),
    help="Folder for files that say which shards are done, so that the next run need not open them.",
)
@click.option(
    "--max-workers",
    type=click.IntRange(min=0),
    default=4,
    metavar="N",
    help="The most processes to use; little data is done in one.  [default: 4]",
)
@TOKEN_OPTION
@RANGE_OPTION
@click.option("--include-image-geometry", is_flag=True, help="Read the pixel sizes of images too.")
@ON_ERROR_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(
    settings: Settings,
    *,
    source: str,
    destination: str,
    checkpoint_dir: str | None,
    max_workers: int,
    hf_token: str | None,
    shard_range: tuple[int, int] | None,
    include_image_geometry: bool,
    on_error: Literal["raise", "warn", "skip"],
    as_json: bool,
) -> None:
    """Write an index for each shard, with its captions.

    Indexes that are there and fit their shards are kept; an interrupted run is simply run again. "shardset index" does
    the same and makes a catalog too.
    """
    hint = "a source is a folder, a shard, a glob, or a pattern in braces"
    with progress_bar(settings, "indexing") as progress, misuse(hint):
        result = MetadataExtractor(hf_token or os.environ.get("HF_TOKEN")).extract_metadata(
            source,
            destination,
            checkpoint_dir,
            max_workers,
            shard_range,
            include_image_geometry,
            policy=Policy(on_error=on_error),
            progress=progress,
        )
    if as_json:
        document = {
            "num_shards": result.num_shards,
            "indexes_written": result.indexes_written,
            "shards_skipped": result.shards_skipped,
            "findings": findings_document(result.report),
        }
        click.echo(dump_json(document))
        return
    for line in _summary(result, destination):
        click.echo(printable(line))


def _summary(result: ExtractResult, destination: str) -> Iterator[str]:
    skipped = f"; {counted(result.shards_skipped, 'shard')} done before" if result.shards_skipped else ""
    yield f"{counted(result.num_shards, 'shard')} indexed into {destination}"
    yield f"indexes written: {result.indexes_written:,}{skipped}"
    yield from finding_lines(result.report)
