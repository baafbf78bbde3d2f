"""Framing: the page's vectors, checksums in bulk, and finding records by their headers."""

from __future__ import annotations

import random
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.record_reference import mutate, place, read_records
from shardset.errors import ChecksumError, CompressedShardError, FormatError, LimitError, TruncatedError
from shardset.formats import tfrecord
from shardset.formats.tfrecord import (
    find_corrupt,
    frame_record,
    header_crcs,
    is_header,
    mask_crcs,
    masked_crc32c,
    parse_footers,
    scan_records,
)
from tfrecords import FOREIGN, frame, make_payloads, masked_crc, payload_offsets, record_bytes

EMPTY = bytes.fromhex("000000000000000029039807d8ea82a2")
ABC = bytes.fromhex("0300000000000000b0994 90e6162636e57f121".replace(" ", ""))


def scan_mapped(data, start=0):
    return scan_records(
        lambda offset, length: memoryview(data)[offset : offset + length], len(data), is_mapped=True, start=start
    )


def scan_read(data, start=0, asked=None):
    def read(offset, length):
        assert 0 <= offset <= offset + length <= len(data)
        if asked is not None:
            asked.append((offset, length))
        return data[offset : offset + length]

    return scan_records(read, len(data), start=start)


def header(length):
    raw = struct.pack("<Q", length)
    return raw + struct.pack("<I", masked_crc(raw))


def fast_frame(payload):
    head, foot = frame_record(payload)
    return head + payload + foot


def fault_of(table):
    return (table.faults[0].code, table.faults[0].offset) if table.faults else None


def test_the_checksum_of_the_digits_is_the_published_one():
    assert masked_crc32c(b"123456789") == 0xC78AB0E5 == masked_crc(b"123456789")


def test_every_library_for_checksums_gives_the_same_on_any_buffer():
    from crc32c import crc32c

    iscsi = pytest.importorskip("fastcrc").crc32.iscsi
    assert tfrecord.crc32c in {crc32c, iscsi}
    for data in (b"", b"123456789", bytes(range(256)) * 100):
        for buffer in (data, bytearray(data), memoryview(data), memoryview(b"x" + data)[1:]):
            assert crc32c(buffer) == iscsi(buffer)


@pytest.mark.parametrize(("payload", "record"), [(b"", EMPTY), (b"abc", ABC)])
def test_a_record_is_framed_as_tensorflow_frames_it(payload, record):
    head, foot = frame_record(payload)
    assert head + payload + foot == record == frame(payload)


def test_the_length_of_a_payload_is_that_of_its_bytes_whatever_its_items_are():
    assert frame_record(np.arange(3, dtype=np.int64))[0] == header(24)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_checksums_of_lengths_in_bulk_are_those_of_each(lengths):
    expected = [masked_crc(struct.pack("<Q", length)) for length in lengths]
    assert header_crcs(np.array(lengths, np.uint64)).tolist() == expected


def test_checksums_of_short_lengths_are_right_at_every_byte_border():
    lengths = [value for power in range(64) for value in (2**power - 1, 2**power, 2**power + 1)]
    for some in (lengths, *([length] for length in lengths)):
        expected = [masked_crc(struct.pack("<Q", length)) for length in some]
        assert header_crcs(np.array(some, np.uint64)).tolist() == expected


def test_masking_in_bulk_wraps_around_as_32_bits_do():
    crcs = np.array([0, 1, 2**31, 2**32 - 1, 0x5D7D1527], np.uint32)
    assert mask_crcs(crcs).tolist() == [(((c >> 15) | (c << 17)) + 0xA282EAD8) & 0xFFFFFFFF for c in crcs.tolist()]


def test_corrupt_payloads_are_found_by_their_positions_among_views_and_bytes():
    payloads = make_payloads(200)
    stored = np.array([masked_crc(payload) for payload in payloads], np.uint32)
    assert find_corrupt(payloads, stored).tolist() == []
    stored[[3, 77, 199]] ^= np.uint32(1)
    assert find_corrupt([memoryview(payload) for payload in payloads], stored).tolist() == [3, 77, 199]
    assert find_corrupt([], np.empty(0, np.uint32)).tolist() == []


def test_footers_are_read_at_any_alignment():
    payloads = make_payloads(300)
    data = record_bytes(payloads)
    offsets, lengths = np.array(payload_offsets(payloads)), np.array(list(map(len, payloads)))
    assert parse_footers(data, offsets, lengths).tolist() == [masked_crc(payload) for payload in payloads]
    assert not len(parse_footers(b"", offsets[:0], lengths[:0]))
    with pytest.raises(IndexError):
        parse_footers(data[:-1], offsets, lengths)


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
def test_records_are_found_with_their_offsets_and_lengths(scan):
    payloads = make_payloads(5000)
    table = scan(record_bytes(payloads))
    assert table.offset.tolist() == payload_offsets(payloads)
    assert table.length.tolist() == list(map(len, payloads))
    assert (len(table), table.end, table.faults, table.error()) == (5000, len(record_bytes(payloads)), (), None)


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
def test_a_file_of_no_bytes_is_a_file_of_no_records(scan):
    table = scan(b"")
    assert (len(table), table.end, table.faults) == (0, 0, ())


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
def test_a_scan_may_begin_behind_records_that_are_known(scan):
    payloads = make_payloads(300)
    data = record_bytes(payloads)
    offsets = payload_offsets(payloads)
    table = scan(data, offsets[200] - 12)
    assert table.offset.tolist() == offsets[200:]
    assert scan(data, len(data)).end == len(data)
    assert fault_of(scan(data, offsets[200] - 11)) == ("bad_length_checksum", offsets[200] - 11)


FOUR = [b"0123456789", b"", bytes(range(100)), b"abcde"]
AT = [0, 26, 42, 158]


def flipped_at(data, at, bit=0):
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
@pytest.mark.parametrize("length", range(1, 12))
def test_a_tail_that_is_no_whole_header_is_a_fault(scan, length):
    data = record_bytes(FOUR)
    table = scan(data + header(5)[:length])
    assert (len(table), table.end) == (4, len(data))
    assert fault_of(table) == ("truncated_record_header", len(data))
    assert f"record 4 ends in its header: {length} of 12 bytes" in str(table.error("a.tfrecord"))
    assert isinstance(table.error(), TruncatedError)


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
def test_a_record_without_its_end_is_a_fault_wherever_it_is_cut(scan):
    data = record_bytes(FOUR)
    for size in range(158 + 12, len(data)):
        table = scan(data[:size])
        assert (len(table), table.end, fault_of(table)) == (3, 158, ("truncated_record", 158))
    assert "3 of 5 bytes of its payload (data)" in scan(data[: 158 + 15]).faults[0].message
    assert "2 of 4 bytes of its payload's checksum (data_crc)" in scan(data[:-2]).faults[0].message
    assert fault_of(scan(EMPTY[:14])) == ("truncated_record", 0)


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
@pytest.mark.parametrize("at", range(12))
def test_a_flipped_bit_in_a_header_ends_the_table_there(scan, at):
    for bit in range(8):
        table = scan(flipped_at(record_bytes(FOUR), 42 + at, bit))
        assert (len(table), table.end, fault_of(table)) == (2, 42, ("bad_length_checksum", 42))
        error = table.error("a.tfrecord")
        assert isinstance(error, ChecksumError)
        assert error.expected != error.actual
        assert f"{error.expected:08x}" in str(error)
        assert "record 2" in str(error)
        assert "(length_crc)" in str(error)


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
def test_payloads_are_not_looked_at(scan):
    data = flipped_at(record_bytes(FOUR), 54)
    assert (len(scan(data)), scan(data).faults) == (4, ())


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
@pytest.mark.parametrize("length", [1000, 2**31, 2**40, 2**62, 2**63 - 17])
def test_a_length_beyond_the_end_is_a_fault_and_nothing_is_read_by_it(scan, length):
    data = record_bytes(FOUR) + header(length) + b"few bytes"
    table = scan(data)
    assert (len(table), fault_of(table)) == (4, ("truncated_record", len(record_bytes(FOUR))))
    assert f"of {length} bytes" in table.faults[0].message


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
@pytest.mark.parametrize("length", [2**63 - 16, 2**63, 2**64 - 16, 2**64 - 5, 2**64 - 1])
def test_a_length_that_no_file_can_hold_is_a_fault_of_its_own(scan, length):
    table = scan(record_bytes(FOUR) + header(length) + b"few bytes")
    assert (len(table), fault_of(table)) == (4, ("impossible_length", len(record_bytes(FOUR))))
    assert isinstance(table.error(), LimitError)


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
@pytest.mark.parametrize("zeros", [12, 16, 4096, 3_000_000])
def test_zero_bytes_are_no_records(scan, zeros):
    data = record_bytes(FOUR)
    assert fault_of(scan(data + bytes(zeros))) == ("zero_header", len(data))
    assert (len(scan(data + bytes(zeros))), len(scan(bytes(zeros)))) == (4, 0)


def test_what_is_no_tfrecord_file_at_all_is_named():
    tar = bytes(257) + b"ustar\x0000" + bytes(500)
    for data, kind, words in (
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3203000\n",
            FormatError,
            "LFS pointer, not the file that it points to, which has 3203000 bytes",
        ),
        (b"<!DOCTYPE html><html></html>", FormatError, "HTML"),
        (b'<?xml version="1.0"?><Error/>', FormatError, "XML"),
        (b'{"error": "not found"}', FormatError, "JSON"),
        (b"PAR1\x15\x04\x15\x0e\x15\x12\x4c\x15", FormatError, "Parquet"),
        (b"ARROW1\0\0\xff\xff\xff\xff\x10", FormatError, "Arrow"),
        (b"\x89HDF\r\n\x1a\n\0\0\0\0\0", FormatError, "HDF5"),
        (bytes.fromhex("83af70d10d884a3f0000000000000000"), FormatError, "ArrayRecord"),
        (b"id,name\n1,one\n2,two\n", FormatError, "text"),
        (b"a" + tar[1:], FormatError, "tar archive"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03abc", CompressedShardError, "gzip"),
        (b"\x28\xb5\x2f\xfd\x04\0\x49\0\0abcd", CompressedShardError, "zstd"),
        (b"BZh91AY&SY\x01\x02\x03\x04", CompressedShardError, "bzip2"),
        (b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4\x46", CompressedShardError, "xz"),
        (b"PK\x03\x04\x14\0\0\0\x08\0ab", CompressedShardError, "zip"),
        (b"\xff\x06\0\0sNaPpYabcd", CompressedShardError, "snappy"),
    ):
        table = scan_read(data)
        error = table.error("x")
        assert type(error) is kind, data
        assert words in str(error)
        assert error.offset == 0


@pytest.mark.parametrize("length", [0x5B, 0x7B, 0x1F8B, 0x8B1F, 0x9C78, 0x0178, 0x20202020])
def test_a_damaged_first_header_is_not_taken_for_another_kind_of_file(length):
    table = scan_read(flipped_at(header(length), 9) + bytes(100))
    assert fault_of(table) == ("bad_length_checksum", 0)
    assert "is this a TFRecord file at all?" in table.faults[0].message


@pytest.mark.parametrize("scan", [scan_mapped, scan_read])
@pytest.mark.parametrize("length", [0, 3, 100])
def test_records_of_one_length_are_found_as_others_are(scan, length):
    data = frame(bytes(length)) * 40_000 + frame(b"x" * (length + 1)) * 70 + frame(b"last")
    table = scan(data)
    assert (len(table), table.end, table.faults) == (40_071, len(data), ())
    assert table.length.tolist() == [length] * 40_000 + [length + 1] * 70 + [4]
    assert (np.diff(table.offset) == table.length[:-1] + 16).all()
    for number in (0, 1, 63, 64, 65, 16_384, 39_999, 40_000, 40_069, 40_070):
        at = int(table.offset[number]) - 12
        for byte in (0, 7, 8, 11):
            damaged = scan(flipped_at(data, at + byte))
            assert (len(damaged), damaged.end, fault_of(damaged)) == (number, at, ("bad_length_checksum", at))
        cut = scan(data[: at + 13])
        assert (len(cut), fault_of(cut)) == (number, ("truncated_record", at))


def test_small_records_are_read_in_a_few_growing_windows():
    data = record_bytes(make_payloads(1000)) * 40
    asked = []
    table = scan_read(data, asked=asked)
    assert len(table) == 40_000
    assert len(asked) < 12
    assert sum(length for _, length in asked) < len(data) * 1.1


def test_payloads_of_large_records_are_jumped_over():
    big = fast_frame(random.Random(1).randbytes(3_000_000))
    data = big * 20
    asked = []
    table = scan_read(data, asked=asked)
    assert (len(table), table.faults) == (20, ())
    assert sum(length for _, length in asked) < 600_000
    assert asked[-2][1] <= 4096


def test_a_file_of_small_and_large_records_is_scanned_in_windows_that_adapt():
    rng = random.Random(2)
    small, large = record_bytes(make_payloads(3000)), fast_frame(rng.randbytes(5_000_000))
    data = small + large * 4 + small * 3 + large * 2 + small
    assert scan_read(data).offset.tolist() == scan_mapped(data).offset.tolist()
    assert scan_read(data).end == len(data)


def test_errors_of_reading_pass():
    def read(offset, length):
        raise OSError(f"{offset} {length}")

    with pytest.raises(OSError, match="0 12"):
        scan_records(read, 12)


@pytest.mark.parametrize("name", sorted(path.name for path in FOREIGN.glob("*.tfrecord")))
def test_records_of_other_projects_are_found(name):
    data = (FOREIGN / name).read_bytes()
    table = scan_mapped(data)
    payloads, fault = read_records(data)
    assert fault is None
    assert [data[at : at + n] for at, n in zip(table.offset.tolist(), table.length.tolist(), strict=True)] == payloads


def test_a_header_is_known_by_its_checksum():
    assert is_header(EMPTY)
    assert is_header(ABC[:12])
    assert not is_header(ABC[:11])
    assert not is_header(bytes(12))


def test_mutated_files_are_scanned_as_the_reference_reads_them(fuzz_count):
    rng = random.Random(11)
    for number in range(fuzz_count):
        payloads = make_payloads(rng.randrange(1, 12), seed=number, longest=rng.choice((3, 40, 300)))
        if rng.random() < 0.2:  # many of one length are found together
            payloads += [rng.randbytes(rng.choice((0, 1, 7)))] * 150
        data = mutate(rng, record_bytes(payloads))
        mapped, read = scan_mapped(data), scan_read(data)
        for table in (mapped, read):
            expected, fault = headers_of(data)
            assert list(zip(table.offset.tolist(), table.length.tolist(), strict=True)) == expected
            if fault is not None or table.faults:
                assert place(table.error()) == fault or table.faults[0].code in {"not_tfrecord", "compressed"}


def headers_of(data):
    """Return the records of some bytes by their headers alone, and the fault: payloads' checksums are made right."""
    places, at = [], 0
    while at < len(data):
        payloads, fault = read_records(data[at:])
        for payload in payloads:
            places.append((at + 12, len(payload)))
            at += len(payload) + 16
        if fault is None:
            return places, None
        if fault[0] != "bad_payload_checksum":
            return places, (fault[0], at)
        length = struct.unpack_from("<Q", data, at)[0]
        places.append((at + 12, length))
        at += length + 16
    return places, None


@pytest.mark.skipif(sys.maxsize < 2**62, reason="offsets of 64 bits")
def test_a_chain_of_lengths_beyond_all_offsets_ends():
    data = struct.pack("<Q", 2**63) + bytes(4) + bytes(100)
    assert fault_of(scan_mapped(data)) == ("bad_length_checksum", 0)
