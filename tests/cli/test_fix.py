from __future__ import annotations

import gzip
import json

import pytest

from shards import write_shard
from tfrecords import record_bytes

FOUR = [b"a" * 10, b"", b"c" * 100, b"d" * 5]
FILE = record_bytes(FOUR)
DAMAGED = FILE[:60] + b"?" + FILE[61:]


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "in.tfrecord"
    path.write_bytes(DAMAGED)
    return path


def test_good_records_go_to_the_new_file_and_lost_ones_are_code_1(run, shard):
    out = shard.with_name("out.tfrecord")
    done = run("fix", shard, "-o", out)
    assert (done.code, done.err) == (1, "")
    assert out.read_bytes() == record_bytes([FOUR[0], FOUR[1], FOUR[3]])
    assert f"{out}: 3 records, 63 B; 116 B left out: {out}.bad" in done.text
    assert "about 1 record lost" in done.text
    assert f"next: shardset check {out}" in done.text
    assert run("check", out).code == 0


def test_what_loses_nothing_is_code_0(run, shard):
    out = shard.with_name("out.tfrecord")
    for data, said in ((FILE, "4 records, 179 B\n"), (FILE[:43] + b"\1" + FILE[44:] + bytes(99), "1 of them mended")):
        shard.write_bytes(data)
        done = run("fix", shard, "-o", out, "--force")
        assert done.code == 0
        assert "no record is lost" in done.text
        assert said in done.text
        assert out.read_bytes() == FILE


def test_json_has_what_was_saved_and_what_was_found(run, shard):
    out = shard.with_name("out.tfrecord.gz")
    done = run("fix", shard, "-o", out, "--json")
    assert (done.code, done.err) == (1, "")
    [fixed] = done.document["shards"]
    assert (fixed["records"], fixed["bad_file"], fixed["bad_bytes"]) == (3, f"{out}.bad", 116)
    assert fixed["check"]["findings"][0]["code"] == "R104"
    assert (done.document["records"], done.document["lost_records"]) == (3, 1)
    assert gzip.decompress(out.read_bytes()) == record_bytes([FOUR[0], FOUR[1], FOUR[3]])
    assert len(json.loads(shard.with_name("out.tfrecord.gz.bad.json").read_bytes())["ranges"]) == 1


def test_several_shards_go_into_a_folder_and_one_that_is_none_is_code_3(run, shard):
    (shard.parent / "b.tfrecord").write_bytes(FILE)
    done = run("fix", shard, shard.parent / "b.tfrecord", "-o", shard.parent / "good")
    assert done.code == 1
    assert sorted(path.name for path in (shard.parent / "good").glob("*.tfrecord")) == ["b.tfrecord", "in.tfrecord"]
    (shard.parent / "b.tfrecord").write_bytes(b"<html>" * 9)
    done = run("fix", shard, shard.parent / "b.tfrecord", "-o", shard.parent / "good", "--force")
    assert done.code == 3
    assert "R001" in done.text


def test_wrong_usage_is_code_2_with_a_hint_and_changes_nothing(run, shard):
    out = shard.with_name("out.tfrecord")
    out.write_text("mine")
    tar = write_shard(shard.with_name("a.tar"), [("a.txt", b"x")])
    for args, said in (
        ((shard, "-o", out), "exists already"),
        ((shard, "-o", shard), "never changed"),
        ((shard, "-o", shard, "--force"), "never changed"),
        ((tar, "-o", out, "--force"), "only TFRecord shards"),
        ((shard,), "missing option"),
    ):
        done = run("fix", *args)
        assert (done.code, done.out) == (2, b"")
        assert said in done.err
        assert "hint:" in done.err
    assert (out.read_text(), shard.read_bytes()) == ("mine", DAMAGED)


def test_what_cannot_be_read_is_code_3_and_leaves_nothing(run, shard):
    out = shard.with_name("out.tfrecord")
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 5\n")
    for source, target in ((shard, out), (shard.with_name("none"), out), (shard, shard.parent / "none" / "out")):
        done = run("fix", source, "-o", target)
        assert (done.code, done.out) == (3, b"")
        assert len(done.err.splitlines()) == 2
    assert [path.name for path in shard.parent.iterdir()] == ["in.tfrecord"]
