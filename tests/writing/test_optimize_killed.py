"""A conversion that is killed, at any step and at any byte, is finished by the next run as if nothing had happened."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import pytest

from killing import TESTS, kill_at_every_step
from shardset.writing.optimize import optimize_dataset
from writing.conversions import LIMIT, tree, write_legacy, write_loose

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, and killed by signals")


def convert(folder, source):
    """Do the work that is killed."""
    optimize_dataset(source, destination=folder, max_shard_size_bytes=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_loose, write_legacy])
def test_a_run_killed_at_any_step_or_byte_is_finished_by_the_next(write, tmp_path):
    source = write(tmp_path / "source")
    convert(tmp_path / "expected", str(source))
    expected = tree(tmp_path / "expected")
    folders = tmp_path / "killed"
    folders.mkdir()
    work, sizes = "writing.test_optimize_killed:convert", [0, 1, 100, 511, 512, 700, 2000, 5000, 10_239]
    killed = kill_at_every_step(work, {"source": str(source)}, folders, sizes=sizes)
    assert killed > 60
    seen = [folder for folder in folders.iterdir() if tree(folder) != expected]
    assert len(list(folders.iterdir())) > killed
    assert seen == []


@pytest.mark.slow
def test_a_run_killed_again_and_again_comes_to_its_end(tmp_path):
    chance = random.Random(7)
    files = {f"{number:03d}.jpg": chance.randbytes(3000) for number in range(120)}
    source = write_loose(tmp_path / "source", files)
    convert(tmp_path / "expected", str(source))
    code = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent / 'src')!r}]\n"
    code += "from writing.test_optimize_killed import convert; print(flush=True); convert(*sys.argv[1:])"
    runs = 0
    while True:
        runs += 1
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "killed"), str(source)], stdout=subprocess.PIPE
        ) as run:
            run.stdout.read(1)  # it has begun
            time.sleep(chance.uniform(0.01, 0.2))
            run.kill()
            code_seen = run.wait()
        assert code_seen in {0, -signal.SIGKILL}
        if code_seen == 0:
            break
    assert runs > 1
    assert tree(tmp_path / "killed") == tree(tmp_path / "expected")
