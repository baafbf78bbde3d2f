"""What a file of the cache says of itself: its name, and the few bytes behind those that it keeps.

An entry is one file: a block of an object (or the whole of it), then a JSON object, its length in four bytes, and eight
bytes that mark the end. So it is published by one rename, tells what it is without any other file, and whoever cuts it
short cuts off the mark.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from shardset.errors import without_secrets

from .store import url_scheme

_MARK: Final = b"shardset"
_END: Final = struct.Struct(f"<I{len(_MARK)}s")
_VERSION: Final = 1
_MOST_JSON: Final = 1 << 20
DIGEST_SIZE: Final = 16
"""Bytes of the BLAKE2b digest of an entry."""

# By the parameter that holds a signature: the other parameters that come with it. All of them are new whenever a url is
# signed anew, and none says which object it is. A name that ends with a dash stands for all that begin so.
_SIGNED: Final = {
    "x-amz-signature": ("x-amz-",),
    "x-goog-signature": ("x-goog-",),
    "signature": ("expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid"),
    "sig": ("se", "st", "sp", "sv", "sr", "spr", "sip", "skoid", "sktid", "skt", "ske", "sks", "skv"),
}


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What one entry holds.

    Attributes:
        url: The object, as it may be shown.
        identity: The version of the object, as in `ObjectInfo`.
        size: Bytes of the object.
        offset: Where in it the block begins.
        length: Bytes of the block.
        digest: BLAKE2b of the block, in hex.
        created: When it was published, in whole seconds since 1970.
    """

    url: str
    identity: str
    size: int
    offset: int
    length: int
    digest: str = "0" * 2 * DIGEST_SIZE
    created: int = 10**9


def entry_name(url: str, identity: str, size: int, offset: int, length: int) -> str:
    """Return the name of the entry for a block of one version of an object: the same in every process."""
    return _name(url_without_signature(url), identity, size, offset, length)


@lru_cache(4096)
def _name(*parts: str | int) -> str:
    return hashlib.sha256(json.dumps((_VERSION, *parts)).encode()).hexdigest()


def url_without_signature(url: str) -> str:
    """Return what stays the same when a url is signed anew, or used with another login. A path is made absolute."""
    scheme = url_scheme(url)
    if not scheme:
        return os.path.abspath(url)  # noqa: PTH100 - links stay as named
    if scheme in {"file", "memory"} or not ("?" in url or "@" in url):
        return url
    parts = urlsplit(url)
    fields = [field for field in parts.query.split("&") if field]
    names = {field.partition("=")[0].lower() for field in fields}
    for signature, others in _SIGNED.items():
        if signature in names:
            gone = (signature, *others)
            fields = [field for field in fields if not _is_one_of(field.partition("=")[0].lower(), gone)]
    return urlunsplit((scheme, parts.netloc.rpartition("@")[2], parts.path, "&".join(fields), parts.fragment))


def _is_one_of(name: str, names: tuple[str, ...]) -> bool:
    return any(name == one or (one.endswith("-") and name.startswith(one)) for one in names)


def shown_url(url: str) -> str:
    """Return a url as events, listings and entries tell it."""
    return without_secrets(url)


def pack_footer(info: EntryInfo) -> bytes:
    """Return what stands behind the block. Its length does not depend on `digest` and `created`."""
    text = json.dumps(asdict(info)).encode()
    return text + _END.pack(len(text), _MARK)


def read_footer(handle: int, size: int) -> EntryInfo:
    """Read what an open file of `size` bytes says of itself.

    Raises:
        ValueError: It is no whole entry: it was cut, or is something else.
        OSError: It cannot be read.
    """
    json_end = size - _END.size
    if json_end < 0:
        raise ValueError("too short for an entry")
    length, mark = _END.unpack(_read_at(handle, json_end, _END.size))
    if mark != _MARK or length > min(json_end, _MOST_JSON):
        raise ValueError("the mark of the end is missing")
    try:
        info = EntryInfo(**json.loads(_read_at(handle, json_end - length, length)))
        is_whole = info.length + length == json_end and 0 <= info.offset <= info.size - info.length
    except TypeError as error:
        raise ValueError("its description is of another form") from error
    if not is_whole:
        raise ValueError("its size is not what its description says")
    return info


def _read_at(handle: int, offset: int, length: int) -> bytes:
    if hasattr(os, "pread"):
        found = os.pread(handle, length, offset)
    else:
        os.lseek(handle, offset, os.SEEK_SET)
        found = os.read(handle, length)
    if len(found) != length:
        raise ValueError("it was cut while it was read")
    return found
