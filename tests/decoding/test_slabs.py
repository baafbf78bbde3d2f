"""Memory of batches: used again only when nobody looks at it, bounded, and a forked child's own."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.decoding.slabs import Slabs, _room

MIB = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_that_is_let_go_serves_the_next_of_about_its_size():
    slabs = Slabs()
    first = slabs.take((16, 256, 256, 3))
    place = address(first)
    del first
    assert slabs.kept_bytes == _room(16 * 256 * 256 * 3)
    again = slabs.take((16, 254, 256, 3))
    assert address(again) == place
    assert again.shape == (16, 254, 256, 3)
    assert again.flags.c_contiguous
    assert again.flags.writeable
    assert slabs.kept_bytes == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda array: array[3],
        lambda array: array[3:5, ::2].T,
        lambda array: array.reshape(-1),
        lambda array: array.view(np.int32),
        memoryview,
        lambda array: np.asarray(memoryview(array)[2:3]),
        lambda array: np.ndarray((4,), np.uint8, array[1].data),
    ],
    ids=["item", "turned", "flat", "as other numbers", "memoryview", "from a memoryview", "on its buffer"],
)
def test_memory_stays_lent_as_long_as_any_view_of_it_is_there(look):
    slabs = Slabs()
    array = slabs.take((8, MIB))
    array[...] = 7
    view = look(array)
    del array
    gc.collect()
    assert slabs.kept_bytes == 0
    slabs.take((8, MIB))[...] = 9
    assert set(np.asarray(view).view(np.uint8).ravel().tolist()[:100]) == {7}
    kept = slabs.kept_bytes
    del view
    assert slabs.kept_bytes == kept + 8 * MIB


def test_arrays_that_are_in_use_never_share_memory():
    slabs = Slabs()
    for _ in range(3):
        arrays = [slabs.take((MIB,)) for _ in range(6)]
        for number, array in enumerate(arrays):
            array[...] = number
        assert [set(array[::4096].tolist()) for array in arrays] == [{number} for number in range(6)]


def test_a_few_of_each_size_are_kept_and_bytes_are_bounded():
    slabs = Slabs(most_bytes=20 * MIB)
    arrays = [slabs.take((MIB,)) for _ in range(10)]
    del arrays
    assert slabs.kept_bytes == 4 * MIB
    arrays = [slabs.take((6 * MIB,)) for _ in range(3)]
    del arrays
    assert slabs.kept_bytes == 20 * MIB  # the oldest have made room
    huge = slabs.take((21 * MIB,))
    del huge
    assert slabs.kept_bytes == 20 * MIB


def test_small_arrays_are_left_to_the_allocator():
    slabs = Slabs()
    array = slabs.take((2, 3))
    array[...] = 1
    del array
    assert slabs.take((0, 5, 5, 3)).shape == (0, 5, 5, 3)
    assert slabs.kept_bytes == 0


def test_threads_that_take_and_let_go_never_get_the_same_memory():
    slabs = Slabs()
    wrong = []

    def work(number):
        for _ in range(200):
            array = slabs.take((MIB,))
            array[:: 1 << 16] = number
            if not (array[:: 1 << 16] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_a_forked_child_does_with_kept_or_lent_memory_stays_its_own():
    slabs = Slabs()
    lent, kept = slabs.take((MIB,)), slabs.take((MIB,))
    lent[...] = 1
    kept[...] = 2
    place = address(kept)
    del kept
    child = os.fork()
    if child == 0:
        try:
            lent[...] = 5
            slabs.take((MIB,))[...] = 6
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (lent == 1).all()
    again = slabs.take((MIB,))
    assert address(again) == place
    assert (again == 2).all()


@given(st.integers(min_value=256 << 10, max_value=1 << 40))
def test_rooms_are_at_most_an_eighth_larger_than_what_they_hold(size):
    assert size <= _room(size) <= size * 9 // 8 + 1
    assert _room(_room(size)) == _room(size)
