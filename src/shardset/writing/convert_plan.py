"""Which shards a conversion writes: names, how samples are divided among them, and whether they may be there."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from shardset.errors import NotFoundError, StorageError, without_secrets
from shardset.formats.patterns import parse_numbered
from shardset.storage.store import url_join, url_name

from .shard_files import ShardNames
from .tfrecord_frames import named_compression, parse_compression

if TYPE_CHECKING:
    from shardset.dataset.discover import Found
    from shardset.storage.store import Store

    from .tfrecord_frames import Compression

Target = Literal["tar", "tfrecord"]
_SUFFIXES: Final = {"": ".tfrecord", "GZIP": ".tfrecord.gz", "ZLIB": ".tfrecord.zlib"}
_FILE: Final = {
    "tar": re.compile(r".*\.tar", re.IGNORECASE | re.DOTALL),
    "tfrecord": re.compile(
        r".*\.(?:tfrecords?|tf_records?|tfrec|tfr|records?)(?:\.(?:gz|gzip|zlib))?|.*\.(?:gz|gzip|zlib)",
        re.IGNORECASE | re.DOTALL,
    ),
}
_SHARD_SUFFIX: Final = re.compile(
    r"(?:\.tar|(?:\.(?:tfrecords?|tf_records?|tfrec|tfr|records?))?(?:\.(?:gz|gzip|zlib))?)\Z", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The shards to write.

    Attributes:
        urls: Their names, as many as there are shards in the source, if each becomes one; else None.
        names: The names of a set, or of one file, that all samples go into; None if each shard becomes one.
        total: Into how many shards the samples are divided evenly; None if `max_bytes` and `max_records` say.
        max_bytes: The most bytes of a shard, or None.
        max_records: The most samples of a shard, or None.
        compression: Of TFRecord.
    """

    urls: tuple[str, ...] | None
    names: ShardNames | None
    total: int | None
    max_bytes: int | None
    max_records: int | None
    compression: Compression

    def check_free(self, store: Store) -> None:
        """Refuse to write over what is there, or beside shards that would be taken for some of these.

        Raises:
            StorageError: Something is there.
        """
        known = self.urls
        if self.names is not None:
            self.names.refuse_others()
            known = () if self.total is None else tuple(self.names.urls(self.total))
        for url in known or ():
            try:
                store.info(url)
            except NotFoundError:
                continue
            except StorageError as error:
                if error.errno != errno.EISDIR:
                    raise
            found = StorageError("not written: it is there already", url=url, hint="use force to write over it")
            found.errno = errno.EEXIST
            raise found


def make_plan(
    found: Found,
    destination: str,
    to: Target,
    *,
    shards: int | None,
    max_bytes: int | None,
    max_records: int | None,
    compression: str | None,
) -> Plan:
    """Work out what `convert` is to write.

    Raises:
        ValueError: The arguments contradict each other.
    """
    for label, number in (("shards", shards), ("max_bytes", max_bytes), ("max_records", max_records)):
        if number is not None and number <= 0:
            raise ValueError(f"{label}={number}: it must be positive")
    is_rolled = max_bytes is not None or max_records is not None
    if shards is not None and is_rolled:
        raise ValueError("shards says how many there are, and max_bytes and max_records how large: give one of both")
    named = ShardNames(destination)
    is_counted, is_file = not named.is_one, _FILE[to].fullmatch(destination) is not None
    if not is_file and _FILE["tar" if to == "tfrecord" else "tfrecord"].fullmatch(destination):
        raise ValueError(f"{without_secrets(destination)} is no name for {to}")
    packing = parse_compression(named_compression(destination) if compression is None and is_file else compression)
    if packing and to == "tar":
        raise ValueError("a tar is not compressed: its members could not be read one by one any more")
    if not is_counted and not is_file and shards is None and not is_rolled:
        return Plan(_mirrored(found, destination, to, packing), None, None, None, None, packing)
    if is_counted:
        if named.total is not None and (is_rolled or shards not in {None, named.total}):
            raise ValueError(f"{without_secrets(destination)} says how many shards there are: leave the rest out")
        if named.total is None and not is_rolled and shards is None:
            raise ValueError(f"{without_secrets(destination)}: give shards, max_bytes or max_records")
        names = named
    elif is_file:
        names = ShardNames(destination, is_set=is_rolled or shards is not None)
    else:
        names = ShardNames(url_join(destination, f"shard@*{_suffix(to, packing)}"))
    total = None if is_rolled else shards or named.total
    names.total = total
    return Plan(None, names, total, max_bytes, max_records, packing)


def _suffix(to: Target, compression: Compression) -> str:
    return ".tar" if to == "tar" else _SUFFIXES[compression]


def _mirrored(found: Found, folder: str, to: Target, compression: Compression) -> tuple[str, ...]:
    """Return a name for each shard: its own with another suffix, or with one more where two would be the same."""
    suffix = _suffix(to, compression)
    names = [_stem(url_name(shard.url)) for shard in found.shards]
    folders = [shard.name.rpartition("/") for shard in found.shards]
    paths = [f"{parent}{slash}{name}" for (parent, slash, _), name in zip(folders, names, strict=True)]
    if len(set(paths)) < len(paths):
        pairs = zip(folders, found.shards, strict=True)
        paths = [f"{parent}{slash}{url_name(shard.url)}" for (parent, slash, _), shard in pairs]
    return tuple(url_join(folder, path + suffix) for path in paths)


def _stem(name: str) -> str:
    """Return a shard's name without the suffix that says what it is: also that before a number."""
    numbered = parse_numbered(name)
    if numbered is None:
        return _SHARD_SUFFIX.sub("", name) or name
    count = name[len(numbered.prefix) : len(name) - len(numbered.suffix)]
    return _SHARD_SUFFIX.sub("", numbered.prefix) + count + _SHARD_SUFFIX.sub("", numbered.suffix)
