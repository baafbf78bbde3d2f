"""The bytes of one shard in order: a map of a local file, what a store reads ahead, a pipe, or what these unpack to."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import ShardsetError
from shardset.formats.stream_compression import HEAD_SIZE, detect_compression, inflate_shard
from shardset.storage.anywhere import AnyStore
from shardset.storage.local import LocalReader, local_path
from shardset.storage.store import url_scheme
from shardset.storage.streams import STDIN, is_stream, iter_pieces, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

    from shardset.policy import Report
    from shardset.storage.file_cache import FileCache
    from shardset.storage.store import Reader, Store
    from shardset.storage.streams import Openers

_MAPPED: Final = 32 << 20
_FIRST: Final = 256 << 10
_MOST: Final = 8 << 20
_PIECE: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where shards lie, and how they are reached.

    Attributes:
        store: Serves urls; by default the place that each scheme names.
        openers: By scheme, functions that open a url as a binary file, for schemes that no store has.
        cache: Keeps shards that are elsewhere as files; None to read them where they are.
    """

    store: Store = field(default_factory=AnyStore)
    openers: Openers = field(default_factory=dict)
    cache: FileCache | None = None


class MappedBytes:
    """A local file through its memory map."""

    error: ShardsetError | None = None
    base = 0

    def __init__(self, reader: Reader, close: Callable[[], None]) -> None:
        self._reader = reader
        self._close = close
        self.size: int | None = reader.size

    def window(self, offset: int, least: int) -> tuple[Buffer, bool]:
        """Give a window as `Windows.window` says, without reading anything.

        A view among the answers is one of an object that is the whole shard, and of which slices are bytes.
        """
        whole = self._reader.map()
        if whole is None:
            raise ShardsetError("the map is gone")
        end = min(len(whole), offset + max(least, _MAPPED))
        view = whole[offset:end]
        is_whole = isinstance(whole.obj, mmap.mmap | bytes) and len(whole.obj) == len(whole)
        return view if is_whole else bytes(view), end == len(whole)

    def close(self) -> None:
        """Let go of the file; the map goes with the last view of it."""
        self._close()


class StreamedBytes:
    """Pieces that come one after the other, of which those still needed are held.

    Args:
        pieces: The pieces.
        close: Ends whatever gives them.
        base: The byte of the shard that the first one begins with.
        size: The shard's bytes, where they are known.
        has_more: Tells whether the next piece comes at once; what is there is then not kept waiting for it.

    Attributes:
        error: What went wrong with the pieces. What came before it is given, and then the bytes end.
    """

    def __init__(
        self,
        pieces: Iterator[Buffer],
        close: Callable[[], None],
        base: int = 0,
        *,
        size: int | None = None,
        has_more: Callable[[], bool] | None = None,
    ) -> None:
        self._pieces = pieces
        self._close = close
        self._has_more = has_more
        self.base = self._base = base
        self.size = size
        self._held: list[Buffer] = []
        self._length = 0
        self._size = _FIRST
        self._is_all = False
        self.error: ShardsetError | None = None

    def window(self, offset: int, least: int) -> tuple[Buffer, bool]:
        """Give a window as `Windows.window` says: small at first, so that the first samples come soon."""
        self._let_go(offset)
        wanted, self._size = max(least, self._size), min(2 * self._size, _MOST)
        before = self._length
        while self._length < wanted and not self._is_all:
            if self._length >= max(least, before + 1) and self._has_more is not None and not self._has_more():
                break
            self._hold_more()
            self._let_go(offset)
        data = bytes(self._held[0]) if len(self._held) == 1 else b"".join(self._held)
        self._held = [data]
        return data, self._is_all

    def close(self) -> None:
        """End whatever gives the pieces."""
        self._is_all = True
        self._close()

    def _hold_more(self) -> None:
        try:
            piece = next(self._pieces, None)
        except ShardsetError as error:
            self.error, piece = error, None
        if piece is None:
            self._is_all = True
        else:
            self._held.append(piece)
            self._length += memoryview(piece).nbytes

    def _let_go(self, offset: int) -> None:
        """Let go of what stands before `offset`."""
        while self._held and self._base < offset:
            first = memoryview(self._held[0])
            gone = min(offset - self._base, first.nbytes)
            if gone == first.nbytes:
                self._held.pop(0)
            else:
                self._held[0] = first[gone:]
            self._base += gone
            self._length -= gone


if TYPE_CHECKING:
    ShardBytes = MappedBytes | StreamedBytes


def open_shard(
    url: str, place: ShardPlace, start: int = 0, report: Report | None = None
) -> tuple[ShardBytes, str | None]:
    """Open a shard for reading it from byte `start` on, and say which local file it is, if it is one.

    A compressed shard is told by its content, and read from its beginning in any case.

    Raises:
        StorageError: It cannot be opened.
        FormatError: It is compressed in a way that cannot be read.
    """
    kept = place.cache.fetch(url) if place.cache is not None and url != STDIN else None
    if kept is not None:
        return _open_file(LocalReader(kept.path), kept.close, start, report), kept.path
    is_local = url_scheme(url) in {"", "file"}
    if is_stream(url, place.openers) or not (is_local or start):
        stream = open_stream(url, store=place.store, openers=place.openers)
        return _unpacked(iter_pieces(stream), stream.close, url, report, getattr(stream, "has_more", None)), None
    if not is_local:
        return _open_file(place.store.open(url), _nothing, start, report), None
    # A store keeps files open for whoever comes back to them; here nobody does.
    reader = LocalReader(url) if isinstance(place.store, AnyStore) else place.store.open(url)
    return _open_file(reader, _nothing, start, report), local_path(url)


def _open_file(reader: Reader, close: Callable[[], None], start: int, report: Report | None) -> ShardBytes:
    head = reader.read(0, min(HEAD_SIZE, reader.size))
    if detect_compression(head) is not None:
        return _unpacked(_pieces(reader, 0), close, reader.url, report)
    if reader.map() is not None:
        return MappedBytes(reader, close)
    return StreamedBytes(_pieces(reader, start), close, start, size=reader.size)


def _unpacked(
    pieces: Iterator[Buffer],
    close: Callable[[], None],
    url: str,
    report: Report | None,
    has_more: Callable[[], bool] | None = None,
) -> StreamedBytes:
    return StreamedBytes(iter(inflate_shard(pieces, shard=url, report=report)), close, has_more=has_more)


def _pieces(reader: Any, offset: int) -> Iterator[Buffer]:
    """Read an object in order; what is elsewhere reads ahead by itself."""
    iter_pieces = getattr(reader, "iter_pieces", None)
    if iter_pieces is not None:
        yield from iter_pieces(offset)
        return
    while offset < reader.size:
        piece = reader.read(offset, min(_PIECE, reader.size - offset))
        offset += len(piece)
        yield piece


def _nothing() -> None:
    """Have nothing to close."""
