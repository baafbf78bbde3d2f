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
    "position": 3,
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
    """The rows of the tree as (depth, name, builtin bases, attributes)."""
    rows = []
    for line in errors.__doc__.splitlines():
        pattern = r" {4}(?P<lines>[│├└─ ]*)(?P<name>\w+)(?: \((?P<builtin>[\w, ]+)\))?(?P<own>( +\.\w+)*)"
        row = re.fullmatch(pattern, line)
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
            expected_bases += [getattr(builtins, base) for base in builtin.split(", ")]
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


# ---- urls as they may be shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a.tar", "https://host/a.tar"),
        ("https://user:pw@host/a.tar", "https://host/a.tar"),
        ("https://user@host/a.tar", "https://host/a.tar"),
        ("https://us%40er:p%2Fw@host:8000/a@b.tar", "https://host:8000/a@b.tar"),
        ("https://host/a.tar?x=1&sig=abc&y=2", "https://host/a.tar?x=1&sig=...&y=2"),
        (
            "https://host/a.tar?X-Amz-Signature=abc&X-Amz-Date=2",
            "https://host/a.tar?X-Amz-Signature=...&X-Amz-Date=...",
        ),
        ("https://host/a.tar?token=a#token=b", "https://host/a.tar?token=...#token=b"),
        ("https://host/a.tar?token=", "https://host/a.tar?token=..."),
        ("s3://bucket/a@b/c.tar", "s3://bucket/a@b/c.tar"),
        ("/data/user:pw@host/a.tar", "/data/user:pw@host/a.tar"),
        ("https://host/token=abc/a.tar", "https://host/token=abc/a.tar"),
        ("https://host/a.tar?design=1&assignment=2&signal=3", "https://host/a.tar?design=1&assignment=2&signal=3"),
    ],
)
def test_a_url_is_shown_without_what_lets_one_in(url, shown):
    assert errors.without_secrets(url) == shown
    assert errors.without_secrets(shown) == shown


@pytest.mark.parametrize(
    "name",
    [
        *("token", "access_token", "auth", "authorization", "sig", "signature", "Signature", "X-Amz-Signature"),
        *("X-Amz-Credential", "X-Amz-Security-Token", "X-Goog-Signature", "X-Goog-Credential", "Policy", "password"),
        *("passwd", "secret", "client_secret", "key", "jwt", "apikey", "api-key", "api_key", "X-API-Key", "accesskey"),
        *("access_key", "access-key", "AWSAccessKeyId", "secret_access_key", "SIG", "TOKEN", "pwd"),
    ],
)
def test_the_value_of_a_parameter_that_looks_like_a_credential_is_never_shown(name):
    url = f"https://host/a.tar?a=1&{name}=s3cr%2Bt&b=2"
    assert "s3cr" not in errors.without_secrets(url)
    assert errors.without_secrets(url).endswith("&b=2")
    assert errors.secrets_in(url) == {"s3cr%2Bt", "s3cr+t"}


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("https://host/a.tar?x=1", set()),
        ("https://us%40er:p%2Fw@host/a.tar", {"us%40er", "us@er", "p%2Fw", "p/w"}),
        ("https://user@host/a.tar?sig=%3D&token=", {"user", "%3D", "="}),
        ("https://u:p:q@host/a.tar", {"u", "p", "q"}),
    ],
)
def test_the_secrets_of_a_url_are_known_as_they_stand_and_as_they_are_meant(url, secrets):
    assert errors.secrets_in(url) == secrets


def test_no_error_keeps_or_shows_a_secret():
    url = "https://user:SECRET@host/a.tar?sig=SECRET"
    for cls in CLASSES:
        for name in ("url", "shard", "path"):
            if name in inspect.signature(cls).parameters:
                error = cls("it failed", **{name: url})
                assert "SECRET" not in str(error)
                assert "SECRET" not in repr(error)
                assert "https://host/a.tar" in str(error)
    assert "SECRET" not in errors.StorageError("it failed", url=url).url
