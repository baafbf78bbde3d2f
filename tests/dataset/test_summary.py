"""Numbers about a dataset's shards: what is known at once, and what is read."""

from __future__ import annotations

import pytest

from servers.faulty import FaultServer
from shards import make_members, private_cache, tar_bytes, write_dataset  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.storage import LocalStore
from storage.counting import CountingStore

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "d", shards=3, samples=4)
    write_dataset(tmp_path / "d" / "sub", shards=1, samples=2)
    return tmp_path / "d"


def test_what_is_known_at_once_reads_nothing(folder):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    store.reset()
    names = ["shard-0000", "shard-0001", "shard-0002", "sub/shard-0000"]
    details = [{"index": number, "name": name, "metadata_loaded": False} for number, name in enumerate(names)]
    assert dataset.get_stats() == {"total_shards": 4, "from_cache": False, "shard_details": details}
    assert dataset.quick_stats() == (None, None)
    assert dataset.total_size == sum(path.stat().st_size for path in folder.rglob("*.tar"))
    assert not store.calls
    dataset.files(2)
    size = (folder / "shard-0002.tar").stat().st_size
    details[2] |= {"metadata_loaded": True, "num_files": 12, "size": size}
    assert dataset.get_stats()["shard_details"] == details


def test_detailed_numbers_are_of_every_shard(folder):
    stats = discover_dataset(folder).get_detailed_stats()
    sizes = [path.stat().st_size for path in sorted(folder.rglob("*.tar"))]
    assert stats == {
        "total_shards": 4,
        "total_files": 42,
        "total_size": sum(sizes),
        "total_size_gb": sum(sizes) / GIB,
        "average_files_per_shard": 10.5,
        "average_size_per_shard": sum(sizes) / 4,
        "average_size_per_shard_mb": sum(sizes) / 4 / MIB,
        "min_files_in_shard": 6,
        "max_files_in_shard": 12,
        "shard_details": [
            {"index": number, "name": name, "num_files": files, "size": size, "size_mb": size / MIB}
            for number, (name, files, size) in enumerate(
                zip(["shard-0000", "shard-0001", "shard-0002", "sub/shard-0000"], [12, 12, 12, 6], sizes, strict=True)
            )
        ],
        "from_cache": False,
    }


def test_of_shards_elsewhere_the_bytes_are_known_and_the_files_once_all_were_looked_into():
    with FaultServer() as server:
        for number in range(2):
            server.put(f"/d/{number}.tar", tar_bytes(make_members(4, start=4 * number)))
        dataset = discover_dataset(server.url + "d")
        size = dataset.total_size
        assert dataset.quick_stats() == (size, None)
        stats = dataset.get_stats()
        assert (stats["total_size"], stats["total_size_gb"], stats["from_cache"]) == (size, size / GIB, True)
        assert "total_files" not in stats
        dataset.load_files(range(2))
        assert dataset.quick_stats() == (size, 24)
        stats = dataset.get_stats()
        assert (stats["total_files"], stats["average_files_per_shard"]) == (24, 12.0)


def test_a_summary_is_printed(folder, capsys):
    dataset = discover_dataset(folder)
    for detailed in (None, False):
        dataset.print_summary(detailed)
        printed = capsys.readouterr().out
        assert "Total shards: 4" in printed
        assert "shard-0001" not in printed
    dataset.print_summary(detailed=True)
    printed = capsys.readouterr().out
    assert "Total files: 42" in printed
    assert [line.split() for line in printed.splitlines() if line.startswith("sub/")] == [
        ["sub/shard-0000", "0.01", "6"]
    ]


def test_some_of_the_shards_are_a_dataset_of_their_own(folder):
    dataset = discover_dataset(folder)
    some = dataset.subset([3, 0])
    assert [some.info(number).name for number in range(some.num_shards)] == ["sub/shard-0000", "shard-0000"]
    assert some.total_files == 18
    assert len(some) == 6
    assert len(dataset) == 14
    assert some[0].key == dataset[12].key
    with pytest.raises(IndexError):
        dataset.subset([4])
