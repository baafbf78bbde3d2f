"""What tells a dataset from any other, wherever it lies: names, sizes and counts of its shards, in few characters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import StateError

if TYPE_CHECKING:
    from shardset.dataset.dataset import Dataset

_PARTS: Final = 8
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A dataset, or the first so many shards of one.

    Attributes:
        shards: How many shards.
        samples: How many samples they have.
        parts: For each eighth of the shards, in order, six hex digits that depend on the name, the size in bytes and
            the number of samples of each shard in it. They differ if a shard was changed, renamed or moved in the
            order, and tell about where.
    """

    shards: int
    samples: int
    parts: str

    def to_json(self) -> list[Any]:
        """Return it as a state holds it."""
        return [self.shards, self.samples, self.parts]


def fingerprint(dataset: Dataset, shards: int | None = None) -> Fingerprint:
    """Return what tells a dataset, or its first shards, from others. Makes its catalog if there is none.

    Raises:
        As `Dataset.catalog`.
    """
    catalog = dataset.catalog
    count = catalog.num_shards if shards is None else shards
    digests = [hashlib.sha256() for _ in range(_PARTS)]
    samples = number = 0
    for group in range(catalog.num_groups):
        for entry in catalog.entries(group):
            if number >= count:
                break
            line = f"{entry.name}\t{entry.size}\t{entry.num_samples}\n"
            digests[number * _PARTS // count].update(line.encode("utf-8", "surrogateescape"))
            samples += entry.num_samples
            number += 1
    return Fingerprint(count, samples, "".join(digest.hexdigest()[:_DIGITS] for digest in digests))


def parse_fingerprint(value: object) -> Fingerprint:
    """Read what `Fingerprint.to_json` gave.

    Raises:
        StateError: It is something else.
    """
    match value:
        case [int(shards), int(samples), str(parts)] if len(parts) == _PARTS * _DIGITS and shards >= 0 <= samples:
            return Fingerprint(shards, samples, parts)
    raise StateError(f"the state's fingerprint of the dataset is malformed: {value!r}")


def check_fingerprint(stated: Fingerprint, dataset: Dataset, *, appended: bool = False) -> None:
    """Check that a state is of a dataset.

    Args:
        stated: The fingerprint in the state.
        dataset: What it is to be loaded into.
        appended: Allow the dataset to have more shards behind those of the state.

    Raises:
        StateError: It is of another one; says what differs.
    """
    here = fingerprint(dataset)
    if stated == here:
        return
    if here.shards > stated.shards:
        is_prefix = fingerprint(dataset, stated.shards) == stated
        if is_prefix and appended:
            return
        if is_prefix:
            raise StateError(
                f"{here.shards - stated.shards} shards with {here.samples - stated.samples} samples were appended to "
                f"{dataset.name} since the state was saved",
                hint="load_state_dict(state, appended=True) finishes the epoch without them, and has them from the "
                "next one on",
            )
    if here.shards != stated.shards:
        what = f"the state is of {stated.shards} shards with {stated.samples} samples"
        what += f", {dataset.name} has {here.shards} with {here.samples}"
        if here.shards > stated.shards:
            what += ", and they do not only differ by shards that were appended"
    else:
        what = f"{_differing(stated, here, dataset)} of {dataset.name} differ from those of the state"
        what += " in name, order, size or number of samples"
        if here.samples != stated.samples:
            what += f": {here.samples} samples here, {stated.samples} there"
    raise StateError(what, hint="load the state into the dataset that it was saved of")


def _differing(stated: Fingerprint, here: Fingerprint, dataset: Dataset) -> str:
    """Say in which runs of shards two fingerprints of equally many shards differ."""
    count = here.shards
    places = []
    for part in range(_PARTS):
        digits = slice(part * _DIGITS, (part + 1) * _DIGITS)
        if stated.parts[digits] != here.parts[digits]:
            # Shard n is in part n * 8 // count, so part p begins at shard ceil(p * count / 8).
            start, stop = -(-part * count // _PARTS), -(-(part + 1) * count // _PARTS)
            places.append((start, stop))
    merged: list[list[int]] = []
    for start, stop in places:
        if merged and merged[-1][1] == start:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    names = []
    for start, stop in merged:
        first, last = dataset.info(start).name, dataset.info(stop - 1).name
        names.append(f"{first!r}" if stop - start == 1 else f"{first!r} to {last!r}")
    return f"some of the shards {' and '.join(names)}" if names else "the counts"
