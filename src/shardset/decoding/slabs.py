"""Memory for arrays of batches, used again when nobody looks at it any more.

A fresh array of 50 MB costs a page fault every 4 KiB while it is first written: a tenth of the time that JPEG takes to
be decoded into it. So what comes free is kept for the next batch of about that size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final
from weakref import finalize

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEAST_KEPT: Final = 256 << 10
"""Smaller memory the allocator of the process keeps by itself."""
_MOST_ALIKE: Final = 4
"""Slabs of one size that are kept: a batch that is used, some that are decoded ahead."""


class Slabs:
    """Gives out arrays whose memory comes back by itself, when the last view of it is gone.

    There are no locks in it, since memory may come back in any thread at any moment, and in a forked child as well,
    where what was kept is the child's own copy.

    Args:
        most_bytes: How much is kept at most. What is in use does not count.
    """

    def __init__(self, most_bytes: int = 512 << 20) -> None:
        self.most_bytes = most_bytes
        self._kept: dict[int, NDArray[np.uint8]] = {}  # by address, the oldest first

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept and used by nobody."""
        return sum(memory.nbytes for memory in tuple(self._kept.values()))

    def take(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return a writable array, not cleared first: all of it must be written before it is handed out."""
        size = math.prod(shape)
        if size < _LEAST_KEPT:
            return np.empty(shape, np.uint8)
        memory = self._take(_room(size))
        # Views of an array hold on to the owner of the memory, past the array. Behind a memoryview, which `frombuffer`
        # keeps and the constructor of arrays does not, they hold on to this very object: its end tells that nobody
        # looks any more.
        lent = memory[:size]
        finalize(lent, self._keep, memory).atexit = False
        return np.frombuffer(lent.data, np.uint8).reshape(shape)

    def _take(self, room: int) -> NDArray[np.uint8]:
        for address, memory in tuple(self._kept.items()):
            if memory.nbytes == room and self._kept.pop(address, None) is not None:
                return memory
        return np.empty(room, np.uint8)

    def _keep(self, memory: NDArray[np.uint8]) -> None:
        kept = tuple(self._kept.items())
        alike = sum(each.nbytes == memory.nbytes for _, each in kept)
        if memory.nbytes > self.most_bytes or alike >= _MOST_ALIKE:
            return
        spare = self.most_bytes - memory.nbytes - sum(each.nbytes for _, each in kept)
        for address, each in kept:  # sizes that are no longer asked for make room
            if spare >= 0:
                break
            self._kept.pop(address, None)
            spare += each.nbytes
        self._kept[id(memory)] = memory


def _room(size: int) -> int:
    """Round up so that sizes that differ by less than an eighth mostly serve each other."""
    step = 1 << ((size - 1).bit_length() - 4)
    return -(-size // step) * step
