"""The scan of remote shards: the same result as of mapped ones, in few reads side by side, and few bytes."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from bisect import bisect_right
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.tar_builder import BLOCK, END, V7, archive, base256, gnu_long, header, member, pax
from formats.tar_mix import KINDS, PAYLOADS, make, mixed, pieces
from formats.tar_modes import codes, rows_of, scan, state
from formats.test_tar_fuzz import MUTATIONS, seeds
from shardset.errors import ChangedError, TransferError
from shardset.index import header_lanes, remote_scan
from shardset.index.build import scan_reader
from shardset.index.remote_scan import scan_remote
from shardset.storage.planner import ReadLimits
from shardset.storage.remote import RemoteReader
from shardset.storage.store import ObjectInfo

pytestmark = pytest.mark.servers

CASES = sorted((Path(__file__).parents[1] / "data" / "tar").glob("*.tar"))
MIB = 1 << 20
TIME = pax((b"mtime", b"1700000000.5"))


class Remote:
    """A remote shard: bytes, or `Parts`, that each read waits for. Counts, and refuses what no store could answer.

    Attributes:
        reads: Every (offset, length) asked for.
        beside: For each read how many were under way when it began, itself included.
    """

    def __init__(self, content, latency=0.0, limits=None):
        self.content = content
        self.latency = latency
        self.reads = []
        self.beside = []
        self.under_way = 0
        self.lock = threading.Lock()
        info = ObjectInfo("remote://shards/a.tar", len(content), "1")
        self.reader = RemoteReader(info, self.fetch, limits or ReadLimits())

    @property
    def share(self):
        """Bytes read for each byte of the shard."""
        return sum(length for _, length in self.reads) / len(self.content)

    @property
    def mean_beside(self):
        return sum(self.beside) / len(self.beside)

    def fetch(self, offset, view):
        assert type(offset) is int
        assert 0 <= offset < offset + len(view) <= len(self.content), (offset, len(view))
        with self.lock:
            self.under_way += 1
            self.reads.append((offset, len(view)))
            self.beside.append(self.under_way)
        try:
            if self.latency:
                time.sleep(self.latency)
            view[:] = self.content[offset : offset + len(view)]
        finally:
            with self.lock:
                self.under_way -= 1


class Parts:
    """A shard that is made as it is read: headers with payloads of one byte value, which take no memory."""

    def __init__(self, members, end=END):
        self.starts, self.heads, at = [], [], 0
        for head, size in [*members, (end, 0)]:
            self.starts.append(at)
            self.heads.append(head)
            at += len(head) + -(-size // BLOCK) * BLOCK
        self.size = at

    def __len__(self):
        return self.size

    def __getitem__(self, where):
        piece = bytearray(b"\xa5") * (where.stop - where.start)
        for row in range(bisect_right(self.starts, where.start) - 1, len(self.starts)):
            start, head = self.starts[row], self.heads[row]
            if start >= where.stop:
                break
            first, last = max(start, where.start), min(start + len(head), where.stop)
            if first < last:
                piece[first - where.start : last - where.start] = head[first - start : last - start]
        return piece


def images(count, size=100_000, *, lead=b"", seed=0, spread=0.5):
    """Members of about `size` bytes each."""
    rng = random.Random(seed)
    sizes = [int(size * rng.uniform(1 - spread, 1 + spread)) for _ in range(count)]
    return [(lead + header(b"%d/%07d.jpg" % (seed, number), size), size) for number, size in enumerate(sizes)]


def trios(count, *, lead=b""):
    """An image, its class and its description, as webdataset's shards have them."""
    return [
        one
        for number, (image, size) in enumerate(images(count))
        for one in (
            (lead + header(b"%07d.cls" % number, 1), 1),
            (lead + image, size),
            (lead + header(b"%07d.json" % number, 300), 300),
        )
    ]


@contextmanager
def tiny(*, piece=2048, first=1024, stream_below=1000, hop_above=1500, spare=50.0):
    """Let every way of reading ahead be gone through in a shard of a few kilobytes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("_WHOLE", BLOCK),
            ("_FIRST_MOST", first),
            ("_TAIL", 512),
            ("_PIECE", piece),
            ("_IN_FLIGHT", 4 * piece),
            ("_ENOUGH", 2),
            ("_LONGEST_RUN", 4096),
            ("HOP_ABOVE", hop_above),
            ("NEAR", 512),
        ):
            patch.setattr(remote_scan, name, value)
        for name, value in (
            ("NEAR", 512),
            ("_STREAM_BELOW", stream_below),
            ("_PATIENCE", 2),
            ("_CLUSTER", 2048),
            ("_SEGMENT", 4096),
            ("_FIRST_LANE", 1),
            ("_SPARE", spare),
        ):
            patch.setattr(header_lanes, name, value)
        yield


WAYS = {
    "streaming": {"stream_below": 1 << 40, "hop_above": 1 << 41},
    "hopping": {"stream_below": 0, "hop_above": 0},
    "both": {},
    "both, with long pieces": {"piece": 16384, "first": 4096, "stream_below": 2000, "hop_above": 2500},
    "hopping without lanes": {"stream_below": 0, "hop_above": 0, "spare": 1e-9},
}


def assert_same(data, ways=WAYS, **options):
    expected = state(scan(data, "careful", **options))
    for way in ways:
        with tiny(**WAYS[way]):
            remote = Remote(data)
            assert state(scan_remote(remote.reader, **options)) == expected, way


# The result is that of a mapped shard


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_case_is_read_as_if_it_were_mapped(path):
    data = path.read_bytes()
    assert state(scan_reader(Remote(data).reader)) == state(scan(data, "mapped"))
    assert_same(data)
    assert_same(data, ["both"], ignore_zeros=True)


@given(pieces, st.sampled_from(sorted(WAYS)))
def test_every_mix_of_members_is_found_whatever_is_read_ahead(mix, way):
    assert_same(archive(*mix).data, [way])


@given(pieces, st.data())
def test_a_mix_that_is_cut_anywhere_is_read_alike(mix, data):
    whole = archive(*mix).data
    assert_same(whole[: data.draw(st.integers(0, len(whole)))], [data.draw(st.sampled_from(sorted(WAYS)))])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_member_is_found_with_each_kind_of_payload(kind):
    for payload in PAYLOADS:
        mix = [make(kind if number % 3 else "file", number, 700 * number % 3000, payload) for number in range(15)]
        assert_same(archive(*mix).data, ["hopping", "both"])


@pytest.mark.parametrize("way", WAYS)
def test_a_third_of_odd_members_among_five_hundred_changes_nothing(way):
    assert_same(mixed(3, 500, odd=1 / 3).data, [way])


def test_mutated_archives_are_read_as_if_they_were_mapped(fuzz_count):
    archives = seeds()
    for number in range(fuzz_count // 4):
        rng = random.Random(number)
        data = bytearray(rng.choice(archives))
        for _ in range(rng.choice((1, 1, 2, 4))):
            if data:
                rng.choice(MUTATIONS)(data, rng)
        try:
            assert_same(bytes(data), rng.sample(sorted(WAYS), 2), ignore_zeros=rng.random() < 0.2)
        except Exception as error:
            error.add_note(f"mutation {number}: {len(data)} bytes")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("limits", [ReadLimits(most=1000, at_once=1), ReadLimits(most=1 << 30, at_once=64)])
def test_the_limits_of_a_reader_do_not_change_what_is_found(limits):
    content = Parts(images(60) + images(3000, 900, seed=1) + images(40, seed=2))
    remote = Remote(content, limits=limits)
    table = scan_remote(remote.reader)
    assert table.header_offset.tolist() == content.starts[:-1]
    assert max(remote.beside) <= limits.at_once + 2


# What it costs where payloads are large


@pytest.mark.parametrize("lead", [b"", TIME], ids=["ustar", "PAX"])
@pytest.mark.parametrize(("count", "most"), [(640, 0.03), pytest.param(2560, 0.03, marks=pytest.mark.slow)])
def test_of_members_of_100_kb_under_three_percent_is_read_by_many_reads_side_by_side(count, most, lead):
    content = Parts(images(count, lead=lead))
    remote = Remote(content, latency=0.004)
    table = scan_remote(remote.reader)
    assert table.first_offset.tolist() == content.starts[:-1]
    assert table.error() is None
    assert remote.share < most
    assert len(remote.reads) < 1.2 * count
    assert remote.mean_beside > 6


@pytest.mark.parametrize("count", [25, 40, 100])
def test_of_few_members_of_100_kb_under_three_percent_is_read_too(count):
    remote = Remote(Parts(images(count)))
    assert len(scan_remote(remote.reader)) == count
    assert remote.share < 0.03 or len(remote.content) <= 2 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("lead", "most"), [(b"", 0.032), (TIME, 0.062)], ids=["ustar", "PAX"])
def test_the_headers_of_a_sample_that_stand_together_are_read_together(lead, most):
    content = Parts(trios(1000, lead=lead))
    remote = Remote(content, latency=0.004)
    table = scan_remote(remote.reader)
    assert table.first_offset.tolist() == content.starts[:-1]
    assert len(remote.reads) < 1.2 * 1000
    assert remote.share < most
    assert remote.mean_beside > 6


def test_sizes_that_vary_much_are_hopped_over_too():
    rng = random.Random(5)
    sizes = [int(30_000 * rng.lognormvariate(1, 0.8)) for _ in range(700)]
    content = Parts([(header(b"%d.jpg" % number, size), size) for number, size in enumerate(sizes)])
    remote = Remote(content)
    assert scan_remote(remote.reader).size.tolist() == sizes
    assert remote.share < 0.06


def test_a_shard_without_magic_is_hopped_through():
    remote = Remote(Parts([(header(b"%d.jpg" % number, 100_000, magic=V7), 100_000) for number in range(300)]))
    assert len(scan_remote(remote.reader)) == 300
    assert remote.share < 0.06


def test_a_tar_in_every_member_wastes_few_reads():
    inner = b"".join(member(b"inner%d.txt" % number, b"x" * 400).raw for number in range(90)) + END
    content = Parts([(header(b"%d.tar" % number, len(inner)) + inner, 0) for number in range(700)])
    remote = Remote(content, latency=0.004)
    table = scan_remote(remote.reader)
    assert table.header_offset.tolist() == content.starts[:-1]
    assert remote.share < 0.06
    assert len(remote.reads) < 1.3 * 700


@pytest.mark.slow
def test_a_shard_of_two_gigabytes_takes_little_memory():
    content = Parts(images(20_000))
    remote = Remote(content)
    assert len(content) > 2_000_000_000
    tracemalloc.start()
    try:
        table = scan_remote(remote.reader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert table.header_offset.tolist() == content.starts[:-1]
    assert remote.share < 0.01
    assert peak < 48 * MIB


# What it costs where members are small


@pytest.mark.parametrize(
    "kind",
    [
        "file",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("times", "path", "long name", "dir", "base-256", "v7")),
    ],
)
def test_small_members_are_streamed_several_pieces_at_once_and_each_byte_once(kind):
    made = archive(*(make(kind, number, 900, "text") for number in range(9000)))
    remote = Remote(made.data, latency=0.02)
    assert rows_of(scan_remote(remote.reader)) == made.rows
    assert remote.share < 1.05
    assert len(remote.reads) < len(made.data) / MIB + 5
    assert max(remote.beside) >= 3


@pytest.mark.slow
def test_a_long_shard_of_small_members_is_streamed_in_bounded_memory():
    content = Parts(images(100_000, 1000))
    remote = Remote(content, latency=0.02)
    tracemalloc.start()
    try:
        table = scan_remote(remote.reader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert table.header_offset.tolist() == content.starts[:-1]
    assert remote.share < 1.05
    assert max(remote.beside) >= 4
    assert peak < 80 * MIB


def test_a_small_shard_is_read_in_one_go():
    made = archive(*(make("file", number, 900, "text") for number in range(100)))
    remote = Remote(made.data)
    assert rows_of(scan_remote(remote.reader)) == made.rows
    assert remote.reads == [(0, len(made.data))]


@pytest.mark.slow
def test_small_and_large_members_in_turn_are_streamed_and_hopped_over():
    content = Parts(images(4000, 900) + images(1000, seed=1) + images(4000, 900, seed=2))
    remote = Remote(content, latency=0.004)
    table = scan_remote(remote.reader)
    assert table.header_offset.tolist() == content.starts[:-1]
    small = 2 * 4000 * 1500
    assert remote.share * len(content) < small + 40 * MIB
    assert len(remote.reads) < 1400


@pytest.mark.slow
def test_large_members_before_and_behind_small_ones_are_hopped_over():
    content = Parts(images(500) + images(8000, 900, seed=1) + images(500, seed=2))
    remote = Remote(content, latency=0.004)
    table = scan_remote(remote.reader)
    assert table.header_offset.tolist() == content.starts[:-1]
    assert remote.share * len(content) < 8000 * 1500 + 30 * MIB


# Hostile and broken shards


def huge(size):
    return header(b"huge", size_field=base256(size))


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        Parts([(huge(2**63 - 512), 0), *images(600)]),
        Parts([*images(300), (huge(2**63 - 1), 0), *images(300, seed=1)]),
        Parts([(b"\xa5" * BLOCK, 64 * MIB)]),
        Parts([*images(30), (b"\xa5" * BLOCK, 64 * MIB)]),
        Parts([(header(b"%d" % number, 0, magic=b"ustar\x0000"), 0) for number in range(20)] + [(END, 64 * MIB)]),
        Parts([*images(30), (bytes(BLOCK) * 20_000, 0), *images(300, seed=1)]),
        Parts([(header(b"x", 0) * 40_000, 0)]),
        Parts([(bytes(257) + b"ustar\x0000" + bytes(247), 0)] * 40_000),
        Parts([*images(20), ((bytes(257) + b"ustar\x0000" + bytes(247)) * 40_000, 0), *images(300, seed=1)]),
        Parts([(gnu_long(b"n" * 3_000_000) + header(b"x", 100_000), 100_000), *images(300)]),
    ],
    ids=[
        "8 EB first",
        "8 EB in the middle",
        "no tar",
        "no tar behind 30 members",
        "far end",
        "ten million zeros",
        "nothing but headers",
        "nothing but magic",
        "magic behind members",
        "a name of 3 MB",
    ],
)
@pytest.mark.parametrize("ignore_zeros", [False, True])
def test_hostile_shards_are_read_about_once_at_most(content, ignore_zeros):
    remote = Remote(content)
    table = scan_remote(remote.reader, ignore_zeros=ignore_zeros)
    assert remote.share < 1.1
    whole = bytes(content[slice(0, len(content))])
    assert state(table) == state(scan(whole, "mapped", ignore_zeros=ignore_zeros))


@pytest.mark.parametrize("share", [0, 0.002, 0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("content", [Parts(images(500)), Parts(images(9000, 900))], ids=["large", "small"])
def test_an_object_that_changes_meanwhile_ends_the_scan_with_its_error(content, share):
    whole = Remote(content)
    scan_remote(whole.reader)
    remote = Remote(content)

    def fetch(offset, view):
        if len(remote.reads) >= share * len(whole.reads):
            raise ChangedError("the object is no longer the one that was opened", url="remote://shards/a.tar")
        remote.fetch(offset, view)

    reader = RemoteReader(remote.reader.info, fetch)
    with pytest.raises(ChangedError):
        scan_remote(reader)


@pytest.mark.parametrize("seed", range(5))
def test_reads_that_fail_now_and_then_never_give_a_wrong_result(seed):
    content = Parts(images(400))
    remote, rng = Remote(content), random.Random(seed)
    fetch = remote.fetch

    def failing(offset, view):
        if rng.random() < 0.002:
            raise TransferError("cut", url="remote://shards/a.tar")
        fetch(offset, view)

    try:
        table = scan_remote(RemoteReader(remote.reader.info, failing))
    except TransferError:
        return
    assert table.header_offset.tolist() == content.starts[:-1]


def test_a_fault_in_the_middle_ends_the_scan_where_it_is():
    content = Parts([*images(300), (b"\xa5" * BLOCK, 0), *images(300, seed=1)])
    table = scan_remote(Remote(content, latency=0.001).reader)
    assert codes(table) == ["bad_checksum"]
    assert table.end == content.starts[300]
    assert len(table) == 300
