from __future__ import annotations

import gzip
import itertools
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards import make_members, tar_bytes, write_dataset, write_shard
from shardset.errors import FormatError, NoSamplesError, StateError
from shardset.pipeline.pipeline import DataPipeline
from shardset.pipeline.shard_lists import ResampledShards, SimpleShardList
from shardset.pipeline.web_dataset import WebDataset
from shardset.policy import Policy


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return [
        str(path) for path in write_dataset(tmp_path_factory.mktemp("shards"), shards=5, samples=7, fields=("txt",))
    ]


def keys(samples):
    return [sample["__key__"] for sample in samples]


def refuse(_sample):
    return False


def is_even(sample):
    return int(sample["__key__"]) % 2 == 0


def plain(urls):
    return WebDataset(urls, shardshuffle=True)


def shuffled(urls):
    return plain(urls).shuffle(10, initial=4)


def bounded(urls):
    return plain(urls).shuffle(10, max_bytes=40)


def twice(urls):
    return plain(urls).select(is_even).shuffle(6).map(dict).shuffle(4, seed=3)


def sampled(urls):
    return plain(urls).rsample(0.7).shuffle(8).rsample(0.8)


def decoded(urls):
    return plain(urls).shuffle(8).decode(threads=2)


def ahead(urls):
    return plain(urls).decode(threads=2).shuffle(8).decode(partial=True, threads=2)


def endless(urls):
    return plain(urls).shuffle(8).with_epoch(80)


def drawn(urls):
    return WebDataset(urls, resampled=True).shuffle(8).with_epoch(60)


def own_stage(urls):
    return plain(urls).shuffle(8).compose(lambda source: (sample for sample in source if is_even(sample)))


PIPELINES = [plain, shuffled, bounded, twice, sampled, decoded, ahead, endless, drawn, own_stage]


@pytest.mark.parametrize("make", PIPELINES, ids=lambda make: make.__name__)
@given(cut=st.integers(0, 80), again=st.integers(0, 20))
@settings(max_examples=25)
def test_a_state_goes_on_behind_the_last_sample(urls, make, cut, again):
    whole = keys(make(urls))
    cut, again = min(cut, len(whole)), min(again, max(0, len(whole) - cut))
    first = make(urls)
    begun = keys(itertools.islice(first, cut))
    state = json.loads(json.dumps(first.state_dict()))
    second = make(urls)
    second.load_state_dict(state)
    more = keys(itertools.islice(second, again))
    third = make(urls)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert begun + more + keys(third) == whole
    following = make(urls)
    list(following)
    assert keys(third) == keys(following)  # the next epoch


@pytest.mark.parametrize("make", [shuffled, twice, ahead], ids=lambda make: make.__name__)
def test_a_state_that_was_loaded_and_not_used_is_still_that_state(urls, make):
    first = make(urls)
    begun = keys(itertools.islice(first, 9))
    second = make(urls)
    second.load_state_dict(first.state_dict())
    iterator = iter(second)
    third = make(urls)
    third.load_state_dict(second.state_dict())  # before the first sample
    assert begun + keys(third) == keys(make(urls)) == begun + keys(iterator)


def test_a_state_holds_no_payload_and_changes_no_more(urls):
    dataset = shuffled(urls)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    before = json.dumps(state)
    list(iterator)
    assert json.dumps(state) == before
    assert len(before) < 1000
    assert dataset.state_dict() != state


def test_shards_that_come_through_a_pipe_or_are_compressed_are_gone_on_with_too(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar_bytes(make_members(40, fields=("txt",)))))
    for url in (str(path), f"pipe:cat {path}"):
        first = WebDataset(url).shuffle(10)
        begun = keys(itertools.islice(first, 23))
        second = WebDataset(url).shuffle(10)
        second.load_state_dict(first.state_dict())
        assert begun + keys(second) == keys(WebDataset(url).shuffle(10))


def test_a_state_of_another_pipeline_seed_or_share_is_refused_with_what_differs(urls, monkeypatch):
    first = shuffled(urls)
    next(iter(first))
    state = first.state_dict()
    for other in (WebDataset(urls[:2], shardshuffle=True).shuffle(10), plain(urls)):
        with pytest.raises(StateError, match="another pipeline"):
            other.load_state_dict(state)
    with pytest.raises(StateError, match=r"where that had shuffle\(10, 4\), this one has shuffle\(11, 4\)"):
        plain(urls).shuffle(11, 4).load_state_dict(state)
    with pytest.raises(StateError, match="seed 0, and this one has 5"):
        WebDataset(urls, shardshuffle=True, seed=5).shuffle(10, initial=4).load_state_dict(state)
    with pytest.raises(StateError, match="version"):
        shuffled(urls).load_state_dict({})
    other = shuffled(urls)
    other.load_state_dict(state)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StateError, match=r"rank 0 of 1.*rank 1 of 2"):
        iter(other)


def test_a_shard_that_was_changed_under_a_state_is_noticed(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(30, fields=("txt",)))
    first = WebDataset(str(path)).shuffle(10)
    list(itertools.islice(first, 5))
    path.write_bytes(tar_bytes([("a" * 90 + "/" * 5 + f"{n}.txt", b"x" * 700 * n) for n in range(30)]))
    second = WebDataset(str(path)).shuffle(10)
    second.load_state_dict(first.state_dict())
    with pytest.raises((StateError, ValueError)):
        list(second)


def test_a_generator_of_the_callers_own_cannot_be_saved(urls):
    dataset = plain(urls).shuffle(5, rng=random.Random(0))
    assert sorted(keys(dataset)) == sorted(keys(plain(urls)))
    next(iter(dataset))
    with pytest.raises(StateError, match="seed"):
        dataset.state_dict()


def test_a_stage_that_keeps_samples_in_memory_cannot_be_saved(urls):
    dataset = plain(urls).mcached()
    next(iter(dataset))
    with pytest.raises(StateError, match="mcached"):
        dataset.state_dict()


def test_a_finished_epoch_is_gone_on_with_by_the_next_one(urls):
    first = shuffled(urls)
    list(first)
    second = shuffled(urls)
    second.load_state_dict(first.state_dict())
    iter(second)  # taken and thrown away unread, as loaders do
    assert second.state_dict() == first.state_dict()
    third = shuffled(urls)
    list(third)
    assert keys(second) == keys(third)


def test_epochs_differ_and_set_epoch_repeats_one(urls):
    dataset = shuffled(urls)
    epochs = [keys(dataset) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    dataset.set_epoch(1)
    assert [keys(dataset), keys(dataset)] == epochs[1:]
    assert keys(WebDataset(urls, shardshuffle=True, seed=1).shuffle(10, initial=4)) != epochs[0]


def test_the_seed_may_come_from_the_environment(urls, monkeypatch):
    monkeypatch.setenv("WDS_SEED", "7")
    by_variable = keys(shuffled(urls))
    monkeypatch.delenv("WDS_SEED")
    assert by_variable == keys(WebDataset(urls, shardshuffle=True, seed=7).shuffle(10, initial=4))
    monkeypatch.setenv("WDS_SEED", "seven")
    with pytest.raises(ValueError, match="WDS_SEED"):
        shuffled(urls)


def test_with_epoch_counts_what_the_last_stage_gives_and_goes_over_the_data_as_often_as_needed(urls):
    dataset = plain(urls).with_epoch(4).batched(2)
    assert len(list(dataset)) == 4
    dataset = shuffled(urls).with_epoch(80)
    found = keys(dataset)
    assert len(found) == 80
    passes = [found[:35], found[35:70]]
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]
    assert len(list(plain(urls).repeat(2))) == 70
    assert len(list(plain(urls).repeat(2, 40))) == 40
    assert len(list(plain(urls).repeat(1, 3))) == 3
    assert len(list(itertools.islice(WebDataset(urls, repeat=True), 100))) == 100


def test_an_epoch_that_nothing_comes_through_to_fill_ends_in_an_error_instead_of_spinning(urls):
    with pytest.raises(NoSamplesError, match="pass 0"):
        list(plain(urls).select(refuse).with_epoch(10))
    with pytest.raises(NoSamplesError, match="select"):
        list(WebDataset(urls, resampled=True).select(refuse))


def test_with_length_tells_len_alone(urls):
    dataset = plain(urls)
    with pytest.raises(TypeError):
        len(dataset)
    assert len(dataset.with_length(1000)) == 1000
    assert len(list(dataset)) == 35
    assert len(pickle.loads(pickle.dumps(dataset))) == 1000


def test_a_copy_in_another_process_begins_with_the_same_epoch(urls):
    dataset = shuffled(urls)
    list(dataset)
    assert keys(pickle.loads(pickle.dumps(dataset))) == keys(dataset)


def test_a_pipeline_may_be_put_together_stage_by_stage(urls):
    dataset = DataPipeline(SimpleShardList(urls, seed=True), WebDataset(urls).stage(-1))
    assert sorted(keys(dataset)) == sorted(keys(plain(urls)))
    first, second = keys(dataset), keys(dataset)
    assert first != second
    endless = DataPipeline(ResampledShards(urls, 3), WebDataset(urls).stage(-1))
    assert len(list(endless)) == 21


def test_stages_of_every_kind_are_taken(urls):
    class Doubling:
        def run(self, source):
            return (item * 2 for item in source)

    pipeline = DataPipeline(lambda: iter(range(3)), None, [Doubling(), lambda source: (item + 1 for item in source)])
    assert list(pipeline) == [1, 3, 5]
    assert list(pipeline.compose(lambda source: itertools.islice(source, 1))) == [1]
    assert len(pipeline.pipeline) == 3
    pipeline.append(lambda source: map(str, source))
    assert list(pipeline) == ["1", "3", "5"]
    assert list(DataPipeline(range(3))) == [0, 1, 2]
    assert list(DataPipeline()) == []
    with pytest.raises(TypeError, match="stage 1"):
        list(DataPipeline(range(3), 7))
    with WebDataset(urls) as dataset:
        assert len(list(dataset)) == 35
    assert dataset.pipeline == []


def test_the_report_is_that_of_the_latest_epoch_with_all_its_passes(tmp_path, caplog):
    path = write_shard(tmp_path / "a.tar", [("README", b""), ("a.x", b"1"), ("a.x", b"2"), ("b.x", b"")])
    dataset = WebDataset(str(path), policy=Policy(on_error="skip"))
    list(dataset)
    list(dataset)
    assert dataset.report().counts == {"duplicate_suffix": 1, "no_suffix": 1}
    assert "epoch 1" in caplog.text
    assert "duplicate_suffix: 1" in caplog.text
    assert "no_suffix" not in caplog.text
    list(dataset.with_epoch(4))
    assert dataset.report().counts["duplicate_suffix"] == 2


def test_a_state_after_an_error_or_an_interrupt_loses_no_sample(urls):
    def fail_once(sample):
        if armed and sample["__key__"] == "00000003":
            armed.clear()
            raise KeyboardInterrupt
        return sample

    for make in (
        lambda: WebDataset(urls).map(fail_once),
        lambda: WebDataset(urls).shuffle(5).map(fail_once).batched(2),
    ):
        armed = []
        whole = list(make())
        armed = [True]
        first, begun = make(), []
        with pytest.raises(KeyboardInterrupt):
            begun.extend(first)
        second = make()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert len(begun) + len(list(second)) == len(whole)


def test_a_list_of_shards_that_changed_under_a_state_is_noticed(tmp_path):
    for name in ("b", "c", "d"):
        write_shard(tmp_path / f"{name}.tar", make_members(5, prefix=name, fields=("txt",)))
    for arguments in ({}, {"shardshuffle": True}):
        first = WebDataset(str(tmp_path), **arguments)
        list(itertools.islice(first, 7))
        write_shard(tmp_path / "a.tar", make_members(5, prefix="a", fields=("txt",)))
        second = WebDataset(str(tmp_path), **arguments)
        second.load_state_dict(first.state_dict())
        with pytest.raises(StateError, match="list of shards"):
            list(second)
        (tmp_path / "a.tar").unlink()


def test_a_shard_of_another_size_or_with_another_sample_in_the_place_is_noticed(tmp_path):
    path = tmp_path / "a.tar"
    for members, message in (
        (make_members(5, fields=("txt",)), "bytes"),
        (make_members(30, prefix="z", fields=("txt",)), "'z0"),
    ):
        write_shard(path, make_members(30, fields=("txt",)))
        first = WebDataset(str(path))
        list(itertools.islice(first, 12))
        write_shard(path, members)
        second = WebDataset(str(path))
        second.load_state_dict(first.state_dict())
        with pytest.raises(StateError, match=message):
            list(second)


def test_a_key_that_came_before_the_state_must_not_come_back(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{key}.x", b"") for key in ("a", "b", "c", "d", "a")])
    for url in (str(path), f"pipe:cat {path}"):
        first = WebDataset(url)
        list(itertools.islice(first, 3))
        second = WebDataset(url)
        second.load_state_dict(first.state_dict())
        with pytest.raises(FormatError, match="'a' comes back"):
            list(second)


def test_a_pipeline_over_a_pipeline_goes_on_in_the_epoch_of_the_inner_one(urls):
    def make():
        return DataPipeline(shuffled(urls), lambda source: source)

    first = make()
    list(first)
    begun = keys(itertools.islice(first, 9))
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    third = make()
    list(third)
    assert begun + keys(second) == keys(third)


def test_a_state_of_before_the_beginning_takes_a_dataset_in_use_back_there(urls):
    dataset = shuffled(urls)
    beginning = dataset.state_dict()
    list(itertools.islice(dataset, 5))
    dataset.load_state_dict(beginning)
    assert dataset.state_dict() == beginning
    assert keys(dataset) == keys(shuffled(urls))


def test_a_damaged_state_is_named_as_that(urls):
    dataset = shuffled(urls)
    next(iter(dataset))
    state = dataset.state_dict()
    for name in ("epoch", "pass", "stages", "share", "pipeline"):
        with pytest.raises(StateError, match=f"damaged: {name}|another pipeline"):
            shuffled(urls).load_state_dict({**state, name: None})
    for stage in ("3", "4"):
        broken = {**state, "stages": {**state["stages"], stage: {"held": "???", "after": [50, 0], "drawn": 1}}}
        other = shuffled(urls)
        other.load_state_dict(broken)
        with pytest.raises(StateError):
            list(other)


def test_numbers_of_numpy_are_seeds_and_what_is_no_number_is_refused(urls):
    assert keys(WebDataset(urls, shardshuffle=True, seed=np.int64(3)).shuffle(9)) == keys(
        WebDataset(urls, shardshuffle=True, seed=3).shuffle(9)
    )
    for seed in ("3", 1.5):
        with pytest.raises(TypeError):
            WebDataset(urls, seed=seed)
    for epoch in (-1, 1 << 70):
        with pytest.raises(ValueError, match="set_epoch"):
            shuffled(urls).set_epoch(epoch)


def test_an_endless_stream_may_take_many_rounds_for_its_first_batch(urls):
    (batch,) = itertools.islice(WebDataset(urls[:1], resampled=True).batched(300, collation_fn=None), 1)
    assert len(batch) == 300


def test_datasets_keep_no_file_open_behind_their_end(tmp_path):
    urls = [str(path) for path in write_dataset(tmp_path, shards=40, samples=1, fields=("txt",))]
    before = len(list(Path("/proc/self/fd").iterdir()))
    datasets = [WebDataset(urls).shuffle(3) for _ in range(3)]
    for dataset in datasets:
        list(dataset)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4
