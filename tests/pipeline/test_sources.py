from __future__ import annotations

import os

import pytest

import shardset.webdataset as wds
from shards import make_members, write_dataset, write_shard
from shardset.errors import NoSamplesError, NotFoundError
from shardset.pipeline.shard_lists import ResampledShards, SimpleShardList, non_empty
from shardset.pipeline.sources import expand_urls, single_node_only, split_by_node, split_by_worker
from shardset.pipeline.web_dataset import WebDataset
from shardset.policy import Policy
from shardset.storage.memory import MemoryStore
from shardset.tasks import index_dataset


def keys(samples):
    return [sample["__key__"] for sample in samples]


def as_process(monkeypatch, rank, world_size, worker, num_workers):
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS"), (rank, world_size, worker, num_workers), strict=True
    ):
        monkeypatch.setenv(name, str(value))


def by_process(monkeypatch, make, world_size, num_workers):
    """Return the keys that each process reads, rank by rank and worker by worker."""
    found = []
    for rank in range(world_size):
        for worker in range(num_workers):
            as_process(monkeypatch, rank, world_size, worker, num_workers)
            found.append(keys(make()))
    return found


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("a-{00..02}.tar", ["a-00.tar", "a-01.tar", "a-02.tar"]),
        ("{a,b}{1..2}.tar", ["a1.tar", "a2.tar", "b1.tar", "b2.tar"]),
        ("x.tar::y-{0..1}.tar", ["x.tar", "y-0.tar", "y-1.tar"]),
        ("a{1..}.tar", ["a{1..}.tar"]),
        ("pipe:cat {a,b}.tar", ["pipe:cat a.tar", "pipe:cat b.tar"]),
    ],
)
def test_texts_stand_for_urls(text, urls):
    assert expand_urls(text) == urls


def test_variables_are_put_in_and_a_missing_one_is_named(monkeypatch):
    monkeypatch.setenv("WDS_DATA", "${ROOT}/x")
    monkeypatch.setenv("WDS_ROOT", "/r")
    assert expand_urls("${DATA}/{a,b}") == ["/r/x/a", "/r/x/b"]
    with pytest.raises(ValueError, match="WDS_NONE"):
        expand_urls("${NONE}")
    monkeypatch.setenv("WDS_LOOP", "${LOOP}")
    with pytest.raises(ValueError, match="deep"):
        expand_urls("${LOOP}")


def test_folders_globs_paths_and_lists_are_taken(tmp_path):
    paths = write_dataset(tmp_path / "d", shards=3, samples=2)
    expected = keys(WebDataset([str(path) for path in paths]))
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in paths))
    for urls in (tmp_path / "d", f"{tmp_path}/d/", f"{tmp_path}/d/*.tar", paths, iter(paths), str(listed)):
        assert keys(WebDataset(urls)) == expected
    assert keys(WebDataset({"url": str(path)} for path in paths)) == expected
    odd = write_shard(tmp_path / "a[1].tar", make_members(1))
    assert len(list(WebDataset(str(odd)))) == 1


def test_what_names_no_shard_is_an_error_and_nothing_waits(tmp_path):
    (tmp_path / "empty").mkdir()
    for urls in ([], "", [""], ()):
        with pytest.raises(ValueError, match="no shards"):
            WebDataset(urls)
    for urls in (f"{tmp_path}/empty/", f"{tmp_path}/*.tar"):
        with pytest.raises(NotFoundError):
            list(WebDataset(urls))
    for urls in ("spec.yaml", {"datasets": []}):
        with pytest.raises(ValueError, match="RandomMix"):
            WebDataset(urls)
    with pytest.raises(TypeError):
        WebDataset(7)


def test_a_drive_letter_is_no_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match=r"C:/x\.tar"):
        list(WebDataset("C:/x.tar"))


def test_shards_are_permuted_alike_on_all_ranks_and_then_shared_out(tmp_path, monkeypatch):
    paths = [str(path) for path in write_dataset(tmp_path, shards=12, samples=1)]
    epochs = []
    for epoch in range(3):

        def make(epoch=epoch):
            dataset = WebDataset(paths, shardshuffle=True)
            dataset.set_epoch(epoch)
            return dataset

        shares = by_process(monkeypatch, make, 2, 2)
        assert [len(share) for share in shares] == [3] * 4
        assert len({key for share in shares for key in share}) == 12
        epochs.append(shares)
    assert len({tuple(map(tuple, shares)) for shares in epochs}) == 3
    assert sorted(epochs[0][0]) != sorted(epochs[1][0])  # a worker does not keep its shards


def test_without_shuffling_shard_i_goes_to_rank_i_and_its_workers_in_turn(tmp_path, monkeypatch):
    paths = [str(path) for path in write_dataset(tmp_path, shards=8, samples=1)]
    shares = by_process(monkeypatch, lambda: WebDataset(paths), 2, 2)
    assert [[int(key) for key in share] for share in shares] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    explicit = by_process(
        monkeypatch, lambda: WebDataset(paths, nodesplitter=split_by_node, workersplitter=split_by_worker), 2, 2
    )
    assert shares == explicit
    own = by_process(monkeypatch, lambda: WebDataset(paths, nodesplitter=lambda source: list(source)[:2]), 2, 2)
    assert [[int(key) for key in share] for share in own] == [[0], [1]] * 2


def test_fewer_shards_than_processes_are_an_error_with_the_numbers(tmp_path, monkeypatch):
    paths = [str(path) for path in write_dataset(tmp_path, shards=3, samples=4)]
    as_process(monkeypatch, 1, 2, 2, 4)
    with pytest.raises(
        NoSamplesError, match=r"3 shards cannot be shared by 8 processes \(2 ranks with 4 workers each\)"
    ):
        list(WebDataset(paths))
    shares = by_process(monkeypatch, lambda: WebDataset(paths, empty_check=False), 2, 4)
    assert sorted(map(len, shares)) == [0, 0, 0, 0, 0, 4, 4, 4]


@pytest.mark.parametrize("pax", [False, True], ids=["gnu", "pax"])
@pytest.mark.parametrize("fields", [("jpg", "txt"), ("json",)], ids=len)
def test_fewer_shards_than_processes_are_shared_by_samples_where_they_have_indexes(tmp_path, monkeypatch, pax, fields):
    for shard in range(3):
        members = make_members(10 + shard, fields=fields, start=100 * shard)
        write_shard(
            tmp_path / f"{shard}.tar", [("d", None), *members[:5], ("README", b"x" * 700), *members[5:]], pax=pax
        )
    index_dataset(tmp_path)
    paths = [str(tmp_path / f"{shard}.tar") for shard in range(3)]
    for shuffle in (False, True):
        shares = by_process(monkeypatch, lambda shuffle=shuffle: WebDataset(paths, shardshuffle=shuffle), 2, 4)
        together = [key for share in shares for key in share]
        assert len(together) == len(set(together)) == 33
        assert min(map(len, shares)) >= 3
        assert max(map(len, shares)) <= 8


def test_a_shard_with_fewer_samples_than_parts_gives_each_once(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.tar", make_members(2))
    index_dataset(tmp_path)
    shares = by_process(monkeypatch, lambda: WebDataset(str(tmp_path / "a.tar"), empty_check=False), 1, 4)
    assert sorted(key for share in shares for key in share) == ["00000000", "00000001"]


def test_shards_in_a_store_are_shared_by_their_indexes_there(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "a.tar", make_members(9))
    index_dataset(tmp_path)
    store = MemoryStore()
    for file in (path, tmp_path / "a.json"):
        store.write(f"memory://d/{file.name}", file.read_bytes())
    shares = by_process(monkeypatch, lambda: WebDataset("memory://d/a.tar", store=store), 1, 3)
    assert [len(share) for share in shares] == [3, 3, 3]


def test_drawn_shards_repeat_with_seed_and_epoch_and_differ_between_processes(tmp_path, monkeypatch):
    paths = [str(path) for path in write_dataset(tmp_path, shards=9, samples=1)]

    def make():
        return WebDataset(paths, resampled=True).with_epoch(200)

    shares = by_process(monkeypatch, make, 2, 2)
    assert shares == by_process(monkeypatch, make, 2, 2)
    assert len({tuple(share) for share in shares}) == 4
    counts = [shares[0].count(key) for key in set(shares[0])]
    assert len(counts) == 9
    assert max(counts) < 50
    dataset = make()
    assert keys(dataset) != keys(dataset)


def test_one_node_alone_is_made_sure_of(monkeypatch):
    assert list(single_node_only(range(3))) == [0, 1, 2]
    as_process(monkeypatch, 1, 2, 0, 1)
    with pytest.raises(ValueError, match="rank 1 of 2"):
        single_node_only(range(3))


def test_lists_as_first_stages():
    urls = [f"{number}.tar" for number in range(20)]
    assert [item["url"] for item in SimpleShardList(urls)] == urls
    assert len(SimpleShardList("{0..19}.tar")) == 20
    mixed = [item["url"] for item in SimpleShardList(urls, seed=3)]
    assert sorted(mixed) == sorted(urls)
    assert mixed != urls
    drawn = ResampledShards(urls, 5, seed=1)
    first, second = list(drawn), list(drawn)
    assert len(first) == 5
    assert list(ResampledShards(urls, 5, seed=1)) == first
    assert second != first
    with pytest.raises(ValueError, match="max_urls"):
        ResampledShards(urls, max_urls=3)
    with pytest.raises(NoSamplesError):
        ResampledShards([])
    assert list(ResampledShards([], empty_check=False)) == []
    with pytest.raises(NoSamplesError):
        list(non_empty([]))
    assert list(non_empty([1])) == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "watch"}, "mode"),
        ({"url_to_name": str}, "cache_dir"),
        ({"cache_dir": "x", "cache_size": 0, "url_to_name": str}, "cache"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        WebDataset("a.tar", **arguments)


def test_nothing_is_looked_at_before_iteration(tmp_path):
    dataset = WebDataset(f"{tmp_path}/none/").shuffle(10).decode()
    os.mkdir(tmp_path / "none")  # noqa: PTH102
    write_shard(tmp_path / "none" / "a.tar", make_members(1, fields=("txt",)))
    assert len(list(dataset)) == 1


def test_policies_and_functions_that_are_none_are_refused_when_a_pipeline_is_made():
    with pytest.raises(ValueError, match="'no_end_markr'; 'no_end_marker' is one"):
        WebDataset("a.tar", policy=Policy(codes={"no_end_markr": "skip"}))
    with pytest.raises(TypeError, match="is no Policy"):
        WebDataset("a.tar", policy="skip")
    with pytest.raises(TypeError, match="handler=True"):
        WebDataset("a.tar", handler=True)


def test_pipelines_without_a_source_or_with_a_stage_that_was_not_made_say_what_to_write(tmp_path):
    path = str(write_shard(tmp_path / "a.tar", make_members(1)))
    for stages, message in (
        ([wds.tarfile_to_samples()], "SimpleShardList"),
        ([path, wds.tarfile_to_samples()], r"give SimpleShardList\('"),
        ([SimpleShardList(path), wds.tarfile_to_samples], r"write tarfile_to_samples\(\)"),
        ([SimpleShardList(path), wds.tarfile_to_samples(), wds.decode], r"write decode\(\.\.\.\)"),
    ):
        with pytest.raises(TypeError, match=message):
            list(wds.DataPipeline(*stages))


def test_a_path_may_be_spelled_as_a_short_file_url(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.tar", make_members(2))
    monkeypatch.chdir(tmp_path)
    assert len(list(WebDataset("file:a.tar"))) == 2


def test_a_pipeline_says_what_it_is_without_what_lets_one_in():
    dataset = WebDataset("https://h/a-{0..9}.tar?sig=abc", shardshuffle=True).shuffle(10).map(len).batched(4)
    assert repr(dataset) == (
        "WebDataset(shards('https://h/a-0.tar?sig=...' and 9 more), order_shards(), share_shards(), read_samples(), "
        "shuffle(10, 100), map(len), batched(4))"
    )
    assert "abc" not in repr(dataset.pipeline)
