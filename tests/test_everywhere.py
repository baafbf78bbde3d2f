"""One script over every place: discover, index, random samples, an epoch of the loader and of the dataset.

The answers must be the same, whatever the shards lie on. Slow because three servers start.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import random

import pytest

import shardset
from servers.nginx import serve_nginx
from servers.s3 import serve_s3
from shards import make_members, private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset.formats.example import encode_example
from shardset.storage import AnyStore, CloudStore, HttpStore, LocalStore
from tfrecords import record_bytes

pytestmark = pytest.mark.slow
SHARDS = 5
SAMPLES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of large and small members, in folders, one with a sidecar index, one with names in PAX headers."""
    folder = tmp_path_factory.mktemp("everywhere") / "data"
    chooser = random.Random(9)
    for number in range(SHARDS):
        members = make_members(SAMPLES, prefix=f"{number}/", fields=("jpg", "json", "txt"))
        size = 60_000 if number % 2 else 500
        members = [
            (
                name,
                chooser.randbytes(size)
                if name.endswith("jpg")
                else payload.encode()
                if isinstance(payload, str)
                else payload,
            )
            for name, payload in members
        ]
        write_shard(folder / f"sub {number % 2}" / f"train-{number:03d}.tar", members, pax=number == 3)
    shardset.index_dataset(folder / "sub 1" / "train-001.tar", geometry=False, destination=None, workers=0)
    return folder


@pytest.fixture(scope="module")
def records(folder):
    """TFRecord shards beside them: large and small records, one shard compressed, one with an index."""
    chooser = random.Random(10)
    root = folder.parent / "records"
    root.mkdir()
    for number in range(3):
        examples = [
            encode_example({"label": [at], "image": [chooser.randbytes(100_000 if number == 1 else 300)]})
            for at in range(number * 50, number * 50 + 50)
        ]
        content = record_bytes(examples)
        path = root / f"train-{number:05d}-of-00003.tfrecord"
        path.write_bytes(gzip.compress(content, 1) if number == 2 else content)
    shardset.index_dataset(root / "train-00000-of-00003.tfrecord", workers=0)
    return root


@pytest.fixture(scope="module")
def nginx(folder, records):  # noqa: ARG001 - what lies there is served
    with serve_nginx(folder.parent) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(folder, records):  # noqa: ARG001 - what lies there is stored
    with serve_s3() as server:
        store = CloudStore(options=server.options)
        name = server.make_bucket()
        for path in sorted(folder.parent.rglob("*")):
            if path.is_file() and ".shardset" not in path.parts:
                store.write(f"s3://{name}/{path.relative_to(folder.parent).as_posix()}", path.read_bytes())
        yield f"s3://{name}/data", server.options


def script(source, store, prepare=id):
    """What a user does with a dataset, and a digest of every answer."""
    said = {}
    dataset = shardset.discover_dataset(source, store=store)
    prepare(dataset)
    said["shards"] = [dataset.get_shard_info(number)["name"] for number in range(dataset.num_shards)]
    said["samples"] = len(dataset)
    said["size"] = dataset.total_size
    said["files"] = hashlib.sha256(repr([dataset.list_files_in_shard(n) for n in range(SHARDS)]).encode()).hexdigest()
    chooser = random.Random(4)
    wanted = [chooser.randrange(len(dataset)) for _ in range(64)]
    said["random"] = digest(payload for index in wanted for payload in dataset[index].read().values())
    said["at once"] = digest(value for sample in dataset.read_samples(wanted) for value in list(sample.values())[1:])
    said["field"] = digest(dataset.read_field(wanted, "jpg"))
    said["file"] = digest([dataset[7].open("jpg").read(), dataset[70].open("jpg").read()])
    said["captions"] = digest(str(dataset.row(index)).encode() for index in range(0, len(dataset), 17))
    loader = shardset.TarDataLoader(dataset)
    said["loader"] = digest(part for entry in loader for part in (entry.path.encode(), entry.data))
    state = loader.load_state_dict({**loader.state_dict(), "current_shard": 2, "current_file_index": 5})
    assert state is None
    said["resumed"] = digest(entry.path.encode() for entry in loader)
    said["epoch"] = digest(
        value if isinstance(value, bytes) else value.encode()
        for sample in dataset.iter_dicts()
        for value in sample.values()
    )
    said["some fields"] = digest(sample["txt"] for sample in dataset.iter_dicts(["txt"], start=30, stop=250))
    said["report"] = dataset.report.counts
    said["pipeline"], said["dropped"] = pipeline_script(dataset, dataset._cache or store)
    return said


def pipeline_script(dataset, store):
    """One epoch of the streaming pipeline over the same shards, broken off and gone on with in the middle."""
    urls = [dataset.shard_url(number) for number in range(dataset.num_shards)]

    def make():
        return shardset.WebDataset(urls, shardshuffle=True, store=store).shuffle(40)

    whole = make()
    samples = [(sample["__key__"], sample["jpg"], sample["json"], sample["txt"]) for sample in whole]
    first = make()
    begun = [sample["__key__"] for sample in itertools.islice(first, 133)]
    second = make()
    second.load_state_dict(first.state_dict())
    assert begun + [sample["__key__"] for sample in second] == [sample[0] for sample in samples]
    parts = (part if isinstance(part, bytes) else part.encode() for sample in samples for part in sample)
    return digest(parts), whole.report().counts


def record_script(source, store, prepare=id):
    """The same for TFRecord shards."""
    said = {}
    dataset = shardset.discover_dataset(source, store=store)
    prepare(dataset)
    said["shards"] = [dataset.get_shard_info(number)["name"] for number in range(dataset.num_shards)]
    said["samples"] = len(dataset)
    chooser = random.Random(5)
    wanted = [chooser.randrange(len(dataset)) for _ in range(40)]
    said["random"] = digest(dataset[index].record for index in wanted)
    said["labels"] = [dataset[index]["label"].tolist() for index in wanted]
    said["at once"] = digest(dataset.read_records(wanted))
    said["parsed"] = digest(sample["image"][0] for sample in dataset.read_samples(wanted, ["image"]))
    said["epoch"] = digest(dataset.iter_records())
    said["dicts"] = digest(sample["image"][0] for sample in dataset.iter_dicts())
    said["stream"] = digest(raw for n in range(3) for raw in shardset.iter_records(dataset.shard_url(n), store=store))
    said["loader"] = digest(
        part for entry in shardset.TarDataLoader(dataset) for part in (entry.path.encode(), entry.data)
    )
    said["schema"] = dataset.schema()
    said["report"] = dataset.report.counts
    return said


def digest(parts):
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


@pytest.fixture(scope="module")
def expected(folder):
    return script(str(folder), LocalStore())


def test_shards_on_a_web_server_give_what_local_ones_give(nginx, expected):
    assert script(nginx.url + "data", HttpStore()) == expected
    assert script(nginx.url + "data/", None) == expected


def test_shards_in_a_bucket_give_what_local_ones_give(bucket, expected):
    url, options = bucket
    assert script(url, CloudStore(options=options)) == expected
    assert script(f"{url}/", AnyStore({"s3": CloudStore(options=options)})) == expected


def test_shards_without_maps_give_what_mapped_ones_give(folder, expected):
    assert script(str(folder), LocalStore(mmap=False)) == expected


@pytest.mark.parametrize("block_mb", [None, 0.1])
def test_cached_shards_give_what_local_ones_give(nginx, expected, tmp_path, block_mb):
    def cache(dataset):
        dataset.enable_shard_cache(tmp_path, block_mb=block_mb)

    assert script(nginx.url + "data", HttpStore(), cache) == expected
    nginx.forget()
    assert script(nginx.url + "data", HttpStore(), cache) == expected
    assert not [request for request in nginx.requests() if request.method == "GET" and request.uri.endswith(".tar")]


def test_records_are_the_same_everywhere(records, nginx, bucket, tmp_path):
    url, options = bucket
    expected = record_script(str(records), LocalStore())
    chooser = random.Random(5)
    assert expected["labels"] == [[chooser.randrange(150)] for _ in range(40)]

    def cache(dataset):
        dataset.enable_shard_cache(tmp_path)

    assert record_script(str(records), LocalStore(mmap=False)) == expected
    assert record_script(nginx.url + "records", HttpStore()) == expected
    assert record_script(nginx.url + "records/train@3.tfrecord", HttpStore()) == expected
    assert record_script(nginx.url + "records/train@3?signature=x", HttpStore())["labels"] == expected["labels"]
    assert record_script(nginx.url + "records", HttpStore(), cache) == expected
    assert record_script(url.replace("/data", "/records"), CloudStore(options=options)) == expected


def test_large_records_elsewhere_are_jumped_over(nginx, records):
    shard = records.parent / "large" / "a.tfrecord"
    shard.parent.mkdir()
    payload = random.Random(6).randbytes(1_000_000)
    shard.write_bytes(record_bytes([payload]) * 20)
    nginx.forget()
    dataset = shardset.discover_dataset(nginx.url + "large", store=HttpStore())
    assert len(dataset) == 20
    sent = sum(request.sent for request in nginx.requests() if request.uri.endswith(".tfrecord"))
    assert sent < shard.stat().st_size / 4
    assert dataset[17].record == payload
