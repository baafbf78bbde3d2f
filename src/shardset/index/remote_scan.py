"""Finding the members of a shard that lies elsewhere, where a read takes milliseconds however short it is.

`scan_tar` stays the only judge of what a tar holds. It asks a `HeaderSource` for bytes, and the source guesses what it
will ask for next and reads that ahead. A wrong guess costs a read and never changes the result, because an answer is
always the bytes of the very range asked for.

- Where members are small, the shard is **streamed**: long pieces in order, several on their way at once.
- Where payloads are large, they are jumped over: reads **hop** from header to header by the sizes that these state.
  One hop must wait for the one before, so several lanes do it side by side: each begins somewhere in the shard, looks
  for the first block that is a header, and hops on from there. If that was a header inside a payload (a tar in a tar),
  its blocks are never asked for.

Which of the two pays is told by the bytes that one read advances, and may change anywhere in a shard.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardset.formats.tar import TarTable, scan_tar
from shardset.formats.tar_header import BLOCK
from shardset.storage.threads import run_all, submit

from .header_lanes import HOP_ABOVE, LOOK, NEAR, HeaderLanes, Pace, follow_headers, hop_advance

if TYPE_CHECKING:
    from concurrent.futures import Future

    from shardset.storage.remote import RemoteReader

_WHOLE: Final = 2 << 20
"""A shard up to this size is read whole: twenty hops would take longer."""
_FIRST_SHARE: Final = 512
"""The first window is this part of the shard, so that it stays far below a per cent."""
_FIRST_LEAST: Final = 16 << 10
_FIRST_MOST: Final = 256 << 10
_TAIL: Final = 10 << 10
"""The end of the shard, where the zero blocks are: tars are padded to 10 KiB."""
_PIECE: Final = 1 << 20
_IN_FLIGHT: Final = 16 << 20
"""Bytes of stream that may be on their way or waiting."""
_FIRST_PIECES: Final = 4
_ENOUGH: Final = 8
"""Headers that must have been seen before the first window alone makes the shard be streamed."""
_LONGEST_RUN: Final = 1 << 20
"""What is asked for block by block, as sparse maps and zeros at the end are, is streamed after this many bytes."""


def scan_remote(reader: RemoteReader, *, ignore_zeros: bool = False) -> TarTable:
    """Find every member of a remote tar, as `scan_tar` does.

    Raises:
        StorageError: A read that the scan needs failed.
    """
    size = reader.size
    if size <= _WHOLE:
        whole = reader.view(0, size)
        return scan_tar(
            lambda offset, length: whole[offset : offset + length], size, is_mapped=True, ignore_zeros=ignore_zeros
        )
    source = HeaderSource(reader)
    try:
        return scan_tar(source.read, size, window=source.window, ignore_zeros=ignore_zeros)
    finally:
        source.close()


class HeaderSource:
    """Gives `scan_tar` the bytes that it asks for, many of them read before it asked.

    For one scan, which goes forward through the shard from byte 0, in one thread; lanes and pieces run in others.
    """

    def __init__(self, reader: RemoteReader) -> None:
        self._reader = reader
        self._size = reader.size
        self._lanes = HeaderLanes(reader)
        self._stream = _Stream(reader)
        first = min(max(self._size // _FIRST_SHARE, _FIRST_LEAST), _FIRST_MOST, self._size) & -BLOCK
        head, tail = memoryview(bytearray(first)), memoryview(bytearray(min(_TAIL, self._size)))
        self._tail = self._size - len(tail), tail
        self._window = 0, head
        run_all([lambda: reader.fetch(0, head), lambda: reader.fetch(*self._tail)], 2)
        self._is_streaming = False
        self._looked_to = 0
        self._run = 0
        self._pace = Pace(0)
        chain = follow_headers(head, 0, LOOK)
        if chain.places:
            self._lanes.begin(chain)
            if hop_advance(chain) >= HOP_ABOVE:
                self._lanes.plan(chain.following)
            elif len(chain.places) >= _ENOUGH:
                self._start_stream(0)
            else:  # they may be small by chance
                self._pace.reads = len(chain.places)

    def close(self) -> None:
        """Give up what is still being read ahead."""
        self._lanes.stop()
        self._stream.stop()

    def window(self, position: int) -> memoryview | None:
        """Give a long run of whole blocks from the header at `position` on where the shard is streamed, else None."""
        if not self._is_streaming:
            return None
        if self._turns_to_hops(position):
            return None
        return self._stream.window(position)

    def read(self, offset: int, length: int) -> memoryview:
        """Give the bytes ``[offset, offset + length)``.

        Raises:
            StorageError: Reading them failed.
        """
        for base, data in (self._window, self._tail):
            if base <= offset and offset + length <= base + len(data):
                return data[offset - base : offset - base + length]
        if length > _PIECE:
            return self._reader.view(offset, length)
        if self._is_streaming:
            self._turns_to_hops(offset)
        found = self._stream.take(offset, length, further=self._is_streaming)
        if found is None and not self._is_streaming:
            found = self._hop(offset, length)
        return self._reader.view(offset, length) if found is None else found

    def _turns_to_hops(self, offset: int) -> bool:
        """See, once a piece, whether members have become so large that hopping pays; then begin to hop."""
        piece = None if offset < self._looked_to else self._stream.piece_at(offset)
        if piece is None:
            return False
        self._looked_to = offset + len(piece)
        chain = follow_headers(piece, 0, LOOK)
        if not chain.places or hop_advance(chain) < HOP_ABOVE:
            return False
        self._is_streaming = False
        self._pace.begin(offset)
        self._lanes.begin(chain)
        self._lanes.plan(max(offset + chain.following, self._stream.end))
        return True

    def _start_stream(self, offset: int) -> None:
        self._is_streaming = True
        self._looked_to = offset
        base, data = self._window
        known = (base, data) if base <= offset < base + len(data) else None
        self._stream.start(offset, known, _FIRST_PIECES)

    def _hop(self, offset: int, length: int) -> memoryview | None:
        """Give bytes from what a lane has read or is reading, or read them together with the headers near behind."""
        data = self._lanes.take(offset)
        if data is not None:
            self._window = offset, data
            self._run = 0
            self._pace.begin(offset + len(data))
        else:
            base, before = self._window
            is_near = 0 <= offset - base - len(before) <= NEAR
            self._run = 2 * max(self._run, length, BLOCK) if is_near else 0
            if self._run > _LONGEST_RUN:
                self._start_stream(offset)
                return self._stream.take(offset, length, further=True)
            cluster = self._lanes.read_cluster(offset, max(length, self._run))
            self._window = offset, cluster.data
            if self._pace.is_due:
                if self._pace.is_slow(offset):
                    self._start_stream(offset)
                self._pace.begin(offset)
            self._pace.reads += cluster.reads
            self._pace.length += len(cluster.data)
            if not self._is_streaming and cluster.chain.places and not cluster.chain.is_broken:
                self._lanes.note(cluster.chain)
                self._lanes.plan(offset + cluster.chain.following)
        data = self._window[1]
        return data[:length] if len(data) >= length else None


@dataclass(slots=True, eq=False)
class _Piece:
    start: int
    data: memoryview
    future: Future[None] | None

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def give_up(self) -> None:
        if self.future is not None:
            self.future.cancel()


class _Stream:
    """Reads pieces in order, some of them ahead. Pieces stand one behind the other without gaps."""

    def __init__(self, reader: RemoteReader) -> None:
        self._fetch = reader.fetch
        self._size = reader.size
        self._length = max(BLOCK, min(_PIECE, reader.limits.most) & -BLOCK)
        self._most = max(1, min(reader.limits.at_once, _IN_FLIGHT // self._length))
        self._ahead = 0
        self._pieces: deque[_Piece] = deque()
        self._reached = 0
        self.end = 0

    def start(self, offset: int, known: tuple[int, memoryview] | None, pieces: int) -> None:
        """Begin to read so many pieces at `offset`, or behind bytes that are known already."""
        if self._pieces and self._pieces[0].start <= offset <= self.end:
            return
        self.stop()
        self._ahead = min(pieces, self._most)
        if known is not None:
            self._pieces.append(_Piece(*known, None))
            offset = known[0] + len(known[1])
        self._reached = self.end = offset

    def stop(self) -> None:
        """Give up all pieces."""
        for piece in self._pieces:
            piece.give_up()
        self._pieces.clear()

    def take(self, offset: int, length: int, *, further: bool) -> memoryview | None:
        """Give bytes from the pieces; None if they lie elsewhere.

        Args:
            offset: Their first byte.
            length: How many.
            further: Read on, up to these bytes and ahead of them; begin anew there if they lie far on.

        Raises:
            Whatever reading a piece raised that they lie in.
        """
        while self._pieces and self._pieces[0].end <= offset - self._length:  # a border may be asked for once more
            self._pieces.popleft().give_up()
        if further:
            if not (self._pieces and self._pieces[0].start <= offset <= self.end):
                self.start(offset, None, 1)  # it may be far to the next header again
            self._read_on(offset, offset + length)
        parts = []
        for piece in self._pieces:
            if piece.start < offset + length and offset < piece.end:
                if piece.future is not None:
                    piece.future.result()
                    piece.future = None
                parts.append(piece.data[max(0, offset - piece.start) : offset + length - piece.start])
        if sum(map(len, parts)) < length:
            return None
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def window(self, offset: int) -> memoryview | None:
        """Give whole blocks from `offset` to the end of its piece, or of the next one if that is near."""
        piece = self.piece_at(offset)
        length = 0 if piece is None else len(piece)
        if length < self._length // 8:
            length = min(length + self._length, self._size - offset)
        length &= -BLOCK
        return self.take(offset, length, further=True) if length else None

    def piece_at(self, offset: int) -> memoryview | None:
        """Give the bytes from `offset` to the end of its piece, which is read if need be."""
        if offset >= self._size or self.take(offset, 1, further=True) is None:
            return None
        return next(piece.data[offset - piece.start :] for piece in self._pieces if offset < piece.end)

    def _read_on(self, offset: int, end: int) -> None:
        if offset >= self._reached:  # farther ahead with each piece, so that a wrong guess is not dear
            self._reached = offset + self._length
            self._ahead = min(self._ahead + 1, self._most)
        while self.end < self._size and self.end < max(end, offset + self._ahead * self._length):
            buffer = memoryview(bytearray(min(self._length, self._size - self.end)))
            self._pieces.append(_Piece(self.end, buffer, submit(self._fetch, self.end, buffer)))
            self.end += len(buffer)
