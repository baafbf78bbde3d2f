"""`check`: what is wrong with the shards that a source names. Each kind of shard has its own check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardset.dataset.discover import find_shards
from shardset.errors import StorageError, without_secrets
from shardset.formats.patterns import named_format
from shardset.policy import Report
from shardset.storage.anywhere import store_for
from shardset.storage.store import url_name

from .findings import Finding, make_finding
from .tfrecord_checks import ShardCheck, check_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardset.dataset.discover import Found, ShardSource, Source
    from shardset.storage.store import Store

_OF_SETS: Final = ("incomplete_set", "mixed_sets")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found in the shards that a source names.

    Attributes:
        source: The source, without what lets one in.
        shards: Of each shard that was checked, in order, what was found in it.
        findings: What is wrong with the set of shards, and with shards that could not be checked.
    """

    source: str
    shards: tuple[ShardCheck, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Those about the set, and then those of each shard."""
        return self.findings + tuple(finding for shard in self.shards for finding in shard.findings)

    @property
    def has_errors(self) -> bool:
        """Whether anything is damaged or missing."""
        return any(finding.severity == "error" for finding in self.all_findings)

    @property
    def is_readable(self) -> bool:
        """Whether every shard could be read, and was what it was taken for."""
        return all(finding.word not in {"not_tfrecord", "unreadable"} for finding in self.all_findings)


def check(
    source: Source,
    *,
    tail: bool = False,
    examples: bool = False,
    store: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Check TFRecord shards: every checksum of every record, and what can be saved where one is wrong.

    Args:
        source: A shard, a folder, a pattern, or a list of these, anywhere; as `find_shards` takes it.
        tail: The shards are still being written: a last record that is not all there is no damage.
        examples: Look into the records too, which are Examples or SequenceExamples, for what programs read in different
            ways. Takes many times longer.
        store: Where the source lives; by default the place that its scheme names.
        progress: Called with how many bytes have been checked, and how many there are.

    Raises:
        NotFoundError: A name leads nowhere.
        StorageError: Reading failed, and there is no other shard. Of several, the one is a finding.
        ValueError: The source is malformed, or has no shards but tars, which are not checked yet.
    """
    report = Report()
    found = find_shards(source, store=store, report=report)
    shards = checkable(found)
    findings = [
        make_finding("not_checked", shard.url, None, "a tar shard, which is not checked yet")
        for shard in found.shards
        if shard not in shards
    ]
    for code, _, places in report:
        if code in _OF_SETS:
            findings += [make_finding(code, place.shard or found.name, None, place.message) for place in places]
    opened = store_for(store, found.root)
    done, total = 0, sum(shard.info.size for shard in shards)
    results = []
    for shard in shards:
        try:
            reader = opened.open(shard.url, shard.info)
            here = shift_progress(progress, done, total)
            results.append(check_records(reader, tail=tail, examples=examples, progress=here))
        except StorageError as error:
            if len(shards) == 1:
                raise
            findings.append(make_finding("unreadable", shard.url, None, error.message))
        done += shard.info.size
        if progress is not None:
            progress(done, total)
    return CheckReport(found.name, tuple(results), tuple(findings))


def checkable(found: Found) -> Sequence[ShardSource]:
    """Return the shards of a kind that can be checked.

    Raises:
        ValueError: There are none.
    """
    shards = [shard for shard in found.shards if named_format(url_name(shard.url)) != "tar"]
    if not shards:
        name = without_secrets(found.shards[0].url)
        raise ValueError(f"{name} is a tar shard: only TFRecord shards can be checked and fixed yet")
    return shards


def shift_progress(progress: Callable[[int, int], None] | None, done: int, total: int) -> Callable[[int], None] | None:
    """Return what tells of one shard how far it is, as a part of all."""
    return None if progress is None else lambda here: progress(done + here, total)
