from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.dataset.pairs import PairedDataset, SampleLocation, SamplePair, discover_paired_dataset, key_of_path
from shardset.errors import NotFoundError
from shardset.loading.cursor import TarDataLoader
from shardset.loading.paired import LoadedSamplePair, PairedTarDataLoader


class Listed:
    """Anything with these two is a side."""

    def __init__(self, *shards):
        self.shards = shards

    @property
    def num_shards(self):
        return len(self.shards)

    def list_samples_in_shard(self, shard_index):
        return self.shards[shard_index]


@pytest.fixture
def folder(tmp_path):
    write_shard(tmp_path / "left" / "a.tar", [(f"{name}.jpg", name.encode()) for name in "cab"])
    write_shard(tmp_path / "left" / "b.tar", [("v.1/d.jpg", b"d"), ("v.1/d.json", b"{}")])
    write_shard(
        tmp_path / "right" / "x.tar", [("v.1/d.png", b"D"), ("b.png", b"B" * 30), ("a.png", b"A"), ("c.png", b"C")]
    )
    return tmp_path


def test_pairs_come_in_the_order_of_the_left_side_with_both_places(folder):
    paired = discover_paired_dataset(folder, left_subfolder="left", right_subfolder="right")
    assert (paired.num_pairs, len(paired)) == (4, 4)
    assert [pair.key for pair in paired.list_pairs()] == ["a", "b", "c", "v.1/d"]
    assert paired.get_pair(1) == SamplePair("b", SampleLocation(0, 1, "b.jpg"), SampleLocation(0, 1, "b.png"))
    assert paired.get_pair(-1) == SamplePair(
        "v.1/d", SampleLocation(1, 0, "v.1/d.jpg"), SampleLocation(0, 3, "v.1/d.png")
    )
    assert paired.list_pairs(1, 3) == [paired.get_pair(1), paired.get_pair(2)]
    assert paired.list_pairs(-1) == [paired.get_pair(3)]
    for number in (4, -5):
        with pytest.raises(IndexError, match="out of range: there are 4 pairs"):
            paired.get_pair(number)
    assert (paired.unmatched_left, paired.unmatched_right) == ([], [])


def test_pairs_are_loaded_and_what_is_too_large_is_none(folder):
    paired = discover_paired_dataset(str(folder / "left"), folder / "right")
    loader = PairedTarDataLoader(paired, max_file_size=20)
    assert len(loader) == 4
    pair = loader.load_pair(0)
    assert type(pair) is LoadedSamplePair
    assert (pair.key, pair.left.data, pair.right.data) == ("a", b"a", b"A")
    assert loader.load_pair(1).right is None
    assert loader.load_pair(1).left.path == "b.jpg"
    assert [pair.key for pair in loader.iter_pairs(1, -1)] == ["b", "c"]
    assert (loader.left_loader.max_file_size, loader.right_loader.num_shards) == (20, 1)
    with pytest.raises(IndexError):
        loader.load_pair(4)


def test_nothing_is_looked_through_before_it_is_asked_for():
    class Untouched:
        num_shards = property(lambda _: pytest.fail("was touched"))

    PairedDataset(Untouched(), Untouched())


def test_sides_that_do_not_match_raise_with_examples_and_can_be_looked_at_all_the_same():
    left, right = Listed(["a.jpg", "b.jpg"], ["c.jpg", "d.jpg", "e.jpg"]), Listed(["z.jpg", "b.png"])
    paired = PairedDataset(left, right)
    for use in (lambda: paired.num_pairs, lambda: paired.get_pair(0), paired.list_pairs, lambda: len(paired)):
        with pytest.raises(ValueError, match=r"left_only=4 \['a', 'c', 'd', \.\.\.\], right_only=1 \['z'\]"):
            use()
    assert paired.unmatched_left == ["a", "c", "d", "e"]
    assert paired.unmatched_right == ["z"]
    loose = PairedDataset(left, right, strict=False)
    assert loose.list_pairs() == [SamplePair("b", SampleLocation(0, 1, "b.jpg"), SampleLocation(0, 1, "b.png"))]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_key_that_occurs_twice_is_named_with_both_files(side):
    sides = [Listed(["a.jpg"], ["a.png", "b.jpg"]), Listed(["a.jpg", "b.jpg"])]
    paired = PairedDataset(*(sides if side == "left" else sides[::-1]))
    with pytest.raises(
        ValueError, match=f"duplicate pair key on {side}: 'a', of 'a.jpg' in shard 0 and 'a.png' in shard 1"
    ):
        len(paired)


def test_keys_can_be_made_by_a_function():
    left, right = Listed(["a-1.jpg", "b-1.jpg"]), Listed(["b-2.jpg", "a-2.jpg"])
    paired = PairedDataset(left, right, pair_key=lambda name: name[0])
    assert [(pair.key, pair.right.sample_index) for pair in paired.list_pairs()] == [("a", 1), ("b", 0)]


def test_a_loader_is_a_side_too_and_keeps_the_numbers_of_its_samples(folder):
    right = TarDataLoader(discover_dataset(folder / "right"), max_file_size=20)
    paired = PairedDataset(discover_dataset(folder / "left"), right, strict=False)
    assert [(pair.key, pair.right.sample_index) for pair in paired.list_pairs()] == [("a", 0), ("c", 2), ("v.1/d", 3)]
    assert paired.unmatched_left == ["b"]


def test_a_subfolder_that_is_not_there_is_an_error(folder):
    with pytest.raises(NotFoundError):
        discover_paired_dataset(folder, left_subfolder="left", right_subfolder="other")


@given(
    st.lists(st.text("ab.é ", min_size=1, max_size=6).filter(lambda part: part.strip(".")), min_size=1, max_size=3).map(
        "/".join
    )
)
def test_a_key_is_the_path_without_the_suffix_of_its_last_part(path):
    pure = PurePosixPath(path)
    if str(pure) == path and not path.endswith("."):
        assert key_of_path(path) == str(pure.with_suffix(""))
