"""Any sequence of calls gives right bytes, keeps the limit, and forgets what was used longest ago."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.storage import cache_folder, cache_reader
from shardset.storage.cache import CachedStore
from shardset.storage.cache_upkeep import clear, verify
from storage.caching import MadeStore, bytes_on_disk, files_of

SIZE = 1000
ENTRY = SIZE + 174  # with what an entry of this test says of itself; see the first test
URLS = [f"made://host/{letter}/000.tar" for letter in "abcde"]
STATE = 21

urls = st.integers(0, len(URLS) - 1)
kinds = st.sampled_from([*["read"] * 8, *["hold"] * 2, "let go", "close", "clear", "new version"])
steps = st.tuples(kinds, urls, st.integers(0, SIZE - 1), st.integers(1, SIZE))


@pytest.fixture(scope="module", autouse=True)
def _no_rest():
    """Count every use, and try at once again what could not be cached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_folder, "_TOUCH_EVERY", 0.0)
        patch.setattr(cache_folder, "_REST", 0.0)
        patch.setattr(cache_reader, "_REST", 0.0)
        patch.setattr(os, "fsync", lambda _: None)
        yield


def test_the_size_of_an_entry_is_as_the_model_takes_it():
    with tempfile.TemporaryDirectory() as folder:
        store = CachedStore(MadeStore(Path(folder) / "log", size=SIZE), Path(folder) / "cache", limit=10**6)
        store.read(URLS[0], 0, 1)
        assert [path.stat().st_size for path in files_of(store.folder, ".block")] == [ENTRY]


class Model:
    """Which entries there should be, the last used at the end."""

    def __init__(self, room):
        self.room = room
        self.entries = []
        self.held = {}

    def use(self, entry):
        """Use an entry; tell whether it is cached then."""
        if entry in self.entries:
            self.entries.remove(entry)
        else:
            while len(self.entries) >= self.room:
                free = [other for other in self.entries if other not in self.held.values()]
                if not free:
                    return False
                self.entries.remove(free[0])
        self.entries.append(entry)
        return True


@given(st.integers(1, 4), st.lists(steps, min_size=12, max_size=40))
def test_whole_objects_come_and_go_as_in_the_model(room, todo):
    with tempfile.TemporaryDirectory() as folder:
        made = MadeStore(Path(folder) / "log", size=SIZE)
        store = CachedStore(made, Path(folder) / "cache", limit=STATE + room * (ENTRY + 1))  # of ten versions and more
        model, views = Model(room), {}
        for step, number, offset, length in todo:
            if step in ("read", "hold"):
                url = URLS[number]
                is_cached = model.use((url, made.version))
                view = store.open(url).view(offset, min(length, SIZE - offset))
                assert view == made.bytes_of(url)[offset : offset + length]
                if step == "hold" and is_cached:
                    views[url] = (view, bytes(view))
                    model.held[url] = (url, made.version)
                del view
            elif step == "let go":
                views.pop(URLS[number], None)
                model.held.pop(URLS[number], None)
            elif step == "close":
                store.close()
            elif step == "clear":
                store.close()
                clear(store.folder) if store.folder.exists() else None
                model.entries = [entry for entry in model.entries if entry in model.held.values()]
            else:
                made.version += 1
            for url in URLS:
                assert store.is_cached(url) == ((url, made.version) in model.entries)
            assert bytes_on_disk(store.folder) <= store.limit
            assert len(files_of(store.folder, ".block")) == len(model.entries)
        for view, expected in views.values():
            assert view == expected


@given(
    st.integers(60, SIZE),
    st.integers(300, 4000),
    st.lists(st.tuples(urls, st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=5)), max_size=6),
)
def test_any_blocks_and_any_limit_give_right_bytes(block, limit, todo):
    with tempfile.TemporaryDirectory() as folder:
        made = MadeStore(Path(folder) / "log", size=SIZE)
        store = CachedStore(made, Path(folder) / "cache", limit=limit, block=block)
        kept = []
        for number, ranges in todo:
            offsets = [offset for offset, _ in ranges]
            lengths = [min(length, SIZE - offset) for offset, length in ranges]
            whole = made.bytes_of(URLS[number])
            expected = [whole[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
            views = store.open(URLS[number]).read_many(offsets, lengths)
            assert views == expected
            kept.append((views, expected))
            assert bytes_on_disk(store.folder) <= limit
        for views, expected in kept:
            assert views == expected
        if store.folder.exists() and (store.folder / "state").exists():
            assert verify(store.folder).damaged == ()
        assert files_of(store.folder, ".part") == files_of(store.folder, ".lock") == []
