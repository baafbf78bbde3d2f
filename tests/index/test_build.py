from __future__ import annotations

import io
import json

import numpy as np
import pytest

from shards import make_members, read_members, read_samples, tar_bytes, write_shard
from shardset.errors import ChecksumError, CompressedShardError, FormatError, StorageError, TruncatedError
from shardset.index import build as build_module
from shardset.index.build import MAX_SIDECAR, build_index, fits_headers
from shardset.index.sidecar import dump_sidecar
from shardset.policy import Policy, Report
from shardset.storage import LocalStore, MemoryStore
from shardset.storage.planner import ReadLimits
from shardset.storage.remote import RemoteReader
from shardset.storage.store import ObjectInfo
from storage.counting import CountingStore

URL = "memory://shards/a.tar"
CUT = 6 * 1024 + 512 + 5
"""Inside the payload of the seventh member, where each takes a header and one block."""


def reader_of(data):
    store = MemoryStore()
    store.write(URL, data)
    return store.open(URL)


class Remote:
    """Bytes that are read as those of a remote shard; `reads` holds each (offset, length)."""

    def __init__(self, data):
        self.data = data
        self.reads = []
        self.reader = RemoteReader(ObjectInfo("remote://a.tar", len(data), "1"), self.fetch, ReadLimits())

    def fetch(self, offset, view):
        assert 0 <= offset < offset + len(view) <= len(self.data)
        self.reads.append((offset, len(view)))
        view[:] = self.data[offset : offset + len(view)]

    @property
    def share(self):
        return sum(length for _, length in self.reads) / len(self.data)


def build(members, **options):
    return build_index(reader_of(tar_bytes(members)), **options)


def by_name(index, values):
    return {index.names.text(row): value for row, value in values.items()}


def rows(index):
    return list(zip(index.names.to_text_list(), index.offset.tolist(), index.length.tolist(), strict=True))


def picture(width, height, *, orientation=1, kind="JPEG"):
    from PIL import Image

    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height), (200, 30, 40)).save(buffer, kind, exif=exif)
    return buffer.getvalue()


@pytest.fixture(params=["mapped", "by ranges", "in memory", "remote"])
def open_shard(request, tmp_path):
    """A function that opens the bytes of a shard in each of the ways that stores have."""

    def open_shard(data):
        if request.param == "in memory":
            return reader_of(data)
        if request.param == "remote":
            return Remote(data).reader
        path = tmp_path / "a.tar"
        path.write_bytes(data)
        return LocalStore(mmap=request.param == "mapped").open(str(path))

    return open_shard


@pytest.mark.parametrize("pax", [False, True])
def test_an_index_says_of_every_file_what_tarfile_says(open_shard, tmp_path, pax):
    members = [*make_members(50), ("README", b"read me"), ("folder", None), *make_members(3, prefix="deep/er/")]
    path = write_shard(tmp_path / "b.tar", members, pax=pax)
    index = build_index(open_shard(path.read_bytes()))
    samples = read_samples(path)
    assert index.keys().to_text_list() == [sample.key for sample in samples]
    assert rows(index)[:-1] == [(part.name, part.offset, len(part.payload)) for s in samples for part in s.parts]
    assert rows(index)[-1][0] == "README"
    assert index.num_files == len(read_members(path))
    assert np.diff(index.sample_rows).tolist() == [len(sample.parts) for sample in samples]
    assert index.size == path.stat().st_size
    assert index.is_verified


def test_payloads_of_large_members_are_not_read(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{number}.bin", bytes(100_000)) for number in range(40)])
    store = CountingStore(LocalStore())
    index = build_index(store.open(str(path)))
    assert index.num_samples == 40
    assert store.bytes_read < 40 * 4096


def test_faults_raise_the_typed_error_with_shard_and_offset(open_shard):
    data = tar_bytes(make_members(6))
    reader = open_shard(data[:CUT])
    with pytest.raises(TruncatedError) as caught:
        build_index(reader)
    assert caught.value.shard == reader.url
    assert caught.value.offset == 6 * 1024
    assert caught.value.member == "00000002.jpg"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "kind", "code"),
    [
        (b"", FormatError, "empty_file"),
        (b"\x1f\x8b\x08\0" + bytes(2000), CompressedShardError, "compressed"),
        (b"<!DOCTYPE html><html>" + b" " * 600, FormatError, "not_tar"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", FormatError, "not_tar"),
        (bytes(range(256)) * 8, FormatError, "not_tar"),
    ],
)
def test_what_is_no_tar_is_refused_by_its_kind(open_shard, data, kind, code):
    with pytest.raises(kind) as caught:
        build_index(open_shard(data))
    assert caught.value.code == code
    assert caught.value.offset == 0


def test_a_policy_that_skips_gives_what_stands_before_the_damage_and_counts_it():
    data = bytearray(tar_bytes(make_members(6)))
    data[512 * 2 * 9 + 20] ^= 1  # in the tenth header
    with pytest.raises(ChecksumError):
        build_index(reader_of(bytes(data)))
    report = Report()
    index = build_index(reader_of(bytes(data)), policy=Policy(on_error="skip"), report=report)
    assert index.num_samples == 3
    assert report.counts == {"bad_checksum": 1}
    place = report.places("bad_checksum")[0]
    assert (place.shard, place.offset) == (URL, 512 * 2 * 9)
    assert index.faults[-1].code == "bad_checksum"


def test_a_policy_for_one_code_leaves_the_others_alone():
    data = tar_bytes(make_members(6))[:CUT]
    policy = Policy(codes={"truncated_payload": "skip", "truncated_header": "skip"})
    assert build_index(reader_of(data), policy=policy).num_samples > 0
    with pytest.raises(FormatError):
        build_index(reader_of(b"no tar at all" * 100), policy=policy)


def test_oddities_are_counted_and_raise_only_where_their_code_says_so():
    members = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3"), ("c.txt", b"4"), ("c.TXT", b"5")]
    report = Report()
    index = build(members, report=report)
    assert report.counts == {"repeated_key": 1, "duplicate_suffix": 1}
    assert index.keys().to_text_list() == ["a", "b", "a", "c"]
    with pytest.raises(FormatError) as caught:
        build(members, policy=Policy(codes={"repeated_key": "raise"}))
    assert caught.value.code == "repeated_key"
    assert caught.value.member == "a.txt"


def test_nothing_but_headers_is_looked_at_unless_asked():
    index = build([("a.jpg", picture(3, 2)), ("a.json", b'{"caption": "c"}')])
    assert index.geometry is None
    assert index.captions == {}
    assert index.extra == {}


def test_captions_come_from_the_members_beside_a_payload():
    members = [
        ("0.jpg", b"x"),
        ("0.json", b'{"caption": "from json", "n": 1}'),
        ("1.jpg", b"x"),
        ("1.txt", b" from text \n"),
        ("2.jpg", b"x"),
        ("2.json", b'{"caption": "json first"}'),
        ("2.txt", b"then text"),
        ("3.jpg", b"x"),
        ("3.json", b"17"),
        ("3.txt", b"where json holds none"),
        ("4.jpg", b"x"),
        ("4.txt", "ünï".encode()),
        ("5.jpg", b"x"),
    ]
    index = build(members, captions=True)
    assert by_name(index, index.captions) == {
        "0.jpg": "from json",
        "1.jpg": "from text",
        "2.jpg": "json first",
        "3.jpg": "where json holds none",
        "4.jpg": "ünï",
    }
    assert by_name(index, index.extra) == {
        "0.jpg": {"json_metadata": {"caption": "from json", "n": 1}},
        "2.jpg": {"json_metadata": {"caption": "json first"}},
        "3.jpg": {"json_metadata": 17},
    }


def test_two_payloads_of_one_name_share_their_sidecars():
    index = build([("a.jpg", b"x"), ("a.png", b"y"), ("a.json", b'{"caption": "c"}')], captions=True)
    assert by_name(index, index.captions) == {"a.jpg": "c", "a.png": "c"}


@pytest.mark.parametrize(("sidecar", "payload"), [("txt", b"a caption"), ("json", b'{"caption": "a caption"}')])
def test_a_sidecar_with_the_key_alone_in_its_name_belongs_to_the_first_payload(sidecar, payload):
    index = build([("u.seg.png", b"x"), ("u.jpg.cls", b"y"), (f"u.{sidecar}", payload)], captions=True)
    assert by_name(index, index.captions) == {"u.seg.png": "a caption"}


def test_sidecars_that_cannot_be_understood_are_counted_with_their_place():
    report = Report()
    members = [("0.jpg", b"x"), ("0.json", b'{"a": '), ("1.jpg", b"x"), ("1.txt", b"\xff\xfe")]
    index = build(members, captions=True, report=report)
    assert index.captions == {}
    assert report.counts == {"bad_json_sidecar": 1, "bad_text_sidecar": 1}
    assert [report.places(code)[0].key for code in report.counts] == ["0.json", "1.txt"]
    assert report.places("bad_json_sidecar")[0].offset == 3 * 512


def test_sidecars_above_the_limit_are_counted_and_not_read(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("0.jpg", b"x"), ("0.txt", bytes(MAX_SIDECAR + 1)), ("1.txt", b"y")])
    store, report = CountingStore(LocalStore()), Report()
    index = build_index(store.open(str(path)), captions=True, report=report)
    assert index.captions == {}
    assert report.counts == {"sidecar_too_big": 1}
    assert store.bytes_read < MAX_SIDECAR


def nested(depth):
    return b'{"a":' * depth + b"1" + b"}" * depth


def test_json_is_kept_however_deep_if_it_can_be_written():
    wide = json.dumps({"a": [[number, {}] for number in range(2000)]}).encode()
    index = build([("0.jpg", b"x"), ("0.json", nested(499)), ("1.jpg", b"x"), ("1.json", wide)], captions=True)
    entries = json.loads(dump_sidecar(index, name="a.tar"))["files"]
    assert entries["0.jpg"]["json_metadata"] == json.loads(nested(499))
    assert entries["1.jpg"]["json_metadata"] == json.loads(wide)


@pytest.mark.parametrize("depth", [501, 1000, 1020, 100_000])
def test_json_that_is_nested_too_deep_is_counted_and_does_not_stop_anything(depth):
    report = Report()
    members = [
        ("0.jpg", b"x"),
        ("0.json", nested(depth)),
        ("1.jpg", b"x"),
        ("1.txt", nested(depth)),
        ("2.jpg", b"x"),
        ("2.txt", b"ok"),
    ]
    index = build(members, captions=True, report=report)
    assert report.counts["bad_json_sidecar"] == 1
    assert by_name(index, index.captions)["2.jpg"] == "ok"
    entries = json.loads(dump_sidecar(index, name="a.tar"))["files"]
    assert "json_metadata" not in entries["0.jpg"]
    assert type(entries["1.jpg"].get("captions")) in {str, type(None)}  # what is no JSON any more is a text


def test_geometry_is_that_of_the_first_bytes_as_stored(open_shard):
    members = [
        ("0.jpg", picture(30, 20)),
        ("1.jpg", picture(30, 20, orientation=6)),
        ("2.png", picture(7, 9, kind="PNG")),
        ("3.bin", picture(5, 4, kind="WEBP")),
        ("4.jpg", b"no picture"),
        ("5.txt", b""),
    ]
    index = build_index(open_shard(tar_bytes(members)), geometry=True)
    sizes = [(30, 20), (30, 20), (7, 9), (5, 4), (0, 0), (0, 0)]
    assert list(zip(index.geometry.width.tolist(), index.geometry.height.tolist(), strict=True)) == sizes
    assert index.geometry.orientation.tolist()[1] == 6


def test_geometry_of_large_pictures_needs_their_first_bytes_alone(tmp_path):
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (600, 500, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    path = write_shard(tmp_path / "a.tar", [(f"{number}.png", buffer.getvalue()) for number in range(4)])
    store = CountingStore(LocalStore())
    index = build_index(store.open(str(path)), geometry=True)
    assert index.geometry.width.tolist() == [500] * 4
    assert store.bytes_read < path.stat().st_size / 4


def test_an_index_is_the_same_by_whatever_way_it_is_read(tmp_path):
    data = tar_bytes([*make_members(700), ("big.bin", bytes(300_000)), *make_members(5, prefix="z/")], pax=True)
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    local = LocalStore().open(str(path)), LocalStore(mmap=False).open(str(path))
    readers = [reader_of(data), Remote(data).reader, *local]
    dumps = {dump_sidecar(build_index(reader, captions=True, geometry=True), name="a.tar") for reader in readers}
    assert len(dumps) == 1


def test_a_reader_that_fails_is_not_taken_for_the_end_of_the_shard(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{number}.bin", bytes(50_000)) for number in range(30)])
    reader = LocalStore(mmap=False).open(str(path))
    path.write_bytes(path.read_bytes()[:200_000])
    with pytest.raises(StorageError, match="cut"):
        build_index(reader, policy=Policy(on_error="skip"))


def large_picture(number, *, extra=b""):
    """A JPEG of some 100 KB, with extra segments before its frame and noise behind its scan."""
    payload = picture(40 + number % 50, 30, orientation=1 + number % 8)
    return payload[:2] + extra + payload[2:] + np.random.default_rng(number).bytes(100_000 + 512 * (number % 9))


def large_samples(count, extra=b""):
    return [
        one
        for number in range(count)
        for one in (
            (f"{number:04}.jpg", large_picture(number, extra=extra)),
            (f"{number:04}.json", json.dumps({"caption": f"picture {number}"}).encode()),
        )
    ]


def test_the_index_of_remote_samples_needs_few_of_their_bytes():
    data = tar_bytes(large_samples(120))
    headers, remote = Remote(data), Remote(data)
    index = build_index(headers.reader)
    assert headers.share < 0.045  # of both headers, and the first of each lane
    full = build_index(remote.reader, captions=True, geometry=True)
    mapped = build_index(reader_of(data), captions=True, geometry=True)
    assert dump_sidecar(full, name="a.tar") == dump_sidecar(mapped, name="a.tar")
    assert full.captions == mapped.captions
    assert len(full.captions) == 120
    assert remote.share < headers.share + 0.035
    assert index.digest() == mapped.digest()


def test_headers_of_pictures_behind_long_profiles_are_found_by_reading_on():
    profile = b"\xff\xe2" + (30_002).to_bytes(2, "big") + bytes(30_000)
    for extra in (profile, profile * 3):
        data = tar_bytes([(f"{number}.jpg", large_picture(number, extra=extra)) for number in range(30)])
        remote = Remote(data)
        index = build_index(remote.reader, geometry=True)
        mapped = build_index(reader_of(data), geometry=True)
        for name in ("width", "height", "orientation"):
            assert getattr(index.geometry, name).tolist() == getattr(mapped.geometry, name).tolist()
        assert index.geometry.width.tolist() == [40 + number for number in range(30)]
        assert remote.share < 0.3 + len(extra) / 100_000


def test_a_picture_that_asks_for_ever_more_is_read_in_few_rounds():
    hostile = b"\xff\xd8" + b"\xff\xe0\0\x02" * 100_000
    remote = Remote(tar_bytes([("a.jpg", hostile)] * 3 + [("big.bin", bytes(3_000_000))]))
    before = len(remote.reads)
    index = build_index(remote.reader, geometry=True)
    assert index.geometry.width.tolist() == [0, 0, 0, 0]
    assert len(remote.reads) - before < 60


def test_sidecars_are_read_in_batches_of_bounded_size(monkeypatch):
    monkeypatch.setattr(build_module, "_BYTES_AT_ONCE", 10_000)
    members = []
    for number in range(40):
        text = json.dumps({"caption": "c" * (number * 500)}).encode()
        members += [(f"{number:02}.jpg", b"x"), (f"{number:02}.{('json', 'txt')[number % 2]}", text)]
    data = tar_bytes(members)
    asked = []
    reader = reader_of(data)
    read_many = type(reader).read_many

    def counting(self, offsets, lengths):
        asked.append(int(np.sum(lengths)))
        return read_many(self, offsets, lengths)

    monkeypatch.setattr(type(reader), "read_many", counting)
    index = build_index(reader, captions=True)
    assert len(index.captions) == 39  # the first caption is empty
    assert max(asked) < 10_000 + 20_000
    assert len(asked) > 20


def test_a_shard_is_compared_with_its_index_in_one_call():
    data = tar_bytes([(f"{number}.bin", bytes(200_000)) for number in range(40)])
    index = build_index(reader_of(data))
    remote = Remote(data)
    assert fits_headers(index, remote.reader)
    assert len(remote.reads) == 9
    assert sum(length for _, length in remote.reads) == 9 * 512
    grown = tar_bytes([(f"{number}.bin", bytes(200_000)) for number in range(41)])
    assert not fits_headers(index, Remote(grown).reader)
    renamed = tar_bytes([(f"{number}.BIN", bytes(200_000)) for number in range(40)])
    assert not fits_headers(index, Remote(renamed).reader)
