"""A loader with a cursor over the files of a dataset, in webshart's numbering."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from shardset.dataset.dataset import Dataset, discover_dataset
from shardset.errors import StateError

from .entry import TarFileEntry

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from shardset.dataset.files import ShardFiles
    from shardset.storage.store import Reader

    OpenShard = tuple[ShardFiles, Reader, list[int], list[int], list[int], memoryview, int]

STATE_VERSION: Final = 4
_AT_ONCE: Final = 256


class TarDataLoader:
    """Gives the files of a dataset one after the other, and its samples by number, as webshart does.

    Iteration gives every file, sidecars too: shards in order, files in path order. There is one cursor: a second
    iterator goes on where the first one stands.

    Args:
        dataset: A dataset, or a source for `discover_dataset`.
        load_file_data: Read payloads; otherwise entries have empty `data`.
        max_file_size: Larger files are left out everywhere.
        copy: Give bytes; otherwise views, which hold on to the memory map of their shard. Iteration and `load_samples`
            copy out of that map too: what `Sample.view` says of files that are cut short holds for them.

    Raises:
        As `discover_dataset`, for a source.
    """

    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        load_file_data: bool = True,
        max_file_size: int = 50_000_000,
        *,
        copy: bool = True,
    ) -> None:
        self._dataset = dataset if isinstance(dataset, Dataset) else discover_dataset(dataset)
        self._load = load_file_data
        self._max_file_size = max_file_size
        self._copy = copy
        self._shard = 0
        self._file = 0
        self._iterator: Iterator[TarFileEntry] | None = None

    @property
    def dataset(self) -> Dataset:
        """What is loaded."""
        return self._dataset

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return self._dataset.num_shards

    @property
    def current_shard_index(self) -> int:
        """The shard that the cursor stands in; `num_shards` at the end."""
        return self._shard

    @property
    def current_file_index(self) -> int:
        """The next file in that shard."""
        return self._file

    @property
    def load_file_data(self) -> bool:
        """Whether payloads are read."""
        return self._load

    @property
    def max_file_size(self) -> int:
        """The largest file that is given, in bytes."""
        return self._max_file_size

    def load_sample(self, shard_index: int, sample_index: int) -> TarFileEntry | None:
        """Load one sample: a file that is no sidecar, by its place among those of its shard in path order.

        Returns:
            The entry, or None if the payload is larger than `max_file_size`.

        Raises:
            IndexError: There is no such shard or sample.
            StorageError: Reading failed.
        """
        files = self._dataset.files(shard_index)
        rows = files.sample_rows
        if not 0 <= sample_index < len(rows):
            raise IndexError(f"sample index {sample_index} out of range: shard {shard_index} has {len(rows)} samples")
        row = rows[sample_index]
        if files.lengths[row] > self._max_file_size:
            return None
        reader = self._dataset.reader(shard_index)
        data: bytes | memoryview = b""
        if self._load:
            data = files.read(reader, row) if self._copy else files.view(reader, row)
        return TarFileEntry(files, row, data, shard_index, sample_index, reader)

    def load_samples(self, locations: Sequence[tuple[int, int]]) -> list[TarFileEntry | None]:
        """Load many samples at once, as `load_sample` does, in the order asked.

        Payloads of one shard are read together.

        Args:
            locations: (shard, sample) pairs.

        Raises:
            As `load_sample`.
        """
        answers: list[TarFileEntry | None] = []
        shards: dict[int, OpenShard] = {}
        unread: dict[int, list[tuple[TarFileEntry, int]]] = {}
        for shard_index, sample_index in locations:
            if shard_index not in shards:
                shards[shard_index] = self._open_shard(shard_index)
            files, reader, rows, offsets, lengths, whole, size = shards[shard_index]
            if not 0 <= sample_index < len(rows):
                raise IndexError(
                    f"sample index {sample_index} out of range: shard {shard_index} has {len(rows)} samples"
                )
            row = rows[sample_index]
            length = lengths[row]
            if length > self._max_file_size:
                answers.append(None)
                continue
            start = offsets[row]
            if 0 <= start <= size - length:
                view = whole[start : start + length]
                data = view.tobytes() if self._copy else view
                answers.append(TarFileEntry(files, row, data, shard_index, sample_index, reader))
                continue
            entry = TarFileEntry(files, row, b"", shard_index, sample_index, reader)
            answers.append(entry)
            unread.setdefault(shard_index, []).append((entry, row))
        if self._load:
            for shard_index, waiting in unread.items():
                files, reader = shards[shard_index][:2]
                payloads = self._payloads(files, reader, [row for _, row in waiting])
                for (entry, _), payload in zip(waiting, payloads, strict=True):
                    entry.data = payload
        return answers

    def _open_shard(self, shard_index: int) -> OpenShard:
        """Return files and reader of a shard, columns of the files, and the whole shard with its size if mapped."""
        files, reader = self._dataset.files(shard_index), self._dataset.reader(shard_index)
        whole = (reader.map() if self._load else None) or memoryview(b"")
        size = len(whole) or -1  # without a map nothing lies in it, not even nothing
        return files, reader, files.sample_rows, files.offsets, files.lengths, whole, size

    def _payloads(self, files: ShardFiles, reader: Reader, rows: list[int]) -> Iterable[bytes | memoryview]:
        """Read payloads. A copy is made when it is taken, so that the memory of one that was let go serves the next."""
        if not self._load:
            return repeat(b"", len(rows))
        views = files.read_many(reader, rows)
        return map(memoryview.tobytes, views) if self._copy else views

    def __iter__(self) -> Iterator[TarFileEntry]:
        return self._iterate()

    def __next__(self) -> TarFileEntry:
        if self._iterator is None:
            self._iterator = self._iterate()
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise

    def _iterate(self) -> Iterator[TarFileEntry]:
        # Whatever moves the cursor between two files, another iterator or a state, is followed.
        while self._shard < self.num_shards:
            shard_index, start = self._shard, self._file
            files, reader = self._dataset.files(shard_index), self._dataset.reader(shard_index)
            rows = files.file_rows[start : start + _AT_ONCE]
            if not rows:
                self._shard, self._file = shard_index + 1, 0
                continue
            numbers = range(start, start + len(rows))
            if files.largest > self._max_file_size:
                kept = [
                    pair for pair in zip(numbers, rows, strict=True) if files.lengths[pair[1]] <= self._max_file_size
                ]
            else:
                kept = list(zip(numbers, rows, strict=True))
            payloads = self._payloads(files, reader, [row for _, row in kept])
            following = start
            for (number, row), data in zip(kept, payloads, strict=True):
                if self._file != following or self._shard != shard_index:
                    break
                self._file = following = number + 1
                yield TarFileEntry(files, row, data, shard_index, number)
            else:
                if self._file == following and self._shard == shard_index:
                    self._file = start + len(rows)

    def reset(self) -> None:
        """Move the cursor to the first file."""
        self._shard = self._file = 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the cursor stands, as plain values that JSON can hold; no credentials are among them."""
        return {
            "version": STATE_VERSION,
            "source": self._dataset.name,
            "num_shards": self.num_shards,
            "is_remote": self._dataset.is_remote,
            "current_shard": self._shard,
            "current_file_index": self._file,
            "load_file_data": self._load,
            "max_file_size": self._max_file_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move the cursor to where `state_dict` said.

        Raises:
            StateError: The state has another version, or is of a dataset with another number of shards.
        """
        version = state.get("version", STATE_VERSION)
        if version != STATE_VERSION:
            raise StateError(f"Unsupported state dict version: {version}", hint=f"this shardset reads {STATE_VERSION}")
        if state.get("num_shards", self.num_shards) != self.num_shards:
            raise StateError(
                f"the state is of a dataset with {state['num_shards']} shards, this one has {self.num_shards}"
            )
        shard, file = state.get("current_shard", 0), state.get("current_file_index", 0)
        if not isinstance(shard, int) or not isinstance(file, int) or shard < 0 or file < 0:
            raise StateError(f"the state's place is broken: shard {shard!r}, file {file!r}")
        self._shard, self._file = shard, file
        self._iterator = None

    def __repr__(self) -> str:
        return f"TarDataLoader({self._dataset!r}, shard={self._shard}, file={self._file})"
