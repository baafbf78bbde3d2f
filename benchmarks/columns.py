"""Indexing one shard into columns, beside `tarfile`."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

from corpus import Corpus, large, small
from measure import Result, Side, check, compare

from shardset.index.build import build_index
from shardset.storage.local import LocalReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardset.index.table import ShardIndex


def run(root: Path, *, quick: bool) -> list[Result]:
    cases = (
        ("ustar, 10 KB images", small(quick=quick), 30.0),
        ("PAX header before every member, 10 KB images", small(quick=quick, pax=True), 30.0),
        ("ustar, 100 KB images", large(quick=quick), None),
    )
    results = []
    for name, corpus, goal in cases:
        shard = sorted(corpus.make(root).glob("*.tar"))[1]
        _check_same(ours(shard)[1], peer(shard))
        reader = LocalReader(str(shard))
        build_index(reader)  # maps it
        sides = (
            ("opened for it", lambda shard=shard: ours(shard), lambda shard=shard: peer(shard)),
            ("open already", lambda reader=reader: build_index(reader), lambda shard=shard: peer(shard)),
        )
        for state, mine, theirs in sides:
            results.append(_compare(f"{name}, {state}", corpus, mine, theirs, goal))
    return results


def ours(shard: Path) -> tuple[LocalReader, ShardIndex]:
    reader = LocalReader(str(shard))
    return reader, build_index(reader)  # the reader stays open, as it does in a dataset


def peer(shard: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(shard) as file:
        return file.getmembers()


def _compare(
    name: str, corpus: Corpus, mine: Callable[[], object], theirs: Callable[[], object], goal: float | None
) -> Result:
    return compare(
        f"columns of a shard, {name}",
        Side("build_index(reader)", mine),
        Side("tarfile.open(path).getmembers()", theirs),
        delivers="name, offset, size, kind and checksum of every member; ours also keys, suffixes and samples",
        unit="members",
        count=3 * corpus.samples,
        goal=goal,
    )


def _check_same(index: ShardIndex, members: list[tarfile.TarInfo]) -> None:
    check(index.names.to_text_list() == [member.name for member in members], "names")
    check(index.offset.tolist() == [member.offset_data for member in members], "offsets")
    check(index.length.tolist() == [member.size for member in members], "sizes")
    check(all(member.isreg() for member in members), "kinds")
    keys = [member.name.partition(".")[0] for member in members]
    check(index.keys().to_text_list() == list(dict.fromkeys(keys)), "keys")
