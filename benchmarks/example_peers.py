"""Decodes Examples with the `tfrecord` package or protobuf alone; `examples.py` runs it with their interpreter.

Answers ``COMMAND PATH`` with a number: ``check`` with a checksum of all values, the others with the count of records.
"""

from __future__ import annotations

import sys
import zlib
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
from tfrecord import example_pb2, reader

KINDS = {"byte": "bytes_list", "float": "float_list", "int": "int64_list"}


@lru_cache
def payloads(path: str) -> list[bytes]:
    return [bytes(record) for record in reader.tfrecord_iterator(path)]


@lru_cache
def parsed(path: str) -> list[dict[str, Any]]:
    return [by_package(raw) for raw in payloads(path)]


def by_package(raw: bytes) -> dict[str, Any]:
    """Decode as `tfrecord_loader` does a record that it has read."""
    example = example_pb2.Example()
    example.ParseFromString(raw)
    return reader.extract_feature_dict(example.features, None, KINDS)


def by_protobuf(raw: bytes) -> dict[str, Any]:
    """Decode in the quickest way that protobuf's objects have."""
    features = {}
    for name, feature in example_pb2.Example.FromString(raw).features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind == "bytes_list":
            features[name] = feature.bytes_list.value[:]
        elif kind == "float_list":
            features[name] = np.array(feature.float_list.value, np.float32)
        else:
            features[name] = np.array(feature.int64_list.value, np.int64)
    return features


def encode(features: dict[str, Any]) -> bytes:
    example = example_pb2.Example()
    for name, value in features.items():
        feature = example.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif value.dtype == np.float32:
            feature.float_list.value.extend(value)
        else:
            feature.int64_list.value.extend(value)
    return example.SerializeToString(deterministic=True)


def checksum(path: str) -> int:
    found = 0
    for features in reader.tfrecord_loader(path, None):
        for name in sorted(features):
            value = features[name]
            found = zlib.crc32(value if isinstance(value, bytes) else value.tobytes(), found)
    return found


def main() -> None:
    print(f"{version('tfrecord')} with protobuf {version('protobuf')}", flush=True)
    for line in sys.stdin:
        command, path = line.rstrip("\n").split(" ", 1)
        count = 0
        if command == "check":
            count = checksum(path)
        elif command == "load":
            for _ in reader.tfrecord_loader(path, None):
                count += 1
        elif command == "encode":
            for features in parsed(path):
                encode(features)
                count += 1
        else:
            decode = by_package if command == "decode" else by_protobuf
            for raw in payloads(path):
                decode(raw)
                count += 1
        print(count, flush=True)


if __name__ == "__main__":
    main()
