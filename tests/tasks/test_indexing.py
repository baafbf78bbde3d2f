from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from conftest import DATA
from shards import (
    BrokenStore,
    list_tree,
    make_members,
    private_cache,  # noqa: F401 - the fixture is autouse
    read_all,
    replace_file,
    tar_bytes,
    write_dataset,
    write_shard,
)
from shardset.dataset.catalogs import cache_root
from shardset.dataset.opening import discover_dataset
from shardset.errors import ChangedError, ChecksumError, NotFoundError, StorageError, TransferError, TruncatedError
from shardset.policy import Policy
from shardset.storage import LocalStore, MemoryStore
from shardset.tasks import index_dataset

PHOTOS = DATA / "webshart"
SKIP = Policy(on_error="skip")


@pytest.fixture
def folder(tmp_path):
    """Four shards of three samples each, one of them further down."""
    paths = write_dataset(tmp_path / "data", shards=4, samples=3)
    (tmp_path / "data" / "sub").mkdir()
    paths[3].rename(tmp_path / "data" / "sub" / "x.tar")
    return tmp_path / "data"


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written(folder):
    """Return what lies in a folder as `tree` does, but for the identity of sidecar files, which has a time in it."""
    found = tree(folder)
    for name in [name for name in found if Path(name).name.startswith("shards-")]:
        with pa.ipc.open_file(found[name]) as reader:
            found[name] = reader.read_all().drop_columns(["sidecar"]).to_pylist()
    return found


def edit_sidecar(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# ---- what is written, and where


def test_indexes_go_beside_their_shards_and_the_catalog_into_a_hidden_folder(folder):
    shards = {name: content for name, content in tree(folder).items() if name.endswith(".tar")}
    result = index_dataset(folder)
    assert result.folder == folder / ".shardset"
    assert (result.sidecars_written, result.shards_reused) == (4, 0)
    assert result.report.counts == {}
    assert result.catalog.num_samples == 12
    after = tree(folder)
    assert {name: content for name, content in after.items() if name.endswith(".tar")} == shards
    assert {name for name in after if "/" not in name or name.startswith("sub")} == {
        *shards,
        *(name.replace(".tar", ".json") for name in shards),
    }
    assert [name for name in after if name.startswith(".shardset")]
    dataset = discover_dataset(folder)
    assert dataset.catalog.folder == result.folder
    assert dataset[0].caption == "00000000.json"
    assert dataset.list_files_in_shard(3)[0] == "00000009.jpg"


def test_a_destination_is_laid_out_like_the_source_and_found_as_its_metadata(folder, tmp_path):
    before = list_tree(folder)
    target = tmp_path / "new" / "meta"
    result = index_dataset(folder, destination=target)
    assert list_tree(folder) == before
    assert result.folder == target / ".shardset"
    names = {"shard-0000.json", "shard-0001.json", "shard-0002.json", "sub/x.json"}
    assert {name for name in tree(target) if not name.startswith(".")} == names
    dataset = discover_dataset(folder, metadata=target)
    assert dataset.catalog.folder == result.folder
    assert dataset.files(3).captions(dataset.files(3).sample_rows[0]) == "00000009.json"
    assert read_all(dataset) == read_all(discover_dataset(folder))


def test_nothing_is_written_outside_of_the_destination(folder, tmp_path, monkeypatch):
    write_shard(tmp_path / "other" / "a.tar", make_members(1))
    monkeypatch.chdir(folder)
    index_dataset(["shard-0000.tar", "../other/a.tar"], destination=tmp_path / "far" / "meta")
    assert [name for name in tree(tmp_path / "far") if name.endswith(".json") and "/." not in name] == [
        "meta/data/shard-0000.json",
        "meta/other/a.json",
    ]


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
def test_names_of_shards_need_not_be_utf_8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_dataset(tmp_path / name, shards=2)
    result = index_dataset(tmp_path / name)
    assert (result.sidecars_written, result.report.counts) == (2, {})
    dataset = discover_dataset(tmp_path / name)
    assert dataset.catalog.folder == tmp_path / name / ".shardset"
    assert dataset[0].shard == str(tmp_path / name / "shard-0000.tar")
    assert read_all(dataset)


def test_two_runs_write_the_same_bytes(folder, tmp_path):
    for name in ("one", "two"):
        index_dataset(folder, destination=tmp_path / name, workers=0)
    assert written(tmp_path / "one") == written(tmp_path / "two")


def test_the_catalog_alone_is_written_if_asked(folder):
    result = index_dataset(folder, sidecars=False)
    assert result.sidecars_written == 0
    assert not [name for name in tree(folder) if name.endswith(".json") and not name.startswith(".shardset")]
    assert read_all(discover_dataset(folder))


def test_captions_and_geometry_are_read_as_asked(tmp_path):
    shard = tmp_path / "photos-00000.tar"
    shutil.copy(PHOTOS / shard.name, shard)
    index_dataset(tmp_path, captions=False)
    files = json.loads(shard.with_suffix(".json").read_text())["files"]
    assert not any("captions" in entry or "width" in entry for entry in files.values())
    index_dataset(tmp_path, geometry=True, force=True)
    files = json.loads(shard.with_suffix(".json").read_text())["files"]
    known = json.loads((PHOTOS / "photos-00000.json").read_text())["files"]
    for name, entry in known.items():
        for key, value in entry.items():
            expected = pytest.approx(value, rel=1e-6) if key == "aspect" else value
            assert files[name][key] == expected, (name, key)
    assert [record.geometry[:2] for record in discover_dataset(tmp_path).rows(range(10))] == [
        (entry["width"], entry["height"]) for name, entry in sorted(known.items()) if "width" in entry
    ]


def test_shards_in_memory_have_their_indexes_beside_them_and_their_catalog_in_the_cache():
    store = MemoryStore()
    for name in ("a", "b/c"):
        store.write(f"memory://b/{name}.tar", tar_bytes(make_members(2)))
    result = index_dataset("memory://b", store=store, workers=2)
    assert result.sidecars_written == 2
    assert json.loads(store.read("memory://b/b/c.json", 0, store.info("memory://b/b/c.json").size))["files"]
    assert result.folder.parent == cache_root() / "catalogs"
    assert discover_dataset("memory://b", store=store).catalog.folder == result.folder
    result = index_dataset("memory://b", destination="memory://meta", store=store)
    assert [info.url for info in store.list("memory://meta")] == ["memory://meta/a.json", "memory://meta/b/c.json"]


def test_a_source_without_shards_writes_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        index_dataset(tmp_path / "empty", destination=tmp_path / "meta")
    assert tree(tmp_path) == {}
    assert not (tmp_path / "meta").exists()


# ---- again


def test_a_second_run_has_nothing_to_do(folder):
    index_dataset(folder)
    before, content = list_tree(folder), tree(folder)
    result = index_dataset(folder)
    assert (result.sidecars_written, result.shards_reused) == (0, 4)
    after = list_tree(folder)
    written = {name for name in after if after[name] != before.get(name)}
    assert not [name for name in written if name.endswith(".arrow") and "samples" in name]
    assert not [name for name in written if name.endswith(".json") and "catalog" not in name]
    assert tree(folder) == content


def test_a_run_that_was_interrupted_is_finished_by_the_next(folder):
    index_dataset(folder)
    (folder / "shard-0001.json").unlink()
    (folder / ".shardset" / "catalog.json").unlink()
    result = index_dataset(folder)
    assert (result.sidecars_written, result.shards_reused) == (1, 0)
    assert result.report.counts == {"sidecar_kept": 3}
    (folder / "shard-0002.json").unlink()
    result = index_dataset(folder)
    assert (result.sidecars_written, result.shards_reused) == (1, 3)


def test_a_shard_that_changed_gets_a_new_index_and_the_others_keep_theirs(folder):
    index_dataset(folder)
    before = tree(folder)
    replace_file(folder / "shard-0001.tar", tar_bytes(make_members(9, start=50)))
    result = index_dataset(folder)
    assert (result.sidecars_written, result.shards_reused) == (1, 3)
    after = tree(folder)
    changed = {name for name in after if name.endswith(".json") and after[name] != before[name]}
    assert changed == {"shard-0001.json", ".shardset/catalog.json"}
    assert len(discover_dataset(folder)) == 18


def test_an_index_that_fits_by_its_size_alone_is_written_again(folder):
    index_dataset(folder)
    path = folder / "shard-0001.tar"
    other = tar_bytes(make_members(3, start=50))
    assert len(other) == path.stat().st_size
    replace_file(path, other)
    result = index_dataset(folder)
    assert result.sidecars_written == 1
    assert "00000050.jpg" in json.loads((folder / "shard-0001.json").read_text())["files"]
    assert [sample.key for sample in discover_dataset(folder)][3] == "00000050"


def test_force_does_everything_again(folder):
    index_dataset(folder)
    edit_sidecar(folder / "shard-0001.json", lambda document: document.update(mine=1))
    result = index_dataset(folder, force=True)
    assert (result.sidecars_written, result.shards_reused) == (4, 0)
    assert "mine" not in json.loads((folder / "shard-0001.json").read_text())


# ---- what others wrote


@pytest.mark.parametrize("form", ["photos-00000.json", "photos-00000.list.json", "photos-00000.cheesechaser.json"])
def test_a_good_index_of_another_tool_is_kept(tmp_path, form):
    shutil.copy(PHOTOS / "photos-00000.tar", tmp_path / "photos-00000.tar")
    foreign = (PHOTOS / form).read_bytes()
    (tmp_path / "photos-00000.json").write_bytes(foreign)
    result = index_dataset(tmp_path)
    assert result.sidecars_written == 0
    assert result.report.counts == {"sidecar_kept": 1}
    assert (tmp_path / "photos-00000.json").read_bytes() == foreign
    assert len(discover_dataset(tmp_path)) == 10
    assert index_dataset(tmp_path, force=True).sidecars_written == 1
    assert (tmp_path / "photos-00000.json").read_bytes() != foreign


def test_captions_that_people_edited_go_before_those_of_the_shard(folder):
    index_dataset(folder)
    for path in (folder / ".shardset").iterdir():
        path.unlink()

    def caption(document):
        document["files"]["00000000.jpg"]["captions"] = ["edited", "twice"]
        document["files"]["00000001.jpg"].pop("captions")

    edit_sidecar(folder / "shard-0000.json", caption)
    index_dataset(folder)
    dataset = discover_dataset(folder)
    assert [dataset[n].caption for n in range(3)] == ["edited", "00000001.json", "00000002.json"]


@pytest.mark.parametrize("content", [b'{"model": "x"}', b"[1, 2]", b"no json", b"", b'{"files": 3}', b"\xff"])
def test_a_json_file_that_is_no_index_is_never_written_over_unless_forced(folder, content):
    path = folder / "shard-0001.json"
    path.write_bytes(content)
    result = index_dataset(folder)
    assert path.read_bytes() == content
    assert result.sidecars_written == 3
    assert result.report.counts == {"not_an_index": 1}
    assert result.report.places("not_an_index")[0].shard == str(path)
    assert len(discover_dataset(folder)) == 12
    assert index_dataset(folder, force=True).sidecars_written == 4
    assert json.loads(path.read_text())["files"]


@pytest.mark.parametrize("content", [b'{"files": {}, "filesize": 7}', b'{"files": {"a": 1}}', b'{"files": [{}]}'])
def test_an_index_that_does_not_fit_any_more_is_written_again(folder, content):
    path = folder / "shard-0001.json"
    path.write_bytes(content)
    result = index_dataset(folder)
    assert result.sidecars_written == 4
    assert json.loads(path.read_text())["shardset"]


# ---- damage


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_damage_raises_and_leaves_no_catalog_or_is_counted(folder, workers):
    os.truncate(folder / "shard-0001.tar", 7 * 1024 + 515)
    with pytest.raises(TruncatedError) as caught:
        index_dataset(folder, workers=workers)
    assert (caught.value.shard, caught.value.offset) == (str(folder / "shard-0001.tar"), 7 * 1024)
    assert caught.value.member == "00000005.json"
    assert not (folder / "shard-0001.json").exists()
    assert not (folder / ".shardset").exists()
    result = index_dataset(folder, policy=SKIP, workers=workers)
    assert result.report.counts["truncated_payload"] == 1
    assert result.catalog.manifest.groups[0].num_damaged == 1
    with pytest.raises(TruncatedError):  # also where nothing is left to do
        index_dataset(folder)
    assert index_dataset(folder, policy=SKIP).report.counts == {"truncated_payload": 1}
    with pytest.raises(TruncatedError):
        len(discover_dataset(folder))


@pytest.mark.slow
def test_an_error_from_a_worker_process_arrives_whole(tmp_path):
    write_dataset(tmp_path, shards=3)
    write_shard(tmp_path / "broken.tar", make_members(1))
    with pytest.raises(TransferError) as caught:
        index_dataset(tmp_path, store=BrokenStore(), workers=2)
    error = caught.value
    assert (error.status, error.attempts, error.url) == (503, 4, str(tmp_path / "broken.tar"))
    assert error.hint == "try again"
    assert str(error) == f"the line was cut, at {tmp_path / 'broken.tar'} - try again"
    data = bytearray((tmp_path / "shard-0001.tar").read_bytes())
    data[1024] ^= 1
    replace_file(tmp_path / "shard-0001.tar", bytes(data))
    (tmp_path / "broken.tar").unlink()
    with pytest.raises(ChecksumError) as caught:
        index_dataset(tmp_path, workers=2)
    assert (caught.value.shard, caught.value.offset, caught.value.code) == (
        str(tmp_path / "shard-0001.tar"),
        1024,
        "bad_checksum",
    )


def test_a_shard_that_is_replaced_before_its_turn_is_an_error_that_names_it(folder):
    class Hasty(LocalStore):
        def open(self, url):
            if url.endswith("shard-0001.tar"):
                write_shard(url, make_members(7))
            return super().open(url)

    with pytest.raises(ChangedError, match=r"shard-0001\.tar"):
        index_dataset(folder, store=Hasty(), workers=0)


def test_a_place_that_cannot_be_written_to_is_a_typed_error(folder, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError) as caught:
        index_dataset(folder, destination=tmp_path / "file")
    assert str(tmp_path / "file") in caught.value.url
    with pytest.raises(StorageError, match="the catalog cannot be written"):
        index_dataset(folder, destination=tmp_path / "file", sidecars=False)
    assert (tmp_path / "file").read_text() == "no folder"


# ---- workers


@pytest.mark.parametrize("how", ["none", "two", "threads", "a pool"])
def test_every_way_to_run_the_tasks_gives_the_same(folder, tmp_path, how):
    index_dataset(folder, destination=tmp_path / "expected", geometry=True, workers=0)
    if how == "threads":
        with ThreadPoolExecutor(3) as executor:
            index_dataset(folder, destination=tmp_path / "found", geometry=True, executor=executor)
    elif how == "a pool":
        with ProcessPoolExecutor(1) as executor:
            index_dataset(folder, destination=tmp_path / "found", geometry=True, executor=executor)
    else:
        workers = {"none": None, "two": 2}[how]
        index_dataset(folder, destination=tmp_path / "found", geometry=True, workers=workers)
    assert written(tmp_path / "found") == written(tmp_path / "expected")


def test_fewer_than_no_workers_are_refused(folder):
    with pytest.raises(ValueError, match="workers=-1"):
        index_dataset(folder, workers=-1)


def test_progress_goes_up_by_one_and_ends_with_all(folder):
    def run(**options):
        seen = []
        index_dataset(folder, progress=lambda done, total: seen.append((done, total)), **options)
        return seen

    assert run() == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert run() == [(4, 4)]
    os.utime(folder / "shard-0001.tar", (1, 1))
    assert run() == [(3, 4), (4, 4)]
    assert run(force=True) == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_progress_that_raises_stops_the_run_and_publishes_nothing(folder):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_dataset(folder, progress=stop, workers=0)
    assert not (folder / ".shardset").exists()
    assert index_dataset(folder).catalog.num_samples == 12


# ---- what a run leaves of earlier ones


def test_an_index_of_ours_without_pixel_sizes_is_completed_and_loses_nothing(tmp_path):
    shutil.copy(PHOTOS / "photos-00000.tar", tmp_path)
    index_dataset(tmp_path)
    place = tmp_path / "photos-00000.json"

    def edit(document):
        document["curator"] = "Ada"
        document["files"]["0005-cat.webp"] |= {"captions": "edited by hand", "score": 7}

    edit_sidecar(place, edit)
    result = index_dataset(tmp_path, geometry=True)
    assert result.sidecars_written == 1
    after = json.loads(place.read_bytes())
    cat = after["files"]["0005-cat.webp"]
    assert (after["curator"], cat["captions"], cat["score"]) == ("Ada", "edited by hand", 7)
    assert (cat["width"], cat["height"]) == (451, 300)
    assert index_dataset(tmp_path, geometry=True).sidecars_written == 0
    sample = discover_dataset(tmp_path).find("0005-cat")
    assert (sample.caption, sample.size) == ("edited by hand", (451, 300))


def test_the_catalog_of_a_folder_is_not_replaced_by_that_of_one_of_its_shards(folder):
    index_dataset(folder)
    before = tree(folder)
    result = index_dataset(folder / "shard-0001.tar")
    assert result.folder.is_relative_to(cache_root())
    assert result.catalog.num_samples == 3
    assert tree(folder) == before


def test_what_is_no_tar_gets_no_index(tmp_path):
    write_shard(tmp_path / "a.tar", make_members(3))
    (tmp_path / "b.tar").write_text("version https://git-lfs.github.com/spec/v1\n")
    result = index_dataset(tmp_path, policy=SKIP)
    assert result.report.counts == {"not_tar": 1}
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == ["a.json"]
