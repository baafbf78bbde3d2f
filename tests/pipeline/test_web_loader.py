"""What WebLoader does around torch's DataLoader. With torch itself it is tested in peers/test_with_torch.py."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing import get_context

import pytest

from shardset.errors import MissingExtraError
from shardset.loading import ranks
from shardset.pipeline.epochs import Board
from shardset.pipeline.mixing import RoundRobin
from shardset.pipeline.pipeline import DataPipeline
from shardset.pipeline.web_loader import LoaderStage, WebLoader


class Numbers:
    """A dataset that tells its epoch in what it gives, counted as a pipeline counts it."""

    def __iter__(self):
        return iter(range(4))


class Loader:
    """As much of a DataLoader as the stage sees, with one worker in this process."""

    def __init__(self, dataset, num_workers=0):
        self.dataset = dataset
        self.num_workers = num_workers
        self.workers = []  # epochs that the dataset was in

    def __iter__(self):
        board = getattr(self.dataset, "_board", None)
        if self.num_workers and board is not None:
            self.workers.append(board.take(0))
            return iter([("epoch", self.workers[-1], number) for number in range(4)])
        return iter(self.dataset)


class Wrapped(WebLoader):
    """A WebLoader around a loader that is given."""

    def __init__(self, loader):
        DataPipeline.__init__(self, LoaderStage(loader))


def epochs(samples):
    return [epoch for _, epoch, _ in samples]


def test_without_torch_the_extra_is_named():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from shardset.pipeline.web_loader import WebLoader\n"
        "from shardset.errors import MissingExtraError\n"
        "try:\n    WebLoader([1], batch_size=None)\n"
        "except MissingExtraError as error:\n    print(error.extra, error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("torch ")
    assert "pip install 'shardset[torch]'" in printed
    assert issubclass(MissingExtraError, ImportError)


def test_workers_are_told_the_epoch_before_each_pass():
    loader = Wrapped(Loader(DataPipeline(Numbers()), 1))
    assert [epochs(loader) for _ in range(3)] == [[number] * 4 for number in range(3)]


def test_a_worker_that_missed_an_epoch_is_brought_along():
    inner = Loader(DataPipeline(Numbers()), 1)
    loader = Wrapped(inner)
    list(loader)
    inner.dataset._board.take(1)  # another worker, that ran twice as often
    inner.dataset._board.take(1)
    list(loader)
    assert inner.dataset._board.peek(0) == 2
    assert inner.dataset._board.peek(1) == 1  # not begun in this pass: its next is what the pass was


def test_an_epoch_can_be_set_on_the_loader_or_on_its_dataset():
    inner = Loader(DataPipeline(Numbers()), 1)
    loader = Wrapped(inner)
    loader.set_epoch(7)
    assert epochs(loader) == [7] * 4
    inner.dataset.set_epoch(3)
    assert epochs(loader) == [3] * 4
    assert epochs(loader) == [4] * 4


def test_each_pass_in_an_epoch_that_is_longer_than_the_data_is_another_one():
    loader = Wrapped(Loader(DataPipeline(Numbers()), 1)).with_epoch(10)
    assert epochs(loader) == [0] * 4 + [1] * 4 + [2] * 2
    assert epochs(loader) == [3] * 4 + [4] * 4 + [5] * 2


def test_a_dataset_in_this_process_counts_by_itself():
    inner = Loader(DataPipeline(Numbers()))
    loader = Wrapped(inner)
    for _ in range(3):
        assert list(loader) == [0, 1, 2, 3]
    assert inner.dataset._board.peek() == 3


def test_datasets_that_know_nothing_of_epochs_work_too():
    loader = Wrapped(Loader(Numbers(), 1))
    loader.set_epoch(3)
    assert list(loader.listed(3)) == [[0, 1, 2], [3]]
    assert not loader.report()
    state = loader.state_dict()
    assert state["dataset_epoch"] is None
    loader.load_state_dict(state)


@pytest.mark.parametrize("at", range(11))
def test_a_state_goes_on_in_the_epoch_of_the_dataset(at):
    def make():
        return Wrapped(Loader(DataPipeline(Numbers()), 1)).with_epoch(10)

    loader = make()
    loader.set_epoch(5)
    whole, then = list(loader), list(loader)
    loader = make()
    loader.set_epoch(5)
    samples = iter(loader)
    head = [next(samples) for _ in range(at)]
    fresh = make()
    fresh.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert head + list(fresh) == whole
    assert list(fresh) == then


def test_the_report_has_what_the_dataset_left_out():
    loader = Wrapped(Loader(RoundRobin([[1], [1, 2, 3]])))
    assert list(loader) == [1, 1]
    assert loader.report().counts == {"cut_off": 2}
    assert Wrapped(Loader(DataPipeline(Numbers()))).select(lambda _: False).report().counts == {}
    selected = Wrapped(Loader(DataPipeline(Numbers()))).select(lambda number: number > 1)
    assert list(selected) == [2, 3]
    assert selected.report().counts == {"select": 2}


def test_loader_and_dataset_are_at_hand():
    inner = Loader(DataPipeline(Numbers()))
    assert Wrapped(inner).loader is inner
    assert Wrapped(inner).shuffle(3).dataset is inner.dataset


def test_a_mix_is_a_first_stage():
    pipeline = DataPipeline(RoundRobin([[1, 2], [3, 4]], longest=True)).listed(3)
    assert list(pipeline) == [[1, 3, 2], [4]]
    pipeline.set_epoch(4)
    assert pipeline.stage(0)._board.peek() == 4


def test_one_worker_that_goes_on_from_a_state_leaves_the_others_where_they_are():
    board = Board()
    board.set_own(0, 5)
    assert board.take(0) == 5
    board.set_own(1, 3)
    assert [board.take(worker) for worker in (0, 1, 0, 1, 2, None)] == [6, 3, 7, 4, 0, 0]
    board.set_next(7)
    board.set_own(0, 5)
    assert [board.take(worker) for worker in (0, 0, 1)] == [5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_is_started_afresh_has_the_rank_of_its_parent(monkeypatch, method):
    monkeypatch.setattr(ranks, "_of_parent", [(1, 3)])
    with get_context(method).Pool(1, initializer=repr, initargs=(RoundRobin([[1]]),)) as pool:
        assert pool.apply(ranks.find_share) == (1, 3, 0, 1)
