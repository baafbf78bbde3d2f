from __future__ import annotations

import numpy as np
import pytest

from cli.running import HOSTILE, PHOTOS, run_at_terminal
from shards import make_members, write_shard
from shardset.cli.convert import parse_size
from shardset.formats.example import encode_example, parse_example
from writing.record_files import framed, left_in, read_records


@pytest.fixture
def records(tmp_path):
    """A TFRecord file of ten records."""
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(framed(encode_example({"label": i, "name": f"n{i}"})) for i in range(10)))
    return path


def test_tars_become_tfrecord_and_come_back(run, photos, tmp_path):
    done = run("convert", photos, "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    lines = done.text.splitlines()
    assert lines[0].startswith("10 samples of 1 shard written: 1 TFRecord shard, ")
    assert lines[1] == f"shards: {tmp_path}/out/photos-00000.tfrecord"
    assert lines[2] == f"next: shardset show {tmp_path}/out/photos-00000.tfrecord"
    back = run("convert", tmp_path / "out", "-o", tmp_path / "back")
    assert back.text.startswith("10 samples of 1 shard written: 1 tar shard, ")
    keys = [line[1] for line in run("ls", tmp_path / "back" / PHOTOS.name, "-n", 0).lines]
    assert keys == [line[1] for line in run("ls", photos / PHOTOS.name, "-n", 0).lines]


def test_samples_are_divided_into_numbered_shards(run, records, tmp_path):
    document = run("convert", records, "-o", tmp_path / "x.tar", "--shards", 3, "--json").document
    names = [f"x-{number:05d}-of-00003.tar" for number in range(3)]
    assert document == {
        "source": str(records),
        "to": "tar",
        "num_shards_read": 1,
        "num_shards": 3,
        "num_samples": 10,
        "size": sum((tmp_path / name).stat().st_size for name in names),
        "shards": [{"shard": str(tmp_path / name)} for name in names],
        "findings": [],
    }
    by_size = run("convert", records, "-o", tmp_path / "sized", "--max-bytes", "8kB").text
    assert "shard-00000-of-00005.tar ... " in by_size
    by_count = run("convert", records, "-o", tmp_path / "counted@*.tar", "--max-records", 6).text
    assert "2 tar shards" in by_count


@pytest.mark.parametrize("kind", ["gzip", "ZLIB"])
def test_tfrecord_is_compressed_and_divided_record_for_record(run, records, tmp_path, kind):
    done = run("convert", records, "-o", tmp_path / "out", "--to", "tfrecord", "--compression", kind)
    assert done.code == 0
    (name,) = left_in(tmp_path / "out")
    assert name == {"gzip": "a.tfrecord.gz", "ZLIB": "a.tfrecord.zlib"}[kind]
    assert read_records(tmp_path / "out" / name) == read_records(records)


def test_what_is_there_is_written_over_by_force_alone(run, records, tmp_path):
    run("convert", records, "-o", tmp_path / "out")
    refused = run("convert", records, "-o", tmp_path / "out")
    assert (refused.code, refused.out) == (2, b"")
    assert refused.err == (
        f"shardset: not written: it is there already, at {tmp_path}/out/a.tar\nhint: use --force to write over it\n"
    )
    assert run("convert", records, "-o", tmp_path / "out", "--force").code == 0


def test_a_file_where_the_folder_should_be_is_no_question_of_force(run, records, tmp_path):
    (tmp_path / "file").touch()
    done = run("convert", records, "-o", tmp_path / "file")
    assert done.code == 3
    assert "not a directory" in done.err
    assert "--force" not in done.err


def test_findings_are_shown(run, tmp_path):
    write_shard(tmp_path / "a.tar", [("README", b"x"), *make_members(1)])
    done = run("convert", tmp_path / "a.tar", "-o", tmp_path / "out")
    assert done.text.splitlines()[2:4] == [
        "file_of_no_sample: 1 finding",
        f"  {tmp_path}/a.tar#README at byte 512: it belongs to no sample, so it has no place among records",
    ]
    document = run("convert", tmp_path / "a.tar", "-o", tmp_path / "two", "--json").document
    assert document["findings"][0]["places"][0] == {
        "shard": str(tmp_path / "a.tar"),
        "offset": 512,
        "member": "README",
        "message": "it belongs to no sample, so it has no place among records",
    }


def test_damage_ends_it_or_is_told(run, records, tmp_path):
    records.write_bytes(records.read_bytes()[:-5])
    done = run("convert", records, "-o", tmp_path / "out")
    assert done.code == 3
    assert "record 9 is cut short" in done.err
    assert not left_in(tmp_path / "out")
    warned = run("convert", records, "-o", tmp_path / "out", "--on-error", "warn")
    assert warned.code == 0
    assert "9 samples" in warned.text
    assert "truncated_record: 1 finding" in warned.text
    assert "warning: skipped: record 9 is cut short" in warned.err


def test_hostile_names_reach_the_terminal_as_escapes_alone(hostile, tmp_path):
    code, shown = run_at_terminal("convert", hostile, "-o", tmp_path / "out")
    assert code == 0
    assert "\x1b[31m" not in shown
    assert "\u202e" not in shown
    found = [parse_example(record) for record in read_records(tmp_path / "out" / "hostile.tfrecord")]
    assert len(found) == len({name.partition(".")[0] for name, _ in HOSTILE if "." in name}) + 1  # one stands apart
    assert found[0]["__key__"] == [b"\x1b[31mred"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "missing option '-o' / '--output'"),
        (["-o", "x", "--to", "parquet"], "'parquet' is not one of"),
        (["-o", "x", "--shards", "0"], "0 is not in the range"),
        (["-o", "x", "--max-bytes", "many"], "'many' is no size such as 500MB or 1GiB"),
        (["-o", "x", "--max-bytes", "0"], "is no size"),
        (["-o", "x.tfrecord", "--to", "tar"], "x.tfrecord is no name for tar"),
        (["-o", "x", "--compression", "gzip"], "a tar is not compressed"),
        (["-o", "x", "--shards", "2", "--max-records", "2"], "give one of both"),
    ],
)
def test_wrong_usage_is_said(run, records, options, message):
    done = run("convert", records, *options)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5", 5),
        ("5B", 5),
        ("64kB", 64_000),
        ("1.5MB", 1_500_000),
        ("1GiB", 1 << 30),
        ("2 Ti", 2 << 40),
        ("3M", 3_000_000),
    ],
)
def test_sizes_are_decimal_or_binary(text, size):
    assert parse_size(text) == size


def test_numbers_of_a_converted_shard_are_numpy_s(run, records, tmp_path):
    run("convert", records, "-o", tmp_path / "out")
    payload = run("cat", f"{tmp_path}/out/a.tar#00000003.label.npy").out
    (tmp_path / "x.npy").write_bytes(payload)
    assert np.load(tmp_path / "x.npy").tolist() == [3]
