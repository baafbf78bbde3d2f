"""A loader with a cursor over the files of a dataset, in webshart's numbering."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.dataset.dataset import Dataset
from shardset.dataset.opening import discover_dataset
from shardset.errors import StateError, without_secrets
from shardset.storage.store import url_name
from shardset.storage.threads import Jobs, run_all

from .entry import TarFileEntry

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from shardset.dataset.files import ShardFiles
    from shardset.storage.store import Reader
    from shardset.storage.threads import Job

    OpenShard = tuple[ShardFiles, Reader, list[int], list[int], list[int], memoryview, int]

STATE_VERSION: Final = 4
_AT_ONCE: Final = 256
_BYTES_AT_ONCE: Final = 16 << 20
_SHARDS_AT_ONCE: Final = 16


class _Batch(NamedTuple):
    """Files that were read at once: their numbers and rows, what they hold, and the number behind the last."""

    files: ShardFiles
    numbers: Sequence[int]
    rows: list[int]
    payloads: Iterable[Any]
    stop: int


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
        self._dataset.load_files(shard_index for shard_index, _ in locations)
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

            def read(shard_index: int) -> None:
                files, reader = shards[shard_index][:2]
                waiting = unread[shard_index]
                views = files.read_many(reader, [row for _, row in waiting])
                for (entry, _), view in zip(waiting, views, strict=True):
                    entry.data = view.tobytes() if self._copy else view

            run_all([partial(read, shard_index) for shard_index in unread], _SHARDS_AT_ONCE)
        return answers

    def _open_shard(self, shard_index: int) -> OpenShard:
        """Return files and reader of a shard, columns of the files, and the whole shard with its size if mapped."""
        files, reader = self._dataset.files(shard_index), self._dataset.reader(shard_index)
        whole = (reader.map() if self._load else None) or memoryview(b"")
        size = len(whole) or -1  # without a map nothing lies in it, not even nothing
        return files, reader, files.sample_rows, files.offsets, files.lengths, whole, size

    def __iter__(self) -> Iterator[TarFileEntry]:
        return self._iterate()

    def __next__(self) -> TarFileEntry:
        if self._iterator is None:
            self._iterator = self._iterate()
        try:
            return next(self._iterator)
        except BaseException:  # a generator that has raised would only ever say that it is at its end
            self._iterator = None
            raise

    def _iterate(self) -> Iterator[TarFileEntry]:
        # Whatever moves the cursor between two files, another iterator or a state, is followed.
        ahead: Job[_Batch] | None = None
        place = (-1, -1)
        while self._shard < self.num_shards:
            shard_index, start = self._shard, self._file
            batch = ahead.finish() if ahead is not None and place == (shard_index, start) else None
            batch = batch or self._read_batch(shard_index, start)
            place, ahead = (shard_index, batch.stop), None
            if batch.stop == start:
                self._shard, self._file = shard_index + 1, 0
                continue
            if self._load and self._dataset.is_remote:
                ahead = Jobs().submit(partial(self._read_batch, *place))
            following = start
            payloads = map(memoryview.tobytes, batch.payloads) if self._copy and self._load else batch.payloads
            for number, row, data in zip(batch.numbers, batch.rows, payloads, strict=False):
                if self._file != following or self._shard != shard_index:
                    break
                self._file = following = number + 1
                yield TarFileEntry(batch.files, row, data, shard_index, number)
            else:
                if self._file == following and self._shard == shard_index:
                    self._file = batch.stop

    def _read_batch(self, shard_index: int, start: int) -> _Batch:
        """Read some files of a shard from number `start` on, in path order; none behind the last."""
        files, reader = self._dataset.files(shard_index), self._dataset.reader(shard_index)
        rows = files.file_rows[start : start + _AT_ONCE]
        if self._load and reader.map() is None:
            sizes = accumulate(min(files.lengths[row], self._max_file_size) for row in rows)
            rows = rows[: max(1, sum(1 for size in sizes if size <= _BYTES_AT_ONCE))]
        numbers: Sequence[int] = range(start, start + len(rows))
        stop = numbers[-1] + 1 if rows else start
        if files.largest > self._max_file_size:
            numbers = [number for number, row in enumerate(rows, start) if files.lengths[row] <= self._max_file_size]
            rows = [rows[number - start] for number in numbers]
        payloads: Iterable[Any] = files.read_many(reader, rows) if self._load else repeat(b"", len(rows))
        return _Batch(files, numbers, rows, payloads, stop)

    def prepare_shards_ahead(self, num_shards: int = 1) -> list[str]:
        """Download the shards that come next in the background, the current one first.

        Does nothing without `Dataset.enable_shard_cache`. A download that fails raises where its shard is read.

        Args:
            num_shards: How many shards to look at from the cursor on.

        Returns:
            File names of those whose download this call began.
        """
        ahead = range(self._next_shard(), min(self._next_shard() + num_shards, self.num_shards))
        cache = self._dataset.cache
        return [] if cache is None else [self._file_name(index) for index in cache.prepare(ahead)]

    def prepare_next_shard(self) -> bool:
        """Download the first shard, from the current one on, that is neither cached nor on its way.

        Returns:
            Whether there is one, and a shard cache for it.
        """
        cache = self._dataset.cache
        return cache is not None and any(cache.prepare([index]) for index in range(self._next_shard(), self.num_shards))

    def prepare_shard_by_name(self, filename: str) -> bool:
        """Download a shard in the background.

        Args:
            filename: Its file name or its path below the source, with or without the suffix.

        Returns:
            Whether this call began it: False if it is cached or on its way, and without a shard cache.

        Raises:
            ValueError: There is no such shard.
        """
        index, cache = self._find_shard(filename), self._dataset.cache
        return cache is not None and bool(cache.prepare([index]))

    def will_block(self) -> bool:
        """Tell whether the next file waits for the download of its shard."""
        cache, following = self._dataset.cache, self._next_shard()
        return cache is not None and following < self.num_shards and not cache.is_cached(following)

    def is_shard_locked(self, name: str) -> bool:
        """Tell whether any process downloads a shard now. `name` is as for `prepare_shard_by_name`."""
        index, cache = self._find_shard(name), self._dataset.cache
        return cache is not None and cache.is_downloading(index)

    def get_next_shard_info(self) -> dict[str, Any] | None:
        """Return ``index, name, tar_path, is_cached`` of the shard that the next file comes from; None at the end."""
        following = self._next_shard()
        return self._shard_status(following) if following < self.num_shards else None

    def get_shard_cache_status(self, filename: str) -> dict[str, Any]:
        """Return ``index, name, tar_path, is_cached, cur_filesize`` of a shard.

        ``cur_filesize`` is how many bytes of it are in the cache. `filename` is as for `prepare_shard_by_name`.
        """
        index, cache = self._find_shard(filename), self._dataset.cache
        return {**self._shard_status(index), "cur_filesize": (0 if cache is None else cache.progress(index)) or 0}

    def get_lookahead_cache_status(self, lookahead: int = 5) -> list[dict[str, Any]]:
        """Return ``index, name, is_cached`` of the next shards, the current one first."""
        ahead = range(self._next_shard(), min(self._next_shard() + lookahead, self.num_shards))
        return [
            {name: value for name, value in self._shard_status(index).items() if name != "tar_path"} for index in ahead
        ]

    def _shard_status(self, index: int) -> dict[str, Any]:
        cache = self._dataset.cache
        return {
            "index": index,
            "name": self._file_name(index),
            "tar_path": without_secrets(self._dataset.shard_url(index)),
            "is_cached": cache is not None and cache.is_cached(index),
        }

    def _file_name(self, index: int) -> str:
        return url_name(self._dataset.shard_url(index))

    def _next_shard(self) -> int:
        """Return the shard that the next file comes from: behind the last file of one, the one after it."""
        is_behind = self._file > 0 and self._file >= self._dataset.get_shard_file_count(self._shard)
        return self._shard + is_behind

    def _find_shard(self, name: str) -> int:
        found = [index for index in range(self.num_shards) if self._file_name(index) in {name, f"{name}.tar"}]
        stem = name[:-4] if name.lower().endswith(".tar") else name
        return found[0] if len(found) == 1 else self._dataset.shard_number(stem)

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
