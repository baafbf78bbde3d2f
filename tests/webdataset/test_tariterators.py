from __future__ import annotations

import gzip
import io

import pytest

from shards import make_members, read_members, tar_bytes, write_dataset, write_shard
from shardset.errors import ChecksumError, DuplicateFieldError
from shardset.pipeline.handlers import ignore_and_continue, ignore_and_stop
from shardset.webdataset import tariterators as tars
from shardset.webdataset.pipeline import DataPipeline
from shardset.webdataset.shardlists import SimpleShardList


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a.b.jpg", ("a", "b.jpg")),
        ("d.1/a.JPG", ("d.1/a", "JPG")),
        ("README", (None, None)),
        (".jpg", (None, None)),
        ("a.", ("a", "")),
        ("é\udcff.x", ("é\udcff", "x")),
    ],
)
def test_names_are_split_at_the_first_dot_of_their_last_part(name, split):
    assert tars.base_plus_ext(name) == split


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_the_files_of_a_tar_come_in_order_from_any_file(tmp_path, pack):
    members = [*make_members(300), ("big.bin", bytes(3_000_000)), ("d", None), ("__m__/x.y", b""), ("z.txt", b"z")]
    path = write_shard(tmp_path / "a.tar", members)
    found = list(tars.tar_file_iterator(io.BytesIO(pack(path.read_bytes()))))
    assert {file["fname"]: file["data"] for file in found} == {
        name: data for name, data in read_members(path).items() if not name.startswith("__m__")
    }
    every = tars.tar_file_iterator(
        io.BytesIO(path.read_bytes()), skip_meta=None, rename_files=str.upper, select_files=lambda name: "X" in name
    )
    assert [file["fname"] for file in every] == [
        *(name.upper() for name, _ in members[:900] if "X" in name.upper()),
        "__M__/X.Y",
        "Z.TXT",
    ]


def test_damage_is_told_after_the_files_before_it():
    data = bytearray(tar_bytes(make_members(5, fields=("x",))))
    data[3 * 1024] ^= 1
    found = []
    with pytest.raises(ChecksumError):
        found.extend(tars.tar_file_iterator(io.BytesIO(data)))
    assert len(found) == 3
    assert len(list(tars.tar_file_iterator(io.BytesIO(data), handler=ignore_and_continue))) == 3


def test_the_steps_together_give_what_a_dataset_gives(tmp_path):
    paths = [str(path) for path in write_dataset(tmp_path, shards=2)]
    steps = DataPipeline(SimpleShardList(paths), tars.url_opener, tars.tar_file_expander, tars.group_by_keys)
    whole = DataPipeline(SimpleShardList(paths), tars.tarfile_to_samples())
    without_path = [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in whole]
    assert list(steps) == without_path
    assert [s["__key__"] for s in tars.tarfile_samples([{"url": paths[1]}])] == [s["__key__"] for s in whole][4:]


def test_a_marker_comes_where_one_is_asked_for(tmp_path):
    (path,) = write_dataset(tmp_path, shards=1, samples=1, fields=("x",))
    opened = tars.url_opener([{"url": str(path)}])
    assert list(tars.tar_file_expander(opened, eof_value={}))[-1] == {}


def test_a_url_that_cannot_be_opened_is_passed_over_or_not(tmp_path):
    (path,) = write_dataset(tmp_path, shards=1, samples=1)
    urls = [{"url": str(tmp_path / "none.tar")}, {"url": str(path)}]
    with pytest.raises(FileNotFoundError):
        list(tars.url_opener(urls))
    for opened in tars.url_opener(urls, handler=ignore_and_continue):
        opened["stream"].close()
        assert opened["url"] == str(path)
    assert list(tars.url_opener(urls, handler=ignore_and_stop)) == []


def test_files_are_grouped_by_key_url_and_marker():
    def file(name, url="u", data=b""):
        return {"fname": name, "data": data, "__url__": url}

    grouped = list(
        tars.group_by_keys([file("a.X"), file("a.y"), file("README"), file("b.x"), {}, file("b.z"), file("b.x", "v")])
    )
    assert [sorted(set(sample) - {"__key__", "__url__"}) for sample in grouped] == [["x", "y"], ["x"], ["z"], ["x"]]
    twice = [file("a.x", data=b"1"), file("a.x", data=b"2"), file("b.x")]
    with pytest.raises(DuplicateFieldError):
        list(tars.group_by_keys(twice))
    assert [s["x"] for s in tars.group_by_keys(twice, handler=ignore_and_continue)] == [b"1", b""]
    few = list(tars.group_by_keys([file("a.x"), file("a.y"), file("b.y")], suffixes={"x"}))
    assert [sample["__key__"] for sample in few] == ["a"]
    assert tars.valid_sample({"a": 1})
    assert not tars.valid_sample({"__bad__": True})
    assert not tars.valid_sample({})


def test_steps_put_together_in_a_function_report_to_the_pipeline_that_calls_it(tmp_path):
    good, bad = write_dataset(tmp_path, shards=2, samples=5, fields=("x",))
    data = bytearray(bad.read_bytes())
    data[3 * 1024] ^= 1
    bad.write_bytes(data)

    def own(source):
        opened = tars.url_opener(source, handler=ignore_and_continue)
        files = tars.tar_file_expander(opened, handler=ignore_and_continue)
        return tars.group_by_keys(files, handler=ignore_and_continue)

    pipeline = DataPipeline(SimpleShardList([str(good), str(bad), str(tmp_path / "none.tar")]), own)
    assert len(list(pipeline)) == 8
    assert pipeline.report().counts == {"bad_checksum": 1, "unreadable_shard": 1}
    (place,) = pipeline.report().places("bad_checksum")
    assert (place.shard, place.offset) == (str(bad), 3 * 1024)
