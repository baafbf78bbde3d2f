"""npy, npz, msgpack and CBOR: values as their own libraries give them, and payloads that cost memory or run code."""

from __future__ import annotations

import io
import random
import struct
import sys
import warnings
import zipfile

import cbor2
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardset.decoding import arrays as module
from shardset.decoding.arrays import decode_cbor, decode_msgpack, decode_npy, decode_npz
from shardset.errors import DecodeError, MissingExtraError

TYPES = st.sampled_from(["<f4", ">f8", "<i2", "|u1", "|b1", "<c8", "<U3", "|S5", "<M8[s]"]) | arrays.array_dtypes(
    max_size=3
)


def npy(array, **options):
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of fields outside of ASCII take a newer version of the format
        np.save(buffer, array, **options)
    return buffer.getvalue()


def npz(**arrays_):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays_)
    return buffer.getvalue()


def with_header(text, version=(1, 0), payload=b""):
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + payload


@given(TYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))))
def test_an_npy_is_read_as_numpy_reads_it(array):
    for each in (array, np.asfortranarray(array)):
        payload = npy(each)
        found, expected = decode_npy(payload), np.load(io.BytesIO(payload))
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
        assert found.flags.f_contiguous == expected.flags.f_contiguous
        assert found.flags.writeable


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_the_format_are_read(version):
    array = np.array([(1, 2.5)], [("größe" if version == (3, 0) else "size", "<i4"), ("x", "<f8")])
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version)
    np.testing.assert_array_equal(decode_npy(buffer.getvalue()), array)


def test_a_header_that_python_2_wrote_is_read():
    payload = with_header(b"{'descr': '<i2', 'fortran_order': False, 'shape': (2L, 1L)}", payload=b"\1\0\2\0")
    assert decode_npy(payload).tolist() == [[1], [2]]


def test_bytes_after_the_array_are_left_alone():
    assert decode_npy(npy(np.arange(3)) + b"more").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "not an npy"),
        (b"PK\x03\x04 and so on", "not an npy"),
        (b"\x93NUMPY\x01\x00\xff\xff{}", "ends inside the header"),
        (b"\x93NUMPY\x09\x00" + bytes(8), "version 9.0"),
        (with_header(b"{}"), "malformed"),
        (with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,"), "malformed"),
        (with_header(b"((" * 400, (3, 0)), "malformed"),
        (with_header(b"-" * 20_000), "malformed"),
        (with_header(b"[1]"), "malformed"),
        (with_header(b"{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}"), "malformed"),
        (with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}"), "malformed"),
        (with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': 1}"), "malformed"),
        (with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2)}", (3, 0)), "negative side"),
        (
            with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", payload=bytes(11)),
            "12 bytes, and 11",
        ),
        (with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (10**12,)}"), "malformed"),
        (with_header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999,)}"), "and 0 are here"),
        (with_header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (0, 99999999999999999999)}"), "shape"),
        (npy(np.array([object()]), allow_pickle=True), "never unpickled"),
        (npy(np.array([(1, None)], [("a", "i4"), ("b", "O")]), allow_pickle=True), "never unpickled"),
    ],
)
def test_an_npy_that_is_none_is_refused(payload, message):
    with pytest.raises(DecodeError, match=message):
        decode_npy(payload)


def test_mutated_npy_payloads_give_an_array_or_an_error(fuzz_count):
    chance = random.Random(3)
    whole = npy(np.arange(12, dtype=np.float32).reshape(3, 4))
    outcomes = {"read": 0, "refused": 0}
    for _ in range(fuzz_count // 2):
        payload = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            payload[chance.randrange(len(payload))] = chance.randrange(256)
        try:
            found = decode_npy(bytes(payload[: chance.choice([len(payload), chance.randrange(len(payload))])]))
        except DecodeError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert found.nbytes <= len(payload)
    assert min(outcomes.values()) > 0


def test_an_npz_gives_its_arrays_by_name():
    found = decode_npz(npz(a=np.arange(3), b=np.eye(2, dtype=np.float32)))
    assert list(found) == ["a", "b"]
    np.testing.assert_array_equal(found["a"], np.arange(3))
    np.testing.assert_array_equal(found["b"], np.eye(2, dtype=np.float32), strict=True)


def test_what_is_no_npy_in_an_npz_stays_bytes():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("note.txt", b"hello")
    assert decode_npz(buffer.getvalue()) == {"note.txt": b"hello"}


def test_an_npz_with_one_name_twice_is_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.npy", npy(np.arange(3)))
        archive.writestr("a", npy(np.arange(4)))
    with pytest.raises(DecodeError, match="two arrays called 'a'"):
        decode_npz(buffer.getvalue())


def test_an_npz_that_unpacks_to_too_much_is_refused(monkeypatch):
    payload = npz(a=np.zeros(100_000), b=np.zeros(100_000))
    assert len(payload) < 10_000
    monkeypatch.setattr(module, "MAX_INFLATED", 1_500_000)
    with pytest.raises(DecodeError, match="unpacks to more than 1500000 bytes"):
        decode_npz(payload)


@pytest.mark.parametrize("cut", [0, 10, 60, -30])
def test_a_damaged_npz_is_refused(cut):
    with pytest.raises(DecodeError):
        decode_npz(npz(a=np.arange(100))[:cut])


def test_an_npz_of_objects_is_refused():
    with pytest.raises(DecodeError, match="never unpickled"):
        decode_npz(npz(a=np.array([{}])))


def test_msgpack_and_cbor_are_read():
    value = {"a": [1, 2.5, None, "é"], "b": b"\0\1"}
    assert decode_msgpack(msgpack.packb(value)) == value
    assert decode_cbor(cbor2.dumps(value)) == value


@pytest.mark.parametrize("decode", [decode_msgpack, decode_cbor])
@pytest.mark.parametrize("payload", [b"", b"\xdd\xff\xff\xff\xff", b"\x9b\x00\x00\x00\xff\xff\xff\xff\xff"])
def test_truncated_msgpack_and_cbor_are_value_errors(decode, payload):
    with pytest.raises((ValueError, EOFError)):
        decode(payload)


@pytest.mark.parametrize(("name", "decode"), [("msgpack", decode_msgpack), ("cbor2", decode_cbor)])
def test_a_missing_package_is_named(monkeypatch, name, decode):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"shardset\[arrays\]"):
        decode(b"\x01")
