"""The table of decoders: each row of webdataset's, the rows that it gets wrong, and what no row may ever do."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import sys

import cbor2
import msgpack
import numpy as np
import pytest

from shardset.decoding import registry as module
from shardset.decoding.registry import USUAL, gunzip
from shardset.errors import DecodeError, MissingExtraError
from shardset.formats.tenbin import encode_tenbin


@pytest.mark.parametrize("suffix", ["txt", "text", "transcript"])
def test_text_is_str(suffix):
    assert USUAL.decode(suffix, "café\n".encode()) == "café\n"


@pytest.mark.parametrize("suffix", ["cls", "cls2", "class", "count", "index", "inx", "id"])
def test_classes_and_counts_are_int(suffix):
    assert USUAL.decode(suffix, b" 7\n") == 7
    assert USUAL.decode(suffix, b"-12") == -12


@pytest.mark.parametrize("suffix", ["json", "jsn"])
def test_json_is_any_value(suffix):
    assert USUAL.decode(suffix, b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert USUAL.decode(suffix, b"null") is None
    assert math.isnan(USUAL.decode(suffix, b"NaN"))
    assert USUAL.decode(suffix, b"123456789012345678901234567890") == 123456789012345678901234567890


@pytest.mark.parametrize("suffix", ["ten", "tb", "tenbin"])
def test_tenbin_is_a_list_of_arrays(suffix):
    (array,) = USUAL.decode(suffix, encode_tenbin([np.arange(3, dtype=np.uint32)]))
    np.testing.assert_array_equal(array, np.arange(3, dtype=np.uint32), strict=True)


@pytest.mark.parametrize("suffix", ["mp", "msg", "msgpack"])
def test_msgpack_is_its_value(suffix):
    assert USUAL.decode(suffix, msgpack.packb({"a": 1})) == {"a": 1}


def test_cbor_is_its_value():
    assert USUAL.decode("cbor", cbor2.dumps([1, "a"])) == [1, "a"]


def test_npy_and_npz_are_arrays(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4))
    np.savez(tmp_path / "a.npz", x=np.arange(4))
    assert USUAL.decode("npy", (tmp_path / "a.npy").read_bytes()).tolist() == [0, 1, 2, 3]
    assert USUAL.decode("npz", (tmp_path / "a.npz").read_bytes())["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("field", ["jpg", "pt", "html", "bin", "safetensors", "cls.0", "", "json.x"])
def test_what_is_not_in_the_table_stays_bytes(field):
    assert USUAL.decode(field, b"7") == b"7"


@pytest.mark.parametrize("field", ["meta.json", "a.b.json", ".json", "JSON", "Meta.Json"])
def test_the_last_part_of_a_name_decides_in_any_case(field):
    assert USUAL.decode(field, b"[1]") == [1]


def test_gzip_is_unpacked_and_decoded_by_the_part_before():
    assert USUAL.decode("meta.json.gz", gzip.compress(b"[1]")) == [1]
    assert USUAL.decode("gz", gzip.compress(b"[1]")) == b"[1]"
    assert USUAL.decode("tar.gz", gzip.compress(b"[1]")) == b"[1]"
    assert USUAL.decode("json.gz.gz", gzip.compress(gzip.compress(b"[1]"))) == gzip.compress(b"[1]")


class Bomb:
    """Says so when it is unpickled."""

    ran = False

    @staticmethod
    def go_off():
        Bomb.ran = True

    def __reduce__(self):
        return Bomb.go_off, ()


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "pyd", "pth"])
def test_pickles_are_refused_with_the_words_that_name_a_function(suffix):
    with pytest.raises(DecodeError, match="runs any code") as caught:
        USUAL.decode(f"x.{suffix}", pickle.dumps(Bomb()), shard="a.tar", key="0001")
    assert not Bomb.ran
    loads = "wds.torch_loads" if suffix == "pth" else "pickle.loads"
    assert f'wds.handle_extension("{suffix}", {loads})' in str(caught.value)


def test_an_entry_of_ones_own_comes_first_and_the_table_stays_as_it_was():
    mine = USUAL.extended({"pyd": pickle.loads, ".XYZ": bytes.upper})
    assert mine.decode("pyd", pickle.dumps([1])) == [1]
    assert mine.decode("xyz", b"a") == b"A"
    assert mine.decode("json", b"1") == 1
    assert USUAL.decode("xyz", b"a") == b"a"


def test_a_registry_pickles():
    assert pickle.loads(pickle.dumps(USUAL)).decode("cls", b"3") == 3


@pytest.mark.parametrize(
    ("field", "payload", "what", "cause"),
    [
        ("json", b"{", "JSONDecodeError: Expecting", json.JSONDecodeError),
        ("cls", b"1.0", "ValueError: invalid literal", ValueError),
        ("txt", b"\xff", "UnicodeDecodeError", UnicodeDecodeError),
        ("npy", b"nonsense", "not an npy file", DecodeError),
        ("ten", b"nonsense", "inside the head of a chunk at byte 0", ValueError),
        ("json.gz", b"nonsense", "not a gzip payload", DecodeError),
    ],
)
def test_an_error_says_field_key_and_shard(field, payload, what, cause):
    with pytest.raises(DecodeError) as caught:
        USUAL.decode(field, payload, shard="photos-0.tar", key="0001")
    error = caught.value
    assert (error.field, error.key, error.shard) == (field, "0001", "photos-0.tar")
    assert (error.k, error.url, error.sample) == (field, "photos-0.tar", None)
    assert isinstance(error, ValueError)
    assert isinstance(error.__cause__, cause)
    assert what in str(error)
    assert f"field {field!r} of sample '0001'" in str(error)
    assert "in photos-0.tar" in str(error)


def test_a_missing_package_is_no_fault_of_the_sample(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[arrays\]"):
        USUAL.decode("mp", b"\x01")


def test_gzip_members_one_after_the_other_are_one_payload():
    assert gunzip(gzip.compress(b"a") + gzip.compress(b"b") + bytes(8)) == b"ab"
    assert gunzip(b"") == b""


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (gzip.compress(b"hello")[:-1], "ends too early"),
        (gzip.compress(b"hello") + b"rubbish", "not a gzip payload"),
        (gzip.compress(b"hello")[:-8] + bytes(8), "not a gzip payload"),
    ],
    ids=["cut", "rubbish behind", "another checksum"],
)
def test_damaged_gzip_is_refused(payload, message):
    with pytest.raises(DecodeError, match=message):
        gunzip(payload)


def test_gzip_that_unpacks_to_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_INFLATED", 1000)
    assert gunzip(gzip.compress(bytes(1000))) == bytes(1000)
    for bomb in (gzip.compress(bytes(1001)), gzip.compress(bytes(600)) + gzip.compress(bytes(600))):
        with pytest.raises(DecodeError, match="more than 1000 bytes"):
            gunzip(bomb)
