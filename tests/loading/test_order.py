from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.loading import order as order_module
from shardset.loading.order import (
    LARGEST_WINDOW,
    ORDER_VERSION,
    RandomOrder,
    Resolved,
    SequentialOrder,
    Shuffle,
    WindowedOrder,
    draws,
    mix_key,
    order_of,
    permutation,
    permuted,
    resolve,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "loading" / "orders.json").read_text())
COUNTS = [0, 1, 2, 3, 5, 63, 64, 65, 1000, 4096, 4097, 8193, 100_003]
SIZES = [(1, 64, 64), (2, 64, 64), (2, 128, 16), (7, 12, 3), (5, 1, 1), (256, 64, 64), (26, 4096, 64), (200, 400, 8)]
HUGE = [2**32 + 1, 10**11 + 3, 2**40 - 1, 2**40]


def split_mix(state):
    """SplitMix64 as its authors publish it, one output at a time, without numpy."""
    mask = (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        value = state
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        yield value ^ (value >> 31)


def test_draws_are_the_outputs_of_split_mix_64():
    # The outputs for the seed 1234567 that implementations of the generator are commonly checked with.
    assert draws(1234567, 0, 3).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(key=st.integers(0, 2**64 - 1), start=st.integers(0, 5000), count=st.integers(0, 300))
def test_any_stretch_of_draws_can_be_had_by_itself(key, start, count):
    outputs = split_mix(key)
    for _ in range(start):
        next(outputs)
    assert draws(key, start, count).tolist() == [next(outputs) for _ in range(count)]


def test_orders_stay_what_they_are():
    assert mix_key() == 0
    assert mix_key(0) == 16294208416658607535
    assert mix_key(1, 2, 3) != mix_key(3, 2, 1)
    assert mix_key(-1) == mix_key(2**64 - 1)
    assert permutation(mix_key(0, 0), 10).tolist() == permutation(mix_key(0, 0), 10).tolist()


@given(key=st.integers(0, 2**64 - 1), count=st.integers(0, 200))
def test_a_permutation_has_every_number_once(key, count):
    found = permutation(key, count)
    assert sorted(found.tolist()) == list(range(count))


def test_numbers_come_to_every_place_alike():
    places = np.array([permutation(mix_key(5, epoch), 8) for epoch in range(4000)])
    counts = np.array([np.bincount(places[:, place], minlength=8) for place in range(8)])
    assert counts.min() > 400
    assert counts.max() < 600


@pytest.mark.parametrize("count", [1, 2])
def test_small_permutations_are_both_met(count):
    assert len({tuple(permutation(mix_key(seed), count)) for seed in range(50)}) == count


def reference(order, epoch):
    """The samples of an epoch of a `WindowedOrder`, one by one, as the module describes it."""
    count, run, lanes, seed = order.count, order.run, order.lanes, order.seed
    rotation = mix_key(seed, epoch, 1) % count
    runs = count // run
    if run == 1:
        return [(reference_permuted(mix_key(seed, epoch, 2), runs, at) + rotation) % count for at in range(count)]
    starts = [reference_permuted(mix_key(seed, epoch, 2), runs, slot) * run for slot in range(runs)]
    rows = runs // lanes
    windows = max(1, -(-rows // (order.runs // lanes)))
    turns = max(1, min(run, -(-min(order.runs * run, count) // 32768)))
    rest = [starts[slot] + at for slot in range(rows * lanes, runs) for at in range(run)]
    rest += range(runs * run, count)
    found = []
    for window in range(windows):
        slots = range(rows * window // windows, rows * (window + 1) // windows)
        within = sorted_by_draw(mix_key(seed, epoch, 3, window), range(run), 0, 0)
        for turn in range(turns):
            given = within[turn * run // turns : (turn + 1) * run // turns] if turns > 1 else range(run)
            last = rest if (window, turn) == (windows - 1, turns - 1) else []
            width = len(slots) * len(given) + -(-len(last) // lanes)
            taken, in_lanes = 0, []
            for lane in range(lanes):
                samples = []
                for row in slots:
                    slot = row * lanes + lane
                    turned = int(draws(mix_key(seed, epoch, 3), slot, 1)[0]) if turns > 1 else 0
                    samples += [starts[slot] + (at + turned) % run for at in given]
                part = len(last) // lanes + (lane < len(last) % lanes)
                samples += last[taken : taken + part]
                taken += part
                key = mix_key(seed, epoch, 3, window, turn)
                in_lanes.append(sorted_by_draw(key, samples, lane * width, (width - 1).bit_length()))
            found += [lane[at] for at in range(width) for lane in in_lanes if at < len(lane)]
    return [(sample + rotation) % count for sample in found]


def sorted_by_draw(key, samples, first, ignored_bits):
    drawn = draws(key, first, len(samples)).tolist()
    return [samples[at] for at in sorted(range(len(samples)), key=lambda at: (drawn[at] >> ignored_bits, at))]


def reference_permuted(key, count, number):
    if count <= 4096:
        return int(permutation(key, count)[number])
    root = isqrt(count - 1) + 1
    low_end = min(range(root, root + 64), key=lambda end: (-(-count // end) * end - count, end))
    ends = [low_end, -(-count // low_end)]
    mask = (1 << 64) - 1
    while True:
        digits = [number % low_end, number // low_end]
        for at, key_of_round in enumerate(draws(key, 0, 6).tolist()):
            mixed = ((digits[at % 2] + key_of_round) * 0xBF58476D1CE4E5B9) & mask
            mixed = ((mixed ^ (mixed >> 32)) * 0x94D049BB133111EB) & mask
            end = ends[1 - at % 2]
            digits[1 - at % 2] = (digits[1 - at % 2] + ((mixed >> 32) * end >> 32)) % end
        number = digits[1] * low_end + digits[0]
        if number < count:
            return number


def make(case):
    if case["kind"] == "sequential":
        return SequentialOrder(case["count"])
    kind = {"windowed": WindowedOrder, "random": RandomOrder}[case["kind"]]
    return kind(case["count"], case["seed"], *case["sizes"])


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=map(str, range(len(GOLDEN["cases"]))))
def test_orders_are_frozen(case):
    # Saved states refer to them: whoever changes them must raise the version, and keep what the old one did.
    assert GOLDEN["version"] == ORDER_VERSION
    order = make(case)
    assert order.take(case["epoch"], range(*case["positions"])).tolist() == case["samples"]
    assert order.window_end(case["positions"][0]) == case["window_end"]


@pytest.mark.parametrize("count", [1, 2, 5, 100, 999, 4500])
@pytest.mark.parametrize("sizes", SIZES)
def test_windowed_orders_are_what_the_module_describes(count, sizes):
    order = WindowedOrder(count, 3, *sizes)
    assert order.take(2, range(count)).tolist() == reference(order, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "sizes"), [(70_001, (40, 1700, 4)), (40_000, (256, 512, 64)), (90_000, (3, 24000, 8))]
)
def test_windows_of_several_turns_are_what_the_module_describes(count, sizes):
    order = WindowedOrder(count, 3, *sizes)
    assert order.turns > 1
    assert order.take(2, range(count)).tolist() == reference(order, 2)


def assert_bijective(order, epoch):
    found = order.take(epoch, range(order.count))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(order.count))


@pytest.mark.parametrize("count", COUNTS)
def test_every_sample_comes_once_an_epoch(count):
    assert_bijective(SequentialOrder(count), 0)
    for epoch in range(2):
        assert_bijective(RandomOrder(count, 5), epoch)
        for sizes in SIZES:
            if count < 20_000 or sizes[0] * sizes[1] >= 128:
                assert_bijective(WindowedOrder(count, 5, *sizes), epoch)
        for mean in (50, 3000, 100_000):
            assert_bijective(order_of(resolve(Shuffle(), count, count * mean), count, 5), epoch)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [100, 10_000, 130_000, 10**6])
def test_every_sample_of_a_million_comes_once_an_epoch(mean):
    count = 1_000_003
    assert_bijective(order_of(resolve(Shuffle(), count, count * mean), count, 1), 3)
    assert_bijective(RandomOrder(count, 1), 3)


counts = st.integers(1, 3000)
seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)


@st.composite
def orders(draw, counts=counts):
    count, seed = draw(counts), draw(seeds)
    kind = draw(st.sampled_from(["sequential", "random", "windowed", "windowed", "windowed"]))
    if kind != "windowed":
        return SequentialOrder(count) if kind == "sequential" else RandomOrder(count, seed)
    lanes = draw(st.integers(1, 70))
    return WindowedOrder(count, seed, draw(st.integers(1, 40)), lanes * draw(st.integers(1, 30)), lanes)


@given(order=orders(), epoch=epochs, data=st.data())
def test_any_range_is_the_slice_of_the_epoch(order, epoch, data):
    whole = order.take(epoch, range(order.count))
    assert np.array_equal(np.sort(whole), np.arange(order.count))
    start, stop = data.draw(st.integers(0, order.count - 1)), data.draw(st.integers(-1, order.count))
    step = data.draw(st.integers(1, 200)) * (1 if stop >= start else -1)
    positions = range(start, stop, step)
    for keeps in (True, False):
        if not keeps:
            order_module._turn.cache_clear()
        assert np.array_equal(order.take(epoch, positions), whole[list(positions)])
        singles = [order.take(epoch, range(at, at + 1)) for at in positions[:20]]
        assert np.array_equal(np.concatenate([np.zeros(0, np.int64), *singles]), whole[list(positions[:20])])


@given(order=orders(st.integers(2**33, 2**40)), epoch=epochs, data=st.data())
def test_any_range_of_a_huge_epoch_is_its_single_positions(order, epoch, data):
    start = data.draw(st.integers(0, order.count - 1))
    step = data.draw(st.one_of(st.integers(1, 100), st.integers(1, order.count)))
    positions = range(start, order.count, step)[:12]
    found = order.take(epoch, positions)
    assert found.tolist() == [int(order.take(epoch, range(at, at + 1))[0]) for at in positions]
    assert found.min() >= 0
    assert found.max() < order.count
    assert len(set(found.tolist())) == len(positions)


@given(order=orders())
def test_windows_follow_each_other(order):
    ends, position = [], 0
    while position < order.count:
        end = order.window_end(position)
        assert position < end <= order.count
        assert {order.window_end(at) for at in (position, (position + end) // 2, end - 1)} == {end}
        ends.append(end - position)
        position = end
    if isinstance(order, WindowedOrder):
        assert len(ends) == order.windows
        assert max(ends) < (order.runs + order.lanes) * order.run
        assert max(ends) - min(ends) < 2 * order.lanes * order.run  # no window is a poor rest


@pytest.mark.parametrize("count", HUGE)
def test_huge_windows_hold_what_their_runs_hold(count):
    order = order_of(resolve(Shuffle(), count, count * 20_000), count, 1)
    start = order.window_start(order.windows // 2)
    found = np.sort(order.take(0, range(start, order.window_end(start))))
    assert (np.diff(found) > 0).all()
    pieces = np.count_nonzero(np.diff(found) != 1) + 1
    assert len(found) / order.run * 0.9 < pieces <= len(found) / order.run


@pytest.mark.parametrize(
    ("count", "sizes"), [(10_000, (7, 320, 16)), (33_333, (26, 512, 64)), (50_000, (5, 12_800, 8))]
)
def test_each_run_is_read_by_one_lane(count, sizes):
    order = WindowedOrder(count, 9, *sizes)
    rotation = mix_key(9, 4, 1) % count
    lane_of_run = {}
    for lane in range(order.lanes):
        for run in np.unique((order.take(4, range(lane, count, order.lanes)) - rotation) % count // order.run).tolist():
            lane_of_run.setdefault(run, []).append(lane)
    runs = count // order.run
    shared = [run for run, lanes in lane_of_run.items() if len(lanes) > 1 and run < runs]
    assert sorted(lane_of_run) == list(range(-(-count // order.run)))
    assert len(shared) <= runs % order.lanes < order.lanes


def test_only_the_lanes_concerned_are_worked_out(monkeypatch):
    shuffled = []
    work_out = order_module._Turn._shuffle
    monkeypatch.setattr(
        order_module._Turn, "_shuffle", lambda self, lanes: shuffled.append(len(lanes)) or work_out(self, lanes)
    )
    order_module._turn.cache_clear()
    order = WindowedOrder(100_000, 1, 10, 640, 64)
    first, second, third, fourth = (range(order.window_start(at), order.window_start(at + 1)) for at in range(4))
    for positions, lanes in (
        (first[3::8], 8),
        (second[::96], 2),
        (third[1:2], 1),
        (fourth[5::7], 64),
        (first[3::16], 0),
    ):
        shuffled.clear()
        order.take(0, positions)
        assert sum(shuffled) == lanes


def test_epochs_and_seeds_differ_and_repeat():
    for make_order in (lambda seed: RandomOrder(10_000, seed), lambda seed: WindowedOrder(10_000, seed, 5, 640, 64)):
        takes = {
            (seed, epoch): tuple(make_order(seed).take(epoch, range(10_000))) for seed in range(3) for epoch in range(3)
        }
        assert len(set(takes.values())) == 9  # seed 1 of epoch 0 is not seed 0 of epoch 1
        order_module._turn.cache_clear()
        assert takes[2, 1] == tuple(make_order(2).take(1, range(10_000)))


def test_runs_begin_elsewhere_in_each_epoch():
    order = WindowedOrder(100_000, 1, 50, 640, 64)
    borders = []
    for epoch in range(2):
        found = np.sort(order.take(epoch, range(order.window_end(0))))
        borders.append(set((found[1:][np.diff(found) > 1] % 50).tolist()))
    assert [len(border) for border in borders] == [1, 1]
    assert borders[0] != borders[1]


def test_threads_that_take_one_window_get_the_same():
    order = WindowedOrder(200_000, 1, 10, 2560, 64)
    expected = order.take(5, range(20_000))
    for _ in range(5):
        order_module._turn.cache_clear()
        with ThreadPoolExecutor(8) as threads:
            parts = list(threads.map(lambda lane: order.take(5, range(lane, 20_000, 8)), range(8)))
        assert all(np.array_equal(part, expected[lane::8]) for lane, part in enumerate(parts))


def test_what_is_taken_is_nobody_elses():
    order = WindowedOrder(1000, 1, 5, 64, 8)
    first = order.take(0, range(100))
    kept = first.copy()
    first[:] = -1
    assert np.array_equal(order.take(0, range(100)), kept)


@pytest.mark.parametrize("order", [SequentialOrder(10), RandomOrder(10, 0), WindowedOrder(10, 0, 2, 4, 2)])
@pytest.mark.parametrize("positions", [range(11), range(9, 11), range(-1, 5), range(20, 0, -5), range(3, -2, -1)])
def test_positions_outside_are_refused(order, positions):
    with pytest.raises(IndexError, match="of an order of 10"):
        order.take(0, positions)


@pytest.mark.parametrize("order", [SequentialOrder(10), RandomOrder(10, 0), WindowedOrder(10, 0, 2, 4, 2)])
def test_an_order_is_a_value(order):
    assert pickle.loads(pickle.dumps(order)) == order
    assert len({order, pickle.loads(pickle.dumps(order))}) == 1
    assert order.take(0, range(0)).tolist() == []


@given(key=seeds, count=st.integers(1, 20_000), data=st.data())
def test_a_permutation_is_worked_out_as_described(key, count, data):
    number = data.draw(st.integers(0, count - 1))
    assert int(permuted(key % 2**64, count, np.array([number]))[0]) == reference_permuted(key % 2**64, count, number)


@pytest.mark.parametrize("count", [4097, 4160, 5000, 65_537, 100_003])
def test_permuted_numbers_are_a_permutation(count):
    for key in range(3):
        assert np.array_equal(np.sort(permuted(key, count, np.arange(count))), np.arange(count))


@pytest.mark.slow
def test_permuted_numbers_are_as_random_as_chance_has_it():
    count, keys = 4999, 1000
    neighbours, steps, fixed, places = [], [], [], []
    for key in range(keys):
        found = permuted(mix_key(key), count, np.arange(count))
        neighbours.append(np.count_nonzero(np.diff(found) == 1))
        steps.append(np.count_nonzero(np.abs(found[71:] - found[:-71]) == 71))
        fixed.append(np.count_nonzero(found == np.arange(count)))
        places.append(found[[0, 1, 70, 71, 2500]] * 16 // count)
    # Of a random permutation these are Poisson numbers with means of 1, 2 and 1: five deviations of the mean.
    assert abs(np.mean(neighbours) - 1) < 5 * (1 / keys) ** 0.5
    assert abs(np.mean(steps) - 2) < 5 * (2 / keys) ** 0.5
    assert abs(np.mean(fixed) - 1) < 5 * (1 / keys) ** 0.5
    for first in range(5):
        alone = np.bincount(np.array(places)[:, first], minlength=16)
        assert np.square(alone - keys / 16).sum() / (keys / 16) < 45  # of 15 degrees of freedom
        for second in range(first):
            pairs = np.bincount(np.array(places)[:, first] * 16 + np.array(places)[:, second], minlength=256)
            assert np.square(pairs - keys / 256).sum() / (keys / 256) < 255 + 6 * 510**0.5


@pytest.mark.parametrize("bad", [(-1, 1, 1, 1), (5, 0, 1, 1), (5, 1, 0, 1), (5, 1, 1, 0), (5, 1, 3, 2)])
def test_sizes_that_are_none_are_refused(bad):
    count, *sizes = bad
    with pytest.raises(ValueError, match="no order"):
        WindowedOrder(count, 0, *sizes)


def test_settings_become_samples():
    million, on, off = 1_000_000, True, False
    assert resolve(off, million, 10**10) == Resolved("sequential")
    assert resolve("full", million, 10**10) == Resolved("random")
    assert resolve(Shuffle(), million, million * 10_000) == Resolved("windowed", 26, 4032, 192)
    assert resolve(Shuffle(), million, million * 10_000) == resolve(on, million, million * 10_000)
    # Neither run nor window grows on.
    assert resolve(Shuffle(), million, million * 100) == Resolved("windowed", 256, 4032, 192)
    assert resolve(Shuffle(), million, million * 10**6) == Resolved("windowed", 1, 960, 192)
    assert resolve(Shuffle(), million, million * 10**9) == Resolved("windowed", 1, 1, 1)  # a window holds one
    assert resolve(Shuffle(1 << 20, 1 << 18), million, million * 10_000).lanes == 4  # as many runs as there are
    assert resolve(Shuffle(), 0, 0) == Resolved("windowed", 256, 4096, 1)


@given(
    setting=st.builds(Shuffle, st.integers(1, 2**40), st.integers(1, 2**30), st.integers(1, 1000)),
    count=st.integers(1, 10**7),
    mean=st.integers(0, 10**8),
    seed=seeds,
)
def test_what_is_resolved_keeps_within_its_bytes(setting, count, mean, seed):
    resolved = resolve(setting, count, count * mean)
    assert setting.lanes % resolved.lanes == 0
    assert resolved.runs % resolved.lanes == 0
    samples = resolved.run * resolved.runs
    assert samples <= LARGEST_WINDOW
    assert samples == 1 or samples * mean <= setting.window_bytes
    assert resolved.run == 1 or resolved.run * mean <= setting.run_bytes
    assert Resolved.from_json(json.loads(json.dumps(resolved.as_json()))) == resolved
    assert len(json.dumps(resolved.as_json())) < 40
    order = order_of(resolved, count, seed)
    assert (order.count, order.lanes) == (count, resolved.lanes)


def test_few_samples_are_laid_in_few_lanes():
    resolved = resolve(Shuffle(), 10**6, 10**10)
    lanes = [order_of(resolved, count, 0).lanes for count in (0, 10, 26 * 15, 26 * 16, 26 * 100, 26 * 512)]
    assert lanes == [1, 1, 1, 2, 12, 64]
    assert order_of(Resolved("windowed", 1, 64, 64), 10, 0).lanes == 64  # a true shuffle needs no others


def test_a_small_dataset_is_shuffled_as_well_as_by_chance():
    # 500 samples of one class each: how far apart two neighbours come, against a third of the length on average.
    distances = []
    for seed in range(40):
        order = order_of(resolve(Shuffle(), 500, 500 * 10_000), 500, seed)
        place = np.argsort(order.take(0, range(500)))
        distances.append(np.abs(np.diff(place)).mean() / 500)
    assert abs(np.mean(distances) - 1 / 3) < 0.01


@pytest.mark.parametrize("bad", [None, 3, "true", "FULL", 1.5])
def test_what_is_no_shuffle_is_refused(bad):
    with pytest.raises(TypeError, match="shuffle is True, False, 'full' or a Shuffle"):
        resolve(bad, 10, 10)


@pytest.mark.parametrize("bad", [{"window_bytes": 0}, {"run_bytes": -1}, {"lanes": 0}, {"lanes": 65_537}])
def test_shuffles_of_no_size_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Shuffle(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        ["windowed", 1, 1],
        ["other", 1, 1, 1],
        ["windowed", 0, 1, 1],
        ["windowed", 1, 3, 2],
        ["random", 1, "1", 1],
        5,
    ],
)
def test_what_is_no_saved_order_is_refused(bad):
    with pytest.raises(ValueError, match="is no order"):
        Resolved.from_json(bad)
