from __future__ import annotations

import pytest

from shards import write_shard
from shardset.cli.address import find_sample, nearest_keys, split_address
from shardset.dataset.opening import discover_dataset
from shardset.errors import SampleError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("a.tar", ("a.tar", None)),
        ("a.tar#k", ("a.tar", "k")),
        ("a.tar#k#2", ("a.tar", "k#2")),
        ("x#y.tar", ("x#y.tar", None)),
        ("x#y.tar#k", ("x#y.tar", "k")),
        ("x#y.tar#k#z", ("x#y.tar", "k#z")),
        ("missing.tar#k#z", ("missing.tar", "k#z")),
        ("a.tar#", ("a.tar", "")),
        ("a-{0..3}.tar#7", ("a-{0..3}.tar", "7")),
        ("http://host/a.tar#k", ("http://host/a.tar", "k")),
    ],
)
def test_an_address_is_cut_at_the_hash_that_ends_an_existing_name(tmp_path, monkeypatch, address, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("a.tar", "x", "x#y.tar"):
        write_shard(tmp_path / name, [])
    assert split_address(address) == expected


def test_a_file_url_may_hold_a_key_too(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [])
    assert split_address(f"{shard.as_uri()}#k") == (shard.as_uri(), "k")


def test_digits_are_a_key_first_and_a_number_where_no_key_is_like_them(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [(f"{key}.txt", key.encode()) for key in ("b", "0", "c", "007")])
    dataset = discover_dataset(shard)
    assert find_sample(dataset, "0").sample_index == 1
    assert find_sample(dataset, "2").key == "c"
    assert find_sample(dataset, "007").sample_index == 3


@pytest.mark.parametrize("fragment", ["4", "99999999999999999999999999"])
def test_a_number_that_is_too_large_says_how_many_there_are(tmp_path, fragment):
    dataset = discover_dataset(write_shard(tmp_path / "a.tar", [(f"k{n}.txt", b"") for n in range(4)]))
    with pytest.raises(SampleError, match="which has 4 samples"):
        find_sample(dataset, fragment)


def test_a_key_that_is_not_there_is_answered_with_those_that_are_like_it(tmp_path):
    dataset = discover_dataset(write_shard(tmp_path / "a.tar", [(f"train/{n:06d}.txt", b"") for n in range(50)]))
    assert nearest_keys(dataset, "000007") == ["train/000007"]
    assert nearest_keys(dataset, "trian/000007")[0] == "train/000007"
    assert nearest_keys(dataset, "completely different") == []
    assert nearest_keys(dataset, "caf\udce9") == []
    with pytest.raises(SampleError) as caught:
        find_sample(dataset, "train/000007x")
    assert "'train/000007'" in caught.value.hint
    with pytest.raises(SampleError) as caught:
        find_sample(dataset, "completely different")
    assert f"shardset ls {dataset.name}" in caught.value.hint
