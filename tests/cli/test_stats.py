from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from statistics import median_low

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.running import PHOTOS, run_process
from shards import make_members, read_samples, write_dataset, write_shard
from shardset.cli.counts import ASPECT_EDGES, count_between, histogram_of, spread_of
from shardset.cli.stats import bar, spark
from shardset.dataset.catalogs import IndexOptions, write_catalog
from shardset.formats.naming import Names
from shardset.index.catalog_writer import shard_row
from shardset.index.table import GeometryColumns, index_from_files
from shardset.storage.local import LocalStore

numbers = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50)


def sizes_by_field(*shards):
    """Payload sizes of each field, by tarfile."""
    sizes = {}
    for shard in shards:
        for sample in read_samples(shard):
            for part in sample.parts:
                sizes.setdefault(part.suffix, []).append(len(part.payload))
    return sizes


def assert_fields(fields, sizes):
    assert {field["field"] for field in fields} == set(sizes)
    for field in fields:
        expected = sizes[field["field"]]
        assert field["size"] == sum(expected)
        assert (field["min"], field["median"], field["max"]) == (min(expected), median_low(expected), max(expected))
        edges, counts = field["histogram"]["edges"], field["histogram"]["counts"]
        assert len(edges) == len(counts) + 1
        assert (edges[0], edges[-1]) == (min(expected), max(expected))
        assert sum(counts) == len(expected)


def test_fields_are_counted_as_tarfile_finds_them(run, photos):
    shown = run("stats", photos, "--json").document
    assert (shown["num_shards"], shown["num_samples"], shown["num_files"]) == (1, 10, 20)
    assert shown["size"] == PHOTOS.stat().st_size
    sizes = sizes_by_field(PHOTOS)
    assert_fields(shown["fields"], sizes)
    for field in shown["fields"]:
        assert (field["samples"], field["missing"]) == (len(sizes[field["field"]]), 10 - len(sizes[field["field"]]))


def test_samples_of_many_layouts_in_many_shards_are_counted_together(run, tmp_path):
    shards = [
        write_shard(tmp_path / "0.tar", make_members(5, fields=("jpg", "txt"))),
        write_shard(tmp_path / "1.tar", make_members(7, fields=("txt", "json", "cls"))),
        write_shard(tmp_path / "2.tar", make_members(3, fields=("jpg",))),
        write_shard(tmp_path / "3.tar", []),
    ]
    shown = run("stats", tmp_path, "--json").document
    assert_fields(shown["fields"], sizes_by_field(*shards))
    assert {field["field"]: field["missing"] for field in shown["fields"]} == {"jpg": 7, "txt": 3, "json": 8, "cls": 8}
    assert shown["samples_per_shard"] == {"min": 0, "median": 3, "max": 7}


def test_a_field_that_comes_twice_in_a_sample_is_one_sample_and_two_payloads(run, hostile):
    shown = run("stats", hostile, "--json").document
    [jpg] = [field for field in shown["fields"] if field["field"] == "jpg"]
    assert jpg["samples"] == 2
    assert (jpg["size"], sum(jpg["histogram"]["counts"])) == (len(b"first" + b"second" + b"3"), 3)
    assert shown["findings"] == {"duplicate_suffix": 1, "name_not_utf8": 2, "repeated_key": 1}
    assert shown["other_files"] == {"count": 2, "size": len(b"of no sample") * 2 + len(b", and not UTF-8")}


def test_captions_and_shapes_are_counted_where_an_index_holds_them(run, photos):
    shown = run("stats", photos, "--json").document
    assert (shown["captions"], shown["geometry"]) == (None, None)
    run("index", photos, "--geometry")
    shown = run("stats", photos, "--json").document
    assert shown["captions"]["samples"] == 10
    assert shown["captions"]["length"]["min"] == len("a pink dahlia in bloom")
    geometry = shown["geometry"]
    assert (geometry["samples"], geometry["turned"]) == (10, 1)
    assert geometry["width"] == {"min": 256, "median": 512, "max": 768}
    assert geometry["common"][0] == {"width": 640, "height": 427, "samples": 3}
    assert geometry["aspects"]["edges"] == list(ASPECT_EDGES)
    assert sum(geometry["aspects"]["counts"]) == 10
    assert geometry["aspects"]["counts"][4] == 3  # three squares
    text = run("stats", photos).text
    assert "1 stored turned" in text
    assert "640x427 (3)" in text


def test_a_dataset_without_pictures_or_captions_has_none(run, tmp_path):
    write_shard(tmp_path / "a.tar", [("a.bin", b"x")])
    run("index", tmp_path, "--geometry")
    shown = run("stats", tmp_path, "--json").document
    assert (shown["captions"]["samples"], shown["captions"]["length"]["min"]) == (0, None)
    assert (shown["geometry"]["samples"], shown["geometry"]["aspects"]) == (0, None)
    assert "a.tar" not in run("stats", tmp_path).err


def test_an_empty_dataset_has_no_fields(run, tmp_path):
    write_shard(tmp_path / "a.tar", [])
    shown = run("stats", tmp_path, "--json").document
    assert (shown["num_samples"], shown["fields"]) == (0, [])
    assert run("stats", tmp_path).code == 0


def test_a_damaged_shard_is_counted_and_said(run, tmp_path):
    first, *_ = write_dataset(tmp_path)
    first.write_bytes(first.read_bytes()[: 7 * 1024 + 100])
    done = run("stats", tmp_path, "--json")
    assert (done.document["num_damaged"], done.document["num_samples"]) == (1, 11)
    assert "1 shard is damaged" in done.err
    assert "damaged" in run("stats", tmp_path).text


@given(numbers)
def test_the_spread_is_least_lower_median_and_greatest(values):
    assert spread_of(np.array(values)) == (min(values), median_low(values), max(values))


@given(numbers)
def test_every_number_falls_into_one_bin_of_the_histogram(values):
    edges, counts = histogram_of(np.array(values, np.int64))
    assert edges == sorted(set(edges)) or len(set(values)) == 1
    assert len(counts) <= 12
    for at, (low, high) in enumerate(pairwise(edges)):
        is_last = at == len(counts) - 1
        assert counts[at] == sum(low <= value < high or (is_last and value == high) for value in values)


@given(st.lists(st.floats(0, 10), max_size=30), st.lists(st.floats(0, 10), unique=True).map(sorted))
def test_numbers_are_counted_between_edges(values, edges):
    expected = [0] * (len(edges) + 1)
    for value in values:
        expected[sum(value >= edge for edge in edges)] += 1
    assert count_between(np.array(values), edges) == expected


def test_what_is_not_zero_can_be_seen_in_a_drawing():
    assert spark([0, 1, 1_000_000, 500_000]) == " ▁█▄"
    assert spark([]) == spark([0])[:0] == ""
    assert bar(1, 1_000_000) == "▏"
    assert bar(0, 5) == ""
    assert bar(5, 5) == "█" * 24
    assert bar(0, 0) == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the time of child processes is told on Unix")
def test_a_million_samples_are_counted_in_a_second(tmp_path):
    import resource

    write_large_dataset(tmp_path, shards=50, samples=20_000)
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_process("stats", tmp_path, "--json")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.code == 0, done.err
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    shown = done.document
    assert shown["num_samples"] == 1_000_000
    assert [field["samples"] for field in shown["fields"]] == [1_000_000] * 3
    assert shown["geometry"]["samples"] == 1_000_000
    # Processor time, which other tests that run beside this one make longer, but not by much.
    assert min(spent) < 2


def write_large_dataset(folder, *, shards, samples):
    """Write a catalog of shards whose files are holes of the right size: nobody reads them."""
    random = np.random.default_rng(0)
    store = LocalStore()

    def rows():
        for shard in range(shards):
            names = Names.of(
                [
                    f"{shard:03d}{number:06d}.{field}".encode()
                    for number in range(samples)
                    for field in ("jpg", "json", "txt")
                ]
            )
            length = random.integers(10, 100_000, 3 * samples)
            padded = -(-length // 512) * 512 + 512
            offset = np.cumsum(padded) - padded + 512
            path = folder / f"shard-{shard:03d}.tar"
            with path.open("wb") as file:
                file.truncate(int(padded.sum()))
            index = index_from_files(names, offset, length, int(padded.sum()))
            width, height = random.choice(np.arange(256, 2048, 64), (2, 3 * samples)).astype(np.int32)
            is_image = np.arange(3 * samples) % 3 == 0
            turned = np.where(is_image, random.choice([1, 6], 3 * samples), 0).astype(np.uint8)
            geometry = GeometryColumns(width * is_image, height * is_image, turned)
            index = replace(index, geometry=geometry)
            info = store.info(str(path))
            yield shard_row(index, url=str(path), name=path.stem, identity=info.identity)

    options = IndexOptions(captions=True, geometry=True)
    write_catalog(folder / ".shardset", rows(), options=options, root=str(folder))
