"""Datasets whose shards lie on web servers: what is asked, what is kept, what goes wrong, and what is never told."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from itertools import count

import pytest

from servers.faults import Fault
from servers.faulty import FaultProcess, FaultServer
from servers.nginx import serve_nginx
from shards import make_members, private_cache, read_all, send, tar_bytes, write_shard  # noqa: F401 - autouse fixture
from shardset.dataset.opening import discover_dataset, open_dataset
from shardset.errors import (
    AccessError,
    ChangedError,
    FormatError,
    NotFoundError,
    RangeIgnoredError,
    StorageError,
    TransferError,
)
from shardset.loading.cursor import TarDataLoader
from shardset.policy import Policy
from shardset.storage import HttpStore, Retry
from shardset.tasks import index_dataset
from timing import least_seconds

pytestmark = pytest.mark.servers

QUICK = Retry(attempts=3, first_wait=0.01, longest_wait=0.05)
SHARDS = 8
SAMPLES = 6


def members_of(shard, samples=SAMPLES, fields=("jpg", "txt"), size=0):
    """Name the members of a shard, in order of their paths; with `size`, pictures of so many bytes."""
    members = make_members(samples, start=shard * samples, fields=fields)
    return [(name, payload + bytes(size) if name.endswith("jpg") else payload) for name, payload in members]


def fill(server, shards=SHARDS, **kind):
    for shard in range(shards):
        server.put(f"/d/{shard:0{len(str(shards - 1))}d}.tar", tar_bytes(members_of(shard, **kind)))


@pytest.fixture
def server():
    with FaultServer() as server:
        fill(server)
        yield server


def quick(server, **more):
    return discover_dataset(server.url + "d/", store=HttpStore(retry=QUICK), **more)


def asked(server):
    """How often each path was asked for, by method and path without query."""
    return Counter((request.method, request.path.partition("?")[0]) for request in server.requests())


def expected(shards=SHARDS, **kind):
    """Key and payloads of all samples."""
    found = {}
    for shard in range(shards):
        for name, payload in members_of(shard, **kind):
            key, _, field = name.partition(".")
            found.setdefault(key, {})[field] = payload
    return list(found.items())


# ---- requests


def test_discovery_asks_for_the_page_and_once_about_each_shard(server):
    quick(server)
    assert asked(server) == {("GET", "/d/"): 1, **{("HEAD", f"/d/{n}.tar"): 1 for n in range(SHARDS)}}


def test_indexing_small_shards_costs_one_look_for_an_index_and_one_read_each(server):
    dataset = quick(server)
    server.forget()
    assert len(dataset) == SHARDS * SAMPLES
    counts = asked(server)
    assert {path for _, path in counts} == {f"/d/{n}.{end}" for n in range(SHARDS) for end in ("tar", "json")}
    assert max(counts.values()) == 1
    assert ("HEAD", "/d/0.tar") not in counts


def test_a_second_opening_reads_no_header_again(server):
    first = read_all(quick(server))
    server.forget()
    dataset = quick(server)
    assert len(dataset) == len(first)
    assert asked(server)["GET", "/d/"] == 1
    assert all(method == "HEAD" or path == "/d/" for method, path in asked(server))
    assert sum(asked(server).values()) == SHARDS + 1
    assert read_all(dataset) == first == expected()


def test_a_sidecar_index_spares_the_headers(server, tmp_path):
    for shard in range(SHARDS):
        write_shard(tmp_path / f"{shard}.tar", members_of(shard))
    index_dataset(tmp_path, workers=0)
    big = tar_bytes([("big.jpg", bytes(3_000_000)), *members_of(99)])
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "9.tar").write_bytes(big)
    index_dataset(tmp_path / "big", workers=0)
    server.put("/d/9.tar", big)
    for path in [*tmp_path.glob("*.json"), tmp_path / "big" / "9.json"]:
        server.put(f"/d/{path.name}", path.read_bytes())
    dataset = quick(server)
    server.forget()
    assert dataset.list_files_in_shard(SHARDS)[-1] == "big.jpg"
    assert asked(server).keys() == {
        ("GET", "/d/9.json"),
        ("GET", "/d/9.tar"),
    }  # the page has told which indexes there are
    assert sum(request.sent for request in server.requests("GET", "/d/9.tar")) < 100_000
    assert not dataset.report.counts


def test_a_catalog_alone_opens_without_any_request(server):
    folder = quick(server).catalog.folder
    server.forget()
    dataset = open_dataset(folder)
    assert (len(dataset), dataset.num_shards, dataset.is_remote) == (SHARDS * SAMPLES, SHARDS, True)
    assert not server.requests()
    assert dataset[0].read() == expected()[0][1]
    assert asked(server).keys() == {("GET", "/d/0.tar")}


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def read_some(dataset, indices):
    """What a worker process does."""
    return [(sample.key, sample.read()) for sample in map(dataset.__getitem__, indices)]


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_worker_process_opens_no_catalog_anew_and_asks_for_payloads_alone(method):
    with FaultProcess() as server:
        for shard in range(4):
            server.put(f"/d/{shard}.tar", tar_bytes(members_of(shard)))
        dataset = quick(server)
        assert dataset[0].read() == expected()[0][1]  # a connection is open
        server.forget()
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        worker = context.Process(target=send, args=(queue, read_all, dataset))
        worker.start()
        answer = queue.get(timeout=60)
        worker.join(30)
        assert answer == expected(4)
        assert {(request.method, request.path) for request in server.requests()} == {
            ("GET", f"/d/{shard}.tar") for shard in range(4)
        }
        assert read_all(dataset) == expected(4)


def test_scattered_samples_are_fetched_side_by_side_and_once():
    with FaultServer() as server:
        fill(server, 16, samples=20, size=4000)
        dataset = quick(server)
        wanted = [(7 * number * number + 3 * number) % len(dataset) for number in range(64)]
        assert len({index // 20 for index in wanted}) > 10
        right = expected(16, samples=20, size=4000)
        len(dataset)
        server.add(Fault.latency(0.1))

        def read():
            server.forget()
            samples = dataset.read_samples(wanted, copy=True)
            assert samples == [{"__key__": right[index][0], **right[index][1]} for index in wanted]
            # These shards are small: one read each.
            assert len(server.requests()) <= len({index // 20 for index in wanted})

        def read_pictures():
            assert dataset.read_field(wanted, "jpg", copy=True) == [right[index][1]["jpg"] for index in wanted]

        assert least_seconds(read, 1) < 1
        assert least_seconds(read_pictures, 1) < 1


def test_samples_whose_fields_differ_are_fetched_together():
    with FaultServer() as server:
        members = [
            (f"{number:04d}.{field}", f"{number} {field}".encode() * 9)
            for number in range(60)
            for field in (("jpg", "txt"), ("jpg",), ("jpg", "cls", "txt"))[number % 3]
        ]
        server.put("/d/0.tar", tar_bytes(members))
        dataset = quick(server)
        len(dataset)
        server.forget()
        found = [{**sample} for sample in dataset.iter_dicts()]
        assert len(server.requests()) <= 2
        assert [value for sample in found for field, value in sample.items() if field != "__key__"] == [
            payload for _, payload in members
        ]
        server.forget()
        dataset.policy = Policy(defaults={"cls": None})
        assert [sample["cls"] for sample in dataset.iter_dicts(["cls"])] == [
            f"{number} cls".encode() * 9 if number % 3 == 2 else None for number in range(60)
        ]
        assert len(server.requests()) <= 2
        server.forget()
        assert len(dataset.read_samples(range(59, -1, -1))) == 60
        assert len(server.requests()) <= 2


def test_only_the_fields_that_are_chosen_are_transferred():
    with FaultServer() as server:
        fill(server, 2, samples=5, size=500_000)
        dataset = quick(server)
        len(dataset)
        server.forget()
        texts = [sample["txt"] for sample in dataset.iter_dicts(["txt"])]
        assert texts == [fields["txt"] for _, fields in expected(2, samples=5)]
        assert sum(request.sent for request in server.requests()) < 10_000


def test_an_epoch_reads_each_shard_in_few_requests_and_ahead_of_its_reader(server):
    dataset = quick(server)
    len(dataset)
    server.forget()
    samples = dataset.iter_dicts()
    first = next(samples)
    until(lambda: len(server.requests()) > 1)  # more is asked for than was taken
    found = [first, *samples]
    assert [sample["__key__"] for sample in found] == [key for key, _ in expected()]
    assert asked(server) == {("GET", f"/d/{n}.tar"): 1 for n in range(SHARDS)}


def test_the_loader_reads_each_shard_in_few_requests(server):
    dataset = quick(server)
    loader = TarDataLoader(dataset)
    len(dataset)
    assert [entry.path for entry in loader] == [name for shard in range(SHARDS) for name, _ in members_of(shard)]
    loader.reset()
    server.forget()
    assert [entry.data for entry in loader] == [payload for shard in range(SHARDS) for _, payload in members_of(shard)]
    assert asked(server) == {("GET", f"/d/{n}.tar"): 1 for n in range(SHARDS)}
    server.forget()
    places = [(shard, number) for number in range(SAMPLES) for shard in range(SHARDS)]
    entries = loader.load_samples(places)
    assert len({entry.path for entry in entries}) == len(places)
    assert asked(server) == {("GET", f"/d/{n}.tar"): 1 for n in range(SHARDS)}


def test_indexes_and_payloads_of_many_shards_are_asked_for_side_by_side(tmp_path):
    with FaultServer() as server:
        fill(server, 16, samples=4)
        server.add(Fault.latency(0.1))
        places = [(shard, number) for shard in range(16) for number in range(4)]
        numbers = count()

        def read(dataset):
            assert len({entry.path for entry in TarDataLoader(dataset).load_samples(places)}) == 64

        def keep(dataset):
            dataset.enable_metadata_cache(tmp_path / str(next(numbers)), init_shard_count=16)

        for act in (read, keep):
            datasets = (quick(server) for _ in count())
            # Three requests a shard, one after the other, are 4.8 s.
            assert least_seconds(lambda act=act, datasets=datasets: act(next(datasets)), 1.5) < 1.5


# ---- failures


def test_a_shard_that_changes_before_it_is_read_is_an_error_that_names_it(server):
    dataset = quick(server)
    len(dataset)
    server.put("/d/3.tar", tar_bytes(members_of(50)))
    with pytest.raises(ChangedError, match=r"/d/3\.tar"):
        list(dataset.iter_dicts())
    with pytest.raises(ChangedError, match=r"/d/3\.tar"):
        dataset[3 * SAMPLES].read()
    again = quick(server)
    assert again[3 * SAMPLES].key == "00000300"
    assert [sample.key for sample in again][-1] == expected()[-1][0]


def test_a_shard_that_changes_in_the_middle_of_an_epoch_is_counted_if_asked(server):
    dataset = quick(server, policy=Policy(on_error="skip"))
    len(dataset)
    kept = [sample["__key__"] for sample in dataset.iter_dicts(start=0, stop=2 * SAMPLES)]
    server.put("/d/5.tar", tar_bytes(members_of(50)))
    server._objects.pop("/d/6.tar")
    kept += [sample["__key__"] for sample in dataset.iter_dicts(start=2 * SAMPLES)]
    assert kept == [key for at, (key, _) in enumerate(expected()) if at // SAMPLES not in {5, 6}]
    assert dataset.report.counts == {"read_failed": 2 * SAMPLES}
    assert any(
        "/d/5.tar" in place.shard and "changed" in place.message for place in dataset.report.places("read_failed")
    )
    assert dataset.read_samples([5 * SAMPLES, 0], copy=True)[0] is None


def test_a_shard_that_vanishes_is_an_error_that_names_it(server):
    dataset = quick(server)
    len(dataset)
    server._objects.pop("/d/2.tar")
    with pytest.raises(NotFoundError, match=r"/d/2\.tar"):
        list(dataset.iter_dicts())
    with pytest.raises(NotFoundError, match=r"/d/2\.tar"):
        list(TarDataLoader(dataset))
    fresh = discover_dataset(server.url + "d/{0,1,3}.tar")
    assert len(fresh) == 3 * SAMPLES


def test_what_fails_for_good_under_skip_is_not_tried_again_for_every_sample_of_the_shard():
    with FaultServer() as server:
        fill(server, 2, samples=200)
        dataset = quick(server, policy=Policy(on_error="skip"))
        len(dataset)
        server.add(Fault.status(503), path="/d/1.tar")
        server.forget()
        begin = time.monotonic()
        assert len(list(dataset.iter_dicts())) == 200
        assert dataset.report.counts == {"read_failed": 200}
        # With the ordinary policy one failure takes some twenty seconds: hours for a shard, if each sample tries alone.
        assert len(server.requests("GET", "/d/1.tar")) <= 10 * QUICK.attempts, time.monotonic() - begin


def test_a_server_that_is_away_for_two_seconds_in_an_epoch_is_waited_for():
    with FaultServer() as server:
        fill(server, 4)
        dataset = discover_dataset(server.url + "d/")
        len(dataset)
        samples = dataset.iter_dicts()
        keys = [next(samples)["__key__"]]
        server.down(2)
        keys += [sample["__key__"] for sample in samples]
        server.down(1)
        assert [key for key, _ in read_all(dataset)] == keys == [key for key, _ in expected(4)]


def test_a_server_that_ignores_ranges_is_refused_with_a_hint_and_served_by_a_cache(server, tmp_path):
    dataset = quick(server)
    len(dataset)
    server.add(Fault.ignore_range())
    with pytest.raises(RangeIgnoredError, match=r"/d/0\.tar") as caught:
        dataset[1].read()
    assert "cache" in caught.value.hint
    dataset.enable_shard_cache(tmp_path / "cache")
    assert read_all(dataset) == expected()


def test_shards_of_a_server_that_ignores_ranges_are_indexed_by_way_of_the_cache(server, tmp_path):
    server.add(Fault.ignore_range())
    dataset = quick(server)
    dataset.enable_shard_cache(tmp_path / "cache")
    assert read_all(dataset) == expected()


def test_a_damaged_shard_elsewhere_is_an_error_or_counted_as_the_policy_says(server):
    whole = tar_bytes(members_of(4))
    server.put("/d/4.tar", whole[: 5 * 1024 + 100])
    with pytest.raises(FormatError, match=r"/d/4\.tar"):
        len(quick(server))
    lenient = quick(server, policy=Policy(on_error="skip"))
    assert len(lenient) < SHARDS * SAMPLES
    (code,) = lenient.report.counts
    assert lenient.report.places(code)[0].shard == server.url + "d/4.tar"
    # What a lenient run has kept does not make the damage good.
    with pytest.raises(FormatError, match=r"/d/4\.tar"):
        len(quick(server))
    with pytest.raises(FormatError, match=r"/d/4\.tar"):
        quick(server).files(4)


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_lines_that_break_in_an_epoch_do_no_harm(server, action):
    dataset = quick(server, policy=Policy(on_error=action))
    len(dataset)
    server.add(Fault.reset(after=700), every=2, method="GET")
    server.add(Fault.status(503), every=5)
    assert [(sample.pop("__key__"), sample) for sample in dataset.iter_dicts()] == expected()
    assert not dataset.report.counts


# ---- caches


@pytest.mark.parametrize("block_mb", [None, 0.005])
@pytest.mark.parametrize("kind", ["remote", "local"])
def test_a_cached_dataset_gives_what_it_gave_before(server, tmp_path, block_mb, kind):
    for shard in range(SHARDS):
        write_shard(tmp_path / "d" / f"{shard}.tar", members_of(shard))
    dataset = quick(server) if kind == "remote" else discover_dataset(tmp_path / "d")
    events = []
    assert dataset.cache is None
    dataset.enable_shard_cache(tmp_path / "cache", block_mb=block_mb, on_event=events.append)
    assert read_all(dataset) == expected()
    assert [entry.data for entry in TarDataLoader(dataset)] == [
        payload for shard in range(SHARDS) for _, payload in members_of(shard)
    ]
    stats = dataset.cache.stats()
    assert stats.misses == stats.entries > 0
    assert (stats.failures, stats.evictions, stats.read_throughs) == (0, 0, 0)
    assert sum(event.kind == "download_finished" for event in events) == stats.misses
    server.forget()
    again = open_dataset(dataset.catalog.folder)
    again.enable_shard_cache(tmp_path / "cache", block_mb=block_mb)
    assert read_all(again) == expected()
    assert not server.requests()
    assert again.cache.stats().misses == 0


def test_datasets_that_share_a_cache_keep_shards_of_one_name_apart(tmp_path):
    with FaultServer() as one, FaultServer() as two:
        one.put("/d/0.tar", tar_bytes(members_of(0)))
        two.put("/d/0.tar", tar_bytes(members_of(1)))
        two.put("/e/0.tar", tar_bytes(members_of(2)))
        for url, number in ((one.url + "d", 0), (two.url + "d", 1), (two.url + "e", 2)) * 2:
            dataset = discover_dataset(url)
            dataset.enable_shard_cache(tmp_path)
            assert read_all(dataset) == expected(3)[number * SAMPLES : (number + 1) * SAMPLES]
        assert len(one.requests("GET", "*.tar")) + len(two.requests("GET", "*.tar")) == 6  # headers, then the whole


def test_a_cached_dataset_is_read_when_its_server_is_gone(tmp_path):
    with FaultServer() as server:
        fill(server)
        dataset = quick(server)
        dataset.enable_shard_cache(tmp_path)
        read_all(dataset)
        folder = dataset.catalog.folder
    again = open_dataset(folder)
    again.enable_shard_cache(tmp_path)
    begin = time.monotonic()
    assert read_all(again) == expected()
    assert [(sample.pop("__key__"), sample) for sample in again.iter_dicts()] == expected()
    assert again.cache.is_cached(SHARDS - 1)
    assert time.monotonic() - begin < 15


def test_the_loader_reads_a_cached_dataset_when_its_server_is_gone(tmp_path):
    with FaultServer() as server:
        fill(server, 2)
        dataset = quick(server)
        dataset.enable_shard_cache(tmp_path)
        right = [(entry.path, entry.data) for entry in TarDataLoader(dataset)]
        folder = dataset.catalog.folder
    again = open_dataset(folder)
    again.enable_shard_cache(tmp_path)
    begin = time.monotonic()
    assert [(entry.path, entry.data) for entry in TarDataLoader(again)] == right
    assert time.monotonic() - begin < 15
    assert not again.report.counts  # an index that was never there is not a bad one


def test_a_spawned_worker_uses_the_cache_that_the_dataset_had(tmp_path):
    with FaultProcess() as server:
        for shard in range(3):
            server.put(f"/d/{shard}.tar", tar_bytes(members_of(shard)))
        dataset = quick(server)
        dataset.enable_shard_cache(tmp_path / "cache", on_event=print)
        assert read_all(dataset) == expected(3)
        server.forget()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        worker = context.Process(target=send, args=(queue, read_all, dataset))
        worker.start()
        assert queue.get(timeout=60) == expected(3)
        worker.join(30)
        assert not server.requests()
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy.cache.is_cached(0)


def test_the_cache_of_a_dataset_is_asked_by_number(server, tmp_path):
    dataset = quick(server)
    dataset.enable_shard_cache(tmp_path, parallel_downloads=2)
    assert not dataset.cache.is_cached(0)
    assert dataset.cache.progress(0) is None
    assert dataset.cache.prepare([0, 2, 2]) == [0, 2]
    until(lambda: dataset.cache.is_cached(0) and dataset.cache.is_cached(2))
    assert dataset.cache.prepare([0, 2]) == []
    assert dataset.cache.progress(2) == len(tar_bytes(members_of(2)))
    assert not dataset.cache.is_downloading(2)
    for call in (dataset.cache.is_cached, dataset.cache.progress, dataset.cache.is_downloading):
        with pytest.raises(IndexError):
            call(SHARDS)
    with pytest.raises(IndexError):
        dataset.cache.prepare([SHARDS])
    for wrong in ({"cache_limit_gb": 0}, {"parallel_downloads": 0}, {"block_mb": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            dataset.enable_shard_cache(tmp_path, **wrong)


def test_a_background_download_that_fails_raises_where_its_shard_is_read(server, tmp_path):
    dataset = quick(server)
    len(dataset)
    dataset.enable_shard_cache(tmp_path)
    server.add(Fault.status(403), path="/d/1.tar")
    assert dataset.cache.prepare([0, 1]) == [0, 1]
    until(lambda: dataset.cache.is_cached(0) and not dataset.cache.is_downloading(1))
    assert dataset[0].read() == expected()[0][1]
    with pytest.raises(AccessError, match=r"/d/1\.tar"):
        dataset[SAMPLES].read()
    server.behave()
    assert dataset[SAMPLES].read() == expected()[SAMPLES][1]


def test_sidecar_indexes_are_cached_for_as_long_as_they_stay_the_same(server, tmp_path):
    for shard in range(SHARDS):
        write_shard(tmp_path / "d" / f"{shard}.tar", members_of(shard))
    index_dataset(tmp_path / "d", workers=0)
    for path in (tmp_path / "d").glob("*.json"):
        server.put(f"/d/{path.name}", path.read_bytes())
    dataset = quick(server)
    assert dataset.get_cache_stats() == {
        "cached_shards": 0,
        "cache_size_bytes": 0,
        "cache_size_mb": 0.0,
        "cache_enabled": False,
    }
    dataset.enable_metadata_cache(tmp_path / "meta", init_shard_count=3)
    stats = dataset.get_cache_stats()
    place = str(tmp_path / "meta")
    assert (stats["cached_shards"], stats["cache_enabled"], stats["cache_location"]) == (3, True, place)
    assert stats["cache_size_bytes"] > 0
    again = quick(server)
    server.forget()
    again.enable_metadata_cache(tmp_path / "meta", init_shard_count=3)
    assert not server.requests("GET", "*.json")
    server.put("/d/0.json", (tmp_path / "d" / "0.json").read_bytes() + b"\n")
    again = quick(server)
    again.enable_metadata_cache(tmp_path / "meta", init_shard_count=3)
    assert len(server.requests("GET", "*.json")) == 1
    del dataset  # which keeps some indexes open, and what is in use is not removed
    again.clear_metadata_cache()
    assert again.get_cache_stats()["cached_shards"] == 0
    assert again.list_files_in_shard(0)
    assert again.get_cache_stats()["cached_shards"] == 1
    again.enable_metadata_cache(tmp_path / "other", init_shard_count=100)
    assert again.get_cache_stats()["cached_shards"] == SHARDS


# ---- what is never told

SECRETS = ("pw-SECRET-0", "SECRET-1", "SECRET-2", "SECRET-3", "SECRET-4")
QUERY = "?X-Amz-Signature=SECRET-1&X-Amz-Credential=SECRET-2&token=SECRET-3&api_key=SECRET-4"


def secrets_in_files(*folders):
    """The secrets that stand in any file or file name below some folders."""
    found = set()
    for folder in folders:
        for path in folder.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            found |= {secret for secret in SECRETS if secret.encode() in content or secret in str(path)}
    return found


@pytest.mark.parametrize("source", ["d/{0..3}.tar", "d/", "d/[0-3].tar", "list.txt"])
def test_no_file_state_report_log_or_text_holds_what_lets_one_in(
    server,
    tmp_path,
    private_cache,  # noqa: F811
    caplog,
    source,
):
    caplog.set_level(logging.DEBUG)
    start = server.url.replace("://", "://user:pw-SECRET-0@")
    server.put("/d/2.json", b"no index")
    server.put("/list.txt", "\n".join(f"{start}d/{n}.tar{QUERY}" for n in range(4)).encode())
    dataset = discover_dataset(f"{start}{source}{QUERY}", store=HttpStore(retry=QUICK), policy=Policy(on_error="skip"))
    events = []
    dataset.enable_shard_cache(tmp_path / "cache", on_event=events.append)
    dataset.enable_metadata_cache(tmp_path / "meta")
    assert read_all(dataset)[:24] == expected(4)
    loader = TarDataLoader(dataset)
    entry = next(loader)
    server._objects.pop("/d/1.tar")
    told = [repr(dataset), str(dataset.report), json.dumps(loader.state_dict()), repr(loader), repr(entry)]
    told += [repr(dataset.cache), repr(events), repr(dataset.cache.stats()), repr(dataset.get_cache_stats())]
    told += [repr(loader.get_next_shard_info()), repr(loader.get_lookahead_cache_status())]
    told += [repr(loader.get_shard_cache_status("3.tar")), repr(dataset[0]), dataset.name]
    told += [url for url, _ in dataset.faults()]
    assert dataset.report.counts["bad_index"] >= 1
    assert not [text for text in told if any(secret in text for secret in SECRETS)]
    assert not [secret for secret in SECRETS if secret in caplog.text]
    assert not secrets_in_files(private_cache, tmp_path)
    assert all(request.path.endswith(QUERY) for request in server.requests("GET", "/d/*.tar"))
    assert all("authorization" in request.headers for request in server.requests("GET", "/d/*.tar"))


def test_no_error_of_a_signed_shard_holds_what_lets_one_in(server):
    start = server.url.replace("://", "://user:pw-SECRET-0@")
    dataset = discover_dataset(f"{start}d/{{0..3}}.tar{QUERY}", store=HttpStore(retry=QUICK))
    len(dataset)
    server.put("/d/1.tar", tar_bytes(members_of(70)))
    server._objects.pop("/d/2.tar")
    server.add(Fault.status(403, body=f"no {QUERY} for user:pw-SECRET-0".encode()), path="/d/3.tar")
    server.add(Fault.ignore_range(), path="/d/0.tar")
    for shard in range(4):
        with pytest.raises(StorageError, match=rf"d/{shard}\.tar") as caught:
            dataset[shard * SAMPLES].read()
        text = str(caught.value) + repr(caught.value) + repr(vars(caught.value))
        assert not [secret for secret in SECRETS if secret in text]
    server.behave()
    server.put("/d/0.tar", b"no tar at all" * 100)
    with pytest.raises(FormatError) as caught:
        len(discover_dataset(f"{start}d/0.tar{QUERY}"))
    assert not [secret for secret in SECRETS if secret in str(caught.value)]


def test_a_worker_gets_the_signatures_and_a_catalog_does_not():
    with FaultProcess() as server:
        for shard in range(2):
            server.put(f"/d/{shard}.tar", tar_bytes(members_of(shard)))
        dataset = discover_dataset(f"{server.url}d/{QUERY}")
        len(dataset)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        worker = context.Process(target=send, args=(queue, read_all, dataset))
        server.forget()
        worker.start()
        assert queue.get(timeout=60) == expected(2)
        worker.join(30)
        assert all(request.path.endswith(QUERY) for request in server.requests())
        assert "SECRET" not in open_dataset(dataset.catalog.folder).shard_url(0)


def test_a_url_that_is_signed_anew_is_the_same_shard(server, tmp_path):
    def signed(number):
        dataset = discover_dataset(f"{server.url}d/{{0..3}}.tar?X-Amz-Date={number}&X-Amz-Signature=s{number}")
        dataset.enable_shard_cache(tmp_path)
        return dataset

    assert read_all(signed(1)) == expected(4)
    server.forget()
    assert read_all(signed(2)) == expected(4)
    assert not server.requests("GET")


# ---- interrupted work


def test_an_index_that_broke_off_goes_on_where_it_stopped(server):
    server.add(Fault.latency(0.9), path="/d/5.tar", method="GET")  # the others are done by then
    server.add(Fault.status(403), path="/d/5.tar", method="GET")
    with pytest.raises(AccessError, match=r"/d/5\.tar"):
        len(quick(server))
    server.behave()
    server.forget()
    dataset = quick(server)
    assert len(dataset) == SHARDS * SAMPLES
    assert {request.path for request in server.requests("GET", "*.tar")} == {"/d/5.tar"}
    assert read_all(dataset) == expected()


def test_indexes_of_a_store_that_was_given_go_to_a_folder_of_this_machine(server, tmp_path):
    result = index_dataset(server.url + "d/", destination=tmp_path, store=HttpStore(retry=QUICK), workers=0)
    assert result.sidecars_written == SHARDS
    assert len(list(tmp_path.glob("*.json"))) == SHARDS


# ---- several places at once


def test_a_dataset_of_several_servers_and_folders_is_one(server, tmp_path):
    write_shard(tmp_path / "local.tar", members_of(20))
    with serve_nginx(tmp_path) as nginx:
        dataset = discover_dataset(
            [f"{server.url}d/{{1,0}}.tar", f"{nginx.url}local.tar", str(tmp_path / "local.tar")],
        )
        right = expected(21)
        parts = [1, 0, 20, 20]
        keys = [right[at * SAMPLES + number][0] for at in parts for number in range(SAMPLES)]
        assert [key for key, _ in read_all(dataset)] == keys
        assert [sample["__key__"] for sample in dataset.read_samples(range(len(dataset)))] == keys
        assert [sample["__key__"] for sample in dataset.iter_dicts()] == keys
        names = [dataset.get_shard_info(number)["name"] for number in range(4)]
        assert len(set(names)) == 4
        assert pickle.loads(pickle.dumps(dataset))[13].read() == dataset[13].read()


def test_threads_share_a_remote_dataset(server):
    dataset = quick(server)
    answers = {}

    def work(number):
        answers[number] = read_all(dataset)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[number] == expected() for number in range(6))


def test_a_server_that_is_down_for_good_is_a_transfer_error_with_attempts():
    with FaultServer() as server:
        fill(server, 1)
        dataset = quick(server)
        len(dataset)
    with pytest.raises(TransferError, match=r"/d/0\.tar") as caught:
        dataset[0].read()
    assert caught.value.attempts == QUICK.attempts


@pytest.mark.slow
def test_a_port_that_nobody_listens_on_is_said_within_fifteen_seconds():
    begin = time.monotonic()
    with pytest.raises(TransferError, match="connect"):
        discover_dataset("http://127.0.0.1:9/d/")
    assert time.monotonic() - begin < 15


_LARGE = """
import sys
from pathlib import Path
import shardset

dataset = shardset.discover_dataset(sys.argv[1])
count = len(dataset)
for number, entry in enumerate(shardset.TarDataLoader(dataset)):
    if number > 1500:
        break
texts = sum(len(sample["jpg"]) for sample in dataset.iter_dicts(["jpg"], start=1, stop=1500))
found = dataset.read_field([1 + (number * 7919) % 1999 for number in range(400)], "jpg")
# Not by getrusage, whose peak is that of the process that started this one, if that had more.
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(count, texts, sum(map(len, found)), peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in Linux's units, and wants sparse files")
def test_a_shard_of_two_gigabytes_is_indexed_and_read_in_little_memory(tmp_path):
    def header(name, size):
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.GNU_FORMAT)

    with (tmp_path / "big.tar").open("wb") as file:
        for large in range(3):
            file.write(header(f"big{large}.bin", 650 << 20))
            file.seek(650 << 20, os.SEEK_CUR)
            for small in range(2000):
                file.write(header(f"{large}{small:06d}.jpg", 20_000) + b"x" * 20_480)
        file.write(bytes(1024))
    with serve_nginx(tmp_path) as nginx:
        run = subprocess.run(
            [sys.executable, "-c", _LARGE, nginx.url], capture_output=True, text=True, check=False, timeout=120
        )
        assert not run.stderr
        count, texts, found, kilobytes = map(int, run.stdout.split())
        assert (count, texts, found) == (6003, 1499 * 20_000, 400 * 20_000)
        assert kilobytes < 512 << 10
        assert sum(request.sent for request in nginx.requests()) < 500 << 20
