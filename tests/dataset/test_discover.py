from __future__ import annotations

import os
from pathlib import Path

import pytest

from shards import private_cache, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.dataset import discover_dataset
from shardset.dataset.discover import find_shards
from shardset.errors import CompressedShardError, NotFoundError, StorageError
from shardset.policy import Report
from shardset.storage import MemoryStore


@pytest.fixture
def make(tmp_path):
    """A function that writes small shards (and other files) below the test's folder."""

    def make(*names):
        paths = [tmp_path / name for name in names]
        for path in paths:
            if path.suffix.lower() == ".tar":
                write_shard(path, [(f"{path.stem}.txt", str(path).encode("utf-8", "surrogateescape"))])
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"not a shard")
        return paths

    return make


def names(found):
    return [shard.name for shard in found.shards]


def test_a_folder_gives_its_shards_at_any_depth_in_byte_order_of_their_paths(make, tmp_path):
    make("b.tar", "a/10.tar", "a/9.tar", "a.b/x.tar", "B.tar", "a/deep/er/x.tar", "ab.tar", "notes.txt", "b.json")
    found = find_shards(tmp_path)
    paths = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.tar"))
    assert names(found) == [path.removesuffix(".tar") for path in paths]
    assert [shard.url for shard in found.shards] == [str(tmp_path / path) for path in paths]
    assert found.is_folder
    assert found.root == str(tmp_path)


def test_shards_of_one_base_name_in_several_folders_are_kept_apart(make, tmp_path):
    make("train/0000.tar", "val/0000.tar")
    dataset = discover_dataset(tmp_path)
    assert [dataset.get_shard_info(i)["name"] for i in range(2)] == ["train/0000", "val/0000"]
    assert [sample["txt"].decode() for sample in dataset] == [
        str(tmp_path / "train/0000.tar"),
        str(tmp_path / "val/0000.tar"),
    ]


def test_links_to_shards_and_folders_are_followed_as_in_a_snapshot_of_the_hub(make, tmp_path):
    blob, _ = make("blobs/abc.tar", "elsewhere/sub/x.tar")
    blob.rename(blob.with_suffix(""))
    snapshot = tmp_path / "snapshots" / "main"
    (snapshot / "data").mkdir(parents=True)
    (snapshot / "data" / "train-0.tar").symlink_to("../../../blobs/abc")
    (snapshot / "more").symlink_to(tmp_path / "elsewhere")
    dataset = discover_dataset(snapshot)
    assert names(find_shards(snapshot)) == ["data/train-0", "more/sub/x"]
    assert [sample.key for sample in dataset] == ["abc", "x"]


def test_a_link_that_leads_nowhere_or_round_in_a_circle_is_counted_and_passed_over(make, tmp_path):
    make("a.tar")
    (tmp_path / "gone.tar").symlink_to("nothing")
    (tmp_path / "round").symlink_to(tmp_path)
    report = Report()
    assert names(find_shards(tmp_path, report=report)) == ["a"]
    assert report.counts == {"dangling_link": 1, "link_loop": 1}


def test_what_a_dot_hides_is_no_shard(make, tmp_path):
    make("a.tar", ".cache/b.tar", "sub/.hidden/c.tar", ".d.tar", "sub/._e.tar")
    assert names(find_shards(tmp_path)) == ["a"]


def test_a_source_below_a_hidden_folder_is_as_good_as_any(make, tmp_path):
    make(".data/a.tar")
    assert names(find_shards(tmp_path / ".data")) == ["a"]


def test_compressed_shards_are_counted_and_named_when_nothing_else_is_found(make, tmp_path):
    make("a.tar.gz", "b.tgz")
    with pytest.raises(NotFoundError, match="no shards found; 2 left out") as caught:
        find_shards(tmp_path)
    assert "a.tar.gz" in str(caught.value)
    assert "end in .tar" in caught.value.hint


def test_compressed_shards_beside_others_are_counted(make, tmp_path):
    make("a.tar", "b.tar.zst")
    report = Report()
    assert names(find_shards(tmp_path, report=report)) == ["a"]
    assert report.counts == {"compressed_shard": 1}
    assert report.places("compressed_shard")[0].shard == str(tmp_path / "b.tar.zst")


def test_a_compressed_shard_that_is_named_itself_is_an_error_once_it_is_read(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b\x08\0" + bytes(600))
    with pytest.raises(CompressedShardError, match=r"a\.tar\.gz"):
        len(discover_dataset(tmp_path / "a.tar.gz"))


@pytest.mark.parametrize("kind", [str, Path, os.fspath])
def test_a_single_shard_may_be_text_or_a_path(make, kind):
    (path,) = make("sub/a.tar")
    found = find_shards(kind(path))
    assert names(found) == ["a"]
    assert found.root == str(path.parent)
    assert found.name == str(path)


def test_a_single_shard_may_have_any_name(make, tmp_path):
    (path,) = make("a.tar")
    path.rename(tmp_path / "blob")
    assert names(find_shards(tmp_path / "blob")) == ["blob"]


def test_upper_case_tar_is_a_shard_too(make, tmp_path):
    make("a.TAR", "b.Tar")
    assert names(find_shards(tmp_path)) == ["a", "b"]


def test_a_folder_whose_name_ends_in_tar_is_a_folder(make, tmp_path):
    make("x.tar/y.tar", "x.tar/z.json")
    assert names(find_shards(tmp_path)) == ["x.tar/y"]
    assert names(find_shards(tmp_path / "x.tar")) == ["y"]
    assert names(find_shards(str(tmp_path / "*.tar" / "*"))) == ["y"]


def test_globs_match_shards_and_two_stars_cross_folders(make, tmp_path):
    make("a/0.tar", "a/1.tar", "a/deep/2.tar", "b/3.tar", "a/0.json")
    assert names(find_shards(f"{tmp_path}/a/*.tar")) == ["0", "1"]
    assert names(find_shards(f"{tmp_path}/**/*.tar")) == ["a/0", "a/1", "a/deep/2", "b/3"]
    assert names(find_shards(f"{tmp_path}/?/[13].tar")) == ["a/1", "b/3"]


def test_a_glob_that_matches_other_files_too_gives_the_shards(make, tmp_path):
    make("0.tar", "0.json", "1.tar", "notes.txt")
    assert names(find_shards(f"{tmp_path}/*")) == ["0", "1"]


def test_a_glob_that_matches_no_shard_gives_the_files_that_were_spelled_out(make, tmp_path):
    make("0.tar", "1.tar")
    for number in range(2):
        (tmp_path / f"{number}.tar").rename(tmp_path / f"{number}.wds")
    assert names(find_shards(f"{tmp_path}/*.wds")) == ["0", "1"]


def test_a_name_with_glob_characters_that_exists_means_itself(make, tmp_path):
    make("x[1].tar", "x1.tar", "set{a,b}/0.tar")
    assert names(find_shards(tmp_path / "x[1].tar")) == ["x[1]"]
    assert names(find_shards(tmp_path / "set{a,b}")) == ["0"]


def test_brace_patterns_give_shards_in_the_order_spelled(make, tmp_path):
    make("p/0.tar", "p/1.tar", "p/2.tar", "q/0.tar", "q/1.tar", "q/2.tar")
    assert names(find_shards(f"{tmp_path}/{{q,p}}/{{0..1}}.tar")) == ["q/0", "q/1", "p/0", "p/1"]
    assert names(find_shards(f"{tmp_path}/p/{{2..1}}.tar")) == ["2", "1"]
    assert names(find_shards(f"{tmp_path}/{{q,p}}/*.tar")) == ["q/0", "q/1", "q/2", "p/0", "p/1", "p/2"]
    assert names(find_shards(f"{tmp_path}/{{q,p}}")) == ["q/0", "q/1", "q/2", "p/0", "p/1", "p/2"]


def test_a_brace_pattern_with_a_shard_that_is_missing_names_it(make, tmp_path):
    make("0.tar", "2.tar")
    with pytest.raises(NotFoundError, match=r"1\.tar"):
        find_shards(f"{tmp_path}/{{0..2}}.tar")


def test_a_list_keeps_its_order_and_names_start_below_the_common_folder(make, tmp_path):
    b, a, c = make("two/b.tar", "one/a.tar", "two/deep/c.tar")
    found = find_shards([b, str(a), c])
    assert names(found) == ["two/b", "one/a", "two/deep/c"]
    assert found.root == str(tmp_path)
    assert not found.is_folder
    assert found.name == f"{b} and 2 more"


def test_a_list_may_mix_folders_globs_and_shards(make, tmp_path):
    make("f/0.tar", "f/1.tar", "g/2.tar", "h.tar")
    assert names(find_shards([tmp_path / "f", f"{tmp_path}/g/*", tmp_path / "h.tar"])) == ["f/0", "f/1", "g/2", "h"]


def test_a_shard_that_is_named_twice_counts_once(make, tmp_path, monkeypatch):
    a, b = make("a.tar", "b.tar")
    monkeypatch.chdir(tmp_path)
    assert names(find_shards([b, a, b, tmp_path, "./a.tar", "b.tar"])) == ["b", "a"]


def test_a_prefix_that_two_folders_share_is_no_folder(make, tmp_path):
    one, two = make("data1/x.tar", "data2/x.tar")
    found = find_shards([one, two])
    assert found.root == str(tmp_path)
    assert names(found) == ["data1/x", "data2/x"]


def test_a_subfolder_narrows_a_folder(make, tmp_path):
    make("train/0.tar", "val/1.tar", "train/deep/2.tar")
    found = find_shards(tmp_path, subfolder="/train/")
    assert names(found) == ["0", "deep/2"]
    assert found.root == str(tmp_path / "train")
    assert found.name == str(tmp_path)
    with pytest.raises(NotFoundError, match="test"):
        find_shards(tmp_path, subfolder="test")


def test_a_subfolder_narrows_each_folder_of_a_list(make, tmp_path):
    make("a/train/0.tar", "a/1.tar", "b/train/2.tar")
    found = find_shards([tmp_path / "a", tmp_path / "b"], subfolder="train")
    assert names(found) == ["a/train/0", "b/train/2"]


def test_a_subfolder_of_a_glob_is_refused(make, tmp_path):
    make("a/train/0.tar")
    with pytest.raises(ValueError, match="write it into the glob"):
        find_shards(f"{tmp_path}/*", subfolder="train")


def test_a_missing_path_is_an_error_that_names_it(tmp_path):
    with pytest.raises(NotFoundError, match="nowhere") as caught:
        discover_dataset(tmp_path / "nowhere")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.url == str(tmp_path / "nowhere")


def test_a_folder_without_shards_is_an_error(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(NotFoundError, match="no shards found"):
        discover_dataset(tmp_path)


@pytest.mark.parametrize("empty", ["empty", "*.tar.none"])
def test_one_name_of_a_list_without_shards_is_an_error_and_not_passed_over(make, tmp_path, empty):
    (a,) = make("a.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no shards found") as caught:
        find_shards([a, str(tmp_path / empty)])
    assert caught.value.url == str(tmp_path / empty)


@pytest.mark.parametrize("source", ["", [], [""], ()])
def test_an_empty_source_is_refused(source):
    with pytest.raises(ValueError, match="empty"):
        discover_dataset(source)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="no store for gopher"):
        discover_dataset("gopher://host/x.tar")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_is_no_shard_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(StorageError, match="not a file"):
        discover_dataset(tmp_path / "x.tar")


def test_a_trailing_slash_changes_the_name_alone(make, tmp_path):
    make("a/b.tar")
    with_slash, without = discover_dataset(f"{tmp_path}/"), discover_dataset(str(tmp_path))
    assert with_slash.name == f"{tmp_path}/"
    assert with_slash.shard_url(0) == without.shard_url(0) == str(tmp_path / "a" / "b.tar")
    assert with_slash.get_shard_info(0)["name"] == "a/b"
    assert with_slash.catalog.folder == without.catalog.folder


@pytest.mark.parametrize(
    "source", [".", "data", "./data", "data/a.tar", "d*/*.tar", "data/{a,b}.tar", "../{base}/data"]
)
def test_a_relative_source_is_not_lost_by_a_change_of_folder(make, tmp_path, monkeypatch, source):
    make("data/a.tar", "data/b.tar", "other/x.txt")
    monkeypatch.chdir(tmp_path)
    source = source.replace("{base}", tmp_path.name)
    dataset = discover_dataset(source)
    assert dataset.name == source
    monkeypatch.chdir(tmp_path / "other")
    assert dataset[0].key == "a"
    assert dataset[0]["txt"] == str(tmp_path / "data" / "a.tar").encode()
    assert dataset.list_files_in_shard(0) == ["a.txt"]
    assert Path(dataset.shard_url(0)).is_absolute()


def test_shards_lie_below_their_root_even_if_they_are_named_through_their_parent(make, tmp_path, monkeypatch):
    make("work/a.tar", "data/b.tar", "data/deep/c.tar")
    (tmp_path / "work" / "link").symlink_to(tmp_path / "data" / "deep")
    monkeypatch.chdir(tmp_path / "work")
    found = find_shards(["a.tar", "../data/b.tar"])
    assert (found.root, names(found)) == (str(tmp_path), ["work/a", "data/b"])
    # The folder above a link is that above the folder which the link leads to.
    assert find_shards("link/../b.tar").shards[0].url == str(tmp_path / "data" / "b.tar")
    assert find_shards("link/c.tar").shards[0].url == str(tmp_path / "work" / "link" / "c.tar")
    monkeypatch.chdir(tmp_path / "data" / "deep")
    assert names(find_shards("..")) == ["b", "deep/c"]


def test_a_glob_may_be_relative_to_a_folder_with_brackets_in_its_name(make, tmp_path, monkeypatch):
    make("x[1]/a.tar")
    monkeypatch.chdir(tmp_path / "x[1]")
    assert names(find_shards("*.tar")) == ["a"]


def test_names_may_have_any_letters(make, tmp_path):
    make("größe/日本 語.tar", "größe/#1?.tar", "a%20b.tar")
    dataset = discover_dataset(tmp_path)
    assert sorted(dataset.get_shard_info(i)["name"] for i in range(3)) == ["a%20b", "größe/#1?", "größe/日本 語"]
    assert {sample["txt"].decode() for sample in dataset} == {str(path) for path in tmp_path.rglob("*.tar")}


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
def test_names_need_not_be_utf_8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    try:
        write_shard(tmp_path / name / f"{name}.tar", [("a.txt", b"1")])
    except OSError:
        pytest.skip("this file system wants UTF-8")
    dataset = discover_dataset(tmp_path)
    assert dataset.get_shard_info(0)["name"] == f"{name}/{name}"
    assert dataset[0]["txt"] == b"1"
    again = discover_dataset(tmp_path)
    assert again[0].shard == str(tmp_path / name / f"{name}.tar")
    assert again.catalog.folder == dataset.catalog.folder


def test_a_file_url_is_the_same_folder(make, tmp_path):
    make("a b.tar")
    dataset = discover_dataset(tmp_path.as_uri())
    assert dataset.shard_url(0) == f"{tmp_path.as_uri()}/a%20b.tar"
    assert dataset[0]["txt"] == str(tmp_path / "a b.tar").encode()
    assert not dataset.is_remote


def test_objects_in_memory_are_found_below_their_folder():
    store = MemoryStore()
    for name in ("b/x.tar", "a.tar", "b/y.json", "c.tar.gz"):
        store.write(f"memory://bucket/{name}", b"")
    report = Report()
    found = find_shards("memory://bucket", store=store, report=report)
    assert names(found) == ["a", "b/x"]
    assert report.counts == {"compressed_shard": 1}
    assert names(find_shards("memory://bucket/", subfolder="b", store=store)) == ["x"]
    assert names(find_shards("memory://bucket/{a,b/x}.tar", store=store)) == ["a", "b/x"]
    assert find_shards(["memory://bucket/b/x.tar", "memory://bucket/a.tar"], store=store).root == "memory://bucket"
    with pytest.raises(NotFoundError):
        find_shards("memory://bucket/none", store=store)


def test_shards_in_several_buckets_have_no_folder_on_this_machine():
    store = MemoryStore()
    urls = ["memory://one/a.tar", "memory://two/a.tar"]
    for url in urls:
        store.write(url, b"")
    found = find_shards(urls, store=store)
    assert found.root == "memory://"
    assert names(found) == ["one/a", "two/a"]
