from __future__ import annotations

import gzip
import itertools
import zlib

import numpy as np
import pytest

from shardset.errors import CompressedShardError, FormatError, TruncatedError
from shardset.index.build import build_index, fits_headers
from shardset.index.numbering import number_by_path
from shardset.index.records import extend_index, find_gaps, lengths_to_offsets, open_records, record_names, shard_format
from shardset.policy import Policy, Report
from shardset.storage import MemoryStore
from tfrecords import make_payloads, payload_offsets, record_bytes

PAYLOADS = make_payloads(300)
PLAIN = record_bytes(PAYLOADS)


def reader_of(data, name="a.tfrecord"):
    store = MemoryStore()
    store.write(f"memory://shards/{name}", data)
    return store.open(f"memory://shards/{name}")


def test_each_record_is_a_sample_whose_key_is_its_number():
    index = build_index(reader_of(PLAIN))
    assert index.num_samples == index.num_files == 300
    assert index.keys().to_text_list() == [str(number) for number in range(300)]
    assert index.offset.tolist() == payload_offsets(PAYLOADS)
    assert index.length.tolist() == list(map(len, PAYLOADS))
    assert index.records.compression == ""
    assert index.records.size == index.size == len(PLAIN)


def test_records_keep_their_order_where_others_are_numbered_by_path():
    numbering = number_by_path(build_index(reader_of(PLAIN)))
    assert numbering.samples.tolist() == list(range(300))
    assert set(numbering.json_rows.tolist()) == set(numbering.text_rows.tolist()) == {-1}


def test_an_empty_file_has_no_records():
    index = build_index(reader_of(b""))
    assert index.num_samples == 0
    assert not index.faults
    assert index.keys().to_list() == []


@pytest.mark.parametrize("parts", [1, 3])
def test_a_compressed_shard_is_indexed_before_compression(parts):
    cuts = [len(PLAIN) * part // parts for part in range(parts + 1)]
    packed = b"".join(gzip.compress(PLAIN[start:end]) for start, end in itertools.pairwise(cuts))
    reader = reader_of(packed)
    index = build_index(reader)
    assert index.size == len(packed)
    assert index.records.compression == "gzip"
    assert index.records.size == len(PLAIN)
    assert index.offset.tolist() == payload_offsets(PAYLOADS)
    content = open_records(reader, index.records)
    assert [bytes(view) for view in content.read_many(index.offset, index.length)] == PAYLOADS
    assert content.read(0, content.size) == PLAIN
    assert fits_headers(index, reader)


def test_what_a_file_is_shows_in_its_content_where_its_name_says_nothing():
    assert shard_format(reader_of(PLAIN, "events.out.tfevents.17")) == "tfrecord"
    assert shard_format(reader_of(gzip.compress(PLAIN), "data.gz")) == "tfrecord"
    assert shard_format(reader_of(gzip.compress(b"no record" * 20), "data.gz")) == "tar"
    assert shard_format(reader_of(b"", "nothing")) == "tar"
    assert shard_format(reader_of(PLAIN, "a.tar")) == "tar"


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        pytest.param(b"version https://git-lfs.github.com/spec/v1\noid ...", FormatError, "Git LFS", id="pointer"),
        pytest.param(b"<html><body>404", FormatError, "HTML", id="page"),
        pytest.param(b"PAR1" + bytes(50), FormatError, "Parquet", id="parquet"),
        pytest.param(zlib.compress(PLAIN), CompressedShardError, "zlib", id="zlib"),
        pytest.param(PLAIN[:-5], TruncatedError, "cut short", id="cut"),
        pytest.param(PLAIN + b"\1\2\3", TruncatedError, "3 of 12", id="tail"),
        pytest.param(gzip.compress(PLAIN)[:-20], TruncatedError, "ends|cut", id="gzip cut"),
        pytest.param(gzip.compress(PLAIN)[:-8] + bytes(8), FormatError, "check", id="gzip checksum"),
    ],
)
def test_what_is_damaged_or_foreign_raises(content, kind, said):
    with pytest.raises(kind, match=said) as caught:
        build_index(reader_of(content))
    assert caught.value.shard == "memory://shards/a.tfrecord"
    assert caught.value.hint


def test_a_damaged_shard_is_indexed_up_to_the_damage_and_counted_if_the_policy_says_so():
    report = Report()
    index = build_index(reader_of(PLAIN[:-5]), policy=Policy(on_error="skip"), report=report)
    assert index.num_samples == 299
    assert sum(report.counts.values()) == 1


def test_an_index_fits_its_shard_and_no_other():
    index = build_index(reader_of(PLAIN))
    assert fits_headers(index, reader_of(PLAIN))
    assert not fits_headers(index, reader_of(PLAIN + record_bytes([b"more"])))
    assert not fits_headers(index, reader_of(PLAIN[: len(PLAIN) - len(PAYLOADS[-1]) - 16]))
    other = record_bytes([payload + b"x" if at == 150 else payload for at, payload in enumerate(PAYLOADS)])
    assert not fits_headers(index, reader_of(other[: len(PLAIN)]))


def test_a_shard_that_grew_is_read_from_where_it_ended():
    index = build_index(reader_of(PLAIN))
    more = make_payloads(20, seed=5)
    reads = []

    class Watched:
        def __init__(self, reader):
            self.reader = reader

        def __getattr__(self, name):
            return getattr(self.reader, name)

        def map(self):
            return None

        def read(self, offset, length):
            reads.append(offset)
            return self.reader.read(offset, length)

    grown = reader_of(PLAIN + record_bytes(more))
    extended = extend_index(index, Watched(grown))
    whole = build_index(grown)
    assert extended.offset.tolist() == whole.offset.tolist()
    assert extended.digest() == whole.digest()
    assert min(reads) == len(PLAIN)


@pytest.mark.parametrize(
    "content",
    [PLAIN, PLAIN[:-1], record_bytes(make_payloads(400, seed=9)), gzip.compress(PLAIN) * 20],
    ids=["same", "shorter", "another", "compressed"],
)
def test_only_a_shard_that_grew_is_extended(content):
    assert extend_index(build_index(reader_of(PLAIN)), reader_of(content)) is None


def test_gaps_and_lengths_say_where_records_are():
    offsets = np.array([12, 12 + 16 + 5, 12 + 16 + 5 + 16 + 7 + 100], np.int64)
    index = build_index(reader_of(record_bytes([b"12345", b"1234567", b""])))
    assert index.offset.tolist()[:2] == offsets[:2].tolist()
    assert lengths_to_offsets(np.array([5, 7, 0]), [(2, 100)]).tolist() == offsets.tolist()
    assert lengths_to_offsets(np.array([5, 7, 0]), [(0, 3)]).tolist()[0] == 15
    assert find_gaps(index) == []
    assert lengths_to_offsets(np.zeros(0, np.int64), []).tolist() == []


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000, 1001])
def test_numbers_are_spelled_in_decimal_digits(count):
    assert record_names(count).to_text_list() == list(map(str, range(count)))


@pytest.mark.parametrize("left", [0.3, 0.7, 0.99])
def test_the_records_before_the_damage_of_a_compressed_shard_can_be_read(left):
    packed = gzip.compress(PLAIN)
    reader = reader_of(packed[: int(len(packed) * left)])
    index = build_index(reader, policy=Policy(on_error="skip"))
    assert [fault.code for fault in index.faults] == ["truncated_compression"]
    assert index.num_samples > 300 * left - 30
    content = open_records(reader, index.records)
    assert [bytes(view) for view in content.read_many(index.offset, index.length)] == PAYLOADS[: index.num_samples]


def test_records_before_a_wrong_byte_in_a_compressed_shard_can_be_read():
    payloads = make_payloads(3000, seed=8)
    packed = bytearray(gzip.compress(record_bytes(payloads), 1))
    reader_of(bytes(packed))
    for at in range(len(packed) // 3, len(packed) // 3 + 40):
        changed = packed.copy()
        changed[at] ^= 0x5A
        reader = reader_of(bytes(changed))
        index = build_index(reader, policy=Policy(on_error="skip"))
        content = open_records(reader, index.records)
        found = [bytes(view) for view in content.read_many(index.offset, index.length)]
        assert len(found) == index.num_samples
        assert found[:500] == payloads[:500]
