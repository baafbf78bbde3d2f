"""`iter_records` over paths, urls, bytes and files, plain and compressed."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
import threading
import zlib

import pytest

from formats.record_reference import drain, mutate, place, read_records
from servers.faulty import FaultServer
from shardset.errors import ChecksumError, FormatError, NotFoundError, StorageError, TruncatedError
from shardset.index.record_reader import iter_records
from shardset.policy import Report
from shardset.storage import LocalStore, MemoryStore
from storage.counting import CountingStore
from tfrecords import FOREIGN, make_payloads, record_bytes

PAYLOADS = make_payloads(2000, seed=1)
DATA = record_bytes(PAYLOADS)
FORMS = {"plain": DATA, "gzip": gzip.compress(DATA), "zlib": zlib.compress(DATA)}
COUNTS = {
    "mnist_20.tfrecord": 20,
    "next_page.tfrecord.gz": 100,
    "penguin-00000-of-00001.gz": 100,
    "sequence_eval.gz": 4500,
    "unlabelled_data_tfrecord-00008-of-00012.gz": 205,
}


@pytest.fixture(params=sorted(FORMS))
def form(request):
    return FORMS[request.param]


def test_a_path_is_read_whatever_its_name_says(tmp_path, form):
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(form)
    assert list(iter_records(path)) == PAYLOADS
    assert list(iter_records(str(path))) == PAYLOADS
    assert list(iter_records(path.as_uri())) == PAYLOADS


def test_bytes_are_read_from_any_buffer(form):
    for source in (form, bytearray(form), memoryview(form), memoryview(b"x" + form)[1:]):
        assert list(iter_records(source)) == PAYLOADS


def test_a_binary_file_is_read_from_where_it_stands(tmp_path, form):
    path = tmp_path / "a.bin"
    path.write_bytes(b"something before" + form)
    with path.open("rb") as file:
        file.seek(16)
        assert list(iter_records(file)) == PAYLOADS
    with path.open("rb", buffering=0) as file:
        file.seek(16)
        assert list(iter_records(file)) == PAYLOADS


def test_a_file_that_has_nothing_but_read_is_enough(form):
    class Trickle:
        def __init__(self, data):
            self._file = io.BytesIO(data)

        def read(self, size):
            return self._file.read(min(size, 777))

    assert list(iter_records(Trickle(form))) == PAYLOADS


def test_a_pipe_gives_its_records_before_it_is_closed():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file:
        records = iter_records(file)
        os.write(writing, DATA[:40_000])
        got = [next(records) for _ in range(100)]
        thread = threading.Thread(target=lambda: (os.write(writing, DATA[40_000:60_000]), os.close(writing)))
        thread.start()
        rest, error = drain(records)
        thread.join()
    expected, fault = read_records(DATA[:60_000])
    assert got + rest == expected
    assert place(error) == fault


def test_standard_input_is_read(form):
    code = (
        "import sys; from shardset.index.record_reader import iter_records;"
        "print(sum(map(len, iter_records(sys.stdin.buffer))))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=form, capture_output=True, check=True)
    assert int(done.stdout) == sum(map(len, PAYLOADS))


def test_a_text_file_is_refused():
    with pytest.raises(TypeError, match="open it as binary"):
        list(iter_records(io.StringIO("text")))


@pytest.mark.skipif(not hasattr(os, "set_blocking"), reason="no pipes that do not block")
def test_a_pipe_that_does_not_block_is_refused_while_it_is_empty():
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb", buffering=0) as file, pytest.raises(BlockingIOError, match="no bytes yet"):
        list(iter_records(file))
    os.close(writing)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_store_says_where_the_bytes_are(tmp_path, form, mmap):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(form)
    assert list(iter_records(path, store=LocalStore(mmap=mmap))) == PAYLOADS
    memory = MemoryStore()
    memory.write("memory://a.tfrecord", form)
    assert list(iter_records("memory://a.tfrecord", store=memory)) == PAYLOADS


def test_what_is_elsewhere_is_streamed_in_long_reads(form):
    with FaultServer() as server:
        url = server.put("/a.tfrecord", form)
        assert list(iter_records(url)) == PAYLOADS


def test_a_file_of_no_bytes_has_no_records(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.touch()
    assert list(iter_records(path)) == []
    assert list(iter_records(path, store=LocalStore(mmap=False))) == []
    for source in (b"", io.BytesIO()):
        for compression in (None, "", "gzip", "zlib"):
            assert list(iter_records(source, compression=compression)) == []


def test_a_missing_file_is_an_error_at_once(tmp_path):
    with pytest.raises(NotFoundError):
        iter_records(tmp_path / "a.tfrecord")
    with pytest.raises(StorageError):
        iter_records(tmp_path)


def test_nothing_is_read_before_the_first_record_is_asked_for():
    class File(io.BytesIO):
        asked = 0

        def read1(self, size=-1):
            self.asked += 1
            return super().read1(size)

    file = File(DATA)
    records = iter_records(file)
    assert file.asked == 0
    assert next(records) == PAYLOADS[0]
    assert file.asked == 1


@pytest.mark.parametrize("name", ["gzip", "GZIP", "zlib", "ZLIB", ""])
def test_compression_may_be_said_in_the_words_of_tensorflow(name):
    assert list(iter_records(FORMS[name.lower() or "plain"], compression=name)) == PAYLOADS


def test_other_words_for_compression_are_refused_at_once():
    for name in ("snappy", "gz", "none"):
        with pytest.raises(ValueError, match="it is one of '', 'gzip', 'zlib'"):
            iter_records(DATA, compression=name)


@pytest.mark.parametrize("said", ["", "gzip", "zlib"])
def test_a_wrong_word_for_compression_is_an_error_that_says_what_the_file_is(said):
    for name, form in FORMS.items():
        if said == ("" if name == "plain" else name):
            continue
        for source in (form, io.BytesIO(form)):
            with pytest.raises(FormatError, match="does not fit: this is") as caught:
                list(iter_records(source, compression=said))
            assert caught.value.code == "bad_compression"
            assert {"plain": "TFRecord", "gzip": "gzip", "zlib": "zlib"}[name] in str(caught.value)


def test_foreign_files_are_named_with_the_shard(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3203000\n")
    with pytest.raises(FormatError, match="Git LFS pointer") as caught:
        list(iter_records(path, verify=False))
    assert (caught.value.shard, caught.value.offset, caught.value.code) == (str(path), 0, "not_tfrecord")


@pytest.mark.parametrize("name", sorted(FORMS))
def test_damage_is_raised_with_shard_and_offset_after_all_good_records(tmp_path, name):
    at = len(record_bytes(PAYLOADS[:1500]))
    number = next(number for number in range(1500, 2000) if len(PAYLOADS[number]) > 20)
    at = len(record_bytes(PAYLOADS[:number]))
    plain = DATA[: at + 20] + bytes([DATA[at + 20] ^ 1]) + DATA[at + 21 :]
    path = tmp_path / "a.tfrecord"
    path.write_bytes({"plain": bytes, "gzip": gzip.compress, "zlib": zlib.compress}[name](plain))
    records, error = drain(iter_records(path))
    assert records == PAYLOADS[:number]
    assert (error.shard, error.offset, type(error)) == (str(path), at, ChecksumError)
    assert f"record {number}" in str(error)
    assert ("inflated bytes" in str(error)) == (name != "plain")
    assert len(list(iter_records(path, verify=False))) == len(PAYLOADS)


@pytest.mark.parametrize("source", [bytes, io.BytesIO])
def test_a_short_tail_is_silent_only_on_request(source):
    data = DATA + b"tail"
    records, error = drain(iter_records(source(data)))
    assert (records, place(error)) == (PAYLOADS, ("truncated_record_header", len(DATA)))
    assert list(iter_records(source(data), tf_compat=True)) == PAYLOADS
    assert list(iter_records(source(gzip.compress(data)), tf_compat=True)) == PAYLOADS


@pytest.mark.parametrize("tf_compat", [False, True])
def test_a_compressed_file_that_is_cut_short_gives_what_it_has_and_an_error(tf_compat):
    for cut in (1, 4, 8, 20, 500):
        records, error = drain(iter_records(FORMS["gzip"][:-cut], tf_compat=tf_compat))
        assert records == PAYLOADS[: len(records)]
        assert (error.code, type(error)) == ("truncated_compression", TruncatedError)
        assert len(records) == len(PAYLOADS) or cut > 8


def test_damage_of_the_compressed_bytes_comes_after_the_records_before_it():
    whole = FORMS["gzip"]
    records, error = drain(iter_records(whole[: len(whole) // 2] + b"\xff" * 200 + whole[len(whole) // 2 + 200 :]))
    assert 500 < len(records) < len(PAYLOADS)
    assert records == PAYLOADS[: len(records)]
    assert isinstance(error, FormatError)


def test_zero_bytes_behind_compressed_data_are_counted():
    report = Report()
    assert list(iter_records(FORMS["gzip"] + bytes(512), report=report)) == PAYLOADS
    assert report.counts == {"compression_padding": 1}


@pytest.mark.parametrize("name", COUNTS)
def test_files_of_other_projects_give_the_records_that_they_hold(name):
    data = (FOREIGN / name).read_bytes()
    records = list(iter_records(FOREIGN / name))
    assert len(records) == COUNTS[name]
    assert (records, None) == read_records(gzip.decompress(data) if name.endswith(".gz") else data)


def test_without_a_map_a_file_is_read_once_in_long_pieces(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(DATA * 20)
    store = CountingStore(LocalStore())
    assert list(iter_records(path, store=store)) == PAYLOADS * 20
    assert store.bytes_read == 20 * len(DATA)
    assert len(store.ranges) == -(-20 * len(DATA) // (1 << 20))


def test_mutated_files_give_what_the_reference_gives_from_every_source(tmp_path, fuzz_count):
    rng = random.Random(14)
    path = tmp_path / "a.tfrecord"
    for number in range(fuzz_count // 10):
        plain = mutate(rng, record_bytes(make_payloads(rng.randrange(1, 10), seed=number, longest=100)))
        expected, fault = read_records(plain)
        path.write_bytes(plain)
        for source in (path, plain, io.BytesIO(plain), gzip.compress(plain), io.BytesIO(zlib.compress(plain))):
            records, error = drain(iter_records(source))
            if error is not None and error.code in {
                "not_tfrecord",
                "compressed",
                "bad_compression",
                "truncated_compression",
            }:
                assert (records, expected) == ([], [])
            else:
                assert (records, place(error)) == (expected, fault)
