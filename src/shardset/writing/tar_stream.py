"""A tar of samples while it is written: each key once, small members gathered into large writes, published if whole."""

from __future__ import annotations

import logging
from os import getpid
from typing import TYPE_CHECKING, Any, Final, NoReturn

from shardset.errors import DuplicateFieldError, StorageError, without_secrets

from .sample_members import LARGE
from .tar_headers import shard_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .sample_members import MemberMaker, SampleMembers
    from .shard_index import IndexNotes
    from .shard_output import Output

logger = logging.getLogger("shardset.writing")

_GATHERED: Final = 1 << 20
_PADDINGS: Final = tuple(bytes(count) for count in range(512))
_NOBODY: Final = -1


class TarStream:
    """Writes samples into one tar.

    Args:
        output: Takes the tar's bytes. The stream publishes it or gives it up.
        maker: Makes the members.
        name: What the tar is called in messages.
        notes: Takes note of where members stand; None where nobody asks.

    Attributes:
        name: As given.
        count: Samples written.
        size: Bytes of their members, before compression.
        payload_size: Bytes of their payloads.
    """

    def __init__(self, output: Output, maker: MemberMaker, name: str, notes: IndexNotes | None = None) -> None:
        self._output = output
        self._maker = maker
        self._notes = notes
        self._keys: set[str] = set()
        self._gathered: list[bytes] = []
        self._gathered_size = 0
        self._failure: BaseException | None = None
        self._owner = getpid()
        self.name = without_secrets(name)
        self.count = 0
        self.size = 0
        self.payload_size = 0

    @property
    def is_own(self) -> bool:
        """Whether it is still being written, and by this process."""
        return self._owner == getpid()

    def write(self, sample: Mapping[str, Any]) -> int:
        """Write one sample.

        Returns:
            Bytes of its payloads.

        Raises:
            EncodeError: It cannot be written as it is. Nothing of it was, and the next one can be.
            DuplicateFieldError: Its key was written before; likewise.
            StorageError: Writing failed; the tar is given up.
            ValueError: The tar is closed.
        """
        return self.append(self._maker.make(sample))

    def size_with(self, sample: SampleMembers) -> int:
        """Return the bytes that the whole tar would have if it ended with this sample, before compression."""
        return shard_size(self.size + sample.size)

    def append(self, sample: SampleMembers) -> int:
        """Write a sample whose members are made; return and raise as `write`."""
        if self._owner != getpid():
            self._refuse()
        if sample.key in self._keys:
            raise DuplicateFieldError(
                f"the key {sample.key!r} was written into this shard before, and readers would get a part of each",
                shard=self.name,
                key=sample.key,
                hint="give each sample a key of its own, and write all of its fields at once",
            )
        gathered, notes = self._gathered, self._notes
        position, pending = self.size, self._gathered_size
        try:
            for member in sample.members:
                payload = member.payload
                length = len(payload)
                gathered.append(member.header)
                position += len(member.header)
                if notes is not None:
                    notes.add(member, position, len(sample.members))
                pending += len(member.header)
                if length < LARGE:
                    gathered.append(payload)  # type: ignore[arg-type] # only large ones are views
                    pending += length
                else:
                    self._flush()
                    pending = 0
                    self._output.write(payload)
                padding = -length & 511
                if padding:
                    gathered.append(_PADDINGS[padding])
                    pending += padding
                position += length + padding
            self._gathered_size = pending
            if pending >= _GATHERED:
                self._flush()
        except BaseException as error:
            self._fail(error)
            raise
        self._keys.add(sample.key)
        self.size = position
        self.count += 1
        self.payload_size += sample.payload_size
        return sample.payload_size

    def close(self) -> int:
        """Write the end and publish the tar. A second time does nothing.

        Returns:
            Bytes of the tar, before compression.

        Raises:
            StorageError: Writing or publishing failed; the tar is given up.
        """
        whole = shard_size(self.size)
        if self._owner == _NOBODY and self._failure is None:
            return whole
        if self._owner != getpid():
            self._refuse()
        try:
            self._gathered.append(bytes(whole - self.size))
            self._flush()
            self._output.publish()
        except BaseException as error:
            self._fail(error)
            raise
        self._owner = _NOBODY
        for field, count in self._maker.left_out.items():
            logger.warning(
                "%s: the field %r was left out of %d samples, as fields that begin with _ are; keep_meta=True "
                "writes them",
                *(self.name, field, count),
            )
        self._maker.left_out.clear()
        return whole

    def discard(self) -> None:
        """Give the tar up, as far as its output can; this stream is then closed."""
        if self._owner == getpid():
            self._owner = _NOBODY
            self._gathered.clear()
            self._output.discard()

    def _flush(self) -> None:
        if self._gathered:
            data = b"".join(self._gathered)
            self._gathered.clear()
            self._gathered_size = 0
            self._output.write(data)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.discard()

    def _refuse(self) -> NoReturn:
        if self._failure is not None:
            raise StorageError("not written: the writer failed before", url=self.name) from self._failure
        if self._owner == _NOBODY:
            raise ValueError(f"{self.name}: the writer is closed")
        raise ValueError(
            f"{self.name}: this writer belongs to the process that made it; make one in each process, with a name "
            "of its own"
        )
