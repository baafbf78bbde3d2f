"""The members of a tar that a sample is written as: checked, named, with their headers, before anything is written.

A name that is let through here is read back as what it was: by this package, by webdataset, and from a folder that the
tar was extracted to. Whatever would be lost, merged with something else or come back under another name is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardset.errors import EncodeError
from shardset.formats.naming import is_structural
from shardset.formats.tar_header import padded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .sample_encoders import SampleEncoder
    from .tar_headers import HeaderMaker

SAMPLE_FIELDS: Final = frozenset({"__key__", "__url__", "__local_path__"})
"""Fields that every reader gives a sample of its own. They are no members."""
_RESERVED: Final = SAMPLE_FIELDS | {"__bad__"}
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9-][\w-]*(?:/[A-Za-z0-9-][\w-]*)*", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE: Final = re.compile(r"[A-Za-z]:")
LARGE: Final = 1 << 20
"""Payloads of so many bytes are written at once, smaller ones gathered first."""


class Member(NamedTuple):
    """A member before it is written.

    Attributes:
        field: The field that it holds.
        name: Its whole name.
        header: The bytes that stand before its payload.
        payload: Bytes that nobody changes, or a view of many bytes that are written at once.
    """

    field: str
    name: str
    header: bytes
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SampleMembers:
    """A sample before it is written.

    Attributes:
        key: Its key.
        members: In the order of their fields.
        size: Bytes that they take in a tar, headers and padding included.
        payload_size: Bytes of their payloads.
    """

    key: str
    members: list[Member]
    size: int
    payload_size: int


class MemberMaker:
    """Makes the members of samples.

    Args:
        headers: Makes their headers.
        encoder: Turns a sample's values into bytes; None where they are bytes.
        keep_meta: Write fields that begin with ``_`` too, but for those that every reader makes up.

    Attributes:
        left_out: How often fields beginning with a single ``_`` were not written, by name.
    """

    def __init__(self, headers: HeaderMaker, encoder: SampleEncoder | None, *, keep_meta: bool = False) -> None:
        self._headers = headers
        self._encoder = encoder
        self._keep_meta = keep_meta
        self._checked: set[str] = set()
        self.left_out: dict[str, int] = {}

    def make(self, sample: Mapping[str, Any]) -> SampleMembers:
        """Return the members of a sample.

        Raises:
            EncodeError: The key, a field or a value cannot be written; nothing was.
        """
        if self._encoder is not None:
            sample = self._encoder(sample)
        try:
            key = sample["__key__"]
        except KeyError:
            raise EncodeError("the sample has no __key__", hint='give it one: {"__key__": "000001", ...}') from None
        if not (type(key) is str and _PLAIN_KEY.fullmatch(key)):
            check_key(key)
        make_header, checked = self._headers.make, self._checked
        members = []
        size = payload_size = 0
        for field in self._fields(key, sample):
            if field not in checked:
                check_field(field, key)
                checked.add(field)
            name = f"{key}.{field}"
            if name[0] == "_" and is_structural(name.encode("utf-8", "replace")):
                raise EncodeError(
                    f"a member called {name!r} is taken for no part of a sample",
                    key=key,
                    field=field,
                    hint="let the key not begin with __",
                )
            payload = sample[field]
            if type(payload) is not bytes:
                payload = _to_bytes(payload, field, key)
            length = len(payload)
            try:
                header = make_header(name, length)
            except ValueError as error:  # also a lone surrogate
                raise EncodeError(f"{name!r} cannot be written: {error}", key=key, field=field) from error
            members.append(Member(field, name, header, payload))
            size += len(header) + padded(length)
            payload_size += length
        if not members:
            raise EncodeError(
                "the sample has no field to write beside its key",
                key=key,
                hint="add one, or leave the sample out; fields that begin with _ are written with keep_meta=True only",
            )
        return SampleMembers(key, members, size, payload_size)

    def _fields(self, key: str, sample: Mapping[str, Any]) -> list[str]:
        """Return the fields that become members, sorted."""
        fields = []
        for field in sample:
            if not isinstance(field, str):
                raise EncodeError(
                    f"a field is called {field!r}, a {type(field).__name__}", key=key, hint="call it by a str"
                )
            if field[:1] != "_":
                fields.append(field)
            elif field in SAMPLE_FIELDS:
                continue
            elif self._keep_meta:
                fields.append(field)
            elif field[:2] != "__":
                self.left_out[field] = self.left_out.get(field, 0) + 1
        fields.sort()
        return fields


def check_key(key: object) -> None:
    """Refuse a key that would not be read back as it is.

    Raises:
        EncodeError: It is one.
    """
    if not isinstance(key, str):
        raise EncodeError(f"__key__ is {key!r}, a {type(key).__name__}", hint='write it as text: f"{number:06d}"')
    base = key.rpartition("/")[2]
    problem = hint = ""
    if not key:
        problem, hint = "is empty", "give each sample a key of its own"
    elif not base:
        problem, hint = "ends with a slash", "give it a name behind its folder"
    elif "." in base and base not in {".", ".."}:
        problem = "has a dot in its last part, where a reader would end the key"
        hint = f"replace it: {key[: -len(base)] + base.replace('.', '_')!r}"
    elif key.startswith("/") or _DRIVE.match(key):
        problem, hint = "is an absolute path", "make it relative to the dataset's folder"
    elif ".." in key.split("/") or base == ".":
        problem, hint = "leads out of the folder that it is extracted to", "make it a plain relative path"
    elif "\\" in key:
        problem, hint = "has a backslash, which only some systems take for a folder's end", "write / between folders"
    elif _CONTROL.search(key):
        problem, hint = "has a control character, with which readers end or split names", "replace it"
    elif is_structural(key.encode("utf-8", "replace")):
        problem, hint = "lies in a __name__ folder, which holds no samples", "call the folder otherwise"
    if problem:
        raise EncodeError(f"the key {key!r} {problem}", key=key, hint=hint)


def check_field(field: str, key: str | None = None) -> None:
    """Refuse a field name that would not be read back as it is.

    Raises:
        EncodeError: It is one.
    """
    problem = hint = ""
    if not field:
        problem, hint = "is empty", "call the field by what it holds, such as jpg or caption.txt"
    elif field.startswith("."):
        problem, hint = "begins with a dot, and one more stands before it", f"call it {field.lstrip('.')!r}"
    elif field != field.lower():
        problem, hint = "has capitals, which readers turn into small letters", f"call it {field.lower()!r}"
    elif field in _RESERVED:
        problem, hint = "is a name that readers keep for themselves", "call it otherwise"
    elif "/" in field or "\\" in field:
        problem, hint = "has a slash, behind which readers look for the key", "put folders into the key"
    elif _CONTROL.search(field):
        problem, hint = "has a control character, with which readers end or split names", "replace it"
    if problem:
        raise EncodeError(f"the field name {field!r} {problem}", key=key, field=field, hint=hint)


def _to_bytes(value: Any, field: str, key: str) -> bytes | memoryview:
    """Return a payload's bytes; many bytes that somebody may change later as a view, for they are written at once."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"the text of {field!r} is no UTF-8: {error}", key=key, field=field) from error
    if not isinstance(value, bytes | bytearray | memoryview):
        raise EncodeError(
            f"the value of {field!r} is a {type(value).__name__} and not bytes",
            key=key,
            field=field,
            hint="encode it first, or write with encoder=True",
        )
    view = memoryview(value)
    if view.nbytes < LARGE or not view.c_contiguous:
        return view.tobytes()
    return view.cast("B")
