from __future__ import annotations

import json
import shutil
from functools import partial

import pytest

from conftest import DATA
from shards import (
    list_tree,
    make_members,
    private_cache,  # noqa: F401 - the fixture is autouse
    replace_file,
    tar_bytes,
    write_dataset,
    write_shard,
)
from shardset.dataset.opening import discover_dataset
from shardset.dataset.rewriting import coalesce_captions
from shardset.errors import IndexFileError, NotFoundError, TruncatedError
from shardset.policy import Policy
from shardset.storage import MemoryStore
from shardset.storage.cache import CachedStore
from shardset.tasks import coalesce_dataset, extract_indexes
from shardset.tasks.coalescing import shard_cache


@pytest.fixture
def folder(tmp_path):
    """Three shards with sidecars, whose indexes say nothing of captions."""
    write_dataset(tmp_path / "data", shards=2, samples=3)
    write_shard(tmp_path / "data" / "sub" / "v1.0.tar", make_members(2, start=100, fields=("jpg", "txt")))
    extract_indexes(tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.json"):
        document = json.loads(path.read_text())
        for entry in document["files"].values():
            entry.pop("captions", None)
        path.write_text(json.dumps(document))
    return tmp_path / "data"


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.json")}


def test_captions_go_into_new_indexes_and_the_source_stays_as_it_is(folder, tmp_path):
    before = list_tree(folder)
    result = coalesce_dataset(folder, tmp_path / "out")
    assert list_tree(folder) == before
    assert (result.num_shards, result.captioned_samples, result.coalesced_samples) == (3, 8, 8)
    names = ["shard-0000.json", "shard-0001.json", "sub/v1.0.json"]
    assert list(result.files) == [str(tmp_path / "out" / name) for name in names]
    assert sorted(tree(tmp_path / "out")) == names
    entry = json.loads((tmp_path / "out" / "sub" / "v1.0.json").read_text())["files"]["00000100.jpg"]
    assert entry["captions"].startswith("00000100.txt")


def test_the_result_is_that_of_a_dataset_which_does_it_itself(folder, tmp_path):
    coalesce_dataset(folder, tmp_path / "tasks")
    coalesce_captions(discover_dataset(folder), tmp_path / "dataset")
    assert tree(tmp_path / "tasks") == tree(tmp_path / "dataset")


def test_a_second_run_writes_nothing(folder, tmp_path):
    coalesce_dataset(folder, tmp_path / "out")
    before = list_tree(tmp_path / "out")
    assert coalesce_dataset(folder, tmp_path / "out").coalesced_samples == 8
    assert list_tree(tmp_path / "out") == before


def test_indexes_in_place_are_completed_once(folder):
    assert coalesce_dataset(folder, folder).coalesced_samples == 8
    before = list_tree(folder)
    again = coalesce_dataset(folder, folder)
    assert (again.captioned_samples, again.coalesced_samples) == (8, 0)
    assert list_tree(folder) == before


def test_indexes_come_from_another_folder_if_one_is_named(folder, tmp_path):
    meta = tmp_path / "meta"
    for name in tree(folder):
        (meta / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / name, meta / name)
    document = json.loads((meta / "shard-0000.json").read_text())
    document["files"]["00000000.jpg"] |= {"captions": "by hand", "mine": 1}
    (meta / "shard-0000.json").write_text(json.dumps(document))
    result = coalesce_dataset(folder, tmp_path / "out", metadata=meta)
    assert (result.captioned_samples, result.coalesced_samples) == (8, 7)
    entry = json.loads((tmp_path / "out" / "shard-0000.json").read_text())["files"]["00000000.jpg"]
    assert (entry["captions"], entry["mine"]) == ("by hand", 1)


def test_a_shard_without_an_index_gets_one(folder, tmp_path):
    (folder / "shard-0001.json").unlink()
    assert coalesce_dataset(folder, tmp_path / "out").coalesced_samples == 8
    assert len(json.loads((tmp_path / "out" / "shard-0001.json").read_text())["files"]) == 9


def test_a_range_and_a_subfolder_are_taken_as_said(folder, tmp_path):
    assert coalesce_dataset(folder, tmp_path / "one", shard_range=(1, 2)).files == (
        str(tmp_path / "one" / "shard-0001.json"),
    )
    assert coalesce_dataset(folder, tmp_path / "two", subfolder="sub").files == (str(tmp_path / "two" / "v1.0.json"),)
    with pytest.raises(ValueError, match="start must be"):
        coalesce_dataset(folder, tmp_path / "three", shard_range=(2, 1))


def test_an_index_of_another_shard_is_refused(folder, tmp_path):
    replace_file(folder / "shard-0001.tar", tar_bytes(make_members(3, start=50)))
    with pytest.raises(IndexFileError, match=r"shard-0001\.json"):
        coalesce_dataset(folder, tmp_path / "out")


def test_damage_of_a_shard_without_an_index_is_raised_or_counted(folder, tmp_path):
    (folder / "shard-0001.json").unlink()
    path = folder / "shard-0001.tar"
    replace_file(path, path.read_bytes()[:515])
    with pytest.raises(TruncatedError):
        coalesce_dataset(folder, tmp_path / "out")
    result = coalesce_dataset(folder, tmp_path / "out", policy=Policy(on_error="skip"))
    assert result.report.counts["truncated_payload"] == 1


def test_a_source_without_shards_is_an_error(tmp_path):
    with pytest.raises(NotFoundError):
        coalesce_dataset(tmp_path, tmp_path / "out")


def test_progress_ends_with_all(folder, tmp_path):
    seen = []
    coalesce_dataset(folder, tmp_path / "out", progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_cache_stands_before_shards_that_are_elsewhere_alone(folder, tmp_path):
    made = []

    def cache(store):
        made.append(shard_cache(str(tmp_path / "cache"), 1.0, 2)(store))
        return made[-1]

    coalesce_dataset(folder, tmp_path / "out", cache=cache)
    assert made == []
    store = MemoryStore()
    payload = (DATA / "webshart" / "photos-00000.tar").read_bytes()
    store.write("memory://a/s.tar", payload)
    result = coalesce_dataset("memory://a", tmp_path / "far", store=store, cache=partial(cache))
    assert result.captioned_samples > 0
    assert (tmp_path / "far" / "s.json").exists()
    assert all(isinstance(each, CachedStore) and each.limit == 1 << 30 for each in made)
