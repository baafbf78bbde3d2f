"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

DATA = Path(__file__).parent / "data"
FUZZ = os.environ.get("SHARDSET_FUZZ")
QUICK = os.environ.get("SHARDSET_QUICK")  # set by `make check`: the same tests, with fewer made-up inputs each

# The same examples in each ordinary run, so that a failure comes from the change at hand; new ones in `make fuzz`.
settings.register_profile("ordinary", deadline=None, derandomize=True, database=None)
settings.register_profile("fuzz", deadline=None, max_examples=max(100, int(FUZZ or 0) // 20), print_blob=True)
settings.register_profile("quick", deadline=None, derandomize=True, database=None, max_examples=10)
settings.load_profile("fuzz" if FUZZ else "quick" if QUICK else "ordinary")


if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as shells start what runs in the background; some tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    for item in items:
        if "fuzz_count" in item.fixturenames or getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.fuzz)


@pytest.fixture(autouse=True)
def _forget_servers():
    """Forget what servers of a test have asked for: the next one may be given the port of one that asked to wait."""
    yield
    transport = sys.modules.get("shardset.storage.transport")
    if transport is not None and transport._current is not None:
        transport._current.budgets.clear()
        transport._current.reached.clear()


@pytest.fixture(scope="session")
def fuzz_count():
    """How many mutated inputs a mutation test tries."""
    return int(FUZZ or (100 if QUICK else 2000))


@pytest.fixture(scope="session")
def cases():
    """The folder of small tar files whose right answers stand in its expected.json."""
    return DATA / "tar"
