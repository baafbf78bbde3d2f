"""What the loader's calls about the cache of shards answer: which come next, which are here, which are on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardset.errors import without_secrets
from shardset.storage.store import url_name

if TYPE_CHECKING:
    from shardset.dataset.dataset import Dataset


class Lookahead:
    """A dataset's shards from some place on, and its cache of them."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def prepare(self, start: int, count: int) -> list[str]:
        """Download `count` shards from `start` on in the background; return file names of those that this began."""
        cache = self._dataset.cache
        ahead = range(start, min(start + count, self._dataset.num_shards))
        return [] if cache is None else [self.file_name(index) for index in cache.prepare(ahead)]

    def prepare_next(self, start: int) -> bool:
        """Download the first shard, from `start` on, that is neither cached nor on its way; tell whether there is."""
        cache = self._dataset.cache
        return cache is not None and any(cache.prepare([index]) for index in range(start, self._dataset.num_shards))

    def prepare_named(self, name: str) -> bool:
        """Download a shard in the background; tell whether this call began it."""
        index, cache = self.find(name), self._dataset.cache
        return cache is not None and bool(cache.prepare([index]))

    def blocks(self, start: int) -> bool:
        """Tell whether reading shard `start` waits for its download."""
        cache = self._dataset.cache
        return cache is not None and start < self._dataset.num_shards and not self.is_here(start)

    def is_locked(self, name: str) -> bool:
        """Tell whether any process downloads a shard now."""
        index, cache = self.find(name), self._dataset.cache
        return cache is not None and cache.is_downloading(index)

    def is_here(self, index: int) -> bool:
        """Tell whether all of a shard is on this machine: in the cache, or there from the start."""
        cache = self._dataset.cache
        return not self._dataset.is_remote or (cache is not None and cache.is_cached(index))

    def status(self, index: int) -> dict[str, Any]:
        """Return ``index, name, tar_path, is_cached`` of a shard."""
        return {
            "index": index,
            "name": self._dataset.info(index).name,
            "tar_path": without_secrets(self._dataset.shard_url(index)),
            "is_cached": self.is_here(index),
        }

    def progress(self, name: str) -> dict[str, Any]:
        """Return `status` of a shard, and with ``cur_filesize`` and ``total_size`` how many bytes of it are here."""
        index, cache = self.find(name), self._dataset.cache
        size = self._dataset.info(index).info.size
        here = size if not self._dataset.is_remote else (None if cache is None else cache.progress(index)) or 0
        return {**self.status(index), "cur_filesize": here, "total_size": size}

    def file_name(self, index: int) -> str:
        """Return the file name of a shard."""
        return url_name(self._dataset.shard_url(index))

    def find(self, name: str) -> int:
        """Return the number of a shard by its path below the source or its file name, with or without ``.tar``.

        Raises:
            ValueError: There is none, or several shards in different folders have that file name.
        """
        stem = name[:-4] if name.lower().endswith(".tar") else name
        names = [self._dataset.info(index).name for index in range(self._dataset.num_shards)]
        if stem in names:
            return names.index(stem)
        found = [index for index in range(len(names)) if self.file_name(index) in {name, f"{name}.tar"}]
        if len(found) > 1:
            listed = ", ".join(repr(names[index]) for index in found[:3])
            raise ValueError(f"Shard with filename {name!r} is not one but {len(found)}: {listed}")
        if not found:
            raise ValueError(f"Shard with filename {name!r} not found in {self._dataset.name}")
        return found[0]
