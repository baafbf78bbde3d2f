"""Buckets: S3 and what speaks like it, Google Cloud Storage, Azure's blobs; over obstore.

Requests, signatures and connections are obstore's; what is asked, how often, and what counts as an answer is decided
here. Keys are taken from urls as they stand, without percent-encoding. A key that obstore would change (one with an
empty part, ``.``, ``..`` or a control character in it, or a slash at its end) is refused.
"""

from __future__ import annotations

import errno
import os
import re
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from shardset.errors import ChangedError, NotFoundError, StorageError, without_secrets

from .bucket import PART, CloudPlace, identity_of, not_written, open_bucket
from .planner import ReadLimits
from .remote import OpenReaders, RemoteReader
from .retry import Retry
from .store import ABSENT, ObjectInfo, Store, iter_buffers, url_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .bucket import Bucket, Purpose

SCHEMES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl"})
"""The schemes of the urls that a `CloudStore` takes."""

# Stores of this process that have clients, and the clients that a forked child got of its parent. obstore frees what it
# holds under a lock that a thread of the parent may have had at the moment of the fork, so a child never lets go of it.
_stores: Final[WeakSet[CloudStore]] = WeakSet()
_of_parents: Final[list[object]] = []

_KINDS: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_AZURE_HOST: Final = re.compile(r"([^@/]+)@([a-z0-9-]+)\.(?:blob|dfs)\.[^/]+")
# What is written under a condition goes in one request, and so lies in memory as a whole.
_MOST_CONDITIONAL: Final = 512 << 20


def parse_cloud_url(url: str) -> CloudPlace:
    """Take apart ``s3://bucket/key``, ``gs://bucket/key``, ``az://container/blob`` and Azure's longer spellings.

    Those are ``abfs[s]://container@account.dfs.core.windows.net/blob`` and
    ``az://account.blob.core.windows.net/container/blob``.

    Raises:
        ValueError: It is no such url.
    """
    scheme = url_scheme(url)
    if scheme not in SCHEMES:
        raise ValueError(f"{without_secrets(url)}: not the url of a bucket")
    kind = _KINDS.get(scheme, "az")
    bucket, _, key = url.partition("://")[2].partition("/")
    account = None
    if kind == "az" and "." in bucket:
        named = _AZURE_HOST.fullmatch(bucket)
        if named is not None:
            bucket, account = named[1], named[2]
        else:
            account = bucket.partition(".")[0]
            bucket, _, key = key.partition("/")
    if not bucket or "@" in bucket:
        raise ValueError(f"{without_secrets(url)}: names no bucket")
    return CloudPlace(kind, bucket, key, account)


class CloudStore(Store):
    """Buckets: ``s3://bucket/key``, ``gs://bucket/key``, ``az://container/blob``.

    The identity of an object is its etag. Every read asks for the version that was opened, and what comes is compared
    with it; an answer from another version is a `ChangedError`. What is remembered is which version each url had.

    Names are listed in byte order as the service gives them, page by page; Azure and S3 Express promise no such order,
    and are listed to the end before the first name comes. An empty object that stands for a folder, as consoles make
    them, is no object here.

    Args:
        options: obstore's options, such as ``{"endpoint": "https://...", "region": "..."}`` or
            ``{"skip_signature": "true"}``, and for S3 ``profile``. What they do not say is found as each cloud's tools
            find it. They go along when the store is pickled.
        retry: When to give up. obstore shows no Retry-After; a service that says 429 or 503 is asked again after waits
            that double.
        limits: How reads are merged and run side by side.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, str] | None = None,
        retry: Retry | None = None,
        limits: ReadLimits | None = None,
    ) -> None:
        self._options = dict(options or {})
        self._retry = retry or Retry()
        self._limits = limits or ReadLimits()
        # obstore's clients have threads, which a forked child has not: (process id, clients), replaced as a whole.
        self._clients: tuple[int, dict[tuple[str, ...], Bucket]] = (0, {})
        self._readers = OpenReaders(self._ask, self._reader)

    def __reduce__(self) -> tuple[Callable[[], CloudStore], tuple[()]]:
        return partial(CloudStore, options=self._options, retry=self._retry, limits=self._limits), ()

    def __repr__(self) -> str:
        return f"CloudStore(options={sorted(self._options)})"

    def info(self, url: str) -> ObjectInfo:
        """Ask the service, as `Store.info` says."""
        return self._readers.look(url)

    def open(self, url: str, known: ObjectInfo | None = None) -> RemoteReader:
        """Make a reader for the version that is known, or else that was seen last, as `Store.open` says."""
        return self._readers.open(url, known)

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Page through the names below `url`, as `Store.list` says."""
        client, prefix = self._find(url, folder=True)
        base = url.removesuffix("/") + "/"
        skip = len(prefix) + 1 if prefix else 0
        found = client.iter_names(url, prefix, report)
        if not client.is_sorted:
            found = iter(sorted(found, key=lambda meta: meta["path"]))
        count = 0
        for meta in found:
            count += 1
            yield _info(base + meta["path"][skip:], meta)
        if not count:
            raise NotFoundError("nothing lies below this folder", url=url)

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> None:
        """Send the object, as `Store.write` says: what is short in one request, what is long in parts.

        Parts show only when all of them are there. What is written under a condition goes in one request, since no
        service takes one with parts.

        Raises:
            StorageError: More than 512 MiB are to be written under a condition.
        """
        client, key = self._find(url, "write")
        mode = _mode(client, url, key, expect)
        most = PART if expect is None else _MOST_CONDITIONAL
        pieces = iter_buffers(data)
        first, size = _gather(pieces, most)
        try:
            if size <= most:
                client.put(url, key, b"".join(first), mode)
            elif expect is None:
                self._find(url, "write parts")[0].put_parts(url, key, chain(first, pieces), size)
            else:
                what = f"more than {_MOST_CONDITIONAL >> 20} MiB cannot be written under a condition"
                raise StorageError(what, url=url)
        finally:
            self._readers.forget(url)

    def close(self) -> None:
        """Let go of connections, and forget versions."""
        self._clients = (0, {})
        self._readers.clear()

    def _ask(self, url: str) -> ObjectInfo:
        client, key = self._find(url)
        return _info(url, client.head(url, key))

    def _reader(self, info: ObjectInfo) -> RemoteReader:
        return RemoteReader(info, partial(self._fetch, info), self._limits)

    def _fetch(self, info: ObjectInfo, offset: int, view: memoryview) -> None:
        client, key = self._find(info.url)
        try:
            client.fetch(info, key, offset, view)
        except (ChangedError, NotFoundError):
            self._readers.forget(info.url)
            raise

    def _find(self, url: str, purpose: Purpose = "read", *, folder: bool = False) -> tuple[Bucket, str]:
        """Return what talks to a url's bucket, and the key as obstore takes it.

        Raises:
            StorageError: The url names a folder where it must not, or a key that obstore would change.
        """
        place, key = _find_folder(url) if folder else _find_key(url)
        pid, clients = self._clients
        if pid != os.getpid():
            pid, clients = self._clients = os.getpid(), {}
        name = (place.kind, place.bucket, place.account or "", purpose)
        client = clients.get(name)
        if client is None:
            _keep_at_fork(self)
            client = clients.setdefault(name, open_bucket(place, self._options, self._retry, purpose))
        return client, key


@lru_cache(1)
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _of_parents.extend([store._clients for store in _stores]))  # noqa: SLF001


def _keep_at_fork(store: CloudStore) -> None:
    _watch_forks()
    _stores.add(store)


def _info(url: str, meta: Mapping[str, Any]) -> ObjectInfo:
    # No digest: S3 and Google give the MD5 as the etag only of some objects, and do not tell of which.
    return ObjectInfo(url, meta["size"], identity_of(meta))


@lru_cache(4096)
def _find_key(url: str) -> tuple[CloudPlace, str]:
    place = parse_cloud_url(url)
    if not place.key or place.key.endswith("/"):
        error = StorageError("not an object but a folder", url=url)
        error.errno = errno.EISDIR
        raise error
    if _is_changed(place.key, place.kind):
        raise StorageError("obstore cannot ask for a key with empty, '.' or '..' parts, or odd signs", url=url)
    return place, place.key


def _find_folder(url: str) -> tuple[CloudPlace, str]:
    place = parse_cloud_url(url)
    prefix = place.key.removesuffix("/")
    if prefix and _is_changed(prefix, place.kind):
        raise StorageError("obstore cannot ask for a name with empty, '.' or '..' parts, or odd signs", url=url)
    return place, prefix


def _is_changed(key: str, kind: str) -> bool:
    """Tell whether obstore would ask for another key, or refuse this one."""
    if kind == "az" and "\\" in key:
        return True  # Azure takes it for a slash
    return any(
        part in {"", ".", ".."} or any(ord(sign) < 32 or ord(sign) == 127 for sign in part) for part in key.split("/")
    )


def _mode(client: Bucket, url: str, key: str, expect: str | None) -> str | dict[str, str]:
    """Return the condition of a write as obstore takes it, if it holds now.

    That it holds now is looked at because some that speak S3 take no notice of conditions.
    """
    if expect is None:
        return "overwrite"
    try:
        meta = client.head(url, key)
    except NotFoundError:
        if expect != ABSENT:
            raise not_written(url, "it was removed") from None
        return "create"
    if expect == ABSENT:
        raise not_written(url, "it is there already")
    if identity_of(meta) != expect:
        raise not_written(url)
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _gather(pieces: Iterator[memoryview], most: int) -> tuple[list[memoryview], int]:
    """Take pieces until they hold more than `most` bytes; return them and their size."""
    taken: list[memoryview] = []
    size = 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size > most:
            break
    return taken, size
