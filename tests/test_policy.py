from __future__ import annotations

import logging
import pickle
import threading

import pytest

from shardset.errors import ChecksumError
from shardset.policy import Place, Policy, Report, settle


def test_the_default_policy_raises():
    policy = Policy()
    assert policy.action("bad_checksum") == "raise"
    assert policy.on_missing == "raise"


def test_a_code_of_its_own_wins_over_the_general_actions():
    policy = Policy(on_error="skip", codes={"bad_checksum": "warn"})
    assert policy.action("bad_checksum") == "warn"
    assert policy.action("bad_checksum", otherwise="raise") == "warn"
    assert policy.action("truncated") == "skip"
    assert policy.action("truncated", otherwise="raise") == "raise"


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"on_missing": None}, "on_missing=None"),
        ({"codes": {"truncated": "stop"}}, "truncated='stop'"),
    ],
)
def test_an_unknown_action_is_refused_and_quoted(arguments, quoted):
    with pytest.raises(ValueError, match=quoted):
        Policy(**arguments)


def test_a_policy_survives_pickling():
    policy = Policy(on_error="warn", on_missing="skip", defaults={"txt": b""}, codes={"truncated": "raise"})
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Place("a.tar", 512, "0001", "bad size"), "a.tar#0001 at byte 512: bad size"),
        (Place("a.tar", 0), "a.tar at byte 0"),
        (Place("a.tar", key="0001"), "a.tar#0001"),
        (Place(message="bad size"), "bad size"),
        (Place(), ""),
    ],
)
def test_a_place_is_written_with_the_parts_that_are_known(place, text):
    assert str(place) == text


def test_a_report_counts_by_code_and_sorts_the_codes():
    report = Report()
    assert not report
    assert str(report) == "nothing skipped"
    report.add("truncated", count=3)
    report.add("bad_checksum", Place("a.tar", 512))
    report.add("truncated")
    assert report.counts == {"bad_checksum": 1, "truncated": 4}
    assert list(report.counts) == ["bad_checksum", "truncated"]
    assert len(report) == 5
    assert report
    assert report.places("bad_checksum") == [Place("a.tar", 512)]
    assert report.places("never seen") == []
    assert [code for code, _, _ in report] == ["bad_checksum", "truncated"]


def test_a_report_keeps_the_first_places_and_counts_the_others():
    report = Report()
    for offset in range(1000):
        report.add("bad_checksum", Place("a.tar", offset))
    kept = report.places("bad_checksum")
    assert kept == [Place("a.tar", offset) for offset in range(len(kept))]
    assert 0 < len(kept) < 20
    assert report.counts == {"bad_checksum": 1000}
    assert "... 1000 in all" in str(report)


def test_merging_adds_counts_and_fills_up_places():
    first, second = Report(), Report()
    first.add("truncated", Place("a.tar", 1))
    for offset in range(100):
        second.add("truncated", Place("b.tar", offset))
    second.add("bad_checksum", count=2)
    first.merge(second)
    assert first.counts == {"bad_checksum": 2, "truncated": 101}
    places = first.places("truncated")
    assert places[:2] == [Place("a.tar", 1), Place("b.tar", 0)]
    assert len(places) == len(second.places("truncated"))
    assert second.counts == {"bad_checksum": 2, "truncated": 100}


def test_what_a_report_hands_out_is_a_copy():
    report = Report()
    report.add("truncated", Place("a.tar", 1))
    report.places("truncated").clear()
    report.counts.clear()
    assert report.counts == {"truncated": 1}
    assert report.places("truncated") == [Place("a.tar", 1)]


def test_a_report_survives_pickling_and_counts_on():
    report = Report()
    report.add("truncated", Place("a.tar", 1))
    back = pickle.loads(pickle.dumps(report))
    back.add("truncated", Place("a.tar", 2))
    assert back.counts == {"truncated": 2}
    assert back.places("truncated") == [Place("a.tar", 1), Place("a.tar", 2)]
    assert report.counts == {"truncated": 1}


def test_threads_that_share_a_report_lose_no_count():
    report = Report()
    start = threading.Barrier(8)

    def add_many():
        start.wait()
        for _ in range(2000):
            report.add("truncated")

    threads = [threading.Thread(target=add_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert report.counts == {"truncated": 16000}


def test_settling_raises_the_very_error_and_counts_nothing():
    report, error = Report(), ChecksumError("bad", shard="a.tar", offset=512)
    with pytest.raises(ChecksumError) as caught:
        settle(error, error.code, Place("a.tar", 512), Policy(), report)
    assert caught.value is error
    assert not report


@pytest.mark.parametrize(("action", "lines"), [("skip", 0), ("warn", 1)])
def test_settling_counts_what_it_skips_and_logs_when_told_to(action, lines, caplog):
    report, error = Report(), ChecksumError("bad", shard="a.tar", offset=512)
    with caplog.at_level(logging.DEBUG, "shardset"):
        settle(error, error.code, Place("a.tar", 512), Policy(on_error=action), report)
    assert report.counts == {"bad_checksum": 1}
    assert report.places("bad_checksum") == [Place("a.tar", 512)]
    assert [(record.levelname, record.name) for record in caplog.records] == [("WARNING", "shardset.policy")] * lines
    assert all("in a.tar at byte 512" in record.message for record in caplog.records)
