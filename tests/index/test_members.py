from __future__ import annotations

import io
import tarfile
import tempfile
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from conftest import DATA
from formats.tar_builder import Segments, archive, member, sparse_old, sparse_pax_01, sparse_pax_10
from shards import make_members, read_samples, tar_bytes, write_shard
from shardset.errors import (
    ChecksumError,
    CompressedShardError,
    DuplicateFieldError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
)
from shardset.index.members import build_tar_member_index
from shardset.policy import Policy
from shardset.ranges import ByteRange
from shardset.storage import LocalStore, MemoryStore
from storage.counting import CountingStore

MEMBERS = [("d", None), *make_members(4), ("README", b"read me"), ("d/e.tar.gz", b"x" * 700), ("empty.bin", b"")]


@pytest.fixture
def shard(tmp_path):
    return write_shard(tmp_path / "a.tar", MEMBERS)


def values(index):
    return [(m.name, m.kind, m.header_offset, m.offset, m.size, m.sparse) for m in index.members]


def test_members_are_those_of_tarfile_in_archive_order(shard):
    index = build_tar_member_index(shard)
    with tarfile.open(shard) as tar:
        infos = list(tar)
    expected = [(info.name, "file", info.offset, info.offset_data, info.size, None) for info in infos]
    expected[0] = ("d/", "dir", 0, 512, 0, None)  # tarfile takes the slash away that a folder's name ends with
    assert values(index) == expected
    assert len(index) == len(expected)


def test_samples_are_grouped_as_webdataset_groups_them(shard):
    samples = build_tar_member_index(shard).samples()
    expected = read_samples(shard)
    assert [sample.key for sample in samples] == [sample.key for sample in expected]
    for sample, other in zip(samples, expected, strict=True):
        assert [(part.name, part.suffix, part.member.offset) for part in sample.parts] == [
            (part.name, part.suffix, part.offset) for part in other.parts
        ]


def test_byte_ranges_lead_to_the_payloads(shard):
    data = shard.read_bytes()
    index = build_tar_member_index(shard)
    for sample, expected in zip(index.samples(), read_samples(shard), strict=True):
        for part, other in zip(sample.parts, expected.parts, strict=True):
            assert type(part.byte_range()) is ByteRange
            assert data[part.byte_range().offset : part.byte_range().end] == other.payload
    assert index.members[-1].byte_range().length == 0


@pytest.mark.parametrize(
    "source_of",
    [
        str,
        Path,
        lambda path: Path(path).as_uri(),
        lambda path: Path(path).read_bytes(),
        lambda path: bytearray(Path(path).read_bytes()),
        lambda path: memoryview(Path(path).read_bytes()),
        lambda path: io.BytesIO(Path(path).read_bytes()),
    ],
    ids=["text", "path", "url", "bytes", "bytearray", "view", "BytesIO"],
)
def test_every_kind_of_source_gives_the_same(shard, source_of):
    assert values(build_tar_member_index(source_of(shard))) == values(build_tar_member_index(shard))


@pytest.mark.parametrize("buffering", [0, -1])
def test_an_open_file_is_read_from_its_beginning(shard, buffering):
    with shard.open("rb", buffering=buffering) as file:
        file.seek(777)
        assert values(build_tar_member_index(file)) == values(build_tar_member_index(shard))


def test_a_temporary_file_without_a_name_will_do():
    with tempfile.TemporaryFile() as file:
        file.write(tar_bytes(MEMBERS)[: 5 * 512])
        index = build_tar_member_index(file, policy=Policy(on_error="skip"))
        assert [m.name for m in index.members] == ["d/", "00000000.jpg", "00000000.json"]
        with tempfile.SpooledTemporaryFile() as spooled:
            spooled.write(tar_bytes(MEMBERS))
            assert len(build_tar_member_index(spooled)) == len(MEMBERS)


def test_any_store_will_do():
    store = MemoryStore()
    store.write("memory://b/a.tar", tar_bytes(MEMBERS))
    assert len(build_tar_member_index("memory://b/a.tar", store=store)) == len(MEMBERS)


def test_a_file_that_cannot_be_sought_in_is_refused():
    class Pipe(io.RawIOBase):
        def readable(self):
            return True

    with pytest.raises(TypeError, match="sought"):
        build_tar_member_index(Pipe())


def test_payloads_are_not_read(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{n}.bin", bytes(200_000)) for n in range(20)])
    store = CountingStore(LocalStore())
    assert len(build_tar_member_index(path, store=store)) == 20
    assert store.bytes_read < 20 * 4096


def test_a_missing_file_is_a_typed_error(tmp_path):
    with pytest.raises(NotFoundError, match=r"none\.tar"):
        build_tar_member_index(tmp_path / "none.tar")


def test_damage_raises_with_shard_and_offset_or_ends_the_list(tmp_path):
    cut = write_shard(tmp_path / "a.tar", make_members(3))
    cut.write_bytes(cut.read_bytes()[: 4 * 1024 + 513])
    with pytest.raises(TruncatedError) as caught:
        build_tar_member_index(cut)
    assert (caught.value.shard, caught.value.offset) == (str(cut), 4 * 1024)
    index = build_tar_member_index(cut, policy=Policy(on_error="skip"))
    assert len(index) == 4
    assert index.report.counts == {"truncated_payload": 1}
    assert index.faults[-1].offset == 4 * 1024
    assert [sample.key for sample in index.samples()] == ["00000000", "00000001"]


def test_bytes_that_are_damaged_have_no_shard_in_their_error():
    with pytest.raises(CompressedShardError) as caught:
        build_tar_member_index(b"\x1f\x8b\x08\0" + bytes(600))
    assert caught.value.shard is None
    assert "at byte 0" in str(caught.value)


@pytest.mark.parametrize("junk", [b"", b"x", b"x" * 600, b"PK\x03\x04" + bytes(600)])
def test_what_is_no_tar_is_a_format_error(junk):
    with pytest.raises(FormatError):
        build_tar_member_index(junk)


def test_empty_archives_have_no_members():
    index = build_tar_member_index(bytes(1024))
    assert (len(index), index.members, index.samples()) == (0, (), [])


def test_concatenated_archives_are_read_on_when_asked():
    both = tar_bytes([("a.txt", b"1")]) + tar_bytes([("b.txt", b"2")])
    first = build_tar_member_index(both)
    assert [m.name for m in first.members] == ["a.txt"]
    assert first.report.counts == {"data_after_end": 1}
    assert [m.name for m in build_tar_member_index(both, ignore_zeros=True).members] == ["a.txt", "b.txt"]


def test_members_of_one_name_are_all_listed_and_samples_refuse_them(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("k.jpg", b"1"), ("a.jpg", b"1"), ("a.txt", b"2"), ("a.JPG", b"3")])
    index = build_tar_member_index(path)
    assert [m.name for m in index.members] == ["k.jpg", "a.jpg", "a.txt", "a.JPG"]
    assert index.report.counts == {"duplicate_suffix": 1}
    with pytest.raises(DuplicateFieldError) as caught:
        index.samples()
    error = caught.value
    assert (error.shard, error.key, error.field, error.offsets) == (str(path), "a", "jpg", (1536, 3584))
    assert isinstance(error, ValueError)


def test_names_keep_their_spelling_and_suffixes_are_lower_case():
    index = build_tar_member_index(tar_bytes([("A.B/C.Seg.PNG", b"1"), ("A.B/C.Ünd", b"2"), ("A.B/C.", b"3")]))
    (sample,) = index.samples()
    assert sample.key == "A.B/C"
    assert [part.name for part in sample.parts] == ["A.B/C.Seg.PNG", "A.B/C.Ünd", "A.B/C."]
    assert [part.suffix for part in sample.parts] == ["seg.png", "ünd", ""]


def test_names_that_are_no_utf_8_are_surrogate_escapes():
    index = build_tar_member_index(tar_bytes([("\udcff\udcfe.jpg", b"1")]))
    assert index.members[0].name == "\udcff\udcfe.jpg"
    assert index.samples()[0].key == "\udcff\udcfe"


@pytest.mark.parametrize("make", [sparse_old, sparse_pax_01, sparse_pax_10])
def test_a_sparse_file_has_pieces_and_no_byte_range(make):
    segments = Segments(((1024, b"abc" * 100), (4096, b"tail")), 5000)
    made = archive(member(b"a.txt", b"first"), make(b"a.bin", segments), member(b"b.txt", b"last"))
    index = build_tar_member_index(made.data)
    hole = index.members[1]
    assert (hole.name, hole.kind, hole.offset, hole.size) == ("a.bin", "file", None, 5000)
    whole = bytearray(hole.size)
    for logical, offset, length in hole.sparse:
        whole[logical : logical + length] = made.data[offset : offset + length]
    assert bytes(whole) == segments.payload
    part = index.samples()[0].parts[1]
    assert part.name == "a.bin"
    with pytest.raises(LimitError) as caught:
        part.byte_range()
    assert (caught.value.code, caught.value.member, caught.value.offset) == (
        "sparse_member",
        "a.bin",
        hole.header_offset,
    )


@pytest.mark.parametrize("make", [sparse_old, sparse_pax_01, sparse_pax_10])
def test_files_that_are_all_hole_do_not_mix_up_the_samples(make):
    hole, small = Segments((), 70), Segments(((512, b"x"),), 600)
    made = archive(
        make(b"a.one", small),
        make(b"a.two", hole),
        member(b"README", b"of no sample"),
        make(b"b.one", hole),
        make(b"b.two", hole),
        member(b"b.three", b"3"),
        make(b"NOTES", hole),
    )
    index = build_tar_member_index(made.data)
    assert [(s.key, [part.name for part in s.parts]) for s in index.samples()] == [
        ("a", ["a.one", "a.two"]),
        ("b", ["b.one", "b.two", "b.three"]),
    ]


def test_links_and_devices_are_listed_and_are_in_no_sample(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in [("a.jpg", tarfile.SYMTYPE), ("b.jpg", tarfile.LNKTYPE), ("c.jpg", tarfile.FIFOTYPE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "d.jpg"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("d.jpg"))
    index = build_tar_member_index(tmp_path / "a.tar")
    assert [m.kind for m in index.members] == ["symlink", "hardlink", "fifo", "file"]
    assert [s.key for s in index.samples()] == ["d"]


def test_members_are_values():
    one, two = (build_tar_member_index(tar_bytes(MEMBERS)).members[1] for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    with pytest.raises(FrozenInstanceError):
        one.size = 5


def test_the_index_says_how_much_it_holds():
    assert repr(build_tar_member_index(tar_bytes(MEMBERS))) == f"TarMemberIndex({len(MEMBERS)} members, 6 samples)"


def test_a_wrong_checksum_is_told_with_both_numbers():
    data = bytearray((DATA / "tar" / "checksum_bad_middle.tar").read_bytes())
    stored = int(data[1024 + 148 : 1024 + 154], 8)
    with pytest.raises(ChecksumError) as caught:
        build_tar_member_index(bytes(data))
    assert caught.value.expected == stored
    assert caught.value.actual == sum(data[1024:1536]) - sum(data[1024 + 148 : 1024 + 156]) + 8 * 32
    assert caught.value.offset == 1024


def test_a_reserved_suffix_is_refused_when_samples_are_asked_for():
    index = build_tar_member_index(tar_bytes([("a.__key__", b"1"), ("a.jpg", b"2")]))
    with pytest.raises(DuplicateFieldError, match="__key__"):
        index.samples()
