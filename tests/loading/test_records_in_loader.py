"""Records as a whole in the loader: the field ``__record__``, which is the payload of any record."""

from __future__ import annotations

import gzip
import pickle
import random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import shardset
from servers.nginx import serve_nginx
from shards import make_members, private_cache, write_shard
from shardset.dataset.record_parts import RecordParts
from shardset.dataset.record_sample import RECORD
from shardset.decoding.options import Decode
from shardset.errors import ChecksumError, DecodeError, MissingFieldError
from shardset.formats.example import encode_example, encode_sequence_example
from shardset.loading.fields import Fields, parse_fields
from shardset.loading.loader import Loader
from shardset.loading.order import Shuffle
from shardset.loading.read_ahead import ReadAhead
from shardset.policy import Policy
from shardset.storage import HttpStore, LocalStore, MemoryStore
from storage.counting import CountingStore
from tfrecords import make_payloads, payload_offsets, record_bytes

__all__ = ["private_cache"]

RECORDS = 25
WINDOWS = Shuffle(window_bytes=4_000, run_bytes=600, lanes=4)


def write_records(folder, shards, *, packed=()):
    """Write TFRecord shards of payloads; those of some numbers compressed with gzip."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, payloads in enumerate(shards):
        content = record_bytes(payloads)
        path = folder / f"train-{number:05d}-of-{len(shards):05d}.tfrecord"
        path.write_bytes(gzip.compress(content) if number in packed else content)
    return folder


@pytest.fixture
def opaque(tmp_path):
    """Three shards of records of any bytes, some empty; the second is compressed. And all payloads in order."""
    shards = [make_payloads(RECORDS, seed=seed) for seed in range(3)]
    return write_records(tmp_path / "opaque", shards, packed={1}), [each for shard in shards for each in shard]


def label(number):
    return encode_example({"label": [number], "name": [b"n%d" % number], "vector": np.full(3, number, np.float32)})


@pytest.fixture
def examples(tmp_path):
    """Two shards of Examples."""
    payloads = [label(number) for number in range(2 * RECORDS)]
    return write_records(tmp_path / "examples", [payloads[:RECORDS], payloads[RECORDS:]]), payloads


def by_index(batches, name=RECORD):
    """Return what batches have under a name, by the number of the sample."""
    return {
        index: bytes(value)
        for batch in batches
        for index, value in zip(batch["__index__"].tolist(), batch[name], strict=True)
    }


def loaded(dataset, fields=RECORD, **options):
    """Return all payloads in the order of the dataset."""
    found = by_index(Loader(dataset, 4, fields=fields, tail="exact", **options))
    return [found[index] for index in sorted(found)]


def both_ways(loader):
    """Return a loader that copies payloads, and one that gives views."""
    return loader, loader.views()


# Any bytes.


@pytest.mark.parametrize("shuffle", [False, True, "full", WINDOWS], ids=["no", "yes", "full", "windows"])
def test_records_of_any_bytes_are_loaded_as_they_are(opaque, shuffle):
    folder, payloads = opaque
    batches = list(Loader(shardset.discover_dataset(folder), 5, shuffle=shuffle, seed=2, fields=[RECORD]))
    assert by_index(batches) == dict(enumerate(payloads))
    for batch in batches:
        assert {type(record) for record in batch[RECORD]} == {bytes}
        assert {name for name in batch if not name.startswith("__")} == set()
        for key, index in zip(batch["__key__"], batch["__index__"].tolist(), strict=True):
            assert key == str(index % RECORDS)


@settings(max_examples=10, deadline=None)
@given(payloads=st.lists(st.binary(max_size=80), min_size=1, max_size=12), shuffle=st.booleans())
def test_whatever_stands_in_records_comes_out(tmp_path_factory, payloads, shuffle):
    folder = write_records(tmp_path_factory.mktemp("any"), [payloads])
    dataset = shardset.discover_dataset(folder)
    assert loaded(dataset, shuffle=shuffle) == payloads
    assert dataset.read_field(range(len(payloads)), RECORD, copy=True) == payloads


def test_nothing_is_parsed_where_records_alone_are_asked_for(examples, monkeypatch):
    def parse(*_, **__):
        raise AssertionError("a record is parsed")

    folder, payloads = examples
    dataset = shardset.discover_dataset(folder)
    for module in ("reading", "record_parts"):
        monkeypatch.setattr(f"shardset.dataset.{module}.parse_record", parse)
    for options in ({}, {"shuffle": True}, {"decode": True}):
        assert loaded(dataset, **options) == payloads
    (batch,) = Loader(dataset, 50, fields={"x": RECORD})
    assert batch["x"] == payloads


def test_other_messages_than_examples_are_records_too(tmp_path):
    pickled = pickle.dumps({"a": [1, 2]})
    sequence = encode_sequence_example({"n": [1]}, {"steps": [[1], [2, 3]]})
    folder = write_records(tmp_path / "records", [[pickled, sequence, b"{}", b""]])
    assert loaded(shardset.discover_dataset(folder)) == [pickled, sequence, b"{}", b""]


@pytest.mark.parametrize("kind", ["read", "memory", "counted"])
def test_what_is_read_ahead_holds_records(opaque, kind):
    folder, payloads = opaque
    if kind == "memory":
        store = MemoryStore()
        for path in sorted(folder.iterdir()):
            store.write(f"memory://opaque/{path.name}", path.read_bytes())
        dataset = shardset.discover_dataset("memory://opaque", store=store)
    else:
        store = LocalStore(mmap=False) if kind == "read" else CountingStore(LocalStore())
        dataset = shardset.discover_dataset(folder, store=store)
    for shuffle in (False, WINDOWS, "full"):
        for views in (False, True):
            for read_ahead in (None, ReadAhead(bytes=2_000)):
                loader = Loader(dataset, 5, shuffle=shuffle, fields=[RECORD], read_ahead=read_ahead)
                assert by_index(loader.views() if views else loader) == dict(enumerate(payloads))


@pytest.mark.slow
def test_each_byte_of_records_on_a_web_server_is_asked_for_once(tmp_path):
    payloads = make_payloads(120, longest=6_000)
    folder = write_records(tmp_path / "far", [payloads[:60], payloads[60:]])
    with serve_nginx(folder) as server:
        dataset = shardset.discover_dataset(server.url, store=HttpStore())
        assert len(dataset) == 120
        for shuffle in (False, Shuffle(window_bytes=40_000, run_bytes=8_000, lanes=4), True):
            for fields in ([RECORD], {"x": RECORD}, f"jpg;{RECORD}"):
                server.forget()
                loader = Loader(dataset, 5, shuffle=shuffle, fields=fields).views()
                name = "jpg" if "jpg" in fields else next(iter(fields))
                assert by_index(loader, name) == dict(enumerate(payloads))
                sent = sum(request.sent for request in server.requests() if ".tfrecord" in request.uri)
                assert sum(map(len, payloads)) <= sent == loader.metrics.bytes <= 1.1 * dataset.total_size


# Beside features, under other names, decoded.


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("decode", [None, True])
def test_records_stand_beside_their_features(examples, decode, views):
    folder, payloads = examples
    loader = Loader(shardset.discover_dataset(folder), 10, shuffle=True, fields=["label", RECORD], decode=decode)
    for batch in loader.views() if views else loader:
        assert [name for name in batch if name in {"label", RECORD}] == ["label", RECORD]
        assert batch["label"][:, 0].tolist() == batch["__index__"].tolist()
        assert list(map(bytes, batch[RECORD])) == [payloads[index] for index in batch["__index__"].tolist()]
        assert {type(each) for each in batch[RECORD]} == {memoryview if views and decode is None else bytes}


def test_a_view_of_a_record_is_one_of_the_map(examples):
    folder, payloads = examples
    dataset = shardset.discover_dataset(folder)
    for fields in ([RECORD], ["label", RECORD]):
        (batch,) = Loader(dataset, 50, fields=fields).views()
        assert list(map(bytes, batch[RECORD])) == payloads
        assert all(type(view) is memoryview and view.readonly for view in batch[RECORD])
        whole = dataset.reader(0).map()
        start = payload_offsets(payloads[:RECORDS])[3]
        address = np.frombuffer(whole, np.uint8).ctypes.data + start
        assert np.frombuffer(batch[RECORD][3], np.uint8).ctypes.data == address


def test_records_have_other_names_and_stand_under_several(examples):
    folder, payloads = examples
    dataset = shardset.discover_dataset(folder)
    (batch,) = Loader(dataset, 50, fields={"raw": RECORD})
    assert batch["raw"] == payloads
    assert RECORD not in batch
    (batch,) = Loader(dataset, 50, fields={"a": RECORD, "b": RECORD, "y": "label"}).views()
    assert list(map(bytes, batch["a"])) == list(map(bytes, batch["b"])) == payloads
    assert batch["y"][:, 0].tolist() == list(range(50))
    for wrong in ({"__raw": RECORD}, {RECORD: "label"}):
        with pytest.raises(ValueError, match="two underscores"):
            Loader(dataset, 4, fields=wrong)
    with pytest.raises(ValueError, match="named twice"):
        Loader(dataset, 4, fields=[RECORD, RECORD])


def test_without_names_of_fields_there_are_features_alone(examples):
    folder, _ = examples
    batch = next(iter(Loader(shardset.discover_dataset(folder), 4)))
    assert {name for name in batch if not name.startswith("__")} == {"label", "name", "vector"}
    assert RECORD not in batch


def test_a_feature_of_that_name_gives_way_to_the_record_where_it_is_named(tmp_path):
    payload = encode_example({RECORD: [b"a feature"], "__key__": [b"k"]})
    dataset = shardset.discover_dataset(write_records(tmp_path / "odd", [[payload]]))
    (batch,) = Loader(dataset, 1, fields=[RECORD])
    assert (batch[RECORD], batch["__key__"]) == ([payload], ["0"])
    (batch,) = Loader(dataset, 1)
    assert batch[RECORD] == [[b"a feature"]]
    assert dataset[0][RECORD] == [b"a feature"]


def test_an_alternative_is_the_record_where_there_is_no_such_feature(tmp_path):
    payloads = [label(1), encode_example({"jpg": [b"picture"]}), b"\xff no Example", b""]
    dataset = shardset.discover_dataset(write_records(tmp_path / "mixed", [payloads]))
    (batch,) = Loader(dataset, 4, fields=f"jpg;{RECORD}")
    assert batch["jpg"] == [label(1), [b"picture"], payloads[2], b""]
    (batch,) = Loader(dataset, 4, fields={"a": f"{RECORD};jpg", "b": RECORD})
    assert batch["a"] == batch["b"] == payloads
    (batch,) = Loader(dataset, 4, fields={"a": f"jpg;label;{RECORD}", "b": RECORD})
    assert batch["a"][0].tolist() == [1]
    assert batch["a"][1:] == [[b"picture"], *payloads[2:]]
    assert batch["b"] == payloads
    for fields in ({"a": f"jpg;{RECORD}", "y": "label"}, {"a": f"jpg;{RECORD}", "y": "label;cls"}):
        with pytest.raises(MissingFieldError, match="record 1"):
            next(iter(Loader(dataset, 4, fields=fields)))
        with pytest.raises(DecodeError, match=RECORD):
            list(Loader(dataset, 1, fields=fields, policy=Policy(on_missing="skip")))


def test_the_parts_that_are_read_follow_from_the_names():
    fields = parse_fields({"a": f"{RECORD};x", "b": f"y;{RECORD};z", "c": "w"})
    records = fields.of_records()
    assert records.names == {"a": (RECORD,), "b": ("y", RECORD), "c": ("w",)}
    assert (set(records.required), records.optional) == ({RECORD, "w"}, ("y",))
    assert not records.is_payload
    assert parse_fields({"x": RECORD}).of_records().is_payload
    assert Fields(None).of_records() == (None, None, ())
    assert RecordParts.of(None) == (None, (), False, False, False)
    assert RecordParts.of([]) == ((), (), False, False, False)
    assert RecordParts.of([RECORD]) == ((), (), True, True, False)
    assert RecordParts.of([RECORD, "a"]) == (("a",), ("a",), True, False, False)
    assert RecordParts.of([], ["a", RECORD]) == (("a",), (), True, False, True)


def test_records_are_decoded_by_a_function_or_a_word(tmp_path):
    payloads = [pickle.dumps(number) for number in range(20)]
    dataset = shardset.discover_dataset(write_records(tmp_path / "pickles", [payloads]))
    for fields in ([RECORD], {"value": RECORD}):
        name = next(iter(fields))
        for decode in ({RECORD: pickle.loads}, {name: pickle.loads}):
            for loader in both_ways(Loader(dataset, 20, fields=fields, decode=Decode(fields=decode))):
                (batch,) = loader
                assert batch[name].tolist() == list(range(20))
    (batch,) = Loader(dataset, 20, fields=[RECORD], decode=Decode(fields={RECORD: "bytes"}))
    assert batch[RECORD] == payloads
    texts = shardset.discover_dataset(write_records(tmp_path / "json", [[b'{"a": 1}', b"[2]"]]))
    (batch,) = Loader(texts, 2, fields=[RECORD], decode=Decode(fields={RECORD: "json"}))
    assert batch[RECORD] == [{"a": 1}, [2]]
    (batch,) = Loader(texts, 2, fields=[RECORD], decode=Decode(fields={RECORD: "file"}))
    assert batch[RECORD] == [b'{"a": 1}', b"[2]"]


def test_pictures_that_are_records_come_out_as_arrays(tmp_path):
    path = tmp_path / "x.png"
    Image.new("RGB", (6, 4), (1, 2, 3)).save(path)
    dataset = shardset.discover_dataset(write_records(tmp_path / "pictures", [[path.read_bytes()] * 3]))
    (batch,) = Loader(dataset, 3, fields=[RECORD], decode=Decode(fields={RECORD: "image"}))
    assert batch[RECORD].shape == (3, 4, 6, 3)
    assert batch[RECORD][1, 0, 0].tolist() == [1, 2, 3]


def measure(sample):
    return {"length": len(sample[RECORD]), "index": sample["__index__"]}


def test_functions_of_samples_get_records(opaque):
    folder, payloads = opaque
    dataset = shardset.discover_dataset(folder)
    for loader in both_ways(Loader(dataset, 5, fields=[RECORD])):
        for batch in loader.map(measure):
            assert batch["length"].tolist() == [len(payloads[index]) for index in batch["index"].tolist()]
        sizes = [sum(each) for each in loader.collate(lambda samples: [len(sample[RECORD]) for sample in samples])]
        assert sum(sizes) == sum(map(len, payloads))


@pytest.mark.slow
def test_functions_in_other_processes_get_records(opaque):
    folder, payloads = opaque
    loader = Loader(shardset.discover_dataset(folder), 5, fields=[RECORD], decode=Decode(fields={RECORD: bytes.hex}))
    found = {}
    for batch in loader.views().map(measure, processes=2):
        found |= dict(zip(batch["index"].tolist(), batch["length"].tolist(), strict=True))
    assert found == {index: 2 * len(payload) for index, payload in enumerate(payloads)}


# What is wrong.


def damaged(tmp_path, number=7):
    """Write two shards, and flip a bit of a record of the second; return the dataset and the payloads."""
    payloads = [label(each) for each in range(20)]
    folder = write_records(tmp_path / "damaged", [payloads[:10], payloads[10:]])
    path = folder / "train-00001-of-00002.tfrecord"
    content = bytearray(path.read_bytes())
    content[payload_offsets(payloads[10:])[number] + 2] ^= 1
    path.write_bytes(content)
    return shardset.discover_dataset(folder), payloads


@pytest.mark.parametrize("fields", [RECORD, {"raw": RECORD}, [RECORD, "label"], f"jpg;{RECORD}"])
@pytest.mark.parametrize("views", [False, True])
def test_a_damaged_record_is_never_given(tmp_path, fields, views):
    dataset, payloads = damaged(tmp_path)
    loader = Loader(dataset, 5, fields=fields)
    with pytest.raises(ChecksumError, match=r"record 7 .*train-00001-of-00002"):
        list(loader.views() if views else loader)
    name = next(iter(fields)) if not isinstance(fields, str) else fields.partition(";")[0]
    loader = Loader(dataset, 5, fields=fields, policy=Policy("skip"))
    loader = loader.views() if views else loader
    found = by_index(loader, name)
    assert found == {index: payloads[index] for index in found}
    assert 17 not in found
    assert loader.report.counts == {"bad_payload_checksum": 1, "substituted": 1}
    loader = Loader(dataset, 5, fields=fields, policy=Policy("skip"), tail="exact")
    assert sorted(by_index(loader, name)) == [index for index in range(20) if index != 17]
    assert loader.report.counts == {"bad_payload_checksum": 1}


def test_a_default_stands_in_for_a_record_that_cannot_be_read_or_decoded(tmp_path):
    dataset, payloads = damaged(tmp_path)
    loader = Loader(dataset, 20, fields=[RECORD], policy=Policy("skip", defaults={RECORD: b"nothing"}))
    (batch,) = loader
    assert batch[RECORD] == [*payloads[:17], b"nothing", *payloads[18:]]
    assert loader.report.counts == {"bad_payload_checksum": 1}
    opaque = shardset.discover_dataset(write_records(tmp_path / "numbers", [[b"1", b"two", b"3"]]))
    loader = Loader(
        opaque, 3, fields=[RECORD], decode=Decode(fields={RECORD: int}), policy=Policy(defaults={RECORD: -1})
    )
    (batch,) = loader
    assert batch[RECORD].tolist() == [1, -1, 3]
    assert loader.report.counts == {"decode_failed": 1}
    with pytest.raises(DecodeError, match=f"{RECORD}.*'1'"):
        list(Loader(opaque, 3, fields=[RECORD], decode=Decode(fields={RECORD: int})))


def test_who_asks_for_features_of_what_is_no_example_is_told_of_the_field(opaque):
    folder, _ = opaque
    dataset = shardset.discover_dataset(folder)
    for fields in (None, ["label"], [RECORD, "label"]):
        with pytest.raises((DecodeError, MissingFieldError)):
            list(Loader(dataset, 5, fields=fields, tail="exact"))
    folder = write_records(folder.parent / "one", [[b"\xff\xff no Example"]])
    for fields in (None, ["label"], {"y": "label"}, {"y": "label;cls"}, [RECORD, "label"]):
        with pytest.raises(DecodeError) as caught:
            list(Loader(shardset.discover_dataset(folder), 1, fields=fields))
        assert f'fields=["{RECORD}"]' in caught.value.hint
        loader = Loader(shardset.discover_dataset(folder), 1, fields=fields, policy=Policy("skip"), tail="exact")
        assert [batch["__key__"] for batch in loader] == [[]]
        assert loader.report.counts == {"bad_example": 1}


def test_samples_of_tars_have_no_such_field(tmp_path):
    write_shard(tmp_path / "tars" / "a.tar", make_members(6))
    tars = shardset.discover_dataset(tmp_path / "tars")
    with pytest.raises(ValueError, match=f"no sample has a field '{RECORD}'"):
        next(iter(Loader(tars, 2, fields=[RECORD])))
    write_records(tmp_path / "tars", [[b"one", b"two"]])
    both = shardset.discover_dataset(tmp_path / "tars")
    with pytest.raises(MissingFieldError, match=RECORD):
        list(Loader(both, 2, fields=[RECORD]))
    loader = Loader(both, 2, fields=[RECORD], policy=Policy(on_missing="skip"), tail="exact")
    assert [record for batch in loader for record in batch[RECORD]] == [b"one", b"two"]
    assert loader.report.counts == {"missing_field": 6}
    loader = Loader(both, 8, fields=[RECORD], policy=Policy(defaults={RECORD: b"?"}))
    (batch,) = loader
    assert sorted(batch[RECORD]) == [*[b"?"] * 6, b"one", b"two"]
    assert loader.report.counts == {"missing_field": 6}
    jpgs = [payload for name, payload in make_members(6) if name.endswith("jpg")]
    for loader in both_ways(Loader(both, 8, fields={"x": f"jpg;{RECORD}"})):
        (batch,) = loader
        assert sorted(map(bytes, batch["x"])) == sorted([*jpgs, b"one", b"two"])


# Packs, mixtures, selections, states.


def tokens(payload):
    return np.frombuffer(payload, np.uint8).astype(np.int64)


def test_records_are_packed_by_a_joined_column(opaque):
    folder, payloads = opaque
    dataset = shardset.discover_dataset(folder)
    table = pa.table({"sample_index": list(range(len(payloads))), "tokens": list(map(len, payloads))})
    view = dataset.select(pc.field("tokens") > 0, columns=table, on="sample_index")
    source = view.packed(shardset.Pack(length="tokens", size=256))
    wanted = {index: payload for index, payload in enumerate(payloads) if payload}
    for name, fields in ((RECORD, [RECORD]), ("x", {"x": RECORD})):
        decode = Decode(fields={RECORD: tokens})
        found = {}
        for batch in Loader(source, 1, shuffle=True, fields=fields, decode=decode, tail="exact").columns("tokens"):
            assert batch[name].shape == (1, 256)
            (row,), (each,) = batch[name], batch[f"{name}__lengths"]
            ends = np.cumsum(each)
            for index, start, end in zip(batch["__index__"][0].tolist(), ends - each, ends, strict=True):
                found[index] = row[start:end].astype(np.uint8).tobytes()
            assert batch["tokens"][0] == each.tolist()
        assert found == wanted
    plain = {}
    for batch in Loader(source, 1, fields=[RECORD], tail="exact"):
        plain |= dict(zip(batch["__index__"][0].tolist(), batch[RECORD][0], strict=True))
    assert plain == wanted


def test_mixtures_and_selections_give_records(opaque, tmp_path):
    write_shard(tmp_path / "tars" / "a.tar", make_members(20))
    tars, raw = shardset.discover_dataset(tmp_path / "tars"), shardset.discover_dataset(opaque[0])
    table = pa.table({"sample_index": list(range(75)), "is_short": [len(payload) < 40 for payload in opaque[1]]})
    short = raw.select(shardset.has_field("x").is_null(), columns=table, on="sample_index")
    assert len(short) == 75
    short = short.select(pc.field("is_short"))
    wanted = {index: payload for index, payload in enumerate(opaque[1]) if len(payload) < 40}
    assert by_index(Loader(short, 1, shuffle=True, fields=[RECORD])) == wanted
    mixture = shardset.mix({"raw": short, "tars": tars}, weights={"raw": 1, "tars": 1}, epoch_size=40)
    for loader in both_ways(Loader(mixture, 8, shuffle=True, fields={"x": f"{RECORD};jpg"})):
        for batch in loader:
            for source, index, value in zip(batch["__source__"], batch["__index__"].tolist(), batch["x"], strict=True):
                assert bytes(value) == (opaque[1][index] if source == "raw" else tars[index]["jpg"])


def test_a_state_goes_on_with_records(opaque):
    dataset = shardset.discover_dataset(opaque[0])
    loader = Loader(dataset, 5, shuffle=WINDOWS, seed=3, fields=[RECORD])
    batches = list(loader)
    again = Loader(dataset, 5, shuffle=WINDOWS, seed=3, fields=[RECORD])
    again.load_state_dict(loader.state_dict(batches[6]))
    assert [batch[RECORD] for batch in again] == [batch[RECORD] for batch in batches[7:]]


# The calls of a dataset.


def test_calls_of_a_dataset_take_the_field_too(examples, opaque, tmp_path):
    folder, payloads = opaque
    dataset = shardset.discover_dataset(folder)
    numbers = random.Random(1).choices(range(75), k=40)
    wanted = [payloads[number] for number in numbers]
    for copy in (True, False):
        fields = dataset.read_field(numbers, RECORD, copy=copy)
        samples = dataset.read_samples(numbers, [RECORD], copy=copy)
        assert list(map(bytes, fields)) == [bytes(sample[RECORD]) for sample in samples] == wanted
        assert {type(each) for each in fields} == {type(each[RECORD]) for each in samples}
        assert type(fields[0]) is (bytes if copy else memoryview)
        assert [sample["__key__"] for sample in samples] == [dataset[number].key for number in numbers]
        assert [bytes(each[RECORD]) for each in dataset.iter_dicts([RECORD], copy=copy)] == payloads
    selected = dataset.select(shardset.has_field("x").is_null())
    assert [each[RECORD] for each in selected.iter_dicts([RECORD])] == payloads
    dataset = shardset.discover_dataset(examples[0])
    for each, payload in zip(dataset.iter_dicts(["label", RECORD]), examples[1], strict=True):
        assert each.keys() == {"__key__", "label", RECORD}
        assert each[RECORD] == payload
    with pytest.raises(MissingFieldError, match=r"sample\.record is the record"):
        dataset[0][RECORD]
    write_shard(tmp_path / "opaque" / "a.tar", make_members(2))
    both = shardset.discover_dataset(folder, policy=Policy(defaults={RECORD: b"?"}))
    assert sorted(map(bytes, both.read_field(range(77), RECORD))) == sorted([*payloads, b"?", b"?"])
    assert {type(each) for each in both.read_field(range(77), RECORD)} == {bytes, memoryview}
    assert [type(each[RECORD]) for each in both.read_samples([3, 70, 2, 60], [RECORD])].count(memoryview) >= 3
