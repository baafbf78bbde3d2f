"""Which function decodes a field: one table, by the last part of the field's name, for everything that decodes.

The table is webdataset's, with its slips mended: ``class``, ``count``, ``msgpack`` and ``tenbin`` decode as they are
encoded, uint32 is a type of tenbin, JSON's ``null`` gives None, ``cbor`` is read by a package that is alive. Nothing in
it runs code from the data: fields that hold pickles are refused, with the words that name a function for them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from shardset.errors import DecodeError, MissingExtraError, ShardsetError
from shardset.formats.tenbin import decode_tenbin

from .arrays import MAX_INFLATED, decode_cbor, decode_msgpack, decode_npy, decode_npz

Decode = Callable[[bytes], Any]
"""Turns a payload into a value."""


_ADDRESS: Final = re.compile(r"<_io\.BytesIO object at 0x[0-9a-fA-F]+>")  # different in each run


def decode_text(payload: bytes) -> str:
    """Return UTF-8 text as it is; a byte order mark stays."""
    return str(payload, "utf-8")


def decode_json(payload: bytes) -> Any:
    """Return what a JSON text says. NaN and Infinity are read, and integers of any length are exact."""
    return json.loads(payload)


def gunzip(payload: bytes) -> bytes:
    """Return what a gzip payload unpacks to, all its members together.

    Raises:
        DecodeError: It is no gzip, ends too early, or unpacks to more than `MAX_INFLATED` bytes.
    """
    pieces: list[bytes] = []
    left = MAX_INFLATED
    while payload:
        inflater = zlib.decompressobj(31)
        try:
            piece = inflater.decompress(payload, left + 1)
        except zlib.error as error:
            raise DecodeError(f"not a gzip payload: {error}") from error
        left -= len(piece)
        if left < 0:
            raise DecodeError(f"the gzip payload unpacks to more than {MAX_INFLATED} bytes")
        if not inflater.eof:
            raise DecodeError("the gzip payload ends too early")
        pieces.append(piece)
        payload = inflater.unused_data.lstrip(b"\0")  # zeros after a member are padding, as for the gzip program
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _refuse(_payload: bytes, *, suffix: str, loads: str) -> Any:
    raise DecodeError(
        f"a field that ends in {suffix!r} holds a pickle, and reading one runs any code that it names",
        hint=f'where the data is trusted, name the function: wds.handle_extension("{suffix}", {loads})',
    )


def _decode_gzipped(payload: bytes, inner: Decode | None) -> Any:
    unpacked = gunzip(payload)
    return unpacked if inner is None else inner(unpacked)


@dataclass(frozen=True, slots=True)
class Registry:
    """A table of decoders.

    Attributes:
        table: The function for the last part of a field's name, in lower case: ``json`` for ``meta.json``.
    """

    table: Mapping[str, Decode]

    def extended(self, more: Mapping[str, Decode]) -> Registry:
        """Return a table with more entries, which come before the ones that are there."""
        return Registry({**self.table, **{suffix.lower().lstrip("."): decode for suffix, decode in more.items()}})

    def find(self, field: str) -> Decode | None:
        """Return the function for a field, such as ``json``, ``meta.json`` or ``meta.json.gz``.

        A field whose last part is ``gz`` is unpacked once, and then decoded by the part before it, if that is known.
        None means that a field stays bytes.
        """
        rest, _, suffix = field.lower().rpartition(".")
        decode = self.table.get(suffix)
        if decode is None and suffix == "gz":
            return partial(_decode_gzipped, inner=self.table.get(rest.rpartition(".")[2]))
        return decode

    def decode(self, field: str, payload: bytes, *, shard: str | None = None, key: str | None = None) -> Any:
        """Return a field's value; the payload itself where no function is known for it.

        Raises:
            DecodeError: The payload is not what the name says. `shard` and `key` are for its message.
            MissingExtraError: A package that is needed for it is not installed.
        """
        decode = self.find(field)
        if decode is None:
            return payload
        try:
            return decode(payload)
        except MissingExtraError:
            raise
        except Exception as error:
            raise field_error(error, field, shard=shard, key=key) from error


def field_error(error: Exception, field: str, *, shard: str | None = None, key: str | None = None) -> DecodeError:
    """Return the error to raise, from `error`, for a field that could not be decoded."""
    if isinstance(error, ShardsetError):
        reason, hint = error.message + error.place(), error.hint
    else:
        said = _ADDRESS.sub("the payload", str(error))
        reason, hint = f"{type(error).__name__}: {said}".rstrip(": "), None
    what = f"field {field!r}{'' if key is None else f' of sample {key!r}'} cannot be decoded: {reason}"
    return DecodeError(what, field=field, shard=shard, key=key, hint=hint)


USUAL: Final = Registry(
    {
        **dict.fromkeys(("txt", "text", "transcript"), decode_text),
        **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
        **dict.fromkeys(("json", "jsn"), decode_json),
        "npy": decode_npy,
        "npz": decode_npz,
        **dict.fromkeys(("ten", "tb", "tenbin"), decode_tenbin),
        **dict.fromkeys(("mp", "msg", "msgpack"), decode_msgpack),
        "cbor": decode_cbor,
        **{suffix: partial(_refuse, suffix=suffix, loads="pickle.loads") for suffix in ("pkl", "pickle", "pyd")},
        "pth": partial(_refuse, suffix="pth", loads="wds.torch_loads"),
    }
)
"""What is decoded without being asked for: not images, sound and video, which have many forms (`images`, `media`)."""
