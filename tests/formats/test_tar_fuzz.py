from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from formats.tar_builder import (
    BLOCK,
    END,
    GNU,
    archive,
    base256,
    gnu_long,
    header,
    member,
    octal,
    pad,
    pax,
    record,
)
from formats.tar_mix import KINDS, make, mixed, small_chunks
from formats.tar_modes import MODES, PLAIN, codes, rows_of, scan, state
from shardset.errors import LimitError
from shardset.formats import tar_header, tar_walk
from shardset.formats.faults import ERRORS, RECORD_ERRORS, RECORD_WARNINGS, WARNINGS
from shardset.formats.naming import Names
from shardset.formats.tar import Kind
from shardset.formats.tar_header import MAX_PAX_RECORDS, MAX_SPARSE_ROWS
from shardset.index.table import index_from_files, index_from_table

CASES = Path(__file__).parents[1] / "data" / "tar"
FIELDS = [  # offset, width and weight of header fields
    (0, 100, 2),
    (124, 12, 8),
    (148, 8, 1),
    (156, 1, 8),
    (257, 8, 3),
    (345, 155, 2),
    (386, 96, 3),
    (482, 1, 2),
    (483, 12, 2),
    (504, 8, 1),
]
FILLINGS = [
    *(octal(value) for value in (0, 1, 511, 512, 513, 1024, 8**11 - 1)),
    *(base256(value) for value in (0, 1, 512, 2**31, 2**63 - 1, 2**63 - 512, 2**63, 2**70, -1, -512)),
    *(b"", b" " * 12, b"7" * 12, b"00000000008\0", b"ustar\x0000", b"ustar  \0", b"../", b"/", b"\xff", b"\1"),
    *(bytes([letter]) for letter in b"01234567xXgLKSDVMNAEIZ"),
]


def check_table(table, size):
    """Assert what holds for any bytes: places inside the shard and in order, known codes, and nothing negative."""
    rows = rows_of(table)
    end = 0
    for row in rows:
        assert end <= row.first_offset <= row.header_offset < row.header_offset + BLOCK <= size
        end = row.header_offset + BLOCK
        assert row.kind in {kind.name.lower() for kind in Kind}
        assert row.size >= 0
        for _, offset, length in row.pieces or ((0, row.offset, row.size),):
            assert end <= offset <= offset + length <= size
            end = offset + length
    assert 0 <= table.end <= size
    for fault in table.faults:
        assert fault.code in WARNINGS | set(ERRORS)
        assert 0 <= fault.offset <= size
        str(fault.error("x.tar"))
    assert [fault.code in ERRORS for fault in table.faults[:-1]] == [False] * (
        len(table.faults) - 1
    ) or not table.faults


def check_index(table, size):
    """Assert that any table gives an index whose samples are runs of its rows."""
    index = index_from_table(table, size)
    rows = index.sample_rows.tolist()
    assert rows == sorted(rows)
    assert len(index.keys()) == index.num_samples
    assert index.num_files == sum(row.kind == "file" for row in rows_of(table))
    assert sorted(index.archive_order().tolist()) == list(range(index.num_files))
    assert len(index.digest()) == len("sha256:") + 64
    for sample in range(index.num_samples):
        index.duplicate(sample)


def seeds():
    """Small archives of every kind."""
    archives = [path.read_bytes() for path in sorted(CASES.glob("*.tar"))]
    archives += [mixed(seed, 12, odd=0.7).data for seed in range(12)]
    archives += [archive(*PLAIN[:10], make(kind, 7, 700, "tar"), *PLAIN[:3]).data for kind in sorted(KINDS)]
    return [data for data in archives if data]


def header_places(data):
    """Return where blocks with the magic are, or 0."""
    return [at for at in range(0, len(data) - BLOCK + 1, BLOCK) if data[at + 257 : at + 262] == b"ustar"] or [0]


def change_field(data, rng):
    if len(data) < BLOCK:
        return
    at = rng.choice(header_places(data))
    offset, width, _ = rng.choices(FIELDS, [weight for *_, weight in FIELDS])[0]
    if rng.random() < 0.3:
        data[at + offset + rng.randrange(width)] = rng.randrange(256)
    else:
        filling = rng.choice(FILLINGS)[:width]
        data[at + offset : at + offset + len(filling)] = filling
    if rng.random() < 0.8:  # with a right sum again, so that the field is looked at
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])


def change_body(data, rng):
    """Change bytes behind a header, where PAX records, long names and sparse maps stand."""
    at = rng.choice(header_places(data)) + BLOCK + rng.randrange(60)
    data[at : at + 1] = bytes([rng.choice(b"0123456789 =\n\0,-x\xff")])


def flip(data, rng):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data, rng):
    del data[rng.choice((rng.randrange(len(data)), rng.randrange(len(data)) // BLOCK * BLOCK)) :]


def delete(data, rng):
    at = rng.randrange(len(data))
    if rng.random() < 0.7:
        at -= at % BLOCK
    del data[at : at + rng.choice((1, 100, BLOCK, 2 * BLOCK, 10 * BLOCK))]


def duplicate(data, rng):
    at = rng.randrange(len(data)) // BLOCK * BLOCK
    data[at:at] = data[at : at + rng.choice((1, BLOCK, 2 * BLOCK, 5 * BLOCK))]


def insert(data, rng):
    at = rng.randrange(len(data)) // BLOCK * BLOCK
    data[at:at] = rng.choice((bytes(BLOCK), bytes(2 * BLOCK), rng.randbytes(BLOCK), b"x", rng.choice(PLAIN).raw))


def splice(data, rng):
    """Copy blocks over others."""
    one, two = (rng.randrange(len(data)) // BLOCK * BLOCK for _ in range(2))
    data[one : one + BLOCK] = data[two : two + BLOCK]


MUTATIONS = [change_field] * 6 + [change_body] * 2 + [flip, cut, delete, duplicate, insert, splice]


def test_mutated_archives_are_read_alike_in_every_way_without_a_crash(fuzz_count):
    archives = seeds()
    assert len(archives) > 90
    seen = set()
    for number in range(fuzz_count):
        rng = random.Random(number)
        data = bytearray(rng.choice(archives))
        for _ in range(rng.choice((1, 1, 2, 4))):
            if data:
                rng.choice(MUTATIONS)(data, rng)
        data = bytes(data)
        started = time.process_time()  # of this process, which may be stopped meanwhile
        try:
            with small_chunks(*rng.choice(((2, 1024), (5, 2048), (2048, 65536)))):
                options = {"ignore_zeros": rng.random() < 0.2}
                tables = [scan(data, mode, **options) for mode in MODES]
            check_table(tables[0], len(data))
            check_index(tables[0], len(data))
            assert state(tables[1]) == state(tables[0])
            assert state(tables[2]) == state(tables[0])
        except Exception as error:
            error.add_note(f"mutation {number}: {len(data)} bytes")
            raise
        assert time.process_time() - started < 5, f"mutation {number} took too long"
        seen.update(codes(tables[0]))
    # The mutations reach nearly every fault that there is; the others need more than a changed byte.
    rare = {"repeated_key", "duplicate_suffix", "compressed", "empty_file", "not_tar", "name_conflict"}
    if fuzz_count >= 1000:
        assert seen >= (WARNINGS | set(ERRORS)) - RECORD_WARNINGS - set(RECORD_ERRORS) - rare


def test_random_bytes_are_no_tar():
    rng = random.Random(1)
    for length in (1, 100, 511, 512, 513, 5000, 100_000):
        data = bytes([1]) + rng.randbytes(length - 1)
        for mode in MODES:
            assert codes(scan(data, mode)) == ["not_tar"]


# Hostile archives: bounded in memory and time


def old_map(rows):
    """An old GNU sparse member with a map of that many rows, all the same."""
    extension = (octal(0) + octal(0)) * 21 + b"\1" + bytes(7)
    blocks = extension * ((rows - 4) // 21 + 1)
    return header(b"s", 0, b"S", magic=GNU, patches=((386, (octal(0) + octal(0)) * 4), (482, b"\1"))) + blocks


def pax_map(rows):
    flat = b",".join([b"0"] * 2 * rows)
    return pax((b"GNU.sparse.size", b"0"), (b"GNU.sparse.map", flat)) + header(b"s", 0)


def repeated_map(rows):
    one = record(b"GNU.sparse.offset", b"0") + record(b"GNU.sparse.numbytes", b"0")
    return pax((b"GNU.sparse.size", b"0"), one * rows) + header(b"s", 0)


def payload_map(rows):
    body = pad(b"%d\n" % rows + b"0\n0\n" * min(rows, 10_000))
    keys = (b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"0")
    return pax(*keys) + header(b"s", size_field=base256(2**40)) + body


BOMBS = {
    "a PAX header of 16 MiB and a byte": lambda: header(b"x", (16 << 20) + 1, b"x") + bytes((16 << 20) + BLOCK),
    "two PAX headers of 9 MiB": lambda: pax((b"c", b"c" * (9 << 20))) * 2,
    "8 million commas": lambda: pax((b"GNU.sparse.map", b"," * 8_000_000)) + header(b"s", 0),
    "a map of 1,000,001 rows in a PAX record": lambda: pax_map(MAX_SPARSE_ROWS + 1),
    "a map of 1,000,001 rows in a payload": lambda: payload_map(MAX_SPARSE_ROWS + 1),
}
MANY = {  # what is counted one by one takes long when memory is traced, so the limits are lowered there
    "PAX records": lambda limit: pax(record(b"", b"") * (limit + 1)),
    "PAX records of small headers": lambda limit: pax(record(b"a", b"b") * 70) * (limit // 70 + 1),
    "rows of a GNU map": lambda limit: old_map(limit + 1),
    "rows of a PAX 0.0 map": repeated_map,
}


def measured(data, mode):
    """Scan with an account of memory and time; return the table and both."""
    tracemalloc.start()
    try:
        started = time.process_time()
        table = scan(data, mode)
        return table, tracemalloc.get_traced_memory()[1], time.process_time() - started
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_by_its_limit_in_little_memory_and_time(bomb, mode):
    data = BOMBS[bomb]() + member(b"a.txt", b"1").raw + END
    table, peak, seconds = measured(data, mode)
    assert isinstance(table.error(), LimitError)
    assert codes(table) == ["extension_too_big"] or codes(table) == ["repeated_extension", "extension_too_big"]
    assert len(table) == 0
    assert peak < (64 << 20) + len(data)
    assert seconds < 10


@pytest.mark.parametrize("bomb", MANY)
def test_what_is_counted_one_by_one_is_refused_at_its_limit_and_takes_a_few_bytes_each(bomb, monkeypatch):
    limit = 5000
    monkeypatch.setattr(tar_walk, "MAX_PAX_RECORDS", limit)
    monkeypatch.setattr(tar_header, "MAX_SPARSE_ROWS", limit)
    data = MANY[bomb](limit) + member(b"a.txt", b"1").raw + END
    table, peak, _ = measured(data, "mapped")
    assert isinstance(table.error(), LimitError)
    assert str(limit) in str(table.error())
    assert len(table) == 0
    assert peak < 300 * limit + 2 * len(data)


@pytest.mark.slow
def test_the_limits_are_100_000_pax_records_and_a_million_rows():
    assert (MAX_PAX_RECORDS, MAX_SPARSE_ROWS) == (100_000, 1_000_000)
    row = member(b"a.txt", b"1", lead=pax(record(b"", b"") * MAX_PAX_RECORDS))
    assert rows_of(scan(archive(row).data, "careful")) == [row.row]
    assert codes(scan(pax(record(b"", b"") * (MAX_PAX_RECORDS + 1)), "careful")) == ["extension_too_big"]


@pytest.mark.slow
def test_a_map_of_a_million_rows_is_read_and_of_one_more_refused():
    assert codes(scan(old_map(MAX_SPARSE_ROWS - 25) + bytes(BLOCK) + END, "careful")) == []
    assert codes(scan(old_map(MAX_SPARSE_ROWS + 1) + END, "careful")) == ["extension_too_big"]


BROKEN = {
    "a length of 10 million digits": (lambda: pax(b"1" * 10_000_000 + b" a=b\n"), "bad_pax"),
    "a size of 10 million digits": (lambda: pax((b"size", b"9" * 10_000_000)) + header(b"a", 0), "bad_pax"),
    "10 million lines in a value": (lambda: pax((b"comment", b"\n" * 10_000_000), b"1 "), "bad_pax"),
    "15 million zeros": (lambda: pax(bytes(15_000_000) + b"x"), "bad_pax"),
    "a map of one long number": (
        lambda: pax((b"GNU.sparse.map", b"1" * 10_000_000), (b"GNU.sparse.size", b"1")) + header(b"a", 0),
        "bad_sparse",
    ),
    "2**63": (lambda: header(b"a", size_field=base256(2**63)), "bad_number"),
    "2**63 - 1": (lambda: header(b"a", size_field=base256(2**63 - 1)), "truncated_payload"),
    "2**63 - 1 in PAX": (lambda: pax((b"size", b"%d" % (2**63 - 1))) + header(b"a", 0), "truncated_payload"),
    "2**63 in PAX": (lambda: pax((b"size", b"%d" % 2**63)) + header(b"a", 0), "bad_pax"),
    "-512": (lambda: header(b"a", size_field=base256(-512)), "bad_number"),
    "-512 again and again": (lambda: header(b"a", size_field=base256(-512)) * 5000, "bad_number"),
    "5000 empty PAX headers": (lambda: header(b"x", 0, b"x") * 5000, "dangling_extension"),
    "5000 empty long names": (lambda: gnu_long(b"") * 5000, "dangling_extension"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("broken", BROKEN)
def test_hostile_numbers_and_loops_are_refused_in_little_memory_and_time(broken, mode):
    build, code = BROKEN[broken]
    data = build() + END
    table, peak, seconds = measured(data, mode)
    assert codes(table)[-1] == code
    assert peak < (64 << 20) + len(data)
    assert seconds < 10
    assert len(str(table.error())) < 1000


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "unit"), [("careful", b"a"), ("mapped", b"a/"), ("windows", b"../")])
def test_a_name_of_16_mib_is_a_name(mode, unit):
    name = unit * ((16 << 20) // len(unit) - 1) + b"z"
    data = archive(member(b"x", b"1", lead=gnu_long(name))).data
    table, peak, seconds = measured(data, mode)
    assert rows_of(table)[0].name == name
    assert peak < (64 << 20) + len(data)
    assert seconds < 10


@pytest.mark.parametrize("mode", MODES)
def test_a_name_at_the_limit_of_extensions_leaves_room_for_no_other(mode):
    lead = gnu_long(b"n" * (16 << 20)) + pax((b"mtime", b"1"))
    table = scan(archive(member(b"x", b"1", lead=lead)).data, mode)
    assert codes(table) == ["extension_too_big"]
    assert table.end == (16 << 20) + BLOCK


@pytest.mark.slow
def test_ever_more_extensions_do_not_take_ever_more_time():
    def seconds(count):
        data = pax((b"a", b"b")) * count + END
        started = time.process_time()
        scan(data, "careful")
        return time.process_time() - started

    def least(count):
        return min(seconds(count) for _ in range(3))

    seconds(1000)
    assert least(16_000) < 4 * 2.5 * max(least(4000), 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [b"a.jpg", b"%d.jpg", b"a.%d", b"d/.%d", b"__m%d__/x", b"a.__key__", b"%d", b"\xff.\xc4\xb0%d", b"a.JPG%d"]
)
def test_a_hundred_thousand_names_of_any_kind_are_grouped_in_bounded_time(name):
    count = 100_000
    names = Names.of([name % number if b"%" in name else name for number in range(count)])
    places = np.arange(count, dtype=np.int64) * 1024 + 512
    started = time.process_time()
    index = index_from_files(names, places, np.full(count, 5, np.int64), count * 1024)
    assert index.num_files == count
    assert time.process_time() - started < 20
