"""The stages as methods, for pipelines that read from left to right: ``ds.shuffle(1000).decode("pil")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from . import batching, caching, fields, shuffling, stages
from .stage import Stage

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from .run import Handler


class Fluent:
    """Methods that return the pipeline with one more stage behind it. The stages themselves say what each does."""

    def compose(self, *stages: Any) -> Self:
        """Return a copy with more stages behind those of this one."""
        raise NotImplementedError

    def _then(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Self:
        return self.compose(Stage(function, *args, **kwargs))

    def shuffle(
        self,
        size: int,
        initial: int = 100,
        rng: shuffling.Random | None = None,
        seed: int | None = None,
        *,
        max_bytes: int | None = None,
    ) -> Self:
        """Shuffle through a buffer of `size` samples; see `shardset.pipeline.shuffling.shuffle`. Below 1, do not."""
        if size < 1:
            return self
        return self._then(shuffling.shuffle, size, initial, rng=rng, seed=seed, max_bytes=max_bytes)

    def decode(
        self,
        *handlers: Any,
        pre: Sequence[Any] | None = None,
        post: Sequence[Any] | None = None,
        only: str | Sequence[str] | None = None,
        partial: bool = False,
        handler: Handler | None = None,
        threads: int = 0,
    ) -> Self:
        """Decode the fields of each sample by their suffixes; see `shardset.pipeline.decode.decode`.

        Raises:
            ValueError: A string among `handlers` names no kind of image.
        """
        from .decode import decode_stage  # noqa: PLC0415 - brings the decoders

        return self.compose(
            decode_stage(*handlers, pre=pre, post=post, only=only, partial=partial, handler=handler, threads=threads)
        )

    def xdecode(self, *args: Any, **kwargs: Any) -> Self:
        """Decode fields by patterns of their names; see `shardset.pipeline.decode.xdecode`."""
        from .decode import xdecode  # noqa: PLC0415 - brings the decoders

        return self._then(xdecode, *args, **kwargs)

    def map(self, f: Callable[[Any], Any], handler: Handler | None = None) -> Self:
        """Pass each sample through `f`; one for which it gives None is left out and counted."""
        return self._then(stages.map, f, handler=handler)

    def map_dict(self, handler: Handler | None = None, **functions: Callable[[Any], Any]) -> Self:
        """Pass each of the fields named through its function, in place."""
        return self._then(fields.map_dict, functions, handler=handler)

    def map_tuple(self, *functions: Callable[[Any], Any] | None, handler: Handler | None = None) -> Self:
        """Pass the elements of each tuple through one function each; None leaves an element as it is."""
        return self._then(stages.map_tuple, *functions, handler=handler)

    def to_tuple(
        self,
        *names: str | Sequence[str],
        handler: Handler | None = None,
        missing_is_error: bool = True,
        none_is_error: bool | None = None,
    ) -> Self:
        """Make a tuple of some fields of each sample: ``"jpg;png", "cls"``."""
        return self._then(
            fields.to_tuple,
            *names,
            handler=handler,
            missing_is_error=missing_is_error,
            none_is_error=none_is_error,
        )

    def rename(self, handler: Handler | None = None, keep: bool = True, **names: str | Sequence[str]) -> Self:
        """Rename fields: ``image="jpg;png"``."""
        return self._then(fields.rename, names, handler=handler, keep=keep)

    def rename_keys(self, *args: Any, **kwargs: Any) -> Self:
        """Rename fields by patterns; see `shardset.pipeline.fields.rename_keys`."""
        return self._then(fields.rename_keys, *args, **kwargs)

    def extract_keys(self, *args: Any, **kwargs: Any) -> Self:
        """Make a tuple of fields by patterns; see `shardset.pipeline.fields.extract_keys`."""
        return self._then(fields.extract_keys, *args, **kwargs)

    def select(self, predicate: Callable[[Any], Any], handler: Handler | None = None) -> Self:
        """Keep the samples for which `predicate` gives something true."""
        return self._then(stages.select, predicate, handler=handler)

    def batched(
        self,
        batchsize: int = 20,
        collation_fn: Callable[[list[Any]], Any] | None = batching.default_collation_fn,
        partial: bool = True,
        handler: Handler | None = None,
    ) -> Self:
        """Make batches; see `shardset.pipeline.batching.batched`."""
        return self._then(batching.batched, batchsize, collation_fn=collation_fn, partial=partial, handler=handler)

    def unbatched(self) -> Self:
        """Take batches apart."""
        return self._then(batching.unbatched)

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Make lists of `batchsize` samples."""
        return self._then(batching.listed, batchsize, partial)

    def unlisted(self) -> Self:
        """Take lists apart."""
        return self._then(batching.unlisted)

    def slice(self, *args: int | None) -> Self:
        """Keep the samples that ``itertools.islice`` with these arguments would give."""
        return self._then(stages.slice, *args)

    def rsample(self, p: float = 0.5) -> Self:
        """Keep each sample with the probability `p`."""
        return self._then(stages.rsample, p)

    def log_keys(self, logfile: str | os.PathLike[str] | None = None) -> Self:
        """Append a line for each sample to a file."""
        return self._then(stages.log_keys, logfile)

    def mcached(self) -> Self:
        """Keep all samples in memory, and give these from the second epoch on."""
        return self.compose(caching.Cached())

    def lmdb_cached(self, *args: Any, **kwargs: Any) -> Self:
        """Keep all samples in an LMDB database, and give these from the second epoch on."""
        return self.compose(caching.LMDBCached(*args, **kwargs))
