from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from formats.tar_builder import Segments, archive, member, sparse_old
from shards import private_cache, read_members, tar_bytes, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.files import ShardFiles, ShardReader, check_reader
from shardset.dataset.opening import discover_dataset
from shardset.errors import ChangedError, LimitError
from shardset.index.build import build_index
from shardset.storage import LocalStore, MemoryStore

WEBSHART = DATA / "webshart"
URL = "memory://b/a.tar"


def open_files(members, **options):
    """The files of a shard of members in webshart's numbering, and the reader of it."""
    return open_bytes(tar_bytes(members), **options)


def open_bytes(data, **options):
    store = MemoryStore()
    store.write(URL, data)
    reader = store.open(URL)
    return ShardFiles(build_index(reader, **options), URL), reader


def pairs_of(*names):
    """For each sample of a shard of these files: its name, and the names of its sidecars."""
    files, _ = open_files([(name, b"") for name in names])
    texts = [*files.names, None]
    return [
        (texts[row], texts[json_row], texts[text_row])
        for row, json_row, text_row in zip(files.sample_rows, files.json_rows, files.text_rows, strict=True)
    ]


def expected_pairs(names):
    """webshart's rule by the words of its facts: stems to the last dot of the last component, suffixes in any case."""

    def split(name):
        folder, slash, last = name.rpartition("/")
        stem, dot, suffix = last.rpartition(".")
        return (f"{folder}{slash}{stem}", suffix.lower()) if dot else (name, "")

    groups = {}
    for name in sorted(names, key=str.encode):
        stem, suffix = split(name)
        groups.setdefault(stem, {"json": [], "txt": [], "": []})[suffix if suffix in {"json", "txt"} else ""].append(
            name
        )
    pairs = []
    for name in sorted(names, key=str.encode):
        stem, suffix = split(name)
        group = groups[stem]
        kind = suffix if suffix in {"json", "txt"} else ""
        others = group["txt"] + group[""]
        if (kind == "json" and others) or (kind == "txt" and group[""]):
            continue
        json_name = group["json"][-1] if group["json"] and kind != "json" else None
        text_name = group["txt"][-1] if group["txt"] and kind == "" else None
        pairs.append((name, json_name, text_name))
    return pairs


def test_the_case_file_has_the_files_and_samples_that_webshart_lists():
    document = json.loads((WEBSHART / "photos-00000.json").read_text())["files"]
    dataset = discover_dataset(WEBSHART / "photos-00000.tar")
    files = dataset.files(0)
    assert dataset.list_files_in_shard(0) == sorted(document, key=str.encode)
    sidecars = {name for name in document if name.endswith((".json", ".txt"))}
    assert dataset.list_samples_in_shard(0) == [name for name in sorted(document) if name not in sidecars]
    for sample, row in enumerate(files.sample_rows):
        entry = document[files.names[row]]
        assert (files.offsets[row], files.lengths[row]) == (entry["offset"], entry["length"])
        assert files.geometry(row) == (entry["width"], entry["height"])
        assert files.captions(row) == entry.get("captions")
        assert files.further(row).get("json_metadata") == entry.get("json_metadata")
        json_row = files.json_rows[sample]
        assert (files.names[json_row] if json_row >= 0 else None) == entry.get("json_path")


def test_a_shard_has_one_numbering_with_and_without_its_index(tmp_path):
    shard = tmp_path / "photos-00000.tar"
    shard.write_bytes((WEBSHART / "photos-00000.tar").read_bytes())
    bare = discover_dataset(shard)
    indexed = discover_dataset(WEBSHART / "photos-00000.tar")
    assert bare.list_files_in_shard(0) == indexed.list_files_in_shard(0)
    for name in ("file_rows", "sample_rows", "json_rows", "text_rows", "offsets", "lengths"):
        assert getattr(bare.files(0), name) == getattr(indexed.files(0), name)


def test_names_are_in_byte_order_and_not_in_that_of_the_archive():
    names = ["z/1", "é", "a", "B", "9.jpg", "10.jpg", "a.b", "a/b"]
    files, reader = open_files([(name, name.encode()) for name in names])
    listed = ShardReader(files, reader).filenames()
    assert listed == ["10.jpg", "9.jpg", "B", "a", "a.b", "a/b", "z/1", "é"]
    assert [ShardReader(files, reader).read_file(n) for n in range(8)] == [name.encode() for name in listed]


def test_sidecars_are_told_by_the_stem_they_share():
    assert pairs_of("a.jpg", "a.json", "a.txt") == [("a.jpg", "a.json", "a.txt")]
    assert pairs_of("y.JPG", "y.JSON", "Y.txt") == [("Y.txt", None, None), ("y.JPG", "y.JSON", None)]
    assert pairs_of("lonely.json", "alone.txt") == [("alone.txt", None, None), ("lonely.json", None, None)]
    assert pairs_of("t.txt", "t.json") == [("t.txt", "t.json", None)]
    assert pairs_of("x.jpg", "x.png", "x.json") == [("x.jpg", "x.json", None), ("x.png", "x.json", None)]
    assert pairs_of("u.seg.png", "u.json") == [("u.json", None, None), ("u.seg.png", None, None)]
    assert pairs_of("plain", "plain.json") == [("plain", "plain.json", None)]


def test_a_dot_in_a_folder_pairs_nothing_with_what_lies_outside_of_it():
    # webshart cuts at the last dot of the whole path, and so gives d.v1/q the sidecar d.json.
    assert pairs_of("d.v1/q", "d.json") == [("d.json", None, None), ("d.v1/q", None, None)]
    assert pairs_of("d.v1/q", "d.v1/q.json") == [("d.v1/q", "d.v1/q.json", None)]
    assert pairs_of(".hidden", ".json") == [(".hidden", ".json", None)]


@given(
    st.lists(
        st.builds(
            "{}{}{}".format,
            st.sampled_from(["", "d/", "d.e/", "d.e/f/"]),
            st.sampled_from(["a", "A", "a.b", "", "ä"]),
            st.sampled_from(["", ".jpg", ".png", ".json", ".JSON", ".txt", ".Txt", "."]),
        ).filter(lambda name: name and not name.endswith("/")),
        max_size=12,
        unique=True,
    )
)
def test_pairing_follows_the_rule_for_any_names(names):
    assert pairs_of(*names) == expected_pairs(names)


@pytest.mark.parametrize("number", [-1, 3, 1 << 70])
def test_a_number_out_of_range_is_an_index_error(number):
    reader = ShardReader(*open_files([("a.jpg", b"1"), ("a.json", b"{}"), ("b.jpg", b"2")]))
    calls = {"file": reader.read_file, "sample": reader.read_sample}
    for what, call in calls.items():
        with pytest.raises(IndexError, match=f"{what} index {number} out of range"):
            call(number)
    with pytest.raises(IndexError, match="sample index"):
        reader.read_sample_json(number)
    with pytest.raises(IndexError, match="sample index 2 out of range"):
        reader.read_sample(2)


def test_the_json_beside_a_sample_is_read_or_none():
    reader = ShardReader(*open_files([("a.jpg", b"1"), ("a.json", b'{"x": 1}'), ("b.jpg", b"2"), ("c.json", b"3")]))
    assert [reader.read_sample_json(number) for number in range(3)] == [b'{"x": 1}', None, None]
    assert reader.sample_filenames() == ["a.jpg", "b.jpg", "c.json"]


def test_files_of_one_name_are_all_there():
    files, reader = open_files([("a.jpg", b"first"), ("b.jpg", b"2"), ("a.jpg", b"last")])
    reader = ShardReader(files, reader)
    assert reader.filenames() == ["a.jpg", "a.jpg", "b.jpg"]
    assert [reader.read_file(n) for n in range(3)] == [b"first", b"last", b"2"]


def test_names_that_are_no_utf_8_are_listed_with_escapes():
    reader = ShardReader(*open_files([("\udcff.jpg", b"1"), ("a.jpg", b"2")]))
    assert reader.filenames() == ["a.jpg", "\udcff.jpg"]
    assert reader.read_file(1) == b"1"


def test_payloads_are_read_alone_or_many_at_once():
    files, reader = open_files([("a.jpg", b"1"), ("b.jpg", b"22"), ("c.jpg", b"")])
    assert [files.read(reader, row) for row in range(3)] == [b"1", b"22", b""]
    assert [bytes(files.view(reader, row)) for row in range(3)] == [b"1", b"22", b""]
    assert [bytes(view) for view in files.read_many(reader, [2, 0, 1, 0])] == [b"", b"1", b"22", b"1"]
    assert files.read_many(reader, []) == []
    assert files.largest == 2


def test_a_sparse_file_is_read_with_its_holes_unless_they_are_too_large(monkeypatch):
    made = archive(member(b"a.txt", b"1"), sparse_old(b"b.bin", Segments(((512, b"x"),), 600)))
    files, reader = open_bytes(made.data)
    row = files.names.index("b.bin")
    assert (files.offsets[row], files.lengths[row]) == (-1, 600)
    whole = bytes(512) + b"x" + bytes(87)
    assert files.read(reader, row) == bytes(files.view(reader, row)) == whole
    assert [bytes(view) for view in files.read_many(reader, [0, row])] == [b"1", whole]
    monkeypatch.setattr("shardset.dataset.files.LARGEST_SPARSE", 599)
    for read in (
        lambda: files.read(reader, row),
        lambda: files.view(reader, row),
        lambda: files.read_many(reader, [0, row]),
    ):
        with pytest.raises(LimitError) as caught:
            read()
        assert (caught.value.code, caught.value.member, caught.value.shard) == ("sparse_member", "b.bin", URL)
    assert ShardReader(files, reader).filenames() == ["a.txt", "b.bin"]


def test_a_shard_without_files_is_empty():
    files, reader = open_files([("folder", None)])
    assert files.largest == 0
    assert (ShardReader(files, reader).num_files, ShardReader(files, reader).num_samples) == (0, 0)
    assert ShardReader(files, reader).filenames() == []


def test_a_reader_of_another_version_is_refused(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.jpg", b"1")])
    reader = LocalStore().open(str(path))
    assert check_reader(reader, reader.size, reader.identity) is reader
    with pytest.raises(ChangedError, match=f"its size is {reader.size}, the index says 5"):
        check_reader(reader, 5, reader.identity)
    with pytest.raises(ChangedError, match="written again") as caught:
        check_reader(reader, reader.size, "another")
    assert caught.value.url == str(path)
    assert caught.value.hint


def test_every_file_that_tarfile_finds_is_there(tmp_path):
    path = write_shard(
        tmp_path / "a.tar", [(f"{n % 7}/{n}.{s}", f"{n}{s}".encode()) for n in range(50) for s in ("jpg", "txt", "")]
    )
    reader = discover_dataset(path).open_shard(0)
    assert {name: reader.read_file(n) for n, name in enumerate(reader.filenames())} == read_members(path)
