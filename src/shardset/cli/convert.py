"""``shardset convert``: tar shards as TFRecord, and TFRecord shards as tar."""

from __future__ import annotations

import errno
import re
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from shardset.errors import StorageError
from shardset.policy import Policy
from shardset.writing.convert import convert

from .address import near_path
from .program import Command, MisuseError, Settings
from .reporting import finding_lines, findings_document, misuse, progress_bar
from .text import counted, dump_json, human_size, name_fields, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardset.writing.convert import ConvertReport

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kMGT])(i?)B?|B)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_FORMATS: Final = {"tar": "tar", "tfrecord": "TFRecord"}


def parse_size(text: str) -> int:
    """Return the bytes that a size means: ``500000``, ``64MB`` (decimal), ``1GiB`` (binary)."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match is not None:
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[(unit or "").lower()])
    if size <= 0:
        raise click.BadParameter(f"{text!r} is no size such as 500MB or 1GiB")
    return size


@click.command(
    "convert",
    cls=Command,
    examples=[
        ("shardset convert photos/ -o records/", "each tar as a TFRecord file of the same name"),
        ("shardset convert 'train@64' -o tars/", "a set of 64 TFRecord files as 64 tars for webdataset"),
        ("shardset convert photos/ -o records/ --max-bytes 200MB --compression gzip", "as many shards as it takes"),
        ("shardset convert big.tfrecord -o small@16.tfrecord --to tfrecord", "one file as sixteen, record for record"),
    ],
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT",
    help="Folder, or a file name such as out.tar or out@8.tfrecord; on this machine or in a bucket.",
)
@click.option(
    "--to",
    type=click.Choice(["tar", "tfrecord"]),
    help="Format to write. By default that of OUT's suffix, or the other one.",
)
@click.option(
    "--shards", type=click.IntRange(min=1), metavar="N", help="Divide the samples evenly into so many shards."
)
@click.option("--max-bytes", type=parse_size, metavar="SIZE", help="The most bytes of a shard: 500MB, 1GiB.")
@click.option("--max-records", type=click.IntRange(min=1), metavar="N", help="The most samples of a shard.")
@click.option(
    "--compression",
    type=click.Choice(["gzip", "zlib"], case_sensitive=False),
    help="Compress TFRecord as TensorFlow reads it. By default as the suffix of OUT says, or not.",
)
@click.option("-f", "--force", is_flag=True, help="Write over shards that are there.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "warn", "skip"]),
    default="raise",
    help="At damage: stop, or convert what is good, with or without a warning.  [default: raise]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(
    settings: Settings,
    /,
    *,
    sources: tuple[str, ...],
    output: str,
    on_error: Literal["raise", "warn", "skip"],
    as_json: bool,
    **options: Any,
) -> None:
    """Convert tar shards to TFRecord, or TFRecord shards to tar, with nothing lost.

    A sample of a tar becomes one Example, with a feature for each suffix and the key in __key__. A record becomes
    members of a tar: image%2fencoded.jpg for the feature image/encoded, label.npy for numbers. Converted back, the
    samples are what they were, features in the order of their names. Each shard becomes one of the same name, unless
    --shards or --max-... divide them anew.
    """
    source = sources[0] if len(sources) == 1 else list(sources)
    with progress_bar(settings, "converting") as progress, misuse("see: shardset convert --help"):
        try:
            result = convert(source, output, **options, policy=Policy(on_error=on_error), progress=progress)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            raise MisuseError(f"{error.message}{error.place()}", "use --force to write over it") from error
    if as_json:
        click.echo(dump_json(convert_document(result)))
        return
    for line in _summary(result):
        click.echo(printable(line))


def convert_document(result: ConvertReport) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        **name_fields("source", result.source),
        "to": result.to,
        "num_shards_read": result.num_shards_read,
        "num_shards": len(result.urls),
        "num_samples": result.num_samples,
        "size": result.size,
        "shards": [name_fields("shard", url) for url in result.urls],
        "findings": findings_document(result.report),
    }


def _summary(result: ConvertReport) -> Iterator[str]:
    samples, read = counted(result.num_samples, "sample"), counted(result.num_shards_read, "shard")
    written = f"{counted(len(result.urls), f'{_FORMATS[result.to]} shard')}, {human_size(result.size)}"
    yield f"{samples} of {read} written: {written}"
    first, last = near_path(result.urls[0]), near_path(result.urls[-1])
    yield f"shards: {first}" + (f" ... {last}" if last != first else "")
    yield from finding_lines(result.report)
    yield f"next: shardset show {quote(first)}"
