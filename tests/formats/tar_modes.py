"""Runs `scan_tar` in each of its ways, through a read that refuses what no store would have to answer."""

from __future__ import annotations

from formats.tar_builder import END, Row, archive, member
from shardset.formats.tar import Kind, scan_tar

MODES = ("careful", "mapped", "windows")


class StrictRead:
    """Gives ranges of `data`, refuses those that are empty, negative or outside, and counts.

    Attributes:
        calls: How often it was asked.
        bytes_read: For how many bytes.
    """

    def __init__(self, data, *, is_mapped=False):
        self.data = memoryview(data) if is_mapped else data
        self.calls = 0
        self.bytes_read = 0

    def __call__(self, offset, length):
        assert type(offset) is int
        assert type(length) is int
        assert 0 <= offset < offset + length <= len(self.data), f"asked for [{offset}, {offset} + {length})"
        self.calls += 1
        self.bytes_read += length
        return self.data[offset : offset + length]


def scan(data, mode, **options):
    """Scan bytes in one of `MODES`."""
    is_mapped = mode == "mapped"
    return scan_tar(
        StrictRead(data, is_mapped=is_mapped), len(data), is_mapped=is_mapped, careful=mode == "careful", **options
    )


def rows_of(table):
    """Return the members of a `TarTable` as rows of the builder."""
    columns = (table.first_offset, table.header_offset, table.offset, table.size)
    rows = []
    for at, (name, kind, *numbers) in enumerate(
        zip(table.names.to_list(), table.kind.tolist(), *(column.tolist() for column in columns), strict=True)
    ):
        first, header, offset, size = numbers
        pieces = table.sparse.get(at)
        assert (offset == -1) == (pieces is not None)
        rows.append(
            Row(
                name,
                Kind(kind).name.lower(),
                first,
                header,
                None if pieces is not None else offset,
                size,
                None if pieces is None else tuple(tuple(piece) for piece in pieces),
            )
        )
    return rows


def payload_of(data, row):
    """Return the bytes of a member; those of a sparse file with its holes filled."""
    if row.pieces is None:
        return data[row.offset : row.offset + row.size]
    whole = bytearray(row.size)
    for logical, offset, length in row.pieces:
        whole[logical : logical + length] = data[offset : offset + length]
    return bytes(whole)


def codes(table):
    """Return the codes of all faults, in order."""
    return [fault.code for fault in table.faults]


def state(table):
    """Return everything that a table says, as values that can be compared."""
    return rows_of(table), table.faults, table.end


PLAIN = tuple(member(b"plain/%02d.txt" % number, b"." * 100 * number) for number in range(20))


def assert_found(*pieces, end=END, warnings=(), **options):
    """Assert that an archive of `pieces` is read as its builder says: alone, and where the fast scanner has warmed up.

    Args:
        end: What stands behind the last piece.
        warnings: What must be reported beside what the pieces say.
        options: For `scan_tar`.
    """
    for before in ((), PLAIN):
        made = archive(*before, *pieces, end=end)
        for mode in MODES:
            table = scan(made.data, mode, **options)
            assert rows_of(table) == made.rows, mode
            assert table.error() is None, table.error()
            assert sorted(codes(table)) == sorted([*made.warnings, *warnings]), mode
            assert [payload_of(made.data, row) for row in made.rows] == made.payloads, mode
            assert table.end == len(made.data) - len(end), mode


def assert_fails(*pieces, code, at, end=END, warnings=(), only_first=False):
    """Assert that the pieces are read up to the last, which is at fault; return the exception.

    Args:
        at: Offset of the fault from the start of the pieces.
        only_first: Do not try it behind other members.
    """
    for before in (() if only_first else PLAIN), ():
        shift = len(archive(*before, end=b"").data)
        made = archive(*before, *pieces, end=end)
        for mode in MODES:
            table = scan(made.data, mode)
            assert rows_of(table) == made.rows, mode
            assert codes(table) == [*warnings, code], mode
            assert table.faults[-1].offset == table.end == shift + at, mode
            error = table.error("shard.tar")
    assert (error.shard, error.offset, error.code) == ("shard.tar", at, code)
    assert f"in shard.tar at byte {at}" in str(error)
    assert error.hint
    return error
