"""``shardset check``: every checksum of TFRecord shards, and what can be saved where one is wrong."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from shardset.doctor.checking import check

from .address import near_path
from .failures import ExitCode
from .program import Command, Settings
from .reporting import misuse, progress_bar
from .tables import Column, at_terminal, print_table
from .text import clean, counted, dump_json, human_size, name_fields, one_line, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardset.doctor.checking import CheckReport
    from shardset.doctor.findings import Finding
    from shardset.doctor.tfrecord_checks import ShardCheck

_HINT: Final = "a source is a TFRecord shard, a folder of them, or a pattern; see: shardset check --help"
_SHOWN: Final = 5
"""Findings of a kind that are printed for each shard."""
_ALL_SHARDS: Final = 50
"""Of more shards, only those with findings are printed."""
_MEGABYTE: Final = 1_000_000
_ALWAYS: Final = frozenset({"shard", "size", "records", "lost", "state"})
"""Columns that are printed even if there is nothing in them."""


@click.command(
    "check",
    cls=Command,
    examples=[
        ("shardset check train.tfrecord", "every checksum; what is damaged, where, and what can be saved"),
        ("shardset check data/ --json", "all TFRecord shards of a folder; a report for programs"),
        ("shardset check 'train@64'", "a set of 64 shards, which must be complete"),
        ("shardset check --tail events.out.tfevents.1700000000", "a file that is still being written"),
    ],
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--tail", is_flag=True, help="The shards are still being written: a last record that is cut is no damage."
)
@click.option(
    "--examples", is_flag=True, help="Look into Examples too, for what programs read in different ways. Slow."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as docs/json.md describes it.")
@click.pass_obj
def command(settings: Settings, *, sources: tuple[str, ...], tail: bool, examples: bool, as_json: bool) -> ExitCode:
    """Check TFRecord shards, and say what can be saved of damaged ones.

    The checksums of all records are checked, compression, and whether a set is complete. Behind damage the next record
    is looked for, so the report says what shardset fix would save. The exit code is 1 if anything is damaged or
    missing, and 3 if a file is no TFRecord file or cannot be read.
    """
    source = sources[0] if len(sources) == 1 else list(sources)
    with megabyte_bar(settings, "checking") as progress, misuse(_HINT):
        report = check(source, tail=tail, examples=examples, progress=progress)
    if as_json:
        click.echo(dump_json(check_document(report)))
    else:
        _print(report)
    if not report.is_readable:
        return ExitCode.UNREADABLE
    return ExitCode.FINDINGS if report.has_errors else ExitCode.FINE


def check_document(report: CheckReport) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        **name_fields("source", report.source),
        "num_shards": len(report.shards),
        "records": sum(shard.records for shard in report.shards),
        "lost_records": sum(shard.lost_records for shard in report.shards),
        "lost_bytes": sum(shard.lost_bytes for shard in report.shards),
        "has_errors": report.has_errors,
        "shards": list(map(shard_document, report.shards)),
        "findings": list(map(finding_document, report.findings)),
    }


def shard_document(shard: ShardCheck) -> dict[str, Any]:
    """Return what was found in one shard, for JSON."""
    return {
        **name_fields("shard", shard.shard),
        "size": shard.size,
        "compression": shard.compression,
        "is_tfrecord": shard.is_tfrecord,
        "records": shard.records,
        "good": shard.good,
        "mended": shard.mended,
        "resynced": shard.resynced,
        "lost_records": shard.lost_records,
        "lost_bytes": shard.lost_bytes,
        "counts": dict(shard.counts),
        "findings": list(map(finding_document, shard.findings)),
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    """Return one finding, for JSON."""
    return {
        "code": finding.code,
        "kind": finding.word,
        "severity": finding.severity,
        **name_fields("shard", finding.shard),
        "offset": finding.offset,
        "message": clean(finding.message),
        "hint": clean(finding.hint),
        "lost_bytes": finding.lost_bytes,
        "lost_records": finding.lost_records,
    }


def _print(report: CheckReport) -> None:
    print_shards(report.shards)
    if any(report.all_findings):
        click.echo()
    for line in finding_lines(report.findings, {}, names_shards=True):
        click.echo(line)
    for shard in report.shards:
        if shard.findings:
            click.echo(printable(f"{near_path(shard.shard)}:"))
            for line in finding_lines(shard.findings, shard.counts):
                click.echo(f"  {line}")
    click.echo()
    click.echo(printable(_summary(report)))
    damaged = [shard for shard in report.shards if shard.has_errors and shard.records]
    if len(damaged) == 1:
        click.echo(printable(f"next: {_fix_line(damaged[0].shard)}"))
    elif damaged:
        shards = " ".join(quote(near_path(shard.shard)) for shard in damaged[:_SHOWN])
        more = "" if len(damaged) <= _SHOWN else " ..."
        click.echo(printable(f"next: shardset fix {shards}{more} -o repaired/"))


def print_shards(shards: Sequence[ShardCheck]) -> None:
    """Print a table of what was found in each shard; of many shards, those with findings."""
    shown = [shard for shard in shards if len(shards) <= _ALL_SHARDS or shard.findings]
    columns = (
        Column("shard", is_flexible=True, is_path=True),
        Column("size", is_right=True, show=human_size),
        Column("packed"),
        *(Column(name, is_right=True, show=_number) for name in ("records", "mended", "resynced", "lost")),
        Column("state"),
    )
    paths = [near_path(shard.shard) for shard in shown]
    folder, *others = {path.rpartition("/")[0] for path in paths}
    if at_terminal() and len(paths) > 1 and folder and not others:  # the names alone fit, and tell the shards apart
        click.echo(printable(f"{folder}/"))
        paths = [path[len(folder) + 1 :] for path in paths]
    rows = [
        (
            path,
            shard.size,
            shard.compression,
            *(shard.records, shard.mended, shard.resynced, shard.lost_records),
            _state(shard),
        )
        for path, shard in zip(paths, shown, strict=True)
    ]
    kept = [at for at, column in enumerate(columns) if column.name in _ALWAYS or any(row[at] for row in rows)]
    print_table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows])
    if len(shown) < len(shards):
        click.echo(f"{counted(len(shards) - len(shown), 'shard')} without findings")


def _number(number: int) -> str:
    return f"{number:,}"


def _state(shard: ShardCheck) -> str:
    if not shard.is_tfrecord:
        return "no TFRecord file"
    if shard.has_errors:
        return "damaged"
    severities = {finding.severity for finding in shard.findings}
    return "warnings" if "warning" in severities else "good"


def finding_lines(
    findings: Sequence[Finding], counts: Mapping[str, int], *, names_shards: bool = False
) -> Iterator[str]:
    """Yield findings as lines, each kind with its hint behind its last one.

    Args:
        findings: Of one shard.
        counts: How many there are of each code, where not all were kept.
        names_shards: They are of several shards, which the lines name.
    """
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    for code, several in by_code.items():
        for finding in several[:_SHOWN]:
            where = "" if finding.offset is None else f" at byte {finding.offset}"
            if names_shards and finding.shard:
                where = f" in {near_path(finding.shard)}{where}"
            yield one_line(f"{code} {finding.severity}{where}: {finding.message}{_lost(finding)}")
        number = max(counts.get(code, 0), len(several))
        if number > _SHOWN:
            lost = sum(finding.lost_records for finding in several[_SHOWN:])
            yield f"{code} ... and {number - _SHOWN:,} more" + (f", {counted(lost, 'record')} lost" if lost else "")
        yield one_line(f"     hint: {several[0].hint}")


def _lost(finding: Finding) -> str:
    if not finding.lost_bytes:
        return ""
    records = f"{counted(finding.lost_records, 'record')} of " if finding.lost_records else ""
    return f" ({records}{human_size(finding.lost_bytes)} lost)"


def _summary(report: CheckReport) -> str:
    kinds = Counter(finding.severity for finding in report.all_findings)
    records = sum(shard.records for shard in report.shards)
    lost = sum(shard.lost_records for shard in report.shards)
    parts = [f"{counted(len(report.shards), 'shard')} checked", f"{counted(records, 'record')}"]
    mended = sum(shard.mended for shard in report.shards)
    if mended:
        parts.append(f"{mended:,} of them mended")
    if lost:
        size = human_size(sum(shard.lost_bytes for shard in report.shards))
        parts.append(f"about {lost:,} lost with {size}")
    found = [counted(kinds[severity], severity) for severity in ("error", "warning", "note") if kinds[severity]]
    return f"{', '.join(parts)}; {', '.join(found) or 'no findings'}"


def _fix_line(shard: str) -> str:
    path = near_path(shard)
    name = path.rpartition("/")[2]
    stem, dot, suffix = name.partition(".")
    return f"shardset fix {quote(path)} -o {quote(f'{stem}.good{dot}{suffix}')}"


@contextmanager
def megabyte_bar(settings: Settings, doing: str) -> Iterator[Callable[[int, int], None] | None]:
    """Give, as `progress_bar` does, a function that shows how many bytes are done of how many."""
    with progress_bar(settings, doing, "MB") as show:
        yield None if show is None else lambda done, total: show(done // _MEGABYTE, total // _MEGABYTE)
