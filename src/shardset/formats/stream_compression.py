"""Compressed shards read in order: telling gzip, bzip2, xz, zstd and lz4 by content, and inflating them piece by piece.

What comes out is right or ends in an error, never shorter in silence: every stream must reach its own end mark, and
whatever stands behind the last one is another stream, zero bytes (counted), or an error. A piece has at most 256 KiB,
however much the bytes would give at once. The layouts are those of RFC 1952 (gzip), RFC 8878 (zstd), the lz4 frame
format 1.6.4 and the .xz file format 1.2.1.
"""

from __future__ import annotations

import bz2
import logging
import lzma
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from shardset.errors import LimitError, MissingExtraError
from shardset.policy import Place

from .compression import inflate
from .faults import Fault
from .framing import LZ4_MAGIC, ZSTD_MAGIC, FrameError, is_skippable, lz4_frame, zstd_frame
from .tar_header import has_valid_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .framing import Walk

logger = logging.getLogger(__name__)

StreamCompression = Literal["gzip", "bzip2", "xz", "zstd", "lz4"]
"""How a whole shard may be compressed that is read in order."""

HEAD_SIZE: Final = 512
"""So many first bytes tell what a shard is; if it has fewer, all of them do."""

_OUTPUT: Final = 256 << 10
_INPUT: Final = 64 << 10
_BLOCK: Final = 512
_GZIP_MAGIC: Final = b"\x1f\x8b\x08"
_XZ_MAGIC: Final = b"\xfd7zXZ\0"
_BZIP2_SIZE: Final = 10
_BZIP2_FIRST: Final = (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90")  # a block, or the end of an empty file
_XZ_MEMORY: Final = 512 << 20
"""What the dictionary of an xz file may take: the largest preset takes 65 MiB, and a file may ask for 4 GiB."""
_LIMIT_HINT: Final = "compress the shard with a smaller window"


def detect_compression(head: bytes) -> StreamCompression | None:
    """Tell from its first bytes how a shard is compressed; None if it is not, in none of these ways at least.

    A tar may begin with any bytes that a name can have, so a header with a right checksum comes first.

    Args:
        head: The first `HEAD_SIZE` bytes, or all if there are fewer.
    """
    if len(head) >= _BLOCK and has_valid_checksum(head[:_BLOCK]):
        return None
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    if _begins_bzip2(head):
        return "bzip2"
    if head.startswith(_XZ_MAGIC):
        return "xz"
    while len(head) >= 8 and is_skippable(int.from_bytes(head[:4], "little")):
        # zstd and lz4 have them in common; what is behind tells, and only zstd's programs begin files with one.
        head = head[8 + int.from_bytes(head[4:8], "little") :]
        if len(head) < 4:
            return "zstd"
    magic = int.from_bytes(head[:4], "little")
    return "zstd" if magic == ZSTD_MAGIC else "lz4" if magic == LZ4_MAGIC else None


def inflate_shard(
    pieces: Iterable[Buffer], *, shard: str | None = None, report: Report | None = None
) -> Iterator[Buffer]:
    """Inflate a shard that arrives in pieces if it is compressed, or pass its pieces on as they are.

    Args:
        pieces: The bytes of the shard, in pieces of any length. What taking one raises passes.
        shard: The shard's name, for errors.
        report: Counts zero bytes behind the compressed data (``"compression_padding"``); without one they are logged.

    Yields:
        Pieces of at most 256 KiB if the shard is compressed.

    Raises:
        As `inflate_stream`.
    """
    source = iter(pieces)
    held: deque[Buffer] = deque()
    head = b""
    while len(head) < HEAD_SIZE:
        piece = next(source, None)
        if piece is None:
            break
        held.append(piece)
        head += bytes(memoryview(piece).cast("B")[: HEAD_SIZE - len(head)])
    kind = detect_compression(head)
    every = _held_first(held, source)
    return every if kind is None else inflate_stream(every, kind, shard=shard, report=report)


def inflate_stream(
    pieces: Iterable[Buffer], kind: StreamCompression, *, shard: str | None = None, report: Report | None = None
) -> Iterator[bytes]:
    """Inflate a compressed shard that arrives in pieces.

    All streams of it are read: the members of a gzip file, the streams of bzip2 and xz, the frames of zstd and lz4;
    skippable frames are passed over. So are zero bytes behind the last one, which are counted.

    Args:
        pieces: The compressed bytes, in pieces of any length. What taking one raises passes.
        kind: What they are.
        shard: The shard's name, for errors.
        report: Counts zero bytes behind the end (``"compression_padding"``); without one they are logged.

    Yields:
        Pieces of at most 256 KiB.

    Raises, behind what was inflated before (of zstd and lz4, the last 256 KiB before damage may be missing):
        TruncatedError: The compressed bytes end before their end mark (``"truncated_compression"``).
        ChecksumError: What they gave does not fit their checksum, where the kind tells that apart.
        LimitError: They ask for more memory than a reader may be made to allocate (``"compression_memory"``).
        FormatError: They are damaged (``"bad_compression"``), or something else stands behind them
            (``"trailing_garbage"``). The offset is that in the compressed shard; of damage inside a block it is where
            the last 64 KiB began that were looked at.
        ValueError: The kind is none of these.
    """
    if kind == "gzip":
        return inflate(pieces, "gzip", shard=shard, report=report)
    if kind not in get_args(StreamCompression):
        raise ValueError(f"{kind!r}: the kinds are {', '.join(get_args(StreamCompression))}")
    inflated = _inflate_frames if kind in {"zstd", "lz4"} else _inflate_streams
    return inflated(pieces, _Reading(kind, shard, report))


def _held_first(held: deque[Buffer], source: Iterator[Buffer]) -> Iterator[Buffer]:
    while held:
        yield held.popleft()
    yield from source


def _begins_bzip2(data: bytes) -> bool:
    return data[:3] == b"BZh" and data[3:4] in b"123456789" and data[4:_BZIP2_SIZE] in _BZIP2_FIRST


@dataclass(slots=True)
class _Reading:
    """How far the reading of a shard has come.

    Attributes:
        kind: How it is compressed.
        shard: Its name.
        report: Counts zero bytes behind the end.
        position: Offset in the shard of the next byte that is to be taken.
        padding: Zero bytes behind streams.
        ended: Streams that have reached their end.
    """

    kind: StreamCompression
    shard: str | None
    report: Report | None
    position: int = 0
    padding: int = 0
    ended: int = 0

    def fault(self, code: str, message: str) -> Exception:
        return Fault(code, self.position, message=message).error(self.shard)

    def truncated(self) -> Exception:
        what = f"the {self.kind} data ends after {self.position} bytes, before its end mark"
        return self.fault("truncated_compression", what)

    def trailing(self) -> Exception:
        return self.fault("trailing_garbage", f"behind the {self.kind} data stands something else")

    def damaged(self, error: object) -> Exception:
        said = str(error).rpartition(": ")[2].rstrip(".")
        lowered = said.lower()
        if "memory" in lowered or "window" in lowered:
            what = f"the {self.kind} data asks for too much memory ({said})"
            return LimitError(what, shard=self.shard, offset=self.position, code="compression_memory", hint=_LIMIT_HINT)
        if "checksum" in lowered:
            return self.fault("bad_compression_checksum", f"the {self.kind} data does not fit its checksum ({said})")
        return self.fault("bad_compression", f"the {self.kind} data cannot be inflated any further ({said})")

    def skip_zeros(self, data: bytes) -> bytes:
        """Take the zero bytes behind a stream out of `data`."""
        found = data.lstrip(b"\0")
        self.padding += len(data) - len(found)
        self.position += len(data) - len(found)
        return found

    def end(self) -> None:
        """Tell of zero bytes behind the end."""
        if self.padding:
            what = f"{self.padding} zero bytes lie behind the {self.kind} data"
            place = Place(self.shard, self.position - self.padding, message=what)
            if self.report is None:
                logger.warning("%s", place)
            else:
                self.report.add("compression_padding", place)


# bzip2 and xz: the decompressors of the standard library, one a stream


class _Codec(NamedTuple):
    make: Callable[[], Any]
    begins: Callable[[bytes], bool]
    magic_size: int


_CODECS: Final = {
    "bzip2": _Codec(bz2.BZ2Decompressor, _begins_bzip2, _BZIP2_SIZE),
    "xz": _Codec(
        lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
        lambda data: data.startswith(_XZ_MAGIC),
        len(_XZ_MAGIC),
    ),
}


def _inflate_streams(pieces: Iterable[Buffer], reading: _Reading) -> Iterator[bytes]:
    codec = _CODECS[reading.kind]
    current: Any = None
    rest = b""
    for piece in _cut(pieces):
        data, rest = rest + bytes(piece), b""
        while data:
            if current is None:
                if reading.ended:
                    data = reading.skip_zeros(data)
                if len(data) < codec.magic_size:
                    rest = data
                    break
                if not codec.begins(data):
                    raise reading.trailing()
                current = codec.make()
            try:
                output = current.decompress(data, _OUTPUT)
                while output:
                    yield output
                    output = b"" if current.eof or current.needs_input else current.decompress(b"", _OUTPUT)
            except (OSError, lzma.LZMAError, EOFError) as error:
                raise reading.damaged(error) from error
            left = current.unused_data if current.eof else b""
            reading.position += len(data) - len(left)
            if current.eof:
                current = None
                reading.ended += 1
            data = left
    if current is not None:
        raise reading.truncated()
    if rest:
        raise reading.trailing()
    reading.end()


# zstd and lz4: pyarrow decompresses, and a walk over the frames sees what it does not tell


@dataclass(slots=True)
class _Frames:
    """The compressed bytes as a file that pyarrow reads, made of sound frames only.

    Attributes:
        reading: How far it has come.
        fault: What is wrong with the frames. Nothing behind it is passed on.
        failed: What taking a piece raised.
    """

    reading: _Reading
    pieces: Iterator[memoryview]
    fault: Exception | None = None
    failed: BaseException | None = None
    closed: bool = False
    _walk: Walk | None = None
    _is_data: bool = True
    _asked: int = 0
    _is_looked_at: bool = False
    _head: bytearray = field(default_factory=bytearray)

    def read(self, size: int = -1) -> bytes:
        """Return some bytes, of one piece of at most 64 KiB; none at the end or before a fault."""
        del size  # pyarrow asks for as much as a piece has
        try:
            while self.fault is None:
                piece = next(self.pieces, None)
                if piece is None:
                    self._end()
                    return b""
                passed = self._take(bytes(piece))
                if passed:
                    return passed
        except BaseException as error:  # noqa: BLE001 - raised again in `_inflate_frames`, as what it is
            self.failed = error
        return b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def _end(self) -> None:
        if self._walk is not None:
            self.fault = self.reading.truncated()
        elif self._head:
            self.fault = self.reading.trailing()

    def _take(self, data: bytes) -> bytes:
        """Walk over some bytes; return those that may be passed on, which leaves out a magic that is not all here."""
        passed = bytearray()
        view = memoryview(data)
        while view:
            if self._walk is None:
                if self.reading.ended and not self._head:
                    view = memoryview(self.reading.skip_zeros(bytes(view)))
                view = self._begin(view, passed)
            elif self._is_looked_at:
                view = self._look(view, passed)
            else:
                count = min(self._asked, len(view))
                if self._is_data:
                    passed += view[:count]
                self._asked -= count
                self.reading.position += count
                view = view[count:]
                if not self._asked:
                    self._go_on(b"")
            if self.fault is not None:
                break
        return bytes(passed)

    def _begin(self, view: memoryview, passed: bytearray) -> memoryview:
        """Collect the magic of a frame, and begin to walk over it."""
        count = min(4 - len(self._head), len(view))
        self._head += view[:count]
        if len(self._head) < 4:
            return view[count:]
        magic = int.from_bytes(self._head, "little")
        walk = _FRAMES[self.reading.kind](magic)
        if walk is None:
            self.fault = self.reading.trailing()
            return view[count:]
        self._is_data = not is_skippable(magic)
        if self._is_data:
            passed += self._head
        self._head.clear()
        self.reading.position += 4
        self._walk = walk
        self._go_on()
        return view[count:]

    def _look(self, view: memoryview, passed: bytearray) -> memoryview:
        """Collect bytes that the walk looks at, and let it go on."""
        count = min(self._asked - len(self._head), len(view))
        self._head += view[:count]
        if self._is_data:
            passed += view[:count]
        if len(self._head) == self._asked:
            looked = bytes(self._head)
            self._head.clear()
            self._go_on(looked)
        if self.fault is None:
            self.reading.position += count
        return view[count:]

    def _go_on(self, looked: bytes | None = None) -> None:
        """Let the walk say what comes next, or end it; `looked` is what it has asked for, None at its beginning."""
        walk = self._walk
        if walk is None:
            return
        try:
            self._asked, self._is_looked_at = next(walk) if looked is None else walk.send(looked)
            while not self._asked:
                self._asked, self._is_looked_at = walk.send(b"")
        except StopIteration:
            self._walk = None
            self.reading.ended += 1
        except FrameError as error:
            self.fault = self.reading.damaged(error)


_FRAMES: Final = {"zstd": zstd_frame, "lz4": lz4_frame}


def _inflate_frames(pieces: Iterable[Buffer], reading: _Reading) -> Iterator[bytes]:
    import pyarrow as pa  # noqa: PLC0415 - seldom needed, and slow to import

    if not pa.Codec.is_available(reading.kind):
        raise MissingExtraError(f"this pyarrow was built without {reading.kind}", hint="install pyarrow from its wheel")
    frames = _Frames(reading, _cut(pieces))
    began = 0
    with pa.CompressedInputStream(pa.PythonFile(frames, mode="r"), reading.kind) as stream:
        while True:
            began = reading.position
            try:
                output = stream.read(_OUTPUT)
            except OSError as error:
                if frames.fault is None and frames.failed is None:
                    reading.position = began
                    raise reading.damaged(error) from error
                output = b""
            if not output:
                break
            yield output
    if frames.failed is not None:
        raise frames.failed
    if frames.fault is not None:
        raise frames.fault
    reading.end()


def _cut(pieces: Iterable[Buffer]) -> Generator[memoryview]:
    """Cut what arrives into pieces so short that what is kept of them is little."""
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), _INPUT):
            yield view[start : start + _INPUT]
