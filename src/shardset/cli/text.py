"""Text for people and for programs: what a shard's author wrote may reach neither a terminal nor a parser as it is."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

import orjson

_JOINERS: Final = frozenset("\u200c\u200d")  # in ordinary words of some scripts, and in emoji
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB", "EB")


def printable(text: str) -> str:
    r"""Return text that is safe on a terminal, with an escape for each character that it would obey or hide.

    Control characters and the marks that turn the direction of text become ``\x1b`` or ``\u202e``; a byte that is no
    UTF-8 (a surrogate escape) becomes ``\xff``. Spaces of any width stay.
    """
    if text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(text: str) -> str:
    """Return text with each run of white space as one space, made `printable`."""
    return printable(" ".join(text.split()))


def shorten(text: str, width: int) -> str:
    """Cut text to at most `width` characters; the last of them is then an ellipsis."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)].rstrip()}…"


def human_size(size: int) -> str:
    """Return a number of bytes with a decimal unit and about three digits: ``999 B``, ``48.8 kB``, ``1.25 GB``."""
    if size < 1000:
        return f"{size} B"
    value, unit = float(size), "B"
    for unit in _UNITS:  # noqa: B007 - read behind the loop
        value /= 1000
        if value < 999.5:
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 shard``, ``1,024 shards``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def clean(text: str) -> str:
    """Return text that is valid Unicode: what is not UTF-8 in a name becomes U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def name_fields(label: str, name: str) -> dict[str, str]:
    """Return a name for JSON: as text, and where it is not UTF-8 its bytes in hex too, under ``<label>_hex``."""
    text = clean(name)
    return (
        {label: text} if text == name else {label: text, f"{label}_hex": name.encode("utf-8", "surrogateescape").hex()}
    )


def dump_json(document: dict[str, Any], *, is_line: bool = False) -> bytes:
    """Return JSON as UTF-8, in one line or indented, in which no character is one that a terminal would obey."""
    text = orjson.dumps(document, option=0 if is_line else orjson.OPT_INDENT_2).decode()
    lines = (line if line.isprintable() else "".join(map(_escape_json, line)) for line in text.split("\n"))
    return "\n".join(lines).encode()


def _escape_json(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
