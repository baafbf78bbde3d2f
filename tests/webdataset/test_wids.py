"""Random access by an index JSON, and the samplers that go with it."""

from __future__ import annotations

import gzip
import io
import json
import logging
import pickle
from collections import Counter
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.faulty import FaultServer
from shards import private_cache, read_samples, tar_bytes, write_shard  # noqa: F401 - a fixture
from shardset.errors import ChecksumError, DecodeError, IndexFileError, NotFoundError, ShardsetError
from shardset.webdataset.wids import (
    ChunkedSampler,
    DistributedChunkedSampler,
    ShardedSampler,
    ShardListDataset,
    ShardListSampler,
)
from shardset.webdataset.wids_decode import decode_all_gz, default_decoder
from shardset.webdataset.wids_index import create_index, main
from shardset.webdataset.wids_specs import load_dsdesc_and_resolve, urldir, urlmerge

SIZES = (5, 3, 4)


def members_of(shard, count):
    return [
        (f"{shard}-{number}.{field}", f"{shard}-{number} {field}".encode())
        for number in range(count)
        for field in ("txt", "bin")
    ]


@pytest.fixture
def folder(tmp_path):
    for shard, count in enumerate(SIZES):
        write_shard(tmp_path / f"s-{shard}.tar", members_of(shard, count))
    create_index([str(tmp_path / "s-{0..2}.tar")], tmp_path / "index.json", name="dozen")
    return tmp_path


def edit(path, change):
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    return path


def raw(source, **more):
    return ShardListDataset(source, transformations=None, **more)


def keys(dataset):
    return [dataset[number]["__key__"] for number in range(len(dataset))]


ALL = [f"{shard}-{number}" for shard, count in enumerate(SIZES) for number in range(count)]


# Samples


def test_samples_are_open_files_under_their_suffixes_with_dots(folder):
    dataset = raw(folder / "index.json")
    assert len(dataset) == 12
    sample = dataset[6]
    assert list(sample) == [".txt", ".bin", "__key__", "__dataset__", "__index__", "__shard__", "__shardindex__"]
    assert isinstance(sample[".txt"], io.BytesIO)
    assert sample.pop(".txt").read() == b"1-1 txt"
    assert sample.pop(".bin").read() == b"1-1 bin"
    assert sample == {
        "__key__": "1-1",
        "__dataset__": None,
        "__index__": 6,
        "__shard__": str(folder / "s-1.tar"),
        "__shardindex__": 1,
    }


def test_every_sample_is_what_tarfile_reads(folder):
    expected = [sample for shard in range(3) for sample in read_samples(folder / f"s-{shard}.tar")]
    dataset = raw(folder / "index.json")
    for number, sample in enumerate(expected):
        got = dataset[number]
        assert got["__key__"] == sample.key
        assert {part.suffix: part.payload for part in sample.parts} == {
            name[1:]: file.read() for name, file in got.items() if name.startswith(".")
        }


def test_suffixes_keep_their_capitals_and_keys_their_folders(tmp_path):
    write_shard(tmp_path / "a.tar", [("d.1/x.Seg.PNG", b"1"), ("d.1/x.TXT", b"2")])
    dataset = raw([{"url": str(tmp_path / "a.tar"), "nsamples": 1}])
    assert list(dataset[0])[:3] == [".Seg.PNG", ".TXT", "__key__"]
    assert dataset[0]["__key__"] == "d.1/x"


def test_names_longer_than_ustar_allows_are_found(tmp_path):
    names = [f"{'folder/' * 30}{'n' * 120}{number}" for number in range(3)]
    for pax in (False, True):
        write_shard(tmp_path / f"{pax}.tar", [(f"{name}.txt", b"x") for name in names], pax=pax)
        assert keys(raw([{"url": str(tmp_path / f"{pax}.tar"), "nsamples": 3}])) == names


def test_numbers_count_from_the_end_too_and_may_be_of_numpy(folder):
    dataset = raw(folder / "index.json")
    assert dataset[-1]["__key__"] == "2-3"
    assert dataset[-1]["__index__"] == 11
    assert dataset[np.int64(3)]["__key__"] == "0-3"


@pytest.mark.parametrize("number", [12, -13])
def test_a_number_that_is_no_sample_is_an_index_error(folder, number):
    with pytest.raises(IndexError, match=f"sample {number} of a dataset of 12"):
        raw(folder / "index.json")[number]


def test_iteration_ends_after_the_last_sample(folder):
    assert [sample["__key__"] for sample in raw(folder / "index.json")] == ALL


def test_many_samples_come_in_the_order_asked(folder):
    asked = [11, 0, 5, 0, 3, 7]
    got = raw(folder / "index.json").__getitems__(asked)
    assert [sample["__key__"] for sample in got] == [ALL[number] for number in asked]
    assert [sample["__index__"] for sample in got] == asked


def test_a_shard_that_is_listed_twice_is_there_twice(folder):
    entry = {"url": str(folder / "s-1.tar"), "nsamples": 3}
    assert keys(raw([entry, entry])) == ALL[5:8] * 2


def test_the_lengths_of_shards_are_told(folder):
    dataset = raw(folder / "index.json")
    assert dataset.lengths == list(SIZES)
    assert dataset.cum_lengths == [5, 8, 12]
    assert dataset.dataset_name == "dozen"


def test_an_open_file_and_a_path_object_are_as_good_as_a_path(folder, monkeypatch):
    with (folder / "index.json").open("rb") as file:
        monkeypatch.chdir(folder)
        assert keys(raw(file)) == ALL
    assert keys(raw(folder / "index.json")) == ALL


def test_shards_are_opened_when_they_are_needed(folder):
    (folder / "s-2.tar").unlink()
    dataset = raw(folder / "index.json")
    assert dataset[7]["__key__"] == "1-2"
    with pytest.raises(NotFoundError):
        dataset[8]


def test_a_dataset_goes_to_another_process_without_its_open_shards(folder):
    dataset = ShardListDataset(folder / "index.json", lru_size=2)
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy.cache) == 0
    assert copy[11][".txt"] == "2-3 txt"
    with get_context("spawn").Pool(1) as pool:
        assert pool.map(dataset.__getitem__, [4])[0][".txt"] == "0-4 txt"


def test_a_dataset_works_in_a_forked_child(folder):
    dataset = raw(folder / "index.json")
    dataset[0]
    with get_context("fork").Pool(1) as pool:
        assert pool.map(dataset.__getitem__, [9])[0][".txt"].read() == b"2-1 txt"


def test_few_shards_are_open_at_a_time_and_misses_are_counted(folder):
    dataset = raw(folder / "index.json", lru_size=2)
    for number in (0, 1, 5, 0, 8, 5):
        dataset[number]
    assert dataset.get_stats() == (6, 4)
    assert len(dataset.cache) == 2
    dataset.close()
    assert len(dataset.cache) == 0
    assert dataset[0]["__key__"] == "0-0"


def test_an_order_that_opens_shards_all_the_time_is_warned_of_once(folder, caplog):
    dataset = raw(folder / "index.json", lru_size=1)
    with caplog.at_level(logging.WARNING):
        for number in range(300):
            dataset[(0, 5, 8)[number % 3]]
    assert len([record for record in caplog.records if "lru_size" in record.message]) == 1


# What is wrong with an index


def test_another_number_of_samples_than_the_index_says_is_an_error_with_both(folder):
    edit(folder / "index.json", lambda document: document["shardlist"][1].update(nsamples=4))
    dataset = raw(folder / "index.json")
    assert len(dataset) == 13
    assert dataset[4]["__key__"] == "0-4"
    with pytest.raises(IndexFileError, match=r"s-1.tar has 4 samples, and it has 3, in .*index.json - make one"):
        dataset[5]


def test_another_size_than_the_index_says_is_an_error_with_both(folder):
    write_shard(folder / "s-0.tar", [*members_of(0, 5), ("__meta__/x", b"1" * 20_000)])
    with pytest.raises(IndexFileError, match=r"has 20480 bytes, and it has [0-9]+"):
        raw(folder / "index.json")[0]


def test_another_digest_than_the_index_says_is_found_by_verify(folder):
    dataset = raw(folder / "index.json")
    dataset.verify()
    shard = folder / "s-1.tar"
    content = bytearray(shard.read_bytes())
    content[512] ^= 1  # in a payload
    shard.write_bytes(content)
    with pytest.raises(ChecksumError, match=r"md5sum of the shard is .* s-1.tar|md5sum"):
        raw(folder / "index.json").verify()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "no JSON object"),
        ({"shardlist": []}, "wids_version is None"),
        ({"wids_version": 2, "shardlist": []}, "wids_version is 2"),
        ({"wids_version": 1}, "names no shards"),
        ({"wids_version": 1, "shardlist": {}}, "shardlist is no list"),
        ({"wids_version": 1, "shardlist": [{"nsamples": 1}]}, "shard 0 of the list has no url"),
        ({"wids_version": 1, "shardlist": [{"url": "a.tar"}]}, "a.tar: nsamples is None"),
        ({"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": -1}]}, "nsamples is -1"),
        ({"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 1, "filesize": "2"}]}, "filesize is '2'"),
        ({"wids_version": 1, "datasets": [3]}, "datasets is no list of objects"),
        ({"wids_version": 1, "datasets": [{"name": "a"}]}, "without a shardlist"),
        ({"wids_version": 1, "base": 1, "shardlist": []}, "base is 1"),
    ],
)
def test_a_malformed_index_says_what_is_wrong(tmp_path, document, message):
    (tmp_path / "index.json").write_text(json.dumps(document))
    with pytest.raises(IndexFileError, match=message):
        ShardListDataset(tmp_path / "index.json")


def test_what_is_no_json_says_so(tmp_path):
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(IndexFileError, match=r"no JSON.*index\.json"):
        ShardListDataset(tmp_path / "index.json")


def test_wrong_arguments_are_refused_by_name(folder):
    index = folder / "index.json"
    with pytest.raises(ValueError, match="lru_size=0"):
        ShardListDataset(index, lru_size=0)
    with pytest.raises(ValueError, match="cache_dir and localname"):
        ShardListDataset(index, cache_dir="x", localname=str)
    with pytest.raises(ValueError, match="'torch' is no transformation"):
        ShardListDataset(index, transformations="torch")
    with pytest.raises(IndexFileError, match="list of shards is empty"):
        ShardListDataset([])
    with pytest.raises(ValueError, match="output of a program"):
        raw([{"url": "pipe:cat x.tar", "nsamples": 1}])[0]


# Where shards are


def test_urls_are_seen_from_the_folder_of_the_index(folder):
    edit(
        folder / "index.json",
        lambda document: [shard.update(url=shard["url"].rpartition("/")[2]) for shard in document["shardlist"]],
    )
    assert keys(raw(folder / "index.json")) == ALL


def test_a_base_in_the_index_or_given_comes_before_its_folder(folder):
    def rebase(document):
        document["base"] = "deep"
        for shard in document["shardlist"]:
            shard["url"] = shard["url"].rpartition("/")[2]

    (folder / "deep").mkdir()
    edit(folder / "index.json", rebase)
    with pytest.raises(NotFoundError):
        raw(folder / "index.json")[0]
    for shard in range(3):
        (folder / f"s-{shard}.tar").rename(folder / "deep" / f"s-{shard}.tar")
    assert keys(raw(folder / "index.json")) == ALL
    (folder / "deep").rename(folder / "deeper")
    assert keys(raw(folder / "index.json", base=str(folder / "deeper"))) == ALL
    assert keys(raw(folder / "index.json", options={"base": "deeper"})) == ALL


@pytest.mark.parametrize(
    ("base", "url", "merged"),
    [
        (None, "a.tar", "a.tar"),
        ("", "a.tar", "a.tar"),
        ("d", "a.tar", "d/a.tar"),
        ("/d/e", "../a.tar", "/d/a.tar"),
        ("/d", "/e/a.tar", "/e/a.tar"),
        ("/d", "s3://b/a.tar", "s3://b/a.tar"),
        ("http://h/d", "a%20b.tar", "http://h/d/a%20b.tar"),
        ("http://h/d/?key=1", "../a.tar", "http://h/a.tar?key=1"),
        ("http://h/d?key=1", "a.tar?key=2", "http://h/d/a.tar?key=2"),
        ("http://h/d", "/a.tar", "http://h/a.tar"),
        ("http://h", "a.tar", "http://h/a.tar"),
        ("s3://b/d", "a?#.tar", "s3://b/d/a?#.tar"),
        ("s3://b", "a.tar", "s3://b/a.tar"),
    ],
)
def test_urls_are_merged_with_a_base_as_paths_are(base, url, merged):
    assert urlmerge(base, url) == merged


@pytest.mark.parametrize(
    ("url", "folder"),
    [("a.json", ""), ("d/a.json", "d"), ("http://h/d/a.json?k=1", "http://h/d?k=1"), ("s3://b/a.json", "s3://b/")],
)
def test_the_folder_of_a_url_keeps_what_lets_one_in(url, folder):
    assert urldir(url) == folder


def test_several_datasets_stand_behind_one_another_with_their_names(folder):
    (folder / "sub").mkdir()
    (folder / "s-2.tar").rename(folder / "sub" / "s-2.tar")
    part = {"wids_version": 1, "name": "far", "shardlist": [{"url": "s-2.tar", "nsamples": 4}]}
    (folder / "sub" / "part.json").write_text(json.dumps(part))
    whole = {
        "wids_version": 1,
        "name": "both",
        "shardlist": [{"url": "s-0.tar", "nsamples": 5}],
        "datasets": [
            {"name": "near", "weight": 2, "shardlist": [{"url": "s-1.tar", "nsamples": 3}]},
            {"source_url": "sub/part.json", "weight": 3},
        ],
    }
    (folder / "both.json").write_text(json.dumps(whole))
    dataset = raw(folder / "both.json")
    assert keys(dataset) == ALL
    assert [dataset[number]["__dataset__"] for number in (0, 5, 8)] == [None, "near", "far"]
    assert [shard.get("weight") for shard in dataset.shards] == [None, 2, 3]
    assert dataset.shards[2]["source_url"] == "sub/part.json"
    (folder / "sub" / "part.json").write_text(json.dumps(whole))
    with pytest.raises(IndexFileError, match=r"refers to others again"):
        raw(folder / "both.json")


def test_an_index_that_was_loaded_is_not_changed(folder):
    shards = [{"url": "s-0.tar", "nsamples": 5}]
    dataset = raw(shards, base=str(folder))
    assert dataset[0]["__shard__"] == str(folder / "s-0.tar")
    assert shards == [{"url": "s-0.tar", "nsamples": 5}]


# Elsewhere


@pytest.fixture
def server(folder):
    with FaultServer() as server:
        for shard in range(3):
            server.put(f"/d/s-{shard}.tar", (folder / f"s-{shard}.tar").read_bytes())
        document = json.loads((folder / "index.json").read_bytes())
        for shard in document["shardlist"]:
            shard["url"] = shard["url"].rpartition("/")[2]
        server.put("/d/index.json", json.dumps(document).encode())
        yield server


def asked(server, path):
    return [request for request in server.requests() if request.path.startswith(path)]


@pytest.mark.servers
def test_shards_elsewhere_are_read_in_place(server):
    dataset = raw(server.url + "d/index.json")
    assert dataset[6][".txt"].read() == b"1-1 txt"
    assert not asked(server, "/d/s-0.tar")
    assert keys(dataset) == ALL


@pytest.mark.servers
def test_a_cache_folder_keeps_shards_of_one_name_apart(server, tmp_path, monkeypatch):
    server.put("/other/s-0.tar", tar_bytes(members_of(7, 5)))
    shards = [{"url": f"{server.url}{place}/s-0.tar", "nsamples": 5} for place in ("d", "other")]
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path / "kept"))
    dataset = raw(shards)
    assert [dataset[number][".txt"].read() for number in (0, 5)] == [b"0-0 txt", b"7-0 txt"]
    before = len(server.requests())
    assert [raw(shards, keep=True)[number]["__key__"] for number in (4, 9)] == ["0-4", "7-4"]
    assert not [request for request in server.requests()[before:] if request.method == "GET" and "tar" in request.path]


@pytest.mark.servers
def test_localname_says_where_a_shard_is_put_and_found_again(server, tmp_path):
    place = {f"{server.url}d/s-{shard}.tar": str(tmp_path / "new" / f"{shard}") for shard in range(3)}
    dataset = raw(server.url + "d/index.json", localname=place.__getitem__)
    assert dataset[0]["__key__"] == "0-0"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["0"]
    before = len(asked(server, "/d/s-0.tar"))
    assert raw(server.url + "d/index.json", localname=place.__getitem__)[1]["__key__"] == "0-1"
    assert len(asked(server, "/d/s-0.tar")) == before


@pytest.mark.servers
def test_a_download_with_another_digest_leaves_nothing(server, tmp_path):
    content = bytearray(tar_bytes(members_of(0, 5)))
    content[512] ^= 1
    server.put("/d/s-0.tar", bytes(content))
    dataset = raw(server.url + "d/index.json", localname=lambda _: str(tmp_path / "new" / "0"))
    with pytest.raises(ChecksumError, match="md5sum"):
        dataset[0]
    assert list((tmp_path / "new").iterdir()) == []


# Transformations


def image(kind):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (5, 3), (10, 20, 30)).save(buffer, kind)
    return buffer.getvalue()


def array():
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


@pytest.fixture
def decodable(tmp_path):
    members = {
        "png": image("PNG"),
        "webp": b"left as it is",
        "txt": "é".encode(),
        "cls": b" 7\n",
        "json": b'{"a": [1]}',
        "npy": array(),
        "text.gz": gzip.compress(b"packed"),
    }
    write_shard(tmp_path / "a.tar", [(f"k.{suffix}", payload) for suffix, payload in members.items()])
    return [{"url": str(tmp_path / "a.tar"), "nsamples": 1}]


def test_by_default_images_are_opened_by_pillow_and_the_rest_by_suffix(decodable):
    sample = ShardListDataset(decodable)[0]
    assert sample[".png"].size == (5, 3)
    assert isinstance(sample[".webp"], io.BytesIO)
    assert (sample[".txt"], sample[".cls"], sample[".json"], sample[".text.gz"]) == ("é", 7, {"a": [1]}, "packed")
    assert sample[".npy"].tolist() == [0, 1, 2]


def test_numpy_gives_pixels(decodable):
    pixels = ShardListDataset(decodable, transformations="numpy")[0][".png"]
    assert pixels.shape == (3, 5, 3)
    assert pixels[0, 0].tolist() == [10, 20, 30]


def test_transformations_come_one_after_the_other(folder):
    dataset = ShardListDataset(folder / "index.json", transformations=["PIL", lambda sample: sample[".txt"]])
    assert dataset.add_transform(str.upper) is dataset
    assert dataset[0] == "0-0 TXT"


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "pt", "pth"])
def test_pickles_are_refused_unless_somebody_names_them(tmp_path, suffix):
    write_shard(tmp_path / "a.tar", [(f"k.{suffix}", pickle.dumps([1, 2]))])
    shards = [{"url": str(tmp_path / "a.tar"), "nsamples": 1}]
    with pytest.raises(DecodeError, match=f"'.{suffix}' is a pickle.*a.tar.*if you trust") as caught:
        ShardListDataset(shards)[0]
    assert caught.value.key == "k"

    def unpickle(sample):
        return {**sample, f".{suffix}": pickle.loads(sample[f".{suffix}"].read())}

    assert ShardListDataset(shards, transformations=[unpickle, "PIL"])[0][f".{suffix}"] == [1, 2]


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    write_shard(tmp_path / "a.tar", [("k.npy", buffer.getvalue())])
    with pytest.raises(DecodeError, match=r"\.npy.*allow_pickle"):
        ShardListDataset([{"url": str(tmp_path / "a.tar"), "nsamples": 1}])[0]


@pytest.mark.parametrize("suffix", ["png", "cls", "json", "npy", "txt", "txt.gz"])
def test_a_payload_that_is_not_what_its_suffix_says_raises_with_its_place(tmp_path, suffix):
    write_shard(tmp_path / "a.tar", [(f"k.{suffix}", b"\xff nothing")])
    with pytest.raises(DecodeError, match=rf"'\.{suffix}' of sample 'k' cannot be decoded.*a\.tar") as caught:
        ShardListDataset([{"url": str(tmp_path / "a.tar"), "nsamples": 1}])[0]
    assert caught.value.field == f".{suffix}"


def test_names_change_when_gzip_is_taken_off_if_that_is_asked_for():
    packed = gzip.compress(b"x")
    assert default_decoder({".a.txt.gz": packed, ".gz": packed}, gz_update_key=True) == {".gz": packed, ".a.txt": "x"}
    assert decode_all_gz({".a.gz": packed}, update_key=False)[".a.gz"].read() == b"x"
    with pytest.raises(ValueError, match="does not begin with a dot"):
        default_decoder({"txt": b"x"})
    with pytest.raises(ValueError, match="format='jax'"):
        default_decoder({}, format="jax")


# Samplers


def test_a_shard_list_sampler_goes_shard_by_shard(folder):
    sampler = ShardListSampler(raw(folder / "index.json"), seed=3)
    assert len(sampler) == 12
    for epoch in range(3):
        order = list(sampler)
        assert sorted(order) == list(range(12))
        shards = [[0, 1, 2][(number >= 5) + (number >= 8)] for number in order]
        runs = [shard for at, shard in enumerate(shards) if at == 0 or shards[at - 1] != shard]
        assert len(runs) == 3
        assert epoch or runs == [0, 1, 2]
    assert ShardedSampler is ShardListSampler


def test_the_first_epoch_shuffles_shards_only_if_that_is_asked_for():
    lengths = [10] * 50
    assert [n // 10 for n in list(ShardListSampler(None, lengths=lengths))[::10]] == list(range(50))
    assert [n // 10 for n in list(ShardListSampler(None, lengths=lengths, shufflefirst=True))[::10]] != list(range(50))


def test_epochs_differ_and_can_be_set():
    sampler = ChunkedSampler(range(100), chunksize=30)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second


def test_a_pass_that_is_given_up_counts_as_an_epoch():
    sampler = ChunkedSampler(range(100))
    begun = next(iter(sampler))
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    assert next(iter(sampler)) == begun


def test_seeds_differ_and_orders_stay_what_they_are():
    assert list(ChunkedSampler(range(8), chunksize=4, seed=1)) != list(ChunkedSampler(range(8), chunksize=4, seed=2))
    # Golden: saved runs go on in this order.
    assert list(ChunkedSampler(range(8), chunksize=4, seed=1, shufflefirst=True)) == [5, 7, 6, 4, 1, 0, 3, 2]


def test_without_shuffling_the_order_is_that_of_the_dataset():
    sampler = ChunkedSampler(range(10), chunksize=3, shuffle=False)
    assert list(sampler) == list(sampler) == list(range(10))


def test_chunks_stay_together():
    order = list(ChunkedSampler(range(100), chunksize=10, num_samples=(20, 75), shufflefirst=True))
    assert sorted(order) == list(range(20, 75))
    chunks = [(number - 20) // 10 for number in order]
    assert len([1 for at in range(1, 55) if chunks[at] != chunks[at - 1]]) == 5


def test_a_length_that_is_given_is_kept():
    longer = ChunkedSampler(range(4), dslength_per_replica=6)
    assert len(longer) == len(order := list(longer)) == 6
    assert order[4:] == order[:2]
    assert (longer.num_repeated, longer.num_dropped) == (2, 0)
    shorter = ChunkedSampler(range(4), dslength_per_replica=3)
    assert len(set(shorter)) == len(shorter) == 3
    assert (shorter.num_repeated, shorter.num_dropped) == (0, 1)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 70), st.booleans(), st.integers(-1, 3))
def test_all_ranks_together_see_each_sample_and_are_equally_long(count, ranks, chunksize, drop_last, epoch):
    data = range(count)
    if drop_last and count < ranks:
        with pytest.raises(ValueError, match=f"{count} samples for {ranks} ranks"):
            DistributedChunkedSampler(data, num_replicas=ranks, rank=0, drop_last=True)
        return
    samplers = [
        DistributedChunkedSampler(
            data, num_replicas=ranks, rank=rank, drop_last=drop_last, chunksize=chunksize, shuffle=epoch >= 0
        )
        for rank in range(ranks)
    ]
    seen = Counter()
    for sampler in samplers:
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert len(order) == len(sampler) == (count // ranks if drop_last else -(-count // ranks))
        seen.update(order)
    if drop_last:
        assert max(seen.values()) == 1
        assert sum(sampler.num_dropped for sampler in samplers) == count - seen.total() == count % ranks
    else:
        assert set(seen) == set(data)
        assert sum(sampler.num_repeated for sampler in samplers) == seen.total() - count == -count % ranks


def test_what_drop_last_leaves_out_changes_with_the_epoch():
    left = set()
    for epoch in range(40):
        samplers = [DistributedChunkedSampler(range(7), num_replicas=2, rank=rank, drop_last=True) for rank in (0, 1)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        left.update(set(range(7)).difference(*map(set, samplers)))
    assert left == {3, 4, 5, 6}


def test_a_rank_is_found_in_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sorted(DistributedChunkedSampler(range(12))) == [4, 5, 6, 7]
    monkeypatch.delenv("RANK")
    assert sorted(DistributedChunkedSampler(range(12))) == list(range(12))
    assert sorted(DistributedChunkedSampler(range(12), num_samples=5, num_replicas=2, rank=1)) == [2, 3, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChunkedSampler([]), "samples 0 to 0 of a dataset of 0"),
        (lambda: ChunkedSampler(range(3), num_samples=4), "samples 0 to 4 of a dataset of 3"),
        (lambda: ChunkedSampler(range(3), chunksize=0), "chunksize=0"),
        (lambda: ShardListSampler(None), "lengths"),
        (lambda: DistributedChunkedSampler(range(3), num_replicas=2, rank=2), "rank=2 is not below num_replicas=2"),
        (lambda: DistributedChunkedSampler(range(3), num_samples=5), "5 samples to share, of a dataset of 3"),
    ],
)
def test_samplers_refuse_what_they_cannot_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Making an index


def test_an_index_says_all_that_wids_says(folder):
    document = json.loads((folder / "index.json").read_bytes())
    assert document["__kind__"] == "wids-shard-index-v1"
    assert document["wids_version"] == 1
    assert document["name"] == "dozen"
    assert [list(shard) for shard in document["shardlist"]] == [["url", "md5sum", "nsamples", "filesize"]] * 3
    assert [shard["nsamples"] for shard in document["shardlist"]] == list(SIZES)
    assert [shard["filesize"] for shard in document["shardlist"]] == [
        (folder / f"s-{n}.tar").stat().st_size for n in range(3)
    ]


def test_paths_in_an_index_lead_to_the_shards_wherever_it_is_written(folder, monkeypatch):
    (folder / "deep").mkdir()
    monkeypatch.chdir(folder)
    create_index(["s-{0..2}.tar"], "deep/index.json")
    create_index(["s-{0..2}.tar"], "here.json")
    monkeypatch.chdir(folder / "deep")
    assert keys(raw("index.json")) == keys(raw("../here.json")) == ALL
    assert load_dsdesc_and_resolve("index.json")["shardlist"][0]["url"] == "../s-0.tar"


def test_the_command_makes_checks_and_describes_an_index(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "about.txt").write_text("a dozen")
    assert main(["create", "s-{0..2}.tar", "-o", "new.json", "-n", "all", "-i", "about.txt"]) == 0
    assert main(["check", "new.json"]) == 0
    assert main(["info", "new.json"]) == 0
    assert capsys.readouterr().out == "new.json: all, 12 samples in 3 shards of 40960 bytes\n" * 3
    assert json.loads((folder / "new.json").read_bytes())["info"] == "a dozen"
    edit(folder / "new.json", lambda document: document["shardlist"][2].update(nsamples=9))
    assert main(["check", "new.json"]) == 1
    assert "has 9 samples, and it has 4" in capsys.readouterr().err


def test_the_command_reads_names_from_standard_input(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("s-1.tar\n\ns-0.tar\n"))
    assert main(["create", "-"]) == 0
    assert keys(raw("shardindex.json")) == ALL[:8]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["create", "-"]) == 1
    assert "no shards" in capsys.readouterr().err


def test_an_index_of_a_shard_that_is_not_there_is_not_written(tmp_path, capsys):
    assert main(["create", str(tmp_path / "none.tar"), "-o", str(tmp_path / "i.json")]) == 1
    assert "none.tar" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_error_of_ours(folder):
    with pytest.raises(ShardsetError):
        create_index([str(folder / "s-0.tar")], folder / "none" / "i.json")
