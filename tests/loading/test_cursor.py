from __future__ import annotations

import json
import pickle
import random
import time

import pytest

from conftest import DATA
from formats.tar_builder import Segments, archive, sparse_old
from servers.faults import Fault
from servers.faulty import FaultServer
from shards import (
    make_members,
    private_cache,  # noqa: F401 - the fixture is autouse
    read_members,
    tar_bytes,
    write_dataset,
    write_shard,
)
from shardset.dataset.opening import discover_dataset
from shardset.errors import AccessError, ChangedError, NotFoundError, StateError
from shardset.loading.cursor import TarDataLoader
from shardset.loading.entry import TarFileEntry
from shardset.storage import HttpStore, LocalStore, Retry

PHOTOS = DATA / "webshart" / "photos-00000.tar"
QUICK = Retry(attempts=3, first_wait=0.01, longest_wait=0.05)


@pytest.fixture
def folder(tmp_path):
    """Three shards of four samples, an empty one between them, and one that is written in no order."""
    write_dataset(tmp_path, samples=4)
    write_shard(tmp_path / "shard-0001a.tar", [])
    names = ("c.txt", "b.jpg", "README", "a/x.json", "b.JSON")
    write_shard(tmp_path / "z.tar", [(name, json.dumps(name).encode()) for name in names])
    return tmp_path


@pytest.fixture
def files(folder):
    """Every file in the order that it must come in: (shard, file in it, name, payload)."""
    return [
        (shard, number, name, payload)
        for shard, path in enumerate(sorted(folder.glob("*.tar")))
        for number, (name, payload) in enumerate(sorted(read_members(path).items(), key=lambda pair: pair[0].encode()))
    ]


def seen(entries):
    return [(entry.path, bytes(entry.data)) for entry in entries]


def test_iteration_gives_every_file_shard_by_shard_in_path_order(folder, files):
    entries = list(TarDataLoader(folder))
    assert seen(entries) == [(name, payload) for _, _, name, payload in files]
    assert [entry.job_id for entry in entries] == [
        f"shard{shard:04d}_file{number:06d}" for shard, number, _, _ in files
    ]
    assert all(type(entry) is TarFileEntry and type(entry.data) is bytes for entry in entries)


def test_a_loader_is_made_of_a_dataset_a_path_or_a_pattern(folder):
    dataset = discover_dataset(folder)
    loader = TarDataLoader(dataset)
    assert loader.dataset is dataset
    for source in (folder, str(folder), f"{folder}/*.tar"):
        assert seen(TarDataLoader(source)) == seen(loader)
        loader.reset()
    with pytest.raises(NotFoundError):
        TarDataLoader(folder / "none")


def test_a_shard_of_more_files_than_are_read_at_once_is_given_whole(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(300, fields=("a", "b")))
    assert seen(TarDataLoader(path)) == sorted(read_members(path).items())


def test_there_is_one_cursor(folder, files):
    loader = TarDataLoader(folder)
    names = [name for _, _, name, _ in files]
    assert [next(loader).path for _ in range(3)] == names[:3]
    first, second = iter(loader), iter(loader)
    assert [next(first).path, next(second).path, next(first).path, next(loader).path] == names[3:7]
    assert [entry.path for entry in loader] == names[7:]
    for iterator in (first, second, loader):
        with pytest.raises(StopIteration):
            next(iterator)
    assert list(loader) == []
    loader.reset()
    assert [entry.path for entry in loader] == names


def test_the_cursor_tells_where_it_stands(folder, files):
    loader = TarDataLoader(folder)
    assert loader.num_shards == 5
    assert (loader.current_shard_index, loader.current_file_index) == (0, 0)
    for shard, number, _, _ in files:
        next(loader)
        assert (loader.current_shard_index, loader.current_file_index) == (shard, number + 1)
    assert next(loader, None) is None
    assert (loader.current_shard_index, loader.current_file_index) == (5, 0)
    assert repr(loader) == f"TarDataLoader(Dataset({str(folder)!r}, num_shards=5), shard=5, file=0)"


# ---- payloads


@pytest.mark.parametrize("store", [LocalStore(), LocalStore(mmap=False)])
def test_views_show_the_bytes(folder, files, store):
    loader = TarDataLoader(discover_dataset(folder, store=store), copy=False)
    entries = list(loader)
    assert all(type(entry.data) is memoryview for entry in entries)
    assert seen(entries) == [(name, payload) for _, _, name, payload in files]
    assert type(loader.load_sample(0, 0).data) is memoryview
    assert bytes(loader.load_sample(0, 0).data) == loader.load_samples([(0, 0)])[0].data


def test_payloads_are_left_alone_if_asked(folder, files):
    loader = TarDataLoader(folder, load_file_data=False)
    assert loader.load_file_data is False
    entries = list(loader)
    assert seen(entries) == [(name, b"") for _, _, name, _ in files]
    assert [entry.size for entry in entries] == [len(payload) for _, _, _, payload in files]
    assert loader.load_sample(0, 1).data == b""
    assert [entry.data for entry in loader.load_samples([(0, 1), (3, 0)])] == [b"", b""]


def test_files_above_the_limit_are_left_out_everywhere_and_keep_their_numbers(folder, files):
    limit = sorted(len(payload) for _, _, _, payload in files)[len(files) // 2]
    loader = TarDataLoader(folder, max_file_size=limit)
    assert loader.max_file_size == limit
    entries = list(loader)
    kept = [file for file in files if len(file[3]) <= limit]
    assert 0 < len(kept) < len(files)
    assert seen(entries) == [(name, payload) for _, _, name, payload in kept]
    assert [entry.job_id for entry in entries] == [f"shard{shard:04d}_file{number:06d}" for shard, number, _, _ in kept]
    sizes = [len(payload) for shard, _, name, payload in files if shard == 0 and name.endswith(".jpg")]
    loader = TarDataLoader(folder, max_file_size=sizes[1])
    answers = [loader.load_sample(0, number) for number in range(4)]
    assert [entry is not None for entry in answers] == [size <= sizes[1] for size in sizes]
    assert [entry and entry.path for entry in loader.load_samples([(0, n) for n in range(4)])] == [
        entry and entry.path for entry in answers
    ]


def test_a_limit_that_hides_everything_gives_nothing(folder):
    loader = TarDataLoader(folder, max_file_size=-1)
    assert list(loader) == []
    assert loader.load_samples([(0, 0), (4, 1)]) == [None, None]
    assert loader.current_shard_index == 5


# ---- samples by number


def test_samples_are_those_of_the_case_file():
    loader = TarDataLoader(PHOTOS)
    document = json.loads(PHOTOS.with_suffix(".json").read_text())["files"]
    members = read_members(PHOTOS)
    names = [name for name in sorted(document) if not name.endswith((".json", ".txt"))]
    for number, name in enumerate(names):
        entry = loader.load_sample(0, number)
        stem = name.rpartition(".")[0]
        known = document[name]
        assert (entry.path, entry.data) == (name, members[name])
        assert (entry.offset, entry.size) == (known["offset"], known["length"])
        assert (entry.width, entry.height) == (known["width"], known["height"])
        assert entry.aspect == pytest.approx(known["aspect"], rel=1e-6)
        assert entry.json_path == known.get("json_path")
        assert entry.json_data == members.get(f"{stem}.json")
        assert entry.json_metadata == known.get("json_metadata")
        text = members.get(f"{stem}.txt")
        assert entry.captions == (known.get("captions") or (text and text.decode().strip()))
        assert entry.job_id == f"shard0000_file{number:06d}"
    with pytest.raises(IndexError, match="sample index 10 out of range: shard 0 has 10 samples"):
        loader.load_sample(0, 10)


def test_many_samples_at_once_are_those_one_by_one_in_the_order_asked(folder):
    loader = TarDataLoader(folder)
    rng = random.Random(9)
    counts = [loader.dataset.get_shard_sample_count(shard) for shard in range(5)]
    places = [(shard, number) for shard, count in enumerate(counts) for number in range(count)]
    locations = [rng.choice(places) for _ in range(64)]
    assert len(set(locations)) < 64  # some come twice
    batch = loader.load_samples(locations)
    single = [loader.load_sample(*location) for location in locations]
    assert seen(batch) == seen(single)
    for one, two in zip(batch, single, strict=True):
        for name in ("offset", "size", "job_id", "json_path", "json_data", "captions", "metadata"):
            assert getattr(one, name) == getattr(two, name)
    assert loader.load_samples([]) == []


@pytest.mark.parametrize("place", [(0, 4), (0, -1), (5, 0), (-1, 0), (1 << 70, 0), (2, 0)])
def test_a_sample_that_is_not_there_is_an_index_error(folder, place):
    loader = TarDataLoader(folder)
    with pytest.raises(IndexError, match="out of range"):
        loader.load_sample(*place)
    with pytest.raises(IndexError, match="out of range"):
        loader.load_samples([(0, 0), place])


def test_loading_by_number_does_not_move_the_cursor(folder, files):
    loader = TarDataLoader(folder)
    next(loader)
    loader.load_sample(3, 1)
    loader.load_samples([(4, 0), (0, 2)])
    assert next(loader).path == files[1][2]


# ---- states


def test_a_state_continues_exactly_at_every_position(folder, files):
    loader = TarDataLoader(folder)
    names = [name for _, _, name, _ in files]
    for position in range(len(files) + 1):
        state = json.loads(json.dumps(loader.state_dict()))
        other = TarDataLoader(folder)
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert [entry.path for entry in other] == names[position:]
        next(loader, None)


def test_a_state_moves_an_iterator_that_is_under_way(folder, files):
    names = [name for _, _, name, _ in files]
    states = []
    loader = TarDataLoader(folder)
    while (states.append(loader.state_dict()) or next(loader, None)) is not None:
        pass
    rng = random.Random(2)
    iterator = iter(loader)
    for _ in range(40):
        position = rng.randrange(len(names))
        loader.load_state_dict(states[position])
        loader_moves = rng.random() < 0.5
        for step in range(rng.randrange(4)):
            if position + step < len(names):
                assert next(loader if loader_moves else iterator).path == names[position + step]
        if loader.current_shard_index == 5 or rng.random() < 0.2:
            iterator = iter(loader)


def test_a_state_holds_plain_values_and_no_secrets(folder):
    loader = TarDataLoader(folder, load_file_data=False, max_file_size=77)
    next(loader)
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    expected = {
        "version": 4,
        "source": str(folder),
        "subfolder": None,
        "metadata_source": None,
        "num_shards": 5,
        "is_remote": False,
        "hf_token": None,
        "current_shard": 0,
        "current_file_index": 1,
        "buffer_position": 1,
        "load_file_data": False,
        "max_file_size": 77,
        "buffer_size": 100,
        "chunk_size_mb": 10,
        "batch_size": None,
        "ranges": None,
        "range_index": 0,
    }
    assert {name: state[name] for name in expected} == expected
    assert state.keys() - expected.keys() == {"shard_names"}


def test_a_state_of_another_version_is_refused(folder):
    loader = TarDataLoader(folder)
    next(loader)
    with pytest.raises(ValueError, match="Unsupported state dict version: 999") as caught:
        loader.load_state_dict({"version": 999, "current_shard": 3})
    assert type(caught.value) is StateError
    assert (loader.current_shard_index, loader.current_file_index) == (0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"num_shards": 4},
        {"current_shard": -1},
        {"current_shard": "1"},
        {"current_shard": None},
        {"current_file_index": -5},
        {"current_file_index": 2.0},
        {"current_shard": 3, "current_file_index": 99},
        {"current_shard": 99},
        {"buffer_size": "7"},
        {"batch_size": 0},
        {"ranges": [[5, 2]]},
        {"shard_names": "others"},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_moves_nothing(folder, change):
    loader = TarDataLoader(folder)
    next(loader)
    with pytest.raises(StateError):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert (loader.current_shard_index, loader.current_file_index) == (0, 1)


def test_a_state_may_say_less_and_may_stand_at_the_end(folder, files):
    loader = TarDataLoader(folder)
    loader.load_state_dict({})
    assert next(loader).path == files[0][2]
    loader.load_state_dict({"current_shard": 3})
    assert next(loader).path == next(name for shard, _, name, _ in files if shard == 3)
    count = sum(shard == 3 for shard, *_ in files)
    loader.load_state_dict({"current_shard": 3, "current_file_index": count})
    assert next(loader).path == next(name for shard, _, name, _ in files if shard == 4)
    loader.load_state_dict({"current_shard": 5})
    assert list(loader) == []


# ---- what fails


def test_a_shard_that_changed_raises_and_the_cursor_stays(folder, files):
    len(discover_dataset(folder))
    loader = TarDataLoader(folder)
    write_shard(folder / "shard-0001.tar", make_members(9))
    entries = iter(loader)
    assert [next(entries).path for _ in range(12)] == [name for _, _, name, _ in files[:12]]
    for call in (lambda: next(entries), lambda: next(loader), lambda: loader.load_sample(1, 0)):
        with pytest.raises(ChangedError, match="shard-0001"):
            call()
    assert loader.current_shard_index == 1
    loader.load_state_dict({"current_shard": 2})
    assert [entry.path for entry in loader] == [name for shard, _, name, _ in files if shard > 1]


def test_a_sparse_file_is_given_with_its_holes(tmp_path):
    (tmp_path / "a.tar").write_bytes(archive(sparse_old(b"a.bin", Segments(((512, b"x"),), 600))).data)
    loader = TarDataLoader(tmp_path)
    whole = bytes(512) + b"x" + bytes(87)
    assert next(loader).data == whole
    assert loader.load_sample(0, 0).data == whole
    assert [entry.data for entry in loader.load_samples([(0, 0)])] == [whole]
    assert bytes(TarDataLoader(tmp_path, copy=False).load_sample(0, 0).data) == whole
    (entry,) = TarDataLoader(tmp_path, load_file_data=False)
    assert (entry.path, entry.offset, entry.size) == ("a.bin", -1, 600)


# ---- shards elsewhere, and the calls that are about their cache


@pytest.fixture
def server():
    with FaultServer() as server:
        for shard in range(4):
            server.put(f"/d/s {shard}.tar", tar_bytes(make_members(4, fields=("jpg", "txt"), start=4 * shard)))
        server.put("/d/sub/s 1.tar", tar_bytes(make_members(1, start=90)))
        yield server


def remote(server, **more):
    return TarDataLoader(discover_dataset(server.url + "d/", store=HttpStore(retry=QUICK)), **more)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_shards_elsewhere_are_read_ahead_while_the_caller_works(server):
    for shard in range(2):
        server.put(f"/big/{shard}.tar", tar_bytes([(f"{shard}{n:02d}.bin", bytes(3 << 20)) for n in range(12)]))
    loader = TarDataLoader(discover_dataset(server.url + "big/", store=HttpStore(retry=QUICK)))
    loader.dataset.list_files_in_shard(0)
    server.forget()
    next(loader)
    until(lambda: sum(request.sent for request in server.requests("GET", "/big/0.tar")) >= 18 << 20)

    def rests():
        sent = sum(request.sent for request in server.requests("GET", "/big/*.tar"))
        time.sleep(0.2)
        return sum(request.sent for request in server.requests("GET", "/big/*.tar")) == sent

    until(rests)
    assert sum(request.sent for request in server.requests("GET", "/big/*.tar")) < 20 << 20  # one batch ahead
    assert [entry.path for entry in loader][-1] == "111.bin"


def test_what_was_read_ahead_is_dropped_when_the_cursor_is_moved(server):
    loader = remote(server)
    names = [entry.path for entry in loader]
    loader.reset()
    entries = iter(loader)
    assert [next(entries).path for _ in range(8)] == names[:8]
    loader.load_state_dict({**loader.state_dict(), "current_shard": 2, "current_file_index": 3})
    assert [entry.path for entry in entries] == names[19:]
    loader.reset()
    assert [entry.path for entry in loader] == names


def test_a_read_that_failed_is_tried_again_by_the_next_call_and_nothing_is_left_out(server):
    loader = remote(server)
    expected = [entry.path for entry in loader]
    loader.reset()
    server.add(Fault.status(403), path="/d/s%201.tar", times=3)
    found, failures = [], 0
    while len(found) < len(expected):
        try:
            found.append(next(loader).path)
        except AccessError:
            failures += 1
            assert failures < 10
    assert found == expected
    assert 1 <= failures <= 3
    with pytest.raises(StopIteration):
        next(loader)


def test_a_read_ahead_that_failed_is_no_trouble_of_what_comes_before_it(server):
    loader = remote(server)
    expected = [entry.path for entry in loader]
    loader.reset()
    server.add(Fault.status(403), path="/d/s%201.tar")
    entries = iter(loader)
    assert [next(entries).path for _ in range(8)] == expected[:8]
    with pytest.raises(AccessError, match=r"s%201\.tar"):
        next(entries)
    assert (loader.current_shard_index, loader.current_file_index) in {(0, 8), (1, 0)}
    loader.load_state_dict({"current_shard": 2})
    assert next(loader).path == expected[16]


def test_the_next_shard_is_the_one_that_the_next_file_comes_from(server):
    loader = remote(server)
    assert loader.get_next_shard_info() == {
        "index": 0,
        "name": "s 0",
        "tar_path": server.url + "d/s%200.tar",
        "is_cached": False,
    }
    for _ in range(8):
        next(loader)
    assert loader.get_next_shard_info()["index"] == 1  # all files of the first one were given
    list(loader)
    assert loader.get_next_shard_info() is None


def test_whether_the_next_file_waits_is_told_at_the_end_of_a_shard_too(server, tmp_path):
    loader = remote(server)
    assert loader.will_block() is False  # without a cache nothing is downloaded
    loader.dataset.enable_shard_cache(tmp_path)
    assert loader.will_block() is True
    for _ in range(8):
        next(loader)
        assert loader.dataset.cache.is_cached(0)
    until(lambda: not loader.dataset.cache.is_downloading(1))
    assert loader.will_block() is not loader.dataset.cache.is_cached(1)
    list(loader)
    assert loader.will_block() is False


def test_shards_are_prepared_by_number_from_the_cursor_on(server, tmp_path):
    loader = remote(server)
    cache_free = (loader.prepare_shards_ahead(3), loader.prepare_next_shard(), loader.prepare_shard_by_name("s 2.tar"))
    assert cache_free == ([], False, False)
    loader.dataset.enable_shard_cache(tmp_path, parallel_downloads=1)
    server.add(Fault.latency(0.1), method="GET")
    assert loader.prepare_shards_ahead(2) == ["s 0.tar", "s 1.tar"]
    assert loader.prepare_shards_ahead(2) == []
    assert loader.prepare_next_shard() is True
    assert loader.prepare_shard_by_name("s 2.tar") is False  # that was the next one
    assert loader.prepare_shards_ahead(0) == loader.prepare_shards_ahead(-1) == []
    until(lambda: all(loader.dataset.cache.is_cached(number) for number in range(3)))
    assert loader.prepare_shards_ahead(100) == ["s 3.tar", "s 1.tar"]
    assert loader.prepare_next_shard() is False
    until(lambda: loader.dataset.cache.is_cached(4))
    assert [status["is_cached"] for status in loader.get_lookahead_cache_status()] == [True] * 5
    list(loader)
    assert loader.prepare_shards_ahead(3) == []
    assert loader.prepare_next_shard() is False
    assert loader.get_lookahead_cache_status() == []


def test_a_shard_of_the_cache_is_named_by_file_or_by_path(server, tmp_path):
    loader = remote(server)
    loader.dataset.enable_shard_cache(tmp_path)
    for name in ("s 2.tar", "s 2"):
        assert loader.get_shard_cache_status(name)["index"] == 2
    for name in ("sub/s 1", "sub/s 1.tar"):
        assert loader.get_shard_cache_status(name)["index"] == 4
    assert loader.get_shard_cache_status("s 1")["index"] == 1  # two have that file name, one that path
    for name in ("none.tar", "", "s%202.tar"):
        for call in (loader.get_shard_cache_status, loader.is_shard_locked, loader.prepare_shard_by_name):
            with pytest.raises(ValueError, match="not found"):
                call(name)


def test_the_status_of_a_shard_follows_its_download(server, tmp_path):
    loader = remote(server)
    loader.dataset.enable_shard_cache(tmp_path)
    size = loader.dataset.get_shard_info(0)["size"]
    assert loader.get_shard_cache_status("s 0.tar")["cur_filesize"] == 0
    server.add(Fault.drip(pause=0.15, piece=2000), method="GET")
    assert loader.prepare_shard_by_name("s 0.tar") is True
    until(lambda: loader.is_shard_locked("s 0.tar"))
    assert loader.will_block()
    until(lambda: loader.get_shard_cache_status("s 0.tar")["is_cached"])
    assert loader.get_shard_cache_status("s 0.tar")["cur_filesize"] == size
    assert not loader.is_shard_locked("s 0.tar")
    assert not loader.will_block()


def test_a_download_that_failed_in_the_background_raises_where_its_shard_is_read(server, tmp_path):
    loader = remote(server)
    expected = [entry.path for entry in loader]
    loader.reset()
    loader.dataset.enable_shard_cache(tmp_path)
    server.add(Fault.status(403), path="/d/s%201.tar")
    loader.prepare_shards_ahead(2)
    found = []
    with pytest.raises(AccessError):
        found.extend(entry.path for entry in loader)
    assert loader.current_shard_index <= 1
    server.behave()
    assert [entry.path for entry in loader] == expected[8:]


def test_a_state_of_signed_shards_can_be_kept_by_anybody(server):
    url = server.url.replace("://", "://user:SECRET@") + "d/s%20{0..3}.tar?X-Amz-Signature=SECRET"
    loader = TarDataLoader(url)
    next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    assert "SECRET" not in json.dumps(state)
    assert state["is_remote"] is True
    again = TarDataLoader(url)
    again.load_state_dict(state)
    assert next(again).path == next(loader).path
    assert "SECRET" not in repr(loader) + repr(loader.get_next_shard_info())
