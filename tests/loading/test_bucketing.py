from __future__ import annotations

import io
import json
import pickle
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.dataset.select import Selection
from shardset.dataset.views import Buckets
from shardset.errors import StateError
from shardset.loading import bucketing
from shardset.loading.bucket_order import SampleOrder
from shardset.loading.bucketing import BucketFeed, BucketSummary
from shardset.loading.order import Resolved
from shardset.policy import Report
from shardset.tasks.indexing import index_dataset

RANDOM = Resolved("random")
WINDOWED = Resolved("windowed", 3, 8, 4)
SEQUENTIAL = Resolved("sequential")
SHUFFLES = st.sampled_from([RANDOM, WINDOWED, Resolved("windowed", 1, 4, 2), SEQUENTIAL])
# Sorted as texts; by aspect and area they are (64, 128), (100, 100), (200, 200), (128, 64).
KEYS = ["(100, 100)", "(128, 64)", "(200, 200)", "(64, 128)"]
BY_ASPECT = [3, 0, 2, 1]
SIZES = [(100, 100), (64, 128), (200, 200), (128, 64)]  # height and width of each


class View:
    """As much of a `Selection` as a feed uses. Sample `i` is in the bucket `of[i]` of `KEYS`; -1 if in none."""

    def __init__(self, of, numbers=None):
        self.of = np.array(of, np.int64)
        self.numbers = None if numbers is None else np.array(numbers, np.int64)
        self.dataset = SimpleNamespace(catalog=SimpleNamespace(num_samples=len(self.of)))

    def __len__(self):
        return len(self.of) if self.numbers is None else len(self.numbers)

    def order(self):
        samples = [np.flatnonzero(self.of == bucket) for bucket in range(len(KEYS))]
        there = [bucket for bucket in range(len(KEYS)) if len(samples[bucket])]
        starts = np.cumsum([0, *(len(samples[bucket]) for bucket in there)])
        keys = [KEYS[bucket] for bucket in there]
        return SampleOrder(keys, starts, np.concatenate(samples))


def make_feed(view, shuffle=RANDOM, unit=4, seed=7, **settings):
    with patch.object(bucketing, "dataset_buckets", lambda *_, **__: view.order()):
        return BucketFeed(view, Buckets(**settings), shuffle, seed, unit)


def counted(feed, epoch=0):
    report = Report()
    feed.account(epoch, report)
    return report.counts


def some_of(*counts):
    """Samples in so many of each bucket, mixed."""
    return np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))


MADE_OF = {
    "of": st.lists(st.integers(-1, 3), max_size=80),
    "unit": st.integers(1, 9),
    "shuffle": SHUFFLES,
    "leftovers": st.sampled_from(["drop", "pad", "merge"]),
    "epoch": st.integers(0, 3),
}


@given(**MADE_OF, part=st.booleans())
def test_an_epoch_has_each_sample_once_in_units_of_one_bucket_and_counts_what_it_leaves_out(
    *, of, unit, shuffle, leftovers, epoch, part
):
    numbers = [number for number in range(len(of)) if number % 3] if part else None
    view = View(of, numbers)
    feed = make_feed(view, shuffle, unit, leftovers=leftovers)
    count = feed.count(epoch)
    picks = feed.take(epoch, range(count))
    assert len(picks.samples) == len(picks.buckets) == count == feed.num_units * unit
    shown = [SIZES[bucket] for bucket in view.of[picks.samples].tolist()]
    given = [feed.shape(bucket) for bucket in picks.buckets.tolist()]
    for start in range(0, count, unit):
        assert len(set(given[start : start + unit])) == 1
    repeated = np.zeros(count, bool) if picks.repeated is None else picks.repeated
    firsts = picks.samples[~repeated].tolist()
    assert len(set(firsts)) == len(firsts)
    wanted = range(len(of)) if numbers is None else numbers
    left_out = {number for number in wanted if of[number] >= 0} - set(firsts)
    assert set(firsts) <= set(wanted)
    assert counted(feed, epoch) == {
        code: many
        for code, many in {
            "bucket_leftover_dropped": len(left_out),
            "bucket_merged": sum(map(tuple.__ne__, shown, given)),
            "bucket_padded": int(repeated.sum()),
            "no_geometry": sum(of[number] < 0 for number in wanted),
        }.items()
        if many
    }
    if leftovers != "merge":
        assert shown == given
    if leftovers == "pad":
        assert not left_out
        assert set(picks.samples[repeated].tolist()) <= set(firsts)
    if leftovers == "merge":
        assert len(left_out) < unit
    if leftovers == "drop":
        assert all(many < unit for many in Counter(of[number] for number in left_out).values())


@given(**MADE_OF, cuts=st.lists(st.integers(0, 90), max_size=6), step=st.integers(1, 5))
def test_positions_asked_for_bit_by_bit_are_those_asked_for_at_once(*, of, unit, shuffle, leftovers, epoch, cuts, step):
    whole = make_feed(View(of), shuffle, unit, leftovers=leftovers)
    count = whole.count(epoch)
    every = whole.take(epoch, range(count))
    repeated = np.zeros(count, bool) if every.repeated is None else every.repeated
    feed = make_feed(View(of), shuffle, unit, leftovers=leftovers)
    for start in cuts:
        for positions in (range(min(start, count), min(start + 7, count)), range(start % step, count, step)):
            picks = feed.take(epoch, positions)
            at = list(positions)
            assert picks.samples.tolist() == every.samples[at].tolist()
            assert picks.buckets.tolist() == every.buckets[at].tolist()
            assert (np.zeros(len(at), bool) if picks.repeated is None else picks.repeated).tolist() == repeated[
                at
            ].tolist()
        feed.take(epoch + 1, range(min(start, count)))


def test_buckets_are_numbered_by_aspect_and_then_by_area():
    feed = make_feed(View([0, 1, 2, 3]), unit=1)
    assert [feed.shape(bucket) for bucket in range(4)] == [(128, 64), (100, 100), (200, 200), (64, 128)]


def test_without_a_shuffle_buckets_come_by_number_and_samples_as_in_the_dataset():
    view = View(some_of(5, 4, 3, 6))
    picks = make_feed(view, SEQUENTIAL, 2).take(0, range(16))
    assert picks.buckets.tolist() == [0] * 6 + [1] * 4 + [2] * 2 + [3] * 4
    for bucket in range(4):
        given = picks.samples[picks.buckets == bucket].tolist()
        assert given == np.flatnonzero(view.of == BY_ASPECT[bucket])[: len(given)].tolist()


@pytest.mark.parametrize("shuffle", [RANDOM, WINDOWED])
def test_another_epoch_or_seed_has_other_units_of_other_samples_and_the_same_one_the_same(shuffle):
    view = View(some_of(40, 40, 40, 40))
    takes = [make_feed(view, shuffle, seed=seed).take(epoch, range(160)) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(take.samples.tolist()) for take in takes}) == 4
    assert len({tuple(take.buckets.tolist()) for take in takes}) == 4
    again = make_feed(view, shuffle, seed=1)
    again.take(1, range(160))
    assert again.take(0, range(160)).samples.tolist() == takes[0].samples.tolist()


def test_an_order_that_states_refer_to_stays_as_it_is():
    picks = make_feed(View([number * 7 % 4 for number in range(20)]), unit=2, seed=5).take(1, range(16))
    assert picks.samples.tolist() == [10, 2, 9, 1, 8, 4, 17, 13, 3, 19, 6, 18, 7, 15, 16, 0]
    assert picks.buckets[::2].tolist() == [2, 0, 1, 0, 3, 2, 3, 1]


def test_a_bucket_has_its_share_of_a_window_but_not_too_few_runs():
    feed = make_feed(View([0] * 300 + [1] * 99 + [3]), Resolved("windowed", 64, 12800, 64))
    assert [(order.runs, order.lanes, order.count) for order in map(feed._order, range(3))] == [
        (128, 1, 1),
        (9600, 1, 300),
        (3168, 1, 99),
    ]
    few = make_feed(View([0, 3]), Resolved("windowed", 64, 16, 4))
    assert few._order(0).runs == 16


def test_what_is_left_out_of_one_epoch_is_in_others():
    feed = make_feed(View(some_of(7, 7, 7, 7)), unit=4)
    seen = [set(feed.take(epoch, range(feed.count(epoch))).samples.tolist()) for epoch in range(30)]
    assert all(len(each) == 16 for each in seen)
    assert len(set.union(*seen)) == 28


def test_units_of_all_buckets_come_at_any_place():
    feed = make_feed(View(some_of(400, 400)), unit=1)
    firsts = Counter(int(feed.take(epoch, range(1)).buckets[0]) for epoch in range(200))
    assert 60 < firsts[0] < 140  # 7 standard deviations at most
    halves = feed.take(0, range(400)).buckets.sum()
    assert 150 < halves < 250


def test_other_buckets_change_nothing_in_the_order_of_one():
    def samples(view):
        picks = make_feed(view, unit=2).take(3, range(40))
        return picks.samples[picks.buckets == 0].tolist()

    of = np.full(60, -1)
    of[:20] = 3
    alone = View(of)
    alone_samples = make_feed(alone, unit=2).take(3, range(20)).samples.tolist()
    of[20:40] = 1
    assert samples(View(of)) == alone_samples


def test_merged_leftovers_are_used_first_in_the_bucket_next_in_shape():
    # 3 of (64, 128), 2 of (100, 100), 6 of (200, 200), 4 of (128, 64), in units of 4
    view = View(np.repeat([3, 0, 2, 1], [3, 2, 6, 4]))
    feed = make_feed(view, SEQUENTIAL, leftovers="merge")
    assert feed.take(0, range(12)).samples.reshape(3, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert feed.take(0, range(12)).buckets[::4].tolist() == [1, 2, 3]
    assert counted(feed) == {"bucket_leftover_dropped": 3, "bucket_merged": 3 + 1 + 3}
    assert feed.table() == [
        BucketSummary(128, 64, 3, 0, 3),
        BucketSummary(100, 100, 2, 1, 1),
        BucketSummary(200, 200, 6, 1, 3),
        BucketSummary(64, 128, 4, 1, 3),
    ]


def test_a_bucket_smaller_than_its_unit_is_padded_with_itself_over_and_over():
    feed = make_feed(View([0, 0, 0]), SEQUENTIAL, 8, leftovers="pad")
    picks = feed.take(0, range(8))
    assert picks.samples.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert picks.repeated.tolist() == [False] * 3 + [True] * 5
    assert feed.table() == [BucketSummary(100, 100, 3, 1, 3)]


def test_a_report_names_the_buckets():
    report = Report()
    make_feed(View(some_of(5, 0, 0, 2))).account(0, report)
    assert [str(place) for place in report.places("bucket_leftover_dropped")] == [
        "bucket 64x128 (width x height): 2",
        "bucket 100x100 (width x height): 1",
    ]


@pytest.mark.parametrize("leftovers", ["drop", "pad", "merge"])
def test_a_spare_is_of_the_bucket_of_the_position_and_another_one_at_another_attempt(leftovers):
    view = View(some_of(30, 30, 30, 31))
    feed = make_feed(view, leftovers=leftovers)
    for position in range(0, feed.count(0), 7):
        bucket = int(feed.take(0, range(position, position + 1)).buckets[0])
        spares = [feed.spare(0, position, attempt) for attempt in range(16)]
        assert {(source, int(view.of[sample])) for source, sample in spares} == {(0, BY_ASPECT[bucket])}
        assert len(set(spares)) > 5  # of 30, in 16 draws
        assert spares == [feed.spare(0, position, attempt) for attempt in range(16)]
        # Where the bucket has nothing that can be given, others will do.
        assert len({int(view.of[feed.spare(0, position, attempt)[1]]) for attempt in range(16, 64)}) > 2


@given(**MADE_OF, window=st.integers(1, 40))
def test_windows_end_at_units_and_every_position_is_in_one(*, of, unit, shuffle, leftovers, epoch, window):
    if shuffle.kind == "windowed":
        shuffle = Resolved("windowed", 1, window, 1)
    feed = make_feed(View(of), shuffle, unit, leftovers=leftovers)
    position = 0
    while position < feed.count(epoch):
        end = feed.window_end(epoch, position)
        assert end > position
        assert end % unit == 0
        assert all(feed.window_end(epoch, between) == end for between in range(position, end))
        position = end
    assert position == feed.count(epoch)


def test_a_state_takes_its_unit_along():
    view = View(some_of(40, 40, 40, 40))
    saved = make_feed(view, unit=8)
    state = json.loads(json.dumps(saved.state(0, 16)))
    feed = make_feed(view, unit=4)
    feed.take(0, range(16))
    feed.load_state(state)
    assert feed.unit == 8
    assert feed.take(0, range(16, 160)).samples.tolist() == saved.take(0, range(16, 160)).samples.tolist()
    assert len(json.dumps(state)) < 90


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    view = View(some_of(40, 40, 40, 40))
    feed = make_feed(view, unit=4)
    state = feed.state(0, 0)
    with pytest.raises(StateError, match=r"\[None, None, 'drop', \d+\].*\[None, None, 'pad', \d+\]"):
        make_feed(view, leftovers="pad").load_state(state)
    with pytest.raises(StateError, match=r"these have \[4096, 32, 'drop', \d+\]"):
        make_feed(view, area=4096, multiple=32).load_state(state)
    for unit in (0, -1, None, "4", 4.0, True, 1 << 40):
        with pytest.raises(StateError, match="no number of samples"):
            feed.load_state(state | {"unit": unit})
    assert feed.unit == 4


def test_a_unit_that_the_settings_name_wins_and_holds_against_states():
    with patch.object(bucketing, "dataset_buckets", lambda *_, **__: View(some_of(40)).order()):
        feed = BucketFeed(View(some_of(40)), Buckets(unit=8), RANDOM, 1, 2)
        assert feed.unit == 8
        with pytest.raises(StateError, match="units of 4 samples of a bucket, these buckets have units of 8"):
            feed.load_state(feed.state(0, 0) | {"unit": 4})
        with pytest.raises(ValueError, match="0 samples"):
            BucketFeed(View(some_of(40)), Buckets(), RANDOM, 1, 0)


def test_positions_that_an_epoch_does_not_have_are_refused():
    feed = make_feed(View(some_of(5, 5)))
    for positions in (range(8, 9), range(-1, 2), range(9)):
        with pytest.raises(IndexError, match="of an epoch of 8"):
            feed.take(0, positions)


def test_a_feed_goes_to_another_process_in_any_state():
    feed = make_feed(View(some_of(20, 20)), WINDOWED)
    feed.take(0, range(7))
    assert pickle.loads(pickle.dumps(feed)).take(0, range(40)).samples.tolist() == (
        feed.take(0, range(40)).samples.tolist()
    )


def picture(width, height, orientation=1):
    from PIL import Image

    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


@pytest.fixture
def dataset(tmp_path):
    """Twelve pictures as they are shown 40x20, one in three of them stored on its side, four 30x30, and a text."""
    pictures = [picture(20, 40, 6) if number % 3 == 0 else picture(40, 20) for number in range(12)]
    members = [(f"{number:02d}.jpg", payload) for number, payload in enumerate(pictures)]
    write_shard(tmp_path / "0.tar", members)
    write_shard(tmp_path / "1.tar", [*((f"b{number}.jpg", picture(30, 30)) for number in range(4)), ("c.txt", b"x")])
    index_dataset(tmp_path, geometry=True, workers=0)
    return discover_dataset(tmp_path)


def test_buckets_of_a_dataset_are_of_the_sizes_that_images_are_shown_with(dataset):
    feed = BucketFeed(Selection(dataset), Buckets(), SEQUENTIAL, 0, 4)
    assert feed.table() == [BucketSummary(30, 30, 4, 1, 0), BucketSummary(20, 40, 12, 3, 0)]
    assert feed.take(0, range(16)).samples.tolist() == [12, 13, 14, 15, *range(12)]
    assert counted(feed) == {"no_geometry": 1}


def test_buckets_with_an_area_have_scaled_sizes_and_those_of_a_selection_its_samples(dataset):
    view = Selection(dataset, np.array([1, 3, 5, 7, 12, 15]))
    feed = BucketFeed(view, Buckets(area=64 * 64, multiple=16), SEQUENTIAL, 0, 2)
    assert feed.table() == [BucketSummary(64, 64, 2, 1, 0), BucketSummary(48, 96, 4, 2, 0)]
    assert feed.take(0, range(6)).samples.tolist() == [12, 15, 1, 3, 5, 7]
    assert counted(feed) == {}
    only = BucketFeed(Selection(dataset, np.array([2, 4])), Buckets(), SEQUENTIAL, 0, 2)
    assert [only.shape(int(bucket)) for bucket in only.take(0, range(2)).buckets] == [(20, 40)] * 2
