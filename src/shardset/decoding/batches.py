"""Decoding of whole batches, field by field, in threads that share out the places of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import DecodeError
from shardset.formats.geometry import parse_geometry

from .batch_images import ImageBatch, Seen, Target, decode_shaped
from .clips import Clip, decode_clip
from .field_batch import BUFFERS, FieldBatch, ValueBatch, not_a_payload, payload_of, stack
from .images import IMAGE_SUFFIXES, is_readable
from .media import decode_audio, decode_video
from .options import Decode
from .registry import USUAL, gunzip
from .slabs import Slabs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BatchDecoder", "FieldBatch", "stack"]

_NAMES_KEPT: Final = 4096
"""Names of fields that are remembered. Where keys have dots in them, every sample brings new ones."""
_IMAGES: Final = frozenset(IMAGE_SUFFIXES)
_MEDIA: Final[dict[str, Callable[[bytes], Any]]] = {"bytes": bytes, "audio": decode_audio, "video": decode_video}

How = Decode | Clip | Callable[[Any, int], Any] | None
"""What is done with a field: an image, part of a film or of sound, a function of (value, seed), or nothing."""


class BatchDecoder:
    """Decodes batches, and keeps the memory of their arrays for the next ones.

    A payload is any buffer. What is usual for a suffix is done to payloads alone: the features of a record, which are
    parsed already (arrays, and lists of bytes), stay as they are unless the options name them. A list of one bytes
    value then stands for that value; of several, each is decoded, but for images, of which there may be one. Images in
    a gzip (``png.gz``) are unpacked first.

    Pickles where its options do. Safe to share between threads.

    Args:
        options: How fields are decoded; None leaves all as they are.
    """

    def __init__(self, options: Decode | None) -> None:
        self.options = options
        self._slabs = Slabs()
        self._hows: dict[str, How] = {}
        self._seen: dict[str, Seen] = {}

    def reads(self, field: str) -> bool:
        """Tell whether a field is wanted as its payload; if not, as a seekable file.

        Of the file a `Clip` reads what it needs, and closes it. A ``"file"`` is the value itself.
        """
        how = self.options.fields.get(field) if self.options else None
        return not isinstance(how, Clip) and how != "file"

    def begin(self, field: str, payloads: Sequence[Any], *, shape: tuple[int, int] | None = None) -> FieldBatch:
        """Return a batch of a field, to be filled.

        Args:
            field: Its name.
            payloads: One a place. For images they are held until the batch is finished. There is one array for all of
                them, if they come out in one shape, which their headers tell, or the batch before.
            shape: Height and width in pixels that images are wanted in, whatever the options say.
        """
        how = self._how(field)
        if isinstance(how, Clip):
            return ValueBatch(len(payloads), partial(_clip, clip=how))
        if not isinstance(how, Decode):
            return ValueBatch(len(payloads), _unchanged if how is None else how)
        is_named = self.options is not None and field in self.options.fields
        if not is_named and not any(isinstance(each, BUFFERS) for each in payloads):
            return ValueBatch(len(payloads), _unchanged)  # a feature of records that is called like a suffix
        if field[-3:].lower() == ".gz":
            return ValueBatch(len(payloads), partial(_gzipped, options=how, shape=shape, slabs=self._slabs))
        return ImageBatch(how, payloads, shape, self._slabs, self._seen.setdefault(field, Seen()))

    def _how(self, field: str) -> How:
        if self.options is None:
            return None
        try:
            return self._hows[field]
        except KeyError:
            how = _find(field, self.options)
        if len(self._hows) >= _NAMES_KEPT:
            self._hows.clear()
            self._seen.clear()
        self._hows[field] = how
        return how

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.options,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options!r})"


def _find(field: str, options: Decode) -> How:
    named = options.fields.get(field)
    if named is None:
        rest, _, suffix = field.lower().rpartition(".")
        if suffix == "gz":
            suffix = rest.rpartition(".")[2]
        if suffix in _IMAGES and is_readable(suffix):
            return options
        decode = USUAL.find(field)
        return partial(_usual, decode=bytes if decode is None else decode)
    if named == "file":
        return None
    if named == "image":
        return options
    if named == "scalar":
        return _scalar
    if isinstance(named, str):
        return partial(_by_word, decode=_MEDIA.get(named) or USUAL.table[named])
    return named if isinstance(named, Decode | Clip) else partial(_by_function, decode=named)


def _unchanged(value: Any, _seed: int) -> Any:
    return value


def _scalar(value: Any, _seed: int) -> Any:
    """Return the only value of a feature: a number, or bytes."""
    if isinstance(value, np.ndarray) and value.size == 1:
        return value.item()
    payload = payload_of(value)
    if payload is None:
        count = len(value) if isinstance(value, np.ndarray | list) else 0
        raise DecodeError(f"it has {count} values, and a scalar has one")
    return _as_bytes(payload)


def _usual(value: Any, _seed: int, *, decode: Callable[[bytes], Any]) -> Any:
    return decode(_as_bytes(value)) if isinstance(value, BUFFERS) else value


def _by_word(value: Any, _seed: int, *, decode: Callable[[bytes], Any]) -> Any:
    payload = payload_of(value)
    if payload is not None:
        return decode(_as_bytes(payload))
    if not isinstance(value, list) or not value:
        raise not_a_payload(value)
    return [decode(_as_bytes(each)) for each in value]


def _by_function(value: Any, _seed: int, *, decode: Callable[[Any], Any]) -> Any:
    payload = payload_of(value)
    return decode(value if payload is None else _as_bytes(payload))


def _clip(value: Any, seed: int, *, clip: Clip) -> Any:
    payload = payload_of(value)
    if payload is not None:
        return decode_clip(payload, clip, seed)
    if not hasattr(value, "read"):
        raise not_a_payload(value)
    with value:
        return decode_clip(value, clip, seed)


def _gzipped(value: Any, seed: int, *, options: Decode, shape: tuple[int, int] | None, slabs: Slabs) -> Any:
    packed = payload_of(value)
    if packed is None:
        raise not_a_payload(value)
    payload = gunzip(_as_bytes(packed))
    return decode_shaped(payload, parse_geometry(payload), options, Target(shape or options.shape, seed), slabs)


def _as_bytes(payload: Any) -> bytes:
    return payload if type(payload) is bytes else bytes(payload)
