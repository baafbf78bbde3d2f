"""docs/json.md names exactly the keys that are printed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cli.running import HOSTILE, PHOTOS, ROOT
from shards import write_shard
from shardset.formats.example import encode_example, encode_sequence_example
from shardset.storage import LocalStore
from shardset.storage.cache import CachedStore
from tfrecords import record_bytes

BY_NAME = {"members", "findings", "shards[].counts", "shards[].check.counts"}  # objects whose keys are values


def documented():
    """Return the keys of each section of the page."""
    sections = re.split(r"^## ", (ROOT / "docs" / "json.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        section.splitlines()[0]: set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)) for section in sections
    }


def paths(value, path=""):
    """Yield the path of every leaf."""
    if isinstance(value, dict):
        for key, child in value.items():
            name = "*" if path in BY_NAME else key
            yield from paths(child, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for child in value:
            yield from paths(child, f"{path}[]")
    else:
        yield path


@pytest.fixture
def sources(tmp_path):
    """Folders of which one has everything that can be known, and one names that are not UTF-8, damage and more."""
    good = tmp_path / "good"
    good.mkdir()
    (good / PHOTOS.name).write_bytes(PHOTOS.read_bytes())
    odd = tmp_path / "odd\udcff"
    hostile = write_shard(odd / "h\udcffostile.tar", [*HOSTILE, ("bad\udcff.jpg", b"")])
    damaged = write_shard(odd / "damaged.tar", [("a.txt", b"x"), ("b.txt", bytes(2000))])
    damaged.write_bytes(damaged.read_bytes()[:2000])
    return good, odd, hostile, good / PHOTOS.name


def cache_runs(run, folder):
    """Look at a cache of two shards, of which one is damaged."""
    cache = folder / "cache"
    store = CachedStore(LocalStore(), cache, limit=1 << 20)
    for name in ("a.tar", "b.tar"):
        (folder / name).write_bytes(name.encode() * 100)
        store.read(str(folder / name), 0, 1)
    store.close()
    listed = [run("cache", "ls", cache, "--json")]
    first = listed[0].documents[0]["file"]
    (cache / first).write_bytes(b"x" + (cache / first).read_bytes()[1:])
    return {
        "shardset cache ls --json": listed,
        "shardset cache verify --json": [run("cache", "verify", cache, "--json")],
        "shardset cache clear --json": [run("cache", "clear", cache, "--json")],
    }


def rewriting_runs(run, folder):
    """Extract, coalesce and repack what is whole, and what is damaged or has no Unicode name."""
    odd = folder / "rewritten"
    hostile = write_shard(odd / "h\udcffostile.tar", [*HOSTILE, ("bad\udcff.jpg", b"")])
    damaged = write_shard(
        folder / "cut" / "damaged.tar", [("a b.jpg", b"x"), ("a b.jpg", b"y"), ("c.jpg", bytes(2000))]
    )
    damaged.write_bytes(damaged.read_bytes()[:3500])
    unsaid = write_shard(folder / "unsaid" / "a.tar", [("bad\udcff.jpg", b""), ("bad\udcff.json", b"{")])
    skipping = ("--on-error", "skip", "--json")
    return {
        "shardset extract-metadata --json": [
            run("extract-metadata", "--source", source, "--destination", folder / "x", *skipping)
            for source in (odd, damaged)
        ],
        "shardset optimize-captions --json": [
            run("optimize-captions", "--source", hostile, "--destination", folder / "y", "--json"),
            run("optimize-captions", "--source", unsaid, "--destination", folder / "w", "--json"),
        ],
        "shardset optimize-dataset --json": [
            run("optimize-dataset", "--source", damaged.parent, "--destination", folder / "z", "--json")
        ],
    }


def record_runs(run, folder):
    """Look at records that are Examples, SequenceExamples, neither, and damaged."""
    folder = folder / "r\udcffecords"
    folder.mkdir()
    example = encode_example({"a": [1.5], "none": None, "text": ["x"], "empty": np.zeros(0, np.int64)})
    sequence = encode_sequence_example({"id": [1]}, {"steps": [[1], [2]]})
    content = record_bytes([example, sequence, b"{}", b"\xff\0\xff"])
    shard, damaged, opaque = (folder / f"{name}\udcff.tfrecord" for name in "abc")
    shard.write_bytes(content)
    damaged.write_bytes(content[:-1])
    opaque.write_bytes(record_bytes([b"{}"]))
    only = folder / "only.tfrecord"
    only.write_bytes(record_bytes([example, sequence]))
    return {
        "shardset show TFRECORD#NUMBER --json": [run("show", f"{shard}#{number}", "--json") for number in range(4)],
        "shardset show TFRECORD --json": [run("show", path, "--json") for path in (shard, damaged, opaque)],
        "shardset show --schema SOURCE --json": [
            run("show", "--schema", path, "--json") for path in (only, folder / "*only*")
        ],
        "listed": run("ls", shard, "--json"),
    }


def converting_runs(run, folder):
    """Convert what has files of no sample and names that are not UTF-8."""
    source = folder / "to convert\udcff"
    write_shard(source / "h\udcffostile.tar", [("a.txt", b"1"), ("README", b"of no sample")])
    out = folder / "convert\udcffed"
    return {"shardset convert SOURCE... -o OUT --json": [run("convert", source, "-o", out, "--json")]}


def checking_runs(run, folder):
    """Check and fix damage, in names that are not UTF-8, and a set that is not whole."""
    folder = folder / "ch\udcffeck"
    folder.mkdir()
    content = bytearray(record_bytes([b"x" * 100] * 20))
    content[500] ^= 1
    (folder / "a\udcff-00000-of-00002.tfrecord").write_bytes(content)
    fixed = folder / "fixed\udcff"
    fixed.mkdir()
    several = folder.with_name("sev\udcfferal")
    several.mkdir()
    (several / "a.tfrecord").write_bytes(content)
    (several / "p\udcff.tfrecord").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    return {
        "shardset check SOURCE --json": [run("check", folder, "--json")],
        "shardset fix SOURCE --json": [
            run("fix", folder / "a\udcff-00000-of-00002.tfrecord", "-o", fixed / "a.tfrecord", "--json"),
            run("fix", several, "-o", fixed / "several", "--json"),
        ],
    }


def test_the_keys_that_are_printed_are_those_of_the_page(run, sources, tmp_path):
    good, odd, hostile, shard = sources
    recorded = record_runs(run, tmp_path)
    listed = recorded.pop("listed")
    indexing = [run("index", good, "--geometry", "--json"), run("index", odd, "--on-error", "skip", "--json")]
    runs = {
        "shardset ls SHARD --json": [run("ls", shard, "--json"), run("ls", hostile, "--json"), listed],
        "shardset ls SOURCE --json": [run("ls", good, "--json"), run("ls", odd, "--json")],
        "shardset show SHARD#KEY --json": [
            run("show", f"{hostile}#{key}", "--json") for key in ("bad\udcff", "apart", "宽字符")
        ],
        "shardset show SHARD --json": [run("show", shard, "--json"), run("show", hostile, "--json")],
        "shardset stats SOURCE --json": [run("stats", good, "--json"), run("stats", odd, "--json")],
        "shardset order SOURCE --json": [run("order", odd, "--json")],
        "shardset order --explain --json": [
            run("order", good, "--explain", "--json"),
            run("order", odd, "--explain", "--json"),
        ],
        "shardset index SOURCE --json": indexing,
        **recorded,
        **converting_runs(run, tmp_path),
        **checking_runs(run, tmp_path),
        **cache_runs(run, tmp_path),
        **rewriting_runs(run, tmp_path),
    }
    page = documented()
    assert set(page) == set(runs)
    for section, several in runs.items():
        printed = set()
        for done in several:
            finds = any(f" {command} " in section for command in ("verify", "check", "fix"))
            assert done.code in ({1, 3} if finds else {0}), done.err
            is_list = " ls " in section or " order SOURCE " in section
            for document in done.documents if is_list else [done.document]:
                printed |= set(paths(document))
        # An object or a list that is null as a whole says nothing of what it holds.
        nulls = {path for path in printed if any(key.startswith((f"{path}.", f"{path}[")) for key in page[section])}
        assert printed - nulls == page[section], section


def test_every_command_that_prints_json_says_where_it_is_described(run):
    caches = ("cache ls", "cache clear", "cache verify")
    for command in (
        *("index", "ls", "show", "stats", "order"),
        *caches,
        "extract-metadata",
        "optimize-captions",
        "optimize-dataset",
    ):
        assert "docs/json.md" in run(*command.split(), "--help").text
