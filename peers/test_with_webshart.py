"""Indexes, states and loaders, exchanged with webshart 0.6.0 itself.

Run by ``make test-webshart``, which needs Python 3.12 or newer (``PYTHON=...``), because webshart does; the target's
message says how to get one. What webshart wrote is kept in tests/data/webshart too, for all other runs.
"""

from __future__ import annotations

import io
import json
import os
import random
import tarfile

import pytest
import webshart

import shardset
import shardset.webshart

SIZES = ((640, 480), (512, 512), (300, 700), (1024, 768))


def image(number):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", SIZES[number % len(SIZES)], (number * 20 % 256, 80, 160)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_shard(path, start):
    """Write images with a .json, a .txt, or no sidecar, one of them in a folder with a dot in its name."""
    chance = random.Random(start)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(start, start + 9):
            key = f"{number:04d}" if number % 4 else f"set v1/{number:04d}"
            members = [(f"{key}.jpg", image(number))]
            if number % 3 == 0:
                members.append((f"{key}.json", json.dumps({"caption": f"caption {number}", "id": number}).encode()))
            elif number % 3 == 1:
                members.append((f"{key}.txt", f"text {number} é\n".encode()))
            for name, payload in chance.sample(members, len(members)):
                member = tarfile.TarInfo(name)
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "cache"))
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        write_shard(shards / f"s-{number:02d}.tar", 9 * number)
    return shards


@pytest.fixture(params=["webshart", "shardset"])
def indexed(request, folder):
    """The folder, with indexes that one of the two wrote."""
    module = webshart if request.param == "webshart" else shardset
    module.MetadataExtractor().extract_metadata(str(folder), f"{folder}/", include_image_geometry=True)
    return folder


def loaders(folder):
    return [module.TarDataLoader(module.discover_dataset(str(folder))) for module in (webshart, shardset.webshart)]


def same(theirs, ours):
    """Compare values, and numbers with a fraction as 32 bits keep them."""
    if isinstance(theirs, dict):
        assert theirs.keys() == ours.keys()
        return all(same(theirs[key], ours[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(theirs) == len(ours) and all(map(same, theirs, ours))
    return theirs == (pytest.approx(ours, rel=1e-6) if isinstance(theirs, float) else ours)


def test_both_read_the_same_from_an_index(indexed):
    theirs, ours = loaders(indexed)
    for shard in range(3):
        assert theirs.list_samples_in_shard(shard) == ours.list_samples_in_shard(shard)
        assert same(theirs.get_metadata(shard), ours.get_metadata(shard))
        for sample in range(len(theirs.list_samples_in_shard(shard))):
            left, right = theirs.load_sample(shard, sample), ours.load_sample(shard, sample)
            for name in (
                "path",
                "offset",
                "size",
                "data",
                "width",
                "height",
                "json_path",
                "json_data",
                "captions",
                "job_id",
            ):
                assert getattr(left, name) == getattr(right, name), name
            assert left.caption == right.caption
            assert repr(left) == repr(right)


@pytest.mark.parametrize("key", ["aspect", "geometry-tuple", "geometry-list"])
@pytest.mark.parametrize("area", [None, 512**2, 1024**2])
def test_both_sort_images_into_the_same_buckets(indexed, key, area):
    theirs, ours = (
        loader.list_shard_sample_aspect_buckets([0, 2], key=key, target_pixel_area=area) for loader in loaders(indexed)
    )
    assert [list(shard["buckets"]) for shard in theirs] == [list(shard["buckets"]) for shard in ours]
    for left, right in zip(theirs, ours, strict=True):
        left["shard_name"] = os.path.abspath(left["shard_name"])  # noqa: PTH100 - a string
        assert same(left, dict(right))


def test_what_was_renamed_and_coalesced_here_is_read_back_by_webshart(indexed):
    dataset = shardset.discover_dataset(indexed)
    coalesced = shardset.TarDataLoader(dataset).coalesce_caption_metadata(str(indexed))
    assert coalesced["captioned_samples"] == 18
    theirs, ours = loaders(indexed)
    for shard in range(3):
        assert same(theirs.get_metadata(shard), ours.get_metadata(shard))
        captions = [theirs.load_sample(shard, sample).captions for sample in range(9)]
        assert captions == [ours.load_sample(shard, sample).captions for sample in range(9)]
        assert sum(caption is not None for caption in captions) == 6
    count = dataset.field_rename("captions", "first")
    assert count >= 18
    theirs, ours = loaders(indexed)
    for shard in range(3):
        metadata = theirs.get_metadata(shard)
        assert same(metadata, ours.get_metadata(shard))
        assert sum("first" in entry for entry in metadata.values()) >= 6
    assert webshart.discover_dataset(str(indexed)).field_rename("first", "second") == count
    assert shardset.discover_dataset(indexed).field_rename("second", "captions") == count
    theirs, ours = loaders(indexed)
    assert [theirs.load_caption(1, sample) for sample in range(9)] == [
        ours.load_caption(1, sample) for sample in range(9)
    ]


def test_a_state_of_webshart_goes_on_here_and_the_other_way_round(indexed):
    theirs, ours = loaders(indexed)
    for _ in range(20):
        assert next(theirs).path == next(ours).path
    left, right = json.loads(json.dumps(theirs.state_dict())), json.loads(json.dumps(ours.state_dict()))
    there = webshart.TarDataLoader.from_state_dict(right)
    here = shardset.webshart.TarDataLoader.from_state_dict(left)
    rest = [entry.path for entry in theirs]
    assert rest
    assert [entry.path for entry in there] == [entry.path for entry in here] == rest


def test_both_probe_the_same_layout_and_count_the_same(indexed):
    theirs, ours = (module.discover_dataset(str(indexed)) for module in (webshart, shardset.webshart))
    assert theirs.probe_caption_layout() == ours.probe_caption_layout()
    left, right = theirs.get_detailed_stats(), ours.get_detailed_stats()
    assert same(left, right)
    for number in (0, 7, 20):
        assert theirs.find_file_location(number) == ours.find_file_location(number)
