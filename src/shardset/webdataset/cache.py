"""The names of ``webdataset.cache``: shards as files in a folder, by the rules of `shardset.storage.file_cache`.

A shard is in the folder whole or not at all; two urls never share a file, whatever names they are given; and the folder
never has more bytes than its limit.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from shardset.errors import ShardsetError, without_secrets
from shardset.files import open_atomic, remove_unheld
from shardset.formats.stream_compression import HEAD_SIZE, detect_compression
from shardset.formats.tar_header import has_valid_checksum
from shardset.pipeline.run import Step
from shardset.storage import file_cache
from shardset.storage.anywhere import AnyStore
from shardset.storage.local import local_path
from shardset.storage.store import url_scheme
from shardset.storage.streams import iter_pieces, open_stream

from . import utils
from .gopen import gopen, rewrite_url, user_openers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardset.pipeline.run import Handler
    from shardset.storage.file_cache import CachedFile

__all__ = [
    "FileCache",
    "LRUCleanup",
    "StreamingOpen",
    "check_tar_format",
    "default_cache_dir",
    "default_cache_size",
    "download",
    "get_filetype",
    "islocal",
    "magic_filetype",
    "pipe_cleaner",
    "url_to_cache_name",
    "verbose_cache",
]

logger = logging.getLogger("shardset.pipeline")

default_cache_dir: str = os.environ.get("WDS_CACHE", "./_cache")
"""Where a `FileCache` keeps its files that is not told."""
default_cache_size: float = float(os.environ.get("WDS_CACHE_SIZE", "1e18"))
"""How many bytes a `FileCache` keeps that is not told."""
verbose_cache: int = int(os.environ.get("WDS_VERBOSE_CACHE", "0") or 0)
"""Whether a `FileCache` says what it downloads, also if it is not told to."""

_NAMED_BY_PATH: Final = frozenset({"", "file", "http", "https", "ftp", "ftps", "gs", "s3", "ais"})
_URL: Final = re.compile(r"(?:https?|hdfs|gs|ais|s3):")
_LONGEST: Final = 128
_BLOCK: Final = 512


def islocal(url: str) -> bool:
    """Tell whether a url is a path, or a ``file:`` url."""
    return url_scheme(url) in {"", "file"} and not url.startswith("pipe:")


def magic_filetype(fname: str) -> str:
    """Return what a file seems to be by its first bytes: its name and a phrase."""
    with Path(fname).open("rb") as file:
        head = file.read(HEAD_SIZE)
    compression = detect_compression(head)
    if compression is not None:
        return f"{fname}: {compression} compressed data"
    is_tar = len(head) == _BLOCK and (has_valid_checksum(head) or not any(head))
    return f"{fname}: {'POSIX tar archive' if is_tar else 'data'}"


def get_filetype(fname: str) -> str:
    """Return what a file seems to be, as `magic_filetype` does; the program ``file`` is not asked."""
    return magic_filetype(fname)


def check_tar_format(fname: str) -> bool:
    """Tell whether a file begins as a tar does, or is compressed in a way that is read."""
    return magic_filetype(fname).endswith((": POSIX tar archive", " compressed data"))


def pipe_cleaner(spec: str) -> str:
    """Return the url in a ``pipe:`` command, the first one with a usual scheme; anything else as it is."""
    words = spec.removeprefix("pipe:").split() if spec.startswith("pipe:") else []
    return next((word for word in words if _URL.match(word)), spec.removeprefix("pipe:"))


def url_to_cache_name(url: str, ndir: int = 0) -> str:
    """Return the last part of a url's path, with the `ndir` folders before it; of other urls, all of it, quoted.

    This is how webdataset names the files of its cache. Urls of different folders may get one name, which a `FileCache`
    refuses: so this is not its default.
    """
    parts = urlsplit(url)
    if parts.scheme in _NAMED_BY_PATH:
        return "/".join(parts.path.lstrip("/").split("/")[-1 - ndir :])
    return quote(url, safe="_+{}*,-")[-_LONGEST:]


class LRUCleanup:
    """Removes files of a folder until they have no more bytes than a limit, those first that are oldest.

    A `FileCache` needs none: its limit holds by itself.

    Args:
        cache_dir: The folder.
        cache_size: The limit, bytes.
        keyfn: Gives the age of a file by its path; the least goes first.
        verbose: Print what is removed to standard error.
        interval: Seconds after a look before there is another; None to look each time.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: float = int(1e12),
        keyfn: Callable[[str], Any] = os.path.getctime,
        verbose: bool = False,
        interval: float | None = 30,
    ) -> None:
        self.cache_dir = cache_dir
        self.cache_size = cache_size
        self.keyfn = keyfn
        self.verbose = verbose
        self.interval = interval
        self.last_run = 0.0

    def set_cache_dir(self, cache_dir: str | os.PathLike[str]) -> None:
        """Clean another folder."""
        self.cache_dir = cache_dir

    def cleanup(self) -> None:
        """Look, and remove what is too much. What somebody reads or writes stays, as far as its file is locked."""
        now = time.time()
        if self.cache_dir is None or (self.interval is not None and now - self.last_run < self.interval):
            return
        self.last_run = now
        found = []
        for root, _, names in os.walk(self.cache_dir):
            for name in names:
                path = Path(root, name)
                try:
                    found.append((self.keyfn(str(path)), path, path.stat().st_size))
                except OSError:
                    continue  # somebody has just removed it
        excess = sum(size for *_, size in found) - self.cache_size
        for _, path, size in sorted(found):
            if excess <= 0:
                return
            if path.name.startswith("."):
                continue
            try:
                if remove_unheld(path):
                    excess -= size
                    file_cache.note_path(path).unlink(missing_ok=True)
                    if self.verbose:
                        sys.stderr.write(f"removed {path}\n")
            except OSError:
                continue


def download(url: str, dest: str | os.PathLike[str], chunk_size: int = 1024**2, verbose: bool = False) -> None:
    """Download a url to a file, which appears when all of it is there.

    Args:
        url: Any that `gopen` reads.
        dest: The file.
        chunk_size: Makes no difference.
        verbose: Print the url to standard error.

    Raises:
        StorageError: Not all of it came.
    """
    del chunk_size
    if verbose:
        sys.stderr.write(f"downloading {without_secrets(url)}\n")
    with open_atomic(dest) as file:
        for piece in iter_pieces(open_stream(_allowed(url), openers=user_openers())):
            file.write(piece)


def _allowed(url: str) -> str:
    """Return a url as `gopen` would open it."""
    if utils.enforce_security and url.startswith("pipe:"):
        raise ValueError("gopen_pipe: unsafe_gopen is False, cannot open pipe URLs")
    return url if islocal(url) or url == "-" else rewrite_url(url)


class StreamingOpen:
    """Opens urls: a source's dicts or urls become dicts of ``url``, ``stream`` and, for local files, ``local_path``.

    Args:
        verbose: Log each url.
        handler: Decides about a url that cannot be opened; None leaves it to the policy, which raises by default.
    """

    def __init__(self, verbose: bool = False, handler: Handler | None = None) -> None:
        self.verbose = verbose
        self.handler = handler

    def __call__(self, urls: Iterable[Any], *, step: Step | None = None) -> Iterator[dict[str, Any]]:
        """Open each of the urls."""
        step = step or Step(name="StreamingOpen")
        for item in urls:
            url = _url_of(item)
            if self.verbose:
                logger.info("opening %s", without_secrets(url))
            try:
                if islocal(url) and url != "-":
                    path = local_path(url)
                    opened = {"url": url, "stream": Path(path).open("rb"), "local_path": path}  # noqa: SIM115
                else:
                    opened = {"url": url, "stream": gopen(url)}
            except (ShardsetError, OSError, ValueError) as error:
                if not step.settle(error, "unreadable_shard", {"__url__": url}, self.handler):
                    return
                continue
            yield opened


class FileCache:
    """Downloads shards into a folder, once each, and opens the files. Local files are opened where they are.

    Args:
        cache_dir: The folder, made when it is needed; by default ``$WDS_CACHE`` or ``_cache``.
        url_to_name: Gives the name of a url's file. By default the last part of the url, and a digest of all of it.
        verbose: Print what is downloaded to standard error.
        validator: Is given the path of a file that has come; if it returns false, the file is not kept, and that is an
            error. None keeps everything.
        handler: Decides about a shard that cannot be had; None leaves it to the policy, which raises by default. (The
            stores have tried again long before.)
        cache_size: The most bytes that the folder may have; below 0 for ``$WDS_CACHE_SIZE`` or no limit.
        cache_cleanup_interval: Makes no difference: the limit holds at any time.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        url_to_name: Callable[[str], str] | None = None,
        verbose: bool = False,
        validator: Callable[[str], bool] | None = check_tar_format,
        handler: Handler | None = None,
        cache_size: float = -1,
        cache_cleanup_interval: float = 30,
    ) -> None:
        del cache_cleanup_interval
        self.cache_dir = os.fspath(default_cache_dir if cache_dir is None else cache_dir)
        self.url_to_name = url_to_name or file_cache.cache_name
        self.validator = validator
        self.handler = handler
        self.verbose = verbose or bool(verbose_cache)
        limit = default_cache_size if cache_size < 0 else cache_size
        self.cache_size = int(limit) if 0 < limit < 1e18 else None
        self._store = AnyStore()
        self._held: CachedFile | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def get_file(self, url: str) -> str:
        """Return the path of the file with a url's bytes. It stays there until the next one is asked for.

        Raises:
            StorageError: It cannot be had, or not be kept.
            FormatError: The validator refuses it.
            ValueError: Its name is that of another url's file, or none.
        """
        self._held = None
        kept = self._fetch(url)
        if kept is None:
            raise ShardsetError(f"{without_secrets(url)} cannot be kept in {self.cache_dir}: there is no room")
        self._held = kept
        return kept.path

    def __call__(self, urls: Iterable[Any], *, step: Step | None = None) -> Iterator[dict[str, Any]]:
        """Fetch and open each of the urls: dicts of ``url``, ``stream`` and ``local_path``.

        What cannot be kept is opened as a stream, without ``local_path``.
        """
        step = step or Step(name="FileCache")
        for item in urls:
            url = _url_of(item)
            try:
                kept = self._fetch(url)
                if kept is None:
                    opened: dict[str, Any] = {"url": url, "stream": gopen(url)}
                else:
                    stream: IO[bytes] = Path(kept.path).open("rb")  # noqa: SIM115
                    opened = {"url": url, "stream": stream, "local_path": kept.path}
            except (ShardsetError, OSError, ValueError) as error:
                if not step.settle(error, "unreadable_shard", {"__url__": url}, self.handler):
                    return
                continue
            yield opened
            del kept

    def _fetch(self, url: str) -> CachedFile | None:
        cache = file_cache.FileCache(
            Path(self.cache_dir).expanduser(),
            limit=self.cache_size,
            url_to_name=self.url_to_name,
            validate=self.validator,
            store=self._store,
            openers=user_openers(),
        )
        url = _allowed(url)
        if self.verbose and not islocal(url) and not cache.path_of(url).exists():
            sys.stderr.write(f"downloading {without_secrets(url)} to {cache.path_of(url)}\n")
        return cache.fetch(url)


def _url_of(item: Any) -> str:
    url = item["url"] if isinstance(item, dict) else item
    return os.fspath(url)
