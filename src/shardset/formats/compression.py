"""Compressed TFRecord files: telling what a file is by its first bytes, and inflating it piece by piece.

TensorFlow writes gzip and zlib files and must be told which; here the bytes tell. What was inflated before any damage
is given before the damage is raised, also where TensorFlow gives nothing or ends in silence.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from shardset.policy import Place

from .faults import Fault, recognise_foreign
from .tfrecord import HEADER_SIZE, is_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Buffer

    from shardset.policy import Report

Compression = Literal["", "gzip", "zlib"]
"""How a whole file is compressed: not at all, or in one of the two ways that TensorFlow knows too."""

logger = logging.getLogger(__name__)

_OUTPUT: Final = 256 << 10
"""The most that is inflated in one step, however much the bytes would give."""
_INPUT: Final = 64 << 10
_WINDOW_BITS: Final = {"gzip": 31, "zlib": 15}
_MAGIC_SIZE: Final = {"gzip": 3, "zlib": 2}
_GZIP_MAGIC: Final = b"\x1f\x8b\x08"
_ZLIB_FIRST: Final = 0x78
"""Deflate with a window of 32 KiB, as every usual writer has it."""


@dataclass(frozen=True, slots=True)
class Detected:
    """What a file seems to be.

    Attributes:
        kind: How it is compressed if it may be a TFRecord file, else None.
        what: A phrase that names it.
    """

    kind: Compression | None
    what: str


def detect(head: bytes) -> Detected:
    """Tell from its first bytes whether a file is a TFRecord file, and how it is compressed.

    A plain record may begin as a gzip file does, so a header with a right checksum comes first.

    Args:
        head: The first 512 bytes, or all if there are fewer.
    """
    if not head:
        return Detected("", "an empty file")
    if is_header(head):
        return Detected("", "a TFRecord file")
    if head.startswith(_GZIP_MAGIC):
        return Detected("gzip", "a gzip file")
    if _is_zlib(head):
        return Detected("zlib", "a zlib stream")
    found = recognise_foreign(head)
    if found is not None:
        return Detected(None, f"a file compressed with {found.what}" if found.is_compressed else found.what)
    if len(head) < HEADER_SIZE:
        return Detected("", f"the first {len(head)} bytes of a record's header")
    return Detected(None, "no header of a record")


def _is_zlib(head: bytes) -> bool:
    if len(head) < _MAGIC_SIZE["zlib"] or not _begins(head, "zlib"):
        return False
    try:
        zlib.decompressobj().decompress(head, 1)
    except zlib.error:
        return False
    return True


def inflate(
    chunks: Iterable[Buffer], kind: Literal["gzip", "zlib"], *, shard: str | None = None, report: Report | None = None
) -> Iterator[bytes]:
    """Inflate a gzip or zlib file that arrives in pieces.

    All members of a gzip file are read, and all zlib streams where several stand one behind the other. Zero bytes
    behind the last one are passed over and counted.

    Args:
        chunks: The compressed bytes, in pieces of any length. What taking one raises passes.
        kind: ``"gzip"`` or ``"zlib"``.
        shard: The file's name, for errors.
        report: Counts zero bytes behind the end; without one they are logged.

    Yields:
        Pieces of at most 256 KiB.

    Raises:
        FormatError: The compressed bytes are damaged, cut short, or followed by something else. Everything that they
            gave before has been yielded. The offset is that in the compressed file.
    """
    members = _Members(kind)
    for piece in _pieces(chunks):
        data = members.rest + piece
        members.rest = b""
        while members.fault is None and (data or members.is_full):
            if members.current is None:
                data = members.begin(data)
            else:
                output, data = members.step(members.current, data)
                if output:
                    yield output
        if members.fault is not None:
            break
    fault = members.fault or members.end_fault()
    if fault is not None:
        raise fault.error(shard)
    if members.padding:
        what = f"{members.padding} zero bytes lie behind the {kind} data"
        place = Place(shard, members.position - members.padding, message=what)
        if report is None:
            logger.warning("%s", place)
        else:
            report.add("compression_padding", place)


class _Members:
    """The members of a gzip file, or zlib streams, that stand one behind the other.

    Attributes:
        current: The one that is being inflated.
        position: Offset in the file of the next byte that is to be taken.
        padding: Zero bytes behind members.
        rest: The first byte or two of what may be a member.
        is_full: The last step may have stopped only because it gave as much as it may.
        fault: Why nothing more can be inflated.
    """

    def __init__(self, kind: Literal["gzip", "zlib"]) -> None:
        self._kind: Literal["gzip", "zlib"] = kind
        self._ended = 0
        self.current: zlib._Decompress | None = None
        self.position = 0
        self.padding = 0
        self.rest = b""
        self.is_full = False
        self.fault: Fault | None = None

    def begin(self, data: bytes) -> bytes:
        """Begin the next member; return what it is to be given."""
        if self._ended:
            found = data.lstrip(b"\0")
            self.padding += len(data) - len(found)
            self.position += len(data) - len(found)
            if len(found) < _MAGIC_SIZE[self._kind]:
                self.rest = found
                return b""
            if not _begins(found, self._kind):
                self.fault = self._trailing_fault()
                return b""
            data = found
        self.current = zlib.decompressobj(_WINDOW_BITS[self._kind])
        return data

    def step(self, current: zlib._Decompress, data: bytes) -> tuple[bytes, bytes]:
        """Inflate some bytes; return what they gave, and what is left of them."""
        before = current.copy()
        try:
            output = current.decompress(data, _OUTPUT)
        except zlib.error as error:
            output, used = _until_error(before, data)
            self.fault = _damage_fault(error, self.position + used, self._kind, is_first=not self._ended)
            return output, b""
        left = current.unused_data if current.eof else current.unconsumed_tail
        self.position += len(data) - len(left)
        self.is_full = len(output) == _OUTPUT and not current.eof
        if current.eof:
            self.current = None
            self._ended += 1
        return output, left

    def end_fault(self) -> Fault | None:
        """Say what is wrong if the file ends here."""
        if self.current is not None:
            what = f"the {self._kind} data ends after {self.position} bytes, before its end mark and checksum"
            return Fault("truncated_compression", self.position, message=what)
        return self._trailing_fault() if self.rest else None

    def _trailing_fault(self) -> Fault:
        return Fault("trailing_garbage", self.position, message=f"behind the {self._kind} data stands something else")


def _pieces(chunks: Iterable[Buffer]) -> Iterator[bytes]:
    """Cut what arrives into pieces so short that zlib's copies of what it leaves cost nothing."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), _INPUT):
            yield bytes(view[start : start + _INPUT])


def _begins(data: bytes, kind: Literal["gzip", "zlib"]) -> bool:
    if kind == "gzip":
        return data.startswith(_GZIP_MAGIC)
    return data[0] == _ZLIB_FIRST and not int.from_bytes(data[:2], "big") % 31


def _until_error(member: zlib._Decompress, data: bytes) -> tuple[bytes, int]:
    """Return what `data` gives before the error in it, and how many of its bytes are before the one with the error.

    zlib loses the output of the call that fails, so the call is made again with less.
    """
    sound, broken = 0, len(data)
    while broken - sound > 1:
        middle = (sound + broken) // 2
        try:
            member.copy().decompress(data[:middle], _OUTPUT)
        except zlib.error:
            broken = middle
        else:
            sound = middle
    output = [member.decompress(data[:sound], _OUTPUT)] if sound else []
    last = data[sound:broken]
    try:
        while (byte := member.decompress(last, 1)) or last:
            output.append(byte)
            last = member.unconsumed_tail
    except zlib.error:
        pass
    return b"".join(output), sound


def _damage_fault(error: zlib.error, offset: int, kind: str, *, is_first: bool) -> Fault:
    what = str(error).rpartition(": ")[2]
    if what in {"incorrect data check", "incorrect length check"}:
        return Fault("bad_compression_checksum", offset, message=f"the {kind} data does not fit its checksum ({what})")
    if what == "incorrect header check" and is_first:
        return Fault("bad_compression", offset, message=f"this is no {kind} data")
    return Fault("bad_compression", offset, message=f"the {kind} data cannot be inflated any further ({what})")
