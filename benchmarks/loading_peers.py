"""The loaders that `loading.py` measures; it runs this with their interpreter.

``loading_peers.py NAME SETUP FOLDER SIDE`` makes what the loader reads out of a folder of tar shards, if it is not
there, and answers lines on its standard input: ``pass`` with the seconds and the samples of one epoch behind its first
batches, ``check`` with how far the pixels are from Pillow's, or with a digest of raw payloads. Each loader is set up
twice: ``best``, as well as it can be on two cores, and ``plain``, with the calls that its own introduction shows, in
random order where that does, and two workers where it has any.
"""
# ruff: noqa: PLC0415 - only one of them is imported into a process

from __future__ import annotations

import hashlib
import io
import itertools
import os
import sys
import tarfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Batches = Iterable[tuple[Any, Any]]
    # Images as uint8 of shape (64, side, side, 3), or (64, 3, side, side) where a peer has it so, and labels.

BATCH: Final = 64
RAW: Final = ("jpg", "json", "cls")
WORKERS: Final = 2
_SLABS: Final = 10
"""Arrays that are used again, of a loader or of each of its workers."""
_CHECKED_EVERY: Final = 16
"""Samples are counted, one in so many is compared: Pillow takes its time."""
SKIPPED: Final = 16
"""So many batches pass before the clock starts: workers have started by then, and buffers are full."""


class Data(NamedTuple):
    """Where shards lie, whose images are squares of `side` pixels."""

    folder: Path
    side: int

    @property
    def shards(self) -> list[str]:
        """The paths of all tar shards."""
        return [str(path) for path in sorted(self.folder.glob("*.tar"))]

    def samples(self, shard: str) -> Iterator[tuple[bytes, int]]:
        """Yield payload and label of all samples of a shard."""
        with tarfile.open(shard) as tar:
            label = 0
            for member in tar:
                payload = tar.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith("cls"):
                    label = int(payload)
                else:
                    yield payload, label

    def all_samples(self) -> Iterator[tuple[bytes, int]]:
        """Yield payload and label of the samples of all shards."""
        for shard in self.shards:
            yield from self.samples(shard)

    def converted(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return the folder of the same samples in another form, which `write` makes if it is not there."""
        folder = self.folder.with_name(f"{self.folder.name}-{name}")
        if not folder.exists():
            part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
            write(part)
            part.rename(folder)
        for path in folder.rglob("*"):
            if path.is_file():
                path.read_bytes()  # the page cache is warm from here on
        return folder


def decode_into(out: np.ndarray[Any, Any], payloads: Iterable[Any]) -> None:
    """Decode JPEGs into the rows of an array."""
    from simplejpeg import decode_jpeg

    for row, payload in zip(out, payloads, strict=True):
        decode_jpeg(payload, buffer=row)


def decoder(side: int) -> Callable[[Sequence[tuple[Any, int]]], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return what makes arrays of samples, out of memory that is used again, as fresh memory costs a tenth more.

    There are more arrays than a loader has batches on their way.
    """
    slabs = [np.empty((BATCH, side, side, 3), np.uint8) for _ in range(_SLABS)]
    turn = itertools.count()

    def decode(samples: Sequence[tuple[Any, int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        images = slabs[next(turn) % _SLABS][: len(samples)]
        decode_into(images, (payload for payload, _ in samples))
        return images, np.array([label for _, label in samples])

    return decode


def decoded_shared(samples: Sequence[tuple[Any, int]], side: int) -> tuple[Any, Any]:
    """Return images and labels as tensors; the images are decoded where the process that trains can see them.

    Each worker has more such tensors than it may have batches on their way, and uses them again: fresh shared memory
    costs half as much as decoding.
    """
    import torch

    shape = (len(samples), side, side, 3)
    while len(_shared) < _SLABS:
        storage = torch.UntypedStorage._new_shared(BATCH * side * side * 3)  # noqa: SLF001 - as torch's collate does
        _shared.append(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (BATCH, *shape[1:])))
    images = _shared[next(_turn) % _SLABS][: len(samples)]
    decode_into(images.numpy(), (payload for payload, _ in samples))
    return images, torch.tensor([int(label) for _, label in samples])


_shared: Final[list[Any]] = []
_turn: Final = itertools.count()


def stacked(samples: Sequence[tuple[Any, int]]) -> tuple[Any, Any]:
    """Return images and labels as tensors, each image copied."""
    import torch

    images = torch.from_numpy(np.stack([np.asarray(image) for image, _ in samples]))
    return images, torch.tensor([int(label) for _, label in samples])


def opened(payload: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels of an image as Pillow decodes it."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(payload)).convert("RGB"))


def simplejpeg_best(data: Data) -> Callable[[], Batches]:
    """Decode payloads that lie in memory, in two threads, tasks of eight, into arrays that are used again."""
    from collections import deque
    from concurrent.futures import Future, ThreadPoolExecutor

    samples = list(data.all_samples())
    parts = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]
    slabs = [np.empty((BATCH, data.side, data.side, 3), np.uint8) for _ in range(3)]

    def batches() -> Iterator[tuple[Any, Any]]:
        ahead: deque[tuple[Any, list[Future[None]], Any]] = deque()
        with ThreadPoolExecutor(2) as threads:
            for number, part in enumerate(parts):
                slab = slabs[number % len(slabs)]
                tasks = [
                    threads.submit(decode_into, slab[at : at + 8], [payload for payload, _ in part[at : at + 8]])
                    for at in range(0, BATCH, 8)
                ]
                ahead.append((slab, tasks, [label for _, label in part]))
                if len(ahead) == len(slabs):
                    yield settled(*ahead.popleft())
            while ahead:
                yield settled(*ahead.popleft())

    def settled(slab: Any, tasks: list[Future[None]], labels: Any) -> tuple[Any, Any]:
        for task in tasks:
            task.result()
        return slab, labels

    return batches


def webdataset_best(data: Data, workers: int = WORKERS) -> Callable[[], Batches]:
    """Batch and decode in the workers, into shared memory."""
    import webdataset as wds

    dataset = (
        wds.WebDataset(data.shards, shardshuffle=False)
        .to_tuple("jpg", "cls")
        .batched(BATCH, collation_fn=partial(decoded_shared, side=data.side))
    )
    return lambda: wds.WebLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=4)


def webdataset_plain(data: Data) -> Callable[[], Batches]:
    """As the README has it: a shuffle buffer, `decode`, `to_tuple`, `batched`."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    dataset = (
        wds.WebDataset(data.shards, shardshuffle=len(data.shards))
        .shuffle(1000)
        .decode("rgb8")
        .to_tuple("jpg", "cls")
        .batched(BATCH)
    )
    return lambda: DataLoader(dataset, batch_size=None, num_workers=WORKERS)


def _mosaic(data: Data, column: str) -> str:
    def write(part: Path) -> None:
        from PIL import Image
        from streaming import MDSWriter

        with (
            TemporaryDirectory() as folder,
            MDSWriter(out=str(part), columns={"image": column, "class": "int"}) as writer,
        ):
            file = Path(folder) / "image.jpg"  # the writer keeps the bytes of an image that has a file
            for payload, label in data.all_samples():
                file.write_bytes(payload)
                writer.write({"image": Image.open(file) if column == "jpeg" else payload, "class": label})

    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    return str(data.converted(f"mds-{column}", write))


def mosaic_best(data: Data, workers: int = WORKERS) -> Callable[[], Batches]:
    """Keep the files' bytes, and decode when a batch is put together, into shared memory."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dataset = StreamingDataset(local=_mosaic(data, "bytes"), shuffle=False, batch_size=BATCH)
    collate = partial(_collate, finish=partial(decoded_shared, side=data.side))
    return lambda: DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate, prefetch_factor=4)


def mosaic_plain(data: Data) -> Callable[[], Batches]:
    """As the README has it: a column of `jpeg`, which comes as an image of Pillow's."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dataset = StreamingDataset(local=_mosaic(data, "jpeg"), shuffle=True, batch_size=BATCH)
    collate = partial(_collate, finish=stacked)
    return lambda: DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate)


def _collate(samples: Sequence[dict[str, Any]], finish: Callable[[list[tuple[Any, int]]], tuple[Any, Any]]) -> Any:
    return finish([(sample["image"], sample["class"]) for sample in samples])


def _litdata(data: Data, *, is_image: bool) -> str:
    def write(part: Path) -> None:
        import litdata

        samples = partial(_litdata_samples, data=data, is_image=is_image)
        litdata.optimize(fn=samples, inputs=data.shards, output_dir=str(part), num_workers=1, chunk_bytes="64MB")

    return str(data.converted(f"litdata-{'image' if is_image else 'bytes'}", write))


def _litdata_samples(shard: str, data: Data, *, is_image: bool) -> Iterator[dict[str, Any]]:
    import litdata

    for payload, label in data.samples(shard):
        yield {"image": litdata.Image(bytes=payload) if is_image else payload, "class": label}


def litdata_best(data: Data, workers: int = WORKERS) -> Callable[[], Batches]:
    """Keep the files' bytes, and decode when a batch is put together, into shared memory."""
    import litdata

    dataset = litdata.StreamingDataset(_litdata(data, is_image=False), shuffle=False)
    collate = partial(_collate, finish=partial(decoded_shared, side=data.side))
    return lambda: litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate, prefetch_factor=4
    )


def litdata_plain(data: Data) -> Callable[[], Batches]:
    """As the README has it: images that torchvision decodes, with colours first."""
    import litdata

    dataset = litdata.StreamingDataset(_litdata(data, is_image=True), shuffle=True, drop_last=True, seed=42)

    def batches() -> Batches:
        for batch in litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS):
            yield batch["image"], batch["class"]

    return batches


def _spdl_source(data: Data) -> Iterator[list[tuple[Any, int]]]:
    """Yield the samples of each batch, read by SPDL's own walk through tar files."""
    import spdl.io

    batch: list[tuple[Any, int]] = []
    for shard in data.shards:
        label = 0
        for name, payload in spdl.io.iter_tarfile(Path(shard).read_bytes()):
            if name.endswith("cls"):
                label = int(bytes(payload))
                continue
            batch.append((payload, label))
            if len(batch) == BATCH:
                yield batch
                batch = []


def _spdl(data: Data, decode: Callable[[list[tuple[Any, int]]], Any], threads: int) -> Callable[[], Batches]:
    from spdl.pipeline import PipelineBuilder

    def batches() -> Batches:
        builder = PipelineBuilder().add_source(_spdl_source(data))
        builder = builder.pipe(decode, concurrency=threads, output_order="input").add_sink(4)
        pipeline = builder.build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return batches


def spdl_best(data: Data, threads: int = WORKERS) -> Callable[[], Batches]:
    """Let simplejpeg decode in its threads, a batch each."""
    return _spdl(data, decoder(data.side), threads)


def spdl_plain(data: Data) -> Callable[[], Batches]:
    """As its documentation has it: FFmpeg decodes a batch, an image after another."""
    import spdl.io

    def decode(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
        payloads = [bytes(payload) for payload, _ in samples]
        frames = spdl.io.load_image_batch(payloads, width=data.side, height=data.side)
        return spdl.io.to_numpy(frames), np.array([label for _, label in samples])

    return _spdl(data, decode, WORKERS)


def _grain(data: Data) -> Any:
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    def write(part: Path) -> None:
        part.mkdir()
        for number, shard in enumerate(data.shards):
            writer = ArrayRecordWriter(str(part / f"{number:05d}.array_record"), "group_size:1")
            for payload, label in data.samples(shard):
                writer.write(label.to_bytes(4, "little") + payload)
            writer.close()

    folder = data.converted("array-record", write)
    paths = sorted(map(str, folder.glob("*.array_record")))
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))


def grain_best(data: Data, threads: int = WORKERS) -> Callable[[], Batches]:
    """Let simplejpeg decode in its threads, a batch each."""
    import grain

    decode_samples = decoder(data.side)

    def decode(records: Sequence[bytes]) -> tuple[Any, Any]:
        return decode_samples([(memoryview(each)[4:], int.from_bytes(each[:4], "little")) for each in records])

    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4)
    dataset = _grain(data).batch(BATCH, batch_fn=decode).to_iter_dataset(options)
    return lambda: dataset


def grain_plain(data: Data) -> Callable[[], Batches]:
    """As its documentation has it: `shuffle`, `map`, `batch`, and its own number of threads."""

    def decode(record: bytes) -> tuple[Any, Any]:
        return opened(record[4:]), int.from_bytes(record[:4], "little")

    dataset = _grain(data).shuffle(seed=42).map(decode).batch(BATCH).to_iter_dataset()
    return lambda: dataset


def _loader(
    data: Data, fields: tuple[str, ...], *, decode: bool, shuffle: bool = False, views: bool = False, workers: int = 0
) -> Callable[[], Batches]:
    from shardset import Loader, ReadAhead, discover_dataset

    dataset, ahead = discover_dataset(str(data.folder)), ReadAhead(threads=1 if workers else WORKERS)
    loader = Loader(dataset, BATCH, shuffle=shuffle, tail="exact", fields=fields, decode=decode, read_ahead=ahead)
    batches: Iterable[dict[str, Any]] = loader.views() if views else loader
    if workers:
        from torch.utils.data import DataLoader

        from shardset.integrations.torch import IterableDataset

        batches = DataLoader(IterableDataset(loader.torch()), batch_size=None, num_workers=workers, prefetch_factor=4)
    return lambda: ([batch[field] for field in fields] for batch in batches)


def webdataset_raw(data: Data) -> Callable[[], Batches]:
    """Give payloads as bytes, batched in the workers."""
    import webdataset as wds

    dataset = wds.WebDataset(data.shards, shardshuffle=False).to_tuple(*RAW).batched(BATCH)
    return lambda: wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS, prefetch_factor=4)


SETUPS: Final[dict[str, dict[str, Callable[..., Callable[[], Batches]]]]] = {
    "shardset": {
        "best": partial(_loader, fields=("jpg", "cls"), decode=True),
        "plain": partial(_loader, fields=("jpg", "cls"), decode=True, shuffle=True),
        "torch": partial(_loader, fields=("jpg", "cls"), decode=True, workers=WORKERS),
        "raw": partial(_loader, fields=RAW, decode=False),
        "views": partial(_loader, fields=RAW, decode=False, views=True),
    },
    "simplejpeg": {"best": simplejpeg_best},
    "webdataset": {"best": webdataset_best, "plain": webdataset_plain, "raw": webdataset_raw},
    "mosaicml-streaming": {"best": mosaic_best, "plain": mosaic_plain},
    "litdata": {"best": litdata_best, "plain": litdata_plain},
    "spdl": {"best": spdl_best, "plain": spdl_plain},
    "grain": {"best": grain_best, "plain": grain_plain},
}


def timed(batches: Batches) -> tuple[float, int]:
    """Return the seconds that all batches but the first take, and how many samples they hold."""
    samples, start, end = 0, 0.0, 0.0
    for number, batch in enumerate(batches):
        assert len(batch[0][0]) > 0  # noqa: S101 - looks at the batch, as a trainer would
        end = time.perf_counter()
        start, samples = (end, 0) if number < SKIPPED else (start, samples + len(batch[0]))
    return end - start, samples


def difference(data: Data, batches: Batches) -> float:
    """Return the mean difference to Pillow's pixels, of the sample that has the greatest.

    Raises:
        SystemExit: A sample is missing, or comes twice, or has another shape or type.
    """
    expected = {label: payload for payload, label in data.all_samples()}
    most = 0.0
    for images, labels in batches:
        whole = np.asarray(images)
        if whole.shape[1:] == (3, data.side, data.side):
            whole = whole.transpose(0, 2, 3, 1)
        if whole.shape[1:] != (data.side, data.side, 3) or whole.dtype != np.uint8:
            raise SystemExit(f"a batch is {whole.dtype} of shape {whole.shape}")
        for image, label in zip(whole, labels, strict=True):
            payload = expected.pop(int(label))
            if label % _CHECKED_EVERY:
                continue
            most = max(most, float(np.abs(image - opened(payload).astype(np.int16)).mean()))
    if expected:
        raise SystemExit(f"{len(expected)} samples have not come")
    return most


def digest(batches: Batches) -> str:
    """Return a sum over all payloads, in whatever order they come."""
    total = 0
    for batch in batches:
        for sample in zip(*batch, strict=True):
            state = hashlib.blake2b(digest_size=8)
            for payload in sample:
                state.update(payload)
            total += int.from_bytes(state.digest(), "little")
    return f"{total:x}"


def first(name: str, setup: str, data: Data) -> float:
    """Return the seconds from when all is imported to the first batch."""
    import simplejpeg

    import shardset

    _ = shardset.Loader, shardset.ReadAhead, shardset.discover_dataset, simplejpeg  # imported when asked for
    start = time.perf_counter()
    next(iter(SETUPS[name][setup](data)()))
    return time.perf_counter() - start


def main() -> None:
    """Set a loader up, say its version, and answer."""
    name, setup, folder, side, *options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # loaders print to standard output
    data = Data(Path(folder), int(side))
    if options == ["first"]:
        print(first(name, setup, data), file=answers)
        return
    chosen = {key: int(value) for key, _, value in (option.partition("=") for option in options)}
    batches = SETUPS[name][setup](data, **chosen)
    print(version(name), file=answers)
    for line in sys.stdin:
        if line == "pass\n":
            print(*timed(batches()), file=answers)
        elif setup in {"raw", "views"}:
            print(digest(batches()), file=answers)
        else:
            print(difference(data, batches()), file=answers)


if __name__ == "__main__":
    main()
