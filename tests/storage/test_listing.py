import html
import json
import os
import time
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardset.storage.listing import Listing, parse_listing

HTML = "text/html; charset=utf-8"
URL = "http://example.org/data/shards/"

# What each server leaves out of its pages: names with a leading dot, or links that lead nowhere.
LEFT_OUT = {
    "nginx.html": {".hidden", ".git"},
    "nginx.json": {".hidden", ".git", "dangling"},
    "apache-plain.html": {"dangling"},
    "apache-fancy.html": {"dangling"},
    "apache-table.html": {"dangling"},
    "apache-debian.html": {"dangling"},
    "lighttpd.html": {".hidden", ".git", "dangling"},
    "caddy.html": set(),
    "caddy.json": set(),
    "python.html": set(),
}
# Two servers cannot write bytes that are no UTF-8: one writes a substitute, the other encodes them as only it can read.
BAD_NAME = "bad-\udcff\udcfe.tar"
WRITTEN_AS = {
    "caddy.json": "bad-\ufffd\ufffd.tar",
    "python.html": b"bad-\xed\xb3\xbf\xed\xb3\xbe.tar".decode("utf-8", "surrogateescape"),
}


@pytest.fixture(scope="module")
def pages(request):
    return request.config.rootpath / "tests" / "data" / "listings"


def find(page, url=URL, content_type=HTML):
    page = page.encode("utf-8", "surrogateescape") if isinstance(page, str) else page
    return parse_listing(page, content_type, url)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_page_of_a_real_server_gives_the_names_in_the_folder(pages, name):
    folder = json.loads((pages / "folder.json").read_text())
    found = parse_listing((pages / name).read_bytes(), folder["content_types"][name], "http://127.0.0.1/odd%20names/")
    files = {WRITTEN_AS.get(name, file) if file == BAD_NAME else file for file in folder["files"]}
    assert set(found.files) == files - LEFT_OUT[name]
    assert set(found.folders) == {*folder["folders"]} - LEFT_OUT[name]
    assert len(found.files) == len(set(found.files))


def test_names_that_a_page_shows_cut_short_are_whole(pages):
    for name in ("nginx.html", "apache-fancy.html"):
        page = (pages / name).read_bytes()
        assert b">long-xxxx" in page
        assert b"x" * 120 + b".tar<" not in page  # it is shown cut
        assert "long-" + "x" * 120 + ".tar" in find(page, "http://127.0.0.1/odd%20names/").files


def test_names_stand_in_the_order_of_the_page_each_once():
    page = '<a href="b"><img></a> <a href="b">b</a> <a href="d/">d</a> <a href="a">a</a> <a href="./b">again</a>'
    assert find(page) == Listing(("b", "a"), ("d",))


def test_only_links_right_below_the_page_count():
    inside = "a.tar"
    for href in (
        *(
            "../",
            "..",
            "../a.tar",
            "/",
            "/a.tar",
            "/data/a.tar",
            "/data/shards",
            "/data/shards/",
            "/data/shards/x/a.tar",
        ),
        *("?C=N;O=D", "?C=M&O=A", "a.tar?download=1", "#top", "a.tar#x", "", ".", "./", "sub/a.tar", "./sub/a.tar"),
        *("http://example.org/", "http://other.org/data/shards/a.tar", "//other.org/data/shards/a.tar"),
        *("https://example.org/data/shards/a.tar", "http://example.org:81/data/shards/a.tar", "a//", "//", "///a"),
        *(
            "javascript:void(0)",
            "mailto:x@example.org",
            "data:text/html,x",
            "file:///etc/passwd",
            "java\nscript:x",
            " ",
        ),
        *("..%2f..%2fetc%2fpasswd", "%2e%2e", "%2e%2e/", ".%2e/", "%2e", "a%2fb", "a%2f", "%2f", "a%00b", "\0"),
        *(
            "/data/shards/..%2fa",
            "/data/shards/%2e%2e",
            "/data/shards/../a.tar",
            "http://[/a",
            "http://example.org:x/a",
        ),
    ):
        page = f'<a href="{html.escape(href)}">x</a><a href="{inside}">y</a>'
        assert find(page) == Listing((inside,)), href


def test_absolute_paths_and_urls_below_the_page_count():
    for href in (
        *("/data/shards/a.tar", "//example.org/data/shards/a.tar", "http://example.org/data/shards/a.tar"),
        *("http://EXAMPLE.org:80/data/shards/a.tar", "HTTP://example.org/data/shards/a.tar", "/data/sh%61rds/a.tar"),
        *(
            "/data/../data/shards/./a.tar",
            "\n/data/shards/a.tar ",
        ),
    ):
        assert find(f'<a href="{href}">x</a>') == Listing(("a.tar",)), href
        assert find(f'<a href="{href.rstrip()}/">x</a>') == Listing((), ("a.tar",)), href


def test_folders_are_compared_by_their_decoded_names():
    for url in ("http://h/a%20b/%7Ec/", "http://h/a b/~c/", "http://u:p@h:80/a%20b/~c/?token=1"):
        for href in ("/a%20b/~c/x", "/a b/%7ec/x", "http://h/a%20b/%7Ec/x"):
            assert find(f'<a href="{href}">x</a>', url) == Listing(("x",)), (url, href)
    assert find('<a href="/a/b/x">x</a>', "http://h/a%2Fb/") == Listing()
    assert find('<a href="/x">x</a><a href="y">y</a>', "http://h/") == Listing(("x", "y"))


def test_a_base_is_respected():
    links = '<a href="a.tar">x</a><a href="/data/shards/b.tar">y</a><a href="shards/c.tar">z</a>'
    assert find(f'<base href="http://example.org/data/shards/">{links}').files == ("a.tar", "b.tar")
    assert find(f'<base href="/data/shards/index.html">{links}').files == ("a.tar", "b.tar")
    assert find(f'<base target="_top">{links}').files == ("a.tar", "b.tar")
    assert find(f'<base href="/data/">{links}').files == ("b.tar", "c.tar")
    assert find(f'<base href="/data/"><base href="/data/shards/">{links}').files == ("b.tar", "c.tar")
    assert find(f'<base href="http://other.org/data/shards/">{links}').files == ()
    assert find(f'<base href="http://[">{links}') == Listing()


def test_links_that_are_commented_out_or_in_a_script_do_not_count():
    page = "<!-- <a href='old.tar'>x</a> --><script>'<a href=\"script.tar\">'</script><a href=new.tar>y</a>"
    assert find(page).files == ("new.tar",)


def test_entities_are_resolved_once():
    assert find('<a href="a&amp;b.tar">').files == ("a&b.tar",)
    assert find("<a href='a&amp;amp;b.tar'>").files == ("a&amp;b.tar",)
    assert find("<a href='&#x2e;&#46;&#x2f;x'>").files == ()


def test_json_gives_names_that_are_not_encoded():
    entries = [
        {"name": "a b%41.tar", "type": "file"},
        {"name": "sub", "type": "directory"},
        {"name": "fifo", "type": "other"},
        {"name": "caddy/", "is_dir": True},
        {"name": "caddy.tar", "is_dir": False},
        *({"name": name, "type": "file"} for name in ("..", ".", "", "a/b", "/", "a\0b", "\ud800", 5, None)),
        *({"name": name, "type": "directory"} for name in ("..", "../", "a/b/")),
        *("text", 7, None, [], {}, {"name": "no kind"}, {"type": "file"}),
    ]
    page = json.dumps(entries).encode()
    expected = Listing(("a b%41.tar", "caddy.tar"), ("sub", "caddy"))
    assert parse_listing(page, "application/json", URL) == expected
    assert parse_listing(b"\xef\xbb\xbf \n" + page, "", URL) == expected
    raw = b'[{"name":"bad-\xff","type":"file"},{"name":"caf\\udcc3\\udca9","type":"file"}]'
    assert parse_listing(raw, "application/json; charset=utf-8", URL).files == ("bad-\udcff", "café")


def test_what_is_no_folder_page_gives_nothing():
    for content_type in ("application/x-tar", "application/octet-stream", "text/plain", "image/svg+xml"):
        assert parse_listing(b'<a href="a.tar">x</a>', content_type, URL) == Listing()
        assert parse_listing(b'[{"name":"a","type":"file"}]', content_type, URL) == Listing()
    for page in (
        b"",
        b"\0" * 1000,
        b"hello",
        b"<html><p>Welcome</p></html>",
        b"{}",
        b"[1,2]",
        b"null",
        b'["a.tar"]',
        b"[",
    ):
        for content_type in ("", HTML, "application/json"):
            assert parse_listing(page, content_type, URL) == Listing()
    assert parse_listing(b'<a href="a.tar">x</a>', "", URL).files == ("a.tar",)


NAMES = st.text(
    st.one_of(st.sampled_from(" %#?&;:+='\"<>\\.~éß日\U0001f600\udc80\udcff-_a1"), st.characters(codec="utf-8")),
    min_size=1,
).filter(lambda name: name not in {".", ".."} and "/" not in name and "\0" not in name)


def canonical(name):
    """Return a name as decoding gives it: escaped bytes that make a character are that character."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=8))
@example([(".hidden", False), ("a&copy", False), ("%2e%2e", True)])
@example([("javascript:x", False)])
def test_every_name_comes_back_through_a_page_of_encoded_links(names):
    links = "".join(
        f'<a href="{html.escape(quote(name.encode("utf-8", "surrogateescape")))}{"/" * folder}">x</a>\n'
        for name, folder in names
    )
    files = dict.fromkeys(canonical(name) for name, folder in names if not folder)
    folders = dict.fromkeys(canonical(name) for name, folder in names if folder)
    assert find(f"<pre>{links}</pre>") == Listing(tuple(files), tuple(folders))


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=8))
def test_every_name_comes_back_through_a_page_of_json(names):
    entries = [{"name": name, "type": "directory" if folder else "file"} for name, folder in names]
    page = json.dumps(entries, ensure_ascii=False).encode("utf-8", "surrogateescape")
    files = dict.fromkeys(canonical(name) for name, folder in names if not folder)
    folders = dict.fromkeys(canonical(name) for name, folder in names if folder)
    assert parse_listing(page, "application/json", URL) == Listing(tuple(files), tuple(folders))


MARKUP = st.sampled_from(
    [
        *(
            "<",
            ">",
            "</",
            "<a",
            "<a ",
            "href",
            "=",
            '"',
            "'",
            " ",
            "\n",
            "<!",
            "<!--",
            "-->",
            "--",
            "<![",
            "]]>",
            "<?",
            "&",
        ),
        *(
            "<base",
            "<script>",
            "</script",
            "%2f",
            "%2e",
            "..",
            "/",
            "\\",
            "?",
            "#",
            ":",
            "//",
            "[",
            "]",
            "&#x2f;",
            "&#",
            ";",
        ),
        *(
            "x",
            "\0",
            "\x1f",
            "\udcff",
            "é",
            "CDATA",
            "<!DOCTYPE",
            "%",
            "%zz",
            "http:",
            "@",
            "javascript:",
            '<a href="',
            '">',
        ),
    ]
)


@given(st.lists(MARKUP, max_size=40).map("".join), st.sampled_from([URL, "http://h/", "http://u@[::1]:8/a%2f/?q", "x"]))
def test_no_page_however_broken_gives_a_name_that_leads_elsewhere(page, url):
    for content_type in (HTML, "application/json", ""):
        for name in (name for names in find(page, url, content_type) for name in names):
            assert name not in {"", ".", ".."}
            assert "/" not in name
            assert "\0" not in name
            name.encode("utf-8", "surrogateescape")


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(page):
    for content_type in (HTML, "application/json"):
        parse_listing(b'<a href="' + page, content_type, URL)
        parse_listing(b'[{"name":"' + page, content_type, URL)


HOSTILE = {
    "nested tags": "<div>",
    "open links": "<a ",
    "open links with a quote": '<a href="',
    "open brackets": "<",
    "closing tags": "</",
    "comments": "<!-- --",
    "declarations": "<!x ",
    "sections": "<![x",
    "known sections": "<![CDATA[",
    "instructions": "<?",
    "entities": "&#x",
    "ampersands": "&",
    "scripts": "<script></",
    "attributes": "<a b='c' ",
    "json arrays": "[",
    "json objects": '{"a":',
    "digits": "&#9",
}


@pytest.mark.slow
@pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE)
def test_the_time_that_a_hostile_page_takes_grows_no_faster_than_its_length(piece):
    def seconds(length):
        times = []
        for start, end in (("", ""), ('<a href="a">', ""), ('<a href="', '">')):
            page = f"{start}{piece * (length // len(piece))}{end}"
            begin = time.process_time()
            find(page)
            find(page, content_type="application/json")
            times.append(time.process_time() - begin)
        return sum(times)

    # A square would be 64 times as long for 8 times the length, and minutes for ten megabytes.
    short, long = seconds(20_000), seconds(160_000)
    if long >= 24 * short + 0.2:  # a busy machine: once more
        short, long = min(short, seconds(20_000)), min(long, seconds(160_000))
    assert long < 24 * short + 0.2


@pytest.mark.slow
def test_a_quarter_of_a_million_links_and_as_many_nested_tags_are_read_in_seconds():
    begin = time.process_time()
    assert len(find("".join(f"<a href={number}.tar>\n" for number in range(250_000))).files) == 250_000
    assert find("<div>" * 250_000) == Listing()
    assert time.process_time() - begin < 30


def test_a_number_of_thousands_of_digits_for_a_character_gives_nothing():
    assert find('<a href="a"></a><a href="&#' + "9" * 5000 + ';">') == Listing()


def test_a_section_that_the_parser_of_the_standard_library_fails_on_is_passed_over():
    page = '<![endif]><![x [ ]]><a href="a.tar">'
    assert find(page).files == ("a.tar",)
