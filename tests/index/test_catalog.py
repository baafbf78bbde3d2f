from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from formats.tar_builder import Segments, archive, member, sparse_old
from shards import list_tree, make_members, tar_bytes
from shardset.errors import IndexFileError
from shardset.formats.faults import Fault
from shardset.index import catalog_writer
from shardset.index.build import build_index
from shardset.index.catalog import open_catalog
from shardset.index.catalog_files import (
    MANIFEST_NAME,
    OTHERS_SCHEMA,
    SAMPLES_SCHEMA,
    SHARDS_SCHEMA,
    Manifest,
    map_batch,
    read_manifest,
)
from shardset.index.catalog_writer import (
    caption_text,
    row_from_catalog,
    shard_row,
    split_groups,
    write_group,
    write_manifest,
)
from shardset.index.table import GeometryColumns
from shardset.policy import Policy
from shardset.storage import MemoryStore


def index_of(members, *, captions=False):
    return index_of_bytes(tar_bytes(members), captions=captions)


def index_of_bytes(data, *, captions=False):
    store = MemoryStore()
    store.write("memory://b/a.tar", data)
    policy = Policy(on_error="skip")
    return build_index(store.open("memory://b/a.tar"), captions=captions, policy=policy)


def row_of(index, name="a", *, identity="1"):
    return shard_row(index, url=f"/data/{name}.tar", name=name, identity=identity)


def write(folder, rows, *, base=None, options=""):
    folder.mkdir(exist_ok=True)
    groups = tuple(write_group(folder, group, options=options) for group in split_groups(rows))
    write_manifest(folder, Manifest(groups, base, captions=False, geometry=False))
    return open_catalog(folder)


def rows_of(count, *, samples=3):
    """Rows of shards whose keys go on from one to the next."""
    return [
        row_of(index_of(make_members(samples, start=number * samples)), f"s{number}", identity=str(number))
        for number in range(count)
    ]


def keys_of(catalog):
    return [
        key
        for number in range(catalog.num_groups)
        for key in catalog.group(number).keys(0, catalog.group(number).files.num_samples)
    ]


def numbers(count, start=0):
    return [f"{number:08d}" for number in range(start, start + count)]


ODD = [("b.jpg", b"1"), ("a.jpg", b"2"), ("README", b"of no sample"), ("b.txt", b"3"), ("A.JPG", b"4")]


# ---- what is in it


def test_a_catalog_holds_the_columns_of_an_index(tmp_path):
    index = index_of(make_members(5))
    group = write(tmp_path, [row_of(index)]).group(0)
    assert group.keys(0, 5) == numbers(5)
    assert group.keys(2, 4) == numbers(2, 2)
    assert group.keys_of(np.array([3, 0])) == [numbers(5)[3], numbers(5)[0]]
    assert [group.key(sample) for sample in range(5)] == numbers(5)
    assert group.offset.tolist() == index.offset.tolist()
    assert group.length.tolist() == index.length.tolist()
    assert group.first.tolist() == index.sample_rows.tolist()
    assert [group.layouts[code].fields for code in group.layout] == [("jpg", "json", "txt")] * 5


def test_entries_say_what_is_known_of_shards_and_number_samples_through_all(tmp_path):
    rows = rows_of(3)
    catalog = write(tmp_path, rows)
    assert (catalog.num_shards, catalog.num_samples, catalog.num_files) == (3, 9, 27)
    assert [catalog.shard(i).url for i in range(3)] == ["/data/s0.tar", "/data/s1.tar", "/data/s2.tar"]
    assert [catalog.shard(i).first_sample for i in range(3)] == [0, 3, 6]
    assert [(e.size, e.identity, e.digest, e.name) for e in catalog.entries(0)] == [
        (row.size, row.identity, row.digest, row.name) for row in rows
    ]


def test_views_are_of_the_mapped_file_and_cannot_be_written_to(tmp_path):
    group = write(tmp_path, rows_of(1)).group(0)
    for column in (group.shard, group.first, group.offset, group.length, group.layout):
        assert not column.flags.writeable
        assert not column.flags.owndata


def test_suffixes_are_kept_as_they_are_spelled(tmp_path):
    members = [("a.JPG", b"1"), ("a.Seg.png", b"2"), ("b.jpg", b"3"), ("b.seg.PNG", b"4"), ("c.", b"5"), ("d.Ü", b"6")]
    group = write(tmp_path, [row_of(index_of(members))]).group(0)
    layouts = [group.layouts[code] for code in group.layout]
    assert [layout.spelled for layout in layouts] == [("JPG", "Seg.png"), ("jpg", "seg.PNG"), ("",), ("Ü",)]
    assert [layout.fields for layout in layouts] == [("jpg", "seg.png"), ("jpg", "seg.png"), ("",), ("ü",)]


def test_a_field_that_occurs_twice_or_is_reserved_has_no_position(tmp_path):
    members = [("a.jpg", b"1"), ("a.txt", b"2"), ("a.JPG", b"3"), ("a.__key__", b"4")]
    group = write(tmp_path, [row_of(index_of(members))]).group(0)
    assert group.layouts[0].positions == {"jpg": -1, "txt": 1, "__key__": -1}


@pytest.mark.parametrize("width", [1, 40])
def test_samples_of_many_layouts_each_get_their_own(tmp_path, width):
    rng = np.random.default_rng(width)
    members, layouts = [], []
    for number in range(300):
        suffixes = [f"s{i}" for i in rng.permutation(50)[: rng.integers(1, width + 1)]]
        layouts.append(tuple(suffixes))
        members += [(f"{number:04d}.{suffix}", b"") for suffix in suffixes]
    group = write(tmp_path, [row_of(index_of(members))]).group(0)
    assert [group.layouts[code].fields for code in group.layout] == layouts
    assert len(group.layouts) == len(set(layouts))


def test_layouts_of_several_shards_are_joined(tmp_path):
    rows = [
        row_of(index_of(make_members(2, fields=fields)), name)
        for name, fields in [("a", "xy"), ("b", "yx"), ("c", "xy")]
    ]
    group = write(tmp_path, rows).group(0)
    assert len(group.layouts) == 2
    assert [group.layouts[code].fields for code in group.layout] == [("x", "y")] * 2 + [("y", "x")] * 2 + [
        ("x", "y")
    ] * 2


def test_files_of_no_sample_stand_apart(tmp_path):
    group = write(tmp_path, [*rows_of(1), row_of(index_of(ODD), "odd")]).group(0)
    others = group.others.to_pylist()
    assert [(row["shard"], row["name"], row["length"]) for row in others] == [(1, "README", 12)]
    assert group.files.num_files == 9 + 5
    assert write(tmp_path / "none", rows_of(1)).group(0).others.num_rows == 0


def test_names_that_are_no_utf_8_make_their_columns_binary_and_survive(tmp_path):
    odd = index_of([("\udcff.jpg", b"1"), ("\udcfe", b"2"), ("é.\udcfd", b"3")])
    catalog = write(tmp_path, [*rows_of(1), row_of(odd, "\udcfc")])
    group = catalog.group(0)
    assert group.keys(3, 5) == ["\udcff", "é"]
    assert group.layouts[group.layout[4]].fields == ("\udcfd",)
    assert group.samples.schema.field("key").type == pa.binary()
    assert group.others.column("name").to_pylist() == [b"\xfe"]
    assert catalog.shard(1).url == "/data/\udcfc.tar"
    assert list(catalog.find("\udcff")) == [3]
    assert list(catalog.find("é")) == [4]


def test_tables_are_of_plain_types(tmp_path):
    group = write(tmp_path, [row_of(index_of(ODD))]).group(0)
    assert group.samples.schema == SAMPLES_SCHEMA
    assert group.shards.schema == SHARDS_SCHEMA
    assert group.others.schema == OTHERS_SCHEMA
    rows = group.samples.to_pylist()
    assert [row["key"] for row in rows] == ["b", "a", "b", "A"]
    assert [row["fields"] for row in rows] == ["jpg", "jpg", "txt", "JPG"]
    assert rows[0]["members"] == [{"offset": 512, "length": 1}]


def test_files_open_in_any_reader_of_arrow_files(tmp_path):
    catalog = write(tmp_path, rows_of(2))
    files = catalog.manifest.groups[0]
    for name, count in ((files.samples, 6), (files.shards, 2)):
        with pa.OSFile(str(tmp_path / name)) as file:
            table = pa.ipc.open_file(file).read_all()
        table.validate(full=True)
        assert table.num_rows == count


def test_faults_are_kept(tmp_path):
    data = tar_bytes(ODD)
    index = index_of_bytes(data[: 512 * 9])  # the header of the last member alone
    catalog = write(tmp_path, [*rows_of(2), row_of(index, "odd")])
    found = list(catalog.faults())
    assert [(shard, fault.code) for shard, fault in found] == [(2, "repeated_key"), (2, "truncated_payload")]
    assert [fault for _, fault in found] == list(index.faults)
    assert all(type(fault) is Fault for _, fault in found)
    assert catalog.manifest.groups[0].num_damaged == 1


def test_pieces_of_sparse_files_are_found_by_their_row(tmp_path):
    segments = Segments(((1024, b"abc"), (4096, b"tail")), 5000)
    made = archive(
        member(b"a.txt", b"1"), sparse_old(b"a.bin", segments), member(b"b.txt", b"2"), sparse_old(b"b.bin", segments)
    )
    index = index_of_bytes(made.data)
    group = write(tmp_path, [*rows_of(2), row_of(index, "sparse")]).group(0)
    rows = {row: [tuple(piece) for piece in pieces] for row, pieces in index.sparse.items()}
    first = 18
    assert group.offset[first + 1] == group.offset[first + 3] == -1
    assert group.length[first + 1] == 5000
    assert {row: group.sparse_pieces(first + row) for row in rows} == rows


def test_geometry_and_captions_are_those_of_the_first_payload_that_has_them(tmp_path):
    index = index_of([("a.txt", b"x"), ("a.jpg", b"x"), ("a.png", b"x"), ("b.txt", b"x"), ("c.jpg", b"x")])
    geometry = GeometryColumns(
        np.array([0, 30, 99, 0, 20], np.int32),
        np.array([0, 20, 99, 0, 40], np.int32),
        np.array([0, 6, 1, 0, 1], np.uint8),
    )
    index = replace(index, geometry=geometry, captions={1: "first", 2: "second", 4: ["one", "two"]})
    group = write(tmp_path, [*rows_of(1), row_of(index, "b")]).group(0)
    assert [group.details.geometry(sample) for sample in range(3, 6)] == [(30, 20, 6), None, (20, 40, 1)]
    assert [group.details.caption(sample) for sample in range(6)] == [None, None, None, "first", None, "one"]
    assert group.details.geometry(0) is None
    table = group.samples.to_pydict()
    assert table["width"][3:] == [30, None, 20]
    assert table["caption"][3:] == ["first", None, "one"]
    # By width / height as shown, 20/30 and 20/40; what is not known comes last.
    assert table["by_aspect"] == [5, 3, 0, 1, 2, 4]


def test_no_order_by_aspect_is_made_up_where_nothing_is_known(tmp_path):
    assert write(tmp_path, rows_of(2)).group(0).samples.column("by_aspect").null_count == 6


def test_a_caption_as_text():
    deep = json.loads('{"a":' * 300 + "1" + "}" * 300)
    assert caption_text("as it is") == "as it is"
    assert caption_text({"a": [1, "ü"]}) == '{"a":[1,"ü"]}'
    assert caption_text(["first", "second"]) == "first"
    assert caption_text(None) is None
    assert caption_text([]) is None
    assert len(caption_text("x" * 100_000)) == 65_536
    assert json.loads(caption_text(deep)) == deep
    assert json.loads(caption_text({"a": "\ud800"})) == {"a": "\ud800"}


def test_a_caption_with_a_lone_surrogate_is_written_without_it(tmp_path):
    index = replace(index_of([("a.jpg", b"x"), ("b.jpg", b"x")]), captions={0: "a\ud800b", 1: "ok"})
    group = write(tmp_path, [row_of(index)]).group(0)
    assert [group.details.caption(0), group.details.caption(1)] == ["a?b", "ok"]


def test_an_empty_caption_is_one(tmp_path):
    index = replace(index_of([("a.jpg", b"x"), ("b.jpg", b"x")]), captions={0: ""})
    group = write(tmp_path, [row_of(index)]).group(0)
    assert [group.details.caption(0), group.details.caption(1)] == ["", None]


# ---- look-ups


def test_find_gives_every_sample_of_a_key_in_order_and_looks_through_unsorted_shards(tmp_path):
    unsorted = index_of(ODD)
    catalog = write(tmp_path, [row_of(unsorted, "u"), *rows_of(2), row_of(unsorted, "v")])
    assert catalog.group(0).shards.column("keys_sorted").to_pylist() == [False, True, True, False]
    assert list(catalog.find("b")) == [0, 2, 10, 12]
    assert list(catalog.find("A")) == [3, 13]
    assert [list(catalog.find(key)) for key in numbers(6)] == [[4 + number] for number in range(6)]


@pytest.mark.parametrize("key", ["", "00000006", "0", "zzz", "\udcff", chr(0xD800), "00000000\0", "ü"])
def test_find_gives_nothing_for_what_is_not_there(tmp_path, key):
    assert list(write(tmp_path, [*rows_of(2), row_of(index_of(ODD), "u")]).find(key)) == []


def test_equal_keys_that_stand_apart_in_a_sorted_shard_are_all_found(tmp_path):
    # A link, a folder or the like would not part them, but other rows between equal keys make the shard unsorted.
    index = index_of([("a.x", b""), ("b.x", b""), ("c.x", b"")])
    doubled = replace(index, names=index.names.take(np.array([0, 1, 1])))
    catalog = write(tmp_path, [row_of(doubled)])
    assert list(catalog.find("b")) == [1, 2]


def test_samples_are_located_through_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog_writer, "GROUP_SAMPLES", 7)
    catalog = write(tmp_path, rows_of(5))
    assert catalog.num_groups == 3
    assert catalog.sample_starts == [0, 6, 12, 15]
    assert catalog.shard_starts == [0, 2, 4, 5]
    located = [catalog.locate(sample) for sample in range(15)]
    assert [group.key(row) for group, row, _ in located] == numbers(15)
    assert [first + int(group.shard[row]) for group, row, first in located] == [n // 3 for n in range(15)]
    assert keys_of(catalog) == numbers(15)
    assert [list(catalog.find(key)) for key in numbers(15)] == [[n] for n in range(15)]
    assert [catalog.shard(i).name for i in range(5)] == [f"s{i}" for i in range(5)]
    assert [catalog.shard(i).first_sample for i in range(5)] == [0, 3, 6, 9, 12]


@pytest.mark.parametrize(
    ("limit", "value", "groups"),
    [("GROUP_SAMPLES", 3, 6), ("GROUP_SAMPLES", 1, 6), ("GROUP_SHARDS", 4, 2), ("GROUP_BYTES", 1, 6)],
)
def test_groups_close_at_each_of_their_limits_and_a_shard_is_never_divided(monkeypatch, limit, value, groups):
    monkeypatch.setattr(catalog_writer, limit, value)
    rows = rows_of(6)
    divided = list(split_groups(rows))
    assert len(divided) == groups
    assert [row for group in divided for row in group] == rows


def test_shards_without_samples_take_no_numbers(tmp_path, monkeypatch):
    empty = index_of([("README", b"1")])
    one, two = rows_of(2)
    for limit in (1_000_000, 1):
        monkeypatch.setattr(catalog_writer, "GROUP_SAMPLES", limit)
        catalog = write(tmp_path / str(limit), [row_of(empty, "x"), one, row_of(empty, "y"), two, row_of(empty, "z")])
        assert keys_of(catalog) == numbers(6)
        assert [catalog.shard(i).num_samples for i in range(5)] == [0, 3, 0, 3, 0]
        assert [key for n in range(6) for key in [catalog.locate(n)[0].key(catalog.locate(n)[1])]] == numbers(6)
        assert list(catalog.find("00000003")) == [3]


@pytest.mark.parametrize("rows", [[], [row_of(index_of([]))]])
def test_a_catalog_may_be_empty(tmp_path, rows):
    catalog = write(tmp_path, rows)
    assert (catalog.num_samples, catalog.num_shards) == (0, len(rows))
    assert list(catalog.find("a")) == []
    assert list(catalog.faults()) == []
    catalog.check_files()


# ---- moving, growing, replacing


def test_urls_that_are_relative_move_with_the_catalog(tmp_path):
    row = replace(rows_of(1)[0], url="sub/s0.tar")
    write(tmp_path / "one", [row], base="..")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "one", tmp_path / "elsewhere" / "two")
    assert open_catalog(tmp_path / "elsewhere" / "two").shard(0).url == str(tmp_path / "elsewhere" / "sub" / "s0.tar")


def test_a_catalog_that_was_opened_by_a_relative_path_outlives_a_change_of_folder(tmp_path, monkeypatch):
    write(tmp_path / "c", rows_of(1))
    monkeypatch.chdir(tmp_path)
    catalog = open_catalog("c")
    monkeypatch.chdir("/")
    assert keys_of(catalog) == numbers(3)


def test_a_row_that_is_taken_out_of_a_catalog_makes_the_same_files_again(tmp_path, monkeypatch):
    made = archive(member(b"a.txt", b"1"), sparse_old(b"a.bin", Segments(((0, b"abc"),), 500)))
    odd = replace(index_of(ODD), captions={0: "a caption"})
    rows = [*rows_of(2), row_of(odd, "odd"), row_of(index_of_bytes(made.data), "sparse")]
    monkeypatch.setattr(catalog_writer, "GROUP_SAMPLES", 7)
    first = write(tmp_path / "one", rows)
    taken = [row_from_catalog(first, number) for number in range(4)]
    second = write(tmp_path / "two", taken)
    for number in range(first.num_groups):
        one, two = first.group(number), second.group(number)
        for name in ("samples", "shards", "others"):
            assert getattr(one, name).to_pylist() == getattr(two, name).to_pylist()
    assert second.group(1).sparse_pieces(second.group(1).files.num_files - 2)  # a.bin stands before README


def test_rows_change_their_place_and_their_numbers_follow(tmp_path):
    catalog = write(tmp_path / "one", rows_of(4))
    again = write(tmp_path / "two", [row_from_catalog(catalog, number) for number in (2, 0)])
    assert keys_of(again) == [*numbers(3, 6), *numbers(3, 0)]
    assert again.shard(1).first_sample == 3
    assert again.group(0).shard.tolist() == [0, 0, 0, 1, 1, 1]


def test_files_of_a_group_that_did_not_change_are_not_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog_writer, "GROUP_SAMPLES", 3)
    rows = rows_of(3)
    write(tmp_path, rows)
    before = list_tree(tmp_path)
    rows[1] = row_of(index_of(make_members(2, start=50)), "s1", identity="new")
    catalog = write(tmp_path, rows)
    after = list_tree(tmp_path)
    kept = {name for name in before if name.startswith("samples") and before[name] == after.get(name)}
    assert len(kept & {group.samples for group in catalog.manifest.groups}) == 2
    assert keys_of(catalog) == [*numbers(3), *numbers(2, 50), *numbers(3, 6)]
    names = {name for group in catalog.manifest.groups for name in (group.samples, group.shards)}
    assert set(after) == names | set(before)  # whoever opened the old one may still map its files
    rows[1] = row_of(index_of(make_members(2, start=70)), "s1", identity="newer")
    last = write(tmp_path, rows)
    named = {name for group in last.manifest.groups for name in (group.samples, group.shards)}
    assert set(list_tree(tmp_path)) == named | names | {MANIFEST_NAME}  # and then they go


def test_captions_that_changed_are_written_though_the_headers_are_the_same(tmp_path):
    index = index_of([("a.jpg", b"x")])
    one = write(tmp_path, [row_of(replace(index, captions={0: "old"}))])
    assert one.group(0).details.caption(0) == "old"
    two = write(tmp_path, [row_of(replace(index, captions={0: "new"}))])
    assert two.group(0).details.caption(0) == "new"
    assert one.group(0).details.caption(0) == "old"  # whoever has the old file open goes on with it


def test_a_file_that_was_cut_is_written_again(tmp_path):
    rows = [*rows_of(1), row_of(index_of(ODD), "odd")]
    files = write(tmp_path, rows).manifest.groups[0]
    for name in (files.samples, files.others, files.shards):
        os.truncate(tmp_path / name, 300)
    catalog = write(tmp_path, rows)
    catalog.check_files()
    assert keys_of(catalog)[:3] == numbers(3)


def test_what_a_killed_run_left_is_removed_after_a_day(tmp_path):
    write(tmp_path, rows_of(1))
    old, new = tmp_path / ".123-abc.tmp", tmp_path / ".124-abd.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    write(tmp_path, rows_of(1))
    assert not old.exists()
    assert new.exists()


def test_two_runs_write_the_same_bytes(tmp_path):
    rows = [*rows_of(2), row_of(index_of(ODD), "odd")]
    write(tmp_path / "one", rows)
    write(tmp_path / "two", rows)
    assert {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()
    }


# ---- what is broken


def edit_manifest(folder, change):
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"7", b'"text"', b"\xff\xfe", b"{}", b'{"format": "shardset catalog"}', bytes(100)],
)
def test_a_manifest_that_is_none_is_a_typed_error(tmp_path, raw):
    (tmp_path / MANIFEST_NAME).write_bytes(raw)
    with pytest.raises(IndexFileError, match="malformed") as caught:
        open_catalog(tmp_path)
    assert caught.value.path == str(tmp_path / MANIFEST_NAME)
    assert "shardset index" in caught.value.hint


def test_a_folder_without_a_manifest_is_no_catalog(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_catalog(tmp_path)


@pytest.mark.parametrize("version", [0, 2, 99, "1", None])
def test_another_version_is_refused_by_its_number(tmp_path, version):
    write(tmp_path, rows_of(1))
    edit_manifest(tmp_path, lambda content: content.update(version=version))
    with pytest.raises(IndexFileError, match=f"version {version!r}, this shardset reads 1"):
        open_catalog(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_samples", -1),
        ("num_samples", 2.0),
        ("num_samples", "3"),
        ("num_shards", None),
        ("num_files", True),
        ("num_damaged", []),
        ("num_samples", 1 << 62),
        ("samples", 7),
        ("samples", None),
        ("shards", ["a"]),
        ("others", 1),
    ],
)
def test_values_of_a_wrong_kind_in_a_manifest_are_refused(tmp_path, key, value):
    write(tmp_path, rows_of(1))
    edit_manifest(tmp_path, lambda content: content["groups"][0].update({key: value}))
    with pytest.raises(IndexFileError):
        open_catalog(tmp_path)


@pytest.mark.parametrize("key", ["base", "captions", "geometry", "groups", "format"])
def test_a_manifest_that_lacks_a_key_is_malformed(tmp_path, key):
    write(tmp_path, rows_of(1))
    edit_manifest(tmp_path, lambda content: content.pop(key))
    with pytest.raises(IndexFileError, match="malformed"):
        open_catalog(tmp_path)


@pytest.mark.parametrize("which", ["samples", "shards", "others"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage", "folder", "another table", "no column"])
def test_a_broken_file_is_a_typed_error_and_never_a_crash(tmp_path, which, damage):
    catalog = write(tmp_path, [*rows_of(2), row_of(index_of(ODD), "odd")])
    path = tmp_path / getattr(catalog.manifest.groups[0], which)
    raw = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "another table":
        table = pa.table({"shard": [1], "key": ["a"], "url": [2]})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    elif damage == "no column":
        table = (
            pa.ipc.open_file(pa.BufferReader(raw))
            .read_all()
            .drop_columns(["name" if which != "samples" else "members"])
        )
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    elif damage != "missing":
        path.write_bytes({"empty": b"", "cut": raw[: len(raw) // 2], "garbage": bytes(range(256)) * 20}[damage])
    with pytest.raises(IndexFileError) as caught:
        open_catalog(tmp_path).check_files()
    assert caught.value.path == str(path)
    assert "shardset index" in caught.value.hint


@pytest.mark.parametrize("which", ["samples", "shards"])
def test_a_file_with_another_number_of_rows_than_the_manifest_says_is_refused(tmp_path, which):
    catalog = write(tmp_path, rows_of(2))
    path = tmp_path / getattr(catalog.manifest.groups[0], which)
    batch = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).get_batch(0)
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch.slice(1))
    with pytest.raises(IndexFileError, match=f"{batch.num_rows - 1} rows, the manifest says {batch.num_rows}"):
        open_catalog(tmp_path).check_files()


def test_a_file_of_several_batches_is_refused(tmp_path):
    path = tmp_path / "x.arrow"
    batch = pa.record_batch({"a": [1]})
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    with pytest.raises(IndexFileError, match="2 batches"):
        map_batch(path, batch.schema)


@pytest.mark.parametrize("which", ["samples", "shards"])
def test_offsets_of_text_that_lead_out_of_the_file_are_found_before_arrow_follows_them(tmp_path, which):
    catalog = write(tmp_path, [*rows_of(1), row_of(index_of(ODD), "odd")])
    path = tmp_path / getattr(catalog.manifest.groups[0], which)
    raw = path.read_bytes()
    ends = [8 * number for number in range(4)] if which == "samples" else [0, 12, 25]
    broken = np.array(ends, np.int32).tobytes()
    at = raw.index(broken)
    path.write_bytes(raw[: at + 4] + np.int32(2**30).tobytes() + raw[at + 8 :])
    catalog = open_catalog(tmp_path)
    with pytest.raises(IndexFileError, match="garbled"):
        list(catalog.find("b"))  # in a shard whose keys are not sorted


def test_reading_a_manifest_reads_nothing_else(tmp_path):
    catalog = write(tmp_path, rows_of(2))
    for path in tmp_path.glob("*.arrow"):
        path.unlink()
    assert read_manifest(tmp_path) == catalog.manifest
    assert open_catalog(tmp_path).num_samples == 6


def test_keys_ascend_where_the_table_says_so(tmp_path):
    catalog = write(tmp_path, [*rows_of(3), row_of(index_of(ODD), "odd")])
    group = catalog.group(0)
    for shard, is_sorted in enumerate(group.shards.column("keys_sorted").to_pylist()):
        keys = [key.encode() for key in group.keys(*group.shard_span(shard))]
        assert is_sorted == all(one <= two for one, two in pairwise(keys))
        assert group.shards.column("first_key")[shard].as_py().encode() == min(keys)
        assert group.shards.column("last_key")[shard].as_py().encode() == max(keys)
