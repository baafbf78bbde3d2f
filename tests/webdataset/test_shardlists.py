from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shardset.errors import NotFoundError
from shardset.webdataset import shardlists
from shardset.webdataset.shardlists import DirectoryShardList


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        file = tmp_path / f"{number}.tar"
        file.touch()
        os.utime(file, (1000 + number, 1000 + number))
    (tmp_path / "other.txt").touch()
    return tmp_path


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_each_shard_of_a_folder_is_claimed_once_and_let_go_as_the_mode_says(folder):
    source = iter(DirectoryShardList(folder, poll=None, mode="unlink", select="oldest"))
    assert next(source)["url"] == str(folder / f"0.tar._{os.getpid()}_")
    assert names(folder) == [f"0.tar._{os.getpid()}_", "1.tar", "2.tar", "3.tar", "other.txt"]
    assert len(list(source)) == 3
    assert names(folder) == ["other.txt"]


def test_shards_may_be_kept_or_given_back_or_go_where_the_caller_says(folder):
    next(source := iter(DirectoryShardList(folder, poll=None, mode="keep", select="oldest")))
    next(source)
    assert "0.tar._done_" in names(folder)
    source.close()
    given = iter(DirectoryShardList(folder, pattern="{2,3}.tar", poll=None, mode="resample"))
    assert len({next(given)["url"] for _ in range(50)}) == 2  # without end
    given.close()


def test_the_caller_may_decide_about_a_shard_that_was_read(folder):
    seen = []

    def fate(path):
        seen.append(path)
        Path(path).unlink()

    read = [
        item["url"] for item in DirectoryShardList(folder, pattern="[13].tar", poll=None, select="oldest", fate=fate)
    ]
    assert seen == read == [str(folder / f"{number}.tar._{os.getpid()}_") for number in (1, 3)]


def test_a_shard_of_a_process_that_is_gone_can_be_read_again(folder, caplog):
    (folder / "1.tar").rename(folder / "1.tar._99999999_")
    DirectoryShardList(folder, poll=None).cleanup_files_without_processes()
    assert "1.tar" in names(folder)
    assert "99999999" in caplog.text


def test_waiting_ends_after_the_time_given(tmp_path):
    begun = time.monotonic()
    assert list(DirectoryShardList(tmp_path, poll=0.01, timeout=0.05)) == []
    assert time.monotonic() - begun < 60


def test_arguments_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="mode"):
        DirectoryShardList(tmp_path, mode="keeps")
    with pytest.raises(ValueError, match="select"):
        DirectoryShardList(tmp_path, select="newest")
    with pytest.raises(NotFoundError):
        DirectoryShardList(tmp_path / "none")


def test_small_functions_do_what_their_names_say(monkeypatch):
    monkeypatch.setenv("WDS_X", "y")
    monkeypatch.setenv("HOME", "/h")
    assert shardlists.envsubst("a{1..2}-${X}") == "a{1..2}-y"
    assert shardlists.expand("~/$WDS_X") == "/h/y"
    assert shardlists.expand_source("{1..3}.tar") == ["1.tar", "2.tar", "3.tar"]
    assert shardlists.expand_source(iter("ab")) == ["a", "b"]
    with pytest.raises(ValueError, match="max_urls"):
        shardlists.expand_source("abc", 0)
    assert shardlists.shardspec("{1..2}.tar").urls == ["1.tar", "2.tar"]
    for make in (shardlists.MultiShardSample, shardlists.shardspec):
        with pytest.raises(ValueError, match="RandomMix"):
            make("a.yaml")
    drawn = shardlists.resampled()({"url": str(number)} for number in range(3))
    assert len([next(drawn) for _ in range(20)]) == 20
