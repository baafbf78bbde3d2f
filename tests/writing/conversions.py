"""Inputs of conversions, the same on every machine. What webshart 0.6.0 made of them is in tests/data/webshart."""

from __future__ import annotations

import json
import tarfile

from shards import tar_bytes

LOOSE = {
    "a/1.jpg": b"one" * 100,
    "a/1.txt": "  a café \n".encode(),
    "a/2.png": b"two" * 200,
    "a/2.json": b'{"caption": " a thing ", "tags": [1, {"deep": true}]}',
    "a/3.webp": b"three" * 300,
    "b.v1/4.jpg": b"four" * 400,
    "b.v1/4.json": b'["x", {"y": 1.5}]',
    "b.v1/4.txt": b"the text goes before",
    "c.mp4": b"five" * 50,
    "c.txt": b'{"scene": {"shot": 2}}',
    "notes.md": b"of no interest",
}
LEGACY = {
    "first.tar": [
        ("a_red_car.jpg", b"car" * 200),
        ("sub/blue__.png", b"blue" * 300),
        ("note.txt", b"a text"),
        (".hid.png", b"hid"),
    ],
    "more/second.tar": [("long_" * 30 + ".jpg", b"long" * 100), ("ünï_code.jpg", b"u" * 700), ("z.txt", b"last")],
}
LIMIT = 3000
"""Bytes of a shard, so that there are several."""


def write_loose(folder, files=LOOSE):
    """Write loose files."""
    for name, payload in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)
    return folder


def write_legacy(folder, archives=LEGACY):
    """Write archives."""
    for name, members in archives.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tar_bytes(members))
    return folder


def tree(folder):
    """Return all files in a folder: bytes by path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_shards(folder):
    """Return what is in all shards of a folder, in order, as tarfile and json see it: (name, payload, entry)."""
    found = []
    for path in sorted(folder.glob("shard-*.tar")):
        document = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        files = document["files"]
        entries = files if isinstance(files, list) else list(files.values())
        by_offset = {entry["offset"]: entry for entry in entries}
        with tarfile.open(path) as tar:
            members = [(info.name, tar.extractfile(info).read(), by_offset[info.offset_data]) for info in tar]
        assert len(members) == len(entries)
        assert all(len(payload) == entry["length"] for _, payload, entry in members)
        found += members
    return found
