"""Many datasets, indexes or files at once, as webshart's batch calls have them: what fails is None, and logged."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Final

from shardset.dataset.dataset import Dataset
from shardset.errors import ShardsetError
from shardset.loading.fetch import READ_ERRORS, Fetcher
from shardset.policy import Place, Policy
from shardset.storage.threads import map_in_threads

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

_FAILURES: Final = (ShardsetError, OSError, ValueError)


def discover_datasets_batch(
    sources: Sequence[str | os.PathLike[str]],
    hf_token: str | None = None,
    subfolders: Sequence[str | None] | None = None,
) -> list[Dataset | None]:
    """Find many datasets side by side.

    Args:
        sources: As for `discover_dataset`.
        hf_token: Token for the Hub; by default that in the environment's ``HF_TOKEN``.
        subfolders: One for each source.

    Returns:
        The datasets in order; None for one that was not found, with a warning in the log.

    Raises:
        ValueError: There are not as many subfolders as sources.
    """
    if subfolders is not None and len(subfolders) != len(sources):
        raise ValueError(f"{len(subfolders)} subfolders for {len(sources)} sources")
    asked = list(zip(sources, subfolders or [None] * len(sources), strict=True))

    def discover(one: tuple[str | os.PathLike[str], str | None]) -> Dataset | None:
        from shardset import webshart  # noqa: PLC0415 - whoever replaced the name there means it here too

        source, subfolder = one
        try:
            return webshart.discover_dataset(source, hf_token=hf_token, subfolder=subfolder)
        except _FAILURES as error:
            logger.warning("a dataset was not found: %s", error)
            return None

    return list(map_in_threads(discover, asked))


def read_files_batch(
    dataset_or_datasets: Dataset | Sequence[Dataset], file_requests: Sequence[tuple[int, ...]]
) -> list[bytes | None]:
    """Read many files, those of one shard together.

    Args:
        dataset_or_datasets: A dataset, with (shard, file) pairs; or datasets, with (dataset, shard, file).
        file_requests: Which files, in webshart's numbering.

    Returns:
        The payloads in order; None for one that could not be read or is not there, counted as ``read_failed`` in its
        dataset's report, with a warning in the log.
    """
    if isinstance(dataset_or_datasets, Dataset):
        datasets, places = [dataset_or_datasets], [(0, *request) for request in file_requests]
    else:
        datasets, places = [*dataset_or_datasets], [*file_requests]
    answers: list[bytes | None] = [None] * len(places)
    for number, one in enumerate(datasets):
        wanted = [at for at, place in enumerate(places) if place[0] == number and _is_there(one, *place[1:])]
        fetcher = Fetcher(one, load=True, max_file_size=sys.maxsize, copy=True, policy=Policy("warn"))
        entries = fetcher.many([(places[at][1], places[at][2]) for at in wanted], as_samples=False)
        for at, entry in zip(wanted, entries, strict=True):
            answers[at] = None if entry is None else bytes(entry.data)
    unknown = [place for place in places if not 0 <= place[0] < len(datasets)]
    if unknown:
        logger.warning("%d files of datasets that are not given, such as %s, were not read", len(unknown), unknown[0])
    return answers


def _is_there(dataset: Dataset, shard: int, file: int) -> bool:
    try:
        count = dataset.get_shard_file_count(shard)
    except (IndexError, *READ_ERRORS) as error:
        count, why = -1, str(error)
    else:
        why = f"file index {file} out of range: shard {shard} has {count} files"
    if 0 <= file < count:
        return True
    dataset.report.add("read_failed", Place(message=why))
    logger.warning("a file was not read: %s", why)
    return False


class BatchOperations:
    """webshart's batch calls as methods."""

    def discover_datasets_batch(
        self,
        sources: Sequence[str | os.PathLike[str]],
        hf_token: str | None = None,
        subfolders: Sequence[str | None] | None = None,
    ) -> list[Dataset | None]:
        """Find many datasets, as the function of this name does."""
        return discover_datasets_batch(sources, hf_token, subfolders)

    def load_metadata_batch(self, dataset: Dataset, shard_indices: Sequence[int]) -> list[bool | dict[str, str]]:
        """Load the indexes of some shards.

        Returns:
            True for each, or ``{"error": message}`` for one that could not be loaded.
        """
        answers: list[bool | dict[str, str]] = []
        for shard_index in shard_indices:
            try:
                dataset.files(shard_index)
            except (IndexError, *_FAILURES) as error:
                answers.append({"error": str(error)})
            else:
                answers.append(True)
        return answers

    def read_files_batch(
        self, datasets: Sequence[Dataset], requests: Sequence[tuple[int, int, int]]
    ) -> list[bytes | None]:
        """Read many files of many datasets, as the function of this name does."""
        return read_files_batch(datasets, requests)


class BatchProcessor:
    """Goes through all files of a dataset in batches."""

    def __init__(self) -> None:
        self.batch_ops = BatchOperations()

    def process_dataset(
        self,
        source: str | os.PathLike[str],
        batch_size: int = 50,
        max_files: int | None = None,
        callback: Callable[[bytes], Any] | None = None,
    ) -> list[Any]:
        """Read every file of a dataset, and hand it to a function.

        Args:
            source: As for `discover_dataset`.
            batch_size: Files that are read at once.
            max_files: Read only so many.
            callback: Takes a payload; without, the payloads are the results.

        Returns:
            The results in order; None for a file that could not be read, and with a callback for an empty one too.

        Raises:
            ValueError: `batch_size` is not positive.
            As `discover_dataset`.
        """
        from shardset import webshart  # noqa: PLC0415 - whoever replaced a name there means it here too

        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, not positive")
        dataset = webshart.discover_dataset(source)
        places = [
            (shard, file) for shard in range(dataset.num_shards) for file in range(dataset.get_shard_file_count(shard))
        ][: max_files or None]
        results: list[Any] = []
        for start in range(0, len(places), batch_size):
            payloads = webshart.read_files_batch(dataset, places[start : start + batch_size])
            if callback is not None:
                payloads = [callback(payload) if payload else None for payload in payloads]
            results += payloads
        return results
