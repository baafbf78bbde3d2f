from __future__ import annotations

import json
from collections import Counter

import pytest

from shards import private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.errors import StateError, TransferError
from shardset.loading.bucket_loader import BucketDataLoader
from shardset.loading.bucket_order import STRATEGIES
from shardset.loading.cursor import TarDataLoader
from shardset.policy import Policy

SIZES = ((64, 64), (128, 64), (64, 128))


def write(folder, *, shards=5, files=4):
    """Write shards whose indexes say that their files are images of three shapes; each has a sidecar too."""
    number = 0
    for shard in range(shards):
        members = []
        for _ in range(files + shard % 2):
            members += [(f"{number:03d}.jpg", b"%d" % number + b"x" * (number % 5)), (f"{number:03d}.txt", b"t")]
            number += 1
        path = write_shard(folder / f"s-{shard}.tar", members)
        found = TarDataLoader(path).get_metadata(0)
        for name, entry in found.items():
            if name.endswith(".jpg"):
                width, height = SIZES[int(name[:3]) % 3]
                entry |= {"width": width, "height": height}
        document = {"filesize": path.stat().st_size, "files": found}
        path.with_suffix(".json").write_text(json.dumps(document))
    return [f"{each:03d}.jpg" for each in range(number)]


@pytest.fixture
def names(tmp_path):
    return write(tmp_path)


@pytest.fixture
def folder(tmp_path, names):  # noqa: ARG001 - that fills it
    return tmp_path


def paths(entries):
    return [entry.path for entry in entries]


def test_buckets_come_sorted_and_their_files_shard_by_shard(folder, names):
    loader = BucketDataLoader(folder)
    wanted = [name for shape in (2, 0, 1) for name in names if int(name[:3]) % 3 == shape]
    entries = list(loader)
    assert paths(entries) == wanted  # "0.50", "1.00", "2.00"
    members = {entry.path: entry for entry in TarDataLoader(folder)}
    for entry in entries:
        assert entry.data == members[entry.path].data
        assert (entry.shard_index, entry.file_index) == (
            members[entry.path].shard_index,
            members[entry.path].file_index,
        )
        assert entry.json_data is None
        assert entry.job_id.startswith("file_")
    assert next(loader, None) is None
    loader.reset()
    assert paths(loader) == wanted


def test_the_ids_of_files_are_webshart_s(tmp_path):
    write(tmp_path, shards=1)
    assert (
        next(BucketDataLoader(tmp_path)).job_id
        == f"file_{sum(31 ** (6 - at) * ord(c) for at, c in enumerate('002.jpg')) % 2**32:08x}"
    )


def test_some_shards_at_a_time_are_given_whole_before_the_next(folder, names):
    loader = BucketDataLoader(folder, shard_batch_size=2, load_file_data=False)
    assert loader.get_bucket_stats()["shards_processed"] == 2
    entries = list(loader)
    assert sorted(paths(entries)) == names
    assert [entry.shard_index // 2 for entry in entries] == sorted(entry.shard_index // 2 for entry in entries)
    assert all(entry.data == b"" and entry.size for entry in entries)
    stats = loader.get_bucket_stats()
    assert stats["bucket_details"] == {
        key: sum(int(name[:3]) % 3 == shape for name in names) for key, shape in (("0.50", 2), ("1.00", 0), ("2.00", 1))
    }
    assert (stats["shards_processed"], stats["total_shards"], stats["total_files_loaded"]) == (5, 5, len(names))
    assert (stats["num_buckets"], stats["lazy_load"], stats["sampling_strategy"]) == (3, True, "Sequential")
    loader.reset()
    list(loader)
    assert loader.get_bucket_stats() == stats  # nothing is counted twice


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_left_of_a_bucket_can_be_left_out_of_batches(folder, names, strategy):
    loader = BucketDataLoader(folder, sampling_strategy=strategy, batch_size=3, drop_last=True, seed=4)
    batches = list(loader.iter_batches())
    assert loader.drop_last
    assert {len(batch) for batch in batches} == {3}
    shapes = Counter(int(name[:3]) % 3 for name in names)
    assert len(batches) == sum(count // 3 for count in shapes.values())
    loader.reset()
    assert sorted(paths(loader)) == names


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reset_begins_the_next_epoch_and_an_epoch_can_be_chosen(folder, strategy):
    loader = BucketDataLoader(folder, sampling_strategy=strategy, seed=1)
    loader.reset()
    assert loader.epoch == 0  # nothing was given yet
    passes = []
    for _ in range(3):
        passes.append(paths(loader))
        loader.reset()
    assert loader.epoch == (0 if strategy == "sequential" else 3)
    assert len({tuple(each) for each in passes}) == (1 if strategy == "sequential" else 3)
    loader.epoch = 1
    assert paths(loader) == passes[1]
    assert loader.seed == 1


def test_a_bucket_can_be_gone_to(folder, names):
    loader = BucketDataLoader(folder)
    assert loader.get_current_bucket() == "0.50"
    loader.skip_to_bucket("2.00")
    assert loader.get_current_bucket() == "2.00"
    assert paths(loader) == [name for name in names if int(name[:3]) % 3 == 1]
    assert loader.get_current_bucket() is None
    loader.reset()
    next(loader)
    before = next(loader).path
    with pytest.raises(ValueError, match=r"Bucket '9' not found: there are 0\.50, 1\.00, 2\.00"):
        loader.skip_to_bucket("9")
    assert next(loader).path != before
    assert loader.get_current_bucket() == "0.50"


def test_a_bucket_of_later_shards_is_found(folder):
    number = 200
    path = write_shard(folder / "t.tar", [(f"{number}.jpg", b"x")])
    entry = TarDataLoader(path).get_metadata(0)[f"{number}.jpg"] | {"width": 640, "height": 64}
    path.with_suffix(".json").write_text(
        json.dumps({"filesize": path.stat().st_size, "files": {f"{number}.jpg": entry}})
    )
    loader = BucketDataLoader(folder, shard_batch_size=2)
    loader.skip_to_bucket("10.00")
    assert next(loader).path == "200.jpg"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shards_at_once", [2, 10])
def test_a_state_goes_on_with_files_and_with_batches_at_every_position(folder, strategy, shards_at_once):
    def make(**more):
        settings = {"sampling_strategy": strategy, "shard_batch_size": shards_at_once, "batch_size": 2, "seed": 5}
        return BucketDataLoader(folder, load_file_data=False, **(settings | more))

    loader = make(epoch=3)
    everything = [paths(batch) for batch in loader.iter_batches()]
    loader.epoch = 3
    for done in range(len(everything) + 1):
        again = make(seed=0, batch_size=None)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [paths(batch) for batch in again.iter_batches()] == everything[done:]
        assert (again.seed, again.epoch, again.batch_size) == (5, 3, 2)
        loader.next_batch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bucket_state_version": 2}, "Unsupported state dict version: 2"),
        ({"key": "geometry-list"}, "key 'geometry-list'"),
        ({"round_to": None}, "round_to"),
        ({"sampling_strategy": "sequential"}, "sampling_strategy"),
        ({"num_shards": 4}, "4 shards"),
        ({"shard_names": "x"}, "other names"),
        ({"position": 99}, "stands at 99 of"),
        ({"files": 3}, "of 3 files"),
        ({"window": 7}, "part 7"),
        ({"window": -1}, "part -1"),
        ({"seed": "1"}, "seed is '1'"),
        ({"epoch": None}, "epoch is None"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_moves_nothing(folder, change, message):
    loader = BucketDataLoader(folder, sampling_strategy="fully_random", batch_size=2, seed=3)
    first = loader.next_batch()
    state = loader.state_dict()
    rest = [paths(batch) for batch in loader.iter_batches()]
    again = BucketDataLoader(folder, sampling_strategy="fully_random", batch_size=2, seed=3)
    assert paths(again.next_batch()) == paths(first)
    with pytest.raises(StateError, match=message):
        again.load_state_dict({**state, **change})
    assert [paths(batch) for batch in again.iter_batches()] == rest


def test_the_size_of_batches_is_part_of_a_random_order(folder):
    loader = BucketDataLoader(folder, sampling_strategy="fully_random", batch_size=2)
    loader.batch_size = 3
    loader.next_batch()
    with pytest.raises(ValueError, match="before the pass begins"):
        loader.batch_size = 2
    other = BucketDataLoader(folder, batch_size=2)
    other.next_batch()
    other.batch_size = 3
    assert len(other.next_batch()) == 3
    with pytest.raises(ValueError, match="not positive"):
        other.batch_size = 0
    other.batch_size = None
    assert len(other.next_batch()) == 1
    with pytest.raises(ValueError, match="batch_size must be set"):
        other.iter_batches()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key": "shape"}, "key must be 'aspect', 'geometry-tuple', or 'geometry-list'"),
        ({"sampling_strategy": "random"}, "sampling_strategy must be 'sequential'"),
        ({"shard_batch_size": 0}, "shard_batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"target_pixel_area": -1}, "area"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_looked_for(settings, message):
    with pytest.raises(ValueError, match=message):
        BucketDataLoader("/nowhere", **settings)


def test_files_that_are_too_large_are_left_out(folder, names):
    small = [entry.path for entry in TarDataLoader(folder) if entry.path.endswith(".jpg") and entry.size <= 3]
    assert 0 < len(small) < len(names)
    assert sorted(paths(BucketDataLoader(folder, max_file_size=3))) == small


def test_a_file_that_cannot_be_read_raises_or_is_left_out_and_counted(folder, names, monkeypatch):
    dataset = discover_dataset(folder)
    lost = {f"{number:03d}.jpg" for number in range(4, 9)}
    there = dataset.reader

    def reader(shard_index):
        if shard_index == 1:
            raise TransferError("the line was cut", url="s-1.tar")
        return there(shard_index)

    monkeypatch.setattr(dataset, "reader", reader)
    loader = BucketDataLoader(dataset, batch_size=3)
    for _ in range(2):
        with pytest.raises(TransferError):
            list(loader.iter_batches())
    state = loader.state_dict()
    monkeypatch.setattr(dataset, "reader", there)
    rest = paths(file for batch in loader.iter_batches() for file in batch)
    monkeypatch.setattr(dataset, "reader", reader)
    assert paths(BucketDataLoader(folder))[state["position"] :] == rest
    assert set(names) - set(paths(BucketDataLoader(dataset, policy=Policy("skip")))) == lost
    assert dataset.report.counts == {"read_failed": 5}
    batches = BucketDataLoader(dataset, policy=Policy("skip"), batch_size=2).iter_batches()
    assert {entry.path for batch in batches for entry in batch} == set(names) - lost
    empty = BucketDataLoader(dataset, policy=Policy("skip", defaults={"data": b""}))
    assert {entry.path for entry in empty if entry.data == b""} == lost


def test_large_files_are_read_a_few_at_a_time(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{number}.jpg", bytes(700_000)) for number in range(5)])
    found = TarDataLoader(path).get_metadata(0)
    for entry in found.values():
        entry |= {"width": 2, "height": 2}
    path.with_suffix(".json").write_text(json.dumps({"filesize": path.stat().st_size, "files": found}))
    loader = BucketDataLoader(path, chunk_size_mb=1, copy=False)
    next(loader)
    assert len(loader._chunk.files) == 1
    assert len(list(loader)) == 4
    assert type(next(BucketDataLoader(path, copy=False)).data) is memoryview


def test_a_dataset_without_images_has_no_buckets(tmp_path):
    write_shard(tmp_path / "a.tar", [("a.bin", b"x")])
    loader = BucketDataLoader(tmp_path, batch_size=2)
    assert list(loader) == []
    assert loader.next_batch() is None
    assert loader.get_current_bucket() is None
    assert loader.get_bucket_stats()["num_buckets"] == 0
    again = BucketDataLoader(tmp_path, batch_size=2)
    again.load_state_dict(loader.state_dict())
    assert list(again) == []


def test_shards_without_any_size_are_counted_and_said(tmp_path, caplog):
    write_shard(tmp_path / "a.tar", [("a.txt", b"x"), ("b.txt", b"y")])
    dataset = discover_dataset(tmp_path)
    assert list(BucketDataLoader(dataset)) == []
    assert dataset.report.counts["no_geometry"] == 1
    assert "geometry" in caplog.text
