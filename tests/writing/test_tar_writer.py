from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import tarfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards import read_members, read_samples
from shardset.errors import DuplicateFieldError, EncodeError, StorageError
from shardset.formats.tar import scan_tar
from shardset.index.members import build_tar_member_index
from shardset.storage import MemoryStore
from shardset.writing.tar_headers import HeaderMaker
from shardset.writing.tar_writer import TarWriter

SAMPLE = {"__key__": "a/1", "jpg": b"picture", "cls": 3, "txt": "two words", "__url__": "x.tar"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


def write(target, *samples, **settings):
    with TarWriter(target, **settings) as writer:
        for sample in samples:
            writer.write(sample)


def write_all(writer, samples):
    for sample in samples:
        writer.write(sample)


def break_off(target):
    with TarWriter(target) as writer:
        writer.write({"__key__": "other", "bin": bytes(3 << 20)})
        raise KeyError


def written(*samples, **settings):
    file = io.BytesIO()
    write(file, *samples, **settings)
    return file.getvalue()


def fields_of(content):
    """The samples of a tar by our own reader: key, and payload by field."""
    samples = build_tar_member_index(content).samples()
    return {
        sample.key: {
            part.suffix: content[part.byte_range().offset :][: part.byte_range().length] for part in sample.parts
        }
        for sample in samples
    }


def by_tarfile(members, kind, **attributes):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind, encoding="utf-8", errors="surrogateescape") as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            for attribute, value in {"mode": 0o444, "uname": "bigdata", "gname": "bigdata", **attributes}.items():
                setattr(info, attribute, value)
            tar.addfile(info, io.BytesIO(payload))
    return file.getvalue()


def left_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# ---- what is written


def test_a_sample_becomes_members_in_the_order_of_its_fields_and_the_bytes_of_its_payloads_are_returned(tmp_path):
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        assert writer.write(SAMPLE) == len(b"picture" + b"3" + b"two words")
    (sample,) = read_samples(tmp_path / "a.tar")
    assert [(part.name, part.payload) for part in sample.parts] == [
        ("a/1.cls", b"3"),
        ("a/1.jpg", b"picture"),
        ("a/1.txt", b"two words"),
    ]


def test_ordinary_members_are_ustar_with_a_fixed_time_as_tarfile_writes_them():
    content = written({"__key__": "1", "jpg": b"x" * 700, "txt": b""}, {"__key__": "2", "txt": b"y"})
    members = [("1.jpg", b"x" * 700), ("1.txt", b""), ("2.txt", b"y")]
    assert content == by_tarfile(members, tarfile.USTAR_FORMAT)


def test_owner_mode_and_time_are_those_asked_for():
    content = written({"__key__": "1", "txt": b"y"}, user="me", group="us", mode=0o640, mtime=1_700_000_000)
    wanted = {"uname": "me", "gname": "us", "mode": 0o640, "mtime": 1_700_000_000}
    assert content == by_tarfile([("1.txt", b"y")], tarfile.USTAR_FORMAT, **wanted)


KEYS = st.text(
    st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters=".\\/"), min_size=1, max_size=60
).filter(lambda key: not key.startswith("__") and key[1:2] != ":")
FOLDERS = st.lists(KEYS, max_size=4)
FIELDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-é", min_size=1, max_size=20).filter(
    lambda field: field[0] not in ".-" and field == field.lower()
)
SAMPLES = st.dictionaries(
    st.builds(lambda folders, key: "/".join([*folders, key]), FOLDERS, KEYS),
    st.dictionaries(FIELDS, st.binary(max_size=1200), min_size=1, max_size=4),
    max_size=5,
)


@given(SAMPLES)
def test_any_samples_come_back_with_their_keys_fields_and_payloads(samples):
    listed = [{"__key__": key, **fields} for key, fields in samples.items()]
    content = written(*listed, encoder=False)
    assert content == written(*listed, encoder=False)
    assert fields_of(content) == samples
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = {info.name: tar.extractfile(info).read() for info in tar}
    assert found == {f"{key}.{field}": value for key, fields in samples.items() for field, value in fields.items()}


@given(SAMPLES, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), st.integers(0, 8**11 - 1))
@settings(max_examples=40)
def test_in_the_formats_of_tarfile_the_bytes_are_those_of_tarfile(samples, kind, mtime):
    members = [(f"{key}.{field}", fields[field]) for key, fields in samples.items() for field in sorted(fields)]
    listed = [{"__key__": key, **fields} for key, fields in samples.items()]
    assert written(*listed, encoder=False, format=kind, mtime=mtime) == by_tarfile(members, kind, mtime=mtime)


@pytest.mark.parametrize("program", ["tar", "bsdtar"])
def test_other_programs_read_what_was_written(tmp_path, program):
    samples = {
        "1": {"jpg": b"x" * 100_000, "txt": b""},
        "folder.with.dots/2": {"seg.png": b"y"},
        "é/" + "long" * 50: {"txt": b"z"},
        "n" * 99: {"txt": b"w"},
        "f" * 120 + "/" + "g" * 80: {"txt": b"prefix"},
    }
    write(tmp_path / "a.tar", *({"__key__": key, **fields} for key, fields in samples.items()), encoder=False)
    (tmp_path / "out").mkdir()
    run = [program, "-xf", str(tmp_path / "a.tar"), "-C", str(tmp_path / "out")]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.stderr == ""
    for key, fields in samples.items():
        for field, payload in fields.items():
            assert (tmp_path / "out" / f"{key}.{field}").read_bytes() == payload


@pytest.mark.parametrize(
    ("key", "blocks"),
    [("n" * 96, 1), ("n" * 97, 3), ("f" * 150 + "/" + "n" * 90, 1), ("f" * 200 + "/" + "n" * 90, 3), ("é", 3)],
)
def test_an_extension_header_stands_only_where_ustar_cannot_hold_the_name(key, blocks):
    content = written({"__key__": key, "txt": b""})
    table = scan_tar(lambda offset, length: content[offset : offset + length], len(content))
    assert table.offset.tolist() == [512 * blocks]
    assert table.names.text(0) == f"{key}.txt"


def test_a_key_whose_bytes_are_no_utf8_keeps_them():
    key = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert fields_of(written({"__key__": key, "txt": b"x"})) == {key: {"txt": b"x"}}


def test_a_payload_of_8_gib_has_an_extension_header_with_its_size():
    header = HeaderMaker().make("a.bin", 8 << 30)
    assert len(header) == 3 * 512
    assert b"size=8589934592\n" in header
    with pytest.raises(ValueError, match="USTAR_FORMAT cannot hold"):
        HeaderMaker(format=tarfile.USTAR_FORMAT).make("a.bin", 8 << 30)


@pytest.mark.parametrize(
    "value",
    [b"abc", bytearray(b"abc"), memoryview(b"xabc")[1:], memoryview(b"cba")[::-1], "abc"],
    ids=["bytes", "bytearray", "view", "backwards", "text"],
)
@pytest.mark.parametrize("encoder", [True, False])
def test_anything_like_bytes_is_a_payload_already_and_text_is_utf8(value, encoder):
    assert fields_of(written({"__key__": "1", "bin": value}, encoder=encoder)) == {"1": {"bin": b"abc"}}


@pytest.mark.parametrize("size", [100, 100_000, 3_000_000])
def test_a_buffer_may_be_used_again_after_the_write(size):
    buffer = bytearray(size)
    file = io.BytesIO()
    with TarWriter(file) as writer:
        for number in range(3):
            buffer[:] = bytes([number]) * size
            writer.write(
                {"__key__": str(number), "bin": buffer, "seg.bin": memoryview(buffer).cast("B", (size // 4, 4))}
            )
    for number in range(3):
        assert fields_of(file.getvalue())[str(number)] == dict.fromkeys(("bin", "seg.bin"), bytes([number]) * size)


def test_a_tar_without_samples_is_an_empty_tar(tmp_path):
    write(tmp_path / "a.tar")
    assert (tmp_path / "a.tar").read_bytes() == bytes(10240)


def test_fields_that_begin_with_an_underscore_are_left_out_and_those_that_may_be_data_are_told(tmp_path, caplog):
    sample = {"__key__": "1", "__url__": "u", "__index__": 7, "_note": "x", "txt": "y"}
    write(tmp_path / "a.tar", sample, sample | {"__key__": "2"})
    assert sorted(read_members(tmp_path / "a.tar")) == ["1.txt", "2.txt"]
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'a.tar'}: the field '_note' was left out of 2 samples")
    assert message.endswith("keep_meta=True writes them")


def test_with_keep_meta_they_are_written_but_for_those_that_every_reader_makes_up(tmp_path):
    sample = {"__key__": "1", "__url__": "u", "__local_path__": "p", "__index__": "7", "_note": "x", "txt": "y"}
    write(tmp_path / "a.tar", sample, keep_meta=True)
    assert sorted(read_members(tmp_path / "a.tar")) == ["1.__index__", "1._note", "1.txt"]
    with pytest.raises(EncodeError, match="'__index__' is a int and not bytes"):
        written(sample | {"__index__": 7}, keep_meta=True)


# ---- what is refused


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", r"the key '' is empty - give each sample a key of its own"),
        (7, r"__key__ is 7, a int - write it as text"),
        (b"1", r"__key__ is b'1', a bytes"),
        ("a.b", r"'a\.b' has a dot in its last part, where a reader would end the key - replace it: 'a_b'"),
        ("x.y/a.b.c", r"replace it: 'x\.y/a_b_c'"),
        (".a", r"'\.a' has a dot"),
        ("a/", r"'a/' ends with a slash"),
        ("/a", r"'/a' is an absolute path"),
        ("C:/a", r"'C:/a' is an absolute path"),
        ("../a", r"leads out of the folder"),
        ("a/../../b", r"leads out of the folder"),
        ("..", r"leads out of the folder"),
        ("a\\b", r"has a backslash, which only some systems take for a folder's end - write / between folders"),
        ("a\nb", r"has a control character"),
        ("a\0b", r"has a control character"),
        ("__meta__/a", r"lies in a __name__ folder, which holds no samples"),
        ("a\ud800", r"cannot be written: .*surrogates not allowed"),
    ],
)
def test_a_key_that_would_not_be_read_back_is_refused_with_what_to_do(key, message):
    with pytest.raises(EncodeError, match=message) as caught:
        written({"__key__": key, "txt": "x"})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("", r"the field name '' is empty"),
        (".txt", r"'\.txt' begins with a dot, and one more stands before it - call it 'txt'"),
        ("JPG", r"'JPG' has capitals, which readers turn into small letters - call it 'jpg'"),
        ("a/b", r"'a/b' has a slash"),
        ("a\\b", r"has a slash"),
        ("a\rb", r"has a control character"),
        (3, r"a field is called 3, a int - call it by a str"),
    ],
)
@pytest.mark.parametrize("encoder", [True, False])
def test_a_field_that_would_not_be_read_back_is_refused_with_what_to_do(field, message, encoder):
    with pytest.raises(EncodeError, match=message) as caught:
        written({"__key__": "k", "txt": b"x", field: b"y"}, encoder=encoder)
    assert caught.value.key == "k"


def test_reserved_names_are_refused():
    with pytest.raises(EncodeError, match="'__bad__' is a name that readers keep for themselves"):
        written({"__key__": "k", "__bad__": b"x"}, keep_meta=True)
    with pytest.raises(EncodeError, match=r"'__a\.b__' is taken for no part of a sample"):
        written({"__key__": "__a", "b__": b"x"})


def test_a_sample_without_key_or_without_field_is_refused():
    with pytest.raises(EncodeError, match="the sample has no __key__"):
        written({"txt": "x"})
    with pytest.raises(EncodeError, match="has no field to write"):
        written({"__key__": "1", "__url__": "x"})


def test_a_key_is_written_once_also_if_others_stand_between_and_the_writer_goes_on_after_a_refusal():
    file = io.BytesIO()
    with TarWriter(file) as writer:
        writer.write({"__key__": "1", "txt": "a"})
        writer.write({"__key__": "2", "txt": "b"})
        with pytest.raises(DuplicateFieldError, match="the key '1' was written into this shard before"):
            writer.write({"__key__": "1", "jpg": b"c"})
        with pytest.raises(EncodeError):
            writer.write({"__key__": "3", "npy": object()})
        writer.write({"__key__": "3", "txt": "d"})
    assert fields_of(file.getvalue()) == {"1": {"txt": b"a"}, "2": {"txt": b"b"}, "3": {"txt": b"d"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": tarfile.USTAR_FORMAT, "mtime": 1.5}, "only PAX_FORMAT holds fractions"),
        ({"format": tarfile.GNU_FORMAT, "mtime": 1.5}, "only PAX_FORMAT holds fractions"),
        ({"format": tarfile.USTAR_FORMAT, "mtime": -1}, "USTAR_FORMAT holds 0 to"),
        ({"mtime": float("nan")}, "seconds since 1970"),
        ({"format": 7}, "format=7"),
        ({"format": "zip"}, "format='zip'"),
        ({"user": "u" * 32}, "at most 31 ASCII characters"),
        ({"group": "é"}, "at most 31 ASCII characters"),
        ({"mode": -1}, "permissions are"),
        ({"compress": "rar"}, "give 'gz', 'bz2', 'xz' or 'zst'"),
        ({"encoder": 3}, "encoder=3"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused_and_leaves_no_file(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        TarWriter(tmp_path / "a.tar", **settings)
    assert left_in(tmp_path) == []


def test_a_name_that_ustar_cannot_hold_is_refused_where_ustar_is_asked_for():
    for key in ("é", "n" * 120):
        with pytest.raises(EncodeError, match="USTAR_FORMAT cannot hold"):
            written({"__key__": key, "txt": "x"}, format=tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("name", ["PAX_FORMAT", "pax", tarfile.PAX_FORMAT])
def test_a_fraction_of_a_second_stands_in_pax_headers(name):
    content = written({"__key__": "1", "txt": "x"}, format=name, mtime=1.5)
    assert content == by_tarfile([("1.txt", b"x")], tarfile.PAX_FORMAT, mtime=1.5)
    assert content == written({"__key__": "1", "txt": "x"}, mtime=1.5)


def test_a_time_without_a_fraction_needs_no_extension_header():
    assert written({"__key__": "1", "txt": "x"}, mtime=3.0) == written({"__key__": "1", "txt": "x"}, mtime=3)


# ---- where it goes


def test_a_file_appears_when_it_is_closed_and_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "deep" / "a.tar"
    with TarWriter(path) as writer:
        writer.write(SAMPLE)
        assert not path.exists()
    before = path.read_bytes()
    with pytest.raises(KeyError):
        break_off(path)
    assert path.read_bytes() == before
    assert left_in(path.parent) == ["a.tar"]


def test_discarding_leaves_nothing_and_closes(tmp_path):
    writer = TarWriter(tmp_path / "a.tar")
    writer.write(SAMPLE)
    writer.discard()
    writer.discard()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(SAMPLE)
    assert left_in(tmp_path) == []


def test_closing_twice_is_as_good_as_once(tmp_path):
    writer = TarWriter(tmp_path / "a.tar")
    writer.write(SAMPLE)
    writer.close()
    before = (tmp_path / "a.tar").read_bytes()
    writer.close()
    assert (tmp_path / "a.tar").read_bytes() == before


def test_urls_go_to_their_store_whole(tmp_path):
    store = MemoryStore()
    write("memory://b/a.tar", SAMPLE, store=store)
    content = store.read("memory://b/a.tar", 0, store.info("memory://b/a.tar").size)
    assert content == written(SAMPLE)
    for url in (tmp_path / "a.tar", f"file:{tmp_path}/b.tar", (tmp_path / "c.tar").as_uri()):
        write(url, SAMPLE)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [content] * 3


def test_web_servers_are_read_only():
    with pytest.raises(ValueError, match="web servers are read only") as caught:
        TarWriter("https://user:secret@host/a.tar")
    assert "secret" not in str(caught.value)


def test_an_open_file_stays_open_and_gets_no_end_if_something_goes_wrong(tmp_path):
    with (tmp_path / "a.tar").open("wb") as file:
        write(file, SAMPLE)
        assert not file.closed
    assert (tmp_path / "a.tar").read_bytes() == written(SAMPLE)
    file = io.BytesIO()
    with pytest.raises(KeyError):
        break_off(file)
    table = scan_tar(lambda offset, length: file.getvalue()[offset : offset + length], len(file.getvalue()))
    assert {fault.code for fault in table.faults} & {"truncated_payload", "no_end_marker"}


def test_a_file_that_takes_a_part_at_a_time_gets_everything():
    class Slow(io.RawIOBase):
        content = b""

        def writable(self):
            return True

        def write(self, data):
            self.content += bytes(data[:1000])
            return min(1000, len(data))

    file = Slow()
    write(file, {"__key__": "1", "bin": bytes(100_000), "txt": "x"})
    assert file.content == written({"__key__": "1", "bin": bytes(100_000), "txt": "x"})


def test_what_is_no_file_is_refused():
    with pytest.raises(TypeError, match="not to a int"):
        TarWriter(3)


def test_a_command_gets_the_tar_and_its_failure_is_an_error(tmp_path):
    write(f"pipe:cat > {tmp_path}/a.tar", SAMPLE)
    assert (tmp_path / "a.tar").read_bytes() == written(SAMPLE)
    with pytest.raises(StorageError, match="3"):
        write(f"pipe:cat > {tmp_path}/b.tar; exit 3", SAMPLE)
    with pytest.raises(StorageError):
        write("pipe:head -c 10 > /dev/null; exit 1", {"__key__": "1", "bin": bytes(8 << 20)})


def test_a_command_is_killed_before_its_input_ends_if_something_goes_wrong(tmp_path):
    with pytest.raises(KeyError):
        break_off(f"pipe:cat > /dev/null && touch {tmp_path}/done")
    assert left_in(tmp_path) == []


def test_standard_output_takes_a_tar():
    program = (
        "from shardset.writing.tar_writer import TarWriter\n"
        "with TarWriter('-') as writer: writer.write({'__key__': '1', 'txt': 'x'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == written({"__key__": "1", "txt": "x"})


def test_a_named_pipe_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write(tmp_path / "pipe", SAMPLE)
    reader.join()
    assert found == [written(SAMPLE)]
    assert left_in(tmp_path) == ["pipe"]


# ---- compression


def unzstd(data):
    with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
        return stream.read()


@pytest.mark.parametrize(
    ("name", "compress", "inflate"),
    [
        ("a.tar.gz", None, gzip.decompress),
        ("a.tgz", None, gzip.decompress),
        ("a.tar.bz2", None, bz2.decompress),
        ("a.tar.xz", None, lzma.decompress),
        ("a.tar.zst", None, unzstd),
        ("a.tar", True, gzip.decompress),
        ("a.tar", "gz", gzip.decompress),
        ("a.tar", "bz2", bz2.decompress),
        ("a.tar", "xz", lzma.decompress),
        ("a.tar", "zst", unzstd),
        ("a.tar.gz", False, bytes),
        ("agz", None, bytes),
    ],
)
def test_a_tar_is_compressed_by_its_suffix_or_as_asked_with_the_same_bytes_each_time(tmp_path, name, compress, inflate):
    samples = [{"__key__": str(number), "bin": os.urandom(10) * 20_000} for number in range(5)]
    write(tmp_path / name, *samples, compress=compress)
    content = (tmp_path / name).read_bytes()
    assert inflate(content) == written(*samples)
    write(tmp_path / name, *samples, compress=compress)
    assert (tmp_path / name).read_bytes() == content


# ---- when it fails


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


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.zst"])
def test_a_full_disk_is_reported_with_the_path_and_leaves_the_old_file(small_disk, name):
    write(small_disk / name, {"__key__": "1", "txt": "old"})
    before = (small_disk / name).read_bytes()
    writer = TarWriter(small_disk / name)
    with pytest.raises(StorageError, match=r"no space left on device, at .*/a\.tar.*free some space") as caught:
        write_all(writer, ({"__key__": str(number), "bin": os.urandom(1 << 19)} for number in range(8)))
    assert caught.value.errno == errno.ENOSPC
    for call in (lambda: writer.write(SAMPLE), writer.close):
        with pytest.raises(StorageError, match="the writer failed before"):
            call()
    assert left_in(small_disk) == [name]
    assert (small_disk / name).read_bytes() == before


def test_a_disk_that_is_full_when_the_end_is_written_is_reported_by_close(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        writer = TarWriter(tmp_path / "a.tar")
        writer.write(SAMPLE)
        with pytest.raises(StorageError, match=r"file too large, at .*/a\.tar"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left_in(tmp_path) == []


def test_a_writer_that_nobody_closes_warns_and_leaves_nothing(tmp_path):
    writer = TarWriter(tmp_path / "a.tar")
    writer.write(SAMPLE)
    writers = [writer]
    del writer
    with pytest.warns(ResourceWarning, match="was not closed, so nothing was written"):
        writers.clear()
    assert left_in(tmp_path) == []


def test_a_forked_child_cannot_write_and_leaves_its_parents_file_alone(tmp_path):
    writer = TarWriter(tmp_path / "a.tar")
    writer.write(SAMPLE)

    def child():
        with pytest.raises(ValueError, match="belongs to the process that made it"):
            writer.write({"__key__": "child", "txt": "x"})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join()
    assert process.exitcode == 0
    writer.close()
    assert (tmp_path / "a.tar").read_bytes() == written(SAMPLE)


def test_a_writer_is_not_pickled(tmp_path):
    with TarWriter(tmp_path / "a.tar") as writer, pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(writer)


def test_a_user_encoder_may_change_the_sample_or_name_functions_by_suffix():
    content = written({"__key__": "1", "x": 1}, encoder=lambda sample: {"__key__": "2", "y": b"%d" % sample["x"]})
    assert fields_of(content) == {"2": {"y": b"1"}}
    content = written({"__key__": "1", "a.up": "x", "b": b"y"}, encoder={"up": lambda value: value.upper().encode()})
    assert fields_of(content) == {"1": {"a.up": b"x", "b": b"y"}}  # text is a payload already
    content = written({"__key__": "1", "v": np.ones(2)}, encoder={"v": lambda value: value.tobytes()})
    assert fields_of(content) == {"1": {"v": np.ones(2).tobytes()}}
