"""The arithmetic of images that are turned, cut and scaled, against Pillow and against what it promises."""

from __future__ import annotations

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.decoding.shaping import copy_turned, draws, fit, jpeg_scale, turned, turned_back

SIDES = st.integers(min_value=1, max_value=3000)
SIZES = st.tuples(SIDES, SIDES)
SMALL = st.tuples(st.integers(1, 40), st.integers(1, 40))
CROPS = st.sampled_from(["center", "random", "none"])
SEEDS = st.integers(min_value=0, max_value=(1 << 64) - 1)


def pixels(height=5, width=7, channels=3):
    return np.arange(height * width * channels, dtype=np.uint8).reshape(height, width, channels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turns_are_those_of_pillow(orientation):
    image = PIL.Image.fromarray(pixels())
    image.getexif()[274] = orientation
    wanted = np.asarray(PIL.ImageOps.exif_transpose(image))
    assert np.array_equal(turned(pixels(), orientation), wanted)
    assert np.array_equal(turned_back(wanted, orientation), pixels())


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_copied_as_they_are_turned_from_a_part_too(orientation, channels):
    part = pixels(9, 11, channels)[2:7, 1:9]
    wanted = turned(part, orientation)
    out = np.zeros((3, *wanted.shape), np.uint8)
    copy_turned(part, orientation, out[1])
    assert np.array_equal(out[1], wanted)
    assert not out[0].any()
    assert not out[2].any()


@given(SIZES, st.integers(1, 8), SIZES, CROPS, SEEDS)
def test_a_fit_lies_in_the_image_and_has_the_shape(size, orientation, shape, crop, seed):
    plan = fit(size, orientation, shape, crop, seed)
    width, height = size
    left, top, right, bottom = plan.box
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert plan.shape == shape
    if crop == "none":
        assert plan.box == (0, 0, width, height)
    else:  # one side is used whole, and both are scaled alike
        assert (left, right) == (0, width) or (top, bottom) == (0, height)
        across, down = (right - left) / plan.size[0], (bottom - top) / plan.size[1]
        assert across == pytest.approx(down, rel=1e-6)
    if not plan.is_scaled:
        assert all(edge == int(edge) for edge in plan.box)
    scale = jpeg_scale(plan)
    assert scale == 1 or min((right - left) / plan.size[0], (bottom - top) / plan.size[1]) >= 2 * scale


@given(SMALL, st.integers(1, 8), SMALL, st.sampled_from(["center", "random"]), SEEDS)
def test_what_is_cut_does_not_depend_on_how_an_image_is_stored(size, orientation, shape, crop, seed):
    def covered(plan, width, height):
        left, top, right, bottom = plan.box
        rows, columns = np.mgrid[:height, :width] + 0.5
        across = np.clip(np.minimum(columns + 0.5, right) - np.maximum(columns - 0.5, left), 0, 1)
        down = np.clip(np.minimum(rows + 0.5, bottom) - np.maximum(rows - 0.5, top), 0, 1)
        return across * down

    shown = size[::-1] if orientation >= 5 else size
    plain = covered(fit(shown, 1, shape, crop, seed), *shown)
    stored = covered(fit(size, orientation, shape, crop, seed), *size)
    assert np.allclose(turned(stored, orientation), plain)


def test_without_a_shape_all_pixels_stay():
    plan = fit((40, 24), 6, None)
    assert plan.box == (0, 0, 40, 24)
    assert plan.shape == (40, 24)
    assert not plan.is_scaled


def test_a_cut_that_scales_nothing_begins_at_any_whole_place_alike():
    places = [int(fit((12, 8), 1, (8, 8), "random", seed).box[0]) for seed in range(5000)]
    counts = np.bincount(places)
    assert len(counts) == 5
    assert counts.min() > 900


def test_draws_are_frozen_and_those_of_neighbours_have_nothing_in_common():
    assert draws(0) == draws(0)
    found = np.array([draws(seed) for seed in range(4000)])
    assert np.abs(np.corrcoef(np.hstack([found[:-1], found[1:]]).T) - np.eye(4)).max() < 0.06
    assert np.abs(found.mean(axis=0) - 0.5).max() < 0.02
    assert [round(each, 12) for each in draws(1)] == [0.652448486374, 0.701212109522]


def test_halves_are_taken_while_the_filter_is_left_twice_the_size():
    def scale(side):
        return jpeg_scale(fit((side, side), 1, (100, 100)))

    assert [scale(side) for side in (50, 399, 400, 799, 800, 1600, 9999)] == [1, 1, 2, 2, 4, 4, 4]
