"""The arithmetic of images that are turned, cut and scaled: which part of the stored pixels becomes which shape.

Sizes are (width, height), as image files have them; shapes are (height, width), as arrays have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .options import Crop

# By EXIF orientation (CIPA DC-008, tag 274), from stored to shown: whether rows and columns change places, and whether
# what then comes out is mirrored left to right, and top to bottom.
_TURNS: Final = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}
_INVERSES: Final = (0, 1, 2, 3, 4, 5, 8, 7, 6)
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_GAP: Final = 2.0


class Fit(NamedTuple):
    """How stored pixels become an array.

    Attributes:
        box: Left, top, right and bottom edge of the stored pixels that are used.
        size: What they are scaled to, before the turn; equal to the size of the box where nothing is scaled.
        orientation: How the result is turned then, 1 to 8.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]
    orientation: int

    @property
    def is_scaled(self) -> bool:
        """Whether any pixel is more than copied."""
        left, top, right, bottom = self.box
        return (right - left, bottom - top) != self.size

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in the end."""
        width, height = self.size
        return (width, height) if self.orientation >= 5 else (height, width)


def fit(
    size: tuple[int, int], orientation: int, shape: tuple[int, int] | None, crop: Crop = "center", seed: int = 0
) -> Fit:
    """Return how an image becomes a shape.

    It is turned, scaled by one factor to the smallest size that covers the shape, and cut; with the crop ``"none"``
    scaled by two factors and not cut. Where one side fits as it is, pixels are copied, from a whole place on.

    Args:
        size: Width and height as stored, in pixels.
        orientation: How it is to be turned, 1 to 8.
        shape: Height and width that are wanted, after the turn; None leaves both as they are.
        crop: Where it is cut.
        seed: Decides where, if that is ``"random"``.
    """
    if shape is None:
        return Fit((0, 0, *size), size, orientation)
    swapped, across, down = _TURNS[orientation]
    wide, high = size[::-1] if swapped else size
    height, width = shape
    left, top, right, bottom = 0.0, 0.0, float(wide), float(high)
    if crop != "none":
        # The side that decides is used whole, whatever a division rounds to.
        part_wide = wide if width * high >= height * wide else width * high / height
        part_high = high if width * high <= height * wide else height * wide / width
        is_copied = (part_wide, part_high) == (width, height)
        places = draws(seed) if crop == "random" else (0.5, 0.5)
        left, top = (
            _edge(whole - part, at, is_whole=is_copied, is_random=crop == "random")
            for whole, part, at in zip((wide, high), (part_wide, part_high), places, strict=True)
        )
        right, bottom = min(wide, left + part_wide), min(high, top + part_high)
    if across:
        left, right = wide - right, wide - left
    if down:
        top, bottom = high - bottom, high - top
    if swapped:
        left, top, right, bottom = top, left, bottom, right
        width, height = height, width
    return Fit((left, top, right, bottom), (width, height), orientation)


def _edge(spare: float, at: float, *, is_whole: bool, is_random: bool) -> float:
    """Return where a cut begins, if `spare` pixels are left over; each whole place is as likely as any other."""
    return float(int((spare + is_random) * at)) if is_whole else spare * at


def draws(seed: int) -> tuple[float, float]:
    """Return two numbers in ``[0, 1)`` that any seed decides, by SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = _mixed(seed * _GOLDEN & _MASK)
    first, second = (_mixed(state + step * _GOLDEN & _MASK) >> 11 for step in (1, 2))
    return first * 2.0**-53, second * 2.0**-53


def _mixed(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31


def jpeg_scale(fit: Fit) -> int:
    """Return by what a JPEG can be divided while it is decoded: 1, 2 or 4.

    A factor of at least 2 is left to the filter, as in Pillow's ``thumbnail``: so the result differs from that of the
    whole picture by less than one of 255 on average. Other factors of libjpeg-turbo take longer than no scaling, and 8
    saves hardly more than 4, at a larger error.
    """
    left, top, right, bottom = fit.box
    most = min((right - left) / fit.size[0], (bottom - top) / fit.size[1]) / _GAP
    return max(scale for scale in (1, 2, 4) if scale <= max(1, most))


def turned(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return a view of an array of shape (height, width, ...) turned as an orientation says."""
    swapped, across, down = _TURNS[orientation]
    if swapped:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if down else 1, :: -1 if across else 1]


def copy_turned(pixels: NDArray[np.uint8], orientation: int, out: NDArray[np.uint8]) -> None:
    """Write an array of shape (height, width, channels), turned, into another."""
    if orientation == 1:
        out[...] = pixels
        return
    # A pixel as one item of several bytes: numpy moves it at once, in less than half the time.
    pixel = np.dtype((np.void, pixels.shape[2]))
    out.view(pixel)[...] = turned(pixels.view(pixel), orientation)


def turned_back(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return a view that undoes `turned`."""
    return turned(pixels, _INVERSES[orientation])
