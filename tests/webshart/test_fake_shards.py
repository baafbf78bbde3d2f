"""What programs' own tests do: an index is real, its tar is a few made-up bytes, and the module has another name."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest

from shards import make_members, private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset import webshart as namespace
from shardset.errors import IndexFileError, NotFoundError, StateError
from shardset.policy import Policy
from shardset.tasks import index_dataset


@pytest.fixture
def webshart(monkeypatch):
    """The namespace under webshart's name, as a suite of tests would import it."""
    monkeypatch.setitem(sys.modules, "webshart", namespace)
    for name in ("_webshart", "cache_wait", "optimize"):
        monkeypatch.setitem(sys.modules, f"webshart.{name}", importlib.import_module(f"shardset.webshart.{name}"))
    return importlib.import_module("webshart")


def write_index(folder, name, count, *, size=1000, width=None, layout=dict, tar=b"mock tar data"):
    """Write an index of `count` files of `size` bytes, and something in place of its shard."""
    files = {}
    for number in range(count):
        entry = {"offset": 512 + number * 2048, "length": size}
        if width:
            entry |= {"width": width + number, "height": width}
        files[f"file_{number:04d}.jpg"] = entry
    if layout is list:
        files = [{"path": path, **entry} for path, entry in files.items()]
    path = folder / f"{name}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar)
    document = {"path": path.name, "filesize": 2_000_000, "files": files}
    path.with_suffix(".json").write_text(json.dumps(document))


@pytest.fixture
def folder(tmp_path):
    for shard in range(3):
        write_index(tmp_path / "d", f"shard_{shard:04d}", 10, width=100)
    return str(tmp_path / "d")


def test_names_counts_and_sizes_are_those_of_the_indexes(webshart, folder):
    dataset = webshart.discover_dataset(folder)
    assert (dataset.name, dataset.num_shards, dataset.is_remote) == (folder, 3, False)
    assert "shards=3" in repr(dataset)
    assert dataset.quick_stats() == (None, None)
    assert not any(detail["metadata_loaded"] for detail in dataset.get_stats()["shard_details"])
    assert (dataset.total_files, dataset.total_size) == (30, 6_000_000)
    stats = dataset.get_detailed_stats()
    assert (stats["total_files"], stats["total_size"], stats["average_files_per_shard"]) == (30, 6_000_000, 10.0)
    assert dataset.get_shard_by_name("shard_0001") == dataset.get_shard_info(1)
    assert dataset.get_shard_info(1)["size"] == 2_000_000
    assert dataset.find_file_location(25) == (2, 5)
    assert dataset.open_shard(0).filenames() == [f"file_{number:04d}.jpg" for number in range(10)]


@pytest.mark.parametrize("layout", [dict, list])
def test_files_are_gone_through_without_their_data(webshart, tmp_path, layout):
    write_index(tmp_path, "one", 4, layout=layout)
    loader = webshart.TarDataLoader(str(tmp_path), load_file_data=False)
    assert [(entry.path, entry.offset, entry.size, entry.data) for entry in loader] == [
        (f"file_{number:04d}.jpg", 512 + number * 2048, 1000, b"") for number in range(4)
    ]
    assert loader.get_metadata(0)["file_0002.jpg"] == {"path": "file_0002.jpg", "offset": 4608, "length": 1000}


def test_ranges_batches_and_states_do_without_data_too(webshart, folder):
    loader = webshart.TarDataLoader(folder, load_file_data=False, batch_size=4, buffer_size=5)
    loader.set_ranges([(8, 12), (28, 30)])
    assert [entry.job_id for entry in loader] == [
        *("shard0000_file000008", "shard0000_file000009", "shard0001_file000000", "shard0001_file000001"),
        *("shard0002_file000008", "shard0002_file000009"),
    ]
    loader.skip(15)
    assert [len(batch) for batch in loader.iter_batches()] == [4, 4, 4, 3]
    loader.shard(filename="shard_0001", cursor_idx=5)
    assert loader.get_state_summary()["progress_percent"] == 50.0
    state = loader.state_dict()
    assert state["version"] == 4
    again = webshart.TarDataLoader.from_state_dict(state)
    assert (again.current_shard_index, again.current_file_index, again.batch_size) == (1, 5, 4)
    with pytest.raises(StateError, match="Unsupported state dict version: 999"):
        again.load_state_dict({**state, "version": 999})


def test_buckets_are_those_of_the_index(webshart, folder):
    loader = webshart.TarDataLoader(folder)
    buckets = loader.list_shard_sample_aspect_buckets([2], key="geometry-tuple")[0]["buckets"]
    assert list(buckets) == [f"({100 + number}, 100)" for number in range(10)]
    assert sum(1 for _ in loader.list_all_aspect_buckets("aspect")) == 3
    assert len(list(webshart.BucketDataLoader(folder, load_file_data=False))) == 30


def test_data_that_is_not_there_raises_and_a_policy_gives_empty_data_instead(webshart, folder):
    with pytest.raises(IndexFileError, match="2000000 bytes, this one has 13 and is no tar"):
        next(webshart.TarDataLoader(folder))
    dataset = webshart.discover_dataset(folder)
    lenient = webshart.TarDataLoader(dataset, policy=Policy("skip", defaults={"data": b""}))
    assert [(entry.size, entry.data) for entry in lenient] == [(1000, b"")] * 30
    assert dataset.report.counts["read_failed"] == 30
    assert list(webshart.TarDataLoader(dataset, policy=Policy("skip"))) == []


# ---- discovery


def test_shards_have_the_numbers_that_webshart_gives_them(webshart, folder, tmp_path, caplog):
    """webshart leaves out shards that have no index; here they are, where none has one."""
    for name in ("shard_0000a", "sub/other"):
        write_shard(tmp_path / "d" / f"{name}.tar", make_members(2))
    dataset = webshart.discover_dataset(folder)
    assert [dataset.info(number).name for number in range(dataset.num_shards)] == [
        f"shard_{number:04d}" for number in range(3)
    ]
    assert dataset.report.counts["no_index"] == 2
    assert "2 shards without an index are left out" in caplog.text
    bare = webshart.discover_dataset(str(tmp_path / "d" / "sub"))
    assert bare.list_samples_in_shard(0) == ["00000000.jpg", "00000001.jpg"]


def test_a_subfolder_and_a_folder_of_indexes_are_obeyed(webshart, tmp_path):
    for side in ("a", "b"):
        write_shard(tmp_path / "data" / side / "x.tar", make_members(2, prefix=f"{side}-"))
    index_dataset(tmp_path / "data" / "b", destination=tmp_path / "indexes", workers=0)
    dataset = webshart.discover_dataset(tmp_path / "data", subfolder="b", metadata=tmp_path / "indexes")
    assert dataset.list_samples_in_shard(0) == ["b-00000000.jpg", "b-00000001.jpg"]
    assert dataset.get_shard_info(0)["json_path"] == str(tmp_path / "indexes" / "x.json")
    state = webshart.TarDataLoader(dataset).state_dict()
    assert (state["source"], state["subfolder"]) == (str(tmp_path / "data"), "b")
    assert next(webshart.TarDataLoader.from_state_dict(state)).path == "b-00000000.jpg"


def test_what_is_not_there_is_said_to_be_missing(webshart, tmp_path):
    with pytest.raises(NotFoundError, match="No shards found in dataset"):
        webshart.DatasetDiscovery().discover_local(str(tmp_path))
    with pytest.raises(NotFoundError, match="no such file"):
        webshart.discover_dataset(str(tmp_path / "none"))


def test_a_name_of_two_parts_that_is_no_path_is_a_dataset_of_the_hub(webshart, monkeypatch):
    asked = []

    class Watched(namespace.DatasetDiscovery):
        def discover_huggingface(self, repo_id, subfolder=None):
            asked.append((repo_id, subfolder))

    monkeypatch.setattr(namespace, "DatasetDiscovery", Watched)
    webshart.discover_dataset("owner/name", subfolder="sub")
    assert asked == [("owner/name", "sub")]


# ---- waiting with progress


class Loader:
    """A loader whose first shard comes in three steps."""

    def __init__(self):
        self.looks = 0

    def will_block(self):
        return self.looks < 3

    def get_next_shard_info(self):
        return {"name": "s"}

    def get_shard_cache_status(self, name):
        self.looks += 1
        return {"name": name, "cur_filesize": 10 * self.looks, "total_size": 30}

    def prepare_next_shard(self):
        return True

    def __iter__(self):
        return iter("ab")


@pytest.fixture
def bars(monkeypatch):
    """Every progress bar that was made: its arguments, and what was done with it."""
    made = []

    def tqdm(**settings):
        bar = SimpleNamespace(settings=settings, steps=[], closed=0)
        bar.update = bar.steps.append
        bar.close = lambda: setattr(bar, "closed", bar.closed + 1)
        made.append(bar)
        return bar

    module = ModuleType("tqdm")
    module.tqdm = tqdm
    monkeypatch.setitem(sys.modules, "tqdm", module)
    return made


def test_progress_is_that_of_files_and_of_the_download_that_is_waited_for(webshart, bars):
    with webshart.CacheWaitContext(Loader(), lookahead=0) as context:
        assert list(context.iterate()) == ["a", "b"]
    files, download = bars
    assert files.steps == [1, 1]
    assert sum(download.steps) == 30
    assert download.settings["total"] == 30
    assert (bool(files.closed), bool(download.closed)) == (True, True)


def test_without_tqdm_there_is_no_progress_and_no_trouble(webshart, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with webshart.CacheWaitContext(Loader()) as context:
        assert list(context.iterate()) == ["a", "b"]


def test_an_interrupt_closes_the_bars_and_goes_on_being_one(webshart, bars):
    def interrupt():
        with webshart.CacheWaitContext(Loader()) as context:
            for _ in context.iterate():
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert all(bar.closed for bar in bars)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
