from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time

import click
import pytest

from cli.running import environment, program, run_at_terminal, run_process
from shards import write_dataset, write_shard
from shardset.cli import main
from shardset.cli.failures import ExitCode, describe
from shardset.cli.program import COMMANDS
from shardset.errors import (
    AccessError,
    ChangedError,
    ChecksumError,
    DecodeError,
    IndexFileError,
    MissingExtraError,
    MissingFieldError,
    NotFoundError,
    StateError,
    StorageError,
    TransferError,
    TruncatedError,
)

needs_terminal = pytest.mark.skipif(sys.platform == "win32", reason="terminals of this kind are Unix's")


def commands():
    context = click.Context(main, info_name="shardset")
    return {name: main.get_command(context, name) for name in main.list_commands(context)}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_begins_with_an_example_and_gives_two_to_four(run, name):
    done = run(name, "--help")
    assert done.code == 0
    assert done.lines[0][0].startswith(f"Example: shardset {name} ") or name == "completion"
    assert 2 <= len(commands()[name].examples) <= 4
    assert all("shardset" in line and purpose for line, purpose in commands()[name].examples)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_of_each_what_its_own_help_begins_with(name):
    assert COMMANDS[name] == commands()[name].help.split("\n\n")[0].strip()


def test_the_list_of_commands_is_printed_without_loading_one():
    code = "import sys, shardset.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert "completion" in done.stdout
    assert not re.search(r"'(numpy|pyarrow|rich|PIL|shardset\.cli\.ls)'", done.stdout)


def test_no_arguments_print_the_help_and_are_wrong_usage():
    done = run_process()
    assert "Commands:" in done.text + done.err
    assert done.code in {0, 2}  # click changed its mind in 8.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "no such command 'frobnicate'"),
        (["ls"], "missing argument 'SOURCE'"),
        (["ls", "--frobnicate", "x"], "no such option"),
        (["ls", "--limit", "-1", "x"], "invalid value for"),
        (["show", "gopher://host/a.tar"], "no store for this"),
        (["index", "gopher://host/"], "no store for this"),
        (["cat", "a.tar"], "names no payload"),
    ],
)
def test_wrong_usage_is_two_lines_and_exit_code_2(run, arguments, message):
    done = run(*arguments)
    assert done.code == 2
    assert done.out == b""
    first, second = done.err.splitlines()
    assert first.startswith("shardset: ")
    assert message in first
    assert second.startswith("hint: ")


@pytest.mark.parametrize("command", ["ls", "show", "stats", "index"])
def test_a_missing_source_is_two_lines_and_exit_code_3(run, tmp_path, command):
    done = run(command, tmp_path / "nowhere")
    assert (done.code, done.out) == (3, b"")
    first, second = done.err.splitlines()
    assert first.startswith("shardset: no such file")
    assert "nowhere" in first
    assert second.startswith("hint: ")


@pytest.mark.parametrize("command", ["ls", "stats", "index"])
def test_a_folder_without_shards_is_exit_code_3(run, tmp_path, command):
    done = run(command, tmp_path)
    assert done.code == 3
    assert "no shards found" in done.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no bytes"),
        (b"\x1f\x8b\x08" + bytes(600), "compressed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "LFS pointer"),
        (b"<!DOCTYPE html><html>" + bytes(600), "no tar"),
    ],
)
@pytest.mark.parametrize("command", ["ls", "show", "stats", "index"])
def test_what_is_no_shard_is_exit_code_3_with_the_place_and_a_hint(run, tmp_path, command, content, message):
    (tmp_path / "a.tar").write_bytes(content)
    done = run(command, tmp_path / "a.tar")
    assert done.code == 3
    first, second = done.err.splitlines()
    assert message in first
    assert "a.tar at byte 0" in first
    assert second.startswith("hint: ")


def test_no_traceback_is_printed_unless_debug_asks_for_it(run, tmp_path):
    assert "Traceback" not in run("ls", tmp_path / "nowhere").err
    done = run("--debug", "ls", tmp_path / "nowhere")
    assert "Traceback (most recent call last)" in done.err
    assert done.err.splitlines()[-2].startswith("shardset: ")
    assert run("ls", tmp_path / "nowhere", "--debug").err.count("Traceback") >= 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("x"), 3),
        (AccessError("x"), 3),
        (TruncatedError("x"), 3),
        (ChecksumError("x"), 3),
        (MissingFieldError("x"), 3),
        (DecodeError("x"), 3),
        (IndexFileError("x"), 3),
        (StateError("x"), 3),
        (MissingExtraError("x", extra="images"), 3),
        (StorageError("x"), 4),
        (TransferError("x"), 4),
        (ChangedError("x"), 4),
        (FileNotFoundError(errno.ENOENT, "no", "x"), 3),
        (PermissionError(errno.EACCES, "no", "x"), 3),
        (OSError(errno.ENOSPC, "full", "x"), 4),
        (OSError(errno.EIO, "broken", "x"), 4),
        (MemoryError(), 4),
        (TypeError("x"), 70),
        (KeyError("x"), 70),
    ],
)
def test_every_kind_of_error_has_its_exit_code_and_its_text(error, code):
    failure = describe(error)
    assert failure.code == code
    assert failure.what
    assert failure.hint or code == 3


def test_exit_codes_are_the_documented_ones(run):
    listed = run("--help").text
    for code in ExitCode:
        assert re.search(rf"\b{int(code)}\b", listed)


def test_an_unexpected_error_is_called_a_bug(run, monkeypatch):
    def fail(*_):
        raise AssertionError("boom")

    monkeypatch.setattr("shardset.cli.ls.open_source", fail)
    done = run("ls", "x")
    assert done.code == 70
    assert "a bug: AssertionError: boom" in done.err
    assert "--debug" in done.err


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_the_program_quietly(tmp_path):
    shard = write_shard(
        tmp_path / "a.tar", [(f"{n}.bin", bytes(1000)) for n in range(3000)] + [("x.bin", bytes(1 << 20))]
    )
    for arguments in (["ls", shard, "--json"], ["cat", f"{shard}#x.bin"]):
        command = " ".join(f"'{part}'" for part in program(*arguments))
        done = subprocess.run(
            ["bash", "-c", f"{command} | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}"],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk to write to")  # noqa: PTH110
def test_a_full_disk_is_exit_code_4(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("x.bin", bytes(1 << 20))])
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            program("cat", f"{shard}#x.bin"), stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert done.returncode == 4
    assert b"no space left" in done.stderr
    assert b"Traceback" not in done.stderr


@needs_terminal
def test_an_interrupt_is_exit_code_130_without_a_traceback(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("x.bin", bytes(8 << 20))])
    # Nobody reads the pipe to its end, so the program waits in the middle of its work.
    with subprocess.Popen(
        program("cat", f"{shard}#x.bin"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert len(process.stdout.read(10)) == 10
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b"shardset: interrupted\n"


def test_json_goes_to_standard_output_and_remarks_to_standard_error(run, tmp_path):
    first, *_ = write_dataset(tmp_path)
    first.write_bytes(first.read_bytes()[:2300])
    done = run("stats", tmp_path, "--json")
    assert done.document["num_damaged"] == 1
    assert "1 shard is damaged" in done.err
    assert run("-q", "stats", tmp_path, "--json").err == ""
    assert run("stats", tmp_path, "--json", "-q").err == ""


def test_verbose_says_what_is_done(run, tmp_path):
    write_dataset(tmp_path)
    assert run("ls", tmp_path, "-v").err.startswith("shardset: indexing 3 shards")
    assert run("ls", tmp_path).err == ""


@pytest.mark.slow
@needs_terminal
def test_a_terminal_gets_tables_and_colours_and_progress_and_a_pipe_gets_none(tmp_path):
    write_dataset(tmp_path)
    code, shown = run_at_terminal("index", tmp_path)
    assert code == 0
    assert "indexing" in shown
    assert "\x1b[" in shown
    code, shown = run_at_terminal("ls", tmp_path)
    assert "\x1b[1mshard" in shown
    assert "3 shards, 12 samples" in shown
    done = run_process("index", tmp_path, "--force")
    assert done.code == 0
    assert b"\x1b" not in done.out
    assert done.err == ""


@pytest.mark.slow
@needs_terminal
def test_no_color_is_obeyed(tmp_path):
    write_dataset(tmp_path)
    _, shown = run_at_terminal("-q", "ls", tmp_path, NO_COLOR="1")
    assert "12  jpg json txt" in shown
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", shown)


@pytest.mark.slow
@needs_terminal
@pytest.mark.parametrize("command", ["ls", "show"])
def test_a_hostile_name_sends_no_escape_code_to_a_terminal(hostile, command):
    _, shown = run_at_terminal(command, f"{hostile}#0" if command == "show" else hostile, NO_COLOR="1")
    assert "\x1b" not in shown
    assert "\\x1b[31mred" in shown


@pytest.mark.parametrize("command", ["ls", pytest.param("show", marks=pytest.mark.slow)])
def test_no_name_and_no_encoding_makes_it_crash(hostile, command):
    encoding = "latin-1"
    done = run_process(command, hostile, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert done.code == 0, done.err
    assert b"\x1b" not in done.out
    assert b"caf\\xe9" in done.out or command == "ls"
    document = run_process(command, hostile, "--json", PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert document.code == 0, document.err
    assert document.documents if command == "ls" else document.document  # JSON is UTF-8 wherever it goes


@pytest.mark.parametrize(("name", "meant"), [("count", "stats"), ("schema", "show --schema"), ("verify", "check")])
def test_the_names_that_other_programs_have_for_commands_lead_to_ours(run, name, meant):
    done = run(name, "x")
    assert done.code == 2
    assert f"hint: shardset {meant}" in done.err
