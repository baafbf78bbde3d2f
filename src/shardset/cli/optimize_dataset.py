"""``shardset optimize-dataset``: webshart's command, loose files and old archives packed into indexed shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from shardset.policy import Policy
from shardset.webshart.commands import packing_settings
from shardset.writing.optimize import optimize_dataset

from .program import Command, Settings
from .reporting import TOKEN_OPTION, misuse, progress_bar
from .text import clean, counted, dump_json, human_size, printable

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.command(
    "optimize-dataset",
    cls=Command,
    examples=[
        (
            "shardset optimize-dataset --source loose-pairs/ --destination indexed/",
            "images with .txt or .json files beside them, into shards of up to 1 GiB",
        ),
        (
            "shardset optimize-dataset --source loose-pairs/ --destination indexed/ --max-shards 10",
            "ten shards; the next run goes on",
        ),
        (
            "shardset optimize-dataset --source loose-pairs/ --push-to-hub owner/name",
            "uploaded, one shard after the other",
        ),
    ],
)
@click.option("--source", required=True, help="Folder with loose files, or with tars whose file names are captions.")
@click.option("--destination", type=click.Path(file_okay=False), help="Folder to write to.")
@click.option("--push-to-hub", metavar="REPO_ID", help="Dataset repository to upload each shard to.")
@click.option(
    "--source-subfolder", "--subfolder", "source_subfolder", default="", help="Pack only what is below this folder."
)
@click.option("--output-prefix", default="webshart", help="Folder in the destination.  [default: webshart]")
@click.option("--source-revision", default="main", help="Branch of a source on the Hub.  [default: main]")
@click.option("--target-revision", default="main", help="Branch of the repository to upload to.  [default: main]")
@TOKEN_OPTION
@click.option("--max-shard-size-gb", type=float, default=1.0, help="The most GiB in a shard.  [default: 1]")
@click.option("--payload-extensions", metavar="A,B", help="Suffixes of files to pack. By default images, audio, video.")
@click.option("--no-image-geometry", is_flag=True, help="Leave the pixel sizes of images out of the indexes.")
@click.option(
    "--max-shards", type=click.IntRange(min=1), metavar="N", help="Stop after so many; run it again to go on."
)
@click.option("--private", is_flag=True, help="Make the repository private, if it is made.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "warn", "skip"]),
    default="raise",
    help="At a damaged archive or sidecar: stop, or go on with or without a warning.  [default: raise]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(
    settings: Settings,
    /,
    *,
    max_shard_size_gb: float,
    payload_extensions: str | None,
    no_image_geometry: bool,
    private: bool,
    on_error: Literal["raise", "warn", "skip"],
    as_json: bool,
    **options: Any,
) -> None:
    """Pack loose files with sidecars, or old archives, into indexed shards.

    Captions and metadata go into the indexes. A run that was stopped, even killed, is simply run again, and goes on
    behind the last whole shard.
    """
    with progress_bar(settings, "packing", "samples") as progress, misuse("see: shardset optimize-dataset --help"):
        result = optimize_dataset(
            **options,
            **packing_settings(
                max_shard_size_gb=max_shard_size_gb,
                payload_extensions=payload_extensions,
                no_image_geometry=no_image_geometry,
                private=private,
            ),
            policy=Policy(on_error=on_error),
            progress=progress,
        )
    if as_json:
        click.echo(dump_json(_cleaned(result)))
        return
    for line in _summary(result):
        click.echo(printable(line))


def _cleaned(value: Any) -> Any:
    """Return a JSON value in which all text is valid Unicode."""
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return clean(value) if isinstance(value, str) else value


def _summary(result: dict[str, Any]) -> Iterator[str]:
    done, total = result["next_sample_index"], result["total_samples"]
    packed = f"{done:,} of {counted(total, 'sample')}" if total else counted(done, "sample")
    shards = counted(result["next_shard_index"], "shard")
    yield f"{packed} packed into {shards}: {human_size(result['bytes_sharded'])}"
    yield f"samples with captions: {result['captioned_samples']:,}"
    yield f"shards written in this run: {result['shards_created']:,}"
    yield "all is packed" if result["status"] == "complete" else "not all is packed yet: run it again to go on"
    for finding in result["findings"]:
        yield f"{finding['code']}: {counted(finding['count'], 'finding')}"
        yield from (f"  {place}" for place in finding["places"])
