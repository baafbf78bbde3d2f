"""Every good record of a damaged TFRecord file, and a word about each run of bytes that holds none.

Records follow each other without a mark, so one length at fault hides all that follow. What is done about it:

- A payload whose checksum is wrong costs one record if the next header stands where it should.
- A header whose checksum is wrong is mended if the payload's own checksum proves the mend: the length was right, or one
  bit of it was wrong, or the record ends where the next header was found.
- Otherwise the next header is looked for, byte by byte. It counts if its payload is right too, or if another header
  follows. From then on records are marked as found again (`resynced`), because records inside a payload, as in
  TFRecord files inside TFRecord files, look the same.

Every record has the checksums of its header and its payload right, or says what was mended. The time grows with the
size of the file and not faster, whatever the bytes are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from .tfrecord import (
    FOOTER_SIZE,
    FRAME_SIZE,
    HEADER_SIZE,
    check_headers,
    find_corrupt,
    hop,
    masked_crc32c,
    parse_footers,
)
from .tfrecord_resync import FrameFinder, Mend, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray
    from typing_extensions import Buffer

Code = Literal[
    "truncated_record_header",
    "truncated_record",
    "bad_length_checksum",
    "bad_payload_checksum",
    "broken_frame",
    "impossible_length",
    "trailing_nuls",
    "trailing_garbage",
    "zero_hole",
]

_LENGTH: Final = struct.Struct("<Q")
_CRC: Final = struct.Struct("<I")
_RECORDS_AT_ONCE: Final = 4096
_IMPOSSIBLE: Final = 1 << 40
"""A length from here on is no sign of a file cut short, but of a writer that is broken or means harm."""


@dataclass(frozen=True, slots=True)
class Records:
    """Records that follow each other without a gap, untouched.

    Attributes:
        offset: Byte where the first record (its header) begins.
        end: Byte behind the last one.
        offsets: Where their payloads begin.
        lengths: Of the payloads.
        resynced: They follow a place where the next header had to be looked for.
    """

    offset: int
    end: int
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    resynced: bool = False


@dataclass(frozen=True, slots=True)
class Mended:
    """A record of which header or footer was wrong, and could be mended.

    Attributes:
        offset: Where its payload begins.
        length: Of the payload.
        mended: ``"length_crc"`` or ``"length"``: that part of the header was wrong, and the payload's checksum proves
            the length. ``"data_crc"``: one bit of the payload's checksum was wrong; the payload is most likely good.
        resynced: As in `Records`.
    """

    offset: int
    length: int
    mended: Mend
    resynced: bool = False


@dataclass(frozen=True, slots=True)
class Bad:
    """Bytes that hold no record that could be recovered.

    Attributes:
        code: What is wrong.
        offset: First byte.
        length: Bytes that are lost.
        message: One sentence with the values at fault.
        expected: The masked checksum that is stored, where one is at fault.
        actual: What the bytes add up to.
    """

    code: Code
    offset: int
    length: int
    message: str
    expected: int | None = None
    actual: int | None = None


@dataclass(frozen=True, slots=True)
class Good:
    """One record of `iter_salvaged`.

    Attributes:
        offset: Where its payload begins.
        length: Of the payload.
        resynced: As in `Records`.
        repaired: As `Mended.mended`; None for a record that was whole.
        payload: Its bytes; of a map, a view.
    """

    offset: int
    length: int
    resynced: bool
    repaired: Mend | None
    payload: Buffer


Event = Records | Mended | Bad


def iter_salvaged(
    read: Callable[[int, int], Buffer], size: int, *, is_mapped: bool = False, verify: bool = True
) -> Iterator[Good | Bad]:
    """Yield every good record of a TFRecord file, one by one in file order, and what lies between them.

    Args:
        read: Gives `length` bytes from byte `offset` on, a range in the file.
        size: Bytes of the file.
        is_mapped: `read` costs nothing, however much is asked for, as of a memory map.
        verify: Check payloads where their frames are in order. Where they are not, payloads are always checked.
    """
    window = Window(read, size, is_mapped=is_mapped)
    for event in _Salvage(window, verify=verify, is_growing=False).events():
        if isinstance(event, Records):
            for offset, length in zip(event.offsets.tolist(), event.lengths.tolist(), strict=True):
                yield Good(offset, length, event.resynced, None, window.get(offset, length))
        elif isinstance(event, Mended):
            payload = window.get(event.offset, event.length)
            yield Good(event.offset, event.length, event.resynced, event.mended, payload)
        else:
            yield event


def salvage(
    read: Callable[[int, int], Buffer],
    size: int,
    *,
    is_mapped: bool = False,
    verify: bool = True,
    is_growing: bool = False,
) -> Iterator[Event]:
    """Yield the good records of a TFRecord file by the thousand, in file order, and what lies between them.

    All bytes of the file are in exactly one of what is yielded, and at most a few MiB of it are held at once.

    Args:
        read: As in `iter_salvaged`.
        size: As there.
        is_mapped: As there.
        verify: As there.
        is_growing: Somebody writes the file: nothing is looked for in a record that is not all there yet.
    """
    yield from _Salvage(Window(read, size, is_mapped=is_mapped), verify=verify, is_growing=is_growing).events()


class _Salvage:
    """One pass over one file."""

    def __init__(self, window: Window, *, verify: bool, is_growing: bool) -> None:
        self.window = window
        self.finder = FrameFinder(window)
        self.size = window.size
        self.verify = verify
        self.is_growing = is_growing
        self.resynced = False

    def events(self) -> Iterator[Event]:
        position = 0
        while position < self.size:
            position = yield from self._walk(position)
            if position == self.size:
                return
            position = yield from self._get_past(position)

    # Where frames follow each other.

    def _walk(self, position: int) -> Generator[Event, None, int]:
        """Yield records from byte `position` on, and return where they end: at what is wrong, or at the file's end."""
        while self.size - position >= FRAME_SIZE:
            view = self.window.rest(position)
            found, following = hop(view, 0, _RECORDS_AT_ONCE)
            starts, lengths = check_headers(view, found, following)
            num_sound = len(starts)
            num_whole = int(np.searchsorted(starts + lengths, len(view) - FRAME_SIZE, side="right"))
            if num_whole:
                starts, lengths = starts[:num_whole], lengths[:num_whole]
                corrupt = self._find_corrupt(view, position, starts, lengths)
                yield from self._give(position, starts, lengths, corrupt)
                if corrupt and corrupt[-1] == num_whole - 1:
                    return position + int(starts[-1])  # only the last could have no header behind it
                position += int(starts[-1] + lengths[-1]) + FRAME_SIZE
                if num_whole == num_sound < len(found):
                    return position
            elif not self.window.fill(position):
                # The frame is longer than the window, or than the file; or it is none.
                length = self.finder.length_at(position)
                if length is None or length > self.size - position - FRAME_SIZE:
                    return position
                if self.verify and not self.finder.is_payload(position + HEADER_SIZE, length):
                    return position
                yield from self._give(position, np.zeros(1, np.int64), np.array([length]), [])
                position += length + FRAME_SIZE
        return position

    def _find_corrupt(
        self, view: memoryview, base: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[int]:
        """Return which of some frames, that begin at `starts` of what is read from byte `base` on, are corrupt."""
        if not self.verify:
            return []
        offsets, last = starts + HEADER_SIZE, len(starts) - 1
        # The last one may be no frame, so that its bytes are looked at again.
        places = zip(offsets[:last].tolist(), (offsets + lengths)[:last].tolist(), strict=True)
        stored = parse_footers(view, offsets[:last], lengths[:last])
        corrupt: list[int] = find_corrupt([view[start:end] for start, end in places], stored).tolist()
        if not self.finder.is_payload(base + int(offsets[last]), int(lengths[last])):
            corrupt.append(last)
        return corrupt

    def _give(
        self, base: int, starts: NDArray[np.int64], lengths: NDArray[np.int64], corrupt: list[int]
    ) -> Iterator[Event]:
        """Yield what some frames hold, but the last one if it is corrupt."""
        first = 0
        for number in [*corrupt, len(starts)]:
            if number > first:
                offsets, many = starts[first:number] + (base + HEADER_SIZE), lengths[first:number]
                end = int(offsets[-1] + many[-1]) + FOOTER_SIZE
                yield Records(int(offsets[0]) - HEADER_SIZE, end, offsets, many, self.resynced)
            if number < len(starts) - 1:
                yield self._corrupt(base + int(starts[number]), int(lengths[number]))
            first = number + 1

    # Where they are not.

    def _get_past(self, position: int) -> Generator[Event, None, int]:
        """Yield what can be said about the byte where records end, and return where to go on."""
        length = self.finder.length_at(position)
        if length is None:
            return (yield from self._past_header(position))
        if length > self.size - position - FRAME_SIZE:
            return (yield from self._past_overrun(position, length))
        return (yield from self._past_payload(position, length))

    def _past_header(self, position: int) -> Generator[Event, None, int]:
        """Get past a header whose checksum is wrong, or that is cut."""
        left = self.size - position
        header = self.window.peek(position, min(HEADER_SIZE, left))
        is_zero = not any(header)
        if is_zero and self.finder.count_nuls(position) == left:
            yield Bad("trailing_nuls", position, left, f"the file ends with {left} NUL bytes, which are no record")
            return self.size
        if left < HEADER_SIZE:
            yield Bad(
                "truncated_record_header", position, left, f"the file ends {left} bytes into a header of {HEADER_SIZE}"
            )
            return self.size
        mended = self.finder.mend_header(position)
        if mended is not None:
            length, what, is_good = mended
            if is_good:
                yield Mended(position + HEADER_SIZE, length, what, self.resynced)
            else:
                yield self._bad_header(position, length + FRAME_SIZE, "; the payload is wrong too")
            return position + length + FRAME_SIZE
        found, is_proved = self.finder.resync(position + 1, boundary=position)
        if is_proved:
            yield Mended(position + HEADER_SIZE, found - position - FRAME_SIZE, "length", self.resynced)
            return found
        lost = found - position
        if is_zero:
            yield self._hole(position, position, lost)
        elif found < self.size or _LENGTH.unpack_from(header)[0] + FRAME_SIZE == left:
            yield self._bad_header(position, lost, "")
        else:
            yield Bad("trailing_garbage", position, lost, f"the last {lost} bytes of the file hold no record")
        self.resynced = True
        return found

    def _past_overrun(self, position: int, length: int) -> Generator[Event, None, int]:
        """Get past a header that is right and states more bytes than there are."""
        left = self.size - position
        held = max(left - HEADER_SIZE, 0)
        cut = Bad(
            "truncated_record",
            position,
            left,
            f"the file ends {min(held, length)} bytes into a payload of {length}"
            if held < length
            else f"the file ends in the checksum of a payload of {length} bytes",
        )
        if self.is_growing:
            yield cut
            return self.size
        found, is_proved = self.finder.resync(position + HEADER_SIZE, boundary=position)
        if is_proved:
            yield Mended(position + HEADER_SIZE, found - position - FRAME_SIZE, "length", self.resynced)
            return found
        if found < self.size or length >= _IMPOSSIBLE:
            message = f"a header with the right checksum states a payload of {length} bytes where {held} are left"
            cut = Bad("impossible_length", position, found - position, message)
        yield cut
        self.resynced = True
        return found

    def _past_payload(self, position: int, length: int) -> Generator[Event, None, int]:
        """Get past a payload whose checksum is wrong under a header that is right."""
        finder, end = self.finder, position + length + FRAME_SIZE
        one = self._corrupt(position, length)
        has_next = end == self.size or finder.length_at(end) is not None
        if isinstance(one, Mended) or has_next or finder.mend_header(end) is not None:
            yield one
            return end
        found, _ = finder.resync(position + HEADER_SIZE)
        is_one = found >= end + FRAME_SIZE and finder.is_payload(end + HEADER_SIZE, found - end - FRAME_SIZE)
        if not is_one and found == self.size:
            rest = self.size - end
            is_one = rest < HEADER_SIZE or finder.count_nuls(end) == rest
        if is_one:
            yield one
            return end
        if not any(self.window.peek(end, min(HEADER_SIZE, self.size - end))):
            yield self._hole(position, end, found - position)
        else:
            message = f"a payload of {length} bytes is wrong and no header follows: bytes were lost, added or changed"
            yield Bad("broken_frame", position, found - position, message)
        self.resynced = True
        return found

    def _corrupt(self, position: int, length: int) -> Bad | Mended:
        """Describe a record whose payload does not add up to its checksum."""
        stored = self.finder.number_at(position + HEADER_SIZE + length)
        actual = self.finder.payload_crc(position + HEADER_SIZE, length)
        if (stored ^ actual).bit_count() == 1:
            return Mended(position + HEADER_SIZE, length, "data_crc", self.resynced)
        message = f"a payload of {length} bytes does not add up to its checksum"
        return Bad("bad_payload_checksum", position, length + FRAME_SIZE, message, stored, actual)

    def _bad_header(self, position: int, lost: int, more: str) -> Bad:
        header = self.window.peek(position, HEADER_SIZE)
        stored, actual = _CRC.unpack_from(header, _LENGTH.size)[0], masked_crc32c(header[: _LENGTH.size])
        message = f"the checksum of a header is wrong{more}"
        return Bad("bad_length_checksum", position, lost, message, stored, actual)

    def _hole(self, position: int, at: int, lost: int) -> Bad:
        """Describe what is lost from `position` on, where zeros stand at a byte that is known to be in them."""
        start = at - self.finder.count_nuls_before(at, position)
        nuls = at - start + self.finder.count_nuls(at)
        return Bad("zero_hole", position, lost, f"a hole: {nuls} NUL bytes from byte {start} on")
