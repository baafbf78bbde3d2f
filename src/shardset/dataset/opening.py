"""From a source, or a catalog, to a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardset.errors import without_secrets
from shardset.index.catalog import open_catalog
from shardset.policy import Policy, Report
from shardset.storage.anywhere import AnyStore, store_for
from shardset.storage.store import Store, url_scheme

from .catalogs import IndexOptions
from .dataset import Dataset
from .discover import find_shards
from .shards import Origin

if TYPE_CHECKING:
    from .discover import Source


def discover_dataset(
    source: Source,
    hf_token: str | None = None,
    subfolder: str | None = None,
    metadata: str | os.PathLike[str] | None = None,
    *,
    store: Store | None = None,
    policy: Policy | None = None,
) -> Dataset:
    """Find the shards that `source` names, and make them a dataset. Reads no shard yet.

    Args:
        source: A folder (searched at any depth), a shard, a glob, a brace pattern, a file that lists some of these, or
            a list of these; on this machine's disks, a web server, or in a bucket.
        hf_token: Token for the Hub; by default that in the environment's ``HF_TOKEN``.
        subfolder: Look only below this folder of `source`.
        metadata: Folder of the sidecar indexes, laid out like the shards, in any place; by default they stand beside
            their shards.
        store: Where the source lives; by default the place that its scheme names.
        policy: What to do about damaged shards; by default they raise.

    Raises:
        NotFoundError: A name leads nowhere, or no shard was found.
        StorageError: Looking failed.
    """
    report = Report()
    found = find_shards(source, subfolder=subfolder, store=store, report=report)
    folder = None if metadata is None else os.fspath(metadata)
    if folder is not None and not url_scheme(folder):
        folder = str(Path(folder).absolute())
    options = IndexOptions(metadata=folder)
    asked: str | list[str]
    if isinstance(source, str | os.PathLike):
        asked = without_secrets(os.fspath(source))
    else:
        asked = [without_secrets(os.fspath(item)) for item in source]
    return Dataset(
        found,
        store_for(store, found.root, folder),
        options=options,
        policy=policy,
        report=report,
        origin=Origin(asked, subfolder),
        hf_token=hf_token or os.environ.get("HF_TOKEN"),
    )


def open_dataset(
    catalog: str | os.PathLike[str], *, store: Store | None = None, policy: Policy | None = None
) -> Dataset:
    """Open a dataset by its catalog alone, without looking for its shards. They are looked at when they are read.

    Raises:
        FileNotFoundError: There is no catalog in that folder.
        IndexFileError: The catalog is malformed, or of another version.
    """
    opened = open_catalog(Path(catalog))
    return Dataset(None, store or AnyStore(), catalog=opened, policy=policy)
