from __future__ import annotations

import pytest

from shardset.loading.path_filter import PathFilter

PATHS = ["a/cat.jpg", "a/dog.jpg", "b/cat.png", "b/c.d/x[1].jpg", "Cat.JPG", "cat.jpg"]


def through(*args):
    found = PathFilter(*args)
    return [path for path in PATHS if found(path)]


@pytest.mark.parametrize(
    ("include", "exclude", "mode", "expected"),
    [
        (["cat"], None, "auto", ["a/cat.jpg", "b/cat.png", "cat.jpg"]),
        (["cat"], None, "contains", ["a/cat.jpg", "b/cat.png", "cat.jpg"]),
        (["cat.jpg"], None, "exact", ["a/cat.jpg", "cat.jpg"]),
        (["a/dog.jpg", "Cat.JPG"], None, "exact", ["a/dog.jpg", "Cat.JPG"]),
        (["a/*"], None, "glob", ["a/cat.jpg", "a/dog.jpg"]),
        (["?at.jpg"], None, "auto", ["a/cat.jpg", "cat.jpg"]),
        (["b*jpg"], None, "auto", ["b/c.d/x[1].jpg"]),
        (["x[1]*"], None, "glob", ["b/c.d/x[1].jpg"]),
        ([r"^a/|\d"], None, "regex", ["a/cat.jpg", "a/dog.jpg", "b/c.d/x[1].jpg"]),
        (["re:^c"], None, "auto", ["a/cat.jpg", "b/cat.png", "cat.jpg"]),
        (None, ["cat"], "auto", ["a/dog.jpg", "b/c.d/x[1].jpg", "Cat.JPG"]),
        (["jpg"], ["a/", "["], "contains", ["cat.jpg"]),
        ([], [], "no such mode", PATHS),
        ([""], ("",), "auto", PATHS),
    ],
    ids=str,
)
def test_paths_get_through_by_any_include_and_no_exclude(include, exclude, mode, expected):
    assert through(include, exclude, mode) == expected


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("cat", None, "auto"), TypeError),
        (([1], None, "auto"), TypeError),
        ((["cat"], None, "Contains"), ValueError),
        ((["("], None, "regex"), ValueError),
        ((None, ["re:("], "auto"), ValueError),
    ],
    ids=str,
)
def test_what_is_no_filter_is_refused(arguments, kind):
    with pytest.raises(kind):
        PathFilter(*arguments)
