"""Images of a batch, each decoded by whichever thread comes to it straight into its place in one array.

A JPEG comes out as Pillow would have it, pixel for pixel, where no size is asked for. A header is read once to make
room, and never trusted: the decoder is given room for what it said and no more, and an image that turns out to be
another size is an error.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import DecodeError
from shardset.formats.geometry import TURNED_BY_FORMAT, Geometry, parse_geometry

from .field_batch import not_a_payload, payload_of, stack
from .images import _converted, _open, _pillow
from .options import CHANNELS
from .shaping import copy_turned, fit, jpeg_scale, turned_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from .options import Decode
    from .shaping import Fit
    from .slabs import Slabs

    Pixels = NDArray[np.uint8]

_TURNED_BY_PILLOW: Final = (TURNED_BY_FORMAT - {"avif"}) | {"tiff"}
"""Kinds that come out of Pillow and its plugins as they are shown: of AVIF, libavif leaves it to its caller."""


_MODES: Final[Mapping[str, str]] = {"l": "GRAY", "rgb": "RGB", "rgba": "RGBA"}
"""What simplejpeg calls modes."""
_HEADS: Final = 15
"""Beginnings of JPEGs that are remembered beside the newest: encoders write few different ones."""
_LONGEST_HEAD: Final = 8192
"""Bytes of them: longer ones hold a preview or the like, and no other image begins so."""
_FEW: Final = 8
"""Images whose headers are always read first: that costs little, and single images may well have a shape each."""


class Target(NamedTuple):
    """What is to be made of one image.

    Attributes:
        shape: Height and width; None for its own.
        seed: Decides where it is cut.
        out: Where it goes, if it is of this shape; contiguous.
    """

    shape: tuple[int, int] | None
    seed: int
    out: Pixels | None = None

    def room(self, shape: tuple[int, ...]) -> Pixels:
        """Return where an image of a shape goes."""
        return self.out if self.out is not None and self.out.shape == shape else np.empty(shape, np.uint8)


def shown_shape(geometry: Geometry, options: Decode) -> tuple[int, int]:
    """Return height and width that an image of this geometry comes out with where no size is asked for."""
    if options.orient or geometry.kind in TURNED_BY_FORMAT - {"avif"}:
        return geometry.display_size[::-1]
    return geometry.height, geometry.width


def decode_shaped(
    payload: Any,
    geometry: Geometry | None,
    options: Decode,
    target: Target,
    slabs: Slabs,
) -> Pixels:
    """Return an image as an array of shape (height, width, channels).

    Args:
        payload: The whole file.
        geometry: What its header says; None if that is not known.
        options: How it comes out; its size and its fields are not looked at.
        target: The shape that it gets, and where it goes.
        slabs: Where memory for what lies between comes from.

    Raises:
        DecodeError: It has more pixels than it may have, or other sides than its header says.
        MissingExtraError: Pillow is not installed.
        ValueError: Or an OSError, or what else Pillow raises on files that it cannot read.
    """
    if geometry is not None:
        _check_pixels(geometry, options.max_pixels)
        if geometry.kind == "jpeg":
            pixels = _decode_jpeg(payload, geometry, options, target, slabs)
            if pixels is not None:
                return pixels
    image = _converted(_open(payload, options.max_pixels), options.mode.upper())
    orientation = geometry.orientation if geometry else 1
    is_turned = geometry is not None and geometry.kind in _TURNED_BY_PILLOW
    if geometry is not None:
        _check_size(geometry, image.size, geometry.display_size if is_turned else (geometry.width, geometry.height))
    if is_turned and geometry is not None and geometry.kind == "tiff" and not options.orient and orientation > 1:
        image = _pillow().fromarray(np.ascontiguousarray(turned_back(np.asarray(image), orientation)))
    plan = fit(
        image.size, 1 if is_turned or not options.orient else orientation, target.shape, options.crop, target.seed
    )
    return _finish(image, plan, options, target)


def is_as_stored(geometry: Geometry, options: Decode, shape: tuple[int, int] | None) -> bool:
    """Tell whether an image is a JPEG whose array is what libjpeg gives: not scaled, cut, turned, or made grey."""
    return (
        geometry.kind == "jpeg"
        and (geometry.components == 1 or (geometry.components == 3 and options.mode != "l"))
        and (geometry.orientation == 1 or not options.orient)
        and shape in {None, (geometry.height, geometry.width)}
    )


def _decode_jpeg(
    payload: Any,
    geometry: Geometry,
    options: Decode,
    target: Target,
    slabs: Slabs,
) -> Pixels | None:
    """Return the image of a JPEG; None where Pillow has to see to it."""
    simplejpeg = _simplejpeg()
    # Colours of four components come out of simplejpeg otherwise than out of Pillow.
    if simplejpeg is None or geometry.components not in {1, 3}:
        return None
    width, height = size = (geometry.width, geometry.height)
    orientation = geometry.orientation if options.orient else 1
    is_grey = options.mode == "l" and geometry.components == 3  # which Pillow makes of colours, and libjpeg otherwise
    mode = "RGB" if is_grey else _MODES[options.mode]
    channels = 3 if is_grey else CHANNELS[options.mode]
    if is_as_stored(geometry, options, target.shape):
        out = target.room((height, width, channels))
        return out if _decode_into(payload, mode, out, {}) else None
    plan = fit(size, orientation, target.shape, options.crop, target.seed)
    by = 1 if options.interpolation == "nearest" else jpeg_scale(plan)
    width, height = -(-width // by), -(-height // by)
    pixels = slabs.take((height, width, channels))
    if not _decode_into(payload, mode, pixels, {} if by == 1 else {"min_width": width, "min_height": height}):
        return None
    if by > 1:
        left, top, right, bottom = plan.box
        plan = plan._replace(box=(left / by, top / by, right / by, bottom / by))
    if plan.is_scaled or is_grey:
        image = _pillow().fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        return _finish(_converted(image, "L") if is_grey else image, plan, options, target)
    return _cut(pixels, plan, target)


@cache  # looked for once: an import statement costs as much as all else here
def _simplejpeg() -> Any:
    """Return simplejpeg; None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _decode_into(payload: Any, mode: str, pixels: Pixels, scaling: dict[str, int]) -> bool:
    """Decode a JPEG into an array, and tell whether it could be: whether it is too damaged is for Pillow to say."""
    try:
        written = _simplejpeg().decode_jpeg(payload, mode, buffer=pixels, **scaling)
    except ValueError:
        return False
    return bool(written.shape == pixels.shape)


def _finish(image: Any, plan: Fit, options: Decode, target: Target) -> Pixels:
    """Return a Pillow image of the right mode, cut, scaled and turned."""
    if plan.is_scaled:
        resampling = getattr(_pillow().Resampling, options.interpolation.upper())
        image = image.resize(plan.size, resampling, plan.box)
        plan = plan._replace(box=(0, 0, *plan.size))
    pixels = np.asarray(image)
    return _cut(pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels, plan, target)


def _cut(pixels: Pixels, plan: Fit, target: Target) -> Pixels:
    out = target.room((*plan.shape, pixels.shape[2]))
    left, top, right, bottom = map(int, plan.box)
    copy_turned(pixels[top:bottom, left:right], plan.orientation, out)
    return out


def _check_pixels(geometry: Geometry, limit: int) -> None:
    width, height = geometry.width, geometry.height
    if width * height > limit:
        raise DecodeError(
            f"the image has {width} x {height} = {width * height} pixels, and the limit is {limit}",
            hint="if it is meant to be this large, set Decode(max_pixels=...)",
        )


def _check_size(geometry: Geometry, size: tuple[int, int], wanted: tuple[int, int]) -> None:
    if size != wanted:
        raise DecodeError(
            f"the header of the {geometry.kind} says {wanted[0]} x {wanted[1]} pixels, "
            f"and it decodes to {size[0]} x {size[1]}"
        )


class Seen:
    """What the images of a field have been like so far, for those to come. Threads may share it.

    Attributes:
        shape: Height and width of all images of the batch before; None if they had several.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None
        self._heads: tuple[tuple[bytes, ...], int, tuple[int, int] | None] = ((), 0, None)

    def remember(self, head: bytes, shape: tuple[int, int]) -> None:
        """Remember how a JPEG begins that comes out in a shape just as it is stored."""
        heads, longest, of = self._heads
        if len(head) <= _LONGEST_HEAD:
            self._heads = (*heads[-_HEADS:], head) if of == shape else (head,), max(longest, len(head)), shape

    def knows(self, payload: Any, shape: tuple[int, int]) -> bool:
        """Tell whether a payload begins like one that came out in a shape just as it is stored, and so does too."""
        heads, longest, of = self._heads
        return of == shape and bytes(payload[:longest]).startswith(heads)


class ImageBatch:
    """The images of one field of a batch: an array if all have one shape, else a list.

    Before the first one is decoded, its room is made: in the shape that was asked for, or that the batch before had, or
    that the headers tell, which are read now. Otherwise each header is read by the thread that decodes the image: while
    one thread reads all of them, the others cannot begin.

    Args:
        options: How they come out.
        payloads: One a place.
        shape: Height and width that they are wanted in; None for what the options say.
        slabs: Where memory comes from.
        seen: What images of the field have been like; kept up to date.
    """

    def __init__(
        self,
        options: Decode,
        payloads: Sequence[Any],
        shape: tuple[int, int] | None,
        slabs: Slabs,
        seen: Seen | None = None,
    ) -> None:
        self._options = options
        self._shape = shape or options.shape
        self._slabs = slabs
        self._seen = Seen() if seen is None else seen
        self._payloads = [payload_of(payload) or b"" for payload in payloads]
        self._headers: list[Geometry | None] | None = None
        self._slab = self._make_slab()
        self._values: list[Any] = [None] * len(payloads)
        self._in_slab = bytearray(len(payloads))

    def _make_slab(self) -> Pixels | None:
        expected = self._shape or self._seen.shape
        if expected is None:
            limit = self._options.max_pixels
            self._headers = [parse_geometry(payload) for payload in self._payloads]
            known = (each for each in self._headers if each is not None and each.width * each.height <= limit)
            shapes = {shown_shape(each, self._options) for each in known}
            if len(shapes) != 1:
                return None
            (expected,) = shapes
        try:
            return self._slabs.take((len(self._payloads), *expected, CHANNELS[self._options.mode]))
        except MemoryError:  # headers can say anything
            return None

    def decode(self, place: int, payload: Any, seed: int) -> None:
        """As `FieldBatch.decode`, with the errors of `decode_shaped`."""
        self._in_slab[place] = False
        given, payload = payload, payload_of(payload)
        if payload is None:
            raise not_a_payload(given)
        slot = None if self._slab is None else self._slab[place]
        mode = _MODES[self._options.mode]
        if slot is not None and self._seen.knows(payload, slot.shape[:2]) and _decode_into(payload, mode, slot, {}):
            pixels = slot
        else:
            headers = self._headers if payload is self._payloads[place] else None
            geometry = parse_geometry(payload) if headers is None else headers[place]
            pixels = decode_shaped(payload, geometry, self._options, Target(self._shape, seed, slot), self._slabs)
            if pixels is slot and geometry is not None and is_as_stored(geometry, self._options, self._shape):
                self._seen.remember(bytes(payload[: geometry.head_bytes]), slot.shape[:2])
        self._values[place] = pixels
        self._in_slab[place] = pixels is slot

    def put(self, place: int, value: Any) -> None:
        """As `FieldBatch.put`."""
        slot = None if self._slab is None else self._slab[place]
        self._in_slab[place] = False
        if (
            slot is not None
            and isinstance(value, np.ndarray)
            and (value.shape, value.dtype) == (slot.shape, slot.dtype)
        ):
            slot[...] = value
            self._values[place], self._in_slab[place] = slot, True
        else:
            self._values[place] = value

    def value(self, place: int) -> Any:
        """As `FieldBatch.value`."""
        return self._values[place]

    def finish(self) -> Any:
        """As `FieldBatch.finish`."""
        self._payloads, self._headers = [], None
        is_whole = self._slab is not None and all(self._in_slab)
        # A wrong guess costs a copy, so that the next batch is not guessed.
        is_known = is_whole and self._shape is None and len(self._values) >= _FEW
        self._seen.shape = self._slab.shape[1:3] if is_known and self._slab is not None else None
        return self._slab if is_whole else stack(self._values)
