from __future__ import annotations

import random

import numpy as np
import pytest

from formats.tar_builder import Segments, archive, member, sparse_old, sparse_pax_01
from shards import make_members, private_cache, read_samples, write_dataset, write_shard  # noqa: F401 - one is autouse
from shardset.dataset.opening import discover_dataset
from shardset.errors import DuplicateFieldError, LimitError, MissingFieldError
from shardset.index import catalog_writer
from shardset.policy import Policy
from shardset.storage import LocalStore
from storage.counting import CountingStore

RAGGED = [
    *make_members(2),
    *make_members(2, start=2, fields=("jpg", "txt")),
    *make_members(1, start=4, fields=("txt", "jpg", "json")),
    *make_members(2, start=5),
]


@pytest.fixture(params=["one group", "a group each"])
def folder(request, tmp_path, monkeypatch):
    """Four shards of six samples each."""
    if request.param == "a group each":
        monkeypatch.setattr(catalog_writer, "GROUP_SHARDS", 1)
    write_dataset(tmp_path, shards=4, samples=6)
    return tmp_path


@pytest.fixture
def expected(folder):
    """What must be read of them, as dicts."""
    samples = [sample for path in sorted(folder.glob("*.tar")) for sample in read_samples(path)]
    return [{"__key__": sample.key, **sample.fields} for sample in samples]


@pytest.fixture
def ragged(tmp_path):
    """One shard with fields that differ from sample to sample."""
    return write_shard(tmp_path / "ragged.tar", RAGGED)


def as_bytes(sample):
    return {field: bytes(value) if field != "__key__" else value for field, value in sample.items()}


def test_samples_come_in_order_as_dicts_with_their_key_first(folder, expected):
    dataset = discover_dataset(folder)
    found = list(dataset.iter_dicts())
    assert found == expected
    assert [list(sample) for sample in found] == [["__key__", "jpg", "json", "txt"]] * 24
    assert all(type(sample["jpg"]) is bytes for sample in found)
    views = list(dataset.iter_dicts(copy=False))
    assert all(type(sample["jpg"]) is memoryview for sample in views)
    assert [as_bytes(sample) for sample in views] == expected


def test_a_shard_of_more_samples_than_are_read_at_once_is_read_whole(tmp_path):
    path = write_shard(tmp_path / "a.tar", make_members(600, fields=("txt",)))
    assert list(discover_dataset(path).iter_dicts()) == [
        {"__key__": sample.key, **sample.fields} for sample in read_samples(path)
    ]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (5, 7), (5, 19), (23, 24), (24, 24), (9, 3), (-3, None), (0, -20), (7, 10**9)]
)
def test_a_part_of_the_samples_is_as_python_slices_it(folder, expected, start, stop):
    assert list(discover_dataset(folder).iter_dicts(start=start, stop=stop)) == expected[start:stop]


def test_fields_are_given_in_the_order_asked_and_others_are_not_read(folder, expected):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    len(dataset)
    store.reset()
    found = list(dataset.iter_dicts(["txt", "jpg", "txt"]))
    assert found == [{"__key__": s["__key__"], "txt": s["txt"], "jpg": s["jpg"]} for s in expected]
    assert list(found[0]) == ["__key__", "txt", "jpg"]
    assert store.bytes_read == sum(len(s["txt"]) + len(s["jpg"]) for s in expected)
    assert store.calls["read_many"] == 4


def test_no_fields_are_keys_alone(folder, expected):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    len(dataset)
    store.reset()
    assert list(dataset.iter_dicts([])) == [{"__key__": sample["__key__"]} for sample in expected]
    assert dataset.read_samples([3, 20], []) == [{"__key__": expected[n]["__key__"]} for n in (3, 20)]
    assert store.bytes_read == 0


@pytest.mark.parametrize("store", [LocalStore(), LocalStore(mmap=False)])
def test_a_batch_from_anywhere_is_in_the_order_asked(folder, expected, store):
    dataset = discover_dataset(folder, store=store)
    rng = random.Random(5)
    for size in (1, 2, 5, 64):
        numbers = [rng.randrange(24) for _ in range(size)]
        for indices in (numbers, tuple(numbers), np.array(numbers), np.array(numbers, np.uint8)):
            assert [as_bytes(sample) for sample in dataset.read_samples(indices)] == [expected[n] for n in numbers]
        assert dataset.read_samples(numbers, copy=True) == [expected[n] for n in numbers]
        assert list(map(bytes, dataset.read_field(numbers, "json"))) == [expected[n]["json"] for n in numbers]
        assert dataset.read_field(numbers, "txt", copy=True) == [expected[n]["txt"] for n in numbers]


def test_a_batch_from_one_shard_is_one_call_to_its_store(folder):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    len(dataset)
    store.reset()
    dataset.read_samples([5, 0, 3, 0])
    assert store.calls["read_many"] == 1
    dataset.read_samples([23, 0, 13, 0, 22])
    assert store.calls["read_many"] == 4


@pytest.mark.parametrize("wrong", [[24], [-1], [0, 99, 1], [-25]])
def test_a_number_out_of_range_is_an_index_error_before_anything_is_read(folder, wrong):
    store = CountingStore(LocalStore())
    dataset = discover_dataset(folder, store=store)
    len(dataset)
    store.reset()
    for read in (dataset.read_samples, lambda numbers: dataset.read_field(numbers, "jpg")):
        with pytest.raises(IndexError, match="of a dataset of 24"):
            read(wrong)
    assert store.bytes_read == 0


def test_samples_with_unlike_fields_are_each_given_what_they_have(ragged):
    expected = [{"__key__": sample.key, **sample.fields} for sample in read_samples(ragged)]
    dataset = discover_dataset(ragged)
    found = list(dataset.iter_dicts())
    assert found == expected
    assert [list(sample) for sample in found] == [list(sample) for sample in expected]
    assert [as_bytes(sample) for sample in dataset.read_samples([6, 2, 4])] == [expected[n] for n in (6, 2, 4)]
    assert list(dataset.iter_dicts(["txt", "jpg"])) == [
        {"__key__": s["__key__"], "txt": s["txt"], "jpg": s["jpg"]} for s in expected
    ]


# ---- what is missing


def test_a_field_that_is_missing_raises_by_default(ragged):
    dataset = discover_dataset(ragged)
    assert len(list(dataset.iter_dicts(["json"], stop=2))) == 2
    for ask in (
        lambda: list(dataset.iter_dicts(["json"])),
        lambda: dataset.read_samples([0, 3], ["json"]),
        lambda: dataset.read_field([0, 3], "json"),
    ):
        with pytest.raises(MissingFieldError) as caught:
            ask()
        assert (caught.value.field, caught.value.shard) == ("json", str(ragged))
    assert dataset.report.counts == {}


def test_a_field_that_no_sample_has_raises_too(folder):
    dataset = discover_dataset(folder)
    for ask in (lambda: next(dataset.iter_dicts(["png"])), lambda: dataset.read_samples([3], ["png"])):
        with pytest.raises(MissingFieldError) as caught:
            ask()
        assert caught.value.hint == "it has 'jpg', 'json', 'txt'"


@pytest.mark.parametrize("action", ["skip", "warn"])
def test_samples_without_a_field_are_left_out_and_counted(ragged, action, caplog):
    dataset = discover_dataset(ragged, policy=Policy(on_missing=action))
    assert [int(sample["__key__"]) for sample in dataset.iter_dicts(["json"])] == [0, 1, 4, 5, 6]
    assert dataset.report.counts == {"missing_field": 2}
    assert [place.key for place in dataset.report.places("missing_field")] == ["00000002", "00000003"]
    assert [s and int(s["__key__"]) for s in dataset.read_samples([3, 5, 2], ["json"])] == [None, 5, None]
    assert [value is None for value in dataset.read_field([3, 5, 2], "json")] == [True, False, True]
    assert dataset.report.counts == {"missing_field": 6}
    warned = [record for record in caplog.records if "no field 'json'" in record.message]
    assert len(warned) == (6 if action == "warn" else 0)


def test_a_default_takes_the_place_of_a_missing_field_and_is_counted(ragged):
    dataset = discover_dataset(ragged, policy=Policy(defaults={"json": b"{}", "cls": None}))
    found = list(dataset.iter_dicts(["json"]))
    assert [sample["json"] == b"{}" for sample in found] == [False, False, True, True, False, False, False]
    assert dataset.report.counts == {"missing_field": 2}
    assert [sample["cls"] for sample in dataset.read_samples([1, 2], ["cls", "jpg"])] == [None, None]
    assert list(dataset.read_samples([1], ["cls", "jpg"])[0]) == ["__key__", "cls", "jpg"]
    assert dataset.read_field([2], "json") == [b"{}"]
    # A default is for what was asked for, and adds nothing to a sample that is read as it is.
    assert "cls" not in next(dataset.iter_dicts())


def test_what_happens_for_a_missing_field_is_not_what_happens_for_damage(ragged):
    dataset = discover_dataset(ragged, policy=Policy(on_error="skip"))
    with pytest.raises(MissingFieldError):
        list(dataset.iter_dicts(["json"]))
    assert dataset.report.counts == {}


def test_a_code_of_its_own_decides_before_the_general_action(ragged):
    dataset = discover_dataset(ragged, policy=Policy(codes={"missing_field": "skip"}))
    assert len(list(dataset.iter_dicts(["json"]))) == 5
    dataset = discover_dataset(ragged, policy=Policy(on_missing="skip", codes={"missing_field": "raise"}))
    with pytest.raises(MissingFieldError):
        list(dataset.iter_dicts(["json"]))


# ---- what is there twice


def test_a_field_that_occurs_twice_raises_only_when_it_is_read(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.txt", b"2"), ("a.JPG", b"3"), ("b.jpg", b"4")])
    dataset = discover_dataset(path)
    assert list(dataset.iter_dicts(["txt"], stop=1)) == [{"__key__": "a", "txt": b"2"}]
    for fields in (None, ["jpg"], ["txt", "jpg"]):
        with pytest.raises(DuplicateFieldError) as caught:
            list(dataset.iter_dicts(fields))
        assert caught.value.offsets == (512, 2560)
    dataset = discover_dataset(path, policy=Policy(on_error="skip"))
    assert list(dataset.iter_dicts()) == [{"__key__": "b", "jpg": b"4"}]
    assert dataset.read_samples([0, 1], ["jpg"], copy=True) == [None, {"__key__": "b", "jpg": b"4"}]
    assert dataset.report.counts == {"duplicate_suffix": 2}


def test_a_member_that_is_called_like_the_key_never_takes_its_place(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.__key__", b"not the key")])
    dataset = discover_dataset(path)
    assert list(dataset.iter_dicts(["jpg"])) == [{"__key__": "a", "jpg": b"1"}]
    with pytest.raises(DuplicateFieldError):
        list(dataset.iter_dicts())
    with pytest.raises(DuplicateFieldError):
        dataset.read_samples([0], ["__key__"])


def test_a_sparse_file_that_is_too_large_is_left_out_where_the_policy_says_so(tmp_path):
    made = archive(
        sparse_old(b"a.bin", Segments(((512, b"xyz"),), 700)), sparse_pax_01(b"b.bin", Segments(((0, b"x"),), 1 << 40))
    )
    (tmp_path / "a.tar").write_bytes(made.data)
    dataset = discover_dataset(tmp_path)
    with pytest.raises(LimitError):
        list(dataset.iter_dicts())
    dataset = discover_dataset(tmp_path, policy=Policy(on_error="skip"))
    assert [sample["__key__"] for sample in dataset.iter_dicts()] == ["a"]
    assert dataset.report.counts == {"sparse_member": 1}


def test_empty_payloads_are_payloads(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.jpg", b""), ("a.txt", b""), ("b.jpg", b""), ("b.txt", b"")])
    dataset = discover_dataset(path)
    assert list(dataset.iter_dicts()) == [{"__key__": key, "jpg": b"", "txt": b""} for key in "ab"]
    assert [bytes(view) for view in dataset.read_field([1, 0], "txt")] == [b"", b""]


def test_a_member_without_a_suffix_behind_its_dot_is_the_field_of_no_name(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.", b"1"), ("b.", b"2")])
    assert list(discover_dataset(path).iter_dicts([""])) == [{"__key__": "a", "": b"1"}, {"__key__": "b", "": b"2"}]


def test_samples_that_stand_beside_members_of_no_sample_are_not_mixed_up_with_them(tmp_path):
    made = archive(
        member(b"d/", typeflag=b"5", kind="dir"),
        member(b"README", b"r"),
        member(b"a.x", b"1"),
        member(b"N", b""),
        member(b"b.x", b"2"),
    )
    (tmp_path / "a.tar").write_bytes(made.data)
    assert [s["x"] for s in discover_dataset(tmp_path).iter_dicts()] == [b"1", b"2"]
