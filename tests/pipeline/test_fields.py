from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import DuplicateFieldError, MissingFieldError
from shardset.pipeline import fields
from shardset.pipeline.handlers import ignore_and_continue, ignore_and_stop
from shardset.pipeline.run import Run, Step
from shardset.policy import Policy


def sample(number=0, **values):
    return {"__key__": f"k{number}", "__url__": "s.tar", **values}


def lenient(on_missing="skip", **settings):
    return Step(Run(policy=Policy(on_missing=on_missing, **settings)))


def test_to_tuple_gives_the_values_themselves_also_of_one_field():
    value = [1]
    ((found,),) = fields.to_tuple([sample(a=value)], "a")
    assert found is value
    assert list(fields.to_tuple([sample(a=1, b=2, c=3)], "c", "a")) == [(3, 1)]


@pytest.mark.parametrize("given", [("jpg;png", "cls"), ("jpg;png cls",), (["jpg", "png"], "cls")])
def test_to_tuple_takes_the_first_alternative_that_is_there(given):
    samples = [sample(jpg=1, cls=2), sample(png=3, cls=4), sample(png=5, jpg=6, cls=7)]
    assert list(fields.to_tuple(samples, *given)) == [(1, 2), (3, 4), (6, 7)]


def test_to_tuple_gives_the_key_and_the_url_like_any_field():
    assert list(fields.to_tuple([sample(a=1)], "__key__ __url__ a")) == [("k0", "s.tar", 1)]


def test_a_missing_field_is_an_error_that_names_sample_shard_and_what_there_is():
    with pytest.raises(MissingFieldError) as caught:
        list(fields.to_tuple([sample(7, jpg=1, cls=2)], "cls", "png;webp"))
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, KeyError)
    assert (error.shard, error.key, error.field) == ("s.tar", "k7", "png")
    assert str(error) == "sample 'k7' has no field 'png' or 'webp', only 'jpg', 'cls', in s.tar"
    assert error.__context__ is None


def test_a_field_asked_for_in_capitals_gets_a_hint():
    with pytest.raises(MissingFieldError, match="lower case"):
        list(fields.to_tuple([sample(jpg=1)], "JPG"))


def test_missing_fields_go_to_the_handler_and_are_counted():
    step = Step()
    found = list(fields.to_tuple([sample(a=1), sample(1), sample(a=2)], "a", handler=ignore_and_continue, step=step))
    assert found == [(1,), (2,)]
    assert step.run.report.counts == {"missing_field": 1}
    assert step.run.report.places("missing_field")[0].key == "k1"
    step = Step()
    assert list(fields.to_tuple([sample(a=1), sample(1), sample(a=2)], "a", handler=ignore_and_stop, step=step)) == [
        (1,)
    ]
    assert step.run.report.counts == {"missing_field": 1, "stopped_by_handler": 1}


def test_the_policy_says_what_happens_to_samples_with_missing_fields():
    step = lenient()
    assert list(fields.to_tuple([sample(a=1), sample(1)], "a", step=step)) == [(1,)]
    assert step.run.report.counts == {"missing_field": 1}
    with pytest.raises(MissingFieldError):
        list(fields.to_tuple([sample()], "a", step=Step(Run(policy=Policy("skip")))))


def test_a_default_of_the_policy_stands_for_a_missing_field_and_is_counted():
    step = lenient("raise", defaults={"png": b"nothing", "cls": None})
    found = list(fields.to_tuple([sample(1, jpg=1), sample(2, cls=3)], "jpg;png", "cls", step=step))
    assert found == [(1, None), (b"nothing", 3)]
    assert step.run.report.counts == {"missing_field": 2}
    assert str(step.run.report.places("missing_field")[1]) == "s.tar#k2: no 'png'"


def test_none_stands_for_a_missing_field_where_that_is_no_error():
    assert list(fields.to_tuple([sample(a=1)], "a b", missing_is_error=False)) == [(1, None)]


def test_a_none_is_an_error_unless_missing_is_none_or_it_is_said_not_to_be():
    samples = [sample(3, a=None)]
    with pytest.raises(MissingFieldError, match="'k3': the field 'a' is None"):
        list(fields.to_tuple(samples, "a"))
    assert list(fields.to_tuple(samples, "a", none_is_error=False)) == [(None,)]
    assert list(fields.to_tuple(samples, "a", missing_is_error=False)) == [(None,)]
    step = Step()
    found = list(
        fields.to_tuple(
            [*samples, sample(b=1)],
            "b;a",
            missing_is_error=False,
            none_is_error=True,
            handler=ignore_and_continue,
            step=step,
        )
    )
    assert found == [(1,)]
    assert step.run.report.counts == {"none_field": 1}


def test_arrays_are_not_compared_with_none():
    array = np.zeros(3)
    ((found, label),) = fields.to_tuple([sample(npy=array, cls=0)], "npy", "cls")
    assert found is array
    assert label == 0


@pytest.mark.parametrize("given", [(), ("",), ("a b", "c"), (["a b"],)])
def test_to_tuple_refuses_no_field_and_names_with_spaces(given):
    with pytest.raises(ValueError, match="no field"):
        list(fields.to_tuple([sample()], *given))


def test_to_tuple_of_something_without_fields_is_an_error():
    with pytest.raises(TypeError, match="a dict, not a tuple"):
        list(fields.to_tuple([(1, 2)], "a"))


def test_getfirst_returns_the_first_field_that_is_there():
    one = sample(png=1)
    assert fields.getfirst(one, "jpg;png") == 1
    assert fields.getfirst(one, ["cls"], 7, missing_is_error=False) == 7
    with pytest.raises(MissingFieldError, match="'cls'"):
        fields.getfirst(one, "cls")


def test_rename_gives_the_first_alternative_the_new_name_and_takes_all_out():
    samples = [sample(jpg=1, png=2, cls=3), sample(png=4, cls=5)]
    assert list(fields.rename(samples, image="jpg;png")) == [sample(image=1, cls=3), sample(image=4, cls=5)]


def test_rename_can_keep_nothing_else():
    assert list(fields.rename([sample(jpg=1, cls=2)], keep=False, image="jpg")) == [{"image": 1}]


def test_rename_may_swap_fields():
    assert list(fields.rename([sample(a=1, b=2)], a="b", b="a")) == [sample(a=2, b=1)]


def test_rename_over_another_field_is_counted():
    step = Step()
    assert list(fields.rename([sample(1, a=1, b=2)], b="a", step=step)) == [sample(1, b=1)]
    assert step.run.report.counts == {"overwritten_field": 1}
    assert "took the name of 'b'" in str(step.run.report)


def test_rename_counts_samples_without_the_field():
    step = lenient()
    assert list(fields.rename([sample(a=1), sample(b=2)], c="a", step=step)) == [sample(c=1)]
    assert step.run.report.counts == {"missing_field": 1}
    with pytest.raises(ValueError, match="no field 'a'"):
        list(fields.rename([sample(b=2)], c="a"))


def test_rename_takes_a_default_of_the_policy():
    step = lenient("raise", defaults={"a": 0})
    assert list(fields.rename([sample(b=2)], c="a", step=step)) == [sample(b=2, c=0)]
    assert step.run.report.counts == {"missing_field": 1}


def test_fields_with_names_of_arguments_are_given_as_a_mapping():
    step = Step()
    assert list(fields.rename([sample(x=1, y=2)], {"step": "x", "keep": "y"}, step=step)) == [sample(step=1, keep=2)]
    assert list(fields.map_dict([sample(step="1")], {"step": int}, step=step)) == [sample(step=1)]


def test_a_handler_in_the_place_of_fields_is_refused_by_name():
    with pytest.raises(TypeError, match="a handler is given by name"):
        list(fields.rename([sample()], ignore_and_continue, a="b"))


def test_map_dict_changes_the_fields_named_in_place():
    one = sample(a="1", b="2")
    (found,) = fields.map_dict([one], a=int)
    assert found is one
    assert found == sample(a=1, b="2")


def test_map_dict_counts_what_is_missing_apart_from_what_fails():
    step = Step()
    samples = [sample(a="1"), sample(a="x"), sample(b="1"), (1,)]
    found = list(fields.map_dict(samples, handler=ignore_and_continue, step=step, a=int))
    assert found == [sample(a=1)]
    assert step.run.report.counts == {"map_failed": 2, "missing_field": 1}


def test_map_dict_raises_for_a_missing_field_what_webdataset_does():
    with pytest.raises(KeyError, match="no field 'a'"):
        list(fields.map_dict([sample(b=1)], a=int))


@pytest.mark.parametrize(("given", "error"), [({}, ValueError), ({"a": 3}, TypeError)])
def test_map_dict_wants_functions(given, error):
    with pytest.raises(error, match="map_dict"):
        list(fields.map_dict([sample(a=1)], **given))


def test_extract_keys_matches_names_with_and_without_a_dot():
    one = {"seg.png": 1, "cls": 2}
    assert list(fields.extract_keys([one], "*.png", "cls")) == [(1, 2)]
    assert list(fields.extract_keys([one], ".seg.*", ["txt", ".cls"])) == [(1, 2)]
    assert list(fields.extract_keys([sample(a=1)], "__key__;x")) == [("k0",)]


def test_extract_keys_without_what_is_missing_moves_the_rest_forward():
    assert list(fields.extract_keys([{"b": 2}, {"a": 1, "b": 2}], "a", "b", ignore_missing=True)) == [(2,), (1, 2)]


def test_extract_keys_counts_what_is_missing_and_what_is_ambiguous():
    step = Step()
    samples = [sample(a=1), sample(b=1), sample(a=1, ab=2), sample(a=3)]
    found = list(fields.extract_keys(samples, "a*", handler=ignore_and_continue, step=step))
    assert found == [(1,), (3,)]
    assert step.run.report.counts == {"ambiguous_field": 1, "missing_field": 1}


def test_extract_keys_raises_what_says_where():
    with pytest.raises(DuplicateFieldError, match=r"sample 'k0': a, ab all match a\*, in s.tar"):
        list(fields.extract_keys([sample(a=1, ab=2)], "a*"))
    with pytest.raises(MissingFieldError, match=r"no field '\.jpg' or '\.png', only 'a'"):
        list(fields.extract_keys([sample(a=1)], ".jpg;.png"))
    assert list(fields.extract_keys([sample(a=1, ab=2)], "a*", duplicate_is_error=False)) == [(1,)]


def test_extract_keys_takes_a_default_of_the_policy():
    step = lenient("raise", defaults={"cls": -1})
    assert list(fields.extract_keys([sample(a=1), sample(a=2, cls=5)], "a", "cls", step=step)) == [(1, -1), (2, 5)]
    assert step.run.report.counts == {"missing_field": 1}


def test_rename_keys_matches_the_last_part_in_lower_case_and_the_last_rule_wins():
    one = {"__key__": "k", "dir/A.JPG": 1, "cls": 2}
    assert list(fields.rename_keys([one], ("image", "*.jpg"), label="cls")) == [{"image": 1, "label": 2}]
    assert list(fields.rename_keys([{"a": 1}], ("x", "a*"), ("y", "?"), must_match=False)) == [{"y": 1}]


def test_rename_keys_can_keep_what_no_rule_matches():
    assert list(fields.rename_keys([sample(a=1, b=2)], c="a", keep_unselected=True)) == [sample(c=1, b=2)]


def test_rename_keys_counts_what_does_not_match_and_what_would_get_one_name():
    step = Step()
    samples = [sample(a=1), sample(b=1), sample(a=1, ab=2)]
    assert list(fields.rename_keys(samples, c="a*", handler=ignore_and_continue, step=step)) == [{"c": 1}]
    assert step.run.report.counts == {"ambiguous_field": 1, "missing_field": 1}
    with pytest.raises(ValueError, match="both become 'c'"):
        list(fields.rename_keys(samples[2:], c="a*"))
    assert list(fields.rename_keys(samples[2:], c="a*", duplicate_is_error=False)) == [{"c": 1}]


names = st.sampled_from(["a", "b", "ab", "x.jpg", "dir/B", "__key__"])
layouts = st.lists(st.dictionaries(names, st.integers(), max_size=4), max_size=8)


def plain_rename(one, rules, keep):
    """What the rules say, one field after the other and without remembering anything."""
    found = {}
    for name, value in one.items():
        new = None
        for output, pattern in rules:
            if fnmatchcase(name.split("/")[-1].lower(), pattern):
                new = output
        if new is not None or keep:
            found.setdefault(name if new is None else new, value)
    return found


@given(
    layouts,
    st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from(["a*", "?", "*.jpg"])), max_size=3),
    st.booleans(),
)
def test_rename_keys_treats_samples_of_all_layouts_as_if_each_were_the_first(samples, rules, keep):
    found = list(fields.rename_keys(samples, *rules, keep_unselected=keep, must_match=False, duplicate_is_error=False))
    assert found == [plain_rename(one, rules, keep) for one in samples]


@given(layouts, st.lists(st.sampled_from(["a*", "?", ".b", "*.jpg", "__key__"]), min_size=1, max_size=3))
def test_extract_keys_treats_samples_of_all_layouts_as_if_each_were_the_first(samples, patterns):
    together = list(fields.extract_keys(samples, *patterns, duplicate_is_error=False, ignore_missing=True))
    alone = [
        next(fields.extract_keys([one], *patterns, duplicate_is_error=False, ignore_missing=True)) for one in samples
    ]
    assert together == alone


def test_more_layouts_than_are_remembered_do_no_harm():
    samples = [{f"f{number}": number} for number in range(700)] * 2
    assert [value for (value,) in fields.extract_keys(samples, "f*")] == [*range(700)] * 2


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.one_of(st.none(), st.integers())), max_size=10), st.booleans()
)
def test_to_tuple_loses_nothing_without_counting_it(samples, none_is_error):
    step = Step()
    found = list(
        fields.to_tuple(samples, "a", "b", none_is_error=none_is_error, handler=ignore_and_continue, step=step)
    )
    good = [
        (one["a"], one["b"])
        for one in samples
        if "a" in one and "b" in one and not (none_is_error and None in (one["a"], one["b"]))
    ]
    assert found == good
    assert len(step.run.report) == len(samples) - len(found)
