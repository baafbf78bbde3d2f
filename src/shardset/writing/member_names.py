"""Names of a tar's members that say which feature of an Example they hold, and of what kind it is.

A sample's members are named ``KEY.SUFFIX``. In a tar whose ``__shardset__/features.json`` says so, the suffixes are::

    NAME.npy            a feature of floats (float32) or of whole numbers (int64), as a row
    NAME.jpg            a feature of one byte string; the suffix fits its content: jpg, png, wav, ... txt, json, bin
    NAME.0.jpg          the first of several byte strings of a feature; NAME.1.jpg the second, and so on
    NAME.empty          a feature of byte strings that has none
    NAME.none           a feature without a kind
    NAME.seq.npy        a feature list of a SequenceExample, all steps of one kind and length, as a table
    NAME.seq.0.jpg      the first step of a feature list, each step being one byte string
    NAME.seq.empty      a feature list without steps
    NAME.seq.pb         any other feature list, alone in a serialized SequenceExample
    jpg, txt, bin ...   the whole record, which is no Example; the only member of its sample

`NAME` is the feature's name. Of it letters, digits, ``-`` and ``_`` stand for themselves, any other byte of its UTF-8
is ``%2f`` for a slash and so on, and an empty name is ``%``. Readers of webdataset take suffixes for lower case, so
where two features of a record differ by case alone, their capitals are written ``%41`` too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import orjson

from shardset.formats.geometry import sniff_kind

NUMBERS, NONE, EMPTY, SEQUENCE, MESSAGE = "npy", "none", "empty", "seq", "pb"
"""Parts of suffixes that mean something. No byte string is given one of them."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]+")
_UNUSUAL: Final = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPED: Final = re.compile(rb"%([0-9a-fA-F]{2})")
_MEDIA: Final = {
    kind: {"jpeg": "jpg", "tiff": "tif", "hdf5": "h5", "gzip": "gz", "zstd": "zst", "heif": "heic"}.get(kind, kind)
    for kind in (
        *("jpeg", "png", "webp", "gif", "bmp", "tiff", "jxl", "jp2", "ico", "psd", "exr", "avif", "heic", "heif"),
        *("mov", "m4a", "mp4", "webm", "mkv", "avi", "wav", "flac", "ogg", "mp3"),
        *("hdf5", "parquet", "arrow", "safetensors", "pdf", "zip", "gzip", "bz2", "xz", "zstd"),
    )
}
# Signatures of two bytes or so, which text or random bytes have often enough.
_WEAK: Final = frozenset({"jxl", "jp2", "mp3", "bmp", "gzip"})
_CONTROLS: Final = bytes(byte for byte in range(0x20) if byte not in b"\t\n\f\r\x1b") + b"\x7f"
_HEAD: Final = 64


@lru_cache(4096)  # the records of a shard share their names
def escape_name(name: str, *, keeps_case: bool = True) -> str:
    """Return a feature's name as it stands in a member's name: without dots and slashes."""
    if keeps_case and _PLAIN.fullmatch(name):
        return name
    raw = name.encode("utf-8", "surrogateescape")
    escaped = _UNUSUAL.sub(lambda match: b"%%%02x" % match[0][0], raw).decode("ascii")
    if not keeps_case:
        escaped = re.sub("[A-Z]", lambda match: f"%{ord(match[0]):02x}", escaped)
    return escaped or "%"


def unescape_name(text: str) -> str:
    """Return the feature's name for what `escape_name` made of it."""
    if "%" not in text:
        return text
    raw = b"" if text == "%" else text.encode("utf-8", "surrogateescape")
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), raw).decode("utf-8", "surrogateescape")


class ContentSuffixes:
    """Suffixes for byte strings by what they hold: the same for all values of a feature, as far as they allow it.

    Pictures, sound and other kinds with a signature are told by each value. Whether the rest of a feature is text, JSON
    or neither is decided by the values that were shown first, so that one caption that is no text, or one row of pixels
    that happens to be some, does not change the suffix from sample to sample.
    """

    def __init__(self) -> None:
        self._looks: dict[str, str] = {}

    def observe(self, name: str, value: bytes | memoryview) -> None:
        """Look at a value before anything is named: a feature is what all such values are."""
        if not len(value) or _media(value) is not None:
            return
        look = _look(value)
        before = self._looks.setdefault(name, look)
        if look != before:
            self._looks[name] = "bin" if "bin" in {look, before} else "txt"

    def suffix(self, name: str, value: bytes | memoryview) -> str:
        """Return the suffix for a value of a feature."""
        media = _media(value)
        if media is not None:
            return media
        known = self._looks.get(name)
        if not len(value):
            return known if known == "bin" else "txt"
        if known == "bin":
            return known
        look = _look(value)
        if known is None:
            self._looks[name] = known = look
        # A value that is not what the others are still gets a suffix that it can be decoded by.
        return known if look == known or (known, look) == ("txt", "json") else look


def _media(value: bytes | memoryview) -> str | None:
    kind = sniff_kind(value[:_HEAD])
    return None if kind is None or (kind in _WEAK and len(value) < _HEAD) else _MEDIA.get(kind)


def _look(value: bytes | memoryview) -> str:
    raw = bytes(value)
    if len(raw.translate(None, _CONTROLS)) < len(raw):
        return "bin"
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bin"
    if raw.lstrip()[:1] in {b"{", b"["}:
        try:
            orjson.loads(raw)
        except ValueError:
            return "txt"
        return "json"
    return "txt"
