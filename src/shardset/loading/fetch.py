"""Payloads of files as entries: one, many from anywhere, or a run of one shard; and what happens if reading fails."""

from __future__ import annotations

import operator
import os
from functools import partial
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.dataset.dataset import Dataset
from shardset.dataset.opening import discover_dataset
from shardset.errors import FormatError, IndexFileError, StorageError
from shardset.policy import Place, settle
from shardset.storage.threads import run_all

from .entry import TarFileEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardset.dataset.files import ShardFiles
    from shardset.policy import Policy
    from shardset.storage.store import Reader

    OpenShard = tuple[ShardFiles, Reader | None, list[int], list[int], list[int], memoryview, int]

READ_ERRORS: Final = (StorageError, FormatError, IndexFileError)
"""What a policy may skip: the shard cannot be opened or read, is damaged, or has another one's index."""
_MAPPED_AT_ONCE: Final = 256
_SHARDS_AT_ONCE: Final = 16


class Unread(NamedTuple):
    """A file that could not be read, which the policy does not raise for. Whoever gives it asks the policy about it.

    Attributes:
        files: The files of its shard.
        row: Its row.
        error: Why.
        entry: What is given if the policy has a value for its payload.
    """

    files: ShardFiles
    row: int
    error: StorageError | FormatError | IndexFileError
    entry: TarFileEntry | None = None


class Entries(NamedTuple):
    """Files that were read at once.

    Attributes:
        files: In the order asked; None for one that is too large or could not be read.
        unread: What could not be read, by its place among them.
        are_mapped: They come out of memory maps. Records do not, since their checksums are compared.
    """

    files: list[TarFileEntry | None]
    unread: dict[int, Unread]
    are_mapped: bool


NO_ENTRIES: Final = Entries([], {}, are_mapped=True)


class Run(NamedTuple):
    """Files of a shard that were read at once.

    Attributes:
        files: All files of the shard.
        numbers: Those that were read.
        rows: Their rows.
        payloads: What they hold; None for one that is to be left out. Failures count when they are come to.
        stop: The number behind the last.
        is_mapped: They lie in a memory map.
    """

    files: ShardFiles
    numbers: Sequence[int]
    rows: list[int]
    payloads: Iterable[Any]
    stop: int
    is_mapped: bool


class Fetcher:
    """Reads files of one dataset into entries.

    Attributes:
        dataset: Where they are.
        load: Read payloads; otherwise entries have empty `data`.
        max_file_size: Larger files are left out, and larger sidecars count as missing.
        copy: Give bytes; otherwise views.
        policy: What to do if reading fails (code ``read_failed``). A skipped file is left out and counted in the
            dataset's report; if the policy's `defaults` have a value for ``"data"``, the file is given with that.
    """

    def __init__(self, dataset: Dataset, *, load: bool, max_file_size: int, copy: bool, policy: Policy) -> None:
        self.dataset = dataset
        self.load = load
        self.max_file_size = max_file_size
        self.copy = copy
        self.policy = policy

    def files(self, shard_index: int) -> ShardFiles:
        """Return the files of a shard, without sidecars that are too large.

        Raises:
            As `Dataset.files`.
        """
        return self.dataset.files(shard_index).within(self.max_file_size)

    def one(self, shard_index: int, sample_index: int) -> TarFileEntry | None:
        """Load one sample by its number in its shard; None if it is too large, or skipped.

        Raises:
            IndexError: There is no such shard or sample.
            StorageError: Reading failed, and the policy says to raise.
        """
        files = self.dataset.files(shard_index)
        if files.largest > self.max_file_size:
            files = files.within(self.max_file_size)
        rows = files.sample_rows
        if not 0 <= sample_index < len(rows):
            raise IndexError(f"sample index {sample_index} out of range: shard {shard_index} has {len(rows)} samples")
        row = rows[sample_index]
        if files.lengths[row] > self.max_file_size:
            return None
        data: bytes | memoryview | None = b""
        reader = None
        try:
            reader = self.dataset.reader(shard_index)
            if self.load:
                data = files.read(reader, row) if self.copy else files.view(reader, row)
        except READ_ERRORS as error:
            data = self._instead(error, files, row)
        return None if data is None else TarFileEntry(files, row, data, shard_index, sample_index, reader)

    def many(self, locations: Sequence[tuple[int, int]], *, as_samples: bool = True) -> list[TarFileEntry | None]:
        """Load files from anywhere, in the order asked; payloads of one shard are read together.

        Args:
            locations: Shards, and in each the number of a sample, or else of a file.
            as_samples: They are samples, and entries read their sidecars.

        Raises:
            As `one`.
        """
        return self.settle_all(self.read(locations, as_samples=as_samples))

    def settle_all(self, found: Entries) -> list[TarFileEntry | None]:
        """Return files as they are given, and count those that could not be read."""
        for place, unread in found.unread.items():
            found.files[place] = self.settled(unread)
        return found.files

    def settled(self, unread: Unread) -> TarFileEntry | None:
        """Count a file that could not be read, and return it with the policy's value; None if there is none."""
        data, entry = self._given(unread), unread.entry
        if data is None or entry is None:
            return None
        entry.data = data
        return entry

    def read(self, locations: Sequence[tuple[int, int]], *, as_samples: bool) -> Entries:
        """Read files as `many` does, but leave it to `settle_all` or `settled` to count what cannot be read.

        Raises:
            As `one`.
        """
        answers: list[TarFileEntry | None] = []
        failed: dict[int, Unread] = {}
        self.dataset.load_files(shard_index for shard_index, _ in locations)
        shards: dict[int, OpenShard] = {}
        unread: dict[int, list[tuple[int, int]]] = {}
        for shard_index, number in locations:
            if shard_index not in shards:
                shards[shard_index] = self._open(shard_index, as_samples=as_samples)
            files, reader, rows, offsets, lengths, whole, size = shards[shard_index]
            if not 0 <= number < len(rows):
                what = "sample" if as_samples else "file"
                raise IndexError(f"{what} index {number} out of range: shard {shard_index} has {len(rows)} {what}s")
            row = rows[number]
            length = lengths[row]
            if length > self.max_file_size:
                answers.append(None)
                continue
            start = offsets[row]
            data: bytes | memoryview = b""
            if 0 <= start <= size - length:
                data = whole[start : start + length]
                if self.copy:
                    data = data.tobytes()
            elif self.load:
                unread.setdefault(shard_index, []).append((len(answers), row))
            answers.append(TarFileEntry(files, row, data, shard_index, number if as_samples else -1, reader))

        def read(shard_index: int) -> None:
            files, reader = shards[shard_index][:2]
            places, rows = zip(*unread[shard_index], strict=True)
            asked = (files, reader, list(rows), shard_index)
            found: list[Any] = self._read_many(*asked) or self._read_singly(*asked)
            for place, data in zip(places, found, strict=True):
                entry = answers[place]
                assert entry is not None  # noqa: S101 - it waits for its payload
                if isinstance(data, Unread):
                    answers[place], failed[place] = None, data._replace(entry=entry)
                else:
                    entry.data = bytes(data) if self.copy else data

        if unread:
            run_all([partial(read, shard_index) for shard_index in unread], _SHARDS_AT_ONCE)
        return Entries(answers, failed, not unread or all(size >= 0 for *_, size in shards.values()))

    def run(
        self, shard_index: int, start: int, stop: int | None = None, *, at_once: int = 100, most_bytes: int = 10 << 20
    ) -> Run:
        """Read some files of a shard in path order: from number `start` on, before number `stop`; none behind the last.

        Args:
            shard_index: The shard.
            start: The first.
            stop: The one to stop before.
            at_once: How many at most, where the shard is not mapped.
            most_bytes: How many bytes together, as long as that is one file at least, where the shard is not mapped.

        Raises:
            As `one`.
        """
        files = self.files(shard_index)
        reader = self._reader(shard_index) if self.load else None
        is_mapped = self._map(files, reader) is not None
        last = start + (_MAPPED_AT_ONCE if is_mapped or not self.load else at_once)
        rows = files.file_rows[start : last if stop is None else min(last, stop)]
        if self.load and not is_mapped:
            sizes = accumulate(min(files.lengths[row], self.max_file_size) for row in rows)
            rows = rows[: max(1, sum(1 for size in sizes if size <= most_bytes))]
        numbers: Sequence[int] = range(start, start + len(rows))
        behind = numbers[-1] + 1 if rows else start
        if files.largest > self.max_file_size:
            numbers = [number for number, row in enumerate(rows, start) if files.lengths[row] <= self.max_file_size]
            rows = [rows[number - start] for number in numbers]
        if not self.load:
            return Run(files, numbers, rows, repeat(b"", len(rows)), behind, is_mapped)
        payloads = self._read_many(files, reader, rows, shard_index)
        if payloads is not None:
            given: Iterable[Any] = map(memoryview.tobytes, payloads) if self.copy else payloads
        else:
            given = map(self._given, self._read_singly(files, reader, rows, shard_index))
        return Run(files, numbers, rows, given, behind, is_mapped)

    def _open(self, shard_index: int, *, as_samples: bool) -> OpenShard:
        """Return files and reader of a shard, columns of the files, and the whole shard with its size if mapped."""
        files, reader = self.files(shard_index), self._reader(shard_index)
        # The payload of a record is compared with its checksum, which `ShardFiles` does.
        is_sliced = self.load and files.index.records is None
        whole = (self._map(files, reader) if is_sliced else None) or memoryview(b"")
        size = len(whole) or -1  # without a map nothing lies in it, not even nothing
        rows = files.sample_rows if as_samples else files.file_rows
        return files, reader if as_samples else None, rows, files.offsets, files.lengths, whole, size

    def _reader(self, shard_index: int) -> Reader | None:
        """Return the reader of a shard; None if it cannot be opened, and the policy does not say to raise."""
        try:
            return self.dataset.reader(shard_index)
        except READ_ERRORS:
            if self.policy.action("read_failed") == "raise":
                raise
            return None  # whoever reads its files tries again, and settles the failure of each

    def _map(self, files: ShardFiles, reader: Reader | None) -> memoryview | None:
        """Return the whole shard if it is mapped, and can be; whoever reads its files meets what is wrong otherwise."""
        try:
            return None if reader is None or files.unfit is not None else reader.map()
        except READ_ERRORS:
            return None

    def _read_many(
        self, files: ShardFiles, reader: Reader | None, rows: list[int], shard_index: int
    ) -> list[memoryview] | None:
        """Read many payloads as views; None if one of them cannot be read, and the policy does not say to raise."""
        try:
            return files.read_many(reader or self.dataset.reader(shard_index), rows)
        except READ_ERRORS:
            if self.policy.action("read_failed") == "raise":
                raise
            return None

    def _read_singly(self, files: ShardFiles, reader: Reader | None, rows: list[int], shard_index: int) -> list[Any]:
        """Read payloads one by one; `Unread` where that fails."""
        return [self._payload(files, reader, row, shard_index) for row in rows]

    def _payload(self, files: ShardFiles, reader: Reader | None, row: int, shard_index: int) -> Any:
        try:
            return files.view(reader or self.dataset.reader(shard_index), row)
        except READ_ERRORS as error:
            return Unread(files, row, error)

    def _given(self, found: Any) -> Any:
        data = self._instead(found.error, found.files, found.row) if isinstance(found, Unread) else found
        return None if data is None else bytes(data) if self.copy else data

    def _instead(self, error: StorageError | FormatError | IndexFileError, files: ShardFiles, row: int) -> Any:
        """Apply the policy to a payload that cannot be read: raise, or count it and return its value, or None."""
        place = Place(files.url, files.offsets[row], files.names[row], error.message)
        settle(error, "read_failed", place, self.policy, self.dataset.report)
        return self.policy.defaults.get("data")


def as_dataset(
    dataset_or_path: Any, *, hf_token: str | None = None, policy: Policy | None = None, subfolder: str | None = None
) -> Dataset:
    """Return a dataset as it is, or find the one that a source names.

    Raises:
        TypeError: It is neither.
        As `discover_dataset`.
    """
    if isinstance(dataset_or_path, Dataset):
        return dataset_or_path
    if not isinstance(dataset_or_path, str | os.PathLike | list | tuple):
        raise TypeError(f"Expected either a DiscoveredDataset or a path string, not {dataset_or_path!r}")
    return discover_dataset(dataset_or_path, hf_token, subfolder, policy=policy)


def checked_batch_size(value: int | None) -> int | None:
    """Return a batch size as it should be.

    Raises:
        ValueError: It is not positive.
    """
    if value is not None and operator.index(value) < 1:
        raise ValueError(f"batch_size is {value}, not positive")
    return value
