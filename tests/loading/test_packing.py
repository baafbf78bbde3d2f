from __future__ import annotations

import json
import pickle
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import private_cache, write_dataset  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.dataset.select import Selection
from shardset.dataset.views import Pack
from shardset.errors import SampleError, StateError
from shardset.loading.order import Resolved, order_of
from shardset.loading.packing import PackFeed, best_fit
from shardset.policy import Report

RANDOM = Resolved("random")
WINDOWED = Resolved("windowed", 3, 8, 4)
SEQUENTIAL = Resolved("sequential")
SHUFFLES = st.sampled_from([RANDOM, WINDOWED, SEQUENTIAL])
LENGTHS = st.lists(st.integers(1, 25), max_size=60)


class View:
    """As much of a `Selection` as a feed uses; its sample `i` is number `i + first` of its dataset."""

    def __init__(self, lengths, first=0):
        self.lengths = np.asarray(lengths)
        if not len(self.lengths):
            self.lengths = np.zeros(0, np.int64)
        self.first = first

    def __len__(self):
        return len(self.lengths)

    def column(self, name):
        assert name == "tokens"
        return self.lengths

    def numbers_at(self, places):
        return places + self.first


def make_feed(lengths, shuffle=RANDOM, *, size=20, window=8, seed=3, first=0):
    return PackFeed(View(lengths, first), Pack("tokens", size, window), shuffle, seed)


def packs_of(feed, epoch=0, positions=None):
    picks = feed.take(epoch, range(feed.count(epoch)) if positions is None else positions)
    return [part.tolist() for part in np.split(picks.samples, picks.ends[:-1])] if len(picks.ends) else []


MADE_OF = {
    "lengths": LENGTHS,
    "shuffle": SHUFFLES,
    "size": st.integers(1, 30),
    "window": st.integers(1, 20),
    "epoch": st.integers(0, 3),
}


@given(**MADE_OF, first=st.sampled_from([0, 100]))
def test_each_sample_that_fits_is_in_one_pack_and_no_pack_is_too_long(*, lengths, shuffle, size, window, epoch, first):
    feed = make_feed(lengths, shuffle, size=size, window=window, first=first)
    packs = packs_of(feed, epoch)
    assert len(packs) == feed.count(epoch)
    assert all(packs)
    assert all(sum(lengths[sample - first] for sample in pack) <= size for pack in packs)
    fitting = [number + first for number, length in enumerate(lengths) if length <= size]
    assert sorted(sample for pack in packs for sample in pack) == fitting


@given(**MADE_OF)
def test_packs_of_a_window_have_its_samples_and_each_pack_has_them_in_their_order(
    *, lengths, shuffle, size, window, epoch
):
    packs = packs_of(make_feed(lengths, shuffle, size=size, window=window), epoch)
    order = order_of(shuffle, len(lengths), 3).take(epoch, range(len(lengths))).tolist()
    order = {sample: place for place, sample in enumerate(order)}
    places = [[order[sample] for sample in pack] for pack in packs]
    assert all(pack == sorted(pack) for pack in places)
    windows = [[place // window for place in pack] for pack in places]
    assert all(len(set(pack)) == 1 for pack in windows)
    firsts = [pack[0] for pack in windows]
    assert firsts == sorted(firsts)
    if shuffle is SEQUENTIAL:
        assert places == sorted(places)


@given(lengths=LENGTHS.map(lambda lengths: sorted(lengths, reverse=True)), size=st.integers(25, 60))
def test_best_fit_takes_the_fullest_pack_that_has_room(lengths, size):
    rooms, expected = [], []
    for length in lengths:
        found = min((room, number) for number, room in enumerate([*rooms, size]) if room >= length)[1]
        fits = [room for room in rooms if room >= length]
        if fits:
            found = rooms.index(min(fits))
        else:
            rooms.append(size)
            found = len(rooms) - 1
        rooms[found] -= length
        expected.append(found)
    assert best_fit(lengths, size) == expected


@given(
    **MADE_OF,
    asked=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4)), max_size=6),
    resumed=st.integers(0, 60),
)
def test_packs_asked_for_bit_by_bit_or_after_a_resume_are_those_asked_for_at_once(
    *, lengths, shuffle, size, window, epoch, asked, resumed
):
    whole = make_feed(lengths, shuffle, size=size, window=window)
    packs = packs_of(whole, epoch)
    count = len(packs)
    state = json.loads(json.dumps(make_feed(lengths, shuffle, size=size, window=window).state(epoch, resumed)))
    for is_resumed in (False, True):
        feed = make_feed(lengths, shuffle, size=size, window=window)
        if is_resumed:
            feed.load_state(state)
        for start, many, step in asked:
            if start < count:
                positions = range(start, min(start + many, count), step)
                assert packs_of(feed, epoch, positions) == packs[positions.start : positions.stop : step]
            assert feed.count(epoch, start) == min(start, count)
            assert feed.state(epoch, start) == whole.state(epoch, start)
        assert feed.count(epoch) == count


@given(**MADE_OF)
def test_windows_end_behind_their_positions_and_the_last_at_the_count(*, lengths, shuffle, size, window, epoch):
    feed = make_feed(lengths, shuffle, size=size, window=window)
    position, count = 0, feed.count(epoch)
    while position < count:
        end = feed.window_end(epoch, position)
        assert position < end <= count
        assert all(feed.window_end(epoch, between) == end for between in range(position, end))
        position = end


@pytest.mark.parametrize("shuffle", [RANDOM, WINDOWED])
def test_another_epoch_or_seed_has_other_packs_and_the_same_one_the_same(shuffle):
    lengths = np.random.default_rng(0).integers(1, 20, 100)
    found = [packs_of(make_feed(lengths, shuffle, seed=seed), epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(found[one] != found[other] for one in range(4) for other in range(one))
    again = make_feed(lengths, shuffle, seed=1)
    for epoch in (3, 2, 1, 0):
        again.count(epoch)
    assert packs_of(again) == found[0]


def test_packs_that_states_refer_to_stay_as_they_are():
    lengths = [number * 7 % 19 + 1 for number in range(16)]
    assert packs_of(make_feed(lengths, seed=5), 1) == [
        [13, 14],
        [7, 9],
        [12, 4],
        [5],
        [10],
        [1, 15],
        [0, 8],
        [3, 11],
        [6, 2],
    ]


def test_packs_of_a_shuffled_window_come_in_any_order():
    lengths = [19, *[1] * 19]
    firsts = {len(packs_of(make_feed(lengths, window=20, seed=seed))[0]) for seed in range(20)}
    assert len(firsts) > 1  # the pack of the longest sample is not always the first, nor the last


def test_a_resume_works_out_no_window_before_its_own():
    lengths = np.random.default_rng(0).integers(1, 20, 1000)
    saved = make_feed(lengths)
    count = saved.count(1)
    state = saved.state(1, count // 2)
    feed = make_feed(lengths)
    asked = []

    class Watched:
        def __init__(self, order):
            self.order = order

        def take(self, epoch, positions):
            asked.append(positions.start // 8)
            return self.order.take(epoch, positions)

    feed._order = Watched(feed._order)
    feed.load_state(state)
    assert packs_of(feed, 1, range(count // 2, count)) == packs_of(saved, 1)[count // 2 :]
    assert min(asked) == state["pack"][1]
    assert packs_of(feed, 1, range(3)) == packs_of(saved, 1)[:3]
    assert len(json.dumps(state)) < 80


def test_a_state_of_other_packs_is_refused_and_changes_nothing():
    lengths = [5, 6, 7, 8] * 10
    feed = make_feed(lengths)
    state = feed.state(0, 7)
    other = [make_feed(lengths, size=21), make_feed(lengths, window=9), make_feed([*lengths[:-1], 9])]
    for each in other:
        with pytest.raises(StateError, match="the state is of packs with"):
            each.load_state(state)
    for hint in (None, [0, 0], [0, 6, 0], [0, 1, 9], [0, -1, 0], [-1, 0, 0], [0, 1, -1], [0, "1", 1], {}):
        with pytest.raises(StateError, match="place among packs"):
            feed.load_state(state | {"pack": hint})
    assert feed.state(0, 7) == state


def test_packs_are_full():
    draws = np.random.default_rng(0)
    lengths = np.clip(draws.lognormal(np.log(500), 0.8, 50 * 1024).astype(int), 1, 4096)
    feed = make_feed(lengths, size=4096, window=1024)
    assert lengths.sum() / (feed.count(0) * 4096) > 0.99


def test_lengths_with_fractions_are_never_too_long_together():
    lengths = np.random.default_rng(0).uniform(0.01, 3, 500)
    packs = packs_of(make_feed(lengths, size=10, window=500))
    assert all(sum(map(float, lengths[pack])) <= 10 for pack in packs)
    assert lengths.sum() / (len(packs) * 10) > 0.97
    assert packs_of(make_feed([2.5] * 4, SEQUENTIAL, size=5)) == [[0, 1], [2, 3]]
    assert packs_of(make_feed([5.0, 5.000001, np.inf], SEQUENTIAL, size=5)) == [[0]]
    with pytest.raises(ValueError, match="too large for lengths with fractions"):
        make_feed([1.0], size=1 << 50)
    assert packs_of(make_feed([1 << 50, 1, 1 << 49], SEQUENTIAL, size=1 << 50)) == [[0], [1, 2]]


def test_positions_that_an_epoch_does_not_have_are_refused():
    feed = make_feed([5] * 10)
    assert feed.count(0) == 3  # 8 of them make two packs, and 2 one more
    for positions in (range(3, 4), range(5), range(9, 10)):
        with pytest.raises(IndexError, match="has 3 packs, and none at"):
            feed.take(0, positions)
    assert packs_of(feed, 0, range(3, 3)) == []
    assert feed.state(0, 3)["pack"] == [0, 2, 3]


def test_counting_goes_no_further_than_it_must():
    feed = make_feed([5] * 10_000)
    assert feed.count(0, 10) == 10
    assert feed._counts[0].next == 5
    assert feed.count(0) == 2500
    assert feed.count(0, 10) == 10


@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=40).filter(lambda lengths: min(lengths) <= 20))
def test_a_spare_may_stand_for_any_sample_of_its_pack(lengths):
    feed = make_feed(lengths, first=100)
    for position, pack in enumerate(packs_of(feed)):
        for attempt in range(3):
            source, spare = feed.spare(0, position, attempt)
            assert (source, spare) == feed.spare(0, position, attempt)
            for sample in pack:
                assert sum(lengths[one - 100] for one in [*pack, spare]) - lengths[sample - 100] <= 20


def test_spares_differ_from_attempt_to_attempt():
    feed = make_feed([5] * 100)
    assert len({feed.spare(0, 0, attempt) for attempt in range(20)}) > 5
    full = make_feed([3, 17, *[19] * 5000], SEQUENTIAL)
    assert full.spare(0, 0, 0) == (0, 0)  # no other one fits, and among so many it is not drawn


def test_a_feed_goes_to_another_process_in_any_state():
    feed = make_feed(np.random.default_rng(0).integers(1, 20, 100), WINDOWED)
    packs = packs_of(feed)
    assert packs_of(pickle.loads(pickle.dumps(feed))) == packs


def test_a_resume_among_ten_million_samples_takes_less_than_a_tenth_of_a_second():
    lengths = np.random.default_rng(0).integers(1, 4096, 10_000_000)
    shuffle = Resolved("windowed", 2, 5312, 64)
    packs_before = 3_000_000
    feed = make_feed(lengths, shuffle, size=4096, window=1024)
    state = feed.state(0, 0) | {"pack": [0, 5000, packs_before]}
    taken = []
    while len(taken) < 10 and min(taken, default=1) >= 0.1:  # the machine may be busy with something else
        resumed = make_feed(lengths, shuffle, size=4096, window=1024)
        start = time.process_time()
        resumed.load_state(state)
        resumed.take(0, range(packs_before + 100, resumed.count(0, packs_before + 132)))
        taken.append(time.process_time() - start)
    assert min(taken) < 0.1


@pytest.fixture
def dataset(tmp_path):
    write_dataset(tmp_path)
    return discover_dataset(tmp_path)


def with_tokens(dataset, tokens):
    table = pa.table({"sample_index": np.arange(len(tokens)), "tokens": tokens})
    return Selection(dataset).select(columns=table, on="sample_index")


def test_samples_longer_than_a_pack_are_left_out_and_counted_by_name(dataset):
    view = with_tokens(dataset, [5, 21, 7, 8, *[20] * 8]).select(pc.field("tokens") > 5)
    feed = PackFeed(view, Pack("tokens", 20), SEQUENTIAL, 0)
    assert packs_of(feed) == [[2, 3], *([number] for number in range(4, 12))]
    report = Report()
    feed.account(0, report)
    assert report.counts == {"too_long": 1}
    assert str(report.places("too_long")[0]).endswith("0000.tar#00000001: 'tokens' is 21, and a pack has 20")
    many = Report()
    PackFeed(with_tokens(dataset, [30] * 12), Pack("tokens", 20), SEQUENTIAL, 0).account(0, many)
    assert many.counts == {"too_long": 12}


@pytest.mark.parametrize("length", [0, -3, float("nan"), -0.5])
def test_a_length_that_is_none_is_an_error_that_names_the_sample(dataset, length):
    view = with_tokens(dataset, [*[5] * 6, length, *[5] * 4, length])
    with pytest.raises(SampleError, match="for sample '00000006', and not above 0 for 2 in all") as caught:
        PackFeed(view, Pack("tokens", 20), RANDOM, 0)
    assert caught.value.key == "00000006"
    assert "pc.field('tokens') > 0" in caught.value.hint
    whole = view.select(pc.field("tokens") > 0)
    assert sum(map(len, packs_of(PackFeed(whole, Pack("tokens", 20), RANDOM, 0)))) == 10


def test_lengths_that_are_no_numbers_are_refused(dataset):
    with pytest.raises(ValueError, match="lengths are numbers"):
        PackFeed(Selection(dataset), Pack("key", 20), RANDOM, 0)
