from __future__ import annotations

import random

import numpy as np
import pytest

import shardset
from shards import make_members, private_cache, write_dataset, write_shard
from shardset.dataset.dataset import Dataset
from shardset.errors import MissingFieldError, NotFoundError
from shardset.formats.example import encode_example
from shardset.loading.fields import Fields, parse_fields
from shardset.loading.payloads import Failure, PayloadReader
from shardset.policy import Policy, Report
from shardset.storage import LocalStore
from tfrecords import record_bytes

__all__ = ["private_cache"]


def reader_of(dataset, fields=None, *, leave=lambda _: False, policy=None):
    report = Report()
    made = PayloadReader(dataset, parse_fields(fields), leave=leave, policy=policy or Policy(), report=report)
    return made, report


@pytest.fixture
def dataset(tmp_path):
    write_dataset(tmp_path / "data", shards=4, samples=25)
    return shardset.discover_dataset(tmp_path / "data", store=LocalStore(mmap=False))


@pytest.mark.parametrize("fields", [None, ["txt"], ["json", "jpg"], {"words": "txt", "image": "png;jpg"}])
@pytest.mark.parametrize("copy", [True, False])
def test_samples_come_in_the_order_asked_with_what_was_read_ahead_and_without(dataset, fields, copy):
    reader, _ = reader_of(dataset, fields)
    numbers = np.array(random.Random(2).choices(range(100), k=60))
    names = reader.fields.names or {name: (name,) for name in ("jpg", "json", "txt")}
    want = []
    for number in numbers.tolist():
        sample = dataset[number]
        payload = {name: next(sample[each] for each in found if each in sample) for name, found in names.items()}
        want.append({"__key__": sample.key, **payload})
    window = reader.read_ahead(numbers)
    assert window.num_reads > 0
    other = reader.read_ahead(np.arange(3))
    for each in (window, reader.ahead.nothing, other):
        assert reader.read(numbers, each, copy=copy) == want
        columns = reader.read_columns(numbers, each, copy=copy)
        assert columns.keys == [sample["__key__"] for sample in want]
        assert columns.fields == {name: [sample[name] for sample in want] for name in names}
        kind = bytes if copy else memoryview
        assert all(type(payload) is kind for column in columns.fields.values() for payload in column)


def test_columns_are_given_of_samples_in_several_groups_of_a_catalog(tmp_path, monkeypatch):
    monkeypatch.setattr("shardset.index.catalog_writer.GROUP_SHARDS", 2)
    write_dataset(tmp_path, shards=5, samples=10)
    dataset = shardset.discover_dataset(tmp_path)
    assert dataset.catalog.num_groups == 3
    reader, _ = reader_of(dataset)
    numbers = np.random.default_rng(1).permutation(50)
    columns = reader.read_columns(numbers, reader.read_ahead(numbers), copy=True)
    assert columns.keys == [dataset[number].key for number in numbers.tolist()]
    assert columns.fields["jpg"] == [dataset[number]["jpg"] for number in numbers.tolist()]


def test_there_are_no_columns_of_samples_that_differ_or_of_records(tmp_path):
    members = [*make_members(3), ("x.jpg", b"1"), ("y.png", b"2"), ("y.txt", b"3")]
    write_shard(tmp_path / "a.tar", members)
    dataset = shardset.discover_dataset(tmp_path)
    numbers = np.arange(5)
    for fields in (None, ["jpg"], ["jpg;png"], {"a": "txt", "b": "txt"}):
        reader, report = reader_of(dataset, fields)
        assert reader.read_columns(numbers, reader.ahead.nothing, copy=True) is None
        assert report.counts == {}
    reader, _ = reader_of(dataset, leave=lambda name: name == "jpg")
    assert reader.read_columns(numbers[:3], reader.ahead.nothing, copy=True) is None
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.tfrecord").write_bytes(record_bytes([encode_example({"jpg": [b"x"]})] * 3))
    reader, _ = reader_of(shardset.discover_dataset(tmp_path / "r"))
    assert reader.read_columns(np.arange(3), reader.ahead.nothing, copy=True) is None
    assert [sample["jpg"] for sample in reader.read(np.arange(3), reader.ahead.nothing, copy=True)] == [[b"x"]] * 3


def test_what_cannot_be_given_is_a_failure_that_says_why(tmp_path):
    write_shard(tmp_path / "a.tar", [("x.jpg", b"1"), ("x.txt", b"one"), ("y.jpg", b"2"), ("z.txt", b"three")])
    write_shard(tmp_path / "b.tar", make_members(2))
    dataset = shardset.discover_dataset(tmp_path)
    assert len(dataset) == 5
    (tmp_path / "b.tar").unlink()
    dataset = Dataset(None, LocalStore(), catalog=dataset.catalog)  # which has opened nothing yet
    numbers = np.arange(5)
    reader, report = reader_of(dataset, ["jpg", "txt"], policy=Policy(defaults={"txt": b"?"}))
    for window in (reader.ahead.nothing, reader.read_ahead(numbers)):
        first, second, third, *gone = reader.read(numbers, window, copy=True)
        assert first == {"__key__": "x", "jpg": b"1", "txt": b"one"}
        assert second == {"__key__": "y", "jpg": b"2", "txt": b"?"}
        assert (third.code, third.place.key) == ("missing_field", "z")
        assert isinstance(third.error, MissingFieldError)
        for failure, key in zip(gone, ("00000000", "00000001"), strict=True):
            assert isinstance(failure, Failure)
            assert isinstance(failure.error, NotFoundError)
            assert (failure.code, failure.place.key) == ("read_failed", key)
            assert failure.place.shard.endswith("b.tar")
    assert report.counts == {"missing_field": 2}


def test_fields_that_are_left_are_opened_and_not_read(tmp_path):
    write_shard(tmp_path / "a.tar", [("x.mp4", b"film" * 5000), ("x.txt", b"one"), ("y.mp4", b"2"), ("y.txt", b"two")])
    dataset = shardset.discover_dataset(tmp_path, store=LocalStore(mmap=False))
    reader, _ = reader_of(dataset, leave=lambda name: name == "mp4")
    window = reader.read_ahead(np.arange(2))
    assert window.num_bytes < 2000
    samples = reader.read(np.arange(2), window, copy=True)
    assert [sample["txt"] for sample in samples] == [b"one", b"two"]
    assert [sample["mp4"].read() for sample in samples] == [b"film" * 5000, b"2"]


def test_names_of_fields_are_read_in_every_way_that_they_may_be_written():
    assert parse_fields(None) == Fields(None)
    assert parse_fields("jpg;png") == Fields({"jpg": ("jpg", "png")})
    assert parse_fields(["a", "b ; c"]) == Fields({"a": ("a",), "b": ("b", "c")})
    assert parse_fields({"x": "a"}) == Fields({"x": ("a",)})
    assert [parse_fields(each).is_plain for each in (None, ["a", "b"], "a;b", {"x": "a"})] == [True, True, False, False]
    for wrong in ([], [""], ["a;"], {"": "a"}, ["a", "a"], ["a;b", "a"], "__key__", {"__x": "a"}):
        with pytest.raises(ValueError, match=r"field|underscores"):
            parse_fields(wrong)
    with pytest.raises(TypeError, match="named by a text"):
        parse_fields([1])
