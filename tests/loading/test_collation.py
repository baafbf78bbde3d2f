from __future__ import annotations

import numpy as np
import pytest

from shardset.dataset.views import Pack
from shardset.loading.collation import columns_of, packed
from shardset.loading.metrics import Meter, Metrics


def test_samples_become_columns_without_what_they_say_of_themselves():
    samples = [{"x": 1, "y": "a", "__key__": "k", "__seed__": 5}, {"y": "b", "x": 2, "__key__": "l", "__seed__": 6}]
    batch = columns_of(samples)
    assert list(batch) == ["x", "y"]
    assert batch["x"].tolist() == [1, 2]
    assert batch["y"] == ["a", "b"]
    assert columns_of([]) == {}


def test_samples_with_other_names_are_refused():
    with pytest.raises(ValueError, match="sample 'l' differs from others of its batch in 'x', 'z'"):
        columns_of([{"x": 1, "__key__": "k"}, {"z": 2, "__key__": "l"}])


def test_arrays_of_a_pack_come_one_behind_the_other_and_others_in_lists():
    batch = {
        "tokens": [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([4, 5, 6], np.int32)],
        "text": ["a", "b", "c"],
        "label": np.array([7, 8, 9]),
        "matrix": np.zeros((3, 2, 2)),
        "__key__": ["k", "l", "m"],
    }
    made = packed(batch, np.array([2, 2, 3]), Pack("n", 4), np.array([2, 1, 3]))
    assert made["tokens"].tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 5, 6, 0]]
    assert made["tokens"].dtype == np.int32
    assert [lengths.tolist() for lengths in made["tokens__lengths"]] == [[2, 1], [], [3]]
    assert made["text"] == [["a", "b"], [], ["c"]]
    assert made["label"] == [[7, 8], [], [9]]
    assert [len(each) for each in made["matrix"]] == [2, 0, 1]
    assert made["__key__"] == [["k", "l"], [], ["m"]]


def test_arrays_that_do_not_fit_a_pack_stay_apart():
    ends, pack, lengths = np.array([2]), Pack("n", 5), np.array([2, 2])
    for values in ([np.arange(3), np.arange(3)], [np.arange(2), np.arange(2.0)], [np.zeros((2, 2)), np.zeros((2, 2))]):
        made = packed({"x": values}, ends, pack, lengths)
        assert isinstance(made["x"][0], list)
        assert "x__lengths" not in made


def test_metrics_say_what_was_waited_for():
    meter = Meter()
    assert meter.metrics({}) == Metrics()
    assert "nothing yet" in str(meter.metrics({}))
    for _ in range(3):
        meter.ask()
        meter.give(10)
    metrics = meter.metrics({"decode_failed": 2})
    assert (metrics.samples, metrics.batches) == (30, 3)
    assert metrics.seconds > 0
    assert metrics.samples_per_second == pytest.approx(30 / metrics.seconds)
    assert "decode_failed: 2" in str(metrics)
