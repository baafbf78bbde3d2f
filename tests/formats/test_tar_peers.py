"""Other readers and writers of tar as second opinions: Python's tarfile, GNU tar and bsdtar."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from formats.tar_builder import (
    GNU,
    V7,
    Segments,
    archive,
    base256,
    gnu_long,
    member,
    pax,
    sparse_old,
    sparse_pax_00,
    sparse_pax_01,
    sparse_pax_10,
)
from formats.tar_modes import MODES, payload_of, rows_of, scan

PACKAGES = {"tar": "tar", "bsdtar": "libarchive-tools"}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
TYPES = {
    tarfile.REGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.DIRTYPE: "dir",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hardlink",
    tarfile.CHRTYPE: "char",
    tarfile.BLKTYPE: "block",
    tarfile.FIFOTYPE: "fifo",
}
# As GNU tar writes them: whole blocks but for the last piece, and an empty piece where a file ends in a hole.
SEGMENTS = Segments(((1024, b"x" * 512), (9000, b"y" * 1024), (10240, b"z" * 300), (11000, b"")), 11000)


def run(program, *arguments, cwd=None):
    """Run a program that `make test` installs, and return its output."""
    if shutil.which(program) is None:
        pytest.fail(f"{program} is missing: install the package {PACKAGES[program]} (make test does so as root)")
    done = subprocess.run(
        [program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C.UTF-8", "COPYFILE_DISABLE": "1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def listed(program, path):
    """Return (type letter, size, name) of each member as the program lists them."""
    columns = {"tar": 5, "bsdtar": 8}[program]
    options = ("--quoting-style=literal", "--numeric-owner") if program == "tar" else ("--numeric-owner",)
    members = []
    for line in run(program, *options, "-tvf", path).splitlines():
        fields = line.split(None, columns)
        size = fields[{"tar": 2, "bsdtar": 4}[program]]
        name = fields[columns].split(b" -> ")[0].split(b" link to ")[0]
        members.append((fields[0][:1].decode(), None if b"," in size else int(size), name))
    return members


LETTERS = {"file": "-", "dir": "d", "symlink": "l", "hardlink": "h", "fifo": "p", "char": "c", "block": "b"}


def ours(data):
    """Return what `listed` does, and check on the way that all ways of scanning agree."""
    tables = [scan(data, mode) for mode in MODES]
    assert not tables[0].faults
    rows = [rows_of(table) for table in tables]
    assert rows[0] == rows[1] == rows[2]
    return [(LETTERS[row.kind], row.size, row.name) for row in rows[0]]


# Python's tarfile

NAMES = st.one_of(
    st.text(st.sampled_from("ab./_-é名 "), min_size=1, max_size=30),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40),
    st.builds("{}/{}.{}".format, st.text("d", min_size=1, max_size=160), st.text("né", max_size=120), st.text("x")),
).filter(lambda name: name.strip("/") and not name.endswith("/"))
SPECS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(sorted(TYPES)),
        st.integers(0, 3000),
        st.one_of(st.integers(0, 2**33), st.floats(0, 2**32)),
    ),
    max_size=12,
)


def _without_slash(row):
    return row.name.rstrip(b"/") if row.kind == "dir" else row.name


@given(st.sampled_from(sorted(FORMATS)), SPECS)
def test_what_tarfile_writes_and_reads_is_read_alike(form, specs):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[form], encoding="utf-8") as tar:
        for name, typeflag, size, mtime in specs:
            info = tarfile.TarInfo(name)
            info.type, info.mtime, info.linkname = typeflag, mtime, "target"
            info.size = size if TYPES[typeflag] == "file" else 0
            try:
                tar.addfile(info, io.BytesIO(b"p" * info.size))
            except ValueError:
                assume(form != "ustar")  # a name or time that ustar cannot hold
                raise
    data = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8") as tar:
        expected = [
            (one.name, TYPES[one.type], one.offset, one.offset_data, one.size)
            for one in tar.getmembers()
        ]  # fmt: skip
    for mode in MODES:
        table = scan(data, mode)
        assert table.error() is None
        found = [
            (_without_slash(row).decode(), row.kind, row.first_offset, row.offset, row.size) for row in rows_of(table)
        ]
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_shard_that_tarfile_writes_is_read_alike_across_chunks(form):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[form]) as tar:
        for number in range(2500):
            info = tarfile.TarInfo(f"shard/{number:06d}.{'é' * (number % 97 == 0)}jpg")
            info.size, info.mtime = number % 1300, 1.5e9 + number / 8 if form == "pax" else number
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    data = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        expected = [(one.name.encode(), one.offset, one.offset_data, one.size) for one in tar.getmembers()]
    for mode in MODES:
        rows = rows_of(scan(data, mode))
        assert [(row.name, row.first_offset, row.offset, row.size) for row in rows] == expected


# What GNU tar and bsdtar write


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with all that both programs pack without being root: returns it and the contents of its files."""
    folder = tmp_path_factory.mktemp("tree")
    files = {
        "a.jpg": b"j" * 10_000,
        "a.txt": b"a caption",
        "empty.cls": b"",
        "block.bin": b"b" * 512,
        "d/e/deep.tar.gz": b"g" * 1025,
        "d/é名.txt": b"unicode",
        "l" * 90 + "/" + "m" * 60 + ".txt": b"fits into a prefix",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(1_700_000_000_123_456_789,) * 2)
    (folder / "sym").symlink_to("a.txt")
    (folder / "hard.txt").hardlink_to(folder / "a.txt")
    os.mkfifo(folder / "fifo")
    return folder, files


def check(path, folder, files, readers=("tar", "bsdtar")):
    """Compare an archive with what both programs list of it, and its payloads with the files."""
    data = path.read_bytes()
    found = ours(data)
    for program in readers:
        others = listed(program, path)
        # Each program shows the hard link in its own way: with another letter, or with the size of its target.
        assert [(size, name) for letter, size, name in others if letter != "h" and name != b"hard.txt"] == [
            (size, name) for letter, size, name in found if letter != "h" and name != b"hard.txt"
        ], program
        assert [name for _, _, name in others] == [name for _, _, name in found]
    table = scan(data, "mapped")
    payloads = {row.name.decode(): payload_of(data, row) for row in rows_of(table) if row.kind == "file"}
    for name, payload in payloads.items():
        assert payload == (folder / name).read_bytes(), name
    assert len(payloads) + sum(row.kind == "hardlink" for row in rows_of(table)) == len(files) + 1
    return found


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_gnu_tar_writes_is_read_as_it_and_bsdtar_read_it(tree, tmp_path, form):
    folder, files = tree
    files = dict(files)
    path = tmp_path / "x.tar"
    names = sorted(path.name for path in folder.iterdir())
    if form == "v7":  # it has no fifos, and its names end at 99 bytes
        names = [name for name in names if name not in ("l" * 90, "fifo")]
        files = {name: content for name, content in files.items() if len(name) < 100}
    run("tar", f"--format={form}", "-cf", path, *names, cwd=folder)
    found = check(path, folder, files)
    assert {letter for letter, _, _ in found} >= {"-", "d", "l"}


@pytest.mark.parametrize("form", ["pax", "gnutar", "ustar"])
def test_what_bsdtar_writes_is_read_as_it_and_gnu_tar_read_it(tree, tmp_path, form):
    folder, files = tree
    path = tmp_path / "x.tar"
    names = sorted(path.name for path in folder.iterdir())
    run("bsdtar", f"--format={form}", "-cf", path, *names, cwd=folder)
    check(path, folder, files)


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "posix"])
def test_long_names_that_gnu_tar_writes_are_read(tmp_path, form):
    folder = tmp_path / "long"
    names = ["n" * length for length in (99, 100, 101, 255)]
    names += ["/".join(["d" * 60] * 8) + "/" + "x" * length for length in (10, 20, 24, 25, 100)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    run("tar", f"--format={form}", "-cf", tmp_path / "x.tar", *names, cwd=folder)
    data = (tmp_path / "x.tar").read_bytes()
    assert [name for _, _, name in ours(data)] == [name.encode() for name in names]
    assert [payload_of(data, row) for row in rows_of(scan(data, "windows"))] == [name.encode() for name in names]


@pytest.mark.parametrize("version", ["gnu", "oldgnu", "0.0", "0.1", "1.0"])
def test_sparse_files_that_gnu_tar_writes_are_read_piece_by_piece(tmp_path, version):
    pieces = {
        "few.bin": {8192: b"d" * 4096, 65536: b"e" * 8192, 1 << 20: b"end"},
        "many.bin": {65536 * number: b"%d" % number * 2048 for number in range(10, 60)},
        "hole.bin": {},
        "full.bin": {0: b"f" * 5000},
    }
    contents = {}
    for name, content in pieces.items():
        with (tmp_path / name).open("wb") as file:
            for offset, piece in content.items():
                file.seek(offset)
                file.write(piece)
            if not content:
                file.truncate(100_000)
        contents[name] = (tmp_path / name).read_bytes()
    form = ["--format=posix", f"--sparse-version={version}"] if "." in version else [f"--format={version}"]
    run("tar", *form, "--sparse", "-cf", "x.tar", *contents, cwd=tmp_path)
    data = (tmp_path / "x.tar").read_bytes()
    table = scan(data, "mapped")
    assert {row.name.decode(): payload_of(data, row) for row in rows_of(table)} == contents
    assert table.offset.tolist().count(-1) == 3
    assert [(size, name) for _, size, name in ours(data)] == [
        (size, name) for _, size, name in listed("tar", tmp_path / "x.tar")
    ]


def test_archives_that_gnu_tar_appends_to_and_concatenates_are_read(tree, tmp_path):
    folder, _ = tree
    one, two = tmp_path / "one.tar", tmp_path / "two.tar"
    run("tar", "-cf", one, "a.jpg", cwd=folder)
    run("tar", "-rf", one, "a.txt", cwd=folder)
    run("tar", "-cf", two, "empty.cls", cwd=folder)
    run("tar", "-Af", one, two)
    assert ours(one.read_bytes()) == listed("tar", one) == listed("bsdtar", one)
    with one.open("ab") as file:
        file.write(two.read_bytes())
    table = scan(one.read_bytes(), "windows", ignore_zeros=True)
    names = run("tar", "--ignore-zeros", "-tf", one).split()
    assert table.names.to_list() == names == [b"a.jpg", b"a.txt", b"empty.cls", b"empty.cls"]


def test_a_volume_label_and_an_incremental_dump_of_gnu_tar_are_read(tree, tmp_path):
    folder, _ = tree
    path = tmp_path / "x.tar"
    run("tar", "--format=gnu", "-V", "label", "-g", tmp_path / "snapshot", "-cf", path, "d", "a.txt", cwd=folder)
    data = path.read_bytes()
    rows = rows_of(scan(data, "mapped"))
    assert (rows[0].kind, rows[0].name) == ("other", b"label")
    dumped = [row for row in rows if row.kind == "dir"]
    assert [row.name for row in dumped] == [b"d/", b"d/e/"]
    assert payload_of(data, dumped[1]) == b"Ydeep.tar.gz\0\0"
    assert [payload_of(data, row) for row in rows if row.name == b"a.txt"] == [b"a caption"]
    assert [row.name for row in rows] == run("tar", "-tf", path, "--quoting-style=literal").splitlines()


# What GNU tar and bsdtar read of archives that no program writes any more

LONG = b"d" * 120 + b"/" + b"n" * 130
READABLE = {
    "v7": (member(b"a.txt", b"1", b"\0", magic=V7), member(b"b/", b"", b"\0", magic=V7, kind="dir")),
    "prefix": (member(b"n" * 100, b"1", prefix=b"p" * 155, true_name=b"p" * 155 + b"/" + b"n" * 100),),
    "times in the prefix": (member(b"a.txt", b"1", magic=GNU, patches=((345, b"14524770400\0" * 2),)),),
    "long name": (member(b"x", b"1", magic=GNU, lead=gnu_long(LONG + b"\0"), true_name=LONG),),
    "pax path": (member(b"x", b"1", lead=pax((b"path", LONG)), true_name=LONG),),
    "pax size": (member(b"x", b"1" * 1500, lead=pax((b"size", b"1500")), size=512),),
    "base-256": (member(b"x", b"1" * 1500, size_field=base256(1500)),),
    "octal forms": tuple(
        member(b"x%d" % number, b"12345", size_field=field)
        for number, field in enumerate([b"          5\0", b"00000000005 ", b"000000000005", b"5"])
    ),
    "signed sum": (member("é".encode(), b"1", is_signed=True),),
    "contiguous": (member(b"x", b"1" * 600, b"7"),),
    "folder with a size": (member(b"d/", b"", b"5", kind="dir", size=5000),),
    "sparse old": (sparse_old(b"s.bin", SEGMENTS),),
    "sparse old, extended": (sparse_old(b"s.bin", Segments(tuple((1024 * n, b"x" * 512) for n in range(60)), 60928)),),
    "sparse 0.0": (sparse_pax_00(b"s.bin", SEGMENTS),),
    "sparse 0.1": (sparse_pax_01(b"s.bin", SEGMENTS),),
    "sparse 1.0": (sparse_pax_10(b"s.bin", SEGMENTS),),
}


@pytest.mark.parametrize("program", PACKAGES)
@pytest.mark.parametrize("case", READABLE)
def test_what_the_builder_builds_is_what_other_programs_read(case, program, tmp_path):
    made = archive(member(b"first.txt", b"1"), *READABLE[case], member(b"last.txt", b"22"))
    path, out = tmp_path / "x.tar", tmp_path / "out"
    path.write_bytes(made.data)
    others = [(size, name.rstrip(b"/")) for _, size, name in listed(program, path)]
    sizes = [0 if row.kind == "dir" else row.size for row in made.rows]
    if case == "folder with a size":
        others[1] = (0, others[1][1])  # both show the size that the header states
    assert others == list(zip(sizes, (row.name.rstrip(b"/") for row in made.rows), strict=True))
    out.mkdir()
    run(program, "-xf", path, "-C", out)
    for row, payload in zip(made.rows, made.payloads, strict=True):
        assert row.kind == "dir" or (out / row.name.decode()).read_bytes() == payload
    assert rows_of(scan(made.data, "mapped")) == made.rows
