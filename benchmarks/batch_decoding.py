"""Batches of JPEG decoded by two threads: `BatchDecoder` beside simplejpeg called on the same threads, bare."""

from __future__ import annotations

import io
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from measure import ROUNDS, Result, Side, check, compare, limit, once

from shardset.decoding.batches import BatchDecoder
from shardset.decoding.options import Decode

if TYPE_CHECKING:
    from collections.abc import Callable

_PHOTOGRAPHS: Final = Path(__file__).parent.parent / "examples" / "data"
_BATCH: Final = 64
_TASK: Final = 8
"""Samples that a thread is given at once."""
_QUALITY: Final = 90
_SEED: Final = 20_261_107
_TURNED: Final = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
"""An EXIF block with one entry: orientation 6."""


def run(root: Path, *, quick: bool) -> list[Result]:
    del root
    batches = 4 if quick else 16
    with ThreadPoolExecutor(2) as pool:
        results: list[Result] = [_beside_bare(pool, side, batches) for side in (256, 512)]
        results += [_scaled_beside_whole(pool, batches // 4), _begin(below=5), _begin(below=10, exif=_TURNED)]
    return results


def _payloads(side: int, count: int = _BATCH, **options: Any) -> list[memoryview]:
    """Return JPEGs, each another part of a photograph, as views: so they come from a mapped shard."""
    from PIL import Image

    chance = random.Random(_SEED)  # noqa: S311 - chooses what to cut out
    photographs = [Image.open(path).convert("RGB") for path in sorted(_PHOTOGRAPHS.glob("*.jpg"))]
    payloads = []
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        cut = chance.randint(min(photograph.size) // 2, min(photograph.size))
        left, top = (chance.randint(0, whole - cut) for whole in photograph.size)
        part = photograph.resize((side, side), Image.Resampling.LANCZOS, (left, top, left + cut, top + cut))
        buffer = io.BytesIO()
        part.save(buffer, "JPEG", quality=_QUALITY, **options)
        payloads.append(memoryview(buffer.getvalue()))
    return payloads


def _decode(pool: ThreadPoolExecutor, decoder: BatchDecoder, payloads: list[memoryview]) -> Any:
    batch = decoder.begin("jpg", payloads)

    def work(first: int) -> None:
        for place in range(first, first + _TASK):
            batch.decode(place, payloads[place], place)

    list(pool.map(work, range(0, _BATCH, _TASK)))
    return batch.finish()


def _decode_bare(pool: ThreadPoolExecutor, slab: np.ndarray[Any, Any], payloads: list[memoryview]) -> Any:
    import simplejpeg

    def work(first: int) -> None:
        for place in range(first, first + _TASK):
            simplejpeg.decode_jpeg(payloads[place], buffer=slab[place])

    list(pool.map(work, range(0, _BATCH, _TASK)))
    return slab


def _times(count: int, call: Callable[[], Any]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(count):
            call()

    return repeat


def _beside_bare(pool: ThreadPoolExecutor, side: int, batches: int) -> Result:
    payloads = _payloads(side)
    decoder = BatchDecoder(Decode())
    slab = np.empty((_BATCH, side, side, 3), np.uint8)
    check(np.array_equal(_decode(pool, decoder, payloads), _decode_bare(pool, slab, payloads)), "pixels")
    return compare(
        f"batches of {side} pixels",
        Side(
            "BatchDecoder(Decode()), a new batch each time", _times(batches, lambda: _decode(pool, decoder, payloads))
        ),
        Side(
            "simplejpeg.decode_jpeg(view, buffer=slab[i]), the same slab each time",
            _times(batches, lambda: _decode_bare(pool, slab, payloads)),
        ),
        delivers=f"uint8 of shape ({_BATCH}, {side}, {side}, 3); 2 threads, {_TASK} images a task",
        unit="images",
        count=batches * _BATCH,
        goal=0.9,
    )


def _scaled_beside_whole(pool: ThreadPoolExecutor, batches: int) -> Result:
    import simplejpeg
    from PIL import Image

    payloads = _payloads(1024)
    decoder = BatchDecoder(Decode(size=224))

    def whole(first: int) -> list[Any]:
        images = (Image.fromarray(simplejpeg.decode_jpeg(view)) for view in payloads[first : first + _TASK])
        return [np.asarray(image.resize((224, 224), Image.Resampling.BICUBIC)) for image in images]

    def peer() -> Any:
        return np.stack([each for part in pool.map(whole, range(0, _BATCH, _TASK)) for each in part])

    error = np.abs(_decode(pool, decoder, payloads).astype(np.int16) - peer()).mean()
    check(error < 1, f"pixels, by {error:.2f} on average")
    return compare(
        "1024 pixels to 224",
        Side("BatchDecoder(Decode(size=224))", _times(batches, lambda: _decode(pool, decoder, payloads))),
        Side("simplejpeg.decode_jpeg(view), Image.resize(BICUBIC), np.stack", _times(batches, peer)),
        delivers=f"uint8 of shape ({_BATCH}, 224, 224, 3), which differ by {error:.2f} of 255 on average; 2 threads",
        unit="images",
        count=batches * _BATCH,
        goal=1.5,
    )


def _begin(*, below: float, **options: Any) -> Result:
    payloads = _payloads(64, **options)
    decoder = BatchDecoder(Decode())
    call = Side('decoder.begin("jpg", views)', _times(100, lambda: decoder.begin("jpg", payloads)))
    values = [once(call) / 100 / _BATCH * 1e6 for _ in range(ROUNDS + 1)][1:]
    return limit(
        f"beginning a batch of JPEG {'with' if options else 'without'} EXIF",
        values,
        delivers=f"size and orientation of {_BATCH} images, and the array for them",
        unit="us an image",
        ours=call.name,
        below=below,
    )
