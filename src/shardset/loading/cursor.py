"""A loader with a cursor over the files of a dataset, in webshart's numbering."""

from __future__ import annotations

import operator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from shardset.dataset.opening import discover_dataset
from shardset.errors import StateError
from shardset.policy import Place, settle
from shardset.storage.store import url_name

from .by_number import ByNumber
from .entry import TarFileEntry
from .fetch import READ_ERRORS, Fetcher, Run, as_dataset, checked_batch_size
from .lookahead import Lookahead
from .one_ahead import OneAhead
from .state import STATE_VERSION, check_ranges, parse_state, place_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardset.dataset.dataset import Dataset
    from shardset.policy import Policy

    Span = tuple[int, int, int | None]

_MEBI: Final = 1 << 20


class TarDataLoader(ByNumber):
    """Gives the files of a dataset one after the other, and its samples by number, as webshart does.

    Iteration gives every file, sidecars too: shards in order, files in path order. There is one cursor: a second
    iterator goes on where the first one stands. A read that fails raises, and the cursor stays; with a policy that
    skips, the file is left out and counted in the dataset's report, or given with the policy's value for ``"data"``
    (``Policy("skip", defaults={"data": b""})`` gives empty payloads, as webshart does).

    Args:
        dataset_or_path: A dataset, or a source for `discover_dataset`.
        load_file_data: Read payloads; otherwise entries have empty `data`.
        max_file_size: Larger files are left out everywhere, in bytes.
        buffer_size: How many files are fetched at once, where shards are not mapped into memory.
        hf_token: Token for the Hub, for a source.
        chunk_size_mb: How many MiB are fetched at once, where shards are not mapped.
        batch_size: Files in a batch of `iter_batches`.
        copy: Give bytes; otherwise views, which hold on to the memory map of their shard. Iteration and `load_samples`
            copy out of that map too: what `Sample.view` says of files that are cut short holds for them.
        policy: What to do if a file cannot be read; by default the dataset's.

    Raises:
        As `discover_dataset`, for a source.
        ValueError: `batch_size` is not positive.
    """

    def __init__(  # noqa: PLR0917 - webshart's signature
        self,
        dataset_or_path: Dataset | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        load_file_data: bool = True,
        max_file_size: int = 50_000_000,
        buffer_size: int = 100,
        hf_token: str | None = None,
        chunk_size_mb: int = 10,
        batch_size: int | None = None,
        *,
        copy: bool = True,
        policy: Policy | None = None,
    ) -> None:
        dataset = as_dataset(dataset_or_path, hf_token=hf_token, policy=policy)
        super().__init__(
            Fetcher(
                dataset, load=load_file_data, max_file_size=max_file_size, copy=copy, policy=policy or dataset.policy
            )
        )
        self._lookahead = Lookahead(dataset)
        self.buffer_size = buffer_size
        self.chunk_size_mb = chunk_size_mb
        self.batch_size = batch_size
        self._ranges: list[tuple[int, int]] | None = None
        self._range = 0
        self._shard = self._file = self._moved_to = 0
        self._iterator: Iterator[TarFileEntry] | None = None
        self._ahead: OneAhead[Run] = OneAhead()

    @property
    def current_shard_index(self) -> int:
        """The shard that the cursor stands in; `num_shards` at the end."""
        return self._shard

    @property
    def current_shard_filename(self) -> str:
        """File name of that shard; empty at the end."""
        return url_name(self._dataset.shard_url(self._shard)) if self._shard < self.num_shards else ""

    @property
    def current_file_index(self) -> int:
        """The next file in that shard."""
        return self._file

    @property
    def buffer_size(self) -> int:
        """How many files are fetched at once, where shards are not mapped. At least 1."""
        return self._buffer_size

    @buffer_size.setter
    def buffer_size(self, value: int) -> None:
        self._buffer_size = max(1, operator.index(value))

    @property
    def chunk_size_mb(self) -> int:
        """How many MiB are fetched at once, where shards are not mapped. At least 1."""
        return self._chunk_size_mb

    @chunk_size_mb.setter
    def chunk_size_mb(self, value: int) -> None:
        self._chunk_size_mb = max(1, operator.index(value))

    @property
    def batch_size(self) -> int | None:
        """Files in a batch; None if none was set."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        self._batch_size = checked_batch_size(value)

    # The cursor.

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

    def _iterate(self, end: int | None = None) -> Iterator[TarFileEntry]:
        behind = (-1, -1)
        while (span := self._span(end)) is not None:
            shard_index, start, _ = span
            run = None if (shard_index, start) == behind else self._read(span)
            if run is None or run.stop == start:
                self._move(shard_index + 1, 0)
                continue
            if run.stop == run.files.index.num_files:
                behind = (shard_index, run.stop)
            for number, row, data in zip(run.numbers, run.rows, run.payloads, strict=False):
                if data is None:
                    continue
                self._file = following = number + 1
                yield TarFileEntry(run.files, row, data, shard_index, number)
                # Whatever moves the cursor between two files, another iterator or a state, is followed.
                if self._file != following or self._shard != shard_index:
                    break
            else:
                self._file = run.stop

    def _span(self, end: int | None) -> Span | None:
        """Return the shard and file that come next, and the file of that shard to stop before; None at the end."""
        if self._ranges is None or end is not None:
            if self._shard >= self.num_shards:
                return None
            stop = None if end is None else end - self._dataset.file_start(self._shard)
            return None if stop is not None and self._file >= stop else (self._shard, self._file, stop)
        while self._range < len(self._ranges):
            stop = self._ranges[self._range][1] - self._dataset.file_start(self._shard)
            if self._shard < self.num_shards and self._file < stop:
                return self._shard, self._file, stop
            self._range += 1
            if self._range < len(self._ranges):
                self._move_to(self._ranges[self._range][0])
        return None

    def _read(self, span: Span) -> Run | None:
        """Read some files, and begin to read the next ones; None if the policy says to go on without their shard."""
        fetcher, shard_index = self._fetcher, span[0]
        try:
            run = self._ahead.take(span, self._reading(span))
        except READ_ERRORS as error:
            place = Place(self._dataset.shard_url(shard_index), message=error.message)
            settle(error, "read_failed", place, fetcher.policy, self._dataset.report)
            return None
        if fetcher.load and (not run.is_mapped or self._dataset.is_remote):
            following = self._following(span, run)
            if following is not None:
                self._ahead.begin(following, self._reading(following))
        return run

    def _reading(self, span: Span) -> Callable[[], Run]:
        """Return what reads the first files of a span, in any thread."""
        most = self._chunk_size_mb * _MEBI
        return partial(self._fetcher.run, *span, at_once=self._buffer_size, most_bytes=most)

    def _following(self, span: Span, run: Run) -> Span | None:
        """Return what most likely comes behind files that were read; None if that is nothing."""
        shard_index, _, stop = span
        if stop is not None and run.stop >= stop:
            return None
        count = run.files.index.num_files
        if run.stop < count:
            return shard_index, run.stop, stop
        return (
            (shard_index + 1, 0, None if stop is None else stop - count) if shard_index + 1 < self.num_shards else None
        )

    def _move(self, shard: int, file: int) -> None:
        self._shard, self._file, self._moved_to = shard, file, file

    def _move_to(self, number: int) -> None:
        """Move to a file by its global number; to the end if there are no more files than that."""
        start = 0
        for shard_index in range(self.num_shards):
            following = self._dataset.file_start(shard_index + 1)
            if number < following:
                self._move(shard_index, number - start)
                return
            start = following
        self._move(self.num_shards, 0)

    def reset(self) -> None:
        """Move the cursor to the first file; of the first range, if ranges are set."""
        self._range = 0
        self._move(0, 0)
        if self._ranges:
            self._move_to(self._ranges[0][0])

    def skip(self, idx: int) -> None:
        """Move the cursor to a file by its number through all shards, from 0 on, and forget any ranges.

        Args:
            idx: The number; that of all files together moves behind the last one.

        Raises:
            IndexError: It is larger, or negative.
        """
        idx = operator.index(idx)
        if idx < 0 or idx > (total := self._dataset.file_start(self.num_shards)):
            raise IndexError(f"File index {idx} out of range" + ("" if idx < 0 else f": there are {total} files"))
        self._ranges, self._range = None, 0
        self._move_to(idx)

    def shard(self, shard_idx: int | None = None, filename: str | None = None, cursor_idx: int | None = None) -> None:
        """Move the cursor into a shard, and forget any ranges.

        Args:
            shard_idx: Its number.
            filename: Instead, its file name or its path below the source, with or without ``.tar``.
            cursor_idx: The file in it, by default the first; that of all its files moves into the next shard.

        Raises:
            ValueError: Neither is given, or there is no such name.
            IndexError: There is no such shard or file.
        """
        if shard_idx is None and filename is None:
            raise ValueError("Either shard_idx or filename must be provided")
        index = self._lookahead.find(filename or "") if shard_idx is None else operator.index(shard_idx)
        if not 0 <= index < self.num_shards:
            raise IndexError(f"Shard index {index} out of range (0-{self.num_shards - 1})")
        file = operator.index(cursor_idx or 0)
        count = self._dataset.get_shard_file_count(index) if file else 0
        if not 0 <= file <= count:
            raise IndexError(f"File index {file} out of range: shard {index} has {count} files")
        self._ranges, self._range = None, 0
        self._move(index, file)

    def set_ranges(self, ranges: Iterable[tuple[int, int]] | None) -> None:
        """Go through some ranges of files only, in the order given, and move the cursor to the first.

        Args:
            ranges: Half-open, in numbers through all shards; what lies behind the last file is left out. None goes
                through everything again.

        Raises:
            ValueError: A range does not begin before its end.
        """
        self._ranges = None if ranges is None else check_ranges(ranges)
        self.reset()

    def iter_range(self, start: int, end: int) -> Iterator[TarFileEntry]:
        """Move the cursor to a file and give those before another, by their numbers through all shards.

        Raises:
            ValueError: `start` is not less than `end`.
            IndexError: There are fewer files than `start`.
        """
        if start >= end:
            raise ValueError("start must be less than end")
        self.skip(start)
        return self._iterate(operator.index(end))

    def next_batch(self) -> list[TarFileEntry] | None:
        """Return the next files, `batch_size` of them or else one; None at the end.

        Raises:
            StorageError: Reading failed; the cursor stays where it was.
        """
        place = (self._shard, self._file, self._range)
        try:
            return list(islice(self._iterate_on(), self._batch_size or 1)) or None
        except BaseException:
            self._shard, self._file, self._range = place
            raise

    def _iterate_on(self) -> Iterator[TarFileEntry]:
        while True:
            try:
                entry = next(self)
            except StopIteration:
                return
            yield entry

    def iter_batches(self) -> Iterator[list[TarFileEntry]]:
        """Give batches of files; the last may be smaller.

        Raises:
            ValueError: No `batch_size` is set.
        """
        if self._batch_size is None:
            raise ValueError("batch_size must be set to iterate batches")
        return iter(self.next_batch, None)

    # States.

    def state_dict(self) -> dict[str, Any]:
        """Return where the cursor stands, as plain values that JSON can hold; no credentials are among them.

        It is webshart's state of version 4, with ``subfolder``, ``ranges``, ``range_index`` and ``shard_names`` beside
        it.
        """
        given = self._file - self._moved_to
        return {
            "version": STATE_VERSION,
            **place_of(self._dataset),
            "current_shard": self._shard,
            "current_file_index": self._file,
            "buffer_position": (given - 1) % self._buffer_size + 1 if given > 0 else 0,
            "ranges": None if self._ranges is None else [list(pair) for pair in self._ranges],
            "range_index": self._range,
            "load_file_data": self.load_file_data,
            "max_file_size": self.max_file_size,
            "buffer_size": self._buffer_size,
            "chunk_size_mb": self._chunk_size_mb,
            "batch_size": self._batch_size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move the cursor to where `state_dict` said, and read as that loader did. webshart's states are understood.

        Raises:
            StateError: The state has another version, does not fit the dataset, or is broken; nothing was changed.
        """
        state = parse_state(state_dict, self._dataset)
        found, settings = self._fetcher, state.settings
        self._fetcher = Fetcher(
            self._dataset,
            load=settings.get("load_file_data", found.load),
            max_file_size=settings.get("max_file_size", found.max_file_size),
            copy=found.copy,
            policy=found.policy,
        )
        self.buffer_size = settings.get("buffer_size", self._buffer_size)
        self.chunk_size_mb = settings.get("chunk_size_mb", self._chunk_size_mb)
        self.batch_size = settings.get("batch_size", self._batch_size)
        self._ranges, self._range = state.ranges, state.range_index
        self._move(state.shard, state.file)
        self._iterator = None
        self._ahead.drop()

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Any],
        dataset_or_path: Dataset | str | os.PathLike[str] | None = None,
        *,
        hf_token: str | None = None,
    ) -> TarDataLoader:
        """Make a loader that stands where another one stood.

        Args:
            state_dict: What its `state_dict` gave.
            dataset_or_path: The dataset, if it has moved; by default it is looked for where it was.
            hf_token: Token for the Hub, which no state holds; by default that in the environment's ``HF_TOKEN``.

        Raises:
            StateError: The state does not fit, or names no source.
            As `discover_dataset`.
        """
        dataset: Any = dataset_or_path
        if dataset is None:
            source = state_dict.get("source")
            if not isinstance(source, str | list) or not source:
                raise StateError("No dataset provided and the state dict names no source", hint="pass the dataset")
            token = hf_token or state_dict.get("hf_token")  # which states of webshart hold
            dataset = discover_dataset(
                source, token, state_dict.get("subfolder"), metadata=state_dict.get("metadata_source")
            )
        loader = cls(dataset, hf_token=hf_token)
        loader.load_state_dict(state_dict)
        return loader

    def get_state_summary(self) -> dict[str, Any]:
        """Return ``current_shard, total_shards, current_file_index, files_processed, total_files, progress_percent``.

        ``batch_size`` stands there too. Reads every index.
        """
        total = self._dataset.file_start(self.num_shards)
        done = min(self._dataset.file_start(self._shard) + self._file, total)
        return {
            "current_shard": self._shard,
            "total_shards": self.num_shards,
            "current_file_index": self._file,
            "files_processed": done,
            "total_files": total,
            "progress_percent": 100 * done / total if total else 0.0,
            "batch_size": self._batch_size,
        }

    # The cache of shards.

    def prepare_shards_ahead(self, num_shards: int = 1) -> list[str]:
        """Download the shards that come next in the background, the current one first.

        Does nothing without `Dataset.enable_shard_cache`. A download that fails raises where its shard is read.

        Args:
            num_shards: How many shards to look at from the cursor on.

        Returns:
            File names of those whose download this call began.
        """
        return self._lookahead.prepare(self._next_shard(), num_shards)

    def prepare_next_shard(self) -> bool:
        """Download the first shard, from the current one on, that is neither cached nor on its way.

        Returns:
            Whether there is one, and a shard cache for it.
        """
        return self._lookahead.prepare_next(self._next_shard())

    def prepare_shard_by_name(self, filename: str) -> bool:
        """Download a shard in the background.

        Args:
            filename: Its file name or its path below the source, with or without the suffix.

        Returns:
            Whether this call began it: False if it is cached or on its way, and without a shard cache.

        Raises:
            ValueError: There is no such shard.
        """
        return self._lookahead.prepare_named(filename)

    def will_block(self) -> bool:
        """Tell whether the next file waits for the download of its shard."""
        return self._lookahead.blocks(self._next_shard())

    def is_shard_locked(self, shard_name: str) -> bool:
        """Tell whether any process downloads a shard now. The name is as for `prepare_shard_by_name`."""
        return self._lookahead.is_locked(shard_name)

    def get_next_shard_info(self) -> dict[str, Any] | None:
        """Return ``index, name, tar_path, is_cached`` of the shard that the next file comes from; None at the end."""
        following = self._next_shard()
        return self._lookahead.status(following) if following < self.num_shards else None

    def get_shard_cache_status(self, filename: str) -> dict[str, Any]:
        """Return ``index, name, tar_path, is_cached, cur_filesize, total_size`` of a shard.

        ``cur_filesize`` is how many bytes of it are here. `filename` is as for `prepare_shard_by_name`.
        """
        return self._lookahead.progress(filename)

    def get_lookahead_cache_status(self, lookahead: int = 5) -> list[dict[str, Any]]:
        """Return ``index, name, is_cached`` of the next shards, the current one first."""
        ahead = range(self._next_shard(), min(self._next_shard() + lookahead, self.num_shards))
        return [
            {name: value for name, value in self._lookahead.status(index).items() if name != "tar_path"}
            for index in ahead
        ]

    def _next_shard(self) -> int:
        """Return the shard that the next file comes from: behind the last file of one, the one after it."""
        is_behind = self._file > 0 and self._file >= self._dataset.get_shard_file_count(self._shard)
        return self._shard + is_behind

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}

    def __repr__(self) -> str:
        return f"TarDataLoader({self._dataset!r}, shard={self._shard}, file={self._file})"
