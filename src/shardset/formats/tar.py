"""Tar shards: find every member without reading payloads.

`scan_tar` reads v7, ustar, GNU and PAX archives, with links, devices, sparse files and long names, up to the end marker
or to the first fault, which is part of the result. Runs of ordinary headers go through `shardset.formats.tar_scan`, a
thousand at a time; the walker of `shardset.formats.tar_walk` takes the headers that are out of the ordinary, one by
one, and both give the same rows. docs/formats.md lists where readers differ and which way is taken here.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from . import tar_scan
from .naming import Names
from .tar_walk import CutError, FaultError, Kind, Walker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from shardset.errors import FormatError

    from .faults import Fault
    from .tar_header import SparseRow
    from .tar_scan import Pace

    ReadRange = Callable[[int, int], Buffer]
    Window = Callable[[int], Buffer | None]
    Int64s = NDArray[np.int64]

__all__ = ["Kind", "TarTable", "scan_tar"]


@dataclass(frozen=True, slots=True, eq=False)
class TarTable:
    """The members of one tar, a row each, in archive order.

    Attributes:
        names: Full member names, raw bytes.
        kind: uint8, values of `Kind`.
        first_offset: int64, byte offset of the member's first header, extension headers included.
        header_offset: int64, byte offset of the member's own header.
        offset: int64, byte offset of the payload; -1 for a sparse file, whose bytes do not stand in one piece.
        size: int64, bytes of the payload (with its holes, for a sparse file); 0 for what has none.
        sparse: For each sparse row, where its pieces lie.
        faults: What was wrong or odd, in the order met. An error is the last one.
        end: Where reading ended: the offset of the end marker, of the fault, or of the end of the bytes.
        is_cut: It ended because the bytes at hand did; the member that begins at `end` needs more of them.
    """

    names: Names
    kind: NDArray[np.uint8]
    first_offset: Int64s
    header_offset: Int64s
    offset: Int64s
    size: Int64s
    sparse: Mapping[int, tuple[SparseRow, ...]] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    end: int = 0
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.kind)

    def error(self, shard: str | None = None) -> FormatError | None:
        """Return the exception for the fault that ended the reading, or None if the end was reached."""
        return next((fault.error(shard) for fault in self.faults if fault.is_error), None)


def scan_tar(
    read: ReadRange,
    size: int,
    *,
    is_mapped: bool = False,
    window: Window | None = None,
    ignore_zeros: bool = False,
    careful: bool = False,
    base: int = 0,
    goes_on: bool = False,
    pace: Pace | None = None,
) -> TarTable:
    """Find every member of a tar of `size` bytes.

    Args:
        read: Gives the bytes ``[offset, offset + length)`` of the shard; never asked for bytes behind `size`.
        size: Bytes of the shard.
        is_mapped: `read` gives views of memory, so that asking for everything costs nothing.
        window: Gives a run of whole blocks from an offset on where `read` has one at hand or reads one anyway, else
            None. Without it windows are read where members are found to be small.
        ignore_zeros: Go on behind zero blocks, as concatenated archives need (``tar --ignore-zeros``).
        careful: Take every header one by one. Slower; the result is the same.
        base: Where `read` begins in the shard, at a header. Offsets in the result count from the shard's beginning.
        goes_on: The shard has more than these bytes, so that what they cut off is no fault.
        pace: What was learned in the part of the shard before this one, and takes what is learned in this one.

    Returns:
        The members up to the end, or up to the first error, which is then the last of `faults`. Errors of `read` pass.
    """
    scanner = None if careful else tar_scan.HeaderScanner(read, size, is_mapped=is_mapped, window=window, pace=pace)
    walker = Walker(
        read if scanner is None else scanner.read, size, ignore_zeros=ignore_zeros, is_start=not base, goes_on=goes_on
    )
    chunks: list[tar_scan.Chunk] = []
    position = 0
    try:
        while position >= 0:
            if scanner is not None and scanner.wants(position):
                position = scanner.scan(position, chunks, walker.step)
            elif (position := walker.step(position)) >= 0 and scanner is not None:
                scanner.note_step(position)
    except FaultError as stop:
        walker.faults.append(stop.fault)
        walker.end = stop.fault.offset
    except CutError:
        walker.end, walker.is_cut = walker.began, True
    if pace is not None and scanner is not None:
        pace.stride, pace.at_once = astuple(scanner.pace())
    return _assemble(chunks, walker, base)


def _assemble(chunks: list[tar_scan.Chunk], walker: Walker, base: int) -> TarTable:
    """Join what the scanner and the walker found into one table in archive order, and count offsets from `base` on."""
    members = walker.members
    if members:
        columns = np.array([member[2:6] for member in members], np.int64).T
        chunks = [
            *chunks,
            tar_scan.Chunk(
                Names.of([member.name for member in members]),
                np.array([member.kind for member in members], np.uint8),
                *columns,
            ),
        ]
    chunks = chunks or [tar_scan.Chunk.empty()]
    names = Names.concatenate([chunk.names for chunk in chunks])
    kind, first_offset, header_offset, offset, size = (
        np.concatenate(column) for column in zip(*(chunk.columns() for chunk in chunks), strict=True)
    )
    faults = [*(fault for chunk in chunks for fault in chunk.faults), *walker.faults]
    if members and len(chunks) > 1:
        faults.sort(key=lambda fault: (fault.is_error, fault.offset))
        order = np.argsort(header_offset, kind="stable")
        names = names.take(order)
        kind, first_offset, header_offset, offset, size = (
            column[order] for column in (kind, first_offset, header_offset, offset, size)
        )
    sparse = {}
    for member in members:
        if member.sparse is not None:
            sparse[int(np.searchsorted(header_offset, member.header_offset))] = member.sparse
    if base:
        first_offset, header_offset = first_offset + base, header_offset + base
        offset = np.where(offset < 0, offset, offset + base)
        faults = [replace(fault, offset=fault.offset + base) for fault in faults]
        sparse = {row: tuple(p._replace(offset=p.offset + base) for p in pieces) for row, pieces in sparse.items()}
    return TarTable(
        names, kind, first_offset, header_offset, offset, size, sparse, tuple(faults), walker.end + base, walker.is_cut
    )
