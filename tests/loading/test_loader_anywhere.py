"""The loader over every place: the streams and the bytes must be the same, whatever the shards lie on.

Slow because servers start.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import random
import time

import pytest

import shardset
from servers.delay import delay_proxy
from servers.nginx import serve_nginx
from servers.s3 import serve_s3
from shards import make_members, private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset.formats.example import encode_example
from shardset.loading.loader import Loader
from shardset.loading.order import Shuffle
from shardset.loading.read_ahead import ReadAhead
from shardset.storage import CloudStore, HttpStore, LocalStore, MemoryStore
from tfrecords import record_bytes

pytestmark = pytest.mark.slow
SHARDS, SAMPLES = 5, 60
WINDOWS = Shuffle(window_bytes=400_000, run_bytes=60_000, lanes=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Tar shards with large and small members and names in PAX headers, and TFRecord shards, one compressed."""
    root = tmp_path_factory.mktemp("anywhere")
    chooser = random.Random(9)
    for number in range(SHARDS):
        members = []
        for name, payload in make_members(SAMPLES, prefix=f"{number}/", fields=("bin", "json", "txt")):
            size = 40_000 if number % 2 else 500
            members.append((name, chooser.randbytes(size) if name.endswith("bin") else payload))
        write_shard(root / "tars" / f"train-{number:03d}.tar", members, pax=number == 3)
    (root / "records").mkdir()
    for number in range(3):
        examples = [
            encode_example({"label": [at], "bin": [chooser.randbytes(50_000 if number == 1 else 300)]})
            for at in range(number * 50, number * 50 + 50)
        ]
        content = record_bytes(examples)
        path = root / "records" / f"train-{number:05d}-of-00003.tfrecord"
        path.write_bytes(gzip.compress(content, 1) if number == 2 else content)
    return root


@pytest.fixture(scope="module")
def nginx(root):
    with serve_nginx(root) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(root):
    with serve_s3() as server:
        store = CloudStore(options=server.options)
        name = server.make_bucket()
        for path in sorted(root.rglob("*")):
            if path.is_file():
                store.write(f"s3://{name}/{path.relative_to(root).as_posix()}", path.read_bytes())
        yield f"s3://{name}/", server.options


@pytest.fixture(params=["tars", "records"])
def kind(request):
    return request.param


def streams(dataset):
    """Digests of what loaders of all kinds give: orders, ranks, budgets, fields, a state in the midst."""
    said = {}
    for name, shuffle in (("no", False), ("windows", WINDOWS), ("default", True), ("full", "full")):
        said[name] = digest(Loader(dataset, 8, shuffle=shuffle, seed=5))
        said[f"{name}, rank 1 of 3"] = digest(Loader(dataset, 4, shuffle=shuffle, seed=5, rank=1, world_size=3))
    small = ReadAhead(bytes=200_000)
    said["small"] = digest(Loader(dataset, 8, shuffle=WINDOWS, seed=5, read_ahead=small))
    assert said["small"] == said["windows"]
    said["one field"] = digest(Loader(dataset, 8, shuffle=WINDOWS, fields=["bin"]))
    said["decoded"] = digest(Loader(dataset, 8, shuffle=WINDOWS, decode=True, tail="exact"))
    loader = Loader(dataset, 8, shuffle=WINDOWS, seed=5)
    begun = list(itertools.islice(loader, 11))
    again = Loader(dataset, 8, shuffle=WINDOWS, seed=5)
    again.load_state_dict(loader.state_dict(begun[6]))
    said["resumed"] = digest(again)
    assert loader.report.counts == {}
    return said


def digest(batches):
    total = hashlib.sha256()
    for batch in batches:
        shards = [url.rpartition("/")[2] for url in batch["__shard__"]]
        total.update(repr((batch["__key__"], shards, batch["__offset__"].tolist())).encode())
        for name in sorted(name for name in batch if not name.startswith("__")):
            for value in batch[name]:
                plain = value.tolist() if hasattr(value, "tolist") else value
                total.update(plain if isinstance(plain, bytes) else repr(plain).encode())
    return total.hexdigest()


@pytest.fixture(scope="module")
def expected(root):
    made = {}
    for kind in ("tars", "records"):
        dataset = shardset.discover_dataset(root / kind)
        made[kind] = streams(dataset)
        keys = [key for batch in Loader(dataset, 10) for key in batch["__key__"]]
        assert keys == [sample.key for sample in dataset]
    return made


def test_files_that_are_read_give_what_mapped_ones_give(root, kind, expected):
    assert streams(shardset.discover_dataset(root / kind, store=LocalStore(mmap=False))) == expected[kind]


def test_files_in_memory_give_what_mapped_ones_give(root, kind, expected):
    store = MemoryStore()
    for path in sorted((root / kind).iterdir()):
        store.write(f"memory://{kind}/{path.name}", path.read_bytes())
    assert streams(shardset.discover_dataset(f"memory://{kind}", store=store)) == expected[kind]


def test_a_web_server_gives_what_mapped_files_give(nginx, kind, expected):
    assert streams(shardset.discover_dataset(nginx.url + kind, store=HttpStore())) == expected[kind]


def test_a_bucket_gives_what_mapped_files_give(bucket, kind, expected):
    url, options = bucket
    assert streams(shardset.discover_dataset(url + kind, store=CloudStore(options=options))) == expected[kind]


@pytest.mark.parametrize("block_mb", [None, 0.1], ids=["whole", "blocks"])
def test_a_cache_gives_what_mapped_files_give_and_asks_for_nothing_twice(nginx, kind, expected, tmp_path, block_mb):
    dataset = shardset.discover_dataset(nginx.url + kind, store=HttpStore())
    dataset.enable_shard_cache(tmp_path, block_mb=block_mb)
    assert streams(dataset) == expected[kind]
    again = shardset.discover_dataset(nginx.url + kind, store=HttpStore())
    len(again)
    again.enable_shard_cache(tmp_path, block_mb=block_mb)
    nginx.forget()
    assert streams(again) == expected[kind]
    suffix = ".tar" if kind == "tars" else ".tfrecord"
    assert [request for request in nginx.requests() if request.method == "GET" and request.uri.endswith(suffix)] == []


def test_each_byte_of_a_web_server_is_asked_for_once(nginx):
    dataset = shardset.discover_dataset(nginx.url + "tars", store=HttpStore())
    len(dataset)
    for shuffle in (False, WINDOWS, True):
        nginx.forget()
        loader = Loader(dataset, 10, shuffle=shuffle)
        list(loader)
        requests = [request for request in nginx.requests() if request.uri.endswith(".tar")]
        sent = sum(request.sent for request in requests)
        assert sent <= 1.1 * dataset.total_size
        assert sent == loader.metrics.bytes
        assert len(requests) == loader.metrics.reads
        assert len(requests) < 300  # of 900 payloads


def test_far_away_batches_come_without_waiting_once_windows_are_read_ahead(nginx):
    with delay_proxy(nginx.port, 0.05) as proxy:
        dataset = shardset.discover_dataset(f"http://127.0.0.1:{proxy.port}/tars", store=HttpStore())
        len(dataset)
        for _ in range(5):  # the machine may be busy with something else
            loader = Loader(dataset, 4, shuffle=WINDOWS)
            waits = []
            for _ in loader:
                waits.append(loader.metrics.waited_for_storage)
                time.sleep(0.02)
            by_batch = [after - before for before, after in itertools.pairwise([0.0, *waits])]
            assert len(by_batch) == 75
            later = sum(by_batch[25:])
            if later < 0.2 and waits[-1] < 1.5:
                break
        assert later < 0.2  # 50 batches, of which each would wait for 0.05 s and more
        assert waits[-1] < 1.5
