"""Sets of TFRecord shards by their names: counts, globs, folders, and what is said of sets that are not whole."""

from __future__ import annotations

import logging

import pytest

from shardset.dataset.discover import find_shards
from shardset.errors import NotFoundError
from shardset.policy import Report
from shardset.storage import MemoryStore


@pytest.fixture
def folder(tmp_path):
    def make(*names):
        for name in names:
            (tmp_path / name).write_bytes(b"x")
        return tmp_path

    return make


def names_of(found):
    return [shard.url.rpartition("/")[2] for shard in found.shards]


def numbered(count, prefix="train", suffix=""):
    return [f"{prefix}-{number:05d}-of-{count:05d}{suffix}" for number in range(count)]


def test_a_folder_gives_tfrecord_shards_of_every_spelling(folder):
    shards = ["a.tfrecord", "b.tfrecords.gz", "c.tfrec", "d_tfrecord-00000-of-00001.gz", "e.tar", "f-00000-of-00001"]
    root = folder(*shards, "a.tfrecord.json", "a.tfrecord.idx", "g-00000-of-00001.parquet", "h.array_record", "x.txt")
    found = find_shards(root)
    assert names_of(found) == shards
    assert [shard.name for shard in found.shards] == [name.removesuffix(".tar") for name in shards]


def test_a_count_stands_for_all_shards_of_a_set(folder):
    root = folder(*numbered(3), *numbered(2, "eval", ".tfrecord.gz"))
    assert names_of(find_shards(f"{root}/train@3")) == numbered(3)
    assert names_of(find_shards(f"{root}/eval@2.tfrecord.gz")) == numbered(2, "eval", ".tfrecord.gz")
    assert names_of(find_shards(f"{root}/train@*")) == numbered(3)
    assert names_of(find_shards(f"{root}/eval@*.tfrecord.gz")) == numbered(2, "eval", ".tfrecord.gz")


def test_a_count_without_a_suffix_finds_the_one_set_that_has_one(folder):
    root = folder(
        *numbered(3, suffix=".tfrecord"), *numbered(4, suffix=".tfrecord.gz")[:3], "train-00000-of-00003.json"
    )
    assert names_of(find_shards(f"{root}/train@3")) == numbered(3, suffix=".tfrecord")
    with pytest.raises(NotFoundError, match=r"1 of 4 shards are missing: train-00003-of-00004.tfrecord.gz"):
        find_shards(f"{root}/train@4")
    with pytest.raises(NotFoundError, match="5 of 5"):
        find_shards(f"{root}/train@5")


def test_compressed_files_whose_names_tell_nothing_are_counted(folder):
    report = Report()
    root = folder("a.tfrecord", "data.gz", "b.tar.gz", "c.txt")
    assert names_of(find_shards(root, report=report)) == ["a.tfrecord"]
    assert report.counts == {"compressed_shard": 1, "unknown_name": 1}


@pytest.mark.parametrize("source", ["train@4", "train@*"])
def test_shards_of_a_set_that_are_missing_are_named(folder, source):
    root = folder("train-00000-of-00004", "train-00002-of-00004")
    with pytest.raises(NotFoundError, match="2 of 4 shards are missing: train-00001-of-00004, train-00003-of-00004"):
        find_shards(f"{root}/{source}")


def test_a_count_that_fits_several_sets_is_refused(folder):
    root = folder(*numbered(2), *numbered(3))
    with pytest.raises(ValueError, match=r"2 sets of shards: train-\.\.\.-of-00002, train-\.\.\.-of-00003"):
        find_shards(f"{root}/train@*")
    assert names_of(find_shards(f"{root}/train@2")) == numbered(2)


def test_nothing_of_the_name_is_an_error(folder):
    root = folder("other.tfrecord")
    for source in ("train@*", "train@2"):
        with pytest.raises(NotFoundError):
            find_shards(f"{root}/{source}")
    with pytest.raises(ValueError, match="0 shards"):
        find_shards(f"{root}/train@0")


def test_a_file_of_such_a_name_comes_first(folder):
    root = folder("train@2")
    assert names_of(find_shards(f"{root}/train@2")) == ["train@2"]


def test_sets_that_are_not_whole_or_not_alone_are_counted_and_said(folder, caplog):
    root = folder(*numbered(3)[:2], *numbered(2))
    (root / "train-00001-of-00002").write_bytes(b"")
    report = Report()
    with caplog.at_level(logging.WARNING):
        find_shards(root, report=report)
    assert report.counts == {"empty_shard": 1, "incomplete_set": 1, "mixed_sets": 1}
    assert "train-00002-of-00003" in caplog.text
    assert "2 and 3" in caplog.text


def test_shards_come_by_number(folder):
    root = folder("x-00010-of-100000", "x-99999-of-100000", "x-100000-of-100000", "x-000002-of-100000")
    order = ["x-000002-of-100000", "x-00010-of-100000", "x-99999-of-100000", "x-100000-of-100000"]
    assert names_of(find_shards(root)) == order
    assert names_of(find_shards(f"{root}/x-*")) == order


def test_sets_are_found_anywhere():
    store = MemoryStore()
    for name in numbered(2, "memory://r/train", ".tfrecord"):
        store.write(name, b"x")
    assert len(find_shards("memory://r/train@2.tfrecord", store=store).shards) == 2
    assert len(find_shards("memory://r/train@*.tfrecord", store=store).shards) == 2
    assert len(find_shards("memory://r", store=store).shards) == 2
    with pytest.raises(NotFoundError, match="3 of 3"):
        find_shards("memory://r/train@3.tfrecord", store=store)
