"""Gets the blocks that a read wants: those that are there, those to be downloaded, those that others download."""

from __future__ import annotations

import logging
import time
from concurrent.futures import CancelledError
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

from shardset.errors import RangeIgnoredError

from .cache_entry import shown_url
from .cache_files import NotCachedError
from .planner import read_ahead
from .remote import RemoteReader
from .store import UNKNOWN

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator, Sequence

    from shardset.files import FileLock

    from .cache_files import Block, Part
    from .cache_folder import Removed
    from .cache_process import CacheProcess
    from .cache_reader import Cut
    from .store import Reader

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 64 << 20
_MOST_CLAIMS: Final = 32
_WINDOW: Final = 8 << 20
_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.05
# What stores say of an object whose place tells no version.
_NO_IDENTITIES: Final = frozenset({"", UNKNOWN})


def get_blocks(
    here: CacheProcess,
    cut: Cut,
    numbers: Sequence[int],
    source: Callable[[], Reader],
    *,
    stop: threading.Event | None = None,
) -> dict[int, Block | None]:
    """Open blocks of an object, after downloading those that are not there; None for those that cannot be cached.

    Args:
        here: The cache.
        cut: The object.
        numbers: Which blocks.
        source: Gives the reader to download them with.
        stop: Given by a background download: when it is set, the download is given up.

    Raises:
        CancelledError: `stop` was set.
        StorageError: A download failed, now or before in the background.
    """
    return _Request(here, cut, source, stop).get(numbers)


class _Request:
    """One call of `get_blocks`."""

    def __init__(
        self, here: CacheProcess, cut: Cut, source: Callable[[], Reader], stop: threading.Event | None
    ) -> None:
        self._here = here
        self._cut = cut
        self._source = source
        self._stop = stop
        self._found: dict[int, Block | None] = {}

    def get(self, numbers: Sequence[int]) -> dict[int, Block | None]:
        here, cut, found = self._here, self._cut, self._found
        try:
            for number in numbers:
                block = here.find(cut, number)
                if block is not None:
                    found[number] = block
            if found:
                here.count(hits=len(found))
            if len(found) < len(numbers):
                self._fetch([number for number in numbers if number not in found])
        except NotCachedError as error:
            for number in numbers:
                if number not in found:
                    self._read_through(number, error)
        return found

    def _fetch(self, missing: Sequence[int]) -> None:
        """Download blocks that nobody else downloads, and wait for the others, until all are found.

        Nobody waits with a claim in hand, so that no two can wait for each other.
        """
        here, cut = self._here, self._cut
        if self._stop is None:
            here.background.take_over(cut.key, is_all=cut.is_whole)
        if cut.info.identity in _NO_IDENTITIES:
            raise NotCachedError("no_identity", "its place does not tell which version it is")
        began, pause, waited_for = time.monotonic(), _FIRST_PAUSE, 0
        while missing:
            claims: dict[int, FileLock] = {}
            try:
                left = self._claim(missing, claims)
                others = [number for number in missing if number in self._found]
                waited_for += sum(cut.length(number) for number in others)
                if claims:
                    self._download(claims)
            finally:
                for claim in claims.values():
                    claim.release(remove=True)
            if len(left) == len(missing):
                if self._stop is not None and self._stop.is_set():
                    raise CancelledError
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            missing = left
        here.background.forget(cut.key)
        if waited_for:
            here.count(waits=1)
            here.tell("waited", cut.info.url, waited_for, time.monotonic() - began)

    def _claim(self, missing: Sequence[int], claims: dict[int, FileLock]) -> list[int]:
        """Claim as many blocks as are downloaded at once; return those that are left for later or for others."""
        here, cut = self._here, self._cut
        length = 0
        left = []
        for number in missing:
            is_full = claims and (length + cut.length(number) > _AT_ONCE or len(claims) == _MOST_CLAIMS)
            claim = None if is_full else here.folder.claim(cut.name(number))
            if claim is None:
                left.append(number)
                continue
            claims[number] = claim
            block = here.find(cut, number)
            if block is None:
                length += cut.length(number)
            else:  # another has just published it
                self._found[number] = block
                claims.pop(number).release(remove=True)
        return left

    def _download(self, claims: dict[int, FileLock]) -> None:
        """Download the blocks that were claimed, and open them."""
        here, cut, url = self._here, self._cut, self._cut.info.url
        began = time.monotonic()
        parts: dict[int, Part] = {}
        try:
            self._begin(claims, parts)
            if not parts:
                return
            length = sum(cut.length(number) for number in parts)
            here.count(in_flight=len(parts))
            try:
                here.tell("download_started", url, length)
                _fill(list(parts.values()), self._source(), self._stop)
                for number, part in parts.items():
                    part.publish()
                    self._found[number] = here.find(cut, number)
                    part.close()
            finally:
                here.count(in_flight=-len(parts))
            here.count(misses=len(parts), bytes_downloaded=length)
            here.tell("download_finished", url, length, time.monotonic() - began)
        except NotCachedError as error:
            for number in parts:
                if self._found.get(number) is None:
                    self._read_through(number, error)
        except BaseException as error:
            will_stream = isinstance(error, RangeIgnoredError) and not cut.is_whole
            if not will_stream and not isinstance(error, CancelledError):
                here.count(failures=1)
                here.tell("download_failed", url, seconds=time.monotonic() - began, message=str(error))
            raise
        finally:
            for part in parts.values():
                part.discard()

    def _begin(self, claims: dict[int, FileLock], parts: dict[int, Part]) -> None:
        """Make room for the blocks that were claimed, as far as there is any."""
        here, cut = self._here, self._cut
        for number, claim in claims.items():
            removed: list[Removed] = []
            try:
                parts[number] = here.folder.begin(
                    claim,
                    cut.name(number),
                    cut.entry(number),
                    stated=cut.stated(number),
                    let_go=here.kept.clear,
                    removed=removed,
                )
            except NotCachedError as error:
                self._read_through(number, error)
            finally:
                for entry in removed:
                    here.count(evictions=1, bytes_evicted=entry.bytes)
                    here.tell("evicted", entry.url or "", entry.bytes)

    def _read_through(self, number: int, error: NotCachedError) -> None:
        url = self._cut.info.url
        self._found[number] = None
        self._here.count(read_throughs=1, too_big=int(error.reason == "too_big"))
        message = f"{error.reason}: {error.detail}"
        logger.info("not cached (%s): %s", message, shown_url(url))
        self._here.tell("read_through", url, self._cut.length(number), message=message)


def _fill(parts: Sequence[Part], source: Reader, stop: threading.Event | None) -> None:
    """Write the bytes of parts as they come: several small ones by one call, a single one piece by piece."""

    def write(part: Part, piece: memoryview) -> None:
        if stop is not None and stop.is_set():
            raise CancelledError
        part.write(piece)

    if len(parts) > 1:
        infos = [part.info for part in parts]
        views = source.read_many([info.offset for info in infos], [info.length for info in infos])
        for part, view in zip(parts, views, strict=True):
            write(part, view)
        return
    [part] = parts
    info = part.info
    try:
        with closing(_iter_pieces(source, info.offset, info.length)) as pieces:
            for piece in pieces:
                write(part, piece)
    except RangeIgnoredError:
        stream = getattr(source, "stream", None)
        if stream is None or info.length != info.size:
            raise
        part.restart()
        stream(partial(write, part))


def _iter_pieces(source: Reader, offset: int, length: int) -> Generator[memoryview]:
    if isinstance(source, RemoteReader):
        yield from read_ahead(source.fetch, offset, length, source.limits)
        return
    for start in range(offset, offset + length, _WINDOW):
        yield source.view(start, min(_WINDOW, offset + length - start))
