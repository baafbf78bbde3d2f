from __future__ import annotations

import io
import pickle
import random
from collections.abc import Mapping

import pytest

from formats.tar_builder import Segments, archive, member, sparse_old, sparse_pax_00, sparse_pax_01, sparse_pax_10
from shards import make_members, private_cache, read_samples, write_dataset, write_shard  # noqa: F401 - one is autouse
from shardset.dataset.opening import discover_dataset
from shardset.errors import DuplicateFieldError, LimitError, MissingFieldError
from shardset.ranges import ByteRange
from shardset.storage import LocalStore, MemoryStore
from shardset.tasks import index_dataset

SEGMENTS = Segments(((1024, b"abc" * 200), (4096, b"tail")), 5000)


@pytest.fixture(params=["mapped", "by ranges", "in memory"])
def discover(request, tmp_path):
    """A function that makes a dataset of one shard of members, or of the bytes of one, in each way that stores have."""

    def discover(content):
        path = tmp_path / "a.tar"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_shard(path, content)
        if request.param == "in memory":
            store = MemoryStore()
            store.write("memory://b/a.tar", path.read_bytes())
            return discover_dataset("memory://b/a.tar", store=store)
        return discover_dataset(path, store=LocalStore(mmap=request.param == "mapped"))

    return discover


def test_a_sample_knows_its_key_fields_shard_and_places(discover, tmp_path):
    dataset = discover(make_members(5))
    for number, (sample, expected) in enumerate(zip(dataset, read_samples(tmp_path / "a.tar"), strict=True)):
        assert sample.key == expected.key
        assert sample.fields == tuple(part.suffix for part in expected.parts)
        assert sample.names == tuple(part.name for part in expected.parts)
        assert sample.sizes == tuple(len(part.payload) for part in expected.parts)
        assert sample.shard == dataset.shard_url(0)
        assert (sample.sample_index, sample.shard_index) == (number, 0)
        for part in expected.parts:
            assert sample.byte_range(part.suffix) == ByteRange(part.offset, len(part.payload))


def test_a_payload_is_the_same_as_bytes_as_view_and_as_file(discover, tmp_path):
    dataset = discover([*make_members(5), ("empty.bin", b""), ("big.bin", random.Random(1).randbytes(300_000))])
    for sample, expected in zip(dataset, read_samples(tmp_path / "a.tar"), strict=True):
        for field, payload in expected.fields.items():
            assert type(sample[field]) is bytes
            assert sample[field] == payload
            view = sample.view(field)
            assert view.readonly
            assert (view.ndim, view.itemsize) == (1, 1)
            assert bytes(view) == payload
            with sample.open(field) as file:
                assert file.read() == payload
        assert sample.read() == expected.fields


def test_a_sample_is_a_mapping_of_field_to_bytes(discover):
    sample = discover(make_members(1))[0]
    assert isinstance(sample, Mapping)
    assert list(sample) == ["jpg", "json", "txt"]
    assert len(sample) == 3
    assert "jpg" in sample
    assert "png" not in sample
    assert 7 not in sample
    assert sample.get("png") is None
    assert sample.get("png", b"x") == b"x"
    assert dict(sample) == {**sample} == sample.read()
    assert set(sample.keys()) == {"jpg", "json", "txt"}
    assert list(sample.values()) == [sample[field] for field in sample]
    match sample:
        case {"jpg": payload}:
            assert payload == sample["jpg"]
        case _:
            pytest.fail("a mapping pattern matches a mapping")


def test_two_samples_are_equal_if_they_are_the_same_one_of_one_dataset(tmp_path):
    write_dataset(tmp_path)
    one, two = discover_dataset(tmp_path), discover_dataset(tmp_path)
    assert one[3] == one[3]
    assert hash(one[3]) == hash(one[3])
    assert one[3] != one[4]
    assert one[3] != two[3]
    assert one[3] != dict(one[3])
    assert len({one[0], one[0], one[1]}) == 2


def test_a_sample_prints_its_key_and_fields(discover):
    dataset = discover(make_members(1))
    expected = f"Sample('00000000', fields=['jpg', 'json', 'txt'], shard={dataset.shard_url(0)!r})"
    assert repr(dataset[0]) == expected


def test_a_sample_survives_pickling(tmp_path):
    write_dataset(tmp_path)
    sample = discover_dataset(tmp_path)[5]
    copy = pickle.loads(pickle.dumps(sample))
    assert (copy.key, copy.sample_index, copy.shard_index, dict(copy)) == (sample.key, 5, 1, dict(sample))


def test_a_missing_field_is_a_key_error_that_lists_those_that_are_there(discover):
    dataset = discover(make_members(1))
    for ask in (dataset[0].__getitem__, dataset[0].view, dataset[0].open, dataset[0].byte_range):
        with pytest.raises(KeyError) as caught:
            ask("png")
        error = caught.value
        assert type(error) is MissingFieldError
        assert (error.field, error.key, error.shard) == ("png", "00000000", dataset.shard_url(0))
        assert error.hint == "it has 'jpg', 'json', 'txt'"


@pytest.mark.parametrize("again", [["a.JPG"], ["a.jpg"], ["a.JPG", "a.jPg", "a.jpg"]])
def test_a_suffix_that_occurs_twice_raises_when_that_field_is_read_and_names_both_places(discover, again):
    members = [("a.txt", b"0"), ("a.jpg", b"1"), *[(name, b"2") for name in again], ("b.jpg", b"3")]
    dataset = discover(members)
    assert len(dataset) == 2
    sample = dataset[0]
    assert sample["txt"] == b"0"
    assert sample.fields == ("txt", "jpg", *["jpg"] * len(again))
    assert sample.names == ("a.txt", "a.jpg", *again)
    assert list(sample) == ["txt", "jpg"]
    asked = [lambda: sample["jpg"], lambda: sample.view("jpg"), lambda: sample.open("jpg"), sample.read]
    for ask in [*asked, lambda: dict(sample), lambda: sample.byte_range("jpg")]:
        with pytest.raises(DuplicateFieldError) as caught:
            ask()
        error = caught.value
        assert (error.field, error.key, error.offsets) == ("jpg", "a", (1536, 2560))
        assert error.shard == dataset.shard_url(0)
        assert "1536 and 2560" in str(error)
    assert dataset[1]["jpg"] == b"3"


@pytest.mark.parametrize("suffix", ["__key__", "__url__", "__Key__"])
def test_a_reserved_suffix_raises_when_it_is_read(discover, suffix):
    sample = discover([("a.jpg", b"1"), (f"a.{suffix}", b"2")])[0]
    assert sample["jpg"] == b"1"
    with pytest.raises(DuplicateFieldError) as caught:
        sample[suffix.lower()]
    assert caught.value.offsets == (1536,)
    with pytest.raises(DuplicateFieldError):
        sample.read()


def test_fields_are_lower_case_and_names_as_the_archive_spells_them(discover):
    sample = discover([("Dir/A.B.JPG", b"1"), ("Dir/A.b.Seg.PNG", b"2"), ("Dir/A.", b"3"), ("Dir/A.ÄB", b"4")])[0]
    assert sample.key == "Dir/A"
    assert sample.fields == ("b.jpg", "b.seg.png", "", "äb")
    assert sample.names == ("Dir/A.B.JPG", "Dir/A.b.Seg.PNG", "Dir/A.", "Dir/A.ÄB")
    assert [sample[field] for field in sample.fields] == [b"1", b"2", b"3", b"4"]
    with pytest.raises(MissingFieldError):
        sample["B.JPG"]


def test_keys_may_be_unicode_or_no_text_at_all(discover):
    members = [("größe/日本.jpg", b"1"), ("\udcff\udcfe.jpg", b"2"), ("é.\udcfd", b"3"), ("e\u0301.x", b"4")]
    dataset = discover(members)
    assert [sample.key for sample in dataset] == ["größe/日本", "\udcff\udcfe", "é", "e\u0301"]
    assert [next(iter(sample.values())) for sample in dataset] == [b"1", b"2", b"3", b"4"]
    assert dataset[1].names == ("\udcff\udcfe.jpg",)
    assert dataset[2].fields == ("\udcfd",)
    assert dataset.find("\udcff\udcfe") == dataset[1]
    assert dataset.find("é") == dataset[2]  # and not the one that only looks like it


@pytest.mark.parametrize("make", [sparse_old, sparse_pax_00, sparse_pax_01, sparse_pax_10])
def test_a_sparse_file_is_read_with_its_holes(discover, make):
    made = archive(
        member(b"k.txt", b"0"), member(b"a.txt", b"1"), make(b"a.bin", SEGMENTS), make(b"a.hole", Segments((), 70))
    )
    sample = discover(made.data)[1]
    for field, payload in (("txt", b"1"), ("bin", SEGMENTS.payload), ("hole", bytes(70))):
        assert sample[field] == payload
        assert bytes(sample.view(field)) == payload
        assert sample.open(field).read() == payload
    assert sample.sizes == (1, 5000, 70)
    with pytest.raises(LimitError) as caught:
        sample.byte_range("bin")
    assert caught.value.code == "sparse_member"
    assert caught.value.shard == sample.shard


def test_a_sparse_file_of_a_terabyte_is_refused_before_anything_is_allocated(discover):
    sample = discover(archive(sparse_pax_01(b"a.bin", Segments(((0, b"x"),), 1 << 40))).data)[0]
    assert sample.sizes == (1 << 40,)
    with pytest.raises(LimitError, match=str(1 << 40)):
        sample["bin"]


def test_a_file_object_reads_and_seeks_as_files_do(discover):
    payload = random.Random(0).randbytes(70_000)
    sample = discover([("x.txt", b"before"), ("a.bin", payload), ("b.txt", b"behind")])[1]
    file, other = sample.open("bin"), io.BytesIO(payload)
    assert file.readable()
    assert file.seekable()
    assert not file.writable()
    rng = random.Random(7)
    for _ in range(200):
        whence = rng.choice([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END])
        low = {io.SEEK_SET: 0, io.SEEK_CUR: -other.tell(), io.SEEK_END: -70_000}[whence]
        offset = rng.randint(low, low + 80_000)
        assert file.seek(offset, whence) == other.seek(offset, whence)
        assert file.tell() == other.tell()
        count = rng.choice([0, 1, 100, 5000, 100_000])
        assert file.read(count) == other.read(count)


def test_a_file_object_refuses_what_files_refuse(discover):
    file = discover(make_members(1))[0].open("jpg")
    with pytest.raises(ValueError, match="cannot seek"):
        file.raw.seek(-1)
    with pytest.raises(ValueError, match="whence"):
        file.raw.seek(0, 9)
    with pytest.raises(OSError, match="write"):
        file.write(b"x")
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read()


def test_pillow_opens_a_file_object(discover):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (31, 17)).save(buffer, "PNG")
    sample = discover([("a.png", buffer.getvalue())])[0]
    with Image.open(sample.open("png")) as image:
        assert image.size == (31, 17)
        image.load()


def test_what_the_catalog_knows_of_pictures_and_captions(tmp_path):
    from PIL import Image

    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(buffer, "JPEG", exif=exif)
    members = [
        ("a.jpg", buffer.getvalue()),
        ("a.txt", b"a caption"),
        ("b.jpg", b"none"),
        ("c.json", b'{"caption": "c"}'),
    ]
    write_shard(tmp_path / "a.tar", members)
    dataset = discover_dataset(tmp_path)
    assert [(sample.size, sample.caption) for sample in dataset] == [(None, None)] * 3
    index_dataset(tmp_path, geometry=True)
    dataset = discover_dataset(tmp_path)
    assert [(sample.size, sample.caption) for sample in dataset] == [
        ((20, 30), "a caption"),
        (None, None),
        (None, None),
    ]


def test_views_outlive_their_dataset(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(1))
    dataset = discover_dataset(path)
    view, expected = dataset[0].view("jpg"), dataset[0]["jpg"]
    dataset._store.close()
    del dataset
    path.unlink()
    assert bytes(view) == expected
