"""Members of every kind to mix archives of, for hypothesis and for seeded generators."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st

from formats.tar_builder import (
    BLOCK,
    END,
    GNU,
    POSIX,
    V7,
    Segments,
    archive,
    base256,
    gnu_long,
    header,
    member,
    pax,
    sparse_old,
    sparse_pax_00,
    sparse_pax_01,
    sparse_pax_10,
)
from shardset.formats import tar_scan


def times(number):
    """A PAX header as Python's tarfile writes it for a fractional time."""
    return pax((b"mtime", b"%d.%d" % (10 ** (number % 11), number)))


def _inner(number):
    return member(b"inner%d.txt" % number, b"abc" * number).raw


PAYLOADS = {
    "text": lambda size, number: (b"payload %d " % number * (size // 8 + 1))[:size],
    "zeros": lambda size, _: bytes(size),
    "tar": lambda size, _: archive(*[_inner(one) for one in range(size // 600 + 1)]).data,
    "headers": lambda size, number: b"".join(_inner(number % 7) for _ in range(size // 1024 + 1)),
    "cut tar": lambda size, _: (b"".join(_inner(900) for _ in range(3)) + END)[:size],
    "times": lambda size, number: times(number) * (size // 1024 + 1),
    "times and member": lambda _, number: times(number) + _inner(number % 5),
    "huge header": lambda size, _: header(b"huge", 8**11 - 1) + bytes(size),
    "zero, header": lambda _size, _: bytes(BLOCK) + _inner(1),
}


def _segments(payload, number):
    pieces, logical = [], 0
    for row in range(number % 31):
        piece = payload[row * 100 : row * 100 + number % 101]
        pieces.append((logical, piece))
        logical += len(piece) + number % 3 * 400
    return Segments(tuple(pieces), logical + number % 5)


def _name(number):
    return (
        b"s/%06d.jpg" % number,
        b"%d.txt" % number,
        b"a/b.c/%d.seg.png" % number,
        b"\xc3\xbc%d.x" % number,
        b"n" * 94 + b"%06d" % number,
    )[number % 5]


def _magic(number):
    return (POSIX, GNU)[number // 5 % 2]


def _link(number, typeflag, kind, payload=b"", **fields):
    return member(_name(number), payload, typeflag, kind=kind, magic=_magic(number), link=b"target", **fields)


ORDINARY = {
    "file": lambda n, p: member(_name(n), p, magic=_magic(n)),
    "times": lambda n, p: member(_name(n), p, magic=_magic(n), lead=times(n)),
}
ODD = {
    "v7": lambda n, p: member(_name(n), p, b"\0", magic=V7),
    "path": lambda n, p: member(b"x", p, lead=pax((b"path", b"long/%d.png" % n)), true_name=b"long/%d.png" % n),
    "size": lambda n, p: member(_name(n), p, lead=pax((b"size", b"%d" % len(p))), size=n % 3 * 512),
    "two times": lambda n, p: member(_name(n), p, lead=times(n) + times(n), warnings=("repeated_extension",)),
    "two paths": lambda _, p: member(
        b"x", p, lead=pax((b"path", b"1")) + pax((b"path", b"2.x")), true_name=b"2.x", warnings=("repeated_extension",)
    ),
    "solaris": lambda n, p: member(_name(n), p, lead=pax((b"mtime", b"1"), typeflag=b"X")),
    "global": lambda n, p: member(_name(n), p, lead=times(n) + pax((b"comment", b"c"), typeflag=b"g")),
    "long name": lambda n, p: member(
        b"x", p, magic=GNU, lead=gnu_long(b"l" * (n % 600 + 1)), true_name=b"l" * (n % 600 + 1)
    ),
    "long name, times": lambda n, p: member(b"x", p, lead=gnu_long(b"long.x") + times(n), true_name=b"long.x"),
    "prefix": lambda n, p: member(b"%d.x" % n, p, prefix=b"pre/fix", true_name=b"pre/fix/%d.x" % n),
    "contiguous": lambda n, p: member(_name(n), p, b"7"),
    "dir": lambda n, _: _link(n, b"5", "dir", size=n % 7 * 300),
    "dir, times": lambda n, _: _link(n, b"5", "dir", lead=times(n)),
    "slash": lambda n, _: member(b"d%d/" % n, b"", (b"0", b"\0")[n % 2], kind="dir"),
    "symlink": lambda n, _: _link(n, b"2", "symlink", size=n % 2 * 600),
    "hard link": lambda n, _: _link(n, b"1", "hardlink", size=n % 3 * 512),
    "hard link, payload": lambda n, p: _link(n, b"1", "hardlink", b"!" + p),
    "device": lambda n, _: _link(n, (b"3", b"4")[n % 2], ("char", "block")[n % 2], size=n % 3 * 512),
    "fifo": lambda n, _: _link(n, b"6", "fifo", size=n % 3 * 512),
    "label": lambda n, _: _link(n, b"V", "other", size=n % 3 * 512),
    "dump": lambda _, p: member(b"dump/", p, b"D", kind="dir", magic=GNU),
    "unknown": lambda n, p: _link(n, b"Z", "other", p, warnings=("unknown_type",)),
    "base-256": lambda n, p: member(_name(n), p, size_field=base256(len(p))),
    "odd size": lambda n, p: member(_name(n), p, size_field=(b"%12o", b"%o ", b"%012o", b"%o\0 junk")[n % 4] % len(p)),
    "checksum": lambda n, p: member(_name(n), p, checksum=(b"%07o\0", b"%6o\0 ", b"%o", b"%06o  ")[n % 4]),
    "signed": lambda n, p: member(b"caf\xe9%d" % n, p, is_signed=True, warnings=("name_not_utf8",)),
    "not utf-8": lambda n, p: member(b"\xff%d.x" % n, p, warnings=("name_not_utf8",)),
    "unsafe": lambda n, p: member(b"../%d.x" % n, p, warnings=("unsafe_name",)),
    "empty name": lambda _, p: member(b"", p, warnings=("empty_name",)),
    "sparse old": lambda n, p: sparse_old(_name(n), _segments(p, n), lead=(b"", times(n))[n % 2]),
    "sparse 0.0": lambda n, p: sparse_pax_00(_name(n), _segments(p, n)),
    "sparse 0.1": lambda n, p: sparse_pax_01(_name(n), _segments(p, n)),
    "sparse 1.0": lambda n, p: sparse_pax_10(_name(n), _segments(p, n)),
}
KINDS = ORDINARY | ODD


def make(kind, number, size, payload):
    """Make one member; `number` chooses among variants, `payload` is a key of `PAYLOADS`."""
    return KINDS[kind](number, PAYLOADS[payload](size, number))


members = st.builds(
    make, st.sampled_from(sorted(KINDS)), st.integers(0, 10**5), st.integers(0, 3000), st.sampled_from(sorted(PAYLOADS))
)
pieces = st.lists(
    st.one_of(members, members, members, st.just(pax((b"comment", b"c"), typeflag=b"g"))), min_size=1, max_size=40
)


def mixed(seed, count, odd):
    """Mix an archive of `count` members, a share `odd` of which are of any kind and the others ordinary."""
    rng = random.Random(seed)
    kinds, ordinary, payloads = sorted(KINDS), sorted(ORDINARY), sorted(PAYLOADS)
    return archive(
        *(
            make(
                rng.choice(kinds if rng.random() < odd else ordinary),
                number,
                rng.choice((0, 1, 100, 511, 512, 513, 1024, 1500, 3000)),
                rng.choice(payloads) if rng.random() < odd else "text",
            )
            for number in range(count)
        )
    )


@contextmanager
def small_chunks(chunk, window):
    """Let the scanner take few headers at a time, so that a small archive has all the borders of a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_scan, "_CHUNK", chunk)
        patch.setattr(tar_scan, "_FEW", min(chunk, tar_scan._FEW))
        patch.setattr(tar_scan, "_FIRST_STEPS", 1)
        patch.setattr(tar_scan, "_FIRST_WINDOW", window)
        patch.setattr(tar_scan, "_MAX_WINDOW", 4 * window)
        yield
