"""Discovery as webshart has it: a folder on this machine, or a dataset of the Hub."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardset.dataset.opening import discover_dataset
from shardset.errors import NotFoundError
from shardset.policy import Place
from shardset.storage.store import url_scheme

if TYPE_CHECKING:
    from shardset.dataset.dataset import Dataset

logger = logging.getLogger(__name__)

_HUB: Final = "hf://datasets/"


class DatasetDiscovery:
    """Finds datasets.

    Args:
        hf_token: Token for the Hub, which nothing here reads yet; the dataset remembers it.
        metadata_source: Folder, url or Hub dataset id of the sidecar indexes; by default they stand beside the shards.
    """

    def __init__(self, hf_token: str | None = None, metadata_source: str | os.PathLike[str] | None = None) -> None:
        self._hf_token = hf_token
        self._metadata = None if metadata_source is None else os.fspath(metadata_source)

    def discover_local(self, path: str | os.PathLike[str], subfolder: str | None = None) -> Dataset:
        """Find the shards in a folder, at any depth; or whatever else `shardset.discover_dataset` takes.

        Where some of the shards have an index and others have none, those without are left out, counted as
        ``no_index`` in the dataset's report, and logged: shards have the numbers that webshart gives them. Where none
        has an index, all are read by their headers.

        Args:
            path: The folder.
            subfolder: Look only below this folder of it.

        Raises:
            NotFoundError: There is no such folder, or no shard in it.
        """
        dataset = self._discover(os.fspath(path), subfolder)
        if dataset.is_remote:
            return dataset
        indexed = [number for number in range(dataset.num_shards) if dataset.sidecar_info(number) is not None]
        if not indexed or len(indexed) == dataset.num_shards:
            return dataset
        left_out = sorted(set(range(dataset.num_shards)) - set(indexed))
        for number in left_out:
            dataset.report.add("no_index", Place(dataset.shard_url(number)))
        logger.warning(
            "%d shards without an index are left out, %s first; shardset extract-metadata makes indexes",
            len(left_out),
            dataset.shard_url(left_out[0]),
        )
        return dataset.subset(indexed)

    def discover_huggingface(self, repo_id: str, subfolder: str | None = None) -> Dataset:
        """Find the shards of a dataset of the Hub.

        Args:
            repo_id: ``"owner/name"``.
            subfolder: Look only below this folder of it.

        Raises:
            NotFoundError: There is no such dataset, or no shard in it.
            MissingExtraError: What reads the Hub is not installed.
        """
        return self._discover(f"{_HUB}{repo_id}", subfolder)

    def _discover(self, source: str, subfolder: str | None) -> Dataset:
        metadata = None if self._metadata is None else as_source(self._metadata)
        try:
            return discover_dataset(source, self._hf_token, subfolder, metadata)
        except NotFoundError as error:
            if not error.message.startswith("no shards found"):
                raise
            what = error.message.replace("no shards found", "No shards found in dataset", 1)
            raise NotFoundError(what, url=error.url, hint=error.hint) from error

    def __repr__(self) -> str:
        return f"DatasetDiscovery(metadata_source={self._metadata!r})"


def as_source(source: str | os.PathLike[str]) -> str:
    """Return a source as ours are: ``owner/name`` is a dataset of the Hub, unless something here has that name."""
    where = os.fspath(source)
    return f"{_HUB}{where}" if is_hub_id(where) else where


def is_hub_id(name: str) -> bool:
    """Tell whether a name is ``owner/name``, and neither a url, nor a pattern, nor anything on this machine."""
    is_pair = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
    return is_pair and not url_scheme(name) and not any(sign in name for sign in "*?[{\\") and not Path(name).exists()
