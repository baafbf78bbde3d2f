"""Where the frames of zstd (RFC 8878) and lz4 (frame format 1.6.4) end, found without decompressing them.

A walk is a generator over one frame, behind its magic: it yields how many bytes come next, and whether it wants to see
them; those are sent to it. It returns at the end of the frame.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias

Walk: TypeAlias = Generator[tuple[int, bool], bytes, None]

ZSTD_MAGIC: Final = 0xFD2FB528
LZ4_MAGIC: Final = 0x184D2204

_SKIPPABLE: Final = 0x184D2A50  # to ...5F
_MOST_WINDOW: Final = 128 << 20
"""What zstd's own decoder allows unless it is told otherwise."""
_ID_SIZES: Final = (0, 1, 2, 4)
_RAW, _RLE, _COMPRESSED = 0, 1, 2
_MOST_BLOCK: Final = 128 << 10


class FrameError(ValueError):
    """A frame breaks its format, or cannot be read here."""


def zstd_frame(magic: int) -> Walk | None:
    """Return the walk over a zstd frame that begins so; None if none does."""
    return _zstd() if magic == ZSTD_MAGIC else _skippable(magic)


def lz4_frame(magic: int) -> Walk | None:
    """Return the walk over an lz4 frame that begins so; None if none does."""
    return _lz4() if magic == LZ4_MAGIC else _skippable(magic)


def is_skippable(magic: int) -> bool:
    """Tell whether a frame of either kind begins so that holds no data."""
    return magic & ~15 == _SKIPPABLE


def _skippable(magic: int) -> Walk | None:
    return _skip() if is_skippable(magic) else None


def _skip() -> Walk:
    size = yield 4, True
    yield int.from_bytes(size, "little"), False


def _zstd() -> Walk:
    [descriptor] = yield 1, True
    size_flag, is_single, has_checksum = descriptor >> 6, descriptor >> 5 & 1, descriptor >> 2 & 1
    if descriptor & 8:
        raise FrameError("a reserved bit of a frame header is set")
    size_size = (is_single, 2, 4, 8)[size_flag]
    window_size = 0 if is_single else 1
    header = yield window_size + _ID_SIZES[descriptor & 3] + size_size, True
    if is_single:
        window = int.from_bytes(header[-size_size:], "little") + (256 if size_size == 2 else 0)
    else:
        base = 1 << (10 + (header[0] >> 3))
        window = base + base // 8 * (header[0] & 7)
    if window > _MOST_WINDOW:
        raise FrameError(f"a window of {window} bytes, of at most {_MOST_WINDOW}")
    is_last = 0
    while not is_last:
        head = int.from_bytes((yield 3, True), "little")
        is_last, kind, size = head & 1, head >> 1 & 3, head >> 3
        if kind > _COMPRESSED:
            raise FrameError("a block has a reserved type")
        if size > _MOST_BLOCK:
            raise FrameError(f"a block of {size} bytes, of at most {_MOST_BLOCK}")
        yield 1 if kind == _RLE else size, False
    yield 4 * has_checksum, False


def _lz4() -> Walk:
    flags, _ = yield 2, True
    if flags >> 6 != 1:
        raise FrameError("an unknown version of the frame format")
    block_checksum, has_size, has_checksum, has_id = (flags >> bit & 1 for bit in (4, 3, 2, 0))
    yield 8 * has_size + 4 * has_id + 1, False
    while size := int.from_bytes((yield 4, True), "little"):
        yield (size & 0x7FFF_FFFF) + 4 * block_checksum, False
    yield 4 * has_checksum, False
