"""The loader over buckets, packs and mixtures."""

from __future__ import annotations

import io
import json

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import shardset
from shards import private_cache, write_dataset, write_shard
from shardset.dataset.views import Buckets, Pack
from shardset.decoding.options import Decode
from shardset.errors import StateError
from shardset.loading.loader import Loader
from shardset.loading.mixing import mix
from shardset.policy import Policy

__all__ = ["private_cache"]

SHAPES = [(64, 64), (96, 64), (64, 96), (128, 64)]


def picture(width, height, number, orientation=1):
    image = PIL.Image.new("RGB", (width, height), (number % 256, 100, 50))
    exif = PIL.Image.Exif()
    exif[274] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for shard in range(3):
        members = []
        for number in range(shard * 40, shard * 40 + 40):
            width, height = SHAPES[number % 4]
            turned = number % 8 == 2  # stored lying, shown standing
            stored = picture(height, width, number, 6) if turned else picture(width, height, number)
            members += [(f"{number:03d}.jpg", stored), (f"{number:03d}.cls", str(number).encode())]
        write_shard(folder / f"{shard}.tar", members)
    shardset.index_dataset(folder, geometry=True)
    return shardset.discover_dataset(folder)


def steps_of(source, batch_size, world_size, **settings):
    ranks = [
        list(Loader(source, batch_size, rank=rank, world_size=world_size, **settings)) for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    return list(zip(*ranks, strict=True))


def samples_of(step):
    return sorted(index for batch in step for index in batch["__index__"].tolist())


@pytest.mark.parametrize("leftovers", ["drop", "pad", "merge"])
def test_each_step_is_of_one_bucket_on_all_ranks_and_the_same_whatever_they_are(pictures, leftovers):
    source = pictures.bucketed(Buckets(unit=8, leftovers=leftovers))
    settings = {"shuffle": True, "seed": 2, "decode": True}
    alone = steps_of(source, 8, 1, **settings)
    shared = steps_of(source, 2, 4, **settings)
    assert [samples_of(step) for step in shared] == [samples_of(step) for step in alone]
    halves = steps_of(source, 2, 2, **settings)
    assert [samples_of(first + second) for first, second in zip(halves[::2], halves[1::2], strict=True)] == [
        samples_of(step) for step in alone
    ]
    for step in shared:
        assert len({batch["jpg"].shape for batch in step}) == 1
        for batch in step:
            if leftovers != "merge":
                height, width = batch["jpg"].shape[1:3]
                assert {SHAPES[index % 4] for index in batch["__index__"]} == {(width, height)}
            assert batch["cls"].tolist() == batch["__index__"].tolist()
    seen = [index for step in alone for index in samples_of(step)]
    if leftovers == "pad":
        repeated = sum(int(batch["__repeated__"].sum()) for (batch,) in alone if "__repeated__" in batch)
        assert len(seen) - repeated == 120
        assert set(seen) == set(range(120))
    else:
        assert len(seen) == len(set(seen)) >= 112 if leftovers == "merge" else len(seen) == 4 * 24


def test_pictures_of_a_bucket_are_brought_to_its_size(pictures):
    loader = Loader(pictures.bucketed(Buckets(area=48 * 48, multiple=16, unit=4)), 4, shuffle=True, decode=True)
    shapes = {batch["jpg"].shape[1:3] for batch in loader}
    assert shapes == {(bucket.height, bucket.width) for bucket in loader.buckets}
    assert all(height % 16 == width % 16 == 0 for height, width in shapes)
    assert shapes == {(48, 48), (64, 32), (32, 64)}
    assert sum(bucket.samples for bucket in loader.buckets) == 120
    with pytest.raises(ValueError, match="orient=False"):
        Loader(loader.dataset, 4, decode=Decode(orient=False))


def test_what_does_not_go_with_buckets_is_told(pictures, tmp_path):
    source = pictures.bucketed(Buckets(unit=8))
    with pytest.raises(ValueError, match="the size of their bucket"):
        Loader(source, 8, decode=Decode(size=64))
    with pytest.raises(ValueError, match='leftovers="pad"'):
        Loader(source, 8, tail="exact")
    with pytest.raises(shardset.NoSamplesError, match="no bucket has a unit of 512"):
        next(iter(Loader(pictures.bucketed(Buckets(unit=512)), 8)))
    write_shard(tmp_path / "a.tar", [("a.txt", b"no picture")])
    shardset.index_dataset(tmp_path, geometry=True)
    unknown = shardset.discover_dataset(tmp_path).bucketed(Buckets(unit=1))
    with pytest.raises(shardset.NoSamplesError, match="no bucket has a unit of 1 of the 1 samples"):
        next(iter(Loader(unknown, 1)))


def test_leftovers_are_counted(pictures):
    loader = Loader(pictures.bucketed(Buckets(unit=16)), 16, shuffle=True)
    assert len(list(loader)) == 4
    assert loader.report.counts == {"bucket_leftover_dropped": 56}


def test_buckets_go_on_where_they_stood(pictures):
    source = pictures.bucketed(Buckets(unit=8))
    loader = Loader(source, 4, shuffle=True)
    running = iter(loader)
    for _ in range(5):
        next(running)
    state, rest = loader.state_dict(), [batch["__index__"].tolist() for batch in running]
    assert len(json.dumps(state)) <= 512
    two = [Loader(source, 2, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    for each in two:
        each.load_state_dict(state)
    assert [samples_of(step) for step in zip(*two, strict=True)] == [sorted(batch) for batch in rest]
    with pytest.raises(ValueError, match="no divisor of the 8"):
        len(Loader(source, 3))
    with pytest.raises(StateError, match="8"):
        Loader(pictures.bucketed(Buckets(unit=16)), 4, shuffle=True).load_state_dict(state)


def test_substitutes_are_of_the_same_bucket(tmp_path):
    members = []
    for number in range(40):
        width, height = SHAPES[number % 2]
        raw = picture(width, height, number)
        members.append((f"{number:02d}.jpg", raw[:-200] + b"\0" * 200 if number == 7 else raw))
        if number == 7:
            members[-1] = ("07.jpg", raw[: len(raw) // 2])
    write_shard(tmp_path / "a.tar", members)
    shardset.index_dataset(tmp_path, geometry=True)
    dataset = shardset.discover_dataset(tmp_path)
    loader = Loader(dataset.bucketed(Buckets(unit=4)), 4, decode=True, policy=Policy("skip"))
    batches = list(loader)
    assert len(batches) == 10
    assert all(len({index % 2 for index in batch["__index__"].tolist()}) == 1 for batch in batches)
    assert loader.report.counts["substituted"] == 1


@pytest.fixture
def texts(tmp_path):
    chance = np.random.default_rng(1)
    lengths = chance.integers(1, 60, 200)
    members = []
    for number, length in enumerate(lengths.tolist()):
        buffer = io.BytesIO()
        np.save(buffer, np.full(length, number, np.int32))
        members += [(f"{number:03d}.npy", buffer.getvalue()), (f"{number:03d}.txt", b"t%d" % number)]
    write_shard(tmp_path / "texts" / "a.tar", members)
    table = pa.table({"key": [f"{number:03d}" for number in range(200)], "tokens": lengths})
    return shardset.discover_dataset(tmp_path / "texts").select(columns=table), lengths


def test_packs_are_full_and_have_each_sample_once(texts):
    view, lengths = texts
    loader = Loader(view.packed(Pack(length="tokens", size=128, window=64)), 5, shuffle=True, decode=True, tail="exact")
    seen = []
    for batch in loader:
        assert batch["npy"].shape == (len(batch["__key__"]), 128)
        for row, spans, keys, texts_of, of_pack in zip(
            batch["npy"], batch["npy__lengths"], batch["__key__"], batch["txt"], batch["__index__"], strict=True
        ):
            numbers = of_pack.tolist()
            seen += numbers
            assert spans.tolist() == [lengths[number] for number in numbers]
            assert row[: spans.sum()].tolist() == [number for number in numbers for _ in range(lengths[number])]
            assert not row[spans.sum() :].any() or 0 in numbers
            assert keys == [f"{number:03d}" for number in numbers]
            assert texts_of == [f"t{number}" for number in numbers]
    assert sorted(seen) == list(range(200))
    expected = len(loader)
    assert len(list(loader)) == expected


def test_a_length_that_is_not_that_of_the_array_is_told(texts):
    view, lengths = texts
    table = pa.table({"key": [f"{number:03d}" for number in range(200)], "n": [*lengths[:-1].tolist(), 3]})
    assert lengths[-1] != 3
    wrong = view.dataset.select(columns=table).packed(Pack(length="n", size=128))
    with pytest.raises(
        shardset.SampleError, match=rf"sample '199' has {lengths[-1]} elements in 'npy', and its 'n' is 3"
    ):
        list(Loader(wrong, 5, decode=True, tail="exact"))


def test_packs_go_on_where_they_stood_on_other_ranks(texts):
    source = texts[0].packed(Pack(length="tokens", size=128, window=64))
    loader = Loader(source, 4, shuffle=True, seed=5)
    running = iter(loader)
    for _ in range(4):
        next(running)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [sorted(key for pack in batch["__key__"] for key in pack) for batch in running]
    two = [Loader(source, 2, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    for each in two:
        each.load_state_dict(state)
    again = [
        sorted(key for batch in step for pack in batch["__key__"] for key in pack) for step in zip(*two, strict=True)
    ]
    assert again == rest
    assert len(rest) > 3


def test_a_sample_that_fails_is_left_out_of_its_pack(tmp_path):
    members = [(f"{number:02d}.cls", b"x" if number == 3 else str(number).encode()) for number in range(20)]
    write_shard(tmp_path / "a.tar", members)
    table = pa.table({"key": [f"{number:02d}" for number in range(20)], "n": [4] * 20})
    view = shardset.discover_dataset(tmp_path).select(columns=table)
    loader = Loader(view.packed(Pack(length="n", size=8)), 5, decode=True, policy=Policy("skip"))
    packs = [pack for batch in loader for pack in batch["cls"]]
    assert sorted(value for pack in packs for value in pack) == [number for number in range(20) if number != 3]
    assert len(packs) == 10
    assert loader.report.counts == {"decode_failed": 1}


@pytest.fixture
def three(tmp_path):
    sizes = {"a": 30, "b": 11, "c": 70}
    for name, size in sizes.items():
        write_dataset(tmp_path / name, shards=1, samples=size)
    return {name: shardset.discover_dataset(tmp_path / name) for name in sizes}


def test_a_mixture_has_exact_shares_and_each_dataset_its_own_epochs(three):
    mixture = mix(three, weights={"a": 1, "b": 2, "c": 1}, epoch_size=400)
    loader = Loader(mixture, 10, shuffle=True, seed=3)
    batches = list(loader)
    taken = [pair for batch in batches for pair in zip(batch["__source__"], batch["__index__"].tolist(), strict=True)]
    own = {name: [index for source, index in taken if source == name] for name in three}
    assert abs(len(own["b"]) - 200) <= 2
    assert abs(len(own["a"]) - 100) <= 2
    for name, dataset in three.items():
        size = len(dataset)
        for start in range(0, len(own[name]) // size * size, size):
            assert sorted(own[name][start : start + size]) == list(range(size))
    for batch in batches:
        for source, index, text in zip(batch["__source__"], batch["__index__"], batch["txt"], strict=True):
            assert text == three[source][int(index)]["txt"]


def test_mixtures_resume_with_their_changes_of_weights(three):
    mixture = mix(three, weights={"a": 1, "b": 1, "c": 1}, epoch_size=300)

    def stream(loader, steps):
        running = iter(loader)
        found = []
        for step in range(steps):
            if step == 5:
                loader.set_weights({"a": 8, "b": 1, "c": 1})
            batch = next(running)
            found.append(sorted(zip(batch["__source__"], batch["__index__"].tolist(), strict=True)))
        return found, running

    loader = Loader(mixture, 10, shuffle=True)
    before, running = stream(loader, 12)
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) <= 512 + 32
    after = [sorted(zip(batch["__source__"], batch["__index__"].tolist(), strict=True)) for batch in running]
    second = [sorted(zip(batch["__source__"], batch["__index__"].tolist(), strict=True)) for batch in loader]
    assert sum(source == "a" for batch in before[5:] for source, _ in batch) > 50
    assert sum(source == "a" for batch in second for source, _ in batch) == pytest.approx(240, abs=4)
    two = [Loader(mixture, 5, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    for each in two:
        each.load_state_dict(state)
    for want in (after, second):
        steps = list(zip(*two, strict=True))
        got = [
            sorted(
                pair for batch in step for pair in zip(batch["__source__"], batch["__index__"].tolist(), strict=True)
            )
            for step in steps
        ]
        assert got == want
    assert [sorted((each.source, each.index) for each in two[0].trace(step, epoch=0)) for step in range(12)] == before
    with pytest.raises(TypeError, match="weights are for mixtures"):
        Loader(three["a"], 1).set_weights({"a": 1})


def test_a_dataset_added_to_a_mixture_changes_nothing_of_the_others(three):
    def own(names, name):
        mixture = mix({each: three[each] for each in names}, epoch_size=300)
        batches = Loader(mixture, 10, shuffle=True)
        return [
            index
            for batch in batches
            for source, index in zip(batch["__source__"], batch["__index__"].tolist(), strict=True)
            if source == name
        ]

    alone, among = own(["a"], "a"), own(["a", "b", "c"], "a")
    assert among == alone[: len(among)]


def keep(sample):
    return {"text": sample["txt"], "twice": sample["n"] * 2}


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_columns_come_with_the_fields(three, processes):
    views = {
        name: dataset.select(
            columns=pa.table({"key": [s.key for s in dataset], "n": range(len(dataset)), "s": [name] * len(dataset)})
        )
        for name, dataset in three.items()
    }
    loader = Loader(views["a"], 5, shuffle=True, fields=["txt"]).columns("n", "bytes", "s")
    for batch in loader:
        assert batch["n"].tolist() == batch["__index__"].tolist()
        assert batch["s"] == ["a"] * 5
        assert batch["bytes"].min() > 0
    for batch in loader.map(keep, processes=processes):
        assert batch["twice"].tolist() == (batch["__index__"] * 2).tolist()
    some = views["a"].select(pc.field("n") >= 20)
    assert sorted(int(n) for batch in Loader(some, 2, shuffle=True).columns("n") for n in batch["n"]) == list(
        range(20, 30)
    )
    (batch,) = Loader(mix(views, epoch_size=20), 20, fields=["txt"]).columns("n", "s")
    assert batch["s"] == batch["__source__"]
    assert batch["n"].tolist() == batch["__index__"].tolist()
    with pytest.raises(ValueError, match="no column 'nothing'"):
        next(iter(loader.columns("nothing")))
    fields = Loader(views["a"], 1, fields={"n": "txt"}).columns("n")
    with pytest.raises(ValueError, match="which is a column too"):
        next(iter(fields))


def test_the_sizes_of_pictures_before_they_are_resized_are_columns(pictures):
    source = pictures.bucketed(Buckets(area=48 * 48, multiple=16, unit=4))
    for batch in Loader(source, 4, fields=["jpg"], decode=True).columns("width", "height"):
        shapes = [SHAPES[index % 4] for index in batch["__index__"].tolist()]
        assert list(zip(batch["width"].tolist(), batch["height"].tolist(), strict=True)) == shapes


def test_the_unit_of_a_state_holds_in_later_epochs(pictures):
    source = pictures.bucketed(Buckets())
    loader = Loader(source, 8, shuffle=True)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    rest = [samples_of([batch]) for batch in running] + [samples_of([batch]) for batch in loader]
    halves = Loader(source, 4, shuffle=True)
    halves.load_state_dict(state)
    steps = [[batch] for _ in range(2) for batch in halves]
    assert [samples_of(one + two) for one, two in zip(steps[::2], steps[1::2], strict=True)] == rest


def test_a_state_of_other_sizes_is_refused(tmp_path):
    def write(sizes):
        members = [(f"{number:02d}.jpg", picture(*size, 0).ljust(2000, b"\0")) for number, size in enumerate(sizes)]
        write_shard(tmp_path / "a.tar", members)
        shardset.index_dataset(tmp_path, geometry=True)
        return Loader(shardset.discover_dataset(tmp_path).bucketed(Buckets(unit=2)), 2, shuffle=True)

    state = write([(64, 32)] * 6 + [(32, 64)] * 6).state_dict()
    other = write([(32, 64)] * 6 + [(64, 32)] * 6)
    with pytest.raises(StateError, match="images have other sizes than then"):
        other.load_state_dict(state)


def test_one_damaged_picture_alone_in_its_bucket_is_replaced(tmp_path):
    members = [(f"{number:02d}.jpg", picture(64, 64, number)) for number in range(9)]
    write_shard(tmp_path / "a.tar", [*members, ("09.jpg", picture(96, 64, 9)[:300])])
    shardset.index_dataset(tmp_path, geometry=True)
    dataset = shardset.discover_dataset(tmp_path)
    loader = Loader(dataset.bucketed(Buckets(unit=1, leftovers="pad")), 1, decode=True, policy=Policy("skip"))
    shapes = [batch["jpg"].shape for batch in loader]
    assert sorted(shapes) == [(1, 64, 64, 3)] * 9 + [(1, 64, 96, 3)]
    assert loader.report.counts["substituted"] == 1


def test_packs_of_ranks_that_have_none_at_the_last_step(texts):
    source = texts[0].packed(Pack(length="tokens", size=128, window=64))
    ranks = [list(Loader(source, 4, decode=True, tail="exact", rank=rank, world_size=4)) for rank in range(4)]
    assert len({len(batches) for batches in ranks}) == 1
    keys = [key for batches in ranks for batch in batches for pack in batch["__key__"] for key in pack]
    assert sorted(keys) == [f"{number:03d}" for number in range(200)]
    ranks = [list(Loader(source, 1, tail="exact", rank=rank, world_size=60)) for rank in range(60)]
    assert {len(batches[-1]["__key__"]) for batches in ranks} == {0, 1}
