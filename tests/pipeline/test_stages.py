import io
import itertools
import operator
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.loading.ranks import Share
from shardset.pipeline import stages
from shardset.pipeline.handlers import ignore_and_continue, ignore_and_stop
from shardset.pipeline.run import Run, Step
from shardset.policy import Policy


def sample(number, **fields):
    return {"__key__": f"k{number}", "__url__": "s.tar", **fields}


def step_of(name="stage", **settings):
    return Step(Run(**settings), 3, name)


def fail_for_odd(number):
    if number % 2:
        raise ValueError(f"odd: {number}")
    return number * 10


def test_select_keeps_what_the_predicate_is_true_for_and_counts_the_rest():
    step = Step()
    assert list(stages.select(range(10), lambda number: number % 2, step=step)) == [1, 3, 5, 7, 9]
    assert step.run.report.counts == {"select": 5}


def test_a_predicate_that_fails_raises_with_the_place():
    step = Step(name="select")
    with pytest.raises(KeyError) as caught:
        list(stages.select([sample(1, a=1)], operator.itemgetter("b"), step=step))
    assert caught.value.__notes__ == ["in the stage 'select', at the sample s.tar#k1"]


def test_a_policy_or_a_handler_makes_a_predicate_that_fails_skip_the_sample():
    step = step_of(policy=Policy("skip"))
    assert list(stages.select([1, 2, 3, 4], fail_for_odd, step=step)) == [2, 4]
    assert step.run.report.counts == {"select_failed": 2}
    step = Step()
    assert list(stages.select([1, 2, 3, 4], fail_for_odd, ignore_and_continue, step=step)) == [2, 4]
    assert step.run.report.counts == {"select_failed": 2}


def test_a_handler_may_end_a_stage():
    step = Step()
    assert list(stages.map([2, 4, 5, 6], fail_for_odd, ignore_and_stop, step=step)) == [20, 40]
    assert step.run.report.counts == {"map_failed": 1, "stopped_by_handler": 1}


def test_map_passes_samples_through_a_function_and_counts_those_that_it_turns_down():
    step = Step()
    found = list(stages.map([0, 1, 2], lambda number: number or None, step=step))
    assert found == [1, 2]
    assert step.run.report.counts == {"map_none": 1}


def test_map_keeps_false_values():
    assert list(stages.map([1, 2], lambda _sample: 0)) == [0, 0]


def test_map_keeps_the_key_of_a_dict_whatever_the_function_does():
    found = list(stages.map([sample(1, a=1)], lambda one: {"b": one["a"], "__key__": "other"}))
    assert found == [{"b": 1, "__key__": "k1"}]


def test_map_invents_no_key():
    assert list(stages.map([{"a": 1}], lambda one: {"b": one["a"]})) == [{"b": 1}]
    assert list(stages.map([sample(1)], lambda one: one["__key__"])) == ["k1"]


def test_map_raises_what_the_function_raises():
    with pytest.raises(ValueError, match="odd: 1"):
        list(stages.map([1], fail_for_odd))


def test_an_error_of_the_source_is_not_a_stages_to_handle():
    def source():
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(stages.map(source(), lambda number: number, ignore_and_continue))


def test_map_tuple_leaves_none_and_what_has_no_function_alone():
    found = list(stages.map_tuple([(1, 2, 3), [4, 5, 6]], str, None))
    assert found == [("1", 2, 3), ("4", 5, 6)]


def test_map_tuple_ignores_functions_behind_the_last_value():
    assert list(stages.map_tuple([(1,)], str, str)) == [("1",)]


def test_map_tuple_counts_what_fails_and_what_is_no_tuple():
    step = Step()
    found = list(stages.map_tuple([(1, 2), (2, 3), "ab"], fail_for_odd, handler=ignore_and_continue, step=step))
    assert found == [(20, 3)]
    assert step.run.report.counts == {"map_failed": 2}


def test_map_tuple_takes_functions_only():
    with pytest.raises(TypeError, match="no function: 'x'"):
        list(stages.map_tuple([(1,)], "x"))


@given(
    st.integers(0, 30),
    st.one_of(st.none(), st.integers(0, 30)),
    st.one_of(st.none(), st.integers(0, 30)),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_slice_gives_what_islice_does_and_counts_what_it_passes_over(count, start, stop, stride):
    step = Step()
    pulled = iter(range(count))
    found = list(stages.slice(pulled, start, stop, stride, step=step))
    expected = list(itertools.islice(range(count), start, stop, stride))
    assert found == expected
    read = count - len(list(pulled))
    assert step.run.report.counts.get("slice", 0) == read - len(found)


def test_slice_with_one_number_reads_no_more_than_that():
    source = iter(range(10))
    assert list(stages.slice(source, 3)) == [0, 1, 2]
    assert next(source) == 3
    assert list(stages.slice(source, 0)) == []
    assert next(source) == 4
    assert list(stages.slice(source, None)) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("args", [(), (-1,), (0, -1), (0, 1, 0), (0, 1, 1, 1), ("a",)])
def test_slice_refuses_what_islice_refuses(args):
    with pytest.raises((TypeError, ValueError)):
        itertools.islice((), *args)
    with pytest.raises((TypeError, ValueError)):
        list(stages.slice([1], *args))


def test_slice_goes_on_from_a_state():
    run = Run()
    first = stages.slice(iter(range(20)), 2, 12, 3, step=Step(run, 3))
    assert [next(first), next(first)] == [2, 5]
    state = run.snapshots[3]()
    assert state == {"seen": 6}
    rest = stages.slice(iter(range(6, 20)), 2, 12, 3, step=Step(Run(restored={3: state}), 3))
    assert list(rest) == [8, 11]


def test_slice_lets_pass_what_later_stages_held_and_then_ends_if_it_was_at_its_end():
    restored = {3: {"seen": 12}, 5: {"held": [[0, 512], [0, 1024]]}}
    source = iter(["held", "held too", "never asked for"])
    step = Step(Run(restored=restored), 3)
    assert list(stages.slice(source, 2, 12, 3, step=step)) == ["held", "held too"]
    assert next(source) == "never asked for"


def test_rsample_keeps_about_its_share_and_counts_the_rest():
    step = step_of(seed=5)
    kept = list(stages.rsample(range(10_000), 0.3, step=step))
    assert 2800 < len(kept) < 3200
    assert step.run.report.counts == {"rsample": 10_000 - len(kept)}


def test_rsample_is_the_same_for_the_same_numbers_and_differs_for_others():
    def kept(**settings):
        return tuple(stages.rsample(range(200), 0.5, step=step_of(**settings)))

    settings = [
        {},
        {"seed": 1},
        {"epoch": (1,)},
        {"share": Share(1, 2)},
        {"share": Share(0, 2, 1, 2)},
    ]
    found = [kept(**each) for each in settings]
    assert found == [kept(**each) for each in settings]
    assert len(set(found)) == len(found)


def test_rsample_goes_on_from_a_state_and_draws_nothing_for_what_later_stages_held():
    whole = list(stages.rsample(range(3000), 0.5, step=step_of(seed=9)))
    run = Run(seed=9)
    first = stages.rsample(iter(range(3000)), 0.5, step=Step(run, 3))
    begun = list(itertools.islice(first, 700))
    state = run.snapshots[3]()
    again = begun[-2:]
    source = itertools.chain(again, range(begun[-1] + 1, 3000))
    restored = {3: state, 4: {"held": [[0, 0], [0, 512]]}}
    rest = list(stages.rsample(source, 0.5, step=Step(Run(seed=9, restored=restored), 3)))
    assert rest[:2] == again
    assert begun + rest[2:] == whole


def test_rsample_of_one_keeps_all_and_of_zero_nothing():
    assert list(stages.rsample(range(3000), 1)) == list(range(3000))
    assert list(stages.rsample(range(3000), 0.0)) == []


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_rsample_refuses_what_is_no_probability(p):
    with pytest.raises(ValueError, match="between 0 and 1"):
        list(stages.rsample([1], p))


def test_associate_adds_fields_by_key_and_counts_keys_that_it_does_not_have():
    step = Step()
    found = list(stages.associate([sample(1), sample(2)], {"k1": {"extra": 7}}, step=step))
    assert found == [sample(1, extra=7), sample(2)]
    assert step.run.report.counts == {"no_association": 1}
    assert step.run.report.places("no_association")[0].key == "k2"


def test_associate_takes_a_function_of_the_key():
    assert list(stages.associate([sample(1)], lambda key: {"extra": key.upper()})) == [sample(1, extra="K1")]


def test_associate_settles_samples_without_a_key():
    step = Step()
    assert list(stages.associate([{"a": 1}, sample(1)], {"k1": {}}, ignore_and_continue, step=step)) == [sample(1)]
    assert step.run.report.counts == {"associate_failed": 1}


def test_info_prints_the_first_and_every_so_many_samples_and_passes_all_on():
    stream = io.StringIO()
    samples = [sample(number, txt="x" * 100) for number in range(6)]
    assert list(stages.info(samples, n=1, every=3, width=10, stream=stream, name="here")) == samples
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "__key__" in line] == ["__key__ 'k0'", "__key__ 'k2'", "__key__ 'k5'"]
    assert lines[0] == "--- here"
    assert "txt 'xxxxxxxxx" in lines


def test_info_prints_to_standard_error_and_shows_no_secret(capsys):
    list(stages.info([{"__url__": "https://user:secret@host/s.tar?token=abc", "a": 1}]))
    shown = capsys.readouterr().err
    assert "https://host/s.tar?token=..." in shown
    assert "secret" not in shown


def test_info_takes_a_format_of_fields():
    stream = io.StringIO()
    list(stages.info([sample(1, cls=5)], "{__key__} is {cls}", stream=stream))
    assert stream.getvalue() == "k1 is 5\n"


def test_info_shows_tuples_too():
    stream = io.StringIO()
    list(stages.info([(1, "abcdefghijk")], width=8, stream=stream))
    assert stream.getvalue() == "--- \n(1, 'abc\n"


def test_log_keys_appends_a_line_for_each_sample(tmp_path):
    path = tmp_path / "keys"
    step = step_of(share=Share(2, 4, 1, 3))
    assert len(list(stages.log_keys([sample(1), (1,)], path, step=step))) == 2
    list(stages.log_keys([sample("\udcff")], path))
    assert path.read_bytes() == b"0\t1\t2\tk1\n1\t1\t2\tNone\n0\t0\t0\tk\xff\n"


def test_log_keys_without_a_file_passes_on():
    assert list(stages.log_keys([1, 2])) == [1, 2]
    assert list(stages.log_keys([1, 2], "")) == [1, 2]


def test_log_keys_of_several_writers_gives_whole_lines(tmp_path):
    path = tmp_path / "keys"

    def write(number):
        samples = [{"__key__": f"{number}" * 200} for _ in range(50)]
        list(stages.log_keys(samples, path))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 200
    assert {len(set(line.split("\t")[3])) for line in lines} == {1}
