"""Settings of decoding: what they accept, and how wrong ones are refused."""

from __future__ import annotations

import pickle

import pytest

from shardset.decoding.clips import Clip
from shardset.decoding.options import Decode


def test_one_number_is_the_side_of_a_square():
    assert Decode(size=224).shape == (224, 224)
    assert Decode(size=(32, 64)).shape == (32, 64)
    assert Decode().shape is None


@pytest.mark.parametrize("size", [0, -1, True, 2.5, (3,), (3, 0), (3, 4, 5), [3, 4], "224"])
def test_a_size_that_is_no_pixels_is_refused(size):
    with pytest.raises(ValueError, match="size="):
        Decode(size=size)


@pytest.mark.parametrize("name", ["crop", "mode", "interpolation"])
def test_a_word_that_is_none_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"{name}='middle': it is one of '"):
        Decode(**{name: "middle"})


@pytest.mark.parametrize("limit", [0, None, 1.5])
def test_a_limit_of_pixels_is_a_number(limit):
    with pytest.raises(ValueError, match="max_pixels="):
        Decode(max_pixels=limit)


def test_fields_are_words_clips_settings_or_functions():
    fields = {"a": "image", "b": "json", "c": Clip(frames=3), "d": Decode(mode="l"), "e": len}
    assert pickle.loads(pickle.dumps(Decode(fields=fields))) == Decode(fields=fields)
    assert hash(Decode(fields=fields)) == hash(Decode(fields=fields))


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("picture", ValueError, "'picture': it is one of 'image'"),
        (3, TypeError, "3 is neither a word"),
        (Decode(fields={"a": "json"}), ValueError, "fields of their own"),
    ],
)
def test_what_a_field_cannot_be_decoded_as_is_refused_by_its_name(how, kind, text):
    with pytest.raises(kind, match="field(?s:.)*" + text) as refused:
        Decode(fields={"thing": how})
    assert "'thing'" in str(refused.value)
