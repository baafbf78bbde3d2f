"""Single shards of a dataset: their readers and files, how many are kept, and what leads nowhere."""

from __future__ import annotations

import pytest

from servers.faulty import FaultServer
from shards import make_members, private_cache, tar_bytes, write_dataset  # noqa: F401 - the fixture is autouse
from shardset.dataset import kept_files
from shardset.dataset import shards as module
from shardset.dataset.opening import discover_dataset, open_dataset
from shardset.errors import ChangedError, FormatError, IndexFileError
from shardset.loading.cursor import TarDataLoader
from shardset.policy import Policy
from shardset.storage import LocalStore
from shardset.tasks import index_dataset
from storage.counting import CountingStore


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "d", shards=3, samples=4)
    return tmp_path / "d"


def test_a_reader_is_made_once_and_anew_when_a_cache_comes_before_it(folder, tmp_path):
    dataset = discover_dataset(folder)
    first = dataset.reader(0)
    assert dataset.reader(0) is first
    dataset.enable_shard_cache(tmp_path / "cache")
    cached = dataset.reader(0)
    assert cached is not first
    assert cached.read(0, 512) == first.read(0, 512)
    assert dataset.cache.is_cached(0)


def test_only_so_many_readers_and_indexes_are_kept(folder, monkeypatch):
    monkeypatch.setattr(module, "files_kept", lambda: 2)
    monkeypatch.setattr(kept_files, "COLUMN_ROWS", 24)
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    for _ in range(3):
        assert [len(dataset.list_files_in_shard(number)) for number in range(3)] == [12, 12, 12]
    assert len(dataset._readers) <= 2
    assert len(dataset._files) == 2
    store.reset()
    dataset.list_files_in_shard(2)
    assert not store.ranges


def test_lists_are_kept_of_so_many_files_and_made_again_when_they_are_asked_for(folder, monkeypatch):
    monkeypatch.setattr(kept_files, "LIST_ROWS", 24)
    dataset = discover_dataset(folder)
    loader = TarDataLoader(dataset, max_file_size=20)
    for _ in range(2):
        for number in range(3):
            assert dataset.list_samples_in_shard(number) == [f"{n:08d}.jpg" for n in range(4 * number, 4 * number + 4)]
            assert len(loader.list_samples_in_shard(number)) == 4
        made = [number for number in range(3) if "names" in vars(dataset.loaded_files(number))]
        assert made == [1, 2]
    assert [dataset.loaded_files(number).index.num_files for number in range(3)] == [12] * 3


@pytest.mark.parametrize("number", [-1, 3, 10**9])
def test_a_number_that_leads_nowhere_is_an_index_error_that_says_how_many_there_are(folder, number):
    dataset = discover_dataset(folder)
    for call in (
        *(dataset.reader, dataset.files, dataset.shard_url, dataset.get_shard_info, dataset.list_files_in_shard),
        *(dataset.open_shard, dataset.get_shard_file_count, dataset.get_shard_sample_count),
    ):
        with pytest.raises(IndexError, match="has 3 shards"):
            call(number)


def test_shards_are_found_by_name_and_the_rest_is_refused(folder):
    dataset = discover_dataset(folder)
    assert dataset.shard_number("shard-0002") == 2
    assert dataset.get_shard_by_name("shard-0001") == dataset.get_shard_info(1)
    for name in ("shard-0001.tar", "", "shard", "../d/shard-0001"):
        with pytest.raises(ValueError, match="not found"):
            dataset.shard_number(name)


def test_the_infos_of_a_dataset_opened_by_its_catalog_are_those_of_the_dataset_itself():
    with FaultServer() as server:
        for number in range(3):
            server.put(f"/d/{number}.tar", tar_bytes(make_members(4, start=4 * number)))
        dataset = discover_dataset(server.url + "d")
        again = open_dataset(dataset.catalog.folder)
        assert [again.get_shard_info(n) for n in range(3)] == [dataset.get_shard_info(n) for n in range(3)]
        assert again.find_file_location(13) == dataset.find_file_location(13) == (1, 1)
        assert again.total_size == dataset.total_size
        assert again.shard_number("2") == 2
        with pytest.raises(IndexError, match="36"):
            again.find_file_location(36)


def test_files_are_counted_through_the_catalog_without_reading_shards(folder):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    len(dataset)
    store.reset()
    assert dataset.find_file_location(35) == (2, 11)
    assert not store.calls


def test_an_index_is_read_through_the_cache_where_the_shard_is_there_and_not_downloaded_for_it(tmp_path):
    with FaultServer() as server:
        for number in range(2):
            server.put(f"/d/{number}.tar", tar_bytes([("a.bin", bytes(16_000_000)), *make_members(4)]))
        dataset = discover_dataset(server.url + "d")
        dataset.enable_shard_cache(tmp_path)
        assert dataset.list_files_in_shard(0)[-1] == "a.bin"
        assert not dataset.cache.is_cached(0)
        assert sum(request.sent for request in server.requests()) < 8_000_000
        dataset.reader(1).read(0, 1)
        assert dataset.cache.is_cached(1)
        server.forget()
        assert len(dataset.list_files_in_shard(1)) == 13
        assert not server.requests("GET", "*.tar")


def test_a_shard_that_is_another_one_is_not_read_with_an_old_index():
    with FaultServer() as server:
        server.put("/d/0.tar", tar_bytes(make_members(4)))
        dataset = discover_dataset(server.url + "d", policy=Policy(on_error="skip"))
        server.put("/d/0.tar", tar_bytes(make_members(4, start=9)))
        with pytest.raises(ChangedError, match=r"0\.tar"):
            dataset.list_files_in_shard(0)


# ---- an index beside what is no tar


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234567\n"


@pytest.fixture(params=[POINTER, b"", b"x" * 5000], ids=["pointer", "empty", "noise"])
def pointers(folder, request):
    """The folder, with indexes, where two of the three shards are no tars."""
    index_dataset(folder, workers=0)
    for number in (0, 2):
        (folder / f"shard-000{number}.tar").write_bytes(request.param)
    return folder


def test_what_an_index_says_can_be_had_without_its_shard_but_nothing_is_read(pointers):
    dataset = discover_dataset(pointers)
    assert [dataset.get_shard_file_count(number) for number in range(3)] == [12, 12, 12]
    assert dataset.list_samples_in_shard(0) == [f"{n:08d}.jpg" for n in range(4)]
    assert dataset.total_files == dataset.get_detailed_stats()["total_files"] == 36
    size = (pointers / "shard-0001.tar").stat().st_size
    assert dataset.get_shard_info(2)["size"] == size
    loader = TarDataLoader(dataset)
    assert loader.load_sample(1, 0).data.startswith(b"00000004.jpg")
    reader = dataset.open_shard(0)
    for read in (
        lambda: loader.load_sample(0, 0),
        lambda: loader.load_samples([(0, 0)]),
        lambda: next(loader),
        lambda: reader.read_file(0),
        lambda: reader.read_sample(0),
        lambda: reader.read_sample_json(0),
    ):
        with pytest.raises(IndexFileError, match="is no tar") as caught:
            read()
        assert caught.value.path.endswith("shard-0000.tar")
        assert "download" in caught.value.hint
    assert len(list(TarDataLoader(dataset, load_file_data=False))) == 36


def test_the_bytes_of_pointers_are_those_that_their_indexes_state(folder):
    index_dataset(folder, workers=0)
    total = discover_dataset(folder).total_size
    for number in range(3):
        (folder / f"shard-000{number}.tar").write_bytes(POINTER)
    assert discover_dataset(folder).total_size == total


def test_a_shard_that_was_cut_is_no_pointer(folder):
    index_dataset(folder, workers=0)
    path = folder / "shard-0001.tar"
    path.write_bytes(path.read_bytes()[:2565])
    with pytest.raises(FormatError):
        discover_dataset(folder).get_shard_file_count(1)
    assert discover_dataset(folder, policy=Policy("skip")).get_shard_file_count(1) < 12
