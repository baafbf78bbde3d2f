from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardset
from shards import private_cache, write_dataset, write_shard
from shardset.dataset.dataset import Dataset
from shardset.decoding.options import Decode
from shardset.errors import DecodeError, MissingFieldError, ShardsetError, StateError
from shardset.index.catalog import open_catalog
from shardset.loading.fingerprint import fingerprint
from shardset.loading.loader import Loader
from shardset.loading.order import Shuffle
from shardset.loading.read_ahead import ReadAhead
from shardset.policy import Policy
from shardset.storage import LocalStore

__all__ = ["private_cache"]

SMALL_WINDOWS = Shuffle(window_bytes=20_000, run_bytes=3_000, lanes=4)


@pytest.fixture
def dataset(tmp_path):
    write_dataset(tmp_path / "shards", shards=5, samples=23)
    return shardset.discover_dataset(tmp_path / "shards")


def indices(batches):
    return [index for batch in batches for index in batch["__index__"].tolist()]


def one_by_one(dataset, **settings):
    """The order of an epoch, as one rank with batches of one sees it."""
    return indices(Loader(dataset, 1, **settings))


@pytest.mark.parametrize("shuffle", [False, True, "full", SMALL_WINDOWS], ids=["no", "yes", "full", "windows"])
def test_an_epoch_gives_each_sample_once_with_its_own_payloads(dataset, shuffle):
    batches = list(Loader(dataset, 5, shuffle=shuffle, seed=3))
    assert sorted(indices(batches)) == list(range(115))
    for batch in batches:
        assert batch["__epoch__"] == 0
        for place, index in enumerate(batch["__index__"].tolist()):
            sample = dataset[index]
            assert {field: batch[field][place] for field in sample} == dict(sample)
            assert batch["__key__"][place] == sample.key
            assert batch["__shard__"][place] == sample.shard
            assert batch["__offset__"][place] == sample.byte_range("jpg").offset
    assert [batch["__position__"] for batch in batches] == list(range(5, 116, 5))


def test_without_shuffling_samples_come_in_the_order_of_the_dataset(dataset):
    assert one_by_one(dataset) == list(range(115))


@pytest.mark.parametrize("shuffle", [False, SMALL_WINDOWS, "full"], ids=["no", "windows", "full"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_steps_are_the_same_sets_whatever_ranks_share_them(dataset, shuffle, world_size, batch_size):
    order = one_by_one(dataset, shuffle=shuffle, seed=1)
    size = batch_size * world_size
    ranks = [
        list(Loader(dataset, batch_size, shuffle=shuffle, seed=1, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {115 // size}
    for step in range(115 // size):
        taken = [index for batches in ranks for index in batches[step]["__index__"].tolist()]
        assert sorted(taken) == sorted(order[step * size : (step + 1) * size])
        assert {len(batches[step]["__key__"]) for batches in ranks} == {batch_size}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=5),
    st.sampled_from([False, SMALL_WINDOWS, "full"]),
    st.randoms(use_true_random=False),
)
def test_histories_of_ranks_and_batch_sizes_give_one_stream(tmp_path_factory, history, shuffle, chance):
    dataset = shared_dataset(tmp_path_factory)
    want = [index for epoch in range(3) for index in epoch_order(dataset, shuffle, epoch)]
    state, seen, epoch = None, [], 0
    for world_size, batch_size, steps in history:
        loaders = [
            Loader(dataset, batch_size, shuffle=shuffle, seed=9, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        running = [iter(loader) for loader in loaders]
        for _ in range(steps):
            batches = [next(each, None) for each in running]
            assert len({batch is None for batch in batches}) == 1  # all ranks agree on where the epoch ends
            if batches[0] is None:
                break
            taken = sorted(index for batch in batches for index in batch["__index__"].tolist())
            seen.append((batches[0]["__position__"], taken))
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        assert states[0]["epoch"] == epoch or loaders[0].position == 0
        state = states[chance.randrange(world_size)]
        if state["epoch"] != epoch:
            break
    start = 0
    for stop, taken in seen:
        assert taken == sorted(want[start:stop])
        start = stop


_shared: dict[str, object] = {}


def shared_dataset(tmp_path_factory):
    if "dataset" not in _shared:
        folder = tmp_path_factory.mktemp("histories")
        write_dataset(folder, shards=4, samples=19)
        dataset = shardset.discover_dataset(folder)
        assert len(dataset) == 76
        _shared["dataset"] = dataset
    return _shared["dataset"]


def epoch_order(dataset, shuffle, epoch):
    key = (str(shuffle), epoch)
    if key not in _shared:
        loader = Loader(dataset, 1, shuffle=shuffle, seed=9)
        loader.set_epoch(epoch)
        _shared[key] = indices(loader)
    return _shared[key]


def test_two_epochs_differ_and_one_seed_repeats(dataset):
    loader = Loader(dataset, 1, shuffle=True, seed=4)
    first, second = indices(loader), indices(loader)
    assert loader.epoch == 2
    assert first != second
    assert sorted(first) == sorted(second)
    again = Loader(dataset, 1, shuffle=True, seed=4)
    assert (indices(again), indices(again)) == (first, second)
    assert one_by_one(dataset, shuffle=True, seed=5) != first
    jumped = Loader(dataset, 1, shuffle=True, seed=4)
    jumped.set_epoch(1)
    assert indices(jumped) == second


def test_iteration_begins_anew_after_a_break_and_goes_on_after_a_state(dataset):
    loader = Loader(dataset, 10, shuffle=True)
    first = [next(iter(loader))["__key__"] for _ in range(2)]
    assert first[0] == first[1]
    running = iter(loader)
    for _ in range(3):
        next(running)
    state = loader.state_dict()
    rest = indices(running)
    loader.load_state_dict(state)
    assert loader.position == 30
    assert indices(loader) == rest
    assert (loader.epoch, loader.position) == (1, 0)
    loader.load_state_dict(state)
    loader.set_epoch(0)  # as training loops do at the start of each epoch
    assert indices(loader) == rest


def test_the_state_of_a_batch_does_not_count_what_was_fetched_after_it(dataset):
    loader = Loader(dataset, 10, shuffle=True)
    batches = list(itertools.islice(loader, 5))
    other = Loader(dataset, 7, shuffle=True)
    other.load_state_dict(loader.state_dict(batches[2]))
    order = one_by_one(dataset, shuffle=True)
    assert next(iter(other))["__index__"].tolist() == order[30:37]


def test_a_state_is_small_and_holds_no_path_and_no_rank(dataset, tmp_path):
    loader = Loader(dataset, 3, shuffle=True, seed=2**63, rank=1, world_size=2)
    next(iter(loader))
    text = json.dumps(loader.state_dict())
    assert len(text) <= 512
    assert str(tmp_path) not in text
    assert "rank" not in text
    assert "world" not in text


def test_tails(dataset):
    order = one_by_one(dataset, shuffle=True)
    next_order = epoch_of(dataset, 1)

    def ranks(tail):
        return [list(Loader(dataset, 10, shuffle=True, tail=tail, rank=rank, world_size=4)) for rank in range(4)]

    dropped, wrapped, exact = ranks("drop"), ranks("wrap"), ranks("exact")
    assert [len(batches) for batches in dropped] == [2] * 4
    assert [len(batches) for batches in wrapped] == [3] * 4
    assert [len(batches) for batches in exact] == [3] * 4
    assert sorted(itertools.chain.from_iterable(map(indices, exact))) == list(range(115))
    last = [batch[2] for batch in wrapped]
    assert sorted(indices(last)) == sorted(order[80:] + next_order[:5])
    flagged = [index for batch in last for index in batch["__index__"][batch.get("__repeated__", [])].tolist()]
    assert sorted(flagged) == sorted(next_order[:5])
    assert sorted(len(batch[2]["__key__"]) for batch in exact) == [8, 9, 9, 9]
    assert all(
        len(Loader(dataset, 10, tail=tail, rank=0, world_size=4)) == n
        for tail, n in [("drop", 2), ("wrap", 3), ("exact", 3)]
    )


def epoch_of(dataset, epoch, **more):
    loader = Loader(dataset, 1, shuffle=True, **more)
    loader.set_epoch(epoch)
    return indices(loader)


def test_a_rank_without_a_sample_at_the_last_step_gets_an_empty_batch(tmp_path):
    write_dataset(tmp_path, shards=1, samples=5)
    dataset = shardset.discover_dataset(tmp_path)
    batches = [list(Loader(dataset, 1, tail="exact", rank=rank, world_size=4)) for rank in range(4)]
    assert [len(each) for each in batches] == [2] * 4
    assert sorted(len(each[1]["__key__"]) for each in batches) == [0, 0, 0, 1]


def test_a_batch_larger_than_the_dataset_wraps_through_several_epochs(tmp_path):
    write_dataset(tmp_path, shards=1, samples=5)
    dataset = shardset.discover_dataset(tmp_path)
    (batch,) = Loader(dataset, 12, shuffle=True, tail="wrap")
    orders = [epoch_of(dataset, epoch) for epoch in range(3)]
    assert batch["__index__"].tolist() == (orders[0] + orders[1] + orders[2])[:12]
    assert batch["__repeated__"].tolist() == [False] * 5 + [True] * 7
    with pytest.raises(shardset.NoSamplesError, match="has 5 positions, and a step takes 12, 4 of each of 3 ranks"):
        list(Loader(dataset, 4, rank=0, world_size=3))
    assert len(Loader(dataset, 12)) == 0


def test_fields_may_be_named_renamed_and_have_alternatives(tmp_path):
    members = [("a.jpg", b"1"), ("a.txt", b"one"), ("b.png", b"2"), ("b.txt", b"two")]
    write_shard(tmp_path / "a.tar", members)
    dataset = shardset.discover_dataset(tmp_path)
    (batch,) = Loader(dataset, 2, fields=["jpg;png"])
    assert batch["jpg"] == [b"1", b"2"]
    assert "txt" not in batch
    (batch,) = Loader(dataset, 2, fields={"image": "jpg;png", "text": "txt"})
    assert (batch["image"], batch["text"]) == ([b"1", b"2"], [b"one", b"two"])
    with pytest.raises(MissingFieldError, match="'b' has no field 'jpg'"):
        list(Loader(dataset, 2, fields="jpg"))
    (batch,) = Loader(dataset, 2)
    assert (batch["jpg"], batch["png"], batch["txt"]) == ([b"1", None], [None, b"2"], [b"one", b"two"])
    loader = Loader(dataset, 2, fields=["jpg", "txt"], policy=Policy(defaults={"jpg": None}))
    assert next(iter(loader))["jpg"] == [b"1", None]
    assert loader.report.counts == {"missing_field": 1}
    for wrong, error in (
        ([], ValueError),
        (["a", "a"], ValueError),
        ([""], ValueError),
        (["__key__"], ValueError),
        ([1], TypeError),
    ):
        with pytest.raises(error):
            Loader(dataset, 2, fields=wrong)


def test_values_are_decoded_by_name(tmp_path):
    members = []
    for number in range(6):
        members += [(f"{number}.cls", str(number).encode()), (f"{number}.txt", f"text {number}".encode())]
        members += [(f"{number}.json", json.dumps({"n": number}).encode())]
    write_shard(tmp_path / "a.tar", members)
    (batch,) = Loader(shardset.discover_dataset(tmp_path), 6, decode=True)
    assert batch["cls"].dtype == np.int64
    assert batch["cls"].tolist() == list(range(6))
    assert batch["txt"] == [f"text {number}" for number in range(6)]
    assert batch["json"] == [{"n": number} for number in range(6)]


def double(sample):
    return {"value": sample["cls"] * 2, "process": os.getpid(), "seed": sample["__seed__"], "key": sample["__key__"]}


def fail(_):
    raise RuntimeError("cannot")


@pytest.fixture
def numbers(tmp_path):
    write_shard(tmp_path / "n.tar", [(f"{number}.cls", str(number).encode()) for number in range(40)])
    return shardset.discover_dataset(tmp_path)


def test_functions_are_called_with_samples_in_threads(numbers):
    loader = Loader(numbers, 8, shuffle=True, decode=True).map(double)
    for batch in loader:
        assert batch["value"].tolist() == (batch["__index__"] * 2).tolist()
        assert set(batch["process"].tolist()) == {os.getpid()}
        assert batch["key"] == batch["__key__"]


def wait_until_gone(process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_functions_are_called_in_processes_which_end_with_the_pass(numbers):
    loader = Loader(numbers, 8, shuffle=True, decode=True)
    want = {
        index: seed
        for batch in loader.map(double)
        for index, seed in zip(batch["__index__"], batch["seed"], strict=True)
    }
    processes = set()
    for batch in loader.map(double, processes=2):
        assert batch["value"].tolist() == (batch["__index__"] * 2).tolist()
        assert batch["seed"].tolist() == [want[index] for index in batch["__index__"]]
        processes |= set(batch["process"].tolist())
    assert os.getpid() not in processes
    again = loader.map(double, processes=2)
    ours = [set(batch["process"].tolist()) for _ in range(2) for batch in again]
    assert len(set().union(*ours)) <= 2  # the same ones in the next epoch
    del again
    gc.collect()
    assert all(wait_until_gone(process) for process in processes.union(*ours))


@pytest.mark.slow
def test_what_a_function_raises_in_a_process_says_which_sample_it_was(numbers):
    with pytest.raises(RuntimeError, match="cannot") as caught:
        list(Loader(numbers, 8, decode=True).map(fail, processes=1))
    assert any("called with sample '0'" in note for note in caught.value.__notes__)


def kill_self(sample):
    if sample["__key__"] == "20":
        os.kill(os.getpid(), 9)
    return sample


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_error_and_the_state_before_it_goes_on(numbers):
    loader = Loader(numbers, 4, decode=True)
    seen = []
    running = iter(loader.map(kill_self, processes=2))

    with pytest.raises(ShardsetError, match="was killed"):
        seen.extend(running)
    state = loader.state_dict(seen[-1])
    loader.load_state_dict(state)
    assert indices(seen) + indices(loader) == list(range(40))


def test_a_function_that_fails_or_gives_no_dict_says_which_sample_it_was(numbers):
    with pytest.raises(RuntimeError, match="cannot") as caught:
        list(Loader(numbers, 8, decode=True).map(fail))
    assert any("called with sample '0'" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="returned NoneType for sample '0'"):
        list(Loader(numbers, 8).map(lambda _: None))


def test_a_function_makes_batches_of_samples(numbers):
    loader = Loader(numbers, 8, decode=True).collate(lambda samples: {"sum": sum(sample["cls"] for sample in samples)})
    batches = list(loader)
    assert sum(batch["sum"] for batch in batches) == sum(range(40))
    assert batches[0]["__position__"] == 8
    assert list(Loader(numbers, 20, decode=True).collate(len)) == [20, 20]


def test_seeds_of_augmentations_follow_from_seed_epoch_and_position_alone(numbers):
    def seeds(batch_size, rank, world_size, epoch=0, seed=0):
        loader = Loader(numbers, batch_size, shuffle=True, decode=True, rank=rank, world_size=world_size, seed=seed)
        loader.set_epoch(epoch)
        return {
            index: value
            for batch in loader.map(double)
            for index, value in zip(batch["__index__"].tolist(), batch["seed"].tolist(), strict=True)
        }

    whole = seeds(4, 0, 1)
    assert {**seeds(2, 0, 2), **seeds(2, 1, 2)} == whole
    assert len(set(whole.values())) == 40
    assert not set(whole.values()) & set(seeds(4, 0, 1, epoch=1).values())
    assert not set(whole.values()) & set(seeds(4, 0, 1, seed=1).values())


@pytest.fixture
def damaged(tmp_path):
    members = [(f"{number:02d}.cls", b"x" if number in {5, 17} else str(number).encode()) for number in range(24)]
    write_shard(tmp_path / "d" / "n.tar", members)
    return shardset.discover_dataset(tmp_path / "d")


def test_a_payload_that_cannot_be_decoded_raises_with_its_sample(damaged):
    with pytest.raises(DecodeError, match="field 'cls' of sample '05' cannot be decoded") as caught:
        list(Loader(damaged, 4, decode=True))
    assert (caught.value.key, caught.value.field) == ("05", "cls")
    assert caught.value.shard.endswith("n.tar")


@pytest.mark.parametrize("mapped", [False, True])
def test_a_skipped_sample_is_replaced_by_the_same_one_on_any_number_of_ranks(damaged, mapped):
    def batches(world_size, batch_size):
        found = []
        for rank in range(world_size):
            loader = Loader(
                damaged, batch_size, shuffle=True, decode=True, policy=Policy("skip"), rank=rank, world_size=world_size
            )
            found += list(loader.map(lambda sample: sample) if mapped else loader)
        return found

    alone = indices(batches(1, 4))
    assert len(alone) == 24
    assert not {5, 17} & set(alone)
    for world_size, batch_size in ((2, 2), (4, 1), (3, 2)):
        shared = batches(world_size, batch_size)
        assert {len(batch["__key__"]) for batch in shared} == {batch_size}
        assert sorted(indices(shared)) == sorted(alone)
    loader = Loader(damaged, 4, decode=True, policy=Policy("skip"))
    for batch in loader:
        assert batch["cls"].tolist() == batch["__index__"].tolist()
    assert loader.report.counts == {"decode_failed": 2, "substituted": 2}
    assert loader.metrics.skipped == loader.report.counts
    assert [place.key for place in loader.report.places("decode_failed")] == ["05", "17"]


def test_a_marker_stands_for_what_cannot_be_decoded(damaged):
    loader = Loader(damaged, 4, decode=True, policy=Policy(defaults={"cls": -1}))
    assert [value for batch in loader for value in batch["cls"].tolist()] == [
        -1 if number in {5, 17} else number for number in range(24)
    ]
    assert loader.report.counts == {"decode_failed": 2}


def test_an_exact_epoch_leaves_skipped_samples_out(damaged):
    loader = Loader(damaged, 4, decode=True, policy=Policy("skip"), tail="exact")
    assert indices(loader) == [number for number in range(24) if number not in {5, 17}]
    assert loader.report.counts == {"decode_failed": 2}


def test_if_nothing_can_be_decoded_the_loader_says_so(tmp_path):
    write_shard(tmp_path / "n.tar", [(f"{number}.cls", b"x") for number in range(5)])
    dataset = shardset.discover_dataset(tmp_path)
    with pytest.raises(shardset.NoSamplesError, match="none of 64 spare samples"):
        list(Loader(dataset, 2, decode=True, policy=Policy("skip")))


def test_a_shard_that_vanishes_in_the_middle_of_an_epoch(tmp_path):
    write_dataset(tmp_path, shards=200, samples=4)
    dataset = shardset.discover_dataset(tmp_path, store=LocalStore(max_open=8))
    loader = Loader(dataset, 4, fields=["txt"], policy=Policy("skip"), read_ahead=ReadAhead(batches=1))
    running = iter(loader)
    seen = [next(running)["__index__"].tolist()]
    (tmp_path / "shard-0150.tar").unlink()
    rest = [batch["__index__"].tolist() for batch in running]
    assert all(len(batch) == 4 for batch in rest)
    (substitutes,) = [
        batch for batch in Loader(dataset, 4, fields=["txt"], policy=Policy("skip")) if batch["__position__"] == 604
    ]
    assert substitutes["txt"] == [dataset[index]["txt"] for index in substitutes["__index__"].tolist()]
    missing = set(range(600, 604))
    assert set(itertools.chain(*seen, *rest)) == set(range(800)) - missing
    assert loader.report.counts == {"read_failed": 4, "substituted": 4}
    loader = Loader(dataset, 4, fields=["txt"])
    with pytest.raises(shardset.StorageError, match=r"shard-0150\.tar"):
        list(loader)


def test_states_of_another_dataset_say_what_differs(tmp_path):
    write_dataset(tmp_path / "a", shards=10, samples=4)
    state = Loader(shardset.discover_dataset(tmp_path / "a"), 2).state_dict()

    def refused(folder, **more):
        with pytest.raises(StateError) as caught:
            Loader(shardset.discover_dataset(folder), 2).load_state_dict(state, **more)
        return str(caught.value)

    write_dataset(tmp_path / "b", shards=9, samples=4)
    assert "the state is of 10 shards with 40 samples" in refused(tmp_path / "b")
    assert "has 9 with 36" in refused(tmp_path / "b")
    write_dataset(tmp_path / "c", shards=10, samples=4)
    write_shard(tmp_path / "c" / "shard-0004.tar", [("x.txt", b"other")])
    assert "'shard-0004'" in refused(tmp_path / "c")
    assert "37 samples here, 40 there" in refused(tmp_path / "c")
    write_dataset(tmp_path / "d", shards=12, samples=4)
    assert "2 shards with 8 samples were appended" in refused(tmp_path / "d")
    with pytest.raises(StateError, match="no state of a Loader"):
        Loader(shardset.discover_dataset(tmp_path / "a"), 2).load_state_dict({"version": 4})
    with pytest.raises(StateError, match="version 2"):
        Loader(shardset.discover_dataset(tmp_path / "a"), 2).load_state_dict({**state, "loader": 2})
    for name in state:
        broken = {**state, name: "broken"}
        with pytest.raises(StateError):
            Loader(shardset.discover_dataset(tmp_path / "a"), 2).load_state_dict(broken)


def test_a_moved_dataset_is_the_same_one(tmp_path):
    write_dataset(tmp_path / "a", shards=3, samples=4)
    loader = Loader(shardset.discover_dataset(tmp_path / "a"), 2, shuffle=True)
    running = iter(loader)
    next(running)
    state, rest = loader.state_dict(), indices(running)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = Loader(shardset.discover_dataset(tmp_path / "b"), 2, shuffle=True)
    moved.load_state_dict(state)
    assert indices(moved) == rest


def test_appended_shards_come_from_the_next_epoch_on(tmp_path):
    write_dataset(tmp_path, shards=4, samples=10)
    loader = Loader(shardset.discover_dataset(tmp_path), 4, shuffle=SMALL_WINDOWS)
    running = iter(loader)
    for _ in range(3):
        next(running)
    state, rest = loader.state_dict(), indices(running)
    write_dataset(tmp_path, shards=6, samples=10)
    grown = Loader(shardset.discover_dataset(tmp_path), 4, shuffle=SMALL_WINDOWS)
    grown.load_state_dict(state, appended=True)
    running = iter(grown)
    part = next(running)["__index__"].tolist()
    again = Loader(shardset.discover_dataset(tmp_path), 4, shuffle=SMALL_WINDOWS)
    again.load_state_dict(grown.state_dict(), appended=True)  # a state of the epoch in which they were appended
    assert part + indices(again) == rest
    assert part + indices(running) == rest
    assert sorted(indices(grown)) == list(range(60))
    assert grown.state_dict()["data"][0][:2] == [6, 60]


def test_a_state_keeps_its_windows_until_the_end_of_its_epoch(dataset):
    loader = Loader(dataset, 5, shuffle=SMALL_WINDOWS)
    running = iter(loader)
    next(running)
    state, rest = loader.state_dict(), indices(running)
    other = Loader(dataset, 5, shuffle="full")
    other.load_state_dict(state)
    assert indices(other) == rest
    want = Loader(dataset, 5, shuffle="full")
    want.set_epoch(1)
    assert indices(other) == indices(want)


def test_tracing_a_step_tells_what_it_took_without_reading(dataset, monkeypatch):
    ranks = [Loader(dataset, 6, shuffle=True, seed=2, rank=rank, world_size=3) for rank in range(3)]
    taken = [list(loader)[4] for loader in ranks]
    tracer = Loader(dataset, 6, shuffle=True, seed=2, rank=0, world_size=3)
    monkeypatch.setattr(dataset, "reader", None)
    traced = tracer.trace(4)
    for rank, batch in enumerate(taken):
        own = [each for each in traced if each.rank == rank]
        assert [each.index for each in own] == batch["__index__"].tolist()
        assert [each.key for each in own] == batch["__key__"]
        assert [each.offset for each in own] == batch["__offset__"].tolist()
        assert [each.shard for each in own] == batch["__shard__"]
    assert [each.position for each in traced] == list(range(72, 90))
    assert tracer.trace(positions=(72, 90)) == traced
    assert tracer.trace(4, epoch=1) != traced
    with pytest.raises(IndexError, match="has 6 steps, and no step 6"):
        tracer.trace(6)
    with pytest.raises(IndexError):
        tracer.trace(positions=(110, 116))
    with pytest.raises(ValueError, match="give a step, or positions"):
        tracer.trace()


def test_selected_samples_alone_are_loaded(dataset):
    import pyarrow.compute as pc

    chosen = dataset.select(pc.field("sample_index") >= 60)
    loader = Loader(chosen, 5, shuffle=True)
    running = iter(loader)
    first = next(running)["__index__"].tolist()
    state, rest = loader.state_dict(), indices(running)
    assert sorted(first + rest) == list(range(60, 115))
    assert len(json.dumps(state)) <= 512
    again = Loader(dataset.select(pc.field("sample_index") >= 60), 5, shuffle=True)
    again.load_state_dict(state)
    assert indices(again) == rest
    for other in (dataset.select(pc.field("sample_index") >= 61), dataset):
        with pytest.raises(StateError, match="selected"):
            Loader(other, 5, shuffle=True).load_state_dict(state)


def test_a_loader_pickles_with_its_place(dataset):
    loader = Loader(dataset, 5, shuffle=True)
    running = iter(loader)
    next(running)
    again = pickle.loads(pickle.dumps(loader))
    again.load_state_dict(loader.state_dict())
    assert indices(again) == indices(running)


def test_wrong_arguments_are_told_at_once(dataset):
    for wrong in (
        {"batch_size": 0},
        {"tail": "cut"},
        {"rank": 0},
        {"world_size": 2},
        {"rank": 2, "world_size": 2},
    ):
        with pytest.raises(ValueError, match=r".+"):
            Loader(dataset, **{"batch_size": 1, **wrong})
    with pytest.raises(TypeError, match="shuffle"):
        Loader(dataset, 1, shuffle="yes")
    with pytest.raises(TypeError, match="a loader loads a Dataset"):
        len(Loader(list(range(5)), 1))
    with pytest.raises(ValueError, match="epochs count from 0"):
        Loader(dataset, 1).set_epoch(-1)
    with pytest.raises(ValueError, match="at least 1"):
        ReadAhead(threads=0)


def test_metrics_and_a_progress_line(dataset, capsys):
    loader = Loader(dataset, 5, shuffle=True).progress()
    list(loader)
    assert loader.metrics.samples == 115
    assert loader.metrics.batches == 23
    assert loader.metrics.seconds > 0
    assert "epoch 0, step 23/23: 115 samples" in capsys.readouterr().err


def test_a_pass_goes_on_in_a_forked_child(dataset):
    loader = Loader(dataset, 5, shuffle=True)
    running = iter(loader)
    next(running)
    order = one_by_one(dataset, shuffle=True)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, json.dumps(next(running)["__index__"].tolist()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(ours, 1000)) == order[5:10]
    assert next(running)["__index__"].tolist() == order[5:10]
    os.close(ours)
    os.close(theirs)


def test_records_are_loaded_like_samples_of_tars(tmp_path):
    from shardset import TFRecordWriter, encode_example

    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        for number in range(30):
            writer.write(encode_example({"label": number, "vector": [number, 2.5], "text": b"t%d" % number}))
    dataset = shardset.discover_dataset(tmp_path)
    batches = list(Loader(dataset, 10, shuffle=True, fields=["label", "vector"], decode=True))
    assert sorted(indices(batches)) == list(range(30))
    for batch in batches:
        assert batch["label"].shape == (10, 1)
        assert batch["label"][:, 0].tolist() == batch["__index__"].tolist()
        assert batch["vector"].shape == (10, 2)
    with pytest.raises(MissingFieldError, match="'nothing'"):
        next(iter(Loader(dataset, 10, fields=["nothing"])))
    (batch,) = Loader(dataset, 30, fields={"words": "words;text"})
    assert batch["words"] == [[b"t%d" % number] for number in range(30)]


def test_ranks_of_more_than_sixteen_share_sequential_steps(dataset):
    world = 23
    batches = [list(Loader(dataset, 1, rank=rank, world_size=world)) for rank in range(world)]
    assert sorted(index for each in batches for index in indices(each)) == list(range(115))
    assert [batches[rank][0]["__index__"][0] for rank in range(world)] == list(range(world))


def test_a_default_decode_may_be_given_as_a_value(numbers):
    (batch,) = Loader(numbers, 40, decode=Decode(fields={"cls": float}))
    assert batch["cls"].dtype == np.float64


def test_random_histories_of_kills(dataset):
    """States are taken at random moments, and whatever ran on after them is as if it had not been."""
    chance = random.Random(5)
    order = one_by_one(dataset, shuffle=SMALL_WINDOWS, seed=6)
    trained, state = [], None
    while len(trained) < 110:
        loader = Loader(dataset, chance.choice([1, 2, 3]), shuffle=SMALL_WINDOWS, seed=6)
        if state is not None:
            loader.load_state_dict(state)
        kept = list(trained)
        for batch in itertools.islice(loader, chance.randrange(1, 12)):
            kept += batch["__index__"].tolist()
            if chance.random() < 0.4:
                state, trained = loader.state_dict(), list(kept)
    assert trained == order[: len(trained)]


@pytest.fixture
def ten_million(tmp_path):
    """A dataset of 10,000,000 samples: the same shard, and the same file of the catalog, a thousand times."""
    write_shard(tmp_path / "data" / "a.tar", [(f"{number:06d}.txt", b"%d" % number) for number in range(10_000)])
    shardset.index_dataset(tmp_path / "data")
    folder = tmp_path / "data" / ".shardset"
    manifest = folder / "catalog.json"
    content = json.loads(manifest.read_bytes())
    content["groups"] *= 1000
    manifest.write_text(json.dumps(content))
    return Dataset(None, LocalStore(), catalog=open_catalog(folder))


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, "full", False], ids=["windows", "full", "no"])
def test_going_on_takes_less_than_a_tenth_of_a_second_anywhere_in_ten_million_samples(ten_million, shuffle):
    loader = Loader(ten_million, 64, shuffle=shuffle, rank=3, world_size=8)
    assert len(loader) == 10_000_000 // 512
    state = loader.state_dict()
    fingerprint(ten_million)
    for at in (0, 0.1, 0.5, 0.9):
        times = []
        while len(times) < 10 and min(times, default=1) >= 0.1:  # the machine may be busy with something else
            fresh = Loader(ten_million, 64, shuffle=shuffle, rank=3, world_size=8)
            started = time.process_time()
            fresh.load_state_dict({**state, "position": int(at * 10_000_000)})
            batch = next(iter(fresh))
            times.append(time.process_time() - started)
        assert len(batch["txt"]) == 64
        assert min(times) < 0.1


def test_payloads_may_be_views(dataset):
    for mapped in (False, True):
        loader = Loader(dataset, 5, fields=["txt"]).views()
        loader = loader.map(lambda sample: sample) if mapped else loader
        for batch in loader:
            assert {type(payload) for payload in batch["txt"]} == {memoryview}
            assert [bytes(payload) for payload in batch["txt"]] == [
                dataset[index]["txt"] for index in batch["__index__"]
            ]


def test_an_iteration_ends_when_another_one_begins_or_the_place_is_changed(dataset):
    loader = Loader(dataset, 10, shuffle=True)
    changes = [
        lambda: iter(loader),
        lambda: loader.set_epoch(loader.epoch + 1),
        lambda: loader.load_state_dict(loader.state_dict()),
    ]
    for change in changes:
        running = iter(loader)
        next(running)
        change()
        place = loader.epoch, loader.position
        with pytest.raises(RuntimeError, match="this iteration is over"):
            next(running)
        assert (loader.epoch, loader.position) == place
    loader.set_epoch(5)
    with pytest.raises(RuntimeError, match="this iteration is over"):
        list(zip(loader, loader, strict=True))


def test_a_position_behind_the_epoch_is_refused(dataset):
    loader = Loader(dataset, 10)
    with pytest.raises(StateError, match="position 116 of an epoch of 115"):
        loader.load_state_dict({**loader.state_dict(), "position": 116})


def test_an_empty_selection_is_told(dataset):
    import pyarrow.compute as pc

    empty = dataset.select(pc.field("sample_index") < 0)
    with pytest.raises(shardset.NoSamplesError, match="there are no samples"):
        next(iter(Loader(empty, 1)))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"dataset": "train/"}, TypeError, "did you mean discover_dataset"),
        ({"batch_size": "4"}, TypeError, "batch_size='4'"),
        ({"seed": None}, TypeError, "seed=None"),
        ({"decode": "pil"}, TypeError, "decode='pil'"),
        ({"decode": {"jpg": "image"}}, TypeError, "Decode\\(fields="),
        ({"policy": "skip"}, TypeError, "it is a Policy"),
        ({"read_ahead": 4}, TypeError, "it is a ReadAhead"),
    ],
    ids=["dataset", "batch_size", "seed", "decode", "decode-dict", "policy", "read_ahead"],
)
def test_what_is_given_in_place_of_something_else_is_told_by_name(dataset, given, error, said):
    with pytest.raises(error, match=said):
        Loader(**{"dataset": dataset, "batch_size": 1, **given})


def test_mistyped_names_are_told_before_the_first_batch(dataset):
    with pytest.raises(ValueError, match=r"no sample has a field 'jgp' .did you mean 'jpg'"):
        next(iter(Loader(dataset, 1, fields=["jgp"])))
    with pytest.raises(ValueError, match=r"Decode names a field 'jgp', which no sample has .did you mean 'jpg'"):
        next(iter(Loader(dataset, 1, decode=Decode(fields={"jgp": "image"}))))
    assert next(iter(Loader(dataset, 2, fields=["cls"], policy=Policy(defaults={"cls": 0}))))["cls"].tolist() == [0, 0]


def test_words_of_others_are_told_what_they_are_here(dataset):
    loader = Loader(dataset, 1, shuffle=True, seed=3, rank=0, world_size=2)
    with pytest.raises(AttributeError, match=r"no 'shuffle': here it is Loader\(shuffle=True\)"):
        loader.shuffle(1000)
    with pytest.raises(AttributeError, match=r"a Loader has no 'nothing'$"):
        _ = loader.nothing
    assert "batch_size=1, shuffle=True, seed=3, rank=0, world_size=2) at epoch 0, position 0" in repr(loader)


@pytest.mark.parametrize("function", [lambda sample: sample, None, 5], ids=["lambda", "None", "5"])
def test_functions_that_processes_cannot_have_are_refused_at_once(dataset, function):
    with pytest.raises(TypeError, match=r"cannot go to another process|is no function"):
        Loader(dataset, 1).map(function, processes=2)


@pytest.mark.parametrize("default", [b"-1", -1], ids=["payload", "value"])
def test_a_default_is_the_same_for_a_missing_field_and_for_one_that_cannot_be_decoded(tmp_path, default):
    write_shard(tmp_path / "a.tar", [("a.cls", b"5"), ("b.cls", b"x"), ("c.txt", b"no class"), ("d.cls", b"7")])
    dataset = shardset.discover_dataset(tmp_path)
    loader = Loader(dataset, 4, fields=["cls"], decode=True, policy=Policy(defaults={"cls": default}))
    (batch,) = loader
    assert batch["cls"].tolist() == [5, -1, -1, 7]
    assert loader.report.counts == {"decode_failed": 1, "missing_field": 1}


def test_what_a_sample_is_does_not_depend_on_those_beside_it(tmp_path):
    members = []
    for number in range(12):
        members += [(f"{number:02d}.txt", b"%d" % number)] + (
            [(f"{number:02d}.cls", b"%d" % number)] if number % 4 else []
        )
    write_shard(tmp_path / "a.tar", members)
    dataset = shardset.discover_dataset(tmp_path)
    for batch_size, world_size in ((4, 1), (2, 2), (1, 4), (1, 1)):
        for decode in (None, True):
            for rank in range(world_size):
                for batch in Loader(dataset, batch_size, decode=decode, rank=rank, world_size=world_size):
                    for index, label, text in zip(batch["__index__"].tolist(), batch["cls"], batch["txt"], strict=True):
                        want = None if index % 4 == 0 else index if decode else b"%d" % index
                        assert label == want
                        assert text == (str(index) if decode else b"%d" % index)


def test_ranks_whose_share_lies_behind_the_epoch_flag_it(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{number}.txt", b"") for number in range(5)])
    dataset = shardset.discover_dataset(tmp_path)
    for rank in range(4):
        batch = list(Loader(dataset, 1, tail="wrap", rank=rank, world_size=4))[1]
        assert batch.get("__repeated__", np.array([False])).tolist() == [rank > 0]


def test_an_empty_share_has_the_fields_that_were_named(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{number}.cls", b"1") for number in range(5)])
    dataset = shardset.discover_dataset(tmp_path)
    batches = [
        list(Loader(dataset, 1, fields=["cls"], decode=True, tail="exact", rank=r, world_size=4))[1] for r in range(4)
    ]
    assert sorted(len(batch["cls"]) for batch in batches) == [0, 0, 0, 1]


def add_one(sample):
    sample["npy"] += 1
    return sample


def test_a_default_is_nobodys_to_change(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{number}.txt", b"") for number in range(6)])
    dataset = shardset.discover_dataset(tmp_path)
    default = np.zeros(2)
    loader = Loader(dataset, 3, fields=["npy"], decode=True, policy=Policy(defaults={"npy": default})).map(add_one)
    assert [batch["npy"].tolist() for batch in loader] == [[[1, 1]] * 3] * 2
    assert default.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["image", "png"])
@pytest.mark.parametrize("default", [None, b"raw"])
def test_defaults_go_by_the_name_in_the_batch_and_by_the_field(tmp_path, name, default):
    write_shard(tmp_path / "a.tar", [("a.png", b"damaged"), ("b.txt", b"")])
    dataset = shardset.discover_dataset(tmp_path)
    for decode in (None, True):
        loader = Loader(dataset, 2, fields={"image": "png"}, decode=decode, policy=Policy(defaults={name: default}))
        (batch,) = loader
        assert batch["image"] == ([b"damaged", default] if decode is None else [default, default])
        failed = {"decode_failed": 1} if decode else {}
        assert loader.report.counts == {**failed, "missing_field": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [Policy(defaults={"cls": -1}), Policy("skip", defaults={"cls": b"-1"}), Policy("skip")],
    ids=["value", "payload", "skip"],
)
def test_processes_and_threads_give_the_same(damaged, policy):
    loader = Loader(damaged, 4, shuffle=True, decode=True, policy=policy)
    threads, processes = (loader.map(double, processes=count) for count in (0, 2))
    ours = [(batch["__index__"].tolist(), batch["value"].tolist()) for batch in threads]
    assert [(batch["__index__"].tolist(), batch["value"].tolist()) for batch in processes] == ours
    assert processes.report.counts == threads.report.counts


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_odd(_):
    raise OddError(1, 2)


@pytest.mark.slow
def test_an_error_that_does_not_pickle_is_told_by_what_it_says(numbers):
    with pytest.raises(RuntimeError, match="OddError: 1 and 2") as caught:
        list(Loader(numbers, 8, decode=True).map(raise_odd, processes=1))
    assert any("called with sample '0'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("how", ["name", "field"])
def test_a_field_may_be_opened_as_a_file_by_either_name(tmp_path, how):
    write_shard(tmp_path / "a.tar", [("a.mp4", b"film"), ("b.mp4", b"other")])
    dataset = shardset.discover_dataset(tmp_path)
    decode = Decode(fields={"film" if how == "name" else "mp4": "file"})
    (batch,) = Loader(dataset, 2, fields={"film": "mp4"}, decode=decode)
    assert [file.read() for file in batch["film"]] == [b"film", b"other"]


@pytest.mark.parametrize(
    "broken",
    [
        {"select": True},
        {"select": []},
        {"select": ["", ""]},
        {"order": [["windowed", 2**62, 2**62, 1]]},
        {"order": [["windowed", True, 1, 1]]},
        {"epoch": 10**30},
        {"seed": 10**30},
        {"position": 10**30},
    ],
    ids=str,
)
def test_states_with_impossible_values_are_refused(dataset, broken):
    loader = Loader(dataset, 5, shuffle=True)
    with pytest.raises(StateError):
        loader.load_state_dict({**loader.state_dict(), **broken})
    with pytest.raises(ValueError, match="is none of a Loader"):
        loader.state_dict({"__epoch__": 0, "__position__": -4})


def add_one_to_array(sample):
    sample["npy"] += 1
    return {"npy": sample["npy"], "cls": sample["cls"]}


@pytest.mark.slow
def test_defaults_in_processes_are_counted_and_kept_apart_as_in_threads(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{number}.cls", b"%d" % number) for number in range(6)] + [("6.txt", b"")])
    dataset = shardset.discover_dataset(tmp_path)
    policy = Policy(defaults={"npy": np.zeros(2), "cls": -1})
    found = []
    for processes in (0, 1):
        loader = Loader(dataset, 7, fields=["cls", "npy"], decode=True, policy=policy)
        loader = loader.map(add_one_to_array, processes=processes)
        (batch,) = loader
        found.append((batch["cls"].tolist(), batch["npy"].tolist(), loader.report.counts))
    assert found[0] == ([0, 1, 2, 3, 4, 5, -1], [[1, 1]] * 7, {"missing_field": 8})
    assert found[1] == found[0]
