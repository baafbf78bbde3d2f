"""States of pipelines of many stages: whatever they hold, draw or count, the samples behind a state are the same."""

import io
import json
import tarfile

import pytest

import shardset.webdataset as wds
from shardset.policy import Policy


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(3):
        with tarfile.open(folder / f"s-{shard}.tar", "w") as tar:
            for number in range(40):
                for field in ("txt", "cls"):
                    payload = str(40 * shard + number).encode()
                    header = tarfile.TarInfo(f"{shard}-{number:03}.{field}")
                    header.size = len(payload)
                    tar.addfile(header, io.BytesIO(payload))
    return f"{folder}/s-{{0..2}}.tar"


def is_no_fifth(sample):
    return int(sample["cls"]) % 5 != 0


def sliced_and_sampled(urls):
    ds = wds.WebDataset(urls, shardshuffle=True, seed=3).slice(5, 110).rsample(0.7).shuffle(20, initial=10)
    return ds.select(is_no_fifth).rsample(0.8).slice(0, 60, 2).shuffle(7).to_tuple("cls")


def renamed_and_batched(urls):
    ds = wds.WebDataset(urls, shardshuffle=True, seed=4).map(dict).rename(label="cls").map_dict(label=int)
    return ds.shuffle(30).rename_keys(("name", "txt"), keep_unselected=True).extract_keys("label", "name").listed(7)


@pytest.mark.parametrize("make", [sliced_and_sampled, renamed_and_batched])
def test_a_pipeline_goes_on_from_a_state_after_any_sample(make, shards):
    whole = list(make(shards))
    assert len(whole) > 15
    for count in range(len(whole) + 1):
        begun = make(shards)
        samples = iter(begun)
        first = [next(samples) for _ in range(count)]
        state = json.loads(json.dumps(begun.state_dict()))
        rest = make(shards)
        rest.load_state_dict(state)
        assert first + list(rest) == whole


def test_every_sample_that_came_in_is_given_or_counted(shards):
    ds = sliced_and_sampled(shards)
    given = len(list(ds))
    counts = ds.report().counts
    assert set(counts) == {"rsample", "select", "slice"}
    assert 110 - 60 < given + sum(counts.values()) <= 110  # slice(0, 60, 2) may end the epoch early
    everything = wds.WebDataset(shards).select(is_no_fifth).to_tuple("cls")
    assert len(list(everything)) + everything.report().counts["select"] == 120


@pytest.mark.parametrize("way", ["mcached", "lmdb_cached"])
def test_a_pipeline_gives_again_what_it_kept(way, shards, tmp_path):
    ds = wds.WebDataset(shards, shardshuffle=True).rsample(0.5)
    cached = getattr(ds, way)(*([tmp_path / "cache"] if way == "lmdb_cached" else [])).map(dict)
    first = [sample["__key__"] for sample in cached]
    assert [sample["__key__"] for sample in cached] == first
    orders = [[sample["__key__"] for sample in ds] for _ in range(2)]
    assert orders[0] == first
    assert orders[1] != first


def test_a_default_of_the_policy_reaches_to_tuple(shards):
    ds = wds.WebDataset(shards, policy=Policy(defaults={"jpg": b""})).to_tuple("jpg", "cls")
    assert next(iter(ds))[0] == b""


def test_a_field_that_no_sample_has_names_the_fields_there_are(shards, caplog):
    ds = wds.WebDataset(shards, policy=Policy(on_missing="skip")).to_tuple("jpg")
    assert list(ds) == []
    assert "the stage 'to_tuple' passed on none of 120 samples (missing_field); it saw the fields" in caplog.text
    assert ds.report().counts == {"missing_field": 120}
