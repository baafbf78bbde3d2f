"""Indexes that were learned from headers are the same when they come back, and are used for nothing else."""

from __future__ import annotations

import threading

import pytest

from formats.tar_builder import Segments, archive, member, sparse_old
from servers.faults import Fault
from servers.faulty import FaultServer
from shards import make_members, private_cache, tar_bytes  # noqa: F401 - the fixture is autouse
from shardset.dataset import learned
from shardset.dataset.learned import learned_folder, load_learned, save_learned
from shardset.dataset.opening import discover_dataset
from shardset.errors import FormatError
from shardset.index.build import build_index
from shardset.policy import Policy
from shardset.storage import MemoryStore, ObjectInfo

PLAIN = {"captions": False, "geometry": False}


def info_of(url="http://host/a.tar", identity='"1"', size=None):
    return ObjectInfo(url, len(SHARDS["plain"]) if size is None else size, identity)


SHARDS = {
    "plain": tar_bytes(make_members(5)),
    "empty": tar_bytes([]),
    "names": tar_bytes(
        [("caf\udce9.jpg", b"1"), ("größe/日本.txt", b"2"), ("x" * 150 + ".jpg", b"3"), ("README", b"")]
    ),
    "twice": tar_bytes([("a.jpg", b"1"), ("a.jpg", b"22"), ("b.jpg", b""), ("a.txt", b"3"), ("__m__/x", b"4")]),
    "sparse": archive(member(b"a.jpg", b"x"), sparse_old(b"a.bin", Segments(((512, b"x"),), 600))).data,
    "damaged": tar_bytes(make_members(5))[: 5 * 1024 + 515],
    "no tar": b"no tar at all " * 200,
    "folders": tar_bytes([("d/", None), ("d/a.jpg", b"1"), ("d/a.txt", b"2")]),
    "pax": tar_bytes(make_members(3), pax=True),
}


def index_of(data, **options):
    store = MemoryStore()
    store.write("memory://b/a.tar", data)
    return build_index(store.open("memory://b/a.tar"), policy=Policy(on_error="skip"), **options)


def said(index):
    """All that an index says, in plain values."""
    names = [bytes(name) for name in index.names]
    columns = [index.offset.tolist(), index.length.tolist(), index.sample_rows.tolist(), index.suffix_ids.tolist()]
    geometry = None if index.geometry is None else [index.geometry.width.tolist(), index.geometry.height.tolist()]
    return (names, *columns, list(index.suffixes), index.captions, index.extra, index.faults, index.size, geometry)


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("options", [PLAIN, {"captions": True, "geometry": True}])
def test_what_comes_back_is_what_was_learned(kind, options):
    index = index_of(SHARDS[kind], **options)
    shard = info_of(size=len(SHARDS[kind]))
    save_learned(shard, index, **options)
    back = load_learned(shard, **options)
    assert back is not None
    assert said(back) == said(index)
    assert back.digest() == index.digest()


@pytest.mark.parametrize("kind", SHARDS)
def test_a_dataset_of_learned_indexes_is_that_of_headers(kind):
    with FaultServer() as server:
        server.put("/d/a.tar", SHARDS[kind])
        server.put("/d/z.tar", SHARDS["plain"])

        def tables():
            dataset = discover_dataset(server.url + "d", policy=Policy(on_error="skip"))
            found = {name: table.to_pylist() for name, table in dataset.to_arrow().items()}
            files = [dataset.list_files_in_shard(number) for number in range(2)]
            return found, files, dataset.report.counts, list(dataset.faults())

        fresh = tables()
        for folder in learned_folder().parent.glob("catalogs/*"):
            for path in folder.iterdir():
                path.unlink()
        server.forget()
        assert tables() == fresh
        assert not server.requests("GET", "*.tar")
        if kind in {"damaged", "no tar"}:
            for folder in learned_folder().parent.glob("catalogs/*"):
                for path in folder.iterdir():
                    path.unlink()
            with pytest.raises(FormatError, match=r"d/a\.tar"):
                len(discover_dataset(server.url + "d"))


def test_another_version_url_size_or_kind_of_index_is_not_known():
    index = index_of(SHARDS["plain"])
    save_learned(info_of(), index, **PLAIN)
    assert load_learned(info_of(), **PLAIN) is not None
    assert load_learned(info_of(identity='"2"'), **PLAIN) is None
    assert load_learned(info_of("http://host/b.tar"), **PLAIN) is None
    assert load_learned(info_of("http://other/a.tar"), **PLAIN) is None
    assert load_learned(info_of(size=1 << 20), **PLAIN) is None
    assert load_learned(info_of(), captions=True, geometry=False) is None
    assert load_learned(info_of(), captions=False, geometry=True) is None


def test_a_url_that_is_signed_anew_is_known_and_its_signature_is_written_nowhere(private_cache):  # noqa: F811
    index = index_of(SHARDS["plain"])
    url = "http://user:SECRET@host/a.tar?X-Amz-Date=SECRET&X-Amz-Signature={}"
    save_learned(info_of(url.format("SECRET")), index, **PLAIN)
    assert load_learned(info_of(url.format("OTHER")), **PLAIN) is not None
    for path in private_cache.rglob("*"):
        assert "SECRET" not in str(path)
        assert path.is_dir() or b"SECRET" not in path.read_bytes()


def test_a_version_that_is_not_known_at_all_is_not_learned_for_good():
    """A server that gives neither etag nor date is held to the size alone; what it serves may differ next time."""
    with FaultServer() as server:
        server.add(Fault.no_etag(no_date=True))
        server.put("/d/a.tar", tar_bytes([("a.jpg", b"1"), ("b.jpg", b"2")]))
        assert [sample.key for sample in discover_dataset(server.url + "d/a.tar")] == ["a", "b"]
        server.put("/d/a.tar", tar_bytes([("c.jpg", b"1"), ("d.jpg", b"2")]))
        dataset = discover_dataset(server.url + "d/a.tar")
        assert [(sample.key, sample["jpg"]) for sample in dataset] == [("c", b"1"), ("d", b"2")]


@pytest.mark.parametrize("where", [0, 100, -1, -9, -40])
@pytest.mark.parametrize("change", ["flip", "cut", "empty"])
def test_a_file_that_was_damaged_is_not_used(where, change, caplog):
    index = index_of(SHARDS["plain"])
    save_learned(info_of(), index, **PLAIN)
    (path,) = learned_folder().glob("*.block")
    content = bytearray(path.read_bytes())
    if change == "flip":
        content[where] ^= 0x15
    path.write_bytes({"flip": content, "cut": content[:where], "empty": b""}[change])
    back = load_learned(info_of(), **PLAIN)
    if back is not None:  # what was hit says nothing of the shard
        assert said(back) == said(index)
    else:
        assert "not used" in caplog.text
        save_learned(info_of(), index, **PLAIN)
        assert said(load_learned(info_of(), **PLAIN)) == said(index)


def test_a_damaged_file_costs_a_dataset_a_second_reading_and_nothing_else():
    with FaultServer() as server:
        server.put("/d/a.tar", SHARDS["plain"])
        assert len(discover_dataset(server.url + "d").list_files_in_shard(0)) == 15
        (path,) = learned_folder().glob("*.block")
        path.write_bytes(path.read_bytes().replace(b"00000001.jpg", b"00000001.png"))
        files = discover_dataset(server.url + "d").list_files_in_shard(0)
        assert files == sorted(name for name, _ in make_members(5))


def test_where_nothing_can_be_kept_the_shard_is_read_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "file"))
    index = index_of(SHARDS["plain"])
    save_learned(info_of(), index, **PLAIN)
    assert load_learned(info_of(), **PLAIN) is None
    with FaultServer() as server:
        server.put("/d/a.tar", SHARDS["plain"])
        for _ in range(2):
            assert len(discover_dataset(server.url + "d").list_files_in_shard(0)) == 15


def test_the_folder_stays_below_its_limit(monkeypatch):
    monkeypatch.setattr(learned, "LEARNED_LIMIT", 20_000)
    index = index_of(SHARDS["plain"])
    for number in range(30):
        save_learned(info_of(f"http://host/{number}.tar"), index, **PLAIN)
        assert sum(path.stat().st_size for path in learned_folder().iterdir()) <= 20_000
    assert load_learned(info_of("http://host/29.tar"), **PLAIN) is not None
    assert load_learned(info_of("http://host/0.tar"), **PLAIN) is None


def test_threads_may_learn_the_same_at_once():
    index = index_of(SHARDS["plain"])
    errors = []

    def work():
        try:
            save_learned(info_of(), index, **PLAIN)
            found = load_learned(info_of(), **PLAIN)
            assert found is None or said(found) == said(index)
        except Exception as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert said(load_learned(info_of(), **PLAIN)) == said(index)
