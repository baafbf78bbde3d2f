from __future__ import annotations

from dataclasses import replace

import pytest

from formats.tar_builder import (
    BLOCK,
    END,
    GNU,
    Segments,
    archive,
    base256,
    gnu_long,
    header,
    member,
    octal,
    pad,
    pax,
    record,
    sparse_old,
    sparse_pax_00,
    sparse_pax_01,
    sparse_pax_10,
)
from formats.tar_modes import MODES, assert_fails, assert_found, rows_of, scan
from shardset.errors import FormatError, LimitError, TruncatedError
from shardset.formats.faults import Fault

A = member(b"a.txt", b"1")
B = member(b"b.txt", b"2")
LONG = b"d" * 120 + b"/" + b"n" * 130 + b".txt"
SEGMENTS = Segments(((1024, b"x" * 512), (4096, b"y" * 700)), 4796)


# PAX


def test_a_pax_path_replaces_the_name_and_its_prefix():
    path = LONG + "é".encode()
    assert_found(member(b"short", b"1", prefix=b"p", lead=pax((b"path", path)), true_name=path), B)


def test_a_pax_record_counts_bytes_and_its_own_digits():
    # Around lengths at which the count gains a digit.
    for size in (*range(1, 20), *range(85, 100), *range(980, 1000)):
        lead = pax((b"comment", "é".encode() * size), (b"path", b"right.txt"))
        assert_found(member(b"x", b"1", lead=lead, true_name=b"right.txt"))


def test_of_a_repeated_pax_key_the_last_wins():
    lead = pax((b"path", b"first.txt"), (b"size", b"3"), (b"path", b"last.txt"), (b"size", b"5"))
    assert_found(member(b"x", b"12345", lead=lead, true_name=b"last.txt"), B)


def test_a_pax_value_may_hold_newlines_that_look_like_records():
    lead = pax((b"comment", b"one\n19 path=wrong.txt\n12 size=99\n"), (b"path", b"right.txt"))
    assert_found(member(b"x", b"1", lead=lead, true_name=b"right.txt"), B)


def test_an_empty_pax_value_withdraws_the_key():
    lead = pax((b"path", b"wrong.txt"), (b"size", b"99"), (b"path", b""), (b"size", b""))
    assert_found(member(b"right.txt", b"1", lead=lead), B)


def test_a_pax_body_may_be_empty_or_padded_with_nuls():
    body = record(b"path", b"right.txt") + bytes(7)
    lead = header(b"PaxHeaders/x", len(body), b"x") + pad(body)
    assert_found(member(b"wrong", b"1", lead=lead, true_name=b"right.txt"), member(b"a.txt", b"1", lead=pax()), B)


@pytest.mark.parametrize(
    "body",
    [
        b"0 path=a\n",
        b"-1 path=a\n",
        b"99 path=a\n",  # longer than the body
        b"8 path=a",
        b"8 path=a\n",  # ends before its newline
        b"11 path=a\n",
        b"9 path=a\nx",
        b"9 path=a\n\0x",
        b"9 path:a\n",
        b" 9 path=a\n",
        b"+9 path=a\n",
        b"9_0 path=a\n",
        b"path=a\n",
        b"2 ",
        b"2\n",
        b"1" * 30 + b" a=b\n",
        "٩ path=a\n".encode(),
    ],
)
def test_a_broken_pax_record_is_an_error(body):
    error = assert_fails(A, pax(body) + header(b"b.txt", 1) + pad(b"2"), code="bad_pax", at=1024, only_first=True)
    assert type(error) is FormatError
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    "value", [b"abc", b"-1", b"1.5", b"0x10", b"1_0", b" 1", b"1 ", "٣".encode(), b"9" * 19, b"9" * 5000]
)
def test_a_pax_size_that_is_no_number_is_an_error(value):
    assert_fails(A, pax((b"size", value)) + header(b"b.txt", 1) + pad(b"2"), code="bad_pax", at=1024)


def test_a_pax_size_that_is_withdrawn_or_overwritten_need_not_be_a_number():
    lead = pax((b"size", b"abc"), (b"size", b"1"))
    assert_found(member(b"a.txt", b"1", lead=lead), B)


def test_the_fault_of_a_pax_size_stands_at_the_header_that_holds_it():
    pieces = gnu_long(b"long.txt\0") + pax((b"size", b"abc")) + header(b"b.txt", 1) + pad(b"2")
    assert_fails(A, pieces, code="bad_pax", at=2048)


@pytest.mark.parametrize("stated", [0, 1, 512, 77777, 8**11 - 1])
def test_a_pax_size_wins_over_the_header(stated):
    inside = archive(A, B).data
    lead = pax((b"size", b"%d" % len(inside)))
    assert_found(member(b"in.tar", inside, size=stated, lead=lead), B)
    assert_found(member(b"empty.txt", b"", size=stated, lead=pax((b"size", b"0"))), B)


def test_pax_records_cover_the_next_file_and_no_extension_between():
    lead = pax((b"size", b"2048")) + gnu_long(b"longname.txt\0")
    assert_found(member(b"x", b"s" * 2048, size=0, lead=lead, true_name=b"longname.txt"), member(b"b.txt", b"t" * 16))
    lead = pax((b"size", b"2048")) + pax((b"comment", b"c"), typeflag=b"g") + gnu_long(b"x", b"K")
    assert_found(member(b"x", b"s" * 2048, size=0, lead=lead), B)


def test_pax_records_end_with_their_member():
    lead = pax((b"path", b"p.txt"), (b"size", b"600"))
    assert_found(member(b"x", b"s" * 600, size=0, lead=lead, true_name=b"p.txt"), A, B)
    assert_found(member(b"d", typeflag=b"5", kind="dir", lead=pax((b"path", b"q/")), true_name=b"q/"), A, B)


def test_a_solaris_x_header_is_a_pax_header():
    lead = pax((b"path", b"right.txt"), (b"size", b"5"), typeflag=b"X")
    assert_found(member(b"wrong", b"12345", size=0, lead=lead, true_name=b"right.txt"), B)


def test_of_two_pax_headers_both_count_and_the_last_wins():
    lead = pax((b"path", b"one.txt"), (b"size", b"5")) + pax((b"path", b"two.txt"))
    warnings = ("repeated_extension",)
    assert_found(member(b"x", b"12345", size=0, lead=lead, true_name=b"two.txt", warnings=warnings), B)


def test_two_pax_headers_of_times_alone_are_reported_too():
    lead = pax((b"mtime", b"1700000000.5")) * 2
    assert_found(member(b"a.txt", b"1", lead=lead, warnings=("repeated_extension",)), B)


def test_a_global_header_of_comments_is_no_part_of_a_member():
    comment = pax((b"comment", b"0123456789abcdef"), typeflag=b"g")
    assert_found(comment, A, comment, comment, B, comment)


def test_what_a_global_header_says_of_names_and_sizes_is_ignored_and_reported():
    keys = (b"path", b"linkpath", b"size", b"GNU.sparse.map", b"GNU.sparse.realsize")
    for key in keys:
        piece = pax((key, b"3"), typeflag=b"g")
        assert_found(piece, A, B, warnings=("global_override_ignored",))
    table = scan(archive(pax(*((key, b"3") for key in keys), typeflag=b"g"), A).data, "careful")
    assert [fault.offset for fault in table.faults] == [0]
    assert all(key.decode() in table.faults[0].message for key in keys)


def test_a_global_header_between_a_pax_header_and_its_member_changes_nothing():
    lead = pax((b"path", b"p.txt")) + pax((b"comment", b"c"), typeflag=b"g")
    assert_found(member(b"x", b"1", lead=lead, true_name=b"p.txt"), B)


def test_a_broken_global_header_is_an_error():
    assert_fails(A, pax(b"0 path=a\n", typeflag=b"g") + A.raw, code="bad_pax", at=1024)


def test_a_pax_path_that_is_no_utf8_is_kept_as_bytes_and_reported():
    name = b"caf\xe9/" + b"n" * 120 + b".txt"
    assert_found(member(b"x", b"1", lead=pax((b"path", name)), true_name=name, warnings=("name_not_utf8",)), B)


def test_a_pax_path_is_cut_at_its_first_nul():
    assert_found(member(b"x", b"1", lead=pax((b"path", b"a.txt\0junk")), true_name=b"a.txt"), B)


def test_pax_headers_before_links_and_folders_name_them():
    lead = pax((b"path", LONG), (b"linkpath", LONG), (b"size", b"5000"))
    for typeflag, kind in ((b"2", "symlink"), (b"5", "dir"), (b"1", "hardlink"), (b"6", "fifo")):
        assert_found(member(b"x", b"", typeflag, kind=kind, lead=lead, true_name=LONG), B)


# GNU long names


@pytest.mark.parametrize("length", [1, 99, 100, 101, 255, 510, 511, 512, 513, 1023, 1024, 5000])
@pytest.mark.parametrize("nul", [b"\0", b"", b"\0junk"])
def test_a_gnu_long_name_is_read_with_and_without_its_nul(length, nul):
    name = (b"long/" * 1000)[: length - 1] + b"x"
    assert_found(member(b"x", b"1", magic=GNU, lead=gnu_long(name + nul), true_name=name), B)


def test_long_name_and_long_link_come_in_any_order():
    name, link = gnu_long(LONG + b"\0"), gnu_long(LONG + b"k\0", b"K")
    for lead in (name + link, link + name):
        assert_found(member(b"x", b"", b"2", kind="symlink", magic=GNU, lead=lead, true_name=LONG), B)


def test_a_long_name_replaces_the_prefix_too():
    assert_found(member(b"x", b"1", prefix=b"p", lead=gnu_long(LONG), true_name=LONG), B)


def test_a_pax_path_wins_over_a_long_name_in_any_order():
    name, path = gnu_long(b"gnu.txt\0"), pax((b"path", b"pax.txt"))
    for lead in (name + path, path + name):
        assert_found(member(b"x", b"1", lead=lead, true_name=b"pax.txt", warnings=("name_conflict",)), B)


def test_of_two_long_names_the_last_wins():
    lead = gnu_long(b"one.txt\0") + gnu_long(b"two.txt\0")
    assert_found(member(b"x", b"1", lead=lead, true_name=b"two.txt", warnings=("repeated_extension",)), B)


@pytest.mark.parametrize(
    "lead", [pax((b"path", b"p")), gnu_long(b"l\0"), gnu_long(b"l\0", b"K"), pax((b"path", b"p"), typeflag=b"X")]
)
@pytest.mark.parametrize("end", [b"", bytes(512), END])
def test_an_extension_without_a_member_is_an_error(lead, end):
    error = assert_fails(A, lead, code="dangling_extension", at=1024, end=end)
    assert type(error) is FormatError


@pytest.mark.parametrize("typeflag", [b"x", b"X", b"g", b"L", b"K"])
def test_an_extension_whose_body_is_cut_is_an_error(typeflag):
    for size, body in ((600, b"b" * 512), (600, b""), (600, b"b" * 599), (512, b"b" * 100)):
        cut = header(b"ext", size, typeflag) + body
        error = assert_fails(A, cut, code="truncated_payload", at=1024, end=b"")
        assert isinstance(error, TruncatedError)


def test_an_extension_may_end_with_the_bytes_without_its_padding():
    assert_fails(A, pax((b"path", b"p"))[:521], code="dangling_extension", at=1024, end=b"")
    for mode in MODES:
        table = scan(A.raw + header(b"x", 6, b"g") + b"6 a=b\n", mode)
        assert table.faults == (Fault("no_end_marker", 1024 + 518),)
        assert table.end == 1024 + 518


@pytest.mark.parametrize("typeflag", [b"x", b"X", b"g", b"L", b"K"])
@pytest.mark.parametrize("size", [(16 << 20) + 1, 8**11 - 1])
def test_an_extension_above_16_mib_is_refused_before_it_is_read(typeflag, size):
    error = assert_fails(A, header(b"ext", size, typeflag), code="extension_too_big", at=1024)
    assert isinstance(error, LimitError)


# Sparse files


@pytest.mark.parametrize("make", [sparse_old, sparse_pax_00, sparse_pax_01, sparse_pax_10])
@pytest.mark.parametrize(
    "segments",
    [
        SEGMENTS,
        Segments(((0, b"x" * 512),), 512),
        Segments(((0, b"x"), (2, b"y"), (4, b"z")), 5),
        Segments(((0, b"x" * 100), (100, b"y" * 100)), 200),  # neighbours
        Segments(((512, b"x" * 512), (9000, b"")), 9000),  # the empty piece that GNU tar puts at the end
        Segments(((9000, b""),), 9000),
        Segments((), 9000),
        Segments(tuple((1000 * row, b"%d" % row) for row in range(5)), 10000),
        Segments(tuple((1000 * row, b"%d" % row) for row in range(25)), 30000),
        Segments(tuple((1000 * row, b"%03d" % row * 300) for row in range(46)), 50000),
        Segments(tuple((2 * row, b"x") for row in range(200)), 10**6),
    ],
)  # fmt: skip
def test_a_sparse_file_is_placed_piece_by_piece(make, segments):
    assert_found(make(b"sp.bin", segments), B, make(b"d/" + b"n" * 50, segments))


def test_a_sparse_file_is_a_file_even_with_a_slash_behind_its_name():
    assert_found(sparse_old(b"s/", SEGMENTS), B)


def test_a_sparse_file_may_have_a_long_name():
    assert_found(sparse_old(b"x", SEGMENTS, lead=gnu_long(LONG), true_name=LONG), B)
    assert_found(sparse_old(b"x", SEGMENTS, lead=pax((b"path", LONG)), true_name=LONG), B)
    assert_found(sparse_pax_01(LONG, SEGMENTS), sparse_pax_10(LONG, SEGMENTS), B)


def test_the_name_in_a_sparse_map_wins_over_the_made_up_path():
    assert_found(sparse_pax_10(b"true.bin", SEGMENTS, (b"path", b"GNUSparseFile.7/true.bin")), B)


def test_the_stored_size_of_a_sparse_file_may_come_from_pax():
    made = sparse_pax_10(b"sp.bin", SEGMENTS, (b"size", b"%d" % (512 + 1212)))
    at = made.row.header_offset
    zeroed = header(b"./GNUSparseFile.7/x", 0)
    assert_found(A, replace(made, raw=made.raw[:at] + zeroed + made.raw[at + BLOCK :]), B)


def test_a_sparse_file_of_2_to_the_60_bytes_takes_no_memory():
    segments = Segments(((2**60, b"x" * 5),), 2**60 + 5)
    for make in (sparse_pax_00, sparse_pax_01, sparse_pax_10):
        made = archive(make(b"huge.bin", segments), B)
        for mode in MODES:
            table = scan(made.data, mode)
            assert rows_of(table) == made.rows
            assert not table.faults


def old_map(*numbers, real=b"00000001750\0"):
    """A member of 512 stored bytes whose header has a map of the given fields."""
    patches = ((386, b"".join(numbers)), (483, real))
    return header(b"sp.bin", 512, b"S", magic=GNU, patches=patches) + b"x" * 512


def broken_maps():
    yield old_map(octal(600), octal(500))  # past the real size
    yield old_map(octal(0), octal(512), octal(100), octal(1))  # overlaps
    yield old_map(octal(512), octal(1), octal(0), octal(1))  # descends
    yield old_map(octal(0), b"9" * 12)
    yield old_map(octal(0), base256(-1))
    yield old_map(octal(0), octal(512), real=base256(-1))
    yield old_map(octal(0), octal(513))  # more than is stored
    for records in (
        [(b"GNU.sparse.map", b"0,512")],  # no size
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.map", b"0")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.map", b"0,512,")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.map", b"0,x")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.map", b"0,-1")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.map", b"0,513")],
        [(b"GNU.sparse.size", b"9999"), (b"GNU.sparse.map", b"0,513")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.map", b"256,256,0,256")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.offset", b"0")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.numbytes", b"512"), (b"GNU.sparse.offset", b"0")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.offset", b"0"), (b"GNU.sparse.offset", b"1")],
        [(b"GNU.sparse.size", b"512"), (b"GNU.sparse.numblocks", b"1")],  # its map is missing
        [(b"GNU.sparse.size", b"9" * 19), (b"GNU.sparse.map", b"0,512")],
        [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0")],  # no size
        [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"512")],  # "xxx" is no map
    ):
        yield pax(*records) + header(b"sp.bin", 512) + b"x" * 512
    for lines in (
        b"1\n0\n9\n",
        b"1\n0\nx\n",
        b"-1\n",
        b"\n",
        b"2\n0\n1\n0\n1\n",
        b"9" * 40 + b"\n",
        b"5\n" + b"0" * 600,
    ):
        lead = pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"8"))
        body = pad(lines)
        yield lead + header(b"sp.bin", len(body)) + body


@pytest.mark.parametrize("broken", list(broken_maps()))
def test_a_broken_sparse_map_is_an_error(broken):
    at = 1024 + broken.index(b"sp.bin")
    error = assert_fails(A, broken, code="bad_sparse", at=at)
    assert type(error) is FormatError
    assert error.member == "sp.bin"


def test_a_sparse_map_that_the_shard_ends_in_is_truncated():
    made = sparse_old(b"sp.bin", Segments(tuple((2 * row, b"x") for row in range(60)), 1000))
    for length in (512, 600, 1024, 1535):
        assert_fails(A, made.raw[:length], code="truncated_header", at=1024, end=b"")
    assert_fails(A, made.raw[:2048], code="truncated_payload", at=1024, end=b"")
