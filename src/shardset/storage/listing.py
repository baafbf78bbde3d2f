"""The names on a web server's folder page: pure functions, from the bytes of the page to what lies in the folder.

Read are the pages of nginx (HTML and JSON), Apache (all its styles), lighttpd, Caddy (HTML and JSON) and Python's
``http.server``, and whatever else links from a folder to what lies in it. No server says what a page must look like,
so a name is what a link leads to and never what the page shows for it: nginx and Apache cut long names short there.
A link counts only if it leads right below the page's own url.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_HTML: Final = ("text/html", "application/xhtml+xml")
_JSON: Final = ("application/json", "text/json")
_PORTS: Final = {"http": 80, "https": 443}
# Browsers take these away around an address, and the last three also from its middle (URL standard, 4.4).
_AROUND: Final = "\t\n\f\r "
_INSIDE: Final = str.maketrans("", "", "\t\n\r")


class Listing(NamedTuple):
    """What lies right in a folder: names without slashes, each once, in the order of the page.

    Bytes of a name that are no UTF-8 are surrogate escapes, as in `os.fsdecode`.

    Attributes:
        files: Names of files.
        folders: Names of folders.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def parse_listing(page: bytes, content_type: str, url: str) -> Listing:
    """Find the names on a folder page.

    What is no folder page gives no names, and neither does one that cannot be parsed. The time is proportional to the
    length of the page, whatever stands in it.

    Args:
        page: The body of the answer. It must not be compressed.
        content_type: The header of that name, or ``""``.
        url: The address of the page, which ends with a slash before any query.
    """
    kind = content_type.partition(";")[0].strip().lower()
    start = page[:100].lstrip(b"\xef\xbb\xbf\t\n\f\r ")
    if kind in _JSON or (not kind and start.startswith(b"[")):
        return _collect(_json_names(page))
    if kind in _HTML or (not kind and start.startswith(b"<")):
        return _collect(_html_names(page, url))
    return Listing()


def _collect(names: Iterable[tuple[str, bool]]) -> Listing:
    """Sort names into files and folders, and leave out what can be no name."""
    files: dict[str, None] = {}
    folders: dict[str, None] = {}
    for name, is_folder in names:
        if name not in {"", ".", ".."} and "/" not in name and "\0" not in name:
            (folders if is_folder else files)[name] = None
    return Listing(tuple(files), tuple(folders))


def _json_names(page: bytes) -> Iterator[tuple[str, bool]]:
    """Yield the names on a page of nginx (``type``) or Caddy (``is_dir``), each with whether it is a folder's."""
    try:
        entries = json.loads(page.decode("utf-8", "surrogateescape").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue
        try:
            name = _encode(entry["name"]).decode("utf-8", "surrogateescape").removesuffix("/")
        except UnicodeEncodeError:  # half of a character that JSON writes in two
            continue
        kind = entry.get("type")
        if kind == "directory" or entry.get("is_dir") is True:
            yield name, True
        elif kind == "file" or entry.get("is_dir") is False:
            yield name, False


def _html_names(page: bytes, url: str) -> Iterator[tuple[str, bool]]:
    """Yield the names that links lead to, each with whether it is a folder's."""
    links = _Links()
    try:
        # Without `close`, which would look at an unfinished tag again and again.
        links.feed(page.decode("utf-8", "surrogateescape"))
        here = _folder_of(url)
        base = urljoin(url, links.base) if links.base else url
        base_is_here = _folder_of(base) == here
    except ValueError:  # a number with thousands of digits for a character, or a base that is no url
        return
    for found in links.found:
        href = found.strip(_AROUND).translate(_INSIDE)
        if "?" in href or "#" in href:
            continue  # the same folder in another order, or a place on the page
        name = href.removeprefix("./").removesuffix("/")
        if not base_is_here or href.startswith("/") or ":" in name.partition("/")[0]:
            try:
                target = urljoin(base, href).removesuffix("/")
                if _folder_of(target) != here:
                    continue
            except ValueError:
                continue
            name = target.rpartition("/")[2]
        # A relative link with a slash within leads deeper, or up: as a name it will be refused.
        yield unquote_to_bytes(_encode(name)).decode("utf-8", "surrogateescape"), href.endswith("/")


def _folder_of(url: str) -> tuple[str, str | None, int | None, list[bytes]]:
    """Return what tells one folder from another: scheme, host, port and the names on the way, decoded.

    Raises:
        ValueError: It is no url.
    """
    parts = urlsplit(url)
    names = parts.path.rpartition("/")[0].split("/")
    port = parts.port or _PORTS.get(parts.scheme)
    return parts.scheme, parts.hostname, port, [unquote_to_bytes(_encode(name)) for name in names]


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class _Links(HTMLParser):
    """Finds where links lead, and what they start from."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)  # the text between tags is not needed
        self.base: str | None = None
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            href = dict(reversed(attrs)).get("href")  # of two, the first counts
            if href:
                self.found.append(href)
        elif tag == "base" and self.base is None:
            self.base = dict(reversed(attrs)).get("href")

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        # The inherited method fails on sections that it does not know; in HTML each is a comment.
        del report
        return self.parse_bogus_comment(i)
