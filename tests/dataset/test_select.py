from __future__ import annotations

import io
import multiprocessing
import operator
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import feather, parquet

from shards import (
    make_members,
    private_cache,  # noqa: F401 - the fixture is autouse
    send,
    write_dataset,
    write_shard,
)
from shardset import index_dataset
from shardset.dataset import joined as joined_module
from shardset.dataset import select as select_module
from shardset.dataset.opening import discover_dataset
from shardset.dataset.select import Selection, has_field
from shardset.dataset.views import Bucketed, Buckets, Pack, Packed
from shardset.errors import ChangedError, IndexFileError, NotFoundError, SampleError
from shardset.index import catalog_writer
from shardset.storage.memory import MemoryStore
from tfrecords import record_bytes

EXIF_ORIENTATION = 274
field = pc.field
TRUE, FALSE = map(pc.scalar, (True, False))


def jpeg(width, height, orientation=1):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def write_mixed(folder):
    """Write two tars and a file of records, of three groups: with and without sizes, captions and all fields."""
    first = []
    for number in range(12):
        key = f"a/{number:04d}"
        first.append((f"{key}.jpg", jpeg(16 + 8 * number, 40, orientation=1 + number % 8)))
        if number % 3:
            first.append((f"{key}.txt", f"caption é {'x' * number}".encode()))
        if number % 4 == 1:
            first.append((f"{key}.cls", b"1" * number))
    second = [
        ("b.jpg", b"no picture"),
        ("b.seg.png", b"12"),
        ("a/0003.png", jpeg(64, 64)),  # a key of the first shard
        ("c.jpg", b""),
        ("c.TXT", b"loud"),
        ("d.jpg", jpeg(33, 44)),
        ("d.jpg", b"once more"),
        ("e.json", b'{"caption": "of e"}'),
    ]
    write_shard(folder / "one.tar", first)
    write_shard(folder / "sub" / "two.tar", second)
    (folder / "three.tfrecord").write_bytes(record_bytes([b"x" * size for size in (3, 0, 70)]))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    write_mixed(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_writer, "GROUP_SHARDS", 1)
        index_dataset(folder, geometry=True, workers=0)
    return folder


@pytest.fixture
def ds(mixed):
    dataset = discover_dataset(mixed)
    assert dataset.catalog.num_groups == 3
    return dataset


@pytest.fixture
def plain(tmp_path):
    """Twelve samples of three shards and as many fields, whose catalog has neither sizes nor captions."""
    write_dataset(tmp_path / "plain")
    return discover_dataset(tmp_path / "plain")


def known(dataset, index):
    """Return what the catalog says of a sample, found out one sample at a time; None for what is not known."""
    row, sample = dataset.row(index), dataset[index]
    is_record = row.fields == ("record",)
    width, height, orientation = row.geometry or (None, None, None)
    if orientation is not None and orientation > 4:
        width, height = height, width
    sizes = dict.fromkeys(row.fields, 0)
    for name, size in zip(row.fields, row.lengths, strict=True):
        sizes[name] += size
    values = {
        "key": row.key,
        "shard": dataset.shard_entry(row.shard_index).name,
        "shard_index": sample.shard_index,
        "sample_index": index,
        "width": width,
        "height": height,
        "aspect": None if width is None else width / height,
        "orientation": orientation,
        "caption": row.caption,
        "caption_length": None if row.caption is None else len(row.caption),
        "fields": None if is_record else "/".join(row.fields),
        "num_fields": None if is_record else len(set(row.fields)),
        "bytes": sum(row.lengths),
    }
    for name in ("jpg", "txt", "cls", "seg.png", "json", "png"):
        values[f"has.{name}"] = None if is_record else name in row.fields
        values[f"bytes.{name}"] = None if is_record else sizes.get(name, 0)
    return values


def keys_of(selection):
    return [sample.key for sample in selection]


def test_every_column_is_what_the_samples_say_one_by_one(ds):
    rows = [known(ds, index) for index in range(len(ds))]
    assert rows[5]["width"] == 40  # stored 56 by 40, and turned on its side
    assert rows[-1]["bytes"] == 70
    assert [row["caption"] for row in rows if row["key"] == "c"] == ["loud"]
    some = ds.select(field("sample_index").isin([1, 4, 5, 13, 14, 19]))
    for selection in (ds.select(), some):
        numbers = range(len(ds)) if selection.numbers is None else selection.numbers.tolist()
        for name in rows[0]:
            expected = [rows[number][name] for number in numbers]
            assert selection.column(name, default=None).tolist() == expected, name


# ---- expressions, compared with a slow evaluation that knows three truth values


def leaf(name, symbol, value):
    compare = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">=": operator.ge}[symbol]
    return compare(field(name), value), lambda row: None if row[name] is None else compare(row[name], value)


def is_known(name):
    return field(name).is_valid(), lambda row: row[name] is not None


def has(name):
    return has_field(name), lambda row: row[f"has.{name}"]


def both(left, right):
    def both_are_true(row):
        values = left[1](row), right[1](row)
        return False if False in values else None if None in values else True

    return left[0] & right[0], both_are_true


def either(left, right):
    def one_is_true(row):
        values = left[1](row), right[1](row)
        return True if True in values else None if None in values else False

    return left[0] | right[0], one_is_true


def negated(one):
    def is_false(row):
        value = one[1](row)
        return None if value is None else not value

    return ~one[0], is_false


NUMBERS = ("width", "height", "aspect", "orientation", "caption_length", "num_fields", "bytes", "bytes.txt", "score")
TEXTS = ("key", "shard", "caption", "fields")
SYMBOLS = st.sampled_from(["==", "!=", "<", ">="])
LEAVES = st.one_of(
    st.builds(leaf, st.sampled_from(NUMBERS), SYMBOLS, st.one_of(st.integers(-1, 80), st.floats(0, 9))),
    st.builds(leaf, st.sampled_from(TEXTS), SYMBOLS, st.sampled_from(["", "a/0003", "b", "one", "jpg/txt", "loud"])),
    st.builds(leaf, st.sampled_from(["shard_index", "sample_index"]), SYMBOLS, st.integers(-1, 20)),
    st.builds(is_known, st.sampled_from(NUMBERS + TEXTS)),
    st.builds(has, st.sampled_from(["jpg", "txt", "cls", "seg.png"])),
)
TREES = st.recursive(
    LEAVES, lambda below: st.builds(both, below, below) | st.builds(either, below, below) | st.builds(negated, below)
)


@given(st.data())
def test_any_expression_selects_what_a_slow_evaluation_selects_and_counts_what_it_does_not_know(mixed, data):
    dataset = discover_dataset(mixed)
    rows = [known(dataset, index) for index in range(len(dataset))]
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    scores = [data.draw(st.none() | st.integers(-1, 9)) for _ in indices]
    for row, score in zip(rows, [None] * len(rows), strict=True):
        row["score"] = score
    for index, score in zip(indices, scores, strict=True):
        rows[index]["score"] = score
    table = pa.table({"sample_index": pa.array(indices, pa.int32()), "score": pa.array(scores, pa.int16())})
    selection = dataset.select(columns=table, on="sample_index")
    left = list(range(len(rows)))
    for _ in range(2):  # the second time from what is left
        before = dataset.report.counts.get("unknown_value", 0)
        expression, truth = data.draw(TREES)
        selection = selection.select(expression)
        answers = [truth(rows[number]) for number in left]
        left = [number for number, answer in zip(left, answers, strict=True) if answer]
        numbers = np.arange(len(rows)) if selection.numbers is None else selection.numbers
        assert numbers.tolist() == left, expression
        assert dataset.report.counts.get("unknown_value", 0) - before == answers.count(None), expression


def test_what_people_write_selects_what_they_mean(ds):
    assert keys_of(ds.select(field("width") >= 80)) == ["a/0008", "a/0009", "a/0010", "a/0011"]
    assert keys_of(ds.select(~(field("width") >= 80) & (field("sample_index") < 3))) == ["a/0000", "a/0001", "a/0002"]
    assert keys_of(ds.select(pc.match_substring_regex(field("key"), "^[b-d]$"))) == ["b", "c", "d"]
    assert keys_of(ds.select(pc.starts_with(field("key"), "a/") & (field("shard") == "sub/two"))) == ["a/0003"]
    assert keys_of(ds.select(pc.is_in(field("key"), pa.array(["e", "b", "nobody"])))) == ["b", "e"]
    assert keys_of(ds.select(field("caption_length") > 19)) == ["a/0010", "a/0011"]
    assert keys_of(ds.select(has_field("JPG") & ~has_field("txt") & (field("bytes.jpg") < 100))) == ["b"]
    assert keys_of(ds.select(field("fields") == "jpg/seg.png")) == ["b"]
    assert keys_of(ds.select((field("shard") == "three.tfrecord") & (field("bytes") > 50))) == ["2"]
    assert keys_of(ds.select(field("width") * field("height") == 64 * 64)) == ["a/0003"]
    assert keys_of(ds.select(field("aspect") == 1)) == ["a/0003", "a/0003"]


def test_a_constant_selects_all_or_none(ds):
    assert ds.select(TRUE) == ds.select()
    assert len(ds.select(FALSE)) == 0
    assert len(ds.select(pc.scalar(None))) == 0
    assert ds.report.counts["unknown_value"] == len(ds)


def test_a_sample_of_which_the_answer_is_not_known_is_counted_with_its_place(ds):
    ds.select(field("caption_length") > 0)
    place = ds.report.places("unknown_value")[0]
    assert (place.shard, place.key) == (ds[0].shard, "a/0000")
    assert place.message == "neither true nor false: (caption_length > 0)"
    unknown = [row for row in ds.rows(range(len(ds))) if row.caption is None]
    assert ds.report.counts["unknown_value"] == len(unknown)


def test_only_the_columns_that_an_expression_uses_are_made(ds, monkeypatch):
    made = []
    make = select_module.make_column
    monkeypatch.setattr(select_module, "make_column", lambda part, name: made.append(name) or make(part, name))
    ds.select((field("caption_length") > 3) | pc.match_substring(field("key"), "width bytes.jpg has.txt shard"))
    assert set(made) == {"caption_length", "key"}
    made.clear()
    ds.select(TRUE)
    assert made == []


def test_groups_of_which_nothing_is_left_are_not_looked_at_again(ds, monkeypatch):
    first = ds.select(field("shard") == "one")
    assert first.numbers.tolist() == list(range(12))
    looked = []
    make = select_module.make_column
    monkeypatch.setattr(select_module, "make_column", lambda part, name: looked.append(len(part)) or make(part, name))
    first.select(field("width") > 0)
    assert looked == [12]


def test_an_unknown_column_is_refused_with_what_is_there(ds):
    with pytest.raises(ValueError, match=r"no column 'widht' \(did you mean 'width'\?\) - there are key, shard, .*jpg"):
        ds.select(field("widht") >= 512)
    with pytest.raises(ValueError, match=r"no column 'meta'"):
        ds.select(pc.field("meta", "a") == 1)
    with pytest.raises(ValueError, match=r"no column 'widht' \(did you mean"):
        ds.select().column("widht")


def test_of_many_columns_the_first_are_listed(plain):
    table = pa.table({"sample_index": [0]} | {f"column {number}": [number] for number in range(500)})
    selection = plain.select(columns=table, on="sample_index")
    with pytest.raises(ValueError, match=r"column 2, .*, \.\.\. \(513 in all\)"):
        selection.select(field("no") == 1)
    assert len(selection.select(field("column 499") == 499)) == 1


def test_what_is_no_condition_is_refused(ds):
    with pytest.raises(ValueError, match="gives int64, and not true or false"):
        ds.select(field("width"))
    with pytest.raises(ValueError, match="does not fit the columns"):
        ds.select(field("width") == "wide")
    with pytest.raises(ValueError, match="named, not numbered"):
        ds.select((field("width") > 1) & (pc.field(0) > 1))
    with pytest.raises(ValueError, match="cannot be computed"):
        ds.select(field("bytes") / 0 > 1)
    for wrong in (np.ones(18, bool), [1, 2], lambda _: True, "width > 3"):
        with pytest.raises(TypeError, match="where is a pyarrow expression"):
            ds.select(wrong)


def test_text_that_looks_like_the_number_of_a_column_is_text(ds):
    assert len(ds.select(field("key") == "FieldPath(0)")) == 0


def test_a_catalog_without_sizes_or_captions_says_how_to_make_one_with_them(plain):
    for name, option in (("width", "geometry"), ("aspect", "geometry"), ("caption_length", "captions")):
        with pytest.raises(ValueError, match=rf"shardset index --{option}, or index_dataset\(\.\.\., {option}=True\)"):
            plain.select(field(name) > 1)
        with pytest.raises(ValueError, match=f"--{option}"):
            plain.select().column(name, default=0)
    with pytest.raises(ValueError, match="--geometry"):
        plain.bucketed(Buckets())
    assert len(plain.select(field("key") != "width")) == 12  # it is named in a text alone


def test_a_field_that_no_sample_has_is_told_of(ds, caplog):
    assert len(ds.select(has_field("jgp"))) == 0
    assert len(ds.select(~has_field("jgp"))) == len(ds) - 3  # of the records nobody knows
    assert ds.report.counts["no_such_field"] == 2
    message = "no sample has a field 'jgp' (did you mean 'jpg'?)"
    assert ds.report.places("no_such_field")[0].message == message
    assert message in caplog.text


def test_keys_that_are_no_utf_8_can_be_selected_by_what_is(tmp_path):
    write_shard(tmp_path / "a.tar", [("x\udcff.jpg", b"1"), ("y.jpg", b"22"), ("y.j\udcfeg", b"1")])
    dataset = discover_dataset(tmp_path)
    assert keys_of(dataset.select(pc.starts_with(field("key"), "x"))) == ["x\udcff"]
    assert dataset.select().column("key").tolist() == ["x�", "y"]
    assert dataset.select().column("fields").tolist() == ["jpg", "jpg/j�g"]
    table = pa.table({"key": ["y"], "n": [1]})
    assert keys_of(dataset.select(field("n") == 1, columns=table)) == ["y"]


def test_a_garbled_column_is_found_before_it_is_used(tmp_path):
    index_dataset(write_dataset(tmp_path / "data")[0].parent, workers=0)
    path = next((tmp_path / "data" / ".shardset").glob("samples*"))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"0000000000000001")
    offsets = raw.rindex(np.array([0, 8, 16, 24], np.int32).tobytes(), 0, at)
    raw[offsets + 4 : offsets + 8] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(raw)
    dataset = discover_dataset(tmp_path / "data")
    with pytest.raises(IndexFileError, match="garbled"):
        dataset.select(field("key") == "x")


# ---- joined tables


@pytest.fixture
def scores():
    return pa.table({"key": [f"{n:08d}" for n in (7, 3, 11, 99)], "score": [7.5, 3.0, None, 1.0], "tag": list("abcd")})


def test_a_table_is_joined_by_key_and_what_does_not_match_is_counted(plain, scores):
    selection = plain.select(columns=scores)
    assert len(selection) == 12
    assert selection.column("score", default=-1)[[3, 7, 11, 0]].tolist() == [3, 7.5, -1, -1]
    assert plain.report.counts == {"no_row": 9, "unmatched_row": 1}
    assert plain.report.places("unmatched_row")[0].message == "row 3 of the table is no sample's: key '00000099'"
    assert plain.report.places("no_row")[0].key == "00000000"
    assert keys_of(selection.select(field("score") > 2)) == ["00000003", "00000007"]
    assert keys_of(plain.select(field("score") > 5, columns=scores)) == ["00000007"]
    narrowed = selection.select(field("sample_index") >= 3).select(field("tag") == "c")
    assert keys_of(narrowed) == ["00000011"]
    assert narrowed.column("tag").tolist() == ["c"]


def test_a_table_is_read_from_files_of_each_kind(plain, scores, tmp_path):
    parquet.write_table(scores, tmp_path / "whole.parquet")
    feather.write_feather(scores, tmp_path / "whole.feather")
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, scores.schema) as writer:
        writer.write_table(scores)
    pieces = [tmp_path / f"part-{number}.parquet" for number in range(2)]
    for number, path in enumerate(pieces):
        parquet.write_table(scores.slice(2 * number, 2), path)
    expected = plain.select(columns=scores).column("score", default=-1).tolist()
    for source in (
        tmp_path / "whole.parquet",
        str(tmp_path / "whole.feather"),
        tmp_path / "stream.arrow",
        (tmp_path / "whole.parquet").as_uri(),
        pieces,
        scores.to_pydict(),
        scores.to_batches()[0],
    ):
        selection = plain.select(columns=source)
        assert selection.column("score", default=-1).tolist() == expected
        assert keys_of(selection.select(field("tag") == "a")) == ["00000007"]


def test_a_table_is_read_from_wherever_a_store_reads(plain, scores, monkeypatch):
    store, buffer = MemoryStore(), io.BytesIO()
    parquet.write_table(scores, buffer)
    store.write("memory://b/scores.parquet", buffer.getvalue())
    monkeypatch.setattr(joined_module, "AnyStore", lambda: store)
    assert keys_of(plain.select(field("score") > 5, columns="memory://b/scores.parquet")) == ["00000007"]


def test_only_the_columns_that_are_used_are_read_from_a_file(plain, scores, tmp_path, monkeypatch):
    parquet.write_table(scores, tmp_path / "scores.parquet")
    read = []
    read_file = joined_module._read_file
    monkeypatch.setattr(
        joined_module, "_read_file", lambda reader, names: read.append(names) or read_file(reader, names)
    )
    selection = plain.select(field("score") > 5, columns=tmp_path / "scores.parquet")
    assert read == [None, ("key",), ("score",)]
    selection.column("tag")
    assert read[3:] == [("tag",)]


def test_a_file_that_was_changed_since_is_not_mixed_with_what_it_was(plain, scores, tmp_path):
    path = tmp_path / "scores.parquet"
    parquet.write_table(scores, path)
    selection = plain.select(columns=path)
    parquet.write_table(scores.slice(1), path)
    with pytest.raises(ChangedError, match="changed since its columns were joined"):
        selection.column("score")


def test_files_that_are_no_tables_are_refused(plain, tmp_path):
    with pytest.raises(NotFoundError):
        plain.select(columns=tmp_path / "missing.parquet")
    for content in (b"", b"PAR1", b"PAR1 and no more PAR1", b"ARROW1\0\0", b"key,score\na,1\n"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ValueError, match="bad is no Parquet or Arrow file"):
            plain.select(columns=tmp_path / "bad")
    with pytest.raises(TypeError, match="columns are a table"):
        plain.select(columns=5)
    with pytest.raises(ValueError, match="an empty list"):
        plain.select(columns=[])


def test_keys_may_be_of_any_kind_of_text(plain):
    texts = ["00000005", None, "00000005x"]
    for keys in (
        pa.array(texts, pa.large_string()),
        pa.array(texts).dictionary_encode(),
        pa.array(texts, pa.string_view()),
    ):
        table = pa.table({"key": keys, "same": keys})
        assert keys_of(plain.select(field("same") == "00000005", columns=table)) == ["00000005"]
    assert plain.report.counts["unmatched_row"] == 6  # a row without a key is no sample's
    with pytest.raises(ValueError, match="'key' is of int64, and the dataset's is text"):
        plain.select(columns=pa.table({"key": [5]}))


def test_two_rows_for_one_sample_are_refused_with_its_key(plain):
    table = pa.table({"key": ["00000001", None, "00000002", None, "00000001"], "n": range(5)})
    with pytest.raises(ValueError, match="rows 0 and 4 of the table are both for key '00000001'"):
        plain.select(columns=table)
    table = pa.table({"shard": ["s", "t", "s"], "key": ["a", "a", "a"], "n": range(3)})
    with pytest.raises(ValueError, match="rows 0 and 2 of the table are both for shard 's', key 'a'"):
        plain.select(columns=table, on=["shard", "key"])
    table = pa.table({"sample_index": [4, 99, 99, 3, 4], "n": range(5)})
    with pytest.raises(ValueError, match="rows 0 and 4 of the table are both for sample_index 4"):
        plain.select(columns=table, on="sample_index")


def test_samples_that_share_a_key_share_its_row_unless_the_shard_is_named_too(ds):
    selection = ds.select(columns=pa.table({"key": ["a/0003", "b"], "n": [3, 4]}))
    assert selection.select(field("n") == 3).column("shard").tolist() == ["one", "sub/two"]
    table = pa.table(
        {
            "key": ["a/0003", "a/0003", "b", "1", "a/0001"],
            "shard": ["sub/two", "one", "one", "three.tfrecord", None],
            "n": [1, 2, 3, 4, 5],
        }
    )
    for on in (["shard", "key"], ("key", "shard")):
        selection = ds.select(columns=table, on=on)
        values = selection.column("n", default=-1)
        assert {(sample.key, value) for sample, value in zip(selection, values.tolist(), strict=True) if value > 0} == {
            ("a/0003", 1),
            ("a/0003", 2),
            ("1", 4),
        }
    assert selection.select(field("n") == 1).column("shard").tolist() == ["sub/two"]
    assert ds.report.counts["unmatched_row"] == 4


def test_a_table_is_joined_by_number(plain):
    numbers = pa.array([11, 0, -1, 12, None, 1 << 40], pa.int64())
    table = pa.table({"sample_index": numbers, "n": range(6)})
    selection = plain.select(columns=table, on="sample_index")
    assert selection.column("n", default=-1).tolist() == [1, *[-1] * 10, 0]
    assert plain.report.counts == {"no_row": 10, "unmatched_row": 4}
    with pytest.raises(ValueError, match="is of string, and samples are numbered by integers"):
        plain.select(columns=pa.table({"sample_index": ["1"]}), on="sample_index")


def test_what_cannot_be_joined_is_refused(plain, scores):
    with pytest.raises(ValueError, match="no column 'sample_index' to join by - it has key, score, tag"):
        plain.select(columns=scores, on="sample_index")
    for wrong in ("score", ["key", "tag"], []):
        with pytest.raises(ValueError, match="on must be"):
            plain.select(columns=scores, on=wrong)
    with pytest.raises(ValueError, match="two columns 'score'"):
        plain.select(columns=scores.append_column("score", scores.column("score")))
    with pytest.raises(ValueError, match="a table with a column 'score' is joined already"):
        plain.select(columns=scores).select(columns=scores)


def test_a_column_of_the_catalog_keeps_its_name_and_that_of_the_table_gets_another(ds):
    table = pa.table({"key": ["d", "e"], "width": [1, 2], "has.jpg": [True, True], "bytes.new": [3, 3]})
    selection = ds.select(columns=table)
    assert keys_of(selection.select(field("width") == 33)) == ["d"]
    assert keys_of(selection.select(field("joined.width") == 2)) == ["e"]
    assert keys_of(selection.select(field("joined.has.jpg") & ~has_field("jpg"))) == ["e"]
    assert keys_of(selection.select(field("joined.bytes.new") == 3)) == ["d", "e"]
    assert ds.report.counts["shadowed_column"] == 3
    assert ds.report.places("shadowed_column")[0].message == (
        "'width' is the catalog's column; that of the table is 'joined.width'"
    )


def test_tables_are_joined_one_after_the_other(plain, scores):
    other = pa.table({"sample_index": [3, 7], "clip.score": [0.1, 0.2]})
    selection = plain.select(field("score") > 0, columns=scores)
    selection = selection.select(field("clip.score") > 0.15, columns=other, on="sample_index")
    assert keys_of(selection) == ["00000007"]
    assert selection.column("score").tolist() == [7.5]
    assert repr(selection).endswith("1 of 12 samples, joined=2)")


def test_columns_of_odd_names_and_kinds_can_be_used(plain):
    odd = "we ird)\n\"x' in (row"
    values = pa.array([{"a": 1, "b": "x"}, {"a": 2, "b": None}])
    table = pa.table({"sample_index": [2, 5], odd: [1, 2], "meta": values, "day": pa.array([0, 1], pa.timestamp("s"))})
    selection = plain.select(columns=table, on="sample_index")
    assert selection.select(field(odd) == 2).numbers.tolist() == [5]
    assert selection.select(pc.field("meta", "a") == 1).numbers.tolist() == [2]
    there = selection.select(field("day").is_valid())
    assert there.column("meta").tolist() == values.to_pylist()
    assert there.column("day").tolist() == pa.array([0, 1], pa.timestamp("s")).to_pylist()


# ---- what a selection is


def test_a_selection_counts_gives_slices_and_iterates(plain):
    some = plain.select(field("sample_index") > 8)
    assert (len(some), keys_of(some)) == (3, ["00000009", "00000010", "00000011"])
    assert (some[0].key, some[-1].key, some[np.int64(1)].key) == ("00000009", "00000011", "00000010")
    assert [sample.key for sample in some[::-2]] == ["00000011", "00000009"]
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=f"sample {wrong} of a selection of 3"):
            some[wrong]
    every = plain.select()
    assert (every[-1].key, len(every[2:4]), keys_of(every)) == ("00000011", 2, keys_of(plain))
    with pytest.raises(IndexError):
        every[12]


def test_a_selection_reads_its_samples(plain):
    some = plain.select(field("sample_index").isin(np.array([1, 7, 8])))
    assert list(some.iter_dicts(["txt"])) == plain.read_samples([1, 7, 8], ["txt"], copy=True)
    assert list(plain.select().iter_dicts()) == list(plain.iter_dicts())
    assert [bytes(sample["jpg"]) for sample in some.iter_dicts(copy=False)] == [plain[n]["jpg"] for n in (1, 7, 8)]


def test_places_lead_to_numbers_of_samples(plain):
    some = plain.select(field("sample_index") > 8)
    assert some.numbers_at(np.array([2, 0])).tolist() == [11, 9]
    assert plain.select().numbers_at(np.array([2, 0])).tolist() == [2, 0]
    assert some.numbers_at(np.array([], np.int64)).tolist() == []
    for view in (some, plain.select()):
        for wrong in (-1, len(view)):
            with pytest.raises(IndexError, match=f"of a selection of {len(view)} samples"):
                view.numbers_at(np.array([0, wrong]))


def test_a_digest_tells_selections_apart_and_never_changes(plain):
    one, two = plain.select(field("sample_index") > 8), plain.select(field("sample_index") < 3)
    assert plain.select().digest == ""
    assert one.digest == "af8f8d3a7d87a15a"
    assert one.digest == plain.select().select(field("key") > "00000008").digest
    assert len({one.digest, two.digest, plain.select(FALSE).digest, ""}) == 4


def test_what_is_among_the_first_samples_has_the_digest_that_it_had_when_there_were_no_others(tmp_path):
    write_dataset(tmp_path, shards=2)
    before = discover_dataset(tmp_path)
    odd = pc.match_substring_regex(field("key"), "[13579]$")
    old, old_all = before.select(odd), before.select()
    write_shard(tmp_path / "shard-0002.tar", make_members(4, start=8))
    dataset = discover_dataset(tmp_path)
    new = dataset.select(odd)
    assert (len(old), len(new)) == (4, 6)
    assert new.among_first(8).numbers.tolist() == old.numbers.tolist()
    assert new.among_first(8).digest == old.digest != new.digest
    assert dataset.select().among_first(8).digest == old_all.digest == ""
    assert pickle.loads(pickle.dumps(dataset.select().among_first(8))).digest == ""
    assert dataset.select(field("sample_index") < 9).among_first(8).digest == ""
    assert dataset.select().among_first(8).numbers.tolist() == list(range(8))
    assert dataset.select().among_first(0).numbers.tolist() == []
    assert new.among_first(12) is new
    for wrong in (-1, 13):
        with pytest.raises(ValueError, match=f"the first {wrong} samples of a dataset of 12"):
            new.among_first(wrong)


def test_selecting_everything_is_no_selection(plain):
    every = plain.select(field("sample_index") >= 0)
    assert every.numbers is None
    assert every.digest == ""
    assert every == plain.select() == Selection(plain)


def test_an_empty_selection_is_one(plain):
    nothing = plain.select(field("sample_index") < 0)
    assert (len(nothing), list(nothing), nothing.total_bytes, nothing[:]) == (0, [], 0, [])
    assert repr(nothing) == f"Selection({plain.name!r}, 0 of 12 samples)"
    assert nothing.column("key").tolist() == []
    assert nothing.column("bytes").dtype == np.int64
    assert len(nothing.select(field("bytes") > 0)) == 0
    assert list(nothing.iter_dicts()) == []


def test_an_empty_dataset_has_a_selection(tmp_path):
    write_shard(tmp_path / "a.tar", [("README", b"x")])
    dataset = discover_dataset(tmp_path)
    assert len(dataset.select()) == len(dataset.select(field("bytes") > 0)) == 0
    assert dataset.select().column("bytes").tolist() == []
    assert len(dataset.select(columns=pa.table({"key": ["a"], "n": [1]}))) == 0


def test_selections_of_the_same_numbers_are_equal(plain, scores):
    one, two = plain.select(field("sample_index") > 8), plain.select(field("key") > "00000008", columns=None)
    assert one == two == plain.select(field("sample_index") > 8, columns=scores)
    assert hash(one) == hash(two)
    assert one != plain.select()
    assert one != plain.select(field("sample_index") > 7)
    assert one != [9, 10, 11]


def test_a_selection_cannot_be_changed(plain):
    some = plain.select(field("sample_index") > 8)
    with pytest.raises(ValueError, match="read-only"):
        some.numbers[0] = 1
    with pytest.raises(AttributeError):
        some.dataset = plain
    with pytest.raises(AttributeError):
        some.other = 1


def keys_and_scores(selection):
    return [sample.key for sample in selection], selection.column("score").tolist(), selection.digest


@pytest.mark.slow
def test_a_selection_goes_to_another_process_with_its_columns(plain, scores, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parquet.write_table(scores, "scores.parquet")
    context = multiprocessing.get_context("spawn")
    for columns in (scores, "scores.parquet"):
        some = plain.select(field("score") > 2, columns=columns)
        copy = pickle.loads(pickle.dumps(some))
        assert copy == some
        assert not copy.numbers.flags.writeable
        queue = context.SimpleQueue()
        process = context.Process(target=send, args=(queue, keys_and_scores, some))
        process.start()
        answer = queue.get()
        process.join()
        assert answer == keys_and_scores(some) == (["00000003", "00000007"], [3.0, 7.5], some.digest)


def test_bytes_are_those_of_the_payloads_or_of_all_shards(plain):
    assert plain.select().total_bytes == plain.total_size
    some = plain.select(field("sample_index").isin([2, 9]))
    assert some.total_bytes == sum(sum(plain[number].sizes) for number in (2, 9))


def test_columns_come_as_arrays_of_numbers(plain):
    table = pa.table(
        {
            "sample_index": range(12),
            "small": pa.array(range(12), pa.uint8()),
            "real": pa.array(range(12), pa.float32()),
            "yes": [True] * 12,
            "name": pa.array(list("abcdefghijkl")).dictionary_encode(),
            "list": [[n] for n in range(12)],
        }
    )
    some = plain.select(field("small") > 9, columns=table, on="sample_index")
    for name, kind, values in (
        ("small", np.int64, [10, 11]),
        ("real", np.float64, [10, 11]),
        ("yes", np.bool_, [True, True]),
        ("name", object, ["k", "l"]),
        ("list", object, [[10], [11]]),
        ("key", object, ["00000010", "00000011"]),
        ("bytes", np.int64, [sum(plain[n].sizes) for n in (10, 11)]),
        ("has.jpg", np.bool_, [True, True]),
    ):
        column = some.column(name)
        assert column.dtype == kind, name
        assert column.tolist() == values, name


def test_a_value_that_is_not_known_raises_or_becomes_the_default(plain, scores):
    selection = plain.select(columns=scores).select(field("sample_index") > 6)
    with pytest.raises(SampleError, match="'score' has no value for sample '00000008', and for 4 in all") as caught:
        selection.column("score")
    assert (caught.value.key, caught.value.shard) == ("00000008", selection[1].shard)
    assert selection.column("score", default=0).dtype == np.float64
    assert selection.column("tag", default="").tolist() == ["a", "", "", "", "c"]
    table = pa.table({"sample_index": [7], "n": [5]})
    selection = selection.select(columns=table, on="sample_index")
    assert selection.column("n", default=0).dtype == np.int64
    assert np.isnan(selection.column("n", default=np.nan)).tolist() == [False, True, True, True, True]
    assert selection.column("n", default=None).tolist() == [5, None, None, None, None]


def test_a_column_may_be_null_throughout(plain):
    selection = plain.select(
        columns=pa.table({"sample_index": pa.array([], pa.int64()), "n": pa.nulls(0, pa.int8())}), on="sample_index"
    )
    assert selection.column("n", default=3).tolist() == [3] * 12
    assert selection.column("n", default=3).dtype == np.int64


# ---- buckets and packs


def test_buckets_and_packs_hold_the_samples_and_the_wish(ds):
    some = ds.select(field("width").is_valid())
    bucketed = some.bucketed(Buckets(area=512 * 512))
    assert isinstance(bucketed, Bucketed)
    assert (bucketed.view, bucketed.buckets, bucketed.dataset) == (some, Buckets(262144), ds)
    assert ds.bucketed(Buckets()).view == ds.select()
    assert "14 of 20 samples), buckets=Buckets(area=262144" in repr(bucketed)
    packed = ds.packed(Pack("bytes", 100))
    assert isinstance(packed, Packed)
    assert (packed.view, packed.pack, packed.dataset) == (ds.select(), Pack("bytes", 100, 1024), ds)
    with pytest.raises(TypeError):
        len(packed)
    with pytest.raises(ValueError, match=r"no column 'tokens' - join a table that has it"):
        ds.packed(Pack("tokens", 100))
    with pytest.raises(ValueError, match=r"'key' is of string, and lengths are numbers"):
        ds.packed(Pack("key", 100))


def test_wishes_that_make_no_sense_are_refused():
    for wrong in ({"area": 0}, {"area": -1}, {"multiple": 0}, {"unit": 0}, {"unit": True}, {"area": 1 << 70}):
        name, value = next(iter(wrong.items()))
        with pytest.raises(ValueError, match=rf"{name} must be a positive integer \(.*\), not {value!r}"):
            Buckets(**wrong)
    for wrong in ({"area": 2.0}, {"multiple": None}, {"unit": "8"}):
        with pytest.raises(TypeError, match="is an integer"):
            Buckets(**wrong)
    with pytest.raises(ValueError, match="leftovers must be 'drop', 'pad' or 'merge', not 'keep'"):
        Buckets(leftovers="keep")
    with pytest.raises(ValueError, match="crop must be 'center' or 'random', not 'centre'"):
        Buckets(crop="centre")
    with pytest.raises(ValueError, match="is empty"):
        Pack("", 1)
    with pytest.raises(TypeError, match="name of a column"):
        Pack(3, 1)
    with pytest.raises(ValueError, match="size must be a positive integer"):
        Pack("n", 0)
    with pytest.raises(ValueError, match="window must be a positive integer"):
        Pack("n", 1, window=-1)
    assert type(Buckets(area=np.int64(4)).area) is int
