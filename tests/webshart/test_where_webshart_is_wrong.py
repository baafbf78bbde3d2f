"""Faults of webshart 0.6.0, one a test: what happens here instead."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest

import shardset
from shards import make_members, private_cache, write_shard  # noqa: F401 - a fixture
from shardset import webshart
from shardset.errors import IndexFileError, StateError, StorageError


def picture(width, height, *, orientation=None):
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.new("RGB", (width, height))
    exif = image.getexif()
    if orientation:
        exif[274] = orientation
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


SHAPES = ((64, 64), (64, 32), (32, 64))


@pytest.fixture
def pictures(tmp_path):
    """Twelve shards of pictures of three shapes, indexed with their sizes."""
    number = 0
    for shard in range(12):
        members = []
        for _ in range(3 + shard % 3):
            members.append((f"{number:04d}.jpg", picture(*SHAPES[number * number % 3])))
            number += 1
        write_shard(tmp_path / "pictures" / f"s-{shard:02d}.tar", members)
    shardset.index_dataset(tmp_path / "pictures", geometry=True, workers=0)
    return tmp_path / "pictures", [f"{each:04d}.jpg" for each in range(number)]


@pytest.fixture
def folder(tmp_path):
    """Three shards of four samples of jpg, json and txt, indexed."""
    for shard in range(3):
        write_shard(tmp_path / "data" / f"s-{shard}.tar", make_members(4, start=4 * shard))
    shardset.index_dataset(tmp_path / "data", workers=0)
    return tmp_path / "data"


# Buckets


@pytest.mark.parametrize("strategy", ["sequential", "random_within_buckets", "fully_random"])
@pytest.mark.parametrize("shards_at_once", [1, 2, 10])
@pytest.mark.parametrize("lazy", [True, False])
def test_a_lazy_bucket_loader_gives_every_picture_once(pictures, strategy, shards_at_once, lazy):
    folder, names = pictures
    loader = webshart.BucketDataLoader(
        str(folder), sampling_strategy=strategy, lazy_load=lazy, shard_batch_size=shards_at_once
    )
    assert sorted(entry.path for entry in loader) == names


@pytest.mark.parametrize("strategy", ["sequential", "random_within_buckets", "fully_random"])
def test_no_batch_mixes_shapes_and_no_picture_is_lost_between_batches(pictures, strategy):
    folder, names = pictures
    loader = webshart.BucketDataLoader(
        str(folder), key="geometry-tuple", sampling_strategy=strategy, batch_size=4, shard_batch_size=5
    )
    batches = list(loader.iter_batches())
    assert all(len({(entry.width, entry.height) for entry in batch}) == 1 for batch in batches)
    assert sorted(entry.path for batch in batches for entry in batch) == names


def test_a_shuffle_follows_from_seed_and_epoch(pictures):
    folder, _ = pictures

    def order(seed, epoch):
        loader = webshart.BucketDataLoader(
            str(folder), sampling_strategy="fully_random", batch_size=2, seed=seed, epoch=epoch
        )
        return [entry.path for batch in loader.iter_batches() for entry in batch]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_sizes_are_those_stored_and_the_turn_is_known_beside_them(tmp_path):
    write_shard(tmp_path / "a.tar", [("a.jpg", picture(64, 32, orientation=6))])
    shardset.index_dataset(tmp_path, geometry=True, workers=0)
    dataset = webshart.discover_dataset(str(tmp_path))
    entry = webshart.TarDataLoader(dataset).load_sample(0, 0)
    assert (entry.width, entry.height, entry.aspect) == (64, 32, 2.0)
    (shard,) = webshart.TarDataLoader(dataset).list_shard_sample_aspect_buckets([0], key="geometry-tuple")
    assert list(shard["buckets"]) == ["(64, 32)"]
    assert shardset.discover_dataset(tmp_path).row(0).geometry == (64, 32, 6)


# The cursor


def test_no_token_stands_in_a_state_or_its_pickle(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_environment")
    dataset = webshart.discover_dataset(str(folder), hf_token="hf_secret")
    loader = webshart.TarDataLoader(dataset, hf_token="hf_secret")
    state = loader.state_dict()
    assert state["hf_token"] is None
    assert b"secret" not in json.dumps(state).encode() + pickle.dumps(state)
    assert state["source"] == str(folder)


def test_skipping_all_files_leads_to_the_end(folder):
    loader = webshart.TarDataLoader(str(folder))
    loader.skip(36)
    assert list(loader) == []
    with pytest.raises(IndexError):
        loader.skip(37)
    with pytest.raises(IndexError):
        loader.skip(-1)


def test_after_a_reset_ranges_are_gone_through_again_and_can_be_taken_away(folder):
    loader = webshart.TarDataLoader(str(folder))
    loader.set_ranges([(0, 3), (20, 22)])
    first = [entry.path for entry in loader]
    assert len(first) == 5
    loader.reset()
    assert [entry.path for entry in loader] == first
    loader.set_ranges(None)
    assert sum(1 for _ in loader) == 36


def test_a_range_ends_where_it_says_though_files_are_left_out(tmp_path):
    members = [(f"{number}.bin", b"x" * (1000 if number % 2 else 10)) for number in range(8)]
    write_shard(tmp_path / "a.tar", members)
    shardset.index_dataset(tmp_path, workers=0)
    loader = webshart.TarDataLoader(str(tmp_path), max_file_size=100)
    assert [entry.path for entry in loader.iter_range(0, 4)] == ["0.bin", "2.bin"]


def test_a_read_that_fails_raises_and_a_policy_skips_and_counts_it_or_gives_empty_data(folder):
    whole = (folder / "s-1.tar").read_bytes()
    names = [entry.path for entry in webshart.TarDataLoader(str(folder))]
    datasets = [webshart.discover_dataset(str(folder)) for _ in range(3)]
    for dataset in datasets:
        dataset.get_shard_info(1)
    (folder / "s-1.tar").write_bytes(whole[:3000])
    with pytest.raises((StorageError, IndexFileError)):
        list(webshart.TarDataLoader(datasets[0]))

    loader = webshart.TarDataLoader(datasets[1], policy=shardset.Policy(on_error="skip"))
    given = [entry.path for entry in loader]
    assert datasets[1].report.counts["read_failed"] == len(names) - len(given) > 0

    loader = webshart.TarDataLoader(datasets[2], policy=shardset.Policy(on_error="skip", defaults={"data": b""}))
    entries = list(loader)
    assert [entry.path for entry in entries] == names
    assert any(entry.data == b"" and entry.size for entry in entries)


def test_a_state_of_another_dataset_is_refused_with_what_differs(folder, tmp_path):
    write_shard(tmp_path / "other" / "o.tar", make_members(2))
    shardset.index_dataset(tmp_path / "other", workers=0)
    state = webshart.TarDataLoader(str(folder)).state_dict()
    with pytest.raises(StateError, match=r"3 shards.* has 1"):
        webshart.TarDataLoader(str(tmp_path / "other")).load_state_dict(state)
    with pytest.raises(StateError, match="version: 999"):
        webshart.TarDataLoader(str(folder)).load_state_dict({"version": 999})


def test_a_state_keeps_ranges_and_subfolder(tmp_path):
    for name in ("left", "right"):
        write_shard(tmp_path / name / "s.tar", make_members(3, prefix=f"{name}-"))
    shardset.index_dataset(tmp_path, workers=0)
    loader = webshart.TarDataLoader(webshart.discover_dataset(str(tmp_path), subfolder="right"))
    loader.set_ranges([(0, 2), (4, 6)])
    assert next(loader).path.startswith("right-")
    resumed = webshart.TarDataLoader.from_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = [entry.path for entry in loader]
    assert len(rest) == 3
    assert [entry.path for entry in resumed] == rest


def test_an_entry_says_which_file_and_which_sample_it_is(folder):
    loader = webshart.TarDataLoader(str(folder))
    sample = loader.load_sample(1, 2)
    assert (sample.shard_index, sample.sample_index, sample.file_index) == (1, 2, 6)
    assert (sample.key, sample.job_id) == ("00000006", "shard0001_file000002")
    loader.shard(1, cursor_idx=6)
    file = next(loader)
    assert (file.path, file.sample_index, file.file_index) == (sample.path, 2, 6)
    assert file.job_id == "shard0001_file000006"


# Discovery, indexes, errors


def test_a_dot_in_the_name_of_a_folder_is_no_end_of_a_key(tmp_path):
    write_shard(tmp_path / "a.tar", [("clip.v1/a.jpg", b"jpg"), ("clip.v1/a.json", b'{"caption": "here"}')])
    shardset.index_dataset(tmp_path, workers=0)
    dataset = webshart.discover_dataset(str(tmp_path))
    assert dataset.list_samples_in_shard(0) == ["clip.v1/a.jpg"]
    assert webshart.TarDataLoader(dataset).load_sample(0, 0).captions == "here"


def test_in_our_own_numbering_the_key_of_the_sample_decides(tmp_path):
    members = [("u.seg.png", b"png"), ("u.jpg", b"jpg"), ("u.json", b'{"caption": "one"}'), ("u.txt", b"two")]
    write_shard(tmp_path / "a.tar", members)
    dataset = shardset.discover_dataset(tmp_path)
    assert len(dataset) == 1
    assert sorted(dataset[0].fields) == ["jpg", "json", "seg.png", "txt"]
    assert dataset.list_samples_in_shard(0) == ["u.jpg", "u.seg.png"]


@pytest.mark.parametrize("layout", ["dict", "list"])
def test_an_index_without_the_size_of_its_shard_is_read(tmp_path, layout):
    write_shard(tmp_path / "a.tar", [("a.txt", b"hello")])
    entry = {"offset": 512, "length": 5}
    files = {"a.txt": entry} if layout == "dict" else [{"path": "a.txt", **entry}]
    (tmp_path / "a.json").write_text(json.dumps({"files": files}))
    dataset = webshart.discover_dataset(str(tmp_path))
    assert dataset.open_shard(0).read_file(0) == b"hello"


@pytest.mark.parametrize("wrong", ["12", -1, 1.5, None, [1]])
def test_one_bad_entry_is_named_with_its_file_and_key(tmp_path, wrong):
    write_shard(tmp_path / "a.tar", [("a.bin", b"1"), ("b.bin", b"2")])
    good, bad = {"offset": 512, "length": 1}, {"offset": wrong, "length": 1}
    (tmp_path / "a.json").write_text(json.dumps({"files": {"a.bin": good, "b.bin": bad}, "filesize": 10240}))
    dataset = webshart.discover_dataset(str(tmp_path))
    assert dataset.list_files_in_shard(0) == ["a.bin", "b.bin"]  # from the headers, which are there
    (place,) = dataset.report.places("bad_index")
    assert all(part in place.message for part in ("a.json", "'b.bin'", "offset"))
    with pytest.raises(IndexFileError, match=r"a\.json") as caught:
        dataset.field_rename("captions", "v1")
    assert "b.bin" in str(caught.value)


def test_a_subfolder_of_a_local_source_is_obeyed(tmp_path):
    for name in ("original", "covers"):
        write_shard(tmp_path / name / "s.tar", make_members(3))
    assert webshart.discover_dataset(str(tmp_path), subfolder="covers").num_shards == 1
    paired = webshart.discover_paired_dataset(str(tmp_path), left_subfolder="original", right_subfolder="covers")
    assert paired.num_pairs == 3
    left, right = (side.shard_url(0) for side in (paired.left, paired.right))
    assert (Path(left).parent.name, Path(right).parent.name) == ("original", "covers")


def test_pairs_that_do_not_match_are_named_on_both_sides_and_can_be_looked_at(tmp_path):
    write_shard(tmp_path / "l" / "s.tar", make_members(6, fields=("jpg",)))
    write_shard(tmp_path / "r" / "s.tar", make_members(6, fields=("jpg",), start=1))
    paired = webshart.discover_paired_dataset(str(tmp_path / "l"), str(tmp_path / "r"))
    with pytest.raises(ValueError, match=r"left_only=1 \['00000000'\].*right_only=1 \['00000006'\]"):
        _ = paired.num_pairs
    assert (paired.unmatched_left, paired.unmatched_right) == (["00000000"], ["00000006"])


def test_files_are_counted_and_not_shards(folder):
    dataset = webshart.discover_dataset(str(folder))
    assert (dataset.num_shards, dataset.total_files) == (3, 36)
    assert dataset.get_detailed_stats()["average_files_per_shard"] == 12


CALLS = [
    (lambda dataset: dataset.get_shard_info(9), IndexError),
    (lambda dataset: dataset.get_shard_info(-1), IndexError),
    (lambda dataset: dataset.list_files_in_shard(9), IndexError),
    (lambda dataset: dataset.get_shard_file_count(-1), IndexError),
    (lambda dataset: dataset.find_file_location(36), IndexError),
    (lambda dataset: dataset.get_shard_by_name("no"), ValueError),
    (lambda dataset: dataset.open_shard(0).read_file(99), IndexError),
    (lambda dataset: dataset.open_shard(0).read_sample(-1), IndexError),
    (lambda dataset: dataset.probe_caption_layout(max_shards=0), ValueError),
    (lambda dataset: dataset.field_rename("offset", "x"), ValueError),
    (lambda dataset: dataset.field_rename("", "x"), ValueError),
    (lambda dataset: webshart.TarDataLoader(dataset).load_sample(0, 99), IndexError),
    (lambda dataset: webshart.TarDataLoader(dataset).load_sample(7, 0), IndexError),
    (lambda dataset: webshart.TarDataLoader(dataset).shard(9), IndexError),
    (lambda dataset: webshart.TarDataLoader(dataset).shard(filename="no"), ValueError),
    (lambda dataset: webshart.TarDataLoader(dataset).iter_batches(), ValueError),
    (lambda dataset: webshart.TarDataLoader(dataset).iter_range(3, 3), ValueError),
    (lambda dataset: webshart.BucketDataLoader(dataset, key="no"), ValueError),
    (lambda dataset: webshart.BucketDataLoader(dataset).skip_to_bucket("9"), ValueError),
    (lambda _dataset: webshart.TarDataLoader(7), TypeError),
    (lambda dataset: webshart.discover_dataset(str(dataset.name) + "-no"), FileNotFoundError),
]


@pytest.mark.parametrize(("call", "kind"), CALLS, ids=map(str, range(len(CALLS))))
def test_errors_are_of_the_kinds_that_callers_catch(folder, call, kind):
    with pytest.raises(kind):
        call(webshart.discover_dataset(str(folder)))


def test_paths_are_taken_wherever_texts_are(folder):
    assert webshart.discover_dataset(folder, metadata=folder).num_shards == 3
    assert webshart.DatasetDiscovery().discover_local(folder).num_shards == 3
    assert webshart.TarDataLoader(folder).num_shards == 3


def test_a_folder_of_links_is_found(folder, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for path in folder.glob("*"):
        if path.is_file():
            (links / path.name).symlink_to(path)
    assert webshart.discover_dataset(str(links)).num_shards == 3


def test_a_loader_sees_what_was_renamed_after_it_was_made(folder):
    dataset = webshart.discover_dataset(str(folder))
    loader = webshart.TarDataLoader(dataset)
    before = loader.load_sample(0, 0).captions
    assert dataset.field_rename("captions", "v1") > 0
    assert loader.load_sample(0, 0).metadata["v1"] == before


def test_captions_are_written_onto_payloads_alone_and_under_the_whole_name_of_the_shard(tmp_path):
    for version in ("v1.0", "v1.1"):
        write_shard(
            tmp_path / "d" / f"{version}.tar", [("a.jpg", version.encode()), ("a.txt", f"of {version}".encode())]
        )
    shardset.index_dataset(tmp_path / "d", workers=0, captions=False)
    dataset = webshart.discover_dataset(str(tmp_path / "d"))
    webshart.TarDataLoader(dataset).coalesce_caption_metadata(str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["v1.0.json", "v1.1.json"]
    index = tmp_path / "out" / "v1.1.json"
    assert webshart.write_captions_to_metadata(str(index), {"a": "new"}) == 1
    files = json.loads(index.read_bytes())["files"]
    assert files["a.jpg"]["captions"] == "new"
    assert "captions" not in files["a.txt"]
