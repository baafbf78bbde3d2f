"""Handlers by the parts of names, and samples decoded by them, with webdataset's rules for who comes first."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys

import numpy as np
import PIL.Image
import pytest

from shardset.decoding import sample_decoder as module
from shardset.decoding.handlers import (
    DEFAULT_POST,
    DEFAULT_PRE,
    GUNZIP,
    Continue,
    handle_extension,
    image_handler,
    table_handler,
)
from shardset.decoding.registry import USUAL
from shardset.decoding.sample_decoder import SampleDecoder
from shardset.errors import DecodeError, MissingExtraError


def png(size=(5, 4)):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, (10, 20, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def sample(**fields):
    return {"__key__": "a/0001", "__url__": "photos-0.tar", **fields}


def decoded(decoder, **fields):
    return {name: value for name, value in decoder(sample(**fields)).items() if not name.startswith("__")}


@pytest.mark.parametrize(
    ("extensions", "key", "takes"),
    [
        ("jpg", ".jpg", True),
        ("jpg", ".seg.jpg", True),
        ("seg.jpg", ".seg.jpg", True),
        ("seg.jpg", ".left.seg.jpg", True),
        ("seg.jpg", ".xseg.jpg", False),
        ("seg.jpg", ".jpg", False),
        ("SEG.JPG cls", ".Seg.Jpg", True),
        ("seg.jpg  cls", ".cls", True),
        ("jpg", ".jpg.txt", False),
        ("", ".jpg", False),
    ],
)
def test_an_extension_is_whole_parts_at_the_end_of_a_name(extensions, key, takes):
    handler = handle_extension(extensions, bytes.upper)
    assert handler(key, b"a") == (b"A" if takes else None)


def test_images_are_taken_by_their_suffix():
    handler = image_handler("rgb8")
    assert handler(".seg.PNG", png()).shape == (4, 5, 3)
    assert handler(".json", b"1") is None
    assert image_handler("l8", ["xyz"])(".xyz", png()).shape == (4, 5)
    assert image_handler("l8", ["xyz"])(".png", png()) is None


def test_gunzip_has_the_next_handlers_go_on():
    found = GUNZIP(".json.gz", gzip.compress(b"[1]"))
    assert isinstance(found, Continue)
    assert (found.key, found.data) == (".json", b"[1]")
    assert GUNZIP(".json", b"[1]") is None


def test_the_table_as_a_handler_unpacks_nothing():
    assert table_handler()(".json", b"[1]") == [1]
    assert table_handler()(".json.gz", gzip.compress(b"[1]")) is None


def test_a_sample_is_decoded_by_the_table_and_by_words_for_images():
    fields = {"png": png(), "json": b"null", "cls": b"7", "meta.json.gz": gzip.compress(b"[1]"), "bin": b"\0", "": b"x"}
    values = decoded(SampleDecoder(["l8"]), **fields)
    assert values.pop("png").shape == (4, 5)
    assert values == {"json": None, "cls": 7, "meta.json.gz": [1], "bin": b"\0", "": b"x"}


def test_the_sample_that_is_given_stays_as_it_was():
    given = sample(cls=b"1")
    assert SampleDecoder()(given) == {**given, "cls": 1}
    assert given == sample(cls=b"1")


def test_handlers_are_asked_in_order_until_one_takes_the_field():
    asked = []

    def first(key, data):
        asked.append(("first", key, data))

    def second(key, data):
        asked.append(("second", key, data))
        return 0 if key == ".a" else None

    decoder = SampleDecoder([first, second, handle_extension("a b", lambda _: "third")])
    assert decoded(decoder, a=b"1", b=b"2", cls=b"3") == {"a": 0, "b": "third", "cls": 3}
    assert asked == [
        (who, key, data) for key, data in ((".a", b"1"), (".b", b"2"), (".cls", b"3")) for who in ("first", "second")
    ]


def test_a_function_for_an_extension_that_gives_none_leaves_the_field_to_the_table():
    decoder = SampleDecoder([handle_extension("json", lambda data: None if data == b"[]" else "mine")])
    assert decoded(decoder, json=b"[]") == {"json": []}
    assert decoded(decoder, json=b"[1]") == {"json": "mine"}


def test_continue_goes_on_with_the_next_handlers_under_the_new_name():
    def untar(key, data):
        return Continue(key.removesuffix(".b64"), data[::-1]) if key.endswith(".b64") else None

    decoder = SampleDecoder([untar, handle_extension("x", lambda data: ("x", data))])
    assert decoded(decoder, **{"json.b64": b"]1[", "x.b64": b"ba", "b.b64": b"ba"}) == {
        "json.b64": [1],
        "x.b64": ("x", b"ab"),
        "b.b64": b"ab",
    }
    assert decoded(decoder, **{"json.b64.gz": gzip.compress(b"]1[")}) == {"json.b64.gz": [1]}


def test_empty_lists_take_the_default_handlers_away():
    packed = gzip.compress(b"[1]")
    assert decoded(SampleDecoder(pre=[]), **{"json.gz": packed, "json": b"1"}) == {"json.gz": packed, "json": 1}
    assert decoded(SampleDecoder(post=[]), **{"json.gz": packed, "json": b"1"}) == {"json.gz": b"[1]", "json": b"1"}
    assert decoded(SampleDecoder(pre=[table_handler()], post=[]), cls=b"1") == {"cls": 1}


def test_changes_of_the_default_lists_show_in_decoders_that_are_made_then(monkeypatch):
    monkeypatch.setattr(module, "DEFAULT_POST", [handle_extension("xyz", bytes.upper), *DEFAULT_POST])
    assert decoded(SampleDecoder(), xyz=b"a", cls=b"1") == {"xyz": b"A", "cls": 1}
    assert DEFAULT_PRE == [GUNZIP]


@pytest.mark.parametrize("only", ["cls json", ["cls", "json"], {"cls", "json"}])
def test_only_the_fields_that_are_named_in_full_are_decoded(only):
    assert decoded(SampleDecoder(only=only), cls=b"1", json=b"2", txt=b"3", **{"a.cls": b"4"}) == {
        "cls": 1,
        "json": 2,
        "txt": b"3",
        "a.cls": b"4",
    }
    assert decoded(SampleDecoder(only=only), txt=None) == {"txt": None}


def test_fields_of_the_reader_become_text_where_they_are_bytes():
    given = {"__key__": "k", "__url__": "u", "__index__": 3, "__text__": "é".encode(), "__raw__": b"\xff"}
    assert SampleDecoder()(given) == {**given, "__text__": "é"}


@pytest.mark.parametrize("value", [7, None, "text", [1], np.zeros(2)])
def test_a_value_that_is_not_bytes_is_an_error_unless_partial(value):
    with pytest.raises(DecodeError, match=r"where bytes are expected.*partial=True"):
        SampleDecoder()(sample(bin=value))
    assert decoded(SampleDecoder(partial=True), bin=value, cls=b"1")["bin"] is value
    assert decoded(SampleDecoder(partial=True), bin=value, cls=b"1")["cls"] == 1


def test_decoding_twice_works_where_partial():
    once = SampleDecoder(["pil"])(sample(png=png(), json=b"[1]", bin=b"x"))
    assert SampleDecoder(["pil"], partial=True)(once) == once
    with pytest.raises(DecodeError, match="holds a value of type Image"):
        SampleDecoder(["pil"])(once)


def test_what_is_no_sample_is_an_error_that_says_where_decode_belongs():
    with pytest.raises(DecodeError, match=r"got a tuple.*put decode before"):
        SampleDecoder()((b"1", b"2"))


def test_an_error_has_what_webdatasets_has_and_more():
    given = sample(cls=b"1", json=b"{")
    with pytest.raises(DecodeError) as caught:
        SampleDecoder()(given)
    error = caught.value
    assert (error.url, error.key, error.k, error.field, error.shard) == (
        "photos-0.tar",
        "a/0001",
        "json",
        "json",
        "photos-0.tar",
    )
    assert error.sample is given
    assert isinstance(error.__cause__, json.JSONDecodeError)
    assert "field 'json' of sample 'a/0001'" in str(error)


def test_the_sample_does_not_travel_with_the_error():
    with pytest.raises(DecodeError) as caught:
        SampleDecoder()(sample(json=b"{" + bytes(100_000)))
    payload = pickle.dumps(caught.value)
    assert len(payload) < 1000
    again = pickle.loads(payload)
    assert (again.sample, again.field, again.key, str(again)) == (None, "json", "a/0001", str(caught.value))


def test_pickles_are_refused_unless_a_function_is_named():
    with pytest.raises(DecodeError, match="runs any code"):
        SampleDecoder(["pil"])(sample(pyd=pickle.dumps([1])))
    decoder = SampleDecoder(["pil", handle_extension("pyd", pickle.loads)])
    assert decoded(decoder, pyd=pickle.dumps([1])) == {"pyd": [1]}


def test_a_missing_package_is_no_fault_of_the_sample(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError):
        SampleDecoder(["torchrgb"])(sample(png=png()))


def test_what_is_no_handler_is_refused_when_the_decoder_is_made():
    with pytest.raises(TypeError, match="7 is no handler"):
        SampleDecoder([7])
    with pytest.raises(ValueError, match="unknown image spec 'PIL'"):
        SampleDecoder(["PIL"])
    with pytest.raises(ValueError, match="unknown image spec"):
        SampleDecoder(post=["json"])


def test_a_decoder_pickles_without_what_it_has_learnt():
    decoder = SampleDecoder(["rgb8", handle_extension("up", bytes.upper)], only="png up")
    fields = {"png": png(), "up": b"a", "cls": b"1"}
    before = decoded(decoder, **fields)
    again = pickle.loads(pickle.dumps(decoder))
    assert not again._actions
    after = decoded(again, **fields)
    np.testing.assert_array_equal(after.pop("png"), before.pop("png"))
    assert after == before == {"up": b"A", "cls": b"1"}


def test_names_that_never_come_again_are_forgotten():
    decoder = SampleDecoder()
    for number in range(3 * module._NAMES_KEPT):
        assert decoded(decoder, **{f"{number}.cls": b"1"}) == {f"{number}.cls": 1}
    assert len(decoder._actions) <= module._NAMES_KEPT
    assert len(decoder._chains) <= module._NAMES_KEPT


def test_one_field_is_decoded_with_errors_as_they_come():
    decoder = SampleDecoder()
    assert decoder.decode_field("json.gz", gzip.compress(b"[1]")) == [1]
    with pytest.raises(json.JSONDecodeError):
        decoder.decode_field("json", b"{")


def test_a_registry_of_ones_own_takes_the_place_of_the_table():
    registry = USUAL.extended({"xyz": bytes.upper})
    assert decoded(SampleDecoder(post=[table_handler(registry)]), xyz=b"a", cls=b"1") == {"xyz": b"A", "cls": 1}
