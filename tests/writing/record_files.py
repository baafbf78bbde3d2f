"""Reads and makes TFRecord files for tests, with a reader of its own that shares no code with the package's."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

from crc32c import crc32c


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(payload):
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked(length)) + payload + struct.pack("<I", masked(payload))


def read_records(path):
    """Return the payloads of a file, plain, gzip or zlib, all checksums compared; a cut or damaged file fails."""
    data = Path(path).read_bytes()
    if data[:3] == b"\x1f\x8b\x08":
        data = gzip.decompress(data)
    elif data[:1] == b"\x78" and int.from_bytes(data[:2], "big") % 31 == 0:
        inflate = zlib.decompressobj()
        data = inflate.decompress(data)
        assert inflate.eof
        assert inflate.unused_data == b""
    payloads = []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert struct.unpack_from("<I", data, 8)[0] == masked(data[:8])
        payload = data[12 : 12 + length]
        assert len(payload) == length
        assert struct.unpack_from("<I", data, 12 + length)[0] == masked(payload)
        payloads.append(payload)
        data = data[16 + length :]
    return payloads


def left_in(folder):
    """Return the names of all files in a folder, hidden ones too."""
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())
