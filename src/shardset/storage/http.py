"""Objects on web servers, read by ranges. Every answer is checked before a byte of it counts.

The rules are those of RFC 9110, section 14; docs/remote.md says what a server must do to be read, and what is done
about those that do not.
"""

from __future__ import annotations

import errno
import logging
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, NoReturn

from shardset.errors import AccessError, ChangedError, NotFoundError, RangeIgnoredError, StorageError, TransferError
from shardset.policy import Place
from shardset.ranges import format_range, parse_content_range

from . import transport
from .answers import check_full, check_partial, digest_of, identity_of, is_encoded, plain_length
from .client import WebClient
from .listing import parse_listing
from .planner import ReadLimits
from .remote import OpenReaders, RemoteReader
from .retry import Retry
from .store import ObjectInfo, Store, split_query, url_join, url_name
from .threads import run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .answers import Head
    from .exchange import Sink
    from .listing import Listing
    from .loop import Talk
    from .remote import Fetching

    Take = Callable[[slice, bytes], object]
    """Is told which bytes of a range these are, and takes them."""

logger = logging.getLogger(__name__)

_MOST_LISTING: Final = 32 << 20
_MOST_FOLDERS: Final = 100_000
_DEEPEST: Final = 64
_FILES_COMPARED: Final = 3
_PAGES: Final = frozenset({"text/html", "application/xhtml+xml", "application/json", "text/json"})
_AT_ONCE: Final = 64


class HttpStore(Store):
    """Web servers: ``http://`` and ``https://`` urls, for reading.

    What is remembered: where redirects led, until they expire, and which version each url had. A version is what ETag
    (or else Last-Modified) and size say; once an object is open, an answer from another version is a `ChangedError`.

    Logins come from the url, from ``.netrc``, or from `headers`. Each is sent to its own origin and to no other, also
    when a redirect leads there. Proxies come from the environment, as curl takes them.

    Args:
        headers: Request headers by origin: ``{"https://example.org": {"Authorization": "Bearer ..."}}``.
        retry: When to give up.
        limits: How reads are merged and run side by side.
        allow_full_downloads: Where a server knows no ranges, download the object up to the bytes asked for, each time.
            Otherwise that is a `RangeIgnoredError`.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, Mapping[str, str]] | None = None,
        retry: Retry | None = None,
        limits: ReadLimits | None = None,
        allow_full_downloads: bool = False,
    ) -> None:
        self._headers = headers or {}
        self._retry = retry or Retry()
        self._limits = limits or ReadLimits(at_once=_AT_ONCE)
        self._allow_full_downloads = allow_full_downloads
        self._client = WebClient(self._headers, self._retry)
        self._readers = OpenReaders(self._ask, self._reader)

    def __reduce__(self) -> tuple[Callable[[], HttpStore], tuple[()]]:
        made = partial(
            HttpStore,
            headers=self._headers,
            retry=self._retry,
            limits=self._limits,
            allow_full_downloads=self._allow_full_downloads,
        )
        return made, ()

    def __repr__(self) -> str:
        return "HttpStore()"

    def info(self, url: str) -> ObjectInfo:
        """Ask the server, as `Store.info` says: by HEAD, or for the first byte where HEAD does not tell the size."""
        return self._readers.look(url)

    def open(self, url: str, known: ObjectInfo | None = None) -> RemoteReader:
        """Make a reader for the version that is known, or else that was seen last, as `Store.open` says."""
        return self._readers.open(url, known)

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Follow the folder pages of a server, as `Store.list` says, and ask it about each file.

        What a server leaves out of its pages (nginx: names that begin with a dot) is not found.
        """
        return self._list(url, (), count(1), report)

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> NoReturn:
        """Refuse: web servers are read only.

        Raises:
            AccessError: Always.
        """
        del data, expect
        raise AccessError("web servers are read only", url=url, hint="write to a folder or a bucket")

    def close(self) -> None:
        """Forget redirects and versions. Connections belong to the process, and the server closes those left idle."""
        self._client.forget()
        self._readers.clear()

    def _reader(self, info: ObjectInfo) -> RemoteReader:
        return RemoteReader(
            info, partial(self._fetch, info), self._limits, partial(self._stream, info), self._fetch_all
        )

    def _ask(self, url: str) -> ObjectInfo:
        _refuse_folder(url, url)
        head = None
        try:
            head = self._client.send(url, "HEAD", _Nothing())
        except (AccessError, TransferError) as error:
            # A signed url often lets nothing but GET through, and some servers know no HEAD.
            if isinstance(error, TransferError) and error.status not in {400, 405, 501}:
                raise
        _refuse_folder(url, self._client.target(url))
        if head is not None and head.status == 200:
            size = plain_length(head)
            if size is not None:
                return ObjectInfo(url, size, identity_of(head), digest_of(head))
        first = _FirstByte()
        head = self._client.send(url, "GET", first)
        size = first.size_by(head)
        if size is None:
            raise StorageError("the server does not tell the size of the object", url=url)
        return ObjectInfo(url, size, identity_of(head), digest_of(head))

    def _fetch(self, info: ObjectInfo, offset: int, view: memoryview) -> None:
        transport.carry_out(self._read(self._range(info, offset, view)))

    def _fetch_all(self, wanted: Sequence[Fetching], at_once: int) -> None:
        transport.carry_out_all([self._read(self._range(*found)) for found in wanted], at_once)

    def _range(self, info: ObjectInfo, offset: int, view: memoryview) -> _Range:
        # The slot itself: a function around it would cost as much as what it does, thousands of times a second.
        return _Range(info, offset, len(view), view.__setitem__, may_skip=self._allow_full_downloads)

    def _stream(self, info: ObjectInfo, take: Callable[[memoryview], object]) -> None:
        wanted = _Range(info, 0, info.size, lambda _, piece: take(memoryview(piece)), may_skip=True)
        transport.carry_out(self._read(wanted))

    def _read(self, wanted: _Range) -> Talk[None]:
        """Read a range: the steps for `transport`."""
        try:
            if wanted.missing():
                yield from self._ask_for(wanted)
        except (ChangedError, NotFoundError):
            self._readers.forget(wanted.info.url)
            raise

    def _ask_for(self, wanted: _Range) -> Talk[None]:
        info = wanted.info
        head = yield from self._client.talk(info.url, "GET", wanted)
        if head.status in {412, 416}:
            try:
                _, _, size = parse_content_range(head.headers.get("content-range", ""))
            except ValueError:
                size = None
            if size == info.size:
                what = f"the server refuses a range that the object of {size} bytes has (status {head.status})"
                raise RangeIgnoredError(what, url=info.url)
            now = "has another version" if size is None else f"has {size} bytes where there were {info.size}"
            raise ChangedError(
                f"the object changed while it was read: the server {now}", url=info.url, hint="open the dataset again"
            )

    def _list(
        self, url: str, above: tuple[tuple[str, Listing], ...], pages: count[int], report: Report | None
    ) -> Iterator[ObjectInfo]:
        """List one folder and what lies below; `above` are the folders that it was reached through."""
        if next(pages) > _MOST_FOLDERS:
            raise StorageError(f"more than {_MOST_FOLDERS} folders: do links lead back to folders above?", url=url)
        path, query = split_query(url)
        folder = f"{path.rstrip('/')}/{query}"
        page = _Page(url)
        head = self._client.send(folder, "GET", page)
        _check_page(url, head)
        found = parse_listing(bytes(page.content), head.headers.get("content-type", ""), folder)
        # A folder's files come where the slash after its name puts them: "a-b" before "a/b" before "a0".
        children = [(name.encode("utf-8", "surrogateescape"), name) for name in found.files]
        children += [(f"{name}/".encode("utf-8", "surrogateescape"), name) for name in found.folders]
        children.sort()
        infos: dict[str, ObjectInfo | None] = {}
        if len(above) > _DEEPEST or self._leads_back(url, found, above):
            _pass_over("link_loop", url, report)
            return
        for at, (sorted_by, name) in enumerate(children):
            child = url_join(url, name)
            if sorted_by.endswith(b"/"):
                yield from self._list(child, (*above, (url, found)), pages, report)
                continue
            if child not in infos:
                ahead = [name for by, name in children[at : at + 2 * _AT_ONCE] if not by.endswith(b"/")]
                infos = self._ask_many([url_join(url, name) for name in ahead])
            info = infos[child]
            if info is None:
                _pass_over("dangling_link", child, report)
            else:
                yield info

    def _leads_back(self, url: str, found: Listing, above: tuple[tuple[str, Listing], ...]) -> bool:
        """Tell whether a folder is one of those above it, seen again through a link.

        From outside that can only be guessed: it names what that one names, and in it the same versions of files.
        """
        names = found.files[:_FILES_COMPARED]
        alike = [folder for folder, listing in above if names and listing == found]
        return bool(alike) and self._versions(url, names) == self._versions(alike[-1], names)

    def _versions(self, url: str, names: Sequence[str]) -> tuple[tuple[str, int, str] | None, ...]:
        """Return which versions of some files stand in a folder."""
        infos = self._ask_many([url_join(url, name) for name in names]).values()
        return tuple(None if info is None else (url_name(info.url), info.size, info.identity) for info in infos)

    def _ask_many(self, urls: Iterable[str]) -> dict[str, ObjectInfo | None]:
        """Ask about many objects side by side; None for one that is not there."""
        infos: dict[str, ObjectInfo | None] = dict.fromkeys(urls)

        def ask(url: str) -> None:
            try:
                infos[url] = self.info(url)
            except NotFoundError:
                infos[url] = None

        run_all([partial(ask, url) for url in infos], _AT_ONCE)
        return infos


class _Nothing:
    """The body of a HEAD."""

    def ask(self) -> dict[str, str]:
        return {}

    def accept(self, head: Head) -> Sink | None:
        del head
        return None

    def missing(self) -> int:
        return 0


class _FirstByte:
    """Asks for the first byte, to learn the size of the whole."""

    def ask(self) -> dict[str, str]:
        return {"Range": format_range(0, 1)}

    def accept(self, head: Head) -> Sink | None:
        return (lambda _: None) if head.status == 206 else None  # of a whole body, nothing is wanted

    def missing(self) -> int:
        return 0

    def size_by(self, head: Head) -> int | None:
        """Return the size that the answer tells. An empty object has no first byte, and its answer is 416."""
        if head.status == 200:
            return plain_length(head)
        try:
            return parse_content_range(head.headers.get("content-range", ""))[2]
        except ValueError:
            return None


class _Page:
    """Takes a page whole."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.content = bytearray()

    def ask(self) -> dict[str, str]:
        self.content.clear()
        return {}

    def accept(self, head: Head) -> Sink | None:
        del head
        return self._take

    def missing(self) -> int:
        return 0

    def _take(self, piece: bytes) -> None:
        self.content += piece
        if len(self.content) > _MOST_LISTING:
            raise StorageError(f"the folder's page has more than {_MOST_LISTING >> 20} MiB", url=self._url)


class _Range:
    """Takes a range of one version of an object, over as many answers as it needs.

    Args:
        info: The version.
        offset: First byte.
        length: Bytes.
        take: Is given each byte once, in order.
        may_skip: Take the range out of the whole object where the server sends that.
    """

    __slots__ = ("_done", "_length", "_may_skip", "_offset", "_take", "info")

    def __init__(self, info: ObjectInfo, offset: int, length: int, take: Take, *, may_skip: bool) -> None:
        self.info = info
        self._offset = offset
        self._length = length
        self._take = take
        self._may_skip = may_skip or (offset == 0 and length == info.size)
        self._done = 0

    def ask(self) -> dict[str, str]:
        return {"Range": format_range(self._offset + self._done, self._length - self._done)}

    def missing(self) -> int:
        return self._length - self._done

    def accept(self, head: Head) -> Sink | None:
        if head.status == 206:
            check_partial(self.info, self._offset + self._done, self.missing(), head)
            return self._take_part
        check_full(self.info, head, wanted=self._may_skip)
        return _Skip(self._offset + self._done, self._take_whole)

    def _take_part(self, piece: bytes) -> None:
        done = self._done + len(piece)
        if done > self._length:
            raise RangeIgnoredError("the server sends more than the range that was asked for", url=self.info.url)
        self._take(slice(self._done, done), piece)
        self._done = done

    def _take_whole(self, piece: bytes) -> bool:
        piece = piece[: self.missing()]
        self._take(slice(self._done, self._done + len(piece)), piece)
        self._done += len(piece)
        # The end of the object is waited for: more bytes than it had would be another version.
        return not self.missing() and self._offset + self._length < self.info.size


class _Skip:
    """Passes over the first bytes of a body."""

    def __init__(self, count: int, take: Sink) -> None:
        self._left = count
        self._take = take

    def __call__(self, piece: bytes) -> bool | None:
        if self._left >= len(piece):
            self._left -= len(piece)
            return None
        piece, self._left = piece[self._left :], 0
        return self._take(piece)


def _check_page(url: str, head: Head) -> None:
    """Refuse what cannot be the page of a folder.

    Raises:
        StorageError: It is compressed on its way though that was not asked for, or of another kind.
    """
    kind = head.headers.get("content-type", "text/html").partition(";")[0].strip().lower()
    if is_encoded(head) or kind not in _PAGES:
        what = "compressed" if is_encoded(head) else f"of type {kind}"
        raise StorageError(
            f"what the server gives for this folder is {what}, and no page that lists it",
            url=url,
            hint="name the shards by a pattern in braces, or in a file that lists them",
        )


def _refuse_folder(url: str, target: str) -> None:
    """Refuse a url that is, or leads to, a folder's page.

    Raises:
        StorageError: It does; its number is EISDIR.
    """
    if split_query(target)[0].endswith("/"):
        error = StorageError("not an object but a folder", url=url)
        error.errno = errno.EISDIR
        raise error


def _pass_over(code: str, url: str, report: Report | None) -> None:
    place = Place(url)
    if report is None:
        logger.warning("passed over in a listing (%s): %s", code, place)
    else:
        report.add(code, place)
