"""The indexes of single shards that stay in memory, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .files import ShardFiles

COLUMN_ROWS: Final = 16_000_000
"""Indexes stay as columns, of about 90 bytes a file, up to this many files together."""
LIST_ROWS: Final = 2_000_000
"""Lists made of them, of some 300 bytes a file, stay for shards of up to this many files together."""


class KeptFiles:
    """The files of shards, by the shard's number. What was put in first goes first, but never the last one.

    Attributes:
        listed: Those whose lists may stay, which `get` gives as they are; for who asks a million times a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, ShardFiles] = OrderedDict()
        self.listed: OrderedDict[int, ShardFiles] = OrderedDict()
        self._rows = self._listed_rows = 0

    def get(self, shard_index: int) -> ShardFiles | None:
        """Return the files of a shard, which may make lists of them; None if they are not kept."""
        files = self._files.get(shard_index)
        if files is not None and shard_index not in self.listed:
            with self._lock:
                self._admit(shard_index, files)
        return files

    def peek(self, shard_index: int) -> ShardFiles | None:
        """Return the files of a shard to somebody who makes no lists of them; None if they are not kept."""
        return self._files.get(shard_index)

    def put(self, shard_index: int, files: ShardFiles) -> None:
        """Keep the files of a shard."""
        with self._lock:
            self._drop(shard_index)
            self._files[shard_index] = files
            self._rows += files.index.num_files
            self._admit(shard_index, files)
            while self._rows > COLUMN_ROWS and len(self._files) > 1:
                self._drop(next(iter(self._files)))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._files.clear()
            self.listed.clear()
            self._rows = self._listed_rows = 0

    def _admit(self, shard_index: int, files: ShardFiles) -> None:
        if shard_index in self.listed:
            return
        self.listed[shard_index] = files
        self._listed_rows += files.index.num_files
        while self._listed_rows > LIST_ROWS and len(self.listed) > 1:
            self._unlist(next(iter(self.listed)))

    def _unlist(self, shard_index: int) -> None:
        files = self.listed.pop(shard_index, None)
        if files is not None:
            self._listed_rows -= files.index.num_files
            files.forget_lists()

    def _drop(self, shard_index: int) -> None:
        files = self._files.pop(shard_index, None)
        if files is not None:
            self._rows -= files.index.num_files
            self._unlist(shard_index)

    def __contains__(self, shard_index: int) -> bool:
        return shard_index in self._files

    def __len__(self) -> int:
        return len(self._files)
