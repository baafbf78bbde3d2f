"""Reading TFRecord files from end to end: payloads as bytes, in order, each verified before it is given.

Records are taken a few thousand at a time: cut out by their unchecked lengths from a piece of the file that is in
memory already, so that a lying length costs nothing, and then verified together. Of a batch with a fault, the records
before it are given and then the fault is raised.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .crc_batch import LONGEST, crc_of_all
from .faults import Fault
from .tfrecord import (
    FOOTER_SIZE,
    FRAME_SIZE,
    HEAD_SIZE,
    HEADER_SIZE,
    crc32c,
    crcs_of,
    find_corrupt,
    header_crcs,
    header_fault,
    hop,
    payload_fault,
    short_crcs,
    unmask_crcs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Int64s = NDArray[np.int64]
    UInt32s = NDArray[np.uint32]

_WINDOW: Final = 256 << 10
"""Bytes of small records that are cut up together: with the payloads they fit into the processor's cache."""
_LONG_WINDOW: Final = 384 << 10
"""The same for records above `_SMALL`, of which a batch would otherwise hold only a few."""
_SMALL: Final = 2 << 10
_MOST: Final = 1024
_EQUAL: Final = 64
"""Records of one length that are cut out in one step."""
_LENGTH: Final = struct.Struct("<Q")
_MANY: Final = 128
"""Payloads from which on one checksum of all of them costs less than one of each."""
# By length, made when needed: cutting and reading the next length in one call takes two thirds of the time.
_UNPACKERS: Final[list[Any]] = [None] * _SMALL


def iter_mapped(
    whole: memoryview, *, verify: bool = True, shard: str | None = None, tf_compat: bool = False, start: int = 0
) -> Iterator[bytes]:
    """Yield the payload of each record of a file that is in memory or mapped.

    Args:
        whole: The file, as bytes.
        verify: Compare each payload with its checksum. Lengths are always compared with theirs.
        shard: The file's name, for errors.
        tf_compat: Take 1 to 11 bytes behind the last record for the end of the file, as TensorFlow does.
        start: Byte offset to begin at: where a record begins, or the end of the file.

    Raises:
        FormatError: A record is damaged or cut short. All records before it have been given.
    """
    return chain.from_iterable(_mapped_batches(whole, start, verify=verify, shard=shard, tf_compat=tf_compat))


def iter_stream(
    chunks: Iterable[Buffer],
    *,
    verify: bool = True,
    shard: str | None = None,
    tf_compat: bool = False,
    size: int | None = None,
    is_inflated: bool = False,
) -> Iterator[bytes]:
    """Yield the payload of each record of a file that arrives in pieces.

    At most one record is kept besides the piece at hand, and of it only what has arrived.

    Args:
        chunks: The file's bytes, in pieces of any length. What taking one raises passes, after all whole records.
        verify: Compare each payload with its checksum. Lengths are always compared with theirs.
        shard: The file's name, for errors.
        tf_compat: Take 1 to 11 bytes behind the last record for the end of the file, as TensorFlow does.
        size: Bytes of the file where that is known: a record that is longer than what is left is then not waited for.
        is_inflated: They come out of a compressed file; errors then say what their offsets count.

    Raises:
        FormatError: A record is damaged or cut short. All records before it have been given.
    """
    batches = _stream_batches(chunks, size, verify=verify, tf_compat=tf_compat)
    return chain.from_iterable(_raising(batches, shard, is_inflated=is_inflated))


def _mapped_batches(
    whole: memoryview, start: int, *, verify: bool, shard: str | None, tf_compat: bool
) -> Iterator[list[bytes]]:
    position, count, mean = start, 0, 0
    # An allocator that has seen a block of this size go (glibc) keeps the memory of batches, which the kernel would
    # otherwise take back and clear each time: half of the time for payloads of 10 KB.
    bytes(8 * _LONG_WINDOW)
    crcs = crcs_of(whole)
    while position < len(whole):
        batch = _NOTHING
        if mean < _SMALL:
            batch = _take_small(bytes(whole[position : position + _WINDOW]), verify=verify)
        if batch is _NOTHING:  # the next record is longer than a window, or cut short
            batch = _take_large(whole, crcs, position, mean, verify=verify)
        yield batch.payloads
        if batch.payloads:
            mean = batch.end // len(batch.payloads)
        position, count = position + batch.end, count + len(batch.payloads)
        if batch.is_sound:
            continue
        if tf_compat and len(whole) - position < HEADER_SIZE:
            return
        raise _fault(whole[position:], position, len(whole) - position, None if start else count).error(shard)


def _stream_batches(
    chunks: Iterable[Buffer], size: int | None, *, verify: bool, tf_compat: bool
) -> Iterator[list[bytes] | Fault]:
    position, count = 0, 0
    pieces: list[Buffer] = []
    have, need = 0, HEADER_SIZE
    for piece in _windows(chunks):
        pieces.append(piece)
        have += len(piece)
        if have < need:
            continue
        data = b"".join(pieces)
        pieces.clear()
        batch = _take_small(data, verify=verify)
        yield batch.payloads
        position, count = position + batch.end, count + len(batch.payloads)
        rest = data[batch.end :]
        have, need = len(rest), HEADER_SIZE
        left = None if size is None else size - position
        if not batch.is_sound:
            yield _fault(memoryview(rest), position, left, count)
            return
        if have >= HEADER_SIZE:
            fault = header_fault(rest[:HEAD_SIZE], position, left, count)
            if fault is not None:
                yield fault
                return
            need = _LENGTH.unpack_from(rest)[0] + FRAME_SIZE
        pieces.append(rest)
        del data, rest, batch  # while the next record is waited for, only what there is of it is kept
    if have and not (tf_compat and have < HEADER_SIZE):
        yield _fault(memoryview(b"".join(pieces)), position, have, count)


def _raising(batches: Iterator[list[bytes] | Fault], shard: str | None, *, is_inflated: bool) -> Iterator[list[bytes]]:
    """Yield batches; raise the fault that ends them."""
    for batch in batches:
        if not isinstance(batch, Fault):
            yield batch
        elif is_inflated:
            raise replace(batch, message=f"{batch.message} (its offset counts inflated bytes)").error(shard)
        else:
            raise batch.error(shard)


class _Batch(NamedTuple):
    """Records that were verified together.

    Attributes:
        payloads: Those before the first fault.
        end: Bytes that they take.
        is_sound: There was no fault.
    """

    payloads: list[bytes]
    end: int
    is_sound: bool


_NOTHING: Final = _Batch([], 0, is_sound=True)


def _take_small(chunk: bytes, *, verify: bool) -> _Batch:
    """Take all records that `chunk` holds whole."""
    payloads = _cut(chunk)
    if not payloads:
        return _NOTHING
    lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
    ends = (lengths + FRAME_SIZE).cumsum()
    crcs = crcs_of(memoryview(chunk))
    sound = _count_sound(crcs, lengths, ends)
    is_long = len(payloads) < _MANY or int(ends[-1]) > LONGEST
    if verify and (is_long or sound < len(payloads) or not _all_sound(payloads, lengths, crcs, ends)):
        good = _count_good(payloads[:sound], crcs, ends)
    else:
        good = sound
    if good == len(payloads):
        return _Batch(payloads, int(ends[-1]), is_sound=True)
    return _Batch(payloads[:good], int(ends[good - 1]) if good else 0, is_sound=False)


def _take_large(whole: memoryview, crcs: UInt32s, position: int, mean: int, *, verify: bool) -> _Batch:
    """Take a batch of records, copying each payload once and none before its length is verified.

    Args:
        whole: The file.
        crcs: The same, as `crcs_of` gives it.
        position: Where a record begins.
        mean: Bytes of a record in the batch before, or 0.
        verify: Compare payloads with their checksums.
    """
    starts, following = hop(whole, position, max(1, min(_MOST, _LONG_WINDOW // max(mean, 1))))
    starts.append(following)
    pieces = [whole[start + HEADER_SIZE : end - FOOTER_SIZE] for start, end in pairwise(starts)]
    if not pieces:
        return _Batch([], 0, is_sound=False)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    ends = (lengths + FRAME_SIZE).cumsum()
    ends += position
    sound = _count_sound(crcs, lengths, ends)
    if sound and int(ends[sound - 1]) > len(whole):
        sound -= 1  # a part of its footer is missing
    few = max(1, int(ends.searchsorted(position + _LONG_WINDOW)))
    payloads = list(map(bytes, pieces[: min(sound, few)]))
    good = _count_good(payloads, crcs, ends) if verify else len(payloads)
    return _Batch(payloads[:good], int(ends[good - 1]) - position if good else 0, 0 < good == len(payloads))


def _count_sound(crcs: UInt32s, lengths: Int64s, ends: Int64s) -> int:
    """Count the records before the first whose header states another length, or has a wrong checksum."""
    stored = crcs[ends - lengths - (FRAME_SIZE - 8)]
    try:
        expected = short_crcs()[lengths]
    except IndexError:
        expected = header_crcs(lengths.view(np.uint64))
    if expected.tobytes() == stored.tobytes():  # as in `find_corrupt`
        return len(lengths)
    return int((expected != stored).argmax())


def _count_good(payloads: list[bytes], crcs: UInt32s, ends: Int64s) -> int:
    """Count the records before the first whose payload is corrupt."""
    corrupt = find_corrupt(payloads, crcs[ends[: len(payloads)] - FOOTER_SIZE])
    return int(corrupt[0]) if len(corrupt) else len(payloads)


def _all_sound(payloads: list[bytes], lengths: Int64s, crcs: UInt32s, ends: Int64s) -> bool:
    """Tell whether no payload of many is corrupt."""
    return crc32c(b"".join(payloads)) == crc_of_all(unmask_crcs(crcs[ends - FOOTER_SIZE]), lengths)


def _cut(chunk: bytes) -> list[bytes]:
    """Cut out the payloads of all records that `chunk` holds whole, by lengths that nobody has verified."""
    payloads: list[bytes] = []
    position = _cut_equal(chunk, payloads)
    append, unpack, unpackers = payloads.append, _LENGTH.unpack_from, _UNPACKERS
    try:
        length = unpack(chunk, position)[0]
        while True:
            try:
                while True:
                    payload, following = unpackers[length](chunk, position)
                    append(payload)
                    position += length + FRAME_SIZE
                    length = following
            except TypeError:  # the first record of this length
                unpackers[length] = _unpacker(length)
                continue
            except (IndexError, struct.error):  # a long record, or the last one
                end = position + length + FRAME_SIZE
            if end > len(chunk):
                return payloads
            append(chunk[position + HEADER_SIZE : end - FOOTER_SIZE])
            position = end
            length = unpack(chunk, position)[0]
    except struct.error:
        return payloads


def _unpacker(length: int) -> Callable[[bytes, int], tuple[Any, ...]]:
    """Return what gives a payload of so many bytes and the length of the next one, from where the record begins."""
    return struct.Struct(f"<{HEADER_SIZE}x{length}s{FOOTER_SIZE}xQ").unpack_from


def _cut_equal(chunk: bytes, payloads: list[bytes]) -> int:
    """Cut out the records of one length that `chunk` begins with, many in one step; return where they end."""
    if len(chunk) < HEADER_SIZE:
        return 0
    length: int = _LENGTH.unpack_from(chunk)[0]
    frame = length + FRAME_SIZE
    if frame * _EQUAL > len(chunk):
        return 0
    lengths: NDArray[np.uint64] = np.ndarray((len(chunk) // frame,), "<u8", chunk, 0, (frame,))
    differs = lengths != length
    run = int(differs.argmax()) if differs.any() else len(lengths)
    end = run // _EQUAL * _EQUAL * frame
    unpack = _equal_frames(length).unpack_from
    for position in range(0, end, _EQUAL * frame):
        payloads += unpack(chunk, position)
    return end


@lru_cache(64)
def _equal_frames(length: int) -> struct.Struct:
    return struct.Struct(f"{HEADER_SIZE}x{length}s{FOOTER_SIZE}x" * _EQUAL)


def _fault(rest: memoryview, offset: int, left: int | None, number: int | None) -> Fault:
    """Say what is wrong with the record that `rest` begins with."""
    fault = header_fault(bytes(rest[:HEAD_SIZE]), offset, left, number)
    if fault is not None:
        return fault
    end = HEADER_SIZE + _LENGTH.unpack_from(rest)[0]
    return payload_fault(offset, int.from_bytes(rest[end : end + FOOTER_SIZE], "little"), rest[HEADER_SIZE:end], number)


def _windows(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Cut long pieces of a stream into shorter ones."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), _WINDOW):
            yield view[start : start + _WINDOW]
