from __future__ import annotations

import json
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards import private_cache, write_dataset  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.dataset.select import Selection
from shardset.errors import StateError
from shardset.loading.feed import SampleFeed
from shardset.loading.mixing import PERIOD, MixFeed, mix, source_seed
from shardset.loading.order import RandomOrder, SequentialOrder, WindowedOrder

SEED = 11


class Counted:
    """Stands for a dataset of any size: of it a selection of all samples needs the length alone."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def views(**sizes):
    return {name: Selection(Counted(size)) for name, size in sizes.items()}


def random_order(count, seed):
    return RandomOrder(count, seed)


def windowed_order(count, seed):
    return WindowedOrder(count, seed, 4, 8, 4)


def sequential_order(count, seed):  # noqa: ARG001
    return SequentialOrder(count)


def make_feed(mixture, *, order=random_order, seed=SEED):
    feeds = []
    for name, view in zip(mixture.names, mixture.views, strict=True):
        own = source_seed(seed, name)
        feeds.append(SampleFeed(view, order(len(view), own), own))
    return MixFeed(mixture, feeds, seed)


def stream(feed, epoch, positions):
    """(source, sample) at positions."""
    picks = feed.take(epoch, positions)
    assert picks.samples.dtype == np.int64
    assert picks.sources.dtype == np.int32
    return list(zip(picks.sources.tolist(), picks.samples.tolist(), strict=True))


def singly(feed, epoch, positions):
    return [stream(feed, epoch, range(position, position + 1))[0] for position in positions]


def own_samples(order, size, name):
    """All that a source gives by itself, epoch after epoch."""
    made = order(size, source_seed(SEED, name))
    for epoch in count():
        yield from made.take(epoch, range(size)).tolist()


def test_without_weights_each_sample_comes_once_in_each_epoch():
    feed = make_feed(mix(views(b=30, a=7, c=1)))
    assert feed.mixture.names == ("a", "b", "c")
    assert feed.count(0) == 38
    everything = [(0, sample) for sample in range(7)] + [(1, sample) for sample in range(30)] + [(2, 0)]
    epochs = [stream(feed, epoch, range(38)) for epoch in range(3)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_repeats_are_exact_in_each_epoch():
    mixture = mix(views(a=40, b=10, c=3), repeats={"a": 1, "b": 4, "c": 0})
    assert (mixture.quotas, mixture.epoch_size) == ((40, 40, 0), 80)
    feed = make_feed(mixture)
    for epoch in range(2):
        samples = stream(feed, epoch, range(80))
        assert all(samples.count((1, sample)) == 4 for sample in range(10))
        assert sorted(sample for source, sample in samples if source == 0) == list(range(40))


def test_repeats_that_make_no_whole_number_are_exact_over_several_epochs():
    mixture = mix(views(a=1, b=7), repeats={"a": 0.1, "b": 0.5})
    assert (mixture.quotas, mixture.epoch_size) == ((1, 35), 4)
    counts = make_feed(mixture).counts(9, 0)
    assert (counts["a"].delivered, counts["b"].delivered) == (1, 35)
    assert (counts["b"].epoch, counts["b"].position) == (5, 0)


def test_repeats_of_huge_datasets_are_met_as_nearly_as_periods_allow():
    mixture = mix(views(a=2**39, b=2**39 + 12_345, c=5_000), repeats={"a": 1, "b": 1.5, "c": 1})
    assert mixture.period == 2**31
    feed = make_feed(mixture)
    counts = feed.counts(1, 0)
    assert sum(count.delivered for count in counts.values()) == mixture.epoch_size == 2**39 * 5 // 2 + 18_518 + 5_000
    assert abs(counts["a"].delivered - 2**39) <= mixture.epoch_size / mixture.period + 4


def test_weights_are_met_exactly_after_each_period_and_nearly_in_between():
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    feed = make_feed(mix(views(a=50_000, b=333, c=10_000), weights=weights))
    assert feed.mixture.shares == weights
    picked = feed.take(0, range(3 * PERIOD)).sources
    for end in (PERIOD, 2 * PERIOD, 3 * PERIOD):
        assert np.bincount(picked[:end]).tolist() == [end * 7 // 10, end * 2 // 10, end // 10]
    came = np.cumsum(picked[:, None] == np.arange(3), axis=0)
    due = np.arange(1, len(picked) + 1)[:, None] * np.array([0.7, 0.2, 0.1])
    assert np.abs(came - due).max() < 2


@pytest.mark.parametrize("order", [random_order, windowed_order, sequential_order])
def test_each_source_comes_in_its_own_order_epoch_after_epoch(order):
    sizes = {"large": 500, "one": 1, "small": 13}
    feed = make_feed(mix(views(**sizes), weights={"large": 3, "one": 1, "small": 2}), order=order)
    picked = [pick for epoch in range(3) for pick in stream(feed, epoch, range(feed.count(epoch)))]
    for source, (name, size) in enumerate(sizes.items()):
        own = [sample for number, sample in picked if number == source]
        assert own == list(islice(own_samples(order, size, name), len(own)))
        assert len(own) > size


def test_a_source_more_changes_nothing_in_the_order_of_the_others():
    few = make_feed(mix(views(a=100, c=50)))
    more = make_feed(mix(views(a=100, b=70, c=50, aa=3)))
    for name in ("a", "c"):
        streams = []
        for feed in (few, more):
            source = feed.mixture.names.index(name)
            streams.append([sample for at, sample in stream(feed, 0, range(feed.count(0))) if at == source])
        assert streams[0] == streams[1]


def test_the_order_in_which_sources_are_given_is_of_no_effect():
    one = make_feed(mix(views(a=20, b=30), weights={"b": 1, "a": 2}))
    other = make_feed(mix(dict(reversed(views(a=20, b=30).items())), weights={"a": 2, "b": 1}))
    assert stream(one, 3, range(50)) == stream(other, 3, range(50))
    other.load_state(one.state(0, 0))


sizes_of = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@given(data=st.data(), sizes=sizes_of, order=st.sampled_from([random_order, windowed_order]), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_positions_taken_together_are_what_they_are_singly(data, sizes, order, seed):
    names = "abcde"[: len(sizes)]
    weights = dict.fromkeys(names, 1) | {names[0]: data.draw(st.integers(1, 50))}
    mixture = mix(views(**dict(zip(names, sizes, strict=True))), weights=weights, epoch_size=200)
    feed = make_feed(mixture, order=order, seed=seed)
    for number in data.draw(st.lists(st.integers(0, 1000), max_size=3).map(sorted)):
        feed.set_weights(*divmod(number, 200), weights | {names[-1]: data.draw(st.integers(1, 9))})
    epoch = data.draw(st.sampled_from([0, 1, 4, 2**32]))
    ends = st.integers(0, 200)
    positions = range(data.draw(ends), data.draw(ends), data.draw(st.sampled_from([1, 2, 3, 17, 99, -1, -5])))
    if positions.step < 0:
        positions = range(positions.start - 1, positions.stop - 1, -1)[:: -positions.step]
    assert stream(feed, epoch, positions) == singly(feed, epoch, positions)


@pytest.mark.parametrize("step", [1, 3, 64, 1000, 123_456])
def test_positions_far_apart_are_what_they_are_singly(step):
    feed = make_feed(mix(views(a=10**6, b=50, c=10**4), weights={"a": 50, "b": 1, "c": 49}, epoch_size=2**40))
    positions = range(2**39, 2**39 + 300 * step, step)
    assert stream(feed, 0, positions) == singly(feed, 0, positions)


def test_short_periods_can_be_taken_with_wide_steps():
    feed = make_feed(mix(views(a=1, b=1), epoch_size=2**40))
    positions = range(0, 2**40, 2**36)
    assert stream(feed, 0, positions) == singly(feed, 0, positions)


def test_a_single_source_is_as_it_is_alone():
    feed = make_feed(mix(views(only=9)))
    for epoch in range(2):
        own = RandomOrder(9, source_seed(SEED, "only")).take(epoch, range(9)).tolist()
        assert stream(feed, epoch, range(9)) == [(0, sample) for sample in own]


def test_no_position_gives_no_sample():
    picks = make_feed(mix(views(a=4, b=4))).take(0, range(3, 3))
    assert (len(picks.samples), len(picks.sources)) == (0, 0)


def test_sources_go_on_where_they_were_when_an_epoch_of_the_mixture_ends():
    feed = make_feed(mix(views(a=10, b=10), epoch_size=8), order=sequential_order)
    assert feed.count(0) == 8
    picked = [pick for epoch in range(5) for pick in stream(feed, epoch, range(8))]
    for source in range(2):
        assert [sample for at, sample in picked if at == source] == [*range(10), *range(10)]
    assert feed.counts(2, 4)["a"] == (10, 1, 0)


def test_spares_are_of_the_same_source_and_of_its_samples():
    mixture = mix(views(a=100, b=3, c=1), weights={"a": 2, "b": 1, "c": 1}, epoch_size=60)
    feed = make_feed(mixture)
    picked = feed.take(2, range(60)).sources
    for position in range(60):
        spares = [feed.spare(2, position, attempt) for attempt in range(5)]
        assert {source for source, _ in spares} == {int(picked[position])}
        assert all(0 <= sample < len(mixture.views[source]) for source, sample in spares)
        assert len({sample for source, sample in spares if source == 0}) != 1
        assert spares == [feed.spare(2, position, attempt) for attempt in range(5)]


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    position=st.integers(0, 999),
    epoch=st.integers(0, 50),
    order=st.sampled_from([random_order, windowed_order, sequential_order]),
)
def test_a_window_ends_with_that_of_the_source_that_has_most_or_with_the_epoch(sizes, position, epoch, order):
    names = "abcde"[: len(sizes)]
    feed = make_feed(mix(views(**dict(zip(names, sizes, strict=True))), epoch_size=1000), order=order)
    end = feed.window_end(epoch, position)
    assert position < end <= 1000
    most = feed.mixture.names[feed.mixture.quotas.index(max(feed.mixture.quotas))]
    size = len(feed.mixture.views[feed.mixture.names.index(most)])
    first, last = feed.counts(epoch, position)[most], feed.counts(epoch, end)[most]
    left = order(size, 0).window_end(first.position) - first.position
    if end < 1000:
        assert last.delivered - first.delivered == left
        assert feed.counts(epoch, end - 1)[most].delivered < last.delivered
    else:
        assert last.delivered - first.delivered <= left


def test_a_window_does_not_reach_behind_a_change_of_weights():
    feed = make_feed(mix(views(a=5000, b=5000)))
    feed.set_weights(0, 1234, {"a": 1, "b": 9})
    assert feed.window_end(0, 0) == 1234
    assert feed.window_end(0, 1234) > 5000


def test_a_change_of_weights_holds_from_its_position_on():
    feed = make_feed(mix(views(a=30_000, b=5_000), weights={"a": 9, "b": 1}))
    before = stream(feed, 0, range(20_000))
    feed.set_weights(0, 12_345, {"a": 1, "b": 3})
    assert stream(feed, 0, range(12_345)) == before[:12_345]
    assert (feed.weights(0, 12_344), feed.weights(0, 12_345)) == ({"a": 0.9, "b": 0.1}, {"a": 0.25, "b": 0.75})
    assert np.bincount(feed.take(0, range(12_345, 22_345)).sources).tolist() == [2500, 7500]


@pytest.mark.parametrize("order", [random_order, windowed_order])
def test_sources_go_on_in_their_order_through_changes_of_weights(order):
    sizes = {"a": 40, "b": 300}
    feed = make_feed(mix(views(**sizes)), order=order)
    feed.set_weights(0, 100, {"a": 1, "b": 1})
    feed.set_weights(1, 7, {"a": 0, "b": 1})
    feed.set_weights(1, 300, {"a": 5, "b": 1})
    picked = [pick for epoch in range(2) for pick in stream(feed, epoch, range(340))]
    for source, (name, size) in enumerate(sizes.items()):
        own = [sample for number, sample in picked if number == source]
        assert own == list(islice(own_samples(order, size, name), len(own)))
    assert 0 not in {source for source, _ in picked[347:640]}
    counts = feed.counts(2, 0)
    assert [count.delivered for count in counts.values()] == np.bincount([source for source, _ in picked]).tolist()


def test_weights_that_are_set_again_at_their_position_are_replaced():
    feed, other = make_feed(mix(views(a=50, b=50))), make_feed(mix(views(a=50, b=50)))
    feed.set_weights(0, 0, {"a": 1, "b": 9})
    feed.set_weights(0, 30, {"a": 1, "b": 8})
    feed.set_weights(0, 30, {"a": 3, "b": 7})
    other.set_weights(0, 0, {"a": 1, "b": 9})
    other.set_weights(0, 30, {"a": 3, "b": 7})
    assert feed.state(0, 30) == other.state(0, 30)
    assert len(feed.state(0, 30)["mix"]) == 3
    assert stream(feed, 0, range(100)) == stream(other, 0, range(100))
    assert feed.weights(0, 0) == {"a": 0.1, "b": 0.9}


def test_weights_cannot_change_before_the_last_change():
    feed = make_feed(mix(views(a=50, b=50)))
    feed.set_weights(2, 30, {"a": 1, "b": 9})
    state = feed.state(2, 30)
    with pytest.raises(ValueError, match="position 29 of epoch 2, as they did at position 30 of epoch 2"):
        feed.set_weights(2, 29, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="lack 'b'"):
        feed.set_weights(3, 0, {"a": 1})
    assert feed.state(2, 30) == state


@given(changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9999)), max_size=4), position=st.integers(0, 99))
@settings(max_examples=50)
def test_a_feed_resumed_from_a_state_gives_what_the_first_gives(changes, position):
    feed, resumed = (make_feed(mix(views(a=30, b=50, c=20))) for _ in range(2))
    for number, weight in sorted(changes):
        feed.set_weights(*divmod(number, 100), {"a": weight, "b": 10_000 - weight, "c": 0})
    resumed.load_state(json.loads(json.dumps(feed.state(3, position))))
    for epoch in range(8):
        start = position if epoch == 3 else 0
        assert stream(resumed, epoch, range(start, 100)) == stream(feed, epoch, range(100))[start:]
    assert resumed.counts(9, 0) == feed.counts(9, 0)


def test_a_change_of_weights_takes_32_bytes_of_a_state_and_no_change_takes_little():
    feed = make_feed(mix(views(a=2**38, b=2**38, c=2**38, d=2**37, e=2**37)))
    assert feed.mixture.epoch_size == 2**40
    size = len(json.dumps(feed.state(0, 0)))
    assert size <= 48
    for epoch in range(1, 4):
        feed.set_weights(epoch - 1, 2**40 - 1, {"a": epoch, "b": 1, "c": 1, "d": 1, "e": 1})
        larger = len(json.dumps(feed.state(0, 0)))
        assert 0 < larger - size <= 32
        size = larger


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (mix(views(a=30, x=50)), "sources of other names than 'a', 'x'"),
        (mix(views(a=30, b=50, c=1)), "sources of other names"),
        (mix(views(a=30, b=51)), "sources of other sizes than 'a': 30, 'b': 51"),
        (mix(views(a=30, b=50), weights={"a": 3, "b": 6}), "other weights or repeats than .*0.3333"),
        (mix(views(a=30, b=50), epoch_size=79), "epochs do not have 79 positions"),
    ],
)
def test_a_state_of_another_mixture_is_refused_and_says_what_differs(other, said):
    feed, state = make_feed(other), make_feed(mix(views(a=30, b=50))).state(0, 7)
    feed.set_weights(0, 3, dict.fromkeys(other.names, 1))
    own = feed.state(0, 7)
    with pytest.raises(StateError, match=said):
        feed.load_state(state)
    assert feed.state(0, 7) == own


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"mix": None},
        {"mix": []},
        {"mix": [5]},
        {"mix": ["aaa"]},
        {"mix": ["MARKS", 5]},
        {"mix": ["MARKS", "x"]},
        {"mix": ["MARKS", "5."]},
        {"mix": ["MARKS", "5.7ps"]},
        {"mix": ["MARKS", ".7ps000"]},
        {"mix": ["MARKS", "5.7ps001"]},
        {"mix": ["MARKS", "5.7PS000"]},
        {"mix": ["MARKS", "-5.7ps000"]},
        {"mix": ["MARKS", "5.7ps000", "5.7ps000"]},
        {"mix": ["MARKS", "5.7ps000", "4.7ps000"]},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    feed = make_feed(mix(views(a=30, b=50)))
    feed.load_state({"mix": [*feed.state(0, 0)["mix"], "5.7ps000", "6.0007ps"]})
    own = feed.state(0, 7)
    if damage.get("mix"):
        damage = {"mix": [own["mix"][0] if part == "MARKS" else part for part in damage["mix"]]}
    with pytest.raises(StateError, match=r"the state"):
        feed.load_state(damage)
    assert feed.state(0, 7) == own


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights": {"a": 1, "z": 1}}, "weights name 'z', which is no source - there are 'a', 'b'"),
        ({"weights": {"a": 1}}, "weights lack 'b' - give a number for each of 'a', 'b'"),
        ({"repeats": {"b": 1}}, "repeats lack 'a'"),
        ({"weights": {"a": -1, "b": 2}}, "weights give -1 for 'a'"),
        ({"weights": {"a": 1, "b": float("nan")}}, "weights give nan for 'b'"),
        ({"repeats": {"a": 1, "b": float("inf")}}, "repeats give inf for 'b'"),
        ({"weights": {"a": 0, "b": 0}}, "weights are 0 for all of 'a', 'b'"),
        ({"weights": {"a": 1e6, "b": 1}}, "'b' a share of 1e-06, which is less than one in 10000 positions"),
        ({"repeats": {"a": 1, "b": 1e-9}}, "repeats give 1e-09 for 'b', which is less than once in 10000 epochs"),
        ({"weights": {"a": 1, "b": 1}, "repeats": {"a": 1, "b": 1}}, "not both"),
        ({"epoch_size": 0}, "epoch_size is 0"),
    ],
)
def test_settings_that_make_no_mixture_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        mix(views(a=4, b=4), **settings)


def test_a_source_that_would_never_come_in_a_period_of_the_greatest_length_is_refused():
    with pytest.raises(ValueError, match=r"repeats give 'b' a share of .*, so that it would never come"):
        mix(views(a=2**40, b=1), repeats={"a": 1, "b": 0.5})


def test_what_is_no_source_is_refused():
    with pytest.raises(ValueError, match="no dataset to mix"):
        mix({})
    with pytest.raises(ValueError, match="'b' has no samples"):
        mix(views(a=4, b=0))
    with pytest.raises(TypeError, match="'a' is neither a dataset nor a selection, but list"):
        mix({"a": [1, 2]})


def test_feeds_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="not those of 'a', 'b'"):
        MixFeed(mix(views(a=4, b=4)), [SampleFeed(view, SequentialOrder(4), 0) for view in views(a=4).values()], 0)


def test_datasets_and_selections_of_them_are_mixed(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "scans").mkdir()
    write_dataset(tmp_path / "photos", shards=2, samples=5)
    write_dataset(tmp_path / "scans", shards=1, samples=6)
    photos, scans = (discover_dataset(str(tmp_path / name)) for name in ("photos", "scans"))
    odd = Selection(scans, np.array([1, 3, 5]))
    feed = make_feed(mix({"photos": photos, "scans": odd}, repeats={"photos": 1, "scans": 2}))
    picked = stream(feed, 0, range(feed.count(0)))
    assert sorted(picked) == [(0, number) for number in range(10)] + [(1, number) for number in (1, 1, 3, 3, 5, 5)]
    assert [view.dataset for view in feed.views] == [photos, scans]


def test_the_stream_of_a_mixture_stays_what_it_is():
    feed = make_feed(mix(views(a=30, b=50, c=7), weights={"a": 5, "b": 3, "c": 2}), seed=42)
    assert stream(feed, 1, range(12)) == [
        (0, 10),
        (1, 30),
        (0, 22),
        (2, 5),
        (0, 15),
        (1, 8),
        (0, 19),
        (2, 6),
        (0, 28),
        (1, 9),
        (0, 25),
        (1, 10),
    ]
    assert source_seed(42, "a") == 5939441918542832972
    assert feed.state(0, 0) == {"mix": ["g9xjh.cau38.c4r57.2f"]}
