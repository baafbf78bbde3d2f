from __future__ import annotations

import os

import pytest

from shardset.loading import read_ahead
from shardset.loading.read_ahead import ReadAhead, memory_size


def test_a_budget_is_an_eighth_of_the_memory_and_2_gib_at_most(monkeypatch):
    monkeypatch.setattr(read_ahead, "memory_size", lambda: 4 << 30)
    assert ReadAhead().num_bytes == 512 << 20
    monkeypatch.setattr(read_ahead, "memory_size", lambda: 512 << 30)
    assert ReadAhead().num_bytes == 2 << 30
    assert ReadAhead(bytes=12).num_bytes == 12


def test_the_memory_is_that_of_the_machine_or_of_the_control_group(monkeypatch, tmp_path):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_size() <= machine
    limit = tmp_path / "memory.max"

    class Group(type(tmp_path)):
        def __new__(cls, path):
            return limit if path == "/sys/fs/cgroup/memory.max" else tmp_path / "absent"

    monkeypatch.setattr(read_ahead, "Path", Group)
    limit.write_text("123456789\n")
    assert memory_size() == 123456789
    limit.write_text("max\n")
    assert memory_size() == machine
    monkeypatch.delattr(os, "sysconf")
    assert memory_size() == 8 << 30


def test_as_many_threads_decode_as_there_are_processors(monkeypatch):
    assert ReadAhead().num_threads == len(os.sched_getaffinity(0))
    assert ReadAhead(threads=7).num_threads == 7
    monkeypatch.delattr(os, "sched_getaffinity")
    assert ReadAhead().num_threads == os.cpu_count()


@pytest.mark.parametrize("name", ["threads", "bytes", "batches"])
def test_numbers_are_positive(name):
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"{name}={wrong}: it is at least 1"):
            ReadAhead(**{name: wrong})
    with pytest.raises(TypeError):
        ReadAhead(**{name: 1.5})
