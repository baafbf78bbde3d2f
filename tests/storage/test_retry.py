from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import RateLimitedError, TransferError
from shardset.storage import retry
from shardset.storage.retry import (
    RETRY_STATUSES,
    Attempts,
    HostBudget,
    Retry,
    asked_wait,
    parse_rate_limit,
    parse_retry_after,
)
from shardset.storage.threads import Jobs, pause
from timing import least_seconds

NOW = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110
URL = "https://example.org/a.tar"


class Clock:
    """Time that passes only by waiting."""

    def __init__(self):
        self.now = 1000.0
        self.waits = []

    def monotonic(self):
        return self.now

    def pause(self, seconds):
        assert seconds > 0
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retry, "pause", clock.pause)
    monkeypatch.setattr(retry.time, "monotonic", clock.monotonic)
    return clock


# How long to go on


def test_waits_double_up_to_the_longest_and_are_random():
    policy = Retry(first_wait=1, longest_wait=20)
    for failures, most in ((1, 1), (2, 2), (3, 4), (5, 16), (6, 20), (1000, 20)):
        waits = [policy.wait(failures) for _ in range(200)]
        assert most / 4 <= min(waits) < max(waits) <= most
        assert max(waits) - min(waits) > most / 3


def test_waits_neither_follow_nor_move_the_generator_that_programs_seed():
    random.seed(3)
    first = Retry().wait(1)
    state = random.getstate()
    random.seed(3)
    assert Retry().wait(1) != first
    assert random.getstate() == state


def test_statuses_that_say_not_now_are_told_from_final_ones():
    assert {408, 425, 429, 500, 502, 503, 504, 509, 520, 529} < RETRY_STATUSES
    assert not RETRY_STATUSES & {200, 206, 304, 400, 401, 403, 404, 410, 412, 416, 451, 501, 505, 511}


def test_a_line_that_resets_every_five_megabytes_brings_a_gigabyte():
    attempts = Attempts(Retry(), URL)
    left = 1 << 30
    while True:
        attempts.begin()
        count = min(5_000_000, left)
        left -= count
        if not left:
            break
        attempts.progress(count, left)
        assert attempts.fail("connection reset") <= 1
    assert attempts.made == 215


def _serve(size, a_connection, policy=None):
    """Read from a server that gives so many bytes a connection; return the attempts that it took."""
    attempts = Attempts(policy or Retry(), URL)
    left = size
    while True:
        attempts.begin()
        left -= min(a_connection, left)
        if not left:
            return attempts.made
        attempts.progress(min(a_connection, left), left)
        attempts.fail("connection reset")


@pytest.mark.parametrize("size", [1000, 100_000, 1 << 30, 1 << 50])
def test_a_server_that_gives_one_byte_a_connection_is_given_up(size):
    with pytest.raises(TransferError, match="connection reset") as caught:
        _serve(size, 1)
    assert caught.value.attempts == 8


@pytest.mark.parametrize("size", [2, 50, 127])
def test_a_few_bytes_one_a_connection_are_read(size):
    assert _serve(size, 1) == size


def test_a_steady_trickle_is_read_to_its_end():
    assert _serve(10 << 20, 10 << 10) == 1024
    assert _serve(100 << 10, 1 << 10) == 100
    assert _serve(1 << 20, 70_000, Retry(attempts=2)) == 15


@given(st.integers(1, 1 << 22), st.integers(1, 1 << 16))
def test_attempts_are_bounded_whatever_a_server_gives(size, a_connection):
    try:
        made = _serve(size, a_connection)
    except TransferError as error:
        made = error.attempts
    # Eight for each 64 KiB, and for each sixteenth of the last mebibyte, and one for each of the last bytes.
    assert made <= 8 * (size / (64 << 10) + 172) + 128


def test_pieces_that_arrive_in_one_attempt_are_added_up():
    attempts = Attempts(Retry(attempts=2), URL)
    attempts.begin()
    attempts.fail("reset")
    for _ in range(16):
        assert attempts.failures == 1
        attempts.progress(4 << 10, 1 << 30)
    assert attempts.failures == 0
    attempts.fail("reset")
    attempts.progress(1, 1 << 30)  # what was counted once does not count again
    assert attempts.failures == 1


def test_the_last_error_says_url_status_and_attempts():
    attempts = Attempts(Retry(attempts=3), URL)
    for turn in range(3):
        attempts.begin()
        if turn < 2:
            assert attempts.fail("bad gateway", status=502) > 0
    with pytest.raises(TransferError) as caught:
        attempts.fail("bad gateway", status=502)
    error = caught.value
    assert (error.url, error.status, error.attempts) == (URL, 502, 3)
    for part in ("bad gateway", URL, "status 502", "3 attempts"):
        assert part in str(error)


def test_an_error_without_a_status_shows_none():
    attempts = Attempts(Retry(), URL)
    attempts.begin()
    assert str(attempts.error("the connection went quiet")) == f"the connection went quiet (1 attempt), at {URL}"
    assert attempts.error("no").status is None


def test_what_the_server_asks_is_waited_and_a_little_more_so_that_a_crowd_does_not_come_at_once():
    attempts = Attempts(Retry(first_wait=1), URL)
    waits = {Attempts(Retry(first_wait=1), URL).fail("no", status=503, asked=30) for _ in range(50)}
    assert all(30 < wait <= 31 for wait in waits)
    assert len(waits) > 10
    assert attempts.fail("no", status=503, asked=0) <= 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_asks_for_too_long_a_wait_is_a_rate_limit(status):
    attempts = Attempts(Retry(rate_limit=600), URL)
    attempts.begin()
    assert attempts.fail("no", status=status, asked=600) > 600
    attempts.begin()
    for asked in (601, float("inf")):
        with pytest.raises(RateLimitedError, match=f"status {status}, 2 attempts.*{URL}") as caught:
            attempts.fail("no", status=status, asked=asked)
        assert caught.value.hint


def test_a_server_that_says_429_again_and_again_is_a_rate_limit():
    attempts = Attempts(Retry(attempts=4), URL)
    for _ in range(3):
        attempts.begin()
        attempts.fail("no", status=429, asked=1)
    attempts.begin()
    with pytest.raises(RateLimitedError, match=r"too many requests.*429, 4 attempts"):
        attempts.fail("no", status=429)


# What servers ask for


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("120", 120.0), ("0", 0.0), (" 7\t", 7.0), ("007", 7.0), ("1.5", 1.5), ("9" * 400, float("inf"))),
        ("Sun, 06 Nov 1994 08:49:47 GMT", 10.0),
        ("Sunday, 06-Nov-94 08:49:47 GMT", 10.0),
        ("Sun Nov  6 08:49:47 1994", 10.0),
        ("Sun, 06 Nov 1994 08:49:27 GMT", 0.0),
        *((wrong, None) for wrong in ("", "-5", "+5", "soon", "1e3", "0x10", "5 s", "5, 6", "٣")),
        *((wrong, None) for wrong in ("Sun, 99 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 99999 08:49:37 GMT", "Sun, 06")),
    ],
)
def test_retry_after_is_seconds_or_a_date(value, expected):
    assert parse_retry_after(value, NOW) == expected


def test_a_date_without_a_zone_is_not_taken_for_local_time(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert parse_retry_after("Sun Nov  6 08:49:47 1994", NOW) == 10.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"api";r=0;t=55', (0, 55)),
        ('"default";r=50;t=30', (50, 30)),
        ('"burst";r=12;t=3, "day";r=5000;t=80000', (12, 3)),
        ('"a";r=0;t=5, "b";r=0;t=50,"c";r=1;t=500', (0, 50)),
        ('"pages";t=34;r=5 , "none"', (5, 34)),
        (' "spaced" ; r=1 ; t=2', (1, 2)),
        ('"user";r=9;pk=:cHsdsRa894==:;t=7', (9, 7)),
        ('"a;r=0;t=1,";r=5;t=6', (5, 6)),  # within the quotes is the name
        (r'"a\";r=0;t=1,";r=5;t=6', (5, 6)),
        ('token;r=3;t=4;note="x;r=0"', (3, 4)),
        ("limit=100, remaining=12, reset=34", (12, 34)),
        ("remaining=12,reset=34", (12, 34)),
        *((wrong, None) for wrong in ("", '"api"', '"api";r=5', '"api";t=5', '"api";r=-1;t=5', '"api";r=1.5;t=5')),
        *((wrong, None) for wrong in ('"api;r=0;t=55', '"api";r=0;t=55;', '"api";r=0;t=55, "b', "r=0;t=5", ";r=0;t=5")),
        *((wrong, None) for wrong in ("limit=100", "remaining=12", "remaining=12; reset=34", "12", '"a";r="0";t="5"')),
    ],
)
def test_a_rate_limit_is_read_as_the_drafts_write_it(value, expected):
    assert parse_rate_limit({"ratelimit": value}) == expected


@pytest.mark.parametrize("prefix", ["ratelimit", "x-ratelimit"])
def test_older_rate_limits_are_read(prefix):
    def limit(left, reset):
        return parse_rate_limit({f"{prefix}-remaining": left, f"{prefix}-reset": reset}, NOW + 1e9)

    assert limit("7", "30") == (7, 30)
    assert limit(" 0 ", "30") == (0, 30)
    assert limit("0", str(int(NOW + 1e9) + 45)) == (0, 45)  # a point in time
    assert limit("0", str(int(NOW + 1e9) - 45)) == (0, 0)
    for left, reset in (("", "30"), ("7", ""), ("7", "2026-01-01T00:00:00Z"), ("-1", "30"), ("7, 8", "30")):
        assert limit(left, reset) is None


def test_the_newest_form_of_a_rate_limit_wins():
    old = {"x-ratelimit-remaining": "1", "x-ratelimit-reset": "2"}
    middle = {"ratelimit-remaining": "3", "ratelimit-reset": "4"}
    new = {"ratelimit": '"api";r=5;t=6'}
    assert parse_rate_limit(old | middle | new) == (5, 6)
    assert parse_rate_limit(old | middle) == (3, 4)
    assert parse_rate_limit(old | {"ratelimit": "nonsense"}) == (1, 2)
    assert parse_rate_limit({}) is None


@given(st.text('"\\;,:=rta 0129*', max_size=60))
def test_any_rate_limit_is_read_or_passed_over(value):
    limit = parse_rate_limit({"ratelimit": value})
    assert limit is None or (limit[0] >= 0 and limit[1] >= 0)


@pytest.mark.parametrize(
    "value", ['"' * 50_000, '"a"' + ";b" * 50_000 + "=", "a=1," * 50_000, '"a";r=0;t=1, ' * 20_000]
)
def test_a_hostile_rate_limit_takes_no_time(value):
    assert least_seconds(lambda: parse_rate_limit({"ratelimit": value}), 0.5, clock=time.thread_time) < 0.5


def test_what_an_answer_asks_for():
    full = {"ratelimit": '"api";r=0;t=55'}
    some = {"ratelimit": '"api";r=3;t=55'}
    after = {"retry-after": "7"}
    assert asked_wait(429, full, NOW) == 56
    assert asked_wait(429, full | after, NOW) == 56
    assert asked_wait(429, some | after, NOW) == 7
    assert asked_wait(503, full | after, NOW) == 7
    assert asked_wait(503, after, NOW) == 7
    for answer in ({}, some, {"retry-after": "later"}):
        assert asked_wait(429, answer, NOW) is None


def test_a_date_is_compared_with_the_clock_of_the_server_that_named_it():
    date = {"retry-after": "Sun, 06 Nov 1994 08:49:47 GMT"}
    assert asked_wait(503, date, NOW) == 10
    assert asked_wait(503, date | {"date": "Sun, 06 Nov 1994 08:49:17 GMT"}, NOW) == 30
    assert asked_wait(503, date | {"date": "nonsense"}, NOW) == 10


# The budget of a host


def begin(budget):
    with budget.slot():
        pass


def test_a_budget_that_nobody_touched_waits_for_nothing(clock):
    budget = HostBudget()
    for _ in range(100):
        begin(budget)
    assert clock.waits == []


def test_a_hold_keeps_the_next_request_from_beginning_and_a_shorter_one_shortens_nothing(clock):
    budget = HostBudget()
    budget.hold(30)
    budget.hold(5)
    begin(budget)
    begin(budget)
    assert clock.waits == [30]


def test_few_requests_that_are_left_are_spread_over_the_time_that_is_left(clock):
    budget = HostBudget()
    begins = []
    for left in range(5, 0, -1):  # each answer tells what is left after it
        begin(budget)
        begins.append(clock.now - 1000)
        budget.pace(left - 1, 100 - begins[-1])
    begin(budget)
    begins.append(clock.now - 1000)
    assert begins[0] == begins[1] == 0  # the first answer was not known before
    assert begins == sorted(begins)
    assert begins[-1] == pytest.approx(100)  # the quota was used up, and the sixth came when the count began anew
    assert all(later - earlier < 40 for earlier, later in itertools.pairwise(begins))


def test_a_job_below_its_quota_is_not_slowed(clock):
    budget = HostBudget()
    for left in range(5000, 16, -1):
        budget.pace(left, 300)
        begin(budget)
    assert clock.waits == []


def test_the_last_sixteen_requests_are_paced(clock):
    budget = HostBudget()
    for left, expected in ((17, 0), (16, 10)):
        budget.pace(left, 160)
        before = clock.now
        begin(budget)
        begin(budget)
        assert clock.now - before == expected


def test_pacing_ends_when_the_count_begins_anew(clock):
    for told in (True, False):
        budget = HostBudget()
        budget.pace(2, 10)
        begin(budget)
        if told:
            budget.pace(5000, 300)
        else:
            clock.now += 10
        before = clock.now
        for _ in range(50):
            begin(budget)
        assert clock.now - before <= 5


def test_pacing_puts_no_request_off_by_more_than_a_minute(clock):
    for left in (0, 1, 2):
        budget = HostBudget()
        budget.pace(left, 86_400)
        before = clock.now
        begin(budget)
        begin(budget)
        assert clock.now - before <= 120
    assert max(clock.waits) == 60


def test_a_count_that_begins_anew_at_once_paces_nothing(clock):
    budget = HostBudget()
    for seconds in (0, -5):
        budget.pace(0, seconds)
        budget.pace(3, seconds)
        begin(budget)
        begin(budget)
    assert clock.waits == []


def test_a_place_is_given_back_when_a_request_fails():
    budget = HostBudget(1)
    for _ in range(3):
        with pytest.raises(OSError, match="no"), budget.slot():
            raise OSError("no")
    begin(budget)


def test_no_more_requests_are_under_way_than_allowed():
    budget = HostBudget(3)
    under_way, most = [], []

    def request(_):
        with budget.slot():
            under_way.append(1)
            most.append(len(under_way))
            time.sleep(0.005)
            under_way.pop()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(request, range(60)))
    assert max(most) == 3


def test_a_hold_stops_all_others_also_those_that_wait_for_a_place():
    budget = HostBudget(1)
    begins = []

    def request(_):
        with budget.slot():
            begins.append(time.monotonic())

    with ThreadPoolExecutor(10) as pool:
        with budget.slot():
            waiting = [pool.submit(request, number) for number in range(10)]
            time.sleep(0.05)
            held = time.monotonic()
            budget.hold(0.3)
        for future in waiting:
            future.result(20)
    assert len(begins) == 10
    assert min(begins) - held >= 0.29


def test_a_hold_that_grows_while_somebody_waits_is_kept():
    budget = HostBudget()
    budget.hold(0.5)  # long enough for a busy machine to come to the second one meanwhile
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(begin, budget)
        time.sleep(0.05)
        budget.hold(0.8)
        waiting.result(30)
    assert time.monotonic() - start >= 0.84


@pytest.mark.parametrize("why", ["held", "full"])
def test_a_job_that_was_given_up_stops_waiting_for_its_host(why):
    budget = HostBudget(1)
    if why == "held":
        budget.hold(60)
    else:
        budget._slots.acquire()
    jobs = Jobs()
    waiting = jobs.submit(lambda: begin(budget))
    pause(0.05)
    jobs.give_up()
    start = time.monotonic()
    with pytest.raises(CancelledError):
        waiting.result(30)
    assert time.monotonic() - start < 30
    if why == "held":  # and its place is free again
        assert budget._slots.acquire(timeout=1)
