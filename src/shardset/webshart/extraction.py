"""Extraction as webshart has it: an index for each shard, in a folder laid out like the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardset.tasks import extract_indexes

from .discovery import as_source

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from shardset.policy import Policy
    from shardset.tasks import ExtractResult


class MetadataExtractor:
    """Makes indexes of tars.

    Args:
        hf_token: Token for the Hub, which nothing here reads yet.
    """

    def __init__(self, hf_token: str | None = None) -> None:
        self._hf_token = hf_token

    def extract_metadata(  # noqa: PLR0917 - webshart's order
        self,
        source: str | os.PathLike[str],
        destination: str | os.PathLike[str],
        checkpoint_dir: str | os.PathLike[str] | None = None,
        max_workers: int = 2,
        shard_range: tuple[int, int] | None = None,
        include_image_geometry: bool = False,
        *,
        policy: Policy | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ExtractResult:
        """Write the index of every tar, as `shardset.tasks.extract_indexes` does.

        Args:
            source: A folder, searched at any depth, a tar, or whatever else `discover_dataset` takes.
            destination: Folder for the indexes, laid out like the tars.
            checkpoint_dir: Folder for files that say which tars are done, so that the next run need not open them.
            max_workers: The most processes to use; little data is done in this one.
            shard_range: Take only these tars, ``(start, end)``, half-open, of all in the order of their names.
            include_image_geometry: Read the pixel size of images too.
            policy: What to do about damaged tars; by default they raise.
            progress: Called with (tars done, tars in all).

        Returns:
            How many indexes were written and tars skipped, and a report of what was wrong.

        Raises:
            As `shardset.tasks.extract_indexes`.
        """
        return extract_indexes(
            as_source(source),
            destination,
            geometry=include_image_geometry,
            shard_range=shard_range,
            checkpoints=checkpoint_dir,
            max_workers=max_workers,
            policy=policy,
            progress=progress,
        )

    def __repr__(self) -> str:
        return "MetadataExtractor()"
