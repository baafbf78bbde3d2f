"""Decompresses gzip and zlib files that are damaged, as far as that can be done, and goes on behind the damage.

What comes out before an error is given out to the last byte. Behind it a file can be read on from the next gzip member,
or from a point at which the writer has flushed everything (Z_FULL_FLUSH); in between, nothing can be.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from typing_extensions import Buffer

StreamKind = Literal["gzip", "zlib"]
StreamCode = Literal[
    "bad_compression",
    "truncated_compression",
    "bad_compression_checksum",
    "compression_garbage",
    "compression_padding",
    "joined_streams",
]

_GZIP: Final = b"\x1f\x8b\x08"
_FLUSHED: Final = b"\0\0\xff\xff"
"""Where this stands in deflate data, an empty block ends at a byte."""
_WINDOW_BITS: Final[dict[str, int]] = {"gzip": 31, "zlib": 15, "raw": -15}
_TRAILER: Final[dict[str, int]] = {"gzip": 8, "zlib": 4}
_READ: Final = 4 << 20
_FED: Final = 64 << 10
_MOST: Final = 4 << 20
"""Bytes that are given out at once, however well they were compressed."""
_TRIED: Final = 4 << 10
_MADE_IN_TRIAL: Final = 64 << 10
_BACK: Final = 128 << 10
"""Damage is noticed behind the place where it is; by then the next member may have begun."""
_TRIALS_BACK: Final = 256
_RETURNS: Final = 16
"""How often one may return to bytes that were decompressed already, or bytes could be made that keep it busy."""


@dataclass(frozen=True, slots=True)
class StreamFault:
    """Something wrong with the compression of a file.

    Attributes:
        code: What it is.
        offset: Byte of the compressed file.
        length: Bytes of it that could not be used.
        at: How many decompressed bytes came before.
        message: One sentence.
    """

    code: StreamCode
    offset: int
    length: int
    at: int
    message: str


def starts_stream(head: Buffer, kind: str) -> bool:
    """Tell whether some bytes can be decompressed from the first on, as ``"gzip"``, ``"zlib"`` or ``"raw"`` deflate."""
    fed = bytes(head)
    if kind == "gzip" and not fed.startswith(_GZIP):
        return False
    inflater = zlib.decompressobj(_WINDOW_BITS[kind])
    try:
        made = inflater.decompress(fed, _MADE_IN_TRIAL)
    except zlib.error:
        return False
    return bool(made) or inflater.eof or len(fed) < _TRIED


def iter_inflated(
    read: Callable[[int, int], Buffer], size: int, compression: StreamKind
) -> Iterator[bytes | StreamFault]:
    """Yield what is in a compressed file, in order, and what is wrong with it at the place where it is noticed.

    Args:
        read: Gives `length` bytes from byte `offset` on, a range in the file.
        size: Bytes of the file.
        compression: Of the file.
    """
    yield from _Inflater(read, size, compression).run()


class _Inflater:
    """One pass over one file."""

    def __init__(self, read: Callable[[int, int], Buffer], size: int, compression: StreamKind) -> None:
        self.read = read
        self.size = size
        self.compression: StreamKind = compression
        self.given = 0
        self.trials_back_left = _TRIALS_BACK
        self.returns_left = _RETURNS
        self._start = 0
        self._bytes = memoryview(b"")

    def run(self) -> Iterator[bytes | StreamFault]:
        position, kind = 0, str(self.compression)
        while position < self.size:
            start = position
            position, error = yield from self._stream(start, kind)
            if error is None:
                if kind == "raw":
                    position = min(position + _TRAILER[self.compression], self.size)  # of bytes that are not all here
                position = yield from self._behind(position)
                kind = self.compression
            elif error == "truncated":
                message = f"the {self.compression} data ends before its end mark"
                yield StreamFault("truncated_compression", start, self.size - start, self.given, message)
                # A block that is not compressed swallows whatever follows, other members too.
                position, kind = self._find_member(start + 1, self.size), self.compression
            elif " check" in error and "header" not in error:
                message = f"the checksum of the {self.compression} data that begins at byte {start} is wrong"
                yield StreamFault("bad_compression_checksum", start, 0, self.given, message)
                # The error is noticed in the last byte of one of the two numbers.
                position = min(position + (5 if self.compression == "gzip" and "data" in error else 1), self.size)
                position = yield from self._behind(position, start + 1)
                kind = self.compression
            else:
                found, kind = self._resume(start, position)
                message = f"the {self.compression} data is damaged ({error})"
                yield StreamFault("bad_compression", position, max(found - position, 0), self.given, message)
                position = found

    def _stream(self, position: int, kind: str) -> Generator[bytes, None, tuple[int, str | None]]:
        """Yield what one stream holds; return where it ends or breaks, and what zlib says of it."""
        inflater = zlib.decompressobj(_WINDOW_BITS[kind])
        while position < self.size:
            pending = bytes(self._piece(position, _FED))
            while pending:
                # zlib keeps back what it made before it met an error; a copy lets one ask for it again.
                before = inflater.copy()
                try:
                    made = inflater.decompress(pending, _MOST)
                except zlib.error as error:
                    good, made = _feed_until_error(before, pending)
                    if made:
                        yield self._give(made)
                    return position + good, str(error).rpartition(": ")[2]
                if made:
                    yield self._give(made)
                rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
                position += len(pending) - len(rest)
                if inflater.eof:
                    return position, None
                pending = rest
        made = inflater.flush()
        if made:
            yield self._give(made)
        return position, "truncated"

    def _behind(self, position: int, first: int | None = None) -> Generator[StreamFault, None, int]:
        """Return where the next stream begins behind one that has ended, and say what stands between.

        If none begins right there, one that begins from byte `first` on is looked for too.
        """
        nuls = self._count_nuls(position)
        if nuls:
            message = f"{nuls} NUL bytes stand behind the {self.compression} data; TensorFlow fails there"
            yield StreamFault("compression_padding", position, nuls, self.given, message)
            position += nuls
        if position == self.size:
            return position
        if starts_stream(self._piece(position, _TRIED), self.compression):
            if self.compression == "zlib":
                message = "another zlib stream follows; TensorFlow ends before it, without a word"
                yield StreamFault("joined_streams", position, 0, self.given, message)
            return position
        found = self._find_member(position + 1 if first is None else max(first, position - _BACK), position)
        if found < position:
            return found
        message = f"{found - position} bytes behind the {self.compression} data are none"
        yield StreamFault("compression_garbage", position, found - position, self.given, message)
        return found

    def _resume(self, start: int, position: int) -> tuple[int, str]:
        """Return where reading can go on after an error, and what begins there; the end of the file if nowhere."""
        member = self._find_member(max(start + 1, position - _BACK), position)
        if member < position:
            return member, self.compression
        at = position
        while at < self.size:
            at = self._find(at, _FLUSHED, member)
            if at >= member:
                break
            at += len(_FLUSHED)
            if starts_stream(self._piece(at, _TRIED), "raw"):
                return at, "raw"
        return member, self.compression

    def _find_member(self, position: int, first_free: int = 0) -> int:
        """Return where the next gzip member begins; trials before byte `first_free` are few. The size if nowhere."""
        while self.compression == "gzip":
            position = self._find(position, _GZIP, self.size)
            if position == self.size:
                break
            if position < first_free:
                if not self.trials_back_left or not self.returns_left:
                    position = first_free
                    continue
                self.trials_back_left -= 1
            if starts_stream(self._piece(position, _TRIED), "gzip"):
                self.returns_left -= position < first_free
                return position
            position += 1
        return self.size

    def _find(self, position: int, wanted: bytes, until: int) -> int:
        """Return where some bytes stand next that begin before `until`, or `until`."""
        while position < until:
            piece = bytes(self._piece(position, _READ))
            at = piece.find(wanted)
            if at >= 0:
                return min(position + at, until)
            position += max(len(piece) - len(wanted) + 1, 1)
        return until

    def _count_nuls(self, position: int) -> int:
        first = position
        while position < self.size:
            piece = bytes(self._piece(position, _READ))
            rest = piece.lstrip(b"\0")
            position += len(piece) - len(rest)
            if rest:
                break
        return position - first

    def _piece(self, position: int, most: int) -> memoryview:
        """Give some bytes from a byte on, as many as wanted and there."""
        start, length = position - self._start, min(most, self.size - position)
        if start < 0 or start + length > len(self._bytes):
            many = min(max(_READ, length), self.size - position)
            self._bytes, self._start, start = memoryview(self.read(position, many)).cast("B"), position, 0
        return self._bytes[start : start + length]

    def _give(self, made: bytes) -> bytes:
        self.given += len(made)
        return made


def _feed_until_error(inflater: zlib._Decompress, fed: bytes) -> tuple[int, bytes]:
    """Return how many of some bytes can be fed before the error that they lead to, and what they become."""
    good, bad = 0, len(fed)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            inflater.copy().decompress(fed[:middle], _MOST)
        except zlib.error:
            bad = middle
        else:
            good = middle
    made = [inflater.decompress(fed[:good], _MOST)] if good else []
    rest = fed[good:bad]
    try:  # the byte with the error may hold a few more, which come one by one
        while piece := inflater.decompress(rest, 1):
            made.append(piece)
            rest = inflater.unconsumed_tail
    except zlib.error:
        pass
    return good, b"".join(made)
