"""Buckets: webshart's formulas and keys, over columns; and orders that are kept."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import list_tree, private_cache, write_shard  # noqa: F401 - a fixture
from shardset import BucketDataLoader, TarDataLoader, discover_dataset
from shardset.loading import bucket_store
from shardset.loading.bucket_store import dataset_buckets
from shardset.loading.buckets import Shape, group_by_shape, scale_dimensions

MEBI = 1024**2


@pytest.mark.parametrize(
    ("size", "area", "multiple", "expected"),
    [
        ((1920, 1080), MEBI, 64, (1344, 768)),
        ((1080, 1920), MEBI, 64, (768, 1344)),
        ((1000, 1000), MEBI, 64, (1024, 1024)),
        ((640, 480), MEBI, 64, (1152, 896)),
        ((1920, 1080), 512**2, 64, (704, 384)),
        ((640, 480), 512**2, 64, (576, 448)),
        ((1920, 1080), MEBI, 8, (1368, 768)),
        ((1, 1000), MEBI, 64, (64, 32384)),
        ((640, 480), MEBI, 0, (0, 0)),
        ((640, 480), 0, 64, (64, 64)),
        ((0, 100), MEBI, 64, (64, 4294967295)),
        ((0, 0), MEBI, 64, (64, 64)),
    ],
)
def test_sizes_are_scaled_as_webshart_scales_them(size, area, multiple, expected):
    assert scale_dimensions(*size, area, multiple) == expected


def half_up(value):
    return math.floor(value + 0.5)


@given(
    st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([256**2, 512**2, MEBI]), st.sampled_from([8, 64])
)
def test_sides_are_multiples_and_keep_the_shape(width, height, area, multiple):
    wide, high = scale_dimensions(width, height, area, multiple)
    factor = math.sqrt(area / (width * height))
    for side, scaled in ((width, wide), (height, high)):
        assert scaled % multiple == 0
        # One rounding to pixels and one to multiples, in single precision: a step beside the exact value at most.
        assert scaled == multiple or abs(scaled - side * factor) <= multiple / 2 + 1


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape("aspect"), ["0.56", "1.00", "1.33"]),
        (Shape("aspect", round_to=0), ["1"]),
        (Shape("aspect", round_to=None), ["0.5625", "1", "1.3333334"]),
        (Shape("geometry-tuple"), ["(1024, 1024)", "(480, 640)"]),
        (Shape("geometry-list", area=MEBI), ["[1024, 1024]", "[1152, 896]", "[768, 1344]"]),
    ],
)
def test_keys_are_texts_that_are_sorted_as_texts(shape, expected):
    sizes = {
        "aspect": [(1080, 1920), (640, 480), (512, 512)],
        "geometry-tuple": [(480, 640), (1024, 1024)],
        "geometry-list": [(640, 480), (1080, 1920), (1000, 1000)],
    }[shape.key]
    width, height = (np.array(side, np.int32) for side in zip(*sizes, strict=True))
    found = group_by_shape(width, height, (width / height).astype(np.float32), shape)
    assert found.keys == expected
    assert sorted(found.order.tolist()) == list(range(len(sizes)))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=60),
    st.sampled_from(["aspect", "geometry-tuple", "geometry-list"]),
    st.sampled_from([None, 400]),
    st.sampled_from([0, 1, 2, None]),
)
def test_rows_are_grouped_as_one_by_one(sizes, key, area, decimals):
    shape = Shape(key, area, 4, decimals)
    width, height = (np.array([size[side] for size in sizes], np.int32) for side in (0, 1))
    aspect = (width / np.maximum(height, 1)).astype(np.float32)
    found = group_by_shape(width, height, aspect, shape)
    expected = {}
    for row, stored in enumerate(sizes):
        ratio, scaled = aspect[row], stored
        if area is not None:
            scaled = scale_dimensions(*stored, area, 4)
            ratio = np.float32(scaled[0] / scaled[1])
        if key == "aspect":
            name = (
                f"{float(ratio):.{decimals}f}" if decimals is not None else np.format_float_positional(ratio, trim="-")
            )
        else:
            name = str(scaled) if key == "geometry-tuple" else str(list(scaled))
        expected.setdefault(name, []).append(row)
    groups = [found.order[start:stop].tolist() for start, stop in itertools.pairwise(found.starts.tolist())]
    assert dict(zip(found.keys, groups, strict=True)) == dict(sorted(expected.items()))


@pytest.mark.parametrize("shape", [Shape("no"), Shape(area=-1), Shape(multiple=-1), Shape(round_to=-1)])
def test_a_shape_that_cannot_be_is_refused(shape):
    with pytest.raises(ValueError, match=r"negative|must be"):
        shape.check()


@pytest.fixture
def folder(tmp_path):
    """Three shards of images of which the index alone knows the sizes, some without, and a sidecar among them."""
    for shard in range(3):
        members, files, offset = [], {}, 512
        for number in range(6):
            name = f"{shard}{number}.jpg"
            members.append((name, b"x" * (number + 1)))
            entry = {"offset": offset, "length": number + 1}
            if number != 4:
                entry |= {"width": 64 + 64 * (number % 2), "height": 64 + 64 * (number % 3 == 0)}
            files[name] = entry
            offset += 1024
        members.append((f"{shard}0.json", b"{}"))
        files[f"{shard}0.json"] = {"offset": offset, "length": 2}
        path = write_shard(tmp_path / "d" / f"s{shard}.tar", members)
        index = {"filesize": path.stat().st_size, "includes_image_geometry": True, "files": files}
        path.with_suffix(".json").write_text(json.dumps(index))
    return tmp_path / "d"


def test_listings_hold_the_files_or_samples_whose_size_is_known(folder):
    loader = TarDataLoader(folder)
    two, zero = loader.list_shard_sample_aspect_buckets([2, 0], key="geometry-tuple")
    assert (two["shard_idx"], two["shard_name"]) == (2, str(folder / "s2.tar"))
    assert {key: [item["filename"] for item in items] for key, items in zero["buckets"].items()} == {
        "(128, 128)": ["03.jpg"],
        "(128, 64)": ["01.jpg", "05.jpg"],
        "(64, 128)": ["00.jpg"],
        "(64, 64)": ["02.jpg"],
    }
    (item,) = zero["buckets"]["(128, 128)"]
    assert item == {
        "filename": "03.jpg",
        "offset": 3584,
        "size": 4,
        "sample_idx": 3,
        "width": 128,
        "height": 128,
        "aspect": 1.0,
    }
    (files,) = loader.list_shard_aspect_buckets([0], key="geometry-tuple", target_pixel_area=MEBI)
    assert {item["filename"] for items in files["buckets"].values() for item in items} == {
        "00.jpg",
        "01.jpg",
        "02.jpg",
        "03.jpg",
        "05.jpg",
    }
    assert all("sample_idx" not in item for items in files["buckets"].values() for item in items)
    assert files["buckets"]["(1024, 1024)"][0]["original_size"] == [64, 64]
    assert len(list(loader.list_all_aspect_buckets())) == 3
    small = TarDataLoader(folder, max_file_size=3).list_shard_sample_aspect_buckets([0])
    assert sum(len(items) for items in small[0]["buckets"].values()) == 3


def test_a_listing_can_be_filtered_and_keeps_the_numbers(folder):
    (shard,) = TarDataLoader(folder).list_shard_sample_aspect_buckets_filtered(
        [1], key="geometry-list", path_include=["re:1[1-5]"], path_exclude=["*3*"]
    )
    found = {item["filename"]: item["sample_idx"] for items in shard["buckets"].values() for item in items}
    assert found == {"11.jpg": 1, "12.jpg": 2, "15.jpg": 5}


def test_buckets_of_a_whole_dataset_come_in_one_pass_and_are_kept(folder, monkeypatch):
    before = list_tree(folder)
    dataset = discover_dataset(folder)
    order = dataset_buckets(dataset, Shape("geometry-tuple"))
    listed = TarDataLoader(dataset).list_shard_sample_aspect_buckets([0, 1, 2], key="geometry-tuple")
    for number, key in enumerate(order.keys):
        samples = order.samples[order.starts[number] : order.starts[number + 1]]
        names = [dataset[int(sample)].key for sample in samples]
        assert names == [item["filename"][:-4] for shard in listed for item in shard["buckets"].get(key, [])]
    # The second time nothing is worked out.
    monkeypatch.setattr(bucket_store, "order_samples", None)
    again = dataset_buckets(discover_dataset(folder), Shape("geometry-tuple"))
    assert again.keys == order.keys
    assert again.samples.tolist() == order.samples.tolist()
    monkeypatch.undo()
    other = dataset_buckets(discover_dataset(folder), Shape("aspect"))
    assert other.keys == ["0.50", "1.00", "2.00"]
    assert list_tree(folder) == before  # nothing is written into a folder of data


def test_a_kept_order_of_other_shards_is_made_anew(folder):
    def files():
        return [entry.path for entry in BucketDataLoader(discover_dataset(folder), lazy_load=False)]

    first = files()
    assert len(first) == 15
    assert files() == first
    index = json.loads((folder / "s1.json").read_text())
    del index["files"]["12.jpg"]["width"]
    (folder / "s1.json").write_text(json.dumps(index))
    assert files() == [name for name in first if name != "12.jpg"]


def test_a_broken_order_in_the_cache_is_made_anew(folder, private_cache):  # noqa: F811
    dataset = discover_dataset(folder)
    expected = dataset_buckets(dataset, Shape()).samples.tolist()
    kept = [path for path in private_cache.rglob("*") if path.is_file() and b"sample" in path.read_bytes()[:4096]]
    found = [path for path in kept if "bucket" in str(path)]
    assert found
    for path in found:
        path.write_bytes(path.read_bytes()[:-40])
    assert dataset_buckets(discover_dataset(folder), Shape()).samples.tolist() == expected


def test_a_loader_goes_on_in_the_middle_of_a_shuffled_pass(folder):
    def make():
        return BucketDataLoader(
            folder,
            key="geometry-tuple",
            sampling_strategy="random_within_buckets",
            batch_size=2,
            seed=3,
            lazy_load=False,
        )

    whole = [[entry.path for entry in batch] for batch in make().iter_batches()]
    for done in range(len(whole) + 1):
        loader = make()
        batches = loader.iter_batches()
        for _ in range(done):
            next(batches)
        other = make()
        other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [[entry.path for entry in batch] for batch in other.iter_batches()] == whole[done:]
