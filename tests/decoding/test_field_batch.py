"""Which values become one array, and which stay the list that they are in."""

from __future__ import annotations

import numpy as np
import pytest

from shardset.decoding.field_batch import stack

ARRAYS = {
    "int": ([3, -1], np.int64),
    "float": ([0.5, 1.0], np.float64),
    "float and int": ([0.5, 2], np.float64),
    "bool": ([True, False], np.bool_),
    "numpy's own": ([np.float32(0.5), np.float32(1)], np.float32),
    "arrays": ([np.zeros((2, 3), np.uint16), np.ones((2, 3), np.uint16)], np.uint16),
    "features of one number": ([np.array([5]), np.array([6])], np.int64),
}
LISTS = {
    "nothing": [],
    "text": ["a", "b"],
    "bytes": [b"a", b"b"],
    "trees": [{"a": 1}, {"a": 2}],
    "None": [None, None],
    "a gap": [3, None],
    "bool and int": [True, 3],
    "int that do not fit": [1 << 63, 0],
    "int that a float would round": [(1 << 53) + 1, 0.5],
    "tuples": [(1, 2), (3, 4)],
    "shapes": [np.zeros(2), np.zeros(3)],
    "types": [np.zeros(2), np.zeros(2, np.int64)],
    "an array and a number": [np.zeros(2), 3],
    "numbers of numpy and of Python": [np.float64(1), 2.0],
}


@pytest.mark.parametrize(("values", "dtype"), ARRAYS.values(), ids=ARRAYS)
def test_values_of_one_kind_become_one_array(values, dtype):
    array = stack(values)
    assert array.dtype == dtype
    assert array.shape == (len(values), *np.shape(values[0]))
    assert array.tolist() == np.asarray(values).tolist()


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
def test_what_does_not_fit_together_stays_the_list_that_it_is(values):
    assert stack(values) is values
