"""The namespace itself: every name, found when it is called; pairs, batches, and waiting for the cache."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

import shardset
import shardset.webshart as module
from shards import make_members, private_cache, write_shard  # noqa: F401 - a fixture
from shardset import index_dataset
from shardset.webshart import _webshart, cache_wait


@pytest.fixture
def folders(tmp_path):
    for side, start in (("left", 0), ("right", 0)):
        for shard in range(2):
            write_shard(tmp_path / side / f"s-{shard}.tar", make_members(3, start=start + 3 * shard))
        index_dataset(tmp_path / side, workers=0)
    return str(tmp_path / "left"), str(tmp_path / "right")


def test_its_submodules_are_there_and_the_loader_of_the_main_module_is_the_same():
    assert _webshart.TarDataLoader is module.TarDataLoader is shardset.TarDataLoader
    assert _webshart.scale_dimensions(1920, 1080, 1024**2) == (1344, 768)
    assert cache_wait.CacheWaitContext is module.CacheWaitContext
    assert module.DiscoveredDataset is shardset.DiscoveredDataset


def test_importing_it_brings_in_nothing_heavy():
    program = (
        "import sys, shardset.webshart; print(sorted({'torch', 'obstore', 'PIL', 'tqdm', 'pycurl'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_name_that_was_replaced_is_used_by_those_that_call_it(folders, monkeypatch):
    seen = []
    discover = module.discover_dataset

    def watched(source, *args, **kwargs):
        seen.append(source)
        return discover(source, *args, **kwargs)

    monkeypatch.setattr(module, "discover_dataset", watched)
    assert module.discover_paired_dataset(*folders).num_pairs == 6
    assert len(module.discover_datasets_batch([folders[0]])) == 1
    assert len(module.BatchProcessor().process_dataset(folders[1], max_files=2)) == 2
    assert seen == [*folders, folders[0], folders[1]]

    loaders = []

    class Watched(module.TarDataLoader):
        def __init__(self, *args, **kwargs):
            loaders.append(kwargs)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(module, "TarDataLoader", Watched)
    module.PairedTarDataLoader(module.discover_paired_dataset(*folders), load_file_data=False)
    assert loaders == [{"load_file_data": False}] * 2


def test_the_token_of_the_environment_goes_where_discovery_is_made(folders, monkeypatch):
    made = []

    class Watched(module.DatasetDiscovery):
        def __init__(self, **kwargs):
            made.append(kwargs)
            super().__init__(**kwargs)

    monkeypatch.setattr(module, "DatasetDiscovery", Watched)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    module.discover_dataset(folders[0])
    module.discover_dataset(folders[0], hf_token="hf_given", metadata=folders[0])
    assert made == [
        {"hf_token": "hf_of_the_environment", "metadata_source": None},
        {"hf_token": "hf_given", "metadata_source": folders[0]},
    ]


def test_pairs_come_in_the_order_of_the_left_side(folders):
    paired = module.discover_paired_dataset(*folders)
    assert [pair.key for pair in paired.list_pairs()] == [f"{number:08d}" for number in range(6)]
    assert paired.get_pair(-1) == module.SamplePair(
        "00000005", module.SampleLocation(1, 2, "00000005.jpg"), module.SampleLocation(1, 2, "00000005.jpg")
    )
    with pytest.raises(IndexError):
        paired.get_pair(6)
    loader = module.PairedTarDataLoader(paired)
    assert len(loader) == 6
    assert [loaded.left.data == loaded.right.data for loaded in loader.iter_pairs(2, 4)] == [True, True]
    small = module.PairedTarDataLoader(paired, max_file_size=3).load_pair(0)
    assert (small.left, small.right) == (None, None)


def test_a_key_that_occurs_twice_on_a_side_is_named(tmp_path):
    write_shard(tmp_path / "a.tar", [("k.jpg", b"1"), ("k.png", b"2")])
    with pytest.raises(ValueError, match=r"duplicate pair key on left: 'k'.*k\.jpg.*k\.png"):
        _ = module.discover_paired_dataset(str(tmp_path), str(tmp_path)).num_pairs
    paired = module.discover_paired_dataset(str(tmp_path), str(tmp_path), pair_key=str)
    assert paired.num_pairs == 2


def test_batches_give_none_for_what_fails_and_count_it(folders, tmp_path, caplog):
    left, right = map(module.discover_dataset, folders)
    found = module.discover_datasets_batch([folders[0], str(tmp_path / "no"), folders[1]])
    assert [dataset and dataset.num_shards for dataset in found] == [2, None, 2]
    assert "no" in caplog.text
    whole = [left.open_shard(1).read_file(number) for number in range(9)]
    assert module.read_files_batch(left, [(1, 8), (0, 99), (1, 0), (7, 0)]) == [whole[8], None, whole[0], None]
    assert left.report.counts["read_failed"] == 2
    assert module.read_files_batch([left, right, left], [(2, 1, 3), (1, 0, 0), (5, 0, 0)])[0] == whole[3]
    answers = module.BatchOperations().load_metadata_batch(left, [0, 5])
    assert answers[0] is True
    assert "out of range" in answers[1]["error"]
    lengths = module.BatchProcessor().process_dataset(folders[0], batch_size=4, callback=len)
    assert len(lengths) == 18
    assert sum(lengths) == sum(len(entry.data) for entry in module.TarDataLoader(left))


class SlowLoader:
    """A loader whose second shard is there after some looks."""

    def __init__(self):
        self.given, self.looks, self.prepared = 0, 0, []

    def will_block(self):
        return self.given == 2 and self.looks < 3

    def get_next_shard_info(self):
        return {"index": 1, "name": "s-1", "size": 300}

    def get_shard_cache_status(self, name):
        self.looks += 1
        return {"name": name, "cur_filesize": 100 * self.looks, "is_cached": self.looks >= 3}

    def prepare_next_shard(self):
        self.prepared.append(self.given)
        return True

    def prepare_shard_by_name(self, name):
        self.prepared.append(name)
        return True

    def is_shard_locked(self, name):
        del name
        return self.looks < 3

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == 4:
            raise StopIteration
        self.given += 1
        return self.given


@pytest.mark.filterwarnings("ignore")
def test_a_context_waits_for_the_shard_that_comes_next_and_puts_the_signal_back():
    before = signal.getsignal(signal.SIGINT)
    loader = SlowLoader()
    with module.CacheWaitContext(loader, lookahead=2, progress_bar=False) as context:
        assert signal.getsignal(signal.SIGINT) != before
        assert list(context.iterate()) == [1, 2, 3, 4]
    assert signal.getsignal(signal.SIGINT) == before
    assert loader.prepared == [2, 2, 2]


def test_files_are_given_one_by_one_after_waits():
    assert list(module.iter_with_cache_wait(SlowLoader(), 10, 12)) == [1, 2, 3]
    loader = SlowLoader()
    assert [module.next_with_cache_wait(loader) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        module.next_with_cache_wait(loader)


def test_a_monitor_tells_how_far_a_download_is():
    async def watch():
        return [state async for state in cache_wait.ShardCacheMonitor(SlowLoader()).wait_for_shard_async("s-1", 0.001)]

    states = asyncio.run(watch())
    assert [state["downloaded"] for state in states] == [100, 200, 300]
    assert [state["done"] for state in states] == [False, False, True]
    loader, told = SlowLoader(), []
    loader.given = 2
    cache_wait.ShardCacheMonitor(loader).wait_for_next_shard(lambda came, here: told.append((came, here)))
    assert told[-1][1] == 300
    assert sum(came for came, _ in told) == 300
