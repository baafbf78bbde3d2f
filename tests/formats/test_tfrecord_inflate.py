from __future__ import annotations

import gzip
import random
import zlib

import pytest

from formats.record_reference import mutate
from shardset.formats.tfrecord_inflate import StreamFault, iter_inflated

RNG = random.Random(1)
PARTS = [bytes(RNG.choice(b"abcdefgh\n") for _ in range(20_000)) for _ in range(5)]
MEMBERS = [gzip.compress(part, mtime=0) for part in PARTS]
WHOLE = b"".join(PARTS)
FILE = b"".join(MEMBERS)


def inflated(data, kind="gzip"):
    def read(offset, length):
        assert 0 <= offset <= offset + length <= len(data)
        return data[offset : offset + length]

    found = list(iter_inflated(read, len(data), kind))
    faults = [one for one in found if isinstance(one, StreamFault)]
    return b"".join(one for one in found if not isinstance(one, StreamFault)), faults


def codes(faults):
    return [fault.code for fault in faults]


def flushed(flush):
    """Return the parts as one stream, in which the writer has flushed behind each."""
    deflater = zlib.compressobj(6)
    pieces = [deflater.compress(part) + deflater.flush(flush) for part in PARTS]
    return pieces, b"".join(pieces) + deflater.flush()


def test_whole_files_are_decompressed_all_members_of_them():
    assert inflated(FILE) == (WHOLE, [])
    assert inflated(zlib.compress(WHOLE), "zlib") == (WHOLE, [])
    assert inflated(gzip.compress(b"")) == (b"", [])


def test_what_compresses_well_comes_in_pieces():
    data = gzip.compress(bytes(50 << 20))
    pieces = list(iter_inflated(lambda offset, length: data[offset : offset + length], len(data), "gzip"))
    assert sum(map(len, pieces)) == 50 << 20
    assert max(map(len, pieces)) <= 4 << 20


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 20, 5000])
def test_what_a_file_that_was_cut_holds_comes_out(cut):
    data, faults = inflated(FILE[:-cut])
    assert codes(faults) == ["truncated_compression"]
    assert faults[0].offset == len(FILE) - len(MEMBERS[-1])
    assert WHOLE.startswith(data)
    assert faults[0].at == len(data)
    if cut <= 8:
        assert data == WHOLE
    assert len(data) > len(WHOLE) - 3 * cut - 100


@pytest.mark.parametrize("back", range(1, 9))
@pytest.mark.parametrize("number", [0, 4])
def test_a_wrong_checksum_or_size_in_a_trailer_loses_nothing(back, number):
    end = sum(map(len, MEMBERS[: number + 1]))
    data = FILE[: end - back] + bytes([FILE[end - back] ^ 1]) + FILE[end - back + 1 :]
    content, faults = inflated(data)
    assert content == WHOLE
    assert codes(faults) == ["bad_compression_checksum"]


def test_behind_a_damaged_member_the_next_one_is_read():
    start = len(MEMBERS[0])
    for at in range(start + 100, start + len(MEMBERS[1]) - 200, 731):
        data = FILE[:at] + b"\xff" * 40 + FILE[at + 40 :]
        content, faults = inflated(data)
        assert content.startswith(PARTS[0])
        assert content.endswith(b"".join(PARTS[2:]))
        assert faults
        lost = FILE[: at - 50] + FILE[at + 900 :]
        content, faults = inflated(lost)
        assert content.startswith(PARTS[0])
        assert content.endswith(b"".join(PARTS[3:]))
        assert faults


@pytest.mark.parametrize("kind", ["gzip", "zlib"])
def test_reading_goes_on_from_where_everything_was_flushed(kind):
    pieces, stream = flushed(zlib.Z_FULL_FLUSH)
    if kind == "gzip":
        stream = gzip.compress(b"")[:10] + stream[2:-4] + bytes(8)
    at = stream.index(pieces[1])  # the type of a block, and there is none that is all ones
    data = stream[:at] + b"\xff" * 200 + stream[at + 200 :]
    content, faults = inflated(data, kind)
    assert content.startswith(PARTS[0])
    assert content.endswith(b"".join(PARTS[2:]))
    assert faults[0].code == "bad_compression"


def test_behind_a_point_that_was_not_flushed_fully_nothing_is_made_up():
    pieces, stream = flushed(zlib.Z_SYNC_FLUSH)
    at = len(pieces[0])
    content, faults = inflated(stream[:at] + b"\xff" * 200 + stream[at + 200 :], "zlib")
    assert content.startswith(PARTS[0])
    assert "bad_compression" in codes(faults)


def test_padding_and_garbage_behind_the_data_are_told_apart():
    assert codes(inflated(FILE + bytes(512))[1]) == ["compression_padding"]
    content, faults = inflated(FILE + b"garbage" * 9)
    assert (content, codes(faults)) == (WHOLE, ["compression_garbage"])
    assert (faults[0].offset, faults[0].length) == (len(FILE), 63)
    content, faults = inflated(FILE + bytes(100) + b"garbage" + FILE)
    assert (content, codes(faults)) == (WHOLE * 2, ["compression_padding", "compression_garbage"])


def test_zlib_streams_that_were_joined_are_all_read_and_told():
    content, faults = inflated(zlib.compress(PARTS[0]) + zlib.compress(PARTS[1]), "zlib")
    assert content == PARTS[0] + PARTS[1]
    assert codes(faults) == ["joined_streams"]


def test_any_damage_is_told_and_comes_to_an_end(fuzz_count):
    small = b"".join(gzip.compress(part[:300], mtime=0) for part in PARTS)
    expected = b"".join(part[:300] for part in PARTS)
    for seed in range(fuzz_count):
        rng = random.Random(seed)
        data = mutate(rng, small)
        content, faults = inflated(data)
        assert faults or content == expected or len(data) < len(small)


def test_thousands_of_members_that_break_off_come_to_an_end():
    fake = b"\x1f\x8b\x08\0\0\0\0\0\0\3" + b"\1\4\0\xfb\xffabcd"  # a stored block, and then none
    data = gzip.compress(b"x")[:-8] + fake * 3000
    _, faults = inflated(data)
    assert faults


def test_a_member_that_was_swallowed_by_a_block_before_it_is_found_again():
    first, second = (gzip.compress(random.Random(n).randbytes(30_000), mtime=0) for n in (1, 2))
    # Noise is not compressed, so what is left of the first one takes some of the second for its own.
    content, faults = inflated(first[:-2000] + second)
    assert codes(faults)[0] == "bad_compression_checksum"
    assert content.endswith(gzip.decompress(second))
    content, faults = inflated(first[:-20_000] + second[:15_000])
    assert codes(faults)[-1] == "truncated_compression"
    assert gzip.decompress(second)[:14_900] in content
