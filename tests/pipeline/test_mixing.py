"""Mixing of datasets: what comes when, what ends a pass, what is left out, and how a pass goes on."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import write_shard
from shardset.errors import StateError
from shardset.pipeline.mixing import RandomMix, RoundRobin
from shardset.pipeline.web_dataset import WebDataset
from shardset.webdataset.mix import random_samples, round_robin_longest, round_robin_shortest


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "shardset.pipeline")


def letters(*counts):
    """Make lists of samples that tell their source: ``a0 a1 ...``, ``b0 b1 ...``."""
    return [[f"{'abcdef'[source]}{number}" for number in range(count)] for source, count in enumerate(counts)]


class Counting:
    """A dataset with all that a pipeline has: epochs, a length, a report of its own, states, and a close."""

    def __init__(self, name, count):
        self.name, self.count = name, count
        self.epoch, self.at, self.loaded, self.opened, self.closed = 0, 0, 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        self.at, self.loaded = self.loaded, 0
        return self.run()

    def run(self):
        self.opened += 1
        try:
            while self.at < self.count:
                self.at += 1
                yield f"{self.name}{self.at - 1}"
        finally:
            self.closed += 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.loaded = state["at"]


def test_turns_end_with_the_shortest_source():
    assert list(RoundRobin(letters(3, 2, 4))) == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]


def test_turns_pass_over_what_has_ended_if_all_shall_be_taken():
    assert " ".join(RoundRobin(letters(3, 1, 4), longest=True)) == "a0 b0 c0 a1 c1 a2 c2 c3"


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_turns_are_those_of_webdataset(counts):
    sources = [iter(source) for source in letters(*counts)]
    expected, at = [], 0
    while sources:  # webdataset's loop in its own words
        at %= len(sources)
        sample = next(sources[at], None)
        if sample is None:
            del sources[at]
        else:
            expected.append(sample)
            at += 1
    assert list(RoundRobin(letters(*counts), longest=True)) == expected


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 1 << 64), st.booleans(), st.integers(0, 9))
def test_a_random_mix_keeps_the_order_of_each_source_and_loses_nothing_if_all_shall_be_taken(
    counts, seed, longest, epoch
):
    sources = letters(*counts)
    dataset = RandomMix(sources, longest=longest, seed=seed)
    dataset.set_epoch(epoch)
    mixed = list(dataset)
    for number, source in enumerate(sources):
        mine = [sample for sample in mixed if sample[0] == "abcdef"[number]]
        assert mine == source[: len(mine)]
        assert not longest or mine == source
    assert len(mixed) + len(dataset.report()) <= sum(counts)
    if not longest:
        assert len(mixed) + dataset.report().counts.get("cut_off", 0) == sum(counts)


def test_probabilities_are_kept():
    share = Counter(sample[0] for sample in RandomMix(letters(90_000, 90_000, 9), probs=[3, 1, 0]))
    assert set(share) == {"a", "b"}
    assert share["a"] == 90_000
    assert 29_300 < share["b"] < 30_700


def test_what_has_ended_is_not_drawn_any_more():
    dataset = RandomMix(letters(2, 3, 0), probs=[1e9, 1, 1], longest=True)
    assert sorted(dataset) == ["a0", "a1", "b0", "b1", "b2"]
    assert not dataset.report()


def test_sources_that_are_never_drawn_end_the_pass_and_are_counted():
    dataset = RandomMix(letters(2, 3), probs=[1, 0], longest=True)
    assert list(dataset) == ["a0", "a1"]
    assert dataset.report().counts == {"cut_off": 3}


def test_epochs_differ_and_can_be_set_and_seeds_differ():
    dataset = RandomMix(letters(40, 40), longest=True)
    first, second = list(dataset), list(dataset)
    assert first != second
    dataset.set_epoch(0)
    assert list(dataset) == first
    assert list(dataset) == second
    assert list(RandomMix(letters(40, 40), longest=True, seed=1)) != first


def test_ranks_and_workers_draw_apart(monkeypatch):
    orders = set()
    for rank in "01":
        for worker in "01":
            for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("WORKER", worker), ("NUM_WORKERS", "2")):
                monkeypatch.setenv(name, value)
            orders.add(tuple(RandomMix(letters(40, 40), longest=True)))
    assert len(orders) == 4


def test_the_draws_stay_what_they_are():
    assert (
        "".join(sample[0] for sample in RandomMix(letters(9, 9, 9), seed=5, longest=True))
        == "ccbbccaaacaccaacbcaaabbbbbb"
    )


def test_what_is_cut_off_is_counted_with_its_place_and_warned_of(caplog):
    caplog.set_level(logging.WARNING, "shardset.pipeline")
    dataset = RoundRobin([Counting("a", 2), Counting("b", 7), iter(range(5)), Counting("d", 1)])
    assert list(dataset) == ["a0", "b0", 0, "d0", "a1", "b1", 1]
    report = dataset.report()
    assert report.counts == {"cut_off": 6}
    assert "source 1, counted from 0, had more than the 2 samples taken" in str(report)
    assert "source 2" in str(report)
    assert len([record for record in caplog.records if "longest=True" in record.message]) == 2


def test_sources_that_end_together_are_not_cut_off(caplog):
    caplog.set_level(logging.WARNING, "shardset.pipeline")
    dataset = RoundRobin(letters(3, 3))
    assert len(list(dataset)) == 6
    assert not dataset.report()
    assert not caplog.records


def test_a_report_is_of_the_last_pass_and_has_those_of_the_datasets():
    inner = RoundRobin(letters(1, 3))
    dataset = RoundRobin([inner, *letters(9)])
    for _ in range(2):
        assert list(dataset) == ["a0", "a0", "b0", "a1"]
        assert dataset.report().counts == {"cut_off": 2 + 7}


def test_an_epoch_that_is_set_reaches_the_datasets():
    first, second = Counting("a", 1), RandomMix(letters(3, 3))
    RoundRobin([first, second, [1]]).set_epoch(5)
    assert first.epoch == 5
    assert second._board.peek() == 5


@pytest.mark.parametrize("make", [RoundRobin, RandomMix])
def test_sources_are_closed_when_a_pass_ends_or_is_given_up(make):
    dataset = make([Counting("a", 9), Counting("b", 9)])
    samples = iter(dataset)
    for _ in range(8):
        next(samples)
    samples.close()
    assert [(one.opened, one.closed) for one in dataset.datasets] == [(1, 1), (1, 1)]
    list(dataset)
    assert [(one.opened, one.closed) for one in dataset.datasets] == [(2, 2), (2, 2)]


@pytest.mark.parametrize("make", [RoundRobin, RandomMix])
@pytest.mark.parametrize("longest", [False, True])
@pytest.mark.parametrize("at", range(12))
def test_a_pass_goes_on_where_its_state_was_taken(make, longest, at):
    counts = (4, 3, 5)

    def build():
        dataset = make([Counting("abc"[number], count) for number, count in enumerate(counts)], longest=longest)
        dataset.set_epoch(3)
        return dataset

    whole = list(build())
    dataset = build()
    samples = iter(dataset)
    head = [sample for _, sample in zip(range(at), samples, strict=False)]
    state = json.loads(json.dumps(dataset.state_dict()))
    if len(head) < at:
        assert head == whole
        return
    fresh = make([Counting("abc"[number], count) for number, count in enumerate(counts)], longest=longest)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert head + list(fresh) == whole
    assert len(list(fresh)) > 0
    assert fresh._board.peek() == 5


def test_a_state_at_the_end_gives_nothing_and_then_the_next_epoch():
    dataset = RoundRobin([Counting("a", 2), Counting("b", 4)])
    whole = list(dataset)
    fresh = RoundRobin([Counting("a", 2), Counting("b", 4)])
    fresh.load_state_dict(dataset.state_dict())
    assert list(fresh) == []
    assert fresh._board.peek() == 1
    assert len(list(fresh)) == len(whole)


def test_states_that_do_not_fit_are_refused():
    dataset = RoundRobin([Counting("a", 2), Counting("b", 2)])
    with pytest.raises(StateError, match="none of a mix of 2 datasets"):
        dataset.load_state_dict({})
    with pytest.raises(StateError, match="none of a mix of 2 datasets"):
        dataset.load_state_dict(RoundRobin([Counting("a", 2)]).state_dict())
    with pytest.raises(StateError, match="dataset 1 of the mix, a list, has no state"):
        RoundRobin([Counting("a", 2), [1]]).state_dict()


def test_a_mix_goes_to_another_process():
    dataset = RandomMix([Counting("a", 9), Counting("b", 9)], longest=True)
    whole = list(dataset)
    dataset.set_epoch(0)
    assert list(pickle.loads(pickle.dumps(dataset))) == whole


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoundRobin([]), "no dataset"),
        (lambda: RandomMix([]), "no dataset to mix"),
        (lambda: RandomMix([[1], [2]], probs=[1]), "1 probabilities for 2 datasets"),
        (lambda: RandomMix([[1], [2]], probs=[1, -1]), "not negative"),
        (lambda: RandomMix([[1], [2]], probs=[0, 0]), "not all zero"),
        (lambda: RandomMix([[1], [2]], probs=[1, float("nan")]), "nan"),
    ],
)
def test_what_cannot_be_mixed_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_webdatasets_functions_take_iterators():
    assert list(round_robin_shortest(iter("ab"), iter("c"))) == ["a", "c", "b"]
    assert list(round_robin_longest(iter("a"), iter("bcd"))) == list("abcd")
    assert sorted(random_samples([iter("ab"), iter("cd")], longest=True)) == list("abcd")
    assert sorted(random_samples([iter("ab"), iter("cd")], probs=[1, 0])) == ["a", "b"]
    assert list(random_samples([iter(range(50)), iter("c" * 50)])) == list(
        random_samples([iter(range(50)), iter("c" * 50)])
    )


def test_sources_of_one_seed_and_one_source_twice_draw_apart(tmp_path):
    urls = [
        str(write_shard(tmp_path / f"{shard}.tar", [(f"{shard}-{n}.x", b"") for n in range(9)])) for shard in range(9)
    ]

    def make(**settings):
        return WebDataset(urls, **settings).shuffle(20)

    for settings in ({"resampled": True}, {"shardshuffle": True}):
        twice = make(**settings)
        for sources in ([make(**settings), make(**settings)], [twice, twice]):
            found = [sample["__key__"] for sample in itertools.islice(RoundRobin(sources), 100)]
            assert sum(a == b for a, b in zip(found[::2], found[1::2], strict=True)) < 10
    assert keys_of(RoundRobin([make(shardshuffle=True)])) == keys_of(RoundRobin([make(shardshuffle=True)]))


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


def test_a_state_of_pipelines_at_the_end_is_that_of_the_next_epoch(tmp_path):
    urls = [str(write_shard(tmp_path / f"{name}.tar", [(f"{name}{n}.x", b"") for n in range(9)])) for name in "ab"]

    def make():
        return RandomMix([WebDataset(url).shuffle(5) for url in urls])

    first, second = make(), make()
    list(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert keys_of(second) == keys_of(first)
