"""Handlers: functions of a field's name and payload that give its value, or None to leave it to the next one.

They are webdataset's way to say how fields are decoded: ``handler(".seg.png", payload)``, with a dot before the name.
Those that are made here tell from the name alone what they would do, so that the fields of a sample are looked up, and
not asked about one handler after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .images import IMAGE_SUFFIXES, decode_image, find_spec, is_readable
from .registry import USUAL, gunzip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .images import ImageSpec
    from .registry import Decode, Registry

Handler = Callable[[str, bytes], Any]
"""Gives the value of a field, None to leave it to the next handler, or a `Continue`."""


class Continue:
    """What a handler returns to have the next handlers go on with another name and payload.

    Attributes:
        key: The name from here on, with its dot.
        data: The payload from here on.
    """

    __slots__ = ("data", "key")

    def __init__(self, key: str, data: bytes) -> None:
        self.key = key
        self.data = data


@dataclass(frozen=True)
class NamedHandler:
    """A handler whose choice depends on the name alone.

    Attributes:
        find: Gives the function for a name with its dot; None if the field is for other handlers.
        is_final: Whatever the function returns is the value, None included; so JSON's null is None, and not "unknown".
    """

    find: Callable[[str], Decode | None]
    is_final: bool = False

    def __call__(self, key: str, data: bytes) -> Any:
        """Return the value of a field, or None."""
        decode = self.find(key)
        return None if decode is None else decode(data)


def table_handler(registry: Registry = USUAL) -> NamedHandler:
    """Return the handler that decodes what a registry knows by the last part of the name; unpacking is `GUNZIP`'s."""
    return NamedHandler(partial(_find_in_table, registry), is_final=True)


def image_handler(word: str, suffixes: Iterable[str] = IMAGE_SUFFIXES) -> NamedHandler:
    """Return the handler that a word such as ``"pil"`` or ``"rgb8"`` stands for.

    Args:
        word: One of `images.IMAGE_SPECS`.
        suffixes: The last parts of the names of images, in lower case.

    Raises:
        ValueError: There is no such word.
    """
    return NamedHandler(partial(_find_image, find_spec(word), frozenset(suffixes)), is_final=True)


def handle_extension(extensions: str, f: Decode) -> NamedHandler:
    """Return a handler for fields by the last parts of their names.

    Args:
        extensions: Separated by white space, in any case: ``"seg.jpg cls"`` takes ``seg.jpg``, ``left.seg.jpg`` and
            ``cls``, not ``xseg.jpg``.
        f: Turns a payload into a value; where it returns None, the next handlers are asked.
    """
    return NamedHandler(partial(_find_extension, tuple(extensions.lower().split()), f))


def _find_in_table(registry: Registry, key: str) -> Decode | None:
    return registry.table.get(key.rpartition(".")[2].lower())


def _find_image(spec: ImageSpec, suffixes: frozenset[str], key: str) -> Decode | None:
    suffix = key.rpartition(".")[2].lower()
    return partial(decode_image, spec=spec) if suffix in suffixes and is_readable(suffix) else None


def _find_extension(extensions: tuple[str, ...], function: Decode, key: str) -> Decode | None:
    name = "." + key.lower()
    return function if any(name.endswith(f".{extension}") for extension in extensions) else None


def _find_gzip(key: str) -> Decode | None:
    return partial(_unpacked, key[:-3]) if key[-3:].lower() == ".gz" else None


def _unpacked(key: str, data: bytes) -> Continue:
    return Continue(key, gunzip(data))


GUNZIP = NamedHandler(_find_gzip)
"""Unpacks fields whose names end in ``.gz``, and has the next handlers go on with what is before it."""
DEFAULT_PRE: list[Handler] = [GUNZIP]
"""The handlers before those that are given. Changes show in decoders that are made after them."""
DEFAULT_POST: list[Handler] = [table_handler()]
"""The handlers after those that are given. Changes show in decoders that are made after them."""
