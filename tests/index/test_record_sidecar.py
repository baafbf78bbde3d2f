from __future__ import annotations

import gzip
import json

import pytest

from shardset.errors import IndexFileError
from shardset.index.build import build_index
from shardset.index.record_sidecar import dump_text_index, parse_text_index
from shardset.index.sidecar import dump_sidecar, parse_sidecar
from shardset.storage import MemoryStore
from tfrecords import make_payloads, record_bytes

PAYLOADS = make_payloads(50, seed=1)
PLAIN = record_bytes(PAYLOADS)


def index_of(data):
    store = MemoryStore()
    store.write("memory://shards/a.tfrecord", data)
    return build_index(store.open("memory://shards/a.tfrecord"))


def changed(data, **keys):
    document = json.loads(dump_sidecar(index_of(data), name="a.tfrecord"))
    document.update(keys)
    return json.dumps({key: value for key, value in document.items() if value is not None}).encode()


@pytest.mark.parametrize("data", [PLAIN, gzip.compress(PLAIN), b""], ids=["plain", "gzip", "empty"])
def test_a_sidecar_index_gives_back_what_was_written(data):
    index = index_of(data)
    payload = dump_sidecar(index, name="a.tfrecord")
    sidecar = parse_sidecar(payload, path="a.tfrecord.json", shard_size=len(data))
    again = sidecar.index
    assert again.offset.tolist() == index.offset.tolist()
    assert again.length.tolist() == index.length.tolist()
    assert again.records == index.records
    assert sidecar.digest == index.digest()
    assert again.is_verified
    assert dump_sidecar(again, name="a.tfrecord") == payload


def test_the_file_is_a_list_of_lengths():
    document = json.loads(dump_sidecar(index_of(PLAIN), name="a.tfrecord"))
    assert document["path"] == "a.tfrecord"
    assert document["filesize"] == len(PLAIN)
    assert document["format"] == "tfrecord"
    assert document["lengths"] == list(map(len, PAYLOADS))
    assert document["shardset"]["digest"].startswith("sha256:")
    assert "gaps" not in document


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lengths": "no"}, "lengths"),
        ({"lengths": [1, "2"]}, "a length is '2'"),
        ({"lengths": [-1]}, "-1"),
        ({"lengths": [1 << 62, 1 << 62, 1 << 62]}, "longer than the shard"),
        ({"lengths": [10**30]}, "length"),
        ({"lengths": [True]}, "a length is"),
        ({"lengths": [len(PLAIN)]}, "past the end"),
        ({"filesize": None}, "no filesize"),
        ({"filesize": 3}, "stale|longer"),
        ({"gaps": [[1000, 5]]}, "not there"),
        ({"gaps": [[1, -5]]}, "a gap is"),
        ({"gaps": "x"}, "gaps is"),
        ({"gaps": [[0, 1]]}, "no damage"),
        ({"gaps": [[0, 1 << 62]] * 5}, "no damage|longer"),
        ({"compression": []}, "compression"),
        ({"compression": "zip"}, "compression"),
        ({"compression": "gzip"}, "content_size"),
        ({"access_points": "§"}, "base64"),
        ({"lengths": [1, 2, 3]}, "digest"),
    ],
    ids=str,
)
def test_a_malformed_sidecar_index_says_what_is_wrong(keys, said):
    with pytest.raises(IndexFileError, match=said) as caught:
        parse_sidecar(changed(PLAIN, **keys), path="a.tfrecord.json", shard_size=len(PLAIN))
    assert caught.value.path == "a.tfrecord.json"


def test_the_text_index_is_that_of_dali_and_vahidk():
    # The four records of 10, 0, 100 and 5 bytes that their tools were given, and what they wrote.
    index = index_of(record_bytes([bytes(10), b"", bytes(100), bytes(5)]))
    assert dump_text_index(index) == b"0 26\n26 16\n42 116\n158 21\n"


def test_a_text_index_gives_back_what_was_written():
    index = index_of(PLAIN)
    again = parse_text_index(dump_text_index(index), len(PLAIN), path="a.idx")
    assert again.offset.tolist() == index.offset.tolist()
    assert again.digest() == index.digest()
    assert parse_text_index(b"", 0, path="a.idx").num_samples == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"0 26\n26 16\n42 116\n158 20\n", "of a file of 178 bytes, this one has 179"),
        (b"0 26\n26 16\n43 116\n", "line 3"),
        (b"0 26\n26 15\n", "line 2"),
        (b"1 178\n", "line 1"),
        (b"0 179 5\n", "no text index"),
        (b"\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "no text index"),
        (b"0 -179\n", "no text index"),
        (b"0 99999999999999999999\n", "no text index"),
        (b"", "of a file of 0 bytes"),
    ],
    ids=repr,
)
def test_a_text_index_that_does_not_fit_is_refused(text, said):
    with pytest.raises(IndexFileError, match=said):
        parse_text_index(text, 179, path="a.idx")


def test_what_is_compressed_has_no_text_index():
    with pytest.raises(ValueError, match="plain"):
        dump_text_index(index_of(gzip.compress(PLAIN)))
