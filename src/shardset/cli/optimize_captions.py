"""``shardset optimize-captions``: webshart's command, the captions of sidecars written into indexes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from shardset.dataset.rewriting import upload_caption_metadata
from shardset.tasks.coalescing import CoalesceResult, coalesce_dataset, shard_cache
from shardset.webshart.discovery import as_source

from .program import Command, Settings
from .reporting import RANGE_OPTION, TOKEN_OPTION, finding_lines, findings_document, misuse, progress_bar
from .text import clean, counted, dump_json, printable

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.command(
    "optimize-captions",
    cls=Command,
    examples=[
        ("shardset optimize-captions --source shards/ --destination captions/", "new indexes, in another folder"),
        (
            "shardset optimize-captions --source shards/ --destination shards/",
            "in place, beside the shards",
        ),
        (
            "shardset optimize-captions --source shards/ --destination captions/ --push-to-hub owner/name",
            "the new indexes uploaded, too",
        ),
    ],
)
@click.option("--source", required=True, help="Folder with shards at any depth, a shard, or a glob.")
@click.option("--destination", required=True, help="Folder for the new indexes, laid out like the source.")
@click.option("--metadata", help="Folder of the indexes as they are; by default they stand beside the shards.")
@click.option("--source-subfolder", "--subfolder", "subfolder", help="Look only below this folder of the source.")
@TOKEN_OPTION
@RANGE_OPTION
@click.option("--shard-cache-dir", type=click.Path(file_okay=False), help="Cache for shards that are elsewhere.")
@click.option("--shard-cache-gb", type=float, default=25.0, help="The most GiB in that cache.  [default: 25]")
@click.option(
    "--parallel-downloads",
    type=click.IntRange(min=1),
    default=4,
    metavar="N",
    help="How many shards it downloads at once.  [default: 4]",
)
@click.option("--max-workers", type=click.IntRange(min=0), metavar="N", help="The most processes to use.")
@click.option("--push-to-hub", metavar="REPO_ID", help="Upload the indexes to this dataset repository.")
@click.option("--path-in-repo", default="", help="Folder in that repository.")
@click.option("--revision", default="main", help="Branch of that repository.  [default: main]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(
    settings: Settings,
    *,
    source: str,
    destination: str,
    metadata: str | None,
    subfolder: str | None,
    hf_token: str | None,
    shard_range: tuple[int, int] | None,
    shard_cache_dir: str | None,
    shard_cache_gb: float,
    parallel_downloads: int,
    max_workers: int | None,
    push_to_hub: str | None,
    path_in_repo: str,
    revision: str,
    as_json: bool,
) -> None:
    """Write the captions in the sidecars of shards into their indexes.

    An entry that has captions keeps them. A shard without an index gets one; an interrupted run is simply run again.
    """
    hint = "a source is a folder, a shard, a glob, or a pattern in braces"
    with progress_bar(settings, "gathering") as progress, misuse(hint):
        result = coalesce_dataset(
            as_source(source),
            destination,
            metadata=metadata if metadata is None else as_source(metadata),
            subfolder=subfolder,
            shard_range=shard_range,
            cache=shard_cache(shard_cache_dir, shard_cache_gb, parallel_downloads) if shard_cache_dir else None,
            max_workers=max_workers,
            progress=progress,
        )
    commit = None
    if push_to_hub:
        token = hf_token or os.environ.get("HF_TOKEN")
        commit = str(
            upload_caption_metadata(
                destination, push_to_hub, path_in_repo=path_in_repo, revision=revision, hf_token=token
            )
        )
    if as_json:
        document = {
            "num_shards": result.num_shards,
            "captioned_samples": result.captioned_samples,
            "coalesced_samples": result.coalesced_samples,
            "files": [clean(path) for path in result.files],
            "commit": commit,
            "findings": findings_document(result.report),
        }
        click.echo(dump_json(document))
        return
    for line in _summary(result, destination, commit):
        click.echo(printable(line))


def _summary(result: CoalesceResult, destination: str, commit: str | None) -> Iterator[str]:
    shards = counted(result.num_shards, "shard")
    yield f"{counted(result.coalesced_samples, 'caption')} from {shards} written into {destination}"
    yield f"samples with captions: {result.captioned_samples:,}"
    if commit is not None:
        yield f"uploaded: {commit}"
    yield from finding_lines(result.report)
