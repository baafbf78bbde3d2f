from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.loading.shares import LONGEST, MOST_OFF, Stretch, largest_remainders

QUOTAS = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any).map(tuple)


def plan(quotas, *, seed=0, start=0, before=None):
    return Stretch.plan(seed, start, tuple(quotas), before or (0,) * len(quotas))


def sources(stretch, positions):
    """Which source each position is of, and the number of its sample."""
    found, numbers = np.full(len(positions), -1), np.full(len(positions), -1)
    for source, (places, own) in stretch.share_out(positions).items():
        assert (found[places] == -1).all()
        found[places], numbers[places] = source, own
    assert (found >= 0).all()
    return found, numbers


def off_by(stretch, count):
    """How far each source is from its share after each of the first `count` positions."""
    found, _ = sources(stretch, range(count))
    came = np.cumsum(found[:, None] == np.arange(len(stretch.quotas)), axis=0)
    return np.abs(came - np.arange(1, count + 1)[:, None] * np.array(stretch.quotas) / sum(stretch.quotas))


def test_what_is_left_when_all_are_rounded_down_goes_to_those_that_lost_most():
    assert largest_remainders([Fraction(47), Fraction(16), Fraction(158, 10), Fraction(12), Fraction(92, 10)], 10) == (
        (5, 2, 1, 1, 1)
    )


def test_of_equal_losses_the_first_is_made_good():
    assert largest_remainders([Fraction(1)] * 3, 10_000) == (3334, 3333, 3333)


@settings(max_examples=50)
@given(
    weights=st.lists(st.fractions(min_value=0, max_value=100), min_size=1, max_size=8).filter(any),
    total=st.integers(1, LONGEST),
)
def test_quotas_add_up_and_lie_within_one_of_what_is_due(weights, total):
    quotas = largest_remainders(weights, total)
    assert sum(quotas) == total
    assert all(abs(quota - weight * total / sum(weights)) < 1 for quota, weight in zip(quotas, weights, strict=True))


@given(quotas=QUOTAS, seed=st.integers(0, 2**64 - 1), periods=st.integers(1, 4))
def test_each_source_has_exactly_its_quota_in_each_period(quotas, seed, periods):
    stretch = plan(quotas, seed=seed)
    for period in range(periods):
        found, _ = sources(stretch, range(period * sum(quotas), (period + 1) * sum(quotas)))
        assert np.bincount(found, minlength=len(quotas)).tolist() == list(quotas)
        assert stretch.counts((period + 1) * sum(quotas)) == [quota * (period + 1) for quota in quotas]


@given(quotas=QUOTAS, start=st.integers(0, 2**40), stop=st.integers(0, 300), data=st.data())
def test_counts_are_what_came_before_wherever_it_began(quotas, start, stop, data):
    before = tuple(data.draw(st.lists(st.integers(0, 2**40), min_size=len(quotas), max_size=len(quotas))))
    stretch = plan(quotas, start=start, before=before)
    came = list(before)
    if stop:
        found, numbers = sources(stretch, range(start, start + stop))
        for source, number in zip(found.tolist(), numbers.tolist(), strict=True):
            assert number == came[source]
            came[source] += 1
    assert stretch.counts(start + stop) == came


@settings(max_examples=40)
@given(quotas=QUOTAS, seed=st.integers(0, 99), first=st.integers(0, 2**40), step=st.integers(1, 5000))
def test_positions_apart_are_shared_out_as_each_by_itself(quotas, seed, first, step):
    stretch, positions = plan(quotas, seed=seed), range(first, first + 20 * step, step)
    found, numbers = sources(stretch, positions)
    singly = [sources(stretch, range(position, position + 1)) for position in positions]
    assert found.tolist() == [int(source[0]) for source, _ in singly]
    assert numbers.tolist() == [int(number[0]) for _, number in singly]


@pytest.mark.parametrize("positions", [range(100), range(5, 40_000), range(8191, 8193), range(0, 100_000, 7)])
def test_many_positions_are_shared_out_as_counts_say(positions):
    stretch = plan((7000, 2000, 999, 1), seed=3)
    found, numbers = sources(stretch, positions)
    for at in range(0, len(positions), 97):
        counts = stretch.counts(positions[at])
        assert numbers[at] == counts[found[at]]
        after = stretch.counts(positions[at] + 1)
        assert [b - a for a, b in zip(counts, after, strict=True)] == [source == found[at] for source in range(4)]


@given(quotas=QUOTAS, seed=st.integers(0, 2**64 - 1))
def test_no_source_is_ever_as_far_from_its_share_as_promised_at_most(quotas, seed):
    assert off_by(plan(quotas, seed=seed), 2 * sum(quotas)).max() < (1 if len(quotas) <= 2 else 3.36) < MOST_OFF


@pytest.mark.parametrize("quotas", [(9000, 700, 299, 1), (2000,) * 5, (500,) * 20, (1, 1, 2, 3, 5, 8, 13, 21, 34, 55)])
def test_usual_mixtures_stay_within_two_of_their_shares(quotas):
    assert max(off_by(plan(quotas, seed=seed), sum(quotas)).max() for seed in range(5)) < 2


def test_at_each_place_of_a_period_a_source_is_as_likely_as_its_share():
    quotas, periods = (1, 3, 6), 4000
    found, _ = sources(plan(quotas, seed=8), range(10 * periods))
    part = (found.reshape(periods, 10)[:, :, None] == np.arange(3)).mean(axis=0)
    spread = np.sqrt(0.25 / periods)  # the standard deviation of the rarest is less
    assert np.abs(part - np.array(quotas) / 10).max() < 5 * spread


def test_periods_and_seeds_differ_in_how_sources_are_arranged():
    stretch, other = plan((2000, 3000, 5000), seed=1), plan((2000, 3000, 5000), seed=2)
    first, second = (sources(stretch, range(at, at + 10_000))[0] for at in (0, 10_000))
    assert (first != second).mean() > 0.2
    assert (first != sources(other, range(10_000))[0]).mean() > 0.2


def test_the_longest_periods_do_not_overflow():
    quotas = (LONGEST // 2 - 1, LONGEST // 2 - 1, 2)
    stretch = plan(quotas, seed=5)
    for start in (0, LONGEST - 100, 2**40 - 100):
        found, numbers = sources(stretch, range(start, start + 200))
        assert (np.bincount(found[:200], minlength=3)[:2] > 97).all()
        assert numbers[-1] == stretch.counts(start + 199)[found[-1]]
    assert stretch.counts(3 * LONGEST) == [3 * quota for quota in quotas]


def test_a_single_source_has_all_positions():
    stretch = plan((0, 5, 0))
    assert stretch.counts(12) == [0, 12, 0]
    (source, (places, numbers)), *others = stretch.share_out(range(3, 9)).items()
    assert (source, places.tolist(), numbers.tolist(), others) == (1, [0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [])


def test_the_arrangement_stays_what_it_is():
    stretch = plan((7000, 2000, 1000), seed=42)
    found = "".join(map(str, sources(stretch, range(9_990, 10_030))[0].tolist()))
    assert found == "0020010001020010001002001000100200100010"
