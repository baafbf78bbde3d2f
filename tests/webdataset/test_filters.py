import io
import pickle
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from shardset.pipeline.run import Run, Step
from shardset.pipeline.stage import Stage
from shardset.webdataset import filters, utils

SAMPLES = [{"__key__": f"k{number}", "__url__": "s.tar", "txt": b"a", "cls": number} for number in range(6)]


def double(value):
    return value * 2


def is_even(sample):
    return sample["cls"] % 2 == 0


@filters.pipelinefilter
def every(source, step=2, *, first=0):
    """Give every so many samples."""
    return (sample for number, sample in enumerate(source) if number % step == first)


def plain_every(source, step=2):
    return list(source)[::step]


def stages(folder):
    return [
        filters.associate({"k1": {"more": 1}}),
        filters.batched(2),
        filters.decode("pil", partial=True),
        filters.detshuffle(3),
        filters.extract_keys("*.txt;txt", "cls"),
        filters.info(stream=None, n=0),
        filters.listed(2),
        filters.log_keys(folder / "keys"),
        filters.map(double_class),
        filters.map_dict(cls=double),
        filters.rename(text="txt"),
        filters.rename_keys(text="txt"),
        filters.rsample(0.5),
        filters.select(is_even),
        filters.shuffle(3),
        filters.slice(1, 4),
        filters.to_tuple("txt cls"),
        filters.xdecode(cls=False),
        filters.Cached(),
        every(3, first=1),
        filters.pipelinefilter(plain_every)(2),
    ]


def double_class(sample):
    return {**sample, "cls": 2 * sample["cls"]}


def run(stage):
    return repr(list(stage([dict(sample) for sample in SAMPLES])))


def test_every_stage_works_by_itself_and_after_pickling(tmp_path):
    for stage in stages(tmp_path):
        again = pickle.loads(pickle.dumps(stage))
        found = run(stage)
        assert "k0" in found or "cls" in found or len(found) > 4, stage
        assert run(again) == found


def test_every_stage_gives_the_same_in_a_process_that_is_started_afresh(tmp_path):
    given = stages(tmp_path)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert list(pool.map(run, given)) == [run(stage) for stage in given]


def test_stages_take_apart_what_stages_put_together():
    batches = filters.batched(4)([(number, str(number)) for number in range(6)])
    assert list(filters.unbatched()(batches)) == [(number, str(number)) for number in range(6)]
    assert list(filters.unlisted()(filters.listed(4)(range(6)))) == list(range(6))
    assert list(filters.map_tuple(None, double)([(1, 2)])) == [(1, 4)]


def test_private_names_are_what_the_stages_do():
    for name in filters.__all__:
        private = getattr(filters, f"_{name}", None)
        public = getattr(filters, name)
        if private is not None and isinstance(public, filters.RestCurried):
            assert public.f is private
    assert list(filters._select(range(4), lambda number: number % 2)) == [1, 3]
    assert list(filters._to_tuple(SAMPLES[:1], "cls")) == [(0,)]


def test_a_stage_shows_its_name_and_arguments():
    assert str(filters.shuffle(10, initial=3)) == "shuffle(10, initial=3)"
    assert str(every(3, first=1)) == "every(3, first=1)"
    assert str(filters.detshuffle(5)) == "detshuffle(5, 100, seed=0)"


def test_arguments_that_webdataset_ignores_are_refused_or_work():
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        list(filters.associate({}, more=1)(SAMPLES))
    assert list(filters.listed(4, partial=False)(range(6))) == [[0, 1, 2, 3]]


def test_a_function_of_the_callers_own_becomes_a_stage():
    assert every.__name__ == "every"
    assert every.__doc__ == "Give every so many samples."
    stage = every(3, first=1)
    assert isinstance(stage, filters.FilterFunction)
    assert (stage.args, stage.kw) == ((3,), {"first": 1})
    assert list(stage(range(8))) == [1, 4, 7]


def test_an_argument_of_the_callers_own_called_step_is_not_ours():
    assert filters.pipelinefilter(plain_every)(step=3)(range(8)) == [0, 3, 6]


def test_functions_of_the_pipeline_become_stages_that_are_told_of_the_run():
    stage = filters.pipelinefilter(filters._select)(is_even)
    assert isinstance(stage, Stage)
    step = Step(Run())
    list(stage.start(SAMPLES, step))
    assert step.run.report.counts == {"select": 3}


def test_map_dict_and_rename_take_fields_of_any_name():
    samples = [{"step": 1, "handler": 2}]
    assert list(filters.map_dict(step=double)(samples)) == [{"step": 2, "handler": 2}]
    assert list(filters.rename(step="handler")([{"step": 1, "handler": 2}])) == [{"step": 2}]


def test_detshuffle_is_the_same_for_all_that_have_its_numbers_and_another_in_each_epoch():
    def passes(stage):
        return [tuple(stage.run(range(50))) for _ in range(3)]

    first, second = filters.detshuffle(20), filters.detshuffle(20)
    found = passes(first)
    assert found == passes(second)
    assert first.epoch == 2
    assert len(set(found)) == 3
    assert all(sorted(one) == list(range(50)) for one in found)
    others = [passes(filters.detshuffle(20, seed=1)), passes(filters.detshuffle(20, epoch=5))]
    assert len({found[0], others[0][0], others[1][0]}) == 3


def test_detshuffle_in_a_pipeline_follows_its_epoch_and_not_the_passes_of_this_process():
    def order(stage, epoch):
        return list(stage.start(range(50), Step(Run(epoch=(epoch,)))))

    used = filters.detshuffle(20)
    order(used, 0)
    assert order(used, 7) == order(filters.detshuffle(20), 7)


def test_small_functions_do_what_they_say():
    assert filters.compose(double, str)(2) == "4"
    assert filters.compose2(double, str)(2) == "4"
    assert filters.compose()(2) == 2
    assert filters.pipeline(range(3), filters.map(double), list) == [0, 2, 4]
    assert filters.pipeline(5) == 5
    assert filters.parse_field_spec("png;jpg cls") == [["png", "jpg"], ["cls"]]
    assert filters.parse_field_spec(["a;b"]) == [["a", "b"]]
    assert filters.tuple2dict((5, 6)) == {0: 5, 1: 6}
    assert filters.tuple2dict({"a": 1}) == {"a": 1}
    assert filters.dict2tuple({1: 6, 0: 5}) == (5, 6)
    assert filters.identity(5) == 5
    assert filters.getfirst({"a": 1}, "b;a") == 1
    assert filters.combine_values([1, 2]).dtype == np.int64


def test_transform_with_passes_values_through_functions():
    assert filters.transform_with([1, 2, 3], [double, None]) == [2, 2, 3]
    assert filters.transform_with((1, 2), None) == (1, 2)
    with pytest.raises(ValueError, match="2 functions for 1 values"):
        filters.transform_with([1], [double, double])


def test_pick_takes_one_out():
    buffer = list(range(5))
    picked = [filters.pick(buffer, random.Random(3)) for _ in range(5)]
    assert sorted(picked) == list(range(5))
    assert buffer == []


def test_streams_decode_and_pickles_only_without_enforced_security(monkeypatch):
    assert filters.decode_bin(io.BytesIO(b"a")) == b"a"
    assert filters.decode_text(io.BytesIO("ä".encode())) == "ä"
    monkeypatch.setattr(utils, "enforce_security", False)
    assert filters.decode_pickle(io.BytesIO(pickle.dumps([1]))) == [1]
    monkeypatch.setattr(utils, "enforce_security", True)
    with pytest.raises(ValueError, match="not allowed"):
        filters.decode_pickle(io.BytesIO(pickle.dumps([1])))
