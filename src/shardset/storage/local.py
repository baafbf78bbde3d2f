"""Files on this machine's disks, read by position or through a memory map."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn
from urllib.parse import unquote_to_bytes

from shardset.errors import AccessError, ChangedError, NotFoundError, StorageError
from shardset.files import open_atomic
from shardset.policy import Place

from .planner import int64_ranges, plan_reads
from .store import (
    ObjectInfo,
    Store,
    check_expected,
    check_range,
    check_ranges,
    iter_buffers,
    slice_view,
    slice_views,
    url_join,
    url_scheme,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .store import Numbers

logger = logging.getLogger(__name__)

# Without a map, a gap of this size costs less to read than the call that it saves, and a view of a small payload
# keeps no more than the limit alive.
_GAP: Final = 16 << 10
_LIMIT: Final = 1 << 20
# More than this in one call is refused by some systems and cut short by others.
_MOST_AT_ONCE: Final = 1 << 30
_LEAST_KEPT: Final = 128
_MOST_KEPT: Final = 4096
# A named pipe without a writer would hang a plain open.
_OPEN_FLAGS: Final = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


class LocalReader:
    """One file, open for reading: a `Reader` that the file's name has no more influence on.

    A file that is replaced by a rename goes on being read here as it was. A file that is cut short in place is
    noticed (`ChangedError`): by a read that comes out too short, and before every answer from a map. If it is cut
    after such an answer, using the views kills the process (SIGBUS), which no check can prevent: ``mmap=False`` is
    for files that others may cut. A file that is written over in place, at the same or a larger size, gives its new
    bytes under the old identity.

    Args:
        url: A path or a ``file://`` url.
        mmap: Give views of a memory map; otherwise they are views of what was read.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        StorageError: It is not a regular file, or cannot be opened.
    """

    __slots__ = ("_handle", "_map", "_may_map", "_pread", "_whole", "identity", "size", "url")

    _map: mmap.mmap | None  # here, because __init__ has another mmap

    def __init__(self, url: str, *, mmap: bool = True) -> None:
        self._handle = -1
        try:
            self._handle = os.open(local_path(url), _OPEN_FLAGS)
            info = _object_info(url, os.fstat(self._handle))
        except OSError as error:
            raise storage_error(error, url) from error
        self.url = url
        self.size = info.size
        self.identity = info.identity
        self._may_map = mmap
        self._map = None
        self._whole: memoryview | None = None
        self._pread: Callable[[int, int, int], bytes] = getattr(os, "pread", None) or _seek_and_read()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # the module may be gone before the reader
        if self._handle >= 0:
            close(self._handle)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an open file cannot be pickled; pickle the store and open {self.url} again")

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from byte `offset` on, as `Reader.read` says."""
        if 0 < length <= _MOST_AT_ONCE and 0 <= offset <= self.size - length:
            try:
                payload = self._pread(self._handle, length, offset)
            except OSError as error:
                raise storage_error(error, self.url) from error
            if len(payload) == length:
                return payload
        return self._read_in_pieces(offset, length)

    def view(self, offset: int, length: int) -> memoryview:
        """Give `length` bytes from byte `offset` on as a view, as `Reader.view` says."""
        whole = self.map()
        if whole is None:
            return memoryview(self.read(offset, length))
        return slice_view(self.url, whole, offset, length)

    def read_many(self, offsets: Numbers, lengths: Numbers) -> list[memoryview]:
        """Give many ranges as views, as `Reader.read_many` says; without a map near ones are read together."""
        whole = self.map()
        if whole is None:
            return self._read_merged(*check_ranges(self.url, self.size, offsets, lengths))
        return slice_views(self.url, whole, offsets, lengths)

    def map(self) -> memoryview | None:
        """Give the whole file as a view of its memory map, or None without one, as `Reader.map` says."""
        if self._map is not None:
            # The one check that stands between a file that was cut and a SIGBUS; it costs 0.4 us.
            if self._map.size() < self.size:
                raise self._cut(self._map.size())
            return self._whole
        if not self._may_map:
            return None
        return self._open_map()

    @staticmethod
    def can_advise() -> bool:
        """Tell whether the system can be told what will be read, and asked what it has in memory."""
        return hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")

    def advise(self, offsets: Iterable[int], lengths: Iterable[int]) -> None:
        """Tell the system that ranges will soon be read: it begins to bring into memory what is not there."""
        with suppress(OSError):  # a wish
            for offset, length in zip(offsets, lengths, strict=True):
                os.posix_fadvise(self._handle, offset, length, os.POSIX_FADV_WILLNEED)

    def is_in_memory(self, offset: int) -> bool:
        """Tell whether the system has the byte at an offset in memory; where it cannot tell, it has."""
        try:
            os.preadv(self._handle, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _open_map(self) -> memoryview | None:
        size = os.fstat(self._handle).st_size
        if size < self.size:
            raise self._cut(size)
        if not self.size:
            return memoryview(b"")  # an empty file cannot be mapped
        try:
            mapped = mmap.mmap(self._handle, self.size, access=mmap.ACCESS_READ)
        except OSError as error:
            # Some network file systems have no maps, and a process may have too many; reading still works.
            logger.debug("not mapped: %s: %s", self.url, error)
            self._may_map = False
            return None
        except ValueError:
            raise self._cut(os.fstat(self._handle).st_size) from None
        # In this order, because other threads take a map that is there to mean a view that is there. Two threads may
        # come here at once; the map that is overwritten goes when its views do.
        self._whole = whole = memoryview(mapped)
        self._map = mapped
        return whole

    def _read_in_pieces(self, offset: int, length: int) -> bytes:
        """Answer what one call cannot: refused, empty and very long ranges, and calls that gave too little."""
        check_range(self.url, self.size, offset, length)
        pieces = []
        while length:
            try:
                piece = self._pread(self._handle, min(length, _MOST_AT_ONCE), offset)
            except OSError as error:
                raise storage_error(error, self.url) from error
            if not piece:
                raise self._cut(os.fstat(self._handle).st_size)
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _read_merged(self, starts: list[int], ends: list[int]) -> list[memoryview]:
        if len(starts) == 1:
            return [memoryview(self.read(starts[0], ends[0] - starts[0]))]
        offsets, lengths = int64_ranges(starts, ends)
        plan = plan_reads(offsets, lengths, gap=_GAP, most=_LIMIT)
        blocks = list(map(self.read, plan.offsets.tolist(), plan.lengths.tolist()))
        return plan.hand_out(blocks, lengths)

    def _cut(self, size: int) -> ChangedError:
        return ChangedError(
            f"the file was cut from {self.size} to {size} bytes while it was open",
            url=self.url,
            hint="if the new content is wanted, build its index again",
        )


class LocalStore(Store):
    """The file system. Urls are paths or ``file://`` urls; a relative path starts at the current folder.

    The files read last stay open. `open` does not look at the path again while its file is open: a file that others
    replace goes on being read as it was until it is pushed out by later ones, or until `info` sees that another file
    stands there. So what `open` gives after `info` is never older than what `info` said.

    Args:
        mmap: Give views of memory maps. Set it to False for files that others may cut short while they are read (a
            map of such a file kills the process), or where address space is scarce.
        max_open: How many files are kept open, each with up to two descriptors; None for what `files_kept` says.
    """

    def __init__(self, *, mmap: bool = True, max_open: int | None = None) -> None:
        if max_open is not None and max_open < 1:
            raise ValueError(f"max_open={max_open}: at least one file must be kept open")
        self.mmap = mmap
        self.max_open = files_kept() if max_open is None else max_open
        # No lock guards it, so that no fork can inherit a locked one: each operation on it is atomic, and two threads
        # that open one file at once only do the work twice.
        self._readers: OrderedDict[str, LocalReader] = OrderedDict()

    def __reduce__(self) -> tuple[Callable[[], LocalStore], tuple[()]]:
        return partial(LocalStore, mmap=self.mmap, max_open=self.max_open), ()

    def __repr__(self) -> str:
        return f"LocalStore(mmap={self.mmap}, max_open={self.max_open})"

    def info(self, url: str) -> ObjectInfo:
        """Look at the path, as `Store.info` says, and forget the open file if another one stands there now."""
        try:
            info = _object_info(url, Path(local_path(url)).stat())
        except OSError as error:
            self._readers.pop(url, None)
            raise storage_error(error, url) from error
        reader = self._readers.get(url)
        if reader is not None and (reader.identity, reader.size) != (info.identity, info.size):
            self._readers.pop(url, None)
        return info

    def open(self, url: str, known: ObjectInfo | None = None) -> LocalReader:
        """Open the file or find it open, as `Store.open` says."""
        del known
        reader = self._readers.get(url)
        if reader is None:
            return self._open(url)
        try:  # noqa: SIM105  contextlib.suppress costs more than all the rest
            self._readers.move_to_end(url)
        except KeyError:
            pass  # another thread has just pushed it out; this reader stays valid
        return reader

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Walk the folder, as `Store.list` says."""
        try:
            root = Path(local_path(url)).stat()
        except OSError as error:
            raise storage_error(error, url) from error
        # A stack and not recursion: a hostile tree may be deeper than Python's.
        stack: list[ObjectInfo | _Folder] = [_Folder(url, ((root.st_dev, root.st_ino),))]
        while stack:
            found = stack.pop()
            if isinstance(found, ObjectInfo):
                yield found
            else:
                stack.extend(reversed(_list_folder(found, report)))

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> None:
        """Write the file beside its place and rename it, as `Store.write` says; missing folders are made."""
        path = Path(local_path(url))
        self._readers.pop(url, None)  # Windows does not replace a file that is open
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(path) as file:
                for piece in iter_buffers(data):
                    file.write(piece)
                if expect is not None:
                    check_expected(self, url, expect)
        except OSError as error:
            raise storage_error(error, url) from error
        finally:
            self._readers.pop(url, None)  # another thread may have opened the old one meanwhile

    def close(self) -> None:
        """Close all files but those in use."""
        self._readers.clear()

    def _open(self, url: str) -> LocalReader:
        try:
            reader = LocalReader(url, mmap=self.mmap)
        except StorageError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._readers:
                raise
            # The process may hold fewer files than max_open; those kept for later are the ones to give up.
            self._readers.clear()
            reader = LocalReader(url, mmap=self.mmap)
        self._readers[url] = reader
        while len(self._readers) > self.max_open:
            try:
                self._readers.popitem(last=False)
            except KeyError:
                break  # other threads have emptied it meanwhile
        return reader


def files_kept() -> int:
    """Return how many files may well stay open: with two descriptors each, a quarter of what this process may have.

    They are 128 at least, where it may have few, and 4,096 at most.
    """
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return _LEAST_KEPT
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_KEPT if limit == resource.RLIM_INFINITY else min(max(_LEAST_KEPT, limit // 8), _MOST_KEPT)


def local_path(url: str) -> str:
    """Return the path that a ``file://`` url names, or a path as it stands (``#``, ``?`` and ``%`` mean themselves).

    Raises:
        ValueError: The url names another machine.
    """
    if url_scheme(url) != "file":
        return url
    host, slash, rest = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"{url}: a file url is file:///path; another machine cannot be named")
    path = os.fsdecode(unquote_to_bytes(rest))
    has_drive = os.name == "nt" and path[1:2] in (":", "|")
    return f"{path[0]}:{path[2:]}" if has_drive else f"/{path}"


class _Folder(NamedTuple):
    """A folder to be listed, with the device and inode of it and of those that the walk came through."""

    url: str
    chain: tuple[tuple[int, int], ...]


def _list_folder(folder: _Folder, report: Report | None) -> list[ObjectInfo | _Folder]:
    """List one folder in such an order that a walk meets all files in the byte order of their names."""
    try:
        with os.scandir(local_path(folder.url)) as entries:
            children = [(entry.name, entry.is_symlink()) for entry in entries]
    except OSError as error:
        raise storage_error(error, folder.url) from error
    found: list[tuple[bytes, ObjectInfo | _Folder]] = []
    for name, is_link in children:
        url = url_join(folder.url, name)
        try:
            status = Path(local_path(url)).stat()
        except OSError as error:
            if isinstance(error, FileNotFoundError) or error.errno == errno.ELOOP:
                # What is no link and yet not there was removed just now, and so belongs to no listing.
                if is_link:
                    _pass_over("dangling_link", url, report)
                continue
            raise storage_error(error, url) from error
        if stat.S_ISREG(status.st_mode):
            found.append((os.fsencode(name), _object_info(url, status)))
        elif not stat.S_ISDIR(status.st_mode):
            _pass_over("not_a_file", url, report)
        elif (status.st_dev, status.st_ino) in folder.chain:
            _pass_over("link_loop", url, report)
        else:
            # A folder's files come where the slash after its name puts them: "a-b" before "a/b" before "a0".
            below = _Folder(url, (*folder.chain, (status.st_dev, status.st_ino)))
            found.append((os.fsencode(name) + b"/", below))
    found.sort(key=lambda pair: pair[0])
    return [child for _, child in found]


def _pass_over(code: str, url: str, report: Report | None) -> None:
    if report is None:
        logger.warning("passed over in a listing (%s): %s", code, url)
    else:
        report.add(code, Place(shard=url))


def _object_info(url: str, status: os.stat_result) -> ObjectInfo:
    """Return what a stat says of a file; size is apart from identity, so that messages can name it.

    Raises:
        StorageError: It is not a regular file.
    """
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        error = StorageError(f"not a file but a {'folder' if is_folder else 'device, pipe or socket'}", url=url)
        error.errno = errno.EISDIR if is_folder else errno.EINVAL
        raise error
    return ObjectInfo(url, status.st_size, file_identity(status))


def file_identity(status: os.stat_result) -> str:
    """Return the identity of a file, as `ObjectInfo` has it.

    The inode is there because a copy or a rename can bring an old mtime with it. The device is not, because network
    file systems give it anew at each mount.
    """
    return f"{status.st_mtime_ns}-{status.st_ino}"


def storage_error(error: OSError, url: str) -> StorageError:
    """Return the error of ours for one of the system; its number is kept."""
    if isinstance(error, StorageError):
        return error
    kind: type[StorageError] = StorageError
    hint = None
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        kind = NotFoundError
    elif isinstance(error, PermissionError):
        kind = AccessError
    elif error.errno == getattr(errno, "ESTALE", None):
        kind, hint = ChangedError, "the file was removed or replaced on its server: open it again"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit of open files (ulimit -n), or lower max_open"
    translated = kind((error.strerror or str(error)).lower(), url=url, hint=hint)
    translated.errno = error.errno
    return translated


def _seek_and_read() -> Callable[[int, int, int], bytes]:
    """Make a stand-in for `os.pread` for one handle, for systems without it (Windows), which have no fork either."""
    lock = threading.Lock()

    def pread(handle: int, length: int, offset: int) -> bytes:
        with lock:
            os.lseek(handle, offset, os.SEEK_SET)
            return os.read(handle, length)

    return pread
