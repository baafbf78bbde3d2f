from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from shardset.loading.ranks import Share, find_share, torch_worker


def test_a_process_by_itself_has_everything():
    assert find_share() == Share(0, 1, 0, 1)
    assert Share(2, 4, 1, 8).processes == 32


def test_rank_and_worker_come_from_the_environment(monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "WORKER": "1", "NUM_WORKERS": "8"}.items():
        monkeypatch.setenv(name, value)
    assert find_share() == Share(2, 4, 1, 8)
    monkeypatch.delenv("WORLD_SIZE")
    assert find_share() == Share(0, 1, 1, 8)


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("1", ""), ("2", "2"), ("-1", "2")])
def test_variables_that_mean_nothing_are_refused(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match="RANK"):
        find_share()


def test_torch_is_asked_where_it_is_loaded(monkeypatch):
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda group: 1 if group is None else 0,
        get_world_size=lambda group: 3 if group is None else 2,
    )
    data = SimpleNamespace(get_worker_info=lambda: SimpleNamespace(id=4, num_workers=5))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setitem(sys.modules, "torch.utils.data", data)
    assert find_share() == Share(1, 3, 4, 5)
    assert find_share("group") == Share(0, 2, 4, 5)
    assert torch_worker() == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert find_share()[:2] == (0, 7)
