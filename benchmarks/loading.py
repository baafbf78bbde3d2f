"""The exact loader beside other loaders, each in a process of its own: raw samples, decoded photographs, the start.

The peers need an environment of their own: `.venv-loading`, or the interpreter that SHARDSET_LOADING_PYTHON names.
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Final, NamedTuple

from corpus import large, small
from measure import ROUNDS, Comparison, Limit, check, limit, line

import shardset

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from measure import Result

HERE: Final = Path(__file__).parent
_PROGRAM: Final = HERE / "loading_peers.py"
PYTHON: Final = os.environ.get("SHARDSET_LOADING_PYTHON", str(HERE.parent / ".venv-loading" / "bin" / "python"))
_PHOTOGRAPHS: Final = HERE.parent / "examples" / "data"
_QUALITY: Final = 85
_SEED: Final = 20_260_106
_LEAST: Final = 256
_NEAR: Final = 0.01
"""Mean difference to Pillow's pixels that rounding explains; FFmpeg, which interpolates colours, has more."""
_OTHER_COLOURS: Final = 3.0

_BEST: Final = {
    "webdataset": "to_tuple, batched with simplejpeg into shared memory, WebLoader of two workers",
    "mosaicml-streaming": "bytes in MDS, collate_fn with simplejpeg into shared memory, DataLoader of two workers",
    "litdata": "bytes in chunks, collate_fn with simplejpeg into shared memory, StreamingDataLoader of two workers",
    "spdl": "iter_tarfile, pipe of whole batches with simplejpeg in two threads",
    "grain": "ArrayRecord, batch with simplejpeg as batch_fn in two threads",
}
_PLAIN: Final = {
    "webdataset": 'shuffle(1000).decode("rgb8").to_tuple("jpg", "cls").batched(64), DataLoader of two workers',
    "mosaicml-streaming": "StreamingDataset of jpeg, shuffle=True, DataLoader of two workers that stacks arrays",
    "litdata": "StreamingDataset of Image, shuffle=True, StreamingDataLoader of two workers",
    "spdl": "iter_tarfile, pipe of load_image_batch in two threads",
    "grain": "ArrayRecord, shuffle(seed).map(Pillow).batch(64).to_iter_dataset()",
}


def run(root: Path, *, quick: bool) -> list[Result]:
    results: list[Result] = []
    for what, corpus in (("10 KB", small(quick=quick)), ("100 KB", large(quick=quick))):
        folder = corpus.make(root)
        shardset.index_dataset(str(folder))
        results += _raw(f"raw samples of {what} in batches of 64", folder)
    for photographs in (Photographs(256, 4 if quick else 16, 512), Photographs(512, 8 if quick else 16, 256)):
        folder = photographs.make(root)
        shardset.index_dataset(str(folder))
        results += _decoded(photographs, folder)
        results.append(_first(photographs, folder))
    return results


def _raw(what: str, folder: Path) -> list[Result]:
    results: list[Result] = []
    for setup, kind, call in (("raw", "bytes", ""), ("views", "views", ".views()")):
        with ExitStack() as stack:
            ours = stack.enter_context(Loading("shardset", setup, folder, 0))
            peer = stack.enter_context(Loading("webdataset", "raw", folder, 0))
            check(ours.ask("check") == peer.ask("check"), f"payloads of {what}")
            calls = (
                f'Loader(ds, 64, fields=["jpg", "json", "cls"]){call}',
                "to_tuple, batched(64), WebLoader of two workers, as bytes",
            )
            delivers = f"lists of 64 payloads of three fields, ours as {kind}"
            results.append(_beside(f"{what}, as {kind}", ours, peer, calls, delivers=delivers, goal=10.0))
    return results


def _decoded(photographs: Photographs, folder: Path) -> list[Result]:
    side = photographs.side
    results: list[Result] = []
    call = 'Loader(ds, 64, fields=["jpg", "cls"], decode=True, read_ahead=ReadAhead(threads=2))'
    delivers = f"uint8 arrays of shape (64, {side}, {side}, 3) and labels, out of JPEGs of quality {_QUALITY}"
    with ExitStack() as stack:
        ours = stack.enter_context(Loading("shardset", "best", folder, side))
        mixed = stack.enter_context(Loading("shardset", "plain", folder, side))
        for each in (ours, mixed):
            _check_pixels(each, _NEAR)
        with Loading("shardset", "torch", folder, side) as peer:
            _check_pixels(peer, _NEAR)
            what = f"{side}-pixel batches beside itself in a DataLoader of two workers"
            calls = call, "DataLoader(IterableDataset(loader.torch()), batch_size=None, num_workers=2)"
            results.append(_beside(what, ours, peer, calls, delivers=delivers, goal=None))
        bare = ("simplejpeg", "best", ours, 0.9, "decode_jpeg(payload, buffer=row) in two threads, payloads in memory")
        best = [(name, "best", ours, 1.0, how) for name, how in _BEST.items()]
        plain = [(name, "plain", mixed, 1.5, how) for name, how in _PLAIN.items()]
        for name, setup, mine, goal, how in (bare, *best, *plain):
            with Loading(name, setup, folder, side) as peer:
                _check_pixels(peer, _OTHER_COLOURS if (name, setup) == ("spdl", "plain") else _NEAR)
                shown = call if mine is ours else call.replace("64,", "64, shuffle=True,")
                words = {"best": "as well as it can be set up", "plain": "as it comes"}[setup]
                what = f"{side}-pixel batches beside {name}{'' if name == 'simplejpeg' else f', {words}'}"
                results.append(_beside(what, mine, peer, (shown, how), delivers=delivers, goal=goal))
    return results


def _first(photographs: Photographs, folder: Path) -> Limit:
    arguments = [PYTHON, str(_PROGRAM), "shardset", "plain", str(folder), str(photographs.side), "first"]
    seconds = [float(subprocess.run(arguments, check=True, capture_output=True).stdout) for _ in range(ROUNDS + 1)]
    return limit(
        f"first batch of {photographs.side}-pixel images in a new process",
        seconds[1:],
        delivers="from when all is imported: the dataset found and opened, a shuffled batch of 64 read and decoded",
        unit="s",
        ours="next(iter(Loader(discover_dataset(folder), 64, shuffle=True, decode=True)))",
        below=0.5,
    )


def _beside(
    what: str, ours: Loading, peer: Loading, calls: tuple[str, str], *, delivers: str, goal: float | None
) -> Comparison:
    """Let both go through an epoch in turns: once to warm up, then `ROUNDS` that count."""
    passes = [(ours.passed(), peer.passed()) for _ in range(ROUNDS + 1)][1:]
    count = passes[0][0].samples
    mine, theirs = (tuple(each.seconds * count / each.samples for each in side) for side in zip(*passes, strict=True))
    name = f"{calls[1]}; {peer.name} {peer.version}"
    result = Comparison(what, delivers, "samples", count, calls[0], name, mine, theirs, goal)
    print(line(result), flush=True)
    return result


def _check_pixels(loading: Loading, most: float) -> None:
    difference = float(loading.ask("check"))
    check(difference <= most, f"{loading.name} is {difference:.3f} off Pillow's pixels")


class Passed(NamedTuple):
    """What an epoch took behind its first batches."""

    seconds: float
    samples: int


class Loading:
    """A process with one loader, set up in one way.

    Args:
        name: The package.
        setup: ``best``, ``plain`` or ``raw``.
        folder: Where the tar shards are.
        side: Pixels of the images.
    """

    def __init__(self, name: str, setup: str, folder: Path, side: int) -> None:
        self.name = name
        self._errors = TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [PYTHON, str(_PROGRAM), name, setup, str(folder), str(side)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.version = self._answer()

    def ask(self, command: str) -> str:
        """Return the answer to a command."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def passed(self) -> Passed:
        """Let the loader go through an epoch."""
        seconds, samples = self.ask("pass").split()
        return Passed(float(seconds), int(samples))

    def _answer(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            why = self._errors.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{why}\n{PYTHON} cannot load with {self.name}: are requirements-loading.txt installed?")
        return answer.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._errors.close()


class Photographs(NamedTuple):
    """Shards of samples with ``cls``, which is their number, and ``jpg``, a square part of a photograph."""

    side: int
    shards: int
    samples: int

    def make(self, root: Path) -> Path:
        """Return the folder of the shards below `root`, making them if they are not there."""
        folder = root / f"photographs-{self.side}-{self.shards}x{self.samples}"
        if folder.exists():
            return folder
        print(f"making {folder}", flush=True)
        part = root / f".{folder.name}.part"
        part.mkdir(parents=True, exist_ok=True)
        chance = random.Random(_SEED)  # noqa: S311 - chooses what to cut out
        pictures = enumerate(self._pictures(chance))
        for shard in range(self.shards):
            with tarfile.open(part / f"shard-{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                for _ in range(self.samples):
                    number, picture = next(pictures)
                    for suffix, payload in (("cls", b"%d" % number), ("jpg", picture)):
                        member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                        member.size = len(payload)
                        tar.addfile(member, io.BytesIO(payload))
        part.rename(folder)
        return folder

    def _pictures(self, chance: random.Random) -> Iterable[bytes]:
        from PIL import Image

        photographs = [Image.open(path).convert("RGB") for path in sorted(_PHOTOGRAPHS.glob("*.jpg"))]
        photographs = [each for each in photographs if min(each.size) >= _LEAST]
        for number in range(self.shards * self.samples):
            photograph = photographs[number % len(photographs)]
            size = chance.randint(_LEAST, min(photograph.size))
            left, top = (chance.randint(0, whole - size) for whole in photograph.size)
            box = (left, top, left + size, top + size)
            part = photograph.resize((self.side, self.side), Image.Resampling.LANCZOS, box)
            buffer = io.BytesIO()
            part.save(buffer, "JPEG", quality=_QUALITY)
            yield buffer.getvalue()
