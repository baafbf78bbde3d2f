from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.loading.order import RandomOrder, SequentialOrder, Shuffle, WindowedOrder, order_of, resolve
from shardset.loading.quality import (
    GOOD_WINDOW,
    Sorted,
    expect_quality,
    fit_batches,
    measure_cost,
    measure_quality,
)

MILLION = 1_000_000
MEANS = [1_000, 4_000, 10_000, 20_000, 50_000, 100_000, 130_000, 10**6]


def by_hand(order, data, batch, batches):
    """The same measures, batch by batch and pair by pair."""
    samples = order.take(0, range(batch * batches)).tolist()
    labels = [number * data.classes // data.count for number in samples]
    shards = [int(np.searchsorted(data.shard_starts, number, "right")) for number in samples]
    place = {number: at for at, number in enumerate(order.take(1, range(order.count)).tolist())}
    chi_squares, in_batch, together = [], [], 0
    for start in range(0, len(samples), batch):
        span = slice(start, start + batch)
        due = batch / data.classes
        counts = [labels[span].count(label) for label in range(data.classes)]
        chi_squares.append(sum((count - due) ** 2 / due for count in counts) / (data.classes - 1))
        in_batch.append(len(set(shards[span])))
        later = [place[number] // batch for number in samples[span]]
        together += sum(later[a] == later[b] for a in range(batch) for b in range(a))
    pairs = batches * batch * (batch - 1) / 2
    sizes = [min(batch, order.count - at) for at in range(0, order.count, batch)]
    chance = sum(size * (size - 1) for size in sizes) / (order.count * (order.count - 1))
    centred = np.array(samples) - np.mean(samples)
    return (
        np.mean(chi_squares),
        np.mean(in_batch),
        np.mean([a == b for a, b in pairwise(shards)]),
        (centred[1:] * centred[:-1]).sum() / (centred**2).sum(),
        together / (pairs * chance),
    )


@given(
    count=st.integers(2, 400),
    batch=st.integers(2, 50),
    classes=st.integers(2, 30),
    shard=st.integers(1, 100),
    kind=st.sampled_from([RandomOrder, lambda count, _: SequentialOrder(count)]),
)
def test_measures_are_those_that_are_counted_one_by_one(count, batch, classes, shard, kind):
    order, data = kind(count, 4), Sorted.of(count, np.arange(0, count, shard), classes)
    batch, batches = fit_batches(count, batch, 5)
    found = measure_quality(order, data, batch=batch, batches=5)
    expected = by_hand(order, data, batch, batches)
    assert (found.chi_square, found.shards, found.neighbours, found.correlation, found.pairs) == pytest.approx(expected)


def test_a_true_shuffle_has_what_chance_has():
    data = Sorted.of(50_000, np.array([0, 100, 5_000, 5_001, 20_000]), 100)
    several = [measure_quality(RandomOrder(50_000, seed), data, batch=100, batches=500) for seed in range(5)]
    chance = expect_quality(data, batch=100)
    assert np.mean([one.chi_square for one in several]) == pytest.approx(chance.chi_square, abs=0.01)
    assert np.mean([one.shards for one in several]) == pytest.approx(chance.shards, abs=0.02)
    assert np.mean([one.neighbours for one in several]) == pytest.approx(chance.neighbours, abs=0.01)
    assert np.mean([one.correlation for one in several]) == pytest.approx(chance.correlation, abs=0.01)
    assert np.mean([one.pairs for one in several]) == pytest.approx(chance.pairs, abs=0.02)


def test_chance_finds_every_shard_in_a_batch_of_all():
    data = Sorted.of(1000, np.array([0, 1, 500]), 10)
    assert expect_quality(data, batch=1000).shards == 3
    assert expect_quality(data, batch=1).shards == pytest.approx(1)
    assert expect_quality(data, batch=2).shards == pytest.approx(2 - expect_quality(data).neighbours)


def test_sorted_batches_are_as_poor_as_can_be():
    data = Sorted.of(MILLION)
    found = measure_quality(SequentialOrder(MILLION), data)
    assert found.chi_square > 200
    assert found.shards < 2
    assert found.neighbours > 0.99
    assert found.correlation > 0.99
    assert found.pairs > 3000
    assert 225 < expect_quality(data).shards < 227


@pytest.mark.slow
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_default_shuffle_mixes_sorted_shards_nearly_as_a_true_one(mean, seed):
    data, total = Sorted.of(MILLION), MILLION * mean
    order = order_of(resolve(Shuffle(), MILLION, total), MILLION, seed)
    found, chance = measure_quality(order, data), expect_quality(data)
    assert found.chi_square < 1.05
    assert found.shards > 0.97 * chance.shards
    assert found.neighbours < 1.5 * chance.neighbours
    assert abs(found.correlation) < 0.015
    assert found.pairs == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("mean", MEANS)
def test_a_window_of_512_mib_is_good_and_is_all_that_is_held(mean):
    data, total = Sorted.of(MILLION), MILLION * mean
    order = order_of(resolve(Shuffle(window_bytes=GOOD_WINDOW), MILLION, total), MILLION, 3)
    assert GOOD_WINDOW == 512 << 20
    assert measure_quality(order, data).chi_square <= 1.1
    for world_size in (1, 8):
        cost = measure_cost(order, mean, world_size=world_size, batch_size=32)
        assert cost.memory_bytes <= 2 * GOOD_WINDOW / world_size


def test_a_smaller_window_mixes_less():
    data, total = Sorted.of(MILLION), MILLION * 10_000
    windows = [1 << 30, 1 << 28, 1 << 26, 1 << 24]
    found = [
        measure_quality(order_of(resolve(Shuffle(window), MILLION, total), MILLION, 0), data).chi_square
        for window in windows
    ]
    assert found == sorted(found)
    assert found[1] < 1.25
    assert found[-1] > 2


@pytest.mark.slow
@pytest.mark.parametrize(("run", "runs", "lanes"), [(26, 2048, 64), (64, 1024, 16), (5, 2112, 64), (256, 2048, 8)])
def test_chi_square_is_about_what_the_formula_says(run, runs, lanes):
    count = 10_000_000
    found = measure_quality(WindowedOrder(count, 0, run, runs, lanes), Sorted.of(count)).chi_square
    assert found == pytest.approx(1 + (256 - lanes) * (run - 1) / (run * runs), abs=0.03)


@pytest.mark.slow
def test_batches_of_a_last_window_are_as_good_as_others():
    count = 1_003_777  # of which the last runs fill no row
    order, data = WindowedOrder(count, 0, 26, 4096, 64), Sorted.of(count)
    samples = order.take(0, range(count - 256 * 100, count)).reshape(100, 256)
    labels = samples * data.classes // count
    due = 256 / data.classes
    counts = np.array([np.bincount(row, minlength=data.classes) for row in labels])
    assert np.mean(np.square(counts - due).sum(axis=1) / due / (data.classes - 1)) < 1.15


@pytest.mark.parametrize("count", [0, 1])
def test_so_few_samples_have_no_quality(count):
    with pytest.raises(ValueError, match="has no quality"):
        Sorted.of(count)


@pytest.mark.parametrize("count", [2, 3, 20, 300])
def test_few_samples_are_measured_in_fewer_batches(count):
    found = measure_quality(RandomOrder(count, 0), Sorted.of(count), batch=256)
    assert np.isfinite([found.chi_square, found.shards, found.neighbours, found.correlation, found.pairs]).all()
    assert found.shards == 1


def test_meetings_are_not_looked_for_among_very_many_samples():
    found = measure_quality(RandomOrder(10**12, 0), Sorted.of(10**12, np.array([0, 10**11])), batches=10)
    assert found.pairs is None
    assert found.shards == 2


def test_a_rank_that_has_lanes_of_its_own_reads_whole_runs():
    order = WindowedOrder(MILLION, 0, 25, 4096, 64)
    alone = measure_cost(order, 10_000.0)
    shared = measure_cost(order, 10_000.0, world_size=8, batch_size=32)
    assert alone.window_samples == shared.window_samples == order.window_end(0)
    assert alone.window_bytes == order.window_end(0) * 10_000
    assert shared.samples == alone.samples // 8
    assert shared.samples / shared.reads == pytest.approx(25, rel=0.05)
    assert shared.read_bytes == pytest.approx(250_000, rel=0.05)
    assert shared.memory_bytes == 2 * shared.samples * 10_000


def test_a_rank_that_shares_lanes_reads_parts_of_runs():
    order = WindowedOrder(MILLION, 0, 25, 4096, 64)
    shared = measure_cost(order, 10_000.0, world_size=7, batch_size=32)
    assert shared.samples == pytest.approx(order.window_end(0) / 7, rel=0.01)
    assert shared.read_bytes < 20_000


def test_reads_end_where_shards_end():
    order = SequentialOrder(1000)
    assert measure_cost(order, 10.0).reads == 1
    cost = measure_cost(order, 10.0, shard_starts=np.array([0, 1, 400]))
    assert (cost.reads, cost.read_bytes, cost.memory_bytes) == (3, 3333, 10_000)  # there is one window alone


def test_windows_that_are_less_than_a_step_are_taken_together():
    order = WindowedOrder(1000, 0, 2, 8, 4)
    cost = measure_cost(order, 1.0, batch_size=50, world_size=3)
    assert cost.window_samples == order.window_end(0)
    ends = [order.window_end(0)]
    while ends[-1] < 150:
        ends.append(order.window_end(ends[-1]))
    assert cost.windows == len(ends)
    assert 50 <= cost.samples <= 50 + ends[-1] - 150
    whole = measure_cost(order, 1.0, batch_size=5000)
    assert (whole.windows, whole.samples, whole.memory_bytes) == (order.windows, 1000, 1000)


def test_no_samples_cost_nothing():
    cost = measure_cost(order_of(resolve(Shuffle(), 0, 0), 0, 0), 0.0)
    assert (cost.window_samples, cost.samples, cost.reads, cost.read_bytes, cost.memory_bytes) == (0, 0, 0, 0, 0)
