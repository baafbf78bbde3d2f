from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import killing
from shards import make_members, private_cache, tar_bytes, write_dataset, write_shard
from shardset.dataset.opening import discover_dataset
from shardset.errors import FormatError, SampleError, StorageError
from shardset.formats.example import encode_example, encode_sequence_example, parse_example
from shardset.index.record_reader import iter_records
from shardset.policy import Policy
from shardset.storage import MemoryStore
from shardset.writing.convert import convert
from shardset.writing.member_writer import MemberWriter
from writing.record_files import framed, left_in, read_records

__all__ = ["private_cache"]  # a fixture for all tests below
MARKER = "__shardset__/features.json"


def write_records(path, records):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(framed, records)))
    return path


def write_plain_tar(path, members):
    """Write a tar exactly as the package writes them."""
    with Path(path).open("wb") as file:
        writer = MemberWriter(file)
        for name, payload in members:
            writer.add(name, len(payload), [payload])
        writer.close()
    return Path(path)


def tar_members(path):
    with tarfile.open(path) as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar if info.isfile()]


def names_in(path):
    return [name for name, _ in tar_members(path)]


def samples_in(source):
    """Return key, spelled names and payloads of every sample, as the dataset sees them."""
    return [(sample.key, sample.names, sample.read()) for sample in discover_dataset(str(source))]


SUFFIXES = st.sampled_from(["jpg", "JPG", "txt", "seg.png", "cls", "json", "é", "", "a.B.c"])
KEYS = st.one_of(
    st.sampled_from(["a", "b/0001", "./x", "deep/er/0002", "é", "sp ace", "%41", "A"]), st.text("ab01", min_size=1)
)
SAMPLES = st.lists(
    st.tuples(
        KEYS,
        st.lists(
            st.tuples(SUFFIXES, st.binary(max_size=700)), min_size=1, max_size=4, unique_by=lambda p: p[0].lower()
        ),
    ),
    min_size=1,
    max_size=6,
)


def spelled(samples):
    """Return the members of samples, without neighbours of one key, which would be one sample."""
    kept = [sample for place, sample in enumerate(samples) if not place or samples[place - 1][0] != sample[0]]
    return [(f"{key}.{suffix}", payload) for key, parts in kept for suffix, payload in parts]


@given(SAMPLES)
def test_a_tar_comes_back_byte_for_byte(tmp_path_factory, samples):
    folder = tmp_path_factory.mktemp("convert")
    members = spelled(samples)
    first = write_plain_tar(folder / "a.tar", members)
    report = convert(first, folder / "records")
    assert report.num_samples == len(read_records(folder / "records" / "a.tfrecord"))
    convert(folder / "records", folder / "tars")
    keys_with_percent = any(key.startswith("%") for key, _ in samples)
    if keys_with_percent:  # such a key is kept, but names no members any more
        convert(folder / "tars", folder / "again")
        assert read_records(folder / "again" / "a.tfrecord") == read_records(folder / "records" / "a.tfrecord")
    else:
        assert (folder / "tars" / "a.tar").read_bytes() == first.read_bytes()


FLOATS = st.lists(st.floats(width=32), max_size=4).map(lambda values: np.array(values, np.float32))
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda values: np.array(values, np.int64))
BYTES = st.lists(st.sampled_from([b"", b"text", b"{}", b"\xff\xd8\xff", b"\0"]), max_size=3)
FEATURES = st.one_of(st.none(), FLOATS, INTS, BYTES)
NAMES = st.sampled_from(["a", "A", "b/c", "label", "x.y", "", "é"])
CONTEXTS = st.dictionaries(NAMES, FEATURES, max_size=4)
STATED = st.sampled_from(
    [
        *([b"a"], [b"a"], [b"b/c"], [b"../x"], [b"x.y"], [b"%1"], [], [b"1", b"2"], [b"\xff"]),
        *([b"__a__/b"], [b""], [b"a\0"], [b"/abs"], [b"00000001"], np.array([1]), None, [b"dir/"]),
    ]
)
RECORDS = st.one_of(
    CONTEXTS.map(encode_example),
    st.tuples(CONTEXTS, STATED).map(lambda pair: encode_example({**pair[0], "__key__": pair[1]})),
    st.tuples(CONTEXTS, st.dictionaries(NAMES, st.lists(FEATURES, max_size=3), max_size=2)).map(
        lambda pair: encode_sequence_example(*pair)
    ),
    st.binary(max_size=30),
    st.tuples(KEYS, SUFFIXES, st.binary(max_size=9)).map(
        lambda sample: encode_example(
            {"__key__": [sample[0]], "__fields__": [sample[1]], sample[1].lower(): [sample[2]]}
        )
    ),
)


@given(st.lists(RECORDS, max_size=8))
def test_records_come_back_from_a_tar_as_they_were(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("convert")
    first = write_records(folder / "a.tfrecord", records)
    report = convert(first, folder / "tars")
    assert report.num_samples == len(records)
    assert len(discover_dataset(str(folder / "tars"))) == len(records)
    convert(folder / "tars", folder / "records")
    assert read_records(folder / "records" / "a.tfrecord") == records


@given(
    st.lists(st.lists(RECORDS, max_size=5), min_size=2, max_size=3), st.integers(1, 4), st.sampled_from(["zlib", None])
)
def test_records_come_back_however_they_were_divided(tmp_path_factory, shards, count, compression):
    folder = tmp_path_factory.mktemp("convert")
    for number, records in enumerate(shards):
        write_records(folder / "in" / f"{number}.tfrecord", records)
    report = convert(folder / "in", folder / f"tars@{count}.tar")
    assert len(report.urls) == count
    sizes = [len(discover_dataset(url)) for url in report.urls]
    assert max(sizes) - min(sizes) <= 1
    convert(report.urls, folder / "records", max_records=2, compression=compression)
    found = [record for path in sorted((folder / "records").iterdir()) for record in read_records(path)]
    assert found == [record for records in shards for record in records]


def test_a_sample_of_a_tar_becomes_one_example(tmp_path):
    write_shard(tmp_path / "a.tar", [("photos/7.JPG", b"jpeg"), ("photos/7.cls", b"3")])
    report = convert(tmp_path / "a.tar", tmp_path / "out")
    assert report.urls == (str(tmp_path / "out" / "a.tfrecord"),)
    assert (report.to, report.num_samples, report.num_shards_read) == ("tfrecord", 1, 1)
    assert report.size == (tmp_path / "out" / "a.tfrecord").stat().st_size
    (record,) = read_records(report.urls[0])
    assert parse_example(record) == {
        "__fields__": [b"JPG", b"cls"],
        "__key__": [b"photos/7"],
        "cls": [b"3"],
        "jpg": [b"jpeg"],
    }


def test_a_record_becomes_members_that_say_what_they_are(tmp_path):
    record = encode_example({"image/encoded": [b"\xff\xd8\xff"], "label": 3, "name": "cat", "none": None})
    write_records(tmp_path / "a.tfrecord", [record] * 2)
    convert(tmp_path / "a.tfrecord", tmp_path / "out")
    members = dict(tar_members(tmp_path / "out" / "a.tar"))
    assert list(members) == [
        MARKER,
        *(
            f"0000000{i}.{suffix}"
            for i in (0, 1)
            for suffix in ("image%2fencoded.jpg", "label.npy", "name.txt", "none.none")
        ),
    ]
    marker = orjson.loads(members[MARKER])
    assert (marker["version"], marker["keys"]) == (1, "numbers")
    samples = samples_in(tmp_path / "out")
    assert [key for key, _, _ in samples] == ["00000000", "00000001"]
    assert samples[0][2]["image%2fencoded.jpg"] == b"\xff\xd8\xff"


def test_records_with_keys_give_samples_these_keys(tmp_path):
    stated = ["a/1", "a/1", "b.c", "a/2"]
    records = [encode_example({"__key__": key, "x": number}) for number, key in enumerate(stated)]
    write_records(tmp_path / "a.tfrecord", records)
    report = convert(tmp_path / "a.tfrecord", tmp_path / "out")
    assert names_in(tmp_path / "out" / "a.tar") == [
        MARKER,
        "a/1.x.npy",
        "%00000001.__key__.txt",
        "%00000001.x.npy",
        "%00000002.__key__.txt",
        "%00000002.x.npy",
        "a/2.x.npy",
    ]
    assert report.report.counts == {"unusable_key": 2}
    assert report.report.places("unusable_key")[0].key == "1"
    convert(tmp_path / "out", tmp_path / "back")
    assert read_records(tmp_path / "back" / "a.tfrecord") == records


def test_keys_that_most_records_lack_name_nothing(tmp_path):
    records = [encode_example({"x": 1}), encode_example({"x": 2}), encode_example({"__key__": "a", "x": 3})]
    write_records(tmp_path / "a.tfrecord", records)
    report = convert(tmp_path / "a.tfrecord", tmp_path / "out")
    assert names_in(tmp_path / "out" / "a.tar")[-2:] == ["00000002.__key__.txt", "00000002.x.npy"]
    assert report.report.counts == {}


def test_numbers_of_samples_run_through_all_shards(tmp_path):
    for number in range(2):
        write_records(tmp_path / "in" / f"{number}.tfrecord", [encode_example({"x": 1})] * 2)
    convert(tmp_path / "in", tmp_path / "out")
    assert names_in(tmp_path / "out" / "1.tar") == [MARKER, "00000002.x.npy", "00000003.x.npy"]


def test_a_record_among_samples_that_was_none_is_kept_whole_and_counted(tmp_path):
    write_shard(tmp_path / "a.tar", make_members(100, fields=("txt",)))
    convert(tmp_path / "a.tar", tmp_path / "one")
    records = read_records(tmp_path / "one" / "a.tfrecord")
    records.insert(90, encode_example({"x": 1}))
    write_records(tmp_path / "two" / "b.tfrecord", records)
    report = convert(tmp_path / "two", tmp_path / "tars")
    assert report.report.counts == {"whole_record": 1}
    names = names_in(tmp_path / "tars" / "b.tar")
    assert names[90] == "%00000090.shardset-record"
    assert MARKER not in names
    convert(tmp_path / "tars", tmp_path / "back")
    assert read_records(tmp_path / "back" / "b.tfrecord") == records


def test_what_belongs_to_no_sample_is_counted(tmp_path):
    write_shard(tmp_path / "a.tar", [("__meta__/x", b"1"), ("README", b"2"), ("a.txt", b"3"), ("d", None)])
    report = convert(tmp_path / "a.tar", tmp_path / "out")
    assert report.report.counts == {"file_of_no_sample": 2}
    assert [place.key for place in report.report.places("file_of_no_sample")] == ["__meta__/x", "README"]


def test_a_suffix_that_comes_twice_is_a_feature_with_two_values(tmp_path):
    members = [("a.jpg", b"1"), ("a.txt", b"2"), ("a.JPG", b"3")]
    write_shard(tmp_path / "a.tar", members)
    report = convert(tmp_path / "a.tar", tmp_path / "out")
    assert parse_example(read_records(report.urls[0])[0])["jpg"] == [b"1", b"3"]
    assert report.report.counts == {"duplicate_suffix": 1}
    convert(tmp_path / "out", tmp_path / "back")
    assert tar_members(tmp_path / "back" / "a.tar") == members


def test_a_suffix_that_a_record_has_of_its_own_is_refused(tmp_path):
    write_shard(tmp_path / "a.tar", [("a.txt", b"1"), ("b.__fields__", b"2"), ("c.txt", b"3")])
    with pytest.raises(SampleError, match=r"sample 'b' has a member with the suffix '__fields__'") as caught:
        convert(tmp_path / "a.tar", tmp_path / "out")
    assert caught.value.shard == str(tmp_path / "a.tar")
    assert not left_in(tmp_path / "out")
    report = convert(tmp_path / "a.tar", tmp_path / "out", policy=Policy("skip"))
    assert (report.num_samples, report.report.counts) == (2, {"not_converted": 1})


def test_sparse_members_are_read_with_their_holes(tmp_path):
    path = tmp_path / "x.bin"
    with path.open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"middle")
    assert os.system(f"tar --sparse -C {tmp_path} -cf {tmp_path}/a.tar x.bin") == 0
    report = convert(tmp_path / "a.tar", tmp_path / "out")
    assert parse_example(read_records(report.urls[0])[0])["bin"] == [path.read_bytes()]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.tfrecord", "b.tfrecord.gz", "c.record"], ["a.tar", "b.tar", "c.tar"]),
        (["train-00000-of-00002", "train-00001-of-00002"], ["train-00000-of-00002.tar", "train-00001-of-00002.tar"]),
        (["x.tfrecord-00000-of-00001"], ["x-00000-of-00001.tar"]),
        (["data_tfrecord-00000-of-00001.gz"], ["data_tfrecord-00000-of-00001.tar"]),
        (["deep/a.tfrecord", "a.tfrecord"], ["a.tar", "deep/a.tar"]),
        (["a.tfrecord", "a.tfrec"], ["a.tfrec.tar", "a.tfrecord.tar"]),
    ],
)
def test_a_shard_keeps_its_name_and_gets_another_suffix(tmp_path, names, expected):
    for name in names:
        path = write_records(tmp_path / "in" / name, [b"x"])
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    report = convert(tmp_path / "in", tmp_path / "out")
    assert sorted(report.urls) == [str(tmp_path / "out" / name) for name in sorted(expected)]


def test_tars_are_divided_evenly_or_by_size_or_put_into_one(tmp_path):
    write_dataset(tmp_path / "in", shards=3, samples=4)
    samples = samples_in(tmp_path / "in")
    even = convert(tmp_path / "in", tmp_path / "even", shards=5, compression="gzip")
    assert [Path(url).name for url in even.urls] == [f"shard-{i:05d}-of-00005.tfrecord.gz" for i in range(5)]
    assert [len(read_records(url)) for url in even.urls] == [2, 2, 3, 2, 3]
    one = convert(tmp_path / "in", tmp_path / "all.tfrecord")
    assert one.urls == (str(tmp_path / "all.tfrecord"),)
    by_size = convert(tmp_path / "in", tmp_path / "out.tfrecord.gz", max_bytes=400)
    assert len(by_size.urls) > 3
    assert Path(by_size.urls[0]).read_bytes()[:2] == b"\x1f\x8b"  # as the name says
    for report in (even, one, by_size):
        assert report.num_samples == 12
        assert [parse_example(record)["__key__"] for url in report.urls for record in read_records(url)] == [
            [key.encode()] for key, _, _ in samples
        ]
    back = convert(one.urls[0], tmp_path / "tars", max_bytes=8192)
    assert all(Path(url).stat().st_size <= 10240 for url in back.urls)
    assert [sample for url in back.urls for sample in samples_in(url)] == samples


def test_more_shards_than_samples_leave_some_empty(tmp_path):
    write_records(tmp_path / "a.tfrecord", [b"1", b"2"])
    report = convert(tmp_path / "a.tfrecord", tmp_path / "out@4.tar")
    assert [len(names_in(url)) for url in report.urls] == [1, 2, 1, 2]


def test_a_source_without_samples_makes_shards_without_samples(tmp_path):
    write_records(tmp_path / "a.tfrecord", [])
    assert convert(tmp_path / "a.tfrecord", tmp_path / "out").num_samples == 0
    assert convert(tmp_path / "a.tfrecord", tmp_path / "many@*.tar", max_records=3).urls == (
        str(tmp_path / "many-00000-of-00001.tar"),
    )
    assert convert(tmp_path / "out" / "a.tar", tmp_path / "back").num_samples == 0


def test_records_are_divided_anew_as_they_are(tmp_path):
    write_records(tmp_path / "a.tfrecord", [b"not an Example", b"", b"c"])
    report = convert(tmp_path / "a.tfrecord", tmp_path / "b.tfrecord", to="tfrecord", max_records=2)
    assert [read_records(url) for url in report.urls] == [[b"not an Example", b""], [b"c"]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "tar"}, "tars already"),
        ({"shards": 0}, "must be positive"),
        ({"max_bytes": -1}, "must be positive"),
        ({"shards": 2, "max_records": 3}, "give one of both"),
        ({"compression": "snappy"}, "TensorFlow reads"),
        ({"destination": "a@3.tfrecord", "shards": 2}, "says how many shards"),
        ({"destination": "a@3.tfrecord", "max_bytes": 2}, "says how many shards"),
        ({"destination": "a@*.tfrecord"}, "give shards, max_bytes or max_records"),
        ({"destination": "a.tar"}, "tars already"),
        ({"destination": "a.tar", "to": "tfrecord"}, "is no name for tfrecord"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(tmp_path, settings, message):
    write_dataset(tmp_path / "in", shards=1)
    destination = tmp_path / settings.pop("destination", "out")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "in", destination, **settings)
    assert left_in(tmp_path) == ["shard-0000.tar"]


def test_shards_of_both_formats_are_refused(tmp_path):
    write_dataset(tmp_path / "in", shards=1)
    write_records(tmp_path / "in" / "a.tfrecord", [b"x"])
    with pytest.raises(ValueError, match="of both formats"):
        convert(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("target", ["out", "out@2.tfrecord", "out.tfrecord"])
def test_what_is_there_is_written_over_by_force_alone(tmp_path, target):
    write_dataset(tmp_path / "in", shards=2)
    first = convert(tmp_path / "in", tmp_path / target)
    for url in first.urls:
        Path(url).write_bytes(b"precious")
    with pytest.raises(StorageError, match="it is there already"):
        convert(tmp_path / "in", tmp_path / target)
    assert Path(first.urls[0]).read_bytes() == b"precious"
    convert(tmp_path / "in", tmp_path / target, force=True)
    assert sum(len(read_records(url)) for url in first.urls) == 8


def test_a_set_of_another_size_is_replaced_by_force_alone(tmp_path):
    write_dataset(tmp_path / "in", shards=2)
    convert(tmp_path / "in", tmp_path / "out@3.tfrecord")
    for settings in ({"shards": 2}, {"max_records": 5}):
        with pytest.raises(StorageError, match="another set"):
            convert(tmp_path / "in", tmp_path / "out.tfrecord", **settings)
    report = convert(tmp_path / "in", tmp_path / "out.tfrecord", shards=2, force=True)
    assert sorted((tmp_path).glob("out*")) == [Path(url) for url in report.urls]


def test_a_damaged_shard_ends_the_conversion_or_is_converted_up_to_the_damage(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    whole = b"".join(map(framed, [b"1", b"2", b"3"]))
    for number, content in enumerate((whole, whole[:-3], whole)):
        (folder / f"{number}.tfrecord").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        convert(folder, tmp_path / "out")
    assert caught.value.shard == str(folder / "1.tfrecord")
    assert left_in(tmp_path / "out") == ["0.tar"]  # whole; nothing of the second
    report = convert(folder, tmp_path / "out", policy=Policy("skip"), force=True)
    assert report.num_samples == 8
    assert report.report.counts == {"truncated_record": 1, "whole_record": 8}
    assert report.report.places("truncated_record")[0].offset == 34


def test_a_damaged_tar_is_converted_up_to_the_damage(tmp_path):
    content = tar_bytes([("a.txt", b"1"), ("b.txt", b"2"), ("c.txt", b"3")])
    (tmp_path / "a.tar").write_bytes(content[:1024] + b"\1" + content[1025:])
    with pytest.raises(FormatError):
        convert(tmp_path / "a.tar", tmp_path / "out")
    report = convert(tmp_path / "a.tar", tmp_path / "out", policy=Policy("skip"))
    assert (report.num_samples, report.report.counts) == (1, {"bad_checksum": 1})


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"version": 2, "keys": "numbers"}', "version 2"),
        (b'{"version": 1, "keys": "other"}', "keys 'other'"),
        (b"{" + b" " * (1 << 20), "is sparse, or has"),
    ],
)
def test_a_tar_whose_features_file_is_not_understood_is_refused(tmp_path, marker, message):
    write_shard(tmp_path / "a.tar", [(MARKER, marker), ("a.x.npy", b"")])
    with pytest.raises(FormatError, match=message) as caught:
        convert(tmp_path / "a.tar", tmp_path / "out")
    assert caught.value.code == "bad_marker"


def test_a_member_that_stands_for_nothing_is_refused_with_its_sample(tmp_path):
    write_shard(tmp_path / "a.tar", [(MARKER, b'{"version": 1, "keys": "numbers"}'), ("7.x.npy", b"broken")])
    with pytest.raises(SampleError, match=r"no \.npy file") as caught:
        convert(tmp_path / "a.tar", tmp_path / "out")
    assert (caught.value.key, caught.value.shard) == ("7", str(tmp_path / "a.tar"))


def test_progress_is_told_shard_by_shard(tmp_path):
    write_dataset(tmp_path / "in", shards=3)
    told = []
    convert(tmp_path / "in", tmp_path / "out", progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_shards_elsewhere_are_read_and_written_where_the_store_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    store = MemoryStore()
    store.write("memory://in/a.tar", tar_bytes(make_members(3)))
    report = convert("memory://in/a.tar", "memory://out", store=store)
    assert report.urls == ("memory://out/a.tfrecord",)
    with pytest.raises(StorageError, match="it is there already"):
        convert("memory://in/a.tar", "memory://out", store=store)
    back = convert("memory://out/a.tfrecord", tmp_path / "back", store=None if report is None else store)
    assert names_in(back.urls[0]) == [name for name, _ in make_members(3)]
    assert left_in(tmp_path) == ["a.tar"]


def test_the_same_shards_give_the_same_bytes(tmp_path):
    write_dataset(tmp_path / "in", shards=2)
    for folder in ("one", "two"):
        convert(tmp_path / "in", tmp_path / folder, compression="gzip")
        convert(tmp_path / folder, tmp_path / f"{folder}-tars")
    for name in left_in(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for name in left_in(tmp_path / "one-tars"):
        assert (tmp_path / "one-tars" / name).read_bytes() == (tmp_path / "two-tars" / name).read_bytes()


def convert_for_killing(folder, source, **settings):
    """Convert where a killed run may have left shards, all of which must be whole."""
    folder = Path(folder)
    for path in folder.glob("*/*.tfrecord"):
        assert read_records(path)
    for path in folder.glob("*/*.tar"):
        assert names_in(path)
    convert(source, folder / "records", force=True, **settings)
    convert(folder / "records", folder / "tars", force=True)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"shards": 3}, {"max_records": 3}], ids=str)
def test_a_conversion_killed_at_any_step_leaves_whole_shards(tmp_path, settings):
    write_dataset(tmp_path / "in", shards=2)
    arguments = {"source": str(tmp_path / "in"), **settings}
    killed = killing.kill_at_every_step(
        "writing.test_convert:convert_for_killing", arguments, tmp_path / "folders", sizes=[700, 5000]
    )
    assert killed >= 10
    for folder in (tmp_path / "folders").iterdir():
        members = [member for path in sorted((folder / "tars").glob("[!.]*")) for member in tar_members(path)]
        assert members == make_members(8)


def test_what_is_good_is_converted_from_a_damaged_shard_if_the_policy_goes_on(tmp_path):
    payloads = [b"record %d" % number * 10 for number in range(100)]
    content = bytearray(b"".join(map(framed, payloads)))
    content[20 * (len(payloads[50]) + 16)] ^= 1
    path = tmp_path / "a.tfrecord"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        convert(path, tmp_path / "out")
    for to in ("tar", "tfrecord"):
        report = convert(path, tmp_path / to, to=to, policy=Policy(on_error="skip"))
        assert report.num_samples >= 98
        assert sum(report.report.counts.values()) >= 1
    records = list(iter_records(tmp_path / "tfrecord" / "a.tfrecord"))
    assert set(records) <= set(payloads)
    assert records[-1] == payloads[-1]
