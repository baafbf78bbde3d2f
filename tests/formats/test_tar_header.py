from __future__ import annotations

import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.tar_builder import BLOCK, GNU, POSIX, V7, base256, header, octal, record
from shardset.formats.tar_header import (
    MAX_SIZE,
    MAX_SPARSE_ROWS,
    SparseRow,
    checksums,
    gnu_sparse_map,
    has_valid_checksum,
    iter_pax_records,
    name_oddities,
    padded,
    parse_header,
    parse_number,
    parse_pax_number,
    pax_sparse_1_0,
    pax_sparse_pairs,
    place_rows,
    stored_checksum,
)

KEYS = st.binary(max_size=20).filter(lambda key: b"=" not in key)


def reading(data):
    return lambda offset, length: data[offset : offset + length]


@given(
    st.integers(0, 8**11 - 1),
    st.sampled_from([b"%011o\0", b"%011o ", b"%11o\0", b"%o\0", b"%o ", b" %o", b"%012o", b"%o\0 9"]),
)
def test_octal_numbers_are_read_back_in_every_form(value, form):
    assert parse_number((form % value)[:12].ljust(12, b"\0")) == value


@given(st.integers(0, MAX_SIZE))
def test_base_256_numbers_are_read_back(value):
    assert parse_number(base256(value)) == value


@given(st.integers(-(2**94), -1))
def test_negative_base_256_numbers_are_refused_by_their_value(value):
    with pytest.raises(ValueError, match="negative") as caught:
        parse_number(base256(value))
    assert f"({value})" in str(caught.value)


@given(st.integers(MAX_SIZE + 1, 2**94 - 1))
def test_base_256_numbers_beyond_63_bits_are_refused(value):
    with pytest.raises(ValueError, match="63 bits"):
        parse_number(base256(value))


@given(st.binary(min_size=12, max_size=12))
def test_any_field_is_a_size_that_fits_or_a_value_error(field):
    try:
        value = parse_number(field)
    except ValueError:
        return
    assert 0 <= value <= MAX_SIZE


def test_a_number_that_fills_12_bytes_with_octal_digits_is_read():
    assert parse_number(b"7" * 12) == 8**12 - 1


@given(st.binary(min_size=BLOCK, max_size=BLOCK))
def test_checksums_are_the_two_sums_that_python_tarfile_takes_for_valid(block):
    assert checksums(block) == tarfile.calc_chksums(block)


@given(st.binary(min_size=1, max_size=100), st.integers(0, 8**11 - 1), st.booleans())
def test_a_header_with_its_own_checksum_is_valid_and_with_another_byte_is_not(name, size, is_signed):
    block = header(name, size, is_signed=is_signed)
    assert has_valid_checksum(block)
    changed = bytearray(block)
    changed[50] ^= 1
    assert not has_valid_checksum(bytes(changed))


def test_a_checksum_field_without_a_number_states_none():
    assert stored_checksum(header(b"a", checksum=b"zzzzzz\0 ")) is None
    assert not has_valid_checksum(header(b"a", checksum=b"zzzzzz\0 "))


def test_zero_blocks_have_no_valid_checksum():
    assert not has_valid_checksum(bytes(BLOCK))


@pytest.mark.parametrize(
    ("magic", "name", "is_gnu"), [(POSIX, b"p/a.txt", False), (GNU, b"a.txt", True), (V7, b"a.txt", False)]
)
def test_the_fields_of_a_header_are_taken_by_its_magic(magic, name, is_gnu):
    found = parse_header(header(b"a.txt", 77, b"7", magic=magic, prefix=b"p"))
    assert found == (name, b"7", 77, is_gnu)


@given(st.lists(st.tuples(KEYS, st.binary(max_size=1200)), max_size=8), st.integers(0, 600))
def test_pax_records_are_read_back_in_order(records, nuls):
    body = b"".join(record(key, value) for key, value in records)
    assert list(iter_pax_records(body + bytes(nuls))) == records


@given(st.lists(st.tuples(KEYS, st.binary(max_size=30)), min_size=1, max_size=4), st.data())
def test_a_changed_pax_body_gives_records_of_its_own_bytes_or_a_value_error(records, data):
    body = bytearray(b"".join(record(key, value) for key, value in records))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = list(iter_pax_records(bytes(body)))
    except ValueError:
        return
    assert sum(len(key) + len(value) for key, value in found) < len(body)


def test_the_records_before_a_broken_one_are_given_before_it_is_met():
    records = iter_pax_records(record(b"a", b"1") + b"oops")
    assert next(records) == (b"a", b"1")
    with pytest.raises(ValueError, match="record at 6 has no length"):
        next(records)


@pytest.mark.parametrize("value", [b"0", b"7", b"007", b"9223372036854775807", b"0" * 20 + b"5"])
def test_a_decimal_pax_number_is_read(value):
    assert parse_pax_number(value) == int(value)


@pytest.mark.parametrize(
    "value", [b"", b"-1", b"+1", b" 1", b"1\n", b"1_0", b"9223372036854775808", b"1" * 31, "٣".encode()]
)
def test_what_is_no_decimal_number_is_refused_in_pax(value):
    with pytest.raises(ValueError, match="not a size"):
        parse_pax_number(value)


@given(st.integers(0, 2**63 - 513))
def test_padding_leads_to_the_next_whole_block(size):
    assert padded(size) % BLOCK == 0
    assert 0 <= padded(size) - size < BLOCK


def test_rows_are_placed_one_behind_the_other_without_the_empty_ones():
    assert place_rows([(0, 3), (3, 0), (10, 5)], 512, 20) == [SparseRow(0, 512, 3), SparseRow(10, 515, 5)]


def test_a_file_that_is_one_hole_has_a_place_all_the_same():
    assert place_rows([], 512, 20) == place_rows([(20, 0)], 512, 20) == [SparseRow(20, 512, 0)]


@pytest.mark.parametrize("pairs", [[(0, 21)], [(21, 0)], [(5, 5), (9, 1)], [(5, 5), (0, 5)], [(2**62, 2**62)]])
def test_rows_that_overlap_descend_or_pass_the_end_are_refused(pairs):
    with pytest.raises(ValueError, match="overlaps or passes"):
        place_rows(pairs, 512, 20)


def test_the_order_of_pax_records_is_the_sparse_map():
    keys = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
    records = [(keys[place % 2], b"%d" % number) for place, number in enumerate([0, 5, 10, 6, 20, 7])]
    assert pax_sparse_pairs([(b"size", b"5"), *records]) == [(0, 5), (10, 6), (20, 7)]
    assert pax_sparse_pairs([(b"GNU.sparse.map", b"0,5,10,6")]) == [(0, 5), (10, 6)]
    assert pax_sparse_pairs([(b"GNU.sparse.map", b"")]) == []
    assert pax_sparse_pairs([(b"size", b"5")]) is None


@pytest.mark.parametrize("rows", [MAX_SPARSE_ROWS + 1, 8_000_000])
def test_a_pax_sparse_map_of_too_many_rows_is_refused_before_it_is_split(rows):
    with pytest.raises(OverflowError, match="rows"):
        pax_sparse_pairs([(b"GNU.sparse.map", b",".join([b"0"] * 2 * rows) if rows < 2_000_000 else b"," * 2 * rows)])


def test_a_sparse_map_in_the_payload_of_too_many_rows_is_refused_after_one_block():
    blocks = []

    def read(offset, length):
        blocks.append(offset)
        return (b"%d\n" % (MAX_SPARSE_ROWS + 1) + b"0\n" * 300)[:length]

    with pytest.raises(OverflowError, match=str(MAX_SPARSE_ROWS + 1)):
        pax_sparse_1_0(512, 1 << 40, 1 << 40, read)
    assert blocks == [512]


def test_a_sparse_map_in_the_payload_may_fill_its_block_or_begin_another():
    for rows in (1, 62, 63, 64, 65, 127, 128, 200):
        lines = b"%07d" % rows
        lines += b"".join(b"\n%03d\n001" % (2 * row) for row in range(rows)) + b"\n"
        body = lines + bytes(-len(lines) % BLOCK)
        found, data = pax_sparse_1_0(0, len(body) + rows, 1000, reading(body + b"x" * rows))
        assert data == len(body)
        assert found == [SparseRow(2 * row, len(body) + row, 1) for row in range(rows)]
    assert len(b"%07d\n" % 63) + 63 * len(b"000\n001\n") == BLOCK  # so 63 rows fill a block to its last byte


def test_the_blocks_behind_a_gnu_header_belong_to_the_map_until_one_says_no():
    pairs = [octal(1000 * row) + octal(10) for row in range(4 + 21 + 3)]
    block = header(b"s", 280, b"S", magic=GNU, patches=((386, b"".join(pairs[:4])), (482, b"\1"), (483, octal(30000))))
    more = [b"".join(pairs[4:25]) + b"\1" + bytes(7), b"".join(pairs[25:]).ljust(504, b"\0") + bytes(8)]
    rows, size, data = gnu_sparse_map(block, 512, reading(block + b"".join(more)))
    assert (len(rows), size, data) == (28, 30000, 512 + 1024)
    assert rows[0] == (0, 1536, 10)
    assert rows[27] == (27000, 1536 + 270, 10)
    with pytest.raises(EOFError):
        gnu_sparse_map(block, 512, reading(block + more[0] + b"cut"))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        (b"a.txt", []),
        (b"", ["empty_name"]),
        (b"\xff", ["name_not_utf8"]),
        (b"\xed\xa0\x80", ["name_not_utf8"]),  # a surrogate
        (b"/\xff", ["name_not_utf8", "unsafe_name"]),
        ("é".encode(), []),
        (b"..\n", []),
        (b"a\n/..", ["unsafe_name"]),
        (b"a\n/../b", ["unsafe_name"]),
        (b"C:", []),
        (b"C:/", ["unsafe_name"]),
        (b"1:/", []),
    ],
)
def test_what_is_odd_about_a_name_is_told(name, codes):
    assert name_oddities(name) == codes


@given(st.lists(st.sampled_from([b"..", b".", b"a", b"/", b"\\", b"C:", b"\n"]), max_size=6).map(b"".join))
def test_a_name_is_unsafe_if_it_is_rooted_or_steps_up(name):
    parts = name.replace(b"\\", b"/").split(b"/")
    is_rooted = name[:1] in (b"/", b"\\") or (name[:2] == b"C:" and name[2:3] in (b"/", b"\\"))
    expected = bool(name) and (is_rooted or b".." in parts)
    assert ("unsafe_name" in name_oddities(name)) == expected


def test_a_pax_record_must_end_at_a_newline():
    with pytest.raises(ValueError, match="not of the form"):
        list(iter_pax_records(b"12 path=abcd"))


def test_an_offset_without_a_length_in_a_sparse_map_is_named_as_that():
    with pytest.raises(ValueError, match="an offset without a length"):
        pax_sparse_pairs([(b"GNU.sparse.map", b"0,5,10")])
