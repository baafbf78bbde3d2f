"""The demo does what the README says of it, twice in a row, and its core without Pillow."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shards import private_cache, read_members  # noqa: F401 - a fixture for all tests below

ROOT = Path(__file__).parents[1]
DATA = ROOT / "examples" / "data"


def demo(*args, cwd, path=()):
    """Run the demo, with folders before all others on its module path, and return code, output and errors."""
    places = [*map(str, path), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "demo.py", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def without_pillow(tmp_path):
    """A folder on the module path in which Pillow looks as if it were not installed."""
    blocked = tmp_path / "blocked" / "PIL"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('no Pillow here')\n", encoding="utf-8")
    return blocked.parent


@pytest.mark.slow
def test_the_demo_makes_shards_and_an_index_and_a_sheet_and_can_be_run_again(tmp_path):
    from PIL import Image

    out = tmp_path / "out"
    code, first, errors = demo("--out", out, cwd=tmp_path)
    assert (code, errors) == (0, "")
    shards = sorted((out / "shards").glob("*.tar"))
    assert [shard.name for shard in shards] == [f"photos-{number:05d}.tar" for number in range(3)]
    packed = {name: payload for shard in shards for name, payload in read_members(shard).items()}
    assert packed == {path.name: path.read_bytes() for path in DATA.glob("0*")}
    assert all(shard.with_suffix(".json").exists() for shard in shards)
    with Image.open(out / "contact-sheet.png") as sheet:
        sheet.load()
        assert sheet.width == 1240
        assert len(sheet.getcolors(1 << 24)) > 10_000
    assert "1  0002-rocket     jpg txt      35000  640x427  a rocket on its launch pad" in first
    assert "10 samples, 469,780 bytes" in first

    before = [(shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards]
    code, second, errors = demo("--out", out, cwd=tmp_path)
    assert (code, errors) == (0, "")
    assert "3 shards unchanged" in second
    assert [(shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards] == before


@pytest.mark.slow
def test_the_commands_that_the_demo_proposes_work(tmp_path):
    _, shown, _ = demo("--out", tmp_path / "out", cwd=tmp_path)
    proposed = re.findall(r"^  (shardset .+)$", shown, re.MULTILINE)
    assert len(proposed) == 4
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for line in proposed:
        command = line.replace("shardset", f"{shlex.quote(sys.executable)} -m shardset", 1)
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "rocket.jpg").read_bytes() == (DATA / "0002-rocket.jpg").read_bytes()


@pytest.mark.slow
def test_without_pillow_the_demo_says_which_extra_brings_it(tmp_path, without_pillow):
    code, shown, errors = demo("--out", tmp_path / "out", cwd=tmp_path, path=[without_pillow])
    assert code == 1
    assert "10 samples, 469,780 bytes" in shown
    assert errors == "demo: the contact sheet is drawn with Pillow - pip install 'shardset[images]'\n"


def test_the_core_of_the_demo_needs_no_pillow_and_compares_every_payload(tmp_path, without_pillow):
    before = sorted(tmp_path.rglob("*"))
    code, shown, errors = demo("--core", cwd=tmp_path, path=[without_pillow])
    assert (code, errors) == (0, "")
    assert "20 payloads are the files that went in, byte for byte" in shown
    assert sorted(tmp_path.rglob("*")) == before
