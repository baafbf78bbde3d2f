from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time

import pytest

from shardset.loading.one_ahead import OneAhead
from shardset.storage.threads import Job, look_up


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Task:
    """Tells which threads have done it, and waits in those of the pool until it may go on, or is given up."""

    def __init__(self, error=None):
        self.threads = []
        self.error = error
        self.may_go_on = threading.Event()
        self.is_given_up = False
        self.here = threading.get_ident()

    def __call__(self):
        self.threads.append(threading.get_ident())
        if threading.get_ident() != self.here:
            try:
                while not self.may_go_on.wait(0.005):
                    look_up()
            except BaseException:
                self.is_given_up = True
                raise
        if self.error is not None:
            raise self.error
        return len(self.threads)

    @property
    def is_under_way(self):
        return len(self.threads) == 1


def test_what_was_begun_is_given_for_its_place_and_done_once():
    ahead, task = OneAhead(), Task()
    ahead.begin(("a", range(3)), task)
    ahead.begin(("a", range(3)), task)  # it is under way
    until(lambda: task.is_under_way)
    assert ahead.peek(("a", range(3))) is None
    task.may_go_on.set()
    until(lambda: ahead.peek(("a", range(3))) == 1)
    assert ahead.peek(("a", range(2))) is None
    assert ahead.take(("a", range(3)), task) == 1
    assert len(task.threads) == 1
    assert task.threads[0] != task.here
    assert ahead.peek(("a", range(3))) is None
    assert ahead.take(("a", range(3)), task) == 2
    assert task.threads[1] == task.here


def test_what_was_begun_for_another_place_is_given_up():
    for leave in (
        lambda ahead: ahead.take(2, lambda: None),
        lambda ahead: ahead.begin(2, lambda: None),
        lambda ahead: ahead.drop(),
    ):
        ahead, task = OneAhead(), Task()
        ahead.begin(1, task)
        until(lambda task=task: task.is_under_way)
        leave(ahead)
        until(lambda task=task: task.is_given_up)
        assert ahead.peek(1) is None


def test_whoever_is_gone_leaves_nothing_at_work():
    ahead, task = OneAhead(), Task()
    ahead.begin(1, task)
    until(lambda: task.is_under_way)
    del ahead
    gc.collect()
    until(lambda: task.is_given_up)


def test_an_error_is_raised_where_its_result_is_asked_for_and_the_next_call_tries_again():
    ahead, task = OneAhead(), Task(OSError("the line was cut"))
    task.may_go_on.set()
    ahead.begin(1, task)
    until(ahead._begun.job.done)
    assert ahead.peek(1) is None
    with pytest.raises(OSError, match="cut"):
        ahead.take(1, task)
    assert len(task.threads) == 1
    task.error = None
    assert ahead.take(1, task) == 2


def test_an_interrupt_while_waiting_gives_up_what_is_waited_for(monkeypatch):
    ahead, task = OneAhead(), Task()
    ahead.begin(1, task)
    until(lambda: task.is_under_way)

    def result(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Job, "result", result)
        with pytest.raises(KeyboardInterrupt):
            ahead.take(1, task)
    until(lambda: task.is_given_up)
    assert ahead.take(1, task) == 2


def test_what_was_given_up_by_others_is_done_by_whoever_asks():
    ahead, task = OneAhead(), Task()
    ahead.begin(1, task)
    until(lambda: task.is_under_way)
    ahead._begun.jobs.give_up()
    until(lambda: task.is_given_up)
    assert ahead.take(1, task) == 2


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda ahead: pickle.loads(pickle.dumps(ahead))])
def test_a_copy_has_nothing_ahead(make):
    ahead, task = OneAhead(), Task()
    ahead.begin(1, task)
    until(lambda: task.is_under_way)
    made = make(ahead)
    assert made.take(1, lambda: "anew") == "anew"
    del made
    gc.collect()
    assert not task.is_given_up
    task.may_go_on.set()
    assert ahead.take(1, task) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_waits_for_no_thread_of_its_parent():
    ahead, task = OneAhead(), Task()
    ahead.begin(1, task)
    until(lambda: task.is_under_way)
    ours, theirs = os.pipe()
    # Where the fork strikes while a thread holds the job's lock, the child has it locked for ever.
    with ahead._begun.job._condition:
        child = os.fork()
        if not child:
            threading.Thread(target=_in_child, args=(ahead, theirs), daemon=True).start()
            time.sleep(10)
            os._exit(1)
    os.close(theirs)
    os.waitpid(child, 0)
    assert os.read(ours, 100) == b"None anew"
    os.close(ours)
    assert not task.is_given_up
    task.may_go_on.set()
    assert ahead.take(1, task) == 1


def _in_child(ahead, pipe):
    """Use what the parent has begun, in a thread that does not hold the lock, and end the process."""
    found = f"{ahead.peek(1)} {ahead.take(1, lambda: 'anew')}"
    ahead.begin(1, lambda: None)
    ahead.drop()
    os.write(pipe, found.encode())
    os._exit(0)
