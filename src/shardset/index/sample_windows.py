"""A tar read from the front on: windows of whole samples with their bytes at hand, in one pass over the headers.

Each window begins at the header of a sample, and what does not fit in it, its last sample and a member that is cut off,
is where the next one begins. So no sample spans two windows, and what is held is one window, or one sample that is
larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from shardset.formats.faults import Fault
from shardset.formats.naming import Names, is_structural, split_names
from shardset.formats.tar import Kind, TarTable, scan_tar
from shardset.formats.tar_header import BLOCK
from shardset.formats.tar_scan import Pace

from .table import sample_starts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.formats.tar_header import SparseRow

    Int64s = NDArray[np.int64]

_SLASH: Final = ord("/")
_SKIPPED_KINDS: Final = {
    Kind.DIR: "directory",
    Kind.SYMLINK: "link",
    Kind.HARDLINK: "link",
    Kind.CHAR: "special_file",
    Kind.BLOCK: "special_file",
    Kind.FIFO: "special_file",
    Kind.OTHER: "special_file",
}


class Windows(Protocol):
    """Gives the bytes of a tar, forwards only."""

    def window(self, offset: int, least: int) -> tuple[Buffer, bool]:
        """Return the bytes from `offset` on, and whether they are all that there are.

        They are at least `least`, and enough for many headers, unless the tar has less. What stands before `offset` is
        not asked for again.
        """


class Skipped(NamedTuple):
    """A member that belongs to no sample: why, the byte offset of its header, its name."""

    code: str
    offset: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class SampleWindow:
    """Samples that stand together in a tar, and the bytes that they stand in.

    Attributes:
        data: The bytes of the shard from `base` on.
        base: Byte offset in the shard.
        keys: The samples' keys.
        first_offset: int64, for each sample the byte offset in the shard of its first header, extensions included.
        rows: int64, one more than there are samples: sample `i` has members ``[rows[i], rows[i + 1])``.
        names: Full names of the files, some others among them.
        name_rows: int64, for each member its row in `names`.
        offset: int64, byte offset of each member's payload in the shard; -1 for a sparse file.
        length: int64, bytes of each payload.
        suffix_ids: int32, into `suffixes`.
        suffixes: Distinct suffixes, lower-cased.
        sparse: For each sparse member, where its pieces lie.
        skipped: Members of no sample.
        faults: What was met in this part of the tar. An error is the last one, and then the last sample may be cut.
        is_last: Nothing follows.
    """

    data: Buffer
    base: int
    keys: list[str]
    first_offset: Int64s
    rows: Int64s
    names: Names
    name_rows: Int64s
    offset: Int64s
    length: Int64s
    suffix_ids: NDArray[np.int32]
    suffixes: tuple[str, ...]
    sparse: Mapping[int, tuple[SparseRow, ...]]
    skipped: tuple[Skipped, ...]
    faults: tuple[Fault, ...]
    is_last: bool


def iter_sample_windows(
    source: Windows,
    start: int = 0,
    *,
    rename: Callable[[str], str] | None = None,
    select: Callable[[str], bool] | None = None,
) -> Iterator[SampleWindow]:
    """Go through a tar from the header at byte `start` on.

    Samples are grouped as webdataset groups them: neighbours of one key, where what belongs to no sample does not come
    between. Files whose last path component begins with a dot belong to none.

    Args:
        source: Gives the bytes.
        start: Byte offset of the first header of a sample; 0 for the whole tar.
        rename: Gives the name that a file is to have.
        select: Tells by the name, after `rename`, whether a file is wanted; the others are as if they were not there.

    Raises:
        Whatever `source` raises.
    """
    offset, least, pace = start, 0, Pace()
    while True:
        data, is_all = source.window(offset, least)
        view = memoryview(data).cast("B")
        table = scan_tar(_reading(view), len(view), is_mapped=True, base=offset, goes_on=not is_all, pace=pace)
        window, following = _group(table, data, offset, rename, select)
        if window.is_last:
            is_open = not is_all and table.error() is None
            yield replace(window, is_last=not is_open)
            if is_open:  # after the samples, because what comes next may take its time
                yield _empty(window, _look_behind(source, offset + len(view)))
            return
        if following == offset:  # not one sample is sure to be whole
            least = 2 * max(len(view), BLOCK)
            continue
        yield window
        offset, least = following, 0


def _empty(window: SampleWindow, faults: tuple[Fault, ...]) -> SampleWindow:
    """Return a last window without samples."""
    none = window.offset[:0]
    return replace(
        window,
        keys=[],
        first_offset=none,
        rows=np.zeros(1, np.int64),
        name_rows=none,
        offset=none,
        length=none,
        suffix_ids=window.suffix_ids[:0],
        skipped=(),
        faults=faults,
        is_last=True,
    )


def _reading(view: memoryview) -> Callable[[int, int], memoryview]:
    return lambda offset, length: view[offset : offset + length]


def _look_behind(source: Windows, offset: int) -> tuple[Fault, ...]:
    """Go to the end of a tar, whose end marker stands before `offset`, and say if there is more than zeros."""
    first = -1
    is_all = False
    while not is_all:
        data, is_all = source.window(offset, 1)
        if first < 0:
            is_set = np.frombuffer(memoryview(data), np.uint8) != 0
            if is_set.any():
                first = (offset + int(is_set.argmax())) // BLOCK * BLOCK
        offset += memoryview(data).nbytes
    if first < 0:
        return ()
    return (Fault("data_after_end", first, message=f"{offset - first} bytes behind the end marker are not read"),)


def _group(
    table: TarTable,
    data: Buffer,
    base: int,
    rename: Callable[[str], str] | None,
    select: Callable[[str], bool] | None,
) -> tuple[SampleWindow, int]:
    """Group the members of a window into samples, and say where the next window begins.

    Of a window that others follow, the last sample is left to the next one.
    """
    is_last = not table.is_cut
    files = np.flatnonzero(table.kind == Kind.FILE)
    names = table.names if len(files) == len(table) else table.names.take(files)
    names, wanted = _choose(names, rename, select)
    split = split_names(names)
    key_lengths = split.key_lengths
    is_part = key_lengths > 0
    # A hidden file below a folder would make the folder its key, as webdataset has it.
    is_part &= names.data[names.offsets[:-1] + np.maximum(key_lengths, 1) - 1] != _SLASH if len(names.data) else False
    is_part &= wanted
    parts = np.flatnonzero(is_part)
    rows = files[parts]
    is_plain = len(parts) == len(names)
    starts = sample_starts(names if is_plain else names.take(parts), key_lengths[parts])
    first_offset = table.first_offset[rows[starts]]
    end, count = table.end, len(starts)
    if not is_last and count:
        end, count = int(first_offset[-1]), count - 1
        rows, parts = rows[: starts[-1]], parts[: starts[-1]]
    bounds = np.append(starts[:count], len(rows))
    is_other = np.ones(len(table), np.bool_)
    is_other[files[is_part | ~wanted]] = False
    is_other &= table.first_offset < end
    firsts = parts[bounds[:-1]]
    window = SampleWindow(
        data,
        base,
        names.cut(names.offsets[:-1][firsts], key_lengths[firsts]).to_text_list(),
        first_offset[:count],
        bounds,
        names,
        parts,
        table.offset[rows],
        table.size[rows],
        split.suffix_ids[parts],
        split.suffixes,
        {place: table.sparse[row] for place, row in enumerate(rows.tolist()) if row in table.sparse}
        if table.sparse
        else {},
        tuple(map(_skipped, np.flatnonzero(is_other).tolist(), [table] * int(is_other.sum()))),
        tuple(fault for fault in table.faults if is_last or fault.offset < end),
        is_last,
    )
    return window, end


def _choose(
    names: Names, rename: Callable[[str], str] | None, select: Callable[[str], bool] | None
) -> tuple[Names, NDArray[np.bool_]]:
    """Apply what the caller has to say about names; structural members are none of its business."""
    wanted = np.ones(len(names), np.bool_)
    if rename is None and select is None:
        return names, wanted
    texts = []
    for row, name in enumerate(names.to_text_list()):
        text = name
        if not is_structural(name.encode("utf-8", "surrogateescape")):
            text = name if rename is None else rename(name)
            wanted[row] = select is None or bool(select(text))
        texts.append(text.encode("utf-8", "surrogateescape"))
    return Names.of(texts), wanted


def _skipped(row: int, table: TarTable) -> Skipped:
    name = table.names.text(row)
    kind = Kind(table.kind[row])
    offset = int(table.header_offset[row])
    if kind is not Kind.FILE:
        return Skipped(_SKIPPED_KINDS[kind], offset, name)
    if is_structural(table.names[row]):
        return Skipped("structural_member", offset, name)
    if name.rpartition("/")[2].startswith("."):
        return Skipped("hidden_member", offset, name)
    return Skipped("no_suffix", offset, name)
