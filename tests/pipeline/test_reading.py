from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import subprocess
import sys
import tarfile
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shards
from shards import make_members, tar_bytes, write_shard
from shardset.errors import (
    ChecksumError,
    DuplicateFieldError,
    FormatError,
    LimitError,
    NoSamplesError,
    NotFoundError,
    TruncatedError,
)
from shardset.index.sample_windows import iter_sample_windows
from shardset.pipeline.handlers import ignore_and_continue, ignore_and_stop
from shardset.pipeline.shard_bytes import StreamedBytes
from shardset.pipeline.web_dataset import WebDataset
from shardset.policy import Policy
from shardset.storage import LocalStore
from shardset.storage.memory import MemoryStore


def fields_of(sample):
    return {name: value for name, value in sample.items() if not name.startswith("__")}


def as_expected(path):
    return [(sample.key, sample.fields) for sample in shards.read_samples(path)]


def given_by(dataset):
    return [(sample["__key__"], fields_of(sample)) for sample in dataset]


def until_error(dataset):
    """Return what came before the error, and the error."""
    found = []
    with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by the caller
        found.extend(sample["__key__"] for sample in dataset)
    return found, caught.value


def refuse(_name):
    return False


def twenty(size=5000):
    return [(f"{number:03d}.bin", bytes([number]) * size) for number in range(20)]


@pytest.mark.parametrize("pax", [False, True], ids=["gnu", "pax"])
@pytest.mark.parametrize("fields", [("jpg",), ("jpg", "cls"), ("a", "b", "c"), ("a", "b", "c", "d", "e")], ids=len)
def test_samples_are_those_that_tarfile_and_webdatasets_rule_give(tmp_path, fields, pax):
    path = write_shard(tmp_path / "a.tar", make_members(50, fields=fields), pax=pax)
    samples = list(WebDataset(str(path)))
    assert [(sample["__key__"], fields_of(sample)) for sample in samples] == as_expected(path)
    assert {sample["__url__"] for sample in samples} == {str(path)}
    assert {sample["__local_path__"] for sample in samples} == {str(path)}


@given(
    names=st.lists(
        st.sampled_from(
            ["a.jpg", "a.cls", "b.jpg", "B.JPG", "c/d.x.y", "README", "__m__/a.b", "e.", ".h", "f/._g.jpg", "g.a"]
        ),
        max_size=14,
    ),
    piece=st.sampled_from([1, 100, 512, 1000, 10_000]),
)
def test_any_window_gives_the_samples_of_the_whole(names, piece):
    data = tar_bytes([(name, f"{number}".encode() * 200) for number, name in enumerate(names)])

    def groups(size):
        pieces = iter([data[at : at + size] for at in range(0, len(data), size)])
        source = StreamedBytes(pieces, lambda: None)
        source._size = 1
        found, skipped, last = [], [], None
        for window in iter_sample_windows(source):
            for number, key in enumerate(window.keys):
                rows = range(window.rows[number], window.rows[number + 1])
                payloads = [
                    bytes(window.data[window.offset[row] - window.base :][: window.length[row]]) for row in rows
                ]
                found.append((key, [window.suffixes[window.suffix_ids[row]] for row in rows], payloads))
            skipped += window.skipped
            assert last is None or not last.is_last
            last = window
        return found, skipped, [fault.code for fault in last.faults]

    assert groups(piece) == groups(len(data))


def test_what_belongs_to_no_sample_is_counted_by_kind_and_comes_between_no_fields(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:

        def add(name, kind=tarfile.REGTYPE, payload=b"x"):
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = len(payload) if kind == tarfile.REGTYPE else 0
            info.linkname = "d/a.jpg" if kind in {tarfile.LNKTYPE, tarfile.SYMTYPE} else ""
            tar.addfile(info, io.BytesIO(payload))

        add("d", tarfile.DIRTYPE)
        add("d/a.jpg")
        for name in ("d/._a.jpg", "._a.jpg", ".DS_Store", "d/.hidden.txt"):
            add(name)
        add("README")
        add("__meta__/x.json")
        add("l.jpg", tarfile.SYMTYPE)
        add("h.jpg", tarfile.LNKTYPE)
        add("fifo.jpg", tarfile.FIFOTYPE)
        add("d/a.cls")
    path = tmp_path / "a.tar"
    path.write_bytes(buffer.getvalue())
    dataset = WebDataset(str(path))
    assert [(sample["__key__"], sorted(fields_of(sample))) for sample in dataset] == [("d/a", ["cls", "jpg"])]
    assert dataset.report().counts == {
        "directory": 1,
        "hidden_member": 4,
        "link": 2,
        "no_suffix": 1,
        "special_file": 1,
        "structural_member": 1,
    }
    assert "._a.jpg" in str(dataset.report())
    with pytest.raises(FormatError, match="README"):
        list(WebDataset(str(path), policy=Policy(codes={"no_suffix": "raise"})))


# The damage table: 20 members of 5,000 bytes, each 512 + 5120 bytes long.
STRIDE = 512 + 5120


def test_a_shard_cut_on_the_border_of_a_member_is_warned_about(tmp_path, caplog):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(twenty())[: 7 * STRIDE])
    dataset = WebDataset(str(path))
    assert len(list(dataset)) == 7
    assert dataset.report().counts == {"no_end_marker": 1}
    assert [place.offset for place in dataset.report().places("no_end_marker")] == [7 * STRIDE]
    assert "no_end_marker" in caplog.text
    strict = WebDataset(str(path), policy=Policy(codes={"no_end_marker": "raise"}))
    found, error = until_error(strict)
    assert len(found) == 7
    assert isinstance(error, FormatError)
    assert (error.shard, error.offset) == (str(path), 7 * STRIDE)


@pytest.mark.parametrize("left", [1, 100, 511], ids=str)
def test_a_shard_cut_inside_a_header_is_an_error(tmp_path, left):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(twenty())[: 7 * STRIDE + left])
    found, error = until_error(WebDataset(str(path)))
    assert isinstance(error, TruncatedError)
    assert (error.shard, error.offset) == (str(path), 7 * STRIDE)
    assert len(found) == 6  # the seventh may have lost a member


@pytest.mark.parametrize("left", [512, 600, 512 + 4999], ids=str)
def test_a_shard_cut_inside_a_payload_is_an_error_after_the_samples_before_it(tmp_path, left):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(twenty())[: 7 * STRIDE + left])
    found, error = until_error(WebDataset(str(path)))
    assert isinstance(error, TruncatedError)
    assert isinstance(error, ValueError)
    assert isinstance(error, tarfile.ReadError)
    assert pickle.loads(pickle.dumps(error)).offset == error.offset
    assert error.member == "007.bin"
    assert error.offset == 7 * STRIDE
    assert len(found) == 6


def test_what_may_be_passed_over_after_damage_is_counted_with_the_sample_that_it_cut_short(tmp_path):
    whole = write_shard(tmp_path / "b.tar", [("x.bin", b"1")])
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(twenty())[: 7 * STRIDE + 600])
    for dataset in (
        WebDataset([str(path), str(whole)], policy=Policy(on_error="skip")),
        WebDataset([str(path), str(whole)], handler=ignore_and_continue),
    ):
        assert [sample["__key__"] for sample in dataset] == [*(f"{number:03d}" for number in range(6)), "x"]
        assert dataset.report().counts == {"sample_cut_short": 1, "truncated_payload": 1}
        assert dataset.report().places("sample_cut_short")[0].key == "006"
    stopped = WebDataset([str(path), str(whole)], handler=ignore_and_stop)
    assert len(list(stopped)) == 6
    assert stopped.report().counts["stopped_by_handler"] == 1


@pytest.mark.parametrize("number", [1, 7, 19])
def test_a_corrupt_header_is_an_error_with_its_offset_wherever_it_stands(tmp_path, number):
    data = bytearray(tar_bytes(twenty()))
    data[number * STRIDE] ^= 1
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    found, error = until_error(WebDataset(str(path)))
    assert isinstance(error, ChecksumError)
    assert (error.shard, error.offset) == (str(path), number * STRIDE)
    assert len(found) == number - 1


@pytest.mark.parametrize("content", [b"", b"\xff" * 2000, b"<html>not found</html>"], ids=["empty", "noise", "page"])
def test_what_is_no_tar_is_an_error(tmp_path, content):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    found, error = until_error(WebDataset(str(path)))
    assert not found
    assert isinstance(error, FormatError)


def test_a_pass_without_a_sample_is_an_error_unless_it_may_be_empty(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(10240))
    with pytest.raises(NoSamplesError) as caught:
        list(WebDataset(str(path)))
    assert isinstance(caught.value, ValueError)
    assert list(WebDataset(str(path), empty_check=False)) == []
    other = write_shard(tmp_path / "b.tar", [("a.b", b"")])
    assert len(list(WebDataset([str(path), str(other)]))) == 1


def test_a_second_tar_behind_the_first_is_an_error_that_says_where(tmp_path):
    first, second = tar_bytes(twenty()), tar_bytes([("z.bin", b"z")])
    path = tmp_path / "a.tar"
    path.write_bytes(first + second)
    found, error = until_error(WebDataset(str(path)))
    assert len(found) == 20
    assert error.code == "data_after_end"
    assert error.offset == len(first)
    skipping = WebDataset(str(path), policy=Policy(codes={"data_after_end": "skip"}))
    assert len(list(skipping)) == 20
    assert skipping.report().counts == {"data_after_end": 1}


def test_a_key_that_comes_back_is_an_error_that_names_both_places(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3"), ("b.y", b"4")])
    found, error = until_error(WebDataset(str(path)))
    assert found == ["a", "b"]
    assert (error.code, error.member, error.offset) == ("repeated_key", "a.y", 2048)
    assert "byte 0" in str(error)
    lenient = WebDataset(str(path), policy=Policy(codes={"repeated_key": "skip"}))
    assert given_by(lenient) == [("a", {"x": b"1"}), ("b", {"x": b"2"}), ("a", {"y": b"3"}), ("b", {"y": b"4"})]
    assert lenient.report().counts == {"repeated_key": 2}


def test_the_same_key_in_the_next_shard_is_another_sample(tmp_path):
    paths = [str(write_shard(tmp_path / f"{name}.tar", [("a.x", name.encode())])) for name in "pq"]
    assert given_by(WebDataset(paths)) == [("a", {"x": b"p"}), ("a", {"x": b"q"})]


def test_a_sample_never_spans_two_shards_after_an_error_either(tmp_path):
    first = tmp_path / "a.tar"
    first.write_bytes(tar_bytes([("k.jpg", b"1" * 600), ("k.txt", b"2" * 600)])[: 512 + 1024 + 100])
    second = write_shard(tmp_path / "b.tar", [("k.cls", b"3"), ("l.cls", b"4")])
    dataset = WebDataset([str(first), str(second)], handler=ignore_and_continue)
    assert given_by(dataset) == [("k", {"cls": b"3"}), ("l", {"cls": b"4"})]
    assert dataset.report().counts["sample_cut_short"] == 1


@pytest.mark.parametrize("second", ["a.jpg", "a.JPG"])
def test_a_suffix_that_a_sample_has_twice_is_an_error_or_the_first_one_counts(tmp_path, second):
    path = write_shard(tmp_path / "a.tar", [("a.jpg", b"1"), (second, b"2"), ("a.txt", b"3"), ("b.jpg", b"4")])
    with pytest.raises(DuplicateFieldError) as caught:
        list(WebDataset(str(path)))
    assert isinstance(caught.value, ValueError)
    assert caught.value.offsets == (512, 1536)
    lenient = WebDataset(str(path), handler=ignore_and_continue)
    assert given_by(lenient) == [("a", {"jpg": b"1", "txt": b"3"}), ("b", {"jpg": b"4"})]
    assert lenient.report().counts == {"duplicate_suffix": 1}


@pytest.mark.parametrize("name", ["a.__key__", "a.__url__", "a.__local_path__"])
def test_a_member_named_like_one_of_our_own_fields_is_an_error(tmp_path, name):
    path = write_shard(tmp_path / "a.tar", [("a.x", b"1"), (name, b"2")])
    with pytest.raises(DuplicateFieldError, match="every sample has of its own"):
        list(WebDataset(str(path)))


def test_a_member_with_any_other_odd_name_is_a_field_like_any(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.__bad__", b"1"), ("a.", b"2"), ("a..jpg", b"3"), ("a.b.jpg", b"4")])
    (sample,) = WebDataset(str(path))
    own = {"__key__": "a", "__url__": str(path), "__local_path__": str(path)}
    assert sample == {**own, "__bad__": b"1", "": b"2", ".jpg": b"3", "b.jpg": b"4"}


COMPRESSIONS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compressed_shards_are_told_by_their_content(tmp_path, kind):
    data = tar_bytes(make_members(30))
    plain = write_shard(tmp_path / "plain.tar", make_members(30))
    path = tmp_path / "a.tar"
    path.write_bytes(COMPRESSIONS[kind](data))
    assert given_by(WebDataset(str(path))) == as_expected(plain)


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_compressed_shard_that_was_cut_gives_what_it_can_and_an_error(tmp_path, kind):
    data = tar_bytes([(f"{number}.bin", random.Random(number).randbytes(40_000)) for number in range(20)])
    packed = COMPRESSIONS[kind](data)
    path = tmp_path / "a.tar"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    found, error = until_error(WebDataset(str(path)))
    assert isinstance(error, TruncatedError)
    assert len(found) < 20
    assert found == [str(number) for number in range(len(found))]


def test_members_are_renamed_first_and_selected_by_their_new_names(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.jpeg", b"1"), ("a.txt", b"2"), ("__m__/a.jpg", b"3"), ("b.jpeg", b"4")])
    seen = []

    def select(name):
        seen.append(name)
        return name.endswith("jpg")

    dataset = WebDataset(str(path), rename_files=lambda name: name.replace("jpeg", "jpg"), select_files=select)
    assert given_by(dataset) == [("a", {"jpg": b"1"}), ("b", {"jpg": b"4"})]
    assert set(seen) == {"a.jpg", "a.txt", "b.jpg"}
    assert dataset.report().counts == {"structural_member": 1}


@pytest.mark.slow
def test_a_hundred_thousand_members_that_nobody_wants_take_no_memory(tmp_path):
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        for batch in range(100):
            body = tar_bytes([(f"{batch:03d}{number:04d}.bin", b"") for number in range(1000)])
            file.write(body[: 1000 * 512])
        file.write(tar_bytes([("z.bin", b"z")]))
    tracemalloc.start()
    try:
        with pytest.raises(NoSamplesError):
            list(WebDataset(f"pipe:cat {path}", select_files=refuse))
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def test_a_sample_larger_than_any_window_comes_whole(tmp_path):
    big = random.Random(0).randbytes(1 << 20) * 20
    path = write_shard(tmp_path / "a.tar", [("a.bin", big), ("a.txt", b"t"), ("b.bin", b"b")])
    for url in (str(path), f"pipe:cat {path}"):
        found = list(WebDataset(url))
        assert [sample["__key__"] for sample in found] == ["a", "b"]
        assert found[0]["bin"] == big
        assert found[0]["txt"] == b"t"


def test_a_sparse_file_is_put_together_and_one_too_large_is_refused(tmp_path):
    source = tmp_path / "s.bin"
    with source.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    subprocess.run(["tar", "--sparse", "-cf", "a.tar", "s.bin"], cwd=tmp_path, check=True)
    (sample,) = WebDataset(str(tmp_path / "a.tar"))
    assert sample["bin"] == source.read_bytes()
    with source.open("r+b") as file:
        file.truncate(8 << 40)
    subprocess.run(["tar", "--sparse", "-cf", "b.tar", "s.bin"], cwd=tmp_path, check=True)
    with pytest.raises(LimitError):
        list(WebDataset(str(tmp_path / "b.tar")))


def test_a_shard_that_is_missing_is_an_error_or_passed_over(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.b", b"")])
    urls = [str(tmp_path / "none.tar"), str(path)]
    with pytest.raises(NotFoundError) as caught:
        list(WebDataset(urls))
    assert isinstance(caught.value, FileNotFoundError)
    dataset = WebDataset(urls, handler=ignore_and_continue)
    assert len(list(dataset)) == 1
    assert dataset.report().counts == {"unreadable_shard": 1}


def test_shards_in_any_store_are_read():
    store = MemoryStore()
    store.write("memory://d/a.tar", tar_bytes(make_members(40)))
    found = list(WebDataset("memory://d/a.tar", store=store))
    assert len(found) == 40
    assert "__local_path__" not in found[0]
    assert found[3]["__url__"] == "memory://d/a.tar"


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 4))
def test_damage_gives_right_samples_or_an_error_of_ours(tmp_path_factory, seed, flips):
    folder = tmp_path_factory.mktemp("d")
    random_ = random.Random(seed)
    data = bytearray(tar_bytes(make_members(12)))
    good = {
        (key, tuple(fields.items())) for key, fields in as_expected(write_shard(folder / "g.tar", make_members(12)))
    }
    headers = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    for _ in range(flips):
        data[random_.choice(headers) + random_.randrange(512)] ^= 1 << random_.randrange(8)
    path = folder / "a.tar"
    path.write_bytes(data)
    found = []
    fault = None
    try:
        found.extend(given_by(WebDataset(str(path))))
    except FormatError as error:
        fault = error
    assert len(found) == 12 if fault is None else (fault.shard, fault.offset is not None) == (str(path), True)
    assert {(key, tuple(fields.items())) for key, fields in found} <= good


def test_standard_input_is_a_shard(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(40))
    program = "import shardset\nprint([s['__key__'] for s in shardset.WebDataset('-').shuffle(0)])"
    with path.open("rb") as file:
        run = subprocess.run([sys.executable, "-c", program], stdin=file, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == repr([key for key, _ in as_expected(path)])


def test_a_shard_may_be_read_without_a_map(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(40))
    store = LocalStore(mmap=False)
    found = list(WebDataset(str(path), store=store))
    assert [(sample["__key__"], fields_of(sample)) for sample in found] == as_expected(path)
    assert found[0]["__local_path__"] == str(path)
