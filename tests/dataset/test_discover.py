from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import pytest

from servers.faults import Fault
from servers.faulty import FaultServer
from servers.nginx import serve_nginx
from shards import make_members, private_cache, tar_bytes, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.discover import find_shards
from shardset.dataset.opening import discover_dataset
from shardset.errors import CompressedShardError, MissingExtraError, NotFoundError, StorageError
from shardset.policy import Report
from shardset.storage import HttpStore, MemoryStore
from shardset.tasks import index_dataset
from timing import least_seconds


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
    with pytest.raises((ValueError, StorageError, MissingExtraError), match="gopher"):
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


# ---- elsewhere


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


def put(server, *paths):
    """Serve a small shard, with its path as payload, under each of some paths."""
    for path in paths:
        server.put(path, tar_bytes([("a.txt", path.encode())]))


def below(server, found):
    """The urls that were found, as paths on the server."""
    return [shard.url.removeprefix(server.url) for shard in found.shards]


@pytest.fixture
def nginx(make, tmp_path):
    make("data/b.tar", "data/a/1.tar", "data/a/deep/er/2.tar", "data/a/notes.txt", "data/c d/größe #1?%20.tar")
    with serve_nginx(tmp_path) as server:
        yield server


@pytest.mark.parametrize("folder", ["data", "data/", "json/data", "json/data/"])
def test_a_folder_of_a_web_server_gives_what_the_folder_itself_gives(nginx, tmp_path, folder):
    here, there = find_shards(tmp_path / "data"), find_shards(nginx.url + folder)
    assert names(there) == names(here) == ["a/1", "a/deep/er/2", "b", "c d/größe #1?%20"]
    assert there.is_folder
    assert there.root == nginx.url + folder.rstrip("/")
    assert [shard.info.size for shard in there.shards] == [shard.info.size for shard in here.shards]
    assert there.shards[3].url == f"{there.root}/c%20d/gr%C3%B6%C3%9Fe%20%231%3F%2520.tar"


def test_a_folder_that_is_redirected_keeps_its_own_address(nginx, tmp_path):
    for folder in ("redirect/data/a/", "redirect/data/a"):
        there = find_shards(nginx.url + folder)
        assert names(there) == names(find_shards(tmp_path / "data" / "a")) == ["1", "deep/er/2"]
        assert there.shards[0].url == f"{nginx.url}redirect/data/a/1.tar"


def test_names_with_any_letters_are_read_under_their_own_names_on_a_web_server(nginx, tmp_path):
    dataset = discover_dataset(nginx.url + "data")
    info = dataset.get_shard_info(3)
    assert info["name"] == "c d/größe #1?%20"
    assert info["tar_path"].endswith("/c%20d/gr%C3%B6%C3%9Fe%20%231%3F%2520.tar")
    assert info["json_path"].endswith("/c%20d/gr%C3%B6%C3%9Fe%20%231%3F%2520.json")
    assert dataset.get_shard_by_name("c d/größe #1?%20") == info
    assert [sample["txt"].decode() for sample in dataset] == [
        str(tmp_path / "data" / f"{name}.tar") for name in names(find_shards(tmp_path / "data"))
    ]


def test_globs_match_on_a_web_server_as_on_a_disk(nginx, tmp_path):
    for pattern in ("data/**/*.tar", "data/*/*.tar", "data/[ab].tar", "data/a/**/[0-9].tar", "data/*/*"):
        here, there = find_shards(f"{tmp_path}/{pattern}"), find_shards(nginx.url + pattern)
        assert [Path(shard.url).name for shard in here.shards] == [
            Path(unquote(shard.url)).name for shard in there.shards
        ], pattern
    with pytest.raises(NotFoundError, match="no shards found"):
        find_shards(f"{nginx.url}data/*.none")


@pytest.mark.parametrize("path", ["none", "none/", "none.tar", "none.txt", "data/a.tar/", "no/*.tar"])
def test_what_is_not_on_a_web_server_is_named(nginx, path):
    with pytest.raises(NotFoundError, match=r"none|no/|a\.tar"):
        find_shards(nginx.url + path)


def test_a_single_shard_on_a_web_server_may_have_any_name(server):
    put(server, "/d/blob", "/d/x.tar.gz")
    assert names(find_shards(server.url + "d/blob")) == ["blob"]
    assert names(find_shards(server.url + "d/x.tar.gz")) == ["x.tar"]
    assert len(server.requests()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("source", ["{000..299}.tar", "list.txt", ["list.txt", "list.txt"], "list.json"])
def test_hundreds_of_names_are_asked_about_side_by_side(server, source):
    listed = [f"/d/{number:03d}.tar" for number in range(300)]
    put(server, *listed)
    server.put("/d/list.txt", "\n".join(name[3:] for name in listed).encode())
    server.put("/d/list.json", json.dumps([name[3:] for name in listed]).encode())
    server.add(Fault.latency(0.05))
    sources = [f"{server.url}d/{name}" for name in ([source] if isinstance(source, str) else source)]

    def find():
        server.forget()
        assert names(find_shards(sources)) == [f"{number:03d}" for number in range(300)]

    assert least_seconds(find, 5) < 5  # one after the other takes 15 s
    assert len(server.requests("HEAD", "/d/0*.tar")) == 100 * len(sources)


def test_a_list_that_begins_on_this_machine_is_asked_about_side_by_side_all_the_same(server, make):
    (here,) = make("here.tar")
    put(server, *[f"/d/{number}.tar" for number in range(100)])
    server.add(Fault.latency(0.05))
    sources = [here, *(f"{server.url}d/{number}.tar" for number in range(100))]
    assert len(find_shards(sources).shards) == 101
    assert least_seconds(lambda: find_shards(sources), 3) < 3  # one after the other takes 5 s


def test_the_missing_one_of_hundreds_is_named(server):
    put(server, *[f"/d/{number}.tar" for number in range(200) if number != 137])
    with pytest.raises(NotFoundError, match=r"/d/137\.tar"):
        find_shards(f"{server.url}d/{{0..199}}.tar")


def test_a_question_mark_is_a_query_and_no_glob_on_a_web_server(server):
    put(server, "/d/a.tar", "/d/b.tar")
    assert names(find_shards(server.url + "d/a.tar?x=1")) == ["a"]
    assert names(find_shards(server.url + "d/*.tar?x=1")) == ["a", "b"]
    found = find_shards(server.url + "d?x=*[1]")
    assert names(found) == ["a", "b"]
    assert [shard.url for shard in found.shards] == [f"{server.url}d/{name}.tar?x=*[1]" for name in "ab"]
    assert found.root == server.url + "d"
    assert all(request.path.endswith("?x=1") for request in server.requests()[:4])


def test_a_percent_sign_in_a_url_is_an_escape_for_globs_too(server):
    put(server, "/d d/a b.tar", "/d d/[x].tar")
    assert names(find_shards(server.url + "d%20d/a%20*.tar")) == ["a b"]
    assert names(find_shards(server.url + "d%20d/a b.tar".replace(" ", "%20"))) == ["a b"]
    assert names(find_shards(server.url + "d%20d")) == ["[x]", "a b"]


def test_a_space_in_a_url_is_read_as_what_was_meant_or_explained(server):
    put(server, "/d d/a b.tar")
    try:
        found = find_shards(server.url + "d d/a b.tar")
    except StorageError as error:
        assert "%20" in str(error)  # noqa: PT017 - either answer is good
    else:
        assert names(found) == ["a b"]


LISTS = {
    "list.txt": b"\n# remark\nb.tar \r\n\n  sub/a.tar\n{c,b}.tar\n",
    "list.lst": b"b.tar\nsub/a.tar\nc.tar",
    "list.json": b'["b.tar", "sub/a.tar", "c.tar"]',
    "wids.json": b'{"wids_version": 1, "shardlist": [{"url": "b.tar", "nsamples": 1}, {"url": "sub/a.tar"}, "c.tar"]}',
    "of lists.txt": b"wids.json\nlist.txt\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_names_shards_from_its_own_folder(server, tmp_path, make, name):
    make("d/b.tar", "d/sub/a.tar", "d/c.tar")
    put(server, "/d/b.tar", "/d/sub/a.tar", "/d/c.tar")
    for each, content in LISTS.items():
        server.put(f"/d/{each}", content)
        (tmp_path / "d" / each).write_bytes(content)
    there = find_shards(server.url + "d/" + name.replace(" ", "%20"))
    assert names(there) == names(find_shards(tmp_path / "d" / name)) == ["b", "sub/a", "c"]
    assert not there.is_folder


def test_a_list_names_shards_of_any_place(server, make):
    (here,) = make("here.tar")
    put(server, "/one/a.tar", "/d/b.tar")
    with FaultServer() as other:
        put(other, "/two/c.tar")
        server.put("/d/list.txt", f"b.tar\n{other.url}two/c.tar\n{server.url}one/a.tar\n{here}\n".encode())
        dataset = discover_dataset(server.url + "d/list.txt")
        urls = [f"{server.url}d/b.tar", f"{other.url}two/c.tar", f"{server.url}one/a.tar", str(here)]
        assert [dataset.shard_url(number) for number in range(4)] == urls
        assert [sample["txt"].decode() for sample in dataset] == ["/d/b.tar", "/two/c.tar", "/one/a.tar", str(here)]
        assert len({dataset.get_shard_info(number)["name"] for number in range(4)}) == 4


def test_lists_that_name_each_other_end_in_an_error(server):
    server.put("/d/one.txt", b"two.txt")
    server.put("/d/two.txt", b"one.txt")
    with pytest.raises(ValueError, match="lists that name lists"):
        find_shards(server.url + "d/one.txt")


@pytest.mark.parametrize("content", [b"", b"# nothing\n"])
def test_an_empty_list_is_an_error_that_names_it(server, content):
    server.put("/d/list.txt", content)
    with pytest.raises(NotFoundError, match=r"list\.txt"):
        find_shards(server.url + "d/list.txt")


@pytest.mark.parametrize("content", [b"{}", b"[1]", b'{"files": {}}', b"[", b'[""]', b"null"])
def test_json_that_lists_no_shards_is_an_error_that_says_what_does(server, content):
    server.put("/d/list.json", content)
    with pytest.raises(StorageError, match="lists no shards") as caught:
        find_shards(server.url + "d/list.json")
    assert "shardlist" in caught.value.hint


def test_a_name_of_a_list_that_is_missing_is_named(server):
    put(server, "/d/a.tar")
    server.put("/d/list.txt", b"a.tar\nb.tar\n")
    with pytest.raises(NotFoundError, match=r"d/b\.tar"):
        find_shards(server.url + "d/list.txt")


def test_a_subfolder_narrows_a_folder_on_a_web_server(server):
    put(server, "/d/train/0.tar", "/d/val/1.tar")
    found = find_shards(server.url + "d/?x=1", subfolder="/train/")
    assert names(found) == ["0"]
    assert below(server, found) == ["d/train/0.tar?x=1"]
    with pytest.raises(NotFoundError, match="test"):
        find_shards(server.url + "d", subfolder="test")


def test_metadata_may_stand_on_another_server_in_a_folder_or_beside(server, tmp_path):
    members = make_members(3)
    path = write_shard(tmp_path / "local" / "sub" / "a.tar", members)
    index_dataset(tmp_path / "local", workers=0)
    sidecar = path.with_suffix(".json").read_bytes()
    server.put("/d/sub/a.tar", path.read_bytes())
    with FaultServer() as other:
        other.put("/m/sub/a.json", sidecar)
        server.put("/n/sub/a.json", sidecar)
        for metadata, place in (
            (other.url + "m", other.url + "m/sub/a.json"),
            (tmp_path / "local", str(tmp_path / "local" / "sub" / "a.json")),
            (server.url + "n/?x=1", server.url + "n/sub/a.json?x=1"),
        ):
            dataset = discover_dataset(server.url + "d", metadata=metadata)
            assert dataset.get_shard_info(0)["json_path"] == place
            assert dataset.list_files_in_shard(0) == [name for name, _ in members]
            assert not dataset.report.counts
        assert [request.path for request in other.requests("GET")] == ["/m/sub/a.json"]
        dataset = discover_dataset(server.url + "d", metadata=other.url + "m", store=HttpStore())
        assert dataset.list_files_in_shard(0) == [name for name, _ in members]
        dataset = discover_dataset(server.url + "d", metadata=tmp_path / "local", store=HttpStore())
        assert dataset.list_files_in_shard(0) == [name for name, _ in members]


# ---- logins and signatures

LOGIN = "user:pw-SECRET"
SIGNED = "?X-Amz-Date=1&X-Amz-Signature=SECRET1&token=SECRET2"


def test_signed_shards_have_names_and_sidecars_without_confusion(server):
    put(server, "/d/a.tar", "/e/b.tar")
    urls = [f"{server.url}{path}.tar{SIGNED}" for path in ("d/a", "e/b")]
    found = find_shards(urls)
    assert names(found) == ["d/a", "e/b"]
    assert [shard.url for shard in found.shards] == urls
    dataset = discover_dataset(urls)
    assert dataset.get_shard_info(1)["json_path"] == f"{server.url}e/b.json{SIGNED}"


@pytest.mark.parametrize("kind", ["shards", "mixed", "folder", "glob", "list"])
def test_no_secret_stands_in_names_of_a_dataset_and_its_shards(server, make, kind):
    (here,) = make("here.tar")
    put(server, "/d/a.tar", "/e/b.tar")
    start = server.url.replace("://", f"://{LOGIN}@")
    elsewhere = start.replace("127.0.0.1", "localhost")
    server.put("/l.txt", f"{start}d/a.tar{SIGNED}\n{elsewhere}e/b.tar{SIGNED}\n".encode())
    sources = {
        "shards": [f"{start}d/a.tar{SIGNED}", f"{elsewhere}e/b.tar{SIGNED}"],
        "mixed": [str(here), f"{start}d/a.tar{SIGNED}"],
        "folder": f"{start}d{SIGNED}",
        "glob": f"{start}*/*.tar{SIGNED}",
        "list": f"{start}l.txt{SIGNED}",
    }
    dataset = discover_dataset(sources[kind])
    assert "SECRET" not in repr(dataset) + dataset.name
    for number in range(dataset.num_shards):
        assert "SECRET" not in dataset.get_shard_info(number)["name"]
    assert len(list(dataset)) == dataset.num_shards


def test_no_secret_stands_in_what_is_said_of_a_source_that_is_refused(server, caplog):
    start = server.url.replace("://", f"://{LOGIN}@")
    put(server, "/d/a.tar")
    server.put("/d/l.json", b"{}")
    server.put("/d/one.txt", f"{start}d/one.txt{SIGNED}".encode())
    for path in ("none.tar", "d/none/", "d/*.none", "d/{a,b}.tar", "d/l.json", "d/one.txt"):
        with pytest.raises((StorageError, ValueError)) as caught:
            find_shards(f"{start}{path}{SIGNED}")
        assert "SECRET" not in str(caught.value) + repr(caught.value), path
    with pytest.raises(ValueError, match="subfolder") as caught:
        find_shards(f"{start}d/*.tar{SIGNED}", subfolder="x")
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in caplog.text


# ---- what foreign names can do


@pytest.mark.parametrize("name", ["{url}d/../x.tar", "{url}d/%2e%2e%2fx.tar", "{url}d/%2e%2e/x.tar"])
def test_no_name_of_a_list_leads_out_of_the_folder_that_indexes_are_written_to(server, tmp_path, name):
    put(server, "/d/a.tar", "/d/../x.tar", "/x.tar")
    server.put("/d/list.txt", f"a.tar\n{name.format(url=server.url)}\n".encode())
    target = tmp_path / "out" / "indexes"
    with suppress(StorageError, ValueError):  # refusing is as good
        index_dataset(server.url + "d/list.txt", destination=target, workers=0)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(target) for path in written), written
