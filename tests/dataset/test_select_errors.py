"""Expressions that cannot be computed, and tables that cannot be joined: what is raised names the column and a way out.

Each way out that a message tells is gone here too.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet

import shardset
from shards import private_cache, write_dataset
from shardset.errors import ShardsetError
from shardset.loading.loader import Loader

__all__ = ["private_cache"]

field = pc.field
KEYS = [f"{number:08d}" for number in range(12)]
GREAT = (1 << 64) - 1
DAY = dt.datetime(2024, 1, 1)  # noqa: DTZ001 - columns without a time zone are meant


def call(name, *arguments):
    """Return a function of Arrow's that `pyarrow.compute` makes no expression of, or that there is not."""
    return pc.Expression._call(name, list(arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    write_dataset(folder, shards=3, samples=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDSET_CACHE", str(folder / "cache"))
        shardset.index_dataset(folder, geometry=True, workers=0)
    return folder


@pytest.fixture
def ds(folder):
    return shardset.discover_dataset(folder)


TABLE = pa.table(
    {
        "key": KEYS,
        "hash": pa.array([GREAT - number for number in range(12)], pa.uint64()),
        "score": [float("nan"), *map(float, range(11))],
        "number": ["", *map(str, range(11))],
        "time": pa.array([DAY + dt.timedelta(hours=number) for number in range(12)], pa.timestamp("us")),
        "zoned": pa.array([DAY] * 12, pa.timestamp("us", "UTC")),
        "far": pa.array([1 << 60] * 12, pa.timestamp("s")),
        "day": [DAY.date()] * 12,
        "list": [[number] for number in range(12)],
        "struct": [{"a": number} for number in range(12)],
        "category": pa.array(["a", "b"] * 6).dictionary_encode(),
        "lasts": pa.array(range(12), pa.duration("s")),
        "half": np.arange(12).astype(np.float16),
    }
)

# What is asked, which columns the message names, what else it says, and what may be asked instead, of how many samples.
UNFIT = {
    "a number from 2**63 on": (
        field("width") < pa.scalar(GREAT, pa.uint64()),
        ["'width' (int64)"],
        r'2\*\*63 on .*pc\.field\(\'width\'\)\.cast\("uint64"\)',
        (field("bytes").cast("uint64") < pa.scalar(GREAT, pa.uint64()), 12),
    ),
    "a column of numbers from 2**63 on": (
        field("hash") > field("bytes"),
        ["'hash' (uint64)", "'bytes' (int64)"],
        r"pc\.field\('bytes'\)\.cast",
        (field("hash") > field("bytes").cast("uint64"), 12),
    ),
    "such a column and a small number": (
        field("hash") > 5,
        ["'hash' (uint64)"],
        r"pa\.scalar\(5, \"uint64\"\)",
        (field("hash") > pa.scalar(5, "uint64"), 12),
    ),
    "numbers that do not fit a type": (
        (field("bytes") * 100).cast("int8") > 5,
        ["'bytes' (int64)"],
        "take a type that holds all values",
        ((field("bytes") * 100).cast("int16") > 5, 12),
    ),
    "text and a number": (
        field("number") > 5,
        ["'number' (string)"],
        r"pc\.field\('number'\)\.cast\('int64'\)",
        None,
    ),
    "a number and text": (
        field("bytes") == "5",
        ["'bytes' (int64)"],
        r"pc\.field\('bytes'\)\.cast\('string'\)",
        (field("bytes").cast("string") == "5", 0),
    ),
    "text that is no condition": (field("key") & True, ["'key' (string)"], "no kernel", None),
    "a list and a number": (field("list") == 1, ["'list' (list"], "give a value of the column's type", None),
    "a category and a number": (
        field("category") == 1,
        ["'category' (dictionary"],
        "give a value of the column's type",
        (field("category") == "a", 6),
    ),
    "text among numbers": (
        field("bytes").isin(["a"]),
        ["'bytes' (int64)"],
        r"'string'",
        (field("bytes").cast("string").isin(["a"]), 0),
    ),
    "numbers among text": (field("key").isin([1, 2]), ["'key' (string)"], "give a value of the column's type", None),
    "text that is no number": (
        field("number").cast("int64") > 5,
        ["'number' (string)"],
        "Failed to parse string: '' .* select those that it can be computed of first",
        None,
    ),
    "a number that is none": (
        field("score").cast("int64") > 5,
        ["'score' (double)"],
        r"nan .*pc\.field\('score'\)\.cast\(\"int64\", safe=False\)",
        (field("score").cast("int64", safe=False) > 5, 5),
    ),
    "a division by nothing": (
        field("bytes") / field("sample_index") > 1,
        ["'bytes' (int64)", "'sample_index' (int64)"],
        "divide by zero - select those that it can be computed of first",
        None,
    ),
    "a product that is too large": (
        field("bytes") * (1 << 62) > 1,
        ["'bytes' (int64)"],
        r"overflow - .*pc\.field\('bytes'\)\.cast\(\"float64\"\)",
        (field("bytes").cast("float64") * float(1 << 62) > 1, 12),
    ),
    "a pattern that is none": (
        pc.match_substring_regex(field("key"), "("),
        ["'key' (string)"],
        r"Invalid regular expression: missing \): \( - .*RE2.*'\\\('",
        (pc.match_substring_regex(field("key"), r"\("), 0),
    ),
    "a pattern to extract that is none": (
        pc.extract_regex(field("key"), "(?P<a>[").is_valid(),
        ["'key' (string)"],
        "(?i)invalid regular expression",
        (pc.extract_regex(field("key"), "(?P<a>.)").is_valid(), 12),
    ),
    "a pattern for numbers": (
        pc.match_substring_regex(field("bytes"), "1"),
        ["'bytes' (int64)"],
        "cast",
        (pc.match_substring_regex(field("bytes").cast("string"), "[0-9]"), 12),
    ),
    "a function that there is not": (call("no_such", field("key")), ["'key'"], "pyarrow.compute", None),
    "a sum": (call("sum", field("bytes")) > 5, ["'bytes' (int64)"], r"ds\.select\(\)\.column\('bytes'\)", None),
    "a rank": (call("rank", field("bytes")) > 5, ["'bytes' (int64)"], r"ds\.select\(\)\.column", None),
    "a running sum": (call("cumulative_sum", field("bytes")) > 5, ["'bytes' (int64)"], "many samples at once", None),
    "too few arguments": (call("add", field("bytes")) > 5, ["'bytes' (int64)"], "accepts 2 arguments", None),
    "options that are missing": (call("is_in", field("bytes")), ["'bytes' (int64)"], "Options", None),
    "a part of text": (field("key", "x") == 1, ["'key' (string)"], "has no such part", None),
    "a part that a struct has not": (
        field("struct", "b") == 1,
        ["'struct' (struct<a: int64>)"],
        "has no such part",
        (field("struct", "a") == 1, 1),
    ),
    "an element behind the last": (pc.list_element(field("list"), 5) == 1, ["'list' (list"], "out of bounds", None),
    "a time and text": (
        field("time") > "2024-01-01",
        ["'time' (timestamp[us])"],
        r"pa\.scalar\(\"2024-01-01\"\)\.cast\(\"timestamp\[s\]\"\)",
        (field("time") > pa.scalar("2024-01-01").cast("timestamp[s]"), 11),
    ),
    "a time and a number": (
        field("time") > 5,
        ["'time' (timestamp[us])"],
        "times with times",
        (field("time") > DAY, 11),
    ),
    "a day and a number": (field("day") > 5, ["'day' (date32[day])"], "times with times", (field("day") >= DAY, 12)),
    "a time without a zone and one with": (
        field("time") > field("zoned"),
        ["'time' (timestamp[us])", "'zoned' (timestamp[us, tz=UTC])"],
        r"pc\.assume_timezone\(pc\.field\('time'\), \"UTC\"\)",
        (pc.assume_timezone(field("time"), "UTC") > field("zoned"), 11),
    ),
    "a zone that there is not": (
        pc.assume_timezone(field("time"), "Nowhere/X").is_valid(),
        ["'time' (timestamp[us])"],
        "Europe/Berlin",
        None,
    ),
    "a time that is too far": (
        field("far") > field("time"),
        ["'far' (timestamp[s])", "'time' (timestamp[us])"],
        "coarser unit",
        (field("far") > field("time").cast("timestamp[s]", safe=False), 12),
    ),
    "text that is no time": (
        pc.strptime(field("key"), "%Y-%m", "s").is_valid(),
        ["'key' (string)"],
        "Failed to parse",
        (pc.strptime(field("key"), "%Y-%m", "s", error_is_null=True).is_valid(), 0),
    ),
    "a span and a number": (
        field("lasts") > 5,
        ["'lasts' (duration[s])"],
        "give a value of the column's type",
        (field("lasts") > dt.timedelta(seconds=5), 6),
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_expression_that_cannot_be_computed_names_its_columns_and_what_to_do(ds, what):
    where, names, said, instead = UNFIT[what]
    with pytest.raises(ValueError, match=said) as caught:
        ds.select(where, columns=TABLE)
    assert type(caught.value) is ValueError
    for name in names:
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)
    if instead is not None:
        assert len(ds.select(instead[0], columns=TABLE)) == instead[1]


def test_what_cannot_be_computed_of_all_samples_is_of_those_selected_before(ds):
    joined = ds.select(columns=TABLE)
    numbers = joined.select(pc.match_substring_regex(field("number"), "^[0-9]+$"))
    assert len(numbers.select(field("number").cast("int64") > 5)) == 5
    assert len(ds.select(field("sample_index") != 0).select(field("bytes") / field("sample_index") > 1)) == 11
    bytes_of = ds.select().column("bytes")
    rank = np.argsort(np.argsort(bytes_of, kind="stable"))
    assert len(ds.select(field("sample_index").isin(np.flatnonzero(rank > 5)))) == 6


def test_what_is_no_condition_is_told_its_type(ds):
    for where, kind in ((field("bytes"), "int64"), (pc.scalar(5), "int64"), (field("key"), "string")):
        with pytest.raises(ValueError, match=f"gives {kind}, and not true or false"):
            ds.select(where)
    for where in ("width > 5", True, 5, lambda: None, np.ones(12, bool)):
        with pytest.raises(TypeError, match=r"where is a pyarrow expression"):
            ds.select(where)


def test_comparisons_with_what_is_no_number_are_false(ds):
    joined = ds.select(columns=TABLE)
    assert len(joined.select(field("score") > 5)) == 5
    assert len(joined.select(~(field("score") > 5))) == 7
    assert len(joined.select(pc.is_nan(field("score")))) == 1
    assert len(ds.select(field("bytes") > pc.scalar(float("nan")))) == 0
    assert len(ds.select(field("bytes") < decimal.Decimal("1e30"))) == 12


def test_a_long_expression_is_shown_in_part(ds):
    where = field("key") == 5
    for number in range(40):
        where |= field("key") == f"{number:030d}"
    with pytest.raises(ValueError, match=r"\.\.\. does not fit the columns 'key'") as caught:
        ds.select(where)
    assert len(str(caught.value)) < 600


def test_memory_that_ran_out_is_no_fault_of_an_expression(ds, monkeypatch):
    def evaluate(*_):
        raise pa.ArrowMemoryError("malloc of size 5 failed")

    for name in ("columns", "select"):
        with monkeypatch.context() as patch:
            patch.setattr(f"shardset.dataset.{name}.evaluate", evaluate)
            with pytest.raises(MemoryError):
                ds.select(field("bytes") > 5)


COLUMNS = ["width", "bytes", "key", "caption", "has.jpg", "fields", *TABLE.column_names]
SCALARS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1).map(pa.scalar),
    st.integers(0, GREAT).map(lambda number: pa.scalar(number, pa.uint64())),
    st.floats(),
    st.text(max_size=5).filter(lambda text: text.isprintable()),
    st.binary(max_size=3),
    st.booleans(),
    st.datetimes(),
    st.dates(),
    st.timedeltas(dt.timedelta(-1000), dt.timedelta(1000)),
    st.none(),
    st.lists(st.integers(0, 3), max_size=2),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9),
)
CASTS = ["int8", "uint64", "float32", "float64", "string", "bool", "timestamp[s]", "date32", "binary", "time32[s]"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_expression_lets_an_error_of_arrow_out(folder, data):
    dataset = shardset.discover_dataset(folder)

    def value():
        kind = data.draw(st.sampled_from(["column", "column", "cast", "scalar", "sum", "length"]))
        if kind == "scalar":
            return pc.scalar(data.draw(SCALARS))
        column = field(data.draw(st.sampled_from(COLUMNS)))
        if kind == "cast":
            return column.cast(data.draw(st.sampled_from(CASTS)), safe=data.draw(st.booleans()))
        if kind == "sum":
            return call(data.draw(st.sampled_from(["add_checked", "divide_checked", "power", "max"])), column, value())
        return pc.utf8_length(column) if kind == "length" else column

    name = data.draw(
        st.sampled_from(["equal", "less", "greater_equal", "and_kleene", "is_valid", "invert", "ends_with"])
    )
    where = call(name, value()) if name in {"is_valid", "invert", "ends_with"} else call(name, value(), value())
    met = None
    try:
        assert 0 <= len(dataset.select(where, columns=TABLE)) <= 12
    except ValueError as error:
        met = error
    if met is not None:
        assert type(met) is ValueError  # those of Arrow are of that kind too
        assert re.search(r"the expression .* (cannot be computed of|does not fit the columns|gives) ", str(met))


# Tables.


def test_numbers_of_samples_from_2_63_on_are_those_of_no_sample(ds):
    table = pa.table({"sample_index": pa.array([1, GREAT, 1 << 63], pa.uint64()), "v": [1, 2, 3]})
    joined = ds.select(columns=table, on="sample_index")
    assert len(joined.select(field("v") == 1)) == 1
    assert ds.report.counts["unmatched_row"] == 2
    assert ds.report.counts["no_row"] == 11


@pytest.mark.parametrize(
    ("on", "keys", "said"),
    [
        ("key", [1, 2], "'key' is of int64, .*cast it, or join by 'sample_index'"),
        ("key", [b"1", b"2"], "'key' is of binary"),
        ("key", pa.nulls(2), "'key' is of null"),
        ("key", [1.5, float("nan")], "'key' is of double"),
        ("key", pa.array([1, 2]).dictionary_encode(), "'key' is of int64"),
        ("key", [DAY, DAY], "'key' is of timestamp"),
        ("sample_index", [1.0, 2.0], "'sample_index' is of double, .*numbered by integers - cast it"),
        ("sample_index", ["1", "2"], "'sample_index' is of string"),
        ("sample_index", [DAY, DAY], "'sample_index' is of timestamp"),
    ],
)
def test_keys_of_another_type_are_refused_with_the_column(ds, on, keys, said):
    with pytest.raises(ValueError, match=said):
        ds.select(columns=pa.table({on: keys, "v": [1, 2]}), on=on)


def test_keys_that_are_no_text_are_refused_with_the_column(ds):
    ends = pa.py_buffer(np.array([0, 1, 2], np.int32).tobytes())
    garbled = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"\xff\xfe")])
    with pytest.raises(ValueError, match=r"'key' holds what is not of its type .*make the table anew") as caught:
        ds.select(columns=pa.table({"key": garbled, "v": [1, 2]}))
    assert type(caught.value) is ValueError
    joined = ds.select(columns=pa.table({"key": KEYS[:2], "v": garbled}))
    with pytest.raises(ValueError, match=r"column 'v' \(string\) cannot be given as an array") as caught:
        joined.column("v", default="")
    assert type(caught.value) is ValueError


def test_a_column_of_numbers_from_2_63_on_is_refused_where_an_array_is_wanted(ds):
    joined = ds.select(columns=TABLE)
    loader = Loader(joined, 2).columns("hash")
    packs = Loader(joined.packed(shardset.Pack(length="hash", size=64)), 1)
    for give in (lambda: joined.column("hash"), lambda: next(iter(loader)), lambda: next(iter(packs))):
        with pytest.raises(ValueError, match=r"'hash' \(uint64\) .*table\['hash'\]\.cast\(\"string\"\)") as caught:
            give()
        assert type(caught.value) is ValueError
    text = ds.select(columns=TABLE.set_column(1, "hash", TABLE["hash"].cast("string")))
    assert text.column("hash")[0] == str(GREAT)
    small = ds.select(columns=pa.table({"key": KEYS, "hash": pa.array(range(12), pa.uint64())}))
    assert small.column("hash").dtype == np.int64


def test_files_whose_columns_do_not_go_together_are_refused_with_the_column(ds, tmp_path):
    def write(name, **columns):
        parquet.write_table(pa.table(columns), tmp_path / name)
        return tmp_path / name

    numbers = write("numbers.parquet", key=KEYS[:2], v=[1, 2])
    texts = write("texts.parquet", key=KEYS[2:4], v=["a", "b"])
    great = write("great.parquet", key=KEYS[4:6], v=pa.array([1, GREAT], pa.uint64()))
    other = write("other.parquet", key=[1, 2], v=[1, 2])
    for files, name in (([numbers, texts], "v"), ([numbers, other], "key"), ([numbers, great], "'v'")):
        with pytest.raises(ValueError, match=r"do not go together .*write each column with one type") as caught:
            ds.select(field("v") == 1, columns=files)
        assert type(caught.value) is ValueError
        assert name in str(caught.value)
        assert files[-1].name in str(caught.value)
    assert len(ds.select(field("v") == pa.scalar(1, "uint64"), columns=great)) == 1


ENDS = pa.array([6, 12], pa.int32())
ODD = {
    "runs": pa.RunEndEncodedArray.from_arrays(ENDS, pa.array([1, 2])),
    "list": pa.array([["a"]] * 12, pa.list_(pa.string_view())),
    "large list": pa.array([["a"]] * 12, pa.large_list(pa.string_view())),
    "fixed list": pa.array([["a"]] * 12, pa.list_(pa.string_view(), 1)),
    "struct": pa.array([{"a": "x"}] * 12, pa.struct({"a": pa.string_view()})),
    "map": pa.array([[("a", "x")]] * 12, pa.map_(pa.string(), pa.string_view())),
    "category": pa.DictionaryArray.from_arrays(pa.array([0, 1] * 6), pa.array(["a", "b"], pa.string_view())),
    "interval": pa.array([pa.MonthDayNano([1, 2, 3])] * 12),
    "text": pa.array(["a"] * 12, pa.string_view()),
}


@pytest.mark.parametrize("kind", ODD)
def test_columns_of_odd_types_are_joined_all_the_same(ds, tmp_path, kind):
    table = pa.table({"key": KEYS, "v": ODD[kind]})
    wanted = table["v"].to_pylist()
    sources = [table]
    if kind not in {"category", "interval"}:
        feather.write_feather(table, tmp_path / "odd.arrow", compression="uncompressed")
        sources.append(tmp_path / "odd.arrow")
    for source in sources:
        joined = ds.select(field("v").is_valid(), columns=source)
        assert joined.column("v").tolist() == wanted
        assert joined.select(field("key") == KEYS[7]).column("v").tolist() == [wanted[7]]
    runs = pa.RunEndEncodedArray.from_arrays(pa.array(range(1, 13), pa.int32()), pa.array(KEYS))
    assert len(ds.select(columns=pa.table({"key": runs, "v": ODD[kind]})).column("v")) == 12


def test_columns_that_arrow_computes_nothing_of_are_refused_by_name(ds, tmp_path):
    union = pa.UnionArray.from_sparse(pa.array([0] * 12, pa.int8()), [pa.array(range(12)), pa.array(KEYS)])
    table = pa.table({"key": KEYS, "v": union, "w": range(12)})
    with pytest.raises(ValueError, match=r"'v' \(sparse_union") as caught:
        ds.select(field("v").is_valid(), columns=table)
    assert type(caught.value) is ValueError
    assert len(ds.select(field("w") > 5, columns=table)) == 6
    feather.write_feather(table, tmp_path / "union.arrow", compression="uncompressed")
    with pytest.raises(
        ValueError, match=r"union\.arrow has columns that cannot be joined \(sparse_union.*or without them"
    ):
        ds.select(field("w") > 5, columns=tmp_path / "union.arrow")
    with pytest.raises(ValueError, match=r"'half' \(halffloat\).*cast the column of the table before"):
        ds.select(field("half") > 5, columns=TABLE)
    with pytest.raises((ValueError, ShardsetError)):
        ds.select(columns=table).packed(shardset.Pack(length="v", size=5))
