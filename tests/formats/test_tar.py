from __future__ import annotations

import hashlib
import io
import json
import mmap
import tarfile
from pathlib import Path

import pytest

from formats.tar_builder import (
    BLOCK,
    END,
    GNU,
    V7,
    Segments,
    archive,
    base256,
    gnu_long,
    header,
    member,
    pax,
    sparse_old,
)
from formats.tar_modes import MODES, StrictRead, assert_fails, assert_found, codes, payload_of, rows_of, scan
from shardset.errors import ChecksumError, CompressedShardError, FormatError, TruncatedError
from shardset.formats.faults import ERRORS, WARNINGS, Fault
from shardset.formats.tar import Kind, scan_tar
from shardset.index.table import index_from_table

CASES = Path(__file__).parents[1] / "data" / "tar"
EXPECTED = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))["cases"]
A = member(b"a.txt", b"1")
B = member(b"b.txt", b"2")
LONG = b"d" * 120 + b"/" + b"n" * 130 + b".txt"
SEGMENTS = Segments(((1024, b"x" * 512), (4096, b"y" * 700)), 4796)


def as_expected(table):
    """Return the members of a table as expected.json writes them, without the digests."""
    rows = []
    for row in rows_of(table):
        name = row.name.decode("utf-8", "surrogateescape")
        one = {
            "name": name,
            "kind": row.kind,
            "header_offset": row.header_offset,
            "offset": row.offset,
            "size": row.size,
        }
        if row.pieces is not None:
            one["sparse"] = [list(piece) for piece in row.pieces]
        if any("\udc80" <= letter <= "\udcff" for letter in name):
            one["name_hex"] = row.name.hex()
        rows.append(one)
    return rows


def without_digest(members):
    return [{key: value for key, value in one.items() if key != "sha256"} for one in members]


# The case files


def test_every_case_file_has_its_right_answer_and_the_other_way_round():
    assert sorted(EXPECTED) == sorted(path.name for path in CASES.glob("*.tar"))
    assert len(EXPECTED) > 60


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_case_file_gives_its_expected_members_and_faults(name, mode):
    data, expected = (CASES / name).read_bytes(), EXPECTED[name]
    assert hashlib.sha256(data).hexdigest() == expected["sha256"]
    table = scan(data, mode)
    assert as_expected(table) == without_digest(expected["members"])
    for row, one in zip(rows_of(table), expected["members"], strict=True):
        if "sha256" in one:
            assert hashlib.sha256(payload_of(data, row)).hexdigest() == one["sha256"]
    error = table.error(name)
    if expected["error"] is None:
        assert error is None
    else:
        assert (error.code, error.offset) == (expected["error"]["code"], expected["error"]["at"])
    # A code stands once in the file, however many members it concerns.
    assert sorted(set(codes(table)) & WARNINGS) == sorted(expected["warnings"])


@pytest.mark.parametrize("mode", MODES)
def test_the_case_files_with_zero_blocks_inside_are_read_on_when_asked(mode):
    cases = {name: case for name, case in EXPECTED.items() if "members_ignore_zeros" in case}
    assert cases
    for name, case in cases.items():
        table = scan((CASES / name).read_bytes(), mode, ignore_zeros=True)
        assert as_expected(table) == without_digest(case["members_ignore_zeros"])


@pytest.mark.parametrize("name", [name for name, case in EXPECTED.items() if "samples" in case])
def test_a_case_file_gives_its_expected_samples(name):
    data = (CASES / name).read_bytes()
    index = index_from_table(scan(data, "careful"), len(data))
    samples = [
        {"key": key, "parts": [index.suffixes[number] for number in index.suffix_ids[first:last].tolist()]}
        for key, first, last in zip(
            index.keys().to_text_list(), index.sample_rows[:-1].tolist(), index.sample_rows[1:].tolist(), strict=True
        )
    ]
    assert samples == EXPECTED[name]["samples"]
    assert "duplicate_suffix" not in {fault.code for fault in index.faults}


@pytest.mark.parametrize("name", [name for name, case in EXPECTED.items() if "sample_error" in case])
def test_a_case_file_with_a_faulty_sample_names_its_key_and_suffix(name):
    data, expected = (CASES / name).read_bytes(), EXPECTED[name]["sample_error"]
    index = index_from_table(scan(data, "careful"), len(data))
    faults = [fault for fault in index.faults if fault.code == expected["code"]]
    assert len(faults) == 1
    error = next(error for sample in range(index.num_samples) if (error := index.duplicate(sample)))
    assert (error.key, error.field) == (expected["key"], expected["suffix"])
    assert all(str(offset) in str(error) and str(offset) in faults[0].message for offset in error.offsets)


# Formats


def test_v7_headers_without_any_magic_are_read():
    assert_found(
        member(b"a.txt", b"hello", b"\0", magic=V7),
        member(b"old/", b"", b"\0", magic=V7, kind="dir"),
        member(b"old/b.txt", b"x" * 600, b"0", magic=V7),
        member(b"c.txt", b"", b"1", magic=V7, kind="hardlink", link=b"a.txt"),
        member(b"d.txt", b"", b"2", magic=V7, kind="symlink", link=b"a.txt"),
    )


def test_a_prefix_counts_behind_the_posix_magic_alone():
    patches = ((345, b"14524770400\0"), (357, b"14524770400\0"))
    assert_found(
        member(b"a.txt", b"1", prefix=b"dir", true_name=b"dir/a.txt"),
        member(b"n" * 100, b"1", prefix=b"p" * 155, true_name=b"p" * 155 + b"/" + b"n" * 100),
        member(b"b.txt", b"1", magic=GNU, patches=patches),
        member(b"c.txt", b"1", magic=V7, prefix=b"dir"),
    )


def test_gnu_headers_are_read():
    assert_found(member(b"a.txt", b"1" * 513, magic=GNU), member(b"d/", typeflag=b"5", kind="dir", magic=GNU), B)


def test_a_posix_magic_with_another_version_is_read_as_posix():
    assert_found(member(b"a.txt", b"1", magic=b"ustar\0\0\0", prefix=b"p", true_name=b"p/a.txt"), B)


def test_a_name_that_fills_its_field_ends_there():
    assert_found(member(b"n" * 100, b"1"), member(b"n" * 99, b"1"), member(b"n", b"1"))


def test_sizes_around_a_block_are_padded_to_it():
    sizes = (0, 1, 511, 512, 513, 1023, 1024, 1025)
    assert_found(*(member(b"%d.bin" % size, b"p" * size) for size in sizes))


def test_equal_names_are_all_kept_in_archive_order():
    assert_found(A, B, A, A)


# Numbers


@pytest.mark.parametrize(
    "field",
    [b"00000000005\0", b"00000000005 ", b"000000000005", b"          5\0", b"          5 ", b"5", b" 5 ", b"5\0 12"],
)
def test_an_octal_size_is_read_in_all_its_forms(field):
    assert_found(member(b"a.txt", b"12345", size_field=field), B)


@pytest.mark.parametrize("field", [bytes(12), b" " * 12, b"\x0012345678901"])
def test_an_empty_size_field_means_zero(field):
    assert_found(member(b"a.txt", b"", size_field=field), B)


@pytest.mark.parametrize("field", [b"00000000008\0", b"0o7", b"1_0", b"+5", b"-5", b"0x5", "٣".encode(), b"5,", b"\t5"])
def test_a_size_that_is_not_octal_is_an_error(field):
    error = assert_fails(A, header(b"b.txt", size_field=field), code="bad_number", at=1024)
    assert type(error) is FormatError
    assert error.member == "b.txt"


def test_a_base_256_size_is_read():
    assert_found(member(b"a.txt", b"12345", size_field=base256(5)), member(b"b.txt", size_field=base256(0)), B)


@pytest.mark.parametrize("size", [-1, -512, -(2**63), -(2**90)])
def test_a_negative_size_is_an_error_and_no_loop(size):
    error = assert_fails(A, header(b"b.txt", size_field=base256(size)), code="bad_number", at=1024)
    assert str(size) in str(error)


@pytest.mark.parametrize("size", [2**63, 2**64 + 5, 2**70, 2**94 - 1])
def test_a_size_beyond_63_bits_is_an_error(size):
    assert_fails(A, header(b"b.txt", size_field=base256(size)), code="bad_number", at=1024)


@pytest.mark.parametrize("size", [2**63 - 1, 2**63 - 512, 9 << 30, 2 * BLOCK + 1])
def test_a_size_beyond_the_end_of_the_shard_is_an_error(size):
    error = assert_fails(A, header(b"b.txt", size_field=base256(size)), code="truncated_payload", at=1024)
    assert isinstance(error, TruncatedError)
    assert str(size) in str(error)
    assert error.member == "b.txt"


def test_the_largest_octal_size_is_one_byte_short_of_8_gib():
    assert_fails(A, header(b"b.txt", 8**11 - 1), code="truncated_payload", at=1024)
    assert_fails(A, header(b"b.txt", size_field=b"7" * 12), code="truncated_payload", at=1024)


@pytest.fixture
def hole_file(tmp_path):
    """A shard of 13 GB that takes a few kilobytes on disk: 3 GiB in octal, 9 GiB in base-256, 1 GiB by PAX."""
    path = tmp_path / "big.tar"
    sizes = (3 << 30, 9 << 30, 1 << 30, 2)
    blocks = (
        header(b"a.bin", sizes[0]),
        header(b"b.bin", size_field=base256(sizes[1])),
        pax((b"size", b"%d" % sizes[2])) + header(b"c.bin"),
        header(b"d.txt", sizes[3]),
    )
    with path.open("wb") as file:
        for block, size in zip(blocks, sizes, strict=True):
            file.write(block)
            file.seek(size + (-size % BLOCK), io.SEEK_CUR)
        file.truncate(file.tell() + 1024)
    yield path
    path.unlink()


@pytest.mark.parametrize("mode", MODES)
def test_members_beyond_4_and_8_gib_are_placed(hole_file, mode):
    size = hole_file.stat().st_size
    with (
        hole_file.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
        memoryview(whole) as view,
    ):
        buffer = view if mode == "mapped" else whole
        table = scan_tar(
            lambda offset, length: buffer[offset : offset + length],
            size,
            is_mapped=mode == "mapped",
            careful=mode == "careful",
        )
    assert table.offset.tolist() == [512, 3221226496, 12884904448, 13958646784]
    assert table.size.tolist() == [3 << 30, 9 << 30, 1 << 30, 2]
    assert table.first_offset.tolist() == [0, 3221225984, 12884902912, 13958646272]
    assert not table.faults


# Checksums


@pytest.mark.parametrize(
    "form",
    [b"%06o\0 ", b"%06o \0", b"%06o  ", b"%06o\0\0", b"%07o\0", b"%07o ", b"%08o", b"%6o\0 ", b"%7o\0", b"%o", b" %o "],
)
def test_a_checksum_is_read_in_all_its_forms(form):
    assert_found(member(b"a.txt", b"1", checksum=form), B)


def test_the_sum_of_signed_bytes_is_valid_too():
    assert_found(member(b"caf\xe9.txt", b"1", is_signed=True, warnings=("name_not_utf8",)), B)
    assert_found(member("café.txt".encode(), b"1", is_signed=True), B)


@pytest.mark.parametrize("form", [b"%06o\0 ", b"%07o\0", b"%07o ", b"%6o\0 ", b"%o"])
def test_a_wrong_checksum_is_an_error_with_both_sums(form):
    block = bytearray(header(b"b.txt", 1, checksum=form))
    block[0] += 1
    error = assert_fails(A, bytes(block), code="bad_checksum", at=1024)
    assert isinstance(error, ChecksumError)
    stated = int(header(b"b.txt", 1)[148:154], 8)
    assert str(stated) in str(error)
    assert str(stated + 1) in str(error)


@pytest.mark.parametrize("field", [b"xxxxxx\0 ", bytes(8), b" " * 8])
def test_a_header_without_a_checksum_is_an_error(field):
    assert_fails(A, header(b"b.txt", checksum=field), code="bad_checksum", at=1024)


# Ends


def test_an_archive_need_not_be_padded_to_10240_bytes():
    for blocks in (2, 3, 17, 18):
        assert_found(A, end=bytes(blocks * BLOCK))


def test_the_end_of_the_bytes_on_a_block_border_is_an_end_with_a_warning():
    assert_found(A, B, end=b"", warnings=("no_end_marker",))
    table = scan(A.raw, "careful")
    assert table.faults == (Fault("no_end_marker", 1024),)


@pytest.mark.parametrize("length", [1, 100, 511, 512, 513, 1023])
def test_an_end_marker_of_less_than_two_blocks_is_accepted_with_a_warning(length):
    assert_found(A, B, end=bytes(length), warnings=("short_end_marker",))


def test_a_lone_zero_block_is_reported_with_the_bytes_left_unread():
    rest = archive(B).data
    assert_found(A, end=bytes(512) + rest, warnings=("data_after_end",))
    fault = scan(archive(A, end=bytes(512) + rest).data, "careful").faults[0]
    assert fault.offset == 1536
    assert f"{len(rest)} bytes" in fault.message


def test_bytes_behind_the_end_marker_are_reported_where_they_begin():
    for zeros in (1024, 10240, 3 << 20):
        for junk in (b"\x01" + b"\xff" * 2000, bytes(100) + b"\xff", A.raw, b"x"):
            data = archive(A, end=bytes(zeros) + junk).data
            for mode in MODES:
                table = scan(data, mode)
                assert table.faults == (
                    Fault(
                        "data_after_end", 1024 + zeros, None, f"{len(junk)} bytes behind the end marker are not read"
                    ),
                )
                assert table.end == 1024


def test_a_long_row_of_zero_blocks_is_looked_through_in_large_reads():
    read = StrictRead(archive(A, end=bytes(20 << 20)).data)
    assert len(scan_tar(read, len(read.data))) == 1
    assert read.calls < 40


def test_concatenated_archives_are_read_on_when_asked():
    first, second, third = archive(A, B), archive(B, A), archive(member(b"\xffz", b"\xff" * 3000))
    data = first.data + bytes(9 * 512) + second.data + third.data
    for mode in MODES:
        table = scan(data, mode)
        assert [row.name for row in rows_of(table)] == [b"a.txt", b"b.txt"]
        assert codes(table) == ["data_after_end"]
        table = scan(data, mode, ignore_zeros=True)
        assert [row.name for row in rows_of(table)] == [b"a.txt", b"b.txt", b"b.txt", b"a.txt", b"\xffz"]
        assert table.header_offset.tolist() == [0, 1024, 7680, 8704, 10752]
        assert codes(table) == ["name_not_utf8"]


def test_reading_on_behind_zero_blocks_does_not_pass_over_other_junk():
    data = archive(A, end=END + b"junk" * 128 + archive(B).data).data
    for mode in MODES:
        table = scan(data, mode, ignore_zeros=True)
        assert codes(table) == ["bad_checksum"]
        assert table.faults[0].offset == 2048


def test_junk_where_a_header_must_be_is_an_error():
    assert_fails(A, B, b"junk" * 128, code="bad_checksum", at=2048)
    assert_fails(A, B, b"junk" * 128, code="bad_checksum", at=2048, end=b"")


@pytest.mark.parametrize("length", [1, 100, 200, 511])
def test_the_end_of_the_bytes_inside_a_header_is_an_error(length):
    error = assert_fails(A, header(b"b.txt", 1)[:length], code="truncated_header", at=1024, end=b"")
    assert isinstance(error, TruncatedError)
    assert str(length) in str(error)


@pytest.mark.parametrize("there", [0, 1, 511, 512, 1024, 1499])
def test_the_end_of_the_bytes_inside_a_payload_is_an_error(there):
    cut = header(b"b.txt", 1500) + b"p" * there
    error = assert_fails(A, cut, code="truncated_payload", at=1024, end=b"")
    assert isinstance(error, TruncatedError)
    assert "1500" in str(error)
    assert str(there) in str(error)


@pytest.mark.parametrize("size", [1, 511, 513, 1500])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_last_payload_without_its_padding_is_listed_with_a_warning(size, padding):
    whole = member(b"z.txt", b"p" * size)
    padding = min(padding, -size % BLOCK - 1)
    data = archive(A, whole, end=b"").data[: 1024 + 512 + size + padding]
    for mode in MODES:
        table = scan(data, mode)
        assert rows_of(table) == archive(A, whole).rows
        assert codes(table) == ["short_padding", "no_end_marker"]
        assert table.faults[0].offset == 1024 + 512 + size


def test_a_last_payload_that_fills_its_blocks_needs_no_padding():
    assert_found(member(b"z.bin", b"p" * 1024), end=b"", warnings=("no_end_marker",))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [512, 1024, 5120, 10240])
def test_zero_blocks_alone_are_an_empty_archive(length, mode):
    table = scan(bytes(length), mode)
    assert len(table) == 0
    assert codes(table) == (["short_end_marker"] if length < 1024 else [])


# No tar at all


def test_a_file_of_no_bytes_is_an_error():
    error = assert_fails(code="empty_file", at=0, end=b"", only_first=True)
    assert type(error) is FormatError


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"BZh91AY", "bzip2"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"PK\x03\x04", "zip"),
    ],
)
@pytest.mark.parametrize("length", [20, 5000])
def test_a_compressed_shard_is_named_as_one(start, name, length):
    error = assert_fails(start.ljust(length, b"\xa5"), code="compressed", at=0, end=b"", only_first=True)
    assert isinstance(error, CompressedShardError)
    assert name in str(error)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\n <html><head>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "Git LFS"),
        (b'{"error": "not found"}', "JSON"),
        (b"PAR1", "Parquet"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\xef\xbb\xbf" + A.raw, "no header"),  # a byte order mark shifts all blocks
        (bytes(range(1, 101)), "no header"),
    ],
)
@pytest.mark.parametrize("length", [100, 3000])
def test_a_file_that_is_no_tar_is_told_what_it_seems_to_be(text, what, length):
    error = assert_fails(text.ljust(length, b"~"), code="not_tar", at=0, end=b"", only_first=True)
    assert type(error) is FormatError
    assert what in str(error)


def test_a_tar_that_is_cut_inside_its_first_header_is_truncated_not_foreign():
    assert_fails(header(b"a.txt", 1)[:300], code="truncated_header", at=0, end=b"", only_first=True)


def test_a_tar_whose_first_header_is_damaged_is_no_foreign_file():
    block = bytearray(header(b"a.txt", 1))
    block[3] ^= 1
    assert_fails(bytes(block), code="bad_checksum", at=0, only_first=True)


# Kinds


def test_every_type_has_its_kind():
    assert_found(
        member(b"a.txt", b"hello", b"0"),
        member(b"b.txt", b"hello", b"\0"),
        member(b"c.txt", b"hello", b"7"),
        member(b"hard", b"", b"1", kind="hardlink", link=b"a.txt"),
        member(b"sym", b"", b"2", kind="symlink", link=b"a.txt"),
        member(b"chr", b"", b"3", kind="char"),
        member(b"blk", b"", b"4", kind="block"),
        member(b"dir/", b"", b"5", kind="dir"),
        member(b"dir", b"", b"5", kind="dir"),
        member(b"fifo", b"", b"6", kind="fifo"),
        member(b"label", b"", b"V", kind="other", magic=GNU),
    )


@pytest.mark.parametrize(
    ("typeflag", "kind"),
    [(b"2", "symlink"), (b"3", "char"), (b"4", "block"), (b"5", "dir"), (b"6", "fifo"), (b"V", "other")],
)
@pytest.mark.parametrize("size", [1, 512, 5000, 8**11 - 1])
def test_what_can_have_no_payload_has_none_whatever_its_size_says(typeflag, kind, size):
    assert_found(member(b"odd", b"", typeflag, kind=kind, size=size), A, B)


@pytest.mark.parametrize("size", [1, 512, 513, 5000])
def test_a_hard_link_may_state_the_size_of_its_target_without_its_bytes(size):
    link = member(b"hard.txt", b"", b"1", kind="hardlink", link=b"a.txt", size=size)
    assert_found(A, link, B)
    assert_found(A, link)
    assert_found(A, link, end=b"", warnings=("no_end_marker",))


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
def test_a_hard_link_may_carry_the_bytes_of_its_target(size):
    assert_found(A, member(b"hard.txt", b"h" * size, b"1", kind="hardlink", link=b"a.txt"), B)


@pytest.mark.parametrize("typeflag", [b"D", b"M", b"N", b"A", b"E", b"I"])
def test_the_payload_of_a_special_type_is_passed_over(typeflag):
    kind = "dir" if typeflag == b"D" else "other"
    assert_found(member(b"special/", archive(A).data, typeflag, kind=kind, magic=GNU), B)


@pytest.mark.parametrize("typeflag", [b"8", b"9", b"Z", b"q", b"\xff", b" "])
def test_the_payload_of_an_unknown_type_is_passed_over_with_a_warning(typeflag):
    assert_found(member(b"weird.txt", archive(A).data, typeflag, kind="other", warnings=("unknown_type",)), B)


@pytest.mark.parametrize("typeflag", [b"0", b"\0", b"7"])
def test_a_name_with_a_slash_behind_it_is_a_folder(typeflag):
    for fields in (
        {},
        {"lead": pax((b"path", b"x/")), "true_name": b"x/"},
        {"lead": gnu_long(b"x/"), "true_name": b"x/"},
    ):
        assert_found(member(b"x/" if not fields else b"x", b"", typeflag, kind="dir", **fields), A)


def test_only_files_are_numbered_zero():
    # The column is stored, so its values are part of the index format.
    numbers = {kind.name.lower(): kind.value for kind in Kind}
    assert numbers == {
        "file": 0, "dir": 1, "symlink": 2, "hardlink": 3, "char": 4, "block": 5, "fifo": 6, "other": 7
    }  # fmt: skip


# Names


@pytest.mark.parametrize(
    "name",
    [
        b"/etc/b.txt",
        b"../c.txt",
        b"d/../../e.txt",
        b"..",
        b"d/..",
        b"C:\\x\\f.txt",
        b"c:/f.txt",
        b"\\\\server\\f",
        b"d\\..\\f",
    ],
)
def test_a_name_that_is_unsafe_to_extract_under_is_listed_with_a_warning(name):
    assert_found(member(name, b"1", warnings=("unsafe_name",)), B)
    assert_found(member(b"x", b"1", lead=pax((b"path", name)), true_name=name, warnings=("unsafe_name",)), B)


@pytest.mark.parametrize(
    "name",
    [b"a..b", b"..a", b"a..", b"d/..a/b", b"a:b", b"d/c:/x", b"a\\b.txt", b"./a.txt", b"a//b.txt", b"...", b"d/.../x"],
)
def test_dots_colons_and_backslashes_in_other_places_are_harmless(name):
    assert_found(member(name, b"1"), B)


@pytest.mark.parametrize(
    "name",
    [
        b"a\nb.txt",
        b"sp ace .txt",
        b"tab\t.txt",
        b"\x01\x7f.txt",
        "é.txt".encode(),
        "e\u0301.txt".encode(),
        "名前.txt".encode(),
    ],
)
def test_names_are_bytes_and_kept_as_they_are(name):
    assert_found(member(name, b"1"), B)


def test_a_name_that_is_no_utf8_is_kept_as_bytes_and_reported():
    assert_found(member(b"caf\xe9.txt", b"1", warnings=("name_not_utf8",)), B)
    fault = scan(archive(A, member(b"caf\xe9.txt", b"1")).data, "mapped").faults[0]
    assert fault == Fault("name_not_utf8", 1024, "caf\udce9.txt")


def test_a_name_is_cut_at_its_first_nul():
    assert_found(member(b"a.txt\0junk", b"1", true_name=b"a.txt"), B)


def test_an_empty_name_is_listed_with_a_warning():
    assert_found(member(b"", b"1", warnings=("empty_name",)), B)
    assert_found(member(b"x", b"1", lead=gnu_long(b"\0"), true_name=b"", warnings=("empty_name",)), B)


def test_apple_double_files_are_files():
    magic = b"\x00\x05\x16\x07" + bytes(60)
    assert_found(
        member(b"._a.jpg", magic), member(b"a.jpg", b"1"), member(b"d/._b.jpg", magic), member(b"d/b.jpg", b"1")
    )


# The result


def test_the_first_offset_is_that_of_the_first_extension_before_a_member():
    comment = pax((b"comment", b"c"), typeflag=b"g")
    lead = gnu_long(b"k", b"K") + gnu_long(LONG)
    table = scan(archive(comment, A, comment, member(b"x", b"1", lead=lead, true_name=LONG)).data, "careful")
    assert table.first_offset.tolist() == [1024, 3072]
    assert table.header_offset.tolist() == [1024, 5120]


def test_the_columns_have_the_types_that_an_index_stores():
    for data in (archive(A, sparse_old(b"s", SEGMENTS)).data, bytes(1024)):
        for mode in MODES:
            table = scan(data, mode)
            assert table.kind.dtype == "uint8"
            columns = (table.first_offset, table.header_offset, table.offset, table.size, table.names.offsets)
            assert {column.dtype.str for column in columns} == {"<i8"}


def test_errors_of_the_store_pass_through():
    def read(*_):
        raise OSError("gone")

    for is_mapped in (False, True):
        with pytest.raises(OSError, match="gone"):
            scan_tar(read, 10240, is_mapped=is_mapped)


def test_every_code_is_either_an_error_with_its_exception_and_hint_or_a_warning():
    assert not WARNINGS & set(ERRORS)
    for code, (kind, hint) in ERRORS.items():
        fault = Fault(code, 512, "a.txt", "something is wrong")
        error = fault.error("s.tar")
        assert fault.is_error
        assert type(error) is kind
        assert str(error) == f"something is wrong (member 'a.txt'), in s.tar at byte 512 - {hint}"
    assert not any(Fault(code, 0).is_error for code in WARNINGS)


def test_a_warning_that_someone_raises_is_a_format_error_with_its_place():
    error = Fault("data_after_end", 1536, message="1024 bytes behind the end marker are not read").error("s.tar")
    assert type(error) is FormatError
    assert (error.shard, error.offset, error.code) == ("s.tar", 1536, "data_after_end")


def test_an_archive_that_python_writes_at_its_defaults_is_read():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(30):
            info = tarfile.TarInfo(f"{number:06}.jpg")
            info.size, info.mtime = number * 100, 1700000000.25
            tar.addfile(info, io.BytesIO(b"j" * info.size))
    data = buffer.getvalue()
    for mode in MODES:
        table = scan(data, mode)
        assert table.names.to_text_list() == [f"{number:06}.jpg" for number in range(30)]
        assert (table.header_offset - table.first_offset).tolist() == [1024] * 30
        assert not table.faults


def test_payloads_of_large_members_are_not_read():
    made = archive(*(member(b"%d.bin" % number, b"x" * 200_000) for number in range(10)))
    read = StrictRead(made.data)
    table = scan_tar(read, len(made.data))
    assert len(table) == 10
    assert read.bytes_read <= 12 * BLOCK + 8 * BLOCK
