"""The commands that look into shards, on TFRecord shards."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from cli.running import PHOTOS
from shards import read_members
from shardset.formats.example import encode_example
from tfrecords import FOREIGN, record_bytes

PICTURE = read_members(PHOTOS)["0002-rocket.jpg"]


def example(number):
    return encode_example(
        {
            "image/encoded": [PICTURE],
            "label": [number],
            "box": np.array([0.5, 1e-9, np.nan], np.float32),
            "name": [f"picture {number}"],
            "words": ["a", "b"],
            "nothing": None,
        }
    )


@pytest.fixture
def folder(tmp_path):
    """Two shards of four records, the second compressed."""
    for shard in range(2):
        content = record_bytes([example(number) for number in range(shard * 4, shard * 4 + 4)])
        path = tmp_path / f"train-{shard:05d}-of-00002.tfrecord"
        path.write_bytes(content if shard == 0 else gzip.compress(content))
    return tmp_path


def test_a_record_is_shown_feature_by_feature(run, folder):
    done = run("show", f"{folder}/train-00000-of-00002.tfrecord#3")
    assert done.code == 0
    lines = done.text.splitlines()
    assert lines[0].split() == ["record", "3"]
    assert "Example" in done.text
    rows = {line.split()[0]: line for line in lines if line and line.split()[0] in {"image/encoded", "label", "box"}}
    assert "jpeg" in rows["image/encoded"]
    assert "640x427" in rows["image/encoded"]
    assert rows["label"].split() == ["label", "int64", "1", "8", "B", "3"]
    assert "0.5, 1e-09, nan" in rows["box"]
    assert "nothing" in done.text


def test_a_number_counts_through_all_shards_of_a_folder(run, folder):
    document = run("show", f"{folder}#6", "--json").document
    assert document["sample_index"] == 6
    assert document["key"] == "2"
    assert document["shard_index"] == 1
    assert document["range"] is None
    assert {each["feature"]: each["values"] for each in document["features"]}["label"] == [6]


def test_the_range_of_a_record_is_one_that_curl_takes(run, folder):
    document = run("show", f"{folder}#2", "--json").document
    first, last = map(int, document["range"].split("-"))
    assert (folder / "train-00000-of-00002.tfrecord").read_bytes()[first : last + 1] == example(2)


def test_a_shard_is_shown_with_the_features_of_its_first_record(run, folder):
    done = run("show", folder / "train-00001-of-00002.tfrecord")
    assert "TFRecord, gzip" in done.text
    assert "4 records" in done.text
    assert "first record: Example" in done.text
    assert "no findings in the headers" in done.text


def test_the_schema_is_a_table(run, folder):
    done = run("show", "--schema", folder)
    rows = {line.split()[0]: line.split() for line in done.text.splitlines() if line}
    assert rows["label"][:4] == ["label", "int64", "1", "8"]
    assert rows["words"][:4] == ["words", "bytes", "2", "8"]
    assert rows["nothing"][1] == "none"
    assert rows["image/encoded"][-1] == "jpeg"
    assert run("show", "--schema", f"{folder}#1").code == 2


def test_a_tar_has_no_schema(run):
    done = run("show", "--schema", PHOTOS)
    assert done.code == 2
    assert "shardset stats" in done.err


def test_records_are_listed_with_their_features(run, folder):
    rows = [line.split("\t") for line in run("ls", folder / "train-00000-of-00002.tfrecord").text.splitlines()]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][2].split() == ["box", "image/encoded", "label", "name", "nothing", "words"]
    assert int(rows[0][3]) == len(example(0))
    shards = [line.split("\t") for line in run("ls", folder).text.splitlines()]
    assert [row[2] for row in shards] == ["4", "4"]
    assert "image/encoded" in shards[0][4]


def test_a_feature_comes_out_as_it_is(run, folder):
    assert run("cat", f"{folder}#5.image/encoded").out == PICTURE
    assert run("cat", f"{folder}#5.name").out == b"picture 5"
    assert run("cat", f"{folder}#5.label").out == b"5\n"
    assert run("cat", f"{folder}#5").out == example(5)
    for fragment, said in (
        ("5.words", "2 values"),
        ("5.nothing", "no kind"),
        ("5.absent", "'absent'"),
        ("9", "no sample 9"),
    ):
        done = run("cat", f"{folder}#{fragment}")
        assert done.code == 3
        assert said in done.err


def test_a_feature_may_have_no_name(run, tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record_bytes([encode_example({"": [b"x"]})]))
    assert run("cat", f"{path}#0.").out == b"x"


def test_stats_count_records(run, folder):
    document = run("stats", folder, "--json").document
    assert document["num_samples"] == 8
    assert [(each["field"], each["samples"], each["min"]) for each in document["fields"]] == [
        ("record", 8, len(example(0)))
    ]
    assert run("stats", folder).code == 0


def test_what_is_damaged_is_said(run, folder):
    path = folder / "train-00000-of-00002.tfrecord"
    content = bytearray(path.read_bytes())
    content[len(example(0)) + 16 + 100] ^= 1
    path.write_bytes(content)
    done = run("show", f"{path}#1")
    assert done.code == 0
    assert "data_crc" in done.text
    assert "damaged" in done.text
    schema = run("show", "--schema", path, "--json").document
    assert (schema["num_records"], schema["left_out"]) == (3, 1)
    assert "1 damaged" in run("show", "--schema", path).text
    assert run("cat", f"{path}#1").code == 3
    path.write_bytes(content[:-10])
    done = run("show", path)
    assert "truncated_record" in done.text
    assert "3 records" in done.text
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    done = run("show", path)
    assert done.code == 3
    assert "Git LFS" in done.err


def test_index_writes_sidecars_and_on_request_text_indexes(run, folder):
    document = run("index", folder, "--text-index", "--json").document
    assert document["sidecars_written"] == 2
    assert document["num_samples"] == 8
    frame = len(example(0)) + 16
    assert (folder / "train-00000-of-00002.tfrecord.idx").read_bytes().splitlines()[1] == f"{frame} {frame}".encode()
    assert [finding["code"] for finding in document["findings"]] == ["no_text_index"]


def test_real_files_are_shown(run):
    done = run("show", FOREIGN / "sequence_eval.gz#7")
    assert "SequenceExample" in done.text
    assert "list of bytes" in done.text
