"""Memory that a dataset shares with the worker processes made from it: which epoch comes next, and what was dropped.

A DataLoader makes its workers anew for each epoch, or keeps them, and calls nothing of the dataset in between. So each
worker counts its epochs in a place that outlives it, and leaves its report there for whoever asks.
"""

from __future__ import annotations

import mmap
import multiprocessing.context
import os
import struct
import tempfile
from typing import Any, Final

import orjson

from shardset.loading.ranks import find_share, inherit_rank
from shardset.policy import Place, Report

_HEAD_SIZE: Final = 1 << 12
_SLOTS: Final = 256
_SLOT_SIZE: Final = 1 << 15
_MASK: Final = (1 << 64) - 1
_SIZE: Final = _HEAD_SIZE + _SLOTS * _SLOT_SIZE
_HEAD: Final = struct.Struct("<QQ")  # how often the next epoch was set, and to what
_SLOT: Final = struct.Struct("<QQQ")  # how often it had been set then, epochs begun since, bytes of the report behind


class Board:
    """The shared memory of one dataset: a slot for the process itself and one for each of its first 255 workers.

    It is there from the beginning, because a fork gives no notice; pages that nobody touches cost nothing. Workers that
    are started afresh get it as an open file without a name. Copies that go elsewhere, and workers on Windows, begin a
    board of their own, with the same next epoch.

    Args:
        first: The first epoch.
    """

    def __init__(self, first: int = 0) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._file: int | None = None
        self.set_next(first)

    def set_next(self, epoch: int) -> None:
        """Make `epoch` the next one for every process that shares this memory, those that run already included."""
        times, _ = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, times + 1, epoch)

    def set_own(self, worker: int | None, epoch: int) -> None:
        """Make `epoch` the next one of one process alone, as a state says that was saved there.

        The others go on from states of their own, at any moment: to set it for all would make some of them begin anew.
        """
        times, first = _HEAD.unpack_from(self._memory)
        _SLOT.pack_into(self._memory, _place(worker), times, (epoch - first) & _MASK, 0)

    def take(self, worker: int | None) -> int:
        """Return the number of the epoch that begins in this process, and count it.

        Args:
            worker: The number of the worker; None outside of any.
        """
        epoch, times, begun = self._next(worker)
        if worker is None:  # what workers left is of an earlier epoch
            for number in range(_SLOTS - 1):
                seen, before, size = _SLOT.unpack_from(self._memory, _place(number))
                if size:
                    _SLOT.pack_into(self._memory, _place(number), seen, before, 0)
        _SLOT.pack_into(self._memory, _place(worker), times, (begun + 1) & _MASK, 0)
        return epoch

    def peek(self, worker: int | None = None) -> int:
        """Return the number that `take` would."""
        return self._next(worker)[0]

    def _next(self, worker: int | None) -> tuple[int, int, int]:
        times, first = _HEAD.unpack_from(self._memory)
        seen, begun, _ = _SLOT.unpack_from(self._memory, _place(worker))
        if seen != times:  # it was set since
            begun = 0
        return (first + begun) & _MASK, times, begun

    def leave(self, worker: int, report: Report) -> None:
        """Leave the report of a worker's epoch, with its places if there is room."""
        counts = {code: (count, [_plain(place) for place in places]) for code, count, places in report}
        text = orjson.dumps(counts)
        if len(text) > _SLOT_SIZE - _SLOT.size:
            text = orjson.dumps({code: (count, []) for code, count, _ in report})
        if len(text) > _SLOT_SIZE - _SLOT.size:  # a thousand codes; nothing but a program's own can be so many
            text = orjson.dumps({"many_codes": (len(report), [])})
        at = _place(worker)
        times, begun, _ = _SLOT.unpack_from(self._memory, at)
        self._memory[at + _SLOT.size : at + _SLOT.size + len(text)] = text
        _SLOT.pack_into(self._memory, at, times, begun, len(text))

    def reports(self) -> list[Report]:
        """Return the reports that workers left of the latest epoch that any of them began."""
        places = [_place(worker) for worker in range(_SLOTS - 1)]
        slots = [(_SLOT.unpack_from(self._memory, at), at + _SLOT.size) for at in places]
        latest = max((times, begun) for (times, begun, _), _ in slots)
        return [
            _report(orjson.loads(self._memory[at : at + size]))
            for (times, begun, size), at in slots
            if size and (times, begun) == latest
        ]

    def has_workers(self) -> bool:
        """Tell whether a worker has begun an epoch since the next one was set."""
        times, _ = _HEAD.unpack_from(self._memory)
        slots = (_SLOT.unpack_from(self._memory, _place(worker)) for worker in range(_SLOTS - 1))
        return any(seen == times and begun for seen, begun, _ in slots)

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is None:
            return {"first": self.peek()}
        rank, world_size, *_ = find_share()
        if os.name == "nt":
            return {"first": self.peek(), "rank": (rank, world_size)}
        from multiprocessing.reduction import DupFd  # noqa: PLC0415 - not there on every system

        if self._file is None:
            self._file = self._move_to_file()
        return {"file": DupFd(self._file), "rank": (rank, world_size)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "rank" in state:
            inherit_rank(*state["rank"])
        if "first" in state:
            self.__init__(state["first"])  # type: ignore[misc]
            return
        self._file = state["file"].detach()
        self._memory = mmap.mmap(self._file, _SIZE)

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            os.close(file)

    def _move_to_file(self) -> int:
        """Go over to memory that a process started afresh can be given. Workers forked before keep the old one."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_SIZE)
            handle = os.dup(file.fileno())
        memory = mmap.mmap(handle, _SIZE)
        memory[:_HEAD_SIZE] = self._memory[:_HEAD_SIZE]
        for slot in range(_SLOTS):
            at = _HEAD_SIZE + slot * _SLOT_SIZE
            if any(_SLOT.unpack_from(self._memory, at)):
                memory[at : at + _SLOT_SIZE] = self._memory[at : at + _SLOT_SIZE]
        self._memory = memory
        return handle


def _place(worker: int | None) -> int:
    return _HEAD_SIZE + (0 if worker is None else 1 + worker % (_SLOTS - 1)) * _SLOT_SIZE


def _plain(place: Place) -> tuple[str | None, int | None, str | None, str]:
    parts = (place.shard, place.key, place.message)
    shard, key, message = (None if part is None else part.encode("utf-8", "replace").decode()[:500] for part in parts)
    return shard, place.offset, key, message or ""


def _report(counts: dict[str, Any]) -> Report:
    report = Report()
    for code, (count, places) in counts.items():
        report.add(code, count=count)
        for shard, offset, key, message in places:
            report.add(code, Place(shard, offset, key, message), count=0)
    return report
