"""What the sidecar of a loose file, or the name of a file in an archive, says of it: webshart's rules for conversions.

They differ a little from those for sidecars within shards (`shardset.formats.captions`): strings lose the white space
around them, only strings are kept once, and one object in a list stays in its list.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NoReturn

from shardset.formats.captions import CAPTION_KEYS

if TYPE_CHECKING:
    from shardset.formats.captions import Captions, CaptionValue

MAX_SIDECAR: Final = 4 << 20
"""Sidecars above this many bytes are refused."""


def caption_from_name(path: str) -> str | None:
    """Return the caption that a file's name is: without folders and suffix, with spaces for underscores."""
    return PurePosixPath(path).stem.replace("_", " ").strip() or None


def parse_text_sidecar(payload: bytes) -> Captions:
    """Return what a ``.txt`` sidecar says: a JSON object or list of captions as it is, else the text; None for blanks.

    Raises:
        ValueError: It is not UTF-8.
    """
    text = payload.decode("utf-8-sig").strip()
    if text.startswith(("{", "[")):
        try:
            value = _parse(text)
        except ValueError:
            return text
        if isinstance(value, dict) or _is_caption_list(value):
            captions: Captions = value
            return captions
    return text or None


def parse_json_sidecar(payload: bytes) -> tuple[Captions, dict[str, Any] | None]:
    """Return the captions in a ``.json`` sidecar, and the whole of it if it is an object.

    An object without any key for captions is a caption as a whole.

    Raises:
        ValueError: It is not JSON, or not in a Unicode encoding.
    """
    value = _parse(payload)
    if _is_caption_list(value):
        return value, None
    if not isinstance(value, dict):
        return _normalized(value), None
    if not any(key in value for key in CAPTION_KEYS):
        return value, value
    found: list[CaptionValue] = []
    for key in CAPTION_KEYS:
        captions = _normalized(value.get(key))
        if isinstance(captions, list):
            found += captions
        elif captions is not None:
            found.append(captions)
    return _normalized(found), value


def _normalized(value: Any) -> Captions:
    if isinstance(value, str):
        return value.strip() or None
    if not isinstance(value, list):
        return value if isinstance(value, dict) else None
    captions: list[CaptionValue] = []
    seen = set()
    for item in value:
        if isinstance(item, dict):
            captions.append(item)
        elif isinstance(item, str) and (text := item.strip()) and text not in seen:
            seen.add(text)
            captions.append(text)
    if len(captions) == 1 and isinstance(captions[0], str):
        return captions[0]
    return captions or None


def _is_caption_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str | dict) for item in value)


def _parse(text: str | bytes) -> Any:
    # Python's parser keeps integers of any size and knows UTF-16, as webshart did; it also takes NaN, which no index
    # could hold.
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")
