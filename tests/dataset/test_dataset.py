from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
import threading
import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import DATA, FUZZ
from formats.tar_builder import Segments, archive, member, sparse_old
from shards import (
    make_members,
    private_cache,  # noqa: F401 - the fixture is autouse
    read_all,
    read_members,
    read_samples,
    replace_file,
    send,
    tar_bytes,
    write_dataset,
    write_shard,
)
from shardset.dataset.opening import discover_dataset, open_dataset
from shardset.errors import (
    ChangedError,
    DuplicateFieldError,
    MissingFieldError,
    NotFoundError,
    StateError,
    TruncatedError,
)
from shardset.index import catalog_writer
from shardset.index.catalog_files import SAMPLES_SCHEMA, SHARDS_SCHEMA
from shardset.policy import Policy
from shardset.storage import LocalStore, MemoryStore
from shardset.tasks import index_dataset
from storage.counting import CountingStore

PHOTOS = DATA / "webshart"


@pytest.fixture(params=["one group", "many groups"])
def grouped(request, monkeypatch):
    """Run a test with all shards in one group of the catalog, and with groups of two."""
    if request.param == "many groups":
        monkeypatch.setattr(catalog_writer, "GROUP_SHARDS", 2)


@pytest.fixture
def shards(tmp_path):
    """Five shards of unlike content."""
    folder = tmp_path / "data"
    paths = write_dataset(folder, shards=3, samples=4)
    paths.append(write_shard(folder / "sub" / "x.tar", make_members(3, prefix="x/", fields=("png", "cls")), pax=True))
    paths.append(
        write_shard(folder / "sub" / "y.tar", [("README", b"r"), ("b.jpg", b"1"), ("a.jpg", b"2"), ("b.txt", b"3")])
    )
    return folder, [sample for path in paths for sample in read_samples(path)]


# ---- samples


@pytest.mark.usefixtures("grouped")
def test_iteration_gives_what_webdataset_would_group(shards):
    folder, expected = shards
    dataset = discover_dataset(folder)
    assert dataset.num_shards == 5
    assert len(dataset) == len(expected) == 18
    assert read_all(dataset) == [(sample.key, sample.fields) for sample in expected]
    assert [sample.sample_index for sample in dataset] == list(range(18))
    assert [sample.shard_index for sample in dataset] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3 + [4] * 3
    assert [dataset.shard_url(sample.shard_index) for sample in dataset] == [sample.shard for sample in dataset]


@pytest.mark.usefixtures("grouped")
def test_samples_are_given_by_number_from_either_end(shards):
    folder, expected = shards
    dataset = discover_dataset(folder)
    for number in range(-18, 18):
        sample = dataset[number]
        assert (sample.key, sample.read()) == (expected[number].key, expected[number].fields)
        assert sample.sample_index == number % 18
    assert dataset[np.int64(17)].key == expected[17].key


@pytest.mark.parametrize("number", [18, -19, 1 << 70, -(1 << 70)])
def test_a_number_out_of_range_is_an_index_error(shards, number):
    with pytest.raises(IndexError, match=f"sample {number} of a dataset of 18"):
        discover_dataset(shards[0])[number]


@pytest.mark.parametrize("number", ["0", None, 1.0])
def test_a_number_of_another_type_is_a_type_error(shards, number):
    with pytest.raises(TypeError):
        discover_dataset(shards[0])[number]


@pytest.mark.usefixtures("grouped")
def test_slices_are_lists_of_samples(shards):
    folder, expected = shards
    dataset = discover_dataset(folder)
    keys = [sample.key for sample in expected]
    for part in (slice(3, 9), slice(None), slice(-4, None), slice(None, None, -5), slice(9, 3), slice(0, 99, 7)):
        assert [sample.key for sample in dataset[part]] == keys[part]


@pytest.mark.usefixtures("grouped")
def test_find_gives_the_first_sample_of_a_key(shards):
    folder, expected = shards
    dataset = discover_dataset(folder)
    for number, sample in enumerate(expected):
        first = next(n for n, other in enumerate(expected) if other.key == sample.key)
        assert dataset.find(sample.key).sample_index == first
        assert number >= first


@pytest.mark.usefixtures("grouped")
def test_find_looks_in_one_shard_if_asked(tmp_path):
    for name in ("a", "b/c", "d"):
        write_shard(tmp_path / f"{name}.tar", [("k.txt", name.encode()), ("l.txt", b"")])
    dataset = discover_dataset(tmp_path)
    assert dataset.find("k")["txt"] == b"a"
    assert [dataset.find("k", shard=name)["txt"] for name in ("a", "b/c", "d")] == [b"a", b"b/c", b"d"]
    with pytest.raises(MissingFieldError, match="shard 'd' has no sample with the key 'm'"):
        dataset.find("m", shard="d")
    with pytest.raises(ValueError, match="not found"):
        dataset.find("k", shard="c")


@pytest.mark.parametrize("key", ["nothing", "", "00000000.jpg", "\udcff", chr(0xD800), "x"])
def test_find_raises_a_key_error_for_what_is_not_there(shards, key):
    with pytest.raises(KeyError) as caught:
        discover_dataset(shards[0]).find(key)
    assert caught.value.key == key


def test_an_empty_archive_has_no_samples(tmp_path):
    write_shard(tmp_path / "a.tar", [])
    dataset = discover_dataset(tmp_path)
    assert len(dataset) == 0
    assert list(dataset) == []
    assert dataset[:] == []
    assert list(dataset.iter_dicts()) == []
    assert dataset.read_samples([]) == []
    assert dataset.to_arrow()["samples"].num_rows == 0
    with pytest.raises(IndexError):
        dataset[0]
    with pytest.raises(IndexError):
        dataset.read_samples([0])


def test_nothing_is_read_before_it_is_needed(shards):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(shards[0], store=store)
    assert dataset.num_shards == 5
    assert dataset.total_size == sum(path.stat().st_size for path in shards[0].rglob("*.tar"))
    assert repr(dataset) == f"Dataset({str(shards[0])!r}, num_shards=5)"
    assert not dataset.is_remote
    assert store.calls["open"] == 0


@pytest.mark.usefixtures("grouped")
def test_every_store_gives_the_same(shards):
    folder, expected = shards
    memory = MemoryStore()
    for path in sorted(folder.rglob("*.tar")):
        memory.write(f"memory://b/{path.relative_to(folder)}", path.read_bytes())
    answers = []
    for source, store in [
        (folder, LocalStore()),
        (folder, LocalStore(mmap=False)),
        (folder, LocalStore(max_open=1)),
        (folder, CountingStore(LocalStore())),
        (folder.as_uri(), None),
        ("memory://b", memory),
    ]:
        dataset = discover_dataset(source, store=store)
        rows = [*range(0, 18, 5), *range(17, 0, -3)]
        answers.append(
            (
                read_all(dataset),
                [{k: bytes(v) if k != "__key__" else v for k, v in s.items()} for s in dataset.iter_dicts(copy=False)],
                [list(map(bytes, list(s.values())[1:])) for s in dataset.read_samples(rows)],
                [dataset.list_files_in_shard(i) for i in range(5)],
                [
                    [dataset.open_shard(i).read_file(j) for j in range(dataset.get_shard_file_count(i))]
                    for i in range(5)
                ],
            )
        )
    assert answers[0][0] == [(sample.key, sample.fields) for sample in expected]
    assert all(answer == answers[0] for answer in answers)


NAMES = st.text(st.sampled_from("ab./_Aé"), min_size=1, max_size=8).filter(
    lambda name: not name.endswith("/") and name.strip("/.") and not name.startswith("/")
)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples if FUZZ else 40)  # each makes a catalog
@given(st.lists(st.tuples(NAMES, st.binary(max_size=3)), max_size=14), st.booleans(), st.integers(1, 14))
def test_any_archive_gives_the_samples_that_webdataset_would_group(tmp_path_factory, members, pax, border):
    folder = tmp_path_factory.mktemp("data")
    paths = [write_shard(folder / "0.tar", members[:border], pax=pax), write_shard(folder / "1.tar", members[border:])]
    expected = [sample for path in paths for sample in read_samples(path)]
    dataset = discover_dataset(folder)
    assert [(s.key, s.fields, s.names) for s in dataset] == [
        (e.key, tuple(p.suffix for p in e.parts), tuple(p.name for p in e.parts)) for e in expected
    ]
    for sample, other in zip(dataset, expected, strict=True):
        counts = Counter(part.suffix for part in other.parts)
        for part in other.parts:
            if counts[part.suffix] > 1:
                with pytest.raises(DuplicateFieldError):
                    sample[part.suffix]
            else:
                assert sample[part.suffix] == part.payload
        assert dataset.find(other.key).key == other.key
    for number, path in enumerate(paths):
        assert set(dataset.list_files_in_shard(number)) == read_members(path).keys()


# ---- the tables


@pytest.mark.usefixtures("grouped")
def test_the_tables_of_the_catalog_are_plain_and_right(shards):
    folder, expected = shards
    tables = discover_dataset(folder).to_arrow()
    assert set(tables) == {"samples", "shards", "others"}
    assert tables["samples"].schema == SAMPLES_SCHEMA
    assert tables["shards"].schema == SHARDS_SCHEMA
    rows = tables["samples"].to_pylist()
    assert [row["key"] for row in rows] == [sample.key for sample in expected]
    assert [row["fields"].split("/") for row in rows] == [[p.suffix for p in sample.parts] for sample in expected]
    assert [[tuple(m.values()) for m in row["members"]] for row in rows] == [
        [(p.offset, len(p.payload)) for p in sample.parts] for sample in expected
    ]
    assert tables["others"].to_pylist()[0]["name"] == "README"
    assert tables["shards"].column("num_samples").to_pylist() == [4, 4, 4, 3, 3]
    for table in tables.values():
        table.validate(full=True)


def test_tables_of_groups_with_and_without_odd_names_are_one_table(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog_writer, "GROUP_SHARDS", 1)
    write_shard(tmp_path / "a.tar", [("a.jpg", b"1"), ("NOTES", b"1")])
    write_shard(tmp_path / "b.tar", [("\udcff.jpg", b"2"), ("\udcfe", b"2")])
    tables = discover_dataset(tmp_path).to_arrow()
    assert [bytes(key) for key in tables["samples"].column("key").to_pylist()] == [b"a", b"\xff"]
    assert [bytes(name) for name in tables["others"].column("name").to_pylist()] == [b"NOTES", b"\xfe"]


@pytest.mark.usefixtures("grouped")
def test_records_say_what_the_catalog_knows_without_opening_a_shard(shards):
    folder, expected = shards
    len(discover_dataset(folder))
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    order = random.Random(3).sample(range(18), 18)
    records = dataset.rows(order)
    for number, record in zip(order, records, strict=True):
        sample = expected[number]
        assert record == dataset.row(number)
        assert record.key == sample.key
        assert record.fields == tuple(part.suffix for part in sample.parts)
        assert record.offsets == tuple(part.offset for part in sample.parts)
        assert record.lengths == tuple(len(part.payload) for part in sample.parts)
        assert record.shard_index == dataset[number].shard_index
        assert (record.geometry, record.caption) == (None, None)
    assert store.calls["open"] == 0
    for wrong in (18, -1):
        with pytest.raises(IndexError):
            dataset.row(wrong)
        with pytest.raises(IndexError):
            dataset.rows([0, wrong])
    assert dataset.rows([]) == []


@pytest.mark.usefixtures("grouped")
def test_oddities_are_listed_with_their_shard(shards):
    folder, _ = shards
    dataset = discover_dataset(folder)
    assert [(url, fault.code, fault.member) for url, fault in dataset.faults()] == [
        (str(folder / "sub" / "y.tar"), "repeated_key", "b.txt")
    ]
    assert dataset.report.counts == {"repeated_key": 1}


# ---- webshart's numbering


def test_files_are_listed_in_path_order_and_samples_without_their_sidecars():
    dataset = discover_dataset(PHOTOS / "photos-00000.tar")
    members = read_members(PHOTOS / "photos-00000.tar")
    assert dataset.list_files_in_shard(0) == sorted(members)
    assert dataset.list_samples_in_shard(0) == [
        name for name in sorted(members) if not name.endswith((".json", ".txt"))
    ]
    assert dataset.get_shard_file_count(0) == len(members)
    assert dataset.get_shard_sample_count(0) == 10


def test_a_shard_reader_reads_by_both_numbers():
    dataset = discover_dataset(PHOTOS / "photos-00000.tar")
    members = read_members(PHOTOS / "photos-00000.tar")
    reader = dataset.open_shard(0)
    assert (reader.num_files, reader.num_samples) == (len(members), 10)
    assert repr(reader) == f"ShardReader(num_files={len(members)}, num_samples=10)"
    assert reader.filenames() == dataset.list_files_in_shard(0)
    assert [reader.read_file(n) for n in range(reader.num_files)] == [members[name] for name in sorted(members)]
    for number, name in enumerate(reader.sample_filenames()):
        assert reader.read_sample(number) == members[name]
        assert reader.read_sample_json(number) == members.get(f"{name.rpartition('.')[0]}.json")


def test_files_of_no_sample_are_reached_as_files(shards):
    dataset = discover_dataset(shards[0])
    assert dataset.list_files_in_shard(4) == ["README", "a.jpg", "b.jpg", "b.txt"]
    assert dataset.list_samples_in_shard(4) == ["README", "a.jpg", "b.jpg"]
    assert dataset.open_shard(4).read_file(0) == b"r"
    assert dataset.total_files == 3 * 12 + 6 + 4


def test_shard_info_is_webshart_s(shards):
    folder, _ = shards
    dataset = discover_dataset(folder)
    path = folder / "sub" / "y.tar"
    info = {
        "name": "sub/y",
        "tar_path": str(path),
        "json_path": str(path.with_suffix(".json")),
        "num_files": 4,
        "num_samples": 3,
        "size": path.stat().st_size,
    }
    assert dataset.get_shard_info(4) == info
    assert dataset.get_shard_by_name("sub/y") == info
    with pytest.raises(ValueError, match="'y' not found"):
        dataset.get_shard_by_name("y")


def test_the_index_of_a_shard_is_looked_for_in_the_folder_that_was_named(shards, tmp_path):
    dataset = discover_dataset(shards[0], metadata=tmp_path / "meta")
    assert dataset.get_shard_info(3)["json_path"] == str(tmp_path / "meta" / "sub" / "x.json")


def test_files_are_found_by_their_number_through_all_shards(shards):
    dataset = discover_dataset(shards[0])
    counts = [dataset.get_shard_file_count(i) for i in range(5)]
    places = [(shard, file) for shard, count in enumerate(counts) for file in range(count)]
    assert [dataset.find_file_location(number) for number in range(sum(counts))] == places
    for wrong in (sum(counts), -1, 1 << 70):
        with pytest.raises(IndexError, match="out of range"):
            dataset.find_file_location(wrong)


@pytest.mark.parametrize("shard", [5, -1, 1 << 70])
def test_a_shard_that_is_not_there_is_an_index_error_everywhere(shards, shard):
    dataset = discover_dataset(shards[0])
    calls = [
        dataset.list_files_in_shard,
        dataset.list_samples_in_shard,
        dataset.get_shard_info,
        dataset.get_shard_file_count,
        dataset.get_shard_sample_count,
        dataset.open_shard,
        dataset.shard_url,
        dataset.reader,
        dataset.files,
    ]
    for call in calls:
        with pytest.raises(IndexError, match=f"shard index {shard} out of range"):
            call(shard)


def test_calls_for_one_shard_read_that_shard_alone(shards):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(shards[0], store=store)
    dataset.list_files_in_shard(3)
    assert {url for url, _, _ in store.ranges} == {dataset.shard_url(3)}


@pytest.mark.slow
def test_many_shards_may_be_looked_into(tmp_path):
    write_dataset(tmp_path, shards=140, samples=1, fields=("txt",))
    dataset = discover_dataset(tmp_path)
    assert [dataset.list_files_in_shard(i) for i in range(140)] == [[f"{i:08d}.txt"] for i in range(140)]
    assert [bytes(s["txt"]) for s in dataset.read_samples(range(139, -1, -1))] == [
        sample["txt"] for sample in reversed(dataset[:])
    ]


# ---- damage


def test_a_damaged_shard_raises_with_its_place_or_is_indexed_up_to_the_damage(shards):
    folder, _ = shards
    path = folder / "shard-0001.tar"
    os.truncate(path, 7 * 1024 + 515)
    with pytest.raises(TruncatedError) as caught:
        len(discover_dataset(folder))
    assert (caught.value.shard, caught.value.offset) == (str(path), 7 * 1024)
    dataset = discover_dataset(folder, policy=Policy(on_error="skip"))
    assert [sample.key for sample in dataset if sample.shard_index == 1] == ["00000004", "00000005", "00000006"]
    assert list(dataset[6]) == ["jpg"]
    assert dataset.report.counts == {"repeated_key": 1, "truncated_payload": 1}
    assert dataset.report.places("truncated_payload")[0].shard == str(path)
    # What was let pass once is not let pass for ever.
    with pytest.raises(TruncatedError) as caught:
        len(discover_dataset(folder))
    assert caught.value.offset == 7 * 1024
    with pytest.raises(TruncatedError):
        open_dataset(dataset.catalog.folder)
    again = discover_dataset(folder, policy=Policy(on_error="warn"))
    assert len(again) == len(dataset)
    assert again.report.counts == {"truncated_payload": 1}
    with pytest.raises(TruncatedError):
        discover_dataset(folder).list_files_in_shard(1)


def test_an_oddity_raises_from_a_catalog_too_where_its_code_says_so(shards):
    folder, _ = shards
    len(discover_dataset(folder))
    with pytest.raises(ValueError, match="key came before") as caught:
        len(discover_dataset(folder, policy=Policy(codes={"repeated_key": "raise"})))
    assert caught.value.code == "repeated_key"


def test_warnings_of_a_policy_are_logged(shards, caplog):
    folder, _ = shards
    os.truncate(folder / "shard-0001.tar", 7 * 1024 + 515)
    for _ in range(2):  # when the catalog is made, and when it is found
        caplog.clear()
        len(discover_dataset(folder, policy=Policy(on_error="warn")))
        assert [record.message for record in caplog.records if "shard-0001" in record.message]


# ---- shards that change


@pytest.mark.parametrize("open_by", ["source", "catalog"])
@pytest.mark.parametrize("how", ["cut", "replaced", "deleted"])
def test_a_shard_that_changed_after_it_was_indexed_is_named_and_never_read(shards, open_by, how):
    folder, expected = shards
    len(discover_dataset(folder))
    dataset = discover_dataset(folder)
    len(dataset)
    if open_by == "catalog":
        dataset = open_dataset(dataset.catalog.folder)
    path = folder / "shard-0001.tar"
    if how == "cut":
        os.truncate(path, 1024)
    elif how == "replaced":
        other = path.with_name("new")
        other.write_bytes(tar_bytes(make_members(4, start=50)))
        shutil.copystat(path, other)
        other.replace(path)
    else:
        path.unlink()
    kind = NotFoundError if how == "deleted" else ChangedError
    calls = [
        lambda: dataset[5]["jpg"],
        lambda: dataset[5].view("jpg"),
        lambda: dataset[5].open("jpg"),
        lambda: dataset.read_samples([0, 5]),
        lambda: list(dataset.iter_dicts(start=4)),
        lambda: dataset.list_files_in_shard(1),
        lambda: dataset.get_shard_file_count(1),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.url == str(path)
    assert dataset[0]["jpg"] == expected[0].fields["jpg"]
    assert dataset[-1].key == expected[-1].key
    assert dataset[5].key == expected[5].key  # what the catalog knows, it knows


@pytest.mark.parametrize("mmap", [True, False])
def test_a_shard_that_is_cut_while_it_is_open_is_noticed(shards, mmap):
    folder, _ = shards
    dataset = discover_dataset(folder, store=LocalStore(mmap=mmap))
    payload = dataset[5]["jpg"]
    path = folder / "shard-0001.tar"
    os.truncate(path, 1024)
    for call in (lambda: dataset[7]["txt"], lambda: dataset[7].view("txt"), lambda: dataset.read_samples([0, 7])):
        with pytest.raises(ChangedError, match="cut") as caught:
            call()
        assert caught.value.url == str(path)
    assert payload.startswith(b"00000005.jpg")


def test_a_shard_that_is_replaced_while_it_is_open_goes_on_being_read_as_it_was(shards):
    folder, expected = shards
    dataset = discover_dataset(folder)
    assert dataset[5].read() == expected[5].fields
    path = folder / "shard-0001.tar"
    replace_file(path, tar_bytes(make_members(4, start=50)))
    assert dataset[5].read() == expected[5].fields
    path.unlink()
    assert dataset[6].read() == expected[6].fields


def test_a_shard_that_changes_between_finding_and_indexing_is_noticed(shards):
    folder, _ = shards
    dataset = discover_dataset(folder)
    write_shard(folder / "shard-0001.tar", make_members(9))
    with pytest.raises(ChangedError, match=r"shard-0001\.tar"):
        len(dataset)
    assert len(discover_dataset(folder)) == 18 - 4 + 9


@pytest.mark.usefixtures("grouped")
def test_a_sample_is_left_out_and_counted_where_the_policy_says_so(shards):
    folder, expected = shards
    len(discover_dataset(folder))
    dataset = discover_dataset(folder, policy=Policy(on_error="skip"))
    len(dataset)
    write_shard(folder / "shard-0001.tar", make_members(9))
    keys = [sample.key for sample in expected]
    assert [sample["__key__"] for sample in dataset.iter_dicts()] == keys[:4] + keys[8:]
    assert dataset.report.counts == {"read_failed": 4}
    assert dataset.report.places("read_failed")[0].key == keys[4]
    assert [sample and sample["__key__"] for sample in dataset.read_samples([0, 4, 9, 5])] == [
        keys[0],
        None,
        keys[9],
        None,
    ]
    assert dataset.read_field([0, 4], "jpg", copy=True) == [expected[0].fields["jpg"], None]


# ---- processes and threads


@pytest.mark.slow
def test_a_pickled_dataset_is_the_path_of_its_catalog(tmp_path):
    write_dataset(tmp_path / "some", shards=2, samples=1, fields=("txt",))
    write_dataset(tmp_path / "many", shards=300, samples=1, fields=("txt",))
    few, many = (discover_dataset(tmp_path / name) for name in ("some", "many"))
    pickled = pickle.dumps(many)
    assert len(pickled) == len(pickle.dumps(few)) < 1500
    copy = pickle.loads(pickled)
    assert len(copy) == 300
    assert copy[277]["txt"] == many[277]["txt"]
    assert copy.list_files_in_shard(5) == many.list_files_in_shard(5)
    assert len(pickle.dumps(copy)) == len(pickled)
    assert copy.catalog.folder == many.catalog.folder


def test_a_pickled_dataset_keeps_policy_store_and_the_folder_of_its_indexes(shards, tmp_path):
    policy = Policy(on_missing="skip", defaults={"cls": b"0"})
    dataset = discover_dataset(
        shards[0], policy=policy, store=LocalStore(mmap=False, max_open=100), metadata=tmp_path / "meta"
    )
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.policy == policy
    assert repr(copy._store) == "LocalStore(mmap=False, max_open=100)"
    assert copy.get_shard_info(3)["json_path"] == dataset.get_shard_info(3)["json_path"]
    assert read_all(copy) == read_all(dataset)


def test_a_dataset_whose_catalog_was_made_anew_says_so_where_it_arrives(shards):
    folder, _ = shards
    dataset = discover_dataset(folder)
    pickled = pickle.dumps(dataset)
    write_shard(folder / "shard-0001.tar", make_members(9))
    len(discover_dataset(folder))
    with pytest.raises(StateError, match="written again"):
        pickle.loads(pickled)


def test_a_dataset_in_memory_takes_its_shards_along():
    store = MemoryStore()
    store.write("memory://b/a.tar", tar_bytes(make_members(3)))
    dataset = discover_dataset("memory://b", store=store)
    assert read_all(pickle.loads(pickle.dumps(dataset))) == read_all(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_other_processes_read_the_same_payloads(shards, method):
    folder, _ = shards
    dataset = discover_dataset(folder)
    expected = read_all(dataset)  # and so files and maps are open before the fork
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of threads beside a fork
        process = context.Process(target=send, args=(queue, read_all, dataset))
        process.start()
    assert queue.get(timeout=60) == expected
    process.join(60)
    assert process.exitcode == 0
    assert read_all(dataset) == expected


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.usefixtures("grouped")
def test_threads_may_share_a_dataset(shards, mmap):
    folder, expected = shards
    dataset = discover_dataset(folder, store=LocalStore(mmap=mmap, max_open=2))
    failures = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(30):
                number = rng.randrange(18)
                if dataset[number].read() != expected[number].fields:
                    failures.append(number)
                numbers = [rng.randrange(18) for _ in range(5)]
                batch = dataset.read_samples(numbers)
                if [sample["__key__"] for sample in batch] != [expected[n].key for n in numbers]:
                    failures.append(numbers)
                if dataset.find(expected[number].key).key != expected[number].key:
                    failures.append(expected[number].key)
                dataset.list_files_in_shard(number % 5)
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- opened by the catalog


@pytest.mark.usefixtures("grouped")
def test_a_dataset_is_opened_by_its_catalog_alone(shards):
    folder, expected = shards
    result = index_dataset(folder)
    dataset = open_dataset(result.folder)
    assert dataset.name == str(result.folder)
    assert dataset.num_shards == 5
    assert dataset.total_size == sum(path.stat().st_size for path in folder.rglob("*.tar"))
    assert not dataset.is_remote
    assert read_all(dataset) == [(sample.key, sample.fields) for sample in expected]
    assert dataset.list_files_in_shard(4) == ["README", "a.jpg", "b.jpg", "b.txt"]
    assert dataset.get_shard_by_name("sub/x")["tar_path"] == str(folder / "sub" / "x.tar")
    assert dataset.find("x/00000001", shard="sub/x")["cls"]


def test_a_folder_that_moves_takes_its_catalog_along(shards, tmp_path):
    folder, expected = shards
    index_dataset(folder)
    moved = tmp_path / "moved"
    folder.rename(moved)
    for dataset in (open_dataset(moved / ".shardset"), discover_dataset(moved)):
        assert dataset.catalog.folder == moved / ".shardset"
        assert read_all(dataset) == [(sample.key, sample.fields) for sample in expected]
        assert dataset[0].shard == str(moved / "shard-0000.tar")
        assert read_all(pickle.loads(pickle.dumps(dataset)))[0][0] == expected[0].key
        assert dataset.report.counts == {}


def test_opening_a_catalog_looks_at_no_shard(shards):
    folder, expected = shards
    result = index_dataset(folder)
    for path in folder.rglob("*.tar"):
        path.unlink()
    dataset = open_dataset(result.folder)
    assert [sample.key for sample in dataset] == [sample.key for sample in expected]
    with pytest.raises(NotFoundError, match=r"shard-0000\.tar"):
        dataset[0]["jpg"]


@pytest.mark.usefixtures("grouped")
def test_sparse_files_are_read_in_batches_too(tmp_path):
    segments = Segments(((1024, b"abc" * 200), (4096, b"tail")), 5000)
    for number in range(3):
        made = archive(
            member(b"a.txt", b"1"),
            sparse_old(b"a.bin", segments),
            member(b"b.txt", b"2"),
            sparse_old(b"b.bin", segments),
        )
        (tmp_path / f"{number}.tar").write_bytes(made.data)
    dataset = discover_dataset(tmp_path)
    assert [sample["bin"] for sample in dataset.iter_dicts()] == [segments.payload] * 6
    assert [bytes(sample["bin"]) for sample in dataset.read_samples([5, 0, 3])] == [segments.payload] * 3
    assert [sample["txt"] for sample in dataset.iter_dicts(["txt"])] == [b"1", b"2"] * 3
