"""Each class of damage, in the order of docs; then any damage; then bytes that were made to keep it busy."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.record_reference import mutate
from formats.salvaging import kinds, payloads, salvaged
from shardset.formats import tfrecord_range_crc, tfrecord_resync, tfrecord_search
from shardset.formats.tfrecord import frame_record
from shardset.formats.tfrecord_salvage import Records, salvage
from tfrecords import FOREIGN, frame, make_payloads, masked_crc, payload_offsets, record_bytes

FOUR = [b"a" * 10, b"", b"c" * 100, b"d" * 5]
STARTS = [0, 26, 42, 158]
FILE = record_bytes(FOUR)


def header(length):
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc(packed))


def flip(data, byte, bit=0):
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    return bytes(changed)


@pytest.fixture(params=[None, 64, 1 << 20], ids=["mapped", "short-windows", "long-windows"])
def run(request):
    """Salvage bytes that are mapped, read in windows shorter than a record, and in longer ones."""
    return lambda data, **settings: salvaged(data, window=request.param, **settings)


def test_a_whole_file_gives_its_records_and_nothing_else(run):
    good, bad = run(FILE)
    assert payloads(good) == FOUR
    assert [(one.offset, one.length) for one in good] == [
        (start + 12, len(p)) for start, p in zip(STARTS, FOUR, strict=True)
    ]
    assert not any(one.resynced or one.repaired for one in good)
    assert bad == []
    assert run(b"") == ([], [])


@pytest.mark.parametrize("name", ["mnist_20.tfrecord"])
def test_a_file_of_tensorflow_is_whole(run, name):
    good, bad = run((FOREIGN / name).read_bytes())
    assert (len(good), bad) == (20, [])


@pytest.mark.parametrize("left", range(1, 12))
def test_a_header_that_is_cut_is_told_with_the_bytes_that_are_there(run, left):
    good, bad = run(FILE[: 158 + left])
    assert payloads(good) == FOUR[:3]
    assert kinds(bad) == [("truncated_record_header", 158, left)]
    assert f"{left} bytes" in bad[0].message


@pytest.mark.parametrize("end", [26 + 12, 26 + 15, 42 + 12, 42 + 50, 42 + 112, 42 + 115])
def test_a_record_that_is_cut_behind_its_header_is_truncated(run, end):
    good, bad = run(FILE[:end])
    start = max(at for at in STARTS if at < end)
    assert payloads(good) == FOUR[: STARTS.index(start)]
    assert kinds(bad) == [("truncated_record", start, end - start)]


@pytest.mark.parametrize("byte", [54, 100, 153])
def test_a_wrong_payload_costs_exactly_one_record_and_no_resync(run, byte):
    good, bad = run(flip(FILE, byte, 3))
    assert payloads(good) == [FOUR[0], FOUR[1], FOUR[3]]
    assert kinds(bad) == [("bad_payload_checksum", 42, 116)]
    assert bad[0].expected == masked_crc(FOUR[2])
    assert bad[0].actual != bad[0].expected
    assert not any(one.resynced for one in good)


def test_every_wrong_payload_is_one_loss_also_if_it_is_the_last_and_if_all_are(run):
    good, bad = run(flip(FILE, len(FILE) - 5))
    assert (payloads(good), kinds(bad)) == (FOUR[:3], [("bad_payload_checksum", 158, 21)])
    unsummed = b"".join(frame(p)[:-4] + b"\0\0\0\0" for p in FOUR)  # as writers do that do not know the checksum
    good, bad = run(unsummed)
    assert (good, [one.offset for one in bad]) == ([], STARTS)
    assert {one.code for one in bad} == {"bad_payload_checksum"}


def test_with_verify_off_payloads_are_not_looked_at_and_headers_are(run):
    good, bad = run(flip(FILE, 60), verify=False)
    assert (len(good), bad) == (4, [])
    good, _ = run(flip(FILE, 42, 1), verify=False)
    assert [one.repaired for one in good] == [None, None, "length", None]


@pytest.mark.parametrize("bit", range(64))
def test_any_flipped_bit_of_a_length_is_mended(run, bit):
    good, bad = run(flip(FILE, 42 + bit // 8, bit % 8))
    assert (payloads(good), bad) == (FOUR, [])
    assert [one.repaired for one in good] == [None, None, "length", None]
    assert not any(one.resynced for one in good)


@pytest.mark.parametrize("bit", range(32))
def test_any_flipped_bit_of_a_lengths_checksum_is_mended(run, bit):
    good, bad = run(flip(FILE, 50 + bit // 8, bit % 8))
    assert (payloads(good), bad) == (FOUR, [])
    assert [one.repaired for one in good] == [None, None, "length_crc", None]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("damage", [b"\xff" * 8, b"\xff" * 12, b"\5" * 8, b"\x07" * 12])
def test_a_header_written_over_is_mended_by_the_header_behind_or_the_end_of_the_file(run, start, damage):
    good, bad = run(FILE[:start] + damage + FILE[start + len(damage) :])
    assert (payloads(good), bad) == (FOUR, [])
    assert [one.repaired for one in good] == ["length" if at == start else None for at in STARTS]
    assert not any(one.resynced for one in good)


@pytest.mark.parametrize("bit", range(32))
def test_a_flipped_bit_of_a_payloads_checksum_is_told_from_a_wrong_payload(run, bit):
    good, bad = run(flip(FILE, 42 + 112 + bit // 8, bit % 8))
    assert (payloads(good), bad) == (FOUR, [])
    assert [one.repaired for one in good] == [None, None, "data_crc", None]


def test_a_wrong_header_over_a_wrong_payload_costs_one_record(run):
    good, bad = run(flip(flip(FILE, 42), 60))
    assert payloads(good) == [FOUR[0], FOUR[1], FOUR[3]]
    assert kinds(bad) == [("bad_length_checksum", 42, 116)]
    assert not any(one.resynced for one in good)


def test_a_wrong_payload_before_a_wrong_header_costs_one_record_and_the_next_is_mended(run):
    for damaged in (flip(flip(FILE, 60), 158), FILE[:60] + b"x" + FILE[61:158] + b"\xff" * 12 + FILE[170:]):
        good, bad = run(damaged)
        assert payloads(good) == [FOUR[0], FOUR[1], FOUR[3]]
        assert [one.repaired for one in good] == [None, None, "length"]
        assert kinds(bad) == [("bad_payload_checksum", 42, 116)]


@pytest.mark.parametrize(("at", "cut", "put"), [(60, 3, b""), (60, 0, b"more"), (60, 0, bytes(30)), (50, 90, b"")])
def test_bytes_taken_out_or_put_in_cost_their_record_and_the_rest_is_marked(run, at, cut, put):
    damaged = FILE[:at] + put + FILE[at + cut :]
    good, bad = run(damaged)
    assert payloads(good) == [FOUR[0], FOUR[1], FOUR[3]]
    assert [one.resynced for one in good] == [False, False, True]
    [lost] = bad
    assert (lost.offset, lost.length) == (42, 116 + len(put) - cut)
    assert lost.code in {"broken_frame", "bad_length_checksum"}


def test_a_length_that_no_file_could_have_is_impossible_and_allocates_nothing(run):
    for length in (1 << 40, 1 << 62, 1 << 63, (1 << 64) - 5, (1 << 64) - 1):
        good, bad = run(FILE + header(length) + b"left")
        assert payloads(good) == FOUR
        assert kinds(bad) == [("impossible_length", 179, 16)]
        assert str(length) in bad[0].message
    for length in (1000, 1 << 31):
        assert kinds(run(FILE + header(length) + b"left")[1]) == [("truncated_record", 179, 16)]
    good, bad = run(FILE + header(1000) + b"left" + FILE)
    assert payloads(good) == FOUR * 2
    assert kinds(bad) == [("impossible_length", 179, 16)]
    assert [one.resynced for one in good] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("count", [1, 11, 12, 16, 4096])
def test_nuls_at_the_end_are_told_from_records_and_from_garbage(run, count):
    good, bad = run(FILE + bytes(count))
    assert payloads(good) == FOUR
    assert kinds(bad) == [("trailing_nuls", 179, count)]


def test_garbage_at_the_end_is_told(run):
    for garbage in (b"x" * 12, b"garbage" * 100, bytes(20) + b"\1" * 20):
        good, bad = run(FILE + garbage)
        assert payloads(good) == FOUR
        code = "zero_hole" if garbage[0] == 0 else "trailing_garbage"
        assert kinds(bad) == [(code, 179, len(garbage))]


def test_a_last_record_whose_header_and_payload_are_wrong_is_not_garbage(run):
    damaged = bytearray(FILE)
    damaged[166:170] = b"\xff" * 4  # the checksum, but not the length
    damaged[171] ^= 1
    assert kinds(run(bytes(damaged))[1]) == [("bad_length_checksum", 158, 21)]


def test_a_hole_is_told_with_its_first_byte_and_its_length(run):
    many = make_payloads(60, seed=5)
    many[20] = b"\1" * 300
    file, offsets = record_bytes(many), payload_offsets(many)
    start, end = offsets[20] + 100, offsets[40]  # from within a payload to behind a header
    good, bad = run(file[:start] + bytes(end - start) + file[end:])
    assert payloads(good) == many[:20] + many[41:]
    assert [(one.code, one.offset) for one in bad] == [("zero_hole", offsets[20] - 12)]
    assert f"from byte {start} on" in bad[0].message
    start, end = offsets[30] - 12, offsets[35] - 12  # from header to header
    good, bad = run(file[:start] + bytes(end - start) + file[end:])
    assert payloads(good) == many[:30] + many[35:]
    assert kinds(bad) == [("zero_hole", start, end - start)]
    assert f"{end - start} NUL bytes from byte {start} on" in bad[0].message


def test_what_is_not_there_yet_is_not_searched_for_records_in_a_file_that_grows():
    outer = record_bytes([b"first"]) + frame(FILE + b"more")[:-3]
    [first, *rest], _ = salvaged(outer)
    assert first.payload == b"first"
    assert payloads(rest) == FOUR
    assert all(one.resynced for one in rest)
    events = list(salvage(lambda offset, length: outer[offset : offset + length], len(outer), is_growing=True))
    assert isinstance(events[0], Records)
    assert [event.code for event in events[1:]] == ["truncated_record"]


def test_records_in_a_payload_are_marked_and_the_outer_record_is_preferred(run):
    outer = record_bytes([b"first", FILE, b"last"])
    good, bad = run(outer)
    assert payloads(good) == [b"first", FILE, b"last"]
    # The payload's checksum tells where the outer record ends, though its header is gone.
    good, bad = run(outer[:21] + b"\xff" * 12 + outer[33:])
    assert (payloads(good), bad) == ([b"first", FILE, b"last"], [])
    # With the payload wrong too, nothing tells its records from others but the mark.
    start = 21 + 12 + 60
    good, bad = run(outer[:21] + b"\xff" * 12 + outer[33:start] + b"?" + outer[start + 1 :])
    assert payloads(good) == [b"first", FOUR[0], FOUR[1], FOUR[3], b"last"]
    assert [one.resynced for one in good] == [False, True, True, True, True]


def test_a_frame_that_leads_on_is_preferred_to_one_that_overlaps_it_and_leads_nowhere(run):
    first = b"lone" + header(30) + b"z" * 10
    second = b"z" * 10 + struct.pack("<I", masked_crc(first)) + b"y" * 16
    crossed = header(len(first)) + first + second[10:] + struct.pack("<I", masked_crc(second))
    good, _ = run(b"#" * 16 + crossed + record_bytes(FOUR))
    assert payloads(good) == [second, *FOUR]
    good, _ = run(b"#" * 16 + crossed + b"#" * 16)
    assert payloads(good) == [first]


def test_the_losses_of_the_prototype_are_not_exceeded(run):
    rng = random.Random(7)
    originals = [rng.randbytes(rng.randrange(400, 1600)) for _ in range(2000)]
    data = bytearray(record_bytes(originals))
    third = len(data) // 3
    data[third : third + 5000] = rng.randbytes(5000)
    del data[2 * third : 2 * third + 3]
    data[2 * third + third // 2 : 2 * third + third // 2] = bytes(100)
    good, bad = run(bytes(data))
    assert len(good) >= 1990
    assert set(payloads(good)) <= set(originals)
    assert 3 <= len(bad) <= 6


# Any damage.


def check_against(originals, damaged, window):
    good, _ = salvaged(damaged, window=window)
    for record in good:
        assert damaged[record.offset : record.offset + record.length] == bytes(record.payload)
        if record.repaired != "data_crc":
            assert bytes(record.payload) in originals
    return good


def test_no_damage_makes_a_wrong_record(fuzz_count):
    originals = make_payloads(25, seed=11)
    file, everything = record_bytes(originals), set(originals)
    for seed in range(fuzz_count):
        rng = random.Random(seed)
        damaged = mutate(rng, file)
        views = [check_against(everything, damaged, window) for window in (None, rng.choice([16, 100, 1000]))]
        assert [(one.offset, one.repaired) for one in views[0]] == [(one.offset, one.repaired) for one in views[1]]


@given(st.lists(st.binary(max_size=60), max_size=12), st.data())
def test_one_place_of_damage_costs_only_the_records_that_it_touches(originals, data):
    file = record_bytes(originals)
    start = data.draw(st.integers(0, len(file)))
    end = data.draw(st.integers(start, len(file)))
    put = data.draw(st.binary(max_size=40))
    good = check_against({*originals, put}, file[:start] + put + file[end:], None)
    touched = sum(
        1
        for at, p in zip(payload_offsets(originals), originals, strict=True)
        if at - 12 < max(end, start + 1) and at + len(p) + 4 > start
    )
    assert len(good) >= len(originals) - touched


@given(st.binary(max_size=400))
def test_any_bytes_come_to_an_end_and_are_all_accounted_for(data):
    salvaged(data)
    salvaged(data, window=32)


# Bytes that keep it busy.


def busy(name, size):
    rng = random.Random(1)
    empty = frame(b"")
    count = size // 28
    made = {
        "zeros": lambda: bytes(size),
        "ones": lambda: b"\xff" * size,
        "random": lambda: rng.randbytes(size),
        "headers that all lead far": lambda: header(size // 2) * (size // 12),
        "headers that all lead to the end": lambda: b"".join(header(size - 12 * n - 16) for n in range(size // 12)),
        "headers that lead behind each other": lambda: header(5000) * (size // 12),
        "records between garbage": lambda: (empty + b"\7" * 12) * count,
        "records between far headers": lambda: b"".join(empty + header((size - 28 * n) // 2) for n in range(count)),
        "far headers before records": lambda: b"".join(header((size - 28 * n) // 2) + empty for n in range(count)),
        "records, and then nothing": lambda: (empty + b"\7" * 12) * (count // 2) + rng.randbytes(size // 2),
        "empty records": lambda: empty * (size // 16),
        "wrong payloads": lambda: (header(4) + b"abcd0000") * (size // 20),
        "the checksum of an empty record": lambda: (b"\x29\x03\x98\x07" + bytes(8)) * (size // 12),
        "small numbers": lambda: struct.pack("<Q", 5) * (size // 8),
        "records in records": lambda: b"?" + nested(rng, size),
    }
    return made[name]()


def nested(rng, size):
    payload = b""
    while len(payload) < size:
        payload += rng.randbytes(50)
        head, foot = frame_record(payload)
        payload = head + payload + foot
    return payload


BUSY = (
    *("zeros", "ones", "random", "headers that all lead far", "headers that all lead to the end"),
    *("headers that lead behind each other", "records between garbage", "records between far headers"),
    *("far headers before records", "records, and then nothing", "empty records", "wrong payloads"),
    *("the checksum of an empty record", "small numbers", "records in records"),
)


@pytest.fixture
def work(monkeypatch):
    """Count the bytes that are summed up, and those that are looked through for headers."""
    done = {"summed": 0, "searched": 0}
    crc32c, find_headers = tfrecord_resync.crc32c, tfrecord_search.find_headers

    def counted_crc(data, crc=0):
        done["summed"] += len(data)
        return crc32c(data, crc)

    def counted_find(block, most, room):
        done["searched"] += len(block)
        return find_headers(block, most, room)

    monkeypatch.setattr(tfrecord_resync, "crc32c", counted_crc)
    monkeypatch.setattr(tfrecord_range_crc, "crc32c", counted_crc)
    monkeypatch.setattr(tfrecord_search, "find_headers", counted_find)
    # So that a small file is as much to it as a large one would be.
    monkeypatch.setattr(tfrecord_resync, "_SCARCE", 0)
    monkeypatch.setattr(tfrecord_resync, "_CHEAP", 256)
    monkeypatch.setattr(tfrecord_range_crc, "_BLOCK", 256)
    monkeypatch.setattr(tfrecord_search, "_FIRST_PIECE", 1 << 8)
    monkeypatch.setattr(tfrecord_search, "_LONGEST_PIECE", 1 << 10)
    monkeypatch.setattr(tfrecord_resync, "_LOOKAHEAD", 1 << 13)
    return done


@pytest.mark.parametrize("name", BUSY)
def test_the_work_grows_with_the_file_and_not_faster(name, work):
    costs = []
    for size in (1 << 15, 1 << 17):
        data = busy(name, size)
        work.update(summed=0, searched=0)
        for _ in salvage(lambda offset, length, data=data: memoryview(data)[offset : offset + length], len(data)):
            pass
        costs.append((work["summed"] / len(data), work["searched"] / len(data)))
    for before, after in zip(*costs, strict=True):
        assert after <= 2 * before + 20
    assert costs[-1][1] < 20


def test_a_large_record_between_damage_is_not_held_in_memory():
    big = bytes(range(256)) * (40 << 12)  # 40 MiB
    head, foot = frame_record(big)
    data = FILE + b"??" + head + big + foot + FILE
    tracemalloc.start()
    try:
        lengths = [
            event.length if not isinstance(event, Records) else int(event.lengths.max())
            for event in salvage(lambda offset, length: data[offset : offset + length], len(data))
        ]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(big) in lengths
    assert peak < 30 << 20
