from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.tar_builder import Segments, archive, header, member, pax, sparse_old, sparse_pax_10
from formats.tar_mix import mixed
from formats.tar_modes import rows_of, scan
from shardset.errors import DuplicateFieldError
from shardset.formats.faults import Fault
from shardset.formats.naming import Names
from shardset.formats.tar_header import SparseRow
from shardset.index.table import RESERVED_SUFFIXES, ShardIndex, index_from_files, index_from_table

NAMES = st.lists(
    st.builds(
        b"%b%b%b".__mod__,
        st.tuples(
            st.sampled_from([b"", b"", b"", b"d/", b"a.b/", b"__meta__/", b"./"]),
            st.sampled_from([b"a", b"a", b"b", b"\xc3\xa9", b"", b"__x__"]),
            st.sampled_from([b".jpg", b".JPG", b".json", b".seg.png", b".", b"", b".__key__", b".\xff"]),
        ),
    ),
    max_size=30,
)


def index_of(*names, sparse=None, faults=(), size=10**6):
    """Index files of these names, of which number `n` has `n` bytes at 1024 n + 512."""
    count = len(names)
    offset = np.arange(count, dtype=np.int64) * 1024 + 512
    offset[list(sparse or {})] = -1
    return index_from_files(
        Names.of(names), offset, np.arange(count, dtype=np.int64), size, sparse=sparse, faults=tuple(faults)
    )


def split(name):
    """Return (key, suffix) as the WebDataset convention has it, or None for what is part of no sample."""
    *folders, last = name.split(b"/")
    stem, dot, suffix = last.partition(b".")
    first = name.split(b"/")[0]
    is_structural = len(first) > 3 and first.startswith(b"__") and first.endswith(b"__")
    if not dot or is_structural or not (stem or (folders and b"." not in folders[-1])):
        return None
    return b"/".join([*folders, stem]), suffix.decode("utf-8", "surrogateescape").lower()


def group(names):
    """Group names slowly: return samples as (key, [(suffix, number)]), and the numbers that belong to none."""
    samples, rest = [], []
    for number, name in enumerate(names):
        parts = split(name)
        if parts is None:
            rest.append(number)
        elif samples and samples[-1][0] == parts[0]:
            samples[-1][1].append((parts[1], number))
        else:
            samples.append((parts[0], [(parts[1], number)]))
    return samples, rest


def samples_of(index):
    """Return the samples of an index as `group` does, and the numbers of the files of no sample."""
    numbers = index.length.tolist()  # `index_of` gives each file its number as length
    rows = index.sample_rows.tolist()
    suffixes = [index.suffixes[one] if one >= 0 else None for one in index.suffix_ids.tolist()]
    samples = [
        (key, list(zip(suffixes[first:last], numbers[first:last], strict=True)))
        for key, first, last in zip(index.keys().to_list(), rows, rows[1:], strict=False)
    ]
    return samples, numbers[rows[-1] :]


# Samples


@given(NAMES)
def test_files_are_grouped_as_a_slow_reading_of_the_convention_groups_them(names):
    index = index_of(*names)
    samples, rest = group(names)
    assert samples_of(index) == (samples, rest)
    assert index.num_samples == len(samples)
    assert index.num_files == len(names)
    assert index.names.to_list() == [names[number] for number in index.length.tolist()]
    assert index.offset.tolist() == [1024 * number + 512 for number in index.length.tolist()]
    repeated = {key for at, (key, _) in enumerate(samples) if key in [one for one, _ in samples[:at]]}
    assert {fault.code for fault in index.faults} >= ({"repeated_key"} if repeated else set())
    for sample, (_, parts) in enumerate(samples):
        suffixes = [suffix for suffix, _ in parts]
        is_wrong = len(set(suffixes)) < len(suffixes) or not RESERVED_SUFFIXES.isdisjoint(suffixes)
        assert (index.duplicate(sample) is not None) == is_wrong


def test_what_belongs_to_no_sample_does_not_end_one():
    index = index_of(b"a.jpg", b"README", b"__meta__/i.json", b".hidden", b"a.txt", b"b.jpg", b"x/y")
    assert samples_of(index) == ([(b"a", [("jpg", 0), ("txt", 4)]), (b"b", [("jpg", 5)])], [1, 2, 3, 6])
    assert not index.faults


def test_links_and_folders_between_members_do_not_end_a_sample_and_have_no_row():
    made = archive(
        member(b"a.jpg", b"1"),
        member(b"d/", typeflag=b"5", kind="dir"),
        member(b"a.cls", typeflag=b"2", kind="symlink", link=b"x"),
        member(b"a.png", typeflag=b"1", kind="hardlink", link=b"a.jpg"),
        member(b"a.weird", b"1", b"Z", kind="other", warnings=("unknown_type",)),
        member(b"a.txt", b"12"),
    )
    index = index_from_table(scan(made.data, "mapped"), len(made.data))
    assert index.names.to_list() == [b"a.jpg", b"a.txt"]
    assert index.sample_rows.tolist() == [0, 2]
    assert index.length.tolist() == [1, 2]
    assert index.size == len(made.data)


def test_keys_of_one_length_that_differ_anywhere_begin_new_samples():
    keys = [b"abcdef", b"abcdeg", b"Abcdeg", b"abcdeg", b"abc/eg"]
    index = index_of(*(key + b".jpg" for key in keys), b"abc/eg.txt", b"abc/eg1.txt")
    assert index.keys().to_list() == [*keys, b"abc/eg1"]


def test_a_key_that_comes_back_is_a_second_sample_and_reported_with_both_places():
    index = index_of(b"a.jpg", b"b.jpg", b"a.txt", b"c.jpg", b"a.cls")
    assert index.keys().to_list() == [b"a", b"b", b"a", b"c", b"a"]
    faults = [fault for fault in index.faults if fault.code == "repeated_key"]
    assert [(fault.offset, fault.member) for fault in faults] == [(2 * 1024 + 512, "a.txt"), (4 * 1024 + 512, "a.cls")]
    assert all("at byte 512" in fault.message for fault in faults)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("count", [2, 3, 1000])
def test_a_repeated_key_is_found_among_numbered_keys(width, count):
    if count > 10**width:
        return
    names = [b"%0*d.jpg" % (width, number) for number in range(count)]
    assert not index_of(*names).faults
    for again in (names[0], names[count // 2]):
        if again != names[-1]:
            assert [fault.code for fault in index_of(*names, again).faults] == ["repeated_key"]
    swapped = [names[1], names[0], *names[2:]]
    assert not index_of(*swapped).faults


def test_a_repeated_key_is_found_though_its_last_letters_ascend():
    first, second = b"bbbbbbbb1", b"aaaaaaaa2"  # compared in words of eight bytes
    index = index_of(first + b".jpg", second + b".jpg", first + b".txt")
    assert [fault.code for fault in index.faults] == ["repeated_key"]


def test_keys_that_begin_alike_are_not_the_same():
    assert not index_of(b"a.jpg", b"aa.jpg", b"aaa.jpg", b"b.jpg", b"bb.jpg").faults
    assert not index_of(b"a\0.jpg", b"a.jpg").faults


# Duplicates


@pytest.mark.parametrize(
    ("first", "second"), [(b"a.jpg", b"a.jpg"), (b"a.jpg", b"a.JPG"), (b"a.", b"a."), (b"a.\xff", b"a.\xff")]
)
def test_a_suffix_that_occurs_twice_is_a_fault_and_an_error_with_both_offsets(first, second):
    index = index_of(b"0.jpg", first, b"a.txt", second, b"b.jpg")
    (fault,) = index.faults
    assert (fault.code, fault.offset, fault.member) == (
        "duplicate_suffix",
        3 * 1024 + 512,
        second.decode("utf-8", "surrogateescape"),
    )
    assert "1536" in fault.message
    assert "3584" in fault.message
    assert not fault.is_error
    assert [index.duplicate(sample) is None for sample in range(3)] == [True, False, True]
    error = index.duplicate(1)
    assert isinstance(error, DuplicateFieldError)
    assert (error.key, error.offsets) == ("a", (1536, 3584))
    assert error.field == first.decode("utf-8", "surrogateescape").partition(".")[2].lower()
    assert "1536" in str(error)
    assert "3584" in str(error)


def test_the_key_of_a_duplicate_is_whole_beyond_ascii():
    index = index_of("déjà/vu-名.jpg".encode(), "déjà/vu-名.jpg".encode())
    assert index.duplicate(0).key == "déjà/vu-名"


@pytest.mark.parametrize("width", range(2, 14))
def test_duplicates_are_found_at_any_distance(width):
    for first in range(width):
        for second in range(first + 1, width):
            suffixes = [b"s%d" % number for number in range(width)]
            suffixes[second] = suffixes[first]
            index = index_of(b"0.s0", *(b"a." + suffix for suffix in suffixes), b"b.s0")
            assert [(fault.code, fault.offset) for fault in index.faults] == [
                ("duplicate_suffix", (second + 1) * 1024 + 512)
            ]
            assert index.duplicate(1).offsets == ((first + 1) * 1024 + 512, (second + 1) * 1024 + 512)


def test_every_further_duplicate_is_reported_beside_the_first():
    index = index_of(b"a.jpg", b"a.txt", b"a.jpg", b"a.jpg", b"a.txt")
    assert [fault.offset for fault in index.faults] == [2560, 3584, 4608]
    assert ["512 and" in fault.message for fault in index.faults] == [True, True, False]


@pytest.mark.parametrize("suffix", [b"__key__", b"__URL__"])
def test_a_suffix_that_every_sample_has_of_its_own_is_refused(suffix):
    index = index_of(b"a.jpg", b"b.jpg", b"b." + suffix, b"c.__x__")
    name = suffix.decode().lower()
    (fault,) = index.faults
    assert (fault.code, fault.offset, fault.member) == ("duplicate_suffix", 2560, f"b.{suffix.decode()}")
    assert name in fault.message
    error = index.duplicate(1)
    assert (error.key, error.field, error.offsets) == ("b", name, (2560,))
    assert "2560" in str(error)
    assert index.duplicate(0) is index.duplicate(2) is None


def test_faults_stand_in_order_with_the_error_that_ended_the_reading_last():
    made = archive(
        member(b"a.jpg", b"1"),
        member(b"a.jpg", b"1"),
        member(b"../b.jpg", b"1"),
        member(b"a.txt", b"1"),
        header(b"c.jpg", 10**6),
    )
    index = index_from_table(scan(made.data, "mapped"), len(made.data))
    assert [fault.code for fault in index.faults] == [
        "duplicate_suffix",
        "unsafe_name",
        "repeated_key",
        "truncated_payload",
    ]
    assert index.faults[-1].is_error
    later = index_of(b"a.jpg", b"a.jpg", faults=[Fault("bad_checksum", 100)])
    assert [fault.code for fault in later.faults] == ["duplicate_suffix", "bad_checksum"]


# Order


def test_rows_of_samples_come_first_and_archive_order_is_kept_beside():
    index = index_of(b"README", b"a.jpg", b"x/y", b"a.txt", b"b.jpg")
    assert index.length.tolist() == [1, 3, 4, 0, 2]
    assert index.sample_rows.tolist() == [0, 2, 3]
    assert index.length[index.archive_order()].tolist() == [0, 1, 2, 3, 4]
    assert index_of(b"a.jpg", b"b.jpg").archive_order().tolist() == [0, 1]
    assert index_of().archive_order().tolist() == []


@pytest.mark.parametrize("seed", range(4))
def test_archive_order_is_that_of_the_headers_for_sparse_files_too(seed):
    made = mixed(seed, 200, odd=1)
    table = scan(made.data, "careful")
    index = index_from_table(table, len(made.data))
    files = [row for row in made.rows if row.kind == "file"]
    order = index.archive_order()
    assert index.names.take(order).to_list() == [row.name for row in files]
    assert index.offset[order].tolist() == [-1 if row.offset is None else row.offset for row in files]
    assert index.length[order].tolist() == [row.size for row in files]
    pieces = {int(np.flatnonzero(order == row)[0]): rows for row, rows in index.sparse.items()}
    assert pieces == {at: row.pieces for at, row in enumerate(files) if row.pieces is not None}
    assert len(pieces) > 5


def test_a_sparse_file_that_is_one_hole_keeps_its_place():
    hole = Segments((), 5000)
    made = archive(
        sparse_old(b"README", hole),
        member(b"a.jpg", b"1"),
        member(b"LICENCE", b"1"),
        sparse_pax_10(b"a.bin", hole),
        sparse_old(b"NOTES", hole),
        member(b"b.jpg", b"1"),
    )
    index = index_from_table(scan(made.data, "mapped"), len(made.data))
    names = [b"README", b"a.jpg", b"LICENCE", b"a.bin", b"NOTES", b"b.jpg"]
    assert index.names.take(index.archive_order()).to_list() == names
    assert index.keys().to_list() == [b"a", b"b"]


# The digest


def digest(index, **changes):
    fields = {name: getattr(index, name) for name in ShardIndex.__dataclass_fields__} | changes
    return ShardIndex(**fields).digest()


def test_the_digest_changes_with_each_thing_that_it_covers():
    index = index_of(b"README", b"a.jpg", b"a.txt", b"b.jpg")
    found = {index.digest(), digest(index, size=index.size + 1)}
    for row in range(4):
        for column in ("offset", "length"):
            changed = getattr(index, column).copy()
            changed[row] += 1
            found.add(digest(index, **{column: changed}))
        names = index.names.to_list()
        names[row] += b"x"
        found.add(digest(index, names=Names.of(names)))
    assert len(found) == 2 + 3 * 4


def test_the_digest_tells_where_one_name_ends_and_the_next_begins():
    one, two = index_of(b"ab", b"c"), index_of(b"a", b"bc")
    assert one.digest() != two.digest()


def test_the_digest_does_not_change_with_what_it_does_not_cover():
    index = index_of(b"README", b"a.jpg", b"a.txt", b"b.jpg")
    assert digest(index, faults=(Fault("no_end_marker", 5),), is_verified=False, captions={1: "c"}) == index.digest()
    assert index.digest().startswith("sha256:")
    assert len(index.digest()) == 7 + 64


@given(NAMES, st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order_of_the_rows(names, rng):
    index = index_of(*names)
    order = list(range(len(names)))
    rng.shuffle(order)
    rows = np.array(order, np.int64)
    shuffled = {
        "names": index.names.take(rows),
        "offset": index.offset[rows],
        "length": index.length[rows],
    }
    assert digest(index, **shuffled) == index.digest()


def test_the_digest_is_that_of_the_bytes_that_the_format_describes():
    index = index_of(b"README", b"a.jpg", size=4096)
    columns = b"".join(number.to_bytes(8, "little") for number in (512, 1536, 0, 1, 6, 5))
    counts = (4096).to_bytes(8, "little") + (2).to_bytes(8, "little")
    expected = hashlib.sha256(b"shardset tar index 1\n" + counts + columns + b"READMEa.jpg").hexdigest()
    assert index.digest() == f"sha256:{expected}"


def test_the_digest_is_the_same_for_each_way_of_scanning():
    made = mixed(3, 300, odd=0.3)
    digests = {
        index_from_table(scan(made.data, mode), len(made.data)).digest() for mode in ("careful", "mapped", "windows")
    }
    assert len(digests) == 1


# Columns


def test_sparse_files_are_found_again_by_their_row():
    rows = {1: (SparseRow(0, 1536, 5),), 2: (SparseRow(7, 2560, 5),)}
    index = index_of(b"a.jpg", b"README", b"a.bin", b"b.jpg", sparse=rows)
    assert index.names.to_list() == [b"a.jpg", b"a.bin", b"b.jpg", b"README"]
    assert index.sparse == {1: rows[2], 3: rows[1]}
    assert index.offset.tolist() == [512, -1, 3584, -1]


def test_the_columns_have_the_types_that_are_stored():
    for index in (index_of(), index_of(b"a.jpg", b"README"), index_of(b"README")):
        types = {
            "offset": index.offset,
            "length": index.length,
            "key_lengths": index.key_lengths,
            "sample_rows": index.sample_rows,
            "names": index.names.offsets,
        }
        assert {column.dtype.str for column in types.values()} == {"<i8"}
        assert index.suffix_ids.dtype == np.int32
        assert index.sample_rows[0] == 0


def test_an_index_of_a_whole_shard_equals_one_of_its_files():
    rng = random.Random(5)
    made = archive(
        *(
            member(b"%05d.%b" % (number // 3, (b"jpg", b"json", b"cls")[number % 3]), bytes(rng.randrange(2000)))
            for number in range(3000)
        )
    )
    table = scan(made.data, "mapped")
    index = index_from_table(table, len(made.data))
    assert index.num_samples == 1000
    assert index.suffixes == ("jpg", "json", "cls")
    assert index.sample_rows.tolist() == list(range(0, 3001, 3))
    assert index.keys().to_text_list() == [f"{number:05}" for number in range(1000)]
    assert [row.name for row in rows_of(table)] == index.names.to_list()
    assert not index.faults


def test_pax_headers_do_not_change_an_index():
    lead = pax((b"mtime", b"1700000000.5"))
    plain = archive(*(member(b"%d.jpg" % number, b"1") for number in range(50)))
    timed = archive(*(member(b"%d.jpg" % number, b"1", lead=lead) for number in range(50)))
    one, two = (index_from_table(scan(made.data, "mapped"), len(made.data)) for made in (plain, timed))
    assert one.names.to_list() == two.names.to_list()
    assert one.sample_rows.tolist() == two.sample_rows.tolist()
    assert (two.offset - one.offset).tolist() == [1024 * (number + 1) for number in range(50)]
