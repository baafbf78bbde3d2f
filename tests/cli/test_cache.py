from __future__ import annotations

import os
import time

import pytest

from cli.running import run_at_terminal
from shardset.storage import LocalStore
from shardset.storage.cache import CachedStore
from shardset.storage.cache_upkeep import default_folder

SIZE = 5_000


@pytest.fixture
def filled(tmp_path):
    """A cache, in its default folder, of two shards, the first of which was used a hundred days ago."""
    store = CachedStore(LocalStore(), default_folder(), limit=1_000_000)
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(name.encode() * (SIZE // 5))
        store.read(str(tmp_path / name), 0, 1)
        if name == "a.tar":
            [block] = default_folder().glob("*.block")
            ago = time.time() - 100 * 86_400
            os.utime(block, (ago, ago))
    yield store
    store.close()


def flip(path):
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def test_what_is_cached_is_listed_the_last_used_first(run, filled, tmp_path):
    filled.close()
    done = run("cache", "ls")
    assert done.code == 0
    assert [line[0] for line in done.lines] == [str(tmp_path / "b.tar"), str(tmp_path / "a.tar")]
    assert [line[1] for line in done.lines] == ["all", "all"]
    assert [int(line[2]) > SIZE for line in done.lines] == [True, True]
    assert run("cache", "ls", default_folder()).out == done.out
    assert len(run("cache", "ls", "--limit", "1").lines) == 1


def test_the_list_for_programs_has_all_that_an_entry_says(run, filled, tmp_path):
    view = filled.open(str(tmp_path / "b.tar")).view(0, 1)
    first, second = run("cache", "ls", "--json").documents
    assert first["url"] == str(tmp_path / "b.tar")
    assert (first["size"], first["offset"], first["length"]) == (SIZE, 0, SIZE)
    assert first["identity"] == filled.info(str(tmp_path / "b.tar")).identity
    assert first["digest"].startswith("blake2b:")
    assert first["in_use"] is True
    assert (default_folder() / first["file"]).stat().st_size == first["bytes"]
    assert second["used"] < first["created"]
    assert bytes(view) == b"b"


@pytest.mark.usefixtures("filled")
def test_blocks_are_listed_with_their_range(run, tmp_path):
    store = CachedStore(LocalStore(), tmp_path / "blocks", limit=1_000_000, block=1_000)
    store.read(str(tmp_path / "a.tar"), 3_500, 10)
    store.close()
    assert [line[:2] for line in run("cache", "ls", tmp_path / "blocks").lines] == [
        [str(tmp_path / "a.tar"), "3000-4000"]
    ]


def test_what_is_in_use_is_not_cleared(run, filled, tmp_path):
    filled.close()
    view = filled.open(str(tmp_path / "b.tar")).view(0, SIZE)
    filled.close()
    done = run("cache", "clear")
    assert done.code == 0
    assert done.text.startswith("1 entry removed, 5.")
    assert "in use, not removed: 1 entry\n" in done.text
    assert view[:5] == b"b.tar"
    del view
    assert run("cache", "clear", "--json").document["removed"] == 1
    assert run("cache", "ls").out == b""


def test_what_was_used_lately_is_kept_on_request(run, filled, tmp_path):
    filled.close()
    assert run("cache", "clear", "--older-than", "30", "--json").document["removed"] == 1
    assert [line[0] for line in run("cache", "ls").lines] == [str(tmp_path / "b.tar")]
    assert filled.stats().bytes_used < 2 * SIZE


def test_clearing_touches_no_other_file(run, filled):
    filled.close()
    others = ["notes.txt", "0123.block", "x" * 64 + ".block"]
    for name in others:
        (default_folder() / name).write_text("mine")
    run("cache", "clear")
    assert sorted(path.name for path in default_folder().iterdir()) == sorted([*others, "state"])


def test_verify_finds_and_removes_a_damaged_entry_with_exit_code_1(run, filled, tmp_path):
    filled.close()
    done = run("cache", "verify")
    assert (done.code, done.out) == (0, b"")
    assert "2 entries checked" in done.err
    assert "0 damaged" in done.err
    [name] = [entry["file"] for entry in run("cache", "ls", "--json").documents if entry["url"].endswith("a.tar")]
    flip(default_folder() / name)
    done = run("cache", "verify", "--json")
    assert done.code == 1
    assert [entry["url"] for entry in done.document["damaged"]] == [str(tmp_path / "a.tar")]
    assert (done.document["checked"], done.document["leftovers"]) == (2, 0)
    assert run("cache", "verify").code == 0
    assert filled.read(str(tmp_path / "a.tar"), 0, 5) == b"a.tar"


def test_an_entry_that_says_nothing_of_itself_is_listed_as_damaged(run, filled):
    filled.close()
    path = max(default_folder().glob("*.block"))
    path.write_bytes(b"short")
    assert [line[4] for line in run("cache", "ls").lines if line[0] == path.name] == ["damaged"]
    done = run("cache", "verify")
    assert done.code == 1
    assert done.lines[0][0] == path.name
    assert not path.exists()


def test_what_killed_downloads_left_is_removed_and_told(run, filled):
    filled.close()
    for suffix in (".part", ".lock"):
        (default_folder() / ("a" * 64 + suffix)).write_bytes(b"half")
    (default_folder() / ("b" * 64 + ".lock")).touch()
    done = run("cache", "verify")
    assert "left by downloads that were killed, removed: " in done.err
    assert sorted({path.suffix for path in default_folder().iterdir()}) == ["", ".block"]


@pytest.mark.parametrize("command", ["ls", "clear", "verify"])
def test_a_default_folder_that_is_not_there_yet_is_an_empty_cache(run, command):
    assert run("cache", command).code == 0
    assert run("cache", command, "--json").code == 0


@pytest.mark.parametrize("command", ["ls", "clear", "verify"])
def test_a_named_folder_that_is_missing_is_exit_code_3(run, tmp_path, command):
    done = run("cache", command, tmp_path / "nowhere")
    assert done.code == 3
    assert "no such folder" in done.err


def test_wrong_usage_is_exit_code_2(run):
    assert run("cache", "frobnicate").code == 2
    assert run("cache", "clear", "--older-than", "-1").code == 2


@pytest.mark.slow
def test_at_a_terminal_there_is_a_table_with_a_sum(filled):
    filled.close()
    code, shown = run_at_terminal("cache", "ls", SHARDSET_CACHE=str(default_folder().parent))
    assert code == 0
    assert "object" in shown
    assert "100 d" in shown
    assert "2 entries" in shown
