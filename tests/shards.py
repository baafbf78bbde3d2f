"""Makes shards for tests, and reads them with Python's tarfile, which shares no code with the readers under test."""

from __future__ import annotations

import io
import os
import re
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

from shardset.dataset.opening import discover_dataset
from shardset.errors import TransferError
from shardset.storage import LocalStore


class Part(NamedTuple):
    """A member of a sample as tarfile sees it. `suffix` is in lower case."""

    suffix: str
    name: str
    offset: int
    payload: bytes


class Expected(NamedTuple):
    """A sample as webdataset would group it."""

    key: str
    parts: tuple[Part, ...]

    @property
    def fields(self):
        """The payloads by suffix."""
        return {part.suffix: part.payload for part in self.parts}


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """Let catalogs made on the way go to a folder of the test's own, in each test of a module that imports this."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SHARDSET_CACHE", str(folder))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of flushes to a real disk are most of the time
    return folder


def tar_bytes(members, *, pax=False):
    """Make a tar of (name, payload) pairs; a payload of None makes a folder."""
    buffer = io.BytesIO()
    kind = tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    with tarfile.open(fileobj=buffer, mode="w", format=kind, encoding="utf-8", errors="surrogateescape") as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.mtime = 1.5 if pax else 0  # a fraction makes a PAX header before every member
            if payload is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    return buffer.getvalue()


def write_shard(path, members, *, pax=False):
    """Write a tar of (name, payload) pairs, and make the folders that it lies in."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, pax=pax))
    return path


def make_members(count, *, prefix="", fields=("jpg", "json", "txt"), start=0):
    """Name the members of samples ``00000000`` on, each with a payload that no other member has."""
    members = []
    for number in range(start, start + count):
        for field in fields:
            name = f"{prefix}{number:08d}.{field}"
            payload = f'{{"caption": "{name}"}}' if field == "json" else f"{name} " + "x" * (number % 7)
            members.append((name, payload.encode()))
    return members


def write_dataset(folder, *, shards=3, samples=4, fields=("jpg", "json", "txt")):
    """Write shards ``shard-0000.tar`` on, with keys that go on from shard to shard."""
    folder = Path(folder)
    return [
        write_shard(folder / f"shard-{shard:04d}.tar", make_members(samples, fields=fields, start=shard * samples))
        for shard in range(shards)
    ]


def split_name(name):
    """Split a member name by webdataset's rule: (key, suffix in lower case), or None if it is part of no sample."""
    raw = name.encode("utf-8", "surrogateescape")
    if re.match(rb"__[^/]*__(/|$)", raw):
        return None
    match = re.fullmatch(rb"((?:.*/|)[^.]+)\.([^/]*)", raw, re.DOTALL)
    return match and tuple(part.decode("utf-8", "surrogateescape") for part in (match[1], match[2].lower()))


def read_samples(path):
    """Read a tar with tarfile and group its members by webdataset's rule: neighbours of one key."""
    samples = []
    with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as tar:
        for info in tar:
            split = split_name(info.name) if info.isreg() else None
            if split is None:
                continue
            part = Part(split[1], info.name, info.offset_data, tar.extractfile(info).read())
            if samples and samples[-1].key == split[0]:
                samples[-1] = Expected(split[0], (*samples[-1].parts, part))
            else:
                samples.append(Expected(split[0], (part,)))
    return samples


def read_members(path):
    """Read the regular files of a tar with tarfile: payload by name; of equal names the last."""
    with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as tar:
        return {info.name: tar.extractfile(info).read() for info in tar if info.isreg()}


def list_tree(folder):
    """Return what lies in a folder, to show that nothing was written: (mtime, size) by path."""
    entries = {path: path.lstat() for path in sorted(Path(folder).rglob("*"))}
    return {str(path.relative_to(folder)): (status.st_mtime_ns, status.st_size) for path, status in entries.items()}


def replace_file(path, content):
    """Put another file in the place of one, so that it has another identity whatever the clock's steps are."""
    path = Path(path)
    other = path.with_name(f"{path.name}.new")
    other.write_bytes(content)
    other.replace(path)
    later = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(later, later))


# What runs in other processes must be importable there, which test modules are not.


def read_all(dataset):
    """Return keys and payloads of all samples."""
    return [(sample.key, sample.read()) for sample in dataset]


def index_and_read(folder, cache):
    """Make a dataset of a folder, with its catalog in a cache, and read all of it.

    The cache is told, because a process may be forked by a server that began with the environment of another test.
    """
    os.environ["SHARDSET_CACHE"] = cache
    return read_all(discover_dataset(folder))


def send(queue, function, *arguments):
    """Put what a function returns, or raises, into a queue."""
    try:
        queue.put(function(*arguments))
    except Exception as error:  # noqa: BLE001 - it goes to whoever waits
        queue.put(error)


class BrokenStore(LocalStore):
    """A store that cannot open files whose names hold ``broken``; made anew from nothing in another process."""

    def __reduce__(self):
        return BrokenStore, ()

    def open(self, url):
        if "broken" in url:
            raise TransferError("the line was cut", status=503, attempts=4, url=url, hint="try again")
        return super().open(url)
