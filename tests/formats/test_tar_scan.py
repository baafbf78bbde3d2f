from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.tar_builder import BLOCK, END, V7, archive, base256, header, member, pax
from formats.tar_mix import KINDS, PAYLOADS, make, mixed, pieces, small_chunks, times
from formats.tar_modes import MODES, StrictRead, codes, payload_of, rows_of, scan, state
from shardset.formats.tar import scan_tar
from shardset.formats.tar_scan import HeaderScanner


def assert_all_ways_agree(made, **options):
    """Assert that each way of scanning finds what the builder laid out, and the same faults at the same places."""
    tables = [scan(made.data, mode, **options) for mode in MODES]
    for mode, table in zip(MODES, tables, strict=True):
        rows = rows_of(table)
        wrong = next((pair for pair in zip(rows, made.rows, strict=False) if pair[0] != pair[1]), None)
        assert wrong is None, mode
        assert len(rows) == len(made.rows), (mode, table.faults[-1:])
        assert Counter(codes(table)) == Counter(made.warnings), mode
        assert table.faults == tables[0].faults, mode
        assert table.end == tables[0].end == len(made.data) - len(END), mode


# The fast ways equal the careful one


@given(pieces)
def test_every_mix_of_members_is_found_in_every_way(mix):
    assert_all_ways_agree(archive(*mix))


@given(pieces, st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from([512, 1024, 2560, 8192]))
def test_every_mix_of_members_is_found_across_the_borders_of_chunks_and_windows(mix, chunk, window):
    with small_chunks(chunk, window):
        assert_all_ways_agree(archive(*mix))


@given(pieces, st.data())
def test_a_mix_that_is_cut_anywhere_is_read_alike_in_every_way(mix, data):
    whole = archive(*mix).data
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    with small_chunks(data.draw(st.sampled_from([2, 64])), 2048):
        states = [state(scan(cut, mode)) for mode in MODES]
    assert states[1] == states[0]
    assert states[2] == states[0]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_member_is_found_with_each_kind_of_payload(kind):
    for payload in PAYLOADS:
        mix = [make(kind if number % 3 else "file", number, 700 * number % 3000, payload) for number in range(15)]
        with small_chunks(4, 4096):
            assert_all_ways_agree(archive(*mix))


@pytest.mark.slow
def test_six_thousand_members_cross_chunks_and_windows():
    mix = [
        member(
            b"train/%07d.jpg" % number, b"%d" % number * (number % 700), lead=times(number) if number % 3 == 0 else b""
        )
        for number in range(6000)
    ]
    made = archive(*mix)
    assert len(made.data) > 8 << 20
    assert_all_ways_agree(made)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_third_of_odd_members_among_two_thousand_changes_nothing(seed):
    made = mixed(seed, 2000, odd=1 / 3)
    assert_all_ways_agree(made)
    table = scan(made.data, "windows")
    assert [payload_of(made.data, row) for row in rows_of(table)] == made.payloads


@pytest.mark.parametrize("before", range(2040, 2052))
def test_two_pax_headers_at_the_end_of_a_chunk_stay_with_their_member(before):
    plain = member(b"a.txt", b"1")
    twice = member(b"b.txt", b"2", lead=times(1) * 2, warnings=("repeated_extension",))
    thrice = member(b"c.txt", b"3", lead=times(1) * 3, warnings=("repeated_extension",) * 2)
    assert_all_ways_agree(archive(*[plain] * before, twice, plain, thrice, plain))


@pytest.mark.parametrize(
    "body",
    [
        b"19 mtime=1700000000\n",  # a byte short of its length
        b"21 mtime=1700000000\n",
        b"20 mtime=1700000000 ",
        b"20 mtime=170000000\n\n",  # a record whose value ends in a newline
        b"20 mtime=1700000000\n\0\0",
        b"20 mtime=1700000000\nx",
        b"20 mtime=1700000000\n14 path=right\n",
        b"34 mtime=1700000000\n14 path=right\n",  # one record: its value holds the rest
        b"14 path=right\n20 mtime=1700000000\n",
        b"20 ctime=1700000000\n",
        b"21 mtime2=1700000000\n",
        b"12 mtimes=1\n",
        b"10 mtime=\n",
        b"9 mtime=\n",
        b"011 mtime=1\n",
        b"1: mtime=1700000000\n",  # as a number of digits it would be 20, which is the length
        b":5 mtime=" + b"1" * 95 + b"\n",
        b"3/ mtime=" + b"1" * 19 + b"\n",
        b"101 mtime=" + b"1" * 90 + b"\n",
        b"600 mtime=" + b"1" * 589 + b"\n",
        b"",
    ],
)
def test_a_pax_header_that_is_nearly_a_time_alone_is_read_with_care(body):
    plain = member(b"a.txt", b"1")
    data = archive(*[plain] * 20, member(b"b.txt", b"2", lead=pax(body)), plain).data
    states = [state(scan(data, mode)) for mode in MODES]
    assert states[1] == states[0]
    assert states[2] == states[0]
    names = [row.name for row in states[0][0]]
    if states[0][1]:
        assert [fault.code for fault in states[0][1]] == ["bad_pax"]
        assert len(names) == 20
    else:
        assert names[20] == (b"right" if b"4 path" in body and not body.startswith(b"34") else b"b.txt")


@pytest.mark.parametrize("mode_field", [b"0000644\0", b"\0", b"6\0", b"64\0", b"644\0"])
def test_a_name_that_fills_its_field_does_not_run_into_the_next(mode_field):
    assert_all_ways_agree(
        archive(*(member(b"n" * length, b"1", patches=((100, mode_field),)) for length in range(90, 101)))
    )


def test_a_pax_header_inside_a_payload_is_no_header_of_the_member_behind_it():
    # The scanner cannot chain over a base-256 size, and finds the header in the payload instead.
    odd = member(b"odd.bin", times(7), size_field=base256(len(times(7))))
    zero = member(b"odd.bin", times(7), lead=pax((b"size", b"%d" % len(times(7)))), size=0)
    plain = member(b"a.txt", b"1")
    for one in (odd, zero):
        assert_all_ways_agree(archive(*[plain] * 20, one, plain, one, one, plain))


def test_a_payload_whose_blocks_chain_like_headers_is_passed_over():
    chain = b"".join(header(b"%d" % number, 0) for number in range(50))
    falling = b"".join(header(b"%d" % number, (9 - number) * BLOCK) for number in range(10))
    plain = member(b"a.txt", b"1")
    for payload in (chain, falling, chain + END, END + chain, bytes(257) + b"ustar\x0000" + bytes(700)):
        for fields in ({}, {"size_field": base256(len(payload))}, {"lead": pax((b"size", b"%d" % len(payload)))}):
            size = 512 if "lead" in fields else len(payload)
            assert_all_ways_agree(archive(*[plain] * 20, member(b"in", payload, size=size, **fields), *[plain] * 3))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [*range(125, 132), *range(253, 260), 8192])
def test_an_archive_may_end_exactly_with_a_window(blocks):
    empty = member(b"a.txt")
    for end in (END, bytes(512), b""):
        count = blocks - len(end) // 512
        data = archive(*[empty] * count, end=end).data
        tables = [scan(data, mode) for mode in MODES]
        assert [len(table) for table in tables] == [count] * 3
        assert tables[0].faults == tables[1].faults == tables[2].faults


@pytest.mark.parametrize("size", [1, 511, 512, 513])
def test_the_last_payload_may_end_with_the_bytes(size):
    mix = [member(b"a.txt", b"1")] * 20
    data = archive(*mix, end=header(b"z.txt", size) + b"p" * size).data
    states = [state(scan(data, mode)) for mode in MODES]
    assert states[0] == states[1] == states[2]
    assert len(states[0][0]) == 21
    assert [fault.code for fault in states[0][1]] == ["short_padding"] * (size % 512 > 0) + ["no_end_marker"]


def test_lone_zero_blocks_between_members_are_passed_over_in_every_way():
    mix = [piece for number in range(3000) for piece in (member(b"%d.txt" % number, b"\xff"), bytes(512))]
    data = archive(*mix).data
    tables = [scan(data, mode, ignore_zeros=True) for mode in MODES]
    assert [len(table) for table in tables] == [3000] * 3
    assert state(tables[0]) == state(tables[1]) == state(tables[2])


@pytest.mark.slow
def test_members_that_grow_and_shrink_are_all_found():
    sizes = [100] * 3000 + [200_000] * 20 + [0] * 3000 + [30_000] * 100 + [5] * 100
    made = archive(*(member(b"%d.bin" % number, bytes(size)) for number, size in enumerate(sizes)))
    assert_all_ways_agree(made)


# What it costs


def count_reads(data):
    read = StrictRead(data)
    table = scan_tar(read, len(data))
    assert table.error() is None
    return read, len(table)


@pytest.mark.parametrize("lead", [b"", times(5)])
def test_of_large_members_less_than_three_percent_is_read(lead):
    read, count = count_reads(archive(*(member(b"%d.jpg" % n, bytes(100_000), lead=lead) for n in range(60))).data)
    assert count == 60
    assert read.bytes_read < 0.03 * len(read.data)


def test_of_large_images_with_small_sidecars_less_than_three_percent_is_read():
    mix = [
        one
        for number in range(60)
        for one in (
            member(b"%d.jpg" % number, bytes(100_000 + number)),
            member(b"%d.json" % number, b"{}" * 100),
            member(b"%d.txt" % number, b"caption"),
        )
    ]
    read, count = count_reads(archive(*mix).data)
    assert count == 180
    assert read.bytes_read < 0.03 * len(read.data)


@pytest.mark.parametrize("count", [20, 3000])
def test_of_large_members_behind_many_small_ones_little_is_read(count):
    small = [member(b"%d.txt" % number, b"x" * 600) for number in range(count)]
    large = [member(b"%d.bin" % number, bytes(300_000)) for number in range(200)]
    read, found = count_reads(archive(*small, *large).data)
    assert found == count + 200
    assert read.bytes_read < 1200 * count + (10 << 20) + 200 * BLOCK
    assert read.calls < 400


def test_small_members_behind_many_large_ones_are_soon_read_in_windows():
    large = [member(b"%d.bin" % number, bytes(300_000)) for number in range(200)]
    small = [member(b"%d.txt" % number, b"x" * 600) for number in range(5000)]
    read, found = count_reads(archive(*large, *small).data)
    assert found == 5200
    assert read.calls < 1000


@pytest.mark.parametrize("kind", ["file", "times", "path", "long name", "v7", "prefix", "dir", "size", "base-256"])
def test_small_members_are_read_in_windows_and_each_window_once(kind):
    made = archive(*(make(kind, number, 900, "text") for number in range(3000)))
    read, count = count_reads(made.data)
    assert count == 3000
    assert read.calls < 3000 / 20
    assert read.bytes_read < 1.1 * len(made.data)


def test_zero_blocks_between_members_do_not_cost_a_window_each():
    data = archive(*[member(b"a.txt", b"1").raw + bytes(512)] * 3000).data
    read = StrictRead(data)
    assert len(scan_tar(read, len(data), ignore_zeros=True)) == 3000
    assert read.calls < 3000 / 20
    assert read.bytes_read < 1.5 * len(data)


@pytest.mark.parametrize("mode", ["mapped", "windows"])
@pytest.mark.parametrize(
    "odd",
    [
        member(b"d", typeflag=b"5", kind="dir", size=4096),  # each of these breaks the chain of sizes
        member(b"b", b"x" * 600, lead=pax((b"size", b"600")), size=0),
        member(b"b", b"x" * 600, size_field=base256(600)),
        member(b"v", b"x" * 600, magic=V7),
        bytes(512),
    ],
)
def test_headers_that_break_the_chain_do_not_make_the_scanner_parse_others_again_and_again(odd, mode, monkeypatch):
    parsed = []
    parse = HeaderScanner._parse

    def counting(self, rows, *arguments):
        parsed.append(len(rows))
        return parse(self, rows, *arguments)

    monkeypatch.setattr(HeaderScanner, "_parse", counting)
    plain = member(b"a.txt", b"1")
    made = archive(*[plain, odd, plain] * 2000)
    assert len(scan(made.data, mode, ignore_zeros=True)) == len(made.rows)
    assert sum(parsed) < 2 * len(made.rows)
    assert len(parsed) < len(made.rows) / 50


def test_an_archive_of_ordinary_headers_is_never_given_to_the_walker_when_mapped(monkeypatch):
    steps = []
    monkeypatch.setattr(HeaderScanner, "note_step", lambda _, position: steps.append(position))
    made = archive(*(member(b"%d.txt" % number, b"1", lead=times(number)) for number in range(5000)))
    table = scan_tar(StrictRead(made.data, is_mapped=True), len(made.data), is_mapped=True)
    assert rows_of(table) == made.rows
    assert len(steps) <= 10  # a PAX header may be the last of a chunk, and the end is the walker's
