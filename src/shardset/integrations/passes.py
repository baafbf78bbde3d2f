"""Which epoch a pass of a DataLoader is of: agreed upon by its workers, in memory that outlives them.

A DataLoader makes its workers anew for each pass, or keeps them, and calls nothing of the dataset in between. But all
workers of a pass have one base seed, and each goes through the dataset once. So the first of them to begin takes the
next epoch for all, and a pass that was given up before some of its workers began leaves none behind the others.
"""

from __future__ import annotations

import mmap
import multiprocessing.context
import os
import struct
import sys
import tempfile
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WORKERS: Final = 1024
_KEPT: Final = 32
"""Passes that are remembered: so many may be under way at once."""
_HEAD: Final = struct.Struct("<QQ?Q")  # next epoch, how often it was set, whether a state waits, passes begun
_PASS: Final = struct.Struct(f"<QQQ{MAX_WORKERS // 8}s")  # base seed, epoch, which setting its state is of, workers
_STATE: Final = struct.Struct("<QQ")  # which setting it is of, bytes of the state behind
_STATE_AT: Final = _HEAD.size + _KEPT * _PASS.size
_ROOM: Final = 1 << 20
_SIZE: Final = _STATE_AT + _STATE.size + _ROOM
_MASK: Final = (1 << 64) - 1


class Begun(NamedTuple):
    """A pass that begins.

    Attributes:
        epoch: Its epoch.
        state: What it goes on from; None if it begins at the start of its epoch.
    """

    epoch: int
    state: bytes | None


class Passes:
    """Memory that a dataset shares with all workers made from it.

    It is there from the beginning, because a fork gives no notice: a file without a name, of which only what is written
    takes room. Workers that are started afresh are given it. Copies that go elsewhere begin a memory of their own.

    Args:
        first: The first epoch.
        state: What the first pass goes on from.
    """

    def __init__(self, first: int = 0, state: bytes | None = None) -> None:
        self._file: int | None = None
        self._name: str | None = None
        if sys.platform == "win32":
            self._attach(f"shardset-{uuid.uuid4().hex}")
        else:
            with tempfile.TemporaryFile() as file:
                file.truncate(_SIZE)
                self._attach(os.dup(file.fileno()))
        self.move(first, state)

    def _attach(self, place: int | str) -> None:
        """Map the memory: that behind an open file, or on Windows that of a name."""
        if sys.platform == "win32" and isinstance(place, str):
            self._name = place
            self._memory = mmap.mmap(-1, _SIZE, place)
        elif isinstance(place, int):
            self._file = place
            self._memory = mmap.mmap(place, _SIZE)

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        epoch: int = _HEAD.unpack_from(self._memory)[0]
        return epoch

    @property
    def has_state(self) -> bool:
        """Whether the next pass goes on from a state."""
        waits: bool = _HEAD.unpack_from(self._memory)[2]
        return waits

    def move(self, epoch: int, state: bytes | None = None) -> None:
        """Make `epoch` that of the next pass, and have that go on from a state.

        Raises:
            StateError: The state is of over a megabyte.
        """
        if state is not None and len(state) > _ROOM:
            raise StateError(f"the state is of {len(state):,} bytes; workers can be given {_ROOM:,}")
        with self._locked():
            _, times, _, begun = _HEAD.unpack_from(self._memory)
            if state is not None:
                start = _STATE_AT + _STATE.size
                self._memory[start : start + len(state)] = state
                _STATE.pack_into(self._memory, _STATE_AT, times + 1, len(state))
            _HEAD.pack_into(self._memory, 0, epoch, times + 1, state is not None, begun)

    def begin(self) -> Begun:
        """Begin a pass in this process alone."""
        with self._locked():
            epoch, times, waits, begun = _HEAD.unpack_from(self._memory)
            _HEAD.pack_into(self._memory, 0, epoch + 1, times, False, begun)  # noqa: FBT003
            return Begun(epoch, self._state(times) if waits else None)

    def join(self, worker: int, base_seed: int, own: int | None = None) -> Begun:
        """Begin a pass in a worker: the newest one of this base seed that it is not in yet, or a new one.

        Args:
            worker: The number of the worker.
            base_seed: That of the DataLoader's pass.
            own: The epoch of the state that the worker itself was given to go on from, if it was.

        Raises:
            StateError: The states that workers were given are of different epochs; or what this pass was to go on from
                has been replaced in the meantime.
            ValueError: It is not among the first 1,024 workers.
        """
        if worker >= MAX_WORKERS:
            raise ValueError(f"worker {worker}: at most {MAX_WORKERS} workers can share a loader")
        base_seed &= _MASK
        with self._locked():
            epoch, times, waits, begun = _HEAD.unpack_from(self._memory)
            for number in reversed(range(max(0, begun - _KEPT), begun)):
                place = _HEAD.size + number % _KEPT * _PASS.size
                seed, at, of, mask = _PASS.unpack_from(self._memory, place)
                members = int.from_bytes(mask, "little")
                if seed != base_seed or members >> worker & 1:
                    continue
                if own is not None and own != at:
                    what = f"the states of the workers are of different epochs: {own}, and {at}"
                    raise StateError(what, hint="load all of what state_dict gave, at one moment")
                self._note(number, base_seed, at, of, members | 1 << worker)
                return Begun(at, self._state(of) if of and own is None else None)
            at = epoch if own is None else own
            of = times if waits and own is None else 0
            self._note(begun, base_seed, at, of, 1 << worker)
            _HEAD.pack_into(self._memory, 0, at + 1, times, False, begun + 1)  # noqa: FBT003
            return Begun(at, self._state(of) if of else None)

    def _note(self, number: int, base_seed: int, epoch: int, of: int, members: int) -> None:
        mask = members.to_bytes(MAX_WORKERS // 8, "little")
        _PASS.pack_into(self._memory, _HEAD.size + number % _KEPT * _PASS.size, base_seed, epoch, of, mask)

    def _state(self, of: int) -> bytes:
        found, size = _STATE.unpack_from(self._memory, _STATE_AT)
        if found != of:
            raise StateError("another state was loaded before this worker began its pass")
        start = _STATE_AT + _STATE.size
        return self._memory[start : start + size]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep all other processes out. Two passes that begin at once are what might go wrong otherwise."""
        if self._file is None:  # on Windows: workers of one pass do the same, whoever is first
            yield
            return
        import fcntl  # noqa: PLC0415 - Windows has none

        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is None:
            epoch, times, waits, _ = _HEAD.unpack_from(self._memory)
            return {"first": epoch, "state": self._state(times) if waits else None}
        if self._file is None:
            return {"name": self._name}
        from multiprocessing.reduction import DupFd  # noqa: PLC0415 - not there on every system

        return {"file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "first" in state:
            self.__init__(**state)  # type: ignore[misc]
            return
        self._file = self._name = None
        self._attach(state["name"] if "name" in state else state["file"].detach())

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            os.close(file)
