"""``shardset index``: a sidecar index beside each shard, and a catalog of all."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import click

from shardset.policy import Policy
from shardset.tasks import index_dataset

from .program import Command, Settings
from .reporting import ON_ERROR_OPTION, finding_lines, findings_document, misuse, progress_bar
from .text import clean, counted, dump_json, human_size, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardset.tasks import IndexResult


@click.command(
    "index",
    cls=Command,
    examples=[
        ("shardset index photos/ --geometry", "all shards below a folder, with the pixel sizes of their images"),
        ("shardset index photos/ --destination indexes/", "leave the folder as it is; the indexes go elsewhere"),
        ("shardset index records/ --text-index", "TFRecord shards, with an index for DALI beside each"),
        ("shardset index photos/ --on-error skip --json", "damaged shards up to their damage; a report for programs"),
    ],
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "-d",
    "--destination",
    type=click.Path(file_okay=False),
    help="Folder for the indexes and the catalog, laid out like the source. By default they go beside the shards.",
)
@click.option("--geometry/--no-geometry", help="Read the pixel sizes of images too.  [default: no]")
@click.option("--captions/--no-captions", default=True, help="Read .json and .txt members too.  [default: yes]")
@click.option("--sidecars/--no-sidecars", default=True, help="Write a JSON index for each shard.  [default: yes]")
@click.option("--text-index", is_flag=True, help="Write DALI's index (.idx) of TFRecord shards too.")
@click.option(
    "-j",
    "--workers",
    type=click.IntRange(min=0),
    metavar="N",
    help="Processes; 0 is this one. By default as many as pay.",
)
@click.option("-f", "--force", is_flag=True, help="Do all of it again, and write over files that are no indexes.")
@ON_ERROR_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(
    settings: Settings,
    *,
    sources: tuple[str, ...],
    destination: str | None,
    geometry: bool,
    captions: bool,
    sidecars: bool,
    text_index: bool,
    workers: int | None,
    force: bool,
    on_error: Literal["raise", "warn", "skip"],
    as_json: bool,
) -> None:
    """Index shards, so that any sample can be read at once.

    Each shard gets an index beside it (photos-00000.json for photos-00000.tar), and the folder a catalog of all samples
    in .shardset/. What a catalog knows already, unchanged, is taken over; an interrupted run is simply run again.
    """
    source = sources[0] if len(sources) == 1 else list(sources)
    hint = "a source is a folder, a shard, a glob, or a pattern in braces"
    with progress_bar(settings, "indexing") as progress, misuse(hint):
        result = index_dataset(
            source,
            destination=destination,
            captions=captions,
            geometry=geometry,
            sidecars=sidecars,
            text_index=text_index,
            force=force,
            workers=workers,
            policy=Policy(on_error=on_error),
            progress=progress,
        )
    if as_json:
        click.echo(dump_json(index_document(result)))
        return
    for line in _summary(result, source if isinstance(source, str) else destination or source[0]):
        click.echo(printable(line))


def index_document(result: IndexResult) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    catalog = result.catalog
    return {
        "num_shards": catalog.num_shards,
        "num_samples": catalog.num_samples,
        "num_files": catalog.num_files,
        "size": _total_size(result),
        "sidecars_written": result.sidecars_written,
        "shards_reused": result.shards_reused,
        "catalog": clean(str(result.folder)),
        "findings": findings_document(result.report),
    }


def _total_size(result: IndexResult) -> int:
    catalog = result.catalog
    return sum(int(catalog.group(number).shard_sizes.sum()) for number in range(catalog.num_groups))


def _summary(result: IndexResult, source: str) -> Iterator[str]:
    catalog = result.catalog
    held = f"{counted(catalog.num_samples, 'sample')} in {counted(catalog.num_files, 'file')}"
    yield f"{counted(catalog.num_shards, 'shard')} indexed: {held}, {human_size(_total_size(result))}"
    reused = f"; {counted(result.shards_reused, 'shard')} unchanged since the last time" if result.shards_reused else ""
    yield f"sidecar indexes written: {result.sidecars_written:,}{reused}"
    yield f"catalog: {result.folder}"
    yield from finding_lines(result.report)
    yield f"next: shardset ls {quote(source)}"
