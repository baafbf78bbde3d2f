"""Random access by an index JSON: the names of the `wids` package, which webdataset 0.2 brought along.

Shards are read where they are, through the index of each, and not downloaded first. The way from a number to a sample
goes through the counts of the index JSON, so these are compared with each shard when it is opened: one that has other
samples than the JSON says is an error, and never a shift of all that follow.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import operator
import os
from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from shardset.dataset.opening import discover_dataset
from shardset.errors import ChecksumError, IndexFileError, ShardsetError, without_secrets
from shardset.files import lock_file, open_atomic
from shardset.storage.anywhere import AnyStore
from shardset.storage.local import storage_error

from .wids_decode import default_decoder
from .wids_samplers import ChunkedSampler, DistributedChunkedSampler, ShardedSampler, ShardListSampler
from .wids_specs import MAKE_INDEX, check_shard, load_dsdesc_and_resolve, urldir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardset.dataset.dataset import Dataset
    from shardset.storage.store import Reader

    Transform = Callable[[dict[str, Any]], Any]

__all__ = ["ChunkedSampler", "DistributedChunkedSampler", "ShardListDataset", "ShardListSampler", "ShardedSampler"]

logger = logging.getLogger(__name__)

_PIECE: Final = 8 << 20
_GIB: Final = 1 << 30
_ENDLESS: Final = 1 << 50
_ENOUGH_ACCESSES: Final = 100
_MOST_MISSES: Final = 0.3


class ShardListDataset:
    """The samples of some shards by number, ``ds[0]`` to ``ds[len(ds) - 1]``.

    A sample is a dict of open files (BytesIO) under the suffixes of its members, each with its dot (``".jpg"``), with
    ``__key__``, ``__dataset__``, ``__index__``, ``__shard__`` and ``__shardindex__`` (its number in the shard). Then
    the transformations have it, one after the other. Opening a shard finds its samples by its sidecar index, a
    catalog, or its headers. Handed to another process, a dataset goes without its open shards.

    Args:
        shards: The path or url of an index JSON, an open file of one, or a list of ``{"url": ..., "nsamples": ...}``.
        cache_size: Bytes that shards kept in `cache_dir` may have together.
        cache_dir: Keep shards that are elsewhere whole in this folder, which other processes may share; by default
            in ``$WIDS_CACHE``, and without that they are read in place, as much of them as is asked for.
        lru_size: How many shards are kept open.
        dataset_name: The name, where the index says none.
        localname: Gives for each url the path of a file. If the file is there it is read, else the shard is
            downloaded to it.
        transformations: A function of a sample, or a list of these; ``"PIL"`` and ``"numpy"`` stand for
            `wids_decode.default_decoder` with that format. None or an empty list leave samples as they are.
        keep: Never remove a shard from `cache_dir`, whatever `cache_size` says.
        base: The folder that urls are seen from; by default what the index says, else its folder.
        options: Replace what the index JSON says, key by key.

    Attributes:
        shards: The entries of the index, their urls whole.
        spec: What the index JSON says beside them.
        lengths: Samples of each shard.
        cum_lengths: Samples of each shard and all before it.

    Raises:
        IndexFileError: The index is malformed, of another version, or names no shards.
        StorageError: The index cannot be read.
        ValueError: An argument is not as it should be.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | IO[Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...],
        *,
        cache_size: float = 1e12,
        cache_dir: str | os.PathLike[str] | None = None,
        lru_size: int = 10,
        dataset_name: str | None = None,
        localname: Callable[[str], str] | None = None,
        transformations: str | Transform | Sequence[str | Transform] | None = "PIL",
        keep: bool = False,
        base: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if localname is not None and cache_dir is not None:
            raise ValueError("cache_dir and localname both say where shards are kept: give one of them")
        if cache_size < 1 or lru_size < 1:
            raise ValueError(f"cache_size={cache_size}, lru_size={lru_size}: both must be at least 1")
        if isinstance(shards, list | tuple):
            self.spec = dict(options or {})
            self.source, self.base = "the list of shards", base
            self.shards = [check_shard(entry, base, number, self.source) for number, entry in enumerate(shards)]
            if not self.shards:
                raise IndexFileError("the list of shards is empty")
        else:
            self.spec = load_dsdesc_and_resolve(shards, options=options, base=base)
            self.shards = self.spec["shardlist"]
            self.source, self.base = "the index", base
            if isinstance(shards, str | os.PathLike):
                self.source = os.fspath(shards)
                self.base = urldir(self.source) if base is None else base
        self.dataset_name = self.spec.get("name") or dataset_name or _digest(self.shards)
        self.lengths: list[int] = [shard["nsamples"] for shard in self.shards]
        self.cum_lengths = list(accumulate(self.lengths))
        self.total_length = self.cum_lengths[-1]
        self.cache_dir = cache_dir if cache_dir is not None or localname is not None else os.environ.get("WIDS_CACHE")
        self.localname = localname
        self.keep = keep
        self.cache_size = cache_size
        self.transformations = interpret_transformations(transformations)
        self.cache = OpenShards(lru_size)
        logger.info("%s: %d samples in %d shards", self.dataset_name, self.total_length, len(self.shards))

    def add_transform(self, transform: Transform) -> ShardListDataset:
        """Put a transformation behind the others, and return the dataset itself."""
        self.transformations.append(transform)
        return self

    def __len__(self) -> int:
        return self.total_length

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: There is no such sample.
            IndexFileError: The index JSON does not fit the shard.
            DecodeError: The transformations cannot decode it.
            StorageError: It cannot be read.
        """
        shard_number, inner = self._locate(index)
        dataset = self._open(shard_number)
        payloads = dataset.read_samples([inner], copy=True)[0] if dataset.is_remote else None
        return self._transform(self._sample(shard_number, dataset, inner, payloads))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples, in the order asked. What lies in one shard elsewhere is fetched together.

        Raises:
            As ``ds[index]``.
        """
        places = [self._locate(index) for index in indices]
        samples: list[Any] = [None] * len(places)
        by_shard: dict[int, list[int]] = {}
        for position, (shard_number, _) in enumerate(places):
            by_shard.setdefault(shard_number, []).append(position)
        for shard_number, positions in by_shard.items():
            dataset = self._open(shard_number)
            inner = [places[position][1] for position in positions]
            payloads = dataset.read_samples(inner, copy=True) if dataset.is_remote else [None] * len(inner)
            for position, number, read in zip(positions, inner, payloads, strict=True):
                samples[position] = self._sample(shard_number, dataset, number, read)
        # In the order asked: transformations may draw random numbers.
        return [self._transform(sample) for sample in samples]

    def get_shard(self, index: int) -> tuple[Dataset, int, dict[str, Any]]:
        """Return the open shard of a sample, its number in the shard, and the shard's entry in the index.

        Raises:
            As ``ds[index]``.
        """
        shard_number, inner = self._locate(index)
        return self._open(shard_number), inner, self.shards[shard_number]

    def _locate(self, index: int) -> tuple[int, int]:
        wanted = operator.index(index)
        number = wanted + self.total_length if wanted < 0 else wanted
        if not 0 <= number < self.total_length:
            raise IndexError(f"sample {wanted} of a dataset of {self.total_length}")
        shard_number = bisect_right(self.cum_lengths, number)
        return shard_number, number - (self.cum_lengths[shard_number] - self.lengths[shard_number])

    def _sample(
        self, shard_number: int, dataset: Dataset, inner: int, payloads: dict[str, bytes] | None
    ) -> dict[str, Any]:
        """Return a sample of an open shard, with payloads that were read before, if they were."""
        found, url = dataset[inner], self.shards[shard_number]["url"]
        key = found.key
        source: Mapping[str, bytes] = found if payloads is None else payloads
        sample: dict[str, Any] = {}
        for field, name in zip(found.fields, found.names, strict=True):
            sample[name[len(key) :]] = io.BytesIO(source[field])
        sample["__key__"] = key
        sample["__dataset__"] = self.shards[shard_number].get("dataset")
        sample["__index__"] = self.cum_lengths[shard_number] - self.lengths[shard_number] + inner
        sample["__shard__"] = url
        sample["__shardindex__"] = inner
        return sample

    def _transform(self, sample: Any) -> Any:
        for transform in self.transformations:
            sample = transform(sample)
        return sample

    def _open(self, shard_number: int) -> Dataset:
        """Return an open shard, which is the one that the index means."""
        entry = self.shards[shard_number]
        dataset = self.cache.get(entry["url"])
        if dataset is None:
            dataset = self._open_new(entry)
            self.cache.put(entry["url"], dataset)
        if len(dataset) != entry["nsamples"]:
            raise self._unfit(entry, f"{entry['nsamples']} samples", f"has {len(dataset)}")
        self.check_cache_misses()
        return dataset

    def _open_new(self, entry: dict[str, Any]) -> Dataset:
        url: str = entry["url"]
        if url.startswith("pipe:"):
            raise ValueError(f"{url!r} is the output of a program, which has no random access; download it first")
        place = url
        if self.localname is not None:
            place = os.fspath(self.localname(url))
            if not Path(place).exists():
                _download(url, place, entry.get("md5sum"))
        dataset = discover_dataset([place])
        size = dataset.info(0).info.size
        if entry.get("filesize") not in {None, size}:
            raise self._unfit(entry, f"{entry['filesize']} bytes", f"has {size}")
        if self.cache_dir is not None and dataset.is_remote:
            limit = _ENDLESS if self.keep else self.cache_size
            dataset.enable_shard_cache(self.cache_dir, limit / _GIB)
        return dataset

    def _unfit(self, entry: dict[str, Any], said: str, found: str) -> IndexFileError:
        what = f"the index says that shard {without_secrets(entry['url'])} has {said}, and it {found}"
        return IndexFileError(what, path=self.source, hint=MAKE_INDEX)

    def verify(self) -> None:
        """Compare every shard with all that the index says of it: samples, bytes, and md5sum. Reads the shards whole.

        Raises:
            IndexFileError: Samples or bytes differ.
            ChecksumError: The digest differs.
            StorageError: A shard cannot be read.
        """
        for number, entry in enumerate(self.shards):
            dataset = self._open(number)
            if entry.get("md5sum") is not None:
                check_md5(md5_of(dataset.reader(0)), entry["md5sum"], entry["url"])

    def get_stats(self) -> tuple[int, int]:
        """Return how often a shard was needed, and how often it had to be opened for that."""
        return self.cache.accesses, self.cache.misses

    def check_cache_misses(self) -> None:
        """Log a warning, once, if shards are opened too often for the order in which samples are asked for."""
        accesses, misses = self.get_stats()
        if accesses > _ENOUGH_ACCESSES and misses > accesses * _MOST_MISSES and not self.cache.has_warned:
            self.cache.has_warned = True
            logger.warning(
                "of %d samples, %d needed a shard that was not open: use a ShardListSampler or a ChunkedSampler, "
                "or a greater lru_size than %d",
                accesses,
                misses,
                self.cache.size,
            )

    def close(self) -> None:
        """Close all shards. They are opened anew when they are needed."""
        self.cache.clear()

    def __repr__(self) -> str:
        return f"ShardListDataset({self.dataset_name!r}, shards={len(self.shards)}, samples={self.total_length})"


class OpenShards:
    """The shards that were used last, by url.

    Attributes:
        size: How many are kept.
        accesses: How often one was asked for.
        misses: How often it was not there.
        has_warned: Whether somebody was told that there are many misses.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.accesses = 0
        self.misses = 0
        self.has_warned = False
        self._open: OrderedDict[str, Dataset] = OrderedDict()

    def get(self, url: str) -> Dataset | None:
        """Return an open shard, or None."""
        self.accesses += 1
        dataset = self._open.pop(url, None)
        if dataset is None:
            self.misses += 1
        else:
            self._open[url] = dataset
        return dataset

    def put(self, url: str, dataset: Dataset) -> None:
        """Keep a shard, and let go of the one whose last use is longest ago."""
        self._open[url] = dataset
        while len(self._open) > self.size:
            self._open.popitem(last=False)

    def clear(self) -> None:
        """Let go of all."""
        self._open.clear()

    def __len__(self) -> int:
        return len(self._open)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self.size,)


def interpret_transformations(given: str | Transform | Sequence[str | Transform] | None) -> list[Transform]:
    """Return transformations as a list of functions.

    Raises:
        ValueError: One is neither a function nor a known name.
    """
    if given is None:
        return []
    listed: Iterable[str | Transform] = [given] if isinstance(given, str) or callable(given) else given
    return [_transformation(one) for one in listed]


def _transformation(given: str | Transform) -> Transform:
    if isinstance(given, str) and given.lower() in {"pil", "numpy"}:
        return partial(default_decoder, format=given)
    if isinstance(given, str) or not callable(given):
        raise ValueError(  # noqa: TRY004 - also where a name is unknown
            f"{given!r} is no transformation: 'PIL', 'numpy', or a function of a sample"
        )
    return given


def _digest(shards: list[dict[str, Any]]) -> str:
    listed = "\n".join(without_secrets(shard["url"]) for shard in shards)
    digest = hashlib.sha256(listed.encode("utf-8", "surrogateescape")).digest()
    return base64.urlsafe_b64encode(digest)[:16].decode()


def read_pieces(reader: Reader) -> Iterator[bytes]:
    """Yield all bytes of an object."""
    for offset in range(0, reader.size, _PIECE):
        yield reader.read(offset, min(_PIECE, reader.size - offset))


def md5_of(reader: Reader) -> str:
    """Return the digest that index files hold: 32 hex digits."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in read_pieces(reader):
        digest.update(piece)
    return digest.hexdigest()


def check_md5(found: str, wanted: str, url: str) -> None:
    """Compare the digest of a shard with that in the index.

    Raises:
        ChecksumError: They differ.
    """
    if found != wanted.lower():
        what = f"the md5sum of the shard is {found}, and the index says {wanted}"
        raise ChecksumError(what, expected=wanted, actual=found, shard=url, code="md5_differs")


def _download(url: str, place: str, md5sum: str | None) -> None:
    """Copy a shard to a file, which is there only once it is whole and has the right digest.

    Raises:
        ChecksumError: The digest differs.
        StorageError: Reading or writing failed.
    """
    path = Path(place)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(path.with_name(f"{path.name}.lock"))
        assert lock is not None  # noqa: S101 - it waits
        try:
            if path.exists():  # another process has just done it
                return
            digest = hashlib.md5(usedforsecurity=False)
            with open_atomic(path) as file:
                for piece in read_pieces(AnyStore().open(url)):
                    digest.update(piece)
                    file.write(piece)
                if md5sum is not None:
                    check_md5(digest.hexdigest(), md5sum, url)
        finally:
            lock.release(remove=True)
    except OSError as error:
        if isinstance(error, ShardsetError):
            raise
        raise storage_error(error, place) from error
