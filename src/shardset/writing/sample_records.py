"""Samples of a tar as Examples, and back: a feature for each suffix, the key, and how the members were named.

``photos/7.JPG`` and ``photos/7.cls`` become an Example with the features ``jpg`` and ``cls``, one byte string each,
``__key__``, which is ``photos/7``, and ``__fields__``, the suffixes as they were spelled, in archive order: an Example
is a map, which has no order, and webdataset takes suffixes for lower case. A suffix that a sample has twice is one
feature with two values. A record that is made like this becomes the same members again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardset.errors import SampleError
from shardset.formats.example import encode_example
from shardset.formats.naming import base_plus_ext, is_structural

from .record_members import KEY, Member

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardset.formats.example import Feature

FIELDS: Final = "__fields__"
"""The feature that holds the suffixes of a sample's members as they are spelled, in archive order."""
RECORD_SUFFIX: Final = "shardset-record"
"""Suffix of a record among samples that were members once, which is none of them."""
NUMBERED: Final = "%"
"""What keys begin with that are numbers in place of what a record does not have. No other key does."""
_LONGEST_KEY: Final = 1024


def sample_record(key: str, members: Sequence[tuple[str, memoryview]]) -> bytes:
    """Return the record for a sample.

    Args:
        key: Its key; bytes that are no UTF-8 are surrogate escapes, here and in suffixes.
        members: Suffixes as they are spelled, and payloads, in archive order.

    Raises:
        SampleError: A suffix is that of a feature which the record has of its own.
    """
    if key.startswith(NUMBERED) and len(members) == 1 and members[0][0] == RECORD_SUFFIX:
        return bytes(members[0][1])
    features: dict[str, list[bytes | memoryview]] = {}
    for suffix, payload in members:
        features.setdefault(suffix.lower(), []).append(payload)
    for name in (KEY, FIELDS):
        if name in features:
            what = f"sample {key!r} has a member with the suffix {name!r}, a feature that its record has of its own"
            raise SampleError(what, key=key, hint="write the shard again with another name")
    features[KEY] = [key.encode("utf-8", "surrogateescape")]
    features[FIELDS] = [suffix.encode("utf-8", "surrogateescape") for suffix, _ in members]
    return encode_example(features)


def sample_members(features: Mapping[str, Feature]) -> tuple[str, list[Member]] | None:
    """Return the key and the members that a record was made of by `sample_record`, or None if it was not."""
    key, fields = usable_key(features), features.get(FIELDS)
    if key is None or not isinstance(fields, list) or not fields:
        return None
    values = {}
    for name, feature in features.items():
        if name not in {KEY, FIELDS}:
            if not isinstance(feature, list):
                return None
            values[name] = iter(feature)
    members = []
    for field in fields:
        suffix = _text(field)
        value = next(values.get(suffix.lower(), iter(())), None)
        if value is None or "/" in suffix or "\0" in suffix:
            return None
        members.append(Member(suffix, (value,)))
    if any(next(rest, None) is not None for rest in values.values()):
        return None
    return key, members


def usable_key(features: Mapping[str, Feature]) -> str | None:
    """Return the key that a record states, if members can be named by it; else None."""
    stated = features.get(KEY)
    if not isinstance(stated, list) or len(stated) != 1:
        return None
    raw = bytes(stated[0])
    if not 0 < len(raw) <= _LONGEST_KEY or b"\0" in raw or raw.startswith((NUMBERED.encode(), b"/")):
        return None
    if b".." in raw.split(b"/") or is_structural(raw + b".x"):
        return None
    return _text(raw) if base_plus_ext(raw + b".x") == (raw, b"x") else None


def _text(raw: bytes | memoryview) -> str:
    return bytes(raw).decode("utf-8", "surrogateescape")
