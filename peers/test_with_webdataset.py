"""Shards exchanged with webdataset 1.0.2 itself: what we write it reads, and what both write says the same.

Needs an environment with webdataset 1.0.2, as ``.venv-bench`` is.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import tarfile
import warnings

import numpy as np
import pytest
import webdataset as wds

from shardset.errors import EncodeError
from shardset.webdataset import writer

PIXELS = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
# What both encode, and webdataset decodes by itself.
SAMPLE = {
    "__key__": "a/1",
    "txt": "größe",
    "text": "two",
    "cls": 3,
    "id": 12345,
    "json": {"a": [1, None, "ü"]},
    "npy": np.arange(12.0).reshape(3, 4),
    "npz": {"x": np.arange(3), "y": np.eye(2)},
    "ten": [np.ones(3, np.float32), np.arange(4, dtype=np.int64)],
    "pyd": {"x": (1, 2)},
    "txt.gz": "packed" * 100,
    "seg.png": PIXELS,
    "ppm": PIXELS,
    "jpg": PIXELS,
    "tiff": PIXELS,
    "bin": b"\0raw",
}


def read(path, *decoders):
    """Read all samples with webdataset, which leaves the closing of its files to the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            dataset = wds.WebDataset(str(path), shardshuffle=False)
            return list(dataset.decode(*decoders) if decoders else dataset)
        finally:
            gc.collect()


def fields_of(sample):
    return {name: value for name, value in sample.items() if not name.startswith("__")}


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, list) and theirs and isinstance(theirs[0], np.ndarray):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def test_webdataset_decodes_what_we_encode_as_it_decodes_its_own(tmp_path):
    with writer.TarWriter(str(tmp_path / "ours.tar")) as sink:
        sink.write(SAMPLE)
    with wds.TarWriter(str(tmp_path / "theirs.tar")) as sink:
        sink.write(SAMPLE)
    (ours,), (theirs,) = (read(tmp_path / name, "rgb8") for name in ("ours.tar", "theirs.tar"))
    assert ours["__key__"] == theirs["__key__"] == "a/1"
    assert_same(fields_of(ours), fields_of(theirs))
    for name in ("npy", "npz", "ten", "txt", "json", "cls", "pyd", "txt.gz"):
        assert_same(ours[name], SAMPLE[name])
    for name in ("seg.png", "ppm", "tiff"):
        np.testing.assert_array_equal(ours[name], PIXELS)


@pytest.mark.parametrize("name", ["txt", "cls", "npy", "ten", "pyd", "seg.png", "ppm", "jpg"])
def test_payloads_are_those_of_webdataset(tmp_path, name):
    for module, file in ((writer, "ours.tar"), (wds, "theirs.tar")):
        with module.TarWriter(str(tmp_path / file)) as sink:
            sink.write({"__key__": "1", name: SAMPLE[name]})
    (ours,), (theirs,) = (read(tmp_path / file) for file in ("ours.tar", "theirs.tar"))
    assert ours[name] == theirs[name]


@pytest.mark.parametrize("kind", [None, tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_webdataset_reads_every_key_that_we_write(tmp_path, kind):
    keys = ["1", "folder.with.dots/2", "x" * 90, "y" * 91, "f" * 150 + "/" + "z" * 90, "a b", "it's", "__a"]
    if kind != tarfile.USTAR_FORMAT:
        keys += ["größe/é", "long" * 80, "d/" * 100 + "w" * 120, "caf\udce9"]
    with writer.TarWriter(str(tmp_path / "a.tar"), encoder=False, format=kind) as sink:
        for number, key in enumerate(keys):
            sink.write({"__key__": key, "jpg": b"%d" % number, "seg.json": b"{}"})
    samples = read(tmp_path / "a.tar")
    assert [sample["__key__"] for sample in samples] == keys
    assert [fields_of(sample) for sample in samples] == [
        {"jpg": b"%d" % number, "seg.json": b"{}"} for number in range(len(keys))
    ]


@pytest.mark.parametrize("key", ["a.b", "", ".a", "__m__/a", "d/.b"])
def test_a_key_that_we_refuse_is_one_that_webdataset_writes_and_does_not_read_back(tmp_path, key):
    with wds.TarWriter(str(tmp_path / "a.tar")) as sink:
        sink.write({"__key__": key, "txt": "x"})
    try:
        found = [sample["__key__"] for sample in read(tmp_path / "a.tar")]
    except ValueError:
        found = []
    assert found != [key]
    with pytest.raises(EncodeError), writer.TarWriter(str(tmp_path / "b.tar")) as sink:
        sink.write({"__key__": key, "txt": "x"})


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz", "tar.bz2", "tar.xz"])
def test_webdataset_reads_compressed_shards(tmp_path, suffix):
    with writer.TarWriter(str(tmp_path / f"a.{suffix}")) as sink:
        sink.write({"__key__": "1", "txt": "x" * 10_000})
    assert [fields_of(sample) for sample in read(tmp_path / f"a.{suffix}")] == [{"txt": b"x" * 10_000}]


def test_webdataset_reads_shards_beside_their_indexes(tmp_path):
    with writer.ShardWriter(f"{tmp_path}/s-%02d.tar", maxcount=7, verbose=0) as sink:
        for number in range(20):
            sink.write({"__key__": f"{number:04d}", "cls": number, "json": {"n": number}})
    samples = read(tmp_path / "s-{00..02}.tar", "rgb8")
    assert [(sample["__key__"], sample["cls"], sample["json"]) for sample in samples] == [
        (f"{number:04d}", number, {"n": number}) for number in range(20)
    ]
    assert len(list(tmp_path.glob("s-*.json"))) == 3


def test_a_shard_of_ours_is_smaller_and_the_same_each_time(tmp_path):
    contents = []
    for number in range(2):
        with writer.TarWriter(str(tmp_path / f"ours-{number}.tar")) as sink:
            for key in range(100):
                sink.write({"__key__": str(key), "txt": "x"})
        contents.append((tmp_path / f"ours-{number}.tar").read_bytes())
    assert contents[0] == contents[1]
    with wds.TarWriter(str(tmp_path / "theirs.tar")) as sink:
        for key in range(100):
            sink.write({"__key__": str(key), "txt": "x"})
    assert (tmp_path / "theirs.tar").stat().st_size > 1.9 * len(contents[0])


def test_samples_that_webdataset_read_can_be_written_again(tmp_path):
    with wds.TarWriter(str(tmp_path / "theirs.tar")) as sink:
        for number in range(5):
            sink.write({"__key__": f"{number}", "cls": number, "json.gz": [number]})
    with writer.TarWriter(str(tmp_path / "ours.tar")) as sink:
        for sample in read(tmp_path / "theirs.tar"):
            sink.write(sample)
    before, after = (read(tmp_path / name) for name in ("theirs.tar", "ours.tar"))
    assert [fields_of(sample) for sample in after] == [fields_of(sample) for sample in before]
    assert json.loads(gzip.decompress(after[3]["json.gz"])) == [3]
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "ours.tar").read_bytes())) as tar:
        assert len(tar.getnames()) == 10
