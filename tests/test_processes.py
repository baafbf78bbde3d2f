from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from shardset.processes import interrupts_held

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal masks")


@POSIX
@pytest.mark.parametrize("sender", ["this thread", "another process", "another thread"])
def test_an_interrupt_is_held_until_what_must_not_break_is_done(sender):
    steps = []

    def go():
        with interrupts_held():
            if sender == "this thread":
                signal.raise_signal(signal.SIGINT)
            elif sender == "another process":
                os.kill(os.getpid(), signal.SIGINT)  # to a thread that lets it through, if there is one
            else:
                thread = threading.Thread(target=signal.pthread_sigmask, args=(signal.SIG_UNBLOCK, {signal.SIGINT}))
                thread.start()
                thread.join()
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            steps.append("done")
        steps.append("never")

    with pytest.raises(KeyboardInterrupt):
        go()
    assert steps == ["done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt_while_held(steps):
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        steps.append("held")
    steps.append("never")


@POSIX
def test_a_handler_of_the_program_is_called_and_put_back(monkeypatch):
    came = []

    def handler(number, frame):
        came.append((number, frame is not None))

    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [(signal.SIGINT, True)]
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    # Where there are no masks, as on Windows, this thread is still left alone.
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(KeyboardInterrupt):
        interrupt_while_held(came)
    assert came[-1] == "held"


@POSIX
def test_in_another_thread_interrupts_are_held_from_workers_alone():
    seen = []

    def go():
        with interrupts_held():
            seen.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        seen.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert seen == [True, False]
