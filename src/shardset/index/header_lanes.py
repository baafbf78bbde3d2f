"""Going from tar header to tar header by the sizes that they state, in several places of a remote shard at once.

Nothing here judges a tar: what the lanes read is a guess at what the scan will ask for. Where the guess is wrong, or
too dear, they stop, and the scan reads for itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Condition
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardset.formats.tar_header import BLOCK, has_valid_checksum, padded, parse_header
from shardset.storage.threads import submit

if TYPE_CHECKING:
    from concurrent.futures import Future

    from shardset.storage.remote import RemoteReader

LOOK: Final = 64
"""Headers that are followed to see how large members are."""
HOP_ABOVE: Final = 64 << 10
_STREAM_BELOW: Final = 40 << 10
"""Bytes advanced by a read: above the one hopping pays, below the other streaming. At 16 reads side by side, 10 ms each
and some 100 MB/s in all, both take the same time at about 64 KiB. Between them nothing is changed."""
_PATIENCE: Final = 8
"""Hops by whose mean the second of these is judged."""
NEAR: Final = 4 << 10
"""The next header is read in the same go if it lies at most this many bytes behind what was read."""
_CLUSTER: Final = 16 << 10
"""Headers that stand together are read in one go up to this many bytes."""
_LONGEST_EXTENSION: Final = 64 << 10
_SEGMENT: Final = 32 << 20
"""Bytes of shard that a lane goes through in one go, if members are not so large that this would be a few hops."""
_FIRST_LANE: Final = 8
"""Hops to the end of the shard below which no lane is sent ahead."""
_SPARE: Final = 0.027
"""Of a shard of large members lanes read at most this part, together with the headers that are needed in any case."""
_LEAST_SPARE: Final = 0.005
_SEARCH: Final = 0.65
"""Strides that a lane reads on the mean to find its first header: half of one, and what the last read had too much."""
_WASTE: Final = 0.1
"""What a lane reads of headers above this part of the bytes that it advances counts as wasted."""
_HELD: Final = 32 << 20
"""Bytes of headers that lanes may have waiting."""
_USTAR: Final = np.frombuffer(b"ustar", np.uint8)


class Chain(NamedTuple):
    """Headers that follow each other by their sizes, as indexes into some bytes.

    Attributes:
        places: Where each header begins.
        following: Where the next one begins, perhaps behind the bytes.
        is_broken: What stands at `following` is no header.
    """

    places: list[int]
    following: int
    is_broken: bool


def follow_headers(data: memoryview, at: int, most: int) -> Chain:
    """Go from header to header through some bytes, at most `most` times, and no further than they reach."""
    places: list[int] = []
    while len(places) < most and at + BLOCK <= len(data):
        size = _stored_size(bytes(data[at : at + BLOCK]))
        if size is None:
            return Chain(places, at, is_broken=True)
        places.append(at)
        at += BLOCK + padded(size)
    return Chain(places, at, is_broken=False)


def _stored_size(block: bytes) -> int | None:
    """Return how many bytes should follow a header block, or None if it is none. A guess: PAX may say otherwise."""
    if block[257:262] != b"ustar" and not has_valid_checksum(block):
        return None
    try:
        header = parse_header(block)
    except ValueError:
        return None
    return 0 if header.typeflag in b"123456V" else header.size


def find_header(data: memoryview) -> int:
    """Return the index of the first whole block that is a header with the magic and a right checksum, or -1."""
    blocks = np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)
    for row in np.flatnonzero((blocks[:, 257:262] == _USTAR).all(axis=1)).tolist():
        if has_valid_checksum(blocks[row].tobytes()):
            return int(row) * BLOCK
    return -1


def hop_advance(chain: Chain) -> float:
    """Return how many bytes one read would advance on the mean if this chain was gone through by hops."""
    places = [*chain.places, chain.following]
    total = places[-1] - places[0]
    jumps = [gap for gap in (after - before for before, after in pairwise(places)) if gap > NEAR]
    return total / max(1.0, len(jumps) + (total - sum(jumps)) / _CLUSTER)


def cluster_lengths(chain: Chain) -> list[int]:
    """Return the bytes from the first to the last header of each run of near headers that a jump ends."""
    lengths, first = [], 0
    for place, after in pairwise([*chain.places, chain.following]):
        if after - place > NEAR:
            lengths.append(min(place + BLOCK - first, _CLUSTER))
            first = after
    return lengths


@dataclass(slots=True)
class Pace:
    """How fast hopping goes on from some offset."""

    offset: int
    reads: int = 0
    length: int = 0

    def begin(self, offset: int) -> None:
        """Begin to count anew."""
        self.offset, self.reads, self.length = offset, 0, 0

    @property
    def is_due(self) -> bool:
        """Whether there were reads enough to judge by."""
        return self.reads >= _PATIENCE

    def is_slow(self, offset: int) -> bool:
        """Tell whether streaming would have come as far as `offset` with less trouble."""
        advanced = offset - self.offset
        return advanced < self.reads * _STREAM_BELOW or advanced < 2 * self.length


class Cluster(NamedTuple):
    """Headers that stand together: the bytes read, what is in them, and how many reads it took."""

    data: memoryview
    chain: Chain
    reads: int

    @property
    def ends_near(self) -> bool:
        """Whether the next header is no jump away."""
        return not self.chain.is_broken and self.chain.following - len(self.data) <= NEAR


@dataclass(slots=True, eq=False)
class _Lane:
    """Hops through ``[start, end)``.

    Attributes:
        position: Where it is reading headers now; -1 while it looks for one.
        blocks: What it has read, by offset, until the scan takes it.
    """

    start: int
    end: int
    position: int = -1
    last: int = -1
    blocks: dict[int, memoryview] = field(default_factory=dict)
    is_done: bool = False
    is_cancelled: bool = False


class HeaderLanes:
    """Hops from header to header, in several places of the shard at once."""

    def __init__(self, reader: RemoteReader) -> None:
        self._fetch_into = reader.fetch
        self._size = reader.size
        self._at_once = reader.limits.at_once
        self._changed = Condition()
        self._lanes: deque[_Lane] = deque()
        self._segments: deque[tuple[int, int]] = deque()
        self._tasks: list[Future[None]] = []
        self._planned_to = 0
        self._is_stopped = False
        self._advances: deque[float] = deque(maxlen=_PATIENCE)
        self.advance = float(HOP_ABOVE)
        self._lengths: deque[int] = deque([BLOCK], 32)
        self._held = 0
        self._wasted = 0
        self._awaited = -1

    def begin(self, chain: Chain) -> None:
        """Take a chain for what members are like from now on, and forget what they were like before."""
        self._advances.clear()
        self._lengths.extend(cluster_lengths(chain))
        self.note(chain)

    def note(self, chain: Chain) -> None:
        """Take note of how far a read of headers advanced."""
        self._advances.append(min(hop_advance(chain), self._size))
        self.advance = sum(self._advances) / len(self._advances)

    def stop(self) -> None:
        """Let every lane end after the read that it is waiting for."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    def plan(self, position: int) -> None:
        """Send lanes ahead of the scan, which goes on at `position`, if none are there and it is far to the end."""
        if position < self._planned_to or self._segments or self._is_stopped:
            return
        if not all(task.done() for task in self._tasks):
            return
        left = min((lane.start for lane in self._lanes if lane.last > position), default=self._size) - position
        search = self.advance * _SEARCH
        lanes = min(self._at_once, int((self._spare() - self._wasted) / search) + 1)
        if lanes < 2 or left < _FIRST_LANE * self.advance:
            return
        # Lanes go through a large shard segment by segment, so that few headers must be kept.
        rounds = max(1, round(left / lanes / max(_SEGMENT, search / _SPARE)))
        segment = max(BLOCK, int(left / ((lanes - 1) * rounds + 1)) & -BLOCK)
        starts = range(position + segment, position + left - segment // 2, segment)
        with self._changed:
            self._segments.extend((start, start + segment) for start in starts)
        self._planned_to = position + segment
        self._tasks = [submit(self._run) for _ in range(min(lanes - 1, len(starts)))]

    def _spare(self) -> float:
        """Return how many bytes may be wasted in all."""
        return self._size * max(_SPARE - self._reach() / self.advance, _LEAST_SPARE)

    def _reach(self) -> int:
        """Return how many bytes to read for headers that stand together: enough for three of four."""
        lengths = sorted(self._lengths)
        return lengths[len(lengths) * 3 // 4]

    def take(self, offset: int) -> memoryview | None:
        """Give what a lane has read from `offset` on, waiting for it if it is just being read; None if none did."""
        with self._changed:
            while self._segments and self._segments[0][0] <= offset:
                self._segments.popleft()
            while self._lanes and self._lanes[0].is_done and self._lanes[0].last < offset:
                self._held -= sum(map(len, self._lanes.popleft().blocks.values()))
            while True:
                is_waiting = False
                for lane in self._lanes:
                    if lane.start > offset:
                        break
                    data = lane.blocks.pop(offset, None)
                    if data is not None:
                        self._held -= len(data)
                        return data
                    is_waiting |= lane.position == offset
                    if lane.position < offset:  # it should be ahead: it has found nothing yet, or what is no member
                        lane.is_cancelled = True
                if not is_waiting:
                    return None
                self._awaited = offset
                self._changed.wait()

    def read_cluster(self, offset: int, least: int = BLOCK, data: memoryview | None = None) -> Cluster:
        """Read the headers that stand together from `offset` on.

        Args:
            offset: Where they begin.
            least: Bytes that are read at least.
            data: What is known of them already.
        """
        reads = 0
        if data is None:
            data, reads = self._fetch(offset, min(max(least, self._reach()), self._size - offset)), 1
        chain = follow_headers(data, 0, LOOK)
        while self._goes_on(data, chain, offset):
            wanted = max(chain.following + BLOCK - len(data), min(len(data), _CLUSTER - len(data)))
            more = self._fetch(offset + len(data), min(wanted, self._size - offset - len(data)))
            data, reads = memoryview(b"".join((data, more))), reads + 1
            rest = follow_headers(data, chain.following, LOOK)
            chain = Chain(chain.places + rest.places, rest.following, rest.is_broken)
        if chain.places and not chain.is_broken:
            self._lengths.extend(cluster_lengths(chain))
        return Cluster(data, chain, reads)

    def _goes_on(self, data: memoryview, chain: Chain, offset: int) -> bool:
        """Tell whether the next header is to be read together with what is there."""
        end = chain.following + BLOCK
        if chain.is_broken or not chain.places or end <= len(data) or offset + end > self._size:
            return False
        if data[chain.places[-1] + 156] in b"xXgLK":  # its body and the member behind it will be asked for
            return end - len(data) <= _LONGEST_EXTENSION
        return end - len(data) <= NEAR and end <= _CLUSTER

    def _fetch(self, offset: int, length: int) -> memoryview:
        buffer = memoryview(bytearray(length))
        self._fetch_into(offset, buffer)
        return buffer.toreadonly()

    # In other threads

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._segments or self._is_stopped or self._held > _HELD // 2:
                    return
                lane = _Lane(*self._segments.popleft())
                self._lanes.append(lane)
            try:
                self._run_lane(lane)
            except Exception:  # noqa: BLE001 - the scan asks itself for what it needs, and that error counts
                self._is_stopped = True
            finally:
                with self._changed:
                    lane.position, lane.is_done = -1, True
                    self._changed.notify_all()

    def _run_lane(self, lane: _Lane) -> None:
        offset, data = self._search(lane, lane.start)
        pace, run = Pace(offset), BLOCK
        while offset >= 0 and self._may_go_on(lane, offset):
            with self._changed:
                lane.position = offset
            cluster = self._trimmed(self.read_cluster(offset, run, data))
            pace.reads += cluster.reads
            pace.length += len(cluster.data)
            run = min(2 * max(run, len(cluster.data)), 4 * _CLUSTER) if cluster.ends_near else BLOCK
            following, data = offset + cluster.chain.following, None
            with self._changed:
                lane.blocks[offset] = cluster.data
                lane.last = offset
                lane.position = -1 if cluster.chain.is_broken else following
                self._held += len(cluster.data)
                self._wasted += max(0, len(cluster.data) - int(_WASTE * cluster.chain.following))
                if offset == self._awaited:
                    self._changed.notify_all()
            if cluster.chain.is_broken:
                following, data = self._search(lane, following + BLOCK)
            offset = following
            # Not too soon, because it may be a tar of small members inside a tar.
            if pace.is_due and offset - pace.offset > 2 * self.advance:
                if pace.is_slow(offset):
                    return  # the scan will stream here
                pace.begin(offset)

    def _trimmed(self, cluster: Cluster) -> Cluster:
        """Let go of what a search has read behind the last header."""
        end = (cluster.chain.places[-1] if cluster.chain.places else 0) + BLOCK
        if len(cluster.data) <= end + NEAR:
            return cluster
        return cluster._replace(data=memoryview(bytes(cluster.data[:end])))

    def _may_go_on(self, lane: _Lane, offset: int) -> bool:
        """Tell whether a lane may read on; it goes through the next ones too if these have found nothing."""
        if lane.is_cancelled or self._is_stopped or self._held > _HELD:
            return False
        if offset >= lane.end:
            with self._changed:
                for other in self._lanes:
                    if other.start == lane.end and other.is_done and other.last < 0:
                        lane.end = other.end
        return offset + BLOCK <= self._size and offset < lane.end

    def _search(self, lane: _Lane, offset: int) -> tuple[int, memoryview | None]:
        """Find the next header; return where it is and the bytes read from there on, or -1."""
        while offset < lane.end and self._wasted < self._spare() and self._may_go_on(lane, offset):
            step = int(min(max(self.advance / 4, 8 << 10), 256 << 10)) & -BLOCK
            data = self._fetch(offset, min(step, self._size - offset))
            self._wasted += len(data)
            at = find_header(data)
            if at >= 0:
                return offset + at, data[at:]
            offset += len(data)
        return -1, None
