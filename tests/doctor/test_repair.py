"""`fix`: what is good comes out byte for byte, what is not is kept aside, and nothing is written by halves."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import subprocess
import sys

import pytest

from formats.record_reference import mutate, read_records
from killing import kill_at_every_step
from shards import write_shard
from shardset.doctor import check, fix
from shardset.doctor.repair import _Writing
from shardset.errors import ChangedError, FormatError, NotFoundError
from shardset.storage.local import LocalStore
from tfrecords import FOREIGN, frame, make_payloads, record_bytes

FOUR = [b"a" * 10, b"", b"c" * 100, b"d" * 5]
FILE = record_bytes(FOUR)
DAMAGED = FILE[:60] + b"?" + FILE[61:] + bytes(50) + FILE[:-2]


@pytest.fixture
def paths(tmp_path):
    """A damaged shard, and where the good one goes."""
    source = tmp_path / "in.tfrecord"
    source.write_bytes(DAMAGED)
    return source, tmp_path / "out.tfrecord"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_good_records_are_copied_and_the_rest_is_kept_aside(paths):
    source, target = paths
    [fixed] = fix(source, target).shards
    assert target.read_bytes() == record_bytes([FOUR[0], FOUR[1], FOUR[3], *FOUR[:3]])
    assert source.read_bytes() == DAMAGED
    assert (fixed.records, fixed.size, fixed.destination) == (6, target.stat().st_size, str(target))
    assert fixed.check.lost_records == 4
    kept = (target.parent / "out.tfrecord.bad").read_bytes()
    assert fixed.bad_file == f"{target}.bad"
    assert fixed.bad_bytes == len(kept) == 116 + 50 + 19
    index = json.loads((target.parent / "out.tfrecord.bad.json").read_bytes())
    assert index["source"] == str(source)
    assert index["source_size"] == len(DAMAGED)
    for one in index["ranges"]:
        start, end = one["offset"], one["offset"] + one["length"]
        assert kept[one["kept_at"] : one["kept_at"] + one["length"]] == DAMAGED[start:end]
    assert [(one["code"], one["kind"]) for one in index["ranges"]] == [
        ("R104", "bad_payload_checksum"),
        ("R109", "zero_hole"),
        ("R102", "truncated_record"),
    ]
    assert not check(target).has_errors


def test_the_good_file_and_the_bad_ranges_hold_every_byte_of_the_shard(tmp_path):
    file = record_bytes(make_payloads(20, seed=9))
    source, target = tmp_path / "in.tfrecord", tmp_path / "out.tfrecord"
    for seed in range(60):
        damaged = mutate(random.Random(seed), file)
        source.write_bytes(damaged)
        try:
            [fixed] = fix(source, target, force=True).shards
        except FormatError:
            continue
        payloads, fault = read_records(target.read_bytes())
        assert fault is None
        assert len(payloads) == fixed.records
        assert fixed.bad_bytes == fixed.check.lost_bytes
        assert fixed.size + fixed.bad_bytes == len(damaged)
        assert (fixed.bad_file is not None) == (tmp_path / "out.tfrecord.bad").exists()


@pytest.mark.parametrize("byte", [42, 51, 154])
def test_a_mended_record_gets_the_header_or_checksum_that_it_should_have(paths, byte):
    source, target = paths
    source.write_bytes(FILE[:byte] + bytes([FILE[byte] ^ 4]) + FILE[byte + 1 :])
    [fixed] = fix(source, target).shards
    assert target.read_bytes() == FILE
    assert (fixed.check.mended, fixed.check.lost_records, fixed.bad_bytes) == (1, 0, 0)
    [kept] = json.loads((target.parent / "out.tfrecord.bad.json").read_bytes())["ranges"]
    stood = (target.parent / "out.tfrecord.bad").read_bytes()
    assert stood == source.read_bytes()[kept["offset"] : kept["offset"] + kept["length"]]


def test_a_whole_shard_is_copied_and_nothing_is_kept_aside(tmp_path):
    source, target = FOREIGN / "mnist_20.tfrecord", tmp_path / "out.tfrecord"
    [fixed] = fix(source, target).shards
    assert target.read_bytes() == source.read_bytes()
    assert (fixed.bad_file, names(tmp_path)) == (None, ["out.tfrecord"])


@pytest.mark.parametrize("from_suffix", ["", ".gz"])
@pytest.mark.parametrize("to_suffix", ["", ".gz"])
def test_the_suffix_of_the_new_file_says_whether_it_is_compressed(tmp_path, from_suffix, to_suffix):
    source, target = tmp_path / f"in.tfrecord{from_suffix}", tmp_path / f"out.tfrecord{to_suffix}"
    source.write_bytes(gzip.compress(FILE)[:-9] if from_suffix else FILE[:-9])
    [fixed] = fix(source, target).shards
    data = target.read_bytes()
    content = gzip.decompress(data) if to_suffix else data
    assert content == record_bytes(FOUR if from_suffix else FOUR[:3])
    if to_suffix:
        assert data[:10] == b"\x1f\x8b\x08\0\0\0\0\0\0\x03"  # no name and no time, as TensorFlow writes it
    assert fixed.check.compression == ("gzip" if from_suffix else None)


def test_a_hole_is_kept_as_a_hole(tmp_path):
    source, target = tmp_path / "in.tfrecord", tmp_path / "out.tfrecord"
    source.write_bytes(FILE)
    os.truncate(source, len(FILE) + (64 << 20))
    [fixed] = fix(source, target).shards
    assert target.read_bytes() == FILE
    assert fixed.bad_bytes == 64 << 20
    bad = tmp_path / "out.tfrecord.bad"
    assert bad.stat().st_size == 64 << 20
    assert bad.stat().st_blocks * 512 < 1 << 20


# What is refused.


def test_the_damaged_shard_is_never_written_over(paths):
    source, target = paths
    link = target.with_name("link.tfrecord")
    link.symlink_to(source)
    for destination in (source, link, f"{source.parent}/../{source.parent.name}/{source.name}"):
        with pytest.raises(ValueError, match="never changed"):
            fix(source, destination, force=True)
    hidden = target.with_name("x.bad")
    hidden.write_bytes(DAMAGED)
    with pytest.raises(ValueError, match="never changed"):
        fix(hidden, target.with_name("x"), force=True)
    assert source.read_bytes() == hidden.read_bytes() == DAMAGED


def test_what_stands_there_is_written_over_only_with_force(paths):
    source, target = paths
    target.write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        fix(source, target)
    assert target.read_text() == "mine"
    assert names(source.parent) == ["in.tfrecord", "out.tfrecord"]
    fix(source, target, force=True)
    assert check(target).shards[0].records == 6


def test_a_side_file_of_somebody_else_is_not_written_over_and_one_of_ours_is(paths):
    source, target = paths
    bad = target.with_name("out.tfrecord.bad")
    bad.write_text("mine")
    with pytest.raises(ValueError, match=r"out\.tfrecord\.bad exists already"):
        fix(source, target)
    assert bad.read_text() == "mine"
    bad.unlink()
    fix(source, target)
    target.unlink()
    fix(source, target)  # as after a run that was killed before it had written the last file
    source.write_bytes(FILE)
    fix(source, target, force=True)
    assert names(source.parent) == ["in.tfrecord", "out.tfrecord"]


def test_what_is_no_tfrecord_file_leaves_nothing(paths):
    source, target = paths
    for data in (b"<html>" * 99, bytes(5000), random.Random(1).randbytes(3000), gzip.compress(b"<html>" * 99)):
        source.write_bytes(data)
        with pytest.raises(FormatError) as caught:
            fix(source, target)
        assert (caught.value.code, caught.value.shard) == ("not_tfrecord", str(source))
        assert names(source.parent) == ["in.tfrecord"]


def test_tars_folders_and_places_elsewhere_are_refused(paths):
    source, target = paths
    tar = write_shard(target.with_name("a.tar"), [("a.txt", b"x")])
    with pytest.raises(ValueError, match="tar shard"):
        fix(tar, target)
    with pytest.raises(ValueError, match="local file"):
        fix(source, "s3://bucket/a.tfrecord")
    with pytest.raises(NotFoundError):
        fix(target.with_name("none.tfrecord"), target)
    with pytest.raises(FileNotFoundError):
        fix(source, target.parent / "none" / "out.tfrecord")
    assert names(source.parent) == ["a.tar", "in.tfrecord"]


# Several shards.


def test_several_shards_go_into_a_folder_under_their_names(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.tfrecord").write_bytes(DAMAGED)
    (source / "deep" / "b.tfrecord.gz").write_bytes(gzip.compress(FILE))
    (source / "page.tfrecord").write_bytes(b"<html>" * 30)
    report = fix(source, tmp_path / "good")
    assert [shard.records for shard in report.shards] == [6, 4]
    assert report.lost_records == 4
    assert [(finding.code, finding.shard) for finding in report.findings] == [("R001", str(source / "page.tfrecord"))]
    assert gzip.decompress((tmp_path / "good" / "deep" / "b.tfrecord.gz").read_bytes()) == FILE
    assert names(tmp_path / "good") == ["a.tfrecord", "a.tfrecord.bad", "a.tfrecord.bad.json", "deep"]
    with pytest.raises(ValueError, match="exists already"):
        fix(source, tmp_path / "good")


def test_one_shard_goes_into_a_folder_that_is_there(paths):
    source, target = paths
    target.mkdir()
    fix(source, target)
    assert (target / "in.tfrecord").exists()


# What goes wrong on the way.


def repair(folder, source):
    """Do the work that is killed; what a run before has finished is not done again."""
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - counted as one step
    target = os.path.join(folder, "out.tfrecord")  # noqa: PTH118
    if not os.path.exists(target):  # noqa: PTH110
        fix(source, target)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, and killed by signals")
def test_a_run_killed_at_any_step_or_byte_leaves_the_whole_file_or_none(tmp_path):
    source = tmp_path / "in.tfrecord"
    payloads = make_payloads(400, seed=1)
    payloads.insert(200, b"?" * 3000)
    file = record_bytes(payloads)
    place = file.index(b"?" * 3000)
    source.write_bytes(file[: place + 99] + b"!" + file[place + 100 :])
    repair(tmp_path / "expected", str(source))
    expected = {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir() if path.suffix != ".json"}
    folders = tmp_path / "killed"
    folders.mkdir()
    work, sizes = "doctor.test_repair:repair", [0, 100, 2000, 10_000, len(file) - 4000]
    killed = kill_at_every_step(work, {"source": str(source)}, folders, sizes=sizes)
    assert killed > 10
    for folder in folders.iterdir():
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}
        left = [name for name in found if name.endswith(".tmp")]  # of the killed run, and only under such names
        assert {name: data for name, data in found.items() if name not in left} == expected


@pytest.mark.slow
def test_a_disk_that_runs_full_is_an_error_and_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if os.name != "posix" or os.getuid() or subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a disk of its own")
    try:
        source = tmp_path / "in.tfrecord"
        source.write_bytes(record_bytes([b"x" * 3000] * 100) + frame(b"y" * 1000)[:-1])
        for target in (disk / "out.tfrecord", disk / "later.tfrecord"):
            with pytest.raises(OSError, match="space") as caught:
                fix(source, target)
            assert caught.value.errno == errno.ENOSPC
            assert names(disk) == []
        source.write_bytes(record_bytes([b"x" * 100]) + b"\1" * 300_000)  # it is the side file that does not fit
        with pytest.raises(OSError, match="space"):
            fix(source, disk / "out.tfrecord")
        assert names(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_shard_that_is_cut_while_it_is_read_leaves_nothing(paths, monkeypatch):
    source, target = paths
    write = _Writing.take

    def cut(self, event, stream):
        os.truncate(source, 20)
        write(self, event, stream)

    monkeypatch.setattr(_Writing, "take", cut)
    with pytest.raises(ChangedError):
        fix(source, target, store=LocalStore(mmap=False))
    assert names(source.parent) == ["in.tfrecord"]
