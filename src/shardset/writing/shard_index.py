"""The sidecar index of a shard, made of what its writer knows, so that the shard is not read again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from shardset.errors import NotFoundError
from shardset.formats.faults import Fault
from shardset.formats.naming import Names
from shardset.formats.tar_header import BLOCK, name_oddities
from shardset.index.build import MAX_SIDECAR, with_captions
from shardset.index.document import collector_paused, load_document
from shardset.index.sidecar import dump_sidecar
from shardset.index.sidecar_entries import MalformedError
from shardset.index.table import index_from_files
from shardset.policy import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardset.storage.store import Numbers, Reader, Store

    from .sample_members import Member

logger = logging.getLogger("shardset.writing")

_MOST_KEPT: Final = 256 << 20
"""Captions of more bytes than this are not kept for the index, whose writing takes several times as much memory."""


class IndexNotes:
    """Takes note of the members of a shard as they are written.

    Of ``.json`` and ``.txt`` members beside others it keeps the payloads, since an index holds what they say.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self._kept: dict[int, bytes] = {}
        self._kept_size = 0

    def add(self, member: Member, offset: int, fields: int) -> None:
        """Take note of a member.

        Args:
            member: The member.
            offset: Where its payload stands in the shard.
            fields: How many members its sample has.
        """
        payload = member.payload
        length = len(payload)
        self._names.append(member.name)
        self._offsets.append(offset)
        self._lengths.append(length)
        if fields > 1 and member.field.endswith(("json", "txt")) and length <= MAX_SIDECAR:
            self._kept_size += length
            if self._kept_size <= _MOST_KEPT:
                self._kept[offset] = bytes(payload)
            else:
                self._kept.clear()

    def dump(self, *, name: str, size: int) -> bytes:
        """Return the sidecar index: the bytes that indexing the shard from its headers, with captions, would give.

        Where captions were too many to be kept, it has none, which is logged.

        Args:
            name: The shard's file name, without folders.
            size: Bytes of the shard.
        """
        with collector_paused():
            names = Names.of(name.encode("utf-8", "surrogateescape") for name in self._names)
            offsets, lengths = np.array(self._offsets, np.int64), np.array(self._lengths, np.int64)
            index = index_from_files(names, offsets, lengths, size, faults=tuple(_faults(names, self._offsets)))
            if self._kept_size > _MOST_KEPT:
                logger.warning(
                    "%s: its captions, %d MiB, are not in its index; `shardset index --force` reads them",
                    *(name, self._kept_size >> 20),
                )
            else:
                report = Report()
                reader = cast("Reader", _Kept(name, self._kept))
                index = with_captions(index, reader, report, documents=True)
                for code, count, places in report:
                    logger.warning("%s: %s, %d times; the first: %s", name, code, count, places[0])
            return dump_sidecar(index, name=name)


def _faults(names: Names, offsets: Sequence[int]) -> list[Fault]:
    """Return what a scan of the headers finds odd."""
    if not names.has_high_bytes():
        return []  # names that are odd in another way are refused
    return [
        Fault(code, offsets[row] - BLOCK, names.text(row))
        for row, name in enumerate(names)
        for code in name_oddities(name)
    ]


class _Kept:
    """Reads the payloads that were kept, of which alone captions come."""

    def __init__(self, url: str, kept: dict[int, bytes]) -> None:
        self.url = url
        self._kept = kept

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        del lengths
        return [memoryview(self._kept[int(offset)]) for offset in offsets]


def is_replaceable(store: Store, place: str) -> bool:
    """Tell whether the place of a sidecar index is free, or holds one; a JSON file that is none is somebody's own.

    Raises:
        StorageError: It cannot be looked at.
    """
    try:
        reader = store.open(place)
    except NotFoundError:
        return True
    try:
        document = load_document(reader.read(0, reader.size))
    except MalformedError:
        document = {}
    return isinstance(document.get("files", document.get("lengths")), dict | list)
