"""Entries of a sidecar index that are as nearly all are: found good without a look at each of their values.

What is not surely good here is left to `read_entries`, which knows every form, and the words for what is wrong.
"""

from __future__ import annotations

from itertools import groupby
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from shardset.formats.tar_header import MAX_SIZE

from .sidecar_entries import ALIASES, LIMITS, TEXTS

if TYPE_CHECKING:
    from collections.abc import Sequence


class PlainGroup(NamedTuple):
    """Entries that have the same keys, and the values of each key, one for each entry."""

    entries: list[dict[str, Any]]
    columns: dict[str, tuple[Any, ...]]


def group_plain(files: dict[str, Any] | list[Any], size: int) -> list[PlainGroup] | None:
    """Divide entries by their keys, if they are ordinary and surely good; None if not.

    Args:
        files: The file's ``files``.
        size: Bytes of the shard, within which all payloads must lie.
    """
    entries: list[dict[str, Any]] = [*files.values()] if isinstance(files, dict) else files
    if not {dict}.issuperset(map(type, entries)):
        return None
    needed = {"offset", "length"} if isinstance(files, dict) else {"path", "offset", "length"}
    groups = []
    for _, alike in groupby(sorted(entries, key=len), key=len):
        same = [*alike]
        names = same[0].keys()
        if not names >= needed or not names.isdisjoint(ALIASES):
            return None
        try:
            columns = dict(zip(names, zip(*map(itemgetter(*names), same), strict=True), strict=True))
        except KeyError:  # some have as many keys as others, and not the same
            return None
        if not all(map(is_plain_column, columns, columns.values())):
            return None
        if max(map(add, columns["offset"], columns["length"])) > size:
            return None
        groups.append(PlainGroup(same, columns))
    return groups


def is_plain_column(key: str, values: Sequence[Any]) -> bool:
    """Tell whether values are surely good under a key."""
    kinds = set(map(type, values))
    if key in LIMITS:
        return kinds == {int} and min(values) >= 0 and max(values) <= LIMITS[key]
    if key == "aspect":
        return kinds == {float} and max(map(abs, values)) <= MAX_SIZE
    if key in TEXTS:
        return kinds == {str} and "".join(values).isascii()
    return key != "captions" or kinds <= {str, dict}
