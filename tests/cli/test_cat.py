from __future__ import annotations

import subprocess
import tarfile

import pytest

from cli.running import PHOTOS, environment, program, run_at_terminal
from shards import read_members, write_dataset, write_shard
from shardset.cli.cat import is_plain_text


@pytest.mark.parametrize(("name", "payload"), read_members(PHOTOS).items())
def test_every_payload_comes_out_as_tarfile_reads_it(run, name, payload):
    assert run("cat", f"{PHOTOS}#{name}") == (0, payload, "")


def test_the_output_of_a_process_is_the_payload_alone():
    done = subprocess.run(
        program("cat", f"{PHOTOS}#0002-rocket.jpg"), capture_output=True, env=environment(), check=True
    )
    assert done.stdout == read_members(PHOTOS)["0002-rocket.jpg"]
    assert done.stderr == b""


def test_a_sample_can_be_named_by_its_number_and_in_a_folder(run, tmp_path):
    write_dataset(tmp_path, shards=3, samples=4)
    assert run("cat", f"{tmp_path}#5.txt").out == run("cat", f"{tmp_path}#00000005.txt").out != b""


def test_the_suffix_may_be_spelled_in_any_case(run, tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("k.JPG", b"1"), ("k.Seg.PNG", b"2")])
    assert run("cat", f"{shard}#k.jpg").out == run("cat", f"{shard}#k.JPG").out == b"1"
    assert run("cat", f"{shard}#k.seg.png").out == b"2"


def test_a_key_may_lie_in_folders_with_dots(run, tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("v1.0/x/k.txt", b"1"), ("v1.0/x/k.tar.gz", b"2")])
    assert run("cat", f"{shard}#v1.0/x/k.tar.gz").out == b"2"


def test_a_file_of_no_sample_is_named_as_a_whole(run, hostile):
    assert run("cat", f"{hostile}#README").out == b"of no sample"
    assert run("cat", f"{hostile}#caf\udce9").out == b"of no sample, and not UTF-8"


def test_a_key_that_comes_twice_gives_the_field_from_where_it_is(run, hostile):
    assert run("cat", f"{hostile}#apart.txt").out == b"1"
    assert run("cat", f"{hostile}#apart.jpg").out == b"3"


def test_a_field_that_comes_twice_is_refused_with_both_offsets(run, hostile):
    done = run("cat", f"{hostile}#twice.jpg")
    assert (done.code, done.out) == (3, b"")
    with tarfile.open(hostile, errors="surrogateescape") as tar:
        offsets = [info.offset_data for info in tar if info.name == "twice.jpg"]
    assert f"bytes {offsets[0]} and {offsets[1]}" in done.err


@pytest.mark.parametrize(
    ("fragment", "message", "hint"),
    [
        ("0002-rocket.png", "has no field 'png'", "'jpg', 'txt'"),
        ("0002-rocket", "is a sample", "0002-rocket.jpg, 0002-rocket.txt"),
        ("1", "is a sample", "1.jpg, 1.txt"),
        ("1.png", "sample '0002-rocket' has no field 'png'", "'jpg', 'txt'"),
        ("0002-roket.jpg", "no sample has the key '0002-roket'", "'0002-rocket'"),
        ("10.jpg", "no sample 10", "from 0"),
        ("nothing like it", "no sample has the key", "shardset ls"),
    ],
)
def test_a_name_that_leads_to_no_payload_is_answered_with_those_that_do(run, fragment, message, hint):
    done = run("cat", f"{PHOTOS}#{fragment}")
    assert (done.code, done.out) == (3, b"")
    first, second = done.err.splitlines()
    assert message in first
    assert hint in second


def test_what_stands_before_the_damage_can_be_had(run, tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("a.txt", b"whole"), ("b.txt", bytes(5000))])
    shard.write_bytes(shard.read_bytes()[:3000])
    assert run("cat", f"{shard}#a.txt").out == b"whole"
    assert run("cat", f"{shard}#b.txt").code == 3


@pytest.mark.parametrize(
    ("payload", "is_text"),
    [
        (b"", True),
        ("plain\r\n\ttext, 宽字符\u3000\n".encode(), True),
        (b"\xef\xbb\xbfwith a mark", True),
        (b"\x1b[2J", False),
        (b"a\rb", False),
        (b"a\0b", False),
        (b"\xff\xd8\xff", False),
        ("\u202egnp".encode(), False),
        (b"x" * (4 << 20), True),
        (b"x" * ((4 << 20) + 1), False),
    ],
)
def test_a_terminal_is_given_plain_text_alone(payload, is_text):
    assert is_plain_text(memoryview(payload)) == is_text


@pytest.mark.slow
def test_a_terminal_is_spared_binary_data_unless_forced():
    code, shown = run_at_terminal("cat", f"{PHOTOS}#0002-rocket.txt")
    assert (code, shown) == (0, "a rocket on its launch pad under a clear sky\r\n")
    code, shown = run_at_terminal("cat", f"{PHOTOS}#0002-rocket.jpg")
    assert code == 2
    assert "34,955 bytes that are no plain text" in shown
    assert "--force" in shown


@pytest.mark.slow
def test_force_prints_binary_data_to_a_terminal(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("k.bin", b"\x07bell")])
    assert run_at_terminal("cat", f"{shard}#k.bin", "--force") == (0, "\x07bell")
