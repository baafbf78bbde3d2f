import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import SampleError
from shardset.pipeline.batching import (
    CollationError,
    batched,
    combine_values,
    default_collation_fn,
    listed,
    unbatched,
    unlisted,
)
from shardset.pipeline.handlers import ignore_and_continue, ignore_and_stop
from shardset.pipeline.run import Run, Step


def sample(number, **fields):
    return {"__key__": f"k{number}", "__url__": "s.tar", **fields}


def test_batches_are_full_and_the_last_one_has_the_rest():
    batches = list(batched([(number, str(number)) for number in range(7)], 3))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [batch[1] for batch in batches] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


def test_a_full_batch_comes_before_another_sample_is_asked_for():
    source = iter([(1,), (2,), (3,)])
    batches = batched(source, 2)
    assert next(batches)[0].tolist() == [1, 2]
    assert next(source) == (3,)


def test_the_rest_can_be_left_out_and_is_counted():
    step = Step()
    assert len(list(batched([(number,) for number in range(8)], 3, partial=False, step=step))) == 2
    assert step.run.report.counts == {"partial_batch": 2}
    step = Step()
    assert list(listed(range(8), 3, partial=False, step=step)) == [[0, 1, 2], [3, 4, 5]]
    assert step.run.report.counts == {"partial_batch": 2}


def test_fewer_samples_than_a_batch_with_the_rest_left_out_say_so(caplog):
    list(batched([(1,), (2,)], 3, partial=False))
    assert "the stage 'batched' passed on none of 2 samples (partial_batch); it saw a tuple of 1" in caplog.text


def test_without_a_collation_function_batches_are_lists():
    assert list(batched(range(3), 2, None)) == [[0, 1], [2]]
    assert list(listed(range(3), 2)) == [[0, 1], [2]]


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_a_sample(size):
    with pytest.raises(ValueError, match="below 1"):
        list(batched([1], size))


def test_numbers_become_arrays_also_those_of_numpy():
    batch = default_collation_fn(
        [(1, 0.5, True, np.float32(2), np.int8(3)), (2, 1.5, False, np.float32(4), np.int8(5))]
    )
    assert [values.tolist() for values in batch] == [[1, 2], [0.5, 1.5], [True, False], [2, 4], [3, 5]]
    assert [values.dtype.name for values in batch] == ["int64", "float64", "bool", "float32", "int8"]


def test_whole_numbers_are_not_rounded():
    assert combine_values([2**63, 1]).tolist() == [2**63, 1]
    assert combine_values([2**63, -1]).tolist() == [2**63, -1]
    assert combine_values([2**70]).tolist() == [2**70]


def test_none_among_numbers_stays_none():
    assert combine_values([1, None, 3]).tolist() == [1, None, 3]


def test_arrays_of_one_shape_are_stacked():
    batch = default_collation_fn([{"a": np.ones((2, 3), np.uint8)}, {"a": np.zeros((2, 3), np.uint8)}])
    assert batch["a"].shape == (2, 2, 3)
    assert batch["a"].dtype == np.uint8


def test_tensors_are_stacked_by_torch_if_that_is_loaded(monkeypatch):
    class Tensor:
        def __init__(self, shape):
            self.shape = shape

    torch = SimpleNamespace(Tensor=Tensor, stack=lambda values: ("stacked", *values))
    monkeypatch.setitem(sys.modules, "torch", torch)
    one, two = Tensor((2,)), Tensor((2,))
    assert combine_values([one, two]) == ("stacked", one, two)
    assert combine_values([one, two], combine_tensors=False) == [one, two]
    with pytest.raises(CollationError, match=r"different shapes, \(2,\) and \(3,\)"):
        combine_values([one, Tensor((3,))])


def test_everything_else_becomes_a_list():
    values = [b"a", "b", None, [1], {"c": 1}]
    assert combine_values(values) == values
    assert default_collation_fn([{"a": value} for value in values]) == {"a": values}


def test_arrays_and_numbers_can_be_left_in_lists():
    array = np.ones(2)
    batch = default_collation_fn([(1, array), (2, array)], combine_tensors=False, combine_scalars=False)
    assert batch == ([1, 2], [array, array])


def test_samples_that_are_values_are_combined_themselves():
    assert default_collation_fn([1, 2]).tolist() == [1, 2]
    assert default_collation_fn([np.zeros(3), np.ones(3)]).shape == (2, 3)
    assert default_collation_fn(["ab", "cd"]) == ["ab", "cd"]


def test_a_batch_of_empty_tuples_is_an_empty_tuple():
    assert default_collation_fn([(), ()]) == ()


def test_arrays_of_different_shapes_are_an_error_that_names_field_shapes_sample_and_shard():
    samples = [sample(1, npy=np.zeros((2, 3))), sample(2, npy=np.zeros((2, 3))), sample(3, npy=np.zeros(4))]
    with pytest.raises(CollationError) as caught:
        default_collation_fn(samples)
    error = caught.value
    assert isinstance(error, (ValueError, SampleError))
    assert isinstance(error, AssertionError)
    assert (error.field, error.position, error.key, error.shard) == ("npy", 2, "k3", "s.tar")
    assert str(error) == (
        "field 'npy': arrays of different shapes, (2, 3) and (4,): sample 2 of the batch, 'k3', does not fit to its "
        "first, in s.tar - make them equal before they are batched, or batch with collation_fn=None"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.position) == (str(error), "npy", 2)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([(1, 2), (1,)], "tuples of different lengths, 2 and 1: sample 1 of the batch"),
        ([(1,), {"a": 1}], "a tuple and a dict"),
        ([{"a": 1}, (1,)], "a dict and a tuple"),
        ([(1,), ("x",)], "value 0 of the tuple: values of different kinds, int and str"),
        ([(np.zeros(1),), (1,)], "values of different kinds, ndarray and int"),
        ([sample(1, a=1, b=2), sample(2, a=1)], "samples of different fields, 'a', 'b' and 'a': sample 1 .* 'k2'"),
    ],
)
def test_samples_that_do_not_fit_together_are_an_error(samples, text):
    with pytest.raises(CollationError, match=text):
        default_collation_fn(samples)


def test_where_samples_lie_may_differ():
    samples = [sample(1, a=1), {**sample(2, a=2), "__local_path__": "/s.tar"}]
    batch = default_collation_fn(samples)
    assert batch["__key__"] == ["k1", "k2"]
    assert batch["__local_path__"] == [None, "/s.tar"]


def test_the_samples_of_a_batch_that_fails_are_all_counted():
    step = Step()
    samples = [(1,), (2,), (1, 2), (3,), (4,), (5,)]
    batches = list(batched(samples, 2, handler=ignore_and_continue, step=step))
    assert [batch[0].tolist() for batch in batches] == [[1, 2], [4, 5]]
    assert step.run.report.counts == {"collation_failed": 2}
    step = Step()
    assert len(list(batched(samples, 2, handler=ignore_and_stop, step=step))) == 1
    assert step.run.report.counts == {"collation_failed": 2, "stopped_by_handler": 1}
    with pytest.raises(CollationError):
        list(batched(samples, 2))


def test_the_place_of_a_batch_that_fails_is_that_of_the_sample_at_fault():
    step = Step()
    list(batched([sample(1, a=1), sample(2)], 2, handler=ignore_and_continue, step=step))
    assert step.run.report.places("collation_failed")[0].key == "k2"


def test_a_batch_in_the_making_tells_where_its_samples_came_from():
    run = Run()
    held = []

    def source():
        for number in range(5):
            run.origin = (0, 512 * number)
            yield (number,)
            held.append(run.snapshots[2]()["held"])

    batches = batched(source(), 2, step=Step(run, 2))
    next(batches)
    assert run.origin == (0, 512)
    next(batches)
    assert run.origin == (0, 3 * 512)
    assert held == [[[0, 0]], [], [[0, 1024]]]


def test_unbatched_takes_tuples_and_dicts_apart():
    assert list(unbatched([(np.array([1, 2]), ["a", "b"])])) == [(1, "a"), (2, "b")]
    assert list(unbatched([[["a"], ["b"]]])) == [("a", "b")]
    assert list(unbatched([{"__key__": ["x", "y"], "a": np.eye(2)}]))[1]["__key__"] == "y"


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (([1, 2], [1]), "different lengths, 0: 2, 1: 1"),
        ({"a": [1], "b": "xy"}, "different lengths, 'a': 1, 'b': 2"),
        ((), "no values"),
        ({}, "no values"),
        ("ab", "not a str"),
        ((1, 2), "no len"),
    ],
)
def test_what_is_no_batch_is_an_error_and_counted(batch, text):
    with pytest.raises((ValueError, TypeError), match=text):
        list(unbatched([batch]))
    step = Step()
    assert list(unbatched([batch, ([1],)], ignore_and_continue, step=step)) == [(1,)]
    assert step.run.report.counts == {"not_a_batch": 1}


def test_unlisted_takes_lists_apart_and_nothing_else():
    assert list(unlisted([[1, 2], (3,), []])) == [1, 2, 3]
    step = Step()
    assert list(unlisted(["ab", [1]], ignore_and_continue, step=step)) == [1]
    assert step.run.report.counts == {"not_a_batch": 1}
    with pytest.raises(TypeError, match="takes lists, not a str"):
        list(unlisted(["ab"]))


def same(one, two):
    return type(one) is type(two) and (np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two)


values = st.one_of(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=4), st.none()),
    st.tuples(st.floats(allow_nan=False), st.text(max_size=4), st.lists(st.integers(), max_size=2)),
)


@given(st.lists(values, max_size=20).filter(lambda some: len({type(one[0]) for one in some}) < 2), st.integers(1, 7))
def test_batched_and_unbatched_give_the_same_tuples_again(samples, size):
    assert list(unbatched(batched(samples, size))) == samples


@given(st.lists(st.fixed_dictionaries({"a": st.booleans(), "b": st.text()}), max_size=20), st.integers(1, 7))
def test_batched_and_unbatched_give_the_same_dicts_again(samples, size):
    assert list(unbatched(batched(samples, size))) == samples


@given(st.integers(0, 6), st.integers(0, 20), st.integers(1, 7))
def test_batched_and_unbatched_give_the_same_arrays_again(width, count, size):
    samples = [(np.arange(width) + number,) for number in range(count)]
    found = list(unbatched(batched(samples, size)))
    assert len(found) == count
    assert all(same(one[0], two[0]) for one, two in zip(found, samples, strict=True))


@given(st.lists(st.integers(), max_size=20), st.integers(1, 7), st.booleans())
def test_listed_and_unlisted_lose_nothing_but_what_they_count(samples, size, partial):
    step = Step()
    found = list(unlisted(listed(samples, size, partial, step=step)))
    lost = 0 if partial else len(samples) % size
    assert found == samples[: len(samples) - lost]
    assert len(step.run.report) == lost
