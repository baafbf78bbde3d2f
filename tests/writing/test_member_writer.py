from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.formats.tar import scan_tar
from shardset.writing.member_writer import MemberWriter
from shardset.writing.tar_headers import member_size

NAMES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=130).filter(
    lambda name: name.strip("/") == name
)


def written(members):
    file = io.BytesIO()
    writer = MemberWriter(file)
    for name, payload in members:
        writer.add(name, len(payload), [payload])
    writer.close()
    return file.getvalue()


def by_tarfile(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(payload), 0o644
            tar.addfile(info, io.BytesIO(payload))
    return file.getvalue()


@given(st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=6))
def test_the_bytes_are_those_of_tarfile(members):
    assert written(members) == by_tarfile(members)


def test_members_have_mode_644_and_neither_owner_nor_time():
    with tarfile.open(fileobj=io.BytesIO(written([("a.txt", b"x")]))) as tar:
        info = tar.getmember("a.txt")
    assert (info.mode, info.mtime, info.uid, info.gid, info.uname, info.gname) == (0o644, 0, 0, 0, "", "")


def test_names_that_are_no_utf_8_keep_their_bytes():
    raw = b"caf\xe9/" + b"x" * 120 + b".jpg"
    payload = written([(raw.decode("utf-8", "surrogateescape"), b"1")])
    table = scan_tar(lambda offset, length: payload[offset : offset + length], len(payload))
    assert table.names[0] == raw


def test_a_size_of_8_gib_has_an_extension_header():
    class Nowhere(io.RawIOBase):
        def __init__(self):
            self.kept = []

        def write(self, data):
            if len(data) < 1 << 20:
                self.kept.append(bytes(data))
            return len(data)

    file, piece = Nowhere(), bytes(1 << 28)
    MemberWriter(file).add("a.bin", 8 << 30, (piece for _ in range(32)))
    header = file.kept[0]
    assert len(header) == 3 * 512
    assert b"size=8589934592\n" in header


@pytest.mark.parametrize("pieces", [[b"12"], [b"12", b"34"], []])
def test_a_payload_of_another_size_than_said_is_refused(pieces):
    with pytest.raises(ValueError, match=r"'a\.txt' has \d bytes of payload and not 3"):
        MemberWriter(io.BytesIO()).add("a.txt", 3, pieces)


def test_the_size_of_a_member_is_that_of_its_blocks():
    assert [member_size(size) for size in (0, 1, 512, 513)] == [512, 1024, 1024, 1536]
