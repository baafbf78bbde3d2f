"""Images out of shards: `WebDataset(...).decode(...).to_tuple(...)` beside webdataset's, at 256 pixels."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import webdataset
from measure import Result, Side, check, compare

import shardset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PHOTOGRAPHS: Final = Path(__file__).parent.parent / "examples" / "data"
_SIDE: Final = 256
_QUALITY: Final = 90
_SEED: Final = 20_260_104
_DELIVERS: Final = f"image and label; JPEGs of {_SIDE} pixels and quality {_QUALITY}, the same pixels on both sides"


def run(root: Path, *, quick: bool) -> list[Result]:
    count = 128 if quick else 1000
    shard = _make_shard(root, count)
    return [
        _beside(shard, count, "pil", lambda image: image.tobytes(), 2.0),
        _beside(shard, count, "rgb8", lambda pixels: pixels.tobytes(), 4.0),
    ]


def _make_shard(root: Path, count: int) -> str:
    """Return the path of a shard of samples with ``jpg`` and ``cls``, each with another part of a photograph."""
    path = root / f"pictures-{_SIDE}-{_QUALITY}-{count}.tar"
    if not path.exists():
        chance = random.Random(_SEED)  # noqa: S311 - chooses what to cut out
        unfinished = path.with_suffix(".unfinished")
        with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, picture in enumerate(_pictures(chance, count)):
                for suffix, payload in (("cls", b"%d" % (number % 1000)), ("jpg", picture)):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
        unfinished.rename(path)
    path.read_bytes()  # the page cache is warm from here on
    return str(path)


def _pictures(chance: random.Random, count: int) -> Iterable[bytes]:
    from PIL import Image

    photographs = [Image.open(path).convert("RGB") for path in sorted(_PHOTOGRAPHS.glob("*.jpg"))]
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        side = chance.randint(_SIDE, min(photograph.size))
        left, top = (chance.randint(0, whole - side) for whole in photograph.size)
        part = photograph.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
        buffer = io.BytesIO()
        part.save(buffer, "JPEG", quality=_QUALITY)
        yield buffer.getvalue()


def _beside(shard: str, count: int, word: str, as_bytes: Callable[[Any], bytes], goal: float) -> Result:
    def ours() -> Iterable[tuple[Any, int]]:
        return shardset.WebDataset(shard, shardshuffle=False).decode(word, threads=2).to_tuple("jpg", "cls")

    def theirs() -> Iterable[tuple[Any, int]]:
        pairs: Iterable[tuple[Any, int]] = (
            webdataset.WebDataset(shard, shardshuffle=False).decode(word).to_tuple("jpg", "cls")
        )
        return pairs

    check(_digest(ours(), as_bytes) == _digest(theirs(), as_bytes), f"pixels of {word}")
    return compare(
        f"images as {word}",
        Side(f'WebDataset(url).decode("{word}", threads=2).to_tuple("jpg", "cls")', lambda: _drain(ours())),
        Side(f'WebDataset(url).decode("{word}").to_tuple("jpg", "cls")', lambda: _drain(theirs())),
        delivers=_DELIVERS,
        unit="images",
        count=count,
        goal=goal,
    )


def _drain(pairs: Iterable[Any]) -> None:
    for _ in pairs:
        pass


def _digest(pairs: Iterable[tuple[Any, int]], as_bytes: Callable[[Any], bytes]) -> str:
    state = hashlib.sha256()
    for image, label in pairs:
        state.update(as_bytes(image))
        state.update(b"%d" % label)
    return state.hexdigest()
