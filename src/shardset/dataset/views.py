"""How the samples of a selection are to be grouped into batches: by size, or into packs by length.

These are values and compute nothing; `shardset.loading` does as they say.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    from .dataset import Dataset
    from .select import Selection

Leftovers = Literal["drop", "pad", "merge"]
Crop = Literal["center", "random"]
_MOST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of images of one size: all images of a batch are resized and cropped to the size of its bucket.

    Attributes:
        area: Pixels. The size in which an image is shown is scaled to about this area, with its shape kept, and each
            side is rounded to a `multiple`; images that come to the same size are one bucket. None: shown sizes are
            the buckets as they are, and nothing is resized.
        multiple: Pixels; sides of buckets are multiples of this, and at least one. Of no effect without `area`.
        unit: Samples of one bucket that come in a row. It must be a multiple of each global batch (batch size times
            world size) that is to read the same order. None: the global batch of the first loader.
        leftovers: What becomes of the samples of a bucket that fill no unit: ``"drop"`` leaves them out of the epoch,
            ``"pad"`` fills the unit with samples of the bucket again, ``"merge"`` moves them to the bucket that is
            nearest in shape.
        crop: Which part of an image is kept where its shape is not quite that of the bucket: ``"center"``, or
            ``"random"``, another one in each epoch.
    """

    area: int | None = None
    multiple: int = 64
    unit: int | None = None
    leftovers: Leftovers = "drop"
    crop: Crop = "center"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: A number is not positive, or a word is none of those there are.
            TypeError: A number is no integer.
        """
        for name, unit in (("area", "pixels"), ("multiple", "pixels"), ("unit", "samples")):
            if name == "multiple" or getattr(self, name) is not None:
                _set_positive(self, name, unit)
        _check_word("leftovers", self.leftovers, get_args(Leftovers))
        _check_word("crop", self.crop, get_args(Crop))


@dataclass(frozen=True, slots=True)
class Pack:
    """Packs of samples whose lengths together fit a size, such as texts that share one sequence of tokens.

    Attributes:
        length: Name of the column that has the length of each sample: a number in whatever unit `size` is in.
        size: The most that the lengths of a pack add up to.
        window: How many samples in a row, in the order of the loader, packs are formed of.
    """

    length: str
    size: int
    window: int = 1024

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: A number is not positive, or the name is empty.
            TypeError: A number is no integer, or the name is no text.
        """
        if not isinstance(self.length, str):
            raise TypeError(f"length is the name of a column, not {self.length!r}")
        if not self.length:
            raise ValueError("length is the name of a column, and is empty")
        _set_positive(self, "size", f"in the unit of the column {self.length!r}")
        _set_positive(self, "window", "samples")


@dataclass(frozen=True, slots=True)
class Bucketed:
    """Samples that a loader gives in batches of one image size. Made by `Selection.bucketed`.

    It has no length: how many batches there are depends on what a loader makes of the leftovers.

    Attributes:
        view: The samples.
        buckets: How they are grouped.
    """

    view: Selection
    buckets: Buckets

    @property
    def dataset(self) -> Dataset:
        """The dataset that the samples are of."""
        return self.view.dataset


@dataclass(frozen=True, slots=True)
class Packed:
    """Samples that a loader gives in packs. Made by `Selection.packed`.

    It has no length: how many packs there are depends on the order of the samples.

    Attributes:
        view: The samples.
        pack: How they are packed.
    """

    view: Selection
    pack: Pack

    @property
    def dataset(self) -> Dataset:
        """The dataset that the samples are of."""
        return self.view.dataset


def _set_positive(value: object, name: str, unit: str) -> None:
    """Make an attribute a plain integer, whatever kind of integer it is, and check it."""
    given: Any = getattr(value, name)
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} is an integer ({unit}), not {given!r}") from None
    if isinstance(given, bool) or not 0 < number < _MOST:
        raise ValueError(f"{name} must be a positive integer ({unit}), not {given!r}")
    object.__setattr__(value, name, number)


def _check_word(name: str, word: object, words: tuple[str, ...]) -> None:
    if word not in words:
        raise ValueError(f"{name} must be {', '.join(map(repr, words[:-1]))} or {words[-1]!r}, not {word!r}")
