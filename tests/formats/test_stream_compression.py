"""Inflating whole shards in order: what the usual programs write comes out as it went in, and damage is an error."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import subprocess
import tarfile
import tracemalloc
import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.record_reference import cut_at, drain, mutate
from shardset.errors import ChecksumError, FormatError, LimitError, ShardsetError, TruncatedError
from shardset.formats.stream_compression import HEAD_SIZE, detect_compression, inflate_shard, inflate_stream
from shardset.policy import Report

KINDS = ("gzip", "bzip2", "xz", "zstd", "lz4")
PLAIN = b"".join(b"%d of some words, " % number for number in range(150)) + random.Random(7).randbytes(200)
SKIPPABLE = b"\x5a\x2a\x4d\x18" + (7).to_bytes(4, "little") + b"skipped"


def pack(plain, kind):
    if kind == "gzip":
        return gzip.compress(plain, mtime=0)
    if kind == "bzip2":
        return bz2.compress(plain)
    if kind == "xz":
        return lzma.compress(plain)
    # As the programs write them, with a checksum behind each frame.
    options = {"zstd": ["--check"], "lz4": ["-BX"]}[kind]
    return subprocess.run([kind, "-c", "-q", *options], input=plain, capture_output=True, check=True).stdout


PACKED = {kind: pack(PLAIN, kind) for kind in KINDS}


def unpack(data, kind, *, cuts=(), report=None):
    """Return what comes out, and the error that ends it, or None."""
    pieces, error = drain(inflate_stream(cut_at(data, cuts), kind, shard="a.tar.x", report=report))
    assert all(0 < len(piece) <= 256 << 10 for piece in pieces)
    return b"".join(pieces), error


def make_tar(name, payload=b"x"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        member = tarfile.TarInfo(name)
        member.size = len(payload)
        tar.addfile(member, io.BytesIO(payload))
    return file.getvalue()


def test_the_kind_is_told_by_the_first_bytes():
    for kind in KINDS:
        assert detect_compression(PACKED[kind][:HEAD_SIZE]) == kind
        assert detect_compression(pack(b"", kind)) == kind
    assert detect_compression(SKIPPABLE + PACKED["zstd"]) == "zstd"
    assert detect_compression(SKIPPABLE * 3 + PACKED["lz4"]) == "lz4"
    assert detect_compression(b"\x50\x2a\x4d\x18" + (9999).to_bytes(4, "little") + bytes(300)) == "zstd"
    for head in (b"", b"\0" * 512, make_tar("a.jpg")[:512], b"BZh9 is no magic", b"<html>", b"\x1f\x8b"):
        assert detect_compression(head) is None


def test_a_tar_whose_first_name_looks_like_a_compressed_file_is_a_tar():
    for magic in (b"BZh91AY&SY", b"(\xb5/\xfd", b"\xfd7zXZ\0", b"\x1f\x8b\x08"):
        tar = make_tar((magic.rstrip(b"\0") + b".jpg").decode("utf-8", "surrogateescape"))
        assert tar.startswith(magic.rstrip(b"\0"))
        assert detect_compression(tar[:512]) is None
        assert b"".join(inflate_shard([tar])) == tar


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_compressed_comes_out_again_however_it_is_cut(kind):
    data = PACKED[kind]
    for step in (1, 2, 3, 7, 100, len(data)):
        assert unpack(data, kind, cuts=range(step, len(data), step)) == (PLAIN, None)
    assert unpack(pack(b"", kind), kind) == (b"", None)


@pytest.mark.parametrize("kind", KINDS)
def test_all_streams_that_stand_one_behind_the_other_are_read(kind):
    data = PACKED[kind]
    empty = pack(b"", kind)
    whole = data + empty + data + data
    for step in (1, 5, len(whole)):
        assert unpack(whole, kind, cuts=range(step, len(whole), step)) == (PLAIN * 3, None)


@pytest.mark.parametrize("kind", ["zstd", "lz4"])
def test_skippable_frames_are_passed_over(kind):
    data = SKIPPABLE + PACKED[kind] + SKIPPABLE + SKIPPABLE + PACKED[kind] + SKIPPABLE
    for step in (1, 6, len(data)):
        assert unpack(data, kind, cuts=range(step, len(data), step)) == (PLAIN * 2, None)
    found, error = unpack(data[:-1], kind)
    assert (found, error.code, type(error)) == (PLAIN * 2, "truncated_compression", TruncatedError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_anywhere_gives_what_is_there_and_an_error(kind):
    data = PACKED[kind]
    for size in range(len(data)):
        output, error = unpack(data[:size], kind)
        assert PLAIN.startswith(output)
        if size:
            assert isinstance(error, FormatError)
            assert error.offset <= size
            assert error.code in {"truncated_compression", "trailing_garbage"}
        both, error = unpack(data + data[:size], kind)
        if kind in {"zstd", "lz4"}:  # the last bytes before damage may be missing
            assert (PLAIN * 2).startswith(both)
        else:
            assert both == PLAIN + (output if size else b"")
        assert isinstance(error, FormatError) == bool(size)
    assert unpack(data[:-1], kind)[1].code == "truncated_compression"
    assert type(unpack(data[:-1], kind)[1]) is TruncatedError


@pytest.mark.parametrize("kind", KINDS)
def test_zero_bytes_behind_the_end_are_counted(kind):
    report = Report()
    data = PACKED[kind]
    assert unpack(data + bytes(700), kind, report=report) == (PLAIN, None)
    assert report.counts == {"compression_padding": 1}
    assert report.places("compression_padding")[0].offset == len(data)
    assert unpack(data + bytes(64) + data, kind, cuts=[len(data) + 3], report=Report()) == (PLAIN * 2, None)


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_behind_the_end_is_an_error_behind_all_that_came_before(kind):
    data = PACKED[kind]
    for garbage in (b"x", b"xyz", b"garbage of some length", b"\0\0x", b"\0" * 600 + b"word"):
        output, error = unpack(data + garbage, kind)
        assert (output, error.code, type(error)) == (PLAIN, "trailing_garbage", FormatError)
        assert error.offset == len(data) + len(garbage) - len(garbage.lstrip(b"\0"))
        assert error.shard == "a.tar.x"


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_is_an_error_or_changes_nothing(kind):
    """Nothing but the fields that no reader looks at (times, names, levels) may change without an error."""
    data = PACKED[kind]
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[at] ^= flip
            output, error = unpack(bytes(changed), kind)
            assert output == PLAIN or isinstance(error, FormatError)
            if error is not None:
                assert 0 <= error.offset <= len(data)


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_give_their_bytes_or_an_error(kind, fuzz_count):
    draw = random.Random(11)
    for _ in range(fuzz_count // 10):
        changed = mutate(draw, PACKED[kind] * draw.choice((1, 2)))
        cuts = sorted(draw.sample(range(len(changed) + 1), min(3, len(changed))))
        output, error = unpack(changed, kind, cuts=cuts, report=Report())
        assert error is not None or output in {b"", PLAIN, PLAIN * 2}
        assert error is None or isinstance(error, ShardsetError)


@given(plain=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 4000), max_size=5), kind=st.sampled_from(KINDS))
def test_any_bytes_come_out_as_they_went_in(plain, cuts, kind):
    data = pa.compress(plain, kind, asbytes=True) if kind in {"zstd", "lz4"} else pack(plain, kind)
    cuts = sorted(cut for cut in cuts if cut <= len(data))
    assert unpack(data, kind, cuts=cuts) == (plain, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_comes_out_in_small_pieces(kind):
    size = 24 << 20
    data = pa.compress(bytes(size), kind, asbytes=True) if kind in {"zstd", "lz4"} else pack(bytes(size), kind)
    tracemalloc.start()
    try:
        found = 0
        for piece in inflate_stream([data], kind):
            assert len(piece) <= 256 << 10
            found += len(piece)
        assert found == size
        assert tracemalloc.get_traced_memory()[1] < 12 << 20  # xz's dictionary has 8 MiB
    finally:
        tracemalloc.stop()


def test_a_file_that_asks_for_gigabytes_is_refused():
    # A zstd frame with a window of 2 GiB, and an xz stream whose dictionary has 1.5 GiB.
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + b"\x01\x00\x00"
    output, error = unpack(frame, "zstd")
    assert (output, error.code, type(error)) == (b"", "compression_memory", LimitError)
    data = lzma.compress(b"x" * 100, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 4 << 20}])
    body = bytearray(data[12:24])
    assert body[4] == 20  # the size of the dictionary: 2 << (20 // 2 + 11)
    body[4] = 39
    body[8:12] = zlib.crc32(body[:8]).to_bytes(4, "little")
    output, error = unpack(data[:12] + bytes(body) + data[24:], "xz")
    assert (output, error.code, type(error)) == (b"", "compression_memory", LimitError)


def test_a_wrong_checksum_is_told_as_such():
    changed = bytearray(PACKED["zstd"])
    changed[-1] ^= 1
    output, error = unpack(bytes(changed), "zstd")
    assert type(error) is ChecksumError
    assert error.code == "bad_compression_checksum"
    del output


def test_what_taking_a_piece_raises_passes_as_it_is():
    class MineError(OSError):
        pass

    def pieces(data):
        yield data[: len(data) // 2]
        raise MineError("the wire was cut")

    for kind in KINDS:
        with pytest.raises(MineError):
            list(inflate_stream(pieces(PACKED[kind]), kind))


def test_a_shard_that_is_not_compressed_passes_as_it_is():
    pieces = [b"a", memoryview(b"bcd"), b"", bytes(2000)]
    assert list(inflate_shard(pieces)) == pieces
    assert list(inflate_shard([])) == []
    for kind in KINDS:
        assert b"".join(inflate_shard(cut_at(PACKED[kind], range(1, 40)))) == PLAIN
    with pytest.raises(ValueError, match="kinds are gzip"):
        inflate_stream([], "zip")


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("gzip", "gzip -1"),
        ("gzip", "gzip -9 --rsyncable"),
        ("bzip2", "bzip2 -1"),
        ("xz", "xz -0 --check=sha256 --block-size=50000"),
        ("xz", "xz -3 --check=none"),
        ("xz", "xz -1 --check=crc32 -T2"),
        ("zstd", "zstd -1 --no-check"),
        ("zstd", "zstd -19 --check"),
        ("zstd", "zstd --long=27 --rsyncable"),
        ("zstd", "zstd --fast=5 --content-size"),
        ("lz4", "lz4 -1 -B4 -BX --content-size"),
        ("lz4", "lz4 -9 -BD --no-frame-crc"),
    ],
)
def test_what_the_usual_programs_write_is_read(kind, command):
    name, *options = command.split()
    draw = random.Random(2)
    plain = draw.randbytes(200_000) + b"words " * 50_000 + bytes(700_000) + draw.randbytes(10)
    run = subprocess.run([name, "-c", *options], input=plain, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    assert detect_compression(run.stdout[:HEAD_SIZE]) == kind
    assert unpack(run.stdout, kind, cuts=range(9999, len(run.stdout), 9999)) == (plain, None)
