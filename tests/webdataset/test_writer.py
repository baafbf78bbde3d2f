from __future__ import annotations

import gzip
import inspect
import io
import json
import os
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import read_members
from shardset.decoding.images import decode_image, find_spec
from shardset.decoding.registry import USUAL
from shardset.webdataset import writer
from shardset.writing.shard_writer import ShardWriter
from shardset.writing.tar_writer import TarWriter

# Parameters and defaults of webdataset 1.0.2.
SIGNATURES = {
    "TarWriter": {
        "fileobj": inspect.Parameter.empty,
        "user": "bigdata",
        "group": "bigdata",
        "mode": 0o444,
        "compress": None,
        "encoder": True,
        "keep_meta": False,
        "mtime": None,
        "format": None,
    },
    "ShardWriter": {
        "pattern": inspect.Parameter.empty,
        "maxcount": 100000,
        "maxsize": 3e9,
        "post": None,
        "start_shard": 0,
        "verbose": 1,
        "opener": None,
    },
    "imageencoder": {"image": inspect.Parameter.empty, "format": "PNG"},
    "add_handlers": dict.fromkeys(("d", "keys", "value"), inspect.Parameter.empty),
    "encode_based_on_extension1": dict.fromkeys(("data", "tname", "handlers"), inspect.Parameter.empty),
}
SUFFIXES = (
    "cls cls2 class count index inx id txt text transcript html htm pyd pickle pth npy npz ten tenbin tb json jsn mp "
    "msgpack msg cbor jpg jpeg img image png pbm pgm ppm tiff tif"
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_begin_as_those_of_webdataset(name):
    parameters = inspect.signature(getattr(writer, name)).parameters.values()
    positional = {each.name: each.default for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(SIGNATURES[name].items())


def test_the_writers_are_ours():
    assert (writer.TarWriter, writer.ShardWriter) == (TarWriter, ShardWriter)


def test_all_names_are_there():
    assert all(callable(getattr(writer, name)) for name in writer.__all__ if name != "default_handlers")


def test_there_is_a_handler_for_every_suffix_of_webdataset():
    assert set(writer.make_handlers()) >= set(SUFFIXES.split())
    assert writer.make_handlers() == writer.default_handlers
    assert writer.make_handlers() is not writer.default_handlers


def test_handlers_are_added_by_a_list_or_by_words():
    handlers = {}
    writer.add_handlers(handlers, "a b", len)
    writer.add_handlers(handlers, ["c d"], str)
    assert handlers == {"a": len, "b": len, "c d": str}


def test_values_are_encoded_by_the_last_part_of_their_field():
    handlers = writer.make_handlers()
    assert writer.encode_based_on_extension1(3, "x.cls", handlers) == b"3"
    assert writer.encode_based_on_extension1("as it is", "__key__", handlers) == "as it is"
    assert writer.encode_based_on_extension({"__key__": "k", "json": [1]}, handlers) == {"__key__": "k", "json": b"[1]"}
    with pytest.raises(ValueError, match="no encoder"):
        writer.encode_based_on_extension1(3, "unheard", handlers)


def test_functions_make_payloads_of_values():
    array = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(np.load(io.BytesIO(writer.numpy_dumps(array))), array)
    np.testing.assert_array_equal(np.load(io.BytesIO(writer.numpy_npz_dumps({"a": array})))["a"], array)
    assert bytes(writer.tenbin_dumps(array)) == bytes(writer.tenbin_dumps([array]))
    assert writer.imageencoder(np.zeros((2, 2, 3)))[:4] == b"\x89PNG"
    assert writer.imageencoder(np.zeros((2, 2, 3), np.uint8), "jpg")[:2] == b"\xff\xd8"


@pytest.mark.parametrize(("value", "text"), [(b"raw", b"raw"), ("a", b"a"), (3, b"3")])
def test_anything_is_text_in_ascii(value, text):
    assert writer.bytestr(value) == text


VALUES = st.one_of(
    st.tuples(st.sampled_from(["cls", "cls2", "class", "count", "index", "inx", "id", "x.cls"]), st.integers()),
    st.tuples(st.sampled_from(["txt", "text", "transcript", "a.b.txt"]), st.text()),
    st.tuples(
        st.sampled_from(["json", "jsn"]),
        st.none() | st.booleans() | st.integers() | st.lists(st.text()) | st.dictionaries(st.text(), st.integers()),
    ),
)


@given(VALUES, st.booleans())
def test_what_is_encoded_is_decoded_to_what_it_was(given_value, is_packed):
    field, value = given_value
    field = f"{field}.gz" if is_packed else field
    payload = writer.encode_based_on_extension1(value, field, writer.default_handlers)
    assert USUAL.decode(field, bytes(payload)) == value


@pytest.mark.parametrize("field", ["npy", "npz", "ten", "tb", "tenbin", "npy.gz"])
def test_arrays_are_decoded_to_what_they_were(field):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    value = {"a": array, "b": array[0]} if field == "npz" else [array, array[0]] if field.startswith("t") else array
    back = USUAL.decode(field, bytes(writer.encode_based_on_extension1(value, field, writer.default_handlers)))
    if isinstance(value, dict):
        back, value = [back[name] for name in value], list(value.values())
    for one, other in zip(back, value, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("field", ["png", "ppm", "tiff", "tif", "seg.png", "webp", "bmp"])
def test_images_are_decoded_to_what_they_were(field):
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    payload = writer.encode_based_on_extension1(pixels, field, writer.default_handlers)
    np.testing.assert_array_equal(decode_image(payload, find_spec("rgb8")), pixels)


def test_an_encoder_is_a_function_of_the_sample_for_every_specification():
    sample = {"__key__": "k", "json": [1]}
    assert writer.make_encoder(spec=True)(sample)["json"] == b"[1]"
    assert writer.make_encoder(spec=False)(sample) == writer.make_encoder(None)(sample) == sample
    assert writer.make_encoder({"json": repr})(sample)["json"] == "[1]"
    assert writer.make_encoder(len) is len
    with pytest.raises(ValueError, match="encoder='spec'"):
        writer.make_encoder("spec")


def test_a_program_for_webdataset_writes_what_it_wrote(tmp_path):
    with writer.TarWriter(f"{tmp_path}/a.tar") as sink:
        sink.write(
            {
                "__key__": "a",
                "txt": "hello",
                "cls": "3",
                "json": {"a": 1},
                "npy": np.zeros((3, 3)),
                "npz": {"a": np.zeros((3, 3))},
                "ppm": np.zeros((3, 3, 3)),
                "jpg": np.zeros((3, 3, 3)),
                "png": np.zeros((3, 3, 3)),
                "txt.gz": "x" * 1000 + "\n",
                "ten": np.zeros((3, 3)),
                "pyd": {"x": 0},
            }
        )
    members = read_members(tmp_path / "a.tar")
    assert len(members) == 11
    assert json.loads(members["a.json"]) == {"a": 1}
    assert gzip.decompress(members["a.txt.gz"]) == b"x" * 1000 + b"\n"
    assert len(members["a.txt.gz"]) == 30


def test_a_program_for_webdataset_writes_shards_and_learns_of_each(tmp_path):
    seen = []
    with writer.ShardWriter(f"{tmp_path}/shards-%04d.tar", maxcount=5, post=seen.append, encoder=False) as sink:
        for number in range(50):
            sink.write({"__key__": str(number), "txt": b"hello", "cls": b"3"})
    assert seen == [f"{tmp_path}/shards-{number:04d}.tar" for number in range(10)]
    for name in seen:
        with tarfile.open(name) as tar:
            assert len(tar.getnames()) == 10
