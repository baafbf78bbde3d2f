from __future__ import annotations

import json

import pytest

from shards import private_cache, tar_bytes, write_shard  # noqa: F401 - the fixture is autouse
from shardset.dataset.opening import discover_dataset
from shardset.errors import DecodeError
from shardset.loading.cursor import TarDataLoader
from shardset.storage import LocalStore, MemoryStore
from storage.counting import CountingStore

DOCUMENT = {"caption": "from json", "n": [1, {"a": None}]}


def load(*members, index=None, sample=0):
    """Load one sample of a shard of members; `index` are the entries of an index beside it."""
    store = MemoryStore()
    data = tar_bytes(members)
    store.write("memory://b/a.tar", data)
    if index is not None:
        loader = TarDataLoader(discover_dataset("memory://b", store=store))
        files = loader.dataset.files(0)
        entries = {
            name: {"offset": files.offsets[row], "length": files.lengths[row], **index.get(name, {})}
            for row, name in enumerate(files.names)
        }
        store.write("memory://b/a.json", json.dumps({"filesize": len(data), "files": entries}).encode())
    return TarDataLoader(discover_dataset("memory://b", store=store)).load_sample(0, sample)


def test_an_entry_says_where_its_file_stands(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("d/b.jpg", b"payload"), ("d/a.jpg", b"x")])
    entry = TarDataLoader(path).load_sample(0, 1)
    assert (entry.path, entry.offset, entry.size, entry.data) == ("d/b.jpg", 512, 7, b"payload")
    assert path.read_bytes()[entry.offset : entry.offset + entry.size] == entry.data
    assert (entry.width, entry.height, entry.aspect) == (None, None, None)
    assert (entry.json_path, entry.json_data, entry.json_metadata, entry.captions, entry.caption) == (None,) * 5
    assert entry.metadata == {"path": "d/b.jpg", "offset": 512, "size": 7}
    assert repr(entry) == "TarFileEntry(path='d/b.jpg', offset=512, size=7, shard_idx=0, file_idx=1)"
    assert entry.job_id == "shard0000_file000001"


def test_the_json_beside_it_is_given_as_bytes_and_as_a_value():
    raw = json.dumps(DOCUMENT).encode()
    entry = load(("a.jpg", b"x"), ("a.json", raw))
    assert entry.json_path == "a.json"
    assert entry.json_data == raw
    assert entry.json_metadata == DOCUMENT
    assert entry.captions == entry.caption == "from json"
    assert entry.metadata == {"path": "a.jpg", "offset": 512, "size": 1, "json_path": "a.json", "captions": "from json"}


def test_sidecars_are_read_only_when_asked_for(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.json", b'{"caption": "c"}'), ("a.txt", b"t")])
    store = CountingStore(LocalStore())
    loader = TarDataLoader(discover_dataset(path, store=store))
    loader.load_sample(0, 0)
    store.reset()
    entry = loader.load_sample(0, 0)
    assert store.bytes_read == 1
    assert entry.captions == "t"
    assert store.bytes_read == 2
    assert entry.json_data == b'{"caption": "c"}'
    assert store.bytes_read == 2 + 16


def test_entries_of_an_iteration_have_no_sidecars(tmp_path):
    path = write_shard(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.json", b'{"caption": "c"}'), ("a.txt", b"t")])
    for entry in TarDataLoader(path):
        assert (entry.json_data, entry.captions) == (None, None)
        assert entry.json_path == ("a.json" if entry.path == "a.jpg" else None)


@pytest.mark.parametrize(
    ("index", "text", "document", "captions"),
    [
        ("index", "text", {"caption": "json"}, "index"),
        ("", "text", {"caption": "json"}, ""),
        (["one", {"two": 2}], "text", None, ["one", {"two": 2}]),
        (None, "text", {"caption": "json"}, "text"),
        (None, " text \n", None, "text"),
        (None, None, {"caption": "json"}, "json"),
        (None, None, {"text": "a", "prompt": "b", "caption": "a"}, ["a", "b"]),
        (None, '{"a": 1}', None, {"a": 1}),
        (None, " \n", {"caption": "json"}, "json"),
        (None, None, {"tags": ["x"]}, {"tags": ["x"]}),
        (None, None, 17, None),
        (None, None, None, None),
    ],
)
def test_captions_come_from_the_index_then_the_text_then_the_json(index, text, document, captions):
    members = [("a.jpg", b"x")]
    if text is not None:
        members.append(("a.txt", text.encode()))
    if document is not None:
        members.append(("a.json", json.dumps(document).encode()))
    entry = load(*members, index={} if index is None else {"a.jpg": {"captions": index}})
    assert entry.captions == captions
    first = captions[0] if isinstance(captions, list) else captions
    assert entry.caption == first


def test_what_an_index_holds_is_given_without_reading_anything():
    index = {
        "a.jpg": {
            "width": 40,
            "height": 30,
            "captions": "c",
            "json_metadata": DOCUMENT,
            "mine": [1, 2],
            "sha256": "0" * 64,
        }
    }
    entry = load(("a.jpg", b"x"), ("a.json", b"{}"), index=index)
    assert (entry.width, entry.height, entry.aspect) == (40, 30, 1.3333333730697632)
    assert entry.json_metadata == DOCUMENT
    assert entry.json_data == b"{}"
    assert entry.metadata == {
        "path": "a.jpg",
        "offset": 512,
        "size": 1,
        "width": 40,
        "height": 30,
        "aspect": 1.3333333730697632,
        "json_path": "a.json",
        "captions": "c",
        "json_metadata": DOCUMENT,
        "mine": [1, 2],
        "sha256": "0" * 64,
    }


def test_a_sidecar_that_cannot_be_understood_is_a_typed_error_when_it_is_asked_for():
    entry = load(("a.jpg", b"x"), ("a.json", b'{"caption": '))
    assert entry.data == b"x"
    assert entry.json_data == b'{"caption": '
    for name in ("json_metadata", "captions", "caption"):
        with pytest.raises(DecodeError, match=r"a\.json") as caught:
            getattr(entry, name)
        assert (caught.value.field, caught.value.key, caught.value.shard) == ("json", "a.jpg", "memory://b/a.tar")
    entry = load(("a.jpg", b"x"), ("a.txt", b"\xff"))
    with pytest.raises(DecodeError, match="not UTF-8") as caught:
        _ = entry.captions
    assert (caught.value.field, caught.value.shard) == ("txt", "memory://b/a.tar")


def test_a_text_that_is_no_sidecar_is_a_sample_of_its_own():
    entry = load(("a.txt", b"words"), ("a.json", b'{"caption": "c"}'))
    assert (entry.path, entry.data, entry.json_path, entry.captions) == ("a.txt", b"words", "a.json", "c")
