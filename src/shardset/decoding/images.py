"""Images out of payloads, in the form that a short word asks for: ``pil``, ``rgb8``, ``torchrgb`` and the others.

What comes out is what Pillow gives, pixel for pixel, with no turning by EXIF and no other look at metadata. JPEG goes
through simplejpeg where that is installed: the same libjpeg-turbo with the same settings (exact DCT, smooth
upsampling), without Pillow's way in and out. What simplejpeg will not decode or would decode otherwise (CMYK, grey from
colours, damaged files) goes to Pillow.
"""

from __future__ import annotations

import importlib
import io
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from shardset.errors import DecodeError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from .registry import Decode


class ImageSpec(NamedTuple):
    """The form that images are wanted in.

    Attributes:
        container: ``"numpy"`` for an array of shape (height, width, channels), ``"torch"`` for a tensor of shape
            (channels, height, width), ``"pil"`` for a Pillow image.
        depth: ``"uint8"`` for 0 to 255, ``"float"`` for float32 from 0 to 1; None for Pillow images.
        mode: ``"l"`` for grey, without the axis of the channels; ``"rgb"``; ``"rgba"``.
    """

    container: Literal["numpy", "torch", "pil"]
    depth: Literal["uint8", "float"] | None
    mode: Literal["l", "rgb", "rgba"]


IMAGE_SPECS: Final[Mapping[str, ImageSpec]] = {
    "l8": ImageSpec("numpy", "uint8", "l"),
    "rgb8": ImageSpec("numpy", "uint8", "rgb"),
    "rgba8": ImageSpec("numpy", "uint8", "rgba"),
    "l": ImageSpec("numpy", "float", "l"),
    "rgb": ImageSpec("numpy", "float", "rgb"),
    "rgba": ImageSpec("numpy", "float", "rgba"),
    "torchl8": ImageSpec("torch", "uint8", "l"),
    "torchrgb8": ImageSpec("torch", "uint8", "rgb"),
    "torchrgba8": ImageSpec("torch", "uint8", "rgba"),
    "torchl": ImageSpec("torch", "float", "l"),
    "torchrgb": ImageSpec("torch", "float", "rgb"),
    "torch": ImageSpec("torch", "float", "rgb"),
    "torchrgba": ImageSpec("torch", "float", "rgba"),
    "pill": ImageSpec("pil", None, "l"),
    "pil": ImageSpec("pil", None, "rgb"),
    "pilrgb": ImageSpec("pil", None, "rgb"),
    "pilrgba": ImageSpec("pil", None, "rgba"),
}
"""The words for `ImageSpec`, which are webdataset's."""

_PLUGINS: Final[Mapping[str, tuple[str, str | None]]] = {
    "avif": ("pillow_avif", None),
    "heic": ("pillow_heif", "register_heif_opener"),
    "heif": ("pillow_heif", "register_heif_opener"),
    "jxl": ("pillow_jxl", None),
}
"""Suffixes that Pillow needs a plugin for, or needed one, with the plugin's module and the function that sets it up."""

IMAGE_SUFFIXES: Final = (
    *("apng", "blp", "bmp", "bw", "cur", "dcx", "dds", "dib", "emf", "eps", "fit", "fits", "flc", "fli", "ftc", "ftu"),
    *("gbr", "gif", "icb", "icns", "ico", "iim", "im", "j2c", "j2k", "jfif", "jp2", "jpc", "jpe", "jpeg", "jpf", "jpg"),
    *("jpx", "msp", "pbm", "pcd", "pcx", "pgm", "png", "pnm", "ppm", "ps", "psd", "pxr", "ras", "rgb", "rgba", "sgi"),
    *("tga", "tif", "tiff", "vda", "vst", "webp", "wmf", "xbm", "xpm", *_PLUGINS),
)
"""Suffixes of images: webdataset's list without those that Pillow knows and cannot read (bufr, grib, h5, hdf, mpeg,
mpg), and with avif, heic, heif and jxl, which are read where Pillow or a plugin of it does."""

_POSTSCRIPT: Final = frozenset({"EPS"})
_FROM_COLOURS: Final = frozenset({"YCbCr", "RGB", "Gray"})


def find_spec(word: str) -> ImageSpec:
    """Return what a word such as ``"rgb8"`` asks for.

    Raises:
        ValueError: It is none of `IMAGE_SPECS`, which are all in lower case.
    """
    spec = IMAGE_SPECS.get(word)
    if spec is None:
        meant = f"; did you mean {word.lower()!r}?" if word.lower() in IMAGE_SPECS else ""
        raise ValueError(f"unknown image spec {word!r}: it is none of {', '.join(IMAGE_SPECS)}{meant}")
    return spec


def image_decoder(word: str) -> Decode:
    """Return the function that decodes payloads as a word asks for.

    Raises:
        ValueError: As `find_spec`.
    """
    return partial(decode_image, spec=find_spec(word))


def image_decoders(word: str, suffixes: Iterable[str] = IMAGE_SUFFIXES) -> dict[str, Decode]:
    """Return decoders of images for a registry, by suffix: ``USUAL.extended(image_decoders("rgb8"))``.

    Left out are suffixes that nothing here can read.

    Raises:
        ValueError: As `find_spec`.
    """
    decode = image_decoder(word)
    return {suffix: decode for suffix in suffixes if is_readable(suffix)}


def is_readable(suffix: str) -> bool:
    """Tell whether a suffix that may need a plugin of Pillow has it. The plugin is set up if it is installed."""
    plugin = _PLUGINS.get(suffix)
    if plugin is None:
        return True
    try:
        image = _pillow()
    except MissingExtraError:
        return True  # which will be said when one is to be decoded
    image.init()
    if image.EXTENSION.get(f".{suffix}") in image.OPEN:
        return True
    name, setup = plugin
    try:
        module = importlib.import_module(name)
    except ImportError:
        return False
    if setup is not None:
        getattr(module, setup)()
    return True


def decode_image(payload: bytes, spec: ImageSpec) -> Any:
    """Return the image of a payload.

    Args:
        payload: A whole file of any format that Pillow reads; what it is, its first bytes say.
        spec: The form that is wanted.

    Returns:
        An array or a tensor, writable and in one piece, or a Pillow image with its pixels loaded.

    Raises:
        DecodeError: It has more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``, which Pillow by itself warns of only, or
            is PostScript, which would start a program.
        MissingExtraError: Pillow is not installed, or torch where it is asked for.
        ValueError: Or an OSError, or what else Pillow raises on files that it cannot read.
    """
    if spec.container == "pil":
        return _converted(_open(payload), spec.mode.upper())
    pixels = _decode_jpeg(payload, spec.mode) if payload[:3] == b"\xff\xd8\xff" else None
    if pixels is None:
        pixels = np.array(_converted(_open(payload), spec.mode.upper()))
    if spec.depth == "float":
        pixels = pixels.astype(np.float32) / 255.0
    return pixels if spec.container == "numpy" else _as_tensor(pixels)


def _decode_jpeg(payload: bytes, mode: str) -> NDArray[Any] | None:
    """Return the pixels of a JPEG; None where Pillow has to see to it."""
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(payload)
    except ValueError:
        return None
    if colours not in _FROM_COLOURS or (mode == "l" and colours != "Gray"):
        return None
    _check_pixels(width, height, _pillow().MAX_IMAGE_PIXELS)
    try:
        pixels: NDArray[Any] = simplejpeg.decode_jpeg(payload, "GRAY" if mode == "l" else mode.upper())
    except ValueError:  # whether it is damaged too badly is for Pillow to say
        return None
    return pixels[:, :, 0] if mode == "l" else pixels


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingExtraError("images are decoded by Pillow", extra="images") from error
    return PIL.Image


def _open(payload: bytes, most_pixels: int | None = None) -> Any:
    """Return a Pillow image with its pixels loaded, if it has no more than `most_pixels` and than Pillow allows."""
    pillow = _pillow()
    limit = min((limit for limit in (most_pixels, pillow.MAX_IMAGE_PIXELS) if limit is not None), default=None)
    open_image: Callable[[io.BytesIO], Any] = pillow.open
    try:
        try:
            image = open_image(io.BytesIO(payload))
        except pillow.UnidentifiedImageError:
            # Pillow first tries its five most usual formats, and loads the others once. Two threads that come here
            # together for the first time may each take the other for done with it: so load them, and try again.
            pillow.init()
            image = open_image(io.BytesIO(payload))
        if image.format in _POSTSCRIPT:
            raise DecodeError(
                "the image is PostScript, which Pillow has a program of its own draw",
                hint='where the data is trusted, name a function: wds.handle_extension("eps ps", ...)',
            )
        _check_pixels(image.width, image.height, limit)
        image.load()
        _check_pixels(image.width, image.height, limit)  # an icon may hold a larger one than it says
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise DecodeError(str(error).partition(", could be")[0], hint=_BOMB_HINT) from error
    return image


def _converted(image: Any, mode: str) -> Any:
    """Return a plain image of a mode."""
    if image.mode == mode:
        # What convert gives then, but for its copy of the pixels: nobody else has this image.
        return image._new(image.im)  # noqa: SLF001 - what Pillow's own methods and plugins end with
    return image.convert(mode)


def _check_pixels(width: int, height: int, limit: int | None) -> None:
    if limit is not None and width * height > limit:
        message = f"the image has {width} x {height} = {width * height} pixels, and the limit is {limit}"
        raise DecodeError(message, hint=_BOMB_HINT)


_BOMB_HINT: Final = "if it is meant to be this large, set PIL.Image.MAX_IMAGE_PIXELS"


def _as_tensor(pixels: NDArray[Any]) -> Any:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("images as tensors need torch", extra="torch") from error
    return torch.from_numpy(np.ascontiguousarray(pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)))
