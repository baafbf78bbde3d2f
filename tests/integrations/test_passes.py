from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import MissingExtraError, StateError
from shardset.integrations.passes import MAX_WORKERS, Passes


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="what is said where torch is missing")
def test_without_torch_the_datasets_for_it_name_the_extra():
    with pytest.raises(MissingExtraError, match="needs torch") as caught:
        importlib.import_module("shardset.integrations.torch")
    assert caught.value.extra == "torch"
    assert "shardset[torch]" in caught.value.hint


def test_passes_of_one_process_are_of_one_epoch_after_the_other():
    passes = Passes(3)
    assert [passes.begin().epoch for _ in range(3)] == [3, 4, 5]
    passes.move(1)
    assert (passes.epoch, passes.begin(), passes.begin()) == (1, (1, None), (2, None))


def test_a_state_is_for_one_pass():
    passes = Passes()
    passes.move(4, b"state")
    assert passes.has_state
    assert passes.begin() == (4, b"state")
    assert not passes.has_state
    assert passes.begin() == (5, None)
    passes.move(4, b"other")
    assert [passes.join(worker, 77) for worker in (1, 0)] == [(4, b"other")] * 2
    assert not passes.has_state
    assert [passes.join(worker, 78) for worker in (1, 0)] == [(5, None)] * 2
    with pytest.raises(StateError, match="1,048,577 bytes"):
        passes.move(0, bytes((1 << 20) + 1))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_all_workers_of_a_pass_agree_on_its_epoch_whoever_comes_first(history, chance):
    passes = Passes(10)
    epoch = 10
    for base_seed, (workers, times, is_given_up) in enumerate(history):
        for _ in range(times):  # workers that are kept have the base seed of their first pass
            come = chance.sample(range(workers), workers)
            assert {passes.join(worker, base_seed).epoch for worker in come} == {epoch}
            epoch += 1
        if is_given_up:  # before all of its workers have begun
            some = chance.sample(range(workers), chance.randint(1, workers))
            assert {passes.join(worker, base_seed).epoch for worker in some} == {epoch}
            epoch += 1


def test_workers_with_states_of_their_own_agree_too():
    passes = Passes()
    assert passes.join(0, 5, own=3) == (3, None)
    assert passes.join(1, 5, own=3) == (3, None)
    with pytest.raises(StateError, match="different epochs: 2, and 3"):
        passes.join(2, 5, own=2)
    assert passes.join(0, 6).epoch == 4


def test_a_worker_of_a_pass_that_was_given_up_does_not_take_the_next_ones_state():
    passes = Passes()
    passes.move(1, b"first")
    assert passes.join(0, 5) == (1, b"first")
    passes.move(2, b"second")
    with pytest.raises(StateError, match="another state was loaded"):
        passes.join(1, 5)
    assert passes.join(1, 6) == (2, b"second")


def test_more_workers_than_there_is_room_for_are_refused():
    passes = Passes()
    assert passes.join(MAX_WORKERS - 1, 1).epoch == 0
    with pytest.raises(ValueError, match="at most 1024 workers"):
        passes.join(MAX_WORKERS, 1)


def test_a_copy_that_goes_elsewhere_counts_by_itself():
    passes = Passes()
    passes.begin()
    copy = pickle.loads(pickle.dumps(passes))
    assert (copy.begin(), passes.begin()) == ((1, None), (1, None))
    passes.move(7, b"state")
    copy = pickle.loads(pickle.dumps(passes))
    assert (copy.begin(), copy.begin()) == ((7, b"state"), (8, None))
    assert passes.has_state


def join_all(passes, worker, seeds, queue):
    queue.put([passes.join(worker, seed) for seed in seeds])


@pytest.mark.slow
@pytest.mark.parametrize("method", [*multiprocessing.get_all_start_methods()])
def test_processes_share_the_passes_however_they_start(method):
    passes = Passes(2)
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    seeds = [random.getrandbits(64) for _ in range(20)]
    passes.move(2, b"state")
    processes = [context.Process(target=join_all, args=(passes, worker, seeds, queue)) for worker in range(3)]
    for process in processes:
        process.start()
    found = [queue.get() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert found[0] == found[1] == found[2] == [(2, b"state"), *((epoch, None) for epoch in range(3, 22))]
    assert passes.epoch == 22


@pytest.mark.skipif(sys.platform == "win32", reason="there is no file there")
def test_the_memory_leaves_no_file_and_no_handle():
    before = len([*Path("/dev/fd").iterdir()])
    passes = Passes()
    assert passes.begin().epoch == 0
    del passes
    assert len([*Path("/dev/fd").iterdir()]) == before
