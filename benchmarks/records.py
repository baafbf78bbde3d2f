"""Going through TFRecord files beside TensorFlow's `tf_record_iterator` and the `tfrecord` package, and counting.

The two need an environment of their own: `.venv-tensorflow`, or the interpreter that SHARDSET_TENSORFLOW_PYTHON names.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from measure import ROUNDS, Result, Side, check, compare, limit, once

from shardset import iter_records
from shardset.formats.tfrecord import frame_record, scan_records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Any, Self

HERE: Final = Path(__file__).parent
PYTHON: Final = os.environ.get("SHARDSET_TENSORFLOW_PYTHON", str(HERE.parent / ".venv-tensorflow" / "bin" / "python"))
_SEED: Final = 20_260_101


class Kind(NamedTuple):
    """One file: so many records of `length` bytes, or of a random length up to twice that."""

    count: int
    length: int
    is_equal: bool

    @property
    def name(self) -> str:
        """How its lengths are called in the tables."""
        size = f"{self.length // 1000} KB" if self.length >= 1000 else f"{self.length} B"
        return f"{size}, all equal" if self.is_equal else f"{size} on average, random from 0 to twice that"

    def make(self, root: Path) -> Path:
        """Write the file if it is not there."""
        path = root / f"records-{self.length}-{'equal' if self.is_equal else 'random'}-{self.count}.tfrecord"
        if not path.exists():
            rng = random.Random(_SEED)  # noqa: S311 - payloads of noise
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                for _ in range(self.count):
                    payload = rng.randbytes(self.length if self.is_equal else rng.randint(0, 2 * self.length))
                    head, foot = frame_record(payload)
                    file.write(head + payload + foot)
            unfinished.rename(path)
        return path


class Peer:
    """A process that reads files with another library.

    Args:
        program: Its file, which stands beside this one.
        names: What it is told to use.
    """

    def __init__(self, program: str, *names: str) -> None:
        self._program = HERE / program
        self._process = subprocess.Popen(
            [PYTHON, str(self._program), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version = self._answer()

    def ask(self, command: str, path: Path) -> int:
        """Return what the process counts."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        self._process.stdin.write(f"{command} {path}\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{PYTHON} cannot run {self._program}: install tensorflow-cpu and tfrecord there")
        return line.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()


def run(root: Path, *, quick: bool) -> list[Result]:
    part = 10 if quick else 1
    kinds = [
        Kind(count // part, length, is_equal)
        for count, length in ((1_000_000, 100), (20_000, 10_000))
        for is_equal in (True, False)
    ]
    results: list[Result] = []
    with ExitStack() as stack:
        tensorflow = stack.enter_context(Peer("record_peers.py", "tensorflow"))
        package = stack.enter_context(Peer("record_peers.py", "tfrecord"))
        for kind in kinds:
            path = kind.make(root)
            results += _iteration(kind, path, tensorflow, package)
    for kind in kinds[:2]:
        results += _counting(kind, kind.make(root))
    return results


def _iteration(kind: Kind, path: Path, tensorflow: Peer, package: Peer) -> list[Result]:
    small = kind.length < 1000
    for peer in (tensorflow, package):
        check(peer.ask("check", path) == sum(map(len, iter_records(path))), "bytes of all records")
    ours = Side("for record in iter_records(path): ...", lambda: _drain(iter_records(path)))
    return [
        compare(
            f"verified records in order, {kind.name}",
            ours,
            Side(f"tf_record_iterator(path), TensorFlow {tensorflow.version}", lambda: tensorflow.ask("count", path)),
            delivers="payloads as bytes, both checksums compared on both sides",
            unit="records",
            count=kind.count,
            goal=2.0 if small else 4.0,
        ),
        compare(
            f"verified records beside unverified ones, {kind.name}",
            ours,
            Side(f"tfrecord_iterator(path), tfrecord {package.version}", lambda: package.ask("count", path)),
            delivers="ours bytes, both checksums compared; theirs views of one buffer that is used again, not compared",
            unit="records",
            count=kind.count,
            goal=2.0 if small else None,
        ),
    ]


def _counting(kind: Kind, path: Path) -> list[Result]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = len(mapped)

        def count() -> int:
            with memoryview(mapped) as whole:
                return len(scan_records(lambda start, length: whole[start : start + length], size, is_mapped=True))

        def hop() -> int:
            unpack = struct.Struct("<Q").unpack_from
            position = records = 0
            with memoryview(mapped) as whole:
                while position < size:
                    position += unpack(whole, position)[0] + 16
                    records += 1
            return records

        check(count() == hop() == kind.count, "the number of records")
        ours = Side("scan_records(read, size, is_mapped=True)", count)
        seconds = [once(ours) for _ in range(ROUNDS + 1)][1:]
        return [
            compare(
                f"counting records beside a bare loop, {kind.name}",
                ours,
                Side("while p < size: p += unpack_from(view, p)[0] + 16; n += 1", hop),
                delivers="ours offsets and lengths, the checksum of each length compared; theirs a number",
                unit="records",
                count=kind.count,
            ),
            limit(
                f"counting records, {kind.name}",
                [each / kind.count * 1e9 for each in seconds],
                delivers="offsets and lengths of all records, the checksum of each length compared",
                unit="ns a record",
                ours="scan_records(read, size, is_mapped=True)",
                below=250.0,
            ),
        ]


def _drain(records: Iterable[Any]) -> int:
    count = 0
    for _ in records:
        count += 1
    return count
