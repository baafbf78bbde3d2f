"""Telling compressed files by content, and inflating them with every byte that they hold, whatever is damaged."""

from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.record_reference import cut_at, drain, mutate, place
from shardset.errors import ChecksumError, FormatError, TruncatedError
from shardset.formats.compression import detect, inflate
from shardset.policy import Report
from tfrecords import FOREIGN, frame, make_payloads, masked_crc, record_bytes

PLAIN = record_bytes(make_payloads(400, seed=3))
GZIP = gzip.compress(PLAIN, mtime=0)
ZLIB = zlib.compress(PLAIN)
KINDS = {"gzip": GZIP, "zlib": ZLIB}


def unpack(data, kind, *, cuts=(), report=None):
    """Return what comes out, and the error that ends it, or None."""
    pieces, error = drain(inflate(cut_at(data, cuts), kind, shard="a.gz", report=report))
    assert all(0 < len(piece) <= 256 << 10 for piece in pieces)
    return b"".join(pieces), error


def test_the_kind_of_a_file_is_told_by_its_first_bytes():
    for head, kind, words in (
        (b"", "", "empty"),
        (PLAIN[:512], "", "TFRecord"),
        (b"\0" * 5, "", "5 bytes"),
        (GZIP[:512], "gzip", "gzip"),
        (gzip.compress(b""), "gzip", "gzip"),
        (ZLIB[:512], "zlib", "zlib"),
        *((zlib.compress(PLAIN, level)[:512], "zlib", "zlib") for level in range(10)),
        (b"\0" * 512, None, "no header"),
        (b"\x28\xb5\x2f\xfd" + bytes(500), None, "zstd"),
        (b"PAR1" + bytes(500), None, "Parquet"),
        (b"some words of text\n" * 20, None, "text"),
        (b"x" + bytes(256) + b"ustar\x0000" + bytes(200), None, "tar"),
    ):
        found = detect(head)
        assert found.kind == kind
        assert words in found.what


@pytest.mark.parametrize(
    "magic", [b"\x1f\x8b\x08", b"\x78\x9c", b"\x78\x01", b"\x78\xda", b"PK\x03\x04", b"PAR1", b"{"]
)
def test_a_record_whose_length_looks_like_another_kind_of_file_is_a_record(magic):
    length = magic.ljust(8, b"\0")
    head = length + struct.pack("<I", masked_crc(length)) + b"rest of it"
    assert detect(head).kind == ""


@pytest.mark.parametrize("magic", [b"\x78\x9c", b"\x78\x01", b"\x78\xda"])
def test_a_damaged_record_whose_length_looks_like_zlib_is_not_inflated(magic):
    assert detect(magic.ljust(8, b"\0") + b"crc?" + bytes(100)).kind is None


@pytest.mark.parametrize("kind", KINDS)
def test_everything_comes_out(kind):
    assert unpack(KINDS[kind], kind) == (PLAIN, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_no_bytes_gives_none(kind):
    assert unpack(b"", kind) == (b"", None)


@pytest.mark.parametrize("kind", KINDS)
def test_all_members_and_all_streams_are_read_one_behind_the_other(kind):
    assert unpack(KINDS[kind] * 3, kind) == (PLAIN * 3, None)
    for cut in range(len(KINDS[kind]) - 2, len(KINDS[kind]) + 12):
        assert unpack(KINDS[kind] * 2, kind, cuts=[cut]) == (PLAIN * 2, None)


@given(st.data())
def test_compressed_bytes_may_arrive_in_any_pieces(data):
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    whole = KINDS[kind] * data.draw(st.integers(1, 2))
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=10))
    assert unpack(whole, kind, cuts=cuts)[1] is None


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_bytes_may_arrive_one_by_one(kind):
    small = zlib.compress(b"abc" * 9) if kind == "zlib" else gzip.compress(b"abc" * 9)
    assert unpack(small * 2, kind, cuts=range(2 * len(small))) == (b"abc" * 18, None)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_bytes_behind_the_end_are_passed_over_and_counted(kind):
    report = Report()
    data = KINDS[kind] + bytes(1000)
    assert unpack(data, kind, cuts=[len(data) - 700], report=report) == (PLAIN, None)
    assert report.counts == {"compression_padding": 1}
    assert report.places("compression_padding")[0].offset == len(KINDS[kind])
    assert "1000 zero bytes" in report.places("compression_padding")[0].message


def test_zero_bytes_behind_the_end_are_logged_without_a_report(caplog):
    assert unpack(GZIP + bytes(7), "gzip") == (PLAIN, None)
    assert "7 zero bytes lie behind the gzip data" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "garbage", [b"x", b"ab", b"abc", b"\0\0abcdef", b"\x1f\x8b", b"\x1f", b"\0\x78", bytes(range(1, 200))]
)
def test_anything_else_behind_the_end_is_an_error_after_all_data(kind, garbage):
    data = KINDS[kind] + garbage
    for cuts in ((), (len(KINDS[kind]),), (len(data) - 1,)):
        output, error = unpack(data, kind, cuts=cuts)
        at = len(KINDS[kind]) + len(garbage) - len(garbage.lstrip(b"\0"))
        assert (output, place(error), type(error)) == (PLAIN, ("trailing_garbage", at), FormatError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_short_is_an_error_wherever_it_is_cut(kind):
    data = KINDS[kind]
    for size in [*range(1, 30), *range(len(data) - 30, len(data))]:
        output, error = unpack(data[:size], kind)
        assert PLAIN.startswith(output)
        assert (place(error), type(error)) == (("truncated_compression", size), TruncatedError)
    trailer = {"gzip": 8, "zlib": 4}[kind]
    assert unpack(data[:-trailer], kind)[0] == PLAIN
    assert unpack(data + data[:100], kind)[0].startswith(PLAIN)
    assert place(unpack(data + data[:100], kind)[1]) == ("truncated_compression", len(data) + 100)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_checksum_is_an_error_after_all_data(kind):
    at = len(KINDS[kind]) - {"gzip": 8, "zlib": 4}[kind]
    data = bytearray(KINDS[kind])
    data[at] ^= 1
    output, error = unpack(bytes(data), kind)
    assert (output, error.code, type(error)) == (PLAIN, "bad_compression_checksum", ChecksumError)
    assert at <= error.offset < len(data)


def test_a_wrong_length_of_a_gzip_file_is_an_error_after_all_data():
    output, error = unpack(GZIP[:-1] + b"\x01", "gzip")
    assert (output, error.code) == (PLAIN, "bad_compression_checksum")


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_stands_before_damage_comes_out(kind):
    """Stored blocks show how much that is: their bytes stand in the file as they are."""
    plain = random.Random(4).randbytes(200_000)
    data = zlib.compress(plain, 0) if kind == "zlib" else gzip.compress(plain, 0)
    first = {"gzip": 10, "zlib": 2}[kind]
    length = int.from_bytes(data[first + 1 : first + 3], "little")
    block = first + 5 + length  # the header of the second block
    damaged = data[: block + 1] + b"\xff\xff\xff\xff" + data[block + 5 :]
    for cuts in ((), (block,), (block + 3,), (1000,)):
        output, error = unpack(damaged, kind, cuts=cuts)
        assert output == plain[:length]
        assert error.code == "bad_compression"
        assert block < error.offset <= block + 5


def test_all_that_a_damaged_byte_gives_before_its_error_comes_out():
    """The error lies in the last bits of a byte whose first bits are a code for 258 bytes."""
    plain = b"a" * 5000
    data = zlib.compress(plain)
    for at in range(2, len(data) - 4):
        for bit in range(8):
            damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            output, error = unpack(damaged, "zlib")
            slow = b""
            inflater = zlib.decompressobj()
            try:
                for byte in damaged:
                    left = bytes([byte])
                    while left or slow[-1:]:
                        more = inflater.decompress(left, 1)
                        slow += more
                        left = inflater.unconsumed_tail
                        if not more and not left:
                            break
            except zlib.error:
                assert error is not None
            assert output == slow


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_another_kind_are_refused(kind):
    other = "zlib" if kind == "gzip" else "gzip"
    for data in (KINDS[other], PLAIN, b"some text"):
        output, error = unpack(data, kind)
        assert (output, error.code, type(error)) == (b"", "bad_compression", FormatError)
        assert f"this is no {kind} data" in str(error)


def test_a_few_bytes_that_inflate_to_very_many_take_little_memory():
    bomb = gzip.compress(bytes(100_000_000), 9)
    assert len(bomb) < 110_000
    tracemalloc.start()
    total = sum(map(len, inflate([bomb], "gzip")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 100_000_000
    assert peak < 2_000_000


def test_what_the_source_raises_passes():
    def pieces():
        yield GZIP[:100]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        list(inflate(pieces(), "gzip"))


@pytest.mark.parametrize("name", sorted(path.name for path in FOREIGN.glob("*.gz")))
def test_gzip_files_of_other_projects_inflate_as_python_inflates_them(name):
    data = (FOREIGN / name).read_bytes()
    assert detect(data[:512]).kind == "gzip"
    assert unpack(data, "gzip") == (gzip.decompress(data), None)


def test_mutated_files_give_a_beginning_and_an_error_or_all(fuzz_count):
    rng = random.Random(13)
    for _ in range(fuzz_count // 4):
        kind = rng.choice(sorted(KINDS))
        payloads = make_payloads(rng.randrange(1, 20), seed=rng.randrange(1000))
        plain = record_bytes(payloads)
        whole = zlib.compress(plain) if kind == "zlib" else gzip.compress(plain)
        data = mutate(rng, whole)
        cuts = [rng.randrange(len(data) + 1) for _ in range(rng.randrange(4))]
        output, error = unpack(data, kind, cuts=cuts)
        assert unpack(data, kind) == (output, error) or place(unpack(data, kind)[1]) == place(error)
        assert error is None or isinstance(error, FormatError)
        if error is None and output != plain:
            assert (
                data == b""
                or zlib.decompress(data.rstrip(b"\0"), 31 if kind == "gzip" else 15) == output
                or len(output) > len(plain)
            )


def test_a_frame_of_one_record_inflates_to_itself():
    assert unpack(gzip.compress(frame(b"")), "gzip") == (frame(b""), None)
