from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import re

import pytest

from shardset import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
]
# One value for each parameter that an error of the package takes.
VALUES = {
    "shard": "photos-00000.tar",
    "offset": 1536,
    "code": "bad_size",
    "member": "caf\udce9.txt",
    "expected": 4711,
    "actual": "4f2a",
    "key": "0001",
    "field": "jpg",
    "offsets": (512, 2048),
    "path": "photos-00000.json",
    "url": "s3://bucket/photos-00000.tar",
    "status": 503,
    "attempts": 4,
    "extra": "images",
    "hint": "copy the shard again",
}


def build(cls):
    """Build an error with a value in each of its attributes."""
    parameters = list(inspect.signature(cls).parameters)
    assert parameters[0] == "message"
    return cls("the size is no octal number", **{name: VALUES[name] for name in parameters[1:]})


def own_attributes(cls):
    """The attributes that an error has and its parent has not."""
    return set(vars(build(cls))) - set(vars(build(cls.__bases__[0])))


def tree_in_docstring():
    """The rows of the tree as (depth, name, builtin base, attributes)."""
    rows = []
    for line in errors.__doc__.splitlines():
        row = re.fullmatch(r" {4}(?P<lines>[│├└─ ]*)(?P<name>\w+)(?: \((?P<builtin>\w+)\))?(?P<own>( +\.\w+)*)", line)
        if row:
            rows.append((-(-len(row["lines"]) // 4), row["name"], row["builtin"], set(re.findall(r"\w+", row["own"]))))
    return rows


def test_the_tree_in_the_docstring_lists_every_error_once():
    assert sorted(row[1] for row in tree_in_docstring()) == sorted(cls.__name__ for cls in CLASSES)


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    path = []
    for depth, name, builtin, own in tree_in_docstring():
        del path[depth:]
        cls = getattr(errors, name)
        expected_bases = [path[-1] if path else Exception]
        if builtin is not None:
            expected_bases.append(getattr(builtins, builtin))
        assert list(cls.__bases__) == expected_bases, name
        assert own == (own_attributes(cls) if path else {"hint"}), name
        path.append(cls)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling_with_all_that_it_knows(cls, protocol):
    error = build(cls)
    error.__notes__ = ["while reading sample 7"]
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert vars(back) == vars(error)
    assert back.args == error.args
    assert str(back) == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_copying(cls):
    error = build(cls)
    for back in (copy.copy(error), copy.deepcopy(error)):
        assert type(back) is cls
        assert vars(back) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_text_says_what_then_where_then_what_to_do(cls):
    error = build(cls)
    text = str(error)
    assert text.startswith("the size is no octal number")
    assert text.endswith(" - copy the shard again")
    for place in ("shard", "path", "url"):
        if place in vars(error):
            assert f" {VALUES[place]}" in text
    if isinstance(error, errors.FormatError):
        assert "at byte 1536" in text


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_without_details_is_its_message(cls):
    assert str(cls("nothing more is known")) == "nothing more is known"


@pytest.mark.parametrize("cls", CLASSES)
def test_details_go_by_name_only(cls):
    with pytest.raises(TypeError):
        cls("message", "photos-00000.tar")


def test_byte_zero_is_a_place_like_any_other():
    assert str(errors.FormatError("no tar", shard="a.tar", offset=0)) == "no tar, in a.tar at byte 0"


def test_a_missing_extra_says_how_to_install_it_unless_told_otherwise():
    assert str(errors.MissingExtraError("JPEG needs simplejpeg", extra="images")).endswith(
        " - pip install 'shardset[images]'"
    )
    assert errors.MissingExtraError("no", extra="images", hint="use PNG").hint == "use PNG"


def test_a_missing_field_reads_as_a_sentence_although_it_is_a_key_error():
    with pytest.raises(KeyError) as caught:
        raise errors.MissingFieldError("the sample has no field jpg", shard="a.tar", key="0001", field="jpg")
    assert str(caught.value) == "the sample has no field jpg, in a.tar"
