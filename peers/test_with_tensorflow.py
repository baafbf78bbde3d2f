"""Records, Examples and tensors, exchanged with TensorFlow itself.

Run by ``make test-tensorflow``, in an environment of its own: nothing of this package needs TensorFlow, and the other
tests do without it. `tests/` holds what TensorFlow wrote and said for all other runs.
"""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf

from shardset.errors import ChecksumError, FormatError, TruncatedError
from shardset.formats.example import (
    decode_tensor,
    encode_example,
    encode_sequence_example,
    parse_example,
    parse_sequence_example,
)
from shardset.formats.tfrecord import frame_record, masked_crc32c
from shardset.index.record_reader import iter_records
from shardset.writing.convert import convert
from shardset.writing.tfrecord_writer import TFRecordWriter

PAYLOADS = [b"", b"abc", bytes(range(256)) * 20, b"x" * 70_000, b"last"]
FOUR = [b"a" * 10, b"", b"c" * 100, b"d" * 5]
"""The four records of the damage table: they begin at bytes 0, 26, 42 and 158, and end at 179."""


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path_factory.mktemp("cache")))


def framed(*payloads):
    return b"".join(header + payload + footer for payload in payloads for header, footer in [frame_record(payload)])


def read_by_tensorflow(path, compression=""):
    """Return the records that TensorFlow gives before it ends, and the error that it ends with."""
    records = []
    try:
        for raw in tf.data.TFRecordDataset(str(path), compression_type=compression):
            records.append(raw.numpy())  # noqa: PERF401 - those before an error count
    except tf.errors.OpError as error:
        return records, error
    return records, None


def read_by_us(path, **settings):
    records = []
    try:
        for raw in iter_records(path, **settings):
            records.append(raw)  # noqa: PERF402 - those before an error count
    except FormatError as error:
        return records, error
    return records, None


def write_by_us(path, payloads, **settings):
    with TFRecordWriter(path, **settings) as writer:
        for payload in payloads:
            writer.write(payload)
    return writer.urls


def write_by_tensorflow(path, payloads, options=None, *, flush=False):
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for payload in payloads:
            writer.write(payload)
            if flush:
                writer.flush()


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("payloads", [PAYLOADS, [], [b""]], ids=["some", "none", "empty"])
def test_tensorflow_reads_what_we_write(tmp_path, compression, payloads):
    write_by_us(tmp_path / "a", payloads, compression=compression)
    assert read_by_tensorflow(tmp_path / "a", compression) == (payloads, None)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_our_files_are_tensorflow_s_byte_for_byte(tmp_path, compression):
    write_by_us(tmp_path / "ours", PAYLOADS, compression=compression)
    write_by_tensorflow(tmp_path / "theirs", PAYLOADS, compression)
    ours, theirs = (tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()
    if compression:  # their zlib may be another one, but the header is the same
        ours, theirs = ours[:10], theirs[:10]
        if compression == "ZLIB":
            ours, theirs = ours[:2], theirs[:2]
    assert ours == theirs


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_tensorflow_reads_what_we_append(tmp_path, compression):
    write_by_tensorflow(tmp_path / "a", PAYLOADS, compression)
    for more in (b"1", b"2"):
        write_by_us(tmp_path / "a", [more], append=True)
    assert read_by_tensorflow(tmp_path / "a", compression) == ([*PAYLOADS, b"1", b"2"], None)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_tensorflow_reads_what_was_flushed_in_between(tmp_path, compression):
    with TFRecordWriter(tmp_path / "a", compression=compression) as writer:
        for payload in PAYLOADS:
            writer.write(payload)
            writer.flush()
    assert read_by_tensorflow(tmp_path / "a", compression) == (PAYLOADS, None)


def test_tensorflow_sees_a_set_under_the_names_that_it_would_give(tmp_path):
    payloads = [str(number).encode() for number in range(20)]
    urls = write_by_us(tmp_path / "train@3", payloads)
    names = [tf.raw_ops.ShardedFilename(basename=str(tmp_path / "train"), shard=i, num_shards=3) for i in range(3)]
    assert [name.numpy().decode() for name in names] == list(urls)
    pattern = tf.raw_ops.ShardedFilespec(basename=str(tmp_path / "train"), num_shards=3).numpy().decode()
    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    found = files.interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=1, deterministic=True)
    assert [raw.numpy() for raw in found] == payloads


FEATURES = {
    "bytes": [b"a", b"", b"\xff\xd8"],
    "one": [b"x"],
    "floats": np.array([0.5, -1, np.inf], np.float32),
    "ints": np.array([0, -1, 2**63 - 1, -(2**63)], np.int64),
}


def test_tensorflow_parses_our_examples():
    spec = {
        "bytes": tf.io.VarLenFeature(tf.string),
        "one": tf.io.FixedLenFeature([], tf.string),
        "floats": tf.io.FixedLenFeature([3], tf.float32),
        "ints": tf.io.FixedLenFeature([4], tf.int64),
        "none": tf.io.FixedLenFeature([], tf.int64, default_value=7),
        "missing": tf.io.VarLenFeature(tf.int64),
    }
    parsed = tf.io.parse_single_example(encode_example({**FEATURES, "none": None}), spec)
    assert parsed["bytes"].values.numpy().tolist() == FEATURES["bytes"]
    assert parsed["one"].numpy() == b"x"
    np.testing.assert_array_equal(parsed["floats"], FEATURES["floats"])
    np.testing.assert_array_equal(parsed["ints"], FEATURES["ints"])
    assert parsed["none"].numpy() == 7
    assert parsed["missing"].values.shape == (0,)


def test_our_examples_are_tensorflow_s_byte_for_byte():
    message = tf.train.Example()
    message.features.feature["bytes"].bytes_list.value.extend(FEATURES["bytes"])
    message.features.feature["one"].bytes_list.value.append(b"x")
    message.features.feature["floats"].float_list.value.extend(FEATURES["floats"])
    message.features.feature["ints"].int64_list.value.extend(FEATURES["ints"])
    message.features.feature["none"].Clear()
    message.features.feature["empty"].float_list.Clear()
    message.features.feature["empty"].float_list.SetInParent()
    raw = message.SerializeToString(deterministic=True)
    assert encode_example({**FEATURES, "none": None, "empty": np.zeros(0, np.float32)}) == raw
    parsed = parse_example(raw)
    assert parsed["none"] is None
    assert parsed["empty"].dtype == np.float32
    for name, value in FEATURES.items():
        np.testing.assert_array_equal(parsed[name], value)


def test_sequence_examples_are_exchanged():
    lists = {"frames": [[b"a"], [b"b"]], "boxes": [np.array([1, 2], np.float32), np.array([3, 4], np.float32)]}
    raw = encode_sequence_example({"length": 2}, lists)
    context, sequences = tf.io.parse_single_sequence_example(
        raw,
        {"length": tf.io.FixedLenFeature([], tf.int64)},
        {
            "frames": tf.io.FixedLenSequenceFeature([], tf.string),
            "boxes": tf.io.FixedLenSequenceFeature([2], tf.float32),
        },
    )
    assert context["length"].numpy() == 2
    assert sequences["frames"].numpy().tolist() == [b"a", b"b"]
    np.testing.assert_array_equal(sequences["boxes"], [[1, 2], [3, 4]])
    theirs = tf.train.SequenceExample.FromString(raw).SerializeToString(deterministic=True)
    assert theirs == raw
    parsed = parse_sequence_example(theirs)
    assert parsed.feature_lists["frames"] == lists["frames"]


OPTIONS = [
    {},
    {"compression_type": "GZIP"},
    {"compression_type": "ZLIB"},
    {"compression_type": "GZIP", "compression_level": 9, "mem_level": 1, "compression_strategy": 2},
    {"compression_type": "ZLIB", "compression_level": 1, "output_buffer_size": 64},
    {"compression_type": "GZIP", "compression_level": 0},
    {"compression_type": "GZIP", "flush_mode": 2},
    {"compression_type": "ZLIB", "flush_mode": 3},
    {"compression_type": "GZIP", "window_bits": 31},
    {"compression_type": "GZIP", "window_bits": 15},  # which makes a zlib file of it
    {"compression_type": "ZLIB", "window_bits": 12},
]


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "plain")
def test_we_read_what_tensorflow_writes(tmp_path, options, flush):
    write_by_tensorflow(tmp_path / "a", PAYLOADS, tf.io.TFRecordOptions(**options), flush=flush)
    # A zlib stream with another window than the usual one is not told by its first bytes.
    settings = {"compression": "zlib"} if options.get("window_bits") == 12 else {}
    assert read_by_us(tmp_path / "a", **settings) == (PAYLOADS, None)


def test_we_read_gzip_members_one_after_the_other_as_tensorflow_does(tmp_path):
    for name, payloads in (("a", PAYLOADS), ("b", FOUR)):
        write_by_tensorflow(tmp_path / name, payloads, "GZIP")
    (tmp_path / "all").write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    assert read_by_tensorflow(tmp_path / "all", "GZIP") == ([*PAYLOADS, *FOUR], None)
    assert read_by_us(tmp_path / "all") == ([*PAYLOADS, *FOUR], None)


def test_behind_an_empty_gzip_member_tensorflow_sees_nothing_so_we_never_write_one(tmp_path):
    empty = gzip.compress(b"")
    member = gzip.compress(framed(*FOUR))
    (tmp_path / "a").write_bytes(member + empty + member)
    assert read_by_tensorflow(tmp_path / "a", "GZIP") == (FOUR, None)
    assert read_by_us(tmp_path / "a") == ([*FOUR, *FOUR], None)
    write_by_tensorflow(tmp_path / "b", [], "GZIP")
    for more in ([], [b"1"], [], [b"2"]):
        write_by_us(tmp_path / "b", more, append=True)
    assert read_by_tensorflow(tmp_path / "b", "GZIP") == ([b"1", b"2"], None)


def flipped(byte, bit=0):
    data = bytearray(framed(*FOUR))
    data[byte] ^= 1 << bit
    return bytes(data)


def with_length(length):
    raw = struct.pack("<Q", length)
    return framed(*FOUR[:2]) + raw + struct.pack("<I", masked_crc32c(raw)) + b"few bytes"


WHOLE = framed(*FOUR)
DAMAGE = {
    "payload cut": (WHOLE[:-7], 158, TruncatedError),
    "footer cut": (WHOLE[:-1], 158, TruncatedError),
    "nothing behind the header": (WHOLE[:170], 158, TruncatedError),
    "empty record cut": (WHOLE[:40], 26, TruncatedError),
    "payload bit": (flipped(60), 42, ChecksumError),
    "payload checksum bit": (flipped(156), 42, ChecksumError),
    "low length bit": (flipped(42), 42, ChecksumError),
    "high length bit": (flipped(49, 7), 42, ChecksumError),
    "length checksum bit": (flipped(51), 42, ChecksumError),
    "first length bit": (flipped(0), 0, ChecksumError),
    "twelve zero bytes": (WHOLE + bytes(12), 179, FormatError),
    "4096 zero bytes": (WHOLE + bytes(4096), 179, FormatError),
    "a length of 1000": (with_length(1000), 42, TruncatedError),
    "a length of 2^31": (with_length(1 << 31), 42, TruncatedError),
    "a length of 2^63": (with_length(1 << 63), 42, FormatError),
    "a length of 2^64 - 5": (with_length((1 << 64) - 5), 42, FormatError),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_of_a_damaged_file_both_give_the_records_before_the_damage_and_an_error(tmp_path, name):
    content, offset, kind = DAMAGE[name]
    (tmp_path / "a").write_bytes(content)
    records, error = read_by_tensorflow(tmp_path / "a")
    assert error is not None
    for settings in ({}, {"tf_compat": True}):
        ours, our_error = read_by_us(tmp_path / "a", **settings)
        assert ours == records
        assert isinstance(our_error, kind)
        assert our_error.offset == offset
    # TensorFlow names the record's beginning, or the payload's where that has a bit wrong.
    if " record at " in error.message:
        assert f" record at {offset + 12 * name.startswith('payload ') * (name != 'payload cut')}" in error.message


@pytest.mark.parametrize("tail", range(1, 12))
@pytest.mark.parametrize("kind", ["cut header", "stray bytes"])
def test_a_short_tail_is_an_error_here_and_the_end_for_tensorflow(tmp_path, tail, kind):
    more = frame_record(b"more")[0][:tail] if kind == "cut header" else b"\xee" * tail
    (tmp_path / "a").write_bytes(WHOLE + more)
    assert read_by_tensorflow(tmp_path / "a") == (FOUR, None)
    assert read_by_us(tmp_path / "a", tf_compat=True) == (FOUR, None)
    records, error = read_by_us(tmp_path / "a")
    assert records == FOUR
    assert isinstance(error, TruncatedError)
    assert error.offset == 179


def test_a_length_that_ends_tensorflow_s_process_is_an_error_here(tmp_path):
    (tmp_path / "a").write_bytes(with_length(1 << 40))
    program = "import sys, tensorflow as tf; list(tf.data.TFRecordDataset(sys.argv[1]))"
    theirs = subprocess.run([sys.executable, "-c", program, tmp_path / "a"], capture_output=True, check=False)
    assert theirs.returncode != 0
    records, error = read_by_us(tmp_path / "a")
    assert records == FOUR[:2]
    assert isinstance(error, TruncatedError)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("cut", [4, 8, 20, 60])
def test_of_a_cut_compressed_file_no_fewer_records_come_here_and_never_in_silence(tmp_path, compression, cut):
    write_by_tensorflow(tmp_path / "a", FOUR, compression)
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data[: -min(cut, len(data) - 3)])
    theirs, _ = read_by_tensorflow(tmp_path / "a", compression)
    ours, error = read_by_us(tmp_path / "a")
    assert error is not None
    assert ours[: len(theirs)] == theirs
    assert ours == FOUR[: len(ours)]


TYPES = [
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.bool, tf.complex64, tf.complex128, tf.string),
]


def tensor_of(dtype, shape):
    count = int(np.prod(shape))
    if dtype == tf.string:
        return tf.reshape(tf.constant([bytes([number]) * number for number in range(count)], tf.string), shape)
    values = np.arange(count) % 5 - (0 if dtype.is_unsigned or dtype == tf.bool else 2)
    return tf.reshape(tf.cast(tf.constant(values), dtype), shape)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_tensors_are_read_as_tensorflow_wrote_them(dtype, shape):
    tensor = tensor_of(dtype, shape)
    for raw in (
        tf.io.serialize_tensor(tensor).numpy(),
        tf.make_tensor_proto(tensor.numpy(), dtype, shape).SerializeToString(),
    ):
        ours, theirs = decode_tensor(raw), tensor.numpy()
        assert np.shape(ours) == shape
        if dtype == tf.string:
            assert np.asarray(ours).ravel().tolist() == np.asarray(theirs).ravel().tolist()
        elif dtype == tf.bfloat16:
            np.testing.assert_array_equal(np.asarray(ours, np.float64), np.asarray(theirs, np.float64))
        else:
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


def test_what_a_tar_was_converted_to_is_read_by_tensorflow(tmp_path):
    raw = encode_example({"image/encoded": [b"\xff\xd8\xff" + bytes(80)], "label": 3, "box": [0.5, 1.0]})
    write_by_us(tmp_path / "a.tfrecord", [raw] * 3)
    convert(tmp_path / "a.tfrecord", tmp_path / "tars")
    convert(tmp_path / "tars", tmp_path / "records", compression="gzip")
    spec = {"image/encoded": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    dataset = tf.data.TFRecordDataset(str(tmp_path / "records" / "a.tfrecord.gz"), compression_type="GZIP")
    found = [tf.io.parse_single_example(record, spec) for record in dataset]
    assert [features["label"].numpy() for features in found] == [3] * 3
    assert {features["image/encoded"].numpy()[:3] for features in found} == {b"\xff\xd8\xff"}
