"""The bytes that the records of a TFRecord shard stand in: of a compressed one, all that can be decompressed."""

from __future__ import annotations

import mmap
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardset.errors import FormatError
from shardset.formats.compression import detect
from shardset.formats.faults import recognise_foreign
from shardset.formats.tfrecord import HEAD_SIZE, HEADER_SIZE, is_header
from shardset.formats.tfrecord_inflate import StreamFault, iter_inflated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

    from shardset.formats.tfrecord_inflate import StreamKind
    from shardset.storage.store import Reader

_IN_MEMORY: Final = 64 << 20
"""What is decompressed goes to a file without a name once it is more."""
_READ: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class RecordStream:
    """Where the records of a shard are read from, until its context ends.

    Attributes:
        read: Gives `length` bytes from byte `offset` on.
        size: How many bytes there are.
        is_mapped: `read` costs nothing.
        compression: Of the shard; None for a plain one.
        faults: What is wrong with its compression.
    """

    read: Callable[[int, int], Buffer]
    size: int
    is_mapped: bool
    compression: StreamKind | None = None
    faults: tuple[StreamFault, ...] = ()


@contextmanager
def open_stream(reader: Reader, progress: Callable[[int], None] | None = None) -> Iterator[RecordStream]:
    """Open the records of a shard, and decompress them if the shard is compressed; its bytes say so, not its name.

    Args:
        reader: The shard.
        progress: Called with the bytes of the shard that have been decompressed.

    Raises:
        FormatError: The shard is something else; the code is ``"not_tfrecord"``.
        StorageError: Reading failed.
    """
    head = reader.read(0, min(reader.size, HEAD_SIZE))
    compression = detect(head).kind
    if not compression:
        refuse_foreign(reader.url, head)
        whole = reader.map()
        if whole is None:
            yield RecordStream(reader.read, reader.size, is_mapped=False)
        else:
            yield RecordStream(lambda offset, length: whole[offset : offset + length], reader.size, is_mapped=True)
        return
    with ExitStack() as stack:
        content, faults = _decompress(reader, compression, progress, stack)
        refuse_foreign(reader.url, bytes(content[:HEAD_SIZE]), f"the {compression} data in it begins with")
        yield RecordStream(
            lambda offset, length: content[offset : offset + length],
            len(content),
            is_mapped=True,
            compression=compression,
            faults=tuple(faults),
        )


def refuse_foreign(url: str, head: bytes, what: str = "it begins with") -> None:
    """Raise if the first bytes of a shard are those of another format.

    Raises:
        FormatError: They are.
    """
    if is_header(head):
        return
    foreign = recognise_foreign(head)
    if foreign is None or (foreign.what == "JSON text" and 0 in head[:HEADER_SIZE]):
        return  # a damaged length may look like an opening bracket
    name = f"{foreign.what} data" if foreign.is_compressed else foreign.what
    hint = "decompress it first" if foreign.is_compressed else "check where the file came from"
    raise FormatError(f"this is no TFRecord file: {what} {name}", shard=url, offset=0, code="not_tfrecord", hint=hint)


def _decompress(
    reader: Reader, compression: StreamKind, progress: Callable[[int], None] | None, stack: ExitStack
) -> tuple[memoryview, list[StreamFault]]:
    """Decompress a whole shard into memory, or into a file if it is much, which goes when `stack` is closed."""

    def read(offset: int, length: int) -> bytes:
        if progress is not None:
            progress(offset)
        return reader.read(offset, length)

    pieces: list[bytes] = []
    held = size = 0
    file = None
    faults = []
    for piece in iter_inflated(read, reader.size, compression):
        if isinstance(piece, StreamFault):
            faults.append(piece)
            continue
        pieces.append(piece)
        held += len(piece)
        size += len(piece)
        if held > _IN_MEMORY:
            if file is None:
                file = stack.enter_context(tempfile.TemporaryFile(prefix="shardset-"))  # noqa: SIM115 - it does
            file.writelines(pieces)
            pieces, held = [], 0
    if file is None:
        return memoryview(b"".join(pieces)), faults
    file.writelines(pieces)
    file.flush()
    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return memoryview(mapped), faults
