"""What every store can do, in two small protocols: a `Store` finds objects, a `Reader` reads the bytes of one of them.

A store is a kind of place (this machine's disks, memory, an HTTP server); an object is one run of bytes in it, such as
a shard or a sidecar index; its url is its address. Stores are not rooted: every call takes the whole url, so one store
serves any number of folders. Nothing is opened when a store is made. A store may be shared by threads, used again
after a fork, and pickled to another process; a reader may be shared by threads and used after a fork.

The rules that hold for every store:

- A byte range is ``(offset, length)``, half-open. What comes back has exactly `length` bytes.
- A range that reaches past the end of the object is a `StorageError`, never a shorter answer.
- An empty range gives no bytes and reads nothing, wherever its offset lies.
- A negative offset or length is a `ValueError`.
- Views are read-only, one-dimensional, of bytes, and stay valid for as long as somebody holds them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias
from urllib.parse import quote, unquote_to_bytes

import numpy as np

from shardset.errors import ChangedError, NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    from typing_extensions import Buffer

    from shardset.policy import Report

    Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
    """Offsets or lengths: a list, a tuple, or an array of any integer type."""

    # `Store` has a method called `list`, which would hide the type inside the class.
    Views: TypeAlias = list[memoryview]

ABSENT: Final = ""
"""What `Store.write` is told to expect where nothing may stand yet."""
UNKNOWN: Final = "unknown"
"""The identity of an object whose place tells nothing about its version. What is learned of it is not kept."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_NO_BYTES: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of an object without reading it.

    Attributes:
        url: The object's address.
        size: Its length in bytes.
        identity: A text that differs whenever the bytes differ: mtime and inode of a local file, the etag of a remote
            object. Two identities can be compared with each other and mean nothing else.
        digest: A digest of the bytes as their place states it, ``"md5:..."`` or ``"sha256:..."`` in hex; None where it
            states none. It tells nothing about whether two objects are the same one.
    """

    url: str
    size: int
    identity: str
    digest: str | None = field(default=None, compare=False)


class Reader(Protocol):
    """One version of one object, open for reading.

    `size` and `identity` are those of the bytes that are read; a store never mixes two versions in one reader. There is
    nothing to close: what a reader holds is let go with the last reference to it and to its views.
    """

    @property
    def url(self) -> str:
        """The object's address."""

    @property
    def size(self) -> int:
        """The object's length in bytes."""

    @property
    def identity(self) -> str:
        """As in `ObjectInfo`."""

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from byte `offset` on.

        Raises:
            ValueError: `offset` or `length` is negative.
            ChangedError: The object is no longer the one that was opened.
            StorageError: The range reaches past the end, or reading failed.
        """

    def view(self, offset: int, length: int) -> memoryview:
        """Give `length` bytes from byte `offset` on without a copy where the store can, otherwise as `read` does.

        Raises:
            As `read`.
        """

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """Read many ranges at once, and answer in the order asked.

        The ranges may be unsorted, overlapping and empty. Several views may share one buffer, which lives until the
        last of them is gone.

        Raises:
            As `read`, before anything is read if a range is negative or reaches past the end; also ValueError if
            there are not as many lengths as offsets.
        """

    def map(self) -> memoryview | None:
        """Give the whole object as one view that costs neither reading nor memory, or None where that cannot be.

        Raises:
            ChangedError: The object is no longer the one that was opened.
        """


class Store(Protocol):
    """A kind of place that objects live in. A class that names it as its base gets `read` and `read_many`."""

    def info(self, url: str) -> ObjectInfo:
        """Look up the object as it is now.

        Raises:
            NotFoundError: There is no such object.
            AccessError: It may not be read.
            StorageError: It is a folder, or the look-up failed.
        """

    def open(self, url: str, known: ObjectInfo | None = None) -> Reader:
        """Open the object for any number of reads. Cheap where it has been opened lately.

        Args:
            url: The object.
            known: What the caller knows of it already. A remote store then need not ask: the reader is for exactly that
                version, and a read that meets another one raises `ChangedError`. A store that sees the object as it is
                without asking anybody takes no note of it.

        Raises:
            As `info`.
        """

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Find every object below the folder `url`, at any depth, lazily, in the byte order of their names.

        Each url found is `url`, a slash and the name, which has slashes where it lies deeper. The order is that of the
        names as UTF-8, before any percent-encoding, so that one tree has one order in all stores. Names that begin
        with a dot are among them. Symbolic links are followed, except where a link leads back to a folder that it
        lies in.

        Args:
            url: The folder.
            report: Counts the names that lead to no object (``"dangling_link"``, ``"link_loop"``, ``"not_a_file"``);
                without one they are logged as warnings.

        Raises:
            NotFoundError: There is no such folder. A store that has no folders of its own raises it when nothing
                lies below `url`.
            AccessError: The folder, or one below it, may not be listed.
        """

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> None:
        """Make `data` the whole content of the object. Everybody sees either what was there before or all of `data`.

        Args:
            url: The object.
            data: Its bytes, at once or in pieces, which are taken as they are made; if making one raises, nothing is
                written.
            expect: The identity that the object must have for it to be written over, or `ABSENT` if there must be none.
                Remote stores leave it to their server to see to that; local files are looked at right before.

        Raises:
            AccessError: It may not be written.
            ChangedError: It is not as `expect` says.
            StorageError: Writing failed; what was there before is still there.
        """

    def close(self) -> None:
        """Let go of everything that is held open. Readers in use stay valid, and the store can be used again."""

    def read(self, url: str, offset: int, length: int) -> bytes:
        """Read one range of an object: `open` and `Reader.read`."""
        return self.open(url).read(offset, length)

    def read_many(self, url: str, offsets: Numbers, lengths: Numbers) -> Views:
        """Read many ranges of an object: `open` and `Reader.read_many`."""
        return self.open(url).read_many(offsets, lengths)


def url_scheme(url: str) -> str:
    """Return the scheme of a url in lower case, or ``""`` for a path; a single letter is a drive and not a scheme."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def is_remote(url: str) -> bool:
    """Tell whether a url leads elsewhere than to this machine's disks or this process's memory."""
    return url_scheme(url) not in {"", "file", "memory"}


def url_join(base: str, name: str) -> str:
    """Return the url of `name` (relative, with ``/`` between its parts) below the folder `base`.

    In ``file://`` and ``http(s)://`` urls the name is percent-encoded, and the query of a web address, which may be
    what lets one in, stays at the end; elsewhere the name is taken as it stands.
    """
    scheme = url_scheme(base)
    if scheme in {"file", "http", "https"}:
        name = quote(os.fsencode(name))
    if scheme in {"http", "https"}:
        path, query = split_query(base)
        return f"{path.rstrip('/')}/{name}{query}"
    ends = ("/", "\\") if os.name == "nt" else "/"
    return base + name if base.endswith(ends) else f"{base}/{name}"


def url_name(url: str) -> str:
    """Return the last part of a url: the name that `url_join` would add to its folder."""
    scheme = url_scheme(url)
    if not scheme:
        return Path(url).name
    if scheme in {"http", "https"}:
        url = split_query(url)[0]
    name = url.rpartition("/")[2]
    return os.fsdecode(unquote_to_bytes(name)) if scheme in {"file", "http", "https"} else name


def split_query(url: str) -> tuple[str, str]:
    """Split a web address before its query or fragment: ``("https://host/a.tar", "?x=1")``."""
    at = min((place for place in (url.find("?"), url.find("#")) if place >= 0), default=len(url))
    return url[:at], url[at:]


def iter_buffers(data: Buffer | Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield what `Store.write` was given piece by piece, as bytes.

    Raises:
        TypeError: It is neither bytes nor pieces of bytes.
    """
    if isinstance(data, str):
        raise TypeError("text is written as bytes: encode it first")
    try:
        whole = memoryview(data)  # type: ignore[arg-type]
    except TypeError:
        for piece in data:  # type: ignore[union-attr]
            yield memoryview(piece).cast("B")
    else:
        yield whole.cast("B")


def check_expected(store: Store, url: str, expect: str) -> None:
    """Refuse to write over an object that is not as `Store.write` was told to expect.

    Raises:
        ChangedError: It has another identity, is missing, or is there though it must not be.
    """
    try:
        found = store.info(url).identity
    except NotFoundError:
        found = ABSENT
    if found != expect:
        what = "it is there already" if expect == ABSENT else "it was removed" if found == ABSENT else "it was changed"
        raise ChangedError(f"not written: {what}", url=url, hint="look at it again, then decide")


def check_range(url: str, size: int, offset: int, length: int) -> None:
    """Refuse a range that an object of `size` bytes cannot give.

    Raises:
        ValueError: `offset` or `length` is negative.
        StorageError: The range is not empty and reaches past the end.
    """
    if offset < 0 or length < 0:
        raise ValueError(f"a byte range cannot be negative: offset {offset}, length {length}")
    if length and length > size - offset:
        raise StorageError(
            f"bytes {offset} to {offset + length} reach past the end of the object, which has {size}",
            url=url,
            hint="the object is shorter than its index says: build the index again",
        )


def check_ranges(url: str, size: int, offsets: Numbers, lengths: Numbers) -> tuple[list[int], list[int]]:
    """Return offsets and ends (offset + length) of many ranges as plain ints; refuse as `check_range` does.

    Raises:
        ValueError: A number is negative, or there are not as many lengths as offsets.
        StorageError: A range is not empty and reaches past the end.
    """
    if len(offsets) != len(lengths):
        raise ValueError(f"{len(offsets)} offsets and {len(lengths)} lengths do not make ranges")
    if not len(offsets):
        return [], []
    if isinstance(offsets, np.ndarray) and isinstance(lengths, np.ndarray):
        first = offsets.astype(np.int64, casting="same_kind", copy=False)
        many = lengths.astype(np.int64, casting="same_kind", copy=False)
        last = first + many
        # One look for all signs; a number or a sum that is too large for int64 is negative here too.
        sound = bool(np.minimum.reduce(first | many | last) >= 0 and np.maximum.reduce(last) <= size)
        starts, ends = first.tolist(), last.tolist()
    else:
        starts, counts = _plain(offsets), _plain(lengths)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        sound = min(starts) >= 0 and min(counts) >= 0 and max(ends) <= size
    if not sound:
        for start, count in zip(offsets, lengths, strict=True):
            check_range(url, size, int(start), int(count))
    return starts, ends


def slice_view(url: str, whole: memoryview, offset: int, length: int) -> memoryview:
    """Answer `Reader.view` from a view of the whole object."""
    if length <= 0 or offset < 0 or length > len(whole) - offset:
        check_range(url, len(whole), offset, length)
        return _NO_BYTES
    return whole[offset : offset + length]


def slice_views(url: str, whole: memoryview, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
    """Answer `Reader.read_many` from a view of the whole object."""
    starts, ends = check_ranges(url, len(whole), offsets, lengths)
    return [whole[start:end] for start, end in zip(starts, ends, strict=True)]


def _plain(numbers: Numbers) -> list[int]:
    """Return the numbers as Python's own ints, which do not wrap around."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else list(numbers)
