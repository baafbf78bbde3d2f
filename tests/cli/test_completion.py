from __future__ import annotations

import subprocess
import sys

import pytest

from cli.running import environment


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_every_shell(run, shell):
    done = run("completion", shell)
    assert done.code == 0
    assert "_SHARDSET_COMPLETE" in done.text


def test_another_shell_is_wrong_usage(run):
    done = run("completion", "tcsh")
    assert done.code == 2
    assert "tcsh" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "expected"), [("shardset s", {"show", "stats"}), ("shardset index --ge", {"--geometry"})]
)
def test_what_the_scripts_ask_for_is_answered(typed, expected):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_SHARDSET_COMPLETE": "bash_complete"}
    code = "from shardset.cli import main; main(prog_name='shardset')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(**words), check=True
    )
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == expected
