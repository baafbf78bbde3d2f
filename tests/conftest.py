"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os
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


def pytest_collection_modifyitems(items):
    for item in items:
        if "fuzz_count" in item.fixturenames or getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.fuzz)


@pytest.fixture(scope="session")
def fuzz_count():
    """How many mutated inputs a mutation test tries."""
    return int(FUZZ or (100 if QUICK else 2000))


@pytest.fixture(scope="session")
def cases():
    """The folder of small tar files whose right answers stand in its expected.json."""
    return DATA / "tar"
