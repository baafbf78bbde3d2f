"""``shardset fix``: the good records of damaged TFRecord shards, in new files."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from shardset.doctor.repair import fix

from .address import near_path
from .check import finding_document, finding_lines, megabyte_bar, print_shards, shard_document
from .failures import ExitCode
from .program import Command, Settings
from .reporting import misuse
from .text import counted, dump_json, human_size, name_fields, printable

if TYPE_CHECKING:
    from shardset.doctor.repair import FixReport, ShardFix

_SHOWN: Final = 8
_HINT: Final = "name another file, or write over one that is there with --force; see: shardset fix --help"


@click.command(
    "fix",
    cls=Command,
    examples=[
        (
            "shardset fix train.tfrecord -o train.good.tfrecord",
            "what is good; the rest goes to train.good.tfrecord.bad",
        ),
        ("shardset fix 'train@64' -o repaired/", "a set of shards, into a folder"),
        ("shardset fix cut.tfrecord.gz -o whole.tfrecord.gz --json", "compressed again; a report for programs"),
    ],
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "-o", "--output", required=True, metavar="OUT", help="The new file; for several shards the folder for them."
)
@click.option("-f", "--force", is_flag=True, help="Write over a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(settings: Settings, *, sources: tuple[str, ...], output: str, force: bool, as_json: bool) -> ExitCode:
    """Copy the good records of damaged TFRecord shards to new files.

    The shards stay as they are. Good records are copied byte for byte; a header or checksum that could be worked out is
    written anew. What is left out goes to OUT.bad, and where it stood to OUT.bad.json. OUT is compressed with gzip if
    its name ends in .gz. The exit code is 1 if records are lost.
    """
    source = sources[0] if len(sources) == 1 else list(sources)
    with megabyte_bar(settings, "fixing") as progress, misuse(_HINT):
        report = fix(source, output, force=force, progress=progress)
    if as_json:
        click.echo(dump_json(fix_document(report)))
    else:
        _print(report)
    if report.findings:
        return ExitCode.UNREADABLE
    return ExitCode.FINDINGS if report.lost_records else ExitCode.FINE


def fix_document(report: FixReport) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        **name_fields("source", report.source),
        "records": sum(shard.records for shard in report.shards),
        "lost_records": report.lost_records,
        "shards": [
            {
                **name_fields("destination", shard.destination),
                "records": shard.records,
                "size": shard.size,
                **(name_fields("bad_file", shard.bad_file) if shard.bad_file is not None else {"bad_file": None}),
                "bad_bytes": shard.bad_bytes,
                "check": shard_document(shard.check),
            }
            for shard in report.shards
        ],
        "findings": list(map(finding_document, report.findings)),
    }


def _print(report: FixReport) -> None:
    print_shards([shard.check for shard in report.shards])
    for line in finding_lines(report.findings, {}, names_shards=True):
        click.echo(line)
    click.echo()
    for shard in report.shards:
        click.echo(printable(_line(shard)))
    lost = report.lost_records
    click.echo(f"about {counted(lost, 'record')} lost" if lost else "no record is lost")
    if report.shards:
        made = " ".join(quote(near_path(shard.destination)) for shard in report.shards[:_SHOWN])
        click.echo(printable(f"next: shardset check {made}{' ...' if len(report.shards) > _SHOWN else ''}"))


def _line(shard: ShardFix) -> str:
    line = f"{near_path(shard.destination)}: {counted(shard.records, 'record')}, {human_size(shard.size)}"
    if shard.check.mended:
        line += f", {shard.check.mended:,} of them mended"
    if shard.bad_file is not None:
        what = f"{human_size(shard.bad_bytes)} left out" if shard.bad_bytes else "what was there before"
        line += f"; {what}: {near_path(shard.bad_file)}"
    return line
