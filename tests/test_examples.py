"""The programs in examples/, run on the photographs of the demo as their users would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardset import index_dataset

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Three shards of ten photographs, with their indexes."""
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "cache"))
    subprocess.run([sys.executable, EXAMPLES / "demo.py", "--core", "--out", tmp_path / "out"], check=True)
    (folder,) = {path.parent for path in (tmp_path / "out").rglob("photos-*.tar")}
    index_dataset(folder, geometry=True, workers=0)
    return folder


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_loader_goes_on_where_another_one_stopped(source):
    shown = run("use_as_dataloader", source, "--batch-size", 4)
    listed = re.findall(r"^  (\S+): (\d+) bytes$", shown, re.MULTILINE)
    assert len(listed) == 4
    done, total = map(int, re.search(r"after (\d+) of (\d+) files", shown).groups())
    count, size = map(int, re.search(r"the rest: (\d+) files, (\d+) bytes", shown).groups())
    assert (done, done + count) == (4, total)
    payloads = [path.stat().st_size for path in (EXAMPLES / "data").glob("0*")]
    assert (total, size + sum(int(found) for _, found in listed)) == (len(payloads), sum(payloads))


def test_ranges_of_files_are_read_through_all_shards(source):
    names = sorted(path.name for path in (EXAMPLES / "data").glob("0*"))
    shown = run("read_a_range", source, 2, 12, "--then", 0, 2)
    found = re.findall(r"^  (\S+): (\d+) bytes$", shown, re.MULTILINE)
    assert [name for name, _ in found] == names[2:12] + names[:2]
    for name, size in found:
        assert int(size) == (EXAMPLES / "data" / name).stat().st_size


def test_statistics_are_told_from_the_indexes_alone(source):
    files = len(list((EXAMPLES / "data").glob("0*")))
    shown = run("dataset_statistics", source)
    assert shown.startswith(f"3 shards, {files} files, ")
    assert "captions: mixed" in shown


def test_buckets_are_listed_and_batches_hold_one_shape(source):
    shown = run("list_aspect_buckets", source, "--pixels", 512**2)
    assert shown.count("photos-0000") == 3
    batches = shown.split("batches of one shape:\n")[1].splitlines()
    pictures = [path.name for path in (EXAMPLES / "data").glob("0*") if path.suffix not in {".json", ".txt"}]
    assert sorted(re.findall(r"\d{4}-\w+\.\w+", "".join(batches))) == sorted(pictures)
    assert len(batches) == len(set(batches)) < len(pictures)
    assert "webshart://0/0/0001-astronaut.jpg" in shown


def test_captions_are_written_and_their_field_renamed(source, tmp_path):
    captions = tmp_path / "captions.json"
    captions.write_text(json.dumps({"0001-astronaut": ["one", "two"], "0009-moon.jpg": "the moon"}))
    assert run("write_captions", source, captions).endswith("0001-astronaut.jpg: ['one', 'two']\n")
    assert run("write_captions", source, captions, "--rename", "v1").endswith("0001-astronaut.jpg: ['one', 'two']\n")
