"""Where the cursor goes: ranges, places by number and by name, batches, and states that webshart 0.6.0 wrote."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from shards import make_members, private_cache, write_dataset, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.errors import ChangedError, NotFoundError, StateError
from shardset.loading.cursor import TarDataLoader
from shardset.policy import Policy

STATES = json.loads((DATA / "webshart" / "states.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three shards of nine files, as webshart had them before it when it wrote its states, and an empty one."""
    root = tmp_path_factory.mktemp("places")
    write_dataset(root / "shards", shards=3, samples=3)
    write_dataset(root / "gaps", shards=3, samples=3)
    write_shard(root / "gaps" / "shard-0000a.tar", [])
    return root


@pytest.fixture
def names(folder):
    return [entry.path for entry in TarDataLoader(folder / "shards", load_file_data=False)]


@pytest.fixture
def loader(folder):
    return TarDataLoader(folder / "shards")


def paths(entries):
    return [entry.path for entry in entries]


# ---- ranges


@given(ranges=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=4), hidden=st.booleans())
def test_ranges_are_slices_of_all_files_one_after_the_other(folder, ranges, hidden):
    everything = TarDataLoader(folder / "gaps", load_file_data=False)
    limit = 14 if hidden else 50_000_000
    numbered = [(number, entry.path) for number, entry in enumerate(everything) if entry.size <= limit]
    ranges = [(start, start + length) for start, length in ranges]
    loader = TarDataLoader(folder / "gaps", max_file_size=limit)
    loader.set_ranges(ranges)
    wanted = [path for start, end in ranges for number, path in numbered if start <= number < end]
    assert paths(loader) == wanted
    loader.reset()
    assert paths(loader) == wanted
    loader.set_ranges(None)
    assert paths(loader) == [path for _, path in numbered]
    for start, end in ranges:
        if start <= 27:
            loader.set_ranges([(0, 1)])
            assert paths(loader.iter_range(start, end)) == [path for number, path in numbered if start <= number < end]


def test_no_ranges_are_an_empty_choice_and_none_is_no_choice(loader, names):
    loader.set_ranges([])
    assert paths(loader) == []
    loader.set_ranges(None)
    assert paths(loader) == names


@pytest.mark.parametrize("bad", [(5, 3), (3, 3), (-1, 4)])
def test_a_range_that_does_not_begin_before_its_end_is_refused_and_changes_nothing(loader, names, bad):
    next(loader)
    with pytest.raises(ValueError, match="Invalid range"):
        loader.set_ranges([(0, 1), bad])
    with pytest.raises(TypeError):
        loader.set_ranges([(0.5, 2)])
    assert next(loader).path == names[1]


def test_a_range_to_go_through_begins_at_its_start_and_leaves_the_cursor_at_its_end(loader, names):
    entries = loader.iter_range(7, 11)
    assert (loader.current_shard_index, loader.current_file_index) == (0, 7)
    assert paths(entries) == names[7:11]
    assert next(loader).path == names[11]
    with pytest.raises(ValueError, match="start must be less than end"):
        loader.iter_range(5, 5)
    with pytest.raises(IndexError, match="out of range: there are 27 files"):
        loader.iter_range(28, 30)


def test_a_state_within_ranges_goes_on_within_them(folder, names):
    ranges, wanted = [(7, 12), (0, 2), (20, 30)], names[7:12] + names[:2] + names[20:]
    for count in range(len(wanted) + 1):
        loader = TarDataLoader(folder / "shards")
        loader.set_ranges(ranges)
        for _ in range(count):
            next(loader)
        again = TarDataLoader.from_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert paths(again) == wanted[count:]
        again.reset()
        assert paths(again) == wanted


# ---- places


def test_any_file_can_be_gone_to_by_its_number(loader, names):
    for number in random.Random(1).sample(range(27), 27):
        loader.skip(number)
        assert next(loader).path == names[number]
    loader.skip(27)
    assert loader.current_shard_index == 3
    assert loader.current_shard_filename == ""
    assert list(loader) == []


def test_a_shard_can_be_gone_to_by_number_by_file_name_and_by_path(tmp_path):
    write_dataset(tmp_path / "a", shards=2)
    write_dataset(tmp_path / "b", shards=1)
    loader = TarDataLoader(tmp_path)
    for asked, shard in (
        ({"shard_idx": 1}, 1),
        ({"filename": "shard-0001"}, 1),
        ({"filename": "shard-0001.tar"}, 1),
        ({"filename": "b/shard-0000"}, 2),
        ({"filename": "b/shard-0000.tar", "cursor_idx": 3}, 2),
    ):
        loader.shard(**asked)
        assert (loader.current_shard_index, loader.current_file_index) == (shard, asked.get("cursor_idx", 0))
        assert loader.current_shard_filename == ("shard-0001.tar" if shard == 1 else "shard-0000.tar")
    loader.shard(0, cursor_idx=12)
    assert (next(loader).shard_index, loader.current_file_index) == (1, 1)
    before = loader.state_dict()
    with pytest.raises(ValueError, match="not one but 2: 'a/shard-0000', 'b/shard-0000'"):
        loader.shard(filename="shard-0000")
    with pytest.raises(ValueError, match="must be provided"):
        loader.shard()
    with pytest.raises(ValueError, match="not found"):
        loader.shard(filename="none")
    for shard, file in ((3, None), (-1, None), (0, 13), (0, -1)):
        with pytest.raises(IndexError, match="out of range"):
            loader.shard(shard, cursor_idx=file)
    assert loader.state_dict() == before


def test_going_to_a_place_forgets_ranges(loader, names):
    for go in (lambda: loader.skip(4), lambda: loader.shard(0, cursor_idx=4)):
        loader.set_ranges([(0, 2)])
        go()
        assert paths(loader) == names[4:]


# ---- batches


def test_batches_are_runs_of_files_and_the_last_may_be_smaller(loader, names):
    assert loader.batch_size is None
    assert paths(loader.next_batch()) == names[:1]
    with pytest.raises(ValueError, match="batch_size must be set"):
        loader.iter_batches()
    loader.batch_size = 10
    assert [paths(batch) for batch in loader.iter_batches()] == [names[1:11], names[11:21], names[21:]]
    assert loader.next_batch() is None
    for size in (0, -3):
        with pytest.raises(ValueError, match="not positive"):
            loader.batch_size = size


def test_a_batch_that_cannot_be_read_whole_leaves_the_cursor_before_it(tmp_path):
    write_dataset(tmp_path, shards=2, samples=2)
    names = paths(TarDataLoader(tmp_path, load_file_data=False))
    dataset = discover_dataset(tmp_path)
    loader = TarDataLoader(dataset, batch_size=4)
    assert paths(loader.next_batch()) == names[:4]
    write_shard(tmp_path / "shard-0001.tar", make_members(9))
    for _ in range(2):
        with pytest.raises(ChangedError):
            loader.next_batch()
        assert loader.current_file_index == 4
    skipping = TarDataLoader(dataset, batch_size=4, policy=Policy("skip"))
    assert [paths(batch) for batch in skipping.iter_batches()] == [names[:4], names[4:6]]


def test_sizes_of_buffers_are_one_at_least(loader):
    loader.buffer_size = loader.chunk_size_mb = 0
    assert (loader.buffer_size, loader.chunk_size_mb) == (1, 1)


# ---- states


def test_a_summary_tells_how_far_it_is(loader):
    loader.skip(13)
    assert loader.get_state_summary() == {
        "current_shard": 1,
        "total_shards": 3,
        "current_file_index": 4,
        "files_processed": 13,
        "total_files": 27,
        "progress_percent": pytest.approx(100 * 13 / 27),
        "batch_size": None,
    }


@pytest.mark.parametrize(
    ("name", "place"), [("start", 0), ("middle", 5), ("token", 13), ("end", 27), ("ranges", 3)], ids=str
)
def test_a_state_that_webshart_wrote_goes_on_where_it_stood(folder, names, name, place, monkeypatch):
    monkeypatch.chdir(folder)  # its source was "shards"
    state = STATES[name]
    for dataset in (None, "shards", discover_dataset(folder / "shards")):
        loader = TarDataLoader.from_state_dict(state, dataset)
        for setting in ("load_file_data", "max_file_size", "buffer_size", "chunk_size_mb", "batch_size"):
            assert getattr(loader, setting) == state[setting]
        assert loader.state_dict()["hf_token"] is None
        assert paths(loader) == names[place:]


def test_our_state_has_what_webshart_reads_in_it(loader):
    next(loader)
    state = loader.state_dict()
    known = STATES["start"]
    assert known.keys() <= state.keys()
    assert {name: type(state[name]) for name in known} == {name: type(known[name]) for name in known}


def test_a_dataset_that_moved_takes_its_state_along(folder, names, tmp_path):
    write_dataset(tmp_path / "elsewhere", shards=3, samples=3)
    loader = TarDataLoader(folder / "shards")
    loader.skip(10)
    state = {**loader.state_dict(), "source": "/nowhere/at/all"}
    again = TarDataLoader.from_state_dict(state, tmp_path / "elsewhere")
    assert paths(again) == names[10:]
    with pytest.raises(NotFoundError):
        TarDataLoader.from_state_dict(state)
    with pytest.raises(StateError, match="names no source"):
        TarDataLoader.from_state_dict({**state, "source": None})


def test_a_state_of_several_sources_finds_them_again(folder):
    sources = [str(folder / "shards" / f"shard-000{number}.tar") for number in (2, 0)]
    loader = TarDataLoader(sources)
    loader.skip(4)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["source"] == sources
    assert paths(TarDataLoader.from_state_dict(state)) == paths(loader)


def test_what_is_no_dataset_and_no_source_is_refused():
    with pytest.raises(TypeError, match="Expected either a DiscoveredDataset or a path string"):
        TarDataLoader(3)
