import logging

import pytest

from shardset.pipeline.handlers import ignore_and_continue
from shardset.pipeline.passage import Passage
from shardset.pipeline.run import Step
from shardset.pipeline.stages import map as map_stage
from shardset.pipeline.stages import select


def sample(number, *fields):
    return {"__key__": f"k{number}", "__url__": "s.tar", **dict.fromkeys(fields, b"")}


def test_a_stage_through_which_nothing_passes_says_so_with_the_fields_it_saw(caplog):
    step = Step(name="select")
    samples = [sample(number, "jpg", "cls") for number in range(5)]
    assert list(select(samples, lambda sample: "png" in sample, step=step)) == []
    (record,) = caplog.records
    assert record.name == "shardset.pipeline"
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "the stage 'select' passed on none of 5 samples (select); it saw the fields jpg, cls"
    )


def test_different_samples_are_named_with_their_fields_each(caplog):
    samples = [sample(0, "jpg"), sample(1), (b"", 3), [1], 7]
    list(select(samples, lambda _sample: False))
    message = caplog.records[0].getMessage()
    assert message.endswith("it saw the fields jpg; no fields; a tuple of 2")


def test_nothing_is_said_where_one_sample_passed_or_none_came(caplog):
    assert list(select(range(100), lambda number: number == 50)) == [50]
    assert list(select([], lambda _sample: False)) == []
    assert not caplog.records


def test_a_pass_that_is_given_up_says_nothing(caplog):
    passing = select(iter(range(100)), lambda number: number == 50)
    assert next(passing) == 50
    passing.close()
    assert not caplog.records


def test_a_stage_that_fails_on_every_sample_says_so_too(caplog):
    list(map_stage([1, 2], lambda number: number / 0, ignore_and_continue))
    assert "passed on none of 2 samples (map_failed); it saw a value of the type int" in caplog.text


def test_an_endless_stream_that_lets_nothing_through_warns_after_ten_thousand_and_then_ten_times_as_many(caplog):
    def endless():
        yield from range(120_000)
        raise StopAsyncIteration  # stands for the end of the test's patience

    with pytest.raises(StopAsyncIteration):
        list(select(endless(), lambda _sample: False))
    assert [record.getMessage().split(" samples")[0] for record in caplog.records] == [
        "the stage 'select' passed on none of 10,000",
        "the stage 'select' passed on none of 100,000",
    ]


def test_a_long_gap_behind_samples_that_passed_is_told_apart(caplog):
    list(select(range(10_001), lambda number: number == 0))
    assert "passed on none of the last 10,000 samples" in caplog.text
    assert len(caplog.records) == 1


def test_a_sample_in_between_starts_the_count_anew(caplog):
    list(select(range(19_998), lambda number: number == 9_999))
    assert not caplog.records


def test_every_drop_is_counted_and_the_first_eight_have_places():
    step = Step()
    passage = Passage(step)
    for number in range(20):
        passage.drop("select", sample(number))
    assert step.run.report.counts == {"select": 20}
    assert [place.key for place in step.run.report.places("select")] == [f"k{number}" for number in range(8)]


def test_what_has_no_place_is_counted_without_one():
    step = Step()
    Passage(step).drop("select", (1, 2))
    assert step.run.report.counts == {"select": 1}
    assert step.run.report.places("select") == []


def test_many_samples_may_go_at_once():
    step = Step()
    passage = Passage(step)
    passage.drop("partial_batch", (1,), "the rest", 7)
    assert passage.settle(ValueError("no"), "collation_failed", (1,), ignore_and_continue, 4)
    assert step.run.report.counts == {"collation_failed": 4, "partial_batch": 7}
