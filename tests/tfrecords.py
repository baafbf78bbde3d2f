"""Makes TFRecord files for tests by the page's formulas, with a CRC-32C of its own, and copies of foreign ones."""

from __future__ import annotations

import random
import struct
from pathlib import Path

# From the test data and examples of TensorFlow Extended (Apache License 2.0), as they are but for mnist_20.tfrecord,
# the first twenty records of its MNIST example.
FOREIGN = Path(__file__).parent / "data" / "tfrecord"

_TABLE = []
for _byte in range(256):
    _crc = _byte
    for _ in range(8):
        _crc = _crc >> 1 ^ (0x82F63B78 if _crc & 1 else 0)
    _TABLE.append(_crc)


def masked_crc(data):
    """Return the masked CRC-32C of some bytes, bit by bit as the polynomial says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload):
    """Return one record."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc(length)) + payload + struct.pack("<I", masked_crc(payload))


def record_bytes(payloads):
    """Return a TFRecord file."""
    return b"".join(map(frame, payloads))


def make_payloads(count, seed=0, longest=200):
    """Return some payloads of any bytes and lengths, some of them empty."""
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice((0, 1, rng.randrange(longest)))) for _ in range(count)]


def payload_offsets(payloads):
    """Return where the payloads stand in a file of theirs."""
    at, offsets = 12, []
    for payload in payloads:
        offsets.append(at)
        at += len(payload) + 16
    return offsets
