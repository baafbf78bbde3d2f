"""`ShardWriter`: samples into as many tars as it takes, each with its index, as webdataset's class of that name."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn, Self

from shardset.errors import StorageError, without_secrets
from shardset.index.sidecar import sidecar_path
from shardset.storage.anywhere import store_for
from shardset.storage.command import PREFIX
from shardset.storage.local import local_path
from shardset.storage.store import is_remote, url_name, url_scheme

from .shard_files import translated
from .shard_index import IndexNotes, is_replaceable
from .shard_output import compressed, local_name, open_output, parse_compression
from .tar_stream import TarStream
from .tar_writer import member_maker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from shardset.storage.store import Store

logger = logging.getLogger("shardset.writing")

_BRACES: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")


class ShardWriter:
    """Writes samples into tars ``out-000000.tar``, ``out-000001.tar``, ...; use it with ``with``.

    A shard is begun by its first sample, so that none is empty, and has a hidden name until it is whole. Beside it goes
    its sidecar index, the one that ``shardset index`` would write. An error in the block, or a killed process, leaves
    the shards that were finished; the one that was begun is given up, and the next run removes what is left of it.

    Args:
        pattern: Path or url with the number of the shard: ``out-%06d.tar``. A suffix such as ``.tar.gz`` compresses.
        maxcount: Most samples in a shard.
        maxsize: Most bytes of a shard's file, headers and end included, before compression. A sample that is larger
            by itself gets a shard of its own.
        post: Called with the name of each shard once it stands there, and its index.
        start_shard: Number of the first shard.
        verbose: Tell of each shard on standard error; 0 for not.
        opener: Given a shard's name, returns a binary file to write it into, which is closed after it. Such shards have
            no index, since only the opener knows where they stand.
        index: Write sidecar indexes. Compressed shards have none, and commands (``pipe:``) neither.
        store: Where urls live; by default the place that their scheme names.
        **kw: `TarWriter`'s arguments: ``user``, ``group``, ``mode``, ``compress``, ``encoder``, ``keep_meta``,
            ``mtime``, ``format``.

    Attributes:
        shard: Number of the next shard.
        count: Samples in the shard that is being written.
        total: Samples written.
        size: Bytes of the payloads in the shard that is being written.
        fname: Name of that shard, or of the last one; None before the first sample.
        tarstream: What writes it; None between shards.
        urls: Names of the shards that stand there, in order.

    Raises:
        ValueError: The pattern has no place for a number, or another argument cannot be.
    """

    def __init__(  # noqa: PLR0917 - webdataset's order
        self,
        pattern: str | os.PathLike[str],
        maxcount: float = 100_000,
        maxsize: float = 3e9,
        post: Callable[[str], object] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], IO[bytes]] | None = None,
        *,
        index: bool = True,
        store: Store | None = None,
        compress: bool | str | None = None,
        **kw: Any,
    ) -> None:
        for name, number in (("maxcount", maxcount), ("maxsize", maxsize)):
            if not number > 0:
                raise ValueError(f"{name}={number}: it must be positive")
        self.pattern = local_name(os.fspath(pattern))
        _check_pattern(self.pattern, start_shard)
        # What an opener opens may compress by itself, whatever its name says.
        self._compression = parse_compression(compress, self.pattern if opener is None else None)
        self._maker = member_maker(**kw)
        self._store = store_for(store, self.pattern)
        has_place = opener is None and not self.pattern.startswith(PREFIX)
        self._indexes = index and has_place and not self._compression
        self._is_local = has_place and not is_remote(self.pattern) and url_scheme(self.pattern) != "memory"
        self._notes: IndexNotes | None = None
        self._opened: IO[bytes] | None = None
        self.maxcount = maxcount
        self.maxsize = maxsize
        self.post = post
        self.verbose = verbose
        self.opener = opener
        self.shard = start_shard
        self.count = 0
        self.total = 0
        self.size = 0
        self.fname: str | None = None
        self.tarstream: TarStream | None = None
        self.urls: list[str] = []
        self._is_closed = False
        self._failure: BaseException | None = None

    def write(self, obj: Mapping[str, Any]) -> None:
        """Write one sample, into the next shard if this one has no room for it.

        Raises:
            EncodeError: It cannot be written as it is; its ``hint`` says what to do. Nothing of it was written, and the
                next one can be.
            DuplicateFieldError: Its key was written into this shard before; likewise.
            StorageError: Writing failed; the shards that were finished are there.
            ValueError: The writer is closed.
        """
        if self._is_closed:
            self._refuse()
        sample = self._maker.make(obj)
        stream = self.tarstream
        if stream is not None and (self.count >= self.maxcount or stream.size_with(sample) > self.maxsize):
            self.finish()
            stream = None
        if stream is None:
            stream = self._begin()
        try:
            self.size += stream.append(sample)
        except BaseException as error:
            if not stream.is_own:  # given up, and not only refused
                self._fail(error)
            raise
        self.count += 1
        self.total += 1

    def next_stream(self) -> None:
        """Finish the shard that is being written, so that the next sample begins another one."""
        self.finish()

    def finish(self) -> None:
        """Finish the shard that is being written, with its index, and call `post`. Without one nothing happens.

        Raises:
            StorageError: The disk is full, or writing failed; nothing is left of this shard.
        """
        stream, name = self.tarstream, self.fname
        if stream is None or name is None:
            return
        place, notes = sidecar_path(name), self._notes
        try:
            if (notes is not None or self._is_local) and not is_replaceable(self._store, place):
                if notes is not None:
                    what = "a file that is no index stands there, so none is written"
                    logger.warning("%s: %s", without_secrets(place), what)
                notes = None
            elif self._is_local:
                # The index of the shard that stood here before would be taken for this one's.
                with translated(place):
                    Path(local_path(place)).unlink(missing_ok=True)
            size = stream.close()
            self._close_opened()
        except BaseException as error:
            self._fail(error)
            raise
        count, self.count, self.size = self.count, 0, 0
        self.tarstream = self._notes = None
        if notes is not None:
            self._store.write(place, notes.dump(name=url_name(name), size=size))
        self.urls.append(name)
        if self.verbose:
            shown = without_secrets(name)
            sys.stderr.write(f"# wrote {shown}: {count} samples, {size / 1e9:.2f} GB; {self.total} in all\n")
        if self.post is not None:
            self.post(name)

    def close(self) -> None:
        """Finish the last shard. A second time does nothing.

        Raises:
            StorageError: The disk is full, or writing failed; nothing is left of the last shard.
        """
        if self._failure is not None:
            self._refuse()
        self.finish()
        if self._is_closed:
            return
        self._is_closed = True
        if self.urls and self._is_local:
            following = self.pattern % self.shard
            with suppress(OSError):
                if Path(local_path(following)).exists():
                    logger.warning("%s is there, from another run: readers of the whole folder read it too", following)

    def discard(self) -> None:
        """Give up the shard that is being written; the writer is then closed."""
        count = self.count
        self._is_closed = True
        if self.tarstream is not None:
            self._give_up()
            logger.warning("%s was given up with the %d samples in it", without_secrets(str(self.fname)), count)

    def _begin(self) -> TarStream:
        name = self.pattern % self.shard
        target: str | IO[bytes] = name
        if self.opener is not None:
            target = self.opener(name)
            self._opened = target if hasattr(target, "close") else None
        self._notes = IndexNotes() if self._indexes else None
        output = compressed(open_output(target, self._store), self._compression)
        self.tarstream = stream = TarStream(output, self._maker, name, self._notes)
        self.fname = name
        self.shard += 1
        self.count = self.size = 0
        return stream

    def _fail(self, error: BaseException) -> None:
        self._failure, self._is_closed = error, True
        self._give_up()

    def _refuse(self) -> NoReturn:
        name = without_secrets(self.pattern)
        if self._failure is None:
            raise ValueError(f"{name}: the writer is closed")
        raise StorageError("not written: the writer failed before", url=name) from self._failure

    def _give_up(self) -> None:
        stream, self.tarstream, self._notes = self.tarstream, None, None
        self.total -= self.count
        self.count = self.size = 0
        try:
            if stream is not None:
                stream.discard()
        finally:
            self._close_opened()

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a writer cannot be pickled: make one in each process, with a start_shard of its own")

    def __del__(self) -> None:
        stream = getattr(self, "tarstream", None)
        if stream is not None and stream.is_own:
            count = self.count
            self.discard()
            warnings.warn(
                f"{self!r} was not closed, so the last {count} samples were not written",
                ResourceWarning,
                stacklevel=1,
                source=self,
            )

    def __repr__(self) -> str:
        return f"ShardWriter({without_secrets(self.pattern)!r})"


def _check_pattern(pattern: str, first: int) -> None:
    """Refuse a pattern that does not give each shard a name of its own."""
    braces = _BRACES.search(pattern)
    if braces is not None:
        fixed = f"{pattern[: braces.start()]}%0{len(braces[2])}d{pattern[braces.end() :]}"
        braced, numbered = without_secrets(pattern), without_secrets(fixed)
        raise ValueError(f"{braced!r} names shards that are read; write {numbered!r}, to number them as they come")
    hint = "give a place for the number of the shard, such as out-%06d.tar; a percent sign itself is %%"
    try:
        names = {pattern % number for number in (first, first + 1)}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{without_secrets(pattern)!r} is no pattern ({error}): {hint}") from None
    if len(names) < 2:
        raise ValueError(f"{without_secrets(pattern)!r} is one name for all shards: {hint}")
