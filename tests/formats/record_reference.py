"""A reader of TFRecord bytes that does one thing after the other, to compare the fast ones with."""

from __future__ import annotations

import struct
from itertools import pairwise

from tfrecords import masked_crc


def read_records(data, *, tf_compat=False):
    """Return the payloads before the first fault, and the code and offset of the fault, or None."""
    payloads, at = [], 0
    while at < len(data):
        left = len(data) - at
        if left < 12:
            return payloads, None if tf_compat else ("truncated_record_header", at)
        length, stored = struct.unpack_from("<QI", data, at)
        if stored != masked_crc(data[at : at + 8]):
            return payloads, ("bad_length_checksum" if any(data[at : at + 12]) else "zero_header", at)
        if length > 2**63 - 17:
            return payloads, ("impossible_length", at)
        if length + 16 > left:
            return payloads, ("truncated_record", at)
        payload = data[at + 12 : at + 12 + length]
        if struct.unpack_from("<I", data, at + 12 + length)[0] != masked_crc(payload):
            return payloads, ("bad_payload_checksum", at)
        payloads.append(payload)
        at += length + 16
    return payloads, None


def drain(records):
    """Return what an iterator of records gives, and the error that ends it, or None."""
    payloads = []
    try:
        for payload in records:
            payloads.append(payload)  # noqa: PERF402 - what came before an error is kept
    except ValueError as error:
        return payloads, error
    return payloads, None


def place(error):
    """Return code and offset of an error, as `read_records` gives them."""
    return None if error is None else (error.code, error.offset)


def cut_at(data, places):
    """Return the pieces between some places."""
    return [data[start:end] for start, end in pairwise([0, *sorted(places), len(data)])]


def mutate(rng, data):
    """Return bytes with a few changes: bits flipped, parts cut out, put in, zeroed or doubled, or an end cut off."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 12, 16, 50))
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = rng.randbytes(length)
        elif kind == 3:
            data[at : at + length] = bytes(len(data[at : at + length]))
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:at] = data[max(0, at - length) : at]
        else:
            data += bytes(length)
    return bytes(data)
