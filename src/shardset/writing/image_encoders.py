"""Images into bytes, by Pillow: arrays as the image decoders give them, and Pillow's own images."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import MissingExtraError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

_FORMATS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif", "img", "image"), ("JPEG", {"quality": 100})),
    "png": ("PNG", {}),
    "webp": ("WEBP", {"lossless": True, "exact": True}),
    **dict.fromkeys(("tif", "tiff"), ("TIFF", {})),
    "bmp": ("BMP", {}),
    "jp2": ("JPEG2000", {}),
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), ("PPM", {})),
}
IMAGE_SUFFIXES: Final = tuple(_FORMATS)
"""Suffixes that images are written for. JPEG, at quality 100, is the only one that changes pixels."""
_NETPBM: Final = {"pbm": ("1",), "pgm": ("L", "I;16", "I"), "ppm": ("RGB",)}
_OUTSIDE: Final = 0.001
"""How far floats may be out of 0 to 1, as filters make them; they are clipped."""


def encode_image(image: Any, format: str = "PNG") -> bytes:  # noqa: A002 - webdataset's name
    """Return an image as a file's bytes.

    Args:
        image: A Pillow image; or an array of shape (height, width) or (height, width, channels) with 1, 3 or 4
            channels, of uint8, of floats from 0 to 1, of bools, or, grey, of uint16.
        format: A suffix in `IMAGE_SUFFIXES`, in any case.

    Raises:
        ValueError: It is no image, its values are out of range, or the format cannot hold it.
        MissingExtraError: Pillow is not installed.
    """
    suffix = format.lower()
    if suffix not in _FORMATS:
        raise ValueError(f"images are not written as {format!r}; there are {', '.join(IMAGE_SUFFIXES)}")
    picture = _to_picture(image)
    if suffix in _NETPBM:
        picture = _for_netpbm(picture, suffix)
    kind, options = _FORMATS[suffix]
    file = io.BytesIO()
    try:
        picture.save(file, format=kind, **options)
    except OSError as error:  # Pillow's way of saying that a format has no such mode
        raise ValueError(f"an image of mode {picture.mode} as {suffix}: {error}; convert it first") from error
    return file.getvalue()


def _to_picture(image: Any) -> Image:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images are written by Pillow", extra="images") from error
    if isinstance(image, Image.Image):
        return image
    if not isinstance(image, np.ndarray):
        raise ValueError(f"an image is an array or a Pillow image, not a {type(image).__name__}")  # noqa: TRY004
    pixels = _to_pixels(image)
    if pixels.dtype == np.bool_:
        return Image.fromarray(pixels.astype(np.uint8) * 255).convert("1")
    return Image.fromarray(pixels)


def _to_pixels(image: NDArray[Any]) -> NDArray[Any]:
    """Return an array that Pillow takes."""
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in {3, 4})) or 0 in image.shape:
        hint = "; channels come last" if image.ndim == 3 and image.shape[0] in {1, 3, 4} else ""
        raise ValueError(f"an array of shape {image.shape} is no image{hint}")
    if image.dtype.kind == "f":
        low, high = float(image.min()), float(image.max())
        if not (low > -_OUTSIDE and high < 1 + _OUTSIDE):  # also if one is not a number
            raise ValueError(f"float images have values from 0 to 1, and this one from {low:g} to {high:g}")
        image = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    is_grey = image.ndim == 2
    if image.dtype != np.uint8 and not (is_grey and image.dtype in {np.dtype(np.bool_), np.dtype(np.uint16)}):
        raise ValueError(f"no encoding for an image of {image.dtype}, shape {image.shape}: use uint8, or floats 0 to 1")
    return np.ascontiguousarray(image)


def _for_netpbm(picture: Image, suffix: str) -> Image:
    """Return an image of a mode that its suffix stands for, if that is the same picture."""
    if suffix == "ppm" and picture.mode in {"L", "1"}:
        return picture.convert("RGB")
    if suffix == "pgm" and picture.mode == "1":
        return picture.convert("L")
    if picture.mode not in _NETPBM[suffix]:
        raise ValueError(f"an image of mode {picture.mode} is no {suffix}; convert it first, or write it as ppm or png")
    return picture
