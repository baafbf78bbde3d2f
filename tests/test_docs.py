"""Every Python block of the README and of docs/ runs as it stands, and the commands of the page about webshart."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from servers.nginx import serve_nginx
from shardset import TarWriter, index_dataset
from shardset.formats.example import encode_example
from shardset.formats.faults import ERRORS, WARNINGS
from shardset.pipeline.run import CODES
from tfrecords import record_bytes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language, pages):
    block = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for found in block.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield pytest.param(found[1], id=f"{page.name}:{line}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The photographs in shards/, records/ and loose-pairs/ as the pages have them, and what is damaged."""
    photos = sorted((ROOT / "examples" / "data").glob("0*"))
    keys = sorted({path.name.partition(".")[0] for path in photos})
    for number, start in enumerate(range(0, len(keys), 4)):
        shard = tmp_path / "shards" / f"photos-{number:05d}.tar"
        shard.parent.mkdir(exist_ok=True)
        with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
            for path in photos:
                if path.name.partition(".")[0] in keys[start : start + 4]:
                    payload = path.read_bytes()
                    member = tarfile.TarInfo(path.name)
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
    for number in range(3):
        shard = tmp_path / "labelled" / f"images-{number:05d}.tar"
        shard.parent.mkdir(exist_ok=True)
        with TarWriter(shard) as writer:
            for label, path in enumerate([path for path in photos if path.suffix == ".jpg"][number::3]):
                key = path.name.partition(".")[0]
                writer.write({"__key__": key, "jpg": path.read_bytes(), "json": {"name": key}, "cls": label})
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "loose-pairs", ignore=shutil.ignore_patterns("[!0]*"))
    damaged = tmp_path / "damaged" / "photos-00000.tar"
    damaged.parent.mkdir()
    damaged.write_bytes((tmp_path / "shards" / "photos-00000.tar").read_bytes()[:100_000])
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "records").mkdir()
    pictures = [path for path in photos if path.suffix == ".jpg"]
    for shard in range(3):
        examples = [
            encode_example({"image/encoded": [path.read_bytes()], "label": [number], "name": [path.name]})
            for number, path in enumerate(pictures)
        ][shard * 4 : shard * 4 + 4]
        (tmp_path / "records" / f"train-{shard:05d}-of-00003.tfrecord").write_bytes(record_bytes(examples))
    first = (tmp_path / "records" / "train-00000-of-00003.tfrecord").read_bytes()
    (tmp_path / "damaged.tfrecord").write_bytes(first[:5000] + b"!" + first[5001:])
    return tmp_path


@pytest.fixture
def served(folder):
    """The address of a server of that folder, with the indexes of the shards in a folder of their own."""
    index_dataset(folder / "shards", destination=folder / "indexes", workers=0)
    with serve_nginx(folder) as server:
        yield server.url


@pytest.mark.slow
@pytest.mark.parametrize("block", list(blocks("python", PAGES)))
def test_a_block_of_the_documentation_runs(block, folder, request):
    if "https://data.example.org" in block:
        block = re.sub(r"https://data\.example\.org/?", request.getfixturevalue("served"), block)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", list(blocks("sh", [ROOT / "docs" / "webshart.md", ROOT / "docs" / "tfrecord.md"])))
def test_the_commands_of_a_page_run(block, folder):
    index_dataset(folder / "shards", workers=0)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-e", "-c", block],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # What could not be saved is said by the exit code too.
    assert done.returncode == ("shardset fix" in block), done.stderr


def test_the_readme_names_every_page_of_the_documentation():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme]
    assert not missing


def test_every_code_that_is_counted_is_explained():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    counted = set(re.findall(r'(?:report\.add|_pass_over|\.drop)\(\s*"(\w+)"', source)) | WARNINGS | set(ERRORS)
    settled = set(re.findall(r'\.settle\(\s*[^"\n]+,\s*"(\w+)"', source))
    settled.discard("code")  # an attribute that is looked up
    assert settled <= CODES
    for name in ("formats/stream_compression", "storage/file_cache", "pipeline/reading", "pipeline/emitting"):
        text = (ROOT / "src" / "shardset" / f"{name}.py").read_text(encoding="utf-8")
        assert set(re.findall(r'\bcode="(\w+)"', text)) <= CODES, name  # a policy may name each
    counted |= settled | CODES
    assert len(counted) > 30
    names = ("datasets.md", "formats.md", "loading.md", "pipeline.md", "remote.md", "selecting.md", "tfrecord.md")
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    assert not [code for code in sorted(counted) if f"`{code}`" not in pages]
