"""Fixtures of the tests of the command line."""

from __future__ import annotations

import pytest

from cli.running import HOSTILE, PHOTOS, Done
from shards import private_cache, write_shard
from shardset.cli import main

__all__ = ["private_cache"]  # a fixture for all tests below


@pytest.fixture
def run(capfdbinary):
    """Run the program in this process: ``run("ls", folder)``."""

    def call(*args):
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args], prog_name="shardset")
        out, err = capfdbinary.readouterr()
        return Done(int(stop.value.code), out, err.decode())

    return call


@pytest.fixture
def hostile(tmp_path):
    """A shard whose names mean harm."""
    return write_shard(tmp_path / "hostile.tar", HOSTILE)


@pytest.fixture
def photos(tmp_path):
    """A folder with a shard of the ten photographs, without an index."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / PHOTOS.name).write_bytes(PHOTOS.read_bytes())
    return folder
