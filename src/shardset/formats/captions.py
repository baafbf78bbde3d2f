"""Captions as values: what the ``.txt`` and ``.json`` members beside a payload say about it.

A caption is a string or a JSON object; a sample has none, one, or a list of them. The rules are webshart's, with one
difference: a byte order mark before the text is removed, where webshart leaves it in the caption. Everything here is
strict about bytes and silent about meaning: a broken payload is an error or an `InvalidJson`, while valid JSON that
holds no caption is simply None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from shardset.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

CaptionValue = str | dict[str, Any]
Captions = CaptionValue | list[CaptionValue] | None

CAPTION_KEYS: Final = ("caption", "captions", "text", "txt", "description", "descriptions", "prompt", "alt_text")
"""The keys of a JSON sidecar that hold captions, in the order in which their values are collected."""

_OTHER_KEYS: Final = frozenset(CAPTION_KEYS) - {"caption"}
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InvalidJson:
    """Stands for a payload that is not JSON.

    Attributes:
        error: What is wrong, with line and column where the parser tells them.
    """

    error: str


def captions_from_text(payload: Buffer) -> Captions:
    """Return the captions that a ``.txt`` member holds.

    Args:
        payload: UTF-8, with or without a byte order mark.

    Returns:
        None for blank text. For text that is a JSON object, or a JSON list of strings and objects only, that value
        as it is (an empty list, empty strings and repetitions stay). Else the text without white space around it; so
        a JSON number, a quoted string, a mixed list and broken JSON are plain text.

    Raises:
        DecodeError: The payload is not UTF-8. It is a `ValueError`; the byte is in the message and, as ``start``, on
            its cause.
    """
    try:
        text = str(payload, "utf-8").removeprefix("\ufeff").strip()
    except UnicodeDecodeError as error:
        raise DecodeError(
            f"a caption is not UTF-8: {error.reason} at byte {error.start} of its payload",
            hint="re-encode the text as UTF-8",
        ) from error
    if text.startswith(("{", "[")):
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        if isinstance(value, dict) or _only_captions(value):
            captions: Captions = value
            return captions
    return text or None


def captions_from_json(value: Any) -> Captions:
    """Return the captions in a parsed JSON sidecar.

    Args:
        value: What the sidecar's text parses to.

    Returns:
        From an object with any of `CAPTION_KEYS`: their values in that order, being the strings that are not empty,
        the objects, and those among the items of lists; without repetitions and without anything of another type.
        None of them gives None, one gives that value alone, more give a list. White space is kept.
        An object with none of the keys is a caption as a whole, even an empty one (so are, then, the tags or the
        metadata of a sidecar that was never meant as a caption; webshart does the same). A string, and a list of
        strings and objects only, are given as they are. Anything else gives None.
    """
    if isinstance(value, dict):
        caption = value.get("caption")
        if type(caption) is str and _OTHER_KEYS.isdisjoint(value):  # the common shape, kept fast
            return caption or None
        held = [value[key] for key in CAPTION_KEYS if key in value]
        return _collect(held) if held else value
    if isinstance(value, str) or _only_captions(value):
        captions: Captions = value
        return captions
    return None


def captions_from_documents(values: Iterable[Any]) -> list[Captions]:
    """Return what `captions_from_json` does for each of many values."""
    return [
        caption or None
        if type(value) is dict and type(caption := value.get("caption")) is str and _OTHER_KEYS.isdisjoint(value)
        else captions_from_json(value)
        for value in values
    ]


def first_caption(captions: Captions) -> CaptionValue | None:
    """Return the caption itself, or the first of a list; None if there is none."""
    if isinstance(captions, list):
        return captions[0] if captions else None
    return captions


def parse_json_sidecars(payloads: Sequence[Buffer]) -> list[Any | InvalidJson]:
    """Parse many JSON payloads.

    Args:
        payloads: UTF-8 JSON texts, with or without a byte order mark.

    Returns:
        One value for each payload, in order; an `InvalidJson` for one that is not JSON (as NaN and Infinity are not).
    """
    # One by one: a single call over joined payloads, where two broken ones could make up a valid whole, would need
    # separators between them that prove the contrary, and then gains less than a fifth of the time.
    parse = orjson.loads
    values: list[Any | InvalidJson] = []
    for payload in payloads:
        try:
            values.append(parse(payload))  # type: ignore[arg-type] # other buffers raise, and are parsed below
        except orjson.JSONDecodeError:
            values.append(_parse_json(payload))
    return values


def _parse_json(payload: Buffer) -> Any | InvalidJson:
    try:
        return orjson.loads(bytes(payload).removeprefix(_BYTE_ORDER_MARK))
    except orjson.JSONDecodeError as error:
        return InvalidJson(str(error))


def _only_captions(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, (str, dict)) for item in value)


def _collect(values: Iterable[Any]) -> Captions:
    """Return the captions among values and the items of lists, by the rule of `captions_from_json`."""
    found: dict[str | bytes | int, CaptionValue] = {}
    for value in values:
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, str) and item:
                found.setdefault(item, item)
            elif isinstance(item, dict):
                found.setdefault(_fingerprint(item), item)
    captions = list(found.values())
    if not captions:
        return None
    return captions[0] if len(captions) == 1 else captions


def _fingerprint(value: dict[str, Any]) -> bytes | int:
    """Return what is equal for equal JSON objects: Python's ``==`` would take 1, 1.0 and true for the same."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # too deep to be written: equal to itself only
        return id(value)
