"""What users of webdataset lost samples, time or safety to, by the number of their report, and what happens here.

Reports 172, 190, 301 and 303, which need torch, are in peers/test_with_torch.py.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tarfile
import time
from pathlib import Path

import pytest

import shardset.webdataset as wds
from shards import make_members, tar_bytes, write_dataset, write_shard
from shardset.errors import DecodeError, FormatError, NoSamplesError, NotFoundError, StorageError, TruncatedError
from shardset.pipeline.run import unpack_origins
from shardset.policy import Policy
from shardset.storage.memory import MemoryStore


def keys(samples):
    return [sample["__key__"] for sample in samples]


def children():
    """Return the command lines of this machine's processes that mention something."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_bytes().decode("utf-8", "replace"))
        except OSError:
            continue
    return found


def test_237_a_dot_in_a_name_begins_the_field_and_no_writer_of_ours_makes_such_a_key(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("Track 2.0.mp3", b"x")])
    (sample,) = wds.WebDataset(str(path))
    assert (sample["__key__"], sample["0.mp3"]) == ("Track 2", b"x")
    with wds.TarWriter(str(tmp_path / "b.tar")) as writer, pytest.raises(ValueError, match="dot"):
        writer.write({"__key__": "Track 2.0", "mp3": b"x"})


def test_407_members_that_do_not_stand_together_are_an_error(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.x", b""), ("b.x", b""), ("a.y", b""), ("b.y", b"")])
    with pytest.raises(FormatError, match=r"'a' comes back with member 'a\.y'"):
        list(wds.WebDataset(str(path)))


def test_157_the_border_of_a_shard_ends_a_sample_after_an_error_too(tmp_path):
    first = tmp_path / "1.tar"
    first.write_bytes(tar_bytes([("a.jpg", b"1" * 1000), ("b.jpg", b"2" * 2000)])[:3000])
    second = write_shard(tmp_path / "2.tar", [("a.txt", b"3")])
    third = write_shard(tmp_path / "3.tar", [("a.txt", b"4")])
    dataset = wds.WebDataset([str(first), str(second), str(third)], handler=wds.ignore_and_continue)
    assert [sorted(set(sample) - {"__url__", "__local_path__"}) for sample in dataset] == [["__key__", "txt"]] * 2


def test_384_no_marker_of_ours_comes_out_of_a_public_stage(tmp_path):
    paths = [str(path) for path in write_dataset(tmp_path, shards=2, samples=2, fields=("txt",))]
    opened = wds.tariterators.url_opener({"url": path} for path in paths)
    files = list(wds.tariterators.tar_file_expander(opened))
    assert len(files) == 4
    assert all({"fname", "data", "__url__"} == set(file) for file in files)
    grouped = list(wds.tariterators.group_by_keys([{**file, "fname": "k.txt"} for file in files[1:3]]))
    assert [sample["__url__"] for sample in grouped] == paths  # the url ends a sample, without any marker


def test_142_a_shard_that_was_cut_says_where(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(make_members(9))[:4200])
    with pytest.raises(TruncatedError) as caught:
        list(wds.WebDataset(str(path)))
    assert caught.value.shard == str(path)
    assert str(caught.value.offset) in str(caught.value)


@pytest.mark.parametrize(
    "command",
    ["head -c 3000 {0}; exit 3", "cat {0}; exit 3", "cat {0}.none", "cat {0}.none | cat -"],
    ids=["cut", "whole", "none", "hidden"],
)
def test_473_a_command_that_fails_is_an_error_though_samples_came(tmp_path, command):
    path = write_shard(tmp_path / "a.tar", make_members(9, fields=("txt",)))
    found = []
    with pytest.raises((StorageError, FormatError)):
        found.extend(wds.WebDataset(f"pipe:{command.format(path)}"))
    assert keys(found) == keys(wds.WebDataset(str(path)))[: len(found)]
    after = wds.WebDataset([f"pipe:{command.format(path)}", str(path)], policy=Policy(on_error="skip"))
    assert len(list(after)) == len(found) + 9
    assert after.report()


def test_365_an_iterator_that_is_left_alone_leaves_no_process_and_does_not_wait(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(9))
    marker = f"{10_000_000 + os.getpid()}."
    begun = time.monotonic()
    for number in range(5):
        iterator = iter(wds.WebDataset(f"pipe:cat {path}; sleep {marker}{number}"))
        next(iterator)
        del iterator
    assert time.monotonic() - begun < 60
    deadline = time.monotonic() + 30
    while any(marker in line for line in children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [line for line in children() if marker in line]


def test_256_a_shuffle_buffer_can_be_bounded_in_bytes(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{number}.bin", bytes(100_000)) for number in range(50)])
    dataset = wds.WebDataset(str(path)).shuffle(1000, max_bytes=1_000_000)
    iterator = iter(dataset)
    next(iterator)
    held = unpack_origins(dataset.state_dict()["stages"][str(len(dataset.pipeline) - 1)]["held"])
    assert 5 <= len(held) <= 10
    assert len(list(iterator)) == 49


def test_502_each_epoch_has_an_order_of_its_own_that_repeats(tmp_path):
    paths = [str(path) for path in write_dataset(tmp_path, shards=12, samples=1)]
    dataset = wds.WebDataset(paths, shardshuffle=100)
    first, second = keys(dataset), keys(dataset)
    assert first != second
    assert [first, second] == [keys(other) for other in [wds.WebDataset(paths, shardshuffle=100)] * 2]


def test_299_a_worker_reads_other_shards_in_each_epoch(tmp_path, monkeypatch):
    paths = [str(path) for path in write_dataset(tmp_path, shards=12, samples=1)]
    monkeypatch.setenv("WORKER", "0")
    monkeypatch.setenv("NUM_WORKERS", "3")
    dataset = wds.WebDataset(paths, shardshuffle=True)
    assert len({tuple(sorted(keys(dataset))) for _ in range(4)}) > 1


def test_71_a_buffer_that_is_filled_first_mixes_the_beginning_too(tmp_path):
    path = write_shard(tmp_path / "a.tar", [(f"{number:04d}.x", b"") for number in range(400)])
    few = [int(key) for key in keys(wds.WebDataset(str(path)).shuffle(1000))][:50]
    full = [int(key) for key in keys(wds.WebDataset(str(path)).shuffle(1000, initial=1000))][:50]
    assert max(few) < 200
    assert max(full) > 300


def test_453_an_endless_stream_need_not_draw_with_replacement(tmp_path):
    paths = [str(path) for path in write_dataset(tmp_path, shards=10, samples=1)]
    drawn = keys(itertools.islice(wds.WebDataset(paths, resampled=True), 10))
    assert len(set(drawn)) < 10
    every = keys(itertools.islice(wds.WebDataset(paths, shardshuffle=True, repeat=True), 30))
    assert [len(set(every[start : start + 10])) for start in (0, 10, 20)] == [10, 10, 10]
    assert every[:10] != every[10:20]


def test_250_fewer_shards_than_workers_are_an_error_that_gives_the_numbers(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "a.tar", make_members(9))
    monkeypatch.setenv("WORKER", "4")
    monkeypatch.setenv("NUM_WORKERS", "5")
    with pytest.raises(NoSamplesError, match="1 shards cannot be shared by 5 processes"):
        list(wds.WebDataset(str(path)))


def test_271_a_run_goes_on_in_mid_epoch(tmp_path):
    paths = [str(path) for path in write_dataset(tmp_path, shards=4, samples=25)]
    first = wds.WebDataset(paths, shardshuffle=True).shuffle(20)
    begun = keys(itertools.islice(first, 37))
    second = wds.WebDataset(paths, shardshuffle=True).shuffle(20)
    second.load_state_dict(first.state_dict())
    assert begun + keys(second) == keys(wds.WebDataset(paths, shardshuffle=True).shuffle(20))


def test_251_a_dataset_with_a_length_pickles(tmp_path):
    dataset = wds.WebDataset(str(tmp_path / "a.tar")).with_length(5, silent=True)
    assert len(pickle.loads(pickle.dumps(dataset))) == 5


def test_402_shards_of_one_name_in_two_folders_do_not_meet_in_the_cache(tmp_path):
    for folder in "pq":
        write_shard(tmp_path / folder / "a.tar", [(f"{folder}.txt", folder.encode())])
    urls = [f"pipe:cat {tmp_path}/{folder}/a.tar" for folder in "pq"]
    for _ in range(2):
        assert keys(wds.WebDataset(urls, cache_dir=str(tmp_path / "cache"))) == ["p", "q"]
    assert len(list((tmp_path / "cache").glob("a*.tar"))) == 2
    same = wds.WebDataset(urls, cache_dir=str(tmp_path / "other"), url_to_name=lambda _: "one.tar")
    with pytest.raises(ValueError, match=r"one\.tar"):
        list(same)


def test_84_a_download_that_fails_leaves_nothing_and_the_limit_holds(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(9))
    cache = tmp_path / "cache"
    with pytest.raises(StorageError):
        list(wds.WebDataset(f"pipe:head -c 3000 {path}; exit 3", cache_dir=cache))
    assert not [file for file in cache.rglob("*") if file.is_file() and not file.name.startswith(".")]
    store = MemoryStore()
    for number in range(5):
        store.write(f"memory://d/{number}.tar", bytes(path.read_bytes()))
    urls = [f"memory://d/{number}.tar" for number in range(5)]
    limit = 2 * path.stat().st_size + 8192
    assert len(list(wds.WebDataset(urls, cache_dir=cache, cache_size=limit, store=store))) == 45
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) <= limit


def test_415_a_folder_is_read_or_is_an_error_and_nothing_waits_for_ever(tmp_path):
    (tmp_path / "d").mkdir()
    with pytest.raises(NotFoundError):
        list(wds.WebDataset(f"{tmp_path}/d/"))
    write_shard(tmp_path / "d" / "a.tar", make_members(3))
    assert len(list(wds.WebDataset(f"{tmp_path}/d/"))) == 3
    assert len(list(wds.WebDataset(f"{tmp_path}/d/*.tar"))) == 3


def test_29_a_drive_is_no_scheme_and_a_path_may_be_a_path(tmp_path):
    with pytest.raises(NotFoundError, match=r"D:/x\.tar"):
        list(wds.WebDataset("D:/x.tar"))
    path = write_shard(tmp_path / "a.tar", make_members(3))
    assert len(list(wds.WebDataset(path))) == len(list(wds.WebDataset([path]))) == 3


def test_207_small_samples_take_no_extension_headers(tmp_path):
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(100):
            writer.write({"__key__": f"{number:03d}", "txt": "x"})
    size = (tmp_path / "a.tar").stat().st_size
    assert size == (100 * 1024 + 1024 + 10239) // 10240 * 10240
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert all(info.mtime == 0 and not info.pax_headers for info in tar)
    first = (tmp_path / "a.tar").read_bytes()
    with wds.TarWriter(str(tmp_path / "b.tar")) as writer:
        for number in range(100):
            writer.write({"__key__": f"{number:03d}", "txt": "x"})
    assert (tmp_path / "b.tar").read_bytes() == first


class Bomb:
    """Would make a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "x")


@pytest.mark.parametrize("field", ["pyd", "pkl", "pickle", "pth", "x.pyd"])
def test_490_nothing_is_unpickled_that_nobody_named(tmp_path, field):
    target = tmp_path / "made"
    path = write_shard(tmp_path / "a.tar", [(f"a.{field}", pickle.dumps(Bomb(target)))])
    with pytest.raises(DecodeError, match=r"pickle|torch"):
        list(wds.WebDataset(str(path)).decode())
    with pytest.raises(ValueError, match=field):
        list(wds.WebDataset(str(path)).xdecode())
    assert not target.exists()
    named = wds.WebDataset(str(path)).decode(wds.handle_extension(field, pickle.loads))
    list(named)
    assert target.exists()
