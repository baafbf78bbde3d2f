"""What the tests beside other packages have in common."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard():
    """Let programs that tests start hear an interrupt, also where a shell started the tests in the background.

    Such a shell has them ignored, a process hands that on to those that it starts, and a test would wait for ever.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
