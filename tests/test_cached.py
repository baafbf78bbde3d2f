"""Properties that are worked out once, and by nobody waited for in a forked child."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import pytest

from shardset.cached import cached_property


class Counted:
    """Counts how often its value is worked out."""

    def __init__(self):
        self.count = 0

    @cached_property
    def value(self):
        """What it holds."""
        self.count += 1
        return [self.count]


def test_a_value_is_worked_out_once_for_each_object():
    one, other = Counted(), Counted()
    assert one.value is one.value
    assert (one.count, other.count) == (1, 0)
    assert other.value == [1]
    del one.value
    assert one.value == [2]
    assert Counted.value.__doc__ == "What it holds."
    assert pickle.loads(pickle.dumps(one)).value == [2]


def test_an_error_is_kept_by_nobody():
    class Failing:
        tries = 0

        @cached_property
        def value(self):
            self.tries += 1
            if self.tries == 1:
                raise OSError(5, "no luck")
            return self.tries

    failing = Failing()
    with pytest.raises(OSError, match="no luck"):
        _ = failing.value
    assert failing.value == 2


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_meanwhile_does_not_wait():
    begun, done = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self):
            begun.set()
            done.wait(60)
            return 1

    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    begun.wait(60)
    child = os.fork()
    if child == 0:
        done.set()
        os._exit(Slow().value)
    try:
        end = time.monotonic() + 60
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        done.set()
        thread.join()
        if found[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(found[1]) == 1
