"""webshart's numbering of a shard's files: by path in byte order, with its rule of which sidecar belongs to which."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from .table import is_ascending

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardset.formats.naming import Names

    from .table import ShardIndex

    Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PathNumbering:
    """webshart's numbering: files by path in byte order, and samples as the files that are no sidecars.

    Its pairing rule: files with the same path up to the last dot of the last component belong together; a ``.json`` is
    a sidecar beside any other file, a ``.txt`` beside a file that is neither. People have stored these numbers, so they
    are kept as they are (requirements page of webshart; its sample APIs).

    Attributes:
        files: int64, rows of the index in path order: file `n` is row ``files[n]``.
        samples: int64, rows of the files that are no sidecars, in path order.
        json_rows: int64, for each of `samples` the row of its ``.json`` sidecar, or -1.
        text_rows: int64, for each of `samples` the row of its ``.txt`` sidecar, or -1.
    """

    files: Int64s
    samples: Int64s
    json_rows: Int64s
    text_rows: Int64s


def number_by_path(index: ShardIndex) -> PathNumbering:
    """Number the files of a shard as webshart does. Records, which it does not know, stay in their order."""
    names = index.names
    if index.records is not None:
        rows, none = np.arange(len(names)), np.full(len(names), -1)
        return PathNumbering(rows, rows, none, none)
    if not len(names):
        none = np.zeros(0, np.int64)
        return PathNumbering(none, none, none, none)
    # From `by_stem` on by stem, and by path within a stem.
    if _is_in_order(index):  # each sample is a stem
        kind_of = np.array([_KINDS.get(suffix, 0) for suffix in index.suffixes], np.uint8)
        rank = np.argsort(np.argsort(np.array(index.suffixes)))
        group = np.repeat(np.arange(index.num_samples), np.diff(index.sample_rows))
        files = np.argsort(group * len(rank) + rank[index.suffix_ids], kind="stable")
        by_stem, rows, kind = np.arange(len(files)), files, kind_of[index.suffix_ids[files]]
    else:
        files, _ = _path_order(names)
        stem_lengths, kinds = _stems(names)
        stems = names.cut(names.offsets[:-1][files], stem_lengths[files])
        by_stem, is_first = _path_order(stems)
        rows = files[by_stem]
        kind = kinds[rows]
        group = np.cumsum(is_first) - 1
    is_json, is_text = kind == _JSON, kind == _TEXT
    num_groups = int(group[-1]) + 1
    jsons, texts = (np.bincount(group[which], minlength=num_groups) for which in (is_json, is_text))
    others = np.bincount(group, minlength=num_groups) - jsons
    payloads = others - texts
    json_row, text_row = np.full(num_groups, -1), np.full(num_groups, -1)
    json_row[group[is_json]] = rows[is_json]  # of several, the last by path stays
    text_row[group[is_text]] = rows[is_text]
    json_row[others == 0] = -1
    is_sidecar = is_json & (others > 0)[group] | is_text & (payloads > 0)[group]
    # Back to path order.
    is_sample = np.empty(len(rows), np.bool_)
    json_rows, text_rows = np.empty_like(rows), np.empty_like(rows)
    is_sample[by_stem] = ~is_sidecar
    json_rows[by_stem] = json_row[group]
    text_rows[by_stem] = np.where(is_json | is_text, -1, text_row[group])
    return PathNumbering(files, files[is_sample], json_rows[is_sample], text_rows[is_sample])


_JSON: Final = 1
_TEXT: Final = 2
_KINDS: Final = {"json": _JSON, "txt": _TEXT}
_WIDEST: Final = 16
"""Names are sorted as a table of words while that takes at most this many times their bytes, and a megabyte."""


def _is_in_order(index: ShardIndex) -> bool:
    """Tell whether samples stand in path order and are stems: ascending keys of one length, and suffixes without dots.

    Letters must be lower-case ASCII, so that suffixes sort as the names do.
    """
    data = index.names.data
    return (
        int(index.sample_rows[-1]) == index.num_files
        and not any("." in suffix for suffix in index.suffixes)
        and not bool(((data > 0x7F) | ((data >= ord("A")) & (data <= ord("Z")))).any())
        and is_ascending(index.keys())
    )


def _path_order(names: Names) -> tuple[Int64s, NDArray[np.bool_]]:
    """Sort names by their bytes; equal ones keep their order.

    Returns:
        The rows in that order, and for each place of it whether its name differs from the one before.
    """
    lengths, count = names.lengths, len(names)
    is_first = np.ones(count, np.bool_)
    width = int(lengths.max(initial=0))
    data = names.data[names.offsets[0] : names.offsets[-1]]
    if count * width > _WIDEST * len(data) + (1 << 20):
        listed = names.to_list()
        ordered = sorted(range(count), key=listed.__getitem__)
        is_first[1:] = [listed[row] != listed[before] for before, row in pairwise(ordered)]
        return np.array(ordered, np.int64), is_first
    table = np.zeros((count, -(-width // 8) * 8), np.uint8)
    if bool((lengths == width).all()):
        table[:, :width] = data.reshape(count, width)
    else:
        table[np.arange(table.shape[1]) < lengths[:, None]] = data
    # Big-endian words compare as their bytes do. The length tells apart what differs in NULs at the end alone.
    words = table.view(">u8").T
    keys = [column.astype(np.int64 if column is lengths else np.uint64) for column in (*words, lengths)]
    keys = [column for column in keys if count and bool((column != column[0]).any())]
    order = np.lexsort(keys[::-1]) if keys else np.arange(count)
    is_first[1:] = False
    for column in keys:
        ordered_column = column[order]
        is_first[1:] |= ordered_column[1:] != ordered_column[:-1]
    return order, is_first


def _stems(names: Names) -> tuple[Int64s, NDArray[np.uint8]]:
    """Cut names at the last dot of their last component.

    Returns:
        The lengths of what stands before the dot, and whether what follows makes the file a `_JSON` or a `_TEXT`.
    """
    starts, ends = names.offsets[:-1], names.offsets[1:]
    slash, dot = (_last_before(np.flatnonzero(names.data == byte), starts, ends) for byte in b"/.")
    has_dot = dot > slash
    stem_ends = np.where(has_dot, dot, ends)
    suffixes = np.where(has_dot, dot + 1, ends)
    lengths = ends - suffixes
    padded = np.append(names.data, np.zeros(4, np.uint8))
    words = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(padded, 4)[suffixes]).view("<u4").ravel()
    words |= np.uint32(0x20202020)  # lower-cases letters, and makes a letter of nothing else
    kinds = np.zeros(len(starts), np.uint8)
    kinds[(lengths == 4) & (words == int.from_bytes(b"json", "little"))] = _JSON
    kinds[(lengths == 3) & (words & 0xFFFFFF == int.from_bytes(b"txt", "little"))] = _TEXT
    return stem_ends - starts, kinds


def _last_before(places: Int64s, starts: Int64s, ends: Int64s) -> Int64s:
    """Return for ranges of bytes the last of some ascending places that lies in it, or the byte before the range."""
    if not len(places):
        return starts - 1
    last = places[np.maximum(np.searchsorted(places, ends) - 1, 0)]
    return np.where((last >= starts) & (last < ends), last, starts - 1)
