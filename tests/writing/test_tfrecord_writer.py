from __future__ import annotations

import errno
import gzip
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import killing
from shardset.errors import FormatError, StorageError
from shardset.formats.example import parse_example
from shardset.index.record_reader import iter_records
from shardset.storage import MemoryStore
from shardset.writing.tfrecord_writer import TFRecordWriter
from writing.record_files import framed, left_in, read_records

PAYLOADS = [b"", b"abc", b"x" * 300, bytes(range(256)) * 40, b"last"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


def write(path, payloads, **settings):
    with TFRecordWriter(path, **settings) as writer:
        places = [writer.write(payload) for payload in payloads]
    return writer.urls, places


def break_off(path, payload, **settings):
    with TFRecordWriter(path, **settings) as writer:
        writer.write(payload)
        writer.flush()
        raise KeyError


def write_for_killing(folder, name, payloads, **settings):
    """Write where a killed run may have left files, all of which must be whole."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in Path(folder).glob("a*"):
        assert read_records(path)
    write(Path(folder) / name, [payload.encode() for payload in payloads], **settings)


def test_records_are_read_back_as_they_were_written(tmp_path):
    urls, places = write(tmp_path / "a.tfrecord", PAYLOADS)
    assert (tmp_path / "a.tfrecord").read_bytes() == b"".join(map(framed, PAYLOADS))
    assert urls == (str(tmp_path / "a.tfrecord"),)
    assert places == [(0, number) for number in range(5)]


def test_a_writer_without_records_leaves_an_empty_file(tmp_path):
    write(tmp_path / "a.tfrecord", [])
    assert (tmp_path / "a.tfrecord").read_bytes() == b""


@pytest.mark.parametrize(("name", "head"), [("GZIP", "1f8b0800000000000003"), ("gzip", "1f8b08"), ("zlib", "789c")])
def test_compressed_files_begin_as_tensorflow_s_do(tmp_path, name, head):
    write(tmp_path / "a", PAYLOADS, compression=name)
    assert (tmp_path / "a").read_bytes().hex().startswith(head)
    assert read_records(tmp_path / "a") == PAYLOADS
    write(tmp_path / "empty", [], compression=name)
    assert len((tmp_path / "empty").read_bytes()) == (8 if name == "zlib" else 20)
    assert read_records(tmp_path / "empty") == []


@given(payloads=st.lists(st.binary(max_size=40), max_size=30), shards=st.integers(1, 7))
def test_records_are_dealt_to_a_set_of_shards_in_turn(tmp_path_factory, payloads, shards):
    folder = tmp_path_factory.mktemp("set")
    urls, places = write(folder / f"out@{shards}.tfrecord", payloads)
    assert [Path(url).name for url in urls] == [
        f"out-{number:05d}-of-{shards:05d}.tfrecord" for number in range(shards)
    ]
    found = [read_records(url) for url in urls]
    assert found == [payloads[number::shards] for number in range(shards)]
    assert [found[shard][record] for shard, record in places] == payloads


@given(
    payloads=st.lists(st.binary(max_size=60), max_size=30),
    max_records=st.none() | st.integers(1, 6),
    max_bytes=st.none() | st.integers(1, 200),
    compression=st.sampled_from([None, "gzip"]),
)
def test_shards_are_filled_one_after_the_other_up_to_a_limit(
    tmp_path_factory, payloads, max_records, max_bytes, compression
):
    if max_records is max_bytes is None:
        max_records = 3
    folder = tmp_path_factory.mktemp("set")
    urls, places = write(
        folder / "out.tfrecord", payloads, max_records=max_records, max_bytes=max_bytes, compression=compression
    )
    assert left_in(folder) == [f"out-{number:05d}-of-{len(urls):05d}.tfrecord" for number in range(len(urls))]
    found = [read_records(url) for url in urls]
    assert [payload for shard in found for payload in shard] == payloads
    assert [found[shard][record] for shard, record in places] == payloads
    for number, shard in enumerate(found):
        size = sum(16 + len(payload) for payload in shard)
        assert max_records is None or len(shard) <= max_records
        assert max_bytes is None or size <= max_bytes or len(shard) == 1
        if number + 1 < len(found):  # no shard ends before it must
            following = 16 + len(found[number + 1][0])
            assert len(shard) == max_records or (max_bytes is not None and size + following > max_bytes)


def test_a_set_of_a_thousand_shards_needs_no_thousand_open_files(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (tmp_path / "highest").open("wb") as file:
        room = file.fileno() + 200  # what other tests hold open counts too
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(room, before[1]), before[1]))
    try:
        urls, _ = write(tmp_path / "out@1000", [str(number).encode() for number in range(2500)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(urls) == 1000
    assert read_records(urls[499]) == [b"499", b"1499", b"2499"]


def test_features_are_written_as_an_example(tmp_path):
    write(tmp_path / "a", [{"label": 3, "image": b"x", "box": np.array([0.5, 1], np.float32)}])
    features = parse_example(read_records(tmp_path / "a")[0])
    assert features["label"].tolist() == [3]
    assert features["image"] == [b"x"]
    assert features["box"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("view", [lambda buffer: buffer, memoryview, np.frombuffer], ids=["bytearray", "view", "array"])
def test_any_buffer_is_a_payload_and_may_be_changed_afterwards(tmp_path, view):
    buffer = bytearray(b"01234567")
    with TFRecordWriter(tmp_path / "a") as writer:
        writer.write(view(buffer))
        buffer[0] = 0x39
        writer.write(view(buffer))
    assert read_records(tmp_path / "a") == [b"01234567", b"91234567"]


@pytest.mark.parametrize("payload", ["text", 3, None])
def test_what_is_no_payload_is_refused_and_the_writer_goes_on(tmp_path, payload):
    with TFRecordWriter(tmp_path / "a") as writer:
        with pytest.raises(TypeError):
            writer.write(payload)
        writer.write(b"good")
    assert read_records(tmp_path / "a") == [b"good"]


@pytest.mark.parametrize("name", ["a", "a@3.tfrecord"])
def test_an_exception_leaves_nothing_behind(tmp_path, name):
    with pytest.raises(KeyError):
        break_off(tmp_path / name, b"x" * (20 << 20))
    assert left_in(tmp_path) == []


def test_an_exception_leaves_the_old_file(tmp_path):
    write(tmp_path / "a", [b"old"])
    with pytest.raises(KeyError):
        break_off(tmp_path / "a", b"new")
    assert read_records(tmp_path / "a") == [b"old"]
    assert left_in(tmp_path) == ["a"]


def test_a_file_appears_when_the_writer_is_closed_and_not_before(tmp_path):
    writer = TFRecordWriter(tmp_path / "a")
    writer.write(b"x")
    writer.flush()
    assert not (tmp_path / "a").exists()
    (hidden,) = left_in(tmp_path)
    assert hidden.startswith(".")
    assert read_records(tmp_path / hidden) == [b"x"]
    writer.close()
    writer.close()
    assert left_in(tmp_path) == ["a"]


def test_the_folder_is_made(tmp_path):
    write(tmp_path / "new" / "deep" / "a", [b"x"])
    assert read_records(tmp_path / "new" / "deep" / "a") == [b"x"]


def test_a_closed_writer_refuses(tmp_path):
    writer = TFRecordWriter(tmp_path / "a")
    writer.close()
    for call in (lambda: writer.write(b"x"), writer.flush):
        with pytest.raises(ValueError, match=r"/a: the writer is closed"):
            call()


def test_a_writer_that_nobody_closes_writes_nothing_and_says_so(tmp_path):
    writer = TFRecordWriter(tmp_path / "a")
    writer.write(b"x")
    with pytest.warns(ResourceWarning, match="was not closed, so nothing was written"):
        del writer
    assert left_in(tmp_path) == []


def test_a_writer_cannot_be_pickled(tmp_path):
    with TFRecordWriter(tmp_path / "a") as writer, pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(writer)


def use_in_child(writer, answers):
    refused = 0
    for call in (lambda: writer.write(b"child"), writer.flush, writer.close):
        try:
            call()
        except ValueError as error:
            refused += "belongs to the process that made it" in str(error)
    writer.discard()
    writer.__del__()
    answers.put(refused)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_neither_write_nor_discard(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with TFRecordWriter(tmp_path / "a") as writer:
        writer.write(b"parent")
        child = context.Process(target=use_in_child, args=(writer, answers))
        child.start()
        assert answers.get(timeout=60) == 3
        child.join(60)
        writer.write(b"parent again")
    assert read_records(tmp_path / "a") == [b"parent", b"parent again"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a@4", {"max_records": 3}, "says how many shards"),
        ("a@*", {}, "leaves open how many shards"),
        ("a@0", {}, "from 1 to"),
        ("a", {"max_records": 0}, "must be positive"),
        ("a", {"max_bytes": -1}, "must be positive"),
        ("a", {"compression": "snappy"}, "TensorFlow reads 'GZIP', 'ZLIB'"),
        ("a@4", {"append": True}, "writes behind one file"),
        ("a", {"append": True, "max_records": 1}, "writes behind one file"),
        ("https://host/a", {}, "web servers are read only"),
        ("s3://bucket/a", {"append": True}, "needs a file of this machine"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(tmp_path, name, settings, message):
    path = name if "://" in name else tmp_path / name
    with pytest.raises(ValueError, match=message):
        TFRecordWriter(path, **settings)
    assert left_in(tmp_path) == []


def test_a_set_is_not_mixed_with_one_of_another_size(tmp_path):
    write(tmp_path / "out@3.tfrecord", PAYLOADS)
    for name, settings in (("out@2.tfrecord", {}), ("out.tfrecord", {"max_records": 2})):
        with pytest.raises(StorageError, match="shards of another set") as caught:
            TFRecordWriter(tmp_path / name, **settings)
        assert caught.value.errno == errno.EEXIST
    write(tmp_path / "out@3.tfrecord", [b"new"])  # the same set is written anew
    write(tmp_path / "out@2.tfrec", [b"other suffix"])
    assert read_records(tmp_path / "out-00000-of-00003.tfrecord") == [b"new"]


def test_an_object_elsewhere_is_sent_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    store = MemoryStore()
    with TFRecordWriter("memory://bucket/a@2.tfrecord", store=store) as writer:
        for payload in PAYLOADS:
            writer.write(payload)
        assert len(left_in(tmp_path)) == 2
    assert left_in(tmp_path) == []
    url = "memory://bucket/a-00001-of-00002.tfrecord"
    assert store.read(url, 0, store.info(url).size) == b"".join(map(framed, PAYLOADS[1::2]))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk of its own")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["a.tfrecord", "a@4.tfrecord"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_full_disk_is_reported_with_the_path_and_leaves_the_old_file(small_disk, name, compression):
    write(small_disk / name, [b"old"])
    before = left_in(small_disk)
    with pytest.raises(StorageError, match=r"no space left on device, at .*/a.*free some space") as caught:
        write(small_disk / name, [os.urandom(1 << 19) for _ in range(4)], compression=compression)
    assert caught.value.errno == errno.ENOSPC
    assert left_in(small_disk) == before
    assert read_records(small_disk / before[0]) == [b"old"]


@pytest.mark.parametrize("settings", [{}, {"append": True}, {"max_records": 1}], ids=str)
def test_a_file_that_may_not_grow_any_more_is_reported_like_a_full_disk(tmp_path, settings):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError, match=r"file too large, at .*/a") as caught:
            write(tmp_path / "a", [b"small", bytes(2 << 20)], **settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert left_in(tmp_path) == []


def test_after_a_full_disk_the_writer_refuses_to_go_on(small_disk):
    writer = TFRecordWriter(small_disk / "a")
    with pytest.raises(StorageError, match="no space left"):
        writer.write(bytes(2 << 20))
    for call in (lambda: writer.write(b"x"), writer.flush, writer.close):
        with pytest.raises(StorageError, match="the writer failed before"):
            call()
    assert left_in(small_disk) == []


def test_a_file_that_grows_is_cut_back_when_the_disk_is_full(small_disk):
    write(small_disk / "a", [b"old"])
    with pytest.raises(StorageError, match="no space left"):
        write(small_disk / "a", [bytes(1 << 19)] * 4, append=True)
    assert read_records(small_disk / "a") == [b"old"]


def test_what_cannot_be_renamed_is_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError) as caught:
        write(tmp_path / "a", [b"x"])
    assert caught.value.url == str(tmp_path / "a")
    assert left_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.tfrecord", "a@3.tfrecord"])
def test_a_writer_killed_at_any_step_leaves_whole_files_or_none(tmp_path, name):
    payloads = ["one", "two", "three", "four"]
    killed = killing.kill_at_every_step(
        "writing.test_tfrecord_writer:write_for_killing", {"name": name, "payloads": payloads}, tmp_path / "folders"
    )
    assert killed >= 4
    for folder in (tmp_path / "folders").iterdir():
        found = [read_records(path) for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        count = len(found)
        assert count == (3 if "@" in name else 1)
        assert found == [[text.encode() for text in payloads[shard::count]] for shard in range(count)]


def test_records_are_appended(tmp_path):
    write(tmp_path / "a", [b"old", b"er"])
    _, places = write(tmp_path / "a", [b"new"], append=True)
    assert places == [(0, 2)]
    assert read_records(tmp_path / "a") == [b"old", b"er", b"new"]


def test_a_gzip_file_gets_another_member(tmp_path):
    write(tmp_path / "a", [b"old"], compression="gzip")
    before = (tmp_path / "a").read_bytes()
    for compression in (None, "GZIP"):
        write(tmp_path / "a", [b"new"], append=True, compression=compression)
    assert (tmp_path / "a").read_bytes().startswith(before)
    assert (tmp_path / "a").read_bytes().count(b"\x1f\x8b\x08") == 3
    assert read_records(tmp_path / "a") == [b"old", b"new", b"new"]


def test_no_gzip_file_gets_an_empty_member_behind_which_tensorflow_would_see_nothing(tmp_path):
    empty = gzip.compress(b"", mtime=0)
    (tmp_path / "a").write_bytes(empty)
    with pytest.raises(KeyError):
        break_off(tmp_path / "a", b"x", append=True)
    write(tmp_path / "a", [], append=True)
    assert (tmp_path / "a").read_bytes() == empty
    write(tmp_path / "a", [b"1"], append=True)
    first = (tmp_path / "a").read_bytes()
    assert first.count(b"\x1f\x8b\x08") == 1
    with TFRecordWriter(tmp_path / "a", append=True) as writer:
        writer.flush()
    assert (tmp_path / "a").read_bytes() == first
    assert read_records(tmp_path / "a") == [b"1"]


def test_nothing_is_appended_behind_zero_bytes_after_gzip_data(tmp_path):
    content = gzip.compress(framed(b"x")) + bytes(512)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FormatError, match="nothing was appended: 512 zero bytes"):
        TFRecordWriter(tmp_path / "a", append=True)
    assert (tmp_path / "a").read_bytes() == content


def test_an_empty_or_missing_file_is_begun_in_place(tmp_path):
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        with TFRecordWriter(tmp_path / name, append=True) as writer:
            writer.write(b"x")
            writer.flush()
            assert read_records(tmp_path / name) == [b"x"]
            writer.write(b"y")
        assert read_records(tmp_path / name) == [b"x", b"y"]


def test_an_exception_while_a_file_grows_cuts_it_back(tmp_path):
    write(tmp_path / "a", [b"old"])
    for name in ("a", "new"):
        with pytest.raises(KeyError):
            break_off(tmp_path / name, b"x", append=True)
    assert read_records(tmp_path / "a") == [b"old"]
    assert left_in(tmp_path) == ["a"]


@pytest.mark.parametrize("cut", range(1, 19))
def test_nothing_is_appended_to_a_file_whose_end_is_missing(tmp_path, cut):
    whole = framed(b"first") + framed(b"abc")
    (tmp_path / "a b").write_bytes(whole[:-cut])
    with pytest.raises(FormatError, match=r"nothing was appended; 1 whole record stands before it") as caught:
        TFRecordWriter(tmp_path / "a b", append=True)
    assert caught.value.offset == 21
    assert caught.value.shard == str(tmp_path / "a b")
    assert "shardset fix '" in str(caught.value)
    assert (tmp_path / "a b").read_bytes() == whole[:-cut]


@pytest.mark.parametrize("byte", [0, 9, 13, 17, 21, 30, 33, 37])
def test_nothing_is_appended_to_a_file_with_a_damaged_header_or_last_record(tmp_path, byte):
    whole = bytearray(framed(b"first") + framed(b"abc"))
    whole[byte] ^= 4
    (tmp_path / "a").write_bytes(whole)
    if byte in {13, 17}:  # in the payload of an earlier record, or its checksum, which only `check` reads
        write(tmp_path / "a", [b"more"], append=True)
        return
    with pytest.raises(FormatError):
        TFRecordWriter(tmp_path / "a", append=True)
    assert (tmp_path / "a").read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"<html></html>" * 9, FormatError, "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 3, FormatError, "LFS"),
        (bytes(64), FormatError, "zero bytes"),
    ],
)
def test_nothing_is_appended_to_a_foreign_file(tmp_path, content, error, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(error, match=message):
        TFRecordWriter(tmp_path / "a", append=True)
    assert (tmp_path / "a").read_bytes() == content


def test_nothing_is_appended_to_zlib_or_under_another_compression(tmp_path):
    write(tmp_path / "zlib", [b"x"], compression="zlib")
    write(tmp_path / "plain", [b"x"])
    with pytest.raises(ValueError, match="first stream alone"):
        TFRecordWriter(tmp_path / "zlib", append=True)
    with pytest.raises(ValueError, match="is not compressed"):
        TFRecordWriter(tmp_path / "plain", append=True, compression="gzip")


def test_a_damaged_gzip_file_is_not_appended_to(tmp_path):
    write(tmp_path / "a", [b"x" * 500], compression="gzip")
    content = (tmp_path / "a").read_bytes()[:-9]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FormatError):
        TFRecordWriter(tmp_path / "a", append=True)
    assert (tmp_path / "a").read_bytes() == content


def test_one_writer_at_a_time_grows_a_file(tmp_path):
    with TFRecordWriter(tmp_path / "a", append=True) as writer:
        with pytest.raises(StorageError, match="somebody else writes behind this file"):
            TFRecordWriter(tmp_path / "a", append=True)
        writer.write(b"x")
    write(tmp_path / "a", [b"y"], append=True)
    assert read_records(tmp_path / "a") == [b"x", b"y"]


def append_until_killed(folder, size):
    path = Path(folder) / "a"
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    write(path, [b"a" * 100] * 10, append=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("more", [1, 11, 12, 50, 116, 232, 1159])
def test_a_killed_append_leaves_the_old_records_and_a_tail_that_is_noticed(tmp_path, more):
    write(tmp_path / "a", [b"old"] * 3)
    size = (tmp_path / "a").stat().st_size
    child = multiprocessing.get_context("fork").Process(target=append_until_killed, args=(str(tmp_path), size + more))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGXFSZ
    content = (tmp_path / "a").read_bytes()
    assert content == (b"".join([framed(b"old")] * 3 + [framed(b"a" * 100)] * 10))[: size + more]
    if more % 116:
        with pytest.raises(FormatError, match="nothing was appended") as caught:
            TFRecordWriter(tmp_path / "a", append=True)
        assert caught.value.offset == size + more // 116 * 116
    else:
        write(tmp_path / "a", [b"more"], append=True)


@pytest.mark.parametrize(
    ("name", "magic"), [("a.tfrecord.gz", b"\x1f\x8b"), ("a.tfrecord.zlib", b"\x78"), ("a.tfrecord", b"\3\0\0\0")]
)
def test_the_suffix_says_how_a_file_is_compressed(tmp_path, name, magic):
    with TFRecordWriter(tmp_path / name) as writer:
        writer.write(b"abc")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert list(iter_records(tmp_path / name)) == [b"abc"]
    with TFRecordWriter(tmp_path / f"plain-{name}", compression="") as writer:
        writer.write(b"abc")
    assert (tmp_path / f"plain-{name}").read_bytes().startswith(b"\3\0\0\0")


def test_a_set_is_compressed_as_its_suffix_says(tmp_path):
    with TFRecordWriter(tmp_path / "out@2.tfrecord.gz") as writer:
        writer.write(b"abc")
    assert (tmp_path / "out-00000-of-00002.tfrecord.gz").read_bytes().startswith(b"\x1f\x8b")
