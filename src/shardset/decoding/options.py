"""What a loader is told about decoding: how images come out, and how single fields are decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from .clips import Clip
from .registry import USUAL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Crop = Literal["center", "random", "none"]
Mode = Literal["rgb", "l", "rgba"]
Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest"]

MAX_PIXELS: Final = 89_478_485
"""Pixels that an image may have: Pillow's own limit, a quarter of a gigabyte of RGB."""
CHANNELS: Final[Mapping[Mode, int]] = {"l": 1, "rgb": 3, "rgba": 4}
"""Channels of the arrays, by mode. Grey images have an axis for their one channel too."""
WORDS: Final = ("image", "audio", "video", "file", "bytes", "scalar")
"""What a field can be said to be, beside the suffixes of `registry.USUAL`."""


@dataclass(frozen=True, slots=True)
class Decode:
    """How the fields of samples are decoded.

    Images come out as uint8 arrays of shape (height, width, channels). Fields with other suffixes are decoded as
    `registry.USUAL` has it, and those that it does not know stay bytes, sound and video among them: a short file may
    be hours of film.

    Attributes:
        size: Height and width of images in pixels; one number for a square; None leaves each at its own.
        crop: How an image of another shape becomes `size`. ``"center"``: scaled until it covers it, then cut in the
            middle. ``"random"``: cut at a place that the seed of the sample decides, the same one for all its images.
            ``"none"``: scaled to it, the shape not kept.
        orient: Turn images as EXIF asks. HEIC and JPEG XL, whose formats have decoders turn them, are turned anyway.
        mode: ``"rgb"``, ``"l"`` (grey, one channel) or ``"rgba"``.
        max_pixels: An image of more pixels, as stored, is refused before it is decoded. What Pillow decodes, which is
            all but ordinary JPEG, is held to ``PIL.Image.MAX_IMAGE_PIXELS`` too.
        interpolation: The filter for scaling. All but ``"nearest"``, which is for masks, look at all pixels that an
            output pixel covers.
        fields: How single fields are decoded, by their whole names; wins over what is usual. A word: ``"image"``,
            ``"audio"``, ``"video"``, ``"bytes"``, ``"file"`` (a seekable file, which nothing of is read unasked),
            ``"scalar"`` (of a feature of a record, which has any number of values, the only one), or a
            suffix such as ``"json"`` or ``"npy"``. Or a `Clip`; or a `Decode`, without fields of its own, for an image
            with settings of its own; or a function of the payload, which is given as bytes.

    Raises:
        ValueError: A value is none of these.
        TypeError: A field is given something else than these.
    """

    size: int | tuple[int, int] | None = None
    crop: Crop = "center"
    orient: bool = True
    mode: Mode = "rgb"
    max_pixels: int = MAX_PIXELS
    interpolation: Interpolation = "bicubic"
    fields: Mapping[str, str | Clip | Decode | Callable[[bytes], Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, words in (("crop", Crop), ("mode", Mode), ("interpolation", Interpolation)):
            _check_word(name, getattr(self, name), get_args(words))
        shape: object = self.shape
        if shape is not None and not (isinstance(shape, tuple) and len(shape) == 2 and all(map(_is_count, shape))):
            raise ValueError(f"size={self.size!r}: it is (height, width) in pixels, one number for both, or None")
        if not _is_count(self.max_pixels):
            raise ValueError(f"max_pixels={self.max_pixels!r}: it is a number of pixels, at least 1")
        for name, how in self.fields.items():
            _check_field(name, how)

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width that all images come out with; None if each has its own."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _check_word(name: str, given: object, words: tuple[str, ...]) -> None:
    if given not in words:
        raise ValueError(f"{name}={given!r}: it is one of {', '.join(map(repr, words))}")


def _check_field(name: str, how: object) -> None:
    if isinstance(how, str):
        if how not in WORDS and how not in USUAL.table:
            words = ", ".join(map(repr, (*WORDS, *USUAL.table)))
            raise ValueError(f"field {name!r} cannot be decoded as {how!r}: it is one of {words}")
    elif isinstance(how, Decode):
        if how.fields:
            raise ValueError(f"the settings for field {name!r} have fields of their own, and are for that field alone")
    elif not isinstance(how, Clip) and not callable(how):
        raise TypeError(f"field {name!r}: {how!r} is neither a word, nor a Clip, a Decode or a function")
