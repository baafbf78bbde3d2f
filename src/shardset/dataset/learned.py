"""Indexes that were read from the headers of shards elsewhere, kept on this machine, so that it is done once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from shardset.errors import IndexFileError
from shardset.files import cache_root
from shardset.index.sidecar import dump_sidecar, parse_sidecar
from shardset.storage.cache_entry import EntryInfo, entry_name, shown_url
from shardset.storage.cache_files import DamagedEntryError, NotCachedError
from shardset.storage.cache_folder import CacheFolder
from shardset.storage.store import UNKNOWN, url_name
from shardset.storage.threads import pause

if TYPE_CHECKING:
    from pathlib import Path

    from shardset.index.table import ShardIndex
    from shardset.storage.store import ObjectInfo

logger = logging.getLogger(__name__)

_TRIES: Final = 100
_WAIT: Final = 0.01

LEARNED_LIMIT: Final = 10 << 30
"""Bytes that all these indexes may have together; those used least lately go first."""


def learned_folder() -> Path:
    """Return where these indexes lie, a cache like that of shards: ``shardset cache`` lists, clears and verifies it."""
    return cache_root() / "indexes"


def load_learned(shard: ObjectInfo, *, captions: bool, geometry: bool) -> ShardIndex | None:
    """Return the index that was learned of this version of a shard, or None."""
    if shard.identity == UNKNOWN:
        return None
    folder = CacheFolder(learned_folder(), LEARNED_LIMIT)
    try:
        block = folder.open(_name(shard, captions=captions, geometry=geometry))
        if block is None:
            return None
        return parse_sidecar(bytes(block.view()), path=shown_url(shard.url), shard_size=shard.size).index
    except (DamagedEntryError, NotCachedError, IndexFileError) as error:
        logger.warning("a learned index is not used: %s", error)
        return None


def save_learned(shard: ObjectInfo, index: ShardIndex, *, captions: bool, geometry: bool) -> None:
    """Keep the index of a shard. Where that cannot be, the shard is simply read again another time."""
    if shard.identity == UNKNOWN:
        return
    name = _name(shard, captions=captions, geometry=geometry)
    payload = dump_sidecar(index, name=url_name(shard.url))
    info = EntryInfo(shown_url(shard.url), shard.identity, len(payload), 0, len(payload))
    folder = CacheFolder(learned_folder(), LEARNED_LIMIT)
    try:
        claim = folder.claim(name)
        for _ in range(_TRIES):
            if claim is not None or folder.has(name):
                break
            # Another process is just doing the same, or only looks whether this one has died.
            pause(_WAIT)
            claim = folder.claim(name)
        if claim is None:
            return
        part = folder.begin(claim, name, info, stated=None, let_go=lambda: None, removed=[])
        try:
            part.write(memoryview(payload))
            part.publish()
            part.close()
        finally:
            part.discard()
    except NotCachedError as error:
        logger.info("the index of %s is not kept: %s", info.url, error)


def _name(shard: ObjectInfo, *, captions: bool, geometry: bool) -> str:
    what = f"index captions={captions} geometry={geometry} of {shard.identity}"
    return entry_name(shard.url, what, shard.size, 0, shard.size)
