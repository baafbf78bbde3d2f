"""Decoding and encoding `tf.train.Example` beside the `tfrecord` package and beside protobuf alone, and schemas.

The peers need an environment of their own: `.venv-tensorflow`, or the interpreter in SHARDSET_TENSORFLOW_PYTHON.
What they take depends on their protobuf, whose release stands beside theirs: since 7 it hands numbers to numpy at once.
"""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from measure import ROUNDS, Result, Side, check, compare, limit, once
from records import Peer

from shardset import encode_example, iter_records, parse_example
from shardset.formats.example_schema import SchemaBuilder
from shardset.formats.tfrecord import frame_record

if TYPE_CHECKING:
    from collections.abc import Callable

HERE: Final = Path(__file__).parent
PYTHON: Final = os.environ.get("SHARDSET_TENSORFLOW_PYTHON", str(HERE.parent / ".venv-tensorflow" / "bin" / "python"))
_SEED: Final = 20_260_102
_DELIVERS: Final = "every feature by name: float32 (ours a view) and int64 arrays, byte strings as bytes"


class Kind(NamedTuple):
    """Records of one kind. `decoding` and `loading` are the goals for the ratio to the `tfrecord` package."""

    name: str
    count: int
    make: Callable[[random.Random], dict[str, Any]]
    decoding: float | None = None
    loading: float | None = None

    def write(self, root: Path) -> Path:
        """Write the file if it is not there."""
        path = root / f"examples-{self.name.replace(' ', '-')}-{self.count}.tfrecord"
        if not path.exists():
            rng = random.Random(_SEED)  # noqa: S311 - payloads of noise
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                for _ in range(self.count):
                    payload = encode_example(self.make(rng))
                    head, foot = frame_record(payload)
                    file.write(head + payload + foot)
            unfinished.rename(path)
        return path


def _image(rng: random.Random) -> dict[str, Any]:
    return {
        "image/encoded": rng.randbytes(rng.randint(8000, 12_000)),
        "image/format": b"jpeg",
        "image/height": rng.randint(100, 1000),
        "image/width": rng.randint(100, 1000),
        "label": rng.randrange(100),
        "text": rng.choice([b"tabby", b"rocket", b"church tower"]),
    }


def _floats(rng: random.Random) -> dict[str, Any]:
    return {"values": np.frombuffer(rng.randbytes(4000), "<u4").astype(np.float32), "label": rng.randrange(10)}


def _ints(rng: random.Random) -> dict[str, Any]:
    return {"tokens": np.array([rng.randrange(50_000) for _ in range(1000)])}


def run(root: Path, *, quick: bool) -> list[Result]:
    part = 10 if quick else 1
    kinds = [
        Kind("images of 10 KB with 5 small features", 10_000 // part, _image, 2.0, 2.0),
        Kind("1,000 floats with a label", 20_000 // part, _floats, 10.0),
        Kind("1,000 ints up to 50,000", 10_000 // part, _ints),
    ]
    results: list[Result] = []
    with Peer("example_peers.py") as peer:
        for kind in kinds:
            results += _beside(kind, kind.write(root), peer)
    for kind in kinds:
        results.append(_schema(kind, kind.write(root)))
    return results


def _beside(kind: Kind, path: Path, peer: Peer) -> list[Result]:
    records = list(iter_records(path))
    features = [_as_given(parse_example(raw)) for raw in records]
    check(_checksum(path) == peer.ask("check", path), "values of all features")
    check(all(map(bytes.__eq__, records, map(encode_example, features))), "encoded again")
    ours = Side("for raw in payloads: parse_example(raw)", lambda: [parse_example(raw) and None for raw in records])
    return [
        compare(
            f"decoding, {kind.name}",
            ours,
            Side(f"ParseFromString, extract_feature_dict: tfrecord {peer.version}", lambda: peer.ask("decode", path)),
            delivers=_DELIVERS,
            unit="records",
            count=kind.count,
            goal=kind.decoding,
        ),
        compare(
            f"decoding beside protobuf alone, {kind.name}",
            ours,
            Side("FromString, then np.array(list.value) or value[:]", lambda: peer.ask("protobuf", path)),
            delivers=_DELIVERS,
            unit="records",
            count=kind.count,
        ),
        compare(
            f"a file's features, {kind.name}",
            Side(
                "for raw in iter_records(path): parse_example(raw)",
                lambda: [parse_example(raw) and None for raw in iter_records(path)],
            ),
            Side("for features in tfrecord_loader(path, None): ...", lambda: peer.ask("load", path)),
            delivers=f"{_DELIVERS}; ours with both checksums compared, theirs with none",
            unit="records",
            count=kind.count,
            goal=kind.loading,
        ),
        compare(
            f"encoding, {kind.name}",
            Side("encode_example(features)", lambda: [encode_example(each) and None for each in features]),
            Side("value.extend(array), SerializeToString(deterministic=True)", lambda: peer.ask("encode", path)),
            delivers="the same bytes",
            unit="records",
            count=kind.count,
        ),
    ]


def _schema(kind: Kind, path: Path) -> Result:
    records = list(iter_records(path))
    ours = Side("SchemaBuilder().update(payloads)", lambda: SchemaBuilder().update(records))
    return limit(
        f"schema, {kind.name}",
        [once(ours) / kind.count * 1e6 for _ in range(ROUNDS + 1)][1:],
        delivers="kinds, lengths, counts and sizes of every feature of every record",
        unit="us a record",
        ours=ours.name,
        below=10.0,
    )


def _as_given(features: dict[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, list) else value for name, value in features.items()}


def _checksum(path: Path) -> int:
    found = 0
    for raw in iter_records(path):
        features = _as_given(parse_example(raw))
        for name in sorted(features):
            value = features[name]
            found = zlib.crc32(value if isinstance(value, bytes) else value.tobytes(), found)
    return found
