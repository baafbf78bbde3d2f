"""`check` over files: every row of what TensorFlow and others do with damaged files, and the counts of what is lost."""

from __future__ import annotations

import gzip
import random
import struct
import zlib

import pytest

from servers.faults import Fault
from servers.faulty import FaultServer
from shards import write_shard
from shardset.doctor import check, record_stream
from shardset.doctor.tfrecord_checks import MOST_FINDINGS
from shardset.errors import NotFoundError
from shardset.formats.example import encode_example
from shardset.storage import MemoryStore
from shardset.storage.local import LocalStore
from tfrecords import FOREIGN, frame, make_payloads, masked_crc, payload_offsets, record_bytes

FOUR = [b"a" * 10, b"", b"c" * 100, b"d" * 5]
FILE = record_bytes(FOUR)


def header(length):
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc(packed))


def flip(data, byte, bit=0):
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    return bytes(changed)


@pytest.fixture
def checked(tmp_path):
    """Check a file that has these bytes, through a map and without one."""

    def run(data, name="a.tfrecord", **settings):
        path = tmp_path / name
        path.write_bytes(data)
        [mapped] = check(path, **settings).shards
        [read] = check(path, store=LocalStore(mmap=False), **settings).shards
        assert mapped == read
        return mapped

    return run


def codes(shard):
    return [finding.code for finding in shard.findings]


@pytest.mark.parametrize("path", sorted(FOREIGN.iterdir()), ids=lambda path: path.name)
def test_files_of_other_writers_are_clean(path):
    report = check(path)
    [shard] = report.shards
    assert shard.records > 0
    assert (shard.findings, report.findings, report.has_errors) == ((), (), False)
    assert shard.compression == ("gzip" if path.suffix == ".gz" else None)


ROWS = {
    "whole": (FILE, 4, []),
    "header cut to 1": (FILE[:159], 3, ["R101"]),
    "header cut to 5": (FILE[:163], 3, ["R101"]),
    "header cut to 10": (FILE[:168], 3, ["R101"]),
    "header cut to 11": (FILE[:169], 3, ["R101"]),
    "three bytes": (FILE[:3], 0, ["R101"]),
    "cut behind a header": (FILE[:170], 3, ["R102"]),
    "cut in a payload": (FILE[:172], 3, ["R102"]),
    "cut in a footer": (FILE[:-1], 3, ["R102"]),
    "cut in an empty record": (FILE[:40], 1, ["R102"]),
    "payload flipped": (flip(FILE, 60), 3, ["R104"]),
    "payload's checksum wrong": (flip(flip(FILE, 154), 155), 3, ["R104"]),
    "one bit of a payload's checksum": (flip(FILE, 154), 4, ["R111"]),
    "low bit of a length": (flip(FILE, 42), 4, ["R110"]),
    "high bit of a length": (flip(FILE, 48, 6), 4, ["R110"]),
    "length's checksum": (flip(FILE, 51), 4, ["R110"]),
    "first header": (flip(FILE, 0, 3), 4, ["R110"]),
    "4096 NULs": (FILE + bytes(4096), 4, ["R107"]),
    "12 NULs": (FILE + bytes(12), 4, ["R107"]),
    "garbage": (FILE + b"\xde\xad\xbe\xef" * 50, 4, ["R108"]),
    "length 1000": (FILE + header(1000) + b"few", 4, ["R102"]),
    "length 2^31": (FILE + header(1 << 31) + b"few", 4, ["R102"]),
    "length 2^40": (FILE + header(1 << 40) + b"few", 4, ["R106"]),
    "length 2^62": (FILE + header(1 << 62) + b"few", 4, ["R106"]),
    "length 2^63": (FILE + header(1 << 63) + b"few", 4, ["R106"]),
    "length 2^64-5": (FILE + header((1 << 64) - 5) + b"few", 4, ["R106"]),
    "a hole": (FILE + bytes(500) + FILE, 8, ["R109", "R112"]),
    "bytes missing": (FILE[:60] + FILE[63:], 3, ["R105", "R112"]),
    "empty": (b"", 0, ["R002"]),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zlib.compress], ids=["plain", "gzip", "zlib"])
def test_each_row_of_damage_has_its_code_and_gives_its_records(checked, row, pack):
    data, records, expected = ROWS[row]
    if not data and pack is not bytes:
        expected = []  # what is empty inside is a file of no records
    shard = checked(pack(data))
    assert (shard.records, codes(shard)) == (records, expected)
    assert shard.is_tfrecord
    assert sum(shard.counts.values()) == len(expected)
    assert shard.has_errors == bool({*expected} - {"R002", "R112"})


def test_offsets_lengths_and_checksums_are_in_the_finding(checked):
    shard = checked(flip(FILE, 60))
    [finding] = shard.findings
    assert (finding.offset, finding.lost_bytes, finding.lost_records) == (42, 116, 1)
    assert f"{masked_crc(FOUR[2]):08x}" in finding.message
    assert finding.shard == shard.shard
    assert (shard.good, shard.lost_bytes, shard.lost_records) == (3, 116, 1)


def test_lost_records_are_estimated_by_the_size_of_the_others(checked):
    payloads = [bytes([n]) * 84 for n in range(100)]  # 100 bytes each, with their frames
    file = record_bytes(payloads)
    shard = checked(file[:3050] + random.Random(1).randbytes(1000) + file[4050:])
    assert shard.records == 89
    assert shard.lost_records == 11
    assert (codes(shard), shard.resynced) == (["R105", "R112"], 59)
    assert checked(file + bytes(9999)).lost_records == 0
    assert checked(file + b"\1" * 520).lost_records == 5


FOREIGN_FILES = {
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 133\n",
    "an HTML or XML page": b"<!DOCTYPE html><html><body>404</body></html>" * 9,
    "a Parquet file": b"PAR1" + bytes(200),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(200),
    "JSON text": b'{"error": "no such object"}',
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(100),
    "text": b"one line and another line of text",
    "NUL": bytes(5000),
    "no record": random.Random(2).randbytes(5000),
}


@pytest.mark.parametrize("what", FOREIGN_FILES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_what_is_no_tfrecord_file_is_named_and_not_searched_for_records(checked, what, pack):
    shard = checked(pack(FOREIGN_FILES[what]))
    assert (codes(shard), shard.is_tfrecord, shard.records) == (["R001"], False, 0)
    assert what in shard.findings[0].message
    assert shard.findings[0].hint


def test_a_tar_that_holds_records_is_a_tar(checked, tmp_path):
    tar = write_shard(tmp_path / "b.tar", [("a.tfrecord", FILE)]).read_bytes()
    shard = checked(tar)
    assert codes(shard) == ["R001"]
    assert "tar archive" in shard.findings[0].message


def test_a_length_that_looks_like_a_bracket_is_no_json(checked):
    file = record_bytes([b"x" * 0x7B, b"y" * 300])
    shard = checked(flip(file, 9, 2))
    assert (shard.records, codes(shard)) == (2, ["R110"])


def test_compression_that_is_damaged_gives_what_comes_before_and_what_comes_behind(checked):
    payloads = make_payloads(300, seed=2)
    whole = record_bytes(payloads)
    half = len(record_bytes(payloads[:150]))
    first, second = gzip.compress(whole[:half]), gzip.compress(whole[half:])
    shard = checked(first + second)
    assert (shard.records, codes(shard)) == (300, [])
    shard = checked(first[:-2000] + second)
    assert codes(shard)[0] in {"R201", "R202", "R203"}
    assert 150 <= shard.records < 300
    assert shard.resynced >= 145
    shard = checked((first + second)[:-2000])
    assert codes(shard)[:2] == ["R202", "R102"]
    assert 250 < shard.records < 300
    assert codes(checked(gzip.compress(whole) + bytes(100))) == ["R205"]
    assert codes(checked(gzip.compress(whole) + b"nonsense" * 20)) == ["R204"]
    assert codes(checked(zlib.compress(whole[:half]) + zlib.compress(whole[half:]))) == ["R206"]
    assert codes(checked(flip(gzip.compress(whole), -6))) == ["R203"]


def test_what_was_compressed_and_is_much_goes_through_a_file(checked, monkeypatch):
    monkeypatch.setattr(record_stream, "_IN_MEMORY", 1000)
    payloads = make_payloads(300, seed=2)
    assert checked(gzip.compress(record_bytes(payloads))).records == 300
    assert codes(checked(gzip.compress(b"version https://git-lfs.github.com/spec/v1\n" * 99))) == ["R001"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("left", [1, 11, 12, 15, 20])
def test_a_short_tail_of_a_file_that_grows_is_no_damage(checked, pack, left):
    data = FILE + record_bytes([b"e" * 30])[:left]
    shard = checked(pack(data), tail=True)
    assert (codes(shard), shard.has_errors, shard.lost_bytes) == (["R113"], False, 0)
    assert shard.findings[0].severity == "note"
    assert checked(pack(data)).has_errors


def test_a_compressed_file_that_grows_ends_where_it_ends(checked):
    data = gzip.compress(record_bytes(make_payloads(200, seed=1)))[:-300]
    shard = checked(data, tail=True)
    assert {*codes(shard)} == {"R113"}
    assert not shard.has_errors


def test_a_tail_hides_no_other_damage(checked):
    shard = checked(flip(FILE, 60)[:-1], tail=True)
    assert codes(shard) == ["R104", "R113"]
    assert shard.has_errors


def test_of_many_findings_of_a_kind_the_first_are_kept_and_all_are_counted(checked):
    wrong = frame(b"x")[:-4] + bytes(4)
    shard = checked(FILE + wrong * (MOST_FINDINGS + 500) + FILE)
    assert shard.counts == {"R104": MOST_FINDINGS + 500}
    assert len(shard.findings) == MOST_FINDINGS
    assert shard.lost_records == MOST_FINDINGS + 500
    assert shard.records == 8


def test_examples_are_looked_into_on_request(checked):
    good = encode_example({"label": [1]})
    no_kind = bytes.fromhex("0a070a050a01611200")
    data = record_bytes([good, no_kind, no_kind, good, b"\xff\xff"])
    assert codes(checked(data)) == []
    shard = checked(flip(data, 9), examples=True)  # the first record is mended
    assert codes(shard) == ["R110", "R301", "R301"]
    first, second = shard.findings[1:]
    assert first.offset == len(record_bytes([good]))
    assert "2 records" in first.message
    assert "'a'" in first.message
    assert "one record" in second.message
    assert not any(finding.severity == "error" for finding in shard.findings[1:])


# Several shards.


def test_a_set_of_shards_is_checked_in_order_and_must_be_complete(tmp_path):
    for number in (0, 1, 3):
        (tmp_path / f"train-{number:05d}-of-00004").write_bytes(flip(FILE, 60) if number == 1 else FILE)
    seen = []
    report = check(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert [shard.records for shard in report.shards] == [4, 3, 4]
    assert [finding.code for finding in report.all_findings] == ["R003", "R104"]
    assert "train-00002-of-00004" in report.findings[0].message
    assert report.has_errors
    assert report.is_readable
    assert seen == sorted(seen)
    assert seen[-1] == (3 * len(FILE), 3 * len(FILE))


def test_one_shard_that_is_no_tfrecord_file_stops_no_other(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"<html>" * 20)
    (tmp_path / "b.tfrecord").write_bytes(FILE)
    report = check(tmp_path)
    assert [shard.records for shard in report.shards] == [0, 4]
    assert not report.is_readable


def test_tar_shards_are_named_as_not_checked(tmp_path):
    write_shard(tmp_path / "a.tar", [("a.txt", b"x")])
    with pytest.raises(ValueError, match=r"a\.tar is a tar shard"):
        check(tmp_path)
    (tmp_path / "b.tfrecord").write_bytes(FILE)
    report = check(tmp_path)
    assert len(report.shards) == 1
    assert [(finding.code, finding.severity) for finding in report.findings] == [("R006", "note")]
    assert report.findings[0].shard.endswith("a.tar")
    assert not report.has_errors


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(NotFoundError):
        check(tmp_path / "none.tfrecord")


def test_objects_in_memory_are_checked_too():
    store = MemoryStore()
    store.write("memory://b/a.tfrecord", flip(FILE, 60))
    [shard] = check("memory://b/a.tfrecord", store=store).shards
    assert (shard.records, codes(shard)) == (3, ["R104"])


@pytest.mark.servers
def test_shards_elsewhere_are_checked_and_one_that_cannot_be_read_is_a_finding():
    payloads = make_payloads(3000, seed=4, longest=2000)
    data = record_bytes(payloads)
    place = next(at for at, p in zip(payload_offsets(payloads), payloads, strict=True) if len(p) > 99) + 50
    with FaultServer() as server:
        server.put("/d/a.tfrecord", flip(data, place))
        server.put("/d/b.tfrecord.gz", gzip.compress(data))
        server.put("/d/c.tfrecord", data)
        report = check([server.url + f"d/{name}" for name in ("a.tfrecord", "b.tfrecord.gz", "c.tfrecord")])
        assert [shard.records for shard in report.shards] == [2999, 3000, 3000]
        server.add(Fault.status(403), path="/d/c.tfrecord", method="GET")
        report = check([server.url + f"d/{name}" for name in ("a.tfrecord", "b.tfrecord.gz", "c.tfrecord")])
        assert [finding.code for finding in report.findings] == ["R005"]
