"""Reading the payloads of many records of one TFRecord shard, with their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardset.formats.tfrecord import FOOTER_SIZE, HEADER_SIZE, find_corrupt, parse_footers, payload_fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardset.storage.store import Reader

    Int64s = NDArray[np.int64]


class Frames(NamedTuple):
    """Payloads of records of one shard, and the checksum that is stored of each."""

    payloads: list[memoryview]
    stored: NDArray[np.uint32]


def read_frames(reader: Reader, offsets: Int64s, lengths: Int64s) -> Frames:
    """Read the payloads of many records of one shard with their checksums, which are not compared.

    Args:
        reader: Of the shard's bytes before compression.
        offsets: Of the payloads.
        lengths: Of the payloads, in bytes.

    Raises:
        StorageError: Reading failed.
    """
    whole = reader.map()
    if whole is not None:
        payloads = reader.read_many(offsets, lengths)
        return Frames(payloads, parse_footers(whole, offsets, lengths))
    frames = reader.read_many(offsets, lengths + FOOTER_SIZE)
    stored = np.frombuffer(b"".join([frame[-FOOTER_SIZE:] for frame in frames]), "<u4")
    return Frames([frame[:-FOOTER_SIZE] for frame in frames], stored)


def check_frames(frames: Frames, shard: str, offsets: Int64s, numbers: Sequence[int] | Int64s) -> list[memoryview]:
    """Return the payloads, all of them good.

    Args:
        frames: As `read_frames` gives them.
        shard: For messages.
        offsets: Of the payloads.
        numbers: Of the records in their shard.

    Raises:
        ChecksumError: One is damaged; the first of them in the order asked.
    """
    for at in find_corrupt(*frames).tolist():
        fault = payload_fault(
            int(offsets[at]) - HEADER_SIZE, int(frames.stored[at]), frames.payloads[at], int(numbers[at])
        )
        raise fault.error(shard)
    return frames.payloads
