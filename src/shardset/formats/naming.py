"""Names of members: as one column of bytes, and split into key and suffix.

The rule is that of the WebDataset convention page and of webdataset's `base_plus_ext`: a key runs to the first dot of
the path's last component, the rest is the suffix, and only neighbouring members of one key make a sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_SLASH: Final = 0x2F
_DOT: Final = 0x2E
_STRUCTURAL: Final = re.compile(rb"__[^/]*__(?:/|\n?\Z)")


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A column of byte strings: string `i` is ``data[offsets[i]:offsets[i + 1]]`` (Arrow's layout).

    Attributes:
        data: uint8, all strings one behind the other.
        offsets: int64, one more than there are strings, ascending.
    """

    data: NDArray[np.uint8]
    offsets: Int64s

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> Names:
        """Make a column of some byte strings."""
        strings = list(strings)
        return cls.from_lengths(b"".join(strings), np.fromiter(map(len, strings), np.int64, len(strings)))

    @classmethod
    def from_lengths(cls, data: bytes | NDArray[np.uint8], lengths: NDArray[np.integer]) -> Names:
        """Make a column of bytes that lie one behind the other, from the length of each."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data, offsets)

    @classmethod
    def concatenate(cls, columns: list[Names]) -> Names:
        """Join columns into one."""
        if len(columns) == 1:
            return columns[0]
        data = np.concatenate([np.zeros(0, np.uint8), *(c.data[c.offsets[0] : c.offsets[-1]] for c in columns)])
        return cls.from_lengths(data, np.concatenate([np.zeros(0, np.int64), *(c.lengths for c in columns)]))

    @property
    def lengths(self) -> Int64s:
        """Length of each string in bytes."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.to_list())

    def text(self, row: int) -> str:
        """Return one string as text; bytes that are no UTF-8 become surrogate escapes."""
        return self[row].decode("utf-8", "surrogateescape")

    def to_list(self) -> list[bytes]:
        """Return all strings."""
        data, offsets = self.data.tobytes(), self.offsets.tolist()
        return [data[a:b] for a, b in pairwise(offsets)]

    def to_text_list(self) -> list[str]:
        """Return all strings as text, as `text` does."""
        if not self.has_high_bytes():
            data, offsets = self.data.tobytes().decode("ascii"), self.offsets.tolist()
            return [data[a:b] for a, b in pairwise(offsets)]
        return [name.decode("utf-8", "surrogateescape") for name in self.to_list()]

    def has_high_bytes(self) -> bool:
        """Tell whether any string holds a byte that is not ASCII."""
        return bool((self.data > 0x7F).any())

    def take(self, rows: Int64s) -> Names:
        """Return the strings of some rows, in the order of `rows`."""
        return self.cut(self.offsets[:-1][rows], self.lengths[rows])

    def cut(self, starts: Int64s, lengths: Int64s) -> Names:
        """Return a column of pieces of `data`, each given by its start and length in bytes."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        where = np.repeat(starts - offsets[:-1], lengths)
        where += np.arange(offsets[-1])
        return Names(self.data[where], offsets)


def eight_bytes(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return for every byte, and for the end, the eight bytes from there on as one little-endian integer.

    Zeros stand for what is behind the end. The result is a view of a copy of `data`, of one byte more than it.
    """
    padded = np.append(data, np.zeros(8, np.uint8))
    return np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Names split into key and suffix, a row each.

    Attributes:
        key_lengths: int64; the key is that many first bytes of the name. -1 where the name belongs to no sample.
        suffix_ids: int32, into `suffixes`; -1 where the name belongs to no sample.
        suffixes: The distinct suffixes, lower-cased; their order depends on the names alone.
    """

    key_lengths: Int64s
    suffix_ids: NDArray[np.int32]
    suffixes: tuple[str, ...]


def base_plus_ext(name: bytes) -> tuple[bytes, bytes] | None:
    """Split one member name into (key, suffix), or return None if it has none, exactly as webdataset does.

    The suffix is not lower-cased. A name whose last component starts with a dot has no key of its own; below a folder
    without a dot the folder with its slash is then the key, which is how the reference's pattern works out.
    """
    start = name.rfind(b"/") + 1
    dot = name.find(b".", start)
    if dot < 0:
        return None
    if dot > start:
        return name[:dot], name[dot + 1 :]
    parent = name[name.rfind(b"/", 0, start - 1) + 1 : start] if start else b""
    return (name[:start], name[start + 1 :]) if parent and b"." not in parent else None


def is_structural(name: bytes) -> bool:
    """Tell whether a name lies in a ``__name__`` tree at the archive's root, which holds no samples."""
    return _STRUCTURAL.match(name) is not None


def split_names(names: Names) -> Split:
    """Split all names of a shard at once, as `base_plus_ext` and `is_structural` do one by one."""
    data = names.data
    starts, ends = names.offsets[:-1], names.offsets[1:]
    count = len(names)
    base = starts.copy()
    slashes = np.flatnonzero(data == _SLASH)
    if len(slashes):
        last = slashes[np.maximum(np.searchsorted(slashes, ends) - 1, 0)]
        np.copyto(base, last + 1, where=(last >= starts) & (last < ends))
    dots = np.append(np.flatnonzero(data == _DOT), len(data))
    if len(dots) == count + 1 and bool(((dots[:-1] >= base) & (dots[:-1] < ends)).all()):
        dot = dots[:-1]  # one in each name, as is common
    else:
        dot = dots[np.searchsorted(dots, base)]
    has_key = (dot < ends) & (dot > base)
    key_lengths = np.where(has_key, dot - starts, -1)
    suffix_starts = np.where(has_key, dot + 1, ends)
    # What is left is rare and goes one by one: a leading dot in the last component, and __structural__ trees.
    odd = (dot == base) & (base > starts) & (dot < ends)
    if count:
        padded = np.append(data, np.zeros(2, np.uint8))
        odd |= (padded[starts] == 0x5F) & (padded[starts + 1] == 0x5F)
    for row in np.flatnonzero(odd).tolist():
        name = names[row]
        split = None if is_structural(name) else base_plus_ext(name)
        key_lengths[row] = len(split[0]) if split else -1
        suffix_starts[row] = ends[row] - len(split[1]) if split else ends[row]
    ids, suffixes = _suffix_ids(names, suffix_starts, key_lengths >= 0)
    return Split(key_lengths, ids, suffixes)


def _suffix_ids(names: Names, starts: Int64s, wanted: Bools) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Number the lower-cased suffixes ``data[starts[i]:end of name i]`` of the wanted rows."""
    ids = np.full(len(names), -1, np.int32)
    lengths = names.offsets[1:] - starts
    # Suffixes of up to seven ASCII bytes are compared as one integer: the bytes, and the length in the eighth.
    short = wanted & (lengths < 8)
    words = eight_bytes(names.data)[starts[short]]
    counts = lengths[short].astype(np.uint64)
    words &= (np.uint64(1) << (counts * np.uint64(8))) - np.uint64(1)
    plain = (words & np.uint64(0x8080808080808080)) == 0
    words |= counts << np.uint64(56)
    found: dict[str, int] = {}
    codes = np.full(len(words), -1, np.int32)
    pending = plain.copy()
    while len(left := np.flatnonzero(pending)):
        word = words[left[0]]
        same = words == word
        raw = int(word).to_bytes(8, "little")[: int(counts[left[0]])]
        codes[same] = found.setdefault(raw.decode("ascii").lower(), len(found))
        pending &= ~same
        if len(found) > 64:
            break
    ids[np.flatnonzero(short)] = codes
    for row in np.flatnonzero(wanted & (ids < 0)).tolist():
        raw = names.data[starts[row] : names.offsets[row + 1]].tobytes()
        suffix = raw.decode("utf-8", "surrogateescape").lower()
        ids[row] = found.setdefault(suffix, len(found))
    return ids, tuple(found)
