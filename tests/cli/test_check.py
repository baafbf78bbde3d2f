from __future__ import annotations

import gzip
import re

import pytest

from cli.running import run_at_terminal
from shards import write_shard
from shardset.doctor.findings import KINDS
from tfrecords import FOREIGN, make_payloads, record_bytes

FOUR = [b"a" * 10, b"", b"c" * 100, b"d" * 5]
FILE = record_bytes(FOUR)
DAMAGED = FILE[:60] + b"?" + FILE[61:]


@pytest.fixture
def folder(tmp_path):
    """A good shard, a damaged one, and one that is compressed and cut."""
    (tmp_path / "a.tfrecord").write_bytes(FILE)
    (tmp_path / "b.tfrecord").write_bytes(DAMAGED)
    (tmp_path / "c.tfrecord.gz").write_bytes(gzip.compress(record_bytes(make_payloads(100)))[:-100])
    return tmp_path


def test_a_clean_shard_is_code_0_and_says_how_many_records_it_has(run):
    done = run("check", FOREIGN / "penguin-00000-of-00001.gz")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"penguin-00000-of-00001\.gz +2\.43 kB +gzip +100 +0 +good\n", done.text)
    assert "1 shard checked, 100 records; no findings" in done.text
    assert "next:" not in done.text


def test_damage_is_code_1_with_offsets_hints_and_the_command_that_saves_the_rest(run, folder):
    done = run("check", folder / "b.tfrecord")
    assert (done.code, done.err) == (1, "")
    assert re.search(r"b\.tfrecord +179 B +3 +1 +damaged\n", done.text)
    assert "R104 error at byte 42: a payload of 100 bytes does not add up to its checksum" in done.text
    assert "(1 record of 116 B lost)" in done.text
    assert "hint: shardset fix copies the good records to a new file" in done.text
    assert "1 shard checked, 3 records, about 1 lost with 116 B; 1 error" in done.text
    assert f"next: shardset fix {folder}/b.tfrecord -o b.good.tfrecord" in done.text


def test_a_folder_gives_a_row_for_each_shard_and_the_findings_of_each(run, folder):
    done = run("check", folder)
    assert done.code == 1
    states = [line.split()[-1] for line in done.text.splitlines()[1:4]]
    assert states == ["good", "damaged", "damaged"]
    assert "R202" in done.text
    assert "3 shards checked" in done.text


def test_of_many_shards_only_those_with_findings_are_listed(run, tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02d}.tfrecord").write_bytes(DAMAGED if number == 7 else FILE)
    done = run("check", tmp_path)
    assert "07.tfrecord" in done.text
    assert "08.tfrecord" not in done.text
    assert "59 shards without findings" in done.text
    assert "60 shards checked, 239 records" in done.text


def test_of_many_findings_of_a_kind_a_few_are_printed_and_the_rest_is_counted(run, tmp_path):
    (tmp_path / "a.tfrecord").write_bytes((FILE[42:60] + b"?" + FILE[61:158]) * 1500 + FILE)
    done = run("check", tmp_path / "a.tfrecord")
    assert done.text.count("R104 error") == 5
    assert "R104 ... and 1,495 more" in done.text
    document = run("check", tmp_path / "a.tfrecord", "--json").document
    assert document["shards"][0]["counts"] == {"R104": 1500}
    assert len(document["shards"][0]["findings"]) == 1000


def test_json_has_the_counts_and_every_finding(run, folder):
    done = run("check", folder, "--json")
    assert (done.code, done.err) == (1, "")
    document = done.document
    assert document["num_shards"] == 3
    good, damaged, cut = document["shards"]
    assert (good["records"], good["findings"], good["counts"]) == (4, [], {})
    [finding] = damaged["findings"]
    assert finding == {
        "code": "R104",
        "kind": "bad_payload_checksum",
        "severity": "error",
        "shard": str(folder / "b.tfrecord"),
        "offset": 42,
        "message": finding["message"],
        "hint": KINDS["R104"].hint,
        "lost_bytes": 116,
        "lost_records": 1,
    }
    assert (cut["compression"], cut["findings"][0]["code"]) == ("gzip", "R202")
    assert document["records"] == good["records"] + damaged["records"] + cut["records"]
    assert document["has_errors"] is True


def test_a_file_that_is_still_being_written_is_fine_with_tail(run, folder):
    (folder / "events").write_bytes(FILE[:-3])
    assert run("check", folder / "events").code == 1
    done = run("check", "--tail", folder / "events")
    assert done.code == 0
    assert "R113 note at byte 158" in done.text


def test_examples_are_looked_into_on_request(run, tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(record_bytes([bytes.fromhex("0a070a050a01611200")]))
    assert "no findings" in run("check", tmp_path / "a.tfrecord").text
    done = run("check", "--examples", tmp_path / "a.tfrecord")
    assert (done.code, "R301 warning at byte 0: feature 'a'" in done.text) == (0, True)


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_what_is_no_tfrecord_file_is_code_3_with_its_name(run, folder, json):
    (folder / "page.tfrecord").write_bytes(b"<!DOCTYPE html>" * 20)
    for source in (folder / "page.tfrecord", folder):
        done = run("check", source, *json)
        assert done.code == 3
        assert "HTML" in done.text
        assert "check where the file came from" in done.text


def test_what_is_not_there_is_code_3_and_a_tar_is_code_2(run, tmp_path):
    done = run("check", tmp_path / "none.tfrecord")
    assert (done.code, done.out) == (3, b"")
    assert "none.tfrecord" in done.err
    tar = write_shard(tmp_path / "a.tar", [("a.txt", b"x")])
    done = run("check", tar)
    assert (done.code, done.out) == (2, b"")
    assert "only TFRecord shards can be checked" in done.err


def test_a_set_that_is_not_complete_is_code_1(run, tmp_path):
    (tmp_path / "train-00000-of-00002").write_bytes(FILE)
    done = run("check", tmp_path)
    assert done.code == 1
    assert "R003 error" in done.text
    assert "train-00001-of-00002" in done.text


def test_names_and_contents_of_a_shard_cannot_reach_the_terminal(run, tmp_path):
    shard = tmp_path / "\x1b[31mred\udcff.tfrecord"
    shard.write_bytes(DAMAGED + record_bytes([bytes.fromhex("0a090a070a031b5b331200")]))
    for args in ((), ("--json",), ("--examples",)):
        done = run("check", shard, *args)
        assert done.code == 1
        assert b"\x1b" not in done.out
        assert done.err == ""


@pytest.mark.slow
def test_progress_is_shown_at_a_terminal_and_not_with_quiet(folder):
    code, shown = run_at_terminal("check", folder)
    assert code == 1
    assert "checking" in shown
    code, shown = run_at_terminal("check", folder, "--quiet")
    assert "checking" not in shown
    assert "3 shards checked" in shown
