import contextlib
import hashlib
import json
import math
import struct
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from shardset.errors import IndexFileError
from shardset.formats.faults import Fault
from shardset.formats.naming import Names
from shardset.formats.tar import scan_tar
from shardset.formats.tar_header import SparseRow
from shardset.index.numbering import number_by_path
from shardset.index.sidecar import Sidecar, dump_sidecar, parse_sidecar, sidecar_path
from shardset.index.table import GeometryColumns, index_from_files, index_from_table

WEBSHART = DATA / "webshart"
PHOTOS = WEBSHART / "photos-00000.tar"


def index_of(*names, length=10):
    """An index of files of one length, each behind a header."""
    count = len(names)
    names = Names.of(name if isinstance(name, bytes) else name.encode() for name in names)
    offset = 512 + 1024 * np.arange(count)
    return index_from_files(names, offset, np.full(count, length), 1024 * count + 1024)


def dump(index, **further):
    return dump_sidecar(index, name="a.tar", **further)


def parse(document, shard_size=None):
    """Parse a document, or bytes, as the file a.json."""
    payload = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_sidecar(payload, path="a.json", shard_size=shard_size)


def entry_of(index, name="a.jpg"):
    return json.loads(dump(index))["files"][name]


def rows_of(index):
    """Everything that an index knows, in plain values."""
    geometry = index.geometry
    return {
        "size": index.size,
        "names": index.names.to_list(),
        "offset": index.offset.tolist(),
        "length": index.length.tolist(),
        "key_lengths": index.key_lengths.tolist(),
        "suffixes": [index.suffixes[i] if i >= 0 else None for i in index.suffix_ids.tolist()],
        "all_suffixes": index.suffixes,
        "sample_rows": index.sample_rows.tolist(),
        "sparse": dict(index.sparse),
        "faults": index.faults,
        "geometry": geometry
        and [geometry.width.tolist(), geometry.height.tolist(), geometry.orientation.tolist(), geometry.width.dtype],
        "captions": dict(index.captions),
        "extra": dict(index.extra),
    }


# Round trips of our own files.

FRAGMENTS = [
    *(b"a", b"b", b"0", b"/", b".", b".json", b".txt", b".JSON", b".jpg", b".cls", b"d.v1/", b"__m__/"),
    *(b'"', b"\\", b"\n", b"\x01", b"\x7f", b"\xff", b"\xc3", "é".encode(), "\U0001f600".encode(), b"-", b" "),
]
file_names = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map(b"".join),
    st.sampled_from([b"a.jpg", b"a.json", b"a.txt", b"b.jpg", b"b.json", b"a.b.jpg", b"README"]),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=4), json_values, max_size=3)
captions = st.one_of(st.text(), json_objects, st.lists(st.text() | json_objects, max_size=3))
further_fields = st.fixed_dictionaries(
    {},
    optional={
        "json_metadata": json_values.filter(lambda value: value is not None),
        "sha256": st.text("0123456789abcdef", min_size=64, max_size=64),
        "row": json_values,
        "pieces": json_values,
        "name": st.text(),
        "aspect": st.just(-1.5),
        "json_path": st.just("elsewhere.json"),
        "json_offset": st.just(1),
        "json_length": st.just(123456),
        "é\n": json_values,
    },
).filter(bool)
geometries = st.one_of(
    st.just((0, 0, 0)),
    st.tuples(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1), st.just(1)),
    st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 8)),
)
faults = st.builds(
    Fault,
    st.sampled_from(["name_not_utf8", "unsafe_name", "bad_checksum", "of_tomorrow"]),
    st.integers(0, 10**6),
    st.none() | file_names.map(lambda name: name.decode("utf-8", "surrogateescape")),
    st.text() | file_names.map(lambda name: name.decode("utf-8", "surrogateescape")),
)


@st.composite
def indexes(draw):
    names = draw(st.lists(file_names, max_size=12))
    offset, length, sparse, at = [], [], {}, 0
    for row in range(len(names)):
        at += 512
        size = draw(st.integers(0, 1500))
        cuts = draw(st.lists(st.integers(0, size), max_size=4, unique=True)) if draw(st.booleans()) else None
        if cuts is None:
            offset.append(at)
            stored = size
        else:
            offset.append(-1)
            pieces, stored = [], 0
            for begin, end in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
                pieces.append(SparseRow(begin, at + stored, end - begin))
                stored += end - begin
            sparse[row] = tuple(pieces)
        length.append(size)
        at += (stored + 511) // 512 * 512
    met = sorted(draw(st.lists(faults, max_size=3)), key=lambda fault: (fault.is_error, fault.offset))
    index = index_from_files(
        Names.of(names),
        np.array(offset, np.int64),
        np.array(length, np.int64),
        at + 1024,
        sparse=sparse,
        faults=tuple(met),
    )
    some_rows = st.sets(st.integers(0, len(names) - 1)) if names else st.just(set())
    index = replace(
        index,
        captions={row: draw(captions) for row in draw(some_rows)},
        extra={row: draw(further_fields) for row in draw(some_rows)},
    )
    if draw(st.booleans()):
        columns = np.array([draw(geometries) for _ in names], np.int64).reshape(-1, 3).T
        index = replace(index, geometry=GeometryColumns(*columns[:2].astype(np.int32), columns[2].astype(np.uint8)))
    return index


@given(indexes(), st.booleans())
def test_what_is_written_is_read_back_and_written_again_the_same(index, is_list):
    like = Sidecar(index, top={"hash": "", "note": [1, None]}, is_list=is_list)
    payload = dump(index, like=like)
    sidecar = parse(payload, index.size)
    assert rows_of(sidecar.index) == rows_of(index)
    assert sidecar.index.is_verified
    assert (sidecar.filesize, sidecar.digest, sidecar.top) == (index.size, index.digest(), like.top)
    assert dump(sidecar.index, like=sidecar) == payload


@given(indexes())
def test_a_file_is_strict_json_with_its_files_in_byte_order(index):
    payload = dump(index)
    assert payload.endswith(b"}\n")
    assert payload.count(b"\n") == 1
    payload.decode()
    document = json.loads(payload)
    assert list(document) == ["path", "filesize", "includes_image_geometry", "files", "shardset"]
    files = document["files"]
    paths = [entry["path"] for entry in (files if isinstance(files, list) else files.values())]
    for path in paths:
        path.encode()
    assert paths == sorted(paths, key=str.encode)
    if isinstance(files, dict):
        assert list(files) == paths
    else:
        assert len(set(paths)) < len(paths)


def test_an_entry_has_its_keys_in_their_order():
    index = index_of("a.jpg", "a.json")
    index = replace(
        index,
        geometry=GeometryColumns(np.array([4, 0], "i4"), np.array([3, 0], "i4"), np.array([6, 0], "u1")),
        captions={0: "a caption"},
        extra={0: {"score": 1, "json_metadata": {"b": 1, "a": 2}, "aspect": 2.5}},
    )
    assert list(entry_of(index).items()) == [
        ("path", "a.jpg"),
        ("offset", 512),
        ("length", 10),
        ("width", 4),
        ("height", 3),
        ("aspect", 2.5),
        ("orientation", 6),
        ("json_path", "a.json"),
        ("json_offset", 1536),
        ("json_length", 10),
        ("captions", "a caption"),
        ("json_metadata", {"b": 1, "a": 2}),
        ("score", 1),
    ]
    assert list(entry_of(index, "a.json")) == ["path", "offset", "length"]


@pytest.mark.parametrize(
    ("width", "height", "text"),
    [(4, 3, b"1.3333334"), (512, 512, b"1.0"), (1, 3, b"0.33333334"), (2**31 - 1, 1, b"2147483600.0")],
)
def test_the_aspect_is_written_in_single_precision(width, height, text):
    columns = [np.array([value], "i4") for value in (width, height)]
    index = replace(index_of("a.jpg"), geometry=GeometryColumns(*columns, np.ones(1, "u1")))
    assert b'"aspect":' + text + b"}" in dump(index)


def test_an_upright_image_goes_without_saying_only_where_orientations_are_known():
    index = index_of("a.jpg", "b.jpg", "c.jpg", "d.txt")
    sizes = np.array([5, 5, 5, 0], "i4")

    def orientations(*values):
        geometry = GeometryColumns(sizes, sizes, np.array(values, "u1"))
        return [
            entry.get("orientation") for entry in json.loads(dump(replace(index, geometry=geometry)))["files"].values()
        ]

    assert orientations(1, 6, 0, 0) == [None, 6, 0, None]
    assert orientations(0, 0, 0, 0) == [None] * 4


def test_a_json_sidecar_is_named_at_every_payload_beside_it():
    index = index_of("a.jpg", "a.png", "a.json", "a.txt", "b.txt", "b.json", "c.json")
    files = json.loads(dump(index))["files"]
    found = {name: entry.get("json_path") for name, entry in files.items()}
    assert found == {
        "a.jpg": "a.json",
        "a.png": "a.json",
        "b.txt": "b.json",
        **dict.fromkeys(("a.json", "a.txt", "b.json", "c.json")),
    }
    assert files["a.png"]["json_offset"] == files["a.json"]["offset"]


def test_a_path_that_occurs_twice_makes_a_list():
    index = index_of("a.jpg", "a.jpg", "b.jpg")
    files = json.loads(dump(index))["files"]
    assert [(entry["path"], entry["offset"]) for entry in files] == [("a.jpg", 512), ("a.jpg", 1536), ("b.jpg", 2560)]
    assert [fault.code for fault in parse(dump(index)).index.faults] == ["duplicate_suffix"]


def test_a_name_that_is_not_utf8_stands_apart_as_hex():
    document = json.loads(dump(index_of("a.jpg", b"\xff.jpg")))
    assert list(document["files"]) == ["a.jpg"]
    assert document["shardset"]["apart"] == [{"path": {"hex": "ff2e6a7067"}, "entry": {"offset": 1536, "length": 10}}]


def test_a_sparse_file_stands_apart_with_its_pieces():
    pieces = (SparseRow(0, 512, 3), SparseRow(100, 515, 4))
    index = index_from_files(
        Names.of([b"a.bin", b"b.bin"]), np.array([-1, 1536]), np.array([900, 10]), 4096, sparse={0: pieces}
    )
    document = json.loads(dump(index))
    assert list(document["files"]) == ["b.bin"]
    assert document["shardset"]["apart"] == [
        {"path": "a.bin", "row": 0, "pieces": [[0, 512, 3], [100, 515, 4]], "entry": {"length": 900}}
    ]


def test_a_json_sidecar_that_stands_apart_is_not_pointed_to():
    index = index_from_files(
        Names.of([b"a.jpg", b"a.json"]),
        np.array([512, -1]),
        np.array([10, 10]),
        4096,
        sparse={1: (SparseRow(0, 1536, 10),)},
    )
    assert "json_path" not in entry_of(index)
    assert rows_of(parse(dump(index)).index) == rows_of(index)


def test_files_of_no_sample_get_their_own_captions_back():
    index = index_of("b.jpg", "README", "a.jpg", "LICENSE")
    assert index.names.to_list() == [b"b.jpg", b"a.jpg", b"README", b"LICENSE"]
    index = replace(index, captions={0: "b", 1: "a", 2: "read", 3: "licence"})
    assert parse(dump(index)).index.captions == index.captions


def test_captions_that_json_cannot_hold_name_their_file():
    deep = "x"
    for _ in range(5000):
        deep = [deep]
    for value in ({"a": deep}, {"a": {1, 2}}, {"a": math.nan, "b": "\udcff"}):
        with pytest.raises(IndexFileError, match=r"'b.jpg' cannot be written as JSON"):
            dump(replace(index_of("a.jpg", "b.jpg"), captions={1: value}))


def test_captions_that_only_a_tolerant_writer_takes_are_written_all_the_same():
    value = {"a": "\udcff", "b": 2**70}
    index = replace(
        index_of("a.jpg"),
        captions={0: value},
        geometry=GeometryColumns(np.array([4], "i4"), np.array([3], "i4"), np.array([1], "u1")),
    )
    payload = dump(index)
    assert b"1.3333334" in payload
    assert parse(payload).index.captions == {0: value}


@pytest.mark.parametrize("name", ["path", "offset", "size", "captions", "caption", "width"])
def test_an_extra_field_with_the_name_of_a_column_is_refused(name):
    with pytest.raises(IndexFileError, match=f"'a.jpg' has the reserved name '{name}'"):
        dump(replace(index_of("a.jpg"), extra={0: {name: 1}}))


def test_a_shard_name_that_is_not_utf8_is_left_out():
    assert "path" not in json.loads(dump_sidecar(index_of("a.jpg"), name="\udcff.tar"))


def test_a_fault_of_the_shard_comes_back_once():
    index = index_of("a.jpg", "b.jpg", "a.txt")
    index = replace(index, faults=(Fault("unsafe_name", 5, "../x"), *index.faults))
    assert [fault.code for fault in index.faults] == ["unsafe_name", "repeated_key"]
    assert parse(dump(index)).index.faults == index.faults


# Files of other tools.


@pytest.fixture(scope="module")
def photos():
    payload = PHOTOS.read_bytes()
    return index_from_table(
        scan_tar(lambda offset, length: payload[offset : offset + length], len(payload)), len(payload)
    )


@pytest.mark.parametrize("name", ["photos-00000.json", "photos-00000.list.json", "photos-00000.cheesechaser.json"])
def test_an_index_of_another_tool_gives_the_rows_of_the_shard_itself(name, photos):
    sidecar = parse_sidecar((WEBSHART / name).read_bytes(), path=name, shard_size=photos.size)
    known = {"geometry": None, "captions": {}, "extra": {}}
    assert rows_of(sidecar.index) | known == rows_of(photos)
    assert sidecar.index.digest() == photos.digest()
    assert not sidecar.index.is_verified
    assert sidecar.digest is None
    assert sidecar.is_list == ("list" in name)


def test_the_digest_is_that_of_sizes_offsets_and_names(photos):
    with tarfile.open(PHOTOS) as tar:
        files = tar.getmembers()
    names = [member.name.encode() for member in files]
    numbers = [PHOTOS.stat().st_size, len(files), *(member.offset_data for member in files)]
    numbers += [*(member.size for member in files), *map(len, names)]
    content = b"shardset tar index 1\n" + struct.pack(f"<{len(numbers)}q", *numbers) + b"".join(names)
    assert photos.digest() == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("name", ["photos-00000.json", "photos-00000.list.json"])
def test_what_webshart_wrote_is_written_again_as_it_was(name):
    theirs = json.loads((WEBSHART / name).read_bytes())
    sidecar = parse_sidecar((WEBSHART / name).read_bytes(), path=name)
    ours = json.loads(dump(sidecar.index, like=sidecar))
    assert ours["files"] == theirs["files"]
    assert all({"aspect", "json_path"}.isdisjoint(fields) for fields in sidecar.index.extra.values())


def test_cheesechasers_own_keys_are_kept():
    payload = (WEBSHART / "photos-00000.cheesechaser.json").read_bytes()
    sidecar = parse_sidecar(payload, path="a.json")
    assert sidecar.top == {"hash": "", "hash_lfs": None}
    assert sidecar.index.extra == {}  # their sha256 is null
    assert sidecar.index.geometry is None


def test_an_example_of_webshart_without_a_file_size_is_read():
    document = {"files": {"b.webp": {"offset": 102912, "length": 98304}, "a.webp": {"offset": 512, "length": 102400}}}
    sidecar = parse(document)
    assert sidecar.filesize is None
    assert sidecar.index.size == 102912 + 98304
    assert sidecar.index.names.to_list() == [b"a.webp", b"b.webp"]
    assert parse(document, 250_000).index.size == 250_000


def test_a_file_size_of_zero_in_a_list_is_none():
    assert parse({"filesize": 0, "files": [{"path": "a", "offset": 512, "length": 3}]}, 2048).filesize is None
    assert parse({"filesize": 0, "files": []}, 0).filesize == 0


def test_a_path_inside_an_entry_counts_more_than_its_key():
    document = {
        "files": {"a.jpg": {"path": "z.jpg", "offset": 512, "length": 3}, "b.jpg": {"offset": 1536, "length": 3}}
    }
    assert parse(document).index.names.to_list() == [b"z.jpg", b"b.jpg"]


def test_unknown_keys_of_an_entry_are_kept_with_their_nulls():
    fields = {"score": None, "name": "x", "tags": [1, {"a": None}], "sha256": "00"}
    sidecar = parse(
        {"files": {"a.jpg": {"offset": 512, "length": 3, **fields}, "b.jpg": {"offset": 1536, "length": 3}}}
    )
    assert sidecar.index.extra == {0: fields}


def test_what_an_entry_says_of_its_json_otherwise_is_kept():
    document = json.loads(dump(index_of("a.jpg", "a.json", "b.jpg", "b.json", "c.jpg")))
    files = document["files"]
    del document["shardset"]
    files["a.jpg"]["json_path"] = "b.json"
    files["b.jpg"]["json_length"] = 9
    files["c.jpg"] |= {"json_path": "x.json", "json_offset": 512, "json_length": 1, "aspect": 1.5}
    index = parse(document).index
    assert index.extra == {
        0: {"json_path": "b.json"},
        2: {"json_length": 9},
        4: {"json_path": "x.json", "json_offset": 512, "json_length": 1, "aspect": 1.5},
    }
    assert json.loads(dump(index))["files"] == files


def test_an_orientation_that_is_none_of_exifs_is_an_extra_field():
    entry = {"offset": 512, "length": 3, "width": 2, "height": 2}
    assert parse({"files": {"a.jpg": entry | {"orientation": 6}}}).index.geometry.orientation.tolist() == [6]
    sidecar = parse({"files": {"a.jpg": entry | {"orientation": "landscape"}}})
    assert sidecar.index.extra == {0: {"orientation": "landscape"}}
    assert entry_of(sidecar.index)["orientation"] == "landscape"


def test_lone_surrogates_of_pythons_writer_are_read():
    document = {"files": {"\udcff.jpg": {"offset": 512, "length": 3, "captions": "\ud800"}}}
    index = parse(document).index
    assert index.names.to_list() == [b"\xff.jpg"]
    assert index.captions == {0: "\ud800"}


def test_a_byte_order_mark_and_any_buffer_are_fine():
    payload = b"\xef\xbb\xbf" + dump(index_of("a.jpg"))
    for buffer in (payload, bytearray(payload), memoryview(payload)):
        assert parse_sidecar(buffer, path="a.json").index.names.to_list() == [b"a.jpg"]


@st.composite
def odd_but_right(draw, entry):
    """The entry in another way of writing."""
    other_names = {
        "length": ["length", "size"],
        "path": ["path", "filename", "fname"],
        "captions": ["captions", "caption"],
    }
    odd = {}
    for key, value in entry.items():
        name = draw(st.sampled_from(other_names.get(key, [key])))
        is_whole = type(value) is int and key in {"offset", "length", "width", "height", "json_offset", "json_length"}
        odd[name] = float(value) if is_whole and draw(st.booleans()) else value
    for key in ("width", "height", "aspect", "json_path", "json_offset", "json_length", "sha256", "json_metadata"):
        if key not in odd and draw(st.booleans()):
            odd[key] = None
    return dict(draw(st.permutations(list(odd.items()))))


@given(indexes(), st.data())
def test_ways_of_writing_make_no_difference(index, data):
    document = json.loads(dump(index))
    plain = parse(document)
    files = document["files"]
    listed = files if isinstance(files, list) else list(files.values())
    listed = [data.draw(odd_but_right(entry)) for entry in listed]
    document["files"] = listed if isinstance(files, list) else dict(zip(files, listed, strict=True))
    assert rows_of(parse(document).index) == rows_of(plain.index)


# What is wrong is named.


def entries(**changes):
    entry = {"path": "a.jpg", "offset": 512, "length": 3} | changes
    return {"filesize": 4096, "files": {"a.jpg": {key: value for key, value in entry.items() if value != "absent"}}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (entries(offset=-1), "entry 'a.jpg': offset is -1"),
        (entries(offset="512"), "entry 'a.jpg': offset is '512'"),
        (entries(offset=512.5), "entry 'a.jpg': offset is 512.5"),
        (entries(offset=True), "entry 'a.jpg': offset is true"),
        (entries(offset=2**63), "entry 'a.jpg': offset is 9223372036854775808, above 9223372036854775807"),
        (entries(offset=2.0**60), "entry 'a.jpg': offset is 1.15"),
        (entries(offset=None), "entry 'a.jpg' has no offset"),
        (entries(length="absent"), "entry 'a.jpg' has no length"),
        (entries(length="absent", size=-3), "entry 'a.jpg': size is -3"),
        (entries(size=4), "entry 'a.jpg' has its length twice"),
        (entries(captions="x", caption="x"), "entry 'a.jpg' has its captions twice"),
        (entries(length=10**18), "entry 'a.jpg': its bytes 512 to 1000000000000000512 pass the end of the shard"),
        (entries(offset=2**63 - 1, length=2**63 - 1), "pass the end of the shard, which has 4096"),
        (entries(length=3585), "entry 'a.jpg': its bytes 512 to 4097 pass the end of the shard, which has 4096"),
        (entries(width=2**31), "entry 'a.jpg': width is 2147483648, above 2147483647"),
        (entries(height=[1]), "entry 'a.jpg': height is a list"),
        (entries(aspect="1.5"), "entry 'a.jpg': aspect is '1.5'"),
        (entries(captions=7), "entry 'a.jpg': captions is 7; captions are"),
        (entries(captions=["x", 7]), "entry 'a.jpg': captions is a list; captions are"),
        (entries(path=7), "entry 'a.jpg': path is 7, not a text"),
        (entries(path="\ud800"), r"entry 'a.jpg': path is '\ud800', which stands for no bytes"),
        (entries(json_path={}), "entry 'a.jpg': json_path is an object, not a text"),
        (entries(json_offset=-2), "entry 'a.jpg': json_offset is -2"),
        ({"files": {"x" * 99: None}}, f"entry '{'x' * 49}... (101 characters) is null, not an object"),
        ({"files": {"\ud800": {"offset": 1, "length": 1}}}, "its path is '\\ud800', which stands for no bytes"),
        ({"files": [{"offset": 1, "length": 1}]}, "entry 0 has no path"),
        (
            {"files": [{"path": "a", "offset": 1, "length": 1}, {"path": "b", "offset": 1}]},
            "entry 1 ('b') has no length",
        ),
        ({"files": [7]}, "entry 0 is 7, not an object"),
        ({"files": 7}, "files is 7, not an object"),
        ({"files": None}, "the index has no files"),
        ({}, "the index has no files"),
        ([], "the index is a list, not an object"),
        ({"files": {}, "filesize": -1}, "filesize is -1"),
        ({"files": {}, "filesize": "9"}, "filesize is '9'"),
        ({"files": {}, "includes_image_geometry": 1}, "includes_image_geometry is 1"),
        ({"files": {}, "shardset": []}, "shardset is a list, not an object"),
        ({"files": {}, "shardset": {"version": 2}}, "the index is of version 2, and this shardset reads up to 1"),
        ({"files": {}, "shardset": {"version": True}}, "shardset: version is true"),
        ({"files": {}, "shardset": {"version": 1}}, "shardset: digest is null"),
        (b"", "the index is not JSON"),
        (b"<html>", "the index is not JSON"),
        (b'{"files": {}', "the index is not JSON"),
        (b'{"files": {"a": {"offset": NaN, "length": 1, "x": "\\udcff"}}}', "NaN is no JSON value"),
        (b'{"a": "\\udcff", "b": ' + b"9" * 5000 + b"}", "the index is not JSON"),
        (b"\xff\xfe{\0}\0", "the index is not JSON"),
        (b"[" * 100_000, "the index is not JSON"),
        (b'["\\udcff", ' + b"[" * 100_000, "the index is not JSON"),
        (b'{"files":' * 2000 + b"{}" + b"}" * 2000, "the index is not JSON"),
    ],
)
def test_what_is_wrong_with_an_index_is_named(document, message):
    with pytest.raises(IndexFileError) as caught:
        parse(document)
    assert message in str(caught.value)
    assert caught.value.path == "a.json"
    assert caught.value.hint


def own(**changes):
    document = json.loads(dump(index_of("a.jpg", b"\xff.jpg")))
    document["shardset"] |= changes
    return document


SPARSE = {"path": "s", "row": 0, "pieces": [[0, 512, 3]], "entry": {"length": 900}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "sha256:00"}, "the index was changed: its digest is 'sha256:00'"),
        ({"digest": 7}, "shardset: digest is 7"),
        ({"includes_orientation": 7}, "shardset: includes_orientation is 7"),
        ({"faults": {}}, "shardset: faults is an object, not a list"),
        ({"faults": [7]}, "fault 0 is 7, not an object"),
        ({"faults": [{"code": 7}]}, "fault 0: code is 7"),
        ({"faults": [{"code": "x", "offset": "y"}]}, "fault 0: offset is 'y'"),
        ({"faults": [{"code": "x", "offset": 1, "member": 7}]}, "fault 0: member is 7"),
        ({"faults": [{"code": "x", "offset": 1, "message": {"hex": "0"}}]}, "fault 0: message is an object"),
        ({"apart": None}, "shardset: apart is null, not a list"),
        ({"apart": [7]}, "entry 0 of those apart is 7, not an object"),
        ({"apart": [{"path": "x"}]}, "entry 0 ('x') of those apart is null, not an object"),
        ({"apart": [{"path": {"hex": "x"}, "entry": {}}]}, "path is an object, which stands for no bytes"),
        ({"apart": [{"path": "x", "entry": {"length": 1}}]}, "entry 0 ('x') of those apart has no offset"),
        ({"apart": [SPARSE | {"row": 2}]}, "entry 0 ('s') of those apart: row is 2, above 1"),
        ({"apart": [SPARSE | {"row": None}]}, "row is null"),
        ({"apart": [SPARSE, SPARSE]}, "two of the entries apart have one row"),
        ({"apart": [SPARSE | {"pieces": 7}]}, "pieces is 7, not a list"),
        ({"apart": [SPARSE | {"pieces": [[1, 2]]}]}, "a piece is no list of three numbers"),
        ({"apart": [SPARSE | {"pieces": [[1, 2, -3]]}]}, "a number of a piece is -3"),
        ({"apart": [SPARSE | {"pieces": [[5, 512, 3], [7, 515, 3]]}]}, "the piece at 7 overlaps"),
        ({"apart": [SPARSE | {"pieces": [[899, 512, 3]]}]}, "the piece at 899 overlaps or passes the end of the file"),
        ({"apart": [SPARSE | {"pieces": [[0, 2**62, 3]]}]}, "entry 's': its bytes 4611686018427387904 to"),
        ({"apart": [SPARSE | {"entry": {}}]}, "the piece at 0 overlaps or passes the end of the file"),
    ],
)
def test_what_is_wrong_with_our_section_is_named(changes, message):
    with pytest.raises(IndexFileError) as caught:
        parse(own(**changes))
    assert message in str(caught.value)


def test_an_index_of_another_size_of_the_shard_is_stale():
    payload = dump(index_of("a.jpg"))
    with pytest.raises(IndexFileError, match=r"made for a shard of 2048 bytes, this one has 2049, in a\.json - index"):
        parse(payload, 2049)


@pytest.mark.parametrize("key", ["offset", "length", "path"])
def test_a_changed_entry_of_our_file_is_found(key):
    document = json.loads(dump(index_of("a.jpg", "b.jpg")))
    document["files"]["a.jpg"][key] = {"offset": 513, "length": 9, "path": "c.jpg"}[key]
    with pytest.raises(IndexFileError, match="the index was changed"):
        parse(document)


def test_a_tool_that_only_adds_captions_leaves_the_digest_right():
    document = json.loads(dump(index_of("a.jpg", "b.jpg")))
    document["files"]["b.jpg"]["captions"] = ["one", {"two": 2}]
    document["hash"] = "00"
    sidecar = parse(json.dumps(document, indent=2).encode())
    assert sidecar.index.captions == {1: ["one", {"two": 2}]}
    assert sidecar.index.is_verified
    assert sidecar.top == {"hash": "00"}


def nodes(value, at=()):
    """The places of a JSON document."""
    yield at
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from nodes(child, (*at, key))


@given(indexes(), json_values, st.data())
def test_a_wrong_value_anywhere_is_an_error_of_the_index_file_or_none(index, value, data):
    document = json.loads(dump(index))
    *outer, key = data.draw(st.sampled_from([place for place in nodes(document) if place]))
    parent = document
    for step in outer:
        parent = parent[step]
    parent[key] = value
    try:
        sidecar = parse(document)
    except IndexFileError:
        return
    again = parse(dump(sidecar.index, like=sidecar))
    assert rows_of(again.index) == rows_of(sidecar.index)


@given(indexes(), st.data())
def test_changed_bytes_are_an_error_of_the_index_file_or_none(index, data):
    payload = bytearray(dump(index))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(IndexFileError):
        parse(bytes(payload))


@pytest.mark.parametrize(
    ("shard", "sidecar"),
    [
        ("a.tar", "a.json"),
        ("d/v1.0.tar", "d/v1.0.json"),
        ("a.tar.tar", "a.tar.json"),
        ("a.TAR", "a.json"),
        ("d/.tar", "d/.tar.json"),
        (".tar", ".tar.json"),
        ("d.tar/a", "d.tar/a.json"),
        ("a?b#c.tar", "a?b#c.json"),
        ("t.tfrecord-00000-of-00002", "t.tfrecord-00000-of-00002.json"),
        ("https://host/d/a.tar?x=b.tar#c", "https://host/d/a.json?x=b.tar#c"),
        ("s3://bucket/a.tar", "s3://bucket/a.json"),
    ],
)
def test_the_sidecar_of_a_shard_takes_its_place(shard, sidecar):
    assert sidecar_path(shard) == sidecar


# webshart's numbering.


def number_one_by_one(names):
    """webshart's rule, written down plainly: files, samples, and the JSON and text of each sample."""
    files = sorted(range(len(names)), key=lambda row: names[row])

    def split(row):
        folder, slash, base = names[row].rpartition(b"/")
        stem, dot, suffix = base.rpartition(b".")
        return (folder + slash + stem, suffix.lower()) if dot else (names[row], b"")

    samples, jsons, texts = [], [], []
    for row in files:
        stem, suffix = split(row)
        beside = [other for other in files if split(other)[0] == stem]
        json_rows = [other for other in beside if split(other)[1] == b"json"]
        text_rows = [other for other in beside if split(other)[1] == b"txt"]
        has_payload = len(json_rows) + len(text_rows) < len(beside)
        if suffix == b"json" and len(json_rows) < len(beside):
            continue
        if suffix == b"txt" and has_payload:
            continue
        samples.append(row)
        jsons.append(json_rows[-1] if json_rows and suffix != b"json" else -1)
        texts.append(text_rows[-1] if text_rows and suffix != b"txt" and has_payload and suffix != b"json" else -1)
    return files, samples, jsons, texts


def assert_numbered_by_the_rule(names):
    index = index_of(*names)
    numbering = number_by_path(index)
    found = [numbering.files, numbering.samples, numbering.json_rows, numbering.text_rows]
    assert [column.tolist() for column in found] == list(number_one_by_one(index.names.to_list()))


@given(st.lists(file_names | st.binary(max_size=4), max_size=14))
def test_websharts_numbering_is_that_of_its_rule(names):
    assert_numbered_by_the_rule(names)


def test_names_of_very_different_lengths_are_numbered_the_same_way():
    long = b"b" * 6000
    names = [b"%d.%s" % (number, suffix) for number in range(100) for suffix in (b"jpg", b"json", b"txt")]
    assert_numbered_by_the_rule([long + b".jpg", *names, long + b".json", b"50.jpg", long])
