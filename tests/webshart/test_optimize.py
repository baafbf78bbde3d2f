from __future__ import annotations

import inspect

import pytest

from shardset.webshart import optimize
from shardset.writing.optimize import optimize_dataset
from writing.conversions import read_shards, write_loose


def test_it_is_the_same_function_with_the_same_arguments(tmp_path):
    assert inspect.signature(optimize.optimize_dataset) == inspect.signature(optimize_dataset)
    result = optimize.optimize_dataset(write_loose(tmp_path / "in"), destination=tmp_path / "out")
    assert result["status"] == "complete"
    assert len(read_shards(tmp_path / "out" / "webshart")) == 5


def test_what_is_put_in_the_place_of_require_hub_is_used(tmp_path, monkeypatch):
    class SeenError(Exception):
        pass

    def require():
        raise SeenError

    monkeypatch.setattr(optimize, "_require_hub", require)
    with pytest.raises(SeenError):
        optimize.optimize_dataset(write_loose(tmp_path / "in"), push_to_hub="me/data")


def test_names_of_the_module_that_programs_use_are_there():
    assert optimize.STATE_FILENAME == ".webshart-optimize-state.json"
    assert optimize.STATE_SCHEMA_VERSION == 1
    assert tuple(sorted(optimize.DEFAULT_PAYLOAD_EXTENSIONS)) == optimize.DEFAULT_PAYLOAD_EXTENSIONS
