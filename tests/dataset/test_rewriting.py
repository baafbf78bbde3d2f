import json
import multiprocessing
import os
import signal
import subprocess
import sys
import types
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from conftest import DATA
from shards import private_cache, write_dataset, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset import rewriting
from shardset.dataset.dataset import Dataset
from shardset.dataset.discover import find_shards
from shardset.dataset.opening import discover_dataset
from shardset.dataset.rewriting import (
    coalesce_captions,
    coalesced_folder,
    probe_caption_layout,
    rename_field,
    upload_caption_metadata,
)
from shardset.errors import IndexFileError, MissingExtraError, StorageError
from shardset.index.captioning import write_captions_to_metadata
from shardset.index.sidecar import parse_sidecar
from shardset.loading.cursor import TarDataLoader
from shardset.storage import LocalStore, MemoryStore
from shardset.tasks import index_dataset

EDITS = json.loads((DATA / "webshart" / "edits.json").read_text())
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@pytest.fixture
def folder(tmp_path):
    """Three shards of four samples with JSON and text beside them, and indexes that have a field of somebody's own."""
    paths = write_dataset(tmp_path / "data")
    index_dataset(tmp_path / "data", captions=False)
    for path in paths:
        change(path.with_suffix(".json"), lambda name, entry: entry.update(mine=name))
    return tmp_path / "data"


def change(path, edit):
    """Edit the entries of an index file by hand."""
    document = json.loads(path.read_bytes())
    for name, entry in document["files"].items():
        edit(name, entry)
    path.write_text(json.dumps(document))


def entries_in(folder):
    """Return the entries of all index files below a folder, by shard and path."""
    return {
        (str(path.relative_to(folder).with_suffix("")), name): entry
        for path in sorted(Path(folder).rglob("*.json"))
        if ".shardset" not in path.parts
        for name, entry in json.loads(path.read_bytes())["files"].items()
    }


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def as_webshart_coalesced(folder, name="v1"):
    """Write the shard that webshart was given, and an index for it with the captions that it was given."""
    coalesce = EDITS["coalesce"]
    write_shard(folder / f"{name}.tar", [(member, payload.encode()) for member, payload in coalesce["members"]])
    index_dataset(folder, captions=False)
    given = coalesce["given"]
    change(folder / f"{name}.json", lambda path, entry: entry.update(captions=given[path]) if path in given else None)


# Renaming.


def test_a_field_is_renamed_in_the_index_of_every_shard(folder):
    dataset = discover_dataset(folder)
    before = entries_in(folder)
    assert rename_field(dataset, "mine", "yours") == 36
    after = entries_in(folder)
    assert {place: entry["yours"] for place, entry in after.items()} == {
        place: entry["mine"] for place, entry in before.items()
    }
    assert not any("mine" in entry for entry in after.values())
    assert rename_field(dataset, "mine", "yours") == 0
    assert rename_field(dataset, "yours", "yours") == 0


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, pytest.param(ProcessPoolExecutor, marks=pytest.mark.slow)])
def test_an_executor_gives_the_same(folder, tmp_path, kind):
    expected = coalesce_captions(discover_dataset(folder), tmp_path / "expected")
    context = {} if kind is ThreadPoolExecutor else {"mp_context": multiprocessing.get_context("spawn")}
    with kind(2, **context) as executor:
        dataset = discover_dataset(folder)
        found = coalesce_captions(dataset, tmp_path / "found", executor=executor)
        assert contents(tmp_path / "found") == contents(tmp_path / "expected")
        assert {**found, "files": 0} == {**expected, "files": 0}
        assert rename_field(dataset, "mine", "yours", executor=executor) == 36
        change(folder / "shard-0000.json", lambda _, entry: entry.update(offset="here"))
        with pytest.raises(IndexFileError, match=r"offset is 'here', in .*shard-0000\.json"):
            rename_field(discover_dataset(folder), "yours", "mine", executor=executor)
    assert not any("mine" in entry for entry in entries_in(folder).values())


def test_a_dataset_sees_the_new_name_and_trusts_the_index_as_before(folder):
    dataset = discover_dataset(folder)
    assert dataset.files(0).further(0)["mine"] == "00000000.jpg"
    assert dataset.field_rename("mine", "yours") == 36
    entry = TarDataLoader(dataset).load_sample(0, 0)
    assert entry.metadata["yours"] == "00000000.jpg"
    assert "mine" not in entry.metadata
    assert dataset.files(0).index.is_verified
    assert dataset.report.counts == {}


def test_captions_renamed_away_are_gone_for_every_reader(folder):
    write_captions_to_metadata(folder / "shard-0000.json", {"00000000": "written"})
    dataset = discover_dataset(folder)
    assert dataset[0].caption == "written"
    assert rename_field(dataset, "captions", "old_captions") == 1
    assert dataset[0].caption is None
    assert discover_dataset(folder)[0].caption is None
    loader = TarDataLoader(dataset)
    assert loader.load_sample(0, 0).metadata["old_captions"] == "written"
    assert loader.load_sample(0, 0).caption != "written"  # but that of the sidecar


def test_all_indexes_are_checked_before_the_first_is_replaced(folder):
    change(folder / "shard-0002.json", lambda _, entry: entry.update(offset=-1))
    before = contents(folder)
    with pytest.raises(IndexFileError, match=r"entry '00000008.jpg': offset is -1, in .*shard-0002\.json"):
        rename_field(discover_dataset(folder), "mine", "yours")
    assert contents(folder) == before


def test_a_conflict_in_the_last_shard_leaves_the_first_as_it_was(folder):
    change(folder / "shard-0002.json", lambda name, entry: entry.update(yours=1) if name == "00000011.txt" else None)
    before = contents(folder)
    with pytest.raises(ValueError, match=r"'yours' already exists in shard 'shard-0002', entry '00000011\.txt'"):
        rename_field(discover_dataset(folder), "mine", "yours")
    assert contents(folder) == before
    assert rename_field(discover_dataset(folder), "mine", "yours", overwrite=True) == 36


def test_a_shard_without_an_index_is_named(folder):
    (folder / "shard-0001.json").unlink()
    with pytest.raises(IndexFileError, match=r"'shard-0001' has no sidecar index, in .*shard-0001.json - make one"):
        rename_field(discover_dataset(folder), "mine", "yours")
    assert all("mine" in entry for entry in entries_in(folder).values())


def test_indexes_are_exported_with_dots_and_folders_in_their_names_and_read_there_from_then_on(tmp_path):
    for name in ("v1.0", "v1.1", "sub.d/v1.0"):
        write_shard(tmp_path / "data" / f"{name}.tar", [("a.jpg", name.encode())])
    index_dataset(tmp_path / "data")
    before = contents(tmp_path / "data")
    dataset = discover_dataset(tmp_path / "data")
    for number in range(3):
        path = Path(dataset.get_shard_info(number)["json_path"])
        change(path, lambda _, entry, number=number: entry.update(mine=number))
    edited = contents(tmp_path / "data")
    assert edited.keys() == before.keys()
    target = tmp_path / "far" / "away"
    assert rename_field(dataset, "mine", "yours", destination=target) == 3
    assert contents(tmp_path / "data") == edited
    assert {place[0] for place in entries_in(target)} == {"v1.0", "v1.1", "sub.d/v1.0"}
    for number in range(3):
        assert Path(dataset.get_shard_info(number)["json_path"]) == target / f"{dataset.info(number).name}.json"
        assert dataset.files(number).further(0) == {"yours": number}
    assert dataset[0]["jpg"]


def test_an_export_has_the_indexes_of_all_shards_also_of_those_without_the_field(folder):
    change(folder / "shard-0001.json", lambda _, entry: entry.pop("mine"))
    target = folder.parent / "out"
    assert rename_field(discover_dataset(folder), "mine", "yours", destination=str(target)) == 24
    assert sorted(path.name for path in target.iterdir()) == [f"shard-{n:04d}.json" for n in range(3)]


def test_indexes_elsewhere_need_a_destination_on_this_machine(folder, tmp_path):
    store = MemoryStore()
    for path in folder.glob("shard-*"):
        store.write(f"memory://b/{path.name}", path.read_bytes())
    dataset = Dataset(find_shards("memory://b", store=store), store)
    with pytest.raises(ValueError, match="pass a destination"):
        rename_field(dataset, "mine", "yours")
    with pytest.raises(ValueError, match="written to this machine's disks"):
        rename_field(dataset, "mine", "yours", destination="s3://bucket/x")
    assert rename_field(dataset, "mine", "yours", destination=tmp_path / "out") == 36
    assert dataset.files(0).further(0)["yours"] == "00000000.jpg"
    assert len(dataset[0]["jpg"]) > 0


# Gathering captions.


def test_captions_are_gathered_as_webshart_does(tmp_path):
    as_webshart_coalesced(tmp_path / "data")
    dataset = discover_dataset(tmp_path / "data")
    assert probe_caption_layout(dataset) == EDITS["coalesce"]["probe"]
    result = coalesce_captions(dataset, tmp_path / "out")
    assert result == EDITS["coalesce"]["result"] | {"files": [str(tmp_path / "out" / "v1.json")]}
    entries = json.loads((tmp_path / "out" / "v1.json").read_bytes())["files"]
    assert {name: entry["captions"] for name, entry in entries.items() if "captions" in entry} == EDITS["coalesce"][
        "captions"
    ]
    assert dataset.report.counts == {"bad_json_sidecar": 1}  # k.json, which is none


def test_gathering_into_the_shards_own_folder_replaces_their_indexes_and_nothing_is_left_to_gather(folder):
    result = coalesce_captions(discover_dataset(folder), folder)
    assert (result["captioned_samples"], result["coalesced_samples"]) == (12, 12)
    entries = entries_in(folder)
    assert entries["shard-0001", "00000005.jpg"]["captions"] == "00000005.txt xxxxx"
    assert all(entry["mine"] == name for (_, name), entry in entries.items())
    assert not any("captions" in entry for (_, name), entry in entries.items() if not name.endswith(".jpg"))
    dataset = discover_dataset(folder)
    assert dataset[5].caption == "00000005.txt xxxxx"
    again = coalesce_captions(dataset, folder)
    assert (again["captioned_samples"], again["coalesced_samples"]) == (12, 0)
    for number in range(3):
        path = folder / f"shard-{number:04d}.json"
        assert parse_sidecar(path.read_bytes(), path=str(path)).index.is_verified


def test_a_blank_text_leaves_the_word_to_the_json(tmp_path):
    write_shard(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.txt", b" \n"), ("a.json", b'{"caption": "said"}')])
    index_dataset(tmp_path, captions=False)
    assert coalesce_captions(discover_dataset(tmp_path), tmp_path)["coalesced_samples"] == 1
    assert entries_in(tmp_path)["a", "a.jpg"]["captions"] == "said"


def test_shards_without_an_index_are_given_one(folder):
    (folder / "shard-0001.json").unlink()
    result = coalesce_captions(discover_dataset(folder), folder.parent / "out")
    assert result["coalesced_samples"] == 12
    entries = entries_in(folder.parent / "out")
    assert entries["shard-0001", "00000004.jpg"]["captions"] == "00000004.txt xxxx"
    assert "mine" not in entries["shard-0001", "00000004.jpg"]


def test_some_shards_are_gathered_as_asked(folder):
    dataset, seen = discover_dataset(folder), []
    result = coalesce_captions(
        dataset, folder.parent / "out", [2, 0, 2], progress=lambda done, total: seen.append((done, total))
    )
    assert [Path(path).name for path in result["files"]] == ["shard-0002.json", "shard-0000.json"]
    assert (result["shards"], result["captioned_samples"]) == (2, 8)
    assert seen == [(1, 2), (2, 2)]
    assert coalesce_captions(dataset, folder.parent / "out", [])["files"] == []
    with pytest.raises(IndexError):
        coalesce_captions(dataset, folder.parent / "out", [3])


def test_an_index_of_another_shard_is_not_gathered_into(folder):
    other, this = folder / "shard-0002.json", folder / "shard-0001.json"
    this.write_bytes(other.read_bytes())
    before = contents(folder)
    with pytest.raises(IndexFileError, match=r"stale: .*shard-0001\.json"):
        coalesce_captions(discover_dataset(folder), folder)
    assert contents(folder) == before


def test_without_a_place_to_put_indexes_nothing_is_gathered(folder):
    with pytest.raises(ValueError, match=r"enable_metadata_cache\(\) first or provide destination"):
        coalesce_captions(discover_dataset(folder))


def test_gathered_captions_are_kept_in_the_metadata_cache_and_read_there(folder, tmp_path):
    dataset = discover_dataset(folder)
    dataset.enable_metadata_cache(tmp_path / "cache", init_shard_count=0)
    before = contents(folder)
    result = coalesce_captions(dataset, shard_indices=[1])
    assert result["coalesced_samples"] == 4
    kept = coalesced_folder(dataset)
    assert Path(kept).is_relative_to(tmp_path / "cache")
    assert result["files"] == [str(Path(kept) / "shard-0001.json")]
    assert dataset[4].caption == "00000004.txt xxxx"
    assert dataset[0].caption is None
    assert dataset.files(0).further(0)["mine"] == "00000000.jpg"  # the others are there, too
    assert coalesce_captions(dataset)["coalesced_samples"] == 8
    assert coalesced_folder(dataset) == kept
    assert dataset[0].caption == "00000000.txt"
    assert contents(folder) == before


@pytest.mark.parametrize("count", [0, -1])
def test_at_least_one_shard_is_probed(folder, count):
    with pytest.raises(ValueError, match=f"max_shards={count}"):
        probe_caption_layout(discover_dataset(folder), count)


@pytest.mark.parametrize(
    ("fields", "captions", "layout"),
    [
        (("jpg",), None, "none"),
        (("jpg",), "embedded", "embedded"),
        (("jpg", "json"), None, "json_sidecar"),
        (("jpg", "txt"), "not counted apart", "txt_sidecar"),
        (("jpg", "json", "txt"), None, "mixed"),
    ],
)
def test_a_layout_has_the_name_of_what_there_is(tmp_path, fields, captions, layout):
    write_dataset(tmp_path, shards=2, samples=3, fields=fields)
    index_dataset(tmp_path, captions=False)
    if captions:
        for path in tmp_path.glob("*.json"):
            change(path, lambda name, entry: entry.update(captions=captions) if name.endswith("jpg") else None)
    found = probe_caption_layout(discover_dataset(tmp_path))
    assert found["layout"] == layout
    assert (found["samples"], found["complete"]) == (6, True)
    assert found["captioned_samples"] + found["uncaptioned_samples"] == 6
    first = probe_caption_layout(discover_dataset(tmp_path), 1)
    assert (first["shards_scanned"], first["total_shards"], first["complete"]) == (1, 2, False)


# What catalogs know of edits.


def test_captions_written_into_one_index_are_seen_through_a_new_dataset_and_only_that_shard_is_read_again(folder):
    assert discover_dataset(folder)[0].caption is None
    write_captions_to_metadata(folder / "shard-0001.json", {"00000004.jpg": "written"})

    class Counting(LocalStore):
        opened: ClassVar = []

        def open(self, url, known=None):
            self.opened.append(Path(url).name)
            return super().open(url, known)

    dataset = discover_dataset(folder, store=Counting())
    assert dataset[4].caption == "written"
    assert {name for name in Counting.opened if name.endswith(".json")} == {"shard-0001.json"}


def test_a_catalog_beside_the_shards_is_stale_after_an_edit_until_it_is_made_again(folder):
    index_dataset(folder)
    assert discover_dataset(folder).report.counts == {}
    write_captions_to_metadata(folder / "shard-0002.json", {"00000008": "written"})
    dataset = discover_dataset(folder)
    assert dataset[8].caption == "written"
    assert dataset.report.counts == {"stale_catalog": 1}
    result = index_dataset(folder)
    assert result.shards_reused == 2
    fresh = discover_dataset(folder)
    assert fresh[8].caption == "written"
    assert fresh.report.counts == {}
    assert fresh.catalog.folder == folder / ".shardset"


def test_an_index_that_appears_or_goes_makes_a_catalog_stale(tmp_path):
    write_dataset(tmp_path / "data", shards=2)
    assert discover_dataset(tmp_path / "data")[0].caption is None
    coalesce_captions(discover_dataset(tmp_path / "data"), tmp_path / "data")
    assert discover_dataset(tmp_path / "data")[0].caption == "00000000.txt"
    for path in (tmp_path / "data").glob("*.json"):
        path.unlink()
    assert discover_dataset(tmp_path / "data")[0].caption is None


# Uploading.


def test_a_folder_of_indexes_is_uploaded_in_one_call(monkeypatch, tmp_path):
    calls = []

    class HfApi:
        def __init__(self, token):
            calls.append(token)

        def upload_folder(self, **arguments):
            calls.append(arguments)
            return "commit"

    hub = types.ModuleType("huggingface_hub")
    hub.HfApi = HfApi
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert upload_caption_metadata(tmp_path, "owner/name", hf_token="secret", path_in_repo="meta") == "commit"
    assert calls == [
        "secret",
        {
            "folder_path": str(tmp_path),
            "repo_id": "owner/name",
            "repo_type": "dataset",
            "path_in_repo": "meta",
            "revision": "main",
            "commit_message": "Add coalesced webshart caption metadata",
            "allow_patterns": ["*.json", "**/*.json"],
        },
    ]


def test_without_the_hub_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[hub\]"):
        upload_caption_metadata(tmp_path, "owner/name")


# What may go wrong on the way.


@posix
@pytest.mark.slow
@pytest.mark.parametrize("step", range(6))
def test_a_kill_at_any_step_leaves_every_index_old_or_new(folder, step):
    """The steps: before anything, twice between writes, before the first rename, between renames, after the last."""
    old = entries_in(folder)
    code = """
import os, signal, sys
from pathlib import Path
from typing import ClassVar
from shardset.dataset.opening import discover_dataset
from shardset.dataset.rewriting import rename_field
from shardset.index import replacing

step, calls = int(sys.argv[2]), [0]
def dying(real, first):
    def call(*args, **further):
        if first + calls[0] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        calls[0] += 1
        return real(*args, **further)
    return call
if step < 3:
    replacing.Replacements.write = dying(replacing.Replacements.write, 0)
else:
    Path.replace = dying(Path.replace, 3)
rename_field(discover_dataset(sys.argv[1]), "mine", "yours")
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder), str(step)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    new = entries_in(folder)
    renamed = {shard for (shard, name), entry in new.items() if entry.get("yours") == name and "mine" not in entry}
    kept = {shard for (shard, name), entry in new.items() if entry.get("mine") == name and "yours" not in entry}
    assert (len(renamed), len(kept)) == (max(0, step - 3), 3 - max(0, step - 3))
    assert new.keys() == old.keys()
    dataset = discover_dataset(folder)  # what was left behind is in nobody's way
    assert rename_field(dataset, "mine", "yours") == 36 - 12 * len(renamed)


@pytest.mark.slow
def test_a_disk_that_runs_full_leaves_all_indexes_as_they_were(folder, tmp_path):
    """A real disk, full for real: it has room for the indexes and for half of them once more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for path in folder.glob("*.json"):
        change(path, lambda _, entry: entry.update(more="x" * 20_000))
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.glob("shard-*"))
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size + 400_000}", "tmpfs", str(disk)]
    if os.name != "posix" or os.getuid() or subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a disk of its own")
    try:
        for path in folder.glob("shard-*"):
            (disk / path.name).write_bytes(path.read_bytes())
        before = contents(disk)
        with pytest.raises(StorageError, match="no space left"):
            rename_field(discover_dataset(disk), "mine", "yours")
        assert contents(disk) == before
        with pytest.raises(StorageError, match="no space left"):
            coalesce_captions(discover_dataset(disk), disk)
        assert contents(disk) == before
        assert rename_field(discover_dataset(disk), "mine", "yours", destination=tmp_path / "roomy") == 36
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_rename_that_fails_half_way_says_how_far_it_came(folder, monkeypatch):
    real, calls = Path.replace, []

    def failing(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(StorageError, match="input/output error; 1 of 3 files are replaced"):
        rename_field(discover_dataset(folder), "mine", "yours")
    monkeypatch.undo()
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    assert rename_field(discover_dataset(folder), "mine", "yours") == 24


def test_one_shard_is_in_memory_at_a_time(folder, monkeypatch):
    alive, most = set(), []
    real = rewriting.rename_in_index

    def watched(payload, *args, **further):
        alive.add(id(payload))
        most.append(len(alive))
        edited = real(payload, *args, **further)
        alive.discard(id(payload))
        return edited

    monkeypatch.setattr(rewriting, "rename_in_index", watched)
    rename_field(discover_dataset(folder), "mine", "yours")
    assert most == [1, 1, 1]


def test_captions_coalesced_into_the_metadata_cache_are_there_for_the_next_dataset_too_until_it_is_cleared(tmp_path):
    write_shard(tmp_path / "d" / "a.tar", [("a.jpg", b"1"), ("a.txt", b"said")])
    index_dataset(tmp_path / "d", captions=False, workers=0)

    def captions(dataset):
        return dataset.files(0).captions(0)

    first = discover_dataset(tmp_path / "d")
    first.enable_metadata_cache(tmp_path / "cache")
    assert captions(first) is None
    assert coalesce_captions(first)["coalesced_samples"] == 1
    assert captions(first) == "said"
    second = discover_dataset(tmp_path / "d")
    assert captions(second) is None
    second.enable_metadata_cache(tmp_path / "cache", init_shard_count=1)
    assert captions(second) == "said"
    second.clear_metadata_cache()
    assert captions(second) is None
