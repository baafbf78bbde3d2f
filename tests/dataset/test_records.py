"""TFRecord shards in a dataset: read as any others, checked as they are read."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import random

import numpy as np
import pytest

from shards import private_cache, write_shard
from shardset import Policy, TarDataLoader, discover_dataset, index_dataset
from shardset.dataset.record_sample import RecordSample
from shardset.errors import ChecksumError, DecodeError, IndexFileError, LimitError, MissingFieldError
from shardset.formats.example import encode_example, encode_sequence_example
from shardset.storage import MemoryStore
from storage.counting import CountingStore
from tfrecords import FOREIGN, frame, make_payloads, record_bytes

__all__ = ["private_cache"]  # for pytest: catalogs go to a folder of each test's own


def example(number):
    return encode_example(
        {
            "label": [number],
            "image/encoded": [b"\xff\xd8" + bytes([number % 256]) * (number % 50)],
            "box": np.array([0.5, number], np.float32),
            **({"rare": [b"x"]} if number % 3 == 0 else {}),
        }
    )


@pytest.fixture
def folder(tmp_path):
    """Three shards of 40 examples, the second compressed."""
    root = tmp_path / "records"
    root.mkdir()
    for shard in range(3):
        content = record_bytes([example(number) for number in range(shard * 40, shard * 40 + 40)])
        path = root / f"train-{shard:05d}-of-00003.tfrecord"
        if shard == 1:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
        else:
            path.write_bytes(content)
    return root


def test_records_of_all_shards_are_samples_of_one_dataset(folder):
    dataset = discover_dataset(folder)
    assert len(dataset) == 120
    sample = dataset[77]
    assert isinstance(sample, RecordSample)
    assert sample.record == example(77)
    assert sample.key == "37"
    assert sample["label"].tolist() == [77]
    assert sample["image/encoded"] == [b"\xff\xd8" + bytes([77]) * 27]
    assert sample["box"].tolist() == [0.5, 77.0]
    assert sample.fields == ("box", "image/encoded", "label")
    assert dict(dataset[0].items()).keys() == {"box", "image/encoded", "label", "rare"}
    assert "rare" in dataset[0]
    assert "rare" not in dataset[1]
    assert len(dataset[0]) == 4
    assert [sample["label"][0] for sample in dataset[38:42]] == [38, 39, 40, 41]
    assert [sample["label"][0] for sample in dataset] == list(range(120))
    assert dataset[-1]["label"].tolist() == [119]


def test_dicts_hold_features_by_name(folder):
    dataset = discover_dataset(folder)
    dicts = list(dataset.iter_dicts(["label", "box"]))
    assert [each["label"][0] for each in dicts] == list(range(120))
    assert [each["__key__"] for each in dicts][38:42] == ["38", "39", "0", "1"]
    assert set(dicts[0]) == {"__key__", "label", "box"}
    order = random.Random(3).sample(range(120), 64)
    many = dataset.read_samples(order, ["image/encoded"])
    assert [bytes(each["image/encoded"][0]) for each in many] == [dataset[i]["image/encoded"][0] for i in order]
    assert [label[0] for label in dataset.read_field(order, "label")] == order


def test_payloads_are_read_whole_from_anywhere(folder):
    dataset = discover_dataset(folder)
    order = [119, 0, 41, 79, 80, 0]
    assert dataset.read_records(order) == [example(number) for number in order]
    assert [bytes(view) for view in dataset.read_records(order, copy=False, verify=False)] == dataset.read_records(
        order
    )
    assert list(dataset.iter_records()) == [example(number) for number in range(120)]
    assert list(dataset.iter_records(start=39, stop=41)) == [example(39), example(40)]
    with pytest.raises(IndexError):
        dataset.read_records([120])


def test_a_missing_feature_is_treated_as_the_policy_says(folder):
    with pytest.raises(MissingFieldError, match="'rare'"):
        list(discover_dataset(folder).iter_dicts(["rare"]))
    skipping = discover_dataset(folder, policy=Policy(on_missing="skip"))
    assert len(list(skipping.iter_dicts(["rare"]))) == 40
    assert skipping.report.counts["missing_field"] == 80
    filling = discover_dataset(folder, policy=Policy(defaults={"rare": None}))
    assert sum(each["rare"] is None for each in filling.iter_dicts(["rare"])) == 80
    with pytest.raises(MissingFieldError, match="it has 'box', 'image/encoded', 'label'") as caught:
        discover_dataset(folder)[1]["rare"]
    assert isinstance(caught.value, KeyError)


def damage(path, record, payloads):
    """Flip a bit in the payload of a record."""
    content = bytearray(path.read_bytes())
    at = sum(len(payload) + 16 for payload in payloads[:record]) + 12
    content[at + len(payloads[record]) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_record_is_never_given(folder):
    path = folder / "train-00000-of-00003.tfrecord"
    damage(path, 7, [example(number) for number in range(40)])
    dataset = discover_dataset(folder)
    for read in (
        lambda: dataset[7].record,
        lambda: dataset[7]["label"],
        lambda: dataset.read_records([3, 7]),
        lambda: dataset.read_samples([3, 7]),
        lambda: list(dataset.iter_dicts()),
        lambda: list(dataset.iter_records()),
        lambda: dataset.open_shard(0).read_sample(7),
        lambda: TarDataLoader(dataset).load_samples([(0, 7)]),
        lambda: list(TarDataLoader(dataset)),
    ):
        with pytest.raises(ChecksumError, match="record 7") as caught:
            read()
        assert caught.value.shard == str(path)
        assert caught.value.offset == sum(len(example(number)) + 16 for number in range(7))
        assert caught.value.expected != caught.value.actual
        assert caught.value.hint
    skipping = discover_dataset(folder, policy=Policy(on_error="skip"))
    assert len(list(skipping.iter_dicts())) == 119
    assert skipping.report.counts == {"bad_payload_checksum": 1}
    assert [place.key for place in skipping.report.places("bad_payload_checksum")] == ["7"]
    assert skipping.read_records([6, 7, 8])[1] is None


def test_records_behind_damage_are_found_if_the_policy_goes_on(tmp_path):
    payloads = make_payloads(200, seed=4)
    content = bytearray(record_bytes(payloads))
    at = sum(len(payload) + 16 for payload in payloads[:60])
    content[at : at + 4] = b"\xff\xff\xff\xff"
    del content[at + 30 : at + 33]
    (tmp_path / "a.tfrecord").write_bytes(content)
    with pytest.raises(ChecksumError, match="record 60"):
        len(discover_dataset(tmp_path))
    dataset = discover_dataset(tmp_path, policy=Policy(on_error="skip"))
    found = dataset.read_records(range(len(dataset)))
    assert found[:60] == payloads[:60]
    assert found[-100:] == payloads[-100:]
    assert set(found) - {None} <= set(payloads)  # a damaged payload is None
    assert len(found) >= 195
    assert dataset.report.counts["bad_length_checksum"] == 1
    assert dataset.report.counts["records_behind_damage"] == 1
    index_dataset(tmp_path, policy=Policy(on_error="skip"))
    assert json.loads((tmp_path / "a.tfrecord.json").read_bytes())["gaps"]
    again = discover_dataset(tmp_path, policy=Policy(on_error="skip"))
    assert again.read_records(range(len(again))) == found


def test_what_is_no_example_is_read_whole(tmp_path):
    payloads = [b"{}", b"\xff\xff\xff", b""]
    (tmp_path / "opaque.tfrecord").write_bytes(record_bytes(payloads))
    dataset = discover_dataset(tmp_path)
    assert dataset.read_records(range(3)) == payloads
    with pytest.raises(DecodeError, match="read_records"):
        dataset[1]["label"]
    with pytest.raises(DecodeError):
        list(dataset.iter_dicts())
    with pytest.raises(DecodeError) as caught:
        dataset.schema()
    assert (caught.value.shard, caught.value.key) == (str(tmp_path / "opaque.tfrecord"), "0")
    for read in (lambda each: list(each.iter_dicts()), lambda each: each.schema()):
        skipping = discover_dataset(tmp_path, policy=Policy(on_error="skip"))
        read(skipping)
        assert skipping.report.counts == {"bad_example": 2}
        assert [place.key for place in skipping.report.places("bad_example")] == ["0", "1"]


def test_the_lists_of_a_sequence_example_are_fields_too(tmp_path):
    raw = encode_sequence_example({"id": [5], "both": [b"c"]}, {"tokens": [[1, 2], [3]], "both": [[b"a"], [b"b"]]})
    (tmp_path / "sequence.tfrecord").write_bytes(record_bytes([raw]))
    sample = discover_dataset(tmp_path)[0]
    assert sample["id"].tolist() == [5]
    assert [step.tolist() for step in sample["tokens"]] == [[1, 2], [3]]
    assert sample["both"] == [b"c"]
    assert sample["feature_lists/both"] == [[b"a"], [b"b"]]


def test_a_bytes_feature_opens_as_a_file(folder):
    sample = discover_dataset(folder)[5]
    with sample.open("image/encoded") as file:
        assert file.read(2) == b"\xff\xd8"
    with pytest.raises(DecodeError, match="not one bytes value"):
        sample.open("label")
    with pytest.raises(LimitError, match="part of record"):
        sample.byte_range("label")
    place = sample.record_range
    content = (folder / "train-00000-of-00003.tfrecord").read_bytes()
    assert content[place.offset : place.end] == example(5)


def test_tar_and_tfrecord_shards_live_in_one_dataset(folder):
    write_shard(folder / "a.tar", [("one.txt", b"1"), ("two.txt", b"2")])
    dataset = discover_dataset(folder)
    assert len(dataset) == 122
    assert dataset[0]["txt"] == b"1"
    assert dataset[2]["label"].tolist() == [0]
    mixed = dataset.read_samples([1, 3, 0, 121])
    assert mixed[0]["txt"] == b"2"
    assert mixed[1]["label"].tolist() == [1]
    assert mixed[3]["label"].tolist() == [119]
    with pytest.raises(ValueError, match="tar"):
        dataset.read_records([0])


def test_webshart_s_calls_see_records_as_files(folder):
    dataset = discover_dataset(folder)
    assert dataset.list_samples_in_shard(1)[9:12] == ["9", "10", "11"]
    assert dataset.open_shard(1).read_sample(11) == example(51)
    assert dataset.get_shard_info(1)["num_samples"] == 40


def test_a_dataset_goes_to_other_processes(folder):
    dataset = pickle.loads(pickle.dumps(discover_dataset(folder)))
    assert dataset[50]["label"].tolist() == [50]
    if hasattr(os, "fork"):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(lambda_free_label, [(dataset, number) for number in (45, 50, 79, 3)]) == [45, 50, 79, 3]


def lambda_free_label(asked):
    dataset, number = asked
    return int(dataset[number]["label"][0])


def test_a_sidecar_index_is_used_and_extended_when_the_shard_has_grown(tmp_path):
    path = tmp_path / "a.tfrecord"
    payloads = make_payloads(30, seed=2)
    path.write_bytes(record_bytes(payloads[:20]))
    index_dataset(tmp_path)
    document = json.loads((tmp_path / "a.tfrecord.json").read_bytes())
    assert document["lengths"] == list(map(len, payloads[:20]))
    assert not discover_dataset(tmp_path).report
    with path.open("ab") as file:
        file.write(record_bytes(payloads[20:]))
    dataset = discover_dataset(tmp_path)
    assert dataset.read_records(range(30)) == payloads
    assert dataset.report.counts["grown_shard"] == 1
    path.write_bytes(record_bytes(make_payloads(60, seed=3)))
    dataset = discover_dataset(tmp_path)
    assert len(dataset) == 60
    assert dataset.report.counts["bad_index"] == 1


@pytest.mark.parametrize("suffix", [".idx", ".index", ".tfindex"])
def test_a_text_index_beside_the_shard_is_used_if_it_fits(suffix):
    payloads = [bytes([number]) * 5000 for number in range(200)]
    store = CountingStore(MemoryStore())
    store.write("memory://r/a.tfrecord", record_bytes(payloads))
    store.write(f"memory://r/a.tfrecord{suffix}", b"".join(b"%d 5016\n" % (at * 5016) for at in range(200)))
    assert discover_dataset("memory://r", store=store).read_records([199]) == [payloads[199]]
    assert sum(length for url, _, length in store.ranges if url.endswith("tfrecord")) < 20_000
    store.write(f"memory://r/a.tfrecord{suffix}", b"0 26\n")
    dataset = discover_dataset(["memory://r/a.tfrecord"], store=store)
    assert dataset.open_shard(0).read_sample(7) == payloads[7]
    assert dataset.report.counts == {"bad_index": 1}


def test_the_text_index_is_written_on_request(folder):
    result = index_dataset(folder, text_index=True)
    lines = (folder / "train-00000-of-00003.tfrecord.idx").read_text().splitlines()
    assert len(lines) == 40
    assert lines[0] == f"0 {len(example(0)) + 16}"
    assert not (folder / "train-00001-of-00003.tfrecord.gz.idx").exists()
    assert result.report.counts["no_text_index"] == 1


def test_the_same_parts_hold_each_sample_once(folder):
    dataset = discover_dataset(folder)
    parts = dataset.split(7)
    assert [number for part in parts for number in part] == list(range(120))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert list(map(len, dataset.split([0.9, 0.1]))) == [108, 12]
    assert list(map(len, dataset.split([1, 0, 1]))) == [60, 0, 60]
    assert sum(map(len, dataset.split(500))) == 120
    assert dataset.split(np.int64(2)) == dataset.split([1, 1]) == [range(60), range(60, 120)]
    for wrong in (0, [], [0.0], [-1, 2], [float("inf"), 1], [float("nan"), 1]):
        with pytest.raises(ValueError, match=r"part|share"):
            dataset.split(wrong)


def test_the_schema_counts_every_feature(folder):
    by_name = {feature.name: feature for feature in discover_dataset(folder).schema()}
    assert by_name["label"].kinds == ("int64",)
    assert by_name["label"].shape == (1,)
    assert by_name["box"].shape == (2,)
    assert by_name["rare"].records == 40
    assert by_name["rare"].missing == 80
    assert by_name["image/encoded"].kinds == ("bytes",)
    assert by_name["image/encoded"].missing == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mnist_20.tfrecord", 20),
        ("next_page.tfrecord.gz", 100),
        ("penguin-00000-of-00001.gz", 100),
        ("unlabelled_data_tfrecord-00008-of-00012.gz", 205),
        ("sequence_eval.gz", 4500),
    ],
)
def test_real_files_of_other_projects_are_read(name, count):
    dataset = discover_dataset(FOREIGN / name)
    assert len(dataset) == count
    path = FOREIGN / name
    content = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert (
        b"".join(map(frame, dataset.iter_records(stop=20)))
        == content[: sum(len(r) + 16 for r in dataset.iter_records(stop=20))]
    )
    assert all(each.keys() - {"__key__"} for each in dataset.iter_dicts(stop=20))


def test_a_feature_without_a_kind_is_none():
    sample = discover_dataset(FOREIGN / "sequence_eval.gz")[0]
    assert {name: sample[name] for name in ("i", "f")} == {"i": None, "f": None}


def test_the_index_of_a_compressed_shard_that_has_grown_is_not_used(tmp_path):
    path = tmp_path / "a.tfrecord.gz"
    payloads = make_payloads(60, seed=6)
    for count in (0, 20, 60):
        path.write_bytes(gzip.compress(record_bytes(payloads[:20])) * (count > 0) or gzip.compress(b""))
        if count == 60:
            path.write_bytes(path.read_bytes() + gzip.compress(record_bytes(payloads[20:])))
        dataset = discover_dataset(tmp_path)
        assert dataset.read_records(range(len(dataset))) == payloads[:count]
        index_dataset(tmp_path)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_an_index_that_knows_of_damage_is_not_used_once_the_shard_is_whole(tmp_path, packed):
    payloads = make_payloads(400, seed=7)
    content = record_bytes(payloads)
    content = gzip.compress(content) if packed else content
    path = tmp_path / "a.tfrecord"
    path.write_bytes(content[: len(content) // 2])
    skipping = Policy(on_error="skip")
    index_dataset(tmp_path, policy=skipping)
    assert len(discover_dataset(tmp_path, policy=skipping)) < 300
    path.write_bytes(content)
    assert discover_dataset(tmp_path).read_records(range(400)) == payloads
    if not packed:
        damaged = bytearray(content)
        damaged[0] ^= 1
        path.write_bytes(damaged)
        index_dataset(tmp_path, policy=skipping)
        path.write_bytes(content)
        assert len(discover_dataset(tmp_path)) == 400


def test_a_compressed_shard_replaced_by_another_of_its_size_is_read_anew(tmp_path):
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(record_bytes([b"a" * 40] * 3), mtime=0))
    index_dataset(tmp_path)
    other = gzip.compress(record_bytes([b"b" * 40] * 3), mtime=0)
    other = other.ljust(path.stat().st_size, b"\0")
    path.write_bytes(other)
    assert discover_dataset(tmp_path).read_records([2]) == [b"b" * 40]


def test_the_text_index_of_earlier_content_is_written_anew(tmp_path):
    path = tmp_path / "a.tfrecord"
    for count in (3, 7):
        path.write_bytes(record_bytes(make_payloads(count)))
        index_dataset(tmp_path, text_index=count == 3)
    index_dataset(tmp_path, text_index=True)
    assert len((tmp_path / "a.tfrecord.idx").read_text().splitlines()) == 7


def test_a_feature_called_key_is_no_key(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(record_bytes([encode_example({"__key__": [b"mine"], "a": [1]})]))
    dataset = discover_dataset(tmp_path)
    assert next(dataset.iter_dicts())["__key__"] == "0"
    assert dataset[0]["__key__"] == [b"mine"]


def test_fields_of_records_cannot_be_renamed_in_an_index(folder):
    index_dataset(folder)
    with pytest.raises(IndexFileError, match="TFRecord"):
        discover_dataset(folder).field_rename("a", "b")
