import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import DATA
from shardset.errors import ChangedError, IndexFileError, StorageError
from shardset.formats.naming import Names
from shardset.formats.tar_header import SparseRow
from shardset.index.captioning import apply_captions_to_metadata, write_captions_to_metadata
from shardset.index.edit import STRUCTURAL, rename_in_index
from shardset.index.replacing import Replacements
from shardset.index.sidecar import dump_sidecar, parse_sidecar
from shardset.index.table import index_from_files

EDITS = json.loads((DATA / "webshart" / "edits.json").read_text())
PLACE = {"offset": 512, "length": 3}


def index_text(*entries, **top):
    """Make the text of an index of files ``0.jpg`` on, at one place."""
    files = {f"{number}.jpg": PLACE | entry for number, entry in enumerate(entries)}
    return json.dumps({"filesize": 20480, "files": files, **top}).encode()


def rename(payload, old, new, **further):
    return rename_in_index(payload, old, new, shard="s0", path="s0.json", **further)


def entries_after(payload, old, new, **further):
    edited = rename(payload, old, new, **further)
    files = json.loads(edited.payload)["files"]
    return edited.count, [entry for _, entry in sorted(files.items())]


@pytest.mark.parametrize("case", EDITS["renames"], ids=map(str, range(len(EDITS["renames"]))))
def test_a_rename_does_what_webshart_does(case):
    payload = case["index"].encode()
    if "error" in case:
        with pytest.raises(ValueError, match=r"Field|structural|become|entry"):
            rename(payload, case["old"], case["new"], overwrite=case["overwrite"])
        return
    edited = rename(payload, case["old"], case["new"], overwrite=case["overwrite"])
    assert edited.count == case["count"]
    assert json.loads(edited.payload) == json.loads(case["result"])


def test_the_renamed_key_goes_last_and_the_others_keep_their_order():
    payload = index_text({"zeta": 1, "mine": 2, "alpha": 3}, hash="h", own={"mine": 1}, another=2)
    edited = json.loads(rename(payload, "mine", "yours").payload)
    assert list(edited["files"]["0.jpg"]) == ["offset", "length", "zeta", "alpha", "yours"]
    assert list(edited) == ["filesize", "files", "hash", "own", "another"]
    assert edited["own"] == {"mine": 1}


def test_nothing_to_rename_gives_the_very_same_bytes():
    payload = b'{ "filesize":20480, "files": {"a.jpg": {"offset":512,  "length":3}} }'
    assert rename(payload, "mine", "yours").payload is payload
    assert rename(payload, "same", "same").payload is payload


def test_an_index_that_is_indented_stays_so():
    payload = json.dumps(json.loads(index_text({"mine": 1})), indent=2).encode()
    renamed = rename(payload, "mine", "yours").payload
    assert renamed == payload.replace(b"mine", b"yours") + b"\n"


@pytest.mark.parametrize(
    "value",
    ["123456789012345678901234567890", "-99999999999999999999", "18446744073709551615", r'"\ud83d alone"', '"é\u2028"'],
)
def test_values_come_through_a_rename_exactly(value):
    payload = ('{"files":{"a.jpg":{"offset":512,"length":3,"mine":' + value + "}}}").encode()
    [entry] = json.loads(rename(payload, "mine", "yours").payload)["files"].values()
    assert entry["yours"] == json.loads(value)


def test_a_conflict_names_shard_and_entry():
    with pytest.raises(ValueError, match=r"Field 'y' already exists in shard 's0', entry '1\.jpg'; use over"):
        rename(index_text({"x": 1}, {"x": 1, "y": 2}), "x", "y")


def test_overwriting_drops_the_field_that_had_the_name():
    assert entries_after(index_text({"x": 1, "y": 2}, {"y": 3}), "x", "y", overwrite=True) == (
        1,
        [PLACE | {"y": 1}, PLACE | {"y": 3}],
    )


@pytest.mark.parametrize("name", sorted(STRUCTURAL))
def test_what_says_where_a_file_is_cannot_be_renamed_nor_replaced(name):
    for old, new in ((name, "x"), ("x", name), (name, name)):
        with pytest.raises(ValueError, match=f"Cannot rename structural index field '{name}'"):
            rename(index_text({"x": 1}), old, new, overwrite=True)


@pytest.mark.parametrize("names", [("", "x"), ("x", ""), (" ", "x"), ("x", "\t")])
def test_blank_names_are_refused(names):
    with pytest.raises(ValueError, match="Field names must not be empty"):
        rename(index_text({"x": 1}), *names)


def test_captions_are_renamed_under_either_of_their_names():
    payload = index_text({"captions": "a"}, {"caption": "b"}, {"captions": None, "caption": "c"})
    count, entries = entries_after(payload, "captions", "old")
    assert count == 3
    assert [entry["old"] for entry in entries] == ["a", "b", "c"]


def test_the_name_caption_means_that_key_alone():
    count, entries = entries_after(index_text({"captions": "a"}, {"caption": "b"}), "caption", "old")
    assert (count, entries) == (1, [PLACE | {"captions": "a"}, PLACE | {"old": "b"}])


def test_a_field_cannot_become_captions_beside_captions_of_the_other_name():
    payload = index_text({"x": "new", "caption": "old"})
    with pytest.raises(ValueError, match="'captions' already exists under the name 'caption' in shard 's0'"):
        rename(payload, "x", "captions")
    assert entries_after(payload, "x", "captions", overwrite=True) == (1, [PLACE | {"captions": "new"}])


def test_a_null_of_the_other_name_is_in_nobodys_way():
    assert entries_after(index_text({"x": "new", "caption": None}), "x", "captions") == (
        1,
        [PLACE | {"captions": "new"}],
    )


def test_captions_can_be_stored_under_their_other_name():
    assert entries_after(index_text({"captions": "a"}, {"caption": "b"}), "captions", "caption") == (
        1,
        [PLACE | {"caption": "a"}, PLACE | {"caption": "b"}],
    )


def test_captions_under_both_names_are_a_malformed_entry():
    with pytest.raises(IndexFileError, match=r"entry '0.jpg' has its captions twice, under two names, in s0\.json"):
        rename(index_text({"captions": "a", "caption": "b"}), "captions", "old")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("width", "wide", "entry '0.jpg': width is 'wide'"),
        ("width", -1, "entry '0.jpg': width is -1"),
        ("captions", 5, "entry '0.jpg': captions is 5"),
        ("captions", [1], "entry '0.jpg': captions is a list"),
        ("aspect", "1:1", "entry '0.jpg': aspect is '1:1'"),
    ],
)
def test_a_value_that_does_not_fit_its_new_name_is_refused(field, value, says):
    with pytest.raises(IndexFileError, match=f"'x' cannot become '{field}': {says}"):
        rename(index_text({"x": value}), "x", field)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "a list, not an object"),
        (b'{"files": 3}', "files is 3"),
        (b"{}", "has no files"),
        (index_text({"x": 1}, {"offset": -5}), "entry '1.jpg': offset is -5"),
        (index_text({"x": 1}, {"offset": 1.5}), "entry '1.jpg': offset is 1.5"),
        (index_text({"x": 1}, {"length": 30000}), "entry '1.jpg': its bytes 512 to 30512 pass the end"),
        (index_text({"x": 1}, {"captions": 3}), "entry '1.jpg': captions is 3"),
        (index_text({"x": 1}, filesize="big"), "filesize is 'big'"),
        (b'{"files":{"a":{"offset":1,"length":1,"x":1},"b":{"offset":1}}}', "entry 'b' has no length"),
        (b'{"files":{"a":7,"b":{"offset":1,"length":1,"x":1}}}', "entry 'a' is 7, not an object"),
        (b'{"files":[{"offset":1,"length":1,"x":1}]}', "entry 0 has no path"),
    ],
)
def test_a_malformed_index_is_not_renamed_and_the_message_names_file_entry_and_key(payload, says):
    with pytest.raises(IndexFileError, match=says) as caught:
        rename(payload, "x", "y")
    assert "s0.json" in str(caught.value)
    assert "cannot become" not in str(caught.value)


def test_an_index_of_ours_is_trusted_after_a_rename_as_before_and_entries_apart_are_renamed_too():
    names = Names.of([b"a.jpg", b"b\xff.jpg", b"c.bin"])
    index = index_from_files(
        names,
        np.array([512, 1536, -1]),
        np.array([3, 3, 30]),
        8192,
        sparse={2: (SparseRow(0, 2560, 3),)},
    )
    rows = {name: row for row, name in enumerate(index.names.to_list())}
    extra = {row: {"mine": name.decode("latin-1")} for name, row in rows.items()}
    payload = dump_sidecar(replace(index, extra=extra), name="a.tar")
    edited = rename(payload, "mine", "yours")
    assert edited.count == 3
    before, after = (parse_sidecar(text, path="a.json", shard_size=8192) for text in (payload, edited.payload))
    assert after.digest == before.digest
    assert after.index.is_verified
    assert {row: fields["yours"] for row, fields in after.index.extra.items()} == {
        row: fields["mine"] for row, fields in before.index.extra.items()
    }


# A model in plain Python.

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(["x", "y", "z", "é", "name", "sha256x"])
entries = st.dictionaries(fields, values, max_size=4)
listings = st.lists(entries, max_size=6)
forms = st.sampled_from(["object", "list", "size"])


def as_index(listing, form, indent):
    named = {f"f{number}": {"offset": 512 * number, "length": number} | entry for number, entry in enumerate(listing)}
    if form == "list":
        files = [{"path": path} | entry for path, entry in named.items()]
    elif form == "size":
        files = {
            path: {("size" if key == "length" else key): value for key, value in entry.items()}
            for path, entry in named.items()
        }
    else:
        files = named
    return {"own": [1], "files": files, "x": "at the top"}, json.dumps(
        {"own": [1], "files": files, "x": "at the top"}, indent=indent
    ).encode()


def model_rename(document, old, new, overwrite):
    """Say what becomes of an index, or None where the new name is taken."""
    files = document["files"]
    count = 0
    for entry in files.values() if isinstance(files, dict) else files:
        if old in entry and old != new:
            if new in entry and not overwrite:
                return None
            value = entry.pop(old)
            entry.pop(new, None)
            entry[new] = value
            count += 1
    return count, document


@given(
    listing=listings,
    form=forms,
    indent=st.sampled_from([None, 2]),
    names=st.tuples(fields, fields),
    overwrite=st.booleans(),
)
@example(listing=[{"x": 2**64 + 1, "y": 0.1}], form="object", indent=None, names=("x", "z"), overwrite=False)
def test_renaming_agrees_with_a_model(listing, form, indent, names, *, overwrite):
    old, new = names
    document, payload = as_index(listing, form, indent)
    expected = model_rename(document, old, new, overwrite)
    if expected is None:
        with pytest.raises(ValueError, match="already exists"):
            rename(payload, old, new, overwrite=overwrite)
        return
    edited = rename(payload, old, new, overwrite=overwrite)
    count, document = expected
    assert edited.count == count
    assert json.dumps(json.loads(edited.payload)) == json.dumps(document)  # so that the order of keys counts, too


@given(listings, forms)
def test_a_field_renamed_and_renamed_back_gives_the_same_values(listing, form):
    document, payload = as_index(listing, form, None)
    there = rename(payload, "x", "elsewhere")
    back = rename(there.payload, "elsewhere", "x")
    assert back.count == there.count
    assert json.loads(back.payload) == document


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,files0 ', max_size=60).map(str.encode))
def test_any_bytes_are_renamed_or_refused(payload):
    try:
        edited = rename(payload, "x", "y")
    except IndexFileError:
        return
    assert edited.payload is payload


# Captions that people bring along.


@pytest.mark.parametrize("case", EDITS["apply"])
def test_captions_are_applied_as_webshart_does(case):
    document = {"files": json.loads(json.dumps(case["files"]))}
    assert apply_captions_to_metadata(document, case["captions"]) == case["count"]
    assert document["files"] == case["result"]


def applied(files, captions):
    """Apply captions to entries of some names, and return what each got."""
    document = {"files": {name: dict(PLACE) for name in files}}
    count = apply_captions_to_metadata(document, captions)
    got = {name: entry["captions"] for name, entry in document["files"].items() if "captions" in entry}
    assert count == len(got)
    return got


def test_sidecars_get_no_captions():
    files = ["a.webp", "a.txt", "a.json", "b.jpg", "b.TXT", "b.JSON"]
    assert applied(files, {"a": "A", "b": "B", "a.txt": "no", "b.JSON": "no"}) == {"a.webp": "A", "b.jpg": "B"}


def test_a_text_without_a_payload_is_a_sample_and_gets_captions():
    assert applied(["a.txt", "a.json", "b.jpg"], {"a": "A"}) == {"a.txt": "A"}


def test_dots_in_folders_are_no_suffixes():
    assert applied(["clip.v1/a", "clip.v1/a.txt", "clip.jpg"], {"clip": "C", "clip.v1/a": "A"}) == {
        "clip.v1/a": "A",
        "clip.jpg": "C",
    }


def test_a_name_with_a_folder_means_that_folder_and_one_without_means_any():
    files = ["x/a.jpg", "y/a.jpg", "a.jpg"]
    assert applied(files, {"x/a.jpg": "X"}) == {"x/a.jpg": "X", "a.jpg": "X"}
    assert applied(files, {"x/a": "X", "a": "any"}) == {"x/a.jpg": "X", "y/a.jpg": "any", "a.jpg": "any"}


def test_what_is_named_exactly_takes_that():
    assert applied(["a.png", "a.jpg"], {"a": "stem", "a.jpg": "jpg"}) == {"a.png": "stem", "a.jpg": "jpg"}


def test_captions_replace_those_under_the_other_name():
    document = {"files": {"a.jpg": PLACE | {"caption": "old", "captions": None}}}
    assert apply_captions_to_metadata(document, {"a": ("one", None, "", {})}) == 1
    assert document["files"]["a.jpg"] == PLACE | {"captions": ["one", {}]}


@pytest.mark.parametrize("document", [{}, {"files": None}, {"files": "a"}])
def test_captions_need_files(document):
    with pytest.raises(ValueError, match="'files' dict or list"):
        apply_captions_to_metadata(document, {"a": "A"})


def test_captions_are_written_into_an_index_that_keeps_its_form(tmp_path):
    path = tmp_path / "s.json"
    path.write_bytes(index_text({"z": 1}, {"caption": "old"}, own=5))
    path.chmod(0o640)
    assert write_captions_to_metadata(path, {"1": "a café", "nobody": "x"}) == 1
    assert json.loads(path.read_bytes()) == json.loads(index_text({"z": 1}, {"captions": "a café"}, own=5))
    assert "a café".encode() in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640


def test_captions_are_written_elsewhere_on_request(tmp_path):
    path, other = tmp_path / "s.json", tmp_path / "new" / "deep" / "t.json"
    path.write_bytes(index_text({}))
    assert write_captions_to_metadata(str(path), {"0.jpg": {"k": [1, True]}}, str(other)) == 1
    assert json.loads(other.read_bytes())["files"]["0.jpg"]["captions"] == {"k": [1, True]}
    assert path.read_bytes() == index_text({})


def test_nothing_to_write_leaves_the_file_alone(tmp_path):
    path = tmp_path / "s.json"
    path.write_bytes(index_text({}))
    before = path.stat()
    assert write_captions_to_metadata(path, {"other": "x"}) == 0
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize("value", [{"k": float("nan")}, {"k": {1, 2}}, ["a", {"k": b"bytes"}]])
def test_captions_that_are_no_json_are_refused_before_anything_is_written(tmp_path, value):
    path = tmp_path / "s.json"
    path.write_bytes(index_text({}))
    with pytest.raises(ValueError, match="the captions of '0' are no JSON"):
        write_captions_to_metadata(path, {"0": value})
    assert path.read_bytes() == index_text({})


def test_a_file_that_is_no_index_gets_no_captions(tmp_path):
    path = tmp_path / "s.json"
    for content in (b"[1]", b"{", b'{"a": 1}'):
        path.write_bytes(content)
        with pytest.raises(IndexFileError, match=r"s\.json"):
            write_captions_to_metadata(path, {"a": "b"})
        assert path.read_bytes() == content


def test_an_index_that_is_missing_is_a_file_that_was_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_captions_to_metadata(tmp_path / "s.json", {"a": "b"})


# Files that are replaced together.


def test_nothing_is_seen_of_replacements_before_they_are_committed(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with Replacements() as files:
        files.write(str(tmp_path / "a"), b"new")
        files.write(str(tmp_path / "b" / "c"), b"new")
        assert (tmp_path / "a").read_bytes() == b"old"
        assert not (tmp_path / "b" / "c").exists()
        files.commit()
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b" / "c").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c"]


def test_a_file_that_somebody_else_changed_meanwhile_is_not_replaced(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"old a")
    second.write_bytes(b"old b")
    with Replacements() as files:
        for path in (first, second):
            files.write(str(path), files.read(str(path)) + b" edited")
        second.unlink()
        second.write_bytes(b"theirs")
        with pytest.raises(ChangedError, match="changed meanwhile"):
            files.commit()
    assert (first.read_bytes(), second.read_bytes()) == (b"old a", b"theirs")
    assert len([*tmp_path.iterdir()]) == 2


def test_a_file_written_twice_is_refused(tmp_path):
    with Replacements() as files:
        files.write(str(tmp_path / "a"), b"1")
        with pytest.raises(ValueError, match="written twice"):
            files.write(str(tmp_path / "a"), b"2")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("call", ["fsync", "replace", "open", "fdopen"])
def test_each_step_may_fail_and_every_file_is_old_or_new(tmp_path, monkeypatch, call):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for fails_at in range(1, 12):
        for path in paths:
            path.write_bytes(b"old")
        calls = 0
        real = getattr(os, call)

        def failing(*args, fails_at=fails_at, real=real, **further):
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(28, "No space left on device")
            return real(*args, **further)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                with Replacements() as files:
                    for path in paths:
                        files.write(str(path), b"new")
                    files.commit()
                failed = None
            except StorageError as error:
                failed = error
        kept = [path.read_bytes() for path in paths]
        assert set(kept) <= {b"old", b"new"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
        if failed is not None:
            assert failed.errno == 28
            done = kept.count(b"new")
            assert call == "replace" or done == 0
            assert (f"{done} of 3 files are replaced" in str(failed)) == (done > 0)
        else:
            assert kept == [b"new"] * 3
