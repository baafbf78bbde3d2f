"""Verified iteration over mapped files and streams: every row of the damage tables, in every way of reading."""

from __future__ import annotations

import gc
import mmap
import random
import struct
import tracemalloc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.record_reference import cut_at, drain, mutate, place, read_records
from shardset.errors import ChecksumError, FormatError, LimitError, TruncatedError
from shardset.formats import tfrecord_stream
from shardset.formats.tfrecord import frame_record
from shardset.formats.tfrecord_stream import iter_mapped, iter_stream
from tfrecords import FOREIGN, frame, make_payloads, masked_crc, record_bytes

FOUR = [b"0123456789", b"", bytes(range(100)), b"abcde"]  # at 0, 26, 42 and 158
DATA = record_bytes(FOUR)


def from_map(data, **options):
    return iter_mapped(memoryview(data), verify=options.pop("verify", True), shard="a.tfrecord", **options)


def from_stream(data, **options):
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    return iter_stream(pieces, verify=options.pop("verify", True), shard="a.tfrecord", **options)


def from_sized_stream(data, **options):
    return iter_stream([data], shard="a.tfrecord", size=len(data), **options)


WAYS = [from_map, from_stream, from_sized_stream]


def header(length):
    raw = struct.pack("<Q", length)
    return raw + struct.pack("<I", masked_crc(raw))


def flipped(at, bit=0):
    return DATA[:at] + bytes([DATA[at] ^ 1 << bit]) + DATA[at + 1 :]


def fast_file(payloads):
    return b"".join(
        part for payload in payloads for part in (frame_record(payload)[0], payload, frame_record(payload)[1])
    )


@pytest.mark.parametrize("way", WAYS)
def test_all_records_come_as_bytes_in_order(way):
    records = list(way(DATA))
    assert records == FOUR
    assert {type(record) for record in records} == {bytes}


@pytest.mark.parametrize("way", WAYS)
def test_no_bytes_are_no_records(way):
    assert list(way(b"")) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", range(1, 12))
def test_a_tail_shorter_than_a_header_is_an_error_and_silence_only_on_request(way, length):
    data = DATA + header(3)[:length]
    records, error = drain(way(data))
    assert (records, place(error), type(error)) == (FOUR, ("truncated_record_header", len(DATA)), TruncatedError)
    assert list(way(data, tf_compat=True)) == FOUR
    assert list(way(header(3)[:length], tf_compat=True)) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tf_compat", [False, True])
def test_a_record_without_its_end_is_an_error_for_everybody(way, tf_compat):
    for size in range(158 + 12, len(DATA)):
        records, error = drain(way(DATA[:size], tf_compat=tf_compat))
        assert (records, place(error), type(error)) == (FOUR[:3], ("truncated_record", 158), TruncatedError)
        assert "record 3 is cut short" in str(error)
    records, error = drain(way(header(0), tf_compat=tf_compat))
    assert (records, place(error)) == ([], ("truncated_record", 0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [54, 100, 153, 154, 157])
def test_a_flipped_bit_of_a_payload_or_its_checksum_is_an_error_at_its_record(way, at):
    for bit in range(8):
        records, error = drain(way(flipped(at, bit)))
        assert (records, place(error), type(error)) == (FOUR[:2], ("bad_payload_checksum", 42), ChecksumError)
        assert error.expected != error.actual
        assert "record 2" in str(error)
        assert "(data_crc)" in str(error)
        assert "a.tfrecord at byte 42" in str(error)
    assert len(list(way(flipped(at), verify=False))) == 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verify", [False, True])
def test_a_flipped_bit_of_a_header_is_an_error_and_never_a_wrong_record(way, verify):
    for at in range(42, 54):
        for bit in range(8):
            records, error = drain(way(flipped(at, bit), verify=verify))
            assert (records, place(error), type(error)) == (FOUR[:2], ("bad_length_checksum", 42), ChecksumError)


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_of_the_first_header_asks_whether_it_is_the_right_kind_of_file(way):
    records, error = drain(way(flipped(0)))
    assert (records, place(error)) == ([], ("bad_length_checksum", 0))
    assert "is this a TFRecord file at all?" in str(error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("zeros", [12, 16, 4096, 1 << 20])
@pytest.mark.parametrize("verify", [False, True])
def test_zero_bytes_are_no_records(way, zeros, verify):
    if way is from_stream and zeros > 4096:
        return
    records, error = drain(way(DATA + bytes(zeros), verify=verify, tf_compat=True))
    assert (records, place(error)) == (FOUR, ("zero_header", len(DATA)))
    assert drain(way(bytes(zeros), verify=verify))[0] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1000, 2**31, 2**40, 2**62, 2**63 - 17])
@pytest.mark.parametrize("verify", [False, True])
def test_a_lying_length_allocates_nothing(way, length, verify):
    data = DATA + header(length) + b"few bytes"
    tracemalloc.start()
    records, error = drain(way(data, verify=verify))
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert (records, place(error), type(error)) == (FOUR, ("truncated_record", len(DATA)), TruncatedError)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [2**63 - 16, 2**63, 2**64 - 5, 2**64 - 1])
def test_a_length_that_no_file_can_hold_is_a_limit(way, length):
    records, error = drain(way(DATA + header(length) + b"few bytes"))
    assert (records, place(error), type(error)) == (FOUR, ("impossible_length", len(DATA)), LimitError)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "not_tfrecord"),
        (b"a,b,c\n1,2,3\n4,5,6\n", "not_tfrecord"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x4b\x4c\x4a", "compressed"),
    ],
)
def test_foreign_files_are_named_before_any_record(way, data, code):
    records, error = drain(way(data, verify=False))
    assert (records, place(error)) == ([], (code, 0))


def test_a_record_longer_than_what_is_left_of_a_file_of_known_size_is_not_waited_for():
    def pieces():
        yield DATA + header(1000) + bytes(100)
        raise AssertionError

    records, error = drain(iter_stream(pieces(), size=len(DATA) + 112 + 50))
    assert (records, place(error)) == (FOUR, ("truncated_record", len(DATA)))


def test_what_the_source_of_a_stream_raises_comes_after_all_whole_records():
    def pieces():
        yield DATA + header(7) + b"1234"
        raise ConnectionError("gone")

    records = iter_stream(pieces())
    assert [next(records) for _ in range(4)] == FOUR
    with pytest.raises(ConnectionError, match="gone"):
        next(records)


def test_records_of_a_stream_come_as_soon_as_they_are_there():
    asked = []

    def pieces():
        for payload in FOUR:
            asked.append(payload)
            yield frame(payload)

    records = iter_stream(pieces())
    assert asked == []
    for number, payload in enumerate(FOUR):
        assert next(records) == payload
        assert len(asked) == number + 1


def test_offsets_of_inflated_streams_say_so():
    _, error = drain(iter_stream([flipped(54)], is_inflated=True))
    assert "counts inflated bytes" in str(error)
    assert place(error) == ("bad_payload_checksum", 42)


def test_a_mapped_file_may_be_read_from_any_record_on():
    payloads = make_payloads(500)
    data = record_bytes(payloads)
    start = len(record_bytes(payloads[:200]))
    assert list(from_map(data, start=start)) == payloads[200:]
    assert list(from_map(data, start=len(data))) == []
    _, error = drain(from_map(data[:-1], start=start))
    assert "the record is cut short" in str(error)  # its number is not known


LENGTHS = {
    "empty": [0] * 30_000,
    "equal": [100] * 20_000,
    "equal runs": [length for length in (0, 1, 100, 3000, 100) for _ in range(500)],
    "random": [random.Random(1).randrange(300) for _ in range(20_000)],
    "long": [random.Random(2).randrange(20_000) for _ in range(500)],
    "around the window": [(256 << 10) + extra for extra in (-29, -28, -17, -16, -15, -13, -12, -1, 0, 1, 16)],
    "very long": [3_000_000, 5, 70_000_00, 0, 2_000_000],
    "mixed": [0, 5, 100_000, 7, 2_000_000, *[9] * 5000, 300_000, *[2000, 3000] * 200],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_any_mixture_of_lengths_comes_out_the_same_mapped_and_streamed(name):
    rng = random.Random(5)
    payloads = [rng.randbytes(length) for length in LENGTHS[name]]
    data = fast_file(payloads)
    assert list(from_map(data)) == payloads
    assert list(iter_stream([data])) == payloads
    assert list(iter_stream([data[at : at + 50_021] for at in range(0, len(data), 50_021)])) == payloads
    for number in {0, len(payloads) // 2, len(payloads) - 1}:
        at = len(fast_file(payloads[:number])) + 12 + len(payloads[number])
        damaged = bytearray(data)
        damaged[at] ^= 8
        for way in (from_map, from_sized_stream):
            records, error = drain(way(bytes(damaged)))
            assert records == payloads[:number]
            assert place(error) == ("bad_payload_checksum", at - 12 - len(payloads[number]))
            assert f"record {number} " in str(error)


def test_a_stream_keeps_one_record_and_no_more():
    payload = bytes(4_000_000)
    record = fast_file([payload])

    def pieces():
        for _ in range(10):
            for at in range(0, len(record), 65_536):
                yield record[at : at + 65_536]

    tracemalloc.start()
    count = 0
    for _ in iter_stream(pieces()):
        count += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10
    assert peak < 4 * len(record)


def test_a_mapped_file_of_many_records_is_taken_in_batches():
    data = fast_file([bytes(100)] * 50_000 + [bytes(10_000)] * 2000)
    tracemalloc.start()
    count = 0
    for _ in from_map(data):
        count += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 52_000
    assert peak < 6_000_000


def test_a_map_is_let_go_when_the_records_are_read_or_forgotten(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole = memoryview(mapped)
    assert list(iter_mapped(whole)) == FOUR
    records = iter_mapped(whole)
    next(records)
    del records
    gc.collect()
    whole.release()
    mapped.close()  # raises BufferError while anything holds a view


def test_the_source_of_a_stream_is_let_go_when_the_records_are_forgotten():
    class Pieces:
        def __iter__(self):
            yield DATA
            yield DATA

    pieces = Pieces()
    gone = weakref.ref(pieces)
    records = iter_stream(pieces)
    next(records)
    del pieces, records
    gc.collect()
    assert gone() is None


@given(st.data())
def test_a_stream_may_be_cut_anywhere(data):
    payloads = make_payloads(data.draw(st.integers(0, 8)), seed=data.draw(st.integers(0, 9)), longest=60)
    whole = record_bytes(payloads)
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=20))
    assert list(iter_stream(cut_at(whole, places))) == payloads


def test_a_stream_may_arrive_byte_by_byte():
    assert list(iter_stream(bytes([byte]) for byte in DATA)) == FOUR


@pytest.mark.parametrize("name", sorted(path.name for path in FOREIGN.glob("*.tfrecord")))
def test_records_of_other_projects_are_read(name):
    data = (FOREIGN / name).read_bytes()
    assert (list(from_map(data)), None) == read_records(data)
    assert list(from_stream(data)) == list(from_map(data))


def test_mutated_files_give_what_the_reference_gives(fuzz_count, monkeypatch):
    monkeypatch.setattr(tfrecord_stream, "_WINDOW", 1000)
    monkeypatch.setattr(tfrecord_stream, "_LONG_WINDOW", 2000)
    monkeypatch.setattr(tfrecord_stream, "_SMALL", 200)
    rng = random.Random(12)
    seen = set()
    for number in range(fuzz_count):
        longest = rng.choice((3, 40, 900))
        payloads = make_payloads(rng.randrange(1, 10), seed=number, longest=longest)
        if rng.random() < 0.2:
            payloads = [rng.randbytes(rng.choice((0, 1, 7)))] * 150
        data = (
            mutate(rng, record_bytes(payloads)) if rng.random() < 0.9 else mutate(rng, b"abc" + record_bytes(payloads))
        )
        tf_compat = rng.random() < 0.3
        expected, fault = read_records(data, tf_compat=tf_compat)
        places = [rng.randrange(len(data) + 1) for _ in range(rng.randrange(6))]
        for records in (
            iter_mapped(memoryview(data), tf_compat=tf_compat),
            iter_stream(cut_at(data, places), tf_compat=tf_compat),
            iter_stream(cut_at(data, places), tf_compat=tf_compat, size=len(data)),
        ):
            found, error = drain(records)
            assert found == expected
            if error is None or error.code not in {"not_tfrecord", "compressed"}:
                assert place(error) == fault
            else:
                assert fault[1] == 0
            assert error is None or isinstance(error, FormatError)
        seen.add(fault and fault[0])
    if fuzz_count >= 1000:
        assert seen >= {
            None,
            "truncated_record_header",
            "truncated_record",
            "bad_length_checksum",
            "bad_payload_checksum",
            "zero_header",
        }
